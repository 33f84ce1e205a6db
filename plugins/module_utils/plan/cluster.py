# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From inventory and facts to the plan: the whole intended state as data. Reads and writes nothing.

The plan depends on the inventory and on facts that stay the same from run to run; its form is described in docs/plan.md.
"""

from __future__ import annotations

import math

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import (
    advisories,
    devices,
    estimate,
    placement,
    releases,
    services,
    tuning,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import head as heads
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import staging as staging_plan

SCHEMA = 1
MIB = placement.MIB


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

    :param hosts: name → ``{"variables", "mistyped", "facts", "groups", "ansible_host"}``; groups is a subset of head and worker, mistyped maps
        variables that are none of ours to what was probably meant.
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
    refusing: dict[str, list[dict]] = {}
    for advisory in plan["advisories"]:
        advisory["accepted"] = advisory["id"] in accepted
        if advisory["severity"] == "error" and not advisory["accepted"]:
            refusing.setdefault(advisory["id"], []).append(advisory)
    for identifier, found in refusing.items():
        told = dict.fromkeys(advisory[part] for part in ("message", "remedy") for advisory in found)
        plan["reasons"].append(f"{' '.join(told)} To run it all the same, add {identifier} to llama_accept_advisories.")
    plan["refused"] = bool(plan["reasons"])
    return plan


def _make(cluster: str, hosts: dict, model_found: dict, catalogue: dict, runtime_id: str, staging: bool) -> dict:
    head_name = _head_of(hosts)
    if staging:
        hosts = {
            **hosts,
            head_name: {**hosts[head_name], "variables": staging_plan.head_variables(hosts[head_name]["variables"])},
        }
    variables = hosts[head_name]["variables"]
    for name, host in hosts.items():
        if host["facts"] is None:
            raise Refusal(
                f"nothing is known of {name}: it could not be reached, and llama_hardware does not declare it"
            )
    hosts = _with_backends(variables, hosts, catalogue)
    wanted = releases.of_backends(variables, hosts, _used_backends(hosts))
    hosts = {name: _equipped(name, host, head_name, catalogue, wanted) for name, host in hosts.items()}
    for backend, release in wanted.items():
        releases.possible(backend, release, hosts)
    head = hosts[head_name]
    head["serves"] = heads.backend_of(hosts, head_name)
    head["own"] = workers.own_devices(head_name, head, head["serves"])
    if advisories.VULKAN_MEMORY not in variables["llama_accept_advisories"]:
        for host in hosts.values():
            _lend_what_is_visible(host["facts"], host["workers"])
        _lend_what_is_visible(head["facts"], head["own"], variables["llama_server_environment"])
    release = wanted[head["serves"]]
    chosen = variables["llama_server_backend"] or head["serves"]
    for host in hosts.values():
        serving = workers.serving(host, chosen, {backend for backend in wanted if wanted[backend] == release})
        if staging:
            host["workers"] = serving = [workers.on_its_staging_port(worker) for worker in serving]
        host["serving"] = serving
    _no_endpoint_twice(hosts)
    _no_second_name_of_the_head(hosts, head_name)
    releases.builds(hosts, wanted, catalogue["llama"])
    model = heads.model_of(variables, model_found, head["facts"])
    heads.check(head_name, head, release)
    placed = _placed(hosts, head_name, model, release)
    plan: dict = {
        "schema": SCHEMA,
        "cluster": cluster,
        "staging": staging,
        "refused": False,
        "reasons": placed.reasons,
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
                **_planned_host(name, host, hosts, head_name, wanted, placed.lent(), runtime_id),
                "state": _state_folder(host["facts"], staging),
            }
            for name, host in hosts.items()
        },
        "head": {},
        "placement": _placement(
            placed, heads.as_planned(variables) and "fork" not in release, variables["llama_server_load_mode"]
        ),
        "fits": not placed.reasons,
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
        head_name, head, release, model, placed, runtime_id, _state_folder(head["facts"], staging)
    )
    moved = bool(variables["llama_server_override_tensor"])
    plan["estimate"] = estimate.network(release, holding, hosts, head["facts"].get("measured") or {}, moved)
    plan["advisories"] = advisories.evaluate(plan, hosts, model["summary"], holding)
    for name, host in plan["hosts"].items():
        host["services"] = services.of_host(plan, name)
    return plan


def _shown(release: dict) -> dict:
    return {key: value for key, value in release.items() if key != "capabilities"}


def _state_folder(facts: dict, staging: bool) -> str:
    return f"{facts['prefix']}/state{'/staging' if staging else ''}"


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
    head_name = _head_of(hosts)
    _same_release(hosts, head_name)
    variables = hosts[head_name]["variables"]
    known = {name: host for name, host in hosts.items() if host["facts"] is not None}
    used = _used_backends(_with_backends(variables, known, catalogue))
    return list(dict.fromkeys(releases.variable_of(backend, variables) for backend in used))


def _equipped(name: str, host: dict, head_name: str, catalogue: dict, wanted: dict[str, dict]) -> dict:
    """The host with its workers and the tools that it needs.

    :param wanted: backend → release.
    """
    facts = host["facts"]
    for account, home in facts.get("accounts", {}).items():
        if facts["scope"] == "system" and account in (names.ACCOUNT, names.BUILD_ACCOUNT) and home != facts["prefix"]:
            raise Refusal(
                f"{name} has an account {account} of somebody else's, with the home {home}: services run as {account}, so rename that account"
            )
    equipped = dict(host)
    if not service_managers.MANAGERS[facts["service_manager"]].host_settings and any(
        link.get("manage") for link in host["variables"]["llama_links"]
    ):
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
    equipped["workers"] = [
        workers.seeing_one_device(
            worker,
            wanted[worker["build"]]["capabilities"],
            sum(accelerator["backend"] == worker["backend"] for accelerator in facts["accelerators"]),
        )
        for worker in (workers.workers_of(name, equipped, head_name) if "worker" in host["groups"] else [])
    ]
    return equipped


def _lend_what_is_visible(facts: dict, lent: list[dict], environment: dict[str, str] | None = None) -> None:
    """Bounds the capacity of devices by what their driver shows as their own.

    :param environment: of llama-server, for devices that it drives itself.
    """
    for device in lent:
        accelerator = devices.accelerator_of(facts, device["device"])
        if accelerator:
            own = device["environment"] if environment is None else environment
            device["capacity_mib"] = min(
                device["capacity_mib"], devices.visible_mib(device["backend"], accelerator, own)
            )


def _same_release(hosts: dict, head_name: str) -> None:
    """What releases are built is said once, by the head."""
    wanted = hosts[head_name]["variables"]
    for name, host in hosts.items():
        for variable in ("llama_release", *(f"llama_release_{backend}" for backend in backends.BACKENDS)):
            if host["variables"][variable] != wanted[variable]:
                raise Refusal(
                    f"{variable} of {name} differs from that of the head {head_name}, and head and workers must be of one release: set it for the "
                    "whole group, or llama_release_<backend> where backends differ"
                )


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


def _no_second_name_of_the_head(hosts: dict, head_name: str) -> None:
    """Its devices would be used twice: by itself, and through the workers of what is taken for another host."""
    for name, host in hosts.items():
        if name == head_name or not host["workers"]:
            continue
        address = workers.address_of(head_name, hosts[head_name], name)
        if host["workers"][0]["address"] == address:
            raise Refusal(
                f"{name} has the address {address}, which is that of the head {head_name}: put {head_name} itself into llama_workers where it "
                f"is to lend its devices, and take {name} out"
            )


def _placed(hosts: dict, head_name: str, model: dict, release: dict) -> placement.Placed:
    """Which devices hold which part of the model, and why it does not fit if so."""
    variables, facts = hosts[head_name]["variables"], hosts[head_name]["facts"]
    lent = [worker for host in hosts.values() for worker in host["serving"]]
    own = hosts[head_name]["own"]
    if not lent and any(host["workers"] for host in hosts.values()):
        raise Refusal(
            f"the head serves with {hosts[head_name]['serves']}, and no worker has a build of the same release: give their backend in "
            "llama_server_backend, or the same llama_release to both backends"
        )
    names = release["capabilities"]
    for worker in lent:
        worker["buffer"] = names["buffer_name"].format(endpoint=worker["endpoint"])
    overrides = heads.overrides_of(variables, [placement.CPU, *(device["buffer"] for device in (*lent, *own))])
    if overrides and "tensors" not in model["summary"]:
        raise Refusal(
            "llama_server_override_tensor is set, and the summary of the model does not tell the names of its tensors: make it again with gguf_info"
        )
    settings = heads.settings_of(variables, model["summary"])
    load = placement.Load(model["summary"], settings, release["generation"], overrides)
    wanted = variables["llama_server_gpu_layers"]
    gpu_layers = load.units if wanted is None else min(wanted, load.units)
    if not (lent or own) or not gpu_layers:
        room = facts["memory_mib"] - workers.reserve_mib(facts["memory_mib"], shared=True)
        lacking = -(-sum(load.of(0, load.units)) // MIB) - room
        reason = f"the model does not fit into the memory of {head_name}: {lacking} MiB are missing; add a worker"
        return placement.Placed([], [], load, 0, [] if lacking <= 0 else [reason])
    first = load.units - gpu_layers
    reasons = _over_on_head(head_name, facts, load, first) if first or overrides else []
    used, split = _chosen(variables, model, lent, own, load, first)
    if names["device_name"] is None:
        used, split = _own_first(used, split, own)
    connections = sum("endpoint" in device for device in used)
    if connections > capabilities.MAX_ENDPOINTS:
        raise Refusal(
            f"the plan needs {connections} workers, and llama.cpp connects to {capabilities.MAX_ENDPOINTS} at most: use fewer, larger ones"
        )
    capacities = [_left(load, device) for device in used]
    placed = placement.Placed(used, split or placement.distribute(load, capacities, first), load, gpu_layers, reasons)
    over = _over(placed)
    if split or placement.fits(load, first, capacities):
        told = [
            f"llama_server_tensor_split or llama_server_override_tensor asks too much of {_called(device)}: {lacking} MiB are missing "
            f"there, which holds {device['capacity_mib']} MiB; give it a smaller share"
            for device, lacking in over
        ]
    else:
        told = [
            f"the model does not fit: {sum(lacking for _device, lacking in over)} MiB are missing, "
            + ", ".join(
                f"{lacking} on {_called(device)}, which holds {device['capacity_mib']}" for device, lacking in over
            )
            + ": add a worker, lower llama_server_context, or choose a smaller model"
        ]
    return placed._replace(reasons=[*reasons, *told])


def _over_on_head(name: str, facts: dict, load: placement.Load, first: int) -> list[str]:
    """A sentence if the layers before ``first`` do not fit into the head's memory."""
    room = facts["memory_mib"] - workers.reserve_mib(facts["memory_mib"], shared=True)
    weights, kv = load.on_head(range(first)), sum(load.kv[:first])
    lacking = -(-(weights + kv) // MIB) - room
    if lacking <= 0:
        return []
    return [
        f"llama_server_gpu_layers and llama_server_override_tensor leave {first} layers and {weights // MIB} MiB of weights on the head, and "
        f"{lacking} MiB are missing in the memory of {name}: leave less there"
    ]


def _called(device: dict) -> str:
    return f"{device.get('endpoint', device['device'])} ({device['host']})"


def _chosen(
    variables: dict, model: dict, lent: list[dict], own: list[dict], load: placement.Load, first: int
) -> tuple[list[dict], list[float]]:
    """The devices that get units, and the operator's split between them if there is one.

    :param first: the first unit that is not on the head's processor.
    """
    split, devices = variables["llama_server_tensor_split"], [*lent, *own]
    if split:
        if len(split) != len(devices) or min(split) < 0 or not any(split) or not all(map(math.isfinite, split)):
            raise Refusal(
                f"llama_server_tensor_split is {split}: give a share, 0 or more, for each of the {len(devices)} devices in their order: "
                + ", ".join(_called(device) for device in devices)
            )
        kept = [(device, share) for device, share in zip(devices, split) if share or load.fixed(device["buffer"])]
        return [device for device, _share in kept], [share for _device, share in kept]
    mode = variables["llama_placement"] or ("all" if model["known_answer"] else "fewest")
    if mode == "all":
        return devices, []
    others, mine = placement.fewest(
        load, [_left(load, device) for device in lent], [_left(load, device) for device in own], first
    )
    chosen = [*(lent[index] for index in others), *(own[index] for index in mine)]
    return [device for device in devices if device in chosen or load.fixed(device["buffer"])], []


def _left(load: placement.Load, device: dict) -> int:
    """Bytes that a device has for units."""
    return max(0, device["capacity_mib"] * MIB - load.fixed(device["buffer"]))


def _own_first(used: list[dict], split: list[float], own: list[dict]) -> tuple[list[dict], list[float]]:
    """Devices and their shares for a llama-server that cannot be told which to use: it puts all of the head's own before the workers,
    those with nothing have a share of 0."""
    shares = {device["buffer"]: share for device, share in zip(used, split)}
    ordered = [*own, *(device for device in used if "endpoint" in device)]
    return ordered, [shares.get(device["buffer"], 0) for device in ordered] if split else []


def _over(placed: placement.Placed) -> list[tuple[dict, int]]:
    """Devices that get more than they hold, each with how many MiB are missing."""
    lacking = [
        -(-(share.weights + share.kv) // MIB) - device["capacity_mib"]
        for device, share in zip(placed.devices, placed.shares())
    ]
    return [(device, missing) for device, missing in zip(placed.devices, lacking) if missing > 0]


def _placement(placed: placement.Placed, as_planned: bool, load_mode: str | None) -> list[dict]:
    found, load = [], placed.load
    for device, share in zip(placed.devices, placed.shares()):
        sizes = {"weights": share.weights, "kv": share.kv, "compute": load.compute}
        sizes["total"] = sum(sizes.values())
        mapped = device["backend"] == "metal" and "endpoint" not in device and load_mode != "none"
        exact = {"weights_mib": load.weights_exact and not mapped, "kv_mib": load.kv_exact}
        found.append(
            {
                "device": device["buffer"],
                "host": device["host"],
                "layers": share.layers,
                "output": share.output,
                **{f"{kind}_mib": round(size / MIB, 2) for kind, size in sizes.items()},
                "capacity_mib": device["capacity_mib"],
                "exact": [size for size, sure in exact.items() if sure and as_planned],
            }
        )
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
        "account": names.ACCOUNT if system else None,
        "accounts": [
            {"name": names.ACCOUNT, "groups": facts.get("device_groups", [])},
            *([{"name": names.BUILD_ACCOUNT, "groups": []}] if sources & set(releases.COMPILED) else []),
        ]
        if system
        else [],
        "folders": _folders(facts, names.ACCOUNT if system else None, sources),
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
    if not service_managers.MANAGERS[facts["service_manager"]].host_settings:
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
