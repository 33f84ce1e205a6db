# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The services of a host, as its service manager needs them."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    HostPlan,
    ServiceFallback,
    ServicePlan,
    WorkerPlan,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import DevicePlacement, Plan

CREDENTIALS = {"api-keys": "api_key_file", "tls-certificate": "tls_certificate_file", "tls-key": "tls_key_file"}
"""Name of a credential → field of Server, and key of the head's plan, with the file on the head."""


def placements_of(plan: Plan) -> list[Sequence[DevicePlacement]]:
    """The placement that is planned, and those that the head may fall back to."""
    fallbacks = plan.fallbacks if plan.head.fallback_after is not None else []
    return [*(model_plan.placement for model_plan in plan.per_model()), *(fallback.placement for fallback in fallbacks)]


def needs_launcher(manager: str, cache: bool) -> bool:
    """Whether a worker has a launcher: on Linux to be watched, elsewhere only to keep its cache in bounds."""
    return cache or service_managers.MANAGERS[manager].system == service_managers.LINUX


def metrics_arguments(folder: str | None, prefix: str, service: str, page: str | None = None) -> list[str]:
    """Return the arguments of a launcher for its metrics.

    :param folder: folder for metrics; None if none are written.
    :param page: address and port of the page; None without a page.
    """
    arguments = ["--metrics", f"{prefix}/{names.METRICS}", service] if folder or page else []
    return [*arguments, *(["--page", page] if page else [])]


def _launcher(plan: Plan, host: str, worker: WorkerPlan) -> list[str]:
    """The launcher of a worker. Its cache may hold what was asked for, and never less than the planned models need."""
    host_plan = plan.hosts[host]
    launcher = [str(host_plan.python), f"{host_plan.runtime}/runtime.py", "worker"]
    tunnel = ["--tunnel", f"{worker.tunnel}={worker.listens}", *_keys(host_plan)] if worker.tunnel else []
    if not needs_launcher(host_plan.service_manager, worker.cache):
        return [*launcher, *tunnel, "--"] if tunnel else []
    launcher += ["--port", worker.listens.rsplit(":", 1)[1], *tunnel]
    if worker.cache:
        folder = rpc_upload.cache_of(worker.environment)
        sharing_services = {
            worker_.endpoint
            for worker_ in host_plan.workers
            if worker_.cache and rpc_upload.cache_of(worker_.environment) == folder
        }
        needed_mib = sum(
            max(
                sum(entry.weights_mib for entry in placement if entry.endpoint in sharing_services)
                for placement in placements_of(each_plan)
            )
            for each_plan in plan.per_model()
        )
        limit = max(worker.cache_mib, math.ceil(needed_mib))
        launcher += ["--cache", folder, "--limit-mib", str(limit)]
        launcher += [word for size in _sizes_of_files(plan) for word in ("--size", str(size))]
    service = names.service(f"worker-{worker.name}")
    return [*launcher, *metrics_arguments(host_plan.metrics, host_plan.prefix, service), "--"]


def _keys(host: HostPlan) -> list[str]:
    return ["--tunnel-keys", f"{host.prefix}/{names.KEYS}"]


def head_tunnel_ends(plan: Plan) -> list[str]:
    """``ACCEPT=CONNECT`` of the head's end of each tunnel: also to workers that only a fallback, or another model, uses."""
    workers = [worker for host in plan.hosts.values() for worker in host.workers if worker.tunnel]
    return [f"{worker.endpoint}={worker.tunnel}" for worker in workers]


def _head_words(plan: Plan) -> list[str]:
    words = [word for end in head_tunnel_ends(plan) for word in ("--tunnel", end)]
    return [*words, *_keys(plan.hosts[plan.head.host])] if words else []


def with_tunnels(plan: Plan) -> Plan:
    """The plan whose head keeps its ends of tunnels."""
    launcher = (*plan.head.launcher, *_head_words(plan))
    return plan._replace(head=plan.head._replace(launcher=launcher))


def with_launcher(plan: Plan, part: str, argv: Sequence[str]) -> tuple[str, ...]:
    """A command line of the head behind a part of the launcher, which keeps the tunnels that the server needs."""
    host = plan.hosts[plan.head.host]
    return (str(host.python), f"{host.runtime}/runtime.py", part, *_head_words(plan), "--", *argv)


def replacement(head: ServicePlan, name: str, description: str, argv: Sequence[str]) -> ServicePlan:
    """A temporary service in the sandbox of the head's service."""
    emptied_service = head._replace(environment={}, reads=(), after=(), credentials={})
    return emptied_service._replace(name=name, temporary=True, description=description, argv=tuple(argv))


def _sizes_of_files(plan: Plan) -> list[int]:
    """Bytes of the files that a worker's cache may hold; none where a worker may also get tensors of a draft model, a projector or an adapter, whose
    sizes nobody has read."""
    has_uncounted = any(entry.without for model_plan in plan.per_model() for entry in model_plan.placement)
    return (
        []
        if has_uncounted
        else sorted({size for model_plan in plan.per_model() for size in model_plan.model.large_tensor_bytes})
    )


def _models(plan: Plan) -> list[str]:
    """Paths of models that are served and of those beside them, all parts of each; a known-answer model has its path alone."""
    paths: list[str] = []
    for model_plan in plan.per_model():
        files = sorted(model_plan.model.files, key=lambda file: (file.role != host_types.MODEL, file.role))
        paths += [model_plan.model.path, *(file.path for file in files)]
    return list(dict.fromkeys(paths))


