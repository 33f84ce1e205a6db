# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables ``llama_server_…``: what they mean for llama-server's memory, and which of them a release does not accept."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    gguf,
    kv_cache,
    tensor_types,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import NOT_SERVED, ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs.cluster_inputs import MOST_THREADS
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Model,
    ModelRequest,
    Server,
    Worker,
)

KEYS, CERTIFICATE, KEY = "api-keys", "tls-certificate", "tls-key"
CREDENTIALS = {KEYS: "api_key_file", CERTIFICATE: "tls_certificate_file", KEY: "tls_key_file"}
"""Name of a credential → field of Server, and key of the head's plan, with the file on the head."""
LIMITS = {
    "context": (1, (1 << 31) - 1),
    "parallel": (1, 1024),
    "threads": (1, MOST_THREADS),
    "gpu_layers": (0, (1 << 31) - 1),
    "prompt_cache_mib": (0, (1 << 31) - 1),
    "batch": (1, 1 << 20),
    "micro_batch": (1, 1 << 20),
    "idle_seconds": (1, 7 * 86400),
    "start_timeout": (1, 7 * 86400),
    "fallback_after": (1, 7 * 86400),
}
"""Field of Server → its smallest and its largest value."""

WITHOUT_OFFLOAD = ("--no-kv-offload", "-nkvo")


def settings_of(server: Server, summary: ModelSummary, fork: str = MAINLINE) -> kv_cache.CacheSettings:
    given = _memory_arguments(server.extra_args)
    return kv_cache.CacheSettings(
        context=context_of(server, summary),
        parallel=server.parallel,
        type_k=server.cache_type_k,
        type_v=server.cache_type_v,
        flash_attention=server.flash_attention,
        unified="unified" in given and options.meaning(given["unified"][0]) != "off",
        full_window="full_window" in given,
        micro_batch=server.micro_batch or kv_cache.MICRO_BATCH,
        batch=batch_of(server),
        fork=fork,
        latent_attention=_whole_number(given, "latent_attention", 0, "a number"),
        attention_batch=_whole_number(given, "attention_batch", 0, "a number of MiB"),
        offload=not without_kv_offload(server),
        every_output="every_output" in given,
    )


def batch_of(server: Server) -> int:
    """Tokens that llama-server takes at a time: its default, where that is not less than a micro-batch."""
    return server.batch or max(kv_cache.BATCH, server.micro_batch or 0)


def micro_batch_of(server: Server) -> int:
    """Tokens that are computed together."""
    return min(server.micro_batch or kv_cache.MICRO_BATCH, batch_of(server))


def _whole_number(given: Mapping[str, tuple[str, str]], field: str, least: int, what: str) -> int | None:
    """The value of a further argument; None where it is not given."""
    if field not in given:
        return None
    word, number = given[field]
    whole = number_of(number)
    if whole is None or whole < least:
        raise Refusal(f"llama_server_extra_args has {word} {gguf.short(number)}: use {what}, {least} or more")
    return whole


def number_of(text: str) -> int | None:
    """The whole number of a further argument, 0 or more; None of what llama-server would not read as one."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(1 << 31)) else None
    return number if number is None or number < 1 << 31 else None


def _memory_arguments(arguments: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Field of kv_cache.CacheSettings → the further argument that sets it, and the one after it. The last one counts."""
    given = {}
    for word, following in zip(arguments, [*arguments[1:], ""]):
        option = options.by_word(word)
        if option and option.memory:
            given[option.memory] = (word, following)
    return given


def given_option(server: Server, name: str) -> tuple[str, str] | None:
    """The word by which an operator gives an option, and what follows it; None where it is not given. llama-server takes the last one."""
    pairs = [*zip(server.extra_args, [*server.extra_args[1:], ""])]
    return next((pair for pair in reversed(pairs) if options.by_word(pair[0]) == options.by_name(name)), None)


def without_kv_offload(server: Server) -> str:
    """The further argument that keeps the KV cache in the head's memory; empty where nothing does."""
    word, _value = given_option(server, "kv-offload") or ("", "")
    return word if options.normalize(word) in WITHOUT_OFFLOAD else ""


