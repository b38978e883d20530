"""The benchmarks: contenders that do the same work, turns and ratios as they are claimed, a run from end to end.

No test looks at how long something took.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from support import KEY, KEYS, flip, open_stream, pattern, seal_stream

from ags_fast import encrypted_length
from ags_fast.dataset.access import Access
from ags_fast.dataset.names import entry_path
from ags_fast.dataset.tables import PAGE_ROWS
from ags_fast.keys import kms_calls, load_kms

pytest.importorskip("benchmarks", reason="the benchmarks are in the source tree only, and run from there")
from benchmarks import commits, compare, datasets, frames, measure, peers, plain_jobs, rotation, targets, test_speed
from benchmarks.cases import Bench
from benchmarks.evp import BUILT_WITH, ROOT, Evp, EvpError, Module
from benchmarks.measure import Contest, Row

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = b"a file's name"
SIZES = [(1, 16), (16, 16), (100, 16), (40_000, 4096), (40_960, 4096), (300_000, 1 << 20), (900_000, 300_000)]

needs_compiler = pytest.mark.skipif(
    not BUILT_WITH.is_file() or not shutil.which(os.environ.get("CC", "cc").split()[0]),
    reason="the EVP loop needs a C compiler and the build's libcrypto.json",
)


@pytest.fixture(scope="module")
def evp(tmp_path_factory: pytest.TempPathFactory) -> Evp:
    return Evp(tmp_path_factory.mktemp("evp"))


# ---------------------------------------------------------------- contenders


@pytest.mark.parametrize(("size", "block"), SIZES)
def test_naive_python_writes_and_reads_ags1(size: int, block: int, tmp_path: Path) -> None:
    data, path = pattern(size), str(tmp_path / "stream")
    stream = peers.naive_encrypt(KEY, PREFIX, block, data)
    assert open_stream(stream, KEY, PREFIX) == data
    assert peers.naive_decrypt(KEY, PREFIX, seal_stream(data, KEY, PREFIX, block)) == data
    peers.naive_write(path, KEY, PREFIX, block, memoryview(data))
    assert open_stream(Path(path).read_bytes(), KEY, PREFIX) == data
    assert b"".join(peers.naive_read(path, KEY, PREFIX)) == data


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("size", "block"), SIZES)
def test_best_python_writes_and_reads_ags1(size: int, block: int, threads: int, tmp_path: Path) -> None:
    data, out, path = bytearray(pattern(size)), bytearray(encrypted_length(size, block)), tmp_path / "stream"
    best = peers.BestPython(KEY, PREFIX, block, threads)
    best.encrypt_into(data, out)
    assert open_stream(bytes(out), KEY, PREFIX) == data
    opened = bytearray(size)
    best.decrypt_into(out, opened)
    assert opened == data
    with open(path, "w+b", buffering=0) as file:
        best.write(file.fileno(), data)
        assert open_stream(path.read_bytes(), KEY, PREFIX) == data
        windows = [bytearray(-(-size // block) * block) for _ in range(threads)]
        best.read(file.fileno(), size, windows)  # whatever block a thread took is at its place in the thread's window
    for begin in range(0, size, block):
        assert any(window[begin : min(begin + block, size)] == data[begin : begin + block] for window in windows)
    best.close()


@pytest.mark.parametrize(("size", "block"), SIZES)
def test_pycryptodome_writes_and_reads_ags1(size: int, block: int) -> None:
    pytest.importorskip("Crypto")
    data, out, opened = bytearray(pattern(size)), bytearray(encrypted_length(size, block)), bytearray(size)
    peers.pycryptodome_encrypt_into(KEY, PREFIX, block, data, out)
    assert open_stream(bytes(out), KEY, PREFIX) == data
    peers.pycryptodome_decrypt_into(KEY, PREFIX, block, out, opened)
    assert opened == data


def test_python_stream_class_is_a_seekable_file(tmp_path: Path) -> None:
    data, path = pattern(100_000), tmp_path / "stream"
    path.write_bytes(seal_stream(data, KEY, PREFIX, 4096))
    with peers.PythonReader(path, KEY, length=path.stat().st_size, aad_prefix=PREFIX) as reader:
        for offset, size in ((0, 10), (4090, 20), (8192, 4096), (5000, 50_000), (99_990, 100), (100_000, 1)):
            assert reader.seek(offset) == offset
            assert reader.read(size) == data[offset : offset + size]
            assert reader.tell() == min(offset + size, 100_000)
        assert reader.seek(-10, os.SEEK_END) == 99_990
        assert reader.read() == data[-10:]
    path.write_bytes(flip(path.read_bytes(), -1))
    with (
        peers.PythonReader(path, KEY, length=path.stat().st_size, aad_prefix=PREFIX) as reader,
        pytest.raises(ValueError, match="block 24 does not"),
    ):
        reader.read()


@pytest.mark.parametrize("size", [1, 4096, 1 << 20, 2_500_000])
def test_plain_jobs_make_ags1(size: int, tmp_path: Path) -> None:
    plan = plain_jobs.plain_plan(datasets.make_tree(tmp_path / "source", 3, size), tmp_path / "sealed")
    assert [file.nbytes for file in plan] == [size] * 3
    assert list(plain_jobs.plain_encrypt(plan)) == list(plain_jobs.plain_verify(plan)) == [size] * 3
    kek = plain_jobs.AESGCM(plain_jobs.KEK)
    for file in plan:
        key = kek.decrypt(file.wrapped[:12], file.wrapped[12:], file.target.encode())
        stream = Path(file.target).read_bytes()
        assert open_stream(stream, key, file.prefix) == Path(file.path).read_bytes()
    Path(file.target).write_bytes(stream + b"x")
    with pytest.raises(ValueError, match="longer"):
        list(plain_jobs.plain_verify(plan))
    Path(file.target).write_bytes(stream[:-1])
    with pytest.raises(ValueError, match="cut"):
        list(plain_jobs.plain_verify(plan))


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("size", "block"), SIZES)
def test_evp_loop_writes_and_reads_ags1(evp: Evp, size: int, block: int, threads: int, tmp_path: Path) -> None:
    key, path = KEYS[32], tmp_path / "stream"
    data, out = bytearray(pattern(size)), bytearray(encrypted_length(size, block))
    nonces = os.urandom(12 * -(-size // block))
    assert evp.loop(key, PREFIX, block, data, stream=out, nonces=nonces, threads=threads)() > 0
    out[:8] = peers.header(block)
    assert open_stream(bytes(out), key, PREFIX) == data

    opened = bytearray(size)
    assert evp.loop(key, PREFIX, block, opened, stream=out, threads=threads)() > 0
    assert opened == data

    with open(path, "w+b", buffering=0) as file:
        evp.loop(key, PREFIX, block, data, nonces=nonces, threads=threads)(file.fileno())
        assert path.read_bytes()[8:] == out[8:]
        opened = bytearray(size)
        evp.loop(key, PREFIX, block, opened, threads=threads)(file.fileno())
        assert opened == data
        window = bytearray(block)
        evp.loop(key, PREFIX, block, window, plain_length=size, window=block, order=array("I", [0]))(file.fileno())
        assert window[: min(block, size)] == data[:block]


@needs_compiler
def test_evp_loop_checks_tags(evp: Evp) -> None:
    stream = bytearray(seal_stream(pattern(9000), KEY, PREFIX, 4096))
    out = bytearray(9000)
    assert evp.loop(KEY, PREFIX, 4096, out, stream=stream)() > 0
    stream[-1] ^= 1
    with pytest.raises(EvpError):
        evp.loop(KEY, PREFIX, 4096, out, stream=stream)()


@needs_compiler
def test_ports_have_the_width_of_this_cpu(evp: Evp) -> None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("the features are read from /proc")
    flags = set(re.findall(r"\w+", text))
    if not {"aes", "pclmulqdq", "sse4_1"} <= flags:
        with pytest.raises(EvpError, match="x86-64"):
            evp.ports(1 << 20)
        return
    wide = {"vaes", "vpclmulqdq"} <= flags
    seconds, bits = evp.ports(1 << 20)
    assert seconds > 0
    assert bits == (512 if wide and "avx512f" in flags else 256 if wide else 128)


@needs_compiler
@pytest.mark.parametrize("nbytes", [1, 64, 1000, 1 << 20])
def test_a_kernel_opens_what_evp_seals(evp: Evp, nbytes: int) -> None:
    widest = evp.widest_kernel()
    assert widest in {0, 128, 256, 512}
    for sealing, opening in ((0, widest), (widest, 0)):
        assert evp.kernel(sealing, nbytes, seal=True) > 0
        assert evp.kernel(opening, nbytes, seal=False) > 0
    for bits, size in ((1024, nbytes), (widest, 0), (widest, (1 << 20) + 1)):
        with pytest.raises(EvpError, match="does not open, or no kernel"):
            evp.kernel(bits, size, seal=False)


@needs_compiler
def test_evp_loop_reads_a_small_file(evp: Evp, tmp_path: Path) -> None:
    data, out, path = pattern(8192), bytearray(8192), tmp_path / "stream"
    path.write_bytes(seal_stream(data, KEY, PREFIX))
    assert evp.loop(KEY, PREFIX, 1 << 20, out).small(str(path), 3) > 0
    assert out == data


@pytest.fixture
def modules() -> list[Module]:
    """Of no particular file: some larger than the loop's pieces, two apart from the one before."""
    found, plain, sealed = [], 10, 4
    for i, nbytes in enumerate((30, 5000, 31, 300_000, 1, 600_000, 0, 70)):
        sealed += 100 if i in (3, 6) else 0
        found.append(Module(plain, sealed, nbytes, bytes([4 - i % 2 * 2, i]) + bytes(5 if i % 3 else 3)))
        plain += nbytes
        sealed += nbytes + 32
    return found


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("memory", [True, False])
def test_evp_loop_seals_and_opens_modules(
    evp: Evp, modules: list[Module], threads: int, memory: bool, tmp_path: Path
) -> None:
    key, last = KEYS[16], modules[-1]
    data, out = bytearray(pattern(last.plain + last.nbytes)), bytearray(last.sealed + last.nbytes + 32)
    (tmp_path / "plain").write_bytes(data)
    with open(tmp_path / "plain", "rb") as source, open(tmp_path / "sealed", "w+b", buffering=0) as target:
        fd = -1 if memory else target.fileno()
        buffers = (data, out) if memory else None
        evp.modules(key, PREFIX, modules, seal=True, source=source.fileno(), buffers=buffers, threads=threads)(fd)
        sealed = bytes(out) if memory else (tmp_path / "sealed").read_bytes()
        for plain, at, nbytes, suffix in modules:
            assert int.from_bytes(sealed[at : at + 4], "little") == nbytes + 28
            opened = AESGCM(key).decrypt(sealed[at + 4 : at + 16], sealed[at + 16 : at + nbytes + 32], PREFIX + suffix)
            assert opened == data[plain : plain + nbytes]

        opening = evp.modules(key, PREFIX, modules, seal=False, buffers=buffers, threads=threads)
        assert opening(fd) > 0
        out[last.sealed + 20] ^= 1
        target.seek(last.sealed + 20)
        target.write(out[last.sealed + 20 : last.sealed + 21] if memory else bytes([sealed[last.sealed + 20] ^ 1]))
        with pytest.raises(EvpError):
            opening(fd)


