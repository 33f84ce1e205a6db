# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the remedies of advisories may be carried out on the cluster that is planned, each as remedies.Fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import compute_buffers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters, server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server as heads
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import (
    AdvisoryContext,
    Change,
    Finding,
    Fix,
    Fixes,
    Remedy,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import auxiliary_models
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Host


def always(text: str, *changes: Callable[[AdvisoryContext, Finding], Change]) -> Remedy:
    """A remedy that every plan with the advisory may use.

    :param changes: none where planning cannot try it, or where there is nothing to choose from.
    """
    return Remedy(text, lambda context, finding: [Fix({}, tuple(change(context, finding) for change in changes))])


def server_becomes(**fields: Any) -> Callable[[AdvisoryContext, Finding], Change]:
    return lambda _context, _finding: remedies.serving(**fields)


def accept(text: str) -> Remedy:
    return Remedy(text, lambda _context, _finding: [Fix({}, accepts=True)])


def serve_by(backend: str) -> Fixes:
    """The head uses the workers of another backend that the hosts build for already."""

    def fixes(context: AdvisoryContext, finding: Finding) -> list[Fix]:
        built = all(backend in context.backends_of(name) for name in finding.hosts)
        return [Fix({"backend": backend}, (remedies.serving(backend=backend),))] if built else []

    return fixes


def build_for(backend: str) -> Fixes:
    """The hosts build for another backend that drives the same devices."""

    def fixes(context: AdvisoryContext, finding: Finding) -> list[Fix]:
        new = not any(backend in context.backends_of(name) for name in finding.hosts)
        return remedies.other_backends(context.cluster, finding.hosts, [backend]) if new else []

    return fixes


def modes_without_mmap(context: AdvisoryContext, _finding: Finding) -> list[Fix]:
    mode = heads.unmapped_mode(context.release)
    return [Fix({"mode": mode}, (remedies.serving(load_mode=mode),))]


def knowing_architecture(context: AdvisoryContext, _finding: Finding) -> list[Fix]:
    release = f"a build that knows it, which is newer than {capabilities.OLDEST[capabilities.MAINLINE]}"
    return [Fix({"variables": remedies.listed(context.release_variables), "release": release})]


EXTENDING = ("--rope-scal", "--rope-freq-", "--yarn-orig-ctx")
"""How options of llama-server begin with which a model serves a longer context than it was trained for."""


def shorter_context(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    return [Fix({}, (remedies.serving(context=finding.values["context"]),))]


def extended_context(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    """Where the operator extends the model: llama-server keeps to what the file says of it."""
    if not any(option in word for word in context.server.extra_args for option in EXTENDING):
        return []
    added = ("--override-kv", f"{finding.values['key']}=int:{finding.values['wanted']}")
    return [Fix({}, (remedies.serving(extra_args=(*context.server.extra_args, *added)),))]


def one_cache(context: AdvisoryContext, _finding: Finding) -> list[Fix]:
    return [Fix({}, (remedies.serving(extra_args=(*context.server.extra_args, "--kv-unified")),))]


MICRO_BATCHES = (256, 128, 64)
ATTENTION_BATCH = "256"
"""MiB; the default of newer commits of ik_llama.cpp."""


def smaller_buffers(context: AdvisoryContext, _finding: Finding) -> Iterator[Fix]:
    """What makes compute buffers smaller, the mildest first; each comes on top of those before it, but for a smaller micro-batch."""
    server, summary, fork = context.server, context.summary, context.release.fork
    settings = server_settings.settings_of(server, summary, fork)
    steps: list[str] = []
    fields: dict[str, Any] = {}

    def fix(step: str, **more: Any) -> Fix:
        return Fix({"smaller": ", and ".join([*steps, step])}, (remedies.serving(**fields, **more),))

    def take(step: str, **more: Any) -> Fix:
        found = fix(step, **more)
        steps.append(step)
        fields.update(more)
        return found

    if not compute_buffers.uses_flash(summary, settings):
        yield take("set llama_server_flash_attention to 'on'", flash_attention="on")
    if fork == options.IK_LLAMA and not 0 < (settings.attention_batch or 0) <= int(ATTENTION_BATCH):
        words = ("-amb", ATTENTION_BATCH)
        yield take(f"add {' '.join(words)} to llama_server_extra_args", extra_args=(*server.extra_args, *words))
    for tokens in MICRO_BATCHES:
        if tokens < settings.tokens:
            yield fix(f"set llama_server_micro_batch to {tokens}", micro_batch=tokens)
    least = min(settings.tokens, MICRO_BATCHES[-1])
    take(f"set llama_server_micro_batch to {least}", micro_batch=least)
    for tokens in remedies.shorter_contexts(settings.context, server.parallel):
        yield fix(f"set llama_server_context to {tokens}", context=tokens)
    yield Fix({"smaller": "use a smaller model, or devices with more memory"})


def unified_heap(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    """Of workers in their endpoints, of the head's own devices in the environment of llama-server."""
    option = {backends.UNIFIED_HEAP: "true"}
    lending = [
        name for name in finding.hosts if any(device.host == name and device.endpoint for device in context.used)
    ]
    own = any(device.host in finding.hosts and not device.endpoint for device in context.used)
    places = [f"environment in llama_worker_endpoints of {remedies.listed(lending)}"] * bool(lending)
    places += ["llama_server_environment"] * own

    def lend(host: Host) -> Host:
        declared = len(context.plan.hosts[host.name].workers)
        return remedies.with_environment(host, declared, option)

    def change(cluster: Cluster) -> Cluster:
        cluster = remedies.on_hosts(lending, lend)(cluster)
        return remedies.serving(environment={**cluster.server.environment, **option})(cluster) if own else cluster

    return [Fix({"places": " and in ".join(places)}, (change,))]


def root(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    known = [context.cluster.places[name].facts for name in finding.hosts]
    possible = all(facts.system == "Linux" and facts.service_manager == "systemd_user" for facts in known)
    return [Fix({}, (remedies.with_facts(finding.hosts, remedies.with_root),))] if possible else []


def firewalls(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    change = remedies.with_facts(finding.hosts, lambda facts: facts._replace(firewall=names.FIREWALLS[0]))
    possible = all(context.plan.hosts[name].host_settings for name in finding.hosts)
    return [Fix({"managers": remedies.listed(names.FIREWALLS, "or")}, (change,))] if possible else []


def compiled_source(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    if context.release.source in release_request.COMPILED:
        return []
    variables = context.release_variables
    number = context.release.build or context.generation
    return [
        Fix({"variables": remedies.listed(variables)}, (remedies.releasing(variables, release_request.tagged(number)),))
    ]


def encrypted(context: AdvisoryContext, _finding: Finding) -> list[Fix]:
    """Where the head can have ends of tunnels. Nothing is tried: that would plan nearly each cluster twice."""
    return [Fix({})] if context.cluster.hosts[context.cluster.head].facts.system == service_managers.LINUX else []


def kernels(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    """Kernels of flash attention for all types, where the operator's options alone keep them out."""
    names_of_options = {record.all_quants for record in backends.RECORDS.values() if record.all_quants}
    return [
        Fix({"option": option}, (remedies.on_hosts(finding.hosts, _without_cmake(option)),))
        for option in sorted(names_of_options)
        if all(option in context.cluster.places[name].cmake_options for name in finding.hosts)
    ]


def _without_cmake(option: str) -> Callable[[Host], Host]:
    return lambda host: host._replace(cmake_options=_without(host.cmake_options, option))


def _without(options_given: Mapping[str, str], option: str) -> dict[str, str]:
    return {name: value for name, value in options_given.items() if name != option}


def without_placing(context: AdvisoryContext, _finding: Finding) -> list[Fix]:
    """Without the options that say where a model beside the one that is served is."""
    server = context.server
    placing = [options.of_name(name) for names in auxiliary_models.PLACING.values() for name in names]
    words = [word for word in server.extra_args if options.of_word(word) in placing]
    variables = [name for name in server.environment if options.of_variable(name) in placing]
    if not words and not variables:
        return []
    change = remedies.serving(
        extra_args=tuple(_without_options(server.extra_args, [options.normalize(word) for word in words])),
        environment={name: value for name, value in server.environment.items() if name not in variables},
    )
    return [Fix({"word": remedies.listed([*words, *variables])}, (change,))]


def _without_options(arguments: Sequence[str], words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    has_value = False
    for word in arguments:
        if options.normalize(word) in words:
            has_value = "=" not in word
        elif has_value and not word.startswith("-"):
            has_value = False
        else:
            kept.append(word)
    return kept


def tuned(by_the_run: bool) -> Fixes:
    """Kernel parameters, set by the run, or by hand where it has neither root nor systemd."""

    def fixes(context: AdvisoryContext, finding: Finding) -> list[Fix]:
        if by_the_run != all(context.plan.hosts[name].host_settings for name in finding.hosts):
            return []
        given = kernel_parameters.parameters(finding.values["memory"])
        return [Fix({"parameters": " ".join(f"{name}={value}" for name, value in given.items())})]

    return fixes


def maintained(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    wanted = sorted(backends.IK_LLAMA_MAINTAINED, key=lambda name: backends.RECORDS[name].preference)
    return remedies.other_backends(context.cluster, finding.hosts, wanted)


def switch_to_mainline(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    variables = finding.values.get("variables", context.release_variables)
    newest = remedies.releasing(variables, release_request.tagged(remedies.newest_known()))
    return [Fix({"variables": remedies.listed(variables)}, (newest,))]


def further_backends(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    """Of the idle devices, beside those that are built for already."""
    kept = tuple(name for name in context.backends_of(finding.hosts[0]) if name != backends.CPU.name)
    wanted = [name for name in backends.PREFERRED if name in finding.values["kinds"]]
    return [
        Fix({"backend": remedies.as_list((*kept, name))}, (remedies.building(finding.hosts, (*kept, name)),))
        for name in wanted
    ]


def built_backends(context: AdvisoryContext, finding: Finding) -> list[Fix]:
    return [Fix({}, (remedies.building(finding.hosts, context.backends_of(finding.hosts[0])),))]


def toolkits(_context: AdvisoryContext, finding: Finding) -> list[Fix]:
    """What compiles for the best backend of the idle devices."""
    fixes = []
    for backend in backends.PREFERRED:
        toolkit = backends.RECORDS[backend].toolkit
        if not toolkit or backend not in finding.values["kinds"]:
            continue
        wanted = dict.fromkeys([*backends.tools(backend), *backends.libraries(backend)], "1")
        wanted[toolkit.command] = toolkit.declared
        change = remedies.with_facts(finding.hosts, _with_tools(wanted))
        parts = [toolkit.title, *backends.libraries(backend)]
        fixes.append(Fix({"toolkit": remedies.listed(parts)}, (change,)))
    return fixes


def _with_tools(tools: Mapping[str, str]) -> Callable[[Facts], Facts]:
    def change(facts: Facts) -> Facts:
        present = {tool: version for tool, version in facts.toolchain.items() if version}
        return facts._replace(toolchain={**tools, **present}, toolchains=None)

    return change


def similar_name(_context: AdvisoryContext, finding: Finding) -> list[Fix]:
    return [Fix({})] if finding.values["meant"] != "none" else []


def no_similar_name(_context: AdvisoryContext, finding: Finding) -> list[Fix]:
    return [Fix({})] if finding.values["meant"] == "none" else []
