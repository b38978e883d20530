"""What is known of a job's calls of the KMS: its workers' too, each of them, or no key."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from audit_hooks import events, processes
from datasets import HERE, MASTER, data_files, make_kms, object_of, read_tree, small_tree, write_tree
from programs import hook_of_mine
from support import run_python

pytest.importorskip("pyarrow")

from ags_fast import KeyAccessError
from ags_fast.jobs import (
    JobError,
    LocalEngine,
    decrypt_files,
    encrypt_files,
    rekey_files,
    rotate,
    sweep,
    verify_files,
)
from ags_fast.keys import clear_cache, kms_calls, load_kms, set_audit_hook
from ags_fast.keys.kms import AUDIT_HOOK, UnaccountedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ags_fast.jobs.results import JobResult

TREE = small_tree()


class Audited:
    """A tree, and a KMS of which each call is a line in the file `log`."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "log"
        self.src = write_tree(root / "src", TREE)
        self.kms = {**make_kms(root, keys=[str(self.log)]), AUDIT_HOOK: "audit_hooks:note"}
        self.dataset = root / "dataset"

    def run(self, job: Callable[..., JobResult], *args: Any, **options: Any) -> JobResult:
        """A job of which nothing is cached here. What its result counts is what the hook has heard."""
        clear_cache()
        self.log.unlink(missing_ok=True)
        result = job(*args, kms=self.kms, **{"engine": LocalEngine(2), "progress": False, **options})
        assert result.kms_calls == events(self.log)
        assert result.kms_calls.total() > 0
        return result

    def encrypt(self, **options: Any) -> JobResult:
        more = {"wrapping_key_id": str(self.log), "fsync": False, **options}
        return self.run(encrypt_files, self.src, self.dataset, **more)

    def refuse(self, *, but: int) -> None:
        self.log.with_suffix(".spared").write_text(str(but))


@pytest.fixture
def audited(tmp_path: Path) -> Audited:
    return Audited(tmp_path)


def test_calls_of_all_processes(audited: Audited) -> None:
    done = audited.encrypt(double_wrap=False, verify_after=True)
    assert done.kms_calls["local", "unwrap"] >= len(TREE)
    here = kms_calls()
    done = audited.run(verify_files, audited.dataset)
    assert (kms_calls() - here).total() < done.kms_calls.total()  # that is this process only
    assert {os.getpid()} < processes(audited.log)


def test_calls_of_each_job(audited: Audited) -> None:
    """Also in threads of this process, and with what a job does besides."""
    audited.encrypt(engine=HERE)
    for job, options in (
        (rekey_files, {"engine": HERE}),
        (rotate, {"what": "double-wrap", "engine": HERE}),
        (rotate, {"engine": HERE, "force_expire": True, "concurrency": 4}),
        (rotate, {"what": "mek", "engine": HERE}),
    ):
        audited.run(job, audited.dataset, **options)
    clear_cache()
    audited.log.unlink()
    assert sweep(audited.dataset, kms=audited.kms).kms_calls == events(audited.log)
    assert verify_files(audited.dataset, kms=audited.kms, engine=HERE).kms_calls.total() == 0  # it is cached by now


def test_calls_of_a_job_that_fails(audited: Audited) -> None:
    audited.encrypt(double_wrap=False, engine=HERE)
    object_of(audited.dataset, audited.kms, "one").write_bytes(b"")
    with pytest.raises(JobError) as stopped:
        audited.run(verify_files, audited.dataset, engine=HERE, on_error="raise")
    assert stopped.value.result.kms_calls == events(audited.log) != {}


def test_calls_of_others_are_not_counted(audited: Audited) -> None:
    """Only what the job's own threads and processes do."""
    import threading

    other = load_kms(make_kms(audited.root, name="other"))
    stop = threading.Event()

    def go_on() -> None:
        while not stop.wait(0.001):
            other.wrap_key(bytes(16), MASTER)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        audited.encrypt(double_wrap=False, engine=HERE)
        audited.run(verify_files, audited.dataset, engine=HERE)
    finally:
        stop.set()
        thread.join()


