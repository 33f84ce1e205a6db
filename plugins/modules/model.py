#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model
short_description: Fetches the files of a model
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Fetches the files of a model to the host, several at once, by HTTP ranges. A connection that breaks is made again, and goes on where it stopped,
    also in the next run. A file takes its place when its size and its sha256 are right.
  - A file that is whole and recorded is not read again, and no server is asked for it.
  - The download runs in the background of the host. An action plugin of the same name shows how far it is. When ansible-playbook is killed, it goes on, and
    the next run waits for it.
attributes:
  check_mode:
    support: full
    description: Reports what would be fetched, how much, and from where.
  diff_mode:
    support: full
    description: Shows the files that would be added.
options:
  state:
    description:
      - V(fetched) fetches what is missing.
      - V(compared) only reports what is missing.
      - V(held) reports what is there of the first file, for the action plugin.
      - V(received) adds a piece of the first file, which the action plugin has copied to the host.
    type: str
    choices: [compared, fetched, held, received]
    default: fetched
  files:
    description:
      - The files as the plan holds them in C(model.files), each with C(name), C(path), C(url), C(bytes), C(sha256) and C(role). Those without C(url)
        are left alone. A URL that begins with C(file:) is a file of the controller.
    type: list
    elements: dict
    required: true
  folder:
    description: Folder of all models, C(models) below the prefix. It may be a symbolic link; nothing below it may lead out of it.
    type: path
    required: true
  records:
    description:
      - Files C(.source.json), each with C(path) and C(content), beside which the files lie. They are written when all files are whole.
    type: list
    elements: dict
    default: []
  token:
    description: Is sent as a bearer token to the server of the first file, not to others, and not to where it redirects.
    type: str
  token_file:
    description: File on the controller that holds O(token). It is read by the action plugin.
    type: path
  fetched_by:
    description: Whether the host fetches, or the controller, which sends the files on to the host in pieces over Ansible's connection.
    type: str
    choices: [head, controller]
    default: head
  piece:
    description: Path of a piece on the host, its C(offset) in the file and its C(sha256). The action plugin sets it for O(state=received).
    type: dict
  digest:
    description: Whether O(state=held) returns the sha256 of what is there.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Fetch the model's files
  llamacpp.cluster.model:
    state: fetched
    folder: /opt/llamacpp/models
    files:
      - name: some-model.gguf
        path: /opt/llamacpp/models/models.example.org/some-model.gguf
        url: https://models.example.org/some-model.gguf
        bytes: 4920734272
        sha256: 7b064f5842bf9532c91456deda288a1b672397a54fa729aa665952863033557c
        role: model
"""

RETURN = r"""
fetch:
  description: Files that were missing or not yet checked, with how much of each was there, and where it comes from.
  returned: when O(state=compared) or O(state=fetched)
  type: list
  elements: dict
  sample: [{"path": "/opt/llamacpp/models/models.example.org/some-model.gguf", "bytes": 4920734272, "have": 0, "from": "https://models.example.org/some-model.gguf"}]
bytes:
  description: How much is missing of all files.
  returned: when O(state=compared) or O(state=fetched)
  type: int
files:
  description: Path → sha256 of each file.
  returned: when O(state=fetched), not in check mode
  type: dict
held:
  description: How many bytes of the file are there, and their sha256 where O(digest) is true.
  returned: when O(state=held) or O(state=received)
  type: dict
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.apply import fetching
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import failures
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import remote


def missing(files, records, folder):
    """What is to be done, as the module returns it."""
    fetching.check_places(files, folder)
    needs = fetching.compare(files)
    stale = fetching.differences(files, records).records
    rows = [
        {
            "path": str(need.file.path),
            "bytes": need.file.bytes,
            "have": need.have,
            "from": remote.shown(need.file.url),
        }
        for need in needs
    ]
    after = "".join(f"{row['path']} ({row['bytes']} bytes)\n" for row in rows) + "".join(f"{path}\n" for path in stale)
    return {
        "changed": bool(rows or stale),
        "fetch": rows,
        "bytes": sum(row["bytes"] - row["have"] for row in rows),
        "diff": {"before": "", "after": after},
    }


def run(params, check):
    """What the module returns.

    :raises Refusal: it cannot be done.
    """
    folder = Path(params["folder"])
    files = fetching.of_plan(params["files"], params["records"], params["fetched_by"] == "controller")
    if params["state"] == "held":
        return {"changed": False, "held": fetching.held(files[0], folder, params["digest"])._asdict()}
    if params["state"] == "received":
        piece = params["piece"]
        count = fetching.append(files[0], folder, Path(piece["path"]), piece["offset"], piece["sha256"])
        return {"changed": True, "held": {"bytes": count, "sha256": None}}
    result = missing(files, params["records"], folder)
    if check or params["state"] == "compared" or not result["changed"]:
        fetching.check_room(fetching.compare(files), folder)
        return result
    return {**result, "files": fetching.fetch(files, folder, params["records"], params["token"])}


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["compared", "fetched", "held", "received"], "default": "fetched"},
            "files": {"type": "list", "elements": "dict", "required": True},
            "folder": {"type": "path", "required": True},
            "records": {"type": "list", "elements": "dict", "default": []},
            "token": {"type": "str", "no_log": True},
            "token_file": {"type": "path"},
            "fetched_by": {"type": "str", "choices": ["head", "controller"], "default": "head"},
            "piece": {"type": "dict"},
            "digest": {"type": "bool", "default": False},
        },
        required_if=[("state", "received", ("piece",))],
        supports_check_mode=True,
    )
    os.umask(0o022)
    try:
        result = run(module.params, module.check_mode)
    except Refusal as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        said = failures.sentence(error, module.params["folder"])
        module.fail_json(msg=f"{said} What came of the model is kept, and the next run goes on there.")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
