# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Models of Ollama in its folder on a host: a manifest names blobs, one of which is a GGUF file.

Names, paths and media types: types/model/name.go, manifest/ and server/images.go of ollama/ollama.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Size, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types

MANIFEST_BYTES = 1 << 20
FOLDERS = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models", "/var/lib/ollama/models")
"""Of its service, as Ollama's installer and packages of distributions set it up."""
MEDIA_TYPES = {
    host_types.MODEL: "application/vnd.ollama.image.model",
    host_types.DRAFT: "application/vnd.ollama.image.model",
    host_types.MMPROJ: "application/vnd.ollama.image.projector",
}
"""Role of a file → what a manifest calls its blob."""


class Layer(NamedTuple):
    """A blob of a model."""

    mediaType: Annotated[str, Text()]
    digest: Annotated[str, Text(rf"sha256:{download_record.SHA256}")]
    size: Size


class Manifest(NamedTuple):
    """Of a model of Ollama."""

    layers: tuple[Layer, ...]


def file_name(whole: str) -> str:
    """What a model's file is called in a plan.

    :param whole: HOST/NAMESPACE/NAME:TAG.
    """
    return whole.rpartition("/")[2].replace(":", "-") + ".gguf"


def folders() -> list[Path]:
    """Where Ollama's models may lie on this host."""
    own = [*filter(None, [os.environ.get("OLLAMA_MODELS")]), os.path.expanduser("~/.ollama/models")]
    return [Path(folder) for folder in (*own, *FOLDERS)]


def names() -> Iterator[str]:
    """Of the models on this host."""
    for folder in folders():
        for path in sorted((folder / "manifests").glob("*/*/*/*")):
            *parts, tag = path.relative_to(folder / "manifests").parts
            yield f"{'/'.join(parts)}:{tag}"


def blobs(whole: str) -> dict[str, Path]:
    """Role → file of a model that this host has, as far as it is whole."""
    repository, _colon, tag = whole.rpartition(":")
    for folder in folders():
        try:
            found = reading.read_object(folder / "manifests" / repository / tag, MANIFEST_BYTES)
            manifest = typed_json.parse(Manifest, found)
        except (OSError, ValueError):
            continue
        named = {
            role: (folder / "blobs" / layer.digest.replace(":", "-"), layer.size)
            for role, media_type in MEDIA_TYPES.items()
            for layer in manifest.layers
            if layer.mediaType == media_type
        }
        return {role: path for role, (path, size) in named.items() if path.is_file() and path.stat().st_size == size}
    return {}