# ---------------------------------------------------------------- rotations

KEKS = KEYS[32], KEYS[16]
NAMES = [b"file-%04d" % i for i in range(50)]
DEKS = [pattern(24, i) for i in range(50)]


@pytest.fixture
def wrapped() -> list[bytes]:
    """DEKS under the first of KEKS, for NAMES."""
    aes, nonces = AESGCM(KEKS[0]), [os.urandom(12) for _ in NAMES]
    return [n + aes.encrypt(n, dek, PREFIX + name) for n, dek, name in zip(nonces, DEKS, NAMES, strict=True)]


def deks_of(wrapped: list[bytes]) -> list[bytes]:
    """Under the second of KEKS. All nonces must differ."""
    aes = AESGCM(KEKS[1])
    assert len({one[:12] for one in wrapped}) == len(wrapped)
    return [aes.decrypt(one[:12], one[12:], PREFIX + name) for one, name in zip(wrapped, NAMES, strict=True)]


def test_best_python_wraps_keys_anew(wrapped: list[bytes]) -> None:
    assert deks_of(rotation.python_rewrap(*KEKS, PREFIX, NAMES, wrapped)) == DEKS


@needs_compiler
def test_evp_loop_wraps_keys_anew(evp: Evp, wrapped: list[bytes]) -> None:
    names, data = b"".join(NAMES), b"".join(wrapped)
    out = bytearray(len(data))
    assert evp.rewrap(*KEKS, PREFIX, names, data, out, len(NAMES))() > 0
    assert deks_of(rotation.split(bytes(out), len(wrapped[0]))) == DEKS
    with pytest.raises(EvpError):
        evp.rewrap(*KEKS, PREFIX, names[::-1], data, out, len(NAMES))()
    with pytest.raises(EvpError, match="failed"):
        evp.rewrap(*KEKS, PREFIX, names, data[:-1] + bytes([data[-1] ^ 1]), out, len(NAMES))()
    with pytest.raises(ValueError, match="one size"):
        evp.rewrap(*KEKS, PREFIX, names + b"x", data, out, len(NAMES))


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory, evp: Evp, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Small, and in which a KMS is as fast as it can."""
    monkeypatch.setattr(rotation, "CALL_SECONDS", 0.0)
    monkeypatch.setattr(rotation, "PARTS", 2)
    made = Bench(Path(), tmp_path_factory.mktemp("bench"), [1], part=4)
    vars(made)["evp"] = evp
    return made


@needs_compiler
def test_contenders_rotate_kek(bench: Bench) -> None:
    with rotation.column(bench, 20) as contest:
        (row,) = contest.measure(1)
    assert row.samples.keys() == {"loop", "best", "ours"}
    with rotation.whole_job(bench, 4) as contest:
        for row in contest.measure(1):
            assert row.samples.keys() == {"loop", "best", "ours"}


@needs_compiler
@pytest.mark.parametrize("contest", [rotation.single_wrap, rotation.master_key_of_slow_kms, rotation.master_key])
def test_kms_does_its_part_of_a_rotation(
    contest: Callable[..., Any], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them make an unwrap and a wrap for each key in a run, and try what was wrapped: each KEK, and of data keys
    one in a run. Two of them ask the slow one."""
    slept: list[float] = []
    with contest(bench, 5) as made:
        assert [row for row in made.measure(1) if "ours" in row.samples] == made.rows
        ours = [run for (_, column), run in made.runs.items() if column == "ours"]
        before = kms_calls()
        monkeypatch.setattr(rotation.time, "sleep", slept.append)
        for run in ours:
            run()
        calls = {
            operation: count for (_, operation), count in (kms_calls() - before).items() if operation != "describe"
        }
    tried = 1 if contest is rotation.single_wrap else 5
    assert calls == {"wrap": 5 * len(ours), "unwrap": (5 + tried) * len(ours)}
    assert bool(slept) == (contest is not rotation.master_key)


