"""What a role of a PostgreSQL store may do: the owner's everything, a worker's what workers need.

Workers run on several machines, and one of them may be stolen. Through its role nobody reads
enrolment codes or changes who is enrolled, rounds, versions, or what is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aggregator.errors import AggregatorError
from aggregator.store.database import Database
from aggregator.store.schema import TABLES

_ALL = ""


@dataclass(frozen=True, slots=True)
class Rights:
    """Of a role, to one table.

    Attributes:
        columns: those it may use, by the kind of statement; empty text: all of them.
        rows: a condition that rows have to meet, by the kind of statement; where any is given,
            those without one meet none. Not for tables that are written by ``COPY``.
    """

    columns: Mapping[str, str]
    rows: Mapping[str, str]


def _rights(*kinds: str, rows: Mapping[str, str] | None = None, **columns: str) -> Rights:
    said = dict.fromkeys(kinds, _ALL) | {kind.upper(): text for kind, text in columns.items()}
    return Rights(said, rows or {})


_READ, _ADD, _CHANGE, _DROP = "SELECT", "INSERT", "UPDATE", "DELETE"
_OWN = "owner = current_user"
_WRITTEN_FACT = "name = 'rotation_due'"
_READ_FACTS = "name IN ('cluster_life', 'generation', 'mirrored', 'rotation_due', 'seed')"

OWNER: Mapping[str, Rights] = {
    table: _rights(_READ, _ADD, _CHANGE, _DROP) for table in (*TABLES, "tessera_commits")
}
WORKER: Mapping[str, Rights] = {
    "tessera_store": _rights(_READ),
    "tessera_commits": _rights(
        *(_READ, _ADD, _CHANGE, _DROP), rows=dict.fromkeys((_READ, _ADD, _CHANGE, _DROP), _OWN)
    ),
    # That a device left is written down by the worker that heard it.
    "facts": _rights(
        *(_READ, _ADD, _CHANGE),
        rows={_READ: _READ_FACTS, _ADD: _WRITTEN_FACT, _CHANGE: _WRITTEN_FACT},
    ),
    # Who was revoked stays so.
    "devices": _rights(
        _READ,
        update="shard, revoked_unix, admission_key",
        rows={_READ: "true", _CHANGE: "revoked_unix IS NULL"},
    ),
    "device_changes": _rights(_READ, _ADD, rows={_READ: "true", _ADD: "revision < 2 ^ 53"}),
    "group_keys": _rights(_READ),
    "tasks": _rights(_READ),
    "task_facts": _rights(_READ),
    # Held while a group is committed, and not changed: no row that would be is one to be written.
    "rounds": _rights(_READ, update="held", rows={_READ: "true", _CHANGE: "true"}),
    "checkpoints": _rights(_READ),
    "updates": _rights(_ADD, select="task, seq", update="quarantined"),
    "verdicts": _rights(_READ, _ADD, update="reason"),
    "reports": _rights(_READ, _ADD, _DROP),
    "participations": _rights(_READ, _ADD, _CHANGE),
    "device_evaluations": _rights(_READ, _ADD, _CHANGE, _DROP),
    "shares": _rights(_READ, _ADD, _CHANGE),
    "late_arrivals": _rights(_READ, _ADD, _CHANGE),
    "sightings": _rights(_READ, _ADD, _CHANGE),
    "clashes": _rights(_READ, _ADD, _CHANGE),
    "refusals": _rights(_READ, _ADD, _CHANGE),
    "freshness": _rights(_READ, _ADD, _CHANGE),
    "lease": _rights(_READ),
    "workers": _rights(_READ, _ADD, _CHANGE),
}
"""Of a worker's role, by table; of those that are not here it has none."""

_NEVER_WRITTEN = {"rounds"}
_NEW_ROWS = {"devices": "true"}
"""What a changed row has to meet, where that is not what it had to before."""


def grant_worker(database: Database, role: str) -> None:
    """Give a role of the database a worker's rights, and take all others from it.

    Raises AggregatorError where there is no such role, or it has more rights by other ways.
    """
    found = database.row(
        "SELECT rolsuper OR rolbypassrls OR pg_has_role(oid, current_user, 'MEMBER') "
        "FROM pg_roles WHERE rolname = ?",
        (role,),
    )
    if found is None:
        raise AggregatorError(
            f"{database.where} has no role {role!r}: make it first, with CREATE ROLE "
            f"{_quoted(role)} LOGIN PASSWORD '...'"
        )
    if found[0]:
        raise AggregatorError(
            f"the role {role!r} may do all that the store's owner may, as a superuser, by "
            "BYPASSRLS, or as a member of the owner's role: name one of the workers' own"
        )
    with database.transaction():
        for statement in _statements(_quoted(role)):
            database.execute(statement)


def _statements(role: str) -> Iterator[str]:
    tables = ", ".join((*TABLES, "tessera_store", "tessera_commits"))
    yield f"REVOKE ALL ON {tables} FROM {role}"
    for table, rights in WORKER.items():
        for kind, columns in rights.columns.items():
            yield f"GRANT {kind}{f' ({columns})' if columns else ''} ON {table} TO {role}"
        if not rights.rows:
            continue
        yield f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"
        for kind in (_READ, _ADD, _CHANGE, _DROP):
            yield f"DROP POLICY IF EXISTS tessera_worker_{kind.lower()} ON {table}"
        for kind, condition in rights.rows.items():
            conditions = "" if kind == _ADD else f" USING ({condition})"
            if kind in (_ADD, _CHANGE):
                new = "false" if table in _NEVER_WRITTEN else _NEW_ROWS.get(table, condition)
                conditions += f" WITH CHECK ({new})"
            name = f"tessera_worker_{kind.lower()}"
            yield f"CREATE POLICY {name} ON {table} FOR {kind} TO {role}{conditions}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
