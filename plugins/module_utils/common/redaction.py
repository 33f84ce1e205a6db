# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Secrets in texts: whether a URL has one, and texts for others without those that are known and what looks like one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from urllib.parse import quote

SECRET_USER = re.compile(r"https?://[^/\s]*@|://[^/@\s:]*:[^/@\s]*@", re.IGNORECASE)
SECRET_ADDRESS = re.compile(
    r"(?:^|=)[^/@:=]{1,255}:[^/]{0,255}@(?:[\w.-]{1,255}|\[[\da-fA-F:.]{2,45}\]):\d{1,5}(?:/|$)"
)
"""``user:password@proxy:3128``, as proxies are given without a scheme. Without a port it may be a name, like ``model:7b@q4``."""
SECRET_PARAMETER = re.compile(
    r"[?&;#](?:[\w.-]*(?:token|secret|password|passwd|passphrase|signature|credential)s?\d*"
    r"|(?:[\w.-]*(?:[_.-]|api|access|account|app|auth|client|private|secret|subscription))?key(?:id)?\d*"
    r"|sig|auth|authorization|bearer|code|jwt|pass|pat|pwd)=",
    re.IGNORECASE,
)
SHORTEST = 4
"""Characters of a known secret: a shorter one is part of many words."""
NUMBER = r"-?\d[\d.e+-]*(?![\w.])"
QUOTE = r"\\?[\"']"
"""Also within JSON."""
PATTERNS = (
    ("private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<secret>[^<].*?)(?:-----END|\Z)", re.DOTALL),
    ("value of Ansible Vault", r"\$ANSIBLE_VAULT;\S+(?P<secret>(?:(?:\s|\\n)+[0-9a-f]{6,80})+)", 0),
    ("Hugging Face token", r"\b(?P<secret>hf_[A-Za-z0-9]{8,})", 0),
    ("password in a URL", r"https?://(?P<secret>[^/@\s\"'<]+)@", re.IGNORECASE),
    ("password in a URL", r"://[^/@:\s\"']*:(?P<secret>[^/@\s\"'<]+)@", 0),
    ("token in a URL", rf"{SECRET_PARAMETER.pattern}(?P<secret>[^&;#\s\"'<]+)", re.IGNORECASE),
    ("API key", r"\bapi_keys?: (?P<secret>\*+\w+)", 0),  # llama-server shows the end of one
    ("API key", r"\bbearer\s+(?P<secret>[\w.~+/=-]{8,})", re.IGNORECASE),
    ("API key", rf"--(?:api-key|hf-token)(?:=|\s+|{QUOTE},\s*{QUOTE})(?P<secret>[^\s\"',<\\]+)", 0),
    ("key of stunnel", r"(?:^|\s|\\n)(?!sha|md5)[\w.@-]{1,64}:(?P<secret>[0-9A-Fa-f]{32,})\b", 0),
    (
        "password, token or key",
        rf"(?:passw(?:or)?d|passphrase|secret|api[_-]?key|[_-]token|[_-]pass)(?:{QUOTE})?\s*[:=]\s*(?:{QUOTE})?"
        rf"(?P<secret>(?!(?:null|true|false)\b|{NUMBER})[^\s\"',;}}<\\]{{4,}})",
        re.IGNORECASE,
    ),
)
"""Kind, expression and flags. No secret begins with «<», as what stands in its place does."""


def has_secret(text: str) -> bool:
    """Whether a URL or an address in a text has a password or a token."""
    if "://" not in text and "@" not in text:
        return False
    words = [word for word in text.split() if "://" in word or "@" in word]
    return any(
        SECRET_USER.search(word) or SECRET_PARAMETER.search(word) if "://" in word else SECRET_ADDRESS.search(word)
        for word in words
    )


def redact(text: str, known: Mapping[str, str] = {}) -> str:
    """The text with ``<removed: KIND>`` in the place of each secret.

    :param known: secret → its kind. It is found as it is, in JSON and in a URL.
    """
    for secret in sorted(known, key=len, reverse=True):
        forms = {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe="")}
        for form in sorted(forms, key=len, reverse=True) if len(secret) >= SHORTEST else ():
            text = text.replace(form, _marker(known[secret]))
    for kind, expression, flags in PATTERNS:

        def mark(found: re.Match[str], kind: str = kind) -> str:
            start, end = (place - found.start() for place in found.span("secret"))
            return found[0][:start] + _marker(kind) + found[0][end:]

        text = re.sub(expression, mark, text, flags=flags)
    return text


def _marker(kind: str) -> str:
    return f"<removed: {kind}>"
