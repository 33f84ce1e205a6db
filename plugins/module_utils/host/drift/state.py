# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Differences between a host and its part of the plan, determined on that host."""

from __future__ import annotations

import grp
import itertools
import os
import pwd
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import is_locked, sha256, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation, interfaces
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import drift, host_types, kept_plan, retention


def served_fallback(service: host_types.ServicePlan, argv_by_pid: Mapping[int, list[str]]) -> tuple[str, int] | None:
    """Return the name and the process id of the fallback that the head serves."""
    pairs = ((plan.name, pid) for plan in service.fallbacks or () for pid in _find_pids(plan.process, argv_by_pid))
    return next(pairs, None)


def _find_pids(argv: Sequence[str], argv_by_pid: Mapping[int, list[str]]) -> list[int]:
    expected_argv = words.adapt_argv(argv)
    return [pid for pid, process_argv in argv_by_pid.items() if process_argv == expected_argv]


def service_state(
    service: host_types.ServicePlan, argv_by_pid: Mapping[int, list[str]], sockets: processes.Sockets
) -> drift.ServiceState:
    """Return the state of a planned service. A service that serves a planned fallback is as planned.

    :param argv_by_pid: process id → argv, from processes.account_processes.
    """
    address, port = service.listens.rsplit(":", 1)
    fallback = served_fallback(service, argv_by_pid)
    program_pids = _find_pids(service.process, argv_by_pid)
    program_pids += [fallback[1]] if fallback else []
    launcher_pids = [pid for pid, argv in argv_by_pid.items() if argv == list(service.argv)]
    pids = program_pids or launcher_pids or processes.listener_pids(int(port), argv_by_pid, sockets)
    if launcher_pids:
        environment = processes.environment_of((program_pids or launcher_pids)[0])
        is_as_planned = environment is None or all(
            environment.get(name) == value for name, value in service.environment.items()
        )
        state = (drift.RUNNING if program_pids else drift.WAITING) if is_as_planned else drift.DIFFERENT
    else:
        state = (
            drift.DIFFERENT if pids else drift.FOREIGN if processes.is_occupied(address, int(port)) else drift.STOPPED
        )
    return drift.ServiceState(
        state=state,
        pid=pids[0] if pids else None,
        addresses=tuple(processes.listening_addresses(int(port), sockets)),
        clients=tuple(processes.client_addresses(int(port), sockets)),
        fallback=fallback[0] if fallback else None,
    )


def port_problem(services: Iterable[host_types.ServicePlan], states: Mapping[str, drift.ServiceState]) -> str | None:
    """Return a sentence about planned ports that other programs use; None without such ports."""
    blocked_services = [service for service in services if states[service.name].state == drift.FOREIGN]
    if not blocked_services:
        return None
    variables = dict.fromkeys(names.PORT_SETTINGS[service.kind == "head"] for service in blocked_services)
    conflicts = " and ".join(f"{service.listens}, the port for {service.name}" for service in blocked_services)
    return f"Another program already uses {conflicts}: stop that program, or change {' and '.join(variables)}."


def _account_differences(accounts: Iterable[host_types.AccountPlan]) -> Iterator[drift.Difference]:
    for account in accounts:
        try:
            pwd.getpwnam(account.name)
        except KeyError:
            yield drift.Difference("account", account.name, f"account {account.name} is missing")
            continue
        missing_groups = [group for group in account.groups if account.name not in _group_members(group)]
        if missing_groups:
            yield drift.Difference(
                "account", account.name, f"account {account.name} is not in group {' or '.join(missing_groups)}"
            )


def _group_members(group: str) -> list[str]:
    with suppress(KeyError):
        return grp.getgrnam(group).gr_mem
    return []


