# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gathers what the launcher knows of its service: for node exporter's textfile collector, and for the page. A folder that is full or missing stops nothing.

The file goes when the service is stopped; that of a launcher that was killed stays, and grows old.
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

EVERY = 15.0
VERIFIED = "verified.json"
"""Result of the last verification, beside the description."""
CUDA = "CUDA"
NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
MEMORIES = "vram", "gtt"
"""Of a device of AMD's: its own, and what the host lends it."""


def description_of(path: Path, service: str) -> metrics.Description | None:
    """None where it does not describe the service."""
    return journal.read_back(path, lambda told: _description(**told["services"][service]))


def _description(**given: Any) -> metrics.Description:
    found = metrics.Description(**given)
    metrics.CAUSES[found.kind], Path(found.folder)
    return found


class Exporter:
    """Of one service."""

    def __init__(self, path: Path | None = None, service: str = "") -> None:
        """:param path: file with the description; None where nothing is exported."""
        self.path, self.service = path, service
        self.state = ""
        self.shown: page.Shown | None = None
        """What the page shows."""
        self.written = -EVERY
        self.started: float | None = None
        self.restarts: dict[str, int] = {}
        self.sensors = Sensors()
        self.told = description_of(path, service) if path else None
        """What runs. A run replaces the description long before it starts services again, and leaves out those that it drops."""
        if self.told:
            self.restarts = {**dict.fromkeys(metrics.CAUSES[self.told.kind], 0), **self._before(self.told)}
        elif path:
            journal.say(f"no metrics are written: {path} does not describe {service}")

    def _file(self, told: metrics.Description) -> Path:
        return Path(told.folder or os.devnull, f"{self.service}.prom")

    def _before(self, told: metrics.Description) -> dict[str, int]:
        """Cause → how often the program was started again for it, by the file that the start before this one left."""
        pattern = rf'^{metrics.PREFIX}restarts_total{{.*cause="(\w+)"}} (\d{{1,15}})$'
        text = journal.read_back(self._file(told), str, bytes.decode) or ""
        found = re.findall(pattern, text, re.MULTILINE)
        counted = {cause: int(number) for cause, number in found if cause in metrics.CAUSES[told.kind]}
        ran = f"\n{metrics.PREFIX}started_timestamp_seconds{{" in text
        return {**counted, "killed": counted.get("killed", 0) + ran}

    def begins(self) -> None:
        """The program is started."""
        self.started, self.written = time.time(), -EVERY

    def ended(self, cause: str) -> None:
        """The program has ended."""
        self.started = None
        self.count(cause)

    def count(self, cause: str) -> None:
        """A part of it has ended, or all."""
        self.written = -EVERY
        self.restarts[cause] = self.restarts.get(cause, 0) + 1

    def stop(self) -> None:
        """The service ends for good."""
        if self.told:
            with suppress(OSError):
                self._file(self.told).unlink()

    def of_head(self, record: serving.Record, head: server.Head | None = None) -> None:
        """:param head: llama-server, while it runs."""
        if record.state != self.state:
            self.state, self.written = record.state, -EVERY
        self._export(lambda figures, told: self._add_head(figures, told, record, head))

    def of_worker(self) -> None:
        self._export(lambda _figures, _told: None)

    def _export(self, add: Callable[[metrics.Figures, metrics.Description], None]) -> None:
        if self.told and time.monotonic() - self.written >= EVERY:
            self.written = time.monotonic()
            journal.spared("no metrics are written", partial(self._write, self.told, add))

    def _write(self, told: metrics.Description, add: Callable[[metrics.Figures, metrics.Description], None]) -> None:
        own = {"service": self.service}
        figures = metrics.Figures()
        figures.add("service_info", 1, **own, kind=told.kind, release=told.release, plan=told.plan)
        figures.add("updated_timestamp_seconds", time.time(), **own)
        figures.add("started_timestamp_seconds", self.started, **own)
        for cause, number in self.restarts.items():
            figures.add("restarts_total", number, **own, cause=cause)
        for device, used in self.sensors.read(told.drives).items():
            figures.add("device_memory_used_bytes", used, worker=told.worker, device=device)
        add(figures, told)
        if told.folder:
            journal.replace(self._file(told), figures.text(), 0o644)

    def _add_head(
        self, figures: metrics.Figures, told: metrics.Description, record: serving.Record, head: server.Head | None
    ) -> None:
        _add_record(figures, record, told)
        figures.add("answers", bool(head and head.health[0]))
        if head:
            _add_connections(figures, head, told.workers)
            _add_counts(figures, head, told)
        verified = self.path and journal.read_back(self.path.with_name(VERIFIED), _verified)
        if verified and self.path:
            figures.add("verified_passed", verified[0])
            figures.add("verified_timestamp_seconds", self.path.with_name(VERIFIED).stat().st_mtime)
        kept, load = (record.kept, record.without, record.waiting_for), head.load if head else None
        self.shown = page.Shown(told, figures, record.state, *kept, load, verified[1] if verified else ())


