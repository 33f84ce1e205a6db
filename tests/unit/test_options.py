"""The table of options against the words that real programs take, and what it refuses and writes."""

import itertools
import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import workload
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs.cluster_inputs import server_of
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from support import models
from support.helps import help_of

LACKING = {
    MAINLINE: {"processor"},
    IK_LLAMA: {"cpu-feed-forward", "fit", "log-verbosity", "models-max", "models-preset", "sleep"},
}
"""Fork → options that the plan owns and that it does not have."""
PROGRAMS = (options.SERVER, options.WORKER)


@pytest.mark.parametrize("fork", LACKING)
def test_each_option_is_spelled_as_a_fork_takes_it(fork):
    differ = {}
    for option in options.TABLE:
        spelled = {word for spelling in option.spellings_of(fork) for word in spelling.words}
        hidden = {word for spelling in option.spellings_of(fork) for word in spelling.unlisted_words}
        listed = set(help_of(option.program, fork))
        differ[option.name] = (spelled - listed) ^ hidden
    assert {name: words for name, words in differ.items() if words} == {}


@pytest.mark.parametrize("fork, lacking", LACKING.items())
def test_each_option_that_the_plan_writes_has_a_word_in_each_fork(fork, lacking):
    found = {
        option.name
        for option in options.TABLE
        if any(spelling.is_written for spelling in option.spellings)
        and option.is_exclusive
        and not any(spelling.is_written for spelling in option.spellings_of(fork))
    }
    assert found == lacking


def test_no_word_stands_for_two_options():
    for program in PROGRAMS:
        words = [word for option in options.TABLE if option.program == program for word in option.words()]
        words += options.SYNONYM_GROUPS.replace(",", " ").split() if program == options.SERVER else []
        assert len(words) == len(set(words))


def test_options_that_one_preset_may_have_beside_each_other():
    words = ["--lora", "--lora-scaled", "--cpu-moe-draft", "-ncmoed", "-otd", "--seed", "--mmproj-auto", "--mmproj"]
    assert len({options.identifier_of(word) for word in words}) == len(words)


def test_each_variable_of_the_table_exists():
    known = inventory.specification()
    assert {option.variable for option in options.TABLE if option.variable} <= set(known)


def test_options_that_the_plan_owns_are_refused(local):
    variables, accepted = local.hosts["here"]["variables"], []
    variables["llama_accept_advisories"] = ["rpc-remote-code-execution"]
    owned = [option for option in options.TABLE if option.is_exclusive and option.program == options.SERVER]
    for option, (fork, build) in itertools.product(owned, capabilities.OLDEST_BUILDS.items()):
        for word in option.words():
            variables["llama_release"] = {"source": "git", "ref": "1" * 40, "build": build, "fork": fork}
            variables["llama_server_extra_args"] = [word, "1"]
            said = f"llama_server_extra_args has {word}, which cannot be set there: {option.alternative()}"
            accepted += [] if said in local.reason() else [word]
    assert not accepted


@pytest.mark.parametrize(
    "arguments, word, instead",
    [
        (["--ctx_size", "99999"], "--ctx_size", "set llama_server_context instead"),
        (["--ctx_size=9"], "--ctx_size", "set llama_server_context instead"),
        (["--split_mode=tensor"], "--split_mode", "remove it, because the plan places whole layers"),
        (["-ncmoe", "9"], "-ncmoe", "set llama_server_override_tensor instead, which the plan takes into account: ["),
        (["-ncffn", "9"], "-ncffn", "set llama_server_override_tensor instead, which the plan takes into account: ["),
    ],
)
def test_other_words_for_what_the_plan_decides(local, arguments, word, instead):
    local.hosts["here"]["variables"]["llama_server_extra_args"] = arguments
    assert f"llama_server_extra_args has {word}, which cannot be set there: {instead}" in local.reason()


@pytest.mark.parametrize("as_one", [False, True])
def test_all_pasted_options_are_refused_together(local, as_one):
    pasted = "-ngl 99 -c 9 --no-mmap -sm layer --host 0.0.0.0 --jinja -ncmoe 0"
    local.hosts["here"]["variables"]["llama_server_extra_args"] = [pasted] if as_one else pasted.split()
    said = [f"{word}, which cannot be set there: " for word in ("-ngl", "-c", "--no-mmap", "-sm", "--host", "-ncmoe")]
    assert "--jinja, " not in local.reason(*said, *["as one argument: use a list"] * as_one)


