# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What brings the rules of a firewall to the planned ones. Changes nothing."""

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
    """From one to the other."""

    differs: bool
    before: list[str]
    after: list[str]
    add: list[dict[str, Any]]
    """arguments of the module that drives the manager, in order"""
    remove: list[dict[str, Any]]
    text: str = ""
    """of the file of nftables"""
    closing: tuple[str, ...] = ()
    """chains of others in nftables that drop what they do not accept: our table cannot open a port there"""


def steps_of(manager: str | None, rule_plans: Sequence[FirewallRule], keep: bool, system: System) -> Steps:
    """What brings the active manager to these rules.

    :param keep: leave what is not planned any more: something may still listen there.
    """
    if not manager:
        return Steps(False, [], [], [], [])
    state = rules.state_of(manager, rule_plans, system)
    obsolete = [] if keep else state.obsolete_rules
    rules_after = [
        *state.planned_rules,
        *(rule for rule in state.present if rule not in [*state.planned_rules, *obsolete]),
    ]
    rules_before = [f"{rule}{rules.PARTIAL_NOTE if rule in state.partial else ''}" for rule in set(state.present)]
    differs = bool(state.missing or obsolete)
    summary = differs, sorted(rules_before), sorted(rules_after)
    if manager == "nftables":
        text = (
            _nft_table(rules_after) if rules_after and differs else system.text(rules.NFT_FILE) if rules_after else ""
        )
        return Steps(*summary, [], [], text, _closing_chains(system) if rules_after else ())
    if manager == "ufw":
        # Each is put first, so what accepts has to be put again after what drops.
        destination = itemgetter("to_ip", "to_port")
        closed = {destination(state.planned_rules[rule]) for rule in state.missing if " deny " in rule}
        accepting = [rule for rule in state.present if rule in state.planned_rules and " allow " in rule]
        moved = [rule for rule in accepting if destination(state.planned_rules[rule]) in closed]
        add = [
            state.planned_rules[rule] for rule in reversed([*state.planned_rules]) if rule in [*state.missing, *moved]
        ]
        deletions = [{**state.planned_rules[rule], "delete": True} for rule in moved]
        return Steps(*summary, deletions + add, [rules.ufw_arguments(rule) for rule in obsolete])
    added, removed = ([*map(rules.firewalld_arguments, texts)] for texts in (state.missing, obsolete))
    return Steps(*summary, added, removed)


def _closing_chains(system: System) -> tuple[str, ...]:
    printed = system.run(["nft", "list", "chains"])
    return tuple(re.findall(r"chain (\S+) {\n\s+type filter hook input [^\n]*policy drop", printed))


def _nft_table(comments: Sequence[str]) -> str:
    """What replaces the table, whether it exists or not."""
    inner = "".join(f"    {_nft_rule(comment)}\n" for comment in sorted(comments) if len(comment.split()) == 6)
    return (
        f"# {names.DEFINITION_MARK}: ports of llama.cpp, open to planned clients and closed to everybody else.\n"
        f"table {rules.NFT_TABLE}\ndelete table {rules.NFT_TABLE}\n"
        f"table {rules.NFT_TABLE} {{\n  chain input {{\n    type filter hook input priority -10; policy accept;\n{inner}  }}\n}}\n"
    )


def _nft_rule(comment: str) -> str:
    action, source, _word, address, _port, port = comment.split()
    client = "" if source == names.EVERYBODY else f"ip saddr {source} "
    destination = "ip daddr 0.0.0.0/0" if address == names.EVERY_ADDRESS else f"ip daddr {address}"
    new, flags = ('iifname != "lo" ', " tcp flags & (syn | ack) == syn") if action == "drop" else ("", "")
    return f'{new}{client}{destination} tcp dport {port}{flags} {action} comment "{names.NAME} {comment}"'
