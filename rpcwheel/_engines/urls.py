"""URLs of engines in messages, which must not show their secrets."""


def masked_url(url: str) -> str:
    """Remove everything that may be secret from a URL, also a malformed one, for messages."""
    scheme, slashes, rest = url.partition("//")
    if not slashes:
        scheme, rest = "", url
    user, at, after = rest.rpartition("@")
    if "?" in user:  # of a password, or of options that have the "@"
        after = ""
    return f"{scheme}{slashes}{'***' + at if at else ''}{after.partition('?')[0]}"
