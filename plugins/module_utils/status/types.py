# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Current state of a host and a cluster. Sizes are in MiB and times in seconds unless their names say otherwise."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import ABSENT, Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import resources
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift.serving_record import ServingRecord
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Difference
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, Scope
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import types

SCHEMA = 2
Line = Annotated[str, Text(max_length=2000)]


class HostStatusArguments(NamedTuple):
    """Arguments of the module ``host_status``."""

    scope: Scope = "auto"
    plan: Optional[HostPlan] = None
    head: Optional[HeadPlan] = None
    report: bool = False


class HeadCondition(NamedTuple):
    """State of the head."""

    health: Optional[types.Health]
    """answer of llama-server; null if its address is unknown"""
    serving: Optional[ServingRecord]
    """record of the launcher; null if it is missing or unreadable"""
    current: bool
    """whether the launcher that wrote it is running"""
    waits_for: tuple[Line, ...]
    """sentences about workers that did not complete the handshake"""
    ends: types.Exits
    """exits of llama-server"""
    verified: Optional[types.VerificationStatus]
    """last verification; null if it was never verified"""
    models: tuple[types.ModelStatus, ...] = ()
    """state of each of several models, as llama-server reports it"""


UNKNOWN_HEAD_CONDITION = HeadCondition(None, None, False, (), types.Exits(0, "", ()), None)


class Condition(NamedTuple):
    """State of a host, read on the host."""

    now: int
    """time on its clock, in seconds since 1970"""
    service_states: Mapping[str, Annotated[str, ("running", "failed", "stopped")]]
    """service → its state in the service manager"""
    uptimes_s: Mapping[str, Optional[int]]
    """planned service → seconds since its process started"""
    restarts: Mapping[str, int]
    """service → restarts by its manager, if the manager counts them"""
    resources: resources.Resources
    """memory and disks"""
    head: Optional[HeadCondition] = None
    """state of the head; null on other hosts"""


class WorkerStatus(NamedTuple):
    """A worker of a host. Its device, protocol and use come from the plan; null without one."""

    service: str
    """name of its service"""
    endpoint: Optional[str]
    """address and port at which the head reaches it"""
    device: Optional[str]
    """backend and device"""
    protocol: Optional[str]
    """RPC protocol of its release"""
    used: Optional[bool]
    """whether the head uses it"""
    state: str
    """running, stopped, failed, waiting; different: with another command line or environment; foreign: another program uses its port"""
    uptime_s: Optional[int]
    """seconds since its process started"""
    restarts: Optional[int]
    """restarts by the service manager, if it counts them (systemd)"""
    clients: tuple[str, ...]
    """addresses that are connected to its port"""


class HostStatus(NamedTuple):
    """A host of the cluster."""

    name: str
    """name in the inventory"""
    is_head: bool
    """whether it is the head"""
    unknown_reason: str
    """reason why its state is unknown; empty if it answered"""
    reachable: bool
    """whether it answered"""
    installed: bool
    """whether a service of the collection is defined on it"""
    workers: tuple[WorkerStatus, ...]
    """its workers"""
    resources: Optional[resources.Resources]
    """memory and disks; null if it did not answer"""
    differences: Optional[tuple[Difference, ...]]
    """differences from its part of the plan; null if it was not compared"""


class RestartStatus(NamedTuple):
    """A restart of llama-server."""

    age_s: int
    """seconds since the restart"""
    text: str
    """reason for the restart"""


class ReleaseStatus(NamedTuple):
    """The planned release."""

    ref: str
    """name of the release"""
    build: int
    """build number"""
    protocol: Optional[str]
    """version of the RPC protocol"""


class ClusterStatus(NamedTuple):
    """The whole cluster."""

    name: str
    """name of its group"""
    state: str
    """serving, asleep, fallback, loading, waiting, starting, stopped, failed, silent, running (a head without a plan), unknown or not installed"""
    detail: str
    """explanation by the server or its launcher, for states other than serving"""
    head: Optional[str]
    """name of the head"""
    url: Optional[str]
    """URL for clients"""
    model: Optional[str]
    """name of the model"""
    planned: Optional[ReleaseStatus]
    """planned release; null without a plan"""
    running_builds: tuple[str, ...]
    """ids of the builds whose programs are running, on all hosts that were compared"""
    as_planned: Optional[bool]
    """whether all hosts are as planned; null if unknown"""
    uptime_s: Optional[int] = None
    """seconds since llama-server started"""
    restarts: Optional[int] = None
    """restarts of llama-server by its launcher"""
    last_restarts: tuple[RestartStatus, ...] = ()
    """last restarts, the newest first"""
    asleep_s: Optional[int] = None
    """seconds since llama-server fell asleep; null if it is awake"""
    without: tuple[str, ...] = ()
    """workers that the fallback does not use"""
    waiting_for: tuple[str, ...] = ()
    """endpoints of the workers for which the launcher waits"""
    load: Optional[loading.LoadProgress] = None
    """progress while the model is loading; null otherwise, and if the kernel does not report it"""
    verified: Optional[types.VerificationStatus] = None
    """last verification; null if it was never verified"""
    models: Annotated[tuple[types.ModelStatus, ...], ABSENT] = ()
    """state of each of several models; missing with one model"""
    balancer: Absent[str] = None
    """status of this replica according to the balancer, in HAProxy's words; missing without a balancer"""


class Status(NamedTuple):
    """The status that status.yml shows."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    """2"""
    time: int
    """time on the controller's clock, in seconds since 1970"""
    cluster: ClusterStatus
    """state of the cluster"""
    hosts: tuple[HostStatus, ...]
    """hosts in the order of the inventory"""
    unplanned: str
    """reason why there is no plan; otherwise empty"""
    other: str
    """plan that serves instead of the inventory's, for example after a rollback; otherwise empty"""
    problems: tuple[str, ...]
    """reasons why the cluster is not healthy; empty if it is healthy"""
