"""The library in a process: forks, threads, little memory, imports, and keys that never show."""

from __future__ import annotations

import ast
import pickle
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import CANARY, forms_of
from programs import process
from support import flip, pattern, program, run_python, seal_stream

import ags_fast
from ags_fast import AgsCodec, AgsReader, AgsWriter
from ags_fast.keys import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# ---------------------------------------------------------------- nonces and forks


def test_nonces_are_disjoint_between_forks() -> None:
    """One live codec in a process, its children and theirs, each sealing at once after the fork."""
    run_python(program(process.fork_generations))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_nonces_are_disjoint_between_multiprocessing_workers(method: str) -> None:
    run_python(program(process.use_a_pool, method))


@linux
def test_nonces_are_disjoint_where_process_numbers_are_not() -> None:
    """A container's first process is number 1, and so is the first that it forks into a new PID namespace: that the
    number differs is not how a fork may be noticed."""
    out = run_python(program(process.fork_into_namespaces))
    if "not permitted" in out:
        pytest.skip("may not make a PID namespace")


@pytest.mark.more
def test_fork_in_every_state(tmp_path: Path) -> None:
    """While other threads seal, open, fail, read, write and make keys, children do all that, and are not stuck."""
    run_python(program(process.fork_in_every_state, 60, tmp_path / "file"), timeout=100)


def test_fork_while_a_reader_is_shared_by_threads(tmp_path: Path) -> None:
    """A child reads what its parent's threads are reading: from a path, from memory, from a file-like object's copy."""
    run_python(
        program(process.fork_while_a_reader_is_shared, tmp_path / "file"),
    )


@pytest.mark.slow
def test_fork_in_every_state_for_longer(tmp_path: Path) -> None:
    run_python(program(process.fork_in_every_state, 3000, tmp_path / "file"), timeout=3000)


@linux
def test_a_fork_finds_no_idle_helpers() -> None:
    """Python 3.12 and newer warn of a fork beside threads, also of helpers that nobody has work for any more."""
    run_python(
        program(process.fork_beside_helpers),
        PYTHONWARNINGS="error::DeprecationWarning",
    )


# ---------------------------------------------------------------- little memory, many threads


@linux
def test_many_threads_in_512_mib_of_address_space(tmp_path: Path) -> None:
    """As YARN and Kubernetes limit Spark's workers. Every thread gets its result."""
    # Each arena of glibc reserves 64 MiB of address space; Hadoop's scripts allow 4.
    run_python(program(process.run_in_512_mib, tmp_path / "file"), MALLOC_ARENA_MAX="4")


@linux
def test_no_memory_for_a_thread_or_a_result(tmp_path: Path) -> None:
    """Down to nothing left: the right result with fewer threads, or MemoryError; then all is well again."""
    run_python(program(process.run_out_of_memory))


@pytest.mark.more
@linux
def test_one_thread_means_no_helper(tmp_path: Path) -> None:
    """And helpers that nobody needs leave."""
    run_python(
        program(process.use_one_thread, tmp_path / "file"),
    )


@linux
def test_threads_follow_the_affinity() -> None:
    """A process that is bound to a CPU uses that one, also if it is bound after a fork."""
    run_python(program(process.bind_to_a_cpu))


# ---------------------------------------------------------------- imports


def test_import_brings_nothing_optional() -> None:
    """Nor what is slow to import: a Spark worker pays for it with every start."""
    out = run_python(  # a string: a process that has imported nothing else
        """
        import sys
        before = set(sys.modules)
        import ags_fast, ags_fast.keys
        for name in set(ags_fast.__all__) - {"Dataset"}:
            getattr(ags_fast, name)
        print(*sorted(set(sys.modules) - before))
        getattr(ags_fast, "Dataset")
        print(*sorted(set(sys.modules) - before))
        """
    )
    loaded, more = ({name.split(".")[0] for name in line.split()} for line in out.splitlines())
    optional = {"pyspark", "pyarrow", "fastavro", "pandas", "numpy", "tqdm", "fsspec", "s3fs", "cryptography"}
    slow = {"asyncio", "concurrent", "dataclasses", "inspect", "logging", "multiprocessing", "socket", "subprocess"}
    slow |= {"argparse", "json", "tempfile", "typing_extensions", "unittest", "urllib"}
    assert not loaded & (optional | slow), loaded & (optional | slow)
    assert not more & optional, more & optional


# ---------------------------------------------------------------- keys never show

KEY_NAMES = {"dek", "deks", "kek", "key", "master", "opened", "passphrase", "password", "pin", "plaintext"}
KEY_NAMES |= {"encryption_key", "footer_key", "secret", "store_key", "token", "unwrapped"}
FORMATTERS = {"ascii", "critical", "debug", "error", "exception", "format", "format_map", "hex", "info", "log", "print"}
FORMATTERS |= {"repr", "str", "warn", "warning"}
TELLS_NOTHING = {"bool", "isinstance", "len", "sum", "type"}


