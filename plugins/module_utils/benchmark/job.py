# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Service that measures on the head while its server is stopped.

Under systemd, its definition starts the server again however the job ends, without the controller, and is in a folder that a reboot empties. Supervisor
cannot do this: there, the server starts again when this run, or a later run, ends the job.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import FILE_PREFIX
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services

BENCHMARK_MANAGERS = (*services.SYSTEMD_MANAGERS, "supervisor")
"""Service managers that can run a benchmark; launchd would start the job again at boot."""
SERVICE_NAME = names.service_name("benchmark")
RESTART_SECTIONS = """
[Unit]
Conflicts={server}.service
After={server}.service
OnFailure={server}.service

[Service]
ExecStopPost=+/usr/bin/env systemctl {scope}--no-block start {server}.service
"""
"""Additions for systemd: the job stops the server and starts it again, and starting the server stops the job first. ExecStopPost does not run after
SIGKILL to the whole unit; OnFailure does."""


class BenchmarkJob:
    def __init__(self, paths: InstallationPaths) -> None:
        scope = "--user " if paths.scope == "user" else ""
        is_systemd = paths.service_manager in services.SYSTEMD_MANAGERS
        self._restart_sections = RESTART_SECTIONS.format(server=names.SERVER_SERVICE, scope=scope) if is_systemd else ""
        self._state_folder = Path(paths.prefix, "state")
        self._server_manager = services.manager_of(paths)
        self.job_manager = services.job_manager(paths)

    def exists(self) -> bool:
        """Return whether an unfinished benchmark exists on this host."""
        return self.job_manager.path(SERVICE_NAME).exists()

    def is_running(self) -> bool:
        return self.job_manager.states([SERVICE_NAME])[SERVICE_NAME] == services.RUNNING

    def start(self, definition: str) -> None:
        """Stop the server and measure.

        :param definition: definition of the benchmark's service, without RESTART_SECTIONS.
        """
        if not self._restart_sections:
            _apply(self._server_manager, stop=[names.SERVER_SERVICE])
        for old_file in self._state_folder.glob(f"{FILE_PREFIX}*"):
            with suppress(OSError):  # the services' account may have put anything there
                old_file.unlink()
        service = services.Service(SERVICE_NAME, definition + self._restart_sections, temporary=True)
        _apply(self.job_manager, run=[service], restart=[SERVICE_NAME])

    def end(self, restart_server: bool = True) -> None:
        """End the job.

        :param restart_server: whether to start the server; otherwise the caller decides.
        """
        was_running = self.is_running()
        _apply(self.job_manager, remove=[SERVICE_NAME])
        if restart_server:
            _apply(self._server_manager, start=[names.SERVER_SERVICE])
        elif was_running:  # systemd is about to start the server
            self._server_manager.stop([names.SERVER_SERVICE])


def _apply(manager: services.Manager, **request: Any) -> None:
    services.apply_request(manager, services.ServiceRequest(**request), check_mode=False)


def cancel_benchmark(
    paths: InstallationPaths, touched_services: Collection[str], check_mode: bool
) -> list[services.Change]:
    """End a benchmark whose server is about to be changed: otherwise it would start the server at its end, whoever stopped it.

    :param touched_services: services that are about to be stopped or started.
    """
    if paths.service_manager not in BENCHMARK_MANAGERS or names.SERVER_SERVICE not in touched_services:
        return []
    job = BenchmarkJob(paths)
    if not job.exists():
        return []
    state_before = job.job_manager.states([SERVICE_NAME])[SERVICE_NAME]
    if not check_mode:
        job.end(restart_server=False)
    return [services.Change(SERVICE_NAME, state_before, services.STOPPED, "", "")]
