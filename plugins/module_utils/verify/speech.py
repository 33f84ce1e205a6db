# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measures how well the served model predicts plain text, token by token, through all its layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import plain_text, replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import TextReading

MAX_TOKENS, MIN_TOKENS, TIME_LIMIT_SECONDS = 200, 48, 60.0
"""Maximum number of tokens to read, minimum number for a result, and time limit in seconds."""
MIN_LOGARITHM = -100.0
"""Logarithm that replaces lower values. llama-server writes the lowest number for a token without any probability."""
FORCING_BIAS = 1e4
"""Bias that makes the server choose a token. The reported probability does not include the bias."""
AskServer = Callable[[str, float, Mapping[str, Any]], replies.Reply]
"""Function that asks the server: path, seconds and question."""


def take_reading(ask: AskServer, reading_id: str, model: str | None) -> TextReading | None:
    """Let the server predict plain text.

    :param model: name of the model if the server has several.
    :returns: the reading; None if the server does not report token probabilities, or is too slow.
    """
    model_field = {"model": model} if model else {}
    logarithms, text_bytes, deadline = [], 0, time.monotonic() + TIME_LIMIT_SECONDS
    with suppress(ValueError, KeyError, TypeError, IndexError):
        question = {"content": plain_text.TEXT, "add_special": True, "with_pieces": True, **model_field}
        entries = reading.parse(ask("/tokenize", TIME_LIMIT_SECONDS, question).text)["tokens"][: MAX_TOKENS + 1]
        tokens = [int(entry["id"]) for entry in entries]
        for index in range(1, len(tokens)):
            if time.monotonic() > deadline:
                break
            question = {"prompt": tokens[:index], "max_tokens": 1, "n_probs": 1, "temperature": 0, "cache_prompt": True}
            question["logit_bias"] = [[tokens[index], FORCING_BIAS]]
            reply = ask("/v1/completions", TIME_LIMIT_SECONDS, {**question, **model_field})
            (entry,) = reading.parse(reply.text)["choices"][0]["logprobs"]["content"]
            if entry["id"] != tokens[index]:
                return None
            logarithms.append(min(0.0, max(MIN_LOGARITHM, float(entry["logprob"]))))
            piece = entries[index]["piece"]
            text_bytes += len(piece.encode() if isinstance(piece, str) else piece)
    return TextReading(reading_id, tuple(logarithms), text_bytes) if len(logarithms) >= MIN_TOKENS else None
