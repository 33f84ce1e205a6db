# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The facts of a host that planning reads, as facts/host.py returns them. A host may report anything, so parse_facts checks them. Facts that older versions
of the collection do not report have a default."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    names,
    service_managers,
    typed_json,
    versions,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Address, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    device_rates,
    toolkits,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import AMDGPU, BACKENDS

MAX_MIB = 1 << 40
NON_AMD_PREFIXES = ("Intel", "NVIDIA")
"""Prefixes of the names of devices whose Vulkan driver is not Mesa's for AMD."""
UNNAMED_DEVICE = "declared"
"""Default name of a declared device. Two devices with this name may differ."""
DEFAULT_FACTS: dict[str, Any] = {
    "system": "Linux",
    "architecture": "x86_64",
    "distribution": {"id": "debian", "version": "13", "family": "debian"},
    "cpu": {"model": "declared", "cores": 8, "features_id": "declared"},
    "memory_mib": 0,
    "accelerators": [],
    "toolchain": {"cmake": "3.31", "ninja": "1.12", "c++": "14.2", **toolkits.DECLARED_VERSIONS, "patch": "2.7"},
    "toolchains": None,
    "scope": "system",
    "python": "/usr/bin/python3",
    "service_manager": "systemd",
    "has_unit_filter": True,
    "packaged": {"version": list(capabilities.PACKAGED_BUILDS)[-1], "installed": []},
    "prefix": "/opt/llamacpp",
    "cache": "/var/cache/llamacpp",
    "units": "/etc/systemd/system",
}
"""Assumed facts of a host that is only declared: Linux with systemd and every toolchain, at unknown paths."""
Name = Annotated[str, Text()]
Word = Annotated[str, Text("[A-Za-z0-9_.:+~-]*")]
PathText = Annotated[str, Text(r"""[/~][^%$\\'"`;#]*""", 4096)]
"""Path on a host. It contains no special characters, because some service managers cannot quote them."""
Mib = Annotated[int, Number(0, MAX_MIB)]
Backend = Annotated[str, BACKENDS]
Measurement = Annotated[Optional[float], Number(0, 1 << 30, allows_fractions=True)]


class Accelerator(NamedTuple):
    """A device as one backend drives it; facts/hardware.py describes the fields."""

    backend: Backend
    name: Name
    architecture: Word
    memory_mib: Mib
    unified: bool

    @property
    def has_amdgpu_limit(self) -> bool:
        """Return whether parameters of AMD's kernel driver limit how much of the host's memory the device may use."""
        backend = backends.BY_NAME[self.backend]
        is_amd = backend.is_vendor_neutral or backend.kernel_driver == AMDGPU
        return self.unified and is_amd and not self.name.startswith(NON_AMD_PREFIXES)


class Distribution(NamedTuple):
    """``id`` and ``version`` in /etc/os-release, and the family whose packages the distribution uses."""

    id: Name
    version: Name
    family: Name


class PackagedRelease(NamedTuple):
    """The distribution's packages of llama.cpp: upstream's version of the offered package, and names of the installed packages."""

    version: Optional[Word]
    installed: tuple[Word, ...]


class MeasuredLink(NamedTuple):
    """Measurement of the link to a host."""

    round_trip_ms: Measurement = None
    mbit_per_second: Measurement = None
    requested: bool = True
    """Whether an operator requested it. Planning ignores other measurements, because they would change services in the next run."""


class Interface(NamedTuple):
    """A hardware network interface, as facts/interfaces.py finds it."""

    name: Name
    kind: Annotated[str, names.LINK_KINDS]
    addresses: tuple[Address, ...]


class Toolchain(NamedTuple):
    """A toolkit, or a compiler for the backend ``cpu``, as facts/toolchains.py finds it."""

    backend: Backend
    prefix: PathText
    links: tuple[PathText, ...]
    version: Annotated[str, Text(r"\d+(\.\d+)*")]
    compiler: Optional[PathText] = None
    libraries: Optional[tuple[Name, ...]] = None
    """Installed libraries; None if the host was not searched for them."""
    components: Optional[Mapping[str, PathText]] = None


class Processor(NamedTuple):
    """A host's processor, as facts/hardware.py finds it."""

    model: Name
    cores: Annotated[int, Number(1, 1 << 16)]
    features_id: Name
    amx: Optional[bool] = None
    avx512: Optional[bool] = None
    unusable: Optional[tuple[Name, ...]] = None


