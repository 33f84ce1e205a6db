# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The facts of a host that planning reads, as facts/host.py returns them. A host may report anything. Facts that older versions of the collection do not
report have a default."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Address, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import AMDGPU, BACKENDS

MAX_MIB = 1 << 40
OTHER_DRIVERS = ("Intel", "NVIDIA")
"""Beginnings of names of devices that another Vulkan driver than Mesa's for AMD drives."""
UNNAMED_DEVICE = "declared"
"""Name of a device in ``llama_hardware`` that has none; nothing follows from two devices that have it."""
DEFAULT_FACTS: dict[str, Any] = {
    "system": "Linux",
    "architecture": "x86_64",
    "distribution": {"id": "debian", "version": "13", "family": "debian"},
    "cpu": {"model": "declared", "cores": 8, "features_id": "declared"},
    "memory_mib": 0,
    "accelerators": [],
    "toolchain": {"cmake": "3.31", "ninja": "1.12", "c++": "14.2", **toolkits.DECLARED_TOOLS, "patch": "2.7"},
    "toolchains": None,
    "scope": "system",
    "python": "/usr/bin/python3",
    "service_manager": "systemd",
    "units_filter": True,
    "packaged": {"version": list(capabilities.PACKAGED_TREES)[-1], "installed": []},
    "prefix": "/opt/llamacpp",
    "cache": "/var/cache/llamacpp",
    "units": "/etc/systemd/system",
}
"""Assumed facts of a host that is only declared: a Linux host with systemd and every toolchain, wherever that is."""
Name = Annotated[str, Text()]
Word = Annotated[str, Text("[A-Za-z0-9_.:+~-]*")]
PathText = Annotated[str, Text(r"""[/~][^%$\\'"`;#]*""", 4096)]
"""Path of a folder of a host, which is used in definitions where a service manager has no quotes."""
Mib = Annotated[int, Number(0, MAX_MIB)]
Backend = Annotated[str, BACKENDS]
Figure = Annotated[Optional[float], Number(0, 1 << 30, allows_fractions=True)]


class Accelerator(NamedTuple):
    """A device as one backend drives it; facts/hardware.py says what the fields mean."""

    backend: Backend
    name: Name
    architecture: Word
    memory_mib: Mib
    unified: bool

    @property
    def is_lent_by_amdgpu(self) -> bool:
        """Whether parameters of the kernel's driver for AMD decide how much of the host's memory the device has."""
        record = backends.BY_NAME[self.backend]
        by_amd = record.any_vendor or record.kernel_driver == AMDGPU
        return self.unified and by_amd and not self.name.startswith(OTHER_DRIVERS)


class Distribution(NamedTuple):
    """``id`` and ``version`` of /etc/os-release, and the family whose packages it uses."""

    id: Name
    version: Name
    family: Name


class Packaged(NamedTuple):
    """The distribution's packages of llama.cpp: upstream's version of the one that is offered, and those that are installed."""

    version: Optional[Word]
    installed: tuple[Word, ...]


class MeasuredLink(NamedTuple):
    """Measurement of the link to a host."""

    round_trip_ms: Figure = None
    mbit_per_second: Figure = None
    requested: bool = True
    """Whether an operator asked for it. Planning ignores other measurements: the next run would change the services."""


class Interface(NamedTuple):
    """A network interface with hardware, as facts/interfaces.py finds it."""

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
    """None if they were not looked for."""
    components: Optional[Mapping[str, PathText]] = None


