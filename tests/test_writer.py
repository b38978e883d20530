"""AgsWriter: any writes to any target make the stream; whatever goes wrong, no file that looks complete and is not."""

from __future__ import annotations

import array
import copy
import errno
import gc
import gzip
import io
import os
import pickle
import stat
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import streams
from support import KEY, Target, nonces_of, open_stream, pattern, program, run_python

import ags_fast
from ags_fast import AgsCodec, AgsReader, AgsWriter, FormatError, KeyLimitError, encrypted_length, stream

if TYPE_CHECKING:
    from collections.abc import Callable

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class HalfRaw(io.RawIOBase):
    """A raw file as it may be: it takes a part of what it is given."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = 1 + len(data) // 2
        self.taken += data[:size]
        return size


class Silent:
    """An object with nothing but a write method, and that says nothing."""

    def __init__(self, keep: bool = True) -> None:
        self.taken = bytearray()
        self.keep = keep

    def write(self, data: Any) -> None:
        if self.keep:
            self.taken += data


def append(path: Path) -> Any:
    path.write_bytes(b"before")
    return path.open("ab")


def in_gzip(path: Path) -> Any:
    return gzip.open(path, "wb", compresslevel=0)


def out_of_gzip(target: Any, path: Path) -> bytes:
    target.close()
    with gzip.open(path) as file:
        return file.read()


def out_of_temporary(target: Any, path: Path) -> bytes:
    target.seek(0)
    return target.read()


def read_path(target: Any, path: Path) -> bytes:
    return path.read_bytes()


def taken(target: Any, path: Path) -> bytes:
    return bytes(target.taken)


# How to make a target of each kind, and how to get the bytes that are in it.
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Path], bytes]]] = {
    "path": (lambda path: path, read_path),
    "raw file": (lambda path: path.open("wb", 0), read_path),
    "buffered file": (lambda path: path.open("wb"), read_path),
    "file to read and write": (lambda path: path.open("w+b"), read_path),
    "file to append to": (append, lambda target, path: path.read_bytes().removeprefix(b"before")),
    "BytesIO": (lambda path: io.BytesIO(), lambda target, path: target.getvalue()),
    "buffered BytesIO": (lambda path: io.BufferedWriter(io.BytesIO()), lambda target, path: target.raw.getvalue()),
    "gzip": (in_gzip, out_of_gzip),
    "temporary file": (lambda path: tempfile.TemporaryFile(), out_of_temporary),  # noqa: SIM115
    "file-like": (lambda path: Target(), taken),
    "takes parts": (lambda path: Target(lambda data, before: 1 + len(data) // 3), taken),
    "raw that takes parts": (lambda path: HalfRaw(), taken),
    "says nothing": (lambda path: Silent(), taken),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=30)
def test_any_writes_to_any_target(kind: str, data: st.DataObject) -> None:
    """Writes of any sizes are the stream of their bytes, read by an independent AGS1; the target is left open."""
    make, content = KINDS[kind]
    block_size = data.draw(st.sampled_from([1, 7, 16, 64, 1000]))
    sizes = data.draw(
        st.lists(st.integers(0, 4 * block_size) | st.sampled_from([0, block_size, 100, 1000]), max_size=12)
    )
    ahead = data.draw(st.sampled_from([1, 100, 256 << 10]))
    threads = data.draw(st.integers(1, 3))
    pieces = [pattern(size, i) for i, size in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(stream, "GATHERED_NBYTES", ahead):
        path = Path(folder) / "file"
        target = make(path)
        writer = AgsWriter(target, KEY, aad_prefix=b"p", block_size=block_size, threads=threads)
        written = 0
        for piece in pieces:
            assert writer.write(piece) == len(piece)
            written += len(piece)
            assert writer.tell() == written
        writer.close()
        if hasattr(target, "closed"):
            assert not target.closed
        sealed = content(target, path)
        if hasattr(target, "close"):
            target.close()
        assert writer.file_length == len(sealed) == encrypted_length(written, block_size)
        assert sealed[4:8] == block_size.to_bytes(4, "little")
        assert open_stream(sealed, KEY, b"p") == b"".join(pieces)
        assert len(set(nonces_of(sealed))) == len(nonces_of(sealed))
        assert [name for name in os.listdir(folder) if name != "file"] == []


def test_large_writes(no_leftovers: Path) -> None:
    """Megabytes, in pieces and at once, over the sizes at which other code takes over."""
    plain = pattern(9_000_001)
    for block_size in (4096, 300_000, 1 << 20):
        for step in (65_536, 100_003, 1 << 20, 5_000_000, len(plain)):
            for target in (no_leftovers / "file", io.BytesIO()):
                with AgsWriter(target, KEY, block_size=block_size, threads=2) as writer:
                    for begin in range(0, len(plain), step):
                        writer.write(memoryview(plain)[begin : begin + step])
                sealed = target.getvalue() if isinstance(target, io.BytesIO) else target.read_bytes()
                assert open_stream(sealed) == plain, (block_size, step)


def test_any_contiguous_exporter() -> None:
    target = io.BytesIO()
    writer = AgsWriter(target, KEY, block_size=10)
    parts = [bytearray(b"abc"), memoryview(b"defg")[1:], array.array("i", [1, 2]), b""]
    try:
        import numpy as np
    except ImportError:
        pass
    else:
        parts += [np.arange(10, dtype=">i8"), np.zeros((2, 3)), np.zeros((0, 3))]  # type: ignore[list-item]
    for part in parts:
        assert writer.write(part) == memoryview(part).nbytes  # type: ignore[arg-type]
    before = writer.tell()
    for junk, error in (
        ("text", TypeError),
        (5, TypeError),
        (None, TypeError),
        (memoryview(b"abcd")[::2], BufferError),
    ):
        with pytest.raises(error):
            writer.write(junk)  # type: ignore[arg-type]
    assert writer.tell() == before  # a caller's mistake costs nothing
    writer.close()
    assert open_stream(target.getvalue()) == b"".join(bytes(memoryview(part)) for part in parts)  # type: ignore[arg-type]


# ---------------------------------------------------------------- a path


def test_path_appears_when_complete(no_leftovers: Path) -> None:
    path = no_leftovers / "file"
    for old in (None, b"old"):
        with AgsWriter(path, KEY, block_size=100) as writer:
            for _ in range(100):
                writer.write(pattern(77))
                assert (path.read_bytes() if path.exists() else None) == old
            partial = [other for other in no_leftovers.iterdir() if other != path]
            assert len(partial) == 1
            assert partial[0].name.startswith(".")
            assert partial[0].read_bytes()[:4] != b"AGS1"  # without its header it is no stream, whatever else it has
        assert open_stream(path.read_bytes()) == pattern(77) * 100
        assert os.listdir(no_leftovers) == ["file"]
        path.write_bytes(b"old")


def test_abort_and_exceptions_leave_what_was_there(no_leftovers: Path) -> None:
    path = no_leftovers / "file"
    for old in (None, b"old"):
        if old is not None:
            path.write_bytes(old)
        writer = AgsWriter(path, KEY, block_size=10)
        writer.write(bytes(1000))
        writer.abort()
        writer.abort()
        writer.close()
        assert writer.closed
        with pytest.raises(ValueError, match="no length"):
            _ = writer.file_length
        writer, error = AgsWriter(path, KEY, block_size=10), RuntimeError("the caller's")
        writer.write(bytes(1000))
        with pytest.raises(RuntimeError) as caught, writer:
            raise error
        assert caught.value is error
        assert writer.closed
        with pytest.raises(KeyboardInterrupt), ags_fast.open(path, "wb", key=KEY):
            raise KeyboardInterrupt
        assert (path.read_bytes() if path.exists() else None) == old
        assert os.listdir(no_leftovers) == (["file"] if old else [])


def test_collected_without_close(no_leftovers: Path) -> None:
    """Nobody has said that it is complete: io.IOBase alone would complete it."""
    writer = AgsWriter(no_leftovers / "file", KEY)
    writer.write(bytes(3 << 20))
    left = [writer]
    del writer
    with pytest.warns(ResourceWarning, match="neither closed nor aborted"):
        left.clear()
    assert os.listdir(no_leftovers) == []


def test_failed_constructors(no_leftovers: Path) -> None:
    """They leave nothing behind and blame nobody for not closing what nobody has got."""
    raising = OSError("the target's own")

    def take(data: bytes, before: int) -> int:
        raise raising

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target, options, error in (
            (no_leftovers / "file", {"key": b"short"}, ValueError),
            (no_leftovers / "file", {"threads": 0}, ValueError),
            (no_leftovers / "file", {"block_size": 0}, ValueError),
            (no_leftovers / "file", {"block_size": 1 << 31}, ValueError),
            (no_leftovers / "file", {"aad_prefix": "text"}, TypeError),
            (no_leftovers / "file", {"sealed_before": (1 << 32) + 1}, KeyLimitError),
            (no_leftovers / "missing" / "file", {}, FileNotFoundError),
            (no_leftovers, {}, IsADirectoryError),
            ("/dev/full", {}, OSError),
            (Target(take), {}, OSError),
            (b"file", {}, TypeError),
            (5, {}, TypeError),
            (io.StringIO(), {}, TypeError),
            (io.BytesIO(), {"exclusive": True}, ValueError),
            (io.BytesIO(), {"fsync": True}, ValueError),
        ):
            with mock.patch("sys.unraisablehook") as hook:
                with pytest.raises(error) as caught:
                    AgsWriter(target, **{"key": KEY, **options})  # type: ignore[arg-type]
                caught.value.__traceback__ = None  # it keeps the writer
                gc.collect()
            assert not hook.called, (target, hook.call_args)
    assert os.listdir(no_leftovers) == []


def test_exclusive(no_leftovers: Path) -> None:
    path = no_leftovers / "file"
    with ags_fast.open(path, "xb", key=KEY) as writer:
        writer.write(b"first")
    with pytest.raises(FileExistsError):
        ags_fast.open(path, "xb", key=KEY)
    assert open_stream(path.read_bytes()) == b"first"
    path.unlink()
    writer = ags_fast.open(path, "xb", key=KEY)
    writer.write(b"second")
    path.write_bytes(b"somebody was faster")
    with pytest.raises(FileExistsError):
        writer.close()
    assert path.read_bytes() == b"somebody was faster"
    assert writer.closed
    path.unlink()
    path.symlink_to(no_leftovers / "nowhere")
    with pytest.raises(FileExistsError):
        ags_fast.open(path, "xb", key=KEY)
    path.unlink()
    with (
        ags_fast.open(path, "xb", key=KEY) as writer,
        mock.patch.object(os, "link", side_effect=OSError(errno.EPERM, "-")),
    ):
        writer.write(b"third")
        writer.close()  # a file system without hard links
    assert open_stream(path.read_bytes()) == b"third"
    with pytest.raises(FileExistsError):
        ags_fast.open(path, "xb", key=KEY)


def test_fsync_of_file_and_folder(no_leftovers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes before the name, the name before close() returns; without fsync, neither."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        if not is_folder:
            assert os.pread(fd, 4, 0) == b"AGS1"  # all of it is there by now
        done.append("folder" if is_folder else "file")
        fsync(fd)

    def watched_replace(source: str, target: str, **folders: int | None) -> None:
        done.append("name")
        replace(source, target, **folders)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    for wanted, expected in ((True, ["file", "name", "folder"]), (False, ["name"])):
        done.clear()
        with ags_fast.open(no_leftovers / "file", "wb", key=KEY, fsync=wanted) as writer:
            writer.write(bytes(2 << 20))
        assert done == expected


def test_links_and_modes(no_leftovers: Path) -> None:
    folder = no_leftovers / "folder"
    folder.mkdir()
    path, link = folder / "file", no_leftovers / "link"
    link.symlink_to(path)
    before = os.umask(0o027)
    try:
        for mode in (0o640, 0o600, 0o755, 0o444):  # the first: a new one by the umask
            with AgsWriter(link, KEY) as writer:
                writer.write(b"x")
            assert link.is_symlink()
            assert open_stream(path.read_bytes()) == b"x"
            if mode == 0o640:
                assert stat.S_IMODE(path.stat().st_mode) == 0o640
            path.chmod(mode)
            with AgsWriter(path, KEY) as writer:
                writer.write(b"x")
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)
    assert os.listdir(folder) == ["file"]
    (no_leftovers / "loop").symlink_to(no_leftovers / "loop")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        AgsWriter(no_leftovers / "loop", KEY)


@pytest.mark.parametrize(
    "name",
    ["n" * 255, "名" * 85, "é" * 127, ".hidden", "with\nnewline", "-", "x.agstmp.y"],
    ids=["longest", "longest of 3 bytes each", "longest of 2 bytes each", "hidden", "newline", "dash", "as temporary"],
)
def test_names(no_leftovers: Path, name: str) -> None:
    """Every name that the file system takes, also where nothing can be added to it."""
    path = no_leftovers / name
    with AgsWriter(path, KEY) as writer:
        writer.write(b"x")
    assert os.listdir(no_leftovers) == [name]
    assert open_stream(path.read_bytes()) == b"x"


def test_working_directory_may_change(no_leftovers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_leftovers / "elsewhere").mkdir()
    monkeypatch.chdir(no_leftovers)
    with AgsWriter("file", KEY) as writer:
        monkeypatch.chdir(no_leftovers / "elsewhere")
        writer.write(b"x")
    assert open_stream((no_leftovers / "file").read_bytes()) == b"x"


def test_what_cannot_be_published(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    writer = AgsWriter(path, KEY)
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        writer.close()
    assert os.listdir(path.parent) == ["file"]
    assert writer.closed
    path.rmdir()
    writer = AgsWriter(path, KEY)
    for other in path.parent.iterdir():
        other.unlink()
    path.parent.rmdir()
    with pytest.raises(FileNotFoundError):
        writer.close()
    writer.close()


@linux
def test_devices_and_pipes(no_leftovers: Path) -> None:
    with AgsWriter("/dev/null", KEY) as writer:
        writer.write(bytes(3 << 20))
    assert writer.file_length == encrypted_length(3 << 20)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    plain = pattern(3 << 20)
    os.mkfifo(no_leftovers / "fifo")
    for target in (no_leftovers / "fifo", None):
        got: list[bytes] = []
        if target is None:
            reading, writing = os.pipe()
            target = io.FileIO(writing, "w")  # type: ignore[assignment]
        else:
            reading = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(reading, True)
        with io.FileIO(reading) as pipe:
            writer = AgsWriter(target, KEY, threads=2)  # type: ignore[arg-type]
            thread = threading.Thread(target=lambda p=pipe, g=got: g.append(p.readall()))
            thread.start()
            writer.write(plain)
            writer.close()
            if isinstance(target, io.FileIO):
                target.close()  # type: ignore[unreachable]
            thread.join()
        assert open_stream(got[0]) == plain
    assert stat.S_ISFIFO(os.stat(no_leftovers / "fifo").st_mode)


# ---------------------------------------------------------------- a file passed in


@pytest.mark.parametrize("buffering", [-1, 0])
def test_file_is_written_where_it_stands(buffering: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xa5" * 1000)
    with path.open("r+b", buffering) as file:
        file.read(10)  # fills its buffer
        file.seek(100)
        file.write(b"head")
        with AgsWriter(file, KEY, block_size=16, threads=1) as writer:
            writer.write(pattern(40))
        end = 104 + writer.file_length
        assert file.tell() == end
        file.write(b"tail")
        file.seek(0)
        assert file.read(100) == b"\xa5" * 100
        assert file.read(4) == b"head"
    content = path.read_bytes()
    assert open_stream(content[104:end]) == pattern(40)
    assert content[end : end + 4] == b"tail"
    assert content[end + 4 :] == b"\xa5" * (1000 - end - 4)
    with path.open("rb") as file, pytest.raises(OSError, match="Bad file"):
        AgsWriter(file, KEY).write(bytes(3 << 20))


def test_an_aborted_file_is_no_stream(tmp_path: Path) -> None:
    """Where an old stream was: its header goes first and the new one's comes last."""
    path = tmp_path / "file"
    path.write_bytes(AgsCodec(KEY).encrypt(b"old"))
    with path.open("r+b") as file:
        writer = AgsWriter(file, KEY, block_size=10)
        writer.write(bytes(100))
        writer.abort()
        assert not file.closed
    with pytest.raises(FormatError):
        AgsReader(path, KEY, length=None)


