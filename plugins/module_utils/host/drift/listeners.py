# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks whose processes listen on a port, before a secret or a request is sent there."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import output
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes


def is_served(address: str, port: int, pids: Collection[int]) -> bool:
    """Return whether a process of the cluster accepts connections to an address of this host. A listener on all addresses counts if no process
    listens on this address.

    :param pids: processes of the cluster, from ``account_processes``.
    """
    if sys.platform == "darwin":
        lsof_argv = ["lsof", "-nP", "-t", "-sTCP:LISTEN"]
        listing = output([*lsof_argv, f"-iTCP@{address}:{port}"]) or output([*lsof_argv, f"-iTCP:{port}"])
        return not {*listing.split()}.isdisjoint(map(str, pids))
    listeners = processes.read_sockets().listeners(port)
    exact_inodes = {entry.inode for entry in listeners if entry.address.removeprefix("::ffff:") == address}
    serving_inodes = exact_inodes or {entry.inode for entry in listeners if entry.address in processes.ANY_ADDRESSES}
    return any(serving_inodes & inodes for inodes in processes.socket_inodes(pids).values())


def is_listening_alone(port: int) -> bool:
    """Return whether the processes that listen on the port all belong to this account, and there is one."""
    if sys.platform == "darwin":
        return bool(output(["lsof", "-nP", "-t", "-sTCP:LISTEN", f"-iTCP:{port}"]))
    return {entry.uid for entry in processes.read_sockets().listeners(port)} == {os.geteuid()}
