# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a verification asks about, what hosts report, and what is judged of it."""

import math
from collections.abc import Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.cluster_lock import Run
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.loading import LoadCounters
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.rpc import Handshake
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, PlanId
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    DevicePlacement,
    ExternalWorkerPlan,
    FallbackPlan,
    HeadPlan,
    ModelPlan,
    ServedModel,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Verdict

SCHEMA = 1
Line = Annotated[str, Text(longest=8192)]


class Subject(NamedTuple):
    """What the head is asked about: a part of the plan, which the record of a plan on a head has too."""

    cluster: str
    model: ModelPlan
    head: HeadPlan
    hosts: Mapping[str, HostPlan]
    """name → its part; of a recorded plan the head's alone"""
    external_workers: tuple[ExternalWorkerPlan, ...]
    links: tuple[str, ...]
    fallbacks: tuple[FallbackPlan, ...]
    placement: tuple[DevicePlacement, ...] = ()
    """what each device gets; of a recorded plan nothing"""
    away: tuple[str, ...] = ()
    """hosts that do not answer the controller; no part of a plan"""

    def each(self) -> "tuple[Subject, ...]":
        """What is asked of each model that takes turns; this where there is one alone."""
        return tuple(
            self._replace(model=one.model, placement=one.placement, head=self.head._replace(models=(one,), cpu=one.cpu))
            for one in self.head.models or ()
        ) or (self,)

    @property
    def asked(self) -> Optional[ServedModel]:
        """The model that is asked for by its name; None where there is one alone."""
        return self.head.models[0] if self.head.models else None

    @property
    def has_known_answer(self) -> bool:
        """Whether the known-answer model is served, made here or fetched."""
        return bool(self.model.known_answer) or known_answer.is_name(self.model.name)


# --------------------------------------------------------------------------------------------------- what hosts report


class Health(NamedTuple):
    """Whether llama-server is healthy."""

    healthy: bool
    detail: Line
    """what it answers, or why it does not"""


class ModelStatus(NamedTuple):
    """A model of several that take turns."""

    name: Annotated[str, Text()]
    """by which clients ask for it"""
    state: Annotated[str, ("loaded", "loading", "asleep", "unloaded", "failed")]
    """the next question loads a failed one again"""


class Exits(NamedTuple):
    """How llama-server ended, as the launcher recorded it."""

    number: Annotated[int, Number()]
    how: Line
    log: tuple[Line, ...]
    """last lines before that"""


class RecordedHandshakes(NamedTuple):
    """What the launcher writes of its workers."""

    process: int
    workers: Mapping[str, Handshake]


class Handshakes(NamedTuple):
    """What the head knows of its workers."""

    workers: Mapping[str, Handshake]
    error: Optional[Line] = None
    """why the launcher's record of them cannot be used"""


class LinkMeasurement(NamedTuple):
    """The last measurement of a link."""

    mbit_per_second: Optional[float]
    round_trip_ms: Optional[float]
    detail: Line
    """why one of them is missing"""
    requested: bool
    """whether the plan counts with it"""


class ServedFallback(NamedTuple):
    """The fallback that the head serves on."""

    name: str
    """`without` of the plan's `fallbacks`"""
    since: int
    """seconds since 1970"""

    def planned(self, fallbacks: tuple[FallbackPlan, ...]) -> Optional[FallbackPlan]:
        """This one; None where the plan has no such fallback."""
        return next((fallback for fallback in fallbacks if fallback.without == self.name), None)


Logarithm = Annotated[float, Number(-1000, 0, real=True)]


class Reading(NamedTuple):
    """Probabilities of the tokens of a text."""

    id: PlanId
    """that of the plan: a hash of the model's files and of the options that change what it computes"""
    logarithms: tuple[Logarithm, ...]
    """natural logarithm of the probability of each token"""
    bytes: Annotated[int, Number(1)]
    """bytes of these tokens"""

    @property
    def bits_per_byte(self) -> float:
        """Information of a byte of the text."""
        return -sum(self.logarithms) / math.log(2) / self.bytes

    def ratio(self, earlier: "Reading") -> float:
        """Return the perplexity divided by that of an earlier reading of the same text."""
        pairs = [*zip(self.logarithms, earlier.logarithms)]
        return math.exp(sum(before - now for now, before in pairs) / len(pairs))


class ReadingRecord(NamedTuple):
    """Readings that the head keeps, the newest last."""

    readings: tuple[Reading, ...]


class Completion(NamedTuple):
    """The server's answer to a question."""

    text: Line = ""
    tokens: int = 0
    tokens_per_second: Optional[float] = None
    error: Line = ""
    computes_numbers: bool = True
    """whether the server reports probabilities"""


class ServerEvidence(NamedTuple):
    """What a healthy server shows."""

    buffers: Mapping[str, Mapping[str, float]]
    """device → kind → MiB, by the log of its start"""
    rdma: int
    """connections over RDMA of the llama-server that was asked"""
    completion: Optional[Completion]
    """null where it sleeps and was not woken"""
    reading: Optional[Reading] = None
    """how well it predicts plain text; null if it does not say"""


class Evidence(NamedTuple):
    """What the head reports."""

    health: Health
    exits: Exits
    log: tuple[Line, ...]
    """last lines of the log of this start"""
    handshakes: Handshakes
    links: Mapping[str, Optional[LinkMeasurement]]
    waits_for: tuple[Line, ...] = ()
    """what the launcher waits for, or a model that failed needs, a sentence for each worker"""
    load: Optional[LoadCounters] = None
    fallback: Optional[ServedFallback] = None
    server: Optional[ServerEvidence] = None
    """null while it is not healthy"""
    drift: Optional[Drift] = None
    """how the head differs from its part of the plan; null where it was not compared"""
    verdicts: tuple[Verdict, ...] = ()
    """those of proofs that the head keeps"""
    readings: tuple[Reading, ...] = ()
    """earlier readings that the head keeps"""
    lock: Optional[Run] = None
    """the run that may change the cluster"""


# ------------------------------------------------------------------------------------------------------ what is judged


class Check(NamedTuple):
    """One thing that was verified."""

    name: Line
    subject: Line
    """host, endpoint, device or URL"""
    status: Annotated[str, ("passed", "failed", "not tested")]
    evidence: Line

    def sentence(self) -> str:
        return f"{self.name} of {self.subject}: {self.evidence}"


class Report(NamedTuple):
    """Everything that was verified."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    cluster: str
    passed: bool
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "failed"]


class VerificationStatus(NamedTuple):
    """What the head keeps of a verification, for status."""

    age_s: int
    """how long ago"""
    passed: bool
    """whether no check failed"""
    failed: tuple[Line, ...]
    """the first failed checks, a sentence each"""
    release: Annotated[str, Text()]
    """that ran"""
    asleep: bool = False
    """whether the server slept, and was asked nothing"""
