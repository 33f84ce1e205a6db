# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the headers of GGUF files, including split models.

No number in the file is trusted: counts and lengths are checked against the rest of the file and against fixed limits. llama-server checks everything else.
Format: ggml/docs/gguf.md of ggml-org/ggml, versions 2 and 3.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import split_files, tensor_types

MAX_HEADER_BYTES = 128 * MIB
MAX_METADATA_BYTES = 8 * MIB
"""Maximum size of metadata in memory. This and the other limits apply to the headers of all parts together."""
MAX_KEYS, MAX_TENSORS, MAX_PARTS = 8192, 16384, 4096
"""Limits: ten times the numbers in the largest models."""
MAX_DIMENSIONS = 4
MAX_ELEMENTS, MAX_INT32 = (1 << 63) - 1, (1 << 31) - 1
FIRST_CHUNK_BYTES, MAX_CHUNK_BYTES = 256 * 1024, 4 * MIB
"""Size of the first and of the largest request in bytes; each request is twice as large as the previous request."""
MAX_ARRAY_LENGTH = 4096
"""Maximum length of a stored array; of longer arrays (vocabularies) only the length is stored."""
MAX_STRING_BYTES = 65536
"""Maximum length of a stored string; longer strings are truncated."""

_WEB_PAGE_MESSAGE = (
    "is a web page, not a GGUF file: use the address of the file itself (on Hugging Face, /resolve/ instead of /blob/)"
)
_ERROR_PAGE_MESSAGE = (
    "is a server's error message, not a GGUF file: correct the address or the token, and download the file again"
)
FOREIGN_FORMATS = {
    b"entry not found": _ERROR_PAGE_MESSAGE,
    b'{"error"': _ERROR_PAGE_MESSAGE,
    b"access to model": _ERROR_PAGE_MESSAGE,
    b"<?xml": _ERROR_PAGE_MESSAGE,
    **dict.fromkeys((b"pk\x03\x04", b"\x1f\x8b"), "is an archive: unpack it and use the GGUF file inside"),
    b"<!doctype html": _WEB_PAGE_MESSAGE,
    b"<html": _WEB_PAGE_MESSAGE,
    b"version https://git-lfs": "is a Git LFS pointer, not a GGUF file: download the file with git lfs pull",
}
"""Beginning of a file in lower case → error message, for files that are often mistaken for a model."""

TRUNCATION_REMEDY = "download the whole file, or if it was split, join all parts with cat"
RAW_PART_MESSAGE = "is a part of a split file: join all parts in order with cat and use the joined file"