def overrides_of(server: Server, devices: list[str]) -> list[tuple[str, str]]:
    """Expressions for names of tensors and the device of each, from ``llama_server_override_tensor``."""
    overrides = []
    for entry in server.override_tensor:
        pattern, _equals, device = entry.partition("=")
        if not pattern or device not in devices or "," in pattern:
            raise Refusal(
                f"llama_server_override_tensor has {entry!r}: use an expression for tensor names without , and =, then = and one of "
                + ", ".join(devices)
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refusal(
                f"llama_server_override_tensor has {entry!r}, whose expression is not valid: {error}"
            ) from None
        overrides.append((pattern, device))
    return overrides


def _unplanned(server: Server, drafts: bool) -> list[options.Option]:
    """Given options with which devices hold something else than planned.

    :param drafts: whether a draft model is counted: what it is used for changes nothing then.
    """
    given = [
        option
        for word in server.extra_args
        if (option := options.by_word(word)) and option.memory == options.EXTRA_MEMORY
    ]
    return [option for option in given if not (drafts and option.name == options.SPECULATION)]


def as_planned(server: Server, drafts: bool = False) -> bool:
    """Whether no further argument changes what devices hold. ``drafts`` as of ``_unplanned``."""
    return not _unplanned(server, drafts)


def uncounted(server: Server, drafts: bool = False) -> list[str]:
    """What llama-server is told to load beside the model, and the plan does not count. ``drafts`` as of ``_unplanned``."""
    return list(dict.fromkeys(option.adds for option in _unplanned(server, drafts) if option.adds))


def size_of_auxiliary(model: Model, role: str) -> str:
    """An auxiliary model and its size, where that is known."""
    sizes = [file.bytes for file in model.files if file.role == role]
    mib = f" ({sum(size for size in sizes if size) // MIB} MiB)" if all(sizes) else ""
    return f"{model_source.VARIABLES[role]}{mib}"


def check_auxiliary(server: Server, request: ModelRequest) -> None:
    """Refuses options for an auxiliary model that a variable gives already."""
    for source in request.sources():
        option = options.by_name(model_source.AUXILIARY[source.role]) if source.role in model_source.AUXILIARY else None
        words = [word for word in server.extra_args if option and options.by_word(word) == option]
        if words:
            raise Refusal(f"{source.variable} is set, and {words[0]} is given to llama-server too: remove one of them")


def check(name: str, server: Server, declared: Sequence[Worker], release: ReleasePlan) -> None:
    for field, (least, most) in LIMITS.items():
        limit = validation.limit(getattr(server, field), least, most)
        if limit:
            raise Refusal(f"llama_server_{field} is {getattr(server, field)}: {limit}, or leave it out")
    if server.batch and (server.micro_batch or 0) > server.batch:
        raise Refusal(
            f"llama_server_micro_batch is {server.micro_batch}, more than llama_server_batch, which is {server.batch}, so llama-server computes "
            f"{server.batch} tokens together: use {server.batch} or less, or a larger llama_server_batch"
        )
    _check_extra_arguments(server.extra_args, release)
    _check_environment(server.environment)
    _check_files(server)
    for field in ("cache_type_k", "cache_type_v"):
        if getattr(server, field) not in kv_cache.CACHE_TYPES:
            raise Refusal(
                f"llama_server_{field} is {getattr(server, field)!r}: use one of {', '.join(kv_cache.CACHE_TYPES)}"
            )
    _check_flash(server)
    try:
        ipaddress.IPv4Address(server.host)
    except ValueError:
        raise Refusal(f"llama_server_host is {server.host!r}: use the numeric IPv4 address to listen on") from None
    _check_ports(name, server, declared)


def _check_flash(server: Server) -> None:
    """Refuses quantised values without flash attention, of which llama-server and that of ik_llama.cpp make no context."""
    if server.cache_type_v in kv_cache.WHOLE or server.flash_attention != "off":
        return
    raise Refusal(
        f"llama_server_cache_type_v is {server.cache_type_v}, which needs flash attention, and llama_server_flash_attention is 'off': set it to 'on', or "
        "llama_server_cache_type_v to f16"
    )


def _check_files(server: Server) -> None:
    for field in CREDENTIALS.values():
        if getattr(server, field):
            _check_whole(f"llama_server_{field}", getattr(server, field))
    given = [name for name in ("certificate", "key") if getattr(server, f"tls_{name}_file")]
    if len(given) == 1:
        other = "key" if given == ["certificate"] else "certificate"
        raise Refusal(
            f"llama_server_tls_{given[0]}_file is set and llama_server_tls_{other}_file is not: TLS needs both, so set or remove both"
        )


def _check_ports(name: str, server: Server, declared: Sequence[Worker]) -> None:
    taken = {names.port_of(worker.listens) for worker in declared}
    own = {"llama_server_port": server.port}
    own.update({names.PAGE_PORT: server.page_port} if server.page_port is not None else {})
    for variable, number in own.items():
        if not 0 < number < 65536:
            raise Refusal(f"{variable} is {number}: use 1 to 65535")
        if number in taken:
            raise Refusal(f"{variable} is {number}, which a worker of {name} uses too: give one of them another port")
        same = next(other for other in own if own[other] == number)
        if same != variable:
            raise Refusal(f"{variable} is {number}, which is {same} too: give one of them another port")


def _check_extra_arguments(arguments: Sequence[str], release: ReleasePlan) -> None:
    """Refuses what the plan decides, and options that llama-server of this release does not have: it would not start."""
    for word in arguments:
        name = re.split(r"[\s=]", word, maxsplit=1)[0]
        option = options.by_word(name)
        if option and option.secret:
            raise Refusal(f"llama_server_extra_args has {name}, which the plan decides: {option.instead()}")
        if re.match(r"--?\w[\w-]*\s", word):
            raise Refusal(
                f"llama_server_extra_args has {word!r} as one argument: use a list, with option and value as separate entries"
            )
    given = {word: option for word in arguments if (option := options.by_word(word))}
    for word, option in given.items():
        if option.owned:
            raise Refusal(
                f"llama_server_extra_args has {word.split('=', 1)[0]}, which the plan decides: {option.instead()}"
            )
    strange = [word for word, option in given.items() if not option.has(word, release.fork)]
    if strange:
        owner = IK_LLAMA if release.mainline else MAINLINE
        remedy = f"remove it, or set llama_release to a release of {owner}" if release.mainline else "remove it"
        raise Refusal(
            f"llama_server_extra_args has {', '.join(strange)}, which only {owner} knows, but {release.ref} is a release of {release.fork}: {remedy}"
        )


def _check_environment(environment: Mapping[str, str]) -> None:
    """Refuses what stands for an option: the plan counts options as variables and as further arguments."""
    for name in filter(options.is_variable, environment):
        raise Refusal(
            f"llama_server_environment has {name}, which stands for an option: set the variable of that option, or put the option into "
            "llama_server_extra_args"
        )


def backend_of(server: Server, head: Sequence[str], known: Collection[str]) -> str:
    """The backend whose build of llama-server the head runs, and whose workers it uses where a host has several.

    :param known: those of all hosts.
    """
    wanted = server.backend
    if wanted and wanted not in known:
        raise Refusal(
            f"llama_server_backend is {wanted!r}, which no host of this cluster has: use one of {', '.join(sorted(known))}, or add it to llama_backend"
        )
    return wanted if wanted and wanted in head else head[0]


def context_of(server: Server, summary: ModelSummary) -> int:
    """Tokens of context for all requests at the same time, no more than they can use."""
    return min(server.context, server.parallel * trained_context(server, summary))


def trained_context(server: Server, summary: ModelSummary) -> int:
    """The most tokens that a request can use: what the model's file says, or ``--override-kv`` in place of that."""
    key = re.escape(context_key(summary))
    given = re.findall(rf"(?<![\w.-]){key}=int:(\d{{1,18}})(?![^,\s])", " ".join(server.extra_args))
    return int(given[-1]) if given else summary.context


def context_key(summary: ModelSummary) -> str:
    """What a model's file calls the context for which it was trained."""
    return f"{summary.architecture}.context_length"


def check_kind(request: ModelRequest, summary: ModelSummary) -> None:
    """Refuses a model of which llama-server makes nothing."""
    if summary.architecture in NOT_SERVED and request.source:
        raise Refusal(f"{request.source.variable} is {summary.name}, {NOT_SERVED[summary.architecture]}")


def serving_as(server: Server, summary: ModelSummary) -> Server:
    """The server with the option for what the model does. Embeddings need micro-batches as long as an input, which is computed at once."""
    if summary.switch and generates(server, summary):
        server = server._replace(extra_args=(*server.extra_args, summary.switch))
    if server.micro_batch or server.parallel < 1 or generates(server, summary):
        return server
    return server._replace(micro_batch=min(batch_of(server), context_per_request(server, summary)))


def generates(server: Server, summary: ModelSummary) -> bool:
    """Whether the server makes text, and no embeddings."""
    return not settings_of(server, summary).every_output


def check_types(request: ModelRequest, summary: ModelSummary, release: ReleasePlan, variable: str) -> None:
    """Refuses a model with types of tensors that llama-server of this release does not have: it would not load it."""
    subject = request.source.variable if request.source else "the model"
    kinds = {row.type for row in summary.named_tensors}
    strange = tensor_types.types_of_other_forks(kinds, release.fork)
    if strange:
        other = IK_LLAMA if release.mainline else MAINLINE
        remedy = f"set {variable} to a release of {other}, or " if release.mainline else ""
        raise Refusal(
            f"{subject} is {summary.name}, whose tensors have types that only {other} has ({', '.join(strange)}), but {release.ref} is a "
            f"release of {release.fork}: {remedy}use a file of the model without these types"
        )
    unread = dict.fromkeys(tensor_types.unknown_types(kinds), capabilities.NEWEST[release.fork] + 1)
    newer = {
        kind: build
        for kind, build in {**tensor_types.SINCE, **unread}.items()
        if kind in kinds and release.build < build
    }
    if newer:
        raise Refusal(
            f"{subject} is {summary.name}, whose tensors have types that {release.ref} is not known to have ({', '.join(newer)}): set {variable} to build "
            f"{max(newer.values())} or a newer one, or use a file of the model without these types"
        )


def context_per_request(server: Server, summary: ModelSummary) -> int:
    """Tokens that each of the requests at the same time may have: they divide the context, unless they share one cache."""
    settings = settings_of(server, summary)
    most = trained_context(server, summary)
    if settings.unified:
        return min(settings.context, most)
    if settings.context < settings.parallel:
        raise Refusal(
            f"llama_server_parallel is {settings.parallel}, more than the {settings.context} tokens of context that requests divide: use a longer "
            "llama_server_context, or fewer requests"
        )
    return min(settings.context // settings.parallel, most)


def _check_whole(variable: str, path: str) -> None:
    """``~`` and relative paths mean other places on the controller, to Ansible's account on the head, and to the service's."""
    if not path.startswith("/"):
        raise Refusal(f"{variable} is {path!r}: use the absolute path on the head")
