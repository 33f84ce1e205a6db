"""Files that monitoring writes, and that rules and dashboards name no metric that is not there."""

import json
import re
import subprocess

import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.action import monitoring as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import metrics
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.monitoring import dashboards, files
from conftest import refused, typed
from test_monitoring_rules import PROMTOOL, SERVICES, case, needs_promtool, promtool, states

ADDRESSES = {"head": "192.0.2.10", "worker1": "192.0.2.11", "worker2": "192.0.2.12"}
RULES = yaml.safe_load(files.RULES_FILE.read_text())
NODE = {
    "node_cpu_scaling_frequency_hertz",
    "node_hwmon_temp_celsius",
    "node_memory_MemAvailable_bytes",
    "node_memory_MemTotal_bytes",
    "node_textfile_scrape_error",
}
"""Of node exporter 1.5 on Linux."""


def expressions():
    """Where each query stands, and the query."""
    for group in RULES["groups"]:
        yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in group["rules"])
    for name, dashboard in dashboards.read_dashboards().items():
        yield from ((f"{name}: {label}", metric) for label, metric in dashboard.variables.items())
        for row in dashboard.rows:
            yield from ((f"{name}: {panel.title}", query) for panel in row for query in panel.queries.values())


def unknown(query):
    """Names in a query that are nobody's metric."""
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    ours = {metrics.PREFIX + metric.name for metric in metrics.METRICS}
    named = set(re.findall(r"\b(?:llamacpp|node)[a-zA-Z0-9_:]*", re.sub(r'"[^"]*"', "", query)))
    return named - recorded - ours - NODE


def test_rules_and_dashboards_name_metrics_that_are_there():
    wrong = {place: names for place, query in expressions() if (names := unknown(query))}
    assert wrong == {}
    assert len([*expressions()]) > 30


def test_of_what_a_head_alone_knows_no_worker_is_believed():
    own = "service_info|updated_timestamp|started_timestamp|restarts|device_memory"
    of_head = re.compile(rf'{metrics.PREFIX}(?!{own})\w+(?!\w|\{{[^}}]*role="head"|\{{\}})')
    assert {place: found for place, query in expressions() if (found := of_head.findall(query))} == {}
    assert 'role="head"' in dashboards.read_dashboards()["cluster"].selector


def test_each_metric_is_shown_or_judged():
    """But those that say the same as another one."""
    used = " ".join(query for _place, query in expressions())
    unused = {metric.name for metric in metrics.METRICS if not re.search(rf"{metrics.PREFIX}{metric.name}\b", used)}
    assert unused == {"worker_connected"}


def test_panels_lie_side_by_side_and_select_what_the_dashboard_s_variables_say():
    for name, dashboard in dashboards.read_dashboards().items():
        panels = dashboards.dashboard_json(name, dashboard)["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len({*places}) == len(places)
        queries = [target["expr"] for panel in panels for target in panel["targets"]]
        assert all("{}" not in query for query in queries)
        assert {*re.findall(r"\$(\w+)", " ".join(queries))} == {*dashboard.variables}


def test_a_balancer_is_a_target():
    (text,) = files.balancer_files("c", {"lb": "192.0.2.1:8404"}).values()
    labels = {"cluster": "c", "host": "lb", "role": "balancer"}
    assert json.loads(text) == [{"targets": ["192.0.2.1:8404"], "labels": labels}]
    assert files.balancer_files("c", {}) == {}


@needs_promtool
@pytest.mark.programs
def test_prometheus_takes_the_queries_of_dashboards(tmp_path):
    pages = [dashboards.dashboard_json(name, dashboard) for name, dashboard in dashboards.read_dashboards().items()]
    queries = {target["expr"] for page in pages for panel in page["panels"] for target in panel["targets"]}
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(sorted(queries))]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


GREEN, RED = 0, 1


