# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a release of llama.cpp understands: names of programs, flags, protocol. The one place for each of them.

By build number when only planning, from the programs' own help when they are there; a test holds the two together.
Options themselves are in the table of options.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options

PYPI_TREES: dict[str, dict[str, Any]] = {
    "0.3.16": {"build": 6170, "commit": "4227c9b", "generation": 6170},
    "0.3.20": {"build": 8643, "commit": "f49e917", "generation": 8643},
    "0.3.25": {"build": None, "commit": "210a657", "generation": 9435, "protocol": "4.0.0"},
    "0.3.35": {"build": None, "commit": "4df29be", "generation": 10458, "protocol": "5.0.0"},
    "0.3.36": {"build": None, "commit": "0c1e570", "generation": 11063, "protocol": "7.0.0"},
}
"""llama-cpp-python release → the llama.cpp tree it carries, of those that were read. Where the build number is not known, ``generation`` is that
of an older build which understands the same, or the number of its day. Of other releases the source archive says commit, day and protocol."""

BUILDS_OF_DAYS = [
    ("2024-08-29", 3642),
    ("2025-04-08", 5061),
    ("2025-08-14", 6170),
    ("2025-10-04", 6688),
    ("2025-12-16", 7437),
    ("2026-02-25", 8156),
    ("2026-04-03", 8643),
    ("2026-05-16", 9174),
    ("2026-05-20", 9247),
    ("2026-06-18", 9701),
    ("2026-07-24", 10103),
    ("2026-08-17", 10472),
    ("2026-09-08", 10864),
    ("2026-09-22", 11059),
]
"""Days on which a build was the newest or nearly so, from reports of it: ggml-org/llama.cpp#9244, #12817, #18097, #29270, xorbitsai/xllamacpp#114,
docker/model-runner#918 and #1043, containers/ramalama#2761 and #2805, SubtitleEdit/subtitleedit#12782, ollama/ollama#18317; 6170 and 8643 are trees that
were read, 6688 began a protocol."""

PACKAGED_TREES: dict[str, dict[str, Any]] = {
    "0.7.0": {"build": 11669, "commit": "unknown", "generation": 11669, "protocol": "8.0.0"},
}
"""Version of a distribution's package → the llama.cpp tree it was built from, oldest first."""
PACKAGED_SINCE = {"debian": 14}
"""Distribution → its first version with a package of llama.cpp that has RPC, as far as that is known."""

PROTOCOLS = [
    (0, "2.0.0"),
    (6688, "3.0.0"),
    (7183, "3.5.0"),
    (7287, "3.6.0"),
    (8277, "3.6.1"),
    (8802, "4.0.0"),
    (10176, "5.0.0"),
    (10496, "5.1.0"),
    (10567, None),
    (11450, "8.0.0"),
    (11670, None),
]
"""First build → RPC protocol, None where it is not known by number. 10566 still has 5.1.0, 10809 has 6.0.0 (#18626) and 11063 has
7.0.0: trees that xllamacpp packs (xorbitsai/xllamacpp#188). 8.0.0 began with 11450 (#26610), and 11669 is the newest build that was seen. There the
tree itself says it, when it is fetched."""

OLDEST = 6000
"""Oldest build that is planned for, of July 2025. Those before it have other options, and none of the inventories uses one."""

MAX_BACKENDS = 16
"""Of one llama-server: each device has one, and the processor (GGML_SCHED_MAX_BACKENDS of ggml-backend.cpp, an assertion; the same in 6170, 8643, 11063
and ik_llama.cpp 4840)."""
MAX_DEVICES = MAX_BACKENDS - 1
"""Beside the processor. ``--tensor-split`` takes no more either: fewer shares than llama_max_devices (arg.cpp), which is 16 (#13293)."""

SECURITY_FLOOR = 8492
"""First build without CVE-2026-34159, unauthenticated remote code execution in the RPC server."""

MAINLINE, IK_LLAMA = options.MAINLINE, options.IK_LLAMA
FORKS = {MAINLINE: "https://github.com/ggml-org/llama.cpp", IK_LLAMA: "https://github.com/ikawrakow/ik_llama.cpp"}
"""What ``llama_release`` may name as ``fork`` → its repository."""

IK_LLAMA_PROTOCOLS = [(0, None), (3737, "2.0.1"), (4033, "3.5.1"), (4104, "3.5.2")]
"""The same of ik_llama.cpp, whose numbers count the commits of its own history: 3737 is of 8 June 2025, 4033 of 30 November 2025."""

IK_LLAMA_SEEN = 4840
"""Newest commit of ik_llama.cpp that was looked at, 8337e4cd of 15 August 2026. CVE-2026-34159 is not corrected up to there."""

IK_LLAMA_SEVERAL_DEVICES_SINCE = 4033
"""First commit whose worker takes ``-d`` and, for the processor, ``-cpu``."""

