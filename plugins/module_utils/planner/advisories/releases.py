# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions of advisories about releases, the models that they support, and names in the inventory."""

from __future__ import annotations

import math
import re

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import tensor_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import toolchains
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request

ARCHITECTURES_FILE = "src/llama-arch.cpp"
"""File of llama.cpp that lists the architectures. A patch may add an architecture."""
OLLAMA_ARCHITECTURES = ("deepseekocr", "glm4moelite", "glmocr", "gptoss", "mllama", "nemotron_h_omni", "qwen25vl")
"""Architectures in Ollama's files that upstream lacks or names differently."""


def remote_code(context: AdvisoryContext) -> Cases:
    """Return a case for each commit of a fork."""
    checked = capabilities.OLDEST[IK_LLAMA]
    cases: Cases = []
    for release in context.plan.releases.values():
        if not release.mainline:
            note = f" (newer than {checked}, not checked)" if release.build > checked else ""
            cases.append((None, {"builds": f"commit {release.build} of {release.fork}{note}"}))
    return cases


def cache_kernels(context: AdvisoryContext) -> Cases:
    """Return hosts whose programs may lack flash attention kernels for the cache types."""
    kinds = context.server.cache_type_k, context.server.cache_type_v
    if not context.release.mainline or not backends.needs_all_quants(*kinds):
        return []
    compiled = context.release.source in release_request.COMPILED
    variables = None if compiled else remedies.join_names(context.variables_of(context.release.id))
    cases: Cases = []
    for name in dict.fromkeys(device.host for device in context.holders if backends.RECORDS[device.backend].all_quants):
        builds = context.plan.hosts[name].builds if name in context.plan.hosts else ()
        options = {
            option: build.cmake_options.get(option, "OFF")
            for build in builds
            if (option := backends.RECORDS[build.backend].all_quants)
        }
        if not options or not all(map(backends.is_enabled, options.values())):
            overridden = [option for option in options if option in context.cluster.every_host[name].cmake_options]
            values = {"type_k": kinds[0], "type_v": kinds[1], "option": remedies.join_names(overridden) or None}
            cases.append((name, {**values, "variables": variables}))
    return cases


def _architecture(context: AdvisoryContext) -> capabilities.Appearance | None:
    """Return when the model's architecture appeared; None if the serving build certainly has it."""
    release = context.release
    appeared = capabilities.appearance_of(context.summary.architecture, release.fork)
    patched = any(ARCHITECTURES_FILE in patch.files for patch in release.patches)
    supported = appeared is None or release.build >= (appeared.oldest_with or math.inf)
    return None if supported or patched else appeared


def _other_spelling(architecture: str, release: ReleasePlan) -> str | None:
    """Return the name under which a release has an architecture that it spells with other punctuation."""

    def letters(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    for name in (*capabilities.ARCHITECTURES, *" ".join(capabilities.NEW_ARCHITECTURES.values()).split()):
        appeared = capabilities.appearance_of(name, release.fork)
        is_known = not appeared or release.build >= (appeared.oldest_with or math.inf)
        if is_known and name != architecture and letters(name) == letters(architecture):
            return name
    return None


def unknown_architecture(context: AdvisoryContext) -> Cases:
    """Return the head if llama-server refuses the file when it starts, or may refuse it because the architecture is new."""
    name, release, source = context.summary.architecture, context.release, context.cluster.model.source
    appeared = _architecture(context)
    twin = _other_spelling(name, release) if appeared else None
    if source and (twin or name in OLLAMA_ARCHITECTURES):
        who = f"build {release.build} knows {twin} but not" if twin else "only Ollama knows"
        remove = "" if source.variable == "llama_model_huggingface" else f", and remove {source.variable}"
        values = {"would": "would", "who": who, "and_remove": remove, "variables": None}
    elif appeared and release.build < (appeared.oldest_with or appeared.newest_without + 1):
        would, does = ("would", "does") if release.build <= appeared.newest_without else ("may", "may")
        newer = f"build {appeared.oldest_with} or newer" if appeared.oldest_with else "a newer build that knows it"
        variables = remedies.join_names(context.variables_of(release.id))
        values = {"would": would, "who": f"build {release.build} {does} not know", "and_remove": None}
        values.update(newer=newer, variables=variables)
    else:
        return []
    return [(context.plan.head.host, {**values, "architecture": name})]


def unread_model(context: AdvisoryContext) -> Cases:
    """Return the head if no checked build has the model's architecture or tensor types, and its build is newer than these."""
    kinds = tensor_types.unknown_types({row.type for row in context.summary.named_tensors})
    is_new = _architecture(context) and not unknown_architecture(context)
    parts = [f"the architecture {context.summary.architecture}"] * bool(is_new) + [
        f"tensors of {kind}" for kind in kinds
    ]
    release = context.release
    values = {"what": remedies.join_names(parts), "build": release.build, "newest": capabilities.NEWEST[release.fork]}
    return [(context.plan.head.host, values)] if parts else []


def missing_kernels(context: AdvisoryContext) -> Cases:
    """Return devices whose backend cannot multiply the model's tensors: a worker crashes, the head falls back to its processor."""
    kinds = {row.type for row in context.summary.named_tensors}
    cases: Cases = []
    for name, backend in dict.fromkeys((device.host, device.backend) for device in context.holders):
        missing = sorted(kinds & backends.RECORDS[backend].no_kernels)
        host = context.cluster.hosts.get(name)
        if missing and context.release.mainline:
            present = {device.backend for device in host.facts.accelerators} if host else set()
            computing = sorted(name for name in present if not backends.RECORDS[name].no_kernels.intersection(missing))
            if host and not computing and not backends.UNIVERSAL.no_kernels.intersection(missing):
                computing = [*filter(None, [toolchains.by_vulkan(host.facts)])]
            instead = (*computing, "cpu")[0] if host else None
            cases.append((name, {"backend": backend, "types": remedies.join_names(missing), "instead": instead}))
    return cases


def _is_misspelt(name: str, known: str) -> bool:
    """Return whether two letters, added, removed or changed, make one name the other."""
    row = list(range(len(known) + 1))
    for number, letter in enumerate(name, 1):
        row_above, row = row, [number]
        for place, known_letter in enumerate(known):
            row.append(min(row[-1] + 1, row_above[place + 1] + 1, row_above[place] + (letter != known_letter)))
    return row[-1] <= 2


def unknown_variables(context: AdvisoryContext, misspelt: bool = False) -> Cases:
    return [
        (name, {"variable": variable, "meant": meant or "none", "similar": meant or None})
        for variable, meant in sorted(
            {pair for host in context.cluster.hosts.values() for pair in host.unknown_variables.items()}
        )
        for name, host in context.cluster.hosts.items()
        if host.unknown_variables.get(variable) == meant and _is_misspelt(variable, meant) == misspelt
    ]
