# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the header of a GGUF file and returns what planning needs: sizes per layer, heads, context.

No number in the file is trusted: counts and lengths are held against what is left of the file and of fixed limits, and
the file is held to what llama.cpp holds it to when it loads a model.
Format: ggml/docs/gguf.md of ggml-org/ggml, versions 2 and 3; what llama.cpp refuses: ggml/src/gguf.cpp.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache, tensor_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import split_files as parts

MAX_HEADER_BYTES = 128 * MIB
MAX_KEPT_BYTES = 8 * MIB
"""Of the headers of all parts together, as are the other limits."""
MAX_KEYS, MAX_TENSORS = 8192, 16384
"""Ten times what the largest models have."""
MAX_PARTS = 4096
MAX_STRINGS = 2 * MIB
"""In arrays of all parts: a vocabulary of a million tokens with as many merges."""
MAX_DIMENSIONS = 4
MAX_KEY, MAX_TENSOR_NAME, MAX_TITLE = 65535, 63, 255
MAX_ELEMENTS, MAX_COUNT = (1 << 63) - 1, (1 << 31) - 1
FIRST_CHUNK, LARGEST_CHUNK = 256 * 1024, 4 * MIB
"""Bytes asked for at first, and at most; each time twice as many as before."""
KEPT_ARRAY = 4096
"""Longer arrays (vocabularies) are counted, not kept."""
KEPT_STRING = 65536
"""Longer strings are cut."""

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TYPES = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "float32",
    "bool",
    "string",
    "",
    "uint64",
    "int64",
    "float64",
)
ARRAYS = tuple(f"array of {name}" for name in TYPES)
"""Type of a metadata value → its name."""
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")

FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
    **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
    **{36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0"},
}
"""``general.file_type``, llama_ftype of llama.h → name."""


KEYS_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
FLAGS_BY_LAYER = ("attention.sliding_window_pattern", "attention.recurrent_layers")
"""Keys that may have a value for each layer."""
CACHE_KEYS = (
    *KEYS_BY_LAYER,
    *(f"attention.{name}_length_{kind}" for name in ("key", "value") for kind in ("mla", "swa")),
    *(
        f"attention.{name}"
        for name in ("sliding_window", "sliding_window_pattern", "recurrent_layers", "shared_kv_layers")
    ),
    *(f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "group_count")),
    *("full_attention_interval", "kda.head_dim", "wkv.head_size", "token_shift_count", "shortconv.l_cache"),
    *("nextn_predict_layers", "attention.kv_lora_rank", "rope.dimension_count"),
    *("expert_count", "expert_used_count"),
)
"""Keys of an architecture that tell the size of its cache, and how many of its experts a token uses."""


BY_LAYER = ("uint32", "array of uint32", "array of int32")
FLAGS = (*BY_LAYER, "array of bool")
"""Types of KEYS_BY_LAYER and of FLAGS_BY_LAYER."""


class GGUFError(ValueError):
    """The file is not a GGUF file that can be served; the message says why and ends a sentence that names the file."""


def is_whole(value: Any) -> bool:
    """Whether it is a number without fraction; true and false are none here."""
    return isinstance(value, int) and not isinstance(value, bool)


class Tensor(NamedTuple):
    type: str
    """Name of its type, as in ggml.h."""
    shape: tuple[int, ...]
    """Elements in each dimension; the first one is a row."""
    elements: int
    bytes: int


class Model(NamedTuple):
    """The headers of all files of a model."""

    metadata: dict[str, Any]
    """Of the first file. Arrays longer than KEPT_ARRAY are their length, strings longer than KEPT_STRING are cut."""
    types: dict[str, str]
    """Of each of the metadata: one of TYPES or ARRAYS."""
    tensors: dict[str, Tensor]
    files: list[dict[str, Any]]
    """``name`` and ``bytes`` of each file."""
    data: list[tuple[int, int, int]]
    """Of each file: where its tensors begin, their alignment, and how many there are."""


