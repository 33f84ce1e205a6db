"""Whatever a host reports, it is used by its form or refused in a sentence."""

import copy
import json
from unittest import mock

from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import status, verify
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift.serving_record import Load
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import LinkMeasurement, ServedFallback
from conftest import complete, typed
from hypothesis import strategies as st
from support import actions
from support.clusters import strix_halos
from support.fuzzing import changed, fuzzed, news
from support.verification import healthy
from test_status import answers_of

WHOLE = json.loads(json.dumps(complete(strix_halos(3, 200).plan())))
HEAD, HOSTS = WHOLE["head"]["host"], list(WHOLE["hosts"])
LOOKED = json.loads(json.dumps(answers_of(WHOLE)))
EVIDENCE = typed_json.dump(
    healthy(typed(WHOLE))._replace(
        load=Load(2.5, 5, {"192.0.2.12:50052": 5}),
        links={"strix1": LinkMeasurement(900.5, 0.2, "")},
        fallback=ServedFallback("strix1:rocm0", 1),
        drift=LOOKED[HEAD]["drift"],
    )
)
EVIDENCE["server"]["certificate"] = {"names": ["a"], "until": "2030", "error": ""}
MIB = dict.fromkeys(("total_mib", "free_mib", "shared_total_mib", "shared_free_mib"), 5)
LOOKED[HEAD]["condition"]["head"]["serving"]["load"] = EVIDENCE["load"]
LOOKED[HEAD]["condition"]["resources"]["devices"] = [{"name": "GPU", **MIB}]
WAITED = {**WHOLE, "head": {**WHOLE["head"], "start_timeout": 0}}


def act(module, answer=None, **arguments):
    """Nothing but a refusal ends it, and nothing that it shows moves a cursor.

    :param answer: of the action's module.
    """
    action, shown = actions.made(module, **arguments), []
    action._execute_module = lambda **_given: copy.deepcopy(answer)

    def show(_self, text, **_how):
        shown.append(text)

    with mock.patch.multiple("ansible.utils.display.Display", display=show, warning=show):
        try:
            given = {"inventory_hostname": HEAD, "hostvars": {name: {} for name in HOSTS}}
            shown.append(action.run(task_vars=given).get("msg", ""))
        except (Refusal, AnsibleActionFail) as refused:
            shown.append(str(refused))
    assert all(validation.is_plain(line) for text in shown for line in text.split("\n"))


def looked(said):
    act(status, plan=WHOLE, heads=[HEAD], answers={**LOOKED, HEAD: said}, facts={})


def verified(said):
    act(verify, {"evidence": said.get("evidence")}, plan=WAITED, answers={**LOOKED, HEAD: said.get("answer")})
    act(verify, {"evidence": said.get("evidence")}, plan=WAITED, gate=True)


REPORTS = {looked: LOOKED[HEAD], verified: {"answer": LOOKED[HEAD], "evidence": EVIDENCE}}


@fuzzed(
    st.one_of(*(st.tuples(st.just(taken), news(given), st.just(given)) for taken, given in REPORTS.items())), seconds=0
)
def test_any_report_of_a_host(monkeypatch, report):
    monkeypatch.setattr(verify, "_probe", lambda _host, _end: verify.NOT_REACHED)
    monkeypatch.setattr(verify.ActionModule, "command", lambda *_words: {"rc": 0})
    taken, new, given = report
    said = changed(given, new)
    taken(said if isinstance(said, dict) else {})
