# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The models that fit a cluster, as a table for the terminal."""

import textwrap
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import what_fits


def text_of(rows: Sequence[what_fits.FitResult], query: what_fits.FitQuery) -> str:
    served_rows = [["model", "parameters", "quantisation", "GiB", "context", "tokens/s", "prompts", "where"]]
    other_rows = [["not served", "parameters", "quantisation", "GiB", "why"]]
    for row in rows:
        if row.why_not:
            reason = textwrap.shorten(row.why_not, tables.PAGE_WIDTH, placeholder=" …")
            other_rows.append([row.model, *_cells(row), reason])
        else:
            served_rows.append([row.model, *_cells(row)])
    note = f"Contexts: {query.context} tokens, and the largest that fits. Speeds are for an empty context. {what_fits.ORDER_TEXT.format(query.speed)}"
    return "\n".join(
        [
            *textwrap.wrap(note, tables.PAGE_WIDTH),
            *("\n" + tables.table(table_rows) for table_rows in (served_rows, other_rows) if table_rows[1:]),
            "",
        ]
    )


def _cells(row: what_fits.FitResult) -> list[str]:
    counts = dict.fromkeys((row.parameters, row.active))
    parameters = " of ".join(f"{count / 1e9:.{0 if count > 1e10 else 1}f} B" for count in reversed(counts))
    cells = [parameters, row.quantisation, f"{row.bytes / what_fits.GIB:.1f}"]
    if row.why_not:
        return cells
    contexts = dict.fromkeys((row.context, row.longest_context))
    context_range = " to ".join(f"{tokens // 1024}k" if tokens >= 1024 else str(tokens) for tokens in contexts)
    hosts = row.hosts[0] if len(row.hosts) == 1 else f"{len(row.hosts)} hosts"
    location = f"{row.devices} devices on {hosts}" if row.devices > 1 else hosts
    speed = str(row.generation_range or "")
    if row.users and row.users.users > 1:
        speed += f", {row.users.generation_range} for {row.users.users}"
    return [*cells, context_range, speed, str(row.prompt_range or ""), location]
