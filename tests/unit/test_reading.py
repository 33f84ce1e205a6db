"""What others write: files that are none, JSON of every form, replies that drip or never end."""

import ast
import http.client
import io
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import server_client
from test_rpc import Server


def test_only_a_regular_file_is_read_and_only_its_beginning(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("root's")
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert reading.read_start(secret, 4) == b"root"
    assert reading.read_start(tmp_path / "link", 9, follows_links=True) == b"root's"
    for name, follows_links in (("link", False), ("pipe", False), ("endless", True), (".", False), ("none", False)):
        with pytest.raises(OSError, match=r"Too many levels|not a regular file|Is a directory|No such file"):
            reading.read_start(tmp_path / name, 9, follows_links)


OPENERS = {"open", "read_text", "read_bytes", "text_of", "sha256", "copyfile", "copytree", "copy2", "FileIO"}
OTHER_READS = """
llamacpp/words.adapt_argv
builds/archives._open_archive builds/archives._ZipArchive.__iter__ builds/archives._ZipArchive.extractfile
builds/archives.extract_members builds/builder.Builder._install_programs builds/builder.Builder._log_step builds/builder.Builder._prepare_tree
builds/builder.Builder._run_logged builds/installer.Installer._publish builds/installer.check_sha256 builds/installer.pack builds/manifest.installed_manifest
builds/option_check._lacks_tls builds/option_check.write_replacements common/files.sha256 common/files.sync common/files.text_of common/locks.find_holders
common/files.open_lock common/reading.open_file drift/processes._runs_as drift/processes._sockets drift/processes.environment_of
drift/processes.account_processes drift/processes.start_time drift/state._is_unchanged drift/state._outdated_services
facts/amx.has_faulty_header facts/connection._inherited_value
facts/firewall.active_manager facts/hardware._read_properties facts/hardware._read_mib facts/hardware._render_nodes facts/hardware.read_processor
facts/hardware.find_nvidia_in_driver_files facts/host._distribution facts/interfaces._router_generation facts/interfaces.kind_of facts/interfaces.rdma_addresses
facts/installation.is_own_definition facts/resources._pool_mib facts/resources.amd_memory facts/resources.read_resources facts/resources.uptime_seconds
facts/toolchains._toolchains firewall/rules._nftables_state
firewall/rules.find_foreign_objects firewall/steps.steps_of host/cache_prefill._send_tensors host/cache_prefill.missing_tensors host/discovery.interfaces_of
host/kernel_parameters.has_changes host/kernel_parameters.foreign_files host/removal.remove_installation host/services.Manager.is_defined host/services._changes
host/start_records._state_of host/system.System.text launcher/conversations._tokens_of
launcher/exporter.MemoryReader._read_amd launcher/journal.StartLog.__init__ launcher/journal.read_back
launcher/journal.replace_file launcher/progress.read_activity launcher/progress.argv_of launcher/progress.children_of launcher/progress.sample_process
launcher/server.keys_of links/configuration._files_with_our_names links/configuration.is_unplugged links/inspection._interfaces
links/inspection._protected_interfaces model/layer_sample.write_sample model/gguf.LocalFile.__init__
model/known_answer_file.write_model models/download._fetch_file models/download._find_mismatch
models/download._write_record models/web.open_url launcher/runtime.ProgramHandler.handle proof/run._read_reference proof/run.prepare_reference
verify/evidence._probe_missing_workers verify/server_client.Client.__init__ verify/server_client.read_api_keys
"""
"""Functions that open files by other means than those of ``reading``, or follow links: of root, the kernel, the operator or a build, or as the account
itself, but none in a folder where the account of the services may write."""


def _other_reads(tree, scope):
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            links = [ast.unparse(one.value) for one in node.keywords if one.arg == "follows_links"]
            follows = links not in ([], ["follows_links"])
            opens = called.rpartition(".")[2] in OPENERS and called != "hashlib.sha256"
            if follows or opens or called == "system.text":
                yield scope
        yield from _other_reads(node, f"{scope}.{node.name}" if named else scope)


def test_files_where_the_services_account_may_write_are_read_by_the_one_reader():
    plugins = Path(reading.__file__).resolve().parents[2]
    files = [*plugins.glob("module_utils/**/*.py"), *plugins.glob("modules/*.py")]
    found = {
        scope for path in files for scope in _other_reads(ast.parse(path.read_text()), "/".join(path.parts[-2:])[:-3])
    }
    assert found == {*OTHER_READS.split()}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "1", "null", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": 1'),
        *('{"a": ' + "9" * 5000 + "}", "[" * 100000, '{"a":' * 100000, b'{"a": "\xff"}', b"\xff\xfe{"),
    ],
    ids=range(14),
)
def test_what_is_no_object_of_finite_numbers_and_text_is_refused(tmp_path, text):
    path = tmp_path / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"."):
        reading.read_object(path, 1 << 20)


def test_an_object_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"a": [1, 2.5, "ä"]}')
    size = path.stat().st_size
    assert reading.read_object(path, size) == {"a": [1, 2.5, "ä"]}
    with pytest.raises(ValueError, match=f"more than {size - 1} bytes"):
        reading.read_object(path, size - 1)


