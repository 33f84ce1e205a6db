# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When the advisories of a plan are met: a function for each."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.versions import numbers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    fast_load,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import neighbours, server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases, requirements
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request, same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, devices

SLOW_LOAD_S = 60
"""Predicted seconds of a load from which on it is said what would shorten it; assumed."""
RPC_LIMITS = "RPC on "
"""What limits such a load, as the estimate names it."""
FASTER_PIPELINED = 1.25
"""So many times as fast have prompts to be predicted with the pipeline before it is said."""
STRIX_HALO = "gfx1151"
STRIX_HALO_KERNEL = (6, 18, 4)
FAULTY_FIRMWARE = "20251125"
DEFAULT_MTU = 1500
LARGEST_MTU = 65522
"""Of a Thunderbolt link between hosts (docs.kernel.org/admin-guide/thunderbolt.html)."""
THUNDERBOLT_LANES, THUNDERBOLT_GBIT = 2, 20
"""Lanes, and Gbit/s of each, of a connection between hosts with USB4 or Thunderbolt 3 and newer."""
VULKAN_MEMORY = "vulkan-shared-memory"
"""Where it is accepted, devices lend more than their driver shows as their own."""
VULKAN_SHARE_MIB = 87857
"""Smallest share of DeepSeek R1 Q4_K_M on four Strix Halo, which crashed by Vulkan over RPC and ran by HIP, in the field notes. 64446 ran."""
SLOW_ROCM = (7, 2)
"""ROCm whose prompts were seen to be slow on a Strix Halo, in the field notes of a pair; 7.0 nightlies read 72 tokens per second."""
SHARED_LINKS = ("ethernet", "infiniband", "wireless")
"""Kinds of links that have more than two ends, unless llama_links says otherwise."""
RDMA_UNTRIED = (
    "Whether RPC moves to RDMA depends on the devices there, the plan counts with TCP, and firewalls do not see RDMA"
)
ARCHITECTURES_FILE = "src/llama-arch.cpp"
"""The file of llama.cpp that names them: a patch may add one."""
OLLAMA_ARCHITECTURES = ("deepseekocr", "glm4moelite", "glmocr", "gptoss", "mllama", "nemotron_h_omni", "qwen25vl")
"""Architectures in files of Ollama that upstream names otherwise or does not have."""
DEFAULT_CONTEXT = 8192
"""Of llama_server_context: who leaves it out asks for no more than the model has."""


def remote_code(context: AdvisoryContext) -> Cases:
    """One case for each commit of a fork."""
    known, cases = capabilities.OLDEST[capabilities.IK_LLAMA], []
    for identifier, release in context.plan.releases.items():
        if release.fork:
            number = release.generation
            checked = f", which is newer than {known}, the last one that was checked" if number > known else ""
            values = {
                "builds": f"commit {number} of {release.fork}{checked}",
                "variables": context.variables_of(identifier),
            }
            cases.append((None, values))
    return cases


def unmaintained_backends(context: AdvisoryContext) -> Cases:
    known, used = context.plan.releases, {(device.host, device.backend) for device in context.used}
    return [
        (name, {"fork": known[build.release].fork, "unmaintained": build.backend})
        for name, host in context.plan.hosts.items()
        for build in host.builds
        if (name, build.backend) in used
        and known[build.release].fork
        and build.backend not in backends.IK_LLAMA_MAINTAINED
    ]


def unprotected_workers(context: AdvisoryContext) -> Cases:
    cases = []
    for name, host in context.plan.hosts.items():
        exposed = [worker.listens for worker in host.workers if not names.is_loopback(worker.listens)]
        if exposed and not host.unit_closes and not host.firewall_manager:
            reason = f"{_why_no_unit_closes(context, name)}, and the run sets up no firewall there"
            cases.append((name, {"where": f"{remedies.listed(exposed)} of {name}", "reason": reason}))
    return cases


