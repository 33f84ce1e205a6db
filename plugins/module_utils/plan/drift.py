# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Differences between a host and its part of the plan, as host_info reports them."""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import LastPlan

RUNNING, WAITING, STOPPED, FOREIGN, DIFFERENT = STATES = "running", "waiting", "stopped", "foreign", "different"
"""States of a planned service: running as planned; launcher waits for workers; stopped; as in STATE_TEXTS."""
STATE_TEXTS = {FOREIGN: "stopped: another program uses its port", DIFFERENT: "running with another configuration"}
Name = Annotated[str, Text()]
Line = Annotated[str, Text(max_length=4096)]


class ServiceState(NamedTuple):
    """State of a planned service."""

    state: Annotated[str, STATES]
    pid: Optional[Annotated[int, Number()]]
    addresses: tuple[Name, ...]
    """addresses that listen on the service's port"""
    clients: tuple[Name, ...]
    """addresses connected to the service's port"""
    fallback: Absent[Name] = None
    """name of the running fallback"""


class PortProbe(NamedTuple):
    """An attempt to connect to a port that should be closed."""

    endpoint: Name
    source: Name
    """address that tried to connect"""
    open: bool


DifferenceKind = Literal[
    "account",
    "folder",
    "release",
    "file",
    "model",
    "definition",
    "boot",
    "manager",
    "firewall",
    "link",
    "tuning",
    "service",
    "unplanned",
    "unneeded",
    "record",
    "key",
]


class Difference(NamedTuple):
    """A difference from the plan."""

    kind: DifferenceKind
    """kind, for programs"""
    subject: Annotated[str, Text(max_length=4096)]
    """name or path of the object that differs"""
    text: Annotated[str, Text(max_length=8192)]
    """sentence for people, without a full stop"""


class Drift(NamedTuple):
    """Differences between a host and its part of the plan."""

    services: Mapping[str, ServiceState]
    """planned service → its state"""
    defined: tuple[Line, ...]
    """names of services that have a definition"""
    unplanned: tuple[Line, ...]
    """names of defined services that are not planned"""
    missing_builds: tuple[Line, ...]
    """ids of planned builds that are missing, damaged or from an untrusted builder"""
    running_build_ids: tuple[Line, ...]
    """ids of the releases whose programs are running"""
    changed_files: tuple[Line, ...]
    model_files: tuple[Line, ...]
    """files of the model that are missing or have different content"""
    redefined: tuple[Name, ...]
    """services whose definition, or running process, does not match the plan"""
    port_probes: tuple[PortProbe, ...]
    """attempts that had a result"""
    last: Optional[LastPlan]
    """last plan that the host accepted"""
    differences: tuple[Difference, ...]
    """all changes that site.yml would make"""
    archives: Mapping[Line, Annotated[str, Text("[0-9a-f]{64}")]] = {}
    """id of each installed build of upstream's programs → SHA-256 of its archive"""
    tunnel_keys: Absent[Mapping[Line, tuple[Name, ...]]] = None
    """key file of a tunnel → ids of its keys, empty if the file is missing or other accounts can read it; missing without tunnels"""
