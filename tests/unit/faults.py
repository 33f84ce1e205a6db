"""Lets the n-th change of a run fail, for every n, as a full disk or a killed run makes it; then the run is repeated."""

import builtins
import errno
import functools
import io
import os
from pathlib import Path


class Killed(BaseException):
    """The run ends here, and nothing of it is done any more, not even what cleans up."""


NEEDS_SPACE = ("open", "write", "mkdir", "symlink", "link")
OTHERS = ("replace", "rename", "unlink", "rmdir")
KINDS = {
    "full disk": (OSError, errno.ENOSPC, NEEDS_SPACE),
    "killed": (Killed, None, (*NEEDS_SPACE, *OTHERS, "command")),
}
"""Fault → the exception, its number, and the changes that it lets fail."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


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
        for name in ("mkdir", "symlink", "link", *OTHERS):
            monkeypatch.setattr(os, name, self._changing(name, getattr(os, name)))
        monkeypatch.setattr(os, "open", self._opening(os.open, lambda flags: flags & WRITING))
        opened = self._opening(io.open, lambda mode: set(mode) & set("wax+"))
        for module in (io, builtins):
            monkeypatch.setattr(module, "open", opened)

    def _watched(self, path):
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
                self.step(name, path)
            return function(*arguments, **named)

        return changing

    def _opening(self, function, writes):
        def opening(file, mode="r", *arguments, **named):
            watched = self.at is not None and writes(mode) and not isinstance(file, int) and self._watched(file)
            if watched:
                self.step("open", file)
            opened = function(file, mode, *arguments, **named)
            return Writer(opened, self.step) if watched and hasattr(opened, "write") else opened

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
