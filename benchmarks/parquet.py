"""What is measured of Parquet: files, pages in memory, views and footers. pyarrow makes the files, once a run."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ags_fast import parquet
from ags_fast._core import CHECK, COPY, DONE, Modules, PageRun, run_pages  # noqa: PLC2701 (the engine alone is measured)
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.reading import Reading
from benchmarks.cases import KEYS, Bench, nothing, threads_name, touched
from benchmarks.datasets import taken
from benchmarks.evp import PIECES, ROOT, Module
from benchmarks.measure import Case, Contest, Group, Row, Run, SkippedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa

KEY, OTHER_KEY = KEYS[0], b"o" * 16
ONE = "customer"  # the column that is encrypted, or read, alone
FRAME = 32  # what sealing adds to a module
SLACK = 64 << 10  # bytes that reading one column of a view may open besides
JAVA_WARM_UP = 8  # rewrites

DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_HEADER, DICTIONARY_PAGE_HEADER = 2, 3, 4, 5


def group(bench: Bench) -> Group:
    cases = [
        *(
            Case(f"parquet/{what}", functools.partial(files, bench, what), 2 / 3)
            for what in ("encrypt", "decrypt", "rekey")
        ),
        Case("parquet/one-column", functools.partial(one_column, bench)),
        Case("parquet/verify", functools.partial(verify, bench, "snappy")),
        Case("parquet/small-pages/encrypt", functools.partial(small_pages_file, bench), 2 / 3),
        Case("parquet/small-pages/verify", functools.partial(verify, bench, "pages"), 2 / 3),
        Case("parquet/checksums", functools.partial(checksums, bench), 2 / 3),
        *(Case(f"parquet/pages/{what}", functools.partial(pages, bench, what)) for what in ("seal", "open")),
        Case("parquet/view", functools.partial(view, bench)),
        Case("parquet/projection", functools.partial(projection, bench), 0),
        Case("parquet/footer", functools.partial(footer, bench)),
        Case("parquet/write_table", functools.partial(write_table, bench), 1 / 3),
        *(
            Case(f"parquet/wide/{what}", functools.partial(wide, bench, what), 1 / 3)
            for what in ("encrypt", "decrypt", "rekey", "write_table")
        ),
    ]
    size = "46" if bench.quick else "182"
    return Group(
        f"a file of {size} MB, 8 columns x 4 row groups; beside: see the row; naive: pyarrow reads "
        "and writes, or a Python reader over cryptography; best Py: parquet-java's rewriter, or cryptography",
        cases,
    )


# ---- files


def table(rows: int) -> pa.Table:
    """Columns of the kinds that are in most files: sequences, numbers that repeat and that do not, texts."""
    import numpy as np
    import pyarrow as pa

    draw = np.random.default_rng(0)
    countries = np.array(["AT", "BR", "DE", "FR", "IN", "JP", "NG", "US"])
    return pa.table(
        {
            "id": np.arange(rows),
            "at": 1_767_225_600_000_000 + np.cumsum(draw.integers(0, 2_000_000, rows)),
            "customer": draw.integers(0, 1 << 62, rows),
            "price": np.round(draw.gamma(2, 50, rows), 2),
            "score": draw.random(rows),
            "quantity": draw.integers(1, 100, rows).astype("int32"),
            "country": countries[draw.integers(0, len(countries), rows)],
            "code": [code[:14] for code in draw.bytes(8 * rows).hex(" ", 8).split(" ")],
        }
    )


def wide_table(bench: Bench) -> pa.Table:
    import numpy as np
    import pyarrow as pa

    draw = np.random.default_rng(0)
    rows = CHUNK_ROWS * CHUNK_GROUPS
    return pa.table({f"column_{i}": draw.integers(0, 1 << 62, rows) for i in range(bench.size(1000))})


OPTIONS: dict[str, dict[str, Any]] = {  # of pyarrow's writer
    "snappy": {"compression": "snappy"},
    "checksums": {"compression": "snappy", "write_page_checksum": True},
    "pages": {"compression": "none", "use_dictionary": False, "data_page_size": 8 << 10},
    "wide": {},
    "chunks": {"compression": "none", "use_dictionary": False},
}
CHUNK_ROWS = 128  # 1 KiB of a chunk
CHUNK_GROUPS = 50


def options(bench: Bench, name: str) -> dict[str, Any]:
    rows = {"wide": 1, "chunks": CHUNK_ROWS}.get(name, bench.size(1_000_000))
    return {"row_group_size": rows, **OPTIONS[name]}


def plain_file(bench: Bench, name: str) -> Path:
    """snappy: 182 MB in pages of 20,000 rows. pages: 274 MB in pages of 8 KiB. wide: 5,000 columns x 10 row groups.

    chunks: 1,000 columns x 50 row groups, 60 MB in chunks of 1 KiB.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
        import pyarrow.parquet.encryption  # is not in all builds
    except ImportError as error:
        raise SkippedError(f"pyarrow has no encryption here: {error}") from None
    path = bench.scratch / f"{name}.parquet"
    if not path.exists():
        if name == "wide":
            made = pa.table({f"column_{i}": pa.array(range(10), pa.int32()) for i in range(bench.size(5000))})
        elif name == "chunks":
            made = wide_table(bench)
        else:
            made = table(bench.size(4_000_000))
        pq.write_table(made, path, **options(bench, name))
    return path


