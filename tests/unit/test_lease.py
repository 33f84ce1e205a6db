"""The lease of a cluster: who holds it, who takes it over, and that a run that ends in any way gives it back."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import faults
import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamacpp.cluster.plugins.action import lease as lease_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import lease
from ansible_collections.llamacpp.cluster.plugins.modules import lease as module
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import run_identity
from test_tasks import tasks

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]


def run(number=1, **values):
    """A run of another controller."""
    known = {"user": "anna", "controller": "laptop7", "machine": "m", "boot": "b", "started": "9", "process": 4711}
    return {**known, "playbook": "site.yml", "run": f"{number:032x}", **values}


def written(prefix):
    return json.loads((prefix / "lease.json").read_text())


def aged(prefix, seconds):
    moment = time.time() - seconds
    os.utime(prefix / "lease.json", (moment, moment))


def test_one_run_holds_it_until_it_gives_it_back(tmp_path):
    assert lease.hold(tmp_path, run()) == (True, "")
    assert (tmp_path / "lease.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "lease.lock").stat().st_mode & 0o777 == 0o600
    assert abs(written(tmp_path)["since"] - time.time()) < 5
    with pytest.raises(lease.HeldError) as held:
        lease.hold(tmp_path, run(2))
    assert held.value.holder["controller"] == "laptop7"
    assert not lease.release(tmp_path, run(2)["run"]).changed
    assert lease.release(tmp_path, run()["run"]).changed
    assert lease.hold(tmp_path, run(2)).changed


def test_the_message_says_who_since_when_from_where_with_what_and_how_to_take_over(tmp_path):
    lease.hold(tmp_path, run(user="an\x1bna"))
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(written(tmp_path)["since"]))
    with pytest.raises(lease.HeldError) as held:
        lease.hold(tmp_path, run(2))
    said = str(held.value)
    assert said.isprintable()
    for part in ("site.yml", "laptop7", "process 4711", since, "-e llama_lease_take_over=true", "after 300 s"):
        assert part in said
    assert lease.hold(tmp_path, run(2), take_over=True).taken_from.startswith("site.yml of an\\x1bna on laptop7")


def test_a_run_renews_its_own(tmp_path):
    lease.hold(tmp_path, run())
    for renew in (lambda: lease.hold(tmp_path, run()), lambda: lease.keep(tmp_path, run()["run"])):
        aged(tmp_path, 200)
        assert renew() == (False, "")
        assert lease.read(tmp_path).age < 5


@pytest.mark.parametrize("seconds, stale", [(250, False), (301, True), (-250, False), (-301, True)])
def test_one_that_nobody_renews_is_taken_over_by_the_clock_of_the_head(tmp_path, seconds, stale):
    """Also where that clock was set back: a run that goes on has renewed it since."""
    lease.hold(tmp_path, run())
    aged(tmp_path, seconds)
    if stale:
        assert "laptop7" in lease.hold(tmp_path, run(2)).taken_from
    else:
        with pytest.raises(lease.HeldError):
            lease.hold(tmp_path, run(2))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "x"}', json.dumps({**run(), "since": "x"}), "x" * 100000])
def test_one_that_cannot_be_read_counts_by_its_age(tmp_path, text):
    (tmp_path / "lease.json").write_text(text)
    with pytest.raises(lease.HeldError, match=r"a run that left an unreadable lease\.json"):
        lease.hold(tmp_path, run())
    aged(tmp_path, 400)
    assert lease.hold(tmp_path, run()).changed


def test_a_run_that_lost_it_ends_before_it_touches_a_service(tmp_path):
    lease.hold(tmp_path, run())
    lease.hold(tmp_path, run(2, user="bert"), take_over=True)
    with pytest.raises(lease.HeldError, match=r"holds the lease of the cluster no more: site\.yml of bert"):
        lease.keep(tmp_path, run()["run"])
    lease.release(tmp_path, run(2)["run"])
    with pytest.raises(lease.HeldError, match="another run took over and has ended"):
        lease.keep(tmp_path, run()["run"])


def test_the_lease_of_a_run_that_has_ended_is_taken_over_and_no_other(tmp_path):
    lease.hold(tmp_path, run())
    with pytest.raises(lease.HeldError):
        lease.hold(tmp_path, run(3), ended=run(2)["run"])
    assert lease.hold(tmp_path, run(3), ended=run()["run"]).changed


def _race(prefix, number, results):
    try:
        results.put((number, lease.hold(prefix, run(number)).changed))
    except lease.HeldError:
        results.put((number, False))


def test_of_many_that_take_over_at_once_one_gets_it(tmp_path):
    lease.hold(tmp_path, run())
    aged(tmp_path, 400)
    fork = get_context("fork")
    results = fork.Queue()
    racing = [fork.Process(target=_race, args=(tmp_path, number, results)) for number in range(2, 10)]
    for process in racing:
        process.start()
    got = [number for number, held in (results.get(timeout=60) for _process in racing) if held]
    for process in racing:
        process.join()
    assert len(got) == 1
    assert written(tmp_path)["run"] == run(got[0])["run"]


@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_fault_leaves_no_lease_in_part(tmp_path, monkeypatch, kind):
    broken = faults.Faults(monkeypatch, kind, tmp_path)
    for number in itertools.count(1):
        prefix = tmp_path / str(number)
        prefix.mkdir()
        broken.at, broken.count = number, 0
        with contextlib.suppress(OSError, faults.Killed):
            lease.hold(prefix, run())
        reached, broken.at = broken.count >= number, None
        assert not lease.read(prefix) or lease.read(prefix).holder["run"] == run()["run"]
        lease.hold(prefix, run())
        assert written(prefix)["run"] == run()["run"]
        if not reached:
            break
    assert number > 1


def call(capsys, **arguments):
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


def test_the_module_creates_the_installation_where_it_is_asked_to(tmp_path, capsys):
    prefix = tmp_path / "opt" / "llamacpp"
    assert not call(capsys, prefix=str(prefix), run=run())["changed"]
    assert not prefix.exists()
    assert call(capsys, prefix=str(prefix), run=run(), create=True)["held"]
    assert call(capsys, prefix=str(prefix), run=run(), state="kept")["held"] is False
    refused = call(capsys, prefix=str(prefix), run=run(2), state="kept")
    assert refused["failed"]
    assert refused["holder"]["user"] == "anna"
    assert call(capsys, prefix=str(prefix), run=run(), state="released")["held"]
    assert sorted(path.name for path in prefix.iterdir()) == [names.FOLDER_MARK, "lease.lock"]
    assert not call(capsys, prefix=str(prefix.parent), run=run()).get("held")
    assert list(prefix.parent.iterdir()) == [prefix], "in somebody else's folder there is no lease"


def test_check_mode_takes_no_lease(tmp_path, capsys):
    call(capsys, prefix=str(tmp_path), run=run(), create=True, _ansible_check_mode=True)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ processes


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_run_of_this_controller_has_ended_when_its_process_has(sleeper):
    mine = run_identity.run(sleeper.pid, ["/srv/playbooks/site.yml", "llamacpp.cluster.verify"])
    assert mine["playbook"] == "site.yml, llamacpp.cluster.verify"
    assert not run_identity.has_ended(mine)
    assert run_identity.has_ended({**mine, "started": "1"})
    sleeper.send_signal(signal.SIGSTOP)
    assert not run_identity.has_ended(mine)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not asked yet
    assert run_identity.has_ended(mine)
    sleeper.wait()
    assert run_identity.has_ended(mine)


def test_a_run_of_another_controller_may_go_on(sleeper):
    mine = run_identity.run(sleeper.pid, [])
    sleeper.kill()
    sleeper.wait()
    assert not run_identity.has_ended({**mine, "controller": "other"})
    assert not run_identity.has_ended({**mine, "machine": "other"})


def test_no_run_outlives_the_start_of_its_controller(sleeper):
    assert run_identity.has_ended({**run_identity.run(sleeper.pid, []), "boot": "an earlier one"})


def test_a_process_that_proc_hides_goes_on(sleeper, tmp_path, monkeypatch):
    mine = run_identity.run(sleeper.pid, [])
    monkeypatch.setattr(run_identity, "PROCESSES", tmp_path)
    assert run_identity.start_of(sleeper.pid) == ""
    monkeypatch.setattr(run_identity, "_machine", lambda: mine["machine"])
    assert not run_identity.has_ended(mine)


# ----------------------------------------------------------------------------------------------------------------- runs

PLAYBOOK = f"""
- hosts: all
  gather_facts: false
  any_errors_fatal: true
  tasks:
    - ansible.builtin.include_tasks: {ROOT}/playbooks/tasks/lease.yml
      vars: {{llama_lease_created: true}}
    - ansible.builtin.raw: touch {{{{ playbook_dir }}}}/{{{{ inventory_hostname }}}}-{{{{ who }}}}
    - ansible.builtin.raw: "{{{{ work }}}}"
    - ansible.builtin.include_tasks: {ROOT}/playbooks/tasks/lease.yml
      vars: {{llama_lease_state: kept}}
    - ansible.builtin.raw: touch {{{{ playbook_dir }}}}/{{{{ inventory_hostname }}}}-{{{{ who }}}}-services
