"""The lock of a cluster: who has it, who takes it over, and who does not."""

import contextlib
import json
import os
import re
import signal
import time

import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.action import cluster_lock as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cluster_lock
from ansible_collections.llamacpp.cluster.plugins.modules import cluster_lock as module
from conftest import ROOT, fill_disk
from support import actions
from support.playbook_runs import Operator
from test_tasks import flat as tasks

MODULE = module
pytestmark = pytest.mark.timeout(300)


def run(number=1, **values):
    """A run of another controller."""
    return cluster_lock.Run("anna", "laptop7", f"boot-{number} pid:[1]", 4711, "site.yml")._replace(**values)


FIRST, SECOND = (typed_json.dump(run(number)) for number in (1, 2))


def test_one_run_has_it_until_it_is_released(tmp_path, monkeypatch):
    assert cluster_lock.take_lock(tmp_path, run()) is None
    assert cluster_lock.take_lock(tmp_path, run()) is None, "it has it already"
    assert (tmp_path / names.CLUSTER_LOCK_FILE).stat().st_mode & 0o777 == 0o600
    for _another_try in range(2):
        for other in (run(2), run(machine="boot-1 pid:[2]"), run(pid=4712)):
            with pytest.raises(cluster_lock.LockHeldError) as held:
                cluster_lock.take_lock(tmp_path, other)
            assert held.value.holder.is_same_run(run())
        cluster_lock.release_lock(tmp_path, run(2))
    with monkeypatch.context() as patched, locks.hold(tmp_path / names.CLUSTER_LOCK_FILE):
        patched.setattr(cluster_lock, "LOCK_TIMEOUT_SECONDS", 0)
        with pytest.raises(locks.BusyError):
            cluster_lock.release_lock(tmp_path, run())  # another run may take over just now
    cluster_lock.release_lock(tmp_path, run())
    assert cluster_lock.take_lock(tmp_path, run(2)) is None


def test_the_message_names_run_time_and_remedy(tmp_path):
    cluster_lock.take_lock(tmp_path, run())
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(cluster_lock.read_holder(tmp_path).since))
    with pytest.raises(cluster_lock.LockHeldError) as held:
        cluster_lock.take_lock(tmp_path, run(2))
    message = str(held.value)
    for part in ("site.yml", "laptop7", "process 4711", since, "-e llama_lease_take_over=true"):
        assert part in message
    taken = cluster_lock.take_lock(tmp_path, run(2), ended_run=run())
    with pytest.raises(cluster_lock.LockHeldError):
        cluster_lock.take_lock(tmp_path, run(3), ended_run=run())  # it was as fast, and too late
    assert taken.describe().startswith("site.yml run by anna on laptop7")


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({**run()._asdict(), "since": "x"}), "x" * 100000])
def test_what_a_run_left_that_was_killed_while_it_wrote_keeps_nobody_out(tmp_path, text):
    (tmp_path / names.CLUSTER_LOCK_FILE).write_text(text)
    assert cluster_lock.take_lock(tmp_path, run()) is None
    assert cluster_lock.read_holder(tmp_path).is_same_run(run())


def test_the_module_takes_and_releases(tmp_path, call):
    prefix = tmp_path / "opt" / "llamacpp"
    call(prefix=str(prefix), run=FIRST, create=True, check=True)
    call(prefix=str(prefix), run=FIRST)
    assert not prefix.exists(), "neither in check mode nor without create"
    assert call(prefix=str(prefix), run=FIRST, create=True)["taken_from"] == ""
    assert abs(cluster_lock.read_holder(prefix).since - time.time()) < 60
    refused = call(prefix=str(prefix), run=SECOND)
    assert refused["failed"]
    assert refused["holder"]["user"] == "anna"
    assert "site.yml run by anna" in call(prefix=str(prefix), run=SECOND, take_over=True)["taken_from"]
    call(prefix=str(prefix), run=SECOND, state="absent")
    assert cluster_lock.read_holder(prefix) is None
    (prefix / names.CLUSTER_LOCK_FILE).unlink()
    call(prefix=str(prefix), run=SECOND, state="absent")
    assert [path.name for path in prefix.iterdir()] == [names.MARKER_FOLDER], "after a teardown none is made"
    call(prefix=str(prefix.parent), run=FIRST)
    assert list(prefix.parent.iterdir()) == [prefix], "in somebody else's folder there is no lock"


def test_a_run_that_changes_nothing_releases_a_lock_of_an_ended_run_and_removes_a_killed_proof(tmp_path, call):
    (tmp_path / names.MARKER_FOLDER).mkdir()
    proof = tmp_path / "state" / "proof"
    proof.mkdir(parents=True)
    (proof / "layers.gguf").write_text("8 GiB")
    cluster_lock.take_lock(tmp_path, run())
    release = {"prefix": str(tmp_path), "state": "absent", "run": SECOND}
    with locks.hold(tmp_path / names.PROOF_LOCK_FILE):
        assert call(**release)["holder"]["machine"] == run().machine
    assert proof.exists(), "a proof runs"
    assert cluster_lock.read_holder(tmp_path).is_same_run(run()), "it may still run"
    call(**release, ended=FIRST)
    assert cluster_lock.read_holder(tmp_path) is None
    assert not proof.exists()


def test_the_action_asks_again_for_a_run_that_has_ended(monkeypatch):
    made = actions.made(action)
    made.variables = {"inventory_hostname": "head"}
    asked = []
    monkeypatch.setattr(made, "run_module", lambda **more: asked.append(more) or {"holder": FIRST})
    monkeypatch.setattr(action, "has_ended", lambda _run: True)
    monkeypatch.setattr(action.context, "CLIARGS", {})
    made.perform(cluster_lock.LockArguments("/p", state="absent"))
    assert [more["ended"] for more in asked] == [None, FIRST]


