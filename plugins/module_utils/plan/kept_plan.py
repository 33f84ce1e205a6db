# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of a plan on a host: the host's own part, as it was applied."""

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
    """value of llama_release that selects the plan's release"""
    model: Mapping[str, Any]
    """`model` of the plan"""
    host: HostPlan
    """the host's part of the plan"""
    head: Optional[Mapping[str, Any]] = None
    """`head` of the plan, on the head only"""
    variables: Mapping[str, str] = {}
    """JSON value of each variable that differs from its default; llama_release as in `declared`"""


class LastPlan(NamedTuple):
    """The last plan that a host accepted, according to the host."""

    id: PlanId
    release: Line
    declared: Line
    served: bool
    """whether it serves; otherwise it was only applied in part"""
    variables: Mapping[str, str] = {}
    """variables as in the kept plan"""
