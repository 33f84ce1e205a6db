# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The empty plan, which a teardown applies: no service, build, link, rule or kernel parameter, and what is to be removed after that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names

NOTHING: dict[str, Any] = {
    "services": [],
    "builds": [],
    "keep_releases": 1,
    "links": [],
    "firewall": [],
    "tuning": {"parameters": {}, "profile": "", "reboot": False},
}


def plan(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The empty plan for the hosts that answered; the roles take of it what they take of any other plan.

    :param answers: host → what host_info returned there, empty where it did not answer.
    """
    return {"hosts": {name: _host(answer["facts"]) for name, answer in answers.items() if "facts" in answer}}


def _host(facts: Mapping[str, Any]) -> dict[str, Any]:
    prefix = facts["prefix"]
    own = [name for name, home in facts["accounts"].items() if home == prefix]
    return {
        **facts,
        **NOTHING,
        "stale": facts["defined"],
        "folders": [f"{prefix}/{name}" for name in names.INSTALLED],
        "accounts": own if facts["scope"] == "system" else [],
    }
