# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check that names are nouns or verbs, and that docstrings are sentences: python tests/lint/names.py [FOLDER]"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MAX_BARE_SHARE = 0.012
MAX_SHARED_CLASSES = 5
"""Ansible prescribes ActionModule and FilterModule, and the action plugins name their arguments alike."""
BARE_WORDS = """
    own given found wanted said told beside left without shown kept served serves serving lent lacking unplanned unneeded uncounted unread unknown
    one ones other others another each every some none that this those these it its them they what which who whose where when how why whether asked
    answered made taken seen read written known named counted measured planned placed laid used needed allowed chosen changed compared of for by
    with from to at in on over under behind before after within between against beyond near elsewhere together alone apart further else least most
    more less enough so too such same equal right wrong there here now then again still yet"""
FRAGMENT_PATTERN = re.compile(r"(Of|Which|What|That|Those|Under|The same)\b")


def faults(root: Path) -> Iterator[str]:
    """Yield a line for each fault in the Python files of a folder."""
    bare_name_faults, name_count, bare_words, paths_by_class = [], 0, set(BARE_WORDS.split()), defaultdict(set)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = node.name
                paths_by_class[name if isinstance(node, ast.ClassDef) else ""].add(str(path))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                fragment_match = FRAGMENT_PATTERN.match(str(node.value.value).strip())
                if fragment_match:
                    yield f"{path}:{node.lineno}: docstring starts with «{fragment_match[0]}»: start it with its subject or verb"
            name_count += bool(name)
            if name.strip("_").lower() in bare_words or name.strip("_").startswith("of_"):
                bare_name_faults.append(f"{path}:{node.lineno}: {name} is neither a noun nor a verb with its object")
    shared_classes = {name: paths for name, paths in paths_by_class.items() if name and len(paths) > 1}
    if len(shared_classes) > MAX_SHARED_CLASSES:
        yield from (
            f"{', '.join(sorted(paths))}: these files all define {name}" for name, paths in shared_classes.items()
        )
    if len(bare_name_faults) > MAX_BARE_SHARE * name_count:
        yield from bare_name_faults


if __name__ == "__main__":
    lines = list(faults(Path(sys.argv[1] if len(sys.argv) > 1 else "plugins")))
    print("\n".join(lines), end="\n" * bool(lines))
    sys.exit(bool(lines))
