# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of a cluster: those of the default one never change, and no two clusters share one."""

from __future__ import annotations

import itertools

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

CLUSTERS = ("llama_cluster", "a", "ab", "a_server", "workers", "worker_a", "llamacpp", "x" * 23)
WORKERS = ("cpu", "a", "server", "worker-a", "a-server", "hip.0")


def services(cluster):
    own = names.of(cluster)
    parts = ["server", *(f"worker-{worker}" for worker in WORKERS)]
    return {own.service(part) for part in parts}


def test_names_of_the_default_cluster_are_without_its_name():
    own = names.of("llama_cluster")
    assert (own.account, own.server, own.workers) == ("llamacpp", "llamacpp-server", "llamacpp-worker-")
    assert names.places("system", "systemd", {"HOME": "/root"})["prefix"] == "/opt/llamacpp"


def test_another_cluster_has_its_name_in_every_name_and_shares_the_cache():
    own, root = names.of("night"), "llamacpp-night"
    services = {"server": f"{root}-server", "workers": f"{root}-worker-"}
    assert own.as_dict() == {"cluster": "night", "account": root, **services}
    place = names.places("user", "supervisor", {"HOME": "/home/me"}, "night")
    assert place["prefix"] == "/home/me/.local/share/llamacpp-night"
    assert place["cache"] == "/home/me/.cache/llamacpp"


@pytest.mark.parametrize("one, other", list(itertools.permutations(CLUSTERS, 2)))
def test_no_service_belongs_to_two_clusters(one, other):
    assert not services(one) & services(other)
    assert not any(names.of(one).owns(service) for service in services(other))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_service_is_known_by_its_name(cluster):
    own = names.of(cluster)
    for service in services(cluster):
        assert own.owns(service)
        assert names.is_head(service) == service.removeprefix(f"{own.root}-").startswith("server")


@pytest.mark.parametrize("cluster", ["worker", "build", "a-b", "A", "1a", "ä", "x" * 24, "", "a/b", "a\n", "../x"])
def test_a_cluster_whose_name_makes_no_account_is_refused(cluster):
    with pytest.raises(Refusal, match=r"^llama_cluster_group is .* lower-case letters"):
        names.of(cluster)
    assert len(names.of("x" * 23).account) == names.LONGEST_ACCOUNT
