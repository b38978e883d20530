"""encrypt_file, decrypt_file and reencrypt_file: the parts of a file pass through a Mover, and the footer follows.

Only the footer, which comes last, depends on where every part went.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast._threads import thread_count
from ags_fast._types import (
    Algorithm,
    ColumnsLeft,
    Layout,
    OrDrop,
    ReadableSource,
    Retriever,
    WritableTarget,
    check_choice,
)
from ags_fast.errors import KeyAccessError, PolicyError
from ags_fast.files.sink import Target
from ags_fast.parquet.footer import Dropped, NewFooter, put_footer, resealed_footer, resealed_plain_length
from ags_fast.parquet.keys import Keys, check_keys
from ags_fast.parquet.mover import Mover
from ags_fast.parquet.opened import Crypto, Opened, unknown_fields
from ags_fast.parquet.reading import V2_LAYOUTS, Encryption, Reading, opening
from ags_fast.parquet.report import footer_warnings, report_of, v2_warnings
from ags_fast.parquet.sealer import PLAIN, Sealer, new_crypto
from ags_fast.parquet.spec import ENCRYPTED_MAGIC, PLAIN_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Unpack

    from ags_fast._core import Chunk
    from ags_fast.parquet.reading import Opening
    from ags_fast.parquet.report import Report

__all__ = ["decrypt_file", "encrypt_file", "reencrypt_file"]


def encrypt_file(  # noqa: PLR0913 (the contract's)
    src: ReadableSource,
    dst: WritableTarget | bytearray,
    keys: Keys,
    *,
    algorithm: Algorithm = "AES_GCM_V1",
    plaintext_footer: bool = False,
    other_columns: ColumnsLeft = "footer",
    aad_prefix: bytes | None = None,
    store_aad_prefix: bool = True,
    v2_layout: Layout = "arrow",
    drop_bloom_filters: bool = False,
    threads: int | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Encrypt a Parquet file without decoding a value (Parquet Modular Encryption, sections 4 and 5).

    Everything that encryption does not concern stays as it is, byte by byte: encodings, compression, statistics, and
    fields that this version does not know.

    Args:
        src: A path, a URL of fsspec such as ``s3://bucket/file``, a bytes-like object or a seekable binary file.
        dst: A path or a URL, which appears only when it is complete; a bytearray; or a file open for writing, which
            need not seek.
        keys: The footer key and, by column, other keys.
        algorithm: "AES_GCM_V1", or "AES_GCM_CTR_V1", under which page bytes have no tag. Reading a file under
            "AES_GCM_CTR_V1" needs ``allow_ctr=True`` (section 5.1).
        plaintext_footer: Whether the footer is in plain text, and signed. Then legacy readers can read the plain
            columns, and the footer shows no statistics of encrypted columns (section 5.5).
        other_columns: What becomes of columns that `keys` do not name: "footer" seals them with the footer key, "plain"
            leaves them unencrypted.
        aad_prefix: Bytes that bind the file to its name or version (section 4.4.1).
        store_aad_prefix: Whether the file stores `aad_prefix`. If not, readers must supply it.
        v2_layout: The layout of V2 data pages that have levels: "arrow" encrypts the whole page, "parquet-java" leaves
            the levels in plain text before it. Neither reads the other.
        drop_bloom_filters: Whether bloom filters are left out.
        threads: As for AgsCodec.
        fsync: Whether a path's file and folder are on the disk when the call returns.
        storage_options: Options for fsspec, of URLs.
        progress: Called with the bytes of the source that were done since its last call.

    Returns:
        What was written, by column, with its lengths in bytes.

    Raises:
        FormatError: The source is not a Parquet file, or has more row groups, columns or pages than can be numbered.
        PolicyError: The source is encrypted already, or the store of `dst` cannot promise that it appears complete.
        ValueError: An argument is impossible, or `keys` name a column that the file does not have.
    """
    check_choice("v2_layout", v2_layout, Layout)
    how = Encryption(algorithm, plaintext_footer, other_columns, aad_prefix, store_aad_prefix, v2_layout)
    n = thread_count(threads)
    with Opened(src, Reading(storage_options=storage_options)) as opened:
        if opened.crypto is not None:
            raise PolicyError("the file is encrypted already: re-encrypt it to give it other keys")
        sealer = Sealer(opened, keys, *new_crypto(how, keys), other_columns=other_columns)
        chunks = list(opened.chunks())
        with Target(dst, private=False, fsync=fsync, threads=n, storage_options=storage_options) as target:
            mover = Mover(
                opened,
                target,
                sealer,
                n,
                v2_layout=V2_LAYOUTS[v2_layout],
                drop_bloom_filters=drop_bloom_filters,
                progress=progress,
            )
            return _write("encrypt", chunks, mover, sealer, plaintext_footer)


