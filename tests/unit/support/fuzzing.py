"""What fuzzers draw, and where they put it."""

import copy
import os
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "200"))
OFTEN = settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="FUZZ_EXAMPLES" not in os.environ,
)


def fuzzed(*drawn, seconds=60):
    """A test that gets what these draw, as often as FUZZ_EXAMPLES says; ``seconds`` of 0 are without end."""
    return lambda test: pytest.mark.fuzz(pytest.mark.timeout(seconds)(OFTEN(given(*drawn)(test))))


KNOWN = """
auto on off f16 q8_0 CPU CUDA0 ROCm0 Vulkan0 cpu cuda hip vulkan sycl metal b8600 b1 git pypi archive package main ik_llama.cpp system user
Darwin 192.0.2.10 192.0.2.11/24 127.0.0.1 0.0.0.0 ::1 /srv/m.gguf / ~ .. --metrics --api-key -ub --lora true 1 -1 gfx1151 8.6 7.2 999.999 (
x=CPU .*=CPU %s {} {0} http://a:b@c llama F32 fewest all fedora
"""
SAME = """
debian fedora arm64 x86_64 cuda hip vulkan cpu 8.6 gfx1151 gfx900 12.9 7.2 0.7.0 1 systemd supervisor launchd user system
"""
OTHERS = ["", "debian 13", "a\nb", "\x1b[2J", "\ud800", "sha256:" + "a" * 64, "1" * 40, "²"]
WORDS = st.sampled_from([*KNOWN.split(), *OTHERS])
NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 64, 128, 8192, 65535, 65536, 1 << 31, 1 << 40, 1 << 53, 10**30])
HUGE = st.integers(1000, 5000).map(lambda digits: 10**digits)
LONG = st.integers(1000, 70000).map(lambda length: "9" * length)
LEAVES = st.one_of(
    HUGE,
    LONG,
    st.none(),
    st.booleans(),
    NUMBERS,
    st.integers(),
    st.floats(),
    WORDS,
    st.text(max_size=20),
    st.binary(max_size=3),
    st.dates(),
)
NAMES = st.one_of(st.text(max_size=8), st.integers(), st.none(), WORDS)
JUNK = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


def places(value, path=()):
    """Where in a value something can be put instead, and what is there."""
    yield path, value
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(inner, (*path, name))


def like(value):
    """Values of the same kind, which a host might have."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(0, 100) | st.integers(0, 1 << 41)
    if isinstance(value, float):
        return st.floats(0, 1000)
    if isinstance(value, str):
        return st.sampled_from(["/", "/usr", "/opt/x y"] if value.startswith("/") else SAME.split())
    if isinstance(value, list):
        return st.lists(st.sampled_from(value or [""]), max_size=4)
    names = st.sampled_from([*value] if value else [""])
    return names.map(lambda lost: {name: part for name, part in value.items() if name != lost} if value else None)


def put(value, path, new):
    changed = copy.deepcopy(value)
    if not path:
        return new
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = new
    return changed


def changes(value):
    """One to four places of a value with something else in each, most of it of the same kind."""
    spots = sorted(places(value), key=repr)
    spot = st.sampled_from(spots)
    same = spot.flatmap(lambda found: st.tuples(st.just(found[0]), like(found[1])))
    return st.lists(same | same | same | st.tuples(spot.map(lambda found: found[0]), JUNK), min_size=1, max_size=4)


def changed(value, new):
    for path, part in new:
        with suppress(KeyError, IndexError, TypeError):
            value = put(value, path, part)
    return value
