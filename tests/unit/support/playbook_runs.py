"""Runs of playbooks on hosts that are this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml
from conftest import ROOT

LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
"""Variables of a host that is this machine."""
LOST = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
"""Variables of a host where nobody answers."""


def start(folder, playbook, inventory, *arguments, **environment):
    """Starts ansible-playbook in a folder, which gets all that it writes.

    :param inventory: by group, or text for ``-i``; empty for that of ansible.cfg.
    """
    if not isinstance(inventory, str):
        (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
        inventory = "hosts.yml"
    settings = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_HOME": str(folder / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
        # Who reads a line before the run ends waits for it otherwise.
        "PYTHONUNBUFFERED": "1",
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    program = Path(sys.executable).with_name("ansible-playbook")
    return subprocess.Popen(
        [program, *(["-i", inventory] if inventory else []), playbook, *arguments],
        cwd=folder,
        env={**os.environ, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder, playbook, inventory, *arguments, **environment):
    """The status of such a run, and what it printed."""
    started = start(folder, playbook, inventory, *arguments, **environment)
    printed = started.communicate()[0]
    return started.returncode, printed


class Operator:
    """Starts runs on a head and a worker in a folder; ``prefix`` is the installation of the head.

    :param playbook: text of ``run.yml``, which runs by default.
    """

    def __init__(self, path, playbook=""):
        self.path = path
        self.prefix = path / "data" / "llamacpp"
        (path / "run.yml").write_text(playbook)
        self.hosts = {name: {**LOCAL, "llama_host_scope": "user"} for name in ("head", "worker")}

    def lose(self, host):
        self.hosts[host].update(LOST)

    def start(self, who, work, *arguments, playbook="run.yml"):
        groups = {
            "llama_cluster": {"hosts": self.hosts},
            "llama_head": {"hosts": {"head": {}}},
            "llama_workers": {"hosts": {"worker": {}}},
        }
        variables = json.dumps({"who": who, "work": work})
        return start(self.path, playbook, {"all": {"children": groups}}, "-e", variables, *arguments)

    def touched(self, who):
        return sorted(path.name for path in self.path.glob(f"*-{who}*"))

    def wait_for(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)
