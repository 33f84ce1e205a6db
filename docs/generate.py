"""Writes what is generated in docs: make docs.

docs/variables.md comes from the roles' argument specifications, docs/*.schema.json from the types, docs/metrics.prom from the metrics, and the sections
of docs/plan.md from the advisories. In the tables of inventories/*/README.md it renews the values of options from the plans of these inventories.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import types as benchmark_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import MAX_INT, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import metrics
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table as advisories
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import VULKAN_MEMORY_ADVISORY
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import types as status_types
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory

ROOT = Path(__file__).resolve().parents[1]
MAX_LINE_LENGTH = 160
"""Length of a line of JSON, in characters."""
SCHEMAS = {
    "plan": ("Plan of llamacpp.cluster", types.Plan, types.Refused),
    "status": ("Status of llamacpp.cluster", status_types.Status),
    "benchmark": ("Benchmark of llamacpp.cluster", benchmark_types.Benchmark),
}
"""Title of each schema in docs, and the types whose JSON it describes."""
EXAMPLE_VALUES: dict[str, dict[str, str]] = {
    "rpc-remote-code-execution": {"builds": "build 4840 of ik_llama.cpp"},
    "unprotected-worker": {
        "where": "*endpoints* on *host*",
        "reason": "The service manager (launchd) does not filter addresses",
        "managers": "firewalld, ufw or nftables",
        "scope": "system",
    },
    "external-worker": {"where": "*endpoints* on *host*"},
    "unlimited-server": {"reason": "The service manager (launchd) does not filter addresses"},
    "hip-mmap-hang": {"where": "*mib* MiB for *devices* on *host*"},
    VULKAN_MEMORY_ADVISORY: {"where": "*device* on *host* (90112 MiB planned, *limit* MiB reported)", "hip": "hip"},
    "rpc-in-clear": {"where": "*host* over ethernet", "transport": "stunnel"},
    "graphics-memory-limit": {"where": "*device* on *host*", "tuning": "true"},
    "strix-halo-kernel": {"where": "*host* (*kernel*)"},
    "accelerator-unused": {"where": "*devices* on *host*"},
    "slower-than-one-host": {"steps": "leave llama_workers empty"},
    "compute-over-capacity": {"flash": "on", "devices": "CUDA0 on gpu1 (≤ 31020 MiB, capacity 23336)"},
    "auxiliary-not-counted": {"variable": "llama_model_draft", "reason": "its header was not read", "option": "-ngld"},
    "architecture-unknown": {
        "modal": "would",
        "subject": "build *build* does not know",
        "newer_build": "build *build* or newer",
        "removal": ", and remove *variable*",
    },
    "rocm-gfx906": {"where": "*host* (ROCm 7.1)", "vulkan": "vulkan"},
    "nvidia-driver": {"where": "*host*", "failure": "Failed to initialize NVML: Driver/library version mismatch"},
    "rocblas-kernels": {
        "where": "*host* (gfx1032)",
        "vulkan": "vulkan",
        "targets": " and GPU_TARGETS to gfx1030 in llama_build_cmake_options",
    },
    "worker-not-started": {"where": "*endpoint* on *host*"},
    "sycl-worker": {"where": "*device* on *host*", "vulkan": "vulkan", "sycl": "sycl"},
    "metal-mtp": {"where": "*host*"},
    "metal-mmap": {"where": "*host*"},
    "prompt-cache-memory": {"with_cache": "4.1 to 7", "without_cache": "11 to 18"},
    "vulkan-prompt-cache": {"where": "*device* on *host*"},
    "user-scope": {"where": "*hosts*"},
    "variable-misspelt": {"where": "*hosts*"},
    "variable-unknown": {"where": "*hosts*"},
    "no-fallback": {"where": "*host*:*worker* (needs *number* MiB more memory)"},
}
"""Example values for the keys in an advisory's texts that are more than a name or a number."""
ROLES = ["llama_host", "llama_link", "llama_build", "llama_worker", "llama_model", "llama_server", "llama_balancer"]

