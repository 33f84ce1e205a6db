"""GGUF files, byte by byte: right ones and wrong ones that no library would write."""

import struct

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
LLAMA = (
    ("general.architecture", STRING, "llama"),
    ("llama.block_count", U32, 2),
    ("llama.embedding_length", U32, 64),
    ("llama.attention.head_count", U32, 1),
    ("llama.context_length", U32, 128),
)
TENSORS = (
    ("token_embd.weight", (64, 32), 0),
    ("blk.0.attn_q.weight", (64, 64), 1),
    ("blk.1.attn_q.weight", (64, 64), 1),
    ("output_norm.weight", (64,), 0),
)
"""Name, shape and type of each tensor: F32 and F16."""
BLOCKS = {0: (1, 4), 1: (1, 2), 8: (32, 34), 12: (256, 144), 24: (1, 1)}
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind, value):
    if isinstance(value, bytes) and kind != STRING:
        return value
    return string(value) if kind == STRING else struct.pack("<" + FORMS[kind], value)


def array(kind, values):
    return struct.pack("<IQ", kind, len(values)) + b"".join(scalar(kind, value) for value in values)


def key(name, kind, value):
    """``value`` is that of a scalar, ``(kind, values)`` of an array, or what the file has in its place."""
    if kind == ARRAY and not isinstance(value, bytes):
        value = array(*value)
    elif not isinstance(value, bytes) or kind == STRING:
        value = scalar(kind, value)
    return string(name) + struct.pack("<I", kind) + value


def tensor(name, shape, kind, offset):
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def size(shape, kind):
    elements = 1
    for dimension in shape:
        elements *= dimension
    return elements // BLOCKS[kind][0] * BLOCKS[kind][1]


def header(keys=LLAMA, tensors=(), version=3, counts=None):
    """A header; tensors are given with their offsets. ``counts`` are said in place of the real numbers of tensors and keys."""
    counts = counts or (len(tensors), len(keys))
    return (
        b"GGUF"
        + struct.pack("<IQQ", version, *counts)
        + b"".join(key(*entry) for entry in keys)
        + b"".join(tensor(*entry) for entry in tensors)
    )


def model(keys=LLAMA, tensors=TENSORS, alignment=32, **further):
    """A whole file, whose data is zeros."""
    placed, end = [], 0
    for name, shape, kind in tensors:
        offset = -(-end // alignment) * alignment
        placed.append((name, shape, kind, offset))
        end = offset + size(shape, kind)
    begin = header(keys, placed, **further)
    return begin + bytes(-len(begin) % alignment) + bytes(end)


def vocabulary(tokens):
    """A model with so many tokens, with scores and merges."""
    return model(
        keys=(
            *LLAMA,
            ("tokenizer.ggml.tokens", ARRAY, (STRING, [f"token {number}" for number in range(tokens)])),
            ("tokenizer.ggml.scores", ARRAY, (F32, [0.0] * tokens)),
            ("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"] * tokens)),
            ("general.file_type", U32, 15),
        )
    )


def write_parts(folder, count=2):
    """A split model."""
    paths = []
    for index in range(count):
        keys = [
            *(LLAMA if index == 0 else ()),
            ("split.count", U16, count),
            ("split.no", U16, index),
            ("split.tensors.count", I32, count),
        ]
        name = f"blk.{index % 2}.attn_q{index // 2 or ''}.weight"
        paths.append(folder / f"big-{index + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(model(keys=keys, tensors=[(name, (64, 64), 0)]))
    return paths


class Source:
    """Bytes in memory, as gguf.read_headers takes them."""

    def __init__(self, data):
        self.data, self.size, self.closed = data, len(data), False

    def read(self, offset, count):
        assert 0 <= offset < offset + count <= self.size
        return self.data[offset : offset + count]

    def close(self):
        self.closed = True
