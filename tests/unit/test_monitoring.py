"""Files that monitoring writes, and that rules and dashboards name no metric that is not there."""

import json
import re
import subprocess

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.llamacpp.cluster.plugins.action import monitoring as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import metrics
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.monitoring import dashboards, files
from conftest import FACTS, refused, typed
from support import playbook_runs
from test_alerts import PROMTOOL, ROOT, SERVICES, case, needs_promtool, promtool, states
from test_tasks import tasks_of

PACKAGES = files.Packages(**inventory.packages()["monitoring"]["debian"])
ADDRESSES = {"head": "192.0.2.10", "worker1": "192.0.2.11", "worker2": "192.0.2.12", "watcher": "192.0.2.50"}
RULES = yaml.safe_load(files.RULES.read_text())
NODE = {
    "node_cpu_scaling_frequency_hertz",
    "node_cpu_seconds_total",
    "node_disk_read_bytes_total",
    "node_filesystem_avail_bytes",
    "node_filesystem_readonly",
    "node_filesystem_size_bytes",
    "node_hwmon_temp_celsius",
    "node_hwmon_temp_crit_celsius",
    "node_memory_MemAvailable_bytes",
    "node_memory_MemTotal_bytes",
    "node_network_receive_bytes_total",
    "node_network_transmit_bytes_total",
    "node_textfile_scrape_error",
}
"""Of node exporter 1.5 on Linux."""


def expressions():
    """Where each query stands, and the query."""
    for group in RULES["groups"]:
        yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in group["rules"])
    for name, dashboard in dashboards.described().items():
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
    assert len([*expressions()]) > 60


def test_a_metric_that_is_not_there_is_named():
    assert unknown('sum(llamacpp_cluster_stat{host="node_x"}) + llamacpp:prompt_tokens_total') == {
        "llamacpp_cluster_stat",
        "llamacpp:prompt_tokens_total",
    }


def test_each_metric_is_shown_or_judged():
    """But those that say the same as another one."""
    used = " ".join(query for _place, query in expressions())
    unused = {metric.name for metric in metrics.METRICS if not re.search(rf"{metrics.PREFIX}{metric.name}\b", used)}
    assert unused == {"worker_connected", "worker_held"}


def test_panels_fill_the_grid_and_select_what_the_dashboard_s_variables_say():
    for name, dashboard in dashboards.described().items():
        panels = dashboards.page(name, dashboard)["panels"]
        places = [panel["gridPos"] for panel in panels]
        taken = [
            (place["x"] + right, place["y"] + down)
            for place in places
            for right in range(place["w"])
            for down in range(place["h"])
        ]
        assert sorted(taken) == [
            (x, y) for x in range(24) for y in range(sum(place["h"] * place["w"] for place in places) // 24)
        ]
        queries = [target["expr"] for panel in panels for target in panel["targets"]]
        assert all("{}" not in query for query in queries)
        assert {*re.findall(r"\$(\w+)", " ".join(queries))} == {*dashboard.variables}


def test_no_colour_and_no_scale_is_left_to_grafana():
    """Whose own are red from 80 on, of whatever unit, and bars from the least value to the most."""
    for name, dashboard in dashboards.described().items():
        for panel in dashboards.page(name, dashboard)["panels"]:
            fields = panel["fieldConfig"]["defaults"]
            assert fields["thresholds"]["steps"][0] == {"color": "green", "value": None}, panel["title"]
            assert "min" in fields or fields["custom"]["scaleDistribution"]["type"] == "log", panel["title"]
            assert (fields.get("max") == 1) == (panel["fieldConfig"]["defaults"]["unit"] == "percentunit")


@needs_promtool
@pytest.mark.programs
def test_prometheus_takes_the_queries_of_dashboards(tmp_path):
    pages = [dashboards.page(name, dashboard) for name, dashboard in dashboards.described().items()]
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
        ("Verified ago", {}, [{'{cluster="c"}': 3600 + 2400}, {}]),
        ("Verified ago", {"head verified_passed": 0}, [{}, {'{cluster="c"}': 3600 + 2400}]),
        ("In memory", {"head model_loaded": 1}, [{'{model="m"}': GREEN}, {}]),
        ("In memory", {"head model_loaded": 0}, [{}, {"{}": GREEN}]),
        ("Reached", {"w1 up": 0}, [{'{host="head"}': GREEN, '{host="w2"}': GREEN}, {'{host="w1"}': RED}]),
        (
            "Services",
            {},
            [{f'{{host="{host}", release="b1", service="{name}"}}': GREEN for host, name in SERVICES.items()}],
        ),
    ],
)
def test_panels_of_names_say_what_is_well_in_green_and_what_is_wrong_in_red(tmp_path, title, changes, shown):
    pages = [dashboards.page(name, dashboard) for name, dashboard in dashboards.described().items()]
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


