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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (
    journal,
    loading,
    metrics,
    page,
    progress,
    server,
    serving,
)

EVERY = 15.0
FILE_BYTES = 1024 * 1024
VERIFIED = "verified.json"
"""Result of the last verification, beside the description."""


CUDA = "CUDA"
NVIDIA_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,memory.used,temperature.gpu,power.draw",
    "--format=csv,noheader,nounits",
)
OF_PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Drivers of sensors."""
LONGEST = 16384
"""Bytes of what the kernel or nvidia-smi says."""


def description_of(path: Path, service: str) -> metrics.Description:
    """:raises OSError, ValueError: it cannot be read, or has another form."""
    told = serving.read_json(path, FILE_BYTES)
    try:
        given = told["services"][service]
        devices = {name: [metrics.Device(**one) for one in listed] for name, listed in given.get("devices", {}).items()}
        found = metrics.Description(**{**given, "devices": devices})
        metrics.CAUSES[found.kind], Path(found.folder)
        return found
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"it does not describe {service}") from None


class Exporter:
    """Of one service."""

    def __init__(self, path: Path | None = None, service: str = "", paged: bool = False) -> None:
        """
        :param path: file with the description; None where nothing is exported.
        :param paged: whether there is a page.
        """
        self.path, self.service = path, service
        self.state = ""
        self.paged = paged
        self.shown: page.Shown | None = None
        """What the page shows."""
        self.written = -EVERY
        self.started: float | None = None
        self.load: loading.Load | None = None
        self.restarts: dict[str, int] = {}
        self.sensors = Sensors()
        self.told: metrics.Description | None = None
        """What runs. A run replaces the description long before it starts services again, and leaves out those that it drops."""
        if path:
            with self._spared():
                self.told = description_of(path, service)
                self.restarts = {**dict.fromkeys(metrics.CAUSES[self.told.kind], 0), **self._before(self.told)}

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Nothing that is wrong with metrics ends a service."""
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError) as error:
            journal.say_once(f"no metrics are written: {type(error).__name__}, {error}")

    def _file(self, told: metrics.Description) -> Path:
        return Path(told.folder or os.devnull, f"{self.service}.prom")

    def _before(self, told: metrics.Description) -> dict[str, int]:
        """Cause → how often the program was started again for it, by the file that the start before this one left."""
        pattern = rf'^{metrics.PREFIX}restarts_total{{.*cause="(\w+)"}} (\d{{1,15}})$'
        with suppress(OSError, ValueError):
            text = serving.read_file(self._file(told), FILE_BYTES).decode()
            found = re.findall(pattern, text, re.MULTILINE)
            counted = {cause: int(number) for cause, number in found if cause in metrics.CAUSES[told.kind]}
            ran = f"\n{metrics.PREFIX}started_timestamp_seconds{{" in text
            return {**counted, "killed": counted.get("killed", 0) + ran}
        return {}

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

    def _export(self, add: Callable[[metrics.Figures, metrics.Description], object]) -> None:
        told = self.told
        if not told or time.monotonic() - self.written < EVERY:
            return
        self.written = time.monotonic()
        with self._spared():
            own = {"service": self.service}
            figures = metrics.Figures(told.cluster, told.host)
            figures.add("service_info", 1, **own, kind=told.kind, release=told.release, plan=told.plan)
            figures.add("updated_timestamp_seconds", time.time(), **own)
            figures.add("started_timestamp_seconds", self.started, **own)
            for cause, number in self.restarts.items():
                figures.add("restarts_total", number, **own, cause=cause)
            figures.add("waiting_seconds_total", waited(), **own)
            for device, sensed in self.sensors.read(told.drives).items():
                named = {"worker": told.worker, "device": device}
                figures.add("device_memory_used_bytes", sensed.used, **named)
                figures.add("device_temperature_celsius", sensed.celsius, **named)
                figures.add("device_power_watts", sensed.watts, **named)
            add(figures, told)
            if told.folder:
                journal.replace(self._file(told), figures.text(), 0o644)

    def of_head(self, record: serving.Record, head: server.Head | None = None) -> None:
        """:param head: llama-server, while it runs."""
        self.load = (head.load if head else None) or self.load
        if record.state != self.state:
            self.state, self.written = record.state, -EVERY

        def add(figures: metrics.Figures, told: metrics.Description) -> None:
            _add_record(figures, record, told)
            _add_load(figures, self.load, told.workers)
            figures.add("answers", bool(head and head.health[0]))
            if head:
                _add_connections(figures, head, told.workers)
                _add_counts(figures, head, told)
            failed = _add_verified(figures, self.path.with_name(VERIFIED)) if self.path else ()
            if self.paged:
                kept = record.kept, record.without, record.waiting_for
                self.shown = page.Shown(told, figures, record.state, *kept, head.load if head else None, failed)

        self._export(add)

    def of_worker(self, held: bool | None, cache: Path | None, limit: int) -> None:
        """:param held: whether it has a client; None where that is not known.
        :param limit: bytes that the cache may hold.
        """

        def add(figures: metrics.Figures, told: metrics.Description) -> None:
            figures.add("worker_held", held, worker=told.worker)
            if cache:
                figures.add("worker_cache_bytes", size_of(cache), worker=told.worker)
                figures.add("worker_cache_limit_bytes", limit, worker=told.worker)

        self._export(add)


def _add_record(figures: metrics.Figures, record: serving.Record, told: metrics.Description) -> None:
    for state in serving.STATES:
        figures.add("state", state == record.state, state=state)
    figures.add("state_since_timestamp_seconds", record.since)
    for model, predicted in told.planned.items():
        for name, value in predicted.items():
            figures.add(name, value, model=model)
    for endpoint, (host, worker) in told.workers.items():
        away = endpoint in record.waiting_for or {host, f"{host}:{worker}"} & set(record.without)
        figures.add("worker_awaited", bool(away), host=host, worker=worker)


