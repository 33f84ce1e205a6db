# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a search for faster settings tries, which of that it measures again, and what it finds."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import command_line, matrix
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan

Settings = Mapping[str, Any]
"""Variable of the server → its value; none are the plan's own settings."""
TURNS = (1, 2, 3)
"""So often each round measures each setting, all of them once before any again: what slows a host down slows down all of them."""
FINALISTS = 3
"""In the last round, beside the plan's own settings and the combination."""
LEAST_TURNS, LEAST_GAIN = 3, 1.02
"""With which a setting counts as faster than the plan's."""
LEAST_PIECE, MOST_PIECE = 32, 8192
"""Tokens of a micro-batch that are tried."""
OWN, OVER = "the plan's", "llama_tune_minutes are over"
ASKED = f"{OWN}, as llama-server continues llama_benchmark_text"
"""With which the prediction of tokens is compared: the program that measures all others predicts none."""
MORE, CUT = f"{OVER}: more of them may find more.", "The search was cut off: run tune.yml again."
"""Why it ended early."""


def request_of(variables: Mapping[str, Any], request: matrix.Request) -> matrix.Request:
    """What is measured of each setting.

    :param variables: of the head.
    :raises Refusal: there is nothing to measure.
    """
    wanted = variables["llama_tune_for"]
    for name, other in (("prompts", "generation"), ("generated", "prompts")):
        if wanted != other and not getattr(request, name):
            raise Refusal(f"llama_tune_for is {wanted}, and llama_benchmark_{name} is empty: give a number")
    request = request._replace(prompts=()) if wanted == "generation" else request
    request = request._replace(generated=()) if wanted == "prompts" else request
    return request._replace(repetitions=1, timeout=min(request.timeout, 60 * variables["llama_tune_minutes"]))


