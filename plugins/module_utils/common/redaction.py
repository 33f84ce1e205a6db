# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find and remove secrets in texts: known secrets, and texts that look like secrets."""

from __future__ import annotations

import base64
import functools
import html
import json
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote, quote_plus

LOGIN_PATTERN = re.compile(r"https?://[^/\s]*@|://[^/@\s:]*:[^/@\s]*@", re.IGNORECASE)
PROXY_PATTERN = re.compile(r"(?:^|=)[^/@:=]{1,255}:[^/]{0,255}@(?:[\w.-]{1,255}|\[[\da-fA-F:.]{2,45}\]):\d{1,5}(?:/|$)")
"""Pattern for a proxy without a scheme, ``user:password@proxy:3128``. A text without a port may be a name, like ``model:7b@q4``."""
PARAMETER_PATTERN = re.compile(
    r"[?&;#](?:[\w.-]*(?:token|secret|password|passwd|passphrase|signature|credential)s?\d*"
    r"|(?:[\w.-]*(?:[_.-]|api|access|account|app|auth|client|private|secret|subscription))?key(?:id)?\d*"
    r"|sig|auth|authorization|bearer|code|jwt|pass|pat|pwd)=",
    re.IGNORECASE,
)
MIN_SECRET_LENGTH = 4
"""Minimum length of a known secret: a shorter text occurs in many words."""
SECRET_NAME_PATTERN = re.compile(
    r"passw(?:or)?d|passphrase|secret|vault|credential|webhook|authorization|cookie|psk|jwt|(?:db|user)pass"
    r"|(?:private|preshared|access|api|auth|client|encryption|signing|ssh)[_-]?keys?|(?-i:[A-Z0-9]_KEYS?(?![A-Za-z]))"
    r"|(?:auth|access|api|hf|refresh|session)token(?![a-z])"
    r"|(?:^|(?<=[\W_]))(?:pass|pwd|auth|pin(?!\w)|token)(?![a-z])",
    re.IGNORECASE,
)
"""Pattern for the name of a secret."""
NOT_SECRET_PATTERN = r"(?![\w-]{0,99}[_-](?:file|path)(?![\w-]))(?!(?<=token)[\"'\\]*\s*[:=]\s*-?\d[\d.e+-]*(?![\w.]))"
"""Lookaheads that exclude file names and token counts."""
REST_OF_LINE_PATTERN = r"(?P<secret>(?!(?:null|true|false)\b|<removed: )[^\s\"'\\](?:(?!\\n)[^\n])*)"
"""Pattern for the rest of a line with any quoting, without a leading quote."""
SECRET_PATTERNS = (
    ("private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<secret>[^<].*?)(?:-----END|\Z)", re.DOTALL),
    ("Ansible Vault value", r"\$ANSIBLE_VAULT;\S{1,99}(?P<secret>(?:(?:\s|\\n)+[0-9a-f]{6,80})+)", 0),
    ("token", r"\b(?P<secret>(?:hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|sk-|AKIA|eyJ)[\w.-]{8,})", 0),
    ("token in a URL", rf"{PARAMETER_PATTERN.pattern}(?P<secret>[^&;#\s\"'<]+)", re.IGNORECASE),
    ("stunnel key", r"(?:^|\s|\\n)(?!sha|md5)[\w.@-]{1,64}:(?P<secret>[0-9A-Fa-f]{32,})\b", 0),
    (
        "password, token or key",
        rf"(?:{SECRET_NAME_PATTERN.pattern}){NOT_SECRET_PATTERN}[\w.-]{{0,99}}[\"'\\]*\s*[:=][\s\"'\\]*{REST_OF_LINE_PATTERN}",
        re.IGNORECASE,
    ),
    (
        "password, token or key",
        rf"--[\w-]{{0,60}}(?:key|token|pass(?:word|phrase)?|secret)[\"'\\]*[\s,][\s\"'\\]*{REST_OF_LINE_PATTERN}",
        re.IGNORECASE,
    ),
    ("API key", r"\b(?:bearer|basic(?=\s+[A-Za-z+/]*(?-i:[A-Z0-9=])))\s+(?P<secret>[\w.~+/=-]{8,})", re.IGNORECASE),
)
"""Kind, expression and flags of each pattern. No expression matches a marker."""
URL_PATTERN = re.compile(
    r"(?P<scheme>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,20}:(?:\\?/){2})(?P<user>[^\s/\"'<>\\]*@)?(?P<host>[^\s/?#\"'<>@\\]*)(?P<path>[^\s?#\"'<>]*)(?P<query>[^\s\"'<>]*)",
    re.IGNORECASE,
)
PUBLIC_HOST_PATTERN = re.compile(
    r"(?:[\w-]+\.)*(?:github\.com|huggingface\.co|hf\.co|modelscope\.cn|pypi\.org|pythonhosted\.org|debian\.org|ubuntu\.com)|",
    re.ASCII,
)
"""Hosts with public paths, and the empty host. On other hosts a path may be a secret webhook."""


