"""What tasks of roles and playbooks do that no run on hosts tells apart: order, hostile texts, refused runs."""

import itertools

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.llamacpp.cluster.plugins.filter.failure_reason import failure_reason
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Subject
from conftest import ROOT
from support import playbook_runs
from support.rollbacks import completed, record_of

FILES = [*ROOT.glob("roles/*/tasks/**/*.yml"), *ROOT.glob("playbooks/**/*.yml")]


def flat(items):
    """All tasks of a file or a play, those in blocks too, in their order."""
    for item in items:
        yield item
        for part in ("tasks", "block", "rescue", "always"):
            yield from flat(item.get(part, ()))


def tasks_of(path):
    content = yaml.safe_load(path.read_text())
    return [*flat(content)] if isinstance(content, list) else []


def rendered(text, known):
    return Templar(DataLoader(), known).template(trust_as_template(text))


def templates(variables):
    """Those whose values are texts, as templates."""
    return {name: trust_as_template(text) for name, text in variables.items() if isinstance(text, str)}


def holds(conditions, known):
    templar = Templar(DataLoader(), known)
    return all(templar.evaluate_conditional(trust_as_template(condition)) for condition in conditions)


def test_what_others_say_is_shown_without_control_characters():
    """A host's package manager, and a name that the operator gives with -e."""
    known = {
        "ansible_failed_result": {"msg": "E: \x1b]0;x\x07\x9b2J\nno space"},
        "llama_cluster_group": "\x1b[2J\x9b",
        "__llama_host_missing_packages": {"cmake": "cmake"},
        "inventory_hostname": "here",
    }
    messages = [
        task.get(f"ansible.builtin.{module}", {}).get(key, "")
        for path in FILES
        for task in tasks_of(path)
        for module, key in (("fail", "msg"), ("debug", "msg"), ("assert", "fail_msg"))
    ]
    causes = (task.get("vars", {}).get("__llama_checks", ()) for path in FILES for task in tasks_of(path))
    messages += [cause["message"] for each in causes for cause in each]
    templar = Templar(DataLoader(), known)
    templar.environment.filters["llamacpp.cluster.failure_reason"] = failure_reason
    rendered = [
        templar.template(trust_as_template(message))
        for message in messages
        if "ansible_failed_result" in message or "llama_cluster_group" in message
    ]
    assert rendered
    assert all(text.isprintable() for text in rendered)


ITEMS = [{"msg": "fine"}, *[{"failed": True, "msg": "ended"}] * 2, {"failed": True, "msg": "full"}]


@pytest.mark.parametrize(
    "result, before, reason",
    [
        ({"msg": " E: no\nspace. "}, {}, "E: no space"),
        ({"msg": "the same"}, {"msg": "the same"}, ""),
        ({"msg": "non-zero return code", "stderr": "disk\nfull"}, {}, "disk full"),
        ({}, {}, ""),
        ({"rc": 1}, {}, "no reason given"),
        ({"msg": "One or more items failed", "results": ITEMS}, {}, "ended full"),
    ],
)
def test_why_a_task_failed(result, before, reason):
    assert failure_reason(result, before) == reason


@pytest.mark.parametrize(
    "known, lacks_proof",
    [
        ({}, False),
        ({"llama_proof": "always"}, True),
        ({"llama_proof": "search", "__llama_proof": {"skipped": True}}, True),
        ({"llama_proof": "always", "__llama_proof": {"proofs": [{}]}}, False),
    ],
)
def test_verify_knows_where_a_run_made_no_proof_that_was_asked_for(known, lacks_proof):
    *_others, task = tasks_of(ROOT / "playbooks/tasks/verify.yml")
    assert rendered(task["llamacpp.cluster.verify"]["lacks_proof"], known) is lacks_proof


def test_the_log_of_a_worker_that_crashed_says_why():
    (task,) = (one for one in tasks_of(ROOT / "playbooks/site.yml") if "computes these layers correctly" in one["name"])
    known = templates(task["vars"])
    known["__llama_proof"] = {"failure_text": "w crashes", "remedy": "Do."}
    known["__llama_worker_logs"] = {"results": [{"stdout_lines": ["1", "2", "3", "4", "4"]}, {"unreachable": True}]}
    assert rendered(task["ansible.builtin.assert"]["fail_msg"], known) == "w crashes; 2; 3; 4. Do."


@pytest.mark.parametrize("transport", ["plain", "stunnel"])
def test_a_link_is_measured_at_a_worker_without_a_tunnel_of_the_operator_s(pair, transport):
    endpoints = [{"name": "a", "tunnel": "127.0.0.1:60052"}, {"name": "b", "port": 50053}]
    link = {"address": "10.0.0.2/24", "interface": "eth1"}
    variables = {"llama_links": [link], "llama_worker_endpoints": endpoints, "llama_transport": transport}
    pair.hosts["worker1"]["variables"].update(variables)
    plan = pair.plan()
    assert plan["links"] == ["worker1"]
    known = templates(yaml.safe_load((ROOT / "roles/llama_link/vars/main.yml").read_text()))
    known["__llama_host_plan"] = plan["hosts"]["worker1"]
    assert rendered("{{ [__llama_link_address, __llama_link_port] }}", known) == ["10.0.0.2", 50051]


