"""Records of plans: what hosts write, what they read back, and the identity of a plan."""

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
from ansible_collections.llamacpp.cluster.plugins.action import host_info, host_status
from ansible_collections.llamacpp.cluster.plugins.action import plan_history as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import plan_history as plans
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.modules import host_info as host_info_module
from ansible_collections.llamacpp.cluster.plugins.modules import plan_history as module
from ansible_collections.llamacpp.cluster.plugins.modules import plan_history_info as info
from conftest import identity
from support import actions
from support.rollbacks import NAMES, begin, completed, placed, record_of, serve, with_id

MODULE = module


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "plans").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def record(pair, prefix):
    return record_of(placed(completed(pair), prefix), "head")


def numbers(prefix):
    return [int(plan.id, 16) for plan in plans.summaries(str(prefix))]


def test_a_plan_is_recorded_before_it_is_applied_and_when_it_served(prefix, record):
    assert begin(prefix, record)
    path = prefix / "plans" / f"{record['id']}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [plan.state for plan in plans.summaries(str(prefix))] == ["applying"]
    assert not plans.serves(str(prefix), record["id"])
    assert plans.mark_served(str(prefix), record["id"])
    assert plans.serves(str(prefix), record["id"])
    summary = plans.summaries(str(prefix))[0]
    assert (summary.release, summary.head, summary.hosts) == ("pypi-0.3.36", True, NAMES)
    before = path.read_bytes()
    assert not begin(prefix, record)
    assert not plans.mark_served(str(prefix), record["id"])
    assert path.read_bytes() == before


def test_a_part_that_changes_within_one_plan_replaces_the_record_of_what_serves(prefix, record):
    serve(prefix, record)
    before = plans.summaries(str(prefix))
    newer = copy.deepcopy(record)
    newer["host"]["keep_releases"] += 1
    assert begin(prefix, newer, check=True)
    assert begin(prefix, newer)
    assert not begin(prefix, newer)
    assert plans.summaries(str(prefix)) == before
    assert plans.newest(str(prefix)).host.keep_releases == newer["host"]["keep_releases"]


@pytest.fixture
def nothing_differs(monkeypatch):
    drift = Drift({}, (), (), (), (), (), (), (), (), (), ())
    monkeypatch.setattr(state, "drift", lambda part: drift)
    monkeypatch.setattr(host_info_module.ownership, "check", lambda part: None)
    monkeypatch.setattr(state, "taken_ports", lambda services, states: None)
    return drift


def test_a_host_compares_itself_with_what_served_last(prefix, record, nothing_differs, monkeypatch):
    assert host_info_module.since_served(str(prefix)) is None
    begin(prefix, record)
    assert host_info_module.since_served(str(prefix)) is None
    serve(prefix, record)
    part = typed_json.parse(HostPlan, record["host"])
    assert host_info_module.since_served(str(prefix)) == (history.digest(part), nothing_differs)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert host_info_module.since_served(str(prefix)) is None


def test_what_would_end_a_comparison_is_left_to_it(prefix, record, nothing_differs, monkeypatch):
    serve(prefix, record)
    monkeypatch.setattr(state, "taken_ports", lambda services, states: "Something else already uses 1.")
    assert host_info_module.since_served(str(prefix)) is None
    monkeypatch.setattr(state, "taken_ports", lambda services, states: None)

    def refuse(part):
        raise Refusal("not ours")

    monkeypatch.setattr(host_info_module.ownership, "check", refuse)
    assert host_info_module.since_served(str(prefix)) is None


def test_only_what_a_host_said_of_the_same_part_counts(record):
    part = typed_json.parse(HostPlan, record["host"])
    unread = part._replace(files=tuple(file._replace(content=None, source="/elsewhere") for file in part.files))
    assert history.digest(unread) == history.digest(part)
    said = {"digest": history.digest(part), "drift": "said", "condition": "said"}
    for plugin, argument in ((host_info, "compared"), (host_status, "known")):
        for plan, asked in ((record["host"], False), ({**record["host"], "keep_releases": 9}, True)):
            action = actions.made(plugin, plan=plan, **{argument: said})
            action._execute_module = mock.Mock(return_value={"drift": "asked"})
            assert action.run(task_vars={})["drift"] == ("asked" if asked else "said")
            assert action._execute_module.called is asked
            if asked:
                arguments = action._execute_module.call_args.kwargs["module_args"]
                assert (arguments["plan"]["keep_releases"], arguments[argument]) == (9, None)


def test_check_mode_writes_nothing(prefix, record):
    assert begin(prefix, record, check=True)
    assert not list((prefix / "plans").iterdir())
    assert begin(prefix / "missing", record, check=True)


