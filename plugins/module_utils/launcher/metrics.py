# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics of a cluster and their text for Prometheus. Dashboards and alerts take their names from this table.

Names of llama-server's metrics begin with ``llamacpp:``, so these do not begin with ``llamacpp_`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

PREFIX = "llamacpp_cluster_"
GAUGE, COUNTER = "gauge", "counter"
HEAD, WORKER = "head", "worker"
RESTART_CAUSES = {
    HEAD: ("ended", "lost_worker", "model_lost_worker", "silent", "stopped", "start_failed", "returned", "killed"),
    WORKER: ("ended", "hung", "killed"),
}
"""Restart causes by kind of service. A head waits for a lost worker; one of several models does not. 'killed' includes a killed launcher and power failures."""
MIN_RATE_SECONDS = 0.001
"""Shortest time for which a rate is meaningful."""
WORKER_LABELS = ("worker_host", "worker")
"""Labels of a head's metrics about a worker."""
MAX_LABEL_LENGTH = 128
"""Maximum length of a label value, in characters."""


class Metric(NamedTuple):
    name: str
    """Name without the prefix."""
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    """Labels, without the target's labels that Prometheus adds."""


def _prediction_metrics(kind: str, subject: str) -> tuple[Metric, ...]:
    empty_condition = "with an empty context"
    predictions = (
        ("", "Predicted", empty_condition),
        ("lowest_", "Lowest predicted", empty_condition),
        ("highest_", "Highest predicted", empty_condition),
        ("full_", "Predicted", "with a full context"),
    )
    return tuple(
        Metric(
            f"planned_{kind}_{name_prefix}tokens_per_second",
            GAUGE,
            f"{help_prefix} tokens per second of {subject}, {condition}",
            ("model",),
        )
        for name_prefix, help_prefix, condition in predictions
    )


METRICS = (
    Metric("service_info", GAUGE, "Always 1; labels name the running service", ("service", "kind", "release", "plan")),
    Metric("updated_timestamp_seconds", GAUGE, "Time when the launcher last wrote this file", ("service",)),
    Metric("started_timestamp_seconds", GAUGE, "Time when the program was last started", ("service",)),
    Metric("restarts_total", COUNTER, "Restarts of the program, by cause", ("service", "cause")),
    Metric("state", GAUGE, "Whether the head is in this state", ("state",)),
    Metric("state_since_timestamp_seconds", GAUGE, "Time when the head entered its current state"),
    Metric("answers", GAUGE, "Whether llama-server reports that it is healthy"),
    Metric("model_loaded", GAUGE, "Whether the model is in memory", ("model",)),
    *_prediction_metrics("generation", "an answer"),
    *_prediction_metrics("prompt", "a prompt of 512 tokens"),
    Metric("worker_connected", GAUGE, "Whether llama-server has a connection to the worker", WORKER_LABELS),
    Metric("worker_awaited", GAUGE, "Whether the head has to wait for the worker or do without it", WORKER_LABELS),
    Metric("worker_round_trip_seconds", GAUGE, "Smoothed round-trip time to the worker", WORKER_LABELS),
    Metric("worker_retransmissions_total", COUNTER, "Segments that the connection retransmitted", WORKER_LABELS),
    Metric("worker_needless_retransmissions_total", COUNTER, "Needlessly retransmitted segments", WORKER_LABELS),
    Metric("worker_sent_bytes_total", COUNTER, "Bytes sent to the worker over the connection", WORKER_LABELS),
    Metric("worker_received_bytes_total", COUNTER, "Bytes received from the worker over the connection", WORKER_LABELS),
    Metric("prompt_tokens_total", COUNTER, "Prompt tokens that were computed", ("model",)),
    Metric("prompt_seconds_total", COUNTER, "Time spent on computing prompts", ("model",)),
    Metric("generated_tokens_total", COUNTER, "Generated tokens", ("model",)),
    Metric("generation_seconds_total", COUNTER, "Time spent on generation", ("model",)),
    Metric("requests_processing", GAUGE, "Requests in progress", ("model",)),
    Metric("requests_deferred", GAUGE, "Requests waiting for a slot", ("model",)),
    Metric("conversations_kept", GAUGE, "Saved conversations that llama-server can restore"),
    Metric("conversation_tokens_restored_total", COUNTER, "Tokens restored from saved conversations"),
    Metric("conversation_seconds_saved_total", COUNTER, "Predicted time saved by restoring tokens"),
    Metric("client_connections", GAUGE, "Client connections to llama-server"),
    Metric("verified_passed", GAUGE, "Whether the last verification passed"),
    Metric("verified_timestamp_seconds", GAUGE, "Time of the last verification"),
    Metric("device_memory_used_bytes", GAUGE, "Device memory in use by all programs", ("worker", "device")),
)
CONVERSATION_METRIC_NAMES = tuple(metric.name for metric in METRICS if metric.name.startswith("conversation"))
"""Metrics of conversations.py: files, restored tokens, saved seconds."""
SERVER_METRICS = {
    "prompt_tokens_total": "prompt_tokens_total",
    "prompt_seconds_total": "prompt_seconds_total",
    "tokens_predicted_total": "generated_tokens_total",
    "tokens_predicted_seconds_total": "generation_seconds_total",
    "requests_processing": "requests_processing",
    "requests_deferred": "requests_deferred",
}
"""Metrics of llama-server (tools/server/README.md of build 11063, server.cpp of ik_llama.cpp 4840) → names of this table. Requests count when they end."""
METRICS_BY_NAME = {metric.name: metric for metric in METRICS}


class Description(NamedTuple):
    """The plan's description of a service."""

    folder: str
    """Folder of the textfile collector; empty to write no file."""
    cluster: str
    host: str
    plan: str
    kind: str
    release: str
    worker: str = ""
    driven: Sequence[str] = ()
    """llama.cpp's names of the devices of its host."""
    workers: Mapping[str, tuple[str, str]] = {}
    """Workers that a head may use: endpoint → host and name."""
    planned: Mapping[str, Mapping[str, float | None]] = {}
    """Predictions for a head: model → metric → value."""


class Figures:
    """Values measured at one moment."""

    def __init__(self) -> None:
        self.values_by_metric: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in METRICS}
        """Metric → label values → value."""

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """Add a value; ignore an unknown one."""
        if value is not None and math.isfinite(value):
            self.values_by_metric[name][self._label_values(name, labels)] = value

    def get(self, name: str, **labels: str) -> float | None:
        return self.values_by_metric[name].get(self._label_values(name, labels))

    def _label_values(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(_printable(labels[label]) for label in METRICS_BY_NAME[name].labels)

    def text(self) -> str:
        lines = []
        for metric in METRICS:
            name, series = PREFIX + metric.name, self.values_by_metric[metric.name]
            if series:
                lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
                lines += [f"{name}{_label_text(metric.labels, key)} {_format(value)}" for key, value in series.items()]
        return "\n".join(lines) + "\n"


def token_rate(count: float | None, seconds: float | None) -> float | None:
    """Return tokens per second; None if the time is too short."""
    return round(count / seconds, 2) if count is not None and seconds and seconds >= MIN_RATE_SECONDS else None


def _printable(value: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in value[:MAX_LABEL_LENGTH])


def _label_text(labels: Sequence[str], values: Iterable[str]) -> str:
    escaped_values = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    pairs = ",".join(f'{label}="{value}"' for label, value in zip(labels, escaped_values))
    return f"{{{pairs}}}" if labels else ""


def _format(value: float) -> str:
    return repr(float(value)).removesuffix(".0")
