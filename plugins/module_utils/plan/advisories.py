# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Known problems of a plan. An error whose id the operator has not accepted stops the run.

ADVISORIES at the end is the table; the functions above it are the conditions of its entries. Problems that planning avoids by itself
have no entry: docs/plan.md lists every known symptom and its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import devices, memory
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Cluster, Facts, Release, Server

LOOPBACK = "127."
MIB = 1024 * 1024
THREAD = "ggml-org/llama.cpp#{}"

THREE_ENDPOINTS_HANG = (10620, 10819)
"""Builds that were seen to hang with three endpoints, up to the newest one that was tested (#28487)."""
RDNA35_GARBAGE = (10040, 11062)
"""From the build that lets integrated devices read the host's buffers (#24233) to the last before a tree that does not (11063)."""
RDNA35 = ("gfx1150", "gfx1151")
FASTER_ALONE = 1.05
"""So many times as fast has one host to be predicted before it is said: predictions are not surer than that."""
CHUNKED_SENDS = 6141
"""First build that sends a tensor in pieces (#15188)."""
LARGEST_SEND = 1 << 31
"""Bytes that macOS does not send or receive at once."""
SENDING = "ggml/src/ggml-rpc/ggml-rpc.cpp"
"""The file of llama.cpp that sends tensors."""
WIDE_MODELS = ("qwen3moe", 4096)
"""Architecture and least width of models that were seen to abort over RPC before that, on Linux too: Qwen3 235B and 480B."""
STRIX_HALO = "gfx1151"
STRIX_HALO_KERNEL = (6, 18, 4)
FAULTY_FIRMWARE = "20251125"
DEFAULT_MTU = 1500
THUNDERBOLT_LANES, THUNDERBOLT_GBIT = 2, 20
"""Lanes, and Gbit/s of each, of a connection between hosts with USB4 or Thunderbolt 3 and newer."""
VULKAN_MEMORY = "vulkan-shared-memory"
"""Where it is accepted, devices lend more than their driver shows as their own."""
OLLAMA_ARCHITECTURES = ("deepseekocr", "glm4moelite", "glmocr", "gptoss", "mllama", "nemotron_h_omni", "qwen25vl")
"""Architectures in files of Ollama that upstream names otherwise or does not have."""
READS_NO_OPTION_FILES = 8643
"""The newest tree that was read in which llama-server reads no file of options; that of 11063 does."""
ROUTER_OPTIONS = ("--models-preset", "--models-dir")
ROUTER_VARIABLES = ("LLAMA_ARG_MODELS_PRESET", "LLAMA_ARG_MODELS_DIR")


class Seen(NamedTuple):
    """What a condition looks at: ``release`` and ``summary`` are those that serve, ``used`` the devices that get layers."""

    plan: Mapping[str, Any]
    cluster: Cluster
    release: Release
    summary: Mapping[str, Any]
    used: Sequence[devices.Holder]

    @property
    def generation(self) -> int:
        """Build number that stands for the features and faults of the release that serves."""
        return self.release.generation

    @property
    def server(self) -> Server:
        return self.cluster.server


Cases = list[tuple[Any, dict[str, Any]]]
"""For each case of the condition: host (or None), and the values for message and remedy."""


def _security_floor(seen: Seen) -> Cases:
    floor, known = capabilities.SECURITY_FLOOR, capabilities.IK_LLAMA_SEEN
    cases: Cases = []
    for build, fork in sorted(
        {(release["generation"], release.get("fork")) for release in seen.plan["releases"].values()}, key=str
    ):
        if fork:
            release = f"Commit {build} of {fork}"
            if build > known:
                release += f" is newer than {known}, the last one that was checked, which"
            safe = f"build {floor} or newer of llama.cpp, or let only the head reach the workers"
            cases.append((None, {"release": release, "safe": safe}))
        elif build < floor:
            cases.append((None, {"release": f"Build {build}", "safe": f"build {floor} or newer"}))
    return cases


