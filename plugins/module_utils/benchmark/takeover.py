# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a program that measures in place of the head, and sees to it that the head serves again, whoever is killed.

While nothing serves, a guard runs that ends the program and starts the head: a timer of systemd, or a process of its own beside supervisor.
Whoever looks at the program winds it up again. After a reboot the head starts as ever, and no program of a benchmark does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, files, locks, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services

SILENCE_SECONDS = 120
"""After so long without a look at the program, the head is started again."""
AGAIN_SECONDS = 10
"""Between two tries of a guard to start the head."""
RUNNER = "measuring.py"
VOLATILE = Path("/run/systemd/system")
"""Where definitions are that a reboot forgets."""
SYSTEMD = ("systemd", "systemd_user")
MANAGERS = (*SYSTEMD, "supervisor")
"""Beside which a guard can run."""
GUARD_SERVICE = """# {mark}; it is gone after a reboot.
[Unit]
Description=Ends a benchmark that nobody looks at, and starts {server}
StartLimitIntervalSec=0

[Service]
ExecStartPre=-{systemctl} stop {program}.service
ExecStart={systemctl} start {server}.service
TimeoutStartSec=infinity
Restart=on-failure
RestartSec={again}
"""
GUARD_TIMER = """# {mark}; it is gone after a reboot.
[Unit]
Description=Waits until nobody looks at a benchmark any more
StartLimitIntervalSec=0

[Timer]
OnActiveSec={seconds}
AccuracySec=1s
"""


def start_detached(command: list[str]) -> None:
    """Starts a process that outlives this one."""
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(command, cwd="/", start_new_session=True, **streams)


class Timer:
    """A guard that systemd winds down; its definitions are below /run."""

    def __init__(self, host: Mapping[str, Any], name: str, program: str) -> None:
        self._user = ["--user"] if host["scope"] == "user" else []
        runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
        self.units = Path(runtime, "systemd/user") if self._user else VOLATILE
        self._name, self._server, self._program = name, host["names"]["server"], program

    def _systemctl(self, *words: str, may_fail: bool = False) -> str:
        return commands.run(["systemctl", *self._user, *words], services.COMMAND_SECONDS, may_fail=may_fail)

    def is_left(self) -> bool:
        return (self.units / f"{self._name}.timer").exists()

    def wind_up(self) -> None:
        self._systemctl("stop", f"{self._name}.service", may_fail=True)  # where it is about to start the head
        self._systemctl("restart", f"{self._name}.timer")

    def begin(self) -> None:
        self.units.mkdir(parents=True, exist_ok=True)
        systemctl = " ".join([commands.find("systemctl") or "/usr/bin/systemctl", *self._user])
        values = {"mark": names.DEFINITION_MARK, "server": self._server, "program": self._program}
        values.update(seconds=SILENCE_SECONDS, again=AGAIN_SECONDS)
        for ending, text in (("service", GUARD_SERVICE), ("timer", GUARD_TIMER)):
            definition = text.format(**values, systemctl=systemctl)
            files.replace_file(self.units / f"{self._name}.{ending}", definition, 0o644)
        self._systemctl("daemon-reload")
        self.wind_up()

    def end(self) -> None:
        self._systemctl("stop", f"{self._name}.timer", f"{self._name}.service", may_fail=True)
        for ending in ("timer", "service"):
            (self.units / f"{self._name}.{ending}").unlink(missing_ok=True)
        self._systemctl("daemon-reload")


class Watcher:
    """A guard that is a process of its own, where no systemd is: measuring.py watches a file, which is touched to wind it up."""

    def __init__(self, host: Mapping[str, Any], manager: services.Supervisor, program: str) -> None:
        records = Path(host["prefix"], names.BENCHMARKS)
        self.units = Path(host["units"])
        self._runner, self._file = records / RUNNER, records / "guard"
        self._commands = [manager.command("stop", program), manager.command("start", host["names"]["server"])]

    def is_left(self) -> bool:
        return self._file.exists()

    def wind_up(self) -> None:
        """Starts it where it does not run: it has done its work, even right now, or the host has restarted."""
        try:
            os.utime(self._file)
            runs = self._runs()
        except FileNotFoundError:
            files.replace_file(self._file, json.dumps(self._commands), 0o600)
            runs = self._runs()
        if not runs:
            times = ["--silence", str(SILENCE_SECONDS), "--again", str(AGAIN_SECONDS)]
            start_detached([sys.executable, str(self._runner), "--guard", str(self._file), *times])

    def _runs(self) -> bool:
        lock = locks.open_file(self._file, os.O_RDWR)
        try:
            return not locks.take(lock)
        finally:
            os.close(lock)

    def begin(self) -> None:
        self.wind_up()

    def end(self) -> None:
        self._file.unlink(missing_ok=True)


class Stage:
    """The services of a benchmark on the head."""

    def __init__(self, host: Mapping[str, Any]) -> None:
        """:param host: the head's part of the plan.
        :raises ServiceError: nothing would start the head again where its services are run by this manager.
        """
        self.serving = services.manager_of(host)
        self.server = host["names"]["server"]
        self.program = names.of(host["names"]["cluster"]).service("benchmark")
        self.guard_name = f"{self.program}-guard"
        if host["service_manager"] in SYSTEMD:
            self._guard: Timer | Watcher = Timer(host, self.guard_name, self.program)
        elif isinstance(self.serving, services.Supervisor):
            self._guard = Watcher(host, self.serving, self.program)
        else:
            raise services.ServiceError(
                f"the head runs its services by {host['service_manager']}, and a benchmark needs systemd or supervisor, which start the head again "
                "whatever happens: use a head with one of them"
            )
        self.volatile = services.manager_of({**host, "units": str(self._guard.units)})

    def _apply(self, manager: services.Manager, **wanted: Any) -> bool:
        every = {"run": [], "restart": [], "start": [], "stop": [], "remove": [], **wanted}
        return bool(services.apply(manager, services.Wanted(**every), check=False))

    def is_left(self) -> bool:
        """Whether a benchmark has begun here, and did not end."""
        return self._guard.is_left() or self.runs()

    def runs(self) -> bool:
        return self.volatile.state([self.program])[self.program] == services.RUNNING

    def serves(self) -> bool:
        return self.serving.state([self.server])[self.server] == services.RUNNING

    def wind_up(self) -> None:
        """Lets the guard wait again from now on."""
        self._guard.wind_up()

    def begin(self) -> None:
        """Stops the head, once somebody is there to start it again."""
        self._guard.begin()
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
        self._guard.end()

    def disarm(self) -> None:
        """Forgets the guard, then ends the program: whether the head runs is decided by somebody else."""
        self._guard.end()
        self.stop()


def disarm(host: Mapping[str, Any], touched: Collection[str], check: bool) -> list[services.Change]:
    """Ends what a killed benchmark left on the head, where the head's service is touched: its guard would start the head later, whoever stopped it.

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
    return [services.Change(stage.guard_name, services.RUNNING, services.STOPPED, "", "")]


def prepare(prefix: str, runner: str) -> None:
    """Makes the folder of the records, with the program that runs the others. Logs are the service's own, in its state.

    :raises ServiceError: other accounts write there, as where the folder is a link: the guard carries out what lies in it.
    """
    records = Path(prefix, names.BENCHMARKS)
    records.mkdir(mode=0o755, exist_ok=True)
    status = records.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise services.ServiceError(
            f"other accounts can write into {records} on the head, and the commands that start the head again are kept there: give the folder to the "
            "account that runs the playbook, and take the right to write from all others"
        )
    files.replace_file(records / RUNNER, runner, 0o644)
