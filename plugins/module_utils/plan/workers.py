# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each host brings: its backend, its devices, and the workers that lend them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import releases, toolchains

FIRST_PORT = 50052
STAGING_DISTANCE = 100
CUDA_IN_BUS_ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
"""Has CUDA count devices as nvidia-smi lists them. Its own order puts the fastest first."""
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES", "vulkan": "GGML_VK_VISIBLE_DEVICES"}
"""Variables that name the devices which a program is to see at all."""
HIDDEN = ("cuda", "hip")
"""Backends whose programs take memory of devices that they do not use (518 MiB of each, with CUDA), and count those that they see as we do."""
VENDORS = {
    "nvcc": "NVIDIA's repository of CUDA",
    "cublas": "NVIDIA's repository of CUDA",
    "hipconfig": "AMD's repository of ROCm",
    "hip-headers": "AMD's repository of ROCm",
    "hipblas": "AMD's repository of ROCm",
    "rocblas": "AMD's repository of ROCm",
}
"""Where tools come from that a distribution may not have."""

DECLARED: dict[str, Any] = {
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
        "patch": "2.7",
    },
    "toolchains": None,
    "scope": "system",
    "python": "/usr/bin/python3",
    "service_manager": "systemd",
    "packaged": {"version": list(capabilities.PACKAGED_TREES)[-1], "installed": []},
    "prefix": "/opt/llamacpp",
    "cache": "/var/cache/llamacpp",
    "units": "/etc/systemd/system",
}
"""What is taken for granted of a host that is only declared: a Linux host with systemd and every toolchain, wherever that is."""

PLANNED_FROM = {*DECLARED, "device_groups", "firewall", "kernel", "firmware", "thunderbolt"}
"""Facts that a plan depends on."""


STANDS_IN = {"system", "architecture", "distribution", "service_manager", "home", "cores"}
"""What ``llama_hardware`` may say of a host that is not contacted. Where there are facts, an apply needs those."""


def planned_from(facts: dict) -> dict:
    """The part of a host's facts that a plan depends on. Tools that only make builds faster come and go without changing it."""
    toolchain = {tool: version for tool, version in facts["toolchain"].items() if tool not in backends.OPTIONAL_TOOLS}
    return {**{key: value for key, value in facts.items() if key in PLANNED_FROM}, "toolchain": toolchain}


def known(name: str, facts: dict | None, hardware: dict | None, scope: str = "auto") -> dict | None:
    """Facts of a host, with what ``llama_hardware`` declares in place of what was found. A declared toolchain stands for all.

    :param facts: what was found; None where the host was not contacted.
    :param scope: ``llama_host_scope``; ``auto`` of a host that is not contacted is ``system``.
    """
    if hardware is None:
        return facts
    declared = {key: value for key, value in hardware.items() if value is not None}
    for tool, version in (declared.get("toolchain") or {}).items():
        if version is not None and not isinstance(version, str):
            raise Refusal(
                f"llama_hardware of {name} has {tool}: {version} in toolchain: write the version in quotes, for 3.30 is another one than 3.3"
            )
    if not facts:
        facts = _declared(name, declared, "user" if scope == "user" else "system")
    elif "toolchain" in declared:
        facts = {**facts, "toolchains": None}
    return {**facts, **{key: value for key, value in declared.items() if key not in STANDS_IN}}


def _declared(name: str, hardware: dict, scope: str) -> dict:
    """Facts of a host of which nothing but ``llama_hardware`` is known."""
    system = hardware.get("system", "Linux")
    possible = service_managers.possible(system, scope)
    manager = hardware.get("service_manager", possible[0])
    if manager not in possible:
        raise Refusal(
            f"llama_hardware of {name} has the service_manager {manager}, which a host with {system} and llama_host_scope {scope} does not "
            f"have: use {' or '.join(possible)}, or leave it out"
        )
    facts = {
        **DECLARED,
        "system": system,
        "architecture": hardware.get("architecture", "arm64" if system == "Darwin" else DECLARED["architecture"]),
        "cpu": {**DECLARED["cpu"], "cores": hardware.get("cores", DECLARED["cpu"]["cores"])},
        "scope": scope,
        "service_manager": manager,
        **names.places(scope, manager, {"HOME": hardware.get("home", "~")}),
    }
    if system == "Darwin":
        facts.update(distribution={"id": "darwin", "version": "", "family": "darwin"}, packaged=None)
    elif "distribution" in hardware:
        identity, _space, version = hardware["distribution"].partition(" ")
        facts["distribution"] = names.distribution(f"ID={identity}\nVERSION_ID={version}\n")
        number = re.match(r"\d+", version)
        too_old = number and int(number[0]) < capabilities.PACKAGED_SINCE.get(identity, 0)
        if too_old or facts["distribution"]["family"] != DECLARED["distribution"]["family"]:
            facts["packaged"] = None
    return facts


