# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The workload of llama-server: what the variables ``llama_server_…`` mean for a model and a release."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB, parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.projector import Projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import speculation
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source, server_checks
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, EquippedHost, Model, Server

PLACEMENT_OPTIONS = {
    host_types.DRAFT: ("draft-device", "draft-layers", "draft-tensors"),
    host_types.MMPROJ: ("projector-offload", "projector-device"),
}
"""Role of an auxiliary model → the options that place it."""
USE_ALL, USE_FASTEST = "all", "fastest"
"""Values of ``llama_placement``: use every device, or those with which a token takes the least time."""
NO_OFFLOAD_WORDS = ("--no-kv-offload", "-nkvo")
PROMPT_DIVISOR = 4
"""Divisor of a request's context that gives the planned length of prompts."""


class Workload(NamedTuple):
    """A model and the settings with which llama-server serves it."""

    server: Server
    placement: str | None
    """``llama_placement``."""
    users: int
    """``llama_users``: number of concurrent users."""
    model: Model
    release: ReleasePlan
    cache: kv_cache.CacheSettings
    context_per_request: int
    """Tokens of each concurrent request: requests divide the context, unless they share one cache."""
    requested_batches: tuple[int | None, int | None]
    """Requested batch and micro-batch, before the planner chooses sizes."""
    spec_type: str
    """Value of --spec-type; empty if it is not needed."""
    uncounted_models: Mapping[str, str]
    """Role of an auxiliary model → why its memory is not counted."""
    uncounted_memory: tuple[str, ...]
    """Data that llama-server loads but the plan does not count."""
    is_exact: bool
    """Whether no extra arg and no auxiliary model changes the memory of devices."""

    @property
    def summary(self) -> ModelSummary:
        return self.model.summary

    @property
    def uses_all_devices(self) -> bool:
        """Return whether every device gets layers if there are enough layers."""
        return self.placement == USE_ALL or (self.placement is None and self.model.known_answer is not None)

    @property
    def micro_batch(self) -> int:
        """Return the number of tokens that are computed together."""
        return min(self.cache.micro_batch, self.cache.batch)

    @property
    def prompt_tokens(self) -> int:
        """Return the planned length of prompts in tokens."""
        return max(1, self.context_per_request // PROMPT_DIVISOR)

    @property
    def generates_text(self) -> bool:
        """Return whether the server generates text, not embeddings."""
        return not self.cache.every_output

    def with_batches(self, batch: int | None, micro_batch: int | None) -> Workload:
        """Return the workload with these batch sizes; None stands for llama-server's default."""
        server = self.server._replace(batch=batch, micro_batch=micro_batch)
        cache = self.cache._replace(batch=_batch_of(server), micro_batch=micro_batch or kv_cache.DEFAULT_MICRO_BATCH)
        return self._replace(server=server, cache=cache)


def workload_of(cluster: Cluster, head: EquippedHost, release: ReleasePlan, release_variable: str) -> Workload:
    """Return the workload of the head.

    :param release_variable: variable that requests the release.
    :raises Refusal: the model contradicts the settings of the server, or its release.
    """
    server, request = cluster.server, speculation.drop_unused_draft(cluster.model, cluster.server)
    model = model_source.model_of(request, head.host.facts)
    server_checks.check_server(head, server, request, release)
    server_checks.check_model(request, model.summary, release, release_variable)
    return plan_workload(server, cluster.placement, cluster.users, model, release)


def plan_workload(
    server: Server, placement: str | None, users: int | None, model: Model, release: ReleasePlan
) -> Workload:
    """Return the workload for these variables, this model and this release.

    :raises Refusal: the variables contradict each other, or the model does not support their method of speculation.
    """
    if users is not None and users < 1:
        raise Refusal(f"llama_users is {users}: use 1 or more, or remove it")
    if model.summary.pooling_option and "every_output" not in _memory_arguments(server.extra_args):
        server = server._replace(extra_args=(*server.extra_args, model.summary.pooling_option))
    cache = cache_settings(server, model.summary, release.fork)
    context_per_request = _context_per_request(server, model.summary, cache)
    if cache.every_output and not server.micro_batch:  # a micro-batch as long as an input, which is computed at once
        server = server._replace(micro_batch=min(cache.batch, context_per_request))
        cache = cache_settings(server, model.summary, release.fork)
    uncounted_models = _uncounted_models(model, server, release)
    counts_draft = bool(model.draft) and host_types.DRAFT not in uncounted_models
    unplanned_args = unplanned_options(server, counts_draft)
    speculation.check_speculation(server, model, release)
    model = speculation.with_mtp_layers(model, server)
    spec_type = speculation.spec_type(model, server, release)
    uncounted_memory = [_describe_auxiliary(model, role) for role in uncounted_models]
    uncounted_memory += speculation.uncounted_memory(model, server, spec_type)
    return Workload(
        server=server,
        placement=placement,
        users=users or server.parallel,
        model=model,
        release=release,
        cache=cache,
        context_per_request=context_per_request,
        requested_batches=(server.batch, server.micro_batch),
        spec_type=spec_type,
        uncounted_models=uncounted_models,
        is_exact=release.mainline and not unplanned_args and not uncounted_memory,
        uncounted_memory=(*uncounted_memory, *dict.fromkeys(option.adds for option in unplanned_args if option.adds)),
    )


def cache_settings(server: Server, summary: ModelSummary, fork: str = MAINLINE) -> kv_cache.CacheSettings:
    """Return the settings that change the KV cache. The context is limited to the tokens that all requests can use."""
    arguments = _memory_arguments(server.extra_args)
    kv_offload, _value = server.argument("kv-offload") or ("", "")
    unified, _value = server.argument("unified") or ("", "")
    return kv_cache.CacheSettings(
        context=min(server.context, server.parallel * trained_context(server, summary)),
        parallel=server.parallel,
        type_k=server.cache_type_k,
        type_v=server.cache_type_v,
        flash_attention=server.flash_attention,
        unified=options.switch_value(unified) == "on",
        full_window="full_window" in arguments,
        micro_batch=server.micro_batch or kv_cache.DEFAULT_MICRO_BATCH,
        batch=_batch_of(server),
        fork=fork,
        offload=options.normalize(kv_offload) not in NO_OFFLOAD_WORDS,
        every_output="every_output" in arguments,
        latent_attention=_whole_number(arguments, "latent_attention", "a whole number"),
        attention_batch=_whole_number(arguments, "attention_batch", "a whole number of MiB"),
    )


def _batch_of(server: Server) -> int:
    """Return llama-server's batch: by default no less than a micro-batch."""
    return server.batch or max(kv_cache.DEFAULT_BATCH, server.micro_batch or 0)


def _memory_arguments(extra_args: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return field of kv_cache.CacheSettings → the last extra arg that sets it, and the word after it."""
    arguments = {}
    for word, text in zip(extra_args, [*extra_args[1:], ""]):
        option = options.by_word(word)
        if option and option.effect:
            arguments[option.effect] = (word, text)
    return arguments


def _whole_number(arguments: Mapping[str, tuple[str, str]], field: str, description: str) -> int | None:
    """Return the value of an extra arg, 0 or more; None unless it is set."""
    if field not in arguments:
        return None
    word, text = arguments[field]
    value = parse_count(text)
    if value is None or value >= 1 << 31:
        raise Refusal(f"llama_server_extra_args has {word} {gguf.quote(text)}: use {description}")
    return value


def trained_context(server: Server, summary: ModelSummary) -> int:
    """Return the maximum number of tokens of a request, from ``--override-kv`` or the model's file."""
    key = re.escape(f"{summary.architecture}.context_length")
    numbers = re.findall(rf"(?<![\w.-]){key}=int:(\d{{1,18}})(?![^,\s])", " ".join(server.extra_args))
    return int(numbers[-1]) if numbers else summary.context


def _context_per_request(server: Server, summary: ModelSummary, cache: kv_cache.CacheSettings) -> int:
    trained_tokens = trained_context(server, summary)
    if cache.unified:
        return min(cache.context, trained_tokens)
    if cache.context < cache.parallel:
        raise Refusal(
            f"llama_server_parallel is {cache.parallel}, but the requests share a context of only {cache.context} tokens: increase llama_server_context, or "
            "reduce llama_server_parallel"
        )
    return min(cache.context // cache.parallel, trained_tokens)


def unplanned_options(server: Server, counts_draft: bool) -> list[options.Option]:
    """Return the extra args that change the memory of devices in an unplanned way.

    :param counts_draft: whether a draft model is counted: then its options change nothing.
    """
    present_options = [option for word in server.extra_args if (option := options.by_word(word))]
    memory_options = [option for option in present_options if option.effect == options.EXTRA_MEMORY]
    return [option for option in memory_options if not (counts_draft and option.name == options.SPECULATION)]


def header_of(model: Model, role: str) -> ModelSummary | Projector | None:
    """Return the header of an auxiliary model; None if it was not read."""
    return model.draft if role == host_types.DRAFT else model.projector


def _uncounted_models(model: Model, server: Server, release: ReleasePlan) -> dict[str, str]:
    """Return role of an auxiliary model → why its memory is not counted."""
    reasons = {}
    for role in filter(model.path_of, model_source.AUXILIARY_OPTIONS):
        argument = next(filter(None, map(server.argument, PLACEMENT_OPTIONS[role])), None)
        if not release.mainline:
            reasons[role] = f"it is unknown how {release.fork} chooses a device for this model"
        elif header_of(model, role) is None:
            reasons[role] = "its header was not read"
        elif argument:
            reasons[role] = f"{argument[0]} in llama_server_extra_args overrides the plan's placement"
    return reasons


def _describe_auxiliary(model: Model, role: str) -> str:
    """Return the variable of an auxiliary model, and its size if it is known."""
    sizes = [file.bytes for file in model.files if file.role == role]
    note = f" ({sum(size for size in sizes if size) // MIB} MiB)" if all(sizes) else ""
    return f"{model_source.AUXILIARY_VARIABLES[role]}{note}"
