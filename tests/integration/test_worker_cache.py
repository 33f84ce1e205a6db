"""A worker of real llama.cpp keeps the tensors that it is given, under the names by which a head asks for them."""

import contextlib
import io
import os
import random
import shlex
import struct
import subprocess

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from conftest import free_port

VARIABLE = "LLAMA_TEST_WORKER"
"""The command of a worker of another generation of llama.cpp, in place of the release that these tests build."""

SET_TENSOR_HASH, GET_TENSOR = 7, 8
DATA = random.Random(0).randbytes(rpc_upload.CACHE_THRESHOLD + 4097)


def hash_of(data):
    """fnv_hash of ggml-rpc.cpp."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


@pytest.fixture(scope="module")
def name():
    return hash_of(DATA)


@pytest.fixture
def program(request):
    command = os.environ.get(VARIABLE)
    if command:
        return shlex.split(command)
    return [str(next(request.getfixturevalue("programs").glob("*rpc-server")))]


@contextlib.contextmanager
def connection(program, folder, *words):
    """To a worker that lends the processor; it ends with it."""
    port = free_port()
    argv = [*program, "-H", "127.0.0.1", "-p", str(port), "-d", "CPU", *words]
    with subprocess.Popen(argv, env={**os.environ, "LLAMA_CACHE": str(folder)}) as process:
        try:
            cache_prefill.wait_for_worker(port, process)
            with rpc_upload.UploadConnection("127.0.0.1", port, len(DATA), 60) as worker:
                yield worker
        finally:
            process.kill()


def ask(worker, command, number, reply_size):
    """:param number: what follows the tensor and its offset: a hash, or how much is read."""
    head = rpc_upload.pack_set_tensor_header(worker.buffer, worker.base, len(DATA))
    tensor = head[9 : len(head) - len(rpc_upload.CACHE_FLAG) - 8]
    return worker.connection.ask(command, tensor + struct.pack("<QQ", 0, number), (reply_size,))


def test_a_worker_keeps_what_it_gets_and_has_it_when_it_is_asked(program, tmp_path, name):
    with connection(program, tmp_path, "-c") as worker:
        assert ask(worker, SET_TENSOR_HASH, name, 1) == b"\0"
        worker.upload_tensor(io.BytesIO(b"before" + DATA), 6, len(DATA))
        assert {file.name: file.read_bytes() for file in (tmp_path / "rpc").iterdir()} == {f"{name:016x}": DATA}
    with connection(program, tmp_path, "-c") as worker:
        assert ask(worker, SET_TENSOR_HASH, name, 1) == b"\1"
        assert ask(worker, SET_TENSOR_HASH, name ^ 1, 1) == b"\0"
        assert ask(worker, GET_TENSOR, len(DATA), len(DATA)) == DATA


def test_a_worker_without_a_cache_takes_tensors_and_keeps_none(program, tmp_path, name):
    with connection(program, tmp_path) as worker:
        worker.upload_tensor(io.BytesIO(DATA), 0, len(DATA))
        assert ask(worker, SET_TENSOR_HASH, name, 1) == b"\0"
        assert ask(worker, GET_TENSOR, len(DATA), len(DATA)) == DATA
    assert list(tmp_path.iterdir()) == []


def test_a_message_of_another_form_is_refused(program, tmp_path, monkeypatch):
    with connection(program, tmp_path, "-c") as worker:
        monkeypatch.setattr(rpc_upload, "MAX_SOURCES", rpc_upload.MAX_SOURCES + 1)
        with pytest.raises(rpc_upload.TransferError, match="closed the connection"):
            worker.upload_tensor(io.BytesIO(DATA), 0, len(DATA))
    assert not list((tmp_path / "rpc").iterdir())
