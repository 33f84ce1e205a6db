#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: release
short_description: Builds a release of llama.cpp and installs it
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Fetches the source to the controller, checks it, and on the host unpacks, configures, compiles and installs it.
  - What one host has built is packed, kept on the controller, and installed on the other hosts of its kind.
  - For a distribution's package that is installed already, it makes only links and the manifest. Programs that were compiled elsewhere
    are unpacked with their libraries.
  - Before a release is installed, its programs are tried on the host's processor. Where one does not work, no running service is touched.
  - An installed release whose files are intact is left alone.
  - An action plugin of the same name shows the progress of a build every few seconds.
extends_documentation_fragment:
  - llamacpp.cluster.attributes
attributes:
  check_mode:
    support: full
    details: Reports whether the release would be built.
  diff_mode:
    support: full
    details: Shows the release that would be added.
  idempotent:
    support: full
options:
  release:
    description: The release as the plan holds it.
    type: dict
    required: true
  build:
    description: This host's build as the plan holds it.
    type: dict
    required: true
  prefix:
    description: Folder of the installation.
    type: path
    required: true
  cache:
    description: Folder for sources and builds, kept from run to run.
    type: path
    required: true
  brought:
    description: What the action plugin has fetched and copied to the host. That is C(archive), its C(sha256), C(commit) and C(patches).
    type: dict
  received:
    description: A release that another host of its kind has packed. That is its C(path) on the host, where the action plugin copies it, and its C(sha256).
    type: dict
  recorded:
    description:
      - What the controller recorded of this build when it was built, C(sha256) of each file. An installed release with other files is installed again.
    type: dict
    default: {}
  compiles:
    description: Whether this host compiles the build by plan. What it got from another host counts as missing then, unless O(recorded) has it.
    type: bool
    default: false
  share:
    description: Whether other hosts are to get this host's release. It is then packed and kept in the controller's cache.
    type: bool
    default: false
  pack:
    description: Whether the installed release is packed for other hosts, and nothing else done. The action plugin gives it.
    type: bool
    default: false
  cluster:
    description: Name of the cluster. The controller keeps built releases for each cluster by itself.
    type: str
  account:
    description: Account that builds. Without it the connecting user builds.
    type: str
  services:
    description:
      - The host's services as planned. Their command lines are compared with what the installed programs list in their help. An option that a program
        does not know ends the run, before any running service is touched.
    type: list
    elements: dict
    default: []
  host_name:
    description: Name of the host in messages.
    type: str
    default: this host
seealso:
  - module: llamacpp.cluster.plan
  - module: llamacpp.cluster.release_proof
  - module: llamacpp.cluster.release_prune
"""

EXAMPLES = r"""
- name: Build the planned release
  llamacpp.cluster.release:
    release: "{{ __llama_plan.release }}"
    build: "{{ __llama_host_plan.builds[0] }}"
    prefix: "{{ __llama_host_plan.prefix }}"
    cache: "{{ __llama_host_plan.cache }}"
    services: "{{ __llama_host_plan.services }}"
    host_name: "{{ inventory_hostname }}"
"""

RETURN = r"""
manifest:
  description: What was installed, with a hash for each file. The options that its programs list stand in C(manifest.json) only.
  returned: when the release is installed
  type: dict
  sample: {"id": "pypi-0.3.36-cpu-1f2e3d4c", "seconds": 262, "files": {"bin/llama-server": "8f1c..."}}
path:
  description: The packed release on the host.
  returned: when O(pack) is true
  type: str
  sample: /var/cache/llamacpp/sources/b11063-cpu-1f2e3d4c.tar.gz
"""

import os
import subprocess
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import building, store


def install(params):
    """The manifest of what was installed, or None where the controller still has to copy what is needed."""
    build, release = params["build"], params["release"]
    installer = building.Installer(params["prefix"], build, params["account"])
    if release["source"] == "package":
        return installer.link({key: release[key] for key in ("source", "version")})
    if params["received"]:
        return installer.receive(params["received"]["path"], params["received"]["sha256"], params["recorded"])
    if not params["brought"]:
        return None
    source = {**params["brought"], "number": release["build"]}
    if release["source"] == "binary":
        return installer.unpack({key: source[key] for key in ("archive", "sha256", "commit", "number")})
    source["member"] = release["member"]
    builder = building.Builder(params["prefix"], params["cache"], build, source, params["account"])
    return builder.install(params["recorded"])


def report(module, manifest, **result):
    """Ends the module with the manifest, or with the planned options that the programs do not know."""
    params, build = module.params, module.params["build"]
    installer = building.Installer(params["prefix"], build, params["account"])
    compared = building.compare(installer, manifest, params["services"], params["release"], params["host_name"])
    for warning in compared.warnings:
        module.warn(warning)
    if manifest["options_ignored"]:
        module.warn(
            f"cmake ignored {', '.join(manifest['options_ignored'])} when {build['id']} was built, since its tree has no such option: remove it from "
            "llama_build_cmake_options, or set llama_release to a build that has it"
        )
    if compared.errors:
        module.fail_json(msg=f"{'. '.join(compared.errors)}. No running service was touched.", **result)
    shown = {key: value for key, value in manifest.items() if key != "options"}
    module.exit_json(manifest=shown, **result)


def main():
    module = AnsibleModule(
        argument_spec={
            "release": {"type": "dict", "required": True},
            "build": {"type": "dict", "required": True},
            "prefix": {"type": "path", "required": True},
            "cache": {"type": "path", "required": True},
            "brought": {"type": "dict"},
            "received": {"type": "dict"},
            "recorded": {"type": "dict", "default": {}},
            "compiles": {"type": "bool", "default": False},
            "share": {"type": "bool", "default": False},
            "pack": {"type": "bool", "default": False},
            "cluster": {"type": "str"},
            "account": {"type": "str"},
            "services": {"type": "list", "elements": "dict", "default": []},
            "host_name": {"type": "str", "default": "this host"},
        },
        supports_check_mode=True,
        no_log=True,
    )
    params = module.params
    build = params["build"]
    os.umask(0o022)
    release = Path(params["prefix"]) / "releases" / build["id"]
    diff = {"before": "", "after": build["id"] + "\n"}
    is_compiled = params["release"]["source"] not in ("package", "binary")
    try:
        if params["pack"]:
            module.exit_json(changed=False, path=building.pack(params["prefix"], params["cache"], build))
        manifest = store.installed(
            release, build["targets"], params["recorded"], params["compiles"] and build["builder"]
        )
        if manifest:
            report(module, manifest, changed=False)
        if not module.check_mode:
            manifest = install(params)
        if manifest:
            report(module, manifest, changed=True, diff=diff)
    except (building.BuildError, KeyError, tarfile.TarError, subprocess.SubprocessError) as error:
        module.fail_json(msg=f"Installing {build['id']}: {error}")
    except OSError as error:
        said = errors.sentence(error, params["prefix"], params["cache"])
        goes_on = " The build continues where it stopped." if params["brought"] and is_compiled else ""
        module.fail_json(msg=f"Installing {build['id']}: {said}{goes_on}")
    module.exit_json(changed=True, diff=diff)


if __name__ == "__main__":
    main()
