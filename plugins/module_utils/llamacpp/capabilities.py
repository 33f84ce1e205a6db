# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Capabilities of releases of llama.cpp: names of programs, options, protocol, and architectures.

Builds in OLDEST_BUILDS and newer ones are supported. Options are in options.TABLE, which is compared with the help of the programs before they serve.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE

FORKS = {MAINLINE: "https://github.com/ggml-org/llama.cpp", IK_LLAMA: "https://github.com/ikawrakow/ik_llama.cpp"}
"""Value of ``fork`` in ``llama_release`` → its repository."""

OLDEST_BUILDS = {MAINLINE: 11063, IK_LLAMA: 4840}
"""Fork → oldest supported build: the newest whose sources were reviewed. For llama.cpp it is the default release, and moves up with it. ik_llama.cpp
counts its own commits; this is 8337e4cd of 15 August 2026."""

PYPI_TREES: dict[str, dict[str, Any]] = {"0.3.36": {"build": 11063, "commit": "0c1e570"}}
"""Release of llama-cpp-python → the llama.cpp tree in it."""

PACKAGED_BUILDS = {"0.7.0": 11669}
"""Version of a distribution's package → its build of llama.cpp, oldest first."""
OLDEST_PACKAGES = {"debian": 14}
"""Distribution → its oldest version whose llama.cpp package supports RPC."""

PROTOCOLS = [(11063, "7.0.0"), (11435, None), (11450, "8.0.0"), (11740, None)]
"""RPC protocol by first build, None if unknown. Sources: the trees of 11063 and 11434, and the programs of 11669 and 11739; 11450 introduced 8.0.0 (#26610)."""
IK_LLAMA_PROTOCOL = "3.5.2"

MAX_BACKENDS = 16
"""Maximum number of backends of one llama-server, one for each device and one for the processor (an assertion on GGML_SCHED_MAX_BACKENDS in
ggml-backend.cpp and in ik_llama.cpp)."""
MAX_DEVICES = MAX_BACKENDS - 1
"""Maximum number of devices besides the processor. ``--tensor-split`` also requires fewer shares than llama_max_devices (arg.cpp), 16 (#13293)."""

BUFFER_TEMPLATE = "RPC0[{endpoint}]"
"""Name of a worker's buffers in the log."""

_ARCHITECTURES = """
afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bert bitnet bloom chameleon chatglm clip codeshell cogvlm
cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 dflash dots1 dots3note dream eagle3 ernie4_5
ernie4_5-moe eurobert exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 gemma4-assistant glm-dsa
glm4 glm4moe glm5-next gpt-oss gpt2 gptj gptneox granite granite_swa granitehybrid granitemoe graniteswitch grok grovemoe hrm_text
hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba jina-bert-v2 jina-bert-v3 kimi-k3 kimi-linear laguna lfm2
lfm2moe llada llada-moe llama llama-embed llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3
mistral3 mistral4 modern-bert mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe neo-bert nomic-bert nomic-bert-moe olmo olmo2
olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm pockettts qwen qwen2 qwen2moe qwen2vl qwen3 qwen35
qwen35moe qwen3moe qwen3next qwen3tts qwen3vl qwen3vlmoe qwen4exp refact rnd1 rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3 spark2_5
stablelm starcoder starcoder2 step35 t5 t5encoder talkie wavtokenizer-dec xverse
"""
ARCHITECTURES = frozenset(_ARCHITECTURES.split())
"""Architectures that the oldest build of llama.cpp loads: LLM_ARCH_NAMES in llama-arch.cpp."""

