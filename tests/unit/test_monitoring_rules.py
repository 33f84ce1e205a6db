"""Alerts as Prometheus itself raises them: each fault raises the one that names it, and no other."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import metrics, serving
from conftest import ROOT

RULES = ROOT / "plugins/plugin_utils/monitoring/llamacpp.rules.yml"
PROMTOOL = shutil.which("promtool") or next(map(str, ROOT.glob(".venv/prometheus/usr/bin/promtool")), None)
needs_promtool = pytest.mark.skipif(  # .ci/run downloads promtool; in CI a skip fails
    not PROMTOOL, reason="promtool is not installed, so nobody tries the alerts (Debian: its package prometheus)"
)
pytestmark = [pytest.mark.programs, needs_promtool]
STEPS = 4 * 90
"""Of a quarter of a minute."""
SERVICES = {"head": "llamacpp-server", "w1": "llamacpp-worker-cpu", "w2": "llamacpp-worker-cpu"}


def steady(value):
    return f"{value}+0x{STEPS}"


def rising(per_second):
    return f"0+{per_second * 15}x{STEPS}"


def turns(before, after):
    """One value, and after 20 minutes another one."""
    return f"{before}+0x79 {after}+0x{STEPS - 80}"


def slows(before, after):
    """A counter that rises by so much in a second, and after 20 minutes by so much."""
    return f"0+{before * 15}x80 {before * 1200 + after * 15}+{after * 15}x{STEPS - 80}"


def states(now):
    return {f"head state {state}": int(state == now) for state in serving.STATES}


OWN = {"state": "state", "restarts_total": "cause", "service_info": "release"}
"""Metric → the label whose value is written after its name."""
LABELS = {metric.name: metric.labels for metric in metrics.METRICS}
HEALTHY = {
    **states("serving"),
    "head planned_generation_tokens_per_second": 12,
    "head planned_generation_lowest_tokens_per_second": 10,
    "head planned_generation_full_tokens_per_second": 9.6,
    "head planned_prompt_tokens_per_second": 120,
    "head planned_prompt_lowest_tokens_per_second": 100,
    "head planned_prompt_full_tokens_per_second": 96,
    "head verified_timestamp_seconds": -3600,
    "head verified_passed": 1,
    "head requests_processing": 1,
    # 11 tokens per second, in half of the time.
    "head generated_tokens_total": rising(5.5),
    "head generation_seconds_total": rising(0.5),
    # 110 tokens per second, in prompts of 660.
    "head prompt_tokens_total": rising(44),
    "head prompt_seconds_total": rising(0.4),
}
for _host in SERVICES:
    HEALTHY |= {
        f"{_host} up": 1,
        f"{_host} service_info": 1,
        f"{_host} updated_timestamp_seconds": rising(1),
        f"{_host} restarts_total ended": 0,
        f"{_host} restarts_total lost_worker": 0,
    }
    if _host != "head":
        HEALTHY |= {
            f"{_host} worker_awaited": 0,
            f"{_host} worker_round_trip_seconds": 0.0002,
            f"{_host} worker_retransmissions_total": 0,
            f"{_host} worker_needless_retransmissions_total": 0,
            f"{_host} worker_sent_bytes_total": rising(100e3),
        }


def series(key):
    """A series as node exporter and Prometheus label it, of «host metric» or «host metric value»."""
    host, name, *own = key.split(" ")
    known = {"worker": "cpu", "worker_host": host, "model": "m", "service": SERVICES[host], "plan": "p"}
    known.update(release="b1", kind="head" if host == "head" else "worker")
    known.update({OWN[name]: own[0]} if own else {})
    by = "head" if name.startswith("worker_") else host
    role = "head" if by == "head" else "worker"
    labels = {"host": by, "cluster": "c", "role": role, "job": "llamacpp", "instance": f"{by}:9100"}
    labels |= {label: known[label] for label in LABELS.get(name, ())}
    shown = ", ".join(f"{label}={json.dumps(value)}" for label, value in labels.items())
    return f"{metrics.PREFIX if name in LABELS else ''}{name}{{{shown}}}"


def case(name, changes, **wanted):
    values = {**HEALTHY, **changes}
    given = [
        {"series": series(key), "values": value if isinstance(value, str) else steady(value)}
        for key, value in values.items()
        if value is not None
    ]
    return {"name": name, "interval": "15s", "input_series": given, **wanted}


def promtool(tmp_path, test):
    """:raises AssertionError: the test fails."""
    path = tmp_path / "tests.json"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


SLOW = {"head generated_tokens_total": slows(5.5, 3.5)}
"""7 tokens per second; 8 are the least that is planned."""
ENDS_EACH_MINUTE = {
    **states("loading"),
    "head state loading": " ".join(["1 1 1 0"] * (STEPS // 4)),
    "head state waiting": " ".join(["0 0 0 1"] * (STEPS // 4)),
    "head restarts_total ended": " ".join(str(step // 4) for step in range(STEPS)),
}
W1_AWAITED = {"w1 worker_awaited": 1}


def w1(**values):
    return {f"w1 {name}": value for name, value in values.items()}


FAULTS = [
    ("nothing", {}, 45, {}),
    ("asleep", {**states("asleep"), "w1 worker_round_trip_seconds": None}, 45, {}),
    ("slow, but two requests ran at the same time", {**SLOW, "head requests_processing": 2}, 45, {}),
    ("slow as its full context", {"head generated_tokens_total": slows(5.5, 4.2)}, 45, {}),
    ("slow on a fallback", {**SLOW, **states("fallback")}, 45, {"LlamaServesOnFallback": "head"}),
    ("slow", SLOW, 45, {"LlamaGenerationSlow": "head"}),
    ("slow, earlier", {"head generated_tokens_total": slows(3.5, 5.5)}, 45, {}),
    (
        "slow prompts",
        {"head prompt_tokens_total": rising(35), "head prompt_seconds_total": rising(0.5)},
        45,
        {"LlamaPromptsSlow": "head"},
    ),
    ("turns of a chat", {"head prompt_tokens_total": rising(7), "head prompt_seconds_total": rising(0.1)}, 45, {}),
    ("head waits for nobody", states("waiting"), 5, {"LlamaHeadDown": "head"}),
    ("head ends while it loads", ENDS_EACH_MINUTE, 20, {"LlamaHeadDown": "head", "LlamaRestarted": "head"}),
    (
        "head has ended twice, and loads after it has served",
        {
            "head state serving": turns(1, 0),
            "head state loading": turns(0, 1),
            "head restarts_total ended": turns(0, 2),
        },
        26,
        {},
    ),
    ("head waits for a worker", {**states("waiting"), **W1_AWAITED}, 5, {"LlamaWorkerLost": "w1"}),
    (
        "host of a worker off",
        {**states("waiting"), **W1_AWAITED, "w1 up": 0, "w1 updated_timestamp_seconds": None, "w1 service_info": None},
        5,
        {"LlamaHostUnreached": "w1"},
    ),
    ("no metrics ever", w1(service_info=None, updated_timestamp_seconds=None), 65, {"LlamaNoMetrics": "w1"}),
    ("metrics that cannot be read", {"w1 node_textfile_scrape_error": 1}, 65, {"LlamaNoMetrics": "w1"}),
    ("stopped", w1(service_info="1+0x79 stale", updated_timestamp_seconds="0+15x79 stale"), 85, {}),
    ("launcher gone", {"w1 updated_timestamp_seconds": 300}, 8, {"LlamaServiceSilent": "w1"}),
    ("fallback", {**states("fallback"), **W1_AWAITED}, 15, {"LlamaServesOnFallback": "head", "LlamaWorkerLost": "w1"}),
    ("worker ended", {"w1 restarts_total ended": turns(0, 1)}, 22, {"LlamaRestarted": "w1"}),
    ("worker ended, earlier", {"w1 restarts_total ended": turns(0, 1)}, 27, {}),
    ("restart for a lost worker", {"head restarts_total lost_worker": turns(0, 1)}, 22, {}),
    ("a model lost its worker", {"head restarts_total model_lost_worker": turns(0, 1)}, 22, {"LlamaRestarted": "head"}),
    ("loading", states("loading"), 8, {}),
    ("retransmissions", {"w1 worker_retransmissions_total": rising(0.9)}, 10, {"LlamaRetransmissions": "w1"}),
    (
        "retransmissions of two loads, which send as much",
        w1(worker_retransmissions_total=turns(60, 700), worker_sent_bytes_total=264567931)
        | {"head started_timestamp_seconds": turns(0, 1200)},
        24,
        {},
    ),
    (
        "sent again, and had arrived",
        SLOW | w1(worker_retransmissions_total=rising(1.9), worker_needless_retransmissions_total=rising(1.8)),
        40,
        {"LlamaGenerationSlow": "head"},
    ),
    ("verified long ago", {"head verified_timestamp_seconds": -700000}, 20, {"LlamaKnownAnswerOld": "head"}),
    ("verification failed", {"head verified_passed": 0}, 20, {"LlamaKnownAnswerOld": "head"}),
    (
        "never verified",
        {"head verified_timestamp_seconds": None, "head verified_passed": None},
        20,
        {"LlamaKnownAnswerOld": "head"},
    ),
]
"""What differs from HEALTHY, and which alerts are raised of which host after so many minutes."""


@pytest.mark.parametrize("name, changes, minute, wanted", FAULTS, ids=[name for name, *_more in FAULTS])
def test_each_fault_raises_the_alert_that_names_it_and_no_other(tmp_path, name, changes, minute, wanted):
    raised = [
        {"labels": json.dumps({"alertname": alert, **({"host": host} if host else {})}), "value": 1}
        for alert, host in wanted.items()
    ]
    for sample in raised:
        sample["labels"] = re.sub(r'"(\w+)": ', r"\1=", sample["labels"])
    firing = 'group by (alertname, host) (ALERTS{alertstate="firing"})'
    query = {"expr": firing, "eval_time": f"{minute}m", "exp_samples": raised}
    promtool(tmp_path, case(name, changes, promql_expr_test=[query]))


def test_a_worker_speaks_for_no_other_host(tmp_path):
    """What its node exporter says of the head and of another worker, under the labels of its target."""
    told = {
        "worker_awaited": 'worker_host="w2", exported_host="w2", worker="cpu"',
        "state": 'exported_host="head", state="serving"',
    }
    given = case("forged", states("waiting"))
    given["input_series"] += [
        {"series": f'llamacpp_cluster_{name}{{cluster="c", host="w1", role="worker", {labels}}}', "values": steady(1)}
        for name, labels in told.items()
    ]
    firing = 'group by (alertname, host) (ALERTS{alertstate="firing"})'
    raised = [{"labels": '{alertname="LlamaHeadDown", host="head"}', "value": 1}]
    given["promql_expr_test"] = [{"expr": firing, "eval_time": "5m", "exp_samples": raised}]
    promtool(tmp_path, given)


def test_each_alert_is_raised_by_some_fault():
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    assert {alert for *_fault, wanted in FAULTS for alert in wanted} == alerts


def test_slow_generation_says_how_slow(tmp_path):
    said = "m of c averaged 7 generated tokens/s for 15 minutes, below the predicted range."
    labels = {"cluster": "c", "host": "head", "instance": "head:9100", "job": "llamacpp", "model": "m", "role": "head"}
    raised = {"exp_labels": {**labels, "severity": "warning"}, "exp_annotations": {"summary": said}}
    query = {"eval_time": "40m", "alertname": "LlamaGenerationSlow", "exp_alerts": [raised]}
    promtool(tmp_path, case("slow", SLOW, alert_rule_test=[query]))
