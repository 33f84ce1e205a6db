"""Commands, and work as another account."""

import os
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import accounts


def identity():
    return os.getuid(), os.getgroups()


class Pickled:
    """What root would run, if it took a pickle for an answer."""

    def __reduce__(self):
        return os._exit, (2,)


def refuse():
    raise Refusal("the disk does not answer")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as another account")
def test_root_works_as_another_account():
    user, groups = accounts.run_as("nobody", identity)
    assert user != 0
    assert 0 not in groups
    with pytest.raises(Refusal, match="Permission denied"):
        accounts.run_as("nobody", Path("/etc/shadow").read_text)
    with pytest.raises(Refusal, match="the account no-such-account is missing"):
        accounts.run_as("no-such-account", identity)
    with pytest.raises(Refusal, match="a process of the account nobody exited"):
        accounts.run_as("nobody", lambda: os._exit(1))
    with pytest.raises(Refusal, match="a process of the account nobody exited"):
        accounts.run_as("nobody", Pickled)


@pytest.mark.parametrize("account", [None, *(["nobody"] if os.geteuid() == 0 else [])])
def test_a_refusal_stays_a_sentence(account):
    with pytest.raises(Refusal, match=r"^the disk does not answer$"):
        accounts.run_as(account, refuse)


def test_a_command_that_is_missing_or_fails_is_a_refusal():
    with pytest.raises(Refusal, match=r"^no-such-program failed: no-such-program is not installed"):
        commands.run(["no-such-program"], 5)
    with pytest.raises(Refusal, match=r"^ls /no/such/folder failed: .*No such file.* Fix this on the host"):
        commands.run(["ls", "/no/such/folder"], 5)
    assert commands.run(["echo", "$(id)"], 5) == "$(id)\n"
