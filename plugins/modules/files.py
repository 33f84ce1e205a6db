#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: files
short_description: Writes the files of a host's plan
description:
  - Writes all files in one call. Each takes its place whole; what is at a file's path and is no regular file, as a link, is replaced.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
attributes:
  diff_mode:
    details: Shows path, mode and a hash of the content, and no content.
options:
  files:
    description:
      - C(files) of the host's part of the plan. One without C(mode) is left out. An action plugin puts the content in place of a C(source).
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: Write the files of the plan
  llamacpp.cluster.files:
    files: "{{ __llama_host_plan.files }}"
"""

RETURN = r""" # """

import hashlib
import os
import stat
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, files, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan


def line_of(path):
    """Path, mode and hash of a file; empty where there is none."""
    try:
        with reading.open_file(path) as stream:
            return f"{path} {stat.S_IMODE(os.fstat(stream.fileno()).st_mode):04o} {files.sha256_of(stream)}\n"
    except OSError:
        return ""


def write(file, check):
    """The line of what was there, and that of what is there then."""
    before, after = line_of(file.path), f"{file.path} {file.mode} {hashlib.sha256(file.content.encode()).hexdigest()}\n"
    if before != after and not check:
        files.replace_file(Path(file.path), file.content, int(file.mode, 8))
    return before, after


def main():
    spec = {"files": {"type": "list", "elements": "dict", "required": True}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True, no_log=True)
    with errors.reported(module):
        planned = [typed_json.parse(FilePlan, file) for file in module.params["files"]]
        module.params["files"] = [file.path for file in planned]  # what Ansible repeats in the result
        lines = [write(file, module.check_mode) for file in planned]
    changed = [line for line in lines if line[0] != line[1]]
    before, after = ("".join(side) for side in zip(*changed)) if changed else ("", "")
    module.exit_json(changed=bool(changed), diff={"before": before, "after": after})


if __name__ == "__main__":
    main()
