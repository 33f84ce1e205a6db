"""Whatever an inventory or a host says, planning ends in a plan or in a refusal: no other exception, and within two seconds of processor time."""

import copy
import json
import re
import time
from unittest import mock

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import plan as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import html_page
from conftest import FACTS, SCHEMA
from hypothesis import currently_in_test_context, event
from hypothesis import strategies as st
from support.fuzzing import JUNK, LEAVES, NAMES, NUMBERS, WORDS, changed, changes, fuzzed

SECONDS = 2
GROUPS = {"llama_cluster": ["head", "one", "two"], "llama_head": ["head"], "llama_workers": ["one", "two"]}
ADDRESSES = {"head": "192.0.2.10", "one": "192.0.2.11", "two": "192.0.2.12"}
SPEC = inventory.specification()

PLAIN = {
    "str": WORDS | st.text(max_size=20),
    "int": NUMBERS | st.integers(-10, 100000),
    "float": st.floats() | NUMBERS,
    "bool": st.booleans(),
    "raw": WORDS
    | st.dictionaries(
        st.sampled_from(
            ["source", "ref", "version", "checksum", "url", "path", "build", "commit", "fork", "patches", "repository"]
        ),
        LEAVES,
    ),
    "path": WORDS,
}


def of_option(option):
    """Values of the kind that an option has, with junk in them now and then."""
    kind, inner = option["type"], option.get("options")
    if inner:
        value = st.fixed_dictionaries({}, optional={name: of_option(below) | LEAVES for name, below in inner.items()})
    elif kind == "dict":
        value = st.dictionaries(NAMES, LEAVES, max_size=4)
    elif kind == "list":
        value = PLAIN[option.get("elements", "str")]
    else:
        value = st.sampled_from(option["choices"]) if option.get("choices") else PLAIN[kind]
    return st.lists(value, max_size=4) if kind == "list" else value


VARIABLES = st.fixed_dictionaries(
    {}, optional={name: st.one_of(of_option(option), of_option(option), JUNK) for name, option in SPEC.items()}
)
FEW = st.lists(
    st.sampled_from(sorted(SPEC)).flatmap(
        lambda name: st.tuples(st.just(name), st.one_of(of_option(SPEC[name]), of_option(SPEC[name]), JUNK))
    ),
    max_size=4,
).map(dict)


GPU = {"name": "a card", "memory_mib": 24000, "unified": False}
WHOLE = {
    **FACTS,
    "packaged": {"version": "0.7.0", "installed": ["llama.cpp"], "listed": True},
    "accelerators": [
        {**GPU, "backend": "cuda", "architecture": "8.6"},
        {**GPU, "backend": "hip", "architecture": "gfx1151", "unified": True},
        {**GPU, "backend": "vulkan", "architecture": ""},
    ],
    "toolchain": {**FACTS["toolchain"], "nvcc": "12.9", "hipconfig": "7.2", "glslc": "2025.2", "vulkan": "present"},
    "toolchains": [
        {
            "backend": backend,
            "prefix": prefix,
            "links": ["/opt/linked"],
            "version": version,
            "compiler": prefix + "/bin/cc",
            "libraries": sorted(backends.libraries(backend)),
            "rocwmma": {"version": "1.7", "architectures": ["gfx1151"]},
            "components": {"mkl": "/opt/mkl"},
        }
        for backend, prefix, version in (
            ("cuda", "/usr/local/cuda", "12.9"),
            ("hip", "/opt/rocm", "7.2"),
            ("cpu", "/opt/gcc", "14"),
        )
    ],
    "tools": ["cmake"],
    "accounts": {"llamacpp": "/opt/llamacpp"},
    "device_groups": ["render", "video"],
    "firewall": "nftables",
    "kernel": "6.18.10",
    "firmware": "20250410",
    "thunderbolt": [{"device": "0-1", "lanes": 2, "gbit_per_lane": 20.0}],
    "addresses": ["192.0.2.10"],
    "measured": {"one": {"round_trip_ms": 0.2, "mbit_per_second": 9000}},
    "kept": {"two": FACTS},
}


SUMMARY = known_answer.summary(4, 128, "f32")
MODEL = {"summary": SUMMARY, "closed": None}