def _accelerators(facts: dict, backend: str) -> list[dict]:
    return [accelerator for accelerator in facts["accelerators"] if accelerator["backend"] == backend]


def backends_of(name: str, value: Any, facts: dict, sources: dict[str, str], packaged: Collection[str]) -> list[str]:
    """The backends of this host, which run side by side where there are several.

    :param value: ``llama_backend``: one, or a list of them.
    :param sources: backend → source of its release.
    :param packaged: backends of which the distribution has packages.
    """
    wanted = value if isinstance(value, list) else [value]
    if not wanted or len(set(map(str, wanted))) < len(wanted) or (len(wanted) > 1 and "auto" in wanted):
        raise Refusal(
            f"llama_backend of {name} is {value!r}: use auto, a backend, or a list that names each backend once"
        )
    found = [_backend_of(name, backend, facts, sources, packaged) for backend in wanted]
    for backend in found:
        if sources[backend] not in ("package", "binary"):
            for accelerator in _accelerators(facts, backend):
                _can_be_compiled_for(name, accelerator)
    return found


def _can_be_compiled_for(name: str, accelerator: dict) -> None:
    form = backends.ARCHITECTURES.get(accelerator["backend"])
    if form is None or re.fullmatch(form.expression, accelerator["architecture"]):
        return
    if accelerator["architecture"]:
        raise Refusal(
            f"llama_hardware of {name} has the architecture {accelerator['architecture']!r} for a device of {accelerator['backend']}: "
            f"use a form like {form.example}"
        )
    raise Refusal(
        f"{name} has {accelerator['name']}, and what to compile for it is not known: {form.remedy}, declare the device in llama_hardware "
        f"with architecture (like {form.example}) and memory_mib, or set llama_backend to another one"
    )


def _backend_of(name: str, wanted: Any, facts: dict, sources: dict[str, str], packaged: Collection[str]) -> str:
    """A backend that is asked for, or for auto the best one: there is a device, and it can be compiled or has a package."""
    if wanted != "auto":
        if wanted not in backends.BACKENDS:
            raise Refusal(f"llama_backend of {name} is {wanted!r}: use auto, {', '.join(backends.BACKENDS)}")
        if sources[wanted] == "package" and packaged and wanted not in packaged:
            raise Refusal(
                f"llama_backend of {name} is {wanted}, of which {facts['distribution']['id']} has no package: use {', '.join(packaged)}, or source: pypi"
            )
        if wanted != "cpu" and not _accelerators(facts, wanted):
            raise Refusal(
                f"llama_backend of {name} is {wanted}, but no such device was found there: "
                "declare it in llama_hardware, install its driver, or set llama_backend to cpu"
            )
        return wanted
    for backend in ("cuda", "hip", "metal", "vulkan"):
        further = backends.tools(backend)[len(backends.BUILD_TOOLS) :]
        buildable = all(facts["toolchain"].get(tool) for tool in further) and not _lacking_libraries(facts, backend)
        possible = {"package": backend in packaged, "binary": False}.get(sources[backend], buildable)
        if _accelerators(facts, backend) and possible:
            return backend
    return "cpu"


