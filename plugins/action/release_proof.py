# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fails unless the instances on the staging ports have proven the release. Everything that it takes is an argument of the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import release_proof
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class Arguments(NamedTuple):
    plan: Plan
    errors: Mapping[str, str]
    report: Report | None = None


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        why = release_proof.failure(*arguments)
        return {"changed": False, **({"failed": True, "msg": why} if why else {})}
