"""Holds what planning says of each device against every buffer that the real server tells of in its log."""

import socket
import subprocess
import urllib.error
import urllib.request

import models
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.check import verification
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, gguf
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import head as heads
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import placement
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import until

PORTS = (51062, 51063, 51064)
SERVER_PORT = 18090
GENERATION = capabilities.PYPI_TREES["0.3.36"]["generation"]
ABLE = capabilities.of_build(GENERATION)
ROUNDING = 0.006
"""MiB by which a logged size may differ, for each line that it was added up from."""
LINES = {"model": 1, "KV": 3}


@pytest.fixture(scope="module")
def programs(cluster):
    """Folder with the programs of the release that the cluster of these tests runs."""
    if not list(cluster.prefix.glob("releases/*/bin/llama-server")):
        assert cluster.site().status == "successful"
    (server,) = cluster.prefix.glob("releases/*/bin/llama-server")
    return server.parent


@pytest.fixture(scope="module")
def workers(programs):
    """Endpoints of three workers that lend the CPU."""
    started = [
        subprocess.Popen(
            [programs / ABLE["worker_binary"], "-H", "127.0.0.1", "-p", str(port), "-d", "CPU", "-t", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for port in PORTS
    ]
    for port in PORTS:
        until(lambda port=port: socket.create_connection(("127.0.0.1", port), 1).close() or True)
    yield [f"127.0.0.1:{port}" for port in PORTS]
    for process in started:
        process.kill()
        process.wait()


def planned(path, endpoints, split, gpu_layers=None, **variables):
    """The placement, and llama-server's command line without its program. In overrides ``{1}`` is the second device."""
    defaults = {variable: option.get("default") for variable, option in inventory.specification().items()}
    chosen = {
        **defaults,
        "llama_server_port": SERVER_PORT,
        "llama_server_load_mode": "none",
        "llama_server_context": 4096,
    }
    chosen |= {"llama_server_warmup": False, **{f"llama_server_{name}": value for name, value in variables.items()}}
    summary = gguf.summarize(gguf.read_path(str(path)))
    devices = [
        {"backend": "cpu", "endpoint": endpoint, "buffer": ABLE["buffer_name"].format(endpoint=endpoint)}
        for endpoint in endpoints[: len(split)]
    ]
    chosen["llama_server_override_tensor"] = [
        entry.format(*(device["buffer"] for device in devices)) for entry in chosen["llama_server_override_tensor"]
    ]
    overrides = heads.overrides_of(chosen, [placement.CPU, *(device["buffer"] for device in devices)])
    load = placement.Load(summary, heads.settings_of(chosen, summary), GENERATION, overrides)
    layers = load.units if gpu_layers is None else gpu_layers
    placed = placement.Placed(devices, split, load, layers, [])
    model = {"path": str(path), "summary": summary}
    release = {"capabilities": ABLE, "ref": "0.3.36", "generation": GENERATION}
    return placed, heads.argv_of({"variables": chosen, "facts": {}}, release, model, placed, "")[1:]


def logged(programs, arguments, folder):
    """Buffers of the log of one start."""
    path = folder / "log"
    with path.open("w") as stream:
        process = subprocess.Popen([programs / "llama-server", *arguments], stdout=stream, stderr=subprocess.STDOUT)

    def healthy():
        assert process.poll() is None, path.read_text()[-3000:]
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{SERVER_PORT}/health", timeout=2).status == 200
        except urllib.error.URLError:
            return False

    try:
        until(healthy)
    finally:
        process.terminate()
        process.wait()
    return verification.buffers(path.read_text())


def compared(placed, found):
    """What differs, a line each."""
    expected = {device["buffer"]: share for device, share in zip(placed.devices, placed.shares())}
    host = {"model": 0.0, "KV": 0.0}
    wrong = []
    for device, sizes in found.items():
        share = expected.get(device)
        for kind in host:
            if share is None:
                host[kind] += sizes.get(kind, 0)
                continue
            size = (share.weights if kind == "model" else share.kv) / placement.MIB
            if abs(sizes.get(kind, 0) - size) > ROUNDING * LINES[kind]:
                wrong.append(f"{device} {kind}: logged {sizes.get(kind, 0)}, planned {size:.3f}")
        if share and sizes.get("compute", 0) > placed.load.compute / placement.MIB:
            wrong.append(
                f"{device} compute: logged {sizes['compute']}, planned at most {placed.load.compute / placement.MIB:.3f}"
            )
    kept = placed.on_head()
    for kind, size in (("model", kept.weights), ("KV", kept.kv)):
        if abs(host[kind] - size / placement.MIB) > ROUNDING * LINES[kind]:
            wrong.append(f"CPU {kind}: logged {host[kind]}, planned {size / placement.MIB:.3f}")
    absent = [device for device, share in expected.items() if share.weights + share.kv and device not in found]
    return wrong + [f"{device} is not in the log" for device in absent]


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
    ((1, 2), {"gpu_layers": 4, "extra_args": ["--kv-unified", "--ubatch-size", "256"], "parallel": 2}),
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
        assert placed.load.weights_exact
        assert placed.load.kv_exact
        assert not compared(placed, logged(programs, arguments, tmp_path)), (split, variables)
