# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan and verification as tables for a person."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB

WIDTH = 100
"""Columns of the page."""
BAR = 26
PARTS = {"weights": "█", "kv": "▓", "compute": "▒"}
FURTHER = "░"
"""Of a projector and a draft model."""
ROLES = {"mmproj": "projector", "draft": "draft model"}
FREE = "·"
SHOWN_OF_COMMIT = 12
SHOWN_DIFFERENCES = 12
"""Of each host; the JSON of the plan and the run itself name them all."""


def table(rows: list[list[str]]) -> str:
    """Columns as wide as they must be; the last one is not filled up."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  " + "  ".join([cell.ljust(width) for cell, width in zip(row, widths)] + [row[-1]]).rstrip() for row in rows
    )


def over(entry: dict) -> str:
    """Like «≤ 115 %» where weights, KV cache and compute buffers together exceed what a device can hold, or nothing."""
    share = 100 * entry["total_mib"] / max(entry["capacity_mib"], 1)
    return f"≤ {math.ceil(share)} %" if share > 100 else ""


def amount(entry: dict, part: str, digits: int = 0) -> str:
    """MiB of a device's weights, kv or compute, with ≤ before an upper bound."""
    return f"{'' if f'{part}_mib' in entry['exact'] else '≤ '}{entry[f'{part}_mib']:.{digits}f}"


def plan_table(plan: dict) -> str:
    """Release, model and what each device holds, in MiB."""
    head, release = plan["head"], plan["release"]
    source = source_of(plan)
    lines = [
        f"  release  {release['ref']} ({', '.join(sorted({build['id'] for host in plan['hosts'].values() for build in host['builds']}))})",
        f"  model    {plan['model']['name']}",
        *(_wrapped("  source   ", source) if source else []),
        f"  head     {head['host']}, {head['url']}",
        *(f"  no cache on {worker}: {why}" for worker, why in without_cache(plan).items()),
        "\n",
    ]
    rows = [["device", "host", "layers", "weights", "KV", "compute", "capacity (MiB)"]]
    for entry in plan["placement"]:
        rows.append(
            [
                entry["device"],
                entry["host"],
                f"{entry['layers']}{' + output' if entry['output'] else ''}",
                *(amount(entry, part, 1) for part in PARTS),
                str(entry["capacity_mib"]),
            ]
        )
    kept = head["cpu"]["layers"]
    if kept:
        rows.insert(1, ["CPU", head["host"], str(kept), "", "", "", ""])
    return "\n".join(lines) + table(rows) + "\n"


def source_of(plan: dict) -> str:
    """Where the model's files come from, how many and how large they are, and who fetches them; empty of one that is on the head."""
    model = plan["model"]
    if model["fetched_by"] is None:
        return ""
    source = model["source"]
    if re.fullmatch("[0-9a-f]{40,64}", model["revision"] or ""):
        source = source.replace(model["revision"], model["revision"][:SHOWN_OF_COMMIT])
    sizes = [file["bytes"] for file in model["files"]]
    size = f", {sum(sizes) / (1024 * MIB):.2f} GiB" if all(sizes) else ""
    return f"{source}, {len(sizes)} file{'s' * (len(sizes) > 1)}{size}, fetched by the {model['fetched_by']}"


def without_cache(plan: dict) -> dict[str, str]:
    """HOST:NAME of each worker that gets all of its layers over the network at each load → why it keeps none of the model's large tensors."""
    return {
        f"{name}:{worker['name']}": worker["cache_why"]
        for name, host in plan["hosts"].items()
        for worker in host["workers"]
        if plan["model"]["large_tensor_bytes"] and worker["used"] and not worker["cache"]
    }


def memory_bar(entry: dict, width: int = BAR) -> str:
    """A device's memory: weights, KV cache and compute buffers, of what it can hold. Each of them gets a column at least, as does what is free."""
    whole = max(entry["capacity_mib"], entry["total_mib"], 1)
    sizes = {sign: entry[f"{part}_mib"] for part, sign in PARTS.items()}
    sizes[FURTHER] = entry["further_mib"]
    sizes[FREE] = whole - entry["total_mib"]
    columns = {sign: 1 for sign, size in sizes.items() if size > 0}
    for _more in range(width - len(columns)):
        columns[max(columns, key=lambda sign: sizes[sign] / whole * width - columns[sign])] += 1
    return "".join(sign * count for sign, count in columns.items())


