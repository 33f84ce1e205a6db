"""What hosts keep of their plans, which plan a cluster goes back to, and what a host that lies about it reaches."""

import copy
import errno
import json
import os
import stat
import time
from unittest import mock

import faults
import pytest
import yaml
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import kept as action
from ansible_collections.llamacpp.cluster.plugins.action import verify as verify_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import plan_history as plans
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes, rollback
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import verification
from ansible_collections.llamacpp.cluster.plugins.modules import kept as module
from conftest import complete, identity
from playbook_runs import Operator
from test_docs import ROOT
from test_planning import drifts

MODULE = module
NAMES = ("head", "worker1", "worker2")


def completed(cluster):
    return complete(cluster.plan())


def placed(plan, prefix):
    """The same plan for an installation elsewhere."""
    return json.loads(json.dumps(plan).replace("/opt/llamacpp", str(prefix)))


def record_of(plan, name):
    sources = {file["source"]: "text" for file in plan["hosts"][name]["files"] if "source" in file}
    return rollback.record(plan, name, sources)


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "plans").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def record(pair, prefix):
    return record_of(placed(completed(pair), prefix), "head")


def with_id(record, number):
    return {**record, "id": f"{number:016x}"}


def serve(prefix, record):
    plans.begin(str(prefix), record)
    plans.confirm(str(prefix), record["id"])


def test_a_plan_is_kept_before_it_is_applied_and_noted_when_it_served(prefix, record):
    assert plans.begin(str(prefix), record)
    path = prefix / "plans" / f"{record['id']}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [plan["state"] for plan in plans.summaries(str(prefix))] == ["applying"]
    assert not plans.serves(str(prefix), record["id"])
    assert plans.confirm(str(prefix), record["id"])
    assert plans.serves(str(prefix), record["id"])
    summary = plans.summaries(str(prefix))[0]
    assert (summary["release"], summary["head"], summary["hosts"]) == ("pypi-0.3.36", True, list(NAMES))


def test_what_served_last_is_not_noted_again(prefix, record):
    serve(prefix, record)
    before = (prefix / "plans" / f"{record['id']}.json").read_bytes()
    assert not plans.begin(str(prefix), record)
    assert not plans.confirm(str(prefix), record["id"])
    assert (prefix / "plans" / f"{record['id']}.json").read_bytes() == before


def test_check_mode_writes_nothing(prefix, record):
    assert plans.begin(str(prefix), record, check=True)
    assert not list((prefix / "plans").iterdir())
    assert plans.begin(str(prefix / "missing"), record, check=True)


def test_what_served_is_never_removed_for_what_did_not(prefix, record):
    for number in (1, 2):
        serve(prefix, with_id(record, number))
    for number in range(3, 12):
        plans.begin(str(prefix), with_id(record, number))
    left = plans.summaries(str(prefix))
    assert [int(plan["id"], 16) for plan in left] == [11, 10, 9, 2, 1]
    assert len(left) == history.MOST


def test_the_last_plan_is_the_newest_even_where_the_clock_was_set_back(prefix, record, monkeypatch):
    serve(prefix, with_id(record, 1))
    monkeypatch.setattr(time, "time", lambda: 1.0)
    serve(prefix, with_id(record, 2))
    assert [int(plan["id"], 16) for plan in plans.summaries(str(prefix))] == [2, 1]


@pytest.mark.parametrize("kind", ["full disk", "read-only", "broken disk", "forbidden", "killed"])
def test_nothing_is_lost_where_a_plan_cannot_be_noted(prefix, record, monkeypatch, kind):
    """Whatever write fails, the plan that served is still the one to go back to, and a second try notes the new one."""
    serve(prefix, with_id(record, 1))
    broken = faults.Faults(monkeypatch, kind, str(prefix))
    for number in range(12):
        broken.at, broken.count = number, 0
        try:
            plans.begin(str(prefix), with_id(record, 2))
        except (OSError, faults.Killed):
            broken.at = None
            assert plans.serves(str(prefix), f"{1:016x}")
        broken.at = None
    plans.begin(str(prefix), with_id(record, 2))
    assert [plan["state"] for plan in plans.summaries(str(prefix))] == ["applying", "served"]


def test_a_change_does_not_begin_where_the_plan_cannot_be_noted(call, prefix, record, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{prefix}/plans/x.json")

    monkeypatch.setattr(plans.files, "replace_file", full)
    said = call(state="applying", prefix=str(prefix), record=record)
    assert said["failed"]
    assert "Free some space" in said["msg"]
    plays = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())
    order = [task["name"] for play in plays if play["name"] == "Apply" for task in play["tasks"]]
    noted = order.index("Note on each host what is applied")
    assert noted < order.index("Change the services, and go back where they do not serve")


def spoiled(change):
    def spoil(path, record):
        record = copy.deepcopy(record)
        change(record)
        path.write_text(json.dumps(record))

    return spoil


