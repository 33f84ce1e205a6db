# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollback to the previous plan that served: chooses the plan, and the steps on each host.

A host's kept plans are only used on that host."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import KeptPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan, ModelPlan, Plan

MAX_VALUE_LENGTH, MAX_COMMON_LENGTH = 120, 40
"""Maximum length of a variable's value, and of the common part before the first difference of two long values."""
NO_CHANGE_NOTE = "No service was touched"
"""Last sentence of a refusal before any change."""
NOT_SET = "not set"
HostVariables = Mapping[str, Mapping[str, str]]
"""Host → its variables, as in a KeptPlan."""


class ComparedPlan(NamedTuple):
    """A plan that a host keeps, and how the host differs from it."""

    plan: KeptPlan
    drift: Drift
    missing: tuple[str, ...]
    """missing files that the plan's services read"""


class KeptPlans(NamedTuple):
    next: ComparedPlan | None = None
    now: ComparedPlan | None = None
    before: ComparedPlan | None = None

    @property
    def newest_plan(self) -> ComparedPlan | None:
        return self.next or self.now or self.before

    def find(self, plan_id: str) -> ComparedPlan | None:
        return next((kept_plan for kept_plan in self if kept_plan and kept_plan.plan.id == plan_id), None)


def parse_kept_plans(answers: Mapping[str, Any]) -> dict[str, KeptPlans]:
    """Return the kept plans of each host, from the hosts' reports."""
    subject = "its kept plans"
    reports = {name: typed_json.parse_report(name, subject, KeptPlans, answer) for name, answer in answers.items()}
    for name, kept_plans in reports.items():
        for plan in [kept_plan.plan for kept_plan in kept_plans if kept_plan]:
            typed_json.parse_report(name, subject, ModelPlan, plan.model)
            if plan.head is not None:
                typed_json.parse_report(name, subject, HeadPlan, plan.head)
    return reports


def choose_target(
    hosts: Mapping[str, KeptPlans], heads: Collection[str], failed_plan_id: str = ""
) -> tuple[str, KeptPlan]:
    """Return the head of the plan to return to, and this plan: the previous plan that served, or the current plan if a change is unfinished.

    :param failed_plan_id: id of the plan that was just applied and does not serve.
    """
    ordered_hosts = sorted(hosts, key=lambda name: name not in heads)
    head = next((name for name in ordered_hosts if (kept_plan := hosts[name].now) and kept_plan.plan.head), None)
    if head is None and failed_plan_id and not any(kept_plans.now for kept_plans in hosts.values()):
        raise Refusal("no earlier plan has served on this cluster, so there is nothing to return to")
    if head is None:
        raise Refusal(
            "No head answered with a kept plan that has served: start the head, or set llama_release to the release you want and run site.yml. "
            f"{NO_CHANGE_NOTE}."
        )
    current_plan = _plan_of(hosts[head].now)
    plans_of_hosts = [hosts[name] for name in current_plan.hosts if name in hosts]
    if failed_plan_id or any(
        plans.next or not plans.now or plans.now.plan.id != current_plan.id for plans in plans_of_hosts
    ):
        if failed_plan_id == current_plan.id:
            raise Refusal(f"Plan {failed_plan_id} is the last plan that served, so there is nothing to return to.")
        return head, current_plan
    previous_plan = hosts[head].before
    former_heads = [
        name
        for name in ordered_hosts
        if previous_plan and (kept_plan := hosts[name].find(previous_plan.plan.id)) and kept_plan.plan.head
    ]
    if not former_heads:
        raise Refusal(
            f"No plan served before plan {current_plan.id}: set llama_release to the release you want and run site.yml. {NO_CHANGE_NOTE}."
        )
    return former_heads[0], _plan_of(hosts[former_heads[0]].find(_plan_of(previous_plan).id))


def _plan_of(kept_plan: ComparedPlan | None) -> KeptPlan:
    if kept_plan is None:
        raise AssertionError("the host must have the kept plan that was chosen for it")
    return kept_plan.plan


def host_steps(
    hosts: Mapping[str, KeptPlans], head: str, target: KeptPlan, lost_hosts: Collection[str] = ()
) -> dict[str, Any]:
    """Return the steps on each host.

    :param lost_hosts: hosts that this run lost; the other hosts return to the plan without them.
    :returns: ``plan`` for verifying that the head serves; ``hosts``: host → ``part``, and names of services to ``stop``, ``restart`` and ``remove``;
        ``heads``: host outside the plan with a head, which would occupy the workers → ``part``, and names of services to ``remove``.
    :raises Refusal: a host does not keep the plan, or lacks its builds.
    """
    kept_plans = {
        name: kept_plan for name in target.hosts if name in hosts and (kept_plan := hosts[name].find(target.id))
    }
    missing_hosts = [name for name in target.hosts if name not in kept_plans and name not in lost_hosts]
    if missing_hosts:
        raise Refusal(
            f"Plan {target.id} (release {target.release}) needs hosts that did not answer or do not keep this plan: {', '.join(missing_hosts)}. Bring them "
            f"back and run the playbook again. If a host does not come back, move it to the group {changes.retired_group(target.cluster)}, set "
            f"llama_release: {target.declared} and run site.yml. {NO_CHANGE_NOTE}."
        )
    shortages = [
        f"{name} lacks {', '.join([*kept_plan.drift.missing_builds, *kept_plan.missing])}"
        for name, kept_plan in kept_plans.items()
        if kept_plan.drift.missing_builds or kept_plan.missing
    ]
    if shortages:
        raise Refusal(
            f"Plan {target.id} (release {target.release}) can no longer serve: {'; '.join(shortages)}. Restore the files, or set llama_release: "
            f"{target.declared} and run site.yml to build that release again. {NO_CHANGE_NOTE}."
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
        "hosts": {name: _steps(kept_plan, name == head) for name, kept_plan in kept_plans.items()},
        "heads": {
            name: {"part": typed_json.dump(kept_plan.plan.host._replace(files=())), "remove": head_services}
            for name in hosts
            if name not in target.hosts
            and (kept_plan := hosts[name].newest_plan)
            and (head_services := [service for service in kept_plan.drift.defined if names.is_head_service(service)])
        },
    }


