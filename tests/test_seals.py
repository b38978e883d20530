"""Seals and pins of table metadata: the test vectors of the scheme, what is the same state, and forgeries."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ags_fast._core import Key
from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.seals.pins import OpenPin, SealedPin, parse
from ags_fast.seals.seal import NEWEST, Seal, SealKey, decoded, encoded, make, positions
from ags_fast.seals.state import canonical, digest

TABLE = UUID("6ab959eb-4cd6-4743-be53-d430a1e0d3a3")
KEKS = {"k1": bytes(range(16)), "k2": bytes(range(16, 48))}
KEYS = {name: SealKey.of(Key(kek), TABLE) for name, kek in KEKS.items()}


def entry(name: str, timestamp: str) -> dict[str, Any]:
    properties = {"KEY_TIMESTAMP": timestamp}
    return {"key-id": name, "encrypted-key-metadata": "AAEC", "encrypted-by-id": "m", "properties": properties}


EMPTY: dict[str, Any] = {
    "format-version": 3,
    "table-uuid": str(TABLE).upper(),
    "location": "s3://b/t/",
    "last-sequence-number": 0,
    "last-updated-ms": 5,
    "last-column-id": 1,
    "current-schema-id": 0,
    "schemas": [
        {
            "type": "struct",
            "schema-id": 0,
            "fields": [{"id": 1, "name": "ä", "required": False, "type": "decimal(9, 2)"}],
        }
    ],
    "default-spec-id": 0,
    "partition-specs": [{"spec-id": 0, "fields": []}],
    "last-partition-id": 999,
    "default-sort-order-id": 0,
    "sort-orders": [{"order-id": 0, "fields": []}],
    "properties": {"encryption.key-id": "m"},
    "current-snapshot-id": None,
    "next-row-id": 0,
    "encryption-keys": [entry("k1", "1")],
    "refs": {},
    "snapshots": [],
    "statistics": [],
    "partition-statistics": [],
    "snapshot-log": [],
    "metadata-log": [],
}
ROTATED = {**EMPTY, "encryption-keys": [entry("k2", "2")], "last-updated-ms": 6}


def snapshot(number: int, parent: int | None = None) -> dict[str, Any]:
    return {
        "snapshot-id": number,
        **({} if parent is None else {"parent-snapshot-id": parent}),
        "sequence-number": number,
        "timestamp-ms": 1000 + number,
        "summary": {"operation": "append", "added-records": "3"},
        "manifest-list": f"s3://b/t/metadata/{number}.avro",
        "schema-id": 0,
        "key-id": f"list {number}",
    }


def with_snapshots(*numbers: int) -> dict[str, Any]:
    """Metadata of a table with a line of snapshots."""
    made = [snapshot(one, parent) for one, parent in zip(numbers, (None, *numbers), strict=False)]
    refs = {"main": {"snapshot-id": numbers[-1], "type": "branch"}}
    last = {"current-snapshot-id": numbers[-1], "last-sequence-number": numbers[-1]}
    return {**copy.deepcopy(EMPTY), "snapshots": made, "refs": refs, **last}


def line(count: int, rotations: frozenset[int] = frozenset()) -> list[tuple[Seal, SealKey]]:
    """Seals of so many states, one after the other. After some of them another KEK seals."""
    made: list[tuple[Seal, SealKey]] = []
    key = KEYS["k1"]
    for n in range(count):
        earlier, parent = key, made[-1][0] if made else None
        if n in rotations:
            key = SealKey.of(Key(hashlib.sha256(b"%d" % n).digest()), TABLE)
        made.append((make({**EMPTY, "next-row-id": n}, "k1", key, parent, earlier, file=f"{n}.json"), key))
    return made


# ------------------------------------------------------------------------------------------------------------- vectors


def test_vectors() -> None:
    assert canonical(EMPTY).startswith(b'ags-iceberg-state-1\n{"current-schema-id":0,"default-sort-order-id":0,')
    assert digest(EMPTY).hex() == "bda8c04c22a66c3d62cf4d3c76bcb343bd8ffc9c72980d231795bf1cd6b153cf"
    assert digest(ROTATED).hex() == "04f00a486ea603a42e79009ab660d6fd647412d0945e3141c0647c1383a9c90e"
    assert KEYS["k1"].fingerprint.hex() == "e870987c0a86e3f58c1dc8a084b326b9"
    assert KEYS["k2"].fingerprint.hex() == "dc6737b2101202052daa26d7597f0142"
    first = make(EMPTY, "k1", KEYS["k1"], file="00000-a.metadata.json")
    assert first.id.hex() == "6e70bd5a91172a56d5feeed257747d6c81b74f0af6dbc1df5af60844074c5850"
    assert first.mac.hex() == "2f0802d892feb63457625c686671577af642560e7ecbf16e23a3202c57ea3ee4"
    key, earlier = KEYS["k2"], KEYS["k1"]
    second = make(ROTATED, "k2", key, first, earlier, file="00001-b.metadata.json", nonce=bytes(12))
    assert second.id.hex() == "f630d84927dabc98a17d08f1119bdbbbc40a49efecfcbe1004b964b0744cc216"
    assert second.mac.hex() == "120844e850069c5f3d259d5fffaa6b47d1c993ec7f3f49e08974a1af71aecc18"
    pin = SealedPin.of(first, KEYS["k1"])
    assert pin.text == (
        "ags1.6ab959eb4cd64743be53d430a1e0d3a3.0.bnC9WpEXKlbV_u7SV3R9bIG3Twr228HfWvYIRAdMWFA.6HCYfAqG4_WMHcighLMmuQ."
        "bnC9WpEXKlZucL1akRcqVm5wvVqRFypWbnC9WpEXKlY"
    )
    pin.check(second, key)
    assert [Seal.read(one.text) for one in (first, second)] == [first, second]
    assert parse(pin.text) == pin


def test_what_a_key_shows() -> None:
    """Nothing: neither a KEK nor what it makes is in a repr, and none is pickled."""
    key = KEYS["k1"]
    assert repr(key) == f"<SealKey {key.fingerprint.hex()}>"
    with pytest.raises(TypeError, match="never pickled"):
        key.__reduce__()
    assert Key(KEKS["k1"]).extract(TABLE.bytes) not in repr(vars(key)).encode()


# --------------------------------------------------------------------------------------------------------------- state


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same JSON with its members in another order."""
    if isinstance(value, dict):
        items = [(name, shuffled(one, rng)) for name, one in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(one, rng) for one in value] if isinstance(value, list) else value


