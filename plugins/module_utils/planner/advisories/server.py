# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions of advisories about llama-server: its clients, options and speed."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import fast_load, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import workload
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.links import unfiltered_reason
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import prompt_cache

SLOW_LOAD_S = 60
"""Shortest predicted load to which slow-load applies; an assumption."""
RPC_LIMIT_PREFIX = "RPC on "
"""Prefix of ``load_limited_by`` if RPC limits the load."""
DEFAULT_CONTEXT = 8192
"""Default of llama_server_context. The plan may reduce it without an advisory."""


def server_without_key(context: AdvisoryContext) -> Cases:
    head = context.plan.head
    if names.is_loopback(head.address) or "--api-key-file" in head.argv:
        return []
    return [(head.host, {"address": f"{head.address}:{head.port}"})]


def unrestricted_server(context: AdvisoryContext) -> Cases:
    head = context.plan.head
    if names.is_loopback(head.address) or head.allowed:
        return []
    return [(head.host, {"address": f"{head.address}:{head.port}"})]


def unfiltered_server(context: AdvisoryContext) -> Cases:
    head = context.plan.head
    host = context.plan.head_host
    needs_no_filter = host.unit_closes or host.firewall_manager or names.ANY_NETWORK in head.allowed
    if not head.allowed or names.is_loopback(head.address) or needs_no_filter:
        return []
    reason = unfiltered_reason(context, head.host)
    if host.host_settings:
        reason += ". No supported firewall (firewalld, ufw or nftables) is active there"
    return [(head.host, {"networks": ", ".join(head.allowed), "reason": reason})]


def slower_than_one_host(context: AdvisoryContext) -> Cases:
    """Return the host that is faster alone, unless the model only tests the workers (known answer) or the operator asks for all workers."""
    estimate, server = context.plan.estimate, context.server
    best_host, cluster_speed = estimate.best_single_host, estimate.users
    is_intended = context.plan.model.known_answer or context.cluster.placement == workload.USE_ALL
    if is_intended or not cluster_speed or not estimate.links or not best_host.faster:
        return []
    host_speed = next(
        shape.users for shape in estimate.shapes if shape.kind == "host" and best_host.host in shape.hosts
    )
    host, head = best_host.host, context.cluster.head
    steps = [f"replace {head} with {host} in llama_head (move the model's files too)"] if host != head else []
    if any(member.is_worker for member in context.cluster.hosts.values()):
        steps.append("leave llama_workers empty")
    keys = ("tensor_split", "override_tensor", *(() if host == head else ("memory_mib", "reserve_mib")))
    variables_to_remove = [f"llama_server_{key}" for key in keys if getattr(server, key)]
    if best_host.override_tensor:
        steps.append(f"set llama_server_override_tensor to ['{best_host.override_tensor}']")
        variables_to_remove = [name for name in variables_to_remove if name != "llama_server_override_tensor"]
    if best_host.gpu_layers is not None:
        steps.append(f"set llama_server_gpu_layers to {best_host.gpu_layers}")
    elif server.gpu_layers is not None:
        variables_to_remove.append("llama_server_gpu_layers")
    variables_to_remove += ["llama_external_workers"] if context.cluster.external_workers else []
    steps += [f"remove {name}" for name in variables_to_remove]
    speeds = {"cluster_speed": cluster_speed, "host_speed": host_speed}
    speed_texts = {name: str(speed.generation_range or speed.prompt_range) for name, speed in speeds.items() if speed}
    users_text = f" for {cluster_speed.users} users" if cluster_speed.users > 1 else ""
    return [(host, {**speed_texts, "users": users_text, "steps": remedies.join_names(steps)})]


def slow_load(context: AdvisoryContext) -> Cases:
    """Return a case if hashing and copying in llama.cpp limit the load, and the collection has a patch against that."""
    estimate, release = context.plan.estimate, context.release
    has_patch = (
        fast_load.patch_of(release.protocol, release.mainline) and release.source in release_request.COMPILED_SOURCES
    )
    is_slow = (
        estimate.load_s
        and estimate.load_s >= SLOW_LOAD_S
        and str(estimate.load_limited_by).startswith(RPC_LIMIT_PREFIX)
    )
    if not is_slow or not has_patch or release.loads_fast:
        return []
    return [(None, {"seconds": f"{estimate.load_s:g}", "release": release.ref})]


def missing_fallbacks(context: AdvisoryContext) -> Cases:
    """Return the workers whose absence no fallback can cover, if the operator asks for fallbacks."""
    failures = context.plan.no_fallback if context.server.fallback else ()
    return [(None, {"where": f"{failure.without} ({failure.reason})"}) for failure in failures]


def uncounted_models(context: AdvisoryContext) -> Cases:
    """Return auxiliary models whose devices or sizes are unknown."""
    cases: Cases = []
    for auxiliary in context.plan.auxiliary_uncounted:
        placement_options = [options.by_name(name) for name in workload.PLACEMENT_OPTIONS[auxiliary.role]]
        words = [word for word in context.server.extra_args if options.by_word(word) in placement_options]
        options_text = " and ".join(words) or None
        values = {"variable": f"llama_model_{auxiliary.role}", "reason": auxiliary.reason, "option": options_text}
        cases.append((context.cluster.head, values))
    return cases


def missing_chat_template(context: AdvisoryContext) -> Cases:
    """Return the head if the model generates text and its file has no chat template."""
    model, head = context.plan.model, context.plan.head
    words = [word for word in context.server.extra_args if word.startswith("--chat-template")]
    if model.chat_template is not False or words or context.plan.estimate.generation_range is None:
        return []
    return [(head.host, {"model": model.name})]


def reduced_context(context: AdvisoryContext) -> Cases:
    """Return the head if the operator's llama_server_context is longer than requests can use."""
    head, server = context.plan.head, context.server
    if server.context <= head.context or server.context == DEFAULT_CONTEXT:
        return []
    limit = workload.trained_context(server, context.summary)
    values = {"requested": server.context, "context": head.context, "model": context.summary.name, "trained": limit}
    return [(head.host, {**values, "parallel": server.parallel})]


def lost_conversations(context: AdvisoryContext) -> Cases:
    """Return the head if the operator wants conversations to survive a restart, and llama-server cannot restore them."""
    reason = context.server.keep_conversations and prompt_cache.why_not_on_disk(context.candidate)
    return [(context.plan.head.host, {"reason": reason})] if reason else []


def slow_conversations(context: AdvisoryContext) -> Cases:
    """Return the head if restoring a conversation takes at least as long as computing it."""
    conversations_plan = context.plan.head.conversations
    if not conversations_plan or conversations_plan.move_s < conversations_plan.computing_s:
        return []
    values = {"restore_time": f"{conversations_plan.move_s:g}", "compute_time": f"{conversations_plan.computing_s:g}"}
    return [(context.plan.head.host, values)]


def shared_context(context: AdvisoryContext) -> Cases:
    """Return the head if parallel requests divide the context, and each gets less than it could use."""
    head = context.plan.head
    if head.context_per_request == min(head.context, workload.trained_context(context.server, context.summary)):
        return []
    values = {"context": head.context, "per_request": head.context_per_request}
    return [(head.host, {**values, "parallel": context.server.parallel})]
