"""Envelopes: single and double wrap, what a wrap is bound to, the cache of unwrapped keys."""

from __future__ import annotations

import base64
import copy
import gc
import hashlib
import json
import os
import pickle
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from kms_clients import Plain, keystore
from programs import wrapping
from support import flip, program, run_python

from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError, KeyLimitError, PolicyError
from ags_fast.keys import Envelope, KeyEntry, binding, clear_cache, kms_calls, load_kms, new_kek
from ags_fast.keys.cache import KeyCache, unwrapped_keks
from ags_fast.keys.kek import check_unwraps, rewrap_kek
from ags_fast.keys.kms import as_kms, local

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CANARY = b"canary-key-16-by"
BOUND = binding("dataset", "dek", "a/b.avro")


@pytest.fixture
def properties(tmp_path: Path) -> dict[str, str]:
    clear_cache()
    return keystore(tmp_path, "m")


@pytest.fixture(params=["double", "single"])
def double_wrap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "double")


def envelope_of(kms: Any, *entries: KeyEntry) -> Envelope:
    return Envelope(kms, {entry.key_id: entry for entry in entries})


def calls_of(action: Callable[[], Any]) -> dict[str, int]:
    before = kms_calls()
    action()
    return {operation: count for (_, operation), count in (kms_calls() - before).items()}


# ---------------------------------------------------------------- entries


def test_entries_as_json() -> None:
    entry = KeyEntry("k", "m", b"\0wrapped", "retired", 1234, 5, {"KEY_TIMESTAMP": "1234"}, {"later": [1]})
    value = entry.to_json()
    assert value == {
        "key-id": "k",
        "encrypted-by-id": "m",
        "encrypted-key-metadata": base64.b64encode(b"\0wrapped").decode(),
        "state": "retired",
        "created-ms": 1234,
        "uses": 5,
        "properties": {"KEY_TIMESTAMP": "1234"},
        "later": [1],
    }
    assert KeyEntry.from_json(json.loads(json.dumps(value))) == entry
    single = KeyEntry("k", "m")
    assert "encrypted-key-metadata" not in single.to_json()
    assert not single.double_wrap
    assert KeyEntry.from_json(single.to_json()) == single
    assert pickle.loads(pickle.dumps(entry)) == entry == copy.deepcopy(entry)
    assert entry.replace(state="active") == KeyEntry(  # type: ignore[call-arg]
        "k", "m", b"\0wrapped", "active", 1234, 5, *[entry.properties], entry.more
    )
    assert "wrapped=<8 bytes>" in repr(entry)
    huge = KeyEntry("k", "m", os.urandom(50_000), properties={"note": "n" * 50_000})
    assert KeyEntry.from_json(huge.to_json()) == huge
    assert len(repr(huge)) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"key-id": ""},
        {"key-id": 5},
        {"encrypted-by-id": "a\nb"},
        {"encrypted-key-metadata": ""},
        {"encrypted-key-metadata": "AA"},
        {"encrypted-key-metadata": "AB=="},  # bits to spare
        {"encrypted-key-metadata": 5},
        {"state": "enabled"},
        {"state": None},
        {"created-ms": -1},
        {"created-ms": "5"},
        {"created-ms": 1.5},
        {"uses": True},
        {"properties": []},
        {"properties": {"a": 1}},
    ],
)
def test_impossible_entries(change: dict[str, Any]) -> None:
    good = KeyEntry("k", "m", b"wrapped").to_json()
    with pytest.raises(FormatError):
        KeyEntry.from_json({**good, **change})
    for value in (None, [], "text"):  # type: ignore[var-annotated]
        with pytest.raises(FormatError):
            KeyEntry.from_json(value)
    for name in ("key-id", "encrypted-by-id", "state", "created-ms", "uses"):
        with pytest.raises(FormatError, match=name):
            KeyEntry.from_json({n: v for n, v in good.items() if n != name})


def test_impossible_entries_of_callers() -> None:
    with pytest.raises(ValueError, match="name of their own"):
        KeyEntry("k", "m", more={"key-id": "x"})
    with pytest.raises(ValueError, match="under 'x'"):
        Envelope(Plain(), {"x": KeyEntry("k", "m")})
    with pytest.raises(ValueError, match="16, 24 or 32"):
        new_kek(Plain(), "m", length=20)


