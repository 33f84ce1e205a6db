# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of a plan as text for the terminal."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import prebuilt, replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import STOPPED, Drift
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import memory_text, speed_text

SHORT_COMMIT_LENGTH = 12
MAX_DIFFERENCES = 12
"""Maximum number of differences for each host; the JSON of the plan and the run itself list them all."""


def plan_summary(plan: types.Plan) -> str:
    """Return the first sections of the page: release, source, and the devices of the layers."""
    sections, titles = plan_sections(plan), ("Models",) if plan.head.models else ("Topology", "Memory")
    cache_notes = [
        line
        for worker, reason in _workers_without_cache(plan)
        for line in tables.wrap("  ", f"no cache on {worker}: {reason}")
    ]
    lines = [*title_lines(plan), *cache_notes]
    for title in titles:
        lines += ["", *sections.get(title, [])]
    return "\n".join([*lines, ""])


ROUTER_NOTE = "One model is loaded at a time: a request for another model waits until that model is loaded."


def first_model_note(plan: types.Plan) -> str:
    return f"Unless stated otherwise, other sections describe {plan.head.models[0].name}." if plan.head.models else ""


def model_source_text(plan: types.Plan) -> str:
    """Return the origin, number and size of the model's files; empty for files on the head or several models."""
    model = plan.model
    if model.source.partition(":")[0] not in ("huggingface", "url", "copy") or plan.head.models:
        return ""
    source = model.source
    if re.fullmatch("[0-9a-f]{40,64}", model.revision or ""):
        source = source.replace(str(model.revision), str(model.revision)[:SHORT_COMMIT_LENGTH])
    sizes_bytes = [file.bytes for file in model.files]
    size_text = f", {sum(map(int, filter(None, sizes_bytes))) / (1024 * MIB):.2f} GiB" if all(sizes_bytes) else ""
    return f"{source}, {len(sizes_bytes)} file{'s' * (len(sizes_bytes) > 1)}{size_text}"


def _workers_without_cache(plan: types.Plan) -> list[tuple[str, str]]:
    """Return HOST:NAME of each worker that receives all of its layers over the network at each load, and the reason."""
    return [
        (f"{host_name}:{worker.name}", worker.cache_why)
        for host_name, host in plan.hosts.items()
        for worker in host.workers
        if plan.model.large_tensor_bytes and worker.used and not worker.cache
    ]


def plan_page(plan: types.Plan | types.Refused, changes: Sequence[str] = ()) -> str:
    """Return the page of a plan, at most tables.MAX_LINE_LENGTH columns wide if names allow."""
    lines = title_lines(plan)
    for title, section_lines in plan_sections(plan, changes).items():
        lines += ["", title, *section_lines]
    return "\n".join(["", *lines, ""])


def title_lines(plan: types.Plan | types.Refused) -> list[str]:
    if isinstance(plan, types.Refused):
        return [f"  {plan.cluster} has no plan"]
    source, protocol = model_source_text(plan), plan.release.protocol or "unknown"
    model_names = ", ".join(model.name for model in plan.head.models or (plan.model,))
    return [
        *tables.wrap("  ", f"{plan.cluster} {'would serve' if plan.refused else 'serves'} {model_names}"),
        *(tables.wrap("  ", f"from {source}") if source else []),
        f"  with {plan.release.ref}, RPC protocol {protocol}",
        *tables.wrap("  ", _release_origin(plan)),
        *(
            tables.wrap("  ", f"llama_release: auto picks {plan.release.source}: {plan.release.why}")
            if plan.release.why
            else []
        ),
    ]


def _release_origin(plan: types.Plan) -> str:
    """Return the origin of the release and the hosts that compile it."""
    release = plan.release
    origins = {"package": "the distribution's package", "pypi": "PyPI", "prebuilt": release.url or prebuilt.BASE_URL}
    origin = origins.get(release.source) or release.repository or release.url or release.path
    builders = ", ".join(
        dict.fromkeys(build.builder for host in plan.hosts.values() for build in host.builds if build.cmake_options)
    )
    return f"source: {origin}{f'; compiled on {builders} (takes minutes the first time)' if builders else ''}"


