"""Builds of a tiny real tree with cmake: what is installed, what is kept, and how each step fails."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time

import archives
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives as prebuilt
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import building, smoke_test, store

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("untried")]

KNOWN_COMPILER = """
cmake_minimum_required(VERSION 3.14)
set(CMAKE_C_COMPILER_FORCED TRUE)
set(CMAKE_C_COMPILER_ID_RUN TRUE)
set(CMAKE_C_COMPILER_ID GNU)
"""
"""What cmake would try with the compiler, and ask it, takes twice as long as the build."""
CMAKE = (
    KNOWN_COMPILER
    + """
project(tiny C)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(ggml-rpc-server worker.c)
add_executable(llama-server server.c)
target_compile_definitions(llama-server PRIVATE COMMIT="${LLAMA_BUILD_COMMIT}")
"""
)
WORKER = '#include <stdio.h>\nint main(void) { puts("usage:\\n  -d, --device D\\n  -c, --cache"); return 0; }\n'
SERVER = '#include <stdio.h>\nint main(void) { puts("usage:\\n--fit [on|off]  x\\n--load-mode MODE  x\\n" COMMIT); return 0; }\n'


def write_tree(place):
    folder = place / "tree" / "package-1" / "vendor" / "llama.cpp"
    folder.mkdir(parents=True)
    for name, text in (("CMakeLists.txt", CMAKE), ("worker.c", WORKER), ("server.c", SERVER)):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path)


def pack(tree, tmp_path):
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tree.parents[1], "package-1")
    return archive


def builder(tmp_path, archive, patches=(), **build):
    source = {
        "archive": str(archive),
        "sha256": sha256(archive),
        "member": "package-1/vendor/llama.cpp",
        "commit": "abc1234def567",
        "number": 7,
        "patches": [{"name": path.name, "path": str(path), "sha256": sha256(path)} for path in patches],
    }
    planned = {
        "id": "tiny",
        "builder": "head",
        "cmake_options": {"CMAKE_BUILD_TYPE": "Release"},
        "environment": {},
        "targets": ["ggml-rpc-server", "llama-server"],
        **build,
    }
    return building.Builder(str(tmp_path / "prefix"), str(tmp_path / "cache"), planned, source, None)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source of a release, and what its installation left there."""
    place = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(smoke_test, "check", lambda *_arguments: None)
        builder(place, pack(write_tree(place), place)).install()
    return place


@pytest.fixture
def installed(tmp_path, built):
    """The builder of a release that is installed."""
    shutil.copytree(built, tmp_path, symlinks=True, dirs_exist_ok=True)
    return builder(tmp_path, tmp_path / "source.tar.gz")


def said(release):
    return subprocess.run([release / "bin" / "llama-server"], capture_output=True, text=True, check=True).stdout


def test_a_tree_that_asks_git_is_told_its_number_and_commit(tmp_path, tree):
    (tree / "common").mkdir()
    (tree / "common" / "build-info.cpp.in").write_text(
        "@BUILD_NUMBER@ @BUILD_COMMIT@ @LLAMA_BUILD_NUMBER@ @BUILD_TARGET@"
    )
    (tree / "CMakeLists.txt").write_text(
        CMAKE.replace("${LLAMA_BUILD_COMMIT}", "${NAMED}").replace(
            "add_exe", "file(READ common/build-info.cpp.in NAMED)\nadd_exe", 1
        )
    )
    builder(tmp_path, pack(tree, tmp_path)).install()
    printed = said(tmp_path / "prefix" / "releases" / "tiny")
    assert printed.endswith("7 abc1234d @LLAMA_BUILD_NUMBER@ @BUILD_TARGET@\n")


def test_a_build_is_installed_with_a_manifest(tmp_path, tree):
    manifest = builder(tmp_path, pack(tree, tmp_path)).install()
    release = tmp_path / "prefix" / "releases" / "tiny"
    assert json.loads((release / "manifest.json").read_text()) == manifest
    assert set(manifest["files"]) == {"bin/ggml-rpc-server", "bin/llama-server"}
    assert manifest["options"] == {
        "ggml-rpc-server": {"known": {"-c": False, "--cache": False, "-d": True, "--device": True}, "removed": {}},
        "llama-server": {"known": {"--fit": True, "--load-mode": True}, "removed": {}},
    }
    assert said(release).endswith("abc1234d\n")
    assert store.installed(release) == manifest
    assert not (tmp_path / "cache" / "builds" / "tiny").exists()
    assert [path.name for path in release.parent.iterdir()] == ["tiny"]


def test_a_source_that_is_newer_than_the_clock_is_built(tmp_path, tree):
    """ninja would write its own file again and again: the clock of a host may be late."""
    for path in tree.rglob("*"):
        os.utime(path, (time.time() + 86400, time.time() + 86400))
    assert builder(tmp_path, pack(tree, tmp_path)).install()["files"]


def test_a_release_counts_as_used_only_when_it_is_put_to_use(tmp_path, tree):
    builder(tmp_path, pack(tree, tmp_path)).install()
    assert (tmp_path / "prefix" / "releases" / "tiny").stat().st_mtime == 0


