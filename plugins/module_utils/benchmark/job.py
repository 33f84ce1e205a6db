# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The service that measures on the head in place of its server.

On systemd it brings the server back itself, however it ends: its definition says so, and lies where a reboot forgets it. Nothing of that needs the
controller. Supervisor knows no such thing, so there the server serves again when the run, or a later one, ends the job.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import FILES
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.place import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services

SYSTEMD = ("systemd", "systemd_user")
MANAGERS = (*SYSTEMD, "supervisor")
"""By which a benchmark can be run: launchd starts whatever it finds at boot, this job too."""
VOLATILE = Path("/run/systemd/system")
"""Where definitions are that a reboot forgets."""
NAME = names.service("benchmark")
RETURN = """
[Unit]
Conflicts={server}.service
After={server}.service
OnFailure={server}.service

[Service]
ExecStopPost=+/usr/bin/env systemctl {scope}--no-block start {server}.service
"""
"""What systemd adds: the job stops the server and brings it back, and whoever starts the server stops the job before. ExecStopPost does not run where
SIGKILL is sent to the whole unit; OnFailure does."""


class Job:
    """The job of a benchmark on the head."""

    def __init__(self, place: InstallationPaths) -> None:
        systemd = place.service_manager in SYSTEMD
        scope = "--user " if place.scope == "user" else ""
        runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
        volatile = Path(runtime, "systemd/user") if scope else VOLATILE
        self._return = RETURN.format(server=names.SERVER, scope=scope) if systemd else ""
        self._state = Path(place.prefix, "state")
        self._serving = services.manager_of(place)
        self.measuring = services.manager_of(place._replace(units=str(volatile)) if systemd else place)

    def exists(self) -> bool:
        """Whether a benchmark has begun here, and nobody has ended it."""
        return self.measuring.path(NAME).exists()

    def runs(self) -> bool:
        return self.measuring.state([NAME])[NAME] == services.RUNNING

    def start(self, definition: str) -> None:
        """Stops the server, and measures in its place.

        :param definition: of the service that measures, without what systemd adds.
        """
        if self._return:
            self.measuring.path(NAME).parent.mkdir(parents=True, exist_ok=True)
        else:
            _apply(self._serving, stop=[names.SERVER])
        for old in self._state.glob(f"{FILES}*"):
            with suppress(OSError):  # whatever the services' account put there
                old.unlink()
        service = services.Service(NAME, definition + self._return, temporary=True)
        _apply(self.measuring, run=[service], restart=[NAME])

    def end(self, serve: bool = True) -> None:
        """Ends the job.

        :param serve: whether the server serves then; else whoever asks for that decides.
        """
        running = self.runs()
        _apply(self.measuring, remove=[NAME])
        if serve:
            _apply(self._serving, start=[names.SERVER])
        elif running:  # systemd is about to start the server
            self._serving.stop([names.SERVER])


def _apply(manager: services.Manager, **wanted: Any) -> None:
    services.apply(manager, services.Wanted(**wanted), check=False)


def cancel(place: InstallationPaths, touched: Collection[str], check: bool) -> list[services.Change]:
    """Ends a benchmark on the head where the head's service is touched: at its end it would start the server, whoever stopped that.

    :param touched: services that are about to be stopped or started.
    """
    if place.service_manager not in MANAGERS or names.SERVER not in touched:
        return []
    job = Job(place)
    if not job.exists():
        return []
    before = job.measuring.state([NAME])[NAME]
    if not check:
        job.end(serve=False)
    return [services.Change(NAME, before, services.STOPPED, "", "")]