def test_slow_kms_takes_its_time_for_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(rotation.time, "sleep", slept.append)
    client = load_kms(rotation.slow(rotation.keystore(tmp_path)))
    assert client.unwrap_key(client.wrap_key(KEY, rotation.MASTER_KEY), rotation.MASTER_KEY) == KEY
    assert client.current_version(rotation.MASTER_KEY) == "1"
    assert slept == [0.005] * 3


def test_rotations_that_do_nothing_are_no_results(tmp_path: Path) -> None:
    kms = rotation.keystore(tmp_path)
    rotation.with_keks(tmp_path / "dataset", kms, 3)
    with pytest.raises(AssertionError, match="3 skipped"):
        rotation.rotated(tmp_path / "dataset", kms, "mek", 3)


@needs_compiler
def test_lookup_counts_what_it_reads(bench: Bench) -> None:
    """The newest entry, and of the table of KEKs a part."""
    with rotation.lookup(bench, 1500) as contest:
        (row,) = contest.measure(1)
        (folder,) = bench.scratch.glob("*/dataset")
        head = Access.of(folder, rotation.keystore(folder.parent)).open().entry
        (table,) = head.key_tables
        read = row.samples["ours"][0] - (folder / entry_path(head.number)).stat().st_size
        assert PAGE_ROWS / table.rows * table.length < read < (folder / table.path).stat().st_size


