# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a benchmark measures: the variables ``llama_benchmark_…``, the loads of models that follow from them, and their cells."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import (
    MOST_CELLS,
    Cell,
    DeviceMemory,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs, same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, ModelRequest, ModelSource

CACHE_CELLS = 256
"""llama.cpp makes a cache of a multiple of so many tokens."""
PREFIX, VARIED = "llama_benchmark_", "llama_server_"
LIMITS = {
    "hosts": (1, 64),
    "prompts": (1, 1 << 20),
    "generated": (1, 1 << 20),
    "depths": (0, 1 << 24),
    "latency_ms": (0, 10_000),
    "repetitions": (1, 100),
    "timeout": (60, 7 * 86400),
}
"""Variable without its prefix → the least and the most of its values."""
MOST_LATENCIES = 10
"""llama-bench writes all repetitions of a test in one line, which runner.LINE_BYTES hold."""


class Request(NamedTuple):
    """The variables ``llama_benchmark_…``."""

    hosts: tuple[int, ...]
    models: tuple[ModelRequest, ...]
    vary: Mapping[str, Sequence[Any]]
    prompts: tuple[int, ...]
    generated: tuple[int, ...]
    depths: tuple[int, ...]
    latency_ms: tuple[float, ...]
    repetitions: int
    timeout: int
    text: str | None

    @property
    def variants(self) -> list[dict[str, Any]]:
        """Every combination of the values to vary, as variables of the head; one without any where nothing varies."""
        return [dict(zip(self.vary, values)) for values in itertools.product(*self.vary.values())]


SPECULATION = f"{VARIED}speculation"
TEXT = (
    3
    * """\
def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

def largest(values):
    found = values[0]
    for value in values[1:]:
        if value > found:
            found = value
    return found

"""
)
"""What llama-server continues where nothing is said: any model writes it once more."""


