# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's parts of plans below its prefix: the serving plan, the previous plan, and the plan that is being applied."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import KeptPlan, LastPlan

NEXT, CURRENT, PREVIOUS = SLOTS = "next", "now", "before"
MAX_PLAN_BYTES = 32 << 20
"""Size limit of a plan. On a head, facts make up most of a plan: about 20 kB for each host."""


def read_plan(prefix: str, slot: str) -> KeptPlan | None:
    """Return a kept plan; None if it is missing or unreadable."""
    return typed_json.read_file(KeptPlan, _path(prefix, slot), MAX_PLAN_BYTES)


def _path(prefix: str, slot: str) -> Path:
    return Path(prefix, names.PLANS_FOLDER, f"{slot}.json")


def last_plan(prefix: str) -> LastPlan | None:
    """Return the last plan that the host accepted."""
    pending_plan = read_plan(prefix, NEXT)
    plan = pending_plan or read_plan(prefix, CURRENT)
    return LastPlan(plan.id, plan.release, plan.declared, not pending_plan, plan.variables) if plan else None


def kept_build_ids(prefix: str) -> set[str]:
    plans = filter(None, (read_plan(prefix, slot) for slot in SLOTS))
    return {build.id for plan in plans for build in plan.host.builds}


def keep_plan(prefix: str, plan: KeptPlan, check_mode: bool = False) -> bool:
    """Keep a plan that is being applied, unless it already serves; return whether anything changes.

    :raises OSError: the plan cannot be written; nothing has changed.
    """
    current_plan = read_plan(prefix, CURRENT)
    is_current = current_plan is not None and current_plan.id == plan.id
    # The plan's id does not cover the facts that are stored on the head.
    differs = current_plan != plan if is_current else True
    if differs and not check_mode:
        _write(prefix, CURRENT if is_current else NEXT, plan)
    return differs


def mark_served(prefix: str, plan_id: str, check_mode: bool = False) -> bool:
    """Mark a kept plan as serving and the plan before it as previous; return whether anything changes.

    :raises Refusal: the host does not keep the plan.
    """
    plans = {slot: read_plan(prefix, slot) for slot in SLOTS}
    current_plan, pending_path = plans[CURRENT], _path(prefix, NEXT)
    is_current = current_plan is not None and current_plan.id == plan_id
    differs = not is_current or pending_path.exists()
    if not differs or check_mode:
        return differs
    if not is_current:
        served_plan = next((plan for plan in plans.values() if plan and plan.id == plan_id), None)
        if not served_plan:
            raise Refusal(f"{prefix}/{names.PLANS_FOLDER} does not contain plan {plan_id}: run site.yml")
        if current_plan:
            _write(prefix, PREVIOUS, current_plan)
        _write(prefix, CURRENT, served_plan)
    pending_path.unlink(missing_ok=True)
    return True


def _write(prefix: str, slot: str, plan: KeptPlan) -> None:
    text = json.dumps(typed_json.dump(plan), separators=(",", ":"))
    if len(text.encode()) > MAX_PLAN_BYTES:
        raise Refusal(
            f"this host's part of the plan takes {len(text) >> 20} MiB, but at most {MAX_PLAN_BYTES >> 20} MiB can be kept"
        )
    files.replace_file(_path(prefix, slot), text, 0o600)