PATH_SEPARATOR = re.compile("[=,:;]")
"""Separator of several paths in a word, or of a path and a key."""
HOME_FOLDERS = re.compile(rf"(?:^|{PATH_SEPARATOR.pattern})/+(?:home|root|run/user)(?:/|$)")
"""Folder of users, as systemd sees it (ProtectHome), in a word."""
SYSTEM_FOLDERS = ("/dev/", "/proc/", "/run/", "/sys/", "/usr/")
"""Folders that have no links into homes."""
PLAIN_PATH = re.compile(r"(?:/[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*)+")
"""A path that needs no quotes among those of a unit."""


def _homes_of_head(plan: Plan) -> list[str] | None:
    """Paths that the head's service sees where links lead into homes, or below them: of homes it sees nothing else. None where it has to see
    all of them, since other words name homes, or a path cannot stand beside others in a unit.

    A path is that of the link: systemd follows it, outside and inside. The prefix may be one, and files of a model may be links of their own, so
    each is named, and its folder where that is in a home.
    """
    head, host_plan = plan.head, plan.hosts[plan.head.host]
    files = set(_models(plan))
    path_starts = [
        head.argv,
        *(start.head.argv for start in plan.per_model()),
        *(start.head.argv for start in plan.fallbacks),
    ]
    words = {word for argv in path_starts for word in argv} | set(head.environment.values())
    parts = {part for word in words - files for part in PATH_SEPARATOR.split(word) if part.startswith("/")}
    other_paths = {part for part in parts if not part.startswith((*SYSTEM_FOLDERS, host_plan.prefix + "/"))}
    folders = {posixpath.dirname(path) for path in files if HOME_FOLDERS.match(path)}
    paths = {host_plan.prefix, f"{host_plan.prefix}/{names.MODELS}", *files, *folders, *other_paths}
    hides_homes = not any(map(HOME_FOLDERS.search, words - files)) and all(map(PLAIN_PATH.fullmatch, paths))
    return sorted(paths) if hides_homes else None


def _reachable_for_head(plan: Plan) -> list[str]:
    """To whom the head's service may talk: its networks, its workers and itself; empty where others connect, and nobody said which."""
    head = plan.head
    if not head.allowed and not names.is_loopback(head.address):
        return []
    endpoints = [entry.endpoint for placement in placements_of(plan) for entry in placement if entry.endpoint]
    head_address = [] if head.address == names.ANY_ADDRESS else [head.address]
    endpoints += [worker.tunnel for host in plan.hosts.values() for worker in host.workers if worker.tunnel]
    return sorted({"localhost", *head_address, *(endpoint.rsplit(":", 1)[0] for endpoint in endpoints), *head.allowed})


def _may_connect(host: HostPlan, worker: WorkerPlan) -> list[str]:
    """To whom the firewall opens a worker's port; those of the server are no matter of the workers beside it."""
    address = (worker.tunnel or worker.listens).rsplit(":", 1)[0]
    return [source for rule in host.firewall if rule.address == address for source in rule.sources]


def with_services(plan: Plan) -> Plan:
    """Return the plan with the services of each host."""
    hosts = {name: host._replace(services=_services_of_host(plan, name)) for name, host in plan.hosts.items()}
    return plan._replace(hosts=hosts)


def _services_of_host(plan: Plan, host: str) -> tuple[ServicePlan, ...]:
    services = [_worker_service(plan, host, worker) for worker in plan.hosts[host].workers]
    if host == plan.head.host:
        services.append(_head_service(plan, [service.name for service in services]))
    return tuple(services)


def _worker_service(plan: Plan, host: str, worker: WorkerPlan) -> ServicePlan:
    address = (worker.tunnel or worker.listens).rsplit(":", 1)[0]
    return ServicePlan(
        name=names.service(f"worker-{worker.name}"),
        kind="worker",
        temporary=False,
        description=f"llama.cpp RPC worker {worker.name} ({worker.device})",
        argv=(*_launcher(plan, host, worker), *worker.argv),
        process=worker.argv,
        environment=worker.environment,
        listens=worker.listens,
        protocol=worker.protocol,
        reads=(),
        homes=(),
        after=(),
        credentials={},
        devices=(*backends.device_files(worker.backend), *(backends.RDMA_DEVICES if worker.rdma else ())),
        allow=tuple(sorted({"localhost", address, *_may_connect(plan.hosts[host], worker)})),
    )


def _rdma(plan: Plan) -> set[str]:
    """Return the devices that the head opens to reach workers by RDMA."""
    is_used = any(worker.rdma for host in plan.hosts.values() for worker in host.workers)
    return set(backends.RDMA_DEVICES) if is_used else set()


def _head_service(plan: Plan, worker_services: Sequence[str]) -> ServicePlan:
    head, homes = plan.head, _homes_of_head(plan)
    prefix = plan.hosts[head.host].prefix
    credentials = {name: path for name, field in CREDENTIALS.items() if (path := getattr(head, field)) is not None}
    fallbacks = plan.fallbacks if head.fallback_after is not None else ()
    return ServicePlan(
        name=head.service,
        kind="head",
        temporary=False,
        description=f"llama.cpp server of cluster {plan.cluster}",
        argv=(*head.launcher, "--", *head.argv),
        process=head.argv,
        fallbacks=tuple(ServiceFallback(fallback.without, fallback.head.argv) for fallback in fallbacks),
        children=tuple(model.argv for model in head.models) if head.models else None,
        environment=head.environment,
        listens=f"{head.address}:{head.port}",
        reads=(*_models(plan), *credentials.values(), *([f"{prefix}/{names.PRESETS}"] if head.models else [])),
        homes=None if homes is None else tuple(homes),
        after=tuple(worker_services),
        devices=tuple(
            sorted({path for backend in head.backends for path in backends.device_files(backend)} | _rdma(plan))
        ),
        credentials=credentials,
        allow=tuple(_reachable_for_head(plan)),
    )
