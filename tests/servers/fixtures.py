"""Fixtures around real database servers; ``tests/conftest.py`` makes them known everywhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from tests.servers.postgres import MISSING, PROGRAMS, PostgresServer, running_postgres

MakeDatabase = Callable[[], str]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of a session: who ends it starts it again."""
    if PROGRAMS is None:
        pytest.skip(MISSING)
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed (pip install 'tessera-edge[cluster]')")
    with running_postgres() as server:
        yield server


@pytest.fixture
def make_database(postgres: PostgresServer) -> Iterator[MakeDatabase]:
    """Makes empty databases; their URLs. They are gone after the test."""
    made: list[str] = []

    def make() -> str:
        name = f"test_{next(_NUMBERS)}"
        postgres.run(f"CREATE DATABASE {name}")
        made.append(name)
        return postgres.url(name)

    yield make
    for name in made:
        postgres.run(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str | None:
    """Where a home of the test has its store: None in a file, else in an empty database."""
    if request.param == "sqlite":
        return None
    make: MakeDatabase = request.getfixturevalue("make_database")
    return make()


_NUMBERS = count(1)
