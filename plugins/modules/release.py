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
  - Of a distribution's package that is installed already, only links and the manifest are made.
  - An installed release whose files are intact is left alone.
  - An action plugin of the same name shows the progress of a build every few seconds.
attributes:
  check_mode:
    support: full
    description: Tells whether the release would be built.
  diff_mode:
    support: full
    description: Shows the release that would be added.
options:
  state:
    description:
      - V(fetched) only brings the source archive to the cache of the controller. It returns C(path).
      - V(present) builds and installs.
      - V(packed) packs the installed release for other hosts. It returns C(path).
    type: str
    choices: [fetched, packed, present]
    default: present
  release:
    description: The release as the plan holds it.
    type: dict
    required: true
  build:
    description: This host's build as the plan holds it.
    type: dict
  prefix:
    description: Folder of the installation.
    type: path
  cache:
    description: Folder for sources and builds, kept from run to run.
    type: path
  archive:
    description: The source archive on the host. The action plugin fetches it and copies it there.
    type: path
  received:
    description: A release on the host that another host of its kind has packed. The action plugin copies it there.
    type: path
  share:
    description: Whether other hosts are to get this host's release. It is then packed and kept in the controller's cache.
    type: bool
    default: false
  built_by:
    description: Host whose release is to be installed instead of building one. That host has shared it before.
    type: str
  account:
    description: Account that builds. Without it the connecting user builds.
    type: str
"""

EXAMPLES = r"""
- name: Build the planned release
  llamacpp.cluster.release:
    release: "{{ llama_planned.plan.release }}"
    build: "{{ llama_build_plan.builds[0] }}"
    prefix: "{{ llama_build_plan.prefix }}"
    cache: "{{ llama_build_plan.cache }}"
"""

RETURN = r"""
manifest:
  description: What was installed, with a hash for each file and the capabilities that its programs report.
  returned: when the release is installed
  type: dict
  sample: {"id": "pypi-0.3.36-cpu-1f2e3d4c", "seconds": 262, "files": {"bin/llama-server": "8f1c..."}}
path:
  description: The archive in the controller's cache, or the packed release on the host.
  returned: when O(state=fetched) or O(state=packed)
  type: str
  sample: /home/user/.cache/llamacpp/sources/832db0699007f1be.tar.gz
"""

import os
import subprocess
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils import building


def install(params):
    """The manifest of what was installed, or None where the controller has yet to bring what is needed."""
    build, release = params["build"], params["release"]
    installer = building.Installer(params["prefix"], build, params["account"])
    if release["source"] == "package":
        return installer.link({key: release[key] for key in ("source", "version")})
    if params["received"]:
        return installer.receive(params["received"])
    if not params["archive"]:
        return None
    source = {
        "archive": params["archive"],
        "sha256": release["checksum"].split(":", 1)[1],
        "member": release["member"],
        "commit": release["commit"],
        "number": release["build"],
    }
    return building.Builder(params["prefix"], params["cache"], build, source, params["account"]).install()


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["fetched", "packed", "present"], "default": "present"},
            "release": {"type": "dict", "required": True},
            "build": {"type": "dict"},
            "prefix": {"type": "path"},
            "cache": {"type": "path"},
            "archive": {"type": "path"},
            "received": {"type": "path"},
            "share": {"type": "bool", "default": False},
            "built_by": {"type": "str"},
            "account": {"type": "str"},
        },
        required_if=[("state", state, ("build", "prefix", "cache")) for state in ("present", "packed")],
        supports_check_mode=True,
        no_log=True,
    )
    params = module.params
    build = params["build"]
    os.umask(0o022)
    if params["state"] == "fetched":
        module.fail_json(
            msg="state: fetched is carried out on the controller, by the action plugin llamacpp.cluster.release."
        )
    manifest = building.installed(Path(params["prefix"]) / "releases" / build["id"])
    diff = {"before": "", "after": build["id"] + "\n"}
    try:
        if params["state"] == "packed":
            module.exit_json(changed=False, path=building.pack(params["prefix"], params["cache"], build))
        if manifest:
            module.exit_json(changed=False, manifest=manifest)
        if not module.check_mode:
            manifest = install(params)
    except (building.BuildError, OSError, KeyError, tarfile.TarError, subprocess.SubprocessError) as error:
        module.fail_json(msg=f"Installing {build['id']}: {error}")
    module.exit_json(changed=True, diff=diff, **({"manifest": manifest} if manifest else {}))


if __name__ == "__main__":
    main()
