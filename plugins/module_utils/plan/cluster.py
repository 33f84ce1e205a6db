# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From inventory and facts to the plan: the whole intended state as data. Reads and writes nothing.

The plan depends on the inventory and on facts that stay the same from run to run; its form is described in docs/plan.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, gguf
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import (
    advisories,
    devices,
    equipment,
    estimate,
    layout,
    placement,
    releases,
    services,
    staging,
    tuning,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import head as heads
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import (
    Build,
    Catalogue,
    Cluster,
    Equipped,
    Facts,
    Host,
    Model,
    Release,
    Server,
    Worker,
)

SCHEMA = 1
KNOCKING_HOSTS = 2
"""So many other hosts try whether a worker's port is closed to them."""


def refused(cluster: str, refusal: Refusal) -> dict[str, Any]:
    """The plan of a refused cluster: only the reason."""
    name = gguf.printable(cluster)
    return {"schema": SCHEMA, "cluster": name, "refused": True, "fits": False, "reasons": [str(refusal)]}


def make(
    cluster: Cluster, model_found: Mapping[str, Any], catalogue: Catalogue, runtime_id: str, staged: bool = False
) -> dict[str, Any]:
    """The plan, or the reasons why there is none.

    :param model_found: what gguf_info reports of llama_model_path: ``summary`` and ``closed``; empty when nothing is known.
    :param runtime_id: identifies the runtime that is installed on hosts.
    :param staged: plan the instances that prove the release on the staging ports with the known-answer model, beside those that serve.
    :returns: the plan; when ``refused`` is true, ``reasons`` says why and nothing may be applied.
    """
    try:
        prepared = _prepare(staging.cluster_of(cluster) if staged else cluster, model_found, catalogue, staged)
        plan = _plan(prepared, runtime_id, staged)
    except Refusal as refusal:
        return refused(cluster.name, refusal)
    return _judge(plan, cluster.accepted)


def _judge(plan: dict[str, Any], accepted: frozenset[str]) -> dict[str, Any]:
    """The plan with ``accepted``, ``reasons`` and ``refused``, which follow from its advisories."""
    met = [{**advisory, "accepted": advisory["id"] in accepted} for advisory in plan["advisories"]]
    refusing: dict[str, list[dict[str, Any]]] = {}
    for advisory in met:
        if advisory["severity"] == "error" and not advisory["accepted"]:
            refusing.setdefault(advisory["id"], []).append(advisory)
    reasons = [
        f"{' '.join(dict.fromkeys(advisory[part] for part in ('message', 'remedy') for advisory in alike))} "
        f"To run it anyway, add {identifier} to llama_accept_advisories."
        for identifier, alike in refusing.items()
    ]
    reasons = [*plan["reasons"], *reasons]
    return {**plan, "advisories": met, "reasons": reasons, "refused": bool(reasons)}


class Prepared(NamedTuple):
    """All decisions from which the plan is written."""

    cluster: Cluster
    equipped: Mapping[str, Equipped]
    wanted: Mapping[str, Release]
    """Backend → release."""
    builds: Mapping[str, Mapping[str, Build]]
    """Host → backend → build."""
    serves: str
    """The backend whose llama-server runs."""
    model: Model
    placed: placement.Placed

    @property
    def head(self) -> Equipped:
        return self.equipped[self.cluster.head]

    @property
    def release(self) -> Release:
        return self.wanted[self.serves]


def _prepare(cluster: Cluster, model_found: Mapping[str, Any], catalogue: Catalogue, staged: bool) -> Prepared:
    built = _backends(cluster, catalogue)
    wanted = _releases(cluster, built)
    head = cluster.hosts[cluster.head]
    serves = heads.backend_of(cluster.server, built[head.name], {name for names in built.values() for name in names})
    secured = serves if cluster.server.tls else None
    equipped = {
        name: _equip(host, cluster.head, built[name], catalogue, wanted, secured)
        for name, host in cluster.hosts.items()
    }
    for backend, release in wanted.items():
        builders = [host for name, host in cluster.hosts.items() if backend in built[name]]
        releases.check(backend, release, {host.name: host.facts.architecture for host in builders})
    release = wanted[serves]
    bounded = advisories.VULKAN_MEMORY not in cluster.accepted
    own = devices.of_head(head, equipped[head.name].workers, serves, cluster.server.environment, bounded)
    fitting = {backend for backend in wanted if wanted[backend] == release}
    serving = _serving(equipped, cluster.server.backend or serves, fitting, staged)
    if staged:
        equipped = {
            name: entry._replace(workers=tuple(worker for worker in serving if worker.host == name))
            for name, entry in equipped.items()
        }
    declared = [worker for entry in equipped.values() for worker in entry.workers]
    _check_endpoints(declared)
    _check_names_of_the_head(head, equipped)
    builds = releases.builds(equipped, wanted, cluster.server, catalogue, secured)
    model = heads.model_of(cluster.model, model_found, head.facts)
    heads.check(head.name, cluster.server, equipped[head.name].workers, release)
    if declared and not serving:
        raise Refusal(
            f"the head serves with {serves}, and no worker has a build of the same release: set "
            "llama_server_backend to their backend, or llama_release to the same release for both"
        )
    lent = devices.of_workers(serving, cluster.hosts, release, bounded)
    placed = layout.lay_out(cluster.server, cluster.placement, model, release, [*lent, *own], head.name, head.facts)
    return Prepared(cluster, equipped, wanted, builds, serves, model, placed)


def _plan(prepared: Prepared, runtime_id: str, staged: bool) -> dict[str, Any]:
    """The plan with its advisories, before ``_judge``."""
    cluster, placed, model, release = prepared.cluster, prepared.placed, prepared.model, prepared.release
    placing = layout.as_json(placed, heads.as_planned(cluster.server) and release.mainline, cluster.server.load_mode)
    holders = [
        devices.holder(device, cluster.hosts[device.host].facts, entry["weights_mib"], entry["kv_mib"])
        for device, entry in zip(placed.devices, placing)
    ]
    plan: dict[str, Any] = {
        "schema": SCHEMA,
        "cluster": cluster.name,
        "staging": staged,
        "reasons": list(placed.reasons),
        "release": release.as_json(),
        "releases": {
            prepared.wanted[backend].id: prepared.wanted[backend].as_json()
            for entry in prepared.equipped.values()
            for backend in entry.backends
        },
        "model": {
            "path": model.path,
            "known_answer": model.known_answer._asdict() if model.known_answer else None,
            **{key: model.summary[key] for key in ("name", "architecture", "layers")},
        },
        "hosts": {name: _host(prepared, entry, runtime_id, staged) for name, entry in prepared.equipped.items()},
        "head": _head(prepared, holders, runtime_id, staged),
        "placement": placing,
        "fits": not placed.reasons,
        "links": [
            name
            for name, entry in prepared.equipped.items()
            if entry.workers and entry.host.links and name != cluster.head
        ],
        "fallbacks": [],
        "estimate": estimate.network(release, holders, cluster.hosts, bool(cluster.server.override_tensor)),
    }
    hosts = {name: {**host, "services": services.of_host(plan, name)} for name, host in plan["hosts"].items()}
    seen = advisories.Seen(plan, cluster, release, model.summary, holders)
    return {**plan, "hosts": hosts, "advisories": advisories.evaluate(seen)}


def _backends(cluster: Cluster, catalogue: Catalogue) -> dict[str, tuple[str, ...]]:
    """Host → the backends that it builds for."""
    sources = releases.sources_of(cluster.releases)
    return {
        name: equipment.backends_of(
            host, sources, catalogue.llama.get(host.facts.distribution.family, {"libraries": {}})["libraries"]
        )
        for name, host in cluster.hosts.items()
    }


def _backends_in_use(built: Mapping[str, Sequence[str]]) -> list[str]:
    return [backend for backend in backends.BACKENDS if any(backend in own for own in built.values())]


def _releases(cluster: Cluster, built: Mapping[str, Sequence[str]]) -> dict[str, Release]:
    facts = {name: host.facts for name, host in cluster.hosts.items()}
    return releases.of_backends(cluster.releases, facts, _backends_in_use(built))


def release_variables(cluster: Cluster, catalogue: Catalogue) -> list[str]:
    """The variables of the head that give a release of which some host has a build: what the controller has to look up.

    :raises Refusal: hosts give different releases, or a release has no valid form.
    """
    _check_same_release(cluster)
    used = _backends_in_use(_backends(cluster, catalogue))
    return list(dict.fromkeys(releases.variable_of(backend, cluster.releases) for backend in used))


def _check_same_release(cluster: Cluster) -> None:
    """All hosts must give the same releases as the head."""
    for name, host in cluster.hosts.items():
        for variable, value in host.releases.items():
            if value != cluster.releases[variable]:
                raise Refusal(
                    f"{variable} of {name} differs from that of the head {cluster.head}, and head and workers need the same release: set it "
                    "for the whole group, or llama_release_<backend> where backends differ"
                )


def _equip(
    host: Host,
    head: str,
    built: tuple[str, ...],
    catalogue: Catalogue,
    wanted: Mapping[str, Release],
    secured: str | None,
) -> Equipped:
    """The host with its workers and the tools that it needs.

    :param secured: backend of the llama-server that speaks TLS.
    """
    facts = host.facts
    for account, home in facts.accounts.items():
        if facts.scope == "system" and account in (names.ACCOUNT, names.BUILD_ACCOUNT) and home != facts.prefix:
            raise Refusal(
                f"{host.name} already has an account {account}, with the home {home}: services run as {account}, so rename that account"
            )
    manager = service_managers.MANAGERS[facts.service_manager]
    if not manager.host_settings and any(link.manage for link in host.links):
        raise Refusal(
            f"llama_links of {host.name} has manage: true, which needs systemd and root: configure the interface yourself, and "
            "set manage: false"
        )
    declared = workers.workers_of(host, built, head) if host.is_worker else []
    return Equipped(
        host=host,
        backends=built,
        tools=equipment.tools_of(host, built, catalogue, wanted, secured),
        optional_tools=equipment.optional_tools_of(host, catalogue, {wanted[backend].source for backend in built}),
        workers=tuple(
            workers.with_one_visible_device(worker, wanted[worker.build], len(facts.of_backend(worker.backend)))
            for worker in declared
        ),
    )


def _serving(equipped: Mapping[str, Equipped], backend: str, fitting: set[str], staged: bool) -> list[Worker]:
    """The workers that the head may use, for staging with their two ports exchanged.

    :param fitting: backends whose release is the head's.
    """
    serving = [
        worker
        for entry in equipped.values()
        for worker in workers.usable(entry.workers, entry.backends, backend, fitting)
    ]
    return [workers.on_its_staging_port(worker) for worker in serving] if staged else serving


def _check_endpoints(declared: Sequence[Worker]) -> None:
    owners: dict[str, str] = {}
    for worker in declared:
        other = owners.setdefault(worker.endpoint, worker.host)
        if other != worker.host:
            raise Refusal(
                f"{worker.host} and {other} both have the worker {worker.endpoint}: give each host its own address "
                "in ansible_host or llama_links"
            )


def _check_names_of_the_head(head: Host, equipped: Mapping[str, Equipped]) -> None:
    """Refuses a head that is in the inventory twice: it would use its devices twice, itself and through workers."""
    for name, entry in equipped.items():
        if name == head.name or not entry.workers:
            continue
        address = workers.address_of(head, name)
        if entry.workers[0].address == address:
            raise Refusal(
                f"{name} has the address {address}, which is that of the head {head.name}: remove {name} from the inventory, and add "
                f"{head.name} itself to llama_workers if it lends its devices"
            )


def _head(prepared: Prepared, holders: Sequence[devices.Holder], runtime_id: str, staged: bool) -> dict[str, Any]:
    server, facts, placed = prepared.cluster.server, prepared.head.host.facts, prepared.placed
    build = prepared.builds[prepared.cluster.head][prepared.serves]
    serving = heads.Serving(
        server=server._replace(load_mode=heads.load_mode_of(server.load_mode, prepared.release, holders)),
        host=prepared.head.host,
        release=prepared.release,
        model=prepared.model,
        placed=placed,
        build=build.id,
        runtime=_runtime(facts, runtime_id),
        state=_state_folder(facts, staged),
        service=heads.STAGED_SERVICE if staged else heads.SERVICE,
    )
    own = devices.environment_of_head(
        facts, prepared.head.workers, prepared.serves, bool(placed.own()), bool(placed.lent())
    )
    environment = {**backends.service_environment(build.backend, build.environment), **own}
    return heads.plan_of(serving, environment)


def _runtime(facts: Facts, runtime_id: str) -> str:
    return f"{facts.prefix}/runtime/{runtime_id}"


def _state_folder(facts: Facts, staged: bool) -> str:
    return f"{facts.prefix}/state{'/staging' if staged else ''}"


def _host(prepared: Prepared, entry: Equipped, runtime_id: str, staged: bool) -> dict[str, Any]:
    """The plan's part for a host."""
    host, facts = entry.host, entry.host.facts
    is_head, system = host.name == prepared.cluster.head, facts.scope == "system"
    sources = {prepared.wanted[backend].source for backend in entry.backends}
    needs_runtime = is_head or any(worker.cache for worker in entry.workers)
    built = prepared.builds[host.name]
    accounts = _accounts(facts, sources) if system else []
    return {
        **{key: getattr(facts, key) for key in ("scope", "prefix", "cache", "python", "service_manager", "units")},
        "account": names.ACCOUNT if system else None,
        "accounts": accounts,
        "build_account": accounts[-1]["name"] if accounts else None,
        "host_settings": service_managers.MANAGERS[facts.service_manager].host_settings,
        "folders": _folders(facts, names.ACCOUNT if system else None, sources),
        "tuning": _tuning(host),
        "runtime": _runtime(facts, runtime_id) if needs_runtime else None,
        "tools": entry.tools,
        "optional_tools": entry.optional_tools,
        "unused_accelerators": [] if sources == {"binary"} else equipment.unused_accelerators(host, entry.backends),
        "builds": [build.as_json() for build in built.values() if build.targets],
        "keep_releases": host.keep_releases,
        "workers": [_worker(prepared, worker, facts) for worker in entry.workers],
        "firewall": _door(prepared.cluster.server) if is_head else _firewall(prepared.head.host, entry.workers),
        "firewall_manager": facts.firewall if system else None,
        "unit_closes": _unit_closes(facts),
        "knocks": [] if staged else _knocks(prepared, entry),
        "links": [link._asdict() for link in host.links],
        "state": _state_folder(facts, staged),
    }


def _worker(prepared: Prepared, worker: Worker, facts: Facts) -> dict[str, Any]:
    release = prepared.wanted[worker.build]
    shown = ("name", "endpoint", "staging_port", "backend", "device", "shared", "cache", "cache_mib")
    build = prepared.builds[worker.host][worker.build]
    return {
        **{key: getattr(worker, key) for key in shown},
        "environment": {**backends.service_environment(build.backend, build.environment), **worker.environment},
        "used": worker.endpoint in {used.endpoint for used in prepared.placed.lent()},
        "protocol": release.protocol,
        "argv": workers.argv_of(worker, build, release, facts.prefix + "/releases"),
    }


def _firewall(head: Host, declared: Sequence[Worker]) -> list[dict[str, Any]]:
    """Both ports of each worker are open to the head alone."""
    return [
        {
            "port": port,
            "protocol": "tcp",
            "sources": [workers.address_of(head, worker.host)],
            "address": worker.address,
        }
        for worker in declared
        for port in (worker.port, worker.staging_port)
    ]


def _door(server: Server) -> list[dict[str, Any]]:
    """The server's port is open to the networks of its clients; nothing where it listens on loopback, or nobody says whose they are."""
    if not server.allowed or heads.is_local(server):
        return []
    sources = [network.removesuffix("/32") for network in server.allowed]
    return [{"port": server.port, "protocol": "tcp", "sources": sources, "address": server.host}]


def _unit_closes(facts: Facts) -> bool:
    """Whether the definition of a service closes its port to those who are not planned to connect."""
    return bool(service_managers.MANAGERS[facts.service_manager].closes_ports_by and facts.units_filter)


def _knocks(prepared: Prepared, entry: Equipped) -> list[str]:
    """Endpoints that are closed to this host: its own ones to its other addresses, and those of the hosts after it."""
    name = entry.host.name
    if name == prepared.cluster.head:
        return []
    names = [other for other in prepared.equipped if other != prepared.cluster.head]
    place = names.index(name)
    following = [prepared.equipped[other] for other in [*names[place + 1 :], *names[:place]][:KNOCKING_HOSTS]]
    closed = [other for other in following if _unit_closes(other.host.facts) or other.host.facts.firewall]
    own = [entry] if _unit_closes(entry.host.facts) else []
    return [worker.endpoint for other in [*own, *closed] for worker in other.workers]


def _accounts(facts: Facts, sources: set[str]) -> list[dict[str, Any]]:
    """The account of services, and the one that builds where something is compiled."""
    serves = {"name": names.ACCOUNT, "groups": list(facts.device_groups)}
    return [serves, *([{"name": names.BUILD_ACCOUNT, "groups": []}] if sources & set(releases.COMPILED) else [])]


def _tuning(host: Host) -> dict[str, Any]:
    """Kernel parameters and profile of tuned, if asked for, and whether the run may reboot the host for them."""
    if not host.tuning.wanted:
        return {"parameters": {}, "profile": "", "reboot": False}
    if not service_managers.MANAGERS[host.facts.service_manager].host_settings:
        raise Refusal(f"llama_host_tuning of {host.name} is set, which needs systemd and root: leave it out there")
    drivers = {
        backends.RECORDS[accelerator.backend].kernel_driver
        for accelerator in host.facts.accelerators
        if accelerator.unified
    }
    if tuning.DRIVER not in drivers:
        raise Refusal(
            f"llama_host_tuning of {host.name} is set, but the host has no AMD graphics with shared memory: leave it out, or declare the device "
            "in llama_hardware"
        )
    try:
        parameters = tuning.parameters(host.facts.memory_mib, host.tuning.gtt_mib)
    except ValueError as error:
        raise Refusal(f"llama_host_tuning_gtt_mib of {host.name} is not possible: {error}") from None
    return {"parameters": parameters, "profile": host.tuning.profile, "reboot": host.tuning.reboot}


def _folders(facts: Facts, account: str | None, sources: set[str]) -> list[dict[str, Any]]:
    """Folders of the installation: path, owner and mode; the service manager's own is only made where it is missing."""
    prefix, root = facts.prefix, "root" if account else None
    paths = [
        (prefix, root, "0755"),
        (prefix + "/models", root, "0755"),
        (prefix + "/state", account, "0750"),
        (facts.units, None, None),
    ]
    if sources != {"package"}:
        mode = (
            "0755" if account else "0700"
        )  # the controller's own cache, which is private, where it is this account's host
        paths += [(facts.cache, root, mode), (facts.cache + "/sources", root, mode)]
    return [{"path": path, "owner": owner, "mode": mode} for path, owner, mode in paths]
