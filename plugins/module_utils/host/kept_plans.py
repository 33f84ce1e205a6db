# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plans that a host keeps below its prefix, each its own part: the one that serves, the one that served before, and the one that is applied now."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import KeptPlan, LastPlan

NEXT, NOW, BEFORE = PLACES = "next", "now", "before"
FILE_BYTES = 32 << 20
"""The head's facts are most of it, about 20 kB for each host."""


def read(prefix: str, place: str) -> KeptPlan | None:
    """One of the kept plans; None where there is none that this account can use."""
    try:
        return typed_json.parse(KeptPlan, reading.read_object(_path(prefix, place), FILE_BYTES))
    except (OSError, ValueError):
        return None


def _path(prefix: str, place: str) -> Path:
    return Path(prefix, names.PLANS, f"{place}.json")


def last(prefix: str) -> LastPlan | None:
    """What the host took last."""
    begun = read(prefix, NEXT)
    kept = begun or read(prefix, NOW)
    return LastPlan(kept.id, kept.release, kept.declared, not begun, kept.variables) if kept else None


def builds(prefix: str) -> set[str]:
    """Ids of the builds of all kept plans."""
    kept = filter(None, (read(prefix, place) for place in PLACES))
    return {build.id for plan in kept for build in plan.host.builds}


def begin(prefix: str, plan: KeptPlan, check: bool = False) -> bool:
    """Keeps a plan that is applied now, unless it is the one that serves; whether anything changes.

    :raises OSError: nothing is changed.
    """
    present = read(prefix, NOW)
    same = present is not None and present.id == plan.id
    # Not all that a host's part has is in the id of the plan: facts that are left on the head are not.
    changed = present != plan if same else True
    if changed and not check:
        _write(prefix, NOW if same else NEXT, plan)
    return changed


def mark_served(prefix: str, identity: str, check: bool = False) -> bool:
    """Notes that a kept plan serves; whether anything changes. The one that served until now becomes the one before.

    :raises Refusal: the host does not keep it.
    """
    kept = {place: read(prefix, place) for place in PLACES}
    present, begun = kept[NOW], _path(prefix, NEXT)
    same = present is not None and present.id == identity
    changed = not same or begun.exists()
    if not changed or check:
        return changed
    if not same:
        new = next((plan for plan in kept.values() if plan and plan.id == identity), None)
        if not new:
            raise Refusal(f"{prefix}/{names.PLANS} has no plan {identity}: run site.yml")
        if present:
            _write(prefix, BEFORE, present)
        _write(prefix, NOW, new)
    begun.unlink(missing_ok=True)
    return True


def _write(prefix: str, place: str, plan: KeptPlan) -> None:
    text = json.dumps(typed_json.dump(plan), separators=(",", ":"))
    if len(text.encode()) > FILE_BYTES:
        raise Refusal(f"the plan has {len(text) >> 20} MiB for this host, and {FILE_BYTES >> 20} MiB can be kept")
    files.replace_file(_path(prefix, place), text, 0o600)