def test_a_full_disk_is_named_by_its_mount(small_disk, call):
    (small_disk / names.MARKER_FOLDER).mkdir()
    fill_disk(small_disk / "filler", 0)
    failed = call(prefix=str(small_disk), run=FIRST)
    assert failed["msg"].startswith(
        f"{small_disk}/{names.CLUSTER_LOCK_FILE}: No space left on device. Free space on {small_disk} and"
    )


def test_a_run_of_this_controller_has_ended_when_its_process_has(popen, monkeypatch):
    sleeper = popen(["sleep", "60"])
    other = action.run_identity(sleeper.pid, ["/srv/playbooks/site.yml", "llamacpp.cluster.verify"])
    assert other.playbook == "site.yml, llamacpp.cluster.verify"
    assert not action.has_ended(other)
    assert not action.has_ended(other._replace(pid=1)), "a process of another account"
    sleeper.kill()
    sleeper.wait()
    assert action.has_ended(other)
    assert not action.has_ended(other._replace(machine="another"))
    with monkeypatch.context() as patched:
        patched.setattr(action.Path, "read_text", lambda path: "boot-2")
        assert not action.has_ended(other), "a controller of the same name"
    monkeypatch.setattr(action.os, "readlink", lambda path: "pid:[2]")
    assert not action.has_ended(other), "in another container its number says nothing"


PLAYBOOK = f"""
- hosts: all
  gather_facts: false
  any_errors_fatal: true
  vars_files: [{ROOT}/playbooks/vars/cluster.yml]
  tasks:
    - llamacpp.cluster.host_info: {{scope: user}}
      register: __llama_facts
      ignore_unreachable: true
    - ansible.builtin.include_tasks: {ROOT}/playbooks/tasks/lock.yml
      vars: {{__llama_lock_create_prefix: true}}
    - ansible.builtin.raw: touch {{{{ playbook_dir }}}}/{{{{ inventory_hostname }}}}-{{{{ who }}}}
    - ansible.builtin.raw: "{{{{ work }}}}"
    - ansible.builtin.include_tasks: {ROOT}/playbooks/tasks/lock.yml
      vars: {{__llama_lock_state: absent}}
"""


@pytest.fixture
def operator(tmp_path):
    return Operator(tmp_path, PLAYBOOK)


@pytest.fixture
def first(operator):
    """A run that is at work until the file ``go`` is there."""
    started = operator.start("first", f"sh -c 'until [ -e {operator.path}/go ]; do sleep 0.2; done'")
    operator.wait_for(lambda: operator.touched("first") == ["head-first", "worker-first"])
    yield started
    (operator.path / "go").touch()  # ends the tasks of a run that was killed, too
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def output_of(started):
    return " ".join(started.communicate(timeout=200)[0].split())


@pytest.mark.programs
def test_the_second_of_two_runs_changes_no_host_and_the_first_goes_on(operator, first):
    second = operator.start("second", "true")
    assert "Another run is changing this cluster: run.yml run by" in output_of(second)
    assert second.returncode
    assert not operator.touched("second")
    third = operator.start("third", "true", "-e", "llama_lease_take_over=true")
    assert "took over the lock of run.yml" in output_of(third)
    assert third.returncode == 0
    (operator.path / "go").touch()
    output_of(first)
    assert first.returncode == 0
    assert cluster_lock.read_holder(operator.prefix) is None


@pytest.mark.programs
def test_a_run_that_was_killed_is_taken_over_at_once(operator, first):
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert cluster_lock.read_holder(operator.prefix).pid == first.pid
    second = operator.start("second", "true")
    assert "took over the lock of run.yml" in output_of(second)
    assert second.returncode == 0
    assert cluster_lock.read_holder(operator.prefix) is None


@pytest.mark.programs
@pytest.mark.parametrize("lost, answers", [("head", "worker"), ("worker", "head")])
def test_all_but_a_host_that_cannot_be_reached_are_stopped(operator, lost, answers):
    operator.lose(lost)
    stop = operator.start("any", "true", playbook=ROOT / "playbooks" / "stop.yml")
    text = stop.communicate(timeout=200)[0]
    assert stop.returncode == 2
    done = text.partition("TASK [Stop the workers]")[2].partition("TASK")[0]
    assert f"ok: [{answers}]" in done
    assert f"{lost} could not be reached, and its services may still run." in " ".join(text.split())


CHANGES = re.compile(
    r"cluster\.(benchmark|service|release|uninstall):|_role:|tasks/(reboot_host|remove_host|rollback)\.yml"
)
LOOKS = re.compile("state: fetched|check_mode: true|tasks_from: (compare|kernel_waits)")


def test_a_playbook_that_changes_hosts_has_the_lock_meanwhile():
    changing = set()
    for path in (ROOT / "playbooks").glob("*.yml"):
        steps = [
            yaml.safe_dump(step)
            for step in tasks(yaml.safe_load(path.read_text()))
            if not {"block", "tasks"} & set(step)
        ]
        locks = [number for number, step in enumerate(steps) if "tasks/lock.yml" in step]
        changes = [number for number, step in enumerate(steps) if CHANGES.search(step) and not LOOKS.search(step)]
        if changes:
            changing.add(path.stem)
            assert locks[0] < changes[0], path.name
            assert locks[-1] > changes[-1], path.name
            assert "__llama_lock_state: absent" in steps[locks[-1]], path.name
    assert changing == {"benchmark", "reboot", "rollback", "site", "start", "stop", "teardown"}
