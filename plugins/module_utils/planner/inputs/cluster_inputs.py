# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversion of inventory and facts into a Cluster. model_inputs.py converts the variables of the model, and facts.py the facts. Defaults of variables are
in the roles' argument_specs.yml, and those of a declared host in facts.py (DEFAULT_FACTS)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    names,
    service_managers,
    typed_json,
    validation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import DEFAULT_FACTS, Facts, parse_facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import (
    external_workers,
    limits,
    model_inputs,
    release_request,
    transport,
    turns,
)

MAX_THREADS = 4096

VARIABLE_NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*"
"""Form of the name of an environment variable or a CMake option."""
SECRET_NAME_PATTERN = r"(?i).*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|_KEY|ACCESS_KEY_ID|SECRET_KEY_BASE|CREDENTIALS?|(^|_)(PASS|PWD|AUTH|PAT))_?\d*"
"""Form of the name of an environment variable whose value is a secret."""

PLANNING_FACT_NAMES = {*Facts._fields} - {"accounts", "addresses", "cluster", "measured"}
"""Facts that a plan depends on."""

DECLARATION_ONLY_KEYS = {"system", "architecture", "distribution", "service_manager", "home", "processor", "cores"}
"""Keys of ``llama_hardware`` that only count for a host without reported facts."""