def _unmaintained_backends(seen: Seen) -> Cases:
    releases = seen.plan["releases"]
    return [
        (
            name,
            {
                "fork": releases[build["release"]]["fork"],
                "backend": build["backend"],
                "maintained": " or ".join(backends.IK_LLAMA_MAINTAINED),
            },
        )
        for name, host in seen.plan["hosts"].items()
        for build in host["builds"]
        if "fork" in releases[build["release"]] and build["backend"] not in backends.IK_LLAMA_MAINTAINED
    ]


def _unprotected_workers(seen: Seen) -> Cases:
    cases = []
    for name, host in seen.plan["hosts"].items():
        exposed = [worker["listens"] for worker in host["workers"] if not worker["listens"].startswith(LOOPBACK)]
        if exposed and not host["unit_closes"] and not host["firewall_manager"]:
            reason = f"{_why_no_unit_closes(seen, name)}, and the run sets up no firewall there"
            cases.append((name, {"endpoints": ", ".join(exposed), "reason": reason}))
    return cases


def _external_workers(seen: Seen) -> Cases:
    """Those that the head reaches over a network. At the end of a tunnel nobody else is."""
    ports: dict[str, list[str]] = {}
    for worker in seen.plan["external_workers"]:
        if not worker["endpoint"].startswith(LOOPBACK):
            ports.setdefault(worker["host"], []).append(worker["endpoint"])
    return [(name, {"endpoints": ", ".join(endpoints), "head": seen.cluster.head}) for name, endpoints in ports.items()]


def _why_no_unit_closes(seen: Seen, name: str) -> str:
    facts = seen.cluster.hosts[name].facts
    if not service_managers.MANAGERS[facts.service_manager].closes_ports_by:
        return f"{facts.service_manager} does not filter addresses"
    if facts.units_filter is None:
        return (
            "it is not known whether systemd there filters addresses, since systemd-run could not be run as root (then run with become), or since "
            "the host is down and its facts are those of an older version of the collection (then start it, or leave it out of the inventory)"
        )
    return "systemd there does not filter addresses, since the kernel or the container lacks BPF for control groups"


def _open_server(seen: Seen) -> Cases:
    head = seen.plan["head"]
    if head["address"].startswith(LOOPBACK) or "--api-key-file" in head["argv"]:
        return []
    return [(head["host"], {"address": f"{head['address']}:{head['port']}"})]


def _server_for_everybody(seen: Seen) -> Cases:
    head = seen.plan["head"]
    if head["address"].startswith(LOOPBACK) or head["allowed"]:
        return []
    return [(head["host"], {"address": f"{head['address']}:{head['port']}"})]


def _unlimited_server(seen: Seen) -> Cases:
    head = seen.plan["head"]
    host = seen.plan["hosts"][head["host"]]
    closes = host["unit_closes"] or host["firewall_manager"] or names.EVERYBODY in head["allowed"]
    if not head["allowed"] or head["address"].startswith(LOOPBACK) or closes:
        return []
    name, reason = head["host"], _why_no_unit_closes(seen, head["host"])
    limit = "Limit the port with a firewall of your own and accept this advisory"
    if host["host_settings"]:
        reason += ", and no firewall is active there"
        limit = f"Start firewalld, ufw or nftables on {name}"
    return [(name, {"networks": ", ".join(head["allowed"]), "reason": reason, "limit": limit})]


def _unused_accelerators(seen: Seen) -> Cases:
    return [
        (name, {"devices": ", ".join(host["unused_accelerators"])})
        for name, host in seen.plan["hosts"].items()
        if host["unused_accelerators"]
    ]


