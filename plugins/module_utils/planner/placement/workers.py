# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The workers that a host declares: addresses, ports, devices, caches and command lines."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    fast_load,
    options,
    rpc,
    rpc_upload,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import BuildPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import MAX_MIB, Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import addresses
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs.cluster_inputs import MAX_THREADS

FIRST_PORT = 50052
SPIN_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}
"""Environment with which threads of a worker on the processor that wait for each other soon yield it to other programs. By default GNU's OpenMP
spins for milliseconds: a program that kept one of 32 cores busy made a worker fifty times as slow (docs/performance.md)."""
WORKER_NAME_PATTERN = r"[a-z0-9][a-z0-9_-]{0,31}"
DISK_FACTOR = 2
"""Multiple of the size of a model's large tensors that a disk needs for a cache. Assumed: the rest is for the system and older models."""
GIB = 1024 * MIB


class LendableDevice(NamedTuple):
    """A device that the host's builds offer."""

    backend: str
    build_backend: str
    """Backend of the build that offers it."""
    name: str
    label: str
    """Name for messages."""
    memory_mib: int
    shares_host_memory: bool
    """Whether that memory is the host's own."""


def lendable_devices(host: types.Host, built_backends: Collection[str]) -> list[LendableDevice]:
    """Return all devices that the host's builds offer, the CPU last."""
    devices = [
        LendableDevice(backend, backend, name, accelerator.name, accelerator.memory_mib, accelerator.unified)
        for backend in built_backends
        for name, accelerator in host.facts.named_accelerators
        if accelerator.backend == backend
    ]
    build = "cpu" if "cpu" in built_backends else next(iter(built_backends))
    return [*devices, LendableDevice("cpu", build, "CPU", "the processor", host.facts.memory_mib, True)]


def _device_of(
    place: str, request: types.WorkerRequest, devices: list[LendableDevice], used_names: Collection[str]
) -> LendableDevice:
    """Return the device that a worker lends: the one that its entry names, or else the first free one of its backend."""
    free_devices = [
        device for device in devices if device.name not in used_names and request.backend in (None, device.backend)
    ]
    offer_text = ", ".join(device.name for device in devices)
    if not free_devices and not request.device and request.backend not in (None, "cpu"):
        raise Refusal(
            f"{place} sets backend to {request.backend!r}, but no such device is free: the host's builds offer only {offer_text}. "
            "Remove this entry, add the backend to llama_backend, or declare more devices in llama_hardware"
        )
    name = request.device or (free_devices or devices[-1:])[0].name
    device = next((device for device in devices if device.name == name), None)
    if device is None:
        raise Refusal(
            f"{place} sets device to {name!r}: use one of {offer_text}; or add the device's backend to llama_backend, "
            "or declare the device in llama_hardware"
        )
    if request.backend not in (None, device.backend):
        raise Refusal(
            f"{place} sets backend to {request.backend!r}, but the device {name} belongs to the backend {device.backend}: remove backend or device"
        )
    if device.backend != "cpu" and name in used_names:
        raise Refusal(f"{place} lends {name}, which another entry already lends: remove one of the two entries")
    if device.backend != "cpu" and not (device.memory_mib or request.memory_mib):
        raise Refusal(
            f"{place} lends {name} ({device.label}), whose memory size is unknown: set memory_mib in this entry, or declare the "
            "device in llama_hardware"
        )
    return device


def _check_ranges(place: str, request: types.WorkerRequest, port: int, used_ports: Collection[int]) -> None:
    for key, value, maximum in (
        ("threads", request.threads, MAX_THREADS),
        ("memory_mib", request.memory_mib, MAX_MIB),
        ("cache_mib", request.cache_mib or None, MAX_MIB),
    ):
        remedy = validation.range_remedy(value, 1, maximum)
        if remedy:
            raise Refusal(f"{place} sets {key} to {value}: {remedy}, or remove it")
    if isinstance(port, bool) or not 0 < port < 65536:
        raise Refusal(f"{place} sets port to {port}: use 1 to 65535")
    if port in used_ports:
        raise Refusal(
            f"{place} uses port {port}, which another worker on this host also uses: give each worker its own port"
        )


