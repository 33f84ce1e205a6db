# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record that a host has of a plan: its own part of it, under the id of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request


def record(plan: Plan, name: str, contents: Mapping[str, str | None]) -> history.PlanRecord:
    """The record of one host, before the plan is applied.

    :param contents: path on the controller → text, of files that the run copies; None of one that is not written again.
    """
    host, is_head = plan.hosts[name], name == plan.head.host
    files = tuple(
        file._replace(source=None, content=contents[file.source]) if file.source else file for file in host.files
    )
    return history.PlanRecord(
        schema=history.SCHEMA,
        id=plan.id or "",
        cluster=plan.cluster,
        time=0,
        state=history.APPLYING,
        name=name,
        hosts=tuple(plan.hosts),
        release=plan.release,
        model=plan.model,
        host=host._replace(files=files),
        head=plan.head if is_head else None,
        declared=release_request.declaration(plan.release),
        spared=changes.spared(plan) if is_head else None,
    )
