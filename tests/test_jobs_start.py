"""Processes that get keys: they execute nothing from the folder of data in which somebody happens to be."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import programs.jobs
import pytest
from datasets import MASTER, read_tree, write_tree
from support import program, run_python

pytest.importorskip("pyarrow")

from ags_fast.engines import local, processes, start
from ags_fast.engines.base import JobContext
from ags_fast.engines.processes import Worker
from ags_fast.fs import Store
from ags_fast.jobs import Row, encrypt_files
from ags_fast.jobs.work.context import Context
from ags_fast.keys import Envelope

if TYPE_CHECKING:
    from collections.abc import Mapping

# What jobs import, what Python imports by itself when it starts, and the package's own name.
MINES = ("uuid", "fnmatch", "ssl", "json", "pickle", "struct", "tqdm", "pyarrow", "ags_fast", "sitecustomize")
MINES += ("usercustomize", "pyspark", "numbers", "multiprocessing")  # type: ignore[assignment]
MINE = "with open({told!r}, 'a') as file: file.write(__name__ + '\\n')\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of data that somebody else may write to, with modules in it that tell when they are executed."""
    (tmp_path / "data").mkdir()
    for name in MINES:
        (tmp_path / "data" / f"{name}.py").write_text(MINE.format(told=str(tmp_path / "told")))
    return tmp_path / "data"


def options(kms: Mapping[str, str]) -> list[str]:
    return [word for name, value in kms.items() for word in ("--kms", f"{name}={value}")]


def told(data: Path) -> str:
    path = data.parent / "told"
    return path.read_text() if path.exists() else ""


def console_script() -> list[str]:
    path = Path(sys.executable).with_name("ags-fast")
    return [str(path)] if path.exists() else [sys.executable, "-P", "-c", "from ags_fast.cli import main; main()"]


def run(command: list[str], data: Path, **env: str) -> str:
    """What it prints, run in `data`; nothing there may have been executed."""
    done = subprocess.run(command, cwd=data, env={**os.environ, **env}, capture_output=True, text=True, timeout=100)
    assert told(data) == "", f"{told(data)}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{told(data)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_mines_go_off(data: Path) -> None:
    """Else the tests below would show nothing."""
    program = "import sys; sys.path.insert(0, ''); import uuid, sitecustomize"
    subprocess.run([sys.executable, "-P", "-c", program], cwd=data, check=True)
    assert told(data).split() == ["uuid", "sitecustomize"]


@pytest.mark.parametrize("command", [console_script(), [sys.executable, "-P", "-m", "ags_fast"]])
def test_commands_in_a_folder_of_data(data: Path, kms: dict[str, str], command: list[str]) -> None:
    run([*command, "encrypt", ".", "../out", "--wrapping-key-id", MASTER, *options(kms)], data)
    run([*command, "decrypt", "../out", "../back", *options(kms)], data)
    assert read_tree(data.parent / "back") == read_tree(data)


PROGRAMS = Path(__file__).with_name("programs")
SCRIPT = (PROGRAMS / "job_of_mine.py").read_text()


def test_jobs_in_a_folder_of_data(data: Path, kms: dict[str, str]) -> None:
    """Started by a script from elsewhere whose path has the current directory, by whatever name."""
    (data / "lib").mkdir()
    for name in MINES:
        shutil.copy(data / f"{name}.py", data / "lib")
    (data.parent / "link").symlink_to(data)
    paths = ["", ".", "lib", str(data), str(data.parent / "link")]
    script = data.parent / "scripts" / "job.py"
    script.parent.mkdir()
    # What its own process imports when the path has the folder is its own affair: everything, before that.
    modules = "ags_fast.engines.processes, ags_fast.jobs.rotation, ags_fast.keys.kms.local, pyarrow.parquet, tqdm"
    script.write_text(f"import {modules}\n{SCRIPT}")
    count = len(list(data.rglob("*.py")))
    assert run([sys.executable, str(script), json.dumps(kms), json.dumps(paths)], data) == f"{count}\n"


