"""Encrypted tables on a REST catalog, against Iceberg Java's own server."""

from __future__ import annotations

import itertools
import json
import pickle
import secrets
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
import requests

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from datasets import MASTER as KEPT
from iceberg_tables import (
    KEY_ID,
    LONG,
    MASTER,
    MIXED,
    REQUIRE,
    SCHEMA,
    ids,
    key_forms,
    new_process,
    new_table,
    rows,
    sql_catalog,
)
from programs import iceberg_writers
from programs.iceberg_writers import append_until_done
from pyiceberg.catalog.rest.scan_planning import PlanTableScanRequest
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import StringType
from requests.adapters import HTTPAdapter
from servers.iceberg_rest import iceberg_rest
from support import finish_python, program, start_python

from ags_fast.errors import (
    ConcurrentChangeError,
    FormatError,
    IntegrityError,
    KeyAccessError,
    PolicyError,
    UnsupportedChangeError,
)
from ags_fast.iceberg import (
    check_pin,
    delete,
    encrypt,
    expire,
    files,
    load_catalog,
    maintain,
    open_table,
    pin,
    rekey,
    rotate,
    seal,
    verify,
)
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.session import clear_cache
from ags_fast.jobs import JobResult, LocalEngine
from ags_fast.keys.iceberg import read_encryption_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from iceberg_java import Judge
    from requests import PreparedRequest, Response

pytestmark = pytest.mark.more  # a JVM

assert KEPT == MASTER
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with iceberg_rest(tmp_path_factory.mktemp("rest")) as uri:
        yield uri


@pytest.fixture
def connect(server: str, kms: dict[str, str]) -> Callable[..., Any]:
    return lambda **more: load_catalog("tests", kms=kms, **{"type": "rest", "uri": server} | MIXED | more)


@pytest.fixture
def namespace(connect: Callable[..., Any]) -> str:
    name = f"ns{next(_numbers)}"
    connect().create_namespace(name)
    return name


@pytest.fixture
def catalog(connect: Callable[..., Any]) -> Any:
    return connect()


@pytest.fixture
def table(catalog: Any, namespace: str) -> Any:
    return new_table(catalog, namespace=namespace)


def body_of(request: PreparedRequest) -> dict[str, Any]:
    sent: Any = request.body or b"{}"
    found: dict[str, Any] = json.loads(sent)
    return found


