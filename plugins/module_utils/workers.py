# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each host brings: its backend, its devices, and the workers that lend them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from ansible_collections.llamacpp.cluster.plugins.module_utils import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.refusal import Refusal

FIRST_PORT = 50052
STAGING_DISTANCE = 100

DECLARED = {
    "system": "Linux",
    "architecture": "x86_64",
    "distribution": {"id": "debian", "version": "13", "family": "debian"},
    "cpu": {"model": "declared", "cores": 8, "features_id": "declared"},
    "memory_mib": 0,
    "accelerators": [],
    "toolchain": {
        "cmake": "3.31",
        "ninja": "1.12",
        "c++": "14.2",
        "glslc": "2025.2",
        "hipconfig": "7.2",
        "nvcc": "12.9",
    },
    "scope": "system",
    "python": "/usr/bin/python3",
    "service_manager": "systemd",
    "packaged": {"version": list(capabilities.PACKAGED_TREES)[-1], "installed": []},
    "prefix": "/opt/llamacpp",
    "cache": "/var/cache/llamacpp",
    "units": "/etc/systemd/system",
}
"""What is taken for granted of a host that is only declared: a Linux host with systemd and every toolchain."""

PLANNED_FROM = {*DECLARED, "device_groups", "firewall"}
"""Facts that a plan depends on."""


def known(facts: dict | None, hardware: dict | None) -> dict | None:
    """Facts of a host, with what ``llama_hardware`` declares in place of what was found."""
    if hardware is None:
        return facts
    return {**(facts or DECLARED), **{key: value for key, value in hardware.items() if value is not None}}


def _accelerators(facts: dict, backend: str) -> list[dict]:
    return [accelerator for accelerator in facts["accelerators"] if accelerator["backend"] == backend]


def backend_of(name: str, wanted: str, facts: dict, ready: Collection[str] | None) -> str:
    """The backend for this host.

    :param ready: backends that there are packages of; None where llama.cpp is built, which needs their toolchain.
    """
    if ready is not None and wanted not in ("auto", *ready):
        raise Refusal(
            f"llama_backend of {name} is {wanted}, of which {facts['distribution']['id']} has no package: use {', '.join(ready)}, or source: pypi"
        )
    if wanted != "auto":
        if wanted not in backends.BACKENDS:
            raise Refusal(f"llama_backend of {name} is {wanted!r}: use auto, {', '.join(backends.BACKENDS)}")
        if wanted != "cpu" and not _accelerators(facts, wanted):
            raise Refusal(
                f"llama_backend of {name} is {wanted}, but no such device was found there: "
                "declare it in llama_hardware, install its driver, or set llama_backend to cpu"
            )
        return wanted
    for backend in ("cuda", "hip", "metal", "vulkan"):
        tools_found = all(facts["toolchain"].get(tool) for tool in backends.tools(backend)[len(backends.BUILD_TOOLS) :])
        if _accelerators(facts, backend) and (tools_found if ready is None else backend in ready):
            return backend
    return "cpu"


def unused_accelerators(host: dict) -> list[str]:
    """Names of the accelerators of a host for which ``auto`` found no toolchain."""
    if host["backend"] != "cpu" or host["variables"]["llama_backend"] != "auto":
        return []
    return sorted({accelerator["name"] for accelerator in host["facts"]["accelerators"]})


