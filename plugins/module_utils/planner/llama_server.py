# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head serves, and llama-server's command line."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadMemory, HeadPlan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    device_load,
    devices,
    prompt_cache,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host, Model, Server

HANDED_OVER = "/run/credentials/{service}.service/"
"""Where systemd puts what LoadCredential names, for the service alone."""


COUNTS = "--metrics"
"""Has llama-server count tokens and requests, for its launcher."""
LOADS, START_SECONDS = 5, (900, 86400)
"""A run waits so many times as long as a load is predicted to take, since what is assumed of links and disks may be wrong by as much, and workers
compute hashes of what they get; and at least and at most so many seconds."""


def _address_for_clients(server: Server, host: Host) -> str:
    """Where the server listens; where that is every address, one of the head's own: of a network of its clients if there is one."""
    if server.host != names.EVERY_ADDRESS:
        return server.host
    own = [host.address, *(link.address.partition("/")[0] for link in host.links), *host.facts.addresses]
    reachable = [address for address in own if address != "localhost" and not names.is_loopback(address)]
    networks = [ipaddress.IPv4Network(network) for network in server.allowed]
    return next((address for address in reachable if _is_in(address, networks)), [*reachable, host.name][0])


def _is_in(address: str, networks: Sequence[ipaddress.IPv4Network]) -> bool:
    try:
        return any(ipaddress.IPv4Address(address) in network for network in networks)
    except ValueError:
        return False


class Serving(NamedTuple):
    """What llama-server's command line is made of."""

    server: Server
    host: Host
    release: ReleasePlan
    model: Model
    placed: device_load.Placed
    build: str
    """Id of the build whose llama-server runs."""
    runtime: str
    """Folder of the launcher."""
    state: str
    """Folder for what the launcher writes down."""
    metrics: str | None
    """Folder for metrics; None where none are written."""
    page: int | None
    """Port of the page; None where there is none."""
    service: str
    """Name of the service."""
    cache: prompt_cache.PromptCache
    beside: Sequence[tuple[str, str]] = ()
    """Options that say where models beside it are, and values."""

    @property
    def facts(self) -> Facts:
        return self.host.facts


def plan_of(serving: Serving, environment: Mapping[str, str], used: Sequence[str], load_s: float | None) -> HeadPlan:
    """The plan's part for the head: llama-server's command line, and the launcher's before it.

    :param environment: that llama-server needs to use its devices as planned.
    :param used: backends of the devices that it drives itself.
    """
    server, placed, protocol = serving.server, serving.placed, serving.release.protocol
    scheme = "https" if server.tls else "http"
    own_url = f"{scheme}://{'127.0.0.1' if server.host == names.EVERY_ADDRESS else server.host}:{server.port}"
    kept, own = placed.on_head(), placed.own()
    launcher = [
        str(serving.facts.python),
        f"{serving.runtime}/runtime.py",
        "head",
        "--url",
        own_url,
        "--state",
        serving.state,
    ]
    launcher += ["--protocol", protocol] if protocol else []
    for worker in placed.lent():
        launcher += ["--worker", worker.endpoint]
    if server.fallback:
        launcher += ["--fallbacks", f"{serving.facts.prefix}/{names.FALLBACKS}"]
        launcher += ["--fallback-after", str(server.fallback_after)]
    page = f"{server.host}:{serving.page}" if serving.page else None
    launcher += services.metrics_arguments(serving.metrics, serving.facts.prefix, serving.service, page)
    return HeadPlan(
        host=serving.host.name,
        service=serving.service,
        argv=argv_of(serving),
        launcher=tuple(launcher),
        runtime=serving.runtime,
        environment={**environment, **server.environment},
        url=f"{scheme}://{_address_for_clients(server, serving.host)}:{server.port}",
        own_url=own_url,
        address=server.host,
        port=server.port,
        page_port=serving.page,
        allowed=server.allowed,
        api_key_file=server.api_key_file or None,
        tls_certificate_file=server.tls_certificate_file or None,
        tls_key_file=server.tls_key_file or None,
        start_timeout=start_timeout_of(server, load_s),
        fallback_after=server.fallback_after if server.fallback else None,
        context=server_settings.context_of(server, serving.model.summary),
        context_per_request=server_settings.context_per_request(server, serving.model.summary),
        load_mode=server.load_mode,
        devices=tuple(device.name for device in own),
        backends=tuple(used),
        cpu=HeadMemory(kept.layers, round(kept.weights / MIB, 2), round(kept.kv / MIB, 2)),
        prompt_cache_mib=serving.cache.mib,
        checkpoints_mib=serving.cache.checkpoints_mib,
        idle_seconds=server.idle_seconds,
    )