class File:
    """A file of this host, to read from; what :func:`read` opens for each part has these members."""

    def __init__(self, path: str | Path) -> None:
        """:raises OSError: it cannot be opened."""
        try:
            self.stream = reading.open_file(path, follow=True)
        except reading.NotAFileError:
            raise GGUFError("is not a file") from None
        self.size = os.fstat(self.stream.fileno()).st_size

    def read(self, offset: int, count: int) -> bytes:
        self.stream.seek(offset)
        data = self.stream.read(count)
        if len(data) != count:
            raise GGUFError("became shorter while it was read")
        return data

    def close(self) -> None:
        self.stream.close()


def short(value: Any) -> str:
    """A value of the file for a message."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) < 60 else text[:57] + "..."


class _Reader:
    """Takes the headers of all parts from front to back, through a window that is small against them."""

    def __init__(self) -> None:
        self.header = self.kept = self.strings = 0
        self.data: list[tuple[int, int, int]] = []
        """Of each part: where the tensors begin, their alignment, and how many there are."""

    def begin(self, source: Any) -> None:
        """Starts with the next part."""
        self.source = source
        self.limit = min(source.size, MAX_HEADER_BYTES - self.header)
        self.window, self.start, self.at = b"", 0, 0
        self.chunk = FIRST_CHUNK

    def end(self) -> None:
        """Counts the header of this part."""
        self.header += self.start + self.at

    def left(self, count: int) -> None:
        """Checks that the header may go on for ``count`` bytes."""
        if count <= self.limit - self.start - self.at:
            return
        if self.limit < self.source.size:
            raise GGUFError(f"is refused: its header is longer than {MAX_HEADER_BYTES // MIB} MiB")
        raise GGUFError(f"is truncated: its header does not fit into the file's {self.source.size} bytes")

    def need(self, count: int) -> None:
        """Brings the next ``count`` bytes into the window."""
        if self.at + count <= len(self.window):
            return
        self.left(count)
        rest = self.window[self.at :]
        self.start, self.at = self.start + self.at, 0
        begin = self.start + len(rest)
        wanted = min(max(count - len(rest), self.chunk), self.limit - begin)
        self.window = rest + self.source.read(begin, wanted)
        self.chunk = min(2 * self.chunk, LARGEST_CHUNK)

    def skip(self, count: int) -> None:
        self.left(count)
        self.at += count

    def number(self, form: struct.Struct) -> Any:
        self.need(form.size)
        (value,) = form.unpack_from(self.window, self.at)
        self.at += form.size
        return value

    def spend(self, count: int) -> None:
        """Counts what is kept of the metadata."""
        self.kept += count
        if self.kept > MAX_KEPT_BYTES:
            raise GGUFError(
                f"is refused: it has more than {MAX_KEPT_BYTES // MIB} MiB of metadata beside its vocabulary"
            )

    def keep(self, count: int) -> bytes:
        self.spend(count)
        self.need(count)
        self.at += count
        return self.window[self.at - count : self.at]

    def name(self, longest: int, what: str) -> str:
        """A key or the name of a tensor; bytes that are not UTF-8 are escaped, too."""
        length = self.number(U64)
        self.left(length)
        if length > longest:
            raise GGUFError(f"is refused: the name of a {what} has {length} bytes, at most {longest} are read")
        data = self.keep(length)
        text = printable(data.decode("utf-8", "backslashreplace"), None)
        if b"\0" in data:
            raise GGUFError(
                f"is refused: the name of the {what} {short(text)} has a zero byte, where it ends for llama.cpp"
            )
        return text

    def text(self) -> str:
        length = self.number(U64)
        self.left(length)
        data = self.keep(min(length, KEPT_STRING))
        self.skip(length - len(data))
        return data.decode("utf-8", "replace")

    def value(self, key: str) -> tuple[Any, str]:
        """A value and its type."""
        kind = self.number(U32)
        if kind == STRING:
            return self.text(), TYPES[STRING]
        count = None
        if kind == ARRAY:
            kind, count = self.number(U32), self.number(U64)
            if kind == STRING:
                return self.texts(count), ARRAYS[STRING]
            if kind == ARRAY:
                raise GGUFError(f"is refused: its metadata {short(key)} is nested, which llama.cpp does not read")
        if kind not in SCALARS:
            raise GGUFError(f"is refused: its metadata {short(key)} has the unknown type {kind}")
        return self.scalars(SCALARS[kind], count), (TYPES if count is None else ARRAYS)[kind]

    def scalars(self, form: str, count: int | None) -> Any:
        one = struct.Struct("<" + form)
        if count is None:
            return one.unpack(self.keep(one.size))[0]
        if count > KEPT_ARRAY:
            self.skip(count * one.size)
            return count
        return list(struct.unpack(f"<{count}{form}", self.keep(count * one.size)))

    def texts(self, count: int) -> list[str] | int:
        self.left(count * U64.size)
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise GGUFError(f"is refused: its arrays have {self.strings} strings, at most {MAX_STRINGS} are read")
        if count <= KEPT_ARRAY:
            self.spend(count * U64.size)
            return [self.text() for _index in range(count)]
        left, unpack = count, U64.unpack_from
        while left:
            self.need(U64.size)
            window, at, last = self.window, self.at, len(self.window) - U64.size
            while left and at <= last:
                at += U64.size + unpack(window, at)[0]
                left -= 1
            self.at = at
            self.left(0)
        return count


def _metadata(reader: _Reader, count: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and their types."""
    if count > MAX_KEYS:
        reader.left(count * 12)
        raise GGUFError(f"is refused: it has {count} keys, at most {MAX_KEYS} are read")
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    for _index in range(count):
        key = reader.name(MAX_KEY, "key")
        if not key:
            raise GGUFError("is refused: it has a key without a name")
        if key in metadata:
            raise GGUFError(f"is refused: its metadata has {short(key)} twice")
        metadata[key], types[key] = reader.value(key)
    return metadata, types


