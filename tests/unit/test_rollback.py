"""Rollback: which plan a cluster goes back to, what is done on each host, what is reported, and the gate afterwards."""

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import rollback as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import rollback, rollback_report
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import (
    Health,
    ServedFallback,
    ServerEvidence,
)
from conftest import typed
from support import verification
from support.actions import run
from support.drift import drifts, typed_drifts
from support.playbook_runs import Operator
from support.rollbacks import NAMES, completed, placed, record_of, serve, with_id
from test_docs import ROOT

DECLARED = '{"source": "pypi", "version": "0.3.1"}'


def summary(number, when, state="served", head=False, **others):
    release = {"release": f"pypi-b{number}", "release_id": f"b{number}-0123", "build": number}
    known = {"id": f"{number:016x}", "time": when, "state": state, **release}
    return {**known, "cluster": "llama_cluster", "hosts": list(NAMES), "head": head, **others}


def recorded(*entries):
    """The same plans on three hosts; each entry is number, time and state."""
    return {
        name: {"plans": [summary(*entry, head=name == "head") for entry in entries], "unreadable": []} for name in NAMES
    }


def choose(answers, heads=("head",), **others):
    return rollback.choose("llama_cluster", heads, rollback.histories(answers), **others)


def chosen(answers, **others):
    return int(choose(answers, **others).id, 16)


UNFINISHED = ((1, 10), (2, 20), (3, 30, "applying"))


def test_the_plan_before_is_the_one_to_go_back_to():
    assert chosen(recorded((1, 10), (2, 20), (3, 30))) == 2
    assert chosen(recorded((1, 10), (2, 20, "applying"), (3, 30))) == 1, "a plan that never served is skipped"
    assert chosen(recorded((1, 10), (2, 20))) == 1
    assert chosen(recorded((1, 30), (2, 20))) == 2, "and back again"


def test_while_a_change_is_not_finished_the_last_plan_that_served_is():
    answers = recorded(*UNFINISHED)
    assert chosen(answers) == chosen(answers, failed=f"{3:016x}") == 2
    del answers["worker2"]["plans"][2]
    assert chosen(answers) == 2
    answers = recorded((1, 10), (2, 20))
    answers["worker2"]["plans"][1]["state"] = "applying"
    assert chosen(answers) == 1, "the run was killed while it recorded that the plan serves"


@pytest.mark.parametrize("wanted", ["pypi-b1", "b1", "b1-0123", "1", f"{1:016x}"])
def test_a_plan_is_named_by_its_id_or_by_its_release(wanted):
    assert chosen(recorded((1, 10), (2, 20), (3, 30)), wanted=wanted) == 1


def test_a_wish_that_no_host_has_recorded_is_answered_with_what_they_have():
    with pytest.raises(Refusal, match="No recorded plan is 'b9'") as refused:
        chosen(recorded((1, 10)), wanted="b9")
    assert "worker2: 0000000000000001 (pypi-b1, served)" in str(refused.value)


def test_without_another_plan_that_served_there_is_nothing_to_go_back_to():
    with pytest.raises(Refusal, match="nothing to go back to"):
        chosen(recorded((1, 10), (2, 20)), failed=f"{2:016x}")
    for answers in ({}, {"head": {"plans": [], "unreadable": []}}, recorded((1, 10, "applying"))):
        with pytest.raises(Refusal, match="There is no plan to go back to"):
            chosen(answers, failed=f"{1:016x}")


NOT_EVERYWHERE = {
    "has no part on worker1": lambda answers: answers["worker1"]["plans"].pop(0),
    "belongs to the cluster 'other' on worker1": lambda answers: answers["worker1"]["plans"][0].update(cluster="other"),
    "never served on worker1": lambda answers: answers["worker1"]["plans"][0].update(state="applying"),
    "names other hosts on worker1": lambda answers: answers["worker1"]["plans"][0].update(hosts=["head", "worker1"]),
    "has no head": lambda answers: answers["head"]["plans"][0].update(head=False),
    "has no part on worker2.* does not come back, remove worker2 from the inventory, set llama_release: ": (
        lambda answers: answers.pop("worker2")
    ),
    "cannot be used: torn": lambda answers: answers["worker1"].update(
        plans=[], unreadable=["/opt/llamacpp/plans/1.json cannot be used: torn"]
    ),
}


