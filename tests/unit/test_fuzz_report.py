"""Whatever a file says of which report.yml makes a page, a page or a sentence comes of it, in bounded time."""

import json
import time

import benchmarks
import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import report as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from hypothesis import strategies as st
from support.clusters import strix_halos
from support.fuzzing import WORDS, changed, fuzzed, like, places
from test_page import CHECKS

SECONDS = 10
"""Of processor time. A page takes a fifth of a second, the first one of a process two."""
BENCHMARK = benchmarks.example()
BENCHMARK["cells"] = BENCHMARK["cells"][:6]
PLAN = json.loads(json.dumps(strix_halos(2, 200).plan()))
PARTS = {"plan": PLAN, "verified": CHECKS, "benchmark": BENCHMARK}
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(20, 400).map(lambda digits: 10**digits),
    st.floats(),
    WORDS,
    st.text(max_size=20),
)
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | WORDS, inner, max_size=4),
    max_leaves=12,
)
EXTREME = st.sampled_from(
    [0, 0.0, -0.0, 5e-324, 1e-300, 1e-6, 1e9, 2.0**53, 1 << 53, 1e308, -1, True, "", None, [], {}]
)


def news(value):
    """Changes of a value: of a few places, most of them to something of the same kind, or of several numbers."""
    spots = sorted(places(value), key=repr)
    numbers = [way for way, found in spots if isinstance(found, (int, float))]
    spot = st.sampled_from(spots)
    same = spot.flatmap(lambda found: st.tuples(st.just(found[0]), like(found[1])))
    other = st.tuples(spot.map(lambda found: found[0]), JUNK)
    several = st.lists(st.tuples(st.sampled_from(numbers or [()]), EXTREME), min_size=1, max_size=6)
    return st.lists(same | same | other, min_size=1, max_size=4) | several


NEWS = st.one_of(*(st.tuples(st.just(name), news(part)) for name, part in PARTS.items()))


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr("ansible.utils.display.Display.display", lambda *_arguments, **_named: None)

    def run(files):
        arguments = action.Arguments(str(tmp_path / "page.html"))
        for name, value in files.items():
            path = tmp_path / f"{name}.json"
            path.write_text(value if isinstance(value, str) else json.dumps(value))
            arguments = arguments._replace(**{name: str(path)})
        started, refused = time.process_time(), ""
        try:
            action.write(arguments)
        except AnsibleActionFail as refusal:
            refused = str(refusal)
        assert time.process_time() - started < SECONDS
        assert validation.is_plain(refused)
        return refused

    return run


@fuzzed(NEWS, seconds=0)
def test_any_file_of_a_report(write, new):
    name, parts = new
    write({name: changed(PARTS[name], parts)})


@fuzzed(st.sampled_from(sorted(PARTS)), JUNK.map(json.dumps) | st.text(st.characters(codec="utf-8")))
def test_any_text_of_a_report(write, name, text):
    write({name: text})


@pytest.mark.parametrize(
    "name, way, value, said",
    [
        ("plan", ("placement", 0, "output"), 1 << 53, "llama_plan_path is "),
        ("plan", ("placement", 0, "capacity_mib"), "x", "llama_plan_path is "),
        ("plan", ("hosts",), [1], "llama_plan_path is "),
        ("benchmark", ("time",), 1 << 53, ""),
        ("benchmark", ("time",), -1, "llama_benchmark_path is "),
    ],
)
def test_what_fuzzing_found(write, name, way, value, said):
    refused = write({name: changed(PARTS[name], [(way, value)])})
    assert refused.startswith(said)
    assert bool(refused) == bool(said)
