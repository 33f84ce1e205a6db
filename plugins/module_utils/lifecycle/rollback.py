# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollback to a plan that the hosts have recorded: which one, whether all hosts can go back to it, and what is done on each.

A host's record is used on that host alone. Other hosts take nothing of the head's record but the order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.history import PlanRecord, PlanSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan

SHOWN = 5
UNTOUCHED = "No service was touched"
"""Ends a refusal before anything was changed."""


class History(NamedTuple):
    """What a host reports of the plans that it has recorded."""

    plans: tuple[PlanSummary, ...]
    unreadable: tuple[Annotated[str, Text(longest=8192)], ...]


class Recorded(NamedTuple):
    """What a host reports of the plan to go back to."""

    record: PlanRecord
    drift: Drift
    missing: tuple[str, ...]
    """files that its services read and that are missing"""


class Place(NamedTuple):
    """Where the installation of a host is now, by its facts."""

    prefix: str | None = None
    units: str | None = None


class Target(NamedTuple):
    """The plan to go back to."""

    id: str
    release: str
    head: str
    hosts: tuple[str, ...]
    uninvolved: tuple[str, ...] = ()
    """Hosts that answered and have no part in it: nothing is changed there."""
    away: tuple[str, ...] = ()
    """Hosts of it that do not answer, without which its head serves."""
    declared: str = ""
    """What llama_release has to be for it."""


class Reports(NamedTuple):
    """What is known of the hosts when a plan is chosen."""

    cluster: str
    heads: Collection[str]
    """Hosts that the inventory has as heads: a plan without a part on one of them is a worker's invention."""
    plans: Mapping[str, Sequence[PlanSummary]]
    """Host that answered → plans of its history."""
    lost: Collection[str] = ()
    """Hosts that this run lost: the others go back without them."""
    away: Collection[str] = ()
    """Hosts that did not answer at all: the others go back without them where the head of that plan serves without them."""

    def heads_of(self, plan: str) -> list[str]:
        """Hosts that report to be the head of a plan; of several the inventory's. While that one is lost, no other counts."""
        claiming = [name for name, own in self.plans.items() if any(entry.id == plan and entry.head for entry in own)]
        return [name for name in claiming if name in self.heads] or (
            [] if set(self.heads).intersection(self.lost) else claiming
        )

    def current(self) -> set[str]:
        """Ids of the plans that serve; none while a change is not finished: a plan was begun, or a host of the plan that serves has another
        one, as after it was away."""
        newest = {name: history.newest_first(own)[0] for name, own in self.plans.items() if own}
        serving = next((newest[name] for name in self.heads if name in newest), None)
        if serving is None:
            return {plan.id for plan in newest.values()}
        others = [plan for name, plan in newest.items() if name in serving.hosts and plan.id != serving.id]
        begun = any(plan.state == history.APPLYING for plan in newest.values())
        return set() if others or begun else {serving.id}


def histories(answers: Mapping[str, Any]) -> dict[str, History]:
    """What hosts report of their plan histories.

    :raises Refusal: one has another form.
    """
    shape = typed_json.shape(History)
    return {
        name: typed_json.parse(History, validation.reported(name, "its plan history", answer, shape))
        for name, answer in answers.items()
    }


def choose(
    cluster: str,
    heads: Collection[str],
    histories: Mapping[str, History],
    wanted: str = "",
    failed: str = "",
    lost: Collection[str] = (),
    away: Collection[str] = (),
) -> Target:
    """The plan to go back to: the one that is wanted, else the one before the plan that served last, or, while a change is not finished on all
    hosts, the last one that served.

    :param heads: see Reports, and ``lost`` and ``away``.
    :param wanted: id of a plan, or id, ref or build of a release.
    :param failed: id of the plan that was applied just now and does not serve.
    :raises Refusal: there is none; the message has the history of each host.
    """
    plans = {name: reported.plans for name, reported in histories.items()}
    reports = Reports(cluster, heads, plans, lost, away)
    possible, obstacles = _possible(reports)
    if wanted:
        fitting = [plan for plan in possible if _is(plan, wanted)]
        reasons = [text for plan, text in obstacles if _is(plan, wanted)]
    else:
        current = () if failed else reports.current()
        fitting = [plan for plan in possible if plan.id not in current]
        reasons = [text for _plan, text in obstacles]
    if failed and fitting and fitting[0].id == failed:
        raise Refusal(f"plan {failed} is the last one that served here, so there is nothing to go back to")
    if not fitting:
        raise Refusal(
            _none_fits(wanted, reasons, plans, {name: reported.unreadable for name, reported in histories.items()})
        )
    target = fitting[0]
    return Target(
        target.id,
        target.release,
        reports.heads_of(target.id)[0],
        tuple(name for name in target.hosts if name in histories),
        tuple(sorted(set(histories) - set(target.hosts))),
        tuple(name for name in target.hosts if name in away),
        target.declared or "",
    )


