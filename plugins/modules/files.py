#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: files
short_description: Writes the files of a host's plan
description:
  - Writes all files in one call. Each file is replaced as a whole, also if its path is a link or another special file.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
attributes:
  diff_mode:
    details: Shows path, mode and a hash of the content, and no content.
options:
  files:
    description:
      - C(files) of the host's part of the plan. Files without C(mode) are ignored. The action plugin replaces C(source) by the content.
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
    """Return path, mode and hash of a file; empty without one."""
    try:
        with reading.open_file(path) as stream:
            return f"{path} {stat.S_IMODE(os.fstat(stream.fileno()).st_mode):04o} {files.sha256_of(stream)}\n"
    except OSError:
        return ""


def write_file(file, check):
    """Return the line of the old file, and that of the new one."""
    old_line, new_line = (
        line_of(file.path),
        f"{file.path} {file.mode} {hashlib.sha256(file.content.encode()).hexdigest()}\n",
    )
    if old_line != new_line and not check:
        files.replace_file(Path(file.path), file.content, int(file.mode, 8))
    return old_line, new_line


def main():
    spec = {"files": {"type": "list", "elements": "dict", "required": True}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True, no_log=True)
    with errors.reported(module):
        file_plans = [typed_json.parse(FilePlan, file) for file in module.params["files"]]
        module.params["files"] = [file.path for file in file_plans]  # what Ansible repeats in the result
        lines = [write_file(file, module.check_mode) for file in file_plans]
    changed_lines = [line for line in lines if line[0] != line[1]]
    old_text, new_text = ("".join(side) for side in zip(*changed_lines)) if changed_lines else ("", "")
    module.exit_json(changed=bool(changed_lines), diff={"before": old_text, "after": new_text})


if __name__ == "__main__":
    main()
