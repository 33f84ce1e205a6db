"""The whole main job on one machine with real llama.cpp, in the order in which an operator meets it.

Another order takes longer: ``served`` applies the inventory again after a test that left something else."""

import json
import os
import signal
import socket
import struct
import subprocess

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options, rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary, known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from conftest import PORTS, free_port, known_by, until


def test_check_mode_on_a_bare_host_tells_what_would_happen_and_does_nothing(cluster):
    cluster.clear()
    result = cluster.site("--check --diff")
    assert result.status == "successful", result.text
    assert result.changed > 0
    for told in ("llama-server", "known-answer-16x128-f32.gguf", "runtime.py"):
        assert told in result.text
    assert not cluster.prefix.exists()
    assert cluster.processes() == {}


def test_site_builds_runs_and_verifies(cluster, tmp_path):
    result = cluster.site(llama_plan_path=str(tmp_path / "plan.json"), llama_verify_path=str(tmp_path / "verify.json"))
    assert result.status == "successful", result.text
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report["passed"]
    assert {check["status"] for check in report["checks"]} == {"passed"}
    assert "known answer" in result.text
    assert cluster.complete() == known_answer.SENTENCE

    plan = json.loads((tmp_path / "plan.json").read_text())
    running = list(cluster.processes().values())
    assert plan["head"]["argv"] in running
    for worker in plan["hosts"]["localhost"]["workers"]:
        assert worker["argv"] in running


def test_a_second_run_changes_nothing(served):
    before = set(served.processes())
    result = served.site()
    assert result.status == "successful", result.text
    assert result.changed == 0
    assert set(served.processes()) == before


def test_check_mode_on_a_served_cluster_reports_no_change(served):
    result = served.site("--check --diff")
    assert result.status == "successful", result.text
    assert result.changed == 0


def test_workers_and_server_listen_on_loopback_only(served):
    listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    for port in (*PORTS, served.url.rsplit(":", 1)[1]):
        addresses = {line.split()[3] for line in listening.splitlines() if line.split()[3].endswith(f":{port}")}
        assert addresses == {f"127.0.0.1:{port}"}