class Wire:
    """Sees what goes over the wire, below all that translates. May change it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[PreparedRequest] = []
        self.answers: list[str] = []
        self.before: Callable[[PreparedRequest], None] = lambda request: None
        self.after: Callable[[Any], None] | None = None
        self.status: Callable[[PreparedRequest], int | None] = lambda request: None
        send = HTTPAdapter.send

        def seen(adapter: HTTPAdapter, request: PreparedRequest, *args: Any, **named: Any) -> Response:
            self.before(request)
            self.requests.append(request)
            answer = send(adapter, request, *args, **named)
            self.answers.append(answer.text)
            answer.status_code = self.status(request) or answer.status_code
            if self.after is not None and answer.ok and answer.text:
                body = answer.json()
                self.after(body)
                vars(answer)["_content"] = json.dumps(body).encode()
            return answer

        monkeypatch.setattr(HTTPAdapter, "send", seen)

    @property
    def posted(self) -> list[dict[str, Any]]:
        return [body_of(one) for one in self.requests if one.method == "POST"]

    def text(self) -> str:
        sent = (f"{one.url} {dict(one.headers)} {one.body!r}" for one in self.requests)
        return "\n".join((*sent, *self.answers))


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def raw_of(table: Any) -> dict[str, Any]:
    """What the server has stored."""
    with open(table.metadata_location.removeprefix("file://")) as file:
        found: dict[str, Any] = json.load(file)
    return found


def statuses(done: JobResult) -> set[str]:
    """Of all rows but one: a server makes a table's first metadata file, which is without a seal.

    The log keeps a hundred files beside the newest. Then that one is there no more.
    """
    first = [row for row in done.rows if row.error_class == "Unsealed"]
    full = sum(row.format == "metadata" for row in done.rows) > 100
    assert [(row.format, row.status) for row in first] == [("metadata", "skipped")] or (full and first == [])
    return {row.status for row in done.rows if row not in first}


def paths_of(table: Any) -> list[Path]:
    from pathlib import Path

    return [path for path in Path(table.location().removeprefix("file://")).rglob("*") if path.is_file()]


def changed(request: PreparedRequest, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    request.prepare_body(json.dumps(change(body_of(request))).encode(), None)


# ---------------------------------------------------------------- PyIceberg's own API


def test_everyday_use(connect: Callable[..., Any], table: Any, kms: dict[str, str]) -> None:
    table.append(rows(0, 100))
    table.append(rows(100, 110))
    table.delete("id < 5")
    table.overwrite(rows(50, 53), overwrite_filter="id >= 50")
    assert ids(table) == list(range(5, 53))
    table.upsert(rows(51, 60), join_cols=["id"])
    other = connect().load_table(table.name())
    assert ids(other) == list(range(5, 60))
    assert ids(other, row_filter="id > 57", selected_fields=("id",)) == [58, 59]
    assert ids(other, snapshot_id=other.metadata.snapshots[0].snapshot_id) == list(range(100))
    assert ids(open_table(other.metadata_location, kms=kms)) == list(range(5, 60))
    assert statuses(verify(other, orphans=True)) == {"ok"}


def test_what_the_server_stores(table: Any) -> None:
    table.append(rows(0, 10))
    table.append(rows(10, 13))
    raw = raw_of(table)
    assert raw["format-version"] == 3
    assert raw["properties"][KEY_ID] == MASTER
    assert raw["next-row-id"] == 13
    assert [(one["first-row-id"], one["added-rows"]) for one in raw["snapshots"]] == [(0, 10), (10, 3)]
    named = {one["key-id"]: one for one in raw["encryption-keys"]}
    assert {one["key-id"] for one in raw["snapshots"]} < set(named)
    assert [one["encrypted-by-id"] for one in named.values()].count(MASTER) == 1  # one KEK
    assert "ags_fast" not in json.dumps(raw)
    heads = {path.suffix: path.read_bytes()[:4] for path in paths_of(table)}
    assert heads == {".parquet": b"PARE", ".avro": b"AGS1", ".json": b'{"fo'}


def test_schema_and_partitions_evolve(connect: Callable[..., Any], table: Any) -> None:
    table.append(rows(0, 3))
    with table.update_schema() as update:
        update.add_column("more", LONG)
    with table.update_spec() as spec:
        spec.add_identity("id")
    table.append(rows(3, 5))
    with table.update_schema() as update:
        update.rename_column("name", "label").delete_column("more")
    other = connect().load_table(table.name())
    assert other.scan().to_arrow().column_names == ["id", "label"]
    assert ids(other) == [0, 1, 2, 3, 4]
    assert len(raw_of(other)["partition-specs"]) == 2


def test_branches_and_tags(table: Any) -> None:
    table.append(rows(0, 3))
    first = table.current_snapshot().snapshot_id
    with table.manage_snapshots() as manage:
        manage.create_tag(first, "one").create_branch(first, "dev")
    table.append(rows(3, 5), branch="dev")
    table.append(rows(10, 12))
    assert ids(table) == [0, 1, 2, 10, 11]
    assert sorted(table.scan().use_ref("dev").to_arrow()["id"].to_pylist()) == [0, 1, 2, 3, 4]
    assert sorted(table.scan().use_ref("one").to_arrow()["id"].to_pylist()) == [0, 1, 2]
    taken = [(one["first-row-id"], one["added-rows"]) for one in raw_of(table)["snapshots"]]
    assert taken == [(0, 3), (3, 2), (5, 2)]


def test_one_transaction_makes_the_table_and_its_rows(catalog: Any, namespace: str) -> None:
    with catalog.create_table_transaction(f"{namespace}.t", schema=SCHEMA, properties={KEY_ID: MASTER}) as transaction:
        transaction.append(rows(0, 3))
        transaction.set_properties({"comment": "new"})
    table = catalog.load_table(f"{namespace}.t")
    raw = raw_of(table)
    assert ids(table) == [0, 1, 2]
    assert (raw["format-version"], raw["next-row-id"]) == (3, 3)
    assert raw["properties"].items() >= {KEY_ID: MASTER, "comment": "new"}.items()


def test_many_writers(connect: Callable[..., Any], table: Any) -> None:
    def write(writer: int) -> None:
        mine = connect().load_table(table.name())
        for i in range(3):
            append_until_done(mine, writer * 10 + i, writer * 10 + i + 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    table.refresh()
    assert ids(table) == [writer * 10 + i for writer in range(4) for i in range(3)]
    raw = raw_of(table)
    assert sorted(one["first-row-id"] for one in raw["snapshots"]) == list(range(12))
    assert raw["next-row-id"] == 12


def test_a_session_that_has_forgotten(connect: Callable[..., Any], table: Any) -> None:
    table.append(rows(0, 3))
    clear_cache()
    table.append(rows(3, 4))
    assert ids(table) == [0, 1, 2, 3]
    assert [one["first-row-id"] for one in raw_of(table)["snapshots"]] == [0, 3]


def test_branches_that_move_keep_their_retention(catalog: Any, namespace: str, table: Any) -> None:
    """The server stores what it is sent, and PyIceberg sends no retention when a branch moves."""
    table.append(rows(0, 2))
    first = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_branch(first, "main", min_snapshots_to_keep=3).commit()
    table.manage_snapshots().create_branch(first, "line", max_ref_age_ms=9 * 86_400_000).commit()
    table.manage_snapshots().create_tag(first, "mark", max_ref_age_ms=1).commit()
    table.append(rows(2, 4))
    table.append(rows(4, 6), branch="line")
    table.manage_snapshots().create_tag(first, "mark").commit()
    refs = raw_of(catalog.load_table(f"{namespace}.t"))["refs"]
    assert refs["main"]["min-snapshots-to-keep"] == 3
    assert refs["line"]["max-ref-age-ms"] == 9 * 86_400_000
    assert refs["line"]["snapshot-id"] != first != refs["main"]["snapshot-id"]
    assert "max-ref-age-ms" not in refs["mark"]


def test_settings_are_checked_before_the_server_is_asked(
    catalog: Any, namespace: str, connect: Callable[..., Any], wire: Wire
) -> None:
    sent = len(wire.posted)
    for properties, error in (
        ({"encryption.key_id": MASTER}, ValueError),
        ({KEY_ID: "nobody"}, KeyAccessError),
        ({"encryption.data-key-length": "32"}, PolicyError),
    ):
        with pytest.raises(error):
            catalog.create_table(f"{namespace}.new", schema=SCHEMA, properties=properties)
    with pytest.raises(ValueError, match="allowed-key-ids"):
        connect(**{"encryption.allowed-key-id": "x"})
    assert len(wire.posted) == sent


def test_drop_purge_rename_and_register(catalog: Any, namespace: str, table: Any) -> None:
    table.append(rows(0, 3))
    renamed = catalog.rename_table(f"{namespace}.t", f"{namespace}.u")
    renamed.append(rows(3, 4))
    location = renamed.metadata_location
    catalog.drop_table(f"{namespace}.u")
    with pytest.raises(NoSuchTableError):
        catalog.load_table(f"{namespace}.u")
    again = catalog.register_table(f"{namespace}.again", location)
    assert ids(again) == [0, 1, 2, 3]
    again.append(rows(4, 5))
    assert ids(again) == [0, 1, 2, 3, 4]
    assert paths_of(again)
    catalog.purge_table(f"{namespace}.again")
    assert paths_of(again) == []
    assert catalog.list_tables(namespace) == []


def test_a_dropped_table_with_its_files(catalog: Any, namespace: str, table: Any) -> None:
    table.append(rows(0, 3))
    catalog.drop_table(f"{namespace}.t", purge_requested=True)
    assert paths_of(table) == []


def test_each_commit_is_sealed(connect: Callable[..., Any], table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server makes is what was sealed, after each kind of commit; each pin holds afterwards."""
    steps: dict[str, Callable[[Any], object]] = {
        "property of an empty table": lambda one: (
            one.transaction().set_properties({"comment": "x"}).commit_transaction()
        ),
        "append": lambda one: one.append(rows(0, 6)),
        "delete": lambda one: one.delete("id = 2"),
        "overwrite": lambda one: one.overwrite(rows(5, 7), "id = 5"),
        "property": lambda one: one.transaction().set_properties({"comment": "y"}).commit_transaction(),
        "no property": lambda one: one.transaction().remove_properties("comment").commit_transaction(),
        "schema": lambda one: one.update_schema().add_column("more", StringType()).commit(),
        "partitions": lambda one: one.update_spec().add_field("id", BucketTransform(4), "part").commit(),
        "order": lambda one: one.update_sort_order().asc("id", IdentityTransform()).commit(),
        "append to parts": lambda one: one.append(rows(7, 9)),
        "branch": lambda one: one.manage_snapshots().create_branch(one.current_snapshot().snapshot_id, "b").commit(),
        "append to it": lambda one: one.append(rows(20, 22), branch="b"),
        "tag": lambda one: one.manage_snapshots().create_tag(one.current_snapshot().snapshot_id, "a").commit(),
        "no tag": lambda one: one.manage_snapshots().remove_tag("a").commit(),
        "roll back": lambda one: one.manage_snapshots().rollback_to_snapshot(one.history()[0].snapshot_id).commit(),
        "append again": lambda one: one.append(rows(9, 10)),
        "kek": rotate,
        "mek": lambda one: rotate(one, what="mek"),
        "manifests": lambda one: rekey(one, what="manifests"),
        "data": lambda one: rekey(one, what="data"),
        "expire": expire,
        "append at the end": lambda one: one.append(rows(30, 31)),
    }
    pins, name = [], table.name()
    for what, step in steps.items():
        pins.append(pin(table))
        assert pins[-1].startswith("ags1."), what
        new_process(monkeypatch)
        table = connect(**REQUIRE).load_table(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(table)
        raw = raw_of(connect(**REQUIRE).load_table(name))
        assert what == "mek" or pin(table) != pins[-1], what
        assert not [one for one in raw["snapshots"] if one["manifest-list"].rpartition("/")[2].startswith("fence")]
        for one in pins:
            check_pin(table, one)
    assert verify(table).counts["failed"] == 0


@pytest.mark.parametrize("settings", [{}, REQUIRE])
def test_from_a_server_to_another_catalog_and_back(
    tmp_path: Path, connect: Callable[..., Any], table: Any, kms: dict[str, str], settings: dict[str, str]
) -> None:
    """A server seals no name of a file. The first commit elsewhere does, and the chain goes on."""
    table.append(rows(0, 3))
    kept, (namespace, name) = pin(table), table.name()
    catalog = sql_catalog(tmp_path, kms, **settings)
    there = catalog.register_table("ns.t", table.metadata_location)
    check_pin(there, kept)
    assert there.metadata_location != table.metadata_location
    assert ids(sql_catalog(tmp_path, kms, **REQUIRE).load_table("ns.t")) == [0, 1, 2]
    there.append(rows(3, 4))
    connect().drop_table((namespace, name))
    back = connect(**REQUIRE).register_table((namespace, name), there.metadata_location)
    check_pin(back, kept)
    assert ids(connect(**REQUIRE).load_table((namespace, name))) == [0, 1, 2, 3]


def test_a_table_and_its_rows_in_one_transaction_are_sealed(connect: Callable[..., Any], namespace: str) -> None:
    with connect(**REQUIRE).create_table_transaction(f"{namespace}.t", SCHEMA, properties={KEY_ID: MASTER}) as made:
        made.append(rows(0, 3))
    table = connect(**REQUIRE).load_table(f"{namespace}.t")
    assert ids(table) == [0, 1, 2]
    assert pin(table).startswith("ags1.")


def test_an_encrypted_one_is_sealed(connect: Callable[..., Any], namespace: str) -> None:
    table = connect().create_table(f"{namespace}.t", SCHEMA, properties={"format-version": "2"})
    table.append(rows(0, 3))
    encrypt(table, wrapping_key_id=MASTER)
    assert ids(connect(**REQUIRE).load_table(table.name())) == [0, 1, 2]


CHANGES_OF_OTHERS: dict[str, Any] = {
    "property": {"action": "set-properties", "updates": {"comment": "x"}},
    "seal": {"action": "remove-properties", "removals": ["ags.seal"]},
    "location": {"action": "set-location", "location": "file:///elsewhere"},
}


@pytest.mark.parametrize("what", CHANGES_OF_OTHERS)
def test_what_others_change_is_not_sealed(connect: Callable[..., Any], table: Any, server: str, what: str) -> None:
    """`require` reads nothing of it; `write` goes on without a seal, and says so; `seal` shows what it is."""
    table.append(rows(0, 3))
    kept, name = pin(table), table.name()
    requests.post(
        f"{server}/v1/namespaces/{name[0]}/tables/{name[1]}",
        json={"requirements": [], "updates": [CHANGES_OF_OTHERS[what]]},
        timeout=60,
    ).raise_for_status()
    for more in (REQUIRE, {"pins": {".".join(name): kept}}):
        with pytest.raises(IntegrityError):
            connect(**more).load_table(name)
    if what == "location":
        return
    table = connect().load_table(name)
    expected = pytest.warns(UserWarning, match="not sealed") if what == "property" else nullcontext()
    with expected:
        table.append(rows(3, 4))
    shown = seal(table, dry_run=True)
    assert "properties/comment" in [row.src for row in shown.rows] or what == "seal"
    seal(table)
    assert ids(connect(**REQUIRE).load_table(name)) == [0, 1, 2, 3]


def test_a_server_that_adds_to_what_it_is_sent(connect: Callable[..., Any], table: Any, wire: Wire) -> None:
    """The commit stands. `require` is told that it was made, `write` is warned."""

    def more(body: dict[str, Any]) -> None:
        body.get("metadata", {}).get("properties", {})["added"] = "by the server"

    requiring = connect(**REQUIRE).load_table(table.name())
    wire.after = more
    with pytest.raises(IntegrityError, match=r"the commit was made.*properties/added"):
        requiring.append(rows(0, 3))
    wire.after = None
    assert ids(connect().load_table(table.name())) == [0, 1, 2]
    writing = connect().load_table(table.name())
    wire.after = more
    with pytest.warns(UserWarning, match=r"no longer sealed.*properties/added"):
        writing.append(rows(3, 4))


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("first", ["property", "append", "schema", "tag", "rotate"])
@pytest.mark.parametrize("second", ["property", "append", "schema", "rotate"])
def test_of_two_commits_on_one_state_one_is_made(
    connect: Callable[..., Any], table: Any, wire: Wire, first: str, second: str, empty: bool
) -> None:
    """One whole commit runs before the request of another is sent: the second is refused, or begins again."""
    steps: dict[str, Callable[[Any], object]] = {
        "property": lambda one: one.transaction().set_properties({"a": secrets.token_hex(4)}).commit_transaction(),
        "append": lambda one: one.append(rows(5, 7)),
        "schema": lambda one: one.update_schema().add_column(f"c{secrets.token_hex(4)}", StringType()).commit(),
        "tag": lambda one: (
            one.manage_snapshots().create_tag(one.current_snapshot().snapshot_id, f"t{secrets.token_hex(4)}").commit()
        ),
        "rotate": rotate,
    }
    if empty and first == "tag":
        return
    if not empty:
        table.append(rows(0, 3))
    late, other = (connect(**REQUIRE).load_table(table.name()) for _ in range(2))
    waiting = [True]

    def between(request: PreparedRequest) -> None:
        if request.method == "POST" and "updates" in body_of(request) and waiting:
            waiting.clear()
            steps[first](other)

    wire.before = between
    with suppress(CommitFailedException):
        steps[second](late)
    newest = connect(**REQUIRE).load_table(table.name())
    assert not waiting
    assert ids(newest) == sorted(ids(newest))
    check_pin(newest, pin(other.refresh()))


def test_a_server_plans_no_scan_of_an_encrypted_table(catalog: Any, namespace: str, monkeypatch: Any) -> None:
    request = PlanTableScanRequest()
    table = new_table(catalog, namespace=namespace)
    table.append(rows(0, 3))
    wire = Wire(monkeypatch)
    with pytest.raises(PolicyError, match="plan_files"):
        catalog.plan_scan(f"{namespace}.t", request)
    assert wire.posted == []
    plain = catalog.create_table(f"{namespace}.plain", schema=SCHEMA)
    plain.append(rows(0, 3))
    (task,) = catalog.plan_scan(f"{namespace}.plain", request)
    assert task.file.record_count == 3


def test_tables_in_plaintext_pass_through(catalog: Any, namespace: str) -> None:
    table = catalog.create_table(f"{namespace}.plain", schema=SCHEMA)
    table.append(rows(0, 3))
    assert ids(table) == [0, 1, 2]
    assert raw_of(table)["format-version"] == 2
    assert catalog.list_views(namespace) == []
    with pytest.raises(PolicyError, match="encrypt"):
        table.transaction().set_properties({KEY_ID: MASTER}).commit_transaction()
    catalog.purge_table(f"{namespace}.plain")


# ---------------------------------------------------------------- keys


def test_no_key_goes_over_the_wire(catalog: Any, namespace: str, kms: dict[str, str], wire: Wire) -> None:
    table = new_table(catalog, namespace=namespace)
    table.append(rows(0, 3))
    table.delete("id = 1")
    rotate(table)
    text = wire.text()
    assert "add-snapshot" in text
    forms = key_forms(table)
    assert len(forms) > 6
    assert not [form for form in forms if form in text]
    assert not [name for name, value in kms.items() if name in text or value in text]
    assert "ags_fast.session" not in text


def test_turned_keys(connect: Callable[..., Any], table: Any) -> None:
    table.append(rows(0, 3))
    table.append(rows(3, 5))
    before = raw_of(table)
    rotate(table)
    after = raw_of(table)
    assert after["snapshots"] == before["snapshots"]
    assert after["refs"] == before["refs"]
    old, new = read_encryption_keys(before["encryption-keys"]), read_encryption_keys(after["encryption-keys"])
    assert {one.key_id for one in old if not one.is_kek} == {one.key_id for one in new if not one.is_kek}
    assert not {one.key_id for one in old if one.is_kek} & {one.key_id for one in new}
    rotate(table, what="mek", wrapping_key_id="other")
    raw = raw_of(table)
    assert raw["properties"][KEY_ID] == "other"
    assert {one["key-id"] for one in raw["encryption-keys"]} == {one.key_id for one in new}
    table.append(rows(5, 6))
    clear_cache()
    other = connect().load_table(table.name())
    assert ids(other) == [0, 1, 2, 3, 4, 5]
    assert ids(other, snapshot_id=raw["snapshots"][0]["snapshot-id"]) == [0, 1, 2]


def test_a_delete_by_vectors_and_an_expiry(connect: Callable[..., Any], table: Any) -> None:
    table.append(rows(0, 10))
    assert delete(table, "id = 3").rows == 1
    table.append(rows(10, 12))
    other = connect().load_table(table.name())
    left = [i for i in range(12) if i != 3]
    assert ids(other) == left
    assert [one.kind for one in files(other)].count("deletion-vector") == 1
    expired = expire(other, keep=1)
    assert not expired.failed
    assert "older metadata files stay" in expired.warnings[0]
    raw = raw_of(other)
    assert len(raw["snapshots"]) == 1
    assert len(raw["encryption-keys"]) == 2  # the list's key and its KEK
    assert ids(connect().load_table(table.name())) == left


def test_new_keys_for_manifests_and_data(connect: Callable[..., Any], table: Any) -> None:
    table.append(rows(0, 30))
    table.append(rows(30, 40))
    delete(table, "id = 7")
    before = {one.path for one in files(table)}
    for what in ("manifests", "data"):
        assert not rekey(table, what=what, engine=LocalEngine(0)).failed
    assert not before & {one.path for one in files(table)}
    expire(table)
    other = connect().load_table(table.name())
    assert ids(other) == [i for i in range(40) if i != 7]
    assert statuses(verify(other, orphans=True)) == {"ok"}


def test_upkeep_and_forced_expiry(connect: Callable[..., Any], table: Any) -> None:
    table.append(rows(0, 30))
    table.append(rows(30, 40))
    assert maintain(table, verify=1).counts["failed"] == 0
    for call in (rotate, rekey):
        result = call(table, force_expire=True)
        assert not result.failed
        assert result.expired is not None
        assert not result.expired.failed
        assert "older metadata files stay" in result.expired.warnings[0]  # they are the server's
    other = connect().load_table(table.name())
    assert len(raw_of(other)["snapshots"]) == 1
    assert ids(other) == list(range(40))
    assert statuses(maintain(other, verify=1)) == {"ok"}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("commits", [0, 2])
def test_a_table_in_plaintext_is_encrypted(
    connect: Callable[..., Any], namespace: str, version: int, commits: int
) -> None:
    table = connect().create_table(
        f"{namespace}.plain", schema=SCHEMA, properties={"format-version": str(version), "a": "b"}
    )
    for i in range(commits):
        table.append(rows(i, i + 1))
    assert raw_of(table)["format-version"] == version
    assert not encrypt(table, wrapping_key_id=MASTER, engine=LocalEngine(0)).failed
    table.append(rows(10, 13))
    other = connect(**{"encryption.plaintext-files": "allow"}).load_table(table.name())
    assert ids(other) == [*range(commits), 10, 11, 12]
    expire(other)
    raw = raw_of(other)
    assert (raw["format-version"], raw["next-row-id"], raw["properties"]["a"]) == (3, commits + 3, "b")
    assert {path.read_bytes()[:4] for path in paths_of(other)} == {b"PARE", b"AGS1", b'{"fo'}
    assert ids(connect().load_table(table.name())) == [*range(commits), 10, 11, 12]


def test_statistics_of_an_edit(table: Any) -> None:
    table.append(rows(0, 3))
    snapshot_id = table.current_snapshot().snapshot_id
    one = {"snapshot-id": snapshot_id, "statistics-path": f"{table.location()}/s.puffin", "file-size-in-bytes": 9}
    whole = {**one, "file-footer-size-in-bytes": 5, "blob-metadata": []}
    edit(table, lambda raw: {**raw, "statistics": [whole], "partition-statistics": [one]})
    raw = raw_of(table)
    assert raw["statistics"] == [whole]
    assert raw["partition-statistics"] == [one]
    edit(table, lambda raw: {**raw, "statistics": [], "partition-statistics": []})
    raw = raw_of(table)
    assert not raw.get("statistics")
    assert not raw.get("partition-statistics")


def test_an_answer_to_a_rotation_is_lost(connect: Callable[..., Any], table: Any, wire: Wire) -> None:
    """The table says that the rotation is there, so it is not done again."""
    table.append(rows(0, 3))
    before = raw_of(table)["encryption-keys"]
    wire.status = lambda request: 502 if request.method == "POST" else None
    rotate(table)
    assert len([one for one in wire.requests if one.method == "POST"]) == 2  # the append, and the rotation
    wire.status = lambda request: None
    assert raw_of(connect().load_table(table.name()))["encryption-keys"] != before
    assert ids(table) == [0, 1, 2]


def test_an_edit_sends_what_changes(table: Any, wire: Wire) -> None:
    table.append(rows(0, 3))
    edit(table, lambda raw: {**raw, "properties": {**raw["properties"], "comment": "x"}})
    sent = wire.posted[-1]
    seal, fence = {"ags.seal": raw_of(table)["properties"]["ags.seal"]}, ["add-snapshot", "remove-snapshots"]
    assert sent["updates"][2:] == [{"action": "set-properties", "updates": {"comment": "x", **seal}}]
    assert [one["action"] for one in sent["updates"][:2]] == fence
    assert len(sent["requirements"]) == len({"table-uuid", "main", "schema", "field", "partition", "spec", "order"})
    assert table.properties["comment"] == "x"
    edit(table, lambda raw: {**raw, "properties": {KEY_ID: MASTER}})
    assert raw_of(table)["properties"].keys() == {KEY_ID, "ags.seal"}


@pytest.mark.parametrize(
    "change",
    [
        {"new-field": 1},
        {"next-row-id": 1000},
        {"snapshots": [{"snapshot-id": 1}]},
        {"schemas": []},
    ],
)
def test_an_edit_without_words(table: Any, wire: Wire, change: dict[str, Any]) -> None:
    table.append(rows(0, 3))
    if "snapshots" in change:
        change = {"snapshots": [{**raw_metadata(table)["snapshots"][0], "new": 1}]}
    before, posted = raw_of(table), len(wire.posted)
    with pytest.raises(UnsupportedChangeError):
        edit(table, lambda raw: {**raw, **change})
    assert len(wire.posted) == posted
    table.refresh()
    assert raw_of(table) == before


# ---------------------------------------------------------------- commits that come between


@pytest.mark.parametrize("branch", ["main", "a new one"])
def test_an_append_comes_before_a_rotation(
    connect: Callable[..., Any], table: Any, monkeypatch: pytest.MonkeyPatch, branch: str
) -> None:
    """The edit has no requirement for a branch that it does not know. Keys of that branch must not get lost."""
    table.append(rows(0, 3))
    other = connect().load_table(table.name())
    calls: list[int] = []
    from ags_fast.iceberg import rotation

    decide = rotation.rotated_keks

    def late(raw: dict[str, Any], *args: Any, **named: Any) -> Any:
        made = decide(raw, *args, **named)
        if not calls:
            if branch != "main":
                with other.manage_snapshots() as manage:
                    manage.create_branch(other.current_snapshot().snapshot_id, branch)
            other.append(rows(3, 5), branch=branch)
        calls.append(1)
        return made

    monkeypatch.setattr(rotation, "rotated_keks", late)
    rotate(table)
    assert len(calls) == 2
    clear_cache()
    fresh = connect().load_table(table.name())
    found = fresh.scan().use_ref(branch).to_arrow()["id"].to_pylist()
    assert sorted(found) == [0, 1, 2, 3, 4]
    keys = read_encryption_keys(raw_of(fresh)["encryption-keys"])
    assert [one.is_kek for one in keys].count(True) == 1


def test_an_append_that_began_before_a_rotation(connect: Callable[..., Any], table: Any, wire: Wire) -> None:
    """The server refuses it, and it comes again under the new KEK: the old one does not come back."""
    table.append(rows(0, 3))
    late = connect().load_table(table.name())
    late.metadata  # noqa: B018 - loaded before
    rotate(table)
    append_until_done(late, 3, 4)
    assert any("409" in one and "sequence number" in one for one in wire.answers)
    assert ids(late) == [0, 1, 2, 3]
    keys = read_encryption_keys(raw_of(late)["encryption-keys"])
    assert [one.is_kek for one in keys].count(True) == 1


def without_fence(body: dict[str, Any]) -> dict[str, Any]:
    """A commit as a server takes it that does not look at sequence numbers."""
    fenced = {
        one["snapshot"]["snapshot-id"]
        for one in body.get("updates") or ()
        if one["action"] == "add-snapshot" and "/fence-" in one["snapshot"]["manifest-list"]
    }
    kept = [
        one
        for one in body.get("updates") or ()
        if one.get("snapshot", {}).get("snapshot-id") not in fenced and one.get("snapshot-ids") != list(fenced)
    ]
    return {**body, "updates": kept} if fenced else body


def test_a_server_that_sees_no_conflict(connect: Callable[..., Any], table: Any, wire: Wire) -> None:
    """A KEK that a new snapshot needs is put back, and the keys are turned again."""
    table.append(rows(0, 3))
    other = connect().load_table(table.name())
    with other.manage_snapshots() as manage:
        manage.create_branch(other.current_snapshot().snapshot_id, "dev")
    late: list[int] = []

    def before(request: PreparedRequest) -> None:
        if request.method != "POST" or "remove-encryption-key" not in str(body_of(request)):
            return
        if not late:
            late.append(1)
            other.append(rows(3, 5), branch="dev")
            # Nor does it know the requirement for a branch that has moved.
            changed(request, lambda body: {**without_fence(body), "requirements": body["requirements"][:1]})
        else:
            changed(request, without_fence)

    wire.before = before
    rotate(table)
    assert late
    clear_cache()
    fresh = connect().load_table(table.name())
    assert sorted(fresh.scan().use_ref("dev").to_arrow()["id"].to_pylist()) == [0, 1, 2, 3, 4]
    keys = read_encryption_keys(raw_of(fresh)["encryption-keys"])
    assert [one.is_kek for one in keys].count(True) == 1


def test_a_delete_on_a_server_that_sees_no_conflict(connect: Callable[..., Any], table: Any, wire: Wire) -> None:
    """The table has more keys than the delete made, but the delete is there: its files must stay."""
    table.append(rows(0, 10))
    other = connect().load_table(table.name())
    late: list[int] = []

    def on_top(body: dict[str, Any]) -> dict[str, Any]:
        for one in body["updates"]:
            if one["action"] == "add-snapshot":
                one["snapshot"] |= {"sequence-number": 3, "first-row-id": 12}
        return {**body, "requirements": body["requirements"][:1]}

    def before(request: PreparedRequest) -> None:
        if request.method == "POST" and not late:
            late.append(1)
            with other.manage_snapshots() as manage:
                manage.create_branch(other.current_snapshot().snapshot_id, "dev")
            other.append(rows(20, 22), branch="dev")
            changed(request, on_top)

    wire.before = before
    assert delete(table, "id = 3").rows == 1
    clear_cache()
    fresh = connect().load_table(table.name())
    assert ids(fresh) == [i for i in range(10) if i != 3]
    assert sorted(fresh.scan().use_ref("dev").to_arrow()["id"].to_pylist()) == [*range(10), 20, 21]
    assert len(fresh.metadata.snapshots) == 3


def test_a_late_append_on_a_server_that_sees_no_conflict(connect: Callable[..., Any], table: Any, wire: Wire) -> None:
    """It brings its KEK along, so its rows are there to be read."""
    table.append(rows(0, 3))
    late = connect().load_table(table.name())
    wire.before = lambda request: changed(request, without_fence) if request.method == "POST" else None
    rotate(table)
    append_until_done(late, 3, 4)
    clear_cache()
    fresh = connect().load_table(table.name())
    assert ids(fresh) == [0, 1, 2, 3]


def test_edits_that_always_come_second(table: Any, connect: Callable[..., Any]) -> None:
    table.append(rows(0, 1))
    other = connect().load_table(table.name())
    taken = itertools.count(1)

    def change(raw: dict[str, Any]) -> dict[str, Any]:
        i = next(taken)
        other.append(rows(i, i + 1))
        return {**raw, "properties": {**raw["properties"], "never": "set"}}

    with pytest.raises(ConcurrentChangeError):
        edit(table, change)
    table.refresh()
    assert "never" not in table.properties


def test_threads_append_while_keys_turn(connect: Callable[..., Any], table: Any) -> None:
    append_until_done(table, 0, 1)
    done = threading.Event()

    def write(writer: int) -> None:
        mine = connect().load_table(table.name())
        for i in range(4):
            append_until_done(mine, writer * 10 + i, writer * 10 + i + 1)

    def turn() -> int:
        mine, turns = connect().load_table(table.name()), 0
        while not done.is_set():
            turns += turned(mine)
        return turns

    with ThreadPoolExecutor(4) as pool:
        turns = pool.submit(turn)
        list(pool.map(write, range(1, 4)))
        done.set()
    assert turns.result() > 0
    clear_cache()
    fresh = connect().load_table(table.name())
    assert ids(fresh) == [0, *(writer * 10 + i for writer in range(1, 4) for i in range(4))]
    assert statuses(verify(fresh)) == {"ok"}


def turned(table: Any) -> bool:
    try:
        rotate(table)
    except ConcurrentChangeError:
        return False
    return True


def test_processes_append_while_keys_turn(
    server: str, connect: Callable[..., Any], table: Any, kms: dict[str, str]
) -> None:
    append_until_done(table, 0, 1)
    name, properties = ".".join(table.name()), {"type": "rest", "uri": server}
    commits, writers = 4, range(1, 7)
    running = [
        start_python(program(iceberg_writers.append, name, kms, properties, 100 * writer, commits))
        for writer in writers
    ]
    try:
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        for one in running:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        turns = 0
        while any(one.poll() is None for one in running):
            turns += turned(table)
            time.sleep(0.2)
        assert [finish_python(one).strip() for one in running] == ["done"] * len(running)
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert turns > 0
    clear_cache()
    fresh = connect().load_table(table.name())
    assert ids(fresh) == [0, *(100 * writer + i for writer in writers for i in range(commits))]
    raw = raw_of(fresh)
    spans = sorted((one["first-row-id"], one["added-rows"]) for one in raw["snapshots"])
    assert spans == [(i, 1) for i in range(1 + commits * len(writers))]
    assert statuses(verify(fresh)) == {"ok"}


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["py-io-impl", "PY-IO-IMPL", "encryption.kms-type", "kms.local.path", "s3.endpoint"])
def test_settings_of_a_client_are_refused(catalog: Any, namespace: str, table: Any, wire: Wire, name: str) -> None:
    with pytest.raises(PolicyError, match="names"):
        table.transaction().set_properties({name: "pyiceberg.io.pyarrow.PyArrowFileIO"}).commit_transaction()
    with pytest.raises(PolicyError, match="names"):
        new_table(catalog, "other", namespace=namespace, **{name: "x"})
    assert wire.posted == []


