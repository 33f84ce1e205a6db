# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions of advisories about releases, the models that they support, and variables in the inventory."""

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
"""Source file of llama.cpp that lists the architectures. A patch may add an architecture to it."""
OLLAMA_ARCHITECTURES = ("deepseekocr", "glm4moelite", "glmocr", "gptoss", "mllama", "nemotron_h_omni", "qwen25vl")
"""Architectures in Ollama's files that upstream lacks or names differently."""


def exploitable_releases(context: AdvisoryContext) -> Cases:
    """Return a case for each release of a fork."""
    checked_build = capabilities.OLDEST_BUILDS[IK_LLAMA]
    cases: Cases = []
    for release in context.plan.releases.values():
        if not release.mainline:
            note = f" (newer than {checked_build}, not checked)" if release.build > checked_build else ""
            cases.append((None, {"builds": f"build {release.build} of {release.fork}{note}"}))
    return cases


def missing_cache_kernels(context: AdvisoryContext) -> Cases:
    """Return hosts whose programs may lack flash attention kernels for the cache types."""
    cache_types = context.server.cache_type_k, context.server.cache_type_v
    if not context.release.mainline or not backends.needs_all_quants(*cache_types):
        return []
    is_compiled = context.release.source in release_request.COMPILED_SOURCES
    variables_text = None if is_compiled else remedies.join_names(context.variables_of(context.release.id))
    cases: Cases = []
    hosts = (device.host for device in context.devices if backends.BY_NAME[device.backend].quants_option)
    for name in dict.fromkeys(hosts):
        builds = context.plan.hosts[name].builds if name in context.plan.hosts else ()
        quants_options = {
            option: build.cmake_options.get(option, "OFF")
            for build in builds
            if (option := backends.BY_NAME[build.backend].quants_option)
        }
        if not quants_options or not all(map(backends.is_enabled, quants_options.values())):
            host_options = context.cluster.all_hosts[name].cmake_options
            overridden_options = [option for option in quants_options if option in host_options]
            values = {
                "type_k": cache_types[0],
                "type_v": cache_types[1],
                "option": remedies.join_names(overridden_options) or None,
            }
            cases.append((name, {**values, "variables": variables_text}))
    return cases


def _missing_support(context: AdvisoryContext) -> capabilities.ArchitectureSupport | None:
    """Return which builds support the model's architecture; None if the serving build certainly has it."""
    release = context.release
    support = capabilities.support_of(context.summary.architecture, release.fork)
    is_patched = any(ARCHITECTURES_FILE in patch.files for patch in release.patches)
    is_supported = support is None or release.build >= (support.oldest_build_with or math.inf)
    return None if is_supported or is_patched else support


def _other_spelling(architecture: str, release: ReleasePlan) -> str | None:
    """Return the release's own name for an architecture, if that differs only in case or punctuation."""

    def normalize_name(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    for name in (*capabilities.ARCHITECTURES, *" ".join(capabilities.NEW_ARCHITECTURES.values()).split()):
        support = capabilities.support_of(name, release.fork)
        is_known = not support or release.build >= (support.oldest_build_with or math.inf)
        if is_known and name != architecture and normalize_name(name) == normalize_name(architecture):
            return name
    return None


def unknown_architecture(context: AdvisoryContext) -> Cases:
    """Return the head if llama-server would refuse the file, or may refuse it because the architecture is new."""
    architecture, release, source = context.summary.architecture, context.release, context.cluster.model.source
    support = _missing_support(context)
    spelling = _other_spelling(architecture, release) if support else None
    if source and (spelling or architecture in OLLAMA_ARCHITECTURES):
        subject = f"build {release.build} knows {spelling} but not" if spelling else "only Ollama knows"
        removal = "" if source.variable == "llama_model_huggingface" else f", and remove {source.variable}"
        values = {"modal": "would", "subject": subject, "removal": removal, "variables": None}
    elif support and release.build < (support.oldest_build_with or support.newest_build_without + 1):
        modal, verb = ("would", "does") if release.build <= support.newest_build_without else ("may", "may")
        newer_build = (
            f"build {support.oldest_build_with} or newer"
            if support.oldest_build_with
            else "a newer build that supports this architecture"
        )
        variables_text = remedies.join_names(context.variables_of(release.id))
        values = {"modal": modal, "subject": f"build {release.build} {verb} not know", "removal": None}
        values.update(newer_build=newer_build, variables=variables_text)
    else:
        return []
    return [(context.plan.head.host, {**values, "architecture": architecture})]


def untested_model(context: AdvisoryContext) -> Cases:
    """Return the head if no reviewed build has the model's architecture or tensor types, and the serving build is newer."""
    unknown_types = tensor_types.unknown_types({row.type for row in context.summary.tensor_groups})
    is_untested = _missing_support(context) and not unknown_architecture(context)
    features = [f"the architecture {context.summary.architecture}"] * bool(is_untested) + [
        f"tensors of {unknown_type}" for unknown_type in unknown_types
    ]
    release = context.release
    values = {
        "features": remedies.join_names(features),
        "build": release.build,
        "newest": capabilities.REVIEWED_BUILDS[release.fork],
    }
    return [(context.plan.head.host, values)] if features else []


def missing_tensor_kernels(context: AdvisoryContext) -> Cases:
    """Return hosts with a backend that cannot multiply the model's tensors: a worker crashes, the head falls back to its CPU."""
    used_types = {row.type for row in context.summary.tensor_groups}
    cases: Cases = []
    for name, backend in dict.fromkeys((device.host, device.backend) for device in context.devices):
        types = sorted(used_types & backends.BY_NAME[backend].unsupported_types)
        host = context.cluster.hosts.get(name)
        if types and context.release.mainline:
            host_backends = {device.backend for device in host.facts.accelerators} if host else set()
            choices = sorted(
                choice for choice in host_backends if not backends.BY_NAME[choice].unsupported_types.intersection(types)
            )
            if host and not choices and not backends.UNIVERSAL.unsupported_types.intersection(types):
                choices = [*filter(None, [toolchains.vulkan_setting(host.facts)])]
            alternative = (*choices, "cpu")[0] if host else None
            cases.append((name, {"backend": backend, "types": remedies.join_names(types), "alternative": alternative}))
    return cases


def _is_misspelt(name: str, known_name: str) -> bool:
    """Return whether adding, removing or changing at most two letters turns one name into the other."""
    row = list(range(len(known_name) + 1))
    for row_number, letter in enumerate(name, 1):
        previous_row, row = row, [row_number]
        for column, known_letter in enumerate(known_name):
            row.append(min(row[-1] + 1, previous_row[column + 1] + 1, previous_row[column] + (letter != known_letter)))
    return row[-1] <= 2


def unknown_variables(context: AdvisoryContext, is_misspelt: bool = False) -> Cases:
    return [
        (name, {"variable": variable, "suggestion": similar_name or "none", "similar": similar_name or None})
        for variable, similar_name in sorted(
            {pair for host in context.cluster.hosts.values() for pair in host.unknown_variables.items()}
        )
        for name, host in context.cluster.hosts.items()
        if host.unknown_variables.get(variable) == similar_name and _is_misspelt(variable, similar_name) == is_misspelt
    ]
