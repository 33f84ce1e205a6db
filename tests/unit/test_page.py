"""The page that a head's launcher shows: its figures are those of metrics, terminal and JSON, keys guard it, it holds no secret, and Chromium shows it."""

import base64
import contextlib
import json
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import manifest
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (
    exporter,
    loading,
    metrics,
    page,
    progress,
    runtime,
    serving,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import server as llama_server
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.server_client import LOADING
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.waiting import load_bytes_of
from conftest import complete, typed
from support import launched
from support.hosts import free_port
from support.launched import a_worker, until
from test_html_page import CONTRAST, OUTPUT, SCREENS, browser
from test_metrics import exported, one, parsed
from test_status import NOW, VERIFIED, answers_of, of_head, written

__all__ = ["browser", "exported"]

METRICS = """llamacpp:prompt_tokens_total 6886
llamacpp:prompt_seconds_total 2903.63
llamacpp:tokens_predicted_total 3469
llamacpp:tokens_predicted_seconds_total 3544.27
"""
STATES = ["serving", "silent", "asleep", "loading", "waiting", "fallback"]
ENDPOINT = "192.0.2.12:50052"


class Watched:
    """llama-server as the launcher watches it."""

    is_ready, last_sample, load, is_asleep, conversation_values = True, None, None, False, {}
    metrics = llama_server.parse_metrics(METRICS)
    loaded_models = llama_server.Head.loaded_models

    def __init__(self, answers=True):
        self.health = (answers, 0.0)

    def servers(self):
        return {"": self}

    def update_metrics(self):
        """Has been asked."""


@pytest.fixture
def paged(pair, monkeypatch):
    """A plan with a page, two workers and a fallback without each of them."""
    pair.set("head", llama_server_page_port=8081, llama_server_fallback=True, llama_placement="all")
    monkeypatch.setattr(time, "time", lambda: NOW)
    return complete(pair.plan())


def exports_of(plan, folder):
    (told,) = [file for file in plan["hosts"]["head"]["files"] if file["path"].endswith(f"/{names.METRICS_FILE}")]
    described = json.loads(told["content"])
    described["services"]["llamacpp-server"]["folder"] = str(folder)
    (folder / "metrics.json").write_text(json.dumps(described))
    (folder / exporter.VERIFICATION_FILE).write_text(json.dumps({"passed": True, "failed_checks": []}))
    os.utime(folder / exporter.VERIFICATION_FILE, (NOW - VERIFIED["age_s"],) * 2)
    return exporter.Exporter(folder / "metrics.json", "llamacpp-server")


def gathered(plan, folder, state, name="worker2"):
    """What the launcher knows in a state, and its record of it."""
    exports, record = exports_of(plan, folder), serving.HeadRecord(folder)
    for text in ("lost worker 192.0.2.11:50052: restarting llama-server", "worker <b>x</b> is back"):
        record.log(text)
    record.set_state(
        "serving" if state == "silent" else state,
        (name,) if state == "fallback" else (),
        (ENDPOINT,) if state == "waiting" else (),
        loading.LoadCounters(12.0, 10**9, {ENDPOINT: 5 * 10**7}) if state == "loading" else None,
    )
    record.state_start_time = NOW - 600
    head = Watched(state not in ("silent", "loading")) if state != "waiting" else None
    if state == "loading":
        head.load = record.load
    exports.export_head(record, head)
    return exports.snapshot, {**json.loads((folder / serving.RECORD_FILE).read_text()), "since": NOW - 600}


@pytest.mark.parametrize("needless, lost", [(3, 4), (9, 0), (None, 7)])
def test_segments_that_were_sent_again_for_nothing_are_not_lost(paged, tmp_path, needless, lost):
    shown, _record = gathered(paged, tmp_path, "serving")
    host, worker = shown.description.workers[ENDPOINT]
    figures = metrics.Figures()
    for name, number in (("retransmissions", 7), ("needless_retransmissions", needless)):
        figures.add(f"worker_{name}_total", number, worker_host=host, worker=worker)
    assert f"{lost} segments lost" in page.render(shown._replace(figures=figures), NOW)


@pytest.mark.parametrize(
    "factor, reason", [(0.5, "Generation is slower than planned. "), (1, None), (2, "Speeds exceed the plan: ")]
)
def test_a_speed_outside_the_planned_range_has_a_reason(paged, tmp_path, factor, reason):
    shown, _record = gathered(paged, tmp_path, "serving")
    (model,), figures = shown.description.planned, metrics.Figures()
    for name, number in (("generated_tokens_total", 1000 * factor), ("generation_seconds_total", 100)):
        figures.add(name, number, model=model)
    for part, number in (("", 10), ("lowest_", 8), ("highest_", 12)):
        figures.add(f"planned_generation_{part}tokens_per_second", number, model=model)
    text = page.render(shown._replace(figures=figures), NOW)
    assert [part in text for part in ("slower than planned", "exceed the plan")] == [factor < 1, factor > 1]
    assert not reason or reason in text


@pytest.mark.parametrize("state", STATES)
def test_page_metrics_terminal_and_json_agree(paged, tmp_path, state):
    shown, record = gathered(paged, tmp_path, state)
    health = {"healthy": state not in ("silent", "loading", "waiting"), "detail": LOADING if state == "loading" else ""}
    told = ({"passed": True, "failed_checks": []}, VERIFIED)
    answers = of_head(answers_of(paged), serving=record, health=health, verified=told[1])
    status, _error, terminal = written(paged, answers, tmp_path)
    status, terminal = status["cluster"], " ".join(terminal.split())
    seen = " ".join(re.sub("<[^>]*>", " ", page.render(shown, NOW)).split())
    found = parsed((tmp_path / "llamacpp-server.prom").read_text())
    assert status["state"] == page.state_of(shown) == state
    for text in (serving.STATE_TEXTS.get(state, state), "passed"):
        assert text in terminal
        assert text in seen
    assert one(found, "state", state=record["state"]) == 1
    assert "1 h ago" in terminal
    assert "passed 1 h ago" in seen
    assert NOW - one(found, "verified_timestamp_seconds") == status["verified"]["age_s"] == 3600
    if state in ("serving", "fallback"):
        for word, what, counted in (("answers", "generation", "generated"), ("prompts", "prompt", "prompt")):
            speed = round(one(found, f"{counted}_tokens_total") / one(found, f"{what}_seconds_total"), 2)
            assert f"{word} {speed:g} " in seen
    if state == "loading":
        assert loading.progress_sentence(loading.progress_of(shown.load, load_bytes_of(typed(paged)))) in terminal
        assert loading.progress_sentence(loading.progress_of(shown.load, loading.ExpectedBytes())) in seen
        assert status["load"]["read_bytes"] == 10**9
    if state == "waiting":
        assert status["waiting_for"] == [ENDPOINT]
        assert f"waits for worker worker2:cpu ({ENDPOINT})" in seen
        assert one(found, "worker_awaited", worker_host="worker2") == 1
    if state == "fallback":
        assert "the head serves without worker2" in terminal
        assert "the head serves without worker2" in seen
    planned = paged["estimate"]["generation_tokens_per_s"]
    assert one(found, "planned_generation_tokens_per_second") == planned
    assert f"{float(f'{planned:.3g}'):g} (" in seen
    assert "worker <b>" not in page.render(shown, NOW)


def test_a_failed_verification_is_shown(paged, tmp_path):
    exports, record = exports_of(paged, tmp_path), serving.HeadRecord(tmp_path)
    (tmp_path / exporter.VERIFICATION_FILE).write_text('{"passed": false, "failed_checks": ["known answer: <3 words"]}')
    exports.export_head(record, Watched())
    assert "the last verification failed: known answer: &lt;3 words" in page.render(exports.snapshot, NOW)
    assert "has just started" in page.render(None, NOW)


def fetched(port, key=None, basic=False, path="/", scheme="http", host=None, **options):
    """Status and text."""
    said = f"Basic {base64.b64encode(f'anybody:{key}'.encode()).decode()}" if basic else f"Bearer {key}"
    headers = {**({"Authorization": said} if key else {}), **({} if host is None else {"Host": host})}
    asked = urllib.request.Request(f"{scheme}://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=20, **options) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, str(error.headers) + error.read().decode()
    except OSError:
        return 0, ""


@pytest.mark.programs
@pytest.mark.skipif(not progress.ON_LINUX, reason="connections are read from the /proc of Linux")
def test_keys_guard_it_and_no_secret_is_on_it(exported, monkeypatch):
    (keys := exported.cluster.folder / "keys").write_text("\nplanted-one\nplanted-two\n")
    monkeypatch.setenv("LLAMA_API_KEY", "planted-three")
    _server, endpoint = a_worker()
    extra = exported.describe("llamacpp-server", kind="head", workers={endpoint: ["other", "cpu"]}, planned={"m": {}})
    port = free_port()
    more = ["--metrics", "--hf-token", "planted-four", "--api-key-file", keys, "keys"]
    exported.cluster.head("answers", [endpoint], [*extra, "--page", f"127.0.0.1:{port}"], more)
    exported.when("state", 1, state="serving")
    asked = urllib.request.Request(
        f"http://127.0.0.1:{exported.cluster.port}/", b"planted-five", {"Authorization": "planted-one"}
    )
    urllib.request.urlopen(asked).read()
    status, text = fetched(port)
    assert status == 401
    assert "Basic realm" in text
    assert [fetched(port, key)[0] for key in ("planted", "planted-one\x7f", "planted-three")] == [401] * 3
    assert fetched(port, "planted", basic=True)[0] == 401
    for basic in (True, False):
        status, text = fetched(port, "planted-two", basic)
        assert status == 200
        assert "serving" in text
        assert "connected" in text
    assert fetched(port, "planted-one", path="/state/start.log")[0] == 404
    assert "planted" in (exported.cluster.state / "start.log").read_text()
    assert "planted" not in text + exported.file.read_text() + fetched(port)[1]


@pytest.mark.programs
def test_it_is_not_served_where_keys_cannot_be_read(exported):
    (keys := exported.cluster.folder / "keys").write_text("\n")
    extra = exported.describe("llamacpp-server", kind="head", planned={"m": {}})
    port = free_port()
    process = exported.cluster.head("answers", [], [*extra, "--page", f"127.0.0.1:{port}"], ["--api-key-file", keys])
    line = launched.lines_until(process, "the page is not served")[-1]
    assert f"the page is not served: {keys} contains no key" in line
    exported.when("state", 1, state="serving")
    assert fetched(port) == (0, "")


@pytest.mark.parametrize("state", STATES)
def test_it_links_to_the_chat_page_of_the_same_host(paged, tmp_path, state):
    shown, _record = gathered(paged, tmp_path, state)
    text = page.render(shown, NOW, "8080")
    assert ("(answers when the model is loaded)" in text) == (state in ("silent", "loading", "waiting"))
    assert page.HOST_PLACEHOLDER not in page.render(shown, NOW)
    for host, link in (
        ("10.0.0.1:8081", "10.0.0.1"),
        ("[fd00::1]:81", "[fd00::1]"),
        ("nas", "nas"),
        ('a"b', "localhost"),
    ):
        request = f"GET / HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer k\r\n\r\n".encode()
        reply = page._reply(request, [b"k"], (), lambda: text).decode()
        assert f'<a href="//{link}:8080/">Chat with the model</a>' in reply
        assert page.HOST_PLACEHOLDER not in reply


def test_a_chat_page_is_linked_if_the_release_has_it(tmp_path):
    program = tmp_path / "release/bin/llama-server"
    program.parent.mkdir(parents=True)
    argv = [str(program), "--host", "127.0.0.1", "--port", "8080"]
    assert runtime.chat_port(argv) == ""
    for has_page, more, port in (
        (False, [], ""),
        (True, [], "8080"),
        (True, ["--no-ui"], ""),
        (True, ["--webui", "none"], ""),
    ):
        manifest.write_manifest(tmp_path / "release", manifest.Manifest("b1", {}, {}, {}, 0, page=has_page))
        assert runtime.chat_port([*argv, *more]) == port


def served(current, **door):
    port = free_port()
    page.start_server(page.PageAccess("127.0.0.1", port, **door), lambda: current[0])
    until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
    return port


STRANGERS = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[", "head@evil"]
OWN = ["127.0.0.1", "192.0.2.9:8081", "[fd00::1]:8081", "LocalHost.:8081", "HEAD:8081", "head.local", "nas.lan"]


@pytest.mark.programs
def test_without_a_key_it_is_shown_by_addresses_and_names_of_its_host_alone():
    """A page of a stranger cannot have its own name point here, and read."""
    open_to_all, guarded = (served(["the page"], host_names=("Head", "nas"), api_keys=keys) for keys in ((), ("k",)))
    said = {host: fetched(open_to_all, host=host) for host in [*OWN, *STRANGERS]}
    assert {host for host, (status, _text) in said.items() if status == 200} == {*OWN}
    assert {status for status, _text in said.values()} == {200, 421}
    assert "under the host's own name, or under the host's name in the inventory" in said["evil.example"][1]
    assert fetched(guarded, "k", host="evil.example")[0] == 200


@pytest.mark.programs
def test_a_launcher_shows_it_by_the_names_of_its_host(exported):
    extra, port = exported.describe("llamacpp-server", kind="head", planned={"m": {}}), free_port()
    exported.cluster.head("answers", [], [*extra, "--page", f"127.0.0.1:{port}"])
    until(lambda: fetched(port)[0])
    own = ["here", socket.gethostname(), f"127.0.0.1:{port}"]
    assert [fetched(port, host=host)[0] for host in [*own, "evil.example"]] == [200, 200, 200, 421]


@pytest.mark.programs
def test_clients_that_say_nothing_or_too_much_are_put_off(monkeypatch):
    monkeypatch.setattr(page, "CLIENT_TIMEOUT_SECONDS", 1.0)
    port = served(["the page"])
    idle = [socket.create_connection(("127.0.0.1", port)) for _number in range(page.MAX_CLIENTS + 8)]
    until(lambda: fetched(port) == (200, "the page"))
    assert idle[0].recv(1) == b""
    with socket.create_connection(("127.0.0.1", port)) as loud, contextlib.suppress(OSError):
        loud.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * page.MAX_REQUEST_BYTES * 2)
        assert loud.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port)) as slow, pytest.raises(OSError, match=r"Broken pipe|reset"):
        until(lambda: slow.sendall(b"G"), 20)
    for connection in idle:
        connection.close()


