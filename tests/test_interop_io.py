"""Readers and writers under other libraries that want a file: nothing is lost, whatever they do with it."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import random
import shutil
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from support import KEY, Source, open_stream, pattern, seal_stream, split_stream

import ags_fast
from ags_fast import AgsReader, AgsWriter, IntegrityError

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 10_000


@pytest.fixture(params=["path", "file-like"])
def encrypted(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A function that encrypts bytes and returns a reader of them."""
    readers = []

    def encrypt(plain: bytes) -> AgsReader:
        sealed = seal_stream(plain, block_size=BLOCK)
        if request.param == "path":
            (tmp_path / "encrypted").write_bytes(sealed)
        reader = AgsReader(
            tmp_path / "encrypted" if request.param == "path" else Source(sealed), KEY, length=len(sealed), threads=2
        )
        readers.append(reader)
        return reader

    yield encrypt
    for reader in readers:
        reader.close()


def writer(target: Any = None) -> tuple[AgsWriter, io.BytesIO]:
    target = io.BytesIO() if target is None else target
    return AgsWriter(target, KEY, block_size=BLOCK, threads=2), target


# ---------------------------------------------------------------- io


@pytest.mark.parametrize("buffer_size", [1, 100, 8192, BLOCK, 100_000])
def test_buffered_reader(encrypted: Any, buffer_size: int) -> None:
    plain = pattern(123_456)
    rng = random.Random(buffer_size)
    with io.BufferedReader(encrypted(plain), buffer_size) as file:
        for _ in range(200):
            offset, size = rng.randrange(130_000), rng.choice([0, 1, 50, 9000, 40_000])
            assert file.seek(offset) == offset
            assert file.peek(1)[:1] == plain[offset : offset + 1]
            assert file.read(size) == plain[offset : offset + size]
            assert plain[file.tell() :].startswith(file.read1(size))
        file.seek(0)
        assert file.read() == plain
        raw = file.raw
    assert raw.closed


def test_buffered_writer() -> None:
    raw, target = writer()
    plain = pattern(123_456)
    with io.BufferedWriter(raw, 1000) as file:
        for begin in range(0, len(plain), 77):
            assert file.write(plain[begin : begin + 77]) == len(plain[begin : begin + 77])
    assert raw.closed
    assert raw.file_length == len(target.getvalue())
    assert open_stream(target.getvalue()) == plain


def test_text_in_both_directions(encrypted: Any) -> None:
    lines = [f"line {i}: ümläut, 名, {i * '.'}\n" for i in range(300)]
    raw, target = writer()
    with io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:  # type: ignore[type-var]
        file.writelines(lines)
    assert open_stream(target.getvalue()).decode() == "".join(lines)
    with io.TextIOWrapper(encrypted("".join(lines).encode()), encoding="utf-8", newline="") as file:
        assert list(file) == lines
        file.seek(0)
        cookies = []
        for line in lines:
            cookies.append(file.tell())
            assert file.readline() == line
        for i in (250, 3, 299, 0):
            file.seek(cookies[i])
            assert file.readline() == lines[i]
    with codecs.getreader("utf-8")(encrypted("".join(lines).encode())) as file:
        assert file.read() == "".join(lines)


def test_left_by_an_exception_inside_a_wrapper(tmp_path: Path) -> None:
    """The standard wrappers close what they wrap, exception or not: to be aborted, the writer must be left before."""
    path = tmp_path / "file"
    raw = AgsWriter(path, KEY)

    def write_half() -> None:
        with raw:
            file = io.TextIOWrapper(raw, encoding="utf-8")  # type: ignore[type-var]
            file.write("half of it")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert raw.closed
    assert not path.exists()
    with AgsWriter(path, KEY) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8")  # type: ignore[type-var]
        file.write("all of it")
        file.detach()
    assert open_stream(path.read_bytes()) == b"all of it"


@pytest.mark.parametrize("size", [0, 1, BLOCK, 200_001])
def test_copyfileobj(encrypted: Any, size: int) -> None:
    plain = pattern(size)
    for step in (1000, 16_384, 1 << 20):
        out, (raw, target) = io.BytesIO(), writer()
        shutil.copyfileobj(encrypted(plain), out, step)
        assert out.getvalue() == plain
        with raw:
            shutil.copyfileobj(io.BytesIO(plain), raw, step)
        assert open_stream(target.getvalue()) == plain
    raw, target = writer()
    with raw:
        shutil.copyfileobj(encrypted(plain), raw)  # from one to the other
    assert open_stream(target.getvalue()) == plain


