"""A user's program, which checkers of types read: what is right passes, and each line with an ignore must be an error.

test_types.py has mypy and pyright check it; nothing runs it.
"""

from __future__ import annotations

from datetime import timedelta

import ags_fast
from ags_fast import jobs, keys, parquet

PROPERTIES = {"encryption.kms-type": "local"}


class MyKms:
    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return key[::-1] + wrapping_key_id.encode()

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return wrapped[: -len(wrapping_key_id)][::-1]


class Derived(keys.KmsClient):
    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return MyKms().wrap_key(key, wrapping_key_id)


def streams(key: bytes, metadata: keys.StandardKeyMetadata, mode: str) -> tuple[bytes, str]:
    with ags_fast.open("x", "wb", key=key, block_size="64 KiB") as writer:
        writer.write(b"plaintext")
    length: int = writer.file_length
    with ags_fast.open("x", key=key, length=length) as reader, ags_fast.open("x", key_metadata=metadata) as other:
        data: bytes = reader.read_at(0, 4) + other.read(4)
    with ags_fast.open("x", "rt", key=key, length=None, encoding="utf-8") as text:
        line: str = text.readline()
    ags_fast.open("x", mode, key=key, length=length).close()
    ags_fast.open("x", key=key)  # type: ignore[call-overload]
    ags_fast.open("x", "rb", key=key)  # type: ignore[call-overload]
    ags_fast.open("x", "rt", key=key)  # type: ignore[call-overload]
    ags_fast.open("x", mode, key=key)  # type: ignore[call-overload]
    ags_fast.AgsReader("x", key)  # type: ignore[call-arg]
    ags_fast.AgsReeder("x", key)  # type: ignore[attr-defined]
    return data, line


def datasets(kms: keys.Kms, key: bytes) -> int:
    jobs.encrypt_files("a", "b", kms=kms, wrapping_key_id="k", format="parquet", links="follow", resume="length")
    result: jobs.JobResult = jobs.verify_files("b", kms=MyKms(), on_error="raise")
    try:
        jobs.rotate("b", kms=PROPERTIES, what="mek", grace=timedelta(days=7)).raise_for_failures()
    except (ags_fast.UnsupportedChangeError, ags_fast.ConcurrentChangeError, jobs.JobError) as error:
        print(error)
    with jobs.open_file("b", "p", kms=Derived(), missing="null") as file:
        file.read_at(0, 5)
    ags_fast.Dataset.open("b", kms=kms).refresh()
    jobs.encrypt_files("a", "b", kms=kms, format="parqet")  # type: ignore[arg-type]
    jobs.encrypt_files("a", "b", kms=kms, links="folow")  # type: ignore[arg-type]
    jobs.encrypt_files("a")  # type: ignore[call-arg]
    jobs.rotate("b", kms=kms, what="mke")  # type: ignore[arg-type]
    jobs.decrypt_files("b", "c", kms=kms, missing="hide")  # type: ignore[arg-type]
    jobs.audit("b", kms=kms, event="kek-leeked")  # type: ignore[arg-type]
    jobs.expire("b", kms=kms, older_than=7)  # type: ignore[arg-type]
    jobs.verify_files("b", kms=timedelta)  # type: ignore[arg-type]
    jobs.encrypt_file("a", "b")  # type: ignore[attr-defined]
    ags_fast.Dataset("b")  # type: ignore[arg-type]
    parquet.encrypt_file("a", "b", key)  # type: ignore[arg-type]
    parquet.encrypt_file("a", "b", parquet.Keys(key), other_columns="plane")  # type: ignore[arg-type]
    print(result.table.num_rows)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType] of pyarrow
    return len(result.rows)
