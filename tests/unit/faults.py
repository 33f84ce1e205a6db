"""Lets the n-th change of a run fail, for every n, as a full or broken disk or a killed run makes it; then the run is repeated."""

import builtins
import errno
import functools
import io
import os
from pathlib import Path


class Killed(BaseException):
    """The run ends here, and nothing of it is done any more, not even what cleans up."""


NEEDS_SPACE = ("open", "write", "mkdir", "symlink", "link")
VISIBLE = (*NEEDS_SPACE, "replace", "rename", "unlink", "rmdir", "utime")
CHANGES = (*VISIBLE, "chmod", "fchmod", "fsync")
KINDS = {
    "full disk": (OSError, errno.ENOSPC, NEEDS_SPACE),
    "read-only": (OSError, errno.EROFS, CHANGES),
    "broken disk": (OSError, errno.EIO, CHANGES),
    "forbidden": (OSError, errno.EACCES, CHANGES),
    "killed": (Killed, None, (*VISIBLE, "command")),
}
"""Fault → the exception, its number, and the changes that it lets fail."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
DESCRIPTOR = "/dev/fd/{}"


class Writer:
    """A file that is open for writing; one that fails has written a part."""

    def __init__(self, file, step):
        self._file, self._step = file, step

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._file.close()

    def write(self, data):
        try:
            self._step("write", None)
        except BaseException:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise
        return self._file.write(data)


class Faults:
    """From the n-th change on, all fail whose paths are below one of the folders; n is None for none."""

    def __init__(self, monkeypatch, kind, *folders):
        self.exception, self.number, self.failing = KINDS[kind]
        self.folders, self.at, self.count = [os.path.realpath(folder) for folder in folders], None, 0
        for name in (
            "mkdir",
            "symlink",
            "link",
            "replace",
            "rename",
            "unlink",
            "rmdir",
            "chmod",
            "fchmod",
            "fsync",
            "utime",
        ):
            monkeypatch.setattr(os, name, self._changing(name, getattr(os, name)))
        monkeypatch.setattr(os, "open", self._os_open(os.open))
        opened = self._open(io.open)
        for module in (io, builtins):
            monkeypatch.setattr(module, "open", opened)

    def _watched(self, path):
        if isinstance(path, int):
            path = os.readlink(DESCRIPTOR.format(path))
        path = os.path.realpath(os.fsdecode(path))
        return any(path == folder or path.startswith(folder + "/") for folder in self.folders)

    def step(self, name, path):
        """One change; ``path`` is None where an error of the kernel names none."""
        if self.at is None or name not in self.failing:
            return
        self.count += 1
        if self.count >= self.at:
            if self.exception is Killed:
                raise Killed
            raise OSError(self.number, os.strerror(self.number), *([os.fspath(path)] if path is not None else []))

    def _changing(self, name, function):
        @functools.wraps(function)
        def changing(*arguments, **named):
            path = arguments[1] if name in ("symlink", "link", "replace", "rename") else arguments[0]
            if self.at is not None and (named.get("dir_fd") is not None or self._watched(path)):
                self.step(name, None if isinstance(path, int) else path)
            return function(*arguments, **named)

        return changing

    def _os_open(self, function):
        def opening(path, flags, *arguments, **named):
            if self.at is not None and flags & WRITING and self._watched(path):
                self.step("open", path)
            return function(path, flags, *arguments, **named)

        return opening

    def _open(self, function):
        def opening(file, mode="r", *arguments, **named):
            writes = self.at is not None and set(mode) & set("wax+") and self._watched(file)
            if writes and not isinstance(file, int):
                self.step("open", file)
            opened = function(file, mode, *arguments, **named)
            return Writer(opened, self.step) if writes else opened

        return opening

    def command(self, function, changes=lambda argv: True):
        """A function that runs a command, which a killed run does not.

        :param changes: whether a command changes something; the others need no try of their own.
        """

        def running(argv, *arguments, **named):
            if changes(argv):
                self.step("command", None)
            return function(argv, *arguments, **named)

        return running


class PowerCuts(Faults):
    """Before each change, hands ``check`` what a power cut would leave below a folder, as path → content: what was not brought to the disk
    (fsync) is lost, of files their content, and of folders all changes of names or none."""

    def __init__(self, monkeypatch, folder, check):
        super().__init__(monkeypatch, "killed", folder)
        self.folder, self.check, self.disk, self.held, fsync = folder, check, {}, [], os.fsync
        for path in (folder, *folder.rglob("*")):
            self._keep(path)

        def synced(handle):
            fsync(handle)
            self._keep(Path(os.readlink(DESCRIPTOR.format(handle))))

        monkeypatch.setattr(os, "fsync", synced)
        self.at = 0

    def _keep(self, path):
        """From now on the disk has this file, or the names in this folder."""
        if not path.is_symlink():
            self.held.append(os.open(path, os.O_RDONLY))  # no other file gets its inode
            entries = {each.name: each.lstat().st_ino for each in path.iterdir()} if path.is_dir() else None
            self.disk[path.stat().st_ino] = path.read_bytes() if entries is None else entries

    def _on_disk(self, inode, at=""):
        for name, inner in self.disk[inode].items():
            content = self.disk.get(inner, b"")
            if isinstance(content, dict):
                yield from self._on_disk(inner, f"{at}{name}/")
            else:
                yield f"{at}{name}", content

    def step(self, _name=None, _path=None):
        self.count += 1
        self.check(dict(self._on_disk(self.folder.stat().st_ino)))
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        self.check({str(path.relative_to(self.folder)): self.disk.get(path.stat().st_ino, b"") for path in files})


def tree(root, *left_out):
    """Path → mode and content of each file and link below a folder, without what a killed run leaves beside a file: nothing reads that."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path).replace(str(root), "")
        elif path.is_file() and not name.startswith(left_out) and not path.name.startswith(".llamacpp-"):
            found[name] = (path.stat().st_mode & 0o7777, path.read_bytes())
    return found
