"""Services by each service manager. The managers' own programs are stood in for by those in fixtures/service_managers, which keep a state,
and write down their calls and what they start and stop."""

import shutil
import sys
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    commands,
    names,
    service_managers,
    typed_json,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services, start_records
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.services import FAILED, RUNNING, STOPPED
from ansible_collections.llamacpp.cluster.plugins.modules import service
from conftest import ROOT
from support.hosts import executable, service_plan

pytestmark = pytest.mark.programs

MODULE = service

PROGRAMS = Path(__file__).parent / "fixtures" / "service_managers"
WORKER, OTHER, HEAD = "llamacpp-worker-one", "llamacpp-worker-two", "llamacpp-server"
CHANGING = ("start", "stop", "boot", "enable", "disable", "daemon-reload", "update")


class Machine:
    """A host with one service manager."""

    def __init__(self, root, name):
        self.root, self.name = root, name
        shutil.copytree(PROGRAMS, root / "bin")
        self.folder = root / "bin"
        for part in ("running", "broken", "unread", "units"):
            (self.folder / part).mkdir()
        self.prefix = root / "prefix"
        executable(self.prefix / "venv/bin/python", f'#!/bin/sh\nexec {self.folder}/supervisorctl "$@"\n')
        for log in ("state", "supervisor"):
            (self.prefix / log).mkdir()
            for name_of_log in (WORKER, HEAD):
                (self.prefix / log / f"{name_of_log}.log").write_text("first line\n" * 20 + "no such device\n")
        scope = next(iter(service_managers.MANAGERS[name].folders))
        self.host = {
            "service_manager": name,
            "scope": scope,
            "prefix": str(self.prefix),
            "cache": str(root / "cache"),
            "units": str(self.folder / "units"),
        }

    @property
    def manager(self):
        return services.manager_of(typed_json.parse(InstallationPaths, self.host))

    def apply(self, *run, check=False, **lists):
        """What is changed, as service → state before and after; ``run`` are services by name, with the text «NAME 1»."""
        planned = [one if isinstance(one, services.Service) else defined(one) for one in run]
        wanted = services.ServiceRequest(planned, **lists)
        return {
            change.service: (change.before, change.after)
            for change in services.apply_request(self.manager, wanted, check)
        }

    def lines(self, name):
        """Lines of one of the programs' files, which is emptied."""
        path = self.folder / name
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def changes(self):
        """Calls that change something."""
        return [line for line in self.lines("calls") if any(f" {word}" in f" {line}" for word in CHANGING)]

    def state(self, *names):
        return list(self.manager.states(names).values())


def defined(name, text=None, temporary=False):
    return services.Service(name, text or f"{name} 1", temporary)


@pytest.fixture(params=list(services.MANAGER_CLASSES))
def machine(request, tmp_path, monkeypatch):
    return machine_with(request.param, tmp_path, monkeypatch)


def machine_with(name, tmp_path, monkeypatch):
    made = Machine(tmp_path, name)
    monkeypatch.setattr(commands, "SEARCH_PATH", f"{made.folder}:{commands.SEARCH_PATH}")
    monkeypatch.setattr(installation, "runs_supervisor", lambda prefix: True)
    monkeypatch.setattr(services.Launchd, "poll_seconds", 0)
    # The program that enables units of systemd knows one target.
    if name == "systemd_user":
        (made.folder / "units/default.target.wants").symlink_to("multi-user.target.wants")
    return made


def test_what_a_new_service_manager_needs():
    """The files of the exercise in CONTRIBUTING.md."""
    known = list(service_managers.MANAGERS)
    assert list(services.MANAGER_CLASSES) == known, "host/services.py lacks a class"
    templates = {path.name for path in (ROOT / "roles/llama_host/templates").iterdir()}
    assert {manager.template for manager in service_managers.MANAGERS.values()} <= templates


def test_services_are_defined_and_started_once_workers_first(machine):
    assert machine.apply(HEAD, WORKER, check=True) == {HEAD: (STOPPED, RUNNING), WORKER: (STOPPED, RUNNING)}
    assert (machine.changes(), list((machine.folder / "running").iterdir())) == ([], [])
    assert machine.apply(HEAD, WORKER) == {HEAD: (STOPPED, RUNNING), WORKER: (STOPPED, RUNNING)}
    assert machine.lines("events") == [f"start {WORKER}", f"start {HEAD}"]
    for name in (HEAD, WORKER):
        path = machine.manager.path(name)
        assert path.read_text() == f"{name} 1"
        assert path.stat().st_mode & 0o777 == machine.manager.spec.mode
    assert machine.changes()
    assert installation.disabled_services(machine.manager.paths, [HEAD, WORKER]) == set()
    assert machine.apply(HEAD, WORKER) == {}
    assert (machine.changes(), machine.lines("events")) == ([], [])


def test_a_service_with_another_definition_starts_anew_and_no_other(machine):
    machine.apply(WORKER, OTHER)
    machine.lines("events")
    changed = machine.apply(defined(WORKER, "another"), OTHER)
    assert changed == {WORKER: (RUNNING, "running, restarted")}
    assert machine.lines("events") == [f"stop {WORKER}", f"start {WORKER}"]
    assert machine.manager.path(WORKER).read_text() == "another"


