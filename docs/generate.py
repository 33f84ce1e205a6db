"""Writes docs/variables.md from the roles' argument specifications, docs/*.schema.json from the types, docs/metrics.prom, the table of docs/plan.md from the
advisories, and the values of options in the tables of inventories/*/README.md from the plans of these inventories: make docs."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import types as benchmark_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import LARGEST, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import metrics
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import memory
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table as advisories
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import types as status_types
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory

ROOT = Path(__file__).resolve().parents[1]
LINE = 160
"""Characters of a line of JSON."""
SCHEMAS = {
    "plan": ("Plan of llamacpp.cluster", types.Plan, types.Refused),
    "status": ("Status of llamacpp.cluster", status_types.Status),
    "benchmark": ("Benchmark of llamacpp.cluster", benchmark_types.Benchmark),
}
"""Name of a schema in docs → its title, and the types whose JSON it describes."""
EXAMPLES: dict[str, dict[str, str]] = {
    "rpc-remote-code-execution": {"builds": "commit 4840 of ik_llama.cpp"},
    "unprotected-worker": {
        "where": "*endpoints* of *host*",
        "reason": "launchd does not filter addresses",
        "managers": "firewalld, ufw or nftables",
        "scope": "system",
    },
    "external-worker": {"where": "*endpoints* of *host*"},
    "unlimited-server": {"reason": "launchd does not filter addresses"},
    "hip-mmap-hang": {"where": "*mib* MiB on *device* of *host*"},
    memory.VULKAN_MEMORY: {
        "where": "*device* of *host* gets 90112 MiB, and *limit* MiB are shown",
    },
    "rpc-in-clear": {"where": "*host* over ethernet", "transport": "stunnel"},
    "graphics-memory-limit": {"where": "*device* of *host*", "tuning": "true"},
    "strix-halo-kernel": {"where": "*host* (*kernel*)"},
    "accelerator-unused": {"where": "*devices* on *host*"},
    "slower-than-one-host": {"steps": "leave llama_workers empty"},
    "compute-over-capacity": {
        "flash": "on",
        "devices": "CUDA0 of gpu1 (≤ 31020 of 23336 MiB)",
    },
    "auxiliary-not-counted": {"variable": "llama_model_draft", "why": "its header was not read", "word": "-ngld"},
    "architecture-unknown": {"who": "build *build* does or may", "newer": "build *build*"},
    "rocm-gfx906": {"where": "*host* (ROCm 7.1)", "vulkan": "vulkan"},
    "sycl-worker": {"where": "*device* of *host*", "vulkan": "vulkan", "own": "sycl"},
    "metal-mtp": {"where": "*host*"},
    "metal-mmap": {"where": "*host*"},
    "vulkan-prompt-cache": {"where": "*device* of *host*"},
    "user-scope": {"where": "*hosts*"},
    "variable-unknown": {"where": "*hosts*"},
    "no-fallback": {"where": "*host*:*worker* (*number* MiB are missing)"},
}
"""Advisory → keys of its texts whose value is more than a name or a number, each with an example for docs/plan.md."""
ROLES = [
    "llama_host",
    "llama_link",
    "llama_build",
    "llama_worker",
    "llama_model",
    "llama_server",
]

INTRODUCTION = """# Variables

