"""A bug bundle of a cluster of which one worker computes wrong."""

import subprocess
import tarfile

import pytest
from conftest import PORTS

ANSWERS_MOVED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
ssize_t send(int place, const void * data, size_t size, int flags) {
    ssize_t (* real)(int, const void *, size_t, int) = dlsym(RTLD_NEXT, "send");
    if (size < 256) { return real(place, data, size, flags); }
    char * moved = malloc(size);
    memcpy(moved, (const char *) data + size - 4, 4);
    memcpy(moved + 4, data, size - 4);
    ssize_t sent = real(place, moved, size, flags);
    free(moved);
    return sent;
}
"""
"""Has a worker answer with each value in the place of the next one, as if its layers computed that."""


@pytest.fixture
def suspected(cluster, tmp_path):
    """The cluster, up, and the library that its second worker is started with next time."""
    library = tmp_path / "wrong.so"
    endpoints = [{"name": "one", "port": PORTS[0]}, {"name": "two", "port": PORTS[1]}]
    endpoints[1]["environment"] = {"LD_PRELOAD": str(library)}
    result = cluster.site(llama_worker_endpoints=endpoints)
    assert result.status == "successful", result.text
    yield cluster, library, {"llama_worker_endpoints": endpoints}
    library.unlink(missing_ok=True)
    assert cluster.site().status == "successful"


def test_a_worker_that_computes_wrong_is_named_and_the_other_cleared(suspected, tmp_path):
    cluster, library, variables = suspected
    serving = cluster.processes()
    (tmp_path / "wrong.c").write_text(ANSWERS_MOVED)
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "wrong.c", "-o", library, "-ldl"], check=True)
    bundle = tmp_path / "bundle.tar.gz"
    result = cluster.run("playbooks/report.yml", llama_report_bundle=str(bundle), **variables)
    assert result.status == "successful", result.text
    with tarfile.open(bundle) as archive:
        found = archive.extractfile("llama_cluster-bundle/known-answer.txt").read().decode()
    assert found.startswith("localhost:two computes wrong. "), found
    assert "The answer is right with localhost:one." in found
    assert cluster.processes() == serving
    assert not (cluster.prefix / "cluster.lock").read_text()
