"""Programs that are tried before they may replace others: stand-ins in Python for each way in which one can fail. The small model is
computed with by the real llama-server whenever a release is installed, so also by the integration tests."""

import os
import sys

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import smoke_test
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from support.hosts import executable

BEGIN = f"""#!{sys.executable}
import http.server, json, os, signal, socket, struct, sys, time
print("loading", flush=True)
"""
SERVER = """
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    starting = 2
    def do_GET(self):
        Handler.starting -= 1
        self.send_response(503 if Handler.starting > 0 else 200 if self.path == "/health" else PAGE)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ANSWER
    def reply(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"content": text}).encode())
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
""".replace("PAGE", "404")
RIGHT = f"self.reply(' {smoke_test.expected_answer()}' if len(asked['prompt']) == {1 + smoke_test.QUESTION_LENGTH} else 'what?')"
WORKER = """
assert sys.argv[sys.argv.index("-d") + 1] == "CPU"
listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1])))
def reply(connection, data):
    head = connection.recv(9, socket.MSG_WAITALL)
    connection.recv(struct.unpack("<BQ", head)[1], socket.MSG_WAITALL)
    connection.sendall(struct.pack("<Q", len(data)) + data)
while True:
    connection, _address = listening.accept()
    ANSWER
"""
ANSWERS = "reply(connection, bytes([7, 0, 0]) + bytes(25)); reply(connection, struct.pack('<I', 1)); reply(connection, bytes(16))"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Writes programs and tries them; ``None`` is a program that is not there."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "trial").mkdir()

    def check(server=None, worker=None, words=("-H", "-p", "-d"), server_words=()):
        hangs = "sleep" in f"{server}{worker}"
        monkeypatch.setattr(smoke_test, "MAX_PROGRAM_SECONDS", 1 if hangs else 30)
        for name, text in (("llama-server", server), ("rpc-server", worker)):
            if text is not None:
                executable(tmp_path / "bin" / name, BEGIN + text)
        place = smoke_test.TrialSettings(tmp_path / "trial", {"OF_THE_BUILD": "1"}, None)
        listed = {"llama-server": server_words} if server is not None else {}
        return smoke_test.test_programs(
            tmp_path / "bin", {**listed, **({"rpc-server": words} if worker is not None else {})}, place
        )

    return check


ILLEGAL = "os.kill(os.getpid(), signal.SIGILL)"


def serving(answer):
    """A llama-server that answers a question so."""
    return SERVER.replace("ANSWER", answer)


def lending(answer):
    """A worker that answers a handshake so."""
    return WORKER.replace("ANSWER", answer)


def test_programs_that_work(programs):
    assert programs(serving(RIGHT), lending(ANSWERS)) is False


@pytest.mark.parametrize("status", [200, 415])
def test_a_server_with_its_chat_page(programs, status):
    assert programs(serving(RIGHT).replace("404", str(status))) is True


def test_a_worker_alone_has_no_chat_page(programs):
    assert programs(worker=lending(ANSWERS)) is None


