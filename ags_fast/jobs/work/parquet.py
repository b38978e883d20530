"""The work on a Parquet file of a dataset.

The file stays a Parquet file under its own name, encrypted module by module. The footer key is the DEK of the file, and
columns may have DEKs of their own. The AAD prefix is in the manifest and not in the file, so a file that was put into
the place of another file does not open.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.files.contents import closing, settled
from ags_fast.dataset.files.parquet import STRICT, decrypt_to, parquet_keys, plain_length, sealed
from ags_fast.dataset.names import check_path
from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.fs import NewObject
from ags_fast.jobs.work.context import (
    WRITTEN_EARLIER,
    AlreadyEncryptedError,
    Outcome,
    SourceChangedError,
    encrypted_already,
    ends,
)
from ags_fast.jobs.work.rows import is_there
from ags_fast.parquet import Keys, decrypt_file, encrypt_file, reencrypt_file, verify
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import Entry, Store
    from ags_fast.jobs.work.context import Context, Operations, Task
    from ags_fast.parquet.report import Report


def _ok(file_length: int) -> Outcome:
    return Outcome("ok", file_length=file_length)


class _Checked(NewObject):
    """A file of the dataset in the making that is published only if a last check passes."""

    def __init__(self, context: Context, entry: FileEntry, check: Callable[[], None]) -> None:
        self._new = context.dataset.begin(entry.file, tag=context.job_id, fsync=context.fsync)
        self._check = check
        self.path = self._new.path
        super().__init__()

    def _write(self, view: memoryview) -> None:
        self._new.write(view)

    def _publish(self) -> None:
        self._check()
        self._new.publish()

    def _discard(self) -> None:
        self._new.discard()


def _is_parquet(source: Any) -> bool:
    return settled("auto", "", ends(source)) == "parquet"


def source_encrypted_already(source: Store, found: Entry) -> str | None:
    """Return why a source need not be encrypted; None if it must be, or if only the attempt will show."""
    try:
        with closing(source.open_seekable(found.path, found)) as plain:
            return _already(plain)
    except (FormatError, IntegrityError, OSError, PolicyError):
        return None


def _already(plain: Any) -> str | None:
    if reason := encrypted_already(ends(plain)[0]):
        return reason
    if not _is_parquet(plain):
        return None
    with Opened(plain) as opened:
        return None if opened.crypto is None else "it is a Parquet file with a signed footer, and encrypted already"


def _write(context: Context, task: Task, attempt: int) -> Outcome:
    """Encrypt a source, or a file of the dataset anew. Its plain length is the length of the plaintext view."""
    entry, keys = task.entry, parquet_keys(context.contents, task.entry)
    length, plain = _finished(context, entry, keys, attempt), None
    if length is None:
        report = _encrypt(context, entry, keys) if task.old is None else _rekey(context, task.old, entry, keys)
        length, plain = report.file_length, report.plain_length
        if context.verify_after:
            _check(context, entry)
    if plain is None:
        plain = plain_length(context.contents, entry._replace(file_length=length), keys)
    return Outcome("ok", file_length=length, plain_length=plain)


def _encrypt(context: Context, entry: FileEntry, keys: Keys) -> Report:
    source = context.other
    assert source is not None
    there = source.stat(entry.source)
    if there is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source.full_path(entry.source))
    if not entry.is_of(there.size, there.stamp):
        raise SourceChangedError(f"{entry.source} has changed since it was planned: run the job again")

    def check() -> None:
        now = source.stat(entry.source)
        if now is None or not entry.is_of(now.size, now.stamp):
            raise SourceChangedError(f"{entry.source} changed while it was read: run the job again")
        context.check_plan()

    with closing(source.open_seekable(entry.source, there)) as plain, _Checked(context, entry, check) as new:
        try:
            return encrypt_file(
                plain,
                new,
                keys,
                aad_prefix=entry.aad_prefix,
                store_aad_prefix=entry.key_material is not None,
                threads=context.threads,
            )
        except (FormatError, IntegrityError, PolicyError):
            check()
            if reason := _already(plain):
                raise AlreadyEncryptedError(reason) from None
            if not _is_parquet(plain):
                raise FormatError(
                    "this is not a Parquet file: run the job again with format='ags1', which encrypts the rest"
                ) from None
            raise


def _finished(context: Context, entry: FileEntry, keys: Keys, attempt: int) -> int | None:
    """Return the length in bytes of the file if an earlier attempt, or the job that is resumed, published it.

    The length cannot be planned. So the footer decides: it is written last, and opens only under the planned key.
    """
    if not (attempt or context.resume) or context.dataset.stat(entry.file) is None:
        return None
    try:
        if context.resume == "verify":
            return _check(context, entry)
        with sealed(context.contents, entry) as source, Opened(source, Reading(keys, entry.aad_prefix)) as opened:
            return opened.source.size
    except (IntegrityError, FormatError):
        return None


def _check(context: Context, entry: FileEntry) -> int:
    keys = parquet_keys(context.contents, entry)
    with sealed(context.contents, entry) as source:
        length = verify(source, keys, aad_prefix=entry.aad_prefix, threads=context.threads, **STRICT).file_length
        if entry.key_material is not None:
            _check_key_material(entry, source, keys)
    return length


def _check_key_material(entry: FileEntry, source: Any, keys: Keys) -> None:
    """Raise IntegrityError if Parquet's key tools would not find the keys of a file by what the file stores.

    No tag covers the key metadata of the footer key.
    """
    with Opened(source, Reading(keys, entry.aad_prefix)) as opened:
        crypto = opened.crypto
        found = [
            crypto is not None and (crypto.key_metadata, crypto.stored) == (keys.footer_metadata, entry.aad_prefix)
        ]
        found += [chunk.key_metadata == (keys.column(chunk.path) or (None, None))[1] for chunk in opened.chunks()]
    if not all(found):
        raise IntegrityError(f"{entry.file} has other key material than its manifest says: it was changed")


def _verify(context: Context, task: Task, attempt: int) -> Outcome:
    return _ok(_check(context, task.entry))


def _decrypt(context: Context, task: Task, attempt: int) -> Outcome:
    entry, destination = task.entry, context.other
    assert destination is not None
    if destination.stat(check_path(entry.path)) is not None:
        # As for AGS1 streams, but the plaintext length is not known, so the bytes decide.
        if (attempt or context.resume or not context.overwrite) and _is_decrypted(context, entry):
            if context.resume and not attempt:
                return Outcome("skipped", *WRITTEN_EARLIER, entry.file_length)
            return _ok(entry.file_length)
        if not context.overwrite and not context.resume:
            raise FileExistsError(is_there(entry.path))
    with sealed(context.contents, entry) as source, context.restored(entry) as new:
        decrypt_to(context.contents, entry, source, new)
    left_out = [key["column"] for key in entry.column_keys or () if key["key_id"] in context.without]
    if left_out:
        why = f"without {', '.join(left_out)}: the KMS refuses their keys"
        return Outcome("ok", "ColumnsDropped", why, entry.file_length)
    return _ok(entry.file_length)


def _rekey(context: Context, old: FileEntry, entry: FileEntry, keys: Keys) -> Report:
    with sealed(context.contents, old) as source, _Checked(context, entry, context.check_plan) as new:
        return reencrypt_file(
            source,
            new,
            parquet_keys(context.contents, old),
            keys,
            aad_prefix=old.aad_prefix,
            new_aad_prefix=entry.aad_prefix,
            store_aad_prefix=entry.key_material is not None,
            threads=context.threads,
            **STRICT,
        )


OPERATIONS: Operations = {"encrypt": _write, "decrypt": _decrypt, "verify": _verify, "rekey": _write}


def holds(context: Context, entry: FileEntry, file: str) -> bool:
    """Return whether `file` holds what belongs to `entry`. Raises the reader's error if not."""
    there = entry._replace(file_length=0)
    with (
        sealed(context.contents, there, file) as source,
        Opened(source, Reading(parquet_keys(context.contents, entry), entry.aad_prefix)),
    ):
        return True


class _Digest:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


def _digest(context: Context, entry: FileEntry) -> bytes:
    """Return the digest of the decrypted file, after a check of all tags."""
    ours = _Digest()
    with sealed(context.contents, entry) as file:
        decrypt_to(context.contents, entry, file, ours)
    return ours.hash.digest()


def _is_decrypted(context: Context, entry: FileEntry) -> bool:
    """Return whether the file outside of the dataset equals the dataset's."""
    return _digest(context, entry) == context.digest_outside(entry.path, hashlib.sha256())


def same_as_source(context: Context, entry: FileEntry) -> bool:
    """Return whether a source equals the dataset's file, after a check of all tags.

    Encryption does not keep every byte of a footer. So the source is encrypted and decrypted again, and the result is
    compared with the decrypted file of the dataset. The temporary file is encrypted: no plaintext is stored but at the
    source.
    """
    source = context.other
    assert source is not None
    ours, its = _digest(context, entry), _Digest()
    keys = Keys(os.urandom(16))
    with closing(source.open_seekable(entry.path)) as plain, tempfile.TemporaryFile() as between:
        encrypt_file(plain, between, keys, threads=context.threads)
        decrypt_file(between, its, keys, threads=context.threads)
    return ours == its.hash.digest()