IK_LLAMA_DEVICE_SINCE = 3933
"""First commit with ``--device``. Before it all devices of the head come first, then the workers, in the order of ``--rpc``."""


_ARCHITECTURES = {
    6170: """
arcee arctic arwkv7 baichuan bailingmoe bert bitnet bloom chameleon chatglm codeshell cohere2 command-r dbrx deci deepseek deepseek2 dots1
dream ernie4_5 ernie4_5-moe exaone exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n glm4 glm4moe gpt-oss gpt2 gptj gptneox granite
granitehybrid granitemoe grok hunyuan-dense hunyuan-moe internlm2 jais jamba jina-bert-v2 lfm2 llada llama llama4 mamba mamba2 minicpm
minicpm3 mpt nemotron neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm orion phi2 phi3 phimoe plamo plamo2 plm qwen qwen2
qwen2moe qwen2vl qwen3 qwen3moe refact rwkv6 rwkv6qwen2 rwkv7 smallthinker smollm3 stablelm starcoder starcoder2 t5 t5encoder
wavtokenizer-dec xverse
""",
    8643: """
afmoe apertus bailingmoe2 clip cogvlm deepseek2-ocr eurobert exaone-moe gemma-embedding gemma4 glm-dsa grovemoe jais2 jina-bert-v3
kimi-linear lfm2moe llada-moe llama-embed maincoder mimo2 minimax-m2 mistral3 mistral4 modern-bert nemotron_h nemotron_h_moe paddleocr
pangu-embedded plamo3 qwen35 qwen35moe qwen3next qwen3vl qwen3vlmoe rnd1 seed_oss step35
""",
    11063: """
bailingmoe3 cohere2moe deepseek32 deepseek4 dflash dots3note eagle3 gemma4-assistant glm5-next granite_swa graniteswitch hrm_text hunyuan_vl
hy_v3 hy_v4 kimi-k3 laguna maple mellum minimax-01 minimax-m3 muse-glimmer nanbeige pockettts qwen3tts qwen4exp spark2_5 talkie
""",
}
ARCHITECTURES = {name: build for build, names in _ARCHITECTURES.items() for name in names.split()}
"""Architecture of a model → the first build that was read which knows it: LLM_ARCH_NAMES in llama-arch.cpp."""
NEWEST_READ = max(_ARCHITECTURES)


def lacks_architecture(build: int, name: str) -> bool:
    """Whether it is known that a build of llama.cpp refuses files of this architecture: a newer one, or the newest that was read, has no such."""
    older = [read for read in _ARCHITECTURES if read < ARCHITECTURES.get(name, NEWEST_READ + 1)]
    return build <= max(older, default=0)


class Capabilities(NamedTuple):
    """What a build understands."""

    worker_binary: str
    worker_flags: tuple[str, ...]
    """Short names without dashes."""
    server_flags: tuple[str, ...]
    """Long names of the table of options without dashes; those of two forms only where they take a value."""
    protocol: str | None
    """None where it is not known, or there is no handshake."""
    buffer_name: str
    """How the log names a worker's buffers."""
    device_name: str | None
    """How ``--device`` names a worker; None where there is no such option."""


@functools.lru_cache(maxsize=64)
def of_build(build: int, protocol: str | None = None, fork: str = MAINLINE) -> Capabilities:
    """Capabilities of the build with this number.

    :param fork: whose numbers these are, a key of FORKS.
    """
    words = options.listed(options.WORKER, build, fork)
    worker_flags = tuple(sorted(word[1:] for word in words if not word.startswith("--")))
    server_flags = _server_flags(options.listed(options.SERVER, build, fork))
    if fork == IK_LLAMA:
        known = _protocol_of(IK_LLAMA_PROTOCOLS, build)
        name = "RPC0[{endpoint}]" if build >= IK_LLAMA_SEVERAL_DEVICES_SINCE else "RPC[{endpoint}]"
        device = name if build >= IK_LLAMA_DEVICE_SINCE else None
        return Capabilities("rpc-server", worker_flags, server_flags, known, name, device)
    return Capabilities(
        worker_binary="ggml-rpc-server" if build >= 9824 else "rpc-server",
        worker_flags=worker_flags,
        server_flags=server_flags,
        protocol=protocol or _protocol_of(PROTOCOLS, build),
        buffer_name="RPC0[{endpoint}]" if build >= 6688 else "RPC[{endpoint}]",
        device_name="RPC{index}" if build >= 6688 else "RPC[{endpoint}]",
    )


def _protocol_of(table: Sequence[tuple[int, str | None]], build: int) -> str | None:
    return table[bisect.bisect_right([first for first, _protocol in table], build) - 1][1]


