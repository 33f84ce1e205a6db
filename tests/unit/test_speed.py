"""Rates of devices, what a token reads, and what that costs."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import entry, speed
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Device

STRIX = {"backend": "vulkan", "name": "8060S", "architecture": "gfx1151", "memory_mib": 126976, "unified": True}


def rate(pair, device, accelerators=(), model="test"):
    pair.hosts["worker1"]["facts"].update(
        accelerators=list(accelerators), cpu={"model": model, "cores": 8, "features_id": "f"}
    )
    facts = entry.read("test", pair.hosts).hosts["worker1"].facts
    return speed.rate_of(Device("worker1", "vulkan", device, device, 1, {}), facts)


def test_a_rate_comes_from_the_table_by_architecture(pair):
    given = rate(pair, "Vulkan0", [STRIX])
    assert (given.source, given.gb_per_s) == (speed.TABLE, pytest.approx(256 * rates.FAMILIES["strix"].share, abs=0.1))


def test_a_processor_has_a_rate_of_its_own(pair):
    assert rate(pair, "CPU", [STRIX], "AMD EPYC 7713 64-Core Processor").source == speed.TABLE
    assert rate(pair, "CPU", [STRIX]).source == speed.ASSUMED


@pytest.mark.parametrize("unified, kind", [(True, "unified"), (False, "discrete")])
def test_what_no_table_knows_is_assumed_by_its_kind(pair, unified, kind):
    given = rate(pair, "Vulkan0", [{**STRIX, "architecture": "gfx9999", "unified": unified}])
    row = rates.ASSUMED[kind]
    assert (given.source, given.gb_per_s) == (speed.ASSUMED, row.gb_per_s * rates.FAMILIES[row.family].share)
