# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The empty plan, which a teardown applies: no service, build, link, rule or kernel parameter, and what is to be removed after that."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Path

NOTHING: dict[str, Any] = {
    "services": [],
    "builds": [],
    "links": [],
    "firewall": [],
    "tuning": {"parameters": {}, "reboot": False},
}


class Installed(NamedTuple):
    """Facts of which the empty plan is made, as facts/host.py returns them."""

    scope: Annotated[str, ("system", "user")]
    prefix: Path
    cache: Path
    accounts: Mapping[str, str]
    defined: tuple[str, ...]
    made_accounts: tuple[str, ...] = ()
    cluster: Optional[str] = None
    installed: Optional[bool] = None
    firewall: Optional[Annotated[str, names.FIREWALLS]] = None


def plan(answers: Mapping[str, Mapping[str, Any]], cluster: str = names.CLUSTER_GROUP) -> dict[str, Any]:
    """The empty plan for the hosts that answered; the roles take of it what they take of any other plan.

    :param answers: host → what host_info returned there, empty where it did not answer.
    :raises Refusal: a host reports facts of another form, or belongs to another cluster.
    """
    return {
        "hosts": {name: _host(cluster, name, answer["facts"]) for name, answer in answers.items() if "facts" in answer}
    }


def _host(cluster: str, name: str, facts: Any) -> dict[str, Any]:
    known = typed_json.reported(name, "itself", Installed, facts)
    if known.cluster not in (None, cluster):
        raise Refusal(
            f"{name} belongs to the cluster {known.cluster}, and not to {cluster}: leave it out of the groups of {cluster}"
        )
    system, homes = known.scope == "system", {names.ACCOUNT: known.prefix, names.BUILD_ACCOUNT: names.BUILD_HOME}
    accounts = [
        name for name, home in known.accounts.items() if homes.get(name) == home and name in known.made_accounts
    ]
    return {
        **facts,
        **NOTHING,
        "account": names.ACCOUNT if system else None,
        "firewall_manager": known.firewall if system else None,
        "unplanned": list(known.defined),
        "accounts": accounts if system else [],
        "to_remove": bool(known.defined or known.installed is not False or (accounts and system)),
        "build_account": names.BUILD_ACCOUNT if system and names.BUILD_ACCOUNT in accounts else None,
    }
