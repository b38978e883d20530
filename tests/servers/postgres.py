"""A real PostgreSQL, as the Debian package has it, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from servers import cannot, free_port, listens, stopped

if TYPE_CHECKING:
    from collections.abc import Iterator


class Postgres(NamedTuple):
    """Where it listens, and who may use it. The password is asked for."""

    url: str  # for SQLAlchemy, without the password
    user: str
    password: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """An empty database. It does not write for eternity, so that it is quick."""
    folders = [os.environ.get("PATH", ""), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    initdb, server = (shutil.which(name, path=os.pathsep.join(folders)) for name in ("initdb", "postgres"))
    if initdb is None or server is None:
        cannot("needs PostgreSQL: .ci/tools postgresql, or apt-get install postgresql")
    runs: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": {**os.environ, "LC_ALL": "C"}}
    if os.geteuid() == 0:  # it refuses to be root's
        runs |= {"user": _somebody().pw_uid, "group": _somebody().pw_gid, "extra_groups": []}
    user, password = "tester", "a password of the tests"
    with tempfile.TemporaryDirectory(dir=_open_folder() if "user" in runs else None) as name:
        folder = Path(name)
        (folder / "password").write_text(password)
        if "user" in runs:
            for path in (folder, folder / "password"):
                os.chown(path, runs["user"], runs["group"])
        login = ["-U", user, "-A", "scram-sha-256", "--pwfile", folder / "password"]
        made = subprocess.run(
            [initdb, "-D", folder / "data", *login, "--no-sync", "--no-instructions", "-E", "UTF8", "--locale=C"],  # type: ignore[list-item]
            **runs,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if made.returncode != 0:
            cannot(f"initdb fails: {made.stderr[-1000:]}")
        for _ in range(5):  # somebody else may take the port before it does
            port = free_port()
            listen = ["-p", str(port), "-h", "127.0.0.1", "-k", folder]
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [server, "-D", folder / "data", *listen, "-c", "fsync=off", "-c", "shared_buffers=16MB"],  # type: ignore[list-item]
                    **runs,
                    cwd=folder,
                    stdout=log,
                    stderr=log,
                )
            with stopped(process):
                if listens(process, port):
                    yield Postgres(f"postgresql+psycopg://{user}@127.0.0.1:{port}/postgres", user, password, process)  # type: ignore[arg-type]
                    process.send_signal(signal.SIGINT)  # SIGTERM would have it wait for its clients
                    return
        cannot(f"PostgreSQL does not start: {(folder / 'log').read_text()[-1000:]}")


def _somebody() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _open_folder() -> str:
    """A folder for temporary files that others than root can reach, too."""
    for name in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(name).resolve()
        if all(p.stat().st_mode & stat.S_IXOTH for p in (path, *path.parents)):
            return name
    return cannot("needs a folder for temporary files that is not root's alone")
