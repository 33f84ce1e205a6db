# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Known problems of a plan. An error whose id the operator has not accepted stops the run.

ADVISORIES is the table; server.py, links.py, memory.py, hardware.py and releases.py contain its conditions. Problems that planning avoids have no
advisory: docs/plan.md lists every known symptom and its remedy.
"""

from __future__ import annotations

import functools

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import AdvisoryPlan, Plan
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import VULKAN_MEMORY_ADVISORY

LLAMA_CPP_ISSUE = "ggml-org/llama.cpp#{}"


ADVISORIES = (
    Advisory(
        "rpc-remote-code-execution",
        "error",
        releases.exploitable_releases,
        "With {builds}, anyone who can reach a worker's port can run code on its host without authenticating.",
        ("restrict the workers' ports to the head, then accept this advisory",),
        "CVE-2026-34159",
    ),
    Advisory(
        "unprotected-worker",
        "error",
        links.unprotected_workers,
        "RPC has no authentication, and nothing limits {where} to connections from the head: this run sets no firewall rules there. {reason}.",
        (
            "enable {managers} on {hosts}",
            "set llama_host_scope to {scope} for {hosts} (needs root)",
            "restrict these ports to the head with your own firewall, then accept this advisory",
        ),
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
    ),
    Advisory(
        "worker-not-started",
        "warning",
        links.idle_workers,
        "These unused workers are not started, because nothing would limit their ports to connections from the head: {where}.",
        ("remove the unused workers from the inventory", "accept unprotected-worker to start them anyway"),
        "docs/security.md",
    ),
    Advisory(
        "external-worker",
        "error",
        links.external_workers,
        "The collection does not manage the external workers {where}, so it cannot verify that only {head} can reach them. RPC has no authentication.",
        (
            "restrict these ports to {head} with a firewall on {hosts}, then accept this advisory",
            "use a tunnel: bind the worker to 127.0.0.1, and set its endpoint in llama_external_workers to the tunnel's address on {head} (in 127.0.0.0/8)",
        ),
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
    ),
    Advisory(
        "open-server",
        "error",
        server.server_without_key,
        "The server listens on {address} without an API key, so anyone who can reach it can use it.",
        ("set llama_server_api_key_file", "set llama_server_host to 127.0.0.1 and use an authenticating proxy"),
        "https://github.com/ggml-org/llama.cpp/pull/25655",
    ),
    Advisory(
        "server-for-everybody",
        "error",
        server.unrestricted_server,
        "The server listens on {address} and llama_server_allowed is empty, so anyone can connect.",
        (
            "set llama_server_allowed to the clients' networks, like 192.168.1.0/24",
            "set llama_server_host to 127.0.0.1",
        ),
        "docs/operating.md",
    ),
    Advisory(
        "unlimited-server",
        "error",
        server.unfiltered_server,
        "llama_server_allowed is {networks}, but nothing on {host} enforces it. {reason}.",
        (
            "restrict the port to these networks with your own firewall, then accept this advisory",
            "set llama_server_host to 127.0.0.1 and filter clients in your proxy",
        ),
        "docs/operating.md",
    ),
    Advisory(
        "hip-mmap-hang",
        "error",
        memory.mmap_hangs,
        "HIP copies weights from memory-mapped files: {where}. llama-server has hung or crashed while copying about {limit} MiB or more this way.",
        ("remove llama_server_load_mode", "set llama_server_load_mode to {mode}"),
        LLAMA_CPP_ISSUE.format(19745),
    ),
    Advisory(
        VULKAN_MEMORY_ADVISORY,
        "error",
        memory.underreported_memory,
        "Mesa's Vulkan driver reports only two thirds of the memory shared with the processor: {where}. "
        "Loading more than the reported size has failed with out-of-memory errors.",
        (
            "set llama_backend to {hip} for {hosts}, and llama_server_backend too if the head is affected",
            f"add {backends.UNIFIED_HEAP}: 'true' under environment in llama_worker_endpoints for {{hosts}}, and in llama_server_environment for the head",
        ),
        LLAMA_CPP_ISSUE.format(28571),
    ),
    Advisory(
        "vulkan-prompt-cache",
        "error",
        memory.split_kv_caches,
        "llama-server crashes when it saves a conversation, because a layer's KV cache (over 1 GiB) spans several buffers: {where}.",
        ("remove llama_server_prompt_cache_mib", "reduce llama_server_context"),
        LLAMA_CPP_ISSUE.format(25584),
    ),
    Advisory(
        "prompt-cache-memory",
        "warning",
        memory.displacing_prompt_cache,
        "llama_server_prompt_cache_mib: {size} moves {moved} layers from {host} to slower devices. "
        "Predicted: {with_cache} tokens/s; without this cache, {without_cache} tokens/s.",
        ("set llama_server_prompt_cache_mib to {largest} or less", "accept this advisory if this is intended"),
        "docs/plan.md",
    ),
    Advisory(
        "cache-kernels",
        "error",
        releases.missing_cache_kernels,
        "llama_server_cache_type_k is {type_k} and llama_server_cache_type_v is {type_v}. Programs on {hosts} may lack kernels for these "
        "types; a worker without these kernels crashes at the first token.",
        (
            "set both variables to q8_0 or to q4_0",
            "set {variables} to a release that the hosts compile (source: git, pypi or archive)",
            "remove {option} from llama_build_cmake_options for {hosts}",
        ),
        LLAMA_CPP_ISSUE.format(27905),
    ),
    Advisory(
        "architecture-unknown",
        "error",
        releases.unknown_architecture,
        "llama-server {modal} refuse the model: {subject} the architecture {architecture}.",
        (
            "set {variables} to {newer_build}",
            "set llama_model_huggingface to a repository with this model in llama.cpp's format{removal}",
        ),
        "docs/models.md",
    ),
    Advisory(
        "tensor-kernels",
        "error",
        releases.missing_tensor_kernels,
        "The {backend} backend on {hosts} has no known kernels for the model's {types} tensors. A worker would crash at the first token; the head would "
        "fall back to its CPU.",
        ("set llama_backend to {alternative} for {hosts}", "use a model file with other tensor types, like Q4_K"),
        "docs/models.md",
    ),
    Advisory(
        "model-unread",
        "warning",
        releases.untested_model,
        "The model has {features}. No build up to {newest} supports this, and build {build} has not been checked.",
        ("look for support in release notes up to build {build} before a long download, then accept this advisory",),
        "docs/models.md",
    ),
    Advisory(
        "rpc-in-clear",
        "warning",
        links.unencrypted_rpc,
        "Weights and activations (in effect, the conversation) travel unencrypted between {head} and its workers: {where}.",
        (
            "set llama_transport to {transport} for {hosts}",
            "if a cable connects the hosts directly, set peer in llama_links to the host at its other end",
            "accept this advisory if you trust that network",
        ),
        "docs/security.md",
    ),
    Advisory(
        "graphics-memory-limit",
        "warning",
        memory.untuned_integrated_gpus,
        "The model does not fit, and the kernel lets {where} use only {mib} of {memory} MiB.",
        (
            "set llama_host_tuning and llama_host_reboot to {tuning} for {hosts}",
            "boot {hosts} with the kernel parameters {parameters}",
        ),
        "docs/hardware.md",
    ),
    Advisory(
        "strix-halo-kernel",
        "warning",
        hardware.outdated_kernels,
        "gfx1151 needs kernel {first} or newer to compute reliably. Hosts with an older kernel: {where}.",
        ("install kernel {first} or newer on {hosts}",),
        "https://github.com/kyuz0/amd-strix-halo-toolboxes",
    ),
    Advisory(
        "nvidia-driver",
        "warning",
        hardware.broken_drivers,
        "The plan uses no NVIDIA card on {where}, because nvidia-smi fails there: {failure}",
        ("fix the NVIDIA driver on {hosts}", "set llama_backend to another backend for {hosts}"),
        "docs/hardware.md",
    ),
    Advisory(
        "rocm-gfx906",
        "warning",
        hardware.gfx906_without_kernels,
        "ROCm 6.4 and newer have no rocBLAS kernels for gfx906: {where}.",
        (
            "install ROCm 6.3 on {hosts}",
            "set llama_backend to {vulkan} for {hosts}",
            "install rocBLAS kernels for gfx906, then accept this advisory",
        ),
        "ROCm/legacy-rocm-build#4625",
    ),
    Advisory(
        "rocblas-kernels",
        "warning",
        hardware.gpus_without_rocblas,
        "ROCm has no rocBLAS kernels for these GPUs: {where}.",
        (
            "set llama_backend to {vulkan} for {hosts}",
            "set HSA_OVERRIDE_GFX_VERSION to 10.3.0 under environment in llama_worker_endpoints (llama_server_environment for the head){targets}",
            "install rocBLAS kernels for these GPUs, then accept this advisory",
        ),
        LLAMA_CPP_ISSUE.format(26610),
    ),
    Advisory(
        "sycl-worker",
        "warning",
        hardware.sycl_workers,
        "SYCL workers are known to crash on their first computation: {where}.",
        (
            "set llama_backend to {vulkan} for {hosts}",
            "set llama_server_backend to {sycl}",
            "accept this advisory if these devices work for you",
        ),
        LLAMA_CPP_ISSUE.format(21837),
    ),
    Advisory(
        "metal-mtp",
        "warning",
        hardware.metal_mtp_workers,
        "With llama_server_speculation: mtp, Metal workers are known to crash: {where}.",
        ("set llama_server_speculation to ngram", "accept this advisory if these devices work for you"),
        LLAMA_CPP_ISSUE.format(27801),
    ),
    Advisory(
        "metal-mmap",
        "warning",
        memory.metal_mappings,
        "On {where}, Metal maps almost the whole model file, including layers that belong to workers.",
        ("remove llama_server_load_mode",),
        LLAMA_CPP_ISSUE.format(27667),
    ),
    Advisory(
        "user-scope",
        "warning",
        hardware.user_scope_hosts,
        "{where}: installing for the connecting user only, because passwordless sudo is not available.",
        (
            "set llama_host_scope to system and run the playbook with --ask-become-pass",
            "set llama_host_scope to user to accept this",
        ),
        "docs/operating.md",
    ),
    Advisory(
        "accelerator-unused",
        "warning",
        hardware.unused_accelerators,
        "llama_backend: auto picks a single backend for each host. It leaves these accelerators unused: {where}.",
        (
            "set llama_backend to {backend} for {hosts}",
            "install {toolkit} on {hosts}",
            "set llama_backend to {built} for {hosts} to accept this",
        ),
        "docs/variables.md",
    ),
    Advisory(
        "slower-than-one-host",
        "warning",
        server.slower_than_one_host,
        "Predicted speed{users}, without measurements: {cluster_speed} tokens/s for the cluster, {host_speed} for {host} alone.",
        ("{steps}", "set llama_placement to all to use all workers anyway"),
        "docs/plan.md",
    ),
    Advisory(
        "slow-load",
        "warning",
        server.slow_load,
        "Loading is predicted to take {seconds} s. {release} spends most of this time hashing and copying tensors before it sends them.",
        ("set llama_build_fast_load to true for all hosts",),
        "docs/operating.md",
    ),
    Advisory(
        "compute-over-capacity",
        "warning",
        memory.overfull_devices,
        "Weights, KV cache and compute buffers may exceed the memory of these devices: {devices}. Compute buffers are planned with an upper bound, {compute} "
        "MiB. If they approach it, llama-server runs out of memory on start-up.",
        ("set llama_server_flash_attention to '{flash}'", "reduce llama_server_micro_batch or llama_server_context"),
        "docs/plan.md",
    ),
    Advisory(
        "auxiliary-not-counted",
        "warning",
        server.uncounted_models,
        "The plan does not count the memory for {variable}: {reason}. llama-server places this model itself, possibly on workers.",
        (
            "remove {option} to let the plan place this model",
            "reserve memory with llama_server_reserve_mib and memory_mib in llama_worker_endpoints, then accept this advisory",
        ),
        "docs/models.md",
    ),
    Advisory(
        "chat-template-missing",
        "warning",
        server.missing_chat_template,
        "The model file of {model} has no chat template, so llama-server uses a template on which the model was not trained.",
        (
            "use an instruct model for chats",
            "add --chat-template to llama_server_extra_args",
            "accept this advisory if clients only request text completions",
        ),
        "docs/models.md",
    ),
    Advisory(
        "context-cut",
        "warning",
        server.reduced_context,
        "llama_server_context is {requested}, but {model} was trained for {trained} tokens per request. With llama_server_parallel: "
        "{parallel}, llama-server starts with a context of {context} tokens.",
        (
            "set llama_server_context to {context} or less",
            "add --rope-scaling and --override-kv (for the header's context length) to llama_server_extra_args, then accept this advisory",
        ),
        "docs/plan.md",
    ),
    Advisory(
        "context-shared",
        "warning",
        server.shared_context,
        "llama_server_parallel is {parallel}, so each request gets {per_request} of the context's {context} tokens.",
        (
            "set llama_server_parallel to 1",
            "add --kv-unified to llama_server_extra_args to let requests share the tokens",
            "accept this advisory if {per_request} tokens are enough",
        ),
        "docs/plan.md",
    ),
    Advisory(
        "conversations-lost",
        "warning",
        server.lost_conversations,
        "llama_server_keep_conversations is true, but conversations do not survive a restart: {reason}.",
        ("remove llama_server_keep_conversations",),
        "docs/operating.md",
    ),
    Advisory(
        "conversations-slow",
        "warning",
        server.slow_conversations,
        "Restoring a conversation with a full context takes {restore_time} s; computing it again takes {compute_time} s.",
        ("remove llama_server_keep_conversations", "accept this advisory if the links are faster than planned"),
        "docs/operating.md",
    ),
    Advisory(
        "variable-misspelt",
        "error",
        functools.partial(releases.unknown_variables, is_misspelt=True),
        "{variable} is set for {where} but has no effect. Similar name: {suggestion}.",
        ("rename {variable} to {similar}", "accept this advisory if the variable is your own"),
        "docs/variables.md",
    ),
    Advisory(
        "variable-unknown",
        "warning",
        releases.unknown_variables,
        "{variable} is set for {where}, but the collection has no such variable. Similar name: {suggestion}.",
        ("rename {variable} to {similar}", "use a name from docs/variables.md, unless the variable is your own"),
        "docs/variables.md",
    ),
    Advisory(
        "no-fallback",
        "warning",
        server.missing_fallbacks,
        "llama_server_fallback is true, but there is no fallback for these workers: {where}.",
        ("add workers with enough memory to replace any of these", "set llama_server_fallback to false"),
        "docs/operating.md",
    ),
)


def _advisory_plan(finding: Finding) -> AdvisoryPlan:
    advisory, hosts = finding.advisory, finding.hosts
    return AdvisoryPlan(
        id=advisory.id,
        severity=advisory.severity,
        host=hosts[0] if len(hosts) == 1 else None,
        hosts=hosts,
        message=finding.message,
        remedy=remedies.join_sentences(_remedy_clauses(finding)),
        reference=advisory.reference,
        accepted=False,
    )


def _remedy_clauses(finding: Finding) -> list[str]:
    """Return the remedies whose placeholders all have values."""
    missing_placeholders = [f"{{{name}}}" for name, value in finding.values.items() if value is None]
    clauses = [text for text in finding.advisory.remedies if not any(name in text for name in missing_placeholders)]
    return [text.format(**finding.values) for text in clauses]


def with_advisories(context: AdvisoryContext) -> Plan:
    """Return the plan with the advisories that apply to it, none of them accepted yet."""
    return context.plan._replace(advisories=tuple(map(_advisory_plan, evaluate_advisories(context))))


def evaluate_advisories(context: AdvisoryContext) -> list[Finding]:
    """Return a finding for each advisory that applies to a plan, and for each set of values that hosts share."""
    findings = []
    for advisory in ADVISORIES:
        grouped_cases: dict[str, Cases] = {}
        for host, values in advisory.find_cases(context):
            key = repr({**values, "where": None, "host": host if "{host}" in advisory.message else None})
            grouped_cases.setdefault(key, []).append((host, values))
        for cases in grouped_cases.values():
            hosts = tuple(dict.fromkeys(host for host, _values in cases if host is not None))
            place_text = ", ".join(dict.fromkeys(values.get("where", host) or "" for host, values in cases))
            host_values = {"host": cases[0][0], "hosts": remedies.join_names(hosts)}
            findings.append(Finding(advisory, hosts, {**host_values, **cases[0][1], "where": place_text}))
    return findings
