"""What the integration tests say of buffers, on logs of processors that the machine of the tests may not have."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import start_log

sys.path.append(str(Path(__file__).resolve().parents[1] / "integration"))
from buffers import compared

WORKER = "RPC0[127.0.0.1:51062]"
OF_WORKER = f"""
0.00 I load_tensors: {WORKER} model buffer size =     4.00 MiB
0.00 I llama_kv_cache: {WORKER} KV buffer size =     2.00 MiB
0.00 I sched_reserve: {WORKER} compute buffer size =     3.00 MiB
"""
PLAIN = """
0.00 I load_tensors:          CPU model buffer size =     5.89 MiB
0.00 I llama_kv_cache:        CPU KV buffer size =     1.00 MiB
"""
AMX = """
0.00 I load_tensors:          CPU model buffer size =     4.40 MiB
0.00 I load_tensors:          AMX model buffer size =     1.50 MiB
0.00 I llama_kv_cache:        CPU KV buffer size =     1.00 MiB
"""


def placed(weights=5.893):
    share = {"weights": 4 * device_load.MIB, "kv": 2 * device_load.MIB}
    return SimpleNamespace(
        devices=[SimpleNamespace(buffer=WORKER)],
        load=SimpleNamespace(compute=3 * device_load.MIB),
        shares=lambda: [SimpleNamespace(**share)],
        on_head=lambda: SimpleNamespace(weights=weights * device_load.MIB, kv=device_load.MIB),
    )


@pytest.mark.parametrize(
    "log, weights, differs",
    [
        (PLAIN, 5.893, []),
        (PLAIN, 5.897, ["CPU model: logged 5.89 in 1 lines, planned 5.897"]),
        (AMX, 5.74, []),
        (AMX, 5.72, ["CPU model: logged 5.9 in 2 lines, planned 5.720"]),
    ],
    ids=["plain", "plain, wrong", "amx, packed", "amx, too much"],
)
def test_buffers_of_the_processor(log, weights, differs):
    assert compared(placed(weights), start_log.buffers(OF_WORKER + log)) == differs


@pytest.mark.parametrize(
    "before, after, differs",
    [
        ("model buffer size =     4.00", "model buffer size =     4.01", f"{WORKER} model: logged 4.01 in 1 lines"),
        ("compute buffer size =     3.00", "compute buffer size =     3.01", f"{WORKER} compute: logged 3.01, planned"),
        (WORKER, "RPC0[127.0.0.1:51063]", f"{WORKER} is not in the log"),
    ],
)
def test_buffers_of_a_worker(before, after, differs):
    assert before in OF_WORKER
    found = compared(placed(), start_log.buffers(OF_WORKER.replace(before, after) + PLAIN))
    assert any(line.startswith(differs) for line in found)
