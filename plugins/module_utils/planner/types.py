# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Immutable values that the stages of planning take and return. Sizes are in MiB if the name ends in ``_mib``, otherwise in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.projector import Projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import PatchPlan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator, Facts

VULKAN_MEMORY_ADVISORY = "vulkan-shared-memory"
"""Id of an advisory: if it is accepted, devices lend more than their driver shows as their own."""


class WorkerRequest(NamedTuple):
    """An entry of ``llama_worker_endpoints``; None for keys that it does not set."""

    name: str | None = None
    backend: str | None = None
    device: str | None = None
    port: int | None = None
    threads: int | None = None
    cache: bool | None = None
    cache_mib: int = 0
    memory_mib: int | None = None
    environment: Mapping[str, str] = {}
    tunnel: str | None = None


class Tuning(NamedTuple):
    """``llama_host_tuning`` and its related variables."""

    enabled: bool = False
    gtt_mib: int | None = None
    reboot: bool = False


class Host(NamedTuple):
    """A host of the inventory, with its known facts."""

    name: str
    is_head: bool
    is_worker: bool
    address: str
    """``ansible_host``."""
    facts: Facts
    cached_facts: Mapping[str, Any] = {}
    """Facts that the head keeps for a run in which the host does not answer."""
    backends: tuple[str, ...] = ()
    """``llama_backend``: ``auto``, or names of backends."""
    links: tuple[host_types.LinkPlan, ...] = ()
    worker_requests: tuple[WorkerRequest, ...] = ()
    cmake_options: Mapping[str, str] = {}
    toolchain: str | None = None
    build_host: str | None = None
    """``llama_build_host``: host that compiles for this host, if both are of the same kind."""
    shares_builds: bool = False
    """``llama_build_share``: whether this host shares builds with other hosts."""
    tuning: Tuning = Tuning()
    release_requests: Mapping[str, ReleaseRequest | None] = {}
    """Variable → requested release, for ``llama_release`` and ``llama_release_<backend>``."""
    unknown_variables: Mapping[str, str] = {}
    """Variable that the collection does not have → the most similar variable."""
    metrics: str | None = None
    """Folder in which launchers write metrics; None if ``llama_metrics`` is off."""
    transport: str = names.PLAIN_TRANSPORT
    """``llama_transport`` of its workers. The head has the transport stunnel if tunnels end there."""
    uses_rdma: bool = False
    """Whether the head reaches its workers by RDMA; on the head, whether it reaches any worker by RDMA."""
    scope: str = "auto"
    """``llama_host_scope`` in the inventory."""


class Server(NamedTuple):
    """The variables ``llama_server_…``."""

    host: str
    allowed: tuple[str, ...]
    """IPv4 networks of clients; empty if the inventory does not restrict them."""
    port: int
    backend: str | None
    context: int
    parallel: int
    threads: int | None
    flash_attention: str | None
    gpu_layers: int | None
    tensor_split: tuple[float, ...]
    override_tensor: tuple[str, ...]
    cache_type_k: str
    cache_type_v: str
    load_mode: str | None
    api_key_file: str | None
    tls_certificate_file: str | None
    tls_key_file: str | None
    extra_args: tuple[str, ...]
    environment: Mapping[str, str]
    start_timeout: int | None
    fallback: bool = False
    """Whether llama-server serves without an absent worker if the model fits on the other devices."""
    fallback_after: int = 60
    """Seconds to wait for such a worker."""
    memory_mib: Mapping[str, int] = {}
    """Device that llama-server itself drives → MiB to plan with."""
    reserve_mib: int | None = None
    """Memory to leave free on each of these devices; None if the size of the device decides."""
    prompt_cache_mib: int | None = None
    """Memory of the head for conversations that lost their slot; None if the plan decides."""
    batch: int | None = None
    """Tokens that llama-server processes at a time; None if the plan decides."""
    micro_batch: int | None = None
    """Tokens of a batch that a device computes together."""
    idle_seconds: int | None = None
    """Idle seconds after which llama-server unloads its model; None if it never does."""
    keep_conversations: bool = False
    """Whether conversations survive a restart on the head's disk."""
    conversations_mib: int = 0
    """Size of their files."""
    speculation: str | None = None
    """See speculation.py."""
    page_port: int | None = None
    """Port of the page that its launcher shows; None without a page."""
    ui: str = "auto"
    """``llama_server_ui``."""

    def argument(self, name: str) -> tuple[str, str] | None:
        """Return the last word of ``extra_args`` that sets an option, and the next word; None if no word sets it."""
        pairs = [*zip(self.extra_args, [*self.extra_args[1:], ""])]
        return next((pair for pair in reversed(pairs) if options.by_word(pair[0]) == options.by_name(name)), None)

    @property
    def uses_tls(self) -> bool:
        return bool(self.tls_certificate_file and self.tls_key_file)


