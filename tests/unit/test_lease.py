"""The lease of a cluster: who holds it, who takes it over, and what a run does that lost it."""

import contextlib
import itertools
import json
import os
import signal
import time
from multiprocessing import get_context
from unittest import mock

import faults
import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import lease
from ansible_collections.llamacpp.cluster.plugins.modules import lease as module
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import action as base
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import run_identity
from support.playbook_runs import ROOT, Operator
from test_tasks import flat as tasks

pytestmark = pytest.mark.timeout(300)


def run(number=1, **values):
    """A run of another controller."""
    holder = lease.Holder(f"{number:032x}", "anna", "laptop7", 4711, "site.yml", int(time.time()))
    return holder._replace(**values)


def written(prefix):
    return json.loads((prefix / "lease.json").read_text())


def set_age(prefix, seconds):
    moment = time.time() - seconds
    os.utime(prefix / "lease.json", (moment, moment))


def test_one_run_holds_it_until_it_is_released(tmp_path):
    assert lease.acquire(tmp_path, run()) == ""
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("lease.json", "lease.lock")} == {0o600}
    for _another_try in range(2):
        with pytest.raises(lease.HeldError) as held:
            lease.acquire(tmp_path, run(2))
        assert held.value.holder.controller == "laptop7"
        lease.release(tmp_path, run(2).run)
    lease.release(tmp_path, run().run)
    assert lease.acquire(tmp_path, run(2)) == ""


def test_the_message_names_run_time_and_remedy(tmp_path):
    lease.acquire(tmp_path, run(user="an\x1bna"))
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(written(tmp_path)["since"]))
    with pytest.raises(lease.HeldError) as held:
        lease.acquire(tmp_path, run(2))
    message = str(held.value)
    assert message.isprintable()
    for part in ("site.yml", "laptop7", "process 4711", since, "-e llama_lease_take_over=true", "after 2 h"):
        assert part in message
    assert lease.acquire(tmp_path, run(2), take_over=True).startswith("site.yml of an\\x1bna on laptop7")


def test_a_run_renews_its_lease(tmp_path):
    lease.acquire(tmp_path, run())
    for renew in (lambda: lease.acquire(tmp_path, run()), lambda: lease.renew(tmp_path, run().run)):
        set_age(tmp_path, 200)
        assert not renew()
        assert lease.read(tmp_path).age < 5


@pytest.mark.parametrize("seconds, stale", [(7100, False), (7201, True), (-7100, False), (-7201, True)])
def test_a_stale_lease_is_taken_over_by_the_clock_of_the_head(tmp_path, seconds, stale):
    """Also where that clock was set back: a run that goes on has renewed it since."""
    lease.acquire(tmp_path, run())
    set_age(tmp_path, seconds)
    if stale:
        assert "laptop7" in lease.acquire(tmp_path, run(2))
    else:
        with pytest.raises(lease.HeldError):
            lease.acquire(tmp_path, run(2))


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({**run()._asdict(), "since": "x"}), "x" * 100000])
def test_an_unreadable_lease_counts_by_its_age(tmp_path, text):
    (tmp_path / "lease.json").write_text(text)
    with pytest.raises(lease.HeldError, match=r"a run that left an unreadable lease\.json"):
        lease.acquire(tmp_path, run())
    set_age(tmp_path, 7300)
    assert "unreadable" in lease.acquire(tmp_path, run())


def test_a_run_that_lost_it_cannot_renew_it(tmp_path):
    lease.acquire(tmp_path, run())
    lease.acquire(tmp_path, run(2, user="bert"), take_over=True)
    set_age(tmp_path, 100)
    with pytest.raises(lease.HeldError, match=r"lost the lease of the cluster: site\.yml of bert .* has taken over"):
        lease.renew(tmp_path, run().run)
    assert lease.read(tmp_path).age > 50, "the lease of the other run is as it was"
    lease.release(tmp_path, run(2).run)
    with pytest.raises(lease.HeldError, match="another run took over and has ended"):
        lease.renew(tmp_path, run().run)


def test_the_lease_of_a_run_that_has_ended_is_taken_over_and_no_other(tmp_path):
    lease.acquire(tmp_path, run())
    with pytest.raises(lease.HeldError):
        lease.acquire(tmp_path, run(3), ended=run(2).run)
    assert lease.acquire(tmp_path, run(3), ended=run().run)


