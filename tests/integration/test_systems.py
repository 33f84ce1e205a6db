"""The playbook that plans, run on each inventory of inventories/ as it lies there. Their hosts do not exist, so nothing can be asked."""

import json
import os
import sys
from pathlib import Path

import ansible_runner
import pytest
from conftest import ROOT

SYSTEMS = ["strix_halo_quad", "strix_halo_pair", "mac_loopback", "cuda_triple"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_planned_offline(tmp_path, name):
    path = tmp_path / "plan.json"
    (tmp_path / "runner").mkdir()
    result = ansible_runner.run(
        private_data_dir=str(tmp_path / "runner"),
        project_dir=str(ROOT),
        playbook="playbooks/plan.yml",
        inventory=str(ROOT / "inventories" / name),
        extravars={"llama_plan_path": str(path)},
        envvars={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_HOME": str(tmp_path / "ansible"),
            "ANSIBLE_NOCOLOR": "1",
        },
        quiet=True,
    )
    text = result.stdout.read()
    assert result.rc == 0, text
    assert not result.stats["dark"]
    planned = json.loads(path.read_text())
    assert planned["fits"]
    assert all(advisory["accepted"] for advisory in planned["advisories"] if advisory["severity"] == "error")
    for entry in planned["placement"]:
        assert entry["device"] in text
