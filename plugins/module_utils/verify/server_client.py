# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks llama-server, on its own host: health and completion."""

from __future__ import annotations

import time
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
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
MODEL_STATES = {"loaded": "loaded", "loading": "loading", "sleeping": "asleep"}
"""In an answer of /models (server-models.cpp of 0.3.36) → here."""


def address_of(url: str) -> str:
    return url.split("//", 1)[1]


def first_key(path: str | None) -> str | None:
    """The first API key of a file, with which the server is asked."""
    if not path:
        return None
    lines = reading.read(Path(path), KEY_BYTES, follow=True).decode(*reading.KEY_TEXT).split("\n")
    return next((line.strip() for line in lines if line.strip()), None)


def planned_certificate(path: str | None) -> bytes | None:
    """The certificate that the server has to show; None where it speaks HTTP.

    :raises ValueError: the file has none, or cannot be read.
    """
    try:
        return reading.first_certificate(_text(path)) if path else None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"llama_server_tls_certificate_file is {path!r}, which cannot be used: {why}") from None


def _text(path: str) -> str:
    return reading.read(Path(path), KEY_BYTES, follow=True).decode("utf-8", "replace")


def wait_for_health(
    url: str, seconds: float, certificate: bytes | None = None, patience: float = HEALTH_SECONDS
) -> Health:
    """Health after at most so many seconds. A server with another certificate is not waited for: it shows that until it ends.

    :param patience: seconds that one answer may take.
    """
    deadline = time.monotonic() + seconds
    while True:
        reply = reading.ask(address_of(url), "/health", patience, certificate=certificate)
        if reply.status == 200:
            return Health(True, "ok")
        if reply == (0, reading.OTHER_CERTIFICATE) or time.monotonic() >= deadline:
            return Health(False, LOADING if reply.status == 503 else _error(reply))
        time.sleep(0.5)


def _error(reply: reading.Reply) -> str:
    text = printable(reply.text)
    return f"status {reply.status}: {text}" if reply.status else text


def models(reply: reading.Reply) -> tuple[ModelStatus, ...]:
    """A router's reply about its models; none where it has another form."""
    try:
        return tuple(
            ModelStatus(
                printable(entry["id"]),
                "failed" if entry["status"].get("failed") else MODEL_STATES.get(entry["status"]["value"], "unloaded"),
            )
            for entry in reading.parse(reply.text)["data"]
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


def completion(reply: reading.Reply) -> Completion:
    """llama-server's reply to a question."""
    if reply.status != 200:
        return Completion(error=_error(reply))
    try:
        answer = reading.parse(reply.text)
        speed = answer.get("timings", {}).get("predicted_per_second")
        return Completion(
            printable(answer["choices"][0]["text"]),
            int(answer["usage"]["completion_tokens"]),
            None if speed is None else float(speed),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Completion(
            error=f"the answer is not one of llama-server ({printable(error, LINE)}): {printable(reply.text, LINE)}"
        )
