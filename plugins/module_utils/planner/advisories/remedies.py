# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator can do about a model that does not fit, or nearly does not: each remedy is tried, and those that help are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Host, Quantisation

Change = Callable[[Cluster], Cluster]
"""Takes the cluster as the inventory and the facts describe it, and returns it as it is once the operator has acted."""
Attempt = Callable[[Cluster], Optional[Plan]]
"""The plan of a changed cluster, without remedies; None where its input is refused."""

OVER_CAPACITY = "compute-over-capacity"
"""The advisory whose remedies are tried."""
LEAST_CONTEXT = 1024
"""Tokens of a slot below which a shorter context is no remedy."""
COUNTED_LAYERS = 4
"""So many fewer layers than computed are tried."""
MICRO_BATCHES = (256, 128, 64)
ATTENTION_BATCH = "256"
"""MiB; the default of newer commits of ik_llama.cpp."""


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
        return self._planned(change) is not None

    def lifts(self, change: Change, advisory: str) -> bool:
        """The same, and the advisory is gone."""
        plan = self._planned(change)
        return plan is not None and all(entry.id != advisory for entry in plan.advisories)

    def _planned(self, change: Change) -> Plan | None:
        plan = self.attempt(change(self.cluster))
        return plan if plan and plan.fits and _errors(plan) <= _errors(self.plan) else None


def serving(**fields: Any) -> Change:
    return lambda cluster: cluster._replace(server=cluster.server._replace(**fields))


def _serving_without(roles: Sequence[str]) -> Change:
    none: dict[str, Any] = dict.fromkeys(roles)
    return lambda cluster: cluster._replace(model=cluster.model._replace(**none))


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


def _without_bounds(cluster: Cluster) -> Cluster:
    def unbounded(host: Host) -> Host:
        return host._replace(endpoints=tuple(entry._replace(memory_mib=None) for entry in host.endpoints))

    return cluster._replace(hosts={name: unbounded(host) for name, host in cluster.hosts.items()})


def for_more_room(trial: Trial) -> list[str]:
    """Clauses that say how a model that does not fit does: each was tried."""
    cluster, server, clauses = trial.cluster, trial.cluster.server, []
    shorter = _shorter_contexts(min(server.context, trial.plan.head.context), server.parallel)
    tokens = next((tokens for tokens in shorter if trial.fits(serving(context=tokens))), None)
    if tokens:
        clauses.append(f"set llama_server_context to {tokens}")
    if server.parallel > 1 and trial.fits(serving(parallel=1)):
        clauses.append("set llama_server_parallel to 1")
    bounded = [name for name, host in cluster.hosts.items() if any(entry.memory_mib for entry in host.endpoints)]
    if bounded and trial.fits(_without_bounds):
        clauses.append(f"remove memory_mib from llama_worker_endpoints of {listed(bounded)}")
    limits = [f"llama_server_{name}" for name in ("memory_mib", "reserve_mib") if getattr(server, name)]
    if limits and trial.fits(serving(memory_mib={}, reserve_mib=None)):
        clauses.append(f"remove {listed(limits)}")
    lazy = ("--lazy-mode", "on")
    if trial.fits(serving(extra_args=(*server.extra_args, *lazy))):
        clauses.append(f"add {' '.join(lazy)} to llama_server_extra_args")
    unset = {"tensor_split": (), "override_tensor": (), "gpu_layers": None, "prompt_cache_mib": None}
    own = [name for name, none in unset.items() if getattr(server, name) != none]
    clauses += [f"remove llama_server_{name}" for name in own if trial.fits(serving(**{name: unset[name]}))]
    beside = [role for role in (download_record.MMPROJ, download_record.DRAFT) if getattr(cluster.model, role)]
    removed = [f"remove llama_model_{role}" for role in beside if trial.fits(_serving_without([role]))]
    if len(beside) > 1 and not removed and trial.fits(_serving_without(beside)):
        removed = [f"remove {listed(f'llama_model_{role}' for role in beside)}"]
    clauses += removed
    start = _layers_beside_the_processor(trial)
    counted = range(start, max(start - COUNTED_LAYERS, -1), -1)
    layers = next((number for number in counted if trial.fits(serving(gpu_layers=number))), None)
    if layers is not None:
        clauses.append(f"set llama_server_gpu_layers to {layers}")
    return clauses


def _layers_beside_the_processor(trial: Trial) -> int:
    """``llama_server_gpu_layers`` with which a head without workers holds the model, or with workers may hold it; -1 where the head has no such."""
    best, entries = trial.plan.estimate.best_single_host, trial.plan.placement
    if not any(entry.endpoint for entry in entries):
        return best.gpu_layers if best.host == trial.cluster.head and best.gpu_layers is not None else -1
    held = [entry.weights_mib + entry.kv_mib for entry in entries]
    missing = [max(0, mib - entry.capacity_mib) for mib, entry in zip(held, entries)]
    layers = sum(entry.layers for entry in entries)
    return max(0, layers + 1 - sum(math.ceil(mib * layers / max(1, sum(held))) for mib in missing))


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


def for_smaller_buffers(trial: Trial) -> list[str]:
    """A clause with the mildest change that makes compute buffers small enough, if one does: each was tried, on top of those before it."""
    of_fork = trial.plan.release.fork == options.IK_LLAMA
    attention_batch = of_fork and not server_settings.given_option(trial.cluster.server, "attention-batch")
    server = trial.cluster.server
    texts: list[str] = []
    fields: dict[str, Any] = {}
    ways: list[tuple[list[str], dict[str, Any]]] = []
    if server.flash_attention == "off":
        texts, fields = ["set llama_server_flash_attention to 'on'"], {"flash_attention": "on"}
        ways.append((texts, fields))
    if attention_batch:
        words = ("-amb", ATTENTION_BATCH)
        texts = [*texts, f"add {' '.join(words)} to llama_server_extra_args"]
        fields = {**fields, "extra_args": (*server.extra_args, *words)}
        ways.append((texts, fields))
    for tokens in MICRO_BATCHES:
        if tokens < server_settings.micro_batch_of(server):
            ways.append(([*texts, f"set llama_server_micro_batch to {tokens}"], {**fields, "micro_batch": tokens}))
    texts, fields = ways[-1] if ways else (texts, fields)
    for tokens in _shorter_contexts(min(server.context, trial.plan.head.context), server.parallel):
        ways.append(([*texts, f"set llama_server_context to {tokens}"], {**fields, "context": tokens}))
    helps = next((text for text, values in ways if trial.lifts(serving(**values), OVER_CAPACITY)), None)
    return [", and ".join(helps)] if helps else []
