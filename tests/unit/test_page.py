"""The page of a plan with what was verified and measured of it."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import benchmarks
import chromium
import jsonschema_rs
import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import report as report_action
from ansible_collections.llamacpp.cluster.plugins.action import verify as verify_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import (
    benchmark_page,
    curves,
    html_page,
    measurements,
    plots,
)
from conftest import typed
from test_advisories import strix_halos
from test_report import EVIL, Tags, spoiled

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "tests" / "output" / "report"
CHECKS = {
    "schema": 1,
    "cluster": "llama_cluster",
    "passed": False,
    "checks": [
        {"name": "health", "subject": "http://127.0.0.1:8080", "status": "passed", "evidence": "it answers"},
        {"name": "link", "subject": "strix1", "status": "not tested", "evidence": "llama_link_measure is false"},
        {
            "name": "answer",
            "subject": "http://127.0.0.1:8080",
            "status": "failed",
            "evidence": "it says something else",
        },
    ],
}
CONTRAST = """
(() => {
  const channel = value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => { const [r, g, b] = numbers(colour).map(each => channel(each / 255)); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = numbers(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return getComputedStyle(node).backgroundColor;
    }
  };
  const bad = [];
  for (const details of document.querySelectorAll('details')) details.open = true;
  for (const node of document.body.querySelectorAll('*')) {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.data.trim())) continue;
    if (node.closest('title, desc') || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), drawn = node.closest('svg');
    const pair = [light(drawn ? style.fill : style.color), light(behind(drawn ? drawn.parentElement : node))].sort();
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) bad.push([node.tagName, node.className.baseVal ?? node.className, node.textContent.slice(0, 40), ratio]);
  }
  return bad;
})()
"""
CURVES = """
[...document.querySelectorAll('figure')].map(figure => ({
  measured: [...figure.querySelectorAll('.overlay .series.measured')].map(series => series.querySelectorAll('.dot').length),
  titles: figure.querySelectorAll('.dots title').length,
  dots: figure.querySelectorAll('.dot').length,
  letters: [...figure.querySelectorAll('svg text.label')].map(text => text.textContent).sort(),
  legend: [...figure.querySelectorAll('.legend b')].map(text => text.textContent).sort(),
  rows: figure.querySelectorAll('table.points tbody tr').length,
}))
"""


@pytest.fixture(scope="module")
def example():
    return benchmarks.read(benchmarks.example())


@pytest.fixture(scope="module")
def large():
    return benchmarks.read(benchmarks.large())


@pytest.fixture(scope="module")
def plan():
    cluster = strix_halos(4, 377)
    cluster.hosts["strix0"]["facts"]["measured"] = {"strix2": {"round_trip_ms": 0.4}}
    return cluster.plan()


def every_figure(measured):
    found = [figure for part in curves.figures(measured).values() for figure in part]
    return [*found, *curves.load_figures(measured, curves.loads(measured))]


@pytest.mark.parametrize("data", [benchmarks.example(), benchmarks.large()], ids=["example", "large"])
def test_the_data_of_these_tests_is_as_the_schema_says(data):
    jsonschema_rs.validate(json.loads((ROOT / "docs" / "benchmark.schema.json").read_text()), data)


def without(data, *way):
    part = data
    for step in way[:-1]:
        part = part[step]
    del part[way[-1]]
    return data


def changed(data, value, *way):
    part = data
    for step in way[:-1]:
        part = part[step]
    part[way[-1]] = value
    return data


@pytest.mark.parametrize(
    "data, why",
    [
        (changed(benchmarks.example(), 2, "schema"), "schema is 2"),
        (without(benchmarks.example(), "cells"), "cells is no list"),
        (changed(benchmarks.example(), {}, "cells"), "cells is no list"),
        (without(benchmarks.example(), "cells", 3, "measured", "unit"), "cells[3].measured.unit is missing"),
        (changed(benchmarks.example(), "quick", "cells", 2, "test"), "cells[2].test is 'quick'"),
        (changed(benchmarks.example(), -1, "cells", 0, "measured", "mean"), "cells[0].measured.mean is -1"),
        (
            changed(benchmarks.example(), [5e-324], "cells", 0, "measured", "samples"),
            "cells[0].measured has no samples, or figures that are no speeds",
        ),
        (
            changed(benchmarks.example(), [], "cells", 0, "measured", "samples"),
            "cells[0].measured has no samples, or figures that are no speeds",
        ),
        (changed(benchmarks.example(), "x\ny", "cluster"), "cluster is 'x\\ny'"),
        (changed(benchmarks.example(), [1], "hosts"), "hosts is a list"),
    ],
)
def test_another_form_is_named(data, why):
    with pytest.raises(Refusal) as refusal:
        benchmarks.read(data)
    assert str(refusal.value).startswith(
        f"the test's data is no benchmark that this collection can read: {why}. Use a benchmark.json"
    )


@pytest.mark.parametrize(
    "content, why",
    [
        (None, "cannot be read on the controller: No such file or directory"),
        ("[1]", "holds no JSON that can be read: it is not a JSON object"),
        ("{", "holds no JSON that can be read: Expecting"),
        ('{"schema": 1}', "is no benchmark that this collection can read: cluster is missing"),
    ],
)
def test_a_file_that_is_no_benchmark_is_named(tmp_path, content, why):
    path = tmp_path / "benchmark.json"
    if content:
        path.write_text(content)
    with pytest.raises(Refusal, match=why) as refusal:
        measurements.read("llama_report_compare", str(path))
    assert str(refusal.value).startswith("llama_report_compare is '")


def test_a_file_that_is_too_large_is_not_read_on(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "LARGEST_FILE", 100)
    with pytest.raises(Refusal, match="it has more than"):
        measurements.read("llama_report_compare", str(benchmarks.PATH))


def test_a_benchmark_is_read_from_a_link_and_from_its_folder(tmp_path):
    link = tmp_path / "benchmark.json"
    link.symlink_to(benchmarks.PATH)
    assert measurements.read("llama_report_compare", str(tmp_path)) == benchmarks.read(benchmarks.example())
    assert measurements.read("llama_report_compare", str(link)) == benchmarks.read(benchmarks.example())


@pytest.mark.parametrize("name", ["example", "large"])
def test_every_measurement_that_differs_in_one_dimension_alone_is_a_point(name, request):
    measured = request.getfixturevalue(name)
    for axis, found in curves.figures(measured).items():
        points = sorted(
            (curve.points[0].x, point.x, point.y)
            for figure in found
            if figure.dashed != "fitted"
            for curve in figure.curves
            for point in curve.points
        )
        expected = []
        for cell in measured.cells:
            if cell.measured is None or (axis == "tokens" and cell.dimensions["kind"] not in curves.PROMPTS):
                continue
            alike = {
                other.dimensions[axis]
                for other in measured.cells
                if other.measured and {**other.dimensions, axis: 0} == {**cell.dimensions, axis: 0}
            } - {None}
            if len(alike) > 1:
                expected.append((min(alike), cell.dimensions[axis], cell.measured.mean))
        assert points == sorted(expected)
        assert expected


def test_a_fit_is_a_line_through_the_times_of_its_cells(example):
    drawn = [curve for figure in every_figure(example) if figure.dashed == "fitted" for curve in figure.curves]
    cells = {cell.key: cell for cell in example.cells}
    fits = example.about["fits"]
    assert sum(len(curve.points) for curve in drawn) == sum(len(fit["cells"]) for fit in fits)
    points = {(point.x, point.y): point.predicted for curve in drawn for point in curve.points}
    for fit in fits:
        for cell in map(cells.get, fit["cells"]):
            latency = cell.dimensions["latency_ms"]
            fitted = fit["fixed_ms"] + fit["crossings"] * latency
            assert points[latency, 1000 / cell.measured.largest] == pytest.approx(fitted)


@pytest.mark.parametrize("name", ["example", "large"])
def test_curves_of_a_figure_can_be_told_apart(name, request):
    for figure in every_figure(request.getfixturevalue(name)):
        highest = [max(point.y for point in curve.points) for curve in figure.curves]
        assert 1 <= len(figure.curves) <= curves.MOST_CURVES
        assert max(highest) <= curves.SAME_SCALE * min(highest)
        assert len({curve.number for curve in figure.curves}) == len(figure.curves)
        assert len({curve.name for curve in figure.curves}) == len(figure.curves)
        assert all(curve.name for curve in figure.curves)


def test_a_model_has_one_colour_in_the_whole_page(large):
    numbers = {}
    for figure in every_figure(large):
        for curve in figure.curves:
            if curve.name in benchmarks.MODELS:
                assert numbers.setdefault(curve.name, curve.number) == curve.number
    assert sorted(numbers.values()) == list(range(6))


def test_a_drawing_is_the_same_each_time_and_has_nothing_from_elsewhere(example):
    for figure in every_figure(example):
        drawn = plots.svg(figure, "a <label>")
        assert drawn == plots.svg(figure, "a <label>")
        assert 'aria-label="a &lt;label&gt;"' in drawn
        for part in ("<script", "<style", "<!--", "href", " id=", "font"):
            assert part not in drawn
        assert drawn.replace("http://www.w3.org/2000/svg", "").count("http") == 0


def test_letters_do_not_cover_each_other():
    alike = [curves.Point(x, 20.0 + x, 0.0, None) for x in (1, 2, 3)]
    figure = curves.Figure(
        "t", "", "x", "y", "s", tuple(curves.Curve(name, tuple(alike), number) for number, name in enumerate("ab"))
    )
    places = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="label">([AB])<', plots.svg(figure, "l"))
    assert [letter for _x, _y, letter in places] == ["A", "B"]
    assert abs(float(places[0][0]) - float(places[1][0])) > 30


def test_without_pygal_the_tables_are_there_and_a_sentence_says_why_no_curves(example, monkeypatch):
    drawn = html_page.page(None, measured=example)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    text = html_page.page(None, measured=example)
    assert "<svg" not in text
    assert "pygal is not installed on the controller" in text
    assert "pygal is not installed" not in drawn
    assert text.count("<table") == drawn.count("<table")


def test_the_page_says_what_a_visit_costs(example):
    visit = {"cells": ["a", "b"], "backend": "vulkan", "model": "<m>", "test": "tg128", "visit_ms": 0.273}
    text = html_page.page(None, measured=benchmarks.read({**benchmarks.example(), "visits": [visit]}))
    table = text.split('aria-label="Cost of a visit"')[1].split("</table>")[0]
    assert "&lt;m&gt;" in table
    assert ">0.273<" in table
    assert "Cost of a visit" not in html_page.page(None, measured=example), "a record of before has none"
    with pytest.raises(Refusal, match=re.escape("visits[0].visit_ms is ")):
        benchmarks.read({**benchmarks.example(), "visits": [{**visit, "visit_ms": "1"}]})


def test_what_a_single_sample_says(example):
    (old, new) = (copy.deepcopy(benchmarks.example()) for _time in range(2))
    for data in (old, new):
        data["cells"] = [cell for cell in data["cells"] if cell["measured"]][:1]
    new["cells"][0]["measured"].update(samples=[5.0], mean=5.0, deviation=0)
    found = curves.compare(benchmarks.read(old), benchmarks.read(new)).differences
    assert [(row.verdict, row.spread) for row in found] == [("spread not known", None)]


@pytest.mark.parametrize(
    "test, before, after, verdict",
    [
        ("tg128", (100, 1), (110, 1), "faster"),
        ("tg128", (100, 1), (90, 1), "slower"),
        ("tg128", (100, 5), (104, 5), "within the spread"),
        ("api-ttft512", (1.0, 0.01), (0.5, 0.01), "faster"),
        ("api-ttft512", (0.5, 0.01), (1.0, 0.01), "slower"),
    ],
)
def test_a_difference_counts_where_it_is_larger_than_its_spread(test, before, after, verdict):
    (old, new) = (copy.deepcopy(benchmarks.example()) for _time in range(2))
    for data, (mean, deviation) in ((old, before), (new, after)):
        data["cells"] = [cell for cell in data["cells"] if cell["measured"] and cell["test"] == test][:1]
        data["cells"][0]["measured"].update(mean=mean, deviation=deviation, samples=[mean] * 3)
    (row,) = curves.compare(benchmarks.read(old), benchmarks.read(new)).differences
    assert row.verdict == verdict
    assert row.change == pytest.approx(after[0] - before[0])
    assert row.spread == pytest.approx(2 * ((before[1] ** 2 + after[1] ** 2) / 3) ** 0.5)


def test_the_page_compares_with_an_earlier_benchmark(example):
    data = benchmarks.example()
    data["release"] = {**data["release"], "id": "0.3.35-x", "ref": "0.3.35", "build": 10900}
    data["hosts"].pop("worker2")
    data["hosts"]["worker1"]["memory_mib"] = 1
    measured = [cell for cell in data["cells"] if cell["measured"]]
    measured[1]["measured"].update(mean=1.0, deviation=0.1)
    measured[2]["key"] = "of another matrix"
    text = " ".join(html_page.page(None, measured=example, earlier=benchmarks.read(data)).split())
    for part in (
        "release: 0.3.35, build 10900",
        "hosts that only this one has: worker2",
        "host worker1: memory_mib differ",
        f"Of {len(measured) - 1} cells that both measured: 1 faster, {len(measured) - 2} within the spread.",
        "1 cells that only the earlier one measured",
        "of another matrix",
        '<td class="faster">faster</td>',
    ):
        assert part in text


def test_the_page_says_what_was_not_measured_and_why(example):
    text = " ".join(html_page.page(None, measured=example).split())
    reasons = {cell.skipped for cell in example.cells if cell.skipped}
    assert reasons
    for reason in reasons:
        assert html_page._printable(reason) in text
    cut = benchmarks.example()
    cut["ended"] = None
    cut["cells"][0].update(measured=None, skipped=None)
    text = " ".join(html_page.page(None, measured=benchmarks.read(cut)).split())
    assert "the benchmark is not complete" in text
    assert "it was not its turn yet" in text


@pytest.mark.parametrize("cells", [0, 5])
def test_a_benchmark_without_a_measurement_has_a_page(cells):
    data = benchmarks.example()
    data.update(cells=data["cells"][:cells], fits=[], ended=None)
    for cell in data["cells"]:
        cell.update(measured=None, predicted=None, load_s=None, memory_mib=[], skipped=None)
    text = html_page.page(None, measured=benchmarks.read(data))
    assert f"0 of {cells} cells were measured; the benchmark is not complete." in text
    assert "<svg" not in text
    assert ("it was not its turn yet" in text) == bool(cells)


@pytest.mark.parametrize(
    "size, said",
    [
        ({"proxied": False, "latency_ms": 0, "bandwidth_mbit": None}, "direct, full bandwidth"),
        ({"proxied": True, "latency_ms": 0, "bandwidth_mbit": None}, "through the proxy, full bandwidth"),
        ({"proxied": True, "latency_ms": 0.2, "bandwidth_mbit": None}, "0.2 ms added, full bandwidth"),
        ({"proxied": True, "latency_ms": 0, "bandwidth_mbit": 1000}, "no latency added, 1000 Mbit/s"),
        ({"latency_ms": 0}, "no latency added"),
        ({"hosts": 1, "parallel": 1, "depth": 0, "split": None}, "1 host, empty cache, one request, planned split"),
        (
            {"hosts": 2, "parallel": 4, "depth": 512, "split": "1,2"},
            "2 hosts, 512 tokens in the cache, 4 requests at once, split 1,2",
        ),
    ],
)
def test_how_cells_are_named(size, said):
    assert curves.words(size, curves.NAMES) == said


def test_what_was_measured_of_the_planned_memory_stands_beside_it(plan, example):
    cell = next(cell for cell in example.cells if len(cell.memory) == 3 and cell.measured)
    path = example.about["models"][cell.dimensions["model"]]["path"]
    plan = typed(plan)
    first = plan.placement[0]
    placement = tuple(first._replace(device=row.device) for row in cell.memory)
    plan = plan._replace(placement=placement, model=plan.model._replace(path=path))
    assert benchmark_page.memory_of_plan(example, plan).mib == tuple(row.measured for row in cell.memory)
    other = plan._replace(model=plan.model._replace(path="/another.gguf"))
    assert benchmark_page.memory_of_plan(example, other) is None
    assert benchmark_page.memory_of_plan(example, plan._replace(placement=())) is None


def test_the_page_of_a_verified_plan_has_each_check(plan):
    text = html_page.page(typed(plan), (), CHECKS)
    assert "Of 3 checks: 1 passed, 1 failed, 1 not tested." in text
    for check in CHECKS["checks"]:
        assert all(word in text for word in check.values())


def test_nothing_that_a_host_says_becomes_part_of_a_report(plan, example):
    def page(spoil):
        about = {
            **example.about,
            "models": {name + EVIL * spoil: model for name, model in example.about["models"].items()},
        }
        about = {**about, "release": {name: f"{value}{EVIL * spoil}" for name, value in about["release"].items()}}
        cells = [
            cell._replace(
                dimensions={**cell.dimensions, "model": cell.dimensions["model"] + EVIL * spoil},
                skipped=cell.skipped and cell.skipped + EVIL * spoil,
                log=cell.log and cell.log + EVIL * spoil,
                argv=tuple(word + EVIL * spoil for word in cell.argv),
            )
            for cell in example.cells
        ]
        measured = measurements.Benchmark(about, tuple(cells))
        return html_page.page(typed(plan), (), spoiled(CHECKS) if spoil else CHECKS, measured, measured)

    good, bad = page(False), page(True)
    assert Tags(bad).opened == Tags(good).opened
    assert all(character.isprintable() or character == "\n" for character in bad)
    assert "&lt;script&gt;" in bad


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not chromium.PROGRAM:
        pytest.skip("Chromium is not installed, so nobody looks at the page (Debian: apt install chromium)")
    with chromium.Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def served(plan):
    """The example, with a cell of the plan's model on its devices."""
    data = benchmarks.example()
    cell = next(cell for cell in data["cells"] if cell["measured"])
    data["models"][cell["model"]]["path"] = plan["model"]["path"]
    cell["memory_mib"] = [
        {
            "device": entry["device"],
            "host": entry["host"],
            "planned_mib": entry["total_mib"],
            "measured_mib": entry["total_mib"] - 1500 if index else None,
        }
        for index, entry in enumerate(plan["placement"])
    ]
    return benchmarks.read(data)


