# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The services of each host: what they run, and what they may access."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Sequence

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
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Worker

CREDENTIALS = {"api-keys": "api_key_file", "tls-certificate": "tls_certificate_file", "tls-key": "tls_key_file"}
"""Name of a credential → field of Server and of HeadPlan that contains its path on the head."""


def placements_of(plan: Plan) -> list[Sequence[DevicePlacement]]:
    """Return the planned placements, and those of fallbacks."""
    fallbacks = plan.fallbacks if plan.head.fallback_after is not None else []
    return [*(model_plan.placement for model_plan in plan.per_model()), *(fallback.placement for fallback in fallbacks)]


def needs_launcher(manager: str, has_cache: bool) -> bool:
    """Return whether a worker needs a launcher: on Linux for monitoring, elsewhere only to limit its cache."""
    return has_cache or service_managers.MANAGERS[manager].system == service_managers.LINUX


def metrics_arguments(folder: str | None, prefix: str, service: str, page_endpoint: str | None = None) -> list[str]:
    """Return the arguments of a launcher for its metrics.

    :param folder: folder for metrics; None if none are written.
    :param page_endpoint: address and port of the page; None without a page.
    """
    arguments = ["--metrics", f"{prefix}/{names.METRICS_FILE}", service] if folder or page_endpoint else []
    return [*arguments, *(["--page", page_endpoint] if page_endpoint else [])]


def _worker_launcher_words(plan: Plan, host: HostPlan, worker: WorkerPlan) -> list[str]:
    """Return the words of a worker's launcher. The cache may grow to the requested size, or to the size that the planned models need if that is larger."""
    words = [str(host.python), f"{host.runtime}/runtime.py", "worker"]
    tunnel = ["--tunnel", f"{worker.tunnel}={worker.listens}", *_key_arguments(host.prefix)] if worker.tunnel else []
    if not needs_launcher(host.service_manager, worker.cache):
        return [*words, *tunnel, "--"] if tunnel else []
    words += ["--port", str(names.port_of(worker.listens)), *tunnel]
    if worker.cache:
        folder = rpc_upload.cache_path(worker.environment)
        sharing_endpoints = {
            peer.endpoint for peer in host.workers if peer.cache and rpc_upload.cache_path(peer.environment) == folder
        }
        needed_mib = sum(
            max(
                sum(entry.weights_mib for entry in placement if entry.endpoint in sharing_endpoints)
                for placement in placements_of(model_plan)
            )
            for model_plan in plan.per_model()
        )
        limit_mib = max(worker.cache_mib, math.ceil(needed_mib))
        words += ["--cache", folder, "--limit-mib", str(limit_mib)]
        words += [word for size in _cached_file_sizes(plan) for word in ("--size", str(size))]
    service = names.service_name(f"worker-{worker.name}")
    return [*words, *metrics_arguments(host.metrics, host.prefix, service), "--"]


def tunnel_mappings(workers: Iterable[Worker | WorkerPlan]) -> list[str]:
    """Return ``ACCEPT=CONNECT`` for the head's end of each tunnel."""
    return [f"{worker.endpoint}={worker.tunnel}" for worker in workers if worker.tunnel]


def tunnel_arguments(workers: Iterable[Worker | WorkerPlan], prefix: str) -> list[str]:
    """Return the launcher's arguments for the head's ends of tunnels.

    :param workers: all workers, including those that only a fallback or another model uses.
    """
    words = [word for end in tunnel_mappings(workers) for word in ("--tunnel", end)]
    return [*words, *_key_arguments(prefix)] if words else []


def _key_arguments(prefix: str) -> list[str]:
    return ["--tunnel-keys", f"{prefix}/{names.KEYS_FOLDER}"]


