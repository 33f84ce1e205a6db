# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Projectors for pictures and sound: what their headers say, and what llama-server needs for one.

It loads all tensors of the file to one device. Learnt from tools/mtmd/clip.cpp of build 11063.
"""

from typing import Annotated, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import Name

ARCHITECTURE = "clip"
COMPUTE = 512 * MIB
"""Assumed of its compute buffer: build 11063 logged 121 MiB of gemma3's, and internvl's computes four pictures at once."""


def is_one(model: gguf.Model) -> bool:
    return model.metadata.get("general.architecture") == ARCHITECTURE


def summarize(model: gguf.Model) -> dict[str, Any]:
    """What planning needs of a projector: ``name``, ``tensors`` (how many), ``tensor_bytes``, ``files`` and ``bytes``."""
    name = model.metadata.get("general.name")
    return {
        "architecture": ARCHITECTURE,
        "name": printable(name[: header_summary.MAX_TITLE]) if isinstance(name, str) else model.files[0]["name"],
        "tensors": len(model.tensors),
        "tensor_bytes": sum(tensor.bytes for tensor in model.tensors.values()),
        "files": model.files,
        "bytes": sum(file["bytes"] for file in model.files),
    }


class Projector(NamedTuple):
    """What planning knows of a projector."""

    name: Name
    tensors: Annotated[int, Number(1)]
    """How many."""
    tensor_bytes: Annotated[int, Number(1)]


def weights(projector: Projector, alignment: int) -> int:
    """Bytes of its tensors, each at a multiple of ``alignment`` at most."""
    return projector.tensor_bytes + projector.tensors * alignment
