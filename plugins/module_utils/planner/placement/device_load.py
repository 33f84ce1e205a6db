# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The layers of each device and their sizes, as llama.cpp itself decides and counts (load_tensors of llama-model.cpp).

llama-server assigns whole units, the layers and then the output, to its devices in order. ``-ts`` sets the number of units of each device.
The names of tensors, which all files of an architecture share, show the units to which they belong.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import compute_buffers, kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary, TensorGroup
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import solver
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import AuxiliaryModel, Device

ROW_TENSORS = frozenset(("token_embd", "position_embd", "token_types"))
TABLE_TENSORS = ROW_TENSORS | {"per_layer_token_embd"}
"""Beginnings of the names of tensors that stay in the head's memory, since only single rows of them are read."""
FIRST_LAYER_TENSORS = frozenset(("token_embd_norm", "per_layer_model_proj", "per_layer_proj_norm"))
"""Beginnings of the names of tensors that belong to the first layer. Others belong to the output."""
REPLICATED_TENSORS = frozenset(("rope_freqs", "rope_factors_long", "rope_factors_short"))
"""Beginnings of the names of tensors of which every device with layers gets a copy."""

LAYER_PREFIX = "blk."
"""Beginning of the names of a layer's tensors."""
CPU_BUFFER = "CPU"
"""Name of the head's memory in overrides."""
UNQUANTISED_TYPES = frozenset(("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"))


class LoadedTensor(NamedTuple):
    """A tensor that llama-server loads, or all tensors of a unit if the summary has no names."""

    name: str
    bytes: int
    unit: int | None
    """Unit to which it belongs; None if it stays in the head's memory."""
    padding_bytes: int = 0
    """Bytes that pad its rows to backends.MATRIX_ROW_PADDING."""
    buffer: str | None = None
    """Buffer of an override; None if it follows its unit."""


def _row_padding(row: TensorGroup) -> int:
    """Return the bytes that pad the rows of a quantised tensor to MATRIX_ROW_PADDING."""
    if row.type in UNQUANTISED_TYPES or not row.shape:
        return 0
    return row.bytes * (-row.shape[0] % backends.MATRIX_ROW_PADDING) // math.prod(row.shape)


@functools.lru_cache(maxsize=4)
def _tensors_and_copies(summary: ModelSummary) -> tuple[list[LoadedTensor], list[LoadedTensor]]:
    """Return the tensors that llama-server loads, and those of which devices get copies."""
    layers, mtp_start = summary.layers, summary.layers - kv_cache.count_mtp_layers(summary)
    tensors, copies = [], []
    for row in summary.tensor_groups:
        padding_bytes = _row_padding(row)
        if row.layers is not None:
            names = ((layer, row.name.replace("*", str(layer))) for layer in row.layers if layer < mtp_start)
            tensors += [LoadedTensor(name, row.bytes, layer, padding_bytes) for layer, name in names]
            continue
        name_start = row.name.split(".", 1)[0]
        if name_start in REPLICATED_TENSORS:
            copies.append(LoadedTensor(row.name, row.bytes, None))
            continue
        unit = None if name_start in TABLE_TENSORS else 0 if name_start in FIRST_LAYER_TENSORS else layers
        tensors.append(LoadedTensor(row.name, row.bytes, unit, padding_bytes))
    if not any(tensor.name == "output.weight" for tensor in tensors):
        tensors += [tensor._replace(unit=layers) for tensor in tensors if tensor.name == "token_embd.weight"]
    return tensors, copies


def _unnamed_tensors_and_copies(summary: ModelSummary) -> tuple[list[LoadedTensor], list[LoadedTensor]]:
    sizes = [*summary.layer_bytes, summary.output_bytes]
    tensors = [LoadedTensor("", size, unit) for unit, size in enumerate(sizes)]
    return [LoadedTensor("", summary.input_bytes, None), *tensors], []


def _with_overrides(tensors: list[LoadedTensor], overrides: Sequence[tuple[str, str]]) -> list[LoadedTensor]:
    """Return the tensors, with each in the buffer of the first override that matches its name."""
    expressions = [(re.compile(pattern), buffer) for pattern, buffer in overrides]
    placed_tensors = []
    for tensor in tensors:
        buffer = next((buffer for expression, buffer in expressions if expression.search(tensor.name)), None)
        placed_tensors.append(
            tensor if buffer is None else tensor._replace(unit=None, buffer=None if buffer == CPU_BUFFER else buffer)
        )
    return placed_tensors


