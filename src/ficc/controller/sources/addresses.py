"""Which addresses may be dialled for a source: the rules, without any IO.

A URL passes when it is https, plain in its parts, and its host is allowed; its host's addresses pass when each
of them is a public one or lies in a network that the operator named. Both are asked on every redirect again.

The list of addresses that are not public is IANA's special-purpose registry, and written out here because the
standard library's own idea of it changes between releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import idna

from ficc.domain.errors import Refused
from ficc.settings import Acquisition

PORT = 443
URL_CHARACTERS_MAX = 8192
"""Room for a signed redirect target."""
HOST_CHARACTERS_MAX = 253
LABEL_CHARACTERS_MAX = 63

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NOT_PUBLIC_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # behind a carrier's translation
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, and where clouds keep their metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_GLOBAL_UNICAST_V6 = IPv6Network(
    "2000::/3"
)  # all that was ever given out; loopback, mapped, private lie outside
_NOT_PUBLIC_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")  # as public as the IPv4 address inside

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Walls:
    """What an operator permits beyond public hosts with https on port 443, and how little a source may send."""

    allowed_hosts: tuple[str, ...] = ()
    """In the form that `host_name` gives; empty: any."""
    allowed_networks: tuple[Network, ...] = ()
    ca_file: Path | None = None
    stall_seconds: float = 30.0
    bytes_per_second_min: int = 0

    @classmethod
    def of(cls, settings: Acquisition) -> Walls:
        """Raises ValueError for an allowed host that is no host name or address."""
        return cls(
            tuple(_listed(host) for host in settings.allowed_hosts),
            tuple(ip_network(network) for network in settings.allowed_networks),
            settings.ca_file,
            settings.stall_seconds,
            settings.bytes_per_second_min,
        )

    def admits_host(self, host: str) -> bool:
        """Whether the list has the host or, on a border of labels, something it lies below."""
        if not self.allowed_hosts:
            return True
        below = () if literal(host) else self.allowed_hosts
        return host in self.allowed_hosts or any(host.endswith("." + listed) for listed in below)

    def admits_network(self, address: Address) -> bool:
        return any(address in network for network in self.allowed_networks)


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be asked, as far as can be told before its host's addresses are known."""

    host: str
    port: int
    path: str
    query: str
    """Path and query, percent-encoded as they came. May be signed: not for logs, errors or the database."""

    def __repr__(self) -> str:
        return f"Target({self.name})"

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def name(self) -> str:
        """All of it that may be shown."""
        return f"https://{self.authority.removesuffix(f':{PORT}')}"


def check_url(url: str, walls: Walls) -> Target:
    """Raises Refused `source_refused`, with no more of the URL in it than its host."""
    _check_characters(url)
    try:
        parts = urlsplit(url)
        port = PORT if parts.port is None else parts.port
        host = host_name(parts.hostname or "")
    except ValueError:
        raise _refused("A source's URL needs a valid host name and port.") from None
    if parts.scheme != "https":
        raise _refused(f"Sources are fetched over https only, not {parts.scheme[:16] or 'without a scheme'}.")
    if parts.username is not None or parts.password is not None:
        raise _refused(f"The URL for {host} has user info; leave it out.")
    if "#" in url:
        raise _refused(f"The URL for {host} has a fragment; leave it out.")
    if not (parts.path + parts.query).isascii():
        raise _refused(f"The URL for {host} has characters that must be percent-encoded.")
    address = literal(host)
    if address is not None and not walls.admits_network(address):
        raise _refused(
            f"{host} is an address; name the host instead, or add its network to acquisition.allowed_networks."
        )
    if not walls.admits_host(host):
        raise _refused(f"{host} is not among acquisition.allowed_hosts.")
    _check_port(host, port, inside=bool(walls.allowed_networks))
    return Target(host, port, parts.path or "/", parts.query)


def redirected(target: Target, location: str, walls: Walls) -> Target:
    """Where a redirect of `target` leads. Raises Refused `source_refused` as `check_url` does."""
    _check_characters(location)  # before joining, which would drop some of them
    query = f"?{target.query}" if target.query else ""
    try:
        url = urljoin(f"https://{target.authority}{target.path}{query}", location)
    except ValueError:
        raise _refused(f"{target.name} redirects to something that is no URL.") from None
    return check_url(url, walls)


def _check_characters(url: str) -> None:
    """Refuse what readers of URLs take in different ways: one would check another host than is dialled."""
    if len(url) > URL_CHARACTERS_MAX:
        raise _refused(f"A source's URL has at most {URL_CHARACTERS_MAX} characters.")
    if not url.isprintable() or any(character in ' \\"<>' for character in url):
        raise _refused("A source's URL has no spaces, control characters, backslashes, quotes, < or >.")


def check_addresses(host: str, port: int, addresses: Iterable[str], walls: Walls) -> list[Address]:
    """The addresses that a host was looked up to, all of them fit to be dialled.

    One bad one among them refuses the host: whoever answers for its name means to send us there.
    Raises Refused `source_refused`, and `source_unavailable` for a host without any address.
    """
    found = [ip_address(address) for address in addresses]
    if not found:
        raise Refused("source_unavailable", f"{host} has no address; check the name, then acquire again.")
    for address in found:
        if not is_public(address) and not walls.admits_network(address):
            raise _refused(
                f"{host} has an address that is not public; a mirror of your own needs its network in "
                "acquisition.allowed_networks."
            )
    _check_port(host, port, inside=all(walls.admits_network(address) for address in found))
    return found


def _check_port(host: str, port: int, *, inside: bool) -> None:
    if port != PORT and not inside:
        raise _refused(
            f"{host} is asked for on port {port}; ports other than {PORT} are for hosts whose addresses all lie in "
            "acquisition.allowed_networks."
        )


def is_public(address: Address) -> bool:
    """Whether an address is one of somebody on the Internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in _GLOBAL_UNICAST_V6 and not any(address in network for network in _NOT_PUBLIC_V6)


def literal(host: str) -> Address | None:
    """The address that a host as `host_name` gives it is, if it is one."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def host_name(text: str) -> str:
    """A host in the one form in which hosts are compared: lower case, IDNA's ASCII form, an address in its
    canonical notation. Raises ValueError, also for numbers that only some readers take for an address."""
    address = literal(text)
    if address is not None:
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            raise ValueError("an address with a zone")
        return str(address)
    host = text.lower() if text.isascii() else idna.encode(text, uts46=True).decode()
    labels = host.split(".")
    if len(host) > HOST_CHARACTERS_MAX or _NUMBER.fullmatch(labels[-1]):
        raise ValueError("not a host name")
    for label in labels:
        if len(label) > LABEL_CHARACTERS_MAX or not _LABEL.fullmatch(label):
            raise ValueError("not a host name")
        if label.startswith("xn--"):
            idna.ulabel(label)
    return host


def _listed(text: str) -> str:
    try:
        return host_name(text.removeprefix("*").removeprefix("."))
    except ValueError:
        raise ValueError(f"acquisition.allowed_hosts: {text!r} is no host name") from None


def _refused(message: str) -> Refused:
    return Refused("source_refused", message)
