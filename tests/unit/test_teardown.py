"""The empty plan, what a teardown does with it, and that it removes all that a plan installs."""

import json
import os
import re
import shutil

import pytest
import yaml
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import plan as plan_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host as facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import ownership, removal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import teardown
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FolderPlan
from ansible_collections.llamacpp.cluster.plugins.modules import uninstall
from conftest import ROOT, complete
from support import actions, playbook_runs
from support.hosts import host_plan, service_plan, tree, write

FACTS = {
    **{"scope": "system", "prefix": "/opt/llamacpp", "cache": "/var/cache/llamacpp", "host_settings": True},
    "defined": ["llamacpp-server", "llamacpp-worker-cpu"],
    "accounts": {"llamacpp": "/opt/llamacpp", "llamacpp-build": "/opt/llamacpp", "llamacppy": "/home/llamacppy"},
    "created_accounts": ["llamacpp", "llamacpp-build", "llamacppy"],
    "firewall": "nftables",
    "supervisor": {"running": False},
}


def test_the_empty_plan_has_nothing_and_names_what_goes():
    hosts = teardown.empty_plan({"here": {"facts": FACTS}, "lost": {}})["hosts"]
    assert list(hosts) == ["here"]
    planned = hosts["here"]
    assert [planned[key] for key in ("services", "builds", "links", "firewall")] == [[], [], [], []]
    assert planned["tuning"] == {"parameters": {}, "reboot": False}
    assert planned["unplanned"] == FACTS["defined"]
    assert planned["accounts"] == ["llamacpp", "llamacpp-build"]
    assert planned["build_account"] == names.BUILD_ACCOUNT
    assert planned["firewall_manager"] == "nftables"
    assert (planned["scope"], planned["supervisor"]) == ("system", {"running": False})


def test_accounts_of_others_stay_where_the_installation_is_a_users():
    hosts = teardown.empty_plan({"here": {"facts": {**FACTS, "scope": "user"}}})["hosts"]
    assert [hosts["here"][key] for key in ("accounts", "build_account", "firewall_manager")] == [[], None, None]
    accounts = {**FACTS, "accounts": {"llamacpp": "/opt/llamacpp"}}
    assert teardown.empty_plan({"here": {"facts": accounts}})["hosts"]["here"]["build_account"] is None


@pytest.mark.parametrize("facts", [None, {}, {**FACTS, "accounts": ["root"]}])
def test_a_host_may_say_anything_of_itself(facts):
    arguments = {"empty": True, "facts": {"here": {"facts": FACTS}, "there": {"facts": facts}}}
    with pytest.raises(AnsibleActionFail, match="The report from there about itself does not match"):
        actions.run(plan_action, **arguments)


@pytest.mark.parametrize("manager", ["systemd", "supervisor"])
def test_what_a_plan_installs_is_what_a_teardown_removes(pair, manager):
    """All paths of a plan below its prefix, but models."""
    for name in ("head", "worker1"):
        pair.hosts[name]["facts"].update(
            service_manager=manager, units=names.installation_folders("system", manager, {"HOME": "/"})["units"]
        )
    made = complete(pair.plan())
    prefix = "/opt/llamacpp/"
    parts = set()
    for host in made["hosts"].values():
        paths = [*(entry["path"] for entry in [*host["folders"], *host["files"]]), host["units"]]
        paths += [word for service in host["services"] for word in [*service["argv"], *service["environment"].values()]]
        parts |= {path[len(prefix) :].split("/")[0] for path in paths if path.startswith(prefix)}
    assert {"releases", "runtime", "state", names.CACHED_FACTS_FILE} <= parts
    assert parts <= {*names.INSTALLED_ENTRIES, "models"}


@pytest.mark.programs
def test_the_head_that_cannot_be_reached_is_named(tmp_path):
    last = yaml.safe_load((ROOT / "playbooks/teardown.yml").read_text())[-1]["tasks"][-1]
    torn_down = {"name": "Be torn down", "ansible.builtin.raw": "echo torn down"}
    tasks = ([{"ansible.builtin.raw": "echo here"}], [torn_down, last])
    variables = [str(ROOT / "playbooks/vars/cluster.yml")]
    plays = [{"hosts": "all", "gather_facts": False, "vars_files": variables, "tasks": each} for each in tasks]
    (tmp_path / "run.yml").write_text(yaml.safe_dump(plays))
    hosts = {"head": playbook_runs.LOST, "worker": playbook_runs.LOCAL}
    groups = {"llama_cluster": {"hosts": hosts}, "llama_head": {"hosts": {"head": {}}}}
    status, printed = playbook_runs.run(tmp_path, "run.yml", {"all": {"children": groups}})
    assert status
    assert "not reached, or failed above: head" in printed
    assert printed.index("torn down]") < printed.index("not reached, or failed above: head")


