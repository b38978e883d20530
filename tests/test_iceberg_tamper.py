"""Every object of a table, changed: the table is refused or reads as before, and never gives other rows."""

from __future__ import annotations

import base64
import copy
import json
import os
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import datasets
from hypothesis import given
from hypothesis import strategies as st
from iceberg_damage import relisted
from iceberg_tables import new_table, open_whole, rows, sql_catalog
from support import flip

from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import delete, files, open_table, verify
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.rewriting import entries, list_record, manifest_bytes
from ags_fast.iceberg.writing import write_sealed
from ags_fast.keys import clear_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.more  # each object is changed in many ways


KINDS = ("manifest-list", "manifest", "data", "deletion-vector")
CHANGED = (IntegrityError, FormatError)
HEADER, SEALED_BLOCK = 8, (1 << 20) + 28  # bytes of an AGS1 stream with blocks of 1 MiB


class Copy:
    """A table on the disk, whose files tests change and put back."""

    def __init__(self, folder: Path, kms: dict[str, str], location: str, objects: dict[str, list[Path]]) -> None:
        self.folder, self.kms, self.location, self.objects = folder, kms, location, objects
        self.metadata = location.removeprefix("file://")
        self.expected = self.read()

    def read(self) -> list[tuple[int, str]]:
        """The rows, read as a process does that knows nothing of the table."""
        found = open_table(self.location, kms=self.kms).scan().to_arrow()
        return sorted(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))

    def check(self) -> None:
        """Read the table, which must be refused, or be as before."""
        try:
            found = self.read()
        except AgsError:
            pass
        else:
            assert found == self.expected

    def all(self) -> list[Path]:
        return [path for paths in self.objects.values() for path in paths]


def made(folder: Path, kms: dict[str, str], name: str, first: int) -> Copy:
    table = new_table(sql_catalog(folder, kms), name)
    table.append(rows(first, first + 50))
    table.append(rows(first + 50, first + 100))
    delete(table, f"id >= {first + 40} and id < {first + 60}")
    objects: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for one in files(table):
        path = Path(one.path.removeprefix("file://"))
        if path not in objects[one.kind]:  # one Puffin file has two deletion vectors
            objects[one.kind].append(path)
    return Copy(folder, kms, table.metadata_location, objects)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Copy, Copy]:
    """Two tables under one master key."""
    folder = tmp_path_factory.mktemp("tamper")
    clear_cache()
    kms = datasets.make_kms(folder, keys=datasets.MASTERS)
    return made(folder, kms, "t", 0), made(folder, kms, "u", 1000)


@pytest.fixture
def table(tables: tuple[Copy, Copy]) -> Iterator[Copy]:
    yield tables[0]
    clear_cache()
    assert tables[0].read() == tables[0].expected, "the test did not put back what it changed"


