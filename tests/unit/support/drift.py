"""What hosts report of how they differ from a plan."""


def drifts(plan, **states):
    """Nothing differs, but services that have these states."""
    return {
        name: {
            "services": {
                service["name"]: {"state": states.get(service["name"], "running"), "addresses": [], "clients": []}
                for service in host["services"]
            },
            "defined": [],
            "stale": [],
            "missing_builds": [],
            "running_releases": [],
            "changed_files": [],
            "redefined": [],
            "differences": [],
        }
        for name, host in plan["hosts"].items()
    }