def test_an_installed_release_is_left_alone(tmp_path, installed):
    program = tmp_path / "prefix/releases/tiny/bin/llama-server"
    before = program.stat().st_mtime_ns
    installed.install()
    assert program.stat().st_mtime_ns == before


def test_a_damaged_release_is_built_again(tmp_path, installed):
    program = tmp_path / "prefix/releases/tiny/bin/llama-server"
    program.write_bytes(program.read_bytes()[:-1])
    (program.parent / "libggml-old.so").touch()
    assert store.installed(program.parents[1]) is None
    installed.install()
    assert store.installed(program.parents[1])
    assert not (program.parent / "libggml-old.so").exists()


def test_only_the_targets_are_built(tmp_path, tree):
    (tree / "server.c").write_text("this is no C")
    manifest = builder(tmp_path, pack(tree, tmp_path), targets=["ggml-rpc-server"]).install()
    assert set(manifest["files"]) == {"bin/ggml-rpc-server"}


def test_an_option_that_the_tree_does_not_know_is_reported(tmp_path, tree):
    manifest = builder(tmp_path, pack(tree, tmp_path), cmake_options={"GGML_NO_SUCH_THING": "ON"}).install()
    assert manifest["options_ignored"] == ["GGML_NO_SUCH_THING"]


def test_another_archive_than_planned(tmp_path, tree):
    archive = pack(tree, tmp_path)
    one = builder(tmp_path, archive)
    one.source["sha256"] = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(building.BuildError, match="does not have the sha256"):
        one.install()
    assert not (tmp_path / "prefix").exists()


def test_an_archive_without_a_tree(tmp_path, tree):
    (tree / "CMakeLists.txt").unlink()
    with pytest.raises(building.BuildError, match=r"CMakeLists\.txt is missing"):
        builder(tmp_path, pack(tree, tmp_path)).install()


def test_an_archive_that_is_none(tmp_path):
    archive = tmp_path / "source.tar.gz"
    archive.write_bytes(b"no archive")
    with pytest.raises(building.BuildError, match="unpack failed"):
        builder(tmp_path, archive).install()


def test_a_configuration_error_names_the_step_and_shows_the_log(tmp_path, tree):
    (tree / "CMakeLists.txt").write_text(
        'cmake_minimum_required(VERSION 3.14)\nproject(x C)\nmessage(FATAL_ERROR "no such toolkit")\n'
    )
    with pytest.raises(building.BuildError, match=r"(?s)configure failed.*tiny\.log.*no such toolkit"):
        builder(tmp_path, pack(tree, tmp_path)).install()


def test_a_configuration_that_failed_is_begun_anew(tmp_path, tree):
    """cmake remembers what it found out of a compiler."""
    asking = CMAKE + 'if(NOT DEFINED FOUND)\nset(FOUND "$ENV{WHERE}" CACHE STRING "")\nendif()\n'
    (tree / "CMakeLists.txt").write_text(
        asking + 'if(NOT FOUND STREQUAL "right")\nmessage(FATAL_ERROR "no")\nendif()\n'
    )
    archive = pack(tree, tmp_path)
    with pytest.raises(building.BuildError, match="configure failed"):
        builder(tmp_path, archive, environment={"WHERE": "wrong"}).install()
    assert builder(tmp_path, archive, environment={"WHERE": "right"}).install()["id"] == "tiny"


def test_a_compile_error_leaves_nothing_installed_and_the_next_run_goes_on(tmp_path, tree):
    (tree / "server.c").write_text("this is no C")
    one = builder(tmp_path, pack(tree, tmp_path))
    with pytest.raises(building.BuildError, match="compile failed"):
        one.install()
    assert not one.release.exists()
    (one.work / "source" / "server.c").write_text(SERVER)
    one.install()
    assert (one.release / "manifest.json").exists()


def test_a_full_disk_is_named(tmp_path, tree, monkeypatch):
    one = builder(tmp_path, pack(tree, tmp_path))
    monkeypatch.setattr(
        one, "_unpack", lambda: one._run("unpack", ["sh", "-c", "echo tar: No space left on device; exit 2"])
    )
    with pytest.raises(building.BuildError, match=r"disk of .* is full"):
        one.install()


def test_a_program_that_does_not_run_is_no_release(tmp_path, tree):
    (tree / "server.c").write_text("int main(void) { return 3; }\n")
    one = builder(tmp_path, pack(tree, tmp_path))
    with pytest.raises(building.BuildError, match="llama-server does not run on this host"):
        one.install()
    assert not one.release.exists()


def test_a_program_is_asked_where_every_account_may_be(tmp_path, tree, monkeypatch):
    (tree / "server.c").write_text(
        '#include <stdio.h>\n#include <unistd.h>\nint main(void) { char at[99]; puts(getcwd(at, 99)[1] ? at : "usage"); return 0; }\n'
    )
    monkeypatch.chdir(tmp_path)
    assert builder(tmp_path, pack(tree, tmp_path)).install()


def test_a_second_builder_waits_and_then_finds_the_release(tmp_path, tree):
    archive = pack(tree, tmp_path)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(builder(tmp_path, archive).install())) for _index in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]


