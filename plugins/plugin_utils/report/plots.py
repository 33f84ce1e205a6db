# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Draws figures as SVG by pygal, without styles, scripts, fonts and dates: colours are those of the page (page.css)."""

from __future__ import annotations

import importlib.util
import string
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report.curves import Curve, Figure, Point

WIDTH, HEIGHT = 440, 270
"""Of a figure, in the pixels of its own text; the page scales it."""
LABEL_PIXELS = 12
TEXTS = ("label_font_size", "major_label_font_size", "title_font_size", "value_label_font_size")
SPREAD_WIDTH = 4
CLOSEST = 0.09
"""Labels of the x axis keep this part of its length between them."""
MISSING = (
    "The curves are not drawn, since pygal is not installed on the controller; all figures are in the tables. Install what "
    "requirements.txt of the collection names, or pip install 'pygal>=3.1,<4', into the environment of ansible-playbook, and write the page again."
)


def missing() -> str | None:
    """Why nothing can be drawn, or None."""
    return None if importlib.util.find_spec("pygal") else MISSING


def letter(number: int) -> str:
    """By which a curve is known beside its colour."""
    return string.ascii_uppercase[number]


def figure_of(value: float) -> str:
    """A number with three digits that count, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def point_of(point: Point, figure: Figure) -> str:
    """The value of a point, with its spread where the figure has one."""
    return figure_of(point.y) + (f" ± {figure_of(point.spread)}" if "±" in figure.shown else "")


def _labels(values: set[float]) -> list[float]:
    """Those that can stand beside each other; the first and the last one always do."""
    ordered = sorted(values)
    least = CLOSEST * (ordered[-1] - ordered[0])
    kept = [ordered[-1]]
    for value in reversed(ordered[:-1]):
        if kept[-1] - value >= least and (value == ordered[0] or value - ordered[0] >= least):
            kept.append(value)
    return sorted({ordered[0], *kept})


def _lettered_points(figure: Figure) -> list[int]:
    """Of each curve the point that has its letter: the last one, or one before it where letters would cover each other."""
    whole = [point for curve in figure.curves for point in curve.points]
    left, right = min(point.x for point in whole), max(point.x for point in whole)
    highest = max(point.y for point in whole) or 1
    taken: list[tuple[float, float]] = []
    named = []
    for curve in figure.curves:
        places = [((point.x - left) / (right - left), point.y / highest) for point in curve.points]
        near = [
            any(abs(x - other) < CLOSEST and abs(y - height) < CLOSEST for other, height in taken) for x, y in places
        ]
        index = next((index for index in reversed(range(len(places))) if not near[index]), len(places) - 1)
        taken.append(places[index])
        named.append(index)
    return named


def _values(curve: Curve, figure: Figure, named: int) -> list[dict[str, Any]]:
    """:param named: index of the point that has the letter."""
    entries = []
    for point in curve.points:
        text = f"{curve.name}: {point_of(point, figure)} {figure.unit} at {point.x:g}"
        if point.predicted is not None:
            text += f", {figure.dashed} {figure_of(point.predicted)}"
        shown = validation.printable(text)
        entry = {"value": (point.x, point.y), "formatter": lambda _value, shown=shown: shown}
        if point.spread:
            entry["ci"] = {"low": point.y - point.spread, "high": point.y + point.spread}
        entries.append(entry)
    entries[named]["label"] = letter(curve.number)
    return entries


def _predictions(curve: Curve, figure: Figure) -> list[dict[str, Any]]:
    return [
        {
            "value": (point.x, point.predicted),
            "formatter": lambda _value, point=point: validation.printable(
                f"{curve.name}: {figure.dashed} {figure_of(point.predicted)} {figure.unit} at {point.x:g}"
            ),
        }
        for point in curve.points
        if point.predicted is not None
    ]


def _clean(root: Any, classes: dict[int, str], label: str) -> Any:
    """What pygal made without styles, scripts, comments and ids; the values of points become their titles, which browsers show and read out."""
    for parent in list(root.iter()):
        for child in list(parent):
            tag = child.tag if isinstance(child.tag, str) else ""
            if (
                tag in ("defs", "title")
                or "tooltip-overlay" in child.get("class", "")
                or not tag
                or (tag == "desc" and child.get("class") != "value")
            ):
                parent.remove(child)
            elif tag == "desc":
                child.tag = "title"
                del child.attrib["class"]
    for node in root.iter():
        words = node.get("class", "").split()
        number = next((int(word[6:]) for word in words if word.startswith("color-")), None)
        if number is not None:
            node.set("class", f"series {classes[number]}")
    root.attrib.pop("id", None)
    root.set("role", "img")
    root.set("aria-label", validation.printable(label, None))
    return root


def _chart_class() -> Any:
    """pygal's chart of x and y, which asks for spreads with both of them where only y is meant (seen in 3.1.3)."""
    import pygal

    class Chart(pygal.XY):
        def _confidence_interval(self, node, x, y, value, metadata):
            if metadata and "ci" in metadata:
                low, high = (self.view.y(metadata["ci"][end]) for end in ("low", "high"))
                self.svg.confidence_interval(node, x, low, high, SPREAD_WIDTH)

    return Chart


def svg(figure: Figure, label: str) -> str:
    """A figure as an SVG element. Measured points have their spread, predicted ones are a dashed line.

    :param label: what it shows, for those who do not see it.
    """
    from pygal.style import Style

    dashed = [curve for curve in figure.curves if any(point.predicted is not None for point in curve.points)]
    whole = [point for curve in figure.curves for point in curve.points]
    highest = max(max(point.y + point.spread, point.predicted or 0) for point in whole)
    chart = _chart_class()(
        width=WIDTH,
        height=HEIGHT,
        margin=4,
        margin_right=22,
        spacing=8,
        no_prefix=True,
        js=(),
        css=(),
        disable_xml_declaration=True,
        show_legend=False,
        show_x_guides=False,
        include_x_axis=True,
        range=(0, highest * 1.05 or 1),
        print_labels=True,
        dots_size=3.5,
        max_scale=7,
        x_title=figure.x,
        x_labels=[{"value": value, "label": f"{value:g}"} for value in _labels({point.x for point in whole})],
        value_formatter=figure_of,
        style=Style(**dict.fromkeys(TEXTS, LABEL_PIXELS), value_font_size=LABEL_PIXELS // 2),
    )
    classes: dict[int, str] = {}
    for curve in dashed:
        classes[len(classes)] = f"predicted c{curve.number}"
        chart.add(letter(curve.number), _predictions(curve, figure), dots_size=2)
    for curve, named in zip(figure.curves, _lettered_points(figure)):
        classes[len(classes)] = f"measured c{curve.number}"
        chart.add(letter(curve.number), _values(curve, figure, named))
    chart.add_xml_filter(lambda root: _clean(root, classes, label))
    return chart.render(is_unicode=True)