def has_secret(text: str) -> bool:
    """Return whether a URL or an address in a text contains a password or a token."""
    if "://" not in text and "@" not in text:
        return False
    words = [word for word in text.split() if "://" in word or "@" in word]
    return any(
        LOGIN_PATTERN.search(word) or PARAMETER_PATTERN.search(word) if "://" in word else PROXY_PATTERN.search(word)
        for word in words
    )


def redact(text: str, secrets: Mapping[str, str] = {}) -> str:
    """Return the text with ``<removed: KIND>`` instead of each secret.

    :param secrets: secret → its kind. A secret is also found if it is quoted for shells, service managers, JSON, HTML or URLs, or encoded in base64.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_LENGTH:
            for form in _sorted_forms(secret):
                text = text.replace(form, marker(secrets[secret]))
    text = URL_PATTERN.sub(_redact_url, text)
    for kind, pattern, flags in SECRET_PATTERNS:

        def replace_secret(match: re.Match[str], kind: str = kind) -> str:
            start, end = (position - match.start() for position in match.span("secret"))
            return match[0][:start] + marker(kind) + match[0][end:]

        text = re.sub(pattern, replace_secret, text, flags=flags)
    return text


def marker(kind: str) -> str:
    return f"<removed: {kind}>"


def _redact_url(match: re.Match[str]) -> str:
    """Return a URL with its scheme and host, and with its path if the host is public."""
    url = match["scheme"] + match["host"]
    if match["user"] or not PUBLIC_HOST_PATTERN.fullmatch(match["host"]):
        return url + marker("remainder of a URL") * bool(match["user"] or match["path"].strip("/\\") or match["query"])
    query = match["query"] if match["query"].startswith("#") else marker("remainder of a URL") * bool(match["query"])
    return url + match["path"] + query


@functools.cache
def _sorted_forms(secret: str) -> tuple[str, ...]:
    return tuple(sorted({*_quoted_forms(secret)}, key=len, reverse=True))


def _quoted_forms(secret: str) -> Iterator[str]:
    """Yield a secret in every quoted and encoded form."""
    data = secret.encode("utf-8", "surrogateescape")
    url_forms = [quote(data, safe=safe_characters) for safe_characters in ("", "/")] + [quote_plus(data)]
    yield from [re.sub("%..", lambda match: match[0].lower(), form) for form in url_forms]
    quotes = [secret.replace("'", escape) for escape in ("'\"'\"'", "'\\''")] + [re.sub(r"([^\w\n])", r"\\\1", secret)]
    forms = [secret, repr(secret)[1:-1], *quotes, *url_forms, html.escape(secret), html.escape(secret, quote=False)]
    percent_forms = [form.replace("%", "%%") for form in forms]
    for form in {*forms, *percent_forms, *(form.replace("$", "$$") for form in percent_forms)}:
        yield form
        for text in (json.dumps(form, ensure_ascii=False)[1:-1], json.dumps(form)[1:-1]):
            yield from (text, json.dumps(text)[1:-1])
    yield from (data.hex(), "".join(f"\\x{byte:02x}" if byte < 33 or byte > 126 else chr(byte) for byte in data))
    for offset in range(3):  # position within a group of three bytes
        base64_text = base64.b64encode(bytes(offset) + data).decode()[(0, 2, 3)[offset] : (offset + len(data)) * 8 // 6]
        yield from (base64_text, base64_text.replace("+", "-").replace("/", "_"))
