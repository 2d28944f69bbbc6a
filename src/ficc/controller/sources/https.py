"""How sources are asked: HTTPS from inside the walls.

What holds of every request, whatever the URL and wherever it is redirected:

- The addresses of a host are looked up once per connection, checked, and these are the ones dialled. There is
  no other way to an address: the connector's resolver is the wall, and no proxy of the environment is used.
- Redirects are followed here, at most `REDIRECTS_MAX`, each target checked as the first URL was. A credential
  goes to the first host and port only; there are no cookies.
- What a target is beyond its scheme and host may be signed. It stands in no error, log or header that leaves
  this module.
- Heads are bounded in bytes, a silent source in seconds, a slow one by its rate, and the body of an error in
  bytes.
- Connections live on an event loop of their own, so that what a source sends delays nobody else.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from ficc import __version__
from ficc.controller.sources.addresses import Target, Walls, check_addresses, check_url, redirected
from ficc.controller.sources.loop_thread import LoopThread
from ficc.domain.errors import Refused
from ficc.domain.fetching import Flow

REDIRECTS_MAX = 5
CONNECT_SECONDS_MAX = 10.0
"""For TCP and TLS, of one address."""
HEAD_LINE_BYTES_MAX = 8190
HEAD_FIELDS_MAX = 96
HEAD_BYTES_MAX = 64 << 10
ERROR_BYTES_MAX = 64 << 10
"""How much is read of a body that is no success."""
READ_BYTES = 256 << 10
"""Reading pauses when twice as much has come that nobody took. More than this was measured to be no faster."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_OURS = frozenset({"authorization", "cookie", "host", "proxy-authorization"})
_UNSHOWN = frozenset({"location", "content-location", "link-template", "refresh", "set-cookie"})

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host, in text. Raises OSError."""


class Https:
    """Connections are kept between requests; `close` ends them."""

    def __init__(self, walls: Walls, *, resolver: Resolver | None = None) -> None:
        """Raises OSError, ssl.SSLError for an `acquisition.ca_file` that cannot be used."""
        self._walls = walls
        self._resolver = resolver or look_up
        self._tls = _tls_context(walls)
        self._network = LoopThread("sources")
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._network.run(self._session.close())
            self._session = None
        await self._network.close()

    @asynccontextmanager
    async def open(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        credential: str | None = None,
        method: Literal["GET", "HEAD"] = "GET",
    ) -> AsyncIterator[Response]:
        """The answer to a request, whatever its status, behind all redirects. Leaving the context before the
        body's end closes the connection.

        `credential` is the value of the Authorization header. `headers` go to every host on the way.
        Raises Refused: `source_refused` (asking again is no use), `source_unavailable` and `stalled`.
        """
        if _OURS & {name.lower() for name in headers}:
            raise ValueError("credentials are passed as such, and Host is made from the URL")
        target, exchange = check_url(url, self._walls), AsyncExitStack()
        answering = self._exchange(method, target, headers, credential)
        try:
            yield await self._network.run(exchange.enter_async_context(answering))
        finally:
            # Also of one that nobody waited for until the end: it may have been entered meanwhile.
            await asyncio.shield(self._network.run(exchange.aclose()))

    # On the network's loop, from here.

    @asynccontextmanager
    async def _exchange(
        self, method: str, target: Target, headers: Mapping[str, str], credential: str | None
    ) -> AsyncIterator[Response]:
        answer, target, passed = await self._follow(method, target, headers, credential)
        try:
            yield Response(answer, target, self._walls, passed, self._network)
        finally:
            _leave(answer)

    async def _follow(
        self, method: str, target: Target, headers: Mapping[str, str], credential: str | None
    ) -> tuple[aiohttp.ClientResponse, Target, tuple[Mapping[str, str], ...]]:
        passed: list[Mapping[str, str]] = []
        first = target.authority
        while True:
            answer = await self._ask(method, target, headers, credential)
            if answer.status not in REDIRECTS:
                return answer, target, tuple(passed)
            location = answer.headers.get("location")
            passed.append(_shown(answer))
            _leave(answer)
            if location is None:
                raise _unavailable(f"{target.name} redirects without saying where to.")
            if len(passed) > REDIRECTS_MAX:
                raise Refused(
                    "source_refused", f"{target.name} redirects, after {REDIRECTS_MAX} redirects before."
                )
            target = redirected(target, location, self._walls)
            if target.authority != first:
                credential = None  # for good: a way back to the first host is another host's idea

    async def _ask(
        self, method: str, target: Target, headers: Mapping[str, str], credential: str | None
    ) -> aiohttp.ClientResponse:
        """One answer's head; its body is still to be read."""
        url = URL.build(
            scheme="https",
            host=target.host,
            port=target.port,
            path=target.path,
            query_string=target.query,
            encoded=True,
        )
        sent = dict(headers) if credential is None else {**headers, "authorization": credential}
        try:
            async with asyncio.timeout(self._walls.stall_seconds):
                answer = await self._opened().request(method, url, headers=sent, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            refusal = _refusal(error, target, self._walls)
        else:
            if sum(len(name) + len(value) for name, value in answer.raw_headers) <= HEAD_BYTES_MAX:
                return answer
            _leave(answer)
            refusal = _unavailable(f"{target.name} sends a head of more than {HEAD_BYTES_MAX} bytes.")
        # Outside of the except clause: the library's error knows the whole URL, and would come along.
        raise refusal

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=_Checked(self._resolver, self._walls),
                use_dns_cache=False,  # a remembered answer would get past the check
                ssl=self._tls,
                limit=0,  # whoever asks has slots of their own
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"user-agent": f"ficc/{__version__}", "accept-encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=min(CONNECT_SECONDS_MAX, self._walls.stall_seconds)
                ),
                read_bufsize=READ_BYTES,
                max_line_size=HEAD_LINE_BYTES_MAX,
                max_field_size=HEAD_LINE_BYTES_MAX,
                max_headers=HEAD_FIELDS_MAX,
            )
        return self._session