def rpc_in_clear(context: AdvisoryContext) -> Cases:
    """Hosts whose workers the head reaches, without encryption, over a network that others may be on: no cable, as its kind or llama_links say."""
    cases: dict[str, dict[str, object]] = {}
    for link in context.plan.estimate.links:
        host = context.cluster.hosts.get(link.host)
        if not host or host.is_head or host.transport == names.STUNNEL or link.kind not in SHARED_LINKS:
            continue
        address = link.endpoint.split(":")[0]
        if not any(own.address.split("/")[0] == address and (own.peer or own.manage) for own in host.links):
            limit = f", of whose {link.gbit_per_s:g} Gbit/s stunnel would carry {cost_model.STUNNEL_GBIT:g}"
            slowed = limit if cost_model.stunnel_limits(link.gbit_per_s) else ""
            where = f"{host.name} over {link.kind}{slowed}"
            cases[host.name] = {"where": where, "head": context.cluster.head}
    return list(cases.items())


def external_workers(context: AdvisoryContext) -> Cases:
    """Those that the head reaches over a network. At the end of a tunnel nobody else is."""
    ports: dict[str, list[str]] = {}
    for worker in context.plan.external_workers:
        if not names.is_loopback(worker.endpoint):
            ports.setdefault(worker.host, []).append(worker.endpoint)
    return [
        (name, {"where": f"{remedies.listed(endpoints)} of {name}", "head": context.cluster.head})
        for name, endpoints in ports.items()
    ]


def _why_no_unit_closes(context: AdvisoryContext, name: str) -> str:
    facts = context.cluster.hosts[name].facts
    if not service_managers.MANAGERS[facts.service_manager].closes_ports_by:
        return f"{facts.service_manager} does not filter addresses"
    if facts.units_filter is None:
        return (
            "it is not known whether systemd there filters addresses, since systemd-run could not be run as root (then run with become), or since "
            "the host is down and its facts are those of an older version of the collection (then start it, or leave it out of the inventory)"
        )
    return "systemd there does not filter addresses, since the kernel or the container lacks BPF for control groups"


def open_server(context: AdvisoryContext) -> Cases:
    head = context.plan.head
    if names.is_loopback(head.address) or "--api-key-file" in head.argv:
        return []
    return [(head.host, {"address": f"{head.address}:{head.port}"})]


def server_for_everybody(context: AdvisoryContext) -> Cases:
    head = context.plan.head
    if names.is_loopback(head.address) or head.allowed:
        return []
    return [(head.host, {"address": f"{head.address}:{head.port}"})]


def unlimited_server(context: AdvisoryContext) -> Cases:
    head = context.plan.head
    host = context.plan.hosts[head.host]
    closes = host.unit_closes or host.firewall_manager or names.EVERYBODY in head.allowed
    if not head.allowed or names.is_loopback(head.address) or closes:
        return []
    name, reason = head.host, _why_no_unit_closes(context, head.host)
    if host.host_settings:
        reason += ", and neither firewalld nor ufw nor nftables is active there"
    return [(name, {"networks": ", ".join(head.allowed), "reason": reason})]


def unused_accelerators(context: AdvisoryContext) -> Cases:
    """Hosts with the same builds, and devices for the same backends, share their remedies. No toolchain helps where archives have the programs."""
    cases: Cases = []
    sources = releases.sources_of(context.cluster.releases)
    for name, host in context.plan.hosts.items():
        unused = [
            accelerator
            for accelerator in context.cluster.hosts[name].facts.accelerators
            if accelerator.name in host.unused_accelerators and sources[accelerator.backend] != "prebuilt"
        ]
        if unused:
            kinds = sorted({accelerator.backend for accelerator in unused})
            values = {"kinds": kinds, "built": remedies.as_list(context.backends_of(name))}
            names = ", ".join(sorted({accelerator.name for accelerator in unused}))
            cases.append((name, {"where": f"{names} on {name}", **values}))
    return cases


