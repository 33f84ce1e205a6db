"""The proof by the first layers: which are taken, how they are cut, what is run, and when answers are the same. Real llama-servers are asked by the integration
tests; here they are stand-ins that answer as recorded ones do."""

import html
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import gguf_files
import pytest
from ansible_collections.llamacpp.cluster.plugins.action import proof as action_plugin
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    first_layers,
    gguf,
    header_summary,
    known_answer,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ExternalWorkerPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import first_layers as planned
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions, run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Compared, Proof, Remedy, Side, Work
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import judge
from conftest import known_answer_of, typed
from support import actions
from support.verification import healthy, verify

KEYS = (
    ("general.architecture", gguf_files.STRING, "unheard"),
    ("unheard.block_count", gguf_files.U32, 4),
    ("unheard.nextn_predict_layers", gguf_files.U32, 1),
    ("unheard.attention.shared_kv_layers", gguf_files.U32, 1),
    ("unheard.attention.head_count_kv", gguf_files.ARRAY, (gguf_files.U32, [1, 2, 3, 4])),
    ("unheard.swiglu_limits", gguf_files.ARRAY, (gguf_files.F32, [1.5, 2.5, 3.5])),
    ("unheard.rope.dimension_sections", gguf_files.ARRAY, (gguf_files.I32, [8, 8, 8, 8])),
    ("unheard.attention.head_count", gguf_files.U32, 1),
    ("unheard.embedding_length", gguf_files.U32, 64),
    ("unheard.context_length", gguf_files.U32, 128),
    ("tokenizer.ggml.tokens", gguf_files.ARRAY, (gguf_files.STRING, [f"token {number}" for number in range(5000)])),
    ("other.\u200bname", gguf_files.U32, 1),
    ("other.list", gguf_files.ARRAY, (gguf_files.U32, [1, 2, 3, 4])),
)
TENSORS = (
    ("token_embd.weight", (64, 32), 0),
    ("blk.0.attn_q.weight", (64, 3), 1),
    ("blk.1.attn_q.weight", (64, 5), 8),
    ("blk.10.attn_q.weight", (64, 7), 1),
    ("blk.2.attn_q.weight", (64, 7), 1),
    ("blk.3.nextn.eh_proj.weight", (64, 7), 1),
    ("output_norm.weight", (64,), 0),
)


def noise(path):
    """Gives each byte of the tensors a value."""
    data = bytearray(path.read_bytes())
    for place in gguf.tensor_places(str(path)).values():
        data[place.offset : place.offset + place.bytes] = os.urandom(place.bytes)
    path.write_bytes(data)


def bytes_of(path):
    return {
        name: Path(place.path).read_bytes()[place.offset : place.offset + place.bytes]
        for name, place in gguf.tensor_places(str(path)).items()
    }


@pytest.mark.parametrize("alignment", [32, 64])
def test_the_first_layers_of_an_architecture_that_nobody_has_heard_of(tmp_path, alignment):
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    keys = (*KEYS, ("general.alignment", gguf_files.U32, alignment))
    whole.write_bytes(gguf_files.model(keys=keys, tensors=TENSORS, alignment=alignment))
    noise(whole)
    first_layers.write(str(whole), cut, 2)
    before, after = gguf.read_path(str(whole)), gguf.read_path(str(cut))
    kept = [name for name in before.tensors if not name.startswith(("blk.10", "blk.2", "blk.3"))]
    assert bytes_of(cut) == {name: data for name, data in bytes_of(whole).items() if name in kept}
    assert after.tensors == {name: before.tensors[name] for name in kept}
    assert after.metadata == {
        **before.metadata,
        "unheard.block_count": 2,
        "unheard.nextn_predict_layers": 0,
        "unheard.attention.shared_kv_layers": 0,
        "unheard.attention.head_count_kv": [1, 2],
        "unheard.swiglu_limits": [1.5, 2.5],
    }


def test_the_first_layers_of_a_model_in_parts_are_one_file(tmp_path):
    first, *others = gguf_files.write_parts(tmp_path)
    for part in (first, *others):
        data = bytearray(part.read_bytes())
        data[-64:] = os.urandom(64)
        part.write_bytes(data)
    first_layers.write(str(first), tmp_path / "cut.gguf", 2)
    after = gguf.read_path(str(tmp_path / "cut.gguf"))
    assert "split.count" not in after.metadata
    assert bytes_of(tmp_path / "cut.gguf") == bytes_of(first)


