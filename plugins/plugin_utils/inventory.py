# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the inventory says of a cluster: its hosts, their groups, and their variables held against the roles' specifications."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.common.yaml import yaml_load
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import speed_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, release_request

ROLES = Path(__file__).resolve().parents[2] / "roles"
PACKAGES = ROLES.parent / "playbooks" / "vars" / "packages.yml"
GROUPS = {"head": "llama_head", "worker": "llama_workers"}
RUN_VARIABLES = Path(__file__).with_name("variables.yml")
MODELS = Path(__file__).with_name("published_models.yml")
PREFIX = "llama_"
"""Of operators' variables; those that playbooks and roles set begin with two underscores before it."""
SIMILAR, MISSPELT = 0.8, 0.95
"""How similar a variable's name is to the one that was probably meant, and a group's to the one that was surely meant, of 1."""


@functools.cache
def run_variables() -> dict[str, str]:
    """What an operator may give to a run with -e → its meaning."""
    return yaml_load(RUN_VARIABLES.read_text())["run"]


@functools.cache
def specification() -> dict[str, dict]:
    """Every variable of an operator, with type, default and description, from the roles' argument specifications."""
    variables: dict[str, dict] = {}
    for path in sorted(ROLES.glob("*/meta/argument_specs.yml")):
        options = yaml_load(path.read_text())["argument_specs"]["main"]["options"]
        variables.update({name: option for name, option in options.items() if name.startswith(PREFIX)})
    return variables


@functools.cache
def packages() -> dict[str, dict]:
    """Distribution family → package of each tool (``tools``), and its packages of llama.cpp (``llama``)."""
    lists = yaml_load(PACKAGES.read_text())
    kinds = {"tools": "tool", "llama": "cpp"}
    return {kind: lists[f"__llama_{name}_packages"] for kind, name in kinds.items()}


@functools.cache
def published_models() -> list[dict]:
    """Models for what_fits.offers_of."""
    return yaml_load(MODELS.read_text())["models"]


def _misfits(given: Any, options: Any) -> Iterator[str]:
    """What Ansible's validator lets through, or ends at in a TypeError without the name: a sentence each.

    :param options: name → option, of an argument specification.
    """
    for name, option in options.items():
        value = given.get(name) if isinstance(given, Mapping) else None
        if option["type"] == "int" and isinstance(value, bool):  # it takes these for 1 and 0
            yield f"{name} is true or false, but must be a number."
        if option["type"] == "dict" and value is not None and not isinstance(value, (dict, str)):
            yield f"{name} is {value!r}, but must be a mapping. docs/variables.md describes them."
            continue
        for part in value if isinstance(value, list) else [value]:
            yield from (f"{name}.{why}" for why in _misfits(part, option.get("options") or {}))