def test_a_lock_that_was_removed_while_it_was_taken_is_taken_anew(tmp_path, monkeypatch):
    path = tmp_path / "x.lock"
    flock = fcntl.flock

    def removed_first(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        flock(file, how)
        path.unlink()

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with store.lock(path) as held:
        assert os.path.samestat(os.fstat(held.fileno()), path.stat())
        assert store.lock(path) is None
    store.lock(path).close()


SLOW_CMAKE = (
    CMAKE + "add_custom_target(slow COMMAND sleep 30 COMMAND touch ended)\nadd_dependencies(llama-server slow)\n"
)


def test_what_a_killed_module_left_running_keeps_the_lock(tmp_path, tree):
    """The module is killed, and ninja goes on. The next run says whom it waits for, and goes on when that one has ended."""
    (tree / "CMakeLists.txt").write_text(SLOW_CMAKE)
    one = builder(tmp_path, pack(tree, tmp_path))
    lock = tmp_path / "cache" / "builds" / "tiny.lock"
    module = os.fork()
    if not module:
        try:
            one.install()
        finally:
            os._exit(0)
    until(lambda: [pid for pid in locks.holders(lock) if "sleep" in command_of(pid)])
    os.kill(module, signal.SIGKILL)
    os.waitpid(module, 0)
    left = locks.holders(lock)
    assert {command_of(pid)[0].rsplit("/", 1)[-1] for pid in left} >= {"cmake", "ninja", "sleep"}
    assert store.under_way(str(tmp_path / "cache"), "tiny")
    assert not store.clear_build(str(tmp_path / "cache"), "tiny")
    (tree / "CMakeLists.txt").write_text(CMAKE)
    installed = []
    waiting = threading.Thread(target=lambda: installed.append(builder(tmp_path, pack(tree, tmp_path)).install()))
    waiting.start()
    until(lambda: "== waiting for process " in one.log.read_text())
    assert re.search(building.STEP_LINES, one.log.read_text().splitlines()[-1])
    assert set(re.findall(r"\d+", one.log.read_text().split("== waiting")[1])) & set(map(str, left))
    assert not installed
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    waiting.join()
    assert installed[0]["id"] == "tiny"
    assert locks.holders(lock) == []


def until(condition):
    while not condition():
        time.sleep(0.05)


def command_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] or ["ended"]
    except OSError:
        return ["ended"]


def test_a_lock_that_is_held_for_ever_names_its_holder(tmp_path, tree, monkeypatch):
    one = builder(tmp_path, pack(tree, tmp_path))
    one.log.parent.mkdir(parents=True)
    monkeypatch.setattr(building, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(building, "LOCK_POLL_SECONDS", 0.05)
    path = tmp_path / "cache" / "builds" / "tiny.lock"
    with store.lock(path), pytest.raises(building.BuildError) as ended:
        one.install()
    assert str(ended.value) == (
        f"process {os.getpid()} on this host has the lock {path}, and {one.log} has not grown for 0.0 minutes: end it, and run the playbook again"
    )
    assert one.install()["id"] == "tiny"


def test_a_build_whose_log_grows_is_waited_for(tmp_path, tree, monkeypatch):
    one = builder(tmp_path, pack(tree, tmp_path))
    one.log.parent.mkdir(parents=True)
    monkeypatch.setattr(building, "LOCK_SECONDS", 0.5)
    monkeypatch.setattr(building, "LOCK_POLL_SECONDS", 0.05)
    held = store.lock(tmp_path / "cache" / "builds" / "tiny.lock")

    def build():
        for _step in range(10):
            time.sleep(0.1)
            with one.log.open("a") as log:
                log.write("[1/2]\n")
        held.close()

    other = threading.Thread(target=build)
    other.start()
    assert one.install()["id"] == "tiny"
    other.join()


@pytest.mark.parametrize("torn", ["source/server.c", "build/bin/llama-server"])
def test_what_a_power_cut_has_torn_is_not_believed(tmp_path, tree, monkeypatch, torn):
    """Files are empty whose content had not been written, and marks beside them say that they are whole."""
    monkeypatch.setattr(building, "_boot", lambda: "first")
    archive = pack(tree, tmp_path)
    with pytest.raises(building.BuildError, match="compile failed"):
        builder(tmp_path, archive, targets=["llama-server", "no-such-target"]).install()
    one = builder(tmp_path, archive)
    one._lock = 0
    if torn.startswith("build"):
        one._run("compile", ["cmake", "--build", "build", "--target", "llama-server"])
    written = (one.work / torn).stat()
    assert written.st_size
    os.truncate(one.work / torn, 0)
    os.utime(one.work / torn, ns=(written.st_atime_ns, written.st_mtime_ns))
    monkeypatch.setattr(building, "_boot", lambda: "second")
    assert one.install()["id"] == "tiny"
    assert said(one.release).endswith("abc1234d\n")


def test_each_start_of_the_system_has_a_name():
    assert building._boot() == building._boot() != ""


def receive(tmp_path, one, archive, recorded=None):
    """What another host installs."""
    other = building.Installer(str(tmp_path / "other"), one.build, None)
    return other.receive(str(archive), sha256(pathlib.Path(archive)), recorded or {})


def test_a_release_goes_to_another_host(tmp_path, installed):
    one, manifest = installed, store.installed(installed.release)
    archive = building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build)
    assert receive(tmp_path, one, archive) == {**manifest, "received": "head"}
    assert store.installed(tmp_path / "other" / "releases" / "tiny") == {**manifest, "received": "head"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another account")
def test_a_release_of_an_account_of_a_directory_service_is_packed(tmp_path, installed):
    os.chown(installed.release / store.MANIFEST, 1_200_000_000, -1)
    assert receive(
        tmp_path, installed, building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), installed.build)
    )


