# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan as text for a person."""

from __future__ import annotations

import json
import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import prebuilt, replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import STOPPED, Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    AdvisoryPlan,
    AuxiliaryModelPlan,
    DevicePlacement,
    Estimate,
    LinkEstimate,
    Plan,
    Refused,
)

WIDTH = 100
"""Columns of the page."""
BAR = 26
PARTS = {"weights": "█", "kv": "▓", "compute": "▒"}
AUXILIARY = "░"
"""Sign of a projector and of a draft model."""
ROLES = {"mmproj": "projector", "draft": "draft model"}
FREE = "·"
SHOWN_OF_COMMIT = 12
SHOWN_DIFFERENCES = 12
"""Number of differences for each host; the JSON of the plan and the run itself name them all."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as they must be; the last one is not padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip() for row in rows
    )


def wrap(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * (len(start) - len(start.lstrip()) + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def size_of(entry: DevicePlacement | AuxiliaryModelPlan, part: str) -> float:
    """Return the MiB of a device's weights, kv or compute."""
    sizes = {"weights": entry.weights_mib, "kv": entry.kv_mib, "compute": entry.compute_mib}
    return sizes[part]


def amount_text(entry: DevicePlacement, part: str) -> str:
    """Return the same as text, with ≤ before an upper bound."""
    return f"{'' if f'{part}_mib' in entry.exact else '≤ '}{size_of(entry, part):.0f}"


def overcommitment(entry: DevicePlacement) -> str:
    """Return text like «≤ 115 %» if weights, KV cache and compute buffers together may exceed the device's capacity, or nothing."""
    share = 100 * entry.total_mib / max(entry.capacity_mib, 1)
    return f"≤ {math.ceil(share)} %" if share > 100 else ""


def memory_bar(entry: DevicePlacement, width: int = BAR) -> str:
    """Return a bar of a device's capacity: weights, KV cache, compute buffers and free memory, each at least one column wide."""
    whole = max(entry.capacity_mib, entry.total_mib, 1)
    sizes = {sign: size_of(entry, part) for part, sign in PARTS.items()}
    sizes[AUXILIARY] = entry.auxiliary_mib
    sizes[FREE] = whole - entry.total_mib
    columns = {sign: 1 for sign, size in sizes.items() if size > 0}
    for _column in range(width - len(columns)):
        columns[max(columns, key=lambda sign: sizes[sign] / whole * width - columns[sign])] += 1
    return "".join(sign * count for sign, count in columns.items())


# ------------------------------------------------------------------------------------------------------- before a run


def plan_table(plan: Plan) -> str:
    """Return the first parts of the page: release, source, and the devices of the layers."""
    parts, titles = plan_parts(plan), ("Models",) if plan.head.models else ("Topology", "Memory")
    uncached = [
        line
        for worker, reason in _workers_without_cache(plan)
        for line in wrap("  ", f"no cache on {worker}: {reason}")
    ]
    lines = [*plan_title(plan), *uncached]
    for title in titles:
        lines += ["", *parts.get(title, [])]
    return "\n".join([*lines, ""])


ONE_AT_A_TIME = "One is loaded at a time: a request for another model waits while it loads."


def model_rows(plan: Plan) -> list[list[str]]:
    """Return a row of titles, and for each of several models its size, speed and loading time."""
    rows = [["model", "GiB", "context", "tokens/s", "prompts", "change"]]
    for model in plan.head.models or ():
        estimate = model.estimate
        weights = model.cpu.weights_mib + sum(entry.weights_mib for entry in model.placement)
        loading = "does not fit" if estimate.load_s is None else f"{estimate.load_s:g} s"
        speeds = [str(speed or "") for speed in (estimate.generation_range, estimate.prompt_range)]
        called = ", ".join([model.name, *model.aliases])
        rows.append([called, f"{weights / 1024:.1f}", str(model.context), *speeds, loading])
    return rows


def about_first(plan: Plan) -> str:
    return f"Unless stated otherwise, the rest describes {plan.head.models[0].name}." if plan.head.models else ""


def memory_plans(plan: Plan) -> dict[str, Plan]:
    """Return title → plan, one for each model as if it were the only one."""
    next_models = zip((plan.head.models or ())[1:], plan.each()[1:])
    return {"Memory": plan, **{f"Memory of {model.name}": model_plan for model, model_plan in next_models}}