def with_content(path: Path, data: bytes, then: Callable[[], object]) -> None:
    """Do something while a file has another content."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        then()
    finally:
        path.write_bytes(before)


# -------------------------------------------------------------------------------------------------------- bits and cuts


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_flipped_bit(tables: tuple[Copy, Copy], kind: str, data: st.DataObject) -> None:
    table = tables[0]
    path = data.draw(st.sampled_from(table.objects[kind]))
    before = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(before) - 1))
    with_content(path, flip(before, bit), table.check)


@pytest.mark.parametrize("kind", KINDS)
def test_each_byte_of_head_and_tail(table: Copy, kind: str) -> None:
    path = table.objects[kind][0]
    before = path.read_bytes()
    for at in [*range(24), *range(len(before) - 24, len(before))]:
        with_content(path, flip(before, 8 * at + at % 8), table.check)


@pytest.mark.parametrize("kind", KINDS)
def test_what_reads_as_before_is_still_told(table: Copy, kind: str) -> None:
    """A verification sees each change behind the header of a file, if a scan would not."""
    path = table.objects[kind][0]
    before = path.read_bytes()
    for at in range(HEADER, len(before), max(len(before) // 12, 1)):
        with_content(path, flip(before, 8 * at), lambda: verified_as_changed(table, path))


def verified_as_changed(table: Copy, path: Path) -> None:
    failed = verify(open_table(table.location, kms=table.kms), snapshots="current").failed
    assert [row.src.removeprefix("file://") for row in failed] == [str(path)]
    assert failed[0].error_class in ("IntegrityError", "FormatError")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut(table: Copy, kind: str) -> None:
    for path in table.objects[kind]:
        before = path.read_bytes()
        ends = {0, 1, 4, 7, 8, 9, 35, 36, 37, len(before) // 2, len(before) - 28, len(before) - 1}
        for end in sorted(ends):
            with_content(path, before[:end], lambda: refused(table))
            assert refused_by_verify(table, path, before[:end])
        with_content(path, before + b"\0" * 36, table.check)
        assert refused_by_verify(table, path, before + b"\0")


def refused(table: Copy) -> None:
    with pytest.raises(CHANGED):
        table.read()


def refused_by_verify(table: Copy, path: Path, data: bytes) -> bool:
    found: list[Any] = []
    with_content(path, data, lambda: found.extend(verify(open_table(table.location, kms=table.kms)).failed))
    return [(row.src.removeprefix("file://"), row.error_class) for row in found] in (
        [(str(path), "IntegrityError")],
        [(str(path), "FormatError")],
    )


def test_a_cut_at_a_block(tmp_path: Path, kms: dict[str, str]) -> None:
    """Whole blocks that are missing have no bad tag: only the trusted length tells."""
    table = new_table(sql_catalog(tmp_path, kms))
    table.append(rows(0, 10))
    relisted(table, larger)
    (one,) = [one for one in files(table) if one.kind == "manifest"]
    path = Path(one.path.removeprefix("file://"))
    data = path.read_bytes()
    blocks = (len(data) - HEADER) // SEALED_BLOCK
    assert blocks >= 2
    for block in range(blocks + 1):
        with_content(path, data[: HEADER + block * SEALED_BLOCK], lambda: refused_at(table.metadata_location, kms))


def larger(table: Any, record: Any) -> Any:
    """A manifest of some MiB: its entry comes after thousands of files that were deleted."""
    io = table.io
    known = io.table.known(record["manifest_path"])
    inner = io.inner(known.path)
    container = read_container(open_whole(known, inner))
    (entry,) = entries(container, known)
    made = []
    for _ in range(5000):
        one = copy.deepcopy(entry)
        one["status"] = 2
        one["data_file"]["file_path"] = os.urandom(500).hex()
        made.append(one)
    path = f"{table.location()}/metadata/large.avro"
    written = write_sealed(path, manifest_bytes(container, [*made, entry], 0, "deflate"), 16, inner)
    snapshot = {"snapshot-id": 1, "sequence-number": 2}
    return list_record(written, [*made, entry], like=record, snapshot=snapshot)


def refused_at(location: str, kms: dict[str, str]) -> None:
    with pytest.raises(CHANGED):
        open_table(location, kms=kms).scan().to_arrow()


# ---------------------------------------------------------------------------------------------------------------- swaps


def test_swaps_within_a_table(table: Copy) -> None:
    for one, other in permutations(table.all(), 2):
        with_content(one, other.read_bytes(), lambda: refused(table))


def test_swaps_between_tables_of_one_master_key(tables: tuple[Copy, Copy]) -> None:
    mine, theirs = tables
    for kind in KINDS:
        for one, other in zip(mine.objects[kind], theirs.objects[kind], strict=True):
            with_content(one, other.read_bytes(), lambda: refused(mine))


def test_a_file_that_is_gone(table: Copy) -> None:
    for path in table.all():
        aside = path.with_name("aside")
        path.rename(aside)
        try:
            with pytest.raises(FileNotFoundError):
                table.read()
        finally:
            aside.rename(path)


# ------------------------------------------------------------------------------------------------------------- metadata


def changed_metadata(table: Copy, change: Callable[[dict[str, Any]], object], then: Callable[[], object]) -> None:
    path = Path(table.metadata)
    raw = json.loads(path.read_bytes())
    change(raw)
    clear_cache()
    with_content(path, json.dumps(raw).encode(), then)
    clear_cache()


def test_an_older_metadata_file_is_an_older_state(table: Copy) -> None:
    folder = Path(table.metadata).parent
    states = []
    for path in sorted(folder.glob("*.metadata.json")):
        found = open_table(f"file://{path}", kms=table.kms).scan().to_arrow()
        states.append(sorted(found["id"].to_pylist()))
    assert states == [
        [],
        list(range(50)),
        list(range(100)),
        [*range(40), *range(60, 100)],
    ]


def keys_of(raw: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The KEKs, and the keys of manifest lists."""
    keks = [one for one in raw["encryption-keys"] if "properties" in one]
    return keks, [one for one in raw["encryption-keys"] if "properties" not in one]