@linux
@pytest.mark.parametrize("then", ["write", "close", "close with a part of a block"])
def test_a_file_closed_under_the_writer(then: str, tmp_path: Path) -> None:
    """ValueError, and not a byte in the file that has got its descriptor's number since."""
    with (tmp_path / "first").open("wb") as first:
        writer = AgsWriter(first, KEY, block_size=10)
        writer.write(bytes(30))
        if then == "close with a part of a block":
            writer.write(b"x")
        number = first.fileno()

    def opener(name: str, flags: int) -> int:
        """Opens at that number, even where a lower one has become free."""
        descriptor = os.open(name, flags, 0o600)
        if descriptor != number:
            os.dup2(descriptor, number, inheritable=False)
            os.close(descriptor)
        return number

    with open(tmp_path / "other", "w+b", opener=opener) as other:
        other.write(b"\xa5" * 100)
        other.flush()
        with pytest.raises(ValueError, match="closed"):
            writer.write(bytes(3 << 20)) if then == "write" else writer.close()
        assert writer.closed
        other.seek(0)
        assert other.read() == b"\xa5" * 100


# ---------------------------------------------------------------- targets that fail


class TroubleError(OSError):
    """An error that only the target can have raised."""


@pytest.mark.parametrize("good", [0, 7, 8, 9, 8 + 1028, 50_000])
def test_a_target_that_raises(good: int) -> None:
    """The error is the target's very own, and the writer is done."""
    trouble = TroubleError(28, "no space")

    def take(data: bytes, before: int) -> int:
        if before >= good:
            raise trouble
        return min(good - before, len(data))

    def write() -> None:
        made.append(AgsWriter(target, KEY, block_size=1000, threads=1))
        made[0].writelines([bytes(1500)] * 100)

    made: list[AgsWriter] = []
    target = Target(take)
    with pytest.raises(TroubleError) as caught:
        write()
    assert caught.value is trouble
    assert len(target.taken) == good
    assert not target.closed
    if good >= 8:
        (writer,) = made
        assert writer.closed
        writer.close()
        assert len(target.taken) == good
        with pytest.raises(ValueError, match="closed"):
            writer.write(b"")


