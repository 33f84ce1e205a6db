# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The empty plan, which a teardown applies: no service, build, link, rule or kernel parameter; and the leftovers to remove afterwards."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import PathText

EMPTY_HOST_PLAN: dict[str, Any] = {
    "services": [],
    "builds": [],
    "links": [],
    "firewall": [],
    "tuning": {"parameters": {}, "reboot": False},
}


class TeardownFacts(NamedTuple):
    """Facts for the empty plan, as facts/host.py returns them."""

    scope: Annotated[str, ("system", "user")]
    prefix: PathText
    cache: PathText
    accounts: Mapping[str, str]
    defined: tuple[str, ...]
    created_accounts: tuple[str, ...] = ()
    cluster: Optional[str] = None
    installed: Optional[bool] = None
    firewall: Optional[Annotated[str, names.FIREWALLS]] = None


def empty_plan(answers: Mapping[str, Mapping[str, Any]], cluster: str = names.DEFAULT_CLUSTER_GROUP) -> dict[str, Any]:
    """Return the empty plan for the hosts that answered, which the roles apply like any other plan.

    :param answers: host → result of host_info, empty for a host that did not answer.
    :raises Refusal: a host's facts are invalid, or the host belongs to another cluster.
    """
    return {
        "hosts": {name: _part(cluster, name, answer["facts"]) for name, answer in answers.items() if "facts" in answer}
    }


def _part(cluster: str, name: str, facts: Any) -> dict[str, Any]:
    report = typed_json.parse_report(name, "itself", TeardownFacts, facts)
    if report.cluster not in (None, cluster):
        raise Refusal(
            f"{name} belongs to the cluster {report.cluster}, not to {cluster}: remove it from the groups of {cluster}"
        )
    is_system_wide = report.scope == "system"
    homes = {names.ACCOUNT: report.prefix, names.BUILD_ACCOUNT: names.BUILD_HOME}
    accounts = [
        name for name, home in report.accounts.items() if homes.get(name) == home and name in report.created_accounts
    ]
    return {
        **facts,
        **EMPTY_HOST_PLAN,
        "account": names.ACCOUNT if is_system_wide else None,
        "firewall_manager": report.firewall if is_system_wide else None,
        "unplanned": list(report.defined),
        "accounts": accounts if is_system_wide else [],
        "to_remove": bool(report.defined or report.installed is not False or (accounts and is_system_wide)),
        "build_account": names.BUILD_ACCOUNT if is_system_wide and names.BUILD_ACCOUNT in accounts else None,
    }
