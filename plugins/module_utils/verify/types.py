# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Subject of a verification, reports of hosts, and the result."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.cluster_lock import Run
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.loading import LoadCounters
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.rpc import Handshake
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, PlanId
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Verdict

SCHEMA = 1
Line = Annotated[str, Text(max_length=8192)]


class VerifyArguments(NamedTuple):
    """Arguments of the module ``verify``."""

    plan: Mapping[str, Any]
    """A Subject if ``gate`` is true, otherwise a Plan."""
    answers: Mapping[str, Any] = {}
    changed: tuple[str, ...] = ()
    gate: bool = False
    fallback_wait: int = 0
    wake: bool = False
    lacks_proof: bool = False
    benchmark: Optional[Mapping[str, Any]] = None
    path: Optional[Annotated[str, "path"]] = None
    report: Optional[Annotated[str, "path"]] = None


class Subject(NamedTuple):
    """Subject of a verification: the part of the plan that a head also keeps."""

    cluster: str
    model: types.ModelPlan
    head: types.HeadPlan
    hosts: Mapping[str, HostPlan]
    """each host's part of the plan; a kept plan has only the head's part"""
    external_workers: tuple[types.ExternalWorkerPlan, ...]
    links: tuple[str, ...]
    fallbacks: tuple[types.FallbackPlan, ...]
    placement: tuple[types.DevicePlacement, ...] = ()
    """placement on each device; a kept plan has none"""
    unreachable_hosts: tuple[str, ...] = ()
    """hosts that do not answer the controller; not part of a plan"""

    def per_model(self) -> "tuple[Subject, ...]":
        """Return a subject for each of several models; this subject with a single model."""
        return tuple(
            self._replace(
                model=model.model, placement=model.placement, head=self.head._replace(models=(model,), cpu=model.cpu)
            )
            for model in self.head.models or ()
        ) or (self,)

    @property
    def named_model(self) -> Optional[types.ServedModel]:
        """Return the model, if requests must name it; None with a single model."""
        return self.head.models[0] if self.head.models else None

    @property
    def has_known_answer(self) -> bool:
        """Return whether the cluster serves the known-answer model, generated or downloaded."""
        return bool(self.model.known_answer) or known_answer.is_model_name(self.model.name)


class Health(NamedTuple):
    """Health of llama-server."""

    healthy: bool
    detail: Line
    """answer, or reason why there is none"""


class ModelStatus(NamedTuple):
    """State of one of several models."""

    name: Annotated[str, Text()]
    """name in requests"""
    state: Annotated[str, ("loaded", "loading", "asleep", "unloaded", "failed")]
    """state; the next request reloads a failed model"""


class Exits(NamedTuple):
    """Exits of llama-server, as the launcher recorded them."""

    total: Annotated[int, Number()]
    last_exit: Line
    log: tuple[Line, ...]
    """last lines of the log before the last exit"""


class RecordedHandshakes(NamedTuple):
    """The launcher's record of its workers."""

    process: int
    workers: Mapping[str, Handshake]


class Handshakes(NamedTuple):
    """Handshakes of the head with its workers."""

    workers: Mapping[str, Handshake]
    error: Optional[Line] = None
    """reason why the launcher's record of handshakes cannot be used"""


class LinkMeasurement(NamedTuple):
    """The last measurement of a link."""

    mbit_per_second: Optional[float]
    round_trip_ms: Optional[float]
    detail: Line
    """reason why a value is missing"""
    requested: bool
    """whether the plan uses it"""


class ServedFallback(NamedTuple):
    """The fallback on which the head serves."""

    name: str
    """`without` of the plan's `fallbacks`"""
    since: int
    """seconds since 1970"""

    def find_in(self, fallbacks: tuple[types.FallbackPlan, ...]) -> Optional[types.FallbackPlan]:
        """Return the planned fallback; None if the plan does not contain it."""
        return next((fallback for fallback in fallbacks if fallback.without == self.name), None)


Logarithm = Annotated[float, Number(-1000, 0, allows_fractions=True)]


class TextReading(NamedTuple):
    """Probabilities of the tokens of a text."""

    id: PlanId
    """id in the plan: a hash of the model's files and of options that change its results"""
    logarithms: tuple[Logarithm, ...]
    """natural logarithm of the probability of each token"""
    bytes: Annotated[int, Number(1)]
    """size of the text of these tokens"""

    @property
    def bits_per_byte(self) -> float:
        """Return the bits of information per byte of the text."""
        return -sum(self.logarithms) / math.log(2) / self.bytes

    def perplexity_ratio(self, reference: "TextReading") -> float:
        """Return the perplexity divided by that of an earlier reading of the same text."""
        differences = [other - logarithm for logarithm, other in zip(self.logarithms, reference.logarithms)]
        return math.exp(sum(differences) / max(1, len(differences)))


class ReadingRecord(NamedTuple):
    """Readings on the head, the newest last."""

    readings: tuple[TextReading, ...]


class Completion(NamedTuple):
    """The server's answer to a question."""

    text: Line = ""
    tokens: int = 0
    tokens_per_second: Optional[float] = None
    error: Line = ""
    computes_numbers: bool = True
    """whether the server reports probabilities"""


class ServerEvidence(NamedTuple):
    """Evidence of a healthy server."""

    buffers: Mapping[str, Mapping[str, float]]
    """device → kind → MiB, from the log of its start"""
    rdma: int
    """number of its RDMA connections"""
    completion: Optional[Completion]
    """null if the server was asleep and the check did not wake it"""
    reading: Optional[TextReading] = None
    """how well the model predicts plain text; null if unknown"""
    page: bool = False
    """whether it serves its chat page"""
    certificate_names: tuple[Line, ...] = ()
    """names and addresses in its certificate"""


class Evidence(NamedTuple):
    """Report of the head."""

    health: Health
    exits: Exits
    log: tuple[Line, ...]
    """last lines of the log of this start"""
    handshakes: Handshakes
    links: Mapping[str, Optional[LinkMeasurement]]
    waits_for: tuple[Line, ...] = ()
    """sentences about workers for which the launcher waits, or that a failed model needs"""
    load: Optional[LoadCounters] = None
    fallback: Optional[ServedFallback] = None
    server: Optional[ServerEvidence] = None
    """evidence of the server; null while it is not healthy"""
    drift: Optional[Drift] = None
    """differences of the head from its part of the plan; null if it was not compared"""
    verdicts: tuple[Verdict, ...] = ()
    """verdicts of proofs on the head"""
    readings: tuple[TextReading, ...] = ()
    """earlier readings on the head"""
    lock: Optional[Run] = None
    """run that may be changing the cluster"""


class Check(NamedTuple):
    """A single check."""

    name: Line
    subject: Line
    """host, endpoint, device or URL"""
    status: Annotated[str, ("passed", "failed", "not tested")]
    evidence: Line

    def sentence(self) -> str:
        return f"{self.name} ({self.subject}): {self.evidence}"


class Report(NamedTuple):
    """Result of a verification."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    cluster: str
    passed: bool
    checks: tuple[Check, ...]

    @property
    def failed_checks(self) -> list[Check]:
        return [check for check in self.checks if check.status == "failed"]


class VerificationStatus(NamedTuple):
    """Record of a verification on the head, for status."""

    age_s: int
    """seconds since the verification"""
    passed: bool
    """whether no check failed"""
    failed_checks: tuple[Line, ...]
    """the first failed checks, a sentence each"""
    release: Annotated[str, Text()]
    """release that ran"""
    asleep: bool = False
    """whether the server was asleep and therefore not tested"""
