# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gathers what the launcher knows about its service, for node exporter's textfile collector and for the page. Write errors do not stop the service.

Stopping the service removes the file. A killed launcher leaves its file, whose timestamp shows its age.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (
    journal,
    metrics,
    page,
    progress,
    server,
    serving,
)

EXPORT_INTERVAL_SECONDS = 15.0
VERIFICATION_FILE = "verified.json"
"""Result of the last verification, in the folder of the description."""
CUDA = "CUDA"
NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
AMD_MEMORY_KINDS = "vram", "gtt"
"""Memory kinds of an AMD device: its own memory, and host memory that it maps."""


def description_of(path: Path, service: str) -> metrics.Description | None:
    """Return the description of a service; None if the file does not describe it."""
    return journal.read_back(path, lambda record: _parse_description(**record["services"][service]))


def _parse_description(**fields: Any) -> metrics.Description:
    description = metrics.Description(**fields)
    metrics.RESTART_CAUSES[description.kind], Path(description.folder)
    return description


class Exporter:
    def __init__(self, path: Path | None = None, service: str = "") -> None:
        """:param path: file with the description; None to export nothing."""
        self.path, self.service = path, service
        self.state = ""
        self.snapshot: page.Snapshot | None = None
        self.last_export_time = -EXPORT_INTERVAL_SECONDS
        self.start_time: float | None = None
        self.restarts: dict[str, int] = {}
        self.memory_reader = MemoryReader()
        self.description = description_of(path, service) if path else None
        """Description of the running program. A playbook run replaces the file long before it restarts services, and omits removed services."""
        if self.description:
            self.restarts = {
                **dict.fromkeys(metrics.RESTART_CAUSES[self.description.kind], 0),
                **self._previous_restarts(self.description),
            }
        elif path:
            journal.log(f"metrics are not written, because {path} does not describe {service}: run site.yml")

    def _metrics_path(self, info: metrics.Description) -> Path:
        return Path(info.folder or os.devnull, f"{self.service}.prom")

    def _previous_restarts(self, info: metrics.Description) -> dict[str, int]:
        """Return restarts by cause, from the file that the previous start left."""
        pattern = rf'^{metrics.PREFIX}restarts_total{{.*cause="(\w+)"}} (\d{{1,15}})$'
        text = journal.read_back(self._metrics_path(info), str, bytes.decode) or ""
        matches = re.findall(pattern, text, re.MULTILINE)
        counts = {cause: int(count) for cause, count in matches if cause in metrics.RESTART_CAUSES[info.kind]}
        was_running = f"\n{metrics.PREFIX}started_timestamp_seconds{{" in text
        return {**counts, "killed": counts.get("killed", 0) + was_running}

    def note_start(self) -> None:
        self.start_time, self.last_export_time = time.time(), -EXPORT_INTERVAL_SECONDS

    def note_exit(self, cause: str) -> None:
        self.start_time = None
        self.count_restart(cause)

    def count_restart(self, cause: str) -> None:
        self.last_export_time = -EXPORT_INTERVAL_SECONDS
        self.restarts[cause] = self.restarts.get(cause, 0) + 1

    def stop(self) -> None:
        """Remove the file, because the service stops permanently."""
        if self.description:
            with suppress(OSError):
                self._metrics_path(self.description).unlink()

    def export_head(self, record: serving.HeadRecord, head: server.Head | None = None) -> None:
        """:param head: llama-server, while it runs."""
        if record.state != self.state:
            self.state, self.last_export_time = record.state, -EXPORT_INTERVAL_SECONDS
        self._export(lambda figures, info: self._add_head(figures, info, record, head))

    def export_worker(self) -> None:
        self._export(lambda _figures, _info: None)

    def _export(self, add: Callable[[metrics.Figures, metrics.Description], None]) -> None:
        if self.description and time.monotonic() - self.last_export_time >= EXPORT_INTERVAL_SECONDS:
            self.last_export_time = time.monotonic()
            journal.run_safely("metrics are not written", partial(self._write, self.description, add))

    def _write(self, info: metrics.Description, add: Callable[[metrics.Figures, metrics.Description], None]) -> None:
        labels = {"service": self.service}
        figures = metrics.Figures()
        figures.add("service_info", 1, **labels, kind=info.kind, release=info.release, plan=info.plan)
        figures.add("updated_timestamp_seconds", time.time(), **labels)
        figures.add("started_timestamp_seconds", self.start_time, **labels)
        for cause, count in self.restarts.items():
            figures.add("restarts_total", count, **labels, cause=cause)
        for device, used_bytes in self.memory_reader.read(info.driven).items():
            figures.add("device_memory_used_bytes", used_bytes, worker=info.worker, device=device)
        add(figures, info)
        if info.folder:
            journal.replace_file(self._metrics_path(info), figures.text(), 0o644)

    def _add_head(
        self, figures: metrics.Figures, info: metrics.Description, record: serving.HeadRecord, head: server.Head | None
    ) -> None:
        _add_record(figures, record, info)
        figures.add("answers", bool(head and head.health[0]))
        if head:
            _add_connections(figures, head, info.workers)
            _add_server_metrics(figures, head, info)
            for name in metrics.CONVERSATION_METRIC_NAMES if head.conversation_values else ():
                figures.add(name, head.conversation_values[name])
        verification = self.path and journal.read_back(
            self.path.with_name(VERIFICATION_FILE),
            lambda data: (bool(data["passed"]), (*map(str, data["failed_checks"]),)),
        )
        if verification and self.path:
            figures.add("verified_passed", verification[0])
            figures.add("verified_timestamp_seconds", self.path.with_name(VERIFICATION_FILE).stat().st_mtime)
        workers, load = (record.unused_workers, record.absent_workers), head.load if head else None
        self.snapshot = page.Snapshot(
            info, figures, record.state, record.history, *workers, load, verification[1] if verification else ()
        )