@pytest.mark.parametrize(
    "keys, layers, why",
    [
        (KEYS[:1], 1, "None layers, of which 1"),
        (KEYS, 5, "4 layers, of which 5"),
        ((KEYS[0], ("unheard.block_count", gguf_files.STRING, "4")), 1, "'4' layers, of which 1"),
    ],
)
def test_a_file_without_so_many_layers(tmp_path, keys, layers, why):
    (tmp_path / "whole.gguf").write_bytes(gguf_files.model(keys=keys, tensors=TENSORS))
    with pytest.raises(gguf.GGUFError, match=why):
        first_layers.write(str(tmp_path / "whole.gguf"), tmp_path / "cut.gguf", layers)


def summary_of(groups, layers=8, **keys):
    """:param groups: layers in which a tensor of 100 bytes is."""
    summary = header_summary.parse(known_answer.summary(layers, 128, "f32"))
    outside = tuple(group for group in summary.named_tensors if group.layers is None)
    rows = tuple(
        outside[0]._replace(name=f"blk.*.{index}", bytes=100, layers=tuple(of)) for index, of in enumerate(groups)
    )
    return summary._replace(
        tensors=(*outside, *rows), layer_bytes=(100,) * layers, keys=(*summary.keys, *keys.items())
    ), sum(group.bytes for group in outside)


@pytest.mark.parametrize(
    "groups, keys, devices, room, expected",
    [
        ([range(8)], {}, 3, 10_000, (3, True)),
        ([range(3), range(3, 8)], {}, 2, 10_000, (4, True)),
        ([range(8), (3, 7)], {}, 1, 10_000, (4, True)),
        ([range(8)], {"attention.sliding_window_pattern": (1, 1, 0, 1, 1, 0, 1, 1)}, 1, 10_000, (3, True)),
        ([range(8)], {}, 9, 10_000, (8, True)),
        ([range(5), range(5, 8)], {}, 2, 300, (3, False)),
        ([range(8)], {}, 4, 100, (1, True)),
        ([range(7), (7,)], {"nextn_predict_layers": 1}, 2, 10_000, (2, True)),
    ],
)
def test_which_layers_are_taken(groups, keys, devices, room, expected):
    summary, outside = summary_of(groups, **keys)
    chosen = first_layers.choose(summary, devices, outside + room, 99)
    assert (chosen.layers, chosen.of_each_kind) == expected
    assert chosen.bytes == outside + 100 * chosen.layers
    assert first_layers.choose(summary, devices, outside + 99, 99) is None


def answers(shift=0.0, seed=1):
    """To each question; ``shift`` is what the logarithms are off, with alternating sign."""
    return [
        {
            token: -math.log(2 + (token * seed) % 64) + shift * (-1) ** token
            for token in sorted(range(64), key=lambda token: (token * seed) % 64)
        }
        for _question in ASKED
    ]


GROUPS = [
    *(f"in prompts {lengths}" for lengths in questions.RANGES),
    "in single tokens beyond 1024",
    "in single tokens beyond 4096",
]
EVERYWHERE = ", ".join(GROUPS)
ASKED = questions.questions(planned.CONTEXT)


def test_what_is_asked_fits_the_context():
    assert len(ASKED) == 64
    assert [*dict.fromkeys(one.group for one in ASKED)] == GROUPS
    assert max(one.length for one in ASKED) < planned.CONTEXT
    assert [*dict.fromkeys(one.group for one in questions.questions(2048))] == GROUPS[:-1]
    assert all(0 <= token < 100 for token in questions.tokens(100))
    tokens = questions.tokens(1 << 20)
    assert [len(one.prompt(tokens)) for one in ASKED] == [one.length for one in ASKED]
    short = [set(one.prompt(tokens)) for one in ASKED[:7]]
    assert len(set.union(*short)) == sum(map(len, short))
    assert all(two.prompt(tokens)[:-1] == one.prompt(tokens) for one, two in zip(ASKED, ASKED[1:]) if two.goes_on)