def test_measured_memory_is_drawn_below_the_planned(plan, served):
    text = html_page.page(typed(plan), measured=served)
    own = text[text.index('<h2 id="memory">') : text.index('<h2 id="predicted-speed">')]
    assert own.count('class="thin"') == len(plan["placement"]) - 1
    for entry in plan["placement"][1:]:
        assert f'aria-label="measured {entry["total_mib"] - 1500:.0f} MiB"' in own
    assert "by the log of pp512" in own
    assert 'class="thin"' not in html_page.page(typed(plan))


@pytest.fixture(scope="module")
def pages(tmp_path_factory, plan, served, large):
    """Name → a file with a page, and what was measured for it."""
    folder = tmp_path_factory.mktemp("pages")
    earlier = benchmarks.read(benchmarks.large(speed=0.97))
    found = {
        "plan": (html_page.page(typed(plan), ["  strix1  is as planned"]), None),
        "example": (html_page.page(typed(plan), [], CHECKS, served), served),
        "large": (html_page.page(None, measured=large, earlier=earlier), large),
    }
    for name, (text, _measured) in found.items():
        (folder / f"{name}.html").write_text(text)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    return {name: (f"file://{folder}/{name}.html", measured) for name, (_text, measured) in found.items()}


SCREENS = [(1400, False), (1400, True), (400, False), (400, True)]


