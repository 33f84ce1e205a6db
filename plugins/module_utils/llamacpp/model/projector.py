# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Projectors for images and sound: their headers, and their memory in llama-server.

llama-server loads all tensors of the file onto one device (tools/mtmd/clip.cpp of build 11063).
"""

from typing import Annotated, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import Name

ARCHITECTURE = "clip"
COMPUTE_BYTES = 512 * MIB
"""Assumed size of its compute buffer: build 11063 logged 121 MiB for gemma3, and internvl computes four images at once."""


def is_projector(header: gguf.ModelHeader) -> bool:
    return header.metadata.get("general.architecture") == ARCHITECTURE


def summarize(header: gguf.ModelHeader) -> dict[str, Any]:
    """Return the summary of a projector: ``name``, ``tensors`` (their number), ``tensor_bytes``, ``files`` and ``bytes``."""
    name = header.metadata.get("general.name")
    return {
        "architecture": ARCHITECTURE,
        "name": printable(name[: header_summary.MAX_NAME_LENGTH]) if isinstance(name, str) else header.files[0]["name"],
        "tensors": len(header.tensors),
        "tensor_bytes": sum(tensor.bytes for tensor in header.tensors.values()),
        "files": header.files,
        "bytes": sum(file["bytes"] for file in header.files),
    }


class Projector(NamedTuple):
    name: Name
    tensors: Annotated[int, Number(1)]
    """Number of tensors."""
    tensor_bytes: Annotated[int, Number(1)]


def bytes_of(projector: Projector, alignment: int) -> int:
    """Return an upper bound on the bytes of its tensors with this alignment."""
    return projector.tensor_bytes + projector.tensors * alignment
