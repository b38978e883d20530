"""Keys and KMS clients: forked, shared by threads and processes, and what is left of keys in memory."""

from __future__ import annotations

import functools
import gc
import http.client
import os
import signal
import ssl
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from killing import ended, fork
from kms_clients import keystore
from support import error_of

from ags_fast._core import Key, rewrap
from ags_fast.errors import KeyAccessError
from ags_fast.keys import Envelope, clear_cache, kms_calls, load_kms, new_kek
from ags_fast.keys.cache import unwrapped_keks
from ags_fast.keys.kms import local
from ags_fast.keys.stores import open_key_store
from ags_fast.keys.stores.base import row_name
from programs.process import Needle


def kms_after_fork(folder: Path) -> None:
    kms: Any = load_kms({**keystore(folder, "m"), "kms.max-calls-per-second": "0.001"})  # and has own turns
    wrapped = kms.wrap_key(b"key", "m")
    kms._lock.acquire()  # as another thread might hold it

    def child() -> None:
        assert not kms_calls()
        assert kms.unwrap_key(wrapped, "m") == b"key"
        print(dict(kms_calls()), flush=True)

    assert ended(fork(child)) == 0
    print(dict(kms_calls()))


def create_keys(path: str, key_file: str, name: object, number: int) -> None:
    properties = {"kms.local.path": path, "kms.local.key-file": key_file}
    for i in range(number):
        local.create_key(properties, f"{name} {i}")
        print(i, flush=True)


def aws_after_fork(url: str, key_id: str) -> None:
    kms: Any = load_kms({"encryption.kms-type": "aws", "kms.endpoint": url, "client.region": "us-east-1"})
    wrapped = kms.wrap_key(b"key", key_id)
    before = kms._connected()

    def child() -> None:
        assert kms.unwrap_key(wrapped, key_id) == b"key"
        assert kms._connected() is not before

    assert ended(fork(child)) == 0
    assert kms.unwrap_key(wrapped, key_id) == b"key"


def kms_of_threads_after_fork(properties: dict[str, str], key_id: str) -> None:
    kms: Any = load_kms(properties)
    wrapped = kms.wrap_key(b"key", key_id)
    kms._lock.acquire()  # as another thread might hold it

    def child() -> None:
        assert kms.unwrap_key(wrapped, key_id) == b"key"
        assert kms.unwrap_key(kms.wrap_key(b"child", key_id), key_id) == b"child"
        kms.close()

    pid = fork(child)
    kms._lock.release()
    assert ended(pid) == 0
    assert kms.unwrap_key(wrapped, key_id) == b"key"
    kms.close()


def fork_beside_threads(properties: dict[str, str], key_id: str) -> None:
    kms = load_kms(properties)
    wrapped = kms.wrap_key(b"key", key_id)
    ends, done = threading.Event(), [0] * 4
    failed: list[str] = []

    def use(number: int) -> None:
        while not ends.is_set():
            try:
                assert kms.unwrap_key(wrapped, key_id) == b"key"
                done[number] += 1
            except BaseException as error:
                failed.append(repr(error))
                raise

    def child() -> None:
        assert kms.unwrap_key(wrapped, key_id) == b"key"

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        before = list(done)
        while any(after == had for after, had in zip(done, before, strict=False)):
            time.sleep(0.01)
        assert ended(fork(child)) == 0
    ends.set()
    for thread in threads:
        thread.join()
    print(failed)


def mend_a_pin(properties: dict[str, str], key_id: str, right: str) -> None:
    for _ in range(2):
        with load_kms(properties) as kms:
            print(error_of(KeyAccessError, functools.partial(kms.wrap_key, b"key", key_id)))
    Path(properties["kms.pkcs11.pin-file"]).write_text(right)
    assert kms.unwrap_key(kms.wrap_key(b"key", key_id), key_id) == b"key"


def share_a_token(properties: dict[str, str], key_id: str, pin: str) -> None:
    import pkcs11

    token = pkcs11.lib(properties["kms.pkcs11.library"]).get_token(token_label=properties["kms.pkcs11.token-label"])
    another = token.open(user_pin=pin)
    kms = load_kms(properties)
    wrapped = kms.wrap_key(b"key", key_id)
    another.close()
    assert kms.unwrap_key(wrapped, key_id) == b"key"
    another = token.open()
    print(len(list(another.get_objects({pkcs11.Attribute.LABEL: key_id}))))


