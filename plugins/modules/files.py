#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: files
short_description: Writes the planned files of a host
description:
  - Writes all files in one call. Each file is replaced as a whole, even if its path is a symbolic link or another special file.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
attributes:
  diff_mode:
    details: Shows path, mode and hash of each file, and the text of world-readable files, without secrets.
options:
  files:
    description:
      - C(files) in the host's part of the plan. Files without C(mode) are ignored. The action plugin replaces C(source) with the content.
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    errors,
    files,
    reading,
    redaction,
    typed_json,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan

WORLD_READABLE_MODE = "0644"
MAX_SHOWN_BYTES = 1 << 16


def describe_content(path, mode, digest, content):
    """Return a line with path, mode and hash of a file, and its text if every account may read it."""
    may_show = mode == WORLD_READABLE_MODE and len(content) <= MAX_SHOWN_BYTES and not path.endswith(".py")
    return f"{path} {mode} {digest}\n", redaction.redact(content.decode(errors="replace")) if may_show else ""


def describe_existing_file(path):
    """Return the same description of an existing file; empty if there is no file."""
    try:
        with reading.open_file(path) as stream:
            mode, digest = f"{stat.S_IMODE(os.fstat(stream.fileno()).st_mode):04o}", files.stream_sha256(stream)
            stream.seek(0)
            return describe_content(path, mode, digest, stream.read(MAX_SHOWN_BYTES + 1))
    except OSError:
        return "", ""


def write_file(file, check_mode):
    """Write a file if it differs; return the descriptions of the old file and of the new file."""
    content, old_state = file.content.encode(), describe_existing_file(file.path)
    new_state = describe_content(file.path, file.mode, hashlib.sha256(content).hexdigest(), content)
    if old_state[0] != new_state[0] and not check_mode:
        files.replace_file(Path(file.path), file.content, int(file.mode, 8))
    return old_state, new_state


def main():
    spec = {"files": {"type": "list", "elements": "dict", "required": True}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True, no_log=True)
    with errors.report_errors(module):
        file_plans = [typed_json.parse(FilePlan, file) for file in module.params["files"]]
        module.params["files"] = [file.path for file in file_plans]  # Ansible repeats the parameters in the result
        descriptions = [write_file(file, module.check_mode) for file in file_plans]
    changes = [(old_state, new_state) for old_state, new_state in descriptions if old_state[0] != new_state[0]]
    diff = {side: "".join("".join(change[i]) for change in changes) for i, side in enumerate(("before", "after"))}
    module.exit_json(changed=bool(changes), diff=diff)


if __name__ == "__main__":
    main()
