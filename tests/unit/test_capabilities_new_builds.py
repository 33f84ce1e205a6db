"""Builds of llama.cpp that are newer than all that were read: what is found in them, and how they are planned."""

import tarfile

import pytest
import read_build
from support.clusters import TREE, model
from support.hosts import write

FILES = {
    "src/llama-arch.cpp": '{ LLM_ARCH_LLAMA, "llama" },\n{ LLM_ARCH_NOT_YET, "not-yet" },',
    "src/llama-context.cpp": '("%s: %10s  output buffer size = %8.2f MiB")\n("%s: %10s novel buffer size = %8.2f MiB")',
    "ggml/include/ggml.h": "GGML_TYPE_F32     = 0,\n GGML_TYPE_F9 = 44,\n GGML_TYPE_COUNT = 45,",
    "ggml/include/ggml-rpc.h": "".join(
        f"#define RPC_PROTO_{part}_VERSION {number}\n" for part, number in (("MAJOR", 8), ("MINOR", 1), ("PATCH", 0))
    ),
    "common/arg.cpp": 'add_opt(common_arg(\n{"-c", "--context-size"}, "N",\nadd_opt(common_arg({"--top-k"}, "N",',
    "CMakeLists.txt": 'option(LLAMA_NOVEL "x" ON)\nset(LLAMA_LOCAL 1)\nset(GGML_TAG CACHE STRING)',
}
NEW = ["architecture not-yet", "type F9=44", "protocol 8.1.0", "option --context-size", "log line novel"]
NEW += ["cmake option LLAMA_NOVEL", "cmake option GGML_TAG"]


@pytest.fixture
def tree(tmp_path):
    return write(tmp_path, FILES)


def test_what_the_tables_lack_of_a_tree(tree):
    said = list(read_build.read_build(12300, tree))
    assert {line for line in said if line.endswith("new")} == {f"{name}: new" for name in NEW}
    assert {"option --ctx-size: gone", "architecture xing4_0: gone", "protocol unknown: gone"} <= set(said)
    assert "option -c: gone" not in said
    assert "architecture xing4_0: gone" not in list(read_build.read_build(11739, tree))


def test_what_the_tables_lack_of_programs(tmp_path):
    with pytest.raises(SystemExit, match="neither a tree of"):
        list(read_build.read_build(12300, tmp_path))
    names = ["llama", "llama4", "deci", "not-yet", "falcon", "grok", "gpt2", "%s: %10s novel buffer size = %8.2f MiB"]
    (tmp_path / "libllama.so").write_bytes(b"\x7fELF\0" + "\0".join([*names, "--novel", "--rm", "--cache"]).encode())
    new = ["architecture not-yet: new", "log line novel: new", "option --novel: new"]
    said = sorted(read_build.read_build(12300, tmp_path))
    assert [line for line in said if "unknown" not in line] == new
    unknown = ": unknown, because the input does not contain it"
    lacking = [line.partition(unknown)[0] for line in said if line not in new]
    assert lacking == ["archive", "cmake option", "protocol", "type", "worker option"]


def test_programs_without_anything_are_not_silent(tmp_path):
    (tmp_path / "llama.wasm").write_bytes(b"\0asm nothing")
    assert len(list(read_build.read_build(12300, tmp_path))) == len(read_build.tables(12300))


def test_an_archive_writes_nothing_outside_its_folder(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    with pytest.raises(tarfile.OutsideDestinationError):
        list(read_build.read_build(12300, tmp_path / "a.tar.gz"))


def test_a_build_that_nobody_read_is_planned_and_what_is_unknown_is_said(local):
    variables = local.hosts["here"]["variables"]
    variables.update(llama_release={**TREE, "build": 12300}, llama_model_known_answer=None, llama_model_path="/m.gguf")
    local.model = {"summary": {**model(1, layers=16), "architecture": "not-yet"}}
    plan = local.accepted()
    assert plan["release"]["protocol"] is None
    assert "model-unread" in {advisory["id"] for advisory in plan["advisories"]}
    assert "kv_mib" not in plan["placement"][0]["exact"]
