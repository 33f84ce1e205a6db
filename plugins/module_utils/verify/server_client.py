# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks llama-server, on its own host: health and completion."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import (
    Completion,
    Health,
    ModelStatus,
)

HEALTH_SECONDS = 5
KEY_BYTES = 64 * 1024
"""Of the files with API keys and the certificate, at most."""
LINE = 500
"""Characters of a wrong answer that are shown."""
LOADING = "the model is loading"
"""Detail of a server that answers 503."""
SMALLEST_LOGARITHM = -1e30
MODEL_STATES = {"loaded": "loaded", "loading": "loading", "sleeping": "asleep"}
"""In an answer of /models (server-models.cpp of 0.3.36) → here."""


def first_key(path: str | None) -> str | None:
    """The first API key of a file, with which the server is asked."""
    if not path:
        return None
    lines = reading.read_start(Path(path), KEY_BYTES, follow=True).decode(*replies.KEY_TEXT).split("\n")
    return next((line.strip() for line in lines if line.strip()), None)


class Client:
    """Asks the server on the head, as its clients reach it."""

    def __init__(self, head: HeadPlan, running: Collection[int]) -> None:
        """:param running: the cluster's processes: no other one gets the key."""
        self._place, self._key_file = head.own_url.split("//", 1)[1], head.api_key_file
        self._running = running
        self._certificate: bytes | None = None
        self._objection, path = "", head.tls_certificate_file
        try:
            if path:
                text = reading.read_start(Path(path), KEY_BYTES, follow=True).decode("utf-8", "replace")
                self._certificate = replies.first_certificate(text)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self._objection = printable(f"llama_server_tls_certificate_file is {path!r}, which cannot be used: {why}")

    def health(self, seconds: float, patience: float = HEALTH_SECONDS) -> Health:
        """Health after at most so many seconds. A server with another certificate is not waited for: it shows that until it ends.

        :param patience: seconds that one answer may take.
        """
        deadline = time.monotonic() + seconds
        while not self._objection:
            reply = replies.ask(self._place, "/health", patience, certificate=self._certificate)
            if reply.status == 200:
                return Health(True, "ok")
            if reply == (0, replies.OTHER_CERTIFICATE) or time.monotonic() >= deadline:
                return Health(False, LOADING if reply.status == 503 else _error(reply))
            time.sleep(0.5)
        return Health(False, self._objection)

    def ask(self, path: str, seconds: float, question: Mapping[str, Any] | None = None) -> replies.Reply:
        """The reply to a question that needs the key.

        :raises OSError: the key cannot be read.
        """
        key = first_key(self._key_file)
        address, port = self._place.rsplit(":", 1)

        def objection() -> str | None:
            """The connection stands, so whoever listens now is who gets the key, or nobody does."""
            if not key or processes.is_served(address, int(port), self._running):
                return None
            return f"the API key was not sent: no program of the cluster listens on {self._place}"

        return replies.ask(self._place, path, seconds, question, key, objection, self._certificate)

    def models(self, seconds: float) -> tuple[ModelStatus, ...]:
        """Of a router; none where its reply has another form."""
        try:
            return tuple(map(_model, reading.parse(self.ask("/models", seconds).text)["data"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return ()


def _model(entry: Any) -> ModelStatus:
    status = entry["status"]
    state = "failed" if status.get("failed") else MODEL_STATES.get(status["value"], "unloaded")
    return ModelStatus(printable(entry["id"]), state)


def _error(reply: replies.Reply) -> str:
    text = printable(reply.text)
    return f"status {reply.status}: {text}" if reply.status else text


def _is_logarithm(entry: Any) -> bool:
    """Return whether a token has a probability. llama-server writes null, or the lowest number, if the model computes none."""
    value = entry["logprob"]
    return isinstance(value, (int, float)) and SMALLEST_LOGARITHM < value <= 0


def completion(reply: replies.Reply, embeds: bool = False) -> Completion:
    """llama-server's reply to a question.

    :param embeds: whether it makes embeddings, of which the tokens of the question are counted.
    """
    if reply.status != 200:
        return Completion(error=_error(reply))
    try:
        answer = reading.parse(reply.text)
        if embeds:
            return Completion("", int(answer["usage"]["prompt_tokens"]))
        speed, choice = answer.get("timings", {}).get("predicted_per_second"), answer["choices"][0]
        return Completion(
            printable(choice["text"]),
            int(answer["usage"]["completion_tokens"]),
            None if speed is None else float(speed),
            computes_numbers=all(map(_is_logarithm, (choice.get("logprobs") or {}).get("content") or ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Completion(
            error=f"the answer is not one of llama-server ({printable(error, LINE)}): {printable(reply.text, LINE)}"
        )
