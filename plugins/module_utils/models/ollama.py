# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Models of Ollama: a manifest names blobs, one of which is a GGUF file. The same in its registry and in its folder on a host.

Names, paths and media types: types/model/name.go, manifest/ and server/images.go of ollama/ollama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Maybe, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record

MANIFEST_BYTES = 1 << 20
ACCEPT = "application/vnd.docker.distribution.manifest.v2+json"
MEDIA_TYPES = {
    download_record.MODEL: "application/vnd.ollama.image.model",
    download_record.DRAFT: "application/vnd.ollama.image.model",
    download_record.MMPROJ: "application/vnd.ollama.image.projector",
}
"""Role of a file → what a manifest calls its blob."""
LAYER = {"mediaType": Text(), "digest": Text(rf"sha256:{download_record.SHA256}"), "size": Number()}
SHAPE = {"layers": [LAYER], "schemaVersion": Maybe(Number())}


class Name(NamedTuple):
    """HOST/NAMESPACE/NAME:TAG, with http:// in front where the registry has no TLS."""

    scheme: str
    host: str
    namespace: str
    name: str
    tag: str

    @property
    def manifest_url(self) -> str:
        return f"{self._repository}/manifests/{self.tag}"

    def blob_url(self, digest: str) -> str:
        """:param digest: hexadecimal digits."""
        return f"{self._repository}/blobs/sha256:{digest}"

    @property
    def manifest_path(self) -> str:
        """Below Ollama's folder."""
        return f"manifests/{self.host}/{self.namespace}/{self.name}/{self.tag}"

    def file_name(self, role: str) -> str:
        """What a blob is called on the head."""
        return f"{self.name}-{self.tag}{'' if role == download_record.MODEL else f'-{role}'}.gguf"

    @property
    def _repository(self) -> str:
        return f"{self.scheme}://{self.host}/v2/{self.namespace}/{self.name}"


def name_of(whole: str) -> Name:
    scheme, separator, rest = whole.rpartition("://")
    host, namespace, last = rest.split("/")
    name, _colon, tag = last.partition(":")
    return Name(scheme if separator else "https", host, namespace, name, tag)


def blob_path(digest: str) -> str:
    """Below Ollama's folder."""
    return f"blobs/sha256-{digest}"


class Blob(NamedTuple):
    sha256: str
    bytes: int


def problem(manifest: Mapping[str, Any]) -> str | None:
    """Why this is no manifest; None where it is one."""
    found = validation.problem("it", manifest) or validation.mismatch("it", manifest, SHAPE)
    return f"{found.where} {found.why}" if found else None


def blobs(manifest: Mapping[str, Any], role: str) -> list[Blob]:
    """The files with this role that a manifest names."""
    return [
        Blob(layer["digest"].partition(":")[2], layer["size"])
        for layer in manifest["layers"]
        if layer["mediaType"] == MEDIA_TYPES[role]
    ]
