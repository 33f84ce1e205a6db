# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an apply would change, from a plan and from what each host reports: which builds, and which services start again."""

import posixpath
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift, Kind
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import BuildPlan, HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request

SHOWN = 500
"""Characters of a host's error in a message."""


class HostAnswer(NamedTuple):
    """What a host reports of itself, given its part of the plan."""

    drift: Optional[Drift] = None
    why: str = ""
    """Why it was not compared, or its drift does not count; empty where it does."""


def read(hosts: Mapping[str, HostPlan], answers: Mapping[str, Any]) -> dict[str, HostAnswer]:
    """What hosts report that were compared with their parts of the plan.

    :param hosts: of the plan.
    :param answers: host → what host_info returned; absent where the host did not answer.
    :raises Refusal: one has another form.
    """
    return {name: _read(name, host, answers.get(name) or {}) for name, host in hosts.items()}


def _read(name: str, host: HostPlan, answer: Any) -> HostAnswer:
    data = {"drift": answer.get("drift") or None} if isinstance(answer, Mapping) else answer
    found = typed_json.reported(name, "itself", HostAnswer, data)
    if found.drift:
        check_services(name, host, found.drift)
    if answer.get("skipped"):
        return found._replace(why="its hardware is declared in llama_hardware")
    if found.drift and not answer.get("msg"):
        return found
    reason = " ".join(str(answer.get("msg") or "it could not be reached").split())
    return found._replace(why=validation.printable(reason)[:SHOWN])


def check_services(name: str, host: HostPlan, drift: Drift) -> None:
    """:raises Refusal: a host does not report how all of its planned services are."""
    missing = next((service.name for service in host.services if service.name not in drift.services), None)
    if missing:
        raise typed_json.not_as_read(name, "itself", f"drift.services.{missing} is missing")


def compared(answers: Mapping[str, HostAnswer]) -> dict[str, Drift]:
    """Hosts that were compared with the plan → how they differ."""
    return {name: answer.drift for name, answer in answers.items() if answer.drift and not answer.why}


class Decision(NamedTuple):
    """What an apply would do."""

    kinds: Mapping[str, Sequence[Kind]]
    """Host → kinds of its differences."""
    restarts: Mapping[str, list[str]]
    """Host → names of the services that have to be restarted."""
    behind: list[str]
    """Hosts on which an apply has something to do."""
    unreached: list[str]
    """Hosts that did not answer."""
    while_away: Mapping[str, str]
    """Host → what serves while it is away, a sentence."""
    builders: list[str]
    """Hosts that compile something."""
    shared: Mapping[str, str]
    """Id of a build that a host lacks and does not compile → the host that it gets it from."""
    fetches: list[BuildPlan]
    """A build for each archive or source that hosts lack, with the programs of all that are made of it."""
    needs_key: list[str]
    """Hosts of workers whose tunnel needs a new key: the head has none, or one that the host does not take."""


def decide(plan: Plan, drifts: Mapping[str, Drift]) -> Decision:
    """:param drifts: hosts that were compared → how they differ.
    :raises Refusal: a host has programs of another archive than the operator names.
    """
    _check_archives(plan, drifts)
    kinds = {name: sorted({difference.kind for difference in drift.differences}) for name, drift in drifts.items()}
    restarts = _restarts(plan, drifts)
    builders, shared = _builders(plan, drifts)
    needs_key = _needs_key(plan, drifts)
    ends = {*needs_key, *([plan.head.host] if needs_key else [])}
    return Decision(
        kinds=kinds,
        restarts=restarts,
        behind=sorted(
            name for name in drifts if kinds[name] or restarts[name] or name in shared.values() or name in ends
        ),
        unreached=sorted(set(plan.hosts) - set(drifts)),
        while_away={name: while_away(plan, name) for name in plan.hosts},
        builders=builders,
        shared=shared,
        fetches=_fetches(plan, drifts),
        needs_key=needs_key,
    )


def _needs_key(plan: Plan, drifts: Mapping[str, Drift]) -> list[str]:
    """As in Decision. Files of both ends have the same name. The head uses the first key of its own; a host needs a new one where it does not take that."""
    head = drifts.get(plan.head.host)
    used = {posixpath.basename(path): own[:1] for path, own in ((head and head.tunnel_keys) or {}).items()}
    return sorted(
        name
        for name, drift in drifts.items()
        for path, taken in (drift.tunnel_keys or {}).items()
        if head and name != plan.head.host
        if not set(used.get(posixpath.basename(path), ())).intersection(taken)
    )


def retired_group(cluster: str) -> str:
    """Group of hosts that left a cluster, from the cluster's group."""
    return "llama_retired" + f"_{cluster}" * (cluster != names.CLUSTER_GROUP)


def check_parts(cluster: str, decided: Decision, parts: Collection[str]) -> None:
    """:param cluster: its group.
    :param parts: of ``build`` and ``services`` those that the run carries out.
    :raises Refusal: a host is away and others would change, or services would change before what they need is installed.
    """
    away, behind = ", ".join(decided.unreached), ", ".join(decided.behind)
    if parts and away and behind:
        raise Refusal(
            f"{away} could not be reached or failed above, and {behind} would be changed: no service was touched. Bring the host back and run the "
            f"playbook again, or move it to the group {retired_group(cluster)}"
        )
    for name, kinds in decided.kinds.items() if [*parts] == ["services"] else ():
        if missing := ", ".join(kind for kind in kinds if kind in ("account", "folder", "model", "release")):
            raise Refusal(
                f"{name} needs what --tags build installs ({missing}) before services change: run the playbook with --tags build,services, or without "
                "--tags and --skip-tags. No service was touched"
            )


