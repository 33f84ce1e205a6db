"""What hosts report of how they differ from a plan."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift

LISTS = (
    *("defined", "unplanned", "missing_builds", "running_build_ids", "changed_files", "model_files", "redefined"),
    *("port_probes", "differences"),
)


def drifts(plan, **states):
    """Nothing differs, but services that have these states."""
    found = {}
    for host, planned in plan["hosts"].items():
        services = {
            name: {"state": states.get(name, "running"), "pid": None, "addresses": [], "clients": []}
            for name in (service["name"] for service in planned["services"])
        }
        found[host] = {"services": services, "last": None, **{name: [] for name in LISTS}}
    return found


def typed_drifts(found):
    return {name: typed_json.parse(Drift, drift) for name, drift in found.items()}