def plan_sections(plan: types.Plan | types.Refused, changes: Sequence[str] = ()) -> dict[str, Sequence[str]]:
    """Return the lines of each section of the page that is not empty, by title."""
    refusal_section = {"Refused": [line for reason in plan.reasons for line in tables.wrap("  ", reason)]}
    if isinstance(plan, types.Refused):
        return dict(refusal_section)
    sections = {
        "Models": [
            *tables.format_table(speed_text.model_rows(plan)).splitlines(),
            f"  {ROUTER_NOTE}",
            *tables.wrap("  ", first_model_note(plan)),
        ]
        if plan.head.models
        else [],
        "Topology": _topology_lines(plan),
        **{
            title: memory_text.memory_lines(model_plan) if model_plan.placement or model_plan.auxiliary_models else []
            for title, model_plan in memory_text.memory_plans(plan).items()
        },
        "Commands": commands_section(plan),
        "Open ports": _port_lines(plan),
        "Advisories": _advisory_lines(plan),
        "Predicted speed": speed_text.speed_lines(plan),
        "Shapes": speed_text.shape_lines(plan),
        "Network overhead": speed_text.network_lines(plan),
        "While a worker is absent": speed_text.absent_worker_lines(plan)
        if plan.head.models
        else speed_text.fallback_lines(plan),
        "What site.yml would change": changes,
        **refusal_section,
    }
    return {title: lines for title, lines in sections.items() if lines}


class TopologyRow(NamedTuple):
    """A device and its layers. ``link`` is None if llama-server uses the device directly."""

    host: str
    device: str
    endpoint: str
    layers: str
    link: types.LinkEstimate | None

    def link_text(self) -> str:
        """Return the kind and latency of the link; empty without a link."""
        link = self.link
        return f"{link.kind}, {link.one_way_ms:g} ms{'' if link.measured else ' (assumed)'}" if link else ""


def topology_rows(plan: types.Plan) -> list[TopologyRow]:
    """Return all devices with layers in llama-server's order; the head's processor comes first if it has layers, too."""
    head = plan.head
    links = {link.endpoint: link for link in plan.estimate.links}
    devices = {worker.endpoint: worker.device for host in plan.hosts.values() for worker in host.workers}
    devices.update({worker.endpoint: f"{worker.backend}, external" for worker in plan.external_workers})
    rows, first_layer = [], head.cpu.layers
    if first_layer and plan.placement:
        rows.append(TopologyRow(head.host, "CPU", "", _layer_range_text(0, first_layer), None))
    for entry in plan.placement:
        device, link = (devices[entry.endpoint], links[entry.endpoint]) if entry.endpoint else (entry.device, None)
        rows.append(TopologyRow(entry.host, device, entry.endpoint or "", _layers_text(entry, first_layer), link))
        first_layer += entry.layers
    return rows


def _layer_range_text(first_layer: int, count: int) -> str:
    return f"layer {first_layer}" if count == 1 else f"layers {first_layer} to {first_layer + count - 1}"


def _layers_text(entry: types.DevicePlacement, first_layer: int) -> str:
    """Return the layers of a device, like 'layers 4 to 7, output'."""
    texts = [_layer_range_text(first_layer, entry.layers)] * bool(entry.layers) + ["output"] * bool(entry.output)
    if not texts:
        return "tensors from llama_server_override_tensor" if entry.weights_mib else "no layer"
    return ", ".join(texts)


def unused_workers_text(plan: types.Plan) -> str:
    """Return a text with the declared workers that have no layer."""
    workers = [
        f"{name} {worker.device} {worker.endpoint}"
        for name, host in plan.hosts.items()
        for worker in host.workers
        if not worker.used
    ]
    workers += [
        f"{worker.host} {worker.backend} {worker.endpoint}, external"
        for worker in plan.external_workers
        if not worker.used
    ]
    return ", ".join(workers)