def _slower_than_one_host(seen: Seen) -> Cases:
    """The known-answer model is there to try workers, however fast."""
    estimate, server = seen.plan["estimate"], seen.server
    together, best = estimate["generation_tokens_per_s"], estimate["best_single_host"]
    if seen.plan["model"]["known_answer"] or not estimate["links"] or not together or not best["fits"]:
        return []
    alone, host, head = best["generation_tokens_per_s"], best["host"], seen.cluster.head
    if alone < FASTER_ALONE * together:
        return []
    steps = [f"put {host} into llama_head in place of {head}, with the model's files"] if host != head else []
    steps.append("leave llama_workers empty")
    given = [f"llama_server_{key}" for key in ("tensor_split", "override_tensor") if getattr(server, key)]
    if best["gpu_layers"] is not None:
        steps.append(f"set llama_server_gpu_layers to {best['gpu_layers']}")
    elif server.gpu_layers is not None:
        given.append("llama_server_gpu_layers")
    steps += [f"remove {name}" for name in given]
    remedy = ", ".join(steps)
    return [(host, {"together": f"{together:g}", "alone": f"{alone:g}", "steps": remedy[0].upper() + remedy[1:]})]


def _compute_over_capacity(seen: Seen) -> Cases:
    return memory.over_capacity(seen.plan, seen.server, seen.summary, seen.release)


def _cut_context(seen: Seen) -> Cases:
    return memory.cut_context(seen.plan, seen.server, seen.summary)


def _shared_context(seen: Seen) -> Cases:
    return memory.shared_context(seen.plan, seen.server)


def _unknown_variables(seen: Seen) -> Cases:
    hosts_of: dict[tuple[str, str], list[str]] = {}
    for name, host in seen.cluster.hosts.items():
        for pair in host.unknown_variables.items():
            hosts_of.setdefault(pair, []).append(name)
    return [
        (
            names[0] if len(names) == 1 else None,
            {"variable": variable, "meant": meant or "none", "names": ", ".join(names)},
        )
        for (variable, meant), names in sorted(hosts_of.items())
    ]


def _unknown_options(seen: Seen) -> Cases:
    cases = []
    for name, host in seen.plan["hosts"].items():
        set_for = {
            (option, seen.plan["releases"][build["release"]]["generation"])
            for build in host["builds"]
            if "fork" not in seen.plan["releases"][build["release"]]
            for option in build["cmake_options"]
        }
        for option, generation in sorted(set_for):
            first, last = backends.OPTION_BUILDS.get(option, (0, None))
            if not first <= generation <= (last or generation):
                known = f"up to {last}" if not first else f"{first} to {last}" if last else f"from {first} on"
                cases.append((name, {"option": option, "build": generation, "known": known}))
    return cases


def _reads_pages(seen: Seen) -> bool:
    """Whether llama-server maps the model's file, which is its default too."""
    return seen.plan["head"]["load_mode"] in (None, "mmap")


def _mmap_hangs(seen: Seen) -> Cases:
    return [
        (device.host, {"device": device.name, "mib": round(device.weights_mib), "limit": devices.MMAP_LIMIT_MIB})
        for device in seen.used
        if device.hangs_on_mmap and _reads_pages(seen)
    ]


def _mmap_is_slow(seen: Seen) -> Cases:
    return [
        (device.host, {"device": device.name, "mib": round(device.weights_mib), "memory": device.host_memory_mib})
        for device in seen.used
        if device.slow_on_mmap and not device.hangs_on_mmap and _reads_pages(seen)
    ]


def _vulkan_without_mmap(seen: Seen) -> Cases:
    head, mode = seen.plan["head"]["host"], seen.plan["head"]["load_mode"]
    own = any(device.backend == "vulkan" and device.unified and device.host == head for device in seen.used)
    return [(head, {"mode": mode})] if own and mode in ("none", "dio") else []