def compare(other, processor):
    return questions.compare(Side("x", (), processor), ASKED, answers(), other)


@pytest.mark.parametrize(
    "shift, processor, differs", [(0.01, True, ()), (0.3, False, ()), (0.3, True, tuple(GROUPS[:4]))]
)
def test_answers_that_round_otherwise_are_the_same_and_processors_round_prompts_alike(shift, processor, differs):
    assert compare(answers(shift), processor) == Compared("x", 64, 64, differs)


@pytest.mark.parametrize("other", [answers(2.0), answers(seed=5), [{}] * len(ASKED)])
def test_answers_of_a_device_that_computes_wrong(other):
    assert compare(other, processor=False).differs == tuple(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_that_is_wrong_for_some_numbers_of_rows_alone(group):
    some = [wrong if one.group == group else right for one, right, wrong in zip(ASKED, answers(), answers(seed=5))]
    assert compare(some, processor=False).differs == (group,)


def test_experts_that_are_chosen_otherwise_now_and_then_are_no_fault():
    some = [wrong if index % 5 == 0 else right for index, (right, wrong) in enumerate(zip(answers(), answers(seed=5)))]
    assert compare(some, processor=False).differs == ()


def test_a_reply_of_another_form_is_none():
    def answer(*listed):
        top = [{"id": token, "logprob": value} for token, value in enumerate(listed, 1)]
        return questions.answer_of({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]})

    assert answer(-1.0) == answer(-1.0, None) == answer(-1.0, -3.4e38) == {1: -1.0}
    assert answer(None) == {}
    with pytest.raises(KeyError):
        questions.answer_of({"content": "x"})


# ------------------------------------------------------------------------------------------------------- what is run


@pytest.fixture
def served(pair, big_model):
    """A head and two workers that serve a model of 80 layers."""
    pair.set(
        "head",
        **{
            "llama_model_known_answer": None,
            "llama_model_path": "/models/big.gguf",
            "llama_model_gguf_summary": {**big_model, "layer_bytes": [1 << 20] * 80},
            "llama_placement": "all",
            "llama_server_cache_type_k": "q8_0",
            "llama_server_flash_attention": "on",
            "llama_server_extra_args": ["--metrics", "--jinja", "--draft-max", "3"],
        },
    )
    rows = pair.hosts["head"]["variables"]["llama_model_gguf_summary"]["tensors"]
    rows[0] = {**rows[0], "bytes": 1 << 20}
    return pair


def test_each_side_is_the_planned_command_line_with_another_model(served):
    plan = typed(served.accepted())
    assert plan.head.first_layers._replace(seconds=0, bytes=0) == (2, 0, True, 0)
    work = planned.work_of(plan)
    shared = ["--jinja", "--flash-attn on", "--cache-type-k q8_0", "--fit off", "--parallel 1", "--ctx-size 4352"]
    expected = {
        work.processor: ["--device none", "--n-gpu-layers 0"],
        work.together: [
            "--device RPC0,RPC1",
            "--n-gpu-layers 3",
            "--tensor-split 1,2",
            "--rpc 192.0.2.11:50052,192.0.2.12",
        ],
        work.devices[1]: ["--device RPC0 ", "--n-gpu-layers 3", "--rpc 192.0.2.12:50052 "],
    }
    for side, words in expected.items():
        said = " ".join(side.argv)
        assert [word for word in [*words, *shared] if word not in said] == [], said
        assert not {"--model", "--port", "--metrics", "--tensor-split"}.intersection(side.argv) - (
            {"--tensor-split"} if side is work.together else set()
        )
    assert [(side.name, side.processor) for side in work.devices] == [("worker1 cpu", True), ("worker2 cpu", True)]
    typed_json.parse(Work, typed_json.dump(work))


