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
from support import flip, pattern, run_python, seal_stream

import ags_fast
from ags_fast import AgsCodec, AgsReader, AgsWriter
from ags_fast.keys import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# ---------------------------------------------------------------- nonces and forks


def test_nonces_are_disjoint_between_forks() -> None:
    """One live codec in a process, its children and theirs, each sealing at once after the fork."""
    run_python(
        """
        import os, ags_fast
        from support import KEY, nonces_of
        codec = ags_fast.AgsCodec(KEY, block_size=1, threads=2)
        reading, writing = os.pipe()
        seen = nonces_of(codec.encrypt(bytes(500)))
        pids = []

        def child(depth):
            stream = codec.encrypt(bytes(100))
            if depth:
                for _ in range(2):
                    fork(depth - 1)
            os.write(writing, stream)  # less than PIPE_BUF, so in one piece
            for pid in pids:
                assert os.waitpid(pid, 0)[1] == 0

        def fork(depth):
            pid = os.fork()
            if pid:
                pids.append(pid)
                return
            pids.clear()
            try:
                child(depth)
                os._exit(0)
            finally:
                os._exit(1)

        for _ in range(10):
            fork(2)
            seen += nonces_of(codec.encrypt(bytes(100)))
        os.close(writing)
        with open(reading, "rb") as pipe:
            streams = pipe.read()
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0
        size = 8 + 29 * 100
        assert len(streams) == 10 * (1 + 2 + 4) * size
        for i in range(0, len(streams), size):
            seen += nonces_of(streams[i : i + size])
        assert len(seen) == 500 + 1000 + 7000 and len(set(seen)) == len(seen)
        """
    )


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_nonces_are_disjoint_between_multiprocessing_workers(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import multiprocessing, sys, ags_fast
from support import KEY, nonces_of

codec = ags_fast.AgsCodec(KEY, block_size=1)  # the parent's own if forked, else one that holds the same key

def work(_):
    return nonces_of(codec.encrypt(bytes(200)))

if __name__ == "__main__":
    seen = work(0)
    with multiprocessing.get_context(sys.argv[1]).Pool(4, maxtasksperchild=3) as pool:
        results = pool.imap_unordered(work, range(24))
        for nonces in results:
            seen += nonces + work(0)
    assert len(seen) == 200 * 49 and len(set(seen)) == len(seen)
"""
    )
    run_python(f"import runpy, sys; runpy.run_path({str(program)!r}, run_name='__main__')", method)


@linux
def test_nonces_are_disjoint_where_process_numbers_are_not() -> None:
    """A container's first process is number 1, and so is the first that it forks into a new PID namespace: that the
    number differs is not how a fork may be noticed."""
    out = run_python(
        """
        import ctypes, os, ags_fast
        from support import KEY, nonces_of
        unshare = ctypes.CDLL(None).unshare
        codec = ags_fast.AgsCodec(KEY, block_size=1, threads=1)
        reading, writing = os.pipe()

        def first_in_a_namespace(then):
            if unshare(0x20000000) != 0:  # CLONE_NEWPID: for the children
                print("not permitted")
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                try:
                    assert os.getpid() == 1
                    then()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0

        def seal():
            os.write(writing, codec.encrypt(bytes(100)))

        def outer():
            codec.encrypt(b"the generator is running")
            first_in_a_namespace(seal)
            seal()

        first_in_a_namespace(outer)
        os.close(writing)
        with open(reading, "rb") as pipe:
            streams = pipe.read()
        size = 8 + 29 * 100
        if len(streams) == 2 * size:
            seen = nonces_of(streams[:size]) + nonces_of(streams[size:])
            assert len(set(seen)) == 200, f"{200 - len(set(seen))} of 200 nonces came twice"
        else:
            print("not permitted")
        """
    )
    if "not permitted" in out:
        pytest.skip("may not make a PID namespace")


FORK_IN_EVERY_STATE = """
    import os, random, signal, sys, threading, time, ags_fast
    from support import KEY, pattern, seal_stream

    forks, path = int(sys.argv[1]), sys.argv[2]
    plain = pattern(3 << 20)
    codec = ags_fast.AgsCodec(KEY, block_size=1 << 16, threads=4)
    tiny_codec = ags_fast.AgsCodec(KEY, block_size=1, threads=1)
    sealed = codec.encrypt(plain)
    with open(path, "wb") as file:
        file.write(sealed)
    reader = ags_fast.AgsReader(path, KEY, length=len(sealed), threads=4)
    bad = bytearray(sealed)
    bad[-1] ^= 1
    stop = threading.Event()

    def large():
        assert codec.decrypt(codec.encrypt(plain), length=None) == plain

    def tiny():  # most of whose time goes to random numbers, under a lock
        tiny_codec.encrypt(plain[:5000])

    def small():
        key = os.urandom(32)  # a new key: contexts are made, its counter is made
        one = ags_fast.AgsCodec(key, block_size=1000)
        assert one.decrypt(one.encrypt(b"small"), length=None) == b"small"

    def read():
        assert reader.read_at(random.randrange(1000), 2 << 20)

    def fail():
        try:
            codec.decrypt(bad, length=None)
        except ags_fast.IntegrityError:
            return
        raise AssertionError

    def write():
        with ags_fast.AgsWriter(f"{path}.{os.getpid()}.{threading.get_ident()}", KEY, threads=4) as writer:
            writer.write(plain)

    works = (large, tiny, small, read, fail, write)

    def loop(work):
        while not stop.is_set():
            work()

    threads = [threading.Thread(target=loop, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    rng = random.Random(1)
    for i in range(forks):
        time.sleep(rng.random() / 100)  # another state each time
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)  # a lock that nobody will ever release
            try:
                for work in works:
                    work()
                if i % 10 == 0:
                    if os.fork() == 0:
                        for work in works:
                            work()
                        os._exit(0)
                    assert os.wait()[1] == 0
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"fork {i}: status {status}"
    stop.set()
    for thread in threads:
        thread.join()
    reader.close()
"""


def test_fork_in_every_state(tmp_path: Path) -> None:
    """While other threads seal, open, fail, read, write and make keys, children do all that, and are not stuck."""
    run_python(FORK_IN_EVERY_STATE, 60, tmp_path / "file", timeout=100)


def test_fork_while_a_reader_is_shared_by_threads(tmp_path: Path) -> None:
    """A child reads what its parent's threads are reading: from a path, from memory, from a file-like object's copy."""
    run_python(
        """
        import io, os, random, signal, sys, threading, ags_fast
        from support import KEY, pattern, seal_stream
        plain = pattern(200_000)
        sealed = seal_stream(plain, block_size=1000)
        with open(sys.argv[1], "wb") as file:
            file.write(sealed)

        class Slow(io.BytesIO):
            def read(self, size):
                for _ in range(1000):  # long enough for another thread's turn
                    pass
                return super().read(size)

        sources = (sys.argv[1], sealed, Slow(sealed))
        readers = [ags_fast.AgsReader(source, KEY, length=len(sealed)) for source in sources]
        stop = threading.Event()

        def loop():
            while not stop.is_set():
                for offset in (100, 5100):  # in turn, so that each goes through the cache
                    for reader in readers:
                        reader.read_at(offset, 10)
                offset = random.randrange(100_000)
                assert readers[2].read_at(offset, 90_000) == plain[offset:offset + 90_000]

        threads = [threading.Thread(target=loop) for _ in range(3)]
        for thread in threads:
            thread.start()
        sys.setswitchinterval(1e-5)
        stuck = 0
        for _ in range(100):
            pid = os.fork()
            if pid == 0:
                signal.alarm(2)
                for reader in readers:
                    assert reader.read_at(5100, 10) == plain[5100:5110]
                    assert reader.read_at(9100, 90_000) == plain[9100:99_100]  # more than anything has kept
                os._exit(0)
            stuck += os.waitpid(pid, 0)[1] != 0
            if stuck:
                break
        stop.set()
        for thread in threads:
            thread.join()
        for reader in readers:
            reader.close()
        assert not stuck, "a child hangs"
        """,
        tmp_path / "file",
    )


@pytest.mark.slow
def test_fork_in_every_state_for_longer(tmp_path: Path) -> None:
    run_python(FORK_IN_EVERY_STATE, 3000, tmp_path / "file", timeout=3000)


@linux
def test_a_fork_finds_no_idle_helpers() -> None:
    """Python 3.12 and newer warn of a fork beside threads, also of helpers that nobody has work for any more."""
    run_python(
        """
        import os, ags_fast
        from support import KEY

        codec = ags_fast.AgsCodec(KEY, block_size=1 << 16, threads=3)

        def count_threads():
            return len(os.listdir("/proc/self/task"))

        def use():
            assert codec.decrypt(codec.encrypt(bytes(4 << 20)), length=8 + (4 << 20) + 64 * 28) == bytes(4 << 20)
            assert count_threads() > 1, "this test needs helpers"

        for _ in range(3):
            use()
            pid = os.fork()
            if pid == 0:
                use()  # a child has helpers of its own
                os._exit(0)
            assert count_threads() == 1
            assert os.waitpid(pid, 0)[1] == 0
        """,
        PYTHONWARNINGS="error::DeprecationWarning",
    )


# ---------------------------------------------------------------- little memory, many threads


@linux
def test_many_threads_in_512_mib_of_address_space(tmp_path: Path) -> None:
    """As YARN and Kubernetes limit Spark's workers. Every thread gets its result."""
    run_python(
        """
        import resource, sys, threading
        resource.setrlimit(resource.RLIMIT_AS, (512 << 20,) * 2)
        import ags_fast
        from support import KEY, pattern
        plain = pattern(5 << 20)
        codec = ags_fast.AgsCodec(KEY, threads=64, block_size=1 << 17)
        stream = codec.encrypt(plain)
        with open(sys.argv[1], "wb") as file:
            file.write(stream)
        reader = ags_fast.AgsReader(sys.argv[1], KEY, length=len(stream), threads=64)
        done = []
        threading.stack_size(256 << 10)

        def work():
            out = bytearray(len(plain))
            for _ in range(5):
                assert codec.decrypt_into(stream, out, length=len(stream)) == len(plain) and out == plain
                assert reader.readinto_at(0, out) == len(plain) and out == plain
                assert len(codec.encrypt(plain)) == len(stream)
            done.append(True)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reader.close()
        assert len(done) == 8
        """,
        tmp_path / "file",
    )


@linux
def test_no_memory_for_a_thread_or_a_result(tmp_path: Path) -> None:
    """Down to nothing left: the right result with fewer threads, or MemoryError; then all is well again."""
    run_python(
        """
        import resource, ags_fast
        from support import KEY, pattern
        plain = pattern(2 << 20)
        codec = ags_fast.AgsCodec(KEY, threads=16, block_size=1 << 16)
        stream = ags_fast.AgsCodec(KEY, threads=1, block_size=1 << 16).encrypt(plain)
        out = bytearray(len(plain))
        ags_fast.AgsCodec(KEY, threads=1).decrypt_into(stream, out, length=len(stream))
        results = set()
        for spare in [*range(0, 3 << 20, 64 << 10), *range(3 << 20, 12 << 20, 1 << 20)]:
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            out[:] = bytes(len(out))
            fresh = ags_fast.AgsCodec(KEY, threads=16)
            resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
            for call in (lambda: fresh.decrypt_into(stream, out, length=len(stream)), lambda: codec.encrypt(plain)):
                try:
                    results.add(call() is not None)
                except MemoryError:
                    results.add(MemoryError)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            assert out == plain or not any(out)
        assert codec.decrypt_into(stream, out, length=len(stream)) == len(plain) and out == plain
        assert results == {True, MemoryError}, results
        """
    )


@linux
def test_one_thread_means_no_helper(tmp_path: Path) -> None:
    """And helpers that nobody needs leave."""
    run_python(
        """
        import os, sys, time, ags_fast
        from support import KEY
        def threads():
            return len(os.listdir("/proc/self/task"))
        codec = ags_fast.AgsCodec(KEY, threads=1)
        assert codec.decrypt(codec.encrypt(bytes(20 << 20)), length=None) == bytes(20 << 20)
        with ags_fast.AgsWriter(sys.argv[1], KEY, threads=1) as writer:
            writer.write(bytes(20 << 20))
        assert len(ags_fast.AgsReader(sys.argv[1], KEY, length=writer.file_length, threads=1).read()) == 20 << 20
        assert threads() == 1
        ags_fast.AgsCodec(KEY, threads=4).encrypt(bytes(20 << 20))
        assert threads() == 4
        deadline = time.monotonic() + 30
        while threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert threads() == 1
        """,
        tmp_path / "file",
    )


@linux
def test_threads_follow_the_affinity() -> None:
    """A process that is bound to a CPU uses that one, also if it is bound after a fork."""
    run_python(
        """
        import os, ags_fast
        os.environ.pop("AGS_FAST_THREADS", None)
        codec = ags_fast.AgsCodec(bytes(16))
        usable = sorted(os.sched_getaffinity(0))
        assert f"threads={len(usable)}" in repr(codec) or len(usable) > 1  # a container may have fewer than it sees
        if os.fork() == 0:
            os.sched_setaffinity(0, usable[:1])
            one = ags_fast.AgsCodec(bytes(16))
            assert "threads=1" in repr(one), repr(one)
            one.encrypt(bytes(10 << 20))
            assert len(os.listdir("/proc/self/task")) == 1
            os._exit(0)
        assert os.wait()[1] == 0
        """
    )


# ---------------------------------------------------------------- imports


def test_import_brings_nothing_optional() -> None:
    """Nor what is slow to import: a Spark worker pays for it with every start."""
    out = run_python(
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


CANARY = b"canary-key-16-by"


def forms_of(secret: bytes) -> set[str]:
    """How a secret may look in text."""
    import base64

    return {secret.decode(), secret.hex(), base64.b64encode(secret).decode().rstrip("="), repr(list(secret))[1:-1]}


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
        lambda: ags_fast.open(stream, key=CANARY),
        lambda: ags_fast.open(stream, "r+", key=CANARY),
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
    run_python(
        """
        import gc, os, ags_fast
        invert = bytes(255 - i for i in range(256))
        needle = os.urandom(16)  # the key with every bit turned over, so that looking for it does not make copies
        key = bytearray(16)
        for i in range(16):
            key[i] = invert[needle[i]]

        def copies():
            found = 0
            with open("/proc/self/maps") as maps:
                regions = [line.split()[0].split("-") for line in maps if line.split()[1].startswith("rw")]
            memory = os.open("/proc/self/mem", os.O_RDONLY)
            for begin, end in regions:
                begin, end = int(begin, 16), int(end, 16)
                while begin < end:
                    try:
                        chunk = os.pread(memory, min(end - begin, 1 << 20), begin)
                    except OSError:
                        break
                    found += chunk.translate(invert).count(needle)
                    begin += len(chunk)
            os.close(memory)
            return found

        codec = ags_fast.AgsCodec(key, threads=2, block_size=4096)
        reader = ags_fast.AgsReader(codec.encrypt(bytes(3 << 20)), key, length=None, threads=2)
        assert len(reader.read()) == 3 << 20
        for i in range(16):
            key[i] = 0
        held = copies()
        assert held >= 2, held  # otherwise this looks in the wrong places
        del codec
        reader.close()
        del reader
        gc.collect()
        left = copies()
        assert left == 0, f"{left} of {held} copies are left"
        """
    )
