#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model
short_description: Finds a model, reads its headers, and fetches its files
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Takes the variables C(llama_model_…) of the host, finds out which files they name, and reads the headers of all parts from where
    they are, by HTTP range requests where that is a server.
  - It runs as an action plugin on the controller. What the head has already is looked up there, and then no server is asked.
  - With O(state=fetched) it fetches the files to the host, several at once, by HTTP ranges. A connection that breaks is made again, and goes on where it
    stopped, also in the next run. A file takes its place when its size and its sha256 are right. One that is whole and recorded is not read again, and
    no server is asked for it.
  - The download runs in the background of the host, and the action plugin shows how far it is. When ansible-playbook is killed, the download goes on, and the
    next run waits for it.
extends_documentation_fragment:
  - llamacpp.cluster.attributes
attributes:
  check_mode:
    support: full
    details: Reports what would be fetched, how much, and from where. O(state=found) changes nothing in either mode.
  diff_mode:
    support: full
    details: Shows the files that would be added.
  idempotent:
    support: full
options:
  state:
    description:
      - V(found) changes nothing.
      - V(fetched) fetches what is missing of O(files).
      - V(compared), V(held) and V(received) are what the action plugin asks the host for on the way. They report what is missing, report what is there of the
        first file, and add a piece to it.
    type: str
    choices: [found, compared, fetched, held, received]
    default: found
  prefix:
    description: Where the collection is installed on the host. Without it, the host is not asked what it has of a model that is fetched.
    type: path
  account:
    description: Account that is to read the model when it is served. Without it, that is the one that connects.
    type: str
  timeout:
    description: Seconds that finding and reading may take.
    type: int
    default: 120
  folders:
    description: Folders of the host whose records are read; the action plugin gives them.
    type: list
    elements: path
    default: []
  paths:
    description: Files of the host whose sizes are looked up; the action plugin gives them.
    type: list
    elements: path
    default: []
  ollama:
    description: Models that are looked up in Ollama's folder of the host, as C(HOST/NAMESPACE/NAME:TAG); the action plugin gives them.
    type: list
    elements: str
    default: []
  files:
    description:
      - The files as the plan holds them in C(model.files), each with C(name), C(path), C(url), C(bytes), C(sha256) and C(role). Those without C(url)
        are left alone. A URL that begins with C(file:) is a file of the controller.
    type: list
    elements: dict
    default: []
  folder:
    description: Folder of all models, C(models) below the prefix. It may be a symbolic link, nothing below it may lead out. Not needed for O(state=found).
    type: path
  records:
    description:
      - Files C(.source.json), each with its C(path) and what it is to say, beside which the files lie. They are written when all files are whole.
    type: list
    elements: dict
    default: []
  token_file:
    description: File on the controller with a token, which is sent to the server of the first file, not to others, and not to where it redirects.
    type: path
  token_pipe:
    description: Named pipe that the host makes and reads the token from; the action plugin gives it, so that no file and no argument has the token.
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
seealso:
  - module: llamacpp.cluster.gguf_info
  - module: llamacpp.cluster.known_answer
  - module: llamacpp.cluster.plan
