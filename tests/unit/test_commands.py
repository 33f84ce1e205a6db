"""Commands, and work as another account."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as another account")
def test_root_works_as_another_account(monkeypatch):
    seen = commands.work_as("nobody", lambda: {"user": os.getuid(), "groups": os.getgroups()})
    assert seen["user"] != 0
    assert 0 not in seen["groups"]
    with pytest.raises(RuntimeError, match="PermissionError"):
        commands.work_as("nobody", lambda: {"text": Path("/etc/shadow").read_text()})
    with pytest.raises(KeyError):
        commands.work_as("no-such-account", dict)
    assert commands.work_as(None, lambda: json.loads('{"a": 1}')) == {"a": 1}
    with pytest.raises(RuntimeError, match=r"TypeError: .* is not JSON serializable"):
        commands.work_as("nobody", lambda: {"text": b""})
    monkeypatch.setattr(commands.json, "dumps", lambda _result: '{"result": {"cut')
    with pytest.raises(RuntimeError, match="the process ended"):
        commands.work_as("nobody", dict)


def test_an_exception_has_one_type_whether_the_account_changes_or_not():
    with pytest.raises(RuntimeError, match="ZeroDivisionError: "):
        commands.work_as(None, lambda: {"value": 1 // 0})


@pytest.mark.parametrize("account", [None, *(["nobody"] if os.geteuid() == 0 else [])])
def test_a_refusal_stays_a_sentence(account):
    with pytest.raises((RuntimeError, Refusal), match=r"^the disk does not answer$"):
        commands.work_as(account, mock.Mock(side_effect=Refusal("the disk does not answer")))


def test_a_command_that_is_missing_or_fails_is_a_refusal():
    with pytest.raises(
        Refusal, match=r"^«no-such-program» failed: no-such-program is not installed\. Fix what it names on"
    ):
        commands.run(["no-such-program"], 5)
    with pytest.raises(Refusal, match=r"^«ls /no/such/folder» failed: .*No such file.* Fix what it names on the host"):
        commands.run(["ls", "/no/such/folder"], 5)
    assert commands.run(["echo", "$(id)"], 5) == "$(id)\n"
