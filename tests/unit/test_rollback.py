"""Rollback: which plan a cluster goes back to, what is done on each host, and the gate afterwards."""

import copy
import json

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import rollback as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import rollback
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import types
from conftest import typed
from support import verification
from support.actions import run
from support.drift import drifts, typed_drifts
from support.rollbacks import NAMES, completed, record_of, with_id


@pytest.fixture
def kept(pair):
    """What three hosts answer by numbers of plans: host → what it keeps."""
    plan = completed(pair)
    found = drifts(plan)

    def compared(name, number):
        drift = {**found[name], "defined": [service["name"] for service in plan["hosts"][name]["services"]]}
        return {"plan": with_id(record_of(plan, name), number), "drift": copy.deepcopy(drift), "missing": []}

    def answers(**places):
        return {name: {place: compared(name, number) for place, number in places.items()} for name in NAMES}

    return answers


def choose(answers, heads=("head",), **others):
    head, plan = rollback.choose_target(rollback.parse_kept_plans(answers), heads, **others)
    return head, int(plan.id, 16)


def steps(answers, **others):
    hosts = rollback.parse_kept_plans(answers)
    return rollback.host_steps(hosts, *rollback.choose_target(hosts, ["head"]), **others)


def test_while_a_change_is_not_finished_it_is_the_plan_that_serves(kept):
    assert choose(kept(next=3, now=2, before=1)) == ("head", 2)
    assert choose(kept(next=3, now=2, before=1), failed_plan_id=f"{3:016x}") == ("head", 2)
    killed = kept(now=3, before=2)
    killed["worker2"] = kept(next=3, now=2, before=1)["worker2"]
    assert choose(killed) == ("head", 3), "the run was killed while it noted that the plan serves"
    away = kept(now=1, before=2)
    away["worker2"] = kept(now=2, before=1)["worker2"]
    assert choose(away) == ("head", 1), "a host that was away gets the plan of the others"


def test_a_head_that_moved_goes_back_to_where_it_was(kept):
    """worker1 is the head of plan 2, head that of plan 1."""
    answers = kept(now=2, before=1)
    answers["worker1"]["now"]["plan"]["head"] = answers["head"]["now"]["plan"].pop("head")
    assert choose(answers, ["worker1"]) == ("head", 1)


def test_without_a_plan_that_served_there_is_nothing_to_go_back_to(kept):
    for answers, reason in (
        ({}, "No head answered with a kept plan that has served"),
        (kept(next=1), "No head answered with a kept plan that has served"),
        (kept(now=1), "No plan served before plan 0000000000000001"),
    ):
        with pytest.raises(Refusal, match=reason):
            choose(answers)
    with pytest.raises(Refusal, match="is the last plan that served, so there is nothing to return to"):
        choose(kept(now=1, before=2), failed_plan_id=f"{1:016x}")
    with pytest.raises(Refusal, match="no earlier plan has served on this cluster, so there is nothing to return to"):
        choose(kept(next=1), failed_plan_id=f"{1:016x}")


def test_a_host_without_its_part_stops_the_way_back_unless_this_run_lost_it(kept):
    answers = kept(next=2, now=1)
    del answers["worker2"]
    with pytest.raises(Refusal, match=r"needs hosts that did not answer .*: worker2\. .* No service was touched"):
        steps(answers)
    assert set(steps(answers, lost_hosts=["worker2"])["hosts"]) == {"head", "worker1"}


def test_hosts_that_joined_since_are_left_out(kept):
    answers = kept(now=2, before=1)
    for name in ("head", "worker1"):
        answers[name]["before"]["plan"]["hosts"] = ["head", "worker1"]
    del answers["worker2"]["before"]
    assert set(steps(answers)["hosts"]) == {"head", "worker1"}


@pytest.mark.parametrize("places, place", [({"next": 2, "now": 1}, "next"), ({"now": 2, "before": 1}, "now")])
def test_a_head_on_a_host_that_joined_since_is_removed_before_it_holds_the_workers(kept, places, place):
    answers = kept(**places)
    for name in NAMES:
        for found in answers[name].values():
            found["plan"]["hosts"] = ["head", "worker1"]
    answers["worker2"] = {place: answers["worker2"][place]}
    assert steps(answers)["heads"] == {}
    answers["worker2"][place]["drift"]["defined"].append("llamacpp-server")
    found = steps(answers)
    assert set(found["hosts"]) == {"head", "worker1"}
    assert found["heads"]["worker2"]["remove"] == ["llamacpp-server"]
    assert found["heads"]["worker2"]["part"]["service_manager"] == "systemd"
    asked = {name: {"kept_plans": own} for name, own in answers.items()}
    assert run(action, answers=asked, heads=["head"])["target"]["uninvolved_hosts"] == []


