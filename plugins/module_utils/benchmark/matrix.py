# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a benchmark measures: the matrix of the variables ``llama_benchmark_…``, a plan for each load of a model, and the command lines."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import KnownAnswerPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs, same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, ModelRequest, ModelSource

SCHEMA = 1
SWEEP, SERVER = options.MEASURING[options.IK_LLAMA], options.SERVER
DEVICES_SINCE = 8643
"""llama-bench takes --device: read in the tree of this build, and not in that of 6170."""
FLASH_WORDS_SINCE = 9435
"""llama-bench takes on, off and auto for --flash-attn: read in the tree of this build; in that of 8643 it takes 0 and 1."""
CACHE_CELLS = 256
"""llama.cpp makes a cache of a multiple of so many tokens."""
MOST_CELLS = 4096
MOST_TURNS = 1500
"""Repetitions of one test, whose figures llama-bench writes in a line that measuring.LINE_BYTES hold."""
PREFIX = "llama_benchmark_"
LIMITS = {
    "hosts": (1, 64),
    "prompts": (1, 1 << 20),
    "generated": (1, 1 << 20),
    "depths": (0, 1 << 24),
    "micro_batches": (1, 1 << 16),
    "parallel": (1, 256),
    "latency_ms": (0, 10_000),
    "bandwidth_mbit": (1, 1_000_000),
    "repetitions": (1, 1000),
    "timeout": (60, 7 * 86400),
}
"""Variable without its prefix → the least and the most of its values."""


class Request(NamedTuple):
    """The variables ``llama_benchmark_…``."""

    hosts: tuple[int, ...]
    backends: tuple[str, ...]
    models: tuple[ModelRequest, ...]
    prompts: tuple[int, ...]
    generated: tuple[int, ...]
    depths: tuple[int, ...]
    micro_batches: tuple[int, ...]
    flash_attention: tuple[str, ...]
    cache_types: tuple[str, ...]
    splits: tuple[str, ...]
    parallel: tuple[int, ...]
    latency_ms: tuple[float, ...]
    bandwidth_mbit: tuple[float, ...]
    repetitions: int
    timeout: int
    again: tuple[str, ...]


class Options(NamedTuple):
    """How llama.cpp computes."""

    micro_batch: int
    flash_attention: str | None
    type_k: str
    type_v: str
    split: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            "ubatch": self.micro_batch,
            "flash_attention": self.flash_attention or "default",
            "cache_type_k": self.type_k,
            "cache_type_v": self.type_v,
            "split": self.split,
        }


class Link(NamedTuple):
    """What the proxy adds in front of each worker."""

    latencies_ms: tuple[float, ...]
    """In turns, from one repetition to the next."""
    bandwidth_mbit: float | None


