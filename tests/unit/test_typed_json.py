"""Records as JSON and back, the shape that untrusted JSON is compared with, and that a plan's types hold every plan."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text


class Part(NamedTuple):
    name: Annotated[str, Text("[a-z]+")]
    size: Optional[int]


class Whole(NamedTuple):
    schema: Annotated[int, Number(1, 1)]
    kind: Annotated[str, ("one", "other")]
    parts: tuple[Part, ...]
    by_name: Mapping[str, Part]
    port: Annotated[int, Number(1, 9)]
    rest: Any
    ratio: float
    note: typed_json.Absent[str] = None
    more: Annotated[tuple[str, ...], typed_json.ABSENT] = ()


JSON = {
    "schema": 1,
    "kind": "one",
    "parts": [{"name": "a", "size": None}],
    "by_name": {"x": {"name": "b", "size": 2}},
    "port": 3,
    "rest": {"any": [1]},
    "ratio": 0.5,
}


def test_a_record_comes_back_from_its_json():
    whole = typed_json.parse(Whole, JSON)
    assert whole.parts[0] == Part("a", None)
    assert whole.by_name["x"].size == 2
    assert whole.note is None
    assert typed_json.dump(whole) == JSON
    assert typed_json.dump(whole._replace(note="n", more=("m",))) == {**JSON, "note": "n", "more": ["m"]}


def test_further_names_are_left_out_and_a_missing_one_is_an_error():
    assert typed_json.parse(Part, {"name": "a", "size": 1, "further": 2}) == Part("a", 1)
    assert typed_json.parse(Part, {"name": "a"}) == Part("a", None)
    assert typed_json.parse(Whole, {**JSON, "more": None}).more == ()
    with pytest.raises(KeyError, match="name"):
        typed_json.parse(Part, {"size": 1})


@pytest.mark.parametrize(
    "change, where",
    [
        ({}, None),
        ({"note": None}, None),
        ({"schema": 2}, "it.schema"),
        ({"schema": True}, "it.schema"),
        ({"kind": "third"}, "it.kind"),
        ({"parts": [{"name": "A", "size": 1}]}, "it.parts[0].name"),
        ({"parts": {}}, "it.parts"),
        ({"by_name": {"x": 1}}, "it.by_name.x"),
        ({"by_name": {"x": {"size": 1}}}, "it.by_name.x.name"),
        ({"port": 10}, "it.port"),
        ({"ratio": "1"}, "it.ratio"),
        ({"more": [1]}, "it.more[0]"),
    ],
)
def test_json_of_another_form_is_found(change, where):
    problem = typed_json.problem("it", {**JSON, **change}, Whole)
    assert (problem.where if problem else None) == where