def candidates(plan: Plan, cores: int, request: matrix.Request) -> list[dict[str, Any]]:
    """Changes of the plan's settings, one at a time.

    :param cores: of the head.
    :param request: of pieces that are longer than all of its prompts nothing would be seen, and tokens are predicted of an operator's own text alone.
    """
    server, own = command_line.options_of(plan.head.argv), matrix.serving_backend(plan)
    batch, micro = int(server.get("batch", 2048)), int(server.get("micro-batch", 512))
    pieces = [(batch, micro // 2), (max(batch, 2 * micro), 2 * micro), (2 * batch, micro), (batch // 2, micro)]
    pieces = [pair for pair in pieces if LEAST_PIECE <= pair[1] <= min(pair[0], MOST_PIECE)]
    longest = max(request.prompts, default=0)
    pieces = [pair for pair in pieces if any(min(a, longest) != min(b, longest) for a, b in zip(pair, (batch, micro)))]
    kinds = (server.get("cache-type-k", "f16"), server.get("cache-type-v", "f16"))
    threads = {cores, max(1, cores // 2)} - {int(server.get("threads", 0))} if plan.head.cpu.layers else ()
    backends = dict.fromkeys(build.backend for build in plan.hosts[plan.head.host].builds)
    predicts = request.text and request.generated and not plan.estimate.speculation
    types = [(kind, kind) for kind in ("f16", "q8_0") if kinds != (kind, kind)]
    return [
        *({"llama_server_batch": whole, "llama_server_micro_batch": piece} for whole, piece in pieces),
        *({"llama_server_flash_attention": word} for word in ("on", "off") if word != server.get("flash-attention")),
        *({"llama_server_backend": name} for name in backends if name not in (own, "cpu")),
        *({"llama_server_cache_type_k": keys, "llama_server_cache_type_v": values} for keys, values in types),
        *({"llama_server_threads": number} for number in sorted(threads)),
        *({"llama_server_tensor_split": split} for split in _splits(plan)),
        *([{matrix.SPECULATION: "ngram"}] if predicts else []),
    ]


def _splits(plan: Plan) -> list[list[int]]:
    """One layer less on a device and one more on the next, in both directions; in the order of the variable."""
    units = {(entry.host, entry.worker or entry.device): entry.layers + entry.output for entry in plan.placement}
    order = [(name, worker.name) for name, host in plan.hosts.items() for worker in host.workers]
    order += [(worker.host, worker.name) for worker in plan.external_workers]
    order += [(entry.host, entry.device) for entry in plan.placement if not entry.endpoint]
    used = [place for place, number in units.items() if number]
    pairs = [pair for near in zip(used, used[1:]) for pair in (near, near[::-1])]
    return [
        [units.get(place, 0) + (place == more) - (place == less) for place in order]
        for less, more in pairs
        if units[less] > 1
    ]


def loss(served: Plan, plan: Plan) -> str | None:
    """What a plan lacks of the fallbacks on which the head serves now; None where that is nothing."""
    spared = {entry.without for entry in served.fallbacks} if served.head.fallback_after is not None else ()
    lost = [f"{entry.without} ({entry.reason})" for entry in plan.no_fallback if entry.without in spared]
    return f"nothing could be served without {', '.join(lost)}" if lost else None


def name_of(settings: Settings) -> str:
    """``batch=2048, micro_batch=256``."""
    texts = matrix.settings_of(settings).items()
    return ", ".join(f"{name.removeprefix(matrix.VARIED)}={value}" for name, value in texts) or OWN


class Tried(NamedTuple):
    """A setting, and what was measured of it."""

    settings: Settings
    turns: Mapping[int, Mapping[str, float]]
    """Number of a turn → test → tokens per second, of turns in which all tests were measured."""


class Gain(NamedTuple):
    """How many times as fast as the plan's own settings in the same turns: the geometric mean of all tests."""

    settings: Settings
    mean: float
    spread: float
    """Standard deviation of the turns."""
    turns: int

    def __str__(self) -> str:
        return f"{100 * (self.mean - 1):.1f} ± {100 * self.spread:.1f} %"


def gains(tried: Sequence[Tried]) -> list[Gain]:
    """Of all settings that were measured beside the plan's own, which come first; the fastest first."""
    own, *others = tried
    found = []
    for one in others:
        ratios = [
            statistics.geometric_mean(speed / own.turns[turn][test] for test, speed in speeds.items())
            for turn, speeds in one.turns.items()
            if speeds.keys() <= own.turns.get(turn, {}).keys()
        ]
        if ratios:
            spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
            found.append(Gain(one.settings, statistics.fmean(ratios), spread, len(ratios)))
    return sorted(found, key=lambda gain: -gain.mean)


def chosen(found: Sequence[Gain]) -> list[Settings]:
    """For the next round: the better half, and after that the fastest, and what is faster together; none where the rest is within noise."""
    if not any(gain.turns >= LEAST_TURNS for gain in found):
        return [gain.settings for gain in found[: -(-len(found) // 2)]]
    together: dict[str, Any] = {}
    for gain in filter(_is_real, found):
        together.update({} if together.keys() & gain.settings.keys() else gain.settings)
    faster = [gain.settings for gain in found if gain.mean >= LEAST_GAIN and gain.turns >= LEAST_TURNS][:FINALISTS]
    return [*faster, *([dict(sorted(together.items()))] if together and together not in faster else [])]


def _is_real(gain: Gain) -> bool:
    """Whether it is more than noise."""
    return gain.turns >= LEAST_TURNS and gain.mean - 1 > max(LEAST_GAIN - 1, gain.spread)


def best(found: Sequence[Gain]) -> Gain | None:
    """The fastest, or one of fewer changes within noise of it; None where the plan's own settings are the best."""
    real = list(filter(_is_real, found))
    near = [gain for gain in real if gain.mean >= real[0].mean - real[0].spread]
    return min(near, key=lambda gain: len(gain.settings), default=None)


def sentence(found: Sequence[Gain], early: str) -> str:
    """What was found.

    :param early: MORE or CUT; empty where the search came to its end.
    """
    top, hint = best(found), f" {early}" if early else ""
    if top:
        return f"{name_of(top.settings)} is {top} faster than the plan's settings.{hint}"
    if early and not any(gain.turns >= LEAST_TURNS for gain in found):
        return f"The plan's settings stay, since nothing was measured often enough.{hint}"
    return f"The plan's settings are the best: nothing is faster by 2 % and more than noise.{hint}"


def as_yaml(record: Benchmark, wanted: str, tried: Sequence[Tried], skipped: Mapping[str, str], early: str) -> str:
    """A file of variables, with its evidence as comments.

    :param record: of the last round.
    :param skipped: setting → why it was not measured.
    :param early: as of sentence.
    """
    found = gains(tried)
    top, faster = best(found), {name_of(gain.settings): f"; {gain}" for gain in found}
    day = time.strftime("%Y-%m-%d", time.gmtime(record.time))
    lines = [
        sentence(found, early),
        f"Measured by playbooks/tune.yml for {wanted} on {day}: cluster {record.cluster}, plan {record.plan}, {record.release}",
        *(f"{name}: {what}" for name, what in [*record.hosts.items(), *record.models.items()]),
        "Tokens per second, mean of the turns, and how much faster than the plan's settings in the same turns:",
    ]
    for name, turns in ((name_of(one.settings), list(one.turns.values())) for one in tried if one.turns):
        tests = dict.fromkeys(test for turn in turns for test in turn)
        speeds = [f"{test} {statistics.fmean(turn[test] for turn in turns if test in turn):.2f}" for test in tests]
        lines.append(f"  {name}: {', '.join(speeds)}; {len(turns)} turns{faster.get(name, '')}")
    lines += [f"  {name}: not measured, {why}" for name, why in skipped.items()]
    values = [f"{name}: {json.dumps(value)}" for name, value in (top.settings if top else {}).items()]
    return "".join(f"# {printable(line)}\n" for line in lines) + "---\n" + "\n".join(values or ["{}"]) + "\n"
