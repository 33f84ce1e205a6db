# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Mesa's configuration says of the memory that graphics share with the host: the files that src/util/xmlconfig.c reads for services."""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

PROGRAMS = ("llama-server", "rpc-server", "ggml-rpc-server")
FILES = ("usr/share/drirc.d/*.conf", "etc/drirc")
"""In the order in which Mesa reads them."""
FOR_SOME = ("executable", "executable_regexp", "sha1", "application_name_match")
"""Attributes that limit a section to some programs."""


def _attributes(tag: str) -> dict[str, str]:
    return dict(re.findall(r"([\w:]+)\s*=\s*[\"']([^\"']*)[\"']", tag))


def _concerns_ours(section: str) -> bool:
    """Whether a section is for all programs, or for one of llama.cpp."""
    attributes = _attributes(section)
    return not set(FOR_SOME) & set(attributes) or attributes.get("executable") in PROGRAMS


def unified_heap(root: Path = Path("/")) -> bool:
    """Whether Mesa's driver for AMD shows llama.cpp all of a memory that is the host's too; the last value counts."""
    value = ""
    for path in (found for pattern in FILES for found in sorted(root.glob(pattern))):
        text = re.sub(r"<!--.*?-->", "", text_of(path), flags=re.DOTALL)
        for section, content in re.findall(r"<application\b([^>]*)>(.*?)</application>", text, re.DOTALL):
            for option in re.findall(r"<option\b([^>]*)>", content) if _concerns_ours(section) else ():
                attributes = _attributes(option)
                value = attributes.get("value", "") if attributes.get("name") == backends.UNIFIED_HEAP else value
    return value == "true"
