"""The module as Ansible calls it: what it reports, and a disk that is really full."""

import fcntl
import os
import shutil
import subprocess
import tarfile

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.apply import building
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import DEFINITION_MARK as MARK
from ansible_collections.llamacpp.cluster.plugins.modules import release

MODULE = release
pytestmark = pytest.mark.usefixtures("untried")
PROGRAM = "#!/bin/sh\necho usage: --rpc --fit\n"


@pytest.fixture
def programs(tmp_path):
    """Arguments for the installation of an archive of programs."""
    folder = tmp_path / "llama-b9900"
    folder.mkdir()
    for name in ("llama-server", "ggml-rpc-server"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    (folder / "libggml.so").write_bytes(os.urandom(1 << 20))
    archive = tmp_path / "programs.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)
    targets = ["ggml-rpc-server", "llama-server"]
    return {
        "release": {"source": "binary", "build": 9900},
        "build": {"id": "new", "cmake_options": {}, "environment": {}, "targets": targets, "packaged": {}},
        "prefix": str(tmp_path / "prefix"),
        "cache": str(tmp_path / "cache"),
        "brought": {"archive": str(archive), "sha256": building.sha256(archive), "commit": "unknown", "patches": []},
    }


def host(programs, keep=1):
    return {
        "prefix": programs["prefix"],
        "cache": programs["cache"],
        "units": f"{programs['prefix']}/units",
        "service_manager": "supervisor",
        "builds": [programs["build"]],
        "keep_releases": keep,
    }


def test_a_release_is_installed_once(call, programs):
    assert call(check=True, **programs)["changed"]
    assert not os.path.exists(programs["prefix"])
    assert call(**programs)["manifest"]["id"] == "new"
    assert call(**programs)["changed"] is False


def test_programs_that_do_not_work_here_are_not_installed(call, programs, tmp_path, monkeypatch):
    call(**{**programs, "build": {**programs["build"], "id": "old"}})
    tried = []

    def check(folder, worker, _flags, place):
        tried.append((sorted(path.name for path in folder.iterdir()), worker, place.folder.exists(), place.account))
        raise building.trial.TrialError("llama-server was tried on this host's processor and ended with SIGILL.")

    monkeypatch.setattr(building.trial, "check", check)
    assert call(**{**programs, "build": {**programs["build"], "id": "old"}})["changed"] is False
    assert not tried
    failed = call(**programs)
    assert failed["failed"]
    assert failed["msg"].startswith(
        "Installing new: llama-server was tried on this host's processor and ended with SIGILL."
    )
    assert tried == [(["ggml-rpc-server", "libggml.so", "llama-server"], "ggml-rpc-server", True, {})]
    assert [path.name for path in (tmp_path / "prefix/releases").glob("[!.]*")] == ["old"]
    assert not list(tmp_path.glob("prefix/releases/.new/trial"))


def test_old_releases_are_removed_and_what_is_put_to_use_counts_as_new(call, programs, tmp_path):
    call(**programs)
    folder = tmp_path / "prefix" / "releases"
    os.utime(folder / "new", (1, 1))
    (folder / "old" / "bin").mkdir(parents=True)
    (tmp_path / "cache" / "builds").mkdir(parents=True)
    (tmp_path / "cache" / "builds" / "old.log").write_text("")
    told = call(check=True, state="pruned", host=host(programs))
    assert (told["changed"], told["removed"], told["diff"]) == (True, ["old"], {"before": "old\n", "after": ""})
    assert (folder / "old").exists()
    assert call(state="pruned", host=host(programs, keep=2))["changed"] is False
    assert (folder / "new").stat().st_mtime > 1
    assert call(state="pruned", host=host(programs))["removed"] == ["old"]
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert list((tmp_path / "cache" / "builds").iterdir()) == []
    assert call(state="pruned", host=host(programs))["changed"] is False


def test_check_mode_tells_of_a_release_that_the_planned_services_replace(call, programs, tmp_path):
    """What serves now is in use until the planned services are started, and goes after that. What somebody else runs stays."""
    old, other = (tmp_path / "prefix" / "releases" / name / "bin" / "llama-server" for name in ("old", "other"))
    started = []
    for program in (old, other):
        program.parent.mkdir(parents=True)
        shutil.copy(shutil.which("sleep"), program)
        started.append(subprocess.Popen([program, "60"]))
    units = tmp_path / "prefix" / "units"
    units.mkdir()
    definition = units / "llamacpp-server.conf"
    definition.write_text(f"; {MARK}; a change\n[program:llamacpp-server]\ncommand={old} 60\n")
    try:
        told = call(check=True, state="pruned", host=host(programs))
        assert (told["changed"], told["removed"], told["diff"]) == (True, ["old"], {"before": "old\n", "after": ""})
        (tmp_path / "prefix" / "releases" / "new").mkdir()
        assert call(state="pruned", host=host(programs))["removed"] == []
        started[0].kill()
        started[0].wait()
        definition.write_text(
            f"; {MARK}; a change\n[program:llamacpp-server]\ncommand={tmp_path}/prefix/releases/new/x\n"
        )
        assert call(state="pruned", host=host(programs))["removed"] == ["old"]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert call(check=True, state="pruned", host=host(programs))["removed"] == ["other"]


LEFT, RUNS, PLANNED, BROUGHT, INSTALLED = (f"b860{number}-cpu-0123abcd" for number in range(5))


def test_builds_that_never_ended_go_with_a_prune(call, programs, tmp_path):
    call(**programs)
    builds, sources = tmp_path / "cache" / "builds", tmp_path / "cache" / "sources"
    sources.mkdir(parents=True)
    for identity in (LEFT, RUNS, PLANNED):
        (builds / identity / "source").mkdir(parents=True)
        for ending in (".log", ".lock", ".unpacked"):
            (builds / (identity + ending)).write_text("")
    (tmp_path / "prefix" / "releases" / INSTALLED).mkdir()
    for name in (
        *(f"{identity}.tar.gz" for identity in (LEFT, BROUGHT, INSTALLED)),
        "832db0699007f1be.tar.gz",
        "git-832db0699007f1be.tar.gz",
    ):
        (sources / name).write_text("")
    planned = host(programs, keep=2)
    planned["builds"].append({"id": PLANNED})
    (tmp_path / "prefix" / "releases" / PLANNED).mkdir()
    with (builds / f"{RUNS}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = call(check=True, state="pruned", host=planned)
        assert (told["changed"], told["removed"], told["abandoned"]) == (True, [], [LEFT, BROUGHT])
        assert told["diff"]["before"] == f"builds/{LEFT}\nbuilds/{BROUGHT}\n"
        assert (builds / LEFT).exists()
        assert call(state="pruned", host=planned)["abandoned"] == [LEFT, BROUGHT]
        assert call(state="pruned", host=planned)["changed"] is False
        assert {path.name for path in builds.iterdir() if path.is_dir()} == {RUNS, PLANNED}
    assert call(state="pruned", host=planned)["abandoned"] == [RUNS]
    assert {path.name for path in builds.iterdir()} == {
        PLANNED,
        *(PLANNED + end for end in (".log", ".lock", ".unpacked")),
    }
    assert {path.name for path in sources.iterdir()} == {
        f"{INSTALLED}.tar.gz",
        "832db0699007f1be.tar.gz",
        "git-832db0699007f1be.tar.gz",
    }


def test_a_release_that_cannot_be_removed(call, programs, tmp_path):
    (tmp_path / "prefix" / "releases").mkdir(parents=True)
    told = call(state="pruned", host=host(programs))
    assert told["failed"]
    assert "Removing old releases" in told["msg"]


def test_a_full_disk_is_named(call, programs, small_disk):
    told = call(**{**programs, "prefix": str(small_disk)})
    assert told["failed"]
    assert f"the disk of {small_disk} or {programs['cache']} is full. Free some space and run it again" in told["msg"]
    assert not (small_disk / "releases" / "new").exists()


def test_a_disk_that_a_build_fills_is_named(call, programs, small_disk, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "CMakeLists.txt").write_bytes(os.urandom(1 << 20))
    archive = tmp_path / "tree.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tree, tree.name)
    programs["brought"].update(archive=str(archive), sha256=building.sha256(archive))
    told = call(**{**programs, "release": {"source": "git", "build": 1, "member": ""}, "cache": str(small_disk)})
    assert told["failed"]
    assert f"unpack failed: the disk of {small_disk} is full" in told["msg"]
