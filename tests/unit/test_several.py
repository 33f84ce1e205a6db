"""Several models that take turns: each planned as if it were alone, behind one llama-server."""

import json

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import KnownAnswerPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import merging, presets
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import html_page, plan_text
from conftest import complete, identity, known_answer_of, typed
from support.clusters import FORK, TREE, advisories_of, cards_of, model
from support.drift import drifts, typed_drifts

SMALL = {"name": "small", "known_answer": known_answer_of()}
DEEP = {
    "name": "deep",
    "aliases": ["gpt-4", "q:4b"],
    "known_answer": known_answer_of(layers=24),
    "context": 512,
    "parallel": 2,
    "idle_seconds": 900,
    "extra_args": ["--metrics", "--temp", "-1"],
}
ALONE = {
    "llama_model_known_answer": DEEP["known_answer"],
    "llama_server_context": 512,
    "llama_server_parallel": 2,
    "llama_server_idle_seconds": 900,
    "llama_server_extra_args": DEEP["extra_args"],
    "llama_model_alias": "",
}


def several(cluster, *entries, **variables):
    head = next(host for host in cluster.hosts.values() if "head" in host["groups"])
    head["variables"].update(
        llama_model_known_answer=None, llama_model_path=None, llama_models=list(entries), **variables
    )
    return cluster


def on_paper(name, gib, **more):
    """An entry with the header of a model."""
    return {"name": name, "path": f"/srv/{name}.gguf", "gguf_summary": model(gib, width=512, **more)}


def test_each_model_is_planned_as_if_it_were_alone(pair):
    pair.hosts["head"]["variables"].update(ALONE)
    alone = pair.plan()
    plan = several(
        pair,
        SMALL,
        DEEP,
        llama_server_context=8192,
        llama_server_parallel=1,
        llama_server_idle_seconds=None,
        llama_server_extra_args=[],
        llama_model_alias=None,
    ).accepted()
    one = typed_json.dump(typed(plan).per_model()[1])
    assert one["head"].pop("argv") == list(presets.model_argv(alone["head"]["argv"]))
    for key in ("placement", "estimate", "model", "auxiliary_models"):
        assert one[key] == alone[key]
    for key in ("context", "context_per_request", "idle_seconds", "devices", "cpu", "prompt_cache_mib"):
        assert one["head"][key] == alone["head"][key]
    assert (one["head"]["context"], one["head"]["context_per_request"]) == (512, 256)
    assert plan["placement"] == plan["head"]["models"][0]["placement"]


def test_the_router_has_nothing_of_a_model(pair):
    variables = {
        "llama_server_host": "192.0.2.10",
        "llama_server_api_key_file": "/etc/keys",
        "llama_server_environment": {"LLAMA_CACHE": "/srv/cache"},
    }
    head = several(pair, SMALL, DEEP, llama_server_allowed=["192.0.2.0/24"], **variables).plan()["head"]
    keys = "/run/credentials/llamacpp-server.service/api-keys"
    assert head["argv"][1:] == [
        *("--models-preset", "/opt/llamacpp/models.ini", "--models-max", "1", "--host", "192.0.2.10", "--port", "8080"),
        *("--api-key-file", keys, "--log-verbosity", "4"),
    ]
    assert not {name for name in head["environment"] if options.is_option_variable(name)}
    assert head["environment"]["LLAMA_CACHE"] == "/opt/llamacpp/models/none"
    assert head["launcher"][-1] == "--router"
    assert head["launcher"].count("--worker") == 2
    for own in head["models"]:
        assert not {"--port", "--host", "--api-key-file"} & set(own["argv"])
        assert own["argv"][own["argv"].index("--rpc") + 1] == "192.0.2.11:50052,192.0.2.12:50052"


def files_of(plan):
    """Name → what the head gets."""
    return {file["path"].rpartition("/")[2]: file for file in plan["hosts"]["head"]["files"]}


def test_the_head_gets_presets_and_all_models(pair):
    plan = complete(several(pair, SMALL, DEEP).plan())
    files = files_of(plan)
    assert {"known-answer-16x128-f32.gguf", "known-answer-24x128-f32.gguf"} <= {*files}
    text = files["models.ini"]["content"]
    argv = plan["head"]["models"][1]["argv"]
    deep = text.partition("\n\n")[2].splitlines()
    assert deep[:3] == ["[deep]", "alias = gpt-4,q:4b", f"rpc = {argv[argv.index('--rpc') + 1]}"]
    assert {"ctx-size = 512", "sleep-idle-seconds = 900", "metrics = true", "temp = -1"} <= {*deep}
    (service,) = [one for one in plan["hosts"]["head"]["services"] if one["kind"] == "head"]
    assert service["reads"][-1] == "/opt/llamacpp/models.ini"
    assert {one["model"]["path"] for one in plan["head"]["models"]} <= {*service["reads"]}
    assert service["process"] == plan["head"]["argv"]
    assert service["children"] == [own["argv"] for own in plan["head"]["models"]]
    more = complete(several(pair, SMALL, DEEP, {**SMALL, "name": "third"}).plan())
    assert files_of(more)["models.ini"]["content"].startswith(text)
    other = complete(several(pair, SMALL, {**DEEP, "context": 1024}).plan())
    assert len({identity(one) for one in (plan, more, other)}) == 3


