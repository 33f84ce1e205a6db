"""What differs between two runs decides what restarts, and other programs prove themselves before anything stops."""

import copy

import pytest
from conftest import definition, known_answer_of
from support.clusters import CARD
from support.drift import drifts
from support.lifecycle import decide

OLD = {"source": "pypi", "version": "0.3.20", "checksum": "sha256:" + "b" * 64}


def defined(plan):
    """Service → its definition, of each host."""
    return {
        name: {service["name"]: definition(host, service) for service in host["services"]}
        for name, host in plan["hosts"].items()
    }


def drift_between(old, new):
    """What the hosts report of the new plan while they run the old one."""
    before, after = defined(old), defined(new)
    found = drifts(new)
    for name, drift in found.items():
        former = old["hosts"].get(name, {"services": [], "builds": []})
        was = {service["name"]: service for service in former["services"]}
        for service in new["hosts"][name]["services"]:
            own = was.get(service["name"])
            same = own and (own["argv"], own["environment"]) == (service["argv"], service["environment"])
            drift["services"][service["name"]]["state"] = "running" if same else "different" if own else "stopped"
            if before.get(name, {}).get(service["name"]) != after[name][service["name"]]:
                drift["redefined"].append(service["name"])
        drift["unplanned"] = sorted(set(was) - set(after[name]))
        drift["running_build_ids"] = sorted({build["id"] for build in former["builds"]})
    return found


@pytest.fixture
def three(pair):
    """Two workers that are used and one that is not."""
    pair.add("worker3", "worker", address="192.0.2.13")
    for name, size in (("worker1", 60000), ("worker2", 60000), ("worker3", 1000)):
        pair.hosts[name]["variables"]["llama_worker_endpoints"] = [{"name": name, "memory_mib": size}]
    pair.hosts["head"]["variables"]["llama_server_tensor_split"] = [1, 1, 0]
    return pair


HEAD, FIRST, THIRD = "llamacpp-server", "llamacpp-worker-worker1", "llamacpp-worker-worker3"


def endpoint(host, **values):
    return lambda hosts: hosts[host]["variables"]["llama_worker_endpoints"][0].update(values)


def of_head(**values):
    return lambda hosts: hosts["head"]["variables"].update(values)


def without_third(hosts):
    del hosts["worker3"]
    of_head(llama_server_tensor_split=[1, 1])(hosts)


@pytest.mark.parametrize(
    "change, restarted",
    [
        (endpoint("worker1", port=50060), {"head": [HEAD], "worker1": [FIRST]}),
        (endpoint("worker1", threads=3), {"head": [HEAD], "worker1": [FIRST]}),
        (endpoint("worker3", port=50060), {"worker3": [THIRD]}),
        (endpoint("worker3", threads=3), {"worker3": [THIRD]}),
        (of_head(llama_server_api_key_file="/etc/other-keys"), {"head": [HEAD]}),
        (of_head(llama_server_context=1024), {"head": [HEAD]}),
        (without_third, {}),
    ],
    ids=["port", "setting", "unused port", "unused setting", "keys", "context", "unused worker gone"],
)
def test_what_differs_decides_what_restarts(three, change, restarted):
    old = three.plan()
    used = {worker["name"]: worker["used"] for host in old["hosts"].values() for worker in host["workers"]}
    assert used == {"worker1": True, "worker2": True, "worker3": False}
    change(three.hosts)
    new = three.plan()
    decided = decide(new, drift_between(old, new))
    assert {name: services for name, services in decided.restarts.items() if services} == restarted
    assert decided.outdated_hosts == [*restarted]


def restarts(old, new):
    """Host → services that restart; hosts without one are left out."""
    decided = decide(new, drift_between(old, new)).restarts
    return {host: services for host, services in decided.items() if services}


def with_a_card(pair):
    pair.hosts["worker1"]["facts"].update(copy.deepcopy(CARD))
    pair.hosts["worker1"]["variables"]["llama_backend"] = "cuda"


@pytest.mark.parametrize(
    "change, restarted",
    [
        (lambda _pair: None, {}),
        (
            lambda pair: pair.add("worker3", "worker", address="192.0.2.13"),
            {"head": [HEAD], "worker3": ["llamacpp-worker-cpu"]},
        ),
        (lambda pair: pair.hosts.pop("worker2"), {"head": [HEAD]}),
        (lambda pair: of_head(llama_model_known_answer=known_answer_of(layers=32))(pair.hosts), {"head": [HEAD]}),
        (with_a_card, {"head": [HEAD], "worker1": ["llamacpp-worker-cuda0"]}),
    ],
    ids=["nothing", "a worker joins", "a worker leaves", "another model", "another backend"],
)
def test_what_a_change_of_the_cluster_restarts(pair, change, restarted):
    old = pair.plan()
    change(pair)
    assert restarts(old, pair.plan()) == restarted


@pytest.mark.parametrize("stays", [True, False])
def test_another_head_restarts_the_workers_whose_units_let_it_in(pair, stays):
    old = pair.plan()
    for name, groups in (("head", ["worker"]), ("worker2", ["head"])):
        pair.hosts[name]["groups"] = groups
    pair.hosts["worker2"]["variables"]["llama_model_known_answer"] = known_answer_of()
    if not stays:
        del pair.hosts["head"]
    moved = {"worker1": ["llamacpp-worker-cpu"], "worker2": [HEAD]}
    assert restarts(old, pair.plan()) == {**moved, **({"head": ["llamacpp-worker-cpu"]} if stays else {})}


@pytest.mark.parametrize(
    "kind, subject", [("firewall", "nftables"), ("file", "/opt/llamacpp/fallbacks.json"), ("link", "links")]
)
def test_what_no_process_has_read_restarts_nothing(three, kind, subject):
    plan = three.plan()
    found = drifts(plan)
    found["head"]["differences"] = [{"kind": kind, "subject": subject, "text": "it differs"}]
    found["head"]["changed_files"] = [subject] if kind == "file" else []
    decided = decide(plan, found)
    assert decided.outdated_hosts == ["head"]
    assert not any(decided.restarts.values())
