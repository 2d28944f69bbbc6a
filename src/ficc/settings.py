"""Settings of an installation: defaults, then `ficc.toml` in the state directory, then `FICC_*` variables,
then flags.

A variable is named after section and setting: `gateway.queue_max` is `FICC_GATEWAY_QUEUE_MAX`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AnyHttpUrl,
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    SecretStr,
    field_serializer,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ficc.content.store import RESERVE_BYTES
from ficc.domain import admission, lease, limits, plan, restart, usage
from ficc.domain.canonical import INTEGER_MAX
from ficc.protocol import strict_json

CONFIGURATION_FILE = "ficc.toml"

WORKLOAD_UID_BASE = 1_879_050_000
"""Host accounts of payloads count up from here: above what distributions, containers and systemd use
(systemd.io, "Users, Groups, UIDs and GIDs on systemd Systems")."""
CONTROLLER_UID = WORKLOAD_UID_BASE - 1
"""The account that the controller drops to when it is started by root."""
RESERVE_MEMORY_BYTES = 512 << 20
PROVIDER = "bubblewrap"

HEADER_SECONDS = 10.0
BODY_IDLE_SECONDS = 30.0
WRITE_STALL_SECONDS = 300.0  # a laptop may sleep for a minute in the middle of an answer

_PASSWORD = re.compile(r"(//[^:/]*):.*@")  # it may hold any character that its writer forgot to escape

Bytes = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
RestartSeconds = Annotated[int, Field(ge=1, le=restart.SECONDS_LIMIT)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Server(Section):
    listen: str = "127.0.0.1:8421"
    """HOST:PORT, [HOST]:PORT for IPv6, or unix:/path/to/socket behind a proxy."""
    tls_cert: Path | None = None
    """PEM file with the certificate and its chain; anything but loopback needs TLS."""
    tls_key: Path | None = None
    """PEM file with the certificate's key."""
    public_origin: AnyHttpUrl | None = None
    """What browsers and clients see, where a proxy stands in front."""
    allowed_origins: tuple[str, ...] = ()
    """Other origins whose pages may call the inference routes (CORS)."""
    connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Connections that are open at once; a request on one more is refused with `connections_full`."""
    header_seconds: Seconds = HEADER_SECONDS
    """From the first byte of a request's headers to their last; on a fresh connection from the connecting."""
    body_idle_seconds: Seconds = BODY_IDLE_SECONDS
    """A request whose body stops coming for so long is ended; what an upload made durable stays."""
    write_stall_seconds: Seconds = WRITE_STALL_SECONDS
    """A client that takes nothing of its answer for so long is cut off, and its request ended."""

    @property
    def only_local(self) -> bool:
        """Whether only this machine can connect."""
        listen = parse_listen(self.listen)
        return isinstance(listen, Path) or _is_loopback(listen[0])

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        parse_listen(value)
        return value


class Database(Section):
    url: SecretStr | None = None
    """SQLAlchemy URL; by default SQLite in the state directory. PostgreSQL: postgresql+psycopg://…"""

    @field_serializer("url", when_used="json-unless-none")
    def _shown(self, url: SecretStr) -> str:
        return without_secrets(url.get_secret_value())


class Content(Section):
    directory: Path | None = None
    """Where blobs and partials are kept; by default `content` in the state directory."""
    reserve_bytes: Bytes = RESERVE_BYTES
    """Disk space that uploads never take."""
    share_across_projects: bool = False
    """Let a project have what another verified already, without supplying the bytes. For installations of one
    owner: knowing a digest then gives the content."""
    sweep_seconds: Seconds = 900.0
    """How often files that a crash left behind are looked for and removed."""


class Uploads(Section):
    verify_wait_seconds: Seconds = 20.0
    """How long a finishing upload waits for the hash before it answers `verifying`."""


class Acquisition(Section):
    allowed_hosts: tuple[str, ...] = ()
    """Host names that sources and their redirects may have, each with everything below it; empty: any public
    host."""
    allowed_networks: tuple[IPvAnyNetwork, ...] = ()
    """Networks that may be dialled although they are not public, on any port (a mirror inside the house)."""
    ca_file: Path | None = None
    """PEM file of further certificate authorities that sources may be signed by."""
    stall_seconds: Seconds = 30.0
    """A source that sends nothing for so long is left, and asked again."""
    bytes_per_second_min: Annotated[int, Field(ge=0, le=1 << 30)] = 1024
    """A source that sends less, over `stall_seconds` of waiting for it, has stalled as well; 0: no least rate."""
    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 8
    """Tries without progress before a file fails; one that brings bytes, at no less than the least rate, begins
    the count anew."""
    range_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 1 << 30
    """How much of a file one request asks for."""
    files_max: Annotated[int, Field(ge=1, le=64)] = 4
    """Files that are fetched at once in the installation."""
    files_per_host_max: Annotated[int, Field(ge=1, le=64)] = 4
    """Files that are fetched at once from one host."""
    bytes_per_second_max: Annotated[int, Field(ge=0, le=INTEGER_MAX)] = 0
    """Of all downloads together; 0: no limit."""
    project_quota_bytes: Bytes = 0
    """What the models of one project may declare altogether; 0: no limit."""