def sealed_file(bench: Bench, name: str) -> Path:
    """The same, all of it encrypted with one key."""
    plain = plain_file(bench, name)
    path = bench.scratch / f"{name}.parquet.encrypted"
    if not path.exists():
        parquet.encrypt_file(plain, path, parquet.Keys(KEY))
    return path


def encryption() -> Any:
    import pyarrow.parquet.encryption as pe

    return pe.create_encryption_properties(KEY)


def decryption(key: bytes = KEY) -> Any:
    import pyarrow.parquet.encryption as pe

    return pe.create_decryption_properties(key)


def fresh(path: Path, work: Callable[[], object]) -> Run:
    """The seconds of work that writes a file; that of the last time is removed before."""

    def run() -> float:
        path.unlink(missing_ok=True)
        return taken(work)

    return run


def threads_of(bench: Bench) -> list[int]:
    return [n for n in bench.threads if n <= 2]


@contextmanager
def files(bench: Bench, what: str) -> Iterator[Contest]:
    """From a file to a new one."""
    import pyarrow.parquet as pq

    plain, sealed, out = plain_file(bench, "snappy"), sealed_file(bench, "snappy"), bench.scratch / "out.parquet"
    keys, new_keys = parquet.Keys(KEY), parquet.Keys(OTHER_KEY)
    ours = {
        "encrypt": functools.partial(parquet.encrypt_file, plain, out, keys),
        "decrypt": functools.partial(parquet.decrypt_file, sealed, out, keys),
        "rekey": functools.partial(parquet.reencrypt_file, sealed, out, keys, new_keys),
    }[what]

    def pyarrow() -> None:
        if what == "encrypt":
            read = pq.read_table(plain)
        else:
            read = pq.read_table(sealed, decryption_properties=decryption())
        more = {} if what == "decrypt" else {"encryption_properties": encryption()}
        pq.write_table(read, out, **options(bench, "snappy"), **more)

    rows = [
        Row(f"parquet/{what}/{n}t", f"{what}, {threads_name(n)}", nbytes=plain.stat().st_size)
        for n in threads_of(bench)
    ]
    runs: dict[tuple[str, str], Run] = {(rows[0].name, "naive"): fresh(out, pyarrow)}
    for row, n in zip(rows, threads_of(bench), strict=True):
        runs[row.name, "ours"] = fresh(out, nothing(ours, threads=n))
    truth = pq.read_table(plain)

    def check(column: str) -> bool:
        if column == "loop":
            return seals(modules, plain.read_bytes(), out.with_suffix(".limit").read_bytes(), aad)
        key = OTHER_KEY if (what, column) == ("rekey", "ours") else KEY
        more = {} if what == "decrypt" else {"decryption_properties": decryption(key)}
        return bool(pq.read_table(out, **more).equals(truth))

    with ExitStack() as stack:
        if what == "encrypt":
            aad, modules = modules_of(sealed)
            source = stack.enter_context(open(plain, "rb", buffering=0))
            target = stack.enter_context(open(out.with_suffix(".limit"), "wb", buffering=0))
            stack.callback(os.unlink, target.name)
            for row, n in zip(rows, threads_of(bench), strict=True):
                loop = bench.evp.modules(KEY, aad, modules, seal=True, source=source.fileno(), threads=n)
                runs[row.name, "loop"] = functools.partial(loop, target.fileno())
            java = functools.cache(lambda: stack.enter_context(warm_parquet_java(plain, out)))
            runs[rows[0].name, "best"] = lambda: java()(plain, out, 1)
        for column in ("naive", "best"):
            if (rows[0].name, column) in runs:  # its threads are its own: it is measured once, for all rows
                samples: list[float] = []
                for row in rows:
                    row.samples[column] = samples
        yield Contest(rows, runs, check=check)


