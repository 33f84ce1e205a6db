# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges which worker computes wrong, by what the known-answer model answers from instances on staging ports, with and without some of the workers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Check, Report

NOT_ASKED = "The known answer was not asked for"


class Tried(NamedTuple):
    """What came of one placement."""

    without: tuple[str, ...]
    """`HOST:WORKER` that were left out"""
    workers: tuple[str, ...] = ()
    """those that took part"""
    obstacles: tuple[str, ...] = ()
    """why the instances were not started"""
    errors: Mapping[str, str] = {}
    """host → why they failed, empty where they did not"""
    report: Optional[Report] = None
    """on them; null where they did not start"""

    @property
    def answer(self) -> Optional[Check]:
        """What was answered; None where nothing was."""
        if self.obstacles or any(self.errors.values()) or not self.report:
            return None
        return next((check for check in self.report.checks if check.name == "known answer"), None)

    @property
    def right(self) -> Optional[bool]:
        return {"passed": True, "failed": False}.get(self.answer.status) if self.answer else None

    def sentence(self) -> str:
        failed = self.report.failed[:1] if self.report else []
        why = [*self.obstacles, *(f"{host}: {text}" for host, text in self.errors.items() if text)]
        why += [check.sentence() for check in failed]
        said = self.answer.evidence if self.answer else "; ".join(why) or "its instances did not start"
        result = {True: "right", False: "wrong", None: "no answer"}[self.right]
        return f"{result} with {', '.join(self.workers) or 'the head alone'}: {printable(said)}"


class Verdict(NamedTuple):
    """Who computes wrong."""

    text: str
    """sentences"""
    wrong: tuple[str, ...] = ()
    """workers that do"""
    cleared: tuple[str, ...] = ()
    """workers that took part in a right answer"""


def judge(tried: Sequence[Tried], why_not: str = "") -> Verdict:
    """:param tried: first with all workers, then without some where that was wrong.
    :param why_not: why nothing was tried."""
    if not tried:
        return Verdict(f"{NOT_ASKED}: {why_not}.")
    whole = tried[0]
    if whole.right is None:
        return Verdict(f"{NOT_ASKED}, so whether a worker computes wrong is not known: {whole.sentence()}.")
    said = printable(whole.answer.evidence) if whole.answer else ""
    cleared = {worker for one in tried if one.right for worker in one.workers}
    if whole.right:
        return Verdict(
            f"No worker computes wrong now, of {', '.join(whole.workers) or 'none'}: {said}.", (), whole.workers
        )
    suspects = [{*one.workers} - cleared for one in tried if one.right is False]
    head_alone = next((one for one in tried if not one.workers), None)
    clear = tuple(worker for worker in whole.workers if worker in cleared)
    rest = f" The answer is right with {', '.join(clear)}." if clear else ""
    if head_alone and head_alone.right is False:
        return Verdict(
            f"The head computes wrong by itself: {head_alone.sentence()}. Its workers cannot be judged.{rest}"
        )
    wrong = tuple(worker for worker in whole.workers if {worker} in suspects)
    if wrong:
        verb = "computes" if len(wrong) == 1 else "compute"
        return Verdict(f"{', '.join(wrong)} {verb} wrong. With all workers {said}.{rest}", wrong, clear)
    return Verdict(f"The answer is wrong, and by no worker alone: {said}.{rest}", (), clear)