class Load(NamedTuple):
    """A load of a model, with which several cells are measured."""

    hosts: tuple[str, ...]
    backend: str
    model: ModelRequest
    settings: Mapping[str, str]
    latencies_ms: tuple[float, ...]
    """That the proxy adds, in turns from one repetition to the next; empty where workers are reached directly."""
    prompts: tuple[int, ...]
    generated: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def tests(self) -> list[str]:
        """As llama-bench names them."""
        return [*(f"pp{number}" for number in self.prompts), *(f"tg{number}" for number in self.generated)]

    text: str = ""
    """That llama-server itself continues, since programs that measure predict no tokens; empty where they measure."""

    @property
    def context(self) -> int:
        """Tokens of the longest of the tests, as llama-bench makes its cache."""
        text = len(
            self.text.replace(" ", "\u2581").encode()
        )  # a token has a byte at least, and some vocabularies write spaces so
        longest = max(*self.prompts, *self.generated, 0) + max(self.depths) + text
        return -(-longest // CACHE_CELLS) * CACHE_CELLS


# ------------------------------------------------------------------------------------------------------------ variables


def request_of(variables: Mapping[str, Any]) -> Request:
    """:param variables: of the head, with their defaults.
    :raises Refusal: names the variable and its value.
    """
    values = {name: variables[f"{PREFIX}{name}"] for name in Request._fields}
    values = {
        name: tuple(value or ()) if isinstance(value, (list, type(None))) else value for name, value in values.items()
    }
    for name, (least, most) in LIMITS.items():
        _check_numbers(name, values[name], least, most)
    if not (values["prompts"] or values["generated"]) or not values["depths"]:
        raise Refusal(
            f"{PREFIX}prompts and {PREFIX}generated, or {PREFIX}depths is empty, so there is nothing to measure: give a value"
        )
    if len(values["latency_ms"]) > MOST_LATENCIES:
        raise Refusal(f"{PREFIX}latency_ms has {len(values['latency_ms'])} values: give {MOST_LATENCIES} or fewer")
    values["vary"] = values["vary"] or {}
    if SPECULATION in values["vary"] and not values["generated"]:
        raise Refusal(
            f"{PREFIX}generated is empty, and {SPECULATION} changes generation alone: give a number of tokens"
        )
    _check_varied(values["vary"], variables.keys())
    models = tuple(_model(index, model, variables) for index, model in enumerate(values["models"]))
    names = [name_of(model) for model in models]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise Refusal(f"{PREFIX}models has {duplicates[0]} twice, and tables name models so: leave one of them out")
    return Request(**{**values, "models": models})


def _check_numbers(name: str, value: Any, least: float, most: float) -> None:
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if not least <= number <= most:
            raise Refusal(f"{PREFIX}{name} has {number}: use {least} to {most}")
    if len({f"{number:g}" if isinstance(number, float) else number for number in numbers}) < len(numbers):
        raise Refusal(f"{PREFIX}{name} has a value twice: remove it there")


def _check_varied(vary: Mapping[str, Any], known: Collection[str]) -> None:
    for name, values in vary.items():
        if not name.startswith(VARIED) or name not in known:
            raise Refusal(f"{PREFIX}vary has {validation.show(name)}: use a variable that begins with {VARIED}")
        if not isinstance(values, (list, tuple)) or not values:
            raise Refusal(f"{PREFIX}vary.{name} is {validation.show(values)}: give a list of values")
        if len(set(map(_text_of, values))) < len(values):
            raise Refusal(f"{PREFIX}vary.{name} has a value twice: remove it there")


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def settings_of(variant: Mapping[str, Any]) -> dict[str, str]:
    """A combination of values as a cell has it."""
    return {name: _text_of(value) for name, value in variant.items()}


def _model(index: int, source: Mapping[str, Any], variables: Mapping[str, Any]) -> ModelRequest:
    """An entry of llama_benchmark_models; token and way of fetching are those of the model that is served."""
    kinds = (*model_inputs.KINDS, "known_answer", "checksum")
    entry = {f"llama_model_{kind}": source.get(kind) for kind in (*kinds, "gguf_summary", "mmproj", "draft")}
    try:
        return model_inputs.request_of({**variables, **entry})
    except Refusal as refusal:
        raise Refusal(f"{PREFIX}models[{index}]: {refusal}") from None


def name_of(model: ModelRequest) -> str:
    if model.known_answer:
        return f"known-answer-{model.known_answer.layers}x{model.known_answer.width}-{model.known_answer.type}"
    source = cast(ModelSource, model.source)
    if source.huggingface:
        hub = source.huggingface
        path = hub.files[0] if hub.files else f"{hub.repo}-{hub.quantisation or ''}".rstrip("-")
    else:
        path = source.path or source.copy or source.ollama or urlsplit(source.url[0]).path
    return PurePosixPath(path).name.removesuffix(".gguf")


# ---------------------------------------------------------------------------------------------------------------- loads


def hosts_in_order(plan: Plan) -> list[str]:
    """The head, then the hosts that lend devices: those that hold layers in the plan's order, then the others."""
    lending = [name for name, host in plan.hosts.items() if host.workers]
    lending += [worker.host for worker in plan.external_workers]
    return list(dict.fromkeys([*hosts_with_layers(plan), *lending]))


def hosts_with_layers(plan: Plan) -> list[str]:
    """The head, then the hosts whose workers hold layers."""
    return list(dict.fromkeys([plan.head.host, *(entry.host for entry in plan.placement if entry.endpoint)]))


def loads_of(
    request: Request, variants: Sequence[tuple[Mapping[str, str], Cluster]], plan: Plan
) -> list[tuple[Load, Cluster]]:
    """Every load of a model that is measured, each with the cluster as it would serve it: what is reached directly first, then through the proxy.

    :param variants: each combination of the values to vary, and the cluster with it.
    :param plan: that serves.
    :raises Refusal: there are fewer hosts, or too many cells.
    """
    hosts = hosts_in_order(plan)
    beyond = [number for number in request.hosts if number > len(hosts)]
    if beyond:
        raise Refusal(
            f"{PREFIX}hosts has {beyond[0]}, but the cluster has {len(hosts)} hosts with devices ({', '.join(hosts)}): use a smaller number"
        )
    places = itertools.product(
        request.models or (variants[0][1].model,), request.hosts or range(1, len(hosts) + 1), variants
    )
    served, tests = serving_backend(plan), (request.prompts, request.generated, request.depths)
    if SPECULATION in request.vary:
        tests = ((), request.generated, (0,))
    text = (request.text or TEXT) if SPECULATION in request.vary else ""
    direct = [
        (Load(tuple(hosts[:number]), cluster.server.backend or served, model, settings, (), *tests, text), cluster)
        for model, number, (settings, cluster) in places
    ]
    # llama-sweep-bench repeats nothing, so that there is nothing to take turns with.
    turns = [(latency,) for latency in request.latency_ms] if plan.release.fork else [request.latency_ms]
    first = {name: getattr(request, name)[:1] for name in ("prompts", "generated", "depths")}
    delayed = [
        (load._replace(latencies_ms=latencies, **first), cluster)
        for load, cluster in direct
        for latencies in turns
        if latencies and len(load.hosts) > 1 and load.settings == variants[0][0] and not text
    ]
    loads = [*direct, *delayed]
    cells = sum(len(load.tests) * len(load.depths) * max(1, len(load.latencies_ms)) for load, _cluster in loads)
    if cells > MOST_CELLS:
        raise Refusal(
            f"the variables {PREFIX}… ask for {cells} measurements, and {MOST_CELLS} are possible: give shorter lists"
        )
    return [(load, _cluster_of(cluster, load, plan)) for load, cluster in loads]


def _cluster_of(cluster: Cluster, load: Load, plan: Plan) -> Cluster:
    """The cluster as it would serve this load: with these hosts alone, all of their devices, a cache for the tests, and the model alone, since
    programs that measure load neither projector nor draft. Prompts are in the pieces of the plan that serves, which are planned for its context."""
    server, served = cluster.server, None if plan.model.known_answer else plan.estimate.prompt
    if served:
        batch = server.batch or max(served.batch, server.micro_batch or 0)
        server = server._replace(batch=batch, micro_batch=server.micro_batch or min(served.micro_batch, batch))
    model = load.model._replace(mmproj=None)
    if not load.text:
        server, model = server._replace(speculation=None), model._replace(draft=None)
    return cluster._replace(
        model=model,
        within=frozenset(load.hosts),
        placement="all",
        server=server._replace(backend=load.backend, context=load.context, parallel=1, fallback=False),
    )


def _build_id(plan: Plan) -> str:
    """Of the head's program."""
    return PurePosixPath(plan.head.argv[0]).parts[-3]


def serving_backend(plan: Plan) -> str:
    return next(build.backend for build in plan.hosts[plan.head.host].builds if build.id == _build_id(plan))


def obstacle(planned: Plan | Refused, served: Plan, load: Load) -> str | None:
    """Why a load cannot be measured; None where it can.

    :param planned: the plan of the load.
    """
    if planned.refused or isinstance(planned, Refused):
        return " ".join(planned.reasons)
    wanted = _build_id(planned)
    if wanted not in [build.id for build in served.hosts[served.head.host].builds]:
        return (
            f"it needs the build {wanted} of {load.backend}, which the plan that serves does not have: "
            "set the same options for the server (llama_server_...), and run site.yml"
        )
    holds = {entry.host for entry in planned.placement if entry.layers or entry.output}
    idle = [host for host in load.hosts[1:] if host not in holds]
    return f"the plan gives no layer to {', '.join(idle)}" if idle else None


# ---------------------------------------------------------------------------------------------------------------- cells


def cells_of(load: Load, planned: Plan | Refused, skipped: str | None) -> list[Cell]:
    """The cells of a load, not measured yet.

    :param skipped: why nothing will be measured.
    """
    plan = None if planned.refused or isinstance(planned, Refused) else planned
    placed = plan.placement if plan else ()
    speculation = plan.estimate.speculation if plan and load.text else None
    return [
        Cell(
            key=_key(load, test, depth, latency),
            hosts=load.hosts,
            backend=load.backend,
            model=name_of(load.model),
            settings=load.settings,
            latency_ms=latency,
            test=test,
            depth=depth,
            predicted=speculation.generation_tokens_per_s
            if speculation
            else _predicted(plan, test, depth, latency)
            if plan
            else None,
            predicted_load_s=plan.estimate.load_s if plan else None,
            memory_mib=tuple(DeviceMemory(entry.device, entry.host, entry.total_mib, None) for entry in placed),
            skipped=skipped or (_why_not_swept(plan, test, depth) if plan and plan.release.fork else None),
        )
        for latency in load.latencies_ms or (None,)
        for depth in load.depths
        for test in load.tests
    ]


def _key(load: Load, test: str, depth: int, latency: float | None) -> str:
    hosts = f"{len(load.hosts)} host{'s' * (len(load.hosts) > 1)}"
    settings = [f"{name.removeprefix(VARIED)}={value}" for name, value in load.settings.items()]
    added = [] if latency is None else [f"{latency:g}ms"]
    return "/".join([load.backend, hosts, name_of(load.model), test, f"d{depth}", *settings, *added])


def _predicted(plan: Plan, test: str, depth: int, latency: float | None) -> float | None:
    """Tokens per second by the plan; None of prompts that a pipeline computes, other than the one that is planned for. Generation through the proxy
    takes the plan's crossings times the latency more."""
    prompt = test.startswith("pp")
    mean = plan.estimate.prompt_tokens_per_s if prompt else plan.estimate.generation_tokens_per_s
    long = plan.estimate.prompt
    if long and test == f"pp{long.tokens}":
        mean = long.tokens_per_s
    elif long and long.pipelined and prompt and int(test[2:]) > long.micro_batch:
        return None
    if not mean or depth or (prompt and latency is not None):
        return None
    return round(1000 / (1000 / mean + plan.estimate.crossings * (latency or 0)), 3)


def micro_batch_of(argv: Sequence[str]) -> int:
    """Tokens of a physical batch by a command line of llama-server."""
    sizes = [value for word, value in zip(argv, argv[1:]) if word in ("--ubatch-size", "-ub") and value.isdecimal()]
    return int(sizes[-1]) if sizes else 512


def _why_not_swept(plan: Plan, test: str, depth: int) -> str | None:
    """Why llama-sweep-bench of ik_llama.cpp does not measure a test: it gives each micro-batch of a prompt, at multiples of it."""
    size, program = micro_batch_of(plan.head.argv), options.MEASURING[options.IK_LLAMA]
    if test.startswith("pp") and int(test[2:]) % size:
        return f"{program} measures prompts of whole micro-batches, {size} tokens: give multiples of that in {PREFIX}prompts"
    return (
        f"{program} measures at depths that are multiples of the micro-batch, {size} tokens" if depth % size else None
    )


def asks_of(plan: Plan, load: Load, repetitions: int) -> dict[str, Any] | None:
    """What runner.Load asks llama-server; None where another program measures."""
    asks = {"port": plan.head.port, "text": load.text, "generated": load.generated, "repetitions": repetitions}
    return asks if load.text else None


def identity(plan: Plan, cells: Sequence[Cell], repetitions: int, models: Mapping[str, str]) -> str:
    """Says of two benchmarks whether they measure the same: the same cells and models with the same plan and release."""
    planned = [(cell.key, [row.planned_mib for row in cell.memory_mib]) for cell in cells]
    content = [plan.id, plan.release.id, repetitions, planned, sorted(models.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]


def machines(cluster: Cluster, plan: Plan) -> dict[str, str]:
    """What each host is, for the record."""
    links = {link.host: link for link in plan.estimate.links}
    described = {}
    for name in hosts_in_order(plan):
        if name in cluster.places:
            facts, link = cluster.places[name].facts, links.get(name)
            parts = [f"{facts.system} {facts.architecture}", str(facts.cpu.get("model", "")), f"{facts.memory_mib} MiB"]
            parts += [accelerator.name for accelerator in same_device.devices(facts)]
            parts += [f"{link.kind} of {2 * link.one_way_ms:g} ms, {1000 * link.gbit_per_s:g} Mbit/s"] if link else []
            described[name] = ", ".join(filter(None, parts))
    return described


def release_of(plan: Plan) -> str:
    """The release that serves, for the record."""
    release = plan.release
    build = f", build {release.build}" if release.build is not None else ""
    return f"{release.fork or options.MAINLINE} {release.ref}{build}, commit {release.commit}, RPC protocol {release.protocol or 'not known'}"