def _topology_lines(plan: types.Plan) -> list[str]:
    head = plan.head
    rows = [["├─", row.host, row.device, row.endpoint, row.layers, row.link_text()] for row in topology_rows(plan)]
    lines = [f"  {head.host}  llama-server, {head.url}"]
    if rows:
        rows[-1][0] = "└─"
        lines += tables.format_table(rows).splitlines()
    else:
        lines.append(f"  └─  the processor of {head.host}, all layers")
    unused_workers_line = unused_workers_text(plan)
    return lines + (tables.wrap("  declared but unused: ", unused_workers_line) if unused_workers_line else [])


def _port_lines(plan: types.Plan) -> list[str]:
    lines = []
    for name, host in plan.hosts.items():
        ports: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for rule in host.firewall:
            ports.setdefault((rule.address, rule.sources), []).append(str(rule.port))
        unit_feature = service_managers.MANAGERS[host.service_manager].port_filter
        blocker = host.firewall_manager or (unit_feature if host.unit_closes else "")
        protection = f"blocked for everyone else by {blocker}" if blocker else "this collection does not block others"
        protection += " (the tunnel key is required as well)" if host.tunnel_keys and name != plan.head.host else ""
        for (address, sources), port_numbers in ports.items():
            clients = "everyone" if names.ANY_NETWORK in sources else f"{', '.join(sources)}; {protection}"
            lines += tables.wrap("  ", f"{name}  {address}: {', '.join(port_numbers)} for {clients}")
    for worker in plan.external_workers:
        text = f"{worker.host}  {worker.endpoint}: external worker; its clients are unknown"
        lines += tables.wrap("  ", text)
    return lines or ["  none for workers: they listen on loopback only"]


def advisory_title(advisory: types.AdvisoryPlan) -> str:
    """Return a title like 'error, accepted: ID on HOST'."""
    hosts = f" on {', '.join(advisory.hosts)}" if advisory.hosts else ""
    return f"{advisory.severity}{', accepted' if advisory.accepted else ''}: {advisory.id}{hosts}"


def _advisory_lines(plan: types.Plan) -> list[str]:
    lines = []
    for entry in plan.advisories:
        lines.append(f"  {advisory_title(entry)}")
        for text in (entry.message, f"Remedy: {entry.remedy}", f"See {entry.reference}"):
            lines += tables.wrap("      ", text)
    return lines or ["  none"]


def change_lines(
    plan: types.Plan,
    restarts: Mapping[str, Sequence[str]],
    drifts: Mapping[str, Drift],
    skipped_hosts: Mapping[str, str],
    missing_packages: Mapping[str, Mapping[str, Mapping[str, str]]],
) -> list[str]:
    """Return lines about what site.yml would change: each host's releases, packages, differences and restarts."""
    lines = []
    for name, drift in drifts.items():
        packages = {package for tools in missing_packages.get(name, {}).values() for package in tools.values()}
        if not drift.differences and not restarts[name] and not packages:
            lines.append(f"  {name}  matches the plan")
            continue
        lines.append(f"  {name}")
        planned_builds = {build.id for build in plan.hosts[name].builds}
        unplanned_builds = [build for build in drift.running_build_ids if build not in planned_builds]
        lines += [f"    - {build} is running but not planned" for build in unplanned_builds]
        lines += [f"    + {build} would be installed" for build in drift.missing_builds]
        if name == plan.head.host and plan.head.conversations and unplanned_builds:
            lines += tables.wrap("    ! ", "saved conversations would be lost, because another build cannot read them")
        if packages:
            lines += tables.wrap("    + ", f"packages would be installed: {', '.join(sorted(packages))}")
        difference_texts = [difference.text for difference in drift.differences if difference.kind != "release"]
        for text in difference_texts[:MAX_DIFFERENCES]:
            lines += tables.wrap("    ~ ", text)
        if len(difference_texts) > MAX_DIFFERENCES:
            lines.append(f"    ~ and {len(difference_texts) - MAX_DIFFERENCES} more")
        for service in restarts[name]:
            verb = "started" if drift.services[service].state == STOPPED else "restarted"
            lines += tables.wrap("    ! ", f"{service} would be {verb}")
    for name, reason in skipped_hosts.items():
        lines += tables.wrap("  ", f"{name}  was not compared: {reason}")
    return lines


