"""Runs a molecule scenario on containers that are real hosts: with systemd as process 1, networks and firewalls.

    make molecule SCENARIO=default ACTION=test      # the whole sequence; a last line RESULT {json}
    make molecule SCENARIO=default ACTION=converge  # leaves the hosts up to look at
    make molecule SCENARIO=default ACTION=destroy

Where the machine has no cgroup v2, everything happens in a mount namespace that has it; the machine itself is left alone.
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
KEEPER = WORK / "namespace.pid"
NEEDED = {
    "podman": "podman",
    "crun": "crun",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "nft": "nftables",
    "ssh": "openssh-client",
}
"""Program, and the Debian package that brings it."""

COLLECTIONS = ("ansible/posix", "community/general")
"""They drive firewalld and ufw. PyPI has them in the package ansible, among a hundred others."""
PACKAGE = "ansible==12.3.0"

PRIVATE_CGROUPS = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && exec sleep infinity"


def install_missing() -> None:
    missing = sorted(
        package for program, package in NEEDED.items() if not (shutil.which(program) or os.path.exists(program))
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
    print(f"Installing {' and '.join(COLLECTIONS)} from {PACKAGE} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = tuple(f"ansible_collections/{name}/" for name in COLLECTIONS)
            archive.extractall(tree, [name for name in archive.namelist() if name.startswith(wanted)])


def keeper() -> int | None:
    """Process that keeps the mount namespace, if it lives."""
    try:
        process = int(KEEPER.read_text())
        return process if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"sleep") else None
    except (OSError, ValueError):
        return None


def enter() -> list[str]:
    """What to put before a command so that it finds cgroup v2."""
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        return []
    if not keeper():
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", PRIVATE_CGROUPS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        KEEPER.write_text(str(process.pid))
        while not keeper():
            if process.poll() is not None:
                sys.exit(
                    "Cannot create a mount namespace with cgroup v2: run this as root on a machine with cgroup v2."
                )
            time.sleep(0.1)
    return ["nsenter", f"--target={keeper()}", "--mount", f"--wd={ROOT}"]


def leave() -> None:
    """Ends the mount namespace, unless hosts of another scenario are still in it."""
    process = keeper()
    if process:
        if subprocess.run([*enter(), "podman", "ps", "--quiet"], capture_output=True, text=True, check=False).stdout:
            return
        os.kill(process, 9)
    KEEPER.unlink(missing_ok=True)


def environment(scenario: str) -> dict[str, str]:
    """For everything that is run: our programs, collections and caches."""
    return {
        **os.environ,
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / ".venv" / "collections"),
        "ANSIBLE_HOME": str(ROOT / ".venv" / "ansible"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".venv" / "collections"),
        "LLAMA_TEST_WORK": str(WORK / scenario),
        "XDG_CACHE_HOME": str(WORK / scenario / "controller"),
    }


def molecule(step: str, scenario: str) -> float:
    """Seconds that a step took; a failed one ends this program, leaving the hosts up to look at."""
    started = time.monotonic()
    command = [*enter(), "molecule", step.replace("_", "-"), "--scenario-name", scenario, "--no-command-borders"]
    status = subprocess.run(command, cwd=ROOT, env=environment(scenario), check=False).returncode
    if status:
        sys.exit(f"molecule {step} of scenario {scenario} failed with status {status}. The hosts are still up.")
    return round(time.monotonic() - started, 1)


def result(scenario: str, seconds: dict[str, float]) -> dict:
    work = WORK / scenario
    verified = work / "verify.json"
    checks = json.loads(verified.read_text())["checks"] if verified.exists() else []
    inventory = yaml.safe_load((ROOT / "molecule" / scenario / "inventory" / "hosts.yml").read_text())
    untested = [
        f"{check['name']} of {check['subject']}: {check['evidence']}"
        for check in checks
        if check["status"] == "not tested" and check["name"] != "closed"
    ]
    measured = work / "result.json"
    return {
        "scenario": scenario,
        "hosts": len(json.loads((work / "plan.json").read_text())["hosts"]),
        "first_verified_answer_s": seconds["converge"] if checks else None,
        "no_change_s": seconds["idempotence"],
        "whole_s": round(sum(seconds.values()), 1),
        **(json.loads(measured.read_text()) if measured.exists() else {}),
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
        molecule(action, scenario)
        if action == "destroy":
            leave()
        return
    seconds: dict[str, float] = {}
    for step in yaml.safe_load(configuration.read_text())["scenario"]["test_sequence"]:
        seconds[step] = seconds.get(step, 0) + molecule(step, scenario)
    leave()
    print("RESULT " + json.dumps(result(scenario, seconds)), flush=True)


if __name__ == "__main__":
    main()
