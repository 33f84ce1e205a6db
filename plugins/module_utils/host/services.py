# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Services under the host's service manager: one class for each manager, all with the same verbs.

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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.reading import read_end
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths

COMMAND_SECONDS = 120
"""Limit of a command. Definitions give a service 30 seconds to exit before it is killed."""
LOG_LINES, LOG_BYTES = 10, 1024 * 1024
RUNNING, FAILED, STOPPED = "running", "failed", "stopped"
"""States of a service. A failed service does not run, and the manager must stop it before it starts again."""


class Service(NamedTuple):
    """A planned service, as its manager needs it."""

    name: str
    definition: Annotated[str, Text(r"(?s).*", 1 << 20)]
    temporary: bool = False
    """Whether it does not start at boot."""
    reads: tuple[str, ...] = ()
    """Files that it reads when it starts."""


def _run(argv: list[str], may_fail: bool = False) -> str:
    return commands.run(argv, COMMAND_SECONDS, may_fail=may_fail)


class Manager:
    """Base of the managers. Methods take names of services, and do nothing without one."""

    def __init__(self, record: service_managers.ServiceManager, paths: InstallationPaths):
        self.record = record
        self.paths = paths

    def path(self, name: str) -> Path:
        return self.record.definition(self.paths.units, name)

    def state(self, services: Collection[str]) -> dict[str, str]:
        """Return RUNNING, FAILED or STOPPED for each service; an unknown one is STOPPED."""
        raise NotImplementedError

    def start(self, services: Collection[str]) -> None:
        """Make the manager read definitions, including those of a killed run, and start stopped services; ``define`` may have started them."""
        raise NotImplementedError

    def stop(self, services: Collection[str]) -> None:
        """Stop running or failed services, and return when they have ended."""
        raise NotImplementedError

    def define(self, services: Collection[Service]) -> None:
        """Write definitions, and make the manager start them at boot if that is planned."""
        for service in services:
            if not self.is_defined(service):
                self.path(service.name).parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path(service.name), service.definition, self.record.mode)

    def remove(self, services: Collection[str]) -> None:
        """Remove definitions of stopped services, and make the manager forget them."""
        for name in services:
            self.path(name).unlink(missing_ok=True)

    def log(self, service: str, line_count: int = LOG_LINES, form: str = "cat") -> str:
        """Return the end of a service's log, for a journal this number of lines in this form."""
        return read_end(Path(self.record.log.format(prefix=self.paths.prefix, service=service)), LOG_BYTES)

    def restarts(self, services: Collection[str]) -> dict[str, int]:
        """Return how often the manager has restarted each service since its last deliberate start, if the manager counts that."""
        return {}

    def is_defined(self, service: Service) -> bool:
        """Return whether the definition exists, word for word and with its mode."""
        path = self.path(service.name)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError:
            return False
        return mode == self.record.mode and path.read_text(errors="replace") == service.definition


class Systemd(Manager):
    """systemd, of the system or of a user."""

    def __init__(self, record: service_managers.ServiceManager, paths: InstallationPaths):
        super().__init__(record, paths)
        self.user = ["--user"] if paths.scope == "user" else []
        if self.user:
            commands.set_runtime_directory()

    def _systemctl(self, *words: str, may_fail: bool = False) -> str:
        return _run(["systemctl", *self.user, *words], may_fail)

    def _units(self, services: Iterable[str]) -> list[str]:
        return [self.path(name).name for name in services]

    def _show(self, services: Collection[str], key: str) -> dict[str, str]:
        """Return a property of each service. Services that systemd does not know are missing; all are missing without systemd."""
        if not services or not commands.find("systemctl"):
            return {}
        text = self._systemctl("show", f"--property=Id,{key}", *self._units(services))
        blocks = [
            dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")
        ]
        values = {block["Id"]: block.get(key, "") for block in blocks if "Id" in block}
        return {name: values[self.path(name).name] for name in services if self.path(name).name in values}

    def state(self, services: Collection[str]) -> dict[str, str]:
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
        at_boot = installation.disabled_services(
            self.paths, [service.name for service in services if not service.temporary]
        )
        if at_boot:
            self._systemctl("enable", "--quiet", *self._units(sorted(at_boot)))

    def remove(self, services: Collection[str]) -> None:
        at_boot = [name for name in services if name not in installation.disabled_services(self.paths, services)]
        if at_boot:
            self._systemctl("disable", "--quiet", *self._units(at_boot))
        super().remove(services)
        self._systemctl("daemon-reload")

    def log(self, service: str, line_count: int = LOG_LINES, form: str = "cat") -> str:
        options = ["--lines", str(line_count), f"--output={form}", "--no-pager"]
        return commands.output(["journalctl", *self.user, "--unit", self.path(service).name, *options])

    def restarts(self, services: Collection[str]) -> dict[str, int]:
        try:
            values = self._show(services, "NRestarts")
        except commands.CommandError:
            return {}
        return {name: count for name, value in values.items() if (count := parse_count(value)) is not None}


