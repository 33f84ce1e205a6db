# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster in the inventory: its hosts, their groups, and their variables checked against the roles' specifications."""

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
from ansible.module_utils.parsing.convert_bool import BOOLEANS
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import speed_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, release_request

ROLES_FOLDER = Path(__file__).resolve().parents[2] / "roles"
PACKAGES_FILE = ROLES_FOLDER.parent / "playbooks" / "vars" / "packages.yml"
ROLE_GROUPS = {"head": "llama_head", "worker": "llama_workers"}
BALANCER_GROUP = "llama_balancer"
RUN_VARIABLES_FILE = Path(__file__).with_name("variables.yml")
PUBLISHED_MODELS_FILE = Path(__file__).with_name("published_models.yml")
VARIABLE_PREFIX = "llama_"
"""Prefix of operators' variables; variables that playbooks and roles set begin with two underscores."""
VARIABLE_OF_OPTION = {
    "projector": "llama_model_mmproj",
    "draft": "llama_model_draft",
    "registry-token": "llama_model_token_file",
    options.SPECULATION: "llama_server_speculation",
}
"""Option → variable that sets it, if the option's remedy does not name the variable."""
MIN_VARIABLE_SIMILARITY, MIN_GROUP_SIMILARITY = 0.8, 0.95
"""Minimum similarity (0 to 1) to a known name for a variable that was probably misspelt, and for a group that certainly was."""


@functools.cache
def run_variables() -> dict[str, str]:
    """Return the meaning of each variable that an operator may set with -e."""
    return yaml_load(RUN_VARIABLES_FILE.read_text())["run"]


@functools.cache
def specification() -> dict[str, dict]:
    """Return the operator's variables with type, default and description, from the roles' argument specifications."""
    variables: dict[str, dict] = {}
    for path in sorted(ROLES_FOLDER.glob("*/meta/argument_specs.yml")):
        option_specs = yaml_load(path.read_text())["argument_specs"]["main"]["options"]
        variables.update({name: spec for name, spec in option_specs.items() if name.startswith(VARIABLE_PREFIX)})
    return variables


@functools.cache
def packages() -> dict[str, dict]:
    """Return the package of each tool (``tools``) and the packages of llama.cpp (``llama``) for each distribution family."""
    package_lists = yaml_load(PACKAGES_FILE.read_text())
    infixes = {"tools": "tool", "llama": "cpp"}
    return {kind: package_lists[f"__llama_{infix}_packages"] for kind, infix in infixes.items()}


@functools.cache
def published_models() -> list[dict]:
    """Return the published models, for what_fits.offers_of."""
    return yaml_load(PUBLISHED_MODELS_FILE.read_text())["models"]


def _type_problems(values: Any, specs: Any) -> Iterator[str]:
    """Yield a sentence for each wrong value that Ansible's validator accepts, or that makes it raise a TypeError without the variable's name."""
    for name, spec in specs.items():
        value = values.get(name) if isinstance(values, Mapping) else None
        if spec["type"] == "int" and isinstance(value, bool):  # the validator accepts these as 1 and 0
            yield f"{name} is true or false, but must be a number."
        if spec["type"] == "int" and isinstance(value, str) and not re.fullmatch(r"\s*[+-]?\d+\s*", value):
            thousands_match = re.fullmatch(r"(\d{1,6})k", value)
            yield f"{name} is {value!r}: use a number{f', such as {int(thousands_match[1]) * 1024}' if thousands_match else ''}."
        if spec["type"] == "bool" and isinstance(value, str) and value.lower().strip() not in BOOLEANS:
            yield f"{name} is {value!r}: use true or false."
        if spec["type"] == "dict" and isinstance(value, str) and not re.search("[={]", value):
            yield f"{name} is {value!r}: use a mapping (see docs/variables.md)."
        if spec["type"] == "dict" and value is not None and not isinstance(value, (dict, str)):
            yield f"{name} is {value!r}: use a mapping (see docs/variables.md)."
            continue
        for element in value if isinstance(value, list) else [value]:
            yield from (f"{name}.{problem}" for problem in _type_problems(element, spec.get("options") or {}))