@pytest.fixture
def plan(monkeypatch):
    """Plans as the playbooks do; fails for what is neither a plan nor a refusal, and for what takes too long."""
    monkeypatch.setattr(action.sources, "resolve", lambda request, _find: request)
    monkeypatch.setattr("ansible.utils.display.Display.display", lambda *_arguments, **_named: None)

    def run(variables, answers, model=None, **arguments):
        hostvars = {name: {"ansible_host": ADDRESSES[name], **variables.get(name, {})} for name in ADDRESSES}
        task = mock.Mock(args={"facts": answers, "model": model or {}, "page": False, **arguments}, async_val=0)
        module = action.ActionModule(task, *(mock.Mock() for _number in range(5)))
        own = {"inventory_hostname": "head", "groups": GROUPS, "hostvars": hostvars}
        started = time.process_time()
        try:
            result = module.run(task_vars=own)
        except AnsibleActionFail as refusal:
            result = {"failed": True, "msg": str(refusal)}
        assert time.process_time() - started < SECONDS
        if currently_in_test_context():
            event("refused" if result.get("failed") else "planned")
        if result.get("failed"):
            assert validation.is_plain(result["msg"])
        else:
            SCHEMA.validate(result["plan"])
            assert html_page.page(typed_json.parse(Plan, result["plan"]), [])
        return result

    return run


USUAL = st.fixed_dictionaries(
    {},
    optional={
        "llama_backend": st.sampled_from(["auto", "cpu", "cuda", "hip", "vulkan", ["cuda", "cpu"], ["hip", "vulkan"]]),
        "llama_release": st.sampled_from(
            [
                "b8600",
                "b6110",
                {"source": "package"},
                {"source": "git", "ref": "1" * 40, "build": 4840, "fork": "ik_llama.cpp"},
            ]
        ),
        "llama_placement": st.sampled_from(["all", "fewest"]),
        "llama_server_gpu_layers": st.integers(0, 20),
        "llama_server_tensor_split": st.lists(st.floats(0, 9), max_size=5),
        "llama_server_override_tensor": st.lists(st.sampled_from(["ffn.*=CPU", "x=CUDA0", "(=CPU"]), max_size=2),
        "llama_server_parallel": st.integers(1, 8),
        "llama_server_micro_batch": st.sampled_from([None, 64, 4096]),
        "llama_server_extra_args": st.lists(
            st.sampled_from(["--metrics", "--swa-full", "--kv-unified", "--lora"]), max_size=4
        ),
        "llama_accept_advisories": st.just([advisory.id for advisory in table.ADVISORIES]),
        "llama_worker_endpoints": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "device": st.sampled_from(["CPU", "CUDA0", "ROCm0"]),
                    "threads": st.integers(1, 9),
                    "cache": st.booleans(),
                },
            ),
            max_size=3,
        ),
    },
)


def hostvars(head, one, two):
    """Variables of the hosts, with the head's releases for all of them."""
    everywhere = {name: head[name] for name in head if name.startswith("llama_release")}
    return {
        "head": {"llama_model_known_answer": {}, **head},
        "one": {**everywhere, **one},
        "two": {**everywhere, **two},
    }


@pytest.mark.parametrize(
    "variables, said",
    [
        (
            {"llama_server_extra_args": ["--alias", "a ; b"]},
            r"^llamacpp-server on head: 'a ; b' is .* supervisor reads",
        ),
        ({"llama_server_port": "eighty"}, "^Variables of host head are not valid: argument 'llama_server_port'"),
    ],
)
def test_the_json_of_a_refused_plan_is_written(plan, tmp_path, variables, said):
    facts = {name: {"facts": {**FACTS, "service_manager": "supervisor"}} for name in ADDRESSES}
    variables = {**variables, "llama_accept_advisories": [advisory.id for advisory in table.ADVISORIES]}
    result = plan(hostvars(variables, {}, {}), facts, path=str(tmp_path / "plan.json"))
    told = json.loads((tmp_path / "plan.json").read_text())
    SCHEMA.validate(told)
    assert told["refused"]
    assert re.search(said, told["reasons"][0])
    assert told["reasons"][0] in result["msg"]


@fuzzed(USUAL, st.just({}) | FEW | VARIABLES, USUAL, st.just({}) | FEW, st.integers(0, 3), seconds=0)
def test_any_inventory(plan, head, more, one, few, rich):
    facts = {name: {"facts": copy.deepcopy(WHOLE if rich else FACTS)} for name in ADDRESSES}
    plan(hostvars({**head, **more}, {**one, **few}, {}), facts)


@fuzzed(USUAL, st.sampled_from(sorted(ADDRESSES)), changes(WHOLE), seconds=0)
def test_any_facts(plan, head, host, new):
    facts = {name: {"facts": copy.deepcopy(WHOLE)} for name in ADDRESSES}
    facts[host]["facts"] = changed(WHOLE, new)
    plan(hostvars(head, {}, {}), facts)


@fuzzed(USUAL, changes(MODEL), st.booleans(), seconds=0)
def test_any_model(plan, head, new, declared):
    model = changed(MODEL, new)
    model = model if isinstance(model, dict) else {}
    own = {"llama_model_path": "/srv/m.gguf", "llama_model_known_answer": None}
    if declared:
        own["llama_model_gguf_summary"] = model.get("summary")
    facts = {name: {"facts": copy.deepcopy(FACTS)} for name in ADDRESSES}
    plan(hostvars({**head, **own}, {}, {}), facts, {} if declared else model)