def _verified(told: Any) -> tuple[bool, tuple[str, ...]]:
    """Whether the last verification passed, and the checks that failed."""
    return bool(told["passed"]), tuple(map(str, told["failed"]))


def _add_record(figures: metrics.Figures, record: serving.Record, told: metrics.Description) -> None:
    for state in serving.STATES:
        figures.add("state", state == record.state, state=state)
    figures.add("state_since_timestamp_seconds", record.since)
    for model, predicted in told.planned.items():
        for name, value in predicted.items():
            figures.add(name, value, model=model)
    for endpoint, (host, worker) in told.workers.items():
        away = endpoint in record.waiting_for or {host, f"{host}:{worker}"} & set(record.without)
        figures.add("worker_awaited", bool(away), worker_host=host, worker=worker)


def _add_connections(figures: metrics.Figures, head: server.Head, workers: Mapping[str, tuple[str, str]]) -> None:
    """What the kernel says of connections to workers and from clients."""
    looks = [watched.seen for watched in head.models().values() if watched.seen]
    for endpoint, (host, worker) in workers.items() if looks else ():
        names = {"worker_host": host, "worker": worker}
        links = [
            (link, look.traffic.get(link.inode)) for look in looks for link in look.links if link.remote == endpoint
        ]
        figures.add("worker_connected", any(link.state == progress.ESTABLISHED for link, _ in links), **names)
        if traffic := [one for _link, one in links if one]:
            figures.add("worker_round_trip_seconds", max(one.round_trip for one in traffic) / 1e6, **names)
            figures.add("worker_retransmissions_total", sum(one.retransmissions for one in traffic), **names)
            figures.add("worker_needless_retransmissions_total", sum(one.needless for one in traffic), **names)
            if not any(look.rdma for look in looks):
                figures.add("worker_sent_bytes_total", sum(one.sent for one in traffic), **names)
                figures.add("worker_received_bytes_total", sum(one.received for one in traffic), **names)
    if head.seen:
        figures.add("client_connections", len(head.clients(head.seen)))


def _add_counts(figures: metrics.Figures, head: server.Head, told: metrics.Description) -> None:
    loaded, alone = head.loaded(), len(told.planned) == 1
    for model in told.planned:
        figures.add(
            "model_loaded", None if loaded is None else bool(loaded & {model, "" if alone else model}), model=model
        )
    for model, watched in head.models().items():
        watched.follow_counts()
        for name, ours in metrics.OF_SERVER.items():
            figures.add(ours, watched.counts.get(name), model=model or next(iter(told.planned), ""))


class Sensors:
    """Memory that is used of a host's devices."""

    def __init__(self, root: Path = Path("/"), query: Sequence[str] = NVIDIA_QUERY) -> None:
        self.root, self.query = root, query
        self.nvidia: dict[str, int] = {}
        self.asking: threading.Thread | None = None

    def read(self, devices: Iterable[str]) -> dict[str, int]:
        """Device → bytes, where that is known.

        :param devices: as llama.cpp calls them.
        """
        known = {**self._amd(), **self.nvidia}
        if any(name.startswith(CUDA) for name in devices) and not (self.asking and self.asking.is_alive()):
            self.asking = threading.Thread(target=self._ask_nvidia, daemon=True)
            self.asking.start()
        return {name: known[name] for name in devices if name in known}

    def _amd(self) -> dict[str, int]:
        """In the order of their render nodes. Vulkan has an order of its own, with devices of all vendors."""
        nodes, used = sorted(self.root.glob("sys/class/drm/renderD*/device")), []
        for node in nodes:
            with suppress(OSError, ValueError):
                used.append(sum(int((node / f"mem_info_{kind}_used").read_text()) for kind in MEMORIES))
        return {
            f"{kind}{index}": size
            for kind in (["ROCm", "Vulkan"] if len(nodes) == 1 else ["ROCm"])
            for index, size in enumerate(used)
        }

    def _ask_nvidia(self) -> None:
        """In a thread, since nvidia-smi may take seconds, or hang with its driver. What it says is read the next time."""
        said = ""
        with suppress(OSError):
            said = subprocess.run(
                self.query, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            ).stdout
        rows = re.findall(r"^(\d+), (\d+)$", said, re.MULTILINE)
        self.nvidia = {f"{CUDA}{index}": int(used) * units.MIB for index, used in rows}