@pytest.mark.more
@needs_compiler
def test_rows_that_commits_read_are_counted(bench: Bench) -> None:
    """A commit whose process knows nothing reads, of small tables, what it merges, and what an expired version had."""
    with commits.rows_read(bench, 2000) as contest:  # a table of up to 1,024 rows is read whole
        (row,) = contest.measure(1)
    assert 0 < row.samples["ours"][0] < 1000


# ---------------------------------------------------------------- turns, ratios, verdicts


def test_contenders_take_turns() -> None:
    turns: list[str] = []

    def run(column: str, seconds: float) -> Callable[[], float]:
        def run() -> float:
            turns.append(column)
            return seconds

        return run

    row = Row("a/1t", "a", "us")
    runs = {("a/1t", column): run(column, seconds) for column, seconds in (("loop", 2e-3), ("ours", 4e-3))}
    Contest([row], runs, calls=10).measure(4)  # type: ignore[arg-type]
    assert sorted(turns[:2]) == ["loop", "ours"]  # the warm-up
    for i in range(2, 10, 2):
        assert sorted(turns[i : i + 2]) == ["loop", "ours"]
    assert len(turns) == 10
    assert row.samples == {"loop": [2e-4] * 4, "ours": [4e-4] * 4}
    assert row.shown("ours") == pytest.approx(400)
    assert measure.speed(row.samples["ours"], row.samples["loop"]) == (0.5, 0.5)


