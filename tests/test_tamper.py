"""Streams that somebody changed: never wrong data, never data before its tag, whatever way they are read."""

from __future__ import annotations

import io
import random
import struct
from typing import TYPE_CHECKING, Any

import pytest
from programs import streams
from shares import rest_in_more
from support import KEY, KEYS, OTHER_KEY, Source, flip, pattern, program, run_python, seal_stream, split_stream

from ags_fast import AgsCodec, AgsReader, FormatError, IntegrityError, encrypted_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Refused = (IntegrityError, FormatError)


@pytest.fixture(params=["whole", "by block"])
def ways(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Iterator[Any]]:
    """Calls that each open a whole stream in another way and return its plaintext.

    A small stream is read whole when it is opened; "by block" makes readers treat it as they treat large ones.
    """
    if request.param == "by block":
        monkeypatch.setattr("ags_fast.files.source.SMALL_FILE_NBYTES", 0)
    path = tmp_path / "stream"

    def every(stream: bytes, key: bytes = KEY, prefix: bytes = b"", length: int | None = None) -> Iterator[Any]:
        options: dict[str, Any] = {"aad_prefix": prefix, "length": len(stream) if length is None else length}
        codec = AgsCodec(key, aad_prefix=prefix)
        yield lambda: codec.decrypt(stream, length=options["length"])
        yield lambda: codec.decrypt_range(stream, 0, 1 << 40, length=options["length"])

        def into() -> bytes:
            out = bytearray(b"\xa5" * (len(stream) + 10))
            try:
                size = codec.decrypt_into(stream, out, length=options["length"])
            except Refused:
                assert set(out) <= {0, 0xA5}
                assert out.rstrip(b"\xa5").count(0xA5) == 0
                raise
            assert out[size:] == b"\xa5" * (len(out) - size)
            return bytes(out[:size])

        yield into
        path.write_bytes(stream)
        with path.open("rb") as file:
            for source in (path, file, stream, io.BytesIO(stream), Source(stream, lambda at, right: right[:7])):

                def read(source: Any = source) -> bytes:
                    with AgsReader(source, key, **options) as reader:
                        return reader.read()

                def small_steps(source: Any = source) -> bytes:
                    with AgsReader(source, key, **options) as reader:
                        return b"".join(iter(lambda: reader.read(5), b""))

                def verify(source: Any = source) -> bytes:
                    with AgsReader(source, key, **options) as reader:
                        try:
                            reader.verify()
                        except IntegrityError as error:
                            if "follow its trusted length" not in str(error):  # these it only reports
                                raise
                        return reader.read()

                yield from (read, small_steps, verify)

    return every


def test_the_ways_read_what_is_right(ways: Callable[..., Iterator[Any]]) -> None:
    for plain_length in (0, 1, 16, 33):
        plain = pattern(plain_length)
        stream = seal_stream(plain, block_size=16)
        assert [call() for call in ways(stream)] == [plain] * 18


@pytest.mark.parametrize("plain_length", rest_in_more([0, 3, 16, 17, 40], 0, 3, 17))
def test_every_bit_flipped(ways: Callable[..., Iterator[Any]], plain_length: int) -> None:
    plain = pattern(plain_length)
    stream = seal_stream(plain, KEY, b"prefix", 16)
    one_block = plain_length <= 16
    for bit in range(8 * len(stream)):
        for call in ways(flip(stream, bit), prefix=b"prefix"):
            if one_block and 32 <= bit < 64:  # BlockLength is not authenticated; it may do no harm here, but never any
                try:
                    assert call() == plain
                except Refused:
                    pass
            else:
                with pytest.raises(Refused):
                    call()


def test_cut_at_every_byte(ways: Callable[..., Iterator[Any]]) -> None:
    plain = pattern(40)
    stream = seal_stream(plain, block_size=16)
    between = {8: 0, 8 + 44: 16, 8 + 88: 32}  # all that is left there is a stream, and only the length tells
    for n in range(len(stream)):
        for call in ways(stream[:n], length=len(stream)):
            with pytest.raises(IntegrityError):
                call()
        for call in ways(stream, length=n):
            if n in between:
                assert call() == plain[: between[n]]
            else:
                with pytest.raises(Refused):
                    call()
        for call in ways(stream[:n]):
            if n in between:
                assert call() == plain[: between[n]]
            else:
                with pytest.raises(Refused):
                    call()
    for n in range(len(stream) + 1, len(stream) + 100):
        for call in ways(stream + bytes(100), length=n):
            with pytest.raises(Refused):
                call()