class Launchd(Manager):
    """launchd. A loaded service runs, and launchd loads the contents of its folder at boot or login."""

    gone_statuses = (3, 113)
    """Statuses of a service that is not loaded."""
    in_progress = 36
    """Status of a service that is still ending."""
    poll_seconds = 0.2

    def __init__(self, record: service_managers.ServiceManager, paths: InstallationPaths):
        super().__init__(record, paths)
        self.domain = "system" if paths.scope == "system" else f"gui/{os.geteuid()}"

    def state(self, services: Collection[str]) -> dict[str, str]:
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
                if error.status not in (*self.gone_statuses, self.in_progress):
                    raise
            self._wait_until_ended(name)

    def _wait_until_ended(self, name: str) -> None:
        """Wait for the end: launchctl returns earlier, and a service that is still ending cannot be loaded."""
        limit = time.monotonic() + COMMAND_SECONDS
        while self._is_loaded(name):
            if time.monotonic() > limit:
                raise commands.CommandError(["launchctl", "bootout", f"{self.domain}/{name}"], "it did not stop", None)
            time.sleep(self.poll_seconds)


SUPERVISOR_STATES = {"UNKNOWN": FAILED, **dict.fromkeys(("RUNNING", "STARTING", "BACKOFF", "STOPPING"), RUNNING)}
HARMLESS_ERRORS = {"start": re.compile("already started"), "stop": re.compile("not running|no such process")}
"""Verb of supervisorctl → errors that mean that there is nothing to do."""


class Supervisor(Manager):
    """supervisor of the installation itself, for hosts without another manager. It starts services when it reads them."""

    def _control(self, *words: str, may_fail: bool = False) -> str:
        if not self._runs():
            raise Refusal("supervisor, which manages this host's services, is not running: run site.yml to start it.")
        return _run(self.command(*words), may_fail)

    def command(self, *words: str) -> list[str]:
        python, settings = f"{self.paths.prefix}/venv/bin/python", f"{self.paths.prefix}/supervisor/supervisord.conf"
        return [python, "-m", "supervisor.supervisorctl", "-c", settings, *words]

    def _runs(self) -> bool:
        return installation.supervisor_runs(self.paths.prefix)

    def state(self, services: Collection[str]) -> dict[str, str]:
        # supervisorctl's status is not 0 unless all of them run.
        lines = self._control("status", may_fail=True).splitlines() if services and self._runs() else []
        words = [line.split() for line in lines]
        states = {word[0]: SUPERVISOR_STATES.get(word[1], STOPPED) for word in words if len(word) > 1}
        return {name: states.get(name, STOPPED) for name in services}

    def start(self, services: Collection[str]) -> None:
        self._control("update")
        self._control_each("start", services)

    def stop(self, services: Collection[str]) -> None:
        self._control_each("stop", services)

    def _control_each(self, verb: str, services: Collection[str]) -> None:
        try:
            self._control(verb, *services)
        except commands.CommandError as error:
            failures = [line for line in error.reason.splitlines() if "ERROR" in line]
            if not failures or not all(HARMLESS_ERRORS[verb].search(line) for line in failures):
                raise

    def remove(self, services: Collection[str]) -> None:
        super().remove(services)
        if self._runs():
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


