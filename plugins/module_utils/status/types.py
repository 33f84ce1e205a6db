# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a host and a cluster are at this moment. Sizes are in MiB and times in seconds, where names do not say otherwise."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import ABSENT
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import resources
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift.serving_record import ServingRecord
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Difference
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, Scope
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import (
    Exits,
    Health,
    ModelStatus,
    VerificationStatus,
)

SCHEMA = 2
Line = Annotated[str, Text(longest=2000)]
Word = Annotated[str, Text()]


class Arguments(NamedTuple):
    """Of the module ``host_status``."""

    scope: Scope = "auto"
    plan: Optional[HostPlan] = None
    head: Optional[HeadPlan] = None
    report: bool = False


class HeadCondition(NamedTuple):
    """What is known on the head."""

    health: Optional[Health]
    """null where nobody knows where to ask"""
    serving: Optional[ServingRecord]
    """null where the launcher left nothing that can be used"""
    current: bool
    """whether that launcher runs"""
    waits_for: tuple[Line, ...]
    """workers that did not shake hands, a sentence for each"""
    ends: Exits
    """of llama-server"""
    verified: Optional[VerificationStatus]
    """null where it was never verified"""
    models: tuple[ModelStatus, ...] = ()
    """of several, those that llama-server reports"""


NOTHING_KNOWN = HeadCondition(None, None, False, (), Exits(0, "", ()), None)


class Condition(NamedTuple):
    """How a host is, read there."""

    now: int
    """its clock, since 1970"""
    service_states: Mapping[str, Annotated[str, ("running", "failed", "stopped")]]
    """service → as its manager knows it"""
    uptimes_s: Mapping[str, Optional[int]]
    """planned service → since its process started"""
    restarts: Mapping[str, int]
    """service → by its manager, where it counts them"""
    resources: resources.Resources
    """memory and disks"""
    head: Optional[HeadCondition] = None
    """of a head; null elsewhere"""


class WorkerStatus(NamedTuple):
    """A worker of a host; device, protocol and used are of the plan, null where there is none."""

    service: str
    """its name"""
    endpoint: Optional[str]
    """where the head reaches it"""
    device: Optional[str]
    """backend and device"""
    protocol: Optional[str]
    """of its release"""
    used: Optional[bool]
    """whether the head uses it"""
    state: str
    """running, stopped, failed, waiting; different: with another command line or environment; foreign: something else has its port"""
    uptime_s: Optional[int]
    """of its process"""
    restarts: Optional[int]
    """by the service manager itself, where it counts them (systemd)"""
    clients: tuple[str, ...]
    """addresses that are connected to its port"""


class HostStatus(NamedTuple):
    """A host of the cluster."""

    name: str
    """in the inventory"""
    is_head: bool
    """whether it is the head"""
    said: str
    """why nothing is known of it; empty where it answered"""
    reachable: bool
    """whether it answered"""
    installed: bool
    """whether a service of the collection is defined there"""
    workers: tuple[WorkerStatus, ...]
    """its workers"""
    resources: Optional[resources.Resources]
    """null where it did not answer"""
    differences: Optional[tuple[Difference, ...]]
    """from its part of the plan; null where it was not compared"""


class RestartStatus(NamedTuple):
    """A restart of llama-server."""

    age_s: int
    """how long ago"""
    text: str
    """why"""


class ReleaseStatus(NamedTuple):
    """The planned release."""

    ref: str
    """its name"""
    build: int
    """number"""
    protocol: Optional[str]
    """of RPC"""


class ClusterStatus(NamedTuple):
    """The cluster as a whole."""

    name: str
    """of its group"""
    state: str
    """serving, asleep, fallback, loading, waiting, starting, stopped, failed, silent, running (a head without a plan), unknown or not installed"""
    detail: str
    """what the server or its launcher says of a state that is not serving"""
    head: Optional[str]
    """name of the host"""
    url: Optional[str]
    """for clients"""
    model: Optional[str]
    """its name"""
    planned: Optional[ReleaseStatus]
    """null without a plan"""
    running_builds: tuple[str, ...]
    """ids of the builds whose programs run, on any host that was compared"""
    as_planned: Optional[bool]
    """whether all hosts are as the inventory plans; null where that is not known"""
    uptime_s: Optional[int] = None
    """of llama-server"""
    restarts: Optional[int] = None
    """of llama-server by its launcher"""
    last_restarts: tuple[RestartStatus, ...] = ()
    """the newest first"""
    asleep_s: Optional[int] = None
    """for how long llama-server sleeps; null where it does not"""
    without: tuple[str, ...] = ()
    """workers that the fallback leaves out"""
    waiting_for: tuple[str, ...] = ()
    """endpoints"""
    load: Optional[loading.LoadProgress] = None
    """while the model is loaded; null otherwise, and where the kernel does not say it"""
    verified: Optional[VerificationStatus] = None
    """null where it was never verified"""
    models: Annotated[tuple[ModelStatus, ...], ABSENT] = ()
    """of several that take turns; missing where there is one alone"""


class Status(NamedTuple):
    """What status.yml shows."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    """2"""
    time: int
    """of the controller, in seconds since 1970"""
    cluster: ClusterStatus
    """as a whole"""
    hosts: tuple[HostStatus, ...]
    """in the order of the inventory"""
    unplanned: str
    """why there is no plan; empty where there is one"""
    other: str
    """what serves in place of what the inventory plans, as after a rollback; empty where that is the same"""
    problems: tuple[str, ...]
    """why the cluster is not healthy; empty where it is"""