def _write(op: str, chunks: list[Chunk], mover: Mover, sealer: Sealer, plaintext_footer: bool) -> Report:
    """Write all chunks and a new footer."""
    opened, target, crypto = mover.opened, mover.target, sealer.crypto
    if not target.discardable:
        mover.check_ordinals(chunks)
    target.put(PLAIN_MAGIC if plaintext_footer else ENCRYPTED_MAGIC)
    mover.move(chunks)
    new = NewFooter(crypto, plaintext_footer)
    footer = new.of_file(opened, chunks)
    plain_length = new.plain_length(target.position, footer)
    put_footer(target, footer, crypto, sealer.footer(), plaintext_footer)
    report = report_of(op, opened, chunks, mover, crypto.algorithm, plaintext_footer)
    report.plain_length = plain_length
    report.warnings = v2_warnings(mover) + report.warnings
    if plaintext_footer:
        sealed = [chunk for chunk in chunks if chunk.target is not None]
        left = sorted({number for chunk in sealed for number in unknown_fields(chunk)})
        if left:
            report.warnings.append(
                f"unknown fields {left} of encrypted columns are in their sealed metadata, not in the plaintext "
                "footer: only ags_fast puts them back"
            )
    report.warnings += target.warnings
    return report


@opening
def decrypt_file(
    src: ReadableSource,
    dst: WritableTarget | bytearray,
    keys: Keys | Retriever,
    *,
    missing: OrDrop = "error",
    fsync: bool = False,
    progress: Callable[[int], object] | None = None,
    **how: Unpack[Opening],
) -> Report:
    """Decrypt a Parquet file to a plain one, which appears at `dst` only when every tag has passed.

    Args:
        src: A path, a URL, a bytes-like object or a seekable binary file.
        dst: A path or a URL, which appears only when it is complete; a bytearray; or a file open for writing.
        keys: Keys, or a function from a key_metadata to its key. The function gets None where the file stores no
            key_metadata. ``Keys(None, {...})`` reads, of a file with a signed footer, columns that have keys of their
            own; the signature is not verified then, as the report says.
        missing: What becomes of columns whose keys are not held: "error", or "drop" them, as whole top-level fields.
        fsync: Whether a path's file and folder are on the disk when the call returns.
        progress: Called with the bytes of the source that were done since its last call.
        **how: How the file is opened, and the errors if it is not: see `Opening`.

    Returns:
        What was written, by column, with its lengths in bytes.
    """
    check_choice("missing", missing, OrDrop)
    reading = Reading(keys, **how)
    n = thread_count(reading.threads)
    with Opened(src, reading) as opened:
        chunks = list(opened.chunks())
        lost = opened.lost(chunks, missing == "error")
        dropped = Dropped(opened, chunks) if lost else None
        reasons = {opened.refusal(chunk) for chunk in lost} - {""}
        if dropped is not None:
            chunks = [chunk for chunk in chunks if chunk.column not in dropped.columns]
        with Target(dst, private=True, fsync=fsync, threads=n, storage_options=reading.storage_options) as target:
            mover = Mover(opened, target, lambda chunk: PLAIN, n, progress=progress)
            target.put(PLAIN_MAGIC)
            mover.move(chunks)
            footer = NewFooter().of_file(opened, chunks, dropped)
            put_footer(target, footer, None, None, False)
            assert opened.crypto is not None
            report = report_of("decrypt", opened, chunks, mover, opened.crypto.algorithm, not opened.encrypted_footer)
            report.plain_length = report.file_length
            report.footer_verified = opened.footer_verified
            report.warnings += footer_warnings(report)
            if dropped is not None:
                names = ", ".join(dropped.names)
                report.warnings.append(f"left out, because their keys are not held: {names}{''.join(sorted(reasons))}")
            report.warnings += target.warnings
            return report


