#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: known_answer
short_description: Writes a model whose right answer is known to the host
description:
  - Writes the known-answer model on the controller and copies it to the host, with its sha256 in a file beside it.
  - It runs as an action plugin.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
options:
  path:
    description: The model's path on the host.
    type: str
    required: true
  layers:
    description: Number of layers.
    type: int
    required: true
  width:
    description: Width, a multiple of 64.
    type: int
    required: true
  type:
    description: Type of the matrices.
    type: str
    choices: [f32, f16, q8_0]
    required: true
seealso:
  - module: llamacpp.cluster.model
  - module: llamacpp.cluster.verify
"""

EXAMPLES = r"""
- name: Put the known-answer model on the head
  llamacpp.cluster.known_answer:
    path: /opt/llamacpp/models/known-answer-16x128-f32.gguf
    layers: 16
    width: 128
    type: f32
"""

RETURN = r"""
sentence:
  description: What the model answers to an empty prompt.
  returned: always
  type: str
"""
