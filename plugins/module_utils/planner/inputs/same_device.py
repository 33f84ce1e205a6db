# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Devices of a host that are the same: a backend of their vendor drives them, and one that drives those of every vendor."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import UNNAMED_DEVICE, Accelerator, Facts


def named_accelerators(facts: Facts) -> tuple[tuple[str, Accelerator], ...]:
    """Each accelerator of a host with the name that llama.cpp gives it."""
    return _with_names(facts.accelerators)


@functools.lru_cache(maxsize=64)
def _with_names(accelerators: tuple[Accelerator, ...]) -> tuple[tuple[str, Accelerator], ...]:
    return tuple(
        (backends.device_name(backend, index), accelerator)
        for backend in BACKENDS[1:]
        for index, accelerator in enumerate(item for item in accelerators if item.backend == backend)
    )


def canonical_device_names(facts: Facts) -> Mapping[str, str]:
    """Name of each accelerator, as llama.cpp calls it → the name that stands for the device: Vulkan0 and CUDA0 may both be CUDA0."""
    return _canonical(facts.accelerators)


@functools.lru_cache(maxsize=64)
def _canonical(accelerators: tuple[Accelerator, ...]) -> Mapping[str, str]:
    pairs = _with_names(accelerators)
    choices = {name: device for name, device in pairs if not backends.BY_NAME[device.backend].any_vendor}
    canonical = {name: name for name, _device in pairs}
    for name, device in pairs:
        if backends.BY_NAME[device.backend].any_vendor:
            best_match = max(choices, key=lambda candidate: _match_score(choices[candidate], device), default=None)
            if best_match and _match_score(choices[best_match], device):
                canonical[name] = best_match
                del choices[best_match]
    return canonical


def devices(facts: Facts) -> list[Accelerator]:
    """The accelerators of a host, each once."""
    canonical = canonical_device_names(facts)
    return [accelerator for name, accelerator in _with_names(facts.accelerators) if canonical[name] == name]


def _match_score(first_device: Accelerator, second_device: Accelerator) -> int:
    """How sure it is that two backends drive the same device; 0 where they do not. Facts have the same name and memory for both; of declared
    devices one of these may differ, and a host has integrated graphics once."""
    same_name = first_device.name == second_device.name != UNNAMED_DEVICE
    same_size = (first_device.memory_mib, first_device.unified) == (second_device.memory_mib, second_device.unified)
    return 4 * same_name + 2 * same_size + (first_device.unified and second_device.unified)