def _vulkan_memory(seen: Seen) -> Cases:
    """A share beyond what the driver shows as the device's own, or a model that does not fit within that."""
    if seen.plan["fits"]:
        return [
            (device.host, {"device": device.name, "limit": device.visible_mib, "use": f"gets {share} MiB"})
            for device in seen.used
            for share in [round(device.held_mib)]
            if share > device.visible_mib
        ]
    return [
        (
            name,
            {
                "device": worker["device"],
                "limit": devices.visible_mib(worker["backend"], accelerator, worker["environment"]),
                "use": f"has {accelerator.memory_mib} MiB, and the model does not fit",
            },
        )
        for name, host in seen.plan["hosts"].items()
        for worker in host["workers"]
        for accelerator in [devices.accelerator_of(seen.cluster.hosts[name].facts, worker["device"])]
        if worker["used"]
        and accelerator
        and devices.visible_mib(worker["backend"], accelerator, worker["environment"]) < accelerator.memory_mib
    ]


def _sends_whole_tensors(seen: Seen) -> bool:
    """Whether a tensor goes to a worker in one piece, and no patch changes how it is sent."""
    patched = any(SENDING in patch.files for patch in seen.release.patches)
    remote = any(device.endpoint for device in seen.used)
    return seen.release.mainline and seen.generation < CHUNKED_SENDS and remote and not patched


