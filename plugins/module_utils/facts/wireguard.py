# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host has for WireGuard: the kernel's module, and the key of the cluster's interface, of which nobody else gets to know more than the public one."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of

PRIME = 2**255 - 19
BASE = 9


def key_file(root: Path = ROOT) -> Path:
    """With the private key, which only root reads. It outlives plans without WireGuard, so that going back to one with it works."""
    return root / f"etc/wireguard-{names.ROOT}.key"


def of_host(root: Path = ROOT, ask: Ask = output) -> dict[str, Any]:
    """``in_kernel`` and ``public_key``, None without a key that this account reads."""
    loaded = (root / "sys/module/wireguard").exists()
    return {
        "in_kernel": loaded or bool(ask(["modprobe", "--show-depends", "wireguard"])),
        "public_key": public_key(key_of(root)),
    }


def key_of(root: Path = ROOT) -> str:
    """The private key; nothing where there is none, or the file holds something else, or others may read it."""
    file = key_file(root)
    text = text_of(file).strip()
    return text if public_key(text) and not file.stat().st_mode & 0o077 else ""


def public_key(private: str) -> str | None:
    """As ``wg pubkey`` prints it (X25519 of RFC 7748), which needs a package that nothing else needs; None of what is no key.

    :param private: 32 bytes in base64.
    """
    try:
        raw = base64.b64decode(private, validate=True)
    except ValueError:
        return None
    if len(raw) != 32:
        return None
    scalar = int.from_bytes(raw, "little") & ~7 & (1 << 254) - 1 | 1 << 254
    near, far = (1, 0), (BASE, 1)
    for bit in range(254, -1, -1):
        is_set = scalar >> bit & 1
        if is_set:
            near, far = far, near
        near, far = _step(*near, *far)
        if is_set:
            near, far = far, near
    return base64.b64encode((near[0] * pow(near[1], PRIME - 2, PRIME) % PRIME).to_bytes(32, "little")).decode()


def _step(x2: int, z2: int, x3: int, z3: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the ladder: two points, x/z each, doubled and added."""
    a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
    aa, bb, da, cb = a * a, b * b, d * a, c * b
    e = aa - bb
    doubled = aa * bb % PRIME, e * (aa + 121665 * e) % PRIME
    return doubled, ((da + cb) ** 2 % PRIME, BASE * (da - cb) ** 2 % PRIME)
