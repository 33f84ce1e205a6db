"""Generated pages are current, and documented arguments are those that plugins take."""

import importlib
import re

import jsonschema_rs
import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.doc_fragments import attributes
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table
from conftest import ROOT, SCHEMA


def test_what_is_generated_is_current(generate):
    docs = ROOT / "docs"
    made = {f"{name}.schema.json": generate.schema_text(*arguments) for name, arguments in generate.SCHEMAS.items()}
    made.update({"variables.md": generate.variables_page(), "metrics.prom": generate.metrics_text()})
    made["plan.md"] = generate.plan_page((docs / "plan.md").read_text())
    assert [name for name, text in made.items() if (docs / name).read_text() != text] == [], "run make docs"


def described(options):
    keys = ("type", "elements", "choices", "default")
    return {
        name: {**{key: option.get(key) for key in keys}, "required": bool(option.get("required"))}
        for name, option in options.items()
    }


def options_of(documentation):
    """With those of its fragments."""
    found, fragments = dict(documentation.get("options", {})), documentation["extends_documentation_fragment"]
    for fragment in [fragments] if isinstance(fragments, str) else fragments:
        name = (*fragment.split("."), "DOCUMENTATION")[3].upper()
        found |= yaml.safe_load(getattr(attributes.ModuleDocFragment, name)).get("options", {})
    return found


def test_modules_that_run_on_the_controller_alone_describe_the_arguments_of_their_action():
    """ansible-test compares the others with the specification in the module."""
    unlike, found = {}, 0
    for path in (ROOT / "plugins" / "modules").glob("*.py"):
        if "AnsibleModule" not in path.read_text():
            parent = "ansible_collections.llamacpp.cluster.plugins"
            action = importlib.import_module(f"{parent}.action.{path.stem}").ActionModule
            documentation = yaml.safe_load(importlib.import_module(f"{parent}.modules.{path.stem}").DOCUMENTATION)
            wanted, has = described(typed_json.specification(action.ARGUMENTS)), described(options_of(documentation))
            unlike.update({path.stem: (wanted, has)} if wanted != has else {})
            found += 1
    assert unlike == {}
    assert found > 5


def test_symptoms_name_advisories():
    page = (ROOT / "docs" / "plan.md").read_text()
    symptoms = page[page.index("## Symptoms of llama.cpp over RPC") :]
    names = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", symptoms))
    assert names <= {entry.id for entry in table.ADVISORIES}
    assert len(names) > 10


def test_the_published_advisories_are_sentences(generate):
    """A word in asterisks stands for a name or a number, not for a verb or a whole sentence."""
    page = (ROOT / "docs" / "plan.md").read_text()
    assert "\nError: With build 4840 of ik_llama.cpp, anyone who can reach" in page
    assert "*device* on *host* (90112" in page
    for entry in table.ADVISORIES:
        texts = [entry.message, *entry.remedies]
        keys = set(re.findall(r"{(\w+)}", " ".join(texts)))
        assert not keys & {"told", "remedy"}, entry.id
        assert generate.EXAMPLE_VALUES.get(entry.id, {}).keys() <= keys, entry.id
    assert generate.EXAMPLE_VALUES.keys() <= {entry.id for entry in table.ADVISORIES}


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.pop("placement"),
        lambda plan: plan["hosts"]["here"]["workers"][0].update(colour="red"),
        lambda plan: plan["head"].update(port="8080"),
        lambda plan: plan.update(advisories=[{"id": "x", "message": "x", "reference": "x", "severity": "error"}]),
        lambda plan: [plan.pop(key) for key in [*plan] if key not in ("schema", "cluster", "refused", "fits")],
    ],
)
def test_what_is_no_plan(local, change):
    plan = local.plan()
    change(plan)
    with pytest.raises(jsonschema_rs.ValidationError):
        SCHEMA.validate(plan)