class Setup(NamedTuple):
    """A load of a model, with which several cells are measured."""

    hosts: tuple[str, ...]
    backend: str
    model: ModelRequest
    options: Options
    link: Link | None
    """None where workers are reached as they are served."""
    tests: tuple[tuple[str, int], ...]
    """Names of llama-bench's tests (pp512, tg128), each with its depth."""

    @property
    def context(self) -> int:
        """Tokens of the longest of the tests, as llama-bench makes its cache."""
        longest = max(int(test[2:]) + depth for test, depth in self.tests)
        return -(-longest // CACHE_CELLS) * CACHE_CELLS


def _model(where: str, given: Mapping[str, Any], served: ModelRequest) -> ModelRequest:
    """:param served: whose token and way of fetching hold here, too."""
    source, size = model_inputs.source_of(where, given), given.get("known_answer")
    if bool(source) == bool(size):
        raise Refusal(
            f"{where} has {'a source and known_answer' if source else 'no source and no known_answer'}: give one of "
            f"{', '.join(model_inputs.KINDS)} and known_answer"
        )
    if not size:
        return ModelRequest(source, None, None, token_file=served.token_file, fetched_by=served.fetched_by)
    wanted = KnownAnswerPlan(size["layers"], size["width"], size["type"])
    problem = known_answer.problem(*wanted)
    if problem:
        raise Refusal(f"{where}.known_answer describes a model that is not possible: {problem}")
    return ModelRequest(None, wanted, None)


def _check_limits(given: Mapping[str, Any]) -> None:
    for name, (least, most) in LIMITS.items():
        values = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
        for value in values:
            if not least <= value <= most:
                raise Refusal(f"{PREFIX}{name} has {value}: use {least} to {most}")
        shown = {f"{value:g}" if isinstance(value, float) else value for value in values}
        if isinstance(given[name], (list, tuple)) and len(shown) < len(values):
            raise Refusal(f"{PREFIX}{name} has a value twice: remove it there")


def _check_words(given: Mapping[str, Any]) -> None:
    for value in given["flash_attention"]:
        if value not in ("on", "off", "auto"):
            raise Refusal(f"{PREFIX}flash_attention has {validation.show(value)}: use on, off or auto")
    for value in given["cache_types"]:
        parts = value.split("/")
        if len(parts) > 2 or any(part not in kv_cache.CACHE_TYPES for part in parts):
            raise Refusal(
                f"{PREFIX}cache_types has {validation.show(value)}: use one of {', '.join(kv_cache.CACHE_TYPES)}, or two with / between them"
            )
    for value in given["splits"]:
        shares = value.split("/")
        if not (
            all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", share, re.ASCII) for share in shares)
            and any(map(float, shares))
        ):
            raise Refusal(
                f"{PREFIX}splits has {validation.show(value)}: use shares with / between them, not all 0, as in 3/1"
            )
    for value in given["again"]:
        try:
            re.compile(value)
        except re.error as error:
            raise Refusal(
                f"{PREFIX}again has {validation.show(value)}, which is no regular expression: {error}"
            ) from None


def request_of(variables: Mapping[str, Any]) -> Request:
    """:param variables: of the head, with their defaults.
    :raises Refusal: names the variable and its value.
    """
    given = {name: variables[f"{PREFIX}{name}"] for name in Request._fields}
    given = {name: [] if value is None else value for name, value in given.items()}
    _check_limits(given)
    _check_words(given)
    served = model_inputs.request_of(variables)
    models = [_model(f"{PREFIX}models[{index}]", model, served) for index, model in enumerate(given["models"])]
    if not (given["prompts"] or given["generated"]) or not given["depths"] or not given["micro_batches"]:
        raise Refusal(
            f"{PREFIX}prompts and {PREFIX}generated, {PREFIX}depths or {PREFIX}micro_batches is empty, so there is nothing to measure: give a value"
        )
    asked = given["repetitions"] * max(given["parallel"], default=0)
    if asked > validation.ENTRIES:
        raise Refusal(
            f"{PREFIX}parallel has {max(given['parallel'])}, and {PREFIX}repetitions is {given['repetitions']}: that is {asked} requests for a figure, and "
            f"{validation.ENTRIES} are possible. Give smaller numbers."
        )
    turns = given["repetitions"] * len(given["latency_ms"])
    if turns > MOST_TURNS:
        raise Refusal(
            f"{PREFIX}repetitions is {given['repetitions']}, and {PREFIX}latency_ms has {len(given['latency_ms'])} values: that is {turns} repetitions of a "
            f"test, and {MOST_TURNS} are possible. Give smaller numbers."
        )
    named = [name_of(model) for model in models]
    twice = [name for name in named if named.count(name) > 1]
    if twice:
        raise Refusal(f"{PREFIX}models has {twice[0]} twice, and tables name models so: leave one of them out")
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, (list, tuple))}
    return Request(**{**given, **lists, "models": tuple(models)})


# ------------------------------------------------------------------------------------------------------------- matrix


