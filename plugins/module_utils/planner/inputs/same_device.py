# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which devices of a host are one and the same: a backend of their vendor drives them, and one that drives those of every vendor."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Accelerator, Facts


def named(facts: Facts) -> list[tuple[str, Accelerator]]:
    """Each accelerator of a host with the name that llama.cpp gives it."""
    return [
        (backends.device_name(backend, index), accelerator)
        for backend in backends.BACKENDS[1:]
        for index, accelerator in enumerate(facts.of_backend(backend))
    ]


def twins(facts: Facts) -> dict[str, str]:
    """Name of each accelerator, as llama.cpp calls it → the name that stands for the device: Vulkan0 and CUDA0 may both be CUDA0."""
    every = named(facts)
    left = {name: device for name, device in every if not backends.RECORDS[device.backend].any_vendor}
    same = {name: name for name, _device in every}
    for name, device in every:
        if backends.RECORDS[device.backend].any_vendor:
            twin = max(left, key=lambda other: _likeness(left[other], device), default=None)
            if twin and _likeness(left[twin], device):
                same[name] = twin
                del left[twin]
    return same


def devices(facts: Facts) -> list[Accelerator]:
    """The accelerators of a host, each once."""
    same = twins(facts)
    return [accelerator for name, accelerator in named(facts) if same[name] == name]


def _likeness(one: Accelerator, other: Accelerator) -> int:
    """How sure it is that two backends drive the same device; 0 where they do not. Facts have the same name and memory for both; of declared
    devices one of these may differ, and a host has integrated graphics once."""
    named = one.name == other.name != cluster_inputs.UNNAMED
    sized = (one.memory_mib, one.unified) == (other.memory_mib, other.unified)
    return 4 * named + 2 * sized + (one.unified and other.unified)
