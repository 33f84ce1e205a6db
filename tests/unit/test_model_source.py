"""From variables to the model of a plan."""

import json

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ModelSource
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from conftest import identity, typed
from support.model_sources import PREFIX, REPO, on_huggingface, refusal, request_of
from support.models import as_json
from support.rollbacks import completed


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "no model is set: set one of llama_model_path, llama_model_huggingface"),
        ({"path": "/m.gguf", "url": "http://h/m.gguf"}, "llama_model_path and llama_model_url are set: keep only"),
        ({"path": "m.gguf"}, "llama_model_path is 'm.gguf': use the absolute path of a file on the head"),
        ({"path": "/srv/modèle.gguf"}, "whose file name is not allowed"),
        ({"path": "/m.gguf", "mmproj": "/-p.gguf"}, "llama_model_mmproj is '/-p.gguf', whose file name is not allowed"),
        ({"huggingface": {"repo": "model"}}, "sets repo to 'model': use OWNER/NAME"),
        (
            {"huggingface": {"repo": "a/b", "quantisation": "Q4", "files": ["x.gguf"]}},
            "has both quantisation and files: remove one of them",
        ),
        ({"huggingface": {"repo": "a/b", "revision": "-x"}}, "sets revision to '-x'"),
        ({"huggingface": {"repo": "a/b", "files": ["../x.gguf"]}}, "has '../x.gguf' in files"),
        (
            {"huggingface": {"repo": "a/b", "files": ["x.gguf", "y.gguf"]}},
            "has x.gguf and y.gguf, which are not parts of the same model",
        ),
        ({"url": "ftp://h/m.gguf"}, "is 'ftp://h/m.gguf': use the http:// or https:// address"),
        ({"url": "http://h/"}, "use the http:// or https:// address of a GGUF file"),
        (
            {"url": "http://h/m.gguf", "checksum": ["md5:abc"]},
            "llama_model_checksum has 'md5:abc': use sha256: followed by 64 hexadecimal digits",
        ),
        (
            {"path": "/m.gguf", "checksum": ["sha256:" + "a" * 64]},
            "llama_model_checksum is set, but applies only to llama_model_url and llama_model_copy",
        ),
        ({"path": "/m.gguf", "alias": "a,b"}, "llama_model_alias is 'a,b': use at most 128 letters, digits and . _ /"),
        ({"ollama": "a b"}, "llama_model_ollama is 'a b': use [HOST/NAMESPACE/]NAME:TAG"),
        ({"ollama": "hf.co/a/b:Q4"}, "a repository on Hugging Face: use OWNER/NAME:QUANTISATION"),
        ({"path": "/m.gguf", "draft": "d.gguf"}, "llama_model_draft is 'd.gguf': use /PATH on the head, http://"),
        ({"path": "/m.gguf", "mmproj": "a/b:-x"}, "llama_model_mmproj sets quantisation to '-x'"),
    ],
)
def test_variables_that_cannot_be_are_refused(given, said):
    assert said in refusal(request_of, **{f"llama_model_{source}": value for source, value in given.items()})


@pytest.mark.parametrize(
    "given, whole",
    [
        ("gemma3", "registry.ollama.ai/library/gemma3:latest"),
        ("me/gemma3:4b", "registry.ollama.ai/me/gemma3:4b"),
        ("registry.lan:5000/library/gemma3:4b", "registry.lan:5000/library/gemma3:4b"),
    ],
)
def test_a_name_of_ollama_is_completed_as_ollama_does(given, whole):
    assert request_of(llama_model_ollama=given).source.ollama == whole


@pytest.mark.parametrize(
    "text, source",
    [
        ("/srv/p.gguf", {"path": "/srv/p.gguf"}),
        ("https://h/p.gguf", {"url": "https://h/p.gguf"}),
        ("file:/home/me/p.gguf", {"copy": "/home/me/p.gguf"}),
        ("ollama:gemma3:4b", {"ollama": "registry.ollama.ai/library/gemma3:4b"}),
        ("a/b", {"huggingface": ("a/b", None, (), "main")}),
        ("a/b:Q8_0", {"huggingface": ("a/b", "Q8_0", (), "main")}),
        ("a/b/c/p.gguf", {"huggingface": ("a/b", None, ("c/p.gguf",), "main")}),
    ],
)
def test_a_text_says_where_a_projector_comes_from(text, source):
    found = request_of(llama_model_path="/m.gguf", llama_model_mmproj=text).mmproj
    assert found == ModelSource("mmproj", "llama_model_mmproj", **source)


def planned(cluster, source, offered=(), sizes=None, **variables):
    """A plan of a model on Hugging Face, with what is found there."""
    own = cluster.hosts["head"]["variables"]
    own.update(llama_model_known_answer=None, llama_model_huggingface=source, **variables)
    summary = cluster.model["summary"]
    size = sizes or sum(summary["layer_bytes"]) + summary["input_bytes"] + summary["output_bytes"]
    url = f"https://huggingface.co/{REPO}/resolve/{'a' * 40}/m.gguf"
    known = {"name": "m.gguf", "role": "model", "url": url, "bytes": size}
    cluster.model.update(
        files=[{**known, "sha256": "b" * 64, "revision": "a" * 40}],
        offered=[{"name": name, "bytes": bytes_} for name, bytes_ in offered],
    )
    return cluster.plan()


