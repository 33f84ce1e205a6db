# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the remedies of advisories may be carried out on the cluster that is planned, each as remedies.Way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server as heads
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import Seen
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.remedies import Change, Remedy, Way
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import auxiliary_models
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Endpoint, Facts, Host

Ways = Callable[[Seen, Sequence[str], Mapping[str, Any]], Iterable[Way]]
"""From what is seen, the hosts concerned and the values of the advisory."""

LARGEST_MTU = 65522
"""Of a Thunderbolt link between hosts (docs.kernel.org/admin-guide/thunderbolt.html)."""


def always(text: str, *changes: Callable[[Seen, Sequence[str]], Change]) -> Remedy:
    """A remedy that every plan with the advisory may use.

    :param changes: what each of the hosts concerned becomes; without one it is something that planning cannot try.
    """
    return Remedy(text, lambda seen, hosts, _values: [Way({}, tuple(change(seen, hosts) for change in changes))])


def facts_become(**fields: Any) -> Callable[[Seen, Sequence[str]], Change]:
    return lambda _seen, hosts: remedies.with_facts(hosts, lambda facts: facts._replace(**fields))


def server_becomes(**fields: Any) -> Callable[[Seen, Sequence[str]], Change]:
    return lambda _seen, _hosts: remedies.serving(**fields)


def accept(text: str) -> Remedy:
    """A remedy that is enough for the operator to accept the advisory."""
    return Remedy(text, lambda _seen, _hosts, _values: [Way({}, accepts=True)])


def newer(first: int) -> Ways:
    """Releases of the serving backend from a build on."""
    return lambda seen, _hosts, _values: remedies.newer_releases(seen.cluster, seen.release_variables, first)


def outside(first: int, last: int) -> Ways:
    return lambda seen, _hosts, _values: remedies.releases_outside(seen.cluster, seen.release_variables, first, last)


