# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lock of a cluster: a file on its head that names the run that may change the cluster's hosts. The file is empty if there is no such run."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text

LOCK_TIMEOUT_SECONDS = 60
"""Time to wait for another process that reads or writes the file."""
MAX_LOCK_FILE_BYTES = 64 * 1024
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
    """The controller's boot and process namespace, which no other controller shares."""
    pid: Annotated[int, Number(1)]
    playbook: Annotated[str, Text(max_length=1024)]
    since: Annotated[int, Number()] = 0
    """Time on the head's clock when the run took the lock, in seconds since 1970."""

    def is_same_run(self, run: "Optional[Run]") -> bool:
        return run is not None and (self.machine, self.pid) == (run.machine, run.pid)

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        text = f"{self.playbook} run by {self.user} on {self.controller} (process {self.pid}) since {since}"
        return validation.printable(text, None)


class LockHeldError(Exception):
    """Another run holds the lock. The message describes the run, and how to take over its lock."""

    def __init__(self, holder: Run) -> None:
        super().__init__(
            f"Another run is changing this cluster: {holder.describe()}. Wait until that run has ended. If it failed or was killed, take over its lock with "
            f"-e {names.TAKE_OVER_VARIABLE}=true."
        )
        self.holder = holder


def read_holder(prefix: Path) -> Optional[Run]:
    """Return the run that holds the lock; None if the run was killed while it wrote the lock."""
    return typed_json.read_file(Run, prefix / names.CLUSTER_LOCK_FILE, MAX_LOCK_FILE_BYTES)


def take_lock(prefix: Path, run: Run, may_take_over: bool = False, ended_run: Optional[Run] = None) -> Optional[Run]:
    """Give the lock to a run, and return the run that held it.

    :param may_take_over: whether to take the lock from any other run.
    :param ended_run: a run whose own controller reports that it has ended.
    :raises LockHeldError: another run holds the lock.
    """
    with locks.hold(prefix / names.CLUSTER_LOCK_FILE, LOCK_TIMEOUT_SECONDS) as lock:
        holder = read_holder(prefix)
        if run.is_same_run(holder):
            return None
        if holder and not may_take_over and not holder.is_same_run(ended_run):
            raise LockHeldError(holder)
        os.ftruncate(lock, 0)
        try:
            os.pwrite(lock, json.dumps(typed_json.dump(run._replace(since=int(time.time())))).encode(), 0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(prefix / names.CLUSTER_LOCK_FILE)) from None
        return holder


def release_lock(prefix: Path, run: Run) -> Optional[Run]:
    """Release a run's lock; if another run holds the lock, return that run. After a teardown there is no lock, and none is created."""
    if run.is_same_run(read_holder(prefix)):
        with locks.hold(prefix / names.CLUSTER_LOCK_FILE, LOCK_TIMEOUT_SECONDS) as lock:
            if run.is_same_run(read_holder(prefix)):
                os.ftruncate(lock, 0)
    return read_holder(prefix)