@pytest.mark.parametrize(
    "attention, type_k, type_v, micro, settings",
    [
        ("on", "q8_0", "f16", None, ["flash_attention: 'off'", "cache_type_k: 'f16'", "micro_batch: 128"]),
        ("off", "f16", "f16", None, ["flash_attention: 'on'", "micro_batch: 128"]),
        (
            None,
            "f16",
            "q8_0",
            128,
            ["flash_attention: 'off', cache_type_v: 'f16'", "flash_attention: 'on'", "cache_type_v: 'f16'"],
        ),
    ],
)
def test_remedies_are_settings_that_the_planned_command_line_does_not_have(
    served, attention, type_k, type_v, micro, settings
):
    types = {"llama_server_cache_type_k": type_k, "llama_server_cache_type_v": type_v}
    served.set("head", **types, llama_server_flash_attention=attention, llama_server_micro_batch=micro)
    work = planned.work_of(typed(served.accepted()))
    assert [one.setting.replace("llama_server_", "") for one in work.remedies] == settings
    for remedy in work.remedies:
        said = zip(map(options.by_word, remedy.words[::2]), remedy.words[1::2])
        assert remedy.setting.replace("'", "") == ", ".join(f"{option.variable}: {value}" for option, value in said)


def test_a_proof_is_another_one_where_its_result_may_be(served):
    first = planned.work_of(typed(served.accepted())).id
    assert planned.work_of(typed(served.accepted())).id == first
    served.set("head", llama_server_flash_attention="off", llama_server_cache_type_k="f16")
    assert planned.work_of(typed(served.accepted())).id != first


def test_a_model_that_makes_no_text_and_the_known_answer_model_need_no_proof(served):
    served.set("head", llama_server_extra_args=["--embeddings"])
    assert planned.work_of(typed(served.accepted())) is None
    served.set("head", llama_model_path=None, llama_model_gguf_summary=None, llama_model_known_answer=known_answer_of())
    served.set("head", llama_server_extra_args=[])
    assert planned.work_of(typed(served.accepted())) is None


def test_an_accelerator_may_round_otherwise_than_the_processor(served):
    plan = typed(served.accepted())
    (worker,) = plan.hosts["worker2"].workers
    host = plan.hosts["worker2"]._replace(workers=(worker._replace(backend="vulkan"),))
    work = planned.work_of(plan._replace(hosts={**plan.hosts, "worker2": host}))
    assert [side.processor for side in (work.processor, *work.devices, work.together)] == [True, True, False, False]
    external = ExternalWorkerPlan("e", "other", worker.endpoint, "cpu", 1, None, True)
    hosts = {**plan.hosts, "worker2": host._replace(workers=())}
    assert planned.work_of(plan._replace(hosts=hosts, external_workers=(external,))).together.processor


def test_each_device_is_asked_alone_where_there_are_fewer_layers_and_each_loads_them(served, monkeypatch):
    both = typed(served.accepted()).head.first_layers
    monkeypatch.setattr(planned, "MOST_BYTES", both.bytes - 1)
    plan = typed(served.accepted())
    assert plan.head.first_layers.seconds > both.seconds
    work = planned.work_of(plan)
    assert (work.layers, work.together, len(work.devices)) == (1, None, 2)
    assert work.patience > 5 * plan.head.first_layers.seconds


def test_what_the_processor_would_compute_for_long_has_fewer_layers_but_one(served):
    for parameters, layers in ((10**9, 2), (10**13, 1)):
        served.hosts["head"]["variables"]["llama_model_gguf_summary"]["parameters"] = parameters
        assert typed(served.accepted()).head.first_layers.layers == layers


def test_slow_workers_make_a_proof_longer(served):
    served.hosts["head"]["variables"]["llama_model_gguf_summary"]["parameters"] = 10**12
    fast, slow = typed(served.accepted()).head.first_layers, served.hosts["worker2"]["facts"]
    served.hosts["worker2"]["facts"] = {**slow, "cpu": {**slow["cpu"], "cores": 1}}
    assert typed(served.accepted()).head.first_layers.seconds > 2 * fast.seconds


def test_which_of_several_models_is_computed_wrong_is_said(served):
    known = served.hosts["head"]["variables"]["llama_model_gguf_summary"]
    models = [{"name": name, "path": f"/models/{name}.gguf", "gguf_summary": known} for name in ("one", "two")]
    served.set("head", llama_model_path=None, llama_model_gguf_summary=None, llama_models=models)
    action = actions.made(action_plugin, plan=served.accepted())
    proofs = [Proof("0" * 16, 9, **one) for one in ({"together": Compared("x", 64, 64, ())}, WRONG)]
    action.background = mock.Mock(side_effect=[{"proof": typed_json.dump(proof)} for proof in proofs])
    assert action.run(task_vars={"inventory_hostname": "head"})["wrong"].startswith("two: worker2 cpu computes wrong")


