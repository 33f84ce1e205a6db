"""Locks on a host: the next run waits for a task that a killed run left at work, and names it where it does not end."""

import errno
import os
import re
import subprocess
import sys

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.cluster_lock import Run
from ansible_collections.llamacpp.cluster.plugins.modules import cluster_lock, link

pytestmark = pytest.mark.programs

HOLDER = """
import sys, time
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.locks import hold_host_lock as hold
with hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def mark(tmp_path):
    (tmp_path / names.MARKER_FOLDER).mkdir()


@pytest.fixture
def other(tmp_path, popen):
    """Starts a process that holds the lock of a host."""

    def start(seconds):
        process = popen([sys.executable, "-c", HOLDER, str(tmp_path), str(seconds)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "held\n"
        return process

    return start


def test_the_next_run_waits_for_a_task_under_way_and_not_for_a_killed_one(tmp_path, other, monkeypatch):
    process = other(1)
    with locks.hold_host_lock(str(tmp_path)):
        assert process.wait(10) == 0
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_SECONDS", 0)
    killed = other(60)
    killed.kill()
    killed.wait()
    with locks.hold_host_lock(str(tmp_path)):
        pass
    with locks.hold_host_lock(str(tmp_path / "missing")):
        assert not (tmp_path / "missing").exists()


def test_what_changes_a_host_waits_for_a_task_of_another_run(tmp_path, other, monkeypatch, call):
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_SECONDS", 0.2)
    process = other(60)
    failed = call(module=link, prefix=str(tmp_path), links=[])
    expected = f"changes.lock has been locked for more than 0.2 s by process {process.pid} on this host: .* stop"
    assert re.search(expected, failed["msg"])
    assert "failed" not in call(module=link, prefix=str(tmp_path), links=[], check=True)


def test_on_a_disk_that_went_read_only_no_lock_is_needed(tmp_path, monkeypatch, call):
    def refuse(*_arguments):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(locks.files, "open_lock", refuse)
    assert "failed" not in call(module=link, prefix=str(tmp_path), links=[])
    run = typed_json.dump(Run("anna", "laptop7", "boot-1", 4711, "stop.yml"))
    assert "failed" not in call(module=cluster_lock, prefix=str(tmp_path), run=run)


def test_no_other_account_can_hold_a_lock(tmp_path):
    path = tmp_path / "x.lock"
    for mode in (0o600, 0o644):
        path.touch(mode)
        path.chmod(mode)
        with locks.hold(path):
            assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_lock_of_another_account_is_refused(tmp_path):
    path = tmp_path / "x.lock"
    path.touch(0o600)
    os.chown(path, 64007, -1)
    with pytest.raises(PermissionError, match=r"belongs to uid 64007.*x\.lock"), locks.hold(path):
        pass
    os.chown(tmp_path, 64007, -1)  # as on a disk whose file system knows one account
    with locks.hold(path):
        pass