@pytest.mark.programs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name, width, dark",
    [
        *(("plan", *screen) for screen in SCREENS),
        *(("example", *screen) for screen in SCREENS),
        ("large", 1400, False),
        ("large", 400, True),
    ],
)
def test_a_browser_shows_the_page(browser, pages, name, width, dark):
    address, measured = pages[name]
    page = browser.page()
    page.open(address, width, dark=dark)
    assert page.requests == [address]
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    seen = page.evaluate(CURVES)
    figures = every_figure(measured) if measured else []
    assert [each["measured"] for each in seen] == [[len(curve.points) for curve in figure.curves] for figure in figures]
    for each, figure in zip(seen, figures):
        assert each["letters"] == each["legend"] == sorted(plots.letter(curve.number) for curve in figure.curves)
        assert each["titles"] == each["dots"]
        assert each["rows"] == len({point.x for curve in figure.curves for point in curve.points})
    page.screenshot(OUTPUT / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert page.evaluate(CONTRAST) == []


@pytest.mark.programs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["plan", "example", "large"])
def test_a_page_is_printed_whole(browser, pages, name):
    page = browser.page()
    page.open(pages[name][0], dark=True)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    hidden = "[...document.querySelectorAll('details:not(.rest) *')].filter(node => !node.checkVisibility({contentVisibilityAuto: true})).length"
    assert page.evaluate(hidden) == 0
    page.pdf(OUTPUT / f"{name}.pdf")
    assert (OUTPUT / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def run_action(tmp_path, **variables):
    """playbooks/report.yml, as an operator runs it."""
    options = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
    return subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", "playbooks/report.yml", *options],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOME": str(tmp_path / "ansible")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def files(tmp_path, plan):
    """What other playbooks leave on the controller."""
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "verified.json").write_text(json.dumps(CHECKS))
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "benchmark.json").write_text(benchmarks.PATH.read_text())
    return tmp_path


