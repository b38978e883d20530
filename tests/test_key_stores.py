"""Key stores: what all kinds do, what a log does with them, and where a process may die."""

from __future__ import annotations

import base64
import hashlib
import os
import pickle
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import keystore
from programs import wrapping
from support import finish_python, program, start_python

pytest.importorskip("msgspec")

from datasets import new_row, replace_keks, rewrap_keks

from ags_fast.dataset import reach
from ags_fast.dataset.change import Wish
from ags_fast.dataset.dataset import Dataset
from ags_fast.dataset.draft import Draft, Idle
from ags_fast.dataset.entry import Entry
from ags_fast.dataset.job import Job
from ags_fast.dataset.kinds import Want
from ags_fast.dataset.log import Log
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError, UnknownKeyError
from ags_fast.fs import Store
from ags_fast.keys import clear_cache, load_kms
from ags_fast.keys.entry import ROW, KeyEntry
from ags_fast.keys.kms import local
from ags_fast.keys.stores import (
    FolderKeyStore,
    KeyResolver,
    KeyStore,
    MemoryKeyStore,
    Wraps,
    job_of_row,
    open_key_store,
    rows_of,
)
from ags_fast.keys.stores.base import row_name

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from servers.postgres import Postgres

    from ags_fast.keys import KmsClient

MAIN = Want("master")
KINDS = ("memory", "folder", "sqlite", "postgres")


@pytest.fixture
def kms(tmp_path: Path) -> KmsClient:
    clear_cache()
    return load_kms(keystore(tmp_path, "master", "other"))


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("psycopg")
    from servers.postgres import postgres as started

    with started() as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PGPASSWORD", server.password)
        yield server


