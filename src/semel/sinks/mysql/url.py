"""The url of a MySql sink: what it says to the client, and what is refused before anything of it is shown."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.errors import ConfigError

URL_REMEDY = (
    "Write it as mysql://user:password@host:3306/database, with %40 for @, %2F for / and %3F for ? in a password."
)
TEXT_OPTIONS = frozenset({"ssl_ca", "ssl_cert", "ssl_key", "ssl_key_password", "unix_socket"})
YES_OR_NO_OPTIONS = frozenset({"ssl_verify_cert", "ssl_verify_identity", "ssl_disabled"})


def settings_of(url: str) -> dict[str, Any]:
    """What the client needs, read from the url. An error does not show it: it may hold a password."""
    try:
        parts = urlsplit(url)
        refuse_torn_url(url, parts.netloc)
        found = {"host": parts.hostname, "port": parts.port or 3306, "user": parts.username, "password": parts.password}
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError("The url of a MySql sink cannot be read.", remedy=URL_REMEDY) from None
    if parts.scheme not in ("mysql", "mariadb") or not parts.hostname or not parts.username:
        raise ConfigError("The url of a MySql sink cannot be read.", remedy=URL_REMEDY)
    unknown = sorted(set(options) - TEXT_OPTIONS - YES_OR_NO_OPTIONS)
    if unknown:
        known = ", ".join(sorted(TEXT_OPTIONS | YES_OR_NO_OPTIONS))
        raise ConfigError(
            f"The url of a MySql sink has unknown options: {', '.join(unknown)}.", remedy=f"Known: {known}."
        )
    settings: dict[str, Any] = {name: value for name, value in options.items() if name in TEXT_OPTIONS}
    settings |= {n: v.lower() in ("1", "true", "yes", "on") for n, v in options.items() if n in YES_OR_NO_OPTIONS}
    if "ssl_ca" in settings:
        # A user who names an authority wants to be sure which server answers.
        settings.setdefault("ssl_verify_cert", True)
    return settings | {
        "host": found["host"],
        "port": found["port"],
        "user": unquote(str(found["user"])),
        # The client would encode a text as Latin-1.
        "password": unquote(str(found["password"] or "")).encode(),
        "database": unquote(parts.path.lstrip("/")) or None,
    }


def refuse_torn_url(url: str, authority: str) -> None:
    """Refuse a url whose password has a bare @, / or ?: part of it would be taken for something else, and be shown."""
    if url.count("@") != 1 or "@" not in authority:
        raise ValueError("a password is torn")


def database_of(url: str) -> str:
    try:
        return unquote(urlsplit(url).path.lstrip("/"))
    except ValueError:
        return ""
