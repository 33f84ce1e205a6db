# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network interfaces of a host: addresses, and what kind of link each one with hardware is."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import ONE_HOST

USB4_GENERATION = 4
"""What the kernel's thunderbolt driver writes into ``generation`` of a USB4 router; 1 to 3 are Thunderbolt's own."""
INFINIBAND_TYPE = 32
"""ARPHRD_INFINIBAND, in ``type`` of an interface."""
IPV4_GID = "0000:0000:0000:0000:0000:ffff:"
"""How entries of such tables begin that are IPv4 addresses."""
PORTS = {"thunderbolt": "thunderbolt", "wi-fi": "wireless"}
"""How the name of a hardware port of macOS begins → kind; all others are Ethernet."""


def interfaces(root: Path = ROOT, ask: Ask = output) -> list[dict]:
    """``name``, ``kind`` (ethernet, thunderbolt, usb4, infiniband or wireless) and IPv4 ``addresses`` of each interface with hardware that
    has an address."""
    kinds, held = _of_macos(ask) if platform.system() == "Darwin" else _of_linux(root), _addresses(ask)
    return [
        {"name": name, "kind": kind, "addresses": sorted(held[name])}
        for name, kind in sorted(kinds.items())
        if held.get(name)
    ]


def addresses(ask: Ask = output) -> list[str]:
    """IPv4 addresses of all interfaces, those of bridges and containers too, without loopback."""
    held = {address for own in _addresses(ask).values() for address in own}
    return sorted(address for address in held if not is_loopback(address))


def rdma_addresses(root: Path = ROOT) -> list[str]:
    """IPv4 addresses in the tables of RDMA devices, as RPC looks for them: of port 1 alone."""
    table = [text_of(path).strip() for path in (root / "sys/class/infiniband").glob("*/ports/1/gids/*")]
    words = {text[len(IPV4_GID) :].replace(":", "") for text in table if text.startswith(IPV4_GID)}
    held = {socket.inet_ntoa(bytes.fromhex(word)) for word in words}
    return sorted(address for address in held if re.fullmatch(ONE_HOST, address))


def _of_linux(root: Path) -> dict[str, str]:
    folders = [folder for folder in (root / "sys/class/net").glob("*") if (folder / "device").exists()]
    return {folder.name: kind_of(folder, root) for folder in folders}


def kind_of(folder: Path, root: Path) -> str:
    """Kind of an interface; of one without hardware, Ethernet.

    :param folder: of the interface in /sys/class/net.
    """
    if os.path.basename(os.path.realpath(folder / "device" / "driver")) == "thunderbolt-net":
        return "usb4" if _generation(folder, root) >= USB4_GENERATION else "thunderbolt"
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return "wireless"
    return "infiniband" if text_of(folder / "type").strip() == str(INFINIBAND_TYPE) else "ethernet"


def _generation(folder: Path, root: Path) -> int:
    """Of the host's own router to which the cable of an interface goes (``0-0`` for the service ``0-1.0``), or of the newest one where the
    name of that device says nothing."""
    service = os.path.basename(os.path.realpath(folder / "device"))
    own = re.sub(r"-.*", "-0", service)
    devices = root / "sys/bus/thunderbolt/devices"
    paths = [devices / own] if (devices / own / "generation").exists() else sorted(devices.glob("*-0"))
    generations = [text_of(path / "generation").strip() for path in paths]
    return max((int(text) for text in generations if text.isdigit()), default=0)


def _of_macos(ask: Ask) -> dict[str, str]:
    ports = re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", ask(["networksetup", "-listallhardwareports"]))
    return {
        device: next((kind for start, kind in PORTS.items() if port.lower().startswith(start)), "ethernet")
        for port, device in ports
    }


def _addresses(ask: Ask) -> dict[str, list[str]]:
    """Interface → its IPv4 addresses."""
    found = _ip(ask) or _ifconfig(ask)
    return {name: [each for each in own if re.fullmatch(ONE_HOST, each)] for name, own in found.items()}


def _ip(ask: Ask) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, address in re.findall(r"^\d+: (\S+?)(?:@\S+)? +inet ([\d.]+)", ask(["ip", "-4", "-o", "address"]), re.M):
        found.setdefault(name, []).append(address)
    return found


def _ifconfig(ask: Ask) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, rest in re.findall(r"^(\w+): (.*(?:\n[ \t].*)*)", ask(["ifconfig"]), re.M):
        found[name] = re.findall(r"\binet ([\d.]+)", rest)
    return found
