"""Builds of a tiny real tree with cmake: what is installed, what is kept, and how each step fails."""

import hashlib
import json
import os
import subprocess
import tarfile
import threading

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils import building

CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(tiny C)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(ggml-rpc-server worker.c)
add_executable(llama-server server.c)
target_compile_definitions(llama-server PRIVATE COMMIT="${LLAMA_BUILD_COMMIT}")
"""
WORKER = '#include <stdio.h>\nint main(void) { puts("usage:\\n  -d, --device D\\n  -c, --cache"); return 0; }\n'
SERVER = '#include <stdio.h>\nint main(void) { puts("usage: --fit --load-mode " COMMIT); return 0; }\n'


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree" / "package-1" / "vendor" / "llama.cpp"
    folder.mkdir(parents=True)
    for name, text in (("CMakeLists.txt", CMAKE), ("worker.c", WORKER), ("server.c", SERVER)):
        (folder / name).write_text(text)
    return folder


def pack(tree, tmp_path):
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tree.parents[1], "package-1")
    return archive


def builder(tmp_path, archive, **build):
    source = {
        "archive": str(archive),
        "sha256": building.sha256(archive),
        "member": "package-1/vendor/llama.cpp",
        "commit": "abc1234",
        "number": 7,
    }
    planned = {
        "id": "tiny",
        "cmake_options": {"CMAKE_BUILD_TYPE": "Release"},
        "environment": {},
        "targets": ["ggml-rpc-server", "llama-server"],
        **build,
    }
    return building.Builder(str(tmp_path / "prefix"), str(tmp_path / "cache"), planned, source, None)


def test_a_build_is_installed_with_a_manifest(tmp_path, tree):
    manifest = builder(tmp_path, pack(tree, tmp_path)).install()
    release = tmp_path / "prefix" / "releases" / "tiny"
    assert json.loads((release / "manifest.json").read_text()) == manifest
    assert set(manifest["files"]) == {"bin/ggml-rpc-server", "bin/llama-server"}
    assert manifest["capabilities"]["worker_flags"] == ["c", "d"]
    assert manifest["capabilities"]["server_flags"] == ["fit", "load-mode"]
    assert (
        "abc1234"
        in subprocess.run([release / "bin" / "llama-server"], capture_output=True, text=True, check=True).stdout
    )
    assert building.installed(release) == manifest
    assert not (tmp_path / "cache" / "builds" / "tiny").exists()
    assert [path.name for path in release.parent.iterdir()] == ["tiny"]


def test_an_installed_release_is_left_alone(tmp_path, tree):
    archive = pack(tree, tmp_path)
    builder(tmp_path, archive).install()
    program = tmp_path / "prefix/releases/tiny/bin/llama-server"
    before = program.stat().st_mtime_ns
    builder(tmp_path, archive).install()
    assert program.stat().st_mtime_ns == before


def test_a_damaged_release_is_built_again(tmp_path, tree):
    archive = pack(tree, tmp_path)
    builder(tmp_path, archive).install()
    program = tmp_path / "prefix/releases/tiny/bin/llama-server"
    program.write_bytes(program.read_bytes()[:-1])
    assert building.installed(program.parents[1]) is None
    builder(tmp_path, archive).install()
    assert building.installed(program.parents[1])


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


def other_host(tmp_path, one):
    return building.Installer(str(tmp_path / "other"), one.build, None)


def test_a_release_goes_to_another_host(tmp_path, tree):
    one = builder(tmp_path, pack(tree, tmp_path))
    manifest = one.install()
    archive = building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build)
    assert other_host(tmp_path, one).receive(archive) == manifest
    assert building.installed(tmp_path / "other" / "releases" / "tiny") == manifest


@pytest.mark.parametrize(
    "spoil",
    [
        lambda release: (release / "bin" / "llama-server").write_text("another program"),
        lambda release: (release / "manifest.json").write_text('{"id": "other", "files": {}}'),
    ],
)
def test_a_packed_release_that_is_not_what_was_built_is_not_installed(tmp_path, tree, spoil):
    one = builder(tmp_path, pack(tree, tmp_path))
    one.install()
    spoil(one.release)
    archive = building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), one.build)
    with pytest.raises(building.BuildError, match="does not hold the release tiny as it was built"):
        other_host(tmp_path, one).receive(archive)
    assert building.installed(tmp_path / "other" / "releases" / "tiny") is None


def test_members_of_a_packed_release_that_do_not_belong_there_are_left_out(tmp_path, tree):
    one = builder(tmp_path, pack(tree, tmp_path))
    one.install()
    archive = tmp_path / "hostile.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tree / "worker.c", "../../outside")
        for name in ("manifest.json", "bin/ggml-rpc-server", "bin/llama-server"):
            packed.add(one.release / name, name)
    other_host(tmp_path, one).receive(str(archive))
    assert sorted(path.name for path in (tmp_path / "other").rglob("*") if path.is_file()) == [
        "ggml-rpc-server",
        "llama-server",
        "manifest.json",
    ]


def test_programs_of_a_package_are_linked(tmp_path):
    program = tmp_path / "usr-bin-llama-server"
    program.write_text("#!/bin/sh\necho usage: --fit --load-mode\n")
    program.chmod(0o755)
    build = {
        "id": "packaged",
        "cmake_options": {},
        "targets": ["llama-server"],
        "packaged": {"llama-server": str(program)},
    }
    manifest = building.Installer(str(tmp_path), build, None).link({"source": "package", "version": "0.7.0"})
    installed = tmp_path / "releases" / "packaged"
    assert (installed / "bin" / "llama-server").resolve() == program
    assert manifest["capabilities"]["server_flags"] == ["fit", "load-mode"]
    program.write_text("#!/bin/sh\necho usage: newer\n")
    assert building.installed(installed) is None


def test_a_package_that_lacks_a_program(tmp_path):
    build = {"id": "p", "cmake_options": {}, "targets": ["llama-server"], "packaged": {"llama-server": "/no/such"}}
    with pytest.raises(building.BuildError, match="/no/such is not there"):
        building.Installer(str(tmp_path), build, None).link({})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can build as another account")
def test_root_builds_as_another_account(tmp_path, tree):
    for folder in [tmp_path, *tmp_path.parents]:
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    (tree / "worker.c").write_text(WORKER)
    (tree / "CMakeLists.txt").write_text(
        CMAKE + 'execute_process(COMMAND id -un OUTPUT_VARIABLE who)\nmessage(STATUS "built by ${who}")\n'
    )
    archive = pack(tree, tmp_path)
    archive.chmod(0o644)
    one = builder(tmp_path, archive)
    one.account = building.pwd.getpwnam("nobody")
    one.install()
    assert "built by nobody" in one.log.read_text()
    assert (one.release / "bin" / "llama-server").stat().st_uid == 0


@pytest.mark.parametrize(
    "line, said",
    [("[12/211] Building CXX object ggml.cpp.o", "step 12 of 211"), ("== configure", "configure"), ("", "starting")],
)
def test_progress(line, said):
    assert building.step(line) == said