# ---------------------------------------------------------------- wrapping


def test_round_trip(properties: dict[str, str], double_wrap: bool) -> None:
    kek = new_kek(properties, "m", double_wrap=double_wrap)
    assert kek.double_wrap == double_wrap
    assert kek.state == "active"
    assert kek.wrapping_key_id == "m"
    envelope = envelope_of(properties, kek)
    for size in (16, 24, 32):
        dek = os.urandom(size)
        wrapped = envelope.wrap(kek.key_id, dek, BOUND)
        assert dek not in wrapped
        assert envelope.wrap(kek.key_id, dek, BOUND) != wrapped
        assert envelope.unwrap(kek.key_id, wrapped, BOUND) == dek
        assert pickle.loads(pickle.dumps(envelope)).unwrap(kek.key_id, wrapped, BOUND) == dek
    items = [(os.urandom(16), binding("dataset", "dek", f"{i}")) for i in range(50)]
    many = envelope.wrap_many(kek.key_id, iter(items))
    assert len({wrapped[:12] for wrapped in many}) == 50
    assert envelope.unwrap_many(kek.key_id, zip(many, [b for _, b in items], strict=True)) == [dek for dek, _ in items]
    assert envelope.wrap_many(kek.key_id, []) == []
    swapped = [many[1], many[0], *many[2:]]
    with pytest.raises(IntegrityError, match=kek.key_id):
        envelope.unwrap_many(kek.key_id, list(zip(swapped, [b for _, b in items], strict=True)))


def test_the_layout_of_a_double_wrap(properties: dict[str, str]) -> None:
    kek = new_kek(properties, "m")
    assert kek.wrapped is not None
    key = load_kms(properties).unwrap_key(kek.wrapped, "m")
    assert len(key) == 32
    assert kek.properties == {"KEY_TIMESTAMP": str(kek.created_ms)}
    wrapped = envelope_of(properties, kek).wrap(kek.key_id, CANARY, BOUND)
    assert BOUND == b"ags_fast\0dek\0dataset\0a/b.avro"
    assert AESGCM(key).decrypt(wrapped[:12], wrapped[12:], BOUND) == CANARY


def test_the_layout_of_a_single_wrap(properties: dict[str, str]) -> None:
    kek = new_kek(properties, "m", double_wrap=False)
    wrapped = envelope_of(properties, kek).wrap(kek.key_id, CANARY, BOUND)
    assert load_kms(properties).unwrap_key(wrapped, "m") == CANARY + hashlib.sha256(BOUND).digest()


def test_calls_of_the_kms(properties: dict[str, str]) -> None:
    made: list[KeyEntry] = []
    assert calls_of(lambda: made.append(new_kek(properties, "m"))) == {"wrap": 1}
    assert calls_of(lambda: made.append(new_kek(properties, "m", double_wrap=False))) == {}
    double, single = made
    envelope = envelope_of(properties, *made)
    items = [(CANARY, BOUND)] * 10
    wrapped: dict[str, list[bytes]] = {}
    assert calls_of(lambda: wrapped.update(d=envelope.wrap_many(double.key_id, items))) == {}  # who made it, has it
    assert calls_of(lambda: wrapped.update(s=envelope.wrap_many(single.key_id, items))) == {"wrap": 10}
    assert calls_of(lambda: [envelope.unwrap(single.key_id, w, BOUND) for w in wrapped["s"]]) == {"unwrap": 10}
    clear_cache()

    def read() -> None:
        for _ in range(3):  # new envelopes and clients of one process
            fresh = pickle.loads(pickle.dumps(envelope))
            assert [fresh.unwrap(double.key_id, w, BOUND) for w in wrapped["d"]] == [CANARY] * 10

    assert calls_of(read) == {"unwrap": 1}
    assert calls_of(lambda: pickle.loads(pickle.dumps(envelope)).prepare(double.key_id)) == {}
    assert calls_of(lambda: envelope.prepare(single.key_id)) == {}


