"""Releases as they are looked up, with a cache of the test's own."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources


def resolve(value, find):
    return sources.resolve(release_request.request_of(value), find)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the controller's cache in which archives are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llamacpp" / "sources"


def kept(cache):
    """Names of the files in that folder."""
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock") if cache.exists() else []
