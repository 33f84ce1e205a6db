"""The page of a plan with what was verified and measured of it."""

import json
import re

import benchmarks
import chromium
import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import report as report_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import html_page
from conftest import ROOT, typed
from support import actions, playbook_runs
from support.clusters import strix_halos
from support.verification import unhealthy, verify
from test_report import EVIL, Tags, spoiled

OUTPUT = ROOT / "tests" / "output" / "report"
CHECKS = {
    "schema": 1,
    "cluster": "llama_cluster",
    "passed": False,
    "checks": [
        {"name": "health", "subject": "http://127.0.0.1:8080", "status": "passed", "evidence": "it answers"},
        {"name": "link", "subject": "strix1", "status": "not tested", "evidence": "not measured yet"},
        {"name": "answer", "subject": "http://127.0.0.1:8080", "status": "failed", "evidence": "it says no"},
    ],
}
VERIFIED = typed_json.parse(Report, CHECKS)
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


@pytest.fixture(scope="module")
def example():
    return benchmarks.read(benchmarks.example())


@pytest.fixture(scope="module")
def plan():
    cluster = strix_halos(4, 377)
    cluster.hosts["strix0"]["facts"]["measured"] = {"strix2": {"round_trip_ms": 0.4}}
    return cluster.plan()


def test_a_page_has_nothing_from_elsewhere_and_is_the_same_each_time(example):
    text = html_page.page(None, benchmark=example)
    assert text == html_page.page(None, benchmark=example)
    for part in ("<script", "<!--", "http:", "https:", "src="):
        assert part not in text


def test_the_page_says_what_was_not_measured_and_why(example):
    text = " ".join(html_page.page(None, benchmark=example).split())
    reasons = {cell.skipped for cell in example.cells if cell.skipped}
    assert reasons
    for reason in reasons:
        assert validation.printable(reason, None) in text


@pytest.mark.parametrize("cells", [0, 5])
def test_a_benchmark_without_a_measurement_has_a_page(cells):
    data = benchmarks.example()
    data.update(cells=data["cells"][:cells])
    for cell in data["cells"]:
        cell.update(measured=None, predicted=None, skipped=None)
    text = html_page.page(None, benchmark=benchmarks.read(data))
    assert f"0 of {cells} cells were measured." in text
    assert ("not measured yet" in text) == bool(cells)


def test_the_page_of_a_verified_plan_has_each_check(plan):
    text = html_page.page(typed(plan), (), VERIFIED)
    assert "Of 3 checks: 1 passed, 1 failed, 1 not tested." in text
    for check in CHECKS["checks"]:
        assert all(word in text for word in check.values())


def test_a_page_shows_of_an_environment_what_is_known_to_be_no_secret(local):
    given = {"LIGHT": "pl-anted", "GGML_NOTE": "a note"}
    local.hosts["here"]["variables"]["llama_server_environment"] = given
    text = html_page.page(typed(local.plan()))
    assert "pl-anted" not in text
    assert "a note" in text
    assert "LIGHT=&#39;&lt;removed: value of LIGHT&gt;&#39;" in text


def test_nothing_that_a_host_says_becomes_part_of_a_report(plan, example):
    def page(spoil):
        evil = EVIL * spoil
        cells = [
            cell._replace(hosts=tuple(host + evil for host in cell.hosts), skipped=cell.skipped and cell.skipped + evil)
            for cell in example.cells
        ]
        measured = example._replace(release=example.release + evil, model=example.model + evil, cells=tuple(cells))
        return html_page.page(
            spoiled(typed(plan)) if spoil else typed(plan),
            [f"  strix1 {evil}"],
            spoiled(VERIFIED) if spoil else VERIFIED,
            measured,
        )

    good, bad = page(False), page(True)
    assert Tags(bad).opened == Tags(good).opened
    assert all(character.isprintable() or character == "\n" for character in bad)
    assert "onclick" not in re.sub(r"&[^<]*", "", bad)
    assert "&lt;script&gt;" in bad
    bad.encode()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not chromium.PROGRAM:
        pytest.skip("Chromium is not installed, so nobody looks at the page (Debian: apt install chromium)")
    with chromium.Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory, plan, example):
    """Name → a file with a page."""
    folder = tmp_path_factory.mktemp("pages")
    found = {
        "plan": html_page.page(typed(plan), ["  strix1  matches the plan"]),
        "example": html_page.page(typed(plan), [], VERIFIED, example),
        "ten": html_page.page(typed(strix_halos(11, 1000).plan())),
    }
    for name, text in found.items():
        (folder / f"{name}.html").write_text(text)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    return {name: f"file://{folder}/{name}.html" for name in found}