@pytest.mark.programs
@pytest.mark.timeout(180)
def test_report_yml_writes_a_page_of_files(files, plan, example):
    page = files / "report.html"
    result = run_action(
        files,
        llama_report_path=page,
        llama_plan_path=files / "plan.json",
        llama_verify_path=files / "verified.json",
        llama_benchmark_path=files / "before",
        llama_report_compare=files / "before",
    )
    assert result.returncode == 0, result.stdout
    assert "changed=0" in result.stdout
    assert page.read_text() == html_page.page(typed(plan), (), CHECKS, example, example)


@pytest.mark.parametrize(
    "names, said",
    [
        ({}, "There is nothing to report: set llama_plan_path"),
        ({"compare": "before"}, "There is nothing to report"),
        ({"plan": "plan.json", "compare": "before"}, "llama_report_compare needs llama_benchmark_path"),
        ({"plan": "none.json"}, ", which cannot be read on the controller: No such file or directory"),
        ({"verified": "plan.json"}, "llama_verify_path names no result of a verification: passed is missing"),
        (
            {"benchmark": "verified.json"},
            "and the file is no benchmark that this collection can read: id is missing",
        ),
        ({"plan": "verified.json"}, "and the file holds no plan that this collection can read"),
    ],
)
def test_what_no_page_can_be_made_of_is_named(files, names, said):
    with pytest.raises(AnsibleActionFail, match=re.escape(said)):
        report_action.write(
            {
                "path": str(files / "report.html"),
                **dict.fromkeys(report_action.INPUTS),
                **{name: str(files / file) for name, file in names.items()},
            }
        )
    assert not (files / "report.html").exists()