def _padded_size(tensor: LoadedTensor, backend: backends.Backend) -> int:
    return kv_cache.pad(tensor.bytes + (tensor.padding_bytes if backend.pads_rows else 0), backend.alignment)


class Share(NamedTuple):
    """The share of one device: number of layers, whether it has the output, and bytes of weights and KV cache."""

    layers: int
    has_output: bool
    weights: int
    kv: int


class DeviceShare(NamedTuple):
    """Share of a device in the model, and what the device holds in addition, in bytes."""

    device: Device
    layers: int
    has_output: bool
    weights: int
    kv: int
    compute: int
    """Upper bound of the compute buffer."""
    auxiliary_bytes: int
    """Size of auxiliary models."""

    @property
    def model_bytes(self) -> int:
        return self.weights + self.kv

    @property
    def total(self) -> int:
        return self.model_bytes + self.compute + self.auxiliary_bytes

    @property
    def weights_mib(self) -> float:
        return round(self.weights / MIB, 2)

    @property
    def held_mib(self) -> float:
        """Return the size of weights and KV caches."""
        return self.weights_mib + round(self.kv / MIB, 2) + round(self.auxiliary_bytes / MIB, 2)


def _unique_tensors(tensors: Iterable[LoadedTensor]) -> list[LoadedTensor]:
    """Return tensors without duplicate names: the output that is tied to the token embedding has the same name."""
    return list({tensor.name or index: tensor for index, tensor in enumerate(tensors)}.values())


class Load:
    """The sizes of the units: unit i is layer i, the last unit is the output. ``load_of`` caches loads, since all attempts of a plan share one."""

    def __init__(
        self,
        summary: ModelSummary,
        settings: kv_cache.CacheSettings,
        build: int,
        overrides: Sequence[tuple[str, str]] = (),
    ) -> None:
        """
        :param summary: result of header_summary.summarize; without ``tensors`` only the sizes of layers are known.
        :param overrides: expressions for names of tensors, each with the buffer of these tensors.
        """
        self.summary = summary
        self.layers: int = summary.layers
        self.units: int = self.layers + 1
        has_names, self.overrides = summary.tensors is not None, overrides
        tensors, self.copies = _tensors_and_copies(summary) if has_names else _unnamed_tensors_and_copies(summary)
        self.tensors = _with_overrides(tensors, overrides)
        self.kv, self.has_exact_kv = kv_cache.sizes(summary, settings, build)
        windows = kv_cache.windowed_flags(summary)
        self.is_checkpointed = kv_cache.checkpointed_flags(summary, settings)
        """Whether checkpoints of the context contain the cache of each layer."""
        self.split_cache_backends = {
            name for name in backends.BY_NAME if kv_cache.is_cache_split(summary, settings, name)
        }
        """Backends from whose devices llama-server cannot fetch KV cache."""
        is_known_architecture = kv_cache.is_known_architecture(summary)
        self.recurrent_layers = sum(kv_cache.recurrent_flags(summary)) if is_known_architecture else 0
        self.compute = compute_buffers.buffer_bound(summary, settings)
        self.device_kv = self.kv if settings.offload else [0] * len(self.kv)
        is_known_release = settings.fork == MAINLINE and kv_cache.is_known_build(build)
        self.has_exact_weights = has_names and is_known_release and is_known_architecture
        self.needs_copies = [not (summary.architecture == "gemma4" and window) for window in windows]
        self.weights = [0] * self.units
        for tensor in self.tensors:
            if tensor.unit is not None:
                self.weights[tensor.unit] += tensor.bytes
        placed_tensors = _unique_tensors(tensor for tensor in self.tensors if tensor.buffer)
        self.tensors_by_buffer = {
            buffer: [tensor for tensor in placed_tensors if tensor.buffer == buffer] for _name, buffer in overrides
        }
        """Tensors that overrides put into a buffer."""
        self.override_targets: dict[int, set[str]] = {}
        for tensor, moved_tensor in zip(tensors, self.tensors):
            if tensor.unit is not None and moved_tensor.unit is None:
                self.override_targets.setdefault(tensor.unit, set()).add(moved_tensor.buffer or CPU_BUFFER)

    def head_weights(self, units: Sequence[int] = ()) -> int:
        """Return the bytes of weights in the head's memory if its processor has these units. A tied output takes no copy there."""
        return _head_weights(self, tuple(units))

    def head_kv_bytes(self, first_offloaded: int) -> int:
        """Return the bytes of KV cache in the head's memory if devices have the layers from ``first_offloaded``."""
        return sum(self.kv) - sum(self.device_kv[first_offloaded : self.layers])

    def override_bytes(self, buffer: str, backend: str) -> int:
        """Return the bytes of weights that overrides put into this buffer, in the layout of its backend."""
        return sum(_padded_size(tensor, backends.BY_NAME[backend]) for tensor in self.tensors_by_buffer.get(buffer, ()))

    def sizes(self, backend: str) -> solver.Sizes:
        """Return the bytes of weights and KV cache that a device needs for units, in the layout of its backend."""
        return _sizes(self, backend)

    def compute_on(self, device: Device, first_offloaded: int) -> int:
        """Return the upper bound of a device's compute buffer if the head's processor has the layers before ``first_offloaded``. For prompts,
        the head's own devices copy from its memory one tensor at a time, and the KV cache of one layer."""
        if device.worker:
            return self.compute
        units = {None, *range(min(first_offloaded, self.layers))}
        tensors = [tensor for tensor in self.tensors if tensor.buffer is None and tensor.unit in units]
        copied_sizes = (tensor.bytes for tensor in tensors if LAYER_PREFIX in tensor.name)
        return self.compute + max(copied_sizes, default=0) + max(self.kv[:first_offloaded], default=0)

    def share(self, units: Sequence[int], backend: str, buffer: str = "") -> Share:
        """Return the share of a device with these units, to the byte.

        :param backend: backend of the device, which decides how tensors are laid out.
        :param buffer: buffer of the device, which overrides name.
        """
        unit_bytes, copy_bytes = _unit_and_copy_bytes(self, backend)
        layers = [unit for unit in units if unit < self.layers]
        held_bytes = sum(unit_bytes[unit] for unit in units) + (self.override_bytes(buffer, backend) if buffer else 0)
        return Share(
            layers=len(layers),
            has_output=self.layers in units,
            weights=held_bytes + (copy_bytes if any(self.needs_copies[unit] for unit in layers) else 0),
            kv=sum(self.device_kv[unit] for unit in layers),
        )


