# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Models of random weights, and what their speeds say of a device with any model.

A token takes a time for the visit, one for each node of the graph, and one for each byte, by type. A short and a long model of small matrices and a
wide one say these three, of a fast device behind a worker two wide ones; a wide one of each further type says its bytes. A prompt takes one for each
multiplication, for each node and for each byte that it sends to the device: a wide model, one of half the width, and one that sends much and computes
little.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.device_rates import cost_of_type
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary, TensorGroup
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.tensor_types import ALL

TYPES = {kind.name: number for number, kind in ALL.items()}
COMMON, COMMON_OF_EXPERTS = ("Q4_K", "Q6_K", "Q8_0", "F16", "Q5_K", "IQ4_XS", "Q4_0"), ("Q4_K", "MXFP4")
"""Types that are measured after those of the served model, as far as the time reaches. Devices beyond RAPID_GFLOPS take about as much longer for experts
of any type: the first one says it."""
SHORT, LONG, WIDE, HALF, LINK, DEEP = "short", "long", "wide", "half", "link", "deep"
LARGE = "large"
"""As wide, with more layers: of fast devices behind workers, for which a token's bytes have to take much longer than threads that wait, fall asleep and
are woken."""
EXPERTS, ODD = "experts", "odd"
"""Of a number of experts that is a power of two, among which backends choose in one step, and of another number."""
HEAD, VOCABULARY = 128, 256
PROMPT = 512
DEPTHS = (1024, 4096)
"""Tokens in the cache, of which each takes its time. What a filled one takes besides, as another graph, is in both."""
NODES, EXPERT_NODES = 31, 19
"""As planner/placement/cost_model.py counts them: of a layer, and so many more of one with experts."""


