"""What tasks send to hosts, and settings of runs and tests."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

PLUGINS = ROOT / "plugins"
OURS = "ansible_collections.llamacpp.cluster.plugins.module_utils."


def sent_with(path, found):
    """Adds the files that a file of a host imports from this collection, and what those import."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(OURS):
            package = PLUGINS.joinpath(*node.module.split(".")[4:])
            files = {each.with_suffix(".py") for each in (package, *(package / name.name for name in node.names))}
            for file in files.difference(found):
                if file.exists():
                    found.add(file)
                    sent_with(file, found)
    return found


@pytest.mark.parametrize("name, most", [("service", 91_605), ("host_info", 197_000)])
def test_what_each_task_sends_to_a_host_is_small(name, most):
    assert 50_000 < sum(file.stat().st_size for file in sent_with(PLUGINS / f"modules/{name}.py", set())) <= most


def test_a_host_that_freezes_holds_a_run_of_this_clone_for_seconds():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "ansible.cfg")
    alive = dict(re.findall(r"-o ServerAlive(\w+)=(\d+)", settings["ssh_connection"]["ssh_args"]))
    assert 0 < int(alive["Interval"]) * int(alive["CountMax"]) <= 20


@pytest.mark.parametrize("asked, said", [("1", "1 error"), ("", "1 skipped")])
def test_a_skipped_test_is_an_error_where_none_may_be(tmp_path, asked, said):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.skip(reason='no nft')\ndef test_x():\n    pass\n")
    settings = {**os.environ, "LLAMA_TEST_NO_SKIPS": asked}
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    assert said in subprocess.run(argv, env=settings, cwd=tmp_path, capture_output=True, text=True).stdout
