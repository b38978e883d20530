"""What a job says of files that failed, and what a call says of an argument that is wrong: where it is passed."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, QUIET, encrypt, keys_of, object_of, write_tree
from support import python_env

import ags_fast
from ags_fast import jobs, parquet
from ags_fast.jobs import JobError, JobFailuresWarning

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

TREE = {"a": b"secret plaintext of a", "b": b"secret plaintext of b", "c": b"c"}
KEY = bytes(range(16))


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Path:
    """A dataset in which two of three files do not open."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encrypt(write_tree(tmp_path / "src", TREE), tmp_path / "dataset", kms)
        assert jobs.verify_files(tmp_path / "dataset", kms=kms, **QUIET).failure is None
    for path in ("a", "b"):
        file = object_of(tmp_path / "dataset", kms, path)
        sealed = bytearray(file.read_bytes())
        sealed[-1] ^= 1
        file.write_bytes(sealed)
    return tmp_path / "dataset"


JOBS: dict[str, Callable[[Path, Any], jobs.JobResult]] = {
    "verify": lambda dataset, kms: jobs.verify_files(dataset, kms=kms, **QUIET),
    "decrypt": lambda dataset, kms: jobs.decrypt_files(dataset, f"{dataset}.out", kms=kms, **QUIET),
    "rekey": lambda dataset, kms: jobs.rekey_files(dataset, kms=kms, **QUIET),
    "maintain": lambda dataset, kms: jobs.maintain(dataset, kms=kms, verify=1.0, engine=HERE),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_result_with_failures_warns(name: str, dataset: Path, kms: dict[str, str]) -> None:
    with pytest.warns(JobFailuresWarning) as given:
        result = JOBS[name](dataset, kms)
    (one,) = given
    assert one.filename == __file__, "the line of the caller"
    text = str(one.message)
    assert text.startswith(f"{result.failure} (")
    assert "IntegrityError" in text
    assert ", and 1 more (" in text
    assert "2 failed)" in text
    for secret in (*TREE.values(), *keys_of(dataset, kms)):
        if len(secret) > 1:
            assert secret.decode("latin-1") not in text
            assert secret.hex() not in text
    assert result.failure is not None
    assert result.failure in repr(result)
    assert "FAILED" in result._repr_html_()
    with pytest.raises(JobError) as caught:
        result.raise_for_failures()
    assert str(caught.value) == result.failure


def test_what_raises_or_succeeds_does_not_warn(dataset: Path, kms: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(JobError, match=r"^stopped after 1 failed files: verify of .* failed: IntegrityError: "):
            jobs.verify_files(dataset, kms=kms, on_error="raise", **QUIET)
        result = jobs.verify_files(dataset, kms=kms, paths="c", **QUIET)
    assert "FAILED" not in result._repr_html_()
    assert repr(result).endswith(": 1 ok, 0 skipped, 0 failed>")


def test_names_of_files_are_printable(dataset: Path, kms: dict[str, str]) -> None:
    result = jobs.JobResult("job", "verify", "d", 1, [jobs.Row("a\n\x1b[31m\udcff", None, "failed", "E", "error")])
    assert result.failure == r"verify of a\n\x1b[31m\xff failed: E: error"
    with pytest.raises(JobError, match=r"verify of a\\n"):
        result.raise_for_failures()


def test_a_command_shows_its_rows_and_gives_no_warning(dataset: Path, kms: dict[str, str]) -> None:
    command = [sys.executable, "-P", "-m", "ags_fast", "verify", str(dataset)]
    command += [f"--kms={name}={value}" for name, value in kms.items()]
    done = run(command)
    assert done.returncode == 3
    assert "IntegrityError" in done.stdout + done.stderr
    assert "raise_for_failures" not in done.stdout + done.stderr
    assert "JobFailuresWarning" not in done.stdout + done.stderr


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    import subprocess

    return subprocess.run(command, env=python_env(), capture_output=True, text=True, timeout=60, cwd=os.sep)


# ------------------------------------------------------------------------------------------------------- arguments


def test_a_dataset_is_opened() -> None:
    with pytest.raises(TypeError, match=r"^open a dataset by Dataset\.open\("):
        ags_fast.Dataset("ds")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("64K", 1 << 16), ("64 KiB", 1 << 16), ("1M", 1 << 20), ("1mb", 1 << 20), (" 2 B ", 2)],
)
def test_sizes_take_units(text: str, nbytes: int, tmp_path: Path, kms: dict[str, str]) -> None:
    assert ags_fast.encrypted_length(10**6, text) == ags_fast.encrypted_length(10**6, nbytes)
    sealed = ags_fast.AgsCodec(KEY, block_size=text).encrypt(b"x")
    with ags_fast.open(sealed, key=KEY, length=len(sealed), block_size=text, max_block_size=text) as reader:
        assert reader.block_size == nbytes
    with ags_fast.open(tmp_path / "x", "wb", key=KEY, block_size=text) as writer:
        assert writer.block_size == nbytes
    result = encrypt(write_tree(tmp_path / "src", {"a": b"1"}), tmp_path / "dataset", kms, block_size=text)
    assert result.rows[0].block_size == nbytes
    with ags_fast.Dataset.open(tmp_path / "dataset", kms=kms).transaction(block_size=text) as changes:
        changes.create("b").close()
    assert jobs.verify_files(tmp_path / "dataset", kms=kms, **QUIET).counts["ok"] == 2