def chat_page_lines(plan: types.Plan, has_page: bool) -> list[str]:
    """Return lines with the address of the chat page, or with a reference to its documentation."""
    if has_page:
        return [f"  Chat with the model in a browser: {plan.head.url}/"]
    is_off = any(build.ui == "false" for build in plan.hosts[plan.head.host].builds)
    return [] if is_off else ["  The server has no chat page; docs/clients.md describes how to get one."]


def request_lines(plan: types.Plan, certificate_names: Sequence[str] = ()) -> list[str]:
    """Return a request to the server as a shell command for the head."""
    request_body: dict[str, Any] = {"model": plan.head.models[0].name} if plan.head.models else {}
    path = replies.pooling_path((plan.head.models[0] if plan.head.models else plan.head).argv)
    model = plan.per_model()[0].model
    if path:
        request_body |= replies.pooling_request("Once upon a time")
    elif model.known_answer:
        request_body |= {"prompt": "", "temperature": 0}
    elif model.chat_template:
        path = "/v1/chat/completions"
        request_body["messages"] = [{"role": "user", "content": "Say hello."}]
    else:
        request_body |= {"prompt": "Once upon a time", "max_tokens": 32}
    curl_options, url = ["-H", "@-"] if plan.head.api_key_file else [], plan.head.url
    if plan.head.tls_certificate_file:  # curl trusts the server's own certificate, whoever signed it
        curl_options += ["--cacert", plan.head.tls_certificate_file]
    address = url.partition("//")[2].partition(":")[0]
    if certificate_names and address not in certificate_names:
        exact_names = [name for name in certificate_names if "*" not in name]
        authority = f"{[*exact_names, *certificate_names][0].replace('*', 'head')}:{plan.head.port}"
        curl_options += ["--connect-to", f"{authority}:{address}:{plan.head.port}"]
        url = f"https://{authority}"
    command = ["curl", "-sS", *curl_options, f"{url}{path or '/v1/completions'}", "-d", json.dumps(request_body)]
    lines = command_lines(command, {}, "    ")
    if plan.head.api_key_file:
        key_command = ["sed", "-n", "/./{s/^/Authorization: Bearer /p;q}", plan.head.api_key_file]
        lines = [f"    {shlex.join(key_command)} | \\", *lines]
    return lines


def command_lines(argv: Iterable[str], environment: Mapping[str, str], indent: str = "      ") -> list[str]:
    """Return a shell command as lines that fit the page if possible; an option and its value share a line."""
    segments = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    for word in map(shlex.quote, argv):
        if segments and segments[-1].startswith("-") and " " not in segments[-1] and not word.startswith("-"):
            segments[-1] += f" {word}"
        else:
            segments.append(word)
    lines = [indent]
    for segment in segments:
        if len(lines[-1]) + len(segment) + 3 > tables.MAX_LINE_LENGTH and lines[-1].strip():
            lines[-1] += "\\"
            lines.append(indent + "  ")
        lines[-1] += segment + " "
    return [line.rstrip() for line in lines]


class Command(NamedTuple):
    """A program that a service, or llama-server itself, runs on a host."""

    host: str
    name: str
    """Name of the service or of the model."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def commands(plan: types.Plan) -> list[Command]:
    service_commands = [
        Command(name, service.name, service.process, service.environment)
        for name, host in plan.hosts.items()
        for service in host.services
    ]
    return [
        *service_commands,
        *(Command(plan.head.host, model.name, model.argv, {}) for model in plan.head.models or ()),
    ]


def commands_section(plan: types.Plan) -> list[str]:
    return [
        line
        for command in commands(plan)
        for line in (f"  {command.host}  {command.name}", *command_lines(command.argv, command.environment))
    ]