SYSTEMD = ("systemd", "systemd_user")
VOLATILE_UNITS = Path("/run/systemd/system")
"""Folder of definitions that a reboot removes."""


def temporary_manager(paths: InstallationPaths) -> Manager:
    """Return the manager of temporary services. Under systemd their definitions lie in a folder that a reboot empties."""
    if paths.service_manager in SYSTEMD:
        runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
        folder = Path(runtime, "systemd/user") if paths.scope == "user" else VOLATILE_UNITS
        paths = paths._replace(units=str(folder))
    return manager_of(paths)


class ServiceRequest(NamedTuple):
    """Requested state of a host's services."""

    run: Sequence[Service] = ()
    """Services to define and run."""
    restart: Collection[str] = ()
    """Names of these that restart even if they run as defined."""
    start: Sequence[str] = ()
    """Defined services to run."""
    stop: Sequence[str] = ()
    """Services to stop; they stay defined."""
    remove: Sequence[str] = ()
    """Services to stop and remove."""


class Change(NamedTuple):
    """One service before and after; a text is its definition, empty without one."""

    service: str
    before: str
    after: str
    text_before: str
    text_after: str


def started_services(changes: Iterable[Change]) -> set[str]:
    return {change.service for change in changes if change.after.startswith(RUNNING) and change.after != change.before}


def _stop_order(services: Iterable[str]) -> list[list[str]]:
    """Return the head, then workers, each in this order; skip empty groups."""
    unique_services = list(dict.fromkeys(services))
    groups = [[name for name in unique_services if names.is_head(name) == is_head] for is_head in (True, False)]
    return [group for group in groups if group]


class ServiceSteps(NamedTuple):
    """Names of services for each step, in the order of the steps."""

    stop: list[str]
    remove: list[str]
    define: list[str]
    start: list[str]


def _steps(manager: Manager, request: ServiceRequest, states: dict[str, str]) -> ServiceSteps:
    run_names = [service.name for service in request.run]
    services_to_define = [service.name for service in request.run if not manager.is_defined(service)]
    restart = [name for name in run_names if name in services_to_define or name in request.restart]
    at_boot = [service.name for service in request.run if not service.temporary]
    definitions = {*restart, *installation.disabled_services(manager.paths, at_boot)}
    start = [name for name in dict.fromkeys([*run_names, *request.start]) if name in restart or states[name] != RUNNING]
    services_to_stop = [*request.stop, *request.remove, *restart, *start]
    return ServiceSteps(
        stop=[name for name in services_to_stop if states[name] != STOPPED],
        remove=[name for name in request.remove if manager.path(name).exists()],
        define=[name for name in run_names if name in definitions],
        start=start,
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
    changed_services = [*steps.define, *steps.start]
    for group in reversed(_stop_order(changed_services)):
        definitions = [service for service in request.run if service.name in group and service.name in steps.define]
        if definitions:
            manager.define(definitions)
        starting_services = [name for name in group if name in steps.start]
        if starting_services:
            manager.start(starting_services)


def apply_request(manager: Manager, request: ServiceRequest, check: bool) -> list[Change]:
    """Bring services to the requested state; return the changes, or in check mode the changes to make.

    :raises Refusal: with the last lines of the services' logs.
    """
    service_names = dict.fromkeys(
        [*(service.name for service in request.run), *request.start, *request.stop, *request.remove]
    )
    starting_services: list[str] = []
    try:
        states = manager.state(list(service_names))
        steps = _steps(manager, request, states)
        starting_services = steps.start
        changes = _changes(manager, request, states, steps)
        if not check:
            _carry_out(manager, request, steps)
    except commands.CommandError as error:
        logs = {name: "\n".join(manager.log(name).strip().splitlines()[-LOG_LINES:]) for name in starting_services}
        log_text = "".join(f"\nThe log of {name} ends with:\n{text}" for name, text in logs.items() if text)
        raise Refusal(f"{error}{log_text}") from error
    return changes