@pytest.mark.programs
def test_a_page_that_cannot_be_made_is_tried_again(monkeypatch):
    monkeypatch.setattr(page, "WRONG_KEY_DELAY_SECONDS", 0)
    current = []
    port = served(current)
    assert [fetched(port) for _number in range(2 * page.MAX_CLIENTS)] == [(0, "")] * 2 * page.MAX_CLIENTS
    current.append("the page")
    assert fetched(port) == (200, "the page")


@pytest.mark.programs
def test_it_shows_the_certificate_of_the_server_and_clients_without_a_handshake_take_no_descriptors(certify):
    certificate, key = certify("own")
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    port = served(["the page"], certificate_path=str(certificate), tls_key_path=str(key))
    assert fetched(port, scheme="https", context=context) == (200, "the page")
    assert fetched(port) == (0, "")
    before = len(os.listdir("/proc/self/fd"))
    silent = [socket.create_connection(("127.0.0.1", port)) for _number in range(100)]
    time.sleep(0.5)
    assert len(os.listdir("/proc/self/fd")) - before - len(silent) <= page.MAX_CLIENTS
    for connection in silent:
        connection.close()


@pytest.mark.programs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("state", STATES)
def test_a_browser_shows_it_and_keeps_it_fresh(browser, paged, tmp_path, monkeypatch, state):
    shown, _record = gathered(paged, tmp_path, state)
    current = [page.render(shown, NOW)]
    monkeypatch.undo()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    port = served(current)
    for width, dark in SCREENS:
        sight = browser.page()
        hasty = "const slow = setInterval; setInterval = (act, pause) => slow(act, pause / 50)"
        sight.call("Page.enable")
        sight.call("Page.addScriptToEvaluateOnNewDocument", source=hasty)
        sight.open(f"http://127.0.0.1:{port}/", width, dark=dark)
        addresses = {address for address in sight.requests if not address.startswith("data:")}
        assert addresses == {f"http://127.0.0.1:{port}/"}
        assert sight.complaints == []
        assert sight.evaluate("document.documentElement.scrollWidth") == width
        assert sight.evaluate(CONTRAST) == []
        sight.screenshot(OUTPUT / f"live-{state}-{width}-{'dark' if dark else 'light'}.png")
    if state == "serving":
        before, current[0] = current[0], current[0].replace("<title>serving", "<title>changed")
        assert before != current[0]
        until(lambda: sight.evaluate("document.title").startswith("changed"))
        assert sight.evaluate("document.getElementById('gone').hidden")
        current.clear()
        until(lambda: not sight.evaluate("document.getElementById('gone').hidden"))