def test_a_changed_model_or_command_line_restarts_the_server(pair):
    plan = complete(several(pair, SMALL, DEEP).plan())
    for path in ("/opt/llamacpp/models.ini", *(own["model"]["path"] for own in plan["head"]["models"])):
        found = drifts(plan)
        found["head"]["changed_files"] = [path]
        assert changes.decide(typed(plan), typed_drifts(found)).restarts["head"] == ["llamacpp-server"]


def of_two_sizes():
    """A small model that one card holds, and one that needs both."""
    return several(cards_of(1, 2), on_paper("one", 4, layers=8), on_paper("two", 30, layers=40))


def test_workers_serve_whichever_model_uses_them():
    plan = of_two_sizes().accepted()
    one, two = plan["head"]["models"]
    assert (len(one["placement"]), len(two["placement"])) == (1, 2)
    assert [plan["hosts"][name]["workers"][0]["used"] for name in ("gpu1", "gpu2")] == [True, True]
    used = [entry["endpoint"] for entry in two["placement"]]
    launcher = plan["head"]["launcher"]
    assert sorted(word for before, word in zip(launcher, launcher[1:]) if before == "--worker") == sorted(used)
    (name,) = {entry["host"] for entry in two["placement"]} - {entry["host"] for entry in one["placement"]}
    assert changes.absence_note(typed(plan), name) == "Requests for two fail until this host is back."
    assert changes.absence_note(typed(plan), one["placement"][0]["host"]).startswith("Requests for one, two fail")
    assert not plan["fallbacks"]
    assert not plan["no_fallback"]


def test_a_worker_that_others_run_is_used_where_one_of_the_models_uses_it():
    theirs = {"endpoint": "192.0.2.77:50052", "memory_mib": 24576, "host": "theirs", "backend": "cpu"}
    given = {"llama_external_workers": [theirs]}
    entries = on_paper("one", 4, layers=8), on_paper("two", 30, layers=40)
    plan = several(cards_of(1, 1), *entries, **given, llama_accept_advisories=["external-worker"]).accepted()
    used = [{entry["host"] for entry in one["placement"]} for one in plan["head"]["models"]]
    assert used == [{"gpu1"}, {"gpu1", "theirs"}]
    assert [worker["used"] for worker in plan["external_workers"]] == [True]


def test_caches_of_workers_hold_all_models():
    def cached(*entries):
        cluster = several(cards_of(1, 2), *entries)
        for host in cluster.hosts.values():
            host["facts"]["disk_gib"] = 64
        host = cluster.plan()["hosts"]["gpu1"]
        argv = host["services"][0]["argv"]
        return int(argv[argv.index("--limit-mib") + 1]) if host["workers"][0]["cache"] else None

    one, other = on_paper("one", 12, layers=8), on_paper("other", 12, layers=8)
    assert abs(cached(one, other) - 2 * cached(one)) <= 1
    assert cached(one, other, on_paper("third", 12, layers=8)) is None, "the disk is too small for three"


def test_caches_of_workers_are_filled_with_each_file_once(pair):
    for host in pair.hosts.values():
        host["facts"]["disk_gib"] = 64
    one, two = (
        {"name": name, "known_answer": known_answer_of(layers, 2304, "f16")}
        for name, layers in (("one", 4), ("two", 6))
    )

    def filled(*entries):
        hosts = several(pair, *entries).plan()["hosts"]
        return {name: hosts[name]["workers"][0]["prefill"] for name in ("worker1", "worker2")}

    alone = [filled(entry) for entry in (one, two)]
    both = filled(one, two)
    for name, prefill in both.items():
        parts = [own[name] for own in alone]
        assert prefill["tensors"] == [row for part in parts for row in part["tensors"]]
        assert len({row["model"] for row in prefill["tensors"]}) == 2
    assert filled(one, two, {**one, "name": "again"}) == both


