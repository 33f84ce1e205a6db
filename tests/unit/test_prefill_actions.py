"""The action plugins that fill caches in steps: what they ask of hosts, what they show, and what they do with answers of another form."""

import copy
import json
import os

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import cache_prefill, cache_prefill_info, cache_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ServedModel
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import prefill
from support import actions
from support.clusters import strix_halos
from support.rollbacks import completed

MIB = 1 << 20
ROW = {"name": "blk.*.ffn_up.weight", "bytes": 20 * MIB, "layers": [0, 1, 2]}
NAMES = [f"blk.{layer}.ffn_up.weight" for layer in range(3)]
FOUND = [{"name": name, "bytes": 20 * MIB, "fingerprint": f"{index:032x}"} for index, name in enumerate(NAMES)]
PATH = "/model.gguf"
TENSORS = [{"path": PATH, **tensor} for tensor in FOUND]


SEED = {"tensors": [ROW], "bytes": 60 * MIB, "fork": "llama.cpp", "endpoint": "127.0.0.1:1", "argv": ["rpc-server"]}
WHOLE = json.loads(json.dumps(completed(strix_halos(2, 200))))
HOST = WHOLE["hosts"][WHOLE["head"]["host"]]
WORKER = next(worker for host in WHOLE["hosts"].values() for worker in host["workers"])


def worker(name, **more):
    planned = {**WORKER, "name": name, "environment": {"LLAMA_CACHE": "/c"}, "endpoint": f"192.0.2.2:{len(name)}"}
    return {**planned, "seed": SEED, **more}


def planned(models=None, **workers):
    hosts = {name: {**HOST, "account": "llamacpp", "workers": listed} for name, listed in workers.items()}
    return {
        **WHOLE,
        "model": {**WHOLE["model"], "path": PATH},
        "head": {**WHOLE["head"], "host": "head", **({"models": models} if models else {})},
        "hosts": hosts,
    }


PLAN = planned(head=[], one=[worker("cpu"), worker("small", seed=None)], two=[worker("cuda0")])


