# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator has to know of memory and context of a plan that can be applied: conditions of advisories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import compute_buffers, kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.options import IK_LLAMA
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import DevicePlacement
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases

MICRO_BATCHES = (256, 128, 64)
ATTENTION_BATCH = 256
"""MiB; the default of newer commits of ik_llama.cpp."""
DEFAULT_CONTEXT = 8192
"""Of llama_server_context: who leaves it out asks for no more than the model has."""


def _smaller(settings: kv_cache.Settings, flashes: bool, parallel: int) -> Iterator[tuple[str, kv_cache.Settings]]:
    """What makes compute buffers smaller, the mildest first: what to do, and the settings that it gives.

    :param parallel: slots that share the context.
    """
    flash = "" if flashes else "set llama_server_flash_attention to 'on'"
    if flash:
        settings = settings._replace(flash_attention="on")
        yield flash, settings
    before = f"{flash}, and " if flash else ""
    if settings.fork == IK_LLAMA and not 0 < (settings.attention_batch or 0) <= ATTENTION_BATCH:
        settings = settings._replace(attention_batch=ATTENTION_BATCH)
        words = f"-amb {ATTENTION_BATCH}"
        yield f"{before}add {words} to llama_server_extra_args", settings
        before = f"{before}add {words} to llama_server_extra_args, and "
    for tokens in MICRO_BATCHES:
        if tokens < settings.tokens:
            yield f"{before}set llama_server_micro_batch to {tokens}", settings._replace(micro_batch=tokens)
    settings = settings._replace(micro_batch=min(settings.tokens, MICRO_BATCHES[-1]))
    words = f"{before}set llama_server_micro_batch to {settings.micro_batch}"
    for tokens in remedies.shorter_contexts(settings.context, parallel):
        yield f"{words}, and set llama_server_context to {tokens}", settings._replace(context=tokens)


class OvercommittedDevice(NamedTuple):
    """A device with more than it holds: MiB that weights leave, and of its cache."""

    room: float
    cache: float


def _remedy(
    settings: kv_cache.Settings,
    summary: ModelSummary,
    generation: int,
    over: Sequence[OvercommittedDevice],
    parallel: int,
) -> str:
    """The mildest change with which all of the devices hold cache and compute buffer."""
    flashes = compute_buffers.uses_flash(summary, settings, generation)
    whole = max(1, sum(kv_cache.sizes(summary, settings, generation)[0]))
    for words, smaller in _smaller(settings, flashes, parallel):
        share = sum(kv_cache.sizes(summary, smaller, generation)[0]) / whole
        buffer = compute_buffers.bound(summary, smaller, generation) / MIB
        if all(device.cache * share + buffer <= device.room for device in over):
            return words
    return "use a smaller model, or devices with more memory"


def over_capacity(context: AdvisoryContext) -> Cases:
    """Devices whose weights, cache and bound of the compute buffer are more together than they hold."""
    entries: Sequence[DevicePlacement] = context.plan.placement if context.plan.fits else ()
    over = [entry for entry in entries if entry.total_mib > entry.capacity_mib]
    if not over:
        return []
    crowded = [
        OvercommittedDevice(entry.capacity_mib - entry.weights_mib - entry.further_mib, entry.kv_mib) for entry in over
    ]
    hosts = {entry.host for entry in over}
    settings = server_settings.settings_of(context.server, context.summary, context.release.fork)
    smaller = _remedy(settings, context.summary, context.generation, crowded, context.server.parallel)
    values = {
        "devices": ", ".join(
            f"{entry.device} of {entry.host} (≤ {entry.total_mib:.0f} of {entry.capacity_mib:.0f} MiB)"
            for entry in over
        ),
        "compute": round(max(entry.compute_mib for entry in over)),
        "smaller": smaller,
    }
    return [(hosts.pop() if len(hosts) == 1 else None, values)]


def uncounted(context: AdvisoryContext) -> Cases:
    """Models beside the one that is served of which nobody knows where they will be, or how large they are."""
    return [
        (context.plan.head.host, {"variable": f"llama_model_{one.role}", "why": one.reason})
        for one in context.plan.further_uncounted
    ]


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
