"""``ags-fast stream encrypt|decrypt|inspect|verify|keygen``: one AES GCM Stream (AGS1) file."""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, Any

import ags_fast
from ags_fast import _core
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, HEADER_NBYTES, MAGIC, check_block_size, decode_header, plaintext_length
from ags_fast.cli.files import Progress, StandardOutput, aad_prefix, new_output, read_key, standard_input
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
from ags_fast.cli.places import STANDARD
from ags_fast.cli.text import as_text
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.fs import NewFile, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX = ".ags"
CHUNK_NBYTES = 8 << 20  # of plaintext at a time, or one block if that is larger


# -------------------------------------------------------------------------------------------------- sources and lengths


class _Forward:
    """Standard input as a file of a trusted length, for a reader that goes once from its beginning to its end."""

    def __init__(self, file: io.FileIO, nbytes: int) -> None:
        self.read, self._nbytes = file.read, nbytes

    def seekable(self) -> bool:
        """Return True: each byte is read where the last one has ended."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Return the trusted length for the end, and do nothing."""
        return self._nbytes if whence == io.SEEK_END else offset


@contextmanager
def _spooled(args: argparse.Namespace) -> Iterator[IO[bytes]]:
    """Copy the stream of standard input to a file without a name: only its end shows its length."""
    source, head = standard_input(args), b""
    while more := source.read(HEADER_NBYTES - len(head)):
        head += more
    with tempfile.TemporaryFile() as file:
        file.write(head)
        if head.startswith(MAGIC):  # or it may be plaintext, which never goes onto a disk
            shutil.copyfileobj(source, file, CHUNK_NBYTES)
        file.seek(0)
        yield file


def _file_name(text: str) -> str:
    if text == STANDARD:
        raise argparse.ArgumentTypeError("name a file: - is standard input or output")
    return text


def _length(args: argparse.Namespace) -> int | None:
    """Return the trusted length; None if none is given."""
    if args.length_file is None:
        return args.length  # type: ignore[no-any-return]
    with open(args.length_file, "rb") as file:
        text = file.read(100)
    if not re.fullmatch(rb"[0-9]+\s*", text):
        raise ValueError(f"{args.length_file} has no length: `stream encrypt --length-file` writes such a file")
    return int(text)


# ---------------------------------------------------------------------------------------------------------- operations


def _stream_key(args: argparse.Namespace) -> bytes:
    return read_key(args.data_key_file, args.key_env, args.key_format)