def _name_of(place: str, request: types.WorkerRequest, default: str, used_names: Collection[str]) -> str:
    name = request.name or default
    if not re.fullmatch(WORKER_NAME_PATTERN, name):
        raise Refusal(f"{place} has the name {name!r}: use up to 32 of a-z, 0-9, - and _, with a letter or digit first")
    if name in used_names:
        raise Refusal(f"{place} has the name {name!r}, which another worker on this host already has: use another name")
    return name


def _tunnel_end(place: str, host: types.Host, text: str | None) -> str | None:
    """Return the head's end of a tunnel: an endpoint on the head's loopback."""
    if text is None:
        return None
    try:
        address, port = rpc.parse_endpoint(text)
    except ValueError:
        address, port = "", 0
    if not names.is_loopback(address):
        raise Refusal(
            f"{place} sets tunnel to {text!r}: use the tunnel's listening address and port on the head, like 127.0.0.1:60052"
        )
    if host.is_head:
        raise Refusal(
            f"{place} sets tunnel to {text!r}, but the head reaches its own workers without a tunnel: remove tunnel"
        )
    return f"{address}:{port}"


def _endpoints(host: types.Host, port: int, tunnel: str | None, address: str) -> tuple[str, str, str | None]:
    """Return the endpoint of a worker, the one to which the head connects, and the one that is open to the head on a network. A tunnel of
    ``llama_transport`` ends on the head at a loopback address that follows from the worker's, at the same port, so tunnels need no ports of their own.

    :param tunnel: the head's end of the operator's own tunnel.
    :param address: address of the host on the network that it shares with the head.
    """
    loopback_endpoint, direct_endpoint = f"{LOOPBACK}:{port}", f"{address}:{port}"
    if tunnel:
        return loopback_endpoint, tunnel, None
    if host.transport != names.STUNNEL or host.is_head:
        return direct_endpoint, direct_endpoint, direct_endpoint
    octets = address.split(".")
    return loopback_endpoint, f"127.{int(octets[1]) | 128}.{octets[2]}.{octets[3]}:{port}", direct_endpoint


def _default_devices(
    host: types.Host, programs: types.Programs, devices: Sequence[LendableDevice]
) -> list[LendableDevice]:
    """Return the devices that a host lends by default: all devices of its builds, but the processor only if there is a build for it.

    A head with several builds keeps the devices that its llama-server drives. If ``llama_backend`` is auto, each device is lent once.
    """
    canonical_names, builds = host.facts.canonical_names, programs.built_backends[host.name]
    keeps_devices = host.is_head and len(builds) > 1
    kept_names = [device.name for device in devices if keeps_devices and device.backend == programs.serving_backend]
    used_names = {canonical_names[name] for name in kept_names if name in canonical_names}
    chosen_devices = []
    for device in devices:
        name = canonical_names.get(device.name)
        if name not in used_names and (device.name != "CPU" or "cpu" in builds):
            chosen_devices.append(device)
            used_names |= {name} if name and host.backends == ("auto",) else set()
    return chosen_devices


def _cached_tensor_bytes(summary: ModelSummary) -> int:
    """Return the total bytes of the tensors that caches keep; an upper bound if the summary has no ``tensors``."""
    if summary.tensors is not None:
        return sum(row.bytes * row.tensor_count for row in summary.tensors if row.bytes > rpc_upload.CACHE_THRESHOLD)
    largest_bytes = summary.largest_tensor_bytes
    if largest_bytes is not None and largest_bytes <= rpc_upload.CACHE_THRESHOLD:
        return 0
    return int(sum(summary.layer_bytes) + summary.input_bytes + summary.output_bytes)


