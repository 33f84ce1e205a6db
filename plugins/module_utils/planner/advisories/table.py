# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Known problems of a plan. An error whose id the operator has not accepted stops the run.

ADVISORIES is the table; server.py, links.py, memory.py, hardware.py and releases.py say when each entry is met. Problems that planning avoids by itself have no
entry: docs/plan.md lists every known symptom and its remedy.
"""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import AdvisoryPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import (
    hardware,
    links,
    memory,
    releases,
    remedies,
    server,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import (
    Advisory,
    AdvisoryContext,
    Cases,
    Finding,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices

THREAD = "ggml-org/llama.cpp#{}"


ADVISORIES = (
    Advisory(
        "rpc-remote-code-execution",
        "error",
        releases.remote_code,
        "With {builds}, anyone who reaches a worker's port can run code on the worker's host, without authentication.",
        ("let nobody but the head reach the workers, and accept this advisory",),
        "CVE-2026-34159",
    ),
    Advisory(
        "unprotected-worker",
        "error",
        links.unprotected_workers,
        "RPC has no authentication, and nothing limits {where} to the head: {reason}.",
        (
            "enable {managers} on {hosts}",
            "set llama_host_scope of {hosts} to {scope}, which needs root",
            "close the port with a firewall of your own, and accept this advisory",
        ),
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
    ),
    Advisory(
        "external-worker",
        "error",
        links.external_workers,
        "RPC has no authentication, and others run {where}: this collection cannot verify that only {head} reaches them.",
        (
            "have a firewall on {hosts} let only {head} reach them, and accept this advisory",
            "reach the worker through a tunnel: it listens on 127.0.0.1 there, and its end on 127.0.0.1 of {head} is its endpoint in llama_external_workers",
        ),
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
    ),
    Advisory(
        "open-server",
        "error",
        server.open_server,
        "The server listens on {address} and answers anyone who reaches it.",
        (
            "set llama_server_api_key_file",
            "set llama_server_host to 127.0.0.1 and use a proxy of your own",
        ),
        "https://github.com/ggml-org/llama.cpp/pull/25655",
    ),
    Advisory(
        "server-for-everybody",
        "error",
        server.server_for_everybody,
        "The server listens on {address}, and llama_server_allowed does not say which networks may connect, so its port is closed to nobody.",
        (
            "set llama_server_allowed to the networks of its clients, like 192.168.1.0/24",
            "set llama_server_host to 127.0.0.1",
        ),
        "docs/operating.md",
    ),
    Advisory(
        "unlimited-server",
        "error",
        server.unlimited_server,
        "llama_server_allowed is {networks}, but nothing on {host} limits the server to that: {reason}.",
        (
            "limit the port with a firewall of your own and accept this advisory",
            "set llama_server_host to 127.0.0.1 and use a proxy of your own",
        ),
        "docs/operating.md",
    ),
    Advisory(
        "hip-mmap-hang",
        "error",
        memory.mmap_hangs,
        "HIP loads weights with mmap into memory that is shared with the processor: {where}. From about {limit} MiB on, loading hangs or aborts.",
        (
            "leave llama_server_load_mode out",
            "set llama_server_load_mode to {mode}",
        ),
        THREAD.format(19745),
    ),
    Advisory(
        devices.VULKAN_MEMORY,
        "error",
        memory.vulkan_memory,
        "Mesa's Vulkan driver shows two thirds of the memory that a device shares with the processor: {where}. Larger shares were seen to fail "
        "with out of memory while loading.",
        (
            "set llama_backend of {hosts} to hip, and llama_server_backend where the head is one of them",
            f"set {backends.UNIFIED_HEAP}: 'true' in environment of llama_worker_endpoints of {{hosts}}, and in llama_server_environment for the head",
        ),
        THREAD.format(28571),
    ),
    Advisory(
        "vulkan-prompt-cache",
        "error",
        memory.torn_cache,
        "llama-server ends when it keeps a conversation: a layer's KV cache is more than 1 GiB, of which {where} makes several buffers.",
        ("leave llama_server_prompt_cache_mib out", "set llama_server_context to a smaller number"),
        THREAD.format(25584),
    ),
    Advisory(
        "cache-kernels",
        "error",
        releases.cache_kernels,
        "llama_server_cache_type_k is {type_k} and llama_server_cache_type_v is {type_v}. The programs of {hosts} may not have kernels for these "
        "types, and then the worker aborts at the first token.",
        (
            "set both to q8_0 or both to q4_0",
            "set {variables} to a release that is compiled on the hosts (source: git, pypi or archive)",
            "remove {option} from llama_build_cmake_options of {hosts}",
        ),
        THREAD.format(27905),
    ),
    Advisory(
        "architecture-unknown",
        "error",
        releases.unknown_architecture,
        "The model has the architecture {architecture}, which {who} not know: llama-server would refuse the file.",
        (
            "set {variables} to {newer} that knows it",
            "set llama_model_huggingface to a repository with this model, in place of {variable}",
        ),
        "docs/models.md",
    ),
    Advisory(
        "tensor-kernels",
        "error",
        releases.missing_kernels,
        "The model has tensors of {types}, with which {backend} of {hosts} is not known to compute: a worker ends at the first token, the head computes "
        "them on its processor.",
        ("set llama_backend of {hosts} to {instead}", "use a file of the model with other types, like Q4_K"),
        "docs/models.md",
    ),
    Advisory(
        "model-unread",
        "warning",
        releases.unread_model,
        "The model has {what}, which no build up to {newest} knows, and nobody read build {build}.",
        ("look for it in that build's notes before a long download, and accept this advisory",),
        "docs/models.md",
    ),
    Advisory(
        "rpc-in-clear",
        "warning",
        links.rpc_in_clear,
        "Between {head} and its workers weights and activations, so in effect the conversation, cross the network in clear: {where}.",
        (
            "set llama_transport of {hosts} to {transport}",
            "name the other end of a cable as peer in llama_links",
            "trust that network, and accept this advisory",
        ),
        "docs/security.md",
    ),
    Advisory(
        "graphics-memory-limit",
        "warning",
        memory.untuned,
        "The model does not fit, and the kernel lends only {mib} of {memory} MiB to {where}.",
        (
            "set llama_host_tuning and llama_host_reboot of {hosts} to {tuning}",
            "boot {hosts} with the kernel parameters {parameters}",
        ),
        "docs/hardware.md",
    ),
    Advisory(
        "strix-halo-kernel",
        "warning",
        hardware.old_kernel,
        "gfx1151 graphics compute reliably from kernel {first} on, which is newer than that of {where}.",
        ("install kernel {first} or newer on {hosts}",),
        "https://github.com/kyuz0/amd-strix-halo-toolboxes",
    ),
    Advisory(
        "rocm-gfx906",
        "warning",
        hardware.rocm_without_kernels,
        "ROCm from 6.4 on has no rocBLAS kernels for gfx906: {where}.",
        (
            "install ROCm 6.3 on {hosts}",
            "set llama_backend of {hosts} to {vulkan}",
            "add these kernels, and accept this advisory",
        ),
        "ROCm/legacy-rocm-build#4625",
    ),
    Advisory(
        "sycl-worker",
        "warning",
        hardware.sycl_workers,
        "Workers with SYCL were seen to end at the first graph: {where}.",
        (
            "set llama_backend of {hosts} to {vulkan}",
            "set llama_server_backend to {own}",
            "accept this advisory where they compute",
        ),
        THREAD.format(21837),
    ),
    Advisory(
        "metal-mtp",
        "warning",
        hardware.predicting_with_metal,
        "Workers with Metal were seen to end with llama_server_speculation: mtp: {where}.",
        ("set llama_server_speculation to ngram", "accept this advisory where they compute"),
        THREAD.format(27801),
    ),
    Advisory(
        "metal-mmap",
        "warning",
        memory.metal_maps,
        "Metal of {where} maps nearly the whole file, with layers of workers.",
        ("leave llama_server_load_mode out",),
        THREAD.format(27667),
    ),
    Advisory(
        "user-scope",
        "warning",
        hardware.user_scope,
        "On {where} all is installed for the connecting user alone: this run may not use sudo there without a password.",
        (
            "set llama_host_scope to system, and run the playbook with --ask-become-pass",
            "set llama_host_scope to user where that is meant",
        ),
        "docs/operating.md",
    ),
    Advisory(
        "accelerator-unused",
        "warning",
        hardware.unused_accelerators,
        "With auto, llama_backend is one backend, for which the host has all that it needs. No build of llama.cpp uses these accelerators: {where}.",
        (
            "set llama_backend of {hosts} to {backend}",
            "install {toolkit} on {hosts}",
            "set llama_backend of {hosts} to {built} to accept this",
        ),
        "docs/variables.md",
    ),
    Advisory(
        "slower-than-one-host",
        "warning",
        server.slower_than_one_host,
        "Before any correction by a measurement the cluster is predicted to generate {together} tokens per second, and {host} alone {alone}.",
        ("{steps}", "set llama_placement to all to use all workers anyway"),
        "docs/plan.md",
    ),
    Advisory(
        "slow-load",
        "warning",
        server.slow_load,
        "A load of the model is predicted to take {seconds} s. For most of that time {release} hashes and copies what it sends to workers.",
        ("set llama_build_fast_load to true for all hosts",),
        "docs/operating.md",
    ),
    Advisory(
        "compute-over-capacity",
        "warning",
        memory.over_capacity,
        "Weights, KV cache and compute buffers may be more than devices hold: {devices}. Compute buffers are planned with an upper bound, {compute} "
        "MiB; if they come near it, llama-server runs out of memory when it starts.",
        (
            "set llama_server_flash_attention to '{flash}'",
            "set llama_server_micro_batch or llama_server_context to a smaller number",
        ),
        "docs/plan.md",
    ),
    Advisory(
        "auxiliary-not-counted",
        "warning",
        server.uncounted,
        "The memory of {variable} is not counted, and llama-server chooses its devices, workers too: {why}.",
        (
            "remove {word}, so that the plan chooses",
            "keep enough memory free with llama_server_reserve_mib, and memory_mib in llama_worker_endpoints, and accept this advisory",
        ),
        "docs/models.md",
    ),
    Advisory(
        "context-cut",
        "warning",
        server.cut_context,
        "llama_server_context is {wanted}, but {model} was trained for requests of {trained} tokens, and llama_server_parallel is {parallel}: "
        "llama-server gets {context}.",
        (
            "set llama_server_context to {context} or less",
            "add --rope-scaling and --override-kv with the context of the model's header to llama_server_extra_args, and accept this advisory",
        ),
        "docs/plan.md",
    ),
    Advisory(
        "context-shared",
        "warning",
        server.shared_context,
        "llama_server_parallel is {parallel}, so each request gets {each} of the {context} tokens of llama_server_context.",
        (
            "set llama_server_parallel to 1",
            "add --kv-unified to llama_server_extra_args, so that requests share the tokens",
            "accept this advisory if {each} tokens are enough",
        ),
        "docs/plan.md",
    ),
    Advisory(
        "variable-unknown",
        "warning",
        releases.unknown_variables,
        "{variable} is set for {where}, but the collection has no such variable, so it does nothing. Similar name: {meant}.",
        (
            "rename {variable} to {similar}",
            "use a name from docs/variables.md; a variable of your own may stay",
        ),
        "docs/variables.md",
    ),
    Advisory(
        "no-fallback",
        "warning",
        server.without_fallback,
        "llama_server_fallback is true, but nothing can be served while one of these is away: {where}.",
        (
            "add a worker with as much memory",
            "set llama_server_fallback to false",
        ),
        "docs/operating.md",
    ),
)


def as_plan(finding: Finding) -> AdvisoryPlan:
    """A finding as the plan has it, not accepted yet."""
    advisory, hosts = finding.advisory, finding.hosts
    return AdvisoryPlan(
        id=advisory.id,
        severity=advisory.severity,
        host=hosts[0] if len(hosts) == 1 else None,
        hosts=hosts,
        message=finding.message,
        remedy=remedies.sentence(_clauses(finding)),
        reference=advisory.reference,
        accepted=False,
    )


def _clauses(finding: Finding) -> list[str]:
    """Those of the remedies that name nothing which the case does not have."""
    lacking = [f"{{{name}}}" for name, value in finding.values.items() if value is None]
    possible = [text for text in finding.advisory.remedies if not any(name in text for name in lacking)]
    return [text.format(**finding.values) for text in possible]


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
