# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Services under the host's service manager: one class for each manager, all with the same methods.

The head always stops before workers, and workers start before the head.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.reading import read_tail
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths

COMMAND_TIMEOUT_SECONDS = 120
"""Time limit for a command. Definitions give a service 30 seconds to exit before it is killed."""
MAX_LOG_LINES, MAX_LOG_BYTES = 10, 1024 * 1024
RUNNING, FAILED, STOPPED = "running", "failed", "stopped"
"""States of a service. A failed service does not run, and the manager must stop it before it starts again."""


class Service(NamedTuple):
    """Properties of a planned service that its manager needs."""

    name: str
    definition: Annotated[str, Text(r"(?s).*", 1 << 20)]
    temporary: bool = False
    """Whether it does not start at boot."""
    reads: tuple[str, ...] = ()
    """Files that it reads when it starts."""


def _run(argv: list[str], may_fail: bool = False) -> str:
    return commands.run(argv, COMMAND_TIMEOUT_SECONDS, may_fail=may_fail)


class Manager:
    """Base of the managers. Methods take names of services, and do nothing without one."""

    def __init__(self, spec: service_managers.ServiceManager, paths: InstallationPaths):
        self.spec = spec
        self.paths = paths

    def path(self, name: str) -> Path:
        return self.spec.definition_path(self.paths.units, name)

    def states(self, services: Collection[str]) -> dict[str, str]:
        """Return RUNNING, FAILED or STOPPED for each service; an unknown one is STOPPED."""
        raise NotImplementedError

    def start(self, services: Collection[str]) -> None:
        """Make the manager read definitions, including those of a killed run, and start stopped services; ``define`` may have started some of them."""
        raise NotImplementedError

    def stop(self, services: Collection[str]) -> None:
        """Stop running or failed services, and wait until they have exited."""
        raise NotImplementedError

    def define(self, services: Collection[Service]) -> None:
        """Write definitions, and make the manager start them at boot if that is planned."""
        for service in services:
            if not self.is_defined(service):
                self.path(service.name).parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path(service.name), service.definition, self.spec.mode)

    def remove(self, services: Collection[str]) -> None:
        """Remove definitions of stopped services, and make the manager forget them."""
        for name in services:
            self.path(name).unlink(missing_ok=True)

    def log(self, service: str, line_count: int = MAX_LOG_LINES, output_format: str = "cat") -> str:
        """Return the end of a service's log. Only a journal heeds the number of lines and their format."""
        return read_tail(Path(self.spec.log.format(prefix=self.paths.prefix, service=service)), MAX_LOG_BYTES)

    def restart_counts(self, services: Collection[str]) -> dict[str, int]:
        """Return how often the manager has restarted each service since its last deliberate start, if the manager counts that."""
        return {}

    def is_defined(self, service: Service) -> bool:
        """Return whether the definition exists with the planned content and mode."""
        path = self.path(service.name)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError:
            return False
        return mode == self.spec.mode and path.read_text(errors="replace") == service.definition


class Systemd(Manager):
    """systemd, of the system or of a user."""

    def __init__(self, spec: service_managers.ServiceManager, paths: InstallationPaths):
        super().__init__(spec, paths)
        self.scope_options = ["--user"] if paths.scope == "user" else []
        if self.scope_options:
            commands.set_runtime_directory()

    def _systemctl(self, *words: str, may_fail: bool = False) -> str:
        return _run(["systemctl", *self.scope_options, *words], may_fail)

    def _units(self, services: Iterable[str]) -> list[str]:
        return [self.path(name).name for name in services]

    def _show(self, services: Collection[str], key: str) -> dict[str, str]:
        """Return a property of each service. Services that systemd does not know are missing; all are missing without systemd."""
        if not services or not commands.find("systemctl"):
            return {}
        text = self._systemctl("show", f"--property=Id,{key}", *self._units(services))
        units = [dict(line.split("=", 1) for line in unit.splitlines() if "=" in line) for unit in text.split("\n\n")]
        values = {unit["Id"]: unit.get(key, "") for unit in units if "Id" in unit}
        return {name: values[self.path(name).name] for name in services if self.path(name).name in values}

    def states(self, services: Collection[str]) -> dict[str, str]:
        states = {"inactive": STOPPED, "failed": FAILED, "": STOPPED}
        values = self._show(services, "ActiveState")
        return {name: states.get(values.get(name, ""), RUNNING) for name in services}

    def start(self, services: Collection[str]) -> None:
        self._systemctl("daemon-reload")
        self._systemctl("start", *self._units(services))

    def stop(self, services: Collection[str]) -> None:
        self._systemctl("stop", *self._units(services))

    def define(self, services: Collection[Service]) -> None:
        super().define(services)
        disabled_names = installation.disabled_services(
            self.paths, [service.name for service in services if not service.temporary]
        )
        if disabled_names:
            self._systemctl("enable", "--quiet", *self._units(sorted(disabled_names)))

    def remove(self, services: Collection[str]) -> None:
        enabled_names = [name for name in services if name not in installation.disabled_services(self.paths, services)]
        if enabled_names:
            self._systemctl("disable", "--quiet", *self._units(enabled_names))
        super().remove(services)
        self._systemctl("daemon-reload")

    def log(self, service: str, line_count: int = MAX_LOG_LINES, output_format: str = "cat") -> str:
        options = ["--lines", str(line_count), f"--output={output_format}", "--no-pager"]
        return commands.output(["journalctl", *self.scope_options, "--unit", self.path(service).name, *options])

    def restart_counts(self, services: Collection[str]) -> dict[str, int]:
        try:
            values = self._show(services, "NRestarts")
        except commands.CommandError:
            return {}
        return {name: count for name, value in values.items() if (count := parse_count(value)) is not None}


