# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lease of a cluster: a file on its head that names the run that may change hosts. Its modification time is that of the last renewal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    files,
    locks,
    names,
    reading,
    typed_json,
    validation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import duration
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text

STALE_SECONDS = 2 * 3600
"""Without a renewal. A run renews its lease before it changes services, and while it builds, downloads or loads on the head; a build of another host may
take this long."""
LOCK_SECONDS = 60
"""For what takes milliseconds."""
LEASE_BYTES = 64 * 1024
Name = Annotated[str, Text(longest=128)]


class Holder(NamedTuple):
    """The run that a lease belongs to, as the file has it."""

    run: Annotated[str, Text(r"[0-9a-f]{32}")]
    user: Name
    controller: Name
    process: Annotated[int, Number(1)]
    playbook: Annotated[str, Text(longest=1024)]
    since: Annotated[int, Number()]
    """Seconds of the head's clock."""


class Lease(NamedTuple):
    """What the head knows of the run that holds the lease."""

    holder: Holder | None
    """None where the file holds something else."""
    age: float
    """Seconds since the last renewal; negative where the clock of the head was set back."""

    def is_of(self, run: str) -> bool:
        return self.holder is not None and self.holder.run == run

    def is_stale(self) -> bool:
        return abs(self.age) > STALE_SECONDS

    def describe(self) -> str:
        if not self.holder:
            return f"a run that left an unreadable {names.LEASE} {self.age:.0f} s ago"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.holder.since))
        whole = f"{self.holder.playbook} of {self.holder.user} on {self.holder.controller} (process {self.holder.process}) since {since}"
        return validation.printable(whole, None)


class HeldError(Exception):
    """Another run holds the lease. The message says who, and how to take over."""

    def __init__(self, message: str, holder: Holder | None) -> None:
        super().__init__(message)
        self.holder = holder


@contextmanager
def _locked(prefix: Path) -> Iterator[None]:
    path = prefix / names.LEASE_LOCK
    try:
        with locks.hold(path, LOCK_SECONDS):
            yield
    except locks.BusyError:
        raise Refusal(
            f"{locks.shown_holders(path)} on the head has held {path} for more than {LOCK_SECONDS} s: end it, and run the playbook again"
        ) from None


def read(prefix: Path) -> Lease | None:
    """The lease on a head; None where no run has one."""
    path = prefix / names.LEASE
    try:
        age = time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return None
    try:
        holder = reading.read_object(path, LEASE_BYTES)
    except (OSError, ValueError):
        return Lease(None, age)
    return Lease(None if typed_json.problem("", holder, Holder) else typed_json.parse(Holder, holder), age)


def acquire(prefix: Path, run: Holder, ended: str = "", take_over: bool = False) -> str:
    """Gives the lease to a run, or renews it; returns whose lease it took over, as a sentence.

    :param ended: a run that has ended, as its own controller knows; its lease is taken over.
    :param take_over: whether the operator takes it over from any run.
    :raises HeldError: another run holds it.
    """
    with _locked(prefix):
        lease = read(prefix)
        if lease and lease.is_of(run.run):
            os.utime(prefix / names.LEASE)
            return ""
        if lease and not (take_over or lease.is_stale() or (ended and lease.is_of(ended))):
            raise HeldError(
                f"Another run changes this cluster: {lease.describe()}. It renewed its lease {duration(abs(lease.age))} ago. Wait until it has ended. If it "
                f"hangs or was killed, take over with -e {names.TAKE_OVER}=true; after {duration(STALE_SECONDS)} without a renewal the next run takes over "
                "by itself.",
                lease.holder,
            )
        text = json.dumps(typed_json.dump(run), indent=2) + "\n"
        files.replace_file(prefix / names.LEASE, text, 0o600)
        return lease.describe() if lease else ""


def renew(prefix: Path, run: str) -> None:
    """:raises HeldError: the run does not hold the lease any more."""
    lease = read(prefix)
    if lease and lease.is_of(run):
        os.utime(prefix / names.LEASE)
        return
    other = f"{lease.describe()} has taken over" if lease else "another run took over and has ended"
    raise HeldError(
        f"This run lost the lease of the cluster: {other}. It ends before it touches a service; run it again when the other one has ended.",
        lease.holder if lease else None,
    )


def release(prefix: Path, run: str) -> None:
    """Removes the lease of a run, if it holds it. After a teardown there is none, and no lock is made."""
    if not read(prefix):
        return
    with _locked(prefix):
        lease = read(prefix)
        if lease and lease.is_of(run):
            (prefix / names.LEASE).unlink()