def watch(cluster, *monitors, addresses=ADDRESSES, sources=(), **packages):
    known = {**dict.fromkeys([*cluster.hosts, *monitors], PACKAGES), **packages}
    return files.watch(typed(cluster.plan()), dict.fromkeys(monitors, 30), addresses, known, sources)


def command(part, package):
    (text,) = (file.content for file in part.files if f"/{package}.service.d/" in file.path)
    return text


def test_node_exporter_listens_for_those_who_look(plan):
    watched = watch(plan, "watcher")
    part = watched.hosts["worker1"]
    assert part.packages == ("prometheus-node-exporter",)
    assert [(rule.address, rule.port, rule.sources) for rule in part.rules] == [("192.0.2.11", 9100, ("192.0.2.50",))]
    text = command(part, "prometheus-node-exporter")
    assert (
        "--web.listen-address=192.0.2.11:9100 --collector.textfile.directory=/var/lib/prometheus/node-exporter\n"
        in text
    )
    assert "IPAddressAllow=localhost 192.0.2.50\n" in text
    (target,) = (
        target for target in json.loads(watched.texts["targets-llama_cluster.json"]) if "worker1" in str(target)
    )
    assert target == {"targets": ["192.0.2.11:9100"], "labels": {"host": "worker1"}}


def test_a_host_that_watches_may_ask_from_each_of_its_addresses(plan):
    part = watch(plan, "watcher", sources=["192.0.2.50", "198.51.100.7"]).hosts["worker1"]
    assert part.rules[0].sources == ("192.0.2.50", "198.51.100.7")
    assert "IPAddressAllow=localhost 192.0.2.50 198.51.100.7\n" in command(part, "prometheus-node-exporter")


def test_a_host_that_watches_itself_opens_no_port(plan):
    part = watch(plan, "head").hosts["head"]
    assert part.rules == ()
    assert "--web.listen-address=127.0.0.1:9100 " in command(part, "prometheus-node-exporter")
    part = watch(plan, "head", "watcher").hosts["head"]
    assert part.rules[0].sources == ("192.0.2.10", "192.0.2.50")


def test_prometheus_is_reached_on_its_own_host_alone(plan):
    part = watch(plan, "watcher").monitors["watcher"]
    assert part.rules == ()
    assert "--web.listen-address=127.0.0.1:9090" in command(part, "prometheus")
    assert "--storage.tsdb.retention.time=30d" in command(part, "prometheus")
    assert "--web.listen-address=127.0.0.1:9093 --cluster.listen-address=\n" in command(part, "prometheus-alertmanager")


@pytest.mark.parametrize(
    "state, drop_in, refused",
    [
        ("active", "", True),
        ("active", "operators.conf", True),
        ("active", "llamacpp.conf", False),
        ("active", "llamacpp-other.conf", False),
        ("inactive", "", False),
    ],
)
def test_a_service_of_the_operator_s_own_is_left_alone(state, drop_in, refused):
    tasks = tasks_of(ROOT / "roles/llama_monitoring/tasks/main.yml")
    (refuses,) = (task for task in tasks if "ansible.builtin.fail" in task)
    before = [key for task in tasks[: tasks.index(refuses)] for key in task if key.startswith(("ansible", "llamacpp"))]
    assert before == ["ansible.builtin.command"]
    drop_in = drop_in and f"/etc/systemd/system/prometheus.service.d/{drop_in}"
    found = {"item": "prometheus", "stdout": f"ActiveState={state}\nDropInPaths={drop_in}"}
    templar = Templar(DataLoader(), {"item": found, "inventory_hostname": "watcher"})
    assert templar.template(trust_as_template(f"{{{{ {' and '.join(refuses['when'])} }}}}")) is refused
    said = templar.template(trust_as_template(refuses["ansible.builtin.fail"]["msg"]))
    assert said.startswith("prometheus runs on watcher already, and this collection did not start it: have it watch")


