# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a host differs from its part of the plan, read on that host: from files, accounts and running processes."""

from __future__ import annotations

import grp
import itertools
import os
import pwd
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names, reading, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import interfaces, place
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import (
    kept_plans,
    kernel_parameters,
    start_records,
    tunnel_keys,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import manifest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import port_probes, processes
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall import rules as firewall_rules
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import configuration
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import words
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import model_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import kept_plan, retention
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import (
    DIFFERENT,
    FOREIGN,
    RUNNING,
    STOPPED,
    WAITING,
    Difference,
    Drift,
    Kind,
    ServiceState,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    AccountPlan,
    FilePlan,
    FolderPlan,
    HostPlan,
    ModelFilePlan,
    ServicePlan,
)


def served_fallback(service: ServicePlan, running: Mapping[int, list[str]]) -> tuple[str, int] | None:
    """The fallback of the head's service that is served, or loaded, now, and its process, which has exactly its command line."""
    found = ((one.name, pid) for one in service.fallbacks or () for pid in _as_told(one.process, running))
    return next(found, None)


def _as_told(argv: Sequence[str], running: Mapping[int, list[str]]) -> list[int]:
    told = words.command_line_of_build(argv)
    return [pid for pid, own in running.items() if own == told]


def service_state(service: ServicePlan, running: Mapping[int, list[str]], sockets: processes.Sockets) -> ServiceState:
    """How a planned service stands. One that runs as a planned fallback runs as planned.

    :param running: process → argv, of processes.of_account.
    """
    address, port = service.listens.rsplit(":", 1)
    served = served_fallback(service, running)
    programs = _as_told(service.process, running)
    programs += [served[1]] if served else []
    launchers = [pid for pid, argv in running.items() if argv == list(service.argv)]
    found = programs or launchers or processes.listening_at(int(port), running, sockets)
    if launchers:
        actual = processes.environment_of((programs or launchers)[0])
        same = actual is None or all(actual.get(name) == value for name, value in service.environment.items())
        state = (RUNNING if programs else WAITING) if same else DIFFERENT
    else:
        state = DIFFERENT if found else FOREIGN if processes.is_occupied(address, int(port)) else STOPPED
    return ServiceState(
        state=state,
        pid=found[0] if found else None,
        addresses=tuple(processes.listening_addresses(int(port), sockets)),
        clients=tuple(processes.clients(int(port), sockets)),
        fallback=served[0] if served else None,
    )


def taken_ports(services: Iterable[ServicePlan], states: Mapping[str, ServiceState]) -> str | None:
    """A sentence where something else has the port of a planned service, or None."""
    blocked = [service for service in services if states[service.name].state == FOREIGN]
    if not blocked:
        return None
    where = dict.fromkeys(names.PORT_VARIABLES[service.kind == "head"] for service in blocked)
    taken = " and ".join(f"{service.listens}, on which {service.name} is to listen" for service in blocked)
    return f"Something else already uses {taken}: stop it, or change {' and '.join(where)}."


def _accounts(planned: Iterable[AccountPlan]) -> Iterator[Difference]:
    for account in planned:
        try:
            pwd.getpwnam(account.name)
        except KeyError:
            yield Difference("account", account.name, f"account {account.name} is missing")
            continue
        missing = [group for group in account.groups if account.name not in _members(group)]
        if missing:
            yield Difference("account", account.name, f"account {account.name} is not in {', '.join(missing)}")


def _members(group: str) -> list[str]:
    """Nobody where there is no such group (any more)."""
    with suppress(KeyError):
        return grp.getgrnam(group).gr_mem
    return []


def _folders(planned: Iterable[FolderPlan]) -> Iterator[Difference]:
    for path, owner, mode in planned:
        try:
            status = os.stat(path)
        except OSError:
            yield Difference("folder", path, f"folder {path} is missing")
            continue
        actual, actual_owner = f"{stat.S_IMODE(status.st_mode):04o}", processes.owner_of(status.st_uid)
        if mode and mode != actual:
            yield Difference("folder", path, f"folder {path} has mode {actual}, planned {mode}")
        if owner and owner != actual_owner:
            yield Difference("folder", path, f"folder {path} belongs to {actual_owner}, planned {owner}")


def _is_same(file: FilePlan) -> bool:
    """Whether a file is there and has the planned content. Of the known-answer model size and time are compared."""
    path = Path(file.path)
    if not file.sha256:
        return model_files.is_known_answer(path, file.bytes)
    return path.is_file() and path.stat().st_size == file.bytes and sha256(path) == file.sha256


def _redefined(planned: HostPlan, states: Mapping[str, ServiceState]) -> list[str]:
    """Services whose definition is missing or different, or that run, and for which no run noted that it started them by this definition with the files
    which are there now."""
    found, manager = [], service_managers.MANAGERS[planned.service_manager]
    for service in planned.services:
        path = manager.definition(planned.units, service.name)
        same = path.is_file() and text_of(path) == service.definition
        known = start_records.has_read(planned.prefix, service.name, str(service.definition), service.reads)
        if not same or (states[service.name].pid and not known):
            found.append(service.name)
    return found


def _system(planned: HostPlan) -> Iterator[Difference]:
    if not service_managers.MANAGERS[planned.service_manager].host_settings:
        return
    system = System()
    manager = planned.firewall_manager or "a firewall that is not active"
    if firewall_rules.differs(planned.firewall_manager, planned.firewall, system):
        yield Difference("firewall", manager, f"rules of {manager} are not as planned")
    if configuration.differs(planned.links, system):
        yield Difference("link", "links", "links are not as planned")
    if kernel_parameters.differ(planned.tuning.parameters, system):
        yield Difference("tuning", "tuning", "kernel parameters are not as planned")


def running_releases(prefix: str, running: Mapping[int, list[str]]) -> list[str]:
    """Ids of the releases whose programs run."""
    folder = f"{prefix}/releases/"
    programs = (argv[0] for argv in running.values() if argv[0].startswith(folder))
    return sorted({program[len(folder) :].split("/")[0] for program in programs})


def unneeded_releases(planned: HostPlan) -> list[str]:
    """Return the releases that go: nothing that is planned, kept with a plan, being built or running."""
    folder = Path(planned.prefix) / "releases"
    entries = folder.iterdir() if folder.is_dir() else ()
    times = {entry.name: entry.stat().st_mtime for entry in entries if entry.is_dir()}
    planned_ids = {build.id for build in planned.builds}
    running = processes.of_account(planned.prefix, planned.account)
    used = {*planned_ids, *kept_plans.builds(planned.prefix), *running_releases(planned.prefix, running)}
    is_building = locks.is_held(Path(planned.cache, names.BUILDS_LOCK))
    unused = set() if is_building else {name for name in times if name.lstrip(".") not in used}
    return retention.unneeded_releases(planned_ids, times, unused)


def _each(kind: Kind, subjects: Iterable[str], text: str) -> Iterator[Difference]:
    """One difference for each subject, whose place in the text is {}."""
    return (Difference(kind, subject, text.format(subject)) for subject in subjects)


def _files(changed: Iterable[str]) -> Iterator[Difference]:
    """Those of one folder together, as the launcher's are."""
    for folder, paths in itertools.groupby(sorted(changed, key=os.path.dirname), os.path.dirname):
        path, *more = paths
        if more:
            yield Difference("file", folder, f"{1 + len(more)} files of {folder} are missing or have different content")
        else:
            yield Difference("file", path, f"{path} is missing or has different content")


def _installed(planned: HostPlan) -> dict[str, manifest.Manifest | None]:
    """Id of each planned build → its manifest; None where it is not installed, not intact or of another builder."""
    releases = Path(planned.prefix) / "releases"
    return {build.id: manifest.installed(releases / build.id, build.targets, build.builder) for build in planned.builds}


def model_differences(planned: Sequence[ModelFilePlan]) -> model_files.Differences:
    first = planned[0].path if planned else ""
    return reading.from_disk(first, lambda: model_files.differences(planned))


def _models(found: model_files.Differences) -> Iterator[Difference]:
    yield from _each("model", found.missing, "{} of the model is missing or has other content")
    yield from _each("model", found.unchecked, "{} of the model has not been checked, or was changed since")


def _record(identity: str | None, last: kept_plan.LastPlan | None) -> Iterator[Difference]:
    """:param identity: of the plan; None of one that is not kept."""
    if identity and not (last and last.served and last.id == identity):
        yield Difference("record", identity, f"plan {identity} is not the last one that served")


def drift(planned: HostPlan) -> Drift:
    """What differs on this host from its part of the plan."""
    running = processes.of_account(planned.prefix, planned.account)
    sockets = processes.sockets()
    services = {service.name: service_state(service, running, sockets) for service in planned.services}
    defined = place.defined_services(planned.service_manager, planned.units)
    here = place.place_in(planned)
    installed = _installed(planned)
    missing = [identity for identity, made in installed.items() if not made]
    unplanned = sorted(set(defined) - set(services))
    changed_files = [file.path for file in planned.files if not _is_same(file)]
    redefined = _redefined(planned, services)
    models = model_differences(planned.model)
    last = kept_plans.last(planned.prefix)
    keys = {path: tunnel_keys.identities(Path(path), planned.account) for path in planned.tunnel_keys or ()}
    return Drift(
        services=services,
        defined=tuple(defined),
        unplanned=tuple(unplanned),
        missing_builds=tuple(missing),
        running_releases=tuple(running_releases(planned.prefix, running)),
        changed_files=tuple(changed_files),
        changed_models=tuple(models.missing),
        redefined=tuple(redefined),
        port_probes=port_probes.probe(planned.port_probes, interfaces.addresses() if planned.port_probes else ()),
        last=last,
        differences=(
            *_accounts(planned.accounts),
            *_folders(planned.folders),
            *_each("release", missing, "release {} is not installed"),
            *_files(changed_files),
            *_models(models),
            *_each("definition", redefined, "{} is not defined as planned"),
            *_each("boot", sorted(place.not_at_boot(here, services)), "{} is not started at boot"),
            *(Difference("manager", planned.service_manager, text) for text in place.problems(here)),
            *_system(planned),
            *(
                Difference("service", name, f"{name} is {service.state}")
                for name, service in services.items()
                if service.state not in (RUNNING, WAITING)
            ),
            *_each("unplanned", unplanned, "{} is not planned any more"),
            *_each("unneeded", unneeded_releases(planned), "release {} is no longer needed"),
            *_record(planned.id, last),
            *_each("key", [path for path, own in keys.items() if not own], "{} has no key that nobody else can read"),
        ),
        archives={
            build.id: str(made.source.get("sha256"))
            for build in planned.builds
            if build.archives and (made := installed[build.id])
        },
        tunnel_keys=keys or None,
    )