def test_slow_references_get_fewer_rounds() -> None:
    row = Row("a", "a")
    runs: dict[tuple[str, str], measure.Run] = {("a", "naive"): lambda: 1.0, ("a", "ours"): lambda: 1.0}
    Contest([row], runs).measure(16)
    assert {column: len(samples) for column, samples in row.samples.items()} == {"naive": 4, "ours": 16}


def test_wrong_results_are_no_results() -> None:
    contest = Contest([Row("a", "a")], {("a", "ours"): lambda: 1.0}, check=lambda column: False)
    with pytest.raises(AssertionError, match="ours"):
        contest.measure(1)


def test_columns_that_the_table_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        Contest([Row("a", "a")], {("a", "limit"): lambda: 1.0}).measure(1)


def test_best_python_may_have_fewer_threads() -> None:
    rows = [Row(f"a/{n}t", "a") for n in (1, 2, 4)] + [Row("b", "b")]
    seconds = {"a/1t": 2.0, "a/2t": 3.0, "a/4t": 1.0, "b": 5.0}
    Contest(rows, {(row.name, "best"): lambda row=row: seconds[row.name] for row in rows}).measure(1)  # type: ignore[misc]
    assert [row.samples["best"] for row in rows] == [[2.0], [2.0], [1.0], [5.0]]


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([1.0, 1.0, 1.0], "pass"), ([2.0, 2.0, 2.0], "MISSED"), ([1.0, 2.0, 2.0], "best only")],
)
def test_targets_are_judged_by_best_and_median(ours: list[float], verdict: str) -> None:
    target = targets.Target("x", r"a/\dt", 0.9, targets.faster_than("loop"))
    rows = [Row(f"a/{n}t", "a", samples={"loop": [1.0] * 3, "ours": taken}) for n, taken in ((1, ours), (2, [0.5] * 3))]
    judged = target.judge(rows)
    assert (judged["verdict"], judged["worst_row"], judged["rows"]) == (verdict, "a/1t", 2)
    assert target.judge([])["verdict"] == "not measured"


def test_upper_bounds_are_judged_by_the_largest() -> None:
    rows = [Row(f"a/{n}t", "a", samples={"loop": [2.0], "ours": [float(n)]}) for n in (1, 3)]
    judged = targets.Target("x", r"a/\dt", 1, targets.cost_of("loop"), less=True).judge(rows)
    assert (judged["best"], judged["verdict"], judged["worst_row"]) == (1.5, "MISSED", "a/3t")


