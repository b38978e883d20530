"""What a program tells its log and OpenTelemetry: jobs, calls of the KMS, conflicts; and never a key."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms, write_tree
from support import pattern, run_python

from ags_fast import jobs
from ags_fast.errors import IntegrityError
from ags_fast.fs import Store
from ags_fast.jobs import JobError, LocalEngine
from ags_fast.keys.kms.service import ServiceKms

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")


def records(caplog: pytest.LogCaptureFixture, logger: str) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == logger]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_job_is_logged(kms: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, processes: int) -> None:
    caplog.set_level(logging.DEBUG)
    src = write_tree(tmp_path / "src", {"a": pattern(1000), "b": pattern(500)})
    result = jobs.encrypt_files(
        src, tmp_path / "ds", kms=kms, wrapping_key_id=MASTER, engine=LocalEngine(processes), fsync=False
    )
    [(level, text)] = records(caplog, "ags_fast.jobs")
    calls = sum(result.kms_calls.values())
    assert level == "INFO"
    assert text.startswith(
        f"encrypt of {tmp_path / 'ds'}, job {result.job_id}: 2 ok, 0 skipped, 0 failed; 1500 bytes of plaintext, "
        f"{calls} KMS calls, "
    )
    kms_lines = records(caplog, "ags_fast.kms")
    assert len(kms_lines) == calls - processes  # a worker's call is in the log of the worker
    assert all(level == "DEBUG" and MASTER in text and text.endswith(" s: ok") for level, text in kms_lines)


def test_failures_are_logged(kms: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    src = write_tree(tmp_path / "src", {"a": pattern(1000)})
    dataset = tmp_path / "ds"
    result = jobs.encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=LocalEngine(0), fsync=False)
    result.raise_for_failures()
    with open(next(dataset.glob("a.*")), "r+b") as damaged:
        damaged.seek(200)
        damaged.write(b"\0\1\2\3")
    caplog.clear()
    with pytest.raises(JobError):
        jobs.verify_files(dataset, kms=kms, engine=LocalEngine(0), on_error="raise")
    [(level, text)] = records(caplog, "ags_fast.jobs")[:1]
    assert level == "WARNING"
    assert text.startswith("verify of a failed: IntegrityError: ")
    caplog.clear()
    (tmp_path / "other").mkdir()
    other = make_kms(tmp_path / "other")
    with pytest.raises(IntegrityError) as error:
        jobs.verify_files(dataset, kms=other, engine=LocalEngine(0))
    [(level, text)] = records(caplog, "ags_fast.jobs")
    assert (level, text) == ("WARNING", f"verify_files ended with IntegrityError: {error.value}")


def test_a_password_in_a_url_is_not_logged(kms: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/p/a", b"one")
    url = "memory://user:hunter2@host/ds"
    result = jobs.encrypt_files("memory:///p", url, kms=kms, wrapping_key_id=MASTER, engine=LocalEngine(0), fsync=False)
    assert result.counts["ok"] == 1
    text = "".join(record.getMessage() for record in caplog.records if record.name.startswith("ags_fast"))
    assert "hunter2" not in text
    assert "memory://***@host/ds" in text


def test_conflicts_are_logged(
    kms: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    src = write_tree(tmp_path / "src", {"a": b"1", "b": b"2"})
    dataset = tmp_path / "ds"
    jobs.encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=LocalEngine(0), fsync=False)
    assert records(caplog, "ags_fast.dataset") == []
    create = Store.create_exclusive

    def meanwhile(store: Store, path: str, data: bytes) -> None:
        if path.startswith("_ags/log/"):
            monkeypatch.undo()
            jobs.remove_files(dataset, "a", kms=kms)
        create(store, path, data)

    monkeypatch.setattr(Store, "create_exclusive", meanwhile)
    jobs.remove_files(dataset, "b", kms=kms)
    assert records(caplog, "ags_fast.dataset") == [("INFO", f"{dataset} was changed meanwhile: tried again")]


class Busy(ServiceKms[Any]):
    """A service that answers the third request."""

    provider = "busy"
    requests = 0

    def _trouble(self, error: Exception) -> str | None:
        return "busy"

    def ask(self) -> str:
        return self._ask(self._request)

    def _request(self) -> str:
        self.requests += 1
        if self.requests < 3:
            raise TimeoutError
        return "answer"


def test_retries_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = Busy()
    client.initialize({})
    assert client.ask() == "answer"
    lines = records(caplog, "ags_fast.kms")
    assert [level for level, _ in lines] == ["INFO", "INFO"]
    assert all(text.startswith("busy: a request failed, and is sent again in 0.") for _, text in lines)


PROGRAM = """
import json, sys
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ags_fast import jobs

spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))
src, dataset, kms, other = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
result = jobs.encrypt_files(src, dataset, kms=kms, wrapping_key_id="master", engine=jobs.LocalEngine(1), fsync=False)
jobs.verify_files(dataset, kms=kms, engine=jobs.LocalEngine(1))
try:
    jobs.verify_files(dataset, kms=other)
except jobs.JobError:
    raise
except Exception:
    pass
points = [
    [metric.name, dict(point.attributes), point.value]
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
    for point in metric.data.data_points
]
found = [[span.name, span.status.status_code.name, dict(span.attributes)] for span in spans.get_finished_spans()]
print(json.dumps({"points": points, "spans": found, "events": [len(s.events) for s in spans.get_finished_spans()]}))
"""


def test_opentelemetry(kms: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    assert MASTER == "master"
    src = write_tree(tmp_path / "src", {"a": pattern(1000), "b": pattern(500)})
    (tmp_path / "other").mkdir()
    other = make_kms(tmp_path / "other")
    told = json.loads(run_python(PROGRAM, src, tmp_path / "ds", json.dumps(kms), json.dumps(other)))
    encrypt, verify, failed = told["spans"]
    assert encrypt[:2] == ["ags_fast.encrypt_files", "UNSET"]
    assert encrypt[2].items() >= {"ags_fast.files.ok": 2, "ags_fast.plaintext": 1500, "ags_fast.version": 2}.items()
    assert encrypt[2]["ags_fast.dataset"] == str(tmp_path / "ds")
    assert verify[:2] == ["ags_fast.verify_files", "UNSET"]
    assert failed == ["ags_fast.verify_files", "ERROR", {"error.type": "IntegrityError"}]
    assert told["events"] == [0, 0, 0]  # of which an exception's message would be one

    def value(name: str, **attributes: str) -> int:
        wanted = {f"ags_fast.{key}": text for key, text in attributes.items()}
        return sum(found for metric, has, found in told["points"] if metric == name and wanted.items() <= has.items())

    assert value("ags_fast.files", op="encrypt", status="ok") == value("ags_fast.files", op="verify", status="ok") == 2
    assert value("ags_fast.plaintext", op="encrypt") == value("ags_fast.plaintext", op="verify") == 1500
    calls = encrypt[2]["ags_fast.kms.calls"] + verify[2]["ags_fast.kms.calls"]
    assert value("ags_fast.kms.calls", provider="local") >= calls > 0


def test_nothing_is_imported_for_a_program_that_logs_nothing(kms: dict[str, str], tmp_path: Path) -> None:
    program = """
        import sys
        from ags_fast import telemetry
        telemetry.info("jobs", "nobody hears")
        telemetry.add("conflicts", 1)
        with telemetry.job_span("x"):
            pass
        print(sorted({"logging", "opentelemetry"} & set(sys.modules)))
    """
    assert run_python(program) == "[]\n"


def test_python_prints_no_warning_of_its_own(kms: dict[str, str]) -> None:
    """As `logging` does for a record at WARNING of a program without a log."""
    program = """
        import logging
        from ags_fast import telemetry
        telemetry.warning("jobs", "a file failed")
    """
    assert run_python(program) == ""