def rearranged(blocks: list[bytes]) -> dict[str, list[bytes]]:
    """Every block swapped with, replaced by and put before each other one, repeated and dropped."""
    n = len(blocks)
    results = {}
    for i in range(n):
        results[f"{i} dropped"] = blocks[:i] + blocks[i + 1 :]
        results[f"{i} emptied"] = [*blocks[:i], blocks[i][:12] + blocks[i][-16:], *blocks[i + 1 :]]
        for j in range(n):
            results[f"{i} again before {j}"] = [*blocks[:j], blocks[i], *blocks[j:]]
            if i != j:
                results[f"{i} in the place of {j}"] = [*blocks[:j], blocks[i], *blocks[j + 1 :]]
            if i < j:
                swapped = list(blocks)
                swapped[i], swapped[j] = blocks[j], blocks[i]
                results[f"{i} and {j} swapped"] = swapped
        results[f"{i} again in the end"] = [*blocks, blocks[i]]
    del results[f"{n - 1} dropped"]  # a cut between blocks: see above
    return results


@pytest.mark.parametrize("plain_length", [64, 57])
def test_blocks_moved(ways: Callable[..., Iterator[Any]], plain_length: int) -> None:
    header, blocks = split_stream(seal_stream(pattern(plain_length), block_size=16))
    for name, moved in rearranged(blocks).items():
        for call in ways(header + b"".join(moved)):
            with pytest.raises(Refused):
                pytest.fail(f"{name}: {call()!r}")


def test_blocks_of_other_streams(ways: Callable[..., Iterator[Any]]) -> None:
    plain, other = pattern(64), pattern(64, seed=1)
    header, blocks = split_stream(seal_stream(plain, KEY, b"file 1", 16))
    for key, prefix in (
        (KEY, b"file 2"),
        (KEY, b""),
        (KEY, b"file 1\0"),
        (OTHER_KEY, b"file 1"),
        (KEYS[32], b"file 1"),
    ):
        theirs = split_stream(seal_stream(other, key, prefix, 16))[1]
        for i in range(4):
            for call in ways(header + b"".join([*blocks[:i], theirs[i], *blocks[i + 1 :]]), prefix=b"file 1"):
                with pytest.raises(IntegrityError):
                    call()
    # What the format does not promise: the prefix is all that tells files under one key apart.
    twin = split_stream(seal_stream(other, KEY, b"file 1", 16))[1]
    for call in ways(header + b"".join([*blocks[:2], twin[2], blocks[3]]), prefix=b"file 1"):
        assert call() == plain[:32] + other[32:48] + plain[48:]
    # A prefix that ends as another's block number does is still another prefix: lengths differ only between files.
    shifted = split_stream(seal_stream(other, KEY, b"file 1" + struct.pack("<I", 2), 16))[1]
    for call in ways(header + b"".join([*blocks[:2], shifted[0], blocks[3]]), prefix=b"file 1"):
        with pytest.raises(IntegrityError):
            call()


def test_wrong_key_or_prefix(ways: Callable[..., Iterator[Any]]) -> None:
    for plain_length in (0, 5, 40):
        stream = seal_stream(pattern(plain_length), KEY, b"prefix", 16)
        for key in (OTHER_KEY, flip(KEY, 127), KEY + bytes(16), KEY + KEY[:8]):
            for call in ways(stream, key=key, prefix=b"prefix"):
                with pytest.raises(IntegrityError, match="AES-GCM does not tell which"):
                    call()
        for prefix in (b"", b"prefi", b"prefix\0", b"Prefix", b"prefix\0\0\0\0"):
            for call in ways(stream, prefix=prefix):
                with pytest.raises(IntegrityError):
                    call()


# ---------------------------------------------------------------- headers that lie


