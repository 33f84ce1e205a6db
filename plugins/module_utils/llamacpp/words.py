# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of forks and backends. What is sent to a host knows them without all that is known of each."""

from __future__ import annotations

MAINLINE = "llama.cpp"
IK_LLAMA = "ik_llama.cpp"
BACKENDS = ("cpu", "vulkan", "hip", "cuda", "metal", "sycl")
"""As the table of backends has them."""