def test_packages_are_there_before_anything_is_written_and_start_nothing():
    """Where they cannot be installed, the next run still finds that files differ, and restarts services that ran before."""
    tasks = tasks_of(ROOT / "roles/llama_monitoring/tasks/main.yml")
    known = ("apt", "copy", "systemd_service")
    steps = [module for task in tasks for module in known if f"ansible.builtin.{module}" in task]
    assert steps == ["apt", "copy", "copy", "systemd_service"]
    (installs,) = (task["ansible.builtin.apt"] for task in tasks if "ansible.builtin.apt" in task)
    assert installs["policy_rc_d"] == 101


def test_clusters_of_one_host_start_its_services_each_by_a_file_of_its_own(plan):
    known = dict.fromkeys([*plan.hosts, "watcher"], PACKAGES)
    watched = files.watch(typed(plan.plan())._replace(cluster="other"), {"watcher": 30}, ADDRESSES, known)
    paths = [file.path for part in (watched.hosts["head"], watched.monitors["watcher"]) for file in part.files]
    assert [path for path in paths if ".service.d/" in path] == [
        f"/etc/systemd/system/{package}.service.d/llamacpp-other.conf" for package in PACKAGES
    ]


STOPS = "Stop the services with the last one"
REMOVES = "Remove what starts them for this one"


@pytest.mark.parametrize(
    "watched, clusters, done",
    [
        (True, ["llamacpp"], {STOPS, REMOVES, "Remove the rules of the firewall"}),
        (True, ["llamacpp", "llamacpp-other"], {REMOVES}),
        (True, [], {"Remove the rules of the firewall"}),
        (False, ["llamacpp"], {STOPS, REMOVES, "Remove the other files"}),
        (False, ["llamacpp", "llamacpp-other"], {REMOVES}),
        (False, ["llamacpp-other"], set()),
        (False, [], {"Remove the other files"}),
    ],
)
def test_removal_leaves_what_other_clusters_need_and_services_that_it_did_not_start(watched, clusters, done):
    (block,) = yaml.safe_load((ROOT / "roles/llama_monitoring/tasks/remove.yml").read_text())
    drop_ins = [f"/etc/systemd/system/prometheus.service.d/{name}.conf" for name in clusters]
    known = {
        **{name: trust_as_template(text) for name, text in block["vars"].items()},
        "__llama_host_facts": {"names": {"account": "llamacpp"}},
        "__llama_monitoring_made": ["/etc/prometheus/llamacpp"],
        "__llama_monitoring_part": {"watched": watched, "packages": ["prometheus"]},
        "__llama_monitoring_found": {"files": [{"path": path} for path in drop_ins]},
    }

    def templated(text, **more):
        return Templar(DataLoader(), {**known, **more}).template(trust_as_template(text))

    def items(task):
        """For which the task is run."""
        conditions = task.get("when", [])
        given = templated(task["loop"]) if "loop" in task else [{}]
        needed = [conditions] if isinstance(conditions, str) else conditions
        return [item for item in given if all(templated(f"{{{{ {one} }}}}", item=item) for one in needed)]

    look, *tasks = block["block"]
    assert templated(look["ansible.builtin.find"]["paths"]) == ["/etc/systemd/system/prometheus.service.d"]
    run = {task["name"]: found for task in tasks if (found := items(task))}
    assert run.keys() - {"Have systemd forget it", "Forget the hosts of the cluster"} == done
    assert [item["path"] for item in run.get(REMOVES, ())] == [path for path in drop_ins if "/llamacpp.conf" in path]
    (stops,) = (task for task in tasks if task["name"] == STOPS)
    for item in run.get(STOPS, ()):
        assert templated(stops["ansible.builtin.systemd_service"]["name"], item=item) == "prometheus.service"


@pytest.mark.programs
def test_removal_is_refused_where_nobody_is_left_of_whom_something_could_be_taken(tmp_path):
    hosts = {"head": {**playbook_runs.LOCAL, "llama_host_scope": "user"}}
    groups = {"llama_cluster": {"hosts": hosts}, "llama_head": {"hosts": {"head": {}}}}
    playbook, remove = ROOT / "playbooks/monitoring.yml", ["-e", "llama_monitoring_remove=true"]
    status, printed = playbook_runs.run(tmp_path, playbook, {"all": {"children": groups}}, *remove)
    assert status == 2
    assert "The group llama_monitoring has no host, so nothing can be taken back" in " ".join(printed.split())


