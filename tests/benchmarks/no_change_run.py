"""What a run of site.yml costs that finds nothing to do, and one of status.yml, over ssh to 8, 3 and 1 hosts, beside the floor: gathering facts and a ping.

Makes the containers of the molecule scenario scale, as root. Prints one JSON object; the figures in docs/performance.md come from it.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import time

from first_run import ROOT, machine

sys.path.insert(0, str(ROOT / "molecule"))
scenario = importlib.import_module("run")

RUNS = 5
CLUSTERS = {8: "llama_cluster", 3: "cluster_of_3", 1: "cluster_of_1"}


def play(playbook: str, group: str) -> tuple[float, str]:
    """Seconds and output of one run."""
    command = [
        "ansible-playbook",
        playbook,
        "-i",
        "molecule/scale/inventory/hosts.yml",
        "-e",
        f"llama_cluster_group={group}",
    ]
    started = time.monotonic()
    process = subprocess.run(
        [*scenario.cgroup_prefix(), *command],
        cwd=ROOT,
        env={**scenario.command_environment("scale"), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"{playbook} failed:\n{process.stdout[-3000:]}{process.stderr[-1000:]}")
    return time.monotonic() - started, process.stdout


def measured(group: str) -> dict:
    play("site.yml", group)
    floors, runs, looks = [], [], []
    for _run in range(RUNS):
        floors.append(play("tests/benchmarks/floor.yml", group)[0])
        seconds, said = play("site.yml", group)
        assert said.count("changed=0") == said.count("unreachable=0"), said
        assert "36 of 36 words correct" in said
        runs.append(seconds)
        looks.append(play("playbooks/status.yml", group)[0])
    play("playbooks/teardown.yml", group)
    floor, ours, look = (statistics.median(times) for times in (floors, runs, looks))
    return {
        "floor_s": round(floor, 2),
        "no_change_s": round(ours, 2),
        "ratio": round(ours / floor, 2),
        "status_s": round(look, 2),
        "status_ratio": round(look / floor, 2),
    }


def main() -> None:
    scenario.install_missing()
    (scenario.WORK / "scale").mkdir(parents=True, exist_ok=True)
    for step in ("destroy", "create"):
        scenario.run_step(step, "scale")
    found = {hosts: measured(group) for hosts, group in CLUSTERS.items()}
    scenario.run_step("destroy", "scale")
    scenario.close_namespace()
    print(json.dumps({"machine": machine(), "runs": RUNS, "hosts": found}))


if __name__ == "__main__":
    main()
