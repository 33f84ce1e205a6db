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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.versions import numbers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import devices, memory, offers, remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.remedies import Remedy
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.seen import Seen
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Facts

LOOPBACK = "127."
MIB = 1024 * 1024
THREAD = "ggml-org/llama.cpp#{}"

THREE_ENDPOINTS_HANG = (10620, 10819)
"""Builds that were seen to hang with three endpoints, up to the newest one that was tested (#28487)."""
RDNA35_GARBAGE = (10040, 10864)
"""From the build that lets integrated devices read the host's buffers (#24233) to the last before #28604 ended that."""
READING = "ggml/src/ggml-cuda/ggml-cuda.cu"
"""The file of llama.cpp that says whether they do: an operator's own patch of it is taken as the remedy, as those of #25863 and #28211 are."""
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
VULKAN_SHARE_MIB = 87857
"""Smallest share of DeepSeek R1 Q4_K_M on four Strix Halo, which crashed by Vulkan over RPC and ran by HIP, in the field notes. 64446 ran."""
SLOW_ROCM = (7, 2)
"""ROCm whose prompts were seen to be slow on a Strix Halo, in the field notes of a pair; 7.0 nightlies read 72 tokens per second."""
RDMA = "GGML_RPC_RDMA"
"""Option of cmake with which RPC moves from TCP to RDMA after the handshake (b8802, #20590)."""
RDMA_UNTRIED = (
    "Whether RPC moves to RDMA depends on the devices there, the plan counts with TCP, and firewalls do not see RDMA"
)
OLLAMA_ARCHITECTURES = ("deepseekocr", "glm4moelite", "glmocr", "gptoss", "mllama", "nemotron_h_omni", "qwen25vl")
"""Architectures in files of Ollama that upstream names otherwise or does not have."""
READS_NO_OPTION_FILES = 8643
"""The newest tree that was read in which llama-server reads no file of options; that of 11063 does."""
ROUTER_OPTIONS = ("--models-preset", "--models-dir")
ROUTER_VARIABLES = ("LLAMA_ARG_MODELS_PRESET", "LLAMA_ARG_MODELS_DIR")


Cases = list[tuple[Any, dict[str, Any]]]
"""For each case of the condition: host (or None), and the values for message and remedies. ``where`` says the place, if it is more than the
host; cases that differ in nothing else become one advisory."""


def _security_floor(seen: Seen) -> Cases:
    """One case for all builds of llama.cpp, and one for each commit of a fork."""
    floor, known = capabilities.SECURITY_FLOOR, capabilities.IK_LLAMA_SEEN
    cases: Cases = []
    old: dict[str, list[str]] = {}
    for identifier, release in seen.plan["releases"].items():
        build, fork, variables = release["generation"], release.get("fork"), seen.variables_of(identifier)
        if fork:
            checked = f", which is newer than {known}, the last one that was checked" if build > known else ""
            cases.append((None, {"builds": f"commit {build} of {fork}{checked}", "variables": variables}))
        elif build < floor:
            old.setdefault(f"build {build} ({remedies.listed(variables)})", variables)
    if old:
        variables = [variable for own in old.values() for variable in own]
        cases.append((None, {"builds": remedies.listed(sorted(old)), "variables": variables}))
    return cases


def _unmaintained_backends(seen: Seen) -> Cases:
    known = seen.plan["releases"]
    return [
        (name, {"fork": known[build["release"]]["fork"], "unmaintained": build["backend"]})
        for name, host in seen.plan["hosts"].items()
        for build in host["builds"]
        if "fork" in known[build["release"]] and build["backend"] not in backends.IK_LLAMA_MAINTAINED
    ]


def _unprotected_workers(seen: Seen) -> Cases:
    cases = []
    for name, host in seen.plan["hosts"].items():
        exposed = [worker["listens"] for worker in host["workers"] if not worker["listens"].startswith(LOOPBACK)]
        if exposed and not host["unit_closes"] and not host["firewall_manager"]:
            reason = f"{_why_no_unit_closes(seen, name)}, and the run sets up no firewall there"
            cases.append((name, {"where": f"{remedies.listed(exposed)} of {name}", "reason": reason}))
    return cases


