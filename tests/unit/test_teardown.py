"""The empty plan, what a teardown does with it, and that it removes all that a plan installs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import plan as plan_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.apply import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import empty, entry

ROOT = Path(__file__).resolve().parents[2]
FACTS = {
    "scope": "system",
    "prefix": "/opt/llamacpp",
    "cache": "/var/cache/llamacpp",
    "host_settings": True,
    "defined": ["llamacpp-server", "llamacpp-worker-cpu"],
    "accounts": {"llamacpp": "/opt/llamacpp", "llamacpp-build": "/opt/llamacpp", "llamacppy": "/home/llamacppy"},
    "firewall": "nftables",
    "supervisor": {"running": False},
}


def test_the_empty_plan_has_nothing_and_names_what_goes():
    hosts = empty.plan({"here": {"facts": FACTS}, "lost": {}})["hosts"]
    assert list(hosts) == ["here"]
    planned = hosts["here"]
    assert [planned[key] for key in ("services", "builds", "links", "firewall")] == [[], [], [], []]
    assert planned["tuning"] == {"parameters": {}, "profile": "", "reboot": False}
    assert planned["stale"] == FACTS["defined"]
    assert planned["accounts"] == ["llamacpp", "llamacpp-build"]
    assert planned["build_account"] == names.BUILD_ACCOUNT
    assert planned["folders"] == [f"/opt/llamacpp/{name}" for name in names.INSTALLED]
    assert (planned["scope"], planned["supervisor"]) == ("system", {"running": False})


def test_accounts_of_others_stay_where_the_installation_is_a_users():
    hosts = empty.plan({"here": {"facts": {**FACTS, "scope": "user"}}})["hosts"]
    assert (hosts["here"]["accounts"], hosts["here"]["build_account"]) == ([], None)
    accounts = {**FACTS, "accounts": {"llamacpp": "/opt/llamacpp"}}
    assert empty.plan({"here": {"facts": accounts}})["hosts"]["here"]["build_account"] is None


@pytest.mark.parametrize("scope, account", [("system", "llamacpp"), ("user", None)])
def test_check_mode_finds_the_releases_that_go(tmp_path, scope, account):
    """They are still there then, so it is asked which of them run, and as which account."""
    places = {"prefix": str(tmp_path), "cache": f"{tmp_path}/cache", "units": f"{tmp_path}/units"}
    facts = {**FACTS, **places, "scope": scope, "service_manager": "systemd"}
    (tmp_path / "releases" / "b8600-cpu-0123abcd").mkdir(parents=True)
    planned = empty.plan({"here": {"facts": facts}})["hosts"]["here"]
    assert planned["account"] == account
    assert state.unneeded_releases(planned, applied=True) == ["b8600-cpu-0123abcd"]


@pytest.mark.parametrize(
    "facts",
    [None, [], {}, {**FACTS, "prefix": "x"}, {**FACTS, "accounts": ["root"]}, {**FACTS, "defined": ["a\nb"]}],
)
def test_a_host_may_say_anything_of_itself(facts):
    arguments = {"empty": True, "facts": {"here": {"facts": FACTS}, "there": {"facts": facts}}}
    task = mock.Mock(args=arguments, async_val=0, action="llamacpp.cluster.plan")
    action = plan_action.ActionModule(task, mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock())
    with pytest.raises(AnsibleActionFail, match="the facts of there are not as"):
        action.run(task_vars={})


@pytest.mark.parametrize("manager", ["systemd", "supervisor"])
def test_what_a_plan_installs_is_what_a_teardown_removes(pair, manager):
    """All paths of a plan below its prefix, but models."""
    for name in ("head", "worker1"):
        pair.hosts[name]["facts"].update(
            service_manager=manager, units=names.places("system", manager, {"HOME": "/"})["units"]
        )
    made = pair.plan()
    plan_action.complete(made)
    plan_action.keep_facts(made, entry.read("test", pair.hosts))
    prefix = "/opt/llamacpp/"
    parts = set()
    for host in made["hosts"].values():
        paths = [*(entry["path"] for entry in [*host["folders"], *host["files"]]), host["units"]]
        paths += [word for service in host["services"] for word in [*service["argv"], *service["environment"].values()]]
        parts |= {path[len(prefix) :].split("/")[0] for path in paths if path.startswith(prefix)}
    assert {"releases", "runtime", "state", names.KEPT_FACTS} <= parts
    assert parts <= {*names.INSTALLED, "models"}


def test_what_tasks_put_below_the_prefix_is_removed():
    put = set()
    for path in ROOT.glob("roles/llama_*/tasks/*.yml"):
        if path.name != "remove.yml":
            text = path.read_text() + (ROOT / "playbooks/tasks/before_verify.yml").read_text()
            put |= {part.split("/")[0].split('"')[0] for part in text.split(".prefix }}/")[1:]}
    assert put == {"venv", "supervisor", "lingering", "links"}
    assert put <= set(names.INSTALLED)


def test_a_host_that_is_lost_stops_no_teardown_and_is_named_last():
    plays = yaml.safe_load((ROOT / "playbooks/teardown.yml").read_text())
    assert not any("any_errors_fatal" in play for play in plays)
    assert plays[-1]["tasks"][-1]["ansible.builtin.import_tasks"] == "tasks/left.yml"


PLAYBOOK = f"""
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.raw: echo here
- hosts: all
  gather_facts: false
  tasks:
    - name: Be torn down
      ansible.builtin.raw: echo torn down
    - ansible.builtin.import_tasks: {ROOT}/playbooks/tasks/left.yml
