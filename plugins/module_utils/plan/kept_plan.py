# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record that a host keeps of a plan: its own part, as it was applied."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, Line, PlanId

SCHEMA = 2
HostName = Annotated[str, Text()]


class KeptPlan(NamedTuple):
    """Record of a plan on a host."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    id: PlanId
    cluster: Line
    hosts: tuple[HostName, ...]
    release: Line
    declared: Line
    """value of llama_release that selects its release"""
    model: Mapping[str, Any]
    """`model` of the plan"""
    host: HostPlan
    """the host's part of the plan"""
    head: Optional[Mapping[str, Any]] = None
    """`head` of the plan, on the head only"""
    variables: Mapping[str, str] = {}
    """variables that differ from their defaults → value as JSON; llama_release as in `declared`"""


class LastPlan(NamedTuple):
    """The last plan that a host took, as it reports it."""

    id: PlanId
    release: Line
    declared: Line
    served: bool
    """whether it serves; otherwise it was only begun"""
    variables: Mapping[str, str] = {}
    """variables as in the kept plan"""