def test_variables_that_stand_for_options_are_refused(local):
    variables = local.hosts["here"]["variables"]
    for name in (
        "LLAMA_ARG_NO_WEBUI",
        "LLAMA_ARG_CTX_SIZE",
        "LLAMA_ARG_ENDPOINT_METRICS",
        "LLAMA_LOG_VERBOSITY",
        "MTMD_BACKEND_DEVICE",
    ):
        variables["llama_server_environment"] = {name: 1}
        assert f"llama_server_environment sets options of llama-server with {name}: set" in local.reason()
    variables["llama_server_environment"] = {"LLAMA_ARG_PORT": 1, "LLAMA_ARG_HOST": "::"}
    assert "with LLAMA_ARG_PORT, LLAMA_ARG_HOST: set" in local.reason()
    variables["llama_server_environment"] = {"LLAMA_ARG_TIMEOUT": 1, "LLAMA_CACHE": "/srv", "LLAMA_ARG_UI_MCP_PROXY": 1}
    assert "llama_server_environment" not in str(local.plan().get("reasons"))


def server(**variables):
    defaults = {name: option.get("default") for name, option in inventory.specification().items()}
    return server_of({**defaults, **variables})


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], (False, False)),
        (["--swa_full"], (False, True)),
        (["--kv-unified"], (True, False)),
        (["-kvu", "-no-kvu"], (False, False)),
    ],
)
def test_settings_of_the_cache_that_count(arguments, expected):
    settings = workload.cache_settings(server(llama_server_extra_args=arguments), models.model("llama", context=4096))
    assert (settings.unified, settings.full_window) == expected


@pytest.mark.parametrize(
    "batch, micro_batch, tokens", [(None, None, 512), (256, None, 256), (4096, 4096, 4000), (None, 4096, 4000)]
)
def test_tokens_that_are_computed_at_once(batch, micro_batch, tokens):
    """n_ubatch of llama_context: min(n_ctx, -b, -ub)."""
    given = server(llama_server_batch=batch, llama_server_micro_batch=micro_batch)
    settings = workload.cache_settings(given, models.model("llama", context=4000))
    assert settings.tokens == tokens


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["-amb"], "-amb '': use a whole number of MiB"),
        (["-mla", "-1"], "-mla '-1': use a whole number"),
        (["-amb", "²"], "-amb '²': use a whole number of MiB"),
        (["-amb", "2147483648"], "-amb '2147483648': use a whole number of MiB"),
    ],
)
def test_settings_that_are_no_numbers_are_refused(arguments, said):
    with pytest.raises(Refusal, match=re.escape(f"llama_server_extra_args has {said}")):
        workload.cache_settings(server(llama_server_extra_args=arguments), models.model("llama", context=4096))


@pytest.mark.parametrize(
    "more, planned",
    [
        ({}, True),
        ({"llama_server_extra_args": ["--metrics"]}, True),
        ({"llama_server_extra_args": ["--override_kv", "a=int:1"]}, False),
        ({"llama_server_extra_args": ["-mm", "x.gguf"]}, False),
        ({"llama_server_extra_args": ["-nkvo"]}, False),
    ],
)
def test_what_changes_the_memory_of_devices_without_being_planned(more, planned):
    assert (not workload.unplanned_options(server(**more), False)) is planned


@pytest.mark.parametrize(
    "name, value, fork, expected",
    [
        ("flash-attention", "off", MAINLINE, ["--flash-attn", "off"]),
        ("flash-attention", "off", IK_LLAMA, ["--flash-attn", "off"]),
        ("flash-attention", None, MAINLINE, []),
        ("cache-type-k", "f16", MAINLINE, []),
        ("tensor-split", ["1", "2"], MAINLINE, ["--tensor-split", "1,2"]),
        ("rpc", [], MAINLINE, []),
        ("load-mode", "dio", MAINLINE, ["--load-mode", "dio"]),
        ("load-mode", "auto", MAINLINE, ["--load-mode", "auto"]),
        ("load-mode", "mmap", IK_LLAMA, []),
        ("load-mode", "none", IK_LLAMA, ["--no-mmap"]),
        ("load-mode", "mmap+mlock", IK_LLAMA, ["--mlock"]),
        ("log-verbosity", "4", MAINLINE, ["--log-verbosity", "4"]),
        ("log-verbosity", "4", IK_LLAMA, []),
        ("fit", "off", MAINLINE, ["--fit", "off"]),
        ("fit", "off", IK_LLAMA, []),
        ("processor", "CPU", MAINLINE, []),
        ("processor", "CPU", IK_LLAMA, ["-cpu"]),
    ],
)
def test_how_a_value_is_written(name, value, fork, expected):
    assert options.render_option(name, value, fork) == expected


@pytest.mark.parametrize("value", ["dio", "mlock"])
def test_a_value_that_a_fork_cannot_say(value):
    with pytest.raises(options.UnsupportedValue, match=re.escape(f"load-mode {value}")):
        options.render_option("load-mode", value, IK_LLAMA)
