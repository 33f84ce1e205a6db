"""A client asks all the time while releases come and go: what each of these costs it, in seconds without an answer."""

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
from conftest import HOSTS, INVENTORY, PLAN, WORK, on

pytestmark = pytest.mark.timeout(1800)

PLAYBOOKS = INVENTORY.parents[3] / "playbooks"
ROLLBACK = PLAYBOOKS / "rollback.yml"
HEAD, SERVER = PLAN["head"]["host"], "llamacpp-server"
WORKERS = {
    name: service["name"] for name, host in PLAN["hosts"].items() for service in host["services"] if name != HEAD
}
DEFAULT = inventory.specification()["llama_release"]["default"]
OLD, NEW = "package-", f"pypi-{DEFAULT['version']}-"
"""How ids of builds of both releases begin."""
CACHED = {
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
STARTS = 3
"""How often the services are restarted by hand."""
measured = {}


def broken(name):
    return {**DEFAULT, "patches": [str(INVENTORY.parents[1] / f"{name}.patch")]}


def command(playbook, **variables):
    paths = {f"llama_{name}_path": str(WORK / f"tests-{name}.json") for name in ("plan", "verify")}
    given = f"--extra-vars={json.dumps({**paths, **variables})}"
    return ["ansible-playbook", str(playbook), f"--inventory={INVENTORY}", given]


def run(playbook=PLAYBOOKS / "site.yml", **variables):
    """Runs a playbook to its end."""
    done = subprocess.run(command(playbook, **variables), capture_output=True, text=True, check=False)
    (WORK / "tests-output.log").open("a").write(done.stdout + done.stderr)
    return done


def succeeds(*arguments, **variables):
    done = run(*arguments, **variables)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout


def served():
    """Names of the releases of which programs run, of each host."""
    listed = (
        "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -oP '^/opt/llamacpp/releases/\\K[^/]+(?=/bin/)' | sort -u"
    )
    return {name: on(name).run(listed).stdout.split() for name in PLAN["hosts"]}


def serves(release):
    return all(len(own) == 1 and own[0].startswith(release) for own in served().values())


def answers():
    """When each question was answered, and how."""
    lines = on(HEAD).file(LOG).content_string.splitlines()
    return [(float(line.split(" ", 2)[0]), line.split(" ", 2)[1]) for line in lines]


def wait_for_answer(seconds=180):
    """Until one right answer has come from now on."""
    begin = time.time()
    while time.time() < begin + seconds:
        ended, how = answers()[-1]
        if how == "right" and ended > begin:
            return
        time.sleep(0.5)
    pytest.fail(on(HEAD).check_output("journalctl --no-pager --lines=50 --unit=%s", SERVER))


def received():
    """Bytes that each worker's host has got from the head."""
    said = {name: on(name).check_output("nft list counter inet measured received") for name in WORKERS}
    return {name: int(re.search(r"bytes (\d+)", text)[1]) for name, text in said.items()}


def gap(begin):
    """Seconds without a right answer since then: the longest time between two, less the usual."""
    right = [ended for ended, how in answers() if how == "right"]
    between = [later - earlier for earlier, later in zip(right, right[1:]) if later > begin]
    return round(max(between) - statistics.median(between), 2)


@pytest.fixture(scope="module", autouse=True)
def asked():
    """A client of the cluster on its head, from the first test to the last. What was measured becomes the scenario's result."""
    for name in WORKERS:
        on(name).check_output("nft %s", COUNTER)
    asker = Path(__file__).with_name("asker.py").read_text()
    unit = ["systemd-run", "--quiet", "--unit=asker", f"--property=StandardOutput=truncate:{LOG}", "python3", "-c"]
    on(HEAD).run_test(" ".join(["%s"] * (len(unit) + 3)), *unit, asker, f"{PLAN['head']['url']}/v1/completions", WORDS)
    time.sleep(5)
    wait_for_answer()
    yield
    for name in WORKERS:
        on(name).check_output("nft delete table inet measured")
    on(HEAD).check_output("systemctl stop asker")
    if {"upgrade_gap_s", "bare_restart_s"} <= set(measured):
        measured["ratio"] = round(measured["upgrade_gap_s"] / measured["bare_restart_s"], 2)
    measured["wrong_answers"] = sum(how == "wrong" for _ended, how in answers())
    on(HEAD).check_output("rm %s", LOG)
    (WORK / "result.json").write_text(json.dumps(measured))


def by_hand(name, words):
    address = HOSTS[name]["test_addresses"][0]
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    return subprocess.Popen(["ssh", "-i", str(WORK / "key"), *options, f"root@{address}", "systemctl", *words])


def restart_by_hand():
    assert by_hand(HEAD, ["stop", SERVER]).wait() == 0
    started = [by_hand(name, ["restart", service]) for name, service in WORKERS.items()]
    assert [process.wait() for process in started] == [0] * len(started)
    assert by_hand(HEAD, ["start", SERVER]).wait() == 0
    time.sleep(1)
    wait_for_answer()


def test_an_upgrade_costs_one_restart_and_sends_no_tensor_that_a_worker_has():
    # What the workers get for answers while llama.cpp is compiled is none of the upgrade's.
    subprocess.run(
        [*command(PLAYBOOKS / "site.yml", llama_release=DEFAULT), "--tags=build"], capture_output=True, check=True
    )
    begin, before = time.time(), received()
    succeeds(llama_release=DEFAULT)
    wait_for_answer()
    measured["upgrade_gap_s"] = gap(begin)
    sent = {name: now - before[name] for name, now in received().items()}
    measured["upgrade_received_mib"] = {name: round(number / 2**20) for name, number in sent.items()}
    measured["cached_mib"] = {name: round(number / 2**20) for name, number in CACHED.items()}
    assert all(sent[name] < CACHED[name] / 10 for name in WORKERS), sent
    assert serves(NEW)


def test_the_programs_of_both_releases_take_the_words_of_the_table():
    programs = on(HEAD).check_output("ls /opt/llamacpp/releases/*/bin/*").split()
    assert {path.split("/")[4].split("-")[0] for path in programs} == {"package", "pypi"}
    for path in programs:
        said = on(HEAD).run("%s --help", path)
        program = options.SERVER if path.endswith("llama-server") else options.WORKER
        assert set(options.listed_options(program, MAINLINE, capabilities.OLDEST_BUILDS[MAINLINE])) <= set(
            capabilities.parse_help(said.stdout + said.stderr)
        )


def test_a_restart_by_hand_for_comparison():
    gaps = []
    for _start in range(STARTS):
        begin = time.time()
        restart_by_hand()
        gaps.append(gap(begin))
    measured["bare_restart_s"] = statistics.median(gaps)


def test_an_upgrade_that_fails_at_its_start_goes_back_by_itself():
    before, begin = served(), time.time()
    failed = run(llama_release=broken("broken-for-others"))
    assert failed.returncode == 2, failed.stdout[-5000:] + failed.stderr
    wait_for_answer()
    measured["failing_upgrade_gap_s"] = gap(begin)
    assert served() == before


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
    while on(HEAD).run("systemctl is-active %s", SERVER).stdout.strip() == "active":
        assert upgrade.poll() is None, (WORK / "killed.log").read_text()[-5000:]
        time.sleep(0.2)
    os.killpg(upgrade.pid, signal.SIGKILL)
    upgrade.wait()
    succeeds(ROLLBACK)
    wait_for_answer()
    assert serves(OLD)


def test_the_next_run_finds_nothing_to_repair():
    succeeds()
    said = succeeds()
    assert serves(OLD)
    assert "changed=0" in said
    assert all("changed=0" in line for line in said.splitlines() if "unreachable=" in line)