def serves_without(plan: Plan) -> dict[str, bool]:
    """Hosts without which the cluster serves → whether its head serves on a fallback then."""
    names_of = {entry.without for entry in plan.fallbacks} if plan.head.fallback_after is not None else ()
    absences = {name: _absence_of(plan, name) for name in plan.hosts if name != plan.head.host}
    return {name: bool(absence) for name, absence in absences.items() if not absence or absence in names_of}


def _absence_of(plan: Plan, name: str) -> str:
    """What the cluster lacks without a host, as fallbacks name it; empty where it uses nothing there."""
    used = [worker for worker in plan.hosts[name].workers if worker.used]
    return f"{name}:{used[0].name}" if len(used) == 1 else name if used else ""


def while_away(plan: Plan, name: str) -> str:
    """What serves while a host of the plan is away, as a sentence."""
    if name == plan.head.host:
        return "The cluster does not answer until it is back: it is the head."
    on_fallback = serves_without(plan).get(name)
    if on_fallback is None and plan.head.models:
        without = [model.name for model in plan.head.models if name in {entry.host for entry in model.placement}]
        return f"Requests for {', '.join(without)} fail until it is back."
    if on_fallback is None:
        return (
            "The cluster does not answer until it is back: the head has no fallback without it (llama_server_fallback)."
        )
    if on_fallback:
        return f"The head goes on without {_absence_of(plan, name)} after a while, and returns to it when it is back."
    return "Nothing of the cluster is used there."


def missing_tools(
    plan: Plan, tools: Mapping[str, Collection[str]], builders: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Hosts that lack tools, and which: ``required`` and ``optional``, tool → package. Optional ones only for hosts that build now.

    :param tools: host that answered → tools that it has.
    :param builders: hosts that build.
    """

    def missing(packages: Mapping[str, str], present: Collection[str]) -> dict[str, str]:
        return {tool: package for tool, package in packages.items() if tool not in present}

    lacking = {
        name: {
            "required": missing(plan.hosts[name].tools, present),
            "optional": missing(plan.hosts[name].optional_tools, present) if name in builders else {},
        }
        for name, present in tools.items()
    }
    return {name: packages for name, packages in lacking.items() if any(packages.values())}


def _check_archives(plan: Plan, drifts: Mapping[str, Drift]) -> None:
    """Refuses a checksum of an archive that is not that of what was installed from it: a build's id does not tell."""
    for name, drift in drifts.items():
        for build in plan.hosts[name].builds:
            archive, had = (build.archives or ("",))[0], drift.archives.get(build.id)
            wanted = (plan.releases[build.release].checksums or {}).get(archive, "")
            if had and wanted not in ("", f"sha256:{had}"):
                raise Refusal(
                    f"llama_release has the checksum {wanted} of {archive}, but the programs on {name} are of one with sha256:{had}: correct the checksum; "
                    f"where it is right, remove {plan.hosts[name].prefix}/releases/{build.id} there and run the playbook again. No running service was touched"
                )


def _builders(plan: Plan, drifts: Mapping[str, Drift]) -> tuple[list[str], dict[str, str]]:
    """As in Decision. Which host builds stands in the plan; the hosts' reports decide only what is missing."""
    builders = set()
    shared: dict[str, str] = {}
    for name, drift in drifts.items():
        for build in plan.hosts[name].builds:
            source = plan.releases[build.release].source
            if build.id not in drift.missing_builds or source == "package":
                continue
            if build.builder != name:
                shared[build.id] = build.builder
            elif source in release_request.COMPILED:
                builders.add(name)
    return sorted(builders), shared


def _fetches(plan: Plan, drifts: Mapping[str, Drift]) -> list[BuildPlan]:
    """As in Decision. Programs of a distribution's package are fetched by its package manager."""
    found: dict[tuple[str, ...], BuildPlan] = {}
    for name, drift in drifts.items():
        for build in plan.hosts[name].builds:
            if build.id in drift.missing_builds and build.builder == name and not build.packaged:
                key = (build.release, *(build.archives or ()))
                targets = {*build.targets, *(found[key].targets if key in found else ())}
                found[key] = build._replace(targets=tuple(sorted(targets)))
    return [*found.values()]


def _restarts(plan: Plan, drifts: Mapping[str, Drift]) -> dict[str, list[str]]:
    """Services that do not run as planned, and the head with its model and any worker that it uses: it does not reconnect. A worker that it
    used and that is not planned any more stands in its command line."""
    restarts = {
        name: [
            service.name
            for service in plan.hosts[name].services
            if drift.services[service.name].state not in ("running", "waiting")
            or service.name in drift.redefined
            or any(f"/releases/{identity}/" in service.process[0] for identity in drift.missing_builds)
        ]
        for name, drift in drifts.items()
    }
    service_of = names.service
    used = {
        name: {service_of(f"worker-{worker.name}") for worker in plan.hosts[name].workers if worker.used}
        for name in drifts
    }
    head = plan.head
    of_head = drifts.get(head.host)
    paths = {path for one in plan.hosts[head.host].services if one.kind == "head" for path in one.reads}
    touched = any(used[name].intersection(services) for name, services in restarts.items()) or (
        of_head and (paths.intersection(of_head.changed_files) or of_head.changed_models)
    )
    if touched and of_head and head.service not in restarts[head.host]:
        restarts[head.host].append(head.service)
    return restarts
