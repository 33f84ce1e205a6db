# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one table of options of llama-server and rpc-server.

The command line, what is refused in further arguments and in the environment, what a fork does not have, and what is
looked for in the programs' help all come from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

MAINLINE = "llama.cpp"
IK_LLAMA = "ik_llama.cpp"

SERVER, WORKER = "llama-server", "rpc-server"
"""Programs, by the name that a worker's program had first."""

VALUE, LIST, SWITCH = "value", "list", "switch"
"""An option and a value; an option and values with commas between them; an option alone."""

UNPLANNED = "unplanned"
"""With such an option devices hold something else than planned."""
SPECULATION = "speculation"
"""The option that says how tokens are predicted."""
SPECULATES = "what speculates (a draft model, or layers that predict further tokens)"

MEASURING = "llama-bench"
"""The program of llama.cpp that measures."""


class Spelling(NamedTuple):
    """How an option is written.

    :param words: the first one is written, the others mean the same.
    :param first: first build that has it. Where only some builds were read, the oldest one in which it was seen.
    :param last: last build that has it.
    :param form: VALUE, LIST or SWITCH.
    :param means: of a switch, the value that it stands for.
    :param written: whether the plan writes it.
    :param unlisted: those of its words that the program takes and does not list in its help.
    :param values: what it takes, where builds differ in that; empty where everything is given to it.
    """

    words: tuple[str, ...]
    first: int = 0
    last: int | None = None
    fork: str = MAINLINE
    form: str = VALUE
    means: str = ""
    written: bool = True
    unlisted: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    def has(self, build: int, fork: str) -> bool:
        """Whether this build has it."""
        return fork == self.fork and self.first <= build and (self.last is None or build <= self.last)

    def names(self) -> Iterator[str]:
        """Its words as the help of the program lists them."""
        return (word for word in self.words if word not in self.unlisted)


class Option(NamedTuple):
    """An option of one program.

    :param variable: that sets it; None where the plan decides without one.
    :param optional: whether the plan does not write it where its variable is left out.
    :param environment: variables that stand for it in the environment of the program.
    :param memory: what it changes: a field of kv_cache.Settings, UNPLANNED, or nothing.
    :param silent: values that are never written.
    :param implied: values for which nothing is written where no spelling can say them.
    :param remedy: what to do instead of giving it, where no variable sets it.
    :param replaced: what happened to it after its last build.
    :param adds: what devices hold with it beside what is planned.
    :param secret: whether its value is a secret, which neither a command line nor a definition may hold.
    """

    name: str
    spellings: tuple[Spelling, ...]
    variable: str | None = None
    optional: bool = False
    environment: tuple[str, ...] = ()
    memory: str = ""
    silent: tuple[str, ...] = ()
    implied: tuple[str, ...] = ()
    remedy: str = ""
    replaced: str = ""
    program: str = SERVER
    secret: bool = False
    adds: str = ""

    @property
    def owned(self) -> bool:
        """Whether only the plan sets it."""
        return bool(self.variable or self.remedy)

    def spelled(self, build: int, fork: str) -> list[Spelling]:
        """Its spellings in this build."""
        return [spelling for spelling in self.spellings if spelling.has(build, fork)]

    def words(self) -> set[str]:
        """All its words, of whatever build."""
        return {word for spelling in self.spellings for word in spelling.words}

    def instead(self) -> str:
        """What to do instead of giving it."""
        return f"set {self.variable} instead" if self.variable else self.remedy


class UnknownOption(ValueError):
    """A build has no way to say a value of an option."""


def _in(
    fork: str,
    words: str,
    first: int = 0,
    last: int | None = None,
    form: str = VALUE,
    means: str = "",
    written: bool = True,
    unlisted: str = "",
    values: str = "",
) -> Spelling:
    return Spelling(
        tuple(words.split()), first, last, fork, form, means, written, tuple(unlisted.split()), tuple(values.split())
    )


def _both(words: str, form: str = VALUE, written: bool = True) -> tuple[Spelling, Spelling]:
    """The same in all builds of llama.cpp and of ik_llama.cpp."""
    return _in(MAINLINE, words, form=form, written=written), _in(IK_LLAMA, words, form=form, written=written)


def _split(environment: str) -> tuple[str, ...]:
    return tuple(environment.split())


