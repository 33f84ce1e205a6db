# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory of a plan's devices as text."""

import math

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables, types

BAR_WIDTH = 26
COMPONENT_SIGNS = {"weights": "█", "kv": "▓", "compute": "▒"}
AUXILIARY_SIGN = "░"
"""Sign of a projector and of a draft model."""
ROLE_NAMES = {"mmproj": "projector", "draft": "draft model"}
FREE_MEMORY_SIGN = "·"


def size_mib(entry: types.DevicePlacement | types.AuxiliaryModelPlan, component: str) -> float:
    """Return the size in MiB of one component: weights, kv or compute."""
    sizes = {"weights": entry.weights_mib, "kv": entry.kv_mib, "compute": entry.compute_mib}
    return sizes[component]


def amount_text(entry: types.DevicePlacement, component: str) -> str:
    """Return the size of a component as text, with ≤ before an upper bound."""
    return f"{'' if f'{component}_mib' in entry.exact else '≤ '}{size_mib(entry, component):.0f}"


def overcommitment_text(entry: types.DevicePlacement) -> str:
    """Return a text like '≤ 115 %' if weights, KV cache and compute buffers together may exceed the device's capacity; empty otherwise."""
    percent = 100 * entry.total_mib / max(entry.capacity_mib, 1)
    return f"≤ {math.ceil(percent)} %" if percent > 100 else ""


def memory_bar(entry: types.DevicePlacement, width: int = BAR_WIDTH) -> str:
    """Return a bar of a device's capacity: weights, KV cache, compute buffers and free memory, each at least one column wide."""
    bar_mib = max(entry.capacity_mib, entry.total_mib, 1)
    sizes_mib = {sign: size_mib(entry, component) for component, sign in COMPONENT_SIGNS.items()}
    sizes_mib[AUXILIARY_SIGN] = entry.auxiliary_mib
    sizes_mib[FREE_MEMORY_SIGN] = bar_mib - entry.total_mib
    column_counts = {sign: 1 for sign, size in sizes_mib.items() if size > 0}
    for _extra in range(width - len(column_counts)):
        column_counts[max(column_counts, key=lambda sign: sizes_mib[sign] / bar_mib * width - column_counts[sign])] += 1
    return "".join(sign * count for sign, count in column_counts.items())


def memory_plans(plan: types.Plan) -> dict[str, types.Plan]:
    """Return a plan for each model, as if it were the only one, by title."""
    other_models = zip((plan.head.models or ())[1:], plan.per_model()[1:])
    return {"Memory": plan, **{f"Memory of {model.name}": model_plan for model, model_plan in other_models}}


def memory_lines(plan: types.Plan) -> list[str]:
    rows = [["device", "".ljust(BAR_WIDTH), "weights", "KV", "compute", "capacity"]]
    for entry in plan.placement:
        models = _auxiliary_models_on(plan, entry.device)
        required_mib = entry.weights_mib + entry.kv_mib + sum(model.weights_mib + model.kv_mib for model in models)
        note = "too small" if required_mib > entry.capacity_mib else overcommitment_text(entry)
        sizes = [amount_text(entry, component) for component in COMPONENT_SIGNS]
        rows.append([entry.device, memory_bar(entry), *sizes, ", ".join(filter(None, (f"{entry.capacity_mib}", note)))])
        rows += map(_auxiliary_row, models)
    other_devices = {model.device for model in plan.auxiliary_models} - {entry.device for entry in plan.placement}
    for device in sorted(other_devices, key=str):
        rows.append([device or f"processor of {plan.head.host}", "", "", "", "", ""])
        rows += map(_auxiliary_row, _auxiliary_models_on(plan, device))
    component_signs = {**COMPONENT_SIGNS, **({"auxiliary models": AUXILIARY_SIGN} if plan.auxiliary_models else {})}
    legend = ", ".join(f"{sign} {component.replace('kv', 'KV cache')}" for component, sign in component_signs.items())
    footer = f"  in MiB, ≤ marks an upper bound; {legend}, {FREE_MEMORY_SIGN} free"
    return [*tables.format_table(rows).splitlines(), footer, *uncounted_model_lines(plan), *reason_lines(plan)]


def _auxiliary_models_on(plan: types.Plan, device: str | None) -> list[types.AuxiliaryModelPlan]:
    """Return the projector and draft model on a device; None means the head's processor."""
    return [model for model in plan.auxiliary_models if model.device == device]


def _auxiliary_row(model: types.AuxiliaryModelPlan) -> list[str]:
    sizes = [f"≤ {size_mib(model, component):.0f}" for component in COMPONENT_SIGNS]
    return [f"  {ROLE_NAMES[model.role]}", "", *sizes, "compute buffer assumed" if model.assumed else ""]


def auxiliary_model_lines(plan: types.Plan) -> list[str]:
    """Return lines about the projector and the draft model, for a page whose table has no rows for them."""
    lines = []
    for model in plan.auxiliary_models:
        sizes = ", ".join(f"{name.replace('kv', 'KV')} ≤ {size_mib(model, name):.0f} MiB" for name in COMPONENT_SIGNS)
        location = f"on {model.device}" if model.device else f"on the processor of {model.host}"
        assumed_note = " (assumed)" if model.assumed else ""
        lines += tables.wrap("  ", f"{ROLE_NAMES[model.role]} {model.name} {location}: {sizes}{assumed_note}")
    return lines


def uncounted_model_lines(plan: types.Plan) -> list[str]:
    """Return lines with the models that the sizes of devices do not include; none if they include all."""
    names = {name for entry in plan.placement for name in entry.without}
    return tables.wrap("  not included: ", ", ".join(sorted(names))) if names else []


def reason_lines(plan: types.Plan) -> list[str]:
    """Return lines with the reason for each device's layers; devices with the same reason share a line."""
    devices: dict[str, list[str]] = {}
    for entry in plan.placement:
        devices.setdefault(entry.reason, []).append(entry.device)
    return [line for reason, names in devices.items() for line in tables.wrap("  ", f"{', '.join(names)}: {reason}")]
