"""What clients of the server are given. Whether the tools take it is tried in tests/integration/test_https.py and by hand."""

import html
import json
import os
import subprocess

import pytest
import yaml
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import clients as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import clients
from conftest import refused, typed
from test_report import EVIL, Tags
from test_several import DEEP, SMALL, several

URL = "https://192.0.2.10:8080"
MODELS = (clients.Served("first.gguf", 32768), clients.Served('it\'s a "second" one', 4096))
WRITERS = {name: writer for client in clients.CLIENTS for name, writer in client.files.items()}


@pytest.fixture
def plan(pair):
    """A head that serves a network by HTTPS, with keys."""
    pair.hosts["head"]["facts"]["firewall"] = "nftables"
    pair.set(
        "head",
        llama_server_host="192.0.2.10",
        llama_server_allowed=["192.0.2.0/24"],
        llama_server_api_key_file="/etc/keys",
        llama_server_tls_certificate_file="/etc/tls.pem",
        llama_server_tls_key_file="/etc/tls.key",
        llama_server_context=4096,
        llama_server_parallel=2,
        llama_build_cmake_options={"LLAMA_BUILD_UI": "ON"},
    )
    return typed(pair.plan())


def read(name):
    return (json.loads if name.endswith("json") else yaml.safe_load)(WRITERS[name](URL, MODELS))


def test_each_tool_knows_every_model_and_its_context():
    sizes = [(model.name, model.context) for model in MODELS]
    provider = read("opencode.json")["provider"]["llamacpp"]
    assert [(name, entry["limit"]["context"]) for name, entry in provider["models"].items()] == sizes
    entries = read("continue.yaml")["models"]
    assert [(entry["model"], entry["defaultCompletionOptions"]["contextLength"]) for entry in entries] == sizes
    known = read("aider.model.metadata.json")
    assert [(name.removeprefix("openai/"), entry["max_input_tokens"]) for name, entry in known.items()] == sizes
    assert read("claude-code.json")["env"]["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == MODELS[0].name
    assert read("aider.conf.yml")["model"] in known


def test_the_url_is_the_server_s_and_the_key_is_the_environment_s():
    for name in WRITERS:
        text = WRITERS[name](URL, MODELS)
        assert (URL in text) is (name != "aider.model.metadata.json"), name
        assert (clients.KEY in text) is (name in ("opencode.json", "continue.yaml", "claude-code.json", "curl.sh")), (
            name
        )
    assert read("claude-code.json")["env"]["ANTHROPIC_BASE_URL"] == URL
    for text in (client.command for client in clients.CLIENTS if client.name in ("Open WebUI", "Aider")):
        assert f'OPENAI_API_KEY="${clients.KEY}"' in text


def test_curl_s_command_line_has_no_key(tmp_path):
    (tmp_path / "curl").write_text('#!/bin/sh\nfor word; do echo "$word" >> words; done\ncat > read\n')
    (tmp_path / "curl").chmod(0o755)
    models = MODELS[::-1]
    subprocess.run(
        ["sh", "-c", WRITERS["curl.sh"](URL, models), "curl.sh", "--cacert", "ca.pem"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", clients.KEY: "a key"},
        check=True,
    )
    words = (tmp_path / "words").read_text().splitlines()
    assert (tmp_path / "read").read_text() == "Authorization: Bearer a key"
    assert words[words.index("-H") + 1] == "@-"
    assert words[-3:] == [f"{URL}/v1/chat/completions", "--cacert", "ca.pem"]
    assert json.loads(words[words.index("-d") + 1])["model"] == models[0].name


def test_a_model_has_the_name_and_the_context_that_the_server_gives_it(plan):
    assert clients.models_of(plan) == (clients.Served(plan.model.path.rsplit("/", 1)[1], 2048),)
    named = plan._replace(head=plan.head._replace(argv=(*plan.head.argv, "--alias", "mine")))
    assert clients.models_of(named)[0].name == "mine"


def test_of_several_models_each_has_the_name_by_which_the_router_knows_it(pair):
    plan = typed(several(pair, SMALL, DEEP).plan())
    assert clients.models_of(plan) == (clients.Served("small", 4096), clients.Served("deep", 256))
    assert "They take turns" in clients.files_of(plan, "")[clients.PAGE]


def test_the_page_says_where_the_chat_is_where_a_key_is_and_what_a_private_authority_takes(plan, local):
    page = clients.files_of(plan, "")[clients.PAGE]
    assert Tags(page).references == [f"{URL}/", *WRITERS]
    assert "A key is a line of /etc/keys on head." in page
    assert page.count("private authority") == len(clients.CLIENTS)
    assert "ssh -N" not in page
    assert all(f"<pre>{client.command}\n</pre>" in html.unescape(page) for client in clients.CLIENTS)
    page = clients.files_of(typed(local.plan()), "")[clients.PAGE]
    assert "They take turns" not in page
    assert "ssh -N -L 8080:127.0.0.1:8080 here" in page
    assert "The server asks for none" in page
    assert "private authority" not in page


def test_clients_may_reach_the_server_elsewhere(local):
    files = clients.files_of(typed(local.plan()), "https://head.lan/llama/v1/")
    assert "OPENAI_API_BASE_URL=https://head.lan/llama/v1\n" in files["open-webui.env"]
    assert "ssh -N" not in files[clients.PAGE]
    assert "private authority" in files[clients.PAGE]
    for wrong in ("head.lan:8080", "https://me:secret@head.lan", "http://a b", "http://a/$(b)", "http://]"):
        with pytest.raises(Refusal, match=r"llama_clients_url is .*, which is not a URL: use one like"):
            clients.files_of(typed(local.plan()), wrong)


def test_the_page_leads_to_no_chat_that_is_not_compiled_in(pair):
    page = clients.files_of(typed(pair.plan()), "")[clients.PAGE]
    assert Tags(page).references == [*WRITERS]
    assert "compiled without a page of its own. Give a tool the URL" in page


def test_nothing_of_a_plan_becomes_part_of_the_page(plan):
    hosts = {EVIL: plan.hosts["head"]}
    said = plan._replace(cluster=EVIL, head=plan.head._replace(host=EVIL, api_key_file=EVIL), hosts=hosts)
    assert (
        Tags(clients.files_of(said, "")[clients.PAGE]).opened == Tags(clients.files_of(plan, "")[clients.PAGE]).opened
    )


def perform(plan, path):
    return action.ActionModule.perform(None, action.Arguments(plan, str(path)))


def test_the_folder_is_made_and_what_it_has_is_replaced(pair, tmp_path):
    perform(pair.plan(), tmp_path / "new" / "clients")
    written = {path.name: path.read_text() for path in (tmp_path / "new" / "clients").iterdir()}
    assert written == clients.files_of(typed(pair.plan()), "")
    pair.hosts["head"]["variables"]["llama_server_port"] = 9090
    perform(pair.plan(), tmp_path / "new" / "clients")
    assert ":9090/v1" in (tmp_path / "new" / "clients" / "open-webui.env").read_text()


def test_without_a_plan_or_a_folder_nothing_is_written(pair, tmp_path):
    with pytest.raises(Refusal, match=r"so there is nothing to connect to: it is too small"):
        perform(refused("llama_cluster", Refusal("it is too small")), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(AnsibleActionFail, match=r"llama_clients_path is .*, which cannot be made .*Use a folder"):
        perform(pair.plan(), tmp_path / "file" / "clients")
