"""The demo as a newcomer runs it, and what it survives: as root it installs for the system, with accounts of its own."""

import os
import pwd
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from conftest import ROOT, Cluster, until

SYSTEM = os.geteuid() == 0
PREFIX = Path("/opt/llamacpp") if SYSTEM else Path.home() / ".local" / "share" / "llamacpp"
SCOPE = "ARGS=-e llama_host_scope=" + ("system" if SYSTEM else "user")


def make(target, **options):
    """What a target of the Makefile printed, which the terminal shows meanwhile."""
    with subprocess.Popen(
        ["make", target, SCOPE], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    ) as process:
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    assert process.returncode == 0, f"make {target} failed"
    return "".join(lines)


def accounts():
    return {entry.pw_name for entry in pwd.getpwall()}


def owners_below(folder):
    """Accounts that own something in a folder, in which services replace files meanwhile."""
    found = set()
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                found.add(pwd.getpwuid(os.lstat(os.path.join(place, name)).st_uid).pw_name)
    return found


def owner(pid):
    return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name


def test_the_demo_heals_runs_again_without_a_change_and_goes_without_a_trace(tmp_path):
    assert not PREFIX.exists(), f"{PREFIX} is there: remove the cluster of this machine first, with make down"
    environment = {**os.environ, "HOME": str(tmp_path)} if SYSTEM else None
    before = accounts()
    cluster = Cluster(tmp_path)
    cluster.prefix, cluster.url = PREFIX, "http://127.0.0.1:8080"
    try:
        make("demo", env=environment)
        assert cluster.complete() == known_answer.SENTENCE
        worker = cluster.pid_of("ggml-rpc-server")
        if SYSTEM:
            assert owner(worker) == owner(cluster.pid_of("llama-server")) == "llamacpp"
            assert "llamacpp-build" not in owners_below(PREFIX)

        print("Killing a worker ...", flush=True)
        os.kill(worker, signal.SIGKILL)
        until(lambda: cluster.pid_of("ggml-rpc-server") and worker not in cluster.processes())
        until(lambda: cluster.complete() == known_answer.SENTENCE)

        assert "changed=0" in make("demo", env=environment)
    finally:
        make("down", env=environment)
    until(lambda: not cluster.processes())
    assert not PREFIX.exists()
    assert accounts() == before
    if SYSTEM:
        left = {path.name for path in tmp_path.iterdir()}
        assert not left & {".ansible", ".ansible_async", ".local", ".config"}
        assert [path.name for path in (tmp_path / ".cache").iterdir() if "llama" in path.name] == ["llamacpp"]