@pytest.mark.parametrize("reason", NOT_EVERYWHERE)
def test_all_hosts_go_back_to_the_same_plan_or_none(reason):
    answers = recorded((1, 10), (2, 20))
    NOT_EVERYWHERE[reason](answers)
    with pytest.raises(Refusal, match=reason):
        chosen(answers, wanted="b1")


def test_a_host_that_is_lost_in_the_middle_does_not_keep_the_others():
    answers = recorded((1, 10), (2, 20, "applying"))
    del answers["worker2"]
    target = choose(answers, failed=f"{2:016x}", lost=["worker2"])
    assert (int(target.id, 16), target.hosts) == (1, ("head", "worker1"))
    with pytest.raises(Refusal, match="has no head"):
        choose({"worker1": answers["worker1"]}, failed=f"{2:016x}", lost=["head", "worker2"])


def without(*names, spared):
    """What hosts answer while others do not: two plans served, of which one has hosts that may be away."""
    answers = {name: answer for name, answer in recorded((1, 10), (2, 20)).items() if name not in names}
    answers["head"]["plans"][0].update(spared=spared, declared=DECLARED)
    return answers


@pytest.mark.parametrize(
    "away, spared",
    [
        (("worker2",), {"worker2": True}),
        (("worker2",), {"worker2": False}),
        (("worker1", "worker2"), {"worker1": False, "worker2": True}),
    ],
)
def test_hosts_that_do_not_answer_are_left_out_where_the_head_serves_without_them(away, spared):
    target = choose(without(*away, spared=spared), away=away)
    assert (int(target.id, 16), target.away, target.declared) == (1, away, DECLARED)
    assert target.hosts == tuple(name for name in NAMES if name not in away)


BOTH = ["worker1", "worker2"]
NEEDED = {
    "no fallback": (["worker2"], {"worker1": True}, ["worker2"], "needs worker2, which does not answer, and the head"),
    "a plan without that entry": (["worker2"], None, ["worker2"], "needs worker2"),
    "two at once": (BOTH, {"worker1": True, "worker2": True}, BOTH, "needs worker1, w"),
    "it failed": (["worker2"], {"worker2": True}, [], "has no part on worker2, or the host failed above"),
    "one of each": (BOTH, {"worker2": True}, ["worker2"], "no part on worker1, .*, and it needs worker2"),
}


@pytest.mark.parametrize("names, spared, away, reason", NEEDED.values(), ids=NEEDED)
def test_a_host_that_the_head_needs_is_named_with_a_remedy(names, spared, away, reason):
    with pytest.raises(Refusal, match=reason) as refused:
        choose(without(*names, spared=spared), wanted="b1", away=away)
    assert f"remove {', '.join(names)} from the inventory, set llama_release: {DECLARED}" in str(refused.value)


def test_a_host_that_was_away_gets_the_plan_of_the_others_when_it_answers_again():
    """It still has the plan that they left."""
    answers = recorded((1, 30), (2, 20))
    answers["worker2"]["plans"][0]["time"] = 10
    assert chosen(answers) == 1


def test_hosts_that_joined_since_are_left_out():
    answers = recorded((1, 10), (2, 20))
    for answer in answers.values():
        answer["plans"][0]["hosts"] = ["head", "worker1"]
    del answers["worker2"]["plans"][0]
    target = choose(answers)
    assert (int(target.id, 16), target.hosts, target.uninvolved) == (1, ("head", "worker1"), ("worker2",))
    for name in ("head", "worker1"):
        answers[name]["plans"][0]["time"] = 30
    assert chosen(answers) == 2, "and the next rollback goes forward"