class HuggingFace(NamedTuple):
    """Files of a repository on Hugging Face, or on a server that ``HF_ENDPOINT`` names."""

    repo: str
    quantisation: str | None
    """Common name of the quantisation, like Q4_K_M or UD-Q2_K_XL."""
    files: tuple[str, ...]
    revision: str
    """Branch, tag or commit."""


class ModelSource(NamedTuple):
    """Source of one or several files: exactly one of ``path``, ``huggingface``, ``url``, ``ollama`` and ``copy`` is set."""

    role: str
    """Role in ModelFilePlan."""
    variable: str
    """Variable that requests it, for messages."""
    path: str | None = None
    """Path on the head, or on storage that it mounts."""
    huggingface: HuggingFace | None = None
    url: str | None = None
    """URL of the file; for a split model, that of the first part."""
    checksum: tuple[str, ...] = ()
    """sha256 of each part of ``url`` or ``copy``, as 64 hexadecimal digits."""
    ollama: str | None = None
    """HOST/NAMESPACE/NAME:TAG."""
    copy: str | None = None
    """Path on the controller; for a split model, that of the first part."""


class Quantisation(NamedTuple):
    """A quantisation in a repository."""

    name: str
    bytes: int


class ModelReport(NamedTuple):
    """The report of the module model_info about the files of a model."""

    problem: str = ""
    """Why the report is invalid; then nothing else is set."""
    summary: ModelSummary | None = None
    unreadable_path: str | None = None
    """File or folder that the service cannot read."""
    refusal_text: str | None = None
    files: tuple[host_types.ModelFilePlan, ...] = ()
    offered: tuple[Quantisation, ...] = ()
    draft: ModelSummary | None = None
    projector: Projector | None = None


class ModelRequest(NamedTuple):
    """The variables ``llama_model_…``, and the report about their files."""

    source: ModelSource | None
    """None for the known-answer model."""
    known_answer: host_types.KnownAnswerPlan | None
    summary: ModelSummary | None
    """Summary of the model's file, or ``llama_model_gguf_summary`` if the file was not read; None if neither is known."""
    mmproj: ModelSource | None = None
    draft: ModelSource | None = None
    token_file: str | None = None
    alias: str | None = None
    """``llama_model_alias``."""
    report: ModelReport = ModelReport()

    def sources(self) -> list[ModelSource]:
        return [source for source in (self.source, self.mmproj, self.draft) if source]


class Model(NamedTuple):
    """The model that the head serves."""

    path: str
    known_answer: host_types.KnownAnswerPlan | None
    summary: ModelSummary
    source: str = ""
    """Source of the model for messages, without secrets."""
    alias: str = ""
    """Name that clients see; empty if the router names the model, as one of several."""
    revision: str | None = None
    """Commit in a repository."""
    files: tuple[host_types.ModelFilePlan, ...] = ()
    offered: tuple[Quantisation, ...] = ()
    """Quantisations in the repository, if it was queried."""
    draft: ModelSummary | None = None
    """Summary of the draft model; None without one, or if its header was not read."""
    projector: Projector | None = None
    """Header of the projector; None without one, or if it was not read."""

    def path_of(self, role: str) -> str | None:
        """Return the path of the first file with this role; None without one."""
        return next((file.path for file in self.files if file.role == role), None)