class Launchd(Manager):
    """launchd. It runs every loaded service, and loads the definitions in its folder at boot or login."""

    not_loaded_statuses = (3, 113)
    """Exit statuses of launchctl for a service that is not loaded."""
    in_progress_status = 36
    """Exit status of launchctl for a service that is still stopping."""
    poll_seconds = 0.2

    def __init__(self, spec: service_managers.ServiceManager, paths: InstallationPaths):
        super().__init__(spec, paths)
        self.domain = "system" if paths.scope == "system" else f"gui/{os.geteuid()}"

    def states(self, services: Collection[str]) -> dict[str, str]:
        return {name: RUNNING if self._is_loaded(name) else STOPPED for name in services}

    def _is_loaded(self, name: str) -> bool:
        try:
            _run(["launchctl", "print", f"{self.domain}/{name}"])
        except commands.CommandError:
            return False
        return True

    def start(self, services: Collection[str]) -> None:
        for name in services:
            _run(["launchctl", "bootstrap", self.domain, str(self.path(name))])

    def stop(self, services: Collection[str]) -> None:
        for name in services:
            try:
                _run(["launchctl", "bootout", f"{self.domain}/{name}"])
            except commands.CommandError as error:
                if error.status not in (*self.not_loaded_statuses, self.in_progress_status):
                    raise
            self._wait_until_unloaded(name)

    def _wait_until_unloaded(self, name: str) -> None:
        """Wait until launchd has unloaded a service: launchctl returns earlier, and a service that is still stopping cannot be loaded."""
        deadline = time.monotonic() + COMMAND_TIMEOUT_SECONDS
        while self._is_loaded(name):
            if time.monotonic() > deadline:
                raise commands.CommandError(["launchctl", "bootout", f"{self.domain}/{name}"], "it did not stop", None)
            time.sleep(self.poll_seconds)


SUPERVISOR_STATES = {"UNKNOWN": FAILED, **dict.fromkeys(("RUNNING", "STARTING", "BACKOFF", "STOPPING"), RUNNING)}
HARMLESS_ERROR_PATTERNS = {"start": re.compile("already started"), "stop": re.compile("not running|no such process")}
"""Verb of supervisorctl → errors that mean that there is nothing to do."""


class Supervisor(Manager):
    """supervisor in the installation's own folder, for hosts without another manager. It starts services when it reads their definitions."""

    def _control(self, *words: str, may_fail: bool = False) -> str:
        if not self._is_running():
            raise Refusal("supervisor, which manages this host's services, is not running: run site.yml to start it.")
        return _run(self.command(*words), may_fail)

    def command(self, *words: str) -> list[str]:
        python, config_path = f"{self.paths.prefix}/venv/bin/python", f"{self.paths.prefix}/supervisor/supervisord.conf"
        return [python, "-m", "supervisor.supervisorctl", "-c", config_path, *words]

    def _is_running(self) -> bool:
        return installation.runs_supervisor(self.paths.prefix)

    def states(self, services: Collection[str]) -> dict[str, str]:
        # supervisorctl status exits with 0 only if all services run.
        lines = self._control("status", may_fail=True).splitlines() if services and self._is_running() else []
        rows = [line.split() for line in lines]
        states = {row[0]: SUPERVISOR_STATES.get(row[1], STOPPED) for row in rows if len(row) > 1}
        return {name: states.get(name, STOPPED) for name in services}

    def start(self, services: Collection[str]) -> None:
        self._control("update")
        self._control_services("start", services)

    def stop(self, services: Collection[str]) -> None:
        self._control_services("stop", services)

    def _control_services(self, verb: str, services: Collection[str]) -> None:
        try:
            self._control(verb, *services)
        except commands.CommandError as error:
            failures = [line for line in error.reason.splitlines() if "ERROR" in line]
            if not failures or not all(HARMLESS_ERROR_PATTERNS[verb].search(line) for line in failures):
                raise

    def remove(self, services: Collection[str]) -> None:
        super().remove(services)
        if self._is_running():
            self._control("update")


MANAGER_CLASSES: dict[str, type[Manager]] = {
    "systemd": Systemd,
    "systemd_user": Systemd,
    "launchd": Launchd,
    "supervisor": Supervisor,
}


def manager_of(paths: InstallationPaths) -> Manager:
    name = paths.service_manager
    if name not in MANAGER_CLASSES:
        raise Refusal(f"service_manager is {name}, which is unknown: use one of {', '.join(MANAGER_CLASSES)}.")
    return MANAGER_CLASSES[name](service_managers.MANAGERS[name], paths)