<!-- Written by docs/generate.py from roles/*/meta/argument_specs.yml. Change it there, then run `make docs`. -->

Every variable has a default; the smallest inventory is host names and a model. Set them for a host, a group or the
whole inventory, or with `-e`; the `vars` of a play are refused. Those of the server and the model are read from the head. A variable
that begins with `llama_` and is not on this page is named by the plan (`variable-unknown`), with the one that was probably meant.

| name | where it is given | meaning |
|---|---|---|
| `llama_head`, `llama_workers` | groups | the host that runs llama-server, and those that lend their devices; a host may be in both |
| `llama_cluster` | group | the cluster's hosts |
"""


def text(description: str | list[str]) -> str:
    """Ansible's markup as Markdown, in one line."""
    joined = " ".join(description) if isinstance(description, list) else description
    joined = re.sub(r"O\([\w.]+#role:main:", "O(", joined)
    joined = re.sub(r"[CVOP]\(([^()]*(?:\([^()]*\))?[^()]*)\)", lambda found: f"`{found[1].split('#')[0]}`", joined)
    return joined.replace("|", "\\|")


def default(option: dict) -> str:
    if "default" not in option or option["default"] in ([], {}):
        return ""
    value = option["default"]
    if value == "":
        return ""
    if isinstance(value, dict):
        return ", ".join(f"`{key}: {entry}`" for key, entry in value.items())
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def rows(options: dict, seen: set[int], prefix: str = "") -> list[str]:
    """A line for each option, but for those that the specification has from another option by an alias."""
    found = []
    for name, option in options.items():
        if id(option) in seen or (not prefix and not name.startswith(inventory.PREFIX)):
            continue
        seen.add(id(option))
        kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        found.append(f"| `{prefix}{name}` | {kind} | {default(option)} | {text(option['description'])} |")
        below = f"{prefix}{name}[]." if option["type"] == "list" else f"{prefix}{name}."
        found += rows(option.get("options", {}), seen, below)
    return found


def page() -> str:
    parts = [
        INTRODUCTION,
        *(f"| `{name}` | `-e` | {meaning} |\n" for name, meaning in inventory.run_variables().items()),
    ]
    for role in ROLES:
        main = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())["argument_specs"][
            "main"
        ]
        parts.append(
            f"\n## {role}\n\n{main['short_description']}.\n\n| variable | type | default | meaning |\n|---|---|---|---|\n"
            + "\n".join(rows(main["options"], set()))
            + "\n"
        )
    return "".join(parts)


def descriptions(record: type) -> dict[str, str]:
    """Field of a record → the text below it in its module."""
    (definition,) = ast.parse(inspect.getsource(record)).body
    texts, name = {}, ""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign):
            name = node.target.id
        elif name and isinstance(node, ast.Expr):
            texts[name] = inspect.cleandoc(node.value.value).replace("\n", " ")
    return texts


def schema(title: str, *records: type) -> str:
    """The JSON Schema of what has the form of one of these records."""
    definitions: dict[str, dict] = {}
    forms = [described_type(record, definitions) for record in records]
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    whole.update(forms[0] if len(forms) == 1 else {"anyOf": forms})
    return printed({**whole, "$defs": dict(sorted(definitions.items()))}) + "\n"


def described_type(hint: object, definitions: dict[str, dict]) -> dict:
    """The JSON Schema of a type. Records go to the definitions."""
    bare, notes = typed_json.unwrap(hint)
    limits = next((note for note in notes if isinstance(note, (Text, Number, tuple))), None)
    if typed_json.is_record(bare):
        if bare.__name__ not in definitions:
            definitions[bare.__name__] = {}
            definitions[bare.__name__] = described_record(bare, definitions)
        return {"$ref": f"#/$defs/{bare.__name__}"}
    if typed_json.is_optional(bare):
        inner = described_type(
            (limits and Annotated[typed_json.inner(bare), limits]) or typed_json.inner(bare), definitions
        )
        return {"anyOf": [inner, {"type": "null"}]}
    origin = typing.get_origin(bare)
    if origin is tuple:
        return {"type": "array", "items": described_type(typed_json.inner(bare), definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": described_type(typed_json.inner(bare), definitions)}
    if origin is typing.Literal:
        limits = typing.get_args(bare)
    if type(limits) is tuple:
        return {"enum": list(limits)}
    if isinstance(limits, Number) and limits.minimum == limits.maximum:
        return {"const": limits.minimum}
    kind = {str: "string", int: "integer", float: "number", bool: "boolean"}.get(bare)
    described: dict = {"type": kind} if kind else {}
    if isinstance(limits, Text) and limits.expression not in (".*", "(?s).*"):
        described["pattern"] = f"^{limits.expression}$"
    if isinstance(limits, Number):
        described["minimum"] = limits.minimum
        described.update({"maximum": limits.maximum} if limits.maximum < LARGEST else {})
    return described


def described_record(record: type, definitions: dict[str, dict]) -> dict:
    texts, properties = descriptions(record), {}
    for field in typed_json.fields(record):
        bare, _notes = typed_json.unwrap(field.type)
        hint = typed_json.inner(bare) if field.absent and typed_json.is_optional(bare) else field.type
        properties[field.name] = {"description": texts[field.name], **described_type(hint, definitions)}
    return {
        "description": record.__doc__,
        "type": "object",
        "additionalProperties": False,
        "required": [field.name for field in typed_json.fields(record) if not field.absent],
        "properties": properties,
    }


def printed(value: object, indent: int = 0) -> str:
    """JSON in which whatever fits on a line is on one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= LINE or not isinstance(value, (dict, list)):
        return line
    pairs = value.items() if isinstance(value, dict) else [(None, entry) for entry in value]
    parts = [
        f"{' ' * (indent + 1)}{'' if key is None else json.dumps(key) + ': '}{printed(entry, indent + 1)}"
        for key, entry in pairs
    ]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(parts) + "\n" + " " * indent + closing


def advisories_table() -> str:
    def shown(template: str, example: dict[str, str]) -> str:
        return re.sub(r"{(\w+)}", lambda found: example.get(found[1], f"*{found[1]}*"), template)

    lines = [
        f"| `{entry.id}` | {entry.severity} | {shown(entry.message, EXAMPLES.get(entry.id, {}))} "
        f"| {shown('; '.join(entry.remedies), EXAMPLES.get(entry.id, {}))} | {entry.reference} |"
        for entry in advisories.ADVISORIES
    ]
    return (
        "| id | severity | what it says | remedies: those that are possible are shown | reference |\n|---|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )


def metrics_table() -> str:
    """Every metric as Prometheus reads it, with a value of 0 and the names of labels as their values."""
    figures = metrics.Figures()
    for metric in metrics.METRICS:
        figures.add(metric.name, 0, **{label: label for label in metric.labels})
    return figures.text()


def plan_page(text: str) -> str:
    """docs/plan.md with its generated table brought up to date."""
    mark = "<!-- advisories: written by docs/generate.py -->\n"
    before, _old, after = text.split(mark)
    return f"{before}{mark}{advisories_table()}{mark}{after}"


def planned_cell(cell: str, argv: list[str]) -> str:
    """A cell of a README with the values that options of llama-server have in a plan, after each option that it names with a value.

    :param argv: llama-server's command line.
    """

    def renewed(span: re.Match[str]) -> str:
        words = span[1].split(" ")
        for place, word in enumerate(words[:-1]):
            if word.startswith("--") and word in argv and not words[place + 1].startswith("-"):
                words[place + 1] = argv[argv.index(word) + 1]
        return f"`{' '.join(words)}`"

    return re.sub(r"`([^`]+)`", renewed, cell)


def inventory_page(text: str, plan: dict) -> str:
    """README.md of an inventory, with the second column of its table brought up to date."""
    lines = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) == 5:
            cells[2] = planned_cell(cells[2], plan["head"]["argv"])
        lines.append("|".join(cells))
    return "\n".join(lines) + "\n"


def plan_of(inventory_folder: Path) -> dict:
    """The plan as an operator gets it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        arguments = ["playbooks/plan.yml", "-i", str(inventory_folder), "-e", f"llama_plan_path={path}"]
        program = Path(sys.executable).with_name("ansible-playbook")
        subprocess.run([str(program), *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


if __name__ == "__main__":
    (ROOT / "docs" / "variables.md").write_text(page())
    for name, described in SCHEMAS.items():
        (ROOT / "docs" / f"{name}.schema.json").write_text(schema(*described))
    (ROOT / "docs" / "metrics.prom").write_text(metrics_table())
    plan = ROOT / "docs" / "plan.md"
    plan.write_text(plan_page(plan.read_text()))
    for readme in sorted(ROOT.glob("inventories/*/README.md")):
        readme.write_text(inventory_page(readme.read_text(), plan_of(readme.parent)))
