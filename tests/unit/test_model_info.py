"""The module model_info: what a host has already, and what it is believed."""

import json
import re
from pathlib import Path

import gguf_files
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary, known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, local_models, ollama
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.modules import model, model_info
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import resolver
from support.model_sources import PREFIX, REPO, looked_up, on_huggingface, play, repo, request_of, run, server

MODULE = model_info
__all__ = ["repo", "server"]
SUMMARY = {**known_answer.summary(4, 128, "f32"), "files": []}
CLIP = (("general.architecture", gguf_files.STRING, "clip"), ("clip.has_vision_encoder", gguf_files.BOOL, True))


@pytest.fixture
def open_files(monkeypatch):
    """Files that every account can read."""
    monkeypatch.setattr(local_models, "find_unreadable_path", lambda account, path: None)


def operators(call):
    """A host that has /m.gguf of the operator, and runs the module for all else."""

    def answer(**arguments):
        found = call(**arguments)
        if "/m.gguf" in found["paths"]:
            found["paths"]["/m.gguf"] = {"bytes": 1, "summary": SUMMARY, "unreadable_path": None}
        return found

    return answer


def store(tmp_path, request, found):
    """Files and record of a source on the head, as they are once they are whole."""
    source = request.sources()[0]
    folder = Path(model_source.model_folder(str(tmp_path / "prefix"), source))
    folder.mkdir(parents=True)
    for file in found.files:
        content = (tmp_path / "hub" / REPO / file.name).read_bytes()
        (folder / download_record.base_name(file.name)).write_bytes(content)
    entries = [
        {
            **{key: getattr(file, key) for key in ("name", "bytes", "sha256", "revision")},
            "modified": int((folder / download_record.base_name(file.name)).stat().st_mtime),
        }
        for file in found.files
    ]
    (folder / download_record.RECORD_FILE).write_text(json.dumps({"files": entries}))
    return folder


def test_a_model_is_found_downloaded_and_then_found_without_a_server(server, repo, tmp_path, call, open_files):
    prefix = str(tmp_path / "prefix")
    given = {"llama_model_huggingface": {"repo": REPO, "quantisation": "UD-Q2_K_XL"}}
    first, _action = run(call, given, prefix)
    report = model_source.parse_model_report(first)
    files = model_source.files_of(request_of(**given)._replace(report=report), prefix)
    arguments = {"files": [file._asdict() for file in files]}
    assert call(module=model, folder=f"{prefix}/models", **arguments)["changed"]
    server.stop()
    requests = len(server.asked)
    second, _action = run(call, given, prefix)
    assert len(server.asked) == requests
    assert {**second, "offered": first["offered"]} == first
    last = Path(files[-1].path)
    last.write_bytes(b"short")
    assert re.search("check the .*network", run(call, given, prefix)[0]["refused"])


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../other/m.gguf"},
        {"revision": "../../other/repo/resolve/main"},
        {"revision": None},
        {"sha256": "?"},
    ],
)
def test_a_record_of_something_else_counts_for_nothing(server, repo, tmp_path, call, change):
    request = on_huggingface(quantisation="Q4_K_M")
    path = store(tmp_path, request, looked_up(request)) / download_record.RECORD_FILE
    (file,) = json.loads(path.read_text())["files"]
    path.write_text(json.dumps({"files": [{**file, **change}]}))
    requests = len(server.asked)
    given = {"llama_model_huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}}
    found, _action = run(call, given, str(tmp_path / "prefix"))
    assert len(server.asked) > requests
    assert found["files"][0]["revision"] == play.commit_of(REPO)


@pytest.mark.parametrize("kind", ["huggingface", "url", "copy"])
def test_a_record_has_no_say_in_where_files_come_from(server, tmp_path, kind):
    """Else a head would get files of the controller, and a server of its choice the token."""
    name, commit = "some-model-Q4_K_M.gguf", "c" * 40
    url = f"https://models.example/{name}?download=true"
    source, expected = {
        "huggingface": ({"repo": REPO, "quantisation": "Q4_K_M"}, f"{server.url}/{REPO}/resolve/{commit}/{name}"),
        "url": (url, url),
        "copy": (str(tmp_path / "gone" / name), (tmp_path / "gone" / name).as_uri()),
    }[kind]
    given = {f"llama_model_{kind}": source}
    source = request_of(**given).source
    revision = commit if kind == "huggingface" else None
    file = {"name": name, "bytes": 9, "sha256": "a" * 64, "modified": 1, "revision": revision}
    lie = {"url": "https://evil.example/m.gguf", "path": "/etc/passwd"}
    folder = {"files": [{**file, **lie}], "whole": True, "summary": {"layers": 1}}
    answer = {"folders": {model_source.model_folder(PREFIX, source): folder}}
    (found,) = run(lambda **_arguments: answer, given, PREFIX)[0]["files"]
    assert found["url"] == expected
    assert "path" not in found


@pytest.mark.parametrize("role", ["model", "mmproj", "draft"])
def test_a_model_that_ollama_has_on_the_host_is_used_there(tmp_path, call, monkeypatch, role):
    """Where its blob is missing, or has not all bytes yet, it is said how to get it."""
    content = gguf_files.model(CLIP) if role == "mmproj" else gguf_files.model()
    layer = {"mediaType": ollama.MEDIA_TYPES[role], "digest": f"sha256:{'a' * 64}", "size": len(content)}
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "m" / "1"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [layer]}))
    blob = tmp_path / "blobs" / f"sha256-{'a' * 64}"
    blob.parent.mkdir()
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    closed = []
    monkeypatch.setattr(local_models, "find_unreadable_path", lambda account, path: closed[0] if closed else None)
    given = {"llama_model_path": "/m.gguf", f"llama_model_{role}": "ollama:m:1"}
    if role == "model":
        given = {"llama_model_ollama": "m:1"}

    def find():
        return run(operators(call), given, str(tmp_path / "prefix"), "nobody")[0]

    for stored in (None, content[:-1]):
        if stored:
            blob.write_bytes(stored)
        assert "library/m:1, which no readable Ollama folder on h contains" in find()["refused"]
        assert "run ollama pull on that host" in find()["refused"]
    blob.write_bytes(content)
    found = find()
    (file,) = found["files"]
    assert (file["name"], file["role"], file["path"]) == ("m-1.gguf", role, str(blob))
    assert (file["url"], file["bytes"]) == (None, len(content))
    header = found["summary"] if role == "model" else found["auxiliary"][role]
    assert header["architecture"] == ("clip" if role == "mmproj" else "llama")
    closed.append(str(tmp_path / "blobs"))
    if role == "model":
        assert find()["unreadable_path"] == closed[0]
    else:
        said = f"llama_model_{role} is registry.ollama.ai/library/m:1, but the service cannot read {closed[0]}"
        assert said in find()["refused"]