@pytest.mark.parametrize("change", [{KEY_ID: "other"}, {"encryption.data-key-length": "17"}])
def test_changes_of_the_encryption_are_refused(table: Any, wire: Wire, change: dict[str, str]) -> None:
    with pytest.raises(PolicyError):
        table.transaction().set_properties(change).commit_transaction()
    with pytest.raises(PolicyError):
        table.transaction().remove_properties(KEY_ID).commit_transaction()
    assert wire.posted == []


@pytest.mark.parametrize("name", ["py-io-impl", "Py-Io-Impl", "encryption.kms-impl", "ags_fast.session", KEY_ID])
@pytest.mark.parametrize("place", ["config", "storage-credentials"])
def test_a_server_does_not_choose_for_the_client(catalog: Any, table: Any, wire: Wire, name: str, place: str) -> None:
    config = {name: "evil.Class"}
    more = config if place == "config" else [{"prefix": "file:", "config": config}]
    wire.after = lambda body: body.update({place: more})
    with pytest.raises(PolicyError, match="the table's server sends"):
        catalog.load_table(table.name())


@pytest.mark.parametrize("name", ["py-io-impl", "encryption.kms-type", "kms.local.path", "ags_fast.session"])
def test_a_server_does_not_choose_for_the_catalog(connect: Callable[..., Any], wire: Wire, name: str) -> None:
    wire.after = lambda body: body.setdefault("overrides", {}).update({name: "evil"})
    with pytest.raises(PolicyError, match="the server sends"):
        connect()


