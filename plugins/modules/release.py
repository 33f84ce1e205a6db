#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: release
short_description: Builds and installs a release of llama.cpp
description:
  - Fetches the source to the controller, and compiles it on the host. With O(share), other hosts of the same kind then receive the build from the
    controller's cache. Archives of prebuilt binaries are unpacked. If the distribution packages the programs, the release contains symbolic links to them.
  - Before a release is installed, its programs are tested on the host's processor. If a program does not work, the release is not installed, and no
    running service is touched.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
options:
  state:
    description:
      - V(installed) makes sure that the host has the release.
      - V(fetched) makes sure that the source or the archives are in the controller's cache. The host is not contacted.
    type: str
    choices: [installed, fetched]
    default: installed
  release:
    description: The release, from the plan.
    type: dict
    required: true
  build:
    description: This host's build, from the plan.
    type: dict
    required: true
  prefix:
    description: Installation folder.
    type: str
    required: true
  cache:
    description: Folder on the host for sources and builds, which stay there between runs.
    type: str
    required: true
  fetched_source:
    description: Sources or archives that were copied to the host. The action plugin sets this option.
    type: dict
  received:
    description: A packed release from another host of the same kind. The action plugin sets this option.
    type: dict
  share:
    description: Whether other hosts use this host's build. If so, the build is packed and kept in the controller's cache.
    type: bool
    default: false
  pack:
    description: Whether to only pack the installed release for other hosts. The action plugin sets this option.
    type: bool
    default: false
  cluster:
    description: Name of the cluster. The controller caches builds separately for each cluster.
    type: str
  account:
    description: Account that compiles. Defaults to the connecting user.
    type: str
  services:
    description:
      - The host's planned services. If a program's help lacks an option that a service needs, the task fails before any running service is touched.
    type: list
    elements: dict
    default: []
  host_name:
    description: Name of the host for messages.
    type: str
    default: this host
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
  description: Manifest of the installed release, with a hash of each file.
  returned: when the release is installed
  type: dict
option_warnings:
  description:
    - Warnings about planned options of llama-server that the build does not know. The launcher uses another name of the option, or omits an option
      that only affects speed.
  returned: when the release is installed
  type: list
  elements: str
path:
  description: Path of the packed release on the host.
  returned: when O(pack) is true
  type: str
"""

import os
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import builder, manifest, option_check
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds.installer import (
    Installer,
    ReleaseArguments,
    pack,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.options import SERVER


def install(installer, arguments):
    """Install a release, and return its manifest; return None if the controller must copy the release's files first."""
    build, release, source = arguments.build, arguments.release, arguments.fetched_source
    if release.source == "package":
        return installer.link_programs(release)
    if arguments.received:
        return installer.receive(arguments.received)
    if not source:
        return None
    if release.source in ("binary", "prebuilt"):
        return installer.unpack(source, release.build)
    return builder.Builder(arguments.prefix, arguments.cache, build, release, source, arguments.account).install()


def main():
    spec = typed_json.specification(ReleaseArguments)
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True, no_log=True)
    arguments = typed_json.parse(ReleaseArguments, module.params)
    build = arguments.build
    os.umask(0o022)
    installer = Installer(arguments.prefix, build, arguments.account)
    diff = {"before": "", "after": build.id + "\n"}
    is_compiled = arguments.release.source not in ("package", "binary", "prebuilt")
    try:
        if arguments.pack:
            module.exit_json(changed=False, path=pack(arguments.prefix, arguments.cache, build))
        manifest_record = manifest.installed_manifest(installer.release_folder, build.targets, build.trusted_builders)
        is_changed = not manifest_record
        if is_changed and not module.check_mode:
            manifest_record = install(installer, arguments)
        if manifest_record:
            programs_folder = installer.release_folder / "bin"
            help_options = installer.read_help(programs_folder) if arguments.services else {}
            refusals, warnings = option_check.check_options(
                programs_folder, help_options, arguments.services, arguments.release, arguments.host_name
            )
            if refusals:
                raise Refusal(f"{'. '.join(refusals)}. No running service was touched.")
            if not module.check_mode and SERVER in help_options:
                option_check.write_replacements(installer.release_folder, help_options[SERVER], arguments.release.fork)
            if is_changed and manifest_record.page is False and build.ui == "auto" and not is_compiled:
                warnings.append(
                    f"llama-server of {build.id} has no chat page: use a release that the hosts compile, such as source: pypi"
                )
            result = {"manifest": typed_json.dump(manifest_record), "option_warnings": warnings}
            module.exit_json(changed=is_changed, diff=diff if is_changed else {}, **result)
    except (Refusal, subprocess.SubprocessError) as error:
        module.fail_json(msg=f"Installing {build.id}: {error}")
    except OSError as error:
        reason = errors.message_of(error, arguments.prefix, arguments.cache)
        resume_note = " The next run resumes the build." if arguments.fetched_source and is_compiled else ""
        module.fail_json(msg=f"Installing {build.id}: {reason}{resume_note}")
    module.exit_json(changed=True, diff=diff)


if __name__ == "__main__":
    main()
