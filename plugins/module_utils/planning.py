# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From inventory and facts to the plan: the whole intended state as data. Reads and writes nothing.

The plan depends on the inventory and on facts that stay the same from run to run; its form is described in docs/plan.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ansible_collections.llamacpp.cluster.plugins.module_utils import (
    advisories,
    backends,
    devices,
    estimate,
    placement,
    releases,
    tuning,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils import (
    head as heads,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.refusal import Refusal

SCHEMA = 1
MAX_ENDPOINTS = 16
MIB = placement.MIB
SERVICES = "llamacpp-"
STAGING_SERVICES = "llamacpp-staging-"
"""How the names of services begin: of those that serve, and of those that prove a release on the staging ports meanwhile."""
STAGING_MODEL = {"layers": 2 * MAX_ENDPOINTS, "width": 128, "type": "f32"}
STAGING_ROOM_MIB = 1024
"""What has to be free on a device beyond the known-answer model, for what a backend takes for itself."""
ACCOUNT = "llamacpp"
BUILD_ACCOUNT = "llamacpp-build"


def _head_of(hosts: dict) -> str:
    found = [name for name, host in hosts.items() if "head" in host["groups"]]
    if len(found) != 1:
        raise Refusal(
            f"group llama_head has {len(found)} hosts of this cluster{': ' if found else ''}{', '.join(found)}: "
            "it must have exactly one"
        )
    return found[0]


def refused(cluster: str, refusal: Refusal) -> dict:
    """What stands for a plan where there is none."""
    return {"schema": SCHEMA, "cluster": cluster, "refused": True, "fits": False, "reasons": [str(refusal)]}


def make(cluster: str, hosts: dict, model_found: dict, catalogue: dict, runtime_id: str, staging: bool = False) -> dict:
    """The plan, or the reasons why there is none.

    :param hosts: name → ``{"variables", "facts", "groups", "ansible_host"}``; groups is a subset of head and worker.
    :param model_found: what gguf_info found at llama_model_path: ``summary`` and ``closed``; empty when nothing is known.
    :param catalogue: names of packages, from packages.yml: ``tools`` and ``llama``.
    :param runtime_id: identifies the runtime that is installed on the head.
    :param staging: plan the instances that prove the release on the staging ports with the known-answer model, beside those that serve.
    :returns: the plan; when ``refused`` is true, ``reasons`` says why and nothing may be applied.
    """
    try:
        plan = _make(cluster, hosts, model_found, catalogue, runtime_id, staging)
    except Refusal as refusal:
        return refused(cluster, refusal)
    accepted = set(hosts[plan["head"]["host"]]["variables"]["llama_accept_advisories"])
    for advisory in plan["advisories"]:
        advisory["accepted"] = advisory["id"] in accepted
        if advisory["severity"] == "error" and not advisory["accepted"]:
            plan["reasons"].append(
                f"{advisory['message']} {advisory['remedy']} To run it all the same, add {advisory['id']} to llama_accept_advisories."
            )
    plan["refused"] = bool(plan["reasons"])
    return plan


def _make(cluster: str, hosts: dict, model_found: dict, catalogue: dict, runtime_id: str, staging: bool) -> dict:
    head_name = _head_of(hosts)
    if staging:
        hosts = {**hosts, head_name: {**hosts[head_name], "variables": _for_staging(hosts[head_name]["variables"])}}
    variables = hosts[head_name]["variables"]
    for name, host in hosts.items():
        if host["facts"] is None:
            raise Refusal(
                f"nothing is known of {name}: it could not be reached, and llama_hardware does not declare it"
            )
    hosts = _with_backends(variables, hosts, catalogue)
    wanted = releases.of_backends(variables, hosts, _used_backends(hosts))
    hosts = {name: _equipped(name, host, head_name, catalogue, wanted) for name, host in hosts.items()}
    if advisories.VULKAN_MEMORY not in variables["llama_accept_advisories"]:
        for host in hosts.values():
            _lend_what_is_visible(host)
    for backend, release in wanted.items():
        releases.one_architecture(backend, release, hosts)
    head = hosts[head_name]
    head["serves"] = heads.backend_of(hosts, head_name)
    release = wanted[head["serves"]]
    chosen = variables["llama_server_backend"] or head["serves"]
    for host in hosts.values():
        serving = workers.serving(host, chosen, {backend for backend in wanted if wanted[backend] == release})
        if staging:
            host["workers"] = serving = [workers.on_its_staging_port(worker) for worker in serving]
        host["serving"] = serving
    _no_endpoint_twice(hosts)
    releases.builds(hosts, wanted, catalogue["llama"])
    model = heads.model_of(variables, model_found, head["facts"])
    heads.check(head_name, head)
    used, load, units, reasons = _placed(hosts, head_name, model)
    plan: dict = {
        "schema": SCHEMA,
        "cluster": cluster,
        "staging": staging,
        "refused": False,
        "reasons": reasons,
        "release": _shown(release),
        "releases": {
            wanted[backend]["id"]: _shown(wanted[backend]) for host in hosts.values() for backend in host["backends"]
        },
        "model": {
            "path": model["path"],
            "known_answer": model["known_answer"],
            **{key: model["summary"][key] for key in ("name", "architecture", "layers")},
        },
        "hosts": {
            name: {
                **_planned_host(name, host, hosts, head_name, wanted, used, runtime_id),
                "state": _state_folder(host["facts"], staging),
            }
            for name, host in hosts.items()
        },
        "head": {},
        "placement": _placement(used, load, units, release["capabilities"]["buffer_name"]),
        "fits": not reasons,
        "links": [
            name
            for name, host in hosts.items()
            if host["workers"] and host["variables"]["llama_links"] and name != head_name
        ],
        "fallbacks": [],
    }
    holding = devices.used(plan["placement"], plan["hosts"], hosts, variables["llama_server_environment"])
    mode = heads.load_mode_of(variables["llama_server_load_mode"], release["capabilities"], holding)
    head["variables"] = {**variables, "llama_server_load_mode": mode}
    plan["head"] = heads.planned(
        head_name, head, release, model, used, units, runtime_id, _state_folder(head["facts"], staging)
    )
    plan["estimate"] = estimate.network(release, holding, hosts, head["facts"].get("measured") or {})
    plan["advisories"] = advisories.evaluate(plan, hosts, model["summary"], holding)
    for name, host in plan["hosts"].items():
        host["services"] = services(plan, name)
    return plan


def _shown(release: dict) -> dict:
    return {key: value for key, value in release.items() if key != "capabilities"}


def _for_staging(variables: dict) -> dict:
    """The head's variables, to serve the known-answer model on its staging port, with every worker and to itself only."""
    return {
        **variables,
        "llama_model_path": None,
        "llama_model_known_answer": STAGING_MODEL,
        "llama_placement": "all",
        "llama_server_host": "127.0.0.1",
        "llama_server_port": heads.staging_port_of(variables),
        "llama_server_staging_port": variables["llama_server_port"],
        "llama_server_api_key_file": None,
        "llama_server_extra_args": [],
    }


def _state_folder(facts: dict, staging: bool) -> str:
    return f"{facts['prefix']}/state{'/staging' if staging else ''}"


def obstacles(plan: dict, found: dict[str, dict]) -> list[str]:
    """Why the instances of a plan for staging cannot be started, a sentence each.

    :param found: host → what host_info said of it just before, given its part of this plan: ``drift`` and ``free_mib``, or ``msg`` of an
        error; nothing where it did not answer.
    """
    if plan["refused"]:
        return plan["reasons"]
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
            needed[device] = needed.get(device, 0) + size + STAGING_ROOM_MIB
        if name == plan["head"]["host"]:
            needed["CPU"] = needed.get("CPU", 0) + STAGING_ROOM_MIB
        found += [
            f"{name} has {free[name][device]} MiB free on {device}, and {math.ceil(size)} MiB are needed: try it when there is more"
            for device, size in needed.items()
            if device in free[name] and free[name][device] < size
        ]
    return found


def _with_backends(variables: dict, hosts: dict, catalogue: dict) -> dict:
    """The hosts with their backends.

    :param variables: of the head.
    """
    sources = releases.sources_of(variables)
    found = {}
    for name, host in hosts.items():
        offered = catalogue["llama"].get(host["facts"]["distribution"]["family"], {"libraries": {}})["libraries"]
        wanted = host["variables"]["llama_backend"]
        found[name] = {**host, "backends": workers.backends_of(name, wanted, host["facts"], sources, offered)}
    return found


def _used_backends(hosts: dict) -> list[str]:
    return [backend for backend in backends.BACKENDS if any(backend in host["backends"] for host in hosts.values())]


def release_variables(hosts: dict, catalogue: dict) -> list[str]:
    """The variables of the head that give a release of which some host has a build: what the controller has to look up.

    :param hosts: see make.
    :raises Refusal: they cannot be told.
    """
    variables = hosts[_head_of(hosts)]["variables"]
    known = {name: host for name, host in hosts.items() if host["facts"] is not None}
    used = _used_backends(_with_backends(variables, known, catalogue))
    return list(dict.fromkeys(releases.variable_of(backend, variables) for backend in used))


def _equipped(name: str, host: dict, head_name: str, catalogue: dict, wanted: dict[str, dict]) -> dict:
    """The host with its workers and the tools that it needs.

    :param wanted: backend → release.
    """
    facts = host["facts"]
    for account, home in facts.get("accounts", {}).items():
        if facts["scope"] == "system" and account in (ACCOUNT, BUILD_ACCOUNT) and home != facts["prefix"]:
            raise Refusal(
                f"{name} has an account {account} of somebody else's, with the home {home}: services run as {account}, so rename that account"
            )
    equipped = dict(host)
    if facts["service_manager"] != "systemd" and any(link.get("manage") for link in host["variables"]["llama_links"]):
        raise Refusal(
            f"llama_links of {name} has manage: true, which needs a host with systemd and root: configure the interface by hand, and "
            "set manage: false"
        )
    equipped["tools"] = {
        tool: package
        for backend in equipped["backends"]
        for tool, package in workers.tools_of(name, equipped, backend, catalogue, wanted[backend]).items()
    }
    own = {wanted[backend]["source"] for backend in equipped["backends"]}
    equipped["optional_tools"] = workers.optional_tools_of(equipped, catalogue, own)
    equipped["workers"] = workers.workers_of(name, equipped, head_name) if "worker" in host["groups"] else []
    return equipped


def _lend_what_is_visible(host: dict) -> None:
    """Bounds the capacity of workers by what the driver shows as the device's own."""
    for worker in host["workers"]:
        accelerator = devices.accelerator_of(host["facts"], worker["device"])
        if accelerator:
            visible = devices.visible_mib(worker["backend"], accelerator, worker["environment"])
            worker["capacity_mib"] = min(worker["capacity_mib"], visible)


def _no_endpoint_twice(hosts: dict) -> None:
    owners: dict[str, str] = {}
    for name, host in hosts.items():
        for worker in host["workers"]:
            other = owners.setdefault(worker["endpoint"], name)
            if other != name:
                raise Refusal(
                    f"{name} and {other} both have the worker {worker['endpoint']}: give each host its own address "
                    "in ansible_host or llama_links"
                )


def _placed(hosts: dict, head_name: str, model: dict) -> tuple[list[dict], placement.Load, list[int], list[str]]:
    """The workers that get layers, what the model costs, the units of each worker, and why it does not fit if so."""
    variables, facts = hosts[head_name]["variables"], hosts[head_name]["facts"]
    load = placement.Load(
        model["summary"],
        heads.context_of(variables, model["summary"]),
        variables["llama_server_cache_type_k"],
        variables["llama_server_cache_type_v"],
    )
    declared = [worker for host in hosts.values() for worker in host["serving"]]
    if not declared and any(host["workers"] for host in hosts.values()):
        raise Refusal(
            f"the head serves with {hosts[head_name]['serves']}, and no worker has a build of the same release: give their backend in "
            "llama_server_backend, or the same llama_release to both backends"
        )
    if not declared:
        room = facts["memory_mib"] - workers.reserve_mib(facts["memory_mib"], shared=True)
        lacking = -(-sum(load.of(0, load.units)) // MIB) - room
        if lacking <= 0:
            return [], load, [], []
        return (
            [],
            load,
            [],
            [f"the model does not fit into the memory of {head_name}: {lacking} MiB are missing; add a worker"],
        )
    mode = variables["llama_placement"] or ("all" if model["known_answer"] else "fewest")
    used = declared
    if mode == "fewest":
        chosen = placement.fewest(load, [worker["capacity_mib"] * MIB for worker in declared])
        used = [declared[index] for index in chosen]
    if len(used) > MAX_ENDPOINTS:
        raise Refusal(
            f"the plan needs {len(used)} workers, and llama.cpp connects to {MAX_ENDPOINTS} at most: use fewer, larger ones"
        )
    capacities = [worker["capacity_mib"] * MIB for worker in used]
    units = placement.distribute(load, capacities)
    if units is not None:
        return used, load, units, []
    lacking = -(-placement.missing_bytes(load, capacities) // MIB)
    reason = (
        f"the model does not fit: {lacking} MiB are missing on {used[-1]['endpoint']} ({used[-1]['host']}), "
        f"with {len(used)} workers that hold {sum(capacities) // MIB} MiB in all: "
        "add a worker, lower llama_server_context, or choose a smaller model"
    )
    return used, load, [], [reason]


def _placement(used: list[dict], load: placement.Load, units: list[int], buffer_name: str) -> list[dict]:
    found, start = [], 0
    for worker, count in zip(used, units):
        weights, kv = load.of(start, count)
        sizes = {"weights": weights, "kv": kv, "compute": load.compute, "total": weights + kv + load.compute}
        found.append(
            {
                "device": buffer_name.format(endpoint=worker["endpoint"]),
                "host": worker["host"],
                "layers": max(0, min(start + count, load.layers) - start),
                "output": start + count == load.units,
                **{f"{kind}_mib": round(size / MIB, 2) for kind, size in sizes.items()},
                "capacity_mib": worker["capacity_mib"],
            }
        )
        start += count
    return found


def _planned_host(
    name: str, host: dict, hosts: dict, head_name: str, wanted: dict[str, dict], used: list[dict], runtime_id: str
) -> dict:
    facts = host["facts"]
    in_use = {worker["endpoint"] for worker in used}
    system = facts["scope"] == "system"
    sources = {wanted[backend]["source"] for backend in host["backends"]}
    return {
        **{key: facts[key] for key in ("scope", "prefix", "cache", "python", "service_manager", "units")},
        "account": ACCOUNT if system else None,
        "accounts": [
            {"name": ACCOUNT, "groups": facts.get("device_groups", [])},
            *([{"name": BUILD_ACCOUNT, "groups": []}] if sources & set(releases.COMPILED) else []),
        ]
        if system
        else [],
        "folders": _folders(facts, ACCOUNT if system else None, sources),
        "tuning": _tuning(name, host),
        "runtime": f"{facts['prefix']}/runtime/{runtime_id}"
        if name == head_name or any(worker["cache"] for worker in host["workers"])
        else None,
        "tools": host["tools"],
        "optional_tools": host["optional_tools"],
        "unused_accelerators": [] if sources == {"binary"} else workers.unused_accelerators(host),
        "builds": [build for build in host["builds"].values() if build["targets"]],
        "keep_releases": releases.kept(name, host["variables"]["llama_build_keep"]),
        "workers": [
            {
                **{
                    key: worker[key]
                    for key in (
                        "name",
                        "endpoint",
                        "staging_port",
                        "backend",
                        "device",
                        "shared",
                        "cache",
                        "cache_mib",
                        "environment",
                    )
                },
                "used": worker["endpoint"] in in_use,
                "protocol": wanted[worker["build"]]["protocol"],
                "argv": workers.argv_of(
                    worker,
                    host["builds"][worker["build"]],
                    wanted[worker["build"]]["capabilities"],
                    facts["prefix"] + "/releases",
                ),
            }
            for worker in host["workers"]
        ],
        "firewall": [
            {
                "port": port,
                "protocol": "tcp",
                "sources": [workers.address_of(head_name, hosts[head_name], name)],
                "address": worker["address"],
            }
            for worker in host["workers"]
            if name != head_name
            for port in (worker["port"], worker["staging_port"])
        ],
        "firewall_manager": facts.get("firewall") if system else None,
        "links": host["variables"]["llama_links"],
    }


def _tuning(name: str, host: dict) -> dict:
    """Kernel parameters and profile of tuned, if asked for, and whether the run may reboot the host for them."""
    variables, facts = host["variables"], host["facts"]
    if not variables["llama_host_tuning"]:
        return {"parameters": {}, "profile": "", "reboot": False}
    if facts["service_manager"] != "systemd":
        raise Refusal(
            f"llama_host_tuning of {name} is set, which needs a host with systemd and root: leave it out there"
        )
    if not any(device["backend"] == "hip" and device["unified"] for device in facts["accelerators"]):
        raise Refusal(
            f"llama_host_tuning of {name} is set, and no AMD graphics that uses the host's memory was found: leave it out, or declare it in llama_hardware"
        )
    try:
        parameters = tuning.parameters(facts["memory_mib"], variables["llama_host_tuning_gtt_mib"])
    except ValueError as error:
        raise Refusal(f"llama_host_tuning_gtt_mib of {name} cannot be: {error}") from None
    return {
        "parameters": parameters,
        "profile": variables["llama_host_tuned_profile"] or "",
        "reboot": variables["llama_host_reboot"],
    }


def _folders(facts: dict, account: str | None, sources: set[str]) -> list[dict]:
    """Folders of the installation: path, owner and mode; the service manager's own is only made where it is missing."""
    prefix, root = facts["prefix"], "root" if account else None
    paths = [
        (prefix, root, "0755"),
        (prefix + "/models", root, "0755"),
        (prefix + "/state", account, "0750"),
        (facts["units"], None, None),
    ]
    if sources != {"package"}:
        paths += [(facts["cache"], root, "0755"), (facts["cache"] + "/sources", root, "0755")]
    return [{"path": path, "owner": owner, "mode": mode} for path, owner, mode in paths]


def _cache_keeper(plan: dict, host: str, worker: dict) -> list[str]:
    """The launcher of a worker that keeps tensors on disk: it may hold what was asked for, and never less than the planned model needs.
    A worker on its staging port shares that cache and leaves the keeping of it to the one that serves."""
    if not worker["cache"] or plan["staging"]:
        return []
    own = plan["hosts"][host]
    needed = sum(entry["weights_mib"] for entry in plan["placement"] if f"[{worker['endpoint']}]" in entry["device"])
    limit = max(worker["cache_mib"], math.ceil(needed))
    launcher = [own["python"], own["runtime"] + "/runtime.py", "worker"]
    return [*launcher, "--cache", worker["environment"]["LLAMA_CACHE"], "--limit-mib", str(limit), "--"]


def services(plan: dict, host: str) -> list[dict]:
    """The services of one host, as its service manager needs them."""
    prefix = STAGING_SERVICES if plan["staging"] else SERVICES
    found = [
        {
            "name": f"{prefix}worker-{worker['name']}",
            "kind": "worker",
            "temporary": plan["staging"],
            "description": f"llama.cpp RPC worker {worker['name']} ({worker['device']})",
            "argv": [*_cache_keeper(plan, host, worker), *worker["argv"]],
            "process": worker["argv"],
            "environment": worker["environment"],
            "listens": worker["endpoint"],
            "protocol": worker["protocol"],
            "reads": [],
            "after": [],
            "credentials": {},
            "devices": backends.device_files(worker["backend"]),
            "allow": sorted(
                {
                    "localhost",
                    worker["endpoint"].rsplit(":", 1)[0],
                    *(source for rule in plan["hosts"][host]["firewall"] for source in rule["sources"]),
                }
            ),
        }
        for worker in plan["hosts"][host]["workers"]
    ]
    if host == plan["head"]["host"]:
        head = plan["head"]
        found.append(
            {
                "name": f"{prefix}server",
                "kind": "head",
                "temporary": plan["staging"],
                "description": f"llama.cpp server of cluster {plan['cluster']}",
                "argv": [*head["launcher"], "--", *head["argv"]],
                "process": head["argv"],
                "environment": head["environment"],
                "listens": f"{head['address']}:{head['port']}",
                "reads": [plan["model"]["path"], *([head["api_key_file"]] if head["api_key_file"] else [])],
                "after": [service["name"] for service in found],
                "devices": [],
                "credentials": {heads.KEYS: head["api_key_file"]} if head["api_key_file"] else {},
                "allow": [],
            }
        )
    return found


def changes(plan: dict, drifts: dict[str, dict | None]) -> dict:
    """What an apply would do.

    :param drifts: host → what state.drift found there; None where the host did not answer.
    :returns: ``restarts`` (host → names of the services that have to be started anew), ``behind`` (hosts on which anything
        differs), ``builders`` (id of a build that some host lacks → the host that compiles it, or has it, for the others),
        ``shared`` (ids of those builds that other hosts get from it), ``sources`` (ids of the releases of those that no host has yet),
        ``unreached`` (hosts that did not answer).
    """
    reached = {name: drift for name, drift in drifts.items() if drift is not None}
    anew = _restarts(plan, reached)
    building = _builders(plan, reached)
    senders = {building["builders"][identity] for identity in building["shared"]}
    return {
        "restarts": anew,
        "behind": sorted(
            name for name, drift in reached.items() if drift["differences"] or anew[name] or name in senders
        ),
        "unreached": sorted(set(plan["hosts"]) - set(reached)),
        **building,
    }


def lacking(plan: dict, tools: dict[str, list[str]], builders: Collection[str]) -> dict[str, dict]:
    """What each host lacks: ``required`` and ``optional``, tool → package. What only makes builds faster is for hosts that build now.

    :param tools: host that answered → tools that it has.
    :param builders: hosts that build.
    """
    return {
        name: {
            "required": _without(plan["hosts"][name]["tools"], present),
            "optional": _without(plan["hosts"][name]["optional_tools"], present) if name in builders else {},
        }
        for name, present in tools.items()
    }


def _without(packages: dict[str, str], present: Collection[str]) -> dict[str, str]:
    return {tool: package for tool, package in packages.items() if tool not in present}


def _builders(plan: dict, drifts: dict[str, dict]) -> dict:
    """A host that has a build already comes first, then the order of the inventory."""
    hosts_of: dict[str, list[str]] = {}
    release_of: dict[str, str] = {}
    for name in drifts:
        for build in plan["hosts"][name]["builds"]:
            hosts_of.setdefault(build["id"], []).append(name)
            release_of[build["id"]] = build["release"]
    builders: dict[str, str] = {}
    shared, sources = [], set()
    for identity, names in hosts_of.items():
        lacking = [name for name in names if identity in drifts[name]["missing_builds"]]
        source = plan["releases"][release_of[identity]]["source"]
        if not lacking or source == "package":
            continue
        if source in releases.COMPILED:
            builders[identity] = next((name for name in names if name not in lacking), lacking[0])
            if set(lacking) != {builders[identity]}:
                shared.append(identity)
        if builders.get(identity) not in set(names) - set(lacking):
            sources.add(release_of[identity])
    return {"builders": builders, "shared": shared, "sources": sorted(sources)}


def _served(names: list[str]) -> bool:
    """Whether one of these services belonged to a cluster that serves."""
    return any(not name.startswith(STAGING_SERVICES) for name in names)


def _restarts(plan: dict, drifts: dict[str, dict]) -> dict[str, list[str]]:
    """Services that do not run as planned, and the head with its model and any worker that it uses or used: it does not reconnect."""
    found = {
        name: [
            service["name"]
            for service in host["services"]
            if drifts[name]["services"][service["name"]]["state"] not in ("running", "waiting")
            or service["name"] in drifts[name]["redefined"]
            or any(f"/releases/{identity}/" in service["process"][0] for identity in drifts[name]["missing_builds"])
        ]
        for name, host in plan["hosts"].items()
        if name in drifts
    }
    used = {
        (name, f"{SERVICES}worker-{worker['name']}")
        for name, host in plan["hosts"].items()
        for worker in host["workers"]
        if worker["used"]
    }
    name_of_head = plan["head"]["host"]
    head = found.get(name_of_head, [])
    touched = any((name, service) in used for name, names in found.items() for service in names) or (
        name_of_head in drifts and plan["model"]["path"] in drifts[name_of_head]["changed_files"]
    )
    if heads.SERVICE not in head and (touched or any(_served(drift["stale"]) for drift in drifts.values())):
        head.append(heads.SERVICE)
    return found
