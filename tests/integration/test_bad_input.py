"""Whatever is wrong is said in one sentence with the variable, its value and the remedy, before anything was changed."""

import json
import os
import socket
import subprocess

import jsonschema_rs
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer_file
from conftest import PORTS, ROOT, Cluster

CHECKSUM = "sha256:" + "0" * 64


@pytest.fixture
def bare(tmp_path):
    return Cluster(tmp_path)


def refuses(cluster, *said, tags="all", **variables):
    result = cluster.site(f"--tags {tags}", **variables)
    assert result.status == "failed"
    text = " ".join(result.text.split())
    for part in said:
        assert part in text, result.text
    assert result.changed == 0
    assert not cluster.prefix.exists()
    return text


def test_a_wrong_checksum(bare, tmp_path):
    archive = tmp_path / "source.tar.gz"
    archive.write_bytes(b"something else")
    release = {"source": "archive", "path": str(archive), "checksum": CHECKSUM, "build": 11063}
    refuses(bare, f"llama_release expects {CHECKSUM}", "correct the checksum", llama_release=release)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "init", "--quiet", "--initial-branch=other", str(folder)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=x"], check=True)
    return {"source": "git", "repository": str(folder)}


def test_a_ref_that_is_not_there(bare, repository):
    said = f"llama_release asks for 'main', which is not a tag, branch or commit of {repository['repository']}: correct"
    refuses(bare, said, llama_release={**repository, "ref": "main"})


def test_a_repository_that_is_not_there(bare):
    release = {"source": "git", "repository": "/no/such/repository", "ref": "master"}
    refuses(
        bare, "llama_release needs the repository '/no/such/repository'", "Check the address", llama_release=release
    )


def test_a_patch_that_is_not_there(bare):
    release = {"source": "git", "ref": "b11434", "patches": ["no-such.patch"]}
    refuses(
        bare,
        "llama_release lists the patch 'no-such.patch'",
        "is not a readable file on the controller",
        llama_release=release,
    )


def test_a_port_that_something_else_uses(bare):
    with socket.create_server(("127.0.0.1", PORTS[1])):
        refuses(
            bare, f"127.0.0.1:{PORTS[1]}, the port for llamacpp-worker-two", "change port in llama_worker_endpoints"
        )


def test_a_model_that_is_something_else(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"FUGG" * 100)
    cluster = Cluster(tmp_path, llama_model_path=str(model))
    cluster.inventory.write_text(
        cluster.inventory.read_text().replace("llama_model_known_answer: {}\n", "llama_unused: 1\n")
    )
    refuses(
        cluster,
        f"llama_model_path is {model}, which is not a GGUF file",
        "Use the path of a complete GGUF file on the head",
    )


def test_a_model_that_is_not_there_is_planned_from_its_summary_and_not_served(tmp_path):
    """The summary comes from the command that docs/plan.md names."""
    model = tmp_path / "model.gguf"
    known_answer_file.write_model(model, 16, 128, "f32")
    cluster = Cluster(tmp_path, llama_model_path="/srv/no-such-model.gguf", llama_hardware={"memory_mib": 65536})
    written = cluster.inventory.read_text().replace("llama_model_known_answer: {}\n", "llama_unused: 1\n")
    cluster.inventory.write_text(written)
    said = subprocess.run(
        ["ansible", "localhost", "-m", "llamacpp.cluster.model_info", "-e", f"llama_model_path={model}"],
        env={**os.environ, **cluster.environment},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    summary = json.loads(said.partition("=>")[2])["summary"]
    planned = cluster.run(
        "playbooks/plan.yml", llama_plan_path=str(tmp_path / "plan.json"), llama_model_gguf_summary=summary
    )
    assert planned.rc == 0, planned.text
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert sum(entry["layers"] for entry in plan["placement"]) == 16
    refuses(
        cluster, "llama_model_path is /srv/no-such-model.gguf, which does not exist", llama_model_gguf_summary=summary
    )


def test_services_alone_where_nothing_is_built(bare):
    refuses(
        bare,
        "localhost needs the changes of --tags build (folder, release) before its services can change",
        tags="services",
    )


def test_a_value_of_the_wrong_kind(bare):
    refuses(bare, "Variables of host localhost are not valid", "llama_server_port", llama_server_port="eighty")


def test_no_compiler_and_no_root(bare):
    """This machine has a compiler, so the inventory declares that it has none."""
    declared = "llama_host_scope: user\n    llama_hardware: {toolchain: {cmake: '3.25'}}"
    bare.inventory.write_text(bare.inventory.read_text().replace("llama_host_scope: user", declared))
    refuses(bare, "localhost lacks ninja, c++", "no root access", "ninja-build, g++", "ask an administrator")


def test_a_file_that_cannot_be_written(bare):
    variable = "llama_report_path"
    result = bare.run("playbooks/plan.yml", **{variable: "/no/such/folder/plan"})
    assert result.rc == 2
    text = " ".join(result.text.split())
    assert (
        f"{variable} is '/no/such/folder/plan', which cannot be written on the controller: No such file or directory"
        in text
    )
    assert "Use a path in a folder that exists" in text


def test_the_plan_playbook_refuses_with_2_and_writes_why(bare, tmp_path):
    path = tmp_path / "plan.json"
    result = bare.run("playbooks/plan.yml", llama_plan_path=str(path), llama_release="newest")
    assert result.rc == 2
    written = json.loads(path.read_text())
    assert written["refused"]
    assert "newest" in written["reasons"][0]
    result = bare.run("playbooks/plan.yml", llama_plan_path=str(path))
    assert result.rc == 0
    written = json.loads(path.read_text())
    assert written["fits"]
    jsonschema_rs.validate(json.loads((ROOT / "docs" / "plan.schema.json").read_text()), written)
    for part in ("Memory", "█", "Commands", "--tensor-split 8,9", "What site.yml would change", "would be installed"):
        assert part in result.text
    assert not bare.prefix.exists()
    declared = "llama_host_scope: user\n    llama_hardware: {memory_mib: 8192, accelerators: []}"
    bare.inventory.write_text(bare.inventory.read_text().replace("llama_host_scope: user", declared))
    page = tmp_path / "plan.html"
    result = bare.run("playbooks/plan.yml", llama_server_host="0.0.0.0", llama_report_path=str(page))
    assert "Refused" in page.read_text()
    assert result.rc == 2
    assert "error: open-server on localhost" in result.text
    result = bare.run("playbooks/plan.yml", llama_report_path=str(page))
    assert "was not compared" in page.read_text()
    assert "localhost  was not compared: it is only declared in llama_hardware" in result.text
