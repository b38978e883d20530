"""What becomes of a file that nobody closes, or that is written because of an exception: every writer of the product.

And what `io` expects of a file beyond reading and writing: CPython's own tests ask for it.
"""

from __future__ import annotations

import gc
import io
import sys
import zipfile
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms
from support import KEY, seal_stream

import ags_fast
from ags_fast import AgsReader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")


@pytest.fixture
def fs(tmp_path: Path) -> Any:
    kms = make_kms(tmp_path, keys=(MASTER,))
    Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
    options = {"dataset": str(tmp_path / "dataset"), "kms": kms, "write_options": {"fsync": False}}
    return fsspec.filesystem("ags", skip_instance_cache=True, **options)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda raw: raw,
    "BufferedWriter": io.BufferedWriter,
    "TextIOWrapper": lambda raw: io.TextIOWrapper(io.BufferedWriter(raw), write_through=False),
    "TextIOWrapper without a buffer": io.TextIOWrapper,
    "BufferedRWPair": lambda raw: io.BufferedRWPair(io.BytesIO(), raw),
}


def write_and_forget(raw: list[Any], wrap: Callable[[Any], Any]) -> None:
    file = wrap(raw.pop())
    file.write("half of it" if isinstance(file, io.TextIOBase) else b"half of it")
    del file
    gc.collect()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("kind", ["path", "fsspec", "compressed", "text", "transaction"])
