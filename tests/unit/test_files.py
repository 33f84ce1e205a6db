"""The files of a plan as Ansible writes them: one call for all, whole, and without a word of what is in them."""

import os
import stat
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import files as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import completion
from ansible_collections.llamacpp.cluster.plugins.modules import files
from support import actions

MODULE = files


def planned(path, text, mode="0644"):
    return typed_json.dump(completion._file(str(path), text.encode())._replace(mode=mode))


def place_at(path):
    """What is at a path."""
    return stat.S_IMODE(path.stat().st_mode), path.read_text("utf-8"), path.is_symlink()


@pytest.mark.parametrize("before", ["nothing", "other", "mode", "link", "pipe", "the same"])
def test_a_file_becomes_as_planned_whatever_was_there(call, tmp_path, before):
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    elsewhere.write_text("a\n")
    if before == "link":
        path.symlink_to(elsewhere)
    elif before == "pipe":
        os.mkfifo(path)
    elif before != "nothing":
        path.write_text("b\n" if before == "other" else "a\n")
        path.chmod(0o600 if before == "mode" else 0o640)
    was = os.lstat(path) if before != "nothing" else None
    arguments = {"files": [planned(path, "a\n", "0640")]}
    foreseen = call(check=True, **arguments)
    assert (os.lstat(path) if before != "nothing" else None) == was
    told = call(**arguments)
    assert [told["changed"], told["diff"]] == [foreseen["changed"], foreseen["diff"]]
    assert told["changed"] is (before != "the same")
    assert place_at(path) == (0o640, "a\n", False)
    assert place_at(elsewhere)[1:] == ("a\n", False)
    assert call(**arguments)["changed"] is False
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "file"]


def test_nothing_that_is_reported_shows_what_is_in_a_file(call, tmp_path):
    path = tmp_path / "file"
    path.write_text("old-secret")
    told = call(files=[planned(path, "new-secret")])
    assert "secret" not in str(told)
    before, after = (told["diff"][side].split() for side in ("before", "after"))
    assert before[:2] == after[:2] == [str(path), "0644"]
    assert before[2] != after[2]
    assert call(check=True, files=[planned(tmp_path / "new", "x")])["diff"]["before"] == ""


def test_a_file_that_cannot_be_written_is_named_and_those_before_it_are_whole(call, tmp_path):
    told = call(files=[planned(tmp_path / "first", "ä"), planned(tmp_path / "none/second", "secret")])
    assert told["failed"]
    assert told["msg"].startswith(f"{tmp_path}/none/second: No such file or directory. Fix that on the host")
    assert "secret" not in str(told)
    assert (tmp_path / "first").read_bytes() == "ä".encode()


def test_one_call_has_all_files_with_the_text_of_those_of_the_controller(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(action.ActionModule, "module", lambda _self, **given: calls.append(given["files"]) or {})
    source = Path(str(files.__file__))
    own, known = planned("/p/own", "own"), {"path": "/p/models/known.gguf", "bytes": 9}
    given = {**own, "path": "/p/copied", "content": None, "source": str(source)}
    actions.run(action, files=[own, given, known])
    assert calls == [[own, {**own, "path": "/p/copied", "content": source.read_text("utf-8")}]]
    assert actions.run(action, files=[known]) == {"changed": False}
    assert len(calls) == 1
