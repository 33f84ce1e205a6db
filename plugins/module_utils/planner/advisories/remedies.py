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
"""A function that takes the cluster and returns it as it would be after the operator has acted."""
Attempt = Callable[[Cluster], Union[Plan, Refused]]
"""A function that returns the plan of a changed cluster, without remedies."""

MIN_CONTEXT = 1024
"""Smallest number of tokens per slot that a remedy suggests."""


def join_names(words: Iterable[str], last_separator: str = "and") -> str:
    """Return ``a, b and c``."""
    *start, end = [*words] or [""]
    return f"{', '.join(start)} {last_separator} {end}" if start else end


def join_words(words: Sequence[str]) -> str:
    """Return words as an inventory holds them: one word, or a list."""
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def join_sentences(alternatives: Sequence[str]) -> str:
    """Return a sentence for each alternative."""
    text = ". Or ".join(alternatives)
    return text[:1].upper() + text[1:] + "."


def _error_ids(plan: Plan) -> set[str]:
    return {entry.id for entry in plan.advisories if entry.severity == "error" and not entry.accepted}


class Trial(NamedTuple):
    """A cluster whose plan needs remedies, on which changes are tried."""

    cluster: Cluster
    plan: Plan
    """Plan of the unchanged cluster, with advisories."""
    attempt: Attempt

    def fits(self, change: Change) -> bool:
        """Return whether the model fits after a change, and no new error refuses the plan."""
        plan = self.attempt(change(self.cluster))
        return isinstance(plan, Plan) and plan.fits and _error_ids(plan) <= _error_ids(self.plan)


def _set_server(**fields: Any) -> Change:
    return lambda cluster: cluster._replace(server=cluster.server._replace(**fields))


def _set_model_size(size: int) -> Change:
    """Return a change to the same model in files of this many bytes."""

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


def largest_fitting(count: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``count`` that fits, if all smaller numbers fit too; 0 if none fits."""
    lower_bound = 0
    while lower_bound < count:
        midpoint = (lower_bound + count + 1) // 2
        lower_bound, count = (midpoint, count) if fits(midpoint) else (lower_bound, midpoint - 1)
    return lower_bound


def _most_layers(trial: Trial) -> int | None:
    """Return the largest number of offloaded layers that devices can hold, if necessary without the upper bound of the compute buffer.
    None if the model fits with no number, because the head has to hold the rest."""

    def fits_on_device(is_bounded: bool, layers: int) -> bool:
        plan = trial.attempt(_set_server(gpu_layers=layers)(trial.cluster))
        return isinstance(plan, Plan) and all(
            entry.total_mib - (0 if is_bounded else entry.compute_mib) <= entry.capacity_mib for entry in plan.placement
        )

    layer_counts = (largest_fitting(trial.plan.model.layers, partial(fits_on_device, bound)) for bound in (True, False))
    return next((layers for layers in layer_counts if trial.fits(_set_server(gpu_layers=layers))), None)


def memory_remedies(trial: Trial) -> list[str]:
    """Return changes to variables that make the model fit: each was tried."""
    server, clauses = trial.cluster.server, []
    shorter_contexts = [*_shorter_contexts(min(server.context, trial.plan.head.context), server.parallel)]
    tokens = next((tokens for tokens in shorter_contexts if trial.fits(_set_server(context=tokens))), None)
    if tokens:
        clauses.append(f"set llama_server_context to {tokens}")
    if server.parallel > 1 and trial.fits(_set_server(parallel=1)):
        clauses.append("set llama_server_parallel to 1")
    defaults: dict[str, Any] = {
        "tensor_split": (),
        "override_tensor": (),
        "gpu_layers": None,
        "memory_mib": {},
        "reserve_mib": None,
        "prompt_cache_mib": None,
    }
    changed_names = [name for name, default in defaults.items() if getattr(server, name) != default]
    clauses += [
        f"remove llama_server_{name}" for name in changed_names if trial.fits(_set_server(**{name: defaults[name]}))
    ]
    layers = _most_layers(trial)
    if layers is not None:
        clauses.append(f"set llama_server_gpu_layers to {layers}")
    return clauses or _context_with_layers(trial, shorter_contexts[::-1])


def _context_with_layers(trial: Trial, contexts: Sequence[int]) -> list[str]:
    """Return a remedy with the longest of these contexts, the shortest first, for which a number of layers fits."""

    def fitting_layers(context: int) -> int | None:
        return _most_layers(trial._replace(cluster=_set_server(context=context)(trial.cluster)))

    count = largest_fitting(len(contexts), lambda number: fitting_layers(contexts[number - 1]) is not None)
    context = contexts[count - 1] if count else 0
    return [f"set llama_server_context to {context} and llama_server_gpu_layers to {fitting_layers(context)}"] * bool(
        count
    )


def smaller_quantisation(trial: Trial, offers: Sequence[Quantisation]) -> list[str]:
    """Return a remedy with the largest quantisation of the model's repository that fits, if any. Its layers are counted in proportion to its size.

    :param offers: quantisations of the repository, the smallest first.
    """
    source = trial.cluster.model.source
    size = sum(file.bytes or 0 for file in trial.plan.model.files if file.role == host_types.MODEL)
    choices = [quantisation for quantisation in offers if quantisation.bytes < size] if source else []
    count = largest_fitting(len(choices), lambda number: trial.fits(_set_model_size(choices[number - 1].bytes)))
    if not source or not count:
        return []
    largest_quantisation = choices[count - 1]
    remove = " (and remove its files key)" if source.huggingface and source.huggingface.files else ""
    return [
        f"set quantisation in {source.variable} to {largest_quantisation.name}{remove}, the largest in its repository that fits "
        f"({largest_quantisation.bytes / (1024 * MIB):.2f} GiB; layer sizes are assumed to shrink in proportion)"
    ]