def _without_a_worker(plan: Plan) -> list[str]:
    """Return for each worker which of several models can be loaded without it, in lines."""
    rows = []
    for name, host in plan.hosts.items():
        for worker in host.workers:
            models = [
                model.name
                for model in plan.head.models or ()
                if worker.endpoint not in {entry.endpoint for entry in model.placement}
            ]
            if worker.used:
                rows.append([f"without {name}:{worker.name}:", f"still served: {', '.join(models) or 'none'}"])
    return table(rows).splitlines() if rows else []


def source_of(plan: Plan) -> str:
    """Return the origin, number and size of the model's files; nothing for files on the head or several models."""
    model = plan.model
    if model.source.partition(":")[0] not in ("huggingface", "url", "copy") or plan.head.models:
        return ""
    source = model.source
    if re.fullmatch("[0-9a-f]{40,64}", model.revision or ""):
        source = source.replace(str(model.revision), str(model.revision)[:SHOWN_OF_COMMIT])
    sizes = [file.bytes for file in model.files]
    size = f", {sum(map(int, filter(None, sizes))) / (1024 * MIB):.2f} GiB" if all(sizes) else ""
    return f"{source}, {len(sizes)} file{'s' * (len(sizes) > 1)}{size}"


def _workers_without_cache(plan: Plan) -> list[tuple[str, str]]:
    """Return HOST:NAME of each worker that receives all of its layers over the network at each load, and the reason."""
    return [
        (f"{host_name}:{worker.name}", worker.cache_why)
        for host_name, host in plan.hosts.items()
        for worker in host.workers
        if plan.model.large_tensor_bytes and worker.used and not worker.cache
    ]


def request_lines(plan: Plan) -> list[str]:
    """Return a request to the server as a shell command."""
    question: dict[str, Any] = {"model": plan.head.models[0].name} if plan.head.models else {}
    path = replies.instead_of_text((plan.head.models[0] if plan.head.models else plan.head).argv)
    question |= (
        replies.question_without_text("Once upon a time")
        if path
        else {"prompt": "", "temperature": 0}
        if plan.each()[0].model.known_answer
        else {"prompt": "Once upon a time", "max_tokens": 32}
    )
    key = ["-H", "Authorization: Bearer KEY"] if plan.head.api_key_file else []
    return command_lines(
        ["curl", "-sS", *key, f"{plan.head.url}{path or '/v1/completions'}", "-d", json.dumps(question)], {}, "    "
    )


# ----------------------------------------------------------------------------------------------------------- the page


def plan_page(plan: Plan | Refused, changes: Sequence[str] = ()) -> str:
    """Return the whole plan, at most WIDTH columns wide if names allow.

    :param changes: what site.yml would change.
    """
    lines = plan_title(plan)
    for title, part in plan_parts(plan, changes).items():
        lines += ["", title, *part]
    return "\n".join(["", *lines, ""])


def plan_title(plan: Plan | Refused) -> list[str]:
    if isinstance(plan, Refused):
        return [f"  {plan.cluster} has no plan"]
    source, protocol = source_of(plan), plan.release.protocol or "of an unknown version"
    models = ", ".join(model.name for model in plan.head.models or (plan.model,))
    return [
        *wrap("  ", f"{plan.cluster} {'would serve' if plan.refused else 'serves'} {models}"),
        *(wrap("  ", f"from {source}") if source else []),
        f"  with {plan.release.ref}, RPC protocol {protocol}",
        *wrap("  ", _origin(plan)),
        *(
            wrap("  ", f"llama_release: auto picks {plan.release.source}: {plan.release.why}")
            if plan.release.why
            else []
        ),
    ]


def _origin(plan: Plan) -> str:
    """Return the origin of the release and the hosts that compile it."""
    release = plan.release
    origins = {"package": "the distribution's package", "pypi": "PyPI", "prebuilt": release.url or prebuilt.URL}
    origin = origins.get(release.source) or release.repository or release.url or release.path
    builders = ", ".join(
        dict.fromkeys(build.builder for host in plan.hosts.values() for build in host.builds if build.cmake_options)
    )
    return f"source: {origin}{f'; compiled on {builders} (takes minutes the first time)' if builders else ''}"