class Facts(NamedTuple):
    system: Name
    architecture: Word
    distribution: Distribution
    cpu: Processor
    memory_mib: Mib
    accelerators: tuple[Accelerator, ...]
    toolchain: Mapping[str, Optional[Name]]
    """Tool or library → version."""
    scope: Annotated[str, ("system", "user")]
    service_manager: Annotated[str, tuple(service_managers.MANAGERS)]
    prefix: PathText
    cache: PathText
    units: PathText
    toolchains: Optional[tuple[Toolchain, ...]] = None
    """Toolkits and compilers; None if the host was not searched for them."""
    packaged: Optional[PackagedRelease] = None
    python: Optional[PathText] = None
    accounts: Mapping[str, Name] = {}
    """Account with the name prefix of the collection's accounts → its home folder."""
    rdma: Optional[tuple[Address, ...]] = None
    """IPv4 addresses of RDMA devices; None if the host was not searched for them."""
    device_groups: tuple[Word, ...] = ()
    firewall: Optional[Annotated[str, names.FIREWALLS]] = None
    has_unit_filter: Optional[bool] = None
    """Whether IPAddressDeny of a unit takes effect; None if unknown."""
    kernel: Name = ""
    glibc: Optional[Word] = None
    """Version of glibc; empty with another C library, None if unknown."""
    newest_cuda: Optional[Word] = None
    """Newest CUDA version that the NVIDIA driver supports."""
    nvidia_smi: Optional[Name] = None
    """Error message of nvidia-smi, if it fails."""
    interfaces: tuple[Interface, ...] = ()
    reached_at: Optional[Address] = None
    """Address at which the controller reaches the host, if ``ansible_host`` is a name."""
    addresses: tuple[Address, ...] = ()
    """IPv4 addresses of a head, without loopback; empty if the run did not contact it."""
    measured: Mapping[str, Optional[MeasuredLink]] = {}
    """Host → measurement of its link to this head."""
    cluster: Optional[Name] = None
    """Cluster to which the host belongs; None if unknown."""
    disk_gib: Optional[Mib] = None
    """Size of the file system of ``prefix``, rounded down to a power of 2; None if unknown."""
    link_gbit_per_s: Annotated[Optional[float], Number(0.001, 1 << 20, allows_fractions=True)] = None
    """Rate of the link between the head and this host, if ``llama_hardware`` sets it."""

    @property
    def is_board(self) -> bool:
        """Return whether the host counts as a small board."""
        return device_rates.is_board(self.system, self.architecture, self.memory_mib, self.cpu.model)

    def accelerators_of(self, backend: str) -> list[Accelerator]:
        """Return the accelerators that this backend drives, in the order in which it numbers them."""
        return [accelerator for accelerator in self.accelerators if accelerator.backend == backend]

    def toolkits_of(self, backend: str) -> list[Toolchain]:
        """Return the installed toolkits of a backend, the oldest first."""
        return [toolchain for toolchain in self.toolchains or () if toolchain.backend == backend]

    def newest_toolkit(self, backend: str) -> Optional[Toolchain]:
        """Return the installed toolkit of a backend with the highest version; None without one."""
        return max(self.toolkits_of(backend), key=lambda toolkit: versions.parse(toolkit.version), default=None)

    def lacks_tool(self, name: str) -> bool:
        """Return whether the host lacks a tool or library. A declared host has every tool that its facts do not list."""
        return self.toolchain.get(name, "") is None

    @property
    def named_accelerators(self) -> tuple[tuple[str, Accelerator], ...]:
        """Return the accelerators with their names in llama.cpp."""
        return _named_accelerators(self.accelerators)

    @property
    def canonical_names(self) -> Mapping[str, str]:
        """Return the canonical device name for llama.cpp's name of each accelerator: it may be CUDA0 for both Vulkan0 and CUDA0."""
        return _canonical_names(self.accelerators)

    def accelerator_of(self, name: str) -> Optional[Accelerator]:
        """Return the accelerator with this name in llama.cpp; None for the processor."""
        return dict(self.named_accelerators).get(name)

    def distinct_accelerators(self) -> list[Accelerator]:
        """Return each device once, even if both its vendor's backend and Vulkan drive it."""
        return [accelerator for name, accelerator in self.named_accelerators if self.canonical_names[name] == name]

    def architectures_of(self, backend: str) -> list[str]:
        return sorted({accelerator.architecture for accelerator in self.accelerators_of(backend)})


@functools.lru_cache(maxsize=64)
def _named_accelerators(accelerators: tuple[Accelerator, ...]) -> tuple[tuple[str, Accelerator], ...]:
    return tuple(
        (backends.device_name(backend, index), accelerator)
        for backend in BACKENDS[1:]
        for index, accelerator in enumerate(device for device in accelerators if device.backend == backend)
    )


@functools.lru_cache(maxsize=64)
def _canonical_names(accelerators: tuple[Accelerator, ...]) -> Mapping[str, str]:
    named_devices = _named_accelerators(accelerators)
    vendor_devices = {
        name: device for name, device in named_devices if not backends.BY_NAME[device.backend].is_vendor_neutral
    }
    canonical_names = {name: name for name, _device in named_devices}
    for name, device in named_devices:
        if backends.BY_NAME[device.backend].is_vendor_neutral:
            best_match = max(
                vendor_devices, key=lambda candidate: _match_score(vendor_devices[candidate], device), default=None
            )
            if best_match and _match_score(vendor_devices[best_match], device):
                canonical_names[name] = best_match
                del vendor_devices[best_match]
    return canonical_names


def _match_score(first_device: Accelerator, second_device: Accelerator) -> int:
    """Return how likely two backends drive the same device; 0 if they cannot. Both report the same name and memory for a detected device. For a declared
    device, one of the two may differ, and a host has only one integrated GPU."""
    names_match = first_device.name == second_device.name != UNNAMED_DEVICE
    sizes_match = (first_device.memory_mib, first_device.unified) == (second_device.memory_mib, second_device.unified)
    return 4 * names_match + 2 * sizes_match + (first_device.unified and second_device.unified)


def parse_facts(data: Any) -> Facts:
    """:raises Mismatch: the reported or declared facts do not match the type."""
    facts: Facts = typed_json.parse(Facts, data)
    return facts