class AuxiliaryModel(NamedTuple):
    """The bytes of an auxiliary model: a projector or a draft model."""

    role: str
    device: Device | None
    """Device that llama-server drives itself; None for the head's processor."""
    weights: int
    kv: int
    compute: int
    """Bytes of the compute buffer: an upper bound for a draft model, an assumption for a projector."""
    head_weights: int = 0
    """Bytes of weights in the head's memory, in addition to those on its device."""

    @property
    def total(self) -> int:
        """Return the bytes on its device."""
        return self.weights + self.kv + self.compute

    @property
    def head_bytes(self) -> int:
        """Return the bytes in the head's memory."""
        return self.head_weights + (0 if self.device else self.total)

    def total_on(self, device: Device) -> int:
        """Return the bytes on a device."""
        return self.total if self.device and self.device.buffer == device.buffer else 0


class ExternalWorker(NamedTuple):
    """An entry of ``llama_external_workers``: a worker that others run."""

    worker: Worker
    protocol: str | None
    accelerator: Accelerator | None
    """Its device; None for a processor."""


class ModelEntry(NamedTuple):
    """An entry of ``llama_models``, with the values that differ while this model is served."""

    name: str
    aliases: tuple[str, ...]
    server: Server
    model: ModelRequest
    server_variables: tuple[str, ...] = ()
    """Variables of the server that the entry sets."""


class Cluster(NamedTuple):
    """The inventory of one cluster. Server, model and release requests are those of its head; with several models, those of the first."""

    name: str
    head: str
    hosts: Mapping[str, Host]
    server: Server
    model: ModelRequest
    placement: str | None
    accepted_ids: frozenset[str]
    release_requests: Mapping[str, ReleaseRequest | None]
    external_workers: tuple[ExternalWorker, ...] = ()
    external_hosts: Mapping[str, Host] = {}
    """Hosts of external workers, which no run contacts."""
    layer_hosts: frozenset[str] | None = None
    """Hosts whose devices may hold layers; None for all of them."""
    proof_seconds: int = 60
    """``llama_proof_seconds``."""
    users: int | None = None
    """``llama_users``."""
    builds_benchmark: bool = False
    """``llama_benchmark_programs``: whether the head's builds include the benchmark program."""
    model_entries: tuple[ModelEntry, ...] = ()
    """``llama_models``."""
    has_other_models: bool = False
    """Whether its model is one of several."""
    other_summaries: tuple[ModelSummary, ...] = ()
    """Summaries of the other models."""

    @property
    def has_driver_limits(self) -> bool:
        """Return whether devices hold no more than their drivers show as their own."""
        return VULKAN_MEMORY_ADVISORY not in self.accepted_ids

    @property
    def all_hosts(self) -> dict[str, Host]:
        """Return all hosts, including those of external workers."""
        return {**self.hosts, **self.external_hosts}


class Catalogue(NamedTuple):
    """packages.yml: distribution family → tool → package, and distribution family → its packages of llama.cpp."""

    tools: Mapping[str, Mapping[str, str]]
    llama: Mapping[str, Mapping[str, Any]]


class ReleaseRequest(NamedTuple):
    """``llama_release`` or ``llama_release_<backend>``, with values that the controller looked up."""

    source: str
    repository: str = ""
    ref: str = ""
    commit: str | None = None
    build: int | None = None
    version: str = ""
    checksum: str = ""
    path: str | None = None
    url: str | None = None
    fork: str = MAINLINE
    patches: tuple[PatchPlan, ...] = ()
    """Patches; only their paths are set until the controller reads them."""
    fast_load: bool = False
    """``llama_build_fast_load``."""
    checksums: tuple[tuple[str, str], ...] = ()
    """Archive of compiled programs, and its checksum (sha256: and digits)."""
    why: str = ""
    """Why ``auto`` chose this release."""