LINKS = {
    "new": ("new", {"measured": {}}, [], False, True),
    "the head did not answer": ("new", {}, [], False, False),
    "known": ("new", {"measured": {"new": {}}}, [], False, False),
    "changed": ("new", {"measured": {"new": {}}}, ["link"], False, True),
    "changed, planned with": ("new", {"measured": {"new": {"requested": True}}}, ["link"], False, False),
    "changed, the head did not answer": ("new", {}, ["link"], False, True),
    "asked for": ("new", {"measured": {"new": {}}}, [], "true", True),
    "no link": ("other", {"measured": {}}, ["link"], True, False),
}


@pytest.mark.parametrize("name, facts, kinds, asked, measured", LINKS.values(), ids=LINKS)
def test_which_links_are_measured(name, facts, kinds, asked, measured):
    (task,) = (
        one for one in tasks_of(ROOT / "playbooks/tasks/verify.yml") if one.get("name", "").startswith("Measure")
    )
    known = {
        "__llama_plan": {"links": ["new"], "head": {"host": "head"}},
        "__llama_changes": {"kinds": {name: kinds}},
        "hostvars": {"head": {"__llama_facts": {"facts": facts} if facts else {}}},
        **templates(task["vars"]),
    }
    assert holds(task["when"], {**known, "inventory_hostname": name, "llama_link_measure": asked}) == measured


def test_the_unit_that_comes_with_stunnel_is_not_left_enabled():
    unit = "ansible.builtin.systemd_service"
    (task,) = (task for task in tasks_of(ROOT / "roles/llama_host/tasks/packages.yml") if unit in task)
    assert task[unit] == {"name": "stunnel.target", "enabled": False, "state": "stopped"}

    def is_run(installed, lacking, family):
        known = {
            "__llama_host_module_result": {"changed": installed},
            "__llama_host_missing_packages": {lacking: lacking},
            "__llama_host_facts": {"distribution": {"family": family}, "service_manager": "systemd"},
        }
        return holds(task["when"], {**known, "ansible_check_mode": False})

    cases = itertools.product((True, False), ("stunnel", "cmake"), ("debian", "suse"))
    assert [case for case in cases if is_run(*case)] == [(True, "stunnel", "debian")]


IPERF3, PING = ((ROOT / "tests/unit/data/links" / name).read_text() for name in ("iperf3.json", "ping.txt"))


@pytest.mark.parametrize(
    "lacking, sent, pinged, measured",
    [
        ([], {"rc": 0, "stdout": IPERF3}, {"stdout": PING}, (14390, 0.066, "", True)),
        (
            [],
            {"rc": 1, "stdout": "{}"},
            {"stdout": PING},
            (None, 0.066, "not measured: iperf3 from a to 10.0.0.2 failed", True),
        ),
        ([], {"rc": 0, "stdout": ""}, {}, (None, None, "not measured: iperf3 from a to 10.0.0.2 failed", False)),
        (["b"], {"skipped": True}, {}, (None, None, "iperf3 is not installed on b", False)),
    ],
)
def test_what_is_kept_of_a_measured_link(lacking, sent, pinged, measured):
    text = yaml.safe_load((ROOT / "roles/llama_link/vars/main.yml").read_text())
    known = templates(text)
    found = {"results": [{"item": name, "rc": 2} for name in lacking]}
    known.update(__llama_link_iperf3=found, __llama_link_transfer=sent, __llama_link_ping=pinged)
    known.update(__llama_link_iperf3_server={}, __llama_link_head="a", __llama_link_address="10.0.0.2")
    known.update({"llama_link_measure": "true"} if measured[-1] else {})
    assert tuple(rendered(one, known) for one in text["__llama_link_measurement"].values()) == measured


@pytest.mark.parametrize(
    "release, asked",
    [
        ({}, False),
        ({"llama_release": "b11434"}, False),
        ({"llama_release": {"source": "pypi"}}, False),
        ({"llama_release": {"source": "package"}}, True),
        ({"llama_release": "auto"}, False),
    ],
)
def test_whatever_plans_asks_hosts_for_packages_where_the_release_may_be_one(release, asked):
    known = yaml.safe_load((ROOT / "playbooks/vars/packages.yml").read_text())
    given = {
        task[f"llamacpp.cluster.{module}"].get("packages")
        for path in FILES
        for task in tasks_of(path)
        for module in ("host_info", "host_status")
        if f"llamacpp.cluster.{module}" in task
    }
    (text,) = given - {None}
    assert rendered(text, {**known, **templates(known), **release}) == (known["__llama_cpp_packages"] if asked else {})


START = [
    "Open ports for planned clients",
    "Run the workers",
    "Run the head's server",
    "Wait until the cluster is healthy and answers",
    "Mark the plan as serving",
    "Close ports that are no longer used",
]
CHANGE = [
    "Build",
    "Write the planned files",
    "Store the plan on each host",
    "Stop a retired head's server before its workers change",
    "Stop the head's server before its model or workers change",
    *START,
    "Verify the cluster, except in check mode",
    "Remove the installation once the cluster no longer uses the host",
]
RETURN = ["Stop the head's server", *START]
REMOVAL = ["Stop the head's server before its workers", "Remove the services", "Remove the firewall rules"]