def test_a_release_is_packed_to_the_same_bytes(tmp_path, installed, monkeypatch):
    """A run that was killed may go on in the background, and packs while the next one copies."""
    one = installed
    first = sha256(pathlib.Path(building.pack(str(tmp_path / "prefix"), str(tmp_path / "one"), one.build)))
    monkeypatch.setattr(time, "time", lambda: 4711.0)
    again = building.pack(str(tmp_path / "prefix"), str(tmp_path / "another"), one.build)
    assert sha256(pathlib.Path(again)) == first


def test_a_release_goes_to_another_host_also_where_caches_were_removed(tmp_path, installed):
    one, manifest = installed, store.installed(installed.release)
    archive = building.pack(str(tmp_path / "prefix"), str(tmp_path / "gone"), one.build)
    assert receive(tmp_path, one, archive) == {**manifest, "received": "head"}


def test_a_program_that_cannot_be_copied_is_named_with_the_reason(tmp_path, tree, monkeypatch):
    one = builder(tmp_path, pack(tree, tmp_path))

    def beginning():
        partial = building.Installer._begin(one)
        (partial / "bin" / "llama-server").symlink_to("/dev/full")
        return partial

    monkeypatch.setattr(one, "_begin", beginning)
    with pytest.raises(building.BuildError, match=r"llama-server could not be copied to .*No space left on device"):
        one.install()
    assert not one.release.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda release: (release / "bin" / "llama-server").write_text("another program"),
        lambda release: (release / "manifest.json").write_text('{"id": "other", "files": {}}'),
    ],
)
def test_a_packed_release_that_is_not_what_was_built_is_not_installed(tmp_path, installed, spoil):
    one = installed
    spoil(one.release)
    archive = building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build)
    with pytest.raises(building.BuildError, match="does not hold the release tiny as it was built"):
        receive(tmp_path, one, archive)
    assert store.installed(tmp_path / "other" / "releases" / "tiny") is None


@pytest.mark.parametrize(
    "key, value",
    [
        ("options_ignored", 5),
        ("options_ignored", [1]),
        ("options_ignored", ["GGML_X\x1b[2J"]),
        ("options_ignored", None),
        ("seconds", -1),
        ("source", "x"),
        ("source", {"commit": "\x1b[2J"}),
        ("source", {"commit": 10**400}),
    ],
)
def test_a_manifest_that_another_host_wrote_may_hold_anything(tmp_path, installed, key, value):
    """Its programs are as recorded. What it says of them beside that was believed, and ended the module on each other host."""
    one, manifest = installed, store.installed(installed.release)
    (one.release / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    archive = building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build)
    with pytest.raises(
        building.BuildError, match=rf"that head did not write as this collection does \(manifest.{key}"
    ) as raised:
        receive(tmp_path, one, archive)
    assert str(raised.value).isprintable()
    assert store.installed(tmp_path / "other" / "releases" / "tiny") is None


def test_members_of_a_packed_release_that_do_not_belong_there_are_left_out(tmp_path, installed):
    one = installed
    archive = tmp_path / "hostile.tar.gz"
    with tarfile.open(archive, "w:gz", format=tarfile.USTAR_FORMAT) as packed:
        packed.add(tmp_path / "source.tar.gz", "../../outside")
        for name in ("manifest.json", "bin/ggml-rpc-server", "bin/llama-server"):
            packed.add(one.release / name, name)
    receive(tmp_path, one, archive)
    assert sorted(path.name for path in (tmp_path / "other").rglob("*") if path.is_file()) == [
        "ggml-rpc-server",
        "llama-server",
        "manifest.json",
    ]


def test_programs_of_a_package_are_linked(tmp_path):
    program = tmp_path / "usr-bin-llama-server"
    program.write_text("#!/bin/sh\necho usage:\necho '--fit [on|off]'\n")
    program.chmod(0o755)
    build = {
        "id": "packaged",
        "cmake_options": {},
        "environment": {},
        "targets": ["llama-server"],
        "packaged": {"llama-server": str(program)},
    }
    manifest = building.Installer(str(tmp_path), build, None).link({"source": "package", "version": "0.7.0"})
    installed = tmp_path / "releases" / "packaged"
    assert (installed / "bin" / "llama-server").resolve() == program
    assert manifest["options"]["llama-server"]["known"] == {"--fit": True}
    program.write_text("#!/bin/sh\necho usage: newer\n")
    assert store.installed(installed) is None