@pytest.fixture(params=KINDS)
def reached(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Return stores of one place that know nothing of each other."""
    if request.param == "memory":
        store = MemoryKeyStore()
        return lambda: store
    if request.param == "folder":
        return lambda: open_key_store(tmp_path / "keys")
    pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{tmp_path}/keys.db"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres").url
    return lambda: open_key_store(url)


def rows(count: int, job_id: str | None = None) -> dict[str, bytes]:
    job_id = job_id or new_job_id()
    return {
        row_name(job_id, wrapped): wrapped for wrapped in (bytes([i % 256, i // 256, 0, 255]) for i in range(count))
    }


class TestKeyStores:
    """What all kinds do."""

    def test_the_protocol(self, reached: Callable[[], Any], tmp_path: Path) -> None:
        store, one, other = reached(), f"a/{tmp_path}", "..\0'\"" if isinstance(reached(), MemoryKeyStore) else "..'\""
        assert isinstance(store, KeyStore)
        assert isinstance(store, KeyResolver)
        some, more = rows(3), rows(2)
        names = [*some]
        assert store.get(one, names) == {}
        store.put(one, some)
        store.put(other, more)
        assert reached().get(one, names[:2]) == {name: some[name] for name in names[:2]}
        assert reached().get(one, [*more]) == {}  # another dataset's
        assert {*reached().list(one)} == {*some}
        assert {*reached().list(other)} == {*more}
        assert [*reached().list("a")] == []
        store.put(one, {**some, **more})  # what is there stays
        store.remove(one, [names[0], "absent", *more])
        store.remove(one, [])
        assert reached().get(one, names) == {name: some[name] for name in names[1:]}
        store.remove(one, names)
        store.remove(other, [*more])
        assert [*reached().list(one)] == [*reached().list(other)] == []

    def test_a_row_never_changes(self, reached: Callable[[], Any], tmp_path: Path) -> None:
        store, (name, wrapped) = reached(), next(iter(rows(1).items()))
        store.put(f"{tmp_path}", {name: wrapped})
        store.put(f"{tmp_path}", {name: b"another"})
        assert store.get(f"{tmp_path}", [name]) == {name: wrapped}
        store.remove(f"{tmp_path}", [name])

    def test_many_rows(self, reached: Callable[[], Any], tmp_path: Path) -> None:
        store, many = reached(), rows(1201)
        store.put(f"{tmp_path}", many)
        assert store.get(f"{tmp_path}", [*many]) == many
        store.remove(f"{tmp_path}", [*many])
        assert [*store.list(f"{tmp_path}")] == []

    def test_stores_begin_at_once(self, reached: Callable[[], Any], tmp_path: Path) -> None:
        """Whoever is first makes the tables."""
        parts, errors = [rows(5) for _ in range(6)], list[BaseException]()
        barrier = threading.Barrier(len(parts))

        def put(part: dict[str, bytes]) -> None:
            store = reached()
            barrier.wait()
            try:
                store.put(f"{tmp_path}", part)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=put, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert {*reached().list(f"{tmp_path}")} == {name for part in parts for name in part}

    def test_pickles(self, reached: Callable[[], Any], tmp_path: Path) -> None:
        store, some = reached(), rows(2)
        store.put(f"{tmp_path}", some)
        if isinstance(store, MemoryKeyStore):
            with pytest.raises(TypeError, match="Envelope"):
                pickle.dumps(store)
        else:
            assert pickle.loads(pickle.dumps(store)).get(f"{tmp_path}", [*some]) == some

    def test_no_wrap_is_shown(self, reached: Callable[[], Any], tmp_path: Path) -> None:
        store, some = reached(), rows(1)
        store.put(f"{tmp_path}", some)
        for wrapped in some.values():
            assert wrapped.hex() not in repr(store)
            assert str(wrapped)[2:-1] not in repr(store)

    def test_a_dataset(self, reached: Callable[[], Any], tmp_path: Path, kms: KmsClient) -> None:
        """Files are written and read, KEKs and the master key turn, and rows come and go."""
        log = new_log(tmp_path / "d", kms, reached(), str(tmp_path))
        add(log, "a", "b")
        assert rows_at(reached(), log) == named(log)
        replace_keks(Job.begin(log, "rotate"))
        assert len(named(log)) == 2
        assert rows_at(reached(), log) == named(log)
        old = named(log)
        rewrap_keks(log, "master")
        assert rows_at(reached(), log) == named(log)
        assert old.isdisjoint(named(log))
        clear_cache()
        again = Log(log.store, kms, key_store=reached())
        assert {*paths(again)} == {"a", "b"}
        add(again, "c")
        reach.expire(again, Idle(), lambda head: head.number, skip_grace=True, now_ms=0)
        assert len(named(again)) == 1
        assert rows_at(reached(), again) == named(again)
        # A log that was read before finds the newest wraps, and one that looks at an old version, too.
        clear_cache()
        assert {*paths(log)} == {"a", "b", "c"}

    def test_no_wrap_is_in_the_dataset(self, reached: Callable[[], Any], tmp_path: Path, kms: KmsClient) -> None:
        log = new_log(tmp_path / "d", kms, reached(), str(tmp_path))
        job = Job.begin(log, "write", {Want("other"): 1})
        new_row(job, "a", Want("other"))
        wraps = reached().get(str(tmp_path), rows_at(reached(), log))
        assert len(wraps) == 2
        for listed in log.store.list():
            data = log.store.read_small(listed.path, 1 << 20)
            for wrapped in wraps.values():
                assert wrapped not in data
                assert base64.b64encode(wrapped) not in data
        job.give_up()
        assert rows_at(reached(), log) == named(log)


# ---------------------------------------------------------------------------------------------------------- a log


def new_log(folder: Path, kms: KmsClient, key_store: Any, dataset_id: str = "id") -> Log:
    log = Log(Store(folder), kms, key_store=key_store)
    from ags_fast.dataset.policy import Policy

    log.create(Entry.first_of(dataset_id, MAIN.new_kek(kms.for_dataset(dataset_id)), Policy()))
    return log


def add(log: Log, *paths: str, kind: Want = MAIN) -> None:
    """Commit files, whose content is of no matter here."""
    job = Job.begin(log, "write", {kind: len(paths)})
    new = [new_row(job, path, kind) for path in paths]
    for one in new:
        log.store.write_small(one.file, b"content")
    job.commit(Wish("write", new))


def paths(log: Log) -> list[str]:
    """Open every table and every data key."""
    head = log.head()
    envelope, found = log.envelope(head), []
    for row in Snapshot(log, head).files():
        for key_id, wrapped, bound in row.wraps(head.dataset_id):
            assert len(envelope.unwrap(key_id, wrapped, bound)) == 16
        found.append(row.path)
    return found


def named(log: Log) -> set[str]:
    return {*rows_of(log.head().keys.values())}


def rows_at(store: Any, log: Log) -> set[str]:
    return {*store.list(log.head().dataset_id)}


class Killed(BaseException):
    """The process dies."""


class Watched:
    """A key store in memory that tells what is asked of it, and may die."""

    def __init__(self) -> None:
        self.store, self.dies = MemoryKeyStore(), ""
        self.asked: builtins.list[str] = []

    def _ask(self, what: str) -> None:
        if what == self.dies:
            raise Killed
        self.asked.append(what)

    def get(self, dataset_id: str, names: Collection[str]) -> dict[str, bytes]:
        self._ask("get")
        return self.store.get(dataset_id, names)

    def put(self, dataset_id: str, rows: Mapping[str, bytes]) -> None:
        self._ask("put")
        self.store.put(dataset_id, rows)

    def list(self, dataset_id: str) -> builtins.list[str]:
        self._ask("list")
        return self.store.list(dataset_id)

    def remove(self, dataset_id: str, names: builtins.list[str]) -> None:
        self._ask("remove")
        self.store.remove(dataset_id, names)


def test_one_request_for_many_keys(tmp_path: Path, kms: KmsClient) -> None:
    store = Watched()
    log = new_log(tmp_path / "d", kms, store)
    for i in range(5):
        add(log, f"{i}", kind=Want("master", True, False, f"scope {i}"))
    assert store.asked == ["put"] * 6
    store.asked.clear()
    log = Log(log.store, kms, key_store=store)
    rows = [*Snapshot(log, log.head()).files()]
    assert store.asked == ["get"]  # the sealer
    envelope = Snapshot(log, log.head()).holding({row.key_id for row in rows}).envelope
    assert store.asked == ["get", "get"]
    assert [*paths(log)] == [row.path for row in rows]
    assert store.asked == ["get", "get"]
    shipped = pickle.loads(pickle.dumps(envelope))  # it has the keys, and does not need the store
    (key_id, wrapped, bound), *_ = rows[0].wraps("id")
    assert shipped.unwrap(key_id, wrapped, bound) == envelope.unwrap(key_id, wrapped, bound)
    for text in (repr(log.envelope(log.head()).entries), repr(envelope)):
        assert base64.b64encode(store.store.get("id", named(log)).popitem()[1]).decode() not in text


def test_a_whole_envelope_is_sent_with_its_store(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms, FolderKeyStore(tmp_path / "keys"))
    add(log, "a")
    (row,) = Snapshot(log, log.head()).files()
    shipped = pickle.loads(pickle.dumps(log.envelope(log.head())))
    ((key_id, wrapped, bound),) = row.wraps("id")
    clear_cache()
    assert len(shipped.unwrap(key_id, wrapped, bound)) == 16
    assert set(shipped.entries) == set(log.head().keys)


def test_rows_come_before_what_names_them(tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Watched()
    log = new_log(tmp_path / "d", kms, store)
    add(log, "a")
    create = log.store.create_exclusive

    def created(path: str, data: bytes) -> None:
        store.asked.append(path.split("/")[1])
        create(path, data)

    monkeypatch.setattr(log.store, "create_exclusive", created)
    store.asked.clear()
    replace_keks(Job.begin(log, "rotate"))
    assert store.asked == ["plans", "plans", "put", "tables", "log"]
    store.asked.clear()
    rewrap_keks(log, "master")
    assert store.asked == ["plans", "get", "put", "log", "list", "remove"] or "get" not in store.asked
    assert store.asked.index("put") < store.asked.index("log") < store.asked.index("remove")


@pytest.mark.parametrize("dies", ["put", "list", "remove", "plans", "log", "tables"])
@pytest.mark.parametrize("operation", ["kek", "mek", "expire", "write"])
def test_a_death_loses_nothing_and_leaves_nothing(
    operation: str, dies: str, tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each step, and then one sweep."""
    store = Watched()
    log = new_log(tmp_path / "d", kms, store)
    add(log, "a")
    replace_keks(Job.begin(log, "rotate"))
    work: dict[str, Callable[[], Any]] = {
        "kek": lambda: replace_keks(Job.begin(log, "rotate")),
        "mek": lambda: rewrap_keks(log, "master"),
        "expire": lambda: reach.expire(log, Idle(), lambda head: head.number, skip_grace=True, now_ms=0),
        "write": lambda: add(log, "b", kind=Want("other")),
    }
    create = log.store.create_exclusive

    def created(path: str, data: bytes) -> None:
        if path.startswith(f"_ags/{dies}/"):
            raise Killed
        create(path, data)

    monkeypatch.setattr(log.store, "create_exclusive", created)
    store.dies = dies
    try:
        work[operation]()
    except Killed:
        pass
    store.dies = ""
    monkeypatch.undo()
    clear_cache()
    log = Log(Store(tmp_path / "d"), kms, key_store=store.store)
    assert named(log) <= rows_at(store.store, log)
    reach.sweep(log, Idle(), 0)
    for plan_id in log.plans():  # the test's own process holds its lock
        log.store.delete(f"_ags/plans/{plan_id}/plan")
    reach.sweep(log, Idle(), 0)
    assert rows_at(store.store, log) == named(log)
    assert {*paths(log)} in ({"a"}, {"a", "b"})
    add(log, "c")
    assert "c" in paths(log)


def test_a_sweep_leaves_the_rows_of_open_jobs(tmp_path: Path, kms: KmsClient) -> None:
    store = MemoryKeyStore()
    log = new_log(tmp_path / "d", kms, store)
    job = Job.begin(log, "write", {Want("other"): 1})
    stray = rows(1)
    store.put("id", {**stray, "nobody's": b"x"})
    other = Log(log.store, kms, key_store=store)
    reach.sweep(other, Idle())
    assert rows_at(store, other) == named(other) | {*job.keys.rows(job.base), "nobody's"}
    new = new_row(job, "a", Want("other"))
    log.store.write_small(new.file, b"content")
    job.commit(Wish("write", [new]))
    assert [*paths(other)] == ["a"]
    dead = Job.begin(log, "write", {Want("other", True, False, "scope"): 1})
    dead.release()
    reach.sweep(other, Idle())
    assert rows_at(store, other) == named(other) | {"nobody's"}
    assert {job_of_row(row) for row in stray} != {None}


def test_writers_at_once(tmp_path: Path, kms: KmsClient) -> None:
    """Each brings a KEK of its own, while others turn the keys, expire and sweep."""
    store, errors = FolderKeyStore(tmp_path / "keys"), list[BaseException]()
    new_log(tmp_path / "d", kms, store)

    def run(work: Callable[[Log], Any]) -> None:
        try:
            for _ in range(4):
                work(Log(Store(tmp_path / "d"), kms, key_store=store))
        except BaseException as error:
            errors.append(error)

    def write(log: Log) -> None:
        name = new_job_id()
        add(log, name, kind=Want("master", True, False, name))

    works: list[Callable[[Log], Any]] = [
        write,
        write,
        lambda log: rewrap_keks(log, "master"),
        lambda log: reach.expire(log, Idle(), lambda head: head.number - 1, skip_grace=True, now_ms=0),
        lambda log: reach.sweep(log, Idle(), 1000),
    ]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    clear_cache()
    log = Log(Store(tmp_path / "d"), kms, key_store=store)
    assert len(paths(log)) == 8
    reach.sweep(log, Idle())
    assert rows_at(store, log) == named(log)


# ------------------------------------------------------------------------------------------------ rotations


def test_who_reads_while_the_master_key_turns(tmp_path: Path, kms: KmsClient) -> None:
    """A log that was read before names rows that are gone: it looks at the newest version."""
    store = MemoryKeyStore()
    writer = new_log(tmp_path / "d", kms, store)
    add(writer, "a", kind=Want("other", columns=True))
    reader = Log(writer.store, kms, key_store=store)
    snapshot = Snapshot(reader, reader.head())
    rewrap_keks(writer, "other")
    rewrap_keks(writer, "master")
    clear_cache()
    (row,) = snapshot.files()
    contents = snapshot.holding(row.key_ids())
    ((key_id, wrapped, bound),) = row.wraps("id")
    assert len(contents.envelope.unwrap(key_id, wrapped, bound)) == 16
    with pytest.raises(UnknownKeyError, match="no row"):
        reader.kek_rows.whole("id", snapshot.entry.keys[key_id])


def test_a_kek_that_retires_meanwhile_stays_retired(tmp_path: Path, kms: KmsClient) -> None:
    store = MemoryKeyStore()
    log, other = new_log(tmp_path / "d", kms, store), Log(Store(tmp_path / "d"), kms, key_store=store)
    add(log, "a")
    (first,) = log.head().keys
    named_by = log.kek_rows.named

    def meanwhile(key: KeyEntry, job_id: str) -> KeyEntry:
        if len(other.head().keys) == 1:
            replace_keks(Job.begin(other, "rotate"))
        return named_by(key, job_id)

    log.kek_rows.named = meanwhile  # type: ignore[method-assign]
    rewrap_keks(log, "master")
    assert log.head().keys[first].state == "retired"
    assert "retires-ms" in log.head().keys[first].properties


def test_a_master_key_retires(tmp_path: Path, kms: KmsClient) -> None:
    properties = keystore(tmp_path, "master", name="turning")
    kms, store = load_kms(properties), MemoryKeyStore()
    log = new_log(tmp_path / "d", kms, store)
    add(log, "a")
    (old,) = {log.version_of(key) for key in log.head().keys.values()}
    with pytest.raises(PolicyError, match="still wraps 1 keys"):
        reach.retire_master(log, Idle(), old)
    local.rotate_key(properties, "master")
    kms = load_kms(properties)
    log = Log(log.store, kms, key_store=store)
    rewrap_keks(log, "master")
    reach.retire_master(log, Idle(), old)
    assert log.head().gone == (old,)
    # A KEK that its store does not show counts as under any version.
    fresh = Log(log.store, kms, key_store=Hiding(store, log.head().sealer, log))
    add(log, "b", kind=Want("master", True, False, "scope"))
    add(log, "c", kind=Want("master", True, False, "another"))
    with pytest.raises(PolicyError, match="still wraps 2 keys"):
        reach.retire_master(fresh, Idle(), ("master", "9"))


class Hiding:
    """A key store that shows the row of one KEK only."""

    def __init__(self, store: MemoryKeyStore, key_id: str, log: Log) -> None:
        self._store, self._row = store, log.head().keys[key_id].properties[ROW]
        self.put, self.list, self.remove = store.put, store.list, store.remove

    def get(self, dataset_id: str, names: Collection[str]) -> dict[str, bytes]:
        return self._store.get(dataset_id, {*names} & {self._row})


# ------------------------------------------------------------------------------------------------ the wrong store


@pytest.mark.parametrize("error", [KeyError, KeyAccessError, UnknownKeyError])
def test_a_resolver_that_raises(error: type[Exception], tmp_path: Path, kms: KmsClient) -> None:
    """It refuses one of two KEKs: the other one opens, and whoever needs both is told so."""

    class Resolver:
        def get(self, dataset_id: str, names: Collection[str]) -> Mapping[str, bytes]:
            found = store.get(dataset_id, names)
            if refused & {*names} or len(found) < len(names):
                raise error("no")
            return found

    store, refused = MemoryKeyStore(), set[str]()
    writer = new_log(tmp_path / "d", kms, store)
    add(writer, "a")
    add(writer, "b", kind=Want("other", columns=True))
    assert isinstance(Resolver(), KeyResolver)
    log = Log(writer.store, kms, key_store=Resolver())
    assert {*paths(log)} == {"a", "b"}
    clear_cache()
    refused = {key.properties[ROW] for key in log.head().keys.values() if key.wrapping_key_id == "other"}
    log = Log(writer.store, kms, key_store=Resolver())
    snapshot = Snapshot(log, log.head())
    rows = {row.path: row for row in snapshot.files()}
    snapshot.holding(rows["a"].key_ids())
    with pytest.raises(KeyAccessError, match="no"):
        snapshot.holding(rows["a"].key_ids() | rows["b"].key_ids())
    assert store.list("id")
    rewrap_keks(writer, "master")  # the reader's rows are gone
    assert {row.path for row in Snapshot(log, log.head()).files()} == {"a", "b"}


def test_a_resolver_that_only_reads(tmp_path: Path, kms: KmsClient) -> None:
    class Resolver:
        def get(self, dataset_id: str, names: Collection[str]) -> Mapping[str, bytes]:
            return store.get(dataset_id, names)

        def __repr__(self) -> str:
            return "<mine>"

    store = MemoryKeyStore()
    writer = new_log(tmp_path / "d", kms, store)
    add(writer, "a")
    log = Log(writer.store, kms, key_store=Resolver())
    assert paths(log) == ["a"]
    works: list[Callable[[], Any]] = [
        lambda: add(log, "b"),
        lambda: reach.sweep(log, Idle()),
        lambda: rewrap_keks(log, "master"),
        lambda: log.append(Idle(), lambda head, plans: Draft("nothing")),
    ]
    for work in works:
        with pytest.raises(PolicyError, match="<mine> can only be read, so the dataset cannot be changed"):
            work()
    assert log.plans() == {}
    with pytest.raises(PolicyError, match="only be read"):
        new_log(tmp_path / "e", kms, Resolver())
    assert [*Store(tmp_path / "e").list()] == []


def test_without_the_store(tmp_path: Path, kms: KmsClient) -> None:
    store = MemoryKeyStore()
    log = new_log(tmp_path / "d", kms, store)
    add(log, "a")
    with pytest.raises(KeyAccessError, match="in a key store: pass key_store="):
        Log(log.store, kms).head()
    with pytest.raises(UnknownKeyError, match=r"has no row .* key store of another dataset"):
        Log(log.store, kms, key_store=MemoryKeyStore()).head()
    inside = new_log(tmp_path / "e", kms, None)
    with pytest.raises(PolicyError, match="leave out key_store="):
        Log(inside.store, kms, key_store=store).head()


def test_rows_that_were_exchanged(tmp_path: Path, kms: KmsClient) -> None:
    store = MemoryKeyStore()
    log = new_log(tmp_path / "d", kms, store)
    add(log, "a", kind=Want("other"))
    one, other = store.list("id")
    theirs = store.get("id", [other])[other]
    store.remove("id", [one])
    store.put("id", {one: theirs})
    clear_cache()
    with pytest.raises(IntegrityError, match="another row in the place"):
        Log(log.store, kms, key_store=store).kek_rows.fetch("id", log.head().keys.values())


def test_a_name_of_no_row_asks_nothing() -> None:
    """The header of a document is read before it is authentic."""
    store = Watched()
    wraps = Wraps(store)
    for row in ("x", "../../etc/passwd", f"{new_job_id()}-{'0' * 8}-{'0' * 63}"):
        with pytest.raises(UnknownKeyError):
            wraps.whole("id", KeyEntry("k", "m", properties={ROW: row}))
    assert store.asked == []
    single = KeyEntry("k", "m")
    assert wraps.whole("id", single) is single
    assert wraps.named(single, new_job_id()) is single
    assert hashlib.sha256(b"w").hexdigest() in rows_of([wraps.named(KeyEntry("k", "m", b"w"), new_job_id())])[0]


# ------------------------------------------------------------------------------------------------ SQL, and which store


def test_tables_of_0_2_are_refused(tmp_path: Path) -> None:
    sa = pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{tmp_path}/keys.db"
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("CREATE TABLE ags_keys (dataset_id TEXT, key_id TEXT, entry TEXT)"))
    with pytest.raises(FormatError, match=r"made by ags_fast 0\.2: take another database, or drop"):
        open_key_store(url).list("d")  # type: ignore[union-attr]


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    sa = pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{tmp_path}/keys.db"
    store: Any = open_key_store(url)
    store.put("d", rows(1))
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE ags_key_store SET version = 2"))
    store.list("d")  # which has looked before
    with pytest.raises(FormatError, match="schema 2"):
        open_key_store(url).list("d")  # type: ignore[union-attr]


