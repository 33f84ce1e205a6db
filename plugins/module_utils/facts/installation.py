# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths of the installation on a host, and the service manager that runs its services."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    commands,
    files,
    names,
    reading,
    service_managers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output

MAX_JSON_BYTES = 64 * 1024 * 1024
"""Maximum size of a JSON file of the installation; that with the facts of all hosts is the largest."""


class InstallationPaths(NamedTuple):
    """Paths of the installation on a host, and its service manager."""

    scope: str
    service_manager: str
    prefix: str
    cache: str
    units: str


def detect_service_manager(scope: str, root: Path = ROOT, ask: Ask = output) -> str:
    if scope == "user":
        commands.set_runtime_directory()
    managers = (
        (name, service_managers.MANAGERS[name]) for name in service_managers.usable_managers(platform.system(), scope)
    )
    return next(
        (
            name
            for name, manager in managers
            if (root / manager.presence_path.lstrip("/")).exists() and (not manager.probe or ask(list(manager.probe)))
        ),
        "supervisor",
    )


def resolve_scope(requested_scope: str) -> str:
    """Return ``system`` for ``auto`` if the connecting user is root or may become root, otherwise ``user``."""
    if requested_scope != "auto":
        return requested_scope
    may_become_root = os.geteuid() == 0 or (
        bool(shutil.which("sudo"))
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    )
    return "system" if may_become_root else "user"


def detect_paths(requested_scope: str) -> InstallationPaths:
    """Return the paths of the installation on this host, even if it does not exist."""
    scope = resolve_scope(requested_scope)
    manager = detect_service_manager(scope)
    environment = {"HOME": pwd.getpwuid(os.getuid()).pw_dir, **os.environ}
    return InstallationPaths(scope, manager, **names.installation_folders(scope, manager, environment))


def planned_paths(host_plan: object) -> InstallationPaths:
    return InstallationPaths(*(getattr(host_plan, name) for name in InstallationPaths._fields))


def runs_supervisor(prefix: str) -> bool:
    """Return whether the installation's supervisor runs, without waiting if it hangs. A folder without our mark never counts."""
    if not files.is_marked(Path(prefix)):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control_socket:
        control_socket.setblocking(False)
        try:
            control_socket.connect(prefix + "/supervisor/control.sock")
        except (PermissionError, BlockingIOError):
            return True
        except OSError:
            return False
    return True


def is_lingering(user: str) -> bool:
    """Return whether the services of a user keep running after logout."""
    return os.path.exists("/var/lib/systemd/linger/" + user)


def manager_problems(paths: InstallationPaths) -> list[str]:
    """Return a sentence for each reason why the service manager cannot run services."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    if paths.service_manager == "systemd_user" and not is_lingering(user):
        return [f"services of {user} stop at logout, because lingering is disabled"]
    if paths.service_manager == "supervisor" and not runs_supervisor(paths.prefix):
        return ["supervisor is not running"]
    return []


def disabled_services(paths: InstallationPaths, service_names: Iterable[str]) -> set[str]:
    """Return the services that do not start at boot."""
    manager = service_managers.MANAGERS[paths.service_manager]
    folder = manager.boot_folder and os.path.join(paths.units, manager.boot_folder)
    return {name for name in service_names if folder and not os.path.lexists(manager.definition_path(folder, name))}


def is_own_definition(path: Path) -> bool:
    """Return whether this collection wrote the definition of a service."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open(errors="replace") as stream:
        return names.DEFINITION_MARK in stream.read(1000)


def defined_services(manager: str, unit_folder: str) -> list[str]:
    """Return the names of services whose definition this collection wrote."""
    services = []
    for path in Path(unit_folder).glob(f"{names.PREFIX}-*") if os.path.isdir(unit_folder) else []:
        service = service_managers.MANAGERS[manager].service_of(path)
        if service and names.SERVICE_PATTERN.fullmatch(service) and is_own_definition(path):
            services.append(service)
    return sorted(services)


def read_json(prefix: str, name: str) -> dict:
    """Return the JSON object in a file of the installation; empty if it cannot be read."""
    try:
        return reading.read_object(Path(prefix, name), MAX_JSON_BYTES)
    except (OSError, ValueError):
        return {}
