"""Jobs at the same time on one dataset: all succeed, or one fails cleanly. No data key is ever lost: whatever a version
names opens, and is what some source held."""

from __future__ import annotations

import ast
import os
import threading
from typing import TYPE_CHECKING, Any

import programs.jobs
import pytest
from datasets import HERE, MASTER, decrypted, kept_numbers, leftovers, version_of, write_tree
from support import pattern, program, start_python

from ags_fast import Dataset
from ags_fast.dataset import reach
from ags_fast.fs import below
from ags_fast.jobs import sweep, verify_files

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from ags_fast.dataset.log import Log

pytest.importorskip("pyarrow")


class Runner:
    """A process that runs one job after another, as it is told, and says what became of each."""

    def __init__(self) -> None:
        self._process = start_python(program(programs.jobs.serve))

    def start(self, name: str, *args: object, **options: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(repr((name, [str(arg) for arg in args], options)) + "\n")
        self._process.stdin.flush()

    def finish(self) -> tuple[Any, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "it has died"
        answer: tuple[Any, Any] = ast.literal_eval(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def runners() -> Iterator[list[Runner]]:
    made = [Runner() for _ in range(3)]
    yield made
    for runner in made:
        runner.close()


def check(dataset: Path, kms: Any, *allowed: dict[str, bytes]) -> dict[str, bytes]:
    """Every version opens, and the newest has nothing but what a source had; nothing is left over."""
    for number in kept_numbers(dataset, kms):
        found = decrypted(dataset, kms, version=number)
        for path, data in found.items():
            assert any(tree.get(path) == data for tree in allowed), (number, path)
    assert leftovers(dataset, kms) == []
    checked = verify_files(dataset, kms=kms, engine=HERE, progress=False)
    assert checked.counts == {"ok": len(found), "skipped": 0, "failed": 0}, checked.rows
    return found


ROUNDS = pytest.mark.parametrize("rounds", [pytest.param(12, id="quick"), pytest.param(100, marks=pytest.mark.slow)])


@ROUNDS
@pytest.mark.timeout(900)
def test_two_that_encrypt_one_source_and_a_third_that_appends(
    tmp_path: Path, kms: dict[str, str], runners: list[Runner], rounds: int
) -> None:
    one, two, third = runners
    tree = {f"{n % 3}/{n}": pattern(500 * n, n) for n in range(8)}
    other = {f"other/{n}": pattern(100 * n, n) for n in range(4)}
    src, more = write_tree(tmp_path / "src", tree), write_tree(tmp_path / "more", other)
    for n in range(rounds):
        dataset = tmp_path / f"dataset {n}"
        options = {"kms": kms, "wrapping_key_id": MASTER, "block_size": 1024}
        one.start("encrypt_files", src, dataset, **options)
        two.start("encrypt_files", src, dataset, **{**options, **({"wrapping_key_id": "other"} if n % 3 == 1 else {})})
        third.start("encrypt_files", more, dataset, **{**options, **({"double_wrap": False} if n % 3 == 2 else {})})
        answers = [one.finish(), two.finish()]
        assert third.finish() == ({"ok": 4, "skipped": 0, "failed": 0}, [])
        # Whoever came second has seen that, or failed in every file.
        assert ({"ok": 8, "skipped": 0, "failed": 0}, []) in answers, answers
        for counts, errors in answers:
            assert counts in (
                {"ok": 8, "skipped": 0, "failed": 0},
                {"ok": 0, "skipped": 8, "failed": 0},
                {"ok": 0, "skipped": 0, "failed": 8},
            ), answers
            assert errors in ([], ["ConcurrentChangeError"]), answers
        assert [counts["ok"] for counts, _ in answers].count(8) == 1, answers
        assert check(dataset, kms, tree, other) == tree | other


@ROUNDS
@pytest.mark.timeout(900)
def test_rekey_and_overwrite(tmp_path: Path, kms: dict[str, str], runners: list[Runner], rounds: int) -> None:
    """What a rekey has read is not put over what somebody has written since."""
    one, two, third = runners
    tree = {f"{n % 3}/{n}": pattern(500 * n, n) for n in range(8)}
    src, dataset = write_tree(tmp_path / "src", tree), tmp_path / "dataset"
    options = {"kms": kms, "wrapping_key_id": MASTER, "block_size": 1024}
    one.start("encrypt_files", src, dataset, **options)
    one.finish()
    seen = [tree]
    for n in range(rounds):
        tree = {**tree, **{f"{m % 3}/{m}": b"%d %d" % (n, m) for m in range(3)}, f"new {n}": b"new"}
        write_tree(src, tree)
        seen.append(tree)
        one.start("rekey_files", dataset, kms=kms, **({"wrapping_key_id": "other"} if n % 3 == 2 else {}))
        two.start("encrypt_files", src, dataset, overwrite=True, **options)
        third.start(*[("verify_files", dataset), ("sweep", dataset), ("rekey_files", dataset)][n % 3], kms=kms)
        answers = [one.finish(), two.finish(), third.finish()]
        for counts, errors in answers:
            assert isinstance(counts, dict), answers
            assert errors in ([], ["ConcurrentChangeError"]), answers
        two.start("encrypt_files", src, dataset, overwrite=True, **options)  # what lost against the rekey, again
        assert two.finish()[0]["failed"] == 0
        assert decrypted(dataset, kms) == tree, n
    check(dataset, kms, *seen)


def test_many_that_append(tmp_path: Path, kms: dict[str, str]) -> None:
    """Everybody's files are there in the end, under one path each."""
    runners = [Runner() for _ in range(4)]
    dataset = tmp_path / "dataset"
    trees = []
    for n, runner in enumerate(runners):
        trees.append({f"{n}/{m}": os.urandom(100) for m in range(3)})
        src = write_tree(tmp_path / f"src {n}", trees[-1])
        runner.start("encrypt_files", src, dataset, kms=kms, wrapping_key_id=MASTER, double_wrap=bool(n % 2))
    answers = [runner.finish() for runner in runners]
    for runner in runners:
        runner.close()
    assert answers == [({"ok": 3, "skipped": 0, "failed": 0}, [])] * 4
    everything = {path: data for tree in trees for path, data in tree.items()}
    assert check(dataset, kms, everything) == everything
    log, head = version_of(dataset, kms)
    assert [entry.operation for entry in log.kept(head)] == ["encrypt"] * 4 + ["create"]


def test_a_job_and_sweeps(tmp_path: Path, kms: dict[str, str], runners: list[Runner]) -> None:
    """A sweep takes nothing from a job that lives."""
    one, two, _ = runners
    src, dataset = tmp_path / "src", tmp_path / "dataset"
    tree: dict[str, bytes] = {}
    for n in range(8):
        added = {f"{n}/{m}": pattern(3000, m) for m in range(20)}
        tree |= added
        write_tree(src, added)
        one.start("encrypt_files", src, dataset, kms=kms, wrapping_key_id=MASTER, block_size=1024)
        swept = []
        for _ in range(4 if n else 0):
            two.start("sweep", dataset, kms=kms)
            swept.append(two.finish())
        assert one.finish() == ({"ok": 20, "skipped": 20 * n, "failed": 0}, [])
        assert all(isinstance(counts, dict) for counts, _ in swept), swept
        assert decrypted(dataset, kms) == tree
    check(dataset, kms, tree)


@pytest.mark.parametrize("locked", [False, True], ids=["before its lock", "behind its lock"])
def test_a_sweep_while_a_job_begins(
    tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """The sweep lists the lock of a job that has no plan yet, and looks for plans; then the job begins."""
    dataset = Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
    made, go, begun, end = (threading.Event() for _ in range(4))
    lock, unneeded = below.lock, reach.unneeded

    def slow_lock(fd: int) -> bool | None:
        held = lock(fd) if locked else None
        if threading.current_thread() is writer and not made.is_set():
            made.set()
            go.wait(60)
        return held if locked else lock(fd)

    def slow_look(log: Log, candidates: Collection[str]) -> list[str]:
        gone = unneeded(log, candidates)
        go.set()
        begun.wait(60)
        return gone

    def write() -> None:
        with dataset.transaction() as new, new.create("path") as file:
            begun.set()
            file.write(b"data")
            end.wait(60)

    writer = threading.Thread(target=write)
    monkeypatch.setattr("ags_fast.fs.local.lock", slow_lock)
    monkeypatch.setattr(reach, "unneeded", slow_look)
    writer.start()
    assert made.wait(60)
    sweep(dataset.url, kms=kms)
    assert begun.is_set()
    sweep(dataset.url, kms=kms)
    end.set()
    writer.join()
    assert decrypted(dataset.url, kms) == {"path": b"data"}
    assert leftovers(tmp_path / "dataset", kms) == []
