# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When advisories are met that concern what a release is and knows, and names in the inventory."""

from __future__ import annotations

import math

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import tensor_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request

ARCHITECTURES_FILE = "src/llama-arch.cpp"
"""The file of llama.cpp that names them: a patch may add one."""
OLLAMA_ARCHITECTURES = ("deepseekocr", "glm4moelite", "glmocr", "gptoss", "mllama", "nemotron_h_omni", "qwen25vl")
"""Architectures in files of Ollama that upstream names otherwise or does not have."""


def remote_code(context: AdvisoryContext) -> Cases:
    """One case for each commit of a fork."""
    known = capabilities.OLDEST[IK_LLAMA]
    cases: Cases = []
    for release in context.plan.releases.values():
        if not release.mainline:
            newer = release.build > known
            checked = f", which is newer than {known}, the last one that was checked" if newer else ""
            builds = f"commit {release.build} of {release.fork}{checked}"
            cases.append((None, {"builds": builds}))
    return cases


def cache_kernels(context: AdvisoryContext) -> Cases:
    """Hosts whose programs may lack kernels of flash attention for the types of the cache."""
    kinds = context.server.cache_type_k, context.server.cache_type_v
    if not context.release.mainline or not backends.needs_all_quants(*kinds):
        return []
    compiled = context.release.source in release_request.COMPILED
    variables = None if compiled else remedies.listed(context.variables_of(context.release.id))
    cases: Cases = []
    for name in dict.fromkeys(device.host for device in context.used if backends.RECORDS[device.backend].all_quants):
        builds = context.plan.hosts[name].builds if name in context.plan.hosts else ()
        known = {
            option: build.cmake_options.get(option, "OFF")
            for build in builds
            if (option := backends.RECORDS[build.backend].all_quants)
        }
        if not known or not all(map(backends.is_on, known.values())):
            given = [option for option in known if option in context.cluster.every_host[name].cmake_options]
            values = {"type_k": kinds[0], "type_v": kinds[1], "option": remedies.listed(given) or None}
            cases.append((name, {**values, "variables": variables}))
    return cases


def _architecture(context: AdvisoryContext) -> capabilities.Appearance | None:
    """When the model's architecture appeared, where the build that serves is older or nobody knows."""
    release = context.release
    appeared = capabilities.appearance_of(context.summary.architecture, release.fork)
    patched = any(ARCHITECTURES_FILE in patch.files for patch in release.patches)
    has = appeared is None or release.build >= (appeared.oldest_with or math.inf)
    return None if has or patched else appeared


def unknown_architecture(context: AdvisoryContext) -> Cases:
    """A file that llama-server refuses when it starts, or may refuse since the architecture is new."""
    name, release, source = context.summary.architecture, context.release, context.cluster.model.source
    appeared = _architecture(context)
    if name in OLLAMA_ARCHITECTURES and source:
        values = {"who": "only Ollama has and llama.cpp does", "variable": source.variable, "variables": None}
    elif appeared and release.build < (appeared.oldest_with or appeared.newest_without + 1):
        who = f"build {release.build} {'does' if release.build <= appeared.newest_without else 'may'}"
        newer = f"build {appeared.oldest_with}, or a newer one," if appeared.oldest_with else "a newer build"
        variables = remedies.listed(context.variables_of(release.id))
        values = {"who": who, "variable": None, "newer": newer, "variables": variables}
    else:
        return []
    return [(context.plan.head.host, {**values, "architecture": name})]


def unread_model(context: AdvisoryContext) -> Cases:
    """An architecture or types that no build has which was read, and a build that is newer than those."""
    kinds = tensor_types.unknown_types({row.type for row in context.summary.named_tensors})
    unknown = _architecture(context) and not unknown_architecture(context)
    what = [f"the architecture {context.summary.architecture}"] * bool(unknown) + [f"tensors of {one}" for one in kinds]
    release = context.release
    values = {"what": remedies.listed(what), "build": release.build, "newest": capabilities.NEWEST[release.fork]}
    return [(context.plan.head.host, values)] if what else []


def missing_kernels(context: AdvisoryContext) -> Cases:
    """Devices whose backend does not multiply with tensors of the model: of a worker it ends, of the head the processor computes them."""
    kinds = {row.type for row in context.summary.named_tensors}
    cases: Cases = []
    for name, backend in dict.fromkeys((device.host, device.backend) for device in context.used):
        missing = sorted(kinds & backends.RECORDS[backend].no_kernels)
        host = context.cluster.hosts.get(name)
        if missing and context.release.mainline:
            has = {device.backend for device in host.facts.accelerators} if host else set()
            others = [one for one in has if not backends.RECORDS[one].no_kernels.intersection(missing)]
            instead = (*sorted(others), "cpu")[0] if host else None
            cases.append((name, {"backend": backend, "types": remedies.listed(missing), "instead": instead}))
    return cases


def unknown_variables(context: AdvisoryContext) -> Cases:
    return [
        (name, {"variable": variable, "meant": meant or "none", "similar": meant or None})
        for variable, meant in sorted(
            {pair for host in context.cluster.hosts.values() for pair in host.unknown_variables.items()}
        )
        for name, host in context.cluster.hosts.items()
        if host.unknown_variables.get(variable) == meant
    ]