DIRECT_IO = (7668, 10104)
LOAD_MODE_SINCE = 10105
"""First build with --load-mode (#20834)."""
AUTO_SINCE = 10458
"""Oldest build that was read with the load modes auto (#26081) and mmap+mlock, and with mlock that does not map (#26135): the tree of 0.3.35."""
SEPARATE_MODES_UNTIL = 10883
"""Last build that takes the older spellings of load modes; b10884 ends with «invalid argument» (tscibilia/home-ops#3804)."""
FIT_SINCE = 7437
"""Oldest build in which --fit was seen (#18097); it came with #16653 in December 2025."""
TRACE_SINCE = 9138
"""From about here on the sizes of buffers need -lv 4 (#23021 of 13 May 2026; seen in b9181). Before that they are logged without it."""
SEPARATE_MODES = "--mmap --no-mmap -dio --direct-io -ndio --no-direct-io --mlock"
PROMPT_CACHE_SINCE = 6800
"""From here on --cache-ram is there for sure: #16391 was merged on 2025-10-09, about b6740. Its default is 8192 MiB."""
SLEEP_SINCE = 7549
"""Oldest build in which --sleep-idle-seconds was seen (#18228 of 21 December 2025)."""
FUSED_SINCE = 3928
"""First commit of ik_llama.cpp that fuses experts by itself; flash attention is its default, too."""
OVERRIDE_LISTED, PROJECTOR_LISTED, EXPERTS_LISTED, REPACK_LISTED = 4742, 4742, 4768, 4768
"""First commits of ik_llama.cpp whose help lists all words of these options, which are older."""
OLD_PRESETS = "--embd-bge-small-en-default --embd-e5-small-en-default --embd-gte-small-default"
PRESETS = "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec"
LATER_PRESETS = """
--embd-gemma-default --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default
--vision-gemma-12b-default
"""
"""Each stands for a model of upstream's and its settings."""