"""


class Operator:
    """Starts runs on two hosts, which are this machine; ``prefix`` is the installation of the head."""

    def __init__(self, path):
        self.path = path
        self.prefix = path / "data" / "llamacpp"
        (path / "run.yml").write_text(PLAYBOOK)
        hosts = {name: {"ansible_connection": "local", "llama_host_scope": "user"} for name in ("head", "worker")}
        groups = {
            "llama_cluster": {"hosts": hosts},
            "llama_head": {"hosts": {"head": {}}},
            "llama_workers": {"hosts": {"worker": {}}},
        }
        (path / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))

    def lose(self, host):
        """Nobody answers at the host's address."""
        inventory = yaml.safe_load((self.path / "hosts.yml").read_text())
        hosts = inventory["all"]["children"]["llama_cluster"]["hosts"]
        hosts[host].update(ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=1)
        (self.path / "hosts.yml").write_text(yaml.safe_dump(inventory))

    def start(self, who, work, *arguments, playbook="run.yml"):
        program = Path(sys.executable).with_name("ansible-playbook")
        variables = json.dumps({"who": who, "work": work, "ansible_python_interpreter": sys.executable})
        return subprocess.Popen(
            [program, "-i", "hosts.yml", playbook, "-e", variables, *arguments],
            cwd=self.path,
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_NOCOLOR": "1",
                "XDG_DATA_HOME": str(self.path / "data"),
                "XDG_CONFIG_HOME": str(self.path / "config"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def touched(self, who):
        return sorted(path.name for path in self.path.glob(f"*-{who}*"))

    def wait_for(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture
def operator(tmp_path):
    return Operator(tmp_path)


@pytest.mark.programs
def test_the_second_of_two_runs_changes_no_host_and_the_first_goes_on(operator):
    first = operator.start("first", f"sh -c 'until [ -e {operator.path}/go ]; do sleep 0.2; done'")
    operator.wait_for(lambda: operator.touched("first") == ["head-first", "worker-first"])
    second = operator.start("second", "true")
    said = second.communicate(timeout=100)[0]
    assert second.returncode
    assert "Another run changes this cluster: run.yml of" in said
    assert not operator.touched("second")
    (operator.path / "go").touch()
    assert "failed=1" not in first.communicate(timeout=100)[0]
    assert "worker-first-services" in operator.touched("first")


@pytest.mark.programs
def test_a_run_that_is_taken_over_touches_no_service(operator):
    first = operator.start("first", f"sh -c 'until [ -e {operator.path}/go ]; do sleep 0.2; done'")
    operator.wait_for(lambda: operator.touched("first") == ["head-first", "worker-first"])
    second = operator.start("second", "true", "-e", "llama_lease_take_over=true")
    assert "took over from run.yml" in second.communicate(timeout=100)[0]
    assert second.returncode == 0
    (operator.path / "go").touch()
    assert "holds the lease of the cluster no more" in first.communicate(timeout=100)[0]
    assert operator.touched("first") == ["head-first", "worker-first"]


@pytest.mark.programs
@pytest.mark.parametrize("how", ["failure", "SIGKILL", "SIGINT"])
def test_a_run_that_ends_in_any_way_gives_it_back(operator, how):
    """Within seconds, so that another controller need not wait until it is stale."""
    work = "false" if how == "failure" else f"echo >> {operator.path}/works; sleep 30"
    first = operator.start("first", work)
    operator.wait_for(lambda: operator.touched("first") == ["head-first", "worker-first"])
    if how != "failure":
        # Between two tasks ansible-core loses an interrupt at times, and the run would go on to its end.
        operator.wait_for(lambda: (operator.path / "works").exists() and (operator.path / "works").stat().st_size == 2)
        assert (operator.prefix / "lease.json").exists()
        os.killpg(first.pid, getattr(signal, how))
    first.communicate(timeout=100)
    assert first.returncode
    operator.wait_for(lambda: not (operator.prefix / "lease.json").exists())


def test_giving_back_what_a_teardown_has_removed_leaves_nothing_behind(tmp_path):
    """The folder stays where it has models of others, and a lock in it would count as an installation."""
    assert lease.release(tmp_path, run(1)["run"]) == lease.Change(False)
    assert not list(tmp_path.iterdir())


@pytest.mark.programs
def test_the_process_that_renews_it_does_so_until_the_run_has_ended(sleeper, tmp_path, monkeypatch):
    for name, value in (("RENEWAL_SECONDS", 0.2), ("POLL_SECONDS", 0.05)):
        monkeypatch.setattr(lease_action, name, value)
    mine = run_identity.run(sleeper.pid, [])
    lease.hold(tmp_path, mine)
    action = lease_action.ActionModule(mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock())
    renewed = []

    def on_host(command, sudoable):
        done = subprocess.run(["sh", "-c", command], check=False)
        if (tmp_path / "lease.json").exists():
            renewed.append(lease.read(tmp_path).age)
            aged(tmp_path, 200)
        if len(renewed) == 3:
            sleeper.kill()
            sleeper.wait()
        return {"rc": done.returncode}

    monkeypatch.setattr(action, "_low_level_execute_command", on_host)
    action._renew(str(tmp_path / "lease.json"), mine)
    assert len(renewed) == 3
    assert max(renewed) < 100
    assert not (tmp_path / "lease.json").exists()


def test_a_task_of_another_plugin_asks_the_module_of_the_lease(monkeypatch):
    asked = []
    plugin = lease_action.ActionModule.__new__(lease_action.ActionModule)
    monkeypatch.setattr(plugin, "_execute_module", lambda name=None, **_rest: asked.append(name) or {})
    plugin._decided({"prefix": "/opt/llamacpp", "state": "kept"}, {})
    assert asked == ["llamacpp.cluster.lease"]


def test_what_renews_it_leaves_the_lease_of_another_run_alone(sleeper, tmp_path, monkeypatch):
    mine = run_identity.run(sleeper.pid, [])
    sleeper.kill()
    sleeper.wait()
    lease.hold(tmp_path, run(2))
    aged(tmp_path, 200)
    action = lease_action.ActionModule(mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock())
    monkeypatch.setattr(
        action,
        "_low_level_execute_command",
        lambda command, sudoable: {"rc": subprocess.run(["sh", "-c", command], check=False).returncode},
    )
    assert action._on_head(str(tmp_path / "lease.json"), mine, "touch -c")
    action._renew(str(tmp_path / "lease.json"), mine)
    assert written(tmp_path)["run"] == run(2)["run"]
    assert lease.read(tmp_path).age > 100


@pytest.mark.programs
def test_a_head_that_cannot_be_reached_keeps_nobody_from_stopping_the_others(operator):
    operator.lose("head")
    alone = operator.start("only", "true", "--limit", "worker")
    said = alone.communicate(timeout=200)[0]
    assert "The head cannot be reached: nothing keeps another run" in " ".join(said.split())
    assert operator.touched("only") == ["worker-only", "worker-only-services"]
    assert alone.returncode == 0


@pytest.mark.programs
@pytest.mark.parametrize("lost, answers", [("head", "worker"), ("worker", "head")])
def test_all_but_a_host_that_cannot_be_reached_are_stopped(operator, lost, answers):
    operator.lose(lost)
    run = operator.start("any", "true", playbook=ROOT / "playbooks" / "stop.yml")
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 2
    done = said.partition("TASK [Stop the workers]")[2].partition("TASK")[0]
    assert f"ok: [{answers}]" in done
    assert f"{lost} could not be reached, and its services may still run." in " ".join(said.split())


# ------------------------------------------------------------------------------------------------------------ playbooks

CHANGES = {
    "llamacpp.cluster.clean",
    "llamacpp.cluster.service",
    "llamacpp.cluster.release",
    "ansible.builtin.include_role",
    "ansible.builtin.import_role",
}
CHANGING_FILES = {f"tasks/{name}.yml" for name in ("reboot", "remove_host", "back", "retired")}


def changes_hosts(step):
    files = {str(step.get(f"ansible.builtin.{how}_tasks")) for how in ("include", "import")}
    if step.get("llamacpp.cluster.release", {}).get("state") == "fetched":
        return False  # by the controller, for itself
    if step.get("check_mode") is True:
        return False
    return bool(CHANGES & set(step) or CHANGING_FILES & files)


READ_ONLY = {"plan.yml", "report.yml", "status.yml", "verify.yml"}
"""Playbooks that change no service that serves; verify.yml holds the lease while it runs instances on the staging ports."""


@pytest.mark.parametrize("path", sorted((ROOT / "playbooks").glob("*.yml")), ids=lambda path: path.name)
def test_a_playbook_takes_the_lease_before_it_changes_a_host(path):
    steps = [*tasks(yaml.safe_load(path.read_text()))]
    leases = [
        index for index, step in enumerate(steps) if step.get("ansible.builtin.include_tasks") == "tasks/lease.yml"
    ]
    changes = [index for index, step in enumerate(steps) if changes_hosts(step)]
    if path.name in READ_ONLY:
        assert not changes
        before = [*tasks([{"tasks": yaml.safe_load((ROOT / "playbooks/tasks/before_verify.yml").read_text())}])]
        included = [step.get("ansible.builtin.include_tasks") for step in before]
        assert included.index("lease.yml") < included.index("staging.yml")
    else:
        assert leases[0] < changes[0]
        assert steps[leases[-1]]["vars"] == {"llama_lease_state": "released"}
        assert leases[-1] > changes[-1]


def test_a_run_that_waited_for_another_compares_again_before_it_changes_a_host():
    steps = [
        step.get("ansible.builtin.include_tasks")
        for step in tasks(yaml.safe_load((ROOT / "playbooks/site.yml").read_text()))
    ]
    assert steps[steps.index("tasks/lease.yml") + 1] == "tasks/decide.yml"
