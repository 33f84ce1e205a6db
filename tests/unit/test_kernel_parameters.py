"""Options of kernel modules: their sizes, the file for modprobe, the initramfs, and when a reboot is needed."""

import json
from pathlib import Path

import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.kernel_parameters import graphics_parameters
from support import playbook_runs

WANTED = {"amdgpu.gttsize": "126976", "ttm.pages_limit": "32505856"}
THEIRS = "options snd_hda_intel power_save=0\n"


def test_sizes_are_given_in_mib_and_in_pages():
    assert graphics_parameters(131072, None) == WANTED
    assert graphics_parameters(65536, 1024) == {"amdgpu.gttsize": "1024", "ttm.pages_limit": "262144"}
    assert graphics_parameters(65536, 63488)["amdgpu.gttsize"] == "63488"
    for memory, size in ((65536, 64513), (65536, 1023), (65536, -1), (5000, None), (0, None)):
        with pytest.raises(ValueError, match="llama_host_tuning_gtt_mib"):
            graphics_parameters(memory, size)


@pytest.mark.programs
def test_the_role_sets_them_once_with_the_initramfs_and_takes_them_back(tmp_path):
    running = next(path for path in Path("/sys/module").glob("*/parameters/*") if path.stat().st_mode & 0o4)
    set_already = {f"{running.parent.parent.name}.{running.name}": running.read_text().strip()}
    path = "{{ playbook_dir }}/{{ inventory_hostname }}/etc/modprobe.d/llamacpp.conf"
    hosts = {"new": WANTED, "running": set_already, "broken": WANTED, "theirs": WANTED, "theirs_unused": {}}
    for name, tuned in hosts.items():
        (tmp_path / name / "etc/modprobe.d").mkdir(parents=True)
        tuning = {"parameters": tuned, "reboot": False}
        plan = {"tuning": tuning}
        hosts[name] = {**playbook_runs.LOCAL, "__llama_host_plan": plan}
        if name.startswith("theirs"):
            (tmp_path / name / "etc/modprobe.d/llamacpp.conf").write_text(THEIRS)
    make = "echo made >> {{ inventory_hostname }}/made; {{ 'echo disk full >&2; exit 1' if inventory_hostname == 'broken' else '' }}"
    known = {
        "__llama_host_facts": {"distribution": {"family": "arch"}, "system": "Linux"},
        "__llama_host_modprobe_file": path,
        "__llama_host_initramfs_commands": {"arch": ["sh", "-c", f"cd {tmp_path}; {make}"]},
    }
    role = {"name": "llamacpp.cluster.llama_host", "tasks_from": "kernel_parameters"}
    include = {"ansible.builtin.include_role": role}
    unplanned = {"tuning": {"parameters": {}, "reboot": False}}
    keep = {"ansible.builtin.copy": {"src": path, "dest": f"{path}.kept", "remote_src": True, "mode": "0644"}}
    plays = [
        {"hosts": "all", "gather_facts": False, "tasks": [include, include]},
        {"hosts": "new", "gather_facts": False, "tasks": [keep, {**include, "vars": {"__llama_host_plan": unplanned}}]},
    ]
    (tmp_path / "run.yml").write_text(yaml.safe_dump(plays))
    said = playbook_runs.run(tmp_path, "run.yml", {"all": {"hosts": hosts}}, "-e", json.dumps(known))[1]
    said = " ".join(said.split())

    made = {name: len(text.read_text().split()) for name in hosts if (text := tmp_path / name / "made").exists()}
    assert made == {"new": 2, "running": 1, "broken": 1}, said
    assert "reboot is needed for amdgpu.gttsize=126976 ttm.pages_limit=32505856" in said
    assert "new: a reboot is needed to unset the removed kernel module options" in said
    assert "running: a reboot" not in said
    assert "broken cannot set kernel module options: disk full" in said, said
    assert "which this collection did not create: move" in said
    left = {name: [path.name for path in (tmp_path / name / "etc/modprobe.d").iterdir()] for name in hosts}
    file = ["llamacpp.conf"]
    assert left == {"new": ["llamacpp.conf.kept"], "running": file, "broken": [], "theirs": file, "theirs_unused": file}
    kept = tmp_path / "new/etc/modprobe.d/llamacpp.conf.kept"
    assert kept.read_text().endswith("\noptions amdgpu gttsize=126976\noptions ttm pages_limit=32505856\n")
    kept.rename(kept.with_suffix(""))

    def differ(host, parameters):
        return kernel_parameters.has_changes(parameters, System(root=tmp_path / host))

    assert [differ("new", given) for given in (WANTED, {"ttm.pages_limit": "1"}, {})] == [False, True, True]
    assert [differ("broken", given) for given in (WANTED, {})] == [True, False]
    assert not differ("theirs", {})
    assert kernel_parameters.foreign_files(System(root=tmp_path / "new")) == []
    for name in ("theirs", "theirs_unused"):
        assert (tmp_path / name / "etc/modprobe.d/llamacpp.conf").read_text() == THEIRS
        assert kernel_parameters.foreign_files(System(root=tmp_path / name)) == ["/etc/modprobe.d/llamacpp.conf"]