def test_what_targets_compare() -> None:
    one = Row("a/1t", "a", samples={"loop": [2.0, 2.0], "ours": [4.0, 4.0]})
    two = Row("a/2t", "a", samples={"loop": [2.0, 2.0], "ours": [1.0, 2.0]})
    rows = {row.name: row for row in (one, two)}
    assert targets.faster_than("loop")(one, rows) == (0.5, 0.5)
    assert targets.faster_than("naive")(one, rows) is None
    assert targets.faster_than_thread(1)(two, rows) == (4.0, 3.0)
    assert targets.cost_of("loop")(one, rows) == (2.0, 2.0)
    assert targets.cost_of_row("a/1t")(two, rows) == (0.25, pytest.approx(0.375))  # type: ignore[comparison-overlap]
    assert targets.cost_of_row("b")(two, rows) is None
    assert targets.milliseconds_over("loop")(one, rows) == (2000, 2000)


def test_every_target_has_rows() -> None:
    """A target whose rows nobody measures would be reported as not measured for ever."""
    cases = run_benchmarks("--list").stdout.split()
    ends = ["", "/1t", "/2t", "/4t", "/16t", "/all", "/writer", "/ags_fast", "-8x128MiB", "-16x256MiB"]
    ends += ["/slope", "/verify", "/encrypt/slope", "/verify/slope"]
    ends += ["/scan", "/column", "/bytes", "/filter", "/plan", "/append", "/rekey", "/encrypt"]
    ends += [f"/{name}" for name in frames.CALLS]
    ends += ["/seal/64B", "/open/1KiB"]
    names = [case + end for case in cases for end in ends]
    for target in targets.TARGETS:
        assert any(re.fullmatch(target.rows, name) for name in names), target.what


def results_of(**rows: dict[str, list[float]]) -> dict[str, Any]:
    columns = {name: {c: {"samples": samples} for c, samples in row.items()} for name, row in rows.items()}
    return {"rows": [{"name": name, "columns": row} for name, row in columns.items()]}


def test_rows_are_compared_with_their_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = results_of(
        same={"ours": [1.0, 1.01, 1.0, 1.02], "loop": [1.0] * 4},
        worse={"ours": [1.0, 1.01, 1.0, 1.02], "loop": [1.0] * 4},
        better={"ours": [1.0] * 4, "naive": [2.0] * 4},
        noisy={"ours": [1.0, 2.0, 1.1, 1.9], "best": [1.0] * 4},
        alone={"ours": [1.0] * 3},
        gone={"ours": [1.0]},
    )
    now = results_of(
        same={"ours": [2.0, 2.02, 2.0, 2.04], "loop": [2.0] * 4},  # a slower machine
        worse={"ours": [2.2, 2.22, 2.2, 2.25], "loop": [2.0] * 4},
        better={"ours": [1.0] * 4, "naive": [2.2] * 4},
        noisy={"ours": [1.3, 2.4, 1.5, 2.2], "best": [1.0] * 4},
        alone={"ours": [1.04] * 3},
        new={"ours": [1.0]},
        theirs={"loop": [1.0]},
    )
    changes = {change.name: change for change in compare.compare(base, now)}
    assert {name: change.verdict for name, change in changes.items()} == {
        "same": "same",
        "worse": "slower",
        "better": "faster",
        "noisy": "same",
        "alone": "slower",
    }
    assert changes["worse"].times == pytest.approx(1.1, rel=0.01)
    assert changes["alone"].peer is None
    assert compare.show(list(changes.values()), "base")
    assert not compare.show([changes["same"], changes["better"]], "base")
    assert "2 got slower" in capsys.readouterr().out
    for text in ("", "[]", '{"rows": [1]}', '{"rows": [{"name": "x"}]}'):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ValueError, match="not what a run"):
            compare.read(str(tmp_path))


# ---------------------------------------------------------------- the README's picture


