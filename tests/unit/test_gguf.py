"""Headers of models: those that are right, those that are wrong, and those that are meant to do harm."""

import os
import re
import struct
import tracemalloc

import gguf as gguf_package
import gguf_files as files
import numpy
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    gguf,
    header_summary,
    known_answer_file,
    tensor_types,
)

MEMORY = 20 * gguf.MIB
"""What no header may need more of, where the limits are an eighth of the real ones or less: counting memory is slow."""
MAINLINE_TYPES = {**tensor_types.SHARED_TYPES, **tensor_types.MAINLINE_TYPES}


def read(data):
    source = files.Source(data)
    try:
        return gguf.read_headers("model.gguf", lambda name: source)
    finally:
        assert source.closed


def refused(data, match):
    with pytest.raises(gguf.GGUFError, match=match) as error:
        header_summary.summarize(read(data))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300
    return str(error.value)


# What the gguf package says


def agrees(path):
    """Holds everything that is read against the gguf package."""
    found, said = gguf.read_local_headers(str(path)), gguf_package.GGUFReader(path)
    metadata = {name: field for name, field in said.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata.keys() == metadata.keys()
    for name, field in metadata.items():
        contents = field.contents()
        if isinstance(contents, list) and len(contents) > gguf.MAX_ARRAY_LENGTH:
            contents = len(contents)
        assert found.metadata[name] == pytest.approx(contents, nan_ok=True)
    assert found.tensors == {
        tensor.name: gguf.Tensor(
            tensor.tensor_type.name, tuple(tensor.shape.tolist()), int(tensor.n_elements), int(tensor.n_bytes)
        )
        for tensor in said.tensors
    }


def test_types_of_files_are_those_of_the_gguf_package():
    for kind, name in header_summary.FILE_TYPES.items():
        if name != "Q2_0":  # newer than the package
            assert gguf_package.LlamaFileType(kind).name.replace("MOSTLY_", "").replace("ALL_", "") == name


@pytest.mark.parametrize(
    "kind, name, size",
    [(337, "IQ2_K_R4", 3 * 2 * 76), (152, "IQ5_KS", 3 * (2 * 168 + 4)), (219, "IQ1_S_R4", 3 * (16 * 6 + 2))],
)
def test_types_of_ik_llama_are_read_with_what_each_row_has_beside_its_blocks(kind, name, size):
    """Sizes as ggml_row_size of its commit 4840 counts them."""
    data = files.header(tensors=[("t", (512, 3), kind, 0)])
    model = read(data + bytes(-len(data) % 32) + bytes(size))
    assert model.tensors == {"t": gguf.Tensor(name, (512, 3), 1536, size)}
    with pytest.raises(gguf.GGUFError, match="is truncated"):
        read(data + bytes(-len(data) % 32) + bytes(size - 1))


def test_agrees_on_models_made_here(tmp_path):
    path = tmp_path / "model.gguf"
    known_answer_file.write_model(path, 3, 192, "q8_0")
    for made in (
        path.read_bytes(),
        files.model(),
        files.model(version=2),
        files.model(alignment=4096, keys=(*files.LLAMA, ("general.alignment", files.U32, 4096))),
        files.model(tensors=()),
        files.model(tensors=(*files.TENSORS, ("blk.1.scale", (), 0))),
        files.vocabulary(5000),
        moe(),
    ):
        path.write_bytes(made)
        agrees(path)


def test_agrees_on_every_type(tmp_path):
    """Tensors of each type and metadata of each type, written by the package."""
    path = tmp_path / "model.gguf"
    writer = gguf_package.GGUFWriter(path, "llama")
    for name, value in (("uint8", 255), ("int8", -128), ("uint16", 65535), ("int16", -32768), ("uint32", 2**32 - 1)):
        getattr(writer, f"add_{name}")(f"test.{name}", value)
    for name, value in (("int32", -(2**31)), ("uint64", 2**64 - 1), ("int64", -(2**63)), ("bool", True)):
        getattr(writer, f"add_{name}")(f"test.{name}", value)
    writer.add_float32("test.float32", 1.5)
    writer.add_float64("test.float64", -1e300)
    writer.add_string("test.string", "ünï \u2581 \n")
    for name, values in (("numbers", [1, 2, 3]), ("words", ["a", "", "ß"]), ("floats", [0.5, 1.5])):
        writer.add_array(f"test.{name}", values)
    writer.add_array("test.many", [f"token {number}" for number in range(5000)])
    for kind, stored in MAINLINE_TYPES.items():
        if stored.name not in ("Q2_0", "F8_E4M3"):
            raw = numpy.zeros((2, 3, stored.block_bytes), numpy.uint8)
            writer.add_tensor(
                f"{stored.name}.{stored.block_elements}", raw, raw_dtype=gguf_package.GGMLQuantizationType(kind)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    agrees(path)


# What a model's summary says


def moe():
    """Two layers, the second with experts; the file says nothing of its type, or nothing that is known."""
    return files.model(
        keys=(*files.LLAMA, ("general.file_type", files.U32, 1024), ("llama.expert_count", files.U32, 8)),
        tensors=(
            ("token_embd.weight", (64, 32), 0),
            ("blk.0.ffn_down.weight", (64, 64), 1),
            ("blk.0.attn_norm.weight", (64,), 0),
            ("blk.1.ffn_down_exps.weight", (64, 64, 8), 8),
            ("blk.1.attn_norm.weight", (64,), 0),
        ),
    )


def test_a_long_vocabulary_is_cut_anywhere_by_the_window(monkeypatch):
    data = files.vocabulary(gguf.MAX_ARRAY_LENGTH + 10)
    whole = read(data)
    found = header_summary.summarize(whole)
    assert (found["vocabulary"], found["quantisation"]) == (gguf.MAX_ARRAY_LENGTH + 10, "Q4_K_M")
    for chunk in (1, 7, 64, 1000):
        monkeypatch.setattr(gguf, "FIRST_CHUNK_BYTES", chunk)
        monkeypatch.setattr(gguf, "MAX_CHUNK_BYTES", 2 * chunk)
        assert read(data) == whole


@pytest.mark.parametrize(
    "change, said",
    [
        ({"layers": 513, "layer_bytes": [1] * 513}, "layers is 513"),
        ({"width": 1 << 31}, "width is 2147483648"),
        ({"layer_bytes": [-(10**12), 1]}, "layer_bytes[0] is -1000000000000"),
        ({"largest_tensor_bytes": -1}, "largest_tensor_bytes is -1"),
        ({"layer_bytes": [1]}, "layer_bytes has the sizes of 1 layers, not 2"),
        ({"layer_bytes": [0, 0]}, "layer_bytes has only layers without weights"),
        ({"tensors": []}, "tensors is empty, although the layers have weights"),
        ({"expert_bytes": [1 << 40, 0]}, "expert_bytes does not have the sizes of the experts in 2 layers"),
        ({"architecture": "qwen3moe", "keys": {}}, "keys.expert_count is missing"),
        ({"keys": {"attention.sliding_window": True}}, "keys.attention.sliding_window is True"),
        ({"keys": {"made.up": 1}}, "keys is 'made.up'"),
        ({"tensors": 7}, "tensors is 7"),
        ({"tensors": [{"name": "a", "type": "F32", "shape": [1], "bytes": [4], "layers": None}]}, "tensors[0].bytes"),
        (
            {"tensors": [{"name": "a", "type": "F32", "shape": [1], "bytes": 4, "layers": [2]}]},
            "tensors contains a layer beyond the 2 layers",
        ),
    ],
)
def test_a_summary_has_the_limits_of_a_header(change, said):
    summary = header_summary.summarize(read(files.model()))
    with pytest.raises(typed_json.Mismatch, match=re.escape(said)):
        header_summary.parse({**summary, **change})


def test_tensors_in_few_rows_and_the_quantisation_of_most_bytes_without_a_known_file_type():
    found = header_summary.summarize(read(moe()))
    assert (found["quantisation"], found["parameters"]) == ("Q8_0", 64 * 32 + 64 * 64 * 9 + 128)
    assert found["tensors"] == [
        {"name": "token_embd.weight", "type": "F32", "shape": [64, 32], "bytes": 8192, "layers": None},
        {"name": "blk.*.ffn_down.weight", "type": "F16", "shape": [64, 64], "bytes": 8192, "layers": [0]},
        {"name": "blk.*.attn_norm.weight", "type": "F32", "shape": [64], "bytes": 256, "layers": [0, 1]},
        {"name": "blk.*.ffn_down_exps.weight", "type": "Q8_0", "shape": [64, 64, 8], "bytes": 34816, "layers": [1]},
    ]


# Split models


def test_split_models_that_are_not_whole(tmp_path):
    def refusal(path, match):
        with pytest.raises(gguf.GGUFError, match=match):
            gguf.read_local_headers(str(path))

    first, second = files.write_parts(tmp_path)
    refusal(second, "is one of 2 parts: use the first part, whose name ends in -00001-of-00002.gguf")
    data = second.read_bytes()
    second.write_bytes(data[:100])
    refusal(first, r"has the part big-00002-of-00002.gguf, which is truncated")
    second.unlink()
    refusal(first, r"is incomplete: its part big-00002-of-00002.gguf is missing")


def many_parts(keys, count=3):
    """A split model whose parts have these keys, too; opens one by its name."""
    numbers = {f"m-{index + 1:05d}-of-{count:05d}.gguf": index for index in range(count)}

    def open_part(name):
        said = [("split.count", files.U16, count), ("split.no", files.U16, numbers[name])]
        return files.Source(files.model(keys=[*(files.LLAMA if not numbers[name] else ()), *said, *keys], tensors=()))

    return open_part


@pytest.mark.parametrize(
    "limit, most, keys, said",
    [
        ("MAX_METADATA_BYTES", 2500, [("k", files.STRING, "x" * 1000)], "more than 0 MiB of metadata"),
        ("MAX_HEADER_BYTES", 2500, [("k", files.STRING, "x" * 1000)], "its header is longer than 0 MiB"),
        ("MAX_PARTS", 2, [], "it is one of 3 parts, and the limit is 2"),
    ],
)
def test_limits_are_those_of_all_parts_together(monkeypatch, limit, most, keys, said):
    open_part = many_parts([*keys, ("split.tensors.count", files.I32, 0)])
    gguf.read_headers("m-00001-of-00003.gguf", open_part)
    monkeypatch.setattr(gguf, limit, most)
    with pytest.raises(gguf.GGUFError, match=said):
        gguf.read_headers("m-00001-of-00003.gguf", open_part)


# What is wrong


def test_what_is_not_a_file_is_not_read(tmp_path):
    """Nobody writes into the pipe: opening it as a file is opened waits for ever."""
    os.mkfifo(tmp_path / "model.gguf")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(gguf.GGUFError, match="is not a file"):
            gguf.read_local_headers(str(path))


def test_cut_at_every_byte():
    data = files.model()
    for length in (*range(24, 1000), *range(1000, len(data), 97)):
        refused(data[:length], "truncated")


def test_a_file_that_becomes_shorter(tmp_path):
    (tmp_path / "model.gguf").write_bytes(files.model())
    source = gguf.LocalFile(tmp_path / "model.gguf")
    source.size += 1
    with pytest.raises(gguf.GGUFError, match="was truncated while it was read"):
        gguf.read_headers("model.gguf", lambda name: source)


@pytest.mark.parametrize("length", [1 << 30, 1 << 63, (1 << 64) - 1])
def test_lengths_of_values_are_not_believed(length):
    raw = struct.pack("<Q", length)
    for kind, value in (
        (files.STRING, raw),
        (files.ARRAY, struct.pack("<I", files.U8) + raw),
        (files.ARRAY, struct.pack("<I", files.U64) + raw),
        (files.ARRAY, struct.pack("<I", files.STRING) + raw),
        (files.ARRAY, struct.pack("<IQ", files.STRING, 1) + raw),
        (files.ARRAY, struct.pack("<IQ", files.STRING, 5000) + raw),
    ):
        key = files.string("k") + struct.pack("<I", kind) + value
        refused(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + bytes(65536), "truncated")


def with_tensors(*tensors, keys=files.LLAMA, **further):
    return files.header(keys, tensors, **further) + bytes(65536)


def with_key(name, kind, value, **further):
    """A model with this value of one key."""
    return files.model(keys=[*(entry for entry in files.LLAMA if entry[0] != name), (name, kind, value)], **further)


PARTS = ((files.U64, 2**64 - 1), (files.STRING, "2"), (files.F32, 2.0), (files.ARRAY, (files.U8, [2])))


@pytest.mark.parametrize(
    "data, said",
    [
        *((data, "not a GGUF file") for data in (b"", b"GGUF", b"FUGG" + bytes(100))),
        (b"PK\x03\x04" + bytes(100), "is an archive: unpack it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
        *((page, "is a web page") for page in (b"<!DOCTYPE html><html lang='en'>", b"\n<html>x")),
        *(
            (said, "is a server's error message, not a GGUF file")
            for said in (b"Entry not found", b"<?xml version='1.0'?><Error>")
        ),
        (files.model() + files.model(tensors=files.TENSORS[:1]), "concatenated parts: .* --merge"),
        (with_key("general.type", files.STRING, "adapter"), r"is an adapter \(LoRA\), .* --lora in llama_server_extra"),
        (with_key("general.type", files.STRING, "imatrix"), "is an importance matrix"),
        (
            with_key("general.architecture", files.STRING, "clip"),
            "is a projector, .* set llama_model_mmproj to this file",
        ),
        *((with_key("split.count", *parts), "is one of .* parts: use the first part") for parts in PARTS),
        (files.model(tensors=(*files.TENSORS, ("blk.2.scale", (1,), 0))), "claims 2 layers, but tensor 'blk.2.scale'"),
        (files.model(tensors=[(f"blk.{'9' * 5000}.a", (1,), 0)]), "claims 2 layers, but tensor 'blk.999"),
        (with_key("llama.block_count", files.U32, 1, tensors=()), "parameters is 0"),
        (with_key("tokenizer.ggml.tokens", files.ARRAY, (files.STRING, [])), "vocabulary is 0"),
        (files.model(keys=[("k", 13, b"")]), "'k' has the unknown type 13"),
        (files.model(keys=[("k", files.ARRAY, struct.pack("<IQ", 99, 1))]), "'k' has the unknown type 99"),
        (files.model(keys=[("k", files.ARRAY, struct.pack("<IQ", 9, 1 << 60))]), "'k' has the unknown type 9"),
        (with_tensors(("t", (1, 1, 1, 1, 1), 0, 0)), "'t' has 5 dimensions"),
        (with_tensors(("t", (0,), 0, 0)), r"'t' has the invalid shape \[0\]"),
        (with_tensors(("t", (1 << 32, 1 << 31), 0, 0)), "'t' has the invalid shape"),
        (with_tensors(("t", ((1 << 64) - 1,) * 4, 24, 0)), "'t' has the invalid shape"),
        (with_tensors(("t", (1 << 62,), 0, 0)), "is truncated: it has .* bytes, but its tensors end at"),
        (with_tensors(("t", (1,), 4, 0)), "'t' has the unknown type 4"),
        (files.model(keys=[("general.alignment", files.U32, 0)]), "its alignment is 0, which is not a power of 2"),
        (files.model(keys=[("general.alignment", files.STRING, "x" * 999)]), "its alignment is 'xxx"),
        (files.model(keys=[("general.alignment", files.BOOL, True)]), "its alignment is True"),
        (files.model(keys=[("general.alignment", files.U32, 1 << 31)], tensors=files.TENSORS[:1]), "truncated"),
        (files.model(version=1), "version 1 is unknown; only versions 2 and 3 are supported"),
        (files.model(version=0x03000000), "version 50331648 is unknown; only versions 2 and 3 are supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 1) + bytes(4096), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 63) + bytes(4096), "truncated"),
        (files.model(keys=[("general.architecture", files.U32, 1)]), "has no architecture"),
        (files.model(keys=files.LLAMA[:1]), "its number of layers is None"),
        (files.model(keys=[*files.LLAMA[:1], ("llama.block_count", files.BOOL, True)]), "its number of layers is True"),
        (with_key("llama.block_count", files.ARRAY, (files.STRING, ["x" * 999])), "its number of layers is 'xxx"),
        (with_key("llama.block_count", files.U32, 1 << 30), "has 1073741824 layers, and llama.cpp loads at most 512"),
        (with_key("llama.nextn_predict_layers", files.U32, 2), "all of its 2 layers are for multi-token prediction"),
    ],
)
def test_what_cannot_be_planned_with(data, said):
    refused(data, said)


WHOLE = files.model()


@pytest.mark.parametrize(
    "name, data, said",
    [
        *(
            (name, data, "is a part of a split file: join all parts in order with cat and use the")
            for name in ("m.gguf.part1of2", "m.gguf-split-a", "m.gguf.partaa", "m.Q8_0.part-2.gguf", "m.gguf.002")
            for data in (WHOLE[:-1], b"?" * 30)
        ),
        ("m.gguf", WHOLE[:-1], "download the whole file, or if it was split, join all parts with cat$"),
        ("m.gguf", b"?" * 30, "is not a GGUF file$"),
        ("m-00001-of-00002.gguf", b"?" * 30, "is not a GGUF file$"),
    ],
)
def test_raw_parts_of_a_file_are_said_to_be_such(name, data, said):
    with pytest.raises(gguf.GGUFError, match=said):
        gguf.read_headers(name, lambda _name: files.Source(data))
    assert gguf.read_headers("m.gguf.part1of1", lambda _name: files.Source(WHOLE)).files


def test_a_type_that_nobody_read_is_as_large_as_its_place():
    """Of the last tensor, all that follows."""
    tensors = (("a", (64,), 44, 0), ("b", (4, 2), 0, 96), ("c", (2,), 45, 128))
    found = read(with_tensors(*tensors)).tensors
    *others, last = ((one.type, one.bytes) for one in found.values())
    assert (others, last[0]) == ([("type 44", 96), ("F32", 32)], "type 45")
    assert 65536 - 128 - 32 < last[1] <= 65536 - 128
    refused(with_tensors(("a", (64,), 44, 0), ("b", (4, 2), 0, 0)), "'a' has the unknown type 44")


def test_names_are_escaped():
    for name in (b"\xff\xfe", b"\x1b[31mred", "\u202eevil".encode(), b"new\nline"):
        refused(files.model(keys=[(name, 13, b"")]), "has the unknown type 13")
        found = header_summary.summarize(read(files.model(keys=(*files.LLAMA, ("general.name", files.STRING, name)))))
        assert found["name"].isprintable()
        (tensor,) = read(files.model(tensors=[(name, (1,), 0)])).tensors
        assert tensor.isprintable()


def test_a_long_string_is_cut():
    found = read(files.model(keys=[("k", files.STRING, "x" * 100000), ("l", files.U8, 7)]))
    assert found.metadata == {"k": "x" * gguf.MAX_STRING_BYTES, "l": 7}


# Memory


class Endless:
    """A file that says it has an exbibyte, and gives zeros after its first bytes, as long as it is read."""

    size = 1 << 60

    def __init__(self, data, after=b"\0"):
        self.data, self.after, self.given = data, after, 0

    def read(self, offset, count):
        self.given += count
        start = self.data[offset : offset + count]
        lacking = count - len(start)
        phase = max(0, offset - len(self.data)) % len(self.after)
        return start + (self.after * (lacking // len(self.after) + 2))[phase : phase + lacking]

    def close(self):
        pass


def peak(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


WORDS = struct.pack("<IQ", files.STRING, (1 << 19) - 7)


@pytest.mark.programs
@pytest.mark.parametrize(
    "begin, after, said",
    [
        (files.header([], counts=(0, 1 << 40)), b"\0", "header is longer than 4 MiB"),
        (files.header([], counts=(0, 8193)), b"\0", "has 8193 keys, and the limit is 8192"),
        (files.header([("k", files.ARRAY, WORDS)], counts=(0, 2)), b"\0", "header is longer than 4 MiB"),
        (files.header([("k", files.ARRAY, WORDS)], counts=(0, 2)), files.string("x" * 50), "longer than 4 MiB"),
        (files.header([("k", files.ARRAY, struct.pack("<IQ", files.U8, 1 << 50))], counts=(0, 2)), b"\0", "4 MiB"),
        (files.header([("k", files.STRING, b"")], counts=(0, 2))[:-8] + struct.pack("<Q", 1 << 50), b"\0", "4 MiB"),
    ],
)
def test_a_header_without_end(monkeypatch, begin, after, said):
    monkeypatch.setattr(gguf, "MAX_HEADER_BYTES", gguf.MAX_HEADER_BYTES // 32)
    source = Endless(begin, after)

    def work():
        with pytest.raises(gguf.GGUFError, match=said):
            gguf.read_headers("model.gguf", lambda name: source)

    assert peak(work) < MEMORY
    assert source.given <= gguf.MAX_HEADER_BYTES


@pytest.mark.programs
@pytest.mark.parametrize("kind, value", [(files.U8, 1), (files.U32, 1 << 30), (files.STRING, ""), (files.STRING, "ab")])
def test_metadata_that_is_kept_is_bounded(monkeypatch, kind, value):
    """Short arrays, which are kept, but too many of them."""
    monkeypatch.setattr(gguf, "MAX_METADATA_BYTES", gguf.MAX_METADATA_BYTES // 8)
    values = files.array(kind, [value] * gguf.MAX_ARRAY_LENGTH)
    arrays = gguf.MAX_METADATA_BYTES // (len(values) - 12) + 1
    data = files.model(keys=[(f"k{number:05d}", files.ARRAY, values) for number in range(arrays)])

    def work():
        with pytest.raises(gguf.GGUFError, match="more than 1 MiB of metadata"):
            read(data)

    assert peak(work) < MEMORY


def test_every_bit_of_a_header():
    """A model or an error comes of it, with a sentence."""
    data = files.model()
    for position in range(len(files.header(files.LLAMA)) + 200):
        for bit in range(8):
            said = ""
            try:
                summary = header_summary.summarize(
                    read(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
                )
                assert header_summary.parse(summary)
            except gguf.GGUFError as error:
                said = str(error)
            assert said.isprintable()
            assert len(said) < 300
