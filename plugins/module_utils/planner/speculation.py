# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Speculative decoding: llama-server drafts tokens, which the devices then verify together.

As read in common/speculative.cpp and server-context.cpp of builds 9435 to 11063.
"""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Model, ModelRequest, Server

NO_SPECULATION, NGRAM, MTP, DRAFT = "none", "ngram", "mtp", "draft"
"""Values of ``llama_server_speculation``. The default is DRAFT with a draft model, otherwise NO_SPECULATION."""
NGRAM_MOD, DRAFT_MTP = "ngram-mod", "draft-mtp"
SPEC_TYPES = {NGRAM: NGRAM_MOD, MTP: DRAFT_MTP}
"""Values of --spec-type that no header determines."""
STATEFUL_TYPES = {DRAFT_MTP, "draft-eagle3", "draft-dflash", "draft-dspark"}
"""Values of --spec-type with which a recurrent model keeps a state for each token that may be rolled back."""


def drop_unused_draft(request: ModelRequest, server: Server) -> ModelRequest:
    """Return the request without an unused draft model."""
    return request._replace(draft=None) if server.speculation in (NO_SPECULATION, NGRAM) else request


def check_speculation(server: Server, model: Model, release: ReleasePlan) -> None:
    """Refuse a method of speculation that llama-server does not support for this model."""
    if server.speculation is None:
        return
    argument = server.argument(options.SPECULATION)
    if argument:
        raise Refusal(
            f"llama_server_speculation is {server.speculation}, but llama_server_extra_args also has {argument[0]}: remove {argument[0]} or "
            "llama_server_speculation"
        )
    if server.speculation in SPEC_TYPES and not release.mainline:
        raise Refusal(
            f"llama_server_speculation is {server.speculation}, but {release.ref} is a release of {release.fork}, with which the collection does "
            "not support this method: use draft or none"
        )
    if server.speculation == DRAFT and not model.path_of(host_types.DRAFT):
        raise Refusal(
            "llama_server_speculation is draft, but llama_model_draft is not set: set it to a small model with the same vocabulary, or use ngram, which "
            "needs no draft model"
        )
    if server.speculation == MTP and not _has_mtp_layers(model):
        raise Refusal(
            f"llama_server_speculation is mtp, but {model.summary.name} has no layers for multi-token prediction: use a model file with such layers, set "
            "llama_model_draft to a file with these layers, or use ngram, which needs none"
        )


def _has_mtp_layers(model: Model) -> bool:
    """Return whether the draft model, or else the model itself, has layers for multi-token prediction, as far as headers show."""
    if model.path_of(host_types.DRAFT):
        return model.draft is None or _draft_has_mtp_tensors(model)
    return kv_cache.count_mtp_layers(model.summary) > 0


def _draft_has_mtp_tensors(model: Model) -> bool:
    return any(row.name.endswith(".nextn.eh_proj.weight") for row in (model.draft.tensor_groups if model.draft else ()))


def with_mtp_layers(model: Model, server: Server) -> Model:
    """Return the model with its layers for multi-token prediction, if llama-server loads them."""
    if not _uses_mtp_layers(model, server):
        return model
    return model._replace(summary=model.summary.without_key("nextn_predict_layers"))


def _uses_mtp_layers(model: Model, server: Server) -> bool:
    return server.speculation == MTP and not model.path_of(host_types.DRAFT)


def spec_type(model: Model, server: Server, release: ReleasePlan) -> str:
    """Return the value of --spec-type, as build 11063 reads it from the header of a draft model; empty if it is not needed."""
    if server.argument(options.SPECULATION):
        return ""
    if server.speculation in SPEC_TYPES:
        return SPEC_TYPES[server.speculation]
    if not release.mainline or not model.path_of(host_types.DRAFT):
        return ""
    tensors = {row.name for row in model.draft.tensor_groups} if model.draft else set()
    methods = {"eagle3": "draft-eagle3", "dflash": "draft-dspark" if "markov_w1.weight" in tensors else "draft-dflash"}
    if _draft_has_mtp_tensors(model):
        return DRAFT_MTP
    return methods.get(model.draft.architecture if model.draft else "", "draft-simple")


def uncounted_memory(model: Model, server: Server, planned_type: str) -> list[str]:
    """Return names of memory that is not counted: states of a recurrent model whose draft tokens may be rolled back (need_n_rs_seq in build 11063), and
    buffers of layers for multi-token prediction.

    :param planned_type: result of spec_type.
    """
    argument = server.argument(options.SPECULATION)
    spec_types = set(argument[1].split(",")) if argument else {planned_type}
    is_recurrent = model.summary.architecture in kv_cache.RECURRENT_ARCHITECTURES | kv_cache.HYBRID_ARCHITECTURES
    return [
        *["states of tokens that may be rolled back"] * bool(is_recurrent and spec_types & STATEFUL_TYPES),
        *["compute buffers of multi-token prediction layers"] * _uses_mtp_layers(model, server),
    ]
