"""What a run writes on the controller at paths of the operator."""

import os
import stat

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output

REMEDY = r"Use a path in a folder that exists, is writable and has space\."


def write(path, text="new\n"):
    output.write("llama_plan_path", str(path), text)


@pytest.mark.parametrize(
    "path, said",
    [
        ("none/plan.json", "No such file or directory"),
        ("file/plan.json", "Not a directory"),
        ("folder", "Is a directory"),
        ("", "Is a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null"),
        ("/proc/plan.json", ""),
    ],
)
def test_a_path_that_cannot_be_written(tmp_path, path, said):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    failure = f"llama_plan_path is .*, which cannot be written on the controller: .*{said}.*{REMEDY}"
    with pytest.raises(AnsibleActionFail, match=failure):
        write(f"{tmp_path}/{path}" if path[:1] != "/" else path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("before", ["old\n", None])
def test_a_disk_that_is_full_leaves_what_was_there(small_disk, before):
    path = small_disk / "plan.json"
    if before:
        path.write_text(before)
    (small_disk / "other").write_bytes(bytes(200 << 10))
    with pytest.raises(AnsibleActionFail, match=f"No space left on device.*{REMEDY}"):
        write(path, "x" * (100 << 10))
    assert [entry.name for entry in small_disk.iterdir() if entry.name != "other"] == ["plan.json"] * bool(before)
    assert not before or path.read_text() == before
    (small_disk / "other").unlink()
    write(path, "x" * (100 << 10))
    assert path.stat().st_size == 100 << 10


def test_a_file_keeps_its_mode_and_a_link_leads_where_it_did(tmp_path):
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    write(path)
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o600)
    link.symlink_to(path.name)
    write(link, "newer ≤\n")
    assert link.is_symlink()
    assert path.read_text(encoding="utf-8") == "newer ≤\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_file_stays_what_it_is():
    """As /dev/stdout where somebody reads what the run prints."""
    reader, writer = os.pipe()
    write(f"/dev/fd/{writer}")
    os.close(writer)
    with os.fdopen(reader) as stream:
        assert stream.read() == "new\n"
    write("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_the_home_of_the_operator(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("~/verify.json")
    assert (tmp_path / "verify.json").read_text() == "new\n"
