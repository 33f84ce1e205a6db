"""The proof on real llama-servers and workers: no false alarm, and the device that computes something else is named.

A device that computes incorrectly is one that is told another value of the model's header than the head's processor.
"""

import sys
from pathlib import Path

import models
import pytest
import real_models
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import listeners
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, ProofWork, Side
from conftest import free_port

MODELS = {
    "dense": models.dense,
    "tied": models.tied,
    "experts": models.experts,
    "latent": models.latent,
    "windowed": models.windowed,
    "sinks": models.sinks,
    "recurrent": models.recurrent,
    "mixed": models.mixed,
    "further tokens": models.further_tokens,
}
KINDS = [
    ("f16", ()),
    ("q8_0", ()),
    ("q4_K", ()),
    ("mxfp4", ()),
    ("f16", ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--flash-attn", "on")),
]
LAYERS = 4


@pytest.fixture
def prove(programs, workers, tmp_path):
    """Proves a model on two workers; ``wrong`` are further words for the second one."""

    def of(name, kind="f16", words=(), wrong=(), endpoints=None, layers=LAYERS, context=4352):
        path = name if isinstance(name, Path) else tmp_path / "model.gguf"
        if path is not name:
            models.write(str(path), MODELS[name](), kind)
        common = ["--ctx-size", str(context), "--parallel", "1", "--fit", "off", "--cache-ram", "0", *words]

        def side(number, title, endpoint, *further):
            device = ["--rpc", endpoint, "--device", "RPC0", "--n-gpu-layers", str(layers + 1)]
            argv = [*(device if endpoint else ["--device", "none", "--no-repack"]), *common, *further]
            return Side(f"{number:016x}", title, (str(programs / "llama-server"), *argv))

        first, second = endpoints or workers[:2]
        quantised = "--cache-type-v" in words
        work = ProofWork(
            model=str(path),
            layers=tuple(range(layers)),
            bytes=path.stat().st_size,
            folder=str(tmp_path),
            account=None,
            environment={},
            launcher=(sys.executable, "-m", runtime.__name__, "prove", "--", f"{tmp_path}/{run.PROOF_SOCKET_FILE}"),
            sockets=True,
            context=context,
            micro_batch=512,
            limit_s=300,
            timeout_s=300,
            processor=side(0, "head's processor", None),
            variants=(("--repack",), *([] if quantised else [("--flash-attn", "off")])),
            devices=(side(1, "first cpu", first), side(2, "second cpu", second, *wrong)),
        )
        return typed_json.parse(Proof, run.prove(work, listeners.is_listening_alone))

    return of


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, kind, words",
    [
        pytest.param(
            name,
            kind,
            words,
            marks=[] if (name, kind, words) in [("latent", "f16", ()), ("experts", "q8_0", ())] else pytest.mark.slow,
        )
        for name in MODELS
        for kind, words in KINDS
    ],
)
def test_devices_that_compute_correctly_give_no_alarm(prove, name, kind, words):
    proof = prove(name, kind, words)
    assert (proof.untested, proof.failures(), len(proof.devices)) == (None, [], 2)


@pytest.mark.timeout(600)
def test_a_real_model_gives_no_alarm_and_a_ruined_one_does(prove):
    """With layers of SmolLM2; norms with another epsilon ruin its answers."""
    path = real_models.path_of(real_models.SMOLLM2)
    wrong = ("--override-kv", "llama.attention.layer_norm_rms_epsilon=float:9.5")
    right, ruined = prove(path, layers=6, context=300, wrong=wrong).devices
    assert right.is_correct, right.sentence()
    assert not ruined.is_correct, ruined.sentence()


@pytest.mark.timeout(600)
def test_the_device_that_computes_something_else_is_named(prove):
    proof = prove("dense", wrong=("--override-kv", "llama.attention.layer_norm_rms_epsilon=float:9.5"))
    assert [one.is_correct for one in proof.devices] == [True, False]
    assert proof.failures()[0].startswith("second cpu computes incorrectly for ")


@pytest.mark.timeout(600)
def test_the_device_that_crashes_is_named_with_the_line_of_its_log(prove, workers, monkeypatch):
    monkeypatch.setattr(run, "WORKER_TIMEOUT_SECONDS", 0)
    proof = prove("dense", endpoints=[workers[0], f"127.0.0.1:{free_port()}"])
    (sentence,) = proof.failures()
    assert sentence.startswith("second cpu crashes on signal 6: ")
    assert "Failed to connect" in sentence
