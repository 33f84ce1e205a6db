# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Returns the reason for a failed task, in one line."""

import re
from collections.abc import Mapping
from typing import Any

DOCUMENTATION = r"""
name: failure_reason
short_description: Returns the reason why a task failed, in one line
description:
  - Returns the message of a result. For a task with a loop, it returns the messages of the failed items.
  - The message has no full stop at the end.
  - Returns an empty string if nothing failed, or if the result is O(previous).
positional: previous
options:
  _input:
    description: V(ansible_failed_result), or an empty mapping.
    type: dict
    required: true
  previous:
    description: An earlier failed result. Ansible keeps it in V(ansible_failed_result) after a C(rescue), until another task fails.
    type: dict
    default: {}
author: the llamacpp.cluster contributors
"""

EXAMPLES = r"""
- name: Change something, or report the failure
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


def failure_reason(result: Mapping[str, Any], previous_result: Mapping[str, Any] | None = None) -> str:
    if not result or result == previous_result:
        return ""
    failed_results = [item for item in result.get("results") or () if item.get("failed")] or [result]
    reasons = dict.fromkeys(re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", _message(item)).strip() for item in failed_results)
    return " ".join(filter(None, reasons)).rstrip(".") or "no reason given"


def _message(result: Mapping[str, Any]) -> str:
    """Return the message of a result; for a failed command its standard error, which explains more than its exit status."""
    message = str(result.get("msg", ""))
    return str(result.get("stderr") or message) if message == "non-zero return code" else message


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"failure_reason": failure_reason}