def test_plans_that_served_outlive_those_that_did_not(prefix, record):
    for number in (1, 2):
        serve(prefix, with_id(record, number))
    for number in range(3, 12):
        begin(prefix, with_id(record, number))
    assert numbers(prefix) == [11, 10, 9, 2, 1]


def test_the_last_plan_is_the_newest_even_where_the_clock_was_set_back(prefix, record, monkeypatch):
    serve(prefix, with_id(record, 1))
    monkeypatch.setattr(time, "time", lambda: 1.0)
    serve(prefix, with_id(record, 2))
    assert numbers(prefix) == [2, 1]


@pytest.mark.faults
@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_fault_while_a_plan_is_recorded_loses_nothing(prefix, record, monkeypatch, kind):
    serve(prefix, with_id(record, 1))
    broken = faults.Faults(monkeypatch, kind, str(prefix))
    for number in range(12):
        broken.at, broken.count = number, 0
        try:
            begin(prefix, with_id(record, 2))
        except (OSError, faults.Killed):
            broken.at = None
            assert plans.serves(str(prefix), f"{1:016x}")
        broken.at = None
    begin(prefix, with_id(record, 2))
    assert [plan.state for plan in plans.summaries(str(prefix))] == ["applying", "served"]


def test_a_full_disk_ends_the_run(call, prefix, record, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{prefix}/plans/x.json")

    monkeypatch.setattr(plans.files, "replace_file", full)
    failed = call(state="recorded", prefix=str(prefix), record=record)
    assert failed["failed"]
    assert "Free some space" in failed["msg"]


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
    "huge": (lambda path, record: os.truncate(path, history.RECORD_BYTES + 1), "has more than"),
    "a link": (link, "symbolic link|Too many levels"),
    "another id": (spoiled(lambda r: r.update(id="f" * 16)), "it.id|id is"),
    "a schema that is not known": (spoiled(lambda r: r.update(schema=2)), "schema is 2"),
    "a file outside": (spoiled(lambda r: r["host"]["files"][0].update(path="/etc/passwd")), "not below"),
    "a file that leaves": (
        spoiled(lambda r: r["host"]["files"][0].update(path=r["host"]["prefix"] + "/../../etc/passwd")),
        "not below",
    ),
    "a record outside": (
        spoiled(lambda r: r["host"]["files"].append({"path": r["host"]["prefix"] + "/m", "bytes": 1, "record": "/x"})),
        "not below",
    ),
    "a folder that leaves": (spoiled(lambda r: r["host"]["folders"][0].update(path="/opt/../etc")), "folders"),
    "a build with a slash": (spoiled(lambda r: r["host"]["builds"][0].update(id="../x")), "builds"),
    "a service with a slash": (spoiled(lambda r: r["host"]["services"][0].update(name="../x")), "services"),
    "a control character": (spoiled(lambda r: r["host"]["services"][0].update(listens="1\x1b[2J")), "services"),
    "a definition with one": (
        spoiled(lambda r: r["host"]["services"][0].update(definition="a\x1b[2J")),
        "control character in a",
    ),
    "a definition that is none": (spoiled(lambda r: r["host"]["services"][0].update(definition=7)), "definition is 7"),
    "no part": (spoiled(lambda r: r.update(host=None)), "host"),
    "a head with another address": (spoiled(lambda r: r["head"].update(own_url="http://evil/x")), "own_url"),
}


@pytest.mark.parametrize("spoil, reason", HOSTILE.values(), ids=HOSTILE)
def test_a_record_is_read_as_what_anybody_may_have_written(prefix, record, spoil, reason):
    serve(prefix, record)
    path = prefix / "plans" / f"{record['id']}.json"
    spoil(path, json.loads(path.read_text()))
    with pytest.raises(Refusal, match=reason):
        plans.read(str(prefix), record["id"])
    found = plans.read_all(str(prefix))
    assert (found.records, len(found.unreadable)) == ([], 1)
    assert found.unreadable[0].isprintable()
    assert plans.summaries(str(prefix)) == []
    assert plans.builds(str(prefix)) == set()


@pytest.mark.parametrize("identity", ["../x", "", "0123456789ABCDEF", "\x1b[2J" * 4])
def test_an_id_is_never_a_path(prefix, identity):
    with pytest.raises(Refusal, match="is not the id of a plan") as refused:
        plans.read(str(prefix), identity)
    assert str(refused.value).isprintable()


