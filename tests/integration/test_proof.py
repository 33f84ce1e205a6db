"""The proof by the first layers on real llama-servers and workers: no false alarm, and the device that computes something else is named.

A device that computes incorrectly is one that is told another value of the model's header than the head's processor.
"""

import models
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
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
    """Proves a model; ``wrong`` are further words for the second worker."""

    def of(name, kind="f16", words=(), wrong=(), endpoints=None):
        path = tmp_path / "model.gguf"
        models.write(str(path), MODELS[name](), kind)
        endpoints = endpoints or workers[:2]

        def side(name, used, *further):
            argv = [
                str(programs / "llama-server"),
                "--host",
                "127.0.0.1",
                "--ctx-size",
                "4352",
                "--parallel",
                "1",
                "--fit",
                "off",
                "--cache-ram",
                "0",
            ]
            argv += ["--rpc", ",".join(used)] if used else []
            argv += ["--device", ",".join(f"RPC{index}" for index in range(len(used))) or "none"]
            argv += ["--n-gpu-layers", str(LAYERS + 1 if used else 0)]
            split = ["--tensor-split", "2,3"] if len(used) > 1 else []
            return Side(name, (*argv, *split, *words, *further), processor=True)

        work = ProofWork(
            id="0" * 16,
            model=str(path),
            layers=LAYERS,
            bytes=path.stat().st_size,
            folder=str(tmp_path),
            account=None,
            environment={},
            client=(),
            context=4352,
            patience=60,
            processor=side("head's processor", []),
            together=side("both", endpoints, *wrong),
            devices=(side("first cpu", endpoints[:1]), side("second cpu", endpoints[1:], *wrong)),
        )
        return typed_json.parse(Proof, run.prove(work))

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
def test_devices_that_compute_right_give_no_alarm(prove, name, kind, words):
    proof = prove(name, kind, words)
    assert (proof.untested, proof.failures()) == (None, [])
    assert proof.together.equal > proof.together.of // 2


@pytest.mark.timeout(600)
def test_the_device_that_computes_something_else_is_named(prove):
    proof = prove("dense", wrong=("--override-kv", "llama.attention.layer_norm_rms_epsilon=float:9.5"))
    assert [one.is_correct for one in proof.devices] == [True, False]
    assert proof.failures()[0].startswith(
        "second cpu computes incorrectly in prompts of 2 to 8 tokens, in prompts of 9 to 64 tokens, "
    )


@pytest.mark.timeout(600)
def test_the_device_that_ends_is_named_with_the_line_of_its_log(prove, workers, monkeypatch):
    monkeypatch.setattr(run, "WORKER_SECONDS", 0)
    proof = prove("dense", endpoints=[workers[0], f"127.0.0.1:{free_port()}"])
    assert len(proof.failures()) == 1
    assert proof.failures()[0].startswith("second cpu ends by signal 6: ")
    assert "Failed to connect" in proof.failures()[0]
