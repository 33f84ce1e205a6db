# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Archives that others made, opened within limits; of compiled programs, as upstream's releases are, the files that a release needs.

The archive decides nothing: only programs by their planned names and libraries beside them are taken, by their plain names into one
folder, and links only between these, without circles. A hard link is a further name of a
file of the archive: it is written as a file of its own, and one to anything else is refused.
"""

from __future__ import annotations

import lzma
import re
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

SERVER = "llama-server"
WORKERS = ("ggml-rpc-server", "rpc-server")
LIBRARY = r"lib[\w.+-]+\.(so(\.\d+)*|dylib)"
LIMIT_BYTES = 8 << 30
NOT_FILES = "it holds something else than whole files"
HEADER_BYTES = 16 << 20
COSTS = {
    **dict.fromkeys((tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK), 16),
    tarfile.XGLTYPE: 1 << 14,
}
"""How much memory each byte of a header takes that extends another one; of a global header, which each member copies, 50 bytes are usual."""
DAMAGED = (
    *(tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError),
    *(RecursionError, MemoryError, OverflowError),
)
"""What reading an archive raises that is damaged, beside OSError."""


class ArchiveError(Exception):
    """The archive cannot be used; the message says why and what to do."""


def open_archive(archive: Path, of_host: bool = False) -> tarfile.TarFile:
    """Opens a tar archive. tarfile reads a header of any length into memory, which is limited here.

    :param of_host: whether it is a host's, which ``building.pack`` wrote: files alone, packed with gzip.
    :raises OSError, DAMAGED: it cannot be read, now or later; tarfile.TarError for what is not allowed.
    """
    left = HEADER_BYTES

    class Member(tarfile.TarInfo):
        """Its type is set twice, by ``__init__`` and then as its header has it, before anything that belongs to the header is read."""

        @property
        def type(self) -> bytes:
            return self._type

        @type.setter
        def type(self, kind: bytes) -> None:
            nonlocal left
            self._type = kind
            left -= tarfile.BLOCKSIZE // 2 + COSTS.get(kind, 0) * self.size
            if left < 0 or self.size < 0:
                raise tarfile.TarError(
                    "its headers are too long, or have a size below zero: leave out .git and folders of builds"
                )
            if kind == tarfile.GNUTYPE_SPARSE or (of_host and kind != tarfile.REGTYPE):
                raise tarfile.TarError(NOT_FILES)

        def _proc_gnusparse_10(self, *_arguments: Any) -> None:
            """Takes the place of tarfile's own, which reads without an end where the holes of a file are."""
            raise tarfile.TarError(NOT_FILES)

    return tarfile.open(archive, "r:gz" if of_host else "r:*", tarinfo=Member)


def extract(archive: Path, programs: list[str], target: Path) -> None:
    """Writes programs and the libraries beside them into a folder of the caller's own.

    :raises ArchiveError: it is not an archive of llama.cpp with RPC, or one of the programs is missing.
    """
    try:
        with open_archive(archive) as packed:
            members = _wanted(packed, programs)
            for name, member in members.items():
                if not member.issym():
                    with (target / name).open("xb") as stream:
                        shutil.copyfileobj(cast(IO[bytes], packed.extractfile(member)), stream)
                    (target / name).chmod(0o755 if name in programs else 0o644)
            for name, member in members.items():
                if member.issym():
                    (target / name).symlink_to(member.linkname)
    except (*DAMAGED, KeyError) as error:
        raise ArchiveError(
            f"the archive of llama_release cannot be read ({_first_line(error)}): give a tar archive, as upstream's releases are, not a zip file"
        ) from error


def _wanted(packed: tarfile.TarFile, programs: list[str]) -> dict[str, tarfile.TarInfo]:
    """Name → member with its content: the programs, and the libraries of their folder."""
    folders: dict[PurePosixPath, dict[str, tarfile.TarInfo]] = {}
    for member in packed:
        path = PurePosixPath(member.name)
        if member.islnk():
            target = PurePosixPath(member.linkname)
            folders.setdefault(path.parent, {})[path.name] = folders.get(target.parent, {}).get(target.name, member)
        elif member.isfile() or member.issym():
            folders.setdefault(path.parent, {})[path.name] = member
    found = next((files for files in folders.values() if SERVER in files), {})
    if not found:
        raise ArchiveError(
            f"the archive of llama_release has no {SERVER}: give an archive of llama.cpp's compiled programs"
        )
    workers = [name for name in WORKERS if name in found]
    if not workers:
        raise ArchiveError(
            f"the archive of llama_release has no RPC worker: neither {' nor '.join(WORKERS)} is beside its {SERVER}. Give one that was "
            "built with RPC (upstream's for Ubuntu and macOS are), or compile it with source: git"
        )
    missing = [name for name in programs if name not in found]
    if missing:
        raise ArchiveError(
            f"the archive of llama_release has {', '.join(workers)} and not {', '.join(missing)}, the name in llama.cpp's build of that number: correct build"
        )
    for name, member in found.items():
        if member.islnk() and (name in programs or re.fullmatch(LIBRARY, name)):
            raise ArchiveError(
                f"the archive of llama_release has {name} as a hard link to {member.linkname}, which is not a file before it in the archive: "
                "give one that has the targets of all its links"
            )
    kept = {
        name: member
        for name, member in found.items()
        if not member.issym() and (name in programs or re.fullmatch(LIBRARY, name))
    }
    for name, member in found.items():
        if member.issym() and re.fullmatch(LIBRARY, name) and _leads_to(member, found) in kept:
            kept[name] = member
    if not all(name in kept for name in programs):
        raise ArchiveError(
            "the archive of llama_release has links in place of its programs: give one with the programs themselves"
        )
    if sum(member.size for member in kept.values()) > LIMIT_BYTES:
        raise ArchiveError(
            f"the archive of llama_release has more than {LIMIT_BYTES >> 30} GiB of programs and libraries: give one of llama.cpp alone"
        )
    return kept


def _leads_to(link: tarfile.TarInfo, files: dict[str, tarfile.TarInfo]) -> str | None:
    """The library of the same folder that a link leads to in the end."""
    for _step in files:
        name = link.linkname
        if name not in files or not re.fullmatch(LIBRARY, name):
            return None
        link = files[name]
        if not link.issym():
            return name
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")