def test_a_page_that_cannot_be_written_is_named(files):
    with pytest.raises(AnsibleActionFail, match="llama_report_path is '/no/such/folder/page', which cannot be written"):
        output.write_report("/no/such/folder/page", None, CHECKS)


def test_a_benchmark_that_cannot_be_compared_keeps_its_page(files, monkeypatch):
    said = []
    monkeypatch.setattr(output.Display, "warning", lambda _display, text: said.append(text))
    page = files / "report.html"
    output.write_report(str(page), None, CHECKS, benchmarks.example(), str(files / "none"))
    assert len(said) == 1
    assert "which cannot be read on the controller" in said[0]
    assert "The report compares with nothing." in said[0]
    assert page.read_text() == html_page.page(None, None, CHECKS, benchmarks.read(benchmarks.example()))
    output.write_report(str(page), None, CHECKS, benchmarks.example(), str(files / "before"))
    assert len(said) == 1
    assert "Compared with the earlier benchmark" in page.read_text()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    output.write_report(str(page), None, CHECKS, benchmarks.example())
    assert said[1:] == [plots.MISSING]
    with pytest.raises(AnsibleActionFail, match="What was measured is no benchmark"):
        output.write_report(str(page), None, CHECKS, {"schema": 2})


def test_a_verification_writes_what_is_asked_for(files, plan, example):
    kept, page = files / "kept.json", files / "report.html"
    verify_action._write(plan, CHECKS, str(kept), str(page), benchmarks.example(), str(files / "before"))
    assert json.loads(kept.read_text()) == CHECKS
    assert page.read_text() == html_page.page(typed(plan), (), CHECKS, example, example)
    kept.unlink()
    verify_action._write(plan, CHECKS, None, str(page), None, str(files / "no such file"))
    assert page.read_text() == html_page.page(typed(plan), (), CHECKS)
    assert not kept.exists()


def test_the_report_of_a_plan_is_its_page(files, plan):
    pages = [str(files / name) for name in ("plan.html", "report.html")]
    output.show_plan(typed(plan), ["  strix1  is as planned"], *pages)
    assert [Path(page).read_text() for page in pages] == [html_page.page(typed(plan), ["  strix1  is as planned"])] * 2