class Shape(NamedTuple):
    """Of the layers of a kind of model."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    experts: int = 0
    used: int = 0


SHAPES = {
    SHORT: Shape(512, 1536, 4, 1),
    LONG: Shape(512, 1536, 4, 1),
    WIDE: Shape(4096, 12288, 32, 8),
    HALF: Shape(2048, 6144, 16, 4),
    LINK: Shape(8192, 256, 2, 1),
    LARGE: Shape(4096, 12288, 32, 8),
    DEEP: Shape(512, 256, 32, 8),
    ODD: Shape(2048, 768, 16, 4, 96, 8),
    EXPERTS: Shape(2048, 768, 16, 4, 64, 8),
}
NEEDED = (WIDE, SHORT, LONG, HALF, LINK)
"""Without these nothing follows. They are measured first, also of devices that take longer than their time."""
LAYERS = {
    SHORT: (4, 4),
    LONG: (32, 32),
    WIDE: (2, 8),
    LARGE: (24, 24),
    HALF: (4, 8),
    LINK: (1, 1),
    EXPERTS: (2, 6),
    DEEP: (8, 8),
    ODD: (2, 4),
}
"""The fewest, and the most."""
SLOW, FAST = 250e6, 1e9
"""Bytes of a model for devices below FAST_GFLOPS in prompts, and for others, whose caches may be large. Half of it has to do for what is not needed of
devices below RAPID_GFLOPS, whose prompts take seconds."""
FAST_GFLOPS, RAPID_GFLOPS = 700, 5000
"""Devices beyond the second take so little time for a token that the first ones of each repetition, for which graphs are made, would count."""


NAME = "calibration-"
"""How names of models that are measured begin."""


class Trial(NamedTuple):
    """A model that is measured."""

    kind: str
    type: str
    """Of its matrices, or of its experts."""
    layers: int
    rapid: bool = False
    """Whether the device is beyond RAPID_GFLOPS."""
    dense: str = ""
    """Type of the matrices beside experts, where it is another one."""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (f"{NAME}{self.kind}", self.type.lower(), self.dense.lower(), str(self.layers))))

    @property
    def tests(self) -> tuple[int, int]:
        """Tokens of the prompt, and generated ones."""
        generated = 64 if self.rapid else 16
        return (0 if self.kind in (SHORT, LONG, LARGE, ODD) else PROMPT), (
            0 if self.kind in (HALF, LINK) else generated
        )

    @property
    def repetitions(self) -> int:
        """The first third of them does not count: devices take a while until they are fast."""
        return 8 if self.rapid else 5

    @property
    def depths(self) -> tuple[int, ...]:
        """Tokens in the cache before them."""
        return DEPTHS if self.kind == DEEP else (0,)

    def tensors(self) -> list[TensorGroup]:
        """In the order of the file."""
        shape, every = SHAPES[self.kind], tuple(range(self.layers))
        width, query, keys = shape.width, shape.heads * HEAD, shape.kv_heads * HEAD
        rows: list[tuple[str, tuple[int, ...]]] = [
            ("attn_norm", (width,)),
            ("attn_q", (query, width)),
            ("attn_k", (keys, width)),
            ("attn_v", (keys, width)),
            ("attn_output", (width, query)),
            ("ffn_norm", (width,)),
        ]
        stack, ending = ((shape.experts,), "_exps") if shape.experts else ((), "")
        rows += [("ffn_gate_inp", (shape.experts, width))] if shape.experts else []
        rows += [
            (f"ffn_gate{ending}", (*stack, shape.inner, width)),
            (f"ffn_up{ending}", (*stack, shape.inner, width)),
            (f"ffn_down{ending}", (*stack, width, shape.inner)),
        ]
        layers = [group(f"blk.*.{name}.weight", self._type_of(name, size), size, every) for name, size in rows]
        ends = [
            group(name, kind, size, None)
            for name, kind, size in (
                ("token_embd.weight", "F16", (VOCABULARY, width)),
                ("output_norm.weight", "F32", (width,)),
                ("output.weight", "F16", (VOCABULARY, width)),
            )
        ]
        return [ends[0], *layers, *ends[1:]]

    def _type_of(self, name: str, size: Sequence[int]) -> str:
        if len(size) == 1 or name == "ffn_gate_inp":
            return "F32"
        return self.type if name.endswith("_exps") else self.dense or self.type


def group(name: str, kind: str, size: tuple[int, ...], layers: Optional[tuple[int, ...]]) -> TensorGroup:
    """Tensors of a type and a shape, the row last."""
    stored = ALL[TYPES[kind]]
    rows = 1
    for length in size[:-1]:
        rows *= length
    return TensorGroup(name, kind, size, stored.size(size[-1], rows), layers)


def trials(
    dense: Sequence[str], experts: Sequence[str], gflops: float, lent: bool, is_known: bool = False
) -> list[Trial]:
    """What to measure of a device, the most important first.

    :param dense: types of the served model's weights, the one that it reads most first.
    :param experts: those of its experts.
    :param gflops: that it is taken to reach in prompts.
    :param lent: whether it is behind a worker.
    :param is_known: whether one of the same kind is measured without a worker, so that the worker alone remains.
    """
    rapid = gflops >= RAPID_GFLOPS
    served = _makeable(dense, experts if rapid else ())
    every = _makeable(served, COMMON, COMMON_OF_EXPERTS if rapid else ())
    first = every[0]
    start = [_trial(kind, first, gflops) for kind in (*NEEDED, *((LARGE,) if rapid and lent else ()))]
    if is_known:
        return start
    start.append(_trial(DEEP, first, gflops))
    kinds: tuple[str, ...] = (EXPERTS,)
    soon = _makeable(experts)
    late = [one for one in COMMON_OF_EXPERTS if one not in soon]
    if rapid:
        kinds, one = (EXPERTS, ODD), [COMMON_OF_EXPERTS[0]]
        soon, late = (one, []) if experts else ([], one)
    own, further = ([_trial(kind, of, gflops, first) for of in types for kind in kinds] for types in (soon, late))
    wide, known = [_trial(WIDE, of, gflops) for of in every], max(1, len(served))
    return [*start, *own, *wide[1:known], *further, *wide[known:]]


def _makeable(*types: Sequence[str]) -> list[str]:
    """Those that models can be made of, each once."""
    return [kind for kind in dict.fromkeys(one for some in types for one in some) if kind in SCALES]


def _trial(kind: str, of: str, gflops: float, dense: str = "") -> Trial:
    (fewest, most), size, rapid = LAYERS[kind], FAST if gflops >= FAST_GFLOPS else SLOW, gflops >= RAPID_GFLOPS
    if kind not in NEEDED and not rapid:
        size /= 2
    one = Trial(kind, of, 1, rapid, "" if dense == of else dense)
    layers = round(size / sum(row.bytes for row in one.tensors()))
    return one._replace(layers=min(most, max(fewest, layers)))


SCALES = {
    **dict.fromkeys(("F16", "BF16"), ()),
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ1_S", "MXFP4"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Type that models can be made of → where a block has its scales, 16 bits each but for MXFP4."""