def current(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [one for one in raw["snapshots"] if one["snapshot-id"] == raw["current-snapshot-id"]]
    return found


def key_of_current(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [one for one in raw["encryption-keys"] if one["key-id"] == current(raw)["key-id"]]
    return found


def swap_keys(raw: dict[str, Any]) -> None:
    _, keys = keys_of(raw)
    wrapped = [one["encrypted-key-metadata"] for one in keys]
    for one, other in zip(keys, wrapped[1:] + wrapped[:1], strict=True):
        one["encrypted-key-metadata"] = other


def rotate_ids(raw: dict[str, Any]) -> None:
    ids = [one["key-id"] for one in raw["snapshots"]]
    for one, other in zip(raw["snapshots"], ids[1:] + ids[:1], strict=True):
        one["key-id"] = other


def wrap_the_other_way(raw: dict[str, Any]) -> None:
    kek, key = keys_of(raw)[0][0], key_of_current(raw)
    kek["encrypted-key-metadata"], key["encrypted-key-metadata"] = (
        key["encrypted-key-metadata"],
        kek["encrypted-key-metadata"],
    )


def later(raw: dict[str, Any]) -> None:
    (kek,) = keys_of(raw)[0]
    kek["properties"] = {"KEY_TIMESTAMP": str(int(kek["properties"]["KEY_TIMESTAMP"]) + 1)}


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], tuple[type[Exception], ...]]] = {
    "keys swapped": (swap_keys, CHANGED),
    "ids swapped": (rotate_ids, CHANGED),
    "KEK and key swapped": (wrap_the_other_way, (*CHANGED, KeyAccessError)),
    "timestamp": (later, CHANGED),
    "no timestamp": (lambda raw: keys_of(raw)[0][0].pop("properties"), (*CHANGED, KeyAccessError)),
    "timestamp is no number": (
        lambda raw: keys_of(raw)[0][0].update(properties={"KEY_TIMESTAMP": "x"}),
        (FormatError,),
    ),
    "no KEK": (
        lambda raw: raw.update({"encryption-keys": [k for k in raw["encryption-keys"] if "properties" not in k]}),
        (KeyAccessError,),
    ),
    "no key": (
        lambda raw: raw.update({"encryption-keys": [k for k in raw["encryption-keys"] if k != key_of_current(raw)]}),
        (KeyAccessError,),
    ),
    "no keys": (lambda raw: raw.pop("encryption-keys"), (KeyAccessError,)),
    "wrapped by itself": (
        lambda raw: key_of_current(raw).update({"encrypted-by-id": key_of_current(raw)["key-id"]}),
        (*CHANGED, KeyAccessError),
    ),
    "another master key": (
        lambda raw: keys_of(raw)[0][0].update({"encrypted-by-id": "other"}),
        (*CHANGED, KeyAccessError),
    ),
    "the snapshot names the KEK": (
        lambda raw: current(raw).update({"key-id": keys_of(raw)[0][0]["key-id"]}),
        (FormatError,),
    ),
    "the snapshot names no key": (lambda raw: current(raw).pop("key-id"), (PolicyError,)),
    "no master key": (lambda raw: raw["properties"].pop("encryption.key-id"), (IntegrityError,)),
    "version 2": (lambda raw: raw.update({"format-version": 2}), (PolicyError,)),
    "empty key": (lambda raw: key_of_current(raw).update({"encrypted-key-metadata": ""}), (FormatError,)),
    "not base64": (lambda raw: key_of_current(raw).update({"encrypted-key-metadata": "%%%"}), (FormatError,)),
    "another list": (
        lambda raw: current(raw).update({"manifest-list": raw["snapshots"][0]["manifest-list"]}),
        (*CHANGED, KeyAccessError),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_keys_in_the_metadata(table: Copy, name: str) -> None:
    change, errors = CHANGES[name]

    def read() -> None:
        with pytest.raises(errors):
            table.read()

    changed_metadata(table, change, read)


@given(data=st.data())
def test_a_flipped_bit_of_a_wrapped_key(tables: tuple[Copy, Copy], data: st.DataObject) -> None:
    table = tables[0]

    def change(raw: dict[str, Any]) -> None:
        one = data.draw(st.sampled_from([keys_of(raw)[0][0], key_of_current(raw)]))
        wrapped = base64.b64decode(one["encrypted-key-metadata"])
        bit = data.draw(st.integers(0, 8 * len(wrapped) - 1))
        one["encrypted-key-metadata"] = base64.b64encode(flip(wrapped, bit)).decode()

    def read() -> None:
        with pytest.raises((*CHANGED, KeyAccessError)):
            table.read()

    changed_metadata(table, change, read)


def test_keys_of_another_table(tables: tuple[Copy, Copy]) -> None:
    mine, theirs = (json.loads(Path(one.metadata).read_bytes()) for one in tables)
    both = [*mine["encryption-keys"], *theirs["encryption-keys"]]

    def read() -> None:
        with pytest.raises((*CHANGED, KeyAccessError)):
            tables[0].read()

    changed_metadata(tables[0], lambda raw: raw.update({"encryption-keys": theirs["encryption-keys"]}), read)
    changed_metadata(
        tables[0],
        lambda raw: (raw.update({"encryption-keys": both}), current(raw).update({"key-id": current(theirs)["key-id"]})),
        read,
    )


def test_all_signs_of_encryption_removed(table: Copy) -> None:
    """Then the table is one in plaintext to every reader, and its files are not Avro: no rows."""

    def strip(raw: dict[str, Any]) -> None:
        raw["properties"].pop("encryption.key-id")
        raw.pop("encryption-keys")
        raw["format-version"] = 2
        for one in raw["snapshots"]:
            one.pop("key-id")

    def read() -> None:
        with pytest.raises((AgsError, ValueError)):
            table.read()

    changed_metadata(table, strip, read)
