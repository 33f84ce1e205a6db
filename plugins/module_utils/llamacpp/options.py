# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Table of options of llama-server and rpc-server.

It determines spellings on the command line, refused extra args and environment variables, a fork's missing options, and what a program's help must list.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE

SERVER, WORKER = "llama-server", "rpc-server"
"""Programs. The worker's program is named as in old releases."""

VALUE, LIST, SWITCH = "value", "list", "switch"
"""Forms: an option with a value, with comma-separated values, or without a value."""

EXTRA_MEMORY = "unplanned"
"""Marker of options that put unplanned data into the memory of devices."""
SPECULATION = "speculation"
"""Name of the option that selects the method of speculation."""
DRAFT_TEXT = "speculation (a draft model, or layers for multi-token prediction)"

BENCH = "llama-bench"


class Spelling(NamedTuple):
    """Spelling of an option in one fork.

    :param words: synonyms; the plan writes the first.
    :param form: VALUE, LIST or SWITCH.
    :param value: value that a switch stands for.
    :param is_written: whether the plan writes it.
    :param unlisted_words: words that the program accepts but does not list in its help.
    :param first_build: oldest reviewed build that has it, unless that is the oldest supported build.
    """

    fork: str
    words: tuple[str, ...]
    form: str = VALUE
    value: str = ""
    is_written: bool = True
    unlisted_words: tuple[str, ...] = ()
    first_build: int = 0

    def listed_words(self) -> Iterator[str]:
        """Yield the words that the help of the program lists."""
        return (word for word in self.words if word not in self.unlisted_words)


class Option(NamedTuple):
    """An option of one program.

    :param variable: variable that sets it; None if the plan decides.
    :param effect: field of kv_cache.CacheSettings that it changes, EXTRA_MEMORY, or empty.
    :param omitted_values: values that are never written.
    :param implied_values: values that are left out if no spelling can express them.
    :param remedy: alternative to the option, if no variable sets it.
    :param adds: unplanned data that it adds to devices.
    :param is_secret: whether its value is a secret, which neither a command line nor a definition may contain.
    :param optional_min: minimum planned value at which this tuning option may be omitted, because llama-server's default then fits into memory: the
        plan reserves half of the free memory for conversations, llama-server 8192 MiB. None if omitting it would change answers or safety.
    """

    name: str
    spellings: tuple[Spelling, ...]
    variable: str | None = None
    effect: str = ""
    omitted_values: tuple[str, ...] = ()
    implied_values: tuple[str, ...] = ()
    remedy: str = ""
    program: str = SERVER
    is_secret: bool = False
    adds: str = ""
    optional_min: int | None = None

    @property
    def is_exclusive(self) -> bool:
        """Return whether only the plan may set this option."""
        return bool(self.variable or self.remedy)

    def spellings_of(self, fork: str) -> list[Spelling]:
        return [spelling for spelling in self.spellings if spelling.fork == fork]

    def has_word(self, word: str, fork: str) -> bool:
        return any(normalize(word) in spelling.words for spelling in self.spellings_of(fork))

    def words(self) -> set[str]:
        """Return its words in both forks."""
        return {word for spelling in self.spellings for word in spelling.words}

    def alternative(self) -> str:
        """Return the alternative to setting this option."""
        return f"set {self.variable} instead" if self.variable else self.remedy


class UnsupportedValue(ValueError):
    """Error for a value of an option that a fork cannot express."""


def _spell(
    fork: str, words: str, form: str = VALUE, value: str = "", is_written: bool = True, unlisted_words: str = ""
) -> Spelling:
    return Spelling(fork, _split(words), form, value, is_written, _split(unlisted_words))


def _shared(words: str, form: str = VALUE, value: str = "", is_written: bool = True) -> tuple[Spelling, Spelling]:
    """Return the same spelling for llama.cpp and ik_llama.cpp."""
    llama_spelling = _llama(words, form, value, is_written)
    return llama_spelling, llama_spelling._replace(fork=IK_LLAMA)


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_llama, _ik = functools.partial(_spell, MAINLINE), functools.partial(_spell, IK_LLAMA)
PRESET_WORDS = """
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec
--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default
"""
"""Options that select an upstream model and its settings."""

