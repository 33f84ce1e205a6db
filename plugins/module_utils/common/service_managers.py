# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is known of each service manager. Its commands are in host/services.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LINUX, MACOS = "Linux", "Darwin"


class ServiceManager(NamedTuple):
    """One service manager."""

    system: str
    """Operating system, as platform.system() names it."""
    folders: dict[str, str]
    """Scope in which it runs services → folder of their definitions, with {prefix}, {config} and {home}."""
    template: str
    """Of a definition, in roles/llama_host/templates."""
    ending: str
    """Of a definition's file name, after the service's name."""
    boot_links: str = ""
    """Folder below that one, with a link to each definition that is started at boot. Empty where all of them are."""
    mode: int = 0o600
    """Of a definition's file."""
    sign: str = "/"
    """Path that exists where it runs."""
    probe: tuple[str, ...] = ()
    """Command that prints something where services can be run; none where the path says enough."""
    tools: tuple[str, ...] = ()
    """What has to be installed for it, as packages.yml names tools."""
    closes_ports_by: str = ""
    """What of it closes a worker's port to all but the head, for a person. Empty where nothing does."""
    hands_over_keys: bool = False
    """Whether it gives a file of root's to one service."""
    hides_homes: bool = False
    """Whether services see neither /home nor /root."""
    log: str = "{prefix}/state/{service}.log"
    """Where a service's log is, or the command that shows it."""
    host_settings: bool = False
    """Whether links, firewall and kernel parameters can be set on its hosts: these modules drive systemd, as root."""

    def definition(self, units: str, service: str) -> Path:
        """Path of a service's definition."""
        return Path(units) / (service + self.ending)

    def service(self, path: Path) -> str | None:
        """Name of the service that a file in its folder defines, None for other files."""
        if not path.name.endswith(self.ending) or not path.is_file():
            return None
        return path.name[: len(path.name) - len(self.ending)]


MANAGERS = {
    "systemd": ServiceManager(
        system=LINUX,
        folders={"system": "/etc/systemd/system"},
        boot_links="multi-user.target.wants",
        template="systemd.service.j2",
        ending=".service",
        sign="/run/systemd/system",
        log="journalctl --unit={service}",
        closes_ports_by="systemd's unit",
        hands_over_keys=True,
        hides_homes=True,
        host_settings=True,
    ),
    "systemd_user": ServiceManager(
        system=LINUX,
        folders={"user": "{config}/systemd/user"},
        boot_links="default.target.wants",
        template="systemd.service.j2",
        ending=".service",
        sign="/run/systemd/system",
        probe=("systemctl", "--user", "show", "--property=Version"),
        log="journalctl --user --unit={service}",
    ),
    "launchd": ServiceManager(
        system=MACOS,
        folders={"system": "/Library/LaunchDaemons", "user": "{home}/Library/LaunchAgents"},
        template="launchd.plist.j2",
        ending=".plist",
        mode=0o644,
    ),
    "supervisor": ServiceManager(
        system=LINUX,
        folders=dict.fromkeys(("system", "user"), "{prefix}/supervisor/services"),
        template="supervisor.conf.j2",
        ending=".conf",
        tools=("venv",),
        log="{prefix}/supervisor/{service}.log",
    ),
}
"""The first one that a host has runs its services. supervisor comes last: the installation brings it along."""


def possible(system: str, scope: str) -> list[str]:
    """Names of the service managers that a host may have, the usual one first."""
    return [name for name, manager in MANAGERS.items() if manager.system == system and scope in manager.folders]


def folder(manager: str, scope: str, prefix: str, environment: Mapping[str, str]) -> str:
    """Where the manager looks for definitions.

    :param environment: of the connecting user, with ``HOME``.
    """
    home = environment["HOME"]
    config = environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    return MANAGERS[manager].folders[scope].format(prefix=prefix, config=config, home=home)
