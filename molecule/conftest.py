"""The hosts of a scenario and their plan, for the scenario's tests."""

import json
import os
from pathlib import Path

import testinfra
import yaml

WORK = Path(os.environ["LLAMA_TEST_WORK"])
INVENTORY = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"]) / "inventory" / "hosts.yml"
HOSTS = yaml.safe_load(INVENTORY.read_text())["test_hosts"]["hosts"]
PLAN = json.loads((WORK / "plan.json").read_text())
os.environ["ANSIBLE_FORCE_COLOR"] = "false"  # molecule sets this variable, but tests read the output of playbooks


def connect(name):
    return testinfra.get_host(
        f"ssh://root@{HOSTS[name]['test_addresses'][0]}",
        ssh_identity_file=str(WORK / "key"),
        ssh_extra_args="-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
    )
