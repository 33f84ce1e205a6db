# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs work under another account, in folders of that account."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

ANSWER_BYTES = 1 << 20


def _send_result(pipe: Any, identity: Mapping[str, Any], work: Callable[..., Any], arguments: tuple) -> None:
    os.setgroups(identity["extra_groups"])
    os.setgid(identity["group"])
    os.setuid(identity["user"])
    try:
        reply = {"result": work(*arguments)}
    except (Refusal, OSError) as error:
        reply = {"failed": str(error)}
    pipe.send_bytes(json.dumps(reply).encode())


def run_as(account: str | None, work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``work`` as JSON. If this process runs as root, a child does the work under the account, so that no path that the account
    changes can mislead root."""
    identity = commands.run_as_options(account)
    if not identity:
        return work(*arguments)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, identity, work, arguments))
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