def backends_without_archive(context: AdvisoryContext) -> Cases:
    cases: Cases = []
    sources = releases.sources_of(context.cluster.releases)
    for name in context.plan.hosts:
        for backend, sentence in requirements.without_archive(context.cluster.hosts[name], sources).items():
            why, steps = re.split(r"(?<!source): ", sentence, maxsplit=1)
            built = remedies.as_list(context.backends_of(name))
            cases.append((name, {"why": why, "steps": steps, "backend": backend, "built": built}))
    return cases


def unpipelined_prompts(context: AdvisoryContext) -> Cases:
    """Prompts that would be read faster if devices computed at the same time."""
    prompt = context.plan.estimate.prompt
    if not prompt or not prompt.obstacles or context.plan.model.known_answer:
        return []
    if prompt.pipelined_tokens_per_s < FASTER_PIPELINED * prompt.tokens_per_s:
        return []
    values = {"tokens": prompt.tokens, "now": f"{prompt.tokens_per_s:g}", "then": f"{prompt.pipelined_tokens_per_s:g}"}
    return [(None, {**values, "steps": ", and ".join(prompt.obstacles)})]


def slower_than_one_host(context: AdvisoryContext) -> Cases:
    """The known-answer model is there to try workers, however fast."""
    estimate, server = context.plan.estimate, context.server
    together, best = estimate.generation_range, estimate.best_single_host
    if context.plan.model.known_answer or not estimate.links or not best.faster:
        return []
    host, head = best.host, context.cluster.head
    steps = [f"put {host} into llama_head in place of {head}, with the model's files"] if host != head else []
    if best.lends:
        steps.append(f"have {host} alone in llama_workers")
    elif any(own.is_worker for own in context.cluster.hosts.values()):
        steps.append("leave llama_workers empty")
    of_head = () if host == head else ("memory_mib", "reserve_mib")
    given = [f"llama_server_{key}" for key in ("tensor_split", "override_tensor", *of_head) if getattr(server, key)]
    if best.gpu_layers is not None:
        steps.append(f"set llama_server_gpu_layers to {best.gpu_layers}")
    elif server.gpu_layers is not None:
        given.append("llama_server_gpu_layers")
    given += ["llama_external_workers"] if context.cluster.external else []
    steps += [f"remove {name}" for name in given]
    return [(host, {"together": str(together), "alone": str(best.generation_range), "steps": ", ".join(steps)})]


def lends_to_itself(context: AdvisoryContext) -> Cases:
    """A head that reaches its own accelerators through workers alone, where llama-server would drive them. With the known-answer model that is a trial."""
    head = context.plan.head.host
    host = context.cluster.hosts[head]
    own = [device for device in context.used if device.host == head and device.backend != backends.CPU.name]
    direct = any(not device.endpoint for device in own)
    if context.plan.model.known_answer or not own or direct or host.endpoints or not host.is_worker:
        return []
    return [(head, {"where": f"{', '.join(device.name for device in own)} of {head}"})]


def slow_load(context: AdvisoryContext) -> Cases:
    """What llama.cpp itself does to what it sends takes longest, and the collection has a patch for that."""
    estimate, release = context.plan.estimate, context.release
    patch = fast_load.known(release.protocol, release.mainline)
    slow = estimate.load_s and estimate.load_s >= SLOW_LOAD_S
    if not slow or not str(estimate.load_limited_by).startswith(RPC_LIMITS) or not patch or release.loads_fast:
        return []
    return (
        [(None, {"seconds": f"{estimate.load_s:g}", "release": release.ref})]
        if release.source in release_request.COMPILED
        else []
    )


def short_idleness(context: AdvisoryContext) -> Cases:
    """A model that is kept for less time than it takes to load."""
    idle, load = context.server.idle_seconds, context.plan.estimate.load_s
    return [(None, {"idle": idle, "seconds": math.ceil(load)})] if idle and load and idle < load else []


def unknown_variables(context: AdvisoryContext) -> Cases:
    pairs = {pair for host in context.cluster.hosts.values() for pair in host.unknown_variables.items()}
    return [
        (name, {"variable": variable, "meant": meant or "none"})
        for variable, meant in sorted(pairs)
        for name, host in context.cluster.hosts.items()
        if host.unknown_variables.get(variable) == meant
    ]


