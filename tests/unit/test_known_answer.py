import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import gguf, known_answer
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import known_answer_file


def test_the_tokens_are_the_sentence_and_unique():
    pieces = known_answer.pieces()
    assert "".join(pieces).replace("\u2581", " ") == known_answer.SENTENCE
    assert len(set(pieces)) == len(pieces)


def test_every_layer_moves_every_state_in_its_own_way():
    seen = set()
    for layer in range(64):
        after = known_answer.permutation(layer)
        assert sorted(after) == list(range(known_answer.positions()))
        assert all(state != following for state, following in enumerate(after))
        seen.add(tuple(after))
    assert len(seen) == 64


@pytest.mark.parametrize("layers, width, kind", [(1, 64, "f32"), (5, 128, "f16"), (3, 192, "q8_0")])
def test_the_summary_for_planning_is_that_of_the_written_file(tmp_path, layers, width, kind):
    path = tmp_path / "model.gguf"
    known_answer_file.write(path, layers, width, kind)
    size = path.stat().st_size
    told = {
        **known_answer.summary(layers, width, kind),
        "files": [{"name": "model.gguf", "bytes": size}],
        "bytes": size,
    }
    assert gguf.summarize(gguf.read_path(str(path))) == told


def test_the_file_is_the_same_each_time(tmp_path):
    for name in ("a", "b"):
        known_answer_file.write(tmp_path / name, 2, 64, "f16")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "layers, width, kind, said",
    [
        (16, 100, "f32", "multiple of 64"),
        (0, 128, "f32", "1 or more"),
        (16, 128, "q2_k", "f32, f16, q8_0"),
        (16, 0, "f16", "width"),
    ],
)
def test_sizes_that_cannot_be_made(layers, width, kind, said):
    assert said in known_answer.problem(layers, width, kind)


def test_sizes_that_can_be_made():
    assert known_answer.problem(16, 128, "f32") is None
