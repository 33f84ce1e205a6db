"""What an apply has to do is decided once, from the plan and the hosts' answers, which are arguments of one action."""

from unittest import mock

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import compare
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import build_registry
from test_planning import drifts

FOLDER = {"kind": "folder", "subject": "/opt/llamacpp", "text": "folder /opt/llamacpp is missing"}


def run(**arguments):
    """What the action returns. It is given no variables, so it cannot read any."""
    task = mock.Mock(args=arguments, async_val=0, action="llamacpp.cluster.compare")
    return compare.ActionModule(task, mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock()).run(task_vars={})


def answers(plan, **others):
    return {**{name: {"drift": drift, "changed": False} for name, drift in drifts(plan).items()}, **others}


def test_nothing_is_changed_while_all_is_as_planned(pair):
    plan = pair.plan()
    decided = run(plan=plan, answers=answers(plan))
    assert not decided["changed"]
    assert decided["kinds"] == {"head": [], "worker1": [], "worker2": []}
    assert (decided["behind"], decided["unreached"], decided["lacking"]) == ([], [], {})


def test_the_page_is_written_where_it_is_asked_for(pair, tmp_path):
    plan = pair.plan()
    paths = {name: str(tmp_path / f"{name}.html") for name in ("html", "report")}
    run(plan=plan, answers=answers(plan), page=True, **paths)
    pages = {(tmp_path / f"{name}.html").read_text() for name in paths}
    assert len(pages) == 1
    assert "worker1  is as planned" in pages.pop()


def test_kinds_of_differences_are_told_for_each_host(pair):
    plan = pair.plan()
    found = answers(plan)
    found["worker1"]["drift"]["differences"] = [FOLDER, {**FOLDER, "kind": "account"}, FOLDER]
    decided = run(plan=plan, answers=found)
    assert decided["kinds"] == {"head": [], "worker1": ["account", "folder"], "worker2": []}
    assert decided["behind"] == ["worker1"]


def test_tools_are_looked_for_on_hosts_whose_facts_are_given(pair):
    plan = pair.plan()
    planned = plan["hosts"]["head"]["tools"]
    facts = {"head": {"facts": {"tools": []}}, "worker1": {"facts": {"tools": list(planned)}}, "worker2": {"facts": []}}
    decided = run(plan=plan, answers=answers(plan), facts=facts)
    assert decided["lacking"] == {"head": {"required": planned, "optional": {}}}


@pytest.mark.parametrize(
    "answer, reason",
    [
        (None, "it could not be reached"),
        ({}, "it could not be reached"),
        ({"drift": {}}, "it could not be reached"),
        ({"drift": None}, "it could not be reached"),
        ({"skipped": True, "changed": False}, "its hardware is declared in llama_hardware"),
        ({"msg": "Something else already uses 192.0.2.11:50052", "drift": {}}, "Something else already uses"),
    ],
)
def test_a_host_that_was_not_compared(pair, answer, reason):
    plan = pair.plan()
    found = answers(plan, worker1=answer)
    if answer is None:
        del found["worker1"]
    compared = changes.compare(plan, found)
    assert list(compared.drifts) == ["head", "worker2"]
    assert reason in compared.without["worker1"]
    assert run(plan=plan, answers=found)["unreached"] == ["worker1"]


def test_the_page_is_shown_and_written(pair, monkeypatch, tmp_path):
    plan = pair.plan()
    shown = []
    monkeypatch.setattr(output.Display, "display", lambda self, text: shown.append(text))
    found = answers(plan)
    del found["worker2"]
    run(plan=plan, answers=found, page=True, html=str(tmp_path / "plan.html"))
    for text in (shown[0], (tmp_path / "plan.html").read_text()):
        assert "What site.yml would change" in text
        assert "worker1  is as planned" in text
        assert "worker2  was not compared: it could not be reached" in text


def test_of_a_plan_for_the_staging_ports_it_says_what_stands_in_the_way(local):
    plan = local.plan(staging=True)
    room = {"drift": drifts(plan)["here"], "free_mib": {"CPU": 65536}}
    assert run(plan=plan, answers={"here": room}) == {"changed": False, "obstacles": []}
    for answer in ({}, {"drift": {}, "free_mib": {}}, {"free_mib": {}}, {**room, "free_mib": None}):
        assert run(plan=plan, answers={"here": answer})["obstacles"] == ["here could not be reached"]
    refused = {"schema": 1, "cluster": "x", "refused": True, "fits": False, "reasons": ["no head"]}
    assert run(plan=refused, answers={})["obstacles"] == ["no head"]


DRIFT = {
    "services": [
        {},
        {"llamacpp-worker-cpu": {"state": "\x1b[2J", "pid": 1, "addresses": [], "clients": []}},
        {"llamacpp-worker-cpu": {"state": "running", "pid": -1, "addresses": [], "clients": []}},
        {"llamacpp-worker-cpu": {"state": "running", "pid": 1, "addresses": "x", "clients": []}},
        [],
    ],
    "differences": [[{}], [{**FOLDER, "text": "a\x1b]0;x"}], [{**FOLDER, "kind": "other"}], [FOLDER] * 2000, {}],
    "stale": [["a\nb"], "llamacpp-worker-x", [1]],
    "missing_builds": [None, [None]],
    "running_releases": [["x" * 5000]],
    "received": [{"x": 1}, {"x": "a\x1b"}, ["x"], "x"],
}


@pytest.mark.parametrize("part, value", [(part, value) for part, values in DRIFT.items() for value in values])
def test_a_host_may_report_anything_of_itself(pair, part, value):
    plan = pair.plan()
    found = answers(plan)
    found["worker1"]["drift"][part] = value
    with pytest.raises(AnsibleActionFail) as raised:
        run(plan=plan, answers=found)
    assert str(raised.value).startswith(
        f"What worker1 reports of itself is not as this version of the collection reads it (drift.{part}"
    )
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("answer", [["drift"], "drift", {"drift": ["x"]}, {"drift": 1}, {"free_mib": {"CPU": "x"}}])
def test_an_answer_of_another_shape(pair, answer):
    plan = pair.plan()
    with pytest.raises(AnsibleActionFail, match="What worker1 reports of itself"):
        run(plan=plan, answers=answers(plan, worker1=answer))


def test_an_error_of_a_host_is_shown_on_one_line(pair):
    plan = pair.plan()
    compared = changes.compare(plan, answers(plan, worker1={"msg": "one\ntwo \x1b[2J" + "x" * 1000}))
    assert compared.without["worker1"].startswith(r"one two \x1b[2Jxxx")
    assert len(compared.without["worker1"]) == 500


def test_a_host_with_another_release_than_recorded_is_warned_of(pair, monkeypatch, tmp_path):
    """The controller's own cache is asked, and the release is installed again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warned = []
    monkeypatch.setattr(compare.display, "warning", warned.append)
    plan = pair.plan()
    identity = plan["hosts"]["head"]["builds"][0]["id"]
    files = {"bin/llama-server": "1" * 64}
    build_registry.Built(plan["cluster"], "head", identity, plan["hosts"]["head"]["prefix"]).watch({"files": files})
    found = answers(plan)
    for name in found:
        found[name]["drift"]["installed"] = {identity: files if name != "worker2" else {"bin/llama-server": "2" * 64}}
    assert run(plan=plan, answers=found)["shared"] == {identity: "head"}
    assert warned == [
        f"release {identity} on worker2 is not the one that the controller recorded of head: site.yml installs it again. If nobody changed it "
        "on purpose, that host may be taken over."
    ]
