# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names that are the same on every host."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names


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
    assert names.is_head_service(name) == head