def _wide_tensor(seen: Seen) -> Cases:
    largest = seen.summary.get("largest_tensor_bytes", 0)
    concerned = {seen.plan["head"]["host"], *(device.host for device in seen.used if device.endpoint)}
    mac = [name for name in sorted(concerned) if seen.cluster.places[name].facts.system == "Darwin"]
    if not _sends_whole_tensors(seen) or largest < LARGEST_SEND or not mac:
        return []
    return [(mac[0], {"build": seen.generation, "mib": largest // MIB, "first": CHUNKED_SENDS})]


def _wide_model(seen: Seen) -> Cases:
    architecture, width = WIDE_MODELS
    is_one = seen.summary["architecture"] == architecture and seen.summary["width"] >= width
    if not is_one or not _sends_whole_tensors(seen):
        return []
    return [(None, {"build": seen.generation, "model": seen.summary["name"], "first": CHUNKED_SENDS})]


def _three_endpoints(seen: Seen) -> Cases:
    endpoints = [device.endpoint for device in seen.used if device.endpoint]
    first, last = THREE_ENDPOINTS_HANG
    if not seen.release.mainline or len(endpoints) < 3 or not first <= seen.generation <= last:
        return []
    return [(None, {"count": len(endpoints), "build": seen.generation, "first": first, "last": last})]


def _garbage(seen: Seen) -> Cases:
    first, last = RDNA35_GARBAGE
    if not seen.release.mainline or not first <= seen.generation <= last:
        return []
    return [
        (device.host, {"device": device.name, "architecture": device.architecture, "build": seen.generation})
        for device in seen.used
        if device.backend == "hip" and device.architecture in RDNA35
    ]


def _cache_kernels(seen: Seen) -> Cases:
    kinds = seen.server.cache_type_k, seen.server.cache_type_v
    if not seen.release.mainline or not backends.needs_all_quants(*kinds):
        return []
    cases = []
    for name in dict.fromkeys(device.host for device in seen.used if backends.RECORDS[device.backend].all_quants):
        options = [
            build["cmake_options"].get(option, "OFF")
            for build in seen.plan["hosts"].get(name, {"builds": []})["builds"]
            for option in [backends.RECORDS[build["backend"]].all_quants]
            if option
        ]
        if not options or not all(backends.is_on(value) for value in options):
            cases.append((name, {"type_k": kinds[0], "type_v": kinds[1]}))
    return cases


def _router(seen: Seen) -> Cases:
    words = [word for word in seen.server.extra_args if options.normalize(word) in ROUTER_OPTIONS]
    names = [name for name in seen.server.environment if name in ROUTER_VARIABLES]
    given = [("llama_server_extra_args", word) for word in words]
    given += [("llama_server_environment", name) for name in names]
    if not given or not any(device.endpoint for device in seen.used):
        return []
    return [(seen.plan["head"]["host"], {"variable": given[0][0], "option": given[0][1]})]


def _ollama(seen: Seen) -> Cases:
    architecture = seen.summary["architecture"]
    return (
        [(seen.plan["head"]["host"], {"path": seen.plan["model"]["path"], "architecture": architecture})]
        if architecture in OLLAMA_ARCHITECTURES
        else []
    )


def _by_thunderbolt(link: Mapping[str, Any]) -> bool:
    return str(link.get("interface") or "").startswith("thunderbolt")


def _narrow_thunderbolt(seen: Seen) -> Cases:
    return [
        (name, {"device": connection.device, "lanes": connection.lanes, "gbit": f"{connection.gbit_per_lane:g}"})
        for name, host in seen.plan["hosts"].items()
        if any(map(_by_thunderbolt, host["links"]))
        for connection in seen.cluster.hosts[name].facts.thunderbolt
        if connection.lanes < THUNDERBOLT_LANES or connection.gbit_per_lane < THUNDERBOLT_GBIT
    ]


def _small_packets(seen: Seen) -> Cases:
    return [
        (name, {"interface": link["interface"], "index": index})
        for name, host in seen.plan["hosts"].items()
        for index, link in enumerate(host["links"])
        if _by_thunderbolt(link) and link.get("manage") and (link.get("mtu") or DEFAULT_MTU) <= DEFAULT_MTU
    ]


def _untuned(seen: Seen) -> Cases:
    if seen.plan["fits"]:
        return []
    return [
        (name, {"device": accelerator.name, "mib": accelerator.memory_mib, "memory": host.facts.memory_mib})
        for name, host in seen.cluster.hosts.items()
        for accelerator in host.facts.accelerators
        if accelerator.backend == "hip"
        and accelerator.unified
        and accelerator.memory_mib < host.facts.memory_mib * 3 // 4
        and not seen.plan["hosts"][name]["tuning"]["parameters"]
    ]


def _strix_halos(seen: Seen) -> list[tuple[str, Facts]]:
    """Name and facts of hosts with graphics of this kind that get layers."""
    names = dict.fromkeys(device.host for device in seen.used if device.architecture == STRIX_HALO)
    return [(name, seen.cluster.hosts[name].facts) for name in names if name in seen.cluster.hosts]


def _old_kernel(seen: Seen) -> Cases:
    cases = []
    for name, facts in _strix_halos(seen):
        version = tuple(map(int, re.findall(r"\d+", facts.kernel)[:3]))
        if version and version < STRIX_HALO_KERNEL:
            cases.append((name, {"kernel": facts.kernel, "first": ".".join(map(str, STRIX_HALO_KERNEL))}))
    return cases


def _faulty_firmware(seen: Seen) -> Cases:
    return [
        (name, {"version": facts.firmware}) for name, facts in _strix_halos(seen) if FAULTY_FIRMWARE in facts.firmware
    ]


def _option_files(seen: Seen) -> Cases:
    """Only llama-server reads them."""
    head = seen.cluster.head
    files = seen.cluster.hosts[head].facts.option_files
    reads = seen.release.mainline and seen.generation > READS_NO_OPTION_FILES
    return [(head, {"files": " and ".join(files)})] if files and reads else []


class Advisory(NamedTuple):
    """``severity`` is error where running would give no answer, a wrong one, or an open door; everything else is a warning."""

    id: str
    severity: str
    condition: Callable[[Seen], Cases]
    message: str
    remedy: str
    reference: str
    example: tuple[tuple[str, str], ...] = ()
    """Keys whose value is more than a name or a number, with an example value for docs/plan.md."""


ADVISORIES = (
    Advisory(
        "rpc-remote-code-execution",
        "error",
        _security_floor,
        "{release} lets anyone who reaches a worker's port run code on the worker's host, without authentication.",
        "Set llama_release to {safe}.",
        "CVE-2026-34159",
        (("release", "Build 6110"), ("safe", f"build {capabilities.SECURITY_FLOOR} or newer")),
    ),
    Advisory(
        "unprotected-worker",
        "error",
        _unprotected_workers,
        "RPC has no authentication, and on {host} nothing limits {endpoints} to the head: {reason}.",
        "Close the port with a firewall of your own and accept this advisory, or run the workers as systemd system services where systemd "
        "filters addresses.",
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
        (("reason", "launchd does not filter addresses"),),
    ),
    Advisory(
        "external-worker",
        "error",
        _external_workers,
        "RPC has no authentication, and {host} runs {endpoints} by itself: nobody here can verify that the port is closed to others.",
        "Have a firewall on {host} let only {head} reach the port and accept this advisory, or reach the worker through a tunnel: it listens on 127.0.0.1 "
        "there, and the tunnel ends on 127.0.0.1 of {head}, which is its endpoint in llama_external_workers then.",
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
    ),
    Advisory(
        "open-server",
        "error",
        _open_server,
        "The server listens on {address} and answers anyone who reaches it.",
        "Set llama_server_api_key_file, or set llama_server_host to 127.0.0.1 and use a proxy of your own.",
        "https://github.com/ggml-org/llama.cpp/pull/25655",
    ),
    Advisory(
        "server-for-everybody",
        "error",
        _server_for_everybody,
        "The server listens on {address}, and llama_server_allowed does not say which networks may connect, so its port is closed to nobody.",
        "Set llama_server_allowed to the networks of its clients, like 192.168.1.0/24, or set llama_server_host to 127.0.0.1.",
        "docs/operating.md",
    ),
    Advisory(
        "unlimited-server",
        "error",
        _unlimited_server,
        "llama_server_allowed is {networks}, but nothing on {host} limits the server to that: {reason}.",
        "{limit}, or set llama_server_host to 127.0.0.1 and use a proxy of your own.",
        "docs/operating.md",
        (
            ("reason", "launchd does not filter addresses"),
            ("limit", "Limit the port with a firewall of your own and accept this advisory"),
        ),
    ),
    Advisory(
        "hip-mmap-hang",
        "error",
        _mmap_hangs,
        "{device} of {host} shares memory with the processor, and HIP loads {mib} MiB of the model into it with mmap. From about {limit} MiB "
        "on, loading hangs or aborts.",
        "Leave llama_server_load_mode out, or set it to dio (none with a build before b7668).",
        THREAD.format(19745),
    ),
    Advisory(
        "hip-mmap-slow",
        "warning",
        _mmap_is_slow,
        "HIP loads {mib} MiB of the model with mmap into {device} of {host}, more than half of the {memory} MiB that it shares with the "
        "processor. This is very slow.",
        "Set llama_server_load_mode to dio (none with a build before b7668).",
        "https://github.com/lhl/strix-halo-testing",
    ),
    Advisory(
        "vulkan-without-mmap",
        "warning",
        _vulkan_without_mmap,
        "llama_server_load_mode is {mode}. The head {host} uses Vulkan on shared memory, and needs more of it than with mmap.",
        "Leave llama_server_load_mode out, or set it to mmap.",
        "https://github.com/lhl/strix-halo-testing",
    ),
    Advisory(
        VULKAN_MEMORY,
        "error",
        _vulkan_memory,
        "{device} of {host} {use}, but Mesa's Vulkan driver reports {limit} MiB, two thirds of the memory that the device shares with the "
        "processor. Larger shares were seen to fail with out of memory while loading.",
        "Serve with HIP (llama_backend: hip), use more workers (llama_placement: all), or set radv_enable_unified_heap_on_apu: 'true' in the "
        "environment of the endpoint in llama_worker_endpoints.",
        THREAD.format(28571),
        (("use", "gets 90112 MiB"),),
    ),
    Advisory(
        "wide-tensor-send",
        "error",
        _wide_tensor,
        "The model has a tensor of {mib} MiB, which build {build} sends in one piece. macOS refuses 2 GiB and more, and the head aborts while loading.",
        "Set llama_release to build {first} or newer, or add pull request 15188 to its patches.",
        THREAD.format(15055),
    ),
    Advisory(
        "wide-model-abort",
        "error",
        _wide_model,
        "Build {build} is older than {first}. Such builds were seen to abort over RPC with models like {model} (Qwen3 with 235 billion parameters or more).",
        "Set llama_release to build {first} or newer, or add pull request 15188 to its patches.",
        THREAD.format(15055),
    ),
    Advisory(
        "three-endpoints-hang",
        "error",
        _three_endpoints,
        "The plan uses {count} workers with build {build}. Builds {first} to {last} were seen to hang with three or more.",
        "Set llama_release to another build, or set llama_placement to fewest if two workers are enough.",
        THREAD.format(28487),
    ),
    Advisory(
        "hip-garbage",
        "error",
        _garbage,
        "Build {build} computes wrong results with HIP on {device} of {host} ({architecture}), without any error message.",
        "Set llama_release to a build before 10040 or to version 0.3.36 with source: pypi, or set llama_backend of {host} to vulkan.",
        THREAD.format(28211),
    ),
    Advisory(
        "cache-kernels",
        "error",
        _cache_kernels,
        "llama_server_cache_type_k is {type_k} and llama_server_cache_type_v is {type_v}. The programs of {host} may not have kernels for these "
        "types, and then the worker aborts at the first token.",
        "Use q8_0 or q4_0 for both, or compile with GGML_CUDA_FA_ALL_QUANTS. With source git, pypi and archive this is automatic.",
        THREAD.format(27905),
    ),
    Advisory(
        "router-with-workers",
        "error",
        _router,
        "{variable} has {option}. Then the server starts one more server for each model, and the second one waits forever, because "
        "a worker serves one server at a time.",
        "Remove {option}, and give each model a cluster with workers of its own.",
        THREAD.format(28908),
        (("variable", "llama_server_extra_args"),),
    ),
    Advisory(
        "ollama-architecture",
        "error",
        _ollama,
        "llama_model_path is {path}, with the architecture {architecture}. Only Ollama uses this name, and llama-server refuses the file.",
        "Set llama_model_path to the GGUF file of this model from Hugging Face.",
        "https://github.com/ollama/ollama",
    ),
    Advisory(
        "thunderbolt-mtu",
        "warning",
        _small_packets,
        "llama_links[{index}] of {host} manages {interface} with an MTU of 1500, which is slow on Thunderbolt.",
        "Set mtu of this link on both ends, up to 65522.",
        "https://docs.kernel.org/admin-guide/thunderbolt.html",
    ),
    Advisory(
        "thunderbolt-lanes",
        "warning",
        _narrow_thunderbolt,
        "{device} of {host}, a Thunderbolt connection to another host, uses {lanes} of 2 lanes, with {gbit} of 20 Gbit/s each.",
        "Use a cable and ports for 40 Gbit/s on {host} and its peer, then check {device} in /sys/bus/thunderbolt/devices.",
        "https://docs.kernel.org/admin-guide/thunderbolt.html",
    ),
    Advisory(
        "graphics-memory-limit",
        "warning",
        _untuned,
        "The model does not fit, and the kernel of {host} lends {device} only {mib} of {memory} MiB.",
        "Set llama_host_tuning of {host} to true.",
        "docs/hardware.md",
    ),
    Advisory(
        "strix-halo-kernel",
        "warning",
        _old_kernel,
        "{host} runs kernel {kernel}. Its graphics (gfx1151) compute reliably from kernel {first} on.",
        "Install kernel {first} or newer on {host}.",
        "https://github.com/kyuz0/amd-strix-halo-toolboxes",
    ),
    Advisory(
        "strix-halo-firmware",
        "warning",
        _faulty_firmware,
        "{host} has linux-firmware {version}. ROCm fails with it on gfx1151 graphics.",
        "Install another version of linux-firmware on {host}.",
        "https://github.com/kyuz0/amd-strix-halo-toolboxes",
    ),
    Advisory(
        "backend-unmaintained",
        "warning",
        _unmaintained_backends,
        "{host} builds {fork} for {backend}, which its maintainers do not support.",
        "Set llama_backend of {host} to {maintained}, or llama_release to llama.cpp.",
        "https://github.com/ikawrakow/ik_llama.cpp#readme",
    ),
    Advisory(
        "accelerator-unused",
        "warning",
        _unused_accelerators,
        "{host} has {devices}, but no build of llama.cpp uses them: it has no toolchain for these devices.",
        "Install ROCm with hipBLAS, CUDA with cuBLAS, or glslc and the Vulkan headers, or name the backends to build for in llama_backend to accept this.",
        "docs/variables.md",
    ),
    Advisory(
        "options-elsewhere",
        "warning",
        _option_files,
        "llama-server of {host} reads {files} before its command line. Every option there that the plan does not set takes effect, and nothing is "
        "planned for it.",
        "Give these options in llama_server_extra_args, and remove them from {files}.",
        "docs/architecture.md",
        (("files", "/etc/llama.cpp/config.ini"),),
    ),
    Advisory(
        "slower-than-one-host",
        "warning",
        _slower_than_one_host,
        "The cluster is predicted to generate {together} tokens per second, and {host} alone {alone}.",
        "{steps}.",
        "docs/plan.md",
        (("steps", "Leave llama_workers empty"),),
    ),
    Advisory(
        "compute-over-capacity",
        "warning",
        _compute_over_capacity,
        "Weights, KV cache and compute buffers may be more than devices hold: {devices}. Compute buffers are planned with an upper bound, {compute} "
        "MiB; if they come near it, llama-server runs out of memory when it starts.",
        "{smaller}.",
        "docs/plan.md",
        (
            ("devices", "CUDA0 of gpu1 (≤ 31020 of 23336 MiB)"),
            ("smaller", "Set llama_server_flash_attention to 'on'"),
        ),
    ),
    Advisory(
        "context-cut",
        "warning",
        _cut_context,
        "llama_server_context is {wanted}, but {model} was trained for {context} tokens: llama-server gets {context}.",
        "Set llama_server_context to {context} or less.",
        "docs/plan.md",
    ),
    Advisory(
        "context-shared",
        "warning",
        _shared_context,
        "llama_server_parallel is {parallel}, so each request gets {each} of the {context} tokens of llama_server_context.",
        "Set llama_server_context to {whole} if each request needs {context} tokens, add --kv-unified to llama_server_extra_args if requests share "
        "them as they need, or accept this.",
        "docs/plan.md",
    ),
    Advisory(
        "variable-unknown",
        "warning",
        _unknown_variables,
        "{variable} is set for {names}, but the collection has no such variable, so it does nothing. Similar name: {meant}.",
        "Use a name from docs/variables.md. A variable of your own may stay.",
        "docs/variables.md",
    ),
    Advisory(
        "cmake-option-unknown",
        "warning",
        _unknown_options,
        "{option} is set for {host}, but has no effect: build {build} does not know it, only builds {known} do.",
        "Remove it from llama_build_cmake_options, or set llama_release to one of these builds.",
        "docs/variables.md",
    ),
)


def evaluate(seen: Seen) -> list[dict[str, Any]]:
    """The advisories of a plan, as docs/plan.md describes them, without ``accepted``."""
    return [
        {
            "id": advisory.id,
            "severity": advisory.severity,
            "host": host,
            "message": advisory.message.format(host=host, **values),
            "remedy": advisory.remedy.format(host=host, **values),
            "reference": advisory.reference,
        }
        for advisory in ADVISORIES
        for host, values in advisory.condition(seen)
    ]
