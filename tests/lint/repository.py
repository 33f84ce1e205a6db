# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check links and line lengths of documentation, pins, the action group, sizes of packages, imports, names of backends, and names of tasks."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"
PAGES = [page for kind in ("*.md", "docs/*.md", "roles/*/*.md", "inventories/*/*.md") for page in ROOT.glob(kind)]
MAX_LINE_LENGTH = 160
MAX_PACKAGE_FILES = 12
"""Number of files in a package that a person can still look over."""
MODULE_UTILS = "ansible_collections.llamacpp.cluster.plugins.module_utils."
ALLOWED_IMPORT = ("web.py", "ansible.module_utils.urls")
"""The only import of module_utils beyond the standard library, for proxies, certificates and redirects."""
BACKEND_FILES = (
    *(
        "launcher/exporter",
        "llamacpp/backends",
        "llamacpp/prebuilt",
        "llamacpp/toolkits",
        "llamacpp/words",
        "planner/placement/devices",
    ),
    *(f"planner/advisories/{name}" for name in ("hardware", "memory", "table")),
)
"""Files that may name backends: records, toolkits, archives, advisories, and sensors of a vendor's devices."""
DEVICE_FILES = ("facts/hardware", "facts/resources", "facts/host")
"""Files that may name records of backends, because they read the devices of one vendor."""


def page_faults(page: Path) -> Iterator[str]:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            yield f"{page}: {target}#{anchor} leads nowhere"
    for line_number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE_LENGTH:
            yield f"{page}:{line_number}: more than {MAX_LINE_LENGTH} characters"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def pin_faults() -> Iterator[str]:
    direct_pins, _blank, indirect_pins = (ROOT / "requirements.txt").read_text().partition("\n\n")
    for pins, pattern in (
        (direct_pins.split("\n", 1)[1], r"[\w.-]+==[\w.]+  # .+"),
        (indirect_pins, r"[\w.-]+==[\w.]+"),
    ):
        bad_lines = (line for line in pins.splitlines() if not re.fullmatch(pattern, line))
        yield from (
            f"requirements.txt: {line}: pin exactly, and give direct requirements a comment" for line in bad_lines
        )


def package_faults() -> Iterator[str]:
    files = [path for path in PLUGINS.rglob("*.py") if path.name != "__init__.py"]
    for folder, count in Counter(path.parent for path in files).items():
        if count > MAX_PACKAGE_FILES and folder.name not in ("action", "modules"):
            yield f"{folder}: {count} files, more than {MAX_PACKAGE_FILES}"


def source_faults(path: Path) -> Iterator[str]:
    """Yield imports that hosts lack, and names of backends outside their files."""
    accelerators = [record for record in backends.BY_NAME.values() if record is not backends.CPU]
    backend_words = {
        word for record in accelerators for word in (record.name, backends.device_name(record.name, 0)[:-1])
    }
    backend_constants = {
        f"{module}.{record.name.upper()}" for record in accelerators for module in ("backends", "words")
    }
    tree = ast.parse(path.read_text())
    docstring_ids = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    may_name = str(path.with_suffix("")).endswith(BACKEND_FILES)
    may_read = may_name or str(path.with_suffix("")).endswith(DEVICE_FILES)
    for node in ast.walk(tree):
        imported_modules = []
        if isinstance(node, ast.Import):
            imported_modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported_modules = ["." * node.level + (node.module or "")]
        elif (
            isinstance(node, ast.Constant)
            and node.value in backend_words
            and id(node) not in docstring_ids
            and not may_name
        ):
            yield f"{path}:{node.lineno}: {node.value} is a name of a backend: use its record"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in backend_constants and not may_read:
            yield f"{path}:{node.lineno}: {node.attr} is one backend: use a property of its record"
        for module in imported_modules if "module_utils" in path.parts else ():
            is_available = module.split(".")[0] in sys.stdlib_module_names or module.startswith(MODULE_UTILS)
            if not is_available and (path.name, module) != ALLOWED_IMPORT:
                yield f"{path}: {module} is missing on hosts"


def task_faults(tasks: list[dict[str, Any]]) -> Iterator[str]:
    """Yield checks in tasks or plays whose names do not state what holds, and checks that are skipped if it holds."""
    for task in tasks:
        name = task.get("name", "")
        if re.match("(Stop|Fail) (where|when|if|unless|without|with)", name):
            yield f"task «{name}»: name what holds"
        if "ansible.builtin.fail" in task and "when" in task:
            yield f"task «{name}»: use ansible.builtin.assert"
        for key in ("tasks", "block", "rescue", "always"):
            yield from task_faults(task.get(key, []))


def faults() -> Iterator[str]:
    groups = yaml.safe_load((ROOT / "meta" / "runtime.yml").read_text())["action_groups"]
    if groups["cluster"] != sorted(path.stem for path in PLUGINS.glob("modules/*.py")):
        yield "meta/runtime.yml: the action group must have all modules"
    for page in sorted(PAGES):
        yield from page_faults(page)
    yield from pin_faults()
    yield from package_faults()
    for path in sorted(PLUGINS.rglob("*.py")):
        yield from source_faults(path)
    for path in (*ROOT.glob("roles/*/tasks/**/*.yml"), *ROOT.glob("playbooks/**/*.yml")):
        content = yaml.safe_load(path.read_text())
        yield from task_faults(content if isinstance(content, list) else [])


if __name__ == "__main__":
    lines = list(faults())
    print("\n".join(lines), end="\n" * bool(lines))
    sys.exit(bool(lines))