class Response:
    """An answer as far as its head; the body is read once, by `chunks` or by `read`."""

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        target: Target,
        walls: Walls,
        passed: tuple[Mapping[str, str], ...],
        network: LoopThread,
    ) -> None:
        self.status = answer.status
        self.headers = _shown(answer)
        """Names in lower case; a field that came twice is joined by a comma. Without those that can hold a
        signed address or a cookie."""
        self.host = target.host
        """Who answered, behind all redirects."""
        self.redirect_headers = passed
        """Headers of the redirects on the way, the first first, and without the same fields."""
        self._network = network
        self._content = answer.content
        self._name = target.name
        self._stall_seconds = walls.stall_seconds
        self._flow = Flow(walls.bytes_per_second_min, walls.stall_seconds)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, in pieces that are not empty and seldom more than twice `READ_BYTES`; of an
        answer that is no success at most `ERROR_BYTES_MAX`.

        Only waiting for the source counts as its silence, not what the caller does between two pieces. Raises
        Refused `stalled`, also for a source that sends too little, and `source_unavailable` when the connection
        breaks, after what came before.
        """
        left = None if 200 <= self.status < 300 else ERROR_BYTES_MAX
        while left is None or left > 0:
            piece, refusal = await self._network.run(self._piece())
            if piece:
                piece = piece[:left]
                left = None if left is None else left - len(piece)
                yield piece
            if refusal is not None:
                raise refusal
            if not piece:
                return

    async def read(self, bytes_max: int) -> bytes:
        """The whole of a small body. Raises Refused as `chunks` does, and `source_unavailable` for a body of
        more than `bytes_max`."""
        body = bytearray()
        async for piece in self.chunks():
            body += piece
            if len(body) > bytes_max:
                raise _unavailable(f"{self._name} sends more than {bytes_max} bytes.")
        return bytes(body)

    async def _piece(self) -> tuple[bytes, Refused | None]:
        """What has come, on the network's loop, and why nothing more will."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._stall_seconds):
                piece = await self._content.readany()
            self._flow = self._flow.after(len(piece), loop.time() - began)
            return piece, _too_slow(self._name, self._flow) if piece and self._flow.is_too_slow else None
        except TimeoutError:
            refusal = _stalled(self._name, self._stall_seconds)
        except (aiohttp.ClientError, OSError):
            refusal = _unavailable(f"The connection to {self._name} broke before the end of its answer.")
        return self._arrived_before_the_break(), refusal

    def _arrived_before_the_break(self) -> bytes:
        """aiohttp's reader keeps what it has to itself once it knows of a break. A source that breaks every
        connection early would so never bring anything."""
        self._content.set_exception(None)  # type: ignore[arg-type]
        return self._content.read_nowait()


