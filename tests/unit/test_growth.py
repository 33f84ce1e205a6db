# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is restarted when a cluster grows, shrinks or changes: as little as possible."""

from __future__ import annotations

import pytest
from conftest import complete, known_answer_of
from support.drift import drifts
from support.lifecycle import decide

GPU = {"backend": "cuda", "name": "GPU", "architecture": "8.6", "memory_mib": 24576, "unified": False}
TOOLS = {"cmake": "3.31", "ninja": "1.12", "c++": "14.2", "venv": "1.0", "nvcc": "12.9"}


def planned(cluster):
    plan = cluster.plan()
    assert not plan["refused"], plan["reasons"]
    return complete(plan)


def state_of(service, former):
    """How a service of the new plan stands on a host that is as the old plan wants it."""
    if service["name"] not in former:
        return "stopped"
    old = former[service["name"]]
    return "running" if all(old[key] == service[key] for key in ("argv", "process", "environment")) else "different"


def drift(old, new, host):
    """What state.drift returns of a host on which the old plan was carried out."""
    before = old["hosts"].get(host, {"services": [], "builds": [], "files": []})
    former = {service["name"]: service for service in before["services"]}
    services = new["hosts"][host]["services"]
    files = {file["path"]: file for file in before["files"]}
    found = drifts(new)[host]
    found |= {
        "services": {
            service["name"]: {**found["services"][service["name"]], "state": state_of(service, former)}
            for service in services
        },
        "redefined": [
            service["name"]
            for service in services
            if former.get(service["name"], {}).get("definition") != service["definition"]
        ],
        "stale": sorted({*former} - {service["name"] for service in services}),
        "missing_builds": sorted(
            {build["id"] for build in new["hosts"][host]["builds"]} - {build["id"] for build in before["builds"]}
        ),
        "running_releases": sorted({build["id"] for build in before["builds"]}),
        "changed_files": [
            file["path"]
            for file in new["hosts"][host]["files"]
            if {**files.get(file["path"], {}), "source": None} != {**file, "source": None}
        ],
    }
    texts = [text for part in ("redefined", "stale", "missing_builds", "changed_files") for text in found[part]]
    return {**found, "differences": [{"kind": "file", "subject": text, "text": text} for text in texts]}


def restarts(old, new):
    """Host → services that restart; hosts without one are left out."""
    decided = decide(new, {host: drift(old, new, host) for host in new["hosts"]}).restarts
    return {host: names for host, names in decided.items() if names}


def with_gpus(pair, count):
    host = pair.hosts["worker1"]
    host["facts"].update(accelerators=[GPU] * count, toolchain=TOOLS)
    host["variables"]["llama_backend"] = "cuda"
    return pair


def joining(pair):
    pair.add("worker3", "worker", address="192.0.2.13")


def leaving(pair):
    del pair.hosts["worker2"]


def another_model(pair):
    pair.hosts["head"]["variables"]["llama_model_known_answer"] = known_answer_of(layers=32)


HEAD = {"head": ["llamacpp-server"]}
ITS_OWN = {"worker1": ["llamacpp-worker-cuda0"]}


@pytest.mark.parametrize(
    "change, restarted",
    [
        (lambda _pair: None, {}),
        (joining, {**HEAD, "worker3": ["llamacpp-worker-cpu"]}),
        (leaving, HEAD),
        (another_model, HEAD),
        (lambda pair: with_gpus(pair, 1), {**HEAD, **ITS_OWN}),
    ],
    ids=["nothing", "a worker joins", "a worker leaves", "another model", "another backend"],
)
def test_what_a_change_restarts(pair, change, restarted):
    old = planned(pair)
    change(pair)
    assert restarts(old, planned(pair)) == restarted


@pytest.mark.parametrize("stays", [True, False])
def test_another_head_restarts_the_workers_whose_units_let_it_in(pair, stays):
    """Definitions of workers name the head; the former head's server is stale where the host stays in the cluster."""
    old = planned(pair)
    for name, groups in (("head", ["worker"]), ("worker2", ["head"])):
        pair.hosts[name]["groups"] = groups
    pair.hosts["worker2"]["variables"]["llama_model_known_answer"] = known_answer_of()
    if not stays:
        del pair.hosts["head"]
    new = planned(pair)
    found = restarts(old, new)
    assert found["worker2"] == ["llamacpp-server"]
    assert found["worker1"] == ["llamacpp-worker-cpu"]
    assert drift(old, new, "worker2")["stale"] == ["llamacpp-worker-cpu"]
    if stays:
        assert drift(old, new, "head")["stale"] == ["llamacpp-server"]
        assert found["head"] == ["llamacpp-worker-cpu"]