def _lacking_libraries(facts: dict, backend: str, generation: int = 0, fork: str = capabilities.MAINLINE) -> list[str]:
    """Libraries that were looked for and are not there, of the toolkit that has most of them where there are several. Of a host that is
    declared, or was last seen by an older version, none are."""
    toolkits = [toolkit for toolkit in facts.get("toolchains") or [] if toolkit["backend"] == backend]
    if backend in backends.TOOLKITS and any("libraries" in toolkit for toolkit in toolkits):
        return min((toolchains.lacking(toolkit) for toolkit in toolkits), key=len)
    return [
        name for name in backends.libraries(backend, generation, fork) if facts["toolchain"].get(name, True) is None
    ]


def unused_accelerators(host: dict) -> list[str]:
    """Names of the accelerators of a host for which ``auto`` found no toolchain."""
    if host["backends"] != ["cpu"] or host["variables"]["llama_backend"] != "auto":
        return []
    return sorted({accelerator["name"] for accelerator in host["facts"]["accelerators"]})


def reserve_mib(total_mib: int, shared: bool) -> int:
    """What is left to the system: more where the device's memory is the host's own."""
    return max(2048, total_mib // 10) if shared else max(512, total_mib // 20)


def address_of(name: str, host: dict, peer: str) -> str:
    """The numeric address of the host on the network that joins it with its peer: that of the link whose ``peer`` that is, or of
    the first link without a peer, or where the host is reached."""
    links = host["variables"]["llama_links"]
    joining = [index for index, link in enumerate(links) if link.get("peer") == peer]
    joining += [index for index, link in enumerate(links) if not link.get("peer")]
    variable, address = (
        (f"llama_links[{joining[0]}].address", str(links[joining[0]].get("address")))
        if joining
        else ("ansible_host", str(host["ansible_host"]))
    )
    try:
        parsed = ipaddress.IPv4Address(address.split("/", maxsplit=1)[0])
    except ValueError:
        raise Refusal(
            f"{variable} of {name} is {address!r}: workers and the head need a numeric IPv4 address there; "
            "give it in ansible_host, or in llama_links with the address of the network that joins them"
        ) from None
    if parsed.is_loopback:
        raise Refusal(
            f"{variable} of {name} is {address!r}, where only {name} itself answers: give its address in the network that joins it with {peer}, in "
            "ansible_host or llama_links"
        )
    if parsed.is_unspecified:
        raise Refusal(
            f"{variable} of {name} is {address!r}, which would open the worker to every network: give the address of one interface"
        )
    return str(parsed)


def _devices(host: dict) -> list[dict]:
    """All devices that the host's builds offer, the CPU last: backend, build (its backend), device, its name for people, memory in
    MiB, whether that is the host's own memory."""
    facts = host["facts"]
    found = [
        {
            "backend": backend,
            "build": backend,
            "device": backends.device_name(backend, index),
            "name": accelerator["name"],
            "memory_mib": accelerator["memory_mib"],
            "shared": accelerator["unified"],
        }
        for backend in host["backends"]
        for index, accelerator in enumerate(_accelerators(facts, backend) if backend != "cpu" else [])
    ]
    own = {
        "backend": "cpu",
        "build": "cpu" if "cpu" in host["backends"] else host["backends"][0],
        "device": "CPU",
        "name": "the processor",
        "memory_mib": facts["memory_mib"],
        "shared": True,
    }
    return [*found, own]


def _no_device(where: str, name: str, backend: str, built: list[str], offered: list[dict]) -> Refusal:
    """An endpoint that gives a backend alone, of which no device is left."""
    lent = [device["device"] for device in offered if device["backend"] == backend]
    if lent:
        return Refusal(
            f"{where} has the backend {backend!r}, and endpoints before it lend all devices of it ({', '.join(lent)}): take it out, or declare "
            "further devices in llama_hardware"
        )
    return Refusal(
        f"{where} has the backend {backend!r}, and llama.cpp is built there for {', '.join(built)}: use one of these, or name it in "
        f"llama_backend of {name}"
    )


def workers_of(name: str, host: dict, head: str) -> list[dict]:
    """The declared workers of one host with everything but their place in the model."""
    offered = _devices(host)
    lent = [device for device in offered if device["device"] != "CPU" or "cpu" in host["backends"]]
    declared = host["variables"]["llama_worker_endpoints"] or [{} for _device in lent]
    address = "127.0.0.1" if name == head else address_of(name, host, head)
    found: list[dict] = []
    for index, endpoint in enumerate(declared):
        where = f"llama_worker_endpoints[{index}] of {name}"
        free = [
            device
            for device in offered
            if device["device"] not in {worker["device"] for worker in found}
            and endpoint.get("backend") in (None, device["backend"])
        ]
        if not free and not endpoint.get("device") and endpoint.get("backend") not in (None, "cpu"):
            raise _no_device(where, name, endpoint["backend"], host["backends"], offered)
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
        if device["backend"] != "cpu" and not (device["memory_mib"] or endpoint.get("memory_mib")):
            raise Refusal(
                f"{where} lends {device_name}, {device['name']}, whose memory is not known: give its size as memory_mib there, or declare the "
                "device in llama_hardware"
            )
        for variable in ("threads", "memory_mib"):
            if endpoint.get(variable) is not None and endpoint[variable] < 1:
                raise Refusal(f"{where} has the {variable} {endpoint[variable]}: give 1 or more, or leave it out")
        port = FIRST_PORT + index if endpoint.get("port") is None else endpoint["port"]
        staging_port = port + STAGING_DISTANCE if endpoint.get("staging_port") is None else endpoint["staging_port"]
        for variable, number in (("port", port), ("staging_port", staging_port)):
            if isinstance(number, bool) or not 0 < number < 65536:
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
                "build": device["build"],
                "device": device_name,
                "alone": False,
                "threads": endpoint.get("threads"),
                "cache": bool(endpoint.get("cache")),
                "cache_mib": endpoint.get("cache_mib") or 0,
                "declared_mib": endpoint.get("memory_mib"),
                "memory_mib": device["memory_mib"],
                "shared": device["shared"],
                "environment": {key: str(value) for key, value in (endpoint.get("environment") or {}).items()},
            }
        )
    cpu_workers = sum(worker["backend"] == "cpu" for worker in found)
    for worker in found:
        sharing = sum(other["shared"] for other in found if other["build"] == worker["build"])
        usable = worker["memory_mib"] - reserve_mib(worker["memory_mib"], worker["shared"])
        worker["capacity_mib"] = worker["declared_mib"] or max(0, usable // (sharing if worker["shared"] else 1))
        if worker["backend"] == "cpu" and worker["threads"] is None:
            worker["threads"] = max(1, host["facts"]["cpu"]["cores"] // cpu_workers)
        if (
            worker["backend"] == "cuda"
            and len({device["name"] for device in offered if device["backend"] == "cuda"}) > 1
        ):
            worker["environment"].setdefault(*CUDA_IN_BUS_ORDER)
        if worker["cache"]:
            worker["environment"].setdefault("LLAMA_CACHE", f"{host['facts']['prefix']}/state/cache/{worker['name']}")
    return found


def _kept(host: dict, backend: str) -> list[dict]:
    """Accelerators of the backend that a host does not lend: those before the first one that it lends, so that the others can be hidden.
    None where it lends some by another backend, which may be the same ones."""
    accelerators = _accelerators(host["facts"], backend)
    lent = {worker["device"] for worker in host["workers"] if worker["backend"] != "cpu"}
    if not lent:
        return accelerators
    names = [backends.device_name(backend, index) for index, _accelerator in enumerate(accelerators)]
    if backend not in HIDDEN or not lent <= set(names):
        return []
    return accelerators[: min(map(names.index, lent))]


def own_devices(name: str, host: dict, backend: str) -> list[dict]:
    """Accelerators that llama-server itself uses on the head: those of its backend that the host does not lend. Those that share the
    host's memory only where there is no other, as llama.cpp does it, and where the host lends nothing of that memory. One whose memory is
    not known is left out."""
    found = [
        {
            "host": name,
            "backend": backend,
            "device": backends.device_name(backend, index),
            "buffer": backends.device_name(backend, index),
            "capacity_mib": max(
                0, accelerator["memory_mib"] - reserve_mib(accelerator["memory_mib"], accelerator["unified"])
            ),
            "shared": accelerator["unified"],
        }
        for index, accelerator in enumerate(_kept(host, backend))
        if accelerator["memory_mib"]
    ]
    return [device for device in found if not device["shared"]] or ([] if host["workers"] else found[:1])


def environment_of_head(host: dict, backend: str, own: Collection[dict], lent: Collection[dict]) -> dict[str, str]:
    """What makes llama-server count devices as planned, and take no memory of those that it does not use.

    :param own: the devices of its own that it uses.
    :param lent: the workers that it uses.
    """
    accelerators, kept = _accelerators(host["facts"], backend), _kept(host, backend)
    found: dict[str, str] = {}
    if own and backend == "cuda" and len({accelerator["name"] for accelerator in accelerators}) > 1:
        found.update([CUDA_IN_BUS_ORDER])
    if backend in HIDDEN and own and len(kept) < len(accelerators):
        found[VISIBLE[backend]] = ",".join(map(str, range(len(kept))))
    elif backend in HIDDEN and accelerators and lent and not own:
        found[VISIBLE[backend]] = "-1"
    return found


def serving(host: dict, backend: str, fitting: Collection[str]) -> list[dict]:
    """The workers of a host that a head may use: those of one build, since devices are lent once by each.

    :param backend: that is preferred; a host without it lends the devices of the first one that fits.
    :param fitting: backends whose release is the head's.
    """
    fits = [build for build in (backend, *host["backends"]) if build in host["backends"] and build in fitting]
    return [worker for worker in host["workers"] if fits and worker["build"] == fits[0]]


def on_its_staging_port(worker: dict) -> dict:
    """The worker with its two ports exchanged."""
    port, staging_port = worker["staging_port"], worker["port"]
    return {**worker, "endpoint": f"{worker['address']}:{port}", "port": port, "staging_port": staging_port}


def seeing_one_device(worker: dict, able: dict, devices: int) -> dict:
    """The worker, and where its program cannot be told which device to lend, an environment in which there is no other one.

    :param able: capabilities of its build.
    :param devices: how many of its kind the host has.
    """
    variable = VISIBLE.get(worker["backend"])
    if "d" in able["worker_flags"] or variable is None:
        return worker
    if variable not in worker["environment"] and devices > 1:
        index = re.sub(r"\D", "", worker["device"])
        worker = {**worker, "environment": {**worker["environment"], variable: index}}
    return {**worker, "alone": variable in worker["environment"]}


def argv_of(worker: dict, build: dict, able: dict, releases: str) -> list[str]:
    argv = [f"{releases}/{build['id']}/bin/{able['worker_binary']}", "-H", worker["address"], "-p", str(worker["port"])]
    if "d" in able["worker_flags"]:
        argv += ["-d", worker["device"]]
    elif worker["device"] != backends.device_name(build["backend"], 0) and not worker["alone"]:
        raise Refusal(
            f"the worker {worker['name']} of {worker['host']} lends {worker['device']}, and rpc-server of {build['release']} lends "
            f"{backends.device_name(build['backend'], 0)} only: declare that one alone in llama_worker_endpoints, or set llama_release to a newer build"
        )
    if "cpu" in able["worker_flags"] and worker["device"] == "CPU":
        argv.append("-cpu")
    if "t" in able["worker_flags"] and worker["threads"]:
        argv += ["-t", str(worker["threads"])]
    if worker["cache"]:
        if "c" not in able["worker_flags"]:
            raise Refusal(
                f"the worker {worker['name']} of {worker['host']} is to have a cache, which {able['worker_binary']} of {build['release']} does "
                "not know: leave cache out of llama_worker_endpoints, or set llama_release to b4981 or newer"
            )
        argv.append("-c")
    return argv


def tools_of(name: str, host: dict, backend: str, catalogue: dict, release: dict) -> dict[str, str]:
    """Tool → package, of all that this host needs. Packages of llama.cpp itself are tools too.

    :param host: with ``facts`` and ``groups``.
    :param catalogue: packages.yml: ``tools``, distribution family → tool → package, and ``llama``, the packages of llama.cpp.
    :raises Refusal: a tool is missing and this run cannot install it, or it is too old.
    """
    facts = host["facts"]
    family = facts["distribution"]["family"]
    packages = catalogue["tools"].get(family, {})
    found = {tool for tool, version in facts["toolchain"].items() if version}
    needed = []
    if release["source"] == "package":
        packaged = catalogue["llama"][family]
        programs = [release["capabilities"]["worker_binary"]] * ("worker" in host["groups"])
        programs += ["llama-server"] * ("head" in host["groups"])
        needed = [*packaged["libraries"][backend], *(packaged["programs"][program]["package"] for program in programs)]
        packages = {**packages, **{package: package for package in needed if package not in packages}}
        found |= set(facts["packaged"]["installed"])
    elif release["source"] != "binary":
        tree = release["generation"], release.get("fork", capabilities.MAINLINE)
        libraries = backends.libraries(backend, *tree)
        toolkit = _toolkit(name, host, backend)
        lacking = toolchains.lacking(toolkit) if toolkit else _lacking_libraries(facts, backend, *tree)
        found = (found | set(libraries)) - set(lacking)
        # A library that another toolkit has counts as a tool of the host: to be installed for this one, its package does.
        elsewhere = {tool: packages[tool] for tool in lacking if tool in packages and facts["toolchain"].get(tool)}
        packages = {**packages, **{package: package for package in elsewhere.values()}}
        libraries = list(dict.fromkeys(elsewhere.get(tool, tool) for tool in libraries))
        needed = [*backends.tools(backend), *libraries, *["patch"] * bool(release.get("patches"))]
        _recent_enough(name, facts["toolchain"].get("cmake"), backend)
    needed += service_managers.MANAGERS[facts["service_manager"]].tools
    missing = [tool for tool in needed if tool not in found]
    unknown = [tool for tool in missing if tool not in packages]
    if unknown:
        sources = sorted({VENDORS[tool] for tool in unknown if tool in VENDORS})
        raise Refusal(
            f"{name} lacks {', '.join(unknown)}, and no package is known for it on {facts['distribution']['id']}: "
            f"install it by hand{', from ' * bool(sources)}{' and '.join(sources)}, or set llama_backend of {name}"
        )
    if missing and facts["system"] == "Darwin":
        raise Refusal(
            f"{name} lacks {', '.join(missing)}: run brew install {' '.join(sorted({packages[tool] for tool in missing}))} there, then run it again"
        )
    if missing and facts["scope"] == "user":
        raise Refusal(
            f"{name} lacks {', '.join(missing)}, and this run may not become root there (llama_host_scope is user): "
            f"let an administrator install {', '.join(dict.fromkeys(packages[tool] for tool in missing))}, then run it again"
        )
    if facts["python"] is None:
        raise Refusal(
            f"{name} has no Python 3.9 or newer that the services' accounts can read: install the distribution's python3"
        )
    return {tool: packages[tool] for tool in needed if tool in packages}


def optional_tools_of(host: dict, catalogue: dict, sources: Collection[str]) -> dict[str, str]:
    """Tool → package, of what only makes builds faster, where this run may install it.

    :param sources: of the releases that the host has builds of.
    """
    facts = host["facts"]
    packages = catalogue["tools"].get(facts["distribution"]["family"], {})
    may = facts["scope"] == "system" and facts["system"] != "Darwin" and set(sources) & set(releases.COMPILED)
    return {tool: packages[tool] for tool in backends.OPTIONAL_TOOLS if may and tool in packages}


def _toolkit(name: str, host: dict, backend: str) -> dict | None:
    """The ROCm or CUDA that a build of this host uses, where the host has one."""
    architectures = sorted({device["architecture"] for device in _accelerators(host["facts"], backend)})
    beside = [other for other in host["backends"] if other != backend]
    prefix = host["variables"]["llama_build_toolchain"]
    return toolchains.chosen(name, backend, host["facts"], prefix, architectures, beside)["toolkit"]


def _recent_enough(name: str, version: str | None, backend: str) -> None:
    minimum = backends.MINIMUM_CMAKE[backend]
    if version and tuple(map(int, re.findall(r"\d+", version)[:2])) < minimum:
        raise Refusal(
            f"{name} has cmake {version}, too old for {backend}: install {'.'.join(map(str, minimum))} or newer"
        )
