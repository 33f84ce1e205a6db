# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator has to know of memory and context of a plan that can be applied: conditions of advisories."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import DevicePlacement
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases

DEFAULT_CONTEXT = 8192
"""Of llama_server_context: who leaves it out asks for no more than the model has."""


def over_capacity(context: AdvisoryContext) -> Cases:
    """Devices whose weights, cache and bound of the compute buffer are more together than they hold."""
    entries: Sequence[DevicePlacement] = context.plan.placement if context.plan.fits else ()
    over = [entry for entry in entries if entry.total_mib > entry.capacity_mib]
    if not over:
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
