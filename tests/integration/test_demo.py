"""The demo as a newcomer runs it: as root it installs for the system, with accounts of its own."""

import os
import pwd
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from conftest import ROOT, Cluster, until

PREFIX = Path("/opt/llamacpp")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or PREFIX.exists(),
    reason=f"the demo installs for the system, which needs root and that {PREFIX} is not there yet",
)


def make(target, **options):
    return subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True, check=False, **options)


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


def test_the_demo_runs_twice_and_goes_without_a_trace(tmp_path, share):
    environment = {**os.environ, "HOME": str(tmp_path)}
    before = accounts()
    cluster = Cluster(tmp_path)
    cluster.prefix, cluster.url = PREFIX, "http://127.0.0.1:8080"
    try:
        first = make("demo", env=environment)
        assert first.returncode == 0, first.stdout + first.stderr
        assert cluster.complete() == known_answer.SENTENCE
        owners = {
            argv[0].rsplit("/", 1)[1]: pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
            for pid, argv in cluster.processes().items()
        }
        assert owners["ggml-rpc-server"] == owners["llama-server"] == "llamacpp"
        assert "llamacpp-build" not in owners_below(PREFIX)

        second = make("demo", env=environment)
        assert second.returncode == 0, second.stdout + second.stderr
        assert "changed=0" in second.stdout
        share(PREFIX)
    finally:
        down = make("down", env=environment)
    assert down.returncode == 0, down.stdout + down.stderr
    until(lambda: not cluster.processes())
    assert not PREFIX.exists()
    assert accounts() == before
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & {".ansible", ".ansible_async", ".local", ".config"}
    assert [path.name for path in (tmp_path / ".cache").iterdir() if "llama" in path.name] == ["llamacpp"]