class Sums(NamedTuple):
    """Of the tensors of one type, experts apart."""

    read: float = 0.0
    """Bytes that a token reads."""
    weights: float = 0.0
    """Bytes of all of them."""
    multiplied: float = 0.0
    """Weights that each token of a prompt is multiplied with: the output, and the last layer's feed-forward, are computed for its last token alone."""


def sums_of(tensors: Iterable[TensorGroup], active: float) -> dict[tuple[str, bool], Sums]:
    """Type, and whether they are experts → sums.

    :param active: the part of the experts that a token uses.
    """
    groups = list(tensors)
    found: dict[tuple[str, bool], Sums] = {}
    for row in groups:
        if len(row.shape) < 2 or not is_read(row.name, groups):
            continue
        experts = "exps" in row.name
        part, elements = (active if experts else 1.0), 1
        for length in row.shape:
            elements *= length
        computed = 0 if row.layers is None else row.number - ("ffn_" in row.name)
        before = found.get((row.type, experts), Sums())
        size = row.number * row.bytes
        found[row.type, experts] = Sums(
            before.read + size * part, before.weights + size, before.multiplied + computed * elements * part
        )
    return found


def is_read(name: str, tensors: Iterable[TensorGroup]) -> bool:
    """Whether a token reads the tensor: of an embedding single rows, unless it is the output too."""
    tied = name == "token_embd.weight" and not any(row.name == "output.weight" for row in tensors)
    return tied or "token_embd" not in name


def key(device: str, endpoint: Optional[str]) -> str:
    """Of what was measured of a device of a host, by itself or behind a worker, whose address says which link that takes."""
    return f"{device} lent {endpoint.rsplit(':', 1)[0]}" if endpoint else device


Name = Annotated[str, Text()]
Rate = Annotated[float, Number(0.01, 1 << 30, real=True)]
Figure = Annotated[float, Number(0, 1 << 20, real=True)]


class Rates(NamedTuple):
    """What was measured of a device; experts are 1 where they are as fast as other weights."""

    name: Name
    """Of the device, by which it is known later that it is the same one."""
    date: Name
    release: Name
    generation: Annotated[int, Number(0, 1 << 32)]
    """Build of that."""
    gb_per_s: Mapping[str, Rate]
    """Type → bytes (1e9) that it reads per second in generation."""
    prompt_gflops: Mapping[str, Rate]
    """Type → reached in prompts."""
    node_us: Figure
    prompt_node_us: Figure
    """With the tokens of a prompt. What experts need more is in experts_multiplied."""
    visit_ms: Figure
    """That a token takes beside; of a worker with all that it takes on the link."""
    experts_read: Mapping[str, Figure]
    """Type → so many times as long takes a byte of experts."""
    experts_nodes: Figure
    """Nodes more of a layer with experts."""
    experts_multiplied: Mapping[str, Figure]
    """Type → so many times as long takes a multiplication with experts."""
    spread: Figure
    """Of the repetitions: how much longer the slowest took than the fastest."""
    gbit: Optional[Rate] = None
    """That rows of prompts reach on their way to the device; None where that is too little to be measured."""
    odd_nodes: Optional[Figure] = None
    """As experts_nodes, of a number of experts that is no power of two; None where nodes cannot be told from bytes."""
    cache_gb_per_s: Optional[Rate] = None
    """Bytes of KV cache (1e9) that it reads per second in generation; None where that was not measured."""
    attention_gflops: Optional[Rate] = None
    """Reached in prompts by attention to a filled cache."""


