#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: model
short_description: Delivers the files of a model to a host
description:
  - Downloads files one after another. After a broken connection, the download resumes where it stopped, even in the next run. A file gets its final
    name once its size and SHA-256 are correct. It is then recorded, and neither read nor requested again.
  - curl downloads in the background on the host, and the action plugin shows its progress. If ansible-playbook is killed, the download continues, and
    the next run waits for it.
  - The action plugin copies files from the controller as M(ansible.builtin.copy) does.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
options:
  files:
    description:
      - Files in C(model.files) of the plan that have a C(url). A C(file:) URL names a file on the controller. If a file has no C(sha256), an
        interrupted download starts again from the first byte.
    type: list
    elements: dict
    default: []
  folder:
    description: Folder of all models, C(models) in the installation folder. It may be a symbolic link. Required with O(files).
    type: str
    default: ""
  known_answer:
    description:
      - Size of the known-answer model to write instead of O(files), if the model is missing or was changed. C(layers), C(width) (a multiple of 64)
        and C(type) (V(f32), V(f16) or V(q8_0)).
    type: dict
  path:
    description: Path of the known-answer model on the host.
    type: path
    default: ""
  token_file:
    description: File on the controller with a token for gated models. The token is sent only to the server of the first file in O(files) that is
      downloaded, never to the target of a redirect.
    type: str
  token:
    description: The token; the action plugin reads it from O(token_file).
    type: str
"""

EXAMPLES = r"""
- name: Download the model's files
  llamacpp.cluster.model:
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
  description: Files that were missing or not yet checked, each with C(path), C(bytes) (its size), C(present_bytes) and C(url).
  returned: when O(files) is set
  type: list
  elements: dict
bytes:
  description: Number of missing bytes in all files.
  returned: when O(files) is set
  type: int
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sync
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, model_files, web

CHECK_MODE_LIMIT_SECONDS = 120
DOWNLOAD_LIMIT_SECONDS = 14 * 86400.0


def deliver(arguments, check_mode):
    """Deliver the files, and return the result of the module.

    :raises Refusal: a file cannot be delivered.
    """
    if arguments.known_answer:
        return write_known_answer(Path(arguments.path), arguments.known_answer, check_mode)
    folder, pending_files = Path(arguments.folder), model_files.pending_files(arguments.files)
    downloads = [
        {"path": file.path, "bytes": file.bytes, "present_bytes": kept_bytes, "url": web.printable_url(str(file.url))}
        for file, kept_bytes in pending_files
    ]
    if check_mode:
        download.check_free_space(pending_files, folder)
    elif downloads:
        download.download_files(arguments.files, folder, arguments.token, DOWNLOAD_LIMIT_SECONDS)
    return {
        "changed": bool(downloads),
        "fetch": downloads,
        "bytes": sum((file.bytes or 0) - kept_bytes for file, kept_bytes in pending_files),
        "diff": {"before": "", "after": "".join(f"{row['path']} ({row['bytes']} bytes)\n" for row in downloads)},
    }


def write_known_answer(path, model_size, check_mode):
    """Write a known-answer model if it is missing or has been changed."""
    problem = known_answer.problem(*model_size)
    if problem:
        raise Refusal(f"The known-answer model cannot be generated: {problem}")
    needs_writing = not model_files.is_known_answer(path, known_answer_file.file_bytes(*model_size))
    if needs_writing and not check_mode:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        partial_path = Path(f"{path}.part")
        try:
            known_answer_file.write_model(partial_path, *model_size)
            sync(partial_path)
        except OSError:
            partial_path.unlink(missing_ok=True)
            raise
        partial_path.replace(path)
    return {"changed": needs_writing}


def main():
    specification = typed_json.specification(download.ModelArguments)
    specification["token"]["no_log"] = True
    module = AnsibleModule(argument_spec=specification, supports_check_mode=True)
    os.umask(0o022)
    arguments = typed_json.parse(download.ModelArguments, module.params)
    target_path = arguments.folder or arguments.path
    limit_seconds = CHECK_MODE_LIMIT_SECONDS if module.check_mode else DOWNLOAD_LIMIT_SECONDS
    try:
        result = reading.run_disk_work(target_path, lambda: deliver(arguments, module.check_mode), limit_seconds)
    except Refusal as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        resume_note = "" if arguments.known_answer else " The partial download was kept, and the next run resumes it."
        module.fail_json(msg=errors.message_of(error, target_path) + resume_note)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
