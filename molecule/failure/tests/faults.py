"""Faults to inject on the hosts of the scenario. A fault returns a function that removes it, or None if it ends without help."""

import json
import random
import subprocess

from conftest import HOSTS, PLAN, WORK

HEAD = PLAN["head"]["host"]
WORKERS = [name for name, host in PLAN["hosts"].items() if host["workers"]]
STATE = PLAN["hosts"][HEAD]["state"]
SERVICES = {name: [service["name"] for service in host["services"]] for name, host in PLAN["hosts"].items()}
(SERVER,) = SERVICES[HEAD]
PROGRAM = PLAN["head"]["argv"][0].rsplit("/", 1)[1]
"""Name of the head's program: llama-server, or the program that starts it for several models."""
WORKER_PROGRAM = PLAN["hosts"][WORKERS[0]]["workers"][0]["argv"][0].rsplit("/", 1)[1]


def container(name):
    return f"llamacpp-test-{name}"


def run_inside(name, command, check=True, detach=False):
    """Return the output of a shell command on a host. It runs through the container, so it needs no network."""
    argv = ["podman", "exec", *(["--detach"] if detach else []), container(name), "sh", "-c", command]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{name}: {command}: {done.stdout}{done.stderr}"
    return done.stdout


def launcher_state():
    """Return the state that the head's launcher reports; empty if there is none."""
    try:
        return json.loads(run_inside(HEAD, f"cat {STATE}/serving.json", check=False))
    except ValueError:
        return {}


def signal_worker(name, number):
    run_inside(name, f"pkill -{number} --full '^[^ ]*/bin/{WORKER_PROGRAM} '")


def signal_server(number):
    run_inside(HEAD, f"pkill -{number} --full '^[^ ]*/{PROGRAM} '")


def worker_killed(name):
    signal_worker(name, "KILL")


def worker_hung(name):
    signal_worker(name, "STOP")


def worker_rebooted(name):
    subprocess.run(["podman", "restart", "--time", "10", container(name)], check=True, capture_output=True)


def worker_cut_off(name):
    """Drop the packets between a worker and the head."""
    own, head = HOSTS[name]["test_addresses"][0], HOSTS[HEAD]["test_addresses"][0]
    rules = f"""
    add table inet cut
    add chain inet cut in {{ type filter hook input priority -300; }}
    add chain inet cut out {{ type filter hook output priority -300; }}
    add rule inet cut in ip saddr {head} ip daddr {own} drop
    add rule inet cut out ip saddr {own} ip daddr {head} drop
    """
    run_inside(name, f"echo '{rules}' | nft -f -")
    return lambda: run_inside(name, "nft delete table inet cut")


def worker_address_changed(name):
    """Change the address of a worker, and restore it later."""
    own = HOSTS[name]["test_addresses"][0]
    other = own.rsplit(".", 1)[0] + ".99"
    route = run_inside(name, "ip route show default").strip()
    run_inside(name, f"ip address del {own}/24 dev eth0 && ip address add {other}/24 dev eth0")

    def restore():
        run_inside(name, f"ip address del {other}/24 dev eth0 && ip address add {own}/24 dev eth0")
        if route:
            run_inside(name, f"ip route replace {route}", check=False)

    return restore


def head_killed(_name):
    signal_server("KILL")


def launcher_killed(_name):
    run_inside(HEAD, f"systemctl kill --signal=KILL --kill-whom=main {SERVER}")


def head_hung(_name):
    signal_server("STOP")


def head_out_of_memory(_name):
    """Kill every process of the unit, like the kernel if the unit has OOMPolicy=kill."""
    run_inside(HEAD, f"systemctl kill --signal=KILL --kill-whom=all {SERVER}")


def all_rebooted(_name):
    names = [container(name) for name in random.sample(list(SERVICES), len(SERVICES))]
    restarts = [
        subprocess.Popen(
            ["podman", "restart", "--time", "10", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for name in names
    ]
    assert not any(restart.wait() for restart in restarts)


def disk_full(_name):
    """Fill the disk with the launcher's state, then kill llama-server, so that the launcher has to write. The small disk stays mounted until
    ``remove_small_disk``, because a service keeps its own view of the mounts."""
    owner = run_inside(HEAD, f"stat --format=%u:%g {STATE}").strip()
    disk = WORK / "cache" / HEAD / "disk"
    if not disk.exists():
        subprocess.run(["mkfs.ext4", "-q", disk, "32M"], check=True)
    mount = f"mount -o loop /var/cache/llamacpp/disk {STATE} && chmod 0750 {STATE} && chown {owner} {STATE}"
    run_inside(HEAD, f"mountpoint --quiet {STATE} || ({mount})")
    run_inside(HEAD, f"dd if=/dev/zero of={STATE}/filler bs=64k 2>/dev/null", check=False)
    signal_server("KILL")
    return lambda: run_inside(HEAD, f"rm {STATE}/filler")


def remove_small_disk():
    """Unmount and remove the small disk, if there is one."""
    run_inside(HEAD, f"mountpoint --quiet {STATE} && umount --lazy {STATE} && systemctl restart {SERVER}", check=False)
    (WORK / "cache" / HEAD / "disk").unlink(missing_ok=True)


ALL = [
    worker_killed,
    worker_hung,
    worker_rebooted,
    worker_cut_off,
    worker_address_changed,
    head_killed,
    launcher_killed,
    head_hung,
    head_out_of_memory,
    all_rebooted,
    disk_full,
]
HEAL_WHILE_THEY_LAST = (disk_full,)
"""Faults during which the cluster must serve again, before they are removed."""