def plain(value: Any) -> Any:
    """The value without where it comes from, which Ansible adds to each part of it: whatever copies a model's summary would copy that, too."""
    if isinstance(value, Mapping):
        return {plain(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    kind = next((kind for kind in (str, bool, int, float) if isinstance(value, kind)), None)
    return kind(value) if kind else value


def _variables(name: str, hostvars: Any) -> dict:
    spec = specification()
    values = ((variable, hostvars.get(variable)) for variable in spec)
    given = {variable: value for variable, value in values if value is not None}
    cluster_inputs.check(name, given)
    given = plain(given)  # bounded by the check
    for why in _misfits(given, spec):
        raise Refusal(f"Variables of host {name} are not valid: {why}")
    checked = ArgumentSpecValidator(spec).validate(given)
    if checked.error_messages:
        problems = "; ".join(
            re.sub(
                r"^(\S+)\. Supported parameters include: (.*)", r"\1 is not known, use one of \2", message.rstrip(".")
            )
            for message in checked.error_messages
        )
        raise Refusal(f"Variables of host {name} are not valid: {problems}. docs/variables.md describes them.")
    return {variable: checked.validated_parameters.get(variable) for variable in spec}


def variables_of(task_vars: dict, name: str = "") -> dict:
    """The variables of a host, held against their specifications.

    :param name: of the host; that of this task where it is empty.
    :raises Refusal: types are wrong, or no plan can hold a value.
    """
    name = name or task_vars["inventory_hostname"]
    return _variables(name, task_vars["hostvars"][name])


OF_ONE_RUN = {"llama_accept_advisories", "llama_host_reboot", "llama_link_measure", "llama_proof"}
"""They change nothing of what serves."""
KEPT_LENGTH = 4096


def set_variables(task_vars: dict, name: str, release: ReleasePlan) -> dict[str, str]:
    """The variables of a host that are not their defaults → value, as JSON; of a very long one its beginning and a digest.

    :param release: what llama_release was found to be.
    """
    defaults, given = specification(), variables_of(task_vars, name)
    kept = (
        key
        for key, value in given.items()
        if key not in OF_ONE_RUN and value not in (None, defaults[key].get("default"))
    )
    texts = {key: json.dumps(given[key], sort_keys=True) for key in kept}
    for key, text in texts.items():
        if len(text) > KEPT_LENGTH:
            texts[key] = f"{text[:KEPT_LENGTH]}… {sha256(text.encode()).hexdigest()[:8]}"
    return {**texts, "llama_release": release_request.declaration(release)}


def unknown(given: Iterable[str]) -> dict[str, str]:
    """Variable with the collection's prefix that the collection does not have → the one that was probably meant, or an empty text."""
    known = [*specification(), *run_variables()]
    strange = [name for name in given if name.startswith(PREFIX) and name not in known]
    return {name: next(iter(get_close_matches(name, known, 1, SIMILAR)), "") for name in strange}


def of_play(task_vars: dict) -> set[str]:
    """Names of variables that the play of this task sets, for all of its hosts.

    :raises Refusal: one of them is an operator's, which would have no effect: planning reads the variables of hosts.
    """
    own = task_vars["hostvars"][task_vars["inventory_hostname"]]
    given = {name for name in task_vars if name.startswith(PREFIX) and name not in own}
    without_effect = sorted(given.intersection(specification()))
    if without_effect:
        raise Refusal(
            f"{', '.join(without_effect)} is set in vars of a play, where it has no effect: set it for a host or a group of the "
            "inventory, or pass it with -e."
        )
    return given


def _entry(value: Any, name: str) -> Any:
    """An entry of what a host said, which may be anything."""
    return value.get(name) if isinstance(value, Mapping) else None


def _with_last_known(facts: Any, kept: Any) -> Any:
    """Facts of a host, with what the last run knew where this one could not find it out: whether systemd filters, with the same kernel."""
    same = isinstance(facts, Mapping) and _entry(kept, "kernel") == facts.get("kernel")
    if same and facts.get("units_filter") is None and isinstance(_entry(kept, "units_filter"), bool):
        return {**facts, "units_filter": kept["units_filter"]}
    return facts


def cluster_of(task_vars: Mapping[str, Any]) -> str:
    """Name of the group with the cluster's hosts."""
    return task_vars.get("llama_cluster_group") or names.CLUSTER_GROUP


def hosts(
    task_vars: dict, answers: Mapping[str, Any] | None = None, of_all: Collection[str] = ()
) -> tuple[str, dict[str, dict]]:
    """Name of the cluster, and its hosts as planning takes them.

    :param answers: host → what host_info returned there. Of any other host the facts are those that the last run left on the head.
    :param of_all: names of variables that are set for all hosts at once, of of_play.
    :raises Refusal: groups or types are wrong, or no plan can hold a value.
    """
    groups, hostvars = task_vars["groups"], task_vars["hostvars"]
    cluster = cluster_of(task_vars)
    if cluster not in groups:
        raise Refusal(
            f"The inventory has no group {cluster!r}: put the cluster's hosts into it, or set llama_cluster_group to the right group."
        )
    members = {}
    for name in groups[cluster]:
        parts = [part for part, group in GROUPS.items() if name in groups.get(group, [])]
        if parts:
            own = hostvars[name]
            members[name] = {
                "groups": parts,
                "ansible_host": own.get("ansible_host") or name,
                "variables": _variables(name, own),
                "unknown_variables": unknown({*own, *of_all}),
                "facts": _entry((answers or {}).get(name), "facts"),
            }
    retired_group = changes.retired_group(cluster)
    retired = groups.get(retired_group, [])
    idle = [name for name in groups[cluster] if name not in members and name not in retired]
    for group, meant in ((group, get_close_matches(group, GROUPS.values(), 1, MISSPELT)) for group in groups):
        lost = [name for name in groups[group] if name in idle] if meant and group != cluster else ()
        if lost:
            raise Refusal(
                f"The group {validation.printable(group)} of {', '.join(map(validation.printable, lost))} is none that the collection knows: name it "
                f"{meant[0]}, or keep these hosts out of {cluster}."
            )
    if idle and members:
        Display().warning(
            f"{', '.join(map(validation.printable, idle))} of group {cluster} are in neither llama_head nor llama_workers, so the run ignores them: "
            "check the spelling of the groups."
        )
    kept = next((_entry(host["facts"], "cached") for host in members.values() if "head" in host["groups"]), None)
    for name, host in members.items():
        host["facts"] = _with_last_known(host["facts"], _entry(kept, name)) or _entry(kept, name)
        if hostvars[name].get("ansible_connection") == "local" and isinstance(host["facts"], Mapping):
            # Somebody else's connection: that of the person who runs Ansible, from wherever that is today.
            host["facts"] = {**host["facts"], "reached_at": None}
    if not members:
        raise Refusal(
            f"Group {cluster} has no host that is also in llama_head or llama_workers: put the head and the workers there."
        )
    _refuse_who_left(kept, {*members, *retired}, retired_group)
    return cluster, cluster_inputs.checked_hosts(cluster, members)


def measured_speed(answers: Mapping[str, Any], head: str) -> speed_record.SpeedRecord | None:
    """What the head keeps of the speed that was measured last; None where it keeps nothing that can be read.

    :param answers: host → what host_info returned there.
    """
    return speed_record.readable(_entry(_entry(answers.get(head), "facts"), "measured_speed"))


def _refuse_who_left(kept: Any, known: Collection[str], retired_group: str) -> None:
    """A host of the last plan that is in none of the cluster's groups runs on unseen, and is more often misspelt than gone.

    :param kept: host → facts, as the last run left them on the head; a host may say anything.
    :param known: hosts that are in these groups.
    :raises Refusal: there is such a host.
    """
    left = [validation.printable(str(name)) for name in kept if name not in known] if isinstance(kept, Mapping) else []
    if left:
        raise Refusal(
            f"None of the cluster's groups has {', '.join(left)}, with a part in its last plan: check the spelling of the groups, or put what is gone into "
            f"the group {retired_group}, and site.yml removes what runs there."
        )