@pytest.mark.parametrize(
    "lines, known",
    [
        ("echo usage:\nexec yes -- --fit", {}),
        ("echo usage:\nprintf '\\377\\n'\necho '--fit [on|off]'", {"--fit": True}),
    ],
)
def test_a_help_without_end_is_none_and_one_of_other_bytes_is_read(tmp_path, monkeypatch, lines, known):
    monkeypatch.setattr(building, "WRITTEN_BYTES", 1 << 20)
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    installer = building.Installer(str(tmp_path), {"id": "p", "environment": {}, "targets": ["llama-server"]}, None)
    assert installer.probe(tmp_path)["llama-server"]["known"] == known


def test_a_help_that_does_not_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "HELP_SECONDS", 0.2)
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    installer = building.Installer(str(tmp_path), {"id": "p", "environment": {}, "targets": ["llama-server"]}, None)
    with pytest.raises(building.BuildError, match=r"llama-server does not end its help within 0.2 s"):
        installer.probe(tmp_path)


def test_a_package_that_lacks_a_program(tmp_path):
    build = {
        "id": "p",
        "cmake_options": {},
        "environment": {},
        "targets": ["llama-server"],
        "packaged": {"llama-server": "/no/such"},
    }
    with pytest.raises(building.BuildError, match="/no/such is missing"):
        building.Installer(str(tmp_path), build, None).link({})


@pytest.fixture
def public():
    """A folder that every account may enter; each start of pytest closes those that it makes itself."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield pathlib.Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can build as another account")
def test_root_builds_as_another_account(public, tree):
    (tree / "worker.c").write_text(WORKER)
    (tree / "CMakeLists.txt").write_text(
        CMAKE + 'execute_process(COMMAND id -un OUTPUT_VARIABLE who)\nmessage(STATUS "built by ${who}")\n'
    )
    archive = pack(tree, public)
    archive.chmod(0o644)
    one = builder(
        public,
        archive,
        [patch(public, "worker", WORKER.splitlines()[0], "#include <stdio.h>  // patched", "worker.c")],
    )
    one.account = building.pwd.getpwnam("nobody")
    one.install()
    assert "built by nobody" in one.log.read_text()
    assert (one.release / "bin" / "llama-server").stat().st_uid == 0


def patch(tmp_path, name, old, new, path="server.c"):
    """A patch as git diff writes it, that changes one line of a file of one line."""
    text = tmp_path / f"{name}.patch"
    text.write_text(f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n+{new}\n")
    return text


@pytest.fixture
def greeting(tree):
    """The tree with a server that says what a line of its own holds."""
    (tree / "server.c").write_text(
        '#include <stdio.h>\n#include "words.h"\nint main(void) { puts("usage: " WORDS); return 0; }\n'
    )
    (tree / "words.h").write_text('#define WORDS "one"\n')
    return tree


def words(tmp_path, name, old, new):
    return patch(tmp_path, name, f'#define WORDS "{old}"', f'#define WORDS "{new}"', "words.h")


def test_patches_are_applied_in_their_order(tmp_path, greeting):
    patches = [words(tmp_path, "first", "one", "two"), words(tmp_path, "second", "two", "three")]
    one = builder(tmp_path, pack(greeting, tmp_path), patches)
    manifest = one.install()
    assert said(one.release) == "usage: three\n"
    assert manifest["source"]["patches"] == [sha256(path) for path in patches]


def test_a_patch_that_does_not_apply_is_named_and_the_next_run_starts_from_the_tree_as_it_was(tmp_path, greeting):
    archive = pack(greeting, tmp_path)
    good, bad = words(tmp_path, "good", "one", "two"), words(tmp_path, "bad", "nine", "ten")
    one = builder(tmp_path, archive, [good, bad])
    with pytest.raises(
        building.BuildError, match=r"(?s)the patch bad\.patch of llama_release does not apply.*Hunk #1 FAILED"
    ):
        one.install()
    assert not one.release.exists()
    builder(tmp_path, archive, [good]).install()
    assert said(one.release) == "usage: two\n"


def test_where_the_collections_own_patch_does_not_apply_its_variable_is_named(tmp_path, greeting):
    own = words(tmp_path, "fast_load-9", "nine", "ten")
    with pytest.raises(
        building.BuildError, match=r"(?s)fast_load-9\.patch of llama_build_fast_load does not apply.*remove"
    ):
        builder(tmp_path, pack(greeting, tmp_path), [own]).install()


def test_a_patch_that_is_none_and_one_that_was_changed_meanwhile(tmp_path, greeting):
    archive = pack(greeting, tmp_path)
    nothing = tmp_path / "nothing.patch"
    nothing.write_text("no patch\n")
    with pytest.raises(building.BuildError, match=r"(?s)nothing\.patch of llama_release does not apply.*Only garbage"):
        builder(tmp_path, archive, [nothing]).install()
    one = builder(tmp_path, archive, [words(tmp_path, "good", "one", "two")])
    (tmp_path / "good.patch").write_text("other")
    with pytest.raises(building.BuildError, match="does not have the sha256"):
        one.install()


def test_a_patch_reaches_nothing_outside_the_tree(tmp_path, greeting):
    outside = tmp_path / "cache" / "builds" / "tiny" / "outside"
    outside.parent.mkdir(parents=True)
    outside.write_text("old\n")
    with pytest.raises(building.BuildError, match="does not apply"):
        builder(tmp_path, pack(greeting, tmp_path), [patch(tmp_path, "hostile", "old", "new", "../outside")]).install()
    assert outside.read_text() == "old\n"


def test_an_interrupted_build_with_patches_goes_on(tmp_path, greeting):
    archive = pack(greeting, tmp_path)
    one = builder(tmp_path, archive, [words(tmp_path, "good", "one", "two")], targets=["no-such-target"])
    with pytest.raises(building.BuildError, match="compile failed"):
        one.install()
    (one.work / "source" / "words.h").write_text('#define WORDS "still there"\n')
    builder(tmp_path, archive, [tmp_path / "good.patch"]).install()
    assert said(one.release) == "usage: still there\n"


LIBRARY_CMAKE = (
    KNOWN_COMPILER
    + """
