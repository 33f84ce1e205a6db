# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What keeps services running on a host. Few imports: a cluster waits for the modules that restart it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files


def supervisor_runs(prefix: str) -> bool:
    """Whether the installation's own supervisor runs. One that stands still takes no connection, and is not waited for. In a folder without our
    mark no program is run, so nothing counts there."""
    if not files.is_marked(Path(prefix)):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.setblocking(False)
        try:
            control.connect(prefix + "/supervisor/control.sock")
        except (PermissionError, BlockingIOError):
            return True
        except OSError:
            return False
    return True


def lingers(user: str) -> bool:
    """Whether services of a user go on without a login."""
    return os.path.exists("/var/lib/systemd/linger/" + user)
