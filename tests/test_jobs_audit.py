"""What status and audit say of a dataset's keys: that it is so, and that what they foretell comes true."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import HERE, decrypted, leftovers, make_kms, read_tree, write_tree

from ags_fast import cli, jobs
from ags_fast.audit.runbook import RUNBOOK
from ags_fast.audit.survey import Survey
from ags_fast.cli.audit import status_lines
from ags_fast.cli.runbook import COMMANDS, CONDITIONS, TEXTS, printable_audit
from ags_fast.dataset import tables as sealed_tables
from ags_fast.dataset.access import Access
from ags_fast.dataset.job import Job
from ags_fast.dataset.log import Log
from ags_fast.dataset.names import entry_path
from ags_fast.errors import AgsError, ConcurrentChangeError, KeyAccessError
from ags_fast.fs import Store
from ags_fast.jobs import Policy
from ags_fast.jobs import rotation as rotation_module
from ags_fast.jobs.work.context import Context
from ags_fast.keys import clear_cache, kms_calls
from ags_fast.keys.kms import KmsClient, load_kms, local

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast.dataset.entry import Entry

TREE = {f"part={p}/{n}.csv": f"{p},{n}\n".encode() * (n + 1) for p in (1, 2) for n in range(3)}
MORE = {"part=3/x.csv": b"more\n"}


class Rewrapping(local.LocalKms):
    """Does by itself what Vault and AWS do by themselves."""

    provider = "rewrapping"

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self.wrap_key(self.unwrap_key(wrapped, wrapping_key_id), wrapping_key_id)

    def generate_key(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        key = bytes(range(length))
        return key, self.wrap_key(key, wrapping_key_id)


class Silent(local.LocalKms):
    """Tells no versions, as AWS."""

    provider = "silent"
    current_version = KmsClient.current_version  # type: ignore[assignment]  # as if it had none

    def key_version(self, wrapped: bytes) -> str | None:
        return None


def made_kms(folder: Path, impl: type[local.LocalKms] | None = None) -> dict[str, str]:
    properties = make_kms(folder, keys=("sales", "hr", "other"))
    if impl is not None:
        del properties["encryption.kms-type"]
        properties["encryption.kms-impl"] = f"{__name__}:{impl.__name__}"
    return properties


def encrypt(folder: Path, kms: Any, tree: dict[str, bytes] = TREE, **options: Any) -> Path:
    source = write_tree(folder / f"src{len(list(folder.glob('src*')))}", tree)
    result = jobs.encrypt_files(source, folder / "ds", kms=kms, wrapping_key_id="sales", engine=HERE, **options)
    result.raise_for_failures()
    return folder / "ds"


# ------------------------------------------------------------------------------------- datasets with some history


def double(folder: Path, kms: Any) -> Path:
    return encrypt(folder, kms)


def single(folder: Path, kms: Any) -> Path:
    return encrypt(folder, kms, double_wrap=False)


def scoped(folder: Path, kms: Any) -> Path:
    encrypt(folder, kms, policy=Policy(kek_scope="partition", keep=2))
    return encrypt(folder, kms, MORE)


def aged(folder: Path, kms: Any) -> Path:
    """Rotated in each way, with old KEKs in their grace and old versions."""
    encrypt(folder, kms)
    jobs.rotate(folder / "ds", kms=kms)
    encrypt(folder, kms, MORE)
    local.rotate_key(kms, "sales")
    jobs.rotate(folder / "ds", kms=kms, what="mek")
    jobs.rekey_files(folder / "ds", kms=kms, engine=HERE, paths="part=1/*").raise_for_failures()
    local.rotate_key(kms, "sales")
    return folder / "ds"


def mixed(folder: Path, kms: Any) -> Path:
    """Some data keys under a KEK, some that the KMS wraps."""
    encrypt(folder, kms, double_wrap=False)
    return encrypt(folder, kms, MORE, policy=Policy(kek_lifetime_days=0))


def columns(folder: Path, kms: Any, double_wrap: bool = True, key_material: Any = None) -> Path:
    for n in range(2):
        (folder / "parquet").mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [n], "ssn": ["1"], "city": ["x"]}), folder / "parquet" / f"{n}.parquet")
    keys = {"ssn": "hr", "city": "sales"}
    jobs.encrypt_files(
        folder / "parquet",
        folder / "ds",
        kms=kms,
        wrapping_key_id="sales",
        engine=HERE,
        format="parquet",
        column_keys=keys,
        double_wrap=double_wrap,
        key_material=key_material,
    ).raise_for_failures()
    return folder / "ds"


def keytools(folder: Path, kms: Any) -> Path:
    """The files have key material that the KMS wraps, too."""
    return columns(folder, kms, key_material="keytools")


def columns_single(folder: Path, kms: Any) -> Path:
    return columns(folder, kms, double_wrap=False)


def worn(folder: Path, kms: Any) -> Path:
    """What time brings about has come."""
    encrypt(folder, kms)
    jobs.rotate(folder / "ds", kms=kms, grace=timedelta(0))
    jobs.rotate(folder / "ds", kms=kms, what="mek")
    local.rotate_key(kms, "sales")
    jobs.set_policy(folder / "ds", Policy(kek_lifetime_days=0, keep=1), kms=kms)
    return folder / "ds"


def stalled(folder: Path, kms: Any) -> Path:
    """An encryption has died before its commit."""
    encrypt(folder, kms)
    interrupted(folder, kms)
    return folder / "ds"


def interrupted(folder: Path, kms: Any, **options: Any) -> Path:
    """The source of an encryption that has died."""
    source = write_tree(folder / "interrupted", MORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ags_fast.dataset.job.Job.commit", die)
        with pytest.raises(InterruptedError):
            jobs.encrypt_files(source, folder / "ds", kms=kms, wrapping_key_id="sales", engine=HERE, **options)
    return source


def die(*args: Any, **options: Any) -> Any:
    raise InterruptedError


class KilledError(BaseException):
    """After which nothing is cleaned up."""


def killed(*args: Any, **options: Any) -> Any:
    raise KilledError


def printed(dataset: Path, kms: Any, *, key_store: str | None = None, **options: Any) -> dict[str, Any]:
    """What `ags-fast keys audit` prints."""
    found = jobs.audit(dataset, kms=kms, key_store=key_store, **options)
    assert json.loads(json.dumps(found)) == found
    first = [step for master in found["masters"] for version in master["versions"] for step in version["first"]]
    for step in [*found["steps"], *first]:
        if step["function"] not in (None, "new_version"):
            inspect.signature(getattr(jobs, step["function"])).bind(dataset, kms=kms, **step["arguments"])
    return printable_audit(found, str(dataset), kms, key_store)


def test_each_step_has_a_sentence() -> None:
    steps = [step for rows in RUNBOOK.values() for step in rows]
    assert TEXTS.keys() == {step.name for step in steps}
    assert CONDITIONS.keys() == {step.only_if for step in steps} - {None}
    assert COMMANDS.keys() >= {step.function for step in steps} - {None, "new_version"}


STATES = (stalled, double, single, scoped, aged, mixed, columns, columns_single, keytools, worn)
EVENTS = (None, "planned", "kek-leaked", "dek-leaked", "mek-leaked")


def calls_of(work: Callable[[], Any]) -> dict[str, int]:
    """The KMS calls that it makes in a process that knows no key."""
    clear_cache()
    before = kms_calls()
    work()
    calls: Counter[str] = Counter()
    for (_, operation), count in kms_calls().items():
        calls[operation] += count
    for (_, operation), count in before.items():
        calls[operation] -= count
    return {operation: count for operation, count in sorted(calls.items()) if count}


# ----------------------------------------------------------------------------------------------------------- forecasts


ALL = [(state, impl, event) for state in STATES for impl in (None, Rewrapping) for event in EVENTS]
QUICK = {
    *((state, None, "mek-leaked") for state in (scoped, aged, columns, columns_single)),
    *((state, Rewrapping, "planned") for state in (single, mixed)),
    *((state, None, "planned") for state in (aged, columns_single)),
    *((state, None, "kek-leaked") for state in (single, columns)),
    (aged, Rewrapping, "dek-leaked"),
    (keytools, Rewrapping, "planned"),
    (worn, None, None),
    (stalled, None, "kek-leaked"),
}


# A case of each event is in `make test`, the other quick ones in `make test-more`.
FEW = {
    *((state, None, "mek-leaked") for state in (scoped, columns)),
    (single, Rewrapping, "planned"),
    (columns_single, None, "planned"),
    (single, None, "kek-leaked"),
    (aged, Rewrapping, "dek-leaked"),
    (worn, None, None),
}


def mark_of(case: tuple[Any, ...]) -> Any:
    return [] if case in FEW else pytest.mark.more if case in QUICK else pytest.mark.slow


@pytest.mark.parametrize(
    ("state", "impl", "event"),
    [pytest.param(*case, marks=mark_of(case)) for case in ALL],
)
def test_what_an_event_calls_for_costs_what_was_said(
    state: Callable[..., Path],
    impl: Any,
    event: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The commands are run as they are printed, and each makes the calls, and touches the files, that were foretold."""
    kms = made_kms(tmp_path, impl)
    dataset = state(tmp_path, kms)
    monkeypatch.setattr("ags_fast.jobs.run.LocalEngine", lambda: HERE)  # where the calls can be counted
    before = read_tree(tmp_path)
    found = printed(dataset, kms, event=event)
    assert read_tree(tmp_path) == before
    steps = [step for step in found["steps"] if step["command"]]
    assert steps or (event is None and state is not worn)
    for step in steps:
        words = shlex.split(step["command"])
        assert words[0] in ("ags-fast", "#")
        if words[0] == "#":  # no command of ours: in the KMS
            local.rotate_key(kms, next(word for word in words if word in ("sales", "hr")))
            continue
        files = read_tree(dataset)
        calls = calls_of(lambda words=words: run(words[1:], capsys))  # type: ignore[misc]
        if "kms_calls" not in step:
            continue
        assert calls == step["kms_calls"], step
        check_touched(files, read_tree(dataset), step)
    jobs.verify_files(dataset, kms=kms, engine=HERE).raise_for_failures()
    assert leftovers(dataset, kms) == []


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main([*words, "--yes"] if words[0] == "expire" else words)
    printed = capsys.readouterr()
    assert code == 0, printed