# ------------------------------------------------------------------------------------------------------- how it is run

SERVER = f"""#!{sys.executable}
import http.server, json, os, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
how = [word for word in sys.argv[1 : sys.argv.index("--model")] if word != "--no-repack"][-1]
if how == "ends" or how == "tiles" and "--no-repack" not in sys.argv:
    print("loading\\nx.cu:3: GGML_ASSERT(rows < 8) failed\\nrecv failed\\nbye", flush=True)
    sys.exit(3)
if how == "lost" and not os.path.exists(__file__ + ".lost"):
    open(__file__ + ".lost", "w").close()
    sys.exit("ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response")
if how == "comes back":
    open(__file__ + ".lost", "a").close()
    if os.path.getmtime(__file__ + ".lost") + 3 > time.time():
        sys.exit("ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response")
if how == "hangs":
    print("start", file=open(__file__ + ".starts", "a"), flush=True)
    time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if self.path != "/v1/completions":  # ik_llama.cpp has its own form there, and adds a bias to what it lists
            answer = {{"completion_probabilities": [{{"probs": [{{"tok_str": "1", "prob": 1.0}}]}}]}}
        elif how == "stops" and len(asked["prompt"]) > 1024:
            print("srv  error: TOP_K is not supported", flush=True)
            os._exit(134)
        else:
            turn = 3 if how == "wrong" else 1
            listed = [{{"id": token * turn % 64, "logprob": None if how == "none" else -token / 8}} for token in range(64)]
            if how == "sure" or "logit_bias" in asked:
                listed = [{{"id": 49, "logprob": 0.0}}, {{"id": 1, "logprob": -3.4e38}}]
            answer = {{"choices": [{{"logprobs": {{"content": [{{"top_logprobs": listed}}]}}}}]}}
            assert asked["grammar"] == 'root ::= "1"'
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def prove(tmp_path):
    """Runs a proof whose sides are stand-ins; returns it."""
    program, model = tmp_path / "llama-server", tmp_path / "model.gguf"
    program.write_text(SERVER)
    program.chmod(0o755)
    model.write_bytes(gguf_files.vocabulary(100))

    def of(processor="right", together="right", devices=("right", "right"), remedies=(), **changed):
        def side(name, how):
            return Side(name, (str(program), how), True)

        work = Work(
            id="0" * 16,
            model=str(model),
            layers=1,
            bytes=1000,
            folder=str(tmp_path),
            account=None,
            environment={},
            client=(),
            context=4352,
            patience=30,
            processor=side("head's processor", processor),
            together=side("both", together) if together else None,
            devices=tuple(side(f"worker{index} cpu", how) for index, how in enumerate(devices)),
            remedies=tuple(Remedy(f"s: {how}", (how,)) for how in remedies),
        )
        (tmp_path / "first-layers-of-one-that-was-killed").mkdir()
        proof = typed_json.parse(Proof, run.prove(work._replace(**changed)))
        assert not list(tmp_path.glob("first-layers-*"))
        return proof

    return of


@pytest.mark.programs
def test_devices_that_compute_right_are_asked_together_once(prove):
    proof = prove(devices=("ends", "ends"))
    assert proof.right
    assert proof.together.sentence() == "both computes right: likeliest token equal in 64 of 64"
    assert proof.devices == ()


@pytest.mark.programs
@pytest.mark.parametrize(
    "sides",
    [
        pytest.param({"processor": "tiles"}, id="a processor that ends with repacked weights"),
        pytest.param({"together": "lost"}, id="a connection that broke"),
        pytest.param(
            {"together": "comes back", "client": ("/usr/bin/env",)}, id="a worker behind a tunnel, started again"
        ),
    ],
)
def test_what_is_no_verdict(prove, monkeypatch, sides):
    monkeypatch.setattr(run, "RESTART_SECONDS", 4)
    assert prove(**sides).right


@pytest.mark.programs
def test_no_settings_are_tried_where_a_server_hangs(prove):
    proof = prove(together="wrong", devices=("right", "hangs"), remedies=("right",), patience=8)
    assert proof.wrong() == ["worker1 cpu was not healthy within 8 s: without a word"]


@pytest.mark.programs
@pytest.mark.parametrize(
    "together, devices, said",
    [
        (
            "wrong",
            ("right", "wrong"),
            [f"worker1 cpu computes wrong {EVERYWHERE}: likeliest token equal in 64 of 64 (64 of 64 on worker0 cpu)"],
        ),
        ("ends", ("ends", "right"), ["worker0 cpu ends with status 3: x.cu:3: GGML_ASSERT(rows < 8) failed"]),
        ("stops", ("right", "stops"), ["worker1 cpu ends with status 134: srv  error: TOP_K is not supported"]),
        (
            "none",
            ("right", "right"),
            [
                f"both computes wrong {EVERYWHERE}: likeliest token equal in 0 of 64, and each of them alone computes right"
            ],
        ),
        (None, ("right", "ends"), ["worker1 cpu ends with status 3: x.cu:3: GGML_ASSERT(rows < 8) failed"]),
    ],
)
def test_the_device_that_computes_wrong_is_named(prove, together, devices, said):
    proof = prove(together=together, devices=devices)
    assert not proof.right
    assert proof.wrong() == said


@pytest.mark.programs
@pytest.mark.parametrize(
    "devices, remedies, said",
    [
        (("right", "stops"), ("wrong", "right", "none"), "with s: right it computes right"),
        (("right", "wrong"), ("ends", "none"), "none of s: ends; s: none makes it right"),
        (("right", "right"), ("right",), "with s: right it computes right, and each of them alone computes right"),
    ],
)
def test_settings_are_tried_where_a_device_computes_wrong_and_the_first_that_helps_is_named(
    prove, devices, remedies, said
):
    [sentence] = prove(together="wrong", devices=devices, remedies=remedies).wrong()
    assert sentence.endswith(f"; {said}")


ENDS = Compared("worker2 cpu", 0, 64, (), "ends by signal 6")
WRONG, ENDED = {"devices": (Compared("worker2 cpu", 3, 64, ("everywhere",)),)}, {"devices": (ENDS,)}


@pytest.mark.parametrize(
    "found, prove, manager, tried, ended, said",
    [
        ({"devices": (ENDS._replace(ended=None),)}, "search", "systemd", 3, [], "^$"),
        (
            WRONG,
            "once",
            "systemd",
            0,
            [],
            "worker2 cpu computes wrong everywhere.*64. The model was not loaded. -e llama_proof=search tries",
        ),
        (
            WRONG,
            "search",
            "systemd",
            3,
            [],
            "worker2 .* The model was not loaded. Run it again where .*, else set what makes it right",
        ),
        (
            ENDED,
            "once",
            "systemd",
            0,
            ["journalctl --unit={} --since=-1h --grep=TELLING"],
            "worker2 cpu ends by signal 6",
        ),
        (ENDED, "once", "launchd", 0, ["grep -aiE TELLING /opt/llamacpp/state/{}.log"], "worker2 cpu ends by signal 6"),
        (
            {"together": ENDS._replace(name="both")},
            "once",
            "systemd",
            0,
            ["journalctl --unit={} --since=-1h --grep=TELLING"],
            "both ends by signal 6, and each of them alone computes right",
        ),
    ],
)
def test_what_the_operator_is_told_and_which_logs_are_read(served, found, prove, manager, tried, ended, said):
    plan = served.accepted()
    plan["hosts"]["worker2"]["service_manager"] = manager
    action = actions.made(action_plugin, plan=plan, prove=prove)
    action.background = mock.Mock(return_value={"proof": typed_json.dump(Proof("0" * 16, 9, **found))})
    answer = action.run(task_vars={"inventory_hostname": "head"})
    assert len(action.background.call_args.kwargs["work"]["remedies"]) == tried
    telling = f"'{run.TELLING}'"
    commands = [command.format("llamacpp-worker-cpu").replace("TELLING", telling) for command in ended]
    assert [one["command"] for one in answer["ended"] if one["host"] == "worker2"] == commands
    assert ("worker1" in {one["host"] for one in answer["ended"]}) == ("together" in found)
    assert re.match(said, f"{answer['wrong']}. {answer['fix']}" if answer["wrong"] else "")
    assert ("Logs of the workers: " in answer["fix"]) == bool(ended)


@pytest.mark.programs
@pytest.mark.parametrize(
    "line, tells",
    [
        ("x.cu:3: out of room", True),
        ("CUDA error: no kernel image", True),
        ("GGML_ASSERT(rows < 8) failed", True),
        ("Accepted client connection", False),
        ("libggml-base.so(ggml_abort+0x152) [0x7f]", False),
    ],
)
def test_a_worker_s_log_is_searched_for_what_tells_why_it_ended(tmp_path, line, tells):
    log = tmp_path / "log"
    log.write_text(f"{line}\n")
    found = subprocess.run(["grep", "-aiE", run.TELLING, log], stdout=subprocess.PIPE, text=True, check=False)
    assert found.stdout == (f"{line}\n" if tells else "")


@pytest.mark.programs
@pytest.mark.parametrize(
    "changed, why",
    [
        ({"processor": "ends"}, "head's processor with the first layers (1) ends with status 3: x.cu:3: GGML_ASSERT"),
        ({"processor": "none"}, "head's processor with the first layers (1) computes no numbers"),
        ({"processor": "sure"}, "head's processor with the first layers (1) computes no numbers"),
        ({"processor": "hangs", "patience": 1}, "with the first layers (1) was not healthy within 1 s"),
        ({"bytes": 1 << 60}, "a file of its first layers (1) has 1099511627776 MiB, and"),
        ({"layers": 9}, "model.gguf has 2 layers, of which 9 cannot be taken"),
        ({"context": 2}, "computes no numbers"),
        ({"model": "/nowhere.gguf"}, "a file of the first layers of /nowhere.gguf cannot be made"),
    ],
)
def test_what_cannot_be_compared_says_why(prove, tmp_path, changed, why):
    proof = prove(**changed)
    assert {path.read_text() for path in tmp_path.glob("*.starts")} <= {"start\n"}
    assert not proof.right
    assert why in proof.untested
    assert proof.wrong() == []


@pytest.mark.parametrize(
    "proof, status, said",
    [
        (None, "not tested", "no proof is recorded"),
        (Proof("", 9, untested="no room"), "not tested", "no room"),
        (
            Proof("", 9, together=Compared("x", 64, 64, ())),
            "passed",
            "64 of 64, against head's processor, 2 of 80 layers",
        ),
        (
            Proof("", 9, devices=(Compared("x", 3, 64, ("everywhere",)),)),
            "not tested",
            "x computes wrong everywhere",
        ),
    ],
)
def test_verify_shows_what_a_proof_found(served, tmp_path, proof, status, said):
    plan, page = served.accepted(), tmp_path / "page.html"
    proofs = (proof._replace(id=planned.work_of(typed(plan)).id),) if proof else ()
    evidence = healthy(typed(plan))._replace(proofs=proofs)
    for unproven, told in ((False, ""), (True, judge.NOT_REPEATED)):
        verify(plan, evidence, unproven=unproven, report=str(page))
        found = '<td class="([a-z-]+)">.*>computes<.*>worker1 cpu, worker2 cpu</td><td class="long">(.*)</td>'
        [(result, evident)] = re.findall(found, html.unescape(page.read_text()))
        assert (result, said in evident) == (status.replace(" ", "-"), True)
        assert (judge.NOT_REPEATED in evident, evident.endswith(told)) == (unproven, True)


def test_a_record_that_cannot_be_read_is_none(tmp_path):
    path, proof = tmp_path / names.PROOF, Proof("0" * 16, 2, devices=(Compared("x", 1, 2, ()),))
    assert run.known(path) == {}
    run.keep(path, proof)
    again = proof._replace(seconds=3)
    run.keep(path, again)
    assert run.known(path) == {proof.id: again}
    for number in range(20):
        run.keep(path, proof._replace(id=f"{number:016}"))
    assert list(run.known(path)) == [f"{number:016}" for number in range(4, 20)]
    path.write_text(json.dumps({"proofs": [{"id": 3}]}))
    assert run.known(path) == {}