def readable(found: Any) -> dict[str, Any]:
    """Of what the head kept of a host's devices, as JSON, what Rates can be made of."""
    return {
        device: rates
        for device, rates in (found.items() if isinstance(found, Mapping) else ())
        if not (validation.problem("", {device: rates}) or typed_json.problem("", rates, Rates))
        and rates["gb_per_s"]
        and rates["prompt_gflops"]
    }


Speeds = Mapping[Trial, Mapping[str, Sequence[float]]]
"""Of each model that was measured: ``tg`` and ``pp``, with the depth unless that is 0 → tokens per second of each repetition."""
MOST_SPREAD = 0.5
LIMITS = {
    "GB per second": (0.2, 20_000),
    "GFLOPS in prompts": (1, 4e6),
    "µs for a node": (0.0, 60),
    "µs for a node in prompts": (0.0, 2000),
    "ms for a visit": (0.0, 1000),
    "Gbit per second": (0.02, 4000),
}
"""What there is: anything else was not the device."""


def needed(speeds: Speeds) -> str:
    """Kinds of models without which nothing follows, as far as they are missing."""
    have = {trial.kind for trial in speeds}
    return ", ".join(kind for kind in NEEDED if kind not in have)


class Measured(NamedTuple):
    """What was measured, with what, and when."""

    name: str
    date: str
    release: str
    generation: int


