# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an apply would change, from a plan and from what each host reports: which builds, and which services start again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import differences, names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Each, Maybe, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history as kept
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request

PATH = Text(longest=4096)
SERVICE = {
    "state": ("running", "waiting", "stopped", "foreign", "different"),
    "pid": Maybe(Number()),
    "addresses": [Text()],
    "clients": [Text()],
    "fallback": Maybe(Text()),
}
ANSWER = {
    "drift": Maybe(
        {
            "services": Each(SERVICE),
            **{part: [PATH] for part in ("defined", "stale", "missing_builds", "running_releases", "changed_files")},
            "changed_models": Maybe([PATH]),
            "redefined": [Text()],
            "installed": Maybe(Each(Each(Text()))),
            "received": Maybe(Each(Text())),
            "knocks": Maybe([{"endpoint": Text(), "source": Text(), "open": bool}]),
            "plans": Maybe([kept.SUMMARY]),
            "differences": [{"kind": differences.KINDS, "subject": PATH, "text": Text(longest=8192)}],
        }
    ),
    "free_mib": Maybe(Each(Number(-validation.LARGEST))),
}
"""What host_info reports of a host that was given its part of the plan, as state.drift and memory.free_mib return it."""
SHOWN = 500
"""Characters of a host's error in a message."""
ANSWERING = ("running", "different")
"""States of a head whose llama-server runs, as planned or not."""


def check(plan: Mapping[str, Any], answers: Mapping[str, Any]) -> dict[str, Any]:
    """What hosts report that were compared with their parts of the plan, complete.

    :param answers: host → what host_info returned.
    :raises Refusal: one has another form.
    """
    checked = dict(answers)
    for name, host in plan.get("hosts", {}).items():
        answer = answers.get(name) or {}
        read = {key: answer[key] for key in ANSWER if answer.get(key)} if isinstance(answer, Mapping) else answer
        whole = validation.reported(name, "itself", read, ANSWER)
        checked[name] = {**answer, **whole}
        found = (whole["drift"] or {"services": None})["services"]
        lacking = [
            service["name"] for service in host["services"] if found is not None and service["name"] not in found
        ]
        if lacking:
            missing = validation.Problem(f"it.drift.services.{lacking[0]}", "is missing")
            raise validation.another_form(name, "itself", missing)
    return checked


class Comparison(NamedTuple):
    """The hosts of a plan by whether they were compared with it."""

    drifts: dict[str, dict[str, Any]]
    """Host that was compared → result of state.drift."""
    without: dict[str, str]
    """Host that was not compared → why."""
    unlike: list[str]
    """A sentence for each build that a host has, and that is not its builder's, whoever changed it."""


class Recorded(NamedTuple):
    """What the controller keeps of a build."""

    files: Mapping[str, str]
    """File → sha256, as the controller saw them; empty where it saw none."""
    packed: bool
    """Whether the controller has its archive."""
    others: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """Other builder → files of the archive that other hosts may have of it; only where the controller saw none of this builder."""


def compare(
    plan: dict[str, Any],
    answers: dict[str, dict[str, Any]],
    recorded: Mapping[tuple[str, str], Recorded] | None = None,
) -> Comparison:
    """
    :param answers: host → what host_info returned, given the host's part of the plan; absent where the host did not answer.
    :param recorded: builder and id of a build → what the controller keeps of it.
    """
    drifts, without = {}, {}
    for name in plan["hosts"]:
        answer = answers.get(name) or {}
        if answer.get("skipped"):
            without[name] = "its hardware is declared in llama_hardware"
        elif answer.get("msg") or not answer.get("drift"):
            said = validation.printable(" ".join(str(answer.get("msg") or "it could not be reached").split()))
            without[name] = said[:SHOWN]
        else:
            drifts[name] = answer["drift"]
    received = _received(plan, drifts, recorded or {})
    others = unlike(plan, drifts, recorded or {})
    for name, texts in others.items():
        added = [differences.Difference("release", identity, text).as_dict() for identity, text in texts.items()]
        drifts[name] = {
            **drifts[name],
            "missing_builds": [*drifts[name]["missing_builds"], *texts],
            "differences": [*drifts[name]["differences"], *added],
        }
    changed = [
        text
        for name, texts in others.items()
        for identity, text in texts.items()
        if identity not in received.get(name, {})
    ]
    return Comparison(drifts, without, changed)


