# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The models that fit a cluster, as a table for the terminal."""

import textwrap
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import what_fits


def text_of(results: Sequence[what_fits.FitResult], query: what_fits.FitQuery) -> str:
    served_rows = [["model", "parameters", "quantisation", "GiB", "context", "tokens/s", "prompts", "where"]]
    unserved_rows = [["not served", "parameters", "quantisation", "GiB", "why"]]
    for result in results:
        if result.refusal_reason:
            reason = textwrap.shorten(result.refusal_reason, tables.MAX_LINE_LENGTH, placeholder=" …")
            unserved_rows.append([result.model, *_cells(result), reason])
        else:
            served_rows.append([result.model, *_cells(result)])
    note = f"Contexts: {query.context} tokens, and the largest that fits. Speeds are for an empty context. {what_fits.ORDER_TEXT.format(query.speed)}"
    return "\n".join(
        [
            *textwrap.wrap(note, tables.MAX_LINE_LENGTH),
            *("\n" + tables.format_table(table_rows) for table_rows in (served_rows, unserved_rows) if table_rows[1:]),
            "",
        ]
    )


def _cells(result: what_fits.FitResult) -> list[str]:
    parameter_counts = dict.fromkeys((result.parameters, result.active_parameters))
    parameters = " of ".join(f"{count / 1e9:.{0 if count > 1e10 else 1}f} B" for count in reversed(parameter_counts))
    cells = [parameters, result.quantisation, f"{result.bytes / what_fits.GIB:.1f}"]
    if result.refusal_reason:
        return cells
    contexts = dict.fromkeys((result.context, result.longest_context))
    context_range = " to ".join(f"{tokens // 1024}k" if tokens >= 1024 else str(tokens) for tokens in contexts)
    hosts_text = result.hosts[0] if len(result.hosts) == 1 else f"{len(result.hosts)} hosts"
    location = f"{result.devices} devices on {hosts_text}" if result.devices > 1 else hosts_text
    speed_text = str(result.generation_range or "")
    if result.users and result.users.users > 1:
        speed_text += f", {result.users.generation_range} for {result.users.users}"
    return [*cells, context_range, speed_text, str(result.prompt_range or ""), location]
