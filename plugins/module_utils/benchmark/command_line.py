# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Command lines of the programs that measure: they compute as llama-server would with the same plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.matrix import Load, micro_batch_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan

DEVICES_SINCE = 8643
"""llama-bench takes --device: read in the tree of this build, and not in that of 6170."""
FLASH_WORDS_SINCE = 9435
"""llama-bench takes on, off and auto for --flash-attn: read in the tree of this build; in that of 8643 it takes 0 and 1."""
SAME_VALUES = {
    "-rpc": "rpc",
    "-ngl": "gpu-layers",
    "-ctk": "cache-type-k",
    "-ctv": "cache-type-v",
    "-t": "threads",
    "-b": "batch",
    "-ub": "micro-batch",
}
"""Option of llama-bench → that of llama-server, as the table calls it, with the same values."""
NOT_FOR_SWEEP = (
    *("host", "port", "context", "parallel", "warmup", "api-key-file", "tls-certificate", "tls-key", "fit"),
    "log-verbosity",
)
"""Options of llama-server that llama-sweep-bench does not have, or that follow from the tests."""
NOT_FOR_ASKING = ("host", "api-key-file", "tls-certificate", "tls-key")
"""Options of llama-server that say who may ask it."""


def argv_of(plan: Plan, load: Load, repetitions: int) -> list[str]:
    """The command line that measures what llama-server would serve with this plan."""
    argv = plan.head.argv
    if load.text:
        return [argv[0], *_without(argv, NOT_FOR_ASKING), "--host", names.LOOPBACK]
    program = str(PurePosixPath(argv[0]).with_name(options.MEASURING[plan.release.fork or options.MAINLINE]))
    if plan.release.fork:
        return [program, *_sweep_words(argv, load)]
    server = options_of(argv)
    turns = max(1, len(load.latencies_ms))
    words = [program, "-m", server["model"], "-o", "jsonl", "-v", "-r", str(repetitions * turns)]
    words += [options.SAYS_REPETITIONS] if turns > 1 else []
    takes_devices = plan.release.generation >= DEVICES_SINCE
    pairs = {
        **{word: server.get(name) for word, name in SAME_VALUES.items()},
        "-dev": server.get("device", "").replace(",", "/") if takes_devices else None,
        "-ts": server.get("tensor-split", "").replace(",", "/"),
        "-fa": _flash(plan, server),
        "-ot": server.get("override-tensor", "").replace(",", ";"),
        "--repack": "0" if server.get("repack") == "off" else None,
        **_load_mode(server.get("load-mode"), argv),
        **{
            word: _numbers(getattr(load, name))
            for word, name in (("-p", "prompts"), ("-n", "generated"), ("-d", "depths"))
        },
    }
    return [*words, *(word for name, value in pairs.items() if value for word in (name, value))]


def _flash(plan: Plan, server: Mapping[str, str]) -> str | None:
    """Flash attention in the words of the plan's release."""
    word = server.get("flash-attention")
    if plan.release.generation >= FLASH_WORDS_SINCE:
        return word
    return {"on": "1", "off": "0"}.get(word or "")


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values)) or "0"


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """Option of llama-server, as the table calls it → its value in a command line, or what a switch stands for."""
    values = {}
    for word, following in zip(argv[1:], [*argv[2:], ""]):
        option = options.of_word(word) if word.startswith("-") else None
        if option:
            is_switch = not following or following.startswith(
                "-"
            )  # some builds have a switch that takes a value in others
            values[option.name] = (options.meaning(word) if is_switch else "") or following
    return values


def _load_mode(mode: str | None, argv: Sequence[str]) -> dict[str, str]:
    """How llama-bench reads the model. Builds before --load-mode have switches of their own."""
    if mode and {"--load-mode", "-lm"} & set(argv):
        return {"-lm": mode}
    return {"none": {"-mmp": "0"}, "dio": {"-dio": "1"}, "mmap": {"-mmp": "1"}}.get(mode or "", {})


def _sweep_words(argv: Sequence[str], load: Load) -> list[str]:
    """The words of llama-sweep-bench: those of llama-server that it has."""
    context = str(max(load.depths) + max(micro_batch_of(argv), *load.prompts, 0))
    return [*_without(argv, NOT_FOR_SWEEP), "-c", context, "-n", str((load.generated or (1,))[0])]


def _without(argv: Sequence[str], unwanted: Collection[str]) -> list[str]:
    """The words of a command line of llama-server after its program, without these options."""
    words: list[str] = []
    skip = False
    for word in argv[1:]:
        option = options.of_word(word) if word.startswith("-") else None
        skip = option.name in unwanted if option else skip
        words += [] if skip else [word]
        skip = skip and not (option and options.meaning(word))
    return words
