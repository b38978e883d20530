"""Servers for the tests: each listens on 127.0.0.1 only, on a port of its own, and is stopped by its process number.

`python -m servers` builds those that have to be built, so that no test waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pytest
from support import python_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

VERSITYGW_PACKAGE, VERSITYGW = "github.com/versity/versitygw/cmd/versitygw", "v1.8.0"
FAKE_GCS_PACKAGE, FAKE_GCS = "github.com/fsouza/fake-gcs-server", "v1.56.1"


class S3Server(NamedTuple):
    """Where an S3 server listens, and who may use it."""

    url: str
    key: str
    secret: str

    def options(self) -> dict[str, Any]:
        """storage_options of fsspec."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": self.url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def client(self) -> Any:
        """A client of boto3, which shows what the server itself says."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )


class LocalServer(ThreadingHTTPServer):
    """An HTTP server of this process, which many threads may call at once."""

    daemon_threads = True
    request_queue_size = 64  # a client that finds the queue full tries again a second later


@contextlib.contextmanager
def moto_s3() -> Iterator[S3Server]:
    """S3 as moto has it, in memory."""
    pytest.importorskip("moto.server")
    with announced([sys.executable, str(Path(__file__).parent / "plain_moto.py")]) as url:
        yield S3Server(url, "testing", "testing")


@contextlib.contextmanager
def versitygw(folder: Path) -> Iterator[S3Server]:
    """A real S3 server, over a folder."""
    program = built("versitygw")
    data = folder / "data"
    data.mkdir()
    server = S3Server("", "tester", "a secret of the tests")
    for _ in range(5):  # somebody else may take the port before it does
        port = free_port()
        address = f"127.0.0.1:{port}"
        options = ["--port", address, "--access", server.key, "--secret", server.secret, "--quiet"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, *options, "posix", data], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with stopped(process):
            if listens(process, port):
                yield server._replace(url=f"http://{address}")
                return
    pytest.fail(f"versitygw does not start: {(folder / 'log').read_text()[-2000:]}")


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[str]:
    """The URL of a server of Google Cloud Storage's JSON API, in memory. It checks the conditions of uploads only."""
    program = built("fake-gcs-server")
    for _ in range(5):  # somebody else may take the port before it does
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        options = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, *options, "-external-url", url], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with stopped(process):
            if listens(process, port):
                yield url
                return
    pytest.fail(f"fake-gcs-server does not start: {(folder / 'log').read_text()[-2000:]}")


@contextlib.contextmanager
def strict_moto() -> Iterator[str]:
    """The URL of moto's server with a KMS as strict as AWS's."""
    pytest.importorskip("moto")
    program = str(Path(__file__).parent / "strict_moto.py")
    with announced([sys.executable, program, "0"]) as url:
        yield url


@contextlib.contextmanager
def vault(token: str, certificate: Path | None = None) -> Iterator[str]:
    """The URL of a Vault with a transit engine. certificate: a file with one and its key, for TLS."""
    pytest.importorskip("hvac")
    tls = [] if certificate is None else ["-cert", str(certificate), "-key", str(certificate)]
    with announced([built("vaultmini"), "-token", token, *tls]) as url:
        yield url


class Hsm(NamedTuple):
    """A token of SoftHSM, as its tools see it."""

    library: str
    token: str
    pin: str


@contextlib.contextmanager
def softhsm(folder: Path) -> Iterator[Hsm]:
    """A token in a folder; in this process and its children, the library finds no other."""
    pytest.importorskip("pkcs11")
    tool = shutil.which("softhsm2-util")
    places = ("/usr/lib/softhsm", "/usr/lib64", "/usr/local/lib/softhsm", "/opt/homebrew/lib/softhsm")
    library = next((f"{place}/libsofthsm2.so" for place in places if os.path.exists(f"{place}/libsofthsm2.so")), None)
    if tool is None or library is None:
        cannot("needs SoftHSM: .ci/tools softhsm, or apt-get install softhsm2")
    hsm = Hsm(library, "ags_fast tests", "a pin of the tests")
    (folder / "tokens").mkdir()
    configuration = folder / "softhsm2.conf"
    configuration.write_text(f"directories.tokendir = {folder / 'tokens'}\nlog.level = ERROR\n")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SOFTHSM2_CONF", str(configuration))
        pins = ["--so-pin", "another pin", "--pin", hsm.pin]
        subprocess.run(
            [tool, "--init-token", "--free", "--label", hsm.token, *pins], check=True, capture_output=True, timeout=60
        )
        yield hsm


