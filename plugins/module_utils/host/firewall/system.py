# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and commands of the host by which a firewall is set up."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import firewall

COMMAND_SECONDS = 60


class FirewallError(Exception):
    """The message says what failed and what to do."""


class System:
    """The host's files and commands, and the names of the cluster whose rules are looked at. A command that fails raises FirewallError."""

    def __init__(self, root: str = "/", owner: names.Names = names.DEFAULT):
        self.root = Path(root)
        self.owner = owner
        self._active: set[str] | None = None

    @property
    def unit(self) -> str:
        """The unit that sets rules of nftables. It is not named like a service of the cluster, which would be stopped where it is not in the plan."""
        return f"firewall-{self.owner.root}.service"

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Content of a file, nothing if there is none."""
        try:
            return self.path(name).read_text()
        except FileNotFoundError:
            return ""

    def write(self, name: str, text: str) -> None:
        """Replaces a file in one step; everybody may read it."""
        replace_file(self.path(name), text, 0o644)

    def program(self, name: str) -> str | None:
        """Path of a program that is installed."""
        return commands.find(name)

    def run(self, argv: list[str], text: str = "", may_fail: bool = False) -> str:
        """What a command prints, given ``text``."""
        if not self.program(argv[0]):
            raise FirewallError(f"{argv[0]} is needed to set up the firewall and is missing: install it.")
        try:
            return commands.run(argv, COMMAND_SECONDS, text, may_fail)
        except commands.CommandError as error:
            raise FirewallError(f"{error}. Run it on the host as root, and fix what it names.") from error

    def active(self) -> set[str]:
        """Managers, and the cluster's unit, that systemd reports as active. Read once, until ``forget``."""
        if self._active is None:
            units = [*names.FIREWALLS, self.unit]
            # Its status says whether all of them are active.
            printed = self.run(["systemctl", "is-active", *units], may_fail=True) if self.program("systemctl") else ""
            self._active = firewall.active_units(units, printed)
        return self._active

    def forget(self) -> None:
        self._active = None
