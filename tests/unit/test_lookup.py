"""Models that are looked up where they come from: a hub on this machine, a web server, Ollama's registry, the controller."""

import hashlib
import json
import re
import socket

import gguf_files
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.modules import model_info
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub
from support.model_sources import (
    REPO,
    TOKEN,
    looked_up,
    names,
    on_huggingface,
    play,
    refusal,
    repo,
    request_of,
    run,
    server,
)

MODULE = model_info
__all__ = ["repo", "server"]


def refused_listing(server, body):
    """The reason where a hub says this of a repository."""
    server.faults[f"/api/models/{REPO}/revision/main"] = lambda handler: server.reply(handler, 200, body, {})
    return refusal(looked_up, on_huggingface())


# Hugging Face


def parts_of(name, count):
    return [f"{name}/some-model-{name}-0000{index}-of-0000{count}.gguf" for index in range(1, count + 1)]


@pytest.mark.parametrize(
    "keys, files",
    [
        ({"quantisation": "Q4_K_M"}, ["some-model-Q4_K_M.gguf"]),
        ({"quantisation": "ud-q4_k_m"}, ["some-model-UD-Q4_K_M.gguf"]),
        ({"quantisation": "UD-Q2_K_XL"}, parts_of("UD-Q2_K_XL", 3)),
        ({"files": ["some-model-Q4_K_M.gguf"]}, ["some-model-Q4_K_M.gguf"]),
        ({"files": ["Q8_0/some-model-Q8_0-00002-of-00002.gguf"]}, parts_of("Q8_0", 2)),
    ],
)
def test_a_model_on_hugging_face_is_all_its_files_at_a_commit(server, repo, keys, files):
    found = looked_up(on_huggingface(**keys))
    commit = play.commit_of(REPO)
    assert names(found) == files
    for file in found.files:
        content = (repo / file.name).read_bytes()
        url = f"{server.url}/{REPO}/resolve/{commit}/{file.name}"
        digest = hashlib.sha256(content).hexdigest()
        assert file == ModelFilePlan(file.name, "model", "", url, len(content), digest, commit)
    assert found.summary == header_summary.summarize(gguf.read_local_headers(str(repo / files[0])))


def test_a_repository_with_one_model_needs_no_quantisation(server):
    (server.folder / REPO / "model.gguf").write_bytes(gguf_files.model())
    assert names(looked_up(on_huggingface())) == ["model.gguf"]


def test_quantisations_of_that_model_which_can_be_chosen_are_offered_the_smallest_first(repo):
    """Two files of one quantisation need ``files``, another model is no remedy, and one without all parts cannot be loaded."""
    for name in ("some-model-IQ1_S.gguf", "other-IQ1_S.gguf", "other-IQ2_M.gguf", "some-model-f16.gguf"):
        (repo / name).write_bytes(gguf_files.model() + bytes(4096))
    (repo / "some-model-Q6_K-00001-of-00002.gguf").write_bytes(gguf_files.model())
    offered = looked_up(on_huggingface(files=["some-model-Q4_K_M.gguf"])).quantisations
    assert {one.name for one in offered} == {"Q4_K_M", "UD-Q4_K_M", "UD-Q2_K_XL", "Q8_0", "f16"}
    assert [one.bytes for one in offered] == sorted(one.bytes for one in offered)
    assert all(looked_up(on_huggingface(quantisation=one.name)).files for one in offered)


@pytest.mark.parametrize(
    "keys, said",
    [
        ({}, "has 4 models: set quantisation to one of "),
        ({"quantisation": "Q3_K_S"}, "has no quantisation Q3_K_S: use one of "),
        ({"quantisation": "Q4_K"}, "has no quantisation Q4_K: use one of "),
        ({"files": ["some-model-Q5_K_M.gguf"]}, "has no some-model-Q5_K_M.gguf: use one of Q8_0/some-model-Q8_0-00001"),
        ({"revision": "v2"}, "has no revision 'v2': choose a revision on "),
    ],
)
def test_what_a_repository_does_not_have_is_answered_with_what_it_has(repo, keys, said):
    message = refusal(looked_up, on_huggingface(**keys))
    assert message.startswith(f"llama_model_huggingface sets repo to {REPO}, which {said}")
    if "quantisation" in said:
        assert all(label in message for label in ("Q4_K_M", "UD-Q4_K_M", "UD-Q2_K_XL", "Q8_0"))