"""

EXAMPLES = r"""
- name: Find the model of llama_model_huggingface, and read its headers
  llamacpp.cluster.model:
    state: found
    prefix: /opt/llamacpp
  register: __llama_model_found

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
summary:
  description: What planning needs of the model, as P(llamacpp.cluster.gguf_info#module) returns it.
  returned: when O(state=found)
  type: dict
  sample: {"architecture": "llama", "layers": 32}
refused:
  description: Why the model cannot be planned with. P(llamacpp.cluster.plan#module) refuses it with this sentence.
  returned: when O(state=found) and there is a reason
  type: str
closed:
  description: The folder or file that keeps O(account) from reading the model, if any.
  returned: when O(state=found)
  type: str
files:
  description: Files of the model, of its projector and of its draft model, parts in their order.
  returned: when O(state=found)
  type: list
  elements: dict
  contains:
    name:
      description: As its source calls it.
      type: str
    path:
      description: On the host, where it is there without being fetched.
      type: str
    url:
      description: Where it is fetched from.
      type: str
    bytes:
      description: Size.
      type: int
    sha256:
      description: As its source says.
      type: str
    role:
      description: V(model), V(mmproj) or V(draft).
      type: str
sources:
  description: For each role, where its files come from (C(source)) and the commit or digest that was found (C(revision)).
  returned: when O(state=found)
  type: list
  elements: dict
further:
  description: Role → what planning needs of the projector and of the draft model, where their headers could be read.
  returned: when O(state=found)
  type: dict
offered:
  description: Quantisations that the repository of the model has, with their sizes in bytes, where it was asked.
  returned: when O(state=found)
  type: list
  elements: dict
fetch:
  description: Files that were missing or not yet checked, with how much of each was there, and where it comes from.
  returned: when O(state=compared) or O(state=fetched)
  type: list
  elements: dict
  sample:
    - path: /opt/llamacpp/models/models.example.org/some-model.gguf
      bytes: 4920734272
      have: 0
      from: https://models.example.org/some-model.gguf
bytes:
  description: How much is missing of all files.
  returned: when O(state=compared) or O(state=fetched)
  type: int
python:
  description: Python of the host, with which the action plugin hands over the token.
  returned: when O(state=compared)
  type: str
digests:
  description: Path → sha256 of each file.
  returned: when O(state=fetched), not in check mode
  type: dict
held:
  description: How many bytes of the file are there, and their sha256 where O(digest) is true.
  returned: when O(state=held) or O(state=received)
  type: dict
"""

import os
import sys
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, downloaded, local, web

SECONDS = {"fetched": 14 * 86400.0, "held": 12 * 3600.0, "received": 3600.0}
"""How long a state may take; another one as long as the option timeout says."""


def missing(files, records, folder):
    """What is to be done, as the module returns it."""
    download.check_places(files, folder)
    needs = downloaded.compare(files)
    stale = downloaded.differences(files, records).records
    rows = [
        {
            "path": str(need.file.path),
            "bytes": need.file.bytes,
            "have": need.have,
            "from": web.shown(need.file.url),
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
    files = downloaded.of_plan(params["files"], params["records"], params["fetched_by"] == "controller")
    if params["state"] == "held":
        return {"changed": False, "held": download.held(files[0], folder, params["digest"])._asdict()}
    if params["state"] == "received":
        piece = params["piece"]
        count = download.append(files[0], folder, Path(piece["path"]), piece["offset"], piece["sha256"])
        return {"changed": True, "held": {"bytes": count, "sha256": None}}
    result = missing(files, params["records"], folder)
    if check or params["state"] == "compared" or not result["changed"]:
        download.check_room(downloaded.compare(files), folder)
        return {**result, "python": sys.executable}
    token = download.take_token(params["token_pipe"]) if params["token_pipe"] else None
    return {**result, "digests": download.fetch(files, folder, params["records"], token)}


def find(module):
    given = module.params
    named = ", ".join([*given["folders"], *given["paths"], *given["ollama"]])
    with errors.reported(module):
        had = reading.from_disk(
            named,
            lambda: local.had(given["folders"], given["paths"], given["ollama"], given["account"]),
            given["timeout"],
        )
    module.exit_json(changed=False, **had)


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["found", "compared", "fetched", "held", "received"],
                "default": "found",
            },
            "prefix": {"type": "path"},
            "account": {"type": "str"},
            "timeout": {"type": "int", "default": 120},
            "folders": {"type": "list", "elements": "path", "default": []},
            "paths": {"type": "list", "elements": "path", "default": []},
            "ollama": {"type": "list", "elements": "str", "default": []},
            "files": {"type": "list", "elements": "dict", "default": []},
            "folder": {"type": "path"},
            "records": {"type": "list", "elements": "dict", "default": []},
            "token_file": {"type": "path"},
            "token_pipe": {"type": "path"},
            "fetched_by": {"type": "str", "choices": ["head", "controller"], "default": "head"},
            "piece": {"type": "dict"},
            "digest": {"type": "bool", "default": False},
        },
        required_if=[
            *(("state", state, ("folder",)) for state in ("compared", "fetched", "held")),
            ("state", "received", ("folder", "piece")),
        ],
        supports_check_mode=True,
    )
    if module.params["state"] == "found":
        find(module)
    os.umask(0o022)
    try:
        seconds = SECONDS.get(module.params["state"], module.params["timeout"])
        result = reading.from_disk(module.params["folder"], lambda: run(module.params, module.check_mode), seconds)
    except Refusal as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        said = errors.sentence(error, module.params["folder"])
        module.fail_json(msg=f"{said} What came of the model is kept, and the next run goes on there.")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
