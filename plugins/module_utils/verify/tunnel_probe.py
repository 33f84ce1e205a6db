# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a tunnel lets somebody in who has no key, or another one."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import tunnel
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import KeyProbe

SECONDS = 3.0
MOST_BYTES = 65536
CLOSED = ("refused", "unreachable", "not_rpc")
"""States of rpc.probe where nobody speaks RPC."""
REFUSES = "alert"
"""What stunnel says where the other end does not accept a key, as TLS calls that."""


def probe(outer: str) -> KeyProbe:
    """Of the end of a tunnel that is open to the network: neither question reaches the worker behind it, unless something is wrong.

    :param outer: ADDRESS:PORT.
    """
    address, port = outer.rsplit(":", 1)
    plain = rpc.probe(address, int(port), SECONDS)
    without = "" if plain.state in CLOSED else f"{plain.state} {plain.detail}".strip()
    return KeyProbe(without, *_with_another_key(outer))


def _with_another_key(outer: str) -> tuple[bool | None, str]:
    """Whether a random key is let in, and what stunnel says; None where it does not say that it was refused."""
    program = tunnel.program()
    if not program:
        return None, "stunnel is not installed on the head"
    with tempfile.TemporaryDirectory() as folder:
        key, configuration = Path(folder, "key"), Path(folder, "conf")
        key.touch(0o600)
        key.write_text(tunnel.line_of(secrets.token_hex(32)))
        lines = [*tunnel.GLOBAL, "client = yes", f"connect = {outer}", f"PSKsecrets = {key}", *tunnel.EACH]
        configuration.write_text("\n".join(lines) + "\n")
        # stdin stays open: at its end stunnel would close a connection that it has.
        with subprocess.Popen([program, str(configuration)], stdin=PIPE, stdout=DEVNULL, stderr=PIPE) as client:
            try:
                client.wait(SECONDS)
            except subprocess.TimeoutExpired:
                client.kill()
                return True, "its connection stays open"
            said = printable(
                cast(IO[bytes], client.stderr).read(MOST_BYTES).decode("utf-8", "replace").strip().rpartition("\n")[2]
            )
    return (False if REFUSES in said else None), said
