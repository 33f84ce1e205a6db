# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What both sides are asked, and when their answers are the same.

Two right programs round otherwise: a device may quantise activations, and add in another order. A wrong one has other logits altogether. Tokens are
given, not generated, so that both sides always compute the same; docs/architecture.md has the distances that were measured.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PROMPTS = (2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 48, 64, 65, 96, 128, 129, 160, 192, 256, 257, 300, 513)
"""Lengths around which kernels for few and for many rows take turns."""
LONG_PROMPTS = {1100: 15, 4200: 25}
"""Length, longer than 1024 and 4096 columns → single tokens that follow, one after the other."""
LISTED, COMPARED = 64, 32
"""Likeliest tokens that a side lists, and those of the processor's that are looked for among them."""
FAR = 0.15
"""Distance beyond which the median of a group is of another computation. The median, since experts that are nearly equal are chosen otherwise now and then."""
Answer = Mapping[int, float]
"""Likeliest tokens and logarithms of their probabilities, the likeliest first; empty where they are no numbers."""


class Question(NamedTuple):
    """A prompt, after which the likeliest tokens are listed."""

    group: str
    length: int
    goes_on: bool
    """Whether it is the one before and one token more."""


def questions(context: int) -> list[Question]:
    """Those that fit."""
    asked = [Question("in short prompts", length, False) for length in PROMPTS]
    for first, further in LONG_PROMPTS.items():
        group = f"beyond {first // 1024 * 1024} tokens"
        asked += [Question(group, first + step, step > 0) for step in range(further + 1)]
    return [one for one in asked if one.length < context]


def computed() -> int:
    """Tokens that a side computes."""
    return sum(PROMPTS) + sum(first + further for first, further in LONG_PROMPTS.items())


def tokens(vocabulary: int) -> list[int]:
    """Of the longest prompt; not those at the ends of a vocabulary, which are no words in many."""
    chosen = random.Random(45)
    low, high = vocabulary // 4, max(vocabulary // 4 + 1, vocabulary * 7 // 8)
    return [
        chosen.randrange(low, high) for _index in range(max(first + further for first, further in LONG_PROMPTS.items()))
    ]


def answer_of(reply: Any) -> Answer:
    """From llama-server's reply.

    :raises ValueError, TypeError, KeyError, IndexError: it has another form.
    """
    listed = reply["completion_probabilities"][0]["top_logprobs"][:LISTED]
    if any(entry["logprob"] is None for entry in listed):
        return {}
    return {int(entry["id"]): float(entry["logprob"]) for entry in listed}


def distance(right: Answer, other: Answer) -> float:
    """Mean difference of the processor's likeliest tokens, in parts of the range that they have; 1 counts where one is not listed.

    :param right: the processor's.
    """
    likeliest = [*right.items()][:COMPARED]
    width = likeliest[0][1] - likeliest[-1][1] or 1.0
    far = [min(1.0, abs(other[token] - value) / width) if token in other else 1.0 for token, value in likeliest]
    return sum(far) / len(far)


class Difference(NamedTuple):
    equal: int
    of: int
    differs: tuple[str, ...]
    """Groups."""


def compare(asked: Sequence[Question], right: Sequence[Answer], other: Sequence[Answer]) -> Difference:
    """:param right: the processor's, none of which is empty."""
    equal = sum(next(iter(one)) == next(iter(two), None) for one, two in zip(right, other))
    far: dict[str, list[float]] = {}
    for question, one, two in zip(asked, right, other):
        far.setdefault(question.group, []).append(distance(one, two))
    differs = tuple(group for group, positions in far.items() if statistics.median(positions) > FAR)
    return Difference(equal, len(asked), differs)