def _external_workers(seen: Seen) -> Cases:
    """Those that the head reaches over a network. At the end of a tunnel nobody else is."""
    ports: dict[str, list[str]] = {}
    for worker in seen.plan["external_workers"]:
        if not worker["endpoint"].startswith(LOOPBACK):
            ports.setdefault(worker["host"], []).append(worker["endpoint"])
    return [
        (name, {"where": f"{remedies.listed(endpoints)} of {name}", "head": seen.cluster.head})
        for name, endpoints in ports.items()
    ]


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
    if host["host_settings"]:
        reason += ", and neither firewalld nor ufw nor nftables is active there"
    return [(name, {"networks": ", ".join(head["allowed"]), "reason": reason})]


def _unused_accelerators(seen: Seen) -> Cases:
    """Hosts with the same builds, and devices for the same backends, share their remedies."""
    cases: Cases = []
    for name, host in seen.plan["hosts"].items():
        unused = host["unused_accelerators"]
        if unused:
            devices_of = seen.cluster.hosts[name].facts.accelerators
            kinds = sorted({accelerator.backend for accelerator in devices_of if accelerator.name in unused})
            values = {"kinds": kinds, "built": remedies.as_list(seen.backends_of(name))}
            cases.append((name, {"where": f"{', '.join(unused)} on {name}", **values}))
    return cases


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
    return [(host, {"together": f"{together:g}", "alone": f"{alone:g}", "steps": ", ".join(steps)})]


def _compute_over_capacity(seen: Seen) -> Cases:
    return memory.over_capacity(seen.plan, seen.server, seen.summary, seen.release)


def _cut_context(seen: Seen) -> Cases:
    return memory.cut_context(seen.plan, seen.server, seen.summary)


def _shared_context(seen: Seen) -> Cases:
    return memory.shared_context(seen.plan, seen.server, seen.summary)


def _unknown_variables(seen: Seen) -> Cases:
    pairs = {pair for host in seen.cluster.hosts.values() for pair in host.unknown_variables.items()}
    return [
        (name, {"variable": variable, "meant": meant or "none"})
        for variable, meant in sorted(pairs)
        for name, host in seen.cluster.hosts.items()
        if host.unknown_variables.get(variable) == meant
    ]


def _unknown_options(seen: Seen) -> Cases:
    cases: Cases = []
    for name, host in seen.plan["hosts"].items():
        set_for = {
            (option, build["release"])
            for build in host["builds"]
            if "fork" not in seen.plan["releases"][build["release"]]
            for option in build["cmake_options"]
        }
        for option, identifier in sorted(set_for):
            first, last = backends.OPTION_BUILDS.get(option, (0, None))
            generation = seen.plan["releases"][identifier]["generation"]
            if not first <= generation <= (last or generation):
                known = f"up to {last}" if not first else f"{first} to {last}" if last else f"from {first} on"
                variables = seen.variables_of(identifier)
                values = {"option": option, "build": generation, "known": known, "variables": variables}
                cases.append((name, values))
    return cases


def _reads_pages(seen: Seen) -> bool:
    """Whether llama-server maps the model's file for devices that share memory with the processor. Its default, auto, does so in older
    builds."""
    mode = seen.plan["head"]["load_mode"]
    chosen = mode in (None, "auto") and not (seen.release.mainline and seen.generation >= options.AUTO_SINCE)
    return chosen or mode in ("mmap", "mmap+mlock")


def _mmap_crawls(seen: Seen) -> Cases:
    return [
        (device.host, {"where": f"{device.name} of {device.host}", "mode": seen.plan["head"]["load_mode"]})
        for device in seen.used
        if device.is_gb10 and device.host == seen.plan["head"]["host"] and _reads_pages(seen)
    ]


def _mmap_hangs(seen: Seen) -> Cases:
    return [
        (
            device.host,
            {
                "where": f"{round(device.weights_mib)} MiB on {device.name} of {device.host}",
                "limit": devices.MMAP_LIMIT_MIB,
            },
        )
        for device in seen.used
        if device.hangs_on_mmap and _reads_pages(seen)
    ]


def _mmap_is_slow(seen: Seen) -> Cases:
    return [
        (
            device.host,
            {
                "where": f"{round(device.weights_mib)} of {device.host_memory_mib} MiB on {device.name} of {device.host}",
            },
        )
        for device in seen.used
        if device.slow_on_mmap and not device.hangs_on_mmap and _reads_pages(seen)
    ]


def _vulkan_without_mmap(seen: Seen) -> Cases:
    """Not where HIP would hang or crawl with mmap."""
    head, mode = seen.plan["head"]["host"], seen.plan["head"]["load_mode"]
    own = any(device.backend == "vulkan" and device.unified and device.host == head for device in seen.used)
    needed = any(device.hangs_on_mmap or device.slow_on_mmap for device in seen.used)
    return [(head, {"mode": mode})] if own and not needed and mode in ("none", "dio", "mlock") else []