def hosts_in_order(plan: Mapping[str, Any]) -> list[str]:
    """The head, then the hosts that lend devices: those that hold layers in the plan's order, then the others."""
    lending = [name for name, host in plan["hosts"].items() if host["workers"]]
    lending += [worker["host"] for worker in plan["external_workers"]]
    placed = [entry["host"] for entry in plan["placement"] if entry["endpoint"]]
    return list(dict.fromkeys([plan["head"]["host"], *placed, *lending]))


def _numbers(request: Request, hosts: Sequence[str]) -> list[int]:
    beyond = [number for number in request.hosts if number > len(hosts)]
    if beyond:
        raise Refusal(
            f"{PREFIX}hosts has {beyond[0]}, but the cluster has {len(hosts)} hosts with devices ({', '.join(hosts)}): use a smaller number"
        )
    return list(request.hosts) or list(range(1, len(hosts) + 1))


def options_of(request: Request, cluster: Cluster) -> list[Options]:
    """Every combination that is asked for, the one that serves in place of what is left out."""
    server = cluster.server
    types = [value.split("/") for value in request.cache_types] or [[server.cache_type_k, server.cache_type_v]]
    return [
        Options(micro_batch, flash, kinds[0], kinds[-1], split)
        for micro_batch, flash, kinds, split in itertools.product(
            request.micro_batches,
            request.flash_attention or [server.flash_attention],
            types,
            request.splits or [None],
        )
    ]


def setups_of(request: Request, cluster: Cluster, plan: Mapping[str, Any]) -> list[Setup]:
    """Every load of a model that is measured, in its order: what is served directly first, then through the proxy.

    :param plan: that serves.
    """
    hosts = hosts_in_order(plan)
    every = options_of(request, cluster)
    names_of_tests = [*(f"pp{number}" for number in request.prompts), *(f"tg{number}" for number in request.generated)]
    tests = tuple((test, depth) for depth in request.depths for test in names_of_tests)
    firsts = [f"pp{number}" for number in request.prompts[:1]] + [f"tg{number}" for number in request.generated[:1]]
    first = tuple((test, request.depths[0]) for test in firsts)
    models = request.models or (cluster.model,)
    backends = request.backends or (_serving_backend(plan),)
    places = list(itertools.product(backends, models, _numbers(request, hosts)))
    direct = [
        Setup(tuple(hosts[:number]), backend, model, options_, None, tests)
        for backend, model, number in places
        for options_ in every
    ]
    bandwidths: Sequence[float | None] = request.bandwidth_mbit or (None,)
    latencies = request.latency_ms or ((0.0,) if request.bandwidth_mbit else ())
    # llama-sweep-bench repeats nothing, so that there is nothing to take turns with.
    repeats = plan["release"].get("fork", options.MAINLINE) == options.MAINLINE
    turns = [latencies] if latencies and repeats else [(latency,) for latency in latencies]
    delayed = [
        Setup(tuple(hosts[:number]), backend, model, every[0], Link(own, bandwidth), first)
        for backend, model, number in places
        if number > 1
        for bandwidth in bandwidths
        for own in turns
    ]
    cells = sum(len(setup.tests) * len(_latencies(setup)) for setup in [*direct, *delayed])
    if cells > MOST_CELLS:
        raise Refusal(
            f"the variables {PREFIX}… ask for {cells} measurements, and {MOST_CELLS} are possible: give shorter lists"
        )
    return [*direct, *delayed]


def _latencies(setup: Setup) -> tuple[float, ...]:
    """Each of them is a cell of a test."""
    return setup.link.latencies_ms if setup.link else (0,)


def _serving_backend(plan: Mapping[str, Any]) -> str:
    head = plan["head"]
    program = PurePosixPath(head["argv"][0])
    builds = plan["hosts"][head["host"]]["builds"]
    return str(next(build["backend"] for build in builds if build["id"] == program.parts[-3]))


# -------------------------------------------------------------------------------------------------------------- plans


