"""Runs a molecule scenario on containers that behave like real hosts, with systemd as process 1, networks and firewalls.

    make molecule SCENARIO=default ACTION=test      # the whole sequence; the last line is RESULT {json}
    make molecule SCENARIO=default ACTION=converge  # leaves the hosts running for inspection
    make molecule SCENARIO=default ACTION=destroy

If the machine has no cgroup v2, everything runs in a mount namespace that has it. The machine itself does not change.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".venv" / "molecule"
NAMESPACE_PID_PATH = WORK / "namespace.pid"
REQUIRED_PACKAGES = {
    "podman": "podman",
    "crun": "crun",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "nft": "nftables",
    "ssh": "openssh-client",
}
"""Program → Debian package that provides it."""

COLLECTIONS = ("ansible/posix", "community/general")
"""Collections that manage firewalld and ufw. PyPI has them in the package ansible, among a hundred others."""
COLLECTIONS_PACKAGE = "ansible==12.3.0"

NAMESPACE_COMMAND = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && exec sleep infinity"


def install_missing() -> None:
    missing = sorted(
        package
        for program, package in REQUIRED_PACKAGES.items()
        if not (shutil.which(program) or os.path.exists(program))
    )
    if not missing:
        return
    packages = " ".join(missing)
    if os.geteuid() != 0:
        sys.exit(f"These scenarios run containers as root: run make as root, with {packages} installed.")
    if not shutil.which("apt-get"):
        sys.exit(f"Install the programs in these Debian packages by hand, then run make again: {packages}")
    print(f"Installing {packages} ...", flush=True)
    subprocess.run(["apt-get", "update", "-q"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        ["apt-get", "install", "-qy", "--no-install-recommends", *missing], check=True, stdout=subprocess.DEVNULL
    )


def install_collections() -> None:
    tree = ROOT / ".venv" / "collections"
    if all((tree / "ansible_collections" / name).is_dir() for name in COLLECTIONS):
        return
    print(f"Installing {' and '.join(COLLECTIONS)} from {COLLECTIONS_PACKAGE} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, COLLECTIONS_PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            prefixes = tuple(f"ansible_collections/{name}/" for name in COLLECTIONS)
            archive.extractall(tree, [name for name in archive.namelist() if name.startswith(prefixes)])


def namespace_process() -> int | None:
    """Return the process that keeps the mount namespace open; None if it is not running."""
    try:
        process = int(NAMESPACE_PID_PATH.read_text())
        return process if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"sleep") else None
    except (OSError, ValueError):
        return None


def cgroup_prefix() -> list[str]:
    """Return the prefix with which a command finds cgroup v2."""
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        return []
    if not namespace_process():
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", NAMESPACE_COMMAND],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        NAMESPACE_PID_PATH.write_text(str(process.pid))
        while not namespace_process():
            if process.poll() is not None:
                sys.exit(
                    "Cannot create a mount namespace with cgroup v2: run this as root on a machine with cgroup v2."
                )
            time.sleep(0.1)
    return ["nsenter", f"--target={namespace_process()}", "--mount", f"--wd={ROOT}"]


def close_namespace() -> None:
    """Close the mount namespace, unless hosts of another scenario are still in it."""
    process = namespace_process()
    if process:
        if subprocess.run(
            [*cgroup_prefix(), "podman", "ps", "--quiet"], capture_output=True, text=True, check=False
        ).stdout:
            return
        os.kill(process, 9)
    NAMESPACE_PID_PATH.unlink(missing_ok=True)


def command_environment(scenario: str) -> dict[str, str]:
    """Return the environment of all commands, with our programs, collections and caches."""
    return {
        **os.environ,
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / ".venv" / "collections"),
        "ANSIBLE_HOME": str(ROOT / ".venv" / "ansible"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".venv" / "collections"),
        "LLAMA_TEST_WORK": str(WORK / scenario),
        "XDG_CACHE_HOME": str(WORK / scenario / "controller"),
    }


def run_step(step: str, scenario: str) -> float:
    """Run a step and return its seconds. If it fails, exit and leave the hosts running for inspection."""
    started = time.monotonic()
    command = [
        *cgroup_prefix(),
        "molecule",
        step.replace("_", "-"),
        "--scenario-name",
        scenario,
        "--no-command-borders",
    ]
    status = subprocess.run(command, cwd=ROOT, env=command_environment(scenario), check=False).returncode
    if status:
        sys.exit(f"molecule {step} of scenario {scenario} failed with status {status}. The hosts are still running.")
    return round(time.monotonic() - started, 1)


def scenario_result(scenario: str, seconds: dict[str, float]) -> dict:
    work = WORK / scenario
    verify_path = work / "verify.json"
    checks = json.loads(verify_path.read_text())["checks"] if verify_path.exists() else []
    inventory = yaml.safe_load((ROOT / "molecule" / scenario / "inventory" / "hosts.yml").read_text())
    untested = [
        f"{check['name']} of {check['subject']}: {check['evidence']}"
        for check in checks
        if check["status"] == "not tested" and check["name"] != "closed"
    ]
    result_path = work / "result.json"
    return {
        "scenario": scenario,
        "hosts": len(json.loads((work / "plan.json").read_text())["hosts"]),
        "first_verified_answer_s": seconds["converge"] if checks else None,
        "no_change_s": seconds["idempotence"],
        "whole_s": round(sum(seconds.values()), 1),
        **(json.loads(result_path.read_text()) if result_path.exists() else {}),
        "not_tested": untested + inventory["test_hosts"]["vars"]["test_not_tested"],
    }


def main() -> None:
    scenario, action = sys.argv[1:]
    configuration = ROOT / "molecule" / scenario / "molecule.yml"
    if not configuration.exists():
        sys.exit(
            f"There is no scenario {scenario}: use one of {', '.join(sorted(p.parent.name for p in configuration.parents[1].glob('*/molecule.yml')))}"
        )
    install_missing()
    install_collections()
    (WORK / scenario).mkdir(parents=True, exist_ok=True)
    if action != "test":
        run_step(action, scenario)
        if action == "destroy":
            close_namespace()
        return
    seconds: dict[str, float] = {}
    for step in yaml.safe_load(configuration.read_text())["scenario"]["test_sequence"]:
        seconds[step] = seconds.get(step, 0) + run_step(step, scenario)
    close_namespace()
    print("RESULT " + json.dumps(scenario_result(scenario, seconds)), flush=True)


if __name__ == "__main__":
    main()
