# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of proofs on the head."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, Record

BYTES = 1 << 20


def read(path: Path) -> dict[str, Proof]:
    """Id of the work → its proof; empty where there is no record that can be read."""
    try:
        found = typed_json.parse(Record, reading.read_object(path, BYTES))
    except (OSError, ValueError):
        return {}
    return {proof.id: proof for proof in found.proofs}
