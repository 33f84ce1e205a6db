# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The places and sizes of a projector and a draft model.

By default llama-server spreads a draft model over all devices and puts a projector on the first one, even if workers lend them, as logged by build 11063. So
the plan names one device of the head, or its processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Union, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.projector import Projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import AuxiliaryModelPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import AuxiliaryModel, Device, Model
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import (
    PLACEMENT_OPTIONS,
    Workload,
    header_of,
)

NO_DEVICE = "none"
"""Value of the option draft-device that selects the head's processor."""


def candidate_placements(workload: Workload, site: Site) -> Iterator[tuple[AuxiliaryModel, ...]]:
    """Yield placements of auxiliary models on the head's fastest device or its processor, the best first: a draft model gets the device before a projector."""
    head_devices = [device for device in site.devices if not device.worker]
    devices = [*sorted(head_devices, key=lambda device: -site.rates[device.buffer].gb_per_s)[:1], None]
    roles = [role for role in PLACEMENT_OPTIONS if role not in workload.uncounted_models]
    choices = ([model for device in devices if (model := _auxiliary_model(workload, role, device))] for role in roles)
    return itertools.product(*filter(None, choices))


def _auxiliary_model(workload: Workload, role: str, device: Device | None) -> AuxiliaryModel | None:
    """Return the model on a device, or on the head's processor; None if its header is unknown."""
    header = header_of(workload.model, role)
    if header is None:
        return None
    backend = backends.BY_NAME[device.backend] if device else backends.CPU
    if isinstance(header, Projector):
        return AuxiliaryModel(role, device, projector.bytes_of(header, backend.alignment), 0, projector.COMPUTE_BYTES)
    # A draft model may be a part of a model: its layers for multi-token prediction. Their header counts the other layers, but the file lacks these.
    lacks_layers = not all(header.layer_bytes)
    summary = header.without_key("nextn_predict_layers") if lacks_layers else header
    cache = _cache_settings(workload)
    load = device_load.load_of(summary, cache, workload.release.build)
    units = list(range(load.units))
    weights = load.share(units, backend.name).weights if device else load.head_weights(units)
    head_weights = load.head_weights() if device else 0
    # Only the own layers of a part get a KV cache (ctx_type in llama-model.cpp of build 11063): an upper bound for it.
    layer_kv, own_layers = load.kv[: load.layers], sum(map(bool, summary.layer_bytes))
    kv = own_layers * max(layer_kv) if lacks_layers else sum(layer_kv)
    return AuxiliaryModel(role, device, weights, kv, load.compute, head_weights)


def _cache_settings(workload: Workload) -> kv_cache.CacheSettings:
    """Return the settings for the draft model. Its cache has its own types, f16 by default."""
    cache_types = [workload.server.argument(f"draft-cache-type-{name}") or ("", "f16") for name in "kv"]
    for word, cache_type in cache_types:
        if cache_type not in kv_cache.CACHE_TYPES:
            raise Refusal(
                f"llama_server_extra_args has {word} {cache_type!r}: use one of {', '.join(kv_cache.CACHE_TYPES)}"
            )
    return workload.cache._replace(type_k=cache_types[0][1], type_v=cache_types[1][1])


def without_buffers(models: Sequence[AuxiliaryModel]) -> tuple[AuxiliaryModel, ...]:
    """Return the models without compute buffers, whose sizes are upper bounds and never a reason to refuse."""
    return tuple(model._replace(compute=0) for model in models)


def arguments(workload: Workload, models: Sequence[AuxiliaryModel]) -> list[tuple[str, str]]:
    """Return llama-server's options, with values, that place the models and enable a draft model."""
    settings = [(options.SPECULATION, workload.spec_type)]
    draft = workload.model.draft
    for model in models:
        if model.role == host_types.DRAFT:
            settings.append(("draft-device", model.device.name if model.device else NO_DEVICE))
            settings += [("draft-layers", str(draft.layers + 1))] if model.device and draft else []
        elif not model.device:
            settings.append(("projector-offload", "off"))
    return settings


def environment(models: Sequence[AuxiliaryModel]) -> dict[str, str]:
    """Return the variable that makes llama-server use the planned device for a projector: all builds that were read support it."""
    names = [model.device.name for model in models if model.role == host_types.MMPROJ and model.device]
    return {options.PROJECTOR_DEVICE_VARIABLE: names[0]} if names else {}


def auxiliary_model_plans(
    models: Sequence[AuxiliaryModel], main_model: Model, head: str
) -> tuple[AuxiliaryModelPlan, ...]:
    return tuple(
        AuxiliaryModelPlan(
            role=model.role,
            name=cast(Union[ModelSummary, Projector], header_of(main_model, model.role)).name,
            host=head,
            device=model.device.name if model.device else None,
            weights_mib=round(model.weights / MIB, 2),
            kv_mib=round(model.kv / MIB, 2),
            compute_mib=round(model.compute / MIB, 2),
            total_mib=round(model.total / MIB, 2),
            in_memory_mib=round(model.head_weights / MIB, 2),
            assumed=model.role == host_types.MMPROJ,
        )
        for model in models
    )
