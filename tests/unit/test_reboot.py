"""What playbooks/reboot.yml says and does, on hosts that are this machine, with a stand-in for the reboot."""

import json
import time
from unittest import mock

import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.action import reboot as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from conftest import ROOT
from support import actions, playbook_runs

WORKERS = {"one": ["cpu"], "two": ["cpu", "hip"], "spare": []}


def plan(fallbacks=(), after=None):
    hosts = {
        name: {"workers": [{"name": worker, "used": True} for worker in workers], "scope": "user"}
        for name, workers in {**WORKERS, "top": []}.items()
    }
    return {
        "hosts": hosts,
        "head": {"host": "top", "fallback_after": after},
        "fallbacks": [{"without": name} for name in fallbacks],
    }


def while_away(planned, host):
    """What serves while a host is away, from what of the plan counts."""
    hosts = {
        name: mock.Mock(workers=[mock.Mock(used=True) for _ in part["workers"]])
        for name, part in planned["hosts"].items()
    }
    for name, part in planned["hosts"].items():
        for worker, entry in zip(hosts[name].workers, part["workers"]):
            worker.name = entry["name"]
    fallbacks = [mock.Mock(without=entry["without"]) for entry in planned["fallbacks"]]
    return changes.absence_note(
        mock.Mock(hosts=hosts, head=mock.Mock(models=None, **planned["head"]), fallbacks=fallbacks), host
    )


def changed(planned):
    return {"absence_notes": {name: while_away(planned, name) for name in planned["hosts"]}}