def plan_parts(plan: Plan | Refused, changes: Sequence[str] = ()) -> dict[str, Sequence[str]]:
    """Return title → lines of each part of the page that is not empty."""
    refused = {"Refused": [line for reason in plan.reasons for line in wrap("  ", reason)]}
    if isinstance(plan, Refused):
        return dict(refused)
    parts = {
        "Models": [*table(model_rows(plan)).splitlines(), f"  {ONE_AT_A_TIME}", *wrap("  ", about_first(plan))]
        if plan.head.models
        else [],
        "Topology": _topology(plan),
        **{
            title: _memory(model_plan) if model_plan.placement or model_plan.auxiliary_models else []
            for title, model_plan in memory_plans(plan).items()
        },
        "Commands": _commands(plan),
        "Open ports": _ports(plan),
        "Advisories": _advisories(plan),
        "Predicted speed": _speed(plan),
        "Network overhead": _network(plan),
        "While a worker is away": _without_a_worker(plan) if plan.head.models else _fallbacks(plan),
        "What site.yml would change": changes,
        **refused,
    }
    return {title: lines for title, lines in parts.items() if lines}


class TopologyRow(NamedTuple):
    """A device and its layers. ``link`` is None if the head drives it itself."""

    host: str
    device: str
    endpoint: str
    layers: str
    link: LinkEstimate | None

    def link_text(self) -> str:
        """Return kind and latency of the link, or nothing."""
        link = self.link
        return f"{link.kind}, {link.one_way_ms:g} ms{'' if link.measured else ' assumed'}" if link else ""


def topology_rows(plan: Plan) -> list[TopologyRow]:
    """Return all devices with layers in llama-server's order; the head's processor first if it has some too."""
    head = plan.head
    links = {link.endpoint: link for link in plan.estimate.links}
    devices = {worker.endpoint: worker.device for host in plan.hosts.values() for worker in host.workers}
    devices.update({worker.endpoint: f"{worker.backend}, run elsewhere" for worker in plan.external_workers})
    rows, start = [], head.cpu.layers
    if start and plan.placement:
        rows.append(TopologyRow(head.host, "CPU", "", _range(0, start), None))
    for entry in plan.placement:
        device, link = (devices[entry.endpoint], links[entry.endpoint]) if entry.endpoint else (entry.device, None)
        rows.append(TopologyRow(entry.host, device, entry.endpoint or "", _layers(entry, start), link))
        start += entry.layers
    return rows


def _range(start: int, count: int) -> str:
    return f"layer {start}" if count == 1 else f"layers {start} to {start + count - 1}"


def _layers(entry: DevicePlacement, start: int) -> str:
    """Return the layers of a device, like «layers 4 to 7, output»."""
    parts = [_range(start, entry.layers)] * bool(entry.layers) + ["output"] * bool(entry.output)
    if not parts:
        return "tensors from llama_server_override_tensor" if entry.weights_mib else "no layer"
    return ", ".join(parts)


def unused_workers(plan: Plan) -> str:
    """Return the declared workers without a layer."""
    workers = [
        f"{name} {worker.device} {worker.endpoint}"
        for name, host in plan.hosts.items()
        for worker in host.workers
        if not worker.used
    ]
    workers += [
        f"{worker.host} {worker.backend} {worker.endpoint}, run elsewhere"
        for worker in plan.external_workers
        if not worker.used
    ]
    return ", ".join(workers)


def _topology(plan: Plan) -> list[str]:
    head = plan.head
    rows = [["├─", row.host, row.device, row.endpoint, row.layers, row.link_text()] for row in topology_rows(plan)]
    lines = [f"  {head.host}  llama-server, {head.url}"]
    if rows:
        rows[-1][0] = "└─"
        lines += table(rows).splitlines()
    else:
        lines.append(f"  └─  the processor of {head.host}, all layers")
    unused = unused_workers(plan)
    return lines + (wrap("  declared but unused: ", unused) if unused else [])


