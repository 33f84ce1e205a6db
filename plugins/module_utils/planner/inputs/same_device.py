# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Devices of a host that are the same: a backend of their vendor drives them, and one that drives those of every vendor."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator, Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs


def named_accelerators(facts: Facts) -> tuple[tuple[str, Accelerator], ...]:
    """Each accelerator of a host with the name that llama.cpp gives it."""
    return _named(facts.accelerators)


@functools.lru_cache(maxsize=64)
def _named(accelerators: tuple[Accelerator, ...]) -> tuple[tuple[str, Accelerator], ...]:
    return tuple(
        (backends.device_name(backend, index), accelerator)
        for backend in BACKENDS[1:]
        for index, accelerator in enumerate(one for one in accelerators if one.backend == backend)
    )


def canonical_device_names(facts: Facts) -> Mapping[str, str]:
    """Name of each accelerator, as llama.cpp calls it → the name that stands for the device: Vulkan0 and CUDA0 may both be CUDA0."""
    return _canonical(facts.accelerators)


@functools.lru_cache(maxsize=64)
def _canonical(accelerators: tuple[Accelerator, ...]) -> Mapping[str, str]:
    every = _named(accelerators)
    left = {name: device for name, device in every if not backends.RECORDS[device.backend].any_vendor}
    same = {name: name for name, _device in every}
    for name, device in every:
        if backends.RECORDS[device.backend].any_vendor:
            best = max(left, key=lambda other: _match_score(left[other], device), default=None)
            if best and _match_score(left[best], device):
                same[name] = best
                del left[best]
    return same


def devices(facts: Facts) -> list[Accelerator]:
    """The accelerators of a host, each once."""
    same = canonical_device_names(facts)
    return [accelerator for name, accelerator in _named(facts.accelerators) if same[name] == name]


def _match_score(one: Accelerator, other: Accelerator) -> int:
    """How sure it is that two backends drive the same device; 0 where they do not. Facts have the same name and memory for both; of declared
    devices one of these may differ, and a host has integrated graphics once."""
    named = one.name == other.name != cluster_inputs.UNNAMED
    sized = (one.memory_mib, one.unified) == (other.memory_mib, other.unified)
    return 4 * named + 2 * sized + (one.unified and other.unified)