def play(path, tasks, variables, *arguments):
    """What a play of all four hosts prints."""
    (path / "run.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    names = dict.fromkeys([*WORKERS, "top"])
    inventory = {"all": {"hosts": names, "vars": playbook_runs.LOCAL}}
    return playbook_runs.run(path, "run.yml", inventory, "-e", json.dumps(variables), *arguments)[1]


@pytest.mark.parametrize(
    "fallbacks, after, host, said",
    [
        (["one:cpu", "two:cpu", "two:hip", "two"], 60, "one", "the head serves without one:cpu"),
        (["one:cpu", "two:cpu", "two:hip", "two"], 60, "two", "the head serves without two"),
        (["one:cpu", "two"], None, "one", "no fallback is planned for its absence"),
        (["two:cpu", "two:hip"], 60, "two", "no fallback is planned for its absence"),
    ],
)
def test_a_host_is_spared_where_a_fallback_goes_without_all_that_it_lends(fallbacks, after, host, said):
    assert said in while_away(plan(fallbacks, after), host)


@pytest.mark.programs
def test_it_says_before_what_serves_meanwhile(tmp_path):
    planned = plan(["one:cpu"], 60)
    tasks = [{"ansible.builtin.include_tasks": f"{ROOT}/playbooks/tasks/reboot_host.yml"}]
    said = play(tmp_path, tasks, {"__llama_plan": planned, "__llama_changes": changed(planned)}, "--check")
    assert "one is about to reboot. After a wait (llama_server_fallback_after), the head" in said
    assert "two is about to reboot. The head does not answer until this host is back" in said
    assert "spare is about to reboot. The cluster does not use this host." in said
    assert "The cluster does not answer until this head is back." in said


def test_a_run_that_waits_for_a_host_shows_progress(monkeypatch):
    plugin, display = actions.made(action), mock.Mock()
    reboot = mock.Mock(side_effect=lambda *_arguments, **_more: time.sleep(0.2) or {"rebooted": True})
    monkeypatch.setattr(plugin, "run_action", reboot)
    monkeypatch.setattr(action, "display", display)
    monkeypatch.setattr(action, "PROGRESS_INTERVAL_SECONDS", 0.05)
    assert plugin.run(task_vars={"inventory_hostname": "one"}) == {"rebooted": True}
    reboot.assert_called_once_with("ansible.builtin.reboot", reboot_timeout=1800)
    lines = [call.args[0] for call in display.display.call_args_list]
    assert 2 <= len(lines) <= 4
    assert lines[0] == "  [one] reboot: waited 0 s for the host (limit 1800 s)"


ALL = object()
"""Where llama_reboot_hosts is not set."""


def deciding(plan):
    """The tasks of a play that decide which hosts reboot, and say so."""
    names = ("Decide whether to reboot the host", "Report whether the host will reboot, and why")
    return [task for task in plan["tasks"] if task["name"] in names]


def hosts_of(path, named, *arguments):
    """What the first steps of playbooks/reboot.yml print for llama_reboot_hosts."""
    plays = yaml.safe_load((ROOT / "playbooks/reboot.yml").read_text())
    (plan,) = (play for play in plays if play["name"] == "Plan")
    play = {
        "hosts": "llama_head:llama_workers",
        "gather_facts": False,
        "vars_files": [str(ROOT / "playbooks" / path) for path in plan["vars_files"]],
        "vars": plan["vars"],
        "tasks": [plan["tasks"][0], *deciding(plan)],
    }
    groups = {"llama_head": {"hosts": {"top": {}}}, "llama_workers": {"hosts": dict.fromkeys(WORKERS)}}
    (path / "run.yml").write_text(yaml.safe_dump([play]))
    given = {"__llama_reboot_markers": {"results": []}, **({} if named is ALL else {"llama_reboot_hosts": named})}
    inventory = {"llama_cluster": {"children": groups}}
    return " ".join(playbook_runs.run(path, "run.yml", inventory, "-e", json.dumps(given), *arguments)[1].split())


@pytest.mark.programs
def test_hosts_that_are_named_reboot_and_a_wrong_name_reboots_nothing(tmp_path):
    """The operator gives them with -e, and what is empty is not what is missing."""
    shown = hosts_of(tmp_path, "one, top")
    for name in ("one", "top"):
        assert f"{name}: will reboot (requested)" in shown
    for name in ("two", "spare"):
        assert f"{name}: is not in llama_reboot_hosts" in shown
    assert hosts_of(tmp_path, ALL).count("needs no reboot") == 4
    refusals = {
        "llama_reboot_hosts contains hosts that are not in the cluster (strix9)": ("one,strix9",),
        "llama_reboot_hosts is empty": ("",),
        "--limit excludes top, spare": (ALL, "--limit", "one,two"),
        "for example -e llama_reboot_hosts=top,one; --limit excludes top, spare": ("strix9", "--limit", "one,two"),
    }
    for refusal, arguments in refusals.items():
        shown = hosts_of(tmp_path, *arguments)
        assert refusal in shown
        assert "-e llama_reboot_hosts=top,one" in shown
        assert "will reboot (" not in shown


@pytest.mark.programs
def test_hosts_that_need_it_reboot_where_none_is_named(tmp_path):
    plays = yaml.safe_load((ROOT / "playbooks/reboot.yml").read_text())
    (plan,) = (play for play in plays if play["name"] == "Plan")
    marks = {"results": [{"item": "/run/reboot-required", "stat": {"exists": "{{ inventory_hostname == 'one' }}"}}]}
    waits = "{{ 'a reboot is needed for ttm.pages_limit=1' if inventory_hostname == 'two' else '' }}"
    variables = {
        "__llama_reboot_requested_hosts": [*WORKERS, "top"],
        "__llama_reboot_markers": marks,
        "__llama_host_reboot_reason": waits,
    }
    said = play(tmp_path, deciding(plan), variables)
    assert "one: will reboot (/run/reboot-required)" in said
    assert "two: will reboot (a reboot is needed for ttm.pages_limit=1)" in said
    assert "spare: needs no reboot" in said


STAND_IN = """
import json, os
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={"does": {}, "host": {}, "file": {}})
failing = []
with open(module.params["file"], "r+") as file:
    told = json.load(file)
    if module.params["does"] == "verifies":
        failing = told["answers"].pop(0) if told["answers"] else []
    told["done"].append([module.params["host"], module.params["does"], *failing])
    file.seek(0)
    file.truncate()
    json.dump(told, file)
if failing:
    module.fail_json(msg="Verification failed: x.", failing=failing)
module.exit_json()
"""
"""A module that notes what is done, and as verify reports which checks fail."""


def reboots(path, answers):
    """What playbooks/reboot.yml does on each host, its plays of workers and head, where verify answers so; and what it prints."""
    steps = yaml.safe_load((ROOT / "playbooks/tasks/reboot_host.yml").read_text())

    def stand_in(does):
        arguments = {"does": does, "host": "{{ inventory_hostname }}", "file": f"{path}/told.json"}
        return {"name": does, "stand_in": arguments}

    steps[1]["block"] = [stand_in(does) for does in ("reboots", "starts", "verifies")]
    plays = [play for play in yaml.safe_load((ROOT / "playbooks/reboot.yml").read_text()) if "Reboot" in play["name"]]
    for play in plays:
        play["vars_files"] = [str(ROOT / "playbooks" / path) for path in play["vars_files"]]
    for name, content in {
        "library/stand_in.py": STAND_IN,
        "tasks/reboot_host.yml": yaml.safe_dump(steps),
        "told.json": json.dumps({"answers": answers, "done": []}),
        "plays.yml": yaml.safe_dump(plays),
    }.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content)
    planned = plan(["one:cpu", "two"], 60)
    given = {"__llama_changes": changed(planned), "__llama_reboot_causes": ["requested"]}
    groups = {"llama_head": {"hosts": {"top": {}}}, "llama_workers": {"hosts": {"one": {}, "two": {}}}}
    inventory = {"llama_cluster": {"children": groups, "vars": playbook_runs.LOCAL}}
    library = str(path / "library")
    status, printed = playbook_runs.run(path, "plays.yml", inventory, "-e", json.dumps(given), ANSIBLE_LIBRARY=library)
    return json.loads((path / "told.json").read_text())["done"], status, printed


@pytest.mark.programs
def test_each_host_is_verified_before_the_next_reboots(tmp_path):
    done, status, printed = reboots(tmp_path, [])
    assert status == 0, printed
    assert done == [[host, does] for host in ("one", "two", "top") for does in ("reboots", "starts", "verifies")]
    assert "one is about to reboot. After a wait (llama_server_fallback_after), the head" in printed


@pytest.mark.programs
def test_a_cluster_that_is_not_verified_ends_it_at_once(tmp_path):
    done, status, printed = reboots(tmp_path, [["known answer"]])
    assert status
    assert done[-1] == ["one", "verifies", "known answer"]
    assert "failed: Verification failed: x." in " ".join(printed.split())


def test_there_is_time_until_the_head_serves_the_whole_plan_again():
    block = yaml.safe_load((ROOT / "playbooks/tasks/reboot_host.yml").read_text())[1]["block"]
    (verify,) = (step for step in block if "llamacpp.cluster.verify" in step)
    assert verify["llamacpp.cluster.verify"]["fallback_wait"] >= 600 + runtime.MIN_STABLE_SECONDS
