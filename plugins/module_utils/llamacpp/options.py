# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one table of options of llama-server and rpc-server.

The command line, what is refused in further arguments and in the environment, what a fork does not have, and what is
looked for in the programs' help all come from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE

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
    """How an option of one fork is written.

    :param words: the first one is written, the others mean the same.
    :param form: VALUE, LIST or SWITCH.
    :param means: of a switch, the value that it stands for.
    :param written: whether the plan writes it.
    :param unlisted: those of its words that the program takes and does not list in its help.
    :param since: the oldest build that was read and has it, where that is not the oldest of the window.
    """

    fork: str
    words: tuple[str, ...]
    form: str = VALUE
    means: str = ""
    written: bool = True
    unlisted: tuple[str, ...] = ()
    since: int = 0

    def names(self) -> Iterator[str]:
        """Its words as the help of the program lists them."""
        return (word for word in self.words if word not in self.unlisted)


class Option(NamedTuple):
    """An option of one program.

    :param variable: that sets it; None where the plan decides without one.
    :param memory: what it changes: a field of kv_cache.Settings, UNPLANNED, or nothing.
    :param silent: values that are never written.
    :param implied: values for which nothing is written where no spelling can say them.
    :param remedy: what to do instead of giving it, where no variable sets it.
    :param adds: what devices hold with it beside what is planned.
    :param secret: whether its value is a secret, which neither a command line nor a definition may hold.
    :param without: of an option that only tunes, the least that is planned where it may be left out, since llama-server's default fits into the memory then:
        the plan gives conversations half of what is free, llama-server 8192 MiB. None where it would serve something else, or less safely.
    """

    name: str
    spellings: tuple[Spelling, ...]
    variable: str | None = None
    memory: str = ""
    silent: tuple[str, ...] = ()
    implied: tuple[str, ...] = ()
    remedy: str = ""
    program: str = SERVER
    secret: bool = False
    adds: str = ""
    without: int | None = None

    @property
    def owned(self) -> bool:
        """Whether only the plan sets it."""
        return bool(self.variable or self.remedy)

    def spelled(self, fork: str) -> list[Spelling]:
        """Its spellings in this fork."""
        return [spelling for spelling in self.spellings if spelling.fork == fork]

    def has(self, word: str, fork: str) -> bool:
        """Whether this fork knows it by this word."""
        return any(normalize(word) in spelling.words for spelling in self.spelled(fork))

    def words(self) -> set[str]:
        """All its words, of both forks."""
        return {word for spelling in self.spellings for word in spelling.words}

    def instead(self) -> str:
        """What to do instead of giving it."""
        return f"set {self.variable} instead" if self.variable else self.remedy


class UnknownOption(ValueError):
    """A fork has no way to say a value of an option."""


def _in(
    fork: str, words: str, form: str = VALUE, means: str = "", written: bool = True, unlisted: str = ""
) -> Spelling:
    return Spelling(fork, _split(words), form, means, written, _split(unlisted))


def _both(words: str, form: str = VALUE, means: str = "", written: bool = True) -> tuple[Spelling, Spelling]:
    """The same in llama.cpp and ik_llama.cpp."""
    alike = _in(MAINLINE, words, form, means, written)
    return alike, alike._replace(fork=IK_LLAMA)


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


PRESETS = """
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec
--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default
"""
"""Each stands for a model of upstream's and its settings."""