MODULE = uninstall


@pytest.fixture
def remove(call, tmp_path):
    """Runs the step of a teardown that removes the installation; returns what the module reports."""
    planned = dict.fromkeys(("cache", "units"), f"{tmp_path}/no")

    def run(prefix, check=False, **more):
        host = {**planned, "scope": "user", "service_manager": "supervisor", "prefix": str(prefix), **more}
        return call(check, host=host, host_name="here")

    return run


GENERATED = ["known-answer-8x64-f32.gguf", "known-answer-8x64-f32.gguf.part"]


def installed(prefix, models, *files):
    """An installation, whose models are in a folder, or in one to which a link leads."""
    models.mkdir(parents=True)
    for name in [*files, *GENERATED]:
        (models / name).write_text("")
    for name in names.INSTALLED_ENTRIES:
        (prefix / name).mkdir(parents=True)
    if models != prefix / "models":
        (prefix / "models").symlink_to(models)


@pytest.mark.parametrize(
    "folder, files, stays",
    [
        ("llamacpp/models", ["glm.gguf"], ["glm.gguf"]),
        ("llamacpp/models", [".fetching", ".llamacpp-a1b2"], []),
        ("llamacpp/models", [".fetching", "glm.gguf"], ["glm.gguf"]),
        ("shared/models", [], GENERATED),
        ("shared/models", ["glm.gguf"], ["glm.gguf", *GENERATED]),
    ],
)
def test_models_of_others_and_what_lies_behind_a_link_stay_and_nothing_else(tmp_path, remove, folder, files, stays):
    """Below the installation: the known-answer models were generated."""
    prefix, models = tmp_path / "llamacpp", tmp_path / folder
    installed(prefix, models, *files)
    told = remove(prefix, check=True)
    assert remove(prefix) == told
    said = f"{prefix} on here still contains models: remove what is no longer needed."
    assert told["notes"] == [said] * bool(stays)
    assert [path.name for path in prefix.glob("*")] == ["models"] * bool(stays)
    assert sorted(path.name for path in models.glob("*")) == stays
    assert prefix.exists() or not remove(prefix)["changed"]


@pytest.mark.parametrize("scope, asked", [("system", ["user:llamacpp"]), ("user", [])])
def test_metrics_of_killed_launchers_and_the_right_to_write_them_are_taken_back(
    tmp_path, monkeypatch, remove, scope, asked
):
    prefix, folder, ran = tmp_path / "llamacpp", tmp_path / "node-exporter", []
    monkeypatch.setattr(removal.System, "output", lambda _self, *argv: ran.append(argv))
    for path in (prefix / names.MARKER_FOLDER, folder):
        path.mkdir(parents=True)
    described = {name: {"folder": str(folder)} for name in ("llamacpp-server", "llamacpp-worker-cpu")}
    (prefix / names.METRICS_FILE).write_text(json.dumps({"services": described}))
    for name in ("llamacpp-server", "llamacpp-other-server"):
        (folder / f"{name}.prom").touch()
    told = remove(prefix, check=True, scope=scope)
    assert (len([*folder.iterdir()]), ran) == (2, [])
    assert remove(prefix, scope=scope) == told
    assert told["notes"] == [f"here keeps {folder} for metrics: remove what is no longer needed."]
    assert told["removed"][0] == str(folder / "llamacpp-server.prom")
    assert [path.name for path in folder.iterdir()] == ["llamacpp-other-server.prom"]
    assert ran == [("setfacl", "--remove", account, str(folder)) for account in asked]


@pytest.mark.parametrize("text", ['{"services": []}', '{"services": {"x": null}}', '{"services": {"x": {}}}'])
def test_an_installation_whose_metrics_record_is_damaged_is_removed(tmp_path, remove, text):
    prefix = tmp_path / "llamacpp"
    (prefix / names.MARKER_FOLDER).mkdir(parents=True)
    (prefix / names.METRICS_FILE).write_text(text)
    remove(prefix)
    assert not prefix.exists()