def keys_in(node: ast.AST) -> Iterator[str]:
    """What may hold a key, by its name, in what an expression makes text of. A field of a JSON object holds none."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TELLS_NOTHING:
        return
    if isinstance(node, ast.Attribute):
        if node.attr in KEY_NAMES:
            yield node.attr
        return  # such as key_id
    if isinstance(node, ast.Name) and node.id in KEY_NAMES:
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from keys_in(child)


def made_text(node: ast.AST) -> list[ast.AST]:
    """The expressions that a node makes text of, or an exception of."""
    if isinstance(node, ast.FormattedValue):
        return [node.value]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
        return [node.right] if isinstance(node.left.value, str) else []
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in FORMATTERS:
            of = [node.func.value] if name == "hex" and isinstance(node.func, ast.Attribute) else []
            return [*of, *node.args, *(keyword.value for keyword in node.keywords)]
    return []


def formatted_keys(source: str) -> list[tuple[int, str]]:
    nodes = ast.walk(ast.parse(source))
    return [(node.lineno, name) for node in nodes for value in made_text(node) for name in keys_in(value)]  # type: ignore[attr-defined]


def test_nothing_named_like_a_key_is_made_text() -> None:
    bad = (
        "f'{dek!r}'",
        "'%s' % key",
        "raise E(unwrapped)",
        "print(x, passphrase)",
        "log.debug('', self.secret)",
        "kek.hex()",
    )
    assert all(formatted_keys(source) for source in bad)
    assert not any(map(formatted_keys, ("f'{key.key_id} {len(dek)}'", "raise E(f'{key[\"key_id\"]}')", "hash(key)")))
    package = Path(ags_fast.__file__).parent
    modules = {path: formatted_keys(path.read_text()) for path in package.rglob("*.py")}
    assert len(modules) > 40
    assert not {path.name: found for path, found in modules.items() if found}


def failures(tmp_path: Path) -> list[BaseException]:
    """Exceptions of every kind, out of objects that hold the canary."""
    stream = seal_stream(pattern(100_000), CANARY, CANARY, 1000)
    codec = AgsCodec(CANARY, aad_prefix=CANARY)
    reader = AgsReader(flip(stream, 9000), CANARY, aad_prefix=CANARY, length=len(stream))
    metadata = StandardKeyMetadata(CANARY, CANARY, 77)
    writer = AgsWriter(tmp_path / "file", CANARY, aad_prefix=CANARY)
    calls: list[Callable[[], Any]] = [
        lambda: AgsCodec(CANARY + b"x"),
        lambda: AgsCodec(CANARY.decode()),  # type: ignore[arg-type]
        lambda: AgsCodec(CANARY, threads=0),
        lambda: AgsCodec(CANARY, sealed_before=1 << 33).encrypt(b""),
        lambda: codec.decrypt(flip(stream, 99), length=len(stream)),
        lambda: codec.decrypt(stream, length=len(stream) + 1),
        lambda: codec.decrypt(CANARY * 3, length=None),
        lambda: codec.encrypt(5),  # type: ignore[arg-type]
        lambda: reader.read(),
        lambda: reader.verify(),
        lambda: reader.write(b""),
        lambda: AgsReader(stream, CANARY + b"x", length=None),
        lambda: AgsReader(tmp_path / "missing", CANARY, length=None),
        lambda: writer.write("text"),  # type: ignore[arg-type]
        lambda: AgsWriter(tmp_path / "missing" / "file", CANARY),
        lambda: StandardKeyMetadata(CANARY + b"x"),
        lambda: StandardKeyMetadata(CANARY, CANARY, -1),
        lambda: StandardKeyMetadata.decode(metadata.encode()[:-1]),
        lambda: StandardKeyMetadata.decode(b"\1\x22" + CANARY + b"x\0\0"),
        lambda: StandardKeyMetadata.decode(CANARY),
        lambda: ags_fast.open(stream, key=bytes(16), key_metadata=metadata),
        lambda: ags_fast.open(stream, key=CANARY),  # type: ignore[call-overload]
        lambda: ags_fast.open(stream, "r+", key=CANARY),  # type: ignore[call-overload]
        lambda: ags_fast.open(stream, key_metadata=metadata, length=5),
        lambda: ags_fast.open(stream, key_metadata=metadata, aad_prefix=b"another"),
        lambda: hash(metadata),
        *(lambda o=o: pickle.dumps(o) for o in (codec, reader, writer, metadata, codec._key)),
    ]
    raised: list[BaseException] = []
    for i, call in enumerate(calls):
        try:
            call()
        except Exception as error:
            raised.append(error)
        else:
            pytest.fail(f"call {i} did not raise")
    writer.abort()
    return raised


def test_keys_never_show(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metadata = StandardKeyMetadata(CANARY, CANARY, 77)
        codec = AgsCodec(CANARY, aad_prefix=CANARY)
        sealed = codec.encrypt(b"")
        reader = AgsReader(sealed, CANARY, aad_prefix=CANARY, length=36)
        writer = AgsWriter(tmp_path / "file", CANARY, aad_prefix=CANARY)
        texts = [
            f"{o!r} {o!s} {o:s}" if type(o).__format__ is not object.__format__ else f"{o!r} {o!s}"
            for o in (
                metadata,
                codec,
                reader,
                writer,
                codec._key,
                [metadata],
                {"key": metadata},
            )
        ]
        del writer  # warns
        for error in failures(tmp_path):
            texts += [repr(error), *traceback.format_exception(error)]
            texts += [repr(error.args), repr(vars(error))]
            pickle.dumps(error)
    texts += [str(w.message) for w in caught]
    assert any(issubclass(w.category, ResourceWarning) for w in caught)
    # A line of a traceback quotes this file, which names the canary: only what is computed can show it.
    everything = "\n".join(texts)
    for form in forms_of(CANARY):
        assert form not in everything, [text for text in texts if form in text]


@linux
def test_c_wipes_its_copies() -> None:
    """The process's memory holds a key while a codec does, and no longer."""
    run_python(program(process.look_for_codec_keys))