def test_grafana_gets_a_data_source_of_its_own_that_goes_with_its_file(plan):
    part = watch(plan, "watcher").monitors["watcher"]
    _look, copies = tasks_of(ROOT / "roles/llama_monitoring/tasks/grafana.yml")
    known = {"__llama_monitoring_part": {"files": [file._asdict() for file in part.files]}}
    text = copies["ansible.builtin.copy"]["content"]
    given = [
        yaml.safe_load(Templar(DataLoader(), {**known, "item": item}).template(trust_as_template(text)))
        for item in copies["loop"]
    ]
    (source,) = given[0]["datasources"]
    assert (source["name"], source["uid"], given[0]["prune"]) == ("llama.cpp", "llamacpp", True)
    assert given[1]["providers"][0]["folder"] == "llama.cpp"
    for name, text in dashboards.files().items():
        shown = json.loads(text)["templating"]["list"][0]["current"]
        assert shown == {"text": source["name"], "value": source["uid"]}, name


def test_a_host_on_which_nothing_can_be_installed_stays_a_target(plan):
    watched = watch(plan, "watcher", worker2=None)
    assert watched.left == ("worker2",)
    assert "192.0.2.12:9100" in watched.texts["targets-llama_cluster.json"]
    plan.hosts["worker1"]["facts"].update(scope="user", service_manager="systemd_user")
    assert "worker1" in watch(plan).left


@needs_promtool
@pytest.mark.programs
def test_prometheus_takes_the_configuration(plan, tmp_path):
    output.write_folder("llama_monitoring_path", str(tmp_path / "new"), watch(plan).texts)
    for name, syntax in (("prometheus.yml", ()), ("scrape.yml", ("--syntax-only",))):
        done = subprocess.run(
            [PROMTOOL, "check", "config", *syntax, tmp_path / "new" / name], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    dashboards = {path.stem for path in (tmp_path / "new" / "dashboards").iterdir()}
    assert dashboards == {"cluster", "hosts", "models"}


def test_whose_monitoring_is_refused(plan, pair):
    with pytest.raises(Refusal, match=r"^watcher is in the group llama_monitoring and is neither Debian"):
        watch(plan, "watcher", watcher=None)
    for monitors in (["watcher"], []):
        with pytest.raises(Refusal, match=r"^Other hosts do not reach worker1 at 127\.0\.0\.1: set its ansible_host"):
            watch(plan, *monitors, addresses={**ADDRESSES, "worker1": "127.0.0.1"})
    pair.hosts["worker2"]["variables"]["llama_metrics"] = "off"
    with pytest.raises(Refusal, match=r"^worker2 writes no metrics: set llama_metrics to textfile"):
        watch(pair)


@pytest.mark.parametrize(
    "answer, said",
    [
        ({}, r"^watcher of the group llama_monitoring could not be reached: bring it up"),
        ({"facts": {**FACTS, "reached_at": "1\nExecStart=x"}}, r"^the facts of watcher are not as"),
    ],
)
def test_a_host_that_watches_says_nothing_or_anything(plan, answer, said):
    with pytest.raises(Refusal, match=said):
        action.ActionModule.perform(None, action.Arguments(plan.plan(), {}, {"watcher": answer}))
    with pytest.raises(Refusal, match=r"so there is nothing to watch: it is too small"):
        action.ActionModule.perform(None, action.Arguments(refused("c", Refusal("it is too small")), {}))


def test_at_which_address_others_reach_a_host():
    reached = {"reached_at": "192.0.2.7"}
    assert files.address_of("a", {"ansible_host": "192.0.2.1"}, reached) == "192.0.2.1"
    assert files.address_of("a", {"ansible_host": "a.lan"}, reached) == "192.0.2.7"
    assert files.address_of("a", {"ansible_connection": "local"}, reached) == "127.0.0.1"
    with pytest.raises(Refusal, match=r"^The address of a is not known: set its ansible_host"):
        files.address_of("a", {}, {})