@pytest.mark.parametrize("claimed", [0, 1, 15, 17, 44, 1 << 20, (64 << 20) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
def test_block_length_lies(ways: Callable[..., Iterator[Any]], claimed: int) -> None:
    for plain_length in (17, 60):
        stream = seal_stream(pattern(plain_length), block_size=16)
        for call in ways(stream[:4] + struct.pack("<I", claimed) + stream[8:]):
            with pytest.raises(Refused):
                call()


def test_block_size_pins_and_max_block_size_bounds() -> None:
    stream = seal_stream(pattern(10), block_size=100)
    lie = stream[:4] + struct.pack("<I", 64) + stream[8:]
    with AgsReader(lie, KEY, length=len(lie)) as reader:  # one block: the same plaintext
        assert reader.read() == pattern(10)
        assert reader.block_size == 64
    with pytest.raises(FormatError, match="blocks of 64 bytes"):
        AgsReader(lie, KEY, length=len(lie), block_size=100)
    assert AgsReader(stream, KEY, length=len(stream), block_size=100, max_block_size=100).read() == pattern(10)
    with pytest.raises(FormatError, match="max_block_size"):
        AgsReader(stream, KEY, length=len(stream), max_block_size=99)
    with pytest.raises(ValueError, match="block_size"):
        AgsReader(stream, KEY, length=len(stream), block_size=0)


def test_lies_allocate_nothing(tmp_path: Path) -> None:
    """Every BlockLength and trusted length over a small file, with little memory to give: refused, not MemoryError."""
    (tmp_path / "file").write_bytes(seal_stream(pattern(100_000), block_size=16)[8:])
    run_python(
        program(streams.claim_block_sizes, tmp_path / "file"),
    )


# ---------------------------------------------------------------- a bad block among good ones


@pytest.mark.parametrize("block_size", [64, 4096, 100_000])
@pytest.mark.parametrize("kind", ["path", "file", "bytes", "file-like"])
def test_a_bad_block_raises_each_time_and_the_others_stay_readable(kind: str, block_size: int, tmp_path: Path) -> None:
    n, bad = 40, {7, 8, 39}
    plain = pattern(n * block_size - 10)
    header, blocks = split_stream(seal_stream(plain, block_size=block_size))
    changed = [flip(b, 8 * (len(b) // 2)) if i in bad else b for i, b in enumerate(blocks)]
    stream = header + b"".join(changed)
    assert len(stream) == encrypted_length(len(plain), block_size)
    path = tmp_path / "stream"
    path.write_bytes(stream)
    rng = random.Random(block_size)
    with path.open("rb") as file:
        source = {"path": path, "file": file, "bytes": stream, "file-like": Source(stream)}[kind]
        reader = AgsReader(source, KEY, length=len(stream), threads=2)  # type: ignore[arg-type]

        def wanted(offset: int, size: int) -> tuple[bytes | None, int | None]:
            """The right answer: bytes, or the block to be blamed."""
            size = max(0, min(size, len(plain) - offset))
            touched = range(offset // block_size, -(-(offset + size) // block_size)) if size else ()
            blame = min((i for i in touched if i in bad), default=None)
            return (plain[offset : offset + size] if blame is None else None), blame

        def check(call: Callable[[], bytes], offset: int, size: int) -> None:
            right, blame = wanted(offset, size)
            if blame is None:
                assert call() == right
            else:
                with pytest.raises(IntegrityError) as caught:
                    call()
                assert caught.value.block_index == blame, (offset, size)

        def into(offset: int, size: int, at: bool) -> bytes:
            out = bytearray(b"\xa5" * (size + 5))
            view = memoryview(out)[:size]
            try:
                got = reader.readinto_at(offset, view) if at else reader.readinto(view)
            except IntegrityError:
                clamped = max(0, min(size, len(plain) - offset))
                assert out[:clamped] == bytes(clamped)
                assert set(out[clamped:]) == {0xA5}
                raise
            assert out[got:] == b"\xa5" * (len(out) - got)
            return bytes(out[:got])

        for _ in range(300):
            offset = rng.choice([rng.randrange(len(plain)), block_size * rng.randrange(n)])
            size = rng.choice([0, 1, 10, block_size - 1, block_size, block_size + 1, rng.randrange(5 * block_size)])
            check(lambda o=offset, s=size: reader.read_at(o, s), offset, size)  # type: ignore[misc]
            check(lambda o=offset, s=size: into(o, s, True), offset, size)  # type: ignore[misc]
            check(lambda o=offset, s=size: reader.read_ranges([(o, s)])[0], offset, size)  # type: ignore[misc]
            for call in (reader.read, lambda s, o=offset: into(o, s, False)):
                reader.seek(offset)
                check(lambda s=size, c=call: c(s), offset, size)  # type: ignore[misc]
                right = wanted(offset, size)[0]
                assert reader.tell() == offset + (0 if right is None else len(right))  # a failed read moves nothing
        for i in (7, 8, 39):
            for _ in range(3):
                check(lambda o=i * block_size: reader.read_at(o, 1), i * block_size, 1)  # type: ignore[misc]
        with pytest.raises(IntegrityError) as caught:
            reader.verify()
        assert caught.value.block_index == 7

        # Somebody who reads on and skips what is bad gets all the rest, by steps that read ahead.
        reader.seek(0)
        step, position, got = block_size // 4, 0, {}
        while position < len(plain):
            try:
                got[position] = reader.read(step)
            except IntegrityError as error:
                assert error.block_index in bad
                position = reader.seek((error.block_index + 1) * block_size)
            else:
                assert got[position] == plain[position : position + step]
                position += step
        assert sum(map(len, got.values())) == len(plain) - 2 * block_size - (block_size - 10)
