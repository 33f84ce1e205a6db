# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where llama-server holds a projector and a draft model, and what that takes.

Left to itself it spreads a draft model over all devices, and gives the first one a projector: those of workers, as logged by build 11063. So it is told:
one device of the head, or its processor.
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import AuxiliaryModelPlan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    device_load,
    devices,
    speculation,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    AuxiliaryModel,
    Device,
    Model,
    Server,
)

PLACING = {
    download_record.DRAFT: ("draft-device", "draft-layers", "draft-tensors"),
    download_record.MMPROJ: ("projector-offload", "projector-device"),
}
"""Role → the options that say where it is."""
NONE = "none"
"""The place that is the head's processor."""


def _header(role: str, model: Model) -> ModelSummary | Projector | None:
    """What is known of a model beside the one that is served."""
    return model.draft if role == download_record.DRAFT else model.projector


def uncounted(model: Model, server: Server, release: ReleasePlan) -> dict[str, str]:
    """Role of a model beside the one that is served → why what it takes is not counted."""
    roles = [role for role in model_source.AUXILIARY if model.path_of(role)]
    return {role: why for role in roles if (why := _why_not(role, model, server, release))}


def _why_not(role: str, model: Model, server: Server, release: ReleasePlan) -> str:
    if not release.mainline:
        return f"{release.fork} chooses its device, by rules that are not known here"
    if _header(role, model) is None:
        return "its header was not read"
    given = [pair[0] for name in PLACING[role] if (pair := server_settings.given_option(server, name))]
    return f"{given[0]} is given, which puts it where the plan does not follow" if given else ""


def candidate_places(
    model: Model, server: Server, release: ReleasePlan, own: Sequence[Device]
) -> Iterator[tuple[AuxiliaryModel, ...]]:
    """What the models beside the one that is served may take on the head's fastest device or its processor, the best place of each first, that of a
    draft model before that of a projector.

    :param own: the devices that llama-server itself drives, the fastest first.
    """
    unknown = uncounted(model, server, release)
    roles = [role for role in PLACING if _header(role, model) and role not in unknown]
    places = [*own[:1], None]
    return itertools.product(*([_size(role, model, server, release, place) for place in places] for role in roles))


def _size(role: str, model: Model, server: Server, release: ReleasePlan, device: Device | None) -> AuxiliaryModel:
    backend = backends.RECORDS[device.backend] if device else backends.CPU
    if role == download_record.MMPROJ:
        one = cast(Projector, model.projector)
        return AuxiliaryModel(role, device, projector.weights(one, backend.alignment), 0, projector.COMPUTE)
    summary = cast(ModelSummary, model.draft)
    load = device_load.load_of(_loaded(summary), _settings(server, model.summary, release), release.build)
    units, kv = list(range(load.units)), _cache(load, summary)
    if not device:
        return AuxiliaryModel(role, None, load.on_head(units), kv, load.compute)
    return AuxiliaryModel(role, device, load.share(units, backend.name).weights, kv, load.compute, load.on_head())


def _is_part(summary: ModelSummary) -> bool:
    """Whether a draft model is a part of another one: its layers that predict further tokens, which count the others and do not have them."""
    return not all(summary.layer_bytes)


def _loaded(summary: ModelSummary) -> ModelSummary:
    """A summary without saying that such layers are not loaded, where there are no others."""
    return summary.without_key("nextn_predict_layers") if _is_part(summary) else summary


def _cache(load: device_load.Load, summary: ModelSummary) -> int:
    """Bytes of a KV cache; of a part of another model at most, since only layers that it has get one (ctx_type in llama-model.cpp of build 11063)."""
    sizes = load.kv[: load.layers]
    return sum(map(bool, summary.layer_bytes)) * max(sizes) if _is_part(summary) else sum(sizes)


def _settings(server: Server, served: ModelSummary, release: ReleasePlan) -> kv_cache.CacheSettings:
    """Of the context of the draft model. Its cache has its own types, f16 where nothing is said."""
    settings = server_settings.settings_of(server, served, release.fork)
    return settings._replace(type_k=_type(server, "draft-cache-type-k"), type_v=_type(server, "draft-cache-type-v"))


