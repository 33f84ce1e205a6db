# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of proofs on the head."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, Record

BYTES, KEPT = 1 << 20, 16


def read(path: Path) -> dict[str, Proof]:
    """Id of the work → its proof; empty where there is no record that can be read."""
    try:
        found = typed_json.parse(Record, reading.read_object(path, BYTES))
    except (OSError, ValueError):
        return {}
    return {proof.id: proof for proof in found.proofs}


def keep(path: Path, proof: Proof) -> None:
    """Adds a proof: those of a plan that a cluster may go back to stay.

    :raises OSError: the record cannot be written.
    """
    others = [one for one in read(path).values() if one.id != proof.id]
    replace_file(path, json.dumps(typed_json.dump(Record((*others[1 - KEPT :], proof)))) + "\n", 0o644)
