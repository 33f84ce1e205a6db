#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gguf_info
short_description: Reads what planning needs from the header of a GGUF file
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Reads architecture, layers, heads and the size of each layer from a model's header and checks that the file is complete.
  - Fails when the file is missing, truncated or no GGUF file.
attributes:
  check_mode:
    support: full
    description: Changes nothing in either mode.
options:
  path:
    description: Path of the model on the host. Of a split model, the first part.
    type: path
    required: true
  account:
    description: Account that is to read the model when it is served.
    type: str
    default: llamacpp
"""

EXAMPLES = r"""
- name: Read the model's header
  llamacpp.cluster.gguf_info:
    path: "{{ llama_model_path }}"
  register: llama_model_found
"""

RETURN = r"""
summary:
  description: What planning needs of the model. Sizes are in bytes.
  returned: success
  type: dict
  sample: {"architecture": "llama", "layers": 32, "width": 4096, "context": 8192, "input_bytes": 262144000}
closed:
  description: The folder or file that keeps O(account) from reading the model, if any.
  returned: success
  type: str
  sample: /home/user
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils import gguf, host


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "account": {"type": "str", "default": "llamacpp"},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    remedy = "Name a complete GGUF file on the head."
    try:
        module.exit_json(
            changed=False,
            summary=gguf.summarize(gguf.read_path(path)),
            closed=host.closed_to(module.params["account"], path),
        )
    except gguf.GGUFError as error:
        module.fail_json(msg=f"llama_model_path is {path}, which {error}. {remedy}")
    except FileNotFoundError:
        module.fail_json(msg=f"llama_model_path is {path}, which is not there. {remedy}")
    except OSError as error:
        module.fail_json(msg=f"llama_model_path is {path}, which cannot be read: {error.strerror}. {remedy}")


if __name__ == "__main__":
    main()