def test_a_model_of_the_operator_and_its_projector(tmp_path, call, open_files):
    path, projector = tmp_path / "m.gguf", tmp_path / "p.gguf"
    for file in (path, projector):
        file.write_bytes(gguf_files.model())
    given = {"llama_model_path": str(path), "llama_model_mmproj": str(projector)}

    found, action = run(call, given, PREFIX)
    assert action.ran == [resolver.MODULE_NAME]
    assert found["summary"] == header_summary.summarize(gguf.read_local_headers(str(path)))
    assert [(file["role"], file["path"], file["bytes"]) for file in found["files"]] == [
        ("model", str(path), path.stat().st_size),
        ("mmproj", str(projector), projector.stat().st_size),
    ]
    for file, variable in ((projector, "llama_model_mmproj"), (path, "llama_model_path")):
        file.write_bytes(b"GG")
        assert f"{variable} is {file}, which is not a GGUF file" in run(call, given, PREFIX)[0]["refused"]
        file.unlink()
        said = f"{variable} is {file}, which does not exist. Use the path of a complete GGUF file on the head"
        assert run(call, given, PREFIX)[0]["refused"] == said
        file.write_bytes(gguf_files.model())


def test_headers_of_a_projector_and_of_a_draft_model_are_read_wherever_they_are(tmp_path, call, open_files):
    """On the head and on the controller. A projector in place of a draft model, and the other way round, is not planned with."""
    for name, content in (("p.gguf", gguf_files.model(CLIP)), ("d.gguf", gguf_files.model())):
        (tmp_path / name).write_bytes(content)

    def find(**given):
        given = {"llama_model_path": "/m.gguf", **given}
        return run(operators(call), given, str(tmp_path / "prefix"))[0]["auxiliary"]

    projector, draft = str(tmp_path / "p.gguf"), str(tmp_path / "d.gguf")
    for where in ("", "file:"):
        found = find(llama_model_mmproj=where + projector, llama_model_draft=where + draft)
        assert {role: one["architecture"] for role, one in found.items()} == {"mmproj": "clip", "draft": "llama"}
        assert not model_source.parse_model_report({"auxiliary": found}).problem
    assert find(llama_model_mmproj=draft, llama_model_draft=projector) == {}
    assert find(llama_model_mmproj=f"file:{draft}") == {}
    assert find() == {}


