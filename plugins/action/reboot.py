# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reboots a host, and shows every ten seconds that the run is waiting for it."""

import threading
from typing import NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action

PROGRESS_INTERVAL_SECONDS = 10.0
LIMIT_SECONDS = 1800

display = Display()


class RebootArguments(NamedTuple):
    boot_time_command: str | None = None


class ActionModule(Action):
    ARGUMENTS = RebootArguments

    def perform(self, arguments: RebootArguments) -> dict:
        stop_event = threading.Event()

        def show_progress() -> None:
            seconds = 0.0
            while not stop_event.wait(PROGRESS_INTERVAL_SECONDS):
                seconds += PROGRESS_INTERVAL_SECONDS
                display.display(
                    f"  [{self.host}] reboot: waited {seconds:.0f} s for the host (limit {LIMIT_SECONDS} s)"
                )

        threading.Thread(target=show_progress, daemon=True).start()
        try:
            command_argument = {"boot_time_command": arguments.boot_time_command} if arguments.boot_time_command else {}
            return self.run_action("ansible.builtin.reboot", reboot_timeout=LIMIT_SECONDS, **command_argument)
        finally:
            stop_event.set()