def test_programs_see_no_accelerator_and_nothing_of_who_calls(programs, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    seen = (
        "assert {'CUDA_VISIBLE_DEVICES': '-1', 'GGML_VK_VISIBLE_DEVICES': '', 'OF_THE_BUILD': '1'}.items() <= os.environ.items()\n"
        "assert 'LLAMA_ARG_CTX_SIZE' not in os.environ and os.getcwd() == '/' and os.access(os.environ['HOME'], os.W_OK)\n"
    )
    programs(seen + serving(RIGHT))


@pytest.mark.programs
@pytest.mark.parametrize(
    "name, text, said",
    [
        ("llama-server", ILLEGAL, ["crashed with SIGILL", "GGML_NATIVE: 'OFF'", "source: git", "loading"]),
        ("llama-server", serving(ILLEGAL), ["crashed with SIGILL", "GGML_NATIVE: 'OFF'"]),
        ("llama-server", serving("os.kill(os.getpid(), signal.SIGSEGV)"), ["crashed with SIGSEGV", "another build"]),
        ("llama-server", "sys.exit('unknown argument')", ["exited with status 1", "unknown argument"]),
        ("llama-server", "time.sleep(60)", ["did not answer within 1 s"]),
        ("llama-server", serving("time.sleep(60)"), ["did not answer within 1 s"]),
        (
            *("llama-server", serving("self.reply('every every')")),
            ["gave a wrong answer", f"'every every', expected '{smoke_test.expected_answer()}'"],
        ),
        ("rpc-server", ILLEGAL, ["crashed with SIGILL", "GGML_NATIVE: 'OFF'"]),
        ("rpc-server", "print('usage')", ["exited with status 0", "usage"]),
        ("rpc-server", lending("time.sleep(60)"), ["did not answer within 1 s"]),
        ("rpc-server", lending("connection.sendall(b'HTTP/1.1 400 no')"), ["did not answer like a worker (not_rpc"]),
    ],
    ids=[
        *("SIGILL", "SIGILL while computing", "SIGSEGV", "ends", "hangs", "hangs while computing", "wrong"),
        *("worker: SIGILL", "worker: ends with its usage", "worker: silent", "worker: something else"),
    ],
)
def test_a_program_that_does_not_work(programs, name, text, said):
    with pytest.raises(Refusal) as failed:
        programs(**{"server" if name == "llama-server" else "worker": text})
    for part in [f"{name} was tested on this host's processor and", "no running service was touched", *said]:
        assert part in str(failed.value)


def test_a_worker_of_ik_llama_is_asked_for_the_processor(programs):
    programs(worker="assert '-cpu' in sys.argv\n" + lending(ANSWERS), words=("-H", "-p", "-cpu", "-d"))


def test_a_worker_that_cannot_be_told_which_device_to_lend_is_not_tried(programs):
    programs(worker="sys.exit(1)", words=("-m", "-p"))


def test_a_program_that_cannot_be_started(programs, tmp_path):
    (tmp_path / "bin/llama-server").write_bytes(b"\x7fELF nothing")
    (tmp_path / "bin/llama-server").chmod(0o755)
    place = smoke_test.TrialSettings(tmp_path / "trial", {}, None)
    with pytest.raises(Refusal, match="llama-server does not run on this host: Exec format error"):
        smoke_test.test_programs(tmp_path / "bin", {"llama-server": ()}, place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as another account")
def test_programs_run_as_another_account_that_can_write_only_its_home(public):
    for name in ("bin", "trial"):
        (public / name).mkdir(mode=0o755)
    executable(
        public / "bin/llama-server",
        "#!/bin/sh\nid -u\ntouch $HOME/mine && echo kept\ntouch $HOME/../small.gguf || echo refused\n",
    )
    place = smoke_test.TrialSettings(public / "trial", {}, "nobody")
    with pytest.raises(Refusal, match=r"65534\nkept\n.*\nrefused"):
        smoke_test.test_programs(public / "bin", {"llama-server": ()}, place)


def test_the_question_goes_on_with_the_answer():
    pieces = known_answer.pieces()
    words = "".join(pieces[: smoke_test.QUESTION_LENGTH]).replace("\u2581", " ") + " " + smoke_test.expected_answer()
    assert known_answer.SENTENCE.startswith(words)
    assert len(smoke_test.expected_answer().split()) >= smoke_test.ANSWER_LENGTH
    assert max(smoke_test.question_tokens()) < known_answer.summary(1, 128, "q8_0")["vocabulary"]


def test_programs_are_started_with_the_words_that_their_help_lists(programs):
    server = "assert sys.argv[1::2] == ['-m', '--host', '--port', '-ngl'], sys.argv\n" + SERVER
    programs(server=server.replace("ANSWER", RIGHT), server_words=("-m", "--host", "--port", "-ngl"))
