"""How a host differs from its plan: real processes, and an installation in which one thing after the other is not as planned."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import faults
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.differences import KINDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.modules import host_info
from model_server import download_record_of

MODULE = host_info


@pytest.fixture
def installation(tmp_path):
    """A prefix with a program that listens on the port that it is given."""
    program = tmp_path / "bin" / "listener"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport socket, sys, time\ns = socket.create_server(('127.0.0.1', int(sys.argv[1])))\nprint(1, flush=True)\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    started = []

    def start(port, **environment):
        process = subprocess.Popen(
            [sys.executable, str(program), str(port)], stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        process.stdout.readline()
        started.append(process)
        return process

    yield tmp_path, program, start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def service(program, port, **environment):
    argv = [sys.executable, str(program), str(port)]
    return {
        "name": "llamacpp-worker-x",
        "kind": "worker",
        "argv": argv,
        "process": argv,
        "environment": environment,
        "listens": f"127.0.0.1:{port}",
        "reads": [],
    }


def judged(prefix, planned):
    return state.service_state(planned, state.processes(str(prefix), None), prefix / "state", state.sockets())


def test_a_service_that_runs_as_planned(installation):
    prefix, program, start = installation
    port = free_port()
    process = start(port, LLAMA_X="1")
    assert judged(prefix, service(program, port, LLAMA_X="1")) == {
        "state": "running",
        "pid": process.pid,
        "addresses": ["127.0.0.1"],
        "clients": [],
    }


def test_a_service_with_another_environment_is_different(installation):
    prefix, program, start = installation
    port = free_port()
    start(port, LLAMA_X="1")
    assert judged(prefix, service(program, port, LLAMA_X="2"))["state"] == "different"


def test_a_service_with_another_command_line_on_the_port_is_different(installation):
    prefix, program, start = installation
    port = free_port()
    start(port)
    planned = service(program, port)
    planned["argv"] = planned["process"] = [*planned["argv"], "-c"]
    assert judged(prefix, planned)["state"] == "different"


def test_a_head_without_its_launcher_is_different(installation):
    prefix, program, start = installation
    port = free_port()
    start(port)
    planned = service(program, port)
    planned["argv"] = ["/usr/bin/python3", f"{prefix}/runtime.py", "--", *planned["process"]]
    assert judged(prefix, planned)["state"] == "different"


def test_a_launcher_that_waits_for_its_workers(installation):
    prefix, program, start = installation
    launcher = start(free_port())
    planned = service(program, free_port())
    planned["argv"] = list(launcher.args)
    assert judged(prefix, planned) == {"state": "waiting", "pid": launcher.pid, "addresses": [], "clients": []}


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="a process namespace needs root and the program unshare"
)
def test_a_process_of_a_container_is_not_ours(installation):
    prefix, program, start = installation
    port = free_port()
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, str(program), str(port)], stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        assert judged(prefix, service(program, port))["state"] == "foreign"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    start(port)
    assert judged(prefix, service(program, port))["state"] == "running"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another account")


def begun(process):
    """The process, once it has a command line: Popen returns a little earlier."""
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    return process


@pytest.fixture
def disguised(tmp_path):
    """Starts a shell that gives out to be another program, and waits."""
    script = tmp_path / "bin" / "script"
    script.parent.mkdir(exist_ok=True)
    script.write_text("read line\n")
    tmp_path.chmod(0o755)
    started = []

    def start(**options):
        argv = [sys.executable, str(script), "1"]
        started.append(begun(subprocess.Popen(argv, executable="/bin/sh", stdin=subprocess.PIPE, **options)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()


def test_a_process_that_only_says_that_it_is_ours(tmp_path, disguised):
    process = disguised()
    written = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[:-1]
    assert written == [sys.executable, f"{tmp_path}/bin/script", "1"]
    assert state.processes(str(tmp_path), None) == {}
    planned = {**service(tmp_path / "bin" / "script", 1), "argv": written, "process": written}
    assert judged(tmp_path, {**planned, "listens": f"127.0.0.1:{free_port()}"})["state"] == "stopped"


@needs_root
def test_a_process_of_another_account_is_not_ours(installation, monkeypatch):
    prefix, _program, start = installation
    process = start(free_port())
    assert list(state.processes(str(prefix), "root")) == [process.pid]
    assert state.processes(str(prefix), "nobody") == {}
    assert state.processes(str(prefix), "no-such") == {}
    monkeypatch.setattr(state.os, "readlink", mock.Mock(side_effect=PermissionError))
    assert list(state.processes(str(prefix), "root")) == [process.pid]
    monkeypatch.setattr(state.os, "readlink", mock.Mock(side_effect=FileNotFoundError))
    assert state.processes(str(prefix), "root") == {}


def test_a_program_that_was_replaced_while_it_runs_is_ours(tmp_path):
    program = tmp_path / "program"
    shutil.copy("/bin/sleep", program)
    process = begun(subprocess.Popen([str(program), "60"]))
    program.unlink()
    running = state.processes(str(tmp_path), None)
    process.kill()
    process.wait()
    assert running == {process.pid: [str(program), "60"]}


def test_nothing_but_its_account_is_asked_of_a_process_of_others(installation, monkeypatch):
    """Its command line may be on a file system of its own, which never answers."""
    read, asked = Path.read_bytes, []

    def noted(path):
        asked.append(str(path))
        return read(path)

    stranger = subprocess.Popen(["sleep", "50"], user="nobody")
    try:
        monkeypatch.setattr(Path, "read_bytes", noted)
        state.processes("/p", "root")
    finally:
        stranger.kill()
        stranger.wait()
    assert f"/proc/{os.getpid()}/cmdline" in asked
    assert f"/proc/{stranger.pid}/cmdline" not in asked


def test_macos_says_the_account_of_a_process(monkeypatch):
    monkeypatch.setattr(state.sys, "platform", "darwin")
    lines = (
        f"  10 {os.geteuid()} /p/bin/rpc-server -p 1\n  11 12345 /p/bin/rpc-server -p 1\n  12 {os.geteuid()} /bin/sh\n"
    )
    monkeypatch.setattr(state, "output", lambda argv: lines)
    assert state.processes("/p", None) == {10: ["/p/bin/rpc-server", "-p", "1"]}


def test_who_listens_on_a_port():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("0.0.0.0", 0)) as everywhere:
        for port in (listener.getsockname()[1], everywhere.getsockname()[1]):
            assert state.stranger_at("127.0.0.1", port, [os.getpid()], None) is None
            for running in ([], [os.getppid()]):
                said = state.stranger_at("127.0.0.1", port, running, None)
                assert said.startswith(f"127.0.0.1:{port} is held by another program of account ")
        assert "nothing on this host" in state.stranger_at("192.0.2.1", listener.getsockname()[1], [os.getpid()], None)
    assert "nothing on this host listens" in state.stranger_at("127.0.0.1", port, [os.getpid()], None)


@needs_root
def test_an_account_decides_where_file_descriptors_may_not_be_read(monkeypatch):
    os.seteuid(65534)
    try:
        listener = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    with listener, socket.create_server(("127.0.0.1", 0)) as own:
        monkeypatch.setattr(state, "_socket_inodes", lambda pids: {})
        assert "of account nobody" in state.stranger_at("127.0.0.1", listener.getsockname()[1], [os.getpid()], None)
        assert state.stranger_at("127.0.0.1", own.getsockname()[1], [os.getpid()], None) is None


def test_who_listens_on_a_port_of_macos(monkeypatch):
    monkeypatch.setattr(state.sys, "platform", "darwin")
    lines = [f"p10\nu{os.geteuid()}\nf3\nn*:8080", "p11\nu12345\nf3\nn192.0.2.1:8080"]
    monkeypatch.setattr(state, "output", lambda argv: "\n".join(lines))
    assert state.stranger_at("127.0.0.1", 8080, [10], None) is None
    assert "another program" in state.stranger_at("127.0.0.1", 8080, [9], None)
    assert "of account 12345" in state.stranger_at("192.0.2.1", 8080, [10], None)


def test_a_stopped_service(installation):
    prefix, program, _start = installation
    assert judged(prefix, service(program, free_port()))["state"] == "stopped"


def test_a_port_that_something_else_has(installation):
    prefix, program, _start = installation
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert judged(prefix, service(program, other.getsockname()[1]))["state"] == "foreign"


@pytest.mark.parametrize(
    "kind, temporary, variable",
    [
        ("worker", False, "port in llama_worker_endpoints"),
        ("worker", True, "staging_port in llama_worker_endpoints"),
        ("head", False, "llama_server_port"),
        ("head", True, "llama_server_staging_port"),
    ],
)
def test_a_port_that_something_else_has_is_told_with_its_variable(kind, temporary, variable):
    one = {"name": "llamacpp-worker-x", "kind": kind, "temporary": temporary, "listens": "127.0.0.1:1"}
    assert state.taken_ports({"services": [one]}, {"llamacpp-worker-x": {"state": "foreign"}}) == (
        f"Something else already uses 127.0.0.1:1, on which llamacpp-worker-x is to listen: stop it, or change {variable}."
    )
    assert state.taken_ports({"services": [one]}, {"llamacpp-worker-x": {"state": "stopped"}}) is None


def test_addresses_of_a_listener():
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert state.listening_addresses(everywhere.getsockname()[1], state.sockets()) == ["0.0.0.0"]


DEFINED = "; Written by llamacpp.cluster; a change made here is undone by the next run.\n"


@pytest.fixture
def planned(tmp_path):
    """An installation of a user that is as planned, apart from its process, which does not run."""
    units = tmp_path / "services"
    prefix = tmp_path / "prefix"
    release = prefix / "releases" / "here"
    units.mkdir()
    (release / "bin").mkdir(parents=True)
    (release / "bin" / "worker").write_text("program")
    digest = hashlib.sha256(b"program").hexdigest()
    (release / "manifest.json").write_text(json.dumps({"files": {"bin/worker": digest}}))
    (prefix / "model").write_text("model")
    (prefix / names.FOLDER_MARK).mkdir()
    (units / "llamacpp-worker-x.conf").write_text(DEFINED)
    prefix.chmod(0o755)
    return {
        "scope": "user",
        "account": None,
        "prefix": str(prefix),
        "cache": str(tmp_path / "cache"),
        "state": str(prefix / "state"),
        "units": str(units),
        "names": names.of("llama_cluster").as_dict(),
        "service_manager": "supervisor",
        "accounts": [],
        "folders": [{"path": str(prefix), "owner": None, "mode": "0755"}],
        "files": [{"path": f"{prefix}/model", "bytes": 5, "sha256": hashlib.sha256(b"model").hexdigest()}],
        "builds": [{"id": "here", "targets": ["worker"]}],
        "keep_releases": 2,
        "services": [{**service(prefix / "x", free_port()), "definition": DEFINED}],
        "firewall": [],
        "firewall_manager": None,
        "knocks": [],
        "links": [],
        "tuning": {"parameters": {}, "profile": "", "reboot": False},
    }


STOPPED = [
    {"kind": "manager", "subject": "supervisor", "text": "supervisor does not run"},
    {"kind": "service", "subject": "llamacpp-worker-x", "text": "llamacpp-worker-x is stopped"},
]


@pytest.mark.parametrize(
    "model, record, changed",
    [
        ("model", "model", False),
        ("other", "model", True),
        ("longer", "longer", True),
        (None, "model", True),
        ("model", None, True),
        ("model", "", True),
    ],
)
def test_a_file_that_is_made_when_it_is_applied_is_held_against_its_record(planned, model, record, changed):
    path = Path(planned["prefix"]) / "model"
    planned["files"] = [{"path": str(path), "bytes": 5, "record": f"{path}.1.sha256"}]
    path.unlink()
    if model is not None:
        path.write_text(model)
    if record is not None:
        digest = hashlib.sha256(record.encode()).hexdigest() if record else ""
        Path(f"{path}.1.sha256").write_text(digest + "\n")
    assert state.drift(planned)["changed_files"] == ([str(path)] if changed else [])


def test_only_what_does_not_run_differs(planned):
    found = state.drift(planned)
    assert found["differences"] == STOPPED
    assert {key: found[key] for key in ("stale", "missing_builds", "changed_files", "redefined")} == {
        "stale": [],
        "missing_builds": [],
        "changed_files": [],
        "redefined": [],
    }


def under_systemd(monkeypatch, host, firewall=False, links=False, tuned=""):
    """The host with systemd, and with a firewall, links or kernel parameters that differ."""
    host.update(service_manager="systemd", links=[{"interface": "eth1", "address": "192.0.2.1/24", "manage": True}])
    monkeypatch.setattr(state.firewalls, "differs", lambda manager, rules, system: firewall)
    monkeypatch.setattr(state.configuration, "differs", lambda _links, _system: links)
    monkeypatch.setattr(
        state.kernel_parameters, "apply", lambda *_arguments, check: kernel_parameters.Change("", tuned, (), ())
    )


def without_lingering(monkeypatch, host):
    host.update(service_manager="systemd_user")
    monkeypatch.setattr(state.os.path, "exists", lambda path: False)


def with_model(host, prefix, size=7, sha256="a" * 64, recorded="a" * 64, source="there"):
    """A model that is fetched: planned with this sha256, and recorded with another, or not at all."""
    path, record = prefix / "models" / "it" / "m.gguf", prefix / "models" / "it" / ".source.json"
    path.parent.mkdir(parents=True)
    path.write_text("a model"[:size])
    entry = {"bytes": 7, "sha256": recorded, "modified": int(path.stat().st_mtime)}
    if recorded:
        content = {
            key: value for key, value in download_record_of(path.parent, source="there").items() if key != "path"
        }
        record.write_text(json.dumps({**content, "checked": {str(path): entry}}))
    url = "https://models.example.org/m.gguf"
    file = {"name": "m.gguf", "path": str(path), "url": url, "bytes": 7, "sha256": sha256, "role": "model"}
    host["model"] = {"files": [file], "records": [download_record_of(path.parent, source=source)]}
    return str(path)


@pytest.mark.parametrize(
    "more, text",
    [
        ({}, None),
        ({"sha256": None}, None),
        ({"size": 3}, "of the model is missing or has other content"),
        ({"sha256": "b" * 64}, "of the model is missing or has other content"),
        ({"recorded": None}, "of the model has not been checked, or was changed since"),
        ({"recorded": None, "sha256": None}, "of the model has not been checked, or was changed since"),
        ({"source": "elsewhere"}, "does not say where the model comes from"),
    ],
)
def test_a_model_that_is_fetched_is_held_against_its_record(planned, more, text):
    path = with_model(planned, Path(planned["prefix"]), **more)
    found = state.drift(planned)
    assert [entry["text"].split(" ", 1)[1] for entry in found["differences"] if entry["kind"] == "model"] == (
        [text] if text else []
    )
    assert found["changed_models"] == ([path] if text and "missing" in text else [])


def test_a_model_that_was_touched_since_is_checked_again(planned):
    path = with_model(planned, Path(planned["prefix"]))
    os.utime(path, (1, 1))
    assert [entry["text"] for entry in state.drift(planned)["differences"] if entry["kind"] == "model"] == [
        f"{path} of the model has not been checked, or was changed since"
    ]


SPOILED = [
    ("account", "account no-such is missing", lambda h, p, m: h["accounts"].append({"name": "no-such", "groups": []})),
    (
        "account",
        "account nobody is not in video",
        lambda h, p, m: h["accounts"].append({"name": "nobody", "groups": ["video"]}),
    ),
    (
        "folder",
        "folder /no/such is missing",
        lambda h, p, m: h["folders"].append({"path": "/no/such", "owner": None, "mode": "0755"}),
    ),
    ("folder", "has mode 0700, planned 0755", lambda h, p, m: p.chmod(0o700)),
    ("folder", "planned nobody", lambda h, p, m: h["folders"][0].update(owner="nobody")),
    (
        "release",
        "release here is not installed",
        lambda h, p, m: (p / "releases/here/bin/worker").write_text("other"),
    ),
    ("release", "release gone is not installed", lambda h, p, m: h["builds"].append({"id": "gone", "targets": []})),
    ("file", "model is missing or has different content", lambda h, p, m: (p / "model").write_text("other")),
    ("file", "model is missing or has different content", lambda h, p, m: (p / "model").unlink()),
    ("model", "of the model is missing", lambda h, p, m: Path(with_model(h, p)).unlink()),
    (
        "definition",
        "llamacpp-worker-x is not defined as planned",
        lambda h, p, m: h["services"][0].update(definition="y"),
    ),
    ("boot", "llamacpp-worker-x is not started at boot", lambda h, p, m: under_systemd(m, h)),
    ("manager", "supervisor does not run", lambda h, p, m: None),
    ("manager", "end at logout", lambda h, p, m: without_lingering(m, h)),
    (
        "firewall",
        "rules of a firewall that is not active are not as planned",
        lambda h, p, m: under_systemd(m, h, firewall=True),
    ),
    ("link", "links are not as planned", lambda h, p, m: under_systemd(m, h, links=True)),
    (
        "tuning",
        "kernel parameters or the tuned profile are not as planned",
        lambda h, p, m: under_systemd(m, h, tuned="x=1"),
    ),
    ("service", "llamacpp-worker-x is stopped", lambda h, p, m: None),
    ("stale", "llamacpp-worker-x is not planned any more", lambda h, p, m: h["services"].clear()),
    ("record", "plan 0123456789abcdef is not recorded as", lambda h, p, m: h.update(id="0123456789abcdef")),
    ("unneeded", "release .left is no longer needed", lambda h, p, m: (p / "releases" / ".left").mkdir()),
]
"""Kind of a difference, a part of what it says, and what makes it: of the plan, the prefix and monkeypatch."""


@pytest.mark.parametrize("kind, said, spoil", SPOILED)
def test_each_difference_is_found(planned, tmp_path, monkeypatch, kind, said, spoil):
    spoil(planned, tmp_path / "prefix", monkeypatch)
    found = [difference for difference in state.drift(planned)["differences"] if said in difference["text"]]
    assert [difference["kind"] for difference in found] == [kind]
    assert all(difference["subject"] for difference in found)


def test_every_kind_of_difference_is_found():
    assert {kind for kind, _said, _spoil in SPOILED} == set(KINDS)


def test_a_link_that_must_not_be_touched_stops_before_anything_is_changed(planned, monkeypatch):
    planned.update(service_manager="systemd", links=[{"interface": "eth0", "address": "192.0.2.1/24", "manage": True}])
    monkeypatch.setattr(state.firewalls, "differs", lambda manager, rules, system: False)
    monkeypatch.setattr(state.configuration.problems, "problems", lambda *_arguments: ["eth0 carries the connection"])
    with pytest.raises(state.inspection.LinkError, match="carries the connection"):
        state.drift(planned)


def test_ports_that_the_plan_names_are_tried(planned, monkeypatch):
    monkeypatch.setattr(state.interfaces, "addresses", lambda: ["127.0.0.1", "127.0.0.9"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        planned["knocks"] = [endpoint]
        assert state.drift(planned)["knocks"] == [{"endpoint": endpoint, "source": "127.0.0.9", "open": True}]


def test_a_definition_that_is_newer_than_what_runs_by_it(planned, installation, monkeypatch):
    prefix, program, start = installation
    port = free_port()
    process = start(port)
    planned.update(prefix=str(prefix), folders=[], files=[], builds=[])
    planned["services"] = [{**service(program, port), "definition": DEFINED}]
    assert state.drift(planned)["redefined"] == []
    assert abs(state.started_at(process.pid) - time.time()) < 60
    assert state.started_at(None) is None
    long_ago(monkeypatch)
    assert state.drift(planned)["redefined"] == ["llamacpp-worker-x"]


def long_ago(monkeypatch):
    """Lets all processes have started a minute ago."""
    monkeypatch.setattr(state, "started_at", lambda pid: None if pid is None else time.time() - 60)


def test_a_definition_of_other_bytes_is_another(planned):
    state.managers.manager_of(planned).path("llamacpp-worker-x").write_bytes(b"\xff" + DEFINED.encode())
    assert state.drift(planned)["redefined"] == ["llamacpp-worker-x"]


@pytest.mark.parametrize(
    "replace",
    [
        lambda key, other: other.rename(key),
        lambda key, other: shutil.copy2(other, key),
        lambda key, other: (key.unlink(), key.symlink_to(other)),
        lambda key, other: key.unlink(),
        lambda key, other: (key.parent / names.READ).write_text("[]"),
    ],
)
def test_a_file_that_was_replaced_since_the_service_read_it(planned, installation, replace):
    """However old the other file is."""
    prefix, program, start = installation
    port = free_port()
    start(port)
    key, other = prefix / "key", prefix / "other"
    for path in (other, key):
        path.write_text("one")
        os.utime(path, (9, 9))
    planned.update(prefix=str(prefix), folders=[], files=[], builds=[])
    planned["services"] = [{**service(program, port), "definition": DEFINED, "reads": [str(key), "/not/there"]}]
    name, change = "llamacpp-worker-x", state.managers.Change("llamacpp-worker-x", "stopped", "running", "", "")
    state.managers.record_reads(str(prefix), {name: state.managers.versions([key, "/not/there"])}, [change])
    assert state.drift(planned)["redefined"] == []
    replace(key, other)
    assert state.drift(planned)["redefined"] == [name]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="when a process started is known on Linux alone")
def test_a_service_that_started_by_itself_has_read_what_was_there(tmp_path, monkeypatch):
    key, planned = tmp_path / "key", {"name": "x", "reads": [str(tmp_path / "key")]}
    key.write_text("one")
    started = state.managers.Change("x", "stopped", "running", "", "")
    state.managers.record_reads(str(tmp_path), {"x": state.managers.versions([key])}, [started])
    before, _written = time.time() - 60, key.write_text("another")
    assert not state.managers.has_read(str(tmp_path), planned, before), "the process of the run"
    assert not state.managers.has_read(str(tmp_path), planned, None)
    assert state.managers.has_read(str(tmp_path), planned, time.time() + 1)
    key.unlink()
    assert not state.managers.has_read(str(tmp_path), planned, time.time() + 1)
    monkeypatch.setattr(state.managers, "SMALL_BYTES", 1)
    key.write_text("model")
    state.managers.record_reads(str(tmp_path), {"x": state.managers.versions([key])}, [started])
    os.link(key, tmp_path / "backup")
    assert state.managers.has_read(str(tmp_path), planned, before)


def test_a_file_whose_time_is_ahead_of_the_clock_restarts_its_service_once(planned, installation, monkeypatch):
    prefix, program, start = installation
    port = free_port()
    start(port)
    definition = state.managers.manager_of(planned).path("llamacpp-worker-x")
    os.utime(definition, (time.time() + 86400, time.time() + 86400))
    planned.update(prefix=str(prefix), folders=[], files=[], builds=[])
    planned["services"] = [{**service(program, port), "definition": DEFINED}]
    started_at = state.started_at
    long_ago(monkeypatch)
    assert state.drift(planned)["redefined"] == ["llamacpp-worker-x"]
    monkeypatch.setattr(state, "started_at", started_at)
    assert state.drift(planned)["redefined"] == []


def test_a_clock_that_was_set_back_restarts_nothing(planned, installation, monkeypatch):
    prefix, program, start = installation
    port = free_port()
    start(port)
    planned.update(prefix=str(prefix), folders=[], files=[], builds=[])
    planned["services"] = [{**service(program, port), "definition": DEFINED}]
    started, now = state.started_at, time.time
    monkeypatch.setattr(state, "started_at", lambda pid: started(pid) - 3600)
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    assert state.drift(planned)["redefined"] == []


def test_a_unit_that_systemd_has_not_read(planned, monkeypatch):
    monkeypatch.setattr(state.managers.commands, "find", lambda program: program)
    monkeypatch.setattr(state.firewalls, "differs", lambda manager, rules, system: False)
    monkeypatch.setattr(
        state.managers.commands,
        "run",
        lambda argv, seconds, **_: (
            "Id=llamacpp-worker-x.service\nNeedDaemonReload=yes\n\nId=y.service\nNeedDaemonReload=no\n"
        ),
    )
    planned.update(service_manager="systemd", scope="system")
    state.managers.manager_of(planned).path("llamacpp-worker-x").write_text(DEFINED)
    assert state.drift(planned)["redefined"] == ["llamacpp-worker-x"]


def test_who_holds_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert state.clients(port, state.sockets()) == []
        with socket.create_connection(("127.0.0.1", port)):
            assert state.clients(port, state.sockets()) == ["127.0.0.1"]


@pytest.fixture
def releases(planned):
    """Adds releases to the installation, each older than the one before; returns what is told of them."""
    folder = state.Path(planned["prefix"]) / "releases"

    def add(*names):
        for age, name in enumerate(names, start=1):
            (folder / name / "bin").mkdir(parents=True)
            os.utime(folder / name, (1e9 - age, 1e9 - age))
        return lambda: state.unneeded_releases(planned)

    return add


def test_the_last_releases_are_kept(planned, releases):
    unneeded = releases("second", "third", "fourth")
    assert unneeded() == ["fourth", "third"]
    found = state.drift(planned)["differences"]
    assert [difference["subject"] for difference in found if difference["kind"] == "unneeded"] == unneeded()
    planned["keep_releases"] = 3
    assert unneeded() == ["fourth"]
    planned["keep_releases"] = 1
    assert unneeded() == ["fourth", "third", "second"]
    planned["keep_releases"] = 4
    assert unneeded() == []


def test_a_planned_release_counts_before_it_is_installed(planned, releases):
    unneeded = releases("second", "third")
    planned["builds"] = [{"id": "coming", "targets": []}]
    assert unneeded() == ["third", "second"]
    planned["builds"] = [{"id": "third", "targets": []}]
    assert unneeded() == ["second"]


def identity(name, backend):
    return f"{name}-{backend}-0123abcd"


def test_the_last_releases_of_each_backend_are_kept(planned, releases):
    """Two backends of which one changed three times, each time put to use after all that the other has."""
    planned["builds"] = [{"id": identity("b4", "hip"), "targets": []}, {"id": identity("b2", "vulkan"), "targets": []}]
    hip = [identity(name, "hip") for name in ("b4", "b3", "b2", "b1")]
    vulkan = [identity(name, "vulkan") for name in ("b2", "b1", "b0")]
    cpu = [identity(name, "cpu") for name in ("b1", "b0")]
    unneeded = releases(*hip, *vulkan, *cpu)
    assert unneeded() == [cpu[1], vulkan[2], hip[3], hip[2]]
    planned["keep_releases"] = 1
    assert unneeded() == [*cpu[::-1], *vulkan[:0:-1], *hip[:0:-1], "here"]
    planned["keep_releases"] = 4
    assert unneeded() == []


def test_what_is_held_counts_for_its_own_backend(planned, releases, tmp_path):
    held = identity("b1", "hip")
    unneeded = releases(identity("b4", "hip"), identity("b3", "hip"), held, identity("b1", "vulkan"))
    planned["builds"] = [{"id": identity("b4", "hip"), "targets": []}, {"id": identity("b2", "vulkan"), "targets": []}]
    (tmp_path / "services" / "mine.conf").write_text(f"command={planned['prefix']}/releases/{held}/bin/llama-bench")
    assert unneeded() == [identity("b3", "hip")]


def test_a_release_that_a_service_names_is_kept(planned, releases, tmp_path):
    unneeded = releases("second", "third", "fourth")
    (tmp_path / "services" / "mine.conf").write_text(f"command={planned['prefix']}/releases/fourth/bin/llama-bench")
    assert unneeded() == ["third", "second"]


def test_a_release_that_runs_is_kept(planned, releases, tmp_path):
    unneeded = releases("second", "third", "fourth")
    inside = state.Path(planned["prefix"]) / "releases" / "third" / "bin" / "listener"
    shutil.copy(shutil.which("sleep"), inside)
    by_path = subprocess.Popen([inside, "60"])
    inside = state.Path(planned["prefix"]) / "releases" / "fourth" / "bin"
    shutil.copy(shutil.which("sleep"), inside / "sleep")
    by_name = subprocess.Popen(["./sleep", "60"], cwd=inside)
    try:
        assert unneeded() == ["second"]
        (tmp_path / "linked").symlink_to(planned["prefix"])
        planned["prefix"] = str(tmp_path / "linked")
        assert unneeded() == ["second"]
    finally:
        for process in (by_path, by_name):
            process.kill()
            process.wait()
    assert unneeded() == ["fourth", "third"]


def test_what_an_interrupted_installation_left_goes(planned, releases):
    unneeded = releases(".left", ".here")
    assert unneeded() == [".left"]


def test_what_a_build_works_on_now_stays(planned, releases, tmp_path):
    unneeded = releases(".left", "damaged")
    planned["keep_releases"] = 1
    builds = tmp_path / "cache" / "builds"
    builds.mkdir(parents=True)
    with (builds / "left.lock").open("w") as first, (builds / "damaged.lock").open("w") as second:
        for lock in (first, second):
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert unneeded() == []
    assert unneeded() == [".left", "damaged"]


def test_a_host_without_releases(planned):
    planned["prefix"] += "/none"
    assert state.unneeded_releases(planned) == []


def test_the_releases_whose_programs_run():
    running = {
        1: ["/opt/llamacpp/releases/new/bin/rpc-server", "-p", "1"],
        2: ["/opt/llamacpp/releases/old/bin/llama-server", "/opt/llamacpp/releases/other/x"],
        3: ["/usr/bin/python3", "/opt/llamacpp/runtime/x/runtime.py"],
        4: ["/opt/llamacpp/releases/new/bin/llama-server"],
    }
    assert state.running_releases("/opt/llamacpp", running) == ["new", "old"]


def test_a_port_whose_owner_proc_hides_is_not_called_foreign(installation, monkeypatch, tmp_path):
    _prefix, program, _start = installation
    one = {**service(program, 50052), "kind": "worker", "temporary": False}
    foreign = {"llamacpp-worker-x": {"state": "foreign"}}
    assert not state.hides_processes()
    assert state.taken_ports({"services": [one]}, foreign).startswith("Something else already uses 127.0.0.1:50052")
    monkeypatch.setattr(state, "FIRST_PROCESS", str(tmp_path / "no" / "stat"))
    said = state.taken_ports({"services": [one]}, foreign)
    assert said.startswith(
        "A process already uses 127.0.0.1:50052, on which llamacpp-worker-x is to listen, and /proc (hidepid) hides"
    )
    assert "run with become" in said


@pytest.mark.parametrize("path", ["/proc", "/proc/net/tcp"])
def test_a_proc_that_cannot_be_read_ends_with_a_sentence(planned, monkeypatch, call, path):
    """Nothing is concluded from it: no service counts as stopped, and no release as unused."""

    def refuse(function):
        def refusing(self, *arguments, **named):
            if str(self) == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return function(self, *arguments, **named)

        return refusing

    for name in ("iterdir", "read_text"):
        monkeypatch.setattr(state.Path, name, refuse(getattr(Path, name)))
    said = call(plan=planned)
    assert (
        said["msg"]
        == f"{path}: Permission denied. Run as an account that may do it (become), or check owner and mode of the path."
    )


def test_host_info_writes_nothing_so_that_a_killed_one_leaves_nothing(tmp_path, monkeypatch, call):
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = [path for path in Path("/").iterdir() if path.name not in ("dev", "proc")]
    written = faults.Faults(monkeypatch, "killed", *folders)
    written.at = 1
    assert "facts" in call(scope="user")
    assert written.count == 0


ZERO = "0" * 64
EMPTY = hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize(
    "manifest",
    [
        *(
            json.dumps({"files": files})
            for files in (
                {},
                [],
                {"bin/other": ZERO},
                {"/dev/zero": ZERO},
                {"bin/../../../../../dev/zero": ZERO},
                {"bin/..": ZERO},
                {"bin/worker": 1},
                {"bin/worker": EMPTY, "bin/pipe": ZERO},
                {"bin/worker": EMPTY, "bin/zero": ZERO},
            )
        ),
        "[]",
        "1e999",
        "[" * 200000,
        "\x00",
    ],
)
def test_a_manifest_is_not_believed(planned, manifest):
    """Nothing outside the release is read, and nothing is waited for."""
    release = Path(planned["prefix"]) / "releases" / "here"
    os.mkfifo(release / "bin" / "pipe")
    (release / "bin" / "zero").symlink_to("/dev/zero")
    (release / "bin" / "worker").write_bytes(b"")
    assert state.drift(planned)["missing_builds"] == ["here"]
    (release / "manifest.json").write_text(manifest)
    assert state.drift(planned)["missing_builds"] == ["here"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_a_manifest_that_is_not_a_file(planned, make):
    path = Path(planned["prefix"]) / "releases" / "here" / "manifest.json"
    path.unlink()
    make(path)
    assert state.drift(planned)["missing_builds"] == ["here"]


def test_what_is_installed_is_reported_with_its_hashes(planned):
    assert state.drift(planned)["installed"] == {"here": {"bin/worker": hashlib.sha256(b"program").hexdigest()}}


def test_a_planned_group_that_is_gone_is_a_difference():
    (found,) = state._accounts([{"name": "root", "groups": ["no-such-group"]}])
    assert found.text == "account root is not in no-such-group"