def unsized_devices(context: AdvisoryContext) -> Cases:
    """Accelerators of the head that its llama-server would drive, if their memory were known."""
    head = context.plan.head.host
    facts, planned = context.cluster.places[head].facts, context.plan.hosts[head]
    same = same_device.canonical_device_names(facts)
    taken = {same[worker.device] for worker in planned.workers if worker.device in same}
    serving = [build.backend for build in planned.builds if "llama-server" in build.targets]
    return [
        (head, {"where": f"{accelerator.name} ({name}) of {head}"})
        for name, accelerator in same_device.named_accelerators(facts)
        if not accelerator.memory_mib and accelerator.backend in serving and same[name] not in taken
    ]


def _with_mapped_pages(context: AdvisoryContext) -> list[devices.Holder]:
    """The devices of the head, if llama-server maps the model's file for devices that share memory with the processor. The default of
    ik_llama.cpp does so. Workers on other hosts get their tensors by RPC and map nothing."""
    mode = context.plan.head.load_mode
    chosen = mode in (None, "auto") and not context.release.mainline
    maps = chosen or mode in ("mmap", "mmap+mlock")
    return [device for device in context.used if maps and device.host == context.plan.head.host]


def mmap_crawls(context: AdvisoryContext) -> Cases:
    return [
        (device.host, {"where": f"{device.name} of {device.host}", "mode": context.plan.head.load_mode})
        for device in _with_mapped_pages(context)
        if device.is_gb10
    ]


def mmap_hangs(context: AdvisoryContext) -> Cases:
    return [
        (
            device.host,
            {
                "where": f"{round(device.weights_mib)} MiB on {device.name} of {device.host}",
                "limit": devices.MMAP_LIMIT_MIB,
            },
        )
        for device in _with_mapped_pages(context)
        if device.hangs_on_mmap
    ]


def mmap_is_slow(context: AdvisoryContext) -> Cases:
    return [
        (
            device.host,
            {
                "where": f"{round(device.weights_mib)} of {device.host_memory_mib} MiB on {device.name} of {device.host}",
            },
        )
        for device in _with_mapped_pages(context)
        if device.slow_on_mmap and not device.hangs_on_mmap
    ]


def vulkan_without_mmap(context: AdvisoryContext) -> Cases:
    """Not where HIP would hang or crawl with mmap."""
    head, mode = context.plan.head.host, context.plan.head.load_mode
    of_head = [device for device in context.used if device.host == head]
    own = any(device.needs_less_with_mmap for device in of_head)
    needed = any(device.hangs_on_mmap or device.slow_on_mmap for device in of_head)
    return [(head, {"mode": mode})] if own and not needed and mode in ("none", "dio", "mlock") else []


def vulkan_memory(context: AdvisoryContext) -> Cases:
    """A share beyond what the driver shows as the device's own, or a model that does not fit within that."""
    if context.plan.fits:
        return [
            (
                device.host,
                {"where": f"{device.name} of {device.host} gets {share} MiB, and {device.visible_mib} MiB are shown"},
            )
            for device in context.used
            for share in [round(device.held_mib)]
            if share > device.visible_mib
        ]
    cases: Cases = []
    for device in context.used:
        accelerator = devices.accelerator_of(context.cluster.places[device.host].facts, device.name)
        if accelerator and device.visible_mib < accelerator.memory_mib:
            where = f"{device.name} of {device.host} has {accelerator.memory_mib} MiB, and {device.visible_mib} MiB are shown"
            cases.append((device.host, {"where": where}))
    return cases


def cache_kernels(context: AdvisoryContext) -> Cases:
    kinds = context.server.cache_type_k, context.server.cache_type_v
    if not context.release.mainline or not backends.needs_all_quants(*kinds):
        return []
    cases = []
    for name in dict.fromkeys(device.host for device in context.used if backends.RECORDS[device.backend].all_quants):
        options = [
            build.cmake_options.get(option, "OFF")
            for build in (context.plan.hosts[name].builds if name in context.plan.hosts else ())
            for option in [backends.RECORDS[build.backend].all_quants]
            if option
        ]
        if not options or not all(backends.is_on(value) for value in options):
            cases.append((name, {"type_k": kinds[0], "type_v": kinds[1]}))
    return cases


