# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What filters on a host: a firewall manager, and systemd for its units."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of

MANAGERS = names.FIREWALLS
"""Units of systemd, in the order in which they are looked for: two of them may be active."""
UFW_SETTINGS = "/etc/ufw/ufw.conf"
TRY_SECONDS = 30
"""It takes 50 ms, but without a result a plan may be refused, and a host can be busy."""
REFUSED = 77
SEND = f"""import socket, sys
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9))
except PermissionError:
    sys.exit({REFUSED})
"""
"""Ends with REFUSED where the kernel does not let it send: unlike a connection, a datagram fails at once."""


def manager(active: Collection[str], ufw_settings: str) -> str | None:
    """The manager that filters. ufw is an active unit even where it is switched off.

    :param active: those of MANAGERS that systemd reports as active.
    :param ufw_settings: text of UFW_SETTINGS.
    """
    for name in MANAGERS:
        enabled = name != "ufw" or re.search(r"^ENABLED=[\"']?yes", ufw_settings, re.MULTILINE)
        if name in active and enabled:
            return name
    return None


def active_units(units: Collection[str], printed: str) -> set[str]:
    """The units that are active.

    :param printed: what ``systemctl is-active UNITS`` prints, a line for each.
    """
    return {name for name, state in zip(units, printed.split()) if state in ("active", "reloading")}


def of_host() -> str | None:
    """The manager that filters on this host."""
    try:
        printed = commands.run(["systemctl", "is-active", *MANAGERS], commands.COMMAND_SECONDS, may_fail=True)
    except commands.CommandError:
        return None
    return manager(active_units(MANAGERS, printed), text_of(Path(UFW_SETTINGS)))


def of_units(interpreter: str | None, run: Callable[[list[str], float], str] = commands.run) -> bool | None:
    """Whether IPAddressDeny of a unit takes effect here, or None where root or systemd-run is missing. Without BPF for control groups, as in
    many containers, systemd logs a warning and starts the unit all the same. So a unit tries; that takes 50 ms."""
    if interpreter is None:
        return None
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    unit = [
        "systemd-run",
        "--quiet",
        "--wait",
        "--collect",
        "--property=IPAddressDeny=any",
        f"--property=RuntimeMaxSec={TRY_SECONDS}",
    ]
    try:
        run([*root, *unit, interpreter, "-I", "-S", "-c", SEND], TRY_SECONDS)
    except commands.CommandError as error:
        return True if error.status == REFUSED else None
    return False