def _is(plan: PlanSummary, wanted: str) -> bool:
    """Whether a plan is named so; ``pypi-0.3.36`` is also called 0.3.36."""
    return wanted in (plan.id, plan.release, plan.release.split("-", 1)[-1], plan.release_id, str(plan.build))


def _possible(reports: Reports) -> tuple[list[PlanSummary], list[tuple[PlanSummary, str]]]:
    """Plans that served on all of their hosts, as their heads report them, the newest first; and each other one with a sentence why not."""
    possible, obstacles = [], []
    for plan in dict.fromkeys(entry.id for own in reports.plans.values() for entry in own):
        entries = {name: entry for name, own in reports.plans.items() for entry in own if entry.id == plan}
        heads = reports.heads_of(plan)
        entry = entries[heads[0]] if heads else next(iter(entries.values()))
        obstacle = _obstacle(reports, entries, heads, entry)
        if obstacle:
            obstacles.append((entry, f"plan {plan} ({entry.release}) {obstacle}"))
        else:
            possible.append(entry)
    return history.newest_first(possible), obstacles


def _obstacle(reports: Reports, entries: Mapping[str, PlanSummary], heads: Sequence[str], entry: PlanSummary) -> str:
    """Why the cluster cannot go back to a plan, as the end of a sentence; empty where it can.

    :param entries: host → the plan in its history.
    :param entry: that of its head.
    """
    foreign = [name for name, own in entries.items() if own.cluster != reports.cluster]
    missing = [name for name in entry.hosts if name not in entries and name not in reports.lost]
    unlike = [name for name, own in entries.items() if sorted(own.hosts) != sorted(entry.hosts)]
    outside = unlike or sorted(set(entries) - set(entry.hosts))
    never = [name for name, own in entries.items() if own.state != history.SERVED]
    if foreign:
        return f"belongs to the cluster {validation.show(entries[foreign[0]].cluster)} on {', '.join(foreign)}"
    if len(heads) > 1:
        return f"has several heads: {', '.join(heads)}"
    if not heads:
        return (
            "has no head among the hosts that answered (bring it back; if it does not come back, make another host the head in the inventory, set "
            f"llama_release: {entry.declared or entry.release} and run site.yml)"
        )
    if not _serves_without(entry, missing, reports.away):
        return _needs(entry, missing, reports.away)
    if outside:
        return f"names other hosts on {', '.join(outside)} than on {heads[0]}"
    if never:
        return f"never served on {', '.join(never)}"
    if not set(reports.heads).intersection(entry.hosts):
        return f"has no part on {', '.join(reports.heads)}, the head of the inventory"
    return ""


def _serves_without(entry: PlanSummary, missing: Collection[str], away: Collection[str]) -> bool:
    """Whether the head of a plan serves without these hosts. A fallback goes without one host of those that are used."""
    spared = entry.spared or {}
    return all(name in away and name in spared for name in missing) and sum(spared[name] for name in missing) <= 1


def _needs(entry: PlanSummary, missing: Collection[str], away: Collection[str]) -> str:
    """Why a plan cannot serve without these hosts, and what works then."""
    silent = [name for name in missing if name in away]
    others = [name for name in missing if name not in away]
    texts = [
        f"has no part on {', '.join(others)}, or the host failed above, is left out by --limit or is not in the inventory"
        * bool(others),
        f"needs {', '.join(silent)}, which does not answer, and the head has no fallback that works without it"
        * bool(silent),
    ]
    return (
        f"{', and it '.join(filter(None, texts))} (if it does not come back, remove {', '.join(missing)} from the inventory, set "
        f"llama_release: {entry.declared or entry.release} and run site.yml, which plans without it and compiles nothing that is still installed)"
    )


def _none_fits(
    wanted: str,
    reasons: Sequence[str],
    plans: Mapping[str, Sequence[PlanSummary]],
    unreadable: Mapping[str, Sequence[str]],
) -> str:
    """What was looked for, why no plan can be used, and which plans the hosts have recorded."""
    looked = f"No recorded plan is {wanted!r}" if wanted and not reasons else "There is no plan to go back to"
    if wanted and reasons:
        looked = f"The cluster cannot go back to {wanted!r}"
    why = f": {'; '.join(reasons[:SHOWN])}" if reasons else ""
    recorded = [
        f"{name}: "
        + (", ".join(f"{plan.id} ({plan.release}, {plan.state})" for plan in entries) or "nothing")
        + "".join(f", {text}" for text in unreadable[name][:SHOWN])
        for name, entries in plans.items()
    ]
    return validation.printable(
        f"{looked}{why}. The hosts have recorded: {'; '.join(recorded) or 'nothing, since none answered'}. Name one of these with llama_rollback_to, or "
        "set llama_release and run site.yml.",
        8192,
    )


