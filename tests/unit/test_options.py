"""The table of options against the words that real generations take, and what it refuses and writes."""

import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs.cluster_inputs import server_of
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from support import models
from support.helps import GENERATIONS, WORDS, help_of

OF_THE_FORK = {"processor"}
NEW = {"feed-forward-on-the-processor"}
CACHES = {"prompt-cache", "context-checkpoints"}
ROUTER = {"models-preset", "models-max"}
LACKING = {
    "0.3.16": {"fit", "log-verbosity", "prompt-cache", "sleep", *OF_THE_FORK, *NEW, *ROUTER},
    "0.3.20": {"log-verbosity", *OF_THE_FORK, *NEW},
    "0.3.25": {*OF_THE_FORK, *NEW},
    "0.3.35": {*OF_THE_FORK, *NEW},
    "ik-3775": {
        "device",
        "experts-on-the-processor",
        "fit",
        "log-verbosity",
        "processor",
        "sleep",
        "worker-device",
        *CACHES,
        *NEW,
        *ROUTER,
    },
    "ik-3933": {"fit", "log-verbosity", "processor", "sleep", "worker-device", *CACHES, *NEW, *ROUTER},
    "ik-4840": {"fit", "log-verbosity", "sleep", *NEW, *ROUTER},
}
"""Generation → options that the plan owns and that it does not have; any other lacks what the fork alone has."""
PROGRAMS = (options.SERVER, options.WORKER)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_option_is_spelled_as_a_generation_takes_it(generation):
    build, fork = GENERATIONS[generation]
    differ = {}
    for option in options.TABLE:
        spelled = {word for spelling in option.spelled(build, fork) for word in spelling.names()}
        words = {word for spelling in option.spellings if spelling.fork == fork for word in spelling.words}
        differ[option.name] = spelled ^ (words & set(help_of(option.program, generation).known))
    assert {name: words for name, words in differ.items() if words} == {}


def test_variables_that_a_help_names_beside_an_option_stand_for_it():
    named = {word: options.of_variable(name) for word, name in WORDS["variables"].items()}
    assert named == {word: options.of_word(word) for word in named}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_option_that_the_plan_writes_has_a_word_in_each_generation(generation):
    build, fork = GENERATIONS[generation]
    lacking = {
        option.name
        for option in options.TABLE
        if any(spelling.written for spelling in option.spellings)
        and option.owned
        and not any(spelling.written for spelling in option.spelled(build, fork))
    }
    assert lacking == LACKING.get(generation, OF_THE_FORK)


def test_no_word_and_no_variable_stands_for_two_options():
    for program in PROGRAMS:
        words = [word for option in options.TABLE if option.program == program for word in option.words()]
        assert len(words) == len(set(words))
    names = [name for option in options.TABLE for name in option.environment]
    assert len(names) == len(set(names))


def test_each_variable_of_the_table_exists():
    known = inventory.specification()
    assert {option.variable for option in options.TABLE if option.variable} <= set(known)


def test_options_that_the_plan_owns_are_refused(local):
    variables, accepted = local.hosts["here"]["variables"], []
    variables["llama_accept_advisories"] = ["rpc-remote-code-execution"]
    owned = [option for option in options.TABLE if option.owned and option.program == options.SERVER]
    for option in owned:
        for word in option.words():
            fork = options.MAINLINE if options.MAINLINE in options.forks_of(word) else options.IK_LLAMA
            build = 4840 if fork == options.IK_LLAMA else 11063
            variables["llama_release"] = {"source": "git", "ref": "1" * 40, "build": build, "fork": fork}
            variables["llama_server_extra_args"] = [word, "1"]
            said = f"llama_server_extra_args has {word}, which the plan decides: {option.instead()}"
            accepted += [] if said in local.reason() else [word]
    variables["llama_server_extra_args"] = []
    for option in owned:
        for name in option.environment:
            variables["llama_server_environment"] = {name: "1"}
            said = f"llama_server_environment has {name}, which the plan decides: {option.instead()}"
            accepted += [] if said in local.reason() else [name]
    assert not accepted


@pytest.mark.parametrize(
    "arguments, word, instead",
    [
        (["--ctx_size", "99999"], "--ctx_size", "set llama_server_context instead"),
        (["--ctx_size=9"], "--ctx_size", "set llama_server_context instead"),
        (["--split_mode=tensor"], "--split_mode", "remove it: the plan places whole layers"),
        (["-ncmoe", "9"], "-ncmoe", "set llama_server_override_tensor instead, to ['ffn_.*_exps=CPU'] for the experts"),
        (
            ["-ncffn", "9"],
            "-ncffn",
            r"set llama_server_override_tensor instead, to ['blk\.[0-9]\.ffn_(up|down|gate)\.=CP",
        ),
    ],
)
def test_other_words_for_what_the_plan_decides(local, arguments, word, instead):
    local.hosts["here"]["variables"]["llama_server_extra_args"] = arguments
    assert f"llama_server_extra_args has {word}, which the plan decides: {instead}" in local.reason()


def test_settings_of_the_cache_are_further_arguments(local):
    for name, word in (
        ("LLAMA_ARG_SWA_FULL", "--swa-full"),
        ("LLAMA_ARG_KV_UNIFIED", "--kv-unified"),
    ):
        local.hosts["here"]["variables"]["llama_server_environment"] = {name: 1}
        assert f"has {name}, which changes the KV cache: put {word} into llama_server_extra_args" in local.reason()


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
    settings = server_settings.settings_of(
        server(llama_server_extra_args=arguments), models.model("llama", context=4096)
    )
    assert (settings.unified, settings.full_window) == expected