def test_order_and_what_stopping_starting_and_removing_changes(machine):
    machine.apply(WORKER, HEAD)
    machine.lines("events")
    machine.apply(WORKER, HEAD, restart=[WORKER, HEAD, "of another call"])
    assert machine.lines("events") == [f"stop {HEAD}", f"stop {WORKER}", f"start {WORKER}", f"start {HEAD}"]
    for verb, before, after in (("stop", RUNNING, STOPPED), ("start", STOPPED, RUNNING), ("remove", RUNNING, STOPPED)):
        order = [WORKER, HEAD] if verb == "start" else [HEAD, WORKER]
        asked = {verb: [WORKER, HEAD]}
        expected = dict.fromkeys((WORKER, HEAD), (before, after))
        assert machine.apply(check=True, **asked) == expected
        assert machine.lines("events") == []
        assert machine.apply(**asked) == expected
        assert machine.lines("events") == [f"{'start' if verb == 'start' else 'stop'} {name}" for name in order]
        assert machine.manager.path(HEAD).exists() == (verb != "remove")
        assert machine.apply(**asked) == {}
    assert [path.name for path in (machine.folder / "units").rglob("*") if not path.is_dir()] == []


def test_a_definition_that_others_could_write_is_written_again(machine):
    machine.apply(WORKER)
    machine.manager.path(WORKER).chmod(0o666)
    assert machine.apply(WORKER)
    assert machine.manager.path(WORKER).stat().st_mode & 0o777 == machine.manager.spec.mode


def test_one_that_cannot_start_is_reported_with_its_last_lines(machine):
    (machine.folder / "broken" / WORKER).touch()
    with pytest.raises(Refusal) as raised:
        machine.apply(WORKER)
    said = str(raised.value)
    assert f"{WORKER} cannot start. Fix this on the host" in said
    assert f"The log of {WORKER} ends with:\n" in said
    assert said.endswith("no such device")
    assert said.count("first line") < services.MAX_LOG_LINES


@pytest.mark.parametrize("name", ["systemd", "systemd_user", "supervisor"])
def test_one_that_failed_is_stopped_before_it_starts(tmp_path, monkeypatch, name):
    machine = machine_with(name, tmp_path, monkeypatch)
    machine.apply(WORKER)
    (machine.folder / "running" / WORKER).write_text("failed")
    machine.lines("events")
    assert machine.state(WORKER) == [FAILED]
    assert machine.apply(start=[WORKER]) == {WORKER: (FAILED, RUNNING)}
    assert machine.lines("events") == [f"stop {WORKER}", f"start {WORKER}"]


def test_a_start_has_systemd_read_a_definition_that_was_written_and_not_read(tmp_path, monkeypatch):
    machine = machine_with("systemd", tmp_path, monkeypatch)
    machine.apply(WORKER)
    unread = machine.folder / "unread" / WORKER
    unread.touch()
    machine.apply(WORKER, restart=[WORKER])
    assert not unread.exists()
    machine.apply(stop=[WORKER])
    unread.touch()
    machine.apply(WORKER)
    assert not unread.exists()


def test_systemd_starts_at_boot_what_is_not_temporary(tmp_path, monkeypatch):
    machine = machine_with("systemd", tmp_path, monkeypatch)
    machine.apply(defined(WORKER, temporary=True), OTHER)
    assert installation.disabled_services(machine.manager.paths, [WORKER, OTHER]) == {WORKER}
    (machine.folder / "units/multi-user.target.wants" / f"{OTHER}.service").unlink()
    assert machine.apply(OTHER) == {OTHER: (RUNNING, RUNNING)}
    assert installation.disabled_services(machine.manager.paths, [OTHER]) == set()
    assert machine.apply(OTHER) == {}


def test_a_systemd_that_does_not_answer_stops_nothing_and_says_so(tmp_path, monkeypatch):
    machine = machine_with("systemd", tmp_path, monkeypatch)
    broken = executable(tmp_path / "broken/systemctl", "#!/bin/sh\necho Failed to connect to bus >&2\nexit 1\n")
    monkeypatch.setattr(commands, "SEARCH_PATH", str(broken.parent))
    with pytest.raises((Refusal), match="Failed to connect to bus"):
        machine.manager.states([WORKER])


def test_systemd_of_a_user_is_called_as_such(tmp_path, monkeypatch):
    machine = machine_with("systemd_user", tmp_path, monkeypatch)
    machine.apply(WORKER)
    assert all(line.startswith("systemctl --user ") for line in machine.lines("calls"))
    monkeypatch.setattr(installation, "is_lingering", lambda user: False)
    assert [line.split(" of ")[0] for line in installation.manager_problems(machine.manager.paths)] == ["services"]
    monkeypatch.setattr(installation, "is_lingering", lambda user: True)
    assert installation.manager_problems(machine.manager.paths) == []


