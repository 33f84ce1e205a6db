"""The plan is a function of the inventory and of stable facts: what else changes on the hosts changes nothing in it."""

import copy
import hashlib
import json

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import plan as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import CATALOGUE, FACTS, SCHEMA, complete, known_answer_of, make, refused

GROUPS = {"llama_cluster": ["head", "one", "two"], "llama_head": ["head"], "llama_workers": ["one", "two"]}
ADDRESSES = {"head": "192.0.2.10", "one": "192.0.2.11", "two": "192.0.2.12"}
GPU = {"backend": "hip", "name": "AMD gfx1151", "architecture": "gfx1151", "memory_mib": 60000, "unified": True}


def facts_of(name):
    found = copy.deepcopy({**FACTS, "kernel": "6.18.10", "cached": {}, "firewall": "nftables"})
    if name == "two":
        found.update(accelerators=[GPU], toolchain={**FACTS["toolchain"], "hipconfig": "7.2"})
    return found


def run(facts):
    """A run as plan.yml makes it: the complete plan, and the facts that it leaves on the head."""
    hostvars = {
        name: {"ansible_host": address, "llama_model_known_answer": known_answer_of()}
        for name, address in ADDRESSES.items()
    }
    answers = {name: {"facts": copy.deepcopy(found)} for name, found in facts.items()}
    name, hosts = inventory.cluster_hosts({"groups": GROUPS, "hostvars": hostvars}, answers)
    try:
        cluster = cluster_inputs.read_cluster(name, hosts)
        plan = make(cluster, {}, CATALOGUE, "runtime-id")
    except Refusal as refusal:
        plan = refused(name, refusal)
    if plan["refused"]:
        SCHEMA.validate(plan)
        return plan, None
    plan = complete(plan, {name: host.cached_facts for name, host in cluster.hosts.items()})
    SCHEMA.validate(plan)
    return plan, plan["hosts"]["head"]["files"][-1]["content"]


@pytest.fixture
def facts():
    return {name: facts_of(name) for name in ADDRESSES}


def after(facts, kept):
    """The facts of the run that follows one which left these."""
    later = copy.deepcopy(facts)
    later["head"]["cached"] = json.loads(kept)
    return later


def test_while_the_model_is_loaded(facts):
    """Services run, the service manager's definitions are there, memory is used up: nothing that planning reads."""
    first, kept = run(facts)
    loaded = after(facts, kept)
    for found in loaded.values():
        found.update(
            defined=["llamacpp-worker-cpu", "llamacpp-server"],
            supervisor={"version": None, "running": True},
            lingering={"enabled": True, "by_us": True},
            accounts={"llamacpp": found["prefix"]},
            tools=["cmake"],
            free_mib=12,
            load=[16.0, 16.0, 16.0],
            cluster="llama_cluster",
        )
    assert json.dumps(run(loaded)[0]) == json.dumps(first)


def test_what_the_first_build_installed_to_be_faster(facts):
    first, kept = run(facts)
    for found in facts.values():
        found["toolchain"]["ccache"] = "4.11"
    again, kept_again = run(facts)
    assert json.dumps(again) == json.dumps(first)
    assert kept_again == kept


def test_no_fact_of_a_host_is_about_its_load():
    known = {"accounts", "addresses", "cluster", "defined", "host_settings", "installed", "cached", "lingering"}
    known |= {"created_accounts", "measured", "measured_speed", "supervisor", "tools", "user"}
    declared = {"link_gbit_per_s"}
    assert set(host.facts("user")) | declared == (cluster_inputs.PLANNING_FACT_NAMES | known)


@pytest.mark.parametrize("name", ["one", "two"])
def test_with_one_host_unreachable(facts, name):
    first, kept = run(facts)
    without = after(facts, kept)
    del without[name]
    again, kept_again = run(without)
    assert json.dumps(again) == json.dumps(first)
    assert kept_again == kept


def test_a_host_that_is_too_busy_to_try_whether_systemd_filters(facts):
    """What the last run saw stands while the kernel is the same."""
    first, kept = run(facts)
    assert not first["refused"]
    busy = after(facts, kept)
    busy["one"].update(has_unit_filter=None)
    again, kept_again = run(busy)
    assert json.dumps(again) == json.dumps(first)
    assert kept_again == kept
    busy["one"].update(kernel="6.18.11")
    assert not run(busy)[0]["hosts"]["one"]["unit_closes"]
    del busy["head"]["cached"]["one"]["has_unit_filter"]
    busy["one"].update(kernel="6.18.10")
    assert not run(busy)[0]["hosts"]["one"]["unit_closes"]


@pytest.mark.parametrize("name", ["head", "one"])
def test_with_a_host_unreachable_of_which_nothing_is_kept(facts, name):
    _first, kept = run(facts)
    without = facts if name == "one" else after(facts, kept)
    del without[name]
    plan, _kept = run(without)
    assert plan["refused"]
    assert "is unreachable or excluded by --limit" in plan["reasons"][0]
    assert name in plan["reasons"][0]


def test_files_of_a_plan_carry_what_is_written(facts):
    plan, kept = run(facts)
    head = plan["hosts"]["head"]
    record, *launcher, model, last = head["files"]
    assert record["path"] == f"{head['prefix']}/cluster.json"
    assert len(launcher) == len(action.LAUNCHER_FILES)
    for file, source in zip(launcher, action.LAUNCHER_FILES):
        assert file["path"] == f"{head['runtime']}/{source.name}"
        assert (file["source"], file["mode"]) == (source.source, "0644")
    assert {"path": head["runtime"], "owner": "root", "mode": "0755"} in head["folders"]
    assert set(model) == {"path", "bytes"}
    assert (last["path"], last["bytes"]) == (f"{head['prefix']}/facts.json", len(kept.encode()))
    for file, data in ((launcher[0], action.LAUNCHER_FILES[0].content), (last, kept.encode())):
        assert file["sha256"] == hashlib.sha256(data).hexdigest()
    assert plan["hosts"]["one"]["files"][1:] == launcher


@pytest.mark.parametrize(
    "scope, manager, settings, account",
    [("system", "systemd", True, "llamacpp-build"), ("user", "systemd_user", False, None)],
)
def test_what_needs_root_and_systemd_is_left_out_elsewhere(facts, scope, manager, settings, account):
    facts["head"].update(scope=scope, service_manager=manager)
    host = run(facts)[0]["hosts"]["head"]
    assert (host["host_settings"], host["build_account"]) == (settings, account)
    owner, mode = ("root", "0755") if account else (None, "0700")
    kept = {folder["path"]: folder for folder in host["folders"]}
    for path in (host["cache"], host["cache"] + "/sources"):
        assert kept[path] == {"path": path, "owner": owner, "mode": mode}
    assert host["folders"][-1]["owner"] == owner