def test_models_that_cannot_be_chosen_or_are_not_whole_are_refused(repo):
    (repo / "other-model-Q4_K_M.gguf").write_bytes(gguf_files.model())
    message = refusal(looked_up, on_huggingface(quantisation="Q4_K_M"))
    assert re.search(r"has 2 models of Q4_K_M: .*other-model-Q4_K_M\.gguf", message)
    (repo / "other-model.gguf").write_bytes(gguf_files.model())
    assert re.search(r"has 6 models: set files to one of .*other-model\.gguf", refusal(looked_up, on_huggingface()))
    (repo / "UD-Q2_K_XL" / "some-model-UD-Q2_K_XL-00002-of-00003.gguf").unlink()
    message = refusal(looked_up, on_huggingface(quantisation="UD-Q2_K_XL"))
    assert "UD-Q2_K_XL/some-model-UD-Q2_K_XL-00002-of-00003.gguf" in message


def test_a_repository_without_a_model_names_what_it_has(server):
    (server.folder / REPO / "model.safetensors").write_bytes(b"x")
    message = refusal(looked_up, on_huggingface())
    assert "has no GGUF file: use another repository" in message
    for part in "ba":
        (server.folder / REPO / f"m.gguf-split-{part}").write_bytes(b"x")
    message = refusal(looked_up, on_huggingface())
    assert "parts of a split file (m.gguf-split-a, m.gguf-split-b): download" in message


def test_a_repository_that_does_not_exist_or_is_gated(server, repo):
    server.tokens[REPO] = TOKEN
    nothing = request_of(llama_model_huggingface={"repo": "nobody/nothing"})
    gated = on_huggingface(quantisation="Q4_K_M")
    for request, name in ((nothing, "nobody/nothing"), (gated, REPO)):
        for token, account in (
            (None, "and set llama_model_token_file to a file with your token"),
            ("hf_other", "owns the token in llama_m"),
        ):
            message = refusal(looked_up, request, token)
            assert re.search(rf"{name}, which cannot be read \(HTTP 40[134]\): correct the name, or acc", message)
            assert f"conditions on {server.url}/{name} " in message
            assert account in message
            assert "hf_other" not in message
    assert names(looked_up(gated, TOKEN)) == ["some-model-Q4_K_M.gguf"]


def tokens(server):
    """What permits each request."""
    named = [{name.lower(): value for name, value in headers.items()} for _path, headers, _code in server.asked]
    return [headers.get("authorization") for headers in named]


