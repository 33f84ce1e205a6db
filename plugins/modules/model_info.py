#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: model_info
short_description: Finds the files of a model, and reads their headers
description:
  - Determines the files that the host's variables C(llama_model_…) name, and reads the headers of all these files.
  - The action plugin does this on the controller, with HTTP range requests to servers. Models that the host already has are read on the host, without
    contacting a server.
extends_documentation_fragment: llamacpp.cluster.attributes.info
options:
  prefix:
    description: Installation folder on the host. If omitted, the module does not look for earlier downloads of the model on the host.
    type: path
  account:
    description: Account that reads the model when it is served. Defaults to the connecting account.
    type: str
  service_manager:
    description: Service manager of the host. If the service manager cannot pass API and TLS keys to the service, O(account) must be able to read their files.
    type: str
  timeout:
    description: Time limit in seconds for finding and reading the files.
    type: int
    default: 120
  summary_is_enough:
    description: Whether to skip a model for which C(gguf_summary) is set.
    type: bool
    default: false
  folders:
    description: Folders on the host with download records to read. The action plugin sets them.
    type: list
    elements: path
    default: []
  paths:
    description: Models on the host whose headers are read, by the path of their (first) file. The action plugin sets them.
    type: list
    elements: path
    default: []
  ollama:
    description: Models to look up in Ollama's folder on the host, as C(HOST/NAMESPACE/NAME:TAG). The action plugin sets them.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Find the model of llama_model_huggingface, and read its headers
  llamacpp.cluster.model_info:
    prefix: /opt/llamacpp
  register: model
"""

RETURN = r"""
models:
  description: The values below for each model in C(llama_models), by name.
  returned: when C(llama_models) is set
  type: dict
summary:
  description:
    - Summary of the model for planning. Sizes are in bytes.
    - C(quantisation) is the quantisation that the file's header names, otherwise the type of most of its bytes. C(parameters) is the number of elements
      of all tensors. C(files) has C(name) and C(bytes) of each file; the summary's own C(bytes) is the sum.
  returned: when the model can be planned
  type: dict
refused:
  description: Why the model cannot be planned. M(llamacpp.cluster.plan) refuses it with this sentence.
  returned: when the model cannot be planned
  type: str
unreadable_path:
  description: The folder or file that prevents O(account) from reading the model, if any.
  returned: success
  type: str
files:
  description: Files of the model, of its projector and of its draft model, for M(llamacpp.cluster.model).
  returned: success
  type: list
  elements: dict
auxiliary:
  description: Summaries of the projector and of the draft model by role, if their headers could be read.
  returned: success
  type: dict
offered:
  description: Quantisations that the model's repository offers, with their sizes in bytes. Empty unless the repository was contacted.
  returned: success
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import local_models


def main():
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path"},
            "account": {"type": "str"},
            "service_manager": {"type": "str"},
            "timeout": {"type": "int", "default": 120},
            "summary_is_enough": {"type": "bool", "default": False},
            "folders": {"type": "list", "elements": "path", "default": []},
            "paths": {"type": "list", "elements": "path", "default": []},
            "ollama": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    folders, paths, ollama_names = (module.params[name] for name in ("folders", "paths", "ollama"))
    with errors.report_errors(module):
        report = reading.run_disk_work(
            ", ".join([*folders, *paths, *ollama_names]),
            lambda: local_models.report(folders, paths, ollama_names, module.params["account"]),
            module.params["timeout"],
        )
    module.exit_json(changed=False, **report)


if __name__ == "__main__":
    main()
