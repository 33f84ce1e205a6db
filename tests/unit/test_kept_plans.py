"""Plans that a host keeps: what it writes, what it reads back, and the identity of a plan."""

import copy
import errno
import json
import os
import stat

import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.action import kept_plan as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kept_plans
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import kept_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.modules import host_info as host_info_module
from ansible_collections.llamacpp.cluster.plugins.modules import kept_plan as module
from conftest import identity
from support import actions
from support.rollbacks import begin, completed, placed, record_of, serve, with_id

MODULE = module


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "plans").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def record(pair, prefix):
    return record_of(placed(completed(pair), prefix), "head")


def kept(prefix):
    """Place → number of the plan there."""
    plans = {place: kept_plans.read_plan(str(prefix), place) for place in kept_plans.SLOTS}
    return {place: int(plan.id, 16) for place, plan in plans.items() if plan}


def test_a_plan_is_kept_before_it_is_applied_and_when_it_served(prefix, record):
    record = with_id(record, 1)
    assert begin(prefix, record, check=True)
    assert not list((prefix / "plans").iterdir())
    assert begin(prefix, record)
    assert stat.S_IMODE((prefix / "plans/next.json").stat().st_mode) == 0o600
    assert kept_plans.read_plan(str(prefix), kept_plans.CURRENT) is None
    assert not kept_plans.last_plan(str(prefix)).served
    assert kept_plans.mark_served(str(prefix), record["id"], check_mode=True)
    assert kept(prefix) == {"next": 1}
    assert kept_plans.mark_served(str(prefix), record["id"])
    assert kept(prefix) == {"now": 1}
    assert kept_plans.last_plan(str(prefix)) == (record["id"], "pypi-0.3.36", record["declared"], True, {})
    assert not begin(prefix, record)
    assert not kept_plans.mark_served(str(prefix), record["id"])


def test_the_plan_that_served_before_stays_and_a_way_back_leads_forward_again(prefix, record):
    for number in (1, 2, 3):
        serve(prefix, with_id(record, number))
    assert kept(prefix) == {"now": 3, "before": 2}
    kept_plans.mark_served(str(prefix), f"{2:016x}")
    assert kept(prefix) == {"now": 2, "before": 3}
    begin(prefix, with_id(record, 4))
    assert kept(prefix) == {"next": 4, "now": 2, "before": 3}
    kept_plans.mark_served(str(prefix), f"{2:016x}")
    assert kept(prefix) == {"now": 2, "before": 3}, "the change does not serve"
    with pytest.raises(Refusal, match="does not contain plan 0000000000000009"):
        kept_plans.mark_served(str(prefix), f"{9:016x}")


def test_a_part_that_changes_within_one_plan_replaces_what_serves(prefix, record):
    serve(prefix, record)
    newer = copy.deepcopy(record)
    newer["host"]["metrics"] = "/elsewhere"
    assert begin(prefix, newer, check=True)
    assert begin(prefix, newer)
    assert not begin(prefix, newer)
    assert kept_plans.read_plan(str(prefix), kept_plans.CURRENT).host.metrics == "/elsewhere"


def test_a_full_disk_ends_the_run(call, prefix, record, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{prefix}/plans/next.json")

    monkeypatch.setattr(kept_plans.files, "replace_file", full)
    failed = call(prefix=str(prefix), begun_record=record)
    assert failed["failed"]
    assert "Free space" in failed["msg"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(path.read_text()[:-40]),
        lambda path: os.truncate(path, kept_plans.MAX_PLAN_BYTES + 1),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 1})),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "host": None})),
        lambda path: path.unlink(),
    ],
    ids=["torn", "huge", "another schema", "another form", "missing"],
)
def test_what_cannot_be_read_is_as_if_it_were_not_there(prefix, record, spoil):
    serve(prefix, record)
    spoil(prefix / "plans/now.json")
    assert kept_plans.read_plan(str(prefix), kept_plans.CURRENT) is None
    assert kept_plans.last_plan(str(prefix)) is None
    assert kept_plans.kept_build_ids(str(prefix)) == set()
    serve(prefix, record)
    assert kept_plans.read_plan(str(prefix), kept_plans.CURRENT).id == record["id"]