def test_whatever_the_services_account_left_goes_and_what_its_links_lead_to_stays(tmp_path, remove):
    prefix, folder, theirs = tmp_path / "llamacpp", tmp_path / "textfile", tmp_path / "theirs"
    for path in (
        prefix / names.MARKER_FOLDER,
        prefix / "state",
        folder / "llamacpp-server.prom" / "full",
        theirs / "x",
    ):
        path.mkdir(parents=True)
    (prefix / names.METRICS_FILE).write_text(json.dumps({"services": {"llamacpp-server": {"folder": str(folder)}}}))
    (prefix / "state" / "cache").symlink_to(theirs)
    os.mkfifo(prefix / "state" / "serving.json")
    assert str(folder / "llamacpp-server.prom") in remove(prefix)["removed"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["textfile", "theirs", "x"]


def test_what_others_put_beside_an_installation_stays_and_is_named(tmp_path, remove):
    prefix, theirs = (
        tmp_path / "llamacpp",
        [".bashrc", ".llamacpp-notes/x", "checkout/.git/config", "models/known-answer-tests/x"],
    )
    installed(prefix, prefix / "models")
    write(prefix, dict.fromkeys(("venv/bin/python", *theirs), ""))
    said = remove(prefix)["notes"]
    assert {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()} == set(theirs)
    assert said == [
        f"{prefix} on here still contains .bashrc, .llamacpp-notes, checkout, models: remove what is no longer needed."
    ]
    assert remove(prefix)["notes"] == [
        f"{prefix} on here was not removed: it lacks the folder .llamacpp.cluster, which marks an installation of this collection."
    ]


def test_packages_that_runs_installed_stay_and_are_named(tmp_path, monkeypatch, remove):
    prefix = tmp_path / "llamacpp"
    (prefix / names.MARKER_FOLDER).mkdir(parents=True)
    (prefix / names.PACKAGES_FILE).write_text("stunnel4\nccache\nstunnel4\n\x1b\n")
    monkeypatch.setattr(removal, "PACKAGE_REMOVERS", ("no-such-manager remove", "sh remove"))
    said = (
        "here keeps the packages that site.yml installed, with their accounts and folders. If nothing else needs these packages, remove them with "
        "sh remove \\x1b ccache stunnel4"
    )
    assert remove(prefix, check=True)["notes"] == remove(prefix)["notes"] == [said]
    assert not prefix.exists()


def test_nothing_of_a_folder_without_the_mark_is_removed(tmp_path, remove):
    for name in ("models", *names.INSTALLED_ENTRIES[:-1]):
        (tmp_path / "prefix" / name).mkdir(parents=True)
        (tmp_path / "prefix" / name / "file").write_text("theirs\n")
    before = tree(tmp_path)
    told = remove(tmp_path / "prefix")
    assert (told["changed"], tree(tmp_path)) == (False, before)
    assert told["notes"][0].startswith(
        f"{tmp_path}/prefix on here was not removed: it lacks the folder .llamacpp.cluster, which "
    )


def test_facts_run_no_program_of_a_folder_that_may_be_anybodys(tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/supervisord").symlink_to(shutil.which("tar"))
    assert facts.supervisor_state(str(tmp_path))["version"] is None
    (tmp_path / names.MARKER_FOLDER).mkdir()
    assert facts.supervisor_state(str(tmp_path))["version"]


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@AS_ROOT
@pytest.mark.parametrize("mine", [False, True])
@pytest.mark.parametrize(
    "path, has",
    [
        ("prefix", "{}/prefix (owned by nobody, not by root), "),
        ("prefix/models", "{}/prefix/models (owned by nobody, not by root), "),
        ("prefix/venv/bin", "{}/prefix/venv (owned by root), "),
        ("cache", "{}/cache (owned by nobody, not by root), "),
        ("prefix/else", ""),
    ],
)
def test_what_others_have_is_refused_and_not_taken_over(tmp_path, path, has, mine):
    (tmp_path / path).mkdir(parents=True)
    shutil.chown(tmp_path / path, "nobody")
    if mine:
        (tmp_path / "prefix" / names.MARKER_FOLDER).mkdir(parents=True)
    for service, text in {"a": names.DEFINITION_MARK, "b": "[Service]"}.items():
        (tmp_path / f"{service}.service").write_text(text)
    (tmp_path / "c.service").mkdir()
    folders = (f"{tmp_path}/{name}" for name in ("prefix", "prefix/models", "cache", "none"))
    planned = host_plan(
        prefix=f"{tmp_path}/prefix",
        folders=tuple(FolderPlan(folder, "root", None) for folder in folders),
        service_manager="systemd",
        scope="system",
        units=str(tmp_path),
        services=tuple(service_plan(["x"], "127.0.0.1:1", name=name) for name in "abcd"),
    )
    expected = "" if mine and path != "prefix" else has.format(tmp_path)
    said = f"This host has {expected}{tmp_path}/b.service, {tmp_path}/c.service{names.FOREIGN_REMEDY}"
    with pytest.raises(Refusal, match=f"^{re.escape(said)}$"):
        ownership.check_ownership(planned)


@AS_ROOT
def test_files_of_the_building_account_in_the_cache_become_roots(tmp_path):
    for name, owner in {"ours": "nobody", "theirs": "daemon"}.items():
        (tmp_path / name).touch()
        shutil.chown(tmp_path / name, owner)
    ours = [str(tmp_path / "ours")]
    assert [removal.give_to_root("nobody", str(tmp_path), check) for check in (True, False, False)] == [ours, ours, []]
    assert [(tmp_path / name).owner() for name in ("ours", "theirs")] == ["root", "daemon"]