def test_collected(
    kind: str, wrap: Callable[[Any], Any], fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is published, with one ResourceWarning: also if a buffer around the file is collected first."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Python 3.13 shows that the buffer could not flush
    path = tmp_path / "sealed"
    if kind == "text" and wrap not in (WRAPPERS["itself"],):
        pytest.skip("text is not wrapped again")
    with fs.dataset.transaction(fsync=False) as new:
        make: dict[str, Callable[[], Any]] = {
            "path": lambda: ags_fast.open(path, "wb", key=KEY),
            "fsspec": lambda: fs.open("x", "wb"),
            "compressed": lambda: fs.open("x", "wb", compression="gzip"),
            "text": lambda: ags_fast.open(path, "wt", key=KEY),
            "transaction": lambda: new.create("x"),
        }
        made = [make[kind]()]
        if kind == "transaction":
            new._pending.open.clear()  # noqa: SLF001 (its only other reference)
        with pytest.warns(ResourceWarning, match="lost") as seen:
            write_and_forget(made, wrap)
        new.abort()
    assert len(seen) == 1
    assert not path.exists()
    assert fs.find("") == []


def test_iceberg_file_collected() -> None:
    pytest.importorskip("pyiceberg")
    from ags_fast.iceberg.io import _Stream  # noqa: PLC2701

    class Owner:
        def write_output(self, location: str, view: memoryview) -> int:
            raise AssertionError("a file that nobody has closed was written")

    output = type("Output", (), {"location": "x"})()
    for wrap in WRAPPERS.values():
        write_and_forget([_Stream(Owner(), output)], wrap)  # type: ignore[arg-type]


# ------------------------------------------------------------------------- files that are written for an exception


class Report:
    """Writes about the exception that leaves its block."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.write = write

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.write()


@contextmanager
def excepting(write: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except ZeroDivisionError:
        write()
        raise


@contextmanager
def at_last(write: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        write()


@contextmanager
def called_back(write: Callable[[], None]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(write)
        yield


@contextmanager
def pushed(write: Callable[[], None]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.push(lambda *error: write())
        yield


@contextmanager
def nested(write: Callable[[], None]) -> Iterator[None]:
    with Report(lambda: None), Report(write):
        yield


@contextmanager
def in_another(write: Callable[[], None]) -> Iterator[None]:
    """While another exception is handled, which the first one has caused."""
    try:
        yield
    except ZeroDivisionError:
        try:
            raise KeyError
        except KeyError:
            write()
        raise


PATTERNS = [Report, excepting, at_last, called_back, pushed, nested, in_another]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_written_because_of_an_exception(pattern: Callable[[Callable[[], None]], Any], fs: Any) -> None:
    """Such a file is complete, in whatever way it is written, and also if it was opened before."""
    storage = {"dataset": fs.dataset.url, "kms": fs._handle.place.kms}  # noqa: SLF001
    early = fs.open("early", "w"), fs.open("early in a block", "wb")

    def write() -> None:
        for mode, compression in (("wb", None), ("w", None), ("wb", "gzip"), ("w", "gzip")):
            data: Any = "all" if mode == "w" else b"all"
            with fs.open(f"own {mode} {compression}", mode, compression=compression) as file:
                file.write(data)
            with fsspec.open(f"ags://other {mode} {compression}", mode, compression=compression, **storage) as file:
                file.write(data)
            file = fs.open(f"by hand {mode} {compression}", mode, compression=compression)
            file.write(data)
            file.close()
        fs.pipe("piped", b"all")
        pytest.importorskip("pandas").DataFrame({"x": [1]}).to_csv("ags://pandas", index=False, storage_options=storage)
        early[0].write("all")
        early[0].close()
        with early[1] as file:
            file.write(b"all")

    with pytest.raises(ZeroDivisionError), pattern(write):
        raise ZeroDivisionError
    fs.invalidate_cache()
    names = fs.find("")
    assert len(names) == 12 + 4
    for name in names:
        with fs.open(name, compression="gzip" if name.endswith("gzip") else None) as file:
            assert file.read() == (b"x\n1\n" if name == "pandas" else b"all"), name


def test_left_by_an_exception_while_another_is_handled(fs: Any) -> None:
    """Half a file is discarded, also if it was opened because of an exception."""
    storage = {"dataset": fs.dataset.url, "kms": fs._handle.place.kms}  # noqa: SLF001

    def write_half(opened: Any, mode: str) -> None:
        with opened as file:
            file.write("half" if mode == "w" else b"half")
            raise KeyError

    for mode in ("wb", "w"):
        for make in (lambda mode: fs.open("x", mode), lambda mode: fsspec.open("ags://x", mode, **storage)):
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                with pytest.raises(KeyError):
                    write_half(make(mode), mode)
    fs.invalidate_cache()
    assert fs.find("") == []


# ------------------------------------------------------------------------------------------ what `io` expects of it


class Three:
    def __index__(self) -> int:
        return 3


def readers(fs: Any, data: bytes, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    yield "AgsReader", AgsReader(seal_stream(data), KEY, length=None)
    yield "BufferedReader", io.BufferedReader(AgsReader(seal_stream(data), KEY, length=None))
    fs.pipe("x", data)
    yield "ags://", fs.open("x")
    yield "Dataset.open_file", fs.dataset.open_file("x")
    (tmp_path / "plain").write_bytes(data)
    yield "FileIO", io.FileIO(tmp_path / "plain")


def test_positions_before_the_beginning(fs: Any, tmp_path: Path) -> None:
    """An OSError, as of FileIO, and a ValueError. zipfile looks for the end of an archive there."""
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    for name, file in readers(fs, b"abc", tmp_path):
        assert not zipfile.is_zipfile(file), name
        for position, whence in [(-1, 0), (-4, 1), (-4, 2)]:
            file.seek(0)
            with pytest.raises(OSError) as raised:  # noqa: PT011 (each system has its own words)
                file.seek(position, whence)
            assert isinstance(raised.value, ValueError) or name == "FileIO"
            assert file.read() == b"abc"
    for name, file in readers(fs, empty.getvalue(), tmp_path):
        assert zipfile.ZipFile(file).namelist() == [], name


def test_views_have_no_position_before_the_beginning(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ags_fast import parquet

    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "plain.parquet")
    keys = parquet.Keys(KEY)
    parquet.encrypt_file(tmp_path / "plain.parquet", tmp_path / "sealed.parquet", keys)
    sealed = str(tmp_path / "sealed.parquet")
    with parquet.open_plain(sealed, keys) as view, parquet.filesystem(keys).open(sealed) as file:
        for one in (view, file):
            assert one.seek(-4, 2) + 4 == one.seek(0, 2)
            assert one.seek(-1, 1) + 1 == view.size
            assert one.read() == b"1"
            for position, whence in [(-1, 0), (-view.size - 1, 1), (-view.size - 1, 2)]:
                with pytest.raises(io.UnsupportedOperation):
                    one.seek(position, whence)
            assert one.tell() == view.size


def test_numbers_of_other_types(fs: Any, tmp_path: Path) -> None:
    for name, file in readers(fs, b"abcde\nfgh", tmp_path):
        assert file.read(Three()) == b"abc", name
        assert file.readline(Three()) == b"de\n"
        assert file.seek(Three()) == 3
        for method in (file.read, file.readline, file.seek):
            with pytest.raises(TypeError):
                method("3")


def test_questions_to_closed_files(fs: Any, tmp_path: Path) -> None:
    files: list[Any] = [file for _, file in readers(fs, b"abc", tmp_path) if isinstance(file, io.RawIOBase)]
    with fs.dataset.transaction(fsync=False) as new:
        files += [
            ags_fast.open(tmp_path / "sealed", "wb", key=KEY),
            fs.open("y", "wb"),
            fs.open("z", "wb", compression="gzip"),
            new.create("n"),
        ]
        for file in files:
            assert (file.readable(), file.seekable(), file.writable()) in ((True, True, False), (False, False, True))
            if file.writable():
                with pytest.raises(io.UnsupportedOperation):
                    file.read(1)
            assert file.mode in ("rb", "wb")
            with pytest.raises(AttributeError):
                file.mode = "x"
            file.close()
            for method in (file.readable, file.seekable, file.writable):
                with pytest.raises(ValueError, match="closed file"):
                    method()
    assert isinstance(files[0], AgsReader)