def _type(server: Server, name: str) -> str:
    given = server_settings.given_option(server, name)
    if given and given[1] not in kv_cache.CACHE_TYPES:
        raise Refusal(
            f"llama_server_extra_args has {given[0]} {given[1]!r}: use one of {', '.join(kv_cache.CACHE_TYPES)}"
        )
    return given[1] if given else "f16"


def in_memory(held: Sequence[AuxiliaryModel]) -> int:
    return sum(one.in_memory + (0 if one.device else one.total) for one in held)


def on_device(held: Sequence[AuxiliaryModel], device: Device) -> int:
    return sum(one.total for one in held if one.device and one.device.buffer == device.buffer)


def without_buffers(held: Sequence[AuxiliaryModel]) -> tuple[AuxiliaryModel, ...]:
    """The same without compute buffers, which are bounds and never a reason to refuse."""
    return tuple(one._replace(compute=0) for one in held)


def remaining_capacity(offered: Sequence[Device], held: Sequence[AuxiliaryModel]) -> list[Device] | None:
    """The devices with what is left of their capacities; None where one of them holds less."""
    left = []
    for device in offered:
        taken = on_device(held, device)
        if taken > device.capacity_mib * MIB:
            return None
        left.append(device._replace(capacity_mib=max(0, device.capacity_mib - -(-taken // MIB))))
    return left


def beside_memory(offered: Sequence[Device], taken: int, head: str, facts: Facts) -> list[Device]:
    """The devices beside so many bytes in the head's memory: what limits of drivers leave of it, then the largest device that shares it, has room."""
    sharing = [device for device in offered if device.host == head and devices.shares_memory(device, facts)]
    largest = max(sharing, key=lambda device: device.capacity_mib, default=None)
    left = workers.usable_mib(facts.memory_mib) - sum(device.capacity_mib for device in sharing)
    less = max(0, -(-taken // MIB) - max(0, left))
    return [
        device._replace(capacity_mib=max(0, device.capacity_mib - less)) if device is largest else device
        for device in offered
    ]


def arguments(
    held: Sequence[AuxiliaryModel], model: Model, server: Server, release: ReleasePlan
) -> list[tuple[str, str]]:
    """Options of llama-server that say where they are and how a draft model is used, and values."""
    words = [(options.SPECULATION, speculation.type_of(model, server, release))]
    for one in held:
        if one.role == download_record.DRAFT:
            words.append(("draft-device", one.device.name if one.device else NONE))
            words += [("draft-layers", str(model.draft.layers + 1))] if one.device and model.draft else []
        elif not one.device:
            words.append(("projector-offload", "off"))
    return words


def environment(held: Sequence[AuxiliaryModel]) -> dict[str, str]:
    """What has llama-server use the planned device for a projector: all builds that were read take this variable."""
    names = [one.device.name for one in held if one.role == download_record.MMPROJ and one.device]
    return {options.PROJECTOR_DEVICE: names[0]} if names else {}


def sentences(held: Sequence[AuxiliaryModel], head: str) -> list[str]:
    """What they need at least, for a plan that does not fit."""
    return [
        f"{model_source.VARIABLES[one.role]} needs {-(-(one.weights + one.kv) // MIB)} MiB of {one.device.name if one.device else 'the memory'} of {head}, "
        "which are not left for the model"
        for one in held
    ]


def as_plan(held: Sequence[AuxiliaryModel], model: Model, head: str) -> tuple[AuxiliaryModelPlan, ...]:
    return tuple(
        AuxiliaryModelPlan(
            role=one.role,
            name=cast(Union[ModelSummary, Projector], _header(one.role, model)).name,
            host=head,
            device=one.device.name if one.device else None,
            weights_mib=round(one.weights / MIB, 2),
            kv_mib=round(one.kv / MIB, 2),
            compute_mib=round(one.compute / MIB, 2),
            total_mib=round(one.total / MIB, 2),
            in_memory_mib=round(one.in_memory / MIB, 2),
            assumed=one.role == download_record.MMPROJ,
        )
        for one in held
    )
