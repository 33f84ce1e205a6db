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
    assert re.fullmatch(r"[0-9a-f]{64}", known["llama_host_supervisor_sha256"])


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
                    "llama_host_lacking": {"cmake": "cmake"},
                    "inventory_hostname": "here",
                }
                rendered.append(Templar(DataLoader(), known).template(trust_as_template(message)))
    assert len(rendered) == 6
    assert all(text.isprintable() for text in rendered)
    assert sum("E:  ]0;x 2J no space" in text for text in rendered) == 5


def test_a_list_of_packages_that_is_too_old_is_named_where_it_is_not_fetched():
    """pacman supports no newer list without an update of all packages."""
    (install,) = yaml.safe_load((ROOT / "roles/llama_host/tasks/packages.yml").read_text())
    assert "pacman -Syu" in install["rescue"][0]["ansible.builtin.fail"]["msg"]


def test_logs_of_supervisor_are_for_its_account_alone_and_files_of_services_as_before():
    role = ROOT / "roles" / "llama_host"
    assert "\numask=077\n" in (role / "templates/supervisord.conf.j2").read_text()
    assert "\numask=022\n" in (role / "templates/supervisor.conf.j2").read_text()
    start = yaml.safe_load((role / "tasks/supervisor.yml").read_text())[-1]
    assert "umask 077" in start["ansible.builtin.command"]["argv"][2], "it opens its own log before it sets its umask"


def test_a_run_says_at_its_end_what_it_went_on_without():
    plays = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())
    last = next(play for play in plays if play["name"] == "Verify")
    assert last["tasks"][-1]["ansible.builtin.import_tasks"] == "tasks/without.yml"


def test_a_run_alone_may_fetch_a_list_of_packages():
    """plan.yml and verify.yml change no host."""
    users = {path.name for path in (ROOT / "playbooks").glob("*.yml") if "llama_list_fetched" in path.read_text()}
    assert users == {"site.yml"}


def test_facts_are_read_as_root_where_the_installation_is_the_systems():
    """Root alone may ask systemd whether it filters addresses, and a password of sudo is there for tasks with become alone."""
    read = yaml.safe_load((ROOT / "playbooks" / "tasks" / "facts.yml").read_text())[0]
    assert read["become"] == "{{ llama_host_scope | default('auto') == 'system' }}"


@pytest.mark.parametrize("scope, account", [("system", "llamacpp"), ("user", "omitted"), (None, "omitted")])
def test_a_model_is_to_be_read_by_the_account_of_the_services(scope, account):
    """In the user scope that is whoever connects."""
    facts = {"facts": {"scope": scope, "names": {"account": "llamacpp"}}} if scope else {}
    templar = Templar(DataLoader(), variables={"llama_facts": facts, "omit": "omitted"})
    found = [asked for asked in every("llamacpp.cluster.model") if asked["state"] == "found"]
    assert {templar.template(trust_as_template(asked["account"])) for asked in found} == {account}


def test_measuring_a_link_changes_nothing():
    measured = yaml.safe_load((ROOT / "roles" / "llama_link" / "tasks" / "measure.yml").read_text())
    asked = [task for task in measured if {"async", "ansible.builtin.async_status"} & set(task)]
    assert len(asked) == 2
    assert all(task["changed_when"] is False for task in asked)


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
        "hostvars": {name: {"llama_leased": {}} if name in leased else {} for name in ("head", "old")},
    }
    assert Templar(DataLoader(), known).evaluate_conditional(trust_as_template(step["when"])) is released


@pytest.mark.parametrize("given, retired", [({}, ["a"]), ({"llama_cluster_group": "night"}, ["b"])])
def test_a_run_cleans_up_what_its_own_cluster_has_retired(given, retired):
    groups = {"llama_retired": ["a"], "llama_retired_night": ["b"]}
    templar = Templar(DataLoader(), {"groups": groups, **given})
    plays = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())
    named = [play["hosts"] for play in plays if "retired" in play["name"]]
    apply = next(play for play in plays if play["name"] == "Apply")
    named += [task["vars"]["llama_retired_hosts"] for task in tasks([apply]) if "retired" in task.get("name", "")]
    assert [templar.template(trust_as_template(text)) for text in named] == [retired] * 3
    left = {"groups": {}, **given}
    assert Templar(DataLoader(), left).template(trust_as_template(named[0])) == []


@pytest.mark.programs
@pytest.mark.parametrize(
    "cluster, retired, refused",
    [
        ("llama_cluster", "llama_retired", True),
        ("night", "llama_retired_night", True),
        ("night", "llama_retired", False),
        ("llama_cluster", "llama_retired_night", False),
    ],
)
def test_a_host_that_is_retired_and_used_by_one_cluster_is_refused(tmp_path, cluster, retired, refused):
    used = {"hosts": {"box": {"ansible_connection": "local"}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({cluster: used, "llama_head": used, retired: used}))
    (tmp_path / "run.yml").write_text(
        f"- {{hosts: localhost, gather_facts: false, tasks: [{{import_tasks: {ROOT}/playbooks/tasks/inventory.yml}}]}}"
    )
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "ansible",
            "playbook",
            "run.yml",
            "-i",
            "hosts.yml",
            "-e",
            f"llama_cluster_group={cluster}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_HOME": str(tmp_path), "ANSIBLE_FORCE_COLOR": "false"},
        check=False,
    )
    assert run.returncode == (2 if refused else 0), run.stdout
    said = f"box is in {retired}, and in llama_head or llama_workers as well: remove it from"
    assert (said in run.stdout + run.stderr) == refused


def steps(file):
    """Names of a file's tasks, those in blocks and of the files that they include too, in the order in which they run."""
    for task in tasks(yaml.safe_load((ROOT / "playbooks" / file).read_text())):
        yield task["name"]
        included = task.get("ansible.builtin.include_tasks")
        if included in ("restore.yml", "tasks/remove_host.yml"):
            yield from steps(f"tasks/{included.rpartition('/')[2]}")


@pytest.mark.parametrize("file", ["site.yml", "tasks/back.yml"])
def test_the_rules_of_what_ran_before_stay_until_the_new_plan_serves(file):
    """A step in between may fail, and a host may reboot into its old services."""
    order = ["Open ports to those who are planned to connect", "Run the workers", "Run the head"]
    order += ["Wait until the cluster serves", "Close the ports of what ran before"]
    assert [name for name in steps(file) if name in order] == order
    keeps = {"site.yml": "site.yml", "tasks/back.yml": "tasks/restore.yml"}[file]
    found = [*tasks(yaml.safe_load((ROOT / "playbooks" / keeps).read_text()))]
    (opened,) = [task for task in found if task["name"] == order[0]]
    assert opened["vars"]["llama_firewall_keep"] is True


def test_a_teardown_stops_workers_before_it_opens_their_ports():
    order = ["Stop the head before its workers", "Remove the services", "Remove the rules of the firewall"]
    assert [name for name in steps("tasks/remove_host.yml") if name in order] == order
