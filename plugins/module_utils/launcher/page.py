# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Status page of a cluster, for people without Prometheus, and its web server, which runs in threads of the launcher.

The web server requires llama-server's keys, and uses its certificate.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, loading, metrics, serving

REFRESH_SECONDS = 15
HOST_PLACEHOLDER = "//host-of-the-request.invalid:"
"""Placeholder for the host in a link: the web server replaces it with the host that the browser requested."""
HOST_PATTERN = r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]"
"""Pattern of a host that a link may contain."""
CSS_CLASSES = {serving.SERVING: "good", serving.ASLEEP: "quiet", serving.LOADING: "warn", serving.FALLBACK: "warn"}
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --quiet: #57606a; --back: #fff; --card: #f6f8fa; --line: #d0d7de;
  --bad: #b3261e; --good: #1a6b2f; --warn: #8a5300 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --quiet: #a4adb8; --back: #14171b; --card: #1d2228; --line: #3a424c;
  --bad: #ff8a80; --good: #74d08c; --warn: #f0b458 } }
* { box-sizing: border-box }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 64rem; margin: auto; padding: 1rem .9rem;
  color: var(--text); background: var(--back); overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 } h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem } h3 { font-size: 1rem; margin: 0 }
p, li, figure { margin: .3rem 0 } ul { list-style: none; padding: 0; margin: 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; font-weight: 400; vertical-align: top; overflow-wrap: normal }
thead th, .quiet { color: var(--quiet) } .good { color: var(--good) } .warn { color: var(--warn) } .bad { color: var(--bad) }
.small { font-size: .85rem } .state { font-size: 1.3rem; font-weight: 600 } .notice { border-left: 4px solid; padding-left: .7rem; font-weight: 600 }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: .7rem }
.card { border: 1px solid var(--line); border-radius: 8px; background: var(--card); padding: .6rem .8rem; min-width: 0 }
""".strip()
SCRIPT = f"""
setInterval(async () => {{
  try {{
    const reply = await fetch(location.origin + location.pathname, {{cache: "no-store", signal: AbortSignal.timeout(10000)}});
    if (!reply.ok) throw 0;
    const next = new DOMParser().parseFromString(await reply.text(), "text/html");
    document.title = next.title;
    document.body.replaceChildren(...next.body.children);
  }} catch {{
    document.getElementById("gone").hidden = false;
  }}
}}, {REFRESH_SECONDS * 1000});
"""
SLOW_REASONS = {
    "answers": "Generation is slower than planned. Possible causes: concurrent requests, another program on a host, or a device that is slower than assumed.",
    "prompts": "Prompt processing is slower than planned. Possible causes: short prompts, another program on a host, or a device that is slower than assumed.",
}
FAST_REASON = "Speeds exceed the plan: the devices are faster than assumed. Measure them with playbooks/benchmark.yml."
"""Usual reasons for a speed outside the planned range."""
CONTENT_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    f"form-action 'none'; script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)
CLIENT_TIMEOUT_SECONDS = 5.0
"""Timeout of a TLS handshake, of a request and of sending an answer."""
WRONG_KEY_DELAY_SECONDS = 1.0
"""Delay before answering a wrong key."""
LISTEN_RETRY_SECONDS = 10.0
MAX_CLIENTS, MAX_REQUEST_BYTES = 16, 8192
"""Maximum number of simultaneous clients, and size limit of a request. Further clients wait in the kernel, and use no descriptor."""
LOCAL_SUFFIXES = ("", ".local", ".lan", ".internal", ".home.arpa")
"""Suffixes of host names in a local network. Nobody can register a name with such a suffix."""
FOREIGN_NAME_TEXT = (
    "The page is not served under this name, which someone else may control. Open the page at an address of its host, under the host's own name, "
    "or under the host's name in the inventory. With llama_server_api_key_file, any name works."
)
RESPONSE_HEADERS = (
    f"Content-Security-Policy: {CONTENT_POLICY}",
    "Cache-Control: no-store",
    "X-Content-Type-Options: nosniff",
    "Referrer-Policy: no-referrer",
    "Connection: close",
)


class Snapshot(NamedTuple):
    """State of the cluster at one moment."""

    description: metrics.Description
    figures: metrics.Figures
    state: str
    history: serving.History
    unused_workers: Sequence[str]
    absent_workers: Sequence[str]
    load: loading.LoadCounters | None
    """Load in progress."""
    failed_checks: Sequence[str]
    """Failed checks of the last verification."""


def state_of(snapshot: Snapshot) -> str:
    """Return one of serving.STATES, or SILENT if llama-server should answer and does not."""
    claims_to_serve = snapshot.state in (serving.SERVING, serving.ASLEEP, serving.FALLBACK)
    return serving.SILENT if claims_to_serve and not snapshot.figures.get("answers") else snapshot.state


def _tag(name: str, inner_html: str, css_class: str = "") -> str:
    """:param inner_html: HTML."""
    return f'<{name} class="{css_class}">{inner_html}</{name}>' if css_class else f"<{name}>{inner_html}</{name}>"


def _tags(name: str, texts: Iterable[str], css_class: str = "") -> str:
    """:param texts: plain text."""
    return "".join(_tag(name, html.escape(text), css_class) for text in texts)


def _speed_text(value: float | None, digits: int = 9) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


def _problems(snapshot: Snapshot) -> Iterator[str]:
    state = state_of(snapshot)
    if state == serving.SILENT:
        yield "llama-server does not answer"
    if snapshot.state == serving.FALLBACK:
        yield serving.describe_absence(snapshot.unused_workers)
    if state == serving.WAITING and snapshot.absent_workers:
        yield serving.describe_wait(snapshot.description.workers, snapshot.absent_workers)
    if snapshot.figures.get("verified_passed") == 0:
        yield f"the last verification failed{': ' * bool(snapshot.failed_checks)}{'; '.join(snapshot.failed_checks)}"


def _model_card(snapshot: Snapshot, model: str) -> str:
    figures = snapshot.figures
    is_loaded = figures.get("model_loaded", model=model)
    rows, reasons = [], []
    for kind, count_name, time_name, phase in (
        ("answers", "generated_tokens_total", "generation_seconds_total", "generation"),
        ("prompts", "prompt_tokens_total", "prompt_seconds_total", "prompt"),
    ):
        speed = metrics.token_rate(figures.get(count_name, model=model), figures.get(time_name, model=model))
        planned_speed, lowest_speed, highest_speed = (
            figures.get(f"planned_{phase}_{bound_prefix}tokens_per_second", model=model)
            for bound_prefix in ("", "lowest_", "highest_")
        )
        rows.append(
            (
                kind,
                _speed_text(speed),
                f"{_speed_text(planned_speed, 3)} ({_speed_text(lowest_speed, 3)} to {_speed_text(highest_speed, 3)})",
            )
        )
        if speed and lowest_speed and speed < lowest_speed:
            reasons.append(SLOW_REASONS[kind])
        if speed and highest_speed and speed > highest_speed:
            reasons.append(FAST_REASON)
    request_texts = [
        f"{count:.0f} request{'s' * (count != 1)} {state}"
        for state, name in (("in progress", "requests_processing"), ("waiting", "requests_deferred"))
        if (count := figures.get(name, model=model))
    ]
    states = [*([] if is_loaded is None else ["in memory" if is_loaded else "not in memory"]), *request_texts]
    table_head = _tag("thead", _tag("tr", _tags("th", ("tokens/s", "since load", "planned"))))
    table = _tag("table", table_head + _tag("tbody", "".join(_tag("tr", _tags("td", row)) for row in rows)))
    title = _tag("h3", html.escape(model)) + _tag("p", html.escape(", ".join(states)), "quiet small")
    reasons_html = "".join(_tag("p", html.escape(reason), "quiet small") for reason in dict.fromkeys(reasons))
    return _tag("section", title + table + reasons_html, "card")


def _worker_item(snapshot: Snapshot, endpoint: str) -> str:
    host, worker = snapshot.description.workers[endpoint]

    def figure_of(name: str) -> float | None:
        return snapshot.figures.get(name, worker_host=host, worker=worker)

    is_awaited, is_connected = figure_of("worker_awaited"), figure_of("worker_connected")
    state, css_class = (
        ("absent", "bad") if is_awaited else ("connected", "good") if is_connected else ("not connected", "quiet")
    )
    measurements = []
    if (round_trip_s := figure_of("worker_round_trip_seconds")) is not None:
        measurements.append(f"{round_trip_s * 1000:.2g} ms round trip")
    if (retransmissions := figure_of("worker_retransmissions_total")) is not None:
        lost_segments = max(0, retransmissions - (figure_of("worker_needless_retransmissions_total") or 0))
        measurements.append(f"{lost_segments:.0f} segment{'s' * (lost_segments != 1)} lost")
    if (size := figure_of("worker_sent_bytes_total")) is not None:
        measurements.append(
            f"{units.size_text(size)} sent, {units.size_text(figure_of('worker_received_bytes_total') or 0)} received"
        )
    details = _tag("span", html.escape(", ".join(["", *measurements])), "quiet")
    return _tag(
        "li",
        f"{html.escape(serving.worker_name(snapshot.description.workers, endpoint))} {_tag('span', state, css_class)}{details}",
    )


def _verification_html(snapshot: Snapshot, clock: float) -> str:
    timestamp, is_ok = (snapshot.figures.get("verified_timestamp_seconds"), snapshot.figures.get("verified_passed"))
    if timestamp is None:
        return _tag("p", "The head has no record of a verification.", "quiet")
    result = "passed" if is_ok else "failed"
    return _tag(
        "p", _tag("span", result, "good" if is_ok else "bad") + f" {units.duration_text(max(0, clock - timestamp))} ago"
    )


def _events_html(snapshot: Snapshot, clock: float) -> str:
    lines = [
        f"{units.duration_text(max(0, clock - event['time']))} ago: {event['text']}"
        for event in reversed(snapshot.history.last)
    ]
    return _tag("ul", _tags("li", lines)) if lines else _tag("p", "none", "quiet")


def render(snapshot: Snapshot | None, clock: float, chat_port: str = "") -> str:
    """Return the page as HTML.

    :param snapshot: None before the first snapshot.
    :param chat_port: port of llama-server's chat page; empty without one.
    """
    if snapshot is None:
        return _document("starting", [_tag("p", "The launcher has just started.")])
    description, state = snapshot.description, state_of(snapshot)
    state_start_time = snapshot.figures.get("state_since_timestamp_seconds")
    state_text = serving.STATE_TEXTS.get(state, state)
    details = [
        f"for {units.duration_text(max(0, clock - (state_start_time or clock)))}",
        f"head {description.host}",
        description.release,
        f"plan {description.plan}",
    ]
    body = [
        _tag("h1", html.escape(description.cluster)),
        _tag("p", html.escape(state_text), f"state {CSS_CLASSES.get(state, 'bad')}"),
        _tag("p", html.escape(" · ".join(details)), "quiet"),
        _tags("p", _problems(snapshot), "notice bad"),
    ]
    if chat_port:
        is_answering = state in (serving.SERVING, serving.ASLEEP, serving.FALLBACK)
        note = "" if is_answering else " (answers when the model is loaded)"
        body.append(_tag("p", f'<a href="{HOST_PLACEHOLDER}{chat_port}/">Chat with the model</a>{note}'))
    if snapshot.state == serving.LOADING and snapshot.load:
        progress = loading.progress_of(snapshot.load, loading.ExpectedBytes())
        body.append(_tags("p", [loading.progress_sentence(progress)], "notice warn"))
    cards_html = "".join(_model_card(snapshot, model) for model in description.planned)
    body += [_tag("h2", "Models"), _tag("div", cards_html, "cards")]
    if worker_items := "".join(_worker_item(snapshot, endpoint) for endpoint in description.workers):
        body += [_tag("h2", "Connections to workers"), _tag("ul", worker_items)]
    body += [_tag("h2", "Last verification"), _verification_html(snapshot, clock)]
    body += [_tag("h2", "Recent events"), _events_html(snapshot, clock)]
    return _document(f"{state_text}: {description.cluster}", body)


def _document(title: str, body: Iterable[str]) -> str:
    """:param body: HTML."""
    outdated_notice = '<p id="gone" class="notice bad" hidden>The head is not responding: this page is out of date.</p>'
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript>'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><script>{SCRIPT}</script></head>"
        f"<body>{outdated_notice}{''.join(body)}</body></html>\n"
    )


class PageAccess(NamedTuple):
    """Address of the page, and its access control."""

    address: str
    port: int
    api_keys: Sequence[str] = ()
    """Accepted API keys; empty if none is required."""
    certificate_path: str = ""
    tls_key_path: str = ""
    """Files for TLS; empty without TLS."""
    host_names: Sequence[str] = ()
    """Names of its host. Without keys, the page is served only under these names and IP addresses, which prevents DNS rebinding."""


def start_server(access: PageAccess, render_page: Callable[[], str]) -> None:
    """Start the web server in a thread, which logs its errors.

    :param render_page: function that returns the page.
    """
    threading.Thread(target=_listen, args=(access, render_page), daemon=True).start()


def _listen(access: PageAccess, render_page: Callable[[], str]) -> None:
    def open_port() -> tuple[socket.socket, ssl.SSLContext | None]:
        context = None
        if access.certificate_path:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(access.certificate_path, access.tls_key_path)
        return socket.create_server((access.address, access.port)), context

    while not (listener := journal.run_safely(f"the page is not served at {access.address}:{access.port}", open_port)):
        time.sleep(LISTEN_RETRY_SECONDS)
    keys = [key.encode("utf-8", "surrogateescape") for key in access.api_keys]
    host_names = [name.lower() + suffix for name in (*access.host_names, "localhost") for suffix in LOCAL_SUFFIXES]
    serve = partial(_serve, *listener, partial(_reply, keys=keys, host_names=host_names, render_page=render_page))
    for _thread in range(MAX_CLIENTS):
        threading.Thread(target=serve, daemon=True).start()


def _serve(listener: socket.socket, context: ssl.SSLContext | None, reply: Callable[[bytes], bytes]) -> None:

    def serve_client() -> bool:
        client, _address = listener.accept()
        with client, suppress(OSError):
            client.settimeout(CLIENT_TIMEOUT_SECONDS)
            with context.wrap_socket(client, server_side=True) if context else client as connection:
                _answer_request(connection, reply)
        return True

    while True:
        if not journal.run_safely("a request for the page failed", serve_client):
            time.sleep(WRONG_KEY_DELAY_SECONDS)


def _answer_request(connection: socket.socket, reply: Callable[[bytes], bytes]) -> None:
    """:raises OSError: the client is too slow or has disconnected."""
    request, deadline = b"", time.monotonic() + CLIENT_TIMEOUT_SECONDS
    while b"\r\n\r\n" not in request:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = connection.recv(MAX_REQUEST_BYTES)
        request += chunk
        if not chunk or len(request) > MAX_REQUEST_BYTES:
            return
    connection.settimeout(CLIENT_TIMEOUT_SECONDS)
    connection.sendall(reply(request))


def _reply(request: bytes, keys: Sequence[bytes], host_names: Sequence[str], render_page: Callable[[], str]) -> bytes:
    request_line, *lines = request.split(b"\r\n")
    fields = {name.strip().lower(): value.strip() for name, _colon, value in (line.partition(b":") for line in lines)}
    if keys and not _has_key(fields.get(b"authorization", b""), keys):
        time.sleep(WRONG_KEY_DELAY_SECONDS * (b"authorization" in fields))
        authentication_header = 'WWW-Authenticate: Basic realm="any name, the API key as password", charset="UTF-8"'
        return _response("401 Unauthorized", "Use an API key of the server as the password.", authentication_header)
    if not keys and not _is_allowed_host(fields.get(b"host", b"").decode("latin-1"), host_names):
        return _response("421 Misdirected Request", FOREIGN_NAME_TEXT)
    if request_line.split(b" ")[:2] != [b"GET", b"/"]:
        return _response("404 Not Found", "The only page is /")
    host = re.sub(r":\d*$", "", fields.get(b"host", b"").decode("latin-1"))
    text = render_page().replace(HOST_PLACEHOLDER, f"//{host if re.fullmatch(HOST_PATTERN, host) else 'localhost'}:")
    return _response("200 OK", text, "Content-Type: text/html; charset=utf-8")


def _response(status: str, text: str, *headers: str) -> bytes:
    body = text.encode()
    lines = (f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", *RESPONSE_HEADERS, "", "")
    return "\r\n".join(lines).encode() + body


def _is_allowed_host(host_field: str, host_names: Sequence[str]) -> bool:
    """Return whether a client requested an IP address or one of these names."""
    host = re.sub(r":\d*$", "", host_field).lower()
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.rstrip(".") in host_names
    return True


def _has_key(authorization: bytes, keys: Sequence[bytes]) -> bool:
    """Return whether a client sends a key, as a bearer token or as a browser's password."""
    scheme, _space, password = authorization.partition(b" ")
    if scheme.lower() == b"basic":
        with suppress(ValueError):
            password = base64.b64decode(password, validate=True).partition(b":")[2]
    return any(hmac.compare_digest(password, key) for key in keys)
