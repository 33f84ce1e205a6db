# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remedies for a model that does not fit: each is tried, and the plan shows the remedies that help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Quantisation

Change = Callable[[Cluster], Cluster]
"""A function that returns the cluster as it would be after the operator applies a remedy."""
Planner = Callable[[Cluster], Union[Plan, Refused]]
"""A function that returns the plan of a changed cluster, without remedies."""

MIN_CONTEXT = 1024
"""Smallest number of tokens per slot that a remedy suggests."""


def join_names(words: Iterable[str], conjunction: str = "and") -> str:
    """Return ``a, b and c``."""
    *first_words, last_word = [*words] or [""]
    return f"{', '.join(first_words)} {conjunction} {last_word}" if first_words else last_word


def yaml_value(words: Sequence[str]) -> str:
    """Return words as the YAML value of a variable: one word, or a list."""
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def join_sentences(alternatives: Sequence[str]) -> str:
    """Return the alternatives as sentences, joined by Or."""
    text = ". Or ".join(alternatives)
    return text[:1].upper() + text[1:] + "."


def _error_ids(plan: Plan) -> set[str]:
    return {advisory.id for advisory in plan.advisories if advisory.severity == "error" and not advisory.accepted}


class Trial(NamedTuple):
    """A cluster whose plan needs remedies, and a function that plans changed copies of it."""

    cluster: Cluster
    plan: Plan
    """Plan of the unchanged cluster, with advisories."""
    replan: Planner

    def fits(self, change: Change) -> bool:
        """Return whether the model fits after a change that adds no error advisories."""
        plan = self.replan(change(self.cluster))
        return isinstance(plan, Plan) and plan.fits and _error_ids(plan) <= _error_ids(self.plan)


def _server_change(**fields: Any) -> Change:
    return lambda cluster: cluster._replace(server=cluster.server._replace(**fields))


def _size_change(size: int) -> Change:
    """Return a change that scales the model's files to this number of bytes."""

    def change(cluster: Cluster) -> Cluster:
        summary = cluster.model.summary and model_source.scale_summary(cluster.model.summary, size)
        return cluster._replace(model=cluster.model._replace(summary=summary))

    return change


def _shorter_contexts(context: int, parallel: int) -> Iterator[int]:
    """Yield shorter contexts in tokens, the longest first.

    :param parallel: number of slots that share a context.
    """
    while context // 2 >= MIN_CONTEXT * parallel:
        context //= 2
        yield context


def largest_fitting_count(upper_bound: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``upper_bound`` that fits, if all smaller numbers fit too; 0 if none fits."""
    lower_bound = 0
    while lower_bound < upper_bound:
        midpoint = (lower_bound + upper_bound + 1) // 2
        lower_bound, upper_bound = (midpoint, upper_bound) if fits(midpoint) else (lower_bound, midpoint - 1)
    return lower_bound


def _max_gpu_layers(trial: Trial) -> int | None:
    """Return the largest number of offloaded layers that the devices can hold, if necessary without counting compute buffers.
    None if no such number makes the model fit, because the head has to hold the other layers."""

    def fits_on_devices(counts_compute: bool, layers: int) -> bool:
        plan = trial.replan(_server_change(gpu_layers=layers)(trial.cluster))
        return isinstance(plan, Plan) and all(
            share.total_mib - (0 if counts_compute else share.compute_mib) <= share.capacity_mib
            for share in plan.placement
        )

    model_layers = trial.plan.model.layers
    layer_counts = (largest_fitting_count(model_layers, partial(fits_on_devices, choice)) for choice in (True, False))
    return next((layers for layers in layer_counts if trial.fits(_server_change(gpu_layers=layers))), None)


def memory_remedies(trial: Trial) -> list[str]:
    """Return changes to variables that make the model fit; each was tried."""
    server, clauses = trial.cluster.server, []
    shorter_contexts = [*_shorter_contexts(min(server.context, trial.plan.head.context), server.parallel)]
    tokens = next((tokens for tokens in shorter_contexts if trial.fits(_server_change(context=tokens))), None)
    if tokens:
        clauses.append(f"set llama_server_context to {tokens}")
    if server.parallel > 1 and trial.fits(_server_change(parallel=1)):
        clauses.append("set llama_server_parallel to 1")
    defaults: dict[str, Any] = {
        "tensor_split": (),
        "override_tensor": (),
        "gpu_layers": None,
        "memory_mib": {},
        "reserve_mib": None,
        "prompt_cache_mib": None,
    }
    changed_fields = [name for name, default in defaults.items() if getattr(server, name) != default]
    clauses += [
        f"remove llama_server_{name}" for name in changed_fields if trial.fits(_server_change(**{name: defaults[name]}))
    ]
    layers = _max_gpu_layers(trial)
    if layers is not None:
        clauses.append(f"set llama_server_gpu_layers to {layers}")
    return clauses or _context_and_layers_remedies(trial, shorter_contexts[::-1])


def _context_and_layers_remedies(trial: Trial, contexts: Sequence[int]) -> list[str]:
    """Return a remedy with the longest of ``contexts`` (shortest first) for which the model fits with some number of layers."""

    def fitting_layers(context: int) -> int | None:
        return _max_gpu_layers(trial._replace(cluster=_server_change(context=context)(trial.cluster)))

    count = largest_fitting_count(len(contexts), lambda number: fitting_layers(contexts[number - 1]) is not None)
    context = contexts[count - 1] if count else 0
    remedy = f"set llama_server_context to {context} and llama_server_gpu_layers to {fitting_layers(context)}"
    return [remedy] * bool(count)


def quantisation_remedies(trial: Trial, quantisations: Sequence[Quantisation]) -> list[str]:
    """Return a remedy with the largest quantisation of the model's repository that fits, if any. Layer sizes are assumed to be in proportion to the file size.

    :param quantisations: quantisations in the repository, the smallest first.
    """
    source = trial.cluster.model.source
    size = sum(file.bytes or 0 for file in trial.plan.model.files if file.role == host_types.MODEL)
    choices = [quantisation for quantisation in quantisations if quantisation.bytes < size] if source else []
    count = largest_fitting_count(len(choices), lambda number: trial.fits(_size_change(choices[number - 1].bytes)))
    if not source or not count:
        return []
    largest_quantisation = choices[count - 1]
    removal = " (and remove files there)" if source.huggingface and source.huggingface.files else ""
    return [
        f"set quantisation in {source.variable} to {largest_quantisation.name}{removal}, the largest in the repository that fits "
        f"({largest_quantisation.bytes / (1024 * MIB):.2f} GiB; layer sizes are assumed to shrink in proportion to the files)"
    ]
