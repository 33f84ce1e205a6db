# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Refusals of settings and models that a release's llama-server does not accept, before layers are placed."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache, tensor_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import REFUSALS, ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs.cluster_inputs import MAX_THREADS
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import EquippedHost, ModelRequest, Server

FIELD_LIMITS = {
    "context": (1, (1 << 31) - 1),
    "parallel": (1, 1024),
    "threads": (1, MAX_THREADS),
    "gpu_layers": (0, (1 << 31) - 1),
    "prompt_cache_mib": (0, (1 << 31) - 1),
    "conversations_mib": (1, (1 << 31) - 1),
    "batch": (1, 1 << 20),
    "micro_batch": (1, 1 << 20),
    "idle_seconds": (1, 7 * 86400),
    "start_timeout": (1, 7 * 86400),
    "fallback_after": (1, 7 * 86400),
}
"""Field of Server → its smallest and largest value."""


def _check_auxiliary_options(server: Server, request: ModelRequest) -> None:
    """Refuse options that name an auxiliary model if a variable sets it, too."""
    for source in filter(None, (request.mmproj, request.draft)):
        argument = server.argument(model_source.AUXILIARY_OPTIONS[source.role])
        if argument:
            raise Refusal(
                f"{source.variable} is set, but llama_server_extra_args also has {argument[0]}: remove {argument[0]} or {source.variable}"
            )


def check_server(head: EquippedHost, server: Server, request: ModelRequest, release: ReleasePlan) -> None:
    """Refuse settings that llama-server of this release does not accept on this head."""
    _check_auxiliary_options(server, request)
    _check_extra_arguments(server.extra_args, release)
    for field, (minimum, maximum) in FIELD_LIMITS.items():
        remedy = validation.range_remedy(getattr(server, field), minimum, maximum)
        if remedy:
            raise Refusal(f"llama_server_{field} is {getattr(server, field)}: {remedy}, or remove it")
    if server.batch and (server.micro_batch or 0) > server.batch:
        raise Refusal(
            f"llama_server_micro_batch is {server.micro_batch}, more than llama_server_batch, so llama-server processes only "
            f"{server.batch} tokens at a time: use {server.batch} or less, or a larger llama_server_batch"
        )
    _check_environment(server.environment)
    _check_credential_paths(server)
    for field in ("cache_type_k", "cache_type_v"):
        if getattr(server, field) not in kv_cache.CACHE_TYPES:
            raise Refusal(
                f"llama_server_{field} is {getattr(server, field)!r}: use one of {', '.join(kv_cache.CACHE_TYPES)}"
            )
    _check_flash_attention(server)
    try:
        ipaddress.IPv4Address(server.host)
    except ValueError:
        raise Refusal(f"llama_server_host is {server.host!r}: use the numeric IPv4 address to listen on") from None
    _check_ports(head, server)


def _check_flash_attention(server: Server) -> None:
    """Refuse a quantised V cache without flash attention: neither fork's llama-server creates a context with it."""
    if server.cache_type_v in kv_cache.UNQUANTISED_TYPES or server.flash_attention != "off":
        return
    raise Refusal(
        f"llama_server_cache_type_v is {server.cache_type_v}, which needs flash attention: set llama_server_flash_attention to 'on' instead of 'off', or "
        "llama_server_cache_type_v to f16"
    )


def _check_credential_paths(server: Server) -> None:
    for field in services.CREDENTIALS.values():
        path = getattr(server, field)
        if path and not path.startswith("/"):  # the service's account resolves ~ and relative paths differently
            raise Refusal(f"llama_server_{field} is {path!r}: use an absolute path on the head")
    configured_files = [name for name in ("certificate", "key") if getattr(server, f"tls_{name}_file")]
    if len(configured_files) == 1:
        other_file = "key" if configured_files == ["certificate"] else "certificate"
        raise Refusal(
            f"llama_server_tls_{configured_files[0]}_file is set, but llama_server_tls_{other_file}_file is not: set both for TLS, or remove both"
        )


