"""The rooms of module_utils: what each may import, what none may, and that hosts with old Pythons can read them."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
ROOMS = PLUGINS / "module_utils"
ARCHITECTURE = (PLUGINS.parent / "docs" / "architecture.md").read_text()
OURS = "ansible_collections.llamacpp.cluster.plugins.module_utils."
MAY_IMPORT = {
    "common": set(),
    "llamacpp": {"common"},
    "facts": {"common", "llamacpp"},
    "plan": {"common", "llamacpp"},
    "apply": {"common", "llamacpp", "facts"},
    "launch": {"llamacpp"},
    "check": {"common", "llamacpp", "facts", "apply", "launch"},
}
"""Room → rooms that it may import. docs/architecture.md says what each of them knows."""
BEYOND_THE_LIBRARY = {("llamacpp/remote.py", "ansible.module_utils.urls")}
"""Proxies, certificates and redirects are Ansible's to know; it is there wherever a module runs."""
OLDEST_PYTHON = (3, 9)
LONGEST_FUNCTION = 60


def modules():
    return sorted(path for path in ROOMS.rglob("*.py") if path.name != "__init__.py")


@functools.cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path):
    """Full names of the modules that a file imports."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports by a relative name"
            is_room = f"{node.module}.".startswith(OURS) and node.module.count(".") == OURS.count(".")
            yield from ([f"{node.module}.{name.name}" for name in node.names] if is_room else [node.module])


def test_every_module_stands_in_a_room():
    assert {path.parent.name for path in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_the_table_of_rooms_names_every_module(room):
    (row,) = (line for line in ARCHITECTURE.splitlines() if line.startswith(f"| `{room}` |"))
    named = re.findall(r"`(\w+)`", row.rsplit("|", 2)[1])
    assert {path.stem for path in modules() if path.parent.name == room} <= set(named)


@pytest.mark.parametrize("folder", ["plugin_utils", "action"])
def test_what_the_controller_needs_is_named(folder):
    text = ARCHITECTURE.partition("`plugin_utils` holds")[2].partition("## ")[0]
    own = {path.stem for path in (PLUGINS / folder).glob("*.py")} - {"__init__"}
    assert own <= set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOMS)))
def test_imports_run_down_only(path):
    room = path.parent.name
    rooms = {name[len(OURS) :].split(".")[0] for name in imported(path) if name.startswith(OURS)}
    assert rooms <= MAY_IMPORT[room] | {room}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOMS)))
def test_nothing_but_the_standard_library_is_needed(path):
    others = {name for name in imported(path) if name.split(".")[0] not in sys.stdlib_module_names}
    allowed = {name for file, name in BEYOND_THE_LIBRARY if file == str(path.relative_to(ROOMS))}
    assert {name for name in others if not name.startswith(OURS)} <= allowed


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOMS)))
def test_the_oldest_python_of_a_host_can_read_it(path):
    ast.parse(path.read_text(), feature_version=OLDEST_PYTHON)


def test_no_room_has_a_circle():
    """Modules of one room import each other in one direction."""
    graph = {
        f"{path.parent.name}.{path.stem}": {name[len(OURS) :] for name in imported(path) if name.startswith(OURS)}
        for path in modules()
    }
    known = {name: {".".join(other.split(".")[:2]) for other in others} for name, others in graph.items()}
    placed: set[str] = set()
    while left := [name for name in known if name not in placed]:
        ready = [name for name in left if known[name] <= placed]
        assert ready, f"a circle of imports: {left}"
        placed.update(ready)


def test_functions_fit_on_a_screen():
    long = [
        f"{path.relative_to(PLUGINS)}: {node.name}"
        for path in sorted(PLUGINS.rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if node.end_lineno - node.lineno >= LONGEST_FUNCTION
    ]
    assert long == []