"""


@pytest.mark.programs
def test_the_head_that_cannot_be_reached_is_named(tmp_path):
    (tmp_path / "run.yml").write_text(PLAYBOOK)
    hosts = {"head": {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}}
    hosts["worker"] = {"ansible_connection": "local"}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts.yml", "run.yml"],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "head could not be reached or failed above" in done.stdout
    assert done.stdout.index("torn down]") < done.stdout.index("head could not be reached or failed above")


def remove(path, prefix):
    """What the steps of a teardown print that remove the installation with its models."""
    removal = yaml.safe_load((ROOT / "roles/llama_host/tasks/remove.yml").read_text())
    of_models = [task for task in removal if "models" in str(task)]
    (path / "run.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": of_models}]))
    hosts = {"here": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}}
    (path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    planned = {"prefix": str(prefix), "folders": [f"{prefix}/{name}" for name in names.INSTALLED]}
    program, given = Path(sys.executable).with_name("ansible-playbook"), json.dumps({"llama_host_plan": planned})
    done = subprocess.run(
        [program, "-i", "hosts.yml", "run.yml", "-e", given], cwd=path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return " ".join(done.stdout.split())


GENERATED = ["known-answer-8x64-f32.gguf", "known-answer-8x64-f32.gguf.1.sha256"]


def installed(prefix, models, *files):
    """An installation, whose models are in a folder, or in one to which a link leads."""
    models.mkdir(parents=True)
    for name in [*files, *GENERATED]:
        (models / name).write_text("")
    for name in names.INSTALLED:
        (prefix / name).mkdir(parents=True)
    if models != prefix / "models":
        (prefix / "models").symlink_to(models)


@pytest.mark.programs
def test_models_of_others_stay_and_nothing_else(tmp_path):
    """Below the installation: the known-answer models were generated."""
    prefix = tmp_path / "llamacpp"
    installed(prefix, prefix / "models", "glm.gguf")
    said = remove(tmp_path, prefix)
    assert [str(path.relative_to(prefix)) for path in prefix.rglob("*")] == ["models", "models/glm.gguf"]
    assert f"{prefix}/models on here stays with its models. Remove it by hand where nothing else uses it." in said


@pytest.mark.programs
def test_nothing_stays_where_no_model_is_somebody_elses(tmp_path):
    prefix = tmp_path / "llamacpp"
    installed(prefix, prefix / "models")
    assert "stays with" not in remove(tmp_path, prefix)
    assert not prefix.exists()


@pytest.mark.programs
@pytest.mark.parametrize("files", [[], ["glm.gguf"]])
def test_what_lies_behind_a_link_stays_and_is_named(tmp_path, files):
    """Another cluster may use it, known-answer models too."""
    prefix, models = tmp_path / "llamacpp", tmp_path / "shared" / "models"
    installed(prefix, models, *files)
    said = remove(tmp_path, prefix)
    assert f"{models} on here stays with its models, since {prefix}/models is a link to it. Remove it by hand" in said
    assert sorted(path.name for path in models.iterdir()) == sorted([*files, *GENERATED])
    assert not any((prefix / name).exists() for name in names.INSTALLED)
