# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packet filters of a host: its firewall manager, and systemd's filter for units."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of

MANAGERS = names.FIREWALLS
"""systemd units in order of preference, because two of them may be active."""
UFW_SETTINGS_FILE = "/etc/ufw/ufw.conf"
TRIAL_TIMEOUT_SECONDS = 30
"""Time limit for SEND_PROGRAM, which usually takes 50 ms. A host can be busy, and without a result the planner may refuse a plan."""
REFUSED_STATUS = 77
SEND_PROGRAM = f"""import socket, sys
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9))
except PermissionError:
    sys.exit({REFUSED_STATUS})
"""
"""Program that exits with REFUSED_STATUS if the kernel forbids sending: a datagram fails at once, unlike a connection."""


def select_manager(active_units: Collection[str], ufw_settings: str) -> str | None:
    """Return the manager that filters packets. The unit of ufw is active even if ufw is switched off.

    :param active_units: units in MANAGERS that systemd reports as active.
    :param ufw_settings: content of UFW_SETTINGS_FILE.
    """
    for name in MANAGERS:
        is_enabled = name != "ufw" or re.search(r"^ENABLED=[\"']?yes", ufw_settings, re.MULTILINE)
        if name in active_units and is_enabled:
            return name
    return None


def active_units(units: Collection[str], listing: str) -> set[str]:
    """Return the units that are active.

    :param listing: output of ``systemctl is-active UNITS``, a line for each unit.
    """
    return {name for name, state in zip(units, listing.split()) if state in ("active", "reloading")}


def active_manager() -> str | None:
    """Return the manager that filters packets on this host."""
    try:
        listing = commands.run(["systemctl", "is-active", *MANAGERS], commands.COMMAND_TIMEOUT_SECONDS, may_fail=True)
    except commands.CommandError:
        return None
    return select_manager(active_units(MANAGERS, listing), text_of(Path(UFW_SETTINGS_FILE)))


def has_unit_filter(interpreter: str | None, run: Callable[[list[str], float], str] = commands.run) -> bool | None:
    """Return whether IPAddressDeny of a unit takes effect, or None if root or systemd-run is missing.

    Without BPF for control groups, as in many containers, systemd only logs a warning and starts the unit anyway. So this function starts a
    unit that tries to send."""
    if interpreter is None:
        return None
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    properties = ["--property=IPAddressDeny=any", f"--property=RuntimeMaxSec={TRIAL_TIMEOUT_SECONDS}"]
    systemd_run = ["systemd-run", "--quiet", "--wait", "--collect", *properties]
    try:
        run([*sudo, *systemd_run, interpreter, "-I", "-S", "-c", SEND_PROGRAM], TRIAL_TIMEOUT_SECONDS)
    except commands.CommandError as error:
        return True if error.status == REFUSED_STATUS else None
    return False
