"""What an apply has to do is decided once, from the plan and the hosts' answers, which are arguments of one action."""

import re
from contextlib import nullcontext

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import plan_diff
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from conftest import typed
from support.actions import run as run_action
from support.drift import drifts

FOLDER = {"kind": "folder", "subject": "/opt/llamacpp", "text": "folder /opt/llamacpp is missing"}


def run(**arguments):
    return run_action(plan_diff, **arguments)


def answers(plan, **others):
    return {**{name: {"drift": drift, "changed": False} for name, drift in drifts(plan).items()}, **others}


def test_kinds_of_differences_are_reported_for_each_host(pair):
    plan = pair.plan()
    found = answers(plan)
    found["worker1"]["drift"]["differences"] = [FOLDER, {**FOLDER, "kind": "account"}, FOLDER]
    decided = run(plan=plan, answers=found)
    assert decided["kinds"] == {"head": [], "worker1": ["account", "folder"], "worker2": []}
    assert (decided["outdated_hosts"], decided["unreached_hosts"], decided["missing_packages"]) == (["worker1"], [], {})
    assert not run(plan=plan, answers=answers(plan))["changed"]


def test_tools_are_looked_for_on_hosts_whose_facts_are_known(pair):
    plan = pair.plan()
    planned = plan["hosts"]["head"]["tools"]
    facts = {"head": {"facts": {"tools": []}}, "worker1": {"facts": {"tools": list(planned)}}, "worker2": {"facts": []}}
    decided = run(plan=plan, answers=answers(plan), facts=facts)
    assert decided["missing_packages"] == {"head": {"required": planned, "optional": {}}}


def test_a_declared_host_of_one_user_has_its_paths_below_a_home_that_nobody_knows(pair):
    plan = pair.plan()
    plan["hosts"]["head"]["prefix"] = "~/.local/share/llamacpp"
    assert run(plan=plan, answers=answers(plan))["outdated_hosts"] == []
    plan["hosts"]["head"]["prefix"] = "share/llamacpp"
    with pytest.raises(AnsibleActionFail, match=r"plan\.hosts\.head\.prefix is 'share/llamacpp'"):
        run(plan=plan, answers=answers(plan))


@pytest.mark.parametrize(
    "answer, reason",
    [
        (None, "it could not be reached"),
        ({"drift": {}}, "it could not be reached"),
        ({"skipped": True, "changed": False}, "it is only declared in llama_hardware"),
        ({"msg": "one\ntwo \x1b[2J" + "x" * 1000, "drift": {}}, r"one two \x1b[2Jxxx"),
    ],
)
def test_a_host_that_was_not_compared(pair, answer, reason):
    plan = pair.plan()
    found = answers(plan, worker1=answer)
    if answer is None:
        del found["worker1"]
    read = changes.parse_answers(typed(plan).hosts, found)
    assert list(changes.comparable_drifts(read)) == ["head", "worker2"]
    assert read["worker1"].reason.startswith(reason)
    assert len(read["worker1"].reason) <= 500
    assert run(plan=plan, answers=found)["unreached_hosts"] == ["worker1"]


LACKING = "worker1 needs the changes of --tags build (folder, model) before its services can change"
AWAY = "were not reached, or failed above: worker2. The plan changes worker1 only together with them"
UFW = "worker1 uses ufw, which needs the collection community.general"


@pytest.mark.parametrize(
    "kinds, away, parts, refusal",
    [
        (["folder", "model", "tuning"], [], ["services"], LACKING),
        (["folder"], [], ["build", "services"], None),
        (["tuning"], ["worker2"], ["build"], AWAY),
        (["tuning"], ["worker2"], [], None),
        ([], ["worker2"], ["build", "services"], None),
        (["firewall"], [], ["build", "services"], UFW),
    ],
)
def test_a_run_that_would_change_a_part_is_refused_before_it_changes_anything(
    pair, monkeypatch, kinds, away, parts, refusal
):
    monkeypatch.setattr(plan_diff, "missing_collection", lambda manager: {"ufw": "community.general"}.get(manager, ""))
    plan = pair.plan()
    plan["hosts"]["worker1"]["firewall_manager"] = "ufw"
    found = {name: answer for name, answer in answers(plan).items() if name not in away}
    found["worker1"]["drift"]["differences"] = [{**FOLDER, "kind": kind} for kind in kinds]
    with pytest.raises(AnsibleActionFail, match=re.escape(refusal)) if refusal else nullcontext():
        run(plan=plan, answers=found, parts=parts)


def test_the_page_is_shown_and_written(pair, monkeypatch, tmp_path):
    plan = pair.plan()
    shown = []
    monkeypatch.setattr(output.Display, "display", lambda self, text: shown.append(text))
    found = answers(plan)
    del found["worker2"]
    run(plan=plan, answers=found, page=True, report=str(tmp_path / "report.html"))
    for text in (shown[0], (tmp_path / "report.html").read_text()):
        assert "What site.yml would change" in text
        assert "worker1  matches the plan" in text
        assert "worker2  was not compared: it could not be reached" in text


@pytest.mark.parametrize(
    "where, answer",
    [
        ("drift.differences", {"differences": [{**FOLDER, "text": "a\x1b]0;x"}]}),
        ("drift.services.llamacpp-worker-cpu", {"services": {}}),
        ("it is", "drift"),
    ],
)
def test_a_report_of_another_form_is_refused(pair, where, answer):
    plan = pair.plan()
    found = answers(plan)
    found["worker1"] = {"drift": {**found["worker1"]["drift"], **answer}} if isinstance(answer, dict) else answer
    with pytest.raises(AnsibleActionFail) as raised:
        run(plan=plan, answers=found)
    assert f"this version's format ({where}" in str(raised.value)
    assert str(raised.value).isprintable()
