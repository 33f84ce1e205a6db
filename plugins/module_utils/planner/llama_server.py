# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama-server's command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import auxiliary_models
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.prompt_cache import PromptCache
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Server

CREDENTIALS_FOLDER = "/run/credentials/{service}.service/"
"""Folder in which systemd puts the files that LoadCredential names, for this service only."""
CREDENTIAL_OPTIONS = ("api-key-file", "tls-certificate", "tls-key")
"""Options for services.CREDENTIALS, in the same order."""
METRICS_OPTION = "--metrics"
"""Option that makes llama-server count tokens and requests, for its launcher."""


def argv_of(candidate: Candidate, cache: PromptCache, build_id: str) -> tuple[str, ...]:
    """Return llama-server's command line. --rpc comes first, because --device and --override-tensor name its devices."""
    workload, layout, host = candidate.workload, candidate.layout, candidate.site.hosts[candidate.site.head]
    server, model, release = workload.server, workload.model, workload.release
    values: list[tuple[str, str | Sequence[str] | None]] = [
        ("rpc", layout.endpoints),
        ("device", device_names(release.fork, [(device.endpoint, device.name) for device in layout.devices])),
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
        ("prompt-cache", str(cache.mib)),
        ("context-checkpoints", "" if cache.checkpoints is None else str(cache.checkpoints)),
        ("sleep", str(server.idle_seconds or "")),
        ("conversations", f"{host.facts.prefix}/state/conversations" if cache.on_disk else None),
        ("load-mode", candidate.layout.load_mode),
        ("repack", "off" if _crashes_with_amx(candidate) else None),
        ("ui", "none" if server.ui == "false" else None),
        *zip(CREDENTIAL_OPTIONS, _credentials(server, host.facts)),
        ("fit", "off"),
        ("log-verbosity", "4"),
    ]
    argv = [f"{host.facts.prefix}/releases/{build_id}/bin/llama-server"]
    for name, value in values:
        try:
            argv += options.render_option(name, value, release.fork)
        except options.UnknownOption:
            raise Refusal(_unsupported_message(name, value, release)) from None
    metrics_words = [METRICS_OPTION] * bool(
        (host.metrics or server.page_port) and METRICS_OPTION not in server.extra_args
    )
    return (*argv, *metrics_words, *server.extra_args)


def _crashes_with_amx(candidate: Candidate) -> bool:
    """Return whether AMX would hold attn_k_b of MLA on the head. Its buffers cannot be read back, so llama-server crashes with SIGSEGV when the
    scheduler moves that tensor (ggml-org/llama.cpp#11115, seen with 0.3.36)."""
    if not candidate.site.facts.cpu.amx or not candidate.release.mainline:
        return False
    units = {None, *candidate.layout.units_of(None)}
    parts = candidate.layout.load.parts
    return any(".attn_k_b." in part.name and part.device is None and part.unit in units for part in parts)


def device_names(fork: str, devices: Sequence[tuple[str | None, str]]) -> list[str]:
    """Return the names for --device. The numbers of workers follow the order in --rpc.

    :param devices: endpoint of the worker or None, and name of the device.
    """
    template, endpoints = capabilities.DEVICE_NAME[fork], [endpoint for endpoint, _name in devices if endpoint]
    return [
        template.format(index=endpoints.index(endpoint), endpoint=endpoint) if endpoint else name
        for endpoint, name in devices
    ]


def _unsupported_message(name: str, value: object, release: ReleasePlan) -> str:
    """Return why this release does not support a setting."""
    values = options.supported_values(name, release.fork)
    remedy = f"use {' or '.join(values)}" if values else "remove it"
    return f"{options.by_name(name).variable} is {value}, which {release.ref} does not support: {remedy}"


def _credentials(server: Server, facts: Facts) -> Iterator[str | None]:
    """Yield the path at which the service finds each credential; None without it. systemd passes copies, so that only root needs to read the files."""
    uses_credentials = service_managers.MANAGERS[facts.service_manager].hands_over_keys
    for name, field in services.CREDENTIALS.items():
        path: str | None = getattr(server, field)
        yield CREDENTIALS_FOLDER.format(service=names.SERVER) + name if path and uses_credentials else path
