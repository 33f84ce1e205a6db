# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Command line of llama-bench that matches llama-server with the same plan."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.matrix import GENERATED_TOKENS, Sweep
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import FILE_PREFIX
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan

REPETITIONS = 5
OPTION_NAMES = {
    "-rpc": "rpc",
    "-ngl": "gpu-layers",
    "-ctk": "cache-type-k",
    "-ctv": "cache-type-v",
    "-t": "threads",
    "-b": "batch",
    "-ub": "micro-batch",
    "-fa": "flash-attention",
    "-lm": "load-mode",
}
"""Option of llama-bench → name, in the table of options, of the llama-server option with the same values."""


MAX_PROGRAM_SECONDS = 7200
"""Time limit for a program."""
MAX_FILE_BLOCKS = (256 << 20) // 512
"""Size limit of a file that a program writes, in blocks of 512 bytes."""


def script_of(state_folder: str, programs: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> str:
    """Return a script that runs programs one after another. Files named after a program's number contain its output and its exit status.

    :param state_folder: folder that the services' account can write.
    :param programs: command line and environment of each program.
    """
    lines = [
        f"cd {shlex.quote(state_folder)} || exit 1; ulimit -f {MAX_FILE_BLOCKS}",
        "trap 'kill $!; wait; exit 143' TERM",
        f'run() {{ n={FILE_PREFIX}$1; shift; timeout {MAX_PROGRAM_SECONDS} env "$@" >$n.jsonl 2>$n.log </dev/null & wait $!; echo $? >$n.status; }}',
    ]
    for number, (argv, environment) in enumerate(programs):
        words = [*(f"{name}={value}" for name, value in environment.items()), *argv]
        lines.append(f"run {number} {shlex.join(words)}")
    return "; ".join(lines)


def argv_of(plan: Plan, sweep: Sweep) -> list[str]:
    """Return the llama-bench command line that measures what llama-server does with this plan."""
    server_options = options_of(plan.head.argv)
    program = str(PurePosixPath(plan.head.argv[0]).with_name(options.BENCH))
    words = [program, "-m", server_options["model"], "-o", "jsonl", "-v", "-r", str(REPETITIONS)]
    values = {
        **{word: server_options.get(name) for word, name in OPTION_NAMES.items()},
        "-dev": server_options.get("device", "").replace(",", "/"),
        "-ts": server_options.get("tensor-split", "").replace(",", "/"),
        "-ot": server_options.get("override-tensor", "").replace(",", ";"),
        "--repack": "0" if server_options.get("repack") == "off" else None,
        "-p": ",".join(map(str, sweep.prompts)),
        "-n": str(GENERATED_TOKENS),
        "-d": ",".join(map(str, sweep.depths)),
    }
    return [*words, *(word for name, value in values.items() if value for word in (name, value))]


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """Return the values of llama-server's options in a command line, by their names in the table of options; a switch has the value that it sets."""
    values = {}
    for word, next_word in zip(argv[1:], [*argv[2:], ""]):
        option = options.by_word(word) if word.startswith("-") else None
        if option:
            is_switch = not next_word or next_word.startswith("-")
            values[option.name] = (options.switch_value(word) if is_switch else "") or next_word
    return values
