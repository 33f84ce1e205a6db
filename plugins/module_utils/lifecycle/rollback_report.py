# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sentences about a rollback: what failed, what serves now, what the inventory says, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle.rollback import UNTOUCHED, Target
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan


class Failure(NamedTuple):
    """A change that does not serve."""

    plan: str
    release: str
    reasons: Mapping[str, str]
    """Host → what failed there."""
    lost: Collection[str]
    target: Target | None
    """That the cluster went back to, and that serves; None where it did not."""
    why_not: str


def failed_change(failure: Failure) -> str:
    """What failed, whether the old release serves again, and what to do. The reasons may end in lines of logs."""
    lost = ", ".join(sorted(failure.lost))
    reasons = _reasons(failure.reasons, failure.lost)
    texts = [f"Plan {failure.plan} (release {failure.release}) does not serve: {reasons}."]
    if failure.target:
        texts.append(
            f"The cluster went back by itself: plan {failure.target.id} (release {failure.target.release}) serves again. Fix what failed and run "
            "site.yml again, or set the inventory back to that release. rollback.yml would go back one more plan."
        )
    else:
        texts.append(
            f"The old release does NOT serve again: {_lines(failure.why_not) or 'see the errors above'}. Fix what failed and run site.yml again for the new "
            "release, or run rollback.yml for the old one."
        )
    if lost:
        playbooks = "rollback.yml" if failure.target else "rollback.yml or site.yml"
        texts.append(f"When {lost} answers again, run {playbooks}: it may have the other release until then.")
    return "\n".join(texts)


def failed_rollback(target: Target | None, reasons: Mapping[str, str], lost: Collection[str]) -> str:
    """Why a rollback did not end, and what to do.

    :param target: None where none was chosen.
    """
    why = _reasons(reasons, lost)
    if not target or UNTOUCHED in why:
        return f"The cluster did not go back: {why}."
    after = f"When {', '.join(sorted(lost))} answers again, run" if lost else "Fix that and run"
    return (
        f"The cluster did not go back to plan {target.id} (release {target.release}): {why}.\n{after} rollback.yml again with "
        f"-e llama_rollback_to={target.id}: it goes on where it stopped."
    )


def _reasons(reasons: Mapping[str, str], lost: Collection[str]) -> str:
    """What failed where. Hosts with the same text are named together."""
    hosts: dict[str, list[str]] = {}
    for name, text in reasons.items():
        hosts.setdefault(_lines(text), []).append(name)
    texts = [f"{', '.join(sorted(lost))} was lost in the middle"] if lost else []
    texts += [f"{', '.join(named)}: {text}" for text, named in hosts.items()]
    return "; ".join(texts) or "see the errors above"


def _lines(text: str) -> str:
    return "\n".join(validation.printable(line) for line in str(text).splitlines()).rstrip(".\n ")


def served(target: Target, release: str, check: bool = False) -> str:
    """What serves after a rollback, and what the next run of site.yml would do.

    :param release: llama_release of the inventory as JSON; empty text where it is not set.
    """
    inventory = "no llama_release" if release in ("", '""') else f"llama_release: {release}"
    texts = [
        f"Plan {target.id} with release {target.release} {'would serve' if check else 'serves'}. The inventory has "
        f"{inventory}, and the next site.yml goes to what the inventory says. To stay here, set llama_release: "
        f"{target.declared or target.release}. rollback.yml without llama_rollback_to would go to the plan before this."
    ]
    if target.uninvolved:
        texts.append(f"{', '.join(target.uninvolved)} had no part in that plan, and nothing was changed there.")
    if target.away:
        texts.append(
            f"{', '.join(target.away)} does not answer: the head serves without it, after a wait for it where it is used. When it answers again, run "
            f"rollback.yml with -e llama_rollback_to={target.id}: it may have another release until then."
        )
    return validation.printable(" ".join(texts), 8192)


def other_plan(plan: Plan, drifts: Mapping[str, Drift]) -> str | None:
    """A sentence where the cluster runs another plan than the inventory's; None where it runs that one, or no host has recorded a plan.

    :param plan: completed, with ``id``.
    :param drifts: hosts that answered → how they differ.
    """
    last = {}
    for name, drift in drifts.items():
        newest = next(iter(history.newest_first(drift.plans)), None)
        if newest and name in plan.hosts and newest.id != plan.id:
            last[name] = newest
    if not last:
        return None
    other = last.get(plan.head.host) or last[min(last)]
    state = "serves" if other.state == history.SERVED else "was begun and never served"
    return validation.printable(
        f"The inventory plans release {plan.release.ref} (plan {plan.id}), but on {', '.join(sorted(last))} plan {other.id} with release "
        f"{other.release} {state}: site.yml goes to what the inventory says. To stay, set llama_release: {other.declared or other.release}."
    )
