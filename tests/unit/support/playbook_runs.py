"""Runs of playbooks on two hosts, a head and a worker, which are this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]


class Operator:
    """Starts runs in a folder; ``prefix`` is the installation of the head.

    :param playbook: text of ``run.yml``, which runs by default.
    """

    def __init__(self, path, playbook=""):
        self.path = path
        self.prefix = path / "data" / "llamacpp"
        (path / "run.yml").write_text(playbook)
        hosts = {name: {"ansible_connection": "local", "llama_host_scope": "user"} for name in ("head", "worker")}
        groups = {
            "llama_cluster": {"hosts": hosts},
            "llama_head": {"hosts": {"head": {}}},
            "llama_workers": {"hosts": {"worker": {}}},
        }
        (path / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))

    def lose(self, host):
        """Nobody answers at the host's address."""
        inventory = yaml.safe_load((self.path / "hosts.yml").read_text())
        hosts = inventory["all"]["children"]["llama_cluster"]["hosts"]
        hosts[host].update(ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=1)
        (self.path / "hosts.yml").write_text(yaml.safe_dump(inventory))

    def start(self, who, work, *arguments, playbook="run.yml"):
        program = Path(sys.executable).with_name("ansible-playbook")
        variables = json.dumps({"who": who, "work": work, "ansible_python_interpreter": sys.executable})
        return subprocess.Popen(
            [program, "-i", "hosts.yml", playbook, "-e", variables, *arguments],
            cwd=self.path,
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_NOCOLOR": "1",
                "XDG_DATA_HOME": str(self.path / "data"),
                "XDG_CONFIG_HOME": str(self.path / "config"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def touched(self, who):
        return sorted(path.name for path in self.path.glob(f"*-{who}*"))

    def wait_for(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)