def test_each_host_gets_its_own_part(kept):
    answers = kept(now=2, before=1)
    found = steps(answers)
    assert list(found["hosts"]) == list(NAMES)
    for name, own in found["hosts"].items():
        assert own["part"]["services"] == answers[name]["before"]["plan"]["host"]["services"]
    assert found["plan"]["hosts"] == {"head": answers["head"]["before"]["plan"]["host"]}
    assert found["hosts"]["head"]["stop"] == found["hosts"]["head"]["restart"] == ["llamacpp-server"]
    assert found["hosts"]["worker1"] == {**found["hosts"]["worker1"], "stop": [], "restart": [], "remove": []}


def test_what_a_broken_upgrade_left_is_restarted_or_removed(kept):
    answers = kept(next=2, now=1)
    drift = answers["worker1"]["now"]["drift"]
    drift["services"]["llamacpp-worker-cpu"]["state"] = "different"
    drift["unplanned"] = ["llamacpp-worker-new"]
    answers["worker2"]["now"]["drift"]["redefined"] = ["llamacpp-worker-cpu"]
    answers["worker2"]["now"]["drift"]["defined"] += ["llamacpp-server"]
    hosts = steps(answers)["hosts"]
    found = [[hosts[name][step] for step in ("stop", "restart", "remove")] for name in ("worker1", "worker2")]
    cpu = ["llamacpp-worker-cpu"]
    assert found == [[[], cpu, ["llamacpp-worker-new"]], [["llamacpp-server"], cpu, []]]


def test_no_file_of_the_controller_is_copied_because_a_host_names_it(kept):
    answers = kept(next=2, now=1)
    assert steps(answers)["hosts"]["head"]["part"].get("files", []) == [], "what is as kept is not written again"
    for file in answers["head"]["now"]["plan"]["host"]["files"]:
        answers["head"]["now"]["drift"]["changed_files"].append(file["path"])
        file["source"] = "/etc/shadow"
        file.pop("content", None)
    files = steps(answers)["hosts"]["head"]["part"]["files"]
    assert files
    assert not any({"source", "mode"} & set(file) for file in files)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda own: own["drift"].update(missing_builds=["b1-cpu-1"]), "worker1 lacks b1"),
        (lambda own: own.update(missing=["/m.gguf"]), "worker1 lacks /m.gguf"),
    ],
)
def test_what_was_removed_since_stops_before_any_service(kept, change, reason):
    answers = kept(next=2, now=1)
    change(answers["worker1"]["now"])
    with pytest.raises(Refusal, match=rf"can no longer serve: {reason}.*No service was touched"):
        steps(answers)


def test_the_action_takes_answers_as_ansible_registers_them(kept):
    answers = {name: {"kept_plans": own, "changed": False} for name, own in kept(now=2, before=1).items()}
    more = {"new": {"skipped": True}, "away": {"unreachable": True}}
    found = run(action, answers={**answers, **more}, heads=["head"])
    assert (found["target"]["id"], found["target"]["head"], found["target"]["uninvolved_hosts"]) == (
        f"{1:016x}",
        "head",
        [],
    )
    assert set(found["hosts"]) == set(NAMES)
    answers["worker1"]["kept_plans"]["now"]["plan"]["id"] = "../x"
    with pytest.raises(AnsibleActionFail, match="The report from worker1 about its kept plans"):
        run(action, answers=answers, heads=["head"])


BEFORE = {
    "a": {"x": "1", "same": "1"},
    "b": {"x": "1", "same": "1"},
    "gone": {"x": "9"},
    "long": {"x": "-" * 200 + "ab"},
    "json": {"x": json.dumps({"url": "-" * 200, "build": 1, "old": [1]}), "y": '[{"port": 1}, {"port": 2}]'},
}
JSON = {"x": json.dumps({"url": "-" * 200, "build": 2}), "y": '[{"port": 1}, {"port": 3}, {"port": 4}]'}