def test_the_bus_of_a_user_is_found_after_a_login_without_one(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(commands.os.path, "exists", lambda path: path.endswith("/bus"))
    commands.set_runtime_directory()
    assert commands.os.environ["XDG_RUNTIME_DIR"].startswith("/run/user/")


@pytest.mark.parametrize("file, reason", [("stuck", "it did not stop"), ("forbidden", "Operation not permitted")])
def test_launchd_that_does_not_stop(tmp_path, monkeypatch, file, reason):
    machine = machine_with("launchd", tmp_path, monkeypatch)
    machine.apply(WORKER)
    (machine.folder / file).touch()
    monkeypatch.setattr(services, "COMMAND_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(Refusal, match=f"launchctl bootout .*{WORKER}.* failed: {reason}"):
        machine.apply(stop=[WORKER])


def test_supervisor_that_does_not_run(tmp_path, monkeypatch):
    machine = machine_with("supervisor", tmp_path, monkeypatch)
    machine.apply(WORKER)
    monkeypatch.setattr(installation, "runs_supervisor", lambda prefix: False)
    assert installation.manager_problems(machine.manager.paths) == ["supervisor is not running"]
    assert machine.apply(WORKER, check=True) == {WORKER: (STOPPED, RUNNING)}
    with pytest.raises(Refusal, match=r"supervisor.* is not running: run site.yml"):
        machine.apply(start=[WORKER])
    assert machine.apply(stop=[WORKER]) == {}
    machine.apply(remove=[WORKER])
    assert not machine.manager.path(WORKER).exists()


def test_supervisor_whose_service_ended_meanwhile(tmp_path, monkeypatch):
    machine = machine_with("supervisor", tmp_path, monkeypatch)
    machine.apply(WORKER)
    (machine.folder / "ended").touch()
    machine.apply(stop=[WORKER])
    (machine.folder / "forbidden").touch()
    with pytest.raises(Refusal, match="no permission"):
        machine.apply(stop=[WORKER])


def test_the_module_shows_definitions_and_states(machine, call):
    read = machine.folder / "read"
    read.write_text("1")
    planned = typed_json.dump(service_plan(["x"], "127.0.0.1:1", name=WORKER, definition="text\n", reads=(str(read),)))
    for check in (True, False):
        assert start_records.read_json(machine.host["prefix"], names.START_DIGESTS_FILE) == {}
        result = call(check=check, host=machine.host, services=[planned])
        assert result["changed"]
        assert result["changes"] == [{"service": WORKER, "before": STOPPED, "after": RUNNING}]
        assert result["diff"] == {"before": f"{WORKER}: stopped\n", "after": f"{WORKER}: running\ntext\n"}
    recorded = start_records.read_json(machine.host["prefix"], names.START_DIGESTS_FILE)
    assert recorded == {WORKER: start_records.digest_of("text\n", [str(read)])}
    read.write_text("another")
    again = call(host=machine.host, services=[planned])
    assert (again["changed"], again["diff"]) == (False, {"before": "", "after": ""})
    assert start_records.read_json(machine.host["prefix"], names.START_DIGESTS_FILE) == recorded, "it was read again"
    stopped = call(host=machine.host, state="stopped", names=[WORKER])
    assert stopped["diff"]["after"] == f"{WORKER}: stopped\ntext\n"


def test_the_module_of_a_manager_that_is_not_known(tmp_path, call):
    folders = dict.fromkeys(("prefix", "cache", "units"), str(tmp_path))
    result = call(host={"service_manager": "runit", "scope": "system", **folders})
    assert result["failed"]
    assert result["msg"].startswith("service_manager is runit, which is unknown: use one of systemd, ")


def test_a_run_that_ended_between_stop_and_start_is_completed_by_the_next(machine, monkeypatch):
    machine.apply(WORKER, HEAD)
    machine.lines("events")
    with monkeypatch.context() as killed:
        killed.setattr(type(machine.manager), "start", lambda *_arguments: sys.exit("killed"))
        with pytest.raises(SystemExit):
            machine.apply(defined(WORKER, "another"), HEAD, restart=[HEAD])
    assert machine.lines("events") == [f"stop {HEAD}", f"stop {WORKER}"]
    assert machine.state(HEAD, WORKER) == [STOPPED, STOPPED]
    assert machine.apply(defined(WORKER, "another"), HEAD) == {HEAD: (STOPPED, RUNNING), WORKER: (STOPPED, RUNNING)}
    assert machine.lines("events") == [f"start {WORKER}", f"start {HEAD}"]
    assert (machine.folder / "ran" / WORKER).read_text() == "another"


def test_a_restart_enables_nothing_again_and_asks_nothing_twice(tmp_path, monkeypatch):
    """The cluster waits for every call of systemctl."""
    machine = machine_with("systemd", tmp_path, monkeypatch)
    machine.apply(WORKER)
    machine.lines("calls")
    machine.apply(defined(WORKER, "another"))
    calls = [line.split()[1] for line in machine.lines("calls")]
    assert calls == ["show", "stop", "daemon-reload", "start"]