def _folder_differences(folders: Iterable[host_types.FolderPlan]) -> Iterator[drift.Difference]:
    for path, owner, mode in folders:
        try:
            status = os.stat(path)
        except OSError:
            yield drift.Difference("folder", path, f"folder {path} is missing")
            continue
        actual_mode, actual_owner = f"{stat.S_IMODE(status.st_mode):04o}", processes.account_of(status.st_uid)
        if mode and mode != actual_mode:
            yield drift.Difference("folder", path, f"folder {path} has mode {actual_mode}, planned: {mode}")
        if owner and owner != actual_owner:
            yield drift.Difference("folder", path, f"folder {path} belongs to {actual_owner}, planned: {owner}")


def _is_unchanged(file: host_types.FilePlan) -> bool:
    """Return whether a file exists with the planned content. For the known-answer model, compare size and time."""
    path = Path(file.path)
    if not file.sha256:
        return model_files.is_known_answer(path, file.bytes)
    return path.is_file() and path.stat().st_size == file.bytes and sha256(path) == file.sha256


def _outdated_services(plan: host_types.HostPlan, states: Mapping[str, drift.ServiceState]) -> list[str]:
    """Return services whose definition is missing or different, or that started with another definition or other files."""
    outdated_services, manager = [], service_managers.MANAGERS[plan.service_manager]
    for service in plan.services:
        path = manager.definition_path(plan.units, service.name)
        is_defined = path.is_file() and text_of(path) == service.definition
        is_current = start_records.is_current(plan.prefix, service.name, str(service.definition), service.reads)
        if not is_defined or (states[service.name].pid and not is_current):
            outdated_services.append(service.name)
    return outdated_services


def _system_differences(plan: host_types.HostPlan) -> Iterator[drift.Difference]:
    if not service_managers.MANAGERS[plan.service_manager].host_settings:
        return
    system = System()
    manager = plan.firewall_manager
    if manager and firewall_rules.has_differences(manager, plan.firewall, system):
        yield drift.Difference("firewall", manager, f"rules of {manager} do not match the plan")
    if configuration.has_changes(plan.links, system):
        yield drift.Difference("link", "links", "links do not match the plan")
    if kernel_parameters.has_changes(plan.tuning.parameters, system):
        yield drift.Difference("tuning", "tuning", "kernel parameters do not match the plan")


def running_build_ids(prefix: str, argv_by_pid: Mapping[int, list[str]]) -> list[str]:
    folder = f"{prefix}/releases/"
    programs = (argv[0] for argv in argv_by_pid.values() if argv[0].startswith(folder))
    return sorted({program[len(folder) :].split("/")[0] for program in programs})


def unneeded_releases(plan: host_types.HostPlan) -> list[str]:
    """Return the releases to remove. Releases that are planned, in a kept plan or running stay, and all stay during a build."""
    folder = Path(plan.prefix) / "releases"
    entries = folder.iterdir() if folder.is_dir() else ()
    mtimes = {entry.name: entry.stat().st_mtime for entry in entries if entry.is_dir()}
    planned_ids = {build.id for build in plan.builds}
    argv_by_pid = processes.account_processes(plan.prefix, plan.account)
    used_ids = {*planned_ids, *kept_plans.kept_build_ids(plan.prefix), *running_build_ids(plan.prefix, argv_by_pid)}
    is_building = is_locked(Path(plan.cache, names.BUILDS_LOCK_FILE))
    unused_releases = set() if is_building else {name for name in mtimes if name.lstrip(".") not in used_ids}
    return retention.unneeded_releases(planned_ids, mtimes, unused_releases)


def _differences(kind: drift.DifferenceKind, subjects: Iterable[str], template: str) -> Iterator[drift.Difference]:
    """Yield a difference for each subject, which replaces {} in the text."""
    return (drift.Difference(kind, subject, template.format(subject)) for subject in subjects)


def _file_differences(changed_paths: Iterable[str]) -> Iterator[drift.Difference]:
    """Yield a difference for the changed files of each folder."""
    for folder, paths in itertools.groupby(sorted(changed_paths, key=os.path.dirname), os.path.dirname):
        path, *other_paths = paths
        if other_paths:
            yield drift.Difference(
                "file", folder, f"{1 + len(other_paths)} files in {folder} are missing or have different content"
            )
        else:
            yield drift.Difference("file", path, f"{path} is missing or has different content")


