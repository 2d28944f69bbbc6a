"""A21: which URLs, hosts and addresses may be dialled."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from ficc.controller.sources.addresses import (
    URL_CHARACTERS_MAX,
    Target,
    Walls,
    check_addresses,
    check_url,
    host_name,
    is_public,
    redirected,
)
from ficc.domain.errors import Refused
from ficc.settings import Acquisition

OPEN = Walls()
HOUSE = Walls(allowed_networks=(ip_network("10.1.0.0/16"), ip_network("fd00:1::/32")))
LISTED = Walls.of(
    Acquisition(allowed_hosts=("Hub.Example", "*.cdn.example", ".mirror.example", "bücher.example"))
)
SECRET = "signature-8f3a"


def test_a8_how_little_a_source_may_send_is_as_the_settings_say() -> None:
    walls = Walls.of(Acquisition(stall_seconds=7, bytes_per_second_min=5))
    assert (walls.stall_seconds, walls.bytes_per_second_min) == (7, 5)
    assert Walls.of(Acquisition()).bytes_per_second_min == 1024


def refusal(url: str, walls: Walls = OPEN) -> Refused:
    with pytest.raises(Refused) as refused:
        check_url(url, walls)
    assert refused.value.code == "source_refused"
    return refused.value


# URLs.


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://hub.example/a/b.gguf", Target("hub.example", 443, "/a/b.gguf", "")),
        ("HTTPS://Hub.EXAMPLE:443/a%20b?x=1&y=%2F", Target("hub.example", 443, "/a%20b", "x=1&y=%2F")),
        ("https://hub.example", Target("hub.example", 443, "/", "")),
        ("https://hub.example?x", Target("hub.example", 443, "/", "x")),
        ("https://hub.example//double", Target("hub.example", 443, "//double", "")),
        ("https://bücher.example/a", Target("xn--bcher-kva.example", 443, "/a", "")),
        ("https://xn--bcher-kva.example/a", Target("xn--bcher-kva.example", 443, "/a", "")),
        ("https://bucket_1.s3.example/a", Target("bucket_1.s3.example", 443, "/a", "")),
    ],
)
def test_a21_plain_urls_pass(url: str, expected: Target) -> None:
    assert check_url(url, OPEN) == expected


@pytest.mark.parametrize(
    "url",
    [
        "http://hub.example/a", "ftp://hub.example/a", "file:///etc/passwd", "//hub.example/a", "hub.example/a",
        "", "https:", "https://", "https:///a", "https:/hub.example/a", "https://:443/a",
        "https://user@hub.example/a", "https://user:pass@hub.example/a", "https://:@hub.example/a",
        "https://@hub.example/a", "https://hub.example/a#part", "https://hub.example/a#",
        "https://hub.example:80/a", "https://hub.example:8443/a", "https://hub.example:0/a",
        "https://hub.example:65536/a", "https://hub.example:x/a", "https://hub.example:-1/a",
        "https://93.184.215.14/a", "https://[2606:4700::1111]/a", "https://127.0.0.1/a", "https://[::1]/a",
        "https://[::ffff:127.0.0.1]/a", "https://[fe80::1%25eth0]/a", "https://[fe80::1%eth0]/a",
        "https://127.1/a", "https://2130706433/a", "https://0x7f000001/a", "https://0177.0.0.1/a",
        "https://0x7f.1/a", "https://hub.1/a", "https://hub.0x/a", "https://１２７.0.0.1/a", "https://127。0。0。1/a",
        "https://hub.example./a", "https://.hub.example/a", "https://hub..example/a", "https://-hub.example/a",
        "https://hub-.example/a", "https://hub%2eexample/a", "https://hub example/a", "https://hub.example/a b",
        "https://hub.example\\@elsewhere.example/a", "https://hub.example\t/a", "https://hub.example/a\n",
        "https://hub.example/ä", "https://xn--.example/a", "https://xn--a.example/a", "https://hub!.example/a",
        "https://" + "a" * 64 + ".example/", "https://" + "a." * 127 + "example/",
        "https://hub.example/" + "a" * URL_CHARACTERS_MAX,
    ],
)  # fmt: skip
def test_a21_anything_else_is_refused(url: str) -> None:
    refusal(url)


@pytest.mark.parametrize(
    "url",
    [f"https://hub.example:8443/{SECRET}?{SECRET}", f"http://hub.example/{SECRET}?x={SECRET}",
     f"https://{SECRET}:{SECRET}@hub.example/a", f"https://hub.example/a#{SECRET}", f"https://10.0.0.1/{SECRET}",
     f"https://hub.example/ä{SECRET}", f"https://hub.example/ {SECRET}", f"https://hub.example:{SECRET}/"],
)  # fmt: skip
def test_a20_a_refusal_shows_no_more_than_the_host(url: str) -> None:
    refused = refusal(url)
    assert SECRET not in f"{refused} {refused!r} {refused.__cause__!r}"


def test_a20_a_target_shows_no_more_than_its_host() -> None:
    target = check_url(f"https://hub.example/{SECRET}?{SECRET}", OPEN)
    assert SECRET not in f"{target} {target!r} {target.name} {target.authority}"
    assert target.name == "https://hub.example"


def test_a21_inside_an_allowed_network_addresses_and_ports_are_free() -> None:
    assert check_url("https://10.1.2.3:8443/a", HOUSE) == Target("10.1.2.3", 8443, "/a", "")
    assert check_url("https://[FD00:1:0::5]:8443/a", HOUSE).authority == "[fd00:1::5]:8443"
    assert (
        check_url("https://mirror.house:8443/a", HOUSE).port == 8443
    )  # its addresses are still to be checked
    refusal("https://10.2.0.1/a", HOUSE)
    refusal("https://[::ffff:10.1.2.3]/a", HOUSE)


# Hosts.


@pytest.mark.parametrize(
    "host",
    ["hub.example", "a.hub.example", "A.B.HUB.example", "cdn.example", "x.cdn.example", "mirror.example",
     "xn--bcher-kva.example", "www.bücher.example"],
)  # fmt: skip
def test_a21_listed_hosts_and_what_lies_below_them_pass(host: str) -> None:
    assert check_url(f"https://{host}/a", LISTED).host == host_name(host)


@pytest.mark.parametrize(
    "host",
    ["evilhub.example", "hub.example.evil.test", "example", "hub", "hub.example-x.test", "hubXexample.test"],
)
def test_a21_other_hosts_do_not(host: str) -> None:
    assert "allowed_hosts" in refusal(f"https://{host}/a", LISTED).message


def test_a21_an_address_is_below_nothing() -> None:
    walls = Walls(allowed_hosts=("10.1.2.3", "2.9"), allowed_networks=HOUSE.allowed_networks)
    assert check_url("https://10.1.2.3/a", walls).host == "10.1.2.3"
    refusal("https://10.1.2.9/a", walls)


def test_a_list_with_something_else_than_hosts_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        Walls.of(Acquisition(allowed_hosts=("https://hub.example",)))


# Addresses.


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1", "93.184.215.14", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0", "192.0.3.0",
        "198.17.255.255", "198.20.0.0", "223.255.255.255", "2606:4700:4700::1111", "2a00:1450::1", "2001:4860::8888",
        "2620:1ec::1", "64:ff9b::101:101",
    ],
)  # fmt: skip
def test_a21_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.254",
        "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.1.1",
        "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1",
        "255.255.255.255",
        "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:1.1.1.1", "64:ff9b::7f00:1",
        "64:ff9b::a00:1", "64:ff9b:1::1", "100::1", "2001::1", "2001:0:a00:1::", "2001:2::1", "2001:10::1",
        "2001:20::1", "2001:db8::1", "2002:7f00:1::", "2002:a00:1::1", "2002:101:101::1", "3fff::1", "5f00::1",
        "fc00::1", "fd12:3456::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1", "4000::1",
    ],
)  # fmt: skip
def test_a21_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))
    with pytest.raises(Refused, match="source_refused"):
        check_addresses("hub.example", 443, ["1.1.1.1", address], OPEN)


def test_a21_public_addresses_pass_on_the_port_of_https_only() -> None:
    addresses = ["1.1.1.1", "2606:4700:4700::1111"]
    assert check_addresses("hub.example", 443, addresses, OPEN) == [ip_address(a) for a in addresses]
    with pytest.raises(Refused, match="port 8443"):
        check_addresses("hub.example", 8443, addresses, HOUSE)


def test_a21_an_allowed_network_frees_the_port_when_every_address_is_in_it() -> None:
    assert check_addresses("mirror.house", 8443, ["10.1.0.1", "fd00:1::2"], HOUSE)
    assert check_addresses("mirror.house", 443, ["10.1.0.1", "1.1.1.1"], HOUSE)
    with pytest.raises(Refused, match="port 8443"):
        check_addresses("mirror.house", 8443, ["10.1.0.1", "1.1.1.1"], HOUSE)
    with pytest.raises(Refused, match="not public"):
        check_addresses("mirror.house", 8443, ["10.1.0.1", "10.2.0.1"], HOUSE)


def test_a_host_without_an_address_is_unavailable() -> None:
    with pytest.raises(Refused, match="source_unavailable"):
        check_addresses("hub.example", 443, [], OPEN)


# Redirects.


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/b?x=1", ("hub.example", "/b", "x=1")),
        ("b", ("hub.example", "/dir/b", "")),
        ("../b", ("hub.example", "/b", "")),
        ("?y=2", ("hub.example", "/dir/a", "y=2")),
        ("//cdn.example/b", ("cdn.example", "/b", "")),
        ("https://cdn.example/b%2Fc?sig=%2B/", ("cdn.example", "/b%2Fc", "sig=%2B/")),
    ],
)
def test_a_redirect_is_read_relative_to_where_it_came_from(
    location: str, expected: tuple[str, str, str]
) -> None:
    target = redirected(Target("hub.example", 443, "/dir/a", "x=0"), location, OPEN)
    assert (target.host, target.path, target.query) == expected


@pytest.mark.parametrize(
    "location",
    ["http://cdn.example/b", "https://user@cdn.example/b", "https://cdn.example:8443/b", "https://10.0.0.1/b",
     "//127.0.0.1/b", "https://[::1]/b", "https://[bad/b", "/b#part", "/b c", "\\\\cdn.example/b", "ht\ttp://x/",
     "javascript:x", "/" + "b" * URL_CHARACTERS_MAX],
)  # fmt: skip
def test_a21_a_redirect_passes_the_same_walls(location: str) -> None:
    with pytest.raises(Refused, match="source_refused"):
        redirected(Target("hub.example", 443, "/dir/a", ""), location, OPEN)


def test_a21_the_list_of_hosts_holds_for_redirects() -> None:
    start = Target("hub.example", 443, "/a", "")
    assert redirected(start, "https://eu.cdn.example/b", LISTED).host == "eu.cdn.example"
    with pytest.raises(Refused, match="allowed_hosts"):
        redirected(start, "https://elsewhere.example/b", LISTED)
