# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names and places that are the same on every host."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names


def test_places_of_the_system_and_of_a_user():
    assert names.installation_folders("system", "systemd", {"HOME": "/root"})["prefix"] == "/opt/llamacpp"
    place = names.installation_folders("user", "supervisor", {"HOME": "/home/me"})
    assert (place["prefix"], place["cache"]) == ("/home/me/.local/share/llamacpp", "/home/me/.cache/llamacpp")


@pytest.mark.parametrize(
    "name, ours, head",
    [
        ("llamacpp-server", True, True),
        ("llamacpp-worker-cpu", True, False),
        ("llamacpp-benchmark", False, False),
        ("llamacpp-servers", False, False),
    ],
)
def test_a_service_is_known_by_its_name(name, ours, head):
    assert bool(names.SERVICE_PATTERN.fullmatch(name)) == ours
    assert names.is_head(name) == head
