# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lease of a cluster: a file on its head that names the run that may change hosts. The time of its last renewal is that of the file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, locks, names, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text

SILENCE_SECONDS = 300
"""A lease that was not renewed for so long belongs to nobody. Its run renews it every 30 s (plugins/action/lease.py)."""
LOCK_SECONDS = 60
"""For what takes milliseconds."""
LEASE_BYTES = 64 * 1024
HOLDER = {
    "run": Text(r"[0-9a-f]{32}"),
    **{key: Text(longest=128) for key in ("user", "controller", "machine", "boot", "started")},
    "playbook": Text(longest=1024),
    "process": Number(1),
    "since": Number(),
}
"""What the file holds: ``run`` and ``since`` (seconds of the head's clock), and of the controller what plugin_utils/run_identity.py returns."""


class Lease(NamedTuple):
    """What the head knows of the run that holds the lease."""

    holder: Mapping[str, Any]
    """As HOLDER; empty where the file holds something else."""
    age: float
    """Seconds since it was renewed."""

    def is_stale(self) -> bool:
        """Also where it was renewed in the future: then the clock was set back, and a run that goes on has renewed it since."""
        return abs(self.age) > SILENCE_SECONDS

    def sentence(self) -> str:
        """Who holds it, since when, from where, and with what."""
        if not self.holder:
            return f"a run that left an unreadable {names.LEASE} {self.age:.0f} s ago"
        known = {key: validation.printable(value) for key, value in self.holder.items()}
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.holder["since"]))
        return f"{known['playbook']} of {known['user']} on {known['controller']} (process {known['process']}) since {since}"


class HeldError(Exception):
    """Another run holds the lease. The message says who, and how to take over."""

    def __init__(self, message: str, holder: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.holder = holder


class Change(NamedTuple):
    """What became of the lease: whether the run got it or gave it back, and whose it took over, as a sentence."""

    changed: bool
    taken_from: str = ""


@contextmanager
def _alone(prefix: Path) -> Iterator[None]:
    """One process decides at a time.

    :raises Refusal: another one does not end.
    """
    lock = locks.open_file(prefix / names.LEASE_LOCK)
    try:
        if not locks.take(lock, LOCK_SECONDS):
            raise Refusal(
                f"another process holds {prefix / names.LEASE_LOCK} for more than {LOCK_SECONDS} s: end it, and run the playbook again"
            )
        yield
    finally:
        os.close(lock)


def read(prefix: Path) -> Lease | None:
    """The lease of a head; None where nobody has it."""
    path = prefix / names.LEASE
    try:
        age = time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return None
    try:
        found = reading.read_object(path, LEASE_BYTES)
    except (OSError, ValueError):
        return Lease({}, age)
    return Lease({} if validation.mismatch("", found, HOLDER) else found, age)


def _remedy(lease: Lease) -> str:
    return (
        f"Wait until it has ended, or take over with -e {names.TAKE_OVER}=true if it hangs. It renewed its lease {abs(lease.age):.0f} s ago; after "
        f"{SILENCE_SECONDS} s without that, the next run takes over by itself."
    )


def hold(prefix: Path, mine: Mapping[str, Any], ended: str = "", take_over: bool = False) -> Change:
    """Gives the lease to a run, or renews it.

    :param mine: HOLDER without ``since``.
    :param ended: a run that has ended, as its own controller knows; its lease is taken over.
    :param take_over: whether the operator asks for it whoever holds it.
    :raises HeldError: another run holds it.
    """
    with _alone(prefix):
        lease = read(prefix)
        if lease and lease.holder.get("run") == mine["run"]:
            os.utime(prefix / names.LEASE)
            return Change(False)
        if lease and not (take_over or lease.is_stale() or (ended and lease.holder.get("run") == ended)):
            raise HeldError(f"Another run changes this cluster: {lease.sentence()}. {_remedy(lease)}", lease.holder)
        text = json.dumps({**mine, "since": int(time.time())}, indent=2) + "\n"
        files.replace_file(prefix / names.LEASE, text, 0o600)
        return Change(True, lease.sentence() if lease else "")


def keep(prefix: Path, run: str) -> Change:
    """Renews the lease of a run that holds it.

    :raises HeldError: it holds it no more.
    """
    with _alone(prefix):
        lease = read(prefix)
        if lease and lease.holder.get("run") == run:
            os.utime(prefix / names.LEASE)
            return Change(False)
        other = f"{lease.sentence()} has taken over" if lease else "another run took over and has ended"
        raise HeldError(
            f"This run holds the lease of the cluster no more: {other}. It ends before it touches a service; run it again when the other one has ended.",
            lease.holder if lease else {},
        )


def release(prefix: Path, run: str) -> Change:
    """Gives back the lease of a run, if it holds it. Where there is none, as after a teardown, no lock is made."""
    if not read(prefix):
        return Change(False)
    with _alone(prefix):
        lease = read(prefix)
        if not lease or lease.holder.get("run") != run:
            return Change(False)
        (prefix / names.LEASE).unlink()
        return Change(True)
