"""From the name of a model to its files: a hub on this machine, Ollama's registry and folder, the controller."""

import hashlib
import json
import re
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path

import gguf_files
import pytest
from ansible_collections.llamacpp.cluster.plugins.action import model_info as action_plugin
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    gguf,
    header_summary,
    known_answer,
    summary,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, local_models, ollama
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs, model_source
from ansible_collections.llamacpp.cluster.plugins.modules import model, model_info
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub, lookup, resolver
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models.lookup import Query, SourceFile
from conftest import identity, typed
from support.models import as_json
from support.rollbacks import completed

sys.path.append(str(Path(__file__).resolve().parents[1]))
import hub as play

MODULE = model_info
REPO = "unsloth/some-model-GGUF"
PREFIX = "/opt/llamacpp"
TOKEN = "hf_abcdefgh"
SUMMARY = {**known_answer.summary(4, 128, "f32"), "files": []}
CLIP = (("general.architecture", gguf_files.STRING, "clip"), ("clip.has_vision_encoder", gguf_files.BOOL, True))


@pytest.fixture
def server(tmp_path, monkeypatch):
    served = play.Hub(tmp_path / "hub").start()
    (tmp_path / "hub" / REPO).mkdir(parents=True)
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    yield served
    served.stop()


@pytest.fixture
def repo(server):
    """A repository as people make them: quantisations in folders and in names, parts, a projector, and what is none of these."""
    folder = server.folder / REPO
    for name in ("some-model-Q4_K_M.gguf", "some-model-UD-Q4_K_M.gguf", "mmproj-F16.gguf", "some-model.imatrix.gguf"):
        (folder / name).write_bytes(gguf_files.model())
    for folder_name, count in (("UD-Q2_K_XL", 3), ("Q8_0", 2)):
        (folder / folder_name).mkdir()
        for part in gguf_files.write_parts(folder / folder_name, count):
            index, whole = part.name.split("-")[-3], part.name.split("-")[-1]
            part.rename(folder / folder_name / f"some-model-{folder_name}-{index}-of-{whole}")
    (folder / "README.md").write_text("a model")
    return folder


def variables(**given):
    spec = inventory.specification()
    return {**{name: option.get("default") for name, option in spec.items()}, **given}


def request_of(**given):
    return model_inputs.request_of(variables(**given))


def on_huggingface(**keys):
    return request_of(llama_model_huggingface={"repo": REPO, **keys})


def looked_up(request, token=None, base="", seconds=20):
    return lookup.look_up(Query(request.sources()[0], token, base), seconds)


def names(found):
    return [file.name for file in found.files]


def refusal(call, *arguments, **keywords):
    with pytest.raises(Refusal) as refused:
        call(*arguments, **keywords)
    return str(refused.value)