def _expand_repositories(variables: Any) -> dict[str, Any]:
    """Return the variables, with a mapping for each repository in llama.cpp's notation, ``OWNER/NAME:QUANTISATION``."""

    def expand(name: str, value: Any) -> Any:
        if name == "llama_models" and isinstance(value, list):
            return [_expand_repositories(entry) if isinstance(entry, dict) else entry for entry in value]
        is_repository = name in ("huggingface", "llama_model_huggingface") and isinstance(value, str)
        match = re.fullmatch(r"([^/:={]+/[^/:={]+)(?::([^/:]+))?", value) if is_repository else None
        return {"repo": match[1], **({"quantisation": match[2]} if match[2] else {})} if match else value

    return {name: expand(name, value) for name, value in variables.items()}


def strip_origin(value: Any) -> Any:
    """Return the value without the origin tags that Ansible adds to each part, and that every copy would retain."""
    if isinstance(value, Mapping):
        return {strip_origin(key): strip_origin(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [strip_origin(element) for element in value]
    value_type = next((value_type for value_type in (str, bool, int, float) if isinstance(value, value_type)), None)
    return value_type(value) if value_type else value


def _validated_variables(name: str, host_variables: Any) -> dict:
    spec = specification()
    items = ((variable, host_variables.get(variable)) for variable in spec)
    variables = {variable: value for variable, value in items if value is not None}
    cluster_inputs.check_variables(name, variables)
    variables = _expand_repositories(strip_origin(variables))  # the check limits their depth
    for problem in _type_problems(variables, spec):
        raise Refusal(f"Variables of host {name} are not valid: {problem}")
    validation_result = ArgumentSpecValidator(spec).validate(variables)
    if validation_result.error_messages:
        problems = "; ".join(
            re.sub(r"^(\S+)\. Supported parameters include: (.*)", r"\1 is unknown: use one of \2", message.rstrip("."))
            for message in validation_result.error_messages
        )
        raise Refusal(f"Variables of host {name} are not valid: {problems}. See docs/variables.md.")
    return {variable: validation_result.validated_parameters.get(variable) for variable in spec}


def variables_of(task_vars: dict, name: str = "") -> dict:
    """Return the variables of a host, validated against the roles' specifications.

    :param name: name of the host; empty for the host of this task.
    :raises Refusal: a type is wrong, or a value is outside the limits.
    """
    name = name or task_vars["inventory_hostname"]
    return _validated_variables(name, task_vars["hostvars"][name])


NON_SERVICE_VARIABLES = {"llama_accept_advisories", "llama_host_reboot", "llama_link_measure", "llama_proof"}
"""Variables that do not affect services."""
MAX_VALUE_LENGTH = 4096


def changed_variables(task_vars: dict, name: str, release: ReleasePlan) -> dict[str, str]:
    """Return the JSON of each variable of a host that differs from its default; a very long value is truncated and gets a digest."""
    specs, variables = specification(), variables_of(task_vars, name)
    changed_keys = (
        key
        for key, value in variables.items()
        if key not in NON_SERVICE_VARIABLES and value not in (None, specs[key].get("default"))
    )
    texts = {key: json.dumps(variables[key], sort_keys=True) for key in changed_keys}
    for key, text in texts.items():
        if len(text) > MAX_VALUE_LENGTH:
            texts[key] = f"{text[:MAX_VALUE_LENGTH]}… {sha256(text.encode()).hexdigest()[:8]}"
    return {**texts, "llama_release": release_request.release_json(release)}


def unknown_variables(variable_names: Iterable[str]) -> dict[str, str]:
    """Return the closest known name, or an empty text, for each unknown variable with the collection's prefix."""
    known_names = [*specification(), *run_variables()]
    unknown_names = [name for name in variable_names if name.startswith(VARIABLE_PREFIX) and name not in known_names]
    return {name: _similar_variable(name, known_names) for name in unknown_names}


def _similar_variable(name: str, known_names: list[str]) -> str:
    """Return the variable that was probably meant: it sets an option of llama.cpp, or has a similar name. Empty if there is none."""
    suffix = name.removeprefix(VARIABLE_PREFIX).removeprefix("server_")
    option_name = suffix.replace("_", "-")
    shorter_options = (f"--{option_name.rsplit('-', count)[0]}" for count in range(1, option_name.count("-") + 1))
    candidates = (
        _variable_of_option(f"--{option_name}", f"-{option_name}", f"--no-{option_name}"),
        *get_close_matches(name, known_names, 1, MIN_VARIABLE_SIMILARITY),
        *(
            known_name
            for known_name in known_names
            if re.fullmatch(rf"{VARIABLE_PREFIX}(server|model|host|build)_{re.escape(suffix)}", known_name)
        ),
        _variable_of_option(*shorter_options),
    )
    return next(filter(None, candidates), "")


def _variable_of_option(*words: str) -> str:
    """Return the variable that sets the first known option of llama-server among these words."""
    word = next((word for word in words if options.is_known(word)), "")
    option = options.by_word(word)
    if option is None or not (option.is_exclusive or option.name in VARIABLE_OF_OPTION):
        return "llama_server_extra_args" if word else ""
    match = re.search(rf"{VARIABLE_PREFIX}\w+", option.alternative())
    return VARIABLE_OF_OPTION.get(option.name) or (match[0] if match else "")


def play_variables(task_vars: dict) -> set[str]:
    """Return the names of variables that the play of this task sets for all of its hosts.

    :raises Refusal: the play sets an operator's variable, which has no effect because planning reads host variables.
    """
    host_variables = task_vars["hostvars"][task_vars["inventory_hostname"]]
    variable_names = {name for name in task_vars if name.startswith(VARIABLE_PREFIX) and name not in host_variables}
    ineffective_names = sorted(variable_names.intersection(specification()))
    if ineffective_names:
        raise Refusal(
            f"Variables in the vars of a play have no effect: {', '.join(ineffective_names)}. Set each of them for a host or group in the inventory, "
            "or pass it with -e."
        )
    return variable_names


def _field(value: Any, name: str) -> Any:
    """Return a field of a host's report, which is unchecked."""
    return value.get(name) if isinstance(value, Mapping) else None


def _restore_unit_filter(facts: Any, cached_facts: Any) -> Any:
    """Return facts of a host, with the last known `has_unit_filter` if this run could not determine it and the kernel is the same."""
    has_same_kernel = isinstance(facts, Mapping) and _field(cached_facts, "kernel") == facts.get("kernel")
    cached_filter = _field(cached_facts, "has_unit_filter")
    if has_same_kernel and facts.get("has_unit_filter") is None and isinstance(cached_filter, bool):
        return {**facts, "has_unit_filter": cached_filter}
    return facts


def cluster_group(task_vars: Mapping[str, Any]) -> str:
    return task_vars.get("llama_cluster_group") or names.DEFAULT_CLUSTER_GROUP


def replicas(groups: Mapping[str, Any], cluster: str) -> list[list[str]]:
    """Return the hosts of each replica of a cluster, its head first. A cluster without a balancer is one replica.

    A replica is the largest group within the cluster that holds exactly one head, or a head alone. A worker in none or several of these is in no replica,
    and check_inventory.yml refuses it.
    """
    hosts = groups.get(cluster, ())
    heads, workers = ([name for name in groups.get(group, ()) if name in hosts] for group in ROLE_GROUPS.values())
    if len(heads) < 2 or not {*hosts}.intersection(groups.get(BALANCER_GROUP, ())):
        return [list(dict.fromkeys([*heads, *workers]))]
    subgroups = [names for group, names in groups.items() if group not in ROLE_GROUPS.values() and {*names} <= {*hosts}]
    candidates = (
        [names for names in subgroups if [name for name in heads if name in names] == [head]] for head in heads
    )
    largest_groups = [max(names, key=len, default=()) for names in candidates]
    assigned_workers = [
        name for name in workers if name not in heads and sum(name in names for names in largest_groups) == 1
    ]
    return [[head, *(name for name in assigned_workers if name in names)] for head, names in zip(heads, largest_groups)]


def replica_of(task_vars: Mapping[str, Any]) -> list[str]:
    """Return the hosts of the replica of the task's host, in the order of the cluster's group; all hosts of the cluster if it has no replica."""
    cluster_members = task_vars["groups"].get(cluster_group(task_vars), [])
    host, all_replicas = task_vars.get("inventory_hostname"), replicas(task_vars["groups"], cluster_group(task_vars))
    replica = next((members for members in all_replicas if host in members), cluster_members)
    return [name for name in cluster_members if name in replica]


def cluster_hosts(
    task_vars: dict, answers: Mapping[str, Any] | None = None, common_variable_names: Collection[str] = ()
) -> tuple[str, dict[str, dict]]:
    """Return the name of the cluster, and the hosts of this host's replica in the form that planning expects.

    :param answers: host → result of host_info. Facts of the other hosts come from the last run's cache on the head.
    :param common_variable_names: names of variables that are set for all hosts at once, from play_variables.
    :raises Refusal: a group or a type is wrong, or a value is outside the limits.
    """
    groups, hostvars = task_vars["groups"], task_vars["hostvars"]
    cluster = cluster_group(task_vars)
    if cluster not in groups:
        raise Refusal(
            f"The inventory has no group {cluster!r}: put the cluster's hosts into this group, or set llama_cluster_group to the correct group."
        )
    hosts = {}
    for name in replica_of(task_vars):
        roles = [role for role, group in ROLE_GROUPS.items() if name in groups.get(group, [])]
        if roles:
            host_variables = hostvars[name]
            hosts[name] = {
                "groups": roles,
                "ansible_host": host_variables.get("ansible_host") or name,
                "variables": _validated_variables(name, host_variables),
                "unknown_variables": unknown_variables({*host_variables, *common_variable_names}),
                "facts": _field((answers or {}).get(name), "facts"),
            }
    retired_group = changes.retired_group(cluster)
    retired_hosts = groups.get(retired_group, [])
    used_hosts = {name for group in (*ROLE_GROUPS.values(), BALANCER_GROUP) for name in groups.get(group, ())}
    unused_hosts = [name for name in groups[cluster] if name not in used_hosts and name not in retired_hosts]
    for group, similar_groups in (
        (group, get_close_matches(group, ROLE_GROUPS.values(), 1, MIN_GROUP_SIMILARITY)) for group in groups
    ):
        misplaced_hosts = (
            [name for name in groups[group] if name in unused_hosts] if similar_groups and group != cluster else ()
        )
        if misplaced_hosts:
            raise Refusal(
                f"The group {validation.printable(group)} (with {', '.join(map(validation.printable, misplaced_hosts))}) is not a group of this collection: "
                f"rename it to {similar_groups[0]}, or remove these hosts from {cluster}."
            )
    if unused_hosts and hosts:
        Display().warning(
            f"The run ignores these hosts of {cluster}, which are in neither llama_head nor llama_workers: "
            f"{', '.join(map(validation.printable, unused_hosts))}. Check the spelling of these groups."
        )
    cached_facts = next((_field(host["facts"], "cached") for host in hosts.values() if "head" in host["groups"]), None)
    for name, host in hosts.items():
        host["facts"] = _restore_unit_filter(host["facts"], _field(cached_facts, name)) or _field(cached_facts, name)
        if hostvars[name].get("ansible_connection") == "local" and isinstance(host["facts"], Mapping):
            # Its SSH connection belongs to the person who runs Ansible, and may come from anywhere.
            host["facts"] = {**host["facts"], "reached_at": None}
    if not hosts:
        raise Refusal(
            f"Group {cluster} has no host that is also in llama_head or llama_workers: put the head and the workers into these groups."
        )
    _check_missing_hosts(cached_facts, used_hosts.union(retired_hosts), retired_group)
    return cluster, cluster_inputs.checked_hosts(cluster, hosts)


def measured_speed(answers: Mapping[str, Any], head: str) -> speed_record.SpeedRecord | None:
    """Return the head's record of the last measured speed; None if there is no readable record."""
    return speed_record.parse_record(_field(_field(answers.get(head), "facts"), "measured_speed"))


def _check_missing_hosts(cached_facts: Any, expected_hosts: Collection[str], retired_group: str) -> None:
    """Check that the inventory has all hosts of the last plan: a missing host keeps running unnoticed, and is more often misspelt than retired.

    :param cached_facts: host → facts that the last run left on the head; they are unchecked.
    :param expected_hosts: hosts in the collection's groups.
    :raises Refusal: a host is missing.
    """
    missing_hosts = (
        [validation.printable(str(name)) for name in cached_facts if name not in expected_hosts]
        if isinstance(cached_facts, Mapping)
        else []
    )
    if missing_hosts:
        raise Refusal(
            f"Hosts of the last plan are missing from the inventory: {', '.join(missing_hosts)}. Check the spelling of the groups, or move retired hosts to "
            f"the group {retired_group}: site.yml then removes their services."
        )