@pytest.mark.parametrize(
    "other",
    [
        binding("another", "dek", "a/b.avro"),
        binding("dataset", "document", "a/b.avro"),
        binding("dataset", "dek", "a/c.avro"),
        binding("dataset", "dek", ""),
        b"",
    ],
)
def test_bound_elsewhere(other: bytes, properties: dict[str, str], double_wrap: bool) -> None:
    kek = new_kek(properties, "m", double_wrap=double_wrap)
    envelope = envelope_of(properties, kek)
    wrapped = envelope.wrap(kek.key_id, CANARY, BOUND)
    with pytest.raises(IntegrityError, match="another file or dataset"):
        envelope.unwrap(kek.key_id, wrapped, other)


def test_bindings_are_unambiguous() -> None:
    for parts in (("a\0b", "c", "d"), ("a", "b\0", "c"), ("a", "b", "\0c")):
        with pytest.raises(ValueError, match="NUL"):
            binding(*parts)
    assert len({binding("a", "b", "c"), binding("ab", "", "c"), binding("a", "bc", ""), binding("", "ab", "c")}) == 4
    assert binding("ü", "p", os.fsdecode(b"caf\xe9")) == "ags_fast\0p\0ü\0caf".encode() + b"\xe9"


def test_every_bit_of_a_wrapped_key(properties: dict[str, str], double_wrap: bool) -> None:
    kek = new_kek(properties, "m", double_wrap=double_wrap)
    envelope = envelope_of(properties, kek)
    wrapped = envelope.wrap(kek.key_id, CANARY, BOUND)
    bad = [flip(wrapped, bit) for bit in range(8 * len(wrapped))] + [wrapped[:n] for n in range(len(wrapped))]
    for changed in [*bad, wrapped + b"\0"]:
        with pytest.raises((IntegrityError, FormatError, KeyAccessError)):
            envelope.unwrap(kek.key_id, changed, BOUND)
        with pytest.raises((IntegrityError, FormatError, KeyAccessError)):
            envelope.unwrap_many(kek.key_id, [(changed, BOUND)])
    assert envelope.unwrap(kek.key_id, wrapped, BOUND) == CANARY


def test_every_bit_of_a_wrapped_kek(properties: dict[str, str]) -> None:
    """Also while the right one is in the cache."""
    kek = new_kek(properties, "m")
    assert kek.wrapped is not None
    wrapped = envelope_of(properties, kek).wrap(kek.key_id, CANARY, BOUND)
    for bit in range(8 * len(kek.wrapped)):
        envelope = envelope_of(properties, kek.replace(wrapped=flip(kek.wrapped, bit)))
        with pytest.raises((IntegrityError, FormatError, KeyAccessError)):
            envelope.unwrap(kek.key_id, wrapped, BOUND)


def test_another_kek(properties: dict[str, str], double_wrap: bool) -> None:
    kek, other = (new_kek(properties, "m", double_wrap=double_wrap) for _ in range(2))
    envelope = envelope_of(properties, kek, other)
    wrapped = envelope.wrap(kek.key_id, CANARY, BOUND)
    if double_wrap:
        with pytest.raises(IntegrityError):
            envelope.unwrap(other.key_id, wrapped, BOUND)
    assert list(envelope.subset([other.key_id]).entries) == [other.key_id]
    with pytest.raises(KeyAccessError, match=kek.key_id):
        envelope.subset([other.key_id]).unwrap(kek.key_id, wrapped, BOUND)
    with pytest.raises(KeyAccessError, match="absent"):
        envelope.wrap("absent", CANARY, BOUND)


def test_a_retired_key_opens_and_does_not_wrap(properties: dict[str, str], double_wrap: bool) -> None:
    kek = new_kek(properties, "m", double_wrap=double_wrap)
    wrapped = envelope_of(properties, kek).wrap(kek.key_id, CANARY, BOUND)
    retired = envelope_of(properties, kek.replace(state="retired"))
    assert retired.unwrap(kek.key_id, wrapped, BOUND) == CANARY
    with pytest.raises(PolicyError, match="retired"):
        retired.wrap(kek.key_id, CANARY, BOUND)


