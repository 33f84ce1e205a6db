"""Completed plans, and what hosts keep of them."""

import json

from ansible_collections.llamacpp.cluster.plugins.action import kept_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kept_plans
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import KeptPlan
from conftest import complete, typed

NAMES = ("head", "worker1", "worker2")


def completed(cluster):
    return complete(cluster.plan())


def placed(plan, prefix):
    """The same plan for an installation elsewhere."""
    return json.loads(json.dumps(plan).replace("/opt/llamacpp", str(prefix)))


def record_of(plan, name):
    return typed_json.dump(kept_plan.kept_plan_of(typed(plan), name))


def with_id(record, number):
    return {**record, "id": f"{number:016x}"}


def begin(prefix, record, check=False):
    """Whether the host changes what it keeps."""
    return kept_plans.keep_plan(str(prefix), typed_json.parse(KeptPlan, record), check)


def serve(prefix, record):
    begin(prefix, record)
    kept_plans.mark_served(str(prefix), record["id"])