def supplier(builder: str, noted: Any, files: Mapping[str, str], kept: Recorded) -> str | None:
    """The host that compiled what a builder has, where that was another one; None where it counts as the builder's own.

    What the controller recorded of the builder decides. Without that the builder's own note does, or a record of the same files on another host.

    :param noted: the host that the manifest names.
    """
    if kept.files:
        return None
    if noted and noted != builder:
        return str(noted)
    return next((other for other, known in kept.others.items() if known == files), None)


def _received(
    plan: dict[str, Any],
    drifts: dict[str, dict[str, Any]],
    recorded: Mapping[tuple[str, str], Recorded],
) -> dict[str, dict[str, str]]:
    """Host → id of each build that it compiles by plan, and that another host has compiled → a sentence."""
    texts: dict[str, dict[str, str]] = {}
    for name, drift in drifts.items():
        installed, noted = drift.get("installed") or {}, drift.get("received") or {}
        for build in plan["hosts"][name]["builds"]:
            identity, kept = build["id"], recorded.get((name, build["id"]), Recorded({}, False))
            if build["builder"] != name or identity not in installed:
                continue
            other = supplier(name, noted.get(identity), installed[identity], kept)
            if other:
                texts.setdefault(name, {})[identity] = (
                    f"release {identity} on {name} was compiled on {other}, and {name} has to compile it itself"
                )
    return texts


def unlike(
    plan: dict[str, Any],
    drifts: dict[str, dict[str, Any]],
    recorded: Mapping[tuple[str, str], Recorded],
) -> dict[str, dict[str, str]]:
    """Host → id of each build that it has, and that is not its builder's → a sentence.

    :param drifts: host that answered → result of state.drift.
    :param recorded: see compare.
    """
    received = _received(plan, drifts, recorded)
    missing = {name: {*drift["missing_builds"], *received.get(name, {})} for name, drift in drifts.items()}
    others = {
        name: {**received.get(name, {}), **_unlike(name, plan["hosts"][name]["builds"], drifts, missing, recorded)}
        for name in drifts
    }
    return {name: texts for name, texts in others.items() if texts}


def _unlike(
    name: str,
    builds: list[dict[str, Any]],
    drifts: dict[str, dict[str, Any]],
    missing: Mapping[str, Collection[str]],
    recorded: Mapping[tuple[str, str], Recorded],
) -> dict[str, str]:
    """The same of one host. What a host says that it has may be anything.

    :param missing: host → ids of the builds that it has to get or to compile.
    """
    others = {}
    installed = drifts[name].get("installed")
    for build in builds:
        identity, builder = build["id"], build["builder"]
        kept = recorded.get((builder, identity), Recorded({}, False))
        if identity in missing[name]:
            continue
        if kept.files and not (isinstance(installed, dict) and installed.get(identity) == kept.files):
            others[identity] = f"release {identity} on {name} is not the one that the controller recorded of {builder}"
        elif not kept.packed and identity in missing.get(builder, ()):
            others[identity] = f"release {identity} on {name} is not the one that {builder} has to build again"
    return others


