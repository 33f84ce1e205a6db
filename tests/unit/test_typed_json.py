"""Records as JSON and back, and JSON of another form."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
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
    with pytest.raises(typed_json.Mismatch, match="name is missing"):
        typed_json.parse(Part, {"size": 1})


@pytest.mark.parametrize(
    "change, said",
    [
        ({"schema": 2}, "schema is 2"),
        ({"schema": True}, "schema is True"),
        ({"kind": "third"}, "kind is 'third'"),
        ({"kind": None}, "kind is None"),
        ({"parts": [{"name": "A", "size": 1}]}, "parts[0].name is 'A'"),
        ({"parts": {}}, "parts is a dict"),
        ({"parts": [{"name": "a"}] * 5000}, "parts has 5000 entries, more than 4096"),
        ({"by_name": {"x": 1}}, "by_name.x is 1"),
        ({"by_name": {"x": {"size": 1}}}, "by_name.x.name is missing"),
        ({"by_name": {"x\x1b": {"name": "a"}}}, "by_name is 'x\\x1b'"),
        ({"by_name": {1: {"name": "a"}}}, "by_name is 1"),
        ({"port": 10}, "port is 10"),
        ({"port": 10**5000}, "port is a 16610-bit number"),
        ({"ratio": "1"}, "ratio is '1'"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"note": "a\nb"}, "note is 'a\\nb'"),
        ({"note": "a\u202eb"}, "note is 'a\\u202eb'"),
        ({"more": [1]}, "more[0] is 1"),
    ],
)
def test_what_a_host_reports_in_another_form_is_refused(change, said):
    with pytest.raises(Refusal) as raised:
        typed_json.parse_report("strix1", "itself", Whole, {**JSON, **change})
    assert str(raised.value) == (
        f"The report from strix1 about itself does not match this version's format ({said}): run the playbook again. If it still does not match, treat this "
        "host as compromised (docs/security.md)."
    )


def test_a_file_without_a_record_is_none(tmp_path):
    path, text = tmp_path / "part.json", '{"name": "a", "size": 1}'
    assert typed_json.read_file(Part, path, len(text)) is None
    for content, expected in ((text, Part("a", 1)), (text + " ", None), ('{"name": 1}', None), ("[1]", None)):
        path.write_text(content)
        assert typed_json.read_file(Part, path, len(text)) == expected
