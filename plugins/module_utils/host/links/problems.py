# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why links must not be configured: values that are not possible, and interfaces that somebody needs."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import MTU, STUNNEL, WIREGUARD
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import network_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links.inspection import (
    NETWORK_MANAGER,
    Inspection,
    ThunderboltDevice,
    is_address,
    of_interface,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan

PREFIX_LENGTHS = range(8, 32)
ETHERNET = "1"
"""What the file ``type`` of an Ethernet interface holds in sysfs (ARPHRD_ETHER)."""
INTERFACE_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}"
THUNDERBOLT = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+-[0-9a-f]+"
"""UUID of a device, or its route as sysfs names it."""


def managed(links: Sequence[LinkPlan]) -> list[LinkPlan]:
    return [link for link in links if link.manage]


def problems(links: Sequence[LinkPlan], inspection: Inspection, system: System) -> list[str]:
    """Why the links must not be configured, one sentence each; empty when nothing speaks against it."""
    wanted, former = managed(links), network_files.links_of(network_files.installed(system))
    names = [link.interface for link in wanted]
    sentences = [sentence for link in links for sentence in _invalid_values(link)] + [
        f"llama_links: {name} is named by two links, but an interface has one address: remove one of them."
        for name in sorted({str(name) for name in names if names.count(name) > 1})
    ]
    if sentences:
        return sentences
    if (wanted or former) and os.geteuid() != 0:
        return ["llama_links: configuring interfaces needs root: run with become, or set manage: false."]
    sentences = [
        f"llama_links: {link.interface} carries the connection that Ansible uses, and its address {link.address} would be removed: connect through "
        "another network."
        for link in former
        if link.interface not in names and link.interface in inspection.protected
    ]
    if sentences or not wanted:
        return sentences
    if inspection.manager is None:
        secret = any(link.kind == WIREGUARD for link in wanted)
        instead = f"set llama_transport to {STUNNEL}" if secret else "set manage: false"
        return [
            f"llama_links: {', '.join(map(str, names))} cannot be configured, since neither NetworkManager nor systemd-networkd runs on this "
            f"host: start one of them, or {instead}."
        ]
    if not system.output("ip", "-json", "address"):
        return ["llama_links: `ip -json address` prints nothing on this host: install iproute2, or set manage: false."]
    sentences = [sentence for link in wanted for sentence in [_unusable(link, inspection, system)] if sentence]
    return sentences or list(_overlaps(wanted, inspection))


def _invalid_values(link: LinkPlan) -> Iterator[str]:
    name, mtu, device = link.interface, link.mtu, link.thunderbolt
    if not isinstance(name, str) or not re.fullmatch(INTERFACE_NAME, name):
        yield f"llama_links: {name!r} is not an interface name: give it as `ip link` shows it."
        return
    address = _invalid_address(link.address)
    if address:
        yield f"llama_links: {link.address!r} of {name} is {address}."
    if mtu is not None and (isinstance(mtu, bool) or not isinstance(mtu, int) or mtu not in MTU):
        yield f"llama_links: mtu {mtu!r} of {name} is not a number from {MTU[0]} to {MTU[-1]}: correct it or leave it out."
    if device is not None and not re.fullmatch(THUNDERBOLT, str(device)):
        yield (
            f"llama_links: thunderbolt {device!r} of {name} is neither the UUID nor the route of a device: give it as `boltctl list` or "
            "/sys/bus/thunderbolt/devices shows it."
        )


def _invalid_address(address: str) -> str:
    """What is wrong with an address; nothing where it is right."""
    try:
        parsed = ipaddress.IPv4Interface(address) if re.fullmatch(r"[0-9.]+/\d+", str(address)) else None
    except ValueError:
        parsed = None
    if parsed is None or str(parsed) != address or parsed.network.prefixlen not in PREFIX_LENGTHS:
        return "not an IPv4 address with a prefix length from 8 to 31: give it like 10.99.0.12/24"
    if parsed.ip.is_multicast or parsed.ip.is_loopback or parsed.ip.is_unspecified or parsed.ip.is_reserved:
        return "not the address of a host: give it like 10.99.0.12/24"
    if parsed.network.prefixlen < 31 and parsed.ip in (parsed.network[0], parsed.network.broadcast_address):
        return "the address of the network or its broadcast address: give the address of a host"
    return ""


