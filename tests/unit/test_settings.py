"""Settings: what they admit, what of them is shown, and what they say of the address."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from ficc.controller.edge import EdgeLimits
from ficc.domain.plan import BODY_BYTES_MAX
from ficc.gateway.relay import Limits
from ficc.settings import Settings, load

SECRET = "canary"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FICC_STATE_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql+psycopg://me:{SECRET}@db:5432/ficc", "postgresql+psycopg://me:***@db:5432/ficc"),
        (f"postgresql+psycopg://db/ficc?password={SECRET}", "postgresql+psycopg://db/ficc?***"),
        (f"postgresql+psycopg://me:{SECRET}@/ficc?host=/run", "postgresql+psycopg://me:***@/ficc?***"),
        (f"postgresql+psycopg://me:a@b/{SECRET}?@db/ficc?x=1", "postgresql+psycopg://me:***@db/ficc?***"),
        ("postgresql+psycopg://me@db:5432/ficc", "postgresql+psycopg://me@db:5432/ficc"),
        ("sqlite:////srv/ficc.sqlite", "sqlite:////srv/ficc.sqlite"),
    ],
)
def test_a_databases_password_is_used_and_never_shown(
    directory: Path, monkeypatch: pytest.MonkeyPatch, url: str, shown: str
) -> None:
    monkeypatch.setenv("FICC_DATABASE_URL", url)
    settings = load()
    assert settings.database_url == url
    document = settings.model_dump(mode="json")
    assert document["database"]["url"] == shown
    assert SECRET not in json.dumps(document) + repr(settings)


def test_without_a_url_there_is_none_to_show(directory: Path) -> None:
    settings = load()
    assert settings.model_dump(mode="json")["database"]["url"] is None
    assert settings.database_url == f"sqlite:///{directory}/controller/ficc.sqlite"


@pytest.mark.parametrize(
    ("listen", "only_local"),
    [
        ("127.0.0.1:8421", True),
        ("[::1]:8421", True),
        ("localhost:8421", True),
        ("unix:/run/ficc.sock", True),
        ("0.0.0.0:8421", False),
        ("[::]:8421", False),
        ("192.0.2.7:8421", False),
        ("ficc.example:443", False),
    ],
)
def test_who_can_connect(
    directory: Path, monkeypatch: pytest.MonkeyPatch, listen: str, only_local: bool
) -> None:
    monkeypatch.setenv("FICC_SERVER_LISTEN", listen)
    assert load().server.only_local is only_local


def test_no_body_is_admitted_that_an_engine_would_refuse(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load().gateway.body_bytes_max == BODY_BYTES_MAX
    monkeypatch.setenv("FICC_GATEWAY_BODY_BYTES_MAX", str(BODY_BYTES_MAX + 1))
    with pytest.raises(ValidationError, match="body_bytes_max"):
        load()


def test_defaults_are_those_of_the_parts(directory: Path) -> None:
    settings: Settings = load()
    edge, gateway = EdgeLimits(), Limits()
    for name in ("header_seconds", "body_idle_seconds", "write_stall_seconds"):
        assert getattr(settings.server, name) == getattr(edge, name)
    for name in Limits.__dataclass_fields__:
        assert getattr(settings.gateway, name) == getattr(gateway, name)