@pytest.mark.parametrize(
    "batch, micro_batch, tokens", [(None, None, 512), (256, None, 256), (4096, 4096, 4000), (None, 4096, 4000)]
)
def test_tokens_that_are_computed_at_once(batch, micro_batch, tokens):
    """n_ubatch of llama_context: min(n_ctx, -b, -ub)."""
    given = server(llama_server_batch=batch, llama_server_micro_batch=micro_batch)
    settings = server_settings.settings_of(given, models.model("llama", context=4000))
    assert settings.tokens == tokens


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["-amb"], "-amb '': use a number of MiB, 0 or more"),
        (["-mla", "-1"], "-mla '-1': use a number, 0 or more"),
        (["-amb", "²"], "-amb '²': use a number of MiB, 0 or more"),
    ],
)
def test_settings_that_are_no_numbers_are_refused(arguments, said):
    with pytest.raises(Refusal, match=re.escape(f"llama_server_extra_args has {said}")):
        server_settings.settings_of(server(llama_server_extra_args=arguments), models.model("llama", context=4096))


@pytest.mark.parametrize(
    "more, planned",
    [
        ({}, True),
        ({"llama_server_extra_args": ["--metrics"]}, True),
        ({"llama_server_extra_args": ["--override_kv", "a=int:1"]}, False),
        ({"llama_server_extra_args": ["-mm", "x.gguf"]}, False),
        ({"llama_server_environment": {"LLAMA_ARG_NO_KV_OFFLOAD": 1}}, False),
        ({"llama_server_environment": {"LLAMA_ARG_ENDPOINT_METRICS": 1}}, True),
    ],
)
def test_what_changes_the_memory_of_devices_without_being_planned(more, planned):
    assert server_settings.as_planned(server(**more)) is planned


@pytest.mark.parametrize(
    "name, value, build, fork, expected",
    [
        ("flash-attention", "on", 6170, options.MAINLINE, ["--flash-attn"]),
        ("flash-attention", "off", 6170, options.MAINLINE, []),
        ("flash-attention", "off", 6325, options.MAINLINE, ["--flash-attn", "off"]),
        ("flash-attention", "off", 3933, options.IK_LLAMA, ["--no-flash-attn"]),
        ("flash-attention", "on", 3933, options.IK_LLAMA, []),
        ("flash-attention", None, 11063, options.MAINLINE, []),
        ("load-mode", "mmap", 8643, options.MAINLINE, []),
        ("load-mode", "dio", 7668, options.MAINLINE, ["-dio"]),
        ("load-mode", "dio", 10105, options.MAINLINE, ["--load-mode", "dio"]),
        ("cache-type-k", "f16", 11063, options.MAINLINE, []),
        ("tensor-split", ["1", "2"], 11063, options.MAINLINE, ["--tensor-split", "1,2"]),
        ("rpc", [], 11063, options.MAINLINE, []),
        ("load-mode", "dio", 10104, options.MAINLINE, ["-dio"]),
        ("load-mode", "mmap+mlock", 9435, options.MAINLINE, ["--mlock"]),
        ("load-mode", "mlock", 11063, options.MAINLINE, ["--load-mode", "mlock"]),
        ("load-mode", "mmap+mlock", 10884, options.MAINLINE, ["--load-mode", "mmap+mlock"]),
        ("load-mode", "auto", 11063, options.MAINLINE, ["--load-mode", "auto"]),
        ("load-mode", "auto", 10105, options.MAINLINE, []),
        ("load-mode", "auto", 8643, options.MAINLINE, []),
        ("load-mode", "mmap", 10105, options.MAINLINE, ["--load-mode", "mmap"]),
        ("load-mode", "mmap+mlock", 4840, options.IK_LLAMA, ["--mlock"]),
        ("log-verbosity", "4", 8643, options.MAINLINE, []),
        ("log-verbosity", "4", 9181, options.MAINLINE, ["--log-verbosity", "4"]),
        ("fit", "off", 7349, options.MAINLINE, []),
        ("fit", "off", 7437, options.MAINLINE, ["--fit", "off"]),
        ("fit", "off", 7991, options.MAINLINE, ["--fit", "off"]),
        ("warmup", "off", 11063, options.MAINLINE, ["--no-warmup"]),
        ("warmup", "on", 11063, options.MAINLINE, []),
    ],
)
def test_how_a_value_is_written(name, value, build, fork, expected):
    assert options.render(name, value, build, fork) == expected


@pytest.mark.parametrize("value, build", [("dio", 7667), ("mlock", 8643), ("mlock", 10114), ("mmap+mlock", 10114)])
def test_a_value_that_a_build_cannot_say(value, build):
    """b10114 takes mlock, but maps the model then, as mmap+mlock does since #26135."""
    with pytest.raises(options.UnknownOption, match=re.escape(f"load-mode {value}")):
        options.render("load-mode", value, build)


def test_older_spellings_of_load_modes_are_gone_from_one_build_on():
    words = {"--no-mmap", "--mlock", "-dio"}
    assert words <= set(options.listed(options.SERVER, 10883, options.MAINLINE))
    assert not words & set(options.listed(options.SERVER, 10884, options.MAINLINE))


def test_switches_take_no_value_in_any_help():
    lists = {name: help_of(options.SERVER, name).known for name in GENERATIONS}
    for word in options.SWITCHES:
        assert options.of_word(word) is None
        assert lists["0.3.36"][word] is False
        assert not any(known.get(word) for known in lists.values())
    newest = {word for word, valued in lists["0.3.36"].items() if not valued and options.of_word(word) is None}
    assert newest - options.SWITCHES == {word for word in newest if any(known.get(word) for known in lists.values())}
