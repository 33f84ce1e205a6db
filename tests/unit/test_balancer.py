"""HAProxy in front of replicas: its configuration, and the module that drains its servers, on a real HAProxy where there is one."""

import os
import shutil
import socket
import subprocess
import time
from threading import Event, Thread
from unittest import mock
from urllib.request import urlopen

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.llamacpp.cluster.plugins.modules import balancer as module
from conftest import ROOT
from model_server import Server

MODULE = module
TEMPLATE = ROOT / "roles/llama_balancer/templates/haproxy.cfg.j2"
HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/bin")
ROWS = "# pxname,svname,status,scur,qcur\n"
needs_haproxy = pytest.mark.skipif(not HAPROXY, reason="there is no haproxy")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def configuration(servers, **variables):
    """Text of the configuration for replicas: name → port."""
    certificate = variables.pop("certificate", None)
    plans = {
        name: {"url": f"http://127.0.0.1:{port}", "tls_certificate_file": certificate} for name, port in servers.items()
    }
    known = {
        "__llama_balancer_heads": [*servers],
        "hostvars": {name: {"__llama_plan_result": {"plan": {"head": head}}} for name, head in plans.items()},
        **variables,
    }
    return Templar(DataLoader(), known).template(trust_as_template(TEMPLATE.read_text()))


@pytest.fixture
def balancer(tmp_path):
    """URL of a HAProxy with two replicas, its socket, and the replicas."""
    replicas = {name: Server() for name in ("a", "b")}
    for name, server in replicas.items():
        server.files.update({"/health": b"ok", "/": name.encode()})
    port, path = free_port(), str(tmp_path / "admin.sock")
    text = configuration(
        {name: server.server.server_port for name, server in replicas.items()},
        llama_balancer_host="127.0.0.1",
        llama_balancer_port=port,
        llama_balancer_metrics_port=free_port(),
    )
    lines = [line for line in text.splitlines() if line.split()[:1] not in (["user"], ["group"])]
    written = tmp_path / "haproxy.cfg"
    written.write_text("\n".join(lines).replace("/run/llamacpp-balancer/admin.sock", path) + "\n")
    process = subprocess.Popen([HAPROXY, "-db", "-f", written])
    while not os.path.exists(path):
        assert process.poll() is None
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}", path, replicas
    process.kill()
    process.wait()
    for server in replicas.values():
        server.stop()


@pytest.mark.programs
@needs_haproxy
@pytest.mark.timeout(120)
def test_a_replica_is_drained_while_a_request_runs_and_gets_requests_again(balancer, call):
    url, path, replicas = balancer
    names = [urlopen(url).read().decode() for _number in range(4)]
    assert len({*names}) == 1, "a client stays on its server"
    own, other = names[0], next(name for name in replicas if name != names[0])
    released = Event()
    replicas[own].faults["/"] = lambda handler: (released.wait(60), replicas[own].send(handler, own.encode()))
    read = []
    thread = Thread(target=lambda: read.append(urlopen(url).read().decode()))
    thread.start()
    while not call(socket=path, server=own)["request_count"]:
        time.sleep(0.05)
    failed = call(socket=path, server=own, state="drained", seconds=1)
    assert failed["msg"].startswith(
        f"{own} is busy (requests: 1) after 1 s: wait for its requests to finish, or stop their clients"
    )
    assert urlopen(url).read().decode() == other
    released.set()
    drained = call(socket=path, server=own, state="drained", seconds=60)
    thread.join()
    assert (drained["changed"], drained["request_count"], read) == (False, 0, [own])
    with mock.patch.object(module.AnsibleModule, "warn") as warn:
        call(socket=path, server=other, state="drained", seconds=60)
    assert warn.call_args.args[0].startswith(f"{other} is the only replica that is up")
    for name in replicas:
        assert call(check=True, socket=path, server=name, state="ready")["changed"]
        ready = call(socket=path, server=name, state="ready", seconds=60)
        assert (ready["changed"], ready["status"][:2]) == (True, "UP")
        assert not call(socket=path, server=name, state="ready", seconds=60)["changed"]


@pytest.mark.programs
@needs_haproxy
@pytest.mark.timeout(120)
def test_a_request_without_an_answer_goes_to_another_replica(balancer, call):
    url, path, replicas = balancer
    own = urlopen(url).read().decode()
    replicas[own].stop()
    assert urlopen(url).read().decode() != own
    while call(socket=path, server=own)["status"] != "DOWN":
        time.sleep(0.2)
    failed = call(socket=path, server=own, state="ready", seconds=1)
    assert f"{own} is DOWN" in failed["msg"]
    assert "llama_server_allowed" in failed["msg"]


def test_nothing_happens_without_a_balancer_or_its_server(tmp_path, call, monkeypatch):
    for state in ("drained", "ready", "read"):
        result = call(socket=str(tmp_path / "none"), server="a", state=state, seconds=60)
        assert (result["changed"], result["status"]) == (False, "")
    monkeypatch.setattr(module, "send_command", lambda _path, _command: ROWS + "replicas,b,UP,0,0\n")
    assert call(socket="x", server="a", state="drained")["status"] == ""
    row = f"{ROWS}replicas,a,UP,,\n"
    monkeypatch.setattr(module, "send_command", lambda _path, command: "Denied.\n" if "set" in command else row)
    failed = call(socket="x", server="a", state="drained")["msg"]
    remedy = "Run site.yml to write HAProxy's configuration again."
    assert failed == f"HAProxy did not change the state of a: Denied. {remedy}"


@pytest.mark.parametrize("answer", ["HTTP/1.1 400\nbad request\n", f"{ROWS}replicas,a,UP,x,\n", f"{ROWS}replicas,b\n"])
def test_a_socket_that_is_not_that_of_haproxy_and_an_answer_that_ends(answer, call, monkeypatch):
    monkeypatch.setattr(module, "send_command", lambda _path, _command: answer)
    failed = call(socket="x", server="a")["msg"]
    assert (
        failed
        == "x does not answer like HAProxy: set the module's socket option to HAProxy's admin socket, then run the playbook again"
    )


@needs_haproxy
def test_https_is_passed_through(tmp_path):
    text = configuration({"a": 1, "b@x": 2}, certificate="/etc/cert.pem", llama_balancer_allowed=["192.0.2.0/24"])
    assert "mode http" in text.split("frontend llamacpp")[0]
    assert "mode http" not in text.split("frontend llamacpp")[1]
    assert "check-ssl" in text
    assert "retry-on" not in text
    (tmp_path / "haproxy.cfg").write_text(text + "\n")
    subprocess.run([HAPROXY, "-q", "-c", "-f", tmp_path / "haproxy.cfg"], check=True)
    assert text.count("reject unless { src 127.0.0.0/8 192.0.2.0/24 }") == 2
