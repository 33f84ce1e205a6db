# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The check of names and docstrings finds what it has to find."""

import runpy
from pathlib import Path

import pytest

find_faults = runpy.run_path(str(Path(__file__).with_name("names.py")))["faults"]
GOOD_CODE = "".join(f"def read_line_{number}(path):\n    '''Return line {number}.'''\n" for number in range(100))


@pytest.mark.parametrize(
    "addition, fault_count, fault_text",
    [
        ("", 0, ""),
        ("found = of_host = 1\n", 0, ""),
        ("own = given = found = of = said = _told = left = kept = of_host = 1\nSHOWN = 1\n", 10, "SHOWN"),
        ("SIZE = 1\n'''Of a file.'''\n", 1, "lines.py:202: docstring starts with «Of»"),
        ("def read_size():\n    '''The same of a size.'''\n", 1, "docstring starts with «The same»"),
    ],
)
def test_bare_names_and_fragments(tmp_path, addition, fault_count, fault_text):
    (tmp_path / "lines.py").write_text(GOOD_CODE + addition)
    found_faults = list(find_faults(tmp_path))
    assert len(found_faults) == fault_count
    assert fault_text in "".join(found_faults[-1:])


@pytest.mark.parametrize("class_count", [5, 6])
def test_classes_of_several_files(tmp_path, class_count):
    for name in ("first.py", "second.py"):
        (tmp_path / name).write_text("".join(f"class Shape{number}:\n    pass\n" for number in range(class_count)))
    assert len(list(find_faults(tmp_path))) == (6 if class_count > 5 else 0)
