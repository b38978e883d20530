"""What whoever has a KEK, or may write to the storage, can claim: refused before it takes memory or time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, QUIET, encrypt, make_kms, version_of, write_tree
from programs import limits
from support import pattern, program, run_python

pytest.importorskip("msgspec")

import msgspec

from ags_fast import FormatError, IntegrityError
from ags_fast.ags1 import AgsCodec
from ags_fast.dataset.access import Access
from ags_fast.dataset.columns import PAGE_NBYTES, Page, Rest, columns_of, encoded
from ags_fast.dataset.keks import KeyTables
from ags_fast.dataset.log import ENTRY_NBYTES
from ags_fast.dataset.names import entry_path, plan_path, table_path
from ags_fast.dataset.plan import PLAN_NBYTES, read_plan
from ags_fast.dataset.sealed import HEADER_NBYTES, seal
from ags_fast.dataset.tables import BLOCK_NBYTES, Table
from ags_fast.errors import PolicyError
from ags_fast.jobs import encrypt_files, verify_files
from ags_fast.keys.envelope import binding
from ags_fast.keys.iceberg import EncryptedKey
from ags_fast.keys.kms import load_kms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ags_fast.dataset.entries import FileEntry

linux = pytest.mark.skipif(sys.platform != "linux", reason="address space is limited as Linux does it")
HEAD = entry_path(2)  # entry 1 is that of a new dataset
WRONG = (FormatError, IntegrityError)


class Forger:
    """A dataset, and somebody who has its KEK and may write to its storage."""

    def __init__(self, folder: Path) -> None:
        self.kms = make_kms(folder)
        self.folder = folder / "dataset"
        src = write_tree(folder / "src", {"a": pattern(3000), "b": b"small"})
        encrypt(src, self.folder, self.kms, block_size=1024, aad_prefix="set{n}").raise_for_failures()
        self.open()
        self.rows = sorted(version_of(self.folder, self.kms).files())

    def open(self) -> None:
        """Take the dataset as it is, once, before anything is forged."""
        self.log = Access.of(self.folder, self.kms).log()
        self.head = self.log.head()
        self.envelope = self.log.envelope(self.head)

    def body(self, path: str = HEAD) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self.folder / path).read_bytes().partition(b"\n")[2])
        return body

    def seal(self, body: object, path: str = HEAD, dataset_id: str | None = None) -> None:
        key = self.head.keys[self.head.sealer]
        (self.folder / path).write_bytes(seal(self.envelope, key, dataset_id or self.head.dataset_id, path, body))

    def table(self, pages: Sequence[bytes], rows: int, **changes: Any) -> Table:
        """Store a table of such pages."""
        named = [(b"a", page) for page in pages]
        table = self.log.tables._store_pages(named, {}, self.head.job_id, self.head.sealer, self.envelope)
        about = {"rows": rows, "first": b"a", "last": b"zz", "keys": {self.head.sealer: rows}, **changes}
        return msgspec.structs.replace(table, **about)

    def stored(self, data: bytes, like: Table) -> Table:
        """Store a table with such a plaintext; `like` says the rest, also where its directory begins."""
        key = os.urandom(32)
        path = table_path(self.head.job_id)
        wrapped = self.envelope.wrap(self.head.sealer, key, binding(self.head.dataset_id, "table", path))
        (self.folder / path).write_bytes(AgsCodec(key, block_size=BLOCK_NBYTES).encrypt(data))
        return msgspec.structs.replace(like, path=path, length=len(data), wrapped=wrapped)

    def row(self, **changes: Any) -> FileEntry:
        return self.rows[0]._replace(**changes)

    def read(self) -> None:
        """As any reader does."""
        snapshot, rows = Access.of(self.folder, self.kms).files()
        assert len(rows) == snapshot.entry.count
        dict(snapshot.entry.keys)
        snapshot.log.look(snapshot.log.kept)


def check_refused(what: object, read: Callable[[], object]) -> None:
    """See that what was forged is refused; `what` names it."""
    try:
        read()
    except (*WRONG, PolicyError):
        return
    pytest.fail(f"accepted: {str(what)[:200]}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Forger:
    return Forger(tmp_path_factory.mktemp("limits"))


@pytest.fixture
def forger(made: Forger, tmp_path: Path) -> Forger:
    """One that may change its dataset."""
    mine = Forger.__new__(Forger)
    mine.__dict__.update(made.__dict__, folder=shutil.copytree(made.folder, tmp_path / "dataset"))
    mine.open()
    return mine


# ---------------------------------------------------------------- documents


def in_512_mib(forger: Forger) -> list[str]:
    told = run_python(program(limits.read_in_512_mib, str(forger.folder), forger.kms), timeout=300).splitlines()
    return [text.split()[0] for text in told]


@linux
def test_documents_in_512_mib_of_address_space(forger: Forger) -> None:
    """What anybody can write who has no key."""
    path = forger.folder / HEAD
    line, _, body = path.read_bytes().partition(b"\n")
    with open(path, "wb") as file:
        file.write(line + b"\n")
        file.truncate(187 << 20)
    assert in_512_mib(forger) == ["FormatError"] * 2
    for lie in (
        line[:-1] + b',"more":[' + b"[]," * (HEADER_NBYTES // 3) + b"[]]}\n" + body,
        line[:-1] + b"[" * (HEADER_NBYTES - len(line)) + b"\n" + body,
        line.replace(b'"more":{}', b'"more":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}") + b"\n" + body,
        line.replace(b'"uses":', b'"uses":' + b"9" * 200_000) + b"\n" + body,
        b"[" * (ENTRY_NBYTES - 1),
        b"\n" * (ENTRY_NBYTES - 1),
    ):
        path.write_bytes(lie)
        assert {*in_512_mib(forger)} <= {"FormatError", "IntegrityError"}


@linux
def test_bodies_in_512_mib_of_address_space(forger: Forger) -> None:
    """Who has keys does not parse what was not sealed; who has none must not need much memory to do so."""
    path = forger.folder / HEAD
    line, _, body = path.read_bytes().partition(b"\n")
    room = ENTRY_NBYTES - len(line) - len(body) - 100
    assert body.count(b'"more":{}') == 1
    for more in (
        b"[" * (room // 2) + b"]" * (room // 2),
        b"[" + b"[]," * (room // 3) + b"[]]",
        b"[" + b"{}," * (room // 3) + b"{}]",
    ):
        path.write_bytes(line + b"\n" + body.replace(b'"more":{}', b'"more":{"x":' + more + b"}"))
        assert in_512_mib(forger) == ["IntegrityError", "FormatError"]


def test_impossible_numbers_in_entries(forger: Forger) -> None:
    good = forger.body()
    (table,) = good["files"]
    ((key_id, key),) = good["keys"].items()
    huge = 10**4000
    changes: list[dict[str, Any]] = [
        *({"number": number} for number in (1, 3, 0, -1, True, 2.5, "2", huge, None)),
        *({"first": number} for number in (0, 3, -1, huge)),
        {"dataset_id": "another"},
        {"time_ms": -1},
        {"time_ms": huge},
        {"over": {"a": -1}},
        {"over": {"a": huge}},
        {"over": 5},
        {"near": ["0" * 64]},
        {"near": ["0" * 64] * 2},
        {"near": ["x"]},
        {"blocks": [{"path": "_ags/chain/none", "first": 0, "sha256": "0" * 64}]},
        {"files": 5},
        {"files": [5]},
        {"files": [table, table]},
        *(
            {"files": [table | change]}
            for change in (
                {"length": 2**62},
                {"length": -1},
                {"length": huge},
                {"length": float(table["length"]) + 0.5},
                {"length": table["length"] + 1},
                {"length": table["length"] - 1},
                {"directory": table["directory"] + 1},
                {"directory": table["length"]},
                {"directory": 2**62},
                {"directory": -1},
                {"rows": 0},
                {"rows": -1},
                {"rows": 3},
                {"rows": 10**15},
                {"nbytes": -1},
                {"nbytes": huge},
                {"keys": {"a": -1}},
                {"keys": {"a": huge}},
                {"keys": 5},
                {"keys": None},
                {"key_id": "none"},
                {"wrapped": "AAAA"},
                {"path": "_ags/tables/none"},
                {"path": "../" + "a" * 61},
                {"path": "/etc/passwd"},
                {"first": 5},
                {"last": "no base64"},
            )
        ),
        {"key_tables": [table]},
        {"sealer": "none"},
        {"keys": {}},
        {"keys": {"another": key}},
        *(
            {"keys": {key_id: key | change}}
            for change in (
                {"uses": -1},
                {"uses": huge},
                {"uses": 1.5},
                {"created_ms": -1},
                {"created_ms": huge},
                {"created_ms": 1e3},
                {"state": "lost"},
                {"properties": {"a": 5}},
            )
        ),
        {"streams": [{"stream": "s", "batch": -1, "time_ms": 0}]},
        {"sets": {"a": -1}},
        {"same": [-1]},
        {"gone": [["one"]]},
        {"policy": good["policy"] | {"kek_uses": -1}},
        {"policy": good["policy"] | {"keep": 10**30, "keep_days": 1e300}},
        {"unknown": 1},
    ]
    for change in changes:
        forger.seal(good | change, dataset_id=change.get("dataset_id"))
        check_refused(change, forger.read)
    forger.seal(good)
    forger.read()


def test_an_entry_of_another_number(forger: Forger) -> None:
    """What is authentic for its path says which version it is, and is no other."""
    forger.seal(forger.body(), entry_path(7))
    with pytest.raises(IntegrityError, match=f"{entry_path(7)} is an entry of another place"):
        forger.read()


# ---------------------------------------------------------------- tables


def forged(forger: Forger, *tables: Table, keys: bool = False) -> None:
    """A version that has these tables only, as its files or as its KEKs."""
    forger.seal(forger.body() | {"key_tables" if keys else "files": msgspec.to_builtins(tables)})
    forger.read()


def columns(forger: Forger) -> dict[str, Any]:
    """The columns of the good table."""
    page, rest = columns_of(encoded(forger.rows), Rest)
    return {name: getattr(part, name) for part in (page, rest) for name in part.__struct_fields__}


def page_of(columns: dict[str, Any], rest: bytes | None = None) -> bytes:
    """A page of columns, whatever they are. rest: what is compressed, in place of the columns that are."""
    packed = msgspec.msgpack.encode([columns[name] for name in Rest.__struct_fields__])
    rest = zlib.compress(packed) if rest is None else rest
    return msgspec.msgpack.encode([*(columns[name] for name in Page.__struct_fields__[:-1]), rest])


def test_a_good_table(forger: Forger) -> None:
    forged(forger, forger.table([encoded(forger.rows)], 2))
    forged(forger, forger.table([page_of(columns(forger))], 2))


def test_other_rows_than_declared(forger: Forger) -> None:
    for rows in (1, 3, 600, 5000, 10**15):
        with pytest.raises(FormatError, match=f"has 2 rows, not {rows}"):
            forged(forger, forger.table([encoded(forger.rows)], rows))
    good = columns(forger)
    for name, column in good.items():
        if isinstance(column, list) and name != "names":
            for other in (column[:1], column * 2, [], 5):
                with pytest.raises(WRONG):
                    forged(forger, forger.table([page_of(good | {name: other})], 2))


@linux
def test_bombs_in_tables(forger: Forger) -> None:
    """A GiB in a table of a MiB, and claims that there are 4 billion values."""
    good = columns(forger)
    claims = b"\xdd\xff\xff\xff\xff", b"\x93\xdd\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"
    pages = [
        page_of(good, zlib.compress(bytes(1 << 30), 1)),
        page_of(good, zlib.compress(bytes(PAGE_NBYTES + 1), 1)),
        page_of(good, zlib.compress(b"\x91" * (32 << 20), 1)),
        page_of(good, zlib.compress(b"")[:-1]),
        page_of(good, b""),
        *(page_of(good, zlib.compress(claim)) for claim in claims),
        *claims,
        b"\x91" * (1 << 20),
        b"",
    ]
    for page in pages:
        table = forger.table([page], 2)
        assert table.length < 8 << 20
        forger.seal(forger.body() | {"files": msgspec.to_builtins([table])})
        told = run_python(program(limits.refused_in_512_mib, str(forger.folder), forger.kms), timeout=60)
        assert told.split()[0] == "FormatError"


def test_lies_about_pages(forger: Forger) -> None:
    page = encoded(forger.rows)
    good = forger.table([page], 2)
    for directory in (
        [],
        [[b"a", 0, len(page) + 1]],
        [[b"a", 0, len(page) - 1]],
        [[b"a", 1, len(page) - 1]],
        [[b"a", 0, len(page)], [b"b", 0, len(page)]],
        [[b"a", 0, 0]],
        [[b"a", 0, -1]],
        [[b"a", 0, 2**63]],
        [["a", 0, 1e9]],
        {"a": 5},
        5,
    ):
        data = page + msgspec.msgpack.encode(directory)
        table = forger.stored(data, good)
        with pytest.raises(WRONG):
            forged(forger, table)
    forged(forger, forger.stored(page + msgspec.msgpack.encode([[b"a", 0, len(page)]]), good))


def test_impossible_numbers_in_tables(forger: Forger) -> None:
    changes: list[dict[str, Any]] = [
        {"plain_length": -1},
        {"file_length": -1},
        {"block_size": -1},
        {"block_size": 0},
        {"block_size": 1 << 31},
        {"part": -1},
        {"parts": -1},
        {"plain_length": 2999},
        {"plain_length": 3001},
        {"plain_length": (1 << 63) - 1},
        {"file_length": 10**15},
        {"file": "../outside"},
        {"file": "/etc/passwd"},
        {"path": "x/../../y"},
        {"path": ""},
    ]
    for change in changes:
        table = forger.table([encoded([forger.row(**change)])], 1)
        check_refused(change, partial(forged, forger, table))


def test_rows_that_cannot_be(forger: Forger) -> None:
    """FormatError: a field of another type, a member of a set without a number, a number without a set."""
    good = columns(forger)
    rest = {name: good[name] for name in Rest.__struct_fields__}
    other: list[Any] = [
        5,
        -1,
        1.5,
        True,
        "x",
        b"x",
        [1],
        [["x"]],
        [[1, 2, 3]],
        {"a": 1},
        [None, 1],
        [["x", 1, "x", b""]],
    ]
    taken, no_set = 0, {"set_id": None, "part": None, "parts": None}
    for name in (*rest, "wrapped_dek", "column_keys", "aad_prefix", "names"):
        for value in other:
            try:
                forged(forger, forger.table([page_of(good | {name: [value] * len(good["path"])})], 2))
                taken += 1
            except WRONG:
                pass
    for fields in ({"set_id": "job"}, {"part": 1}, {"set_id": "job", "part": 1}, {"part": 1, "parts": 2}, {"parts": 2}):
        with pytest.raises(FormatError, match="one of a set"):
            forged(forger, forger.table([encoded([forger.row(**(no_set | fields))])], 1))
    assert taken < 40


def test_names_that_columns_do_not_have(forger: Forger) -> None:
    good = columns(forger)
    for name in ("key_id", "format", "job_id", "set_id"):
        for number in (len(good["names"]), -1, 1 << 40, 1.5, "a"):
            with pytest.raises(WRONG):
                forged(forger, forger.table([page_of(good | {name: [number] * 2})], 2))


def test_lies_in_tables_of_keks(forger: Forger) -> None:
    place = KeyTables(forger.log.store, forger.head.dataset_id, lambda keys: forger.envelope)
    good: list[Any] = [["kek"], [MASTER], [b"wrapped"], ["active"], [1], [1], [{}], [{}]]

    def table(columns: object) -> Table:
        data = zlib.compress(msgspec.msgpack.encode(columns), 1)
        table = place._store_pages([(b"kek", data)], {}, forger.head.job_id, forger.head.sealer, forger.envelope)
        return msgspec.structs.replace(table, first=b"kek", last=b"kek")

    forged(forger, table(good), keys=True)
    changes: list[tuple[int, Any]] = [
        *((4, number) for number in (-1, 10**18, 1.5, "1")),
        *((5, number) for number in (-1, 1 << 63, 1.5)),
        (3, "lost"),
        (1, 5),
        (6, {"a": 5}),
        (7, deep(100_000)),
    ]
    for at, value in changes:
        with pytest.raises(WRONG):
            forged(forger, table([*good[:at], [value], *good[at + 1 :]]), keys=True)
    for columns in ([*good[:7], [{}, {}]], good[:7], [], 5):
        with pytest.raises(WRONG):
            forged(forger, table(columns), keys=True)


def deep(levels: int) -> Any:
    """Lists in lists, which `msgspec` packs as they are."""
    return {"x": msgspec.Raw(b"\x91" * levels + b"\x90")}


def test_a_set_of_very_many_files(forger: Forger) -> None:
    """Who says that a job has numbered 10^12 files is told of two gaps."""
    row = next(row for row in forger.rows if row.part == 1)
    table = forger.table([encoded([row._replace(parts=10**12, part=10**11)])], 1)
    forger.seal(forger.body() | {"files": msgspec.to_builtins([table]), "sets": {row.set_id: 10**12}})
    result = verify_files(forger.folder, kms=forger.kms, engine=HERE, progress=False)
    missing = [row.error for row in result.rows if row.error and "numbered is missing" in row.error]
    assert len(missing) == 2
    assert "part 0 to 99999999999 of the 1000000000000 files" in missing[0]


# ---------------------------------------------------------------- plans


def test_impossible_numbers_in_plans(forger: Forger, tmp_path: Path) -> None:
    src = write_tree(tmp_path / "more", {"c": b"more"})

    class StopError(Exception):
        pass

    def stop(rows: list[Any]) -> None:
        raise StopError

    with pytest.raises(StopError):
        encrypt_files(src, forger.folder, kms=forger.kms, wrapping_key_id=MASTER, engine=HERE, progress=stop)
    (job_id,) = forger.log.plans()
    path = plan_path(job_id)
    good = forger.body(path)
    changes: list[dict[str, Any]] = [
        {"job_id": 5},
        {"operation": 5},
        {"time_ms": -1},
        {"time_ms": "1"},
        {"uses": 5},
        {"uses": {"a": -1}},
        {"uses": {"a": 10**30}},
        {"new": 5},
        {"new": {"a": 5}},
        {"facts": 5},
        {"resumable": 1},
        {"unknown": 1},
    ]
    for change in changes:
        forger.seal(good | change, path)
        check_refused(change, lambda: read_plan(forger.log, job_id, forger.head))
    with open(forger.folder / path, "ab") as file:
        file.truncate(PLAN_NBYTES + 1)
    with pytest.raises(FormatError, match="at most"):
        read_plan(forger.log, job_id, forger.head)
    # A plan that cannot be read is nobody's: whoever comes next goes on without it.
    encrypt(src, forger.folder, forger.kms).raise_for_failures()
    checked = verify_files(forger.folder, kms=forger.kms, **QUIET)
    checked.raise_for_failures()
    assert len(checked.rows) == 3


def test_a_plan_that_nobody_could_read(forger: Forger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written: the job is refused before its first object."""
    src = write_tree(tmp_path / "new", {"new": b"content"})
    before = sorted(forger.folder.rglob("*"))
    monkeypatch.setattr("ags_fast.dataset.plan.PLAN_NBYTES", 500)
    with pytest.raises(PolicyError, match="500 are the limit"):
        encrypt(src, forger.folder, forger.kms)
    assert not forger.log.plans()
    assert sorted(path for path in forger.folder.rglob("*") if path.is_file()) == [p for p in before if p.is_file()]


