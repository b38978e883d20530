"""What whoever has a KEK, or may write to the storage, can claim: refused before it takes memory or time."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, make_kms, write_tree
from programs import limits
from support import pattern, program, run_python

from ags_fast import FormatError, IntegrityError
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.manifest_task import ManifestTask
from ags_fast.dataset.open_jobs import open_plans
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.tables import (
    COLUMN_KEYS,
    TABLE_NBYTES,
    TableRef,
    decode_entries,
    decode_table,
    encode_entries,
    encode_table,
    seal_table,
)
from ags_fast.jobs import encrypt_files, verify_files
from ags_fast.keys.document import KIND_NBYTES, seal_document
from ags_fast.keys.envelope import binding
from ags_fast.keys.iceberg import EncryptedKey
from ags_fast.keys.kms import load_kms
from ags_fast.parquet import keytools

if TYPE_CHECKING:
    from pathlib import Path

    from ags_fast.dataset.entries import FileEntry

pa = pytest.importorskip("pyarrow")

linux = pytest.mark.skipif(sys.platform != "linux", reason="address space is limited as Linux does it")
VERSION = "_ags/versions/00000001.json"
KEYS = "_ags/keys/00000002.json"


class Forger:
    """A dataset, and somebody who has its KEK and may write to its storage."""

    def __init__(self, folder: Path) -> None:
        self.kms = make_kms(folder)
        self.folder = folder / "dataset"
        src = write_tree(folder / "src", {"a": pattern(3000), "b": b"small"})
        encrypt_files(
            src, self.folder, kms=self.kms, wrapping_key_id=MASTER, block_size=1024, engine=HERE, aad_prefix="set{n}"
        ).raise_for_failures()
        self.opened = Ledger.open(self.folder, load_kms(self.kms))
        self.key_id = self.opened.keyring.document_key()
        head = self.opened.current()
        assert head is not None
        self.entries = list(self.opened.entries(head))
        (self.ref,) = head.manifests

    def body(self, path: str = VERSION) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self.folder / path).read_bytes())["body"]
        return body

    def seal(self, body: dict[str, Any], path: str = VERSION) -> None:
        data = seal_document(self.opened.envelope, self.key_id, self.opened.id, path, body)
        (self.folder / path).write_bytes(data)

    def table(self, data: bytes, count: int, name: str = "forged") -> TableRef:
        path = f"_ags/manifests/{name}"
        dek = os.urandom(16)
        wrapped = self.opened.envelope.wrap(self.key_id, dek, binding(self.opened.id, "dek", path))
        stored = seal_table(data, dek, self.opened.id, path)
        (self.folder / path).write_bytes(stored)
        return TableRef(path, len(stored), count, self.key_id, wrapped)

    def entry(self, **changes: Any) -> FileEntry:
        return self.entries[0]._replace(**changes)

    def read(self) -> None:
        opened = Ledger.open(self.folder, load_kms(self.kms))
        opened.load()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Forger:
    return Forger(tmp_path_factory.mktemp("limits"))


@pytest.fixture
def forger(made: Forger, tmp_path: Path) -> Forger:
    """One that may change its dataset."""
    mine = Forger.__new__(Forger)
    mine.__dict__.update(made.__dict__, folder=shutil.copytree(made.folder, tmp_path / "dataset"))
    mine.opened = Ledger.open(mine.folder, load_kms(mine.kms))
    return mine


# ---------------------------------------------------------------- documents


def in_512_mib(forger: Forger, what: str = "") -> str:
    return run_python(program(limits.read_in_512_mib, str(forger.folder), forger.kms, what), timeout=300)


@linux
@pytest.mark.parametrize("path", [VERSION, KEYS])
def test_documents_in_512_mib_of_address_space(forger: Forger, path: str) -> None:
    """It took 5 GB and 96 s to refuse the first of them."""
    good = (forger.folder / path).read_bytes()
    line, body, _, _ = good.split(b"\n")
    most = KIND_NBYTES["ags-keys" if path == KEYS else "ags-version"]
    what = "keys" if path == KEYS else ""
    with open(forger.folder / path, "wb") as file:
        file.write(line + b"\n")
        file.truncate(187 << 20)
    assert in_512_mib(forger, what).split()[0] == "FormatError"
    for lie in (
        line + b"\n" + body[:-1] + b',"x":[' + b"[]," * ((most - len(good)) // 3 - 10) + b"[]]}\n}\n",
        line + b"\n" + b"[" * (most - len(line) - 10) + b"\n}\n",
        line[:-1] + b'"' + b"[" * (most - len(line) - 10),
    ):
        (forger.folder / path).write_bytes(lie)
        told = in_512_mib(forger, what).splitlines()
        assert told
        assert all(text.split()[0] in ("FormatError", "IntegrityError") for text in told)


@linux
@pytest.mark.more
def test_sealed_documents_in_512_mib_of_address_space(forger: Forger) -> None:
    """The worst that somebody with a KEK can seal."""
    most, mark = KIND_NBYTES["ags-version"] - 4096, 1_000_000
    for more in (  # type: ignore[var-annotated]
        [[]] * (mark // 2 - 100),
        [{"": 0}] * (mark // 3 - 100),
        "\N{GRINNING FACE}" + "x" * most,
        [0.1] * mark,
    ):
        forger.seal({**forger.body(), "files": -1, "more": more})
        assert in_512_mib(forger).split()[0] == "FormatError"


def test_impossible_numbers_in_versions(forger: Forger) -> None:
    good = forger.body()
    (ref,) = good["manifests"]
    changes: list[dict[str, Any]] = [
        {"version": 2},
        {"version": True},
        {"version": 1.0},
        {"version": "1"},
        {"dataset_id": "another"},
        {"parent": 1},
        {"parent": -1},
        {"parent": 0},
        {"time_ms": -1},
        {"time_ms": 10**18},
        {"files": -1},
        {"files": 3},
        {"files": 10**15},
        {"plain_length": -1},
        {"plain_length": 2**63},
        {"plain_length": 1e3},
        {"manifests": 5},
        {"manifests": [5]},
        *(
            {"manifests": [ref | change]}
            for change in (
                {"length": 2**62},
                {"length": -1},
                {"length": float(ref["length"])},
                {"length": TABLE_NBYTES + 1},
                {"length": ref["length"] + 1},
                {"length": ref["length"] - 1},
                {"entries": -1},
                {"entries": 10**15},
                {"keys": {"a": -1}},
                {"keys": {"a": 10**30}},
                {"keys": 5},
                {"path": "_ags/manifests/none"},
                {"first": 5},
                {"last": "no base64"},
            )
        ),
        {"lists": 5},
        {"lists": [5]},
        {"lists": ["../" + "a" * 61]},
        {"lists": ["a" * 64]},
        {"policy": {"kek_uses": -1}},
        {"policy": {"keep": 10**30, "keep_days": 1e300}},
    ]
    for change in changes:
        if change.get("dataset_id"):
            body = good | change
            data = seal_document(forger.opened.envelope, forger.key_id, "another", VERSION, body)
            (forger.folder / VERSION).write_bytes(data)
        else:
            forger.seal(good | change)
        with pytest.raises((FormatError, IntegrityError)):
            forger.read()
    forger.seal(good)
    forger.read()


def test_a_document_of_another_number(forger: Forger) -> None:
    """What is authentic for its path says which version it is, and is no other."""
    forger.seal(forger.body() | {"version": 1, "parent": None}, "_ags/versions/00000007.json")
    with pytest.raises(IntegrityError, match=r"00000007\.json holds the version 1"):
        forger.read()


def test_impossible_numbers_in_keys(forger: Forger) -> None:
    good = forger.body(KEYS)
    (key,) = good["keys"]
    huge = 10**4000
    changes: list[dict[str, Any]] = [
        *(
            {"keys": [key | change]}
            for change in (
                {"uses": -1},
                {"uses": huge},
                {"uses": 1.5},
                {"created-ms": -1},
                {"created-ms": huge},
                {"created-ms": 1e3},
            )
        ),
        {"version": 1},
        {"version": 2.0},
        {"version": "2"},
        {"history": [{"version": huge, "time_ms": 0, "added": [], "changed": [], "removed": 5}]},
        {"history": [{"version": -1, "time_ms": 0, "added": [], "changed": [], "removed": []}]},
        {"history": [{"version": 1, "time_ms": 0.5, "added": [], "changed": [], "removed": []}]},
        {"history": [{"version": 1, "time_ms": 0, "added": "abc", "changed": [], "removed": []}]},
        {"history": [{"version": 1, "time_ms": 0, "added": [[]], "changed": [], "removed": []}]},
        {
            "keys": None,
            "sealer": key,
            "buckets": [
                {"path": "_ags/keys/buckets/" + "0" * 36 + ".json", "entries": 1, "length": 2**62, "sha256": "x"}
            ],
        },
    ]
    for change in changes:
        body = {name: value for name, value in (good | change).items() if value is not None}
        forger.seal(body, KEYS)
        with pytest.raises((FormatError, IntegrityError)):
            Ledger.open(forger.folder, load_kms(forger.kms)).keys.list()


# ---------------------------------------------------------------- tables


def forged(forger: Forger, ref: TableRef) -> None:
    """A version that has this table only."""
    body = forger.body()
    forger.seal({**body, "files": ref.entries, "manifests": [ref.to_json()]})
    forger.read()


def test_a_good_table(forger: Forger) -> None:
    forged(forger, forger.table(encode_entries(forger.entries), 2))


def test_more_rows_than_declared(forger: Forger) -> None:
    entry = forger.entries[0]
    short = entry._replace(path="", file="", wrapped_dek=b"", aad_prefix=b"", source="", stamp="", job_id="", key_id="")
    one = decode_table(encode_entries([short]), "x", 1)
    many = one.take(pa.repeat(pa.scalar(0), 600_000))
    with pytest.raises((FormatError, IntegrityError)):
        forged(forger, forger.table(encode_table(many), 3))
    with pytest.raises((FormatError, IntegrityError)):
        forged(forger, forger.table(encode_table(many.slice(0, 50_000)), 3))
    with pytest.raises(IntegrityError, match="has 3 entries, not 2 as"):
        forged(forger, forger.table(encode_table(many.slice(0, 3)), 2))


def test_large_values_in_small_tables(forger: Forger) -> None:
    """300 MiB in a table of 12 KiB, as Parquet and Zstandard would have them, or as an Arrow stream has them."""
    huge = forger.entry(path="a" * (48 << 20))
    ref = forger.table(encode_entries([huge]), 1)
    assert ref.length < 64 << 10
    with pytest.raises(FormatError, match=f"the limit is {TABLE_NBYTES}"):
        forged(forger, ref)
    # Lies about the pages: their rows, their lengths, and the size before compression.
    page = pages_of(encode_entries([huge]))[0]
    for nbytes in (0, 1, 1000, TABLE_NBYTES):
        with pytest.raises(FormatError):
            forged(forger, forger.table(paged((1, nbytes, page)), 1))
    halves = [(0, TABLE_NBYTES // 2 + 1, page)] * 2
    with pytest.raises(FormatError, match=f"the limit is {TABLE_NBYTES}"):
        forged(forger, forger.table(paged(*halves), 0))
    good = encode_entries(forger.entries)
    for data in (good[:-1], good + b"x", good[8:], good[:7], (1 << 40).to_bytes(8, "little") + good[8:]):
        with pytest.raises((FormatError, IntegrityError)):
            forged(forger, forger.table(data, 2))
    indexes: list[Any] = [
        {},
        {"pages": 5},
        {"pages": []},
        {"pages": [5]},
        {"pages": [[2, -1, 5, ""]]},
        [],
        {"pages": [[1e9] * 4]},
    ]
    for index in indexes:
        text = json.dumps(index).encode()
        with pytest.raises((FormatError, IntegrityError)):
            forged(forger, forger.table(len(text).to_bytes(8, "little") + text, 2))
    # Compression inside of the stream, dictionaries, and what is more than one batch.
    table = pa.Table.from_batches([decode_table(encode_entries(forger.entries), "x", 2).to_batches()[0]])
    dictionary = table.set_column(0, "path", table.column("path").dictionary_encode())
    for found, options in (
        (table, pa.ipc.IpcWriteOptions(compression="zstd")),
        (table, pa.ipc.IpcWriteOptions(compression="lz4")),
        (dictionary, pa.ipc.IpcWriteOptions()),
        (table.drop_columns(["path"]), pa.ipc.IpcWriteOptions()),
        (table.set_column(0, "path", table.column("path").cast(pa.large_binary())), pa.ipc.IpcWriteOptions()),
    ):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, found.schema, options=options) as stream:
            stream.write_table(found)
        with pytest.raises(FormatError):
            forged(forger, forger.table(packed(sink.getvalue().to_pybytes()), 2))
    for data in (b"", b"PAR1", b"\0" * 8, packed(b""), packed(b"x" * 100), packed(b"\xff\xff\xff\xff" + b"\xff" * 40)):
        with pytest.raises(FormatError):
            forged(forger, forger.table(data, 2))


def paged(*pages: tuple[int, int, bytes]) -> bytes:
    """A table of these pages: rows, bytes before compression, and what is stored."""
    index = json.dumps({"pages": [(rows, len(data), nbytes, "") for rows, nbytes, data in pages]}).encode()
    return len(index).to_bytes(8, "little") + index + b"".join(data for _, _, data in pages)


def pages_of(table: bytes) -> list[bytes]:
    """The pages of a table, as they are stored."""
    at = 8 + int.from_bytes(table[:8], "little")
    pages = []
    for _, length, _, _ in json.loads(table[8:at])["pages"]:
        pages.append(table[at : at + length])
        at += length
    return pages


def packed(plain: bytes) -> bytes:
    """A table of one page of two rows."""
    return paged((2, len(plain), pa.Codec("zstd").compress(plain, asbytes=True)))


def test_impossible_arrays_in_tables(forger: Forger) -> None:
    """Every bit of a stream flipped that is sealed again: an error of ours, or a table whose entries can be read."""
    data = encode_entries(forger.entries)
    nbytes = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["pages"][0][2]
    plain = bytearray(pa.Codec("zstd").decompress(pages_of(data)[0], nbytes, asbytes=True))
    read = refused = 0
    for at in range(0, 8 * len(plain), 37):
        plain[at // 8] ^= 1 << at % 8
        try:
            decode_entries(decode_table(packed(bytes(plain)), "x", 2), "x")
            read += 1
        except (FormatError, IntegrityError):
            refused += 1
        plain[at // 8] ^= 1 << at % 8
    assert read > 100
    assert refused > 100


def test_impossible_numbers_in_tables(forger: Forger) -> None:
    column = {"column": "", "key_id": "", "wrapped_dek": b""}
    changes: list[dict[str, Any]] = [
        {"plain_length": -1},
        {"file_length": -1},
        {"block_size": -1},
        {"block_size": 0},
        {"block_size": 1 << 31},
        {"part": -1},
        {"part": 1 << 62},
        {"parts": -1},
        {"parts": 10**15},
        {"plain_length": 2999},
        {"plain_length": 3001},
        {"plain_length": (1 << 63) - 1},
        {"file_length": 10**15},
        {"mode": -1},
        {"mode": 1 << 40},
        {"column_keys": (column,) * (COLUMN_KEYS + 1)},
    ]
    for change in changes:
        with pytest.raises((FormatError, IntegrityError)):
            forged(forger, forger.table(encode_entries([forger.entry(**change)]), 1))


def test_a_set_of_very_many_files(forger: Forger) -> None:
    """Who says that a job has numbered 10^12 files is told of two gaps."""
    entry = next(entry for entry in forger.entries if entry.part == 1)
    ref = forger.table(encode_entries([entry._replace(parts=10**12, part=10**11)]), 1)
    forger.seal({**forger.body(), "files": 1, "manifests": [ref.to_json()]})
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
    (job_id,) = open_plans(forger.opened.store)
    path = max(p for p in (forger.folder / "_ags/plans" / job_id).iterdir() if p.suffix == ".json")
    name = str(path.relative_to(forger.folder))
    good = forger.body(name)
    rewrite = ManifestTask(TableRef.from_json(good["tables"][0]), 0, 1, "new", "key", b"wrapped", 1).to_json()
    assert ManifestTask.from_json(rewrite).to_json() == rewrite
    changes: list[dict[str, Any]] = [
        {"base": -1},
        {"base": "1"},
        {"base": 10**30},
        {"job_id": "another"},
        {"state": 5},
        {"tables": 5},
        {"tables": [good["tables"][0] | {"length": 2**62}]},
        {"tables": [good["tables"][0] | {"entries": 10**15}]},
        {"operation": "expire", "versions": [-1], "manifests": []},
        {"operation": "expire", "versions": [10**30], "manifests": []},
        {"operation": "expire", "versions": 5, "manifests": []},
        {"operation": "expire", "versions": [1], "manifests": 5},
        {"operation": "rotate", "keys": 5},
        {"operation": "rotate", "keys": {"a": 5}},
        {"operation": "rotate", "keys": {}, "moves": 5},
        {"operation": "rotate", "keys": {}, "wrap_nbytes": -1},
        {"operation": "rotate", "rewrites": 5},
        {"operation": "rotate", "rewrites": [rewrite | {"rows": 10**15}]},
        {"operation": "rotate", "rewrites": [rewrite | {"first": -1}]},
        {"operation": "rotate", "rewrites": [rewrite | {"manifest": good["tables"][0] | {"length": 2**62}}]},
    ]

    def read_plan() -> None:
        plan = Plan.load(Ledger.open(forger.folder, load_kms(forger.kms)), job_id)
        assert plan is not None
        plan.entries()

    for change in changes:
        forger.seal(good | change, name)
        with pytest.raises((FormatError, IntegrityError)):
            read_plan()


# ---------------------------------------------------------------- other places that numbers and JSON come from


def test_json_that_would_take_much_memory(tmp_path: Path) -> None:
    """24 bytes for each byte of it: a keystore, key material of Parquet, rows of a database."""
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
    sql = pytest.importorskip("ags_fast.keys.stores.sql")
    with pytest.raises(FormatError, match="are the most"):
        sql._json(bomb[: 31 << 20].decode())
    with pytest.raises(FormatError, match="33554432 are the most"):
        sql._json(bomb.decode())


def test_times_that_no_calendar_has() -> None:
    entry = {"key-id": "a", "encrypted-by-id": "m", "encrypted-key-metadata": "AAAA"}
    kek = EncryptedKey.from_json(entry | {"properties": {"KEY_TIMESTAMP": "9" * 18}})
    with pytest.raises(FormatError, match="KEY_TIMESTAMP"):
        kek.entry()
