"""Errors of the file system are sentences, and what a run changes on a host takes its place whole: each change of a run fails once, on a full disk or
since the run is killed. The next run brings what an undisturbed one brings, and the one after it changes nothing."""

import contextlib
import errno
import itertools
import os
import re
import stat
import tarfile
from pathlib import Path

import faults
import pytest
import test_services
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, errors, files
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import builder, installer, manifest
from ansible_collections.llamacpp.cluster.plugins.modules import link
from support import builds
from test_services import HEAD, OTHER, WORKER

KINDS = pytest.mark.parametrize("kind", faults.KINDS)


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replaced(*paths):
        done.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    files.replace_file(tmp_path / "unit", "text", 0o640)
    assert done == ["file", "replace", "folder"]
    assert faults.tree(tmp_path) == {"unit": (0o640, b"text")}


@pytest.mark.parametrize("number, raised", [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_a_folder_is_no_error(tmp_path, monkeypatch, number, raised):
    """As shares of a virtual machine and some network mounts, where a plan may be written."""
    fsync = os.fsync

    def synced(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    with pytest.raises(OSError, match=os.strerror(number)) if raised else contextlib.nullcontext():
        files.replace_file(tmp_path / "unit", "text", 0o640)
    assert (tmp_path / "unit").read_text() == "text"


@pytest.mark.parametrize("number", errors.REMEDIES)
def test_an_error_names_its_path_the_file_system_and_a_remedy(tmp_path, number):
    said = errors.sentence(OSError(number, os.strerror(number), str(tmp_path / "no" / "file")))
    mount = errors.file_system(str(tmp_path))
    assert os.path.ismount(mount)
    assert said.startswith(f"{tmp_path}/no/file: {os.strerror(number)}. ")
    assert (f" {mount}" in said) == (number not in (errno.EACCES, errno.EPERM))
    assert "{" not in said
    if number == errno.ENOSPC:
        assert re.search(rf" on {mount} \(\d+ MiB( and room for \d+ files)? left\) and run the playbook again\.$", said)


def test_an_error_without_a_path(tmp_path):
    said = errors.sentence(OSError(errno.EIO, "Input/output error"), str(tmp_path), str(tmp_path))
    remedy = (
        "Input/output error. See dmesg for what is wrong with the disk of {}, and run the playbook again when it works."
    )
    assert said == remedy.format(errors.file_system(str(tmp_path)))
    relative = errors.sentence(OSError(errno.EIO, "Input/output error", "bin"), "/")
    assert relative == "bin: " + remedy.format("/")
    assert errors.sentence(OSError("odd")) == "odd. Fix that on the host and run the playbook again."


def test_a_file_system_that_does_not_answer(tmp_path, monkeypatch):
    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", path)

    monkeypatch.setattr(os, "statvfs", stale)
    assert " on / and run" in errors.sentence(OSError(errno.ENOSPC, "No space left on device", "/"))


def test_every_module_that_runs_on_hosts_does():
    texts = {path.stem: path.read_text() for path in Path(link.__file__).parent.glob("*.py")}
    ways = re.compile(r"(errors\.)?reported\(module|except OSError as error")
    assert [name for name, text in texts.items() if "def main()" in text and not ways.search(text)] == []


def test_a_file_on_a_disk_that_is_really_full(small_disk):
    target = small_disk / "unit"
    files.replace_file(target, "old", 0o644)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(bytes(1 << 20))
    with pytest.raises(OSError, match="No space left") as raised:
        files.replace_file(target, "new" * 4096, 0o644)
    said = f"{target}: No space left on device. Free some space on {small_disk} (0 MiB and room for "
    assert errors.sentence(raised.value).startswith(said)
    assert faults.tree(small_disk, "ballast") == {"unit": (0o644, b"old")}
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "unit"]
    (small_disk / "ballast").unlink()
    files.replace_file(target, "new" * 4096, 0o644)
    assert faults.tree(small_disk) == {"unit": (0o644, b"new" * 4096)}


def failed_runs(broken, make, run, state, *place):
    """Repeats a run in which one change more succeeds each time, until all do. Each time, the run after it, with the fault gone, has to
    bring the state that an undisturbed run brings, and the one after that must change nothing.

    :param make: a new host, from the number of the try, or «whole».
    :param run: does the work on it; returns whether it changed something.
    :param state: of the host.
    :param place: where it works, for errors that name no path.
    :returns: how many runs failed.
    """
    whole = make("whole")
    run(whole)
    expected = state(whole)
    for number in itertools.count(1):
        host = make(number)
        broken.at, broken.count, said = number, 0, []
        try:
            run(host)
        except faults.Killed:
            pass
        except OSError as error:
            said.append(error)
        reached = broken.count >= number
        broken.at = None
        remedy = r"\. [A-Z].*(run the playbook again|\(become\))"
        path = r"(\S+: )?" if place else r"/.*: "
        assert all(re.match(f"^{path}{error.strerror}{remedy}", errors.sentence(error, *place)) for error in said)
        if not reached:
            return number - 1
        run(host)
        assert state(host) == expected, f"after change {number}"
        assert not run(host), f"after change {number}"


def with_old_services(root, name, monkeypatch):
    """A host on which a head and a worker run by an old definition, and a worker that is not planned any more."""
    root.mkdir()
    machine = test_services.machine_with(name, root, monkeypatch)
    machine.apply(*(test_services.defined(each, f"{each} 0") for each in (HEAD, WORKER, OTHER)))
    return machine


def of_services(machine):
    left_out = ("calls", "events", "known", "loaded")
    return faults.tree(machine.folder, *left_out)


def changes(argv):
    return any(word.startswith(test_services.CHANGING) for word in argv[1:])


def renew(machine):
    return bool(machine.apply(HEAD, WORKER, remove=[OTHER]))


@pytest.mark.faults
@KINDS
@pytest.mark.parametrize("name", ["systemd", "launchd"])
def test_services_after_a_fault(tmp_path, monkeypatch, name, kind):
    broken = faults.Faults(monkeypatch, kind, tmp_path)
    monkeypatch.setattr(commands, "run", broken.command(commands.run, changes))

    def make(number):
        return with_old_services(tmp_path / str(number), name, monkeypatch)

    assert failed_runs(broken, make, renew, of_services) > 1


PROGRAM = "#!/bin/sh\necho usage: --rpc\n"
TARGETS = ["ggml-rpc-server", "llama-server"]


NEW = builds.BUILD._replace(id="new", targets=tuple(TARGETS))


def run_logged(builder, step, _argv):
    """What cmake and tar would make, with a line in the log."""
    made = {"unpack": ["source/CMakeLists.txt"], "compile": [f"build/bin/{name}" for name in TARGETS]}
    with builder.log.open("ab") as log:
        log.write(f"== {step}\n".encode())
    for name in made.get(step, []):
        (builder.work / name).parent.mkdir(parents=True, exist_ok=True)
        (builder.work / name).write_text(PROGRAM)
    return 0, []


def compiled(root, archive):
    builder.Builder(
        str(root / "prefix"), str(root / "cache"), NEW, builds.RELEASE, builds.source_of(archive), None
    ).install()


def unpacked(root, archive):
    if not manifest.installed(root / "prefix/releases/new"):
        installer.Installer(str(root / "prefix"), NEW, None).unpack(builds.source_of(archive), 7)


@pytest.mark.faults
@KINDS
@pytest.mark.parametrize("install", [compiled, unpacked])
def test_a_release_after_a_fault(tmp_path, monkeypatch, untried, install, kind):
    monkeypatch.setattr(builder.Builder, "_run_logged", run_logged)
    folder = tmp_path / "llama-b9900"
    folder.mkdir()
    for name in (*TARGETS, "libggml.so"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    archive = tmp_path / "programs.tar"
    with tarfile.open(archive, "w") as opened:
        opened.add(folder, folder.name)

    def make(number):
        (tmp_path / str(number)).mkdir()
        return tmp_path / str(number)

    def run(root):
        before = state(root)
        install(root, archive)
        return state(root) != before

    def state(root):
        found = faults.tree(root, "cache/builds/new.log", "cache/builds/new.tar.gz")
        release = root / "prefix/releases/new"
        return found, release.stat().st_mtime if release.exists() else None, sorted(release.parent.glob(".*"))

    monkeypatch.setattr(builder.time, "monotonic", lambda: 1.0)
    compiled(tmp_path / "builder", archive)
    broken = faults.Faults(monkeypatch, kind, tmp_path)
    assert failed_runs(broken, make, run, state, str(tmp_path)) > 5