def argv_of(serving: Serving) -> tuple[str, ...]:
    """llama-server's command line. Devices of workers have to be known before --device and --override-tensor name them."""
    server, placed, release = serving.server, serving.placed, serving.release
    values: list[tuple[str, str | Sequence[str] | None]] = [
        ("rpc", [worker.endpoint for worker in placed.lent()]),
        ("device", device_names(release.fork, [(device.endpoint, device.name) for device in placed.devices])),
        ("override-tensor", server.override_tensor if placed.devices else None),
        ("model", serving.model.path),
        *((option, serving.model.path_of(role)) for role, option in model_source.AUXILIARY.items()),
        *serving.beside,
        ("host", server.host),
        ("port", str(server.port)),
        ("gpu-layers", str(placed.gpu_layers)),
        ("tensor-split", [f"{share:.9g}" for share in placed.split] if len(placed.devices) > 1 else None),
        ("context", str(server_settings.context_of(server, serving.model.summary))),
        ("parallel", str(server.parallel)),
        ("batch", str(server_settings.batch_of(server))),
        ("micro-batch", str(server.micro_batch or "")),
        ("cache-type-k", server.cache_type_k),
        ("cache-type-v", server.cache_type_v),
        ("flash-attention", server.flash_attention),
        ("threads", str(server.threads or "")),
        ("prompt-cache", str(serving.cache.mib)),
        ("context-checkpoints", "" if serving.cache.checkpoints is None else str(serving.cache.checkpoints)),
        ("sleep", str(server.idle_seconds or "")),
        ("load-mode", server.load_mode),
        ("repack", "off" if _crashes_with_amx(serving) else None),
        ("api-key-file", _readable(serving, server_settings.KEYS)),
        ("tls-certificate", _readable(serving, server_settings.CERTIFICATE)),
        ("tls-key", _readable(serving, server_settings.KEY)),
        ("fit", "off"),
        ("log-verbosity", "4"),
    ]
    argv = [f"{serving.facts.prefix}/releases/{serving.build}/bin/llama-server"]
    for name, value in values:
        try:
            argv += options.render(name, value, release.fork)
        except options.UnknownOption:
            raise Refusal(_unknown(name, value, release)) from None
    counts = [COUNTS] * bool((serving.metrics or serving.page) and COUNTS not in server.extra_args)
    return (*argv, *counts, *server.extra_args)


def _crashes_with_amx(serving: Serving) -> bool:
    """Whether AMX would hold attn_k_b of MLA on the head. Its buffers cannot be read back, so llama-server ends with SIGSEGV when the
    scheduler moves that tensor (ggml-org/llama.cpp#11115, seen with 0.3.36)."""
    if not serving.facts.cpu.amx or not serving.release.mainline:
        return False
    units = {None, *serving.placed.units_of(None)}
    return any(
        ".attn_k_b." in part.name and part.device is None and part.unit in units for part in serving.placed.load.parts
    )


def device_names(fork: str, devices: Sequence[tuple[str | None, str]]) -> list[str]:
    """What --device names. Workers are numbered as --rpc lists them.

    :param devices: endpoint of the worker, if there is one, and its own name.
    """
    name, endpoints = capabilities.DEVICE_NAME[fork], [endpoint for endpoint, _own in devices if endpoint]
    return [
        name.format(index=endpoints.index(endpoint), endpoint=endpoint) if endpoint else own
        for endpoint, own in devices
    ]


def _unknown(name: str, value: object, release: ReleasePlan) -> str:
    """Why a setting cannot be said to this release."""
    known = options.supported_values(name, release.fork)
    ways = f"use {' or '.join(known)}" if known else "leave it out"
    return f"{options.by_name(name).variable} is {value}, which {release.ref} does not know: {ways}"


def _readable(serving: Serving, name: str) -> str | None:
    """Where the service finds a credential: systemd hands it over, so that the file itself may be root's alone. None without one."""
    path: str | None = getattr(serving.server, server_settings.CREDENTIALS[name])
    handed_over = service_managers.MANAGERS[serving.facts.service_manager].hands_over_keys
    return HANDED_OVER.format(service=serving.service) + name if path and handed_over else path


def start_timeout_of(server: Server, load_s: float | None) -> int:
    """Seconds until llama-server has to be healthy.

    :param load_s: what a load takes by the estimate; None where there is none.
    """
    if server.start_timeout is not None:
        return server.start_timeout
    shortest, longest = START_SECONDS
    return min(longest, max(shortest, math.ceil(LOADS * (load_s or 0))))


def load_mode_of(wanted: str | None, release: ReleasePlan, used: Sequence[devices.Holder], head: str) -> str | None:
    """How the model is read where nothing is said of it: not by mmap where HIP or a GB10 was seen to hang or crawl on it, nor by a head whose Metal
    would hold nearly the whole file beside workers (ggml-org/llama.cpp#27667). None is llama-server's default.
    """
    if wanted:
        return wanted
    of_head = [device for device in used if device.host == head]
    lent = any(device.endpoint for device in used)
    maps_whole = lent and any(not one.endpoint and backends.RECORDS[one.backend].maps_weights for one in of_head)
    if maps_whole or any(device.is_gb10 for device in of_head):
        return "none"
    return unmapped_mode(release) if any(device.hangs_on_mmap or device.slow_on_mmap for device in of_head) else None


def unmapped_mode(release: ReleasePlan) -> str:
    """The fastest way to read a model without mmap."""
    return "dio" if release.mainline else "none"
