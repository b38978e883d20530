"""``ags-fast stream encrypt|decrypt|inspect|verify``: one AES GCM Stream (AGS1) file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ags_fast
from ags_fast import _core
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, HEADER_NBYTES, check_block_size, decode_header, plaintext_length
from ags_fast.cli.files import Progress, aad_prefix, check_plain_output, kept_mode, read_key
from ags_fast.cli.options import (
    JSON,
    KEY_FORMAT,
    NEW_FILE,
    THREADS,
    Command,
    OneOf,
    aad_prefix_options,
    option,
    size,
    switch,
)
from ags_fast.cli.text import as_text
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.fs import NewFile, open_regular

if TYPE_CHECKING:
    import argparse

SUFFIX = ".ags"
CHUNK_NBYTES = 8 << 20  # of plaintext at a time, or one block if that is larger


# ---------------------------------------------------------------------------------------------------------- operations


def _stream_key(args: argparse.Namespace) -> bytes:
    return read_key(args.key_file, args.key_env, args.key_format)


def _chunk(block_size: int) -> memoryview:
    """A buffer for whole blocks of plaintext."""
    return memoryview(bytearray(max(CHUNK_NBYTES // block_size, 1) * block_size))


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    output = args.output or args.file + SUFFIX
    check_block_size(args.block_size)
    key = _stream_key(args)
    with (
        open(args.file, "rb", buffering=0) as source,
        Progress(args, os.fstat(source.fileno()).st_size) as progress,
        ags_fast.AgsWriter(
            NewFile(output, exclusive=not args.force, fsync=args.fsync, mode=kept_mode(args, args.file)),
            key,
            aad_prefix=aad_prefix(args),
            block_size=args.block_size,
            threads=args.threads,
        ) as writer,
    ):
        chunk = _chunk(args.block_size)
        while got := source.readinto(chunk):
            writer.write(chunk[:got])
            progress.update(got)
        plain_length = writer.tell()
    return {
        "input": args.file,
        "output": output,
        "plain_length": plain_length,
        "file_length": writer.file_length,
        "block_size": args.block_size,
        "seconds": progress.seconds(),
    }


def _open(args: argparse.Namespace) -> ags_fast.AgsReader:
    return ags_fast.AgsReader(
        args.file,
        _stream_key(args),
        length=None if args.untrusted_length else args.length,
        aad_prefix=aad_prefix(args),
        max_block_size=args.max_block_size,
        threads=args.threads,
    )


def _decrypt(args: argparse.Namespace) -> dict[str, Any]:
    output = args.output or args.file.removesuffix(SUFFIX)
    if output == args.file and args.output is None:
        raise ValueError(f"its name does not end in {SUFFIX}: name the output with -o")
    with _open(args) as reader, Progress(args, reader.length) as progress:
        check_plain_output(output)
        mode = kept_mode(args, args.file)
        with NewFile(output, exclusive=not args.force, private=True, fsync=args.fsync, mode=mode) as new:
            chunk = _chunk(reader.block_size)
            while got := reader.readinto(chunk):
                progress.update(new.write(chunk[:got]))
            new.publish()
    return {
        "input": args.file,
        "output": output,
        "plain_length": reader.length,
        "block_size": reader.block_size,
        "seconds": progress.seconds(),
    }


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    with _open(args) as reader, Progress(args, reader.length) as progress:
        reader.verify(progress.update)
    return {
        "input": args.file,
        "plain_length": reader.length,
        "block_size": reader.block_size,
        "length_trusted": not args.untrusted_length,
        "seconds": progress.seconds(),
    }


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    with open_regular(args.file) as file:
        header = file.read(HEADER_NBYTES)
        present = os.fstat(file.fileno()).st_size
    if len(header) < HEADER_NBYTES:
        raise FormatError(f"{len(header)} bytes are too short for an AGS1 stream: its header alone has {HEADER_NBYTES}")
    block_size = decode_header(header)
    length = present if args.length is None else args.length
    if present < length:
        raise IntegrityError(f"the stream was cut: the file has {present} bytes, its trusted length is {length}")
    plain_length = plaintext_length(length, block_size)
    return {
        "input": args.file,
        "format": "AGS1",
        "file_length": length,
        "plain_length": plain_length,
        "block_size": block_size,
        "blocks": -(-(length - HEADER_NBYTES) // (block_size + _core.OVERHEAD_NBYTES)),
        "bytes_behind": present - length,
        "authenticated": False,
    }


# ---------------------------------------------------------------------------------------------------------- commands

FILE = option("file", metavar="FILE")
KEYED = (
    FILE,
    JSON,
    OneOf(
        (
            option("--key-file", metavar="PATH", help="a file with the key: 16, 24 or 32 bytes, raw, in hex or base64"),
            option("--key-env", metavar="NAME", help="the environment variable with the key, in hex or base64"),
        ),
        required=True,
    ),
    KEY_FORMAT,
    aad_prefix_options(),
    THREADS,
)
READING = (
    *KEYED,
    OneOf(
        (
            option("--length", type=size, metavar="BYTES", help="the length of FILE that encrypt printed"),
            switch("--untrusted-length", "trust the length that FILE has now; blocks cut from its end go unnoticed"),
        ),
        required=True,
    ),
    option(
        "--max-block-size",
        type=size,
        default=64 << 20,
        metavar="BYTES",
        help="refuse a FILE with larger blocks; default 64M",
    ),
)
OUTPUT = option("-o", "--output", metavar="PATH")
TEXT = as_text
COMMANDS = (
    Command(
        "encrypt",
        _encrypt,
        (
            *KEYED,
            option(
                "--block-size",
                type=size,
                default=DEFAULT_BLOCK_SIZE,
                metavar="BYTES",
                help="default 1M; Iceberg Java reads no other",
            ),
            OUTPUT.but(help=f"default: FILE{SUFFIX}"),
            *NEW_FILE,
        ),
        "Encrypt FILE, which may be a pipe. Store the printed length where the key is stored. The output gets the "
        "permission bits of FILE, as far as the umask allows.",
    ),
    Command(
        "decrypt",
        _decrypt,
        (*READING, OUTPUT.but(help=f"default: FILE without {SUFFIX}"), *NEW_FILE),
        "Decrypt FILE. The output appears when all of it is authenticated, with the permission bits of FILE as far as "
        "the umask allows; until then it has mode 0600.",
    ),
    Command("verify", _verify, READING, "Check the tag of every block of FILE, and its length."),
    Command(
        "inspect",
        _inspect,
        (FILE, JSON, option("--length", type=size, metavar="BYTES", help="the length of FILE from a trusted place")),
        "Show the header and lengths of FILE, without a key. None of it is authenticated.",
    ),
)
