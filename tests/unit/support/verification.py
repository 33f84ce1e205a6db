"""What a cluster reports that does what was planned, and how that is judged."""

import json
from types import SimpleNamespace
from unittest import mock

from ansible_collections.llamacpp.cluster.plugins.action import verify as verify_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.rpc import Handshake, WorkerDevice
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift, ServiceState
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ServedModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import judge, types

from support import actions
from support.drift import drifts

ANSWER = Handshake("ok", "", "7.0.0", (WorkerDevice(65536, 65536),))
RIGHT = types.Completion(known_answer.SENTENCE, 33, 700.0)


def subject(plan):
    """:param plan: as JSON."""
    return typed_json.parse(types.Subject, plan)


def several(plan, *names):
    """The plan with models of these names that take turns, each as the one that it has."""
    known = {**plan.head._asdict(), **plan._asdict()}
    fields = {name: known[name] for name in ServedModel._fields if name in known}
    models = tuple(ServedModel(**{**fields, "name": name, "aliases": ()}) for name in names)
    return plan._replace(head=plan.head._replace(models=models))


def unhealthy(detail="refused", **changes):
    """The evidence of a server that is not healthy."""
    evidence = types.Evidence(types.Health(False, detail), types.Exits(0, "", ()), (), types.Handshakes({}), {})
    return evidence._replace(**changes)


def healthy(plan, completion=RIGHT):
    """The evidence of a server that does what was planned."""
    endpoints = [worker.endpoint for host in plan.hosts.values() for worker in host.workers]
    buffers = {one.device: {"model": one.weights_mib, "KV": one.kv_mib, "compute": 1.0} for one in plan.placement}
    handshakes = types.Handshakes(dict.fromkeys(endpoints, ANSWER))
    server = types.ServerEvidence(buffers, 0, completion)
    return unhealthy(health=types.Health(True, "ok"), handshakes=handshakes, server=server)


def reports(plan):
    """Host → its report, where all services run."""
    found = {}
    for name, host in plan.hosts.items():
        addresses = {service.name: service.listens.split(":")[0] for service in host.services}
        services = {service: ServiceState("running", None, (address,), ()) for service, address in addresses.items()}
        report = typed_json.parse(Drift, drifts({"hosts": {name: {"services": []}}})[name])
        found[name] = report._replace(services=services)
    return found


def judged(plan, evidence=None, hosts=None, probes=(), **observed):
    """The report on a cluster that does what was planned, but for what is said here."""
    hosts = reports(plan) if hosts is None else hosts
    return judge.judge(plan, evidence or healthy(plan), judge.Observations(hosts, dict(probes), **observed))


def checks(report, name):
    return [check for check in report.checks if check.name == name]


def verify(plan, *evidence, recorded=None, asked=lambda _arguments: None, check_mode=False, play=None, **arguments):
    """What the action returns. Its head reports this evidence, one for each call of the module, which takes a second.

    :param plan: as JSON.
    :param evidence: values, or what a head reports that may be of any form.
    :param recorded: takes the command that records the result, and its input.
    :param asked: takes the arguments of the module.
    :param play: variables of the play.
    """
    action = actions.made(verify_action, check_mode=check_mode, plan=plan, **arguments)
    answers, clock = iter(evidence), SimpleNamespace(now=0.0)

    def execute(module_args, task_vars):
        clock.now += 1.0
        asked(module_args)
        answer = json.loads(json.dumps(typed_json.dump(next(answers))))
        return answer if isinstance(answer, dict) and "failed" in answer else {"evidence": answer}

    action._execute_module = execute
    recorded = recorded or (lambda _text, _data: {"rc": 0})
    action._low_level_execute_command = lambda text, sudoable, in_data: recorded(text, in_data)
    hostvars = {name: {"ansible_host": "192.0.2.99"} for name in plan["hosts"]}
    known = {"hostvars": hostvars, "inventory_hostname": plan["head"]["host"], **(play or {})}
    with mock.patch.object(
        verify_action, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _seconds: None)
    ):
        return action.run(task_vars=known)