def test_devices_of_the_head_are_not_hidden_from_a_model_that_uses_them(pair):
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    plan = typed(pair.plan())

    def environment(*wanted):
        heads = [plan.head._replace(backends=backends, environment=given) for backends, given in wanted]
        return merging._merge_environments([plan._replace(head=head) for head in heads])

    assert environment(((), hidden), ((), hidden)) == hidden
    assert environment(((), hidden), (("cuda",), {"X": "1"})) == {"X": "1"}
    with pytest.raises(
        Refusal, match="models in llama_models need both X=1 and X=2, but all models share one environment"
    ):
        environment((("cuda",), {"X": "1"}), (("cuda",), {"X": "2"}))


def test_a_model_that_fits_nowhere_is_refused_by_name():
    large = several(cards_of(1, 2), on_paper("one", 4, layers=8), on_paper("huge", 300, layers=40)).plan()
    assert large["refused"]
    assert not large["fits"]
    assert all(reason.startswith("huge in llama_models: ") for reason in large["reasons"])
    assert "it exceeds the devices' capacity by " in large["reasons"][0]
    assert [own["name"] for own in large["head"]["models"]] == ["one", "huge"]
    assert large["head"]["models"][0] == of_two_sizes().plan()["head"]["models"][0]


def test_what_is_to_be_done_has_the_words_of_an_entry():
    entries = on_paper("one", 4, layers=8), on_paper("two", 30, layers=40)
    cluster = several(cards_of(1, 2), *({**entry, "parallel": 4} for entry in entries))
    (met,) = advisories_of(cluster, "context-shared")
    assert met["message"].startswith("one and two in llama_models: parallel is 4, so ")
    assert met["remedy"].startswith("Set parallel to 1. Or add ")
    shared = "set llama_model_token_file, llama_server_port"
    assert (
        turns.with_entry_keys(f"{shared}, llama_model_draft and llama_server_extra_args")
        == f"{shared}, draft and extra_args"
    )


def test_an_advisory_of_one_model_names_it_and_of_all_does_not():
    cluster = of_two_sizes()
    for host in cluster.hosts.values():
        host["variables"].update(llama_release={**TREE, "build": 11063}, llama_accept_advisories=[])
    cluster.hosts["head"]["variables"]["llama_server_host"] = "0.0.0.0"
    cluster.hosts["head"]["variables"]["llama_models"][1]["extra_args"] = ["--override-kv", "llama.x=int:1"]
    met = {entry["id"]: entry["message"] for entry in cluster.plan()["advisories"]}
    assert not met["open-server"].startswith("one in")
    reasons = cluster.plan()["reasons"]
    assert len([reason for reason in reasons if "open-server" in reason]) == 1


def test_a_remedy_names_the_keys_of_entries_though_the_effect_is_the_same_for_all_models():
    entries = [on_paper(name, 1, layers=8) for name in ("one", "two")]
    for entry in entries:
        entry["gguf_summary"]["chat_template"] = False
        entry["extra_args"] = ["--metrics"]
    (advisory,) = advisories_of(several(cards_of(1, 2), *entries), "chat-template-missing")
    assert advisory["message"].startswith("one and two in llama_models: ")
    assert "add --chat-template to extra_args" in advisory["remedy"]


NAMES = "at most 128 letters, digits and . _ / -"


@pytest.mark.parametrize(
    "entries, reason",
    [
        ([], "no model is set: set one of llama_model_path"),
        ([SMALL, SMALL], "llama_models[1] has 'small' in name, which is not unique"),
        ([SMALL, {**DEEP, "aliases": ["small"]}], "llama_models[1] has 'small' in aliases, which is not unique"),
        ([{**SMALL, "name": "a]b"}], f"'a]b' in name: use {NAMES}, with a letter or digit first, and not 'default'"),
        ([{**SMALL, "name": "gemma3:4b"}], f"llama_models[0] has 'gemma3:4b' in name: use {NAMES}"),
        ([{**SMALL, "name": "default"}], f"llama_models[0] has 'default' in name: use {NAMES}"),
        ([{**SMALL, "aliases": ["a,b"]}], f"has 'a,b' in aliases: use {NAMES} : @ +,"),
        ([SMALL, {"name": "none"}], "none in llama_models: no model is set: set one of path, huggingface"),
        ([SMALL, {**DEEP, "context": -1}], "deep in llama_models: context is -1"),
        ([{**SMALL, "context": -1}, {**DEEP, "context": -1}], "small and deep in llama_models: context is -1: use 1"),
    ],
)
def test_entries_that_cannot_be(pair, entries, reason):
    assert reason in several(pair, *entries).reason()