def patch_of(path: str) -> Ways:
    """A patch of a file of the tree, where the hosts compile it."""

    def ways(seen: Seen, _hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
        variables = seen.release_variables
        request = remedies.patched(seen.cluster.releases[variables[0]], path)
        compiled = seen.release.source in release_request.COMPILED
        shown = {"variables": remedies.listed(variables)}
        return [Way(shown, (remedies.releasing(variables, request),))] if compiled else []

    return ways


def safe_releases(seen: Seen, _hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    return remedies.newer_releases(seen.cluster, values["variables"], capabilities.SECURITY_FLOOR)


def serve_by(backend: str) -> Ways:
    """The head uses the workers of another backend that the hosts build for already."""

    def ways(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
        built = all(backend in seen.backends_of(name) for name in hosts)
        return [Way({"backend": backend}, (remedies.serving(backend=backend),))] if built else []

    return ways


def build_for(backend: str) -> Ways:
    """The hosts build for another backend that drives the same devices."""

    def ways(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
        new = not any(backend in seen.backends_of(name) for name in hosts)
        return remedies.other_backends(seen.cluster, hosts, [backend]) if new else []

    return ways


def modes_without_mmap(seen: Seen, _hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    mode = heads.unmapped_mode(seen.release)
    return [Way({"mode": mode}, (remedies.serving(load_mode=mode),))]


EXTENDING = ("--rope-scal", "--rope-freq-", "--yarn-orig-ctx")
"""How options of llama-server begin with which a model serves a longer context than it was trained for."""


def shorter_context(_seen: Seen, _hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    return [Way({}, (remedies.serving(context=values["context"]),))]


def extended_context(seen: Seen, _hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    """Where the operator extends the model: llama-server keeps to what the file says of it."""
    if not any(option in word for word in seen.server.extra_args for option in EXTENDING):
        return []
    added = ("--override-kv", f"{values['key']}=int:{values['wanted']}")
    return [Way({}, (remedies.serving(extra_args=(*seen.server.extra_args, *added)),))]


def one_cache(seen: Seen, _hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    return [Way({}, (remedies.serving(extra_args=(*seen.server.extra_args, "--kv-unified")),))]


def unified_heap(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    """Of workers in their endpoints, of the head's own devices in the environment of llama-server."""
    option = {backends.UNIFIED_HEAP: "true"}
    lending = [name for name in hosts if any(device.host == name and device.endpoint for device in seen.used)]
    own = any(device.host in hosts and not device.endpoint for device in seen.used)
    places = [f"environment in llama_worker_endpoints of {remedies.listed(lending)}"] * bool(lending)
    places += ["llama_server_environment"] * own

    def lend(host: Host) -> Host:
        return remedies.with_environment(host, len(seen.plan.hosts[host.name].workers), option)

    def change(cluster: Cluster) -> Cluster:
        cluster = remedies.on_hosts(lending, lend)(cluster)
        return remedies.serving(environment={**cluster.server.environment, **option})(cluster) if own else cluster

    return [Way({"places": " and in ".join(places)}, (change,))]


def root(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    known = [seen.cluster.places[name].facts for name in hosts]
    possible = all(facts.system == "Linux" and facts.service_manager == "systemd_user" for facts in known)
    return [Way({}, (remedies.with_facts(hosts, remedies.with_root),))] if possible else []


def firewalls(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    change = remedies.with_facts(hosts, lambda facts: facts._replace(firewall=names.FIREWALLS[0]))
    possible = all(seen.plan.hosts[name].host_settings for name in hosts)
    return [Way({"managers": remedies.listed(names.FIREWALLS, "or")}, (change,))] if possible else []


def compiled_source(seen: Seen, _hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    """The same build, compiled on the hosts."""
    if seen.release.source in release_request.COMPILED:
        return []
    variables = seen.release_variables
    number = seen.release.build or seen.generation
    return [Way({"variables": remedies.listed(variables)}, (remedies.releasing(variables, f"b{number}"),))]


def kernels(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    """Kernels of flash attention for all types, where the operator's options alone keep them out."""
    names_of_options = {record.all_quants for record in backends.RECORDS.values() if record.all_quants}
    return [
        Way({"option": option}, (remedies.on_hosts(hosts, _without_cmake(option)),))
        for option in sorted(names_of_options)
        if all(option in seen.cluster.places[name].cmake_options for name in hosts)
    ]


def _without_cmake(option: str) -> Callable[[Host], Host]:
    return lambda host: host._replace(cmake_options=_without(host.cmake_options, option))


def _without(options_given: Mapping[str, str], option: str) -> dict[str, str]:
    return {name: value for name, value in options_given.items() if name != option}


def without_arguments(words: Sequence[str], variables: Sequence[str]) -> Ways:
    """llama-server without these options and their values, and without these variables of its environment."""

    def change(cluster: Cluster) -> Cluster:
        given = cluster.server.environment
        environment = {name: value for name, value in given.items() if name not in variables}
        arguments = tuple(_without_options(cluster.server.extra_args, words))
        return remedies.serving(extra_args=arguments, environment=environment)(cluster)

    return lambda _seen, _hosts, _values: [Way({}, (change,))]


def without_placing(seen: Seen, _hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    """Without the options that say where a model beside the one that is served is."""
    server = seen.server
    placing = [options.of_name(name) for names in auxiliary_models.PLACING.values() for name in names]
    words = [word for word in server.extra_args if options.of_word(word) in placing]
    variables = [name for name in server.environment if options.of_variable(name) in placing]
    plain = [options.normalize(word) for word in words]
    ways = without_arguments(plain, variables)(seen, _hosts, _values)
    return [way._replace(values={"word": remedies.listed([*words, *variables])}) for way in ways if words or variables]


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


def packets(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    def change(host: Host) -> Host:
        return host._replace(
            links=tuple(link._replace(mtu=LARGEST_MTU) if link.manage else link for link in host.links)
        )

    return [Way({"mtu": LARGEST_MTU}, (remedies.on_hosts(hosts, change),))]


def tuned(by_the_run: bool) -> Ways:
    """Kernel parameters, set by the run, or by hand where it has neither root nor systemd."""

    def ways(seen: Seen, hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
        if by_the_run != all(seen.plan.hosts[name].host_settings for name in hosts):
            return []
        given = kernel_parameters.parameters(values["memory"])
        shown = {"parameters": " ".join(f"{name}={value}" for name, value in given.items())}
        wanted = remedies.on_hosts(
            hosts, lambda host: host._replace(tuning=host.tuning._replace(wanted=True, gtt_mib=None, reboot=True))
        )
        by_hand = remedies.with_facts(
            hosts, lambda facts: kernel_parameters.lending(facts, facts.memory_mib - kernel_parameters.KEPT_MIB)
        )
        return [Way(shown, (wanted if by_the_run else by_hand,))]

    return ways


def maintained(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    wanted = sorted(backends.IK_LLAMA_MAINTAINED, key=lambda name: backends.RECORDS[name].preference)
    return remedies.other_backends(seen.cluster, hosts, wanted)


def of_llama_cpp(seen: Seen, _hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    variables = seen.release_variables
    newest = remedies.releasing(variables, f"b{remedies.newest_known()}")
    return [Way({"variables": remedies.listed(variables)}, (newest,))]


def further_backends(seen: Seen, hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    """Of the idle devices, beside those that are built for already."""
    kept = tuple(name for name in seen.backends_of(hosts[0]) if name != backends.CPU.name)
    wanted = [name for name in backends.PREFERRED if name in values["kinds"]]
    return [
        Way({"backend": remedies.as_list((*kept, name))}, (remedies.building(hosts, (*kept, name)),)) for name in wanted
    ]


def built_backends(seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    return [Way({}, (remedies.building(hosts, seen.backends_of(hosts[0])),))]


def toolkits(_seen: Seen, hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    """What compiles for the best backend of the idle devices."""
    ways = []
    for backend in backends.PREFERRED:
        toolkit = backends.RECORDS[backend].toolkit
        if not toolkit or backend not in values["kinds"]:
            continue
        wanted = dict.fromkeys([*backends.tools(backend), *backends.libraries(backend)], "1")
        wanted[toolkit.command] = toolkit.declared
        change = remedies.with_facts(hosts, _with_tools(wanted))
        parts = [toolkit.title, *backends.libraries(backend)]
        ways.append(Way({"toolkit": remedies.listed(parts)}, (change,)))
    return ways


def _with_tools(tools: Mapping[str, str]) -> Callable[[Facts], Facts]:
    def change(facts: Facts) -> Facts:
        present = {tool: version for tool, version in facts.toolchain.items() if version}
        return facts._replace(toolchain={**tools, **present}, toolchains=None)

    return change


def smaller_buffers(seen: Seen, _hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    """The settings that the condition has computed; without any there is nothing to try."""
    given: Mapping[str, Any] = values["settings"]
    arguments = (*seen.server.extra_args, *given.get("extra_args", ()))
    return [Way({}, (remedies.serving(**{**given, "extra_args": arguments}),) if given else ())]


def known_variables(renamed: bool) -> Ways:
    """The name that was meant, or none where no name of ours is like it."""

    def ways(_seen: Seen, hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
        variable = values["variable"]
        change = remedies.on_hosts(
            hosts, lambda host: host._replace(unknown_variables=_without(host.unknown_variables, variable))
        )
        return [Way({}, (change,))] if renamed == (values["meant"] != "none") else []

    return ways


def known_ids(renamed: bool) -> Ways:
    """The advisory's id that was meant, or none where no id is like it."""

    def ways(_seen: Seen, _hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
        unknown, meant = values["identifier"], values["meant"]
        new = frozenset([meant] if renamed else [])

        def change(cluster: Cluster) -> Cluster:
            return cluster._replace(accepted=cluster.accepted - {unknown} | new)

        return [Way({}, (change,))] if not renamed or meant != "none" else []

    return ways


def sized_devices(_seen: Seen, hosts: Sequence[str], _values: Mapping[str, Any]) -> list[Way]:
    """With some memory."""

    def change(facts: Facts) -> Facts:
        sized = (device._replace(memory_mib=device.memory_mib or facts.memory_mib) for device in facts.accelerators)
        return facts._replace(accelerators=tuple(sized))

    return [Way({}, (remedies.with_facts(hosts, change),))]


def without_option(_seen: Seen, hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    return [Way({}, (remedies.on_hosts(hosts, _without_cmake(values["option"])),))]


def releases_with_option(seen: Seen, _hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    first, last = backends.OPTION_BUILDS[values["option"]]
    variables = values["variables"]
    return [
        Way({"variables": remedies.listed(variables)}, (remedies.releasing(variables, f"b{build}"),))
        for build in (last, max(first, capabilities.SECURITY_FLOOR), first)
        if build and first <= build <= (last or build)
    ]


def smaller_shares(_seen: Seen, hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    """Less memory for each worker of these hosts."""
    most = values["crashed"] - 1

    def change(host: Host) -> Host:
        endpoints = host.endpoints or (Endpoint(),)
        return host._replace(
            endpoints=tuple(entry._replace(memory_mib=min(entry.memory_mib or most, most)) for entry in endpoints)
        )

    def of_others(cluster: Cluster) -> Cluster:
        external = tuple(
            own._replace(memory_mib=min(own.memory_mib, most)) if own.host in hosts else own for own in cluster.external
        )
        return cluster._replace(external=external)

    return [Way({"mib": most}, (lambda cluster: of_others(remedies.on_hosts(hosts, change)(cluster)),))]


def other_toolkit(_seen: Seen, hosts: Sequence[str], values: Mapping[str, Any]) -> list[Way]:
    """Another installed toolkit."""
    return [Way({}, (remedies.on_hosts(hosts, lambda host: host._replace(toolchain=values["other"])),))]