@functools.lru_cache(maxsize=128)
def _unit_and_copy_bytes(load: Load, backend: str) -> tuple[tuple[int, ...], int]:
    """Return the bytes of weights of each unit, and of the tensors that each device copies, in the layout of a backend."""
    unit_bytes = [0] * load.units
    for tensor in load.tensors:
        if tensor.unit is not None:
            unit_bytes[tensor.unit] += _padded_size(tensor, backends.BY_NAME[backend])
    return tuple(unit_bytes), sum(_padded_size(tensor, backends.BY_NAME[backend]) for tensor in load.copies)


@functools.lru_cache(maxsize=128)
def _sizes(load: Load, backend: str) -> solver.Sizes:
    weights, copy_bytes = _unit_and_copy_bytes(load, backend)
    unit_bytes = [sum(sizes) for sizes in zip(weights, [*load.device_kv[: load.layers], 0])]
    return solver.Sizes(solver.prefix_sums(unit_bytes), solver.prefix_sums([*load.needs_copies, False]), copy_bytes)


@functools.lru_cache(maxsize=128)
def _head_weights(load: Load, units: tuple[int, ...]) -> int:
    cpu_units = {None, *units}
    tensors = [tensor for tensor in load.tensors if tensor.buffer is None and tensor.unit in cpu_units]
    tensors += load.copies if any(unit < load.layers and load.needs_copies[unit] for unit in units) else []
    return sum(kv_cache.pad(tensor.bytes, backends.CPU.alignment) for tensor in _unique_tensors(tensors))


@functools.lru_cache(maxsize=32)
def load_of(
    summary: ModelSummary, settings: kv_cache.CacheSettings, build: int, overrides: tuple[tuple[str, str], ...] = ()
) -> Load:
    return Load(summary, settings, build, overrides)


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@functools.lru_cache(maxsize=256)  # called for each device of a plan, and again for its size and cost
def assign_units(layers: int, gpu_layers: int, split: tuple[float, ...]) -> tuple[int | None, ...]:
    """Return the device of each unit as llama.cpp computes it, in 32-bit floats; None is the head's processor.

    :param gpu_layers: ``-ngl``: number of units on devices, counted from the last.
    :param split: ``-ts``, a share for each device.
    """
    first_offloaded, offloaded_units = max(layers + 1 - gpu_layers, 0), min(gpu_layers, layers + 1)
    total, share_ends = 0.0, []
    for share in split:
        total = _float32(total + _float32(share))
        share_ends.append(total)
    share_ends = [_float32(end / total) for end in share_ends] if total else []
    return tuple(
        bisect.bisect_right(share_ends, _float32(_float32(unit - first_offloaded) / offloaded_units))
        if share_ends and unit >= first_offloaded
        else None
        for unit in range(layers + 1)
    )


