"""What jobs on tables say of files that failed: see test_failures.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import new_table, rows, sql_catalog

from ags_fast.iceberg import files, maintain, verify
from ags_fast.jobs import JobFailuresWarning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ags_fast.jobs import JobResult


@pytest.mark.parametrize("job", [verify, lambda table: maintain(table, verify=1.0)], ids=["verify", "maintain"])
def test_a_result_with_failures_warns_once(
    job: Callable[[Any], JobResult], tmp_path: Path, kms: dict[str, str]
) -> None:
    """Also if a step of the job is a job of its own."""
    table = new_table(sql_catalog(tmp_path, kms))
    table.append(rows(0, 10))
    (path,) = (one.path.removeprefix("file://") for one in files(table) if one.kind == "data")
    with open(path, "r+b") as file:
        file.seek(40)
        byte = file.read(1)
        file.seek(40)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.warns(JobFailuresWarning, match=r"failed: IntegrityError: .* 1 failed\)") as given:
        result = job(table)
    assert [one.filename for one in given if one.category is JobFailuresWarning] == [__file__]
    assert result.failure is not None
    assert result.failure in repr(result)
    assert "FAILED" in result._repr_html_()