@needs_promtool
@pytest.mark.programs
@pytest.mark.parametrize(
    "title, changes, shown",
    [
        ("State", {"head answers": 1}, [{'{cluster="c", state="serving"}': GREEN}, {}]),
        ("State", {"head answers": 0}, [{'{cluster="c", state="serving"}': GREEN}, {'{cluster="c"}': RED}]),
        ("State", {**states("waiting"), "head answers": 0}, [{'{cluster="c", state="waiting"}': RED}, {}]),
        ("Alerts", {}, [{}, {"{}": GREEN}]),
        ("Alerts", {"w1 up": 0}, [{'{alertname="LlamaHostUnreached", host="w1"}': RED}, {}]),
        ("Time since verification", {}, [{'{cluster="c"}': 3600 + 2400}, {}]),
        ("Time since verification", {"head verified_passed": 0}, [{}, {'{cluster="c"}': 3600 + 2400}]),
        ("Loaded models", {"head model_loaded": 1}, [{'{model="m"}': GREEN}, {}]),
        ("Loaded models", {"head model_loaded": 0}, [{}, {"{}": GREEN}]),
        ("Reachable hosts", {"w1 up": 0}, [{'{host="head"}': GREEN, '{host="w2"}': GREEN}, {'{host="w1"}': RED}]),
        (
            "Services",
            {},
            [{f'{{host="{host}", release="b1", service="{name}"}}': GREEN for host, name in SERVICES.items()}],
        ),
    ],
)
def test_panels_of_names_say_what_is_well_in_green_and_what_is_wrong_in_red(tmp_path, title, changes, shown):
    pages = [dashboards.dashboard_json(name, dashboard) for name, dashboard in dashboards.read_dashboards().items()]
    (panel,) = (panel for page in pages for panel in page["panels"] if panel["title"] == title)
    asked = [
        {
            "expr": f"sum by ({', '.join(re.findall('{{(.+?)}}', target['legendFormat']))}) ({re.sub('[$][a-z]+', '.*', target['expr'])})",
            "eval_time": "40m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for target, samples in zip(panel["targets"], shown, strict=True)
    ]
    promtool(tmp_path, case(title, changes, promql_expr_test=asked))


@pytest.fixture
def plan(pair):
    for host in pair.hosts.values():
        host["variables"]["llama_metrics"] = "textfile"
    return pair


def watch(cluster, addresses=ADDRESSES):
    return files.monitoring_files(typed(cluster.plan()), addresses)


def test_each_host_is_a_target_and_its_labels_come_from_there(plan):
    scrapes = [yaml.safe_load(watch(plan)[name])["scrape_configs"] for name in ("scrape.yml", "prometheus.yml")]
    assert scrapes == [[{"job_name": "llamacpp", "file_sd_configs": [{"files": ["targets-*.json"]}]}]] * 2
    assert json.loads(watch(plan)["targets-llama_cluster.json"]) == [
        {"targets": [f"{ADDRESSES[name]}:9100"], "labels": {"cluster": "llama_cluster", "host": name, "role": role}}
        for name, role in (("head", "head"), ("worker1", "worker"), ("worker2", "worker"))
    ]


@needs_promtool
@pytest.mark.programs
def test_prometheus_takes_the_configuration(plan, tmp_path):
    output.write_folder("llama_monitoring_path", str(tmp_path / "new"), watch(plan))
    for name, syntax in (("prometheus.yml", ()), ("scrape.yml", ("--syntax-only",))):
        argv = [PROMTOOL, "check", "config", *syntax, tmp_path / "new" / name]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    dashboards = {path.stem for path in (tmp_path / "new" / "dashboards").iterdir()}
    assert dashboards == {"cluster", "hosts"}


def test_whose_monitoring_is_refused(plan, pair):
    with pytest.raises(Refusal, match=r"^Other hosts cannot reach worker1 at 127\.0\.0\.1"):
        watch(plan, {**ADDRESSES, "worker1": "127.0.0.1"})
    pair.hosts["worker2"]["variables"]["llama_metrics"] = "off"
    with pytest.raises(Refusal, match=r"^These hosts export no metrics: worker2. Set llama_metrics to textfile"):
        watch(pair)
    with pytest.raises(Refusal, match=r"so no monitoring files were written: it is too small"):
        action.ActionModule.perform(None, action.MonitoringArguments(refused("c", Refusal("it is too small")), {}, "x"))


def test_at_which_address_others_reach_a_host():
    reached = {"reached_at": "192.0.2.7"}
    assert files.address_of("a", {"ansible_host": "192.0.2.1"}, reached) == "192.0.2.1"
    assert files.address_of("a", {"ansible_host": "a.lan"}, reached) == "192.0.2.7"
    assert files.address_of("a", {"ansible_connection": "local"}, reached) == "127.0.0.1"
    with pytest.raises(Refusal, match=r"^The address of a is unknown: set its ansible_host"):
        files.address_of("a", {}, {})
