# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Properties of each service manager. The managers' commands are in host/services.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LINUX, MACOS = "Linux", "Darwin"


class ServiceManager(NamedTuple):
    system: str
    """Operating system, as platform.system() spells it."""
    folders: dict[str, str]
    """Folder of service definitions for each scope, with {prefix}, {config} and {home}."""
    template: str
    """Template of a definition in roles/llama_host/templates."""
    file_suffix: str
    """Suffix of a definition's file name after the service's name."""
    boot_folder: str = ""
    """Subfolder with a link to the definition of each service that starts at boot; empty if all services do."""
    mode: int = 0o600
    """Mode of a definition's file."""
    presence_path: str = "/"
    """Path that exists if the manager runs."""
    probe: tuple[str, ...] = ()
    """Command that prints something if the manager can run services; empty if ``presence_path`` is sufficient."""
    tools: tuple[str, ...] = ()
    """Required tools by their names in packages.yml."""
    port_filter: str = ""
    """Name of the feature that blocks a worker's port for all hosts except the head; empty if there is none."""
    passes_credentials: bool = False
    """Whether the manager can give a service access to a file that only root can read."""
    hides_homes: bool = False
    """Whether services have no access to /home and /root."""
    log: str = "{prefix}/state/{service}.log"
    """Path of a service's log, or the command that shows it."""
    host_settings: bool = False
    """Whether links, the firewall and kernel parameters can be configured on its hosts: this requires systemd and root."""

    def definition_path(self, unit_folder: str, service: str) -> Path:
        return Path(unit_folder) / (service + self.file_suffix)

    def service_of(self, path: Path) -> str | None:
        """Return the name of the service that a file defines; None for other files."""
        if not path.name.endswith(self.file_suffix) or not path.is_file():
            return None
        return path.name[: len(path.name) - len(self.file_suffix)]


MANAGERS = {
    "systemd": ServiceManager(
        system=LINUX,
        folders={"system": "/etc/systemd/system"},
        boot_folder="multi-user.target.wants",
        template="systemd.service.j2",
        file_suffix=".service",
        presence_path="/run/systemd/system",
        log="journalctl --unit={service}",
        port_filter="systemd's unit",
        passes_credentials=True,
        hides_homes=True,
        host_settings=True,
    ),
    "systemd_user": ServiceManager(
        system=LINUX,
        folders={"user": "{config}/systemd/user"},
        boot_folder="default.target.wants",
        template="systemd.service.j2",
        file_suffix=".service",
        presence_path="/run/systemd/system",
        probe=("systemctl", "--user", "show", "--property=Version"),
        log="journalctl --user --unit={service}",
    ),
    "launchd": ServiceManager(
        system=MACOS,
        folders={"system": "/Library/LaunchDaemons", "user": "{home}/Library/LaunchAgents"},
        template="launchd.plist.j2",
        file_suffix=".plist",
        mode=0o644,
    ),
    "supervisor": ServiceManager(
        system=LINUX,
        folders=dict.fromkeys(("system", "user"), "{prefix}/supervisor/services"),
        template="supervisor.conf.j2",
        file_suffix=".conf",
        tools=("venv",),
        log="{prefix}/supervisor/{service}.log",
    ),
}
"""Service managers in order of preference. supervisor comes last: the installation includes it."""


def usable_managers(system: str, scope: str) -> list[str]:
    """Return the names of the service managers that a host may have, in order of preference."""
    return [name for name, manager in MANAGERS.items() if manager.system == system and scope in manager.folders]


def folder(manager: str, scope: str, prefix: str, environment: Mapping[str, str]) -> str:
    """Return the folder of the manager's definitions.

    :param environment: environment of the connecting user, with ``HOME``.
    """
    home = environment["HOME"]
    config_folder = environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    return MANAGERS[manager].folders[scope].format(prefix=prefix, config=config_folder, home=home)
