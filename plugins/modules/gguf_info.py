#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gguf_info
short_description: Reads what planning needs from the header of a GGUF file
description:
  - Reads architecture, parameters, layers, heads, quantisation and the size of each layer from a model's header and checks that
    the file is complete.
  - Reads the header alone of a model that is still on a web server, by HTTP range requests. Proxies are those of the environment.
  - Fails when the file is missing, truncated or not a GGUF file.
extends_documentation_fragment: llamacpp.cluster.attributes.info
options:
  path:
    description: Path of the model on the host. Of a split model, the first part.
    type: path
  url:
    description: URL of the model, C(http) or C(https). Of a split model, the first part; the others have to be beside it.
    type: str
  token:
    description:
      - Token for a model that is not given to everybody.
      - It is sent to the server of O(url), not to where that redirects.
    type: str
  timeout:
    description: Seconds that reading may take, from O(url) or from the disk or network mount of O(path).
    type: int
    default: 60
  account:
    description: Account that is to read the model when it is served.
    type: str
    default: llamacpp
seealso:
  - module: llamacpp.cluster.model_info
  - module: llamacpp.cluster.plan
"""

EXAMPLES = r"""
- name: Read the model's header
  llamacpp.cluster.gguf_info:
    path: "{{ llama_model_path }}"
  register: __llama_model_found

- name: Read the header of a model that is not downloaded yet
  llamacpp.cluster.gguf_info:
    url: https://models.example.org/some-model-00001-of-00003.gguf
  delegate_to: localhost
"""

RETURN = r"""
summary:
  description:
    - What planning needs of the model. Sizes are in bytes.
    - C(quantisation) is what the file names, else the type of most of its bytes. C(parameters) is the number of elements
      of all tensors. C(files) has C(name) and C(bytes) of each file, C(bytes) is their sum.
    - C(tensors) has one row for those that differ only in the layer (C(*) in its name), with C(bytes) of one of them. C(layers) is null outside
      the layers.
  returned: success
  type: dict
  sample:
    architecture: llama
    parameters: 8030261312
    quantisation: Q4_K_M
    layers: 32
    width: 4096
    context: 8192
    input_bytes: 295501824
    files: [{"name": "some-model.gguf", "bytes": 4920734272}]
    bytes: 4920734272
closed:
  description: The folder or file that keeps O(account) from reading the model, if any.
  returned: when O(path) is given
  type: str
  sample: /home/user
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web


def from_url(module):
    url, timeout = module.params["url"], module.params["timeout"]
    named = f"url is {web.shown(url)}, which"
    try:
        model = reading.within(timeout, lambda: web.read_model([url], module.params["token"]))
        module.exit_json(changed=False, summary=header_summary.summarize(model))
    except reading.TooSlowError as error:
        module.fail_json(msg=f"{named} {error}: raise the option timeout, or use another server.")
    except web.RemoteError as error:
        module.fail_json(msg=f"{named} {web.explain(error, 'the option token', module.params['token'])}.")
    except gguf.GGUFError as error:
        module.fail_json(msg=f"{named} {error}. Give the URL of a complete GGUF file.")


def from_path(module):
    path, account = module.params["path"], module.params["account"]
    remedy = "Give the path of a complete GGUF file on the head."

    def read():
        summary = header_summary.summarize(gguf.read_path(path))
        return {"closed": host.closed_to(account, path), "summary": summary}

    try:
        module.exit_json(changed=False, **reading.from_disk(path, read, module.params["timeout"]))
    except gguf.GGUFError as error:
        module.fail_json(msg=f"llama_model_path is {path}, which {error}. {remedy}")
    except FileNotFoundError:
        module.fail_json(msg=f"llama_model_path is {path}, which does not exist. {remedy}")
    except OSError as error:
        module.fail_json(msg=f"llama_model_path is {path}, which cannot be read: {errors.sentence(error)}")
    except Refusal as error:
        module.fail_json(msg=f"llama_model_path: {error}.")


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path"},
            "url": {"type": "str"},
            "token": {"type": "str", "no_log": True},
            "timeout": {"type": "int", "default": 60},
            "account": {"type": "str", "default": "llamacpp"},
        },
        mutually_exclusive=[("path", "url")],
        required_one_of=[("path", "url")],
        supports_check_mode=True,
    )
    if module.params["url"] is not None:
        from_url(module)
    from_path(module)


if __name__ == "__main__":
    main()