def test_picture_shows_what_was_recorded(tmp_path: Path) -> None:
    picture = pytest.importorskip("benchmarks.picture", reason="needs matplotlib", exc_type=ImportError)
    runs = {path.stem: json.loads(path.read_text()) for path in picture.RECORDED.iterdir()}
    assert {name: picture.class_of(run["about"]).lower() for name, run in runs.items()} == {name: name for name in runs}
    shown = picture.figures(runs.values())
    assert len(shown) > 5
    for one in (one for row in shown.values() for one in row.values()):
        ratio = one.ours / one.peer if one.unit == "GB/s" else one.peer / one.ours
        assert ratio == pytest.approx(one.best, rel=0.05), "the figures are rounded, and belong together"
    for name, theme in picture.THEMES.items():
        drawn = picture.draw(list(runs.values()), tmp_path / name, theme)
        assert drawn.read_bytes().startswith(b"\x89PNG")
        assert (picture.DOCS / name).is_file()
        assert f"docs/{name}" in (ROOT / "README.md").read_text()


def test_a_run_is_recorded_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = pytest.importorskip("benchmarks.picture", reason="needs matplotlib", exc_type=ImportError)
    monkeypatch.setattr(picture, "RECORDED", tmp_path)
    rows = [
        Row("network/read", "", "s", samples={"best": [3.0, 2.0], "ours": [1.0, 2.0]}),
        Row("network/upload", "", "s", samples={"best": [1.0], "ours": [1.0]}),
    ]
    run = {"about": {"CPU": "x, 2 cores; aes pclmulqdq vaes vpclmulqdq"}, "rows": [row.as_json() for row in rows]}
    assert picture.record(run) == tmp_path / "avx2.json"
    (kept,) = picture.recorded()
    assert [row["name"] for row in kept["rows"]] == ["network/read"]
    assert "samples" not in (tmp_path / "avx2.json").read_text()
    ((label, row),) = picture.figures([kept]).items()
    assert "boto3" in label
    assert row == {"AVX2": picture.Beside(1.0, 2.0, "s", 2.0, 2.0)}
    with pytest.raises(ValueError, match="no row of the picture"):
        picture.record(run | {"rows": []})
    with pytest.raises(ValueError, match="class"):
        picture.record(run | {"about": {"CPU": "arm; asimd"}})


# ---------------------------------------------------------------- from end to end


def run_program(*command: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = (sys.executable, "-m", *command)
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100)


def run_benchmarks(*options: str) -> subprocess.CompletedProcess[str]:
    return run_program("benchmarks", *options)


