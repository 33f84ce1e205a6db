# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record that a host has of a plan: its own part of it, under the id of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request


def record(plan: Mapping[str, Any], name: str, contents: Mapping[str, str]) -> dict[str, Any]:
    """The record of one host, before the plan is applied.

    :param contents: path on the controller → text, of files that the run copies.
    """
    host = plan["hosts"][name]
    files = [
        {
            **{key: value for key, value in file.items() if key != "source"},
            **({"content": contents[file["source"]]} if "source" in file else {}),
        }
        for file in host["files"]
    ]
    return {
        "schema": history.SCHEMA,
        "id": plan["id"],
        "cluster": plan["cluster"],
        "time": 0,
        "state": history.APPLYING,
        "name": name,
        "hosts": list(plan["hosts"]),
        "release": plan["release"],
        "model": plan["model"],
        "releases": plan["releases"],
        "host": {**host, "files": files},
        "head": plan["head"] if name == plan["head"]["host"] else None,
        "declared": release_request.declaration(plan["release"]),
        "spared": changes.spared(plan) if name == plan["head"]["host"] else None,
    }
