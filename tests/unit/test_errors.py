"""Errors of the file system are sentences, and a file that a run writes takes its place whole."""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, files
from ansible_collections.llamacpp.cluster.plugins.modules import link
from support.hosts import tree


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
    assert tree(tmp_path) == {"unit": (0o640, b"text")}


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
    said = errors.message_of(OSError(number, os.strerror(number), str(tmp_path / "no" / "file")))
    mount = errors.mount_point(str(tmp_path))
    assert os.path.ismount(mount)
    assert said.startswith(f"{tmp_path}/no/file: {os.strerror(number)}. ")
    assert (f" {mount}" in said) == (number not in (errno.EACCES, errno.EPERM))
    assert "{" not in said


def test_an_error_without_a_path(tmp_path):
    said = errors.message_of(OSError(errno.EIO, "Input/output error"), str(tmp_path), str(tmp_path))
    remedy = "Input/output error. The disk behind {} is failing (see dmesg): repair or replace the disk and run the playbook again."
    assert said == remedy.format(errors.mount_point(str(tmp_path)))
    relative = errors.message_of(OSError(errno.EIO, "Input/output error", "bin"), "/")
    assert relative == "bin: " + remedy.format("/")
    assert errors.message_of(OSError("odd")) == "odd. Fix this on the host and run the playbook again."


def test_every_module_that_runs_on_hosts_does():
    texts = {path.stem: path.read_text() for path in Path(link.__file__).parent.glob("*.py")}
    ways = re.compile(r"(errors\.)?report_errors\(module|except OSError as error")
    assert [name for name, text in texts.items() if "def main()" in text and not ways.search(text)] == []


def test_a_file_on_a_disk_that_is_really_full(small_disk):
    target = small_disk / "unit"
    files.replace_file(target, "old", 0o644)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(bytes(1 << 20))
    with pytest.raises(OSError, match="No space left") as raised:
        files.replace_file(target, "new" * 4096, 0o644)
    said = f"{target}: No space left on device. Free space on {small_disk} and run"
    assert errors.message_of(raised.value).startswith(said)
    assert tree(small_disk, "ballast") == {"unit": (0o644, b"old")}
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "unit"]
    (small_disk / "ballast").unlink()
    files.replace_file(target, "new" * 4096, 0o644)
    assert tree(small_disk) == {"unit": (0o644, b"new" * 4096)}