def _vulkan_memory(seen: Seen) -> Cases:
    """A share beyond what the driver shows as the device's own, or a model that does not fit within that."""
    if seen.plan["fits"]:
        return [
            (
                device.host,
                {"where": f"{device.name} of {device.host} gets {share} MiB, and {device.visible_mib} MiB are shown"},
            )
            for device in seen.used
            for share in [round(device.held_mib)]
            if share > device.visible_mib
        ]
    cases: Cases = []
    for device in seen.used:
        accelerator = devices.accelerator_of(seen.cluster.places[device.host].facts, device.name)
        if accelerator and device.visible_mib < accelerator.memory_mib:
            where = f"{device.name} of {device.host} has {accelerator.memory_mib} MiB, and {device.visible_mib} MiB are shown"
            cases.append((device.host, {"where": where}))
    return cases


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
    patched = any(READING in patch.files for patch in seen.release.patches)
    if not seen.release.mainline or not first <= seen.generation <= last or patched:
        return []
    return [
        (
            device.host,
            {"where": f"{device.name} of {device.host} ({device.architecture})", "build": seen.generation},
        )
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
    return link.get("kind") in ("thunderbolt", "usb4") or str(link.get("interface") or "").startswith("thunderbolt")


def _narrow_thunderbolt(seen: Seen) -> Cases:
    return [
        (
            name,
            {
                "where": f"{connection.device} of {name}",
                "lanes": connection.lanes,
                "gbit": f"{connection.gbit_per_lane:g}",
            },
        )
        for name, host in seen.plan["hosts"].items()
        if any(map(_by_thunderbolt, host["links"]))
        for connection in seen.cluster.hosts[name].facts.thunderbolt
        if connection.lanes < THUNDERBOLT_LANES or connection.gbit_per_lane < THUNDERBOLT_GBIT
    ]


def _large_vulkan_shares(seen: Seen) -> Cases:
    """Shares within what the driver shows: others are the case of VULKAN_MEMORY. Of a model that does not fit there are none yet."""
    return [
        (
            device.host,
            {
                "where": f"{round(device.held_mib)} MiB on {device.name} of {device.host}",
                "crashed": VULKAN_SHARE_MIB,
                "variable": "llama_worker_endpoints" if device.host in seen.cluster.hosts else "llama_external_workers",
            },
        )
        for device in seen.used
        if seen.plan["fits"]
        and device.endpoint
        and device.backend == "vulkan"
        and VULKAN_SHARE_MIB <= device.held_mib <= device.visible_mib
    ]


def _slow_prompts(seen: Seen) -> Cases:
    """Hosts whose newest ROCm is the slow one, where another one is installed."""
    own = [device for device in seen.used if device.host in seen.cluster.hosts]
    architectures = {device.host: device.architecture for device in own if device.architecture == STRIX_HALO}
    cases = []
    for name, architecture in architectures.items():
        installed = [one for one in seen.cluster.hosts[name].facts.toolchains or () if one["backend"] == "hip"]
        built = [build["environment"].get("HIP_PATH") for build in seen.plan["hosts"][name]["builds"]]
        slow = [one for one in installed if one["prefix"] in built and numbers(one["version"])[:2] == SLOW_ROCM]
        others = [one["prefix"] for one in installed if numbers(one["version"])[:2] != SLOW_ROCM]
        if slow and others and not seen.cluster.hosts[name].toolchain:
            where = f"{name} (ROCm {slow[0]['version']})"
            cases.append((name, {"where": where, "architecture": architecture, "other": others[-1]}))
    return cases


def _rdma(seen: Seen) -> Cases:
    """Hosts whose programs are compiled with RDMA and that compute."""
    computing = {seen.plan["head"]["host"], *(device.host for device in seen.used)}
    cases = []
    for name, host in seen.plan["hosts"].items():
        compiled = any(backends.is_on(build["cmake_options"].get(RDMA, "OFF")) for build in host["builds"])
        if compiled and name in computing and any(device.endpoint for device in seen.used):
            closed = host["scope"] == "system" and service_managers.MANAGERS[host["service_manager"]].closes_ports_by
            reason = "The units there let no /dev/infiniband in, so that RPC stays on TCP" if closed else RDMA_UNTRIED
            cases.append((name, {"where": name, "option": RDMA, "reason": reason}))
    return cases


def _small_packets(seen: Seen) -> Cases:
    return [
        (name, {"where": f"llama_links[{index}] of {name} ({link['interface']})"})
        for name, host in seen.plan["hosts"].items()
        for index, link in enumerate(host["links"])
        if _by_thunderbolt(link) and link.get("manage") and (link.get("mtu") or DEFAULT_MTU) <= DEFAULT_MTU
    ]


def _untuned(seen: Seen) -> Cases:
    if seen.plan["fits"]:
        return []
    return [
        (
            name,
            {
                "where": f"{accelerator.name} of {name}",
                "mib": accelerator.memory_mib,
                "memory": host.facts.memory_mib,
            },
        )
        for name, host in seen.cluster.hosts.items()
        for accelerator in host.facts.accelerators
        if accelerator.backend == "hip"
        and accelerator.unified
        and accelerator.memory_mib < host.facts.memory_mib * 3 // 4
        and not (host.tuning.wanted and host.tuning.reboot)
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
            first = ".".join(map(str, STRIX_HALO_KERNEL))
            cases.append((name, {"where": f"{name} ({facts.kernel})", "first": first}))
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
    """``severity`` is error where running would give no answer, a wrong one, or an open door; everything else is a warning.

    ``{where}`` of a message lists the places, ``{hosts}`` the hosts, of all cases that differ in nothing else.
    """

    id: str
    severity: str
    condition: Callable[[Seen], Cases]
    message: str
    remedies: tuple[Remedy, ...]
    reference: str
    example: tuple[tuple[str, str], ...] = ()
    """Keys whose value is more than a name or a number, with an example value for docs/plan.md."""


ADVISORIES = (
    Advisory(
        "rpc-remote-code-execution",
        "error",
        _security_floor,
        "With {builds}, anyone who reaches a worker's port can run code on the worker's host, without authentication.",
        (
            Remedy("set {variables} to {release}", offers.safe_releases),
            offers.always(
                "let nobody but the head reach the workers, and accept this advisory",
                offers.accepts("rpc-remote-code-execution"),
            ),
        ),
        "CVE-2026-34159",
        (("builds", "build 6110 (llama_release)"), ("release", f"build {capabilities.SECURITY_FLOOR} or newer")),
    ),
    Advisory(
        "unprotected-worker",
        "error",
        _unprotected_workers,
        "RPC has no authentication, and nothing limits {where} to the head: {reason}.",
        (
            Remedy("enable {managers} on {hosts}", offers.firewalls),
            Remedy("set llama_host_scope of {hosts} to system, which needs root", offers.root),
            offers.always(
                "close the port with a firewall of your own, and accept this advisory",
                offers.accepts("unprotected-worker"),
            ),
        ),
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
        (
            ("where", "*endpoints* of *host*"),
            ("reason", "launchd does not filter addresses"),
            ("managers", "firewalld, ufw or nftables"),
        ),
    ),
    Advisory(
        "external-worker",
        "error",
        _external_workers,
        "RPC has no authentication, and others run {where}: nobody here can verify that only {head} reaches them.",
        (
            offers.always(
                "have a firewall on {hosts} let only {head} reach them, and accept this advisory",
                offers.accepts("external-worker"),
            ),
            offers.always(
                "reach the worker through a tunnel: it listens on 127.0.0.1 there, and the tunnel ends on 127.0.0.1 of {head}, which is its endpoint "
                "in llama_external_workers then"
            ),
        ),
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
        (("where", "*endpoints* of *host*"),),
    ),
    Advisory(
        "open-server",
        "error",
        _open_server,
        "The server listens on {address} and answers anyone who reaches it.",
        (
            offers.always("set llama_server_api_key_file", offers.server_becomes(api_key_file="/etc/llamacpp.keys")),
            offers.always(
                "set llama_server_host to 127.0.0.1 and use a proxy of your own",
                offers.server_becomes(host="127.0.0.1"),
            ),
        ),
        "https://github.com/ggml-org/llama.cpp/pull/25655",
    ),
    Advisory(
        "server-for-everybody",
        "error",
        _server_for_everybody,
        "The server listens on {address}, and llama_server_allowed does not say which networks may connect, so its port is closed to nobody.",
        (
            offers.always(
                "set llama_server_allowed to the networks of its clients, like 192.168.1.0/24",
                offers.server_becomes(allowed=("192.168.1.0/24",)),
            ),
            offers.always("set llama_server_host to 127.0.0.1", offers.server_becomes(host="127.0.0.1")),
        ),
        "docs/operating.md",
    ),
    Advisory(
        "unlimited-server",
        "error",
        _unlimited_server,
        "llama_server_allowed is {networks}, but nothing on {host} limits the server to that: {reason}.",
        (
            offers.always(
                "limit the port with a firewall of your own and accept this advisory",
                offers.accepts("unlimited-server"),
            ),
            offers.always(
                "set llama_server_host to 127.0.0.1 and use a proxy of your own",
                offers.server_becomes(host="127.0.0.1"),
            ),
        ),
        "docs/operating.md",
        (("reason", "launchd does not filter addresses"),),
    ),
    Advisory(
        "hip-mmap-hang",
        "error",
        _mmap_hangs,
        "HIP loads weights with mmap into memory that is shared with the processor: {where}. From about {limit} MiB on, loading hangs or aborts.",
        (
            offers.always("leave llama_server_load_mode out", offers.server_becomes(load_mode=None)),
            Remedy("set llama_server_load_mode to {mode}", offers.modes_without_mmap),
        ),
        THREAD.format(19745),
        (("where", "*mib* MiB on *device* of *host*"),),
    ),
    Advisory(
        "hip-mmap-slow",
        "warning",
        _mmap_is_slow,
        "HIP loads weights with mmap into more than half of the memory that is shared with the processor: {where}. This is very slow.",
        (
            offers.always("leave llama_server_load_mode out", offers.server_becomes(load_mode=None)),
            Remedy("set llama_server_load_mode to {mode}", offers.modes_without_mmap),
        ),
        "https://github.com/lhl/strix-halo-testing",
        (("where", "*mib* of *memory* MiB on *device* of *host*"),),
    ),
    Advisory(
        "vulkan-without-mmap",
        "warning",
        _vulkan_without_mmap,
        "llama_server_load_mode is {mode}. The head {host} uses Vulkan on shared memory, and needs more of it than with mmap.",
        (
            offers.always("leave llama_server_load_mode out", offers.server_becomes(load_mode=None)),
            offers.always("set llama_server_load_mode to mmap", offers.server_becomes(load_mode="mmap")),
        ),
        "https://github.com/lhl/strix-halo-testing",
    ),
    Advisory(
        VULKAN_MEMORY,
        "error",
        _vulkan_memory,
        "Mesa's Vulkan driver shows two thirds of the memory that a device shares with the processor: {where}. Larger shares were seen to fail "
        "with out of memory while loading.",
        (
            Remedy("set llama_server_backend to {backend}", offers.serve_by("hip")),
            Remedy("set llama_backend of {hosts} to {backend}", offers.build_for("hip")),
            Remedy(f"set {backends.UNIFIED_HEAP}: 'true' in {{places}}", offers.unified_heap),
        ),
        THREAD.format(28571),
        (
            ("where", "*device* of *host* gets 90112 MiB, and *limit* MiB are shown"),
            ("places", "environment in llama_worker_endpoints of *hosts*"),
        ),
    ),
    Advisory(
        "wide-tensor-send",
        "error",
        _wide_tensor,
        "The model has a tensor of {mib} MiB, which build {build} sends in one piece. macOS refuses 2 GiB and more, and the head aborts while loading.",
        (
            Remedy("set {variables} to {release}", offers.newer(CHUNKED_SENDS)),
            Remedy("add pull request 15188 to patches of {variables}", offers.patch_of(SENDING)),
        ),
        THREAD.format(15055),
        (("release", f"build {CHUNKED_SENDS} or newer"),),
    ),
    Advisory(
        "wide-model-abort",
        "error",
        _wide_model,
        "Build {build} is older than {first}. Such builds were seen to abort over RPC with models like {model} (Qwen3 with 235 billion parameters or more).",
        (
            Remedy("set {variables} to {release}", offers.newer(CHUNKED_SENDS)),
            Remedy("add pull request 15188 to patches of {variables}", offers.patch_of(SENDING)),
        ),
        THREAD.format(15055),
        (("release", f"build {CHUNKED_SENDS} or newer"),),
    ),
    Advisory(
        "three-endpoints-hang",
        "error",
        _three_endpoints,
        "The plan uses {count} workers with build {build}. Builds {first} to {last} were seen to hang with three or more.",
        (
            Remedy("set {variables} to {release}", offers.outside(*THREE_ENDPOINTS_HANG)),
            offers.always("set llama_placement to fewest", lambda _seen, _hosts: remedies.placing("fewest")),
        ),
        THREAD.format(28487),
        (("release", "a build before *first* or one from build 10820 on"),),
    ),
    Advisory(
        "hip-garbage",
        "error",
        _garbage,
        "Build {build} computes wrong results with HIP on {where}, without any error message.",
        (
            Remedy("set {variables} to {release}", offers.outside(*RDNA35_GARBAGE)),
            Remedy("set llama_server_backend to {backend}", offers.serve_by("vulkan")),
            Remedy("set llama_backend of {hosts} to {backend}", offers.build_for("vulkan")),
        ),
        THREAD.format(28211),
        (
            ("where", "*device* of *host* (*architecture*)"),
            ("release", f"a build before {RDNA35_GARBAGE[0]} or one from build {RDNA35_GARBAGE[1] + 1} on"),
        ),
    ),
    Advisory(
        "cache-kernels",
        "error",
        _cache_kernels,
        "llama_server_cache_type_k is {type_k} and llama_server_cache_type_v is {type_v}. The programs of {hosts} may not have kernels for these "
        "types, and then the worker aborts at the first token.",
        (
            offers.always(
                "set both to q8_0 or both to q4_0",
                offers.server_becomes(cache_type_k="q8_0", cache_type_v="q8_0"),
                offers.server_becomes(cache_type_k="q4_0", cache_type_v="q4_0"),
            ),
            Remedy(
                "set {variables} to a release that is compiled on the hosts (source: git, pypi or archive)",
                offers.compiled_source,
            ),
            Remedy("remove {option} from llama_build_cmake_options of {hosts}", offers.kernels),
        ),
        THREAD.format(27905),
    ),
    Advisory(
        "router-with-workers",
        "error",
        _router,
        "{variable} has {option}. Then the server starts one more server for each model, and the second one waits forever, because "
        "a worker serves one server at a time.",
        (
            Remedy(
                "remove {option} from {variable}, and give each model a cluster with workers of its own",
                offers.without_arguments(ROUTER_OPTIONS, ROUTER_VARIABLES),
            ),
        ),
        THREAD.format(28908),
        (("variable", "llama_server_extra_args"),),
    ),
    Advisory(
        "ollama-architecture",
        "error",
        _ollama,
        "llama_model_path is {path}, with the architecture {architecture}. Only Ollama uses this name, and llama-server refuses the file.",
        (offers.always("set llama_model_path to the GGUF file of this model from Hugging Face"),),
        "https://github.com/ollama/ollama",
    ),
    Advisory(
        "thunderbolt-mtu",
        "warning",
        _small_packets,
        "The run manages {where} with an MTU of 1500, which is slow on Thunderbolt.",
        (Remedy("set mtu of these links to {mtu}, on both ends", offers.packets),),
        "https://docs.kernel.org/admin-guide/thunderbolt.html",
        (("where", "llama_links[*index*] of *host* (*interface*)"),),
    ),
    Advisory(
        "thunderbolt-lanes",
        "warning",
        _narrow_thunderbolt,
        "A Thunderbolt connection between hosts uses {lanes} of 2 lanes, with {gbit} of 20 Gbit/s each: {where}.",
        (
            offers.always(
                "use cables and ports for 40 Gbit/s there, then check the devices in /sys/bus/thunderbolt/devices",
                offers.facts_become(thunderbolt=()),
            ),
        ),
        "https://docs.kernel.org/admin-guide/thunderbolt.html",
        (("where", "*device* of *host*"),),
    ),
    Advisory(
        "graphics-memory-limit",
        "warning",
        _untuned,
        "The model does not fit, and the kernel lends only {mib} of {memory} MiB to {where}.",
        (
            Remedy("set llama_host_tuning and llama_host_reboot of {hosts} to true", offers.tuned(True)),
            Remedy("boot {hosts} with the kernel parameters {parameters}", offers.tuned(False)),
        ),
        "docs/hardware.md",
        (("where", "*device* of *host*"),),
    ),
    Advisory(
        "strix-halo-kernel",
        "warning",
        _old_kernel,
        "gfx1151 graphics compute reliably from kernel {first} on, which is newer than that of {where}.",
        (
            offers.always(
                "install kernel {first} or newer on {hosts}",
                offers.facts_become(kernel=".".join(map(str, STRIX_HALO_KERNEL))),
            ),
        ),
        "https://github.com/kyuz0/amd-strix-halo-toolboxes",
        (("where", "*host* (*kernel*)"),),
    ),
    Advisory(
        "strix-halo-firmware",
        "warning",
        _faulty_firmware,
        "ROCm fails on gfx1151 graphics with linux-firmware {version}, which is on {hosts}.",
        (offers.always("install another version of linux-firmware on {hosts}", offers.facts_become(firmware="")),),
        "https://github.com/kyuz0/amd-strix-halo-toolboxes",
    ),
    Advisory(
        "backend-unmaintained",
        "warning",
        _unmaintained_backends,
        "{fork} is built for {unmaintained} on {hosts}, which its maintainers do not support.",
        (
            Remedy("set llama_backend of {hosts} to {backend}", offers.maintained),
            Remedy("set {variables} to a release of llama.cpp", offers.of_llama_cpp),
        ),
        "https://github.com/ikawrakow/ik_llama.cpp#readme",
    ),
    Advisory(
        "accelerator-unused",
        "warning",
        _unused_accelerators,
        "No build of llama.cpp uses these accelerators, since their hosts have no toolchain for them: {where}.",
        (
            Remedy("set llama_backend of {hosts} to {backend}", offers.further_backends),
            Remedy("install {toolkit} on {hosts}", offers.toolkits),
            Remedy("set llama_backend of {hosts} to {built} to accept this", offers.built_backends),
        ),
        "docs/variables.md",
        (("where", "*devices* on *host*"),),
    ),
    Advisory(
        "options-elsewhere",
        "warning",
        _option_files,
        "llama-server of {host} reads {files} before its command line. Every option there that the plan does not set takes effect, and nothing is "
        "planned for it.",
        (
            offers.always(
                "give these options in llama_server_extra_args, and remove them from {files}",
                offers.facts_become(option_files=()),
            ),
        ),
        "docs/architecture.md",
        (("files", "/etc/llama.cpp/config.ini"),),
    ),
    Advisory(
        "slower-than-one-host",
        "warning",
        _slower_than_one_host,
        "The cluster is predicted to generate {together} tokens per second, and {host} alone {alone}.",
        (offers.always("{steps}"),),
        "docs/plan.md",
        (("steps", "leave llama_workers empty"),),
    ),
    Advisory(
        "compute-over-capacity",
        "warning",
        _compute_over_capacity,
        "Weights, KV cache and compute buffers may be more than devices hold: {devices}. Compute buffers are planned with an upper bound, {compute} "
        "MiB; if they come near it, llama-server runs out of memory when it starts.",
        (Remedy("{smaller}", offers.smaller_buffers),),
        "docs/plan.md",
        (
            ("devices", "CUDA0 of gpu1 (≤ 31020 of 23336 MiB)"),
            ("smaller", "set llama_server_flash_attention to 'on'"),
        ),
    ),
    Advisory(
        "context-cut",
        "warning",
        _cut_context,
        "llama_server_context is {wanted}, but {model} was trained for {context} tokens: llama-server gets {context}.",
        (Remedy("set llama_server_context to {context} or less", offers.shorter_context),),
        "docs/plan.md",
    ),
    Advisory(
        "context-shared",
        "warning",
        _shared_context,
        "llama_server_parallel is {parallel}, so each request gets {each} of the {context} tokens of llama_server_context. {more}",
        (
            offers.always("set llama_server_parallel to 1", offers.server_becomes(parallel=1)),
            Remedy("add --kv-unified to llama_server_extra_args, so that requests share the tokens", offers.one_cache),
            offers.always("accept this advisory if {each} tokens are enough", offers.accepts("context-shared")),
        ),
        "docs/plan.md",
        (("more", "With *whole* each gets *context*."),),
    ),
    Advisory(
        "variable-unknown",
        "warning",
        _unknown_variables,
        "{variable} is set for {where}, but the collection has no such variable, so it does nothing. Similar name: {meant}.",
        (
            Remedy("rename {variable} to {meant}; a variable of your own may stay", offers.known_variables(True)),
            Remedy(
                "use a name from docs/variables.md; a variable of your own may stay",
                offers.known_variables(False),
            ),
        ),
        "docs/variables.md",
        (("where", "*hosts*"),),
    ),
    Advisory(
        "cmake-option-unknown",
        "warning",
        _unknown_options,
        "{option} is set for {hosts}, but has no effect: build {build} does not know it, only builds {known} do.",
        (
            Remedy("remove {option} from llama_build_cmake_options of {hosts}", offers.without_option),
            Remedy("set {variables} to one of these builds", offers.releases_with_option),
        ),
        "docs/variables.md",
    ),
    Advisory(
        "gb10-mmap-slow",
        "warning",
        _mmap_crawls,
        "llama_server_load_mode is {mode}, and {where} is an NVIDIA GB10. A DGX Spark took 224 s to load a model with mmap, and 22 s without.",
        (
            offers.always("leave llama_server_load_mode out", offers.server_becomes(load_mode=None)),
            offers.always("set llama_server_load_mode to none", offers.server_becomes(load_mode="none")),
        ),
        THREAD.format(27742),
        (("where", "*device* of *host*"),),
    ),
    Advisory(
        "vulkan-large-share",
        "warning",
        _large_vulkan_shares,
        "Vulkan gets large shares over RPC: {where}. A model with {crashed} MiB and more on each device crashed so with out of memory while it was loaded, "
        "and ran by HIP.",
        (
            Remedy(
                "set memory_mib of the endpoints of {hosts} in {variable} to {mib} or less",
                offers.smaller_shares,
            ),
        ),
        "https://github.com/geerlingguy/beowulf-ai-cluster/issues/2",
        (("where", "*mib* MiB on *device* of *host*"), ("variable", "llama_worker_endpoints")),
    ),
    Advisory(
        "rocm-slow-prompts",
        "warning",
        _slow_prompts,
        "llama.cpp is compiled for {architecture} with the newest ROCm that is installed on {where}. Two Strix Halo read prompts of a model in Q8_0 "
        "at 49 tokens per second with ROCm 7.2, and at 75 with 6.4.2; generation was the same, and so were prompts of a model in Q4_K.",
        (Remedy("compare it with llama_build_toolchain of {hosts} set to {other}", offers.other_toolkit),),
        "https://github.com/ggml-org/llama.cpp/issues/17917",
        (("where", "*host* (ROCm *version*)"),),
    ),
    Advisory(
        "rdma-not-planned",
        "warning",
        _rdma,
        "llama.cpp is compiled with {option} on {where}. {reason}.",
        (Remedy("remove {option} from llama_build_cmake_options of {hosts}", offers.without_option),),
        "https://github.com/ggml-org/llama.cpp/pull/20590",
        (("where", "*host*"), ("reason", "The units there let no /dev/infiniband in, so that RPC stays on TCP")),
    ),
)


class Met(NamedTuple):
    """An advisory of a plan: all its cases that differ in nothing but the place."""

    advisory: Advisory
    subject: remedies.Subject
    values: Mapping[str, Any]

    def as_json(self, clauses: Sequence[str]) -> dict[str, Any]:
        """As docs/plan.md describes it, without ``accepted``."""
        hosts = list(self.subject.hosts)
        return {
            "id": self.advisory.id,
            "severity": self.advisory.severity,
            "host": hosts[0] if len(hosts) == 1 else None,
            "hosts": hosts,
            "message": self.advisory.message.format(**self.values),
            "remedy": remedies.sentence(clauses),
            "reference": self.advisory.reference,
        }


def meet(seen: Seen) -> list[Met]:
    """The advisories of a plan, one for all hosts that share it."""
    met = []
    for advisory in ADVISORIES:
        alike: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
        for host, values in advisory.condition(seen):
            shared = {key: value for key, value in values.items() if key != "where"}
            alike.setdefault(repr({**shared, "host": host} if "{host}" in advisory.message else shared), []).append(
                (host, values)
            )
        for cases in alike.values():
            hosts = tuple(dict.fromkeys(host for host, _values in cases if host is not None))
            where = ", ".join(dict.fromkeys(values.get("where", host) or "" for host, values in cases))
            shown = {"host": cases[0][0], "hosts": remedies.listed(hosts)}
            met.append(Met(advisory, remedies.Subject(advisory.id, hosts), {**shown, **cases[0][1], "where": where}))
    return met


def untried(met: Sequence[Met]) -> list[dict[str, Any]]:
    """Advisories without their remedies."""
    return [one.as_json(["-"]) for one in met]


def with_remedies(seen: Seen, met: Sequence[Met], trial: remedies.Trial) -> list[dict[str, Any]]:
    return [one.as_json(remedies.chosen(one.advisory.remedies, seen, one.subject, one.values, trial)) for one in met]
