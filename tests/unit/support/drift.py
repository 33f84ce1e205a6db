"""What hosts report of how they differ from a plan."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift


def drifts(plan, **states):
    """Nothing differs, but services that have these states."""
    return {
        name: {
            "services": {
                service["name"]: {
                    "state": states.get(service["name"], "running"),
                    "pid": None,
                    "addresses": [],
                    "clients": [],
                }
                for service in host["services"]
            },
            "defined": [],
            "unplanned": [],
            "missing_builds": [],
            "running_releases": [],
            "changed_files": [],
            "changed_models": [],
            "redefined": [],
            "port_probes": [],
            "last": None,
            "differences": [],
        }
        for name, host in plan["hosts"].items()
    }


def typed_drifts(found):
    return {name: typed_json.parse(Drift, drift) for name, drift in found.items()}