# ---------------------------------------------------------------- standard containers


def test_zip(encrypted: Any) -> None:
    raw, target = writer()
    contents = {f"folder/{i}": pattern(i * 1000, i) for i in range(50)}
    with raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:  # it cannot seek, and says so
        for name, data in contents.items():
            archive.writestr(name, data)
    with zipfile.ZipFile(encrypted(open_stream(target.getvalue()))) as archive:
        assert archive.testzip() is None
        for name in random.Random(1).sample(sorted(contents), 50):
            assert archive.read(name) == contents[name]


@pytest.mark.parametrize("compression", ["", "gz"])
def test_tar(encrypted: Any, compression: str) -> None:
    raw, target = writer()
    contents = {f"folder/{i}": pattern(i * 1000, i) for i in range(30)}
    with raw, tarfile.open(fileobj=raw, mode=f"w|{compression}") as archive:  # type: ignore[call-overload]
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    reader = encrypted(open_stream(target.getvalue()))
    with tarfile.open(fileobj=reader, mode=f"r:{compression}") as archive:  # type: ignore[call-overload]
        for name in random.Random(1).sample(sorted(contents), 30):
            file = archive.extractfile(name)
            assert file is not None
            assert file.read() == contents[name]


@pytest.mark.parametrize("module", [gzip, bz2])
def test_compressed_streams(encrypted: Any, module: Any) -> None:
    plain = pattern(200_000)
    raw, target = writer()
    with raw, module.open(raw, mode="wb") as file:
        file.write(plain)
    inside = open_stream(target.getvalue())
    assert module.decompress(inside) == plain
    with module.open(encrypted(inside)) as file:
        assert file.read() == plain
        file.seek(100)
        assert file.read(10) == plain[100:110]