def _server_flags(known: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(
        sorted(
            word[2:]
            for word, valued in known.items()
            if word.startswith("--") and (valued or word not in options.OF_TWO_FORMS)
        )
    )


def tells_protocol(build: int) -> bool:
    """Whether the number of a build of llama.cpp says its protocol."""
    return _protocol_of(PROTOCOLS, build) is not None


def protocol_of_commit(commit: str) -> str | None:
    """RPC protocol of a tree that was read, where this is its commit or begins so; None of any other."""
    same = (tree for tree in PYPI_TREES.values() if commit.startswith(tree["commit"]))
    return next((tree.get("protocol") for tree in same), None)


def build_of_day(day: str, protocol: str | None) -> int | None:
    """About which build was the newest on a day; None for days before those that are known.

    :param day: as 2026-06-01.
    :param protocol: of that build, which bounds its number where its builds are known.
    """
    days = [(date.fromisoformat(known).toordinal(), build) for known, build in BUILDS_OF_DAYS]
    wanted = date.fromisoformat(day).toordinal()
    index = min(bisect.bisect_right(days, (wanted, sys.maxsize)), len(days) - 1)
    if not index:
        return None
    (start, first), (end, last) = days[index - 1], days[index]
    build = first + (wanted - start) * (last - first) // (end - start)
    for (since, known), (until, _next) in zip(PROTOCOLS, PROTOCOLS[1:]):
        if known and known == protocol:
            return min(max(build, since), until - 1)
    return build


class Help(NamedTuple):
    """What a program's help lists.

    :param known: option → whether the help shows a value after it.
    :param removed: option that the program refuses → what its help says of that.
    """

    known: dict[str, bool]
    removed: dict[str, str]


HEADING = re.compile(r" {0,16}(?=--?[A-Za-z])")
"""What stands before an option in a help; an explanation is further to the right."""
WORD = re.compile(r"--?[A-Za-z][\w.-]*")
NEXT_WORD = re.compile(r"(?: [^\s,-][^\s,]*)?, *(?=--?[A-Za-z])")
"""From one name of an option to the next one, with the value of the first between them."""
VALUE = re.compile(r" [^\s-]")
REMOVED = "argument has been removed"


def parse_help(text: str) -> Help:
    """The options of a program, from what it prints when asked for help."""
    parsed = Help({}, {})
    for lines in _entries(text):
        words, valued, rest = _heading(lines[0].strip())
        explanation = " ".join(" ".join([rest, *lines[1:]]).split())
        if REMOVED in explanation:
            reason = explanation[explanation.index(REMOVED) :].split(" (env:", maxsplit=1)[0]
            parsed.removed.update(dict.fromkeys(words, reason))
        else:
            parsed.known.update(dict.fromkeys(words, valued))
    return parsed


def _entries(text: str) -> Iterator[list[str]]:
    """The lines of each option in a help."""
    lines: list[str] = []
    for line in text.splitlines():
        if HEADING.match(line):
            if lines:
                yield lines
            lines = [line]
        elif lines and not line.startswith("-----"):
            lines.append(line)
    if lines:
        yield lines


def _heading(line: str) -> tuple[list[str], bool, str]:
    """Names of an option, whether a value follows one of them, and the rest of the line."""
    words, valued, position = [], False, 0
    while word := WORD.match(line, position):
        position = word.end()
        words.append(word[0])
        valued = valued or bool(VALUE.match(line, position))
        following = NEXT_WORD.match(line, position)
        if not following:
            break
        position = following.end()
    return words, valued, line[position:]


class Problem(NamedTuple):
    """An argument that a program would not take.

    :param word: the option.
    :param why: what is wrong with it, to follow the program's name.
    :param near: the nearest option that the program lists, or nothing.
    """

    word: str
    why: str
    near: str


def problems(program: str, argv: Sequence[str], help_of: Help, build: int, fork: str) -> list[Problem]:
    """What a program that lists these options would not take of its command line.

    :param program: options.SERVER or options.WORKER.
    :param argv: command line without the program itself.
    :param build: number of the build, for options that a help does not list.
    """
    problems = []
    arguments = iter(enumerate(argv))
    for index, argument in arguments:
        if not WORD.match(argument):
            continue
        word = argument.replace("_", "-") if program == options.SERVER and argument.startswith("--") else argument
        follows = index + 1 < len(argv) and not WORD.fullmatch(argv[index + 1])
        hidden = program == options.SERVER and options.unlisted(word, build, fork)
        why = "" if hidden else _problem(program, word, follows, help_of)
        if why:
            near = difflib.get_close_matches(word, [name for name in help_of.known if name.startswith("--")], 1)
            problems.append(Problem(argument, why, near[0] if near else ""))
        if help_of.known.get(word):
            next(arguments, None)
    return problems


def _problem(program: str, word: str, follows: bool, help_of: Help) -> str:
    if word in help_of.removed:
        return f"no longer knows {word}: {help_of.removed[word]}"
    if word not in help_of.known:
        if "=" in word:
            return f"does not know {word}: make its value a separate entry"
        return f"does not know {word}"
    if program == options.SERVER and word in options.OF_TWO_FORMS and help_of.known[word] != follows:
        return f"takes {word} {'with' if help_of.known[word] else 'without'} a value"
    return ""