@contextlib.contextmanager
def announced(command: Sequence[str]) -> Iterator[str]:
    """What a server says when it listens: READY and a URL."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=python_env()
        )
        with stopped(server):
            assert server.stdout is not None
            words = server.stdout.readline().decode().split()
            if words[:1] != ["READY"]:
                log.seek(0)
                pytest.fail(f"{command[0]} does not start: {log.read().decode()[-2000:]}")
            yield words[1]


@contextlib.contextmanager
def stopped(process: subprocess.Popen[Any]) -> Iterator[None]:
    """At the end, the process is."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def listens(process: subprocess.Popen[Any], port: int) -> bool:
    """Wait until the process listens; False if it ends, or does not in time."""
    for _ in range(300):
        if process.poll() is not None:
            return False
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process.poll() is None
        time.sleep(0.05)
    return False


class NotHereError(Exception):
    """A program cannot be had on this machine; the message says why."""


class GoProgram(NamedTuple):
    """A program written in Go. It is built once, and kept in the user's cache folder by its version."""

    name: str
    version: str
    command: Sequence[str]
    source: Path | None = None  # the folder of it, where it is ours

    @property
    def path(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "ags_fast" / f"{self.name}-{self.version}" / self.name

    def build(self, begins: Callable[[], object] = lambda: None) -> Path:
        """The path of the program, which is built unless it is there. NotHereError if it cannot be.

        begins: called before a build.
        """
        program = self.path
        if program.exists():
            return program
        if shutil.which("go") is None:
            raise NotHereError(f"{self.name} {self.version} needs Go, to be built")
        begins()
        program.parent.mkdir(parents=True, exist_ok=True)
        with (
            (program.parent / "lock").open("w") as lock,
            tempfile.TemporaryDirectory(dir=program.parent) as folder,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)  # one builds, the others wait
            if not program.exists():
                env = {**os.environ, "GOBIN": folder, "CGO_ENABLED": "0"}
                built = subprocess.run(
                    self.command, cwd=self.source, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
                )
                if built.returncode != 0:
                    raise NotHereError(f"{self.name} {self.version} cannot be built: {built.stderr.strip()[-1000:]}")
                os.replace(Path(folder) / self.name, program)
        return program


def go_programs() -> dict[str, GoProgram]:
    """What servers here are written in Go, by name."""
    versitygw = GoProgram("versitygw", VERSITYGW, ["go", "install", f"{VERSITYGW_PACKAGE}@{VERSITYGW}"])
    source = Path(__file__).parent / "vaultmini"
    digest = hashlib.sha256()
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(source)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    # CGO_ENABLED=0 and these flags: nothing of the machine gets in, and the program is a third smaller.
    options = ["-mod=readonly", "-trimpath", "-ldflags=-s -w"]
    vaultmini = GoProgram("vaultmini", digest.hexdigest()[:16], ["go", "install", *options, "."], source)
    fake_gcs = GoProgram("fake-gcs-server", FAKE_GCS, ["go", "install", f"{FAKE_GCS_PACKAGE}@{FAKE_GCS}"])
    return {program.name: program for program in (versitygw, vaultmini, fake_gcs)}


def built(name: str) -> str:
    """The path of one of the programs written in Go. Skips where it cannot be had."""
    try:
        return str(go_programs()[name].build())
    except NotHereError as error:
        cannot(str(error))


def cannot(why: str) -> NoReturn:
    """Skips the test; in CI, where everything is there, it fails instead."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    raise AssertionError(why)