def cluster_of(cluster: Cluster, setup: Setup) -> Cluster:
    """The cluster as it would serve this load: with these hosts alone, all of their devices, a cache for the tests, and the model alone, since
    programs that measure load neither projector nor draft."""
    given = setup.options
    split = tuple(float(share) for share in given.split.split("/")) if given.split else ()
    return cluster._replace(
        model=setup.model._replace(mmproj=None, draft=None),
        within=frozenset(setup.hosts),
        placement="all",
        server=cluster.server._replace(
            backend=setup.backend,
            context=setup.context,
            parallel=1,
            flash_attention=given.flash_attention,
            cache_type_k=given.type_k,
            cache_type_v=given.type_v,
            tensor_split=split,
            extra_args=(*cluster.server.extra_args, "--ubatch-size", str(given.micro_batch)),
            fallback=False,
        ),
    )


def obstacle(planned: Mapping[str, Any], served: Mapping[str, Any], setup: Setup) -> str | None:
    """Why a load cannot be measured; None where it can.

    :param planned: the plan of the load.
    :param served: the plan that serves.
    """
    if planned["refused"]:
        return " ".join(planned["reasons"])
    head = served["head"]["host"]
    installed = {build["id"]: build["targets"] for build in served["hosts"][head]["builds"]}
    wanted = PurePosixPath(planned["head"]["argv"][0]).parts[-3]
    if wanted not in installed:
        return (
            f"it needs the build {wanted} of {setup.backend}, which the plan that serves does not have: "
            "set the same options for the server (llama_server_...), and run site.yml"
        )
    if not set(options.MEASURING.values()) & set(installed[wanted]):
        return f"the release on {head} has no program that measures: set {PREFIX}programs to true, and run site.yml"
    holds = {entry["host"] for entry in planned["placement"] if entry["layers"] or entry["output"]}
    idle = [host for host in setup.hosts[1:] if host not in holds]
    if idle:
        return f"the plan gives no layer to {', '.join(idle)}"
    return None


# -------------------------------------------------------------------------------------------------------------- argv


def _given(argv: Sequence[str]) -> dict[str, str]:
    """Option of llama-server, as the table calls it → its value in a command line, or what a switch stands for."""
    found = {}
    for word, following in zip(argv[1:], [*argv[2:], ""]):
        option = options.of_word(word) if word.startswith("-") else None
        if option:
            found[option.name] = options.meaning(word) or following
    return found


def argv_of(planned: Mapping[str, Any], setup: Setup, repetitions: int) -> list[str]:
    """The command line that measures what llama-server would serve with this plan."""
    release, argv = planned["release"], list(planned["head"]["argv"])
    program = str(PurePosixPath(argv[0]).with_name(options.MEASURING[release.get("fork", options.MAINLINE)]))
    given = _given(argv)
    if program.endswith(SWEEP):
        return [program, *_sweep(argv, setup)]
    generation = release["generation"]
    flash = given.get("flash-attention")
    if flash and generation < FLASH_WORDS_SINCE:
        flash = {"on": "1", "off": "0"}.get(flash)
    mode = given.get("load-mode")
    turns = len(_latencies(setup))
    words = [program, "-m", given["model"], "-o", "jsonl", "-v", "-r", str(repetitions * turns)]
    words += [options.SAYS_REPETITIONS] if turns > 1 else []
    pairs = {
        "-rpc": given.get("rpc"),
        "-dev": given["device"].replace(",", "/") if generation >= DEVICES_SINCE and given.get("device") else None,
        "-ngl": given.get("gpu-layers"),
        "-ts": given["tensor-split"].replace(",", "/") if "tensor-split" in given else None,
        "-ctk": given.get("cache-type-k"),
        "-ctv": given.get("cache-type-v"),
        "-fa": flash,
        "-t": given.get("threads"),
        "-ub": str(setup.options.micro_batch),
        "-ot": given["override-tensor"].replace(",", ";") if "override-tensor" in given else None,
        "--repack": "0" if given.get("repack") == "off" else None,
        **_load_mode(mode, argv),
    }
    return [*words, *(word for name, value in pairs.items() if value for word in (name, value))]