def ollama(context: AdvisoryContext) -> Cases:
    architecture = context.summary.architecture
    source = context.cluster.model.source
    if architecture not in OLLAMA_ARCHITECTURES or source is None:
        return []
    values = {"source": context.plan.model.source, "variable": source.variable, "architecture": architecture}
    return [(context.plan.head.host, values)]


def unknown_architecture(context: AdvisoryContext) -> Cases:
    """A file that llama-server refuses when it starts."""
    name, release = context.summary.architecture, context.release
    patched = any(ARCHITECTURES_FILE in patch.files for patch in release.patches)
    lacks = release.mainline and capabilities.lacks_architecture(context.generation, name)
    if not lacks or patched or name in OLLAMA_ARCHITECTURES:
        return []
    return [(context.plan.head.host, {"build": context.generation, "architecture": name})]


def _by_thunderbolt(link: LinkPlan) -> bool:
    return link.kind in ("thunderbolt", "usb4") or str(link.interface or "").startswith("thunderbolt")


def narrow_thunderbolt(context: AdvisoryContext) -> Cases:
    return [
        (
            name,
            {
                "where": f"{connection.device} of {name}",
                "lanes": connection.lanes,
                "gbit": f"{connection.gbit_per_lane:g}",
            },
        )
        for name, host in context.plan.hosts.items()
        if any(map(_by_thunderbolt, host.links))
        for connection in context.cluster.hosts[name].facts.thunderbolt
        if connection.lanes < THUNDERBOLT_LANES or connection.gbit_per_lane < THUNDERBOLT_GBIT
    ]


def large_vulkan_shares(context: AdvisoryContext) -> Cases:
    """Shares within what the driver shows: others are the case of VULKAN_MEMORY. Of a model that does not fit there are none yet."""
    return [
        (
            device.host,
            {
                "where": f"{round(device.held_mib)} MiB on {device.name} of {device.host}",
                "crashed": VULKAN_SHARE_MIB,
                "mib": VULKAN_SHARE_MIB - 1,
                "variable": "llama_worker_endpoints"
                if device.host in context.cluster.hosts
                else "llama_external_workers",
            },
        )
        for device in context.used
        if context.plan.fits
        and device.endpoint
        and device.backend == "vulkan"
        and VULKAN_SHARE_MIB <= device.held_mib <= device.visible_mib
    ]


def slow_prompts(context: AdvisoryContext) -> Cases:
    """Hosts whose newest ROCm is the slow one, where another one is installed."""
    own = [device for device in context.used if device.host in context.cluster.hosts]
    architectures = {device.host: device.architecture for device in own if device.architecture == STRIX_HALO}
    cases = []
    for name, architecture in architectures.items():
        installed = [one for one in context.cluster.hosts[name].facts.toolchains or () if one["backend"] == "hip"]
        built = [build.environment.get("HIP_PATH") for build in context.plan.hosts[name].builds]
        slow = [one for one in installed if one["prefix"] in built and numbers(one["version"])[:2] == SLOW_ROCM]
        others = [one["prefix"] for one in installed if numbers(one["version"])[:2] != SLOW_ROCM]
        if slow and others and not context.cluster.hosts[name].toolchain:
            where = f"{name} (ROCm {slow[0]['version']})"
            cases.append((name, {"where": where, "architecture": architecture, "other": others[-1]}))
    return cases