def checked_hosts(cluster: str, hosts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check the hosts of a cluster, and return them with facts for parse_facts: the reported facts, overridden by ``llama_hardware``.

    :param hosts: name → ``groups`` (head, worker), ``ansible_host``, ``variables`` with defaults, ``unknown_variables``, and ``facts`` of host_info or None.
    :returns: the same; ``facts`` are None if nothing is known.
    :raises Refusal: the inventory or a host has values that no plan can hold.
    """
    for host, entry in hosts.items():
        # Types are converted by now: a text may have become a mapping, which has texts of its own.
        check_variables(host, {"ansible_host": entry["ansible_host"], **entry["variables"]})
        check_variables(host, {"a variable": entry["unknown_variables"]})
    _check_name("the cluster", cluster)
    return {name: {**entry, "facts": _merge_facts(cluster, name, entry)} for name, entry in hosts.items()}


def read_cluster(
    name: str, hosts: Mapping[str, Mapping[str, Any]], model: types.ModelRequest | None = None
) -> types.Cluster:
    """Return the cluster of an inventory.

    :param hosts: result of checked_hosts.
    :param model: model that replaces the model of the inventory.
    :raises Refusal: the inventory is invalid.
    """
    heads = [host for host, entry in hosts.items() if "head" in entry["groups"]]
    if len(heads) != 1:
        heads_text = f" ({', '.join(heads)})" if heads else ""
        raise Refusal(
            f"group llama_head has {len(heads)} hosts of this cluster{heads_text}: it must have exactly one, unless each head is a replica behind a "
            "llama_balancer host of the same cluster"
        )
    variables = hosts[heads[0]]["variables"]
    external = external_workers.read_workers(variables[external_workers.VARIABLE] or (), hosts)
    entries = () if model else tuple(map(_model_entry, turns.read_entries(variables)))
    cluster = types.Cluster(
        name=name,
        head=heads[0],
        server=entries[0].server if entries else server_of(variables),
        model=entries[0].model if entries else model or model_inputs.request_of(variables),
        model_entries=entries,
        placement=variables["llama_placement"],
        accepted_ids=frozenset(variables["llama_accept_advisories"] or ()),
        release_requests=_release_requests(variables),
        external_workers=external,
        external_hosts=external_workers.hosts_of(external),
        builds_benchmark=variables["llama_benchmark_programs"],
        proof_seconds=variables["llama_proof_seconds"],
        users=variables["llama_users"],
        hosts={host: _host(host, entry, hosts) for host, entry in hosts.items()},
    )
    return transport.with_transport(cluster)


def _model_entry(entry: turns.EntryVariables) -> types.ModelEntry:
    try:
        model = model_inputs.request_of(entry.variables)
        return types.ModelEntry(entry.name, entry.aliases, server_of(entry.variables), model, entry.server_variables)
    except Refusal as refusal:
        raise Refusal(turns.entry_sentence(entry.name, str(refusal))) from None


def check_variables(host: str, values: Mapping[str, Any]) -> None:
    """Refuse control characters, secrets in URLs and infinite numbers, before anything else shows a value.

    :param values: variable → value for this host.
    """
    _check_name("a host", host)
    for variable, value in values.items():
        problem = limits.find_problem(variable, value)
        if problem:
            raise Refusal(f"{problem.place} {problem.text} (host {host})")


def _check_name(subject: str, name: str) -> None:
    remedy = external_workers.host_name_remedy(name)
    if remedy:
        raise Refusal(
            f"{subject} has the name {validation.quote(name)} in the inventory: {remedy} (an address belongs in ansible_host)"
        )


def make_catalogue(packages: Mapping[str, Any]) -> types.Catalogue:
    """:param packages: ``tools`` and ``llama`` of packages.yml."""
    return types.Catalogue(packages["tools"], packages["llama"])


def _merge_facts(cluster: str, name: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    variables = entry["variables"]
    if entry["facts"]:
        typed_json.parse_report(name, "itself", Facts, entry["facts"])
        owner = entry["facts"].get("cluster")
        if owner not in (None, cluster):
            raise Refusal(
                f"{name} belongs to the cluster {owner}, and a host can belong to only one cluster: remove it from {cluster}, or tear down {owner} first"
            )
    facts = merge_hardware(name, entry["facts"], variables["llama_hardware"], variables["llama_host_scope"])
    if facts and is_ipv4_address(str(entry["ansible_host"])):
        facts.pop("reached_at", None)
    try:
        if facts:
            parse_facts(facts)
    except typed_json.Mismatch as error:
        raise Refusal(f"llama_hardware{error.path} for {name} {error.reason}: correct it, or remove it") from None
    return facts


def _host(name: str, entry: Mapping[str, Any], hosts: Collection[str]) -> types.Host:
    variables = entry["variables"]
    facts = entry["facts"]
    if facts is None:
        raise Refusal(
            f"{name} is unreachable or excluded by --limit, and llama_hardware does not declare it: make it reachable and include it in --limit, or declare it"
        )
    tuning = types.Tuning(
        bool(variables["llama_host_tuning"]),
        variables["llama_host_tuning_gtt_mib"],
        bool(variables["llama_host_reboot"]),
    )
    parsed_facts = kernel_parameters.facts_after_reboot(parse_facts(facts), tuning)
    return types.Host(
        name=name,
        is_head="head" in entry["groups"],
        is_worker="worker" in entry["groups"],
        address=parsed_facts.reached_at or str(entry["ansible_host"]),
        facts=parsed_facts,
        cached_facts=planning_facts(facts),
        backends=_backend_choices(name, variables["llama_backend"]),
        links=tuple(
            _link(f"llama_links[{index}]", name, link) for index, link in enumerate(variables["llama_links"] or ())
        ),
        worker_requests=tuple(
            _worker_request(f"llama_worker_endpoints[{index}] for {name}", endpoint)
            for index, endpoint in enumerate(variables["llama_worker_endpoints"] or ())
        ),
        cmake_options=_cmake_options(name, variables["llama_build_cmake_options"]),
        toolchain=variables["llama_build_toolchain"],
        build_host=_checked_build_host(name, variables["llama_build_host"], hosts),
        shares_builds=variables["llama_build_share"],
        tuning=tuning,
        release_requests=_release_requests(variables),
        unknown_variables=dict(entry["unknown_variables"]),
        metrics=_metrics_folder(name, variables),
        transport=variables["llama_transport"],
        scope=variables["llama_host_scope"],
    )


UNQUOTED_PATH_PATTERN = "(/[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*)+"
"""Form of a path that needs no quotes in a unit."""


def _metrics_folder(name: str, variables: Mapping[str, Any]) -> str | None:
    folder = str(variables["llama_metrics_folder"])
    if not re.fullmatch(UNQUOTED_PATH_PATTERN, folder):
        raise Refusal(
            f"llama_metrics_folder for {name} is {folder!r}: use an absolute path with only letters, digits and / . _ @ + -"
        )
    return folder if variables["llama_metrics"] == "textfile" else None


def is_ipv4_address(address: str) -> bool:
    """Return whether this is an IPv4 address, not a host name."""
    return bool(re.fullmatch(validation.IPV4_PATTERN, address))


def _release_requests(variables: Mapping[str, Any]) -> dict[str, types.ReleaseRequest | None]:
    requests: dict[str, types.ReleaseRequest | None] = {}
    for variable in ("llama_release", *(f"llama_release_{backend}" for backend in BACKENDS)):
        try:
            has_request = variables[variable] or variable == "llama_release"
            request = release_request.request_of(variables[variable]) if has_request else None
        except Refusal as refusal:
            raise release_request.with_variable(refusal, variable) from None
        requests[variable] = request and request._replace(fast_load=bool(variables["llama_build_fast_load"]))
    return requests


def _backend_choices(name: str, value: Any) -> tuple[str, ...]:
    choices = value if isinstance(value, list) else [value]
    if not choices or len(set(map(str, choices))) < len(choices) or (len(choices) > 1 and "auto" in choices):
        raise Refusal(
            f"llama_backend for {name} is {value!r}: use auto, a backend, or a list of different backends without auto"
        )
    return tuple(choices)


def _checked_build_host(name: str, builder: str | None, hosts: Collection[str]) -> str | None:
    if builder and builder not in hosts:
        raise Refusal(
            f"llama_build_host for {name} is {builder!r}, which is not in this cluster: use a host in llama_head or llama_workers, or remove the variable"
        )
    return builder or None


def _link(place: str, host: str, values: Mapping[str, Any]) -> LinkPlan:
    remedy = validation.range_remedy(values.get("mtu"), names.MTU_RANGE[0], names.MTU_RANGE[-1])
    if remedy:
        raise Refusal(f"{place}.mtu for {host} is {values['mtu']}: {remedy}, or remove it")
    address = str(values.get("address"))
    try:
        ipaddress.IPv4Interface(address if "/" in address or not values.get("manage") else "without a prefix")
    except ValueError:
        raise Refusal(
            f"{place}.address for {host} is {address!r}: use the numeric IPv4 address of {host} on this link, with the prefix length if manage is true, "
            "like 10.99.0.12/24"
        ) from None
    if values.get("kind") == names.WIREGUARD and values.get("manage"):
        raise Refusal(
            f"{place} for {host} is a WireGuard link, which the collection cannot manage: set up the VPN yourself and set manage: false"
        )
    fields: dict[str, Any] = {field: values.get(field) for field in LinkPlan._fields}
    return LinkPlan(**{**fields, "address": address, "manage": bool(fields["manage"])})


def _worker_request(place: str, values: Mapping[str, Any]) -> types.WorkerRequest:
    fields: dict[str, Any] = {
        field: values[field] for field in types.WorkerRequest._fields if values.get(field) is not None
    }
    return types.WorkerRequest(**fields)._replace(
        environment=read_environment(f"environment in {place}", values.get("environment"))
    )


def read_environment(place: str, variables: Mapping[str, Any] | None) -> dict[str, str]:
    """Return environment variables as text. A Boolean becomes true or false."""
    values = {}
    for name, value in (variables or {}).items():
        if not re.fullmatch(VARIABLE_NAME_PATTERN, str(name), re.ASCII):
            raise Refusal(f"{place} has the key {str(name)!r}: use letters, digits and _, with no digit first")
        if value is None or isinstance(value, (dict, list)):
            raise Refusal(f"{place} sets {name} to {value!r}: use text, a number, true or false, or remove it")
        _refuse_secret(place, str(name), str(value))
        values[str(name)] = str(value).lower() if isinstance(value, bool) else str(value)
    return values


def _networks(place: str, values: Sequence[str] | None) -> tuple[str, ...]:
    try:
        networks = [ipaddress.IPv4Network(value) for value in values or ()]
        empty_networks = [str(network) for network in networks if network.is_multicast or str(network) == "0.0.0.0/32"]
        if empty_networks:
            raise ValueError(f"{empty_networks[0]} contains no client; 0.0.0.0/0 contains all clients")
        return tuple(map(str, networks))
    except ValueError as error:
        raise Refusal(f"{place} has an invalid network ({error}): use an IPv4 network like 192.168.1.0/24") from None


def _refuse_secret(place: str, name: str, value: str) -> None:
    """Refuse an environment variable with a secret: service managers show it, and every account may read service definitions."""
    if re.fullmatch(SECRET_NAME_PATTERN, name) or (re.search("(?i)proxy", name) and "@" in value):
        raise Refusal(f"{place} sets {name}, a secret that would be visible to every account on the host: remove it")


def _cmake_options(name: str, options: Mapping[Any, Any] | None) -> dict[str, str]:
    place = f"llama_build_cmake_options for {name}"
    values = {}
    for option, value in (options or {}).items():
        if (
            not re.fullmatch(VARIABLE_NAME_PATTERN, str(option), re.ASCII)
            or value is None
            or isinstance(value, (dict, list))
        ):
            raise Refusal(f"{place} sets {option!r} to {value!r}: use the name of a CMake option and a text value")
        values[str(option)] = str(value)
    return values


def server_of(variables: Mapping[str, Any]) -> types.Server:
    """:param variables: variables of the head, with their defaults."""
    fields = {name: variables[f"llama_server_{name}"] for name in types.Server._fields}
    return types.Server(**fields)._replace(
        allowed=_networks("llama_server_allowed", fields["allowed"]),
        tensor_split=tuple(fields["tensor_split"] or ()),
        override_tensor=tuple(fields["override_tensor"] or ()),
        extra_args=tuple(fields["extra_args"] or ()),
        environment=read_environment("llama_server_environment", fields["environment"]),
        memory_mib=_memory_sizes("llama_server_memory_mib", fields["memory_mib"]),
    )


def _memory_sizes(variable: str, entries: Mapping[str, Any]) -> dict[str, int]:
    for name, mib in entries.items():
        if isinstance(mib, bool) or not re.fullmatch("[0-9]{1,9}", str(mib)):
            raise Refusal(f"{variable} sets {name} to {mib!r}: use a whole number of MiB")
    return {str(name): int(mib) for name, mib in entries.items()}


def planning_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a plan depends on. They exclude tools that only make builds faster, so these never change a plan."""
    toolchain = {tool: version for tool, version in facts["toolchain"].items() if tool not in toolkits.OPTIONAL_TOOLS}
    return {**{key: value for key, value in facts.items() if key in PLANNING_FACT_NAMES}, "toolchain": toolchain}


def merge_hardware(
    name: str, facts: Mapping[str, Any] | None, hardware: Mapping[str, Any] | None, scope: str = "auto"
) -> dict[str, Any] | None:
    """Return the facts of a host, overridden by ``llama_hardware``. A declared toolchain replaces the whole toolchain.

    :param facts: facts from host_info; None if the host was not contacted.
    :param scope: ``llama_host_scope``; for a host that is not contacted, ``auto`` means ``system``.
    """
    if hardware is None:
        return dict(facts) if facts else None
    declared_values = {key: value for key, value in hardware.items() if value is not None}
    system, distribution = declared_values.get("system", "Linux"), declared_values.get("distribution")
    is_windows = re.match("(?i)windows(?!.*wsl)", str(distribution))
    if is_windows or system not in ("Linux", "Darwin"):
        problem = (
            f"distribution to {validation.quote(distribution)}: use a Linux distribution"
            if is_windows
            else f"system to {validation.quote(system)}: use Linux or Darwin"
        )
        raise Refusal(
            f"llama_hardware for {name} sets {problem}. For another system, like Windows, remove the host from llama_head and "
            f"llama_workers, and declare its workers in {external_workers.VARIABLE} for a Linux or macOS head"
        )
    for tool, version in (declared_values.get("toolchain") or {}).items():
        if version is not None and not isinstance(version, str):
            raise Refusal(
                f"llama_hardware for {name} sets toolchain.{tool} to {version}: put the version in quotes, because YAML reads 3.30 as 3.3"
            )
    for accelerator in declared_values.get("accelerators") or []:
        if accelerator["backend"] not in backends.PREFERRED_ORDER:
            raise Refusal(
                f"llama_hardware for {name} has a device with the backend {accelerator['backend']!r}: use one of {', '.join(BACKENDS[1:])}"
            )
    if not facts:
        facts = _declared_facts(name, declared_values, "user" if scope == "user" else "system")
    elif "toolchain" in declared_values:
        facts = {**facts, "toolchains": None}
    return {**facts, **{key: value for key, value in declared_values.items() if key not in DECLARATION_ONLY_KEYS}}


def _declared_facts(name: str, hardware: Mapping[str, Any], scope: str) -> dict[str, Any]:
    """Return the facts of a host that is known only from ``llama_hardware``."""
    system = hardware.get("system", "Linux")
    possible_managers = service_managers.usable_managers(system, scope)
    manager = hardware.get("service_manager", possible_managers[0])
    if manager not in possible_managers:
        raise Refusal(
            f"llama_hardware for {name} sets service_manager to {manager}, which {system} with llama_host_scope {scope} does not "
            f"support: use {' or '.join(possible_managers)}, or remove it"
        )
    facts = {
        **DEFAULT_FACTS,
        "system": system,
        "architecture": hardware.get("architecture", "arm64" if system == "Darwin" else DEFAULT_FACTS["architecture"]),
        "cpu": {
            **DEFAULT_FACTS["cpu"],
            "model": hardware.get("processor", DEFAULT_FACTS["cpu"]["model"]),
            "cores": hardware.get("cores", DEFAULT_FACTS["cpu"]["cores"]),
        },
        "scope": scope,
        "service_manager": manager,
        **names.installation_folders(scope, manager, {"HOME": hardware.get("home", "~")}),
    }
    if system == "Darwin":
        facts.update(distribution={"id": "darwin", "version": "", "family": "darwin"}, packaged=None)
    elif "distribution" in hardware:
        distribution_id, _space, version = hardware["distribution"].partition(" ")
        facts["distribution"] = names.distribution(f"ID={distribution_id}\nVERSION_ID={version}\n")
        version_match = re.match(r"\d+", version)
        is_too_old = version_match and int(version_match[0]) < capabilities.OLDEST_PACKAGES.get(distribution_id, 0)
        if is_too_old or facts["distribution"]["family"] != DEFAULT_FACTS["distribution"]["family"]:
            facts["packaged"] = None
    return facts
