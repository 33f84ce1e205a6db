# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the installation is on a host, and what runs its services there: all that changing a service needs to know of the host."""

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

FACTS_BYTES = 64 * 1024 * 1024
"""What is read at most of the facts of all hosts."""


class Place(NamedTuple):
    """Where a cluster is installed on a host, and what runs its services."""

    scope: str
    service_manager: str
    prefix: str
    cache: str
    units: str


def service_manager(scope: str, root: Path = ROOT, ask: Ask = output) -> str:
    """Name of the one that runs services of this scope here."""
    if scope == "user":
        commands.find_user_session()
    managers = ((name, service_managers.MANAGERS[name]) for name in service_managers.possible(platform.system(), scope))
    return next(
        (
            name
            for name, manager in managers
            if (root / manager.sign.lstrip("/")).exists() and (not manager.probe or ask(list(manager.probe)))
        ),
        "supervisor",
    )


def scope(wanted: str) -> str:
    """``auto`` becomes ``system`` where the connecting user is or may become root, else ``user``."""
    if wanted != "auto":
        return wanted
    may_become_root = os.geteuid() == 0 or (
        bool(shutil.which("sudo"))
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    )
    return "system" if may_become_root else "user"


def place_of(wanted_scope: str) -> Place:
    """The place of the installation here, whether it is there or not."""
    found_scope = scope(wanted_scope)
    manager = service_manager(found_scope)
    environment = {"HOME": pwd.getpwuid(os.getuid()).pw_dir, **os.environ}
    return Place(found_scope, manager, **names.places(found_scope, manager, environment))


def place_in(planned: object) -> Place:
    """The place that a host's part of a plan has."""
    return Place(*(getattr(planned, name) for name in Place._fields))


def supervisor_runs(prefix: str) -> bool:
    """Whether the installation's own supervisor runs. One that stands still takes no connection, and is not waited for. In a folder without our
    mark no program is run, so nothing counts there."""
    if not files.is_marked(Path(prefix)):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.setblocking(False)
        try:
            control.connect(prefix + "/supervisor/control.sock")
        except (PermissionError, BlockingIOError):
            return True
        except OSError:
            return False
    return True


def lingers(user: str) -> bool:
    """Whether services of a user go on without a login."""
    return os.path.exists("/var/lib/systemd/linger/" + user)


def problems(place: Place) -> list[str]:
    """Why the service manager itself cannot run services, a sentence each."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    if place.service_manager == "systemd_user" and not lingers(user):
        return [f"services of {user} end at logout"]
    if place.service_manager == "supervisor" and not supervisor_runs(place.prefix):
        return ["supervisor does not run"]
    return []


def not_at_boot(place: Place, services: Iterable[str]) -> set[str]:
    """Those that do not start at boot though the manager could start them."""
    manager = service_managers.MANAGERS[place.service_manager]
    links = manager.boot_links and os.path.join(place.units, manager.boot_links)
    return {name for name in services if links and not os.path.lexists(manager.definition(links, name))}


def is_own_definition(definition: Path) -> bool:
    """Whether this collection has written the definition of a service, and not somebody else under the same name."""
    if definition.is_symlink() or not definition.is_file():
        return False
    with definition.open(errors="replace") as stream:
        return names.DEFINITION_MARK in stream.read(1000)


def defined_services(manager: str, units: str) -> list[str]:
    """Names of services whose definition this collection has written."""
    services = []
    for path in Path(units).glob(f"{names.NAME}-*") if os.path.isdir(units) else []:
        service = service_managers.MANAGERS[manager].service(path)
        if service and names.SERVICE.fullmatch(service) and is_own_definition(path):
            services.append(service)
    return sorted(services)


def read_left(prefix: str, name: str) -> dict:
    """The JSON that the last run left in a file of an installation; empty where there is none."""
    try:
        return reading.read_object(Path(prefix, name), FACTS_BYTES)
    except (OSError, ValueError):
        return {}
