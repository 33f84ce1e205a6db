# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the files of a model and reads its headers: what the host has is asked there, all else on the controller."""

from __future__ import annotations

from ansible.plugins.action import ActionBase


def run(action: ActionBase, task_vars: dict) -> dict:
    raise NotImplementedError