def reserve_mib(total_mib: int, shared: bool) -> int:
    """What is left to the system: more where the device's memory is the host's own."""
    return max(2048, total_mib // 10) if shared else max(512, total_mib // 20)


def address_of(name: str, host: dict, peer: str) -> str:
    """The numeric address of the host on the network that joins it with its peer: that of the link whose ``peer`` that is, or of
    the first link, or where the host is reached."""
    links = host["variables"]["llama_links"]
    index = next((index for index, link in enumerate(links) if link.get("peer") == peer), 0)
    variable, address = (
        (f"llama_links[{index}].address", str(links[index].get("address")))
        if links
        else ("ansible_host", str(host["ansible_host"]))
    )
    try:
        parsed = ipaddress.IPv4Address(address.split("/", maxsplit=1)[0])
    except ValueError:
        raise Refusal(
            f"{variable} of {name} is {address!r}: workers and the head need a numeric IPv4 address there; "
            "give llama_links with the address of the network that joins them"
        ) from None
    if parsed.is_unspecified:
        raise Refusal(
            f"{variable} of {name} is {address!r}, which would open the worker to every network: give the address of one interface"
        )
    return str(parsed)


def _devices(host: dict) -> list[dict]:
    """All devices that the host's build offers, the CPU last: backend, device, memory in MiB, whether that is the host's own memory."""
    facts = host["facts"]
    found = [
        {
            "backend": host["backend"],
            "device": backends.device_name(host["backend"], index),
            "memory_mib": accelerator["memory_mib"],
            "shared": accelerator["unified"],
        }
        for index, accelerator in enumerate(_accelerators(facts, host["backend"]))
    ]
    return [*found, {"backend": "cpu", "device": "CPU", "memory_mib": facts["memory_mib"], "shared": True}]


def workers_of(name: str, host: dict, head: str) -> list[dict]:
    """The declared workers of one host with everything but their place in the model."""
    offered = _devices(host)
    declared = host["variables"]["llama_worker_endpoints"] or [{} for _device in offered[:-1] or offered]
    address = "127.0.0.1" if name == head else address_of(name, host, head)
    found: list[dict] = []
    for index, endpoint in enumerate(declared):
        where = f"llama_worker_endpoints[{index}] of {name}"
        free = [device for device in offered if device["device"] not in {worker["device"] for worker in found}]
        device_name = endpoint.get("device") or (free or offered[-1:])[0]["device"]
        device = next((device for device in offered if device["device"] == device_name), None)
        if device is None:
            raise Refusal(
                f"{where} has the device {device_name!r}: use one of {', '.join(d['device'] for d in offered)}, or declare it in llama_hardware"
            )
        if endpoint.get("backend") not in (None, device["backend"]):
            raise Refusal(
                f"{where} has the backend {endpoint['backend']!r}, but its device {device_name} is one of {device['backend']}: leave one of the two out"
            )
        if device["backend"] != "cpu" and device_name in {worker["device"] for worker in found}:
            raise Refusal(f"{where} lends {device_name} a second time: two workers cannot share an accelerator")
        port = endpoint.get("port") or FIRST_PORT + index
        staging_port = endpoint.get("staging_port") or port + STAGING_DISTANCE
        for variable, number in (("port", port), ("staging_port", staging_port)):
            if not 0 < number < 65536:
                raise Refusal(f"{where} has the {variable} {number}: use 1 to 65535")
            if number in {used for worker in found for used in (worker["port"], worker["staging_port"])}:
                raise Refusal(
                    f"{where} has the {variable} {number}, which another worker of this host has too: give each worker its own ports"
                )
        worker_name = endpoint.get("name") or device_name.lower() + (
            str(index) if len(declared) > 1 and device_name == "CPU" else ""
        )
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", worker_name):
            raise Refusal(
                f"{where} has the name {worker_name!r}: use up to 32 of a-z, 0-9, - and _, for it names a service"
            )
        if worker_name in {worker["name"] for worker in found}:
            raise Refusal(f"{where} has the name {worker_name!r}, which another worker of this host has too")
        found.append(
            {
                "name": worker_name,
                "host": name,
                "endpoint": f"{address}:{port}",
                "address": address,
                "port": port,
                "staging_port": staging_port,
                "backend": device["backend"],
                "device": device_name,
                "threads": endpoint.get("threads"),
                "cache": bool(endpoint.get("cache")),
                "cache_mib": endpoint.get("cache_mib") or 0,
                "declared_mib": endpoint.get("memory_mib"),
                "memory_mib": device["memory_mib"],
                "shared": device["shared"],
                "environment": {key: str(value) for key, value in (endpoint.get("environment") or {}).items()},
            }
        )
    sharing = sum(worker["shared"] for worker in found)
    cpu_workers = sum(worker["backend"] == "cpu" for worker in found)
    for worker in found:
        usable = worker["memory_mib"] - reserve_mib(worker["memory_mib"], worker["shared"])
        worker["capacity_mib"] = worker["declared_mib"] or max(0, usable // (sharing if worker["shared"] else 1))
        if worker["backend"] == "cpu" and worker["threads"] is None:
            worker["threads"] = max(1, host["facts"]["cpu"]["cores"] // cpu_workers)
        if worker["cache"]:
            worker["environment"].setdefault("LLAMA_CACHE", f"{host['facts']['prefix']}/state/cache/{worker['name']}")
    return found


def argv_of(worker: dict, build: dict, able: dict, releases: str) -> list[str]:
    argv = [f"{releases}/{build['id']}/bin/{able['worker_binary']}", "-H", worker["address"], "-p", str(worker["port"])]
    if "d" in able["worker_flags"]:
        argv += ["-d", worker["device"]]
    if "t" in able["worker_flags"] and worker["threads"]:
        argv += ["-t", str(worker["threads"])]
    if worker["cache"]:
        argv.append("-c")
    return argv


def tools_of(name: str, host: dict, catalogue: dict, release: dict) -> dict[str, str]:
    """Tool → package, of all that this host needs or builds faster with. Packages of llama.cpp itself are tools too.

    :param host: with ``facts``, ``groups`` and ``backend``.
    :param catalogue: packages.yml: ``tools``, distribution family → tool → package, and ``llama``, the packages of llama.cpp.
    :raises Refusal: a tool is missing and this run cannot install it, or it is too old.
    """
    facts, backend = host["facts"], host["backend"]
    family = facts["distribution"]["family"]
    names = catalogue["tools"].get(family, {})
    found = {tool for tool, version in facts["toolchain"].items() if version}
    needed, wanted = [], []
    if release["source"] == "package":
        packaged = catalogue["llama"][family]
        programs = [release["capabilities"]["worker_binary"]] * ("worker" in host["groups"])
        programs += ["llama-server"] * ("head" in host["groups"])
        needed = [*packaged["libraries"][backend], *(packaged["programs"][program]["package"] for program in programs)]
        names = {**names, **{package: package for package in needed if package not in names}}
        found |= set(facts["packaged"]["installed"])
    else:
        needed = backends.tools(backend)
        wanted = ["ccache"] if facts["scope"] == "system" else []
        _recent_enough(name, facts["toolchain"].get("cmake"), backend)
    needed += ["venv"] * (facts["service_manager"] == "supervisor")
    missing = [tool for tool in needed if tool not in found]
    unknown = [tool for tool in missing if tool not in names]
    if unknown:
        raise Refusal(
            f"{name} lacks {', '.join(unknown)}, and no package is known for it on {facts['distribution']['id']}: "
            "install it by hand"
        )
    if missing and facts["scope"] == "user":
        raise Refusal(
            f"{name} lacks {', '.join(missing)}, and this run may not become root there (llama_host_scope is user): "
            f"let an administrator install {', '.join(names[tool] for tool in missing)}, then run it again"
        )
    if facts["python"] is None:
        raise Refusal(
            f"{name} has no Python 3.9 or newer that the services' accounts can read: install the distribution's python3"
        )
    return {tool: names[tool] for tool in [*needed, *wanted] if tool in names}


def _recent_enough(name: str, version: str | None, backend: str) -> None:
    minimum = backends.MINIMUM_CMAKE[backend]
    if version and tuple(map(int, re.findall(r"\d+", version)[:2])) < minimum:
        raise Refusal(
            f"{name} has cmake {version}, too old for {backend}: install {'.'.join(map(str, minimum))} or newer"
        )
