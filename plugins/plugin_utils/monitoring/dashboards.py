# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Grafana dashboards, generated from dashboards.yml: this module adds what all panels of a kind have in common."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ansible.module_utils.common.yaml import yaml_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json

DASHBOARDS_FILE = Path(__file__).with_name("dashboards.yml")
SCHEMA_VERSION = 39
"""Schema version of Grafana 11; newer versions convert a dashboard when they load it."""
GRID_COLUMNS, PANEL_HEIGHT = 24, 8
"""Columns of Grafana's grid, and height of a row of panels."""
DASHBOARD_TAG = "llamacpp"
DASHBOARD_LINK = {
    "type": "dashboards",
    "title": "llama.cpp",
    "tags": [DASHBOARD_TAG],
    "icon": "dashboard",
    "tooltip": "",
    "asDropdown": False,
    "targetBlank": False,
    "keepTime": True,
    "includeVars": True,
}
DATA_SOURCE = {"type": "prometheus", "uid": "${source}"}
LAST_VALUE = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
PANEL_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "timeseries": {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        **LAST_VALUE,
        "orientation": "horizontal",
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "value_and_name",
    },
    "names": {**LAST_VALUE, "orientation": "horizontal", "colorMode": "value", "graphMode": "none", "textMode": "name"},
    "bargauge": {**LAST_VALUE, "orientation": "horizontal", "displayMode": "basic", "valueMode": "color"},
}
"""Options of each kind of panel; Grafana uses its defaults for the rest. ``names`` shows series by their legends: value 0 in green, value 1 in red."""
PLANNED_LINES_OVERRIDE = {
    "matcher": {"id": "byRegexp", "options": "/planned/"},
    "properties": [
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "text"}},
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
        {"id": "custom.hideFrom", "value": {"legend": True, "tooltip": False, "viz": False}},
    ],
}
"""Override for lines with ``planned`` in their legend: grey, and absent from the legend, which has no space for several models."""


class Panel(NamedTuple):
    title: str
    queries: Mapping[str, str]
    """Legend → PromQL, in which the dashboard's ``selector``, in braces, replaces ``{}``."""
    kind: Annotated[str, tuple(PANEL_OPTIONS)] = "timeseries"
    unit: str = "short"
    """Unit in Grafana's notation."""
    description: str = ""
    """Explanation, unless the title is enough."""
    red_from: float | None = None
    """Minimum value that is shown in red; Grafana's own default is 80 for any unit."""


class Dashboard(NamedTuple):
    title: str
    selector: str
    """Label filter that uses the dashboard's variables."""
    variables: Mapping[str, str]
    """Name of each variable → metric with a label of this name, which provides the values."""
    rows: tuple[tuple[Panel, ...], ...]


def read_dashboards() -> dict[str, Dashboard]:
    """Return the description of each dashboard, by name."""
    return {
        name: typed_json.parse(Dashboard, description)
        for name, description in yaml_load(DASHBOARDS_FILE.read_text()).items()
    }


def _variable_json(name: str, metric: str) -> dict[str, Any]:
    properties = {"name": name, "type": "query", "label": name, "datasource": DATA_SOURCE, "refresh": 2, "sort": 1}
    selection = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return {**properties, **selection, "query": {"query": f"label_values({metric}, {name})", "refId": "A"}}


def _panel_json(panel_id: int, panel: Panel, selector: str, position: Mapping[str, int]) -> dict[str, Any]:
    is_time_series = panel.kind == "timeseries"
    red_from = 1 if panel.kind == "names" else panel.red_from
    steps = [{"color": "green", "value": None}, *([{"color": "red", "value": red_from}] if red_from else [])]
    defaults = {"unit": panel.unit, "min": 0, "noValue": "none", "thresholds": {"mode": "absolute", "steps": steps}}
    defaults |= {"max": 1} if panel.unit == "percentunit" else {}
    return {
        "id": panel_id,
        "type": "stat" if panel.kind == "names" else panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATA_SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": [PLANNED_LINES_OVERRIDE] if is_time_series else []},
        "options": PANEL_OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": query.replace("{}", f"{{{selector}}}"),
                "legendFormat": legend,
                "instant": not is_time_series,
                "range": is_time_series,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def dashboard_json(name: str, dashboard: Dashboard) -> dict[str, Any]:
    panels = []
    for row_index, row in enumerate(dashboard.rows):
        row_position = {"h": PANEL_HEIGHT, "w": GRID_COLUMNS // len(row), "y": PANEL_HEIGHT * row_index}
        panels += [(panel, {**row_position, "x": row_position["w"] * column}) for column, panel in enumerate(row)]
    source = {"name": "source", "type": "datasource", "label": "Prometheus", "query": "prometheus", "refresh": 1}
    return {
        "uid": f"llamacpp-{name}",
        "title": dashboard.title,
        "tags": [DASHBOARD_TAG],
        "schemaVersion": SCHEMA_VERSION,
        "graphTooltip": 1,
        "links": [DASHBOARD_LINK],
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *(_variable_json(*variable) for variable in dashboard.variables.items())]},
        "panels": [
            _panel_json(index, panel, dashboard.selector, position) for index, (panel, position) in enumerate(panels, 1)
        ],
    }


def dashboard_files() -> dict[str, str]:
    """Return the JSON of each dashboard by file name, for Grafana's provisioning or import."""
    return {
        f"{name}.json": json.dumps(dashboard_json(name, dashboard), indent=1) + "\n"
        for name, dashboard in read_dashboards().items()
    }
