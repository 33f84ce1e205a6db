# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's part of the plan, as the planner makes it and modules read it. Sizes are in MiB, where their names do not say otherwise."""

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

Line = Annotated[str, Text(longest=4096)]
Path = Annotated[str, Text(r"(/|~/).*", 4096)]
Word = Annotated[str, Text(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")]
"""Of which file names are made: never a folder."""
Block = Annotated[str, Text(r"(?s).*", 16 << 20)]
"""A text with several lines: a definition, or the content of a file."""
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
"""Whether an installation belongs to the system or to the connecting user, as an operator says it."""


class KnownAnswerPlan(NamedTuple):
    """Size of the known-answer model."""

    layers: int
    """number"""
    width: int
    """of a layer"""
    type: str
    """of the tensors"""


ROLES = MODEL, MMPROJ, DRAFT = ("model", "mmproj", "draft")
"""Roles of files: the model itself, its projector and its draft model."""


class ModelFilePlan(NamedTuple):
    """A file of a model."""

    name: str
    """as its source calls it"""
    role: Annotated[str, ROLES]
    """model, mmproj or draft"""
    path: Annotated[Path, ABSENT] = ""
    """on the head"""
    url: Optional[Annotated[str, Text(r"(https?|file)://\S+", 4096)]] = None
    """where it is fetched from: `file:` is a file of the controller; null where it is on the head already"""
    bytes: Optional[Size] = None
    """null where planning did not ask"""
    sha256: Optional[Sha256] = None
    """as its source says; null where it does not"""
    revision: Optional[str] = None
    """commit of its repository; null where there is none"""


class AccountPlan(NamedTuple):
    """An account that the installation makes."""

    name: Word
    """of the account"""
    groups: tuple[Word, ...]
    """that it joins"""
    home: str
    """its home, which is not made"""


class FolderPlan(NamedTuple):
    """A folder of the installation."""

    path: Path
    """of the folder"""
    owner: Optional[Word]
    """account"""
    mode: Optional[Mode]
    """in octal digits"""


class KernelTuning(NamedTuple):
    """Settings of the kernel."""

    parameters: Mapping[str, str]
    """of the kernel"""
    reboot: bool
    """whether the run may"""


class BuildPlan(NamedTuple):
    """What is compiled or installed for one backend."""

    id: Word
    """hosts of one kind have the same"""
    release: str
    """its id"""
    backend: Backend
    """what it is compiled for"""
    kind: str
    """a hash over what hosts have in common that share a build"""
    cmake_options: Mapping[str, str]
    """option → value"""
    environment: Mapping[str, str]
    """the chosen compilers and toolkit"""
    targets: tuple[Word, ...]
    """programs"""
    packaged: Mapping[str, str]
    """program → path, of a distribution's package"""
    builder: str
    """the host that compiles it for this one, or this one itself"""
    archives: Absent[tuple[Word, ...]] = None
    """of upstream's compiled programs: the programs, then further libraries"""


class PrefillTensor(NamedTuple):
    """Tensors of one name that a worker keeps."""

    name: str
    """name, with `*` in place of the layer"""
    bytes: int
    """of one tensor"""
    layers: Optional[tuple[int, ...]]
    """layers that have it; null outside the layers"""
    model: Path
    """file of the model that has them"""


class CachePrefill(NamedTuple):
    """What is put into a worker's cache before the head loads, where its host has a copy of the model."""

    tensors: tuple[PrefillTensor, ...]
    """its tensors of more than 10 MiB"""
    argv: tuple[str, ...]
    """command line of an instance on the worker's host that gets them; a free port follows"""


class WorkerPlan(NamedTuple):
    """A declared worker."""

    name: Word
    """in the names of its services"""
    used: bool
    """whether it has layers"""
    endpoint: Endpoint
    """where the head reaches it"""
    listens: Endpoint
    """where it listens on its own host: `endpoint`, unless a tunnel ends there"""
    tunnel: Absent[Endpoint]
    """where the tunnel to it begins on its own host, which its launcher keeps; missing without `llama_transport`"""
    rdma: Absent[bool]
    """whether the head reaches it by RDMA; missing where not"""
    backend: Backend
    """that drives its device"""
    device: str
    """as llama.cpp calls it"""
    shared: bool
    """whether its memory is the host's own"""
    cache: bool
    """whether it keeps tensors on disk"""
    cache_mib: int
    """how much was asked for"""
    cache_why: str
    """why it keeps them, or not"""
    prefill: Optional[CachePrefill]
    """what is put into its cache before the head loads; null where that is not possible or there is nothing"""
    protocol: Optional[Protocol]
    """of its release"""
    argv: tuple[str, ...]
    """command line"""
    environment: Mapping[str, str]
    """of the process"""


class FirewallRule(NamedTuple):
    """A port that is open, and for whom."""

    port: Port
    """number"""
    sources: tuple[Network, ...]
    """addresses and networks that may connect"""
    address: Annotated[str, Text(IPV4)]
    """on which the worker listens"""


class LinkPlan(NamedTuple):
    """An entry of the host's ``llama_links``."""

    interface: Optional[Line]
    """name; null where only the address is known"""
    address: Line
    """with the length of the network's prefix"""
    mtu: Optional[Annotated[int, Number(names.MTU[0], names.MTU[-1])]]
    """bytes; null where it is left as it is"""
    peer: Optional[Line]
    """name of the host at its other end"""
    manage: bool
    """whether the run sets it up"""
    kind: Optional[str] = None
    """of the link, as facts name it"""


class ServiceFallback(NamedTuple):
    """A command line with which the head may run while a worker is away."""

    name: str
    """`without` of `fallbacks`"""
    process: tuple[str, ...]
    """command line"""


class ServicePlan(NamedTuple):
    """A service, as its service manager needs it."""

    name: Word
    """as the service manager knows it"""
    kind: Annotated[str, ("worker", "head")]
    """what it runs"""
    temporary: bool
    """whether it only proves a release"""
    description: str
    """for people"""
    argv: tuple[str, ...]
    """what the service manager starts"""
    process: tuple[str, ...]
    """command line of the llama.cpp program"""
    environment: Mapping[str, str]
    """of the process"""
    listens: Endpoint
    """address and port"""
    reads: tuple[Path, ...]
    """files that it reads when it starts"""
    homes: Optional[tuple[str, ...]]
    """paths that it sees where they, or links there, lead into homes of users; empty: it sees nothing of homes, null: all of them"""
    after: tuple[str, ...]
    """services that start before it"""
    devices: tuple[str, ...]
    """device files that it may open"""
    credentials: Mapping[str, str]
    """name → file that systemd hands over"""
    allow: tuple[Annotated[str, Text(f"(localhost|{NETWORK})")], ...]
    """addresses to which it may talk, in both directions, for systemd's IPAddressAllow; empty: to all"""
    fallbacks: Absent[tuple[ServiceFallback, ...]] = None
    """command lines with which the head's llama-server may run while workers are away; missing of a worker"""
    children: Absent[tuple[tuple[str, ...], ...]] = None
    """command lines that it starts itself, of models that take turns"""
    protocol: Optional[Protocol] = None
    """of a worker; null where it is not known, and of the head"""
    definition: Absent[Block] = None
    """what the service manager gets"""


class FilePlan(NamedTuple):
    """A file that the run writes."""

    path: Path
    """on the host"""
    bytes: int
    """size"""
    sha256: Absent[Sha256] = None
    """of its content; missing for the known-answer model, which is made when it is first needed"""
    mode: Absent[Mode] = None
    """of the file; missing for the known-answer model, which the head gets by itself"""
    source: Absent[str] = None
    """file on the controller that is copied"""
    content: Absent[Block] = None
    """text that is written, in place of source"""


class HostPlan(NamedTuple):
    """The plan's part for a host."""

    scope: Annotated[str, ("system", "user")]
    """`system` or `user`, see [operating](operating.md)"""
    prefix: Path
    """folder of the installation"""
    cache: Path
    """folder for what outlives it"""
    state: Path
    """folder for what the launcher writes down"""
    python: Optional[str]
    """interpreter of the services"""
    service_manager: ServiceManager
    """that runs the services"""
    units: Path
    """folder of the definitions"""
    account: Optional[Word]
    """as which services run; null for the connecting user"""
    accounts: tuple[AccountPlan, ...]
    """that the installation makes"""
    folders: tuple[FolderPlan, ...]
    """of the installation; those without an owner are left as they are"""
    tuning: KernelTuning
    """of the kernel"""
    runtime: Optional[str]
    """folder of the launcher; null where none is needed"""
    tools: Mapping[str, str]
    """tool or package → the package that brings it"""
    optional_tools: Mapping[str, str]
    """the same, of what makes builds faster: installed where the host builds, and gone on without where that does not work"""
    unused_accelerators: tuple[str, ...]
    """names of devices for which no toolchain was found"""
    builds: tuple[BuildPlan, ...]
    """what is compiled or installed"""
    workers: tuple[WorkerPlan, ...]
    """all that are declared"""
    firewall: tuple[FirewallRule, ...]
    """what must be open, and for whom"""
    firewall_manager: Optional[Annotated[str, names.FIREWALLS]]
    """`firewalld`, `ufw`, `nftables`, or null where none is active"""
    unit_closes: bool
    """whether the workers' definitions close their ports to all but the head, which the host was seen to do"""
    port_probes: tuple[Endpoint, ...]
    """endpoints that are closed to this host, to which it tries to connect"""
    links: tuple[LinkPlan, ...]
    """the host's `llama_links`"""
    services: tuple[ServicePlan, ...]
    """each service"""
    build_account: Optional[Word]
    """as which sources are compiled and programs are tried; null for the connecting user, missing in a refused plan"""
    host_settings: bool
    """whether the run sets links, firewall and kernel parameters, which needs root and systemd; missing in a refused plan"""
    metrics: Absent[Path] = None
    """folder in which its launchers write metrics; missing where they write none"""
    id: Absent[PlanId] = None
    """the plan's, for its hosts; missing in a plan that is not applied"""
    files: Annotated[tuple[FilePlan, ...], ABSENT] = ()
    """written by the run; missing in a refused plan"""
    tunnel_keys: Absent[tuple[Path, ...]] = None
    """files of the keys of tunnels that end here, without what is in them; missing without `llama_transport`"""
    model: Annotated[tuple[ModelFilePlan, ...], ABSENT] = ()
    """of the head: those of `model.files` that have a url, to compare the host with them; missing where nothing is fetched"""
