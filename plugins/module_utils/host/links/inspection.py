# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inspects the interfaces of a host: which of them must not be changed, and which service configures them."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import connection
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System

NETWORKD, NETWORK_MANAGER = "networkd", "NetworkManager"
UNIT_NAMES = {NETWORK_MANAGER: "NetworkManager", NETWORKD: "systemd-networkd"}
"""Manager of interfaces → its service. netplan writes files for these two and configures nothing itself."""


def interface_folder(name: str, system: System) -> Path:
    return system.path(f"sys/class/net/{name}")


class InterfaceState(NamedTuple):
    addresses: tuple[str, ...]
    """IPv4, with prefix length"""
    mtu: int | None
    mac: str


class Inspection(NamedTuple):
    manager: str | None
    interfaces: Mapping[str, InterfaceState]
    protected_names: frozenset[str]
    """names of interfaces that must not be changed"""


def inspect(system: System) -> Inspection:
    addresses = _addresses(system)
    active_managers = (
        name for name, unit in UNIT_NAMES.items() if system.output("systemctl", "is-active", unit).strip() == "active"
    )
    return Inspection(
        manager=next(active_managers, None),
        interfaces=_interfaces(addresses, system.root),
        protected_names=_protected_interfaces(addresses, connection.ssh_addresses(os.environ, system.root), system),
    )


def _addresses(system: System) -> dict[str, list[str]]:
    """Return IPv4 and IPv6 addresses with prefix length by interface; empty if ``ip`` fails."""
    addresses: dict[str, list[str]] = {}
    with contextlib.suppress(*reading.PARSE_ERRORS):
        for entry in json.loads(system.output("ip", "-json", "address")):
            with contextlib.suppress(*reading.PARSE_ERRORS):
                texts = [f"{address['local']}/{address['prefixlen']}" for address in entry.get("addr_info", [])]
                addresses[entry["ifname"]] = [text for text in texts if ipaddress.ip_interface(text)]
    return addresses


def _interfaces(addresses: Mapping[str, list[str]], root: Path) -> dict[str, InterfaceState]:
    """Return interfaces that could belong to a link, without loopback and the ports of containers, which come and go."""
    interfaces = {}
    for folder in sorted((root / "sys/class/net").glob("*")):
        name = folder.name
        is_virtual_port = (folder / "master").exists() and not (folder / "device").exists()
        if name != "lo" and folder.is_dir() and not is_virtual_port:
            ipv4 = sorted(address for address in addresses.get(name, []) if ":" not in address)
            mtu = parse_count(text_of(folder / "mtu"))
            interfaces[name] = InterfaceState(tuple(ipv4), mtu, text_of(folder / "address").strip())
    return interfaces


def _protected_interfaces(
    addresses: Mapping[str, list[str]], ssh_addresses: tuple[str, ...], system: System
) -> frozenset[str]:
    """Return the interfaces of the SSH session and of the default routes, with the ports of a bridge or bond."""
    names = set()
    for fields in map(str.split, system.text("proc/net/route").splitlines()[1:]):
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            names.add(fields[0])
    for fields in map(str.split, system.text("proc/net/ipv6_route").splitlines()):
        if len(fields) > 9 and fields[0] == "0" * 32 and fields[1] == "00":
            names.add(fields[9])
    for text in ssh_addresses:
        address, _separator, zone = text.partition("%")
        names.add(zone)
        names.update(name for name, texts in addresses.items() if address in [entry.split("/")[0] for entry in texts])
    client = ssh_addresses[0].partition("%")[0] if ssh_addresses else ""
    if is_address(client):
        with contextlib.suppress(*reading.PARSE_ERRORS):
            routes = json.loads(system.output("ip", "-json", "route", "get", client))
            names.update(str(route["dev"]) for route in routes)
    queue = list(names & {path.name for path in (system.root / "sys/class/net").glob("*")})
    while queue:
        ports = {path.name.partition("_")[2] for path in interface_folder(queue.pop(), system).glob("lower_*")} - names
        names |= ports
        queue += ports
    return frozenset(names - {"", "lo"})


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
