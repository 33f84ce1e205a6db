"""A host without a list of packages, whose apt is a module of this test: site.yml fetches the list and looks again, plan.yml does not."""

import os
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, TREE

APT = """
import os
import types

FOLDER = {folder!r}


class Cache(dict):
    def __init__(self, *args, **options):
        pass

    def open(self, progress=None):
        pass

    def update(self):
        if os.path.exists(FOLDER + "/broken"):
            raise cache.FetchFailedException("Could not resolve deb.example")
        open(FOLDER + "/updated", "w").close()


class FetchFailedException(Exception):
    pass


class LockFailedException(Exception):
    pass


cache = types.SimpleNamespace(FetchFailedException=FetchFailedException, LockFailedException=LockFailedException)
"""

TASKS = ROOT / "playbooks" / "tasks"
LISTED = {"scope": "system", "packaged": {"version": None, "installed": [], "listed": True}}
NO_LIST = {"scope": "system", "packaged": {"version": None, "installed": [], "listed": False}}


@pytest.fixture
def look(tmp_path):
    """Runs the tasks after these facts were found; returns the run. ``updated`` is there if a list was fetched."""
    (tmp_path / "apt").mkdir()
    (tmp_path / "apt" / "__init__.py").write_text(APT.format(folder=str(tmp_path)))
    (tmp_path / "apt" / "debfile.py").touch()
    (tmp_path / "apt_pkg.py").touch()
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "apt-get").chmod(0o755)

    include = next(
        task
        for task in yaml.safe_load((TASKS / "plan.yml").read_text())
        if task.get("ansible.builtin.include_tasks") == "package_list.yml"
    )

    def run(facts, *options):
        play = {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars": {
                "ansible_python_interpreter": sys.executable,
                "ansible_become": False,
                "__llama_queried_packages": {},
                "__llama_cluster": "llama_cluster",
                "__llama_host_facts": "{{ __llama_facts.facts }}",
                "__llama_fetch_package_list": True,
                "llama_host_scope": "user",
            },
            "tasks": [
                {"ansible.builtin.set_fact": {"__llama_facts": {"facts": facts}}},
                {**include, "ansible.builtin.include_tasks": str(TASKS / "package_list.yml")},
                {"ansible.builtin.debug": {"msg": "scope {{ __llama_facts.facts.scope }}"}},
            ],
        }
        (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
        return subprocess.run(
            ["ansible-playbook", "-i", "localhost,", str(tmp_path / "play.yml"), *options],
            env={
                **os.environ,
                "PATH": f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
                "PYTHONPATH": str(tmp_path),
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_COLLECTIONS_PATH": str(TREE),
                "ANSIBLE_NOCOLOR": "1",
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_missing_list_is_fetched_and_the_host_asked_again(look, tmp_path):
    result = look(NO_LIST)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "updated").exists()
    assert "scope user" in result.stdout


@pytest.mark.parametrize("facts, options", [(LISTED, []), (NO_LIST, ["--check"])])
def test_where_there_is_a_list_or_it_may_not_be_fetched_nothing_is_done(look, tmp_path, facts, options):
    result = look(facts, *options)
    assert result.returncode == 0, result.stdout
    assert not (tmp_path / "updated").exists()


def test_a_list_that_cannot_be_fetched_is_told(look, tmp_path):
    (tmp_path / "broken").touch()
    result = look(NO_LIST)
    assert result.returncode == 0, result.stdout
    said = " ".join(result.stdout.split())
    assert "localhost has no package list, and fetching it failed" in said
    assert "Could not resolve deb.example" in said
    assert "scope system" in said, "the plan refuses it with the remedy"