project(tiny C)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_BUILD_RPATH "$ORIGIN")
add_library(ggml SHARED words.c)
set_target_properties(ggml PROPERTIES VERSION 0.9.4 SOVERSION 0)
add_executable(ggml-rpc-server main.c)
add_executable(llama-server main.c)
target_link_libraries(ggml-rpc-server ggml)
target_link_libraries(llama-server ggml)
"""
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Programs with a shared library beside them that they find by $ORIGIN, laid out as in upstream's archives."""
    work = tmp_path_factory.mktemp("compiled")
    for name, text in (
        ("CMakeLists.txt", LIBRARY_CMAKE),
        ("words.c", 'const char *words(void) { return "usage: --rpc --fit"; }\n'),
        ("main.c", "#include <stdio.h>\nconst char *words(void);\nint main(void) { puts(words()); return 0; }\n"),
    ):
        (work / name).write_text(text)
    for argv in (["cmake", "-S", ".", "-B", "made"], ["cmake", "--build", "made"]):
        subprocess.run(argv, cwd=work, check=True, capture_output=True)
    folder = work / "llama-b9900"
    (work / "made" / "bin").rename(folder)
    (folder / "README.md").write_text("not needed")
    return folder


def binary(tmp_path, archive, **build):
    planned = {
        "id": "prebuilt",
        "cmake_options": {},
        "environment": {},
        "targets": ["ggml-rpc-server", "llama-server"],
        **build,
    }
    source = {"archive": str(archive), "sha256": sha256(archive), "commit": "unknown", "number": 9900}
    return building.Installer(str(tmp_path / "prefix"), planned, None).unpack(source)


def archived(tmp_path, folder, prefix="llama-b9900", change=None):
    archive = tmp_path / "programs.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, prefix, filter=change)
    return archive


def without(*names):
    return lambda member: None if member.name.rsplit("/", 1)[-1] in names else member


@pytest.mark.parametrize("prefix", ["llama-b9900", "build/bin", "."])
def test_compiled_programs_are_installed_with_their_libraries(tmp_path, compiled, prefix):
    manifest = binary(tmp_path, archived(tmp_path, compiled, prefix))
    release = tmp_path / "prefix" / "releases" / "prebuilt"
    assert set(manifest["files"]) == {
        f"bin/{name}" for name in ("ggml-rpc-server", "llama-server", "libggml.so", "libggml.so.0", "libggml.so.0.9.4")
    }
    assert said(release) == "usage: --rpc --fit\n"
    assert (release / "bin" / "libggml.so").readlink().name == "libggml.so.0"
    assert manifest["source"] == {"sha256": manifest["source"]["sha256"], "commit": "unknown", "number": 9900}
    assert store.installed(release) == manifest
    (release / "bin" / "libggml.so.0.9.4").write_text("another library")
    assert store.installed(release) is None


@pytest.mark.parametrize(
    "names, reason",
    [
        (["ggml-rpc-server"], "has no RPC worker: neither ggml-rpc-server nor rpc-server is beside its llama-server"),
        (["llama-server"], "has no llama-server"),
        (["libggml.so.0.9.4"], "llama-server does not run on this host|ggml-rpc-server does not run on this host"),
    ],
)
def test_an_archive_that_lacks_something(tmp_path, compiled, names, reason):
    with pytest.raises(building.BuildError, match=reason):
        binary(tmp_path, archived(tmp_path, compiled, change=without(*names)))
    assert not (tmp_path / "prefix" / "releases" / "prebuilt").exists()


def test_an_archive_of_another_build_than_was_said(tmp_path, compiled):
    with pytest.raises(building.BuildError, match=r"has ggml-rpc-server and not rpc-server.*correct build"):
        binary(tmp_path, archived(tmp_path, compiled), targets=["rpc-server"])


def test_a_server_without_rpc(tmp_path, compiled):
    folder = tmp_path / "programs"
    shutil.copytree(compiled, folder, symlinks=True)
    (folder / "llama-server").write_text("#!/bin/sh\necho usage: --fit\n")
    with pytest.raises(building.BuildError, match="llama-server of llama_release's archive does not know --rpc"):
        binary(tmp_path, archived(tmp_path, folder))


def test_programs_of_another_processor(tmp_path, compiled):
    folder = tmp_path / "programs"
    shutil.copytree(compiled, folder, symlinks=True)
    (folder / "ggml-rpc-server").write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(building.BuildError, match="ggml-rpc-server does not run on this host: Exec format error"):
        binary(tmp_path, archived(tmp_path, folder))


