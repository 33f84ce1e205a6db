"""What tasks of roles and playbooks ask of Ansible's own modules."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROOT = Path(__file__).resolve().parents[2]


def tasks(items):
    """All tasks of a file, those in blocks too."""
    for item in items or []:
        yield item
        for part in ("tasks", "block", "rescue", "always"):
            yield from tasks(item.get(part))


def every(module):
    """Arguments of a module, wherever it is used."""
    for path in [*ROOT.glob("roles/*/tasks/**/*.yml"), *ROOT.glob("playbooks/**/*.yml")]:
        yield from (task[module] for task in tasks(yaml.safe_load(path.read_text())) if module in task)


def test_a_list_of_packages_is_asked_for_once_at_least():
    """ansible.builtin.apt counts tries: with update_cache_retries 0 it fails without one whenever the list is older than it may be."""
    updates = [arguments for arguments in every("ansible.builtin.apt") if arguments.get("update_cache")]
    assert updates
    assert all(arguments.get("update_cache_retries", 5) >= 1 for arguments in updates)


def test_pip_takes_what_its_checksum_names_and_runs_nothing_to_build_it():
    installs = [arguments for arguments in every("ansible.builtin.command") if "pip" in arguments.get("argv", [])]
    assert installs
    assert not list(every("ansible.builtin.pip"))
    for arguments in installs:
        assert {"--require-hashes", "--only-binary=supervisor", "--requirement=/dev/stdin"} <= set(arguments["argv"])
        assert re.search(r"==\{\{ \w+ \}\} --hash=sha256:\{\{ \w+ \}\}$", arguments["stdin"])
    known = yaml.safe_load((ROOT / "roles" / "llama_host" / "vars" / "main.yml").read_text())
    assert re.fullmatch(r"[0-9a-f]{64}", known["__llama_host_supervisor_sha256"])


def test_what_others_say_is_shown_without_control_characters():
    """A host's package manager, and a name that the operator gives with -e."""
    rendered = []
    for path in [*ROOT.glob("roles/*/tasks/**/*.yml"), *ROOT.glob("playbooks/**/*.yml")]:
        for task in tasks(yaml.safe_load(path.read_text())):
            message = (task.get("ansible.builtin.fail") or task.get("ansible.builtin.debug") or {}).get("msg", "")
            if "ansible_failed_result" in message or "llama_cluster_group" in message:
                known = {
                    "ansible_failed_result": {"msg": "E: \x1b]0;x\x07\x9b2J\nno space"},
                    "llama_cluster_group": "\x1b[2J\x9b",
                    "__llama_host_lacking": {"cmake": "cmake"},
                    "inventory_hostname": "here",
                }
                rendered.append(Templar(DataLoader(), known).template(trust_as_template(message)))
    assert len(rendered) == 6
    assert all(text.isprintable() for text in rendered)
    assert sum("E:  ]0;x 2J no space" in text for text in rendered) == 5
    assert any("pacman -Syu" in text for text in rendered), (
        "it supports no newer list without an update of all packages"
    )


def test_logs_of_supervisor_are_for_its_account_alone_and_files_of_services_as_before():
    role = ROOT / "roles" / "llama_host"
    assert "\numask=077\n" in (role / "templates/supervisord.conf.j2").read_text()
    assert "\numask=022\n" in (role / "templates/supervisor.conf.j2").read_text()
    assert "umask 077" in (role / "tasks/supervisor.yml").read_text(), "it opens its own log before it sets its umask"


def test_a_run_says_at_its_end_what_it_went_on_without():
    plays = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())
    last = next(play for play in plays if play["name"] == "Verify")
    assert last["tasks"][-1]["ansible.builtin.import_tasks"] == "tasks/without.yml"


def test_a_run_alone_may_fetch_a_list_of_packages():
    """plan.yml and verify.yml change no host."""
    users = {path.name for path in (ROOT / "playbooks").glob("*.yml") if "__llama_list_fetched" in path.read_text()}
    assert users == {"site.yml"}


def test_facts_are_read_as_root_where_the_installation_is_the_systems():
    """Root alone may ask systemd whether it filters addresses, and a password of sudo is there for tasks with become alone."""
    read = yaml.safe_load((ROOT / "playbooks" / "tasks" / "facts.yml").read_text())[0]
    assert read["become"] == "{{ llama_host_scope | default('auto') == 'system' }}"


@pytest.mark.parametrize("scope, account", [("system", "llamacpp"), ("user", "omitted"), (None, "omitted")])
def test_a_model_is_to_be_read_by_the_account_of_the_services(scope, account):
    """In the user scope that is whoever connects."""
    facts = {"facts": {"scope": scope, "names": {"account": "llamacpp"}}} if scope else {}
    templar = Templar(DataLoader(), variables={"__llama_facts": facts, "omit": "omitted"})
    found = [asked for asked in every("llamacpp.cluster.model") if asked["state"] == "found"]
    assert {templar.template(trust_as_template(asked["account"])) for asked in found} == {account}


