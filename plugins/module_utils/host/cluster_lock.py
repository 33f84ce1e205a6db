# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lock of a cluster: a file on its head that names the run that changes the cluster's hosts. It is empty if no run does."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    locks,
    names,
    reading,
    typed_json,
    validation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text

WAIT_SECONDS = 60
"""How long to wait for another process that reads or writes the file."""
FILE_BYTES = 64 * 1024
Name = Annotated[str, Text(max_length=128)]


class LockArguments(NamedTuple):
    """Arguments of the module ``cluster_lock``."""

    prefix: Annotated[str, "path"]
    create: bool = False
    state: Annotated[str, ("present", "absent")] = "present"
    take_over: bool = False
    run: Optional[Mapping[str, Any]] = None
    ended: Optional[Mapping[str, Any]] = None


class Run(NamedTuple):
    user: Name
    controller: Name
    machine: Name
    """Boot of the controller's system and its process namespace: no other controller has both."""
    process: Annotated[int, Number(1)]
    playbook: Annotated[str, Text(max_length=1024)]
    since: Annotated[int, Number()] = 0
    """Time of the head's clock when it took the lock, in seconds since 1970."""

    def is_same_run(self, run: "Optional[Run]") -> bool:
        return run is not None and (self.machine, self.process) == (run.machine, run.process)

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        text = f"{self.playbook} of {self.user} on {self.controller} (process {self.process}) since {since}"
        return validation.printable(text, None)


class HeldError(Exception):
    """Another run has the lock. The message describes it and tells how to take over."""

    def __init__(self, holder: Run) -> None:
        super().__init__(
            f"Another run is changing this cluster: {holder.describe()}. Wait until that run has ended. If it failed or was killed, take over its lock with "
            f"-e {names.TAKE_OVER}=true."
        )
        self.holder = holder


def read_holder(prefix: Path) -> Optional[Run]:
    """Return the run that has the lock. An unreadable lock was written by a run that was killed meanwhile."""
    try:
        return typed_json.parse(Run, reading.read_object(prefix / names.CLUSTER_LOCK, FILE_BYTES))
    except (OSError, ValueError):
        return None


def take_lock(prefix: Path, run: Run, may_take_over: bool = False, ended_run: Optional[Run] = None) -> Optional[Run]:
    """Give the lock to a run, and return the run that had it.

    :param may_take_over: whether to take it from any run.
    :param ended_run: a run that has ended, as its own controller knows.
    :raises HeldError: another run has it.
    """
    with locks.hold(prefix / names.CLUSTER_LOCK, WAIT_SECONDS) as lock:
        holder = read_holder(prefix)
        if run.is_same_run(holder):
            return None
        if holder and not may_take_over and not holder.is_same_run(ended_run):
            raise HeldError(holder)
        os.ftruncate(lock, 0)
        try:
            os.pwrite(lock, json.dumps(typed_json.dump(run._replace(since=int(time.time())))).encode(), 0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(prefix / names.CLUSTER_LOCK)) from None
        return holder


def release_lock(prefix: Path, run: Run) -> Optional[Run]:
    """Release a run's lock, and return the run that has it otherwise. After a teardown there is none, and none is made."""
    if run.is_same_run(read_holder(prefix)):
        with locks.hold(prefix / names.CLUSTER_LOCK, WAIT_SECONDS) as lock:
            if run.is_same_run(read_holder(prefix)):
                os.ftruncate(lock, 0)
    return read_holder(prefix)
