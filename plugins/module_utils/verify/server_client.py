# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Client for llama-server on the head: health, models and completions."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import listeners
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Completion, Health, ModelStatus

TIMEOUT_SECONDS = 5
MAX_FILE_BYTES = 64 * 1024
"""Maximum size of the files with API keys and the certificate."""
MAX_ANSWER_LENGTH = 500
"""Maximum length of an invalid answer in messages."""
LOADING = "the model is loading"
"""Health detail of a server that answers 503."""
PARTIAL_CHAIN = 0x80000
"""X509_V_FLAG_PARTIAL_CHAIN of OpenSSL, which accepts a server's own certificate as its trust anchor, as curl does."""
MIN_LOGARITHM = -1e30
MODEL_STATES = {"loaded": "loaded", "loading": "loading", "sleeping": "asleep"}
"""Our state for each state in a reply of /models (server-models.cpp of 0.3.36)."""


def read_api_keys(path: str) -> list[str]:
    lines = reading.read_start(Path(path), MAX_FILE_BYTES, follows_links=True).decode(*replies.KEY_ENCODING).split("\n")
    return [line.strip() for line in lines if line.strip()]


class Client:
    """Client that uses the server's public interface."""

    def __init__(self, head: HeadPlan, find_processes: Callable[[], Collection[int]]) -> None:
        """:param find_processes: returns the cluster's current processes. Only these may receive the key; llama-server may start later."""
        self._address, self._key_file = head.own_url.split("//", 1)[1], head.api_key_file
        self._find_processes = find_processes
        self._certificate: bytes | None = None
        self._certificate_error, path = "", head.tls_certificate_file
        self._certificate_file = path
        try:
            if path:
                text = reading.read_start(Path(path), MAX_FILE_BYTES, follows_links=True).decode("utf-8", "replace")
                self._certificate = replies.first_certificate(text)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._certificate_error = printable(
                f"llama_server_tls_certificate_file is {path!r}, which cannot be used: {reason}"
            )

    def wait_for_health(self, seconds: float, answer_timeout_s: float = TIMEOUT_SECONDS) -> Health:
        """Wait until the server is healthy or the time limit has passed. Do not wait for a server with another certificate: it keeps this until it exits."""
        deadline = time.monotonic() + seconds
        while not self._certificate_error:
            reply = replies.ask(self._address, "/health", answer_timeout_s, certificate=self._certificate)
            if reply.status == 200:
                return Health(True, "ok")
            if reply == (0, replies.WRONG_CERTIFICATE_MESSAGE) or time.monotonic() >= deadline:
                return Health(False, LOADING if reply.status == 503 else _error_text(reply))
            time.sleep(0.5)
        return Health(False, self._certificate_error)

    def ask(self, path: str, seconds: float, question: Mapping[str, Any] | None = None) -> replies.Reply:
        """Return the reply to a question that may need the API key.

        :raises OSError: the key cannot be read.
        """
        key = next(iter(read_api_keys(self._key_file)), None) if self._key_file else None
        address, port = self._address.rsplit(":", 1)

        def veto() -> str | None:
            """Check the listener after connecting: then only this listener can receive the key."""
            if not key or listeners.is_served(address, int(port), self._find_processes()):
                return None
            return f"the API key was not sent: no program of the cluster listens on {self._address}"

        return replies.ask(self._address, path, seconds, question, key, veto, self._certificate)

    def has_page(self, timeout_s: float) -> bool:
        """Return whether browsers get the chat page and its script without a key. In older builds the script that asks for the key requires it."""
        page = replies.ask(self._address, "/", timeout_s, certificate=self._certificate)
        match = re.search(r'<script [^>]*src="[./]*([\w./-]+)"', page.text)
        if not match or not replies.has_page(page):
            return replies.has_page(page)
        return replies.has_page(replies.ask(self._address, f"/{match[1]}", timeout_s, certificate=self._certificate))

    def certificate_names(self) -> tuple[str, ...]:
        """Return the names and addresses in the server's certificate; none without HTTPS."""
        address, port = self._address.rsplit(":", 1)
        with suppress(OSError):
            context = ssl.create_default_context(cafile=self._certificate_file)
            context.check_hostname = False
            context.verify_flags |= PARTIAL_CHAIN
            with context.wrap_socket(socket.create_connection((address, int(port)), TIMEOUT_SECONDS)) as connection:
                alternative_names = (connection.getpeercert() or {}).get("subjectAltName", ())
            return tuple(printable(value) for name in alternative_names for value in name[1:])
        return ()

    def models(self, seconds: float) -> tuple[ModelStatus, ...]:
        """Return the models of a router; none if its reply is invalid."""
        try:
            return tuple(map(_parse_model, reading.parse(self.ask("/models", seconds).text)["data"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return ()


def _parse_model(model: Any) -> ModelStatus:
    status = model["status"]
    state = "failed" if status.get("failed") else MODEL_STATES.get(status["value"], "unloaded")
    return ModelStatus(printable(model["id"]), state)


def _error_text(reply: replies.Reply) -> str:
    text = printable(reply.text)
    return f"status {reply.status}: {text}" if reply.status else text


def _has_probability(token: Any) -> bool:
    """Return whether a token has a probability. llama-server writes null, or the lowest number, if the model produces NaN."""
    logarithm = token["logprob"]
    return isinstance(logarithm, (int, float)) and MIN_LOGARITHM < logarithm <= 0


def parse_completion(reply: replies.Reply, is_embedding: bool = False) -> Completion:
    """Parse llama-server's reply to a question.

    :param is_embedding: whether the server computes embeddings; the completion then has the number of tokens in the question.
    """
    if reply.status != 200:
        return Completion(error=_error_text(reply))
    try:
        answer = reading.parse(reply.text)
        if is_embedding:
            return Completion("", int(answer["usage"]["prompt_tokens"]))
        speed, choice = answer.get("timings", {}).get("predicted_per_second"), answer["choices"][0]
        return Completion(
            printable(choice["text"]),
            int(answer["usage"]["completion_tokens"]),
            None if speed is None else 1.0 * speed,
            computes_numbers=all(map(_has_probability, (choice.get("logprobs") or {}).get("content") or ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Completion(
            error=f"the reply is not an answer from llama-server ({printable(error, MAX_ANSWER_LENGTH)}): {printable(reply.text, MAX_ANSWER_LENGTH)}"
        )