def test_a_plan_says_which_files_are_fetched(pair, big_model):
    pair.model = {"summary": big_model, "unreadable_path": None}
    model = planned(pair, {"repo": REPO, "quantisation": "Q4_K_M"})["model"]
    source = request_of(llama_model_huggingface={"repo": REPO, "quantisation": "Q4_K_M"}).source
    folder = model_source.model_folder(PREFIX, source)
    assert model["path"] == model["files"][0]["path"] == f"{folder}/m.gguf"
    assert model["revision"] == "a" * 40
    assert model["source"] == f"huggingface:{REPO}@{'a' * 40}"


def test_a_plan_keeps_its_id_where_its_files_come_from_elsewhere(pair, big_model):
    """Another mirror in HF_ENDPOINT, or another controller with a copy in another folder."""
    pair.model = {"summary": big_model, "unreadable_path": None}
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
        request_of(llama_model_url="http://h/m.gguf"),
        request_of(llama_model_url="http://h/m.gguf", llama_model_checksum=["sha256:" + "a" * 64]),
        request_of(llama_model_ollama="m:1"),
        request_of(llama_model_copy="m.gguf"),
        request_of(llama_model_copy="m.gguf", llama_model_checksum=["sha256:" + "a" * 64]),
    ]
    folders = [model_source.model_folder(PREFIX, request.source) for request in requests]
    assert len(set(folders)) == len(folders)
    assert all(folder.startswith(f"{PREFIX}/models/") and " " not in folder for folder in folders)
    further = request_of(llama_model_path="/m", llama_model_mmproj="file:m.gguf")
    assert model_source.model_folder(PREFIX, further.mmproj) not in folders


@pytest.mark.parametrize(
    "variables, alias",
    [
        ({"path": "/home/me/A b,c.gguf"}, "A-b-c"),
        ({"path": "/m/big-00001-of-00003.gguf"}, "big"),
        ({"path": "/m/x.gguf", "alias": "gpt-4o"}, "gpt-4o"),
        ({"huggingface": {"repo": "a/b-GGUF", "quantisation": "Q4_K_M"}}, "a/b-GGUF:Q4_K_M"),
        ({"huggingface": {"repo": "a/b-GGUF", "files": ["x.gguf"]}}, "a/b-GGUF"),
        ({"url": "http://h/d/m%20x.gguf"}, "m-x"),
        ({"ollama": "gemma3:4b"}, "gemma3:4b"),
        ({"copy": "models/m.gguf"}, "m"),
        ({"known_answer": {"layers": 4, "width": 64, "type": "f32"}}, "known-answer"),
    ],
)
def test_clients_see_a_name_and_no_path(variables, alias):
    request = request_of(**{f"llama_model_{name}": value for name, value in variables.items()})
    assert model_source.alias_of(request) == alias