@pytest.mark.parametrize("name", ["s3.retry-strategy-impl", "write.py-location-provider.impl", "py-io-impl"])
@pytest.mark.parametrize("place", ["config", "storage-credentials", "properties"])
def test_a_server_names_no_code(catalog: Any, namespace: str, wire: Wire, name: str, place: str) -> None:
    """Not for a table in plaintext either, and at no change of it."""
    table = catalog.create_table(f"{namespace}.plain", schema=SCHEMA)

    def change(body: dict[str, Any]) -> None:
        if place == "properties" and "metadata" in body:
            body["metadata"]["properties"][name] = "evil.Class"
        elif place != "properties":
            config = {name: "evil.Class"}
            body[place] = config if place == "config" else [{"prefix": "file:", "config": config}]

    wire.after = change
    for call in (lambda: catalog.load_table(table.name()), lambda: table.append(rows(0, 3)), table.refresh):
        with pytest.raises(PolicyError, match=name):
            call()


def test_a_server_chooses_no_class_that_authenticates(connect: Callable[..., Any], wire: Wire) -> None:
    """PyIceberg takes this class before the catalog is there, and calls it with the arguments that are sent."""
    evil = {"type": "custom", "impl": "subprocess.Popen", "custom": {"args": ["false"]}}
    wire.after = lambda body: body.setdefault("overrides", {}).update({"auth": evil, "ssl": {"cabundle": "/x"}})
    made = connect()
    assert not {"auth", "ssl"} & made.properties.keys()
    wire.after = lambda body: body.setdefault("defaults", {}).update({"s3.retry-strategy-impl": "evil.Class"})
    with pytest.raises(PolicyError, match="the server sends"):
        connect()