def test_the_limit_of_a_kek(properties: dict[str, str]) -> None:
    kek = new_kek(properties, "m")
    for uses, allowed in ((1 << 32, True), ((1 << 32) + 1, False)):  # counted before they are used
        envelope = envelope_of(properties, kek.replace(uses=uses))
        if allowed:
            assert len(envelope.wrap_many(kek.key_id, [(CANARY, BOUND)] * 2)) == 2
        else:
            with pytest.raises(KeyLimitError, match="make a new one"):
                envelope.wrap(kek.key_id, CANARY, BOUND)


def test_a_kms_that_gives_another_key(properties: dict[str, str]) -> None:
    class Wrong(Plain):
        answer = b""

        def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
            self.calls.append("unwrap")
            return self.answer

    witness = (bytes(44), BOUND)
    kms, kek, single = Wrong(), new_kek(Plain(), "m"), new_kek(Plain(), "m", double_wrap=False)
    for answer in (b"", b"short", bytes(15), bytes(17), bytes(33), bytes(32 + 15), bytes(64 + 16)):
        kms.answer = answer
        actions: list[Callable[[], Any]] = [
            lambda: envelope_of(kms, kek).unwrap(kek.key_id, *witness),
            lambda: envelope_of(kms, single).unwrap(single.key_id, *witness),
            lambda: rewrap_kek(as_kms(kms), kek, wrapping_key_id="n"),
            lambda: check_unwraps(as_kms(kms), kek),
        ]
        for action in actions:
            kms.calls = []
            with pytest.raises(KeyAccessError, match="nothing" if not answer else "not an AES key"):
                action()
            assert kms.calls == ["unwrap"]  # at once: nothing was wrapped, and nobody asked again


def test_the_length_of_a_kek(properties: dict[str, str]) -> None:
    """Nothing shorter that the KMS has wrapped passes for a KEK of a dataset. Iceberg's may have any length."""
    for length in (16, 24):
        kek = new_kek(properties, "m", length=length)
        clear_cache()
        with pytest.raises(IntegrityError, match=f"{length} bytes"):
            envelope_of(properties, kek).wrap(kek.key_id, CANARY, BOUND)
        allowed = Envelope(properties, {kek.key_id: kek}, kek_lengths=(16, 24)).subset([kek.key_id])
        wrapped = pickle.loads(pickle.dumps(allowed)).wrap(kek.key_id, CANARY, BOUND)
        clear_cache()
        assert allowed.unwrap(kek.key_id, wrapped, BOUND) == CANARY


def test_keys_that_the_kms_makes() -> None:
    kms = load_kms({"encryption.kms-impl": "kms_clients:Proper"})
    made: list[KeyEntry] = []
    assert calls_of(lambda: made.append(new_kek(kms, "m", length=16))) == {"generate": 1}
    wrapped = envelope_of(kms, *made).wrap(made[0].key_id, CANARY, BOUND)
    assert AESGCM(bytes(range(16))).decrypt(wrapped[:12], wrapped[12:], BOUND) == CANARY


# ---------------------------------------------------------------- the cache