def _unusable(link: LinkPlan, inspection: Inspection, system: System) -> str | None:
    """Why the interface of a link must not be configured, in one sentence."""
    name, instead = str(link.interface), "or set manage: false for this link"
    folder = of_interface(name, system)
    if name in inspection.protected:
        return (
            f"llama_links: {name} carries the connection that Ansible uses or this host's default route, and is not changed: "
            f"name the interface of the direct cable, {instead}."
        )
    if link.kind == WIREGUARD:
        made = name in [former.interface for former in network_files.links_of(network_files.installed(system))]
        if name in inspection.interfaces and not made:
            return (
                f"llama_links: this host has an interface {name} that is not this cluster's: give the interface of kind {WIREGUARD} in llama_links "
                "another name."
            )
        return None
    if name not in inspection.interfaces:
        if unauthorised([link], inspection):
            return None
        present = ", ".join(inspection.interfaces) or "none"
        waiting = " ".join(unnamed([link], inspection.thunderbolt))
        return f"llama_links: this host has no interface {name} (it has {present}): correct the name, or plug in its cable. {waiting}".strip()
    if text_of(folder / "type").strip() != ETHERNET or any(
        (folder / kind).exists() for kind in ("bridge", "bonding", "wireless")
    ):
        return f"llama_links: {name} is not an Ethernet or Thunderbolt interface: name the one of the direct cable, {instead}."
    if (folder / "master").exists():
        return f"llama_links: {name} is part of {(folder / 'master').resolve().name}: remove it from there, {instead}."
    file = network_files.foreign(link, inspection, system)
    if file:
        return f"llama_links: {name} is already configured by {file}: remove {name} from that file, {instead}."
    is_configured = name in [former.interface for former in network_files.links_of(network_files.installed(system))]
    others = [
        address
        for address in inspection.interfaces[name].addresses
        if address != link.address and not address.startswith("169.254.")
    ]
    if others and not is_configured:
        return f"llama_links: {name} is already in use with address {others[0]}: remove that address, {instead}."
    if inspection.manager == NETWORK_MANAGER and "unmanaged" in system.output(
        "nmcli", "-g", "GENERAL.STATE", "device", "show", name
    ):
        return f"llama_links: NetworkManager does not manage {name}: remove it from unmanaged-devices in its configuration, {instead}."
    return None


def _overlaps(links: Sequence[LinkPlan], inspection: Inspection) -> Iterator[str]:
    """Networks of links that would draw traffic away from other interfaces."""
    linked = {link.interface for link in links}
    taken = [
        (name, address)
        for name, interface in inspection.interfaces.items()
        for address in interface.addresses
        if name not in linked
    ]
    for link in links:
        network = ipaddress.IPv4Interface(link.address).network
        for name, address in taken:
            if network.overlaps(ipaddress.IPv4Interface(address).network):
                yield (
                    f"llama_links: {link.address} of {link.interface} is in the same network as {address} of {name}: "
                    "give each link a network of its own."
                )
        for client in inspection.ssh[:1]:
            if is_address(client) and ipaddress.ip_address(client) in network:
                yield (
                    f"llama_links: the network of {link.address} of {link.interface} contains {client}, from which Ansible is "
                    "connected: give the link another network."
                )
        taken.append((str(link.interface), link.address))


# ---------------------------------------------------------------------------------------------------------- thunderbolt


def named_devices(links: Sequence[LinkPlan]) -> set[str]:
    """UUIDs and routes of Thunderbolt devices that managed links name."""
    return {link.thunderbolt for link in managed(links) if link.thunderbolt}


def unauthorised(links: Sequence[LinkPlan], inspection: Inspection) -> list[ThunderboltDevice]:
    """Thunderbolt devices that wait to be authorised, and that a managed link names."""
    named = named_devices(links)
    return [
        device
        for device in inspection.thunderbolt
        if device.is_authorized is False and named & {device.uuid, device.name}
    ]


def unnamed(links: Sequence[LinkPlan], devices: Sequence[ThunderboltDevice]) -> list[str]:
    """A sentence for each Thunderbolt device that waits to be authorised and that no link names, where a managed link goes through Thunderbolt."""
    if not any(re.fullmatch(r"thunderbolt\d+", str(link.interface)) for link in managed(links)):
        return []
    named = named_devices(links)
    return [
        f"The Thunderbolt device {device.name} ({device.product!r}) waits to be authorised, and no link names it: if a link goes through it, add "
        f"«thunderbolt: {device.uuid}» to that link in llama_links."
        for device in devices
        if device.is_authorized is False and not named & {device.uuid, device.name}
    ]
