# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a proof runs, and what it finds: the model's own first layers on the planned devices, beside the head's processor."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Size, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import Path, PlanId, Seconds, Word

Line = Annotated[str, Text(longest=1024)]
Count = Annotated[int, Number(0, 1 << 20)]


class Side(NamedTuple):
    """One or several devices that compute the same."""

    name: Line
    """for people: host and device"""
    argv: tuple[str, ...]
    """of llama-server, without model and port"""
    processor: bool
    """whether processors compute it"""


class Remedy(NamedTuple):
    """Other settings, with which a device may compute right."""

    setting: Line
    """variables and their values"""
    words: tuple[str, ...]
    """after the command line of a side"""


class Work(NamedTuple):
    """What the head runs. Whoever runs it gives model and port."""

    id: PlanId
    """a hash over all that the result depends on"""
    model: Path
    layers: Annotated[int, Number(1, 512)]
    bytes: Size
    """of a file of these"""
    folder: Path
    """for that file, for as long as the proof takes"""
    account: Optional[Word]
    """as which services run"""
    environment: Mapping[str, str]
    client: tuple[str, ...]
    """what stands before each command line: the launcher, where workers are behind tunnels"""
    context: Annotated[int, Number(1, 1 << 20)]
    """tokens"""
    patience: Seconds
    """in which a server has to be healthy, and to answer each question"""
    processor: Side
    together: Optional[Side]
    """all devices in their order; null where there are fewer layers than devices"""
    devices: tuple[Side, ...]
    remedies: tuple[Remedy, ...] = ()
    """that are tried where a side computes wrong"""


class Compared(NamedTuple):
    """How one side computes, compared with the head's processor."""

    name: Line
    equal: Count
    """positions at which the likeliest token is the same"""
    of: Count
    differs: tuple[Line, ...]
    """where it computes something else; empty where nowhere"""
    ended: Absent[Line] = None
    """how llama-server ended, with the line of its log"""
    remedy: Absent[Line] = None
    """which settings make it right, where some were tried"""

    @property
    def right(self) -> bool:
        return not self.differs and not self.ended

    def sentence(self, best: Optional["Compared"] = None) -> str:
        """:param best: another side, which computes right."""
        how = f"computes wrong {', '.join(self.differs)}" if self.differs else "computes right"
        beside = f" ({best.equal} of {best.of} on {best.name})" if best else ""
        found = self.ended or f"{how}: likeliest token equal in {self.equal} of {self.of}{beside}"
        return "; ".join([f"{self.name} {found}", *filter(None, [self.remedy])])


class Proof(NamedTuple):
    """The result of a proof. The head keeps it, so that it is not repeated."""

    id: PlanId
    """of the work"""
    seconds: Count
    """that it took"""
    untested: Absent[Line] = None
    """why nothing could be compared"""
    together: Absent[Compared] = None
    devices: tuple[Compared, ...] = ()
    """each device alone: where together they are not right, or there are more devices than layers"""

    @property
    def right(self) -> bool:
        return not self.untested and all(one.right for one in (self.together, *self.devices) if one)

    def wrong(self) -> list[str]:
        """Sentences that name the devices that compute wrong."""
        best = max((one for one in self.devices if one.right), key=lambda one: one.equal, default=None)
        alone = [one.sentence(best) for one in self.devices if not one.right]
        if alone or not self.together or self.together.right:
            return alone
        return [f"{self.together.sentence()}, and each of them alone computes right"]


class Record(NamedTuple):
    """What the head keeps."""

    proofs: tuple[Proof, ...]
    """the last ones"""
