# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's part of the plan, which the planner makes and modules read. Sizes are in MiB unless their names say otherwise."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import ABSENT, Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import (
    ENDPOINT_PATTERN,
    IPV4_PATTERN,
    NETWORK_PATTERN,
    Number,
    Size,
    Text,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS

Line = Annotated[str, Text(max_length=4096)]
PathText = Annotated[str, Text(r"(/|~/).*", 4096)]
SafeName = Annotated[str, Text(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")]
"""Text that becomes part of file names: never a folder."""
Block = Annotated[str, Text(r"(?s).*", 16 << 20)]
"""Text with several lines: a definition, or the content of a file."""
PlanId = Annotated[str, Text(r"[0-9a-f]{16}", 16)]
Sha256 = Annotated[str, Text(r"[0-9a-f]{64}")]
FileMode = Annotated[str, Text(r"0[0-7]{3}")]
Port = Annotated[int, Number(1, 65535)]
Network = Annotated[str, Text(NETWORK_PATTERN)]
Endpoint = Annotated[str, Text(ENDPOINT_PATTERN)]
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
    """type of the tensors' elements"""


FILE_ROLES = MODEL, MMPROJ, DRAFT = ("model", "mmproj", "draft")
"""Roles of files: the model itself, its projector and its draft model."""


class ModelFilePlan(NamedTuple):
    """A file of a model."""

    name: str
    """name at its source"""
    role: Annotated[str, FILE_ROLES]
    """model, mmproj or draft"""
    path: Annotated[PathText, ABSENT] = ""
    """path on the head"""
    url: Optional[Annotated[str, Text(r"(https?|file)://\S+", 4096)]] = None
    """URL of its source, `file:` for a file on the controller; null if the file is used where it already is on the head"""
    bytes: Optional[Size] = None
    """size in bytes; null if unknown"""
    sha256: Optional[Sha256] = None
    """SHA-256 that its source or the operator names; null without one"""
    revision: Optional[str] = None
    """commit of its repository; null without one"""


class AccountPlan(NamedTuple):
    """An account of the installation."""

    name: SafeName
    """its name"""
    groups: tuple[SafeName, ...]
    """groups that it joins"""
    home: str
    """its home directory, which no run creates"""


class FolderPlan(NamedTuple):
    """A folder of the installation."""

    path: PathText
    """its path"""
    owner: Optional[SafeName]
    """account that owns it; null if the owner is not changed"""
    mode: Optional[FileMode]
    """permissions in octal digits; null if they are not changed"""


class KernelTuning(NamedTuple):
    """Parameters of kernel modules, for `llama_host_tuning`."""

    parameters: Mapping[str, str]
    """parameter → value"""
    reboot: bool
    """whether the run may reboot the host to apply them"""


class BuildPlan(NamedTuple):
    """A build for one backend."""

    id: SafeName
    """name of the build, the same on hosts of one kind"""
    release: str
    """id of its release"""
    backend: Backend
    """backend for which it is compiled"""
    kind: str
    """hash of the properties that make hosts be of one kind, such as processor, distribution and compiler"""
    cmake_options: Mapping[str, str]
    """CMake option → value"""
    environment: Mapping[str, str]
    """environment for compiling, which selects compilers and toolkit"""
    targets: tuple[SafeName, ...]
    """programs that it contains"""
    packaged: Mapping[str, str]
    """program → its path in the distribution's package; empty for other sources"""
    builder: str
    """host that compiles it for all hosts of its kind"""
    trusted_builders: tuple[str, ...]
    """hosts whose builds this host accepts, the builder first"""
    archives: Absent[tuple[SafeName, ...]] = None
    """names of upstream's archives, the programs first, then libraries; missing unless the source is `prebuilt`"""
    ui: Absent[Annotated[str, ("auto", "true", "false")]] = None
    """whether llama-server gets its chat page: `true`, `false`, or `auto` (if possible); missing if the build has no llama-server"""


class PrefillTensor(NamedTuple):
    """Tensors of one name that a worker caches."""

    name: str
    """name, with `*` instead of the number of the layer"""
    bytes: int
    """size of each tensor in bytes"""
    layers: Optional[tuple[int, ...]]
    """layers whose tensors of this name the worker caches; null for a tensor outside the layers"""
    model: PathText
    """first file of the model"""


class CachePrefill(NamedTuple):
    """Tensors for a worker's cache, if its host has a copy of the model."""

    tensors: tuple[PrefillTensor, ...]
    """tensors of more than 10 MiB"""
    argv: tuple[str, ...]
    """command line of a temporary worker on the same host, which receives them; the run appends a free port"""


class WorkerPlan(NamedTuple):
    """A worker of a host."""

    name: SafeName
    """name, which is part of the names of its services"""
    used: bool
    """whether it has layers"""
    endpoint: Endpoint
    """address and port at which the head reaches it"""
    listens: Endpoint
    """address and port on which it listens on its host: `endpoint`, unless the head uses a tunnel"""
    tunnel: Absent[Endpoint]
    """address and port at which its end of the tunnel listens; missing unless `llama_transport` is `stunnel`"""
    rdma: Absent[bool]
    """true if the head reaches it over RDMA; missing otherwise"""
    backend: Backend
    """backend of its device"""
    device: str
    """name of its device in llama.cpp"""
    shared: bool
    """whether its device uses the host's main memory"""
    cache: bool
    """whether it caches tensors on disk"""
    cache_mib: int
    """requested size limit of its cache; 0 for the size that the planned models need"""
    cache_why: str
    """reason why it has a cache, or has none"""
    prefill: Optional[CachePrefill]
    """tensors for its cache, if its host has a copy of the model; null if the cache cannot be filled, or there is none"""
    protocol: Optional[Protocol]
    """version of its release's RPC protocol; null if unknown"""
    argv: tuple[str, ...]
    """command line"""
    environment: Mapping[str, str]
    """environment of the process"""


class FirewallRule(NamedTuple):
    """A port and the clients for which it is open."""

    port: Port
    """TCP port"""
    sources: tuple[Network, ...]
    """addresses and networks that may connect"""
    address: Annotated[str, Text(IPV4_PATTERN)]
    """address of the host at which the port is; `0.0.0.0` for all addresses"""


class LinkPlan(NamedTuple):
    """An entry of the host's ``llama_links``."""

    interface: Optional[Line]
    """name of the interface; null if only the address is known"""
    address: Line
    """address of this host, with the prefix length if `manage` is true"""
    mtu: Optional[Annotated[int, Number(names.MTU_RANGE[0], names.MTU_RANGE[-1])]]
    """MTU in bytes; null if it is not changed"""
    peer: Optional[Line]
    """host at its other end; null if it is not named"""
    manage: bool
    """whether the run configures the interface"""
    kind: Optional[str] = None
    """kind of the link, if the inventory sets it"""


class ServiceFallback(NamedTuple):
    """A command line of the head while a worker is absent."""

    name: str
    """`without` in `fallbacks`"""
    process: tuple[str, ...]
    """command line"""


class ServicePlan(NamedTuple):
    """A service in the form that its service manager needs."""

    name: SafeName
    """name in the service manager"""
    kind: Annotated[str, ("worker", "head")]
    """whether it runs a worker or the head's llama-server"""
    temporary: bool
    """whether it only runs for a while, as for a benchmark or a proof, and does not start at boot"""
    description: str
    """description for people"""
    argv: tuple[str, ...]
    """command line for the service manager"""
    process: tuple[str, ...]
    """command line of the llama.cpp program, which a launcher may start"""
    environment: Mapping[str, str]
    """environment of the process"""
    listens: Endpoint
    """address and port on which it listens"""
    reads: tuple[PathText, ...]
    """files that it reads when it starts"""
    homes: Optional[tuple[str, ...]]
    """paths in home directories that it may see; empty: none, null: all"""
    after: tuple[str, ...]
    """services that must start before it"""
    devices: tuple[str, ...]
    """device files that it may open"""
    credentials: Mapping[str, str]
    """name → file that systemd passes to it under this name"""
    allow: tuple[Annotated[str, Text(f"(localhost|{NETWORK_PATTERN})")], ...]
    """networks with which it may exchange packets, for systemd's IPAddressAllow; empty: all"""
    fallbacks: Absent[tuple[ServiceFallback, ...]] = None
    """command lines of llama-server while a worker is absent; missing for a worker"""
    children: Absent[tuple[tuple[str, ...], ...]] = None
    """command lines of the programs that the router starts; missing unless there are several models"""
    protocol: Optional[Protocol] = None
    """version of a worker's RPC protocol; null if it is unknown, and for the head"""
    definition: Absent[Block] = None
    """text of its definition for the service manager"""


class FilePlan(NamedTuple):
    """A file that the run writes."""

    path: PathText
    """path on the host"""
    bytes: int
    """size of the file in bytes"""
    sha256: Absent[Sha256] = None
    """SHA-256 of its content; missing for the known-answer model"""
    mode: Absent[FileMode] = None
    """permissions in octal digits; missing for the known-answer model, which the head generates"""
    source: Absent[str] = None
    """path on the controller from which it is copied"""
    content: Absent[Block] = None
    """text to write, instead of `source`"""


class HostPlan(NamedTuple):
    """The part of the plan for a host."""

    scope: Annotated[str, ("system", "user")]
    """owner of the installation: `system` or `user`, see [operating](operating.md)"""
    prefix: PathText
    """folder of the installation"""
    cache: PathText
    """folder for sources and builds, which stays when the installation is removed"""
    state: PathText
    """folder for the launcher's records"""
    python: Optional[str]
    """Python interpreter that runs the launchers"""
    service_manager: ServiceManager
    """service manager that runs the services"""
    units: PathText
    """folder of the services' definitions"""
    account: Optional[SafeName]
    """account that runs the services; null for the connecting user"""
    accounts: tuple[AccountPlan, ...]
    """accounts of the installation"""
    folders: tuple[FolderPlan, ...]
    """folders of the installation; folders without an owner are not changed"""
    tuning: KernelTuning
    """parameters of kernel modules"""
    runtime: Optional[str]
    """folder of the launcher's program; null if no service needs a launcher"""
    tools: Mapping[str, str]
    """required tool or package → its package"""
    optional_tools: Mapping[str, str]
    """tool that only makes builds faster → its package; if the package cannot be installed, the run continues without it"""
    unused_accelerators: tuple[str, ...]
    """names of accelerators for which `llama_backend: auto` chose no build"""
    builds: tuple[BuildPlan, ...]
    """builds that this host compiles or installs"""
    workers: tuple[WorkerPlan, ...]
    """workers of this host, used or not"""
    firewall: tuple[FirewallRule, ...]
    """ports that must be open, and their clients"""
    firewall_manager: Optional[Annotated[str, names.FIREWALLS]]
    """`firewalld`, `ufw` or `nftables`; null if none is active, or the run may not configure it"""
    unit_closes: bool
    """whether the workers' definitions can close their ports to all hosts except the head"""
    port_probes: tuple[Endpoint, ...]
    """endpoints to which this host tries to connect, because they should be closed to it"""
    links: tuple[LinkPlan, ...]
    """`llama_links` of the host"""
    services: tuple[ServicePlan, ...]
    """services of the host"""
    build_account: Optional[SafeName]
    """account that compiles and tests programs; null for the connecting user"""
    host_settings: bool
    """whether the run may configure links, the firewall and kernel parameters, which needs root and systemd"""
    metrics: Absent[PathText] = None
    """folder to which launchers write metrics; missing if they write none"""
    id: Absent[PlanId] = None
    """id of the plan; missing in a refused plan"""
    files: Annotated[tuple[FilePlan, ...], ABSENT] = ()
    """files that the run writes; missing in a refused plan"""
    tunnel_keys: Absent[tuple[PathText, ...]] = None
    """paths of the key files of tunnels that end on this host; missing without such tunnels"""
    model: Annotated[tuple[ModelFilePlan, ...], ABSENT] = ()
    """files in `model.files` that have a URL; missing without such files, and on other hosts than the head"""
