# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The empty plan, which a teardown applies: no service, build, link, rule or kernel parameter, and what is to be removed after that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Each, Maybe, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs

NOTHING: dict[str, Any] = {
    "services": [],
    "builds": [],
    "keep_releases": 1,
    "links": [],
    "firewall": [],
    "tuning": {"parameters": {}, "profile": "", "reboot": False},
}
READ: dict[str, Any] = {
    **{key: cluster_inputs.KNOWN[key] for key in ("scope", "prefix", "cache")},
    "accounts": Each(Text()),
    "made_accounts": Maybe([Text()]),
    "defined": [Text()],
    "neighbours": Maybe([{"cluster": Text()}]),
    "installed": Maybe(bool),
}
"""Facts of which the empty plan is made, as facts/host.py returns them."""


def plan(answers: Mapping[str, Mapping[str, Any]], cluster: str = names.DEFAULT_CLUSTER) -> dict[str, Any]:
    """The empty plan for the hosts that answered; the roles take of it what they take of any other plan.

    :param answers: host → what host_info returned there, empty where it did not answer.
    :raises Refusal: a host reports facts of another form.
    """
    owner = names.of(cluster)
    return {
        "hosts": {name: _host(owner, name, answer["facts"]) for name, answer in answers.items() if "facts" in answer}
    }


def _check(name: str, facts: Any) -> None:
    read = {key: facts[key] for key in READ if key in facts} if isinstance(facts, Mapping) else facts
    problem = validation.problem("", read) or validation.mismatch("", read, READ)
    if problem:
        said = f"{problem.where} {problem.why}".lstrip(" .")
        raise Refusal(
            f"the facts of {name} are not as this version of the collection reads them ({said}): look at that host, and remove it from the "
            "inventory to tear down the others"
        )


def _host(owner: names.Names, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    _check(name, facts)
    prefix = facts["prefix"]
    homes = {owner.account: prefix, **({} if facts.get("neighbours") else {names.BUILD_ACCOUNT: names.BUILD_HOME})}
    made = facts.get("made_accounts") or ()
    own = [name for name, home in facts["accounts"].items() if homes.get(name) == home and name in made]
    return {
        **facts,
        **NOTHING,
        "names": owner.as_dict(),
        "neighbours": facts.get("neighbours") or [],
        "account": owner.account if facts["scope"] == "system" else None,
        "stale": facts["defined"],
        "accounts": own if facts["scope"] == "system" else [],
        "left": bool(facts["defined"] or facts.get("installed", True) or (own and facts["scope"] == "system")),
        "build_account": names.BUILD_ACCOUNT if facts["scope"] == "system" and names.BUILD_ACCOUNT in own else None,
    }
