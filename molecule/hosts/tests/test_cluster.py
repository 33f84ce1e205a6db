"""The cluster as it stands on its hosts: services, ports from every side, and the answer."""

import json

import pytest
from conftest import PLAN, on

SERVICES = [(name, service) for name, host in PLAN["hosts"].items() for service in host["services"]]
PORTS = [(name, rule["address"], rule["port"]) for name, host in PLAN["hosts"].items() for rule in host["firewall"]]
MEASURING_PORT = 50051
"""On which nothing listens but while a link is measured."""
WORST_EXPOSURE = 16
"""As systemd-analyze security --threshold takes it: 1.6. 0.2 of it is pidfd_getfd, see docs/security.md."""

PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.5).close()
    print("open")
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("closed")
"""
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
server.settimeout(30)
server.accept()
"""


def probe(name, address, port):
    return on(name).check_output("python3 -c %s %s %s", PROBE, address, str(port))


@pytest.mark.parametrize(
    "name, service", SERVICES, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_service_runs_at_boot_as_its_own_user(name, service):
    unit = on(name).service(service["name"])
    assert unit.is_running
    assert unit.is_enabled
    process = on(name).check_output("systemctl show --property=MainPID --value %s", service["name"])
    assert on(name).check_output("ps -o user= -p %s", process).strip() == "llamacpp"


@pytest.mark.parametrize(
    "name, service", SERVICES, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_service_is_locked_in(name, service):
    judged = on(name).run(
        "systemd-analyze security --no-pager --threshold=%s %s", str(WORST_EXPOSURE), service["name"] + ".service"
    )
    assert judged.rc == 0, judged.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", list(PLAN["hosts"]))
def test_processes_are_those_of_the_plan(name):
    running = on(name).check_output("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    for service in PLAN["hosts"][name]["services"]:
        assert "\n".join(service["process"]) in running


@pytest.mark.parametrize("name", list(PLAN["hosts"]))
def test_nothing_of_ours_listens_everywhere(name):
    listening = on(name).check_output("ss -Hltn").split("\n")
    ports = {f":{rule['port']}" for rule in PLAN["hosts"][name]["firewall"]} | {f":{PLAN['head']['port']}"}
    for line in listening:
        local = line.split()[3]
        if any(local.endswith(port) for port in ports):
            assert not local.startswith(("0.0.0.0", "*", "[::]")), line


@pytest.mark.parametrize("name, address, port", PORTS)
def test_port_is_open_to_the_head_alone(name, address, port):
    """Where nothing listens, something has to, so that it is the firewall that closes the port."""
    firewalled = PLAN["hosts"][name]["firewall_manager"]
    if port == MEASURING_PORT:
        on(name).run_test("setsid -f timeout 30 python3 -c %s %s %s >/dev/null 2>&1", LISTEN, address, str(port))
    others = [other for other in ("outsider", *PLAN["hosts"]) if other not in (name, PLAN["head"]["host"])]
    if port != MEASURING_PORT or firewalled:
        assert {other: probe(other, address, port) for other in others} == dict.fromkeys(others, "closed")
    if port == MEASURING_PORT:
        assert probe(PLAN["head"]["host"], address, port) == "open"


def test_the_answer():
    body = json.dumps({"prompt": "", "temperature": 0})
    said = json.loads(
        on(PLAN["head"]["host"]).check_output("curl -s %s/v1/completions -d %s", PLAN["head"]["url"], body)
    )
    assert said["choices"][0]["text"].strip().startswith("every layer of this model lives on some worker")
    assert said["choices"][0]["text"].strip().endswith("all of them computed it right")