@pytest.mark.parametrize(
    "after, said",
    [
        ({"a": {"x": "2", "same": "1"}, "b": {"x": "2", "same": "1"}}, ["x: 1 → 2"]),
        ({"a": {"x": "1", "same": "1"}, "b": {"x": "2", "same": "1"}}, ["x: 1 → 2 on b"]),
        ({"a": {"same": "1"}, "b": {"same": "1"}}, ["x: 1 → not set"]),
        ({"a": {**BEFORE["a"], "new\n": "\x1b"}, "b": BEFORE["b"]}, ["new\\n: not set → \\x1b on a"]),
        ({**BEFORE, "new": {"x": "5"}}, []),
        ({"json": JSON}, ["x.build: 1 → 2", "x.old: [1] → not set", "y.1.port: 2 → 3", 'y.2: not set → {"port": 4}']),
        ({"long": {"x": "-" * 200 + "c"}}, [f"x: …{'-' * 40}ab → …{'-' * 40}c"]),
        ({"gone": {"x": "[" * 60000}}, [f"x: 9 → {'[' * rollback.MAX_VALUE_LENGTH}"]),
    ],
)
def test_variables_that_differ_between_two_plans_are_named_and_no_others(after, said):
    assert rollback.describe_differences(BEFORE, after) == said


@pytest.mark.parametrize("places", [{"now": 2, "before": 1}, {"next": 2, "now": 1}])
def test_a_way_back_names_the_variables_of_the_plan_that_is_left(kept, places):
    answers = kept(**places)
    for own in answers.values():
        for number, one in ((places[place], compared["plan"]) for place, compared in own.items()):
            one["variables"] = {"llama_release": "b1", "llama_server_context": f"{number}096"}
    registered = {name: {"kept_plans": own} for name, own in answers.items()}
    target = run(action, answers=registered, heads=["head"])["target"]
    assert (target["id"], target["differing_variables"]) == (f"{1:016x}", ["llama_server_context: 2096 → 1096"])


def test_a_plan_that_runs_and_is_not_the_inventorys_is_named(pair):
    plan = completed(pair)

    def other_plan(**lasts):
        found = {name: {**drift, "last": lasts.get(name)} for name, drift in drifts(plan).items()}
        return rollback.other_plan_note(typed(plan), typed_drifts(found), lambda _: {"llama_release": "b2", "x": "1"})

    planned = {"id": plan["id"], "release": "b2", "declared": "b2", "served": True}
    old = {**planned, "id": "1" * 16, "release": "b1", "variables": {"llama_release": "b1", "x": "1"}}
    assert other_plan() is None
    assert other_plan(head=planned) is None
    message = other_plan(head=planned, worker1=old)
    assert f"plan is {plan['id']} with release pypi-0.3.36" in message
    assert "plan 1111111111111111 with release b1 serves on " in message
    assert message.endswith("To keep that plan, change: llama_release: b2 → b1.")
    same = other_plan(head={**old, "variables": {"llama_release": "b2", "x": "1"}})
    assert same.endswith("The variables are the same; hardware, software or the collection has changed.")
    unfinished = other_plan(head={**old, "served": False, "release": plan["release"]["ref"]})
    assert "was applied in part but never served on head: site.yml applies the" in unfinished
    assert "release pypi" not in unfinished


def test_the_gate_takes_the_plan_that_a_head_keeps(kept):
    answers = kept(now=2, before=1)
    del answers["head"]["before"]["plan"]["head"]["fallback_after"]
    plan = steps(answers)["plan"]
    plan["model"].update(known_answer=None, name="some model")
    right = verification.unhealthy(
        health=types.Health(True, "ok"),
        server=types.ServerEvidence({}, 0, verification.RIGHT),
        fallback=types.ServedFallback("worker2:cpu", 1),
    )
    assert verification.verify(plan, right, gate=True) == {"changed": False}
    impatient = {**plan, "head": {**plan["head"], "start_timeout": 1}}
    for evidence, reason in (
        (verification.unhealthy("no"), "no"),
        (verification.unhealthy(waits_for=("away",)), "away"),
    ):
        assert f"not healthy: {reason}" in verification.verify(impatient, evidence, gate=True)["msg"]
