# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The exception of planning for input that has no plan."""

from __future__ import annotations


class Refusal(ValueError):
    """The message names the variable, its value and what to do."""
