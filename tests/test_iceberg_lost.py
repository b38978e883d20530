"""Commits whose answers are lost after their effect: no file of theirs is deleted, and the table says that they are."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import sqlalchemy.event
from datasets import HERE
from iceberg_tables import LONG, MASTER, MIXED, SCHEMA, ids, new_table, rows, sql_catalog
from pyiceberg.catalog.sql import SqlCatalog as Vanilla
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from requests.exceptions import ConnectionError
from servers.cutting import Gateway
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from ags_fast.iceberg import delete, encrypt, expire, load_catalog, rekey, rotate, verify
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.keys import clear_cache
from ags_fast.metadata.outcome import Attempt, was_made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BEFORE = [*range(3, 20)]


def evolve(table: Any) -> None:
    with table.update_schema() as schema:
        schema.add_column("more", LONG)


def note(table: Any) -> None:
    edit(table, lambda raw: {**raw, "properties": {**raw["properties"], "comment": "x"}})


def check_rotated(table: Any, work: Callable[[], Any]) -> None:
    before = raw_metadata(table)
    work().raise_for_failures()
    after = raw_metadata(table)
    assert after["encryption-keys"] != before["encryption-keys"]
    assert len(after["metadata-log"]) - len(before["metadata-log"]) == 1  # it was not done twice


def check_expired(table: Any) -> None:
    result = expire(table)
    result.raise_for_failures()
    assert {row.format for row in result.rows} >= {"snapshot", "manifest-list", "manifest-list-key"}
    assert len(table.metadata.snapshots) == 1
    for row in result.rows:
        assert row.format == "metadata" or not Path(urlsplit(row.src).path).is_file()


# The operation, and the rows after it.
OPERATIONS: dict[str, tuple[Callable[[Any], object], list[int]]] = {
    "append": (lambda table: table.append(rows(50, 55)), [*BEFORE, *range(50, 55)]),
    "copy on write": (
        lambda table: table.overwrite(rows(50, 52), overwrite_filter="id = 4"),
        [3, *range(5, 20), 50, 51],
    ),
    "delete": (lambda table: table.delete("id > 10"), list(range(3, 11))),
    "evolve": (evolve, BEFORE),
    "edit": (note, BEFORE),
    "rekey manifests": (lambda table: rekey(table).raise_for_failures(), BEFORE),
    "rekey data": (lambda table: rekey(table, what="data", engine=HERE).raise_for_failures(), BEFORE),
    "rotate kek": (lambda table: check_rotated(table, lambda: rotate(table)), BEFORE),
    "rotate mek": (
        lambda table: check_rotated(table, lambda: rotate(table, what="mek", wrapping_key_id="other")),
        BEFORE,
    ),
    "expire": (check_expired, BEFORE),
}


class SqlPlace:
    """A SQL catalog whose database makes a commit, and then the connection breaks, or the statement comes again."""

    def __init__(self, folder: Path, kms: dict[str, str], again: bool) -> None:
        self._folder, self._kms, self._again = folder, kms, again
        self.namespace = "ns"

    def connect(self) -> Any:
        return sql_catalog(self._folder, self._kms, **MIXED)

    def lose(self, catalog: Any) -> None:
        if not self._again:

            def after_commit(session: Any) -> None:
                sqlalchemy.event.remove(Session, "after_commit", after_commit)
                raise OperationalError("COMMIT", None, ConnectionError("the server closed the connection"))

            sqlalchemy.event.listen(Session, "after_commit", after_commit)
            return

        def first(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            if statement.startswith("UPDATE iceberg_tables"):
                sqlalchemy.event.remove(catalog.engine, "before_cursor_execute", first)
                with sqlite3.connect(self._folder / "catalog.db") as other:
                    assert other.execute(statement, parameters).rowcount == 1
                other.close()

        sqlalchemy.event.listen(catalog.engine, "before_cursor_execute", first)


class GatewayPlace:
    """A catalog behind a gateway."""

    def __init__(
        self, gateway: Gateway, marker: bytes, connect: Callable[[], Any], namespace: str, again: bool
    ) -> None:
        self.connect, self.namespace = connect, namespace
        self._gateway, self._marker, self._again = gateway, marker, again

    def lose(self, catalog: Any) -> None:
        self._gateway.lose(self._marker, again=self._again)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    from servers.iceberg_rest import iceberg_rest

    with iceberg_rest(tmp_path_factory.mktemp("rest")) as uri, Gateway("127.0.0.1", urlsplit(uri).port or 0) as made:
        yield made


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    pytest.importorskip("thrift")
    from servers.hive import hive_metastore

    with hive_metastore(tmp_path_factory.mktemp("hive")) as uri, Gateway("127.0.0.1", urlsplit(uri).port or 0) as made:
        yield made


def aws(server: Any, gateway: Gateway, service: str) -> Any:
    import boto3

    return boto3.client(
        service,
        endpoint_url=f"http://127.0.0.1:{gateway.port}",
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name="us-east-1",
    )


MARKERS = {"glue": b"AWSGlue.UpdateTable", "dynamodb": b"DynamoDB_20120810.PutItem"}
# Cut: the connection ends, and boto3 sends the request again by itself. Sent again: somebody on the way does that.
WAYS: list[Any] = ["sql cut", "sql sent again"]
WAYS += [pytest.param(way, marks=pytest.mark.more) for way in ("rest cut", "rest sent again")]
WAYS += [pytest.param(f"{kind} cut", marks=pytest.mark.more) for kind in ("glue", "dynamodb", "hive")]


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest, tmp_path: Path, kms: dict[str, str]) -> Iterator[Any]:
    kind, _, way = request.param.partition(" ")
    again = way == "sent again"
    common: dict[str, Any] = {"kms": kms, "warehouse": f"file://{tmp_path}/wh", **MIXED}
    namespace = f"ns{abs(hash(str(tmp_path)))}"
    with ExitStack() as stack:
        if kind == "sql":
            yield SqlPlace(tmp_path, kms, again)
            return
        if kind in MARKERS:
            server = request.getfixturevalue("moto_s3")
            gateway = stack.enter_context(Gateway("127.0.0.1", urlsplit(server.url).port or 0))
            common |= {"type": kind, "client": aws(server, gateway, kind), "table-name": namespace}
            marker = MARKERS[kind]
        else:
            gateway = request.getfixturevalue(kind)
            scheme = {"rest": "http", "hive": "thrift"}[kind]
            common |= {"type": kind, "uri": f"{scheme}://127.0.0.1:{gateway.port}"}
            marker = f"POST /v1/namespaces/{namespace}/tables/".encode()
            if kind == "hive":
                marker = b"alter_table_with_environment_context"
        made = GatewayPlace(gateway, marker, lambda: load_catalog("tests", **common), namespace, again)
        made.connect().create_namespace(namespace)
        yield made
        gateway.cut = 0


def filled(catalog: Any, namespace: str, **properties: str) -> Any:
    table = new_table(catalog, namespace=namespace, **properties)
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    delete(table, "id < 3")
    return table


def check_readable(place: Any, table: Any, expected: list[int]) -> None:
    clear_cache()
    for one in (table.refresh(), place.connect().load_table(table.name())):
        assert ids(one) == expected
        for snapshot in one.metadata.snapshots:
            ids(one, snapshot_id=snapshot.snapshot_id)
    assert verify(place.connect().load_table(table.name()), engine=HERE).failed == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_answer_is_lost(place: Any, operation: str) -> None:
    catalog = place.connect()
    table = filled(catalog, place.namespace, **{"commit.retry.num-retries": "0"})
    work, expected = OPERATIONS[operation]
    place.lose(catalog)
    work(table)  # the seal tells that a commit was made, where its snapshot or its keys do not
    check_readable(place, table, expected)


@pytest.mark.parametrize("files", [True, False])
def test_an_answer_to_encrypt_is_lost(place: Any, files: bool) -> None:
    catalog = place.connect()
    table = catalog.create_table((place.namespace, "t"), schema=SCHEMA)
    if files:
        table.append(rows(0, 10))
    place.lose(catalog)
    result = encrypt(table, wrapping_key_id=MASTER, engine=HERE)
    assert result.counts["ok"] == files
    clear_cache()
    other = place.connect().load_table(table.name())
    assert ids(other) == ids(table) == list(range(10 if files else 0))
    assert raw_metadata(other)["properties"]["encryption.key-id"] == MASTER


@pytest.mark.parametrize("operation", ["append", "delete", "rekey manifests", "rekey data"])
def test_a_refusal_that_nothing_explains(tmp_path: Path, kms: dict[str, str], operation: str) -> None:
    """The newest metadata cannot be loaded: then nothing is deleted, whatever the error says."""
    catalog = sql_catalog(tmp_path, kms)
    table = filled(catalog, "ns", **{"commit.retry.num-retries": "0"})
    work, expected = OPERATIONS[operation]
    commit, load = Vanilla.commit_table, Vanilla.load_table

    def refuse(*given: Any) -> None:
        commit(*given)
        patch.setattr(Vanilla, "load_table", broken)
        raise CommitFailedException("another commit came first")

    def broken(*_: Any) -> None:
        raise OperationalError("SELECT", None, ConnectionError("no route to the server"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vanilla, "commit_table", refuse)
        with pytest.raises(CommitStateUnknownException):
            work(table)
    assert Vanilla.load_table is load
    assert ids(sql_catalog(tmp_path, kms).load_table("ns.t")) == expected


def test_a_refusal_that_is_true(tmp_path: Path, kms: dict[str, str]) -> None:
    """Another commit came first, and the newest metadata show it: what the attempt has written goes."""
    catalog = sql_catalog(tmp_path, kms)
    table = filled(catalog, "ns", **{"commit.retry.num-retries": "0"})
    other = sql_catalog(tmp_path, kms).load_table("ns.t")
    commit = Vanilla.commit_table

    def late(self: Any, *given: Any) -> Any:
        if self is catalog:
            patch.setattr(Vanilla, "commit_table", commit)
            other.append(rows(30, 31))
        return commit(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vanilla, "commit_table", late)
        delete(table, "id = 5")
    assert ids(table) == [3, 4, *range(6, 20), 30]
    assert verify(table, orphans=True, engine=HERE).failed == []


SNAPSHOTS = {1: None, 2: 1, 3: 2, 4: 3}


def raw_with(*ids: int, log: tuple[str, ...] = (), keys: tuple[str, ...] = (), **properties: str) -> Any:
    return {
        "snapshots": [{"snapshot-id": one, "parent-snapshot-id": SNAPSHOTS[one]} for one in ids],
        "metadata-log": [{"metadata-file": one} for one in log],
        "encryption-keys": [{"key-id": one} for one in keys],
        "properties": properties,
    }


@pytest.mark.parametrize(
    ("made", "newest", "expected"),
    [
        (raw_with(1, 2), raw_with(1, 2), True),
        (raw_with(1, 2), raw_with(1), False),
        (raw_with(1, 2), raw_with(1, 2, 3), True),
        (raw_with(1, 2), raw_with(3, 4), None),  # 2 may have been expired, and 3 may use its manifests
        (raw_with(1, 2), raw_with(4), None),
        (raw_with(1, 2), raw_with(4, log=("here",)), True),
        (raw_with(1), raw_with(1, 2), False),  # on a server: what changed nothing proves nothing
        (raw_with(1, keys=("new",)), raw_with(1, 2, keys=("new", "newer")), True),
        (raw_with(1, keys=("new",)), raw_with(1, 2), False),
        (raw_with(), raw_with(2), True),
        (raw_with(), raw_with(1, 2), False),
        (raw_with(1, a="b"), raw_with(1, a="b"), True),
        (raw_with(1, a="b"), raw_with(1, a="c"), False),
    ],
)
def test_what_the_newest_metadata_tell(made: Any, newest: Any, expected: bool | None) -> None:
    server = not made["snapshots"] or len(made["snapshots"]) == 1
    assert was_made(Attempt(raw_with(1), made, None if server else "here"), newest, "newest") is expected