@pytest.mark.parametrize(
    "sent", [{"prefix": "x?"}, {"prefix": "x#y"}, {"namespace-separator": "%2F"}, {"uri": "h://x?"}]
)
def test_a_server_does_not_hide_what_a_request_asks(connect: Callable[..., Any], wire: Wire, sent: Any) -> None:
    """The path would end earlier, and the answer be taken for another's."""
    wire.after = lambda body: body.setdefault("overrides", {}).update(sent)
    with pytest.raises(PolicyError, match="paths of requests"):
        connect()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
def test_an_answer_is_checked_as_pyiceberg_decodes_it(
    catalog: Any, namespace: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    plain = catalog.create_table(f"{namespace}.plain", schema=SCHEMA)
    send = HTTPAdapter.send

    def sent(adapter: HTTPAdapter, *args: Any, **named: Any) -> Response:
        answer = send(adapter, *args, **named)
        body = answer.json()
        body["metadata"]["properties"] = {"py-io-impl": "evil.run"}
        vars(answer)["_content"] = json.dumps(body).encode(encoding)
        answer.encoding = encoding
        return answer

    monkeypatch.setattr(HTTPAdapter, "send", sent)
    with pytest.raises(PolicyError, match="py-io-impl"):
        catalog.load_table(plain.name())


@pytest.mark.parametrize("change", [{"snapshots": "x"}, {"refs": []}, {"last-updated-ms": "7"}, {"location": 7}])
def test_an_answer_of_odd_types(catalog: Any, table: Any, wire: Wire, change: dict[str, Any]) -> None:
    wire.after = lambda body: body["metadata"].update(change)
    with pytest.raises(FormatError, match="is not table metadata"):
        catalog.load_table(table.name())


def test_a_server_does_not_redirect(catalog: Any, table: Any, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    send = HTTPAdapter.send

    def elsewhere(adapter: HTTPAdapter, request: PreparedRequest, *args: Any, **named: Any) -> Response:
        answer = send(adapter, request, *args, **named)
        if "/tables/" in str(request.url):
            answer.status_code = 307
            answer.headers["Location"] = str(request.url).replace("/tables/", "/x/")
        return answer

    monkeypatch.setattr(HTTPAdapter, "send", elsewhere)
    for call in (lambda: catalog.load_table(table.name()), lambda: table.append(rows(0, 1)), lambda: rotate(table)):
        with pytest.raises(PolicyError, match="redirects to"):
            call()
    assert not [one for one in wire.requests if "/x/" in str(one.url)]


@pytest.mark.parametrize("properties", [{}, {KEY_ID: MASTER}])
def test_properties_that_pyiceberg_is_not_shown(
    connect: Callable[..., Any], catalog: Any, namespace: str, properties: dict[str, str]
) -> None:
    name = f"{namespace}.t"
    made = catalog.create_table_transaction(name, schema=SCHEMA, properties={**properties, "comment": "x"})
    made.append(rows(0, 3))
    made.commit_transaction()
    table = connect().load_table(name)
    assert table.properties["comment"] == "x"
    assert "comment" not in table.metadata.properties
    table.transaction().set_properties({"comment": "y", "team": "z"}).commit_transaction()
    assert raw_of(table)["properties"].items() >= {"comment": "y", "team": "z"}.items()
    with table.transaction() as transaction:
        transaction.remove_properties("comment")
        transaction.append(rows(3, 4))
    raw = raw_of(table)["properties"]
    assert {name: value for name, value in raw.items() if name != "ags.seal"} == table.properties
    assert "comment" not in raw
    assert raw["team"] == "z"
    assert ids(connect().load_table(name)) == [0, 1, 2, 3]


def test_a_server_sends_credentials(catalog: Any, table: Any, wire: Wire) -> None:
    sent = {"s3.access-key-id": "vended", "client.region": "x", "py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}
    wire.after = lambda body: body.update({"config": sent})
    loaded = catalog.load_table(table.name())
    assert loaded.io.properties["s3.access-key-id"] == "vended"
    assert type(loaded.io).__module__ == "ags_fast.iceberg.io"
    assert loaded.io.session is catalog.session


def test_a_server_that_does_not_know_of_keys(table: Any, wire: Wire) -> None:
    def forget(body: dict[str, Any]) -> None:
        for one in body.get("metadata", {}).get("snapshots") or ():
            one.pop("key-id", None)

    wire.after = forget
    with pytest.raises(PolicyError, match="does not know of Iceberg's table encryption"):
        table.append(rows(0, 3))


def test_a_conflict_that_an_older_server_calls_a_bad_request(
    connect: Callable[..., Any], table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.append(rows(0, 3))
    late = connect().load_table(table.name())
    table.append(rows(3, 4), branch="main")
    send = HTTPAdapter.send

    def old(adapter: HTTPAdapter, request: PreparedRequest, *args: Any, **named: Any) -> Response:
        if request.method == "POST":  # no requirement, so that the row ids decide
            changed(request, lambda body: {**body, "requirements": []})
        answer = send(adapter, request, *args, **named)
        answer.status_code = 400 if answer.status_code == 409 else answer.status_code
        return answer

    monkeypatch.setattr(HTTPAdapter, "send", old)
    with pytest.raises(CommitFailedException):
        late.catalog.commit_table(late, *commit_of(late, rows(4, 5)))


def commit_of(table: Any, more: Any) -> tuple[Any, Any]:
    """The requirements and updates of an append, without its attempts."""
    transaction = table.transaction()
    transaction.append(more)
    return vars(transaction)["_requirements"], vars(transaction)["_updates"]


def test_all_snapshots_are_loaded(connect: Callable[..., Any], table: Any, wire: Wire) -> None:
    """Or keys of others would look unused, and an expiry would remove them."""
    table.append(rows(0, 3))
    table.overwrite(rows(3, 5))
    loaded = connect(**{"snapshot-loading-mode": "refs"}).load_table(table.name())
    assert "snapshots=all" in (wire.requests[-1].url or "")
    assert len(loaded.metadata.snapshots) == len(raw_of(table)["snapshots"]) > 1


def test_what_is_never_pickled(catalog: Any, table: Any) -> None:
    for one in (catalog, table, catalog.session):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(one)


# ---------------------------------------------------------------- Java beside us


def test_java_reads_and_appends(server: str, judge: Judge) -> None:
    """What the server made of our commits, row for row, with row ids; and we go on after Java's append."""
    catalog = load_catalog("tests", kms=judge.kms, type="rest", uri=server)
    catalog.create_namespace("java")
    table = new_table(catalog, namespace="java")
    table.append(rows(0, 20))
    rotate(table)
    table.append(rows(20, 30))
    delete(table, "id = 7")
    rotate(table, what="mek")
    table.append(rows(40, 41))
    left = [(i, f"name {i}") for i in (*range(30), 40) if i != 7]
    name = judge.name()
    judge.register(name, table.metadata_location)
    assert judge.rows(name, order_by="id") == left
    first = table.metadata.snapshots[0].snapshot_id
    assert judge.rows(name, order_by="id", at=first) == [(i, f"name {i}") for i in range(20)]
    assert [row[2] for row in judge.lineage(name, order_by="id")] == [i for i in range(31) if i != 7]
    judge.append(name, [(100, "Java's")])
    again = catalog.register_table("java.again", judge.metadata_location(name))
    again.append(rows(101, 102))
    assert ids(again) == [*(i for i, _ in left), 100, 101]
    judge.register(name, again.metadata_location)
    assert judge.rows(name, order_by="id") == [*left, (100, "Java's"), (101, "name 101")]
