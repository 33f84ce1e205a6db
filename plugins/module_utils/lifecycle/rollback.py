# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollback to the plan that served before, which the hosts keep: which one that is, and what is done on each host.

What a host keeps is used on that host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import KeptPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan, ModelPlan, Plan

SHOWN, LEADING = 120, 40
"""Characters of a variable's value, and of those before two long values differ."""
UNTOUCHED = "No service was touched"
"""Ends a refusal before anything was changed."""


class Compared(NamedTuple):
    """A plan that a host keeps, and how the host differs from it."""

    plan: KeptPlan
    drift: Drift
    missing: tuple[str, ...]
    """files that its services read and that are missing"""


class Kept(NamedTuple):
    """What a host reports of the plans that it keeps."""

    next: Compared | None = None
    now: Compared | None = None
    before: Compared | None = None

    @property
    def newest(self) -> Compared | None:
        return self.next or self.now or self.before

    def of(self, identity: str) -> Compared | None:
        return next((one for one in self if one and one.plan.id == identity), None)


def kept(answers: Mapping[str, Any]) -> dict[str, Kept]:
    """What hosts report of the plans that they keep.

    :raises Refusal: one has another form.
    """
    of = "the plans that it keeps"
    found = {name: typed_json.reported(name, of, Kept, answer) for name, answer in answers.items()}
    for name, own in found.items():
        for plan in [one.plan for one in own if one]:
            typed_json.reported(name, of, ModelPlan, plan.model)
            if plan.head is not None:
                typed_json.reported(name, of, HeadPlan, plan.head)
    return found


def choose(hosts: Mapping[str, Kept], heads: Collection[str], failed: str = "") -> tuple[str, KeptPlan]:
    """The plan to go back to, and its head: the plan that served before, or, while a change is not finished on all hosts, the one that serves.

    :param hosts: host that answered → what it keeps.
    :param heads: hosts that the inventory has as heads.
    :param failed: id of the plan that was applied just now and does not serve.
    :raises Refusal: there is none.
    """
    ordered = sorted(hosts, key=lambda name: name not in heads)
    head = next((name for name in ordered if (own := hosts[name].now) and own.plan.head), None)
    if head is None and failed and not any(own.now for own in hosts.values()):
        raise Refusal("no plan served here before it, so there is nothing to go back to")
    if head is None:
        raise Refusal(
            f"No head among the hosts that answered keeps a plan that served: bring the head back, or set llama_release and run site.yml. {UNTOUCHED}."
        )
    serving = _plan(hosts[head].now)
    others = [hosts[name] for name in serving.hosts if name in hosts]
    if failed or any(own.next or not own.now or own.now.plan.id != serving.id for own in others):
        if failed == serving.id:
            raise Refusal(f"Plan {failed} is the last one that served, so there is nothing to go back to.")
        return head, serving
    before = hosts[head].before
    heads_before = [name for name in ordered if before and (own := hosts[name].of(before.plan.id)) and own.plan.head]
    if not heads_before:
        raise Refusal(f"No plan served before plan {serving.id}: set llama_release and run site.yml. {UNTOUCHED}.")
    return heads_before[0], _plan(hosts[heads_before[0]].of(_plan(before).id))


def _plan(compared: Compared | None) -> KeptPlan:
    if compared is None:
        raise AssertionError("a host has the plan that it was chosen for")
    return compared.plan


def steps(hosts: Mapping[str, Kept], head: str, target: KeptPlan, lost: Collection[str] = ()) -> dict[str, Any]:
    """What is done on each host.

    :param lost: hosts that this run lost: the others go back without them.
    :returns: ``plan`` with what proves that the head serves, ``hosts``: host → ``part``, and names of services to ``stop``, to ``restart`` and to
        ``remove``, and ``heads``: host without a part in the plan that has a head, which would hold the workers → ``part``, and names to ``remove``.
    :raises Refusal: a host does not keep the plan, or its builds are not there any more.
    """
    own = {name: found for name in target.hosts if name in hosts and (found := hosts[name].of(target.id))}
    absent = [name for name in target.hosts if name not in own and name not in lost]
    if absent:
        raise Refusal(
            f"Plan {target.id} (release {target.release}) needs {', '.join(absent)}, which did not answer or does not keep it: bring the host back and "
            f"run the playbook again. If it stays away, move it to the group {changes.retired_group(target.cluster)}, set llama_release: {target.declared} and "
            f"run site.yml. {UNTOUCHED}."
        )
    gone = [
        f"{name} lacks {', '.join([*found.drift.missing_builds, *found.missing])}"
        for name, found in own.items()
        if found.drift.missing_builds or found.missing
    ]
    if gone:
        raise Refusal(
            f"Plan {target.id} (release {target.release}) cannot serve any more: {'; '.join(gone)}. Put files back, or set llama_release: "
            f"{target.declared} and run site.yml, which builds again. {UNTOUCHED}."
        )
    return {
        "plan": {
            **typed_json.dump({"cluster": target.cluster, "model": target.model}),
            "head": {**typed_json.dump(target.head), "host": head},
            "hosts": {head: typed_json.dump(target.host)},
            "links": [],
            "external_workers": [],
            "fallbacks": [],
        },
        "hosts": {name: _steps(found, name == head) for name, found in own.items()},
        "heads": {
            name: {"part": typed_json.dump(found.plan.host._replace(files=())), "remove": heads}
            for name in hosts
            if name not in target.hosts
            and (found := hosts[name].newest)
            and (heads := [service for service in found.drift.defined if names.is_head(service)])
        },
    }


