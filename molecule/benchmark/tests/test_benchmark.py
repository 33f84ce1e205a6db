"""Measures three hosts. A run and its programs are killed halfway, the next run starts over, and every figure is in the programs' output."""

import json
import os
import re
import shlex
import signal
import subprocess
import time

import jsonschema_rs
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from conftest import INVENTORY, PLAN, WORK, connect

pytestmark = pytest.mark.timeout(1800)

ROOT = INVENTORY.parents[3]
HEAD, SERVER, PROGRAM = PLAN["head"]["host"], "llamacpp-server", "llamacpp-benchmark"
STATE = "/opt/llamacpp/state"
RECOVERY_SECONDS = 120
"""Seconds within which the server serves again after the benchmark's programs were killed."""
measurements = {}


def command(name="benchmark", **variables):
    paths = {f"llama_{name}_path": str(WORK / f"tests-{name}.json") for name in ("plan", "verify")}
    all_variables = {**paths, "llama_benchmark_path": str(WORK / "measured"), **variables}
    playbook = str(ROOT / "playbooks" / f"{name}.yml")
    return ["ansible-playbook", playbook, f"--inventory={INVENTORY}", f"--extra-vars={json.dumps(all_variables)}"]


def run(*name, **variables):
    done = subprocess.run(command(*name, **variables), capture_output=True, text=True, check=False)
    (WORK / "tests-output.log").open("a").write(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def read_record():
    return json.loads((WORK / "measured" / "benchmark.json").read_text())


def service_states():
    """Return the services of each host and their states."""
    list_units = "systemctl list-units --all --plain --no-legend 'llamacpp-*' | awk '{print $1, $3}' | sort"
    return {name: connect(name).run(list_units).stdout for name in PLAN["hosts"]}


def is_answering():
    request = 'curl -s -m 20 -d \'{"prompt":"","temperature":0}\' http://127.0.0.1:8080/v1/completions'
    return " ".join(known_answer.SENTENCE.split()[-6:]) in connect(HEAD).run(request).stdout


@pytest.fixture(scope="module", autouse=True)
def result():
    yield
    (WORK / "result.json").write_text(json.dumps(measurements))


@pytest.fixture(scope="module")
def before():
    return service_states()


def running_services():
    return connect(HEAD).run("systemctl list-units --state=running --plain --no-legend 'llamacpp-*'").stdout


def output_files():
    return connect(HEAD).run(f"ls {STATE}/benchmark-*").stdout.split()


def test_the_cluster_serves_again_after_the_programs_are_killed_without_a_controller(before):
    output = (WORK / "killed.log").open("w+")
    long = command(llama_benchmark_depths=[0, 512, 1024, 2048])
    with subprocess.Popen(long, stdout=output, stderr=output, start_new_session=True) as running:
        deadline = time.time() + 400
        while time.time() < deadline and running.poll() is None:
            text = (WORK / "killed.log").read_text()
            if len(re.findall(r"1 host, (?:tg|pp)\S+.*: \d", text)) >= 2:
                break
            time.sleep(0.5)
        assert running.poll() is None, (WORK / "killed.log").read_text()[-5000:]
        # The task's process has its own session, and would stop the benchmark itself.
        tasks = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True, check=False)
        for process in [*tasks.stdout.split(), running.pid]:
            os.kill(int(process), signal.SIGKILL)
    time.sleep(5)
    assert PROGRAM in running_services(), "the benchmark continues without the controller"
    assert SERVER not in running_services()
    assert f"{STATE}/benchmark-0.jsonl" in output_files()
    killed = time.time()
    connect(HEAD).run(f"systemctl kill --signal=KILL {PROGRAM}.service")
    while not is_answering():
        assert time.time() - killed < RECOVERY_SECONDS, service_states()
        time.sleep(1)
    measurements["serves_again_after_kill_s"] = round(time.time() - killed, 1)
    assert connect(HEAD).run("pgrep -f bin/llama-benc[h]").stdout == ""


def test_the_next_run_starts_over_and_restores_the_cluster(before):
    started = time.time()
    run()
    measurements["measured_s"] = round(time.time() - started, 1)
    assert all(cell["measured"] for cell in read_record()["cells"])
    assert service_states() == before
    assert is_answering()
    assert connect(HEAD).run("ls /run/systemd/system | grep benchmark").stdout == ""


@pytest.mark.parametrize("playbook", ["stop", "start"])
def test_stopping_or_starting_the_server_stops_the_benchmark_first(before, playbook):
    """The benchmark is a unit like the real one, started by hand."""
    unit = f"[Unit]\nConflicts={SERVER}.service\nAfter={SERVER}.service\n[Service]\nExecStart=/usr/bin/sleep 600\n"
    unit += f"ExecStopPost=+/usr/bin/env systemctl --no-block start {SERVER}.service\n"
    path = f"/run/systemd/system/{PROGRAM}.service"
    connect(HEAD).run(f"printf %s {shlex.quote(unit)} > {path}; systemctl daemon-reload; systemctl start {PROGRAM}")
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
    assert is_answering()


def test_the_record_matches_the_schema():
    schema = json.loads((ROOT / "docs" / "benchmark.schema.json").read_text())
    jsonschema_rs.validator_for(schema).validate(read_record())
    assert {len(cell["hosts"]) for cell in read_record()["cells"]} == {1, 2, 3}


def test_every_figure_is_in_the_output_of_the_programs():
    cells = read_record()["cells"]
    assert len(cells) == 3 * 2 * 2
    markdown = (WORK / "measured" / "benchmark.md").read_text()
    for number, hosts in enumerate(sorted({tuple(cell["hosts"]) for cell in cells}, key=len)):
        rows = connect(HEAD).file(f"{STATE}/benchmark-{number}.jsonl").content_string.splitlines()
        tests = {
            (f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}", row["n_depth"]): row
            for row in map(json.loads, rows)
        }
        for cell in (cell for cell in cells if tuple(cell["hosts"]) == hosts):
            row = tests[cell["test"], cell["depth"]]
            assert cell["measured"] == {"mean": row["avg_ts"], "deviation": row["stddev_ts"]}
            assert f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}" in markdown


def test_check_mode_changes_nothing():
    done = subprocess.run([*command(), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert is_answering()