def fork_beside_sessions(properties: dict[str, str], key_id: str) -> None:
    kms = load_kms(properties)
    wrapped = kms.wrap_key(b"before", key_id)
    enough = threading.Event()

    def use(number: int, rounds: int) -> int:
        key = os.urandom(16)
        for _ in range(rounds):
            assert kms.unwrap_key(wrapped, key_id) == b"before"
            assert kms.unwrap_key(kms.wrap_key(key, key_id), key_id) == key
            if enough.is_set():
                break
        return 1

    def used(rounds: int) -> int:
        with ThreadPoolExecutor(8) as pool:
            return sum(pool.map(use, range(8), [rounds] * 8))

    def child() -> None:
        signal.alarm(20)
        assert used(2) == 8

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(used, 1 << 30)
        try:
            for _ in range(20):
                assert ended(fork(child)) == 0
        finally:
            enough.set()
        assert working.result() == 8


def two_openssls(properties: dict[str, str], key_id: str, port: str, authority: str) -> None:
    trusted = ssl.create_default_context(cafile=authority)
    server = http.client.HTTPSConnection("127.0.0.1", int(port), timeout=30, context=trusted)
    for _ in range(2):
        server.request("GET", "/keys/none")
        answer = server.getresponse()
        assert answer.status == 401
        assert answer.read()
        assert not answer.will_close
        assert load_kms(properties).current_version(key_id) == "01"
    server.close()


def envelope_after_fork(folder: Path) -> None:
    properties = keystore(folder, "m")
    kek = new_kek(properties, "m")
    envelope = Envelope(properties, {kek.key_id: kek})
    wrapped = envelope.wrap(kek.key_id, bytes(16), b"bound")
    unwrapped_keks._lock.acquire()  # as another thread might hold it

    def child() -> None:
        assert len(unwrapped_keks) == 0
        assert envelope.unwrap(kek.key_id, wrapped, b"bound") == bytes(16)
        print(envelope.wrap(kek.key_id, bytes(16), b"bound")[:12].hex(), dict(kms_calls()), flush=True)

    for _ in range(3):
        assert ended(fork(child)) == 0
    unwrapped_keks._lock.release()
    print(envelope.wrap(kek.key_id, bytes(16), b"bound")[:12].hex(), dict(kms_calls()))


def look_for_keks() -> None:
    needle = Needle(32)

    def put() -> None:
        with needle.key() as key:
            unwrapped_keks.put(b"name", Key(key))

    def evict() -> None:
        unwrapped_keks.entries = 0
        unwrapped_keks.put(b"x", Key(bytes(16)))

    for empty in (clear_cache, evict):
        put()
        assert needle.copies() >= 1
        empty()
        gc.collect()
        assert needle.copies() == 0, needle.copies()
        unwrapped_keks.entries = 10
    put()
    unwrapped_keks._keys[b"name"] = 0.0, unwrapped_keks._keys[b"name"][1]  # its time is over
    unwrapped_keks._until = 0.0
    assert len(unwrapped_keks) == 0
    assert needle.copies() == 0


def rewrap_after_fork(folder: Path) -> None:
    rows = 25_000
    old, new, dek = Key(bytes(16)), Key(bytes(32)), bytes(16)
    row = bytes(12) + old.seal(bytes(12), dek, b"")
    offsets = b"".join((len(row) * i).to_bytes(4, sys.byteorder) for i in range(rows + 1))
    names, wrapped = bytes(len(offsets)), row * rows

    def run(file: Path) -> None:
        out = bytearray(len(wrapped))
        rewrap(old, new, b"", names, b"", offsets, wrapped, out, threads=2)
        view = memoryview(out)
        for i in range(0, len(out), 997 * len(row)):
            assert new.open(out[i : i + 12], view[i + 12 : i + len(row)], b"") == dek
        file.write_bytes(b"".join(view[i : i + 12] for i in range(0, len(out), len(row))))

    run(folder / "0")
    children = [fork(functools.partial(run, folder / name)) for name in "12"]
    run(folder / "3")
    assert not any(map(ended, children))


def change_sql(url: str, dataset_id: str, number: int) -> None:
    store: Any = open_key_store(url)
    for i in range(10):
        wrapped = f"{number} {i}".encode()
        name = row_name(f"20260101T000000-{number:06}{i:06}", wrapped)
        store.put(dataset_id, {name: wrapped})
        print(name)
