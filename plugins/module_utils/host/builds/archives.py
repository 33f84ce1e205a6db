# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads archives that others made within limits, and takes programs out of archives like those of upstream's releases.

The archive decides nothing: only programs by their planned names and libraries beside them are taken, by their plain names into one
folder, and links only between these, without circles. A hard link is another name of a file in the archive: it is written as a file, and one
to anything else is refused.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Union, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

SERVER = "llama-server"
WORKERS = ("ggml-rpc-server", "rpc-server")
LIBRARY = r"lib[\w.+-]+\.(so(\.\d+)*|dylib)"
LIMIT_BYTES = 8 << 30
HEADER_BYTES = 32 << 20
"""Of all headers; each takes several times as much memory. Sources of llama.cpp have 2 MB of them."""
ZIP = b"PK\x03\x04"
GLOBAL_HEADERS = 64
"""Entries of the header that each member copies; git writes one."""
LINK_BYTES = 4096
"""Of what a link leads to."""
PACKINGS = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ", lzma.open))
"""First bytes of a packed file, and what unpacks it."""
UNREADABLE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, LookupError),
    *(RuntimeError, MemoryError, OverflowError, OSError),
)
"""What reading a damaged archive raises."""


class DamagedError(Exception):
    """A file is not a whole archive; the message is why."""


def unpacked(path: Path) -> IO[bytes]:
    """The content of a file, unpacked where it is packed."""
    with path.open("rb") as stream:
        start = stream.read(8)
    opener: Any = next((opener for magic, opener in PACKINGS if start.startswith(magic)), open)
    return cast(IO[bytes], opener(path, "rb"))


class Archive:
    """A tar archive. tarfile believes the lengths in headers and reads on behind the end, so it reads through this class, which counts."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = HEADER_BYTES
        self._tar = tarfile.TarFile(fileobj=cast(IO[bytes], self))

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        for member in self._tar:
            if member.size < 0 or len(self._tar.pax_headers) > GLOBAL_HEADERS:
                raise tarfile.ReadError("its headers are not those of an archive of files")
            yield member

    def open(self, member: tarfile.TarInfo) -> IO[bytes]:
        """The content of a file, to be read once."""
        self._left += member.size
        return cast(IO[bytes], self._tar.extractfile(member))

    def read(self, size: int) -> bytes:
        """For tarfile."""
        self._left -= size
        if size < 0 or self._left < 0:
            raise tarfile.ReadError("its headers are too long: leave out .git and folders of builds")
        return self._stream.read(size)

    def seek(self, offset: int) -> int:
        """For tarfile."""
        return self._stream.seek(offset)

    def tell(self) -> int:
        """For tarfile."""
        return self._stream.tell()


class ZipArchive:
    """A zip archive, with members as those of a tar archive."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._zip = zipfile.ZipFile(stream)

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        for entry in self._zip.infolist():
            member = tarfile.TarInfo(entry.filename)
            member.size = entry.file_size
            if stat.S_ISLNK(entry.external_attr >> 16):
                with self._zip.open(entry) as content:
                    member.type, member.linkname = tarfile.SYMTYPE, content.read(LINK_BYTES).decode()
            elif entry.is_dir():
                member.type = tarfile.DIRTYPE
            yield member

    def open(self, member: tarfile.TarInfo) -> IO[bytes]:
        """The content of a file, of the size that the archive says."""
        return self._zip.open(member.name)


AnyArchive = Union[Archive, ZipArchive]


def copy(archive: AnyArchive, member: tarfile.TarInfo, target: Path) -> None:
    """Writes a file to a path where nothing is."""
    with target.open("xb") as stream:
        shutil.copyfileobj(archive.open(member), stream)


@contextmanager
def opened(path: Path) -> Iterator[AnyArchive]:
    """:raises DamagedError: it is not a whole archive, as far as it is read."""
    try:
        with unpacked(path) as stream:
            start = stream.read(len(ZIP))
            stream.seek(0)
            yield ZipArchive(stream) if start == ZIP else Archive(stream)
    except Refusal:
        raise
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedError((str(error).splitlines() or [type(error).__name__])[0].rstrip(":")) from error