def _race(prefix, number, results):
    try:
        results.put((number, bool(lease.acquire(prefix, run(number)))))
    except lease.HeldError:
        results.put((number, False))


def test_of_many_that_take_over_at_once_one_gets_it(tmp_path):
    lease.acquire(tmp_path, run())
    set_age(tmp_path, 7300)
    fork = get_context("fork")
    results = fork.Queue()
    racing = [fork.Process(target=_race, args=(tmp_path, number, results)) for number in range(2, 10)]
    for process in racing:
        process.start()
    winners = [number for number, held in (results.get(timeout=60) for _process in racing) if held]
    for process in racing:
        process.join()
    assert len(winners) == 1
    assert written(tmp_path)["run"] == run(winners[0]).run


def test_a_lock_that_is_not_released_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "LOCK_SECONDS", 0)
    with (
        lease.locks.hold(tmp_path / "lease.lock"),
        pytest.raises(Refusal, match=r"on the head has held .*lease.lock .*: end it"),
    ):
        lease.acquire(tmp_path, run())


@pytest.mark.faults
@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_fault_leaves_no_lease_in_part(tmp_path, monkeypatch, kind):
    broken = faults.Faults(monkeypatch, kind, tmp_path)
    for number in itertools.count(1):
        prefix = tmp_path / str(number)
        prefix.mkdir()
        broken.at, broken.count = number, 0
        with contextlib.suppress(OSError, faults.Killed):
            lease.acquire(prefix, run())
        reached, broken.at = broken.count >= number, None
        assert not lease.read(prefix) or lease.read(prefix).holder.run == run().run
        lease.acquire(prefix, run())
        assert written(prefix)["run"] == run().run
        if not reached:
            break
    assert number > 1


def call(capsys, run, **arguments):
    """:param run: which calls the module."""
    known = {name: value for name, value in run._asdict().items() if name != "since"}
    with patch_module_args({"run": known, **arguments}), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


def test_the_module_acquires_renews_and_releases(tmp_path, capsys):
    prefix = tmp_path / "opt" / "llamacpp"
    call(capsys, prefix=str(prefix), run=run(), create=True, _ansible_check_mode=True)
    call(capsys, prefix=str(prefix), run=run())
    assert not prefix.exists(), "neither in check mode nor without create"
    assert call(capsys, prefix=str(prefix), run=run(), create=True)["taken_from"] == ""
    assert abs(written(prefix)["since"] - time.time()) < 60
    assert "failed" not in call(capsys, prefix=str(prefix), run=run(), state="renewed")
    refused = call(capsys, prefix=str(prefix), run=run(2), state="renewed")
    assert refused["failed"]
    assert refused["holder"]["user"] == "anna"
    for _again_after_a_teardown in range(2):
        call(capsys, prefix=str(prefix), run=run(), state="released")
        assert sorted(path.name for path in prefix.iterdir()) == [names.FOLDER_MARK, "lease.lock"]
        (prefix / "lease.lock").unlink()
        call(capsys, prefix=str(prefix), run=run(), state="released")
        assert [path.name for path in prefix.iterdir()] == [names.FOLDER_MARK]
        call(capsys, prefix=str(prefix), run=run())
    call(capsys, prefix=str(prefix.parent), run=run())
    assert list(prefix.parent.iterdir()) == [prefix], "in somebody else's folder there is no lease"


@pytest.fixture
def sleeper(popen):
    return popen(["sleep", "60"])


def identified(process, *playbooks):
    return typed_json.parse(lease.Holder, {**run_identity.current(process.pid, playbooks), "since": 0})


def test_a_run_of_this_controller_has_ended_when_its_process_has(sleeper):
    other = identified(sleeper, "/srv/playbooks/site.yml", "llamacpp.cluster.verify")
    assert other.playbook == "site.yml, llamacpp.cluster.verify"
    assert not run_identity.has_ended(other)
    assert run_identity.has_ended(other._replace(run="0" * 32)), "the number belongs to another process now"
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not asked yet
    assert run_identity.has_ended(other)
    sleeper.wait()
    assert run_identity.has_ended(other)
    assert not run_identity.has_ended(other._replace(controller="another"))


def test_a_process_that_proc_hides_goes_on(sleeper, tmp_path, monkeypatch):
    other = identified(sleeper)
    monkeypatch.setattr(run_identity, "PROCESSES", tmp_path)
    assert not run_identity.has_ended(other)


