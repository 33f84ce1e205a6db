"""What fuzzers draw, and where they put it."""

import copy
import os
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

OFTEN = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")),
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="FUZZ_EXAMPLES" not in os.environ,
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(20, 400).map(lambda digits: 10**digits),
    st.floats(),
    st.sampled_from(["", "a\nb", "\x1b[2J", "\ud800", "²", "/", "192.0.2.10", "running", "serving"]),
    st.text(max_size=20),
)
JUNK = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def fuzzed(*drawn, seconds=60):
    """A test that gets what these draw, as often as FUZZ_EXAMPLES says; ``seconds`` of 0 are without end."""
    return lambda test: pytest.mark.fuzz(pytest.mark.timeout(seconds)(OFTEN(given(*drawn)(test))))


def places(value, path=()):
    """Where in a value something can be put instead."""
    yield path
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(inner, (*path, name))


def news(value):
    """One to four places of a value with something else in each."""
    spots = sorted(places(value), key=repr)
    return st.lists(st.tuples(st.sampled_from(spots), JUNK), min_size=1, max_size=4)


def changed(value, new):
    value = copy.deepcopy(value)
    for path, part in new:
        inner = value
        with suppress(KeyError, IndexError, TypeError):
            for name in path[:-1]:
                inner = inner[name]
            if not path:
                return part
            inner[path[-1]] = part
    return value