class _Checked(AbstractResolver):
    """The wall in the connector: the one lookup whose addresses are dialled."""

    def __init__(self, look_up: Resolver, walls: Walls) -> None:
        self._look_up = look_up
        self._walls = walls

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = check_addresses(host, port, await self._look_up(host, port), self._walls)
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


async def look_up(host: str, port: int) -> Sequence[str]:
    """The addresses of a host as the machine's own resolver has them."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return [str(address[0]) for *_, address in found]


def _tls_context(walls: Walls) -> ssl.SSLContext:
    """The system's authorities, and the operator's; names are verified."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if walls.ca_file is not None:
        context.load_verify_locations(walls.ca_file)
    return context


def _leave(answer: aiohttp.ClientResponse) -> None:
    """Keep the connection, or cut it where the body is not at its end: an orderly end of TLS would wait for the
    other side, for half a minute if that is the silent source that is being left."""
    connection = answer.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    answer.release()


def _shown(answer: aiohttp.ClientResponse) -> Mapping[str, str]:
    shown: dict[str, str] = {}
    for key, value in answer.headers.items():
        name = key.lower()
        if name not in _UNSHOWN:
            shown[name] = f"{shown[name]}, {value}" if name in shown else value
    return shown


def _refusal(error: Exception, target: Target, walls: Walls) -> Refused:
    """What the library met on the way to an answer's head, in words that name no more than the host."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            why = getattr(error.certificate_error, "verify_message", "") or "it is not valid"
            return Refused(
                "source_refused",
                f"{target.name} shows a certificate that cannot be trusted ({why}); an authority of your own is "
                "named in acquisition.ca_file.",
            )
        case aiohttp.ClientConnectorDNSError():
            return _unavailable(f"The host of {target.name} is not found.")
        case aiohttp.ConnectionTimeoutError():
            return _unavailable(f"{target.name} cannot be reached: no connection in time.")
        case TimeoutError():
            return _stalled(target.name, walls.stall_seconds)
        case aiohttp.ClientConnectorSSLError():
            return _unavailable(f"{target.name} cannot be reached: no agreement on TLS.")
        case aiohttp.ClientConnectorError():
            return _unavailable(
                f"{target.name} cannot be reached: {error.os_error.strerror or 'no connection'}."
            )
        case aiohttp.ClientResponseError():
            return _unavailable(
                f"{target.name} answers with something that is no HTTP, or has too long a head."
            )
        case _:
            return _unavailable(f"{target.name} closed the connection before it answered.")


def _unavailable(message: str) -> Refused:
    return Refused("source_unavailable", message)


def _stalled(name: str, seconds: float) -> Refused:
    return Refused("stalled", f"{name} has sent nothing for {seconds:g} s.")


def _too_slow(name: str, flow: Flow) -> Refused:
    return Refused(
        "stalled",
        f"{name} has sent {flow.count} bytes in {flow.seconds:.0f} s, and acquisition.bytes_per_second_min is "
        f"{flow.bytes_per_second_min}.",
    )
