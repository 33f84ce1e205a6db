"""The running cluster on its hosts: services, ports from every side, and the answer."""

import json

import pytest
from conftest import PLAN, connect

SERVICES = [(name, service) for name, host in PLAN["hosts"].items() for service in host["services"]]
PORTS = [(name, rule["address"], rule["port"]) for name, host in PLAN["hosts"].items() for rule in host["firewall"]]
IPERF_PORT = 50051
"""Port on which iperf3 listens only while a link is measured."""
MAX_EXPOSURE = 16
"""Threshold of systemd-analyze security, in tenths. The system call pidfd_getfd costs 0.2 (docs/security.md)."""

PROBE_PROGRAM = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.5).close()
    print("open")
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("closed")
"""
LISTENER_PROGRAM = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
server.settimeout(30)
server.accept()
"""


def probe(name, address, port):
    return connect(name).check_output("python3 -c %s %s %s", PROBE_PROGRAM, address, str(port))


@pytest.mark.parametrize(
    "name, service", SERVICES, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_service_runs_at_boot_as_its_own_user(name, service):
    unit = connect(name).service(service["name"])
    assert unit.is_running
    assert unit.is_enabled
    process = connect(name).check_output("systemctl show --property=MainPID --value %s", service["name"])
    assert connect(name).check_output("ps -o user= -p %s", process).strip() == "llamacpp"


@pytest.mark.parametrize(
    "name, service", SERVICES, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_service_is_sandboxed(name, service):
    analysis = connect(name).run(
        "systemd-analyze security --no-pager --threshold=%s %s", str(MAX_EXPOSURE), service["name"] + ".service"
    )
    assert analysis.rc == 0, analysis.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", list(PLAN["hosts"]))
def test_processes_match_the_plan(name):
    running = connect(name).check_output("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    for service in PLAN["hosts"][name]["services"]:
        assert "\n".join(service["process"]) in running


@pytest.mark.parametrize("name", list(PLAN["hosts"]))
def test_no_service_listens_on_all_addresses(name):
    listening = connect(name).check_output("ss -Hltn").split("\n")
    ports = {f":{rule['port']}" for rule in PLAN["hosts"][name]["firewall"]} | {f":{PLAN['head']['port']}"}
    for line in listening:
        local = line.split()[3]
        if any(local.endswith(port) for port in ports):
            assert not local.startswith(("0.0.0.0", "*", "[::]")), line


@pytest.mark.parametrize("name, address, port", PORTS)
def test_port_is_open_to_the_head_only(name, address, port):
    """Start a listener on an unused port, so that only the firewall can close it."""
    firewall = PLAN["hosts"][name]["firewall_manager"]
    if port == IPERF_PORT:
        connect(name).run_test(
            "setsid -f timeout 30 python3 -c %s %s %s >/dev/null 2>&1", LISTENER_PROGRAM, address, str(port)
        )
    others = [other for other in ("outsider", *PLAN["hosts"]) if other not in (name, PLAN["head"]["host"])]
    if port != IPERF_PORT or firewall:
        assert {other: probe(other, address, port) for other in others} == dict.fromkeys(others, "closed")
    if port == IPERF_PORT:
        assert probe(PLAN["head"]["host"], address, port) == "open"


def test_the_answer():
    body = json.dumps({"prompt": "", "temperature": 0})
    reply = json.loads(
        connect(PLAN["head"]["host"]).check_output("curl -s %s/v1/completions -d %s", PLAN["head"]["url"], body)
    )
    assert reply["choices"][0]["text"].strip().startswith("every layer of this model lives on some worker")
    assert reply["choices"][0]["text"].strip().endswith("all of them computed it right")
