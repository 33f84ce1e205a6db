# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting for a server that was started: how long, what a person is shown meanwhile, and why it was given up."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.loading import expected_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.server_client import LOADING
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import (
    Evidence,
    Health,
    Subject,
)

WORKER_SECONDS = 45
"""How long a worker whose process runs may stay without an answer to the head."""
LINE_SECONDS = 10.0
"""Between two lines of what is waited for. Who waits for less sees none."""
EXITS_BEFORE_GIVING_UP = 3
"""So often llama-server may end while verify waits for it."""


class Waiting:
    """One wait.

    :param patience: seconds at most.
    """

    def __init__(self, subject: Subject, patience: float) -> None:
        self._subject, self._patience = subject, patience
        self._expected = expected_of(subject)
        self._exits_before: int | None = None
        self._shown_at = 0.0

    def end(self, evidence: Evidence, elapsed: float) -> Evidence | None:
        """The evidence to judge, with a health that says why waiting has ended; None while it makes sense to wait."""
        if self._exits_before is None:
            self._exits_before = evidence.exits.number
        if evidence.health.healthy or evidence.health.detail == replies.OTHER_CERTIFICATE:
            return evidence
        if evidence.exits.number - self._exits_before >= EXITS_BEFORE_GIVING_UP:
            exits = evidence.exits
            number = exits.number - self._exits_before
            detail = f"llama-server ended {number} times while verify waited for it, the last time {exits.how}"
            return evidence._replace(health=Health(False, detail), waits_for=(), log=exits.log)
        limit = self._patience
        if evidence.waits_for:
            limit = min(limit, WORKER_SECONDS + (self._subject.head.fallback_after or 0))
        if elapsed < limit:
            return None
        if limit and not evidence.waits_for and evidence.health.detail == LOADING:
            set_by = "llama_server_start_timeout, or several times the predicted load where that is not set"
            texts = [f"{LOADING}, and the limit of {limit:.0f} s is over ({set_by})", *self._progress(evidence)]
            texts.append(
                "set llama_server_start_timeout to more where it goes on, else look at the log of the service on the head"
            )
            return evidence._replace(health=Health(False, "; ".join(texts)))
        return evidence

    def line(self, evidence: Evidence, elapsed: float) -> str | None:
        """What a person is shown now, where it is time for another line."""
        if elapsed - self._shown_at < LINE_SECONDS:
            return None
        self._shown_at = elapsed - elapsed % LINE_SECONDS
        texts = evidence.waits_for or [evidence.health.detail, *self._progress(evidence)]
        return f"[{self._subject.head.host}] llama-server: {'; '.join(texts)}, {elapsed:.0f} s"

    def _progress(self, evidence: Evidence) -> list[str]:
        """How far the model is loaded, where that is known."""
        return [loading.progress_sentence(loading.progress_of(evidence.load, self._expected))] if evidence.load else []
