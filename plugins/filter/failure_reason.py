# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Says why a task failed, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DOCUMENTATION = r"""
name: failure_reason
short_description: Says why a task failed, in one line
description:
  - Returns the message of a result. Where a task has a loop, the messages of the items that failed take its place.
  - It ends without a full stop.
  - Returns an empty text where nothing failed, or nothing but what had failed before.
positional: before
options:
  _input:
    description: V(ansible_failed_result), or an empty mapping.
    type: dict
    required: true
  before:
    description: The same at an earlier time. Ansible keeps it after a C(rescue).
    type: dict
    default: {}
author: the llamacpp.cluster contributors
"""

EXAMPLES = r"""
- name: Change something, or say why not
  block:
    - name: Change something
      ansible.builtin.import_tasks: change.yml
  rescue:
    - name: Report what failed
      ansible.builtin.debug:
        msg: "{{ ansible_failed_result | llamacpp.cluster.failure_reason }}"
"""

RETURN = r"""
_value:
  description: The reason, without control characters.
  type: str
"""


def failure_reason(result: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    if not result or result == before:
        return ""
    failed = [item for item in result.get("results") or () if item.get("failed")] or [result]
    reasons = dict.fromkeys(re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", _said(item)).strip() for item in failed)
    return " ".join(filter(None, reasons)).rstrip(".") or "no reason was given"


def _said(item: Mapping[str, Any]) -> str:
    """What a command printed says more than that it failed."""
    message = str(item.get("msg", ""))
    return str(item.get("stderr") or message) if message == "non-zero return code" else message


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"failure_reason": failure_reason}
