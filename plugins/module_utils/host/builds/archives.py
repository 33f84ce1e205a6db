# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inspects archives of llama.cpp, and extracts programs from archives like upstream's releases.

Archives are not trusted: only planned programs and the libraries next to them are extracted, under their base names and into a single folder. Links
may only point to these files.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

SERVER_PROGRAM = "llama-server"
LIB_PATTERN = re.compile(r"lib[\w.+-]+\.(so(\.\d+)*|dylib)")
MAX_HEADER_BYTES = 32 << 20
"""Limit for all headers together, which take several times as much memory; zip archives get a quarter. Headers of llama.cpp's sources take 2 MB."""
MAX_GLOBAL_HEADERS = 64
"""Maximum number of global headers, which tarfile copies to each file; git writes one."""
MAX_ZIP_END_BYTES, MAX_LINK_TARGET_BYTES = 20 + 22 + 0xFFFF, 4096
"""Size limits: the end of a zip archive, with its comment and zip64 locator, and the target of a symbolic link in the archive."""
ARCHIVE_ERRORS = (
    *(tarfile.TarError, OSError, zlib.error, LZMAError, EOFError, zipfile.BadZipFile),
    *(ValueError, LookupError, ArithmeticError, RuntimeError),
)
"""Exceptions raised while reading a damaged archive. The errno of such an OSError is None or EINVAL."""


class DamagedError(Exception):
    """Error for a file that is not a complete archive; the message is the reason."""


class _LimitedStream:
    """Content of a tar archive. tarfile trusts the sizes in headers, so this class limits the bytes outside extracted files."""

    def __init__(self, stream: Any) -> None:
        self.remaining_bytes = MAX_HEADER_BYTES
        self._stream = stream
        self.seek, self.tell, self.close = stream.seek, stream.tell, stream.close

    def read(self, size: int) -> bytes:
        self.remaining_bytes -= size
        if size < 0 or self.remaining_bytes < 0:
            raise tarfile.ReadError("its headers are too long: exclude .git and build folders from the archive")
        return self._stream.read(size)


class _TarArchive(tarfile.TarFile):
    def __init__(self, name: Any, mode: Any, fileobj: Any, **options: Any) -> None:
        self._limited_stream = _LimitedStream(fileobj)
        super().__init__(name, mode, self._limited_stream, **options)  # type: ignore[arg-type]  # the type asks for a file that also writes

    def next(self) -> tarfile.TarInfo | None:
        member = super().next()
        if len(self.pax_headers) > MAX_GLOBAL_HEADERS:
            raise tarfile.ReadError("its global header is too long")
        return member

    def extractfile(self, member: Any) -> Any:
        if member.issparse():  # a header of 512 bytes could fill the disk
            raise tarfile.ReadError(f"{member.name} is a sparse file: pack it without holes")
        self._limited_stream.remaining_bytes += member.size * member.isreg()
        return super().extractfile(member)


class _ZipArchive(zipfile.ZipFile):
    """Zip archive with the tar archive methods that this module uses."""

    def __init__(self, stream: IO[bytes]) -> None:
        """:raises tarfile.ReadError: the central directory, which zipfile loads into memory, is missing or too long."""
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, end - MAX_ZIP_END_BYTES))
        tail = stream.read()
        position = tail.rfind(b"PK\5\6")
        size, comment = (
            int.from_bytes(tail[position + offset : position + offset + width], "little")
            for offset, width in ((12, 4), (20, 2))
        )
        if position < 0 or position + 22 + comment != len(tail) or size > MAX_HEADER_BYTES // 4 or b"PK\6\7" in tail:
            raise tarfile.ReadError("its central directory is missing or too long: repack the archive as .tar.gz")
        super().__init__(stream)

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        for entry in self.infolist():
            member = tarfile.TarInfo(entry.filename.rstrip("/"))
            member.size = entry.file_size
            if entry.is_dir():
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(entry.external_attr >> 16):
                member.type = tarfile.SYMTYPE
                with self.open(entry) as content:
                    member.linkname = content.read(MAX_LINK_TARGET_BYTES).decode()
            yield member

    def extractfile(self, member: tarfile.TarInfo) -> IO[bytes]:
        return self.open(member.name)


