# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a program that measures in place of the head, and sees to it that the head serves again, whoever is killed.

While nothing serves, a timer of systemd runs that ends the program and starts the head. Whoever looks at the program winds it up again. All
definitions are below /run: after a reboot the head starts as ever, and nothing of a benchmark is left.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.apply import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, files, names

SILENCE_SECONDS = 120
"""After so long without a look at the program, the head is started again."""
RUNNER = "measuring.py"
VOLATILE = Path("/run/systemd/system")
"""Where definitions are that a reboot forgets."""
MANAGERS = ("systemd", "systemd_user")
GUARD_SERVICE = """# {mark}; it is gone after a reboot.
[Unit]
Description=Ends a benchmark that nobody looks at, and starts {server}
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart=-{systemctl} stop {program}.service
ExecStart={systemctl} start {server}.service
"""
GUARD_TIMER = """# {mark}; it is gone after a reboot.
[Unit]
Description=Waits until nobody looks at a benchmark any more
StartLimitIntervalSec=0

[Timer]
OnActiveSec={seconds}
AccuracySec=1s
"""


class Stage:
    """The services of a benchmark on the head."""

    def __init__(self, host: Mapping[str, Any]) -> None:
        """:param host: the head's part of the plan.
        :raises ServiceError: its services are not run by systemd.
        """
        if host["service_manager"] not in MANAGERS:
            raise services.ServiceError(
                f"the head runs its services by {host['service_manager']}, and a benchmark needs systemd, which starts the head again whatever happens"
            )
        self.serving = services.manager_of(host)
        self.user = ["--user"] if host["scope"] == "user" else []
        folder = Path(os.environ["XDG_RUNTIME_DIR"], "systemd/user") if self.user else VOLATILE
        self.units = folder
        self.volatile = services.manager_of({**host, "units": str(folder)})
        self.server = host["names"]["server"]
        self.program = names.of(host["names"]["cluster"]).service("benchmark")
        self.guard = f"{self.program}-guard"

    def _systemctl(self, *words: str, may_fail: bool = False) -> str:
        return commands.run(["systemctl", *self.user, *words], services.COMMAND_SECONDS, may_fail=may_fail)

    def _apply(self, manager: services.Manager, **wanted: Any) -> bool:
        every = {"run": [], "restart": [], "start": [], "stop": [], "remove": [], **wanted}
        return bool(services.apply(manager, services.Wanted(**every), check=False))

    def is_left(self) -> bool:
        """Whether a benchmark has begun here, and did not end."""
        return (self.units / f"{self.guard}.timer").exists() or self.runs()

    def runs(self) -> bool:
        return self.volatile.state([self.program])[self.program] == services.RUNNING

    def serves(self) -> bool:
        return self.serving.state([self.server])[self.server] == services.RUNNING

    def wind_up(self) -> None:
        """Lets the guard wait again from now on."""
        self._systemctl("restart", f"{self.guard}.timer")

    def begin(self) -> None:
        """Stops the head, once somebody is there to start it again."""
        self.units.mkdir(parents=True, exist_ok=True)
        systemctl = " ".join([commands.find("systemctl") or "/usr/bin/systemctl", *self.user])
        values = {"mark": names.DEFINITION_MARK, "server": self.server, "program": self.program, "systemctl": systemctl}
        for ending, text in (("service", GUARD_SERVICE), ("timer", GUARD_TIMER)):
            files.replace_file(
                self.units / f"{self.guard}.{ending}", text.format(**values, seconds=SILENCE_SECONDS), 0o644
            )
        self._systemctl("daemon-reload")
        self.wind_up()
        self._apply(self.serving, stop=[self.server])

    def run(self, definition: str) -> None:
        """Starts the program."""
        service = services.Service(self.program, definition, at_boot=False)
        self._apply(self.volatile, run=[service], restart=[self.program])

    def stop(self) -> None:
        """Ends the program and forgets it."""
        self._apply(self.volatile, remove=[self.program])

    def end(self) -> None:
        """Starts the head again; then nobody has to see to it any more."""
        self.stop()
        self._apply(self.serving, start=[self.server])
        self._forget_guard()

    def disarm(self) -> None:
        """Forgets the guard, then ends the program: whether the head runs is decided by somebody else."""
        self._forget_guard()
        self.stop()

    def _forget_guard(self) -> None:
        self._systemctl("stop", f"{self.guard}.timer", f"{self.guard}.service", may_fail=True)
        for ending in ("timer", "service"):
            (self.units / f"{self.guard}.{ending}").unlink(missing_ok=True)
        self._systemctl("daemon-reload")


def disarm(host: Mapping[str, Any], touched: Collection[str], check: bool) -> list[services.Change]:
    """Ends what a killed benchmark left on the head, where the head's service is touched: its timer would start the head later, whoever stopped it.

    :param host: its part of the plan, or its facts.
    :param touched: services that are about to be stopped or started.
    """
    if host["service_manager"] not in MANAGERS or not any(map(names.is_head, touched)):
        return []
    stage = Stage(host)
    if stage.server not in touched or not stage.is_left():
        return []
    if not check:
        stage.disarm()
    return [services.Change(stage.guard, services.RUNNING, services.STOPPED, "", "")]


def prepare(prefix: str, runner: str) -> None:
    """Makes the folder of the records, with the program that runs the others. Logs are the service's own, in its state."""
    records = Path(prefix, names.BENCHMARKS)
    records.mkdir(mode=0o755, exist_ok=True)
    files.replace_file(records / RUNNER, runner, 0o644)