def test_a_target_that_raises_in_the_end() -> None:
    for fail_flush in (False, True):
        target = Target(lambda data, before: len(data))
        writer = AgsWriter(target, KEY)
        writer.write(b"the last block")
        trouble = TroubleError()
        setattr(target, "flush" if fail_flush else "write", mock.Mock(side_effect=trouble))
        with pytest.raises(TroubleError) as caught:
            writer.close()
        assert caught.value is trouble
        assert writer.closed
        with pytest.raises(ValueError, match="no length"):
            _ = writer.file_length


@pytest.mark.parametrize("answer", [0, -1, 1 << 40])
def test_a_target_that_takes_an_impossible_number(answer: int) -> None:
    with pytest.raises(OSError, match="bytes as written"):
        AgsWriter(Target(lambda data, before: answer), KEY)


def test_a_raw_target_that_would_block() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with io.FileIO(reading), io.FileIO(writing, "w") as pipe:
        writer = AgsWriter(pipe, KEY)
        with pytest.raises(BlockingIOError):
            writer.write(bytes(10 << 20))
        assert writer.closed


@linux
@pytest.mark.parametrize("step", [3 << 20, 1000])
def test_a_file_that_may_not_grow(step: int, tmp_path: Path) -> None:
    """In parallel from one large write, and in the last write of many small ones."""
    run_python(
        program(streams.write_too_much, tmp_path, step),
    )


