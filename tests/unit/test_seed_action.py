"""The action plugin that fills caches in steps: what it asks of hosts, what it shows, and what it does with answers that cannot be."""

import copy
import re
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import seed

MIB = 1 << 20
ROW = {"name": "blk.*.ffn_up.weight", "bytes": 20 * MIB, "layers": [0, 1, 2]}
NAMES = [f"blk.{layer}.ffn_up.weight" for layer in range(3)]
TENSORS = [{"name": name, "bytes": 20 * MIB, "fingerprint": f"{index:032x}"} for index, name in enumerate(NAMES)]


def worker(name, **more):
    given = {"name": name, "environment": {"LLAMA_CACHE": "/c"}, "endpoint": f"192.0.2.2:{len(name)}"}
    return {**given, "seed": {"tensors": [ROW], "fork": "llama.cpp"}, **more}


PLAN = {
    "model": {"path": "/model.gguf"},
    "head": {"host": "head"},
    "hosts": {
        "head": {"account": "llamacpp", "workers": []},
        "one": {"account": "llamacpp", "workers": [worker("cpu"), worker("small", seed=None)]},
        "two": {"account": None, "workers": [worker("cuda0")]},
    },
}


class Hosts:
    """Answers that modules give one after the other, and what they were asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def __call__(self, module_name, module_args, task_vars):
        assert module_name == "llamacpp.cluster.seed"
        self.asked.append(copy.deepcopy(module_args))
        return self.answers.pop(0)


@pytest.fixture
def run(monkeypatch):
    shown = []
    monkeypatch.setattr(seed.display, "display", lambda text: shown.append(text.strip()))

    def call(hosts, host="one", **arguments):
        task = mock.Mock(args={"plan": copy.deepcopy(PLAN), **arguments}, check_mode=False, async_val=0)
        action = seed.ActionModule(task, mock.Mock(), mock.Mock(), None, None, None)
        action._execute_module = hosts
        action.validate_argument_spec = lambda argument_spec: (
            None,
            {**{key: spec.get("default") for key, spec in argument_spec.items()}, **task.args},
        )
        with mock.patch.object(seed.ActionBase, "run"):
            return action.run(None, {"inventory_hostname": host}), shown

    return call


def test_the_head_is_asked_for_the_tensors_of_all_workers(run):
    hosts = Hosts({"tensors": TENSORS, "why": []})
    result, _shown = run(hosts, "head", state="described")
    assert result["tensors"] == TENSORS
    assert hosts.asked[0]["names"] == dict.fromkeys(NAMES, 20 * MIB)
    assert (hosts.asked[0]["account"], hosts.asked[0]["path"]) == ("llamacpp", "/model.gguf")


def test_a_host_fills_its_caches_in_steps_that_are_shown(run):
    hosts = Hosts(
        {"changed": True, "copied_mib": 20, "left_mib": 40, "linked_mib": 0, "missing": {"cpu": NAMES[1:]}, "why": []},
        {"changed": True, "copied_mib": 40, "left_mib": 0, "linked_mib": 0, "missing": {"cpu": []}, "why": []},
    )
    result, shown = run(hosts, state="filled", tensors=TENSORS)
    assert result == {"changed": True, "missing": {"cpu": []}, "why": []}
    assert [given["name"] for given in hosts.asked[0]["workers"]] == ["cpu"]
    assert hosts.asked[0]["workers"][0]["names"] == NAMES
    assert "21 MB of 63 MB, " in shown[0]
    assert shown[1] == "[one] its workers' caches got 63 MB from the host itself"


def test_a_host_that_gets_no_further_is_not_asked_for_ever(run):
    answer = {"changed": False, "copied_mib": 0, "left_mib": 40, "missing": {"cpu": NAMES}, "why": []}
    result, _shown = run(Hosts(answer), state="filled", tensors=TENSORS)
    assert result["missing"] == {"cpu": NAMES}
    failing = {"failed": True, "msg": "no python"}
    result, shown = run(Hosts(failing), state="filled", tensors=TENSORS)
    assert (result["missing"], result["why"], shown[-1]) == ({}, ["no python"], "[one] no python")


def test_a_host_that_says_that_it_gets_further_and_does_not_is_not_asked_for_ever(run):
    answer = {"changed": True, "copied_mib": 20, "left_mib": 40, "missing": {"cpu": NAMES}, "why": []}
    result, _shown = run(Hosts(answer, answer), state="filled", tensors=TENSORS)
    assert result["missing"] == {"cpu": NAMES}
    staging = {"hosts": {"one": {"workers": [worker("cpu")]}, "two": {"workers": [worker("cuda0")]}}}
    answers = {"one": {"missing": {"cpu": [*NAMES, "other"]}}, "two": {"missing": {"cuda0": ["other"]}}}
    hosts = Hosts({"changed": True, "given": {"192.0.2.2:3": ["other"]}, "why": []})
    run(hosts, state="sent", tensors=TENSORS, answers=answers, staging=staging)
    assert [(target["endpoint"], target["names"]) for target in hosts.asked[0]["targets"]] == [("192.0.2.2:3", NAMES)]


def test_the_head_sends_to_those_that_lack_something_until_nothing_is_left(run):
    answers = {"one": {"missing": {"cpu": NAMES}}, "two": {"missing": {"cuda0": NAMES[:1]}}, "head": {}}
    staging = {"hosts": {name: {"workers": host["workers"]} for name, host in PLAN["hosts"].items()}}
    one, two = "192.0.2.2:3", "192.0.2.2:5"
    hosts = Hosts(
        {"changed": True, "given": {one: NAMES[:2], two: NAMES[:1]}, "why": []},
        {"changed": True, "given": {one: NAMES[2:]}, "why": []},
    )
    result, shown = run(hosts, "one", state="sent", tensors=TENSORS, answers=answers, staging=staging)
    assert result == {"changed": True, "why": []}
    assert [[target["endpoint"] for target in asked["targets"]] for asked in hosts.asked] == [[one, two], [one]]
    assert hosts.asked[1]["targets"][0]["names"] == NAMES[2:]
    assert "63 MB of 84 MB, " in shown[0]
    assert "84 MB of 84 MB, " in shown[1]


def test_a_worker_that_fails_is_named_and_not_asked_again(run):
    answers = {"one": {"missing": {"cpu": NAMES}}, "two": {"missing": {"cuda0": NAMES}}}
    staging = {"hosts": {"one": {"workers": [worker("cpu")]}, "two": {"workers": []}}}
    hosts = Hosts({"changed": False, "given": {"192.0.2.2:3": []}, "why": ["The head does not fill a cache: full."]})
    result, shown = run(hosts, state="sent", tensors=TENSORS, answers=answers, staging=staging)
    assert result["why"] == ["The head does not fill a cache: full."]
    assert shown[-1] == "[one] The head does not fill a cache: full."


@pytest.mark.parametrize(
    "answer",
    [
        {"missing": {"cpu": [1]}},
        {"missing": ["cpu"]},
        {"missing": {"cpu": "name"}},
        {"given": {"x": [None]}},
        {"tensors": "all"},
        {"tensors": [{**TENSORS[0], "bytes": -1}]},
        {"tensors": [{**TENSORS[0], "fingerprint": "x"}]},
        {"left_mib": "many"},
        {"why": [3]},
        {"missing": {"cpu": ["x" * 300]}},
    ],
)
def test_an_answer_that_cannot_be_is_a_sentence(run, answer):
    result, shown = run(Hosts(answer), state="filled", tensors=TENSORS)
    (why,) = result["why"]
    assert re.match(
        r"\S+ reports a value that is not possible \((tensors|missing|given|left_mib|why)\S* .*\): somebody may have changed that host",
        why,
    )
    assert result["missing"] == {}
    assert shown[-1].endswith("«When a host is taken over»")


def test_many_tensors_are_not_strange():
    assert not seed._strange({"tensors": TENSORS * 2000, "missing": {"cpu": NAMES * 2000}, "why": []})


@pytest.mark.parametrize(
    "missing, defined, sends",
    [
        ([], ["llamacpp-server"], False),
        ([["a"]], ["llamacpp-server"], True),
        ([["a"]], ["llamacpp-worker-cpu"], False),
        ([["a"], []], [], False),
        ([["a"], ["b", "c"]], [], True),
    ],
)
def test_the_head_sends_where_something_serves_or_several_workers_lack_something(run, missing, defined, sends):
    plan = copy.deepcopy(PLAN)
    plan["hosts"]["head"]["names"] = {"server": "llamacpp-server"}
    answers = {f"host{index}": {"missing": {"cpu": names}} for index, names in enumerate(missing)}
    hosts = Hosts()
    result, shown = run(hosts, "head", state="decided", plan=plan, answers={**answers, "away": {}}, defined=defined)
    assert (result["sends"], shown, hosts.asked) == (sends, [], [])