def test_no_worker_takes_the_place_of_a_head_that_is_lost():
    """The gate would ask it whether the cluster serves."""
    answers = recorded((1, 10), (2, 20, "applying"))
    del answers["head"]
    failed = f"{2:016x}"
    answers["worker1"]["plans"][0]["head"] = True
    with pytest.raises(Refusal, match="has no head among the hosts that answered"):
        choose(answers, failed=failed, lost=["head"])
    moved = choose(answers, ["worker2"], failed=failed, lost=["head"])
    assert moved.head == "worker1", "the inventory has moved the head since"
    answers["worker1"]["plans"][0]["head"] = False
    with pytest.raises(
        Refusal, match="make another host the head in the inventory, set llama_release: pypi-b1 and run"
    ):
        choose(answers, away=["head"])


def test_a_worker_cannot_invent_a_plan():
    answers = recorded((1, 10), (2, 20))
    answers["worker1"]["plans"].append(summary(9, 99, head=True, hosts=["worker1"]))
    with pytest.raises(Refusal, match="the head of the inventory"):
        chosen(answers, wanted="b9")
    answers["worker1"]["plans"][0]["head"] = True
    assert choose(answers, wanted="b1").head == "head"


def test_a_history_of_another_form_is_refused():
    answers = recorded((1, 10), (2, 20))
    answers["worker1"]["plans"][0]["id"] = "../x"
    with pytest.raises(Refusal, match="What worker1 reports of its plan history"):
        chosen(answers)


@pytest.mark.programs
@pytest.mark.parametrize(
    "spared, reason",
    [
        (None, "needs worker, which does not answer, and the head has no fallback that works without it"),
        ({"worker": True}, "The record of plan 0000000000000001 on head cannot be used: host.prefix is not where"),
    ],
)
def test_a_run_of_the_playbook_counts_a_host_as_away_that_cannot_be_reached(pair, tmp_path, spared, reason):
    """The plan has the installation elsewhere, so that nothing is done."""
    operator = Operator(tmp_path)
    operator.lose("worker")
    record = record_of(placed(completed(pair), tmp_path), "head")
    (operator.prefix / "plans").mkdir(parents=True)
    for number in (1, 2):
        serve(operator.prefix, with_id({**record, "hosts": ["head", "worker"], "spared": spared}, number))
    started = operator.start("any", "true", playbook=ROOT / "playbooks" / "rollback.yml")
    shown = " ".join(started.communicate(timeout=200)[0].split())
    assert started.returncode
    assert reason in shown
    assert "No service was touched" in shown or "There is no plan to go back to" in shown


# ------------------------------------------------------------------------------------------------------------- the steps


@pytest.fixture
def way(pair):
    """A target, and what the hosts answer that can all go back to it."""
    plan = completed(pair)
    found = drifts(plan)
    answers = {
        name: {
            "record": {**record_of(plan, name), "time": 1, "state": "served"},
            "drift": {**found[name], "defined": [service["name"] for service in plan["hosts"][name]["services"]]},
            "missing": [],
            "place": {key: plan["hosts"][name][key] for key in ("prefix", "units")},
        }
        for name in NAMES
    }
    target = rollback.Target(plan["id"], "0.3.36", "head", NAMES)
    return target, answers


def accept(way):
    target, answers = way
    places = {name: rollback.Place(**answer["place"]) for name, answer in answers.items()}
    return rollback.accept(target, "llama_cluster", answers, places)


def test_each_host_gets_its_own_part(way):
    _target, answers = way
    accepted = accept(way)
    assert list(accepted["hosts"]) == list(NAMES)
    for name, steps in accepted["hosts"].items():
        assert steps["part"]["services"] == answers[name]["record"]["host"]["services"]
    assert accepted["plan"]["hosts"] == {"head": answers["head"]["record"]["host"]}, "nothing is added to it either"
    assert accepted["hosts"]["head"]["stop"] == accepted["hosts"]["head"]["restart"] == ["llamacpp-server"]
    assert accepted["hosts"]["worker1"] == {**accepted["hosts"]["worker1"], "stop": [], "restart": [], "remove": []}


