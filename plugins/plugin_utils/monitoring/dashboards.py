# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Dashboards for Grafana, from the description in dashboards.yml: what is the same for all panels of a kind stands here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ansible.module_utils.common.yaml import yaml_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json

DESCRIPTION = Path(__file__).with_name("dashboards.yml")
SCHEMA_VERSION = 39
"""Of Grafana 11; newer ones bring a dashboard up to date when they load it."""
COLUMNS, HEIGHT = 24, 8
"""Of Grafana's grid, and of a row of panels there."""
TAG = "llamacpp"
LINK = {
    "type": "dashboards",
    "title": "llama.cpp",
    "tags": [TAG],
    "icon": "dashboard",
    "tooltip": "",
    "asDropdown": False,
    "targetBlank": False,
    "keepTime": True,
    "includeVars": True,
}
"""To the others."""
SOURCE = {"type": "prometheus", "uid": "${source}"}
LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "timeseries": {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        **LAST,
        "orientation": "horizontal",
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "value_and_name",
    },
    "names": {**LAST, "orientation": "horizontal", "colorMode": "value", "graphMode": "none", "textMode": "name"},
    "bargauge": {**LAST, "orientation": "horizontal", "displayMode": "basic", "valueMode": "color"},
}
"""Kind of a panel → its options; Grafana has defaults for others. ``names`` shows series by their legends, those of 0 in green and those of 1 in red."""
PLANNED = {
    "matcher": {"id": "byRegexp", "options": "/planned/"},
    "properties": [
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "text"}},
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
        {"id": "custom.hideFrom", "value": {"legend": True, "tooltip": False, "viz": False}},
    ],
}
"""For lines with ``planned`` in their legend: of no colour, and out of the legend, in which those of several models have no room."""


class Panel(NamedTuple):
    """A picture of some queries."""

    title: str
    queries: Mapping[str, str]
    """legend → PromQL, in which the dashboard's ``where``, in braces, replaces ``{}``"""
    kind: Annotated[str, tuple(OPTIONS)] = "timeseries"
    unit: str = "short"
    """as Grafana calls it"""
    says: str = ""
    """what it means, where its title does not tell"""
    red_from: float | None = None
    """value; Grafana's own is 80, of whatever"""


class Dashboard(NamedTuple):
    """A page."""

    title: str
    where: str
    """labels by which its variables select"""
    variables: Mapping[str, str]
    """name → metric whose label of that name has the values"""
    rows: tuple[tuple[Panel, ...], ...]


def described() -> dict[str, Dashboard]:
    """Name of a dashboard → its description."""
    return {name: typed_json.parse(Dashboard, given) for name, given in yaml_load(DESCRIPTION.read_text()).items()}


def _variable(name: str, metric: str) -> dict[str, Any]:
    shown = {"name": name, "type": "query", "label": name, "datasource": SOURCE, "refresh": 2, "sort": 1}
    several = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return {**shown, **several, "query": {"query": f"label_values({metric}, {name})", "refId": "A"}}


def _panel(number: int, panel: Panel, where: str, place: Mapping[str, int]) -> dict[str, Any]:
    over_time = panel.kind == "timeseries"
    red_from = 1 if panel.kind == "names" else panel.red_from
    steps = [{"color": "green", "value": None}, *([{"color": "red", "value": red_from}] if red_from else [])]
    fields = {"unit": panel.unit, "min": 0, "noValue": "none", "thresholds": {"mode": "absolute", "steps": steps}}
    fields |= {"max": 1} if panel.unit == "percentunit" else {}
    return {
        "id": number,
        "type": "stat" if panel.kind == "names" else panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": fields, "overrides": [PLANNED] if over_time else []},
        "options": OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.replace("{}", f"{{{where}}}"),
                "legendFormat": legend,
                "instant": not over_time,
                "range": over_time,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def page(name: str, dashboard: Dashboard) -> dict[str, Any]:
    """The JSON of a dashboard."""
    places = []
    for number, row in enumerate(dashboard.rows):
        place = {"h": HEIGHT, "w": COLUMNS // len(row), "y": HEIGHT * number}
        places += [(panel, {**place, "x": place["w"] * at}) for at, panel in enumerate(row)]
    source = {"name": "source", "type": "datasource", "label": "Prometheus", "query": "prometheus", "refresh": 1}
    return {
        "uid": f"llamacpp-{name}",
        "title": dashboard.title,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "graphTooltip": 1,
        "links": [LINK],
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *(_variable(*given) for given in dashboard.variables.items())]},
        "panels": [_panel(number, panel, dashboard.where, at) for number, (panel, at) in enumerate(places, 1)],
    }


def files() -> dict[str, str]:
    """Name of a file → the JSON of a dashboard, for Grafana's provisioning or its import."""
    return {f"{name}.json": json.dumps(page(name, given), indent=1) + "\n" for name, given in described().items()}