def content_bytes(path: Path, limit: int) -> int:
    """How many bytes an archive has when it is unpacked, counted until they are more than the limit.

    :raises DamagedError: hosts cannot unpack it.
    """
    size = 0
    with opened(path) as archive:
        is_zip = isinstance(archive, ZipArchive)
        for stream in (archive.open(member) for member in archive if member.isfile()) if is_zip else [unpacked(path)]:
            with stream:
                while size <= limit and (part := stream.read(1 << 20)):
                    size += len(part)
    return size


def extract(path: Path, programs: Sequence[str], target: Path, further: Sequence[Path] = ()) -> None:
    """Writes programs and the libraries beside them into an empty folder.

    :param further: archives of libraries that they need too.
    :raises Refusal: it is not an archive of llama.cpp with RPC, or one of the programs is missing.
    """
    try:
        with opened(path) as archive:
            members = _wanted(archive, programs)
            for name, member in members.items():
                if not member.issym():
                    copy(archive, member, target / name)
                    (target / name).chmod(0o755 if name in programs else 0o644)
            for name, member in members.items():
                if member.issym():
                    (target / name).symlink_to(member.linkname)
        for libraries in further:
            _extract_libraries(libraries, target)
    except DamagedError as error:
        raise Refusal(
            f"the archive of llama_release cannot be read ({error}): give a whole tar or zip archive"
        ) from error


def _extract_libraries(path: Path, target: Path) -> None:
    with opened(path) as archive:
        size = 0
        for member in archive:
            name = PurePosixPath(member.name).name
            size += member.size
            if size > LIMIT_BYTES:
                raise Refusal(
                    f"{path} has more than {LIMIT_BYTES >> 30} GiB of libraries: remove it on the controller, and get the right one"
                )
            if member.isfile() and re.fullmatch(LIBRARY, name):
                copy(archive, member, target / name)
                (target / name).chmod(0o644)


def _wanted(archive: AnyArchive, programs: Sequence[str]) -> dict[str, tarfile.TarInfo]:
    """Name → member with its content: the programs, and the libraries of their folder."""
    folders: dict[PurePosixPath, dict[str, tarfile.TarInfo]] = {}
    for member in archive:
        path = PurePosixPath(member.name)
        if member.islnk():
            target = PurePosixPath(member.linkname)
            folders.setdefault(path.parent, {})[path.name] = folders.get(target.parent, {}).get(target.name, member)
        elif member.isfile() or member.issym():
            folders.setdefault(path.parent, {})[path.name] = member
    files = next((files for files in folders.values() if SERVER in files), {})
    if not files:
        raise Refusal(f"the archive of llama_release has no {SERVER}: give an archive of llama.cpp's compiled programs")
    workers = [name for name in WORKERS if name in files]
    if not workers:
        raise Refusal(
            f"the archive of llama_release has no RPC worker: neither {' nor '.join(WORKERS)} is beside its {SERVER}. Give one that was "
            "built with RPC (upstream's for Ubuntu and macOS are), or compile it with source: git"
        )
    missing = [name for name in programs if name not in files]
    if missing:
        raise Refusal(
            f"the archive of llama_release has {', '.join(workers)} and not {', '.join(missing)}, the name in llama.cpp's build of that number: correct build"
        )
    for name, member in files.items():
        if member.islnk() and (name in programs or re.fullmatch(LIBRARY, name)):
            raise Refusal(
                f"the archive of llama_release has {name} as a hard link to {member.linkname}, which is not a file before it in the archive: "
                "give one that has the targets of all its links"
            )
    chosen = {
        name: member
        for name, member in files.items()
        if not member.issym() and (name in programs or re.fullmatch(LIBRARY, name))
    }
    for name, member in files.items():
        if member.issym() and re.fullmatch(LIBRARY, name) and _library_of(member, files) in chosen:
            chosen[name] = member
    if not all(name in chosen for name in programs):
        raise Refusal(
            "the archive of llama_release has links in place of its programs: give one with the programs themselves"
        )
    if sum(member.size for member in chosen.values()) > LIMIT_BYTES:
        raise Refusal(
            f"the archive of llama_release has more than {LIMIT_BYTES >> 30} GiB of programs and libraries: give one of llama.cpp alone"
        )
    return chosen


def _library_of(link: tarfile.TarInfo, files: dict[str, tarfile.TarInfo]) -> str | None:
    """The library of the same folder that a link leads to in the end."""
    for _step in files:
        name = link.linkname
        if name not in files or not re.fullmatch(LIBRARY, name):
            return None
        link = files[name]
        if not link.issym():
            return name
    return None