class Hosts:
    """Answers that modules give one after the other, and what they were asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def __call__(self, module_args, task_vars):
        self.asked.append(copy.deepcopy(module_args))
        return self.answers.pop(0)


@pytest.fixture
def run(monkeypatch):
    shown = []
    monkeypatch.setattr(prefill.display, "display", lambda text: shown.append(text.strip()))

    def call(plugin, hosts, host="one", plan=PLAN, **arguments):
        action = actions.made(plugin, plan=copy.deepcopy(plan), **arguments)
        action._execute_module = hosts
        return action.run(None, {"inventory_hostname": host}), shown

    return call


def fill(run, *answers):
    return run(cache_prefill, Hosts(*answers), tensors=TENSORS)


ONE, TWO = "192.0.2.2:3", "192.0.2.2:5"


def test_the_head_is_asked_for_the_tensors_of_all_workers(run):
    hosts = Hosts({"tensors": FOUND, "why": []})
    result, _shown = run(cache_prefill_info, hosts, "head")
    assert result["tensors"] == TENSORS
    assert hosts.asked == [{"path": PATH, "account": "llamacpp", "names": dict.fromkeys(NAMES, 20 * MIB)}]


def test_a_host_fills_its_caches_in_steps_that_are_shown(run):
    hosts = Hosts(
        {"changed": True, "copied_mib": 20, "left_mib": 40, "linked_mib": 0, "missing": {"cpu": NAMES[1:]}, "why": []},
        {"changed": True, "copied_mib": 40, "left_mib": 0, "linked_mib": 0, "missing": {"cpu": []}, "why": []},
    )
    result, shown = run(cache_prefill, hosts, tensors=TENSORS)
    assert result == {"changed": True, "missing": {PATH: {"cpu": []}}, "lacking": 0, "why": []}
    assert [(planned["name"], planned["names"]) for planned in hosts.asked[0]["workers"]] == [("cpu", NAMES)]
    assert "21 MB of 63 MB, " in shown[0]
    assert shown[1] == "[one] its workers' caches got 63 MB from the host itself"


def test_a_host_that_gets_no_further_is_not_asked_for_ever(run):
    answer = {"changed": False, "copied_mib": 0, "left_mib": 40, "missing": {"cpu": NAMES}, "why": []}
    result, _shown = fill(run, answer)
    assert (result["missing"], result["lacking"]) == ({PATH: {"cpu": NAMES}}, 1)
    assert result["why"] == [f"The cache of the worker cpu lacks 3 of its large tensors of {os.path.basename(PATH)}."]
    lying = {**answer, "changed": True, "copied_mib": 20}
    assert fill(run, lying, lying)[0]["missing"] == {PATH: {"cpu": NAMES}}
    result, shown = fill(run, {"failed": True, "msg": "no python"})
    assert (result["missing"], result["why"], shown[-1]) == ({PATH: {}}, ["no python"], "[one] no python")


def test_the_head_sends_to_those_that_lack_something_until_nothing_is_left(run):
    answers = {
        "one": {"missing": {PATH: {"cpu": [*NAMES, "unknown"]}}},
        "two": {"missing": {PATH: {"cuda0": NAMES[:1]}}},
        "head": {},
    }
    hosts = Hosts(
        {"changed": True, "given": {ONE: NAMES[:2], TWO: NAMES[:1]}, "why": []},
        {"changed": True, "given": {ONE: NAMES[2:]}, "why": []},
    )
    result, shown = run(cache_upload, hosts, tensors=TENSORS, answers=answers, staging=PLAN)
    assert result == {"changed": True, "why": []}
    assert [[target["endpoint"] for target in asked["targets"]] for asked in hosts.asked] == [[ONE, TWO], [ONE]]
    assert hosts.asked[1]["targets"][0]["names"] == NAMES[2:]
    assert "63 MB of 84 MB, " in shown[0]
    assert "84 MB of 84 MB, " in shown[1]


def test_the_head_sends_through_the_tunnels_to_the_instances(run):
    staging = planned(one=[worker("cpu", tunnel="192.0.2.9:50152")], two=[])
    hosts = Hosts({"changed": False, "given": {ONE: []}, "why": []})
    run(cache_upload, hosts, tensors=TENSORS, answers={"one": {"missing": {PATH: {"cpu": NAMES}}}}, staging=staging)
    assert hosts.asked[0]["tunnels"] == [f"{ONE}=192.0.2.9:50152"]
    assert hosts.asked[0]["keys"] == f"{HOST['prefix']}/keys"


def test_a_worker_that_fails_is_named_and_not_asked_again(run):
    answers = {"one": {"missing": {PATH: {"cpu": NAMES}}}, "two": {"missing": {PATH: {"cuda0": NAMES}}}}
    staging = planned(one=[worker("cpu")], two=[])
    for given, why in (([], ["The head does not fill a cache: full."]), (["other"], [])):
        hosts = Hosts({"changed": False, "given": {ONE: given}, "why": why})
        result, shown = run(cache_upload, hosts, tensors=TENSORS, answers=answers, staging=staging)
        assert [target["endpoint"] for target in hosts.asked[0]["targets"]] == [ONE]
        assert result["why"] == why
        assert not why or shown[-1] == f"[one] {why[0]}"


def test_an_answer_of_another_form_is_a_sentence(run):
    result, shown = fill(run, {"missing": {"cpu": ["x" * 300]}})
    assert (result["missing"], result["why"]) == ({PATH: {}}, [shown[-1].removeprefix("[one] ")])
    assert shown[-1].startswith("[one] What one reports of the caches of its workers is not as this version")
    for answer in (
        {"missing": ["cpu"]},
        {"missing": {"cpu": "name"}},
        {"tensors": [{**FOUND[0], "fingerprint": "x"}]},
        {"left_mib": "many"},
        {"why": ["\x1b"]},
    ):
        with pytest.raises(Refusal, match=next(iter(answer))):
            prefill.checked("one", answer)
    assert prefill.checked("one", {"tensors": FOUND * 2000, "missing": {"cpu": NAMES * 2000}, "why": []})


def test_caches_are_filled_with_each_model_and_each_file_once(run):
    own = {**{field: WHOLE.get(field, WHOLE["head"].get(field)) for field in ServedModel._fields}, "aliases": []}
    models = [
        {**own, "name": name, "model": {**WHOLE["model"], "path": path}, "argv": ["llama-server"]}
        for name, path in (("one", PATH), ("other", "/other.gguf"), ("longer", PATH))
    ]
    models = [
        {key: value for key, value in model.items() if value is not None or key != "idle_seconds"} for model in models
    ]
    rows = [{**ROW, "model": path} for path in (PATH, "/other.gguf")]
    rows[1]["layers"] = [1]
    plan = planned(models, head=[], one=[worker("cpu", seed={**SEED, "tensors": rows})])

    hosts = Hosts({"tensors": FOUND, "why": []}, {"tensors": [{**FOUND[1], "path": "/else"}], "why": ["slow"]})
    known, _shown = run(cache_prefill_info, hosts, "head", plan)
    assert [(asked["path"], [*asked["names"]]) for asked in hosts.asked] == [(PATH, NAMES), ("/other.gguf", NAMES[1:2])]
    assert (known["tensors"][3:], known["why"]) == ([{"path": "/other.gguf", **FOUND[1]}], ["slow"])

    hosts = Hosts({"missing": {"cpu": []}}, {"missing": {"cpu": NAMES[1:2]}, "changed": True})
    result, _shown = run(cache_prefill, hosts, plan=plan, tensors=known["tensors"])
    assert [asked["workers"][0]["names"] for asked in hosts.asked] == [NAMES, NAMES[1:2]]
    assert [[tensor["path"] for tensor in asked["tensors"]] for asked in hosts.asked] == [[PATH] * 3, ["/other.gguf"]]
    assert (result["changed"], result["lacking"]) == (True, 1)

    hosts = Hosts({"changed": True, "given": {ONE: NAMES[1:2]}})
    run(cache_upload, hosts, plan=plan, tensors=known["tensors"], answers={"one": result}, staging=PLAN)
    assert [(asked["path"], asked["targets"][0]["names"]) for asked in hosts.asked] == [("/other.gguf", NAMES[1:2])]