class Layout(NamedTuple):
    """The used devices in llama-server's order, and their shares of the model."""

    devices: tuple[Device, ...]
    split: tuple[float, ...]
    """``-ts``: share of each device; too large for some devices if the model does not fit."""
    load: Load
    gpu_layers: int
    reasons: tuple[str, ...] = ()
    """Reasons why the model does not fit."""
    share_reasons: tuple[str, ...] = ()
    """Reason for the share of each device."""
    missing_mib: int = 0
    """Memory that is missing on all devices and on the head."""
    auxiliary: tuple[AuxiliaryModel, ...] = ()
    """Auxiliary models that are counted."""
    load_mode: str | None = None
    """How llama-server reads the model; None is its default."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Return the endpoints of the used workers."""
        return tuple(device.worker.endpoint for device in self.devices if device.worker)

    def head_devices(self) -> list[Device]:
        return [device for device in self.devices if not device.worker]

    def driven_devices(self) -> list[Device]:
        """Return the devices that llama-server itself drives, with those of auxiliary models."""
        return [*self.head_devices(), *(model.device for model in self.auxiliary if model.device)]

    @property
    def owners(self) -> tuple[int | None, ...]:
        """Return the index of the device of each unit; None is the head's processor."""
        return assign_units(self.load.layers, self.gpu_layers, self.split if self.devices else ())

    def units_of(self, index: int | None) -> list[int]:
        """Return the units of the device with this index; None is the head's processor."""
        return [unit for unit, owner in enumerate(self.owners) if owner == index]

    @property
    def layer_buffers(self) -> list[str]:
        """Return the buffer of each layer, and of the output; CPU_BUFFER is the head's processor."""
        return [CPU_BUFFER if owner is None else self.devices[owner].buffer for owner in self.owners]

    def shares(self) -> list[DeviceShare]:
        return [
            DeviceShare(
                device,
                *self.load.share(self.units_of(index), device.backend, device.buffer),
                compute=self.load.compute_on(device, self.load.units - self.gpu_layers),
                auxiliary_bytes=sum(model.total_on(device) for model in self.auxiliary),
            )
            for index, device in enumerate(self.devices)
        ]

    def head_share(self) -> Share:
        units = self.units_of(None)
        kv = self.load.head_kv_bytes(sum(unit < self.load.layers for unit in units))
        return self.load.share(units, backends.CPU.name)._replace(weights=self.load.head_weights(units), kv=kv)

    def overloads(self) -> list[tuple[Device, int]]:
        """Return the devices that get more than they hold, and the MiB that are missing on each."""
        sizes = [(share.device, -(-share.model_bytes // MIB) - share.device.capacity_mib) for share in self.shares()]
        return [(device, mib) for device, mib in sizes if mib > 0]


def check_split(load: Load, gpu_layers: int, units: Sequence[int]) -> None:
    """Check that llama.cpp puts the units on the devices for which these shares are meant.

    :param units: number of units of each device, as in ``-ts``.
    :raises ValueError: llama.cpp would put some units on other devices.
    """
    expected_owners = [index for index, count in enumerate(units) for _unit in range(count)]
    assigned_owners = [owner for owner in assign_units(load.layers, gpu_layers, tuple(units)) if owner is not None]
    if assigned_owners != expected_owners:
        raise ValueError(
            f"llama.cpp would split {len(assigned_owners)} units differently with -ts {','.join(map(str, units))}"
        )


def proportional_shares(units: int, capacities: Sequence[int]) -> list[int]:
    """Return units per device in proportion to the capacities, which a plan shows if the model does not fit."""
    shares: list[int] = []
    for index, capacity in enumerate(capacities):
        remaining_units, later_devices = units - sum(shares), len(capacities) - index - 1
        count = round(remaining_units * capacity / max(1, sum(capacities[index:])))
        shares.append(min(max(count, 1), max(remaining_units - later_devices, 0)) if later_devices else remaining_units)
    return shares
