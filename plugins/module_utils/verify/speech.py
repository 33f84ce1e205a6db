# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How well the served model predicts plain text, token by token, through its full depth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import plain_text, replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import PlanId

TOKENS, FEWEST_TOKENS, SECONDS = 200, 48, 60.0
"""Number of tokens that are read, number below which nothing is said, and time after which reading stops."""
FORCED = 1e4
"""Bias with which the server takes a given token. The probability that it reports is that before the bias."""
LARGEST_BITS = 2.0
"""Bits per byte of plain English. Language models need 0.8 to 1.4, guessing among equally likely tokens 3.5 to 4."""
LARGEST_RATIO = 1.07
"""Perplexity divided by that of an earlier reading. Correct builds and devices differ by less than 1.02."""
Ask = Callable[[str, float, Mapping[str, Any]], replies.Reply]
"""Asks the server: path, seconds and question."""
Logarithm = Annotated[float, Number(-1000, 0, real=True)]


class Reading(NamedTuple):
    """Probabilities of the tokens of a text."""

    id: PlanId
    """that of the plan: a hash of the model's files and of the options that change what it computes"""
    logarithms: tuple[Logarithm, ...]
    """natural logarithm of the probability of each token"""
    bytes: Annotated[int, Number(1)]
    """bytes of these tokens"""

    @property
    def bits_per_byte(self) -> float:
        """Information of a byte of the text."""
        return -sum(self.logarithms) / math.log(2) / self.bytes

    def ratio(self, earlier: "Reading") -> float:
        """Return the perplexity divided by that of an earlier reading of the same text."""
        pairs = [*zip(self.logarithms, earlier.logarithms)]
        return math.exp(sum(before - now for now, before in pairs) / len(pairs))


class Record(NamedTuple):
    """Readings that the head keeps, the newest last."""

    readings: tuple[Reading, ...]


def read_text(ask: Ask, identifier: str, model: Optional[str]) -> Optional[Reading]:
    """Let the server read plain text.

    :param model: name of the model, if there are several.
    :returns: None if the server does not report probabilities of given tokens, or is too slow.
    """
    named = {"model": model} if model else {}
    logarithms, size, deadline = [], 0, time.monotonic() + SECONDS
    with suppress(ValueError, KeyError, TypeError, IndexError):
        question = {"content": plain_text.TEXT, "add_special": True, "with_pieces": True, **named}
        entries = reading.parse(ask("/tokenize", SECONDS, question).text)["tokens"][: TOKENS + 1]
        tokens = [int(entry["id"]) for entry in entries]
        for place in range(1, len(tokens)):
            if time.monotonic() > deadline:
                break
            question = {"prompt": tokens[:place], "max_tokens": 1, "n_probs": 1, "temperature": 0, "cache_prompt": True}
            question["logit_bias"] = [[tokens[place], FORCED]]
            reply = ask("/v1/completions", SECONDS, {**question, **named})
            (entry,) = reading.parse(reply.text)["choices"][0]["logprobs"]["content"]
            if entry["id"] != tokens[place]:
                return None
            logarithms.append(float(entry["logprob"]))
            piece = entries[place]["piece"]
            size += len(piece.encode() if isinstance(piece, str) else piece)
    return Reading(identifier, tuple(logarithms), size) if len(logarithms) >= FEWEST_TOKENS else None
