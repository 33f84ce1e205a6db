# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the launcher knows of its cluster as one web page, for people without Prometheus."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading, metrics, serving

EVERY_SECONDS = 15
CLASSES = {serving.SERVING: "good", serving.ASLEEP: "quiet", serving.LOADING: "warn", serving.FALLBACK: "warn"}
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
.small { font-size: .85rem } .state { font-size: 1.3rem; font-weight: 600 } .told { border-left: 4px solid; padding-left: .7rem; font-weight: 600 }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: .7rem }
.card { border: 1px solid var(--line); border-radius: 8px; background: var(--card); padding: .6rem .8rem; min-width: 0 }
""".strip()
SCRIPT = f"""
setInterval(async () => {{
  try {{
    const said = await fetch(location.origin + location.pathname, {{cache: "no-store", signal: AbortSignal.timeout(10000)}});
    if (!said.ok) throw 0;
    const next = new DOMParser().parseFromString(await said.text(), "text/html");
    document.title = next.title;
    document.body.replaceChildren(...next.body.children);
  }} catch {{
    document.getElementById("gone").hidden = false;
  }}
}}, {EVERY_SECONDS * 1000});
"""
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    f"form-action 'none'; script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)
"""What a browser may do with the page."""


class Shown(NamedTuple):
    """What was known at one moment."""

    told: metrics.Description
    figures: metrics.Figures
    state: str
    kept: serving.Kept
    without: Sequence[str]
    waiting_for: Sequence[str]
    load: loading.Load | None
    """In progress."""
    failed: Sequence[str]
    """Checks of the last verification."""


def state_of(shown: Shown) -> str:
    """One of serving.STATES, or that it says that it serves and does not answer."""
    serves = shown.state in (serving.SERVING, serving.ASLEEP, serving.FALLBACK)
    return serving.SILENT if serves and not shown.figures.get("answers") else shown.state


def _tag(name: str, text: str, look: str = "") -> str:
    """:param text: with tags."""
    return f'<{name} class="{look}">{text}</{name}>' if look else f"<{name}>{text}</{name}>"


def _list(name: str, texts: Iterable[str], look: str = "") -> str:
    """:param texts: without tags."""
    return "".join(_tag(name, html.escape(text), look) for text in texts)


def _speed(value: float | None, digits: int = 9) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


def _worker(shown: Shown, endpoint: str) -> str:
    host, worker = shown.told.workers.get(endpoint, ("", ""))
    return f"{host}:{worker} ({endpoint})" if host else endpoint


def _problems(shown: Shown) -> Iterator[str]:
    state = state_of(shown)
    if state == serving.SILENT:
        yield "llama-server does not answer"
    if shown.state == serving.FALLBACK:
        yield f"it serves without {', '.join(shown.without) or 'a worker'}"
    if state == serving.WAITING and shown.waiting_for:
        yield f"it waits for worker {', '.join(_worker(shown, endpoint) for endpoint in shown.waiting_for)}"
    if shown.figures.get("verified_passed") == 0:
        yield f"the last verification failed{': ' * bool(shown.failed)}{'; '.join(shown.failed)}"


def _model(shown: Shown, model: str) -> str:
    figures = shown.figures
    loaded = figures.get("model_loaded", model=model)
    rows = []
    for words, counted, timed, planned in (
        ("answers", "generated_tokens_total", "generation_seconds_total", "generation"),
        ("prompts", "prompt_tokens_total", "prompt_seconds_total", "prompt"),
    ):
        measured = metrics.rate(figures.get(counted, model=model), figures.get(timed, model=model))
        told = [
            _speed(figures.get(f"planned_{planned}_{part}tokens_per_second", model=model), 3)
            for part in ("", "lowest_", "highest_")
        ]
        rows.append((words, _speed(measured), f"{told[0]} ({told[1]} to {told[2]})"))
    waits = [
        f"{number:.0f} requests {word}"
        for word, name in (("in progress", "requests_processing"), ("wait", "requests_deferred"))
        if (number := figures.get(name, model=model))
    ]
    said = [*([] if loaded is None else ["in memory" if loaded else "not in memory"]), *waits]
    head = _tag("thead", _tag("tr", _list("th", ("tokens/s", "since load", "planned"))))
    table = _tag("table", head + _tag("tbody", "".join(_tag("tr", _list("td", row)) for row in rows)))
    title = _tag("h3", html.escape(model)) + _tag("p", html.escape(", ".join(said)), "quiet small")
    return _tag("section", title + table, "card")


def _connection(shown: Shown, endpoint: str) -> str:
    host, worker = shown.told.workers[endpoint]

    def figure(name: str) -> float | None:
        return shown.figures.get(name, worker_host=host, worker=worker)

    away, connected = figure("worker_awaited"), figure("worker_connected")
    state, look = ("away", "bad") if away else ("connected", "good") if connected else ("not connected", "quiet")
    said = []
    if (seconds := figure("worker_round_trip_seconds")) is not None:
        said.append(f"{seconds * 1000:.2g} ms there and back")
    if (again := figure("worker_retransmissions_total")) is not None:
        lost = max(0, again - (figure("worker_needless_retransmissions_total") or 0))
        said.append(f"{lost:.0f} segments lost")
    if (sent := figure("worker_sent_bytes_total")) is not None:
        said.append(f"{units.amount(sent)} sent, {units.amount(figure('worker_received_bytes_total') or 0)} received")
    told = _tag("span", html.escape(", ".join(["", *said])), "quiet")
    return _tag("li", f"{html.escape(_worker(shown, endpoint))} {_tag('span', state, look)}{told}")


def _verified(shown: Shown, now: float) -> str:
    when, passed = shown.figures.get("verified_timestamp_seconds"), shown.figures.get("verified_passed")
    if when is None:
        return _tag("p", "never, as far as the head knows", "quiet")
    result = "passed" if passed else "failed"
    return _tag("p", _tag("span", result, "good" if passed else "bad") + f" {units.duration(max(0, now - when))} ago")


def _lately(shown: Shown, now: float) -> str:
    lines = [f"{units.duration(max(0, now - line['time']))} ago: {line['text']}" for line in reversed(shown.kept.last)]
    return _tag("ul", _list("li", lines)) if lines else _tag("p", "nothing", "quiet")


def of(shown: Shown | None, now: float) -> str:
    """The page as HTML.

    :param shown: None where nothing was gathered yet.
    :param now: in seconds since 1970.
    """
    if shown is None:
        return _document("starting", [_tag("p", "The launcher has just started.")])
    told, state = shown.told, state_of(shown)
    since = shown.figures.get("state_since_timestamp_seconds")
    word = serving.WORDS.get(state, state)
    about = [
        f"for {units.duration(max(0, now - (since or now)))}",
        f"head {told.host}",
        told.release,
        f"plan {told.plan}",
    ]
    body = [
        _tag("h1", html.escape(told.cluster)),
        _tag("p", html.escape(word), f"state {CLASSES.get(state, 'bad')}"),
        _tag("p", html.escape(" · ".join(about)), "quiet"),
        _list("p", _problems(shown), "told bad"),
    ]
    if shown.state == serving.LOADING and shown.load:
        body.append(_list("p", [loading.sentence(loading.progress_of(shown.load, loading.Expected()))], "told warn"))
    models = "".join(_model(shown, model) for model in told.planned)
    body += [_tag("h2", "Models"), _tag("div", models, "cards")]
    if connections := "".join(_connection(shown, endpoint) for endpoint in told.workers):
        body += [_tag("h2", "Connections to workers"), _tag("ul", connections)]
    body += [_tag("h2", "Last verification"), _verified(shown, now)]
    body += [_tag("h2", "What happened lately"), _lately(shown, now)]
    return _document(f"{word}: {told.cluster}", body)


def _document(title: str, body: Iterable[str]) -> str:
    """:param body: with tags."""
    gone = '<p id="gone" class="told bad" hidden>The head does not answer: what follows is old.</p>'
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><noscript><meta http-equiv="refresh" content="{EVERY_SECONDS}"></noscript>'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><script>{SCRIPT}</script></head>"
        f"<body>{gone}{''.join(body)}</body></html>\n"
    )
