# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of a plan as one HTML file that needs nothing else."""

from __future__ import annotations

import html

from ansible_collections.llamacpp.cluster.plugins.module_utils.check import report
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import untrusted

COLOURS = {"weights": "#2b6cb0", "kv": "#dd6b20", "compute": "#a0aec0"}
STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #1a202c; background: #fff }
pre { background: #f7fafc; padding: 1em; overflow-x: auto; font-size: 13px }
table { border-collapse: collapse; width: 100% }
th, td { padding: .3em .8em .3em 0; text-align: left; white-space: nowrap }
td.number { text-align: right }
td.bar { width: 40% }
.whole { display: flex; height: 1.2em; background: #edf2f7 }
.over { outline: 2px solid #9b2c2c }
.refused { color: #9b2c2c }
"""


def escape(text: str) -> str:
    """A line as HTML shows it, whoever wrote it."""
    return html.escape(untrusted.printable(text, None))


def _bar(entry: dict) -> str:
    whole = max(entry["capacity_mib"], entry["total_mib"], 1)
    shares = {part: 100 * entry[f"{part}_mib"] / whole for part in COLOURS}
    parts = "".join(
        f'<div style="width: {share:.2f}%; background: {COLOURS[part]}" title="{part}"></div>'
        for part, share in shares.items()
    )
    return f'<div class="whole{" over" * bool(report.over(entry))}">{parts}</div>'


def _memory(plan: dict) -> str:
    rows = "".join(
        f"<tr><td>{escape(entry['device'])}<td>{escape(entry['host'])}<td class=bar>{_bar(entry)}"
        + "".join(f"<td class=number>{report.amount(entry, part)}" for part in COLOURS)
        + f"<td class=number>≤ {entry['total_mib']:.0f}<td class=number>{entry['capacity_mib']:.0f}<td>{report.over(entry)}"
        for entry in plan["placement"]
    )
    legend = ", ".join(f'<span style="color: {colour}">■</span> {part}' for part, colour in COLOURS.items())
    head = "<tr><th>device<th>host<th>memory<th>weights<th>KV<th>compute<th>sum<th>of<th>"
    reasons = chr(10).join(map(escape, [*report.without(plan), *report.reasons(plan)]))
    return f"<table>{head}{rows}</table><p>In MiB, ≤ an upper bound. {legend}</p><pre>{reasons}</pre>"


def page(plan: dict, changed: list[str] | None = None) -> str:
    """HTML of a plan, a refused one too.

    :param changed: of report.changes_of; None leaves that part out.
    """
    title, *rest = (line.strip() for line in report.plan_title(plan))
    parts = []
    for name, lines in report.plan_parts(plan, changed).items():
        body = _memory(plan) if name == "Memory" else f"<pre>{chr(10).join(map(escape, lines))}</pre>"
        parts.append(f"<h2{' class=refused' if name == 'Refused' else ''}>{escape(name)}</h2>{body}")
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(' '.join(rest))}</p>{''.join(parts)}</html>\n"
    )
