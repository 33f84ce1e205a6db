"""A server that others reach by HTTPS, with a certificate of its own and a key for clients; real and compiled with OpenSSL."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from conftest import PORTS, SERVER_PORT, Cluster, until

pytestmark = pytest.mark.slow

KEY = "a key of clients"


def certify(folder, name):
    """Writes a certificate of its own for this machine, and its key."""
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-days", "2"]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:head.lan", "-keyout", "tls.key", "-out", "tls.pem"]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True)
    (folder / "tls.key").chmod(0o600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("https")
    certify(folder, "first")
    (folder / "keys").write_text(KEY + "\n")
    made = Cluster(
        folder,
        llama_server_host="0.0.0.0",
        llama_server_allowed=["0.0.0.0/0"],
        llama_server_api_key_file=str(folder / "keys"),
        llama_server_tls_certificate_file=str(folder / "tls.pem"),
        llama_server_tls_key_file=str(folder / "tls.key"),
    )
    yield made
    made.clear()


def ask(cluster, key=KEY):
    """What the server answers to a client that trusts its certificate."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        f"https://127.0.0.1:{SERVER_PORT}/v1/completions", b'{"prompt": "", "temperature": 0}', headers
    )
    trusting = ssl.create_default_context(cafile=str(cluster.folder / "tls.pem"))
    with urllib.request.urlopen(request, timeout=30, context=trusting) as reply:
        return json.load(reply)["choices"][0]["text"]


def test_a_server_speaks_https_and_is_verified_by_its_certificate(cluster):
    paths = {"llama_plan_path": cluster.folder / "plan.json", "llama_verify_path": cluster.folder / "verify.json"}
    result = cluster.site(**{variable: str(path) for variable, path in paths.items()})
    assert result.status == "successful", result.text
    plan, report = (json.loads(path.read_text()) for path in paths.values())
    assert plan["head"]["own_url"] == f"https://127.0.0.1:{SERVER_PORT}"
    assert re.fullmatch(rf"https://(?!127\.|0\.).+:{SERVER_PORT}", plan["head"]["url"])
    checks = {check["name"]: check for check in report["checks"]}
    assert {check["status"] for check in report["checks"]} == {"passed"}
    assert checks["health"]["subject"] == plan["head"]["url"]
    assert f"-H 'Authorization: Bearer KEY' {plan['head']['url']}/v1/completions" in " ".join(
        result.text.replace("\\\n", " ").split()
    )
    assert KEY not in result.text


def test_clients_are_answered_by_https_with_a_key_and_not_otherwise(cluster):
    assert ask(cluster) == known_answer.SENTENCE
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(cluster, "another key")
    with socket.create_connection(("127.0.0.1", SERVER_PORT)) as plain:
        plain.settimeout(10)
        plain.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b"200" not in plain.recv(256)


ASK = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1])
(model,) = client.models.list().data
answer = client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
print(answer.usage.completion_tokens)
"""


def test_the_python_client_of_openai_is_answered(cluster, tmp_path):
    """Most tools in Python are made of it."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    if subprocess.run([tmp_path / "venv/bin/pip", "install", "--quiet", "openai"], check=False).returncode:
        pytest.skip("the package openai cannot be installed")
    asked = {**os.environ, "SSL_CERT_FILE": str(cluster.folder / "tls.pem"), "OPENAI_API_KEY": KEY}
    argv = [tmp_path / "venv/bin/python", "-c", ASK, f"https://127.0.0.1:{SERVER_PORT}/v1"]
    assert int(subprocess.run(argv, env=asked, capture_output=True, text=True, check=True).stdout) > 0


def test_a_second_run_changes_nothing(cluster):
    result = cluster.site()
    assert (result.status, result.changed) == ("successful", 0), result.text


def test_the_launcher_sees_by_https_that_the_server_is_ready(cluster):
    """It watches connections to workers from then on."""
    head = cluster.pid_of("releases", "llama-server", "--rpc")
    os.kill(cluster.pid_of("rpc-server", f"-p {PORTS[0]}"), signal.SIGKILL)
    until(lambda: cluster.pid_of("releases", "llama-server", "--rpc") != head)
    assert until(lambda: ask(cluster)) == known_answer.SENTENCE


def test_a_certificate_that_is_replaced_restarts_the_server_and_nothing_else(cluster):
    workers = {pid for pid, argv in cluster.processes().items() if "rpc-server" in argv[0]}
    certify(cluster.folder, "second")
    failed = cluster.run("playbooks/verify.yml")
    assert failed.status == "failed"
    assert "the server does not present the configured certificate" in failed.text
    result = cluster.site()
    assert result.status == "successful", result.text
    assert ask(cluster) == known_answer.SENTENCE
    assert {pid for pid, argv in cluster.processes().items() if "rpc-server" in argv[0]} == workers