def fit(what: Measured, speeds: Speeds) -> Rates:
    """:raises Refusal: the figures cannot be those of a device; says which."""
    if needed(speeds):
        raise Refusal(f"the models {needed(speeds)} were not measured; the table above has the reason")
    settled = _settled(speeds)
    spread = _spread(settled)
    if spread > MOST_SPREAD:
        raise Refusal(
            f"repetitions differ by {spread:.0%}: something else computed there meanwhile. Run it again when the hosts do nothing else"
        )
    token, prompt = _took(settled, "tg", 1), _took(settled, "pp", PROMPT)
    counted = {trial: _Counts(trial) for trial in speeds}
    by_kind = {trial.kind: trial for trial in reversed(list(speeds))}
    short, long, wide = (counted[by_kind[kind]] for kind in (SHORT, LONG, WIDE))
    short_ms, long_ms, wide_ms = (token[by_kind[kind]] for kind in (SHORT, LONG, WIDE))
    most = by_kind.get(LARGE, by_kind[WIDE])
    node = visit = 0.0
    per_byte = wide_ms / wide.read
    for _step in range(STEPS):
        node = max(0.0, (long_ms - short_ms - (long.read - short.read) * per_byte) / (long.nodes - short.nodes))
        visit = max(0.0, short_ms - short.nodes * node - short.read * per_byte)
        per_byte = (token[most] - visit - counted[most].nodes * node) / counted[most].read
    # That a visit takes longer where a token does.
    slept = max(0.0, wide_ms - visit - wide.nodes * node - wide.read * per_byte)
    visited = {trial: visit + slept * min(1.0, ms / wide_ms) for trial, ms in token.items()}
    visit += slept
    read = {
        trial.type: max(1e-12, (ms - visited[trial] - counted[trial].nodes * node) / counted[trial].read)
        for trial, ms in token.items()
        if trial.kind == WIDE
    }
    net = {trial: ms - visit - counted[trial].weights * read.get(trial.type, per_byte) for trial, ms in prompt.items()}
    step, per_row = _of_prompts(*((counted[by_kind[kind]], net[by_kind[kind]]) for kind in (WIDE, HALF, LINK)))
    computed = {
        trial: max(0.2 * prompt[trial], ms - step * counted[trial].steps - per_row * counted[trial].sent)
        for trial, ms in net.items()
    }
    gflops = {trial.type: 1000 * counted[trial].gflop / ms for trial, ms in computed.items() if trial.kind == WIDE}
    rates = Rates(
        *what,
        {kind: round(1e-6 / ms, 1) for kind, ms in read.items()},
        {kind: round(rate, 1) for kind, rate in gflops.items()},
        round(1000 * node, 3),
        round(1000 * step, 3),
        round(visit, 4),
        {},
        EXPERT_NODES,
        {},
        round(spread, 3),
        round(8e-6 / per_row, 2) if per_row else None,
    )
    _check(rates)
    if DEEP in by_kind:
        rates = _at_depth(rates, settled[by_kind[DEEP]])
    without = {trial: token[trial] - visited[trial] for trial in token if trial.kind in (EXPERTS, ODD)}
    for trial in (trial for trial in without if trial.kind == EXPERTS):
        its, dense = counted[trial], trial.dense or trial.type
        of_experts, of_others = _reading_ms(rates, trial, its)
        left = without[trial] - of_experts - of_others - trial.layers * NODES * node
        if not (trial.rapid and node) or of_experts > token[trial] / 2:
            longer = 1 + (left - trial.layers * EXPERT_NODES * node) / of_experts
            rates = rates._replace(experts_read={**rates.experts_read, trial.type: round(max(0.5, longer), 3)})
        elif trial == by_kind[EXPERTS]:
            rates = rates._replace(experts_nodes=round(max(0.0, left / node / trial.layers), 1))
            if odd := by_kind.get(ODD):
                left = without[odd] - sum(_reading_ms(rates, odd, counted[odd]))
                rates = rates._replace(odd_nodes=round(max(0.0, left / node / odd.layers - NODES), 1))
        dense_ms = 1000 * (its.gflop - its.expert_gflop) / _rate(rates.prompt_gflops, dense, 1)
        longer = (computed[trial] - dense_ms) * _rate(rates.prompt_gflops, trial.type, 1) / its.expert_gflop / 1000
        multiplied = {**rates.experts_multiplied, trial.type: round(max(0.5, longer), 3)}
        rates = rates._replace(experts_multiplied=multiplied)
    return rates


def _reading_ms(rates: Rates, trial: Trial, its: "_Counts") -> tuple[float, float]:
    """Milliseconds in which a token reads its experts, as if they were as fast as other weights, and all else."""
    others = 1e-6 * (its.read - its.expert_read) / _rate(rates.gb_per_s, trial.dense or trial.type, 0)
    return 1e-6 * its.expert_read / _rate(rates.gb_per_s, trial.type, 0), others


def behind_worker(own: Rates, alone: Speeds, lent: Rates, speeds: Speeds) -> Rates:
    """Of a device behind a worker, where one of the same kind was measured by itself. That tells bytes, nodes and multiplications apart without the
    network, whose noise would be taken for theirs. Of the worker are a token's visit, the longest of all models, and what rows of prompts reach.

    :param own: of the device by itself, from the speeds ``alone``.
    :param lent: of the device behind the worker, from its speeds.
    """
    without = _took(_settled(alone), "tg", 1)
    longer = [0.0]
    for trial, ms in _took(_settled(speeds), "tg", 1).items():
        counted = _Counts(trial)
        computed = counted.nodes * own.node_us / 1000 + 1e-6 * counted.read / _rate(own.gb_per_s, trial.type, 0)
        longer.append(ms - without.get(trial, own.visit_ms + computed))
    return own._replace(
        visit_ms=round(own.visit_ms + max(longer), 4), gbit=lent.gbit, spread=max(own.spread, lent.spread)
    )


