# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The head's part of the plan: llama-server's command line and environment, and its launcher."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import auxiliary_models, devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.device_load import Layout
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.prompt_cache import (
    PromptCache,
    plan_prompt_cache,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host, Server

LOAD_WAIT_FACTOR, START_LIMITS_S = 5, (900, 86400)
"""Multiple of the predicted time of a load that a run waits, because links and disks may be slower than assumed and workers compute hashes; and the fewest
and most seconds that it waits."""
CREDENTIALS_FOLDER = "/run/credentials/{service}.service/"
"""Folder in which systemd puts the files that LoadCredential names, for this service only."""
CREDENTIAL_OPTIONS = ("api-key-file", "tls-certificate", "tls-key")
"""Options for services.CREDENTIALS, in the same order."""
METRICS_OPTION = "--metrics"
"""Option that makes llama-server count tokens and requests, for its launcher."""


def plan_of_head(installation: Installation, candidate: Candidate, load_s: float | None) -> types.HeadPlan:
    """Return the head's part of the plan."""
    host, workload, layout = installation.head.host, candidate.workload, candidate.layout
    server, prompt_cache, head_share = workload.server, plan_prompt_cache(candidate), layout.head_share()
    scheme = "https" if server.uses_tls else "http"
    own_url = f"{scheme}://{'127.0.0.1' if server.host == names.ANY_ADDRESS else server.host}:{server.port}"
    runtime_folder = installation.runtime_folder(host.facts.prefix)
    head = types.HeadPlan(
        host=host.name,
        service=names.SERVER_SERVICE,
        argv=argv_of(installation, candidate, prompt_cache),
        launcher=(
            str(host.facts.python),
            f"{runtime_folder}/runtime.py",
            "head",
            *_launcher_words(installation, candidate, prompt_cache.disk_plan, own_url),
        ),
        runtime=runtime_folder,
        environment={},
        url=f"{scheme}://{_address_for_clients(server, host)}:{server.port}",
        own_url=own_url,
        address=server.host,
        port=server.port,
        page_port=server.page_port,
        allowed=server.allowed,
        api_key_file=server.api_key_file or None,
        tls_certificate_file=server.tls_certificate_file or None,
        tls_key_file=server.tls_key_file or None,
        start_timeout=_start_timeout(server, load_s or 0),
        fallback_after=server.fallback_after if server.fallback else None,
        context=workload.cache.context,
        context_per_request=workload.context_per_request,
        load_mode=candidate.layout.load_mode,
        devices=tuple(device.name for device in layout.head_devices()),
        backends=(),
        cpu=types.HeadMemory(head_share.layers, round(head_share.weights / MIB, 2), round(head_share.kv / MIB, 2)),
        prompt_cache_mib=prompt_cache.mib,
        checkpoints_mib=prompt_cache.checkpoints_mib,
        idle_seconds=server.idle_seconds,
        conversations=prompt_cache.disk_plan,
    )
    return serve_candidates(head, installation, [candidate])


def serve_candidates(
    head: types.HeadPlan, installation: Installation, candidates: Sequence[Candidate]
) -> types.HeadPlan:
    """Return the head's part of the plan with the environment in which llama-server can serve each of these candidates."""
    layouts = [candidate.layout for candidate in candidates]
    return head._replace(
        backends=tuple(sorted({device.backend for layout in layouts for device in layout.driven_devices()})),
        environment={
            **installation.serving_environment,
            **devices.environment_of_head(installation.head, installation.programs.serving_backend, layouts),
            **installation.cluster.server.environment,
        },
    )


def _launcher_words(
    installation: Installation, candidate: Candidate, disk_plan: types.ConversationsPlan | None, own_url: str
) -> Iterator[str]:
    server, protocol = candidate.workload.server, candidate.release.protocol
    host, prefix = installation.head.host, installation.head.host.facts.prefix
    yield from ("--url", own_url, "--state", f"{prefix}/state", *(("--protocol", protocol) if protocol else ()))
    for endpoint in candidate.layout.endpoints:
        yield from ("--worker", endpoint)
    if server.fallback:
        yield from ("--fallbacks", f"{prefix}/{names.FALLBACKS_FILE}", "--fallback-after", str(server.fallback_after))
    if disk_plan:
        values = (disk_plan.limit_mib, disk_plan.file_mib, disk_plan.timeout_s, math.ceil(disk_plan.computing_s))
        yield from ("--conversations", *map(str, values))
    page_endpoint = f"{server.host}:{server.page_port}" if server.page_port else None
    yield from services.metrics_arguments(host.metrics, prefix, names.SERVER_SERVICE, page_endpoint)
    workers = [worker for entry in installation.equipped_hosts.values() for worker in entry.workers]
    yield from services.tunnel_arguments(workers, prefix)


def _start_timeout(server: Server, load_s: float) -> int:
    """Return the seconds within which llama-server has to become healthy."""
    minimum, maximum = START_LIMITS_S
    return server.start_timeout or min(maximum, max(minimum, math.ceil(LOAD_WAIT_FACTOR * load_s)))


def _address_for_clients(server: Server, host: Host) -> str:
    """Return the address at which the server listens; if it listens at every address, one of the head's own, if possible in a network of clients."""
    if server.host != names.ANY_ADDRESS:
        return server.host
    addresses = [host.address, *(link.address.partition("/")[0] for link in host.links), *host.facts.addresses]
    addresses = [address for address in addresses if address != "localhost" and not names.is_loopback(address)]
    networks = [ipaddress.IPv4Network(network) for network in server.allowed]
    return next((address for address in addresses if _is_within(address, networks)), [*addresses, host.name][0])


def _is_within(address: str, networks: Sequence[ipaddress.IPv4Network]) -> bool:
    try:
        return any(ipaddress.IPv4Address(address) in network for network in networks)
    except ValueError:
        return False


def argv_of(installation: Installation, candidate: Candidate, prompt_cache: PromptCache) -> tuple[str, ...]:
    """Return llama-server's command line. --rpc comes first, because --device and --override-tensor name its devices."""
    workload, layout, host = candidate.workload, candidate.layout, candidate.site.head_host
    server, model, release = workload.server, workload.model, workload.release
    values: list[tuple[str, str | Sequence[str] | None]] = [
        ("rpc", layout.endpoints),
        ("device", _device_names(release.fork, layout)),
        ("override-tensor", server.override_tensor if layout.devices else None),
        ("model", model.path),
        ("alias", model.alias),
        *((option, model.path_of(role)) for role, option in model_source.AUXILIARY_OPTIONS.items()),
        *auxiliary_models.arguments(workload, layout.auxiliary),
        ("host", server.host),
        ("port", str(server.port)),
        ("gpu-layers", str(layout.gpu_layers)),
        ("tensor-split", [f"{share:.9g}" for share in layout.split] if len(layout.devices) > 1 else None),
        ("context", str(workload.cache.context)),
        ("parallel", str(server.parallel)),
        ("batch", str(workload.cache.batch)),
        ("micro-batch", str(server.micro_batch or "")),
        ("cache-type-k", server.cache_type_k),
        ("cache-type-v", server.cache_type_v),
        ("flash-attention", server.flash_attention),
        ("threads", str(server.threads or "")),
        ("prompt-cache", str(prompt_cache.mib)),
        ("context-checkpoints", "" if prompt_cache.checkpoints is None else str(prompt_cache.checkpoints)),
        ("sleep", str(server.idle_seconds or "")),
        ("conversations", f"{host.facts.prefix}/state/conversations" if prompt_cache.disk_plan else None),
        ("load-mode", candidate.layout.load_mode),
        ("repack", "off" if _crashes_with_amx(candidate) else None),
        ("ui", "none" if server.ui == "false" else None),
        *zip(CREDENTIAL_OPTIONS, _credential_paths(server, host.facts)),
        ("fit", "off"),
        ("log-verbosity", "4"),
    ]
    argv = [f"{host.facts.prefix}/releases/{installation.serving_build.id}/bin/llama-server"]
    for name, value in values:
        try:
            argv += options.render_option(name, value, release.fork)
        except options.UnsupportedValue:
            raise Refusal(_unsupported_message(name, value, release)) from None
    metrics_words = [METRICS_OPTION] * bool(
        (host.metrics or server.page_port) and METRICS_OPTION not in server.extra_args
    )
    return (*argv, *metrics_words, *server.extra_args)


def _crashes_with_amx(candidate: Candidate) -> bool:
    """Return whether AMX would hold attn_k_b of MLA on the head. Its buffers cannot be read back, so llama-server crashes with SIGSEGV when the
    scheduler moves that tensor (ggml-org/llama.cpp#11115, seen with 0.3.36)."""
    if not candidate.site.head_facts.cpu.amx or not candidate.release.mainline:
        return False
    units = {None, *candidate.layout.units_of(None)}
    tensors = candidate.layout.load.tensors
    return any(".attn_k_b." in tensor.name and tensor.buffer is None and tensor.unit in units for tensor in tensors)


def _device_names(fork: str, layout: Layout) -> list[str]:
    """Return the names for --device. The numbers of workers follow the order in --rpc."""
    template = capabilities.DEVICE_TEMPLATES[fork]
    return [
        template.format(index=layout.endpoints.index(device.endpoint), endpoint=device.endpoint)
        if device.endpoint
        else device.name
        for device in layout.devices
    ]


def _unsupported_message(name: str, value: object, release: types.ReleasePlan) -> str:
    """Return the message about a setting that this release does not support."""
    values = options.supported_values(name, release.fork)
    remedy = f"use {' or '.join(values)}" if values else "remove it"
    return f"{options.by_name(name).variable} is {value}, which {release.ref} does not support: {remedy}"


def _credential_paths(server: Server, facts: Facts) -> Iterator[str | None]:
    """Yield the path at which the service finds each credential; None without it. systemd passes copies, so only root needs to read the files."""
    uses_credentials = service_managers.MANAGERS[facts.service_manager].passes_credentials
    for name, field in services.CREDENTIALS.items():
        path: str | None = getattr(server, field)
        yield CREDENTIALS_FOLDER.format(service=names.SERVER_SERVICE) + name if path and uses_credentials else path
