"""A client sends requests continuously while releases change: the seconds without an answer that each change costs."""

import json
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import HOSTS, INVENTORY, PLAN, WORK, connect

pytestmark = pytest.mark.timeout(1800)

PLAYBOOKS = INVENTORY.parents[3] / "playbooks"
ROLLBACK = PLAYBOOKS / "rollback.yml"
HEAD, SERVER = PLAN["head"]["host"], "llamacpp-server"
WORKERS = {
    name: service["name"] for name, host in PLAN["hosts"].items() for service in host["services"] if name != HEAD
}
DEFAULT = inventory.specification()["llama_release"]["default"]
OLD, NEW = "package-", f"pypi-{DEFAULT['version']}-"
"""Prefixes of the build ids of both releases."""
CACHED_BYTES = {
    name: sum(
        row["bytes"] * len(row["layers"] or [None])
        for worker in PLAN["hosts"][name]["workers"]
        for row in worker["prefill"]["tensors"]
    )
    for name in WORKERS
}
"""Bytes of the tensors that each host's workers keep on disk."""
WORDS = " ".join(known_answer.SENTENCE.split()[:2])
COUNTER = f"""
add table inet measured
add counter inet measured received
add chain inet measured input {{ type filter hook input priority -400; }}
add rule inet measured input ip saddr {HOSTS[HEAD]["test_addresses"][0]} counter name received
"""
LOG = "/root/asked.log"
MANUAL_RESTARTS = 3
"""Number of restarts by hand."""
measured = {}


def broken_release(name):
    return {**DEFAULT, "patches": [str(INVENTORY.parents[1] / f"{name}.patch")]}


def command(playbook, **variables):
    paths = {f"llama_{name}_path": str(WORK / f"tests-{name}.json") for name in ("plan", "verify")}
    option = f"--extra-vars={json.dumps({**paths, **variables})}"
    return ["ansible-playbook", str(playbook), f"--inventory={INVENTORY}", option]


def run(playbook=PLAYBOOKS / "site.yml", **variables):
    """Run a playbook to its end."""
    done = subprocess.run(command(playbook, **variables), capture_output=True, text=True, check=False)
    (WORK / "tests-output.log").open("a").write(done.stdout + done.stderr)
    return done


def succeeds(*arguments, **variables):
    done = run(*arguments, **variables)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout


def running_releases():
    """Return the releases whose programs run, by host."""
    command_line = (
        "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -oP '^/opt/llamacpp/releases/\\K[^/]+(?=/bin/)' | sort -u"
    )
    return {name: connect(name).run(command_line).stdout.split() for name in PLAN["hosts"]}


def serves(release):
    return all(len(own) == 1 and own[0].startswith(release) for own in running_releases().values())


def outcomes():
    """Return time and outcome of each request."""
    lines = connect(HEAD).file(LOG).content_string.splitlines()
    return [(float(line.split(" ", 2)[0]), line.split(" ", 2)[1]) for line in lines]


def wait_for_answer(seconds=180):
    """Wait for a right answer from now on."""
    begin = time.time()
    while time.time() < begin + seconds:
        ended, outcome = outcomes()[-1]
        if outcome == "right" and ended > begin:
            return
        time.sleep(0.5)
    pytest.fail(connect(HEAD).check_output("journalctl --no-pager --lines=50 --unit=%s", SERVER))


def received_bytes():
    """Return the bytes that each worker's host has received from the head."""
    outputs = {name: connect(name).check_output("nft list counter inet measured received") for name in WORKERS}
    return {name: int(re.search(r"bytes (\d+)", text)[1]) for name, text in outputs.items()}


def gap(begin):
    """Return the seconds without a right answer since then: the longest time between two answers, minus the median."""
    right = [ended for ended, outcome in outcomes() if outcome == "right"]
    between = [later - earlier for earlier, later in zip(right, right[1:]) if later > begin]
    return round(max(between) - statistics.median(between), 2)


@pytest.fixture(scope="module", autouse=True)
def client():
    """Run a client on the head from the first test to the last. The measurements become the scenario's result."""
    for name in WORKERS:
        connect(name).check_output("nft %s", COUNTER)
    asker = Path(__file__).with_name("asker.py").read_text()
    unit = ["systemd-run", "--quiet", "--unit=asker", f"--property=StandardOutput=truncate:{LOG}", "python3", "-c"]
    connect(HEAD).run_test(
        " ".join(["%s"] * (len(unit) + 3)), *unit, asker, f"{PLAN['head']['url']}/v1/completions", WORDS
    )
    time.sleep(5)
    wait_for_answer()
    yield
    for name in WORKERS:
        connect(name).check_output("nft delete table inet measured")
    connect(HEAD).check_output("systemctl stop asker")
    if {"upgrade_gap_s", "bare_restart_s"} <= set(measured):
        measured["ratio"] = round(measured["upgrade_gap_s"] / measured["bare_restart_s"], 2)
    measured["wrong_answers"] = sum(outcome == "wrong" for _ended, outcome in outcomes())
    connect(HEAD).check_output("rm %s", LOG)
    (WORK / "result.json").write_text(json.dumps(measured))