def test_what_a_broken_upgrade_left_is_restarted_or_removed(way):
    _target, answers = way
    drift = answers["worker1"]["drift"]
    drift["services"]["llamacpp-worker-cpu"]["state"] = "different"
    drift["stale"] = ["llamacpp-worker-new"]
    answers["worker2"]["drift"]["redefined"] = ["llamacpp-worker-cpu"]
    answers["worker2"]["drift"]["defined"] += ["llamacpp-server"]
    hosts = accept(way)["hosts"]
    steps = [[hosts[name][step] for step in ("stop", "restart", "remove")] for name in ("worker1", "worker2")]
    cpu = ["llamacpp-worker-cpu"]
    assert steps == [[[], cpu, ["llamacpp-worker-new"]], [["llamacpp-server"], cpu, []]]


def test_no_file_of_the_controller_is_copied_because_a_host_names_it(way):
    for file in way[1]["head"]["record"]["host"]["files"]:
        file["source"] = "/etc/shadow"
        file.pop("content", None)
    files = accept(way)["hosts"]["head"]["part"]["files"]
    assert files
    assert not any({"source", "mode"} & set(file) for file in files)


PARTS = {
    "cluster is 'other', not 'llama_cluster'": lambda a: a["worker1"]["record"].update(cluster="other"),
    "id is 'f": lambda a: a["worker1"]["record"].update(id="f" * 16),
    "name is 'worker2', not 'worker1'": lambda a: a["worker1"]["record"].update(name="worker2"),
    "head is not of this host": lambda a: a["worker1"]["record"].update(head=a["head"]["record"]["head"]),
    "on head cannot be used: head is not of": lambda a: a["head"]["record"].pop("head"),
    "not where the installation is now": lambda a: a["worker1"]["place"].update(prefix="/srv/llamacpp"),
    "not a mapping": lambda a: a["worker1"].update(record=None),
    "drift": lambda a: a["worker1"].pop("drift"),
    "llamacpp-worker-cpu is missing": lambda a: a["worker1"]["drift"]["services"].clear(),
    "worker1 could not be reached": lambda a: a.pop("worker1"),
    "cannot serve any more: worker1 lacks b1": lambda a: a["worker1"]["drift"].update(missing_builds=["b1-cpu-1"]),
    "head lacks /m.gguf": lambda a: a["head"].update(missing=["/m.gguf"]),
}


@pytest.mark.parametrize("reason", PARTS)
def test_a_record_that_cannot_be_used_stops_before_any_service(way, reason):
    PARTS[reason](way[1])
    with pytest.raises(Refusal, match=reason) as refused:
        accept(way)
    assert "No service was touched" in str(refused.value)


def test_the_actions_take_answers_as_ansible_registers_them(way):
    target, answers = way
    answers = {name: {**answer, "changed": False} for name, answer in answers.items()}
    facts = {name: {"facts": {**answer.pop("place"), "kernel": "6"}} for name, answer in answers.items()}
    common = {"cluster": "llama_cluster", "heads": ["head"]}
    answers["new"] = {"skipped": True}
    accepted = run(action, state="accepted", target=target._asdict(), answers=answers, facts=facts, **common)
    assert set(accepted["hosts"]) == set(NAMES)
    with pytest.raises(AnsibleActionFail, match=r"host\.prefix is not where"):
        run(action, state="accepted", target=target._asdict(), answers=answers, facts={}, **common)
    histories = {**recorded((1, 10), (2, 20)), "away": {"unreachable": True}, "silent": {}}
    assert run(action, state="chosen", answers=histories, **common)["target"]["id"] == f"{1:016x}"
    with pytest.raises(AnsibleActionFail, match="There is no plan"):
        run(action, state="chosen", answers={}, **common)
    assert run(action, state="failed", id="1", release="b2", reasons={"head": "x"})["failed"]
    assert "did not go back" in run(action, state="failed", reasons={"head": "x"})["msg"]
    assert run(action, state="served", target=target._asdict(), release='"b2"') == {"changed": False}


# ---------------------------------------------------------------------------------------------------------- the sentences

