"""Writes docs/variables.md from the roles' argument specifications, the tables of docs/plan.md from plan.schema.json and the advisories,
and the values of options in the tables of inventories/*/README.md from the plans of these inventories: make docs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table as advisories
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory

ROOT = Path(__file__).resolve().parents[1]
ROLES = ["llama_host", "llama_link", "llama_build", "llama_worker", "llama_model", "llama_server", "llama_benchmark"]

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


def rows(options: dict, prefix: str = "") -> list[str]:
    found = []
    for name, option in options.items():
        if not prefix and not name.startswith(inventory.PREFIX):
            continue
        kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        found.append(f"| `{prefix}{name}` | {kind} | {default(option)} | {text(option['description'])} |")
        found += rows(
            option.get("options", {}), f"{prefix}{name}[]." if option["type"] == "list" else f"{prefix}{name}."
        )
    return found


def page() -> str:
    parts = [INTRODUCTION, *(f"| `{name}` | `-e` | {meaning} |\n" for name, meaning in inventory.names().run.items())]
    for role in ROLES:
        main = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())["argument_specs"][
            "main"
        ]
        parts.append(
            f"\n## {role}\n\n{main['short_description']}.\n\n| variable | type | default | meaning |\n|---|---|---|---|\n"
            + "\n".join(rows(main["options"]))
            + "\n"
        )
    return "".join(parts)


def keys(properties: dict, definitions: dict, prefix: str = "") -> list[str]:
    """A row for each key of the plan, those inside of it after it; of a definition that is used more than once the first time alone."""
    found = []
    for name, option in properties.items():
        inner = definitions.pop(option["$ref"].split("/")[-1], {}) if "$ref" in option else option
        found.append(f"| `{prefix}{name}` | {option['description']} |")
        beneath, path = inner, f"{prefix}{name}."
        if "items" in inner:
            beneath, path = inner["items"], f"{prefix}{name}[]."
        elif isinstance(inner.get("additionalProperties"), dict):
            beneath, path = inner["additionalProperties"], f"{prefix}{name}.NAME."
        found += keys(beneath.get("properties", {}), definitions, path)
    return found


def plan_keys() -> str:
    schema = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
    return "| key | meaning |\n|---|---|\n" + "\n".join(keys(schema["properties"], dict(schema["$defs"]))) + "\n"


def advisories_table() -> str:
    def shown(template: str, example: dict[str, str]) -> str:
        return re.sub(r"{(\w+)}", lambda found: example.get(found[1], f"*{found[1]}*"), template)

    lines = [
        f"| `{entry.id}` | {entry.severity} | {shown(entry.message, dict(entry.example))} "
        f"| {shown('; '.join(remedy.text for remedy in entry.remedies), dict(entry.example))} | {entry.reference} |"
        for entry in advisories.ADVISORIES
    ]
    return (
        "| id | severity | what it says | remedies: those that help are shown | reference |\n|---|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )


def plan_page(text: str) -> str:
    """docs/plan.md with its generated tables brought up to date."""
    for name, table in (("keys", plan_keys()), ("advisories", advisories_table())):
        mark = f"<!-- {name}: written by docs/generate.py -->\n"
        before, _old, after = text.split(mark)
        text = f"{before}{mark}{table}{mark}{after}"
    return text


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
    plan = ROOT / "docs" / "plan.md"
    plan.write_text(plan_page(plan.read_text()))
    for readme in sorted(ROOT.glob("inventories/*/README.md")):
        readme.write_text(inventory_page(readme.read_text(), plan_of(readme.parent)))