TABLE: tuple[Option, ...] = (
    Option(
        "rpc",
        _both("--rpc", LIST),
        "llama_worker_endpoints",
        environment=_split("LLAMA_ARG_RPC"),
    ),
    Option(
        "device",
        (_in(MAINLINE, "--device -dev", form=LIST), _in(IK_LLAMA, "--device -dev", 3933, form=LIST)),
        "llama_worker_endpoints",
        environment=_split("LLAMA_ARG_DEVICE"),
    ),
    Option(
        "override-tensor",
        (
            _in(MAINLINE, "--override-tensor -ot", form=LIST),
            _in(IK_LLAMA, "--override-tensor -ot", 0, OVERRIDE_LISTED - 1, LIST, unlisted="--override-tensor -ot"),
            _in(IK_LLAMA, "--override-tensor -ot", OVERRIDE_LISTED, form=LIST),
        ),
        "llama_server_override_tensor",
        optional=True,
        environment=_split("LLAMA_ARG_OVERRIDE_TENSOR"),
    ),
    Option("model", _both("--model -m"), "llama_model_path", environment=_split("LLAMA_ARG_MODEL")),
    Option(
        "model-of-a-server",
        _both("--model-url -mu", written=False),
        "llama_model_url",
        environment=_split("LLAMA_ARG_MODEL_URL"),
    ),
    Option(
        "model-of-hugging-face",
        (
            _in(MAINLINE, "--hf-repo -hf -hfr --hf-file -hff", written=False),
            _in(IK_LLAMA, "--hf-repo -hfr --hf-file -hff", written=False),
        ),
        "llama_model_huggingface",
        environment=_split("LLAMA_ARG_HF_REPO LLAMA_ARG_HF_FILE"),
    ),
    Option(
        "model-of-a-registry",
        (
            _in(MAINLINE, "--docker-repo -dr", 8643, written=False),
            _in(MAINLINE, OLD_PRESETS, 0, 8642, SWITCH, written=False),
            _in(MAINLINE, PRESETS, form=SWITCH, written=False),
            _in(MAINLINE, LATER_PRESETS, 8643, form=SWITCH, written=False),
        ),
        "llama_model_path",
        environment=_split("LLAMA_ARG_DOCKER_REPO"),
    ),
    Option("host", _both("--host"), "llama_server_host", environment=_split("LLAMA_ARG_HOST")),
    Option("port", _both("--port"), "llama_server_port", environment=_split("LLAMA_ARG_PORT")),
    Option(
        "gpu-layers",
        (
            _in(MAINLINE, "--n-gpu-layers -ngl --gpu-layers"),
            _in(IK_LLAMA, "--n-gpu-layers -ngl --gpu-layers", unlisted="--n-gpu-layers"),
        ),
        "llama_server_gpu_layers",
        environment=_split("LLAMA_ARG_N_GPU_LAYERS"),
    ),
    Option(
        "tensor-split",
        _both("--tensor-split -ts", LIST),
        "llama_server_tensor_split",
        environment=_split("LLAMA_ARG_TENSOR_SPLIT"),
    ),
    Option(
        "split-mode",
        tuple(spelling._replace(written=False) for spelling in _both("--split-mode -sm")),
        environment=_split("LLAMA_ARG_SPLIT_MODE"),
        remedy="remove it: the plan places whole layers, which is llama-server's default. With tensor over RPC (#26610, b11450) two equal "
        "workers connect to each other at their port + 1000, which the firewall closes, so that loading would hang",
    ),
    Option(
        "context",
        _both("--ctx-size -c"),
        "llama_server_context",
        environment=_split("LLAMA_ARG_CTX_SIZE"),
    ),
    Option(
        "parallel",
        _both("--parallel -np"),
        "llama_server_parallel",
        environment=_split("LLAMA_ARG_N_PARALLEL"),
    ),
    Option(
        "cache-type-k",
        _both("--cache-type-k -ctk"),
        "llama_server_cache_type_k",
        optional=True,
        environment=_split("LLAMA_ARG_CACHE_TYPE_K"),
        silent=("f16",),
    ),
    Option(
        "cache-type-v",
        _both("--cache-type-v -ctv"),
        "llama_server_cache_type_v",
        optional=True,
        environment=_split("LLAMA_ARG_CACHE_TYPE_V"),
        silent=("f16",),
    ),
    Option(
        "flash-attention",
        (
            _in(MAINLINE, "--flash-attn -fa", 0, 6324, SWITCH, "on"),
            _in(MAINLINE, "--flash-attn -fa", 6325),
            _in(IK_LLAMA, "--flash-attn -fa", 0, FUSED_SINCE - 1, SWITCH, "on"),
            _in(IK_LLAMA, "--no-flash-attn -no-fa", FUSED_SINCE, form=SWITCH, means="off"),
            _in(IK_LLAMA, "--flash-attn -fa", 3985),
        ),
        "llama_server_flash_attention",
        optional=True,
        environment=_split("LLAMA_ARG_FLASH_ATTN"),
        implied=("auto", "on", "off"),
    ),
    Option(
        "threads",
        _both("--threads -t"),
        "llama_server_threads",
        optional=True,
        environment=_split("LLAMA_ARG_THREADS"),
    ),
    Option(
        "prompt-cache",
        (_in(MAINLINE, "--cache-ram -cram", PROMPT_CACHE_SINCE), _in(IK_LLAMA, "--cache-ram -cram", 4840)),
        "llama_server_prompt_cache_mib",
        optional=True,
        environment=_split("LLAMA_ARG_CACHE_RAM"),
        implied=("0",),
    ),
    Option("sleep", (_in(MAINLINE, "--sleep-idle-seconds", SLEEP_SINCE),), "llama_server_idle_seconds", optional=True),
    Option(
        "context-checkpoints",
        (
            _in(MAINLINE, "--ctx-checkpoints -ctxcp", 8643),
            _in(MAINLINE, "--swa-checkpoints", 6170),
            _in(IK_LLAMA, "--ctx-checkpoints -ctx-ckpt", 4840),
        ),
        optional=True,
        environment=_split("LLAMA_ARG_CTX_CHECKPOINTS LLAMA_ARG_SWA_CHECKPOINTS"),
        remedy="remove it: the plan gives as many as the head's memory has room for, and counts them",
    ),
    Option(
        "load-mode",
        (
            _in(MAINLINE, "--no-mmap", 0, LOAD_MODE_SINCE - 1, SWITCH, "none"),
            _in(MAINLINE, "-dio --direct-io", *DIRECT_IO, SWITCH, "dio"),
            _in(MAINLINE, "--mmap -ndio --no-direct-io", *DIRECT_IO, SWITCH, written=False),
            _in(MAINLINE, "--mlock", 0, LOAD_MODE_SINCE - 1, SWITCH, "mmap+mlock"),
            _in(MAINLINE, SEPARATE_MODES, LOAD_MODE_SINCE, SEPARATE_MODES_UNTIL, SWITCH, written=False),
            _in(MAINLINE, "--load-mode -lm", LOAD_MODE_SINCE, AUTO_SINCE - 1, values="mmap none dio"),
            _in(MAINLINE, "--load-mode -lm", AUTO_SINCE),
            _in(IK_LLAMA, "--no-mmap", form=SWITCH, means="none"),
            _in(IK_LLAMA, "--mlock", form=SWITCH, means="mmap+mlock"),
        ),
        "llama_server_load_mode",
        optional=True,
        environment=_split(
            "LLAMA_ARG_LOAD_MODE LLAMA_ARG_MMAP LLAMA_ARG_NO_MMAP LLAMA_ARG_DIO LLAMA_ARG_NO_DIO LLAMA_ARG_MLOCK"
        ),
        implied=("mmap", "auto"),
    ),
    Option(
        "warmup",
        (
            *(spelling._replace(means="off") for spelling in _both("--no-warmup", SWITCH)),
            _in(MAINLINE, "--warmup", 8643, form=SWITCH, written=False),
        ),
        "llama_server_warmup",
        optional=True,
        silent=("on",),
    ),
    Option(
        "api-key-file",
        _both("--api-key-file"),
        "llama_server_api_key_file",
        optional=True,
        environment=_split("LLAMA_ARG_API_KEY_FILE"),
    ),
    Option(
        "api-key",
        tuple(spelling._replace(written=False) for spelling in _both("--api-key")),
        "llama_server_api_key_file",
        environment=_split("LLAMA_API_KEY LLAMA_ARG_API_KEY"),
        secret=True,
    ),
    Option(
        "tls-certificate",
        _both("--ssl-cert-file"),
        "llama_server_tls_certificate_file",
        optional=True,
        environment=_split("LLAMA_ARG_SSL_CERT_FILE"),
    ),
    Option(
        "tls-key",
        _both("--ssl-key-file"),
        "llama_server_tls_key_file",
        optional=True,
        environment=_split("LLAMA_ARG_SSL_KEY_FILE"),
    ),
    Option(
        "token-of-a-registry",
        tuple(spelling._replace(written=False) for spelling in _both("--hf-token -hft")),
        environment=_split("HF_TOKEN LLAMA_ARG_HF_TOKEN"),
        remedy="remove it: every account of the host could read the token, and llama-server reads a model that is on the head already",
        secret=True,
    ),
    Option(
        "print-and-end",
        (
            *(spelling._replace(written=False) for spelling in _both("-h --help --usage --version", SWITCH)),
            _in(MAINLINE, "--completion-bash --list-devices", form=SWITCH, written=False),
            _in(MAINLINE, "--cache-list -cl", 8643, form=SWITCH, written=False),
            _in(MAINLINE, "--license", 8643, 9434, SWITCH, written=False),
        ),
        remedy="remove it, because llama-server would print something and end",
    ),
    Option(
        "fit",
        (
            _in(MAINLINE, "--fit -fit", FIT_SINCE),
            _in(IK_LLAMA, "--fit", 4349, form=SWITCH, written=False),
        ),
        environment=_split("LLAMA_ARG_FIT"),
        implied=("off",),
        remedy="remove it: it would place the layers again",
    ),
    Option(
        "models-preset",
        (_in(MAINLINE, "--models-preset", 8643),),
        "llama_models",
        optional=True,
        environment=_split("LLAMA_ARG_MODELS_PRESET"),
    ),
    Option(
        "models-max",
        (_in(MAINLINE, "--models-max", 8643),),
        "llama_models",
        optional=True,
        environment=_split("LLAMA_ARG_MODELS_MAX"),
    ),
    Option(
        "models-folder",
        (_in(MAINLINE, "--models-dir", 8643, written=False),),
        "llama_models",
        environment=_split("LLAMA_ARG_MODELS_DIR"),
    ),
    Option(
        "log-verbosity",
        (
            _in(MAINLINE, "--log-verbosity -lv --verbosity", 0, TRACE_SINCE - 1, written=False),
            _in(MAINLINE, "--log-verbosity -lv --verbosity", TRACE_SINCE),
            _in(IK_LLAMA, "--verbosity", written=False),
        ),
        environment=_split("LLAMA_ARG_LOG_VERBOSITY LLAMA_LOG_VERBOSITY"),
        implied=("4",),
        remedy="remove it, because verify reads buffer sizes from the log, or use --verbose, which logs everything",
    ),
    Option(
        "repack",
        (
            _in(MAINLINE, "--no-repack -nr", 6170, form=SWITCH, means="off"),
            _in(MAINLINE, "--repack", 8643, form=SWITCH, means="on", written=False),
        ),
        environment=_split("LLAMA_ARG_REPACK LLAMA_ARG_NO_REPACK"),
        implied=("off",),
    ),
    Option(
        "log-disable",
        _both("--log-disable", SWITCH),
        optional=True,
        remedy="remove it, because verify reads buffer sizes from the log",
    ),
    Option("override-kv", _both("--override-kv"), memory=UNPLANNED),
    Option(
        "full-window",
        (_in(MAINLINE, "--swa-full", form=SWITCH),),
        environment=_split("LLAMA_ARG_SWA_FULL"),
        memory="full_window",
    ),
    Option(
        "unified",
        (
            _in(MAINLINE, "--kv-unified -kvu", form=SWITCH, means="on"),
            _in(MAINLINE, "--no-kv-unified -no-kvu", 8643, form=SWITCH, means="off"),
        ),
        environment=_split("LLAMA_ARG_KV_UNIFIED LLAMA_ARG_NO_KV_UNIFIED LLAMA_ARG_KV_SPLIT"),
        memory="unified",
    ),
    Option(
        "micro-batch",
        _both("--ubatch-size -ub"),
        "llama_server_micro_batch",
        optional=True,
        environment=_split("LLAMA_ARG_UBATCH"),
        silent=("512",),
    ),
    Option(
        "batch",
        _both("--batch-size -b"),
        "llama_server_batch",
        optional=True,
        environment=_split("LLAMA_ARG_BATCH"),
        silent=("2048",),
    ),
    Option(
        "experts-on-the-processor",
        (
            _in(MAINLINE, "--cpu-moe -cmoe", form=SWITCH),
            _in(MAINLINE, "--n-cpu-moe -ncmoe"),
            _in(IK_LLAMA, "--cpu-moe -cmoe", 3833, EXPERTS_LISTED - 1, SWITCH, unlisted="-cmoe"),
            _in(IK_LLAMA, "--n-cpu-moe -ncmoe", 3833, EXPERTS_LISTED - 1, unlisted="-ncmoe"),
            _in(IK_LLAMA, "--cpu-moe -cmoe", EXPERTS_LISTED, form=SWITCH),
            _in(IK_LLAMA, "--n-cpu-moe -ncmoe", EXPERTS_LISTED),
        ),
        optional=True,
        environment=_split("LLAMA_ARG_CPU_MOE LLAMA_ARG_N_CPU_MOE"),
        remedy=r"set llama_server_override_tensor instead, to ['ffn_.*_exps=CPU'] for the experts of all layers, or to ['blk\.[0-9]\.ffn_.*_exps=CPU'] for "
        "those of the first ten: the plan counts these",
    ),
    Option(
        "feed-forward-on-the-processor",
        (_in(MAINLINE, "--n-cpu-ffn -ncffn", 11063),),
        optional=True,
        environment=_split("LLAMA_ARG_N_CPU_FFN"),
        remedy=r"set llama_server_override_tensor instead, to ['blk\.[0-9]\.ffn_(up|down|gate)\.=CPU'] for those of the first ten layers: "
        "the plan counts these",
    ),
    Option(
        "kv-offload",
        (
            *_both("--no-kv-offload -nkvo", SWITCH),
            _in(MAINLINE, "--kv-offload -kvo", 8643, form=SWITCH),
        ),
        environment=_split("LLAMA_ARG_KV_OFFLOAD LLAMA_ARG_NO_KV_OFFLOAD"),
        memory=UNPLANNED,
    ),
    Option(
        "slots-with-a-cache-of-their-own",
        (_in(MAINLINE, "--kv-unified-per-slot", 11063),),
        environment=_split("LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
        memory=UNPLANNED,
    ),
    Option(
        "lazy-mode",
        (_in(MAINLINE, "--lazy-mode -lzm", 11063),),
        environment=_split("LLAMA_ARG_LAZY_MODE"),
        memory=UNPLANNED,
    ),
    Option("adapter", _both("--lora --lora-scaled"), memory=UNPLANNED, adds="adapters"),
    Option(
        "draft",
        (
            *_both("--model-draft -md"),
            _in(MAINLINE, "--hf-repo-draft -hfd -hfrd"),
            _in(MAINLINE, "--spec-draft-model --spec-draft-hf", 9435),
        ),
        environment=_split(
            "LLAMA_ARG_MODEL_DRAFT LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_HFD_REPO LLAMA_ARG_SPEC_DRAFT_HF_REPO"
        ),
        memory=UNPLANNED,
        adds=SPECULATES,
    ),
    Option(
        SPECULATION,
        (
            _in(MAINLINE, "--spec-type", 8643, 9434, written=False),
            _in(MAINLINE, "--spec-type", 9435),
            _in(IK_LLAMA, "--spec-type", 4192, written=False),
        ),
        environment=_split("LLAMA_ARG_SPEC_TYPE"),
        memory=UNPLANNED,
        adds=SPECULATES,
    ),
    Option(
        "drafted",
        (_in(MAINLINE, "--spec-draft-n-max", 9435, written=False),),
        environment=_split("LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    ),
    Option("drafted-by-ngrams", (_in(MAINLINE, "--spec-ngram-mod-n-max", 9435, written=False),)),
    Option(
        "projector",
        (
            _in(MAINLINE, "--mmproj --mmproj-url"),
            _in(MAINLINE, "-mm -mmu", 8643),
            _in(IK_LLAMA, "--mmproj"),
            _in(IK_LLAMA, "--mmproj-url", 3896, PROJECTOR_LISTED - 1, unlisted="--mmproj-url"),
            _in(IK_LLAMA, "--mmproj-url", PROJECTOR_LISTED),
        ),
        environment=_split("LLAMA_ARG_MMPROJ LLAMA_ARG_MMPROJ_URL"),
        memory=UNPLANNED,
        adds="the projector",
    ),
    Option(
        "draft-device",
        (
            _in(MAINLINE, "--device-draft -devd", 6170),
            _in(MAINLINE, "--spec-draft-device", 9435, written=False),
            _in(IK_LLAMA, "--device-draft -devd", 3933),
        ),
    ),
    Option(
        "draft-layers",
        (
            _in(MAINLINE, "--gpu-layers-draft -ngld --n-gpu-layers-draft", 6170),
            _in(MAINLINE, "--spec-draft-ngl", 9435, written=False),
            _in(IK_LLAMA, "--gpu-layers-draft -ngld --n-gpu-layers-draft", unlisted="--n-gpu-layers-draft"),
        ),
        environment=_split("LLAMA_ARG_N_GPU_LAYERS_DRAFT"),
    ),
    Option(
        "draft-tensors",
        (
            _in(MAINLINE, "--override-tensor-draft -otd", 6170, form=LIST),
            _in(MAINLINE, "--spec-draft-override-tensor", 9435, form=LIST),
            _in(MAINLINE, "--cpu-moe-draft -cmoed", 6170, form=SWITCH),
            _in(MAINLINE, "--spec-draft-cpu-moe", 9435, form=SWITCH),
            _in(MAINLINE, "--n-cpu-moe-draft -ncmoed", 6170),
            _in(MAINLINE, "--spec-draft-n-cpu-moe --spec-draft-ncmoe", 9435),
        ),
        environment=_split(
            "LLAMA_ARG_CPU_MOE_DRAFT LLAMA_ARG_N_CPU_MOE_DRAFT LLAMA_ARG_SPEC_DRAFT_CPU_MOE LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE"
        ),
    ),
    Option(
        "draft-context",
        (_in(MAINLINE, "--ctx-size-draft -cd", 6170, 9434), _in(IK_LLAMA, "--ctx-size-draft -cd", 3933)),
        environment=_split("LLAMA_ARG_CTX_SIZE_DRAFT"),
    ),
    Option(
        "draft-cache-type-k",
        (
            _in(MAINLINE, "--cache-type-k-draft -ctkd", 6170),
            _in(MAINLINE, "--spec-draft-type-k", 9435),
            _in(IK_LLAMA, "--cache-type-k-draft -ctkd", 3933),
        ),
        environment=_split("LLAMA_ARG_CACHE_TYPE_K_DRAFT LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K"),
    ),
    Option(
        "draft-cache-type-v",
        (
            _in(MAINLINE, "--cache-type-v-draft -ctvd", 6170),
            _in(MAINLINE, "--spec-draft-type-v", 9435),
            _in(IK_LLAMA, "--cache-type-v-draft -ctvd", 3933),
        ),
        environment=_split("LLAMA_ARG_CACHE_TYPE_V_DRAFT LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V"),
    ),
    Option(
        "projector-offload",
        (
            _in(MAINLINE, "--no-mmproj-offload", 6170, form=SWITCH, means="off"),
            _in(MAINLINE, "--mmproj-offload", 8643, form=SWITCH, means="on", written=False),
            _in(IK_LLAMA, "--no-mmproj-offload", 4840, form=SWITCH, means="off"),
        ),
        environment=_split("LLAMA_ARG_MMPROJ_OFFLOAD LLAMA_ARG_NO_MMPROJ_OFFLOAD"),
    ),
    Option(
        "projector-device",
        (_in(MAINLINE, "--mmproj-device -mmdev", 11063, written=False),),
        environment=_split("MTMD_BACKEND_DEVICE"),
    ),
    Option(
        "fused-experts",
        (_in(IK_LLAMA, "-fmoe --fused-moe", 0, FUSED_SINCE - 1, SWITCH),),
        replaced="does by itself",
    ),
    Option("no-fused-experts", (_in(IK_LLAMA, "--no-fused-moe -no-fmoe", FUSED_SINCE, form=SWITCH),)),
    Option("latent-attention", (_in(IK_LLAMA, "--mla-use -mla"),), memory="latent_attention"),
    Option("attention-batch", (_in(IK_LLAMA, "--attention-max-batch -amb"),), memory="attention_batch"),
    Option("fewer-experts", (_in(IK_LLAMA, "--smart-expert-reduction -ser"),)),
    Option(
        "repack-at-start",
        (
            _in(IK_LLAMA, "--run-time-repack -rtr", 0, REPACK_LISTED - 1, SWITCH, unlisted="-rtr"),
            _in(IK_LLAMA, "--run-time-repack -rtr", REPACK_LISTED, form=SWITCH),
        ),
    ),
    Option("grouped-experts", (_in(IK_LLAMA, "--grouped-expert-routing -ger", 3912, form=SWITCH),)),
    Option("hadamard-keys", (_in(IK_LLAMA, "--k-cache-hadamard -khad", 4041, form=SWITCH),)),
    Option("merged-attention", (_in(IK_LLAMA, "--merge-qkv -mqkv", 3940, form=SWITCH),)),
    Option("merged-experts", (_in(IK_LLAMA, "--merge-up-gate-experts -muge", 4109, form=SWITCH),)),
    Option(
        "address",
        (
            _in(MAINLINE, "-H --host"),
            _in(IK_LLAMA, "-H --host"),
            _in(IK_LLAMA, "--Host", 4033, written=False),
        ),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option(
        "worker-port",
        (
            *_both("-p --port"),
            _in(IK_LLAMA, "-P --Port", 4033, written=False),
        ),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option(
        "worker-device",
        (
            _in(MAINLINE, "-d --device"),
            _in(IK_LLAMA, "-d -dev --device", 4033),
        ),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option(
        "processor",
        (_in(IK_LLAMA, "-cpu", 4033, form=SWITCH, means="CPU"),),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option(
        "worker-threads",
        _both("-t --threads"),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option(
        "tensor-cache",
        tuple(spelling._replace(means="on") for spelling in _both("-c --cache", SWITCH)),
        "llama_worker_endpoints",
        optional=True,
        program=WORKER,
    ),
    Option(
        "worker-memory",
        (_in(MAINLINE, "-m --mem", 0, 6789, written=False), _in(IK_LLAMA, "-m --mem", 0, 4032, written=False)),
        "llama_worker_endpoints",
        program=WORKER,
    ),
)

_OPTIONS = {option.name: option for option in TABLE}
_SERVER = {word: option for option in TABLE if option.program == SERVER for word in option.words()}
_ENVIRONMENT = {name: option for option in TABLE for name in option.environment}
TWO_VALUES = {"--lora-scaled", "--control-vector-scaled", "--control-vector-layer-range"}
"""Options of llama-server that take two values in some builds."""
SWITCHES = frozenset(
    _split("""
    --agent --backend-sampling --cache-idle-slots --cache-prompt --check-tensors --cont-batching --cors-credentials
    --embedding --embeddings --escape --ignore-eos --jinja --log-jsonl --log-prefix --log-timestamps --log-verbose
    --lora-init-without-apply --metrics --mmproj-auto --models-autoload --no-agent --no-cache-idle-slots
    --no-cache-prompt --no-cont-batching --no-context-shift --no-cors-credentials --no-escape --no-host --no-jinja --no-log-jsonl
    --no-log-prefix --no-log-timestamps --no-mmproj --no-mmproj-auto --no-models-autoload --no-op-offload
    --no-perf --no-prefill-assistant --no-reasoning-preserve --no-skip-chat-parsing --no-slots --no-spec-draft-backend-sampling
    --no-ui --no-ui-mcp-proxy --no-webui --no-webui-mcp-proxy --offline --op-offload --perf --prefill-assistant --props
    --reasoning-preserve --rerank --reranking --reuse-port --skip-chat-parsing --slots --spec-default --spec-draft-backend-sampling
    --special --spm-infill --ui --ui-mcp-proxy --verbose --webui-mcp-proxy -ag -bs -cb -e -no-ag -nocb
    -sp -v
    """)
)
"""Options of llama-server that are not in the table and take no value in any build that was read."""
LISTS_ALL = {MAINLINE}
"""Forks whose llama-server lists every option that it takes."""


def normalize(word: str) -> str:
    """An argument's option as llama-server reads it: ``_`` in a long one is ``-``."""
    name = word.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def of_name(name: str) -> Option:
    """The option that the table calls so."""
    return _OPTIONS[name]


def of_word(word: str) -> Option | None:
    """The option of llama-server that an argument gives, in whatever build."""
    return _SERVER.get(normalize(word))


def owned(program: str, word: str) -> Option | None:
    """The option that the plan alone gives by this word; None for what the operator gives."""
    matches = (
        option
        for option in TABLE
        if option.program == program
        and option.owned
        and (normalize(word) if program == SERVER else word) in option.words()
    )
    return next(matches, None)


def of_variable(name: str) -> Option | None:
    """The option that a variable of llama-server's environment stands for."""
    return _ENVIRONMENT.get(name)


def stray(arguments: Iterable[str]) -> str | None:
    """The first argument of llama-server that is neither an option nor the value of one, or None: it would not start."""
    for word, *values in pairs(arguments):
        known = _values_after(normalize(word)) if is_option(word) else -1
        if len(values) > known:
            return values[known] if known >= 0 else word
    return None


def is_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def pairs(arguments: Iterable[str]) -> list[list[str]]:
    """Each option of llama-server, and the words after it."""
    found: list[list[str]] = []
    for word in arguments:
        if is_option(word) or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return found


def _values_after(word: str) -> int:
    """How many values may follow an option of llama-server: one where that is not known."""
    option = of_word(word)
    forms = {spelling.form for spelling in option.spellings if word in spelling.words} if option else set()
    if word in SWITCHES or forms == {SWITCH}:
        return 0
    return 2 if word in TWO_VALUES else 1


def meaning(word: str) -> str:
    """The value that a switch of llama-server stands for."""
    option = of_word(word)
    spellings = option.spellings if option else ()
    return next((spelling.means for spelling in spellings if normalize(word) in spelling.words), "")


def forks_of(word: str) -> set[str]:
    """Which of llama.cpp and ik_llama.cpp know an argument's option by this word, in some build."""
    option = of_word(word)
    return {spelling.fork for spelling in (option.spellings if option else ()) if normalize(word) in spelling.words}


def render(name: str, value: str | Iterable[str] | None, build: int, fork: str = MAINLINE) -> list[str]:
    """An option of llama-server in the command line; nothing for None and for a list without entries.

    :raises UnknownOption: this build cannot say this value.
    """
    option = _OPTIONS[name]
    text = value if value is None or isinstance(value, str) else ",".join(value)
    if not text or text in option.silent:
        return []
    spellings = [spelling for spelling in option.spelled(build, fork) if spelling.written]
    for spelling in spellings:
        if spelling.form != SWITCH and (not spelling.values or text in spelling.values):
            return [spelling.words[0], text]
    for spelling in spellings:
        if spelling.means == text:
            return [spelling.words[0]]
    if text in option.implied:
        return []
    raise UnknownOption(f"{name} {text}")


def supported_values(name: str, build: int, fork: str = MAINLINE) -> list[str]:
    """The values that a build can say of an option of llama-server with few values, the usual ones first."""
    option = _OPTIONS[name]
    spellings = [spelling for spelling in option.spelled(build, fork) if spelling.written]
    values = dict.fromkeys(value for one in spellings for value in (one.means, *one.values) if value)
    return [*option.implied[:1], *(value for value in values if value not in option.implied), *option.implied[1:]]


def first_with_value(name: str, value: str, build: int, fork: str = MAINLINE) -> int | None:
    """The first build after this one that can say a value of an option of llama-server; None where none can."""
    spellings = [one for one in _OPTIONS[name].spellings if one.fork == fork and one.written and one.first > build]
    valued = [one for one in spellings if one.form != SWITCH and (not one.values or value in one.values)]
    return min((one.first for one in spellings if one.means == value or one in valued), default=None)


def render_worker(name: str, value: str, flags: Iterable[str]) -> list[str]:
    """An option of rpc-server in the command line; nothing where the program does not have it.

    :param flags: short words that it has, without dashes.
    """
    for spelling in _OPTIONS[name].spellings:
        if spelling.written and spelling.words[0].lstrip("-") in flags:
            return [spelling.words[0]] if spelling.form == SWITCH else [spelling.words[0], value]
    return []


def render_listed(name: str, value: str, listed: Collection[str]) -> list[str]:
    """An option and its value for a program whose help was read; nothing where the help lists no word of the option.

    :param listed: words of the help; where it lists nothing, the first word of the option is taken.
    """
    words = [word for spelling in _OPTIONS[name].spellings for word in spelling.words]
    word = next((word for word in words if word in listed), "" if listed else words[0])
    return [word, value] if word else []


def listed(program: str, build: int, fork: str) -> dict[str, bool]:
    """Words of the table that the help of this build lists, and whether each takes a value."""
    return {
        word: spelling.form != SWITCH
        for option in TABLE
        if option.program == program
        for spelling in option.spelled(build, fork)
        for word in spelling.names()
    }


def _of_two_forms() -> set[str]:
    forms: dict[str, set[bool]] = {}
    for option in TABLE:
        for spelling in option.spellings:
            for word in spelling.words:
                forms.setdefault(word, set()).add(spelling.form == SWITCH)
    return {word for word, kinds in forms.items() if len(kinds) > 1 and word.startswith("--")}


OF_TWO_FORMS = _of_two_forms()
"""Long words that take a value in some builds and none in others."""


def unlisted(word: str, build: int, fork: str) -> bool:
    """Whether llama-server of this build takes a word that its help does not list."""
    option = of_word(word)
    return option is not None and any(word in spelling.unlisted for spelling in option.spelled(build, fork))