def _settled(speeds: Speeds) -> dict[Trial, dict[str, Sequence[float]]]:
    """Without the first repetitions."""
    return {
        trial: {test: samples[len(samples) // 3 :] for test, samples in found.items()}
        for trial, found in speeds.items()
    }


def _took(speeds: Speeds, test: str, tokens: int) -> dict[Trial, float]:
    """Milliseconds of a test, of the models that have it."""
    return {trial: 1000 * tokens / statistics.median(found[test]) for trial, found in speeds.items() if test in found}


def _at_depth(rates: Rates, deep: Mapping[str, Sequence[float]]) -> Rates:
    """The rates with those of attention: what one depth takes longer than the other."""
    shape, tokens = SHAPES[DEEP], (DEPTHS[1] - DEPTHS[0]) * LAYERS[DEEP][0]
    steps = []
    for test, each in (("tg", 1), ("pp", PROMPT)):
        less, more = (1000 * each / statistics.median(deep[f"{test}{depth}"]) for depth in DEPTHS)
        steps.append(max(more - less, LEAST_STEP * more))
    read, gflop = 4e-6 * tokens * shape.kv_heads * HEAD, 4e-9 * PROMPT * tokens * shape.heads * HEAD
    return rates._replace(cache_gb_per_s=round(read / steps[0], 1), attention_gflops=round(1000 * gflop / steps[1], 1))


LEAST_STEP = 0.02
"""Of the time that a token or a prompt takes: less cannot be told from noise."""
STEPS = 50
"""After which what follows from each other does not change any more."""


class _Counts:
    """What follows from the shape of a model."""

    def __init__(self, trial: Trial) -> None:
        shape = SHAPES[trial.kind]
        sums = sums_of(trial.tensors(), shape.used / shape.experts if shape.experts else 1.0)
        self.read = sum(one.read for one in sums.values())
        self.weights = sum(one.weights for one in sums.values())
        self.expert_read = sum(one.read for (_type, experts), one in sums.items() if experts)
        self.nodes = trial.layers * (NODES + (EXPERT_NODES if shape.experts else 0))
        self.gflop, self.expert_gflop = (
            2e-9 * PROMPT * sum(one.multiplied for (_type, experts), one in sums.items() if experts or every)
            for every in (True, False)
        )
        self.sent = 4 * PROMPT * shape.width
        self.steps = trial.layers * NODES


Counted = tuple[_Counts, float]


def _of_prompts(wide: Counted, half: Counted, link: Counted) -> tuple[float, float]:
    """Milliseconds of each node in a prompt, and of each byte that is sent.

    :param wide: what is counted of a model, and its milliseconds besides reading.
    """
    (one, one_ms), (other, other_ms), (sends, sends_ms) = wide, half, link
    determinant = one.gflop * other.steps - other.gflop * one.steps
    step = per_row = 0.0
    for _step in range(STEPS):
        one_left, other_left = one_ms - one.sent * per_row, other_ms - other.sent * per_row
        step = max(0.0, (one.gflop * other_left - other.gflop * one_left) / determinant)
        per_gflop = max(0.0, (one_left - one.steps * step) / one.gflop)
        per_row = max(0.0, (sends_ms - sends.gflop * per_gflop - sends.steps * step) / sends.sent)
    return step, per_row if per_row > 8e-6 / LIMITS["Gbit per second"][1] else 0.0


def _spread(speeds: Speeds) -> float:
    """How much longer the slowest repetition took than the fastest: the median of all tests, since one may be disturbed."""
    ratios = [
        max(samples) / min(samples) - 1 for found in speeds.values() for samples in found.values() if len(samples) > 1
    ]
    return statistics.median(ratios) if ratios else 0.0


def _check(rates: Rates) -> None:
    figures = [
        *(("GB per second", figure) for figure in rates.gb_per_s.values()),
        *(("GFLOPS in prompts", figure) for figure in rates.prompt_gflops.values()),
        ("µs for a node", rates.node_us),
        ("µs for a node in prompts", rates.prompt_node_us),
        ("ms for a visit", rates.visit_ms),
        *([("Gbit per second", rates.gbit)] if rates.gbit is not None else []),
    ]
    for what, figure in figures:
        least, most = LIMITS[what]
        if not least <= figure <= most:
            raise Refusal(
                f"{figure:g} {what} were measured, and there are {least:g} to {most:g}: something else computed there meanwhile. Run it again when "
                "the hosts do nothing else"
            )


class Fitted(NamedTuple):
    """How fast a device is with one model, by what was measured."""

    date: str
    release: str
    generation: int
    gb_per_s: float
    """Of the bytes that cost_model counts for it."""
    prompt_gflops: float
    """Of the multiplications that it counts."""
    node_us: float
    prompt_node_us: float
    visit_ms: float
    gbit: Optional[float]
    result_ms: float
    """That the figures of a token take on their way back."""
    cache_share: Optional[float]
    attention_cost: Optional[float]
    """As those of cost_model.Rate."""
    factor: float


FACTOR, ANOTHER_RELEASE = 1.12, 1.15
"""By which generation may be faster or slower than calibrated, and so much more with another release than the one that was measured."""


def for_model(
    rates: Rates, summary: ModelSummary, active: float, read: float, multiplied: float, nodes: float
) -> Fitted:
    """
    :param summary: with tensors.
    :param active: the part of the experts that a token uses.
    :param read: bytes that cost_model counts for a token.
    :param multiplied: weights that it counts for a token of a prompt, without the output.
    :param nodes: that it counts for a layer.
    """
    tensors, number = summary.tensors or (), summary.number("expert_count") or 0
    sums = sums_of(tensors, active)
    read_ms = multiplied_ms = 0.0
    for (kind, experts), one in sums.items():
        longer = [_longer(of, kind) if experts else 1.0 for of in (rates.experts_read, rates.experts_multiplied)]
        read_ms += one.read * longer[0] / _rate(rates.gb_per_s, kind, 0)
        multiplied_ms += one.multiplied * longer[1] / _rate(rates.prompt_gflops, kind, 1)
    has_experts = any(experts for _kind, experts in sums)
    own = rates.odd_nodes if number & (number - 1) else None
    more = (rates.experts_nodes if own is None else own) - EXPERT_NODES if has_experts else 0.0
    more += sum(row.number * _nodes_of(row) for row in tensors) / summary.layers - 2 * NORM_NODES
    gb_per_s, prompt_gflops = round(read / read_ms, 1), round(multiplied / multiplied_ms, 1)
    return Fitted(
        rates.date,
        rates.release,
        rates.generation,
        gb_per_s,
        prompt_gflops,
        round(rates.node_us * (nodes + more) / nodes, 3),
        round(rates.prompt_node_us * (nodes - EXPERT_NODES * has_experts) / nodes, 3),
        rates.visit_ms,
        rates.gbit,
        32e-6 * summary.vocabulary / rates.gbit if rates.gbit else 0.0,
        rates.cache_gb_per_s and rates.cache_gb_per_s / gb_per_s,
        rates.attention_gflops and prompt_gflops / rates.attention_gflops,
        FACTOR * (1 + rates.spread),
    )


NORM_NODES = 2
"""Those of a norm; each layer of llama has two norms, and no bias."""


def _nodes_of(row: TensorGroup) -> int:
    """Of the graph, for a tensor that is no matrix; counted in graphs of build 11063."""
    if row.layers is None:
        return 0
    return NORM_NODES if "norm" in row.name else int(row.name.endswith(".bias"))


def _rate(measured: Mapping[str, float], kind: str, part: int) -> float:
    """That of a type; of one that was not measured as of a common one, by what types take besides their bytes. The order, which files lose, is no matter."""
    known = next(one for one in (kind, COMMON[0], *sorted(measured)) if one in measured)
    return measured[known] * cost_of_type(known)[part] / cost_of_type(kind)[part]


def _longer(measured: Mapping[str, float], kind: str) -> float:
    """That of experts of a type; of one that was not measured as of the most common one."""
    return next((measured[one] for one in (kind, COMMON_OF_EXPERTS[0], *sorted(measured)) if one in measured), 1.0)