def _add_record(figures: metrics.Figures, record: serving.HeadRecord, info: metrics.Description) -> None:
    for state in serving.STATES:
        figures.add("state", state == record.state, state=state)
    figures.add("state_since_timestamp_seconds", record.state_start_time)
    for model, predicted_values in info.planned.items():
        for name, value in predicted_values.items():
            figures.add(name, value, model=model)
    for endpoint, (host, worker) in info.workers.items():
        is_absent = endpoint in record.absent_workers or {host, f"{host}:{worker}"} & set(record.unused_workers)
        figures.add("worker_awaited", bool(is_absent), worker_host=host, worker=worker)


def _add_connections(figures: metrics.Figures, head: server.Head, workers: Mapping[str, tuple[str, str]]) -> None:
    """Add what the kernel reports about connections to workers and from clients."""
    samples = [watched_server.last_sample for watched_server in head.servers().values() if watched_server.last_sample]
    for endpoint, (host, worker) in workers.items() if samples else ():
        labels = {"worker_host": host, "worker": worker}
        sockets = [
            (sock, sample.traffic.get(sock.inode))
            for sample in samples
            for sock in sample.sockets
            if sock.peer == endpoint
        ]
        figures.add("worker_connected", any(sock.state == progress.ESTABLISHED for sock, _flow in sockets), **labels)
        if flows := [flow for _sock, flow in sockets if flow]:
            figures.add("worker_round_trip_seconds", max(flow.round_trip_us for flow in flows) / 1e6, **labels)
            figures.add("worker_retransmissions_total", sum(flow.retransmissions for flow in flows), **labels)
            figures.add(
                "worker_needless_retransmissions_total", sum(flow.needless_retransmissions for flow in flows), **labels
            )
            if not any(sample.rdma_connection_count for sample in samples):
                figures.add("worker_sent_bytes_total", sum(flow.sent_bytes for flow in flows), **labels)
                figures.add("worker_received_bytes_total", sum(flow.received_bytes for flow in flows), **labels)
    if head.last_sample:
        figures.add("client_connections", len(head.client_connections(head.last_sample)))


def _add_server_metrics(figures: metrics.Figures, head: server.Head, info: metrics.Description) -> None:
    loaded_models, has_one_model = head.loaded_models(), len(info.planned) == 1
    for model in info.planned:
        figures.add(
            "model_loaded",
            None if loaded_models is None else bool(loaded_models & {model, "" if has_one_model else model}),
            model=model,
        )
    for model, watched_server in head.servers().items():
        watched_server.update_metrics()
        for name, metric in metrics.SERVER_METRICS.items():
            figures.add(metric, watched_server.metrics.get(name), model=model or next(iter(info.planned), ""))


class MemoryReader:
    """Reads how much memory of a host's devices is in use."""

    def __init__(self, root: Path = Path("/"), query_argv: Sequence[str] = NVIDIA_QUERY) -> None:
        self.root, self.query_argv = root, query_argv
        self.nvidia_bytes: dict[str, int] = {}
        self.query_thread: threading.Thread | None = None

    def read(self, devices: Iterable[str]) -> dict[str, int]:
        """Return used bytes by device, if they are known.

        :param devices: llama.cpp's names of devices.
        """
        used_bytes = {**self._read_amd(), **self.nvidia_bytes}
        if any(name.startswith(CUDA) for name in devices) and not (self.query_thread and self.query_thread.is_alive()):
            self.query_thread = threading.Thread(target=self._query_nvidia, daemon=True)
            self.query_thread.start()
        return {name: used_bytes[name] for name in devices if name in used_bytes}

    def _read_amd(self) -> dict[str, int]:
        """Return used bytes by device, in the order of render nodes. Vulkan orders devices of all vendors in its own way."""
        device_folders, used_bytes = sorted(self.root.glob("sys/class/drm/renderD*/device")), []
        for folder in device_folders:
            with suppress(OSError, ValueError):
                used_bytes.append(sum(int((folder / f"mem_info_{kind}_used").read_text()) for kind in AMD_MEMORY_KINDS))
        return {
            f"{prefix}{index}": size
            for prefix in (["ROCm", "Vulkan"] if len(device_folders) == 1 else ["ROCm"])
            for index, size in enumerate(used_bytes)
        }

    def _query_nvidia(self) -> None:
        """Ask nvidia-smi in a thread, because it may take seconds or hang with its driver. The next export uses the answer."""
        output = ""
        with suppress(OSError):
            output = subprocess.run(
                self.query_argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            ).stdout
        rows = re.findall(r"^([0-9]+), ([0-9]{1,18})$", output, re.MULTILINE)
        self.nvidia_bytes = {f"{CUDA}{index}": int(used_mib) * units.MIB for index, used_mib in rows}
