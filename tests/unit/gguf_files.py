"""GGUF files, byte by byte: right ones and wrong ones that no library would write."""

import math
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


def write_parts(folder, count=2, numbers=None, tensors=None, said=None):
    """A split model; ``numbers``, ``tensors`` and ``said`` are what the parts say of themselves in place of what is right."""
    paths = []
    for index in range(count):
        keys = [
            *(LLAMA if index == 0 else ()),
            ("split.count", U16, count),
            ("split.no", U16, (numbers or range(count))[index]),
            ("split.tensors.count", I32, said or count),
        ]
        name = (tensors or [f"blk.{index % 2}.attn_q{index // 2 or ''}.weight" for index in range(count)])[index]
        paths.append(folder / f"big-{index + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(model(keys=keys, tensors=[(name, (64, 64), 0)]))
    return paths


class Source:
    """Bytes in memory, as gguf.read takes them."""

    def __init__(self, data):
        self.data, self.size, self.closed = data, len(data), False

    def read(self, offset, count):
        assert 0 <= offset < offset + count <= self.size
        return self.data[offset : offset + count]

    def close(self):
        self.closed = True


NUMBERS = (0, 1, 2, 8, 9, 31, 32, 33, 64, 255, 4096, 65536, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)
KEYS = (
    *(name for name, _kind, _value in LLAMA),
    *("general.alignment", "general.name", "general.file_type", "split.count", "split.no", "split.tensors.count"),
    *("llama.vocab_size", "llama.attention.key_length", "llama.attention.head_count_kv", "tokenizer.ggml.tokens"),
    *("llama.attention.sliding_window_pattern", "llama.feed_forward_length", "a", "b", "c", "\x1b[31m", ""),
)


def random_value(chance):
    """Type and value of a key."""
    kind = chance.choice((*FORMS, U32, STRING, ARRAY, ARRAY))
    if kind == ARRAY:
        kind = chance.choice((*FORMS, STRING) * 3 + (ARRAY, 13))
        count = chance.choice((0, 1, 2, 2, 2, 3, 3, 3, chance.choice(NUMBERS)))
        if kind in (ARRAY, 13) or count > 3:
            return ARRAY, struct.pack("<IQ", kind, count) + chance.randbytes(40)
        return ARRAY, (kind, [random_scalar(chance, kind) for _value in range(count)])
    return kind, random_scalar(chance, kind)


def random_scalar(chance, kind):
    if kind == STRING:
        return chance.choice((b"", b"llama", b"x\0y", "ü".encode(), chance.randbytes(9)))
    if kind not in FORMS:
        return chance.randbytes(chance.randrange(9))
    return chance.choice((0, 1, 2, 32, 64)) if chance.random() < 0.7 else chance.randbytes(struct.calcsize(FORMS[kind]))


def random_model(chance):
    """A model whose keys and tensors are more or less right."""
    keys = [entry for entry in LLAMA if chance.random() < 0.95]
    keys += [(chance.choice(KEYS), *random_value(chance)) for _key in range(chance.randrange(4))]
    if chance.random() < 0.95:
        keys = list({name: (name, *value) for name, *value in keys}.values())
    if chance.random() < 0.01:
        keys.append(("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"] * 5000)))
    chance.shuffle(keys)
    alignment, tensors = chance.choice((1, 8, 32, 32, 32, 64)), []
    if alignment != 32:
        keys.append(("general.alignment", U32, alignment))
    for number in range(chance.randrange(6)):
        kind = chance.choice((*BLOCKS, *BLOCKS, *BLOCKS, *BLOCKS, 39, chance.randrange(50)))
        per_block = BLOCKS.get(kind, (32, 1))[0]
        shape = [per_block * chance.choice((1, 2, 3)), *(chance.choice((1, 1, 2, 5, 1, 2, 1, 0)) for _more in range(3))]
        name = chance.choice((*[f"blk.{number}.attn_q.weight"] * 9, "output.weight", "x" * 63, "x" * 64))
        tensors.append((name, tuple(shape[: chance.choice((0, 1, 2, 3, 4))]), kind))
    return placed(keys, tensors, alignment, chance)


def placed(keys, tensors, alignment, chance):
    """A whole file, in which few things are wrong: an offset, the counts, the version."""
    entries, end = [], 0
    for name, shape, kind in tensors:
        offset = -(-end // alignment) * alignment
        wrong = chance.random() < 0.03
        entries.append((name, shape, kind, chance.choice(NUMBERS) if wrong else offset))
        per_block, size_of_block = BLOCKS.get(kind, (32, 17))
        end = offset + math.prod(shape) // per_block * size_of_block
    version = chance.choice((2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, chance.choice((0, 1, 4, 3 << 24))))
    begin = header(keys, entries, version=version)
    return begin + bytes(-len(begin) % alignment) + bytes(end)


def mutated(chance, data):
    """The data with some bytes changed, numbers replaced, pieces repeated, removed or inserted."""
    data = bytearray(data)
    for _change in range(chance.choice((0, 0, 1, 1, 2))):
        at, some = chance.randrange(min(len(data), 1200) + 1), chance.randrange(1, 17)
        what = chance.randrange(8)
        if what < 2 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif what == 2 and at < len(data):
            data[at] = chance.randrange(256)
        elif what == 3:
            data[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS))
        elif what == 4:
            data[at : at + 4] = struct.pack("<I", chance.choice(NUMBERS) & 0xFFFFFFFF)
        elif what == 5:
            data[at:at] = chance.choice((chance.randbytes(some), data[at : at + some * 4]))
        elif what == 6:
            del data[at : at + some]
        elif chance.random() < 0.3:
            del data[at:]
    return bytes(data)


def fuzzed(chance):
    """A header to try: some are right, most are nearly right."""
    return mutated(chance, random_model(chance))
