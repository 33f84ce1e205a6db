"""The packages of module_utils: how large they are, and what hosts need to run them. What each may import is in pyproject.toml."""

import ast
import sys
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
OURS = "ansible_collections.llamacpp.cluster.plugins.module_utils."
BEYOND_THE_LIBRARY = {("models/web.py", "ansible.module_utils.urls")}
"""Proxies, certificates and redirects are Ansible's to know; it is there wherever a module runs."""
MOST_FILES = 12


def imported(path):
    """Full names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_no_package_is_too_large_to_look_over():
    files = [path for path in PLUGINS.rglob("*.py") if path.name != "__init__.py"]
    folders = {path.parent for path in files} - {PLUGINS / "action", PLUGINS / "modules"}
    assert {
        folder: n for folder in folders if (n := len([*filter(lambda f: f.parent == folder, files)])) > MOST_FILES
    } == {}


def test_hosts_need_the_standard_library_alone():
    root = PLUGINS / "module_utils"
    others = {
        (str(path.relative_to(root)), name)
        for path in root.rglob("*.py")
        for name in imported(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith(OURS)
    }
    assert others == BEYOND_THE_LIBRARY