def test_an_archive_that_cannot_be_read(tmp_path):
    archive = tmp_path / "programs.zip"
    archive.write_bytes(b"PK\x03\x04")
    with pytest.raises(
        building.BuildError, match=r"cannot be read \(file could not be opened successfully\).*not a zip"
    ):
        binary(tmp_path, archive)


@pytest.mark.parametrize("odd", archives.ODD)
def test_an_archive_of_programs_that_python_cannot_read(tmp_path, odd):
    (tmp_path / "odd").write_bytes(archives.ODD[odd])
    with pytest.raises(prebuilt.ArchiveError, match="the archive of llama_release cannot be read"):
        prebuilt.extract(tmp_path / "odd", ["llama-server"], tmp_path)


def test_an_archive_of_programs_that_is_another_than_planned(tmp_path, compiled):
    archive = archived(tmp_path, compiled)
    source = {"archive": str(archive), "sha256": "0" * 64, "commit": "unknown", "number": 9900}
    with pytest.raises(building.BuildError, match="does not have the sha256"):
        building.Installer(str(tmp_path), {"id": "x", "targets": []}, None).unpack(source)


def test_an_archive_reaches_nothing_outside_its_folder(tmp_path, compiled):
    """Links that lead out, names that climb, a program that is a link, devices: left out or refused."""
    archive = tmp_path / "hostile.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(compiled, "llama-b9900", filter=without("libggml.so"))
        for name, kind, target in (
            ("llama-b9900/libescape.so", tarfile.SYMTYPE, "/etc/passwd"),
            ("llama-b9900/libclimb.so", tarfile.SYMTYPE, "../../../outside.so"),
            ("llama-b9900/libround.so", tarfile.SYMTYPE, "libround.so"),
            ("llama-b9900/libloose.so", tarfile.SYMTYPE, "libnothing.so"),
            ("llama-b9900/libpipe.so", tarfile.FIFOTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            packed.addfile(member)
        packed.addfile(tarfile.TarInfo("llama-b9900/../../libup.so"))
    manifest = binary(tmp_path, archive)
    assert {name for name in manifest["files"] if "lib" in name} == {"bin/libggml.so.0", "bin/libggml.so.0.9.4"}
    assert not list(tmp_path.rglob("libup.so"))

    with tarfile.open(archive, "w") as packed:
        packed.add(compiled, "llama-b9900", filter=without("llama-server"))
        member = tarfile.TarInfo("llama-b9900/llama-server")
        member.type, member.linkname = tarfile.SYMTYPE, "/bin/sh"
        packed.addfile(member)
    with pytest.raises(building.BuildError, match="links in place of its programs"):
        binary(tmp_path, archive)


def hard_link(name, target):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.LNKTYPE, target
    return member


def test_hard_links_inside_an_archive_are_files(tmp_path, compiled):
    """Programs and a library of which the content lies under another name of the archive, as tar writes files with several names."""
    folder = tmp_path / "programs"
    shutil.copytree(compiled, folder, symlinks=True)
    (folder / "a-server").hardlink_to(folder / "llama-server")
    (folder / "a-library").hardlink_to(folder / "libggml.so.0.9.4")
    archive = archived(tmp_path, folder)
    with tarfile.open(archive) as packed:
        assert [packed.getmember(f"llama-b9900/{name}").islnk() for name in ("llama-server", "libggml.so.0.9.4")] == [
            True
        ] * 2
    manifest = binary(tmp_path, archive)
    release = tmp_path / "prefix" / "releases" / "prebuilt"
    assert said(release) == "usage: --rpc --fit\n"
    assert set(manifest["files"]) == {
        f"bin/{name}" for name in ("ggml-rpc-server", "llama-server", "libggml.so", "libggml.so.0", "libggml.so.0.9.4")
    }
    assert {path.stat().st_nlink for path in (release / "bin").iterdir()} == {1}


@pytest.mark.parametrize(
    "name, target",
    [
        ("llama-server", "/bin/sh"),
        ("libhard.so", "llama-b9900/../../outside.so"),
        ("libhard.so", "llama-b9900/libhard.so"),
    ],
)
def test_a_hard_link_out_of_an_archive_is_refused(tmp_path, compiled, name, target):
    archive = tmp_path / "hostile.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(compiled, "llama-b9900", filter=without(name))
        packed.addfile(hard_link(f"llama-b9900/{name}", target))
    with pytest.raises(
        building.BuildError, match=f"has {name} as a hard link to {target}, which is not a file before it"
    ):
        binary(tmp_path, archive)


def test_hard_links_count_as_much_as_the_file(tmp_path, compiled, monkeypatch):
    archive = tmp_path / "links.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(compiled, "llama-b9900")
        size = sum(member.size for member in packed)
        for number in range(100):
            packed.addfile(hard_link(f"llama-b9900/lib{number}.so", "llama-b9900/llama-server"))
    monkeypatch.setattr(prebuilt, "LIMIT_BYTES", size + 100)
    with pytest.raises(building.BuildError, match=r"give one of llama\.cpp alone"):
        binary(tmp_path, archive)


def test_hard_links_inside_a_tree(tmp_path, tree):
    (tree / "again").mkdir()
    (tree / "again" / "server.c").hardlink_to(tree / "server.c")
    assert builder(tmp_path, pack(tree, tmp_path)).install()["id"] == "tiny"


def test_a_hard_link_out_of_a_tree_is_named(tmp_path, tree):
    (tree.parents[1] / "a.c").hardlink_to(tree / "server.c")
    (tree / "server.c").unlink()
    (tree / "server.c").hardlink_to(tree.parents[1] / "a.c")
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for path in ("a.c", "vendor"):
            packed.add(tree.parents[1] / path, f"package-1/{path}")
    with pytest.raises(
        building.BuildError, match=r"has a hard link that leads out of package-1/vendor/llama.cpp.*tar says"
    ):
        builder(tmp_path, archive).install()


def test_an_archive_that_says_it_is_huge(tmp_path, compiled, monkeypatch):
    monkeypatch.setattr(prebuilt, "LIMIT_BYTES", 100)
    with pytest.raises(building.BuildError, match=r"give one of llama\.cpp alone"):
        binary(tmp_path, archived(tmp_path, compiled))


def test_a_release_goes_with_what_its_build_left(tmp_path, installed):
    one = installed
    building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build)
    (tmp_path / "cache" / "builds" / "other.log").write_text("")
    store.remove_release(str(tmp_path / "prefix"), str(tmp_path / "cache"), "tiny")
    assert list(one.release.parent.iterdir()) == []
    assert [path.name for path in one.log.parent.iterdir()] == ["other.log"]
    store.remove_release(str(tmp_path / "prefix"), str(tmp_path / "cache"), "tiny")


@pytest.mark.parametrize(
    "line, said",
    [
        ("[12/211] Building CXX object ggml.cpp.o", "step 12 of 211"),
        ("== configure", "configure"),
        ("== waiting for process 4711", "waiting for process 4711"),
        ("", "starting"),
        ("== \x1b[2Jall is well\x9b\u202e", r"\x1b[2Jall is well\x9b\u202e"),
    ],
)
def test_progress(line, said):
    assert building.step(line) == said


def test_programs_are_asked_for_their_options_with_what_their_libraries_need(tmp_path, tree):
    (tree / "server.c").write_text(
        '#include <stdio.h>\n#include <stdlib.h>\nint main(void) { return getenv("LIBRARIES") ? puts("usage --rpc") < 0 : 1; }\n'
    )
    archive = pack(tree, tmp_path)
    with pytest.raises(building.BuildError, match="llama-server does not run on this host"):
        builder(tmp_path, archive).install()
    builder(tmp_path, archive, environment={"LIBRARIES": "/opt"}).install()


def endings(data, count=60):
    """Data that ends too early, at many places."""
    return [data[: len(data) * part // count] for part in range(count)]


def flipped(data, count=200):
    """Data with a few other bytes; the same at each run."""
    chance = random.Random(7)
    for _case in range(count):
        other = bytearray(data)
        for _byte in range(chance.randint(1, 9)):
            other[chance.randrange(len(other))] = chance.randrange(256)
        yield bytes(other)


@pytest.mark.parametrize("form", ["gz", "bz2", "xz", ""])
def test_a_damaged_archive_of_programs_is_refused_or_unpacked(tmp_path, form):
    """It ends in no other way than with a sentence."""
    folder = tmp_path / "llama-b9900"
    folder.mkdir()
    for name in ("llama-server", "ggml-rpc-server", "libggml.so"):
        (folder / name).write_bytes(random.Random(3).randbytes(3000))
    archive = tmp_path / "programs.tar"
    with tarfile.open(archive, f"w:{form}") as packed:
        packed.add(folder, folder.name)
    whole = archive.read_bytes()
    for case in [*endings(whole), *flipped(whole)]:
        archive.write_bytes(case)
        target = tmp_path / "target"
        target.mkdir()
        with contextlib.suppress(prebuilt.ArchiveError, OSError):
            prebuilt.extract(archive, ["llama-server", "ggml-rpc-server"], target)
        shutil.rmtree(target)


def test_a_damaged_release_of_another_host_is_refused(tmp_path, tree):
    """Even where its sha256 is as recorded."""
    one = builder(tmp_path, pack(tree, tmp_path), targets=["llama-server"])
    files = one.install()["files"]
    archive = pathlib.Path(building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build))
    whole = archive.read_bytes()
    for case in [*endings(whole, 20), *flipped(whole, 40)]:
        archive.write_bytes(case)
        try:
            assert receive(tmp_path, one, archive, files)["files"] == files
        except (building.BuildError, OSError):
            assert not (tmp_path / "other" / "releases" / "tiny").exists()
        shutil.rmtree(tmp_path / "other")


def test_a_release_with_other_programs_than_recorded_is_not_installed(tmp_path, installed):
    one = installed
    archive = building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build)
    with pytest.raises(
        building.BuildError, match="does not hold the release tiny as it was built: remove that release"
    ):
        receive(tmp_path, one, archive, {"bin/ggml-rpc-server": "0" * 64, "bin/llama-server": "0" * 64})
