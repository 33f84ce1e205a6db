"""Releases and builds as a plan holds them, and what the controller copies to a host."""

from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import installer, manifest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan

from support.hosts import build_plan, executable, service_plan

BUILD = build_plan("b1-cpu-1", "ggml-rpc-server", "llama-server")._replace(
    release="b1", builder="head", trusted_builders=("head",)
)
SERVICE = service_plan((), "127.0.0.1:8080", name="llamacpp-server", kind="head")
RELEASE = ReleasePlan(source="git", ref="b1", build=7, commit="abc1234def567", protocol=None, id="b1", member="")


def planned_source(source, ref, **values):
    """A release of which nothing counts but where it comes from."""
    nothing = {"build": 0, "commit": "unknown", "protocol": None, "id": ""}
    return ReleasePlan(**{**nothing, "source": source, "ref": ref, **values})


def source_of(archive, patches=()):
    """The source of a release on a host."""
    copied = (installer.Patch(path.name, str(path), sha256(path)) for path in patches)
    return installer.Source(str(archive), sha256(archive), RELEASE.commit, tuple(copied))


def place(prefix, build, script, *source):
    """Installs programs of a script as a build would; returns the folder of the release and its manifest."""
    target = installer.Installer(str(prefix), build, None)
    with target._new_release() as partial:
        for name in build.targets:
            executable(partial / "bin" / name, f"#!/bin/sh\n{script}\n")
        return target.release_folder, target._publish(partial, *source)


def packed_of(archive):
    return installer.PackedArchive(str(archive), sha256(Path(archive)))


def manifest_of(files):
    """A manifest as a release has it in JSON."""
    made = manifest.Manifest(BUILD.id, {}, files, {"commit": RELEASE.commit}, 0)
    return typed_json.dump(made)