def accept(target: Target, cluster: str, answers: Mapping[str, Any], places: Mapping[str, Place]) -> dict[str, Any]:
    """What is done on each host.

    :param answers: host → what it reports of the plan, a Recorded as JSON.
    :returns: ``plan`` with what proves that the head serves, and ``hosts``: host → ``part``, and names of services to ``stop``, to ``restart`` and to
        ``remove``.
    :raises Refusal: a host has no record that can be used, or its builds are not there any more.
    """
    lost = [name for name in target.hosts if name not in answers]
    if lost:
        raise Refusal(
            f"{', '.join(lost)} could not be reached or failed above, and has a part in plan {target.id}: bring the host back and run the playbook "
            f"again. {UNTOUCHED}."
        )
    recorded = {name: _checked(name, target, cluster, answers[name], places[name]) for name in target.hosts}
    gone = [
        f"{name} lacks {', '.join([*found.drift.missing_builds, *found.missing])}"
        for name, found in recorded.items()
        if found.drift.missing_builds or found.missing
    ]
    if gone:
        raise Refusal(
            f"Plan {target.id} ({target.release}) cannot serve any more: {'; '.join(gone)}. Put files back, choose another plan with "
            f"llama_rollback_to, or set llama_release and run site.yml, which builds again. {UNTOUCHED}."
        )
    head = recorded[target.head].record
    return {
        "plan": {
            **typed_json.dump({"cluster": head.cluster, "model": head.model}),
            "head": {**typed_json.dump(head.head), "host": target.head},
            "hosts": {target.head: typed_json.dump(head.host)},
            "links": [],
            "external_workers": [],
            "fallbacks": [],
        },
        "hosts": {name: _steps(found.record, found.drift, name == target.head) for name, found in recorded.items()},
    }


def _checked(name: str, target: Target, cluster: str, answer: Any, place: Place) -> Recorded:
    """An answer whose record is the one of this host and this plan, as a value.

    :raises Refusal: it has another form, or belongs elsewhere.
    """
    rest = {key: answer.get(key) for key in Recorded._fields if key != "record"}
    found = (
        history.problem(answer.get("record"))
        or validation.problem("it", rest)
        or typed_json.problem("it", answer, Recorded)
    )
    if not found:
        recorded = typed_json.parse(Recorded, answer)
        record = recorded.record
        found = _misplaced(name, target, cluster, record, place)
        found = found or changes.unreported_service(record.host.services, recorded.drift)
        if not found:
            return recorded
    raise Refusal(
        f"The record of plan {target.id} on {name} cannot be used: {found.where[3:] or 'it'} {found.why}. Choose another plan with "
        f"llama_rollback_to, or set llama_release and run site.yml. {UNTOUCHED}."
    )


def _misplaced(name: str, target: Target, cluster: str, record: PlanRecord, place: Place) -> validation.Problem | None:
    """Why a record of the right form is not the one of this host and this plan."""
    for key, value in {"id": target.id, "cluster": cluster, "name": name}.items():
        if getattr(record, key) != value:
            return validation.Problem(f"it.{key}", f"is {validation.show(getattr(record, key))}, not {value!r}")
    moved = [key for key, value in place._asdict().items() if getattr(record.host, key) != value]
    if moved:
        return validation.Problem(f"it.host.{moved[0]}", "is not where the installation is now")
    if bool(record.head) != (name == target.head):
        return validation.Problem("it.head", "is not of this host")
    return None


def _steps(record: PlanRecord, drift: Drift, is_head: bool) -> dict[str, Any]:
    """The head stops first wherever one is defined, since it does not reconnect; of the workers those start again that do not run as recorded."""
    part = record.host
    heads = [service.name for service in part.services if service.kind == "head" and is_head]
    wrong = {name for name, service in drift.services.items() if service.state not in ("running", "waiting")}
    return {
        "part": typed_json.dump(part._replace(files=tuple(map(_without_source, part.files)))),
        "stop": sorted(name for name in drift.defined if name in heads or names.is_head(name)),
        "restart": sorted({*wrong, *drift.redefined, *heads}),
        "remove": sorted(drift.stale),
    }


def _without_source(file: FilePlan) -> FilePlan:
    """A file as a host reports it never names one of the controller. What has no content is not written, as the known-answer model."""
    return file._replace(source=None, mode=None if file.content is None else file.mode)