def test_builds_of_all_kept_plans_stay(prefix, record):
    for number, build in enumerate(("a-cpu-1", "b-cpu-1", "c-cpu-1", "d-cpu-1"), 1):
        changed = copy.deepcopy(with_id(record, number))
        changed["host"]["builds"][0]["id"] = build
        begin(prefix, changed)
        if number < 4:
            kept_plans.mark_served(str(prefix), changed["id"])
    assert kept_plans.kept_build_ids(str(prefix)) == {"b-cpu-1", "c-cpu-1", "d-cpu-1"}


def test_a_host_differs_until_its_plan_is_the_last_one_that_served(prefix, record):
    """Also after a run that was killed before it touched a service, when the inventory is what it was."""

    def differences():
        return [found.kind for found in state._record_difference(record["id"], kept_plans.last_plan(str(prefix)))]

    assert differences() == ["record"]
    begin(prefix, record)
    assert differences() == ["record"]
    kept_plans.mark_served(str(prefix), record["id"])
    assert differences() == []
    begin(prefix, with_id(record, 2))
    assert differences() == ["record"]
    assert not begin(prefix, record)
    assert kept_plans.mark_served(str(prefix), record["id"])
    assert differences() == []
    assert not list(state._record_difference(None, None))


def test_a_host_tells_what_is_kept_and_what_services_miss(prefix, record, monkeypatch):
    serve(prefix, record)
    model = record["model"]["path"]
    drift = Drift({}, (), (), (), (), (model,), ("/models/part.gguf",), (), (), None, ())
    monkeypatch.setattr(host_info_module.state, "compare_host", lambda part: drift)
    answered = host_info_module.compare_kept_plan(kept_plans.read_plan(str(prefix), kept_plans.CURRENT))
    assert answered["plan"]["id"] == record["id"]
    assert answered["missing"] == sorted([model, "/models/part.gguf"])


def test_a_host_gets_the_text_of_files_and_no_path_of_the_controller(pair):
    plugin = actions.made(action, prefix="/opt/llamacpp", plan=completed(pair))
    plugin._execute_module = lambda module_args, task_vars: module_args
    given = {"llama_server_context": "4096", "llama_server_parallel": None, "llama_worker_memory_mib": {}, "other": 1}
    arguments = plugin.run(task_vars={"inventory_hostname": "head", "hostvars": {"head": given}})
    assert "plan" not in arguments
    files = arguments["begun_record"]["host"]["files"]
    assert not any("source" in file for file in files)
    assert any("def main" in file.get("content", "") for file in files)
    kept = typed_json.parse(kept_plan.KeptPlan, arguments["begun_record"])
    assert kept.variables == {"llama_server_context": "4096", "llama_release": kept.declared}, "those that are set"


CHECKSUM = f"sha256:{'0' * 64}"
PYPI = {"source": "pypi", "version": "0.3.36", "checksum": CHECKSUM}
RELEASES = {
    "a tag": "b11434",
    "a commit": {"source": "git", "repository": "/srv/llama.cpp", "ref": "master", "commit": "a" * 40, "build": 11434},
    "llama-cpp-python": PYPI,
    "an archive": {"source": "archive", "path": "/srv/a.tar.gz", "checksum": CHECKSUM, "build": 11434},
    "programs": {"source": "binary", "url": "https://x/b.tar.gz", "checksum": CHECKSUM, "build": 11434},
    "patches": {**PYPI, "patches": ["/srv/a.patch"]},
}


@pytest.mark.parametrize("requested", RELEASES.values(), ids=RELEASES)
def test_what_llama_release_has_to_be_plans_the_same_release(requested):
    release = releases.release_of(release_request.request_of(requested), {})
    shown = yaml.safe_load(release_request.release_json(release))
    assert releases.release_of(release_request.request_of(shown), {}).id == release.id


def test_the_identity_is_that_of_what_is_applied(pair):
    plan, again = completed(pair), completed(pair)
    assert plan["id"] == again["id"] == plan["hosts"]["worker1"]["id"]
    again["hosts"]["head"]["files"].append({"path": "/opt/llamacpp/facts.json", "bytes": 1, "sha256": "0" * 64})
    again["hosts"]["head"]["files"][0]["source"] = "/elsewhere/runtime.py"
    assert identity(again) == identity(plan)
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"device": "CPU", "port": 50099}]
    assert completed(pair)["id"] != plan["id"]
