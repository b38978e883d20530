"""Lines and text: what `open` of Python does with the same plaintext."""

from __future__ import annotations

import builtins
import io
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from support import KEY, Source, flip, seal_stream, split_stream

import ags_fast
from ags_fast import AgsReader, AgsWriter, IntegrityError
from ags_fast.keys import StandardKeyMetadata
from ags_fast.parquet import Keys, encrypt_file, open_plain

if TYPE_CHECKING:
    from pathlib import Path

READ_NBYTES = 256 << 10  # at a time, for lines
TEXT = "one\ntwo\r\nthree\r\n\nf\u00fcnf \u20ac\rsix\n\U0001f511 without an end"
LINES = b"".join(b"%d: some text\n" % number for number in range(100_000))


class Counting(AgsReader):
    """A reader that counts what is read with its cursor."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        return super().read(size)


def reader_of(plain: bytes, block_size: int = 1 << 20, kind: type[AgsReader] = AgsReader) -> Any:
    sealed = seal_stream(plain, block_size=block_size)
    return kind(Source(sealed), KEY, length=len(sealed))


def test_lines_are_read_many_at_a_time() -> None:
    reader = reader_of(LINES, kind=Counting)
    assert list(reader) == LINES.splitlines(keepends=True)
    assert reader.reads < len(LINES) // READ_NBYTES + 10


class Shouting(AgsReader):
    """A reader with a `readline` of its own."""

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(size).upper()


def test_iteration_calls_the_readline_of_a_subclass() -> None:
    assert list(reader_of(b"one\ntwo", kind=Shouting)) == [b"ONE\n", b"TWO"]


def test_iteration_and_the_cursor_go_together() -> None:
    reader = reader_of(LINES)
    for line in reader:
        if line.startswith(b"10:"):
            assert reader.tell() == LINES.index(b"11:")
            reader.seek(LINES.index(b"500:"))
        elif line.startswith(b"501:"):
            assert reader.readline().startswith(b"502:")
            reader.seek(-30, io.SEEK_END)
    assert reader.read() == b""
    reader.seek(0)
    lines = iter(reader)
    assert next(lines) == b"0: some text\n"
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        next(lines)
    with pytest.raises(ValueError, match="closed"):
        iter(reader)


def test_long_line_is_not_read_piece_by_piece() -> None:
    reader = reader_of(bytes(8 << 20) + b"\nend", kind=Counting)
    assert [len(line) for line in reader] == [(8 << 20) + 1, 3]
    assert reader.reads < (8 << 20) // READ_NBYTES + 10


@pytest.mark.parametrize("hint", [None, -1, 0, 1, 5, 1 << 20])
def test_readlines(hint: int | None) -> None:
    plain = TEXT.encode()
    assert reader_of(plain, 7).readlines(hint) == io.BytesIO(plain).readlines(hint)


def test_first_line_decrypts_little() -> None:
    plain = b"short\n" * 1_000_000
    sealed = seal_stream(plain, block_size=64 << 10)
    source = Source(sealed)
    asked: list[int] = []

    def answer(offset: int, right: bytes) -> bytes:
        asked.append(len(right))
        return right

    source.answer = answer
    reader = AgsReader(source, KEY, length=len(sealed))
    assert reader.readline() == b"short\n"
    assert sum(asked) < 3 * (64 << 10)


def test_damaged_block_fails_where_a_line_needs_it() -> None:
    plain = b"0123456\n" * 1000
    sealed = bytearray(seal_stream(plain, block_size=1000))
    header, blocks = split_stream(bytes(sealed))
    blocks[5] = flip(blocks[5], 100)
    damaged = header + b"".join(blocks)
    reader = AgsReader(Source(damaged), KEY, length=len(damaged))
    with pytest.raises(IntegrityError, match="block 5"):
        list(reader)
    assert reader.tell() == 5000
    reader.seek(0)
    assert sum(1 for _ in range(625) if reader.readline() == b"0123456\n") == 625
    reader.seek(6000)
    assert reader.readlines() == [b"0123456\n"] * 250


def test_closed_reader_has_no_lines() -> None:
    reader = reader_of(LINES)
    reader.readline()
    reader.close()
    for call in (reader.readline, lambda: next(reader), reader.readlines):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize("size", ["1", 1.5, b""])
def test_size_of_a_line_is_a_number(size: Any) -> None:
    with pytest.raises(TypeError):
        reader_of(LINES).readline(size)


def test_lines_of_a_parquet_view(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": ["line\n" * 10] * 100}), tmp_path / "plain", compression="none")
    encrypt_file(tmp_path / "plain", tmp_path / "sealed", Keys(KEY))
    with open_plain(tmp_path / "sealed", Keys(KEY)) as view:
        whole = view.read()
        view.seek(0)
        assert list(view) == io.BytesIO(whole).readlines()


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("newline", [None, "", "\n", "\r", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
def test_text_as_open_has_it(tmp_path: Path, encoding: str, newline: str | None) -> None:
    theirs, ours = tmp_path / "plain", tmp_path / "sealed"
    options: Any = {"encoding": encoding, "newline": newline}
    with builtins.open(theirs, "w", **options) as plain:
        plain.write(TEXT)
    with ags_fast.open(ours, "wt", key=KEY, **options) as sealed:
        assert sealed.write(TEXT) == len(TEXT)
    length = sealed.buffer.file_length
    with ags_fast.open(ours, "rb", key=KEY, length=length) as raw:
        assert raw.read() == theirs.read_bytes()
    with builtins.open(theirs, **options) as plain, ags_fast.open(ours, "r", key=KEY, length=length, **options) as text:
        lines = list(plain)
        assert list(text) == lines
        assert text.seek(0) == 0
        assert text.readline() == lines[0]
        place = text.tell()
        rest = text.read()
        text.seek(place)
        assert text.read() == rest


def test_text_in_the_default_encoding(tmp_path: Path) -> None:
    with ags_fast.open(tmp_path / "sealed", "x", key=KEY) as sealed, builtins.open(tmp_path / "plain", "x") as plain:
        assert sealed.encoding == plain.encoding
    with pytest.raises(FileExistsError):
        ags_fast.open(tmp_path / "sealed", "xt", key=KEY)


def test_text_with_key_metadata(tmp_path: Path) -> None:
    known = StandardKeyMetadata(KEY, b"prefix")
    with ags_fast.open(tmp_path / "sealed", "wt", key_metadata=known, encoding="utf-8") as sealed:
        sealed.write(TEXT)
    known = StandardKeyMetadata(KEY, b"prefix", (tmp_path / "sealed").stat().st_size)
    with ags_fast.open(tmp_path / "sealed", "rt", key_metadata=known, encoding="utf-8", newline="") as text:
        assert text.read() == TEXT


def test_errors_of_text(tmp_path: Path) -> None:
    with ags_fast.open(tmp_path / "sealed", "wt", key=KEY, encoding="ascii", errors="replace") as sealed:
        sealed.write("\u20ac")
    length = (tmp_path / "sealed").stat().st_size
    with ags_fast.open(tmp_path / "sealed", "rt", key=KEY, length=length) as text:
        assert text.read() == "?"
        with pytest.raises(io.UnsupportedOperation):
            text.write("")


@pytest.mark.parametrize("mode", ["", "b", "t", "rbt", "rr", "r+", "rw", "a", "rU", "br+", "rtt"])
def test_unknown_modes(mode: str) -> None:
    with pytest.raises(ValueError, match="mode must be"):
        ags_fast.open(io.BytesIO(), mode, key=KEY)  # type: ignore[call-overload]


@pytest.mark.parametrize("option", [{"encoding": "utf-8"}, {"errors": "strict"}, {"newline": ""}])
@pytest.mark.parametrize("mode", ["rb", "wb", "xb"])
def test_bytes_have_no_encoding(mode: str, option: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="for text"):
        ags_fast.open(io.BytesIO(), mode, key=KEY, **option)  # type: ignore[call-overload]


def test_unknown_encoding_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no-such"):
        ags_fast.open(tmp_path / "sealed", "wt", key=KEY, encoding="no-such")
    with pytest.raises(ValueError, match="newline"):
        ags_fast.open(tmp_path / "sealed", "wt", key=KEY, newline="x")
    assert list(tmp_path.iterdir()) == []


def test_failed_block_leaves_no_text(tmp_path: Path) -> None:
    sealed: Any = ags_fast.open(tmp_path / "sealed", "wt", key=KEY)
    with suppress(KeyError), sealed:
        sealed.write("half")
        raise KeyError
    assert sealed.closed
    assert list(tmp_path.iterdir()) == []


def test_text_that_nothing_closes_is_discarded(tmp_path: Path) -> None:
    sealed: Any = ags_fast.open(tmp_path / "sealed", "wt", key=KEY)
    sealed.write("half")
    with pytest.warns(ResourceWarning, match="neither closed nor aborted"):
        del sealed
    assert list(tmp_path.iterdir()) == []


def test_text_whose_last_write_fails_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed: Any = ags_fast.open(tmp_path / "sealed", "wt", key=KEY)
    sealed.write("half")

    def interrupted(self: AgsWriter, data: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(AgsWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sealed.close()
    assert sealed.closed
    assert list(tmp_path.iterdir()) == []
