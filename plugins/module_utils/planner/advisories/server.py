# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When advisories are met that concern llama-server: who may ask it, its options, its speed."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import fast_load, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.links import why_no_unit_closes
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import auxiliary_models, layout

SLOW_LOAD_S = 60
"""Predicted seconds of a load from which on it is said what would shorten it; assumed."""
RPC_LIMITS = "RPC on "
"""What limits such a load, as the estimate names it."""
DEFAULT_CONTEXT = 8192
"""Of llama_server_context: who leaves it out asks for no more than the model has."""


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
    reason = why_no_unit_closes(context, head.host)
    if host.host_settings:
        reason += ", and neither firewalld nor ufw nor nftables is active there"
    return [(head.host, {"networks": ", ".join(head.allowed), "reason": reason})]


def slower_than_one_host(context: AdvisoryContext) -> Cases:
    """The known-answer model is there to try workers, however fast, and an operator may want all of them."""
    estimate, server = context.plan.estimate, context.server
    together, best = estimate.generation_range, estimate.best_single_host
    wanted = context.plan.model.known_answer or context.cluster.placement == layout.ALL
    if wanted or not together or not estimate.links or not best.faster:
        return []
    host, head = best.host, context.cluster.head
    steps = [f"put {host} into llama_head in place of {head}, with the model's files"] if host != head else []
    if any(own.is_worker for own in context.cluster.hosts.values()):
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


def slow_load(context: AdvisoryContext) -> Cases:
    """What llama.cpp itself does to what it sends takes longest, and the collection has a patch for that."""
    estimate, release = context.plan.estimate, context.release
    patch = fast_load.patch_of(release.protocol, release.mainline) and release.source in release_request.COMPILED
    slow = estimate.load_s and estimate.load_s >= SLOW_LOAD_S and str(estimate.load_limited_by).startswith(RPC_LIMITS)
    if not slow or not patch or release.loads_fast:
        return []
    return [(None, {"seconds": f"{estimate.load_s:g}", "release": release.ref})]


def without_fallback(context: AdvisoryContext) -> Cases:
    """The workers that cannot be spared, where the operator wants that."""
    lost = context.plan.no_fallback if context.server.fallback else ()
    return [(None, {"where": f"{entry.without} ({entry.reason})"}) for entry in lost]


def uncounted(context: AdvisoryContext) -> Cases:
    """Models beside the one that is served of which nobody knows where they will be, or how large they are."""
    cases: Cases = []
    for one in context.plan.auxiliary_uncounted:
        placing = [options.by_name(name) for name in auxiliary_models.PLACING[one.role]]
        words = [word for word in context.server.extra_args if options.by_word(word) in placing]
        values = {"variable": f"llama_model_{one.role}", "why": one.reason, "word": " and ".join(words) or None}
        cases.append((context.cluster.head, values))
    return cases


def cut_context(context: AdvisoryContext) -> Cases:
    """A context that was asked for and is longer than requests can use."""
    head, server = context.plan.head, context.server
    if server.context <= head.context or server.context == DEFAULT_CONTEXT:
        return []
    trained = server_settings.trained_context(server, context.summary)
    values = {"wanted": server.context, "context": head.context, "model": context.summary.name, "trained": trained}
    return [(head.host, {**values, "parallel": server.parallel})]


def shared_context(context: AdvisoryContext) -> Cases:
    """A context that requests at the same time divide among them, so that each has less than it could use."""
    head = context.plan.head
    if head.context_per_request == min(head.context, server_settings.trained_context(context.server, context.summary)):
        return []
    values = {"context": head.context, "each": head.context_per_request}
    return [(head.host, {**values, "parallel": context.server.parallel})]