def _chunk(block_size: int) -> memoryview:
    """A buffer for whole blocks of plaintext."""
    return memoryview(bytearray(max(CHUNK_NBYTES // block_size, 1) * block_size))


def _output(args: argparse.Namespace, default: str) -> str:
    return args.output or (STANDARD if args.file == STANDARD else default)


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    output = _output(args, args.file + SUFFIX)
    check_block_size(args.block_size)
    key = _stream_key(args)
    how = {"aad_prefix": aad_prefix(args), "block_size": args.block_size, "threads": args.threads}
    kept = args.length_file and NewFile(args.length_file, exclusive=not args.overwrite, fsync=args.fsync)
    with kept or nullcontext():
        with (
            standard_input(args) if args.file == STANDARD else open(args.file, "rb", buffering=0) as source,
            Progress(args, os.fstat(source.fileno()).st_size) as progress,
            ags_fast.AgsWriter(new_output(args, output), key, **how) as writer,
        ):
            chunk = _chunk(args.block_size)
            while got := source.readinto(chunk):
                writer.write(chunk[:got])
                progress.update(got)
            plain_length = writer.tell()
        if kept:
            kept.write(b"%d\n" % writer.file_length)
            kept.publish()
    told = {"plain_length": plain_length, "file_length": writer.file_length, "block_size": args.block_size}
    return {"input": args.file, "output": output, **told, "seconds": progress.seconds()}


@contextmanager
def _opened(args: argparse.Namespace) -> Iterator[ags_fast.AgsReader]:
    key, length = _stream_key(args), _length(args)
    with ExitStack() as stack:
        source: Any = args.file
        if source == STANDARD:
            spool = length is None
            source = stack.enter_context(_spooled(args)) if spool else _Forward(standard_input(args), length or 0)
        how = {"aad_prefix": aad_prefix(args), "max_block_size": args.max_block_size, "threads": args.threads}
        yield stack.enter_context(ags_fast.AgsReader(source, key, length=length, **how))


def _decrypt(args: argparse.Namespace) -> dict[str, Any]:
    output = _output(args, args.file.removesuffix(SUFFIX))
    if output == args.file != STANDARD and args.output is None:
        raise ValueError(f"its name does not end in {SUFFIX}: name the output with -o")
    with (
        _opened(args) as reader,
        Progress(args, reader.length) as progress,
        new_output(args, output, private=True) as new,
    ):
        chunk = _chunk(reader.block_size)
        while got := reader.readinto(chunk):
            progress.update(new.write(chunk[:got]))
        new.publish()
    told = {"plain_length": reader.length, "block_size": reader.block_size}
    return {"input": args.file, "output": output, **told, "seconds": progress.seconds()}


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    with _opened(args) as reader, Progress(args, reader.length) as progress:
        reader.verify(progress.update)
        if args.file == STANDARD and os.read(0, 1):  # the reader of a file has looked itself
            raise IntegrityError("the stream is intact, but bytes follow its trusted length")
    told = {"plain_length": reader.length, "block_size": reader.block_size, "length_trusted": not args.untrusted_length}
    return {"input": args.file, **told, "seconds": progress.seconds()}


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    with _spooled(args) if args.file == STANDARD else open_regular(args.file) as file:
        header = file.read(HEADER_NBYTES)
        present = os.fstat(file.fileno()).st_size
    if len(header) < HEADER_NBYTES:
        raise FormatError(f"{len(header)} bytes are too short for an AGS1 stream: its header alone has {HEADER_NBYTES}")
    block_size = decode_header(header)
    trusted = _length(args)
    length = present if trusted is None else trusted
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


def _keygen(args: argparse.Namespace) -> dict[str, Any]:
    text = os.urandom(args.bits // 8).hex().encode() + b"\n"
    if args.file == STANDARD:
        StandardOutput().write(text)
        return {}
    with NewFile(args.file, exclusive=True, fsync=True, mode=0o600) as new:
        new.write(text)
        new.publish()
    return {"output": args.file, "bits": args.bits}


# ---------------------------------------------------------------------------------------------------------- commands

FILE = option("file", metavar="FILE", help="a file, or - for standard input")
KEYED = (
    FILE,
    JSON,
    OneOf(
        (
            option(
                "--data-key-file", metavar="PATH", help="a file with the key: 16, 24 or 32 bytes, raw, in hex or base64"
            ),
            option("--key-env", metavar="NAME", help="the environment variable with the key, in hex or base64"),
        ),
        required=True,
    ),
    KEY_FORMAT,
    aad_prefix_options(),
    THREADS,
)
LENGTH = option("--length", type=size, metavar="BYTES", help="the length of FILE that encrypt printed")
LENGTH_FILE = option(
    "--length-file", type=_file_name, metavar="PATH", help="a file with the length of FILE, which encrypt wrote"
)
READING = (
    *KEYED,
    OneOf(
        (
            LENGTH,
            LENGTH_FILE,
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
            LENGTH_FILE.but(help="write the length of the output to this file, too, for the commands that read FILE"),
            OUTPUT.but(help=f"- is standard output; default: FILE{SUFFIX}, and for - standard output"),
            *NEW_FILE,
        ),
        "Encrypt FILE, which may be a pipe. Store the printed length where the key is stored: it goes to standard "
        "error if standard output has the bytes. The output gets the permission bits of FILE, as far as the umask "
        "allows.",
    ),
    Command(
        "decrypt",
        _decrypt,
        (
            *READING,
            OUTPUT.but(help=f"- is standard output; default: FILE without {SUFFIX}, and for - standard output"),
            *NEW_FILE,
        ),
        "Decrypt FILE. The output appears when all of it is authenticated, with the permission bits of FILE as far as "
        "the umask allows; until then it has mode 0600. Standard output gets each block when its tag has passed: if "
        "the command exits with 3, discard the output.",
    ),
    Command("verify", _verify, READING, "Check the tag of every block of FILE, and its length."),
    Command(
        "inspect",
        _inspect,
        (FILE, JSON, OneOf((LENGTH, LENGTH_FILE))),
        "Show the header and lengths of FILE, without a key. None of it is authenticated.",
    ),
    Command(
        "keygen",
        _keygen,
        (
            FILE.but(help="a new file, of mode 0600; - prints the key"),
            JSON,
            option(
                "--bits",
                type=int,
                choices=(128, 192, 256),
                default=128,
                metavar="N",
                help="128, 192 or 256; default 128, as data keys of datasets have",
            ),
        ),
        "Make a random key for --data-key-file, in hex, with a line end. A file that exists is never replaced.",
    ),
)