def from_tests(name: str) -> Any:
    """A module of the tests, which have peers that are peers here, too."""
    sys.path.append(str(ROOT / "tests"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop()


@contextmanager
def parquet_java() -> Iterator[Callable[[Path, Path, int], float]]:
    """parquet-java's rewriter in a JVM of its own: (source, target, times) -> seconds of the last."""
    try:
        peers = from_tests("parquet_peers")  # needs pytest
        peers.jvm_classes()
    except BaseException as error:  # pytest's way to say that something is missing is no Exception
        if not isinstance(error, ImportError) and type(error).__name__ not in ("Skipped", "Failed"):
            raise
        raise SkippedError(f"parquet-java cannot be had: {error}") from None
    keys = peers.PmeKeys(KEY)
    with peers.ParquetJava() as java:
        yield lambda source, target, times: java.rewrite(source, target, keys, times)[-1]


@contextmanager
def warm_parquet_java(source: Path, target: Path) -> Iterator[Callable[[Path, Path, int], float]]:
    with parquet_java() as rewrite:
        rewrite(source, target, JAVA_WARM_UP)
        yield rewrite


@contextmanager
def one_column(bench: Bench) -> Iterator[Contest]:
    plain, out = plain_file(bench, "snappy"), bench.scratch / "out.parquet"
    keys = parquet.Keys(KEY, {ONE: OTHER_KEY})
    rows = [
        Row(f"parquet/one-column/{n}t", f"1 of 8 columns, {threads_name(n)}; beside: cp", nbytes=plain.stat().st_size)
        for n in threads_of(bench)
    ]
    runs: dict[tuple[str, str], Run] = {}
    for row, n in zip(rows, threads_of(bench), strict=True):
        ours = nothing(parquet.encrypt_file, plain, out, keys, other_columns="plain", threads=n)
        runs[row.name, "beside"] = fresh(out, lambda: subprocess.run(["cp", plain, out], check=True))
        runs[row.name, "ours"] = fresh(out, ours)
    yield Contest(rows, runs)


@contextmanager
def small_pages_file(bench: Bench) -> Iterator[Contest]:
    plain, sealed, out = plain_file(bench, "pages"), sealed_file(bench, "pages"), bench.scratch / "out.parquet"
    aad, modules = modules_of(sealed)
    rows = [
        Row(
            f"parquet/small-pages/encrypt/{n}t", f"encrypt, 8 KiB pages, {threads_name(n)}", nbytes=plain.stat().st_size
        )
        for n in threads_of(bench)
    ]
    runs: dict[tuple[str, str], Run] = {}
    with open(plain, "rb", buffering=0) as source, open(out.with_suffix(".limit"), "wb", buffering=0) as target:
        for row, n in zip(rows, threads_of(bench), strict=True):
            loop = bench.evp.modules(KEY, aad, modules, seal=True, source=source.fileno(), threads=n)
            runs[row.name, "loop"] = functools.partial(loop, target.fileno())
            runs[row.name, "ours"] = fresh(out, nothing(parquet.encrypt_file, plain, out, parquet.Keys(KEY), threads=n))
        yield Contest(rows, runs)
        os.unlink(target.name)


@contextmanager
def checksums(bench: Bench) -> Iterator[Contest]:
    """What the CRC-32 of each page costs, parquet-java's default: checked, changed or made."""
    with_crc, without, out = plain_file(bench, "checksums"), plain_file(bench, "snappy"), bench.scratch / "out.parquet"
    keys, nbytes = parquet.Keys(KEY), with_crc.stat().st_size
    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}
    for what in ("encrypt", "verify"):
        row = Row(f"parquet/checksums/{what}/1t", f"{what}, page checksums; beside: without them", nbytes=nbytes)
        rows.append(row)
        for column, plain in (("ours", with_crc), ("beside", without)):
            sealed = sealed_file(bench, "checksums" if column == "ours" else "snappy")
            encrypt = fresh(out, nothing(parquet.encrypt_file, plain, out, keys, threads=1))
            runs[row.name, column] = encrypt if what == "encrypt" else nothing(parquet.verify, sealed, keys, threads=1)
    yield Contest(rows, runs)


# ---- modules


def modules_of(path: Path) -> tuple[bytes, list[Module]]:
    """The AAD that all modules of a file begin with, and the modules of its pages in their order."""
    found: list[Module] = []
    with Opened(path, Reading(parquet.Keys(KEY))) as opened:
        data = opened.source.read(0, opened.footer_offset)
        for chunk in sorted(opened.chunks(), key=lambda chunk: chunk.begin()):
            found += chunk_modules(data, chunk, found[-1].plain + found[-1].nbytes if found else 4)
        assert opened.aad is not None
        return opened.aad, found


def chunk_modules(data: memoryview, chunk: Any, plain: int) -> Iterator[Module]:
    """The modules of a chunk's pages, whose plaintext begins at `plain` in the file that it comes from."""
    place = chunk.ordinal.to_bytes(2, "little") + chunk.column.to_bytes(2, "little")
    begin, dictionary = chunk.begin(), chunk.numbers().dictionary_page > 0
    at, page = begin, 0
    while at < begin + chunk.numbers().compressed_nbytes:
        if dictionary:
            suffixes = [bytes([kind]) + place for kind in (DICTIONARY_PAGE_HEADER, DICTIONARY_PAGE)]
        else:
            number = page.to_bytes(2, "little")
            suffixes = [bytes([kind]) + place + number for kind in (DATA_PAGE_HEADER, DATA_PAGE)]
            page += 1
        dictionary = False
        for suffix in suffixes:
            nbytes = int.from_bytes(data[at : at + 4], "little") + 4 - FRAME
            yield Module(plain, at, nbytes, suffix)
            plain += nbytes
            at += nbytes + FRAME


@contextmanager
def verify(bench: Bench, name: str) -> Iterator[Contest]:
    """Every tag of a file."""
    sealed = sealed_file(bench, name)
    aad, modules = modules_of(sealed)
    what, label = ("verify", "verify") if name == "snappy" else ("small-pages/verify", "verify, 8 KiB pages")
    keys = parquet.Keys(KEY)
    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}
    with open(sealed, "rb", buffering=0) as file:
        for n in threads_of(bench):
            row = Row(f"parquet/{what}/{n}t", f"{label}, {threads_name(n)}", nbytes=sealed.stat().st_size)
            rows.append(row)
            loop = bench.evp.modules(KEY, aad, modules, seal=False, threads=n)
            runs[row.name, "loop"] = functools.partial(loop, file.fileno())
            runs[row.name, "ours"] = nothing(parquet.verify, sealed, keys, threads=n)
        runs[rows[0].name, "naive"] = functools.partial(naive_verify, sealed)
        runs[rows[0].name, "best"] = functools.partial(best_verify, file.fileno(), aad, modules)
        yield Contest(rows, runs, check=lambda column: refuses_change(sealed, modules[-1], runs[rows[0].name, column]))