def test_json_and_csv(encrypted: Any) -> None:
    value = {"numbers": list(range(10_000)), "text": "ümläut" * 1000}
    raw, target = writer()
    with io.TextIOWrapper(raw, encoding="utf-8") as file:  # type: ignore[type-var]
        json.dump(value, file)
    assert json.load(encrypted(open_stream(target.getvalue()))) == value
    raw, target = writer()
    rows = [[str(i), f"value, {i}", "multi\nline"] for i in range(3000)]
    with io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:  # type: ignore[type-var]
        csv.writer(file).writerows(rows)
    with io.TextIOWrapper(encrypted(open_stream(target.getvalue())), encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == rows


# ---------------------------------------------------------------- Avro

SCHEMA = {
    "type": "record",
    "name": "row",
    "fields": [
        {"name": "i", "type": "long"},
        {"name": "s", "type": "string"},
        {"name": "b", "type": ["null", "bytes"]},
    ],
}
ROWS = [{"i": i, "s": f"row {i}", "b": None if i % 3 else bytes([i % 256]) * (i % 100)} for i in range(5000)]


def avro(codec: str = "null") -> bytes:
    fastavro = pytest.importorskip("fastavro")
    raw, target = writer()
    with raw:
        fastavro.writer(raw, SCHEMA, ROWS, codec=codec, sync_interval=5000)
    return open_stream(target.getvalue())


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_fastavro(encrypted: Any, codec: str) -> None:
    fastavro = pytest.importorskip("fastavro")
    plain = avro(codec)
    reader = encrypted(plain)
    assert list(fastavro.reader(reader)) == ROWS
    reader.seek(0)
    blocks = list(fastavro.block_reader(reader))
    assert len(blocks) > 5
    assert [row for block in blocks for row in block] == ROWS
    assert list(fastavro.reader(io.BufferedReader(encrypted(plain)))) == ROWS


def test_avro_that_was_cut_never_loses_rows_silently(tmp_path: Path) -> None:
    """fastavro and Java take a short read or an EOFError at the wrong moment for the end of the data."""
    fastavro = pytest.importorskip("fastavro")
    plain = avro()
    # A cut between blocks of both formats: only the trusted length tells.
    marker = plain[-16:]
    between = plain.index(marker, plain.index(marker, plain.index(marker) + 1) + 1) + 16
    header, blocks = split_stream(seal_stream(plain, block_size=between))
    cut_stream = header + blocks[0]
    rows = list(fastavro.reader(AgsReader(cut_stream, KEY, length=None)))
    assert 0 < len(rows) < len(ROWS)
    with pytest.raises(IntegrityError, match="cut"):
        AgsReader(cut_stream, KEY, length=len(header + b"".join(blocks)))

    sealed = seal_stream(plain, block_size=BLOCK)
    path = tmp_path / "file"
    boundary = 8 + 4 * (BLOCK + 28)
    for cut in (boundary, boundary + 5000):
        path.write_bytes(sealed[:cut])
        with pytest.raises(IntegrityError, match="cut"):
            AgsReader(path, KEY, length=len(sealed))
        for wrap in (lambda raw: raw, io.BufferedReader, lambda raw: io.BufferedReader(raw, 100)):
            path.write_bytes(sealed)
            shrinking = AgsReader(path, KEY, length=len(sealed))
            path.write_bytes(sealed[:cut])  # after it was opened
            ending = Source(sealed)
            like = AgsReader(ending, KEY, length=len(sealed))

            def end(at: int, right: bytes, cut: int = cut) -> bytes:
                if at + len(right) > cut:
                    raise EOFError
                return right

            ending.answer = end
            for reader in (shrinking, like):
                with pytest.raises(IntegrityError):
                    for _ in fastavro.reader(wrap(reader)):
                        pass
                reader.close()


# ---------------------------------------------------------------- Arrow, pandas


def test_parquet_inside(encrypted: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"i": range(50_000), "s": [f"text {i % 777}" for i in range(50_000)]})
    raw, target = writer()
    with raw, pa.PythonFile(raw, mode="w") as file:
        pq.write_table(table, file, row_group_size=9000)
    plain = open_stream(target.getvalue())
    assert pq.read_table(pa.BufferReader(plain)).equals(table)
    assert pq.read_table(pa.PythonFile(encrypted(plain), mode="r")).equals(table)
    assert pq.read_table(encrypted(plain), columns=["i"]).equals(table.select(["i"]))
    with pq.ParquetFile(encrypted(plain), pre_buffer=True) as file:
        assert file.num_row_groups == 6
        for group in (5, 0, 3):
            assert file.read_row_group(group).equals(table.slice(group * 9000, 9000))


def test_arrow_csv_and_ipc_inside(encrypted: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    pa_csv = pytest.importorskip("pyarrow.csv")
    table = pa.table({"i": range(20_000), "s": [f"text {i % 77}" for i in range(20_000)]})
    raw, target = writer()
    with raw:
        pa_csv.write_csv(table, pa.PythonFile(raw, mode="w"))
    assert pa_csv.read_csv(encrypted(open_stream(target.getvalue()))).equals(table)
    raw, target = writer()
    with raw, pa.ipc.new_file(pa.PythonFile(raw, mode="w"), table.schema) as file:
        file.write_table(table)
    with pa.ipc.open_file(pa.PythonFile(encrypted(open_stream(target.getvalue())), mode="r")) as file:
        assert file.read_all().equals(table)


def test_pandas(encrypted: Any) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"i": range(10_000), "s": [f"text {i}" for i in range(10_000)]})
    raw, target = writer()
    with raw:
        frame.to_csv(raw, index=False, mode="wb")
    plain = open_stream(target.getvalue())
    assert pd.read_csv(encrypted(plain)).equals(frame)
    assert pd.concat(pd.read_csv(encrypted(plain), chunksize=999)).equals(frame)
    with io.BufferedReader(encrypted(plain)) as file:
        assert pd.read_csv(file, engine="python").equals(frame)


def test_errors_come_through_arrow() -> None:
    """A bad block under Arrow's threads is the same exception, not a shorter table."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    pq.write_table(pa.table({"i": random.Random(1).sample(range(1 << 40), 50_000)}), out)
    sealed = bytearray(seal_stream(out.getvalue(), block_size=BLOCK))
    sealed[len(sealed) // 2] ^= 1
    with ags_fast.open(bytes(sealed), key=KEY, length=len(sealed)) as reader, pytest.raises(IntegrityError):
        pq.read_table(pa.PythonFile(reader, mode="r"))
