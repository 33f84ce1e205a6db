# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator can do about a model that does not fit, or nearly does not: each remedy is tried, and those that help are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Quantisation

Change = Callable[[Cluster], Cluster]
"""Takes the cluster as the inventory and the facts describe it, and returns it as it is once the operator has acted."""
Attempt = Callable[[Cluster], Optional[Plan]]
"""The plan of a changed cluster, without remedies; None where its input is refused."""

LEAST_CONTEXT = 1024
"""Tokens of a slot below which a shorter context is no remedy."""


def listed(words: Iterable[str], last: str = "and") -> str:
    """``a, b and c``."""
    *before, end = [*words] or [""]
    return f"{', '.join(before)} {last} {end}" if before else end


def as_list(words: Sequence[str]) -> str:
    """As an inventory has it: one word, or a list."""
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def sentence(clauses: Sequence[str]) -> str:
    """One sentence of clauses of which any one is enough."""
    text = ", or ".join(clauses)
    return text[:1].upper() + text[1:] + "."


def _errors(plan: Plan) -> set[str]:
    return {entry.id for entry in plan.advisories if entry.severity == "error" and not entry.accepted}


class Trial(NamedTuple):
    """Tries changes on a cluster whose plan needs remedies."""

    cluster: Cluster
    plan: Plan
    """Of the cluster as it is, with advisories."""
    attempt: Attempt

    def fits(self, change: Change) -> bool:
        """Whether the model fits then, and nothing new refuses the plan."""
        plan = self.attempt(change(self.cluster))
        return plan is not None and plan.fits and _errors(plan) <= _errors(self.plan)


def serving(**fields: Any) -> Change:
    return lambda cluster: cluster._replace(server=cluster.server._replace(**fields))


def _holding(size: int) -> Change:
    """The same model in files of so many bytes."""
    return lambda cluster: cluster._replace(model=cluster.model._replace(instead_bytes=size))


def _shorter_contexts(context: int, parallel: int) -> Iterator[int]:
    """Tokens of shorter contexts, the longest first.

    :param parallel: slots that share them.
    """
    while context // 2 >= LEAST_CONTEXT * parallel:
        context //= 2
        yield context


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to this one that fits, where all smaller ones do too; 0 where none does."""
    least = 0
    while least < count:
        middle = (least + count + 1) // 2
        least, count = (middle, count) if fits(middle) else (least, middle - 1)
    return least


def _most_layers(trial: Trial) -> int | None:
    """The most layers with which devices hold all that they get, or else all but the bound of the compute buffer. None where the model fits with
    no number: fewer are more for the head."""

    def are_held(bounded: bool, number: int) -> bool:
        plan = trial.attempt(serving(gpu_layers=number)(trial.cluster))
        return plan is not None and all(
            one.total_mib - (0 if bounded else one.compute_mib) <= one.capacity_mib for one in plan.placement
        )

    found = (_most(trial.plan.model.layers, partial(are_held, bounded)) for bounded in (True, False))
    return next((most for most in found if trial.fits(serving(gpu_layers=most))), None)


def for_more_room(trial: Trial) -> list[str]:
    """Clauses that say how a model that does not fit does: each was tried."""
    server, clauses = trial.cluster.server, []
    shorter = [*_shorter_contexts(min(server.context, trial.plan.head.context), server.parallel)]
    tokens = next((tokens for tokens in shorter if trial.fits(serving(context=tokens))), None)
    if tokens:
        clauses.append(f"set llama_server_context to {tokens}")
    if server.parallel > 1 and trial.fits(serving(parallel=1)):
        clauses.append("set llama_server_parallel to 1")
    unset: dict[str, Any] = {
        "tensor_split": (),
        "override_tensor": (),
        "gpu_layers": None,
        "memory_mib": {},
        "reserve_mib": None,
    }
    own = [name for name, none in unset.items() if getattr(server, name) != none]
    clauses += [f"remove llama_server_{name}" for name in own if trial.fits(serving(**{name: unset[name]}))]
    layers = _most_layers(trial)
    if layers is not None:
        clauses.append(f"set llama_server_gpu_layers to {layers}")
    return clauses or _of_both(trial, shorter[::-1])


def _of_both(trial: Trial, contexts: Sequence[int]) -> list[str]:
    """A clause with the longest of these contexts, the shortest first, with which a number of layers fits."""

    def layers_with(context: int) -> int | None:
        return _most_layers(trial._replace(cluster=serving(context=context)(trial.cluster)))

    count = _most(len(contexts), lambda number: layers_with(contexts[number - 1]) is not None)
    context = contexts[count - 1] if count else 0
    return [f"set llama_server_context to {context} and llama_server_gpu_layers to {layers_with(context)}"] * bool(
        count
    )


def smaller_quantisation(trial: Trial, offered: Sequence[Quantisation]) -> list[str]:
    """A clause with the largest quantisation of the model's repository that fits, if one does. Its layers are counted in proportion to its size.

    :param offered: those of the repository, the smallest first.
    """
    source = trial.cluster.model.source
    size = sum(file.bytes or 0 for file in trial.plan.model.files if file.role == download_record.MODEL)
    smaller = [one for one in offered if one.bytes < size] if source else []
    count = _most(len(smaller), lambda number: trial.fits(_holding(smaller[number - 1].bytes)))
    if not source or not count:
        return []
    found = smaller[count - 1]
    named = source.huggingface and source.huggingface.files
    return [
        f"set quantisation in {source.variable} to {found.name}{' and remove files from it' if named else ''}, the largest of its repository that fits "
        f"({found.bytes / (1024 * MIB):.2f} GiB; its layers are assumed to be those of this file in proportion)"
    ]