# ------------------------------------------------------------------------------------------------- no account, no key


def test_refused_in_workers(audited: Audited) -> None:
    """What no worker can account for, no worker opens."""
    audited.encrypt()
    audited.refuse(but=os.getpid())
    for job, args in ((verify_files, ()), (decrypt_files, (audited.root / "out",)), (rekey_files, ())):
        done = job(audited.dataset, *args, kms=audited.kms, engine=LocalEngine(1), progress=False)
        assert done.counts["ok"] == 0
        assert {row.error_class for row in done.failed} == {"UnaccountedError"}
        assert all("kms.audit-hook failed with RuntimeError" in (row.error or "") for row in done.failed)
    assert read_tree(audited.root / "out") == {}
    before = data_files(audited.dataset)
    new = write_tree(audited.root / "new", {"new": b"new"})
    more: dict[str, Any] = {"kms": audited.kms, "wrapping_key_id": str(audited.log), "progress": False}
    done = encrypt_files(new, audited.dataset, engine=LocalEngine(1), **more)
    assert done.counts == {"ok": 0, "skipped": 0, "failed": 1}
    assert data_files(audited.dataset) == before


@pytest.mark.parametrize("double_wrap", [True, False])
def test_refused_here(audited: Audited, double_wrap: bool) -> None:
    """No job is begun, and no column is left out for want of a key, when it is the audit that fails."""
    audited.refuse(but=0)
    clear_cache()
    more: dict[str, Any] = {"kms": audited.kms, "wrapping_key_id": str(audited.log), "engine": HERE}
    with pytest.raises(UnaccountedError):
        encrypt_files(audited.src, audited.dataset, double_wrap=double_wrap, **more)
    client = load_kms(audited.kms)
    for call in (
        lambda: client.wrap_key(bytes(16), str(audited.log)),
        lambda: client.current_version(str(audited.log)),
        lambda: client.unwrap_key(b"what is no wrapped key", str(audited.log)),
    ):
        with pytest.raises(UnaccountedError):
            call()
    assert not issubclass(UnaccountedError, KeyAccessError)  # else missing="drop" would drop a column


def test_both_hooks_hear(audited: Audited) -> None:
    """Also if the other one fails."""
    client = load_kms(audited.kms)
    heard: list[Mapping[str, Any]] = []
    set_audit_hook(heard.append)
    try:
        client.wrap_key(bytes(16), str(audited.log))
        assert len(heard) == events(audited.log).total() == 1
        set_audit_hook(lambda event: event["nothing"])
        with pytest.raises(KeyError):
            client.wrap_key(bytes(16), str(audited.log))
        assert events(audited.log).total() == 2
        audited.refuse(but=0)
        set_audit_hook(heard.append)
        with pytest.raises(UnaccountedError):
            client.wrap_key(bytes(16), str(audited.log))
        assert len(heard) == 2
    finally:
        set_audit_hook(None)


def test_a_client_made_by_hand_has_it(audited: Audited) -> None:
    from ags_fast.keys.kms.local import LocalKms

    client = LocalKms()
    client.initialize(audited.kms)
    client.wrap_key(bytes(16), str(audited.log))
    assert events(audited.log) == {("local", "wrap"): 1}


@pytest.mark.parametrize(
    ("hook", "why"),
    [("audit_hooks", "module:"), ("nowhere_at_all:f", "is not there"), ("audit_hooks:other", "does not have")],
)
def test_hooks_that_are_not_there(audited: Audited, hook: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"kms.audit-hook.*{why}"):
        load_kms({**audited.kms, AUDIT_HOOK: hook})


def test_a_hook_in_the_main_script(audited: Audited) -> None:
    """Workers do not have that."""
    src, dataset = audited.root / "src", audited.root / "dataset"
    kms = json.dumps({**audited.kms, AUDIT_HOOK: "__main__:hook"})
    run_python([hook_of_mine.__file__], src, dataset, kms, audited.log)
