"""Prometheus sees the whole cluster, and what goes wrong there raises the alert that names it, and no other."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PLAN, on

sys.path.append(str(Path(__file__).resolve().parents[2] / "failure" / "tests"))
import faults

pytestmark = pytest.mark.timeout(1800)

LONGEST = 420
"""Seconds until an alert is raised, or ends."""


def asked(path, **parameters):
    """What Prometheus answers on its own host."""
    words = [word for key, value in parameters.items() for word in ("--data-urlencode", f"{key}={value}")]
    url = f"http://127.0.0.1:9090/api/v1/{path}"
    return json.loads(on("watcher").check_output(shlex.join(["curl", "-fsS", "-G", url, *words])))["data"]


def raised():
    """Alert, host and cause of each that is raised."""
    found = asked("query", query='ALERTS{alertstate="firing"}')["result"]
    return {tuple(alert["metric"].get(label, "") for label in ("alertname", "host", "cause")) for alert in found}


def until(done, allowed=(), seconds=LONGEST):
    """Waits until this is true of what was raised meanwhile and what is now, which it returns; no other alerts may be raised."""
    deadline, seen = time.time() + seconds, set()
    while True:
        now = raised()
        seen |= now
        assert seen <= {*allowed}, f"raised: {seen - {*allowed}}"
        if done(seen, now):
            return now
        assert time.time() < deadline, f"{seen} was raised, and {now} is now"
        time.sleep(5)


def serves():
    return faults.told().get("state") == "serving"


def quiet(_seen, now):
    return not now and serves()


def test_every_host_is_a_target_and_every_rule_runs():
    found = asked("query", query='up{host!=""}')[
        "result"
    ]  # what the package's own settings scraped has no host, and is shown for minutes
    assert {target["metric"]["host"]: target["value"][1] for target in found} == dict.fromkeys(PLAN["hosts"], "1")
    began, health = time.time(), {"unknown"}
    while "unknown" in health and time.time() < began + LONGEST:  # until each was evaluated once
        time.sleep(5)
        health = {rule["health"] for group in asked("rules")["groups"] for rule in group["rules"]}
    assert health == {"ok"}
    states = asked("query", query="llamacpp_cluster_state == 1")["result"]
    assert [found["metric"]["state"] for found in states] == ["serving"]


def test_metrics_are_as_prometheus_wants_them():
    (node,) = faults.HOSTS["mo1"]["test_addresses"]
    checked = on("watcher").run(
        f"curl -fsS http://{node}:9100/metrics | grep llamacpp_cluster | promtool check metrics"
    )
    assert (checked.rc, checked.stderr) == (0, "")


def test_a_healthy_cluster_raises_nothing():
    until(quiet, raised())
    began = time.time()
    until(lambda _seen, _now: time.time() > began + 60)


def podman(*words):
    subprocess.run(["podman", *words], check=True, capture_output=True)


def host_off(name):
    podman("stop", "--time", "10", faults.container(name))
    return lambda: podman("start", faults.container(name))


def power_lost(name):
    podman("kill", faults.container(name))
    podman("start", faults.container(name))


def restarted(host, cause):
    return ("LlamaRestarted", host, cause)


WORKER_LOST, UNREACHED = "LlamaWorkerLost", "LlamaHostUnreached"
FAULTS = [
    (faults.head_killed, "mo-head", {restarted("mo-head", "ended")}),
    (faults.worker_killed, "mo1", {restarted("mo1", "ended")}),
    (faults.head_hung, "mo-head", {restarted("mo-head", "stopped")}),
    (faults.worker_hung, "mo2", {restarted("mo2", "hung")}),
    (faults.launcher_killed, "mo-head", {restarted("mo-head", "killed")}),
    (faults.worker_cut_off, "mo2", {(WORKER_LOST, "mo2", "")}),
    (host_off, "mo1", {(UNREACHED, "mo1", "")}),
    (faults.worker_address_changed, "mo2", {(UNREACHED, "mo2", "")}),
    (faults.head_out_of_memory, "mo-head", {restarted("mo-head", "killed")}),
    (power_lost, "mo1", {restarted("mo1", "killed")}),
    (faults.worker_rebooted, "mo2", set()),
    (faults.all_rebooted, "mo-head", set()),
    (faults.disk_full, "mo-head", {restarted("mo-head", "ended")}),
]
"""With the alerts that name them. A host that was told to reboot, and is back within a minute, is nobody's fault."""
EARLIER = set()


@pytest.mark.parametrize("fault, name, alerts", FAULTS, ids=[fault.__name__ for fault, *_more in FAULTS])
def test_a_fault_raises_the_alert_that_names_it(fault, name, alerts):
    """The alert of a fault before may last meanwhile, but not the same one."""
    before = until(lambda _seen, now: not alerts & now and serves(), EARLIER)
    allowed, began = {*before, *alerts}, time.time()
    heal = fault(name)
    try:
        until(lambda seen, _now: alerts <= seen and (alerts or time.time() > began + 75), allowed)
        sent = json.loads(on("watcher").check_output("curl -fsS http://127.0.0.1:9093/api/v2/alerts"))
        assert {alert["labels"]["alertname"] for alert in sent} >= {alert for alert, *_labels in alerts & raised()}
    finally:
        EARLIER.update(allowed)
        if heal:
            heal()
    until(lambda _seen, _now: serves(), allowed)


def test_they_end_when_all_is_healed():
    faults.whole_disk()
    until(quiet, EARLIER)
