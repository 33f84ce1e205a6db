# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network interfaces of a host: their addresses and kinds of link."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import HOST_IP_PATTERN

USB4_GENERATION = 4
"""Value in ``generation`` of a USB4 router; 1 to 3 are Thunderbolt."""
INFINIBAND_TYPE = 32
"""ARPHRD_INFINIBAND in ``type`` of an interface."""
IPV4_GID_PREFIX = "0000:0000:0000:0000:0000:ffff:"
"""Prefix of IPv4 addresses in the tables of RDMA devices."""
PORT_KINDS = {"thunderbolt": "thunderbolt", "wi-fi": "wireless"}
"""Prefix of a macOS hardware port's name → kind; other ports are Ethernet."""


def interfaces(root: Path = ROOT, ask: Ask = output) -> list[dict]:
    """Return ``name``, ``kind`` (ethernet, thunderbolt, usb4, infiniband or wireless) and IPv4 ``addresses`` of each hardware interface with an address."""
    kinds, addresses = _macos_kinds(ask) if platform.system() == "Darwin" else _linux_kinds(root), _ipv4_by_name(ask)
    return [
        {"name": name, "kind": kind, "addresses": sorted(addresses[name])}
        for name, kind in sorted(kinds.items())
        if addresses.get(name)
    ]


def addresses(ask: Ask = output) -> list[str]:
    """Return the IPv4 addresses of all interfaces, including bridges and containers, without loopback."""
    return sorted({address for ips in _ipv4_by_name(ask).values() for address in ips if not is_loopback(address)})


def rdma_addresses(root: Path = ROOT) -> list[str]:
    """Return the IPv4 addresses in the tables of RDMA devices. RPC uses only port 1."""
    gid_texts = [text_of(path).strip() for path in (root / "sys/class/infiniband").glob("*/ports/1/gids/*")]
    matches = [re.fullmatch(IPV4_GID_PREFIX + "([0-9a-f]{4}):([0-9a-f]{4})", text) for text in gid_texts]
    addresses = {socket.inet_ntoa(bytes.fromhex("".join(match.groups()))) for match in matches if match}
    return sorted(address for address in addresses if re.fullmatch(HOST_IP_PATTERN, address))


def _linux_kinds(root: Path) -> dict[str, str]:
    folders = [folder for folder in (root / "sys/class/net").glob("*") if (folder / "device").exists()]
    return {folder.name: kind_of(folder, root) for folder in folders}


def kind_of(folder: Path, root: Path) -> str:
    """Return the kind of an interface; Ethernet without hardware.

    :param folder: folder of the interface in /sys/class/net.
    """
    if os.path.basename(os.path.realpath(folder / "device" / "driver")) == "thunderbolt-net":
        return "usb4" if _router_generation(folder, root) >= USB4_GENERATION else "thunderbolt"
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return "wireless"
    return "infiniband" if text_of(folder / "type").strip() == str(INFINIBAND_TYPE) else "ethernet"


def _router_generation(folder: Path, root: Path) -> int:
    """Return the generation of the host's router that carries an interface (``0-0`` for the service ``0-1.0``), or of the newest router if the
    device's name does not identify one."""
    device = os.path.basename(os.path.realpath(folder / "device"))
    router = re.sub(r"-.*", "-0", device)
    bus_folder = root / "sys/bus/thunderbolt/devices"
    paths = [bus_folder / router] if (bus_folder / router / "generation").exists() else sorted(bus_folder.glob("*-0"))
    return max((parse_count(text_of(path / "generation")) or 0 for path in paths), default=0)


def _macos_kinds(ask: Ask) -> dict[str, str]:
    ports = re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", ask(["networksetup", "-listallhardwareports"]))
    return {
        device: next((kind for prefix, kind in PORT_KINDS.items() if port.lower().startswith(prefix)), "ethernet")
        for port, device in ports
    }


def _ipv4_by_name(ask: Ask) -> dict[str, list[str]]:
    """Return interface → its IPv4 addresses."""
    addresses: dict[str, list[str]] = {}
    for name, ip in re.findall(r"^\d+: (\S+?)(?:@\S+)? +inet ([\d.]+)", ask(["ip", "-4", "-o", "address"]), re.M):
        addresses.setdefault(name, []).append(ip)
    if not addresses:
        for name, details in re.findall(r"^(\w+): (.*(?:\n[ \t].*)*)", ask(["ifconfig"]), re.M):
            addresses[name] = re.findall(r"\binet ([\d.]+)", details)
    return {name: [ip for ip in ips if re.fullmatch(HOST_IP_PATTERN, ip)] for name, ips in addresses.items()}