def reply(server, path, code, body=b"", **headers):
    """Lets the server answer so."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    server.faults[path] = lambda handler: server.reply(handler, code, body, named)


def answer_listing(server, code, body=b"{}"):
    reply(server, f"/api/models/{REPO}/revision/main", code, body)


# Variables


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "no model is given: set one of llama_model_path, llama_model_huggingface"),
        (
            {"llama_model_path": "/m.gguf", "llama_model_url": ["http://h/m.gguf"]},
            "llama_model_path and llama_model_url are both set: keep one",
        ),
        (
            {"llama_model_path": "/m.gguf", "llama_model_copy": "m", "llama_model_ollama": "m"},
            "llama_model_path and llama_model_ollama and llama_model_copy are all set",
        ),
        ({"llama_model_path": "m.gguf"}, "llama_model_path is 'm.gguf': use the absolute path on the head"),
        ({"llama_model_path": "/srv/modèle.gguf"}, "does not end in a name that a file of a model can have"),
        ({"llama_model_path": "/srv/"}, "does not end in a name that a file of a model can have"),
        ({"llama_model_copy": "[m].gguf"}, "llama_model_copy is '[m].gguf', which does not end in a name"),
        (
            {"llama_model_path": "/m.gguf", "llama_model_mmproj": {"path": "/-p.gguf"}},
            "llama_model_mmproj.path is '/-p.gguf', which does not end in a name",
        ),
        ({"llama_model_huggingface": {"repo": "model"}}, "has the repo 'model': use OWNER/NAME"),
        ({"llama_model_huggingface": {"repo": "a/b", "quantisation": "Q4", "files": ["x.gguf"]}}, "keep one of them"),
        ({"llama_model_huggingface": {"repo": "a/b", "quantisation": "Q4 K"}}, "has the quantisation 'Q4 K'"),
        ({"llama_model_huggingface": {"repo": "a/b", "revision": "-x"}}, "has the revision '-x'"),
        ({"llama_model_huggingface": {"repo": "a/b", "files": ["../x.gguf"]}}, "has '../x.gguf' in files"),
        (
            {"llama_model_huggingface": {"repo": "a/b", "files": ["x.gguf", "y.gguf"]}},
            "has x.gguf and y.gguf, which are not parts of one model",
        ),
        (
            {"llama_model_url": ["http://h/a-00001-of-00002.gguf", "http://h/b-00002-of-00002.gguf"]},
            "has a-00001-of-00002.gguf and b-00002-of-00002.gguf, which are not parts of one model",
        ),
        (
            {"llama_model_url": ["http://h/a-00001-of-00003.gguf", "http://h/a-00002-of-00003.gguf"]},
            "has 2 of 3 parts, a-00003-of-00003.gguf is missing",
        ),
        ({"llama_model_url": ["ftp://h/m.gguf"]}, "has 'ftp://h/m.gguf': use the http:// or https:// address"),
        ({"llama_model_url": ["http://[h/m.gguf"]}, "use the http:// or https:// address"),
        (
            {"llama_model_url": ["http://h:99999/m.gguf"]},
            "has 'http://h:99999/m.gguf': use the http:// or https:// address",
        ),
        ({"llama_model_url": ["http://h:port/m.gguf"]}, "use the http:// or https:// address"),
        ({"llama_model_url": ["http://h/"]}, "whose end is no name of a file"),
        ({"llama_model_url": ["http://h/m.gguf", "http://g/m.gguf"]}, "has two addresses of m.gguf"),
        (
            {"llama_model_url": ["http://h/m.gguf"], "llama_model_checksum": ["md5:abc"]},
            "llama_model_checksum has 'md5:abc': use sha256: and 64 hexadecimal digits",
        ),
        (
            {
                "llama_model_url": ["http://h/a-00001-of-00002.gguf", "http://h/a-00002-of-00002.gguf"],
                "llama_model_checksum": ["sha256:" + "a" * 64],
            },
            "has 1 checksums for 2 addresses",
        ),
        (
            {"llama_model_path": "/m.gguf", "llama_model_checksum": ["sha256:" + "a" * 64]},
            "llama_model_checksum is set, and only files of llama_model_url and llama_model_copy have one",
        ),
        ({"llama_model_ollama": "a b"}, "llama_model_ollama is 'a b': use [HOST/NAMESPACE/]NAME:TAG"),
        ({"llama_model_ollama": "../..:x"}, "llama_model_ollama is '../..:x': use [HOST/NAMESPACE/]NAME:TAG"),
        ({"llama_model_ollama": "a/b:.."}, "llama_model_ollama is 'a/b:..': use [HOST/NAMESPACE/]NAME:TAG"),
        ({"llama_model_ollama": "hf.co/a/b:Q4"}, "a repository on Hugging Face: set llama_model_huggingface"),
        ({"llama_model_path": "/m.gguf", "llama_model_mmproj": {}}, "llama_model_mmproj has no source"),
        (
            {"llama_model_path": "/m.gguf", "llama_model_draft": {"path": "/d", "copy": "d"}},
            "llama_model_draft has path and copy: give it one of",
        ),
    ],
)
def test_variables_that_cannot_be_are_refused(given, said):
    assert said in refusal(request_of, **given)


def test_unknown_keys_are_refused_with_those_that_are_known():
    task_vars = {
        "inventory_hostname": "h",
        "hostvars": {"h": {"llama_model_huggingface": {"repo": "a/b", "quantization": "Q4"}}},
    }
    with pytest.raises(Refusal, match=r"llama_model_huggingface.quantization is not known, use one of"):
        inventory.variables_of(task_vars)


def test_addresses_are_put_in_the_order_of_their_parts_with_their_checksums():
    urls = [f"http://h/a-0000{index}-of-00002.gguf" for index in (2, 1)]
    source = request_of(llama_model_url=urls, llama_model_checksum=["sha256:" + digit * 64 for digit in "BA"]).source
    assert source.url == tuple(reversed(urls))
    assert source.checksum == ("a" * 64, "b" * 64)


@pytest.mark.parametrize(
    "given, whole",
    [
        ("gemma3", "registry.ollama.ai/library/gemma3:latest"),
        ("me/gemma3:4b", "registry.ollama.ai/me/gemma3:4b"),
        ("registry.lan:5000/library/gemma3:4b", "registry.lan:5000/library/gemma3:4b"),
        ("http://127.0.0.1:1/library/g:t", "http://127.0.0.1:1/library/g:t"),
    ],
)
def test_a_name_of_ollama_is_completed_as_ollama_does(given, whole):
    assert request_of(llama_model_ollama=given).source.ollama == whole


# Hugging Face


@pytest.mark.parametrize(
    "keys, files",
    [
        ({"quantisation": "Q4_K_M"}, ["some-model-Q4_K_M.gguf"]),
        ({"quantisation": "ud-q4_k_m"}, ["some-model-UD-Q4_K_M.gguf"]),
        (
            {"quantisation": "UD-Q2_K_XL"},
            [f"UD-Q2_K_XL/some-model-UD-Q2_K_XL-0000{index}-of-00003.gguf" for index in (1, 2, 3)],
        ),
        ({"files": ["some-model-Q4_K_M.gguf"]}, ["some-model-Q4_K_M.gguf"]),
        (
            {"files": ["Q8_0/some-model-Q8_0-00002-of-00002.gguf"]},
            [f"Q8_0/some-model-Q8_0-0000{index}-of-00002.gguf" for index in (1, 2)],
        ),
    ],
)
def test_a_model_on_hugging_face_is_all_its_files_at_a_commit(server, repo, keys, files):
    found = looked_up(on_huggingface(**keys))
    commit = play.commit_of(REPO)
    assert names(found) == files
    assert (found.source, found.revision) == (f"huggingface:{REPO}@{commit}", commit)
    for file in found.files:
        content = (repo / file.name).read_bytes()
        url = f"{server.url}/{REPO}/resolve/{commit}/{file.name}"
        assert file == SourceFile(file.name, len(content), url, hashlib.sha256(content).hexdigest())
    assert found.summary == header_summary.summarize(gguf.read_path(str(repo / files[0])))


def test_a_repository_with_one_model_needs_no_quantisation(server):
    (server.folder / REPO / "model.gguf").write_bytes(gguf_files.model())
    assert names(looked_up(on_huggingface())) == ["model.gguf"]


def test_a_projector_is_looked_for_among_projectors(repo):
    request = request_of(llama_model_path="/m.gguf", llama_model_mmproj={"huggingface": {"repo": REPO}})
    found = lookup.look_up(Query(request.mmproj), 20)
    assert names(found) == ["mmproj-F16.gguf"]
    assert found.summary is None


def test_only_headers_are_read(server, repo):
    (repo / "big-IQ4_XS.gguf").write_bytes(gguf_files.model() + bytes(8 << 20))
    looked_up(on_huggingface(quantisation="IQ4_XS"))
    ranges = [headers["Range"] for _path, headers, _code in server.asked if "Range" in headers]
    assert ranges == [f"bytes=0-{gguf.FIRST_CHUNK - 1}"]


def test_quantisations_of_that_model_which_can_be_chosen_are_offered_the_smallest_first(repo):
    """Two files of one quantisation need ``files``, another model is no remedy, and one without all parts cannot be loaded."""
    for name in ("some-model-IQ1_S.gguf", "other-IQ1_S.gguf", "other-IQ2_M.gguf", "some-model-f16.gguf"):
        (repo / name).write_bytes(gguf_files.model() + bytes(4096))
    (repo / "some-model-Q6_K-00001-of-00002.gguf").write_bytes(gguf_files.model())
    offered = looked_up(on_huggingface(files=["some-model-Q4_K_M.gguf"])).offered
    assert {one.name for one in offered} == {"Q4_K_M", "UD-Q4_K_M", "UD-Q2_K_XL", "Q8_0", "f16"}
    assert [one.bytes for one in offered] == sorted(one.bytes for one in offered)
    assert all(looked_up(on_huggingface(quantisation=one.name)).files for one in offered)


@pytest.mark.parametrize(
    "keys, said",
    [
        ({}, "has 4 models: set quantisation to one of "),
        ({"quantisation": "Q3_K_S"}, "has no quantisation Q3_K_S: it has "),
        ({"quantisation": "Q4_K"}, "has no quantisation Q4_K: it has "),
        ({"files": ["some-model-Q5_K_M.gguf"]}, "has no some-model-Q5_K_M.gguf: it has Q8_0/some-model-Q8_0-00001"),
        ({"revision": "v2"}, "has no revision 'v2': it has main"),
    ],
)
def test_what_a_repository_does_not_have_is_answered_with_what_it_has(repo, keys, said):
    message = refusal(looked_up, on_huggingface(**keys))
    assert message.startswith(f"llama_model_huggingface has the repo {REPO}, which {said}")
    if "quantisation" in said:
        assert all(label in message for label in ("Q4_K_M", "UD-Q4_K_M", "UD-Q2_K_XL", "Q8_0"))


def test_models_that_cannot_be_chosen_or_are_not_whole_are_refused(repo):
    (repo / "other-model-Q4_K_M.gguf").write_bytes(gguf_files.model())
    message = refusal(looked_up, on_huggingface(quantisation="Q4_K_M"))
    assert re.search(r"has 2 models of Q4_K_M: set files to one of .*other-model-Q4_K_M\.gguf", message)
    (repo / "Q8_0" / "some-model-Q8_0-00002-of-00002.gguf").write_bytes(gguf_files.model())
    message = refusal(looked_up, on_huggingface(quantisation="Q8_0"))
    assert f"llama_model_huggingface is {REPO}, Q8_0/some-model-Q8_0-00001-of-00002.gguf, which has the part" in message
    (repo / "UD-Q2_K_XL" / "some-model-UD-Q2_K_XL-00002-of-00003.gguf").unlink()
    message = refusal(looked_up, on_huggingface(quantisation="UD-Q2_K_XL"))
    assert "lacks 1 of the parts of that model, like UD-Q2_K_XL/some-model-UD-Q2_K_XL-00002-of-00003.gguf" in message


def test_a_repository_without_a_model_names_what_it_has(server):
    (server.folder / REPO / "model.safetensors").write_bytes(b"x")
    message = refusal(looked_up, on_huggingface())
    assert "has no GGUF file: use a repository that has one; it has model.safetensors" in message


def test_a_repository_that_does_not_exist(server):
    request = request_of(llama_model_huggingface={"repo": "nobody/nothing"})
    missing = f"nobody/nothing, which does not exist at {server.url}, or is "
    assert re.search(rf"{missing}private \(HTTP 401\): .*or set llama_model_token_file", refusal(looked_up, request))
    assert f"{missing}not shown to the account of the token in llama_model_token_file (HTTP 404)" in refusal(
        looked_up, request, TOKEN
    )


def test_a_gated_repository(server, repo):
    server.tokens[REPO] = TOKEN
    request = on_huggingface(quantisation="Q4_K_M")
    assert f"is gated (HTTP 401): accept its conditions on {server.url}/{REPO}" in refusal(looked_up, request)
    message = refusal(looked_up, request, "hf_of_somebody_else")
    assert "is gated, and the account of the token in llama_model_token_file has no access (HTTP 403)" in message
    assert "hf_of_somebody_else" not in message
    assert names(looked_up(request, TOKEN)) == ["some-model-Q4_K_M.gguf"]


@pytest.mark.parametrize("kind", ["huggingface", "url"])
@pytest.mark.parametrize("code", [401, 403])
def test_a_file_to_which_a_token_is_not_entitled(server, repo, kind, code):
    """The repository itself may be described to everybody, as gated ones are."""
    path = f"/{REPO}/resolve/{play.commit_of(REPO)}/some-model-Q4_K_M.gguf"
    reply(server, path, code)
    source = {"huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}, "url": [f"{server.url}{path}"]}[kind]
    request = request_of(**{f"llama_model_{kind}": source})
    message = refusal(looked_up, request, TOKEN)
    assert f"which needs permission (HTTP {code}): the token of llama_model_token_file is not entitled to it" in message
    assert TOKEN not in message
    assert "give a token with llama_model_token_file" in refusal(looked_up, request)


def tokens(server):
    """What permits each request."""
    named = [{name.lower(): value for name, value in headers.items()} for _path, headers, _code in server.asked]
    return [headers.get("authorization") for headers in named]


def test_a_token_stays_with_the_server_that_it_is_for(server, repo, tmp_path):
    other = play.Hub(tmp_path / "hub").start()
    (tmp_path / "hub" / "plain").symlink_to(tmp_path / "hub")
    server.tokens[REPO], server.redirect = TOKEN, other.url
    try:
        assert names(looked_up(on_huggingface(quantisation="Q4_K_M"), TOKEN)) == ["some-model-Q4_K_M.gguf"]
    finally:
        other.stop()
    assert set(tokens(server)) == {f"Bearer {TOKEN}"}
    assert set(tokens(other)) == {None}


def test_a_token_goes_to_one_server(server, repo, tmp_path, call):
    """Neither that of a projector gets it, nor that of another part."""
    other = play.Hub(tmp_path / "other").start()
    (other.folder / "plain").mkdir(parents=True)
    (other.folder / "plain" / "p.gguf").write_bytes(gguf_files.model())
    parts = gguf_files.write_parts(tmp_path, 2)
    urls = []
    for place, part in zip((server, other), parts):
        (place.folder / "plain").mkdir(exist_ok=True)
        part.rename(place.folder / "plain" / part.name)
        urls.append(f"{place.url}/{part.name}")
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    given = {"llama_model_token_file": str(tmp_path / "token"), "llama_model_mmproj": {"url": [f"{other.url}/p.gguf"]}}
    for source in (
        {"llama_model_huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}},
        {"llama_model_url": urls},
    ):
        assert "refused" not in run(call, {**given, **source})[0]
    other.stop()
    assert set(tokens(server)) == {f"Bearer {TOKEN}"}
    assert set(tokens(other)) == {None}


def test_no_token_of_the_environment_is_sent(server, repo, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    looked_up(on_huggingface(quantisation="Q4_K_M"))
    assert set(tokens(server)) == {None}


@pytest.mark.parametrize(
    "code, token, said",
    [
        (
            429,
            None,
            "its server has had too many requests (HTTP 429): wait some minutes, or set llama_model_token_file",
        ),
        (503, None, "(HTTP 503): try again later"),
        (403, None, "needs a token (HTTP 403)"),
        (403, TOKEN, "cannot be read with the token in llama_model_token_file (HTTP 403)"),
    ],
)
def test_a_server_that_refuses(server, repo, code, token, said):
    answer_listing(server, code)
    assert said in refusal(looked_up, on_huggingface(), token)


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"[]",
        b"[" * 100_000,
        b"{}",
        json.dumps({"id": REPO, "sha": "x", "siblings": []}).encode(),
        json.dumps({"id": REPO, "sha": "a" * 40, "siblings": [{"rfilename": "m.gguf", "size": "x"}]}).encode(),
        json.dumps({"id": REPO, "sha": "a" * 40, "siblings": [{"rfilename": "x", "size": 1}] * 20001}).encode(),
    ],
)
def test_a_server_that_is_no_hub(server, repo, answer):
    answer_listing(server, 200, answer)
    message = refusal(looked_up, on_huggingface())
    assert f"cannot be looked up: the answer of {server.url} is not that of Hugging Face (" in message


@pytest.mark.parametrize("name", ["a\nb.gguf", "-m.gguf", "x/.gguf"])
def test_names_of_a_server_that_cannot_be_on_a_host(server, repo, name):
    listing = {"id": REPO, "sha": "a" * 40, "siblings": [{"rfilename": name, "size": 9}]}
    answer_listing(server, 200, json.dumps(listing).encode())
    message = refusal(looked_up, on_huggingface())
    assert "a file of a model cannot have: use another file" in message or "(files.name is" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "address, said",
    [
        ("https://me:secret@mirror.example", "HF_ENDPOINT has a password or a token"),
        ("http://mirror.example:99999", "HF_ENDPOINT of the controller is '"),
        ("http://me:secret@h:port", "HF_ENDPOINT of the controller is '"),
        ("http://[::1", "HF_ENDPOINT of the controller is '"),
        ("mirror", "HF_ENDPOINT of the controller is 'mirror', which is not the address of a server: use one"),
    ],
)
def test_a_mirror_whose_address_cannot_be_used(tmp_path, monkeypatch, address, said):
    monkeypatch.setenv("HF_ENDPOINT", address)
    message = refusal(looked_up, on_huggingface())
    assert message.startswith(said)
    assert "secret" not in message


def test_offline(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        message = refusal(looked_up, on_huggingface())
        assert f"cannot be looked up: {address}" in message
        assert "check the server, the network and https_proxy; check HF_ENDPOINT" in message
        message = refusal(looked_up, request_of(llama_model_ollama=f"{address}/library/m:1"))
    assert re.search(
        r"whose manifest http://\S+ cannot be read \(.*refused\): check the server, the network and https_proxy",
        message,
    )


def test_a_server_that_is_slow(server, repo):
    server.faults[f"/api/models/{REPO}/revision/main"] = lambda handler: time.sleep(2)
    message = refusal(looked_up, on_huggingface(), seconds=0.3)
    assert message.startswith("llama_model_huggingface could not be read within 0.3 s: check the network")


def test_a_file_of_another_size_than_the_repository_says(server, repo):
    path = repo / "some-model-Q4_K_M.gguf"

    def longer(handler):
        path.write_bytes(path.read_bytes() + b"\0")
        return True

    server.faults[f"/{REPO}/resolve/{play.commit_of(REPO)}/{path.name}"] = longer
    size = path.stat().st_size
    message = refusal(looked_up, on_huggingface(quantisation="Q4_K_M"))
    assert f"whose size is {size} in the repository and {size + 1} of the file itself" in message


def test_a_token_is_read_from_a_file_of_its_owner(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    assert hub.read_token(str(path)) == TOKEN
    assert hub.read_token(None) is None


@pytest.mark.parametrize(
    "content, mode, said",
    [
        (TOKEN, 0o640, "which others can read: run chmod 600"),
        ("", 0o600, "which has no token"),
        ("two words", 0o600, "which has no token"),
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
    first = looked_up(request_of(llama_model_url=urls[:1]))
    both = looked_up(request_of(llama_model_url=urls, llama_model_checksum=["sha256:" + digit * 64 for digit in "ab"]))
    assert [file.url for file in first.files] == [file.url for file in both.files] == urls
    assert [file.bytes for file in both.files] == [path.stat().st_size for path in paths]
    assert [file.sha256 for file in both.files] == ["a" * 64, "b" * 64]
    assert first.summary == both.summary
    assert both.source == f"url:{urls[0]}"
    message = refusal(looked_up, request_of(llama_model_url=urls[:1], llama_model_checksum=["sha256:" + "a" * 64]))
    assert "a model of 2 parts, and has 1 checksums: give one for each part" in message


def test_a_model_of_the_controller(tmp_path):
    paths = gguf_files.write_parts(tmp_path, 2)
    found = looked_up(request_of(llama_model_copy=paths[0].name), base=str(tmp_path))
    assert [file.url for file in found.files] == [path.as_uri() for path in paths]
    assert found.summary["files"] == [{"name": path.name, "bytes": path.stat().st_size} for path in paths]
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    given = {"llama_model_copy": str(paths[0]), "llama_model_checksum": [f"sha256:{one}" for one in sums]}
    assert [file.sha256 for file in looked_up(request_of(**given)).files] == sums
    given["llama_model_checksum"].pop()
    assert "of the controller, a model of 2 parts, and has 1 checksums" in refusal(looked_up, request_of(**given))
    (tmp_path / "text.gguf").write_text("text")
    for name, said in (("none.gguf", "which cannot be read"), ("text.gguf", "which is not a GGUF file")):
        message = refusal(looked_up, request_of(llama_model_copy=str(tmp_path / name)))
        assert f"{name} of the controller, {said}" in message


# Ollama


@pytest.fixture
def library(server):
    folder = server.folder / "ollama" / "library" / "gemma3"
    folder.mkdir(parents=True)
    (folder / "4b.gguf").write_bytes(gguf_files.model())
    (folder / "4b.template").write_text("{{ .Prompt }}")
    return folder


def of_ollama(server, name="gemma3:4b", **more):
    return request_of(llama_model_ollama=f"{server.url}/library/{name}", **more)


def test_a_model_of_ollama_is_a_blob_of_its_manifest(server, library):
    found = looked_up(of_ollama(server))
    content = (library / "4b.gguf").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    url = f"{server.url}/v2/library/gemma3/blobs/sha256:{digest}"
    assert found.files == [SourceFile("gemma3-4b.gguf", len(content), url, digest)]
    assert found.revision.startswith("sha256:")
    assert found.source == f"ollama:{server.url}/library/gemma3:4b"
    assert found.summary["architecture"] == "llama"


def test_a_projector_of_ollama(server, library):
    (library / "4b.mmproj").write_bytes(gguf_files.model())
    name = f"{server.url}/library/gemma3:4b"
    query = Query(request_of(llama_model_path="/m.gguf", llama_model_mmproj={"ollama": name}).mmproj)
    assert names(lookup.look_up(query, 20)) == ["gemma3-4b-mmproj.gguf"]
    (library / "4b.mmproj").unlink()
    assert "has no files with a projector" in refusal(lookup.look_up, query, 20)


def test_a_name_that_ollama_does_not_have(server, library):
    message = refusal(looked_up, of_ollama(server, "gemma3:5b"))
    assert f"does not have (HTTP 404): 127.0.0.1:{server.port} lists the names that it has" in message


MISSIZED = {"mediaType": "application/vnd.ollama.image.model", "size": 7}
MISSIZED["digest"] = "sha256:" + hashlib.sha256(gguf_files.model()).hexdigest()


@pytest.mark.parametrize(
    "code, answer, headers, said",
    [
        (500, b"", {}, "does not give (HTTP 500): try again later"),
        (200, b"<html>", {}, "sends no manifest"),
        (200, b"{}", {}, "sends a manifest with a value that is not possible"),
        (200, b'{"layers": []}', {}, "has no files with a model, not one"),
        (200, b"[" * 3000, {}, "sends no manifest"),
        (200, b'{"layers": [' + b" " * (1 << 20), {}, "is longer than 1024 KiB, so it is something else"),
        (200, zlib.compress(b"{}"), {"Content_Encoding": "gzip"}, "sends no manifest"),
        (200, json.dumps({"layers": [MISSIZED]}).encode(), {}, "whose size is 7 in its manifest and"),
    ],
)
def test_a_registry_that_answers_something_else(server, library, code, answer, headers, said):
    reply(server, "/v2/library/gemma3/manifests/4b", code, answer, **headers)
    assert said in refusal(looked_up, of_ollama(server))


@pytest.mark.parametrize("what", ["manifests/4b", MISSIZED["digest"].join(("blobs/", ""))])
@pytest.mark.parametrize("code", [401, 403])
def test_a_registry_that_wants_permission(server, library, what, code):
    """No token goes there, so none is asked for."""
    reply(server, f"/v2/library/gemma3/{what}", code)
    needs = f"4b, which needs permission (HTTP {code}), and registries of Ollama get no token: use its files from"
    assert needs in refusal(looked_up, of_ollama(server))


# Without a server: what the host has


class Action:
    """Runs modules in this process, as the host that they would run on."""

    host = "h"

    def __init__(self, call, given):
        self.call, self.ran = call, []
        self.variables = {"inventory_hostname": "h", "hostvars": {"h": given}, "inventory_dir": "/"}

    def module(self, arguments, name):
        self.ran.append(name)
        return self.call(**arguments)


def run(call, given, prefix=None, account=None):
    """The result of the module ``model_info``, and the action."""
    action = Action(call, given)
    arguments = {"prefix": prefix, "account": account, "timeout": 120}
    return action_plugin.ActionModule.perform(action, arguments), action


@pytest.fixture
def open_files(monkeypatch):
    """Files that every account can read."""
    monkeypatch.setattr(local_models.host, "closed_to", lambda account, path: None)


def operators(call):
    """A host that has /m.gguf of the operator, and runs the module for all else."""

    def answer(**arguments):
        return call(**arguments) if "paths" in arguments else {"summary": SUMMARY, "closed": None}

    return answer


def store(tmp_path, request, found):
    """Files and record of a source on the head, as they are once they are whole."""
    source = request.sources()[0]
    folder = Path(model_source.folder(str(tmp_path / "prefix"), source))
    folder.mkdir(parents=True)
    for file in found.files:
        content = (tmp_path / "hub" / REPO / file.name).read_bytes()
        (folder / download_record.base_name(file.name)).write_bytes(content)
    entry = {"source": found.source, "revision": found.revision}
    record = model_source.record(source, entry, [file._asdict() for file in found.files])
    (folder / download_record.RECORD).write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("kind", ["huggingface", "ollama"])
def test_a_model_is_found_downloaded_and_then_found_without_a_server(
    server, repo, library, tmp_path, call, open_files, monkeypatch, kind
):
    prefix, name = str(tmp_path / "prefix"), f"{server.url}/library/gemma3:4b"
    source = {"huggingface": {"repo": REPO, "quantisation": "UD-Q2_K_XL"}, "ollama": name}[kind]
    given = {f"llama_model_{kind}": source}
    first, _action = run(call, given, prefix)
    plan = model_source.resolve(request_of(**given), model_source.report_of(first), prefix)
    arguments = {"files": [file._asdict() for file in plan.files], "records": list(plan.records)}
    with monkeypatch.context() as patched:
        patched.setattr(f"{__name__}.MODULE", model)
        assert call(folder=f"{prefix}/models", **arguments)["changed"]
    server.stop()
    requests = len(server.asked)
    second, _action = run(call, given, prefix)
    assert len(server.asked) == requests
    assert {**second, "offered": first["offered"]} == first
    last = Path(plan.files[-1].path)
    last.write_bytes(b"short")
    assert download_record.read_record(str(last.parent)).missing == (plan.files[-1].name,)
    assert re.search("check the .*network", run(call, given, prefix)[0]["refused"])


def test_a_lost_file_is_that_of_the_recorded_commit(server, repo, tmp_path, call):
    """A branch may have moved since."""
    given = {"llama_model_huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}}
    request = on_huggingface(quantisation="Q4_K_M")
    folder, prefix = store(tmp_path, request, looked_up(request)), str(tmp_path / "prefix")
    path = folder / download_record.RECORD
    path.write_text(path.read_text().replace(play.commit_of(REPO), "d" * 40))
    (folder / "some-model-Q4_K_M.gguf").unlink()
    assert f"has no revision '{'d' * 40}'" in run(call, given, prefix)[0]["refused"]
    path.write_text(path.read_text().replace("d" * 40, play.commit_of(REPO)))
    found, _action = run(call, given, prefix)
    assert (found["revision"], found["files"][0]["bytes"]) == (play.commit_of(REPO), len(gguf_files.model()))
    assert any(f"/revision/{play.commit_of(REPO)}" in str(request) for request in server.asked)


@pytest.mark.parametrize(
    "change",
    [
        {"asked": {"huggingface": {"repo": "other/one"}}},
        {"schema": 2},
        {"resolved": []},
        {"resolved": [{"name": "a\nb.gguf", "bytes": 1, "sha256": None}]},
        {"revision": "../../other/repo/resolve/main"},
        {"revision": None},
        {"source": 5},
    ],
)
def test_a_record_of_something_else_counts_for_nothing(server, repo, tmp_path, call, change):
    request = on_huggingface(quantisation="Q4_K_M")
    path = store(tmp_path, request, looked_up(request)) / download_record.RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    requests = len(server.asked)
    given = {"llama_model_huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}}
    found, _action = run(call, given, str(tmp_path / "prefix"))
    assert len(server.asked) > requests
    assert found["source"] == f"huggingface:{REPO}@{play.commit_of(REPO)}"


@pytest.mark.parametrize("name", ["../../other/m.gguf", "a/../m.gguf", "/m.gguf", "a/.m.gguf", ""])
def test_names_that_lead_elsewhere_are_no_names(name):
    record = {"schema": 1, "asked": {}, "source": "it", "resolved": [{"name": name}]}
    assert "is no name for a file of a model" in str(download_record.problem_of_record(record))


@pytest.mark.parametrize("kind", ["huggingface", "url", "ollama", "copy"])
def test_a_record_has_no_say_in_where_files_come_from(server, tmp_path, kind):
    """Else a head would get files of the controller, and a server of its choice the token."""
    name, commit, url = (
        "some-model-Q4_K_M.gguf",
        "c" * 40,
        "https://models.example/some-model-Q4_K_M.gguf?download=true",
    )
    source, expected = {
        "huggingface": ({"repo": REPO, "quantisation": "Q4_K_M"}, f"{server.url}/{REPO}/resolve/{commit}/{name}"),
        "url": ([url], url),
        "ollama": (
            "https://models.example/library/gemma3:4b",
            f"https://models.example/v2/library/gemma3/blobs/sha256:{'a' * 64}",
        ),
        "copy": (str(tmp_path / "gone" / name), (tmp_path / "gone" / name).as_uri()),
    }[kind]
    given = {f"llama_model_{kind}": source}
    source = request_of(**given).source
    file = {"name": name, "bytes": 9, "sha256": "a" * 64}
    record = model_source.record(source, {"source": "it", "revision": commit}, [file])
    folder = {"record": record, "whole": True, "summary": {"layers": 1}}
    answer = {"folders": {model_source.folder(PREFIX, source): folder}}
    for lie in ("file:///etc/shadow", "https://evil.example/m.gguf", "http://169.254.169.254/m.gguf"):
        record["resolved"] = [{**file, "url": lie, "path": "/etc/passwd"}]
        (found,) = run(lambda **_arguments: answer, given, PREFIX)[0]["files"]
        assert (found["url"], found["path"]) == (expected, None)


def test_a_host_that_reports_what_cannot_be_is_not_believed(server, repo):
    given = {"llama_model_huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}}
    folder = model_source.folder(PREFIX, on_huggingface(quantisation="Q4_K_M").source)
    for folders in (5, {folder: 5}, {folder: {"record": {"x": 1}, "summary": {}}}, {}):
        found, _action = run(lambda folders=folders, **_arguments: {"folders": folders}, given, PREFIX)
        assert found["revision"] == play.commit_of(REPO)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"summary": 5},
        {"summary": {"files": 5}},
        {"summary": {**SUMMARY, "files": [{"name": 5}]}},
        {"summary": {"files": [], "architecture": "\x1b[2J"}},
    ],
    ids=str,
)
def test_a_host_is_not_believed_what_cannot_be_of_a_file_of_the_operator(answer):
    found, _action = run(lambda **_arguments: answer, {"llama_model_path": "/srv/m.gguf"}, PREFIX)
    assert found["refused"].startswith(
        "llama_model_path is /srv/m.gguf, for which h reports a value that is not possible ("
    )
    assert found["refused"].isprintable()


@pytest.mark.parametrize(
    "entry", [{"error": "\x1b[2J\n"}, {"closed": "/a\x1b[2J", "bytes": 5}], ids=["error", "closed"]
)
def test_a_report_of_a_projector_does_not_control_the_screen(entry):
    given = {"llama_model_path": "/srv/m.gguf", "llama_model_mmproj": {"path": "/srv/p.gguf"}}
    answer = {"paths": {"/srv/p.gguf": entry}, "summary": SUMMARY, "closed": None}
    refused = run(lambda **_arguments: answer, given, PREFIX)[0]["refused"]
    assert re.search(r"/srv/p\.gguf.*\\x1b\[2J", refused)
    assert refused.isprintable()


def test_a_host_that_is_not_contacted_is_not_asked(server, repo, call):
    found, action = run(call, {"llama_model_huggingface": {"repo": REPO, "quantisation": "Q4_K_M"}})
    assert found["files"][0]["role"] == "model"
    assert action.ran == []


@pytest.mark.parametrize("role", ["model", "mmproj", "draft"])
def test_a_model_that_ollama_has_on_the_host_is_used_there(tmp_path, call, monkeypatch, role):
    """Where its blob is missing, or has not all bytes yet, the registry is asked."""
    content = gguf_files.model(CLIP) if role == "mmproj" else gguf_files.model()
    layer = {"mediaType": ollama.MEDIA_TYPES[role], "digest": f"sha256:{'a' * 64}", "size": len(content)}
    manifest = tmp_path / "manifests" / "127.0.0.1:1" / "library" / "m" / "1"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [layer]}))
    blob = tmp_path / "blobs" / f"sha256-{'a' * 64}"
    blob.parent.mkdir()
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    closed = []
    monkeypatch.setattr(local_models.host, "closed_to", lambda account, path: closed[0] if closed else None)
    name = "http://127.0.0.1:1/library/m:1"
    given = {"llama_model_path": "/m.gguf", f"llama_model_{role}": {"ollama": name}}
    if role == "model":
        given = {"llama_model_ollama": name}

    def find():
        return run(operators(call), given, str(tmp_path / "prefix"), "nobody")[0]

    for stored in (None, content[:-1]):
        if stored:
            blob.write_bytes(stored)
        assert re.search(r"whose manifest http://127\.0\.0\.1:1/\S+ cannot be read", find()["refused"])
    blob.write_bytes(content)
    found = find()
    file_name = f"m-1{'' if role == 'model' else f'-{role}'}.gguf"
    file = SourceFile(file_name, len(content), None, "a" * 64, str(blob))
    assert found["files"] == [{**file._asdict(), "role": role}]
    header = found["summary"] if role == "model" else found["further"][role]
    assert header["architecture"] == ("clip" if role == "mmproj" else "llama")
    closed.append(str(tmp_path / "blobs"))
    if role == "model":
        assert find()["closed"] == closed[0]
    else:
        said = f"llama_model_{role}.ollama is {name}, but its service cannot read {closed[0]}"
        assert said in find()["refused"]


def test_a_model_of_the_operator_and_its_projector(tmp_path, call, open_files):
    path, projector = tmp_path / "m.gguf", tmp_path / "p.gguf"
    for file in (path, projector):
        file.write_bytes(gguf_files.model())
    given = {"llama_model_path": str(path), "llama_model_mmproj": {"path": str(projector)}}

    def host(**arguments):
        if "path" in arguments:
            return {"summary": header_summary.summarize(gguf.read_path(str(path))), "closed": None}
        return call(**arguments)

    found, action = run(host, given, PREFIX)
    assert action.ran == [resolver.MODULE, resolver.READER]
    assert [(file["role"], file["path"], file["bytes"]) for file in found["files"]] == [
        ("model", str(path), path.stat().st_size),
        ("mmproj", str(projector), projector.stat().st_size),
    ]
    projector.unlink()
    refused = run(host, given, PREFIX)[0]["refused"]
    assert refused.startswith(f"llama_model_mmproj.path is {projector}, which cannot be read on the head: No such")


@pytest.mark.parametrize("account, closed", [("nobody", True), (None, False)])
def test_a_projector_in_a_private_folder_is_closed_to_another_account(tmp_path, call, account, closed):
    """Services of a user run as the account that connects, which has its models in its home."""
    (tmp_path / "home").mkdir(mode=0o700)
    projector = tmp_path / "home" / "p.gguf"
    projector.write_bytes(gguf_files.model(CLIP))
    given = {"llama_model_path": "/m.gguf", "llama_model_mmproj": {"path": str(projector)}}
    accounts = []

    def host(**arguments):
        accounts.append(arguments.get("account"))
        return operators(call)(**arguments)

    found = run(host, given, PREFIX, account)[0]
    assert set(accounts) == {account}
    assert ("its service cannot read" in found.get("refused", "")) == closed


def test_headers_of_a_projector_and_of_a_draft_model_are_read_wherever_they_are(
    tmp_path, call, server, library, open_files
):
    """On the head, on the controller and on a server. A projector in place of a draft model, and the other way round, is not planned with."""
    for name, content in (("p.gguf", gguf_files.model(CLIP)), ("d.gguf", gguf_files.model())):
        (tmp_path / name).write_bytes(content)
    (library / "4b.mmproj").write_bytes(gguf_files.model(CLIP))

    def find(**given):
        given = {"llama_model_path": "/m.gguf", **given}
        return run(operators(call), given, str(tmp_path / "prefix"))[0]["further"]

    projector, draft, name = str(tmp_path / "p.gguf"), str(tmp_path / "d.gguf"), f"{server.url}/library/gemma3:4b"
    for kind in ("path", "copy", "ollama"):
        places = (name, name) if kind == "ollama" else (projector, draft)
        found = find(llama_model_mmproj={kind: places[0]}, llama_model_draft={kind: places[1]})
        assert {role: one["architecture"] for role, one in found.items()} == {"mmproj": "clip", "draft": "llama"}
        assert model_source.check({"further": found}) is None
    assert find(llama_model_mmproj={"path": draft}, llama_model_draft={"path": projector}) == {}
    assert find(llama_model_mmproj={"copy": draft}) == {}
    assert find() == {}


@pytest.mark.parametrize("role, layers", [("draft", 61), ("model", None)])
def test_a_part_of_a_model_is_read_as_a_draft_model_and_not_as_the_model(tmp_path, open_files, role, layers):
    """Wherever it is: on the controller, and downloaded on the head."""
    keys = [(key, *rest) for key, *rest in gguf_files.LLAMA if key != "llama.block_count"]
    keys.append(("llama.block_count", gguf_files.U32, 61))
    content = gguf_files.model(keys, [("token_embd.weight", (64, 32), 0), ("blk.60.attn_q.weight", (64, 64), 1)])
    (tmp_path / "mtp.gguf").write_bytes(content)
    record = {
        **{"schema": 1, "asked": {"url": ["https://h/mtp.gguf"], "checksum": [], "role": role}, "revision": None},
        "source": "url:https://h/mtp.gguf",
        "resolved": [{"name": "mtp.gguf", "bytes": len(content), "sha256": None}],
    }
    (tmp_path / download_record.RECORD).write_text(json.dumps(record))
    stored = local_models.report([str(tmp_path)], [], [], "nobody")["folders"][str(tmp_path)]
    assert (stored["summary"] or {}).get("layers") == layers
    copy = {"copy": str(tmp_path / "mtp.gguf")}
    if layers:
        request = request_of(llama_model_path="/m.gguf", llama_model_draft=copy)
        assert lookup.look_up(Query(request.draft), 20).summary["layers"] == layers
    else:
        request = request_of(llama_model_copy=copy["copy"])
        assert "it claims 61 layers and holds 2 tensors" in refusal(looked_up, request)


def test_planning_refuses_what_it_cannot_read_itself(call):
    assert run(call, {})[0] == {"changed": False}


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
    monkeypatch.setattr(local_models.host, "closed_to", lambda account, path: "/closed")
    assert run(call, given, prefix, "llamacpp")[0]["closed"] == "/closed"


# The playbook


@pytest.mark.programs
def test_a_plan_of_a_declared_host_asks_the_hub_and_touches_no_host(server, repo, tmp_path):
    (tmp_path / "hosts.yml").write_text(
        json.dumps(
            {
                "llama_cluster": {
                    "children": {"llama_head": {"hosts": {"nowhere.invalid": {}}}, "llama_workers": {"hosts": {}}},
                    "vars": {
                        "llama_hardware": {"memory_mib": 65536},
                        "llama_model_huggingface": {"repo": REPO, "quantisation": "Q8_0"},
                        "llama_model_mmproj": {"huggingface": {"repo": REPO}},
                    },
                }
            }
        )
    )
    root = Path(__file__).resolve().parents[2]
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [
            str(program),
            "playbooks/plan.yml",
            "-i",
            str(tmp_path / "hosts.yml"),
            "-e",
            f"llama_plan_path={tmp_path}/plan.json",
        ],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    folder = "/opt/llamacpp/models/unsloth--some-model-GGUF--Q8_0-"
    assert [file["role"] for file in plan["model"]["files"]] == ["model"] * 2 + ["mmproj"]
    assert all(file["path"].startswith(folder) for file in plan["model"]["files"][:2])
    assert plan["model"]["fetched_by"] == "head"
    assert plan["model"]["revision"] == play.commit_of(REPO)
    argv = plan["head"]["argv"]
    assert argv[argv.index("-m" if "-m" in argv else "--model") + 1] == plan["model"]["files"][0]["path"]
    assert argv[argv.index("--mmproj") + 1] == plan["model"]["files"][2]["path"]


# The plan


def planned(cluster, source, offered=(), sizes=None, **variables):
    """A plan of a model on Hugging Face, with what is found there."""
    own = cluster.hosts["head"]["variables"]
    own.update(llama_model_known_answer=None, llama_model_huggingface=source, **variables)
    summary = cluster.model["summary"]
    size = sizes or sum(summary["layer_bytes"]) + summary["input_bytes"] + summary["output_bytes"]
    url = f"https://huggingface.co/{REPO}/resolve/{'a' * 40}/m.gguf"
    cluster.model.update(
        files=[{"name": "m.gguf", "url": url, "bytes": size, "sha256": "b" * 64, "role": "model"}],
        sources=[{"role": "model", "source": f"huggingface:{REPO}@{'a' * 40}", "revision": "a" * 40}],
        offered=[{"quantisation": name, "bytes": bytes_} for name, bytes_ in offered],
    )
    return cluster.plan()


def test_a_plan_says_which_files_are_fetched_and_what_is_recorded(pair, big_model):
    pair.model = {"summary": big_model, "closed": None}
    model = planned(pair, {"repo": REPO, "quantisation": "Q4_K_M"})["model"]
    source = request_of(llama_model_huggingface={"repo": REPO, "quantisation": "Q4_K_M"}).source
    folder = model_source.folder(PREFIX, source)
    assert model["path"] == model["files"][0]["path"] == f"{folder}/m.gguf"
    assert (model["revision"], model["fetched_by"]) == ("a" * 40, "head")
    (record,) = model["records"]
    assert record["path"] == f"{folder}/.source.json"
    assert download_record.problem_of_record(record) is None
    assert record["asked"] == model_source.asked(source)
    assert [entry["name"] for entry in record["resolved"]] == ["m.gguf"]


def test_a_plan_keeps_its_id_where_its_files_come_from_elsewhere(pair, big_model):
    """Another mirror in HF_ENDPOINT, or another controller with a copy in another folder."""
    pair.model = {"summary": big_model, "closed": None}
    planned(pair, {"repo": REPO, "quantisation": "Q4_K_M"})
    here = completed(pair)
    there = json.loads(json.dumps(here).replace("https://huggingface.co/", "https://mirror.example/"))
    assert here["model"]["files"] != there["model"]["files"]
    assert here["hosts"]["head"]["model"] != there["hosts"]["head"]["model"]
    assert identity(here) == identity(there)
    other = json.loads(json.dumps(here).replace("b" * 64, "c" * 64))
    assert identity(here) != identity(other)


def test_folders_of_sources_differ_where_their_variables_do(tmp_path):
    requests = [
        on_huggingface(quantisation="Q4_K_M"),
        on_huggingface(quantisation="Q4_K_M", revision="v2"),
        on_huggingface(files=["Q4_K_M.gguf"]),
        request_of(llama_model_url=["http://h/m.gguf"]),
        request_of(llama_model_url=["http://h/m.gguf"], llama_model_checksum=["sha256:" + "a" * 64]),
        request_of(llama_model_ollama="m:1"),
        request_of(llama_model_copy="m.gguf"),
        request_of(llama_model_copy="m.gguf", llama_model_checksum=["sha256:" + "a" * 64]),
    ]
    folders = [model_source.folder(PREFIX, request.source) for request in requests]
    assert len(set(folders)) == len(folders)
    assert all(folder.startswith(f"{PREFIX}/models/") and " " not in folder for folder in folders)
    further = request_of(llama_model_path="/m", llama_model_mmproj={"copy": "m.gguf"})
    assert model_source.folder(PREFIX, further.mmproj) not in folders


def test_the_largest_quantisation_that_fits_is_named(pair, big_model):
    pair.model = {"summary": big_model, "closed": None}
    own = sum(big_model["layer_bytes"]) + big_model["input_bytes"] + big_model["output_bytes"]
    offered = [(f"Q{index}_K", own * index // 20) for index in range(1, 21)]
    for host in pair.hosts.values():
        host["facts"]["memory_mib"] = 24576
    refused = planned(pair, {"repo": REPO, "quantisation": "Q20_K"}, offered)
    (sentence,) = [
        reason for reason in refused["reasons"] if "set quantisation in llama_model_huggingface to" in reason
    ]
    named = int(sentence.split("huggingface to Q")[1].split("_K")[0])
    assert 1 < named < 20
    assert "the largest of its repository that fits" in sentence
    assert "in proportion" in sentence
    for index, fits in ((named, True), (named + 1, False)):
        pair.model["summary"] = as_json(model_source.scaled(summary.parse(big_model), own * index // 20))
        assert planned(pair, {"repo": REPO, "quantisation": f"Q{index}_K"})["fits"] is fits


def test_files_go_where_a_quantisation_is_named(pair, big_model):
    """Both together are refused."""
    pair.model = {"summary": big_model, "closed": None}
    for host in pair.hosts.values():
        host["facts"]["memory_mib"] = 24576
    refused = planned(pair, {"repo": REPO, "files": ["m-Q8_0.gguf"]}, [("Q1_0", 4 << 30)])
    said = "set quantisation in llama_model_huggingface to Q1_0 and remove files from it, the largest of its repository"
    assert any(said in reason for reason in refused["reasons"])


def test_no_quantisation_is_named_where_none_fits(pair, big_model):
    pair.model = {"summary": big_model, "closed": None}
    for host in pair.hosts.values():
        host["facts"]["memory_mib"] = 2048
    refused = planned(pair, {"repo": REPO, "quantisation": "Q8_0"}, [("Q7_0", (80 << 30) - 1)])
    assert not any("set quantisation" in reason for reason in refused["reasons"])


def test_a_scaled_summary_is_one(big_model):
    whole = {**big_model, "expert_bytes": big_model["layer_bytes"], "largest_tensor_bytes": 8}
    small = model_source.scaled(summary.parse(whole), 40 << 30)
    assert header_summary.problem(as_json(small)) is None
    assert small.size == 40 << 30
    assert small._replace(bytes=None).size <= 40 << 30


def test_without_a_summary_of_names_a_quantisation_cannot_be_planned_offline(pair, big_model):
    pair.model = {}
    own = pair.hosts["head"]["variables"]
    own.update(llama_model_known_answer=None, llama_model_gguf_summary=big_model)
    own["llama_model_huggingface"] = {"repo": REPO, "quantisation": "Q4_K_M"}
    assert "the names of its files are not known" in pair.reason()
    assert pair.reason().endswith("or give files in llama_model_huggingface")
    own["llama_model_huggingface"] = {"repo": REPO, "files": ["m.gguf"]}
    for further, remedy in (
        ({"huggingface": {"repo": REPO}}, "or give files in llama_model_mmproj.huggingface"),
        ({"ollama": "m:1"}, "or set url or path in llama_model_mmproj"),
    ):
        own["llama_model_mmproj"] = further
        assert pair.reason().endswith(remedy)
    own["llama_model_mmproj"] = None
    own["llama_model_huggingface"] = {"repo": REPO, "files": ["x/m-00002-of-00002.gguf"]}
    model = pair.plan()["model"]
    assert [file["name"] for file in model["files"]] == ["x/m-00001-of-00002.gguf", "x/m-00002-of-00002.gguf"]
    assert [(file["url"], file["bytes"]) for file in model["files"]] == [(None, None)] * 2
    assert (model["revision"], model["fetched_by"], model["records"]) == (None, "head", [])
    assert model["source"] == f"huggingface:{REPO}@main"
    for given, name in (
        ({"llama_model_url": ["http://h/m.gguf"]}, "m.gguf"),
        ({"llama_model_url": ["http://h/a%20b.gguf?download=true"]}, "a b.gguf"),
        ({"llama_model_url": ["http://h/m%2B.gguf?download=true"]}, "m+.gguf"),
        ({"llama_model_copy": "/srv/c.gguf"}, "c.gguf"),
        (
            {
                "llama_model_ollama": "m:1",
                "llama_model_gguf_summary": {**big_model, "files": [{"name": "o.gguf", "bytes": 1}]},
            },
            "o.gguf",
        ),
    ):
        own.update(llama_model_huggingface=None, llama_model_url=None, llama_model_copy=None, **{})
        own.update(given)
        model = pair.plan()["model"]
        assert model["files"][0]["name"] == name
        assert model["fetched_by"] == ("controller" if "llama_model_copy" in given else "head")


def test_a_projector_and_a_draft_model_are_given_to_llama_server_and_not_counted(pair, big_model):
    pair.model = {"summary": big_model, "closed": None}
    further = {"llama_model_mmproj": {"path": "/srv/p.gguf"}, "llama_model_draft": {"path": "/srv/d.gguf"}}
    plan = planned(pair, {"repo": REPO, "quantisation": "Q4_K_M"}, **further)
    argv = plan["head"]["argv"]
    assert argv[argv.index("--mmproj") + 1] == "/srv/p.gguf"
    assert argv[argv.index("--model-draft") + 1] == "/srv/d.gguf"
    (head,) = (service for service in plan["hosts"]["head"]["services"] if service["kind"] == "head")
    assert head["reads"][:3] == [plan["model"]["path"], "/srv/d.gguf", "/srv/p.gguf"]
    assert all("llama_model_mmproj" in " ".join(entry["without"]) for entry in plan["placement"])
    assert all("llama_model_draft" in " ".join(entry["without"]) for entry in plan["placement"])


def test_a_further_model_that_services_cannot_see_is_named_by_its_own_variable(local, big_model):
    given = {"llama_model_path": "/srv/m.gguf", "llama_model_mmproj": {"path": "/tmp/p.gguf"}}
    local.hosts["here"]["variables"].update(llama_model_known_answer=None, **given)
    local.model = {"summary": big_model, "closed": None}
    assert "llama_model_mmproj names '/tmp/p.gguf': services cannot see /tmp" in local.reason()


@pytest.mark.parametrize(
    "given, said",
    [
        (
            {"llama_server_extra_args": ["--mmproj", "/x.gguf"]},
            "llama_model_mmproj.path is set, and --mmproj is given to",
        ),
        ({"llama_server_environment": {"LLAMA_ARG_MMPROJ": "/x.gguf"}}, "and LLAMA_ARG_MMPROJ is given to"),
    ],
)
def test_a_further_model_is_given_once(pair, big_model, given, said):
    pair.model = {"summary": big_model, "closed": None}
    refused = planned(pair, {"repo": REPO}, llama_model_mmproj={"path": "/srv/p.gguf"}, **given)
    assert said in refused["reasons"][0]


@pytest.mark.parametrize(
    "files, said",
    [
        ([{"name": "a;b.gguf"}], "is no name for a file of a model on the head"),
        ([{"name": f"{'a' * 246}.gguf"}], "is no name for a file of a model on the head"),
        ([{"name": "m.gguf", "url": "file:///etc/x y"}], "files[0].url is"),
        ([{"name": "m.gguf", "sha256": "x"}], "files[0].sha256 is 'x'"),
        ([{"name": "m.gguf", "path": "relative"}], "files[0].path is 'relative'"),
        ([{"name": "m.gguf", "role": "other"}], "files[0].role is 'other'"),
        ([{"name": "m.gguf", "bytes": -1}], "files[0].bytes is -1"),
    ],
)
def test_what_cannot_have_been_found_is_refused(pair, big_model, files, said):
    pair.model = {"summary": big_model, "closed": None}
    pair.model["files"] = [{"role": "model", **file} for file in files]
    pair.hosts["head"]["variables"].update(llama_model_known_answer=None, llama_model_huggingface={"repo": REPO})
    reason = pair.reason()
    assert (
        f"llama_model_huggingface is huggingface:{REPO}@main, for which the head reports a value that is not possible ("
        in reason
    )
    assert said in reason


def test_a_person_reads_where_a_model_comes_from(pair, big_model):
    pair.model = {"summary": big_model, "closed": None}
    plan = planned(pair, {"repo": REPO, "quantisation": "Q4_K_M"}, sizes=3 << 30)
    said = f"huggingface:{REPO}@{'a' * 12}, 1 file, 3.00 GiB, fetched by the head"
    assert f"  source   {said}" in plan_text.plan_table(typed(plan))
    assert f"from {said}" in " ".join(plan_text.plan_page(typed(plan)).split())
    pair.hosts["head"]["variables"].update(llama_model_huggingface=None, llama_model_path="/srv/m.gguf")
    pair.model = {"summary": big_model, "closed": None}
    assert "source" not in plan_text.plan_table(typed(pair.plan()))


def test_what_was_refused_while_it_was_looked_for_is_the_reason_of_the_plan(pair):
    pair.hosts["head"]["variables"].update(llama_model_known_answer=None, llama_model_huggingface={"repo": REPO})
    pair.model = {"refused": f"llama_model_huggingface has the repo {REPO}, which does not exist"}
    assert pair.plan()["reasons"] == [pair.model["refused"]]
