# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record that a host keeps of a plan: its own part, as it was applied."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, Line, PlanId

SCHEMA = 2
HostName = Annotated[str, Text()]


class KeptPlan(NamedTuple):
    """What a host keeps of a plan."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    id: PlanId
    cluster: Line
    hosts: tuple[HostName, ...]
    release: Line
    declared: Line
    """what llama_release has to be for it"""
    model: Mapping[str, Any]
    """as the plan has it"""
    host: HostPlan
    """the host's part of the plan"""
    head: Optional[Mapping[str, Any]] = None
    """the same, on the head's host"""
    variables: Mapping[str, str] = {}
    """the host's variables that were not their defaults → value, as JSON; llama_release as `declared` says it"""


class LastPlan(NamedTuple):
    """What a host reports of the plan that it took last."""

    id: PlanId
    release: Line
    declared: Line
    served: bool
    """whether it serves; else it was begun"""
    variables: Mapping[str, str] = {}
    """as the kept plan has them"""
