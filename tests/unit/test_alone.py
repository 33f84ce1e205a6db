"""A task of a run that was killed goes on, on its host: the next run waits for it, and names it where it does not end."""

import os
import subprocess
import sys
import time

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock, lease
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download
from ansible_collections.llamacpp.cluster.plugins.modules import firewall, link, tuning

pytestmark = pytest.mark.programs

HOLDER = """
import sys, time
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.host_lock import alone
with alone(sys.argv[1], changes=sys.argv[2] == "True"):
    print("held", flush=True)
    time.sleep(float(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def mark(tmp_path):
    (tmp_path / names.FOLDER_MARK).mkdir()


@pytest.fixture
def other(tmp_path):
    """Starts a process that holds the lock of a host, which has been changed before."""
    (tmp_path / "changes.lock").touch()
    started = []

    def start(changes, seconds):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), str(changes), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("changes", [True, False])
def test_the_next_run_waits_for_a_task_under_way(tmp_path, other, changes):
    process = other(True, 1.5)
    started = time.monotonic()
    with host_lock.alone(str(tmp_path), changes):
        assert time.monotonic() - started > 1
    assert process.wait(10) == 0


def test_a_task_that_was_killed_keeps_nobody_waiting(tmp_path, other):
    other(True, 60).kill()
    started = time.monotonic()
    with host_lock.alone(str(tmp_path), changes=True):
        assert time.monotonic() - started < 10


def test_comparing_hinders_no_other_comparison(tmp_path, other):
    other(False, 60)
    with host_lock.alone(str(tmp_path), changes=False):
        pass


def test_a_task_that_does_not_end_is_named(tmp_path, other, monkeypatch):
    monkeypatch.setattr(host_lock, "WAIT_SECONDS", 0.5)
    process = other(True, 60)
    with (
        pytest.raises(Refusal, match=f"process {process.pid} on this host.* end it"),
        host_lock.alone(str(tmp_path), True),
    ):
        pass


def test_comparing_writes_nothing_and_needs_no_installation(tmp_path):
    for prefix in (tmp_path, tmp_path / "missing"):
        with host_lock.alone(str(prefix), changes=False):
            pass
    assert [path.name for path in tmp_path.iterdir()] == [names.FOLDER_MARK]
    with host_lock.alone(str(tmp_path), changes=True):
        assert os.stat(tmp_path / "changes.lock").st_mode & 0o777 == 0o600
    with host_lock.alone(str(tmp_path / "missing"), changes=True):
        assert not (tmp_path / "missing").exists()


CHANGES = {firewall: {"rules": []}, link: {"links": []}, tuning: {"parameters": {}}}


@pytest.mark.parametrize("module", CHANGES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_what_changes_a_host_waits_for_a_task_of_another_run(tmp_path, other, monkeypatch, capsys, module):
    monkeypatch.setattr(host_lock, "WAIT_SECONDS", 0.2)
    process = other(True, 60)
    with patch_module_args({**CHANGES[module], "prefix": str(tmp_path)}), pytest.raises(SystemExit):
        module.main()
    assert f"process {process.pid} on this host" in capsys.readouterr().out


LOCKS = {
    "changes.lock": lambda folder: host_lock.alone(str(folder), True),
    ".fetching": download.alone,
    "build.lock": lambda folder: store.lock(folder / "build.lock"),
    "lease.lock": lease._alone,
}


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("before", [None, 0o644])
def test_no_other_account_can_hold_a_lock(tmp_path, name, before):
    if before:
        (tmp_path / name).touch(before)
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


def test_a_lease_whose_lock_nobody_gives_back_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "LOCK_SECONDS", 0)
    with lease._alone(tmp_path), pytest.raises(Refusal, match=r"holds .*lease.lock .*: end it"), lease._alone(tmp_path):
        pass
