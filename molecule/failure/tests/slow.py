"""Slow the workers down by limiting the processor time of their processes."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from asker import ask
from faults import SERVICES, WORKER_PROGRAM, WORKERS, container, run_inside

PERIOD_US = 100_000
TRIES = 6


class SystemdLimiter:
    """Limits processor time with the container's systemd, which has the cpu controller (cgroup v2)."""

    def __init__(self, names):
        self.names = names

    def limit(self, share):
        for name in self.names:
            units = " ".join(SERVICES[name])
            run_inside(
                name,
                f"for unit in {units}; do systemctl set-property --runtime $unit CPUQuota={100 * share:.2f}%; done",
            )

    def close(self):
        for name in self.names:
            run_inside(
                name,
                f"for unit in {' '.join(SERVICES[name])}; do systemctl set-property --runtime $unit CPUQuota=; done",
            )


class CgroupLimiter:
    """Limits processor time with the machine's own controller (cgroup v1), which containers do not get, in a mount of this scenario's namespace."""

    def __init__(self, names):
        self.names = names
        self.mount = Path(tempfile.mkdtemp())
        subprocess.run(["mount", "-t", "cgroup", "-o", "cpu", "none", self.mount], check=True)
        self.groups = []
        for name in names:
            group = self.mount / f"llamacpp-test-{name}"
            group.mkdir(exist_ok=True)
            self.groups.append(group)

    def limit(self, share):
        for name, group in zip(self.names, self.groups):
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(max(1000, int(share * PERIOD_US))))
            for process in _worker_processes(name):
                (group / "cgroup.procs").write_text(str(process))

    def close(self):
        for group in self.groups:
            for process in (group / "cgroup.procs").read_text().split():
                (self.mount / "cgroup.procs").write_text(process)
            group.rmdir()
        subprocess.run(["umount", self.mount], check=True)
        os.rmdir(self.mount)


def _worker_processes(name):
    """Return the machine's process ids of a container's worker programs."""
    command = ["podman", "inspect", "--format", "{{.State.Pid}}", container(name)]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    own = os.readlink(f"/proc/{first}/ns/pid")
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            program = (process / "cmdline").read_bytes().split(b"\0")[0].decode("utf-8", "replace")
            if program.endswith(f"/bin/{WORKER_PROGRAM}") and os.readlink(process / "ns/pid") == own:
                processes.append(int(process.name))
    return processes


@contextlib.contextmanager
def slow_workers(tokens_per_second, names=WORKERS):
    """Context in which the model answers at about this speed, because these workers are slow. Its value is the measured speed."""
    controllers = run_inside(names[0], "cat /sys/fs/cgroup/cgroup.controllers", check=False).split()
    limiter = (SystemdLimiter if "cpu" in controllers else CgroupLimiter)(names)
    try:
        share, speed = 0.05, None
        for _try in range(TRIES):
            limiter.limit(share)
            speed = ask(600, max_tokens=6).tokens_per_second
            if speed and 0.6 * tokens_per_second <= speed <= 1.4 * tokens_per_second:
                break
            share = min(1.0, max(0.01, share * tokens_per_second / (speed or tokens_per_second / 2)))
        else:
            pytest.fail(f"the model answers at {speed} tokens per second with {100 * share:.1f} % of a processor")
        yield speed
    finally:
        limiter.close()
