"""Find the proxy for the API server in the environment, by the rules of kubectl."""

import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit


def proxy_from_environment(server: str, environment: Mapping[str, str]) -> str | None:
    """Return the proxy for the API server ``server`` from HTTPS_PROXY (or HTTP_PROXY) and NO_PROXY; None: no proxy.

    The rules are those of kubectl (golang.org/x/net/http/httpproxy). NO_PROXY may contain domains, IP addresses and
    CIDR ranges. Names in lower case count, too. Local addresses have no proxy. Raise ValueError for a proxy of another
    kind than HTTP.
    """
    address = urlsplit(server)
    name = f"{address.scheme}_proxy"
    found = environment.get(name.upper()) or environment.get(name)
    excluded = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    port = address.port or {"https": 443, "http": 80}.get(address.scheme)
    if not found or not address.hostname or not _uses_proxy(address.hostname, port, excluded):
        return None
    proxy = found if "://" in found else f"http://{found}"
    if urlsplit(proxy).scheme not in ("http", "https"):
        raise ValueError(
            f"{name.upper()}: found a proxy of the kind {urlsplit(proxy).scheme}; expected http://HOST:PORT. Set the "
            "address of an HTTP proxy, or add the API server to NO_PROXY"
        )
    return proxy


def _uses_proxy(host: str, port: int | None, excluded: str) -> bool:
    """Return True if requests to a host use the proxy. ``excluded``: the value of NO_PROXY."""
    address = _ip_address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return False
    for entry in (item.strip().lower() for item in excluded.split(",")):
        if entry == "*":
            return False
        if "/" in entry:
            with suppress(ValueError):
                if address is not None and address in ipaddress.ip_network(entry, strict=False):
                    return False
            continue
        name, wanted_port = _split_port(entry)
        if not name or wanted_port not in ("", str(port)):
            continue
        if (excluded_address := _ip_address(name)) is not None:
            if excluded_address == address:
                return False
            continue
        domain = name.removeprefix("*").removeprefix(".")
        if host.endswith(f".{domain}") or (host == domain and name == domain):
            return False
    return True


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None


def _split_port(entry: str) -> tuple[str, str]:
    """Split an entry of NO_PROXY into its host and its port; the port is empty without one."""
    host, _, port = entry.rpartition(":")
    return (host, port) if port.isdigit() and _ip_address(entry) is None else (entry, "")
