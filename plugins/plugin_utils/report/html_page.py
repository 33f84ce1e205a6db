# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of a plan, its verification and its measurements, as one self-contained HTML file."""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import redaction, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import (
    benchmark_table,
    bundle,
    memory_text,
    plan_text,
    speed_text,
)
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATE_FOLDER = Path(__file__).parent


def _printable(value: Any) -> Any:
    """Return the printable value of a template expression."""
    if value is None:
        return ""
    return validation.printable(value, None) if isinstance(value, str) and not isinstance(value, Markup) else value


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9._/-]+", "-", title.lower()).strip("-")


@functools.cache
def _jinja_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE_FOLDER), autoescape=True, undefined=StrictUndefined, finalize=_printable
    )
    environment.filters.update(anchor=_anchor)
    return environment


def _memory_view(plan: Plan) -> dict[str, Any]:
    rows = []
    for entry in plan.placement:
        bar_mib = max(entry.capacity_mib, entry.total_mib, 1)
        sizes_mib = {name: memory_text.size_mib(entry, name) for name in memory_text.COMPONENT_SIGNS}
        sizes_text = ", ".join(f"{name} {size_mib:.0f} MiB" for name, size_mib in sizes_mib.items())
        rows.append(
            {
                "entry": entry,
                "overcommitment": memory_text.overcommitment_text(entry),
                "label": f"{sizes_text} of {entry.capacity_mib:.0f} MiB",
                "shares": [
                    (name, f"{100 * size_mib / bar_mib:.2f}")
                    for name, size_mib in (*sizes_mib.items(), ("auxiliary", entry.auxiliary_mib))
                ],
                "amounts": [memory_text.amount_text(entry, name) for name in memory_text.COMPONENT_SIGNS],
                "sum": f"{entry.total_mib:.0f}",
                "capacity": f"{entry.capacity_mib:.0f}",
            }
        )
    notes = [
        *memory_text.auxiliary_model_lines(plan),
        *memory_text.uncounted_model_lines(plan),
        *memory_text.reason_lines(plan),
    ]
    return {"rows": rows, "has_auxiliary": bool(plan.auxiliary_models), "notes": notes}


def _branch_view(host: str, rows: list[plan_text.TopologyRow]) -> dict[str, Any]:
    link = rows[0].link
    return {
        "host": host,
        "kind": link.kind if link else "",
        "link_text": f"{link.one_way_ms:g} ms, {link.gbit_per_s:g} Gbit/s" if link else "",
        "is_measured": bool(link and link.measured),
        "rows": rows,
    }


def _topology_view(plan: Plan) -> dict[str, Any]:
    """Return the head with its own devices, and a branch for each host with workers."""
    local_rows: list[plan_text.TopologyRow] = []
    branches: dict[str, list[plan_text.TopologyRow]] = {}
    for row in plan_text.topology_rows(plan):
        if row.endpoint:
            branches.setdefault(row.host, []).append(row)
        else:
            local_rows.append(row)
    if not local_rows and not branches:
        local_rows = [plan_text.TopologyRow("", "its processor", "", "all layers", None)]
    return {
        "head": plan.head.host,
        "url": plan.head.url,
        "local_rows": local_rows,
        "branches": [_branch_view(host, rows) for host, rows in branches.items()],
        "unused": plan_text.unused_workers_text(plan),
    }


def _command_views(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "host": command.host,
            "service": command.name,
            "lines": plan_text.command_lines(
                command.argv,
                {
                    name: value if bundle.is_public(name, value) else redaction.marker(f"value of {name}")
                    for name, value in command.environment.items()
                },
                "",
            ),
        }
        for command in plan_text.commands(plan)
    ]


def _version_lines(plan: Plan) -> list[str]:
    rows = [["host", "build", "backend", "options"]]
    for name, host in plan.hosts.items():
        for build in host.builds:
            options_text = " ".join(f"{option}={value}" for option, value in sorted(build.cmake_options.items()))
            rows.append([name, build.id, build.backend, options_text])
    return tables.format_table(rows).splitlines() if len(rows) > 1 else []


def _checks_view(report: Report) -> dict[str, Any]:
    counts = Counter(check.status for check in report.checks)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "not tested") if counts[status])
    return {
        "rows": report.checks,
        "summary": f"Of {len(report.checks)} checks: {summary}." if report.checks else "Nothing was checked.",
    }


def _plan_view(plan: Plan | Refused, changes: Sequence[str]) -> dict[str, Any]:
    """Return the plan's values for the template, with the titles of its sections in ``sections``."""
    sections = plan_text.plan_sections(plan, changes)
    refused = "Refused" in sections
    view: dict[str, Any] = {"memories": {}, "tables": {}, "other": sections, "reasons": plan.reasons if refused else []}
    titles = [title for title in sections if title != "Refused"]
    if isinstance(plan, Plan):
        view.update(
            topology=_topology_view(plan),
            tables={"Models": speed_text.model_rows(plan), "Shapes": speed_text.shape_rows(plan)},
            notes={
                "Models": [plan_text.ROUTER_NOTE, plan_text.first_model_note(plan)],
                "Shapes": speed_text.shape_notes(plan),
            },
            memories={title: _memory_view(model_plan) for title, model_plan in memory_text.memory_plans(plan).items()},
            commands=_command_views(plan),
            advisories=[(plan_text.advisory_title(entry), entry) for entry in plan.advisories],
            speed={"rows": speed_text.speed_rows(plan), "notes": speed_text.speed_notes(plan)},
        )
        sections["Versions"] = _version_lines(plan)
        titles += ["Versions"] if sections["Versions"] else []
    return {**view, "sections": ["Refused"] * refused + titles}


def page(
    plan: Plan | Refused | None,
    changes: Sequence[str] = (),
    verification: Report | None = None,
    benchmark: Benchmark | None = None,
) -> str:
    """Return the HTML of a plan, which may be refused, with its verification and measurements."""
    view = _plan_view(plan, changes) if plan else {"sections": [], "other": {}, "memories": {}, "tables": {}}
    refusal_titles = [title for title in view["sections"] if title == "Refused"]
    first_titles = [
        title for title in view["sections"] if title in ("Models", "Topology", "Predicted speed", *view["memories"])
    ]
    other_titles = [title for title in view["sections"] if title not in (*refusal_titles, *first_titles)]
    check_titles = ["Checks"] if verification else []
    cluster = benchmark.cluster if benchmark else verification.cluster if verification else ""
    title, *subtitle_lines = (
        plan_text.title_lines(plan) if plan else [f"{'Benchmark' if benchmark else 'Verification'} of {cluster}"]
    )
    return (
        _jinja_environment()
        .get_template("page.html.j2")
        .render(
            {
                **view,
                "style": Markup((TEMPLATE_FOLDER / "page.css").read_text()),
                "benchmark": benchmark_table.view(benchmark) if benchmark else {},
                "plan": plan,
                "title": title.strip(),
                "subtitle": " ".join(line.strip() for line in subtitle_lines),
                "checks": _checks_view(verification) if verification else None,
                "sections": [
                    *refusal_titles,
                    *check_titles,
                    *first_titles,
                    *(["Measured and predicted"] if benchmark else []),
                    *other_titles,
                ],
            }
        )
    )
