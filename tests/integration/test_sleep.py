"""A llama-server that frees its model while nobody asks, and loads it again for the next request."""

import json
import re
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from conftest import PORTS, until

MODEL = {"layers": 16, "width": 1024, "type": "f16"}
"""What glibc gives back at once: a worker's buffer of less than 32 MiB may stay in its heap."""
VARIABLES = {"llama_server_idle_seconds": 2, "llama_model_known_answer": MODEL}


@pytest.fixture(scope="module")
def sleepy(cluster):
    """The cluster, up and answering, whose llama-server sleeps soon."""
    result = cluster.site(**VARIABLES)
    assert result.status == "successful", result.text
    return cluster


def told(cluster):
    return json.loads((cluster.prefix / "state" / "serving.json").read_text())


def is_asleep(cluster):
    return told(cluster)["state"] == "asleep"


def held_bytes(cluster):
    """Of the workers' own memory."""
    workers = [cluster.pid_of("releases", "rpc-server", f"-p {port}") for port in PORTS]
    return sum(int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) for pid in workers) << 10


def test_each_time_it_wakes_the_answer_is_right_and_the_workers_were_free(sleepy):
    head, before = sleepy.pid_of("releases", "llama-server", "--rpc"), told(sleepy)["restarts"]
    weights = known_answer_file.file_bytes(*MODEL.values())
    for _time in range(11):
        assert sleepy.complete() == known_answer.SENTENCE
        loaded = held_bytes(sleepy)
        until(lambda loaded=loaded: is_asleep(sleepy) and loaded - held_bytes(sleepy) > 0.9 * weights)
    assert sleepy.pid_of("releases", "llama-server", "--rpc") == head
    assert told(sleepy)["restarts"] == before


def test_a_run_without_a_change_leaves_it_asleep_and_says_what_it_did_not_test(sleepy):
    until(lambda: is_asleep(sleepy))
    since = told(sleepy)["since"]
    result = sleepy.site(**VARIABLES)
    assert (result.status, result.changed) == ("successful", 0), result.text
    assert "the model is not loaded (asleep)" in " ".join(result.text.split())
    status = sleepy.run("playbooks/status.yml", **VARIABLES)
    assert "but the model was asleep and was not tested" in " ".join(status.text.split())
    assert (is_asleep(sleepy), told(sleepy)["since"]) == (True, since)
    woken = sleepy.run("playbooks/verify.yml", llama_verify_wake=True, **VARIABLES)
    assert woken.status == "successful", woken.text
    assert "words correct" in woken.text
    until(lambda: told(sleepy)["since"] > since)