def test_the_plan_has_the_launcher_show_it(pair, paged):
    head, host = paged["head"], paged["hosts"]["head"]
    assert head["page_port"] == 8081
    assert "--metrics" in head["argv"]
    assert head["launcher"][-2:] == ["--page", "127.0.0.1:8081"]
    assert "metrics" not in host
    pair.hosts["head"]["variables"]["llama_server_page_port"] = None
    off = complete(pair.plan())
    assert not {"--page", "--metrics"} & {*off["head"]["launcher"], *off["head"]["argv"]}
    assert not [file for file in off["hosts"]["head"]["files"] if file["path"].endswith(f"/{names.METRICS_FILE}")]


def test_it_is_opened_as_the_server_is(pair):
    pair.set(
        "head",
        llama_server_page_port=8081,
        llama_server_host="192.0.2.10",
        llama_server_allowed=["198.51.100.0/24"],
        llama_server_api_key_file="/etc/keys",
    )
    plan = pair.plan()
    rules = plan["hosts"]["head"]["firewall"]
    assert [(rule["port"], rule["sources"], rule["address"]) for rule in rules] == [
        (port, ["198.51.100.0/24"], "192.0.2.10") for port in (8080, 8081)
    ]
    for port, reason in (
        (8080, "llama_server_page_port is 8080, the same port as llama_server_port"),
        (0, "llama_server_page_port is 0: use 1 to 65535"),
    ):
        pair.hosts["head"]["variables"]["llama_server_page_port"] = port
        assert reason in pair.reason()