def refuses_change(path: Path, module: Module, run: Run) -> bool:
    """Whether a run fails on a file of which one byte, of one module's ciphertext, was changed. It is changed back."""
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, module.sealed + 16)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), module.sealed + 16)
        try:
            run()
        except Exception:  # of each contender's own
            return True
        finally:
            os.pwrite(file.fileno(), byte, module.sealed + 16)
    return False


def naive_verify(path: Path) -> None:
    """From the file alone: footer, page headers and all. It is what the tests compare the engine with."""
    deque(from_tests("pme_reference").ParquetFile(path, KEY).modules(), maxlen=0)


def best_verify(fd: int, aad: bytes, modules: list[Module]) -> None:
    """Told where the modules are, it copies and allocates nothing for one, and reads many small ones at once."""
    largest = max(module.nbytes for module in modules) + FRAME
    frames, plain = memoryview(bytearray(largest + PIECES[2])), memoryview(bytearray(largest))
    decrypt_into = AESGCM(KEY).decrypt_into
    begin = end = 0
    for _, sealed, nbytes, suffix in modules:
        if sealed + nbytes + FRAME > end:
            begin = sealed
            end = begin + os.preadv(fd, [frames], begin)
        at = sealed - begin
        text = at + 16
        decrypt_into(frames[at + 4 : text], frames[text : text + nbytes + 16], aad + suffix, plain[:nbytes])