def _memory(plan: Plan) -> list[str]:
    rows = [["device", "".ljust(BAR), "weights", "KV", "compute", "of"]]
    for entry in plan.placement:
        models = _auxiliary_models_on(plan, entry.device)
        total = entry.weights_mib + entry.kv_mib + sum(model.weights_mib + model.kv_mib for model in models)
        note = "too little" if total > entry.capacity_mib else overcommitment(entry)
        sizes = [amount_text(entry, part) for part in PARTS]
        rows.append([entry.device, memory_bar(entry), *sizes, ", ".join(filter(None, (f"{entry.capacity_mib}", note)))])
        rows += map(_auxiliary_row, models)
    other_devices = {model.device for model in plan.auxiliary_models} - {entry.device for entry in plan.placement}
    for device in sorted(other_devices, key=str):
        rows.append([device or f"processor of {plan.head.host}", "", "", "", "", ""])
        rows += map(_auxiliary_row, _auxiliary_models_on(plan, device))
    signs = {**PARTS, **({"auxiliary models": AUXILIARY} if plan.auxiliary_models else {})}
    legend = ", ".join(f"{sign} {part.replace('kv', 'KV cache')}" for part, sign in signs.items())
    footer = f"  in MiB, ≤ an upper bound; {legend}, {FREE} free"
    return [*table(rows).splitlines(), footer, *uncounted_models(plan), *reason_lines(plan)]


def _auxiliary_models_on(plan: Plan, device: str | None) -> list[AuxiliaryModelPlan]:
    """Return projector and draft model on a device; None is the head's processor."""
    return [model for model in plan.auxiliary_models if model.device == device]


def _auxiliary_row(model: AuxiliaryModelPlan) -> list[str]:
    sizes = [f"≤ {size_of(model, part):.0f}" for part in PARTS]
    return [f"  {ROLES[model.role]}", "", *sizes, "compute assumed" if model.assumed else ""]


def auxiliary_model_lines(plan: Plan) -> list[str]:
    """Return projector and draft model, for a page without rows for them."""
    lines = []
    for model in plan.auxiliary_models:
        sizes = ", ".join(f"{part.replace('kv', 'KV')} ≤ {size_of(model, part):.0f} MiB" for part in PARTS)
        place = f"on {model.device}" if model.device else f"by the processor of {model.host}"
        assumed = " (assumed)" if model.assumed else ""
        lines += wrap("  ", f"{ROLES[model.role]} {model.name} {place}: {sizes}{assumed}")
    return lines


def uncounted_models(plan: Plan) -> list[str]:
    """Return the models that the sizes of devices do not contain, or nothing."""
    names = {name for entry in plan.placement for name in entry.without}
    return wrap("  not counted: ", ", ".join(sorted(names))) if names else []


def reason_lines(plan: Plan) -> list[str]:
    """Return the reason for each device's layers, devices with the same reason in one line."""
    devices: dict[str, list[str]] = {}
    for entry in plan.placement:
        devices.setdefault(entry.reason, []).append(entry.device)
    return [line for reason, names in devices.items() for line in wrap("  ", f"{', '.join(names)}: {reason}")]


def command_lines(argv: Iterable[str], environment: Mapping[str, str], start: str = "      ") -> list[str]:
    """Return a shell command with an option and its value on each line, no line longer than the page if possible."""
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