def test_a_held_worker_is_silent_and_a_free_one_tells_its_device(served):
    release = next(served.prefix.glob("releases/*"))
    port = free_port()
    worker = subprocess.Popen(
        [release / "bin" / "ggml-rpc-server", "-p", str(port), "-d", "CPU"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        answer = until(lambda: (found := rpc.probe("127.0.0.1", port)).state == "ok" and found)
        assert answer.protocol == "7.0.0"
        assert len(answer.devices) == 1
        assert rpc.probe("127.0.0.1", port).state == "ok", "the probe left its connection open"
        assert rpc.probe("127.0.0.1", port, protocol="3.6.1").state == "protocol_mismatch"
        with socket.create_connection(("127.0.0.1", port)) as holder:
            holder.sendall(struct.pack("<BQ", rpc.HELLO, 24))
            assert rpc.probe("127.0.0.1", port, timeout=1).state == "silent"
    finally:
        worker.kill()
        worker.wait()


def test_what_the_programs_say_is_what_planning_took_for_granted(served):
    (programs,) = served.prefix.glob("releases/*/bin")
    tree = capabilities.PYPI_TREES["0.3.36"]
    for program, name in ((options.SERVER, "llama-server"), (options.WORKER, "ggml-rpc-server")):
        assert set(options.listed_options(program, MAINLINE, tree["build"])) <= set(known_by(programs / name))
    said = subprocess.run([programs / "llama-server", "--version"], capture_output=True, text=True, check=True)
    assert tree["commit"] in said.stdout + said.stderr


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_killed_worker_comes_back_and_so_does_the_answer(served, name):
    port = dict(zip(("one", "two"), PORTS))[name]
    worker, head = served.pid_of("rpc-server", f"-p {port}"), served.pid_of("llama-server", "--rpc")
    os.kill(worker, signal.SIGKILL)
    until(lambda: served.pid_of("rpc-server", f"-p {port}") != worker)
    until(lambda: served.pid_of("llama-server", "--rpc") != head)
    assert until(served.complete) == known_answer.SENTENCE


def test_a_head_whose_launcher_was_killed_comes_back(served):
    head = served.pid_of("llama-server", "--rpc")
    os.kill(served.pid_of("runtime.py"), signal.SIGKILL)
    until(lambda: served.pid_of("releases", "llama-server", "--rpc") != head)
    assert until(served.complete) == known_answer.SENTENCE


def supervisorctl(cluster, *arguments):
    program = [
        cluster.prefix / "venv/bin/python",
        "-m",
        "supervisor.supervisorctl",
        "-c",
        cluster.prefix / "supervisor/supervisord.conf",
    ]
    subprocess.run([*program, *arguments], check=True, capture_output=True)


def test_what_was_stopped_fails_verify_and_is_started_by_the_next_run(served):
    """First a worker, then everything, as by a reboot: the head first."""
    supervisorctl(served, "stop", "llamacpp-worker-two")
    failed = served.run("playbooks/verify.yml")
    assert failed.status == "failed"
    assert "llamacpp-worker-two is stopped" in failed.text
    log = served.prefix / "supervisor" / "supervisord.log"
    before = len(log.read_text())
    supervisorctl(served, "shutdown")
    until(lambda: not served.processes())
    stopped = [
        line.split("stopped: ")[1].split(" ")[0]
        for line in log.read_text()[before:].splitlines()
        if "stopped: " in line
    ]
    assert stopped == ["llamacpp-server", "llamacpp-worker-one"]
    result = served.site()
    assert result.status == "successful", result.text
    assert result.changed > 0
    assert served.complete() == known_answer.SENTENCE


def test_stop_and_start_without_planning(served):
    definitions = {path: path.read_text() for path in (served.prefix / "supervisor/services").iterdir()}
    log = served.prefix / "supervisor" / "supervisord.log"
    for playbook, verb, head in (("stop", "stopped: ", 0), ("start", "spawned: ", -1)):
        would = served.run(f"playbooks/{playbook}.yml", "--check")
        assert (would.status, would.changed) == ("successful", 2), would.text
        before = len(log.read_text())
        result = served.run(f"playbooks/{playbook}.yml")
        assert (result.status, result.changed) == ("successful", 2), result.text
        names = [
            line.split(verb)[1].split(" ")[0].strip("'")
            for line in log.read_text()[before:].splitlines()
            if verb in line
        ]
        assert names[head] == "llamacpp-server"
        assert sorted(names) == ["llamacpp-server", "llamacpp-worker-one", "llamacpp-worker-two"]
        assert served.run(f"playbooks/{playbook}.yml").changed == 0
    assert {path: path.read_text() for path in (served.prefix / "supervisor/services").iterdir()} == definitions
    assert until(served.complete) == known_answer.SENTENCE
    assert served.site().changed == 0


def test_settings_of_the_server_restart_the_head_alone_and_its_key_appears_nowhere(served, tmp_path):
    key = tmp_path / "key"
    key.write_text("not-to-be-told\n")
    key.chmod(0o600)
    workers = {pid for pid, argv in served.processes().items() if "rpc-server" in argv[0]}
    result = served.site(llama_server_context=1024, llama_server_api_key_file=str(key))
    assert result.status == "successful", result.text
    assert {pid for pid, argv in served.processes().items() if "rpc-server" in argv[0]} == workers
    assert "--ctx-size 1024" in " ".join(served.processes()[served.pid_of("releases", "llama-server", "--rpc")])
    assert "not-to-be-told" not in result.text
    assert all("not-to-be-told" not in " ".join(argv) for argv in served.processes().values())
    with pytest.raises(OSError, match="401"):
        served.complete()


def test_a_worker_that_is_not_planned_any_more_is_removed(served):
    names = [{"name": "first", "port": PORTS[0]}, {"name": "two", "port": PORTS[1]}]
    result = served.site(llama_worker_endpoints=names)
    assert result.status == "successful", result.text
    assert sorted(path.stem for path in (served.prefix / "supervisor/services").iterdir()) == [
        "llamacpp-server",
        "llamacpp-worker-first",
        "llamacpp-worker-two",
    ]
    assert served.site().status == "successful"
    assert served.site().changed == 0


def swap_layers(path):
    """Exchanges what two layers compute."""
    data = path.read_bytes()
    first, second = (data.index(f"blk.{layer}.ffn_down.weight".encode()) for layer in (3, 4))
    swapped = bytearray(data)
    swapped[first : first + 21], swapped[second : second + 21] = data[second : second + 21], data[first : first + 21]
    path.write_bytes(swapped)


def restart_head(cluster):
    head = cluster.pid_of("releases", "llama-server", "--rpc")
    os.kill(head, signal.SIGKILL)
    until(lambda: cluster.pid_of("releases", "llama-server", "--rpc") != head)
    until(cluster.complete)


def test_verify_notices_two_layers_that_are_swapped(served, tmp_path):
    model = served.prefix / "models" / "known-answer-16x128-f32.gguf"
    swap_layers(model)
    restart_head(served)
    assert served.complete() != known_answer.SENTENCE
    result = served.run("playbooks/verify.yml", llama_verify_path=str(tmp_path / "verify.json"))
    assert result.status == "failed"
    assert "at least one layer computes incorrectly" in result.text
    failed = [
        check for check in json.loads((tmp_path / "verify.json").read_text())["checks"] if check["status"] == "failed"
    ]
    assert [check["name"] for check in failed] == ["known answer"]

    result = served.site()
    assert result.status == "successful", result.text
    assert served.complete() == known_answer.SENTENCE


def test_a_model_by_its_path(served, tmp_path):
    model = served.prefix / "models" / "known-answer-16x128-f32.gguf"
    found = header_summary.summarize(gguf.read_local_headers(str(model)))
    assert found == {**known_answer.summary(16, 128, "f32"), "files": found["files"], "bytes": found["bytes"]}
    copied = tmp_path / "mine.gguf"
    copied.write_bytes(model.read_bytes())
    served.inventory.write_text(
        served.inventory.read_text().replace("llama_model_known_answer: {}", f"llama_model_path: {copied}")
    )
    try:
        result = served.site(llama_placement="all", llama_verify_path=str(tmp_path / "verify.json"))
        assert result.status == "successful", result.text
        checks = {check["name"]: check for check in json.loads((tmp_path / "verify.json").read_text())["checks"]}
        assert checks["known answer"]["status"] == "passed", "it is known by what the file says of itself"
        assert checks["completion"]["status"] == "passed"
    finally:
        served.inventory.write_text(
            served.inventory.read_text().replace(f"llama_model_path: {copied}", "llama_model_known_answer: {}")
        )
    assert served.site().status == "successful"


def test_teardown_leaves_nothing_but_the_caches(served):
    result = served.run("playbooks/teardown.yml")
    assert result.status == "successful", result.text
    assert not served.prefix.exists()
    assert served.processes() == {}
    assert list((served.folder / "data").iterdir()) == []
    again = served.run("playbooks/teardown.yml")
    assert again.status == "successful", again.text
    assert again.changed == 0
