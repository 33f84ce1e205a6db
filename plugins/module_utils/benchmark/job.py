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
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.place import Place
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services

SYSTEMD = ("systemd", "systemd_user")
MANAGERS = (*SYSTEMD, "supervisor")
"""By which a benchmark can be run: launchd starts whatever it finds at boot, this job too."""
VOLATILE = Path("/run/systemd/system")
"""Where definitions are that a reboot forgets."""
RUNNER, JOB = "runner.py", "job.json"
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


class Head(NamedTuple):
    """What a job needs of the head's part of the plan, or of its facts."""

    scope: str
    service_manager: str
    prefix: str
    cache: str
    units: str


class Job:
    """The job of a benchmark on the head."""

    def __init__(self, host: Head) -> None:
        """:raises Refusal: its service manager cannot run a benchmark."""
        if host.service_manager not in MANAGERS:
            raise Refusal(
                f"the head runs its services by {host.service_manager}, and a benchmark needs systemd or supervisor: use a head with one of them"
            )
        self._systemd = host.service_manager in SYSTEMD
        self._scope = "--user " if host.scope == "user" else ""
        runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
        volatile = Path(runtime, "systemd/user") if self._scope else VOLATILE
        place = Place(*host)
        self.serving = services.manager_of(place)
        self.measuring = services.manager_of(place._replace(units=str(volatile)) if self._systemd else place)
        self.server = names.SERVER
        self.name = names.service("benchmark")
        self._folder = Path(host.prefix, names.BENCHMARKS)

    def exists(self) -> bool:
        """Whether a benchmark has begun here, and nobody has ended it."""
        return self.measuring.path(self.name).exists()

    def runs(self) -> bool:
        return self.measuring.state([self.name])[self.name] == services.RUNNING

    def start(self, definition: str, runner: str, job: str) -> None:
        """Stops the server, and measures in its place.

        :param definition: of a service that runs the runner with the job, without what systemd adds.
        :param job: as the runner reads it.
        """
        self._folder.mkdir(mode=0o755, exist_ok=True)
        status = self._folder.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise Refusal(
                f"other accounts can write into {self._folder} on the head, where the program of a benchmark lies: give the folder to the account that "
                "runs the playbook, and take the right to write from all others"
            )
        files.replace_file(self._folder / RUNNER, runner, 0o644)
        files.replace_file(self._folder / JOB, job, 0o644)
        if self._systemd:
            definition += RETURN.format(server=self.server, scope=self._scope)
            self.measuring.path(self.name).parent.mkdir(parents=True, exist_ok=True)
        else:
            _apply(self.serving, stop=[self.server])
        service = services.Service(self.name, definition, at_boot=False)
        _apply(self.measuring, run=[service], restart=[self.name])

    def end(self) -> None:
        """Ends the job and has the server serve."""
        _apply(self.measuring, remove=[self.name])
        _apply(self.serving, start=[self.server])

    def cancel(self) -> None:
        """Ends the job, and leaves the server stopped where the job has stopped it: who asks for that decides what serves."""
        running = self.runs()
        _apply(self.measuring, remove=[self.name])
        if running:  # systemd is about to start the server
            self.serving.stop([self.server])


def _apply(manager: services.Manager, **wanted: Any) -> None:
    every: dict[str, Any] = {name: [] for name in services.Wanted._fields}
    services.apply(manager, services.Wanted(**{**every, **wanted}), check=False)


def cancel(host: Head, touched: Collection[str], check: bool) -> list[services.Change]:
    """Ends a benchmark on the head where the head's service is touched: at its end it would start the server, whoever stopped that.

    :param touched: services that are about to be stopped or started.
    """
    if host.service_manager not in MANAGERS or not any(map(names.is_head, touched)):
        return []
    job = Job(host)
    if job.server not in touched or not job.exists():
        return []
    before = job.measuring.state([job.name])[job.name]
    if not check:
        job.cancel()
    return [services.Change(job.name, before, services.STOPPED, "", "")]