def test_measuring_a_link_changes_nothing():
    measured = yaml.safe_load((ROOT / "roles" / "llama_link" / "tasks" / "measure.yml").read_text())
    asked = [task for task in measured if {"async", "ansible.builtin.async_status"} & set(task)]
    assert len(asked) == 2
    assert all(task["changed_when"] is False for task in asked)


def test_a_link_is_measured_at_a_worker_without_a_tunnel(pair):
    endpoints = [{"name": "a", "tunnel": "127.0.0.1:60052"}, {"name": "b", "port": 50053}]
    link = {"address": "10.0.0.2/24", "interface": "eth1"}
    pair.hosts["worker1"]["variables"].update(llama_links=[link], llama_worker_endpoints=endpoints)
    plan = pair.plan()
    assert plan["links"] == ["worker1"]
    measuring = yaml.safe_load((ROOT / "playbooks/tasks/before_verify.yml").read_text())[1]
    known = {name: trust_as_template(text) for name, text in measuring["vars"].items()}
    templar = Templar(DataLoader(), {**known, "__llama_link_plan": plan["hosts"]["worker1"]})
    asked = templar.template(trust_as_template("{{ [__llama_link_address, __llama_link_port] }}"))
    assert asked == ["10.0.0.2", 50153]


def test_retired_hosts_are_last_and_a_retired_head_stops_before_the_workers_change():
    """Its workers serve it until the new head is about to start; what it has is removed once the cluster serves without it."""
    plays = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())
    names = [play["name"] for play in plays]
    assert names.index("Look for what retired hosts still have") < names.index("Apply") < names.index("Verify")
    assert names[-2:] == ["Clean up retired hosts", "End"]
    apply = plays[names.index("Apply")]["tasks"]
    tasks = [step["name"] for task in apply for step in task.get("block", [task])]
    assert tasks.index("Stop a head that is retired") < tasks.index("Run the workers")
    assert tasks.index("Write the files of the plan") < tasks.index("Stop a head that is retired")


@pytest.mark.parametrize(
    "leased, released", [([], False), (["head"], True), (["old"], True)], ids=["nobody", "cluster", "retired"]
)
def test_a_run_that_took_the_lease_for_retired_hosts_alone_gives_it_back(leased, released):
    play = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())[-1]
    (step,) = play["tasks"]
    known = {
        **{name: trust_as_template(text) for name, text in play["vars"].items()},
        "ansible_play_hosts_all": ["head"],
        "groups": {"llama_retired": ["old"]},
        "hostvars": {name: {"__llama_leased": {}} if name in leased else {} for name in ("head", "old")},
    }
    assert Templar(DataLoader(), known).evaluate_conditional(trust_as_template(step["when"])) is released


@pytest.mark.parametrize("given, retired", [({}, "a"), ({"llama_cluster_group": "night"}, "b")])
def test_a_run_cleans_up_what_its_own_cluster_has_retired(given, retired):
    """Another cluster may use these hosts."""
    known = {"groups": {"llama_retired": ["a"], "llama_retired_night": ["b"], "llama_workers": ["a", "b"]}, **given}
    known["groups"].update(llama_cluster=["b"], night=["a"])
    check = yaml.safe_load((ROOT / "playbooks/tasks/inventory.yml").read_text())[-1]
    known.update({name: trust_as_template(text) for name, text in check["vars"].items()})
    plays = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())
    named = [play["hosts"] for play in plays if "retired" in play["name"]]
    named += [
        task["vars"]["__llama_retired_hosts"]
        for task in tasks(plays)
        if task.get("name") == "Stop a head that is retired"
    ]
    found = [Templar(DataLoader(), known).template(trust_as_template(text)) for text in named]
    assert found == [[retired]] * 3
    assert not Templar(DataLoader(), known).evaluate_conditional(trust_as_template(check["when"]))


@pytest.mark.programs
def test_a_host_that_is_retired_and_used_is_refused(tmp_path):
    used = {"hosts": {"box": {"ansible_connection": "local"}}}
    groups = {"llama_cluster": used, "llama_head": used, "llama_retired": used}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    run = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", ROOT / "playbooks" / "stop.yml", "-i", tmp_path / "hosts.yml"],
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_HOME": str(tmp_path), "ANSIBLE_FORCE_COLOR": "false"},
        check=False,
    )
    assert run.returncode == 2
    assert (
        "box is in llama_retired, and in llama_head or llama_workers as well: remove it from" in run.stdout + run.stderr
    )


OPENED = "Open ports to|__llama_firewall_keep: true|Run the workers|Run the head|Wait until the cluster|Close the ports"
REMOVED = "Stop the head before|Remove the services|Remove the rules of the firewall"


@pytest.mark.parametrize(
    "files, order",
    [(["site"], OPENED), (["tasks/restore", "tasks/rollback"], OPENED), (["tasks/remove_host"], REMOVED)],
)
def test_rules_of_a_firewall_stay_until_nothing_listens_behind_them(files, order):
    """A step in between may fail, and a host may reboot into its old services."""
    text = "".join((ROOT / f"playbooks/{file}.yml").read_text() for file in files)
    places = [text.index(part) for part in order.split("|")]
    assert places == sorted(places)