def check_touched(before: dict[str, bytes], after: dict[str, bytes], step: dict[str, Any]) -> None:
    def amounts(one: dict[str, bytes], other: dict[str, bytes]) -> tuple[dict[str, int], int]:
        names = one.keys() - other.keys()
        tables = [name for name in names if name.startswith("_ags/tables/")]
        files = [name for name in names if not name.startswith("_ags/")]
        versions = [name for name in names if name.startswith("_ags/log/")]
        counts = {"versions": len(versions), "tables": len(tables), "files": len(files)}
        return counts, sum(len(one[name]) for name in files)

    told_written, told_removed = step["written"], step["removed"]
    written, written_bytes = amounts(after, before)
    removed, removed_bytes = amounts(before, after)
    assert written["tables"] == told_written["tables"]
    assert removed["tables"] == told_removed["tables"]
    assert (written["files"], removed["files"]) == (told_written["files"], told_removed["files"])
    assert removed["versions"] == told_removed["versions"]
    assert removed_bytes == told_removed["file_bytes"]
    if all(name.endswith(".ags") for name in after if not name.startswith("_ags/")):  # else it depends on the encoding
        assert written_bytes == told_written["file_bytes"]


def test_a_dead_job_keeps_no_leaked_kek(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kms = made_kms(tmp_path)
    dataset = stalled(tmp_path, kms)
    leaked = {key["key_id"] for key in jobs.key_status(dataset, kms=kms)["keys"]}
    first, *more = printed(dataset, kms, event="kek-leaked")["steps"]
    assert first["function"] == "sweep"
    for step in (first, *(step for step in more if step["function"] == "rotate")):
        run(shlex.split(step["command"])[1:], capsys)
    assert leaked.isdisjoint(key["key_id"] for key in jobs.key_status(dataset, kms=kms)["keys"])


def test_paths_of_leaked_data_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kms = made_kms(tmp_path)
    dataset = double(tmp_path, kms)
    first, second = printed(dataset, kms, event="dek-leaked", paths="part=1/*")["steps"]
    assert (first["function"], first["arguments"]) == ("rekey_files", {"paths": ["part=1/*"]})
    assert "--include 'part=1/*'" in first["command"]
    assert (first["written"]["files"], second["removed"]["files"]) == (3, 3)
    old = {name: data for name, data in read_tree(dataset).items() if name.startswith("part=1/")}
    run(shlex.split(first["command"])[1:], capsys)
    run(shlex.split(second["command"])[1:], capsys)
    assert old.keys().isdisjoint(read_tree(dataset))
    assert decrypted(dataset, kms) == TREE
    for bad in ({"event": "planned", "paths": "x"}, {"event": "never"}):
        with pytest.raises(ValueError, match=r"^paths are for|^event must be"):
            jobs.audit(dataset, kms=kms, **bad)  # type: ignore[arg-type]


def first_job(found: dict[str, Any]) -> dict[str, Any]:
    """Of the steps of an audit the first that is a job of ours."""
    return next(step for step in found["steps"] if "kms_calls" in step)


def test_a_job_that_runs_is_let_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kms = made_kms(tmp_path)
    encrypt(tmp_path, kms)
    running = []
    monkeypatch.setattr(Job, "release", lambda job: running.append(job))  # its lock stays
    interrupted(tmp_path, kms)
    monkeypatch.undo()
    dataset = tmp_path / "ds"
    found = jobs.audit(dataset, kms=kms, event="kek-leaked")
    assert [job["lives"] for job in found["open_jobs"]] == [True]
    assert "sweep" not in [step["function"] for step in found["steps"]]
    assert [key["needed_by_jobs"] for key in found["keys"]] == [[found["open_jobs"][0]["job_id"]]]
    local.rotate_key(kms, "sales")
    jobs.rotate(dataset, kms=kms, what="mek")
    found = jobs.audit(dataset, kms=kms, event="kek-leaked")
    row = found["masters"][0]["versions"][0]
    assert row["may_be_destroyed"] is True
    assert "nothing of this dataset needs it" in row["why"]  # the job wraps again what it has under it
    step = first_job(found)
    local.rotate_key(kms, "sales")
    before = read_tree(dataset)
    assert step["kms_calls"] == calls_of(lambda: jobs.rotate(dataset, kms=kms, force_expire=True))
    check_touched(before, read_tree(dataset), step)
    assert [key["state"] for key in jobs.key_status(dataset, kms=kms)["keys"]] == ["retired", "active"]
    assert step["key_store"]["keks"] == 2  # one retired, and wrapped again, and one new; none removed
    step = first_job(jobs.audit(dataset, kms=kms, event="kek-leaked"))  # only the job is under the first KEK by now
    local.rotate_key(kms, "sales")
    assert step["kms_calls"] == calls_of(lambda: jobs.rotate(dataset, kms=kms, force_expire=True))
    del running[:]


DOCS = Path(__file__).resolve().parents[1] / "docs" / "rotation.md"


@pytest.mark.parametrize("impl", [None, Rewrapping])
def test_the_documentations_costs(impl: Any, tmp_path: Path) -> None:
    """Every row of the table, on datasets with three KEKs, or with seven data keys that the KMS wraps."""
    if not DOCS.exists():
        pytest.skip("there are no docs beside an installed package")
    kms = made_kms(tmp_path, impl)
    folders = [tmp_path / "double", tmp_path / "single"]
    for folder in folders:
        folder.mkdir()
    in_double, in_single = folders
    scopes: dict[str, Any] = {"policy": Policy(kek_scope="partition")}

    def do(name: str, folder: Path, **options: Any) -> Callable[[], Any]:
        return lambda: getattr(jobs, name)(folder / "ds", kms=kms, **options)

    def rotated_mek() -> None:
        local.rotate_key(kms, "sales")
        jobs.rotate(in_double / "ds", kms=kms, what="mek")

    measured = {
        "make a dataset, double wrap": calls_of(lambda: encrypt(in_double, kms, **scopes)),
        "read, verify, decrypt, double wrap": calls_of(do("verify_files", in_double, engine=HERE)),
        "`rotate --what mek`": calls_of(rotated_mek),
        "`expire` after `--what mek`": calls_of(do("expire", in_double, keep=1)),
        "`rekey`, double wrap": calls_of(do("rekey_files", in_double, engine=HERE)),
        "`rotate --what kek`, double wrap": calls_of(do("rotate", in_double)),
        "`expire` after `--what kek`, double wrap": calls_of(do("expire", in_double, keep=1)),
    }
    jobs.rotate(in_double / "ds", kms=kms, force_expire=True)
    more = {f"part={n}/more": b"" for n in (1, 2)}
    measured["add files, double wrap"] = calls_of(lambda: encrypt(in_double, kms, more))
    encrypt(in_single, kms, {"x": b""}, double_wrap=False)
    tree = {f"{n}": b"" for n in range(6)}
    added = calls_of(lambda: encrypt(in_single, kms, tree, double_wrap=False))
    measured |= {
        "read, single wrap": calls_of(do("verify_files", in_single, engine=HERE)),
        "`rotate --what kek`, single wrap": calls_of(do("rotate", in_single)),
        "`rekey`, single wrap": calls_of(do("rekey_files", in_single, engine=HERE)),
        "`rotate --what double-wrap`": calls_of(do("rotate", in_single, what="double-wrap")),
    }
    section = DOCS.read_text().partition("## What it costs in calls of the KMS\n")[2].partition("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    told = {row[0]: row[1:] for row in table if len(row) == 4 and any(word in row[1] for word in ("wrap", "generate"))}
    assert added == terms(told.pop("add N files, single wrap")[0], 0, 6)
    assert told.keys() == measured.keys()
    for name, cells in told.items():
        cell = cells[0] if impl or cells[2] == "the same" else cells[2]
        assert measured[name] == terms(cell, 3, 7), name


def terms(text: str, k: int, n: int) -> dict[str, int]:
    """What "K unwrap + 1 wrap" comes to."""
    counts: Counter[str] = Counter()
    for term in text.split(" + "):
        count, operation = term.split()
        counts[operation] += {"K": k, "N": n, "1": 1, "2": 2}[count]
    return dict(sorted(counts.items()))


# ------------------------------------------------------------------------------------------------ what may be destroyed


def verdicts(dataset: Path, kms: Any) -> dict[tuple[str, str | None], bool | None]:
    masters = jobs.audit(dataset, kms=kms)["masters"]
    return {(m["wrapping_key_id"], v["version"]): v["may_be_destroyed"] for m in masters for v in m["versions"]}


def without(kms: dict[str, str], folder: Path, key_id: str, version: int | None) -> dict[str, str]:
    """The same KMS, if this version of a master key, or all of them, had been destroyed."""
    copy = {**kms, "kms.local.path": str(folder / f"without-{key_id}-{version}.json")}
    shutil.copy(kms["kms.local.path"], copy["kms.local.path"])
    local.set_state(copy, key_id, "destroyed", version=version)
    return copy


def everything(dataset: Path, kms: Any) -> None:
    """Open all that is there: each file of each version, and each KEK."""
    clear_cache()
    snapshot = Access.of(dataset, kms).open()
    for entry in snapshot.log.kept(snapshot.entry):
        jobs.verify_files(dataset, kms=kms, version=entry.number, engine=HERE).raise_for_failures()
    for key_id in snapshot.entry.keys:
        snapshot.envelope.prepare(key_id)


def check_verdicts(dataset: Path, kms: dict[str, str], folder: Path) -> dict[tuple[str, str | None], bool | None]:
    """Destroy each version of each master key, one at a time, and see."""
    found = verdicts(dataset, kms)
    everything(dataset, kms)
    for (key_id, version), may in found.items():
        assert version is not None
        after = without(kms, folder, key_id, int(version))
        if may:
            everything(dataset, after)
        else:
            lost = False
            try:
                everything(dataset, after)
            except (AgsError, jobs.JobError):
                lost = True
            assert lost or version == load_kms(kms).current_version(key_id)  # which wraps what is written next
    return found


@pytest.mark.parametrize("state", [double, single, aged, mixed, columns_single])
def test_what_may_be_destroyed(state: Callable[..., Path], tmp_path: Path) -> None:
    kms = made_kms(tmp_path)
    dataset = state(tmp_path, kms)
    check_verdicts(dataset, kms, tmp_path)
    local.rotate_key(kms, "sales")
    newest = max(int(version) for key_id, version in verdicts(dataset, kms) if key_id == "sales" and version)
    before = check_verdicts(dataset, kms, tmp_path)
    assert False in [may for (key_id, version), may in before.items() if key_id == "sales" and version != str(newest)]
    if any(not entry.double_wrap for entry in Access.of(dataset, kms).log().head().keys.values()):
        jobs.rotate(dataset, kms=kms)
        jobs.rotate(dataset, kms=kms, what="mek")
        assert check_verdicts(dataset, kms, tmp_path)["sales", "1"] is False  # for the data keys of older versions
        jobs.expire(dataset, kms=kms, keep=1, force=True)
    else:
        jobs.rotate(dataset, kms=kms, what="mek")
    after = check_verdicts(dataset, kms, tmp_path)
    assert {version: may for (key_id, version), may in after.items() if key_id == "sales"}[str(newest)] is False
    assert all(may for (key_id, version), may in after.items() if key_id == "sales" and version != str(newest))


@pytest.mark.parametrize("state", [double, aged, mixed, columns_single, stalled])
def test_what_is_to_be_run_first(
    state: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the commands that a version is said to wait for have been run, nothing needs it."""
    kms = made_kms(tmp_path)
    dataset = state(tmp_path, kms)
    monkeypatch.setattr("ags_fast.jobs.run.LocalEngine", lambda: HERE)
    local.rotate_key(kms, "sales")
    waiting = [
        (master["wrapping_key_id"], row["version"], row["first"])
        for master in printed(dataset, kms)["masters"]
        for row in master["versions"]
        if row["may_be_destroyed"] is False and row["first"]
    ]
    assert waiting
    for key_id, version, commands in waiting:
        for command in commands:
            run(shlex.split(command)[1:], capsys)
        assert verdicts(dataset, kms).get((key_id, version), True) is True, commands
        everything(dataset, without(kms, tmp_path, key_id, int(version)))


def test_a_master_key_that_was_left(tmp_path: Path) -> None:
    kms = made_kms(tmp_path)
    dataset = double(tmp_path, kms)
    master = {m["wrapping_key_id"]: m for m in jobs.audit(dataset, kms=kms)["masters"]}
    assert master["sales"]["may_be_destroyed"] is False
    jobs.rotate(dataset, kms=kms, what="mek", wrapping_key_id="other")
    master = {m["wrapping_key_id"]: m for m in jobs.audit(dataset, kms=kms)["masters"]}
    assert {name: m["may_be_destroyed"] for name, m in master.items()} == {"sales": True, "other": False}
    assert master["sales"]["versions"][0]["superseded"] == 1  # though two documents have it
    everything(dataset, without(kms, tmp_path, "sales", None))
    with pytest.raises(KeyAccessError):
        everything(dataset, without(kms, tmp_path, "other", None))
    kms2 = make_kms(tmp_path, name="kms2", keys=("sales",))
    jobs.rotate(dataset, kms=kms, what="mek", new_kms=kms2, wrapping_key_id="sales")
    master = {m["wrapping_key_id"]: m for m in jobs.audit(dataset, kms=kms2)["masters"]}
    assert master["other"]["may_be_destroyed"] is True
    everything(dataset, kms2)


def test_a_single_wrap_key_without_files_still_names_its_master(tmp_path: Path) -> None:
    kms = made_kms(tmp_path)
    dataset = single(tmp_path, kms)
    (master,) = jobs.audit(dataset, kms=kms)["masters"]
    assert master["may_be_destroyed"] is False
    assert master["versions"][0]["data_keys"] == [{"version": 2, "data_keys": len(TREE)}]


def test_a_kms_that_tells_no_versions(tmp_path: Path) -> None:
    kms = made_kms(tmp_path, Silent)
    dataset = single(tmp_path, kms)
    (master,) = jobs.audit(dataset, kms=kms, event="planned")["masters"]
    assert master["current_version"] is None
    assert master["may_be_destroyed"] is False
    assert master["others"] is None
    (row,) = master["versions"]
    assert (row["version"], row["may_be_destroyed"]) == (None, None)
    assert "does not tell" in row["why"]


def test_an_older_version_that_lies_is_not_believed(tmp_path: Path) -> None:
    """Who can write to the storage could otherwise have somebody destroy a key of another dataset."""
    kms = made_kms(tmp_path)
    dataset, elsewhere = double(tmp_path, kms), tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = encrypt(elsewhere, kms)
    for one in (dataset, other):
        jobs.rotate(one, kms=kms)
    for path in (entry_path(1), entry_path(2)):
        whole = (dataset / path).read_bytes()
        (dataset / path).write_bytes((other / path).read_bytes())
        with pytest.raises(AgsError):
            jobs.audit(dataset, kms=kms)
        (dataset / path).write_bytes(whole)
    assert {key_id for key_id, _ in verdicts(dataset, kms)} == {"sales"}


def test_an_open_rotation_holds_what_it_has_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would put KEKs into the key store that a version of the master key wraps which has wrapped nothing else."""
    kms = made_kms(tmp_path)
    dataset = scoped(tmp_path, kms)
    local.rotate_key(kms, "sales")

    with monkeypatch.context() as patch:
        patch.setattr("ags_fast.jobs.rotation.Rotating._copies", killed)
        with pytest.raises(KilledError):
            jobs.rotate(dataset, kms=kms)
    local.rotate_key(kms, "sales")
    found = jobs.audit(dataset, kms=kms)
    (job,) = found["open_jobs"]
    assert (job["operation"], job["lives"]) == ("rotate-kek", False)
    assert found["steps"][0]["function"] == "sweep"
    (master,) = found["masters"]
    rows = {row["version"]: row for row in master["versions"]}
    assert rows["2"]["may_be_destroyed"] is False
    assert rows["2"]["open_jobs"] == [job["job_id"]]
    assert {"function": "sweep", "arguments": {}} in rows["2"]["first"]
    shutil.copytree(dataset, tmp_path / "copy")
    after = without(kms, tmp_path, "sales", 2)
    everything(dataset, after)  # what it destroys is not seen before the rotation goes on
    jobs.rotate(dataset, kms=after).raise_for_failures()  # by other keys than those that it had made
    everything(dataset, after)
    shutil.rmtree(dataset)
    (tmp_path / "copy").rename(dataset)
    jobs.sweep(dataset, kms=kms)
    assert verdicts(dataset, kms).get(("sales", "2")) is None  # nothing knows it any more
    everything(dataset, without(kms, tmp_path, "sales", 2))


def test_a_master_key_that_only_an_open_job_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the KMS tells of it is shown as that of any other."""
    kms = made_kms(tmp_path)
    dataset = double(tmp_path, kms)
    with monkeypatch.context() as patch:
        patch.setattr("ags_fast.jobs.rotation.Rotating._copies", killed)
        with pytest.raises(KilledError):
            jobs.rotate(dataset, kms=kms, wrapping_key_id="other")
    other, sales = jobs.audit(dataset, kms=kms)["masters"]
    assert (other["wrapping_key_id"], sales["wrapping_key_id"]) == ("other", "sales")
    assert (other["current_version"], other["keks"]) == ("1", [])
    assert [(row["current"], len(row["open_jobs"])) for row in other["versions"]] == [(True, 1)]


def test_a_rotation_that_died_wraps_what_is_left_by_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of KEKs that a dead rotation has put in are wrapped again when their version is no longer current."""
    kms = made_kms(tmp_path)
    dataset = scoped(tmp_path, kms)
    local.rotate_key(kms, "sales")
    monkeypatch.setattr(rotation_module, "BATCH", 1)
    append, batches = Log.append, iter([1, 2])

    def dying(log: Log, *args: Any) -> Any:
        return append(log, *args) if next(batches, None) is not None else killed()

    with monkeypatch.context() as patch:
        patch.setattr(Log, "append", dying)
        with pytest.raises(KilledError):
            jobs.rotate(dataset, kms=kms, what="mek")
    found = jobs.key_status(dataset, kms=kms)
    assert Counter(key["master_version"] for key in found["keys"]) == {"1": 2, "2": 2}
    local.rotate_key(kms, "sales")
    assert verdicts(dataset, kms) == {("sales", "1"): False, ("sales", "2"): False, ("sales", "3"): False}
    jobs.rotate(dataset, kms=kms, what="mek")
    jobs.expire(dataset, kms=kms, keep=1, force=True)
    after = without(without(kms, tmp_path, "sales", 2), tmp_path, "sales", 1)
    everything(dataset, after)


def test_an_open_encryption_holds_its_data_keys(tmp_path: Path) -> None:
    kms = made_kms(tmp_path)
    dataset = single(tmp_path, kms)
    local.rotate_key(kms, "sales")
    source = interrupted(tmp_path, kms, double_wrap=False)
    local.rotate_key(kms, "sales")
    (master,) = jobs.audit(dataset, kms=kms)["masters"]
    rows = {row["version"]: row for row in master["versions"]}
    assert rows["2"]["may_be_destroyed"] is False
    assert len(rows["2"]["open_jobs"]) == 1
    resume: dict[str, Any] = {"wrapping_key_id": "sales", "engine": HERE, "double_wrap": False, "resume": "length"}
    shutil.copytree(dataset, tmp_path / "copy")
    after = without(kms, tmp_path, "sales", 2)

    def goes_on() -> None:
        jobs.encrypt_files(source, dataset, kms=after, **resume).raise_for_failures()
        everything(dataset, after)

    with pytest.raises((AgsError, jobs.JobError)):
        goes_on()
    shutil.rmtree(dataset)
    (tmp_path / "copy").rename(dataset)
    jobs.encrypt_files(source, dataset, kms=kms, **resume).raise_for_failures()
    assert decrypted(dataset, kms) == {**TREE, **MORE}


def test_doubts_about_what_nothing_is_known_to_need(tmp_path: Path) -> None:
    kms = made_kms(tmp_path)
    dataset = double(tmp_path, kms)
    jobs.rotate(dataset, kms=kms, wrapping_key_id="other", also_retired=False)
    local.rotate_key(kms, "other")
    jobs.rotate(dataset, kms=kms, what="mek", from_key_id="other")
    assert verdicts(dataset, kms)["other", "1"] is True
    clear_cache()
    local.set_state(kms, "sales", "disabled")
    assert verdicts(dataset, kms)["other", "1"] is None


# -------------------------------------------------------------------------------------------------------------- status


def test_status(tmp_path: Path) -> None:
    kms = made_kms(tmp_path)
    dataset = encrypt(tmp_path, kms, policy=Policy(keep=3, keep_days=2, kek_lifetime_days=10))
    local.rotate_key(kms, "sales")
    jobs.rotate(dataset, kms=kms)
    for n in range(2):
        encrypt(tmp_path, kms, {f"more{n}": b"x"})
    before = read_tree(dataset)
    found = jobs.key_status(dataset, kms=kms)
    assert json.loads(json.dumps(found)) == found
    assert read_tree(dataset) == before
    assert (found["version"], found["tables"], found["tables_opened"]) == (5, 4, 0)
    old, new = found["keys"]
    assert (old["state"], old["master_version"], old["needed_by_versions"]) == ("retired", "2", [1, 2])
    assert (old["data_keys"], old["successor"], old["uses_left"]) == (0, new["key_id"], None)
    assert 6.9 < (old["retires_ms"] - found["time_ms"]) / 86_400_000 <= 7
    assert (new["state"], new["master_version"], new["needed_by_versions"]) == ("active", "2", [3, 4, 5])
    assert new["data_keys"] == len(TREE) + 2
    assert new["uses"] + new["uses_left"] == Policy().kek_uses
    assert new["lifetime_ends_ms"] - new["created_ms"] == 10 * 86_400_000
    assert found["masters"] == [
        {
            "wrapping_key_id": "sales",
            "current_version": "2",
            "keks": [{"version": "2", "keks": 2}],
            "key_material": [],
            "refused": None,
        }
    ]
    times = {version["number"]: version["time_ms"] for version in found["versions"]}
    ends = [version["expires_ms"] for version in found["versions"]]
    assert ends == [times[1] + 2 * 86_400_000, times[2] + 2 * 86_400_000, None, None, None]
    assert [version["files"] for version in found["versions"]] == [0, 6, 6, 7, 8]
    assert found["open_jobs"] == []
    assert found["unread"] == []
    counted = jobs.audit(dataset, kms=kms)["opens"]
    assert sorted((row["version"], row["data_keys"], row["tables"], row["document"]) for row in counted) == [
        (1, 0, 0, True),
        (2, 6, 1, True),
        (3, 6, 1, True),
        (4, 7, 2, True),
        (5, 8, 2, True),
    ]


def test_tables_are_opened_where_their_references_do_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kms = made_kms(tmp_path)
    dataset = double(tmp_path, kms)
    monkeypatch.setattr(sealed_tables, "COUNTS", 0)
    encrypt(tmp_path, kms, MORE)
    found = jobs.key_status(dataset, kms=kms)
    assert (found["tables"], found["tables_opened"]) == (2, 1)
    assert found["keys"][0]["data_keys"] == len(TREE) + len(MORE)
    step = first_job(jobs.audit(dataset, kms=kms, event="kek-leaked"))
    local.rotate_key(kms, "sales")
    assert step["kms_calls"] == calls_of(lambda: jobs.rotate(dataset, kms=kms, force_expire=True))


def test_key_stores_elsewhere(tmp_path: Path) -> None:
    kms = made_kms(tmp_path)
    place = str(tmp_path / "keys")
    dataset = encrypt(tmp_path, kms, key_store=place)
    local.rotate_key(kms, "sales")
    jobs.rotate(dataset, kms=kms, what="mek", key_store=place)
    found = printed(dataset, kms, key_store=place, event="planned")
    (master,) = found["masters"]  # the key store has let go of what version 1 has wrapped
    assert {row["version"]: row["may_be_destroyed"] for row in master["versions"]} == {"2": False}
    assert master["others"] is True
    assert all(f"--kek-store {place}" in step["command"] for step in found["steps"] if "ds" in step["command"])


def test_key_stores_in_databases(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    kms = made_kms(tmp_path)
    place = f"sqlite:///{tmp_path}/keys.db?dataset=orders"
    dataset = encrypt(tmp_path, kms, key_store=place)
    with pytest.MonkeyPatch.context() as patch:  # so that the newest KEK has sealed nothing yet
        patch.setattr("ags_fast.jobs.rotation.Rotating._copies", killed)
        with pytest.raises(KilledError):
            jobs.rotate(dataset, kms=kms, key_store=place)
    jobs.sweep(dataset, kms=kms, key_store=place)
    local.rotate_key(kms, "sales")
    event: Any
    for what, event in (("mek", "planned"), ("kek", "kek-leaked")):
        steps = jobs.audit(dataset, kms=kms, key_store=place, event=event)["steps"]
        (step,) = [step for step in steps if step["arguments"].get("what") == what]
        force = what == "kek"
        if force:
            local.rotate_key(kms, "sales")
        calls = calls_of(lambda w=what, f=force: jobs.rotate(dataset, kms=kms, what=w, force_expire=f, key_store=place))  # type: ignore[misc]
        assert calls == step["kms_calls"], event
    assert {row["may_be_destroyed"] for row in jobs.audit(dataset, kms=kms, key_store=place)["masters"]} == {False}


def test_a_commit_while_it_looks_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kms = made_kms(tmp_path)
    dataset = double(tmp_path, kms)
    look, moments = Survey._look, iter([1, 2])  # noqa: SLF001

    def looked(survey: Survey, head: Entry) -> None:
        if next(moments, None) is not None:
            jobs.rotate(dataset, kms=kms, force_expire=True)
        look(survey, head)

    monkeypatch.setattr(Survey, "_look", looked)
    newest = jobs.key_status(dataset, kms=kms)["version"]
    assert newest == Access.of(dataset, kms).log().head().number
    moments = iter(range(100))
    with pytest.raises(ConcurrentChangeError, match="changes faster"):
        jobs.key_status(dataset, kms=kms)


# -------------------------------------------------------------------------------------------------------------- copies


def test_what_a_copy_opens(tmp_path: Path) -> None:
    """As docs/rotation.md has it: of a bare copy that was made before, and what it opens of the files that are here."""
    kms = made_kms(tmp_path)
    dataset, copy = double(tmp_path, kms), tmp_path / "copy"
    shutil.copytree(dataset, copy)

    def opens_here() -> dict[str, bytes]:
        """What the keys of the copy open of the files of the dataset."""
        clear_cache()
        old = Access.of(copy, kms).open()
        context = Context("verify", "", old.entry.dataset_id, Store(dataset), old.envelope)
        found = {}
        for entry in old.files():
            if (dataset / entry.file).exists():
                with context.reader(entry) as reader:
                    found[entry.path] = reader.read()
        return found

    jobs.rotate(dataset, kms=kms, force_expire=True)
    assert opens_here() == decrypted(copy, kms) == TREE  # the KEK is another, the data keys are the same
    local.rotate_key(kms, "sales")
    jobs.rotate(dataset, kms=kms, what="mek")
    assert opens_here() == TREE
    gone = without(kms, tmp_path, "sales", 1)
    everything(dataset, gone)
    clear_cache()
    with pytest.raises(KeyAccessError, match="destroyed"):
        decrypted(copy, gone)
    jobs.rekey_files(dataset, kms=kms, engine=HERE, paths="part=1/*").raise_for_failures()
    jobs.expire(dataset, kms=kms, keep=1, force=True)
    assert opens_here() == {path: data for path, data in TREE.items() if path.startswith("part=2/")}
    jobs.rekey_files(dataset, kms=kms, engine=HERE).raise_for_failures()
    jobs.expire(dataset, kms=kms, keep=1, force=True)
    assert opens_here() == {}
    assert decrypted(copy, kms) == decrypted(dataset, kms) == TREE


def test_a_kek_that_was_wrapped_again_counts_once(tmp_path: Path) -> None:
    kms = made_kms(tmp_path)
    dataset = double(tmp_path, kms)
    local.rotate_key(kms, "sales")
    jobs.rotate(dataset, kms=kms, what="mek").raise_for_failures()
    local.rotate_key(kms, "sales")
    jobs.rotate(dataset, kms=kms, what="mek").raise_for_failures()
    found = printed(dataset, kms)
    (master,) = found["masters"]
    assert [(row["version"], row["superseded"]) for row in master["versions"]] == [("1", 1), ("2", 1), ("3", 0)]
    assert "still have 1 KEK as it wrapped them" in master["versions"][0]["why"]
    text = "\n".join(status_lines(found))
    (kek,) = found["keys"]
    row = next(line for line in text.splitlines() if line.startswith(f"  {kek['key_id']}")).split()
    assert row[row.index("active") + 1 :][:2] == ["6", f"{kek['uses']:,}"]
    assert "wraps in version 4. Uses: what jobs have reserved" in " ".join(text.split())
    assert "about version 4 of this dataset, with the versions before it" in " ".join(text.split())
