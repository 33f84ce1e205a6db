# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Planned bytes on each device, for the progress of a load."""

from typing import Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Subject


def expected_of(plan: Union[Plan, Subject, None]) -> loading.ExpectedBytes:
    """:param plan: plan; None if unknown."""
    if not plan or not plan.placement:
        return loading.ExpectedBytes()
    weights = [(entry.endpoint, entry.weights_mib) for entry in plan.placement]
    endpoints = {endpoint for endpoint, _mib in weights}
    cached = any(
        worker.cache and worker.endpoint in endpoints for host in plan.hosts.values() for worker in host.workers
    )
    return loading.expected_bytes([*weights, (None, plan.head.cpu.weights_mib)], cached)
