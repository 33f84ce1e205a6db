"""A conversation with SmolLM2 over two workers goes on after whatever ends llama-server, and off the disk stays empty."""

import json
import os
import signal
import sys
import urllib.request

import pytest
from conftest import ROOT, Cluster, until

sys.path.append(str(ROOT / "tests"))
import real_models  # it lies in the folder of the line before

VARIABLES = {
    **{"llama_model_known_answer": None, "llama_placement": "all", "llama_proof": "never"},
    **{"llama_server_context": 4096, "llama_server_keep_conversations": True},
}
TEXT = " ".join(f"Item {number}: box {number * 7 % 101} weighs {number * 13 % 57} kilograms." for number in range(120))
QUESTIONS = [f"{TEXT} Which box is {size}?" for size in ("heavy", "light", "small", "large", "old", "new")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """SmolLM2 over two workers, whose head keeps conversations."""
    path = str(real_models.path_of(real_models.SMOLLM2))
    made = Cluster(tmp_path_factory.mktemp("kept"), llama_model_path=path, **VARIABLES)
    yield made
    made.clear()


def ask(cluster, prompt):
    """Return the text, and how much of the prompt the server knew."""
    body = json.dumps({"prompt": prompt, "n_predict": 12, "temperature": 0, "seed": 1}).encode()
    request = urllib.request.Request(f"{cluster.url}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        said = json.load(reply)
    assert said["tokens_evaluated"] >= 1500
    return said["content"], said["timings"]["cache_n"] / said["tokens_evaluated"]


def state(cluster):
    return json.loads((cluster.prefix / "state" / "serving.json").read_text())["state"]


def files(cluster):
    return sorted((cluster.prefix / "state" / "conversations").glob("*.slot"))


def kill_a_worker(cluster):
    head = cluster.pid_of("releases", "llama-server", "--rpc")
    os.kill(cluster.pid_of("releases", "rpc-server"), signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{head}"))
    until(lambda: state(cluster) == "serving", 120)


def stop_and_start(cluster):
    for playbook in ("playbooks/stop.yml", "playbooks/start.yml"):
        result = cluster.run(playbook)
        assert result.status == "successful", result.text


def change_a_variable(cluster, **more):
    result = cluster.site(llama_server_prompt_cache_mib=512, **more)
    assert result.status == "successful", result.text


def sleep(cluster):
    change_a_variable(cluster, llama_server_idle_seconds=5)
    until(lambda: state(cluster) == "asleep", 120)


def test_a_conversation_goes_on_after_whatever_ends_the_server(cluster):
    result = cluster.site()
    assert result.status == "successful", result.text
    expected = [ask(cluster, question)[0] for question in QUESTIONS]
    (path,) = until(lambda: files(cluster), 120)
    assert path.stat().st_mode & 0o777 == 0o600
    for number, event in enumerate((change_a_variable, stop_and_start, kill_a_worker, sleep)):
        for _attempt in range(3):  # so small a model can load before the launcher has asked for its conversations
            event(cluster)
            text, known = ask(cluster, QUESTIONS[number])
            if known >= 0.9 or event is not sleep:
                break
        assert known >= 0.9, event.__name__
        assert text == expected[number], event.__name__


def test_switched_off_nothing_is_written(cluster):
    result = cluster.site(llama_server_keep_conversations=False)
    assert result.status == "successful", result.text
    ask(cluster, QUESTIONS[0])
    assert not (cluster.prefix / "state" / "conversations").exists()