TABLE: tuple[Option, ...] = (
    Option("rpc", _both("--rpc", form=LIST), "llama_worker_endpoints"),
    Option("device", _both("--device -dev", form=LIST), "llama_worker_endpoints"),
    Option("override-tensor", _both("--override-tensor -ot", form=LIST), "llama_server_override_tensor"),
    Option("model", _both("--model -m"), "llama_model_path"),
    Option("model-of-a-server", _both("--model-url -mu", written=False), "llama_model_url"),
    Option(
        "model-of-hugging-face",
        (
            _in(MAINLINE, "--hf-repo -hf -hfr --hf-file -hff", written=False),
            _in(IK_LLAMA, "--hf-repo -hfr --hf-file -hff", written=False),
        ),
        "llama_model_huggingface",
    ),
    Option(
        "model-of-a-registry",
        (_in(MAINLINE, "--docker-repo -dr", written=False), _in(MAINLINE, PRESETS, form=SWITCH, written=False)),
        "llama_model_path",
    ),
    Option("host", _both("--host"), "llama_server_host"),
    Option("port", _both("--port"), "llama_server_port"),
    Option(
        "gpu-layers",
        (
            _in(MAINLINE, "--n-gpu-layers -ngl --gpu-layers"),
            _in(IK_LLAMA, "--n-gpu-layers -ngl --gpu-layers", unlisted="--n-gpu-layers"),
        ),
        "llama_server_gpu_layers",
    ),
    Option("tensor-split", _both("--tensor-split -ts", form=LIST), "llama_server_tensor_split"),
    Option(
        "split-mode",
        _both("--split-mode -sm", written=False),
        remedy="remove it: the plan places whole layers, which is llama-server's default. With tensor over RPC (#26610, b11450) two equal "
        "workers connect to each other at their port + 1000, which the firewall closes, so that loading would hang",
    ),
    Option("context", _both("--ctx-size -c"), "llama_server_context"),
    Option("parallel", _both("--parallel -np"), "llama_server_parallel"),
    Option("cache-type-k", _both("--cache-type-k -ctk"), "llama_server_cache_type_k", silent=("f16",)),
    Option("cache-type-v", _both("--cache-type-v -ctv"), "llama_server_cache_type_v", silent=("f16",)),
    Option(
        "flash-attention",
        (*_both("--flash-attn -fa"), _in(IK_LLAMA, "--no-flash-attn -no-fa", form=SWITCH, means="off")),
        "llama_server_flash_attention",
        implied=("auto", "on", "off"),
    ),
    Option("threads", _both("--threads -t"), "llama_server_threads", without=0),
    Option("prompt-cache", _both("--cache-ram -cram"), "llama_server_prompt_cache_mib", implied=("0",), without=4096),
    Option("sleep", (_in(MAINLINE, "--sleep-idle-seconds"),), "llama_server_idle_seconds"),
    Option(
        "context-checkpoints",
        (_in(MAINLINE, "--ctx-checkpoints -ctxcp --swa-checkpoints"), _in(IK_LLAMA, "--ctx-checkpoints -ctx-ckpt")),
        remedy="remove it: the plan gives as many as the head's memory has room for, and counts them",
        without=32,
    ),
    Option(
        "load-mode",
        (
            _in(MAINLINE, "--load-mode -lm"),
            _in(IK_LLAMA, "--no-mmap", form=SWITCH, means="none"),
            _in(IK_LLAMA, "--mlock", form=SWITCH, means="mmap+mlock"),
        ),
        "llama_server_load_mode",
        implied=("mmap", "auto"),
    ),
    Option("api-key-file", _both("--api-key-file"), "llama_server_api_key_file"),
    Option("api-key", _both("--api-key", written=False), "llama_server_api_key_file", secret=True),
    Option("tls-certificate", _both("--ssl-cert-file"), "llama_server_tls_certificate_file"),
    Option("tls-key", _both("--ssl-key-file"), "llama_server_tls_key_file"),
    Option(
        "token-of-a-registry",
        _both("--hf-token -hft", written=False),
        remedy="remove it: every account of the host could read the token, and "
        "llama-server reads a model that is on the head already",
        secret=True,
    ),
    Option(
        "print-and-end",
        (
            _in(
                MAINLINE,
                "-h --help --usage --version --completion-bash --list-devices --cache-list -cl",
                form=SWITCH,
                written=False,
            ),
            _in(IK_LLAMA, "-h --help --usage --version", form=SWITCH, written=False),
        ),
        remedy="remove it, because llama-server would print something and end",
    ),
    Option(
        "fit",
        (_in(MAINLINE, "--fit -fit"), _in(IK_LLAMA, "--fit", form=SWITCH, written=False)),
        implied=("off",),
        remedy="remove it: it would place the layers again",
        without=0,
    ),
    Option("models-preset", (_in(MAINLINE, "--models-preset"),), "llama_models"),
    Option("models-max", (_in(MAINLINE, "--models-max"),), "llama_models"),
    Option("models-folder", (_in(MAINLINE, "--models-dir", written=False),), "llama_models"),
    Option("prefix", (_in(MAINLINE, "--api-prefix", written=False),), remedy="remove it: /health is asked without it"),
    Option(
        "log-verbosity",
        (_in(MAINLINE, "--log-verbosity -lv --verbosity"), _in(IK_LLAMA, "--verbosity", written=False)),
        implied=("4",),
        remedy="remove it, because verify reads buffer sizes from the log, or use --verbose, which logs everything",
        without=0,
    ),
    Option(
        "repack",
        (
            _in(MAINLINE, "--no-repack -nr", form=SWITCH, means="off"),
            _in(MAINLINE, "--repack", form=SWITCH, means="on", written=False),
        ),
        implied=("off",),
    ),
    Option(
        "log-disable",
        _both("--log-disable", form=SWITCH),
        remedy="remove it, because verify reads buffer sizes from the log",
    ),
    Option("metrics", _both("--metrics", form=SWITCH), without=0),
    Option("override-kv", _both("--override-kv"), memory=UNPLANNED),
    Option("embeddings", _both("--embedding --embeddings", form=SWITCH), memory="every_output"),
    Option(
        "reranking",
        (*_both("--reranking", form=SWITCH), _in(MAINLINE, "--rerank", form=SWITCH)),
        memory="every_output",
    ),
    Option("full-window", (_in(MAINLINE, "--swa-full", form=SWITCH),), memory="full_window"),
    Option(
        "unified",
        (
            _in(MAINLINE, "--kv-unified -kvu", form=SWITCH, means="on"),
            _in(MAINLINE, "--no-kv-unified -no-kvu", form=SWITCH, means="off"),
        ),
        memory="unified",
    ),
    Option("micro-batch", _both("--ubatch-size -ub"), "llama_server_micro_batch", silent=("512",)),
    Option("batch", _both("--batch-size -b"), "llama_server_batch", silent=("2048",)),
    Option(
        "experts-on-the-processor",
        (*_both("--cpu-moe -cmoe", form=SWITCH), *_both("--n-cpu-moe -ncmoe")),
        remedy=r"set llama_server_override_tensor instead, to ['ffn_.*_exps=CPU'] for the experts of all layers, or to ['blk\.[0-9]\.ffn_.*_exps=CPU'] for "
        r"those of the first ten: the plan counts these",
    ),
    Option(
        "feed-forward-on-the-processor",
        (_in(MAINLINE, "--n-cpu-ffn -ncffn"),),
        remedy=r"set llama_server_override_tensor instead, to ['blk\.[0-9]\.ffn_(up|down|gate)\.=CPU'] for those of the first ten layers: "
        r"the plan counts these",
    ),
    Option(
        "kv-offload",
        (
            _in(MAINLINE, "--no-kv-offload -nkvo --kv-offload -kvo", form=SWITCH),
            _in(IK_LLAMA, "--no-kv-offload -nkvo", form=SWITCH),
        ),
        memory=UNPLANNED,
    ),
    Option("slots-with-a-cache-of-their-own", (_in(MAINLINE, "--kv-unified-per-slot"),), memory=UNPLANNED),
    Option(
        "experts-cache",
        (_in(MAINLINE, "--moe-cache-mib", written=False)._replace(since=11549),),
        remedy="remove it: experts that the processor computes would be copied to so much memory of devices, which the plan does not count",
    ),
    Option("lazy-mode", (_in(MAINLINE, "--lazy-mode -lzm"),), memory=UNPLANNED),
    Option("adapter", (*_both("--lora"), *_both("--lora-scaled")), memory=UNPLANNED, adds="adapters"),
    Option(
        "draft",
        (
            _in(MAINLINE, "--model-draft -md --hf-repo-draft -hfd -hfrd --spec-draft-model --spec-draft-hf"),
            _in(IK_LLAMA, "--model-draft -md"),
        ),
        memory=UNPLANNED,
        adds=SPECULATES,
    ),
    Option(
        SPECULATION,
        (_in(MAINLINE, "--spec-type"), _in(IK_LLAMA, "--spec-type", written=False)),
        memory=UNPLANNED,
        adds=SPECULATES,
    ),
    Option(
        "projector",
        (_in(MAINLINE, "--mmproj --mmproj-url -mm -mmu"), _in(IK_LLAMA, "--mmproj --mmproj-url")),
        memory=UNPLANNED,
        adds="the projector",
    ),
    Option("draft-sampling", (_in(MAINLINE, "--spec-draft-sampling")._replace(since=11434),)),
    Option("draft-micro-batch", (_in(MAINLINE, "--spec-draft-n-ubatch")._replace(since=11669),), memory=UNPLANNED),
    Option("draft-device", (*_both("--device-draft -devd"), _in(MAINLINE, "--spec-draft-device", written=False))),
    Option(
        "draft-layers",
        (
            _in(MAINLINE, "--gpu-layers-draft -ngld --n-gpu-layers-draft"),
            _in(MAINLINE, "--spec-draft-ngl", written=False),
            _in(IK_LLAMA, "--gpu-layers-draft -ngld --n-gpu-layers-draft", unlisted="--n-gpu-layers-draft"),
        ),
    ),
    Option(
        "draft-tensors",
        (
            _in(MAINLINE, "--override-tensor-draft -otd --spec-draft-override-tensor", form=LIST),
            _in(MAINLINE, "--cpu-moe-draft -cmoed --spec-draft-cpu-moe", form=SWITCH),
            _in(MAINLINE, "--n-cpu-moe-draft -ncmoed --spec-draft-n-cpu-moe --spec-draft-ncmoe"),
        ),
    ),
    Option(
        "draft-cache-type-k",
        (_in(MAINLINE, "--cache-type-k-draft -ctkd --spec-draft-type-k"), _in(IK_LLAMA, "--cache-type-k-draft -ctkd")),
    ),
    Option(
        "draft-cache-type-v",
        (_in(MAINLINE, "--cache-type-v-draft -ctvd --spec-draft-type-v"), _in(IK_LLAMA, "--cache-type-v-draft -ctvd")),
    ),
    Option(
        "projector-offload",
        (
            *_both("--no-mmproj-offload", form=SWITCH, means="off"),
            _in(MAINLINE, "--mmproj-offload", form=SWITCH, means="on", written=False),
        ),
    ),
    Option("projector-device", (_in(MAINLINE, "--mmproj-device -mmdev", written=False),)),
    Option("latent-attention", (_in(IK_LLAMA, "--mla-use -mla"),), memory="latent_attention"),
    Option("attention-batch", (_in(IK_LLAMA, "--attention-max-batch -amb"),), memory="attention_batch"),
    Option(
        "address",
        (*_both("-H --host"), _in(IK_LLAMA, "--Host", written=False)),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option(
        "worker-port",
        (*_both("-p --port"), _in(IK_LLAMA, "-P --Port", written=False)),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option(
        "worker-device",
        (_in(MAINLINE, "-d --device"), _in(IK_LLAMA, "-d -dev --device")),
        "llama_worker_endpoints",
        program=WORKER,
    ),
    Option(
        "processor",
        (_in(IK_LLAMA, "-cpu", form=SWITCH, means="CPU"),),
        "llama_worker_endpoints",
        implied=("CPU",),
        program=WORKER,
    ),
    Option("worker-threads", _both("-t --threads"), "llama_worker_endpoints", program=WORKER),
    Option("tensor-cache", _both("-c --cache", form=SWITCH, means="on"), "llama_worker_endpoints", program=WORKER),
)

ALIASES = """
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
"""Options of llama.cpp's llama-server (arg.cpp of 0.3.36) with several words that the table does not have. ``--no-x`` is of the option ``--x``."""

_OPTIONS = {option.name: option for option in TABLE}
_ALIASES = {word: group.split()[0] for group in ALIASES.split(",") for word in group.split()}
_SERVER = {word: option for option in TABLE if option.program == SERVER for word in option.words()}
PROJECTOR_DEVICE = "MTMD_BACKEND_DEVICE"
"""Variable of llama-server's environment that says where a projector is."""
_VARIABLE = re.compile(
    rf"{PROJECTOR_DEVICE}|LLAMA_LOG_.*|LLAMA_ARG_(?!(NO_)?(API_PREFIX|CORS_|REUSE_PORT|STATIC_PATH|THREADS_HTTP|TIMEOUT|(WEB)?UI)).*"
)
"""Variables that stand for options, apart from those about clients."""
LISTS_ALL = {MAINLINE}
"""Forks whose llama-server lists every option that it takes, and whether a value follows it."""


def normalize(word: str) -> str:
    """An argument's option as llama-server reads it: ``_`` in a long one is ``-``."""
    name = word.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def of_name(name: str) -> Option:
    """The option that the table calls so."""
    return _OPTIONS[name]


def of_word(word: str) -> Option | None:
    """The option of llama-server that an argument gives, of either fork."""
    return _SERVER.get(normalize(word))


def identity(word: str) -> str:
    """The same for all words of one option of llama.cpp's llama-server, and for those that say its opposite."""
    name, option = normalize(word), of_word(word)
    for spelling in option.spelled(MAINLINE) if option else ():
        if name in spelling.words:
            return option.name if option and spelling.means else spelling.words[0]
    positive = re.sub("^--no-", "--", name)
    return _ALIASES.get(name) or _ALIASES.get(positive, positive)


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


def is_known(word: str) -> bool:
    """Whether a build that was read has an option by this word, as far as that has a place here."""
    return word in _SERVER or word in _ALIASES


def is_variable(name: str) -> bool:
    """Whether a variable of llama-server's environment stands for an option that the plan may count."""
    return bool(_VARIABLE.fullmatch(name))


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


def meaning(word: str) -> str:
    """The value that a switch of llama-server stands for."""
    option = of_word(word)
    spellings = option.spellings if option else ()
    return next((spelling.means for spelling in spellings if normalize(word) in spelling.words), "")


def render(name: str, value: str | Iterable[str] | None, fork: str = MAINLINE) -> list[str]:
    """An option in the command line of its program; nothing for None and for a list without entries.

    :raises UnknownOption: this fork cannot say this value.
    """
    option = _OPTIONS[name]
    text = value if value is None or isinstance(value, str) else ",".join(value)
    if not text or text in option.silent:
        return []
    spellings = [spelling for spelling in option.spelled(fork) if spelling.written]
    for spelling in spellings:
        if spelling.form != SWITCH:
            return [spelling.words[0], text]
    for spelling in spellings:
        if spelling.means == text:
            return [spelling.words[0]]
    if text in option.implied:
        return []
    raise UnknownOption(f"{name} {text}")


def supported_values(name: str, fork: str) -> list[str]:
    """The values that a fork can say of an option of llama-server by switches alone, the usual ones first."""
    option = _OPTIONS[name]
    values = dict.fromkeys(one.means for one in option.spelled(fork) if one.written and one.means)
    return [*option.implied[:1], *(value for value in values if value not in option.implied), *option.implied[1:]]


def render_listed(name: str, value: str, listed: Collection[str]) -> list[str]:
    """An option and its value for a program whose help was read; nothing where the help lists no word of the option.

    :param listed: words of the help; where it lists nothing, the first word of the option is taken.
    """
    words = [word for spelling in _OPTIONS[name].spellings for word in spelling.words]
    word = next((word for word in words if word in listed), "" if listed else words[0])
    return [word, value] if word else []


def words_instead(known: Mapping[str, bool], fork: str) -> dict[str, str]:
    """Word of llama-server that the plan writes and a build of llama.cpp does not list → another word of that option which it lists, or nothing where
    the option only tunes. Options of UNPLANNED have words that mean different things.

    :param known: of capabilities.parse_help.
    """
    instead: dict[str, str] = {}
    for option in TABLE if known and fork in LISTS_ALL else ():
        for spelling in option.spelled(fork):
            word, takes_value = spelling.words[0], spelling.form != SWITCH
            if option.program == SERVER and spelling.written and option.memory != UNPLANNED and word not in known:
                others = [other for other in spelling.words if known.get(other) == takes_value]
                if others or option.without is not None:
                    instead[word] = others[0] if others else ""
    return instead


def may_be_left_out(word: str, values: Sequence[str]) -> bool:
    """Whether llama-server answers the same without an option, and has the memory for its default where these values are planned."""
    option = of_word(word)
    numbers = [int(value) for value in values if value.isdigit()]
    return option is not None and option.without is not None and min(numbers, default=option.without) >= option.without


def listed(program: str, fork: str, build: int) -> dict[str, bool]:
    """Words of the table that the help of this build's program lists, and whether each takes a value."""
    return {
        word: spelling.form != SWITCH
        for option in TABLE
        if option.program == program
        for spelling in option.spelled(fork)
        if spelling.since <= build
        for word in spelling.names()
    }


def unlisted(word: str, fork: str) -> bool:
    """Whether llama-server of this fork takes a word that its help does not list."""
    option = of_word(word)
    return option is not None and any(word in spelling.unlisted for spelling in option.spelled(fork))
