"""Holds what planning says of each device against every buffer that the real server tells of in its log."""

import contextlib
import subprocess
import urllib.error
import urllib.request
from types import SimpleNamespace

import models
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import hardware
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import workload
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import DEFAULT_FACTS, parse_facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs.cluster_inputs import server_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load, prompt_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.head import argv_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device, Host, Model, Worker
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import start_log
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from buffers import compared
from conftest import free_port, until

SERVER_PORT = free_port()
BUILD = capabilities.PYPI_TREES["0.3.36"]["build"]


def planned(path, endpoints, split, gpu_layers=None, **variables):
    """The placement, and llama-server's command line without its program. In overrides ``{1}`` is the second device."""
    model = header_summary.parse(header_summary.summarize(gguf.read_local_headers(str(path))))
    devices = tuple(
        Device("here", "cpu", "CPU", capabilities.BUFFER_TEMPLATE.format(endpoint=endpoint), 0, {}, worker_at(endpoint))
        for endpoint in endpoints[: len(split)]
    )
    defaults = {name: option.get("default") for name, option in inventory.specification().items()}
    chosen = {**defaults, "llama_server_port": SERVER_PORT, "llama_server_load_mode": "none"}
    chosen |= {"llama_server_context": 4096, **{f"llama_server_{name}": value for name, value in variables.items()}}
    chosen["llama_server_override_tensor"] = [
        entry.format(*(device.buffer for device in devices)) for entry in chosen["llama_server_override_tensor"]
    ]
    server = server_of(chosen)
    release = releases.release_of(release_request.request_of(inventory.specification()["llama_release"]["default"]), {})
    work = workload.plan_workload(server, None, None, Model(str(path), None, model), release)
    overrides = tuple(entry.partition("=")[::2] for entry in server.override_tensor)
    load = device_load.Load(model, work.cache, BUILD, overrides)
    layout = device_load.Layout(
        devices, tuple(split), load, load.units if gpu_layers is None else gpu_layers, load_mode="none"
    )
    host = Host(
        **{**dict.fromkeys(Host._fields), "facts": parse_facts({**DEFAULT_FACTS, "cpu": hardware.read_processor()})}
    )
    installation = SimpleNamespace(serving_build=SimpleNamespace(id=""))
    candidate = Candidate(work, Site("here", {"here": host}, devices), layout, ())
    return layout, argv_of(installation, candidate, prompt_cache.plan_prompt_cache(candidate))[1:]


def worker_at(endpoint):
    return Worker(
        "one", "here", endpoint, endpoint, endpoint, "cpu", "cpu", "CPU", capacity_mib=0, shares_host_memory=True
    )


@contextlib.contextmanager
def running(programs, arguments, folder):
    """Run a llama-server until it is healthy; yield the path of its log."""
    path = folder / "log"
    with path.open("w") as stream:
        process = subprocess.Popen(
            [programs / "llama-server", *arguments, "--no-warmup"], stdout=stream, stderr=subprocess.STDOUT
        )

    def healthy():
        assert process.poll() is None, path.read_text()[-3000:]
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{SERVER_PORT}/health", timeout=2).status == 200
        except urllib.error.URLError:
            return False

    try:
        until(healthy)
        yield path
    finally:
        process.terminate()
        process.wait()


def logged(programs, arguments, folder):
    """Buffers of the log of one start."""
    with running(programs, arguments, folder) as path:
        pass
    return start_log.parse_buffers(path.read_text())


MODELS = {
    "dense": (models.dense(), "f16"),
    "tied": (models.tied(), "q8_0"),
    "experts": (models.experts(), "q4_0"),
    "latent": (models.latent(), "f16"),
    "windowed": (models.windowed(), "f16"),
    "sinks": (models.sinks(), "q8_0"),
    "recurrent": (models.recurrent(), "f16"),
    "mixed": (models.mixed(), "f16"),
    "further_tokens": (models.further_tokens(), "f16"),
}
CASES = [
    ((1, 1), {}),
    ((5, 1, 2), {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
    ((0.3, 0.45, 0.25), {"parallel": 3, "context": 3000}),
    ((1, 2), {"gpu_layers": 4, "extra_args": ["--kv-unified"], "micro_batch": 256, "parallel": 2}),
    ((2, 1), {"extra_args": ["--swa-full"], "flash_attention": "off", "context": 16384}),
    ((1, 1), {"override_tensor": [r"blk\.[01]\.ffn=CPU", "ffn_(up|down)={1}", "token_embd={0}"]}),
]


@pytest.mark.parametrize("name", MODELS)
def test_every_buffer_is_as_planned(programs, workers, tmp_path, name):
    path = tmp_path / f"{name}.gguf"
    model, kind = MODELS[name]
    models.write(path, model, kind)
    for split, variables in CASES:
        placed, arguments = planned(path, workers, split, **variables)
        assert placed.load.has_exact_weights
        assert placed.load.has_exact_kv
        assert not compared(placed, logged(programs, arguments, tmp_path)), (split, variables)
