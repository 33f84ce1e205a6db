# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Projectors for pictures and sound: what their headers say, and what llama-server needs for one.

It loads all tensors of the file to one device. Learnt from tools/mtmd/clip.cpp of build 11063.
"""

from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    compute_buffers,
    gguf,
    header_summary,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import Count, Name

ARCHITECTURE = "clip"
STATES, FEEDS = 4, 2
"""So many values of the width, and of the inner width, are kept for each patch. 3 and 1 were logged by build 11063 with flash attention,
of gemma3's form with one picture (121.25 MiB of 4096 patches, width 1152, inner width 4304); with gates there are two of the inner width."""
FIXED = frozenset(("mlp", "ldp", "ldpv2", "adapter", "gemma3", "idefics3", "internvl", "llama4", "janus_pro"))
"""Projectors whose pictures all have the size that the header says."""
PATCHES = 16384
"""Assumed of all others: 4096 tokens of four patches each, as most have at most (set_limit_image_tokens of build 11063)."""
BATCHED, PICTURES = frozenset(("internvl",)), 4
"""Of FIXED, those of which so many pictures are computed at once as give 1024 tokens: four (support_batch in models.h of build 11063). One of gemma3 was
seen in the log where four were sent."""
FRAMES = 3000
"""Of sound, at once: 30 s."""
COUNTS = {"width": "embedding_length", "feed_forward": "feed_forward_length", "heads": "attention.head_count"}
SIZES = {"image_size": "image_size", "patch_size": "patch_size", "max_pixels": "image_max_pixels"}
"""Key of a summary → key of the header, after the encoder's prefix."""
KINDS = ("vision", "audio")


def is_one(model: gguf.Model) -> bool:
    return model.metadata.get("general.architecture") == ARCHITECTURE


def summarize(model: gguf.Model) -> dict[str, Any]:
    """What planning needs of a projector: ``name``, ``tensors`` (how many), ``tensor_bytes``, ``files``, ``bytes``, and its ``encoders``."""
    name = model.metadata.get("general.name")
    return {
        "architecture": ARCHITECTURE,
        "name": printable(name[: header_summary.MAX_TITLE]) if isinstance(name, str) else model.files[0]["name"],
        "tensors": len(model.tensors),
        "tensor_bytes": sum(tensor.bytes for tensor in model.tensors.values()),
        "files": model.files,
        "bytes": sum(file["bytes"] for file in model.files),
        "encoders": [_encoder(model, kind) for kind in KINDS if model.metadata.get(f"clip.has_{kind}_encoder") is True],
    }


def _encoder(model: gguf.Model, kind: str) -> dict[str, Any]:
    """Numbers of one encoder; null of those that the header does not have."""
    keys = {**COUNTS, **(SIZES if kind == "vision" else {})}
    numbers = {key: model.metadata.get(f"clip.{kind}.{name}") for key, name in keys.items()}
    projector = model.metadata.get(f"clip.{kind}.projector_type") or model.metadata.get("clip.projector_type")
    return {
        "kind": kind,
        "projector": printable(projector[: header_summary.MAX_TITLE]) if isinstance(projector, str) else "",
        **{key: value if _is_count(value) else None for key, value in numbers.items()},
    }


def _is_count(value: Any) -> bool:
    return gguf.is_whole(value) and 0 < value <= gguf.MAX_COUNT


class Encoder(NamedTuple):
    """Of pictures or of sound, with numbers that the header has."""

    kind: Annotated[str, KINDS]
    projector: Name
    width: Optional[Count] = None
    feed_forward: Optional[Count] = None
    heads: Optional[Count] = None
    image_size: Optional[Count] = None
    patch_size: Optional[Count] = None
    max_pixels: Optional[Count] = None


class Projector(NamedTuple):
    """What planning knows of a projector."""

    name: Name
    tensors: Annotated[int, Number(1)]
    """How many."""
    tensor_bytes: Annotated[int, Number(1)]
    encoders: tuple[Encoder, ...]


def weights(projector: Projector, alignment: int) -> int:
    """Bytes of its tensors, each at a multiple of ``alignment`` at most."""
    return projector.tensor_bytes + projector.tensors * alignment


def bound(projector: Projector) -> int:
    """What is assumed of its compute buffer in bytes; 0 of a header that says nothing of its encoders."""
    return max((_bound_of(encoder) for encoder in projector.encoders), default=0)


def _bound_of(encoder: Encoder) -> int:
    width, inner, heads = encoder.width or 0, encoder.feed_forward or 0, encoder.heads or 0
    patches = _patches(encoder)
    flashes = heads and width // heads in compute_buffers.FLASH_SIZES
    scores = 0 if flashes else heads * patches
    return compute_buffers.FLOAT * patches * (STATES * width + FEEDS * inner + scores)


def _patches(encoder: Encoder) -> int:
    """How many are computed at once, at most."""
    if encoder.kind == "audio":
        return FRAMES
    image, patch, pixels = encoder.image_size, encoder.patch_size, encoder.max_pixels
    if not patch:
        return PATCHES
    if pixels:
        return max(1, -(-pixels // patch**2))
    if encoder.projector not in FIXED or not image:
        return PATCHES
    pictures = PICTURES if encoder.projector in BATCHED else 1
    return pictures * (image // patch) ** 2 + pictures
