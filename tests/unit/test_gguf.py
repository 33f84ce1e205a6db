import contextlib
import random
import struct

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils import gguf
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import known_answer_file


@pytest.fixture(name="model")
def a_model(tmp_path):
    path = tmp_path / "model.gguf"
    known_answer_file.write(path, 2, 64, "f16")
    return path


def test_tensor_types_are_those_of_the_gguf_package():
    package = pytest.importorskip("gguf")
    for kind, sizes in gguf.TENSOR_TYPES.items():
        assert package.GGML_QUANT_SIZES[package.GGMLQuantizationType(kind)] == sizes


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        gguf.summarize(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(100), b"#!/bin/sh\n" + bytes(100)])
def test_not_gguf(tmp_path, content):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(gguf.GGUFError, match="not a GGUF file"):
        gguf.summarize(str(path))


@pytest.mark.parametrize("kept", [0.001, 0.05, 0.5, 0.999])
def test_truncated(model, kept):
    data = model.read_bytes()
    model.write_bytes(data[: max(24, int(len(data) * kept))])
    with pytest.raises(gguf.GGUFError, match="truncated"):
        gguf.summarize(str(model))


def test_unknown_version(model):
    data = bytearray(model.read_bytes())
    data[4:8] = struct.pack("<I", 9)
    model.write_bytes(data)
    with pytest.raises(gguf.GGUFError, match="version 9"):
        gguf.summarize(str(model))


@pytest.mark.parametrize("offset", [8, 16, 24])
def test_lengths_are_not_believed(model, offset):
    data = bytearray(model.read_bytes())
    data[offset : offset + 8] = struct.pack("<Q", 1 << 60)
    model.write_bytes(data)
    with pytest.raises(gguf.GGUFError):
        gguf.summarize(str(model))


def test_nesting_is_limited(tmp_path):
    path = tmp_path / "deep.gguf"
    nested = struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + nested
    )
    with pytest.raises(gguf.GGUFError, match="nested"):
        gguf.summarize(str(path))


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
            assert gguf.summarize(str(model))["layers"] > 0


def test_a_part_other_than_the_first_is_refused_and_a_missing_part_is_named(tmp_path):
    package = pytest.importorskip("gguf")
    import numpy

    def write(name, split):
        writer = package.GGUFWriter(tmp_path / name, "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(64)
        writer.add_head_count(1)
        writer.add_context_length(128)
        writer.add_uint16("split.count", split)
        writer.add_tensor("blk.0.attn_q.weight", numpy.zeros((64, 64), numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write("big-00001-of-00002.gguf", 2)
    with pytest.raises(gguf.GGUFError, match="big-00002-of-00002"):
        gguf.summarize(str(tmp_path / "big-00001-of-00002.gguf"))
    write("big-00002-of-00002.gguf", 2)
    assert gguf.summarize(str(tmp_path / "big-00001-of-00002.gguf"))["layers"] == 1
    with pytest.raises(gguf.GGUFError, match="00001-of-00002"):
        gguf.summarize(str(tmp_path / "big-00002-of-00002.gguf"))
