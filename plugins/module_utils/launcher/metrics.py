# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The metrics of a cluster, and how Prometheus reads them. What shows or judges them takes their names from this table.

llama-server's own begin with ``llamacpp:``, so these do not begin with ``llamacpp_`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

PREFIX = "llamacpp_cluster_"
GAUGE, COUNTER = "gauge", "counter"
HEAD, WORKER = "head", "worker"
CAUSES = {
    HEAD: ("ended", "lost_worker", "model_lost_worker", "silent", "stopped", "start_failed", "returned", "killed"),
    WORKER: ("ended", "hung", "killed"),
}
"""Why programs are started again, by the kind of service. A head waits for a worker that it has lost; one of several models does not.
What ran when its launcher was killed, or the host lost power, was killed."""
MIN_SECONDS = 0.001
"""For which a rate makes sense."""
WORKER_LABELS = ("worker_host", "worker")
"""Labels of what a head says of a worker."""
LABEL_LENGTH = 128
"""Characters of a label's value."""


class Metric(NamedTuple):
    name: str
    """Without the prefix."""
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    """Beside those of the target, which Prometheus adds: nobody names another host than its own."""


def _prediction_metrics(kind: str, subject: str) -> tuple[Metric, ...]:
    empty = "with an empty context"
    figures = (
        ("", "Predicted", empty),
        ("lowest_", "Least of the predicted range of", empty),
        ("highest_", "Most of the predicted range of", empty),
        ("full_", "Predicted", "at the end of a request's context"),
    )
    return tuple(
        Metric(
            f"planned_{kind}_{name}tokens_per_second",
            GAUGE,
            f"{qualifier} tokens per second of {subject}, {condition}",
            ("model",),
        )
        for name, qualifier, condition in figures
    )


METRICS = (
    Metric("service_info", GAUGE, "1, with what runs", ("service", "kind", "release", "plan")),
    Metric("updated_timestamp_seconds", GAUGE, "When the launcher wrote this", ("service",)),
    Metric("started_timestamp_seconds", GAUGE, "When the program was last started", ("service",)),
    Metric("restarts_total", COUNTER, "Ends of the program, by cause", ("service", "cause")),
    Metric("state", GAUGE, "Whether this is the state of the head", ("state",)),
    Metric("state_since_timestamp_seconds", GAUGE, "Since when the head has had its state"),
    Metric("answers", GAUGE, "Whether llama-server says that it is healthy"),
    Metric("model_loaded", GAUGE, "Whether the model is in memory", ("model",)),
    *_prediction_metrics("generation", "an answer"),
    *_prediction_metrics("prompt", "a prompt of 512 tokens"),
    Metric("worker_connected", GAUGE, "Whether llama-server has a connection to the worker", WORKER_LABELS),
    Metric("worker_awaited", GAUGE, "Whether the head waits for the worker, or serves without it", WORKER_LABELS),
    Metric("worker_round_trip_seconds", GAUGE, "Smoothed round trip of the connection", WORKER_LABELS),
    Metric("worker_retransmissions_total", COUNTER, "Segments that the connection sent again", WORKER_LABELS),
    Metric(
        "worker_needless_retransmissions_total", COUNTER, "Of these, segments that had arrived already", WORKER_LABELS
    ),
    Metric("worker_sent_bytes_total", COUNTER, "What the worker has got over the connection", WORKER_LABELS),
    Metric("worker_received_bytes_total", COUNTER, "What came from the worker over the connection", WORKER_LABELS),
    Metric("prompt_tokens_total", COUNTER, "Tokens of prompts that were computed", ("model",)),
    Metric("prompt_seconds_total", COUNTER, "Time that these took", ("model",)),
    Metric("generated_tokens_total", COUNTER, "Tokens of answers", ("model",)),
    Metric("generation_seconds_total", COUNTER, "Time that these took", ("model",)),
    Metric("requests_processing", GAUGE, "Requests that are being answered", ("model",)),
    Metric("requests_deferred", GAUGE, "Requests that wait for a slot", ("model",)),
    Metric("client_connections", GAUGE, "Connections of clients to llama-server"),
    Metric("verified_passed", GAUGE, "Whether the last verification passed"),
    Metric("verified_timestamp_seconds", GAUGE, "When it was"),
    Metric("device_memory_used_bytes", GAUGE, "What anybody uses of the device's memory", ("worker", "device")),
)
SERVER_COUNTERS = {
    "prompt_tokens_total": "prompt_tokens_total",
    "prompt_seconds_total": "prompt_seconds_total",
    "tokens_predicted_total": "generated_tokens_total",
    "tokens_predicted_seconds_total": "generation_seconds_total",
    "requests_processing": "requests_processing",
    "requests_deferred": "requests_deferred",
}
"""llama-server's own name (tools/server/README.md of build 11063, server.cpp of ik_llama.cpp 4840) → ours. A request counts when it ends."""
BY_NAME = {metric.name: metric for metric in METRICS}


class Description(NamedTuple):
    """What the plan says of a service."""

    folder: str
    """Of the textfile collector; empty where nothing goes there."""
    cluster: str
    host: str
    plan: str
    kind: str
    release: str
    worker: str = ""
    """Name of a worker."""
    drives: Sequence[str] = ()
    """Devices of its host, as llama.cpp calls them."""
    workers: Mapping[str, tuple[str, str]] = {}
    """Of a head: endpoint → host and name of each worker that it may use."""
    planned: Mapping[str, Mapping[str, float | None]] = {}
    """Of a head: model → metric → what is predicted."""


class Figures:
    """What is measured at one moment."""

    def __init__(self) -> None:
        self.values_by_metric: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in METRICS}
        """Metric → values of its labels → figure."""

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """Nothing where it is not known.

        :param labels: those of the metric.
        """
        if value is not None and math.isfinite(value):
            self.values_by_metric[name][self._key(name, labels)] = value

    def get(self, name: str, **labels: str) -> float | None:
        """As ``add`` got it."""
        return self.values_by_metric[name].get(self._key(name, labels))

    def _key(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(_label_value(labels[label]) for label in BY_NAME[name].labels)

    def text(self) -> str:
        lines = []
        for metric in METRICS:
            name, values = PREFIX + metric.name, self.values_by_metric[metric.name]
            if values:
                lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
                lines += [f"{name}{_label_text(metric.labels, key)} {_number(value)}" for key, value in values.items()]
        return "\n".join(lines) + "\n"


def rate(number: float | None, seconds: float | None) -> float | None:
    """Tokens per second; None where there is too little to tell."""
    return round(number / seconds, 2) if number is not None and seconds and seconds >= MIN_SECONDS else None


def _label_value(value: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in value[:LABEL_LENGTH])


def _label_text(labels: Sequence[str], values: Iterable[str]) -> str:
    escaped = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    pairs = ",".join(f'{label}="{value}"' for label, value in zip(labels, escaped))
    return f"{{{pairs}}}" if labels else ""


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")