STRING_TYPE, ARRAY_TYPE = 8, 9
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value → its format character for struct."""
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFError(ValueError):
    """Error for a file that is not a usable GGUF file; the message is the end of a sentence that names the file."""


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


class Tensor(NamedTuple):
    type: str
    """Name of its type in ggml.h."""
    shape: tuple[int, ...]
    """Number of elements in each dimension; the first dimension is a row."""
    elements: int
    bytes: int


class ModelHeader(NamedTuple):
    metadata: dict[str, Any]
    """Metadata of the first file. An array longer than MAX_ARRAY_LENGTH is replaced by its length, and a string longer than MAX_STRING_BYTES is truncated."""
    tensors: dict[str, Tensor]
    files: list[dict[str, Any]]
    """``name`` and ``bytes`` of each file."""
    sections: list[tuple[int, int, int]]
    """Offset of the first tensor, alignment, and number of tensors of each file."""
    key_ranges: Mapping[str, range] = MappingProxyType({})
    """Byte range of each key with its value in the first file."""


class LocalFile:
    """File on this host with the members that :func:`read_headers` requires of a source."""

    def __init__(self, path: str | Path) -> None:
        try:
            self.stream = reading.open_file(path, follows_links=True)
        except reading.NotAFileError:
            raise GGUFError("is not a file") from None
        self.size = os.fstat(self.stream.fileno()).st_size

    def read(self, offset: int, count: int) -> bytes:
        self.stream.seek(offset)
        data = self.stream.read(count)
        if len(data) != count:
            raise GGUFError("was truncated while it was read")
        return data

    def close(self) -> None:
        self.stream.close()


def quote(value: Any) -> str:
    """Return a value from the file as short text for a message."""
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


class _Reader:
    """Reader of the headers of all parts, from start to end, through a small window."""

    def __init__(self) -> None:
        self.header_bytes = self.metadata_bytes = 0  # bytes of the headers of all parts, and of their stored metadata
        self.sections: list[tuple[int, int, int]] = []
        """Offset of the first tensor, alignment, and number of tensors of each part."""

    def open_part(self, source: Any) -> None:
        """Start the next part."""
        self.source = source
        self.max_position = min(source.size, MAX_HEADER_BYTES - self.header_bytes)
        self.window, self.window_start, self.offset_in_window = b"", 0, 0
        self.chunk_bytes = FIRST_CHUNK_BYTES

    @property
    def position(self) -> int:
        """Offset in this part."""
        return self.window_start + self.offset_in_window

    def check_remaining(self, count: int) -> None:
        """Check that ``count`` more bytes fit into the header."""
        if count <= self.max_position - self.position:
            return
        if self.max_position < self.source.size:
            raise GGUFError(f"is refused: its header is longer than {MAX_HEADER_BYTES // MIB} MiB")
        raise GGUFError(f"is truncated: its header exceeds the file's {self.source.size} bytes: {TRUNCATION_REMEDY}")

    def load(self, count: int) -> None:
        """Load the next ``count`` bytes into the window."""
        if self.offset_in_window + count <= len(self.window):
            return
        self.check_remaining(count)
        unread_bytes = self.window[self.offset_in_window :]
        self.window_start, self.offset_in_window = self.position, 0
        start = self.window_start + len(unread_bytes)
        length = min(max(count - len(unread_bytes), self.chunk_bytes), self.max_position - start)
        self.window = unread_bytes + self.source.read(start, length)
        self.chunk_bytes = min(2 * self.chunk_bytes, MAX_CHUNK_BYTES)

    def skip(self, count: int) -> None:
        self.check_remaining(count)
        self.offset_in_window += count

    def parse_number(self, number_format: struct.Struct) -> Any:
        self.load(number_format.size)
        (value,) = number_format.unpack_from(self.window, self.offset_in_window)
        self.offset_in_window += number_format.size
        return value

    def read_metadata(self, count: int, value_count: int = 0) -> bytes:
        """Return the next ``count`` bytes of the metadata, and count them and ``value_count`` values towards the limit."""
        self.metadata_bytes += count + value_count * U64.size
        if self.metadata_bytes > MAX_METADATA_BYTES:
            raise GGUFError(
                f"is refused: it has more than {MAX_METADATA_BYTES // MIB} MiB of metadata besides its vocabulary"
            )
        self.load(count)
        self.offset_in_window += count
        return self.window[self.offset_in_window - count : self.offset_in_window]

    def parse_text(self) -> str:
        length = self.parse_number(U64)
        self.check_remaining(length)
        data = self.read_metadata(min(length, MAX_STRING_BYTES))
        self.skip(length - len(data))
        return data.decode("utf-8", "replace")

    def parse_name(self) -> str:
        """Return a key or the name of a tensor."""
        return printable(self.parse_text(), None)

    def parse_value(self, key: str) -> Any:
        type_number = self.parse_number(U32)
        if type_number == STRING_TYPE:
            return self.parse_text()
        count = None
        if type_number == ARRAY_TYPE:
            type_number, count = self.parse_number(U32), self.parse_number(U64)
            if type_number == STRING_TYPE:
                return self.parse_texts(count)
        if type_number not in SCALAR_FORMATS:
            raise GGUFError(f"is refused: its metadata key {quote(key)} has the unknown type {type_number}")
        return self.parse_scalars(SCALAR_FORMATS[type_number], count)

    def parse_scalars(self, element_format: str, count: int | None) -> Any:
        scalar_format = struct.Struct("<" + element_format)
        if count is None:
            return scalar_format.unpack(self.read_metadata(scalar_format.size))[0]
        if count > MAX_ARRAY_LENGTH:
            self.skip(count * scalar_format.size)
            return count
        return list(struct.unpack(f"<{count}{element_format}", self.read_metadata(count * scalar_format.size)))

    def parse_texts(self, count: int) -> list[str] | int:
        self.check_remaining(count * U64.size)
        if count <= MAX_ARRAY_LENGTH:
            self.read_metadata(0, count)
            return [self.parse_text() for _index in range(count)]
        for _index in range(count):
            self.skip(self.parse_number(U64))
        return count


def _read_tensors(reader: _Reader, count: int, alignment: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and description of each tensor of a file. Between tensors there is only padding to ``alignment``."""
    end, entries = 0, []
    for _index in range(count):
        name, dimensions = reader.parse_name(), reader.parse_number(U32)
        if dimensions > MAX_DIMENSIONS:
            raise GGUFError(f"is refused: tensor {quote(name)} has {dimensions} dimensions")
        shape, elements = tuple(reader.parse_number(U64) for _index in range(dimensions)), 1
        for size in shape:
            elements *= size
        if not 0 < elements <= MAX_ELEMENTS:
            raise GGUFError(f"is refused: tensor {quote(name)} has the invalid shape {list(shape)}")
        entries.append((name, shape, elements, reader.parse_number(U32), reader.parse_number(U64)))
    start = -(-reader.position // alignment) * alignment
    end_offsets = [*(offset for *_entry, offset in entries[1:]), reader.source.size - start]
    for (name, shape, elements, type_number, offset), next_offset in zip(entries, end_offsets):
        kind, row_elements = tensor_types.ALL_TYPES.get(type_number), shape[0] if shape else 1
        size = kind.size(row_elements, elements // row_elements) if kind else next_offset - offset
        if not kind and (type_number not in tensor_types.FUTURE_NUMBERS or size <= 0):
            raise GGUFError(f"is refused: tensor {quote(name)} has the unknown type {type_number}")
        end = -(-end // alignment) * alignment + size
        yield (name, Tensor(kind.name if kind else f"{tensor_types.FUTURE_PREFIX}{type_number}", shape, elements, size))
    reader.sections.append((start, alignment, count))
    if count and start + end > reader.source.size:
        raise GGUFError(
            f"is truncated: it has {reader.source.size} bytes, but its tensors end at {start + end}: {TRUNCATION_REMEDY}"
        )
    next_file_offset = start + -(-end // alignment) * alignment
    if reader.source.size >= next_file_offset + 4 and reader.source.read(next_file_offset, 4) == b"GGUF":
        raise GGUFError(
            "consists of concatenated parts: join the original parts with llama-gguf-split --merge, or use the first part"
        )


def _read_file(reader: _Reader, source: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, range]]:
    """Add the tensors of a file, and return the values of its metadata and their ranges."""
    reader.open_part(source)
    reader.load(min(source.size, 24))
    if reader.window[:4] != b"GGUF" or source.size < 24:
        opening = reader.window.lstrip().lower()
        raise GGUFError(
            next((text for prefix, text in FOREIGN_FORMATS.items() if opening.startswith(prefix)), "is not a GGUF file")
        )
    reader.skip(4)
    version, tensor_count, key_count = reader.parse_number(U32), reader.parse_number(U64), reader.parse_number(U64)
    if version not in (2, 3):
        raise GGUFError(f"is refused: GGUF version {version} is unknown; only versions 2 and 3 are supported")
    for number, size, limit, label in ((key_count, 12, MAX_KEYS, "keys"), (tensor_count, 24, MAX_TENSORS, "tensors")):
        reader.check_remaining(number * size)
        if number > limit:
            raise GGUFError(f"is refused: it has {number} {label}, and the limit is {limit}")
    metadata: dict[str, Any] = {}
    key_ranges: dict[str, range] = {}
    for _index in range(key_count):
        start = reader.position
        key = reader.parse_name()
        metadata[key] = reader.parse_value(key)
        key_ranges[key] = range(start, reader.position)
    alignment = metadata.get("general.alignment", 32)
    if not is_integer(alignment) or alignment < 1 or alignment & (alignment - 1):
        raise GGUFError(f"is refused: its alignment is {quote(alignment)}, which is not a power of 2")
    tensors.update(_read_tensors(reader, tensor_count, alignment))
    reader.header_bytes += reader.position
    return metadata, key_ranges


def _other_part_names(name: str, metadata: dict[str, Any]) -> list[str]:
    """Return the names of the other parts of a split model whose first part is ``name``."""
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return []
    match = split_files.FIRST_PART_PATTERN.fullmatch(name)
    if not is_integer(count) or not match or int(match.group(2)) != count:
        raise GGUFError(
            f"is one of {quote(count)} parts: use the first part, whose name ends in -00001-of-{quote(count):0>5}.gguf"
        )
    if count > MAX_PARTS:
        raise GGUFError(f"is refused: it is one of {count} parts, and the limit is {MAX_PARTS}")
    return split_files.part_names(name)[1:]


def read_headers(name: str, open_file: Callable[[str], Any]) -> ModelHeader:
    """Return the headers of a model, including all parts of a split model.

    :param name: name of the file, or of the first part.
    :param open_file: function that opens a part by name and returns an object with the members of :class:`LocalFile`.
    :raises GGUFError: the file is not usable; the message is the end of a sentence that begins with its path.
    :raises OSError: it cannot be read.
    """
    reader = _Reader()
    tensors: dict[str, Tensor] = {}
    with closing(open_file(name)) as source:
        try:
            metadata, key_ranges = _read_file(reader, source, tensors)
        except GGUFError as error:
            is_raw_part = type(error) is GGUFError and split_files.RAW_PART_PATTERN.fullmatch(name)
            raise GGUFError(RAW_PART_MESSAGE) if is_raw_part else error from None
        files = [{"name": printable(name), "bytes": source.size}]
    for part in _other_part_names(name, metadata):
        try:
            with closing(open_file(part)) as source:
                _read_file(reader, source, tensors)
                files.append({"name": printable(part), "bytes": source.size})
        except FileNotFoundError:
            raise GGUFError(f"is incomplete: its part {printable(part)} is missing") from None
        except GGUFError as error:
            raise type(error)(f"has the part {printable(part)}, which {error}") from None
    return ModelHeader(metadata, tensors, files, reader.sections, key_ranges)


def read_local_headers(path: str) -> ModelHeader:
    """Read the headers of the model at ``path`` on this host, like :func:`read_headers`."""
    folder = Path(path).parent
    return read_headers(Path(path).name, lambda name: LocalFile(folder / name))


class TensorLocation(NamedTuple):
    path: str
    offset: int
    bytes: int


def locate_tensors(path: str) -> dict[str, TensorLocation]:
    """Return the locations of a model's tensors by name. Raises the errors of :func:`read_headers`."""
    header = read_local_headers(path)
    tensors, result = iter(header.tensors.items()), {}
    for file, (start, alignment, count) in zip(header.files, header.sections):
        offset = 0
        for name, tensor in itertools.islice(tensors, count):
            result[name] = TensorLocation(str(Path(path).parent / file["name"]), start + offset, tensor.bytes)
            offset += -(-tensor.bytes // alignment) * alignment
    return result