@opening
def reencrypt_file(  # noqa: PLR0913 (the contract's)
    src: ReadableSource,
    dst: WritableTarget | bytearray,
    old: Keys | Retriever,
    new: Keys,
    *,
    new_aad_prefix: bytes | None = None,
    store_aad_prefix: bool = True,
    same_size: bool = False,
    algorithm: Algorithm | None = None,
    plaintext_footer: bool | None = None,
    other_columns: ColumnsLeft = "footer",
    v2_layout: Layout | None = None,
    fsync: bool = False,
    progress: Callable[[int], object] | None = None,
    **how: Unpack[Opening],
) -> Report:
    """Give an encrypted Parquet file new keys, without decoding a value and without plaintext in storage.

    Parts that had no tag before get one, even if they were changed: the report's warnings name such parts.

    Args:
        src: As for decrypt_file.
        dst: As for encrypt_file. It may be `src`, which is replaced when the new file is complete.
        old: The keys that the file has, as for decrypt_file.
        new: The keys that it gets.
        new_aad_prefix: A new AAD prefix; None keeps the old one.
        store_aad_prefix: Whether the file stores `new_aad_prefix`.
        same_size: Whether every module stays where it is, and as long as it is. Each column keeps its kind of key, and
            the file its AAD prefix and algorithm. Columns whose old keys are not held pass through unchanged: so
            a caller that must not read these columns can still change the footer key and keys of other columns.
        algorithm: As for encrypt_file; None keeps the file's.
        plaintext_footer: As for encrypt_file; None keeps the file's.
        other_columns: As for encrypt_file.
        v2_layout: As for encrypt_file; None keeps each page's.
        fsync: As for encrypt_file.
        progress: As for encrypt_file.
        **how: How `src` is opened, and the errors if it is not: see `Opening`.

    Returns:
        What was written, by column, with its lengths in bytes.

    Raises:
        KeyAccessError: The old footer key is not given.
        ValueError: An argument is impossible, or `same_size` is impossible with the others.
    """
    check_keys(new)
    check_choice("algorithm", algorithm, Algorithm, None)
    check_choice("other_columns", other_columns, ColumnsLeft)
    check_choice("v2_layout", v2_layout, Layout, None)
    if same_size and not (
        new_aad_prefix is None and algorithm is None and plaintext_footer is None and v2_layout is None
    ):
        raise ValueError("same_size keeps the AAD prefix, the algorithm, the footer's mode and the V2 layout")
    reading = Reading(old, **how)
    n = thread_count(reading.threads)
    with Opened(src, reading) as opened:
        if not opened.footer_verified:
            raise KeyAccessError(
                "the old footer key is needed and not given: without it, a footer that was not verified would be sealed"
            )
        chunks = list(opened.chunks())
        was = opened.crypto
        assert was is not None
        if plaintext_footer is None:
            plaintext_footer = not opened.encrypted_footer
        if same_size:
            sealer = _same_sealer(opened, chunks, new)
        else:
            opened.lost(chunks, True)
            prefix = new_aad_prefix
            if prefix is None:
                prefix, store_aad_prefix = opened.prefix, was.stored is not None
            new_how = Encryption(algorithm or was.algorithm, plaintext_footer, other_columns, prefix, store_aad_prefix)
            sealer = Sealer(opened, new, *new_crypto(new_how, new), other_columns=other_columns)
        with Target(dst, private=False, fsync=fsync, threads=n, storage_options=reading.storage_options) as target:
            mover = Mover(
                opened,
                target,
                sealer,
                n,
                v2_layout=V2_LAYOUTS[v2_layout],
                same_size=same_size,
                progress=progress,
            )
            if same_size:
                return _reseal(chunks, mover, sealer)
            return _write("reencrypt", chunks, mover, sealer, plaintext_footer)


def _same_sealer(opened: Opened, chunks: list[Chunk], new: Keys) -> Sealer:
    """Return a Sealer that keeps the size of every module."""
    was = opened.crypto
    assert was is not None
    if was.unique is None:
        raise ValueError("same_size cannot re-key DuckDB's dialect: leave same_size out to write the file to the spec")
    crypto = Crypto(was.algorithm, was.unique, was.stored, was.supply, new.footer_metadata or None)
    sealer = Sealer(opened, new, crypto, opened.aad, "footer", like=True)
    for chunk in chunks:
        if not chunk.missing and sealer(chunk).kind != chunk.kind:
            raise ValueError(
                f"column {chunk.name!r} is under a {chunk.kind} key, and same_size keeps that: "
                + (
                    "give it a key of its own in `new`"
                    if chunk.kind == "column"
                    else "name no other key for it in `new`"
                )
            )
    return sealer


def _reseal(chunks: list[Chunk], mover: Mover, sealer: Sealer) -> Report:
    """Write every module where it was."""
    opened, target, crypto = mover.opened, mover.target, sealer.crypto
    held = [chunk for chunk in chunks if not chunk.missing]
    plaintext = not opened.encrypted_footer
    target.put(PLAIN_MAGIC if plaintext else ENCRYPTED_MAGIC)
    mover.move(held)
    footer = resealed_footer(opened, held, crypto, plaintext)
    plain_length = resealed_plain_length(opened, chunks, target.position, footer)
    put_footer(target, footer, crypto, sealer.footer(), plaintext)
    report = report_of("reencrypt", opened, chunks, mover, crypto.algorithm, plaintext)
    report.plain_length = plain_length
    report.warnings += target.warnings
    return report
