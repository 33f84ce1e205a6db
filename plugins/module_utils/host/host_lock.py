# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lock of a host: one process changes it at a time. A run that is killed leaves its last task at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, locks, names

WAIT_SECONDS = 600


@contextmanager
def hold(prefix: str) -> Iterator[None]:
    """Holds the lock of a host meanwhile. In a folder without this collection's mark there is none.

    :param prefix: of the installation.
    :raises Refusal: another process holds it for too long.
    """
    if not files.is_marked(Path(prefix)):
        yield
        return
    with locks.hold(Path(prefix, names.CHANGES_LOCK), WAIT_SECONDS):
        yield