def _steps(own: Compared, is_head: bool) -> dict[str, Any]:
    """The head stops first wherever one is defined, since it does not reconnect; of the workers those start again that do not run as kept."""
    part, drift = own.plan.host, own.drift
    heads = [service.name for service in part.services if service.kind == "head" and is_head]
    wrong = {name for name, service in drift.services.items() if service.state not in ("running", "waiting")}
    return {
        "part": typed_json.dump(
            part._replace(files=tuple(_without_source(file) for file in part.files if file.path in drift.changed_files))
        ),
        "stop": sorted(name for name in drift.defined if name in heads or names.is_head(name)),
        "restart": sorted({*wrong, *drift.redefined, *heads}),
        "remove": sorted(drift.unplanned),
    }


def _without_source(file: FilePlan) -> FilePlan:
    """A file as a host reports it never names one of the controller. What has no content is not written, as the known-answer model."""
    return file._replace(source=None, mode=None if file.content is None else file.mode)


def differing(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Variables that differ between two plans, like «llama_server_context: 4096 → 8192», with the hosts where it is not so on all.

    :param before: host → its variables in the plan that is left, as a KeptPlan has them.
    :param after: the same in the other plan. Hosts that are in one of them alone are left out.
    """
    hosts: dict[str, list[str]] = {}
    both = [name for name in after if name in before]
    for name in both:
        old, new = before[name], after[name]
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                values = _shown(old.get(key, "not set"), new.get(key, "not set"))
                hosts.setdefault(f"{validation.printable(key)}: {' → '.join(values)}", []).append(name)
    return [text + f" on {', '.join(names)}" * (names != both) for text, names in hosts.items()]


def _shown(*values: str) -> list[str]:
    """Values that differ. Of long ones what they begin with alike is left out."""
    alike = len([*takewhile(lambda one: len({*one}) == 1, zip(*values))])
    start = max(0, alike - LEADING) if max(map(len, values)) > SHOWN else 0
    return ["…" * (start > 0) + validation.printable(value[start:], SHOWN) for value in values]


def left_behind(hosts: Mapping[str, Kept], target: KeptPlan) -> list[str]:
    """Variables that differ between the plan that is left and the one to go back to."""
    plans = {name: hosts[name].newest for name in target.hosts if name in hosts}
    before = {name: one.plan.variables for name, one in plans.items() if one and one.plan.id != target.id}
    same = {name: _plan(hosts[name].of(target.id)).variables for name in before if hosts[name].of(target.id)}
    return differing(before, same)


def other_plan(plan: Plan, drifts: Mapping[str, Drift], inventory: Callable[[str], Mapping[str, str]]) -> str | None:
    """A sentence where the cluster runs another plan than the inventory's; None where it runs that one, or no host keeps a plan.

    :param plan: completed, with ``id``.
    :param drifts: hosts that answered → how they differ.
    :param inventory: returns the variables of a host as they are set now, as a KeptPlan has them.
    """
    others = {
        name: last for name in plan.hosts if name in drifts and (last := drifts[name].last) and last.id != plan.id
    }
    if not others:
        return None
    other = others.get(plan.head.host) or others[min(others)]
    state = "serves" if other.served else "was begun and never served"
    found = differing(
        {name: inventory(name) for name in others}, {name: last.variables for name, last in others.items()}
    )
    ways = (
        f"To {'stay' if other.served else 'go on with that one'}, set what differs: {'; '.join(found)}."
        if found
        else "No variable differs; hardware, software or the collection do."
    )
    release = "" if other.release == plan.release.ref else " with release {}"
    return validation.printable(
        f"The inventory plans {plan.id}{release.format(plan.release.ref)}, but on {', '.join(sorted(others))} plan {other.id}"
        f"{release.format(other.release)} {state}: site.yml goes to what the inventory says. {ways}"
    )