# ---------------------------------------------------------------- other places that numbers and JSON come from


def test_json_that_would_take_much_memory(tmp_path: Path) -> None:
    """24 bytes for each byte of it: a keystore, key material of Parquet."""
    keytools = pytest.importorskip("ags_fast.parquet.keytools")
    bomb = b"[" + b"[]," * (21 << 20) + b"[]]"
    (tmp_path / "keystore.json").write_bytes(bomb)
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_bytes(os.urandom(32))
    kms = {
        "encryption.kms-type": "local",
        "kms.local.path": str(tmp_path / "keystore.json"),
        "kms.local.key-file": str(tmp_path / "key"),
    }
    with pytest.raises(FormatError, match="are the most that are accepted"):
        load_kms(kms).wrap_key(b"k" * 16, MASTER)
    with pytest.raises(FormatError, match="are the most that are accepted"):
        keytools.material.parse_json(bomb, "key material", 64 << 20)


def test_times_that_no_calendar_has() -> None:
    entry = {"key-id": "a", "encrypted-by-id": "m", "encrypted-key-metadata": "AAAA"}
    kek = EncryptedKey.from_json(entry | {"properties": {"KEY_TIMESTAMP": "9" * 18}})
    with pytest.raises(FormatError, match="KEY_TIMESTAMP"):
        kek.entry()