INTRODUCTION = """# Variables

<!-- Written by docs/generate.py from roles/*/meta/argument_specs.yml. Change it there, then run `make docs`. -->

Every variable has a default. The smallest inventory has host names and a model. Set variables for a host, a group or the
whole inventory, or with `-e`; the `vars` of a play are refused. Variables of the server and the model are read from the head.
The plan reports a variable that begins with `llama_` and is not on this page (`variable-unknown`), with the closest known name. It refuses
a variable within two letters of a name on this page (`variable-misspelt`).

## Groups

- `llama_cluster`: The hosts of the cluster.
- `llama_head`: The host that runs llama-server.
- `llama_workers`: The hosts that lend their devices. A host may also be in `llama_head`.

## For one run

Set these with `-e`.

"""


def wrap(text: str, bullet: str = "") -> str:
    """Return a paragraph, or an item of a list if `bullet` is its dash."""
    return textwrap.fill(
        text,
        130,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def markdown(text: str) -> str:
    """Return Ansible's markup as Markdown."""
    text = re.sub(r"O\([\w.]+#role:main:", "O(", text)
    return re.sub(r"[CVOP]\(([^()]*(?:\([^()]*\))?[^()]*)\)", lambda match: f"`{match[1].split('#')[0]}`", text)


def sentences_of(option: dict) -> list[str]:
    """Return the entries of a description."""
    description = option["description"]
    return [markdown(entry) for entry in ([description] if isinstance(description, str) else description)]


def default_text(option: dict) -> str:
    value = option.get("default")
    if value in (None, [], {}, ""):
        return ""
    if isinstance(value, dict):
        return ", ".join(f"`{key}: {nested_value}`" for key, nested_value in value.items())
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def property_texts(option: dict) -> list[str]:
    """Return type, values and default of an option."""
    type_text = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
    choices = ", ".join(f"`{choice}`" for choice in option.get("choices", []))
    return [
        {"raw": "any"}.get(type_text, type_text),
        *(["required"] if option.get("required") else []),
        *([f"one of {choices}"] if choices else []),
        *([f"default {default_text(option)}"] if default_text(option) else []),
    ]


def key_items(option: dict, prefix: str, seen_ids: set[int]) -> Iterator[str]:
    """Yield an item for each key of an option, except keys that are aliases of another option."""
    for name, suboption in option.get("options", {}).items():
        if id(suboption) not in seen_ids:
            seen_ids.add(id(suboption))
            yield wrap(
                f"`{prefix}{name}` ({'; '.join(property_texts(suboption))}): {' '.join(sentences_of(suboption))}", "- "
            )
            yield from key_items(
                suboption, f"{prefix}{name}[]." if suboption["type"] == "list" else f"{prefix}{name}.", seen_ids
            )


def variable_section(name: str, option: dict, seen_ids: set[int]) -> str:
    """Return the section of a variable. Entries of its description that begin with a value and a colon become items."""
    blocks = [f"### {name}", wrap(f"({'; '.join(property_texts(option))})")]
    lines = sentences_of(option)
    plain_sentences = [line for line in lines if not re.match(r"`[^`]+`: ", line)]
    value_items = [wrap(line, "- ") for line in lines if line not in plain_sentences]
    blocks += [wrap(" ".join(plain_sentences)), "\n".join([*value_items, *key_items(option, "", seen_ids)])]
    return "\n\n".join(filter(None, blocks)) + "\n"


def variables_page() -> str:
    run_items = [wrap(f"`{name}`: {meaning}", "- ") for name, meaning in inventory.run_variables().items()]
    sections = [INTRODUCTION + "\n".join(run_items) + "\n"]
    for role in ROLES:
        path = ROOT / "roles" / role / "meta" / "argument_specs.yml"
        entry_point = yaml.safe_load(path.read_text())["argument_specs"]["main"]
        sections.append(f"## {role}\n\n{entry_point['short_description']}.\n")
        options = {
            name: option
            for name, option in entry_point["options"].items()
            if name.startswith(inventory.VARIABLE_PREFIX)
        }
        seen_ids = {id(option) for option in options.values()}
        sections += [variable_section(name, option, seen_ids) for name, option in options.items()]
    return "\n".join(sections)


def field_descriptions(record_type: type) -> dict[str, str]:
    """Return the description of each field of a record: the text below it in its module."""
    (class_node,) = ast.parse(inspect.getsource(record_type)).body
    description_by_field, name = {}, ""
    for node in class_node.body:
        if isinstance(node, ast.AnnAssign):
            name = node.target.id
        elif name and isinstance(node, ast.Expr):
            description_by_field[name] = inspect.cleandoc(node.value.value).replace("\n", " ")
    return description_by_field


def schema_text(title: str, *record_types: type) -> str:
    """Return the JSON Schema of values that have the form of one of these records."""
    definitions: dict[str, dict] = {}
    schemas = [schema_of_type(record_type, definitions) for record_type in record_types]
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    document.update(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    return format_json({**document, "$defs": dict(sorted(definitions.items()))}) + "\n"


def schema_of_type(hint: object, definitions: dict[str, dict]) -> dict:
    """Return the JSON Schema of a type. Records are added to the definitions."""
    bare_type, annotations = typed_json.unwrap(hint)
    limit = next((annotation for annotation in annotations if isinstance(annotation, (Text, Number, tuple))), None)
    if typed_json.is_record_type(bare_type):
        if bare_type.__name__ not in definitions:
            definitions[bare_type.__name__] = {}
            definitions[bare_type.__name__] = schema_of_record(bare_type, definitions)
        return {"$ref": f"#/$defs/{bare_type.__name__}"}
    if typed_json.is_optional(bare_type):
        inner_schema = schema_of_type(
            (limit and Annotated[typed_json.inner_hint(bare_type), limit]) or typed_json.inner_hint(bare_type),
            definitions,
        )
        return {"anyOf": [inner_schema, {"type": "null"}]}
    origin = typing.get_origin(bare_type)
    if origin is tuple:
        return {"type": "array", "items": schema_of_type(typed_json.inner_hint(bare_type), definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of_type(typed_json.inner_hint(bare_type), definitions)}
    if origin is typing.Literal:
        limit = typing.get_args(bare_type)
    if type(limit) is tuple:
        return {"enum": list(limit)}
    if isinstance(limit, Number) and limit.minimum == limit.maximum:
        return {"const": limit.minimum}
    json_type = {str: "string", int: "integer", float: "number", bool: "boolean"}.get(bare_type)
    type_schema: dict = {"type": json_type} if json_type else {}
    if isinstance(limit, Text) and limit.expression not in (".*", "(?s).*"):
        type_schema["pattern"] = f"^{limit.expression}$"
    if isinstance(limit, Number):
        type_schema["minimum"] = limit.minimum
        type_schema.update({"maximum": limit.maximum} if limit.maximum < MAX_INT else {})
    return type_schema


def schema_of_record(record_type: type, definitions: dict[str, dict]) -> dict:
    description_by_field, property_schemas = field_descriptions(record_type), {}
    for field in typed_json.fields(record_type):
        bare_type, _annotations = typed_json.unwrap(field.type)
        hint = (
            typed_json.inner_hint(bare_type)
            if field.omits_default and typed_json.is_optional(bare_type)
            else field.type
        )
        property_schemas[field.name] = {
            "description": description_by_field[field.name],
            **schema_of_type(hint, definitions),
        }
    return {
        "description": record_type.__doc__,
        "type": "object",
        "additionalProperties": False,
        "required": [field.name for field in typed_json.fields(record_type) if not field.omits_default],
        "properties": property_schemas,
    }


def format_json(value: object, indent: int = 0) -> str:
    """Return JSON in which a value is on one line if it fits."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= MAX_LINE_LENGTH or not isinstance(value, (dict, list)):
        return line
    pairs = value.items() if isinstance(value, dict) else [(None, entry) for entry in value]
    lines = [
        f"{' ' * (indent + 1)}{'' if key is None else json.dumps(key) + ': '}{format_json(entry, indent + 1)}"
        for key, entry in pairs
    ]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(lines) + "\n" + " " * indent + closing


def fill_examples(advisory_id: str, template: str) -> str:
    """Return a text of an advisory with example values."""
    return re.sub(
        r"{(\w+)}", lambda match: EXAMPLE_VALUES.get(advisory_id, {}).get(match[1], f"*{match[1]}*"), template
    )


def advisory_sections() -> str:
    """Return a section for each advisory."""
    sections = [""]
    for advisory in advisories.ADVISORIES:
        message = wrap(f"{advisory.severity.capitalize()}: {fill_examples(advisory.id, advisory.message)}")
        remedies = "\n".join(wrap(fill_examples(advisory.id, remedy), "- ") for remedy in advisory.remedies)
        reference = re.sub(r"^docs/(.+)", r"[\1](\1)", re.sub("^(https:.+)", r"<\1>", advisory.reference))
        sections.append(f"### {advisory.id}\n\n{message}\n\n{remedies}\n\nSee {reference}.\n")
    return "\n".join([*sections, ""])


def metrics_text() -> str:
    """Return every metric as Prometheus reads it, with the value 0 and the names of labels as their values."""
    figures = metrics.Figures()
    for metric in metrics.METRICS:
        figures.add(metric.name, 0, **{label: label for label in metric.labels})
    return figures.text()


def plan_page(text: str) -> str:
    """Return docs/plan.md with its generated sections renewed."""
    mark = "<!-- advisories: written by docs/generate.py -->\n"
    start, _old_sections, end = text.split(mark)
    return f"{start}{mark}{advisory_sections()}{mark}{end}"


def renew_cell(cell: str, argv: list[str]) -> str:
    """Return a cell of a README with the planned value after each option of llama-server that it names with a value.

    :param argv: llama-server's command line.
    """

    def renew_span(match: re.Match[str]) -> str:
        words = match[1].split(" ")
        for index, word in enumerate(words[:-1]):
            if word.startswith("--") and word in argv and not words[index + 1].startswith("-"):
                words[index + 1] = argv[argv.index(word) + 1]
        return f"`{' '.join(words)}`"

    return re.sub(r"`([^`]+)`", renew_span, cell)


def inventory_page(text: str, plan: dict) -> str:
    """Return README.md of an inventory with the second column of its table renewed."""
    lines = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) == 5:
            cells[2] = renew_cell(cells[2], plan["head"]["argv"])
        lines.append("|".join(cells))
    return "\n".join(lines) + "\n"


def make_plan(inventory_folder: Path) -> dict:
    """Return the plan as an operator gets it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        arguments = ["playbooks/plan.yml", "-i", str(inventory_folder), "-e", f"llama_plan_path={path}"]
        program = Path(sys.executable).with_name("ansible-playbook")
        subprocess.run([str(program), *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


if __name__ == "__main__":
    (ROOT / "docs" / "variables.md").write_text(variables_page())
    for name, arguments in SCHEMAS.items():
        (ROOT / "docs" / f"{name}.schema.json").write_text(schema_text(*arguments))
    (ROOT / "docs" / "metrics.prom").write_text(metrics_text())
    plan_path = ROOT / "docs" / "plan.md"
    plan_path.write_text(plan_page(plan_path.read_text()))
    for readme in sorted(ROOT.glob("inventories/*/README.md")):
        readme.write_text(inventory_page(readme.read_text(), make_plan(readme.parent)))