def rdma(context: AdvisoryContext) -> Cases:
    """Hosts whose programs are compiled with RDMA, that compute and for which nobody asks for it."""
    computing = {context.plan.head.host, *(device.host for device in context.used)}
    cases = []
    for name, host in context.plan.hosts.items():
        compiled = any(backends.is_on(build.cmake_options.get(backends.RDMA, "OFF")) for build in host.builds)
        if (
            compiled
            and not context.cluster.hosts[name].rdma
            and name in computing
            and any(device.endpoint for device in context.used)
        ):
            closed = host.scope == "system" and service_managers.MANAGERS[host.service_manager].closes_ports_by
            reason = "The units there let no /dev/infiniband in, so that RPC stays on TCP" if closed else RDMA_UNTRIED
            cases.append((name, {"where": name, "option": backends.RDMA, "reason": reason}))
    return cases


def default_mtu_on_thunderbolt(context: AdvisoryContext) -> Cases:
    return [
        (name, {"where": f"llama_links[{index}] of {name} ({link.interface})", "mtu": LARGEST_MTU})
        for name, host in context.plan.hosts.items()
        for index, link in enumerate(host.links)
        if _by_thunderbolt(link) and link.manage and (link.mtu or DEFAULT_MTU) <= DEFAULT_MTU
    ]


def strange_peers(context: AdvisoryContext) -> Cases:
    """Links to a host that this cluster does not have, or to the host itself."""
    known = {*context.cluster.hosts, *(worker.host for worker in context.cluster.external)}
    return [
        (name, {"where": f"llama_links[{index}].peer of {name} ({validation.show(link.peer)})"})
        for name, host in context.cluster.hosts.items()
        for index, link in enumerate(host.links)
        if link.peer and link.peer not in known - {name}
    ]


def _is_outside(address: str, own: str, links: Iterable[LinkPlan]) -> bool:
    """Whether no network that ``llama_links`` gives for one's own address has this one; an address without a prefix length says no network."""
    networks = [ipaddress.IPv4Interface(link.address).network for link in links if link.address.split("/")[0] == own]
    known = [network for network in networks if network.prefixlen < network.max_prefixlen]
    return bool(known) and not any(ipaddress.IPv4Address(address) in network for network in known)


def links_in_different_networks(context: AdvisoryContext) -> Cases:
    """Workers and the head with addresses of different networks, as they are planned to connect."""
    head = context.cluster.hosts[context.cluster.head]
    cases = []
    for name, host in context.cluster.hosts.items():
        rules = [] if host.is_head else context.plan.hosts[name].firewall
        for address, source in dict.fromkeys((rule.address, rule.sources[0]) for rule in rules):
            if _is_outside(source, address, host.links) or _is_outside(address, source, head.links):
                cases.append((name, {"where": f"{address} of {name} and {source} of {head.name}", "head": head.name}))
    return cases


def untuned(context: AdvisoryContext) -> Cases:
    if context.plan.fits:
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
        for name, host in context.cluster.hosts.items()
        for accelerator in host.facts.accelerators
        if accelerator.backend == "hip"
        and accelerator.unified
        and accelerator.memory_mib < host.facts.memory_mib * 3 // 4
        and not (host.tuning.wanted and host.tuning.reboot)
    ]


def _strix_halos(context: AdvisoryContext) -> list[tuple[str, Facts]]:
    """Name and facts of hosts with graphics of this kind that get layers."""
    names = dict.fromkeys(device.host for device in context.used if device.architecture == STRIX_HALO)
    return [(name, context.cluster.hosts[name].facts) for name in names if name in context.cluster.hosts]


def old_kernel(context: AdvisoryContext) -> Cases:
    cases = []
    for name, facts in _strix_halos(context):
        version = tuple(map(int, re.findall(r"\d+", facts.kernel)[:3]))
        if version and version < STRIX_HALO_KERNEL:
            first = ".".join(map(str, STRIX_HALO_KERNEL))
            cases.append((name, {"where": f"{name} ({facts.kernel})", "first": first}))
    return cases


def faulty_firmware(context: AdvisoryContext) -> Cases:
    return [
        (name, {"version": facts.firmware})
        for name, facts in _strix_halos(context)
        if FAULTY_FIRMWARE in facts.firmware
    ]


