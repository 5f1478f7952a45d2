"""URLs of engines in messages, which must not show their secrets."""

import re


def masked_url(url: str) -> str:
    """Remove everything that may be secret from a URL, also a malformed one, for messages."""
    begin = re.match(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//", url)
    scheme = begin[0] if begin else ""
    rest = url.removeprefix(scheme)
    user, at, after = rest.rpartition("@")
    if "?" in user:  # of a password, or of options that have the "@"
        after = ""
    return f"{scheme}{'***' + at if at else ''}{after.partition('?')[0]}"
