# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lock of a host: one process changes it at a time, and nobody compares it meanwhile. A run that is killed leaves its last task at work."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, locks, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

WAIT_SECONDS = 600


@contextmanager
def hold(prefix: str | None, exclusive: bool) -> Iterator[None]:
    """Holds the lock of a host meanwhile. In a folder without this collection's mark there is none.

    :param prefix: of the installation.
    :param exclusive: whether the host is changed. A comparison shares the lock with others, and writes nothing.
    :raises Refusal: another process holds it for too long.
    """
    path = Path(prefix or os.devnull, names.CHANGES_LOCK)
    how, flags = (fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT) if exclusive else (fcntl.LOCK_SH, os.O_RDONLY)
    with ExitStack() as stack:
        try:
            if files.is_marked(path.parent):
                stack.enter_context(locks.hold(path, WAIT_SECONDS, how, flags))
        except locks.ForeignError:
            raise
        except OSError:  # nothing is installed there, or nothing can be written: what changes the host says why
            pass
        except locks.BusyError:
            raise Refusal(
                f"{locks.shown_holders(path)} on this host, a task of another run, has been changing it for more than {WAIT_SECONDS // 60} minutes "
                f"(it holds {path}): end it, and run the playbook again"
            ) from None
        yield
