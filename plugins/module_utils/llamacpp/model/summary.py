# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What planning knows of a model: the JSON of header_summary.summarize as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Union

Key = Union[int, tuple[int, ...]]
"""Value of a key of the header: one for the model, or one for each layer."""


class TensorGroup(NamedTuple):
    """Tensors that differ in nothing but their layer."""

    name: str
    """With ``*`` in place of the layer."""
    type: str
    shape: tuple[int, ...]
    bytes: int
    """Of each of them."""
    layers: tuple[int, ...] | None
    """None of a tensor outside the layers."""

    @property
    def number(self) -> int:
        """How many there are."""
        return 1 if self.layers is None else len(self.layers)


class ModelSummary(NamedTuple):
    """The header of a model. header_summary.summarize says what the fields mean."""

    architecture: str
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    key_dimension: int
    value_dimension: int
    context: int
    vocabulary: int
    layer_bytes: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    keys: tuple[tuple[str, Key], ...] = ()
    """Name of a key without the architecture, and its value."""
    tensors: tuple[TensorGroup, ...] | None = None
    """None of a summary without their names."""
    expert_bytes: tuple[int, ...] = ()
    """Of each layer, where there are no names: bytes of which a token reads those of the chosen experts."""
    largest_tensor_bytes: int | None = None
    parameters: int | None = None
    bytes: int | None = None
    """Of all files."""
    files: tuple[tuple[str, int], ...] = ()
    """Name and bytes of each."""

    @property
    def named_tensors(self) -> tuple[TensorGroup, ...]:
        return self.tensors or ()

    @property
    def size(self) -> int:
        """Bytes of its files, or of its tensors where those are not known."""
        return self.bytes or sum(self.layer_bytes) + self.input_bytes + self.output_bytes

    def number(self, key: str) -> int | None:
        """The one value of a key; None where there is none, or one for each layer."""
        value = dict(self.keys).get(key)
        return value if isinstance(value, int) else None

    def listed(self, key: str) -> tuple[int, ...] | None:
        """The values of a key that has one for each layer."""
        value = dict(self.keys).get(key)
        return value if isinstance(value, tuple) else None

    def by_layer(self, key: str, default: int = 0) -> list[int]:
        """The value of a key in each layer, whether it has one value or several."""
        listed = self.listed(key)
        if listed is None:
            number = self.number(key)
            return [default if number is None else number] * self.layers
        return [*listed[: self.layers], *[0] * (self.layers - len(listed))]

    def without_key(self, key: str) -> ModelSummary:
        return self._replace(keys=tuple(pair for pair in self.keys if pair[0] != key))


def parse(data: Mapping[str, Any]) -> ModelSummary:
    """:param data: JSON in which header_summary.problem finds nothing."""
    plain = {name: data[name] for name in ModelSummary._fields if name in data}
    keys = data.get("keys") or {}
    tensors = data.get("tensors")
    return ModelSummary(
        **{
            **plain,
            "layer_bytes": tuple(data["layer_bytes"]),
            "keys": tuple((name, tuple(key) if isinstance(key, list) else key) for name, key in keys.items()),
            "tensors": None if tensors is None else tuple(map(_tensor_group, tensors)),
            "expert_bytes": tuple(data.get("expert_bytes") or ()),
            "files": tuple((file["name"], file["bytes"]) for file in data.get("files") or ()),
        }
    )


def _tensor_group(row: Mapping[str, Any]) -> TensorGroup:
    layers = row["layers"]
    return TensorGroup(
        row["name"], row["type"], tuple(row["shape"]), row["bytes"], None if layers is None else tuple(layers)
    )