def test_a_folder_that_this_account_may_not_read_has_no_plans(prefix, monkeypatch):
    def forbidden(_path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", forbidden)
    assert plans.summaries(str(prefix)) == []
    assert plans.builds(str(prefix)) == set()


def test_builds_of_the_last_two_that_served_stay(prefix, record):
    for number, build in enumerate(("a-cpu-1", "b-cpu-1", "c-cpu-1", "d-cpu-1"), 1):
        changed = copy.deepcopy(with_id(record, number))
        changed["host"]["builds"][0]["id"] = build
        begin(prefix, changed)
        if number < 4:
            plans.mark_served(str(prefix), changed["id"])
    assert plans.builds(str(prefix)) == {"c-cpu-1", "b-cpu-1"}


def test_a_host_differs_until_its_plan_is_the_last_one_that_served(prefix, record):
    """Also after a run that was killed before it touched a service, when the inventory is what it was."""

    def differences():
        return [found.kind for found in state._record(record["id"], plans.summaries(str(prefix)))]

    assert differences() == ["record"]
    begin(prefix, record)
    assert differences() == ["record"]
    plans.mark_served(str(prefix), record["id"])
    assert differences() == []
    begin(prefix, with_id(record, 2))
    assert differences() == ["record"]
    assert not begin(prefix, record)
    assert plans.mark_served(str(prefix), record["id"])
    assert differences() == []
    assert not list(state._record(None, []))


def test_the_info_module_reads_a_record_and_what_its_services_miss(prefix, record, monkeypatch):
    serve(prefix, record)
    model = record["model"]["path"]
    drift = Drift({}, (), (), (), (), (model,), ("/models/part.gguf",), (), (), (), ())
    monkeypatch.setattr(info.state, "drift", lambda part: drift)
    answered = info.compared(str(prefix), record["id"])
    assert answered["record"]["id"] == record["id"]
    assert answered["missing"] == sorted([model, "/models/part.gguf"])


def test_a_host_gets_the_text_of_files_and_no_path_of_the_controller(pair):
    plugin = actions.made(action, state="recorded", prefix="/opt/llamacpp", plan=completed(pair))
    plugin._execute_module = lambda module_args, task_vars: module_args
    arguments = plugin.run(task_vars={"inventory_hostname": "head"})
    assert "plan" not in arguments
    files = arguments["record"]["host"]["files"]
    assert not any("source" in file for file in files)
    assert any("def main" in file.get("content", "") for file in files)
    assert history.problem(arguments["record"]) is None


FALLBACK = {
    "endpoint": "192.0.2.11:50052",
    "placement": [],
    "head": {"argv": []},
    "workers": [],
    "generation_tokens_per_s": 1.0,
    "generation_range": {"low": 0.8, "high": 1.3},
}


def summary_of(record):
    return history.summary(typed_json.parse(history.PlanRecord, record))


def test_the_head_records_which_hosts_may_be_away(pair):
    plan = completed(pair)
    assert summary_of(record_of(plan, "worker1")).spared is None
    plan["hosts"]["worker2"]["workers"][0]["used"] = False
    plan["head"]["fallback_after"], plan["fallbacks"] = 60, [{**FALLBACK, "without": "worker1:cpu"}]
    record = record_of(plan, "head")
    assert summary_of(record).spared == {"worker1": True, "worker2": False}
    assert history.problem(record) is None
    assert history.problem({**record, "spared": {"worker1": "yes"}}).where == "it.spared.worker1"
    assert history.problem({**record, "host": {**record["host"], "files": None}}) is None
    plan["head"]["fallback_after"] = None
    assert record_of(plan, "head")["spared"] == {"worker2": False}


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


@pytest.mark.parametrize("requested", RELEASES.values(), ids=RELEASES)
def test_what_llama_release_has_to_be_plans_the_same_release(requested):
    release = releases.release_of(release_request.request_of(requested), {})
    shown = yaml.safe_load(release_request.declaration(release.as_plan()))
    shown.update({"patches": requested["patches"]} if "patches" in shown else {})
    assert releases.release_of(release_request.request_of(shown), {}).id == release.id


def test_the_identity_is_that_of_what_is_applied(pair):
    plan, again = completed(pair), completed(pair)
    assert plan["id"] == again["id"] == plan["hosts"]["worker1"]["id"]
    for host in pair.hosts.values():
        host["variables"]["llama_build_keep"] = 1
    assert completed(pair)["id"] == plan["id"]
    again["hosts"]["head"]["files"].append({"path": "/opt/llamacpp/facts.json", "bytes": 1, "sha256": "0" * 64})
    again["hosts"]["head"]["files"][0]["source"] = "/elsewhere/runtime.py"
    assert identity(again) == identity(plan)
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"device": "CPU", "port": 50099}]
    assert completed(pair)["id"] != plan["id"]