TARGET = rollback.Target("1" * 16, "b1", "head", NAMES)


def failed_change(**others):
    reasons = {"worker1": "it did not start.\nlog \x1b[2J line"}
    values = {"plan": "2" * 16, "release": "b2", "reasons": reasons, "lost": [], "target": TARGET, "why_not": ""}
    return rollback_report.failed_change(rollback_report.Failure(**{**values, **others}))


def test_a_failed_change_says_what_failed_and_what_serves():
    message = failed_change()
    assert "release b2) does not serve: worker1: it did not start.\nlog \\x1b[2J line" in message
    assert "(release b1) serves again" in message
    message = failed_change(target=None, why_not="There is no plan to go back to.")
    assert "does NOT serve again: There is no plan to go back to. Fix" in message
    message = failed_change(reasons={}, lost=["worker2"])
    assert "does not serve: worker2 was lost in the middle." in message
    assert "When worker2 answers again, run rollback.yml" in message
    assert "head, worker1: x." in failed_change(reasons={"head": "x.", "worker1": "x."})


def test_a_rollback_that_did_not_end_can_be_run_again():
    failed = rollback_report.failed_rollback(TARGET, {"head": "x"}, [])
    assert "rollback.yml again with -e llama_rollback_to=1111" in failed
    assert "When worker1 answers again" in rollback_report.failed_rollback(TARGET, {}, ["worker1"])
    refused = rollback_report.failed_rollback(TARGET, {"head": "it lacks a build. No service was touched."}, [])
    assert refused == "The cluster did not go back: head: it lacks a build. No service was touched."


def test_after_a_rollback_the_inventory_and_the_hosts_without_a_part_are_named():
    target = TARGET._replace(uninvolved=("worker9",))
    message = rollback_report.served(target, '"b2"')
    assert 'The inventory has llama_release: "b2"' in message
    assert "worker9 had no part" in message
    assert "has no llama_release" in rollback_report.served(target, '""')
    assert "would serve" in rollback_report.served(target, '"b2"', check=True)
    message = rollback_report.served(TARGET._replace(away=("strix1",), declared=DECLARED), '"b2"')
    assert f"To stay here, set llama_release: {DECLARED}." in message
    assert "strix1 does not answer: the head serves without it" in message
    assert f"run rollback.yml with -e llama_rollback_to={'1' * 16}" in message


def test_a_plan_that_runs_and_is_not_the_inventorys_is_named(pair):
    plan = completed(pair)
    planned = {**summary(1, 2), "id": plan["id"]}
    old = {**summary(1, 3), "id": "1" * 16, "release": "b1"}

    def other_plan(plans, **others):
        found = {name: {**drift, "plans": others.get(name, plans)} for name, drift in drifts(plan).items()}
        return rollback_report.other_plan(typed(plan), typed_drifts(found))

    assert other_plan([planned]) is None
    assert other_plan([]) is None
    message = other_plan([planned], worker1=[planned, old])
    assert "plans release pypi-0.3.36" in message
    assert "on worker1 plan 1111111111111111 with release b1 serves" in message
    assert "was begun and never served" in other_plan([planned, {**old, "state": "applying"}])


# --------------------------------------------------------------------------------------------------------------- the gate


def test_the_gate_takes_the_plan_that_a_head_has_recorded(way):
    del way[1]["head"]["record"]["head"]["fallback_after"]
    plan = accept(way)["plan"]
    plan["model"].update(known_answer=None, name="some model")
    right = verification.unhealthy(
        health=Health(True, "ok"),
        server=ServerEvidence({}, 0, verification.RIGHT),
        fallback=ServedFallback("worker2:cpu", 1),
    )
    assert verification.verify(plan, right, gate=True) == {"changed": False}
    impatient = {**plan, "head": {**plan["head"], "start_timeout": 1}}
    for evidence, reason in (
        (verification.unhealthy("no"), "no"),
        (verification.unhealthy(waits_for=("away",)), "away"),
    ):
        assert f"not healthy: {reason}" in verification.verify(impatient, evidence, gate=True)["msg"]