def _load_mode(mode: str | None, argv: Sequence[str]) -> dict[str, str]:
    """How llama-bench is told to read the model. Builds before --load-mode have switches of their own for two of the modes."""
    if not mode:
        return {}
    if {"--load-mode", "-lm"} & set(argv):
        return {"-lm": mode}
    return {"none": {"-mmp": "0"}, "dio": {"-dio": "1"}, "mmap": {"-mmp": "1"}}.get(mode, {})


UNSWEPT = {
    "host",
    "port",
    "context",
    "parallel",
    "warmup",
    "api-key-file",
    "tls-certificate",
    "tls-key",
    "fit",
    "log-verbosity",
}
"""Options of llama-server that llama-sweep-bench does not have, or that follow from the tests."""


def _sweep(argv: Sequence[str], setup: Setup) -> list[str]:
    words: list[str] = []
    left = False
    for word in argv[1:]:
        option = options.of_word(word) if word.startswith("-") else None
        if option:
            left = option.name in UNSWEPT
        if not left:
            words.append(word)
        if option and options.meaning(word):
            left = False
    generated = next((test[2:] for test, _depth in setup.tests if test.startswith("tg")), "1")
    depth = max(depth for _test, depth in setup.tests)
    return [*words, "-c", str(depth + setup.options.micro_batch), "-n", generated]


def arguments_of_tests(argv: Sequence[str], missing: Iterable[tuple[str, int]]) -> list[list[str]]:
    """The command lines that measure these tests, and no others: llama-bench combines what it is given, so there is one for each set of
    tests that have the same depths.

    :param missing: names of tests, each with its depth.
    """
    if argv[0].endswith(SWEEP):
        return [list(argv)]
    depths: dict[str, list[int]] = {}
    for test, depth in dict.fromkeys(missing):
        depths.setdefault(test, []).append(depth)
    groups: dict[tuple[int, ...], list[str]] = {}
    for test, own in depths.items():
        groups.setdefault(tuple(own), []).append(test)

    def numbers(tests: Iterable[str], kind: str) -> str:
        return ",".join(test[2:] for test in tests if test.startswith(kind)) or "0"

    return [
        [*argv, "-p", numbers(tests, "pp"), "-n", numbers(tests, "tg"), "-d", ",".join(map(str, own))]
        for own, tests in groups.items()
    ]


# -------------------------------------------------------------------------------------------------------------- cells


def name_of(model: ModelRequest) -> str:
    if model.known_answer:
        return f"known-answer-{model.known_answer.layers}x{model.known_answer.width}-{model.known_answer.type}"
    source = cast(ModelSource, model.source)
    if source.huggingface:
        repository = source.huggingface
        named = (
            repository.files[0]
            if repository.files
            else f"{repository.repo}-{repository.quantisation or ''}".rstrip("-")
        )
    else:
        named = source.path or source.copy or source.ollama or urlsplit(source.url[0]).path
    return PurePosixPath(named).name.removesuffix(".gguf")


def _is_source(source: ModelSource, model: ModelRequest) -> bool:
    return model.source is not None and source == model.source._replace(variable=source.variable)


def check_names(models: Iterable[ModelRequest], served: ModelRequest, path: str) -> None:
    """
    :param path: of the model that is served, on the head.
    :raises Refusal: another one has its name.
    """
    for model in models:
        same = model.known_answer or (model.source and (model.source.path == path or _is_source(model.source, served)))
        if name_of(model) == name_of(served) and not same:
            raise Refusal(
                f"{PREFIX}models has another file than the model that is served ({path}), and tables would name both {name_of(served)}: "
                "give one of them another name, or leave it out"
            )


