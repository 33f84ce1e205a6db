# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan that proves a release on the staging ports, and what keeps it from being carried out."""

from __future__ import annotations

import math

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import head as heads

MODEL = {"layers": 2 * capabilities.MAX_ENDPOINTS, "width": 128, "type": "f32"}
ROOM_MIB = 1024
"""What has to be free on a device beyond the known-answer model, for what a backend takes for itself."""


def head_variables(variables: dict) -> dict:
    """The head's variables, to serve the known-answer model on its staging port, with every worker and to itself only."""
    return {
        **variables,
        "llama_model_path": None,
        "llama_model_known_answer": MODEL,
        "llama_placement": "all",
        "llama_server_host": "127.0.0.1",
        "llama_server_port": heads.staging_port_of(variables),
        "llama_server_staging_port": variables["llama_server_port"],
        "llama_server_api_key_file": None,
        "llama_server_extra_args": [],
        "llama_server_gpu_layers": None,
        "llama_server_tensor_split": [],
        "llama_server_override_tensor": [],
    }


def obstacles(plan: dict, answers: dict[str, dict]) -> list[str]:
    """Why the instances of a plan for staging cannot be started, a sentence each.

    :param answers: host → what host_info returned just before, given its part of this plan: ``drift`` and ``free_mib``, or ``msg`` of an
        error; absent where it did not answer.
    """
    if plan["refused"]:
        return plan["reasons"]
    found = {name: answers.get(name) or {} for name in plan["hosts"]}
    errors = [f"{name}: {host['msg']}" for name, host in found.items() if "msg" in host]
    silent = [
        f"{name} could not be reached" for name, host in found.items() if "free_mib" not in host and "msg" not in host
    ]
    if errors or silent:
        return errors + silent
    lacking = [
        name
        for name, host in found.items()
        if host["drift"]["missing_builds"]
        or any(path.startswith(f"{plan['hosts'][name]['runtime']}/") for path in host["drift"]["changed_files"])
    ]
    if lacking:
        return [f"{', '.join(lacking)} lacks the planned release: run site.yml"]
    return _lacking_room(plan, {name: host["free_mib"] for name, host in found.items()})


def _lacking_room(plan: dict, free: dict[str, dict[str, int]]) -> list[str]:
    """Why a planned staging would disturb what serves: a sentence for each device that has too little free memory.

    :param free: host → device → MiB that are free now, of memory.free_mib; a device that is not there is not known.
    """
    found = []
    sizes = {entry["device"]: entry["total_mib"] for entry in plan["placement"]}
    for name, host in plan["hosts"].items():
        needed: dict[str, float] = {}
        for worker in host["workers"]:
            size = next(total for device, total in sizes.items() if f"[{worker['endpoint']}]" in device)
            device = "CPU" if worker["shared"] else worker["device"]
            needed[device] = needed.get(device, 0) + size + ROOM_MIB
        for device in plan["head"]["devices"] if name == plan["head"]["host"] else []:
            needed[device] = needed.get(device, 0) + sizes[device] + ROOM_MIB
        if name == plan["head"]["host"]:
            needed["CPU"] = needed.get("CPU", 0) + ROOM_MIB
        found += [
            f"{name} has {free[name][device]} MiB free on {device}, and {math.ceil(size)} MiB are needed: try it when there is more"
            for device, size in needed.items()
            if device in free[name] and free[name][device] < size
        ]
    return found