def _add_load(figures: metrics.Figures, load: loading.Load | None, workers: Mapping[str, tuple[str, str]]) -> None:
    if load:
        figures.add("load_seconds", load.seconds)
        figures.add("load_read_bytes", load.read)
        for endpoint, (host, worker) in workers.items():
            figures.add("load_sent_bytes", load.sent.get(endpoint), host=host, worker=worker)


def _add_connections(figures: metrics.Figures, head: server.Head, workers: Mapping[str, tuple[str, str]]) -> None:
    """What the kernel says of connections to workers and from clients."""
    looks = [watched.seen for watched in head.models().values() if watched.seen]
    for endpoint, (host, worker) in workers.items() if looks else ():
        names = {"host": host, "worker": worker}
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


def _add_verified(figures: metrics.Figures, path: Path) -> tuple[str, ...]:
    """Returns the checks that failed."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = serving.read_json(path, FILE_BYTES)
        figures.add("verified_passed", bool(found["passed"]))
        figures.add("verified_timestamp_seconds", path.stat().st_mtime)
        return tuple(map(str, found["failed"]))
    return ()


def waited(root: Path = Path("/")) -> float | None:
    """Seconds in which a thread of this service was ready and had no processor: others had them, or its quota was used up. None where the kernel does not
    count them."""
    with suppress(OSError, StopIteration):
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        group = next(line[4:] for line in groups if line.startswith("0::/"))
        found = re.match(r"some .* total=(\d{1,18})\n", (root / "sys/fs/cgroup" / group / "cpu.pressure").read_text())
        return int(found[1]) / 1e6 if found else None
    return None


class Sensed(NamedTuple):
    """Of a device at one moment; None is what nobody says."""

    used: float | None = None
    """Bytes of its memory."""
    celsius: float | None = None
    """Where it is hottest."""
    watts: float | None = None


class Sensors:
    """Of the devices of a host."""

    def __init__(self, root: Path = Path("/"), query: Sequence[str] = NVIDIA_QUERY) -> None:
        self.root, self.query = root, query
        self.nvidia: dict[int, Sensed] = {}
        self.asking: threading.Thread | None = None

    def read(self, devices: Iterable[str]) -> dict[str, Sensed]:
        """Also of the host itself, as CPU.

        :param devices: as llama.cpp calls them.
        """
        found, cards = {metrics.CPU: self._host()}, dict(enumerate(self._amd()))
        # Vulkan has an order of its own, with devices of all vendors.
        single = len([*self.root.glob("sys/class/drm/renderD*")]) == 1
        kinds = {"ROCm": cards, "Vulkan": cards if single else {}}
        if any(name.startswith(CUDA) for name in devices):
            kinds[CUDA] = self.nvidia
            if not self.asking or not self.asking.is_alive():
                self.asking = threading.Thread(target=self._ask_nvidia, daemon=True)
                self.asking.start()
        for name in devices:
            kind = name.rstrip("0123456789")
            index, known = int(name[len(kind) :] or 0), kinds.get(kind, {})
            if index in known:
                found[name] = known[index]
        return found

    def _host(self) -> Sensed:
        kernel = _text(self.root / "proc/meminfo")
        sizes = {name: int(size) for name, size in re.findall(r"^(Mem\w+):\s+(\d{1,15}) kB$", kernel, re.MULTILINE)}
        used = 1024 * (sizes["MemTotal"] - sizes["MemAvailable"]) if {"MemTotal", "MemAvailable"} <= {*sizes} else None
        chips = self.root.glob("sys/class/hwmon/hwmon*")
        return Sensed(used, _hottest(chip for chip in chips if _text(chip / "name").strip() in OF_PROCESSORS))

    def _amd(self) -> list[Sensed]:
        """In the order of their render nodes."""
        found = []
        for device in sorted(self.root.glob("sys/class/drm/renderD*/device")):
            own, lent = (_number(_text(device / f"mem_info_{kind}_used")) for kind in ("vram", "gtt"))
            if own is not None:
                chips = [*device.glob("hwmon/hwmon*")]
                powers = [_number(_text(chip / f"power1_{kind}")) for chip in chips for kind in ("average", "input")]
                watts = next((power / 1e6 for power in powers if power is not None), None)
                found.append(Sensed(own + (lent or 0), _hottest(chips), watts))
        return found

    def _ask_nvidia(self) -> None:
        """In a thread, since nvidia-smi may take seconds, or hang with its driver. What it says is read the next time."""
        said = ""
        with suppress(OSError):
            said = subprocess.run(
                self.query, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            ).stdout
        lines = (map(_number, line.split(",")) for line in said.splitlines() if line.count(",") == 3)
        self.nvidia = {
            int(index): Sensed(None if used is None else used * units.MIB, *others)
            for index, used, *others in lines
            if index is not None
        }


def _text(path: Path) -> str:
    """Of a file of the kernel; empty where it says nothing that can be used."""
    with suppress(OSError, ValueError):
        return serving.read_file(path, LONGEST).decode()
    return ""


def _number(text: str) -> float | None:
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*", text)
    return float(found[1]) if found else None


def _hottest(chips: Iterable[Path]) -> float | None:
    read = (_number(_text(path)) for chip in chips for path in chip.glob("temp*_input"))
    return max((degrees / 1000 for degrees in read if degrees is not None), default=None)


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    total = 0
    for place, _folders, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total
