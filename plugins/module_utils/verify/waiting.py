# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits for a started server: time limits, progress lines, and reasons for giving up."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.server_client import LOADING
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Evidence, Health, Subject

WORKER_TIMEOUT_SECONDS = 45
"""Time limit for a running worker to answer the head."""
PROGRESS_INTERVAL_SECONDS = 10.0
MAX_EXITS = 3
"""Number of exits of llama-server after which verify stops waiting."""


def load_bytes_of(plan: Plan | Subject | None) -> loading.ExpectedBytes:
    """Return the bytes that loading the model transfers; none if the plan is unknown."""
    if not plan or not plan.placement:
        return loading.ExpectedBytes()
    weights = [(device.endpoint, device.weights_mib) for device in plan.placement]
    endpoints = {endpoint for endpoint, _mib in weights}
    uses_cache = any(
        worker.cache and worker.endpoint in endpoints for host in plan.hosts.values() for worker in host.workers
    )
    return loading.expected_bytes([*weights, (None, plan.head.cpu.weights_mib)], uses_cache)


class ServerWait:
    """Wait for a started server."""

    def __init__(self, subject: Subject, timeout_s: float) -> None:
        self._subject, self._timeout_s = subject, timeout_s
        self._goal = load_bytes_of(subject)
        self._initial_exit_count: int | None = None
        self._last_progress_s = 0.0

    def final_evidence_of(self, evidence: Evidence, elapsed_s: float) -> Evidence | None:
        """Return the evidence to judge, whose health explains why the wait ended; None to keep waiting."""
        if self._initial_exit_count is None:
            self._initial_exit_count = evidence.exits.total
        if evidence.health.healthy or evidence.health.detail == replies.WRONG_CERTIFICATE_MESSAGE:
            return evidence
        if evidence.exits.total - self._initial_exit_count >= MAX_EXITS:
            exits = evidence.exits
            exit_count = exits.total - self._initial_exit_count
            detail = f"llama-server exited {exit_count} times while verify waited, the last time {exits.last_exit}"
            return evidence._replace(health=Health(False, detail), waits_for=(), log=exits.log)
        limit_s = self._timeout_s
        if evidence.waits_for:
            limit_s = min(limit_s, WORKER_TIMEOUT_SECONDS + (self._subject.head.fallback_after or 0))
        if elapsed_s < limit_s:
            return None
        if limit_s and not evidence.waits_for and evidence.health.detail == LOADING:
            note = "llama_server_start_timeout, by default several times the predicted load time"
            texts = [f"{LOADING}, and the limit of {limit_s:.0f} s has passed ({note})", *self._load_texts(evidence)]
            texts.append(
                "increase llama_server_start_timeout if loading continues; otherwise read the service's log on the head"
            )
            return evidence._replace(health=Health(False, "; ".join(texts)))
        return evidence

    def progress_line(self, evidence: Evidence, elapsed_s: float) -> str | None:
        """Return a progress line if it is time for one."""
        if elapsed_s - self._last_progress_s < PROGRESS_INTERVAL_SECONDS:
            return None
        self._last_progress_s = elapsed_s - elapsed_s % PROGRESS_INTERVAL_SECONDS
        texts = evidence.waits_for or [evidence.health.detail, *self._load_texts(evidence)]
        return f"[{self._subject.head.host}] llama-server: {'; '.join(texts)}, {elapsed_s:.0f} s"

    def _load_texts(self, evidence: Evidence) -> list[str]:
        """Return a text about the progress of loading, if known."""
        return [loading.progress_sentence(loading.progress_of(evidence.load, self._goal))] if evidence.load else []
