# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of the files of a model that has several (gguf-split)."""

from __future__ import annotations

import re

FIRST = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.DOTALL)
"""Name of the first one."""
