# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's parts of plans below its prefix: the serving, the previous, and the one that is being applied."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import KeptPlan, LastPlan

NEXT, CURRENT, PREVIOUS = PLACES = "next", "now", "before"
FILE_BYTES = 32 << 20
"""Limit of a plan. The head's facts are most of it, about 20 kB for each host."""


def read_plan(prefix: str, place: str) -> KeptPlan | None:
    """Return one of the kept plans; None without one that this account can use."""
    try:
        return typed_json.parse(KeptPlan, reading.read_object(_path(prefix, place), FILE_BYTES))
    except (OSError, ValueError):
        return None


def _path(prefix: str, place: str) -> Path:
    return Path(prefix, names.PLANS, f"{place}.json")


def last_plan(prefix: str) -> LastPlan | None:
    """Return the plan that the host accepted last."""
    pending = read_plan(prefix, NEXT)
    plan = pending or read_plan(prefix, CURRENT)
    return LastPlan(plan.id, plan.release, plan.declared, not pending, plan.variables) if plan else None


def kept_builds(prefix: str) -> set[str]:
    plans = filter(None, (read_plan(prefix, place) for place in PLACES))
    return {build.id for plan in plans for build in plan.host.builds}


def keep_plan(prefix: str, plan: KeptPlan, check: bool = False) -> bool:
    """Keep a plan that is applied now, unless it already serves; return whether anything changes.

    :raises OSError: nothing has changed.
    """
    present = read_plan(prefix, CURRENT)
    is_current = present is not None and present.id == plan.id
    # The plan's id does not cover the facts that are stored on the head.
    differs = present != plan if is_current else True
    if differs and not check:
        _write(prefix, CURRENT if is_current else NEXT, plan)
    return differs


def mark_served(prefix: str, identity: str, check: bool = False) -> bool:
    """Mark a kept plan as serving and the serving one as previous; return whether anything changes.

    :raises Refusal: the host does not keep the plan.
    """
    plans = {place: read_plan(prefix, place) for place in PLACES}
    present, pending_path = plans[CURRENT], _path(prefix, NEXT)
    is_current = present is not None and present.id == identity
    differs = not is_current or pending_path.exists()
    if not differs or check:
        return differs
    if not is_current:
        new = next((plan for plan in plans.values() if plan and plan.id == identity), None)
        if not new:
            raise Refusal(f"{prefix}/{names.PLANS} has no plan {identity}: run site.yml")
        if present:
            _write(prefix, PREVIOUS, present)
        _write(prefix, CURRENT, new)
    pending_path.unlink(missing_ok=True)
    return True


def _write(prefix: str, place: str, plan: KeptPlan) -> None:
    text = json.dumps(typed_json.dump(plan), separators=(",", ":"))
    if len(text.encode()) > FILE_BYTES:
        raise Refusal(
            f"the plan has {len(text) >> 20} MiB for this host, but at most {FILE_BYTES >> 20} MiB can be kept"
        )
    files.replace_file(_path(prefix, place), text, 0o600)
