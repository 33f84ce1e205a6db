#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: benchmark
short_description: Measures a cluster
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Runs on the head. Given O(facts), an action plugin of the same name plans a load of a model for each part of the matrix of C(llama_benchmark_...),
    asks the server that serves, stops it, has C(llama-bench) measure with the workers in its place, starts it again, and shows what it measures.
  - What was measured is kept on the head, cell by cell. The next run with the same matrix goes on where one was cut off.
  - While the server is stopped, a guard on the head starts it again when nobody has looked at the program for 120 seconds. It is a timer of systemd,
    or a process of its own where supervisor runs the services.
attributes:
  check_mode:
    support: full
    description: Shows what would be measured.
options:
  state:
    description:
      - V(measured) plans and measures. The action plugin does that with the other states, on the head.
      - V(recovered) starts the server again where a run that was killed has left it stopped.
      - V(found) returns the records of benchmarks, V(written) keeps one.
      - V(asked) asks the server. V(begun) stops it, V(run) starts a program that measures, V(looked) returns what that wrote, V(stopped) ends it,
        and V(ended) starts the server again.
    type: str
    choices: [measured, recovered, found, written, asked, begun, run, looked, stopped, ended]
    required: true
  plan:
    description: The plan that serves; of it the head's part is read on the head.
    type: dict
  facts:
    description: Host, and what P(llamacpp.cluster.host_info#module) returned there.
    type: dict
    default: {}
  model:
    description: What P(llamacpp.cluster.model#module) returned of the model that is served.
    type: dict
    default: {}
  path:
    description: Folder on the controller that gets V(benchmark.json), V(benchmark.csv) and V(benchmark.md).
    type: path
  prefix:
    description: Folder of the installation, for V(found) and V(written).
    type: path
  record:
    description: What was measured, for V(written).
    type: dict
  id:
    description: Of the benchmark that V(found) returns whole. Left out, the last one.
    type: str
  runner:
    description: The program that runs the others, for V(begun).
    type: str
  definition:
    description: Of the service that runs a program, for V(run).
    type: str
  log:
    description: File that a program writes, for V(looked).
    type: path
  seconds:
    description: How long V(looked) waits for the program to end before it returns.
    type: float
    default: 0.0
  question:
    description: C(prompt), C(generated) and C(vocabulary), numbers of tokens, C(parallel), and C(seconds) that an answer may take, for V(asked).
    type: dict
"""

EXAMPLES = r"""
- name: Measure the cluster
  llamacpp.cluster.benchmark:
    state: measured
    plan: "{{ __llama_plan }}"
    facts: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_facts') }}"
"""

RETURN = r"""
record:
  description: What was measured, as docs/benchmark.schema.json describes it.
  returned: for V(measured) and V(found)
  type: dict
benchmarks:
  description: The benchmarks that the head keeps, C(id) and whether each is C(complete), the newest first.
  returned: for V(found)
  type: list
  elements: dict
lines:
  description: What matters of a program's log.
  returned: for V(looked)
  type: str
runs:
  description: Whether the program runs.
  returned: for V(looked)
  type: bool
serves:
  description: Whether the server runs, which it must not do meanwhile.
  returned: for V(looked)
  type: bool
problem:
  description: Why the rest could not be measured. The task does not fail, so that C(record) can be used.
  returned: for V(measured), where something went wrong after the beginning
  type: str
speeds:
  description: C(first_s) of each request, and C(tokens_per_s) of all.
  returned: for V(asked)
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import load_test, records, takeover
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, errors
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock, services

ON_THE_HEAD = {
    "recovered": ("plan",),
    "found": ("prefix",),
    "written": ("prefix", "record"),
    "asked": ("plan", "question"),
    "begun": ("plan", "runner"),
    "run": ("plan", "definition"),
    "looked": ("plan", "log"),
    "stopped": ("plan",),
    "ended": ("plan",),
}
"""State → what it needs."""


def own_part(plan):
    return plan["hosts"][plan["head"]["host"]]


def is_served(stage):
    """Whether the server runs once the guard waits again. A guard whose time is over has started it by now, or does not start it any more."""
    try:
        stage.wind_up()
    except commands.CommandError:  # there is no guard any more, as after a reboot of the host
        if not stage.serves():
            raise
    return stage.serves()


def changed_by(stage, params):
    """Carries out what changes services; whether anything changed."""
    state = params["state"]
    if state == "recovered" and not stage.is_left():
        return False
    with host_lock.hold(own_part(params["plan"])["prefix"], exclusive=True):
        if state == "begun":
            takeover.prepare(own_part(params["plan"])["prefix"], params["runner"])
            stage.begin()
        elif state == "run":
            if is_served(stage):
                raise Refusal(
                    f"{stage.server} runs, and a worker serves one client: nobody looked for {takeover.SILENCE_SECONDS} s, or another run started it. "
                    "Run the playbook again, which goes on with what is missing."
                )
            stage.run(params["definition"])
        elif state == "stopped":
            stage.wind_up()
            stage.stop()
        else:
            stage.end()
    return True


def answer_of(params):
    """What the module returns."""
    state = params["state"]
    if state == "found":
        return {"changed": False, **records.find(params["prefix"], params["id"])}
    if state == "written":
        records.write(params["prefix"], params["record"])
        return {"changed": True}
    if state == "asked":
        given = params["question"]
        question = load_test.Question(*(int(given[key]) for key in ("prompt", "generated", "vocabulary")))
        speeds = load_test.ask(params["plan"], question, int(given["parallel"]), float(given["seconds"]))
        return {"changed": False, "speeds": speeds}
    stage = takeover.Stage(own_part(params["plan"]))
    if state == "looked":
        serves = stage.serves()
        if not serves:
            stage.wind_up()
            records.wait_for_end(params["log"], params["seconds"])
        return {"changed": False, "runs": stage.runs(), "serves": serves, "lines": records.lines_of(params["log"])}
    return {"changed": changed_by(stage, params)}


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["measured", *ON_THE_HEAD], "required": True},
            **{key: {"type": "dict"} for key in ("plan", "record", "question")},
            "seconds": {"type": "float", "default": 0.0},
            "facts": {"type": "dict", "default": {}},
            "model": {"type": "dict", "default": {}},
            **{key: {"type": "path"} for key in ("path", "prefix", "log")},
            **{key: {"type": "str"} for key in ("id", "runner", "definition")},
        },
        required_if=[("state", state, needed) for state, needed in ON_THE_HEAD.items()],
        supports_check_mode=True,
        no_log=True,
    )
    if module.params["state"] == "measured":
        module.fail_json(msg="state: measured runs on the controller, in the action plugin llamacpp.cluster.benchmark.")
    if module.check_mode and module.params["state"] != "found":
        module.exit_json(changed=False)
    with errors.reported(module, services.ServiceError, commands.CommandError, Refusal):
        answer = answer_of(module.params)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