@contextmanager
def pages(bench: Bench, what: str) -> Iterator[Contest]:
    """Pages of 8 KiB of one chunk in memory: two messages each, header and body."""
    plain_path, sealed_path = plain_file(bench, "pages"), sealed_file(bench, "pages")
    with Opened(plain_path) as opened:
        chunk = next(chunk for chunk in opened.chunks() if chunk.name == ONE)
        nbytes, values = chunk.numbers().compressed_nbytes, chunk.numbers().num_values
        plain = bytearray(opened.source.read(chunk.begin(), chunk.begin() + nbytes))
    with Opened(sealed_path, Reading(parquet.Keys(KEY))) as opened:
        chunk = next(chunk for chunk in opened.chunks() if chunk.name == ONE)
        begin, sealed_nbytes = chunk.begin(), chunk.numbers().compressed_nbytes
        sealed = bytearray(opened.source.read(begin, begin + sealed_nbytes))
        layout = list(chunk_modules(opened.source.read(0, begin + sealed_nbytes), chunk, 0))
        modules, aad = chunk.modules, opened.aad
        assert modules is not None
        assert aad is not None
    layout = [Module(m.plain, m.sealed - begin, m.nbytes, m.suffix) for m in layout]
    if sum(module.nbytes for module in layout) != len(plain):
        raise AssertionError("the headers of sealed pages have another length than those of plain ones")
    seal = what == "seal"
    source, out = (plain, touched(2 * len(sealed))) if seal else (sealed, touched(len(plain) + (64 << 10)))
    buffers = (bytearray(plain), touched(len(sealed))) if seal else (touched(len(plain)), bytearray(sealed))

    def ours() -> None:
        run = PageRun(None if seal else modules, modules if seal else None, COPY, len(source), values, label=ONE)
        run.feed(source, True, out)
        run_pages([run], 1)
        if run.stop != DONE:
            raise AssertionError("the run was not done in one go")

    def check(column: str) -> bool:
        if column == "ours":
            return opens(modules, out, len(sealed)) if seal else out[: len(plain)] == plain
        return seals(layout, *buffers, aad)

    row = Row(f"parquet/pages/{what}", f"{what} a page of 8 KiB; EVP loop: 2 messages", "us")
    loop = bench.evp.modules(KEY, aad, layout, seal=seal, buffers=buffers)
    yield Contest([row], {(row.name, "loop"): loop, (row.name, "ours"): ours}, len(layout) // 2, check)


def seals(modules: list[Module], plain: bytes | bytearray, sealed: bytes | bytearray, aad: bytes) -> bool:
    """Whether modules that the EVP loop sealed open to what they were made of; it leaves page headers as they are."""
    aes = AESGCM(KEY)
    return all(
        aes.decrypt(sealed[at + 4 : at + 16], sealed[at + 16 : at + nbytes + FRAME], aad + suffix)
        == plain[begin : begin + nbytes]
        for begin, at, nbytes, suffix in modules
    )


def opens(modules: Modules, sealed: bytearray, nbytes: int) -> bool:
    run = PageRun(modules, None, CHECK, nbytes, 0)
    run.feed(memoryview(sealed)[:nbytes], True, bytearray(1 << 20))
    run_pages([run], 1)
    return bool(run.stop == DONE)


# ---- reading, writing


@contextmanager
def view(bench: Bench) -> Iterator[Contest]:
    import pyarrow.parquet as pq

    plain, sealed = plain_file(bench, "snappy"), sealed_file(bench, "snappy")

    def file_object() -> None:
        with open(plain, "rb", buffering=0) as file:
            pq.read_table(file)

    def ours(threads: int) -> None:
        with parquet.open_plain(sealed, parquet.Keys(KEY), threads=threads) as file:
            pq.read_table(file)

    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}
    for n in threads_of(bench):
        row = Row(f"parquet/view/{n}t", f"view, {threads_name(n)}; beside: plain file", "ms")
        rows.append(row)
        runs[row.name, "beside"] = nothing(file_object)
        runs[row.name, "ours"] = functools.partial(ours, n)
    yield Contest(rows, runs)