def _check_ports(head: EquippedHost, server: Server) -> None:
    worker_ports, ports = {names.port_of(worker.listens) for worker in head.workers}, {"llama_server_port": server.port}
    ports.update({names.PAGE_PORT_VARIABLE: server.page_port} if server.page_port is not None else {})
    for variable, port in ports.items():
        if not 0 < port < 65536:
            raise Refusal(f"{variable} is {port}: use 1 to 65535")
        if port in worker_ports:
            raise Refusal(
                f"{variable} is {port}, which a worker on {head.host.name} also uses: change {variable}, or port in llama_worker_endpoints"
            )
        port_owner = next(name for name in ports if ports[name] == port)
        if port_owner != variable:
            raise Refusal(f"{variable} is {port}, the same port as {port_owner}: change {variable} or {port_owner}")


def _check_extra_arguments(arguments: Sequence[str], release: ReleasePlan) -> None:
    """Refuse, in one message, options that the plan decides and options with which llama-server of this release would not start."""
    joined_arguments = [word for word in arguments if re.match(r"--?\w[\w-]*\s", word)]
    words = [part for word in arguments for part in (word.split() if word in joined_arguments else [word])]
    options_by_word = {word.split("=", 1)[0]: option for word in words if (option := options.by_word(word))}
    words_by_remedy: dict[str, list[str]] = {}
    for word, option in options_by_word.items():
        if option.is_exclusive:
            words_by_remedy.setdefault(option.alternative(), []).append(word)
    problems = [f"{', '.join(group)}, which cannot be set there: {remedy}" for remedy, group in words_by_remedy.items()]
    if joined_arguments and not any(option.is_secret for option in options_by_word.values()):
        text = "as one argument: use a list with option and value as separate entries"
        problems.append(f"{', '.join(map(repr, joined_arguments))} {text}")
    foreign_words = [
        word
        for word, option in options_by_word.items()
        if not option.is_exclusive and not option.has_word(word, release.fork)
    ]
    if foreign_words:
        other_fork = IK_LLAMA if release.mainline else MAINLINE
        remedy = f"remove {'them' if foreign_words[1:] else 'it'}"
        remedy += f", or set llama_release to a release of {other_fork}" * release.mainline
        problems.append(
            f"{', '.join(foreign_words)}, which only {other_fork} supports, but {release.ref} is a release of {release.fork}: {remedy}"
        )
    if problems:
        raise Refusal(f"llama_server_extra_args has {'. It also has '.join(problems)}")


def _check_environment(environment: Mapping[str, str]) -> None:
    """Refuse environment variables that set an option: the plan reads options only from variables of the collection."""
    variables = [name for name in environment if options.is_option_variable(name)]
    if variables:
        raise Refusal(
            f"llama_server_environment sets options of llama-server with {', '.join(variables)}: set the collection's variables instead, or put the options "
            "into llama_server_extra_args"
        )


def check_model(request: ModelRequest, summary: ModelSummary, release: ReleasePlan, variable: str) -> None:
    """Refuse a model that llama-server cannot serve, or whose tensor types llama-server of this release cannot load.

    :param variable: variable that requests the release.
    """
    if summary.architecture in REFUSALS and request.source:
        raise Refusal(f"{request.source.variable} is {summary.name}, {REFUSALS[summary.architecture]}")
    subject = request.source.variable if request.source else "the model"
    used_types = {row.type for row in summary.tensor_groups}
    foreign_types = tensor_types.types_of_other_forks(used_types, release.fork)
    if foreign_types:
        other_fork = IK_LLAMA if release.mainline else MAINLINE
        remedy = f"set {variable} to a release of {other_fork}, or " if release.mainline else ""
        raise Refusal(
            f"{subject} is {summary.name}, whose tensors have types that only {other_fork} supports ({', '.join(foreign_types)}), but {release.ref} is a "
            f"release of {release.fork}: {remedy}use a model file without these types"
        )
    untested_types = dict.fromkeys(
        tensor_types.unknown_types(used_types), capabilities.REVIEWED_BUILDS[release.fork] + 1
    )
    newer_types = {
        kind: build
        for kind, build in {**tensor_types.FIRST_BUILDS, **untested_types}.items()
        if kind in used_types and release.build < build
    }
    if newer_types:
        raise Refusal(
            f"{subject} is {summary.name}, whose tensors have types that {release.ref} is not known to support ({', '.join(newer_types)}): set {variable} "
            f"to build {max(newer_types.values())} or newer, or use a model file without these types"
        )
