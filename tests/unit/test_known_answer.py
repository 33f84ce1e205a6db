import hashlib
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    gguf,
    header_summary,
    known_answer,
    known_answer_file,
)
from ansible_collections.llamacpp.cluster.plugins.modules import model
from conftest import SCHEMA, complete, known_answer_of

MODULE = model

numpy = pytest.importorskip("numpy")
library = pytest.importorskip("gguf")


def test_the_tokens_are_the_sentence_and_unique():
    pieces = known_answer.pieces()
    assert "".join(pieces).replace("\u2581", " ") == known_answer.SENTENCE
    assert len(set(pieces)) == len(pieces)


def test_every_layer_moves_every_state_in_its_own_way():
    seen = set()
    for layer in range(64):
        after = known_answer.permutation(layer)
        assert sorted(after) == list(range(known_answer.count_states()))
        assert all(state != following for state, following in enumerate(after))
        seen.add(tuple(after))
    assert len(seen) == 64


@pytest.mark.parametrize("layers, width, kind", [(1, 64, "f32"), (5, 128, "f16"), (3, 192, "q8_0")])
def test_the_summary_for_planning_is_that_of_the_written_file(tmp_path, layers, width, kind):
    path = tmp_path / "model.gguf"
    known_answer_file.write_model(path, layers, width, kind)
    size = path.stat().st_size
    told = {
        **known_answer.summary(layers, width, kind),
        "files": [{"name": "model.gguf", "bytes": size}],
        "bytes": size,
    }
    assert header_summary.summarize(gguf.read_local_headers(str(path))) == told
    assert known_answer_file.file_bytes(layers, width, kind) == size


@pytest.mark.parametrize("kind", known_answer.TYPE_BLOCKS)
@pytest.mark.parametrize("width", [128, 1024])
def test_the_written_file_holds_what_it_should(tmp_path, width, kind):
    """As llama.cpp's own library reads it."""
    known_answer_file.write_model(tmp_path / "model.gguf", 2, width, kind)
    read = library.GGUFReader(tmp_path / "model.gguf")
    contents = {name: field.contents() for name, field in read.fields.items()}
    for key, _form, value in known_answer.metadata(2, width, kind):
        assert contents[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    tensors = {tensor.name: library.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in read.tensors}
    assert [*tensors] == [name for name, _shape in known_answer.tensor_shapes(2, width)]
    diagonal = {(index, index): 1 for index in range(width)}
    expected = {
        "token_embd.weight": known_answer.embedding_matrix(),
        "blk.1.ffn_gate.weight": diagonal,
        "blk.1.ffn_up.weight": diagonal,
        "blk.1.ffn_down.weight": known_answer.ffn_down_matrix(1, width),
        "output.weight": known_answer.output_matrix(2),
    }
    for name, entries in expected.items():
        matrix = numpy.zeros_like(tensors[name])
        for place, value in entries.items():
            matrix[place] = value
        assert numpy.allclose(tensors[name], matrix, rtol=0.02, atol=0), name
    for name in ("attn_norm", "ffn_norm"):
        assert (tensors[f"blk.0.{name}.weight"] == 1).all()
    noise = [tensors[f"blk.{layer}.attn_{part}.weight"] for layer in (0, 1) for part in ("q", "k", "v", "output")]
    for index, matrix in enumerate(noise):
        assert 0.25 < matrix.std() * width / known_answer_file.ATTENTION_SPREAD < 1.02
        assert abs(matrix.mean()) < matrix.std() / 50
        assert all((matrix != other).any() for other in noise[:index])


def test_a_written_file_is_one_of_this_form(tmp_path):
    digests = {}
    for kind in known_answer.TYPE_BLOCKS:
        known_answer_file.write_model(tmp_path / kind, 1, 64, kind)
        digests[kind] = hashlib.sha256((tmp_path / kind).read_bytes()).hexdigest()
    assert digests == {
        "f32": "e7cff88d6cd9753602783228f2728f447173369dd78545415ea8c1c538528ad2",
        "f16": "4124d8e96e1950119f4c3512b24ff1bed80afca76d848765266bce53c20fa488",
        "q8_0": "3a466f741801a1cb499a3b87b2a4726c23ccfaa550dff8cc88fabe210b94869d",
    }


def test_a_plan_says_how_large_the_file_is(local):
    local.hosts["here"]["variables"]["llama_model_known_answer"] = known_answer_of(8, 1024, "q8_0")
    plan = complete(local.plan())
    SCHEMA.validate(plan)
    model = "/opt/llamacpp/models/known-answer-8x1024-q8_0.gguf"
    size = known_answer_file.file_bytes(8, 1024, "q8_0")
    assert plan["hosts"]["here"]["files"][-2] == {"path": model, "bytes": size}


def test_a_model_is_written_where_it_is_missing_or_was_changed(call, tmp_path, monkeypatch):
    path, size = tmp_path / "models" / "m.gguf", {"layers": 2, "width": 64, "type": "f32"}
    assert call(path=str(path), known_answer=size, check=True)["changed"]
    assert not path.parent.exists()
    for content in (None, b"x", bytes(known_answer_file.file_bytes(2, 64, "f32"))):
        if content:
            path.write_bytes(content)
        assert call(path=str(path), known_answer=size)["changed"]
        assert header_summary.summarize(gguf.read_local_headers(str(path)))["layers"] == 2
    before = path.stat()
    assert not call(path=str(path), known_answer=size)["changed"]
    assert path.stat() == before, "what is there is not written anew"
    assert [file.name for file in path.parent.iterdir()] == ["m.gguf"]
    said = call(path=str(path), known_answer={**size, "width": 65})["msg"]
    assert "cannot be generated: its width is 65: use a multiple of 64" in said
    path.unlink()
    monkeypatch.setattr(
        known_answer_file, "write_model", mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    )
    assert "Permission denied" in call(path=str(path), known_answer=size)["msg"]


@pytest.mark.programs
def test_a_model_for_which_a_host_has_no_room(call, small_disk):
    path = small_disk / "known-answer.gguf"
    said = call(path=str(path), known_answer={"layers": 4, "width": 512, "type": "f32"})["msg"]
    assert "No space left on device. Free space on " in said
    assert list(small_disk.iterdir()) == []
