# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the inventory says of a cluster: its hosts, their groups, and their variables held against the roles' specifications."""

from __future__ import annotations

import functools
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.utils.display import Display

ROLES = Path(__file__).resolve().parents[2] / "roles"
CLUSTER_GROUP = "llama_cluster"
GROUPS = {"head": "llama_head", "worker": "llama_workers"}
INTERNAL_ENDINGS = (
    "_build_changes",
    "_build_releases",
    "_facts",
    "_link_address",
    "_link_head",
    "_link_kept",
    "_link_port",
    "_plan",
    "_remove",
    "_restart",
    "_tuning_plan",
)
REGISTERED = {"llama_host_rebooted"}
"""What a run itself sets and is named nearly as a variable of an operator."""
NEARLY = 0.9
"""How similar a name is to the one that was meant, of 1."""


@functools.cache
def specification() -> dict[str, dict]:
    """Every variable of an operator, with type, default and description, from the roles' argument specifications."""
    found: dict[str, dict] = {}
    for path in sorted(ROLES.glob("*/meta/argument_specs.yml")):
        options = yaml.safe_load(path.read_text())["argument_specs"]["main"]["options"]
        found.update({name: option for name, option in options.items() if not name.endswith(INTERNAL_ENDINGS)})
    return found


@functools.cache
def packages() -> dict[str, dict]:
    """``tools``: distribution family → tool → package; ``llama``: distribution family → its packages of llama.cpp."""
    found = yaml.safe_load((ROLES / "llama_host" / "vars" / "packages.yml").read_text())
    return {"tools": found["llama_host_packages"], "llama": found["llama_host_packaged"]}


def _variables(name: str, hostvars: Any, spec: dict[str, dict]) -> dict:
    given = {variable: hostvars[variable] for variable in spec if hostvars.get(variable) is not None}
    for variable, value in given.items():
        if spec[variable]["type"] == "dict" and not isinstance(value, (dict, str)):
            raise AnsibleActionFail(
                f"Variables of host {name} are not right: {variable} is {value!r}, and a mapping is wanted. They are described in docs/variables.md."
            )
    checked = ArgumentSpecValidator(spec).validate(given)
    if checked.error_messages:
        told = "; ".join(
            re.sub(
                r"^(\S+)\. Supported parameters include: (.*)", r"\1 is not known, use one of \2", message.rstrip(".")
            )
            for message in checked.error_messages
        )
        raise AnsibleActionFail(
            f"Variables of host {name} are not right: {told}. They are described in docs/variables.md."
        )
    return {variable: checked.validated_parameters.get(variable) for variable in spec}


def mistyped(hostvars: Any, spec: dict[str, dict]) -> dict[str, str]:
    """Variable that is none of ours, and the one of ours that is named nearly so."""
    found = {}
    for name in hostvars:
        if name.startswith("llama_") and name not in spec and name not in REGISTERED:
            for meant in get_close_matches(name, spec, 1, NEARLY):
                found[name] = meant
    return found


def hosts(task_vars: dict) -> tuple[str, dict[str, dict]]:
    """Name of the cluster, and its hosts as planning takes them. Facts are those that the play registered as ``llama_facts``; of a
    host that did not answer, those that the last run left on the head."""
    groups, hostvars = task_vars["groups"], task_vars["hostvars"]
    cluster = task_vars.get("llama_cluster_group") or CLUSTER_GROUP
    if cluster not in groups:
        raise AnsibleActionFail(
            f"The inventory has no group {cluster}: put the cluster's hosts into it, or name the right group in llama_cluster_group."
        )
    spec = specification()
    found = {}
    for name in groups[cluster]:
        parts = [part for part, group in GROUPS.items() if name in groups.get(group, [])]
        if parts:
            own = hostvars[name]
            found[name] = {
                "groups": parts,
                "ansible_host": own.get("ansible_host") or name,
                "variables": _variables(name, own, spec),
                "mistyped": mistyped(own, spec),
                "facts": (own.get("llama_facts") or {}).get("facts"),
            }
    idle = [name for name in groups[cluster] if name not in found]
    if idle and found:
        Display().warning(
            f"{', '.join(idle)} of group {cluster} are in neither llama_head nor llama_workers, so nothing is done there: look whether a group is "
            "misspelt."
        )
    kept: dict = next(
        (host["facts"]["kept"] for host in found.values() if "head" in host["groups"] and host["facts"]), {}
    )
    for name, host in found.items():
        host["facts"] = host["facts"] or kept.get(name)
    if not found:
        raise AnsibleActionFail(
            f"Group {cluster} has no host that is also in llama_head or llama_workers: put the head and the workers there."
        )
    return cluster, found
