# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Models of Ollama in its folder on a host: a manifest names blobs, one of which is a GGUF file.

Names, paths and media types: types/model/name.go, manifest/ and server/images.go of ollama/ollama.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Size, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, model_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types

MAX_MANIFEST_BYTES = 1 << 20
SERVICE_FOLDERS = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models", "/var/lib/ollama/models")
"""Folders in which Ollama's installer and distributions' packages let its service store models."""
MEDIA_TYPES = {
    host_types.MODEL: "application/vnd.ollama.image.model",
    host_types.DRAFT: "application/vnd.ollama.image.model",
    host_types.MMPROJ: "application/vnd.ollama.image.projector",
}
"""Role of a file → media type of its blob."""


class ManifestLayer(NamedTuple):
    mediaType: Annotated[str, Text()]
    digest: Annotated[str, Text(rf"sha256:{download_record.SHA256_PATTERN}")]
    size: Size


class OllamaManifest(NamedTuple):
    layers: tuple[ManifestLayer, ...]


def file_name(model_name: str) -> str:
    """Return the name of a model's file in the plan.

    :param model_name: HOST/NAMESPACE/NAME:TAG.
    """
    return model_name.rpartition("/")[2].replace(":", "-") + ".gguf"


def folders() -> list[Path]:
    """Return the folders of this host that may contain Ollama's models."""
    user_folders = [*filter(None, [os.environ.get("OLLAMA_MODELS")]), os.path.expanduser("~/.ollama/models")]
    return [Path(folder) for folder in (*user_folders, *SERVICE_FOLDERS)]


def model_names() -> Iterator[str]:
    for folder in folders():
        for path in sorted((folder / "manifests").glob("*/*/*/*")):
            *parts, tag = path.relative_to(folder / "manifests").parts
            yield f"{'/'.join(parts)}:{tag}"


def blobs(model_name: str) -> dict[str, Path]:
    """Return the complete files of a model on this host, by role."""
    repository, _colon, tag = model_name.rpartition(":")
    for folder in folders():
        manifest = typed_json.read_file(OllamaManifest, folder / "manifests" / repository / tag, MAX_MANIFEST_BYTES)
        if manifest:
            named_blobs = {
                role: (folder / "blobs" / layer.digest.replace(":", "-"), layer.size)
                for role, media_type in MEDIA_TYPES.items()
                for layer in manifest.layers
                if layer.mediaType == media_type
            }
            return {role: path for role, (path, size) in named_blobs.items() if model_files.size_of(path) == size}
    return {}
