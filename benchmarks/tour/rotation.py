"""The tour's last chapter: every key above the data keys is replaced, and the old ones come to open nothing."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from ags_fast import jobs
from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.keys import kms_calls, load_kms
from ags_fast.keys.kms import local
from ags_fast.spark import SparkEngine
from benchmarks.tour.steps import first_failure

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path

    from pyspark.sql import SparkSession

    from benchmarks.tour.steps import Steps

# --------------------------------------------------------------------------------------- what a user would write

MASTER_KEY = "rotated"


def rotate_everything(spark: SparkSession, kms: dict[str, str], double: Path, single: Path) -> list[jobs.JobResult]:
    engine = SparkEngine(spark)
    local.rotate_key(kms, MASTER_KEY)  # in the KMS: a new version wraps, the old one still unwraps
    return [
        jobs.rotate(double, kms=kms, what="mek", engine=engine, progress=False),
        jobs.rotate(double, kms=kms, what="kek", engine=engine, progress=False),
        jobs.rotate(single, kms=kms, what="mek", engine=engine, progress=False),  # the KEK of its documents
        jobs.rotate(single, kms=kms, what="kek", engine=engine, progress=False),
    ]


# ------------------------------------------------------------------------------------------------------ the tour

WHATS = (
    "R3, double wrap: KEKs wrapped by the new master version",
    "R2, double wrap: new KEKs, data keys wrapped by them",
    "R3, single wrap: the KEK of the tables",
    "R1, single wrap: every data key wrapped again by the KMS",
)


def chapter(spark: SparkSession, steps: Steps, kms: dict[str, str], source: Path, scratch: Path, count: int) -> None:
    """Rotate the keys of two datasets, of `count` files of `source` each."""
    engine = SparkEngine(spark)
    tree, double, single = scratch / "files", scratch / "double", scratch / "single"
    names = sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith((".", "_")))
    for i, path in enumerate(sorted(names, key=lambda path: path.stat().st_size)[:count]):
        copy = tree / ("eu" if i % 2 else "us") / f"{i}-{path.name}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    shared: dict[str, Any] = {"kms": kms, "engine": engine, "progress": False}
    if all(key["key_id"] != MASTER_KEY for key in local.status(kms)["keys"]):
        local.create_key(kms, MASTER_KEY)
    before_version = load_kms(kms).current_version(MASTER_KEY) or ""
    with steps.step("A dataset is written under two KEKs, another in single wrap"):
        by_folder = jobs.Policy(kek_scope="partition")
        jobs.encrypt_files(tree, double, wrapping_key_id=MASTER_KEY, policy=by_folder, **shared).raise_for_failures()
        jobs.encrypt_files(tree, single, wrapping_key_id=MASTER_KEY, double_wrap=False, **shared).raise_for_failures()
    steps.say("What depends on which key before:")
    _print_keys(kms, double, single)
    calls = kms_calls()
    with steps.step("The master key is rotated, then on Spark what it wraps"):
        results = rotate_everything(spark, kms, double, single)
    for what, result in zip(WHATS, results, strict=True):
        steps.check(f"{what}: version {result.version}", first_failure(result))
    steps.say(f"KMS calls of the driver: {_calls(kms_calls() - calls)}; of every worker: its own unwraps")
    with steps.step(f"Its version {before_version} is destroyed, and both datasets are read"):
        local.set_state(kms, MASTER_KEY, "destroyed", version=int(before_version))
        problems = [_read_back(dataset, tree, scratch / f"{dataset.name}-read", shared) for dataset in (double, single)]
    steps.check(f"{2 * len(_files(tree))} files, bit for bit the originals", "".join(problems))
    with steps.step("What only old keys open is expired, without the grace of keys"):
        expired = [jobs.expire(dataset, kms=kms, keep=1, skip_grace=True) for dataset in (double, single)]
    gone: dict[str | None, int] = {}
    for result in expired:
        for row in result.rows:
            gone[row.format] = gone.get(row.format, 0) + (row.status == "ok")
    steps.check(
        f"removed: {gone.get('version', 0)} versions, {gone.get('table', 0)} tables, {gone.get('key', 0)} keys",
        "".join(first_failure(result) for result in expired) or ("" if gone.get("key") else "no key was removed"),
    )
    steps.say("What depends on which key now:")
    _print_keys(kms, double, single)


def _print_keys(kms: dict[str, str], *datasets: Path) -> None:
    client = load_kms(kms)
    print(f"\n   {'dataset':<9}{'key':<24}{'for':<15}{'state':<9}{'master':<12}{'data keys':>9}  versions")
    for dataset in datasets:
        log, head = Access.of(dataset, client).open()
        needed: dict[str, list[int]] = {}
        for entry in reversed(log.kept(head)):
            for key_id in reach.needed_keks(log, [entry], head):
                needed.setdefault(key_id, []).append(entry.number)
        counts = log.tables.counted(head.files, log.envelope(head))
        for key in head.keys.values():
            master = f"version {client.key_version(key.wrapped)}" if key.wrapped else "KMS wraps"
            use = key.properties.get("scope") or ("documents" if key.double_wrap else "data keys")
            print(
                f"   {dataset.name:<9}{key.key_id:<24}{use:<15}{key.state:<9}{master:<12}{counts[key.key_id]:>9}  "
                f"{', '.join(map(str, needed.get(key.key_id, ()))) or 'none'}"
            )
    print()


def _calls(counts: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{count} {operation}" for (_, operation), count in sorted(counts.items())) or "none"


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _read_back(dataset: Path, tree: Path, target: Path, shared: dict[str, Any]) -> str:
    result = jobs.decrypt_files(dataset, target, **shared)
    return first_failure(result) or ("" if _files(target) == _files(tree) else f"{dataset.name} has other files")
