"""Locks on a host: the next run waits for a task that a killed run left at work, and names it where it does not end."""

import os
import re
import subprocess
import sys

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download
from ansible_collections.llamacpp.cluster.plugins.modules import link

pytestmark = pytest.mark.programs

HOLDER = """
import sys, time
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.host_lock import hold
with hold(sys.argv[1], exclusive=sys.argv[2] == "True"):
    print("held", flush=True)
    time.sleep(float(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def mark(tmp_path):
    (tmp_path / names.FOLDER_MARK).mkdir()


@pytest.fixture
def other(tmp_path, popen):
    """Starts a process that holds the lock of a host, which has been changed before."""
    (tmp_path / "changes.lock").touch()

    def start(changes, seconds):
        argv = [sys.executable, "-c", HOLDER, str(tmp_path), str(changes), str(seconds)]
        process = popen(argv, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "held\n"
        return process

    return start


@pytest.mark.parametrize("exclusive", [True, False])
def test_the_next_run_waits_for_a_task_under_way(tmp_path, other, exclusive):
    process = other(True, 1.5)
    with host_lock.hold(str(tmp_path), exclusive):
        assert process.wait(10) == 0


def test_a_killed_task_and_a_comparison_keep_nobody_waiting(tmp_path, other, monkeypatch):
    monkeypatch.setattr(host_lock, "WAIT_SECONDS", 0)
    killed = other(True, 60)
    killed.kill()
    killed.wait()
    with host_lock.hold(str(tmp_path), exclusive=True):
        pass
    other(False, 60)
    with host_lock.hold(str(tmp_path), exclusive=False):
        pass


def test_a_comparison_writes_nothing_and_needs_no_installation(tmp_path):
    for prefix in (tmp_path, tmp_path / "missing"):
        with host_lock.hold(str(prefix), exclusive=False):
            pass
    assert [path.name for path in tmp_path.iterdir()] == [names.FOLDER_MARK]
    with host_lock.hold(str(tmp_path / "missing"), exclusive=True):
        assert not (tmp_path / "missing").exists()


CHANGES = {link: {"links": []}}


@pytest.mark.parametrize("module", CHANGES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_what_changes_a_host_waits_for_a_task_of_another_run(tmp_path, other, monkeypatch, call, module):
    monkeypatch.setattr(host_lock, "WAIT_SECONDS", 0.2)
    process = other(True, 60)
    failed = call(module=module, prefix=str(tmp_path), **CHANGES[module])
    assert re.search(f"process {process.pid} on this host.* end it", failed["msg"])


LOCKS = {
    "changes.lock": lambda folder: host_lock.hold(str(folder), True),
    ".fetching": lambda folder: download.exclusive(folder, 0),
    "cluster.lock": lambda folder: locks.hold(folder / "cluster.lock"),
}


@pytest.mark.parametrize("name", LOCKS)
def test_no_other_account_can_hold_a_lock(tmp_path, name):
    for mode in (0o600, 0o644):
        (tmp_path / name).touch(mode)
        (tmp_path / name).chmod(mode)
        with LOCKS[name](tmp_path):
            assert os.stat(tmp_path / name).st_mode & 0o777 == 0o600
    (tmp_path / name).unlink()
    with LOCKS[name](tmp_path):
        assert os.stat(tmp_path / name).st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_of_another_account_is_refused(tmp_path, name):
    (tmp_path / name).touch(0o600)
    os.chown(tmp_path / name, 64007, -1)
    with pytest.raises(PermissionError, match=f"belongs to uid 64007.*{name}"), LOCKS[name](tmp_path):
        pass
    os.chown(tmp_path, 64007, -1)  # as on a disk whose file system knows one account
    with LOCKS[name](tmp_path):
        pass