@pytest.mark.parametrize(
    "files, order",
    [(["site"], CHANGE), (["tasks/rollback"], RETURN), (["tasks/remove_host"], REMOVAL)],
    ids=["change", "return", "removal"],
)
def test_all_is_ready_before_the_head_stops_and_a_port_is_open_only_while_somebody_listens(files, order):
    """A step in between may fail, and a host may reboot into its old services."""
    names = [task.get("name") for file in files for task in tasks_of(ROOT / f"playbooks/{file}.yml")]
    places = [names.index(name) for name in order]
    assert places == sorted(places)


def test_a_head_that_starts_is_asked_by_the_plan_that_it_keeps(pair):
    record = record_of(completed(pair), "head")
    (task,) = [one for one in tasks_of(ROOT / "playbooks/start.yml") if "llamacpp.cluster.verify" in one]
    asked = {"ansible_check_mode": False, "__llama_kept_plans": {"kept_plans": {"now": {"plan": record}}}}
    assert holds(task["when"], asked)
    assert not holds(task["when"], {**asked, "__llama_kept_plans": {"skipped": True}})
    known = {"inventory_hostname": "head", "__llama_current_plan": record}
    found = rendered(task["llamacpp.cluster.verify"]["plan"], known)
    assert typed_json.parse(Subject, found).head.url == record["head"]["url"]


@pytest.mark.parametrize(
    "hosts, serves, said",
    [
        (["head", "w"], True, "serve: head: no. The cluster rolled back: plan b (release r) serves again."),
        (["head"], True, "serve: w stopped answering during the change; head: no. The cluster rolled back"),
        (["head"], False, "The rollback failed: gone. Fix the failure and run site.yml again, or run rollback.yml if"),
    ],
    ids=["back", "a host lost", "not back"],
)
def test_a_change_that_failed_says_what_failed_and_what_serves(hosts, serves, said):
    task = tasks_of(ROOT / "playbooks/tasks/recover.yml")[-1]
    found = {"__llama_failure": "head: no", "__llama_rollback_error": "gone"}
    hostvars = {"head": found, "w": {"__llama_failure": ""} if "w" in hosts else {}}
    known = {
        **templates(task["vars"]),
        **{"hostvars": {name: {"inventory_hostname": name, **one} for name, one in hostvars.items()}},
        **{"__llama_batch_hosts": ["head", "w"], "__llama_changes": {"outdated_hosts": ["head", "w"]}},
        **{"__llama_plan": {"id": "a", "release": {"ref": "x"}}, "__llama_rollback_serves": serves},
        **{"__llama_rollback": {"target": {"id": "b", "release": "r", "differing_variables": []}}},
    }
    assert said in rendered(task["ansible.builtin.fail"]["msg"], known)


USED = {"hosts": {"box": playbook_runs.LOCAL}}


def members(*hosts):
    """Groups of a cluster with these heads, workers and balancers."""
    names = ("llama_head", "llama_workers", "llama_balancer")
    return {"llama_cluster": {"children": {name: {"hosts": dict.fromkeys(own)} for name, own in zip(names, hosts)}}}


RETIRED = {"llama_cluster": USED, "llama_head": USED, "llama_retired": USED}
HEADS = ["a", "b"]
RUNS = {
    "no host": ("stop.yml", {"llama_head": USED}, "--skip-tags notest,molecule-idempotence-notest"),
    "retired and used": ("stop.yml", RETIRED, ""),
    "no tags": ("stop.yml", {}, "--tags plan"),
    "unknown tag": ("site.yml", {}, "--skip-tags x"),
    "no replica": ("site.yml", members(HEADS, ["w"], ["lb"]), ""),
    "two balancers": ("site.yml", members(HEADS, [], ["x", "y"]), ""),
    "loopback": ("site.yml", members(HEADS, [], ["b"]), ""),
}
REFUSALS = {
    "no host": 'is in the group "llama_cluster" and in llama_head or llama_workers',
    "retired and used": "These hosts are in llama_retired, and in llama_head or llama_workers as well: box. Remove a host from",
    "no tags": "contains plan, but this playbook has no tags: run it without tags",
    "unknown tag": "contains x, but this playbook has only the tags plan, build, services, verify: use",
    "no replica": "These workers do not belong to exactly one replica: w.",
    "two balancers": "llama_balancer contains x, y, but a cluster has only one",
    "loopback": "The balancer cannot reach a: set llama_server_host to 0.0.0.0",
}


@pytest.mark.programs
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_cannot_be_meant_ends_before_any_host_is_asked(tmp_path, name):
    playbook, groups, arguments = RUNS[name]
    status, printed = playbook_runs.run(tmp_path, ROOT / "playbooks" / playbook, groups, *arguments.split())
    shown = " ".join(printed.split())
    assert status == 2
    assert REFUSALS[name] in shown
    assert "PLAY [Stop]" not in shown
    assert "PLAY [Plan]" not in shown
