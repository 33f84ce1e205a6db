"""Builds of a tiny real tree with cmake: what is installed, what is kept, and how each step fails."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import tarfile
import threading
import time

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, locks
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import builder, installer, manifest, store
from support import builds

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
GREETING = '#include <stdio.h>\n#include "words.h"\nint main(void) { puts("usage: " WORDS); return 0; }\n'
MEMBER = "package-1/vendor/llama.cpp"


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree" / MEMBER
    folder.mkdir(parents=True)
    for name, text in (("CMakeLists.txt", CMAKE), ("worker.c", WORKER), ("server.c", SERVER)):
        (folder / name).write_text(text)
    return folder


def pack(tree, tmp_path):
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tree.parents[1], "package-1")
    return archive


def builder_of(tmp_path, archive, patches=(), account=None, **build):
    known = {"id": "tiny-cpu-0123abcd", "cmake_options": {"CMAKE_BUILD_TYPE": "Release"}}
    planned = builds.BUILD._replace(**{**known, **build})
    release = builds.RELEASE._replace(member=MEMBER)
    source = builds.source_of(archive, patches)
    return builder.Builder(str(tmp_path / "prefix"), str(tmp_path / "cache"), planned, release, source, account)


def printed_by(release):
    return subprocess.run([release / "bin" / "llama-server"], capture_output=True, text=True, check=True).stdout


def test_a_build_is_installed_with_a_manifest(tmp_path, tree):
    made = builder_of(tmp_path, pack(tree, tmp_path)).install()
    release = tmp_path / "prefix" / "releases" / "tiny-cpu-0123abcd"
    assert manifest.read_manifest(release) == made == manifest.installed_manifest(release)
    assert set(made.files) == {"bin/ggml-rpc-server", "bin/llama-server"}
    assert printed_by(release).endswith("abc1234d\n")
    assert release.stat().st_mtime == 0, "it counts as used only when it is put to use"
    assert not (tmp_path / "cache" / "builds" / "tiny-cpu-0123abcd").exists()
    assert [path.name for path in release.parent.iterdir()] == ["tiny-cpu-0123abcd"]


def test_the_chat_page_is_in_the_tree_before_it_is_compiled(tmp_path, tree):
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "index.html").write_text("#define COMMIT_TEXT COMMIT\n")
    (tree / "server.c").write_text('#include "tools/ui/dist/index.html"\n' + SERVER.replace("COMMIT", "COMMIT_TEXT"))
    with tarfile.open(tmp_path / "page.tar.gz", "w:gz") as packed:
        packed.add(folder / "index.html", "index.html")
    build = builder_of(tmp_path, pack(tree, tmp_path))
    build.source = build.source._replace(page=builds.packed_of(tmp_path / "page.tar.gz"))
    build.install()
    assert printed_by(tmp_path / "prefix/releases/tiny-cpu-0123abcd").endswith("abc1234d\n")
    build = builder_of(tmp_path, pack(tree, tmp_path), id="tiny-cpu-2")
    build.source = build.source._replace(page=installer.PackedArchive(str(tmp_path / "page.tar.gz"), "0" * 64))
    with pytest.raises(Refusal, match=r"page\.tar\.gz does not match the controller's file"):
        build.install()


def test_a_tree_that_asks_git_gets_its_number_and_commit(tmp_path, tree):
    (tree / "common").mkdir()
    (tree / "common" / "build-info.cpp.in").write_text(
        "@BUILD_NUMBER@ @BUILD_COMMIT@ @LLAMA_BUILD_NUMBER@ @BUILD_TARGET@"
    )
    (tree / "CMakeLists.txt").write_text(
        CMAKE.replace("${LLAMA_BUILD_COMMIT}", "${NAMED}").replace(
            "add_exe", "file(READ common/build-info.cpp.in NAMED)\nadd_exe", 1
        )
    )
    builder_of(tmp_path, pack(tree, tmp_path)).install()
    printed = printed_by(tmp_path / "prefix" / "releases" / "tiny-cpu-0123abcd")
    assert printed.endswith("7 abc1234d @LLAMA_BUILD_NUMBER@ @BUILD_TARGET@\n")


def test_only_the_targets_are_built_also_from_sources_newer_than_the_clock(tmp_path, tree):
    """ninja would write its own file again and again: the clock of a host may be late."""
    (tree / "server.c").write_text("this is no C")
    for path in tree.rglob("*"):
        os.utime(path, (time.time() + 86400, time.time() + 86400))
    made = builder_of(tmp_path, pack(tree, tmp_path), targets=("ggml-rpc-server",)).install()
    assert set(made.files) == {"bin/ggml-rpc-server"}


def test_an_installed_release_stays_and_a_damaged_one_is_built_again(tmp_path, tree):
    one = builder_of(tmp_path, pack(tree, tmp_path))
    one.install()
    program = one.release_folder / "bin/llama-server"
    before = program.stat().st_mtime_ns
    one.install()
    assert program.stat().st_mtime_ns == before
    program.write_bytes(program.read_bytes()[:-1])
    (program.parent / "libggml-old.so").touch()
    assert manifest.installed_manifest(program.parents[1]) is None
    one.install()
    assert manifest.installed_manifest(program.parents[1])
    assert not (program.parent / "libggml-old.so").exists()


def test_another_archive_than_planned(tmp_path, tree):
    one = builder_of(tmp_path, pack(tree, tmp_path))
    one.source = one.source._replace(sha256="0" * 64)
    with pytest.raises(Refusal, match="does not match the controller's file"):
        one.install()
    assert not (tmp_path / "prefix").exists()


CONFIGURED_WRONG = 'cmake_minimum_required(VERSION 3.14)\nproject(x C)\nmessage(FATAL_ERROR "no such toolkit")\n'
FAILURES = {
    "cmake": ({"CMakeLists.txt": CONFIGURED_WRONG}, r"(?s)configure failed.*tiny-cpu-0123abcd\.log.*no such toolkit"),
    "compiler": ({"server.c": "this is no C"}, "compile failed"),
    "program": ({"server.c": "int main(void) { return 3; }\n"}, "llama-server does not run on this host"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_build_that_fails_names_the_step_and_installs_nothing(tmp_path, tree, case):
    files, expected = FAILURES[case]
    for name, text in files.items():
        (tree / name).write_text(text)
    with pytest.raises(Refusal, match=expected):
        builder_of(tmp_path, pack(tree, tmp_path)).install()
    assert not (tmp_path / "prefix/releases/tiny-cpu-0123abcd").exists()


def test_after_a_failed_step_the_next_run_begins_anew(tmp_path, tree):
    """cmake remembers what it found out of a compiler, and a power cut may have torn a source."""
    asking = CMAKE + 'if(NOT DEFINED FOUND)\nset(FOUND "$ENV{WHERE}" CACHE STRING "")\nendif()\n'
    (tree / "CMakeLists.txt").write_text(
        asking + 'if(NOT FOUND STREQUAL "right")\nmessage(FATAL_ERROR "no")\nendif()\n'
    )
    archive = pack(tree, tmp_path)
    with pytest.raises(Refusal, match="configure failed"):
        builder_of(tmp_path, archive, environment={"WHERE": "wrong"}).install()
    one = builder_of(tmp_path, archive, environment={"WHERE": "right"})
    os.truncate(one.work_folder / "source" / "server.c", 0)
    assert one.install().id == "tiny-cpu-0123abcd"


SLOW = "add_custom_target(slow COMMAND sleep 30 COMMAND touch ended)\nadd_dependencies(llama-server slow)\n"
SLOW_CMAKE = CMAKE + SLOW


def test_what_a_killed_module_left_running_keeps_the_lock(tmp_path, tree):
    """The module is killed, and ninja goes on. The next run names what it waits for, and continues where that has ended."""
    (tree / "CMakeLists.txt").write_text(SLOW_CMAKE)
    one = builder_of(tmp_path, pack(tree, tmp_path))
    lock = store.lock_path(one.cache_folder)
    module = os.fork()
    if not module:
        try:
            one.install()
        finally:
            os._exit(0)
    wait_for(lambda: [pid for pid in locks.find_holders(lock) if "sleep" in command_of(pid)])
    os.kill(module, signal.SIGKILL)
    os.waitpid(module, 0)
    holders = locks.find_holders(lock)
    assert {command_of(pid)[0].rsplit("/", 1)[-1] for pid in holders} >= {"cmake", "ninja", "sleep"}
    assert files.is_locked(store.lock_path(one.cache_folder))
    assert store.unfinished_build_ids(str(one.cache_folder), ()) == []
    marked = one.work_folder / "source" / "CMakeLists.txt"
    marked.write_text(CMAKE)  # so that the tree as it was left compiles at once
    made = []
    waiting = threading.Thread(target=lambda: made.append(one.install()))
    waiting.start()
    wait_for(lambda: "== waiting for process " in one.log_path.read_text())
    assert re.search(builder.STEP_LINE_PATTERN, one.log_path.read_text().splitlines()[-1])
    assert set(re.findall(r"\d+", one.log_path.read_text().split("== waiting")[1])) & set(map(str, holders))
    assert not made
    for pid in holders:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    waiting.join()
    assert made[0].id == "tiny-cpu-0123abcd"
    assert "== unpack" not in one.log_path.read_text()
    assert not files.is_locked(store.lock_path(one.cache_folder))


def wait_for(condition):
    while not condition():
        time.sleep(0.05)


def command_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] or ["ended"]
    except OSError:
        return ["ended"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can build as another account")
def test_root_builds_as_another_account(public, tree):
    (tree / "CMakeLists.txt").write_text(
        CMAKE + 'execute_process(COMMAND id -un OUTPUT_VARIABLE who)\nmessage(STATUS "built by ${who}")\n'
    )
    archive = pack(tree, public)
    archive.chmod(0o644)
    change = patch(public, "worker", WORKER.splitlines()[0], "#include <stdio.h>  // patched", "worker.c")
    one = builder_of(public, archive, [change], account="nobody")
    one.install()
    assert "built by nobody" in one.log_path.read_text()
    assert (one.release_folder / "bin" / "llama-server").stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can build as another account")
def test_root_installs_nothing_that_the_building_account_may_not_read(public, tree):
    (public / "secret").mkdir()
    (public / "secret" / "llama-server").touch(0o600)
    moved = f"add_custom_command(TARGET llama-server POST_BUILD COMMAND mv bin old COMMAND ln -s {public}/secret bin)\n"
    (tree / "CMakeLists.txt").write_text(CMAKE + moved)
    pack(tree, public).chmod(0o644)
    with pytest.raises(Refusal, match=r"llama-server could not be copied: .*Permission denied"):
        builder_of(public, public / "source.tar.gz", account="nobody", targets=("llama-server",)).install()


def patch(tmp_path, name, old, new, path="server.c"):
    """A patch as git diff writes it, that changes one line of a file of one line."""
    text = tmp_path / f"{name}.patch"
    text.write_text(f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n+{new}\n")
    return text


@pytest.fixture
def greeting(tree):
    """The tree with a server that says what a line of its own holds."""
    (tree / "server.c").write_text(GREETING)
    (tree / "words.h").write_text('#define WORDS "one"\n')
    return tree


def words(tmp_path, name, old, new):
    return patch(tmp_path, name, f'#define WORDS "{old}"', f'#define WORDS "{new}"', "words.h")


def test_patches_are_applied_in_their_order_and_once(tmp_path, greeting):
    archive = pack(greeting, tmp_path)
    patches = [words(tmp_path, "first", "one", "two"), words(tmp_path, "second", "two", "three")]
    with pytest.raises(Refusal, match="compile failed"):
        builder_of(tmp_path, archive, patches, targets=("no-such-target",)).install()
    one = builder_of(tmp_path, archive, patches)
    made = one.install()
    assert printed_by(one.release_folder) == "usage: three\n"
    assert made.source["patches"] == [sha256(path) for path in patches]


@pytest.mark.parametrize(
    "name, said",
    [
        ("bad", r"(?s)the patch bad\.patch of llama_release does not apply.*Hunk #1 FAILED"),
        ("fast_load-9", r"(?s)fast_load-9\.patch of llama_build_fast_load does not apply.*remove"),
    ],
)
def test_a_patch_that_does_not_apply_is_named_and_the_next_run_starts_anew(tmp_path, greeting, name, said):
    archive = pack(greeting, tmp_path)
    good, bad = words(tmp_path, "good", "one", "two"), words(tmp_path, name, "nine", "ten")
    one = builder_of(tmp_path, archive, [good, bad])
    with pytest.raises(Refusal, match=said):
        one.install()
    assert not one.release_folder.exists()
    builder_of(tmp_path, archive, [good]).install()
    assert printed_by(one.release_folder) == "usage: two\n"


def test_a_release_goes_with_what_its_build_left(tmp_path, tree):
    one = builder_of(tmp_path, pack(tree, tmp_path))
    one.install()
    installer.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build)
    (tmp_path / "cache" / "builds" / "other.log").write_text("")
    store.remove_release(str(tmp_path / "prefix"), str(tmp_path / "cache"), "tiny-cpu-0123abcd")
    assert list(one.release_folder.parent.iterdir()) == []
    assert [path.name for path in one.log_path.parent.iterdir()] == ["other.log"]


def test_progress_in_words():
    lines = {
        "[12/211] Building CXX object ggml.cpp.o": "step 12 of 211",
        "== configure": "configure",
        "": "starting",
        "== \x1b[2Jall is well\x9b\u202e": r"\x1b[2Jall is well\x9b\u202e",
    }
    assert {line: builder.step_text(line) for line in lines} == lines