class Hub(Section):
    endpoint: AnyHttpUrl = AnyHttpUrl("https://huggingface.co")
    """The hub that previews ask."""
    token_file: Path | None = None
    """A file with the token that the hub knows this installation by; it is sent to the hub's own host only."""


class Gateway(Section):
    queue_max: Annotated[int, Field(ge=0, le=100_000)] = admission.QUEUE_MAX
    """Requests that wait for a slot, per service."""
    queue_seconds: Seconds = admission.QUEUE_SECONDS
    """How long a request waits for a slot before it is refused."""
    body_bytes_max: Annotated[int, Field(ge=1024, le=plan.BODY_BYTES_MAX)] = plan.BODY_BYTES_MAX
    """Of one inference request; an engine's endpoint contract admits no more than the default."""
    body_bytes_total_max: Bytes = admission.BODY_BYTES_TOTAL_MAX
    """Bodies held at once over all requests."""
    keep_alive_seconds: Seconds = admission.KEEP_ALIVE_SECONDS
    """A stream's client that hears nothing for so long is sent a comment, so that nothing between gives the
    connection up."""
    json_values_max: Annotated[int, Field(ge=16, le=10_000_000)] = strict_json.VALUES_MAX
    """Values in one inference body."""
    json_depth_max: Annotated[int, Field(ge=4, le=512)] = strict_json.DEPTH_MAX
    """How deep an inference body nests."""


Limit = Annotated[int, Field(ge=0, le=limits.LIMIT_MAX)]


class Limits(Section):
    token_requests_per_minute: Limit = 0
    """Inference requests that one token, or one session, may send in a minute, at each controller, unless the
    token has its own limits; 0: no limit. All of these."""
    token_tokens_per_minute: Limit = 0
    """Tokens, of prompts and answers together, that its requests may take in a minute."""
    token_concurrency: Limit = 0
    """Requests that it may have open at once, those that wait included."""
    project_requests_per_minute: Limit = 0
    """The same of all credentials of one project together."""
    project_tokens_per_minute: Limit = 0
    """The same of all credentials of one project together."""
    project_concurrency: Limit = 0
    """The same of all credentials of one project together."""

    @property
    def of_token(self) -> limits.Allowance:
        return limits.Allowance(
            self.token_requests_per_minute, self.token_tokens_per_minute, self.token_concurrency
        )

    @property
    def of_project(self) -> limits.Allowance:
        return limits.Allowance(
            self.project_requests_per_minute, self.project_tokens_per_minute, self.project_concurrency
        )


class Metering(Section):
    retention_days: Annotated[int, Field(ge=0, le=36_500)] = 400
    """How long usage records are kept; 0: for ever."""
    held_records_max: Annotated[int, Field(ge=1, le=10_000_000)] = usage.HELD_RECORDS_MAX
    """Usage records that are held in memory while the database is away; one more is lost, and counted."""


class Leases(Section):
    ttl_seconds: Annotated[int, Field(ge=lease.TTL_SECONDS_MIN, le=lease.TTL_SECONDS_MAX)] = (
        lease.TTL_SECONDS_DEFAULT
    )
    """How long an engine runs on when nothing of its controller is heard; renewed at a third of it."""


class Lifecycle(Section):
    prepare_seconds: Seconds = 120.0
    """From when the attempt is sent to its node until the engine's process runs, and a second more for every
    20 MiB of the model: a file that the node has not read before is hashed there first."""
    ready_seconds: Seconds = 600.0
    """From the engine's start until it answers."""
    stop_grace_seconds: Annotated[float, Field(ge=0, le=60)] = 5.0
    """Between SIGTERM and the end of the whole sandbox."""
    liveness_seconds: Seconds = 60.0
    """An engine that was ready and gives no sign of life for so long has failed. It is asked several times
    within, beside its slots, and only while nothing of an answer comes from it."""
    restart_delay_seconds: RestartSeconds = restart.DELAY_SECONDS
    """Between a replica's first failure and the next attempt at it."""
    restart_factor: Annotated[int, Field(ge=1, le=restart.FACTOR_LIMIT)] = restart.FACTOR
    """How many times as long each further pause is."""
    restart_delay_seconds_max: RestartSeconds = restart.DELAY_SECONDS_MAX
    """The longest pause."""
    restart_failures_max: Annotated[int, Field(ge=1, le=restart.FAILURES_LIMIT)] = restart.FAILURES_MAX
    """At so many failures in a row a replica is given up, and a service whose replicas are all given up has
    failed. Ends that say nothing about the engine, as when its machine goes down, are no failures: the first is
    made good at once, more in a row after the same pauses, however many."""
    restart_stable_seconds: RestartSeconds = restart.STABLE_SECONDS
    """A replica that was ready for so long begins both counts anew."""
    acknowledge_unknown_on_boot: bool = False
    """Acknowledge beforehand what a reboot of a machine leaves unknown: services that it interrupted are started
    again by themselves, and nothing is replayed. Each use is recorded in the audit."""


