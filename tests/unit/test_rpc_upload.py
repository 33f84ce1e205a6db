"""Tensors on their way to a worker that keeps a cache, in the form of each generation, and how tensors are known again."""

import io
import itertools
import struct

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from cache_worker import CacheWorker
from hypothesis import given
from hypothesis import strategies as st
from test_rpc import Server

LARGE = rpc_upload.CACHE_THRESHOLD + 4096
SIZE_OF_RPC_TENSOR = 296
"""sizeof(rpc_tensor) in the trees of 0.3.36 and b11549."""


def content(size, seed=0):
    return bytes(itertools.islice(itertools.cycle(range(seed, 251)), size))


def give(script, data, seconds=20):
    server = Server(script)
    try:
        with rpc_upload.UploadConnection("127.0.0.1", server.port, len(data), seconds) as worker:
            worker.upload_tensor(io.BytesIO(b"before" + data), 6, len(data))
        assert server.all_closed_by_client()
    finally:
        server.listener.close()


@pytest.mark.parametrize("version", [(7, 0, 0), (8, 0, 0)])
def test_every_generation_gets_a_tensor_and_keeps_it(tmp_path, version):
    data = content(LARGE)
    give(CacheWorker(version, folder=tmp_path).script, data)
    assert len(rpc_upload.pack_set_tensor_header(1, 2, 100)) == 9 + SIZE_OF_RPC_TENSOR + 1 + 8
    assert [file.read_bytes() for file in (tmp_path / "rpc").iterdir()] == [data]


@given(st.integers(1, 1 << 40))
def test_a_tensor_of_any_size_has_rows_that_32_bits_count_and_is_no_smaller(size):
    head = rpc_upload.pack_set_tensor_header(1, 2, size)
    row, rows, third, fourth, first_step, row_step, *_more = struct.unpack_from("<8I", head, 9 + 20)
    assert (third, fourth, first_step, row_step) == (1, 1, 1, row)
    assert size <= row * rows <= size + rpc_upload.count_rows(size)


@pytest.mark.programs
@pytest.mark.parametrize(
    "script, said",
    [
        (CacheWorker((8, 0, 0), memory=1000).script, "does not have enough memory for the largest tensor"),
        (CacheWorker((3, 0, 0)).script, "closed the connection"),
        (lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n"), "did not give a valid answer"),
        (lambda _client: None, "did not give a valid answer: timed out"),
    ],
)
def test_a_worker_that_does_not_take_part_is_named_in_a_sentence(script, said):
    with pytest.raises(rpc_upload.TransferError, match=said):
        give(script, content(2000), seconds=1)


def test_a_model_that_becomes_shorter_meanwhile():
    server = Server(CacheWorker((8, 0, 0)).script)
    with (
        pytest.raises(rpc_upload.TransferError, match="file was truncated during the transfer"),
        rpc_upload.UploadConnection("127.0.0.1", server.port, 100, 5) as worker,
    ):
        worker.upload_tensor(io.BytesIO(bytes(50)), 0, 100)


def fingerprint(data, before=b""):
    return rpc_upload.fingerprint(io.BytesIO(before + data), len(before), len(data))


def test_a_tensor_is_known_again_wherever_it_lies_and_whatever_is_missing_of_it():
    data = content(LARGE)
    assert fingerprint(data) == fingerprint(data, b"header")
    for place in (0, rpc_upload.FIRST_SLICE_BYTES - 1, LARGE // 7 - 1, LARGE // 7 * 3 - 5, LARGE - 1):
        assert fingerprint(data) != fingerprint(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert fingerprint(data) != fingerprint(data[:-4096])
    with pytest.raises(EOFError):
        rpc_upload.fingerprint(io.BytesIO(data[:-1]), 0, LARGE)
