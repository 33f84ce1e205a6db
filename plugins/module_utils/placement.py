# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which device gets which layers. Weights and KV cache are exact, compute buffers an upper bound.

llama-server takes whole units in the order of its devices: the layers, then the output. ``-ts`` gives the units of each.
"""

from __future__ import annotations

MIB = 1024 * 1024
MICRO_BATCH = 512
CACHE_TYPES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Type of the KV cache → bytes of one element."""
CELLS_MULTIPLE = 256
"""The KV cache holds a multiple of so many tokens."""


def kv_bytes_per_layer(model: dict, context: int, type_k: str, type_v: str) -> int:
    cells = -(-context // CELLS_MULTIPLE) * CELLS_MULTIPLE
    per_cell = model["kv_heads"] * (
        model["key_dimension"] * CACHE_TYPES[type_k] + model["value_dimension"] * CACHE_TYPES[type_v]
    )
    return int(cells * per_cell)


def compute_bound(model: dict, context: int) -> int:
    """Upper bound of a device's compute buffer in bytes: attention scores without flash attention, and the logits."""
    scores = model["heads"] * context * MICRO_BATCH * 4
    states = MICRO_BATCH * 4 * (model["vocabulary"] + 16 * model["width"])
    return scores + states


class Load:
    """What the units cost: unit i is layer i, the last one the output."""

    def __init__(self, model: dict, context: int, type_k: str, type_v: str) -> None:
        self.kv = kv_bytes_per_layer(model, context, type_k, type_v)
        self.weights = [*model["layer_bytes"], model["output_bytes"]]
        self.layers = len(model["layer_bytes"])
        self.units = self.layers + 1
        self.compute = compute_bound(model, context)

    def of(self, start: int, count: int) -> tuple[int, int]:
        """Bytes of weights and of KV cache of the units from ``start`` on."""
        layers = max(0, min(start + count, self.layers) - start)
        return sum(self.weights[start : start + count]), layers * self.kv

    def most(self, start: int, capacity: int) -> int:
        """How many units from ``start`` on the capacity holds."""
        count = 0
        while start + count < self.units and sum(self.of(start, count + 1)) <= capacity:
            count += 1
        return count


def _rest_fits(load: Load, start: int, capacities: list[int]) -> bool:
    for capacity in capacities:
        start += load.most(start, capacity)
    return start >= load.units


def distribute(load: Load, capacities: list[int]) -> list[int] | None:
    """Units per device in proportion to the capacities (bytes), or None when they cannot hold the model.

    Every device gets a unit while there are enough of them.
    """
    if not _rest_fits(load, 0, capacities):
        return None
    shares: list[int] = []
    start = 0
    for index, capacity in enumerate(capacities):
        later = capacities[index + 1 :]
        left = load.units - start
        wanted = round(left * capacity / sum(capacities[index:]))
        wanted = min(max(wanted, 1), max(left - len(later), 0)) if later else left
        possible = [count for count in range(load.most(start, capacity) + 1) if _rest_fits(load, start + count, later)]
        shares.append(min(possible, key=lambda count: abs(count - wanted)))
        start += shares[-1]
    return shares


def fewest(load: Load, capacities: list[int]) -> list[int]:
    """Indices of the fewest devices, largest first, that hold the model; all of them when even those do not."""
    by_size = sorted(range(len(capacities)), key=lambda index: -capacities[index])
    for count in range(1, len(by_size) + 1):
        chosen = sorted(by_size[:count])
        if _rest_fits(load, 0, [capacities[index] for index in chosen]):
            return chosen
    return sorted(by_size)


def missing_bytes(load: Load, capacities: list[int]) -> int:
    """How much more the last device would have to hold for the model to fit."""
    start = 0
    for capacity in capacities[:-1]:
        start += load.most(start, capacity)
    return max(0, sum(load.of(start, load.units - start)) - capacities[-1])
