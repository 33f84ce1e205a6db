# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Known problems of a plan. An error whose id the operator has not accepted stops the run.

ADVISORIES is the table; predicates.py says when each entry is met. Problems that planning avoids by itself have no entry: docs/plan.md lists
every known symptom and its remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import AdvisoryPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import (
    fixes,
    predicates,
    remedies,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import (
    Advisory,
    AdvisoryContext,
    Cases,
    Finding,
    Remedy,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import speculation

THREAD = "ggml-org/llama.cpp#{}"


def _unknown_ids(context: AdvisoryContext) -> Cases:
    """What llama_accept_advisories has that is no advisory's id."""
    ids = [advisory.id for advisory in ADVISORIES]
    unknown = sorted(context.cluster.accepted.difference(ids))
    return [
        (None, {"identifier": name, "meant": next(iter(difflib.get_close_matches(name, ids, 1)), "none")})
        for name in unknown
    ]


ADVISORIES = (
    Advisory(
        "rpc-remote-code-execution",
        "error",
        predicates.remote_code,
        "With {builds}, anyone who reaches a worker's port can run code on the worker's host, without authentication.",
        (
            Remedy("set {variables} to a release of llama.cpp", fixes.switch_to_mainline),
            fixes.accept("let nobody but the head reach the workers, and accept this advisory"),
        ),
        "CVE-2026-34159",
    ),
    Advisory(
        "unprotected-worker",
        "error",
        predicates.unprotected_workers,
        "RPC has no authentication, and nothing limits {where} to the head: {reason}.",
        (
            Remedy("enable {managers} on {hosts}", fixes.firewalls),
            Remedy("set llama_host_scope of {hosts} to system, which needs root", fixes.root),
            fixes.accept("close the port with a firewall of your own, and accept this advisory"),
        ),
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
    ),
    Advisory(
        "external-worker",
        "error",
        predicates.external_workers,
        "RPC has no authentication, and others run {where}: nobody here can verify that only {head} reaches them.",
        (
            fixes.accept("have a firewall on {hosts} let only {head} reach them, and accept this advisory"),
            fixes.always(
                "reach the worker through a tunnel: it listens on 127.0.0.1 there, and the tunnel ends on 127.0.0.1 of {head}, which is its endpoint "
                "in llama_external_workers then"
            ),
        ),
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
    ),
    Advisory(
        "open-server",
        "error",
        predicates.open_server,
        "The server listens on {address} and answers anyone who reaches it.",
        (
            fixes.always("set llama_server_api_key_file", fixes.server_becomes(api_key_file="/etc/llamacpp.keys")),
            fixes.always(
                "set llama_server_host to 127.0.0.1 and use a proxy of your own",
                fixes.server_becomes(host=names.LOOPBACK),
            ),
        ),
        "https://github.com/ggml-org/llama.cpp/pull/25655",
    ),
    Advisory(
        "server-for-everybody",
        "error",
        predicates.server_for_everybody,
        "The server listens on {address}, and llama_server_allowed does not say which networks may connect, so its port is closed to nobody.",
        (
            fixes.always(
                "set llama_server_allowed to the networks of its clients, like 192.168.1.0/24",
                fixes.server_becomes(allowed=("192.168.1.0/24",)),
            ),
            fixes.always("set llama_server_host to 127.0.0.1", fixes.server_becomes(host=names.LOOPBACK)),
        ),
        "docs/operating.md",
    ),
    Advisory(
        "unlimited-server",
        "error",
        predicates.unlimited_server,
        "llama_server_allowed is {networks}, but nothing on {host} limits the server to that: {reason}.",
        (
            fixes.accept("limit the port with a firewall of your own and accept this advisory"),
            fixes.always(
                "set llama_server_host to 127.0.0.1 and use a proxy of your own",
                fixes.server_becomes(host=names.LOOPBACK),
            ),
        ),
        "docs/operating.md",
    ),
    Advisory(
        "hip-mmap-hang",
        "error",
        predicates.mmap_hangs,
        "HIP loads weights with mmap into memory that is shared with the processor: {where}. From about {limit} MiB on, loading hangs or aborts.",
        (
            fixes.always("leave llama_server_load_mode out", fixes.server_becomes(load_mode=None)),
            Remedy("set llama_server_load_mode to {mode}", fixes.modes_without_mmap),
        ),
        THREAD.format(19745),
    ),
    Advisory(
        "hip-mmap-slow",
        "warning",
        predicates.mmap_is_slow,
        "HIP loads weights with mmap into more than half of the memory that is shared with the processor: {where}. This is very slow.",
        (
            fixes.always("leave llama_server_load_mode out", fixes.server_becomes(load_mode=None)),
            Remedy("set llama_server_load_mode to {mode}", fixes.modes_without_mmap),
        ),
        "https://github.com/lhl/strix-halo-testing",
    ),
    Advisory(
        "vulkan-without-mmap",
        "warning",
        predicates.vulkan_without_mmap,
        "llama_server_load_mode is {mode}. The head {host} uses Vulkan on shared memory, and needs more of it than with mmap.",
        (
            fixes.always("leave llama_server_load_mode out", fixes.server_becomes(load_mode=None)),
            fixes.always("set llama_server_load_mode to mmap", fixes.server_becomes(load_mode="mmap")),
        ),
        "https://github.com/lhl/strix-halo-testing",
    ),
    Advisory(
        predicates.VULKAN_MEMORY,
        "error",
        predicates.vulkan_memory,
        "Mesa's Vulkan driver shows two thirds of the memory that a device shares with the processor: {where}. Larger shares were seen to fail "
        "with out of memory while loading.",
        (
            Remedy("set llama_server_backend to {backend}", fixes.serve_by("hip")),
            Remedy("set llama_backend of {hosts} to {backend}", fixes.build_for("hip")),
            Remedy(f"set {backends.UNIFIED_HEAP}: 'true' in {{places}}", fixes.unified_heap),
        ),
        THREAD.format(28571),
    ),
    Advisory(
        "cache-kernels",
        "error",
        predicates.cache_kernels,
        "llama_server_cache_type_k is {type_k} and llama_server_cache_type_v is {type_v}. The programs of {hosts} may not have kernels for these "
        "types, and then the worker aborts at the first token.",
        (
            fixes.always(
                "set both to q8_0 or both to q4_0",
                fixes.server_becomes(cache_type_k="q8_0", cache_type_v="q8_0"),
                fixes.server_becomes(cache_type_k="q4_0", cache_type_v="q4_0"),
            ),
            Remedy(
                "set {variables} to a release that is compiled on the hosts (source: git, pypi or archive)",
                fixes.compiled_source,
            ),
            Remedy("remove {option} from llama_build_cmake_options of {hosts}", fixes.kernels),
        ),
        THREAD.format(27905),
    ),
    Advisory(
        "ollama-architecture",
        "error",
        predicates.ollama,
        "The model {source} has the architecture {architecture}. Only Ollama uses this name, and llama-server refuses the file.",
        (fixes.always("set llama_model_huggingface to a repository with this model, in place of {variable}"),),
        "https://github.com/ollama/ollama",
    ),
    Advisory(
        "architecture-unknown",
        "error",
        predicates.unknown_architecture,
        "The model has the architecture {architecture}, which build {build} does not know: llama-server refuses the file.",
        (Remedy("set {variables} to {release}", fixes.knowing_architecture),),
        "docs/models.md",
    ),
    Advisory(
        "rpc-in-clear",
        "warning",
        predicates.rpc_in_clear,
        "Between {head} and its workers weights and activations, so in effect the conversation, cross the network in clear: {where}.",
        (
            Remedy("set llama_transport of {hosts} to stunnel", fixes.encrypted),
            fixes.always("name the other end of a cable as peer in llama_links"),
            fixes.accept("trust that network, and accept this advisory"),
        ),
        "docs/security.md",
    ),
    Advisory(
        "link-peer",
        "warning",
        predicates.strange_peers,
        "No worker of this cluster uses a link whose peer is no other host of it: {where}.",
        (
            fixes.always("set peer to the inventory name of the host at the other end"),
            fixes.always("remove the link where that host is not of this cluster"),
        ),
        "docs/variables.md",
    ),
    Advisory(
        "link-networks",
        "warning",
        predicates.links_in_different_networks,
        "The head reaches a worker only if something routes between their networks, as llama_links gives them: {where}.",
        (fixes.always("give {hosts} and {head} a link in one network, with peer where a host has several links"),),
        "docs/variables.md",
    ),
    Advisory(
        "thunderbolt-mtu",
        "warning",
        predicates.default_mtu_on_thunderbolt,
        "The run manages {where} with an MTU of 1500, which is slow on Thunderbolt.",
        (fixes.always("set mtu of these links to {mtu}, on both ends"),),
        "https://docs.kernel.org/admin-guide/thunderbolt.html",
    ),
    Advisory(
        "thunderbolt-lanes",
        "warning",
        predicates.narrow_thunderbolt,
        "A Thunderbolt connection between hosts uses {lanes} of 2 lanes, with {gbit} of 20 Gbit/s each: {where}.",
        (
            fixes.always(
                "use cables and ports for 40 Gbit/s there, then check the devices in /sys/bus/thunderbolt/devices"
            ),
        ),
        "https://docs.kernel.org/admin-guide/thunderbolt.html",
    ),
    Advisory(
        "graphics-memory-limit",
        "warning",
        predicates.untuned,
        "The model does not fit, and the kernel lends only {mib} of {memory} MiB to {where}.",
        (
            Remedy("set llama_host_tuning and llama_host_reboot of {hosts} to true", fixes.tuned(True)),
            Remedy("boot {hosts} with the kernel parameters {parameters}", fixes.tuned(False)),
        ),
        "docs/hardware.md",
    ),
    Advisory(
        "strix-halo-kernel",
        "warning",
        predicates.old_kernel,
        "gfx1151 graphics compute reliably from kernel {first} on, which is newer than that of {where}.",
        (fixes.always("install kernel {first} or newer on {hosts}"),),
        "https://github.com/kyuz0/amd-strix-halo-toolboxes",
    ),
    Advisory(
        "strix-halo-firmware",
        "warning",
        predicates.faulty_firmware,
        "ROCm fails on gfx1151 graphics with linux-firmware {version}, which is on {hosts}.",
        (fixes.always("install another version of linux-firmware on {hosts}"),),
        "https://github.com/kyuz0/amd-strix-halo-toolboxes",
    ),
    Advisory(
        "backend-unmaintained",
        "warning",
        predicates.unmaintained_backends,
        "{fork} is built for {unmaintained} on {hosts}, which its maintainers do not support.",
        (
            Remedy("set llama_backend of {hosts} to {backend}", fixes.maintained),
            Remedy("set {variables} to a release of llama.cpp", fixes.switch_to_mainline),
        ),
        "https://github.com/ikawrakow/ik_llama.cpp#readme",
    ),
    Advisory(
        "accelerator-unused",
        "warning",
        predicates.unused_accelerators,
        "No build of llama.cpp uses these accelerators, since their hosts have no toolchain for them: {where}.",
        (
            Remedy("set llama_backend of {hosts} to {backend}", fixes.further_backends),
            Remedy("install {toolkit} on {hosts}", fixes.toolkits),
            Remedy("set llama_backend of {hosts} to {built} to accept this", fixes.built_backends),
        ),
        "docs/variables.md",
    ),
    Advisory(
        "backend-left-out",
        "warning",
        predicates.backends_without_archive,
        "{why}, so llama.cpp runs there with {built}, not with {backend}.",
        (fixes.always("{steps}"),),
        "docs/operating.md",
    ),
    Advisory(
        "memory-of-other-cluster",
        "warning",
        predicates.memory_of_neighbours,
        "Two clusters plan with the same memory: {where}. Whichever loads last may find it taken.",
        (
            fixes.always(
                "set memory_mib in llama_worker_endpoints, and llama_server_memory_mib on the head, so that both fit"
            ),
        ),
        "docs/operating.md",
    ),
    Advisory(
        "options-elsewhere",
        "warning",
        predicates.option_files,
        "llama-server of {host} reads {files} before its command line. Every option there that the plan does not set takes effect, and nothing is "
        "planned for it.",
        (fixes.always("give these options in llama_server_extra_args, and remove them from {files}"),),
        "docs/architecture.md",
    ),
    Advisory(
        "slower-than-one-host",
        "warning",
        predicates.slower_than_one_host,
        "The cluster is predicted to generate {together} tokens per second, and {host} alone {alone}.",
        (fixes.always("{steps}"),),
        "docs/plan.md",
    ),
    Advisory(
        "head-lends-to-itself",
        "warning",
        predicates.lends_to_itself,
        "llama-server reaches {where} through a worker on its own host, which is slower than to drive it itself.",
        (fixes.always("remove {hosts} from llama_workers"),),
        "docs/plan.md",
    ),
    Advisory(
        "prompts-not-pipelined",
        "warning",
        predicates.unpipelined_prompts,
        "Devices compute prompts one after the other: one of {tokens} tokens is read at about {now} tokens per second, and at {then} if they did it at "
        "the same time.",
        (fixes.always("{steps}"),),
        THREAD.format(18626),
    ),
    Advisory(
        "slow-load",
        "warning",
        predicates.slow_load,
        "A load of the model is predicted to take {seconds} s. For most of that time {release} hashes and copies what it sends to workers.",
        (fixes.always("set llama_build_fast_load to true for all hosts"),),
        "docs/operating.md",
    ),
    Advisory(
        "idle-shorter-than-load",
        "warning",
        predicates.short_idleness,
        "llama_server_idle_seconds is {idle}, and a load of the model is predicted to take {seconds} s.",
        (
            fixes.always(
                "set llama_server_idle_seconds to {seconds} or more",
                lambda _context, finding: remedies.serving(idle_seconds=finding.values["seconds"]),
            ),
        ),
        "docs/operating.md",
    ),
    Advisory(
        "compute-over-capacity",
        "warning",
        predicates.over_capacity,
        "Weights, KV cache and compute buffers may be more than devices hold: {devices}. Compute buffers are planned with an upper bound, {compute} "
        "MiB; if they come near it, llama-server runs out of memory when it starts.",
        (Remedy("{smaller}", fixes.smaller_buffers),),
        "docs/plan.md",
    ),
    Advisory(
        "further-not-counted",
        "warning",
        predicates.uncounted,
        "The memory of {variable} is not counted, and llama-server chooses its devices, workers too: {why}.",
        (
            Remedy("remove {word}, so that the plan chooses", fixes.without_placing),
            fixes.accept(
                "keep enough memory free with llama_server_reserve_mib, and memory_mib in llama_worker_endpoints, and accept this advisory"
            ),
        ),
        "docs/models.md",
    ),
    Advisory(
        "speculation-slower",
        "warning",
        predicates.slow_speculation,
        "With {type} {with_it} tokens per second are predicted, and {without} without: it pays from a share of {pays_from} accepted tokens on, and "
        "{acceptance} is {source}.",
        (
            fixes.always("set llama_server_speculation to none", fixes.server_becomes(speculation=speculation.NONE)),
            fixes.always("set llama_server_speculation_acceptance to the share that the log of llama-server has"),
        ),
        "docs/models.md",
    ),
    Advisory(
        "context-cut",
        "warning",
        predicates.cut_context,
        "llama_server_context is {wanted}, but {model} was trained for {context} tokens: llama-server gets {context}.",
        (
            Remedy("set llama_server_context to {context} or less", fixes.shorter_context),
            Remedy("add --override-kv {key}=int:{wanted} to llama_server_extra_args", fixes.extended_context),
        ),
        "docs/plan.md",
    ),
    Advisory(
        "context-shared",
        "warning",
        predicates.shared_context,
        "llama_server_parallel is {parallel}, so each request gets {each} of the {context} tokens of llama_server_context. {more}",
        (
            fixes.always("set llama_server_parallel to 1", fixes.server_becomes(parallel=1)),
            Remedy("add --kv-unified to llama_server_extra_args, so that requests share the tokens", fixes.one_cache),
            fixes.accept("accept this advisory if {each} tokens are enough"),
        ),
        "docs/plan.md",
    ),
    Advisory(
        "variable-unknown",
        "warning",
        predicates.unknown_variables,
        "{variable} is set for {where}, but the collection has no such variable, so it does nothing. Similar name: {meant}.",
        (
            Remedy("rename {variable} to {meant}; a variable of your own may stay", fixes.similar_name),
            Remedy("use a name from docs/variables.md; a variable of your own may stay", fixes.no_similar_name),
        ),
        "docs/variables.md",
    ),
    Advisory(
        "accepted-unknown",
        "warning",
        _unknown_ids,
        "llama_accept_advisories has {identifier}, and no advisory has this id, so it accepts nothing. Similar id: {meant}.",
        (
            Remedy("replace {identifier} by {meant}", fixes.similar_name),
            fixes.always("remove {identifier} from llama_accept_advisories"),
        ),
        "docs/plan.md",
    ),
    Advisory(
        "device-without-memory",
        "warning",
        predicates.unsized_devices,
        "llama-server does not use {where}: the memory is not known.",
        (fixes.always("set memory_mib of the device in llama_hardware of {hosts}"),),
        "docs/variables.md",
    ),
    Advisory(
        "gb10-mmap-slow",
        "warning",
        predicates.mmap_crawls,
        "llama_server_load_mode is {mode}, and {where} is an NVIDIA GB10. A DGX Spark took 224 s to load a model with mmap, and 22 s without.",
        (
            fixes.always("leave llama_server_load_mode out", fixes.server_becomes(load_mode=None)),
            fixes.always("set llama_server_load_mode to none", fixes.server_becomes(load_mode="none")),
        ),
        THREAD.format(27742),
    ),
    Advisory(
        "vulkan-large-share",
        "warning",
        predicates.large_vulkan_shares,
        "Vulkan gets large shares over RPC: {where}. A model with {crashed} MiB and more on each device crashed so with out of memory while it was loaded, "
        "and ran by HIP.",
        (fixes.always("set memory_mib of the endpoints of {hosts} in {variable} to {mib} or less"),),
        "https://github.com/geerlingguy/beowulf-ai-cluster/issues/2",
    ),
    Advisory(
        "rocm-slow-prompts",
        "warning",
        predicates.slow_prompts,
        "llama.cpp is compiled for {architecture} with the newest ROCm that is installed on {where}. Two Strix Halo read prompts of a model in Q8_0 "
        "at 49 tokens per second with ROCm 7.2, and at 75 with 6.4.2; generation was the same, and so were prompts of a model in Q4_K.",
        (fixes.always("compare it with llama_build_toolchain of {hosts} set to {other}"),),
        "https://github.com/ggml-org/llama.cpp/issues/17917",
    ),
    Advisory(
        "rdma-not-planned",
        "warning",
        predicates.rdma,
        "llama.cpp is compiled with {option} on {where}. {reason}.",
        (fixes.always("remove {option} from llama_build_cmake_options of {hosts}"),),
        "https://github.com/ggml-org/llama.cpp/pull/20590",
    ),
    Advisory(
        "no-fallback",
        "warning",
        predicates.without_fallback,
        "llama_server_fallback is true, but nothing can be served while one of these is away: {where}.",
        (
            fixes.always("add a worker with as much memory"),
            fixes.always("set llama_server_fallback to false"),
        ),
        "docs/operating.md",
    ),
)


def as_plan(finding: Finding, clauses: Sequence[str]) -> AdvisoryPlan:
    """A finding as the plan has it, not accepted yet."""
    advisory, hosts = finding.advisory, finding.hosts
    return AdvisoryPlan(
        id=advisory.id,
        severity=advisory.severity,
        host=hosts[0] if len(hosts) == 1 else None,
        hosts=hosts,
        message=advisory.message.format(**finding.values),
        remedy=remedies.sentence(clauses),
        reference=advisory.reference,
        accepted=False,
    )


def evaluate(context: AdvisoryContext) -> list[Finding]:
    """The advisories that a plan meets, one for all hosts that share it."""
    findings = []
    for advisory in ADVISORIES:
        alike: dict[str, Cases] = {}
        for host, values in advisory.condition(context):
            shared = {key: value for key, value in values.items() if key != "where"}
            key = repr({**shared, "host": host} if "{host}" in advisory.message else shared)
            alike.setdefault(key, []).append((host, values))
        for cases in alike.values():
            hosts = tuple(dict.fromkeys(host for host, _values in cases if host is not None))
            where = ", ".join(dict.fromkeys(values.get("where", host) or "" for host, values in cases))
            shown = {"host": cases[0][0], "hosts": remedies.listed(hosts)}
            findings.append(Finding(advisory, hosts, {**shown, **cases[0][1], "where": where}))
    return findings