def launcher_argv(plan: Plan, command: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command line with which the head's launcher runs a program, and meanwhile keeps the server's tunnels open."""
    host = plan.head_host
    return (
        str(host.python),
        f"{host.runtime}/runtime.py",
        command,
        *tunnel_arguments(plan.workers, host.prefix),
        "--",
        *argv,
    )


def temporary_service(head: ServicePlan, name: str, description: str, argv: Sequence[str]) -> ServicePlan:
    """Return a temporary service in the sandbox of the head's service."""
    bare_service = head._replace(environment={}, reads=(), after=(), credentials={})
    return bare_service._replace(name=name, temporary=True, description=description, argv=tuple(argv))


def _cached_file_sizes(plan: Plan) -> list[int]:
    """Return the sizes of files in a worker's cache in bytes; empty if a worker may also get tensors of a draft model, a projector or an adapter, whose
    sizes are unknown."""
    models = plan.per_model()
    if any(entry.without for model_plan in models for entry in model_plan.placement):
        return []
    return sorted({size for model_plan in models for size in model_plan.model.large_tensor_bytes})


def _model_paths(plan: Plan) -> list[str]:
    """Return the paths of all parts of served and auxiliary models; a known-answer model has a single path."""
    paths: list[str] = []
    for model_plan in plan.per_model():
        files = sorted(model_plan.model.files, key=lambda file: (file.role != host_types.MODEL, file.role))
        paths += [model_plan.model.path, *(file.path for file in files)]
    return list(dict.fromkeys(paths))


SEPARATOR_PATTERN = re.compile("[=,:;]")
"""Separator of several paths in a word, or of a path and a key."""
HOME_PATTERN = re.compile(rf"(?:^|{SEPARATOR_PATTERN.pattern})/+(?:home|root|run/user)(?:/|$)")
"""Pattern for a path in a home directory, as ProtectHome of systemd defines it."""
SYSTEM_FOLDERS = ("/dev/", "/proc/", "/run/", "/sys/", "/usr/")
"""Folders without links into home directories."""
UNQUOTED_PATTERN = re.compile(r"(?:/[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*)+")
"""Pattern for a path that needs no quotes in a unit."""


def _home_paths(plan: Plan) -> list[str] | None:
    """Return the paths that the head's service needs and that may be in home directories or link there; systemd hides the rest of these. None if the service
    must see all home directories, because other words name paths there, or because a path needs quotes in a unit.

    systemd follows links, so the paths of links are enough. The prefix and each file of a model may be links, so each file is listed, and its folder if
    that is in a home directory.
    """
    head, prefix = plan.head, plan.head_host.prefix
    files = set(_model_paths(plan))
    words = {*head.argv, *head.environment.values()}
    words.update(*(entry.head.argv for entry in plan.per_model()), *(entry.head.argv for entry in plan.fallbacks))
    absolute_paths = {path for word in words - files for path in SEPARATOR_PATTERN.split(word) if path.startswith("/")}
    other_paths = {path for path in absolute_paths if not path.startswith((*SYSTEM_FOLDERS, prefix + "/"))}
    folders = {posixpath.dirname(path) for path in files if HOME_PATTERN.match(path)}
    paths = {prefix, f"{prefix}/{names.MODELS_FOLDER}", *files, *folders, *other_paths}
    hides_homes = not any(map(HOME_PATTERN.search, words - files)) and all(map(UNQUOTED_PATTERN.fullmatch, paths))
    return sorted(paths) if hides_homes else None


def _head_peer_addresses(plan: Plan) -> list[str]:
    """Return the addresses with which the head's service may communicate: its clients, its workers and itself; none if its clients are unknown."""
    head = plan.head
    if not head.allowed and not names.is_loopback(head.address):
        return []
    endpoints = [entry.endpoint for placement in placements_of(plan) for entry in placement if entry.endpoint]
    endpoints += [worker.tunnel for worker in plan.workers if worker.tunnel]
    addresses = {"localhost", head.address, *map(names.address_of, endpoints)}
    return sorted((addresses - {names.ANY_ADDRESS}).union(head.allowed))


def with_services(plan: Plan) -> Plan:
    """Return the plan with the services of each host."""
    hosts = {}
    for name, host in plan.hosts.items():
        services = [_worker_service(plan, host, worker) for worker in host.workers]
        if name == plan.head.host:
            services.append(_head_service(plan))
        hosts[name] = host._replace(services=tuple(services))
    return plan._replace(hosts=hosts)


def _worker_service(plan: Plan, host: HostPlan, worker: WorkerPlan) -> ServicePlan:
    address = names.address_of(worker.tunnel or worker.listens)
    sources = {"localhost", address}.union(*(rule.sources for rule in host.firewall if rule.address == address))
    return ServicePlan(
        name=names.service_name(f"worker-{worker.name}"),
        kind="worker",
        temporary=False,
        description=f"llama.cpp RPC worker {worker.name} ({worker.device})",
        argv=(*_worker_launcher_words(plan, host, worker), *worker.argv),
        process=worker.argv,
        environment=worker.environment,
        listens=worker.listens,
        protocol=worker.protocol,
        reads=(),
        homes=(),
        after=(),
        credentials={},
        devices=(*backends.device_files(worker.backend), *(backends.RDMA_DEVICE_FILES if worker.rdma else ())),
        # The sources of the rules for a worker do not include the clients of a server on the same host.
        allow=tuple(sorted(sources)),
    )


def _head_service(plan: Plan) -> ServicePlan:
    head, homes = plan.head, _home_paths(plan)
    credentials = {name: path for name, field in CREDENTIALS.items() if (path := getattr(head, field)) is not None}
    fallbacks = plan.fallbacks if head.fallback_after is not None else ()
    uses_rdma = any(worker.rdma for worker in plan.workers)
    devices = {path for backend in head.backends for path in backends.device_files(backend)}
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
        reads=(
            *_model_paths(plan),
            *credentials.values(),
            *([f"{plan.head_host.prefix}/{names.PRESETS_FILE}"] if head.models else []),
        ),
        homes=None if homes is None else tuple(homes),
        after=tuple(names.service_name(f"worker-{worker.name}") for worker in plan.head_host.workers),
        devices=tuple(sorted(devices.union(backends.RDMA_DEVICE_FILES if uses_rdma else ()))),
        credentials=credentials,
        allow=tuple(_head_peer_addresses(plan)),
    )
