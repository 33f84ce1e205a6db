"""Regular expressions that may take very long, for names of tensors."""

import re
import time

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import patterns

NAME = "blk.60.ffn_" + "a" * 45 + ".weight"


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*x",
        "(a+)+$",
        "((a?)b?)*c",
        "(a|aa)+$",
        "(?:a{1,9}){1,9}x",
        "(?=(a*)*x)",
        ".*.*.*.*.*x",
    ],
)
def test_an_expression_that_may_take_hours(pattern):
    assert patterns.may_explode(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "exps",
        r"blk\.(?:[0-9]|[1-3][0-9])\.ffn_.*_exps\.",
        r"blk\.\d+\.ffn_(up|down|gate)_exps\.weight",
        r"^blk\.(?!0\.)\d{1,2}\.(attn|ffn)_.*\.weight$",
        r"(blk\.[0-9]){1}",
        "(ab){3}",
        "[ab]*?c",
    ],
)
def test_an_expression_as_people_write_it(pattern):
    assert not patterns.may_explode(pattern)


@pytest.mark.parametrize("pattern", [".*.*.*.*x", "a*a*a*a*x", r"^.*(.*)\w+\d?x"])
def test_the_slowest_expressions_that_are_taken_end_soon(pattern):
    assert not patterns.may_explode(pattern)
    started = time.monotonic()
    assert not re.search(pattern, NAME)
    assert time.monotonic() - started < 2