def test_the_largest_quantisation_that_fits_is_named(pair, big_model):
    pair.model = {"summary": big_model, "unreadable_path": None}
    own = sum(big_model["layer_bytes"]) + big_model["input_bytes"] + big_model["output_bytes"]
    offered = [(f"Q{index}_K", own * index // 20) for index in range(1, 21)]
    for host in pair.hosts.values():
        host["facts"]["memory_mib"] = 24576
    refused = planned(pair, {"repo": REPO, "quantisation": "Q20_K"}, offered)
    said = "set quantisation in llama_model_huggingface to"
    (sentence,) = [reason for reason in refused["reasons"] if said in reason]
    named = int(sentence.split("huggingface to Q")[1].split("_K")[0])
    assert 1 < named < 20
    assert "the largest in the repository that fits" in sentence
    assert "in proportion" in sentence
    for index, fits in ((named, True), (named + 1, False)):
        pair.model["summary"] = as_json(model_source.scale_summary(header_summary.parse(big_model), own * index // 20))
        assert planned(pair, {"repo": REPO, "quantisation": f"Q{index}_K"})["fits"] is fits


def test_without_a_summary_of_names_a_quantisation_cannot_be_planned_offline(pair, big_model):
    pair.model = {}
    own = pair.hosts["head"]["variables"]
    own.update(llama_model_known_answer=None, llama_model_gguf_summary=big_model)
    own["llama_model_huggingface"] = {"repo": REPO, "quantisation": "Q4_K_M"}
    assert "its file names are unknown" in pair.reason()
    own["llama_model_huggingface"] = {"repo": REPO, "files": ["x/m-00002-of-00002.gguf"]}
    plan = pair.plan()
    model = plan["model"]
    assert [file["name"] for file in model["files"]] == ["x/m-00001-of-00002.gguf", "x/m-00002-of-00002.gguf"]
    (head,) = (service for service in plan["hosts"]["head"]["services"] if service["kind"] == "head")
    read = [file["path"] for file in model["files"]]
    assert head["reads"][:2] == read, "a part that is replaced has to be read again"
    assert [(file["url"], file["bytes"]) for file in model["files"]] == [(None, None)] * 2
    assert model["revision"] is None
    assert model["source"] == f"huggingface:{REPO}@main"
    of_ollama = {**big_model, "files": [{"name": "o.gguf", "bytes": 1}]}
    for given, name in (
        ({"llama_model_url": "http://h/m.gguf"}, "m.gguf"),
        ({"llama_model_url": "http://h/a%20b.gguf?download=true"}, "a b.gguf"),
        ({"llama_model_url": "http://h/m%2B.gguf?download=true"}, "m+.gguf"),
        ({"llama_model_copy": "/srv/c.gguf"}, "c.gguf"),
        ({"llama_model_ollama": "m:1", "llama_model_gguf_summary": of_ollama}, "o.gguf"),
    ):
        own.update({"llama_model_huggingface": None, "llama_model_url": None, "llama_model_copy": None, **given})
        assert pair.plan()["model"]["files"][0]["name"] == name


def test_a_projector_and_a_draft_model_are_given_to_llama_server(pair, big_model):
    pair.model = {"summary": big_model, "unreadable_path": None}
    further = {"llama_model_mmproj": "/srv/p.gguf", "llama_model_draft": "/srv/d.gguf"}
    plan = planned(pair, {"repo": REPO, "quantisation": "Q4_K_M"}, **further)
    argv = plan["head"]["argv"]
    assert argv[argv.index("--mmproj") + 1] == "/srv/p.gguf"
    assert argv[argv.index("--model-draft") + 1] == "/srv/d.gguf"
    (head,) = (service for service in plan["hosts"]["head"]["services"] if service["kind"] == "head")
    assert head["reads"][:3] == [plan["model"]["path"], "/srv/d.gguf", "/srv/p.gguf"]


def test_an_auxiliary_model_that_services_cannot_see_is_named_by_its_own_variable(local, big_model):
    given = {"llama_model_path": "/srv/m.gguf", "llama_model_mmproj": "/tmp/p.gguf"}
    local.hosts["here"]["variables"].update(llama_model_known_answer=None, **given)
    local.model = {"summary": big_model, "unreadable_path": None}
    assert "llama_model_mmproj names '/tmp/p.gguf', but services cannot see the host's /tmp" in local.reason()


def test_an_auxiliary_model_is_given_once(pair, big_model):
    pair.model = {"summary": big_model, "unreadable_path": None}
    given = {"llama_server_extra_args": ["--mmproj", "/x.gguf"]}
    refused = planned(pair, {"repo": REPO}, llama_model_mmproj="/srv/p.gguf", **given)
    assert "llama_model_mmproj is set, but llama_server_extra_args also has --mmproj" in refused["reasons"][0]


@pytest.mark.parametrize(
    "found, said",
    [
        ({"summary": {"a": 1}}, "architecture is missing"),
        ({"summary": [1]}, "it is a list"),
        ({"unreadable_path": "/home/\x1b[2J"}, "unreadable_path"),
        ({"files": [{"name": "a;b.gguf"}]}, "is not allowed as the name of a model file on the head"),
        ({"files": [{"name": "m.gguf", "url": "file:///etc/x y"}]}, "files[0].url is"),
        ({"files": [{"name": "m.gguf", "path": "relative"}]}, "files[0].path is 'relative'"),
    ],
)
def test_what_cannot_have_been_found_is_refused(pair, big_model, found, said):
    pair.model = {"summary": big_model, "unreadable_path": None, **found}
    for file in pair.model.get("files", ()):
        file.setdefault("role", "model")
    pair.hosts["head"]["variables"].update(llama_model_known_answer=None, llama_model_huggingface={"repo": REPO})
    reason = pair.reason()
    assert f"about the model (llama_model_huggingface is huggingface:{REPO}@main) does not match" in reason
    assert said in reason
    assert reason.isprintable()


def test_a_person_reads_where_a_model_comes_from(pair, big_model):
    pair.model = {"summary": big_model, "unreadable_path": None}
    plan = planned(pair, {"repo": REPO, "quantisation": "Q4_K_M"}, sizes=3 << 30)
    said = f"huggingface:{REPO}@{'a' * 12}, 1 file, 3.00 GiB"
    for text in (plan_text.plan_summary(typed(plan)), plan_text.plan_page(typed(plan))):
        assert f"from {said}" in " ".join(text.split())
    pair.hosts["head"]["variables"].update(llama_model_huggingface=None, llama_model_path="/srv/m.gguf")
    pair.model = {"summary": big_model, "unreadable_path": None}
    assert "\n  from " not in plan_text.plan_summary(typed(pair.plan()))


def test_what_was_refused_while_it_was_looked_for_is_the_reason_of_the_plan(pair):
    pair.hosts["head"]["variables"].update(llama_model_known_answer=None, llama_model_huggingface={"repo": REPO})
    pair.model = {"refused": f"llama_model_huggingface sets repo to {REPO}, which does not exist"}
    assert pair.plan()["reasons"] == [pair.model["refused"]]
