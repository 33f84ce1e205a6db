"""One record for each backend, and what the rest of the tree has for each."""

import math
import re
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import DEFAULT_FACTS, Accelerator
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import ROOT

RECORDS = list(backends.BY_NAME.values())
IN_DOCUMENTS = {"cpu": "processors"}
"""Backend → what documents call it, where that is not its name."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_is_of_a_form(record):
    assert re.fullmatch(r"[a-z]+", record.name)
    assert record.alignment & (record.alignment - 1) == 0 < record.alignment
    assert record.device.format(0) == record.device.format(0).strip()
    assert record is backends.CPU or record.device.format(0) != record.device.format(1)
    assert record is backends.CPU or record.options
    if record.architecture:
        assert re.fullmatch(record.architecture.pattern, record.architecture.example)
        assert record.architecture.cmake_option


@pytest.mark.parametrize("toolkit", toolkits.TOOLKITS.values(), ids=lambda toolkit: toolkit.command)
def test_a_toolkit_is_found_named_and_declared(toolkit):
    assert DEFAULT_FACTS["toolchain"][toolkit.command] == toolkit.declared_version
    assert all(place.endswith(f"/bin/{toolkit.command}") for place in toolkit.command_patterns)
    if toolkit.command_patterns:
        assert toolkit.repository
        assert toolkit.compilers
        assert toolkit.environment
    assert {*toolkit.prefix_variables, *toolkit.runtime_variables} <= set(toolkit.environment)


def test_a_library_can_be_looked_for():
    assert [one.name for one in toolkits.LIBRARIES.values() if bool(one.header) == bool(one.files)] == []


def test_what_tells_backends_apart_is_said_once():
    for values in (
        [record.name for record in RECORDS],
        [record.preference_rank for record in RECORDS],
        [record.device for record in RECORDS],
        [toolkit.command for toolkit in toolkits.TOOLKITS.values()],
        [library.name for own in toolkits.BACKEND_LIBRARIES.values() for library in own],
    ):
        assert len(set(values)) == len(values)
    assert backends.CPU.preference_rank == max(record.preference_rank for record in RECORDS)


def test_every_backend_can_have_a_release_and_is_offered():
    assert tuple(backends.BY_NAME) == BACKENDS
    spec = inventory.specification()
    for record in RECORDS:
        assert f"llama_release_{record.name}" in spec
        assert f"V({record.name})" in " ".join(spec["llama_backend"]["description"])
    asked = {"llama_release": release_request.request_of("b11434")}
    asked.update((f"llama_release_{name}", asked["llama_release"]._replace(source="pypi")) for name in BACKENDS)
    assert releases.sources_of(SimpleNamespace(release_requests=asked)) == dict.fromkeys(BACKENDS, "pypi")


def test_a_device_of_an_unknown_backend_is_not_declared():
    with pytest.raises(Refusal, match="has a device with the backend 'cpu': use one of vulkan,"):
        cluster_inputs.merge_hardware("here", None, {"accelerators": [{"backend": "cpu", "memory_mib": 1000}]})


@pytest.mark.parametrize("unified", [False, True])
def test_a_device_whose_memory_only_the_operator_knows_has_no_bound(unified):
    device = Accelerator("vulkan", "AMD graphics", "", 0, unified)
    assert devices.visible_mib(device, {}) == math.inf


def test_every_backend_has_a_place_in_the_documentation():
    """A row of README's table says how each was tested, and a word of docs/hardware.md on what it ran."""
    rows = " ".join(re.findall(r"^\| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    for text in (rows, (ROOT / "docs" / "hardware.md").read_text()):
        words = set(re.findall(r"\w+", text.lower()))
        assert [record.name for record in RECORDS if IN_DOCUMENTS.get(record.name, record.name) not in words] == []
