# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Units of memory, and of files. rpc.py has its own, since the launcher is installed with that file alone."""

MIB = 1024 * 1024
GB, MB = 1_000_000_000, 1_000_000


def amount(size: int) -> str:
    """Bytes for a person: «1.2 GB», «80 MB»."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / MB:.0f} MB"
