# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work and result of a proof, which compares layers of the model on each planned device with the head's processor."""

from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Size, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    PathText,
    PlanId,
    SafeName,
    Seconds,
)

Line = Annotated[str, Text(max_length=1024)]
Count = Annotated[int, Number(0, 1 << 20)]
Figure = Annotated[float, Number(0, 1000, allows_fractions=True)]


class Side(NamedTuple):
    """A device that computes the layers, or the head's processor."""

    id: PlanId
    """hash of everything that affects its result, except the size of a micro-batch"""
    name: Line
    """readable name: host and device"""
    argv: tuple[str, ...]
    """command line of llama-server, without model and address"""


class Remedy(NamedTuple):
    """Settings with which a device may compute correctly."""

    setting: Line
    """variables and their values"""
    words: tuple[str, ...]
    """words to append to a side's command line"""


class ProofWork(NamedTuple):
    """Work of a proof on the head; the runner adds model and address to the command lines."""

    model: PathText
    layers: tuple[Annotated[int, Number(0, 512)], ...]
    """numbers of the layers that are computed"""
    bytes: Size
    """size of a file with these layers"""
    folder: PathText
    """folder for this file while the proof runs"""
    account: Optional[SafeName]
    """account of the services"""
    environment: Mapping[str, str]
    launcher: tuple[str, ...]
    """command line of the launcher that runs the servers; empty if a service runs the launcher"""
    sockets: bool
    """whether llama-server listens on Unix sockets"""
    context: Annotated[int, Number(1, 1 << 20)]
    """tokens"""
    micro_batch: Count
    """tokens that a device computes together"""
    limit_s: Seconds
    """time after which the processor gets no further long prompts, so that a slow processor does not delay the run"""
    timeout_s: Seconds
    """time limit for a server to be healthy, and for each answer"""
    processor: Side
    variants: tuple[tuple[str, ...], ...]
    """words to append to the processor's command line to make it compute in another correct way"""
    devices: tuple[Side, ...]
    remedies: tuple[Remedy, ...] = ()
    """settings to try on a device that computes incorrectly"""


class Verdict(NamedTuple):
    """Result of comparing a device with the head's processor."""

    id: PlanId
    """id of its side"""
    name: Line
    micro_batch: Count
    """micro-batch of the work"""
    distance: Figure = 0.0
    """largest distance from the processor, relative to its bound"""
    bound: Figure = 0.0
    """largest distance that counts as correct for these prompts"""
    place: Line = ""
    """prompts with that distance"""
    max_compared_tokens: Absent[Count] = None
    """tokens of the longest compared prompt, if the processor had no time for all prompts"""
    failure: Absent[Line] = None
    """how llama-server crashed, with a line of its log"""
    remedy: Absent[Line] = None
    """settings that help, if some were tried"""

    @property
    def is_correct(self) -> bool:
        return not self.failure and self.distance <= self.bound

    def sentence(self) -> str:
        figures = f"distance {self.distance:.3f}, allowed {self.bound:.3f}"
        result = (
            f"computes correctly ({figures})"
            if self.is_correct
            else f"computes incorrectly for {self.place} ({figures})"
        )
        limit_text = (
            f"prompts of more than {self.max_compared_tokens} tokens were not compared, because the head's processor was too slow or busy"
            if self.max_compared_tokens
            else None
        )
        return "; ".join([f"{self.name} {self.failure or result}", *filter(None, [limit_text, self.remedy])])


class Proof(NamedTuple):
    seconds: Count
    """duration"""
    untested: Absent[Line] = None
    """reason why nothing could be compared"""
    devices: tuple[Verdict, ...] = ()

    def failures(self) -> list[str]:
        """Return a sentence about each device that computes incorrectly."""
        return [verdict.sentence() for verdict in self.devices if not verdict.is_correct]


class VerdictRecord(NamedTuple):
    """Verdicts stored on the head, the newest last, so that a device is not proven twice."""

    verdicts: tuple[Verdict, ...]

    def valid_verdicts(self, work: ProofWork) -> dict[str, Verdict]:
        """Return, by id, the verdicts on this work's devices that computed correctly with at least its micro-batch."""
        ids = {side.id for side in work.devices}
        return {
            verdict.id: verdict
            for verdict in self.verdicts
            if verdict.id in ids and verdict.is_correct and verdict.micro_batch >= work.micro_batch
        }

    def with_verdicts(self, verdicts: Iterable[Verdict], max_count: int) -> "VerdictRecord":
        """Return the last ``max_count`` verdicts of the record and of a proof."""
        new_verdicts = {verdict.id: verdict for verdict in verdicts}
        older_verdicts = [verdict for verdict in self.verdicts if verdict.id not in new_verdicts]
        return VerdictRecord(tuple([*older_verdicts, *new_verdicts.values()][-max_count:]))
