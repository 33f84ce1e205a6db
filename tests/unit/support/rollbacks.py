"""Completed plans, and what hosts record of them."""

import json

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import plan_history
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import plan_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.history import PlanRecord
from conftest import complete, typed

NAMES = ("head", "worker1", "worker2")


def completed(cluster):
    return complete(cluster.plan())


def placed(plan, prefix):
    """The same plan for an installation elsewhere."""
    return json.loads(json.dumps(plan).replace("/opt/llamacpp", str(prefix)))


def record_of(plan, name):
    contents = {file["source"]: "text" for file in plan["hosts"][name]["files"] if "source" in file}
    return typed_json.dump(plan_record.record(typed(plan), name, contents))


def with_id(record, number):
    return {**record, "id": f"{number:016x}"}


def begin(prefix, record, check=False):
    """Whether the host records the plan."""
    return plan_history.record(str(prefix), typed_json.parse(PlanRecord, record), check)


def serve(prefix, record):
    begin(prefix, record)
    plan_history.mark_served(str(prefix), record["id"])