@contextmanager
def _open_archive(path: Path) -> Iterator[Any]:
    """:raises DamagedError: the archive is damaged, as far as it was read."""
    try:
        with path.open("rb") as stream:
            is_zip = stream.read(4) == b"PK\3\4"
            stream.seek(0)
            with _ZipArchive(stream) if is_zip else _TarArchive.open(fileobj=stream) as archive:
                yield archive
    except ARCHIVE_ERRORS as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamagedError((str(error).splitlines() or [type(error).__name__])[0].rstrip(":")) from error


def members(path: Path) -> Iterator[tarfile.TarInfo]:
    """:raises DamagedError: the archive is damaged, as far as it was read."""
    with _open_archive(path) as archive:
        yield from archive


def extract_members(path: Path, target_of: Callable[[PurePosixPath], Path | None]) -> dict[Path, str]:
    """Extract files of an archive to new paths.

    :param target_of: returns the target of a file; None to skip it.
    :returns: skipped symbolic links and their targets.
    :raises DamagedError: the archive is damaged.
    """
    links = {}
    with _open_archive(path) as archive:
        for member in archive:
            target = target_of(PurePosixPath(member.name))
            if target and member.issym():
                links[target] = member.linkname
            elif target and (member.isfile() or member.islnk()):
                content = archive.extractfile(member)
                if content is None or target.exists():
                    raise ValueError(f"{member.name} {'has no content' if content is None else 'appears twice'}")
                with content, target.open("xb") as stream:
                    shutil.copyfileobj(content, stream)
    return links


def extract_programs(path: Path, programs: Sequence[str], target: Path, library_archives: Sequence[Path] = ()) -> None:
    """Extract programs and the libraries in their folder into an empty folder.

    :raises Refusal: the archive does not contain llama.cpp with RPC, or a program is missing.
    """
    try:
        folder = folder_of_programs(path, programs)
        links = extract_members(
            path,
            lambda member: (
                target / member.name
                if member.parent == folder and (member.name in programs or LIB_PATTERN.fullmatch(member.name))
                else None
            ),
        )
        for archive in library_archives:
            extract_members(archive, lambda file: target / file.name if LIB_PATTERN.fullmatch(file.name) else None)
    except DamagedError as error:
        raise Refusal(
            f"the archive of llama_release cannot be read ({error}): use a complete tar or zip archive"
        ) from error
    if not all((target / name).exists() for name in programs):
        raise Refusal(
            "the archive of llama_release contains links instead of programs: use an archive that contains the programs"
        )
    for file in target.iterdir():
        file.chmod(0o755 if file.name in programs else 0o644)
    for link, name in links.items():
        if "/" not in name and not link.exists() and ((target / name).is_file() or target / name in links):
            link.symlink_to(name)


def check_sources(path: Path, folder: str) -> None:
    """:param folder: folder of the sources; empty means the archive's top-level folder.
    :raises Refusal: the folder does not contain the sources.
    """
    for member in members(path):
        parent, _slash, name = member.name.rpartition("/")
        if name == "CMakeLists.txt" and (parent == folder if folder else parent and "/" not in parent):
            return
    raise Refusal(
        f"the archive of llama_release has no CMakeLists.txt in {folder or 'its top-level folder'}, where llama.cpp's sources should be: use an archive with "
        "the layout of GitHub's archives, or compiled programs with source: binary"
    )


def folder_of_programs(path: Path, programs: Sequence[str]) -> PurePosixPath:
    """Return the folder of llama-server in an archive.

    :raises Refusal: the folder does not exist, or lacks a program.
    """
    files = [PurePosixPath(member.name) for member in members(path) if not member.isdir()]
    folder = next((member.parent for member in files if member.name == SERVER_PROGRAM), None)
    names = {member.name for member in files if member.parent == folder}
    missing_programs = [name for name in programs if name not in names]
    if folder is None or missing_programs:
        missing_text = f"{' and '.join(missing_programs)} next to {SERVER_PROGRAM}" if folder else SERVER_PROGRAM
        raise Refusal(
            f"the archive of llama_release has no {missing_text}: use an archive with compiled RPC programs of the right build (such as upstream's for "
            "Ubuntu and macOS), or compile with source: git"
        )
    return folder
