# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Takes programs out of archives like those of upstream's releases: tar, packed or not, and zip.

The archive decides nothing: only programs by their planned names and libraries beside them are taken, by their plain names into one
folder, and links only between these.
"""

from __future__ import annotations

import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, Callable, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

SERVER = "llama-server"
WORKERS = ("ggml-rpc-server", "rpc-server")
LIBRARY = r"lib[\w.+-]+\.(so(\.\d+)*|dylib)"
UNREADABLE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    LZMAError,
    EOFError,
    ValueError,
    LookupError,
    OverflowError,
)
"""What reading a damaged archive raises."""


class DamagedError(Exception):
    """A file is not a whole archive; the message is why."""


class Member(NamedTuple):
    """A file or a symbolic link in an archive."""

    path: PurePosixPath
    open: Callable[[], IO[bytes] | None]
    link: str = ""
    """What a symbolic link leads to."""


def members(path: Path) -> Iterator[Member]:
    """The files and links of an archive, each to be read before the next one.

    :raises DamagedError: it is not a whole archive, as far as it is read.
    """
    with _whole():
        yield from _of_zip(path) if zipfile.is_zipfile(path) else _of_tar(path)


@contextmanager
def _whole() -> Iterator[None]:
    """:raises DamagedError: what is read is not whole."""
    try:
        yield
    except UNREADABLE as error:
        raise DamagedError((str(error).splitlines() or [type(error).__name__])[0].rstrip(":")) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DamagedError(str(error)) from error


def _of_tar(path: Path) -> Iterator[Member]:
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() or member.islnk() or member.issym():
                link = member.linkname if member.issym() else ""
                yield Member(PurePosixPath(member.name), partial(archive.extractfile, member), link)


def _of_zip(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            link = archive.read(entry).decode() if stat.S_ISLNK(entry.external_attr >> 16) else ""
            if not entry.is_dir():
                yield Member(PurePosixPath(entry.filename), partial(archive.open, entry), link)


def copy(member: Member, target: Path) -> None:
    """Writes a file to a path where nothing is.

    :raises DamagedError: it is not whole.
    """
    with _whole():
        content = member.open()
        if content is None:
            raise ValueError(f"{member.path} has no content")
        with content, target.open("xb") as stream:
            shutil.copyfileobj(content, stream)


def extract(path: Path, programs: Sequence[str], target: Path, further: Sequence[Path] = ()) -> None:
    """Writes programs and the libraries beside them into an empty folder.

    :param further: archives of libraries that they need too.
    :raises Refusal: it is not an archive of llama.cpp with RPC, or one of the programs is missing.
    """
    try:
        folder = _folder_of_programs(path, programs)
        links = {}
        for member in members(path):
            name = member.path.name
            if member.path.parent != folder or not (name in programs or re.fullmatch(LIBRARY, name)):
                continue
            if member.link:
                links[name] = member.link
            else:
                copy(member, target / name)
                (target / name).chmod(0o755 if name in programs else 0o644)
        if not all((target / name).exists() for name in programs):
            raise Refusal(
                "the archive of llama_release has links in place of its programs: give one with the programs themselves"
            )
        for name, link in links.items():
            if "/" not in link and ((target / link).is_file() or link in links):
                (target / name).symlink_to(link)
        for libraries in further:
            for member in members(libraries):
                if not member.link and re.fullmatch(LIBRARY, member.path.name):
                    copy(member, target / member.path.name)
    except DamagedError as error:
        raise Refusal(
            f"the archive of llama_release cannot be read ({error}): give a whole tar or zip archive"
        ) from error


def _folder_of_programs(path: Path, programs: Sequence[str]) -> PurePosixPath:
    """The folder of llama-server in an archive, which has all programs."""
    folders: dict[PurePosixPath, set[str]] = {}
    for member in members(path):
        folders.setdefault(member.path.parent, set()).add(member.path.name)
    folder = next((folder for folder, names in folders.items() if SERVER in names), None)
    if folder is None:
        raise Refusal(f"the archive of llama_release has no {SERVER}: give an archive of llama.cpp's compiled programs")
    workers = [name for name in WORKERS if name in folders[folder]]
    if not workers:
        raise Refusal(
            f"the archive of llama_release has no RPC worker: neither {' nor '.join(WORKERS)} is beside its {SERVER}. Give one that was "
            "built with RPC (upstream's for Ubuntu and macOS are), or compile it with source: git"
        )
    missing = [name for name in programs if name not in folders[folder]]
    if missing:
        raise Refusal(
            f"the archive of llama_release has {', '.join(workers)} and not {', '.join(missing)}, the name in llama.cpp's build of that number: correct build"
        )
    return folder
