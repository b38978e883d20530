"""The ags-fast command.

Exit codes: 0 done, 1 a file failed, 2 usage, 3 integrity or format, 4 no access to the key, 5 not found or no
permission, 6 configuration or a missing module, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import ags_fast
from ags_fast import _core
from ags_fast._arguments import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigurationError,
    OutputClosedError,
    Progress,
    aad_prefix,
    add_key_format,
    check_plain_output,
    code_of,
    code_of_all,
    code_of_rows,
    kept_mode,
    positive,
    read_key,
    size,
)
from ags_fast._terminal import complain, escaped, interrupts, leave, printable, show_warning
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, HEADER_NBYTES, check_block_size, decode_header, plaintext_length
from ags_fast.errors import AgsError, FormatError, IntegrityError
from ags_fast.fs import NewFile, open_regular, pwrite_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SUFFIX = ".ags"
CHUNK_NBYTES = 8 << 20  # of plaintext at a time, or one block if that is larger


def command() -> int:
    """The command as a process of its own: it decides what Ctrl-C does, and how text is shown that no output takes."""
    interrupts.install()
    warnings.showwarning = show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        leave()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    codes = []
    for file in getattr(args, "files", None) or [args.file]:
        args.file = file
        codes.append(_run(args))
        if codes[-1] == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
    return code_of_all(codes)


def _run(args: argparse.Namespace) -> int:
    """One file, or what the command is about; prints the result, or the error, and returns the exit code."""
    try:
        with interrupts.raised():
            result: dict[str, Any] = args.run(args)
    except KeyboardInterrupt:
        text = "interrupted; nothing half-written was left behind"
        return _report_error(args, EXIT_INTERRUPTED, text, "KeyboardInterrupt")
    except OutputClosedError as error:
        raise BrokenPipeError from error
    except (AgsError, OSError, ValueError, ImportError, ConfigurationError) as error:
        stopped = getattr(error, "result", None)  # of a JobError
        failed = code_of_rows(row.error_class for row in stopped.failed) if stopped is not None else 0
        return _report_error(args, failed or code_of(error), str(error), type(error).__name__, **_place(error))
    except Exception as error:  # a mistake of ours
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(printable(line), file=sys.stderr)
        return _report_error(args, EXIT_FAILED, f"unexpected {type(error).__name__}", type(error).__name__)
    code: int = result.get("exit_code", 0)
    if result:
        print(json.dumps(result) if args.json else args.text(escaped(result)))
    return code


def _place(error: Exception) -> dict[str, Any]:
    """Where an IntegrityError is: in a stream, or in a Parquet file."""
    if not isinstance(error, (IntegrityError, FormatError)):
        return {}
    module = getattr(error, "module", None)
    if module is None:
        return {"block_index": getattr(error, "block_index", None)}
    return {"module": module} | {name: getattr(error, name) for name in ("row_group", "column", "page")}


def _report_error(args: argparse.Namespace, code: int, text: str, error_class: str, **more: Any) -> int:
    if args.json:
        print(
            json.dumps(
                {"operation": args.operation, "input": args.file, "error_class": error_class, "error": text, **more}
            )
        )
    complain(f"{args.file}: {text}")
    return code


def _as_text(result: dict[str, Any]) -> str:
    width = max(map(len, result))
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {value}" for name, value in result.items())


# ---------------------------------------------------------------------------------------------------------- arguments


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _SafeParser(
        prog="ags-fast", description="Client-side encryption of lakehouse files.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="package, libcrypto and CPU features in use")
    parser.set_defaults(text=_as_text)
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    stream = groups.add_parser("stream", help="one AES GCM Stream (AGS1) file", allow_abbrev=False)
    operations = stream.add_subparsers(required=True, dest="operation", metavar="OPERATION")

    def add(name: str, run: Callable[[argparse.Namespace], dict[str, Any]], text: str) -> argparse.ArgumentParser:
        operation = operations.add_parser(name, help=text, description=text, allow_abbrev=False)
        operation.set_defaults(run=run)
        operation.add_argument("file", metavar="FILE")
        operation.add_argument("--json", action="store_true", help="print the result, or the error, as one JSON object")
        return operation

    encrypt = add(
        "encrypt",
        _encrypt,
        "Encrypt FILE, which may be a pipe. Keep the length it prints where the key is kept. The output has FILE's "
        "permission bits, as far as the umask allows.",
    )
    decrypt = add(
        "decrypt",
        _decrypt,
        "Decrypt FILE. The output appears when all of it is authentic, with FILE's permission bits as far as the umask "
        "allows; until then it has mode 0600.",
    )
    verify = add("verify", _verify, "Check the tag of every block of FILE, and its length.")
    inspect = add("inspect", _inspect, "Show what FILE says of itself, without a key. None of it is authenticated.")

    for operation in (encrypt, decrypt, verify):
        operation.set_defaults(quiet=False)
        key = operation.add_mutually_exclusive_group(required=True)
        key.add_argument("--key-file", metavar="PATH", help="a file with the key: 16, 24 or 32 bytes, or their text")
        key.add_argument("--key-env", metavar="NAME", help="the environment variable with the key's text")
        add_key_format(operation)
        prefix = operation.add_mutually_exclusive_group()
        prefix.add_argument("--aad-prefix", metavar="TEXT", help="text that tells this file from others under the key")
        prefix.add_argument("--aad-prefix-hex", metavar="HEX", help="the same, as bytes")
        operation.add_argument("--threads", type=positive, metavar="N", help="default: the usable CPUs")
        operation.add_argument("--quiet", action="store_true", help="show no progress")
    for operation in (decrypt, verify):
        length = operation.add_mutually_exclusive_group(required=True)
        length.add_argument("--length", type=size, metavar="BYTES", help="FILE's length as encrypt printed it")
        length.add_argument(
            "--untrusted-length",
            action="store_true",
            help="take the length FILE has; blocks cut from its end go unseen",
        )
        operation.add_argument(
            "--max-block-size",
            type=size,
            default=64 << 20,
            metavar="BYTES",
            help="largest block to believe in; default 64M",
        )
    encrypt.add_argument(
        "--block-size",
        type=size,
        default=DEFAULT_BLOCK_SIZE,
        metavar="BYTES",
        help="default 1M, the only one Iceberg Java reads",
    )
    inspect.add_argument("--length", type=size, metavar="BYTES", help="FILE's length as a trusted place has it")
    for operation, default in ((encrypt, f"FILE{SUFFIX}"), (decrypt, f"FILE without {SUFFIX}")):
        operation.add_argument("-o", "--output", metavar="PATH", help=f"default: {default}")
        operation.add_argument("--force", action="store_true", help="replace the output if it exists")
        operation.add_argument("--fsync", action="store_true", help="return when the output is on the disk")
    if argv[:1] not in (["stream"], ["parquet"]):  # which need not wait for all that datasets need
        from ags_fast.jobs.command import add_commands as add_job_commands
        from ags_fast.jobs.key_command import add_commands as add_key_commands
        from ags_fast.keys.command import add_commands as add_keystore_commands

        add_key_commands(add_keystore_commands(groups))
        add_job_commands(groups, size)
    if argv[:1] != ["stream"]:
        from ags_fast.parquet.command import add_commands as add_parquet_commands

        add_parquet_commands(groups)
    return parser


class _SafeParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))  # it may quote a name that a shell has filled in


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version_text())
        parser.exit()


# ---------------------------------------------------------------------------------------------------------- operations


def _stream_key(args: argparse.Namespace) -> bytes:
    return read_key(args.key_file, args.key_env, args.key_format)


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    output = args.output or args.file + SUFFIX
    check_block_size(args.block_size)
    key = _stream_key(args)
    with (
        open(args.file, "rb", buffering=0) as source,
        Progress(args, os.fstat(source.fileno()).st_size) as progress,
        ags_fast.AgsWriter(
            NewFile(output, exclusive=not args.force, fsync=args.fsync, mode=kept_mode(args.file)),
            key,
            aad_prefix=aad_prefix(args),
            block_size=args.block_size,
            threads=args.threads,
        ) as writer,
    ):
        chunk = memoryview(bytearray(max(CHUNK_NBYTES // args.block_size, 1) * args.block_size))
        while got := source.readinto(chunk):
            writer.write(chunk[:got])
            progress.update(got)
        plain_length = writer.tell()
    return {
        "operation": args.operation,
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
        mode = kept_mode(args.file)
        new = NewFile(output, exclusive=not args.force, private=True, fsync=args.fsync, mode=mode)
        try:
            chunk = memoryview(bytearray(max(CHUNK_NBYTES // reader.block_size, 1) * reader.block_size))
            offset = 0
            while got := reader.readinto(chunk):
                pwrite_all(new.descriptor, chunk[:got], offset)
                offset += got
                progress.update(got)
            new.publish()
        finally:
            new.discard()
    return {
        "operation": args.operation,
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
        "operation": args.operation,
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
        raise IntegrityError(f"the stream was cut: {present} bytes are there, its trusted length is {length}")
    plain_length = plaintext_length(length, block_size)
    return {
        "operation": args.operation,
        "input": args.file,
        "format": "AGS1",
        "file_length": length,
        "plain_length": plain_length,
        "block_size": block_size,
        "blocks": -(-(length - HEADER_NBYTES) // (block_size + _core.OVERHEAD_NBYTES)),
        "bytes_behind": present - length,
        "authenticated": False,
    }


# ---------------------------------------------------------------------------------------------------------- version

# Bits of the words of OPENSSL_ia32cap, and of OPENSSL_armcap, as libcrypto's manual page OPENSSL_ia32cap has them.
X86_FEATURES = ((0, 33, "pclmulqdq"), (0, 57, "aes"), (1, 16, "avx512f"), (1, 41, "vaes"), (1, 42, "vpclmulqdq"))
ARM_FEATURES = ((0, 2, "aes"), (0, 5, "pmull"), (0, 11, "sha3"))


def cpu_features() -> list[str]:
    """The CPU features that libcrypto uses for AES-GCM."""
    name, _, text = (_core.libcrypto_cpu() or "").partition("=")
    words = [int(word, 16) for word in re.findall(r"0x([0-9a-fA-F]+)", text)]
    features = {"OPENSSL_ia32cap": X86_FEATURES, "OPENSSL_armcap": ARM_FEATURES}.get(name, ())
    return [feature for word, bit, feature in features if word < len(words) and words[word] >> bit & 1]


def version_text() -> str:
    libcrypto = _core.openssl_version()
    lines = [
        f"ags_fast {ags_fast.__version__}",
        f"libcrypto: {libcrypto} ({'bundled' if _core.libcrypto_bundled else 'system'})",
        f"CPU features in use: {' '.join(cpu_features()) or 'unknown'}",
    ]
    release = re.match(r"OpenSSL (\d+)\.(\d+)", libcrypto)
    if release and (int(release[1]), int(release[2])) < (3, 5):
        lines.append("This libcrypto is the SLOW one: 3.5 and newer seal more than twice as fast on CPUs with vaes.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(command())