@linux
def test_a_full_disk(tmp_path: Path) -> None:
    """A file system of one megabyte, in a mount namespace that ends with the process."""
    out = run_python(
        program(streams.fill_a_disk, tmp_path),
    )
    if "not permitted" in out:
        pytest.skip("may not mount")


# ---------------------------------------------------------------- limits


def test_key_limit_in_the_middle(no_leftovers: Path) -> None:
    key = b"a key of its own"
    writer = AgsWriter(no_leftovers / "file", key, block_size=10, threads=1, sealed_before=(1 << 32) - 20)
    with mock.patch.object(stream, "GATHERED_NBYTES", 1):
        writer.write(bytes(200))

    def write() -> None:
        writer.write(bytes(10))
        writer.close()

    with pytest.raises(KeyLimitError):
        write()
    assert writer.closed
    assert os.listdir(no_leftovers) == []


def test_the_last_block_number(no_leftovers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 2**31 is refused before it is written; here it is block 4."""
    assert stream.MAX_BLOCKS_WRITTEN == (1 << 31) - 1  # type: ignore[attr-defined]
    monkeypatch.setattr(stream, "MAX_BLOCKS_WRITTEN", 3)
    monkeypatch.setattr(ags_fast.ags1, "MAX_BLOCKS_WRITTEN", 3)
    path = no_leftovers / "file"
    for plain in (b"", b"x" * 11, b"x" * 12):
        with AgsWriter(path, KEY, block_size=4) as writer:
            writer.write(plain)
        assert open_stream(path.read_bytes()) == plain
    path.unlink()
    for sizes in ([13], [12, 1], [5, 5, 5], [100]):
        target = Target()
        for where in (path, target):
            with pytest.raises(FormatError, match="use larger"), AgsWriter(where, KEY, block_size=4) as writer:
                writer.writelines(map(bytes, sizes))
        assert writer.closed
        assert len(target.taken) <= 8 + 3 * 32
    assert os.listdir(no_leftovers) == []


@pytest.mark.parametrize("kind", ["path", "file-like"])
def test_memory_of_a_long_write(kind: str, no_leftovers: Path) -> None:
    """Blocks in flight, not the stream; of one large write not even a copy."""
    block_size, threads = 1 << 20, 2
    piece, whole = bytes(100_000), bytes(64 << 20)
    for pieces in ([piece] * 640, [whole]):
        target = no_leftovers / "file" if kind == "path" else Silent(keep=False)
        tracemalloc.start()
        try:
            with AgsWriter(target, KEY, block_size=block_size, threads=threads) as writer:
                for data in pieces:
                    writer.write(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= (threads + 2) * block_size + (8 << 20), peak


@pytest.mark.parametrize("block_size", [1000, 300_000])
def test_a_regular_file_gets_each_block_when_it_is_full(block_size: int, no_leftovers: Path) -> None:
    """However many threads there are: small writes are not collected for them, but helpers may still be at work."""
    held = max(block_size, stream.GATHERED_NBYTES)
    with (no_leftovers / "file").open("wb") as file, AgsWriter(file, KEY, block_size=block_size, threads=8) as writer:
        for _ in range(100):
            writer.write(bytes(30_000))
            while os.fstat(file.fileno()).st_size <= writer.tell() - held - 30_000:
                time.sleep(0.001)
    assert AgsReader(no_leftovers / "file", KEY, length=writer.file_length).read() == bytes(3_000_000)


# ---------------------------------------------------------------- as a file object


def test_file_protocol() -> None:
    target = io.BytesIO()
    writer = AgsWriter(target, KEY, block_size=4)
    assert isinstance(writer, io.RawIOBase)
    assert writer.writable()
    assert not writer.readable()
    assert not writer.seekable()
    assert not writer.isatty()
    assert writer.mode == "wb"
    assert writer.block_size == 4
    with pytest.raises(ValueError, match="no length"):
        _ = writer.file_length
    writer.writelines([b"one\n", b"two\n"])
    writer.flush()
    for call in (
        writer.fileno,
        lambda: writer.seek(0),
        writer.truncate,
        writer.read,
        lambda: writer.readinto(bytearray(1)),
    ):
        with pytest.raises(io.UnsupportedOperation):
            call()
    for function in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            function(writer)
    with writer as entered:
        assert entered is writer
    writer.close()
    writer.abort()
    assert writer.closed
    assert writer.file_length == 8 + 2 * 32
    assert "closed" in repr(writer)
    for call in (writer.tell, writer.flush, lambda: writer.write(b""), writer.writable, writer.__enter__):  # type: ignore[assignment]
        with pytest.raises(ValueError, match="closed"):
            call()
    assert open_stream(target.getvalue()) == b"one\ntwo\n"


# ---------------------------------------------------------------- forks and kills


def test_fork_with_an_open_writer(tmp_path: Path) -> None:
    """The file is the parent's: a child neither publishes nor removes it, however it ends."""
    run_python(
        program(streams.fork_while_writing, tmp_path),
    )


@linux
def test_a_child_can_let_go_of_its_parents_file(tmp_path: Path) -> None:
    """A worker that outlives its parent must not keep a deleted file on the disk."""
    run_python(
        program(streams.close_in_a_child, tmp_path),
    )


def kill_loop(rounds: int, how: str, folder: Path) -> None:
    complete, incomplete = map(
        int, run_python(program(streams.kill_writers, rounds, folder, how), timeout=60 + rounds).split()
    )
    assert complete > rounds // 10, "kills at moments that prove little"
    assert incomplete > rounds // 20, "kills at moments that prove little"


@pytest.mark.parametrize("how", ["path", "in place"])
def test_kill_9(how: str, tmp_path: Path) -> None:
    """A process is killed again and again while it writes: what has a name, or a header, is complete."""
    kill_loop(60, how, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["path", "in place"])
def test_kill_9_for_longer(how: str, tmp_path: Path) -> None:
    kill_loop(3000, how, tmp_path)
