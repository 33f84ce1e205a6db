# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The speed that a cluster measured last beside the planned one, and the plan that is corrected by it.

Only predicted speeds of generation change, after the plan is complete: neither layers nor command lines depend on what was measured.
"""

import time
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Correction, Estimate, Plan, SpeedRange

MOST = 5.0
"""By which a plan may be corrected in both directions. Where it is wrong by more, something else is wrong."""
SURE, ALIKE = 1.12, 1.2
"""By which a corrected speed may be off, of the model that was measured with this release, and of another one. Four of five published figures of a
machine are within 1.10 and 1.12 of what another figure of the same machine says (tests/benchmarks/published_speeds.csv)."""
SAME = 1.1
"""A completion of a few tokens that is so near to the corrected speed says nothing new."""

Speed = Annotated[float, Number(0.0001, 10**9, real=True)]
Name = Annotated[str, Text(longest=255)]


class SpeedRecord(NamedTuple):
    """What the head keeps."""

    date: Annotated[str, Text(r"\d{4}-\d\d-\d\d")]
    release: Name
    model: Name
    devices: tuple[Name, ...]
    """that held the model"""
    measured: Speed
    """tokens per second of generation"""
    planned: Speed
    """the same without any correction"""


def readable(found: Any) -> Optional[SpeedRecord]:
    """The record, or None where the text is not one."""
    try:
        record = typed_json.parse(SpeedRecord, found)
    except typed_json.Mismatch:
        return None
    return record if 1 / MOST <= record.measured / record.planned <= MOST else None


def _speculates(plan: Plan) -> bool:
    """Whether llama-server predicts tokens, which the plan does not count with."""
    return not {"--spec-type", "--model-draft"}.isdisjoint(plan.head.argv)


def of_plan(plan: Plan, measured: Optional[float]) -> Optional[SpeedRecord]:
    """The record of a speed that was measured with a plan; None where it says nothing of generation by these devices, or nothing new.

    :param plan: of one model.
    """
    estimate = plan.estimate
    planned, known = estimate.generation_tokens_per_s, estimate.correction
    if not measured or not planned or plan.model.known_answer or _speculates(plan):
        return None
    factor = known.factor if known else 1.0
    same = known and (known.release, known.model) == (plan.release.ref, plan.model.name)
    if same and 1 / SAME <= measured / planned <= SAME:
        return None
    date = time.strftime("%Y-%m-%d")
    record = SpeedRecord(date, plan.release.ref, plan.model.name, _devices(estimate), measured, planned / factor)
    return readable(typed_json.dump(record))


def corrected(plan: Plan, record: Optional[SpeedRecord]) -> Plan:
    """The plan with speeds of generation as the record says, where the same devices hold its models."""
    if not record:
        return plan
    several = [
        one._replace(estimate=_corrected(one.estimate, plan.release.ref, one.model.name, record))
        for one in plan.head.models or ()
    ]
    head = plan.head._replace(models=tuple(several)) if several else plan.head
    estimate = (
        plan.estimate
        if plan.model.known_answer
        else _corrected(plan.estimate, plan.release.ref, plan.model.name, record)
    )
    return plan._replace(head=head, estimate=estimate)


def _devices(estimate: Estimate) -> tuple[str, ...]:
    return tuple(sorted(f"{device.device} of {device.host}" for device in estimate.devices))


def _corrected(estimate: Estimate, release: str, model: str, record: SpeedRecord) -> Estimate:
    if estimate.generation_tokens_per_s is None or _devices(estimate) != record.devices:
        return estimate
    factor = record.measured / record.planned
    off = SURE if (record.release, record.model) == (release, model) else ALIKE

    def speed_of(planned: float) -> float:
        return float(f"{planned * factor:.3g}")

    def range_of(bounds: SpeedRange) -> SpeedRange:
        """Around the same middle, and no wider than before."""
        middle = (bounds.low * bounds.high) ** 0.5
        least = min(off, bounds.high / middle)
        return SpeedRange(float(f"{middle * factor / least:.2g}"), float(f"{middle * factor * least:.2g}"))

    return estimate._replace(
        generation_tokens_per_s=speed_of(estimate.generation_tokens_per_s),
        generation_range=estimate.generation_range and range_of(estimate.generation_range),
        at_context=tuple(
            one._replace(
                generation_tokens_per_s=speed_of(one.generation_tokens_per_s),
                generation_range=range_of(one.generation_range),
            )
            for one in estimate.at_context
        ),
        correction=Correction(round(factor, 3), record.date, record.model, record.release),
    )