class Worker(NamedTuple):
    """A worker of a host: one RPC server process that lends one device."""

    name: str
    host: str
    listens: str
    """Address and port of its program."""
    endpoint: str
    """Endpoint to which the head connects: the worker's own, or the head's end of a tunnel."""
    open_endpoint: str | None
    """Address and port that are open to the head on a network; None if the operator's tunnel leads to the worker."""
    backend: str
    build_backend: str
    """Backend of the build whose program it runs. A worker on the processor may use a build for a GPU. Empty for an external worker."""
    device: str
    capacity_mib: int
    shares_host_memory: bool = False
    """Whether the device's memory is the host's own."""
    threads: int | None = None
    cache: bool = False
    cache_mib: int = 0
    cache_why: str = ""
    environment: Mapping[str, str] = {}
    uses_rdma: bool = False
    """Whether the head reaches it by RDMA."""

    @property
    def is_external(self) -> bool:
        """Return whether others run it."""
        return not self.build_backend

    @property
    def tunnel(self) -> str | None:
        """Return the endpoint of the launcher's tunnel on its host."""
        return self.open_endpoint if self.open_endpoint != self.listens else None

    @property
    def connection_endpoint(self) -> str:
        """Return the endpoint of the head's connection on the network."""
        return self.open_endpoint or self.endpoint


class Device(NamedTuple):
    """A device that may hold a part of the model: a worker lends it, or llama-server drives it."""

    host: str
    backend: str
    name: str
    buffer: str
    """Name in llama-server's log and in overrides."""
    capacity_mib: int
    environment: Mapping[str, str]
    """Environment of the program that drives it."""
    worker: Worker | None = None
    accelerator: Accelerator | None = None
    """Its properties; None for a processor."""

    @property
    def shares_memory(self) -> bool:
        """Return whether it uses the memory of its host's processor."""
        return not self.accelerator or self.accelerator.unified

    @property
    def architecture(self) -> str:
        return self.accelerator.architecture if self.accelerator else ""

    @property
    def endpoint(self) -> str | None:
        return self.worker.endpoint if self.worker else None

    @property
    def connection_endpoint(self) -> str:
        """Return the endpoint of the head's connection to its worker; empty if llama-server drives the device."""
        return self.worker.connection_endpoint if self.worker else ""

    @property
    def label(self) -> str:
        """Return its name for messages."""
        return f"{self.endpoint or self.name} ({self.host})"


class Programs(NamedTuple):
    """The builds of each host, and the release of each backend."""

    built_backends: Mapping[str, tuple[str, ...]]
    """Host → backends."""
    releases: Mapping[str, ReleasePlan]
    """Backend → release."""
    serving_backend: str
    """The backend whose llama-server runs on the head."""
    server_backends: Mapping[str, str]
    """Host → the backend whose llama-server would run there."""
    usable_backends: frozenset[str]
    """Backends whose workers llama-server can use."""
    tls_backend: str | None
    """The backend whose llama-server speaks TLS; None without TLS."""

    @property
    def release(self) -> ReleasePlan:
        """Return the release of llama-server."""
        return self.releases[self.serving_backend]


class BuildTools(NamedTuple):
    """The tools with which a host compiles for a backend."""

    prefix: str | None
    """Prefix of the toolkit; None without a toolkit, or if it is unknown."""
    version: str | None
    """Version of the toolkit, or of the system's compiler; None if it is unknown."""
    compiler: str | None
    """Version of the system's compiler, or path of the compiler that the operator names; None if it is unknown."""
    environment: Mapping[str, str]
    """Environment of the build."""
    libraries: tuple[str, ...]
    """Libraries that the build needs."""
    missing_libraries: tuple[str, ...]


class EquippedHost(NamedTuple):
    """A host with its builds, the tools that these need, and its workers."""

    host: Host
    build_tools: Mapping[str, BuildTools | None]
    """Backend of a build → the tools that compile it; None for compiled programs."""
    tools: Mapping[str, str]
    """Tool → package."""
    optional_tools: Mapping[str, str]
    workers: tuple[Worker, ...]
    driven_devices: tuple[Device, ...]
    """Devices that llama-server itself drives there; empty unless it is the head."""
    builds: Mapping[str, host_types.BuildPlan] = {}
    """Backend → build."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the backends for which the host has builds."""
        return tuple(self.build_tools)
