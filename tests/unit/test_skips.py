"""A skipped test in continuous integration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.programs
@pytest.mark.parametrize("variable, code, said", [("", 0, "1 skipped"), ("1", 1, "no such program")])
@pytest.mark.parametrize(
    "skip",
    [
        "@pytest.mark.skipif(True, reason='no such program')\ndef test_it(): pass",
        "def test_it(): pytest.skip('no such program')",
    ],
)
def test_a_skip_fails_where_nothing_may_be_skipped(tmp_path, variable, code, said, skip):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_one.py").write_text(f"import pytest\n{skip}\n")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:anyio",
            "-p",
            "no:pytest11.testinfra",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        env={**os.environ, "LLAMA_TEST_NO_SKIPS": variable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, said in ran.stdout) == (code, True), ran.stdout + ran.stderr