def link(path, record):
    other = path.with_suffix(".other")
    other.write_text(json.dumps(record))
    path.unlink()
    path.symlink_to(other)


HOSTILE = {
    "torn": (lambda path, record: path.write_text(json.dumps(record)[:-40]), "cannot be used"),
    "empty": (lambda path, record: path.write_text(""), "cannot be used"),
    "a list": (lambda path, record: path.write_text("[]"), "not a JSON object"),
    "nested": (lambda path, record: path.write_text('{"a":' * 999 + "1" + "}" * 999), "nested too deep"),
    "huge": (lambda path, record: os.truncate(path, history.RECORD_BYTES + 1), "has more than"),
    "a link": (link, "symbolic link|Too many levels"),
    "a pipe": (lambda path, record: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    "another id": (spoiled(lambda r: r.update(id="f" * 16)), "it.id|id is"),
    "a schema that is not known": (spoiled(lambda r: r.update(schema=2)), "schema is 2, not 1"),
    "a file outside": (spoiled(lambda r: r["host"]["files"][0].update(path="/etc/passwd")), "not below"),
    "a file that leaves": (
        spoiled(lambda r: r["host"]["files"][0].update(path=r["host"]["prefix"] + "/../../etc/passwd")),
        "not below",
    ),
    "a record outside": (
        spoiled(lambda r: r["host"]["files"].append({"path": r["host"]["prefix"] + "/m", "bytes": 1, "record": "/x"})),
        "not below",
    ),
    "a build with a slash": (spoiled(lambda r: r["host"]["builds"][0].update(id="../x")), "builds"),
    "a service with a slash": (spoiled(lambda r: r["host"]["services"][0].update(name="../x")), "services"),
    "a control character": (spoiled(lambda r: r["host"]["services"][0].update(listens="1\x1b[2J")), "services"),
    "a definition with one": (spoiled(lambda r: r["host"]["services"][0].update(definition="a\x1b[2J")), "no text"),
    "a definition that is none": (spoiled(lambda r: r["host"]["services"][0].update(definition=7)), "no text"),
    "no services": (spoiled(lambda r: r["host"].pop("services")), "services is missing"),
    "no part": (spoiled(lambda r: r.update(host=None)), "host"),
    "a head with another address": (spoiled(lambda r: r["head"].update(own_url="http://evil/x")), "own_url"),
    "a time that nobody can add": (spoiled(lambda r: r["head"].update(fallback_after="60")), "fallback_after"),
    "a time that is none": (spoiled(lambda r: r.update(time="now")), "time"),
    "another manager": (spoiled(lambda r: r["host"].update(service_manager="sh")), "service_manager"),
}


@pytest.mark.parametrize("spoil, said", HOSTILE.values(), ids=HOSTILE)
def test_a_kept_plan_is_read_as_what_anybody_may_have_written(prefix, record, spoil, said):
    serve(prefix, record)
    path = prefix / "plans" / f"{record['id']}.json"
    spoil(path, json.loads(path.read_text()))
    with pytest.raises(Refusal, match=said):
        plans.read(str(prefix), record["id"])
    found = plans.read_all(str(prefix))
    assert (found.records, len(found.unreadable)) == ([], 1)
    assert found.unreadable[0].isprintable()
    assert plans.summaries(str(prefix)) == []
    assert plans.builds(str(prefix)) == set()


@pytest.mark.parametrize("identity", ["../x", "", "x", "a/b", "0123456789ABCDEF", "\x1b[2J" * 4])
def test_an_id_is_never_a_path(prefix, identity):
    with pytest.raises(Refusal, match="is not the id of a plan") as refused:
        plans.read(str(prefix), identity)
    assert str(refused.value).isprintable()


def test_a_folder_that_this_account_may_not_read_keeps_nothing(prefix, monkeypatch):
    def forbidden(_path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", forbidden)
    assert plans.summaries(str(prefix)) == []
    assert plans.builds(str(prefix)) == set()


def test_builds_of_the_last_two_that_served_stay(prefix, record):
    for number, build in enumerate(("a-cpu-1", "b-cpu-1", "c-cpu-1", "d-cpu-1"), 1):
        changed = copy.deepcopy(with_id(record, number))
        changed["host"]["builds"] = [{"id": build, "targets": []}]
        plans.begin(str(prefix), changed)
        if number < 4:
            plans.confirm(str(prefix), changed["id"])
    assert plans.builds(str(prefix)) == {"c-cpu-1", "b-cpu-1"}


def test_a_host_differs_until_its_plan_is_noted_as_one_that_serves(prefix, record):
    summaries = [plans.summary(record)]
    assert [found.kind for found in state._kept(record["id"], [])] == ["kept"]
    assert [found.kind for found in state._kept(record["id"], summaries)] == ["kept"]
    assert not list(state._kept(record["id"], [{**summaries[0], "state": "served"}]))
    assert not list(state._kept(None, []))


def test_a_host_differs_while_a_later_plan_was_begun_and_never_served(prefix, record):
    """As after a run that was killed before it touched a service, when the inventory is what it was."""
    plans.begin(str(prefix), record)
    plans.confirm(str(prefix), record["id"])
    plans.begin(str(prefix), with_id(record, 2))
    assert [found.kind for found in state._kept(record["id"], plans.summaries(str(prefix)))] == ["kept"]
    assert not plans.begin(str(prefix), record)
    assert plans.confirm(str(prefix), record["id"])
    assert not list(state._kept(record["id"], plans.summaries(str(prefix))))


# ------------------------------------------------------------------------------------------------------------ the choice


def summary(number, when, state="served", head=False, **others):
    return {
        "id": f"{number:016x}",
        "time": when,
        "state": state,
        "release": f"pypi-b{number}",
        "release_id": f"b{number}-0123",
        "build": number,
        "cluster": "llama_cluster",
        "hosts": list(NAMES),
        "head": head,
        **others,
    }


def kept_by(*entries):
    """The same plans on three hosts; each entry is number, time and state."""
    return {
        name: {"plans": [summary(*entry, head=name == "head") for entry in entries], "unreadable": []} for name in NAMES
    }


def chosen(answers, **others):
    return int(rollback.choose("llama_cluster", ["head"], answers, **others).id, 16)


def test_the_plan_before_is_the_one_to_go_back_to():
    assert chosen(kept_by((1, 10), (2, 20), (3, 30))) == 2


def test_two_rollbacks_go_back_and_forth():
    assert chosen(kept_by((1, 10), (2, 20))) == 1
    assert chosen(kept_by((1, 30), (2, 20))) == 2


def test_while_a_change_is_not_finished_the_last_that_served_is():
    answers = kept_by((1, 10), (2, 20), (3, 30, "applying"))
    assert chosen(answers) == 2
    del answers["worker2"]["plans"][2]
    assert chosen(answers) == 2


def test_a_run_killed_while_it_noted_that_the_plan_serves():
    answers = kept_by((1, 10), (2, 20))
    answers["worker2"]["plans"][1]["state"] = "applying"
    assert chosen(answers) == 1


def test_a_plan_that_failed_before_is_not_gone_back_to():
    assert chosen(kept_by((1, 10), (2, 20, "applying"), (3, 30))) == 1


@pytest.mark.parametrize("wanted", ["pypi-b1", "b1", "b1-0123", "1", f"{1:016x}"])
def test_a_plan_is_named_by_its_id_or_by_its_release(wanted):
    assert chosen(kept_by((1, 10), (2, 20), (3, 30)), wanted=wanted) == 1


def test_what_is_not_kept_is_named_with_what_is():
    with pytest.raises(Refusal, match="No kept plan is 'b9'") as refused:
        chosen(kept_by((1, 10)), wanted="b9")
    assert "worker2: 0000000000000001 (pypi-b1, served)" in str(refused.value)


def test_by_itself_the_cluster_goes_back_to_what_served_last():
    answers = kept_by((1, 10), (2, 20), (3, 30, "applying"))
    assert chosen(answers, failed=f"{3:016x}") == 2


def test_a_plan_that_served_before_is_repaired_and_not_left():
    with pytest.raises(Refusal, match="nothing to go back to"):
        chosen(kept_by((1, 10), (2, 20)), failed=f"{2:016x}")


@pytest.mark.parametrize("answers", [{}, {"head": {"plans": [], "unreadable": []}}, kept_by((1, 10, "applying"))])
def test_without_a_plan_that_served_nothing_can_be_gone_back_to(answers):
    with pytest.raises(Refusal, match="There is no plan to go back to"):
        chosen(answers, failed=f"{1:016x}")


def lacking(answers):
    del answers["worker1"]["plans"][0]


def foreign(answers):
    answers["worker1"]["plans"][0]["cluster"] = "other"


def never(answers):
    answers["worker1"]["plans"][0]["state"] = "applying"


def others(answers):
    answers["worker1"]["plans"][0]["hosts"] = ["head", "worker1"]


def headless(answers):
    answers["head"]["plans"][0]["head"] = False


def lost(answers):
    del answers["worker2"]


def unreadable(answers):
    answers["worker1"]["plans"].pop(0)
    answers["worker1"]["unreadable"].append("/opt/llamacpp/plans/1.json cannot be used: torn")


NOT_EVERYWHERE = {
    lacking: "has no part on worker1",
    foreign: "belongs to the cluster 'other' on worker1",
    never: "never served on worker1",
    others: "names other hosts on worker1",
    headless: "has no head",
    lost: "has no part on worker2.* does not come back, remove worker2 from the inventory, set llama_release: ",
    unreadable: "cannot be used: torn",
}


@pytest.mark.parametrize("change, said", NOT_EVERYWHERE.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_all_hosts_go_back_to_the_same_plan_or_none(change, said):
    answers = kept_by((1, 10), (2, 20))
    change(answers)
    with pytest.raises(Refusal, match=said):
        chosen(answers, wanted="b1")


def test_a_host_that_is_lost_in_the_middle_does_not_keep_the_others():
    answers = kept_by((1, 10), (2, 20, "applying"))
    del answers["worker2"]
    target = rollback.choose("llama_cluster", ["head"], answers, failed=f"{2:016x}", lost=["worker2"])
    assert (int(target.id, 16), target.hosts) == (1, ("head", "worker1"))
    without = {"worker1": answers["worker1"]}
    with pytest.raises(Refusal, match="has no head"):
        rollback.choose("llama_cluster", ["head"], without, failed=f"{2:016x}", lost=["head", "worker2"])


def without(*names, spared, number=1):
    """What hosts answer while others do not: two plans served, of which one has hosts that may be away."""
    answers = {name: answer for name, answer in kept_by((1, 10), (2, 20)).items() if name not in names}
    answers["head"]["plans"][number - 1].update(spared=spared, declared='{"source": "pypi", "version": "0.3.1"}')
    return answers


@pytest.mark.parametrize("spared", [{"worker2": True}, {"worker2": False}])
def test_a_host_that_does_not_answer_is_left_out_where_the_head_serves_without_it(spared):
    target = rollback.choose("llama_cluster", ["head"], without("worker2", spared=spared), away=["worker2"])
    assert (int(target.id, 16), target.hosts, target.away) == (1, ("head", "worker1"), ("worker2",))
    assert target.declared == '{"source": "pypi", "version": "0.3.1"}'


def test_of_two_hosts_of_which_nothing_is_used_both_may_be_away():
    names = ("worker1", "worker2")
    found = without(*names, spared={"worker1": False, "worker2": True})
    assert rollback.choose("llama_cluster", ["head"], found, away=names).away == names


NOT_WITHOUT = {
    "no fallback": (["worker2"], {"worker1": True}, ["worker2"], "needs worker2, which does not answer, and its head"),
    "an older plan, which says nothing of it": (["worker2"], None, ["worker2"], "needs worker2"),
    "two at once": (
        ["worker1", "worker2"],
        {"worker1": True, "worker2": True},
        ["worker1", "worker2"],
        "needs worker1, w",
    ),
    "it failed, and may answer": (
        ["worker2"],
        {"worker2": True},
        [],
        "has no part on worker2, or the host failed above",
    ),
    "one of each": (
        ["worker1", "worker2"],
        {"worker2": True},
        ["worker2"],
        "no part on worker1, .*, and it needs worker2",
    ),
}


@pytest.mark.parametrize("names, spared, away, said", NOT_WITHOUT.values(), ids=NOT_WITHOUT)
def test_a_host_that_the_head_needs_is_named_with_what_works(names, spared, away, said):
    with pytest.raises(Refusal, match=said) as refused:
        rollback.choose("llama_cluster", ["head"], without(*names, spared=spared), "b1", away=away)
    missing = ", ".join(names)
    assert f'remove {missing} from the inventory, set llama_release: {{"source": "pypi", "version": "0.3.1"}}' in str(
        refused.value
    )


def test_a_host_that_was_away_gets_the_plan_of_the_others_when_it_answers_again():
    """It still has the plan that they left."""
    answers = kept_by((1, 30), (2, 20))
    answers["worker2"]["plans"][0]["time"] = 10
    assert chosen(answers) == 1


def test_a_second_rollback_goes_forward_also_where_a_host_had_joined():
    answers = kept_by((1, 30), (2, 20))
    for entry in (answer["plans"][0] for answer in answers.values()):
        entry["hosts"] = ["head", "worker1"]
    del answers["worker2"]["plans"][0]
    assert chosen(answers) == 2


def test_no_worker_takes_the_place_of_a_head_that_is_lost_in_the_middle():
    """The gate would ask it whether the cluster serves."""
    answers = kept_by((1, 10), (2, 20, "applying"))
    del answers["head"]
    answers["worker1"]["plans"][0]["head"] = True
    with pytest.raises(Refusal, match="has no head among the hosts that answered"):
        rollback.choose("llama_cluster", ["head"], answers, failed=f"{2:016x}", lost=["head"])
    answers["worker1"]["plans"][0]["head"] = False
    with pytest.raises(
        Refusal, match="make another host the head in the inventory, set llama_release: pypi-b1 and run"
    ):
        rollback.choose("llama_cluster", ["head"], answers, away=["head"])
    answers["worker1"]["plans"][0]["head"] = True
    moved = rollback.choose("llama_cluster", ["worker2"], answers, failed=f"{2:016x}", lost=["head"])
    assert moved.head == "worker1"


def test_a_worker_cannot_invent_a_plan():
    answers = kept_by((1, 10), (2, 20))
    answers["worker1"]["plans"].append(summary(9, 99, head=True, hosts=["worker1"]))
    with pytest.raises(Refusal, match="the head of the inventory"):
        chosen(answers, wanted="b9")
    assert chosen(answers, wanted="b1") == 1
    answers["worker1"]["plans"][0]["head"] = True
    assert rollback.choose("llama_cluster", ["head"], answers, "b1").head == "head"


def test_hosts_that_joined_since_are_left_alone():
    answers = kept_by((1, 10), (2, 20))
    for entry in (answer["plans"][0] for answer in answers.values()):
        entry["hosts"] = ["head", "worker1"]
    del answers["worker2"]["plans"][0]
    target = rollback.choose("llama_cluster", ["head"], answers)
    assert (int(target.id, 16), target.hosts, target.left) == (1, ("head", "worker1"), ("worker2",))


@pytest.mark.parametrize(
    "plans",
    [None, [{}], [{**summary(1, 1), "id": "../x"}], [{**summary(1, 1), "time": 1 << 60}]],
)
def test_a_host_may_report_anything(plans):
    answers = {**kept_by((1, 10), (2, 20)), "worker1": {"plans": plans, "unreadable": []}}
    with pytest.raises(Refusal, match="What worker1 reports of the plans that it keeps"):
        chosen(answers)


@pytest.mark.programs
@pytest.mark.parametrize(
    "spared, said",
    [
        (None, "needs worker, which does not answer, and its head serves on no fallback without that"),
        ({"worker": True}, "The part of head in plan 0000000000000001 cannot be used: host.prefix is not where"),
    ],
)
def test_a_run_of_the_playbook_counts_a_host_as_away_that_nobody_can_connect_to(tmp_path, record, spared, said):
    """The plan has the installation elsewhere, so that nothing is done."""
    operator = Operator(tmp_path)
    operator.lose("worker")
    own = {**record, "name": "head", "hosts": ["head", "worker"], "spared": spared}
    (operator.prefix / "plans").mkdir(parents=True)
    for number in (1, 2):
        serve(operator.prefix, with_id(own, number))
    run = operator.start("any", "true", playbook=ROOT / "playbooks" / "rollback.yml")
    shown = " ".join(run.communicate(timeout=200)[0].split())
    assert run.returncode
    assert said in shown
    assert "No service was touched" in shown or "There is no plan to go back to" in shown


# --------------------------------------------------------------------------------------------------------------- the way


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
    target = {"id": plan["id"], "release": "0.3.36", "head": "head", "hosts": list(NAMES), "left": []}
    return target, answers


def test_each_host_gets_its_own_part(way):
    target, answers = way
    accepted = rollback.accept(target, "llama_cluster", answers)
    assert list(accepted["hosts"]) == list(NAMES)
    for name, steps in accepted["hosts"].items():
        assert steps["part"]["services"] == answers[name]["record"]["host"]["services"]
    assert accepted["plan"]["hosts"] == {"head": answers["head"]["record"]["host"]}, "nothing is added to it either"
    assert accepted["hosts"]["head"]["stop"] == ["llamacpp-server"]
    assert accepted["hosts"]["head"]["restart"] == ["llamacpp-server"]
    assert accepted["hosts"]["worker1"] == {**accepted["hosts"]["worker1"], "stop": [], "restart": [], "remove": []}


def test_what_a_broken_upgrade_left_is_restarted_or_removed(way):
    target, answers = way
    drift = answers["worker1"]["drift"]
    drift["services"]["llamacpp-worker-cpu"]["state"] = "different"
    drift["stale"] = ["llamacpp-worker-new"]
    answers["worker2"]["drift"]["redefined"] = ["llamacpp-worker-cpu"]
    answers["worker2"]["drift"]["defined"] += ["llamacpp-server"]
    hosts = rollback.accept(target, "llama_cluster", answers)["hosts"]
    assert (hosts["worker1"]["restart"], hosts["worker1"]["remove"]) == (
        ["llamacpp-worker-cpu"],
        ["llamacpp-worker-new"],
    )
    assert hosts["worker2"]["restart"] == ["llamacpp-worker-cpu"]
    assert hosts["worker2"]["stop"] == ["llamacpp-server"]


def test_no_file_of_the_controller_is_copied_on_the_word_of_a_host(way):
    target, answers = way
    for file in answers["head"]["record"]["host"]["files"]:
        file["source"] = "/etc/shadow"
        file.pop("content", None)
    files = rollback.accept(target, "llama_cluster", answers)["hosts"]["head"]["part"]["files"]
    assert files
    assert not any({"source", "mode"} & set(file) for file in files)


PARTS = {
    "another cluster": (
        lambda a: a["worker1"]["record"].update(cluster="other"),
        "cluster is 'other', not 'llama_cluster'",
    ),
    "another id": (lambda a: a["worker1"]["record"].update(id="f" * 16), "id is 'f"),
    "another host's": (lambda a: a["worker1"]["record"].update(name="worker2"), "name is 'worker2', not 'worker1'"),
    "a head's": (lambda a: a["worker1"]["record"].update(head=a["head"]["record"]["head"]), "head is not of this host"),
    "a head's that lacks it": (lambda a: a["head"]["record"].pop("head"), "head is not of this host"),
    "moved": (lambda a: a["worker1"]["place"].update(prefix="/srv/llamacpp"), "not where the installation is now"),
    "nothing": (lambda a: a["worker1"].update(record=None), "not a mapping"),
    "no drift": (lambda a: a["worker1"].pop("drift"), "drift"),
    "a service is not reported": (
        lambda a: a["worker1"]["drift"]["services"].clear(),
        "llamacpp-worker-cpu is missing",
    ),
    "lost": (lambda a: a.pop("worker1"), "worker1 could not be reached"),
    "no build": (
        lambda a: a["worker1"]["drift"].update(missing_builds=["b1-cpu-1"]),
        "cannot serve any more: worker1 lacks b1-cpu-1",
    ),
    "no model": (lambda a: a["head"].update(missing=["/m.gguf"]), "head lacks /m.gguf"),
}


@pytest.mark.parametrize("change, said", PARTS.values(), ids=PARTS)
def test_a_part_that_cannot_be_used_stops_before_any_service(way, change, said):
    target, answers = way
    change(answers)
    with pytest.raises(Refusal, match=said) as refused:
        rollback.accept(target, "llama_cluster", answers)
    assert "No service was touched" in str(refused.value)


def test_the_module_reads_a_part_and_what_its_services_miss(call, prefix, record, monkeypatch):
    serve(prefix, record)
    model = record["model"]["path"]
    drift = {"changed_files": [model], "changed_models": ["/models/part.gguf"], "missing_builds": []}
    monkeypatch.setattr(module.state, "drift", lambda part: drift)
    answered = call(state="read", prefix=str(prefix), id=record["id"])
    assert answered["record"]["id"] == record["id"]
    assert answered["missing"] == sorted([model, "/models/part.gguf"])
    listed = call(state="listed", prefix=str(prefix))
    assert [plan["id"] for plan in listed["plans"]] == [record["id"]]
    assert "runs on the controller" in call(state="chosen")["msg"]


def act(**arguments):
    task = mock.Mock(args=arguments, async_val=0, action="llamacpp.cluster.kept", check_mode=False)
    own = action.ActionModule(task, mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock())
    own._execute_module = lambda module_args, task_vars: module_args
    return own.run(task_vars={"inventory_hostname": "head"})


def test_a_task_without_a_state_gets_the_error_of_the_module():
    assert act(prefix="/opt/llamacpp") == {"prefix": "/opt/llamacpp"}


def test_a_host_gets_the_text_of_files_and_no_path_of_the_controller(pair):
    plan = completed(pair)
    given = act(state="applying", prefix="/opt/llamacpp", plan=plan)
    assert "plan" not in given
    files = given["record"]["host"]["files"]
    assert not any("source" in file for file in files)
    assert any("def main" in file.get("content", "") for file in files)
    assert history.problem(given["record"]) is None


def test_decisions_are_made_on_the_controller(way):
    target, answers = way
    answers = {name: {**answer, "changed": False} for name, answer in answers.items()}
    places = {name: {**answer.pop("place"), "kernel": "6"} for name, answer in answers.items()}
    done = act(state="accepted", cluster="llama_cluster", target=target, answers=answers, places=places)
    assert set(done["hosts"]) == set(NAMES)
    found = act(state="chosen", cluster="llama_cluster", heads=["head"], answers=kept_by((1, 10), (2, 20)))
    assert found["target"]["id"] == f"{1:016x}"
    with pytest.raises(AnsibleActionFail, match="There is no plan"):
        act(state="chosen", cluster="llama_cluster", heads=["head"], answers={})
    assert act(state="failed", id="1", wanted="b2", reasons={"head": "x"}, target={})["failed"]
    assert "did not go back" in act(state="failed", reasons={"head": "x"})["msg"]
    assert act(state="returned", target=target, wanted='"b2"') == {"changed": False}


# ---------------------------------------------------------------------------------------------------------- the sentences


def failure(**others):
    given = {
        "plan": "2" * 16,
        "release": "b2",
        "reasons": {"worker1": "it did not start.\nlog \x1b[2J line"},
        "lost": [],
        "back": {"id": "1" * 16, "release": "b1"},
        "why_not": "",
    }
    return rollback.sentence(rollback.Failure(**{**given, **others}))


def test_the_failure_says_what_failed_and_what_serves():
    said = failure()
    assert "worker1: it did not start.\nlog \\x1b[2J line" in said
    assert "release b2) does not serve" in said
    assert "(release b1) serves again" in said
    assert "\x1b" not in said


def test_the_failure_says_that_the_old_release_does_not_serve():
    said = failure(back=None, why_not="There is no plan to go back to.")
    assert "does NOT serve again: There is no plan to go back to. Fix" in said


def test_the_failure_names_hosts_that_were_lost():
    said = failure(reasons={}, lost=["worker2"])
    assert "does not serve: worker2 was lost in the middle." in said
    assert "When worker2 answers again, run rollback.yml" in said


def test_hosts_with_the_same_reason_are_named_together():
    assert "head, worker1: x." in failure(reasons={"head": "x.", "worker1": "x."})


def test_a_rollback_that_did_not_end_can_be_run_again():
    target = {"id": "1" * 16, "release": "b1", "left": []}
    assert "rollback.yml again with -e llama_rollback_to=1111" in rollback.unfinished(target, {"head": "x"}, [])
    assert "When worker1 answers again" in rollback.unfinished(target, {}, ["worker1"])
    refused = rollback.unfinished(target, {"head": "it lacks a build. No service was touched."}, [])
    assert refused == "The cluster did not go back: head: it lacks a build. No service was touched."


def test_the_inventory_is_named_after_a_rollback():
    target = {"id": "1" * 16, "release": "b1", "left": ["worker9"]}
    said = rollback.returned(target, '"b2"')
    assert 'The inventory has llama_release: "b2"' in said
    assert "worker9 had no part" in said
    assert "has no llama_release" in rollback.returned(target, '""')
    assert "would serve" in rollback.returned(target, '"b2"', check=True)


def test_a_host_that_was_left_out_is_named_with_what_to_do_when_it_is_back():
    target = {
        "id": "1" * 16,
        "release": "b1",
        "left": [],
        "away": ["strix1"],
        "declared": '{"source": "git", "ref": "b1"}',
    }
    said = rollback.returned(target, '"b2"')
    assert 'To stay here, set llama_release: {"source": "git", "ref": "b1"}.' in said
    assert "strix1 does not answer: the head serves without it" in said
    assert f"run rollback.yml with -e llama_rollback_to={'1' * 16}" in said


def test_a_head_keeps_which_hosts_may_be_away(pair):
    plan = completed(pair)
    assert plans.summary({**record_of(plan, "worker1"), "time": 1})["spared"] is None
    plan["hosts"]["worker2"]["workers"][0]["used"] = False
    plan["head"]["fallback_after"], plan["fallbacks"] = 60, [{"without": "worker1:cpu"}]
    own = record_of(plan, "head")
    assert plans.summary({**own, "time": 1})["spared"] == {"worker1": True, "worker2": False}
    assert history.problem(own) is None
    plan["head"]["fallback_after"] = None
    assert record_of(plan, "head")["spared"] == {"worker2": False}
    assert history.problem({**own, "spared": {"worker1": "yes"}}).where == "it.spared.worker1"


RELEASES = {
    "a tag": "b8600",
    "a commit": {"source": "git", "repository": "/srv/llama.cpp", "ref": "master", "commit": "a" * 40, "build": 8600},
    "llama-cpp-python": {"source": "pypi", "version": "0.3.36", "checksum": f"sha256:{'0' * 64}"},
    "an archive": {"source": "archive", "path": "/srv/a.tar.gz", "checksum": f"sha256:{'0' * 64}", "build": 8600},
    "programs": {"source": "binary", "url": "https://x/b.tar.gz", "checksum": f"sha256:{'0' * 64}", "build": 8600},
    "patches": {
        **{"source": "pypi", "version": "0.3.36", "checksum": f"sha256:{'0' * 64}"},
        "patches": [{"path": "/srv/a.patch", "sha256": "0" * 64, "files": ["a.c"]}],
    },
}


@pytest.mark.parametrize("asked", RELEASES.values(), ids=RELEASES)
def test_what_llama_release_has_to_be_plans_the_same_release(asked):
    release = releases.release_of(asked, {})
    shown = yaml.safe_load(release_request.declaration(typed_json.dump(release.as_plan())))
    shown.update({"patches": asked["patches"]} if "patches" in shown else {})
    assert releases.release_of(shown, {}).id == release.id


def test_what_runs_is_compared_with_the_inventory(pair):
    plan = completed(pair)
    own = {"id": plan["id"], "time": 2, "state": "served", "release": "0.3.36"}
    old = {"id": "1" * 16, "time": 3, "state": "served", "release": "b1"}
    same = {name: {"plans": [own]} for name in NAMES}
    assert rollback.runs_other(plan, same) is None
    assert rollback.runs_other(plan, dict.fromkeys(NAMES)) is None
    said = rollback.runs_other(plan, {**same, "worker1": {"plans": [own, old]}})
    assert "plans release pypi-0.3.36" in said
    assert "on worker1 plan 1111111111111111 with release b1 serves" in said
    begun = {name: {"plans": [own, {**old, "state": "applying"}]} for name in NAMES}
    assert "was begun and never served" in rollback.runs_other(plan, begun)


def test_the_plans_of_a_host_are_checked_with_its_drift(pair):
    plan = pair.plan()
    found = {name: {"drift": {**drift, "plans": []}} for name, drift in drifts(plan).items()}
    changes.check(plan, found)
    found["worker1"]["drift"]["plans"] = [{"id": "\x1b"}]
    with pytest.raises(Refusal, match="What worker1 reports"):
        changes.check(plan, found)


# --------------------------------------------------------------------------------------------------------------- the gate

EVIDENCE = {
    "health": {"healthy": True, "said": "ok"},
    "ends": {"number": 0, "how": "", "log": []},
    "launched": True,
    "log": ["last line"],
    "log_complete": True,
    "handshakes": {"workers": {}},
    "links": {},
    "buffers": {},
    "rdma": 0,
    "completion": {"text": "wrong", "tokens": 3, "tokens_per_second": 1.0},
}


def gate(plan, *evidence):
    arguments = {"plan": plan, "gate": True}
    task = mock.Mock(args=arguments, async_val=0, action="llamacpp.cluster.verify")
    own = verify_action.ActionModule(task, mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock())
    answers = iter(evidence)
    own._execute_module = lambda module_args, task_vars: {"evidence": next(answers)}
    return own.run(task_vars={})


def test_the_gate_is_one_right_answer(pair):
    plan = completed(pair)
    said = gate(plan, EVIDENCE)
    assert said["failed"]
    assert "known answer: word 1 is 'wrong'" in said["msg"]
    right = {**EVIDENCE["completion"], "text": verification.known_answer.SENTENCE}
    assert gate(plan, {**EVIDENCE, "completion": right}) == {"changed": False}
    plan["model"].update(known_answer=None, name="some model")
    assert gate(plan, EVIDENCE) == {"changed": False}
    none = {**EVIDENCE, "completion": {"error": "status 500: compute error"}}
    assert "completion: status 500" in gate(plan, none)["msg"]


def test_the_gate_ends_with_the_log_of_a_server_that_ends_at_each_start(pair, monkeypatch):
    waiting = {**EVIDENCE, "health": {"healthy": False, "said": "Connection refused"}}
    ended = {**waiting, "ends": {"number": 3, "how": "with status 1", "log": ["bad model"]}}
    said = gate(completed(pair), waiting, ended)
    assert "ended 3 times" in said["msg"]
    assert said["msg"].endswith("\nbad model")


def test_the_gate_takes_a_plan_that_a_head_has_kept(way):
    target, answers = way
    del answers["head"]["record"]["head"]["fallback_after"]
    plan = rollback.accept(target, "llama_cluster", answers)["plan"]
    plan["model"].update(known_answer=None, name="some model")
    assert gate(plan, EVIDENCE) == {"changed": False}
    impatient = {**plan, "head": {**plan["head"], "start_timeout": 0}}
    silent = {**EVIDENCE, "health": {"healthy": False, "said": "no"}}
    assert "not healthy: no" in gate(impatient, silent)["msg"]
    assert "not healthy: worker away" in gate(impatient, {**silent, "waits_for": ["worker away"]})["msg"]


def test_the_gate_takes_a_kept_plan_of_which_a_fallback_serves(way):
    """On the head, collect looks for what it serves meanwhile."""
    plan = rollback.accept(way[0], "llama_cluster", way[1])["plan"]
    evidence = {**EVIDENCE, "fallback": {"name": "worker2:cpu", "since": 1}}
    assert verification.as_served(plan, evidence) == plan


def test_what_changes_the_plan_changes_its_id(pair):
    plan = completed(pair)
    again = completed(pair)
    assert plan["id"] == again["id"] == plan["hosts"]["worker1"]["id"]
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"device": "CPU", "port": 50099}]
    assert completed(pair)["id"] != plan["id"]


def test_how_many_releases_are_kept_does_not_change_the_id(pair):
    plan = completed(pair)
    for given in pair.hosts.values():
        given["variables"]["llama_build_keep"] = 1
    assert completed(pair)["id"] == plan["id"]


def test_facts_that_are_left_on_the_head_do_not_change_the_id(pair):
    plan = completed(pair)
    before = identity(plan)
    plan["hosts"]["head"]["files"].append({"path": "/opt/llamacpp/facts.json", "bytes": 1, "sha256": "0" * 64})
    plan["hosts"]["head"]["files"][0]["source"] = "/elsewhere/runtime.py"
    assert identity(plan) == before