SCREENS = [(1400, False), (1400, True), (400, False), (400, True)]


@pytest.mark.programs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name, width, dark",
    [*(("plan", *screen) for screen in SCREENS), *(("example", *screen) for screen in SCREENS), ("ten", 1400, False)],
)
def test_a_browser_shows_the_page(browser, pages, name, width, dark):
    address = pages[name]
    page = browser.page()
    page.open(address, width, dark=dark)
    assert page.requests == [address]
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('pre')].filter(text => text.scrollWidth > text.clientWidth).length"
    assert page.evaluate(wide) == 0
    page.screenshot(OUTPUT / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert page.evaluate(CONTRAST) == []


@pytest.mark.programs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["plan", "example"])
def test_a_page_is_printed_whole(browser, pages, name):
    page = browser.page()
    page.open(pages[name], dark=True)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.pdf(OUTPUT / f"{name}.pdf")
    assert (OUTPUT / f"{name}.pdf").read_bytes().startswith(b"%PDF")


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
    given = {
        "report": page,
        "plan": files / "plan.json",
        "verify": files / "verified.json",
        "benchmark": files / "before",
    }
    options = [word for name, path in given.items() for word in ("-e", f"llama_{name}_path={path}")]
    status, printed = playbook_runs.run(files, ROOT / "playbooks/report.yml", "localhost,", *options)
    assert status == 0, printed
    assert "changed=0" in printed
    assert page.read_text() == html_page.page(typed(plan), (), VERIFIED, example)


@pytest.mark.parametrize(
    "names, said",
    [
        ({}, "No input file is set: set llama_plan_path"),
        ({"benchmark": "nowhere"}, ", which cannot be read on the controller: No such file or directory"),
        ({"verified": "list.json"}, ", which cannot be read on the controller: it is not a JSON object"),
        ({"verified": "large.json"}, ", which cannot be read on the controller: it has more than 300000 bytes"),
        ({"verified": "plan.json"}, "which does not have this version's format: passed is missing"),
        ({"benchmark": "verified.json"}, "this version's format: time is missing"),
        ({"benchmark": "other.json"}, "this version's format: cells[3].measured.mean is 5e-324"),
        ({"plan": "control.json"}, "this version's format: hosts is '\\x1b'"),
    ],
)
def test_what_no_page_can_be_made_of_is_named(files, monkeypatch, names, said):
    monkeypatch.setattr(report_action, "MAX_FILE_BYTES", 300_000)
    (files / "list.json").write_text("[1]")
    plan = json.loads((files / "plan.json").read_text())
    (files / "control.json").write_text(json.dumps({**plan, "hosts": {"\x1b": None}}))
    (files / "large.json").write_text('{"x": "' + "x" * 300_000 + '"}')
    other = benchmarks.example()
    other["cells"][3]["measured"]["mean"] = 5e-324
    (files / "other.json").write_text(json.dumps(other))
    given = {name: str(files / file) for name, file in names.items()}
    with pytest.raises(AnsibleActionFail, match=re.escape(said)):
        actions.run(report_action, path=str(files / "report.html"), **given)
    assert not (files / "report.html").exists()


def test_a_page_that_cannot_be_written_is_named(files):
    with pytest.raises(AnsibleActionFail, match="llama_report_path is '/no/such/folder/page', which cannot be written"):
        output.write_report("/no/such/folder/page", None, VERIFIED, None)


def test_a_verification_writes_what_is_asked_for(files, plan, example):
    path, page = files / "kept.json", files / "report.html"
    verify(plan, *[unhealthy()] * 2, path=str(path), report=str(page), benchmark=benchmarks.example())
    report = typed_json.parse(Report, json.loads(path.read_text()))
    assert not report.passed
    assert page.read_text() == html_page.page(typed(plan), (), report, example)
    path.unlink()
    verify(plan, *[unhealthy()] * 2, report=str(page))
    assert page.read_text() == html_page.page(typed(plan), (), report)
    assert not path.exists()


def test_the_report_of_a_plan_is_its_page(files, plan):
    output.show_plan(typed(plan), ["  strix1  matches the plan"], str(files / "report.html"))
    assert (files / "report.html").read_text() == html_page.page(typed(plan), ["  strix1  matches the plan"])