def test_what_is_shown_is_one_line_of_text():
    assert validation.printable("a\r\n\x1b[31mb\u2028\x00\ud800ä", 99) == r"a\r\n\x1b[31mb\u2028\x00\ud800ä"
    assert validation.printable("x" * 9999) == "x" * validation.MAX_LINE_LENGTH
    assert validation.printable("\x00" * 9999) == (r"\x00" * 9999)[: validation.MAX_LINE_LENGTH]
    assert validation.printable("\x00" * 9999, None) == r"\x00" * 9999


def ask(script, **options):
    server = Server(script)
    try:
        return replies.ask(f"127.0.0.1:{server.port}", "/", options.pop("seconds", 5), **options)
    finally:
        server.listener.close()


def replying(*parts, pause=0.0, listens=True):
    def script(client):
        if listens:
            client.recv(65536)
        for part in parts:
            client.sendall(part)
            time.sleep(pause)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
        client.close()

    return script


def test_a_reply():
    assert ask(replying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")) == (200, "{}")
    assert ask(replying(b"HTTP/1.0 503 No\r\n\r\nbusy"), body={"a": 1}, key="secret") == (503, "busy")


@pytest.mark.programs
@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_a_reply_that_drips_is_cut_off(start):
    found = ask(replying(start, *(b"1" for _number in range(600)), pause=0.1), seconds=0.5)
    assert found == (0, "no complete answer within 0.5 s")


def test_a_reply_that_never_ends_is_read_to_its_limit():
    def script(client):
        client.recv(65536)
        client.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        while True:
            client.sendall(bytes(65536))

    found = ask(script)
    assert (found.status, len(found.text)) == (200, replies.MAX_REPLY_BYTES)


def test_nothing_is_sent_where_there_is_an_objection():
    received = []
    accepted, closed = threading.Event(), threading.Event()

    def script(client):
        accepted.set()
        received.append(client.recv(65536))
        closed.set()

    def veto():
        assert accepted.wait(10)
        return "it is not ours"

    assert ask(script, key="secret", veto=veto) == (0, "it is not ours")
    assert closed.wait(10)
    assert received == [b""]


def secure(certificate, key):
    """Has a script speak TLS with each client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return lambda script: lambda client: script(context.wrap_socket(client, server_side=True))


def test_a_server_is_known_by_its_certificate(certify):
    (own, key), (other, _key) = certify("own"), certify("other")
    expected = [replies.first_certificate(path.read_text()) for path in (own, other)]
    served, received = secure(own, key), []
    reply = replying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    assert ask(served(reply), key="secret", certificate=expected[0]) == (200, "{}")

    def script(client):
        received.append(client.recv(65536))
        client.close()

    assert ask(served(script), key="secret", certificate=expected[1]) == (
        0,
        "the server does not present the configured certificate: run site.yml to restart it",
    )
    assert b"secret" not in b"".join(received)


def test_a_server_that_does_not_speak_tls_gets_no_key(certify):
    received = []

    def script(client):
        received.append(client.recv(65536))
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        client.close()

    certificate = replies.first_certificate(certify("own")[0].read_text())
    found = ask(script, key="secret", certificate=certificate)
    assert found.status == 0
    assert "SSL" in found.text
    assert b"secret" not in received[0]


@pytest.mark.programs
@pytest.mark.parametrize("after", ["nothing", "the handshake", "a part of the answer"])
def test_a_server_that_stops_in_the_middle_of_tls_is_cut_off(certify, after):
    certificate, key = certify("own")
    wait = threading.Event()

    def script(client):
        if after == "a part of the answer":
            client.recv(65536)
            client.sendall(b"HTTP/1.0 200 OK\r\n\r\n{")
        wait.wait()

    served = script if after == "nothing" else secure(certificate, key)(script)
    found = ask(served, seconds=0.5, certificate=replies.first_certificate(certificate.read_text()))
    wait.set()
    assert found == (0, "no complete answer within 0.5 s")


def test_the_first_certificate_of_a_file(certify):
    (own, key), (other, _key) = certify("own"), certify("other")
    chain = "Bag Attributes\n" + own.read_text() + other.read_text()
    assert replies.first_certificate(chain) == ssl.PEM_cert_to_DER_cert(own.read_text())
    with pytest.raises(ValueError, match="no certificate in PEM form"):
        replies.first_certificate(key.read_text())


@pytest.mark.parametrize("key", ["ké€".encode(), b"k\xff"])
def test_a_key_is_sent_as_it_is_in_its_file(tmp_path, key):
    """llama-server compares bytes, and http.client would send text as Latin-1."""
    (tmp_path / "keys").write_bytes(b"\n" + key + b"\r\n")
    heard = []

    def script(client):
        heard.append(client.recv(65536))
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    assert ask(script, key=server_client.read_api_keys(str(tmp_path / "keys"))[0]).status == 200
    assert b"\r\nAuthorization: Bearer " + key + b"\r\n" in heard[0]


def test_a_chunk_of_negative_length_is_not_read_to_its_end():
    chunks = b"-1\r\n" + b"a" * 99 + b"\r\n5\r\nbcdef\r\n" + bytes(1 << 20)
    stream = io.BytesIO(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    reply = http.client.HTTPResponse(SimpleNamespace(makefile=lambda _mode: stream))
    reply.begin()
    assert reading.read_reply(reply, 100) == b"a" * 99 + b"b"