class Command(NamedTuple):
    """A program that a service, or llama-server itself, runs on a host."""

    host: str
    name: str
    """Name of the service or of the model."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def commands(plan: Plan) -> list[Command]:
    started = [
        Command(name, service.name, service.process, service.environment)
        for name, host in plan.hosts.items()
        for service in host.services
    ]
    return [*started, *(Command(plan.head.host, model.name, model.argv, {}) for model in plan.head.models or ())]


def _commands(plan: Plan) -> list[str]:
    return [
        line
        for command in commands(plan)
        for line in (f"  {command.host}  {command.name}", *command_lines(command.argv, command.environment))
    ]


def _ports(plan: Plan) -> list[str]:
    lines = []
    for name, host in plan.hosts.items():
        ports: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for rule in host.firewall:
            ports.setdefault((rule.address, rule.sources), []).append(str(rule.port))
        unit = service_managers.MANAGERS[host.service_manager].closes_ports_by
        closed_by = host.firewall_manager or (unit if host.unit_closes else "")
        closed = (
            f"blocked for everyone else by {closed_by}" if closed_by else "not blocked for others by this collection"
        )
        closed += " (the tunnel key is required as well)" if host.tunnel_keys and name != plan.head.host else ""
        for (address, sources), numbers in ports.items():
            clients = "everybody" if names.EVERYBODY in sources else f"{', '.join(sources)}; {closed}"
            lines += wrap("  ", f"{name}  {address}: {', '.join(numbers)} for {clients}")
    for worker in plan.external_workers:
        text = f"{worker.host}  {worker.endpoint}: run elsewhere; its clients are unknown"
        lines += wrap("  ", text)
    return lines or ["  none: the workers listen on loopback only"]


def advisory_title(advisory: AdvisoryPlan) -> str:
    """Return a title like «error, accepted: ID on HOST»."""
    hosts = f" on {', '.join(advisory.hosts)}" if advisory.hosts else ""
    return f"{advisory.severity}{', accepted' if advisory.accepted else ''}: {advisory.id}{hosts}"


def _advisories(plan: Plan) -> list[str]:
    lines = []
    for entry in plan.advisories:
        lines.append(f"  {advisory_title(entry)}")
        for text in (entry.message, f"Remedy: {entry.remedy}", f"See {entry.reference}"):
            lines += wrap("      ", text)
    return lines or ["  none"]


RATES = {
    "table": "come from a table by name and architecture",
    "assumed": "are assumed for at least one device",
}


def makes_text(plan: Plan) -> bool:
    return plan.estimate.generation_range is not None


def speed_rows(plan: Plan) -> list[list[str]]:
    """Return the predictions with their values and limits; nothing if the model does not fit."""
    estimate, first = plan.estimate, plan.head.first_layers
    if estimate.load_s is None:
        return []
    layers = f"{first.layers} layers" if first and first.layers > 1 else "layer"
    generation = [f"{estimate.generation_range} tokens per second", f"limited by: {estimate.limited_by}"]
    return [
        ["generation", *(generation if makes_text(plan) else ["none: this model generates no text", ""])],
        ["prompts", f"{estimate.prompt_range} tokens per second", f"limited by: {estimate.prompt_limited_by}"],
        ["loading", f"{estimate.load_s:g} seconds", f"limited by: {estimate.load_limited_by}"],
        *([["proof", f"{first.seconds} seconds", f"once, with the first {layers}"]] if first else []),
        *(
            [
                f"after {speed.context} tokens",
                f"{speed.generation_range} tokens per second",
                f"prompts: {speed.prompt_range}",
            ]
            for speed in estimate.at_context
        ),
        *(
            [
                f"a prompt of {prompt.tokens}",
                f"{prompt.speed_range} tokens per second",
                f"{'pipeline, ' * prompt.pipelined}-b {prompt.batch} -ub {prompt.micro_batch}",
            ]
            for prompt in filter(None, [estimate.prompt])
        ),
    ]


def speed_notes(plan: Plan) -> list[str]:
    """Return the speed of the best single host, and the assumptions of the prediction."""
    estimate, best = plan.estimate, plan.estimate.best_single_host
    speed = "does not hold the model"
    if best.fits and estimate.load_s is not None and not makes_text(plan):
        speed = f"{best.prompt_range} tokens per second in prompts"
    elif best.fits:
        speed = f"{best.generation_range} tokens per second in generation, {best.prompt_range} in prompts"
    hosts = {entry.host for entry in plan.placement}
    hosts |= {plan.head.host} if plan.head.cpu.layers or not plan.placement else set()
    return [
        *([f"{best.host} alone: {speed}"] if best.fits or hosts != {best.host} else []),
        "About four in five measurements fell within the predicted range. "
        f"Device rates {RATES[estimate.rates or 'assumed']}; the head's disk speed is assumed. "
        "Unless a row says otherwise, a prompt has 512 tokens, the context is empty, and no worker has cached the model.",
        *_correction(estimate),
        _conversations(plan),
        *_sleep(plan),
    ]


def _correction(estimate: Estimate) -> list[str]:
    """Return how a measurement of the cluster corrects the speeds."""
    correction = estimate.correction
    if not correction:
        return []
    source = f"measured on {correction.date} with {correction.model} and {correction.release}"
    return [
        f"Generation is corrected by {correction.factor:.2g}, {source}; prompts, single hosts and fallbacks are not corrected."
    ]


def _conversations(plan: Plan) -> str:
    """Return where the head caches conversations."""
    head = plan.head
    if not makes_text(plan):
        return "This model generates no text, so no conversations are cached."
    memory = f"MiB of {head.host}'s memory"
    conversations = f"Conversations that left their slot are cached in {head.prompt_cache_mib} {memory}"
    if not head.prompt_cache_mib:
        conversations = "Conversations that left their slot are not cached"
    points = f" Checkpoints of the context take up to {head.checkpoints_mib} {memory}." if head.checkpoints_mib else ""
    return f"{conversations}.{points}"


def _sleep(plan: Plan) -> list[str]:
    """Return when llama-server unloads its model, and the cost for the next request."""
    idle = f"After {plan.head.idle_seconds} seconds without a request, llama-server unloads its model and frees the memory of workers"
    return [f"{idle}; the next request waits while it loads."] if plan.head.idle_seconds else []


def _speed(plan: Plan) -> list[str]:
    rows = speed_rows(plan)
    notes = [line for note in speed_notes(plan) for line in wrap("  ", note)] if rows else []
    return [*table(rows).splitlines(), *notes] if rows else []


def _network(plan: Plan) -> list[str]:
    estimate = plan.estimate
    if not estimate.links:
        return ["  none: no worker is used"]
    kinds = dict.fromkeys((link.kind, link.one_way_ms, link.measured) for link in estimate.links)
    ways = ", ".join(
        f"{time:g} ms by {kind} ({'measured' if measured else 'assumed'})" for kind, time, measured in kinds
    )
    return wrap(
        "  ",
        f"about {estimate.network_ms_per_token:.1f} ms for each token, including worker overhead; one-way latency: "
        f"{ways}.",
    )


def _fallbacks(plan: Plan) -> list[str]:
    """Return what is served while a used worker is away, in lines."""
    rows = [
        [
            f"without {entry.without}:",
            f"fits, {entry.generation_range} tokens per second" if makes_text(plan) else "fits",
        ]
        for entry in plan.fallbacks
    ]
    for entry in plan.no_fallback:
        missing = entry.missing_mib
        obstacle = f"cannot be planned: {entry.reason}" if missing is None else f"does not fit, {missing} MiB missing"
        rows.append([f"without {entry.without}:", obstacle])
    seconds = plan.head.fallback_after
    meaning = (
        f"llama_server_fallback is true: if the model fits, the head serves without the worker after {seconds} seconds."
    )
    if seconds is None:
        meaning = "llama_server_fallback is false: while one of them is away, nothing is served."
    return [*table(rows).splitlines(), *wrap("  ", meaning)] if rows else []


def changes_of(
    plan: Plan,
    restarts: Mapping[str, Sequence[str]],
    drifts: Mapping[str, Drift],
    uncompared: Mapping[str, str],
    packages_by_tool: Mapping[str, Mapping[str, Mapping[str, str]]],
) -> list[str]:
    """Return what an apply would change: each host's releases, packages, differences and restarts.

    :param restarts: host → services that must be restarted.
    :param drifts: hosts that were compared → how they differ.
    :param uncompared: host → reason why it was not compared.
    :param packages_by_tool: result of changes.missing_tools.
    """
    lines = []
    for name, drift in drifts.items():
        packages = {package for tools in packages_by_tool.get(name, {}).values() for package in tools.values()}
        if not drift.differences and not restarts[name] and not packages:
            lines.append(f"  {name}  is as planned")
            continue
        lines.append(f"  {name}")
        planned_builds = {build.id for build in plan.hosts[name].builds}
        lines += [f"    - runs {build}" for build in drift.running_releases if build not in planned_builds]
        lines += [f"    + {build} would be installed" for build in drift.missing_builds]
        if packages:
            lines += wrap("    + ", f"packages would be installed: {', '.join(sorted(packages))}")
        rest = [difference.text for difference in drift.differences if difference.kind != "release"]
        for text in rest[:SHOWN_DIFFERENCES]:
            lines += wrap("    ~ ", text)
        if len(rest) > SHOWN_DIFFERENCES:
            lines.append(f"    ~ and {len(rest) - SHOWN_DIFFERENCES} more")
        for service in restarts[name]:
            verb = "started" if drift.services[service].state == STOPPED else "restarted"
            lines += wrap("    ! ", f"{service} would be {verb}")
    for name, reason in uncompared.items():
        lines += wrap("  ", f"{name}  was not compared: {reason}")
    return lines