class Executor(Section):
    socket: Path | None = None
    """The unix socket; by default `run/executor.sock` in the state directory."""
    directory: Path | None = None
    """Ledger, images and logs; by default `executor` in the state directory."""
    provider: str = PROVIDER
    """Which installed provider makes the sandboxes."""
    uid_base: Annotated[int, Field(ge=1000, le=4_000_000_000)] = WORKLOAD_UID_BASE
    """The first host account of payloads, where root runs the executor; each attempt that holds its reservation
    has one of its own, counted up from here."""
    reserve_memory_bytes: Bytes = RESERVE_MEMORY_BYTES
    """Memory of the machine that is never given to attempts."""


class Log(Section):
    format: Literal["console", "json"] = "console"
    """For people, or one JSON object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least grave that is said."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        use_attribute_docstrings=True,
        env_prefix="FICC_",
        env_nested_delimiter="_",
        env_nested_max_split=1,
        extra="forbid",
        frozen=True,
    )

    state_directory: Path = Field(default_factory=lambda: default_state_directory())
    """Where everything is kept; /var/lib/ficc for root, else ~/.local/state/ficc."""
    server: Server = Server()
    database: Database = Database()
    content: Content = Content()
    uploads: Uploads = Uploads()
    acquisition: Acquisition = Acquisition()
    hub: Hub = Hub()
    gateway: Gateway = Gateway()
    limits: Limits = Limits()
    metering: Metering = Metering()
    leases: Leases = Leases()
    lifecycle: Lifecycle = Lifecycle()
    executor: Executor = Executor()
    log: Log = Log()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = init_settings().get("state_directory") or os.environ.get("FICC_STATE_DIRECTORY")
        directory = Path(given) if given else default_state_directory()
        toml = TomlConfigSettingsSource(settings_cls, directory / CONFIGURATION_FILE)
        return init_settings, env_settings, toml

    # Where things are.

    @property
    def controller_directory(self) -> Path:
        return self.state_directory / "controller"

    @property
    def run_directory(self) -> Path:
        return self.state_directory / "run"

    @property
    def content_directory(self) -> Path:
        return self.content.directory or self.state_directory / "content"

    @property
    def executor_directory(self) -> Path:
        return self.executor.directory or self.state_directory / "executor"

    @property
    def executor_socket(self) -> Path:
        return self.executor.socket or self.run_directory / "executor.sock"

    @property
    def images_directory(self) -> Path:
        return self.executor_directory / "images"

    @property
    def build_directory(self) -> Path:
        """Where images are built, one build at a time."""
        return self.state_directory / "build"

    @property
    def owner_token_file(self) -> Path:
        """The owner's token for the command line on this machine, mode 0600."""
        return self.controller_directory / "owner-token"

    @property
    def address_file(self) -> Path:
        """Where a running controller says how it is reached."""
        return self.controller_directory / "address.json"

    @property
    def database_url(self) -> str:
        if self.database.url is not None:
            return self.database.url.get_secret_value()
        return f"sqlite:///{self.controller_directory / 'ficc.sqlite'}"

    @property
    def controller_uid(self) -> int:
        """The account of the controller: its own when root starts it, else the one that starts it."""
        return CONTROLLER_UID if os.geteuid() == 0 else os.geteuid()


def default_state_directory() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/ficc")
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ficc"


def load(state_directory: Path | None = None, **flags: Any) -> Settings:
    """The settings in force. Raises pydantic's ValidationError naming what is wrong."""
    given: dict[str, Any] = {} if state_directory is None else {"state_directory": state_directory.absolute()}
    return Settings(**given, **flags)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_secrets(url: str) -> str:
    """The URL as it may be shown: without its password, and without its query, which may hold another."""
    shown, _, query = _PASSWORD.sub(r"\1:***@", url).partition("?")
    return f"{shown}?***" if query else shown


def parse_listen(value: str) -> tuple[str, int] | Path:
    """HOST:PORT or unix:/path. Raises ValueError."""
    if value.startswith("unix:/"):
        return Path(value.removeprefix("unix:"))
    host, separator, port = value.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535 or not host:
        raise ValueError("listen is HOST:PORT, [IPv6]:PORT or unix:/path")
    return host.strip("[]"), int(port)
