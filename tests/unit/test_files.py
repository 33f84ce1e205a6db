"""The files of a plan as Ansible writes them: one call for all, whole, and without a word of what is in them."""

import hashlib
import os
import stat
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import files as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, units
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan
from ansible_collections.llamacpp.cluster.plugins.modules import files
from support import actions

MODULE = files


def planned(path, text, mode="0644"):
    content = text.encode()
    return typed_json.dump(FilePlan(str(path), len(content), hashlib.sha256(content).hexdigest(), mode, content=text))


@pytest.mark.parametrize("before", ["nothing", "other", "mode", "link", "pipe", "the same"])
def test_a_file_becomes_as_planned_whatever_was_there_and_nobody_reads_what_is_in_it(call, tmp_path, before):
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    elsewhere.write_text("secret")
    if before == "link":
        path.symlink_to(elsewhere)
    elif before == "pipe":
        os.mkfifo(path)
    elif before != "nothing":
        path.write_text("old-secret" if before == "other" else "secret")
        path.chmod(0o600 if before == "mode" else 0o640)
    was = os.path.lexists(path) and os.lstat(path)
    foreseen = call(check=True, files=[planned(path, "secret", "0640")])
    assert (os.path.lexists(path) and os.lstat(path)) == was
    told = call(files=[planned(path, "secret", "0640")])
    assert (told["changed"], told["diff"]) == (foreseen["changed"], foreseen["diff"])
    assert told["changed"] is (before != "the same")
    assert (told["diff"]["before"] == told["diff"]["after"]) is (before == "the same")
    assert "secret" not in f"{told}{foreseen}"
    assert (stat.S_IMODE(os.lstat(path).st_mode), path.read_text(), path.is_symlink()) == (0o640, "secret", False)
    assert call(files=[planned(path, "secret", "0640")])["changed"] is False
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "file"]


def test_a_difference_shows_a_changed_command_line_but_no_secret(call, tmp_path):
    (tmp_path / "presets.ini").write_text("ctx-size = 4096\n")
    (tmp_path / "presets.ini").chmod(0o644)
    texts = {"presets.ini": "ctx-size = 8192\nAPI_KEY_1=planted\n", "runtime.py": "import os\n"}
    told = call(files=[planned(tmp_path / name, text) for name, text in texts.items()])
    assert "ctx-size = 4096" in told["diff"]["before"]
    assert "ctx-size = 8192" in told["diff"]["after"]
    assert "planted" not in str(told)
    assert "import os" not in str(told)


def test_a_file_that_cannot_be_written_is_named_and_those_before_it_are_whole(call, tmp_path):
    told = call(files=[planned(tmp_path / "first", "ä"), planned(tmp_path / "none/second", "secret")])
    assert told["msg"].startswith(f"{tmp_path}/none/second: No such file or directory. Fix this on the host")
    assert "secret" not in str(told)
    assert (tmp_path / "first").read_bytes() == "ä".encode()


def test_one_call_has_all_files_with_the_text_of_those_of_the_controller(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(action.ActionModule, "run_module", lambda _self, **given: calls.append(given["files"]) or {})
    source = Path(str(files.__file__))
    own, known = planned("/p/own", "own"), {"path": "/p/models/known.gguf", "bytes": 9}
    given = {**own, "path": "/p/copied", "content": None, "source": str(source)}
    actions.run(action, files=[own, given, known])
    assert calls == [[own, {**own, "path": "/p/copied", "content": source.read_text("utf-8")}]]
    assert actions.run(action, files=[known]) == {"changed": False}
    assert len(calls) == 1


@pytest.mark.parametrize(
    "text, count",
    [(" 12\n", 12), ("0", 0), ("9" * 18, int("9" * 18)), ("9" * 19, None), ("²", None), ("-1", None), ("", None)],
)
def test_whole_numbers_in_the_output_of_programs_and_a_path_from_it(text, count):
    assert units.parse_count(text) == count
    assert text_of(Path("a\0b")) == ""
