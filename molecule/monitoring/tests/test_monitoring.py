"""Prometheus scrapes the whole cluster, and each fault raises the alert that names it, and no other."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PLAN, connect

sys.path.append(str(Path(__file__).resolve().parents[2] / "failure" / "tests"))
import faults

pytestmark = pytest.mark.timeout(1800)

ALERT_SECONDS = 420
"""Seconds within which an alert must fire or clear."""


def query_prometheus(path, **parameters):
    """Return the data of Prometheus's reply to a query on its own host."""
    words = [word for key, value in parameters.items() for word in ("--data-urlencode", f"{key}={value}")]
    url = f"http://127.0.0.1:9090/api/v1/{path}"
    return json.loads(connect("watcher").check_output(shlex.join(["curl", "-fsS", "-G", url, *words])))["data"]


def firing_alerts():
    """Return alert, host and cause of each firing alert."""
    found = query_prometheus("query", query='ALERTS{alertstate="firing"}')["result"]
    return {tuple(alert["metric"].get(label, "") for label in ("alertname", "host", "cause")) for alert in found}


def wait_until(done, allowed=(), seconds=ALERT_SECONDS):
    """Wait until ``done`` is true of the alerts that fired meanwhile and the alerts that fire now. Return the latter. Only allowed alerts may fire."""
    deadline, seen = time.time() + seconds, set()
    while True:
        now = firing_alerts()
        seen |= now
        assert seen <= {*allowed}, f"unexpected alerts: {seen - {*allowed}}"
        if done(seen, now):
            return now
        assert time.time() < deadline, f"fired: {seen}; firing now: {now}"
        time.sleep(5)


def is_serving():
    return faults.launcher_state().get("state") == "serving"


def is_healthy(_seen, now):
    return not now and is_serving()


def test_every_host_is_a_target_and_every_rule_runs():
    found = query_prometheus("query", query='up{host!=""}')[
        "result"
    ]  # targets of the package's own settings have no host, and stay for minutes
    assert {target["metric"]["host"]: target["value"][1] for target in found} == dict.fromkeys(PLAN["hosts"], "1")
    began, health = time.time(), {"unknown"}
    while "unknown" in health and time.time() < began + ALERT_SECONDS:  # until each rule has been evaluated once
        time.sleep(5)
        health = {rule["health"] for group in query_prometheus("rules")["groups"] for rule in group["rules"]}
    assert health == {"ok"}
    states = query_prometheus("query", query="llamacpp_cluster_state == 1")["result"]
    assert [found["metric"]["state"] for found in states] == ["serving"]


def test_promtool_accepts_the_metrics():
    (node,) = faults.HOSTS["mo1"]["test_addresses"]
    checked = connect("watcher").run(
        f"curl -fsS http://{node}:9100/metrics | grep llamacpp_cluster | promtool check metrics"
    )
    assert (checked.rc, checked.stderr) == (0, "")


def test_a_healthy_cluster_raises_nothing():
    wait_until(is_healthy, firing_alerts())
    began = time.time()
    wait_until(lambda _seen, _now: time.time() > began + 60)


def podman(*words):
    subprocess.run(["podman", *words], check=True, capture_output=True)


def host_off(name):
    podman("stop", "--time", "10", faults.container(name))
    return lambda: podman("start", faults.container(name))


def power_lost(name):
    podman("kill", faults.container(name))
    podman("start", faults.container(name))


def restart_alert(host, cause):
    return ("LlamaRestarted", host, cause)


WORKER_LOST, UNREACHED = "LlamaWorkerLost", "LlamaHostUnreached"
FAULTS = [
    (faults.head_killed, "mo-head", {restart_alert("mo-head", "ended")}),
    (faults.worker_killed, "mo1", {restart_alert("mo1", "ended")}),
    (faults.head_hung, "mo-head", {restart_alert("mo-head", "stopped")}),
    (faults.worker_hung, "mo2", {restart_alert("mo2", "hung")}),
    (faults.launcher_killed, "mo-head", {restart_alert("mo-head", "killed")}),
    (faults.worker_cut_off, "mo2", {(WORKER_LOST, "mo2", "")}),
    (host_off, "mo1", {(UNREACHED, "mo1", "")}),
    (faults.worker_address_changed, "mo2", {(UNREACHED, "mo2", "")}),
    (faults.head_out_of_memory, "mo-head", {restart_alert("mo-head", "killed")}),
    (power_lost, "mo1", {restart_alert("mo1", "killed")}),
    (faults.worker_rebooted, "mo2", set()),
    (faults.all_rebooted, "mo-head", set()),
    (faults.disk_full, "mo-head", {restart_alert("mo-head", "ended")}),
]
"""Faults, their hosts, and the alerts that name them. A host that reboots on command within a minute raises no alert."""
EARLIER_ALERTS = set()


@pytest.mark.parametrize("fault, name, alerts", FAULTS, ids=[fault.__name__ for fault, *_more in FAULTS])
def test_a_fault_raises_the_alert_that_names_it(fault, name, alerts):
    """An earlier fault's alert may still fire, unless it is the same alert."""
    before = wait_until(lambda _seen, now: not alerts & now and is_serving(), EARLIER_ALERTS)
    allowed, began = {*before, *alerts}, time.time()
    heal = fault(name)
    try:
        wait_until(lambda seen, _now: alerts <= seen and (alerts or time.time() > began + 75), allowed)
        sent = json.loads(connect("watcher").check_output("curl -fsS http://127.0.0.1:9093/api/v2/alerts"))
        assert {alert["labels"]["alertname"] for alert in sent} >= {
            alert for alert, *_labels in alerts & firing_alerts()
        }
    finally:
        EARLIER_ALERTS.update(allowed)
        if heal:
            heal()
    wait_until(lambda _seen, _now: is_serving(), allowed)


def test_alerts_clear_after_the_recovery():
    faults.remove_small_disk()
    wait_until(is_healthy, EARLIER_ALERTS)