def decide(plan: dict[str, Any], drifts: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """What an apply would do.

    :param drifts: host → result of state.drift; None or absent where the host did not answer.
    :returns: ``kinds`` (host → kinds of its differences), ``restarts`` (host → names of the services that have to be restarted), ``behind``
        (hosts on which anything differs), ``builders`` (hosts that compile something), ``shared`` (id of a build that a host lacks
        and does not compile → the host that it gets it from), ``sources`` (ids of the releases of what is compiled or unpacked),
        ``unreached`` (hosts that did not answer), ``replaced`` (hosts on which other programs are to run than those that serve now),
        ``while_away`` (host → what serves while it is away, a sentence),
        ``unopened`` (hosts whose staging ports may not be reached yet, since links or rules of the firewall differ).
    """
    reached = {name: drift for name, drift in drifts.items() if drift is not None}
    restarts = _restarts(plan, reached)
    building = _builders(plan, reached)
    senders = set(building["shared"].values())
    return {
        "kinds": {
            name: sorted({difference["kind"] for difference in drift["differences"]}) for name, drift in reached.items()
        },
        "restarts": restarts,
        "behind": sorted(
            name for name, drift in reached.items() if drift["differences"] or restarts[name] or name in senders
        ),
        "unreached": sorted(set(plan["hosts"]) - set(reached)),
        "replaced": _replaced(plan, reached, restarts),
        "while_away": {name: while_away(plan, name) for name in plan["hosts"]},
        "unopened": sorted(
            name
            for name, drift in reached.items()
            if any(difference["kind"] in ("firewall", "link") for difference in drift["differences"])
        ),
        **building,
    }


def spared(plan: Mapping[str, Any]) -> dict[str, bool]:
    """Hosts without which the cluster serves → whether its head serves on a fallback then."""
    names_of = {entry["without"] for entry in plan["fallbacks"]} if plan["head"]["fallback_after"] is not None else ()
    losses = {name: _loss(plan, name) for name in plan["hosts"] if name != plan["head"]["host"]}
    return {name: bool(loss) for name, loss in losses.items() if not loss or loss in names_of}


def _loss(plan: Mapping[str, Any], name: str) -> str:
    """What the cluster lacks without a host, as fallbacks name it; empty where it uses nothing there."""
    used = [worker for worker in plan["hosts"][name]["workers"] if worker["used"]]
    return f"{name}:{used[0]['name']}" if len(used) == 1 else name * bool(used)


def while_away(plan: Mapping[str, Any], name: str) -> str:
    """What serves while a host of the plan is away, as a sentence."""
    if name == plan["head"]["host"]:
        return "The cluster does not answer until it is back: it is the head."
    on_fallback = spared(plan).get(name)
    if on_fallback is None:
        return "The cluster does not answer until it is back: the head serves on no fallback without it (llama_server_fallback)."
    if on_fallback:
        return f"The head goes on without {_loss(plan, name)} after a while, and returns to it when it is back."
    return "Nothing of the cluster is used there."


def missing_tools(
    plan: dict[str, Any], tools: dict[str, list[str]], builders: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Hosts that lack tools, and which: ``required`` and ``optional``, tool → package. Optional ones only for hosts that build now.

    :param tools: host that answered → tools that it has.
    :param builders: hosts that build.
    """
    lacking = {
        name: {
            "required": _missing(plan["hosts"][name]["tools"], present),
            "optional": _missing(plan["hosts"][name]["optional_tools"], present) if name in builders else {},
        }
        for name, present in tools.items()
    }
    return {name: missing for name, missing in lacking.items() if any(missing.values())}


def _missing(packages: dict[str, str], present: Collection[str]) -> dict[str, str]:
    return {tool: package for tool, package in packages.items() if tool not in present}


def _builders(plan: dict[str, Any], drifts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Who builds is planned. What hosts say that they have decides only what is missing."""
    builders, sources = set(), set()
    shared: dict[str, str] = {}
    for name, drift in drifts.items():
        for build in plan["hosts"][name]["builds"]:
            source = plan["releases"][build["release"]]["source"]
            if build["id"] not in drift["missing_builds"] or source == "package":
                continue
            if build["builder"] != name:
                shared[build["id"]] = build["builder"]
                continue
            sources.add(build["release"])
            if source in release_request.COMPILED:
                builders.add(name)
    return {"builders": sorted(builders), "shared": shared, "sources": sorted(sources)}


def _replaced(
    plan: dict[str, Any], drifts: dict[str, dict[str, Any]], restarts: Mapping[str, Collection[str]]
) -> list[str]:
    """Hosts whose services restart, and that run programs of a release which is not planned there any more; none where nothing serves."""
    serving = any(
        plan["head"]["service"] in drift["stale"]
        or drift["services"].get(plan["head"]["service"], {}).get("state") in ANSWERING
        for drift in drifts.values()
    )
    planned = {name: {build["id"] for build in host["builds"]} for name, host in plan["hosts"].items()}
    others = {name for name, drift in drifts.items() if set(drift["running_releases"]) - planned[name]}
    return sorted(name for name in others if serving and restarts[name])


def _restarts(plan: dict[str, Any], drifts: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Services that do not run as planned, and the head with its model and any worker that it uses: it does not reconnect. A worker that it
    used and that is not planned any more stands in its command line."""
    restarts = {
        name: [
            service["name"]
            for service in host["services"]
            if drifts[name]["services"][service["name"]]["state"] not in ("running", "waiting")
            or service["name"] in drifts[name]["redefined"]
            or any(f"/releases/{identity}/" in service["process"][0] for identity in drifts[name]["missing_builds"])
        ]
        for name, host in plan["hosts"].items()
        if name in drifts
    }
    own = names.of(plan["cluster"])
    used = {
        (name, own.service(f"worker-{worker['name']}"))
        for name, host in plan["hosts"].items()
        for worker in host["workers"]
        if worker["used"]
    }
    name_of_head = plan["head"]["host"]
    head = restarts.get(name_of_head, [])
    own_drift = drifts.get(name_of_head, {})
    touched = (
        any((name, service) in used for name, services in restarts.items() for service in services)
        or plan["model"]["path"] in own_drift.get("changed_files", ())
        or bool(own_drift.get("changed_models"))
    )
    if touched and plan["head"]["service"] not in head:
        head.append(plan["head"]["service"])
    return restarts