SAME: dict[str, dict[str, Any]] = {
    "what a server decides": {"last-updated-ms": 9, "snapshot-log": [{"snapshot-id": 1, "timestamp-ms": 5}]},
    "older files": {"metadata-log": [{"metadata-file": "x", "timestamp-ms": 1}]},
    "the spelling of the UUID": {"table-uuid": str(TABLE)},
    "slashes behind the location": {"location": "s3://b/t"},
    "null": {"comment": None},
    "no statistics": {"statistics": None},
    "the seal": {"properties": {"encryption.key-id": "m", "ags.seal": "{}"}},
    "the order of lists with ids": {"schemas": [EMPTY["schemas"][0], {"schema-id": 1, "fields": []}][:1]},
    "no row ids": {"next-row-id": None},
    "another spelling of base64": {"encryption-keys": [{**entry("k1", "1"), "encrypted-key-metadata": "AAEC"}]},
}
OTHER: dict[str, dict[str, Any]] = {
    "the location": {"location": "s3://b/u"},
    "a property": {"properties": {"encryption.key-id": "m", "write.format.default": "parquet"}},
    "the master key": {"properties": {"encryption.key-id": "n"}},
    "a member that nobody knows": {"later": {"a": [1]}},
    "a key": {"encryption-keys": [entry("k1", "1"), entry("k3", "3")]},
    "the type of a column": {
        "schemas": [
            {**EMPTY["schemas"][0], "fields": [{"id": 1, "name": "ä", "required": False, "type": "decimal(9,3)"}]}
        ]
    },
    "statistics": {"statistics": [{"snapshot-id": 1, "statistics-path": "x"}]},
    "an integer as a float": {"last-column-id": 1.0},
    "an integer as true": {"last-column-id": True},
}


@pytest.mark.parametrize("what", SAME)
def test_the_same_state(what: str) -> None:
    assert digest({**EMPTY, **SAME[what]}) == digest(EMPTY)


@pytest.mark.parametrize("what", OTHER)
def test_another_state(what: str) -> None:
    assert digest({**EMPTY, **OTHER[what]}) != digest(EMPTY)


@given(st.randoms(use_true_random=False))
def test_the_order_of_members(rng: random.Random) -> None:
    raw = with_snapshots(3, 4, 5)
    other = shuffled(raw, rng)
    for name in ("schemas", "snapshots", "encryption-keys"):
        rng.shuffle(other[name])
    assert canonical(other) == canonical(raw)


