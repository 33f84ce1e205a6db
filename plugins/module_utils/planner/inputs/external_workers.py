# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Workers that others run: on Windows, in a container, or on another person's host. The head uses them, and the collection never changes them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import (
    DEFAULT_FACTS,
    MAX_MIB,
    UNNAMED_DEVICE,
    Accelerator,
    parse_facts,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ExternalWorker, Host, Worker

VARIABLE = "llama_external_workers"
PROTOCOL_PATTERN = r"\d{1,3}(\.\d{1,3}){1,2}"

HOST_NAME_PATTERN = r"\w[\w.:@+-]*"
"""Form of the name of a host or a cluster, which is part of file names, service definitions and commands."""


def host_name_remedy(name: str) -> str | None:
    """Return the remedy for an invalid name of a host or a cluster; None for a valid name."""
    if validation.is_plain(name) and re.fullmatch(HOST_NAME_PATTERN, name) and len(name) <= validation.NAME_LIMIT:
        return None
    return f"use at most {validation.NAME_LIMIT} letters, digits and . : @ + - _, with a letter, digit or _ first"


def read_workers(entries: Sequence[Mapping[str, Any]], hosts: Collection[str]) -> tuple[ExternalWorker, ...]:
    """Return the workers of ``llama_external_workers``. Their ports on the host, caches and threads are unknown.

    :param hosts: hosts of the cluster.
    :raises Refusal: an entry is invalid.
    """
    workers: list[ExternalWorker] = []
    for index, values in enumerate(entries):
        place = f"{VARIABLE}[{index}]"
        endpoint, backend = _endpoint(place, values.get("endpoint")), _backend(place, values)
        host = str(values.get("host") or names.address_of(endpoint))
        _check_entry(place, host, values, hosts)
        if any(endpoint == external.worker.endpoint for external in workers):
            raise Refusal(
                f"{place} sets endpoint to {endpoint}, which another entry already has: remove one of the two entries"
            )
        device_index = sum((external.worker.host, external.worker.backend) == (host, backend) for external in workers)
        worker = Worker(
            name=f"external{index}",
            host=host,
            listens=endpoint,
            endpoint=endpoint,
            open_endpoint=endpoint,
            backend=backend,
            build_backend="",
            device=backends.device_name(backend, device_index),
            capacity_mib=values["memory_mib"],
        )
        name, architecture = values.get("device") or UNNAMED_DEVICE, values.get("architecture") or ""
        accelerator = Accelerator(backend, name, architecture, values["memory_mib"], False)
        workers.append(
            ExternalWorker(worker, values.get("protocol"), None if backend == backends.CPU.name else accelerator)
        )
    return tuple(workers)


def _endpoint(place: str, endpoint: Any) -> str:
    try:
        address, port = rpc.parse_endpoint(str(endpoint))
    except ValueError:
        address, port = names.ANY_ADDRESS, 0
    ip = ipaddress.IPv4Address(address)
    if ip.is_unspecified or ip.is_multicast or ip.is_reserved:  # 255.255.255.255 is reserved
        raise Refusal(
            f"{place} sets endpoint to {endpoint!r}: use the numeric IPv4 address and the port at which the head reaches the worker, like 192.0.2.7:50052"
        )
    return f"{address}:{port}"


def _backend(place: str, values: Mapping[str, Any]) -> str:
    backend = str(values.get("backend") or backends.CPU.name)
    if backend not in BACKENDS:
        raise Refusal(f"{place} sets backend to {backend!r}: use one of {', '.join(BACKENDS)}")
    return backend


def _check_entry(place: str, host: str, values: Mapping[str, Any], hosts: Collection[str]) -> None:
    remedy = validation.range_remedy(values["memory_mib"], 1, MAX_MIB)
    if remedy:
        raise Refusal(f"{place} sets memory_mib to {values['memory_mib']}: {remedy}")
    protocol = values.get("protocol")
    if protocol is not None and not re.fullmatch(PROTOCOL_PATTERN, protocol, re.ASCII):
        raise Refusal(
            f"{place} sets protocol to {protocol!r}: use the version that the worker's rpc-server prints when it starts, like 7.0.0"
        )
    host_remedy = host_name_remedy(host)
    if host_remedy:
        raise Refusal(f"{place} sets host to {validation.quote(host)}: {host_remedy}")
    if host in hosts:
        raise Refusal(
            f"{place} is on {host}, which belongs to this cluster: declare the worker in llama_worker_endpoints for {host}, or set host to another name"
        )


def check_workers(workers: Sequence[ExternalWorker], hosts: Mapping[str, Host], release: ReleasePlan) -> None:
    """Refuse a worker whose protocol the head does not accept, or whose address is that of a host of the cluster, whose memory the plan already counts.
    The head checks an unknown protocol in the handshake. An address on loopback is the end of a tunnel."""
    owners = {address: name for name, host in hosts.items() for address in _addresses(host)}
    for index, entry in enumerate(workers):
        if entry.protocol and release.protocol and not rpc.is_compatible(release.protocol, entry.protocol):
            raise Refusal(
                f"{VARIABLE}[{index}] sets protocol to {entry.protocol}, but {release.ref} speaks {release.protocol}: "
                "run that worker with this cluster's release, or set llama_release to the worker's release"
            )
        owner = owners.get(names.address_of(entry.worker.endpoint))
        if owner:
            raise Refusal(
                f"{VARIABLE}[{index}] sets endpoint to {entry.worker.endpoint}, an address of {owner}, whose memory the plan already "
                f"counts: remove the entry, and put {owner} into llama_workers"
            )


def _addresses(host: Host) -> set[str]:
    addresses = {host.address, *host.facts.addresses, *(link.address.split("/", maxsplit=1)[0] for link in host.links)}
    addresses.update(address for interface in host.facts.interfaces for address in interface.addresses)
    return {address for address in addresses if not names.is_loopback(address)}


def hosts_of(externals: Sequence[ExternalWorker]) -> dict[str, Host]:
    """Return the hosts of external workers by name. Only the devices of these workers are known."""
    hosts: dict[str, list[ExternalWorker]] = {}
    for external in externals:
        hosts.setdefault(external.worker.host, []).append(external)
    return {name: _host(name, group) for name, group in hosts.items()}


def _host(name: str, externals: Sequence[ExternalWorker]) -> Host:
    memory_mib = sum(external.worker.capacity_mib for external in externals)
    facts = parse_facts({**DEFAULT_FACTS, "memory_mib": memory_mib})
    accelerators = tuple(external.accelerator for external in externals if external.accelerator)
    return Host(
        name=name,
        is_head=False,
        is_worker=True,
        address=names.address_of(externals[0].worker.endpoint),
        facts=facts._replace(accelerators=accelerators),
    )
