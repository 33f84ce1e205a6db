"""The archive for Galaxy has what users need, and nothing that only developers do."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

SHIPPED = """
CHANGELOG.rst CONTRIBUTING.md FILES.json LICENSE MANIFEST.json README.md requirements.txt site.yml
changelogs docs inventories meta playbooks plugins roles
"""
pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Paths in the archive."""
    target = tmp_path_factory.mktemp("archive")
    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    subprocess.run([galaxy, "collection", "build", "--output-path", target], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(target.glob("llamacpp-cluster-*.tar.gz"))) as archive:
        return archive.getnames()


def test_the_top_level(names):
    assert {name.split("/")[0] for name in names} == {*SHIPPED.split()}


def test_an_execution_environment_finds_its_requirements(names):
    """Paths are relative to the installed collection. An environment brings its own ansible-core, which is all of Python that is needed."""
    dependencies = yaml.safe_load((ROOT / "meta" / "execution-environment.yml").read_text())["dependencies"]
    assert set(dependencies) == {"system"}
    assert set(dependencies.values()) <= set(names)
    direct, _blank, _indirect = (ROOT / "requirements.txt").read_text().partition("\n\n")
    assert [line.split("==")[0] for line in direct.splitlines()[1:]] == ["ansible-core"]


def test_nothing_for_developers(names):
    developers = ("changelogs/fragments", "docs/generate.py")
    assert not [name for name in names if name.startswith(developers) or "__pycache__" in name]