def test_a_token_goes_to_one_server(server, repo, tmp_path, call):
    """Neither that of a projector gets it, nor that of another one of several models."""
    other = play.Hub(tmp_path / "other").start()
    (other.folder / "plain").mkdir(parents=True)
    (other.folder / "plain" / "p.gguf").write_bytes(gguf_files.model())
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "token").chmod(0o600)
    given = {"llama_model_token_file": str(tmp_path / "token"), "llama_model_mmproj": f"{other.url}/p.gguf"}
    source = {"llama_model_huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}}
    assert "refused" not in run(call, {**given, **source})[0]
    alone = {"name": "other", "url": f"{other.url}/p.gguf"}
    several = [{"name": "one", "huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}}, alone]
    token_file = given["llama_model_token_file"]
    run(call, {"llama_model_token_file": token_file, "llama_models": several})
    other.stop()
    assert set(tokens(server)) == {f"Bearer {TOKEN}"}
    assert set(tokens(other)) == {None}


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"[]",
        json.dumps({"id": REPO, "sha": "x", "siblings": []}).encode(),
        json.dumps({"id": REPO, "sha": "a" * 40, "siblings": [{"rfilename": "m.gguf", "size": "x"}]}).encode(),
    ],
)
def test_a_server_that_is_no_hub(server, repo, answer):
    said = f"cannot be looked up: {server.url} does not answer like Hugging Face ("
    assert said in refused_listing(server, answer)


@pytest.mark.parametrize(
    "files, said",
    [
        (["a\nb.gguf"], "(files[0].name is"),
        (["-m.gguf"], "is not allowed: use another file"),
        (["a-0000\u0661-of-0000\u0662.gguf"], "whose size is unknown or whose name is not allowed: use another file"),
        (["a-00001-of-99999.gguf"], "lacks 99998 of this model's parts, for example a-00002-of-99999.gguf"),
        ([f"{number}-00001-of-99999.gguf" for number in range(999)], "has 999 models: set files to"),
    ],
)
def test_what_a_server_claims_of_files_that_cannot_be_fetched_is_refused_in_one_line(server, repo, files, said):
    """The names of all parts that 100 such models claim to have would take 920 MiB of memory."""
    listing = {"id": REPO, "sha": "a" * 40, "siblings": [{"rfilename": name, "size": 9} for name in files]}
    message = refused_listing(server, json.dumps(listing).encode())
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("address", ["https://me:secret@mirror.example", "http://me:secret@h:port", "mirror"])
def test_a_mirror_whose_address_cannot_be_used(monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    message = refusal(looked_up, on_huggingface())
    assert "which is not the address of a server, or contains a password or token" in message
    assert "secret" not in message


def test_offline(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        message = refusal(looked_up, on_huggingface())
        assert f"cannot be looked up: {address}" in message
        assert "the network and https_proxy; check HF_ENDPOINT" in message


@pytest.mark.parametrize(
    "content, mode, said",
    [
        (TOKEN, 0o640, "which is readable by other accounts: run chmod 600"),
        ("", 0o600, "which contains no token"),
        ("two words", 0o600, "which contains no token"),
        (None, 0o600, "which cannot be read on the controller"),
    ],
)
def test_a_file_without_a_token_is_refused(tmp_path, content, mode, said):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    message = refusal(hub.read_token, str(path))
    assert message.startswith(f"llama_model_token_file is {path}, {said}")
    assert not content or content not in message
    assert "is not a file" in refusal(hub.read_token, str(tmp_path))


# Web servers and the controller


def test_a_model_on_a_web_server(server):
    (server.folder / "plain").mkdir()
    paths = gguf_files.write_parts(server.folder / "plain", 2)
    urls = [f"{server.url}/{path.name}" for path in paths]
    sums = ["sha256:" + digit * 64 for digit in "ab"]
    found = looked_up(request_of(llama_model_url=urls[0], llama_model_checksum=sums)).files
    assert [file.url for file in found] == urls
    assert [file.bytes for file in found] == [path.stat().st_size for path in paths]
    assert [file.sha256 for file in found] == ["a" * 64, "b" * 64]
    message = refusal(looked_up, request_of(llama_model_url=urls[0], llama_model_checksum=sums[:1]))
    assert "a model with 2 parts, but has 1 checksums: set a checksum for each part" in message


def test_a_model_of_the_controller(tmp_path):
    paths = gguf_files.write_parts(tmp_path, 2)
    found = looked_up(request_of(llama_model_copy=paths[0].name), base=str(tmp_path))
    assert [file.url for file in found.files] == [path.as_uri() for path in paths]
    assert found.summary["files"] == [{"name": path.name, "bytes": path.stat().st_size} for path in paths]
    assert found.summary["bytes"] == sum(path.stat().st_size for path in paths)
    assert found.summary["layer_bytes"] == [64 * 64 * 4] * 2
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    given = {"llama_model_copy": str(paths[0]), "llama_model_checksum": [f"sha256:{one}" for one in sums]}
    assert [file.sha256 for file in looked_up(request_of(**given)).files] == sums
    given["llama_model_checksum"].pop()
    assert "on the controller, a model with 2 parts, but has 1 checksums" in refusal(looked_up, request_of(**given))
    (tmp_path / "text.gguf").write_text("text")
    for name, said in (("none.gguf", "which cannot be read"), ("text.gguf", "which is not a GGUF file")):
        message = refusal(looked_up, request_of(llama_model_copy=str(tmp_path / name)))
        assert f"{name} on the controller, {said}" in message
