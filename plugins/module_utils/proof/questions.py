# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What both sides are asked, and when their answers are the same.

Two right programs round otherwise: a device may quantise activations, and add in another order. A wrong one has other logits altogether. Tokens are
given, not generated, so that both sides always compute the same; docs/operating.md has distances that were measured.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Compared, Side

RANGES = {
    "of 2 to 8 tokens": (2, 3, 4, 5, 6, 7, 8),
    "of 9 to 64 tokens": (9, 16, 17, 31, 32, 33, 48, 64),
    "of 65 to 513 tokens": (65, 96, 128, 129, 192, 256, 257, 513),
    "beyond 1024 tokens": (1025, 1100, 1200, 1300, 4200),
}
"""Lengths of prompts between which kernels for few and for many rows take turns."""
STEPS = {1300: 12, 4200: 24}
"""Prompt → single tokens that follow it, one after the other."""
LONGEST, APART = 1 << 20, 9
LISTED, COMPARED = 64, 32
"""Likeliest tokens that a side lists, and those of the processor's that are looked for among them."""
LEAST = -80.0
"""Logarithm of a probability; below it single precision ends, and llama-server says the lowest number."""
FAR, FAR_OF_PROCESSORS = 0.15, 0.05
"""Distance of a group that is computed wrong, and where both sides are processors, which round activations alike: but for single tokens, for which they
add in half precision. Single positions are farther where experts are nearly equal, and are chosen otherwise."""
Answer = Mapping[int, float]
"""Likeliest tokens and logarithms of their probabilities, the likeliest first; empty where they are no numbers."""


class Question(NamedTuple):
    """A prompt, after which the likeliest tokens are listed."""

    group: str
    length: int
    goes_on: bool
    """Whether it is the one before and one token more."""
    start: int
    """Place of its first token. Prompts that begin alike are wrong alike where an expert is chosen otherwise for a token that they share."""

    def prompt(self, tokens: Sequence[int]) -> Sequence[int]:
        """:param tokens: of ``tokens``."""
        return tokens[self.start : self.start + self.length]


def questions(context: int) -> list[Question]:
    """Those that fit."""
    asked: list[Question] = []
    for group, lengths in RANGES.items():
        for length in lengths:
            start = APART * len(asked)
            asked.append(Question(f"in prompts {group}", length, False, start))
            single = f"in single tokens beyond {length // 1024 * 1024}"
            asked += [Question(single, length + step, True, start) for step in range(1, STEPS.get(length, 0) + 1)]
    return [one for one in asked if one.length < context]


def computed() -> int:
    """Tokens that a side computes."""
    return sum(1 if one.goes_on else one.length for one in questions(LONGEST))


def tokens(vocabulary: int) -> list[int]:
    """Of all prompts; not those at the ends of a vocabulary, which are no words in many."""
    chosen = random.Random(45)
    low, high = vocabulary // 4, max(vocabulary // 4 + 1, vocabulary * 7 // 8)
    return [chosen.randrange(low, high) for _index in range(max(one.start + one.length for one in questions(LONGEST)))]


def answer_of(reply: Any) -> Answer:
    """From llama-server's reply.

    :raises ValueError, TypeError, KeyError, IndexError: it has another form.
    """
    listed = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"][:LISTED]
    known = itertools.takewhile(lambda entry: entry["logprob"] is not None and entry["logprob"] > LEAST, listed)
    return {int(entry["id"]): float(entry["logprob"]) for entry in known}


def distance(right: Answer, other: Answer) -> float:
    """Mean difference of the processor's likeliest tokens, in parts of the range that they have; 1 counts where one is not listed.

    :param right: the processor's.
    """
    likeliest = [*right.items()][:COMPARED]
    width = likeliest[0][1] - likeliest[-1][1] or 1.0
    far = [min(1.0, abs(other[token] - value) / width) if token in other else 1.0 for token, value in likeliest]
    return sum(far) / len(far)


def distance_of(group: Sequence[float]) -> float:
    """What three of four positions are apart, or more."""
    return sorted(group)[len(group) // 4]


def compare(side: Side, asked: Sequence[Question], right: Sequence[Answer], other: Sequence[Answer]) -> Compared:
    """:param right: the processor's, none of which is empty.
    :param other: the side's.
    """
    equal = sum(next(iter(one)) == next(iter(two), None) for one, two in zip(right, other))
    found: dict[tuple[str, float], list[float]] = {}
    for question, one, two in zip(asked, right, other):
        far = FAR_OF_PROCESSORS if side.processor and not question.goes_on else FAR
        found.setdefault((question.group, far), []).append(distance(one, two))
    differs = tuple(group for (group, far), distances in found.items() if distance_of(distances) > far)
    return Compared(side.name, equal, len(asked), differs)
