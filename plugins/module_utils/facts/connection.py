# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The address at which the controller reached this host, determined without DNS."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of

SSH_VARIABLE = "SSH_CONNECTION"
"""Variable set by sshd: address and port of the client, then of the server."""
MAX_ANCESTORS = 16
"""Number of ancestors to search: Ansible and sudo, which drops the variable, run between sshd's shell and this process."""


def reached_address(environment: Mapping[str, str], root: Path = ROOT, ask: Ask = output) -> str | None:
    """Return the IPv4 address at which the controller reached this host, or None without SSH. For a connection over IPv6, return the IPv4 address of
    the same interface."""
    try:
        ip = ipaddress.ip_address(ssh_addresses(environment, root)[1].split("%", 1)[0])
    except (ValueError, IndexError):
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped) if ip.ipv4_mapped else _first_ipv4(ip, ask(["ip", "-o", "address"]))
    return str(ip)


def ssh_addresses(environment: Mapping[str, str], root: Path = ROOT) -> tuple[str, ...]:
    """Return the addresses of client and server of this process's SSH session; empty without a session."""
    fields = (environment.get(SSH_VARIABLE) or _inherited_value(root, os.getppid())).split()
    return (fields[0], fields[2]) if len(fields) == 4 else ()


def _inherited_value(root: Path, pid: int) -> str:
    """Return SSH_VARIABLE's value in the nearest ancestor with a readable one; empty without one."""
    for _generation in range(MAX_ANCESTORS):
        folder = root / "proc" / str(pid)
        variables = text_of(folder / "environ").split("\0")
        values = [text[len(SSH_VARIABLE) + 1 :] for text in variables if text.startswith(f"{SSH_VARIABLE}=")]
        if values:
            return values[0]
        parent_match = re.search(r"^PPid:\s*(\d+)$", text_of(folder / "status"), re.MULTILINE)
        pid = int(parent_match[1]) if parent_match else 0
        if pid <= 1:
            break
    return ""


def _first_ipv4(ipv6_address: ipaddress.IPv6Address, listing: str) -> str | None:
    """Return the first IPv4 address of the interface with this IPv6 address.

    :param listing: output of ``ip -o address``.
    """
    entries = re.findall(r"^\d+:\s+(\S+)\s+inet6?\s+([0-9a-f.:]+)", listing, re.MULTILINE)
    interface = next((name for name, address in entries if address == str(ipv6_address)), None)
    return next((address for name, address in entries if name == interface and "." in address), None)