def key_of(setup: Setup, test: str, depth: int, parallel: int = 1, latency: float = 0) -> str:
    """What names a cell in every benchmark.

    :param latency: that the proxy adds, milliseconds.
    """
    given, link = setup.options, setup.link
    parts = [
        setup.backend,
        f"{len(setup.hosts)} hosts" if len(setup.hosts) > 1 else "1 host",
        name_of(setup.model),
        test,
    ]
    parts += [f"d{depth}", f"p{parallel}", f"ub{given.micro_batch}", f"fa-{given.flash_attention or 'default'}"]
    parts += [given.type_k if given.type_k == given.type_v else f"{given.type_k}+{given.type_v}"]
    parts += [f"ts{given.split.replace('/', '+')}"] if given.split else []
    if link:
        parts += [f"{latency:g}ms"] + ([f"{link.bandwidth_mbit:g}mbit"] if link.bandwidth_mbit else [])
    return "/".join(parts)


def predicted(
    planned: Mapping[str, Any], setup: Setup, test: str, depth: int, latency: float = 0
) -> dict[str, Any] | None:
    """What the plan says of a cell. Generation through the proxy is predicted as the plan's crossings times the latency more."""
    if planned["refused"]:
        return None
    estimate = planned["estimate"]
    mean = estimate["prompt_tokens_per_s" if "pp" in test else "generation_tokens_per_s"]
    if depth or (setup.link and (setup.link.bandwidth_mbit or "pp" in test)):
        mean = None
    if mean and setup.link:
        mean = round(1000 / (1000 / mean + estimate["crossings"] * latency), 3)
    limited = estimate["prompt_limited_by" if "pp" in test else "limited_by"]
    return {
        "mean": mean,
        "load_s": estimate["load_s"],
        "rates": estimate["rates"],
        "limited_by": limited,
        "visits": estimate["visits"],
        "crossings": estimate["crossings"],
        "devices_ms": round(sum(device["ms_per_token"] for device in estimate["devices"]), 3),
    }


def cells_of(setup: Setup, planned: Mapping[str, Any], fork: str, skipped: str | None) -> list[dict[str, Any]]:
    """The cells of a load, not measured yet.

    :param fork: of the release that serves.
    :param skipped: why nothing will be measured.
    """
    placed = [] if planned["refused"] else planned["placement"]
    link = setup.link
    common = {
        "hosts": list(setup.hosts),
        "workers": [f"{entry['host']}:{entry['worker']}" for entry in placed if entry["endpoint"] and entry["layers"]],
        "backend": setup.backend,
        "model": name_of(setup.model),
        "options": setup.options.as_json(),
        "proxied": bool(link),
        "bandwidth_mbit": link.bandwidth_mbit if link else None,
        "program": options.MEASURING[fork],
        "parallel": 1,
        "measured": None,
        "load_s": None,
        "memory_mib": [
            {"device": entry["device"], "host": entry["host"], "planned_mib": entry["total_mib"], "measured_mib": None}
            for entry in placed
        ],
        "skipped": skipped,
        "argv": [],
        "log": None,
        "time": None,
    }
    cells = [
        {
            "key": key_of(setup, test, depth, latency=latency),
            **common,
            "latency_ms": latency,
            "test": test,
            "depth": depth,
            "predicted": predicted(planned, setup, test, depth, latency),
        }
        for latency in _latencies(setup)
        for test, depth in setup.tests
    ]
    return [_swept(cell) if fork != options.MAINLINE and not skipped else cell for cell in cells]