def _manifests_of(plan: host_types.HostPlan) -> dict[str, manifest.Manifest | None]:
    """Return manifests of planned builds; None if missing, damaged or untrusted."""
    releases_folder = Path(plan.prefix) / "releases"
    return {
        build.id: manifest.installed_manifest(releases_folder / build.id, build.targets, build.trusted_builders)
        for build in plan.builds
    }


def _model_differences(differences: model_files.Differences) -> Iterator[drift.Difference]:
    yield from _differences("model", differences.missing_files, "model file {} is missing or has different content")
    yield from _differences(
        "model", differences.unchecked_files, "model file {} has not been checked, or has changed since its check"
    )


def _record_difference(plan_id: str | None, last_plan: kept_plan.LastPlan | None) -> Iterator[drift.Difference]:
    """:param plan_id: id of the plan; None for a plan that is not kept."""
    if plan_id and not (last_plan and last_plan.served and last_plan.id == plan_id):
        yield drift.Difference("record", plan_id, f"plan {plan_id} is not the last plan that served")


def compare_host(plan: host_types.HostPlan) -> drift.Drift:
    """Return how this host differs from its part of the plan."""
    argv_by_pid = processes.account_processes(plan.prefix, plan.account)
    sockets = processes.read_sockets()
    states = {service.name: service_state(service, argv_by_pid, sockets) for service in plan.services}
    defined_services = installation.defined_services(plan.service_manager, plan.units)
    paths = installation.planned_paths(plan)
    manifests = _manifests_of(plan)
    missing_builds = [build_id for build_id, record in manifests.items() if not record]
    unplanned_services = sorted(set(defined_services) - set(states))
    changed_files = [file.path for file in plan.files if not _is_unchanged(file)]
    outdated_services = _outdated_services(plan, states)
    model_path = plan.model[0].path if plan.model else ""
    model_differences = reading.run_disk_work(model_path, lambda: model_files.differences(plan.model))
    last_plan = kept_plans.last_plan(plan.prefix)
    key_ids = {path: tunnel_keys.identities(Path(path), plan.account) for path in plan.tunnel_keys or ()}
    return drift.Drift(
        services=states,
        defined=tuple(defined_services),
        unplanned=tuple(unplanned_services),
        missing_builds=tuple(missing_builds),
        running_build_ids=tuple(running_build_ids(plan.prefix, argv_by_pid)),
        changed_files=tuple(changed_files),
        model_files=tuple(model_differences.missing_files),
        redefined=tuple(outdated_services),
        port_probes=port_probes.probe_endpoints(plan.port_probes, interfaces.addresses() if plan.port_probes else ()),
        last=last_plan,
        differences=(
            *_account_differences(plan.accounts),
            *_folder_differences(plan.folders),
            *_differences("release", missing_builds, "release {} is not installed"),
            *_file_differences(changed_files),
            *_model_differences(model_differences),
            *_differences("definition", outdated_services, "definition of {} does not match the plan"),
            *_differences("boot", sorted(installation.disabled_services(paths, states)), "{} does not start at boot"),
            *(drift.Difference("manager", plan.service_manager, text) for text in installation.manager_problems(paths)),
            *_system_differences(plan),
            *(
                drift.Difference("service", name, f"{name} is {drift.STATE_TEXTS.get(service.state, service.state)}")
                for name, service in states.items()
                if service.state not in (drift.RUNNING, drift.WAITING)
            ),
            *_differences("unplanned", unplanned_services, "{} is no longer planned"),
            *_differences("unneeded", unneeded_releases(plan), "release {} is no longer needed"),
            *_record_difference(plan.id, last_plan),
            *_differences(
                "key",
                [path for path, ids in key_ids.items() if not ids],
                "{} has no valid key, or a wrong owner or mode",
            ),
        ),
        archives={
            build.id: str(record.source.get("sha256"))
            for build in plan.builds
            if build.archives and (record := manifests[build.id])
        },
        tunnel_keys=key_ids or None,
    )
