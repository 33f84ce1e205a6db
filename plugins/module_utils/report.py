# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan and verification as tables for a person."""

from __future__ import annotations


def table(rows: list[list[str]]) -> str:
    """Columns as wide as they must be; the last one is not filled up."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  " + "  ".join([cell.ljust(width) for cell, width in zip(row, widths)] + [row[-1]]).rstrip() for row in rows
    )


def plan_table(plan: dict) -> str:
    """Release, model and what each device holds, in MiB."""
    head, release = plan["head"], plan["release"]
    lines = [
        f"  release  {release['ref']} ({', '.join(sorted({build['id'] for host in plan['hosts'].values() for build in host['builds']}))})",
        f"  model    {plan['model']['name']}",
        f"  head     {head['host']}, {head['url']}",
        "\n",
    ]
    rows = [["device", "host", "layers", "weights", "KV", "compute", "capacity (MiB)"]]
    for entry in plan["placement"]:
        rows.append(
            [
                entry["device"],
                entry["host"],
                f"{entry['layers']}{' + output' if entry['output'] else ''}",
                f"{entry['weights_mib']:.1f}",
                f"{entry['kv_mib']:.1f}",
                f"≤ {entry['compute_mib']:.1f}",
                str(entry["capacity_mib"]),
            ]
        )
    if not plan["placement"]:
        rows.append(["CPU", head["host"], str(plan["model"]["layers"]), "", "", "", ""])
    return "\n".join(lines) + table(rows) + "\n"


MARKS = {"passed": "ok", "failed": "FAILED", "not tested": "not tested"}


def checks_table(checks: list[dict]) -> str:
    return table([[MARKS[check["status"]], check["name"], check["subject"], check["evidence"]] for check in checks])