def _decide_cache(request: types.WorkerRequest, facts: Facts, cached_bytes: int) -> tuple[bool, str]:
    """Return whether a worker has a cache, and why. Unless the inventory sets ``cache``, the models and the size of the disk decide."""
    if request.cache is not None:
        return request.cache, "cache is set in llama_worker_endpoints"
    if not cached_bytes:
        return False, f"no tensor of the model is larger than {rpc_upload.CACHE_THRESHOLD // MIB} MiB"
    if facts.disk_gib is None:
        return False, "the size of the host's disk is unknown"
    if facts.disk_gib * GIB < DISK_FACTOR * cached_bytes:
        needed_gib = 1 << (-(-DISK_FACTOR * cached_bytes // GIB) - 1).bit_length()
        return False, f"the host's disk is smaller than {needed_gib} GiB, the size required for this model"
    return True, "the host's disk is large enough"


def declare_workers(cluster: types.Cluster, host: types.Host, programs: types.Programs) -> list[types.Worker]:
    """Return the workers of a host, those that the inventory requests, or else the default ones. Their capacity is 0 unless the operator sets it."""
    if not host.is_worker:
        return []
    cached_bytes = sum(map(_cached_tensor_bytes, filter(None, (cluster.model.summary, *cluster.other_summaries))))
    devices = lendable_devices(host, programs.built_backends[host.name])
    default_devices = _default_devices(host, programs, devices)
    requests: Sequence[types.WorkerRequest] = host.worker_requests or [
        types.WorkerRequest(device=device.name) for device in default_devices
    ]
    has_direct_endpoint = any(request.tunnel is None for request in requests) and not host.is_head
    address = addresses.address_for_peer(host, cluster.head) if has_direct_endpoint else LOOPBACK
    workers: list[types.Worker] = []
    for index, request in enumerate(requests):
        place = f"llama_worker_endpoints[{index}] for {host.name}"
        device = _device_of(place, request, devices, {worker.device for worker in workers})
        port = FIRST_PORT + index if request.port is None else request.port
        _check_ranges(place, request, port, {names.port_of(worker.listens) for worker in workers})
        suffix = str(index) if len(requests) > 1 and device.name == "CPU" else ""
        name = _name_of(place, request, device.name.lower() + suffix, {worker.name for worker in workers})
        listens, endpoint, open_endpoint = _endpoints(host, port, _tunnel_end(place, host, request.tunnel), address)
        has_cache, cache_why = _decide_cache(request, host.facts, cached_bytes)
        worker = types.Worker(
            name=name,
            host=host.name,
            listens=listens,
            endpoint=endpoint,
            open_endpoint=open_endpoint,
            backend=device.backend,
            build_backend=device.build_backend,
            device=device.name,
            threads=request.threads,
            cache=has_cache,
            cache_mib=request.cache_mib,
            cache_why=cache_why,
            shares_host_memory=device.shares_host_memory,
            capacity_mib=request.memory_mib or 0,
            environment=request.environment,
            uses_rdma=host.uses_rdma and not host.is_head,
        )
        workers.append(worker._replace(environment=_environment_of(host, worker)))
    processor_workers = [worker for worker in workers if worker.backend == backends.CPU.name]
    threads = max(1, host.facts.cpu.cores // max(1, len(processor_workers)))
    return [
        worker._replace(threads=worker.threads or threads) if worker in processor_workers else worker
        for worker in workers
    ]


def _environment_of(host: types.Host, worker: types.Worker) -> dict[str, str]:
    """Return the environment of a worker's process, without that of its build."""
    environment = {**(SPIN_ENVIRONMENT if worker.device == backends.CPU.device else {}), **worker.environment}
    bus_order_setting = backends.BY_NAME[worker.backend].bus_order_setting
    if bus_order_setting and len({accelerator.name for accelerator in host.facts.accelerators_of(worker.backend)}) > 1:
        environment.setdefault(*bus_order_setting)
    if worker.cache:
        release = host.release_requests["llama_release"]
        cache_suffix = fast_load.CACHE_SUFFIX if release and release.fast_load else ""
        environment.setdefault("LLAMA_CACHE", f"{host.facts.prefix}/state/cache/{worker.name}{cache_suffix}")
        if not environment["LLAMA_CACHE"].startswith("/"):
            raise Refusal(
                f"LLAMA_CACHE for the worker {worker.name} on {host.name} is {environment['LLAMA_CACHE']!r}: use the absolute path of a folder, "
                "or remove it"
            )
    return environment


def argv_of(worker: types.Worker, build: BuildPlan, release: ReleasePlan, folder: str) -> list[str]:
    values = (
        ("address", names.address_of(worker.listens)),
        ("worker-port", str(names.port_of(worker.listens))),
        ("worker-device", worker.device),
        ("processor", "CPU" if worker.device == "CPU" else None),
        ("worker-threads", str(worker.threads) if worker.threads else None),
        ("tensor-cache", "on" if worker.cache else None),
    )
    words = [word for name, value in values for word in options.render_option(name, value, release.fork)]
    return [f"{folder}/{build.id}/bin/{capabilities.WORKER_BINARIES[release.fork]}", *words]
