"""The proof of the devices: which layers it takes, how it cuts them, what it runs, and when answers count as the same. Integration tests ask real
llama-servers; here they are stand-ins that answer as recorded ones do."""

import errno
import html
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import gguf_files
import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import proof as action_plugin
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import listeners
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options, replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    gguf,
    header_summary,
    known_answer,
    layer_sample,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import proof_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions, run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.questions import Bounds
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import (
    Proof,
    ProofWork,
    Remedy,
    Side,
    Verdict,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import judge
from ansible_collections.llamacpp.cluster.plugins.modules import proof as proof_module
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions
from conftest import RELEASE, known_answer_of, typed
from support import actions, verification
from support.clusters import IK_LLAMA, with_small_layers
from test_services import machine_with

MODULE = proof_module
KEYS = (
    ("general.architecture", gguf_files.STRING, "unheard"),
    ("unheard.block_count", gguf_files.U32, 4),
    ("unheard.nextn_predict_layers", gguf_files.U32, 1),
    ("unheard.leading_dense_block_count", gguf_files.U32, 2),
    ("unheard.attention.shared_kv_layers", gguf_files.U32, 2),
    ("unheard.attention.head_count_kv", gguf_files.ARRAY, (gguf_files.U32, [1, 2, 3, 4])),
    ("unheard.swiglu_limits", gguf_files.ARRAY, (gguf_files.F32, [1.5, 2.5, 3.5])),
    ("unheard.rope.dimension_sections", gguf_files.ARRAY, (gguf_files.I32, [8, 8, 8, 8])),
    ("tokenizer.ggml.tokens", gguf_files.ARRAY, (gguf_files.STRING, [f"token {number}" for number in range(5000)])),
    ("other.\u200bname", gguf_files.U32, 1),
    ("other.list", gguf_files.ARRAY, (gguf_files.U32, [1, 2, 3, 4])),
)
ROWS = {"blk.0.attn_q": 3, "blk.1.attn_q": 5, "blk.10.attn_q": 7, "blk.2.attn_q": 9, "blk.3.nextn.eh_proj": 7}
TENSORS = (
    ("token_embd.weight", (64, 32), 0),
    *((f"{name}.weight", (64, rows), 8 if rows == 5 else 1) for name, rows in ROWS.items()),
    ("output_norm.weight", (64,), 0),
)


def noise(path):
    """Gives each byte of the tensors a value."""
    data = bytearray(path.read_bytes())
    for place in gguf.locate_tensors(str(path)).values():
        data[place.offset : place.offset + place.bytes] = os.urandom(place.bytes)
    path.write_bytes(data)


def bytes_of(path):
    return {
        name: Path(place.path).read_bytes()[place.offset : place.offset + place.bytes]
        for name, place in gguf.locate_tensors(str(path)).items()
    }


@pytest.mark.parametrize("alignment", [32, 64])
@pytest.mark.parametrize(
    "layers, dense, sharing, kv_heads, limits",
    [((0, 2), 1, 1, [1, 3], [1.5, 3.5]), ((0, 1), 2, 0, [1, 2], [1.5, 2.5]), ((2,), 0, 1, [3], [3.5])],
)
def test_layers_of_an_unheard_of_architecture(tmp_path, alignment, layers, dense, sharing, kv_heads, limits):
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    keys = (*KEYS, ("general.alignment", gguf_files.U32, alignment))
    whole.write_bytes(gguf_files.model(keys=keys, tensors=TENSORS, alignment=alignment))
    noise(whole)
    layer_sample.write_sample(str(whole), cut, layers)
    before, after = gguf.read_local_headers(str(whole)), gguf.read_local_headers(str(cut))
    renamed = {f"blk.{layer}.attn_q.weight": f"blk.{place}.attn_q.weight" for place, layer in enumerate(layers)}
    renamed.update({name: name for name in ("token_embd.weight", "output_norm.weight")})
    data = bytes_of(whole)
    assert bytes_of(cut) == {new: data[old] for old, new in renamed.items()}
    assert after.tensors == {new: before.tensors[old] for old, new in renamed.items()}
    assert after.metadata == {
        **before.metadata,
        "unheard.block_count": len(layers),
        "unheard.nextn_predict_layers": 0,
        "unheard.leading_dense_block_count": dense,
        "unheard.attention.shared_kv_layers": sharing,
        "unheard.attention.head_count_kv": kv_heads,
        "unheard.swiglu_limits": limits,
    }


def test_layers_of_a_model_in_parts_are_one_file(tmp_path):
    first, *others = gguf_files.write_parts(tmp_path)
    for part in (first, *others):
        part.write_bytes(part.read_bytes()[:-64] + os.urandom(64))
    layer_sample.write_sample(str(first), tmp_path / "cut.gguf", (0, 1))
    assert "split.count" not in gguf.read_local_headers(str(tmp_path / "cut.gguf")).metadata
    assert bytes_of(tmp_path / "cut.gguf") == bytes_of(first)


def test_a_file_without_these_layers(tmp_path):
    text = (KEYS[0], ("unheard.block_count", gguf_files.STRING, "4"))
    for keys, layers, why in ((KEYS[:1], (0,), "None"), (KEYS, (0, 4), "4"), (KEYS, (), "4"), (text, (0,), "'4'")):
        (tmp_path / "whole.gguf").write_bytes(gguf_files.model(keys=keys, tensors=TENSORS))
        said = f"{why} layers, which do not include all of {', '.join(map(str, layers))}"
        with pytest.raises(gguf.GGUFError, match=said):
            layer_sample.write_sample(str(tmp_path / "whole.gguf"), tmp_path / "cut.gguf", layers)


def summary_of(groups, layers=8, architecture="llama", **keys):
    """:param groups: name → layers in which a tensor of 100 bytes is."""
    summary = header_summary.parse(known_answer.summary(layers, 128, "f32"))
    outside = tuple(group for group in summary.tensor_groups if group.layers is None)
    rows = tuple(outside[0]._replace(name=name, bytes=100, layers=tuple(of)) for name, of in groups.items())
    keys = (*summary.keys, *((key.replace("__", "."), value) for key, value in keys.items()))
    summary = summary._replace(tensors=(*outside, *rows), layer_bytes=(100,) * layers, keys=keys)
    return summary._replace(architecture=architecture), sum(group.bytes for group in outside)


ALIKE, MIXED = {"blk.*.a": range(8)}, {"blk.*.a": range(8), "blk.*.b": range(1, 8, 2)}
EXPERTS = {"blk.*.a": range(8), "blk.*.up": range(3), "blk.*.up_exps": range(3, 8)}
PATTERN = {"attention__sliding_window_pattern": (1, 1, 0, 1, 1, 0, 1, 1)}
RARE, TWO = {"blk.*.a": range(8), "blk.*.b": (5,)}, {"blk.*.a": (0, 3), "blk.*.a ": (1, 2, 4, 5, 6, 7)}
FURTHER = {"blk.*.a": range(7), "blk.*.b": (7,)}
DEEP, LATENT = {"blk.*.a": range(27)}, {"layers": 27, "architecture": "deepseek2"}


@pytest.mark.parametrize(
    "groups, keys, room, layers, every_kind, experts",
    [
        (ALIKE, {}, 99, range(8), True, True),  # all
        (ALIKE, {}, 1, (0,), True, True),  # one
        (ALIKE, {}, 2, (0, 7), True, True),  # first and last
        (ALIKE, {}, 3, (0, 4, 7), True, True),  # spread over the depth
        (RARE, {}, 6, (0, 2, 3, 4, 7, 5), True, True),  # a rare kind at its place
        (TWO, {}, 1, (0,), False, True),  # one of two
        (MIXED, {}, 4, (0, 1, 6, 7), True, True),  # kinds in turn
        (MIXED, {}, 3, (0, 1, 6), True, True),  # kinds in turn, an odd number
        (ALIKE, PATTERN, 4, (0, 3, 2, 7), True, True),  # a pattern keeps its places
        (EXPERTS, {}, 3, (0, 3, 7), True, True),  # one of the leading dense layers
        (EXPERTS, {}, 1, (0,), False, False),  # dense layers alone
        (ALIKE, {"attention__shared_kv_layers": 4}, 5, (0, 1, 2, 3, 4), True, True),  # a shared cache
        (FURTHER, {"nextn_predict_layers": 1}, 9, range(7), True, True),  # further tokens
        (DEEP, LATENT, 27, range(27), True, True),  # recognised by its layers
    ],
)
def test_which_layers_are_taken(groups, keys, room, layers, every_kind, experts):
    summary, outside = summary_of(groups, **keys)
    sample = layer_sample.choose_layers(summary, 10_000 + outside, room)
    assert sample == (tuple(layers), outside + 100 * len(layers), every_kind, experts)
    if len(layers) < room:
        return
    less = layer_sample.choose_layers(summary, outside + 100 * len(layers) - 1, room)
    assert isinstance(less, str) if len(layers) == 1 or "architecture" in keys else len(less.layers) < len(layers)


def test_why_no_layers_are_taken():
    for groups, keys, room, why in (
        (ALIKE, {}, 99, "one layer and the embedding tables need 0.0 GiB, but the limit is 0.0"),
        (DEEP, LATENT, 2600, "recognises this model by its 27 layers, but the proof has"),
        ({**ALIKE, "per_layer_token_embd.weight": (0,)}, {}, 9000, "data about every layer"),
    ):
        summary, outside = summary_of(groups, **keys)
        limits = outside + room, 99
        assert why in layer_sample.choose_layers(summary, *limits)
        unnamed = layer_sample.choose_layers(summary._replace(tensors=None), *limits)
        assert unnamed.startswith("the names of the model's tensors are unknown")


# ------------------------------------------------------------------------------------------------- what is compared

ASKED = questions.list_questions(questions.CONTEXT_TOKENS)
GROUPS = [*dict.fromkeys(one.group for one in ASKED)]


def answers(shift=0.0, turn=1, asked=ASKED):
    """To each question; ``shift`` is what the logarithms are off, with alternating sign, in parts of their range."""
    listed = {token * turn % 64: -token / 31 - 1 + shift * (-1) ** token for token in range(64)}
    return [listed] * len(asked)


def judged(other, limits=None):
    """The value in parts of its bound, and the place, where another side is farthest."""
    found = questions.worst_distance(questions.distances(ASKED, answers(), other), limits or Bounds())
    return round(found.value / found.bound, 3), found.prompt_kind


def test_what_is_asked_fits_the_context():
    assert len(GROUPS) == 7
    assert max(one.length for one in ASKED) < questions.CONTEXT_TOKENS
    assert {one.length for one in questions.list_questions(65)} == {*range(2, 10), 16, 17, 31, 32, 33, 48, 64}
    assert max(one.length for one in questions.variant_questions(ASKED)) == questions.MAX_VARIANT_LENGTH
    assert questions.list_questions(2) == []


def test_prompts_are_text_and_random_tokens_in_turn_after_the_model_s_own_prefix():
    assert all(0 <= token < 100 for token in questions.random_tokens(100))
    tokens = questions.Tokens((7, 8), tuple(range(1000, 1100)), tuple(range(2000, 2100)))
    prompts = [tokens.prompt(one) for one in ASKED]
    assert [len(prompt) for prompt in prompts] == [one.length for one in ASKED]
    assert {tuple(prompt[:2]) for prompt in prompts} == {(7, 8)}
    assert [prompt[2] // 1000 for prompt in prompts[1:7]] == [2, 1, 2, 1, 2, 1]
    grown = [one for one in zip(ASKED, prompts, prompts[1:], ASKED[1:]) if one[3].continues]
    assert len(grown) == len(questions.LONG_LENGTHS) - 1
    assert all(after[: before.length] == prompt for before, prompt, after, _question in grown)
    assert (
        questions.count_tokens(ASKED)
        == sum(sum(of) for of in questions.SHORT_LENGTHS.values()) + questions.LONG_LENGTHS[-1]
    )
    assert questions.count_pairs(ASKED) < questions.LONG_LENGTHS[-1] ** 2


def test_bounds_are_three_times_the_largest_distance_of_a_variant_with_floors():
    asked = questions.variant_questions(ASKED)
    for shifts, expected in (([], (0.05, 0.25)), ([0.01], (0.05, 0.25)), ([0.01, 0.1, 0.02], (0.3, 0.3))):
        variants = [answers(shift, asked=asked) for shift in shifts]
        assert questions.bounds(ASKED, answers(), variants) == pytest.approx(Bounds(*expected))


def test_a_variant_that_differs_at_three_positions_widens_the_bound_of_positions_alone():
    variant = answers(0.2, asked=ASKED[:3]) + answers(asked=ASKED[:10])
    assert questions.bounds(ASKED, answers(), [variant]) == pytest.approx(Bounds(0.05, 0.6))


@pytest.mark.parametrize("other, value", [(0.04, 0.8), (0.06, 1.2), (answers(turn=3), 12), ([{}] * len(ASKED), 20)])
def test_answers_that_round_otherwise_are_within_the_bound_and_wrong_ones_beyond(other, value):
    other = other if isinstance(other, list) else answers(other)
    assert judged(other) == (pytest.approx(value, rel=0.2), GROUPS[0])
    assert judged(other, Bounds(0.07, 0.25))[0] == pytest.approx(value * 5 / 7, rel=0.2)


@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_that_is_wrong_for_some_lengths_alone(group):
    some = [wrong if one.group == group else right for one, right, wrong in zip(ASKED, answers(), answers(0.06))]
    assert judged(some) == (1.2, group)


@pytest.mark.parametrize(
    "shift, lengths, expected", [(0.3, (9, 17, 48), 1.2), (0.2, (9, 17, 48), 0.8), (0.9, (9, 17), 0)]
)
def test_three_positions_that_are_wrong_are_found_but_not_two_whose_experts_differ(shift, lengths, expected):
    other = [*(answers(shift)[0] if one.length in lengths else answers()[0] for one in ASKED)]
    value, place = judged(other)
    assert value == pytest.approx(expected)
    assert not expected or place == f"some of the {GROUPS[1]}"


def test_a_reply_of_another_form_is_none():
    def answer(*listed):
        top = [{"id": token, "logprob": value} for token, value in enumerate(listed, 1)]
        return questions.parse_answer({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]})

    assert answer(-1.0) == answer(-1.0, None) == answer(-1.0, -3.4e38) == {1: -1.0}
    assert answer(None) == {}
    with pytest.raises(KeyError):
        questions.parse_answer({"content": "x"})


# ------------------------------------------------------------------------------------------------------- what is run


@pytest.fixture
def served(pair, big_model):
    """A head and two workers that serve a model of 80 layers with 1 MiB each."""
    settings = {"llama_server_cache_type_k": "q8_0", "llama_server_flash_attention": "on"}
    return with_small_layers(pair, big_model, **settings, llama_server_extra_args=["--metrics", "--jinja"])


def work_of(cluster):
    return proof_plan.proof_work(typed(cluster.accepted()))


def test_each_side_is_the_planned_command_line_on_one_device(served):
    plan = typed(served.accepted())
    work = proof_plan.proof_work(plan)
    assert (work.layers, plan.head.proof.coverage_text(80)) == (tuple(range(80)), "80 of 80 layers")
    shared = ["--jinja", "--flash-attn on", "--cache-type-k q8_0", "--fit off", "--parallel 1", "--ctx-size 1536"]
    device = ["--device RPC0 ", "--n-gpu-layers 81", "--rpc 192.0.2.1"]
    for side, words in (
        (work.processor, ["--device none", "--n-gpu-layers 0", "--no-repack"]),
        (work.devices[1], device),
    ):
        line = " ".join(side.argv)
        assert [word for word in [*words, *shared] if word not in line] == [], line
        assert not {"--model", "--host", "--port", "--metrics", "--tensor-split"}.intersection(side.argv)
    assert [side.argv[2] for side in work.devices] == ["192.0.2.11:50052", "192.0.2.12:50052"]
    assert work.variants == (("--repack",), ("--flash-attn", "off"))
    assert work.sockets
    assert work.timeout_s > 5 * (plan.head.proof.seconds + plan.head.proof.outage_s)
    assert [side.name for side in work.devices] == ["worker1 cpu", "worker2 cpu"]
    assert [(one.id, one.name) for one in plan.head.proof.devices] == [side[:2] for side in work.devices]
    typed_json.parse(ProofWork, typed_json.dump(work))


def test_quantised_values_leave_no_other_attention(served):
    served.set("head", llama_server_cache_type_k="f16", llama_server_flash_attention="off")
    assert work_of(served).variants == (("--repack",), ("--flash-attn", "on"))
    served.set("head", llama_server_cache_type_v="q8_0", llama_server_flash_attention="on")
    assert work_of(served).variants == (("--repack",),)


def test_the_fork_neither_repacks_nor_listens_on_unix_sockets(served):
    for host in served.hosts:
        served.set(host, llama_release=IK_LLAMA, llama_accept_advisories=["rpc-remote-code-execution"])
    served.set("head", llama_server_extra_args=[])
    work = work_of(served)
    assert (work.sockets, len(work.variants)) == (False, 1)
    assert not [word for side in (work.processor, *work.devices) for word in side.argv if "repack" in word]
    served.set("worker2", llama_worker_endpoints=[{"name": "cpu", "port": 50077}])
    assert [side.id for side in work_of(served).devices] == [side.id for side in work.devices]


V_F16 = "cache_type_v: 'f16'"


@pytest.mark.parametrize(
    "attention, type_k, type_v, micro, settings",
    [
        ("on", "q8_0", "f16", None, "flash_attention: 'off'; cache_type_k: 'f16'; micro_batch: 128"),
        ("off", "f16", "f16", None, "flash_attention: 'on'; micro_batch: 128"),
        (None, "f16", "q8_0", 128, f"flash_attention: 'off', {V_F16}; flash_attention: 'on'; {V_F16}"),
    ],
)
def test_remedies_are_settings_that_the_plan_does_not_have(served, attention, type_k, type_v, micro, settings):
    types = {"llama_server_cache_type_k": type_k, "llama_server_cache_type_v": type_v}
    served.set("head", **types, llama_server_flash_attention=attention, llama_server_micro_batch=micro)
    work = work_of(served)
    assert "; ".join(one.setting for one in work.remedies).replace("llama_server_", "") == settings
    for remedy in work.remedies:
        said = zip(map(options.by_word, remedy.words[::2]), remedy.words[1::2])
        assert remedy.setting.replace("'", "") == ", ".join(f"{option.variable}: {value}" for option, value in said)


@pytest.mark.parametrize(
    "host, settings, facts, new",
    [
        ("head", {"llama_server_parallel": 2}, {}, 0),
        ("head", {"llama_server_port": 9090, "llama_server_extra_args": ["--jinja"], "llama_model_alias": "x"}, {}, 0),
        ("head", {"llama_server_batch": 1024, "llama_server_micro_batch": 256}, {}, 0),
        ("worker2", {"llama_worker_endpoints": [{"name": "cpu", "port": 50077}]}, {}, 0),
        ("head", {"llama_release": {**RELEASE, "checksum": "sha256:" + "b" * 64}}, {}, 2),
        ("head", {"llama_server_cache_type_k": "f16"}, {}, 2),
        ("head", {"llama_server_environment": {"GGML_X": "1"}}, {}, 2),
        ("head", {"llama_proof_seconds": 1}, {}, 2),
        ("worker2", {"llama_worker_endpoints": [{"name": "cpu", "environment": {"GGML_X": "1"}}]}, {}, 1),
        ("worker2", {}, {"cpu": {"model": "test", "cores": 8, "features_id": "f"}}, 1),
    ],
)
def test_what_needs_a_new_proof(served, host, settings, facts, new):
    before = work_of(served)
    for name in served.hosts if "llama_release" in settings else [host]:
        served.set(name, **settings)
    served.hosts[host]["facts"].update(facts)
    after = work_of(served)
    assert len({side.id for side in after.devices} - {side.id for side in before.devices}) == new
    assert len(after.devices) == 2


def test_a_model_that_generates_no_text_and_the_known_answer_model_need_no_proof(served):
    served.set("head", llama_server_extra_args=["--embeddings"])
    assert work_of(served) is None
    served.set("head", llama_model_path=None, llama_model_gguf_summary=None, llama_server_extra_args=[])
    served.set("head", llama_model_known_answer=known_answer_of())
    assert work_of(served) is None


def test_the_plan_predicts_what_the_proof_takes(served):
    whole = typed(served.accepted()).head.proof
    served.set("head", llama_proof_seconds=1)
    short = typed(served.accepted()).head.proof
    assert (short.layers[0], short.layers[-1], len(short.layers) < 80) == (0, 79, True)
    assert short.seconds < whole.seconds
    assert short.outage_s <= whole.outage_s
    slow = served.hosts["worker2"]["facts"]
    served.hosts["worker2"]["facts"] = {**slow, "cpu": {**slow["cpu"], "cores": 1}}
    served.set("head", llama_proof_seconds=60)
    slower = typed(served.accepted()).head.proof
    assert (slower.seconds, slower.outage_s > whole.outage_s) == (whole.seconds, True)


def test_a_context_without_room_for_a_prompt_is_not_proven(served):
    summary = served.hosts["head"]["variables"]["llama_model_gguf_summary"]
    served.set("head", llama_model_gguf_summary={**summary, "context": 2})
    assert typed(served.accepted()).head.proof.reason == "a context of 2 tokens is too short for the proof's prompts"


@pytest.mark.parametrize("limit, layers", [(20 << 20, 19), (10, 0)])
def test_a_file_of_layers_has_a_limit(served, monkeypatch, limit, layers):
    monkeypatch.setattr(proof_plan, "MAX_SAMPLE_BYTES", limit)
    plan = typed(served.accepted())
    assert len(plan.head.proof.layers) == layers
    assert bool(plan.head.proof.reason) == (proof_plan.proof_work(plan) is None) == (layers == 0)


def test_which_of_several_models_is_computed_wrong_is_said(served):
    known = served.hosts["head"]["variables"]["llama_model_gguf_summary"]
    models = [{"name": name, "path": f"/models/{name}.gguf", "gguf_summary": known} for name in ("one", "two")]
    served.set("head", llama_model_path=None, llama_model_gguf_summary=None, llama_models=models)
    plan = served.accepted()
    first, second = typed(plan).head.models
    assert (first.proof, first.reading) == (typed(plan).head.proof, typed(plan).head.reading)
    assert first.reading != second.reading
    assert not {one.id for one in first.proof.devices} & {one.id for one in second.proof.devices}
    action = actions.made(action_plugin, plan=plan)
    proofs = [Proof(9, devices=(verdict,)) for verdict in (RIGHT, WRONG)]
    action.run_in_background = mock.Mock(side_effect=[{"proof": typed_json.dump(proof)} for proof in proofs])
    assert action.run(task_vars={"inventory_hostname": "head"})["failure_text"].startswith(
        "two: worker2 cpu computes incorrectly"
    )


# ------------------------------------------------------------------------------------------------------- how it is run

SERVER = f"""#!{sys.executable}
import http.server, json, os, socketserver, sys, time
words = sys.argv[1:]
how, host = words[words.index("--model") - 1], words[words.index("--host") + 1]
def once(name, seconds=0):
    first = not os.path.exists(__file__ + name)
    open(__file__ + name, "a").close()
    return first or os.path.getmtime(__file__ + name) + seconds > time.time()
if how == "crashes":
    print("loading\\nx.cu:3: GGML_ASSERT(rows < 8) failed\\nrecv failed\\nbye", flush=True)
    sys.exit(3)
if how == "cannot load":
    sys.exit("llama_model_load: error loading model: unknown kind\\nsrv load_model: failed to load model\\nexiting due to an error")
if how == "away" or how == "starting" and once(".starting"):
    sys.exit("ggml-rpc.cpp:55: Failed to connect to 127.0.0.1:1")
if how == "lost" and once(".lost") or how == "comes back" and once(".back", 2):
    sys.exit("ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response")
if how == "hangs":
    print("start", file=open(__file__ + ".starts", "a"), flush=True)
    time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self):
        return "socket"
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.do_GET()
        if self.path == "/tokenize":
            answer = {{"tokens": [1] * asked["add_special"] + list(range(10, 40)) * (how != "mute")}}
        elif how == "stops" and len(asked["prompt"]) > 256:
            print("srv  error: TOP_K is not supported", flush=True)
            os._exit(134)
        else:
            assert (asked["grammar"], asked["prompt"][0]) == ('root ::= "1"', 1)
            wrong = how == "wrong" or how == "wrong at times" and len(asked["prompt"]) in (17, 31, 33)
            turn = (os.path.getsize(words[words.index("--model") + 1]) >> 13) * 2 + 1 + 2 * wrong
            shift = {{"near": 0.08, "rounds": 0.2}}.get(how, 0)
            logarithms = [None if how == "none" else -token / 8 - 1 + shift * (-1) ** token for token in range(64)]
            listed = [{{"id": token * turn % 64, "logprob": value}} for token, value in enumerate(logarithms)]
            if how == "sure" or "logit_bias" in asked:
                listed = [{{"id": 49, "logprob": 0.0}}, {{"id": 1, "logprob": -3.4e38}}]
            answer = {{"choices": [{{"logprobs": {{"content": [{{"top_logprobs": listed}}]}}}}]}}
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *words):
        pass
if host.endswith(".sock"):
    print(oct(os.stat(os.path.dirname(host)).st_mode), file=open(__file__ + ".mode", "w"))
    socketserver.UnixStreamServer(host, Handler).serve_forever()
http.server.HTTPServer((host, int(words[words.index("--port") + 1])), Handler).serve_forever()
"""
ID = "{:016x}".format


@pytest.fixture
def work(tmp_path):
    """What is run, with stand-ins for llama-server."""
    program, model = tmp_path / "llama-server", tmp_path / "model.gguf"
    program.write_text(SERVER)
    program.chmod(0o755)
    model.write_bytes(gguf_files.vocabulary(100))

    def of(processor="right", devices=("right", "right"), variants=(), remedies=(), reference=99, **changed):
        return ProofWork(
            **{"model": str(model), "folder": str(tmp_path), "layers": (0, 1), "bytes": 1000, "context": 300},
            **{"account": None, "environment": {}, "sockets": True, "micro_batch": 512},
            launcher=(sys.executable, "-m", runtime.__name__, "prove", "--", f"{tmp_path}/{run.PROOF_SOCKET_FILE}"),
            **{"limit_s": 300, "timeout_s": 30},
            processor=Side(ID(reference), "head's processor", (str(program), processor)),
            variants=tuple((how,) for how in variants),
            devices=tuple(Side(ID(n), f"worker{n} cpu", (str(program), how)) for n, how in enumerate(devices)),
            remedies=tuple(Remedy(f"s: {how}", (how,)) for how in remedies),
        )._replace(**changed)

    return of


def place(folder, manager="supervisor"):
    return typed_json.dump(InstallationPaths("system", manager, str(folder), str(folder), str(folder)))


@pytest.fixture
def prove(work, tmp_path):
    """Runs a proof; returns it."""

    def of(*sides, owner=listeners.is_listening_alone, **changed):
        (tmp_path / run.PROOF_FOLDER / ".nv").mkdir(parents=True, exist_ok=True)  # a driver's cache
        (tmp_path / run.PROOF_FOLDER / "partial").write_text("")
        proof = typed_json.parse(Proof, run.prove(work(*sides, **changed), owner))
        assert {path.suffix for path in (tmp_path / run.PROOF_FOLDER).iterdir()} <= {".json"}
        return proof

    return of


@pytest.mark.programs
@pytest.mark.parametrize("sockets", [True, False])
def test_each_device_that_computes_correctly_is_shown_with_its_distance(prove, tmp_path, sockets):
    proof = prove(sockets=sockets)
    sentence = "computes correctly (distance 0.000, allowed 0.050)"
    assert [one.sentence() for one in proof.devices] == [f"worker{n} cpu {sentence}" for n in (0, 1)]
    assert proof.failures() == []
    if sockets:
        assert (tmp_path / "llama-server.mode").read_text() == "0o40700\n"


@pytest.mark.programs
def test_the_bound_follows_from_variants_that_answer(prove):
    for reference, variants, said in (
        (1, (), "computes incorrectly for prompts of 2 to 8 tokens (distance 0.052, allowed 0.050)"),
        (2, ("crashes", "none"), "computes incorrectly for prompts of 2 to 8 tokens (distance 0.052, allowed 0.050)"),
        (3, ("near", "right"), "computes correctly (distance 0.052, allowed 0.062)"),
    ):
        (verdict,) = prove("right", ("rounds",), variants, reference=reference).devices
        assert verdict.sentence() == f"worker0 cpu {said}"


@pytest.mark.programs
@pytest.mark.parametrize("devices", [("starting", "lost"), ("comes back",)])
def test_a_worker_that_starts_again_has_another_chance(prove, monkeypatch, devices):
    monkeypatch.setattr(run, "WORKER_RESTART_SECONDS", 2)
    proof = prove("right", devices, remedies=("none",))
    assert (proof.untested, proof.failures()) == (None, [])


@pytest.mark.programs
@pytest.mark.parametrize(
    "how, remedies, said",
    [
        ("wrong", (), "computes incorrectly for prompts of 2 to 8 tokens (distance 0."),
        ("wrong at times", (), "computes incorrectly for some of the prompts of 9 to 64 tokens (distance 0."),
        ("none", (), "computes incorrectly for prompts of 2 to 8 tokens (distance 1.000, allowed 0.050)"),
        ("crashes", (), "crashes with status 3: x.cu:3: GGML_ASSERT(rows < 8) failed"),
        ("cannot load", (), "crashes with status 1: llama_model_load: error loading model: unknown kind"),
        ("stops", (), "crashes with status 134: srv  error: TOP_K is not supported"),
        ("away", (), "crashes with status 1: ggml-rpc.cpp:55: Failed to connect to 127.0.0.1:1"),
        ("hangs", ("right",), "was not healthy within 8 s: its log is empty"),
        ("stops", ("wrong", "right", "none"), "not supported; the device computes correctly with s: right"),
        ("wrong", ("crashes", "none"), "allowed 0.050); none of these settings helps: s: crashes; s: none"),
    ],
)
def test_the_device_that_computes_wrong_is_named_with_the_setting_that_helps(prove, monkeypatch, how, remedies, said):
    monkeypatch.setattr(run, "WORKER_TIMEOUT_SECONDS", 1)
    proof = prove("right", ("right", how), remedies=remedies, timeout_s=8 if how == "hangs" else 30)
    [sentence] = proof.failures()
    assert sentence.startswith("worker1 cpu ")
    assert said in sentence


@pytest.mark.programs
@pytest.mark.parametrize(
    "processor, changed, why",
    [
        ("crashes", {}, "head's processor with a 2-layer model crashes with status 3: x.cu:3: GGML_ASSERT"),
        ("none", {}, "head's processor with a 2-layer model produces NaN results"),
        ("sure", {}, "head's processor with a 2-layer model gives one token all probability"),
        ("mute", {}, "head's processor with a 2-layer model did not convert text into tokens"),
        ("hangs", {"timeout_s": 1}, "with a 2-layer model was not healthy within 1 s"),
        ("right", {"bytes": 1 << 60}, "too little for a 2-layer file of 1099511627776 MiB"),
        ("right", {"layers": (0, 9)}, "model.gguf has 2 layers, which do not include all of 0, 9"),
        ("right", {"context": 2}, "needs more context for a prompt"),
        ("right", {"model": "/nowhere.gguf"}, "a file with layers of /nowhere.gguf cannot be written"),
    ],
)
def test_what_cannot_be_compared_says_why(prove, tmp_path, processor, changed, why):
    proof = prove(processor, **changed)
    assert {path.read_text() for path in tmp_path.glob("*.starts")} <= {"start\n"}
    assert why in proof.untested
    assert (proof.devices, proof.failures()) == ((), [])


@pytest.mark.programs
def test_the_reference_is_computed_before_and_used_after(prove, work, tmp_path):
    assert run.prepare_reference(work(variants=("near",)), listeners.is_listening_alone)
    assert {path.suffix for path in (tmp_path / run.PROOF_FOLDER).iterdir()} == {".json", ".gguf"}
    for _again in range(2):
        assert [one.is_correct for one in prove("crashes", ("rounds", "wrong")).devices] == [True, False]
    assert run.prepare_reference(work("crashes", ("right",)), listeners.is_listening_alone)
    assert "crashes with status 3" in prove("crashes", reference=98).untested
    os.utime(tmp_path / "model.gguf", (1, 1))
    assert "crashes with status 3" in prove("crashes").untested


@pytest.mark.programs
@pytest.mark.parametrize("text", ["", "5", '[[], [{"one": 1}], []]', "[" * 9999])
def test_a_damaged_reference_is_computed_again(prove, work, tmp_path, text):
    assert run.prepare_reference(work(), listeners.is_listening_alone)
    next((tmp_path / run.PROOF_FOLDER).glob("*.json")).write_text(text)
    assert [device.is_correct for device in prove(devices=("right",)).devices] == [True]


@pytest.mark.programs
def test_a_model_without_its_own_reference_is_not_used(prove, work, tmp_path, monkeypatch):
    """Neither another proof's nor what was written of one when its proof was killed."""
    assert prove(devices=("right",)).failures() == []
    assert run.prepare_reference(work(reference=98, layers=(0,)), listeners.is_listening_alone)
    assert list((tmp_path / run.PROOF_FOLDER).glob("*.gguf"))
    assert prove("crashes").failures() == []
    monkeypatch.setattr(run, "MAX_REFERENCES", 1)
    prove(devices=("right",), reference=1)
    assert [path.name[:16] for path in (tmp_path / run.PROOF_FOLDER).iterdir()] == [ID(1)]


@pytest.mark.programs
def test_no_reference_is_left_without_memory_or_numbers(work, tmp_path, monkeypatch):
    assert not run.prepare_reference(work("crashes"), listeners.is_listening_alone)
    assert not list((tmp_path / run.PROOF_FOLDER).iterdir())
    monkeypatch.setattr(run.resources, "available_memory_mib", lambda _text: run.MIN_FREE_MEMORY_BYTES >> 20)
    assert not run.prepare_reference(work("hangs"), listeners.is_listening_alone)
    assert not list(tmp_path.glob("*.starts"))


@pytest.mark.programs
@pytest.mark.parametrize("how, why", [("hangs", "was not healthy within 1 s"), ("right", "Address already in use")])
def test_another_program_on_the_port_changes_nothing(prove, monkeypatch, how, why):
    handler = mock.Mock()  # it closes connections without an answer, and none of them is a question
    handler.side_effect = lambda connection, *_arguments: questions_seen.append(connection.recv(9))
    questions_seen = []
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as other:
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(replies, "find_free_port", lambda: other.server_address[1])
        proof = prove(how, sockets=False, owner=lambda _port: False, timeout_s=1 if how == "hangs" else 30)
        other.shutdown()
    assert why in proof.untested
    assert set(questions_seen) <= {b""}


@pytest.mark.programs
def test_a_device_is_proven_again_only_if_asked_or_with_a_larger_micro_batch(work, call, tmp_path):
    def remaining(work, prove="once", **arguments):
        answer = call(host=place(tmp_path), work=typed_json.dump(work), prove=prove, **arguments)
        return answer["remaining"], [one["name"] for one in answer["proof"]["devices"]]

    names_of = ["worker0 cpu", "worker1 cpu"]
    assert remaining(work(), stage="reference") == (2, [])
    assert list((tmp_path / run.PROOF_FOLDER).glob(f"{ID(99)}-*.json"))
    assert remaining(work("crashes")) == (2, names_of)
    assert remaining(work("crashes", micro_batch=128), stage="reference") == (0, names_of)
    assert remaining(work("crashes")) == (0, names_of)
    assert remaining(work(), "always") == remaining(work(micro_batch=513)) == (2, names_of)
    for third in ("wrong", "right"):
        assert remaining(work(devices=("right", "right", third))) == (1, [*names_of, "worker2 cpu"])


@pytest.mark.parametrize("manager, launchers", [("systemd", [()]), ("supervisor", [("launcher",)])])
def test_under_systemd_a_service_runs_the_programs_and_ends_with_the_proof(
    work, call, tmp_path, monkeypatch, manager, launchers
):
    machine, seen = machine_with(manager, tmp_path, monkeypatch), []
    monkeypatch.setattr(services, "VOLATILE_UNITS_FOLDER", machine.folder / "volatile")
    definition = machine.folder / "volatile/llamacpp-proof.service"

    def prove(_account, _step, proof_work, _owner):
        seen.append(proof_work.launcher)
        assert definition.exists() == (manager == "systemd")
        assert manager != "systemd" or definition.read_text() == "llamacpp-proof 1\n" + proof_module.UNIT_SETTINGS
        assert machine.state("llamacpp-proof") == [services.RUNNING if manager == "systemd" else services.STOPPED]
        raise Refusal("killed")

    monkeypatch.setattr(proof_module.accounts, "run_as", prove)
    arguments = {"host": machine.host, "definition": "llamacpp-proof 1\n"}
    assert call(work=typed_json.dump(work(launcher=("launcher",))), **arguments)["failed"]
    assert (seen, machine.state("llamacpp-proof"), definition.exists()) == (launchers, [services.STOPPED], False)
    monkeypatch.setattr(proof_module, "LOCK_WAIT_SECONDS", 0)
    with locks.hold(Path(machine.host["prefix"], names.PROOF_LOCK_FILE)):
        assert call(work=typed_json.dump(work()), **arguments)["failed"], "the proof of a killed playbook runs"
    assert len(seen) == 1


def test_the_service_of_a_proof_has_the_sandbox_of_the_head(served):
    plan = typed(served.accepted())
    action = actions.made(action_plugin, plan=served.accepted())
    answer = {"proof": typed_json.dump(Proof(9, devices=(RIGHT,))), "remaining": 1}
    action.run_in_background = mock.Mock(return_value=answer)
    action.run(task_vars={"inventory_hostname": "head"})
    lines = action.run_in_background.call_args.kwargs["definition"].splitlines()
    host = plan.hosts["head"]
    head = definitions.definition(host, host.services[-1]).splitlines()
    changed = ("Description", "After", "ExecStart=", "Restart", "Watchdog", "LoadCredential", "WantedBy", "[Install]")
    assert [line for line in head if line not in lines and not line.startswith((*changed, "SystemCallFilter"))] == []
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start.endswith('"prove" "--" "/opt/llamacpp/state/proof.sock"')
    assert "Nice=10" not in lines, "the module adds it"


@pytest.mark.programs
def test_long_prompts_that_a_busy_processor_had_no_time_for_are_named(prove):
    (verdict,) = prove("right", ("right",), context=1040, limit_s=0).devices
    assert (verdict.is_correct, verdict.max_compared_tokens) == (True, 513)
    assert "prompts of more than 513 tokens were not compared" in verdict.sentence()
    (verdict,) = prove("right", ("right",), context=1040).devices
    assert (verdict.is_correct, verdict.max_compared_tokens) == (True, None)


@pytest.mark.programs
def test_programs_end_with_their_client(work, tmp_path):
    proof_work = work(processor="hangs")
    with run._run_launcher(proof_work):
        connection = run._connect_to_launcher(proof_work)
        request = [[sys.executable, "-c", "print(1, flush=True); import time; time.sleep(99)"], {}, f"{tmp_path}/log"]
        connection.sendall(json.dumps(request).encode() + b"\n")
        while not Path(request[2]).exists() or not Path(request[2]).read_text():
            time.sleep(0.05)
        server = run._Server(connection, tmp_path / "log", "", 9, lambda _port: True)
        assert server.exit_status() is None
        connection.shutdown(socket.SHUT_WR)
        assert server.exit_status(30) == -signal.SIGTERM
    assert server._replace(connection=socket.socketpair()[0]).exit_status() == -signal.SIGKILL


def test_a_launcher_that_does_not_answer_leaves_the_proof_untested(prove, monkeypatch):
    monkeypatch.setattr(run, "LAUNCHER_TIMEOUT_SECONDS", 0)
    assert "the launcher of the proof does not answer" in prove(launcher=("/bin/false",)).untested


def test_a_record_that_cannot_be_read_is_none(tmp_path):
    path = tmp_path / names.PROOFS_FILE
    assert run.read_record(path).verdicts == ()
    for distance in (0.01, 0.02):
        run.record_verdicts(path, Proof(3, devices=(RIGHT._replace(distance=distance),)))
    assert run.read_record(path).verdicts == (RIGHT._replace(distance=0.02),)
    for number in range(run.MAX_VERDICTS):
        run.record_verdicts(path, Proof(3, devices=(RIGHT._replace(id=ID(number + 100)),)))
    assert [one.id for one in run.read_record(path).verdicts] == [ID(100 + each) for each in range(run.MAX_VERDICTS)]
    path.write_text(json.dumps({"verdicts": [{"id": 3}]}))
    assert run.read_record(path).verdicts == ()


# --------------------------------------------------------------------------------------------- what the operator is told

RIGHT = Verdict(ID(1), "worker1 cpu", 512, 0.01, 0.05, "prompts")
WRONG = Verdict(ID(2), "worker2 cpu", 512, 0.5, 0.05, "prompts of 2 to 8 tokens")
CRASHED = WRONG._replace(failure="crashes on signal 6")
NOT_LOADED = "The model was not loaded"
LOGS = {"systemd": "journalctl --unit={} --since=-1h --grep={}", "launchd": "grep -aiE {1} /opt/llamacpp/state/{0}.log"}


@pytest.mark.parametrize(
    "verdict, prove, manager, tried, said",
    [
        (RIGHT, "search", "systemd", 3, "^$"),
        (WRONG, "once", "systemd", 0, rf"worker2 cpu computes incorrectly .* \(.*\). {NOT_LOADED}. -e llama_proof="),
        (WRONG, "search", "systemd", 3, f"worker2 .* {NOT_LOADED}. Run the playbook again if .*. Otherwise change"),
        (CRASHED, "once", "systemd", 0, "worker2 cpu crashes on signal 6.* Worker logs: "),
        (CRASHED, "once", "launchd", 0, "worker2 cpu crashes on signal 6.* Worker logs: "),
    ],
)
def test_what_the_operator_is_told_and_which_logs_are_read(served, verdict, prove, manager, tried, said):
    plan = served.accepted()
    plan["hosts"]["worker2"]["service_manager"] = manager
    action = actions.made(action_plugin, plan=plan, prove=prove)
    action.run_in_background = mock.Mock(return_value={"proof": typed_json.dump(Proof(9, devices=(verdict,)))})
    answer = action.run(task_vars={"inventory_hostname": "head"})
    assert len(action.run_in_background.call_args.kwargs["work"]["remedies"]) == tried
    commands = [LOGS[manager].format("llamacpp-worker-cpu", f"'{run.REASON_LINE_PATTERN}'")] if verdict.failure else []
    assert answer["crashed_workers"] == [{"host": "worker2", "command": command} for command in commands]
    assert re.match(said, f"{answer['failure_text']}. {answer['remedy']}" if answer["failure_text"] else "")
    assert ("Worker logs: " in answer["remedy"]) == bool(commands)


@pytest.mark.parametrize(
    "arguments, answer, shown, warned",
    [
        ({}, {"proof": Proof(9, devices=(RIGHT,)), "remaining": 1}, "allowed 0.050), 9 s", None),
        ({}, {"proof": Proof(0, devices=(RIGHT,)), "remaining": 0}, "according to an earlier run", None),
        ({}, {"proof": Proof(0, untested="no room")}, None, "the devices for big were not tested: no room"),
        ({"stage": "reference"}, {"proof": Proof(0)}, "80 of 80 layers of big for about", None),
        ({"prove": "never"}, {}, None, None),
        ({"check_mode": True}, {}, None, None),
    ],
)
def test_what_is_shown_of_a_proof(served, monkeypatch, arguments, answer, shown, warned):
    lines, warnings = [], []
    display = mock.Mock(display=lines.append, warning=warnings.append)
    monkeypatch.setattr(action_plugin, "display", display)
    action = actions.made(action_plugin, plan=served.accepted(), **arguments)
    action.run_in_background = mock.Mock(return_value=typed_json.dump(answer))
    assert action.run(task_vars={"inventory_hostname": "head"})["failure_text"] == ""
    assert action.run_in_background.called == bool(answer)
    assert warnings == [warned] * bool(warned)
    assert [shown in line for line in lines] == [True] * bool(shown)


def test_a_proof_that_failed_says_on_which_host(served):
    action = actions.made(action_plugin, plan=served.accepted())
    action.run_in_background = mock.Mock(return_value={"failed": True, "msg": "disk full"})
    with pytest.raises(AnsibleActionFail, match="the proof on head did not complete: disk full"):
        action.run(task_vars={"inventory_hostname": "head"})


def test_a_disk_without_room_for_the_record_fails_no_proof(served, work, call, tmp_path, monkeypatch):
    proof, warnings = Proof(9, devices=(RIGHT,)), []
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "/opt/x"))
    monkeypatch.setattr(run, "replace_file", full)
    monkeypatch.setattr(run, "prove", lambda *_arguments: typed_json.dump(proof))
    reported = call(host=place(tmp_path), work=typed_json.dump(work()))
    assert (reported.get("failed"), typed_json.parse(Proof, reported["proof"])) == (None, proof)
    monkeypatch.setattr(action_plugin.display, "warning", warnings.append)
    action = actions.made(action_plugin, plan=served.accepted())
    action.run_in_background = mock.Mock(return_value=reported)
    assert action.run(task_vars={"inventory_hostname": "head"})["failure_text"] == ""
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "head could not record the verdicts, so the next run repeats the proof: /opt/x: No space left on device. Free space on"
    )