def memory_of_neighbours(context: AdvisoryContext) -> Cases:
    """Each memory of a host once, whichever devices use it: a device has several names where several backends drive it, and graphics may share
    the memory of the processor."""
    cases: Cases = []
    for name in context.plan.hosts:
        host = context.cluster.hosts[name]
        own = neighbours.memory_of(context.plan, name)
        for neighbour in host.facts.neighbours:
            for devices_of, capacity in neighbours.memories(host.facts, own, neighbour.memory_mib):
                total = sum(own[device][0] for device in devices_of if device in own)
                theirs = sum(neighbour.memory_mib.get(device, 0) for device in devices_of)
                if theirs and total and total + theirs > capacity:
                    ours = " and ".join(device for device in devices_of if own.get(device, (0, 0))[0])
                    place = (
                        f"{round(total)} MiB on {ours} of {name} beside {theirs} MiB of the cluster {neighbour.cluster}"
                    )
                    cases.append((name, {"where": f"{place}, where {round(capacity)} MiB can be used"}))
    return cases


def option_files(context: AdvisoryContext) -> Cases:
    """Only llama-server reads them."""
    head = context.cluster.head
    files = context.cluster.hosts[head].facts.option_files
    reads = context.release.mainline
    return [(head, {"files": " and ".join(files)})] if files and reads else []


def without_fallback(context: AdvisoryContext) -> Cases:
    """The workers that cannot be spared, where the operator wants that."""
    if not context.server.fallback:
        return []
    lost = [f"{entry.without} ({entry.reason})" for entry in context.plan.no_fallback]
    return [(None, {"where": place}) for place in lost]


def over_capacity(context: AdvisoryContext) -> Cases:
    """Devices whose weights, cache and bound of the compute buffer are more together than they hold."""
    over = [entry for entry in context.plan.placement if entry.total_mib > entry.capacity_mib]
    if not over or not context.plan.fits:
        return []
    hosts = {entry.host for entry in over}
    values = {
        "devices": ", ".join(
            f"{entry.device} of {entry.host} (≤ {entry.total_mib:.0f} of {entry.capacity_mib:.0f} MiB)"
            for entry in over
        ),
        "compute": round(max(entry.compute_mib for entry in over)),
    }
    return [(hosts.pop() if len(hosts) == 1 else None, values)]


def uncounted(context: AdvisoryContext) -> Cases:
    """Models beside the one that is served of which nobody knows where they will be, or how large they are."""
    return [
        (context.plan.head.host, {"variable": f"llama_model_{one.role}", "why": one.reason})
        for one in context.plan.further_uncounted
    ]


def slow_speculation(context: AdvisoryContext) -> Cases:
    """Predicted tokens that cost more than they save."""
    found, without = context.plan.estimate.speculation, context.plan.estimate.generation_tokens_per_s
    if not found or not without or found.generation_tokens_per_s >= without:
        return []
    values = {**found._asdict(), "with_it": found.generation_tokens_per_s, "without": without}
    return [(None, {**values, "source": "stated" if found.stated else "assumed"})]


def cut_context(context: AdvisoryContext) -> Cases:
    """A context that was asked for and is longer than the one for which the model was trained."""
    head, server = context.plan.head, context.server
    if server.context <= head.context or server.context == DEFAULT_CONTEXT:
        return []
    values = {"wanted": server.context, "context": head.context, "model": context.summary.name}
    return [(head.host, {**values, "key": server_settings.context_key(context.summary)})]


def shared_context(context: AdvisoryContext) -> Cases:
    """A context that requests at the same time divide among them. A longer one than the model's is cut, so it gives them no more."""
    head, server, summary = context.plan.head, context.server, context.summary
    if head.context_per_request == head.context:
        return []
    longest = server_settings.context_of(server._replace(context=head.context * server.parallel), summary)
    longer = server._replace(context=longest)
    values = {
        "parallel": server.parallel,
        "context": head.context,
        "each": head.context_per_request,
        "more": f"With {longest} each gets {server_settings.context_per_request(longer, summary)}."
        if longest > head.context
        else f"{summary.name} was trained for no more.",
    }
    return [(head.host, values)]
