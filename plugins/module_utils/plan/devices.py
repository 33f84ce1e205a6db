# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is known of the devices that hold layers in a plan."""

from __future__ import annotations

import math
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

MMAP_LIMIT_MIB = 30 * 1024
"""Of a model's weights on one device that uses the host's memory by HIP: from here on mapped pages were seen to hang (#19745)."""
UNIFIED_HEAP = "radv_enable_unified_heap_on_apu"
"""Option of Mesa's driver for AMD, in the environment too, that shows all of the shared memory as the device's own."""
OTHER_DRIVERS = ("Intel", "NVIDIA")
"""How names of devices begin that another Vulkan driver than Mesa's for AMD drives."""


class Device(NamedTuple):
    """A device with layers. ``endpoint`` is empty where llama-server drives it itself; sizes are in MiB, ``held_mib`` is weights and KV cache."""

    host: str
    name: str
    endpoint: str
    backend: str
    architecture: str
    unified: bool
    weights_mib: float
    held_mib: float
    visible_mib: float
    host_memory_mib: int

    @property
    def hangs_on_mmap(self) -> bool:
        """Whether loading from mapped pages was seen to hang or abort with such a share."""
        return self.backend == "hip" and self.unified and self.weights_mib > MMAP_LIMIT_MIB

    @property
    def slow_on_mmap(self) -> bool:
        """Whether loading from mapped pages was seen to take very long with such a share."""
        return self.backend == "hip" and self.unified and self.weights_mib > self.host_memory_mib / 2


def accelerator_of(facts: dict, name: str) -> dict | None:
    """The accelerator that llama.cpp calls ``name`` on a host; None for its processor."""
    for backend in backends.BACKENDS[1:]:
        own = [accelerator for accelerator in facts["accelerators"] if accelerator["backend"] == backend]
        for index, accelerator in enumerate(own):
            if backends.device_name(backend, index) == name:
                return accelerator
    return None


def visible_mib(backend: str, accelerator: dict, environment: dict[str, str]) -> float:
    """How much of a device's memory its driver shows as the device's own; no bound where the size of that memory is not known.

    Mesa's Vulkan driver for AMD shows two thirds of a memory that is the host's too (radv_physical_device_init_mem_types).

    :param environment: of the program that drives the device.
    """
    whole = accelerator["memory_mib"]
    if not whole:
        return math.inf
    split = backend == "vulkan" and accelerator["unified"] and not accelerator["name"].startswith(OTHER_DRIVERS)
    if not split or environment.get(UNIFIED_HEAP, "").lower() in ("1", "true", "yes"):
        return whole
    return whole * 2 // 3


def used(placement: list[dict], planned: dict, hosts: dict, environment: dict[str, str]) -> list[Device]:
    """The devices that get layers, in the plan's order.

    :param placement: ``plan["placement"]``.
    :param planned: ``plan["hosts"]``.
    :param hosts: the inventory's, with ``facts``.
    :param environment: of llama-server, which drives the head's own devices.
    """
    workers = {f"[{worker['endpoint']}]": worker for host in planned.values() for worker in host["workers"]}
    found = []
    for entry in placement:
        endpoint = entry["device"][entry["device"].find("[") :] if "[" in entry["device"] else ""
        worker = workers.get(endpoint)
        name = worker["device"] if worker else entry["device"]
        facts = hosts[entry["host"]]["facts"]
        accelerator = accelerator_of(facts, name)
        own = worker["environment"] if worker else environment
        backend = accelerator["backend"] if accelerator else "cpu"
        found.append(
            Device(
                entry["host"],
                name,
                endpoint.strip("[]"),
                backend,
                accelerator["architecture"] if accelerator else "",
                bool(accelerator and accelerator["unified"]),
                entry["weights_mib"],
                entry["weights_mib"] + entry["kv_mib"],
                visible_mib(backend, accelerator, own) if accelerator else facts["memory_mib"],
                facts["memory_mib"],
            )
        )
    return found
