"""The role that installs packages, on a package manager that is a script of this test: one that works, and one without a network."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

MANAGER = """
import json
import pathlib
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"name": {"type": "list"}, "state": {}}, supports_check_mode=True)
FOLDER = pathlib.Path(%r)
if (FOLDER / "broken").exists():
    module.fail_json(msg="Could not resolve deb.example")
with (FOLDER / "installed").open("a") as stream:
    stream.write(json.dumps(module.params["name"]) + chr(10))
module.exit_json(changed=True)
"""


@pytest.fixture
def install(tmp_path):
    """Installs what a host lacks; returns the run. Names that were asked for stand in ``installed``; ``broken`` has the manager fail."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "manager.py").write_text(MANAGER % str(tmp_path))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LIBRARY": str(tmp_path / "library"),
        "ANSIBLE_NOCOLOR": "1",
    }

    def run(part, family="other", **lacking):
        play = {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars": {
                "ansible_python_interpreter": sys.executable,
                "ansible_become": False,
                "ansible_package_use": "ansible.legacy.manager",
                "__llama_host_facts": {"distribution": {"family": family}},
                "__llama_host_lacking": lacking,
            },
            "tasks": [
                {"ansible.builtin.include_role": {"name": "llamacpp.cluster.llama_host", "tasks_from": part}},
                {"ansible.builtin.debug": {"msg": "and goes on"}},
            ],
        }
        (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
        return subprocess.run(
            ["ansible-playbook", "-i", "localhost,", str(tmp_path / "play.yml")],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize("part", ["packages", "optional_packages"])
def test_what_is_lacking_is_installed(install, tmp_path, part):
    result = install(part, **{"c++": "g++", "cmake": "cmake"})
    assert result.returncode == 0, result.stdout
    assert sorted(json.loads((tmp_path / "installed").read_text())) == ["cmake", "g++"]


@pytest.mark.parametrize(
    "part, family, command",
    [("packages", "arch", "pacman -S --needed"), ("optional_packages", "suse", "zypper --non-interactive install")],
)
def test_a_manager_without_a_module_is_called_itself(install, tmp_path, part, family, command):
    program = tmp_path / command.split()[0]
    program.write_text('#!/bin/sh\necho "${0##*/} $*" > "${0%/*}/installed"\n')
    program.chmod(0o755)
    result = install(part, family, cmake="cmake", ninja="ninja")
    assert result.returncode == 0, result.stdout
    said = (tmp_path / "installed").read_text()
    assert said.startswith(command)
    assert said.endswith("cmake ninja\n")


def test_without_a_network_what_is_needed_is_told_in_one_sentence(install, tmp_path):
    (tmp_path / "broken").write_text("")
    result = install("packages", **{"c++": "g++", "cmake": "cmake"})
    assert result.returncode == 2
    told = " ".join(result.stdout.split() + result.stderr.split())
    assert (
        "localhost lacks c++, cmake, and installing g++, cmake failed: let the host reach its distribution's packages"
        in told
    )
    assert "Could not resolve deb.example" in told, told
    assert "and goes on" not in result.stdout


def test_without_a_network_what_is_optional_is_gone_on_without(install, tmp_path):
    (tmp_path / "broken").write_text("")
    result = install("optional_packages", ccache="ccache")
    assert result.returncode == 0, result.stdout
    assert (
        "localhost goes on without ccache, which only makes builds faster and could not be installed" in result.stdout
    )
    assert '"msg": "and goes on"' in result.stdout