def _swept(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell of ik_llama.cpp, whose llama-sweep-bench measures prompts of one micro-batch, at multiples of it."""
    size, why = cell["options"]["ubatch"], None
    if cell["test"].startswith("pp") and int(cell["test"][2:]) != size:
        why = f"{SWEEP} measures prompts of one micro-batch, {size} tokens: give that in {PREFIX}micro_batches"
    elif cell["depth"] % size:
        why = f"{SWEEP} measures at depths that are multiples of the micro-batch, {size} tokens"
    return {**cell, "skipped": why}


def asked_cells(request: Request, cluster: Cluster, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells that are measured through the API of the server that serves."""
    server = cluster.server
    hosts = [
        plan["head"]["host"],
        *(entry["host"] for entry in plan["placement"] if entry["endpoint"] and entry["layers"]),
    ]
    given = Options(512, server.flash_attention, server.cache_type_k, server.cache_type_v, None)
    prompt, generated = (request.prompts or (512,))[0], (request.generated or (128,))[0]
    tests = ((f"api-ttft{prompt}", 0), (f"api-tg{generated}", 0))
    setup = Setup(tuple(dict.fromkeys(hosts)), _serving_backend(plan), cluster.model, given, None, ())
    cells = []
    for parallel in request.parallel:
        skipped = None
        if parallel > server.parallel:
            skipped = f"llama_server_parallel is {server.parallel}: the server answers no more requests at once"
        elif prompt + generated > plan["head"]["context_per_request"]:
            skipped = f"a request may have {plan['head']['context_per_request']} tokens, and needs {prompt + generated}: set a longer llama_server_context"
        for test, depth in tests:
            cell = cells_of(setup._replace(tests=((test, depth),)), plan, options.MAINLINE, skipped)[0]
            expected = predicted(plan, setup, test, depth) if test.startswith("api-tg") and parallel == 1 else None
            key = key_of(setup, test, depth, parallel)
            cells.append(
                {**cell, "key": key, "skipped": skipped, "program": SERVER, "parallel": parallel, "predicted": expected}
            )
    return cells


def identity(
    plan: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    repetitions: int,
    models: Mapping[str, Mapping[str, Any]],
) -> str:
    """Says of two benchmarks whether they measure the same: the same cells and models with the same plan and release.

    :param models: name → where it is, and what it is.
    """
    measured = [plan["id"], plan["release"]["id"], repetitions, [cell["key"] for cell in cells], sorted(models.items())]
    return hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:8]


def service_of(planned: Mapping[str, Any], argv: Sequence[str], measuring: Measuring) -> dict[str, Any]:
    """The service that runs a program that measures, with the limits of the head's own. Its definition is added by the controller."""
    head = planned["hosts"][planned["head"]["host"]]
    served = next(service for service in head["services"] if service["kind"] == "head")
    runner = [str(head["python"]), measuring.runner, "--log", measuring.log]
    if measuring.link:
        # In one word: -0 would be another option.
        runner += ["--latency-ms=" + ",".join(f"{latency:g}" for latency in measuring.link.latencies_ms)]
        if measuring.link.bandwidth_mbit:
            runner += ["--bandwidth-mbit", f"{measuring.link.bandwidth_mbit:g}"]
        for entry in planned["placement"]:
            if entry["endpoint"]:
                runner += ["--proxy", entry["endpoint"]]
    return {
        **served,
        "name": names.of(planned["cluster"]).service("benchmark"),
        "temporary": True,
        "description": f"benchmark of cluster {planned['cluster']}",
        "argv": [*runner, "--", *argv],
        "reads": [],
        "after": [],
        "credentials": {},
        "seconds": measuring.timeout,
    }


class Measuring(NamedTuple):
    """Where and how a program runs that measures."""

    runner: str
    """Path of measuring.py on the head."""
    log: str
    """Path of the file that gets its lines."""
    link: Link | None
    timeout: int


def machines(cluster: Cluster, plan: Mapping[str, Any], show_link: Callable[[str], str | None]) -> dict[str, Any]:
    """What each host is, for the record."""
    hosts = {}
    for name in hosts_in_order(plan):
        host = cluster.places.get(name)
        if host:
            facts = host.facts
            hosts[name] = {
                "head": name == cluster.head,
                "system": facts.system,
                "architecture": facts.architecture,
                "cpu": str(facts.cpu.get("model", "")),
                "cores": facts.cpu.get("cores"),
                "memory_mib": facts.memory_mib,
                "accelerators": [accelerator.name for accelerator in same_device.devices(facts)],
                "link": show_link(name),
            }
    return hosts
