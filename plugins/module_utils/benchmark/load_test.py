# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks the server that serves for tokens, several times at once, and says how fast they come."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import verification

PATH = "/completion"
LOWEST_TOKEN = 3
"""Those below are often special ones: none, the first and the last of a text."""


class Question(NamedTuple):
    """What each of the requests asks."""

    prompt: int
    """Tokens."""
    generated: int
    """Tokens."""
    vocabulary: int
    """Tokens that the model knows."""


class Heard(NamedTuple):
    """When tokens came, in seconds of one clock."""

    asked: float
    first: float
    last: float
    tokens: int


def body_of(question: Question) -> dict[str, Any]:
    """A prompt of random tokens, which no cache has: llama-server takes their numbers."""
    tokens = range(min(LOWEST_TOKEN, question.vocabulary - 1), question.vocabulary)
    return {
        "prompt": [random.choice(tokens) for _number in range(question.prompt)],
        "n_predict": question.generated,
        "ignore_eos": True,
        "cache_prompt": False,
        "temperature": 0,
        "stream": True,
    }


def _ask(plan: Mapping[str, Any], question: Question, seconds: float) -> Heard:
    """:raises Refusal: the server does not answer as it should."""
    head = plan["head"]
    own = plan["hosts"][head["host"]]
    address = head["own_url"].split("//", 1)[1]
    place, port = address.rsplit(":", 1)
    key = verification.first_key(head["api_key_file"])
    times: list[float] = []

    def objection() -> str | None:
        running = state.processes(own["prefix"], own["account"]) if key else {}
        stranger = state.stranger_at(place, int(port), running, own["account"]) if key else None
        return stranger and f"the API key was not sent: {stranger}"

    def hear(line: str) -> None:
        if line.startswith("data: ") and '"stop":true' not in line.replace(" ", "") and "[DONE]" not in line:
            times.append(time.monotonic())

    certificate = verification.certificate_of(dict(head))
    asked = time.monotonic()
    reply = reading.ask(address, PATH, seconds, body_of(question), key, objection, certificate, hear)
    if reply.status != 200:
        raise Refusal(
            f"the server did not answer: {f'status {reply.status}: ' if reply.status else ''}{printable(reply.text)}"
        )
    if len(times) < question.generated / 2:
        raise Refusal(f"the server sent {len(times)} of {question.generated} tokens: its log says why")
    return Heard(asked, times[0], times[-1], len(times))


def speeds_of(heard: list[Heard]) -> dict[str, Any]:
    """``first_s``, from each request to its first token, and ``tokens_per_s`` of all together, from the first token on."""
    began, ended = min(one.first for one in heard), max(one.last for one in heard)
    tokens = sum(one.tokens - 1 for one in heard)
    return {
        "first_s": [round(one.first - one.asked, 5) for one in heard],
        "tokens_per_s": round(tokens / max(ended - began, 1e-6), 4),
    }


def ask(plan: Mapping[str, Any], question: Question, parallel: int, seconds: float) -> dict[str, Any]:
    """Asks so many times at once; see speeds_of.

    :raises Refusal: one of them was not answered.
    """
    with ThreadPoolExecutor(parallel) as threads:
        asked = [threads.submit(_ask, plan, question, seconds) for _number in range(parallel)]
        return speeds_of([one.result() for one in asked])
