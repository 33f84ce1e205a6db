# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs work in folders of another account under that account."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

ANSWER_BYTES = 1 << 20


def _send_result(pipe: Any, changes: Mapping[str, Any], work: Callable[..., Any], arguments: tuple) -> None:
    os.setgroups(changes["extra_groups"])
    os.setgid(changes["group"])
    os.setuid(changes["user"])
    try:
        reply = {"result": work(*arguments)}
    except (Refusal, OSError) as error:
        reply = {"failed": str(error)}
    pipe.send_bytes(json.dumps(reply).encode())


def run_as(account: str | None, work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``work`` returns, as JSON. If this process is root's, a child does the work under the account, so that no path that the account
    changes can mislead root."""
    changes = commands.account_options(account)
    if not changes:
        return work(*arguments)
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send_result, args=(sender, changes, work, arguments))
    process.start()
    sender.close()
    try:
        reply = reading.parse(receiver.recv_bytes(ANSWER_BYTES))  # as root, a pickle of the account could run code
    except (EOFError, OSError, ValueError) as error:
        raise Refusal(f"a process of the account {account} exited without a result: run the playbook again") from error
    finally:
        process.join()
    if "failed" in reply:
        raise Refusal(str(reply["failed"]))
    return reply.get("result")