def test_a_long_task_renews_the_lease_from_time_to_time(monkeypatch):
    action, now = mock.Mock(spec=base.Action), iter([0, 100, 599, 600, 601, 700, 1199, 1300, 1301])
    monkeypatch.setattr(base.time, "monotonic", lambda: next(now))
    renewal = base.Lease(action, "/opt/llamacpp")
    for _poll in range(6):
        renewal.renew_in_time()
    assert action.renew_lease.mock_calls == [mock.call("/opt/llamacpp")] * 2


PLAYBOOK = f"""
- hosts: all
  gather_facts: false
  any_errors_fatal: true
  tasks:
    - ansible.builtin.include_tasks: {ROOT}/playbooks/tasks/lease.yml
      vars: {{__llama_lease_created: true}}
    - ansible.builtin.raw: touch {{{{ playbook_dir }}}}/{{{{ inventory_hostname }}}}-{{{{ who }}}}
    - ansible.builtin.raw: "{{{{ work }}}}"
    - ansible.builtin.include_tasks: {ROOT}/playbooks/tasks/lease.yml
      vars: {{__llama_lease_state: renewed}}
    - ansible.builtin.raw: touch {{{{ playbook_dir }}}}/{{{{ inventory_hostname }}}}-{{{{ who }}}}-services
    - ansible.builtin.include_tasks: {ROOT}/playbooks/tasks/lease.yml
      vars: {{__llama_lease_state: released}}
"""
ALL_TOUCHED = ["head-first", "head-first-services", "worker-first", "worker-first-services"]


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
    assert "Another run changes this cluster: run.yml of" in output_of(second)
    assert second.returncode
    assert not operator.touched("second")
    (operator.path / "go").touch()
    output_of(first)
    assert first.returncode == 0
    assert operator.touched("first") == ALL_TOUCHED
    assert not (operator.prefix / "lease.json").exists()


@pytest.mark.programs
def test_a_run_that_lost_the_lease_touches_no_service(operator, first):
    second = operator.start("second", "true", "-e", "llama_lease_take_over=true")
    assert "took over from run.yml" in output_of(second)
    assert second.returncode == 0
    (operator.path / "go").touch()
    assert "This run lost the lease of the cluster" in output_of(first)
    assert operator.touched("first") == ["head-first", "worker-first"]


@pytest.mark.programs
def test_a_run_that_was_killed_is_taken_over_at_once(operator, first):
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert written(operator.prefix)["process"] == first.pid
    second = operator.start("second", "true")
    assert "took over from run.yml" in output_of(second)
    assert second.returncode == 0
    assert not (operator.prefix / "lease.json").exists()


@pytest.mark.programs
def test_a_head_that_cannot_be_reached_keeps_nobody_from_stopping_the_others(operator):
    operator.lose("head")
    only = operator.start("only", "true", "--limit", "worker")
    assert "The head cannot be reached: nothing keeps another run" in output_of(only)
    assert operator.touched("only") == ["worker-only", "worker-only-services"]
    assert only.returncode == 0


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


MODULES = ("service", "release", "release_prune", "uninstall")
CHANGES = {f"llamacpp.cluster.{name}" for name in MODULES} | {
    f"ansible.builtin.{how}_role" for how in ("include", "import")
}
CHANGING_FILES = {f"tasks/{name}.yml" for name in ("measure", "reboot_host", "remove_host", "rollback")}


def changes_hosts(step):
    files = {str(step.get(f"ansible.builtin.{how}_tasks")) for how in ("include", "import")}
    return step.get("check_mode") is not True and bool(CHANGES & set(step) or CHANGING_FILES & files)


def test_a_playbook_that_changes_hosts_holds_the_lease_meanwhile():
    """verify.yml takes it in tasks/prepare_verify.yml, where it runs instances on the staging ports."""
    changing = set()
    for path in (ROOT / "playbooks").glob("*.yml"):
        steps = [*tasks(yaml.safe_load(path.read_text()))]
        leases = [
            number
            for number, step in enumerate(steps)
            if step.get("ansible.builtin.include_tasks") == "tasks/lease.yml"
        ]
        changes = [number for number, step in enumerate(steps) if changes_hosts(step)]
        if changes:
            changing.add(path.stem)
            assert leases[0] < changes[0], path.name
            assert leases[-1] > changes[-1], path.name
            assert steps[leases[-1]]["vars"] == {"__llama_lease_state": "released"}, path.name
    assert changing == {"benchmark", "reboot", "rollback", "site", "start", "stop", "teardown"}