@pytest.mark.programs
def test_a_worker_s_log_is_searched_for_what_tells_why_it_crashed(tmp_path):
    telling = ["x.cu:3: out of room", "CUDA error: no kernel image", "GGML_ASSERT(rows < 8) failed"]
    others = ["Accepted client connection", "libggml-base.so(ggml_abort+0x152) [0x7f]"]
    (tmp_path / "log").write_text("\n".join(telling + others))
    argv = ["grep", "-aiE", run.REASON_LINE_PATTERN, tmp_path / "log"]
    assert subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines() == telling


@pytest.mark.parametrize(
    "verdicts, status, said",
    [
        ((), "not tested", "worker1 cpu, worker2 cpu: not proven; site.yml runs the proof"),
        ((RIGHT,), "not tested", "allowed 0.050); worker2 cpu: not proven; "),
        ((RIGHT, WRONG._replace(distance=0.05)), "passed", "allowed 0.050); the proof uses 80 of 80 layers"),
        ((RIGHT, WRONG), "not tested", "worker2 cpu computes incorrectly for prompts of 2 to 8 tokens"),
        ((RIGHT, CRASHED), "not tested", "worker2 cpu crashes on signal 6"),
    ],
)
def test_verify_shows_what_a_proof_found(served, tmp_path, verdicts, status, said):
    plan, page = served.accepted(), tmp_path / "page.html"
    ids = [one.id for one in typed(plan).head.proof.devices]
    known = tuple(verdict._replace(id=identifier) for identifier, verdict in zip(ids, verdicts))
    evidence = verification.healthy(typed(plan))._replace(verdicts=(RIGHT, *known))
    for lacks_proof, told in ((False, ""), (True, judge.NO_PROOF_NOTE)):
        verification.verify(plan, evidence, lacks_proof=lacks_proof, report=str(page))
        found = '<td class="([a-z-]+)">.*>computes<.*>worker1 cpu, worker2 cpu</td><td class="long">(.*)</td>'
        [(result, evident)] = re.findall(found, html.unescape(page.read_text()))
        assert (result, said in evident) == (status.replace(" ", "-"), True)
        assert (judge.NO_PROOF_NOTE in evident, evident.endswith(told)) == (lacks_proof, True)


FEW = {"layers": (0,), "every_kind": False}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"layers": (), "reason": "no names"}, "the devices cannot be tested with this model: no names"),
        (FEW, "the proof uses 1 of 80 layers, not every kind of layer"),
        ({**FEW, "experts": False}, "the proof uses 1 of 80 layers, none with experts"),
    ],
)
def test_verify_says_what_a_proof_does_not_cover(served, changes, said):
    plan = typed(served.accepted())
    plan = plan._replace(head=plan.head._replace(proof=plan.head.proof._replace(**changes)))
    (check,) = verification.checks(verification.judged(plan), "computes")
    assert (check.status, check.evidence.endswith(said)) == ("not tested", True)
