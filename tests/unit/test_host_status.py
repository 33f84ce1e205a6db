"""What host_status reads on a host: files of others, and what llama-server says."""

import json
import os
import socket
import time

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift, ServiceState
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan, ServedModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import host_status, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import server_client
from conftest import typed
from support import llama_server
from test_status import TOLD, VERIFIED

server = llama_server.server


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An installation in a folder, of supervisor, whose state nobody has to ask."""
    for folder in ("prefix/state", "units", "cache"):
        (tmp_path / folder).mkdir(parents=True)
    folders = (str(tmp_path / name) for name in ("prefix", "cache", "units"))
    found = installation.InstallationPaths("user", "supervisor", *folders)
    monkeypatch.setattr(installation, "detect_paths", lambda scope: found)
    return found


def head_of(port, **others):
    known = {"own_url": f"http://127.0.0.1:{port}", "tls_certificate_file": None, "api_key_file": None, "argv": ["x"]}
    return HeadPlan(**{**dict.fromkeys(HeadPlan._fields), **known, **others})


def read(place, head=None):
    found = json.loads(json.dumps(typed_json.dump(host_status.examine_host("user", None, head)[1])))
    assert typed_json.parse(types.Condition, found)
    return found


def test_defined_services_without_a_plan(place):
    path = f"{place.units}/llamacpp-worker-cpu.conf"
    with open(path, "w") as file:
        file.write(f"; {names.DEFINITION_MARK}\n")
    assert read(place)["service_states"] == {"llamacpp-worker-cpu": "stopped"}


def leave(place, **files):
    for name, content in files.items():
        folder = place.prefix if name == "verified" else f"{place.prefix}/state"
        with open(f"{folder}/{name}.json", "w") as file:
            file.write(content if isinstance(content, str) else json.dumps({"schema": 1, **content}))
        os.utime(file.name, (time.time() - VERIFIED["age_s"],) * 2)


def test_what_the_launcher_and_verify_left(place):
    leave(place, serving={**TOLD, "process": os.getpid()}, verified=VERIFIED, ends={"number": 2, "how": "x", "log": []})
    head = read(place)["head"]
    assert (head["serving"]["restarts"], head["current"], head["health"]) == (3, True, None)
    assert (head["verified"], head["ends"]["total"]) == (VERIFIED, 2)
    leave(place, serving={**TOLD, "process": 1 << 40})
    assert not read(place)["head"]["current"]


@pytest.mark.parametrize("odd", ["{", "x" * 2_000_000, {**TOLD, "state": "dancing"}, {**TOLD, "without": ["\x1b[2J"]}])
def test_a_file_of_the_launcher_may_hold_anything(place, odd):
    leave(place, serving=odd, verified=odd)
    assert read(place)["head"] is None


def test_no_link_is_followed(place, tmp_path):
    leave(place, verified=VERIFIED)
    os.rename(f"{place.prefix}/verified.json", tmp_path / "elsewhere.json")
    os.symlink(tmp_path / "elsewhere.json", f"{place.prefix}/verified.json")
    assert read(place)["head"] is None


def test_llama_server_is_asked_for_its_health_alone(place, server):
    found = read(place, head_of(server.server_port))["head"]
    assert (found["health"], server.looked) == ({"healthy": True, "detail": "ok"}, ["/health"])
    server.health = 503
    assert read(place, head_of(server.server_port))["head"]["health"]["detail"] == server_client.LOADING


def test_a_router_is_asked_for_its_models(place, server):
    listed = [
        {"id": "one", "status": {"value": "sleeping"}},
        {"id": "two", "status": {"value": "unloaded", "failed": True, "exit_code": 134}},
        {"id": "three", "status": {"value": "downloading"}},
    ]
    own = dict.fromkeys(ServedModel._fields)
    head = head_of(server.server_port, models=(ServedModel(**{**own, "name": "one"}),))
    server.texts["/models"] = json.dumps({"data": listed})
    states = [tuple(model.values()) for model in read(place, head)["head"]["models"]]
    assert states == [("one", "asleep"), ("two", "failed"), ("three", "unloaded")]
    for odd in ("", "[]", '{"data": [{"id": "one"}]}', '{"data": {"id": 1}}'):
        server.texts["/models"] = odd
        assert read(place, head)["head"]["models"] == []


def test_a_key_or_a_certificate_that_cannot_be_read_hides_nothing_else(place, server, tmp_path):
    port = server.server_port
    leave(place, verified=VERIFIED)
    found = read(place, head_of(port, api_key_file=str(tmp_path / "none")))["head"]
    assert (found["health"]["healthy"], found["verified"]) == (True, VERIFIED)
    found = read(place, head_of(port, tls_certificate_file=str(tmp_path / "none")))["head"]
    assert "llama_server_tls_certificate_file" in found["health"]["detail"]


def test_a_server_that_is_silent_is_not_waited_for(place, monkeypatch):
    monkeypatch.setattr(host_status, "ASK_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = read(place, head_of(silent.getsockname()[1]))["head"]
    assert found["health"] == {"healthy": False, "detail": "no complete answer within 0.1 s"}


def test_no_worker_is_connected_to(pair, place, monkeypatch):
    """Not even as the comparison with the plan does, to see that ports are closed."""
    planned = typed(pair.plan()).hosts["worker1"]
    assert planned.port_probes
    compared = []
    found = Drift({"a": ServiceState("running", os.getpid(), (), ())}, *[()] * 10)
    monkeypatch.setattr(host_status.state, "compare_host", lambda part: compared.append(part) or found)
    _drift, condition = host_status.examine_host("system", planned._replace(**place._asdict()), None)
    assert compared[0].port_probes == ()
    assert 0 <= condition.uptimes_s["a"] < 100_000


@pytest.mark.parametrize("key", ["scope", "service_manager", "prefix", "cache", "units"])
def test_facts_that_the_head_keeps_do_not_choose_where_programs_are_run(pair, place, monkeypatch, key):
    """Of supervisor, a program below the prefix is run as root, and the folder might be anybody's."""
    planned = typed(pair.plan()).hosts["worker1"]._replace(**{**place._asdict(), key: "/tmp/evil"})
    monkeypatch.setattr(host_status.state, "compare_host", lambda part: pytest.fail(f"examined {part}"))
    with pytest.raises(Refusal, match=f"^{key} is '/tmp/evil' in the facts cached on the head"):
        host_status.examine_host("system", planned, None)


def test_restarts_are_counted_by_systemd(monkeypatch, tmp_path):
    manager = services.manager_of(installation.InstallationPaths("system", "systemd", "/x", "/c", str(tmp_path)))
    monkeypatch.setattr(commands, "find", lambda _name: "/bin/systemctl")
    shown = "Id=llamacpp-worker-a.service\nNRestarts=3\n\nId=llamacpp-worker-b.service\nNRestarts=[not set]\n"
    monkeypatch.setattr(commands, "run", lambda *_argv, **_options: shown)
    assert manager.restart_counts([f"llamacpp-worker-{name}" for name in "abc"]) == {"llamacpp-worker-a": 3}

    def fail(*_argv, **_options):
        raise commands.CommandError(["systemctl"], "no bus", 1)

    monkeypatch.setattr(commands, "run", fail)
    assert manager.restart_counts(["llamacpp-worker-a"]) == {}
