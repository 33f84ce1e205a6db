#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model
short_description: Finds a model and reads its headers, wherever it is
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Takes the variables C(llama_model_…) of the host, finds out which files they name, and reads the headers of all parts from where
    they are, by HTTP range requests where that is a server.
  - It runs as an action plugin on the controller, which needs the Python package C(huggingface_hub) for C(llama_model_huggingface). What the head
    has already is looked up there, and then no server is asked.
attributes:
  check_mode:
    support: full
    description: Changes nothing in either mode.
options:
  state:
    description: V(found) changes nothing.
    type: str
    choices: [found]
    default: found
  prefix:
    description: Where the collection is installed on the host. Without it, the host is not asked what it has of a model that is fetched.
    type: path
  account:
    description: Account that is to read the model when it is served.
    type: str
    default: llamacpp
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
"""

EXAMPLES = r"""
- name: Find the model of llama_model_huggingface, and read its headers
  llamacpp.cluster.model:
    state: found
    prefix: /opt/llamacpp
  register: llama_model_found
"""

RETURN = r"""
summary:
  description: What planning needs of the model, as P(llamacpp.cluster.gguf_info#module) returns it.
  returned: success
  type: dict
  sample: {"architecture": "llama", "layers": 32}
closed:
  description: The folder or file that keeps O(account) from reading the model, if any.
  returned: success
  type: str
files:
  description: Files of the model, of its projector and of its draft model, parts in their order.
  returned: success
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
  returned: success
  type: list
  elements: dict
offered:
  description: Quantisations that the repository of the model has, with their sizes in bytes, where it was asked.
  returned: success
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import models


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["found"], "default": "found"},
            "prefix": {"type": "path"},
            "account": {"type": "str", "default": "llamacpp"},
            "timeout": {"type": "int", "default": 120},
            "folders": {"type": "list", "elements": "path", "default": []},
            "paths": {"type": "list", "elements": "path", "default": []},
            "ollama": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        had = reading.within(
            given["timeout"],
            lambda: models.had(given["folders"], given["paths"], given["ollama"], given["account"]),
        )
    except reading.TooSlowError as error:
        module.fail_json(msg=f"The folder of models {error}: check the disk or network mount that holds it.")
    module.exit_json(changed=False, **had)


if __name__ == "__main__":
    main()