class Processor(NamedTuple):
    """As facts/hardware.py finds it."""

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
    """None if the host was not asked."""
    packaged: Optional[Packaged] = None
    python: Optional[PathText] = None
    accounts: Mapping[str, Name] = {}
    """Account whose name begins like ours → its home."""
    rdma: Optional[tuple[Address, ...]] = None
    """IPv4 addresses of RDMA devices; None if the host was not asked."""
    device_groups: tuple[Word, ...] = ()
    firewall: Optional[Annotated[str, names.FIREWALLS]] = None
    units_filter: Optional[bool] = None
    """Whether IPAddressDeny of a unit takes effect; None if that is not known."""
    kernel: Name = ""
    glibc: Optional[Word] = None
    """Version; empty with another C library, None if it is not known."""
    newest_cuda: Optional[Word] = None
    """Newest CUDA that the NVIDIA driver runs."""
    nvidia_smi: Optional[Name] = None
    """Message with which nvidia-smi fails."""
    interfaces: tuple[Interface, ...] = ()
    reached_at: Optional[Address] = None
    """Address at which the controller reaches it, if the inventory has a name."""
    addresses: tuple[Address, ...] = ()
    """IPv4 addresses of a head, without loopback; empty if the run did not contact it."""
    measured: Mapping[str, Optional[MeasuredLink]] = {}
    """Host → measurement of its link to this head."""
    cluster: Optional[Name] = None
    """Cluster to which it belongs; None if that is not known."""
    disk_gib: Optional[Mib] = None
    """Largest power of 2 that is not more than the size of the file system of ``prefix``; None if it is not known."""
    link_gbit_per_s: Annotated[Optional[float], Number(0.001, 1 << 20, allows_fractions=True)] = None
    """Rate of the link between the head and this host, if ``llama_hardware`` sets it."""

    def accelerators_of(self, backend: str) -> list[Accelerator]:
        """Return the accelerators that this backend drives, in the order of their numbers."""
        return [accelerator for accelerator in self.accelerators if accelerator.backend == backend]

    @property
    def named_accelerators(self) -> tuple[tuple[str, Accelerator], ...]:
        """Accelerators, each with the name that llama.cpp gives it."""
        return _with_names(self.accelerators)

    @property
    def canonical_names(self) -> Mapping[str, str]:
        """Name of each accelerator, as llama.cpp calls it → the name that stands for the device: Vulkan0 and CUDA0 may both be CUDA0."""
        return _canonical_names(self.accelerators)

    def accelerator_of(self, name: str) -> Optional[Accelerator]:
        """Return the accelerator that llama.cpp calls so; None for the processor."""
        return dict(self.named_accelerators).get(name)

    def distinct_accelerators(self) -> list[Accelerator]:
        """Return the accelerators, each device once: one backend drives those of its vendor, another those of every vendor."""
        return [accelerator for name, accelerator in self.named_accelerators if self.canonical_names[name] == name]

    def architectures(self, backend: str) -> list[str]:
        return sorted({accelerator.architecture for accelerator in self.accelerators_of(backend)})


@functools.lru_cache(maxsize=64)
def _with_names(accelerators: tuple[Accelerator, ...]) -> tuple[tuple[str, Accelerator], ...]:
    return tuple(
        (backends.device_name(backend, index), accelerator)
        for backend in BACKENDS[1:]
        for index, accelerator in enumerate(item for item in accelerators if item.backend == backend)
    )


@functools.lru_cache(maxsize=64)
def _canonical_names(accelerators: tuple[Accelerator, ...]) -> Mapping[str, str]:
    pairs = _with_names(accelerators)
    choices = {name: device for name, device in pairs if not backends.BY_NAME[device.backend].any_vendor}
    canonical = {name: name for name, _device in pairs}
    for name, device in pairs:
        if backends.BY_NAME[device.backend].any_vendor:
            best_match = max(choices, key=lambda candidate: _match_score(choices[candidate], device), default=None)
            if best_match and _match_score(choices[best_match], device):
                canonical[name] = best_match
                del choices[best_match]
    return canonical


def _match_score(first_device: Accelerator, second_device: Accelerator) -> int:
    """How sure it is that two backends drive the same device; 0 where they do not. Facts have the same name and memory for both; of declared
    devices one of these may differ, and a host has integrated graphics once."""
    same_name = first_device.name == second_device.name != UNNAMED_DEVICE
    same_size = (first_device.memory_mib, first_device.unified) == (second_device.memory_mib, second_device.unified)
    return 4 * same_name + 2 * same_size + (first_device.unified and second_device.unified)


def facts_of(data: Any) -> Facts:
    """:raises Mismatch: a host reports something else, or an operator declares it."""
    facts: Facts = typed_json.parse(Facts, data)
    return facts
