# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes that site.yml makes, from a plan and the hosts' reports: which builds, and which services restart."""

import posixpath
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import DifferenceKind, Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import BuildPlan, HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request

MAX_ERROR_LENGTH = 500
"""Maximum length of a host's error in a message."""


class HostReport(NamedTuple):
    """Report of a host on itself, compared with its part of the plan."""

    drift: Optional[Drift] = None
    reason: str = ""
    """Reason why the host was not compared, or why its drift cannot be used; otherwise empty."""


def parse_answers(hosts: Mapping[str, HostPlan], answers: Mapping[str, Any]) -> dict[str, HostReport]:
    """Return the reports of hosts that were compared with their parts of the plan."""
    return {name: _parse_answer(name, host, answers.get(name) or {}) for name, host in hosts.items()}


def _parse_answer(name: str, host: HostPlan, answer: Any) -> HostReport:
    data = {"drift": answer.get("drift") or None} if isinstance(answer, Mapping) else answer
    report = typed_json.parse_report(name, "itself", HostReport, data)
    if report.drift:
        check_service_states(name, host, report.drift)
    if answer.get("skipped"):
        return report._replace(reason="it is only declared in llama_hardware")
    if report.drift and not answer.get("msg"):
        return report
    reason = " ".join(str(answer.get("msg") or "it could not be reached").split())
    return report._replace(reason=validation.printable(reason)[:MAX_ERROR_LENGTH])


def check_service_states(name: str, host: HostPlan, drift: Drift) -> None:
    """Check that a host reports the states of all planned services.

    :raises Refusal: the state of a planned service is missing.
    """
    missing_service = next((service.name for service in host.services if service.name not in drift.services), None)
    if missing_service:
        raise typed_json.refusal_of_report(name, "itself", f"drift.services.{missing_service} is missing")


def comparable_drifts(answers: Mapping[str, HostReport]) -> dict[str, Drift]:
    """Return the drift of each host that was compared with the plan."""
    return {name: answer.drift for name, answer in answers.items() if answer.drift and not answer.reason}


class Decision(NamedTuple):
    """Actions of site.yml. The module plan_diff documents each field."""

    kinds: Mapping[str, Sequence[DifferenceKind]]
    restarts: Mapping[str, list[str]]
    outdated_hosts: list[str]
    unreached_hosts: list[str]
    absence_notes: Mapping[str, str]
    builders: list[str]
    builder_by_build: Mapping[str, str]
    builds_to_fetch: list[BuildPlan]
    hosts_without_key: list[str]


def decide(plan: Plan, drifts: Mapping[str, Drift]) -> Decision:
    """Return the actions of site.yml.

    :raises Refusal: the programs of a host come from an archive whose checksum differs from the operator's.
    """
    _check_archives(plan, drifts)
    kinds = {name: sorted({difference.kind for difference in drift.differences}) for name, drift in drifts.items()}
    restarts = _restarts(plan, drifts)
    builders, builder_by_build = _builders(plan, drifts)
    hosts_without_key = _hosts_without_key(plan, drifts)
    rekeyed_hosts = {*hosts_without_key, *([plan.head.host] if hosts_without_key else [])}
    return Decision(
        kinds=kinds,
        restarts=restarts,
        outdated_hosts=sorted(
            name
            for name in drifts
            if kinds[name] or restarts[name] or name in builder_by_build.values() or name in rekeyed_hosts
        ),
        unreached_hosts=sorted(set(plan.hosts) - set(drifts)),
        absence_notes={name: absence_note(plan, name) for name in plan.hosts},
        builders=builders,
        builder_by_build=builder_by_build,
        builds_to_fetch=_builds_to_fetch(plan, drifts),
        hosts_without_key=hosts_without_key,
    )


def _hosts_without_key(plan: Plan, drifts: Mapping[str, Drift]) -> list[str]:
    """Return `hosts_without_key` of Decision. A tunnel's key files have the same name at both ends, and the head uses its first key."""
    head_drift = drifts.get(plan.head.host)
    head_keys = {
        posixpath.basename(path): keys[:1] for path, keys in ((head_drift and head_drift.tunnel_keys) or {}).items()
    }
    return sorted(
        name
        for name, drift in drifts.items()
        for path, accepted_keys in (drift.tunnel_keys or {}).items()
        if head_drift and name != plan.head.host
        if not set(head_keys.get(posixpath.basename(path), ())).intersection(accepted_keys)
    )


def retired_group(cluster: str) -> str:
    """Return the name of the group for retired hosts of a cluster."""
    return "llama_retired" + f"_{cluster}" * (cluster != names.DEFAULT_CLUSTER_GROUP)


def check_parts(cluster: str, decision: Decision, parts: Collection[str]) -> None:
    """Check that all parts of the run can be carried out.

    :param parts: parts that the run carries out: ``build``, ``services`` or both.
    :raises Refusal: a host is absent while others would change, or services would change before their requirements are installed.
    """
    unreached_names, outdated_names = ", ".join(decision.unreached_hosts), ", ".join(decision.outdated_hosts)
    if parts and unreached_names and outdated_names:
        raise Refusal(
            f"These hosts were not reached, or failed above: {unreached_names}. The plan changes {outdated_names} only together with them, so no service was "
            "touched. Fix the failure (if sudo failed, use --ask-become-pass) or start the host, then run the playbook again. If a host does not come back, "
            f"move it to the group {retired_group(cluster)}"
        )
    for name, kinds in decision.kinds.items() if [*parts] == ["services"] else ():
        if kinds_text := ", ".join(kind for kind in kinds if kind in ("account", "folder", "model", "release")):
            raise Refusal(
                f"{name} needs the changes of --tags build ({kinds_text}) before its services can change: run the playbook with --tags "
                "build,services, or without --tags and --skip-tags. No service was touched"
            )


