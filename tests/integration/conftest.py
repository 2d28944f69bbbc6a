"""Both databases, for the tests that must hold on either; and what tests of the gateway share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from contract.scripted import ScriptedInstallation
from ficc.content.store import Key
from ficc.controller.store.database import Database
from support.contents import DATA, Controllers
from support.engine_answers import until_idle
from support.http import Http, http_of
from support.installation import Installation
from support.postgres import Postgres
from support.rows import sha256

BACKENDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of one test's own, without a schema."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.sqlite'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.create()
    yield url
    server.drop(url)


@pytest.fixture(params=BACKENDS)
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database of one test's own, with the schema of this release."""
    if request.param == "postgresql":
        yield request.getfixturevalue("postgres_db")
        return
    found = Database(f"sqlite:///{tmp_path / 'test.sqlite'}")
    found.migrate()
    yield found
    found.close()


@pytest.fixture(scope="session")
def migrated_url(postgres: Postgres) -> str:
    """A database with the schema of this release, to be copied."""
    url = postgres.create()
    made = Database(url)
    made.migrate()
    made.close()
    return url


@pytest.fixture
def postgres_db(postgres: Postgres, migrated_url: str) -> Iterator[Database]:
    """For what only PostgreSQL has."""
    url = postgres.create(migrated_url)
    found = Database(url)
    yield found
    found.close()
    postgres.drop(url)


@pytest.fixture(scope="module")
def database_settings(request: pytest.FixtureRequest) -> Iterator[Callable[[str], dict[str, str]]]:
    """The settings that put an installation on a backend, and on a database of its own there."""
    made: list[tuple[Postgres, str]] = []

    def settings(backend: str) -> dict[str, str]:
        if backend == "sqlite":
            return {}
        server: Postgres = request.getfixturevalue("postgres")
        made.append((server, server.create()))
        return {"FICC_DATABASE_URL": made[-1][1]}

    yield settings
    for server, url in made:
        server.drop(url)


@pytest.fixture(scope="module")
def controller_settings() -> dict[str, str]:
    """For a module to say what its controllers are set to."""
    return {}


@pytest.fixture(scope="module")
def controllers(
    tmp_path_factory: pytest.TempPathFactory,
    database_settings: Callable[[str], dict[str, str]],
    controller_settings: dict[str, str],
) -> Iterator[Callable[..., Installation]]:
    """Installations of one module that have a controller only, each started when it is first asked for."""
    made: dict[str, Installation] = {}

    def start(name: str, **settings: str) -> Installation:
        if name not in made:
            backend = name if name in BACKENDS else "sqlite"
            made[name] = Installation(
                tmp_path_factory.mktemp(name),
                settings={**database_settings(backend), **controller_settings, **settings},
            )
            made[name].start("controller")
        return made[name]

    yield start
    for one in made.values():
        one.stop()


@pytest.fixture
def made(controllers: Callable[..., Installation]) -> Installation:
    """A controller on SQLite."""
    return controllers("sqlite")


@pytest.fixture
def api(made: Installation) -> Http:
    """Its owner."""
    return http_of(made)


@pytest.fixture(params=BACKENDS)
def either(request: pytest.FixtureRequest, controllers: Callable[..., Installation]) -> Installation:
    """A controller on each backend, for the flows that matter most."""
    return controllers(request.param)


@pytest.fixture
async def sharing(db: Database, tmp_path: Path) -> AsyncIterator[Controllers]:
    """Controllers that share a database and a content directory."""
    made = Controllers(db, tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def project(sharing: Controllers) -> str:
    return await sharing.project("one")


@pytest.fixture
async def model(sharing: Controllers, project: str) -> str:
    """Of one file, DATA, of which there is nothing yet."""
    return await sharing.model(project, DATA)


@pytest.fixture
def key(project: str) -> Key:
    return Key(project, sha256(DATA))


# A service of the scripted engine: `installation` and `service` are the module's own.


@pytest.fixture
def service_id(installation: ScriptedInstallation, service: dict[str, Any]) -> Iterator[str]:
    """Behind every test nothing is in flight."""
    yield service["id"]
    until_idle(installation, service["id"])


@pytest.fixture(scope="module")
def client(installation: ScriptedInstallation, service: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=installation.origin + service["endpoint"], api_key=installation.token, max_retries=0
    )
