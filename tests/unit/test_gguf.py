import contextlib
import random
import struct

import gguf as gguf_package
import numpy
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils import gguf
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import known_answer_file


@pytest.fixture(name="model")
def a_model(tmp_path):
    path = tmp_path / "model.gguf"
    known_answer_file.write(path, 2, 64, "f16")
    return path


def test_tensor_types_are_those_of_the_gguf_package():
    package = gguf_package
    for kind, (name, *sizes) in gguf.TENSOR_TYPES.items():
        if name != "Q2_0":  # newer than the package
            assert package.GGMLQuantizationType(kind).name == name
            assert package.GGML_QUANT_SIZES[package.GGMLQuantizationType(kind)] == tuple(sizes)


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        gguf.summarize(gguf.read_path(str(tmp_path / "none.gguf")))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(100), b"#!/bin/sh\n" + bytes(100)])
def test_not_gguf(tmp_path, content):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(gguf.GGUFError, match="not a GGUF file"):
        gguf.summarize(gguf.read_path(str(path)))


@pytest.mark.parametrize("kept", [0.001, 0.05, 0.5, 0.999])
def test_truncated(model, kept):
    data = model.read_bytes()
    model.write_bytes(data[: max(24, int(len(data) * kept))])
    with pytest.raises(gguf.GGUFError, match="truncated"):
        gguf.summarize(gguf.read_path(str(model)))


def test_unknown_version(model):
    data = bytearray(model.read_bytes())
    data[4:8] = struct.pack("<I", 9)
    model.write_bytes(data)
    with pytest.raises(gguf.GGUFError, match="version 9"):
        gguf.summarize(gguf.read_path(str(model)))


@pytest.mark.parametrize("offset", [8, 16, 24])
def test_lengths_are_not_believed(model, offset):
    data = bytearray(model.read_bytes())
    data[offset : offset + 8] = struct.pack("<Q", 1 << 60)
    model.write_bytes(data)
    with pytest.raises(gguf.GGUFError):
        gguf.summarize(gguf.read_path(str(model)))


def test_nesting_is_limited(tmp_path):
    path = tmp_path / "deep.gguf"
    nested = struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + nested
    )
    with pytest.raises(gguf.GGUFError, match="nested"):
        gguf.summarize(gguf.read_path(str(path)))


def test_a_damaged_header_is_an_error_or_a_model_never_anything_else(model):
    """Mutations of the header, with a fixed seed."""
    data = model.read_bytes()
    chance = random.Random(1)
    for _index in range(1500):
        damaged = bytearray(data)
        for _index in range(chance.randint(1, 4)):
            damaged[chance.randrange(4, 9000)] = chance.randrange(256)
        model.write_bytes(damaged)
        with contextlib.suppress(gguf.GGUFError):
            assert gguf.summarize(gguf.read_path(str(model)))["layers"] > 0


def write_part(path, index, count, tensor="blk.0.attn_q.weight", further=()):
    """One part of a model with one layer and one tensor in each part."""
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(1)
    writer.add_context_length(128)
    writer.add_uint16("split.count", count)
    writer.add_uint16("split.no", index)
    for key, value in further:
        writer.add_uint32(key, value)
    writer.add_tensor(tensor, numpy.zeros((64, 64), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_split_model(tmp_path):
    first, second = (tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2))
    write_part(first, 0, 2, further=[("split.tensors.count", 2)])
    with pytest.raises(gguf.GGUFError, match=r"lacks its part big-00002-of-00002\.gguf"):
        gguf.read_path(str(first))
    write_part(second, 1, 2, "blk.0.attn_k.weight")
    summary = gguf.summarize(gguf.read_path(str(first)))
    assert summary["layer_bytes"] == [2 * 64 * 64 * 4]
    assert summary["files"] == [{"name": path.name, "bytes": path.stat().st_size} for path in (first, second)]
    with pytest.raises(gguf.GGUFError, match="is one of 2 parts: name the first one, which ends in -00001-of-00002"):
        gguf.read_path(str(second))