@contextmanager
def projection(bench: Bench) -> Iterator[Contest]:
    import pyarrow.parquet as pq

    sealed = sealed_file(bench, "snappy")
    with Opened(sealed, Reading(parquet.Keys(KEY))) as opened:
        nbytes = sum(chunk.numbers().compressed_nbytes for chunk in opened.chunks() if chunk.name == ONE)

    def ours() -> float:
        with parquet.open_plain(sealed, parquet.Keys(KEY)) as file:
            pq.read_table(file, columns=[ONE])
            return float(file.decrypted)

    row = Row("parquet/projection", "1 column of a view; beside: it + 64 KiB", "MiB")  # bytes take the place of seconds
    yield Contest([row], {(row.name, "beside"): lambda: float(nbytes + SLACK), (row.name, "ours"): ours})


@contextmanager
def footer(bench: Bench) -> Iterator[Contest]:
    import pyarrow.parquet as pq

    plain, sealed = plain_file(bench, "wide"), sealed_file(bench, "wide")
    keys = parquet.Keys(KEY)
    row = Row("parquet/footer", f"open {bench.size(5000):,} columns; beside: read_metadata", "ms")
    runs: dict[tuple[str, str], Run] = {
        (row.name, "beside"): nothing(pq.read_metadata, plain),
        (row.name, "ours"): lambda: parquet.open_plain(sealed, keys).close(),
    }
    yield Contest([row], runs)


@contextmanager
def write_table(bench: Bench) -> Iterator[Contest]:
    import pyarrow.parquet as pq

    data, out = pq.read_table(plain_file(bench, "snappy")), bench.scratch / "out.parquet"
    writing = options(bench, "snappy")
    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}
    for n in threads_of(bench):
        row = Row(f"parquet/write_table/{n}t", f"write_table, {threads_name(n)}; beside: pyarrow", "ms")
        rows.append(row)
        runs[row.name, "beside"] = fresh(out, nothing(pq.write_table, data, out, **writing))
        ours = nothing(parquet.write_table, data, out, parquet.Keys(KEY), threads=n, **writing)
        runs[row.name, "ours"] = fresh(out, ours)
    yield Contest(rows, runs)


# ---- many small column chunks


def cpu(path: Path, work: Callable[[], object]) -> Run:
    """The seconds of CPU, of all threads, that work takes to write a file."""

    def run() -> float:
        path.unlink(missing_ok=True)
        begun = time.process_time()
        work()
        return time.process_time() - begun

    return run


@contextmanager
def wide(bench: Bench, what: str) -> Iterator[Contest]:
    """CPU time of one chunk of many. The limit is pyarrow that writes the same table in plaintext, with one thread."""
    import pyarrow.parquet as pq

    plain, out = plain_file(bench, "chunks"), bench.scratch / "out.parquet"
    data, writing = wide_table(bench), options(bench, "chunks")
    keys, new_keys = parquet.Keys(KEY), parquet.Keys(OTHER_KEY)
    sealed = sealed_file(bench, "chunks") if what in ("decrypt", "rekey") else plain
    ours = {
        "encrypt": functools.partial(parquet.encrypt_file, plain, out, keys),
        "decrypt": functools.partial(parquet.decrypt_file, sealed, out, keys),
        "rekey": functools.partial(parquet.reencrypt_file, sealed, out, keys, new_keys),
        "write_table": functools.partial(parquet.write_table, data, out, keys, **writing),
    }[what]
    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}
    for n in threads_of(bench):
        label = f"{what}, CPU of a 1 KiB chunk, {threads_name(n)}; beside: pyarrow writes the plain table"
        row = Row(f"parquet/wide/{what}/{n}t", label, "us")
        rows.append(row)
        runs[row.name, "ours"] = cpu(out, nothing(ours, threads=n))
        runs[row.name, "beside"] = cpu(out, nothing(pq.write_table, data, out, **writing))
    if what != "write_table":
        decrypting = {"decryption_properties": decryption()} if sealed is not plain else {}
        encrypting = {"encryption_properties": encryption()} if what != "decrypt" else {}

        def by_pyarrow() -> None:
            pq.write_table(pq.read_table(sealed, use_threads=False, **decrypting), out, **writing, **encrypting)

        runs[rows[0].name, "naive"] = cpu(out, by_pyarrow)
    yield Contest(rows, runs, calls=bench.size(1000) * CHUNK_GROUPS)


GROUPS: dict[str, Callable[[Bench], Group]] = {"parquet": group}
