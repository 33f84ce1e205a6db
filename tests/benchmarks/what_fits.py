"""Seconds for the table of what a cluster could serve, and plans that it takes, of three inventories: docs/plan.md.

PYTHONPATH=.venv/collections:tests/unit .venv/bin/python tests/benchmarks/what_fits.py
"""

import time

from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner, what_fits
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources
from conftest import CATALOGUE
from test_inventories import variables_of

made, make_trial_plan = [], planner.make_trial_plan
planner.make_trial_plan = lambda *given, **more: made.append(1) or make_trial_plan(*given, **more)

for name in ("strix_halo_quad", "cuda_triple", "mac_loopback"):
    read = cluster_inputs.read_cluster(*inventory.cluster_hosts(variables_of(name, {})), what_fits.ANY_MODEL)
    cluster = sources.look_up(str, read, CATALOGUE)
    made.clear()
    begin = time.process_time()
    what_fits.fit_models(cluster, what_fits.offers_of(inventory.published_models()), CATALOGUE, what_fits.FitQuery())
    seconds = time.process_time() - begin
    print(
        f"{name}: {len(made)} plans in {seconds:.1f} s of processor time, a hundred in {100 * seconds / len(made):.1f} s"
    )