def test_the_lifetime_of_what_is_kept(properties: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After it, and with 0 at once, the KMS is asked again, and what was revoked meanwhile is refused."""
    now = time.monotonic()
    monkeypatch.setattr("ags_fast.keys.cache.time.monotonic", lambda: now)
    kek = new_kek(properties, "m")
    wrapped = envelope_of(properties, kek).wrap(kek.key_id, CANARY, BOUND)
    for text, seconds in ((None, 3600), ("90", 90), ("0", 0)):
        given = properties if text is None else {**properties, "kms.cache-lifetime-seconds": text}
        envelope = envelope_of(given, kek)
        clear_cache()

        def use(asked: int) -> None:
            made = calls_of(lambda: envelope.unwrap(kek.key_id, wrapped, BOUND))  # noqa: B023
            assert made == ({"unwrap": 1} if asked else {})

        use(1)
        use(not seconds)
        now += seconds - 1
        use(not seconds)
        now += 1
        use(1)
        local.set_state(properties, "m", "disabled", version=1)
        if seconds:
            use(0)
            now += seconds
        with pytest.raises(KeyAccessError, match="disabled"):
            envelope.unwrap(kek.key_id, wrapped, BOUND)
        local.set_state(properties, "m", "enabled", version=1)
    clear_cache()
    never = {**properties, "kms.cache-lifetime-seconds": "0"}
    made = new_kek(never, "m")
    assert calls_of(lambda: envelope_of(never, made).wrap(made.key_id, CANARY, BOUND)) == {"unwrap": 1}
    assert len(unwrapped_keks) == 0
    for text in ("", "-1", "1.5", "an hour", "9999999999"):
        with pytest.raises(ValueError, match=r"kms\.cache-lifetime-seconds"):
            load_kms({**properties, "kms.cache-lifetime-seconds": text})


class Slow(Plain):
    """Counts unwraps, takes its time, and fails as told."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        self.calls.append("unwrap")
        time.sleep(0.2)
        if self.error is not None:
            raise self.error
        return bytes(32)


def in_threads(count: int, action: Callable[[], Any]) -> list[Any]:
    results: list[Any] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_make_one_call() -> None:
    kms = Slow()
    kek = KeyEntry("k", "m", b"wrapped")
    envelope = envelope_of(kms, kek)
    results = in_threads(8, lambda: envelope.wrap("k", CANARY, BOUND))
    assert all(AESGCM(bytes(32)).decrypt(w[:12], w[12:], BOUND) == CANARY for w in results)
    assert kms.calls == ["unwrap"]


def test_threads_share_a_refusal() -> None:
    kms = Slow(KeyAccessError("no"))
    envelope = envelope_of(kms, KeyEntry("k", "m", b"wrapped"))
    results = in_threads(8, lambda: envelope.wrap("k", CANARY, BOUND))
    assert [type(error) for error in results] == [KeyAccessError] * 8
    assert len(set(map(id, results))) == 8
    assert len(kms.calls) < 8
    kms.error = None
    envelope.wrap("k", CANARY, BOUND)  # a refusal is not kept


def test_a_thread_that_is_stopped_does_not_stop_others() -> None:
    kms = Slow(KeyboardInterrupt())  # type: ignore[arg-type]
    envelope = envelope_of(kms, KeyEntry("k", "m", b"wrapped"))
    failed: list[BaseException] = []

    def leads() -> None:
        try:
            envelope.prepare("k")
        except KeyboardInterrupt as error:
            failed.append(error)

    first = threading.Thread(target=leads)
    first.start()
    time.sleep(0.1)
    kms_error, kms.error = kms.error, None  # whoever comes next is answered
    assert kms_error is not None
    envelope.prepare("k")
    first.join()
    assert len(kms.calls) <= 2


def test_the_cache_ends_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_cache()
    now = [1000.0]
    monkeypatch.setattr("ags_fast.keys.cache.time.monotonic", lambda: now[0])
    kms = Plain()
    kek = new_kek(kms, "m")
    envelope = envelope_of(kms, kek)
    now[0] += 3599
    assert calls_of(lambda: envelope.prepare(kek.key_id)) == {}
    now[0] += 2  # an hour after it was made, however often it was used
    assert len(unwrapped_keks) == 0
    assert calls_of(lambda: envelope.prepare(kek.key_id)) == {"unwrap": 1}


def test_the_cache_is_bounded() -> None:
    clear_cache()
    kms = Plain()
    keks = [new_kek(kms, "m") for _ in range(1030)]
    envelope = envelope_of(kms, *keks)
    assert len(unwrapped_keks) == 1024
    assert calls_of(lambda: envelope.prepare(keks[-1].key_id)) == {}
    assert calls_of(lambda: envelope.prepare(keks[0].key_id)) == {"unwrap": 1}
    small = KeyCache(entries=2)
    for name in (b"a", b"b"):
        small.get(name, lambda: object())  # type: ignore[arg-type, return-value]
    held = small.get(b"a", lambda: pytest.fail("it is there"))
    small.get(b"c", lambda: object())  # type: ignore[arg-type, return-value]
    assert small.get(b"a", lambda: pytest.fail("b was used longer ago")) is held
    assert len(small) == 2
    clear_cache()
    assert len(unwrapped_keks) == 0


def test_the_cache_is_of_one_asker(tmp_path: Path) -> None:
    """Who may not unwrap a key is not given what somebody else has unwrapped."""
    clear_cache()
    properties = keystore(tmp_path, "m")
    kek = new_kek(properties, "m")
    envelope_of(properties, kek).prepare(kek.key_id)
    others = {**properties, "kms.local.key-file": str(tmp_path / "absent")}
    with pytest.raises(KeyAccessError):
        envelope_of(others, kek).prepare(kek.key_id)
    mine, yours = Plain(), Plain()  # without properties: each is its own
    kek = new_kek(mine, "m")
    assert calls_of(lambda: envelope_of(mine, kek).prepare(kek.key_id)) == {}
    assert calls_of(lambda: envelope_of(yours, kek).prepare(kek.key_id)) == {"unwrap": 1}
    moved = kek.replace(wrapping_key_id="n")
    assert calls_of(lambda: envelope_of(mine, moved).prepare(kek.key_id)) == {"unwrap": 1}


def test_a_fork_has_an_empty_cache(tmp_path: Path) -> None:
    out = run_python(
        program(wrapping.envelope_after_fork, tmp_path),
    )
    lines = [line.partition(" ") for line in out.splitlines()]
    assert len({nonce for nonce, _, _ in lines}) == 4
    assert [calls for _, _, calls in lines] == ["{('local', 'unwrap'): 1}"] * 3 + ["{('local', 'wrap'): 1}"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_evicted_keys_are_wiped() -> None:
    """The KEK is in the process's memory while it is in the cache, and no longer."""
    run_python(program(wrapping.look_for_keks))


# ---------------------------------------------------------------- keys never show


def test_keys_never_show(properties: dict[str, str], double_wrap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.secrets, "token_bytes", lambda size: (CANARY * 2)[:size])  # type: ignore[attr-defined]
    local.create_key(properties, "canary")
    kek = new_kek(properties, "canary", double_wrap=double_wrap)
    envelope = envelope_of(properties, kek)
    wrapped = envelope.wrap(kek.key_id, CANARY, BOUND)
    shown: list[Any] = [
        envelope,
        kek,
        unwrapped_keks,
        envelope.kms,
        list(envelope.entries.values()),
        kek.to_json(),
        kms_calls(),
    ]
    texts = [repr(value) + str(value) for value in shown]
    blobs = [pickle.dumps(value) for value in (envelope, kek, envelope.kms)] + [wrapped]
    attempts: list[Callable[[], Any]] = [
        lambda: envelope.unwrap(kek.key_id, wrapped[:-1], BOUND),
        lambda: envelope.unwrap(kek.key_id, wrapped, b"x"),
        lambda: envelope.unwrap("absent", wrapped, BOUND),
        lambda: envelope.wrap("absent", CANARY, BOUND),
        lambda: envelope_of(properties, kek.replace(state="retired")).wrap(kek.key_id, CANARY, BOUND),
        lambda: local.create_key(properties, "canary"),
    ]
    for attempt in attempts:
        with pytest.raises((AgsError, ValueError)) as caught:
            attempt()
        texts += [*traceback.format_exception(caught.value), repr(vars(caught.value)), repr(caught.value.args)]
        blobs.append(pickle.dumps(caught.value))
    everything = "\n".join(texts).encode() + b"".join(blobs)
    for form in (
        CANARY,
        CANARY.hex().encode(),
        base64.b64encode(CANARY).rstrip(b"="),
        repr(list(CANARY))[1:-1].encode(),
    ):
        assert form not in everything
    gc.collect()


def test_speed_of_many(properties: dict[str, str]) -> None:
    """Some 10**6 a second on one core; a machine that is busy with other tests may take ten times as long."""
    kek = new_kek(properties, "m")
    envelope = envelope_of(properties, kek)
    items = [(os.urandom(16), binding("dataset", "dek", f"part/{i}.avro")) for i in range(20_000)]
    begun = time.perf_counter()
    wrapped = envelope.wrap_many(kek.key_id, items)
    assert len(wrapped) / (time.perf_counter() - begun) > 50_000
    assert all(len(w) == 44 for w in wrapped)