def _steps(kept_plan: ComparedPlan, is_head: bool) -> dict[str, Any]:
    """Return the steps on a host. A defined head always stops first, because it does not reconnect; workers restart if they do not run as in the kept plan."""
    host_plan, drift = kept_plan.plan.host, kept_plan.drift
    head_services = [service.name for service in host_plan.services if service.kind == "head" and is_head]
    stopped_services = {name for name, service in drift.services.items() if service.state not in ("running", "waiting")}
    return {
        "part": typed_json.dump(
            host_plan._replace(
                files=tuple(_strip_source(file) for file in host_plan.files if file.path in drift.changed_files)
            )
        ),
        "stop": sorted(name for name in drift.defined if name in head_services or names.is_head_service(name)),
        "restart": sorted({*stopped_services, *drift.redefined, *head_services}),
        "remove": sorted(drift.unplanned),
    }


def _strip_source(file: FilePlan) -> FilePlan:
    """Return a file without its source on the controller. A file without content, like the known-answer model, is not written."""
    return file._replace(source=None, mode=None if file.content is None else file.mode)


def describe_differences(old_variables: HostVariables, new_variables: HostVariables) -> list[str]:
    """Return the variables that differ between two plans, like 'llama_server_context: 4096 → 8192', with their hosts unless all hosts differ.

    Hosts that are only in one of the plans are ignored.
    """
    hosts: dict[str, list[str]] = {}
    common_hosts = [name for name in new_variables if name in old_variables]
    for name in common_hosts:
        old_values, new_values = old_variables[name], new_variables[name]
        for key in sorted({*old_values, *new_values}):
            old_value, new_value = (_parse_value(values.get(key, NOT_SET)) for values in (old_values, new_values))
            for part, *texts in _differing_parts(key, old_value, new_value):
                hosts.setdefault(f"{validation.printable(part)}: {' → '.join(_shorten(*texts))}", []).append(name)
    return [text + f" on {', '.join(host_names)}" * (host_names != common_hosts) for text, host_names in hosts.items()]


def _parse_value(text: str) -> Any:
    """Return the value if the text is a JSON list or mapping, and otherwise the text."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else text
    return text


def _differing_parts(name: str, old_value: Any, new_value: Any) -> list[tuple[str, str, str]]:
    """Return the parts of a value that differ, like 'llama_release.checksum', with their texts."""
    if isinstance(old_value, dict) and isinstance(new_value, dict):
        keys = [key for key in {**old_value, **new_value} if old_value.get(key) != new_value.get(key)]
        return [
            part
            for key in keys
            for part in _differing_parts(f"{name}.{key}", old_value.get(key, NOT_SET), new_value.get(key, NOT_SET))
        ]
    old_text, new_text = (value if isinstance(value, str) else json.dumps(value) for value in (old_value, new_value))
    return [(name, old_text, new_text)] if old_value != new_value else []


def _shorten(*values: str) -> list[str]:
    """Return different values without their long common beginning."""
    common_length = len([*takewhile(lambda characters: len({*characters}) == 1, zip(*values))])
    start = max(0, common_length - MAX_COMMON_LENGTH) if max(map(len, values)) > MAX_VALUE_LENGTH else 0
    return ["…" * (start > 0) + validation.printable(value[start:], MAX_VALUE_LENGTH) for value in values]


def differing_variables(hosts: Mapping[str, KeptPlans], target: KeptPlan) -> list[str]:
    """Return the variables that differ between the current plan and the plan to return to."""
    plans = {name: hosts[name].newest_plan for name in target.hosts if name in hosts}
    old_variables = {
        name: kept_plan.plan.variables
        for name, kept_plan in plans.items()
        if kept_plan and kept_plan.plan.id != target.id
    }
    new_variables = {
        name: _plan_of(hosts[name].find(target.id)).variables for name in old_variables if hosts[name].find(target.id)
    }
    return describe_differences(old_variables, new_variables)


def other_plan_note(
    plan: Plan, drifts: Mapping[str, Drift], variables_of: Callable[[str], Mapping[str, str]]
) -> str | None:
    """Return a text if the cluster runs a plan other than the inventory's; None if it does not, or if no host keeps a plan.

    :param variables_of: returns the current variables of a host, as in a KeptPlan.
    """
    last_plans = {
        name: last for name in plan.hosts if name in drifts and (last := drifts[name].last) and last.id != plan.id
    }
    if not last_plans:
        return None
    last_plan = last_plans.get(plan.head.host) or last_plans[min(last_plans)]
    state = "serves" if last_plan.served else "was applied in part but never served"
    variables = describe_differences(
        {name: variables_of(name) for name in last_plans}, {name: last.variables for name, last in last_plans.items()}
    )
    advice = (
        f"To {'keep that plan' if last_plan.served else 'continue with that plan'}, change: {'; '.join(variables)}."
        if variables
        else "The variables are the same; hardware, software or the collection has changed."
    )
    release_suffix = "" if last_plan.release == plan.release.ref else " with release {}"
    return validation.printable(
        f"The inventory's plan is {plan.id}{release_suffix.format(plan.release.ref)}, but plan {last_plan.id}"
        f"{release_suffix.format(last_plan.release)} {state} on {', '.join(sorted(last_plans))}: site.yml applies the inventory's plan. {advice}"
    )