def _range(start: int, count: int) -> str:
    return f"layer {start}" if count == 1 else f"layers {start} to {start + count - 1}"


def _layers(plan: dict) -> list[str]:
    """What each device gets, like «layers 4 to 7, output». The first layers are those on the head's processor."""
    texts, start = [], plan["head"]["cpu"]["layers"]
    for entry in plan["placement"]:
        parts = [_range(start, entry["layers"])] * bool(entry["layers"]) + ["output"] * bool(entry["output"])
        if not parts:
            parts = ["tensors that llama_server_override_tensor names" if entry["weights_mib"] else "no layer"]
        texts.append(", ".join(parts))
        start += entry["layers"]
    return texts


class Lent(NamedTuple):
    """A device and what it gets. ``link`` is its entry of ``estimate.links``, None where the head drives it itself."""

    host: str
    device: str
    endpoint: str
    layers: str
    link: dict | None

    def link_text(self) -> str:
        """Kind and time of the link, or nothing."""
        link = self.link
        return f"{link['kind']}, {link['one_way_ms']:g} ms{'' if link['measured'] else ' assumed'}" if link else ""


def topology(plan: dict) -> list[Lent]:
    """All devices with layers in llama-server's order; the head's processor first, where it keeps some beside others."""
    head = plan["head"]
    links = {link["endpoint"]: link for link in plan["estimate"]["links"]}
    devices = {worker["endpoint"]: worker["device"] for host in plan["hosts"].values() for worker in host["workers"]}
    devices.update({worker["endpoint"]: f"{worker['backend']}, run elsewhere" for worker in plan["external_workers"]})
    kept = head["cpu"]["layers"]
    rows = [Lent(head["host"], "CPU", "", _range(0, kept), None)] * bool(kept and plan["placement"])
    for entry, layers in zip(plan["placement"], _layers(plan)):
        endpoint = entry["endpoint"]
        device, link = (devices[endpoint], links[endpoint]) if endpoint else (entry["device"], None)
        rows.append(Lent(entry["host"], device, endpoint or "", layers, link))
    return rows


def unused(plan: dict) -> list[str]:
    """Workers that are declared and get no layer."""
    own = [
        f"{name} {worker['device']} {worker['endpoint']}"
        for name, host in plan["hosts"].items()
        for worker in host["workers"]
        if not worker["used"]
    ]
    return own + [
        f"{worker['host']} {worker['backend']} {worker['endpoint']}, run elsewhere"
        for worker in plan["external_workers"]
        if not worker["used"]
    ]