@pytest.mark.more
@needs_compiler
def test_a_run_prints_a_table_and_writes_json_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "results"
    only = "codec/encrypt_into/(16|64)KiB/aes-128"
    done = run_benchmarks("--quick", "--repeat", "2", "--only", only, "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "encrypt_into 64 KiB, AES-128, 1 thread" in done.stdout
    assert "not measured" in done.stdout  # the targets of what was left out

    results: dict[str, Any] = json.loads((output / "results.json").read_text())
    assert {"CPU", "cryptography", "ags_fast", "load", "load after"} <= results["about"].keys()
    one_thread = [row for row in results["rows"] if row["name"].endswith("/1t")]
    assert len(one_thread) == 2
    for row in results["rows"]:
        columns = row["columns"]
        assert {"loop", "best", "ours"} <= columns.keys()
        for column in columns.values():
            assert 0 < column["median"] <= column["best"]
        best = columns["ours"]["best"] / columns["loop"]["best"]
        assert row["ratios"]["ours/loop"]["best"] == pytest.approx(best)
    judged = [target for target in results["targets"] if target["verdict"] != "not measured"]
    assert [target["rows"] for target in judged] == [1]  # 64 KiB blocks, one thread
    assert not any(change.verdict == "slower" for change in compare.compare(results, compare.read(str(output))))
    done = run_benchmarks("--compare", str(tmp_path / "nothing"))
    assert (done.returncode, "nothing" in done.stderr) == (2, True)
    for picture in ("codec-aes-128.png", "targets.png"):
        assert (output / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.more
@needs_compiler
def test_jobs_over_datasets_are_measured(tmp_path: Path) -> None:
    """Those that need neither Spark nor much memory."""
    done = run_benchmarks("--quick", "--repeat", "3", "--only", "datasets/(small|calls)$", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["columns"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    for name in ("datasets/small/encrypt", "datasets/small/verify", "datasets/small/decrypt"):
        assert {"best", "ours"} <= rows[name].keys()
    if shutil.which("strace"):
        # The difference of two processes' counts: a call more in one of them is 0.01 of a file's.
        assert 3.5 < rows["datasets/calls/verify"]["ours"]["best"] < rows["datasets/calls/encrypt"]["ours"]["best"] < 40


@pytest.mark.more
@needs_compiler
def test_commits_are_measured(tmp_path: Path) -> None:
    """Around the 10th and the 40th; each commit makes a version, and each opened file is the one that was asked for."""
    pytest.importorskip("matplotlib")
    done = run_benchmarks("--quick", "--only", "^commits/", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["columns"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    for how in ("encrypt_files", "kek_a_file", "in_a_process", "transaction"):
        for kind in ("commit", "oldest", "newest", "nbytes"):
            for number in (10, 40):
                assert rows.pop(f"commits/{how}/{kind}/{number}").keys() == {"beside", "ours"}
    more = {"among/100", "among/2000", "one-more/100", "one-more/4000", "rows"}
    more |= {f"whole/{kind}/{number}" for kind in ("memory", "time") for number in (400, 4000)}
    assert rows.keys() == {f"commits/{name}" for name in more}
    assert (tmp_path / "commits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.more
@needs_compiler
def test_parquet_is_measured(tmp_path: Path) -> None:
    """From file to file and in memory; each contender's result is looked at before it is measured."""
    pytest.importorskip("pyarrow.parquet.encryption")
    only = "parquet/(rekey|verify|pages/.*|projection|footer)$"
    done = run_benchmarks("--quick", "--repeat", "2", "--only", only, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {row["name"]: row["columns"] for row in results["rows"]}
    for name, columns in {
        "rekey/1t": {"naive", "ours"},
        "verify/1t": {"loop", "naive", "best", "ours"},
        "pages/seal": {"loop", "ours"},
        "pages/open": {"loop", "ours"},
        "projection": {"beside", "ours"},
        "footer": {"beside", "ours"},
    }.items():
        assert rows[f"parquet/{name}"].keys() == columns
    projection = rows["parquet/projection"]  # bytes, and so as it is claimed on any machine
    assert 0 < projection["ours"]["best"] <= projection["beside"]["best"]


@pytest.mark.more
def test_tools_are_compared(tmp_path: Path) -> None:
    """Ours alone: the others would be built first."""
    pytest.importorskip("moto")
    done = run_program("benchmarks.tools", "--quick", "--only", "^ags", "--scratch", str(tmp_path))
    assert done.returncode == 0, done.stderr
    large, small = (line for line in done.stdout.splitlines() if line.startswith("| ags-fast |"))
    assert large.endswith("exit code 3; 7 of 8 files, 0 cut off, 0 wrong |")
    assert small.endswith("exit code 3; 0 of 62 files, 0 cut off, 0 wrong |")  # the byte was in the list of files


@pytest.mark.more
@needs_compiler
def test_a_pattern_without_a_case_is_an_error(tmp_path: Path) -> None:
    done = run_benchmarks("--only", "no such thing", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "no such thing" in done.stderr


@needs_compiler
def test_contenders_of_pytest_benchmark_do_their_work(tmp_path: Path) -> None:
    """Each runs once, on little data, and what it made is looked at. Two are left out: a JVM and cargo take long."""
    pytest.importorskip("pyarrow.parquet.encryption")
    options = ["--benchmark-disable", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'temp'}"]
    done = run_program("pytest", "benchmarks", *options, "-k", "not java and not ring")
    assert done.returncode == 0, done.stdout
    tasks = list(test_speed.TASKS.values())
    outcomes = dict(reversed(part.split()) for part in re.findall(r"\d+ \w+", done.stdout.splitlines()[-1]))
    left_out = 1 + tasks.count(test_speed.FIVE)
    assert outcomes == {"passed": str(sum(map(len, tasks)) - left_out), "deselected": str(left_out)}, done.stdout