@pytest.mark.parametrize(
    "given, reason",
    [
        (["--temp 1"], "extra_args has '--temp 1' as one"),
        (["--lora", "/a;b"], "llama-server gets '--lora /a;b' with ; or #, which a preset cannot express"),
        (["--lora", "a", "--lora", "b"], "llama-server gets '--lora b' a second time, after --lora, which a preset"),
        (["--seed", "2", "-s", "1"], "llama-server gets '-s 1' a second time, after --seed, which a preset"),
        (
            ["--temp", "1", "--temperature", "2"],
            "llama-server gets '--temperature 2' a second time, after --temp, which",
        ),
        (["-kvu", "--no_kv_unified"], "llama-server gets '--no_kv_unified' a second time, after -kvu, which"),
        (["-nocb", "--cont-batching"], "llama-server gets '--cont-batching' a second time, after -nocb, which"),
        (["--slots", "--no-slots"], "llama-server gets '--no-slots' a second time, after --slots, which"),
        (["--lora-scaled", "a", "1"], "llama-server gets '--lora-scaled a 1' with several values"),
        (["--temp=1"], "llama-server gets '--temp=1' as one word"),
        (["-a", "mine"], "extra_args has -a, which cannot be set there: set name instead"),
        (["--port", "1"], "extra_args has --port, which cannot be set there: set llama_server_port instead"),
        (["--host", "::"], "extra_args has --host, which cannot be set there"),
        (["--api-key", "x"], "extra_args has --api-key, which cannot be set there"),
        (["--threads_http", "4"], "llama-server gets --threads_http, but clients connect to the router: remove -"),
    ],
)
def test_arguments_that_one_of_several_models_cannot_have(pair, given, reason):
    several(pair, SMALL, {**DEEP, "extra_args": given}).reason("deep in llama_models: ", reason)


@pytest.mark.parametrize(
    "variables, reason",
    [
        (
            {"llama_model_path": "/m.gguf"},
            "llama_models and llama_model_path are both set: remove llama_model_path, and set path in",
        ),
        (
            {"llama_model_alias": "mine"},
            "llama_models and llama_model_alias are both set: remove llama_model_alias, and set name in the model's entry",
        ),
        ({"llama_server_fallback": True}, "llama_server_fallback is true, but models in llama_models have no fallback"),
        ({"llama_server_context": -1}, "llama_server_context is -1: use 1 or"),
        ({"llama_release": FORK}, "llama_models needs llama.cpp's own router"),
        ({"llama_server_extra_args": ["--models-dir", "/srv"]}, "which cannot be set there: set llama_models"),
        ({"llama_server_extra_args": ["--no-ui"]}, "--no-ui, which cannot be set there: set llama_server_ui instead"),
        ({"llama_server_extra_args": ["--alias", "mine"]}, "--alias, which cannot be set there: set llama_model_alias"),
    ],
)
def test_variables_that_several_models_cannot_have(pair, variables, reason):
    several(pair, SMALL, {**SMALL, "name": "other"})
    for host in pair.hosts.values() if "llama_release" in variables else [pair.hosts["head"]]:
        host["variables"].update({"llama_accept_advisories": ["rpc-remote-code-execution"], **variables})
    assert reason in pair.reason()


def test_a_person_reads_what_each_model_takes():
    plan = typed(of_two_sizes().plan())
    table = plan_text.plan_summary(plan)
    assert table.split("\n\n")[1].split()[:4] == ["model", "GiB", "context", "tokens/s"]
    assert "a request for another model waits until that model is loaded." in " ".join(table.split())
    for own in plan.head.models:
        assert f"{own.estimate.load_s:g} s" in table
    page = plan_text.plan_page(plan)
    for said in ("serves one, two", "Memory of two", "Models", "head  two", "still served: none"):
        assert said in page
    (last,) = [line for line in page.splitlines() if "without" in line and line.endswith("still served: one")]
    assert last.split()[1].startswith("gpu")
    html = html_page.page(plan)
    assert '<h2 id="models">Models</h2>' in html
    assert ">One model is loaded at a time: a request" in html
    assert html.count('<table class="stack">') == len(plan.head.models)
    assert "head, two</h3>" in html
    first, *others = plan.head.models
    for known, prompt in ((None, "Once upon a time"), (KnownAnswerPlan(2, 64, "F32"), "")):
        models = (first._replace(model=first.model._replace(known_answer=known)), *others)
        lines = plan_text.request_lines(plan._replace(head=plan.head._replace(models=models)))
        asked = " ".join("".join(lines).replace("\\", " ").split())
        question = json.loads(asked.partition("-d '")[2].rstrip("'"))
        assert (question["model"], question["prompt"]) == ("one", prompt)
