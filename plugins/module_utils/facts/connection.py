# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The address at which a host was reached: what a name in the inventory means, without asking any name service."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of

VARIABLE = "SSH_CONNECTION"
"""sshd sets it: address and port of the client, then those of the server."""
GENERATIONS = 16
"""Of processes between this one and sshd's shell: Ansible's, and sudo, which does not pass the variable on."""


def address(environment: Mapping[str, str], root: Path = ROOT, ask: Ask = output) -> str | None:
    """The IPv4 address of this host at which the connection of the controller came in. Where it came by IPv6, the IPv4 address of the same
    interface. None where it did not come by SSH."""
    try:
        reached = ipaddress.ip_address(ssh_addresses(environment, root)[1].split("%", 1)[0])
    except (ValueError, IndexError):
        return None
    if isinstance(reached, ipaddress.IPv6Address):
        return str(reached.ipv4_mapped) if reached.ipv4_mapped else _beside(reached, ask(["ip", "-o", "address"]))
    return str(reached)


def ssh_addresses(environment: Mapping[str, str], root: Path = ROOT) -> tuple[str, ...]:
    """Addresses of the client and of the server of the SSH session to which this process belongs; nothing where there is none."""
    fields = (environment.get(VARIABLE) or _of_ancestors(root, os.getppid())).split()
    return (fields[0], fields[2]) if len(fields) == 4 else ()


def _of_ancestors(root: Path, process: int) -> str:
    """The variable of the nearest process above this one that has it, as far as this account may read; empty where none has it."""
    for _generation in range(GENERATIONS):
        folder = root / "proc" / str(process)
        variables = text_of(folder / "environ").split("\0")
        known = [variable[len(VARIABLE) + 1 :] for variable in variables if variable.startswith(f"{VARIABLE}=")]
        if known:
            return known[0]
        parent = re.search(r"^PPid:\s*(\d+)$", text_of(folder / "status"), re.MULTILINE)
        process = int(parent[1]) if parent else 0
        if process <= 1:
            break
    return ""


def _beside(reached: ipaddress.IPv6Address, listing: str) -> str | None:
    """The first IPv4 address of the interface that has this one.

    :param listing: what ``ip -o address`` prints.
    """
    entries = re.findall(r"^\d+:\s+(\S+)\s+inet6?\s+([0-9a-f.:]+)", listing, re.MULTILINE)
    owner = next((name for name, other in entries if ipaddress.ip_address(other) == reached), None)
    return next((other for name, other in entries if name == owner and "." in other), None)
