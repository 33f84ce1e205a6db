"""Nothing but the records of backends and a few other files names a backend."""

import ast
import re
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

ROOT = Path(__file__).resolve().parents[2]
MAY_NAME = {
    "module_utils/launcher/exporter.py",
    "module_utils/llamacpp/backends.py",
    "module_utils/llamacpp/prebuilt.py",
    "module_utils/llamacpp/toolkits.py",
    "module_utils/llamacpp/words.py",
    "module_utils/planner/advisories/table.py",
    "module_utils/planner/advisories/hardware.py",
    "module_utils/planner/advisories/memory.py",
    "module_utils/planner/placement/devices.py",
}
"""The records, their names, toolkits and archives, the traps of one backend, and the sensors of one vendor's devices, read where no records are."""
READ_DEVICES = {"facts/hardware.py", "facts/resources.py", "facts/host.py"}
"""Parts of module_utils that may name a record: they read the devices of one vendor."""


def texts(source):
    """Texts in a file that are values, with those around the values of an f-string; documentation is none."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_nothing_else_names_a_backend():
    records = [record for record in backends.RECORDS.values() if record is not backends.CPU]
    names = {record.name for record in records} | {backends.device_name(record.name, 0)[:-1] for record in records}
    constants = {record.name.upper() for record in records}
    found = {}
    for path in (ROOT / "plugins").rglob("*.py"):
        source = path.read_text()
        used = set(re.findall(r"\b(?:backends|words)\.([A-Z]+)\b", source)) & constants
        used = set() if str(path).endswith(tuple(READ_DEVICES)) else used
        if any(name in source for name in names):
            used |= names & set(texts(source))
        if used and str(path.relative_to(ROOT / "plugins")) not in MAY_NAME:
            found[str(path)] = used
    assert not found