def test_a_module_that_fails_gives_the_reason_to_the_plan():
    failed = {"failed": True, "msg": "llama_model_path is /m.gguf, which does not exist."}
    found, _action = run(lambda **_arguments: failed, {"llama_model_path": "/m.gguf"})
    assert found["refused"] == failed["msg"].rstrip(".")


def test_a_copy_whose_file_is_gone_is_that_of_the_head(tmp_path, call, open_files, monkeypatch):
    prefix, path = str(tmp_path / "prefix"), tmp_path / "m.gguf"
    (tmp_path / "hub" / REPO).mkdir(parents=True)
    (tmp_path / "hub" / REPO / "m.gguf").write_bytes(gguf_files.model())
    path.write_bytes(gguf_files.model())
    given = {"llama_model_copy": str(path)}
    first, _action = run(call, given, prefix)
    store(tmp_path, request_of(**given), looked_up(request_of(**given)))
    path.unlink()
    assert run(call, given, prefix)[0] == first
    monkeypatch.setattr(local_models, "find_unreadable_path", lambda account, path: "/closed")
    assert run(call, given, prefix, "llamacpp")[0]["unreadable_path"] == "/closed"


def test_each_of_several_models_is_found(call):
    entries = [
        {"name": "here", "path": "/m.gguf"},
        {"name": "none"},
        {"name": "nowhere", "copy": "/not/there.gguf"},
        {"name": "known", "known_answer": {}},
    ]
    found = run(operators(call), {"llama_models": entries})[0]["models"]
    assert found["here"]["summary"] == SUMMARY
    assert found["none"] == {"changed": False}
    assert "llama_model_copy is /not/there.gguf" in found["nowhere"]["refused"]
    assert not found["known"]["files"]
    assert run(None, {"llama_models": [entries[0], entries[0]]})[0] == {"changed": False}


def test_a_summary_of_the_operator_may_be_enough(call):
    given = {"llama_model_path": "/m.gguf", "llama_model_gguf_summary": SUMMARY}
    assert run(None, given, summary_is_enough=True)[0] == {"changed": False}
    host = operators(call)
    assert run(host, given)[0]["summary"] == SUMMARY
    entries = [{"name": "said", "path": "/m.gguf", "gguf_summary": SUMMARY}, {"name": "read", "path": "/m.gguf"}]
    found = run(host, {"llama_models": entries}, summary_is_enough=True)[0]["models"]
    assert found["said"] == {"changed": False}
    assert found["read"]["summary"] == SUMMARY


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("api_key_file", "MISSING", "is 'MISSING', which does not exist on the"),
        ("tls_key_file", "MISSING", "is 'MISSING'"),
        ("extra_args", ["--chat-template-file", "MISSING"], "has 'MISSING', which"),
        ("extra_args", ["--lora=MISSING"], "has 'MISSING'"),
        ("extra_args", ["--log-file", "MISSING"], None),
        ("api_key_file", __file__, None),
    ],
)
@pytest.mark.parametrize("declared", [{}, {"llama_hardware": {"cores": 1}}])
def test_files_that_the_head_lacks_are_refused_while_planning(call, tmp_path, declared, name, value, said):
    missing, variable = str(tmp_path / "missing"), f"llama_server_{name}"
    given = json.loads(json.dumps({variable: value}).replace("MISSING", missing))
    found, _action = run(operators(call), {"llama_model_path": "/m.gguf", **given, **declared}, str(tmp_path))
    said = said and not declared and f"{variable} {said}"
    assert (found.get("refused") or "").startswith((said or "").replace("MISSING", missing))
    assert bool(found.get("refused")) == bool(said)


@pytest.mark.parametrize(
    "variable, manager, refuses",
    [
        ("api_key_file", "supervisor", True),
        ("api_key_file", "systemd", False),
        ("extra_args", "systemd", True),
        ("api_key_file", None, False),
    ],
)
def test_files_that_the_service_cannot_read_are_refused_while_planning(call, tmp_path, variable, manager, refuses):
    (keys := tmp_path / "keys").write_text("key")
    keys.chmod(0o600)
    value = str(keys) if variable == "api_key_file" else [f"--chat-template-file={keys}"]
    given = {"llama_model_path": "/m.gguf", f"llama_server_{variable}": value}
    found, _action = run(operators(call), given, str(tmp_path), account="no-such-account", service_manager=manager)
    assert ("cannot read" in (found.get("refused") or "")) == refuses
