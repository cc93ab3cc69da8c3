"""Which page a browser's request comes from."""

from urllib.parse import urlsplit

from fastapi import Request, status

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.plugins.monitor.authorization import refusal

_JSON = "application/json"
_PORTS = {"http": 80, "https": 443}


def require_own_origin(request: Request) -> None:
    """Refuse requests that another site's page has sent, and those that an HTML form can send.

    :raises HTTPException: the request comes from another origin, or its body isn't JSON
    """
    origins = request.headers.getlist("origin")
    site = request.headers.get("sec-fetch-site")
    if not _is_own(origins, site, request.headers.get("host", "")):
        raise refusal(
            status.HTTP_403_FORBIDDEN,
            "origin",
            f"expected a request of this Airflow's own page, found one of {', '.join(origins) or site or 'nowhere'!r};"
            " if this is Airflow's address behind a proxy, set it as [api] base_url",
        )
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise refusal(
            status.HTTP_415_UNSUPPORTED_MEDIA_TYPE,
            "media_type",
            f"expected a body of type {_JSON}, found another; name it in Content-Type",
        )


def _is_own(origins: list[str], site: str | None, host: str) -> bool:
    # Only browsers send these headers, and no page can change them. Without both, no browser sent the request.
    if site in ("cross-site", "same-site") or len(origins) > 1:
        return False
    if not origins:
        return True
    own = _address(origins[0])
    if own is None:
        return False
    # The browser compares with the address that it knows, which a proxy may have changed in Host.
    return site == "same-origin" or own == _address(conf.get("api", "base_url", fallback="")) or _is_at(own, host)


def _is_at(origin: tuple[str, str, int], host: str) -> bool:
    """Return whether the header Host names an origin; its scheme isn't known behind a proxy that ends TLS."""
    scheme, name, port = origin
    address = _address(f"{scheme}://{host}")
    return address is not None and address[1:] == (name, port)


def _address(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of an address of the web; ``None`` for any other, such as ``null``."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
        return None
    return parts.scheme, parts.hostname, port or _PORTS[parts.scheme]
