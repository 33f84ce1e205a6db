# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Record of the cluster's last measured speed, which corrects a plan, its fallbacks and its other shapes.

Only predicted speeds of generation change, after the plan is complete: neither layers nor command lines depend on a measurement.
"""

import time
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Correction, Estimate, Plan, SpeedRange

MAX_CORRECTION_FACTOR = 5.0
"""Largest factor by which a measurement corrects a plan. A larger difference has another cause."""
SAME_RELEASE_UNCERTAINTY, OTHER_RELEASE_UNCERTAINTY = 1.12, 1.2
"""Uncertainty of a corrected speed of the measured model, with the measured release and with another release.
Four of five published figures of a machine lie within 1.10 and 1.12 of the prediction from another figure (tests/benchmarks/published_speeds.csv)."""
NEGLIGIBLE_FACTOR = 1.1
"""A measurement this close to the corrected speed is not recorded."""

TokensPerSecond = Annotated[float, Number(0.0001, 10**9, allows_fractions=True)]
Name = Annotated[str, Text(max_length=255)]


class SpeedRecord(NamedTuple):
    """Record of a measured speed on the head."""

    date: Annotated[str, Text(r"\d{4}-\d\d-\d\d")]
    release: Name
    model: Name
    devices: tuple[Name, ...]
    """devices that held the model"""
    measured: TokensPerSecond
    """tokens per second of generation"""
    planned: TokensPerSecond
    """planned tokens per second without any correction"""


def parse_record(data: Any) -> Optional[SpeedRecord]:
    try:
        record = typed_json.parse(SpeedRecord, data)
    except typed_json.Mismatch:
        return None
    return record if 1 / MAX_CORRECTION_FACTOR <= record.measured / record.planned <= MAX_CORRECTION_FACTOR else None


def new_record(plan: Plan, speed: Optional[float]) -> Optional[SpeedRecord]:
    """Return the record of a speed that was measured with a plan; None if it provides no new information about these devices."""
    estimate = plan.estimate
    planned_speed, correction = estimate.generation_tokens_per_s, estimate.correction
    uses_speculation = {"--spec-type", "--model-draft"}.intersection(plan.head.argv)  # the plan ignores speculation
    if not speed or not planned_speed or plan.model.known_answer or uses_speculation:
        return None
    factor = correction.factor if correction else 1.0
    is_same_model = correction and (correction.release, correction.model) == (plan.release.ref, plan.model.name)
    if is_same_model and 1 / NEGLIGIBLE_FACTOR <= speed / planned_speed <= NEGLIGIBLE_FACTOR:
        return None
    date = time.strftime("%Y-%m-%d")
    record = SpeedRecord(date, plan.release.ref, plan.model.name, _devices(estimate), speed, planned_speed / factor)
    return parse_record(typed_json.dump(record))


def correct_plan(plan: Plan, record: Optional[SpeedRecord]) -> Plan:
    """Return the plan with its generation speeds corrected by the record, if the same devices hold the measured model."""
    if not record:
        return plan
    models = [
        model._replace(estimate=_correct_estimate(model.estimate, plan.release.ref, model.model.name, record))
        for model in plan.head.models or ()
    ]
    head = plan.head._replace(models=tuple(models)) if models else plan.head
    estimate = (
        plan.estimate
        if plan.model.known_answer
        else _correct_estimate(plan.estimate, plan.release.ref, plan.model.name, record)
    )
    fallbacks = plan.fallbacks
    if estimate.correction:
        fallbacks = tuple(_scale(fallback, estimate.correction.factor) for fallback in fallbacks)
    return plan._replace(head=head, estimate=estimate, fallbacks=fallbacks)


def _scale(value: Any, factor: float) -> Any:
    """Return the value with its generation speed, and the bounds of its range, multiplied by a factor."""
    if value is None or value.generation_tokens_per_s is None:
        return value
    changes: dict[str, Any] = {"generation_tokens_per_s": float(f"{value.generation_tokens_per_s * factor:.3g}")}
    bounds = getattr(value, "generation_range", None)
    if bounds:
        changes["generation_range"] = SpeedRange(*(float(f"{bound * factor:.2g}") for bound in bounds))
    return value._replace(**changes)


def _devices(estimate: Estimate) -> tuple[str, ...]:
    return tuple(sorted(f"{device.device} of {device.host}" for device in estimate.devices))


def _correct_estimate(estimate: Estimate, release: str, model: str, record: SpeedRecord) -> Estimate:
    is_measured = model == record.model and _devices(estimate) == record.devices
    if estimate.generation_tokens_per_s is None or not is_measured:
        return estimate
    factor = record.measured / record.planned
    uncertainty = SAME_RELEASE_UNCERTAINTY if record.release == release else OTHER_RELEASE_UNCERTAINTY

    def corrected_range(bounds: SpeedRange) -> SpeedRange:
        """Return the corrected range, no wider than before."""
        mean = (bounds.low * bounds.high) ** 0.5
        spread = min(uncertainty, bounds.high / mean)
        return SpeedRange(float(f"{mean * factor / spread:.2g}"), float(f"{mean * factor * spread:.2g}"))

    return _scale(estimate, factor)._replace(
        generation_range=estimate.generation_range and corrected_range(estimate.generation_range),
        at_context=tuple(_scale(speed, factor) for speed in estimate.at_context),
        best_single_host=_scale(estimate.best_single_host, factor),
        users=_scale(estimate.users, factor),
        shapes=tuple(_scale(shape._replace(users=_scale(shape.users, factor)), factor) for shape in estimate.shapes),
        correction=Correction(round(factor, 3), record.date, record.model, record.release),
    )
