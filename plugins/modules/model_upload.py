#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_upload
short_description: Adds a piece that the controller sent to a file of a model
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - The action plugin of M(llamacpp.cluster.model) sends files of the controller with it. They grow as C(NAME.part) beside their places.
extends_documentation_fragment:
  - llamacpp.cluster.attributes
attributes:
  check_mode:
    support: none
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  path:
    description: Place of the file.
    type: str
    required: true
  bytes:
    description: Size of the whole file.
    type: int
    required: true
  folder:
    description: Folder of all models. Nothing below it may lead out.
    type: path
    required: true
  piece:
    description: What is added.
    type: dict
    required: true
    suboptions:
      path:
        description: Where it lies on the host.
        type: str
        required: true
      offset:
        description: Its place in the file, which has at least so many bytes; those after it are replaced.
        type: int
        required: true
      sha256:
        description: Of the piece.
        type: str
        required: true
seealso:
  - module: llamacpp.cluster.model
"""

EXAMPLES = r"""
- name: Add the first piece
  llamacpp.cluster.model_upload:
    path: /opt/llamacpp/models/some-model/some-model.gguf
    bytes: 4920734272
    folder: /opt/llamacpp/models
    piece:
      path: /tmp/piece
      offset: 0
      sha256: 7b064f5842bf9532c91456deda288a1b672397a54fa729aa665952863033557c
"""

RETURN = r"""
bytes:
  description: How many bytes of the file are there now.
  returned: success
  type: int
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.model_files import ModelFile

SECONDS = 3600


def run(params):
    path, piece = Path(params["path"]), params["piece"]
    record = path.with_name(download_record.RECORD)
    file = ModelFile(path.name, path, "", params["bytes"], None, record, sent=True)
    added = download.Piece(Path(piece["path"]), piece["offset"], piece["sha256"])
    return download.append(file, Path(params["folder"]), added)


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "str", "required": True},
            "bytes": {"type": "int", "required": True},
            "folder": {"type": "path", "required": True},
            "piece": {
                "type": "dict",
                "required": True,
                "options": {
                    "path": {"type": "str", "required": True},
                    "offset": {"type": "int", "required": True},
                    "sha256": {"type": "str", "required": True},
                },
            },
        },
    )
    os.umask(0o022)
    folder = module.params["folder"]
    try:
        count = reading.from_disk(folder, lambda: run(module.params), SECONDS)
    except Refusal as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"{errors.sentence(error, folder)} What was sent before is kept, and the next run continues there."
        )
    module.exit_json(changed=True, bytes=count)


if __name__ == "__main__":
    main()
