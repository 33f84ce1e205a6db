# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Steps from the present to the planned rules of a firewall. This module changes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall import rules
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule


class Steps(NamedTuple):
    differs: bool
    rules_before: list[str]
    rules_after: list[str]
    rules_to_add: list[dict[str, Any]]
    """arguments of the module that configures the manager, in order"""
    rules_to_remove: list[dict[str, Any]]
    text: str = ""
    """text of nftables' file"""
    drop_chains: tuple[str, ...] = ()
    """foreign nftables chains that drop packets by default: our table cannot open a port in them"""


def steps_of(
    manager: str | None, rule_plans: Sequence[FirewallRule], keep_obsolete_rules: bool, system: System
) -> Steps:
    """Return the steps to the planned rules. Obsolete rules can be kept while something may still listen on their ports."""
    if not manager:
        return Steps(False, [], [], [], [])
    state = rules.state_of(manager, rule_plans, system)
    goals = state.goals
    obsolete_rules = [] if keep_obsolete_rules else state.obsolete_rules
    all_rules = [*goals, *(rule for rule in state.present_rules if rule not in [*goals, *obsolete_rules])]
    texts_before = [
        f"{rule}{rules.PARTIAL_NOTE if rule in state.partial_rules else ''}" for rule in set(state.present_rules)
    ]
    differs = bool(state.missing_rules or obsolete_rules)
    summary = differs, sorted(texts_before), sorted(all_rules)
    if manager == "nftables":
        text = _nft_script(all_rules) if all_rules and differs else system.text(rules.NFT_FILE) if all_rules else ""
        return Steps(*summary, [], [], text, _drop_chains(system) if all_rules else ())
    if manager == "ufw":
        # ufw inserts each rule first, so accepting rules are added again after dropping ones.
        destination_of = itemgetter("to_ip", "to_port")
        closed_destinations = {destination_of(goals[rule]) for rule in state.missing_rules if " deny " in rule}
        allow_rules = [rule for rule in state.present_rules if rule in goals and " allow " in rule]
        moved_rules = [rule for rule in allow_rules if destination_of(goals[rule]) in closed_destinations]
        additions = [goals[rule] for rule in reversed([*goals]) if rule in [*state.missing_rules, *moved_rules]]
        deletions = [{**goals[rule], "delete": True} for rule in moved_rules]
        return Steps(*summary, deletions + additions, [rules.ufw_arguments(rule) for rule in obsolete_rules])
    additions, removals = ([*map(rules.firewalld_arguments, texts)] for texts in (state.missing_rules, obsolete_rules))
    return Steps(*summary, additions, removals)


def _drop_chains(system: System) -> tuple[str, ...]:
    chain_listing = system.run(["nft", "list", "chains"])
    return tuple(re.findall(r"chain (\S+) {\n\s+type filter hook input [^\n]*policy drop", chain_listing))


def _nft_script(comments: Sequence[str]) -> str:
    """Return a script that replaces the table, whether it exists or not."""
    rule_lines = "".join(f"    {_nft_rule(comment)}\n" for comment in sorted(comments) if len(comment.split()) == 6)
    return (
        f"# {names.DEFINITION_MARK}: ports of llama.cpp, open to planned clients and closed to everyone else.\n"
        f"table {rules.NFT_TABLE}\ndelete table {rules.NFT_TABLE}\n"
        f"table {rules.NFT_TABLE} {{\n  chain input {{\n    type filter hook input priority -10; policy accept;\n{rule_lines}  }}\n}}\n"
    )


def _nft_rule(comment: str) -> str:
    action, source, _word, address, _port, port = comment.split()
    source_filter = "" if source == names.ANY_NETWORK else f"ip saddr {source} "
    destination = "ip daddr 0.0.0.0/0" if address == names.ANY_ADDRESS else f"ip daddr {address}"
    lo_filter, flag_filter = ('iifname != "lo" ', " tcp flags & (syn | ack) == syn") if action == "drop" else ("", "")
    return f'{lo_filter}{source_filter}{destination} tcp dport {port}{flag_filter} {action} comment "{names.PREFIX} {comment}"'