def start_systemctl(name, words):
    address = HOSTS[name]["test_addresses"][0]
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    return subprocess.Popen(["ssh", "-i", str(WORK / "key"), *options, f"root@{address}", "systemctl", *words])


def restart_by_hand():
    assert start_systemctl(HEAD, ["stop", SERVER]).wait() == 0
    started = [start_systemctl(name, ["restart", service]) for name, service in WORKERS.items()]
    assert [process.wait() for process in started] == [0] * len(started)
    assert start_systemctl(HEAD, ["start", SERVER]).wait() == 0
    time.sleep(1)
    wait_for_answer()


def test_an_upgrade_costs_one_restart_and_sends_no_cached_tensor():
    # Compile first: what workers receive for answers meanwhile does not belong to the upgrade.
    subprocess.run(
        [*command(PLAYBOOKS / "site.yml", llama_release=DEFAULT), "--tags=build"], capture_output=True, check=True
    )
    begin, before = time.time(), received_bytes()
    succeeds(llama_release=DEFAULT)
    wait_for_answer()
    measured["upgrade_gap_s"] = gap(begin)
    sent = {name: now - before[name] for name, now in received_bytes().items()}
    measured["upgrade_received_mib"] = {name: round(number / 2**20) for name, number in sent.items()}
    measured["cached_mib"] = {name: round(number / 2**20) for name, number in CACHED_BYTES.items()}
    assert all(sent[name] < CACHED_BYTES[name] / 10 for name in WORKERS), sent
    assert serves(NEW)


def test_the_programs_of_both_releases_accept_the_options_of_the_table():
    programs = connect(HEAD).check_output("ls /opt/llamacpp/releases/*/bin/*").split()
    assert {path.split("/")[4].split("-")[0] for path in programs} == {"package", "pypi"}
    for path in programs:
        process = connect(HEAD).run("%s --help", path)
        program = options.SERVER if path.endswith("llama-server") else options.WORKER
        assert set(options.listed_options(program, MAINLINE, capabilities.OLDEST_BUILDS[MAINLINE])) <= set(
            capabilities.parse_help(process.stdout + process.stderr)
        )


def test_a_restart_by_hand_for_comparison():
    gaps = []
    for _start in range(MANUAL_RESTARTS):
        begin = time.time()
        restart_by_hand()
        gaps.append(gap(begin))
    measured["bare_restart_s"] = statistics.median(gaps)


def test_an_upgrade_that_does_not_start_rolls_back_automatically():
    before, begin = running_releases(), time.time()
    failed = run(llama_release=broken_release("broken-for-others"))
    assert failed.returncode == 2, failed.stdout[-5000:] + failed.stderr
    wait_for_answer()
    measured["failing_upgrade_gap_s"] = gap(begin)
    assert running_releases() == before


def test_a_rollback_costs_one_restart():
    begin = time.time()
    succeeds(ROLLBACK)
    wait_for_answer()
    measured["rollback_gap_s"] = gap(begin)
    assert serves(OLD)


def test_a_rollback_after_the_controller_was_killed_in_the_middle():
    with (WORK / "killed.log").open("w") as log:
        upgrade = subprocess.Popen(
            command(PLAYBOOKS / "site.yml", llama_release=DEFAULT), stdout=log, stderr=log, start_new_session=True
        )
    while connect(HEAD).run("systemctl is-active %s", SERVER).stdout.strip() == "active":
        assert upgrade.poll() is None, (WORK / "killed.log").read_text()[-5000:]
        time.sleep(0.2)
    os.killpg(upgrade.pid, signal.SIGKILL)
    upgrade.wait()
    succeeds(ROLLBACK)
    wait_for_answer()
    assert serves(OLD)


def test_the_next_run_finds_nothing_to_repair():
    succeeds()
    output = succeeds()
    assert serves(OLD)
    assert "changed=0" in output
    assert all("changed=0" in line for line in output.splitlines() if "unreachable=" in line)
