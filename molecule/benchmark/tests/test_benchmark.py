"""Measures three hosts: its run and its programs are killed in the middle, the next run begins anew, and every figure is found in the programs' logs."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import jsonschema_rs
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from conftest import INVENTORY, PLAN, WORK, on

pytestmark = pytest.mark.timeout(1800)

ROOT = INVENTORY.parents[3]
HEAD, SERVER, PROGRAM = PLAN["head"]["host"], "llamacpp-server", "llamacpp-benchmark"
RECORDS, STATE = "/opt/llamacpp/benchmarks", "/opt/llamacpp/state/benchmarks"
LATENCY_MS = 5
BACK_SECONDS = 120
"""In which the server serves again after its programs were killed."""
WORKERS = re.compile(r"rpc-server .*-H 10\.231\.0\.2")
MEASURING = re.compile(r"llama-bench .*known-answer|benchmarks/runner\.py")
"""Command lines of what measures, and of the proxy that starts it."""
STAY_AWAKE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]): pass
"""
found = {}


@contextmanager
def first_of_all():
    """Lets the programs go before whatever else this machine does, the head on one processor and workers on another, and keeps these awake while
    the programs wait: a host of a cluster has its processors and their caches for itself, and a virtual one that sleeps is given to others."""
    ended, limits = threading.Event(), os.sched_param(1)
    processors = sorted(os.sched_getaffinity(0))
    awake = [
        subprocess.Popen([sys.executable, "-c", STAY_AWAKE, str(processor), str(os.getpid())])
        for processor in processors
    ]

    def look():
        while not ended.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/task/[0-9]*"):
                with suppress(OSError):
                    words = path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    is_worker = WORKERS.search(words)
                    if (is_worker or MEASURING.search(words)) and os.sched_getscheduler(
                        int(path.name)
                    ) != os.SCHED_FIFO:
                        os.sched_setaffinity(int(path.name), {processors[0 if is_worker else -1]})
                        os.sched_setscheduler(int(path.name), os.SCHED_FIFO, limits)
                        found["went_first"] = True

    found["went_first"] = False
    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield
    finally:
        ended.set()
        looker.join()
        for process in awake:
            process.kill()
            process.wait()


def command(name="benchmark", **variables):
    paths = {f"llama_{name}_path": str(WORK / f"tests-{name}.json") for name in ("plan", "verify")}
    given = {**paths, "llama_benchmark_path": str(WORK / "measured"), **variables}
    playbook = str(ROOT / "playbooks" / f"{name}.yml")
    return ["ansible-playbook", playbook, f"--inventory={INVENTORY}", f"--extra-vars={json.dumps(given)}"]


