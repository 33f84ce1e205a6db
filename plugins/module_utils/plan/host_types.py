# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's part of the plan, which the planner makes and modules read. Sizes are in MiB unless their names say otherwise."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import ABSENT, Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import (
    ENDPOINT,
    IPV4,
    NETWORK,
    Number,
    Size,
    Text,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS

Line = Annotated[str, Text(max_length=4096)]
PathText = Annotated[str, Text(r"(/|~/).*", 4096)]
Word = Annotated[str, Text(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")]
"""Text that becomes part of file names: never a folder."""
Block = Annotated[str, Text(r"(?s).*", 16 << 20)]
"""Text with several lines: a definition, or the content of a file."""
PlanId = Annotated[str, Text(r"[0-9a-f]{16}", 16)]
Sha256 = Annotated[str, Text(r"[0-9a-f]{64}")]
Mode = Annotated[str, Text(r"0[0-7]{3}")]
Port = Annotated[int, Number(1, 65535)]
Network = Annotated[str, Text(NETWORK)]
Endpoint = Annotated[str, Text(ENDPOINT)]
Protocol = Annotated[str, Text(r"[0-9.]*")]
Seconds = Annotated[int, Number(1, 7 * 86400)]
Backend = Annotated[str, BACKENDS]
ServiceManager = Annotated[str, tuple(service_managers.MANAGERS)]
Scope = Annotated[str, ("auto", "system", "user")]
"""Owner of the installation, set by the operator: the system or the connecting user."""


class KnownAnswerPlan(NamedTuple):
    """Size of the known-answer model."""

    layers: int
    """number of layers"""
    width: int
    """width of a layer"""
    type: str
    """type of the tensors"""


ROLES = MODEL, MMPROJ, DRAFT = ("model", "mmproj", "draft")
"""Roles of files: the model itself, its projector and its draft model."""


class ModelFilePlan(NamedTuple):
    """A file of a model."""

    name: str
    """name at its source"""
    role: Annotated[str, ROLES]
    """model, mmproj or draft"""
    path: Annotated[PathText, ABSENT] = ""
    """path on the head"""
    url: Optional[Annotated[str, Text(r"(https?|file)://\S+", 4096)]] = None
    """URL of its source, `file:` for a file on the controller; null if the head already has the file"""
    bytes: Optional[Size] = None
    """size; null if unknown"""
    sha256: Optional[Sha256] = None
    """SHA-256 from its source; null without one"""
    revision: Optional[str] = None
    """commit of its repository; null without one"""


class AccountPlan(NamedTuple):
    """An account of the installation."""

    name: Word
    """its name"""
    groups: tuple[Word, ...]
    """groups that it joins"""
    home: str
    """its home, which no run creates"""


class FolderPlan(NamedTuple):
    """A folder of the installation."""

    path: PathText
    """its path"""
    owner: Optional[Word]
    """account"""
    mode: Optional[Mode]
    """permissions in octal digits"""


class KernelTuning(NamedTuple):
    """Kernel settings."""

    parameters: Mapping[str, str]
    """parameter → value"""
    reboot: bool
    """whether the run may reboot the host"""


class BuildPlan(NamedTuple):
    """A build for one backend."""

    id: Word
    """name of the build, the same on hosts of one kind"""
    release: str
    """id of its release"""
    backend: Backend
    """backend for which it is compiled"""
    kind: str
    """hash of all properties that hosts with the same build share"""
    cmake_options: Mapping[str, str]
    """option of cmake → value"""
    environment: Mapping[str, str]
    """compilers and toolkit"""
    targets: tuple[Word, ...]
    """programs that it contains"""
    packaged: Mapping[str, str]
    """program → path, from a distribution's package"""
    builder: str
    """host of its kind that compiles it"""
    trusted_builders: tuple[str, ...]
    """hosts whose build counts: the builder, then others"""
    archives: Absent[tuple[Word, ...]] = None
    """upstream's archives: programs first, then libraries"""
    ui: Absent[Annotated[str, ("auto", "true", "false")]] = None
    """whether llama-server has its chat page: `true`, `false`, or `auto` if possible; absent without llama-server"""


class PrefillTensor(NamedTuple):
    """Tensors of one name that a worker caches."""

    name: str
    """name, with `*` instead of the layer"""
    bytes: int
    """size of one tensor"""
    layers: Optional[tuple[int, ...]]
    """layers that contain it; null outside the layers"""
    model: PathText
    """file of the model that contains them"""


class CachePrefill(NamedTuple):
    """Tensors for a worker's cache, if its host has a copy of the model."""

    tensors: tuple[PrefillTensor, ...]
    """tensors of more than 10 MiB"""
    argv: tuple[str, ...]
    """command line of an instance on the worker's host that receives them; the run appends a free port"""


class WorkerPlan(NamedTuple):
    """A declared worker."""

    name: Word
    """name, which is part of the names of its services"""
    used: bool
    """whether it has layers"""
    endpoint: Endpoint
    """address and port at which the head reaches it"""
    listens: Endpoint
    """address and port on its own host: `endpoint`, unless the head uses a tunnel"""
    tunnel: Absent[Endpoint]
    """address and port of its tunnel on its host, which its launcher runs; missing without `llama_transport`"""
    rdma: Absent[bool]
    """true if the head reaches it over RDMA; missing otherwise"""
    backend: Backend
    """backend of its device"""
    device: str
    """name of its device in llama.cpp"""
    shared: bool
    """whether its memory is the host's own"""
    cache: bool
    """whether it caches tensors on disk"""
    cache_mib: int
    """requested size of its cache"""
    cache_why: str
    """reason why it has a cache or none"""
    prefill: Optional[CachePrefill]
    """tensors for its cache before the head loads; null if impossible or unnecessary"""
    protocol: Optional[Protocol]
    """RPC protocol of its release"""
    argv: tuple[str, ...]
    """command line"""
    environment: Mapping[str, str]
    """environment of the process"""


class FirewallRule(NamedTuple):
    """An open port and its clients."""

    port: Port
    """number of the port"""
    sources: tuple[Network, ...]
    """addresses and networks that may connect"""
    address: Annotated[str, Text(IPV4)]
    """address of the worker"""


class LinkPlan(NamedTuple):
    """An entry of the host's ``llama_links``."""

    interface: Optional[Line]
    """name; null if only the address is known"""
    address: Line
    """address with the prefix length"""
    mtu: Optional[Annotated[int, Number(names.MTU_RANGE[0], names.MTU_RANGE[-1])]]
    """bytes; null leaves it unchanged"""
    peer: Optional[Line]
    """host at its other end"""
    manage: bool
    """whether the run configures it"""
    kind: Optional[str] = None
    """kind of the link, according to the facts"""


class ServiceFallback(NamedTuple):
    """A command line of the head while a worker is absent."""

    name: str
    """`without` in `fallbacks`"""
    process: tuple[str, ...]
    """command line"""


class ServicePlan(NamedTuple):
    """A service in the form that its service manager needs."""

    name: Word
    """name in the service manager"""
    kind: Annotated[str, ("worker", "head")]
    """kind of program that it runs"""
    temporary: bool
    """whether it only proves a release"""
    description: str
    """description for people"""
    argv: tuple[str, ...]
    """command line for the service manager"""
    process: tuple[str, ...]
    """command line of the llama.cpp program"""
    environment: Mapping[str, str]
    """environment of the process"""
    listens: Endpoint
    """address and port"""
    reads: tuple[PathText, ...]
    """files that it reads when it starts"""
    homes: Optional[tuple[str, ...]]
    """visible paths that lead into home directories; empty: none, null: all"""
    after: tuple[str, ...]
    """services that must start before it"""
    devices: tuple[str, ...]
    """device files that it may open"""
    credentials: Mapping[str, str]
    """name → file, passed on by systemd"""
    allow: tuple[Annotated[str, Text(f"(localhost|{NETWORK})")], ...]
    """addresses with which it may exchange packets, for systemd's IPAddressAllow; empty: all"""
    fallbacks: Absent[tuple[ServiceFallback, ...]] = None
    """command lines of llama-server while workers are absent; missing for a worker"""
    children: Absent[tuple[tuple[str, ...], ...]] = None
    """command lines that it starts itself, for several models"""
    protocol: Optional[Protocol] = None
    """RPC protocol of a worker; null if unknown, and for the head"""
    definition: Absent[Block] = None
    """text for the service manager"""


class FilePlan(NamedTuple):
    """A file that the run writes."""

    path: PathText
    """path on the host"""
    bytes: int
    """size of the file"""
    sha256: Absent[Sha256] = None
    """SHA-256 of its content; missing for the known-answer model"""
    mode: Absent[Mode] = None
    """mode; missing for the known-answer model, which the head generates"""
    source: Absent[str] = None
    """file on the controller to copy"""
    content: Absent[Block] = None
    """text to write, instead of source"""


class HostPlan(NamedTuple):
    """The part of the plan for a host."""

    scope: Annotated[str, ("system", "user")]
    """`system` or `user`, see [operating](operating.md)"""
    prefix: PathText
    """folder of the installation"""
    cache: PathText
    """folder for files that survive the installation"""
    state: PathText
    """folder for the launcher's records"""
    python: Optional[str]
    """Python interpreter of the services"""
    service_manager: ServiceManager
    """service manager that runs the services"""
    units: PathText
    """folder of the definitions"""
    account: Optional[Word]
    """account that runs the services; null for the connecting user"""
    accounts: tuple[AccountPlan, ...]
    """accounts of the installation"""
    folders: tuple[FolderPlan, ...]
    """folders of the installation; folders without an owner are not changed"""
    tuning: KernelTuning
    """kernel settings"""
    runtime: Optional[str]
    """folder of the launcher; null if not needed"""
    tools: Mapping[str, str]
    """required tool or package → its package"""
    optional_tools: Mapping[str, str]
    """tool that makes builds faster → its package, which is skipped if it cannot be installed"""
    unused_accelerators: tuple[str, ...]
    """devices without a toolchain"""
    builds: tuple[BuildPlan, ...]
    """builds that are compiled or installed"""
    workers: tuple[WorkerPlan, ...]
    """all declared workers"""
    firewall: tuple[FirewallRule, ...]
    """ports that must be open, and their clients"""
    firewall_manager: Optional[Annotated[str, names.FIREWALLS]]
    """`firewalld`, `ufw` or `nftables`; null if none is active"""
    unit_closes: bool
    """whether the workers' definitions can close their ports to all hosts except the head"""
    port_probes: tuple[Endpoint, ...]
    """endpoints that should be closed to this host, to which it tries to connect"""
    links: tuple[LinkPlan, ...]
    """`llama_links` of the host"""
    services: tuple[ServicePlan, ...]
    """services of the host"""
    build_account: Optional[Word]
    """account that compiles and tries programs; null for the connecting user, missing in a refused plan"""
    host_settings: bool
    """whether the run configures links, the firewall and kernel parameters (requires root and systemd); missing in a refused plan"""
    metrics: Absent[PathText] = None
    """folder for metrics; missing without metrics"""
    id: Absent[PlanId] = None
    """id of the plan; missing in a plan that is not applied"""
    files: Annotated[tuple[FilePlan, ...], ABSENT] = ()
    """files that the run writes; missing in a refused plan"""
    tunnel_keys: Absent[tuple[PathText, ...]] = None
    """key files of tunnels that end here, without content; missing without `llama_transport`"""
    model: Annotated[tuple[ModelFilePlan, ...], ABSENT] = ()
    """files of `model.files` that have a URL, on the head only; missing if there is nothing to fetch"""