# A string, for what it imports is only where it is written to.
KMS_IMPL = """
import helper_of_mine
from ags_fast.keys.kms.local import LocalKms
class Mine(LocalKms):
    pass
"""


@pytest.mark.parametrize("how", ["script", "module", "-c", "elsewhere"])
def test_clients_of_the_callers_own_are_found(tmp_path: Path, kms: dict[str, str], how: str) -> None:
    """Beside the script, in the current directory if the caller imported it from there, and elsewhere on the path."""
    del kms["encryption.kms-type"]
    kms["encryption.kms-impl"] = "kms_of_mine:Mine"
    home = tmp_path / "src"
    home.mkdir()
    (home / "kms_of_mine.py").write_text(KMS_IMPL)
    (home / "helper_of_mine.py").touch()
    (home / "job_of_mine.py").write_text(SCRIPT)
    command = {"script": ["job_of_mine.py"], "module": ["-m", "job_of_mine"], "-c": ["-c", SCRIPT]}
    arguments = command.get(how, ["-P", "-c", f"import sys; sys.path.append({str(home)!r})\n{SCRIPT}"])
    cwd = tmp_path / "lib" if how == "elsewhere" else home
    cwd.mkdir(exist_ok=True)
    (cwd / "data").touch()
    command_line = [sys.executable, *arguments, json.dumps(kms), "[]"]
    done = subprocess.run(command_line, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


# ------------------------------------------------------------------------------------------------------- interpreters

# A string, for with these flags Python looks for no programs in this folder.
FLAGS = """
import sys
from ags_fast.engines.start import import_path, start_python
code = "import sys; sys.dont_write_bytecode or 1; print(sys.flags, sys._xoptions, sys.warnoptions, sys.path)"
print(sys.flags, sys._xoptions, sys.warnoptions, sys.path)
print(start_python(code, import_path()).communicate()[0].decode())
"""


@pytest.mark.parametrize(
    "flags",
    [["-P"], ["-P", "-E", "-s", "-B", "-OO"], ["-I", "-X", "utf8=1", "-X", "dev"], ["-P", "-W", "error::UserWarning"]],
)
def test_flags_are_those_of_the_caller(tmp_path: Path, flags: list[str]) -> None:
    """Its file system encoding among them: names are text."""
    done = subprocess.run([sys.executable, *flags, "-c", FLAGS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mine, its = done.stdout.splitlines()[:2]
    assert mine == its


@pytest.mark.parametrize("executable", ["", None, "/usr/sbin/uwsgi", "/nowhere/python3"])
def test_embedded_interpreters(executable: str | None) -> None:
    """Of a program that has Python inside, `sys.executable` is the program, or nothing."""
    run_python(program(programs.jobs.start_embedded, executable))


def test_no_interpreter(monkeypatch: pytest.MonkeyPatch, kms: dict[str, str], tmp_path: Path) -> None:
    for name in ("prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/opt/app/frozen")
    monkeypatch.setattr("multiprocessing.spawn._python_exe", b"/opt/app/frozen")
    with pytest.raises(ChildProcessError, match=r"set_executable.*LocalEngine\(0\)"):
        start.python_command()


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("after", [0.0, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2])
def test_ctrl_c_while_a_worker_starts(after: float, kms: dict[str, str], tmp_path: Path, capfd: Any) -> None:
    """A terminal sends it to all its processes. The caller decides; a worker neither ends of it nor speaks."""
    store = Store(tmp_path)
    worker = Worker(start.import_path(), Context("verify", "", "", store, Envelope(kms, {})))
    try:
        time.sleep(after)
        os.kill(worker._process.pid, signal.SIGINT)
        assert worker.wait_ready()
        os.kill(worker._process.pid, signal.SIGINT)
        worker.start([], 0)
        assert worker.receive() == []
    finally:
        worker.close()
    assert capfd.readouterr() == ("", "")


def test_worker_without_a_caller_is_silent(capfd: Any) -> None:
    """One whose caller has gone before it was told anything."""
    process = start.start_python("from ags_fast.engines.worker import main; main()", start.import_path())
    process.communicate()
    assert process.returncode == 1
    assert capfd.readouterr() == ("", "")


# -------------------------------------------------------------------------------------------------------------- Spark


@pytest.mark.more
@pytest.mark.spark
def test_spark_in_a_folder_of_data(data: Path, kms: dict[str, str]) -> None:
    """A local session's Python workers are in the driver's current directory; so are processes of a file's own.

    Spark does not warn of a setting that we recommend, either.
    """
    pytest.importorskip("pyspark")
    (data.parent / "scripts").mkdir()
    script = data.parent / "scripts" / "job.py"
    shutil.copy(PROGRAMS / "spark_job_of_mine.py", script)
    env = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, str(script), json.dumps(kms)]
    done = subprocess.run(command, cwd=data, env={**os.environ, **env}, capture_output=True, text=True, timeout=200)
    assert told(data) == "", f"{told(data)}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{told(data)}\n{done.stdout}{done.stderr}"
    assert "RPC encryption" not in done.stderr
    assert len(list((data.parent / "out2").glob("*.ags"))) == len(MINES)


def test_a_worker_imports_what_its_tasks_need() -> None:
    """To start is most of what a worker costs on few files."""
    told = run_python(
        "import sys, ags_fast.engines.worker, ags_fast.iceberg.work.tasks\n"
        "print(*(name for name in sys.modules if name.startswith('ags_fast.')))"
    )
    modules = set(told.split())
    assert "ags_fast.engines.worker" in modules
    assert not modules & {"ags_fast.jobs.run", "ags_fast.jobs.versions", "ags_fast.dataset.dataset"}


@pytest.mark.parametrize("job", ["small", "large", "parquet", "client"])
def test_processes_start_where_they_pay_or_protect(
    job: str, tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few plain files are done by this process. Others do what parses a file's bytes, or is not ours."""
    started: list[object] = []

    class Noted(Worker):
        def __init__(self, *args: Any) -> None:
            started.append(args)
            super().__init__(*args)

    monkeypatch.setattr(processes, "Worker", Noted)
    src = write_tree(tmp_path / "src", {f"{n}": b"x" * n for n in range(8)})
    options: dict[str, Any] = {"kms": kms, "wrapping_key_id": MASTER}
    if job == "large":
        monkeypatch.setattr(local, "STARTS_NONE_BYTES", 1)
    elif job == "parquet":
        table = pytest.importorskip("pyarrow").table({"a": [1]})
        pytest.importorskip("pyarrow.parquet").write_table(table, src / "t.parquet")
        options["format"] = "parquet"
    elif job == "client":
        del kms["encryption.kms-type"]
        kms |= {"encryption.kms-impl": "kms_clients:Counting", "log": str(tmp_path / "log")}
    done = encrypt_files(src, tmp_path / "dataset", **options)
    assert done.counts["ok"] == (1 if job == "parquet" else 8)
    assert bool(started) == (job != "small")


def test_ctrl_c_stops_large_files_in_threads(tmp_path: Path, kms: dict[str, str]) -> None:
    """A thread cannot be killed: it stops between two chunks of its file, which does not appear."""
    src, dataset = write_tree(tmp_path / "src", {"1": b"small"}), tmp_path / "dataset"
    for name in "23":
        with open(src / name, "wb") as file:
            file.truncate(1 << 29)  # some tenths of a second

    def interrupt(rows: list[Row]) -> None:
        (row,) = rows  # of the small file
        raise KeyboardInterrupt(row.plain_length)

    with pytest.raises(KeyboardInterrupt, match="5"):
        encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, progress=interrupt)
    made = [path.name[0] for path in dataset.iterdir()]
    assert sorted(made) == ["1", "_"]


def test_a_context_that_has_worked_travels() -> None:
    """A worker of Spark keeps a context, and may send it on to a process for one file."""
    context = JobContext("verify", "id")
    context.check_goes_on()
    pickle.loads(pickle.dumps(context)).check_goes_on()
    context.stopped.append(True)
    with pytest.raises(InterruptedError):
        context.check_goes_on()
    dataclasses.replace(context, threads=1).check_goes_on()