def run(*name, **variables):
    done = subprocess.run(command(*name, **variables), capture_output=True, text=True, check=False)
    (WORK / "tests-output.log").open("a").write(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def kept():
    """What the head keeps, the newest first."""
    files = on(HEAD).run(f"ls -r {RECORDS}/20*.json").stdout.split()
    return [json.loads(on(HEAD).file(path).content_string) for path in files]


def states():
    """Services of each host, and whether they run."""
    list_units = "systemctl list-units --all --plain --no-legend 'llamacpp-*' | awk '{print $1, $3}' | sort"
    return {name: on(name).run(list_units).stdout for name in PLAN["hosts"]}


def answers():
    asked = 'curl -s -m 20 -d \'{"prompt":"","temperature":0}\' http://127.0.0.1:8080/v1/completions'
    return " ".join(known_answer.SENTENCE.split()[-6:]) in on(HEAD).run(asked).stdout


@pytest.fixture(scope="module", autouse=True)
def result():
    yield
    (WORK / "result.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def before():
    return states()


def running_services():
    return on(HEAD).run("systemctl list-units --state=running --plain --no-legend 'llamacpp-*'").stdout


def logs():
    return set(on(HEAD).run(f"find {STATE} -name '*.log'").stdout.split())


def test_programs_that_are_killed_without_a_controller_leave_a_cluster_that_serves(before):
    output = (WORK / "killed.log").open("w+")
    with subprocess.Popen(command(), stdout=output, stderr=output, start_new_session=True) as running:
        deadline = time.time() + 400
        while time.time() < deadline and running.poll() is None:
            text = (WORK / "killed.log").read_text()
            if len(re.findall(r"1 host, (?:tg|pp)\S+.*: \d", text)) >= 2:
                break
            time.sleep(0.5)
        assert running.poll() is None, (WORK / "killed.log").read_text()[-5000:]
        # The process of the task has a session of its own, and would end the benchmark itself.
        tasks = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True, check=False)
        for process in [*tasks.stdout.split(), running.pid]:
            os.kill(int(process), signal.SIGKILL)
    time.sleep(15)
    assert PROGRAM in running_services(), "it goes on without the controller"
    assert SERVER not in running_services()
    found["logs_before_kill"] = len(logs())
    killed = time.time()
    on(HEAD).run(f"systemctl kill --signal=KILL {PROGRAM}.service")
    while not answers():
        assert time.time() - killed < BACK_SECONDS, states()
        time.sleep(1)
    found["serves_again_after_kill_s"] = round(time.time() - killed, 1)
    assert on(HEAD).run("pgrep -f bin/llama-benc[h]").stdout == ""
    assert not all(cell["measured"] for cell in kept()[0]["cells"])


def test_the_next_run_begins_anew_and_the_cluster_is_as_it_was(before):
    started = time.time()
    with first_of_all():
        run()
    found["measured_s"] = round(time.time() - started, 1)
    whole, half = kept()
    assert whole["id"] > half["id"]
    assert all(cell["measured"] for cell in whole["cells"])
    assert states() == before
    assert answers()
    assert on(HEAD).run("ls /run/systemd/system | grep benchmark").stdout == ""


@pytest.mark.parametrize("playbook", ["stop", "start"])
def test_who_stops_or_starts_the_server_ends_a_benchmark_first(before, playbook):
    """By hand, with a unit like that of a benchmark."""
    unit = f"[Unit]\nConflicts={SERVER}.service\nAfter={SERVER}.service\n[Service]\nExecStart=/usr/bin/sleep 600\n"
    unit += f"ExecStopPost=+/usr/bin/env systemctl --no-block start {SERVER}.service\n"
    path = f"/run/systemd/system/{PROGRAM}.service"
    on(HEAD).run(f"printf %s {shlex.quote(unit)} > {path}; systemctl daemon-reload; systemctl start {PROGRAM}")
    assert PROGRAM in running_services()
    assert SERVER not in running_services()
    try:
        play = [str(ROOT / "playbooks" / f"{playbook}.yml"), f"--inventory={INVENTORY}"]
        done = subprocess.run(["ansible-playbook", *play], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:]
        time.sleep(5)
        assert PROGRAM not in running_services()
        assert (SERVER in running_services()) == (playbook == "start")
    finally:
        subprocess.run(
            ["ansible-playbook", str(ROOT / "playbooks" / "start.yml"), f"--inventory={INVENTORY}"], check=False
        )
    assert answers()


def test_what_is_written_has_its_form():
    record = json.loads((WORK / "measured" / "benchmark.json").read_text())
    schema = json.loads((ROOT / "docs" / "benchmark.schema.json").read_text())
    jsonschema_rs.validator_for(schema).validate(record)
    assert record == kept()[0]
    assert not [cell for cell in record["cells"] if cell["skipped"]]
    assert {len(cell["hosts"]) for cell in record["cells"]} == {1, 2, 3}


def test_every_figure_is_found_in_the_logs_of_the_programs():
    record = kept()[0]
    logs = {cell["log"] for cell in record["cells"] if cell["log"]}
    texts = {path: on(HEAD).file(path).content_string for path in logs}
    cells = [cell for cell in record["cells"] if cell["log"]]
    assert len(cells) == len(record["cells"]) == 5 * 2 * 2
    markdown = (WORK / "measured" / "benchmark.md").read_text()
    for cell in cells:
        rows = [json.loads(line.split(" ", 2)[2]) for line in texts[cell["log"]].splitlines() if " out {" in line]
        tests = {
            (f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}", row["n_depth"]): row for row in rows
        }
        row = tests[cell["test"], cell["depth"]]
        mean, deviation, samples = row["avg_ts"], row["stddev_ts"], row["samples_ts"]
        assert len(samples) == 5
        assert cell["measured"]["samples"] == pytest.approx(samples, rel=1e-4)
        assert cell["measured"]["mean"] == pytest.approx(mean, rel=1e-4)
        assert cell["measured"]["deviation"] == pytest.approx(deviation, rel=1e-3, abs=1e-3)
        assert f"{mean:.2f} ± {deviation:.2f}" in markdown


def test_added_latency_costs_what_the_crossings_say():
    """Beside the proxy itself, which adds up to 0.4 ms a token."""
    generation = [cell for cell in kept()[0]["cells"] if cell["test"].startswith("tg") and not cell["depth"]]
    cells = {(len(cell["hosts"]), cell["latency_ms"]): cell for cell in generation}
    found["added_over_expected"] = {}
    for hosts in (2, 3):
        direct, delayed = cells[hosts, None], cells[hosts, LATENCY_MS]
        added = 1000 / max(delayed["measured"]["samples"]) - 1000 / max(direct["measured"]["samples"])
        found["added_over_expected"][hosts] = round(
            added / (1000 / delayed["predicted"] - 1000 / direct["predicted"]), 3
        )
    assert not {hosts: ratio for hosts, ratio in found["added_over_expected"].items() if abs(ratio - 1) > 0.15}


def test_check_mode_changes_nothing():
    done = subprocess.run([*command(), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(kept()) == 2
    assert answers()
