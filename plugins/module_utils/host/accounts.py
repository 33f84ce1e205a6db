# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs functions under another account, in folders of that account."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

MAX_RESULT_BYTES = 1 << 20


def _send_result(pipe: Any, run_as_options: Mapping[str, Any], function: Callable[..., Any], arguments: tuple) -> None:
    os.setgroups(run_as_options["extra_groups"])
    os.setgid(run_as_options["group"])
    os.setuid(run_as_options["user"])
    try:
        reply = {"result": function(*arguments)}
    except (Refusal, OSError) as error:
        reply = {"failed": str(error)}
    pipe.send_bytes(json.dumps(reply).encode())


def run_as(account: str | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function as JSON. If this process runs as root, a child process calls the function under the account. Then paths that
    the account changes cannot mislead root."""
    run_as_options = commands.run_as_options(account)
    if not run_as_options:
        return function(*arguments)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, run_as_options, function, arguments))
    process.start()
    sender.close()
    try:
        reply = reading.parse(receiver.recv_bytes(MAX_RESULT_BYTES))  # a pickle from the account could run code as root
    except (EOFError, OSError, ValueError) as error:
        raise Refusal(f"a process of the account {account} exited without a result: run the playbook again") from error
    finally:
        process.join()
    if "failed" in reply:
        raise Refusal(str(reply["failed"]))
    return reply.get("result")