TABLE: tuple[Option, ...] = (
    Option("rpc", _shared("--rpc", form=LIST), "llama_worker_endpoints"),
    Option("device", _shared("--device -dev", form=LIST), "llama_worker_endpoints"),
    Option("override-tensor", _shared("--override-tensor -ot", form=LIST), "llama_server_override_tensor"),
    Option("model", _shared("--model -m"), "llama_model_path"),
    Option("alias", _shared("--alias -a"), "llama_model_alias"),
    Option("model-url", _shared("--model-url -mu", is_written=False), "llama_model_url"),
    Option(
        "model-huggingface",
        (
            _llama("--hf-repo -hf -hfr --hf-file -hff", is_written=False),
            _ik("--hf-repo -hfr --hf-file -hff", is_written=False),
        ),
        "llama_model_huggingface",
    ),
    Option(
        "model-registry",
        (_llama("--docker-repo -dr", is_written=False), _llama(PRESET_WORDS, form=SWITCH, is_written=False)),
        "llama_model_path",
    ),
    Option("host", _shared("--host"), "llama_server_host"),
    Option("port", _shared("--port"), "llama_server_port"),
    Option(
        "gpu-layers",
        (
            _llama("--n-gpu-layers -ngl --gpu-layers"),
            _ik("--n-gpu-layers -ngl --gpu-layers", unlisted_words="--n-gpu-layers"),
        ),
        "llama_server_gpu_layers",
    ),
    Option("tensor-split", _shared("--tensor-split -ts", form=LIST), "llama_server_tensor_split"),
    Option(
        "split-mode",
        _shared("--split-mode -sm", is_written=False),
        remedy="remove it, because the plan places whole layers (--split-mode layer). With --split-mode tensor over RPC (#26610, b11450), two workers of "
        "the same kind connect to each other at the other worker's port + 1000. The firewall blocks these ports, so loading would hang",
    ),
    Option("context", _shared("--ctx-size -c"), "llama_server_context"),
    Option("parallel", _shared("--parallel -np"), "llama_server_parallel"),
    Option("cache-type-k", _shared("--cache-type-k -ctk"), "llama_server_cache_type_k", omitted_values=("f16",)),
    Option("cache-type-v", _shared("--cache-type-v -ctv"), "llama_server_cache_type_v", omitted_values=("f16",)),
    Option(
        "flash-attention",
        (*_shared("--flash-attn -fa"), _ik("--no-flash-attn -no-fa", form=SWITCH, value="off")),
        "llama_server_flash_attention",
        implied_values=("auto", "on", "off"),
    ),
    Option("threads", _shared("--threads -t"), "llama_server_threads", optional_min=0),
    Option(
        "prompt-cache",
        _shared("--cache-ram -cram"),
        "llama_server_prompt_cache_mib",
        implied_values=("0",),
        optional_min=4096,
    ),
    Option("conversations", _shared("--slot-save-path"), "llama_server_keep_conversations"),
    Option("sleep", (_llama("--sleep-idle-seconds"),), "llama_server_idle_seconds"),
    Option(
        "context-checkpoints",
        (_llama("--ctx-checkpoints -ctxcp --swa-checkpoints"), _ik("--ctx-checkpoints -ctx-ckpt")),
        remedy="remove it, because the plan sets the largest number of checkpoints that fits into the head's memory",
        optional_min=32,
    ),
    Option(
        "load-mode",
        (
            _llama("--load-mode -lm"),
            _ik("--no-mmap", form=SWITCH, value="none"),
            _ik("--mlock", form=SWITCH, value="mmap+mlock"),
        ),
        "llama_server_load_mode",
        implied_values=("mmap", "auto"),
    ),
    Option("api-key-file", _shared("--api-key-file"), "llama_server_api_key_file"),
    Option("api-key", _shared("--api-key", is_written=False), "llama_server_api_key_file", is_secret=True),
    Option("tls-certificate", _shared("--ssl-cert-file"), "llama_server_tls_certificate_file"),
    Option("tls-key", _shared("--ssl-key-file"), "llama_server_tls_key_file"),
    Option(
        "registry-token",
        _shared("--hf-token -hft", is_written=False),
        remedy="remove it, because every account on the host could read the token, and llama-server does not need it",
        is_secret=True,
    ),
    Option(
        "print-and-exit",
        (
            _llama(
                "-h --help --usage --version --completion-bash --list-devices --cache-list -cl",
                form=SWITCH,
                is_written=False,
            ),
            _ik("-h --help --usage --version", form=SWITCH, is_written=False),
        ),
        remedy="remove it, because llama-server would print and exit",
    ),
    Option(
        "fit",
        (_llama("--fit -fit"), _ik("--fit", form=SWITCH, is_written=False)),
        implied_values=("off",),
        remedy="remove it, because llama-server would move layers that the plan has placed",
        optional_min=0,
    ),
    Option(
        "ui",
        (
            _llama("--no-ui --no-webui", form=SWITCH, value="none"),
            _llama("--ui --webui", form=SWITCH, value="auto", is_written=False),
            _ik("--webui"),
        ),
        "llama_server_ui",
        optional_min=0,
    ),
    Option("models-preset", (_llama("--models-preset"),), "llama_models"),
    Option("models-max", (_llama("--models-max"),), "llama_models"),
    Option("models-folder", (_llama("--models-dir", is_written=False),), "llama_models"),
    Option(
        "prefix",
        (_llama("--api-prefix", is_written=False),),
        remedy="remove it, because the collection queries /health without a prefix",
    ),
    Option(
        "log-verbosity",
        (_llama("--log-verbosity -lv --verbosity"), _ik("--verbosity", is_written=False)),
        implied_values=("4",),
        remedy="remove it, or use --verbose instead, because verify reads buffer sizes from the log",
        optional_min=0,
    ),
    Option(
        "repack",
        (
            _llama("--no-repack -nr", form=SWITCH, value="off"),
            _llama("--repack", form=SWITCH, value="on", is_written=False),
        ),
        implied_values=("off",),
    ),
    Option(
        "log-disable",
        _shared("--log-disable", form=SWITCH),
        remedy="remove it, because verify reads buffer sizes from the log",
    ),
    Option("metrics", _shared("--metrics", form=SWITCH), optional_min=0),
    Option("override-kv", _shared("--override-kv"), effect=EXTRA_MEMORY),
    Option("embeddings", _shared("--embedding --embeddings", form=SWITCH), effect="every_output"),
    Option("reranking", (*_shared("--reranking", form=SWITCH), _llama("--rerank", form=SWITCH)), effect="every_output"),
    Option("full-window", (_llama("--swa-full", form=SWITCH),), effect="full_window"),
    Option(
        "unified",
        (
            _llama("--kv-unified -kvu", form=SWITCH, value="on"),
            _llama("--no-kv-unified -no-kvu", form=SWITCH, value="off"),
        ),
        effect="unified",
    ),
    Option("micro-batch", _shared("--ubatch-size -ub"), "llama_server_micro_batch", omitted_values=("512",)),
    Option("batch", _shared("--batch-size -b"), "llama_server_batch", omitted_values=("2048",)),
    Option(
        "cpu-experts",
        (*_shared("--cpu-moe -cmoe", form=SWITCH), *_shared("--n-cpu-moe -ncmoe")),
        remedy=r"set llama_server_override_tensor instead, which the plan takes into account: ['ffn_.*_exps=CPU'] keeps the experts of all layers on the CPU, "
        r"['blk\.[0-9]\.ffn_.*_exps=CPU'] those of the first ten",
    ),
    Option(
        "cpu-feed-forward",
        (_llama("--n-cpu-ffn -ncffn"),),
        remedy=r"set llama_server_override_tensor instead, which the plan takes into account: ['blk\.[0-9]\.ffn_(up|down|gate)\.=CPU'] keeps the "
        r"feed-forward tensors of the first ten layers on the CPU",
    ),
    Option(
        "kv-offload",
        (_llama("--no-kv-offload -nkvo --kv-offload -kvo", form=SWITCH), _ik("--no-kv-offload -nkvo", form=SWITCH)),
        effect=EXTRA_MEMORY,
    ),
    Option("cache-per-slot", (_llama("--kv-unified-per-slot"),), effect=EXTRA_MEMORY),
    Option(
        "experts-cache",
        (_llama("--moe-cache-mib", is_written=False)._replace(first_build=11549),),
        remedy="remove it, because llama-server would copy experts from the head's memory to device memory that the plan does not reserve",
    ),
    Option("lazy-mode", (_llama("--lazy-mode -lzm"),), effect=EXTRA_MEMORY),
    Option("adapter", (*_shared("--lora"), *_shared("--lora-scaled")), effect=EXTRA_MEMORY, adds="adapters"),
    Option(
        "draft",
        (
            _llama("--model-draft -md --hf-repo-draft -hfd -hfrd --spec-draft-model --spec-draft-hf"),
            _ik("--model-draft -md"),
        ),
        effect=EXTRA_MEMORY,
        adds=DRAFT_TEXT,
    ),
    Option(
        SPECULATION, (_llama("--spec-type"), _ik("--spec-type", is_written=False)), effect=EXTRA_MEMORY, adds=DRAFT_TEXT
    ),
    Option(
        "projector",
        (_llama("--mmproj --mmproj-url -mm -mmu"), _ik("--mmproj --mmproj-url")),
        effect=EXTRA_MEMORY,
        adds="the projector",
    ),
    Option("draft-sampling", (_llama("--spec-draft-sampling")._replace(first_build=11434),)),
    Option("draft-micro-batch", (_llama("--spec-draft-n-ubatch")._replace(first_build=11669),), effect=EXTRA_MEMORY),
    Option("draft-device", (*_shared("--device-draft -devd"), _llama("--spec-draft-device", is_written=False))),
    Option(
        "draft-layers",
        (
            _llama("--gpu-layers-draft -ngld --n-gpu-layers-draft"),
            _llama("--spec-draft-ngl", is_written=False),
            _ik("--gpu-layers-draft -ngld --n-gpu-layers-draft", unlisted_words="--n-gpu-layers-draft"),
        ),
    ),
    Option(
        "draft-tensors",
        (
            _llama("--override-tensor-draft -otd --spec-draft-override-tensor", form=LIST),
            _llama("--cpu-moe-draft -cmoed --spec-draft-cpu-moe", form=SWITCH),
            _llama("--n-cpu-moe-draft -ncmoed --spec-draft-n-cpu-moe --spec-draft-ncmoe"),
        ),
    ),
    Option(
        "draft-cache-type-k",
        (_llama("--cache-type-k-draft -ctkd --spec-draft-type-k"), _ik("--cache-type-k-draft -ctkd")),
    ),
    Option(
        "draft-cache-type-v",
        (_llama("--cache-type-v-draft -ctvd --spec-draft-type-v"), _ik("--cache-type-v-draft -ctvd")),
    ),
    Option(
        "projector-offload",
        (
            *_shared("--no-mmproj-offload", form=SWITCH, value="off"),
            _llama("--mmproj-offload", form=SWITCH, value="on", is_written=False),
        ),
    ),
    Option("projector-device", (_llama("--mmproj-device -mmdev", is_written=False),)),
    Option("latent-attention", (_ik("--mla-use -mla"),), effect="latent_attention"),
    Option("attention-batch", (_ik("--attention-max-batch -amb"),), effect="attention_batch"),
    Option(
        "address", (*_shared("-H --host"), _ik("--Host", is_written=False)), "llama_worker_endpoints", program=WORKER
    ),
    Option(
        "worker-port",
        (*_shared("-p --port"), _ik("-P --Port", is_written=False)),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option("worker-device", (_llama("-d --device"), _ik("-d -dev --device")), "llama_worker_endpoints", program=WORKER),
    Option(
        "processor",
        (_ik("-cpu", form=SWITCH, value="CPU"),),
        "llama_worker_endpoints",
        implied_values=("CPU",),
        program=WORKER,
    ),
    Option("worker-threads", _shared("-t --threads"), "llama_worker_endpoints", program=WORKER),
    Option("tensor-cache", _shared("-c --cache", form=SWITCH, value="on"), "llama_worker_endpoints", program=WORKER),
)

SYNONYM_GROUPS = """
-tb --threads-batch, -C --cpu-mask, -Cr --cpu-range, -Cb --cpu-mask-batch, -Crb --cpu-range-batch, -lcs --lookup-cache-static,
-lcd --lookup-cache-dynamic, -n --predict --n-predict, -cms --checkpoint-min-step, -e --escape, -r --reverse-prompt, -sp --special, -s --seed,
--sampler-seq --sampling-seq, --temp --temperature, --top-nsigma --top-n-sigma, --typical --typical-p, -l --logit-bias, -j --json-schema,
-jf --json-schema-file, -bs --backend-sampling, -dt --defrag-thold, -cb --cont-batching -nocb, --mmproj-auto --no-mmproj, -mg --main-gpu,
-fitt --fit-target, -fitc --fit-ctx, -ag --agent -no-ag, -rea --reasoning,
-sps --slot-prompt-similarity, -v --verbose --log-verbose, --spec-draft-threads -td --threads-draft, --spec-draft-threads-batch -tbd --threads-batch-draft,
--spec-draft-cpu-mask -Cd --cpu-mask-draft, --spec-draft-cpu-range -Crd --cpu-range-draft, --spec-draft-cpu-strict --cpu-strict-draft,
--spec-draft-prio --prio-draft, --spec-draft-poll --poll-draft, --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft,
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft, --spec-draft-prio-batch --prio-batch-draft, --spec-draft-poll-batch --poll-batch-draft,
--spec-draft-p-split --draft-p-split, --spec-draft-p-min --draft-p-min, --draft --draft-n --draft-max, --draft-min --draft-n-min
"""
"""Groups of synonyms of llama.cpp's llama-server (arg.cpp of 0.3.36) that the table lacks. ``--no-x`` belongs to ``--x``."""

_OPTIONS_BY_NAME = {option.name: option for option in TABLE}
_FIRST_SYNONYMS = {word: group.split()[0] for group in SYNONYM_GROUPS.split(",") for word in group.split()}
_OPTIONS_BY_WORD = {word: option for option in TABLE if option.program == SERVER for word in option.words()}
PROJECTOR_DEVICE_VARIABLE = "MTMD_BACKEND_DEVICE"
"""Environment variable of llama-server for the device of a projector."""
_OPTION_VARIABLE_PATTERN = re.compile(
    rf"{PROJECTOR_DEVICE_VARIABLE}|LLAMA_LOG_.*|LLAMA_ARG_(?!(NO_)?(API_PREFIX|CORS_|REUSE_PORT|STATIC_PATH|THREADS_HTTP|TIMEOUT|(WEB)?UI_)).*"
)
"""Pattern for variables that set options, except for client settings."""
COMPLETE_HELP_FORKS = {MAINLINE}
"""Forks whose llama-server lists in its help all options and whether they take a value."""


def normalize(word: str) -> str:
    """Return the option in an argument as llama-server reads it: ``_`` in a long option is ``-``."""
    name = word.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def by_name(name: str) -> Option:
    return _OPTIONS_BY_NAME[name]


def by_word(word: str) -> Option | None:
    """Return the option of llama-server in an argument, for either fork."""
    return _OPTIONS_BY_WORD.get(normalize(word))


def name_of(word: str) -> str:
    """Return the name of the option of llama-server in an argument; the word itself if the table lacks it."""
    option = by_word(word)
    return option.name if option else normalize(word)


def identifier_of(word: str) -> str:
    """Return an identifier that all words of an option of llama.cpp's llama-server share, including its negations."""
    name, option = normalize(word), by_word(word)
    for spelling in option.spellings_of(MAINLINE) if option else ():
        if name in spelling.words:
            return option.name if option and spelling.value else spelling.words[0]
    positive_name = re.sub("^--no-", "--", name)
    return _FIRST_SYNONYMS.get(name) or _FIRST_SYNONYMS.get(positive_name, positive_name)


def exclusive_option(program: str, word: str) -> Option | None:
    """Return the option with this word if only the plan may set it; None if the operator may."""
    matches = (
        option
        for option in TABLE
        if option.program == program
        and option.is_exclusive
        and (normalize(word) if program == SERVER else word) in option.words()
    )
    return next(matches, None)


def is_known(word: str) -> bool:
    """Return whether the table or the synonyms have this word."""
    return word in _OPTIONS_BY_WORD or word in _FIRST_SYNONYMS


def is_option_variable(name: str) -> bool:
    """Return whether an environment variable of llama-server sets an option that matters to the plan."""
    return bool(_OPTION_VARIABLE_PATTERN.fullmatch(name))


def group_words(arguments: Iterable[str]) -> list[list[str]]:
    """Return each option of llama-server with the words that follow it."""
    result: list[list[str]] = []
    for word in arguments:
        if re.match("--?[A-Za-z]", word) or not result:
            result.append([word])
        else:
            result[-1].append(word)
    return result


def switch_value(word: str) -> str:
    """Return the value that a switch of llama-server stands for."""
    option = by_word(word)
    spellings = option.spellings if option else ()
    return next((spelling.value for spelling in spellings if normalize(word) in spelling.words), "")


def render_option(name: str, value: str | Iterable[str] | None, fork: str = MAINLINE) -> list[str]:
    """Return the words of an option for a command line; empty for None and for an empty list.

    :raises UnsupportedValue: this fork cannot express this value.
    """
    option = _OPTIONS_BY_NAME[name]
    text = value if value is None or isinstance(value, str) else ",".join(value)
    if not text or text in option.omitted_values:
        return []
    spellings = [spelling for spelling in option.spellings_of(fork) if spelling.is_written]
    for spelling in spellings:
        if spelling.form != SWITCH:
            return [spelling.words[0], text]
    for spelling in spellings:
        if spelling.value == text:
            return [spelling.words[0]]
    if text in option.implied_values:
        return []
    raise UnsupportedValue(f"{name} {text}")


def supported_values(name: str, fork: str) -> list[str]:
    """Return the values of an option that a fork can express with switches, the usual ones first."""
    option = _OPTIONS_BY_NAME[name]
    values = dict.fromkeys(
        spelling.value for spelling in option.spellings_of(fork) if spelling.is_written and spelling.value
    )
    implied_values = option.implied_values
    return [*implied_values[:1], *(value for value in values if value not in implied_values), *implied_values[1:]]


def render_listed_option(name: str, value: str, listed_words: Collection[str]) -> list[str]:
    """Return an option and its value for a program whose help is known; empty if the help lacks the option.

    :param listed_words: words in the help; if empty, the first word of the option is used.
    """
    words = [word for spelling in _OPTIONS_BY_NAME[name].spellings for word in spelling.words]
    word = next((word for word in words if word in listed_words), "" if listed_words else words[0])
    return [word, value] if word else []


def replacement_words(help_options: Mapping[str, bool], fork: str) -> dict[str, str]:
    """Return planned word that a build's llama-server lacks → a synonym that it has, or an empty string if the option may be omitted. Options with
    EXTRA_MEMORY are excluded.

    :param help_options: result of capabilities.parse_help.
    """
    replacements: dict[str, str] = {}
    for option in TABLE if help_options and fork in COMPLETE_HELP_FORKS else ():
        for spelling in option.spellings_of(fork):
            word, takes_value = spelling.words[0], spelling.form != SWITCH
            if (
                option.program == SERVER
                and spelling.is_written
                and option.effect != EXTRA_MEMORY
                and word not in help_options
            ):
                synonyms = [synonym for synonym in spelling.words if help_options.get(synonym) == takes_value]
                if synonyms or option.optional_min is not None:
                    replacements[word] = synonyms[0] if synonyms else ""
    return replacements


def may_be_omitted(word: str, values: Sequence[str]) -> bool:
    """Return whether an option with these planned values can be omitted: answers stay the same, and its default fits into memory."""
    option = by_word(word)
    minimum = option.optional_min if option else None
    numbers = [int(value) for value in values if re.fullmatch("[0-9]{1,18}", value)]
    return minimum is not None and min(numbers, default=minimum) >= minimum


def listed_options(program: str, fork: str, build: int) -> dict[str, bool]:
    """Return the words of the table that the help of this build's program lists, and whether each takes a value."""
    return {
        word: spelling.form != SWITCH
        for option in TABLE
        if option.program == program
        for spelling in option.spellings_of(fork)
        if spelling.first_build <= build
        for word in spelling.listed_words()
    }


def is_unlisted(word: str, fork: str) -> bool:
    """Return whether this fork's llama-server accepts a word that its help does not list."""
    option = by_word(word)
    return option is not None and any(word in spelling.unlisted_words for spelling in option.spellings_of(fork))