def test_a_database_for_one_dataset(tmp_path: Path, kms: KmsClient) -> None:
    sa = pytest.importorskip("sqlalchemy")
    from ags_fast.keys.stores.sql import SqlKeyStore

    url = f"sqlite:///{tmp_path}/keys.db"
    store: Any = open_key_store(f"{url}?dataset=mine")
    assert (store.dataset_id, Wraps(store).dataset_id) == ("mine", "mine")
    assert pickle.loads(pickle.dumps(store)).dataset_id == "mine"
    with pytest.raises(UnknownKeyError, match="not the key store of the dataset 'other'"):
        store.list("other")
    log = new_log(tmp_path / "d", kms, open_key_store(url), "other")
    with pytest.raises(UnknownKeyError, match="key store of another dataset"):
        Log(log.store, kms, key_store=store).head()
    with pytest.raises(TypeError, match="Engine"):
        pickle.dumps(SqlKeyStore(sa.create_engine(url)))
    with pytest.raises(PolicyError, match="holds a password"):
        open_key_store("postgresql://me:secret@host/db")
    engine = sa.create_engine("sqlite://")
    engine.dialect.name = "mysql"
    with pytest.raises(ValueError, match="SQLite or PostgreSQL"):
        SqlKeyStore(engine)
    with pytest.raises(KeyAccessError, match="cannot be used now"):
        open_key_store(f"sqlite:///{tmp_path}/none/keys.db").list("d")  # type: ignore[union-attr]


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Its URL."""
    pytest.importorskip("sqlalchemy")
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keys.db"
    return str(request.getfixturevalue("postgres").url)


def test_many_datasets_in_one_database(database: str, tmp_path: Path) -> None:
    store: Any = open_key_store(database)
    some = {f"{tmp_path.name} {name}": rows(n) for n, name in enumerate(("one", "two", "o'three\"; %s", "ü" * 99), 1)}
    for dataset_id, part in some.items():
        store.put(dataset_id, part)
    for dataset_id, part in some.items():
        assert {*store.list(dataset_id)} == {*part}
        only: Any = open_key_store(f"{database}?dataset={tmp_path.name} one")
        if dataset_id.endswith(" one"):
            assert only.get(dataset_id, [*part]) == part
        else:
            with pytest.raises(UnknownKeyError, match="not the key store of the dataset"):
                only.get(dataset_id, [*part])
    with pytest.raises(UnknownKeyError):
        store.list("x" * 256)


@pytest.mark.more
def test_processes_at_once(database: str, tmp_path: Path) -> None:
    children = [start_python(program(wrapping.change_sql, database, tmp_path.name, i)) for i in range(4)]
    put = [line for child in children for line in finish_python(child).splitlines()]
    store: Any = open_key_store(database)
    assert len(put) == 40
    assert sorted(store.list(tmp_path.name)) == sorted(put)


def in_a_fork(store: Any, work: Callable[[], Any]) -> int:
    """The exit status of a child that does the work: 0 if it is done. Another thread uses the store meanwhile."""
    ends = threading.Event()

    def use() -> None:
        while not ends.is_set():
            store.list("used")

    thread = threading.Thread(target=use)
    thread.start()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)  # it must not wait for a thread that it does not have
            work()
            status = 0
        finally:
            os._exit(status)
    ends.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork(reached: Callable[[], Any], tmp_path: Path) -> None:
    store, one, other = reached(), rows(2), rows(2)
    store.put(str(tmp_path), one)
    assert in_a_fork(store, lambda: store.put(str(tmp_path), {**other, **store.get(str(tmp_path), [*one])})) == 0
    if not isinstance(store, MemoryKeyStore):
        assert {*store.list(str(tmp_path))} == {*one, *other}  # the child's are seen here
    assert store.get(str(tmp_path), [*one]) == one


def test_a_fork_connects_for_itself(postgres: Postgres) -> None:
    import sqlalchemy

    store: Any = open_key_store(postgres.url)

    def server() -> int:
        """The process that the connection leads to."""
        with store._engine.begin() as connection:
            return int(connection.scalar(sqlalchemy.text("SELECT pg_backend_pid()")))

    store.list("d")
    mine = server()

    def work() -> None:
        assert server() != mine

    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert server() == mine


def test_urls_that_are_refused() -> None:
    pytest.importorskip("sqlalchemy")
    secret = "Pa55word"
    for url in (
        f"postgresql+psycopg://u:{secret}@h/d?dataset=x",
        f"postgresql+psycopg://u@h/d?dataset=x&password={secret}",
        f"postgresql+psycopg://u@h/d?sslpassword={secret}",
    ):
        with pytest.raises(PolicyError, match="PGPASSWORD") as caught:
            open_key_store(url)
        assert secret not in str(caught.value)
    for url, why in (
        ("sqlite://", "MemoryKeyStore"),
        ("sqlite:///:memory:?dataset=x", "MemoryKeyStore"),
        ("sqlite:///file:x?mode=memory&uri=true&dataset=x", "MemoryKeyStore"),
        ("postgres://u@h/d?dataset=x", "knows no"),
        ("postgresql+psycopg://u@h:port/d", "as SQLAlchemy takes it"),
        ("postgresql+psycopg://u@h/d?dataset=x&dataset=y", "names the dataset"),
    ):
        with pytest.raises(ValueError, match=why):
            open_key_store(url)


def test_a_database_that_cannot_be_reached(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(KeyAccessError, match="cannot be used now") as caught:
            open_key_store(f"postgresql+psycopg://u@127.0.0.1:{port}/d").list("x")  # type: ignore[union-attr]
        assert caught.value.__cause__ is None
        assert "\n" not in str(caught.value)
    with monkeypatch.context() as wrong:
        wrong.setenv("PGPASSWORD", "Pa55word")
        with pytest.raises(KeyAccessError, match="password authentication failed") as caught:
            open_key_store(postgres.url).list("x")  # type: ignore[union-attr]
        assert "Pa55word" not in str(caught.value)


def test_a_connection_that_is_cut(postgres: Postgres, tmp_path: Path) -> None:
    """While it was idle: nobody notices. In the middle of a change: KeyAccessError, and nothing was changed."""
    import sqlalchemy

    store: Any = open_key_store(postgres.url)
    some, later = rows(1), rows(1)
    store.put(tmp_path.name, some)
    admin = sqlalchemy.create_engine(postgres.url)
    cut = sqlalchemy.text(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    )
    with admin.begin() as connection:
        assert connection.scalar(cut) >= 1
    assert store.list(tmp_path.name) == [*some]
    with admin.begin() as connection:
        connection.execute(sqlalchemy.text("LOCK TABLE ags_wrapped_keks"))
        failed: list[BaseException] = []

        def change() -> None:
            try:
                store.put(tmp_path.name, later)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=change)
        thread.start()
        waits = sqlalchemy.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        while connection.scalar(waits) == 0:
            assert thread.is_alive()
        assert connection.scalar(cut) >= 1
        thread.join(30)
        connection.rollback()
    assert [type(error) for error in failed] == [KeyAccessError]
    assert "cannot be used now" in str(failed[0])
    assert store.list(tmp_path.name) == [*some]
    store.put(tmp_path.name, later)
    assert {*store.list(tmp_path.name)} == {*some, *later}
    admin.dispose()


def test_a_database_that_is_stuck(postgres: Postgres, tmp_path: Path) -> None:
    """A statement that waits for too long is given up."""
    import sqlalchemy

    store: Any = open_key_store(f"{postgres.url}?options=-c%20statement_timeout%3D200")
    assert store.list(tmp_path.name) == []
    admin = sqlalchemy.create_engine(postgres.url)
    with admin.begin() as connection:
        connection.execute(sqlalchemy.text("LOCK TABLE ags_wrapped_keks"))
        for use in (lambda: store.list(tmp_path.name), lambda: store.put(tmp_path.name, rows(1))):
            with pytest.raises(KeyAccessError, match="statement timeout"):
                use()
        connection.rollback()
    assert store.list(tmp_path.name) == []
    admin.dispose()


def test_handles_take_a_key_store(tmp_path: Path, kms: KmsClient) -> None:
    pytest.importorskip("sqlalchemy")
    places: list[Any] = [tmp_path / "keys", f"sqlite:///{tmp_path}/keys.db?dataset=mine", MemoryKeyStore()]
    for i, where in enumerate(places):
        url = str(tmp_path / f"d{i}")
        dataset = Dataset.create(url, kms=kms, wrapping_key_id="master", key_store=where)
        with dataset.transaction() as new, new.create("a") as file:
            file.write(b"content")
        clear_cache()
        with Dataset.open(url, kms=kms, key_store=where).open_file("a") as file:
            assert file.read() == b"content"
        with pytest.raises(KeyAccessError, match="pass key_store="):
            Dataset.open(url, kms=kms)


def test_a_folder_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = FolderKeyStore(tmp_path / "file")
    for work in (lambda: store.put("d", rows(1)), lambda: store.get("d", [*rows(1)])):
        with pytest.raises(KeyAccessError, match="cannot be used now"):
            work()
    assert repr(store) == f"<FolderKeyStore of Store({str(tmp_path / 'file')!r})>"
    assert "secret" not in repr(FolderKeyStore("s3://me:secret@bucket/keys"))