def tolerated_absences(plan: Plan) -> dict[str, bool]:
    """Return the hosts without which the cluster can serve, and for each whether the head then serves on a fallback."""
    fallback_names = {fallback.without for fallback in plan.fallbacks} if plan.head.fallback_after is not None else ()
    keys = {name: _fallback_key(plan, name) for name in plan.hosts if name != plan.head.host}
    return {name: bool(key) for name, key in keys.items() if not key or key in fallback_names}


def _fallback_key(plan: Plan, name: str) -> str:
    """Return ``without`` of the fallback for the absence of a host; empty if the cluster does not use the host."""
    workers = [worker for worker in plan.hosts[name].workers if worker.used]
    return f"{name}:{workers[0].name}" if len(workers) == 1 else name if workers else ""


def absence_note(plan: Plan, name: str) -> str:
    """Return a sentence about how the cluster serves while a host of the plan is absent."""
    if name == plan.head.host:
        return "The cluster does not answer until this head is back."
    has_fallback = tolerated_absences(plan).get(name)
    if has_fallback is None and plan.head.models:
        models = [model.name for model in plan.head.models if name in {device.host for device in model.placement}]
        return f"Requests for {', '.join(models)} fail until this host is back."
    if has_fallback is None:
        return "The head does not answer until this host is back: no fallback is planned for its absence (llama_server_fallback)."
    if has_fallback:
        return f"After a wait (llama_server_fallback_after), the head serves without {_fallback_key(plan, name)} until this host is back."
    return "The cluster does not use this host."


def missing_tools(
    plan: Plan, tools: Mapping[str, Collection[str]], builders: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the missing tools of each host, ``required`` and ``optional``: tool → package. Only hosts that compile now need optional tools."""

    def find_missing(packages: Mapping[str, str], installed_tools: Collection[str]) -> dict[str, str]:
        return {tool: package for tool, package in packages.items() if tool not in installed_tools}

    missing_packages = {
        name: {
            "required": find_missing(plan.hosts[name].tools, installed_tools),
            "optional": find_missing(plan.hosts[name].optional_tools, installed_tools) if name in builders else {},
        }
        for name, installed_tools in tools.items()
    }
    return {name: packages for name, packages in missing_packages.items() if any(packages.values())}


def _check_archives(plan: Plan, drifts: Mapping[str, Drift]) -> None:
    """Refuse a checksum that differs from the installed archive's: a build's id does not depend on the checksum."""
    for name, drift in drifts.items():
        for build in plan.hosts[name].builds:
            archive, installed_checksum = (build.archives or ("",))[0], drift.archives.get(build.id)
            checksum = (plan.releases[build.release].checksums or {}).get(archive, "")
            if installed_checksum and checksum not in ("", f"sha256:{installed_checksum}"):
                raise Refusal(
                    f"llama_release expects {checksum} for {archive}, but the programs on {name} come from sha256:{installed_checksum}: correct the "
                    f"checksum; if the checksum is right, remove {plan.hosts[name].prefix}/releases/{build.id} on that host and run the playbook again. "
                    "No running service was touched"
                )


def _builders(plan: Plan, drifts: Mapping[str, Drift]) -> tuple[list[str], dict[str, str]]:
    """Return `builders` and `builder_by_build` of Decision. The plan names the builder; the hosts' reports only decide which builds are missing."""
    builders = set()
    builder_by_build: dict[str, str] = {}
    for name, drift in drifts.items():
        for build in plan.hosts[name].builds:
            source = plan.releases[build.release].source
            if build.id not in drift.missing_builds or source == "package":
                continue
            if build.builder != name:
                builder_by_build[build.id] = build.builder
            elif source in release_request.COMPILED_SOURCES:
                builders.add(name)
    return sorted(builders), builder_by_build


def _builds_to_fetch(plan: Plan, drifts: Mapping[str, Drift]) -> list[BuildPlan]:
    """Return `builds_to_fetch` of Decision. A package manager fetches the programs of a distribution's package itself."""
    builds: dict[tuple[str, ...], BuildPlan] = {}
    for name, drift in drifts.items():
        for build in plan.hosts[name].builds:
            if build.id in drift.missing_builds and build.builder == name and not build.packaged:
                key = (build.release, *(build.archives or ()))
                targets = {*build.targets, *(builds[key].targets if key in builds else ())}
                ui = build.ui or (builds[key].ui if key in builds else None)
                builds[key] = build._replace(targets=tuple(sorted(targets)), ui=ui)
    return [*builds.values()]


def _restarts(plan: Plan, drifts: Mapping[str, Drift]) -> dict[str, list[str]]:
    """Return the services that do not run as planned, and the head if its model or a used worker changes, because llama-server does not
    reconnect. If a used worker is no longer planned, the head's command line changes."""
    restarts = {
        name: [
            service.name
            for service in plan.hosts[name].services
            if drift.services[service.name].state not in ("running", "waiting")
            or service.name in drift.redefined
            or any(f"/releases/{build_id}/" in service.process[0] for build_id in drift.missing_builds)
        ]
        for name, drift in drifts.items()
    }
    worker_services = {
        name: {names.service_name(f"worker-{worker.name}") for worker in plan.hosts[name].workers if worker.used}
        for name in drifts
    }
    head = plan.head
    head_drift = drifts.get(head.host)
    paths = {path for service in plan.hosts[head.host].services if service.kind == "head" for path in service.reads}
    is_affected = any(worker_services[name].intersection(services) for name, services in restarts.items()) or (
        head_drift and (paths.intersection(head_drift.changed_files) or head_drift.model_files)
    )
    if is_affected and head_drift and head.service not in restarts[head.host]:
        restarts[head.host].append(head.service)
    return restarts
