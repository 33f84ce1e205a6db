"""Keys of tunnels on their hosts."""

import itertools
import os
import pwd
import stat

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import tunnel_keys
from ansible_collections.llamacpp.cluster.plugins.modules import tunnel_key

MODULE = tunnel_key
OLD, NEW = "0" * 64, "1" * 64
OLD_ID, NEW_ID = map(tunnel_keys.identity_of, (OLD, NEW))


@pytest.mark.parametrize("ended", [*itertools.product(range(4), repeat=2)], ids=str)
def test_the_head_is_let_in_at_each_step_wherever_earlier_renewals_ended(tmp_path, ended):
    """:param ended: after how many of the three steps each renewal ended."""
    head, worker = tmp_path / "head", tmp_path / "worker"
    for path in (head, worker):
        tunnel_keys.put_key_first(path, OLD, None, False, check_mode=False)
    for key, steps in zip("123", (*ended, 3)):
        for path, keep in ((worker, True), (head, False), (worker, False))[:steps]:
            assert tunnel_keys.put_key_first(path, key * 64, None, keep, check_mode=False)
            assert not tunnel_keys.put_key_first(path, key * 64, None, keep, check_mode=False)
            assert tunnel_keys.identities(head, None)[0] in tunnel_keys.identities(worker, None)
    for path in (head, worker):
        assert path.read_text() == tunnel_keys.line_of("3" * 64)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_another_account_could_read_or_write_is_no_key(tmp_path):
    path = tmp_path / "192.0.2.11"
    tunnel_keys.put_key_first(path, OLD, None, False, check_mode=False)
    path.chmod(0o640)
    assert tunnel_keys.identities(path, None) == ()
    path.chmod(0o600)
    other = next(entry.pw_name for entry in pwd.getpwall() if entry.pw_uid != path.stat().st_uid)
    assert tunnel_keys.identities(path, other) == ()
    tunnel_keys.put_key_first(path, NEW, None, True, check_mode=False)
    assert tunnel_keys.identities(path, None) == (NEW_ID, OLD_ID)


@pytest.mark.parametrize("form", ["line of a secret", f"{OLD_ID}:{OLD[1:]}", f"{OLD_ID}:{OLD}".upper(), "link", "pipe"])
def test_what_is_no_key_is_neither_read_nor_followed_nor_kept(tmp_path, form):
    secret, path = tmp_path / "secret", tmp_path / "192.0.2.11"
    for place, text in ((secret, tunnel_keys.line_of(OLD)), (path, form + "\n")):
        place.write_text(text)
        place.chmod(0o600)
    if form in ("link", "pipe"):
        path.unlink()
        path.symlink_to(secret) if form == "link" else os.mkfifo(path, 0o600)
    assert tunnel_keys.identities(path, None) == ()
    tunnel_keys.put_key_first(path, NEW, None, True, check_mode=False)
    assert path.read_text() == tunnel_keys.line_of(NEW)
    assert secret.read_text() == tunnel_keys.line_of(OLD)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another account")
def test_a_key_belongs_to_the_account_of_the_services(tmp_path):
    path = tmp_path / "192.0.2.11"
    tunnel_keys.put_key_first(path, OLD, "nobody", False, check_mode=False)
    assert path.stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert tunnel_keys.identities(path, "nobody") == (OLD_ID,)
    assert tunnel_keys.identities(path, None) == ()


def test_a_missing_account_is_named(tmp_path):
    with pytest.raises(OSError, match="the account nobody-at-all does not exist"):
        tunnel_keys.put_key_first(tmp_path / "key", OLD, "nobody-at-all", False, check_mode=False)


def test_the_module_waits_for_stunnel_where_it_had_read_the_file(tmp_path, call, monkeypatch):
    waited = []
    monkeypatch.setattr(tunnel_key.time, "sleep", waited.append)
    path = str(tmp_path / "192.0.2.11")
    assert call(check=True, path=path, key=OLD)["changed"]
    assert not (tmp_path / "192.0.2.11").exists()
    assert call(path=path, key=OLD)["changed"]
    assert not waited
    result = call(path=path, key=NEW, keep_other_keys=True)
    assert waited == [tunnel_key.RELOAD_SECONDS]
    assert NEW not in str(result)
    assert not call(path=path, key=NEW, keep_other_keys=True)["changed"]


def test_a_key_that_is_none_is_refused(tmp_path, call):
    result = call(path=str(tmp_path / "key"), key="secret")
    assert result["msg"] == "key does not consist of 64 hexadecimal digits: generate a key from 32 random bytes"