def test_main_is_the_current_snapshot() -> None:
    raw = with_snapshots(3, 4)
    bare = {name: value for name, value in raw.items() if name != "refs"}
    assert digest(bare) == digest(raw)
    with pytest.raises(FormatError, match="branch main"):
        digest({**raw, "current-snapshot-id": 3})
    with pytest.raises(FormatError, match="branch main"):
        digest({**raw, "refs": {}})


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [
        ("double", [1, 1.0]),
        ("fixed[2]", ["ab12", "AB12"]),
        ("uuid", [str(TABLE), str(TABLE).upper()]),
        ("timestamptz", ["2020-01-01T10:00Z", "2020-01-01T10:00:00.000+00:00"]),
        ("time", ["10:00:00.5", "10:00:00.500"]),
    ],
)
def test_defaults_of_columns(kind: str, spellings: list[Any]) -> None:
    column = {"id": 1, "name": "a", "required": False, "type": kind}
    raw = [
        {**EMPTY, "schemas": [{"schema-id": 0, "fields": [{**column, "initial-default": one}]}]} for one in spellings
    ]
    assert digest(raw[0]) == digest(raw[1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"format-version": 2},
        {"format-version": 4},
        {"schemas": [EMPTY["schemas"][0]] * 2},
        {"schemas": [{"fields": []}]},
        {"properties": {"a": 1}},
        {"next-row-id": 1 << 63},
        {"location": "\ud800"},
        {"table-uuid": "x"},
        {"snapshots": [{"snapshot-id": 1, "summary": {"a": 1}}]},
        {"encryption-keys": [{**entry("k1", "1"), "encrypted-key-metadata": "?"}]},
        {"schemas": [{"schema-id": 0, "fields": [{"id": 1, "type": 5}]}]},
    ],
)
def test_what_has_no_state(wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        digest({**EMPTY, **wrong})


def test_values_of_other_types() -> None:
    """An item of texts and whole numbers alone is encoded as it is; others take the long way."""
    made = []
    for value in (7, 7.0, True, "7", None, [], {}, [7], {"a": 7}, {"a": None}):
        raw = with_snapshots(*range(1, 5))
        raw["snapshots"][2]["schema-id"] = value
        made.append(digest(raw))
    del raw["snapshots"][2]["schema-id"]
    assert made[4] == made[5] == made[6] == made[9] == digest(raw)
    assert len(set(made)) == len(made) - 3
    raw["snapshots"][2]["schema-id"] = 1 << 63
    with pytest.raises(FormatError, match="too large"):
        digest(raw)


# --------------------------------------------------------------------------------------------------------------- seals


def test_a_long_line() -> None:
    """Each seal is small, names its ancestors right, and descends from each pin that is not too old."""
    made = line(330, frozenset({50, 51, 200}))
    for n in (0, 1, 63, 64, 65, 100, 329):
        seal, _ = made[n]
        assert len(seal.text) < 3500
        for at in positions(n):
            assert seal.ancestor(at) == made[at][0].id[:8]
    last, key = made[-1]
    for seal, its in made:
        SealedPin.of(seal, its).check(last, key)
    for seal, its in made[:-1]:
        with pytest.raises(IntegrityError, match="rolled back"):
            SealedPin.of(last, key).check(seal, its)
    assert positions((1 << 53) - 1)[0] == ((1 << 53) // 65_536 - 32) * 65_536


def test_another_line() -> None:
    """A fork by who holds the same KEK is found where the pin is newer than the fork, or as old."""
    made, other = line(40), line(40)
    fork = make({**EMPTY, "next-row-id": 999}, "k1", KEYS["k1"], other[20][0], KEYS["k1"], file="fork")
    for n in range(22, 60):
        parent = fork
        fork = make({**EMPTY, "next-row-id": n}, "k1", KEYS["k1"], parent, KEYS["k1"], file="fork")
    SealedPin.of(*made[20]).check(fork, KEYS["k1"])
    for n in (21, 22, 39):
        with pytest.raises(IntegrityError, match=r"(was|is) another"):
            SealedPin.of(*made[n]).check(fork, KEYS["k1"])


def test_keys_that_do_not_follow() -> None:
    made = line(3)
    stranger = SealKey.of(Key(os.urandom(32)), TABLE)
    forged = make({**EMPTY, "next-row-id": 9}, "k1", stranger, made[-1][0], None, file="x")
    with pytest.raises(IntegrityError, match="does not follow"):
        SealedPin.of(*made[-1]).check(forged, stranger)
    # What the stranger wraps is no key before: nobody can make the pin's own from its fingerprint.
    lying = make({**EMPTY, "next-row-id": 9}, "k1", stranger, made[-1][0], KEYS["k2"], file="x")
    with pytest.raises(IntegrityError, match="does not follow"):
        SealedPin.of(*made[-1]).check(lying, stranger)
    of_others = lying._replace(keys=os.urandom(60))
    with pytest.raises(IntegrityError):
        SealedPin.of(*made[-1]).check(of_others, stranger)


def test_sixteen_keys_at_most() -> None:
    made = line(20, frozenset(range(1, 20)))
    last, key = made[-1]
    assert len(last.keys) == 16 * 60
    SealedPin.of(*made[3]).check(last, key)
    with pytest.raises(IntegrityError, match="does not follow"):
        SealedPin.of(*made[2]).check(last, key)


def is_taken(text: str, key: SealKey) -> bool:
    try:
        return Seal.read(text).is_by(key)
    except (IntegrityError, PolicyError):
        return False


def test_any_change_of_a_seal() -> None:
    seal, key = line(5, frozenset({2}))[-1]
    told = json.loads(seal.text)
    assert seal.is_by(key)
    for name, value in told.items():
        others: tuple[Any, ...] = (None, 7, "x", True, [], {}, str(value) + "A", 0, -1, 1 << 60)
        for other in others:
            if other == value and type(other) is type(value):
                continue
            assert not is_taken(json.dumps({**told, name: other}, separators=(",", ":")), key), (name, other)
    for wrong in ("", "[]", "{}", "x", seal.text[:-1], seal.text.replace('"n":4', '"n":4,"n":4'), " " * 9 + "[" * 9000):
        with pytest.raises(IntegrityError):
            Seal.read(wrong)
    with pytest.raises(PolicyError, match="update ags_fast"):
        Seal.read(json.dumps({**told, "v": 2}))
    spelled = {**told, "table": str(TABLE).upper()}
    with pytest.raises(IntegrityError):
        Seal.read(json.dumps(spelled))
    assert not seal.is_by(KEYS["k2"])


@pytest.mark.parametrize("text", ["AA=", "AB", "A", "A A", "AA\n", "é", "A+", "A/"])
def test_base64url_has_one_spelling(text: str) -> None:
    with pytest.raises(ValueError, match="base64"):
        decoded(text)


def test_base64url() -> None:
    for nbytes in range(9):
        data = os.urandom(nbytes)
        assert decoded(encoded(data)) == data
        assert base64.urlsafe_b64encode(data).decode().rstrip("=") == encoded(data)


# ---------------------------------------------------------------------------------------------------------------- pins


@pytest.mark.parametrize("made", [SealedPin.of(*line(70)[-1]), OpenPin.of(EMPTY), OpenPin.of(with_snapshots(3))])
def test_pins_have_one_spelling(made: Any) -> None:
    assert parse(made.text) == made
    parts = made.text.split(".")
    wrong = ["", "ags1", made.text + ".", made.text.upper(), made.text[:-1], f" {made.text}", f"{made.text}\n"]
    wrong += [".".join([*parts[:i], *parts[i + 1 :]]) for i in range(len(parts))]
    wrong += [".".join([*parts[:i], "x", *parts[i + 1 :]]) for i in range(len(parts))]
    wrong += [made.text.replace(parts[2], "0" + parts[2], 1), "ags9" + made.text[4:]]
    for text in wrong:
        with pytest.raises(ValueError, match="no pin"):
            parse(text)


def test_pins_without_a_seal() -> None:
    pin = OpenPin.of(with_snapshots(3, 4))
    pin.check(with_snapshots(3, 4))
    pin.check(with_snapshots(3, 4, 7))
    grown = with_snapshots(3, 4, 7)
    for wrong, why in (
        (with_snapshots(3), "rolled back"),
        (with_snapshots(3, 5), "is no ancestor"),
        ({**grown, "snapshots": [one for one in grown["snapshots"] if one["snapshot-id"] != 4]}, "expired"),
        ({**grown, "table-uuid": str(UUID(int=1))}, "another table"),
    ):
        with pytest.raises(IntegrityError, match=why):
            pin.check(wrong)
    grown["snapshots"][1]["timestamp-ms"] = 1
    with pytest.raises(IntegrityError, match="its snapshot 4 is another"):
        pin.check(grown)
    circle = with_snapshots(5, 6)
    circle["snapshots"][0]["parent-snapshot-id"] = 6
    with pytest.raises(IntegrityError, match="no ancestor"):
        pin.check(circle)


def test_numbers_of_the_newest() -> None:
    assert positions(0) == []
    assert positions(NEWEST + 1) == [*range(NEWEST + 1)]