NEW_ARCHITECTURES = {
    11434: "clef",
    11549: "gemma-embedding2",
    11669: "maion-coder vllm-decision2",
    11739: "beam kolibri1 muse-spark",
    12211: "clover_moe deepseek41 flint kimi-k31 lfm3 limite metis16 mistral-large4 ricursive sensenova_u1 xing4_0",
}
"""Newer reviewed build of llama.cpp → architectures that the reviewed build before it lacks. 11434 is a tree, the others are programs:
xllamacpp 2026.10.11549, Debian's 0.7.0, llama-cpp-py-sync 0.11739, wllama 3.13.0."""
REVIEWED_BUILDS = {MAINLINE: max(NEW_ARCHITECTURES), IK_LLAMA: OLDEST_BUILDS[IK_LLAMA]}
"""Fork → newest build whose architectures and types were reviewed. The options of llama-server were reviewed up to 11669."""
_IK_LLAMA_ARCHITECTURES = """
arctic baichuan bailingmoe2 bailingmoe3 bert bitnet bitnet-25 bitnet-b1.58 bloom chatglm codeshell cohere2 cohere2_moe command-r dbrx deci deepseek2
deepseek4 dflash dflash-draft dots1 ernie4_5 ernie4_5-moe falcon gemma gemma2 gemma3 gemma4 gemma4-assistant gemma4_mtp glm-dsa glm4 glm4moe gpt-oss gpt2
gptj gptneox granite granitemoe grok hunyuan-moe internlm2 jais jina-bert-v2 laguna llama llama4 mamba mellum mimo2 minicpm minimax-m2 minimax-m3 mistral3
mistral4 mpt muse-glimmer nomic-bert olmo openelm openpangu orion phi2 phi3 plamo qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next
qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm starcoder starcoder2 step35 t5 t5encoder xverse
"""


class ArchitectureSupport(NamedTuple):
    """Reviewed builds before and after an architecture was added: the newest without it, and the oldest with it (None if all lack it)."""

    newest_build_without: int
    oldest_build_with: int | None


def support_of(architecture: str, fork: str) -> ArchitectureSupport | None:
    """Return which builds support an architecture; None if all supported builds do."""
    if architecture in (ARCHITECTURES if fork == MAINLINE else _IK_LLAMA_ARCHITECTURES.split()):
        return None
    newest_build_without = OLDEST_BUILDS[fork]
    for build, names in NEW_ARCHITECTURES.items() if fork == MAINLINE else ():
        if architecture in names.split():
            return ArchitectureSupport(newest_build_without, build)
        newest_build_without = build
    return ArchitectureSupport(REVIEWED_BUILDS[fork], None)


WORKER_BINARIES = {MAINLINE: "ggml-rpc-server", IK_LLAMA: "rpc-server"}
DEVICE_TEMPLATES = {MAINLINE: "RPC{index}", IK_LLAMA: BUFFER_TEMPLATE}
"""Name of a worker's device for ``--device``."""


def protocol_of(build: int, fork: str = MAINLINE) -> str | None:
    if fork == IK_LLAMA:
        return IK_LLAMA_PROTOCOL
    return next((protocol for first_build, protocol in reversed(PROTOCOLS) if first_build <= build), None)


WORD_PATTERN = re.compile(r"(?<![^\s,])--?[A-Za-z][\w.-]*")
OPTION_HEADING_PATTERN = re.compile(r" {0,16}((?:--?[A-Za-z][\w.-]*(?: [^\s,-][^\s,]*)?(?:, *|(?=\s|$)))+)")
"""Pattern for an option in a help text: its names and value. Descriptions are further to the right."""
REMOVED_TEXT = "argument has been removed"


def parse_help(text: str) -> dict[str, bool]:
    """Return the options in a program's help text, and whether each takes a value."""
    help_options: dict[str, bool] = {}
    for entry in re.split(r"\n(?= {0,16}--?[A-Za-z])", "\n" + text):
        match = OPTION_HEADING_PATTERN.match(entry)
        if match and REMOVED_TEXT not in " ".join(entry.split()):
            takes_value = bool(re.search(r"[\w.-] [^\s-]", match[1]))
            help_options.update(dict.fromkeys(WORD_PATTERN.findall(match[1]), takes_value))
    return help_options


def unknown_options(program: str, argv: Sequence[str], help_options: Mapping[str, bool], fork: str) -> list[str]:
    """Return the options of a command line that a program would reject, including switches followed by a value.

    :param program: options.SERVER or options.WORKER.
    :param argv: command line without the program.
    :param help_options: result of ``parse_help``.
    """
    rejected_options, switch = [], ""
    arguments = iter(argv)
    for argument in arguments:
        if not WORD_PATTERN.match(argument):
            rejected_options += [f"{switch} {argument}"] if switch else []
            continue
        word = argument.replace("_", "-") if program == options.SERVER and argument.startswith("--") else argument
        if word not in help_options and not (program == options.SERVER and options.is_unlisted(word, fork)):
            rejected_options.append(argument)
        if help_options.get(word):
            next(arguments, None)
        switch = argument if help_options.get(word) is False and fork in options.COMPLETE_HELP_FORKS else ""
    return rejected_options
