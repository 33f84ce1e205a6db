"""Each host gets its own archive of one build, and each archive is downloaded once."""

import pytest
from conftest import PLAN, WORK, connect

ARCHIVE_NAME = "llama-b11669-bin-ubuntu{}-x64.tar.gz"
KINDS = {"head": "", "worker1": "", "worker2": "-vulkan"}


def test_auto_selects_upstreams_programs():
    assert PLAN["release"]["source"] == "prebuilt"
    assert PLAN["release"]["why"].startswith("upstream has an archive for each host; compiling would allow")


@pytest.mark.parametrize("name", KINDS)
def test_each_host_has_the_archive_of_its_kind(name):
    [build] = PLAN["hosts"][name]["builds"]
    assert build["archives"] == [ARCHIVE_NAME.format(KINDS[name])]
    folder = connect(name).file(f"/opt/llamacpp/releases/{build['id']}/bin")
    installed = folder.listdir()
    assert ("libggml-vulkan.so" in installed) == bool(KINDS[name])
    assert {*build["targets"], "libggml-base.so.0", "libggml-cpu-x64.so"} <= set(installed)
    assert not connect(name).exists("cmake")


def test_each_archive_has_a_record():
    records = {path.name for path in (WORK / "controller" / "llamacpp" / "sources").glob("*.json")}
    assert {ARCHIVE_NAME.format(kind).replace(".tar.gz", ".json") for kind in KINDS.values()} <= records
