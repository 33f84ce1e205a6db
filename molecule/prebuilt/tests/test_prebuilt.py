"""The archives that hosts got: each its own, of one build, fetched once."""

import pytest
from conftest import PLAN, WORK, on

NAME = "llama-b11669-bin-ubuntu{}-x64.tar.gz"
KINDS = {"head": "", "worker1": "", "worker2": "-vulkan"}


def test_auto_is_upstreams_programs():
    assert PLAN["release"]["source"] == "prebuilt"
    assert PLAN["release"]["why"].startswith("upstream has an archive for each host; compiling would allow")


@pytest.mark.parametrize("name", KINDS)
def test_each_host_has_the_archive_of_its_kind(name):
    [build] = PLAN["hosts"][name]["builds"]
    assert build["archives"] == [NAME.format(KINDS[name])]
    folder = on(name).file(f"/opt/llamacpp/releases/{build['id']}/bin")
    installed = folder.listdir()
    assert ("libggml-vulkan.so" in installed) == bool(KINDS[name])
    assert {*build["targets"], "libggml-base.so.0", "libggml-cpu-x64.so"} <= set(installed)
    assert not on(name).exists("cmake")


def test_what_an_archive_was_is_recorded():
    records = {path.name for path in (WORK / "controller" / "llamacpp" / "sources").glob("*.json")}
    assert {NAME.format(kind).replace(".tar.gz", ".json") for kind in KINDS.values()} <= records