def _hold_type(types: Mapping[str, str], key: str, *taken: str) -> None:
    """Checks that llama.cpp takes the type of this key, if the file has it."""
    if types.get(key, taken[0]) not in taken:
        raise GGUFError(f"is refused: its {short(key)} is of type {types[key]}, llama.cpp takes {' or '.join(taken)}")


def _shape(reader: _Reader, name: str) -> tuple[tuple[int, ...], int]:
    """Dimensions and number of elements of a tensor."""
    dimensions = reader.number(U32)
    if dimensions > MAX_DIMENSIONS:
        raise GGUFError(f"is refused: tensor {short(name)} has {dimensions} dimensions")
    shape, elements = tuple(reader.number(U64) for _index in range(dimensions)), 1
    for size in shape:
        elements *= size
    if not 0 < elements <= MAX_ELEMENTS:
        raise GGUFError(f"is refused: tensor {short(name)} has the shape {list(shape)}")
    return shape, elements


def _tensors(reader: _Reader, count: int, alignment: int) -> Iterator[tuple[str, Tensor]]:
    """Name and size of each tensor of a file, which lie there without gaps, each at the next multiple of ``alignment``."""
    end = 0
    for _index in range(count):
        name = reader.name(MAX_TENSOR_NAME, "tensor")
        shape, elements = _shape(reader, name)
        kind, offset = reader.number(U32), reader.number(U64)
        if kind not in tensor_types.ALL:
            raise GGUFError(f"is refused: tensor {short(name)} has the unknown type {kind}")
        stored, row = tensor_types.ALL[kind], shape[0] if shape else 1
        if row % stored.elements:
            raise GGUFError(
                f"is refused: tensor {short(name)} has rows of {row} elements, and {stored.name} blocks of {stored.elements}"
            )
        expected = -(-end // alignment) * alignment
        if offset != expected:
            raise GGUFError(f"is refused: tensor {short(name)} is at {offset} of the data, but belongs at {expected}")
        size = stored.size(row, elements // row)
        end = offset + size
        yield name, Tensor(stored.name, shape, elements, size)
    start = -(-(reader.start + reader.at) // alignment) * alignment
    reader.data.append((start, alignment, count))
    if count and start + end > reader.source.size:
        raise GGUFError(f"is truncated: it has {reader.source.size} bytes, its tensors end at {start + end}")


def _begin(reader: _Reader) -> tuple[int, int]:
    """Number of tensors and of keys."""
    if reader.source.size < 24:
        raise GGUFError("is not a GGUF file: it is too short")
    reader.need(24)
    if reader.window[:4] != b"GGUF":
        raise GGUFError("is not a GGUF file: it does not begin with GGUF")
    version, tensors, keys = struct.unpack_from("<IQQ", reader.window, 4)
    reader.at = 24
    if version and not version & 0xFFFF:
        raise GGUFError("is refused: it is a big-endian file, which llama.cpp does not read here")
    if version == 1:
        raise GGUFError("is refused: it has GGUF version 1, which llama.cpp no longer reads")
    if version not in (2, 3):
        raise GGUFError(f"is refused: GGUF version {version} is unknown, 2 and 3 are read")
    return tensors, keys


def _read_file(reader: _Reader, source: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Adds the tensors of one file and gives its metadata, values and their types."""
    reader.begin(source)
    count, keys = _begin(reader)
    metadata, types = _metadata(reader, keys)
    alignment = metadata.get("general.alignment", 32)
    if not is_whole(alignment) or alignment < 1 or alignment & (alignment - 1):
        raise GGUFError(f"is refused: its alignment is {short(alignment)}, which is not a power of 2")
    _hold_type(types, "general.alignment", "uint32")
    if count + len(tensors) > MAX_TENSORS:
        reader.left(count * 24)
        raise GGUFError(f"is refused: it has {count + len(tensors)} tensors, at most {MAX_TENSORS} are read")
    for name, tensor in _tensors(reader, count, alignment):
        if name in tensors:
            raise GGUFError(f"is refused: it has the tensor {short(name)} twice")
        tensors[name] = tensor
    reader.end()
    return metadata, types


def _other_parts(name: str, metadata: dict[str, Any], types: Mapping[str, str]) -> Iterator[str]:
    """Names of the files that belong to the first one, whose name is ``name``."""
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        _hold_type(types, "split.count", "uint16")
        return
    match = parts.FIRST.fullmatch(name)
    if not is_whole(count) or not match or int(match.group(2)) != count:
        raise GGUFError(
            f"is one of {short(count)} parts: name the first one, which ends in -00001-of-{short(count):0>5}.gguf"
        )
    if count > MAX_PARTS:
        raise GGUFError(f"is refused: it is one of {count} parts, at most {MAX_PARTS} are read")
    if metadata.get("split.no") != 0:
        raise GGUFError(f"is refused: it says that it is part {short(metadata.get('split.no'))}, counted from 0, not 0")
    for key, taken in (("split.count", "uint16"), ("split.no", "uint16"), ("split.tensors.count", "int32")):
        _hold_type(types, key, taken)
    yield from parts.siblings(name)[1:]


def read(name: str, open_file: Callable[[str], Any]) -> Model:
    """The headers of a model; of a split one ``name`` is the first part, and the other parts are read, too.

    :param open_file: given the name of a part, opens what has the members of :class:`File`.
    :raises GGUFError: the file cannot be served; the message ends a sentence that begins with its path.
    :raises OSError: it cannot be read.
    """
    reader = _Reader()
    tensors: dict[str, Tensor] = {}
    with closing(open_file(name)) as source:
        metadata, types = _read_file(reader, source, tensors)
        files = [{"name": printable(name), "bytes": source.size}]
    for index, part in enumerate(_other_parts(name, metadata, types), 1):
        try:
            with closing(open_file(part)) as source:
                own, own_types = _read_file(reader, source, tensors)
                number = own.get("split.no")
                _hold_type(own_types, "split.no", "uint16")
                files.append({"name": printable(part), "bytes": source.size})
        except FileNotFoundError:
            raise GGUFError(f"is incomplete: its part {printable(part)} is missing") from None
        except GGUFError as error:
            raise type(error)(f"has the part {printable(part)}, which {error}") from None
        if number != index:
            raise GGUFError(
                f"has the part {printable(part)}, which is refused: it says that it is part {short(number)}, counted from 0, not {index}"
            )
    announced = metadata.get("split.tensors.count")
    if len(files) > 1 and announced != len(tensors):
        raise GGUFError(f"is refused: its parts hold {len(tensors)} tensors, it says {short(announced)}")
    return Model(metadata, types, tensors, files, reader.data)


def read_path(path: str) -> Model:
    """:func:`read` of the file at ``path`` on this host."""
    folder = Path(path).parent
    return read(Path(path).name, lambda name: File(folder / name))


class Place(NamedTuple):
    """Where a tensor lies."""

    path: str
    offset: int
    bytes: int


def places(path: str) -> dict[str, Place]:
    """Where the tensors of the model at ``path`` lie, by their names. Errors as of :func:`read`."""
    model = read_path(path)
    tensors, found = iter(model.tensors.items()), {}
    for file, (start, alignment, count) in zip(model.files, model.data):
        offset = 0
        for name, tensor in itertools.islice(tensors, count):
            found[name] = Place(str(Path(path).parent / file["name"]), start + offset, tensor.bytes)
            offset += -(-tensor.bytes // alignment) * alignment
    return found


def group(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The tensors in few rows: those that differ in the layer alone are one row.

    :returns: rows with ``name`` (``*`` in place of the layer), ``type``, ``shape``, ``bytes`` (of one tensor) and ``layers``, in
        which such a tensor is; null of those outside the layers.
    """
    rows: dict[tuple[Any, ...], list[int]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)", name, re.DOTALL)
        row = rows.setdefault((f"blk.*.{match[2]}" if match else name, bool(match), tensor), [])
        if match:
            row.append(int(match[1]))
    return [
        {
            "name": name,
            "type": tensor.type,
            "shape": list(tensor.shape),
            "bytes": tensor.bytes,
            "layers": layers if within else None,
        }
        for (name, within, tensor), layers in rows.items()
    ]


def _quantisation(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> str | None:
    """The file's own word for it, else the type that most of its bytes have."""
    said = metadata.get("general.file_type")
    if is_whole(said) and said in FILE_TYPES:
        return FILE_TYPES[said]
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.bytes
    return max(sizes, key=lambda kind: sizes[kind], default=None)


def _whole(value: Any, what: str) -> int:
    """A positive count; of a list (one value a layer) the largest."""
    if isinstance(value, list):
        value = max(value, default=None)
    if not is_whole(value) or not 0 < value <= MAX_COUNT:
        raise GGUFError(f"is refused: its {what} is {short(value)}")
    return int(value)


def _types_of(key: str) -> Sequence[str]:
    """Types that llama.cpp takes for one of CACHE_KEYS."""
    return BY_LAYER if key in KEYS_BY_LAYER else FLAGS if key in FLAGS_BY_LAYER else FLAGS[:1]


def _kept_keys(model: Model, architecture: str, layers: int) -> dict[str, int | list[int]]:
    """CACHE_KEYS by their names without that of the architecture; KEYS_BY_LAYER only where they differ from layer to layer."""
    keys: dict[str, int | list[int]] = {}
    for key in CACHE_KEYS:
        value = model.metadata.get(f"{architecture}.{key}")
        _hold_type(model.types, f"{architecture}.{key}", *_types_of(key))
        if model.types.get(f"{architecture}.{key}") in FLAGS[1:]:
            count = len(value) if isinstance(value, list) else int(value or 0)
            if count > kv_cache.MAX_LAYERS or (key in KEYS_BY_LAYER and count != layers):
                raise GGUFError(f"is refused: it has {count} values of {key} and {layers} layers")
        if isinstance(value, list) and len(value) >= layers and all(isinstance(entry, int) for entry in value):
            keys[key] = [int(entry) for entry in value[:layers]]
        elif isinstance(value, int) and key not in KEYS_BY_LAYER:
            keys[key] = value
    for key, value in keys.items():
        if not all(0 <= entry <= MAX_COUNT for entry in (value if isinstance(value, list) else [value])):
            raise GGUFError(f"is refused: its {key} is {short(value)}")
    further = keys.get("nextn_predict_layers", 0)
    if not isinstance(further, int) or further >= layers:
        raise GGUFError(f"is refused: all of its {layers} layers are for predicting further tokens")
    return keys


def _counts(model: Model, architecture: str) -> dict[str, int]:
    """What the metadata say of the model's size; each is a number of the type that llama.cpp takes."""

    def count(key: str, what: str, default: int | None = None, taken: Sequence[str] = ("uint32",)) -> int:
        number = _whole(model.metadata.get(f"{architecture}.{key}", default), what)
        _hold_type(model.types, f"{architecture}.{key}", *taken)
        return number

    layers, width = count("block_count", "number of layers"), count("embedding_length", "width")
    if layers > kv_cache.MAX_LAYERS:
        raise GGUFError(f"is refused: it has {layers} layers, llama.cpp loads {kv_cache.MAX_LAYERS} at most")
    heads = kv_heads = 1
    if architecture not in kv_cache.RECURRENT:
        heads = count("attention.head_count", "number of heads", taken=BY_LAYER)
        kv_heads = count("attention.head_count_kv", "number of KV heads", heads, taken=BY_LAYER)
    tokens, said = model.metadata.get("tokenizer.ggml.tokens"), count("vocab_size", "vocabulary", 1)
    _hold_type(model.types, "tokenizer.ggml.tokens", "array of string")
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "key_dimension": count("attention.key_length", "key length", width // heads),
        "value_dimension": count("attention.value_length", "value length", width // heads),
        "context": count("context_length", "context length"),
        "vocabulary": said if tokens is None else len(tokens) if isinstance(tokens, list) else tokens,
    }


def _sizes(tensors: Mapping[str, Tensor], layers: int, whole: bool) -> dict[str, Any]:
    """Bytes of each layer, of the input, and of the output. ``whole`` as of ``summarize``."""
    if whole and layers > 1 + len(tensors):
        raise GGUFError(f"is refused: it claims {layers} layers and holds {len(tensors)} tensors")
    layer_bytes, input_bytes, output_bytes = [0] * layers, 0, 0
    for name, tensor in tensors.items():
        match = re.match(r"blk\.([0-9]+)\.", name)
        if match and int(match.group(1)) >= layers:
            raise GGUFError(f"is refused: it claims {layers} layers, and tensor {short(name)} is of one beyond them")
        if match:
            layer_bytes[int(match.group(1))] += tensor.bytes
        elif name.startswith("token_embd"):
            input_bytes += tensor.bytes
        else:
            output_bytes += tensor.bytes
    if "output.weight" not in tensors:
        output_bytes += tensors["token_embd.weight"].bytes if "token_embd.weight" in tensors else 0
    return {"layer_bytes": layer_bytes, "input_bytes": input_bytes, "output_bytes": output_bytes}


def summarize(model: Model, whole: bool = True) -> dict[str, Any]:
    """What planning needs of a model.

    :param whole: whether all of its layers have to be there. A draft model of layers that predict further tokens counts those of the model that it
        is for, and has none of them (--mtp in convert_hf_to_gguf.py of build 11063).
    :returns: ``architecture``, ``name``, ``parameters``, ``quantisation``, ``layers``, ``width``, ``heads``, ``kv_heads``,
        ``key_dimension``, ``value_dimension``, ``context``, ``vocabulary``, ``keys`` (what else says the size of the cache) and, in
        bytes, ``layer_bytes`` (a list), ``input_bytes`` (the token embedding, which stays on the head), ``output_bytes`` (on the
        device of the last layer) and ``largest_tensor_bytes``; ``tensors`` (see group), ``files`` (``name`` and ``bytes`` of each)
        and ``bytes`` of all of them.
    :raises GGUFError: the model cannot be served; the message ends a sentence that begins with its path.
    """
    metadata, tensors = model.metadata, model.tensors
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise GGUFError("is refused: it has no architecture")
    _hold_type(model.types, "general.name", "string")
    _hold_type(model.types, "general.file_type", "uint32")
    counts = _counts(model, architecture)
    summary = {
        "architecture": printable(architecture),
        "name": printable(metadata.get("general.name", model.files[0]["name"])[:MAX_TITLE]),
        "parameters": sum(tensor.elements for tensor in tensors.values()),
        "quantisation": _quantisation(metadata, tensors),
        **counts,
        "keys": _kept_keys(model, architecture, counts["layers"]),
        **_sizes(tensors, counts["layers"], whole),
        "largest_tensor_bytes": max((tensor.bytes for tensor in tensors.values()), default=0),
        "tensors": group(tensors),
        "files": model.files,
        "bytes": sum(file["bytes"] for file in model.files),
    }
    wrong = problem(summary)
    if wrong:
        raise GGUFError(f"is refused: it {wrong}")
    return summary


COUNTS = ("layers", "width", "heads", "kv_heads", "key_dimension", "value_dimension", "context", "vocabulary")
SIZES = ("input_bytes", "output_bytes")
FILES = [{"name": validation.Text(longest=1024), "bytes": validation.Number()}]


def _number(value: Any, least: int, most: int) -> bool:
    return is_whole(value) and least <= value <= most


def _numbers(values: Any, least: int, most: int) -> bool:
    """Whether this is a list of whole numbers."""
    return isinstance(values, list) and all(_number(value, least, most) for value in values)


def _within(parts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether each is a part of the one beside it."""
    return len(parts) == len(sizes) and all(part <= size for part, size in zip(parts, sizes))


def _row(row: dict[str, Any], layers: int) -> bool:
    """Whether this can be one row of group."""
    within, shape = row.get("layers"), row.get("shape")
    return (
        "layers" in row
        and all(isinstance(row.get(key), str) for key in ("name", "type"))
        and _number(row.get("bytes"), 0, MAX_ELEMENTS)
        and _numbers(shape, 1, MAX_ELEMENTS)
        and (within is None or (_numbers(within, 0, layers - 1) and len(within) <= layers))
    )


def problem(summary: Mapping[str, Any]) -> str | None:
    """What is wrong with a summary that was written down, or None. summarize returns none of which something is."""
    for key in ("architecture", "name", *COUNTS, "layer_bytes", *SIZES):
        if key not in summary:
            return f"lacks {key}"
    for key in ("architecture", "name"):
        if not isinstance(summary[key], str):
            return f"has {short(summary[key])} as {key}"
    for key in (*COUNTS, *SIZES):
        if not (_number(summary[key], 1, MAX_COUNT) if key in COUNTS else _number(summary[key], 0, MAX_ELEMENTS)):
            return f"has {short(summary[key])} as {key}"
    if not _number(summary.get("largest_tensor_bytes", 0), 0, MAX_ELEMENTS):
        return f"has {short(summary['largest_tensor_bytes'])} as largest_tensor_bytes"
    if summary["layers"] > kv_cache.MAX_LAYERS:
        return f"has {summary['layers']} layers, llama.cpp loads {kv_cache.MAX_LAYERS} at most"
    sizes = summary["layer_bytes"]
    if not _numbers(sizes, 0, MAX_ELEMENTS) or len(sizes) != summary["layers"]:
        return f"has {short(sizes)} as layer_bytes, which are not the sizes of {summary['layers']} layers"
    experts = summary.get("expert_bytes", sizes)
    if not _numbers(experts, 0, MAX_ELEMENTS) or not _within(experts, sizes):
        return f"has {short(experts)} as expert_bytes, which are not the sizes of the experts in {summary['layers']} layers"
    if not _number(summary.get("parameters", 1), 1, MAX_ELEMENTS):
        return f"has {short(summary['parameters'])} as parameters"
    if not _number(summary.get("bytes") or 0, 0, MAX_ELEMENTS):
        return f"has {short(summary['bytes'])} as bytes"
    unnamed = validation.mismatch("files", summary.get("files", []), FILES)
    if unnamed:
        return f"has {unnamed.where}, which {unnamed.why}"
    keys, rows = summary.get("keys", {}), summary.get("tensors", [])
    if not isinstance(keys, dict) or not all(
        key in CACHE_KEYS and (_number(value, 0, MAX_COUNT) or _numbers(value, 0, MAX_COUNT))
        for key, value in keys.items()
    ):
        return f"has {short(keys)} as keys"
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, dict) or not _row(row, summary["layers"]):
            return f"has {short(row)} among its tensors"
    strange = validation.problem("", summary)
    return f"has {strange.where.lstrip('.') or 'a value'}, which {strange.why}" if strange else None