@pytest.mark.parametrize("text", ["", "M", "1X", "1.5M", "-1", "1 M B", "\u0661"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"number of bytes is required, such as 4096, '64K', '64 KiB' or '1M', not"):
        ags_fast.AgsCodec(KEY, block_size=text)


def test_ages_are_timedeltas(dataset: Path, kms: dict[str, str]) -> None:
    week: Any = 7
    for name, call in {
        "older_than": lambda age: jobs.expire(dataset, kms=kms, keep=1, older_than=age),
        "older_than ": lambda age: jobs.sweep(dataset, older_than=age),
        "grace": lambda age: jobs.rotate(dataset, kms=kms, grace=age),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name.strip()} is a timedelta, such as timedelta\(days=7\), not 7$"):
            call(week)
        with pytest.raises(ValueError, match=f"^{name.strip()} must not be negative$"):
            call(timedelta(seconds=-1))


def test_text_is_not_bytes(tmp_path: Path) -> None:
    text: Any = "text"
    codec = ags_fast.AgsCodec(KEY)
    writer = ags_fast.AgsWriter(tmp_path / "x", KEY)
    calls = [
        lambda: codec.encrypt(text),
        lambda: codec.encrypt_into(text, bytearray(99)),
        lambda: codec.decrypt(text, length=None),
        lambda: writer.write(text),
        lambda: ags_fast.AgsCodec(KEY, aad_prefix=text),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"^bytes are required, not text: encode the text first"):
            call()
    with pytest.raises(TypeError, match="bytes-like object is required, not 'int'"):
        writer.write(5)  # type: ignore[arg-type]
    writer.write(b"goes on")
    writer.close()


def test_keys_of_parquet_files_are_keys(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    plain, sealed, key = tmp_path / "plain", tmp_path / "sealed", parquet.Keys(KEY)
    bare: Any = KEY
    pytest.importorskip("pyarrow.parquet").write_table(table := pa.table({"a": [1]}), plain)
    parquet.encrypt_file(plain, sealed, key)
    new = tmp_path / "new"
    reads: list[Callable[[], object]] = [
        lambda: parquet.decrypt_file(sealed, new, bare),
        lambda: parquet.reencrypt_file(sealed, new, bare, key),
        lambda: parquet.open_plain(sealed, bare),
        lambda: parquet.verify(sealed, bare),
        lambda: parquet.filesystem(bare),
    ]
    writes: list[Callable[[], object]] = [
        lambda: parquet.encrypt_file(plain, new, bare),
        lambda: parquet.reencrypt_file(sealed, new, key, bare),
        lambda: parquet.reencrypt_file(sealed, new, key, bare, same_size=True),
        lambda: parquet.write_table(table, new, bare),
    ]
    for calls, more in ((reads, ", or a function from key_metadata to a key"), (writes, "")):
        for call in calls:
            with pytest.raises(TypeError, match=rf"^keys must be Keys, such as Keys\(footer_key\){more}, not 'bytes'$"):
                call()
    assert not new.exists()


def test_words(dataset: Path, kms: dict[str, str]) -> None:
    anything: Any = "anything"
    calls: dict[str, Callable[[], object]] = {
        "format": lambda: encrypt(dataset, dataset, kms, format=anything),
        "links": lambda: encrypt(dataset, dataset, kms, links=anything),
        "resume": lambda: jobs.rekey_files(dataset, kms=kms, resume=anything),
        "on_error": lambda: jobs.verify_files(dataset, kms=kms, on_error=anything),
        "missing": lambda: jobs.decrypt_files(dataset, dataset, kms=kms, missing=anything),
        "what": lambda: jobs.rotate(dataset, kms=kms, what=anything),
        "event": lambda: jobs.audit(dataset, kms=kms, event=anything),
        "key_material": lambda: jobs.rekey_files(dataset, kms=kms, key_material=anything),
        "dek_length": lambda: encrypt(dataset, dataset, kms, dek_length=17),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name} must be .* or .*, not ('anything'|17)$"):
            call()
    assert MASTER in jobs.key_status(dataset, kms=kms)["keys"][0].values()
