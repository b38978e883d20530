"""A job that was killed, and what later jobs on the dataset say of it."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, make_kms, write_tree
from killing import ended, fork, kill_before

from ags_fast import cli, jobs
from ags_fast.dataset.job import Job
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = {"a": b"1"}, {"b": b"2"}


@pytest.fixture
def kms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The KMS of the dataset `ds`, in which an encryption of `new` was killed before its commit."""
    monkeypatch.chdir(tmp_path)
    kms = make_kms(tmp_path)
    write_tree(tmp_path / "old", OLD)
    write_tree(tmp_path / "new", NEW)
    write_tree(tmp_path / "more", {"c": b"3"})
    jobs.encrypt_files("old", "ds", wrapping_key_id=MASTER, kms=kms, engine=HERE, progress=False)

    def killed() -> None:
        kill_before(0, [(Job, "commit")])
        jobs.encrypt_files("new", "ds", wrapping_key_id=MASTER, kms=kms, engine=HERE, progress=False)

    assert ended(fork(killed)) == -signal.SIGKILL
    return kms


def test_later_jobs_name_it(tmp_path: Path, kms: dict[str, str]) -> None:
    options: dict[str, Any] = {"kms": kms, "engine": HERE, "progress": False}
    (dead,) = (path.name for path in (tmp_path / "ds" / "_ags" / "plans").iterdir())
    begun = re.sub(r"(....)(..)(..)T(..)(..)(..)-.*", r"\1-\2-\3 \4:\5:\6 UTC", dead)
    for run in (
        lambda: jobs.encrypt_files("more", "ds", wrapping_key_id=MASTER, **options),
        lambda: jobs.rekey_files("ds", **options),
        lambda: jobs.rotate("ds", **options),
        lambda: jobs.rekey_files("ds", resume="length", **options),
    ):
        (text,) = run().warnings
        assert f"{dead} (encrypt of {tmp_path / 'new'}, begun at {begun})" in text
    done = jobs.encrypt_files("new", "ds", wrapping_key_id=MASTER, resume="length", **options)
    assert (done.job_id, done.warnings) == (dead, [])
    assert jobs.rekey_files("ds", **options).warnings == []


def test_what_the_warning_says_to_run(tmp_path: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--keystore": local.PATH, "--key-file": local.KEY_FILE, "--passphrase-file": local.PASSPHRASE_FILE}
    where = [word for flag, name in names.items() if name in kms for word in (flag, kms[name])]
    capsys.readouterr()
    assert cli.main(["rekey", "ds", *where]) == 0
    told = capsys.readouterr().err
    assert "warning: " in told
    assert "`ags-fast sweep" in told
    assert cli.main(["sweep", "ds", *where]) == 0
    capsys.readouterr()
    assert cli.main(["rekey", "ds", *where]) == 0
    assert "died" not in capsys.readouterr().err
    assert not list((tmp_path / "ds" / "_ags" / "plans").iterdir())
