"""The role that installs packages, on a package manager that is a script of this test: one that works, and one without a network."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
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

    def run(optional, family="other", prefix=(), **lacking):
        play = {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars": {
                "ansible_python_interpreter": sys.executable,
                "ansible_become": False,
                "ansible_package_use": "ansible.legacy.manager",
                "__llama_host_facts": {"distribution": {"family": family}, "prefix": str(tmp_path / "prefix")},
                "__llama_host_missing_packages": lacking,
                "__llama_host_packages_are_optional": optional,
            },
            "tasks": [
                {"ansible.builtin.include_role": {"name": "llamacpp.cluster.llama_host", "tasks_from": "packages"}},
                {"ansible.builtin.debug": {"msg": "and goes on"}},
            ],
        }
        (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
        return subprocess.run(
            [*prefix, "ansible-playbook", "-i", "localhost,", str(tmp_path / "play.yml")],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize("optional", [False, True])
def test_what_is_lacking_is_installed(install, tmp_path, optional):
    result = install(optional, **{"c++": "g++", "cmake": "cmake"})
    assert result.returncode == 0, result.stdout
    assert sorted(json.loads((tmp_path / "installed").read_text())) == ["cmake", "g++"]
    assert "continues without" not in result.stdout
    assert sorted((tmp_path / "prefix" / names.PACKAGES_FILE).read_text().split()) == ["cmake", "g++"], "for a teardown"
    assert (tmp_path / "prefix" / names.MARKER_FOLDER).is_dir()


@pytest.mark.parametrize(
    "optional, family, command",
    [(False, "arch", "pacman -S --needed"), (True, "suse", "zypper --non-interactive install")],
)
def test_a_manager_without_a_module_is_called_itself(install, tmp_path, optional, family, command):
    program = tmp_path / command.split()[0]
    program.write_text('#!/bin/sh\necho "${0##*/} $*" > "${0%/*}/installed"\n')
    program.chmod(0o755)
    result = install(optional, family, cmake="cmake", ninja="ninja")
    assert result.returncode == 0, result.stdout
    assert "continues without" not in result.stdout
    said = (tmp_path / "installed").read_text()
    assert said.startswith(command)
    assert said.endswith("cmake ninja\n")


def test_without_a_network_what_is_needed_is_told_in_one_sentence(install, tmp_path):
    (tmp_path / "broken").write_text("")
    result = install(False, **{"c++": "g++", "cmake": "cmake"})
    assert result.returncode == 2
    told = " ".join(result.stdout.split() + result.stderr.split())
    assert (
        "localhost lacks c++, cmake, and installing g++, cmake failed: give the host access to its distribution's packages"
        in told
    )
    assert "Could not resolve deb.example" in told, told
    assert "and goes on" not in result.stdout


@pytest.mark.parametrize("family, reason", [("other", "Could not resolve deb.example"), ("suse", "no network")])
def test_without_a_network_what_is_optional_is_gone_on_without_a_scare(install, tmp_path, family, reason):
    (tmp_path / "broken").write_text("")
    (tmp_path / "zypper").write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    (tmp_path / "zypper").chmod(0o755)
    result = install(True, family, ccache="ccache")
    assert result.returncode == 0, result.stdout
    assert (
        f"localhost continues without ccache (optional, for faster builds), because the installation failed: {reason}"
        in result.stdout
    )
    assert '"msg": "and goes on"' in result.stdout
    assert not (tmp_path / "prefix").exists()
    assert not any(word in result.stdout + result.stderr for word in ("ERROR", "fatal", "FAILED"))


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("apt-get"), reason="needs root and Debian")
def test_a_run_without_a_package_list_does_not_try_to_install_optional_packages(install, tmp_path):
    paths = ["/var/lib/apt/periodic/update-success-stamp", "/var/lib/apt/lists"]
    times = {path: (os.stat(path).st_atime, os.stat(path).st_mtime) for path in paths if os.path.exists(path)}
    try:
        for path in times:
            os.utime(path, (1, 1))  # a recent list is not updated
        result = install(True, "debian", ("unshare", "--net"), ccache="ccache")
    finally:
        for path, seconds in times.items():
            os.utime(path, seconds)
    assert result.returncode == 0, result.stdout
    assert "because the installation failed: Failed to update apt cache" in result.stdout, result.stdout
    assert not (tmp_path / "installed").exists()
