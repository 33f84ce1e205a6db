# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts and devices on which a model may be placed, and the links between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import STUNNEL, is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts, Interface, MeasuredLink
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device, Host, Worker

KINDS = {
    "thunderbolt": "thunderbolt",
    "ib": "infiniband",
    "wl": "wireless",
    "wg": "wireguard",
    "tailscale": "wireguard",
    "zt": "tunnel",
}
"""Prefix of an interface's name → kind of its link, unless the operator or the host declares the kind; other interfaces are Ethernet."""


class Site(NamedTuple):
    """Hosts and devices that may hold a model."""

    head: str
    hosts: Mapping[str, Host]
    """All hosts with devices, including those of external workers."""
    devices: tuple[Device, ...]
    """Devices of workers, then the head's own."""
    rates: Mapping[str, device_rates.Rate] = {}
    """Buffer of a device, or CPU for the head's processor → its rate."""
    links: Mapping[str, cost_model.Link] = {}
    """Buffer of a worker's device → how the head reaches it."""
    server_backends: Mapping[str, str] = {}
    """Host of the inventory → the backend whose llama-server would run there."""

    @property
    def head_host(self) -> Host:
        return self.hosts[self.head]

    @property
    def head_facts(self) -> Facts:
        return self.head_host.facts

    def without_workers(self, workers: Collection[Worker]) -> Site:
        """Return the site without the devices of these workers."""
        endpoints = {worker.endpoint for worker in workers}
        return self._replace(devices=tuple(device for device in self.devices if device.endpoint not in endpoints))


def site_of(
    head: str,
    hosts: Mapping[str, Host],
    site_devices: Sequence[Device],
    architecture: str,
    server_backends: Mapping[str, str],
) -> Site:
    """Return the site with the rate of each device for models of an architecture, and the links to workers."""
    links = {
        device.buffer: _link(device, hosts[device.host], hosts[head].facts) for device in site_devices if device.worker
    }
    rates = {device.buffer: rate_of(device, hosts[device.host], architecture) for device in site_devices}
    rates[device_load.CPU_BUFFER] = processor_rate(hosts[head].facts)
    return Site(head, hosts, tuple(site_devices), rates, links, server_backends)


def rate_of(device: Device, host: Host, architecture: str = "") -> device_rates.Rate:
    """Return the rate of a device for models of an architecture."""
    if not device.accelerator:
        return processor_rate(host.facts)
    return device_rates.accelerator_rate(*device.accelerator, architecture)


def processor_rate(facts: Facts) -> device_rates.Rate:
    """Return the rate of the host's processor. A few cores, like those of a virtual machine, cannot use the memory's full rate, and compute less."""
    gflops, cores_gb_per_s = cores_gflops(facts), facts.cpu.cores * device_rates.CORE_GB_PER_S
    names = (facts.cpu.model, *(accelerator.name for accelerator in facts.accelerators if accelerator.unified))
    row = next(filter(None, map(device_rates.processor_row, names)), None)
    kind = "board" if facts.is_board else "processor"
    source = device_rates.TABLE_SOURCE if row else device_rates.ASSUMED_SOURCE
    rate = device_rates.rate_of_row(row or device_rates.ASSUMED_RATES[kind], source)
    if row and row.family in ("apple-processor", "board"):
        return rate
    rate = rate._replace(prompt_gflops=min(rate.prompt_gflops, gflops))
    if cores_gb_per_s >= rate.gb_per_s:
        return rate
    uncertainty = max(rate.uncertainty, device_rates.UNLISTED_UNCERTAINTY)
    return rate._replace(gb_per_s=cores_gb_per_s, source=device_rates.ASSUMED_SOURCE, uncertainty=uncertainty)


def cores_gflops(facts: Facts) -> float:
    """Return the gigaflops of the cores of the host's processor, regardless of the rate of its memory."""
    has_avx512 = None if facts.architecture in ("aarch64", "armv7l") else facts.cpu.avx512 is not False
    return facts.cpu.cores * device_rates.CORE_GFLOPS[has_avx512]


def _link(device: Device, host: Host, head_facts: Facts) -> cost_model.Link:
    """Return how the head reaches a worker's device, measured or assumed for the kind of its link."""
    kind = link_kind_of(device.connection_endpoint, host.links, host.facts.interfaces)
    if kind == "loopback" and not host.is_head:
        kind = "tunnel"
    measurement = (head_facts.measured.get(host.name) if kind != "loopback" else None) or MeasuredLink()
    round_trip_ms, mbit_per_second = measurement[:2] if measurement.requested else (None, None)
    assumed_link = cost_model.ASSUMED_LINKS[kind]
    gbit = (mbit_per_second or 0) / 1000 or (kind != "loopback" and host.facts.link_gbit_per_s) or assumed_link.gbit
    is_encrypted = host.transport == STUNNEL and kind not in ("loopback", "tunnel")
    return cost_model.Link(
        kind,
        (round_trip_ms or assumed_link.round_trip_ms) + is_encrypted * cost_model.STUNNEL_MS,
        min(gbit, cost_model.STUNNEL_GBIT) if is_encrypted else gbit,
        bool(round_trip_ms),
        host.facts.is_board,
        bool(mbit_per_second or host.facts.link_gbit_per_s or kind == "loopback"),
    )


def link_kind_of(endpoint: str, links: Sequence[LinkPlan], interfaces: Sequence[Interface] = ()) -> str:
    """Return the kind of the link over which the head reaches a worker, a key of cost_model.ASSUMED_LINKS."""
    address = endpoint.rsplit(":", 1)[0]
    if is_loopback(address):
        return "loopback"
    matching_links = [link for link in links if link.address.split("/", maxsplit=1)[0] == address]
    names, kinds = {link.interface for link in matching_links}, [link.kind for link in matching_links if link.kind]
    kinds += [interface.kind for interface in interfaces if address in interface.addresses or interface.name in names]
    kinds += [KINDS[prefix] for link in matching_links for prefix in KINDS if (link.interface or "").startswith(prefix)]
    return next(iter(kinds), "ethernet")
