"""The record of verdicts on a full disk, which fails no run."""

import errno
import json
from unittest import mock

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamacpp.cluster.plugins.action import proof as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, ProofWork, Side, Verdict
from ansible_collections.llamacpp.cluster.plugins.modules import proof as module
from support import actions

SIDE = Side("0" * 16, "head cpu", ("/bin/llama-server",))
WORK = ProofWork("/m", (0,), 1, "/s", None, {}, (), True, 64, 512, 90, 60, SIDE, (), (SIDE,))
PLACE = InstallationPaths("user", "supervisor", "/p", "/c", "/u")
FOUND = Proof(9, devices=(Verdict(SIDE.id, SIDE.name, 512, bound=1.0),))


def test_a_full_disk_fails_no_proof(tmp_path, capsys, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "/opt/x"))
    monkeypatch.setattr(run, "replace_file", full)
    monkeypatch.setattr(run, "prove", lambda *_arguments: typed_json.dump(FOUND))
    with (
        patch_module_args(
            {"host": typed_json.dump(PLACE._replace(prefix=str(tmp_path))), "work": typed_json.dump(WORK)}
        ),
        pytest.raises(SystemExit),
    ):
        module.main()
    result = json.loads(capsys.readouterr().out)
    assert not result.get("failed")
    assert typed_json.parse(Proof, result["proof"]) == FOUND

    plugin, plan, display = actions.made(action), mock.MagicMock(), mock.Mock()
    plugin.variables, plan.head.proof = {"inventory_hostname": "head"}, None
    monkeypatch.setattr(action.ActionModule, "_definition", lambda *_arguments: "")
    plugin.run_in_background = lambda *_arguments, **_more: result
    monkeypatch.setattr(action, "display", display)
    assert plugin._prove(plan, WORK, action.ProofArguments(plan)) == FOUND
    (warning,) = display.warning.call_args.args
    assert warning.startswith("The next run repeats the proof. head: /opt/x: No space left on device. Free space on")