SYSTEMD_MANAGERS = ("systemd", "systemd_user")
VOLATILE_UNITS_FOLDER = Path("/run/systemd/system")
"""Folder of definitions that a reboot removes."""


def job_manager(paths: InstallationPaths) -> Manager:
    """Return the manager of temporary services. Under systemd, their definitions are in a folder that a reboot empties."""
    if paths.service_manager in SYSTEMD_MANAGERS:
        runtime_folder = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
        folder = Path(runtime_folder, "systemd/user") if paths.scope == "user" else VOLATILE_UNITS_FOLDER
        paths = paths._replace(units=str(folder))
    return manager_of(paths)


class ServiceRequest(NamedTuple):
    """Requested state of a host's services."""

    run: Sequence[Service] = ()
    """Services to define and run."""
    restart: Collection[str] = ()
    """Names of services in ``run`` that restart even if they already run as defined."""
    start: Sequence[str] = ()
    """Defined services to run."""
    stop: Sequence[str] = ()
    """Services to stop; they stay defined."""
    remove: Sequence[str] = ()
    """Services to stop and remove."""


class Change(NamedTuple):
    """States and definitions of a service before and after a request; the text of a missing definition is empty."""

    service: str
    before: str
    after: str
    text_before: str
    text_after: str


def started_services(changes: Iterable[Change]) -> set[str]:
    return {change.service for change in changes if change.after.startswith(RUNNING) and change.after != change.before}


def _stop_order(services: Iterable[str]) -> list[list[str]]:
    """Return groups of services in the order in which they stop: the head, then workers. Omit empty groups."""
    unique_services = list(dict.fromkeys(services))
    groups = [[name for name in unique_services if names.is_head_service(name) == is_head] for is_head in (True, False)]
    return [group for group in groups if group]


class ServiceSteps(NamedTuple):
    """Names of services for each step, in the order of the steps."""

    stop: list[str]
    remove: list[str]
    define: list[str]
    start: list[str]


def _plan_steps(manager: Manager, request: ServiceRequest, states: dict[str, str]) -> ServiceSteps:
    requested_names = [service.name for service in request.run]
    undefined_names = [service.name for service in request.run if not manager.is_defined(service)]
    restarts = [name for name in requested_names if name in undefined_names or name in request.restart]
    boot_names = [service.name for service in request.run if not service.temporary]
    names_to_define = {*restarts, *installation.disabled_services(manager.paths, boot_names)}
    names_to_run = dict.fromkeys([*requested_names, *request.start])
    names_to_start = [name for name in names_to_run if name in restarts or states[name] != RUNNING]
    return ServiceSteps(
        stop=[name for name in (*request.stop, *request.remove, *restarts, *names_to_start) if states[name] != STOPPED],
        remove=[name for name in request.remove if manager.path(name).exists()],
        define=[name for name in requested_names if name in names_to_define],
        start=names_to_start,
    )


def _changes(manager: Manager, request: ServiceRequest, states: dict[str, str], steps: ServiceSteps) -> list[Change]:
    texts = {service.name: service.definition for service in request.run}
    changes = []
    for name in [name for name in states if any(name in step for step in steps)]:
        current_text, state_after = text_of(manager.path(name)), states[name]
        if name in steps.start:
            state_after = f"{RUNNING}, restarted" if states[name] == RUNNING else RUNNING
        elif name in steps.stop or name in steps.remove:
            state_after = STOPPED
        text = "" if name in steps.remove else texts.get(name, current_text)
        changes.append(Change(name, states[name], state_after, current_text, text))
    return changes


def _carry_out(manager: Manager, request: ServiceRequest, steps: ServiceSteps) -> None:
    for group in _stop_order(steps.stop):
        manager.stop(group)
    if steps.remove:
        manager.remove(steps.remove)
    changed_names = [*steps.define, *steps.start]
    for group in reversed(_stop_order(changed_names)):
        services = [service for service in request.run if service.name in group and service.name in steps.define]
        if services:
            manager.define(services)
        names_to_start = [name for name in group if name in steps.start]
        if names_to_start:
            manager.start(names_to_start)


def apply_request(manager: Manager, request: ServiceRequest, check_mode: bool) -> list[Change]:
    """Bring services to the requested state; return the changes, or in check mode the changes to make.

    :raises Refusal: a command failed; the message contains the last lines of the services' logs.
    """
    service_names = dict.fromkeys(
        [*(service.name for service in request.run), *request.start, *request.stop, *request.remove]
    )
    names_to_start: list[str] = []
    try:
        states = manager.states(list(service_names))
        steps = _plan_steps(manager, request, states)
        names_to_start = steps.start
        changes = _changes(manager, request, states, steps)
        if not check_mode:
            _carry_out(manager, request, steps)
    except commands.CommandError as error:
        logs = {name: "\n".join(manager.log(name).strip().splitlines()[-MAX_LOG_LINES:]) for name in names_to_start}
        log_text = "".join(f"\nThe log of {name} ends with:\n{text}" for name, text in logs.items() if text)
        raise Refusal(f"{error}{log_text}") from error
    return changes