def _topology(plan: dict) -> list[str]:
    head, devices = plan["head"], topology(plan)
    rows = [["├─", row.host, row.device, row.endpoint, row.layers, row.link_text()] for row in devices]
    text = [f"  {head['host']}  llama-server, {head['url']}"]
    if rows:
        rows[-1][0] = "└─"
        text += table(rows).splitlines()
    else:
        text.append(f"  └─  the processor of {head['host']}, all layers")
    rest = unused(plan)
    return text + (_wrapped("  declared and not used: ", ", ".join(rest)) if rest else [])


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * (len(start) - len(start.lstrip()) + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _memory(plan: dict) -> list[str]:
    rows = [["device", "".ljust(BAR), "weights", "KV", "compute", "of"]]
    for entry in plan["placement"]:
        beside = _further_on(plan, entry["device"])
        too_little = sum(one["weights_mib"] + one["kv_mib"] for one in (entry, *beside)) > entry["capacity_mib"]
        rows.append(
            [
                entry["device"],
                memory_bar(entry),
                *(amount(entry, part) for part in PARTS),
                f"{entry['capacity_mib']}{', too little' if too_little else f', {over(entry)}' if over(entry) else ''}",
            ]
        )
        rows += [_further_row(one) for one in beside]
    elsewhere = {one["device"] for one in plan["further"]} - {entry["device"] for entry in plan["placement"]}
    for device in sorted(elsewhere, key=str):
        rows.append([device or f"processor of {plan['head']['host']}", "", "", "", "", ""])
        rows += [_further_row(one) for one in _further_on(plan, device)]
    signs = {**PARTS, **({"beside the model": FURTHER} if plan["further"] else {})}
    legend = ", ".join(f"{sign} {part.replace('kv', 'KV cache')}" for part, sign in signs.items())
    footer = f"  in MiB, ≤ an upper bound; {legend}, {FREE} free"
    return [*table(rows).splitlines(), footer, *without(plan), *reasons(plan)]


def _further_on(plan: dict, device: str | None) -> list[dict]:
    """The models beside the one that is served that are on a device; null is the head's processor."""
    return [one for one in plan["further"] if one["device"] == device]


def _further_row(one: dict) -> list[str]:
    sizes = [f"≤ {one[f'{part}_mib']:.0f}" for part in PARTS]
    return [f"  {ROLES[one['role']]}", "", *sizes, "compute assumed" if one["assumed"] else ""]


def further(plan: dict) -> list[str]:
    """What is held beside the model, for a page without rows for it."""
    lines = []
    for one in plan["further"]:
        sizes = ", ".join(f"{part.replace('kv', 'KV')} ≤ {one[f'{part}_mib']:.0f} MiB" for part in PARTS)
        place = f"on {one['device']}" if one["device"] else f"by the processor of {one['host']}"
        lines += _wrapped(
            "  ", f"{ROLES[one['role']]} {one['name']} {place}: {sizes}{' (assumed)' if one['assumed'] else ''}"
        )
    return lines


def without(plan: dict) -> list[str]:
    """What the sizes of devices do not contain, or nothing."""
    names = {name for entry in plan["placement"] for name in entry["without"]}
    return _wrapped("  without ", ", ".join(sorted(names))) if names else []


def reasons(plan: dict) -> list[str]:
    """Why each device gets what it gets, those with the same reason in one line."""
    alike: dict[str, list[str]] = {}
    for entry in plan["placement"]:
        alike.setdefault(entry["reason"], []).append(entry["device"])
    return [line for reason, names in alike.items() for line in _wrapped("  ", f"{', '.join(names)}: {reason}")]


def command_lines(argv: list[str], environment: dict[str, str], start: str = "      ") -> list[str]:
    """A command as a shell takes it, an option and its value on one line, none longer than the page where that can be."""
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    for word in map(shlex.quote, argv):
        if words and words[-1].startswith("-") and " " not in words[-1] and not word.startswith("-"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    lines = [start]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > WIDTH and lines[-1].strip():
            lines[-1] += "\\"
            lines.append(start + "  ")
        lines[-1] += word + " "
    return [line.rstrip() for line in lines]


def _commands(plan: dict) -> list[str]:
    return [
        line
        for name, host in plan["hosts"].items()
        for service in host["services"]
        for line in (f"  {name}  {service['name']}", *command_lines(service["process"], service["environment"]))
    ]


def _ports(plan: dict) -> list[str]:
    lines = []
    for name, host in plan["hosts"].items():
        ports: dict[tuple, list[str]] = {}
        for rule in host["firewall"]:
            ports.setdefault((rule["address"], tuple(rule["sources"])), []).append(str(rule["port"]))
        unit = service_managers.MANAGERS[host["service_manager"]].closes_ports_by
        closed_by = host["firewall_manager"] or (unit if host["unit_closes"] else "")
        closed = f"closed to others by {closed_by}" if closed_by else "not closed to others by this collection"
        for (address, sources), numbers in ports.items():
            whom = "everybody" if names.EVERYBODY in sources else f"{', '.join(sources)}; {closed}"
            text = f"{name}  {address}: {', '.join(numbers)} for {whom}"
            lines += _wrapped("  ", text)
    for worker in plan["external_workers"]:
        lines += _wrapped(
            "  ", f"{worker['host']}  {worker['endpoint']}: run elsewhere, so nobody here knows who reaches it"
        )
    return lines or ["  none: the workers listen on loopback only"]


class Advice(NamedTuple):
    """An advisory of some hosts, like «error, accepted: ID on HOST»."""

    title: str
    severity: str
    messages: list[str]
    remedy: str
    reference: str


def advice(plan: dict) -> list[Advice]:
    """The plan's advisories, alike ones of several hosts as one."""
    alike: dict[tuple, list[dict]] = {}
    for advisory in plan["advisories"]:
        alike.setdefault(
            tuple(advisory[key] for key in ("severity", "accepted", "id", "remedy", "reference")), []
        ).append(advisory)
    found = []
    for (severity, accepted, identifier, remedy, reference), entries in alike.items():
        hosts = ", ".join(dict.fromkeys(host for advisory in entries for host in advisory["hosts"]))
        title = f"{severity}{', accepted' if accepted else ''}: {identifier}{' on ' if hosts else ''}{hosts}"
        found.append(Advice(title, severity, [advisory["message"] for advisory in entries], remedy, reference))
    return found


def _advisories(plan: dict) -> list[str]:
    lines = []
    for entry in advice(plan):
        lines.append(f"  {entry.title}")
        for text in (*entry.messages, f"Remedy: {entry.remedy}", f"See {entry.reference}"):
            lines += _wrapped("      ", text)
    return lines or ["  none"]


RATES = {
    "measured": "measured on their hosts",
    "table": "taken from a table by name and architecture",
    "assumed": "assumed, of at least one of them",
}


def speed_rows(plan: dict) -> list[list[str]]:
    """What is predicted, how much, and what limits it; nothing where the model does not fit."""
    estimate = plan["estimate"]
    if estimate["generation_tokens_per_s"] is None:
        return []
    rows = [
        ["generation", f"{estimate['generation_tokens_per_s']:g} tokens per second", estimate["limited_by"]],
        ["prompts", f"{estimate['prompt_tokens_per_s']:g} tokens per second", estimate["prompt_limited_by"]],
        ["loading", f"{estimate['load_s']:g} seconds", estimate["load_limited_by"]],
    ]
    return [[name, figure, f"limited by: {limit}"] for name, figure, limit in rows]


def speed_notes(plan: dict) -> list[str]:
    """What the best host alone would do, and what the prediction rests on."""
    estimate, best = plan["estimate"], plan["estimate"]["best_single_host"]
    alone = "does not hold the model"
    if best["fits"]:
        alone = f"{best['generation_tokens_per_s']:g} tokens per second in generation, {best['prompt_tokens_per_s']:g} in prompts"
    known = (
        f"Rates of devices are {RATES.get(estimate['rates'], estimate['rates'])}; that the head reads {estimate['disk']['gb_per_s']:g} GB per second of the "
        "model is assumed. A prompt has 512 tokens, the context is empty, and no "
        "worker has a cache of the model."
    )
    return [f"{best['host']} alone: {alone}", known]


def _speed(plan: dict) -> list[str]:
    rows = speed_rows(plan)
    notes = [line for note in speed_notes(plan) for line in _wrapped("  ", note)] if rows else []
    return [*table(rows).splitlines(), *notes] if rows else []


def _network(plan: dict) -> list[str]:
    estimate = plan["estimate"]
    if not estimate["links"]:
        return ["  nothing: no worker is used"]
    kinds = dict.fromkeys((link["kind"], link["one_way_ms"], link["measured"]) for link in estimate["links"])
    ways = ", ".join(f"{time:g} ms by {kind} ({'measured' if known else 'assumed'})" for kind, time, known in kinds)
    hosts = list(dict.fromkeys(link["host"] for link in estimate["links"] if "visit_ms" in link))
    visits = f" Visits to {', '.join(hosts)} cost what was measured (llama_link_visit_ms)." if hosts else ""
    return _wrapped(
        "  ",
        f"{estimate['bound']} {estimate['network_ms_per_token']:.1f} ms for each token, with what workers need beside computing: it crosses the "
        f"network {estimate['crossings']} times, one way {ways}.{visits}",
    )


def _fallbacks(plan: dict) -> list[str]:
    """What is served while a used worker is away, a line for each."""
    rows = [
        [f"without {entry['without']}:", f"fits, {entry['generation_tokens_per_s']:g} tokens per second"]
        for entry in plan["fallbacks"]
    ]
    rows += [[f"without {entry['without']}:", _why_nothing(entry)] for entry in plan["no_fallback"]]
    after = plan["head"]["fallback_after"]
    meaning = "llama_server_fallback is false: while one of them is away, nothing is served."
    if after is not None:
        meaning = f"llama_server_fallback is true: where it fits, that is served after {after} seconds."
    return [*table(rows).splitlines(), *_wrapped("  ", meaning)] if rows else []


def _why_nothing(entry: dict) -> str:
    """:param entry: of ``no_fallback``."""
    missing = entry["missing_mib"]
    return f"cannot be planned: {entry['reason']}" if missing is None else f"does not fit, {missing} MiB missing"


def changes_of(
    plan: dict, restarts: Mapping[str, list[str]], drifts: Mapping[str, dict], unasked: Mapping[str, str]
) -> list[str]:
    """What an apply would change, as lines: each host's releases, differences and restarts.

    :param restarts: host → services that have to be restarted.
    :param drifts: host → what state.drift found there.
    :param unasked: host → why it was not compared.
    """
    lines = []
    for name, drift in drifts.items():
        if not drift["differences"] and not restarts[name]:
            lines.append(f"  {name}  is as planned")
            continue
        lines.append(f"  {name}")
        planned = [build["id"] for build in plan["hosts"][name]["builds"]]
        gone = [identity for identity in drift["running_releases"] if identity not in planned]
        lines += [f"    - runs {identity}" for identity in gone]
        lines += [f"    + {identity} would be installed" for identity in drift["missing_builds"]]
        rest = [difference["text"] for difference in drift["differences"] if difference["kind"] != "release"]
        for text in rest[:SHOWN_DIFFERENCES]:
            lines += _wrapped("    ~ ", text)
        if len(rest) > SHOWN_DIFFERENCES:
            lines.append(f"    ~ and {len(rest) - SHOWN_DIFFERENCES} more")
        if restarts[name]:
            lines += _wrapped("    ! ", f"would be started: {', '.join(restarts[name])}")
    for name, reason in unasked.items():
        lines += _wrapped("  ", f"{name}  was not compared: {reason}")
    return lines


def plan_parts(plan: dict, changed: list[str] | None = None) -> dict[str, list[str]]:
    """Title → lines of each part of the page that is not empty.

    :param changed: of changes_of; None leaves that part out.
    """
    refused = {"Refused": [line for reason in plan["reasons"] for line in _wrapped("  ", reason)]}
    if "hosts" not in plan:
        return refused
    parts = {
        "Topology": _topology(plan),
        "Memory": _memory(plan) if plan["placement"] or plan["further"] else [],
        "Commands": _commands(plan),
        "Open ports": _ports(plan),
        "Advisories": _advisories(plan),
        "Predicted speed": _speed(plan),
        "What the network adds": _network(plan),
        "While a worker is away": _fallbacks(plan),
        "What site.yml would change": changed or [],
        **refused,
    }
    return {title: lines for title, lines in parts.items() if lines}


def plan_title(plan: dict) -> list[str]:
    if "hosts" not in plan:
        return [f"  {plan['cluster']} has no plan"]
    release, source = plan["release"], source_of(plan)
    return [
        *_wrapped("  ", f"{plan['cluster']} {'would serve' if plan['refused'] else 'serves'} {plan['model']['name']}"),
        *(_wrapped("  ", f"from {source}") if source else []),
        f"  with {release['ref']}, RPC protocol {release['protocol'] or 'of an unknown version'}",
    ]


def plan_page(plan: dict, changed: list[str] | None = None) -> str:
    """The whole plan for a person, at most WIDTH columns wide where names allow.

    :param changed: of changes_of; None leaves that part out.
    """
    lines = plan_title(plan)
    for title, part in plan_parts(plan, changed).items():
        lines += ["", title, *part]
    return "\n".join(["", *lines, ""])


def request_lines(plan: dict) -> list[str]:
    """How to ask the server, as a shell takes it."""
    head = plan["head"]
    question = (
        '{"prompt": "", "temperature": 0}'
        if plan["model"]["known_answer"]
        else '{"prompt": "Once upon a time", "max_tokens": 32}'
    )
    key = ["-H", "Authorization: Bearer KEY"] if head["api_key_file"] else []
    return command_lines(["curl", "-s", *key, f"{head['url']}/v1/completions", "-d", question], {}, "    ")


MARKS = {"passed": "ok", "failed": "FAILED", "not tested": "not tested"}


def checks_table(checks: list[dict]) -> str:
    return table([[MARKS[check["status"]], check["name"], check["subject"], check["evidence"]] for check in checks])
