"""Other programs that read and write Parquet, encrypted too: parquet-java in a JVM, pyarrow (this one and older ones),
polars, DuckDB, fastparquet.

A reader gives a pyarrow Table, and `rows_of` makes of it what can be compared over all of them. fastparquet and DuckDB
have types of their own: what they read is compared with what they read from the plaintext file.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pe = pytest.importorskip("pyarrow.parquet.encryption")

HERE = Path(__file__).resolve().parent
GCM: Final = "AES_GCM_V1"
CTR: Final = "AES_GCM_CTR_V1"
OLD_PYARROWS = ("22", "25")


class PeerError(Exception):
    """A peer refuses; its message names the error classes."""


@dataclass(frozen=True)
class PmeKeys:
    """Keys as they are, and how to write with them. Without columns, all are encrypted with the footer key."""

    footer: bytes = field(repr=False)
    columns: Mapping[str | tuple[str, ...], bytes | None] = field(default_factory=dict, repr=False)  # None: footer key
    aad_prefix: bytes | None = None
    # The rest is for writers.
    store_aad_prefix: bool = True
    algorithm: str = GCM
    plaintext_footer: bool = False
    complete: bool = False  # columns that are not named are encrypted with the footer key, and not left in the open
    footer_metadata: bytes | None = None
    column_metadata: Mapping[str | tuple[str, ...], bytes] = field(default_factory=dict)

    def hadoop(self) -> dict[str, str]:
        """The Hadoop configuration in which parquet-java finds these keys; see jvm/Keys.scala."""

        def text(value: bytes | None) -> str | None:
            return None if value is None else base64.b64encode(value).decode()

        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("footer", "aad_prefix", "footer_metadata"):
            fields[name] = text(fields[name])
        del fields["column_metadata"]
        fields["columns"] = [
            {
                "path": path.split(".") if isinstance(path, str) else path,
                "key": text(key),
                "metadata": text(self.column_metadata.get(path)),
            }
            for path, key in self.columns.items()
        ]
        return {"parquet.crypto.factory.class": "ags.peers.ExplicitKeys", "ags.peers.keys": json.dumps(fields)}


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Rows in Python's types, in which NaN equals NaN and a map is the list of its entries that Parquet has."""

    def plain(value: Any, kind: Any) -> Any:
        if value is None:
            return None
        if pa.types.is_floating(kind):
            return "NaN" if math.isnan(value) else value
        if pa.types.is_map(kind):
            return [{"key": plain(k, kind.key_type), "value": plain(v, kind.item_type)} for k, v in value]
        if pa.types.is_struct(kind):
            return {one.name: plain(value[one.name], one.type) for one in kind}
        if hasattr(kind, "value_type") and isinstance(value, list):
            return [plain(one, kind.value_type) for one in value]
        return value

    if not table.num_columns:
        return [{}] * table.num_rows
    columns = [
        [plain(value, kind) for value in column.to_pylist()]
        for column, kind in zip(table.columns, table.schema.types, strict=True)
    ]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


# ---------------------------------------------------------------- what is made once per machine


def cannot(reason: str) -> NoReturn:
    """What a test needs is not there: in CI that is a failure."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """A folder in the user's cache that `make` fills, unless it is there: one process makes it, others wait."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ags_fast"
    folder = cache / name
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                with tempfile.TemporaryDirectory(dir=cache) as work:
                    made = Path(work) / "made"
                    made.mkdir()
                    make(made)
                    made.rename(folder)
    return folder


def run(command: Sequence[str | Path], what: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        cannot(f"{what}: {(done.stdout + done.stderr)[-1500:]}")


# ---------------------------------------------------------------- parquet-java


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else shutil.which("java") or cannot("needs a Java runtime")


def jars() -> Path:
    """The folder of the jars that come with pyspark: parquet-java, Hadoop, and Scala with its compiler."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        pytest.skip("needs pyspark, for its parquet-java")
    return Path(spec.origin).parent / "jars"


def jvm_classes() -> Path:
    """The folder of the compiled classes of jvm/*.scala."""
    sources = sorted((HERE / "jvm").glob("*.scala"))
    tools = sorted(jar.name for name in ("scala-compiler", "parquet-hadoop") for jar in jars().glob(f"{name}-*.jar"))
    digest = hashlib.sha256(json.dumps([tools, [source.read_text() for source in sources]]).encode()).hexdigest()

    def compile_into(folder: Path) -> None:
        scalac = [java(), "-cp", f"{jars()}/*", "scala.tools.nsc.Main", "-usejavacp", "-Xlint", "-Werror"]
        run([*scalac, "-d", folder, *sources], "tests/jvm does not compile")

    return cached(f"jvm-{digest[:16]}", compile_into)


Hadoop = PmeKeys | Mapping[str, Any] | None


def hadoop_conf(keys: Hadoop) -> dict[str, str]:
    """A Hadoop configuration: of explicit keys, or as it is; see `keytools_conf`."""
    if isinstance(keys, PmeKeys):
        return keys.hadoop()
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in (keys or {}).items()}


def keytools_conf(master_keys: Mapping[str, bytes], **properties: Any) -> dict[str, Any]:
    """For parquet-java's PropertiesDrivenCryptoFactory over the KMS in jvm/Keys.scala.

    properties: as parquet.encryption.* has them, with _ for a dot: footer_key="id", column_keys="id:a,b;id2:c",
    uniform_key, plaintext_footer, double_wrapping, key_material_store_internally, data_key_length_bits, algorithm ...
    """
    listed = ",".join(f"{name}:{base64.b64encode(key).decode()}" for name, key in master_keys.items())
    return {
        "parquet.crypto.factory.class": "org.apache.parquet.crypto.keytools.PropertiesDrivenCryptoFactory",
        "parquet.encryption.kms.client.class": "ags.peers.MemoryKms",
        "ags.peers.master.keys": listed,
        # What parquet-java caches for ten minutes, KMS clients and keys, it caches by token.
        "parquet.encryption.key.access.token": hashlib.sha256(listed.encode()).hexdigest(),
        **{f"parquet.encryption.{name.replace('_', '.')}": value for name, value in properties.items()},
    }


def spark_conf(keys: Hadoop) -> dict[str, str]:
    """Settings with which Spark's parquet-java has these keys; they are read when the session's JVM is started."""
    paths = {f"spark.{who}.extraClassPath": str(jvm_classes()) for who in ("driver", "executor")}
    return paths | {f"spark.hadoop.{name}": value for name, value in hadoop_conf(keys).items()}


class ParquetJava:
    """parquet-java in a JVM of its own, without Spark, that answers one request after the other.

    Options of a file it writes: writer ("v1", "v2"), codec, page_size (bytes), page_rows, row_group_rows, dictionary,
    bloom_filters (names of columns). Page checksums are written, and verified when read.
    """

    def __init__(self, *jvm_options: str) -> None:
        """jvm_options: for a benchmark, none; ("-XX:TieredStopAtLevel=1",) is sooner there for little work."""
        self._options = jvm_options

    def __enter__(self) -> ParquetJava:
        self._log = tempfile.TemporaryFile()
        command = [java(), "-Xmx2g", *self._options, "-cp", f"{jvm_classes()}:{jars()}/*", "ags.peers.Peer"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8"
        )
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]  # ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def kill(self) -> None:
        self._process.kill()

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"op": op, **request}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the JVM is gone: {self._log.read().decode()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(" <- ".join(answer["error"]))
        return answer

    def read(self, path: Path, keys: Hadoop = None, filter: Mapping[str, Any] | None = None) -> Any:
        """All rows, or those that a filter leaves (see `count`): parquet-java decodes them and writes them plain."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy.parquet"
            only = {} if filter is None else {"filter": dict(filter)}
            rows = self.ask("copy", source=_file(path, keys), target=_file(copy), **only)["rows"]
            table = pq.ParquetFile(copy).read()
            assert table.num_rows == rows
            return table

    def write(self, source: Path, path: Path, keys: Hadoop = None, **options: Any) -> None:
        """The rows of a plaintext file, decoded and written anew."""
        self.ask("copy", source=_file(source), target={**_file(path, keys), **options})

    def rewrite(self, source: Path, path: Path, keys: Hadoop, times: int = 1) -> list[float]:
        """Encrypts a plaintext file without decoding values (ParquetRewriter). Seconds that it took, each time."""
        return self.ask("rewrite", source=_file(source), target=_file(path, keys), times=times)["seconds"]

    def count(self, path: Path, keys: Hadoop = None, **filter: Any) -> dict[str, int]:
        """How much of a file filters leave: row_groups, row_group_rows, page_rows (by column index), rows.

        filter: {"column": "a.b", "is": "eq|notEq|lt|ltEq|gt|gtEq", "value": .., "use": [..]}, where `use` is any of
        stats, dictionary, bloom, column index, rows; all of them if it is left out.
        """
        return self.ask("count", source=_file(path, keys), filter=filter)

    def splits(self, path: Path, keys: Hadoop, ranges: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
        """What each task gets that reads a range [start, end) of the file: row_groups (ordinals), offsets, rows."""
        return self.ask("splits", source=_file(path, keys), ranges=list(ranges))["tasks"]


def _file(path: Path, keys: Hadoop = None) -> dict[str, Any]:
    return {"path": str(path), "conf": hadoop_conf(keys)}


# ---------------------------------------------------------------- pyarrow


def pyarrow_read(source: Any, keys: PmeKeys | None = None, columns: Sequence[str] | None = None) -> Any:
    """A path or file. pyarrow takes no column keys: of the columns it can be asked for those of the footer key."""
    decryption = None
    if keys is not None:
        decryption = pe.create_decryption_properties(keys.footer, aad_prefix=keys.aad_prefix)
    with pq.ParquetFile(source, decryption_properties=decryption, page_checksum_verification=True) as file:
        return file.read(columns=columns)


def pyarrow_write(table: Any, target: Any, keys: PmeKeys, **options: Any) -> None:
    if keys.columns:
        raise ValueError("pyarrow takes no column keys")
    encryption = pe.create_encryption_properties(
        keys.footer,
        aad_prefix=keys.aad_prefix,
        store_aad_prefix=keys.store_aad_prefix,
        encryption_algorithm=keys.algorithm,
        plaintext_footer=keys.plaintext_footer,
    )
    pq.write_table(table, target, encryption_properties=encryption, **options)


class MemoryKms(pe.KmsClient):  # type: ignore[name-defined]
    """The KMS of jvm/Keys.scala, and so of parquet's InMemoryKMS, for pyarrow."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._keys = {name: base64.b64decode(key) for name, key in config.custom_kms_conf.items()}

    def _aes(self, master_key: str) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if master_key not in self._keys:
            raise PermissionError(f"no master key {master_key}")
        return AESGCM(self._keys[master_key])

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        nonce = os.urandom(12)
        sealed = self._aes(master_key_identifier).encrypt(nonce, key_bytes, master_key_identifier.encode())
        return base64.b64encode(nonce + sealed)

    def unwrap_key(self, wrapped_key: str | bytes, master_key_identifier: str) -> bytes:
        sealed = base64.b64decode(wrapped_key)
        return self._aes(master_key_identifier).decrypt(sealed[:12], sealed[12:], master_key_identifier.encode())


def _factory(master_keys: Mapping[str, bytes]) -> tuple[Any, Any]:
    connection = pe.KmsConnectionConfig(
        custom_kms_conf={name: base64.b64encode(key).decode() for name, key in master_keys.items()}
    )
    return pe.CryptoFactory(MemoryKms), connection


def pyarrow_factory_read(
    path: Path, master_keys: Mapping[str, bytes], columns: Sequence[str] | None = None, external: bool = False
) -> Any:
    """By pyarrow's CryptoFactory, from PKMT1 key material in the file, or beside it."""
    factory, connection = _factory(master_keys)
    more = {"parquet_file_path": str(path)} if external else {}
    decryption = factory.file_decryption_properties(connection, pe.DecryptionConfiguration(), **more)
    with pq.ParquetFile(path, decryption_properties=decryption, page_checksum_verification=True) as file:
        return file.read(columns=columns)


def pyarrow_factory_write(
    table: Any,
    path: Path,
    master_keys: Mapping[str, bytes],
    footer_key: str,
    *,
    options: Mapping[str, Any] | None = None,
    **config: Any,
) -> None:
    """config: of pyarrow's EncryptionConfiguration, such as column_keys={id: [path]}; options: of write_table."""
    factory, connection = _factory(master_keys)
    encryption = pe.EncryptionConfiguration(footer_key=footer_key, **config)
    more = {} if config.get("internal_key_material", True) else {"parquet_file_path": str(path)}
    properties = factory.file_encryption_properties(connection, encryption, **more)
    pq.write_table(table, path, encryption_properties=properties, **(options or {}))


def old_pyarrow(version: str) -> Path:
    """The folder of another pyarrow, by the lock in .ci; it is downloaded once per machine."""
    lock = HERE.parent / ".ci" / f"requirements-pyarrow-{version}.txt"
    if not lock.exists():
        pytest.skip("needs the lock of this pyarrow, which is in the source tree")
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]

    def install(folder: Path) -> None:
        more = ["--require-hashes", "--only-binary", ":all:", "--target", str(folder), "-r", str(lock)]
        run([*pip, *more], f"pyarrow {version} cannot be installed")

    return cached(f"pyarrow-{version}-{sys.implementation.cache_tag}-{digest[:16]}", install)


def with_old_pyarrow(version: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of this module, called where an older pyarrow is imported. It takes and gives tables; PeerError if it
    raises.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(old_pyarrow(version)), str(HERE)])}
    call = pickle.dumps((version, function.__name__, [_packed(arg) for arg in args], kwargs))
    program = "import parquet_peers; parquet_peers._answer()"
    done = subprocess.run([sys.executable, "-c", program], input=call, env=env, capture_output=True, timeout=100)
    if done.returncode != 0:
        raise PeerError(done.stderr.decode()[-2000:])
    return _unpacked(pickle.loads(done.stdout))


@dataclass
class _Packed:
    """A table as any pyarrow reads it."""

    stream: bytes


def _packed(value: Any) -> Any:
    if not isinstance(value, pa.Table):
        return value
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, value.schema) as writer:
        writer.write_table(value)
    return _Packed(sink.getvalue())


def _unpacked(value: Any) -> Any:
    return pa.ipc.open_stream(value.stream).read_all() if isinstance(value, _Packed) else value


def _answer() -> NoReturn:
    """What the child of `with_old_pyarrow` does."""
    version, name, args, kwargs = pickle.load(sys.stdin.buffer)
    assert pa.__version__.split(".")[0] == version, pa.__version__
    result = globals()[name](*[_unpacked(arg) for arg in args], **kwargs)
    sys.stdout.buffer.write(pickle.dumps(_packed(result)))
    sys.stdout.flush()
    os._exit(0)  # old ones sometimes abort when they are unloaded, as threads of theirs still run


# ---------------------------------------------------------------- polars


def polars_read(source: Any, keys: PmeKeys | None = None, columns: Sequence[str] | None = None) -> Any:
    """By polars' own reader. A path that is a tuple cannot be told to it."""
    pl = pytest.importorskip("polars")
    decryption = None
    if keys is not None:
        from polars.io.parquet import ParquetDecryptionProperties

        by_column = {path: key for path, key in keys.columns.items() if key is not None}
        decryption = ParquetDecryptionProperties(
            footer_key=keys.footer,
            column_keys=by_column,  # type: ignore[arg-type]
            aad_prefix=keys.aad_prefix,
        )
    return pl.read_parquet(source, columns=columns, decryption=decryption).to_arrow()


def polars_write(table: Any, path: Path, keys: PmeKeys, **options: Any) -> None:
    """Columns that are not named stay in the open, unless none is."""
    pl = pytest.importorskip("polars")
    encryption = pl.ParquetEncryptionProperties(
        footer_key=keys.footer,
        column_keys=dict(keys.columns),
        plaintext_footer=keys.plaintext_footer,
        aad_prefix=keys.aad_prefix,
        store_aad_prefix=keys.store_aad_prefix and keys.aad_prefix is not None,
    )
    pl.from_arrow(table).write_parquet(path, encryption=encryption, **options)


# ---------------------------------------------------------------- DuckDB, fastparquet


@contextlib.contextmanager
def _duckdb(key: bytes | None = None) -> Any:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(config={"threads": 2}) as connection:
        if key is not None:
            # What writes is its own cipher, which says of itself that its random numbers are not good: enough here,
            # and the other one is an extension to be downloaded.
            connection.execute("SET force_mbedtls_unsafe = 'true'")
            # A text of 16, 24 or 32 bytes is taken for the key; only of another length it is read as base64.
            text = key.decode("ascii") if len(key) < 32 else base64.b64encode(key).decode()
            connection.execute("PRAGMA add_parquet_key('key', '{}')".format(text.replace("'", "''")))
        yield connection


def duckdb_read(path: Path, key: bytes | None = None) -> Any:
    """By DuckDB's own reader, which opens little of what the spec has. A key of 16 or 24 bytes must be ASCII."""
    config = ", encryption_config={footer_key: 'key'}" if key is not None else ""
    with _duckdb(key) as connection:
        return connection.sql(f"SELECT * FROM read_parquet('{path}'{config})").to_arrow_table()


def duckdb_write(table: Any, path: Path, key: bytes) -> None:
    """In DuckDB's own dialect: no AAD, no file_unique, lengths without framing."""
    with _duckdb(key) as connection:
        connection.register("source", table)
        connection.execute(f"COPY source TO '{path}' (FORMAT parquet, ENCRYPTION_CONFIG {{footer_key: 'key'}})")


def duckdb_read_through(filesystem: Any, url: str, columns: Sequence[str] = ("*",), where: str = "true") -> Any:
    """A plaintext file, as an fsspec filesystem shows it."""
    with _duckdb() as connection:
        connection.register_filesystem(filesystem)
        query = f"SELECT {', '.join(columns)} FROM read_parquet('{url}') WHERE {where}"
        return connection.sql(query).to_arrow_table()


def duckdb_read_object(file: Any) -> Any:
    """A plaintext file, as a seekable object shows it; DuckDB copies it first."""
    with _duckdb() as connection:
        return connection.read_parquet(file).to_arrow_table()


def fastparquet_read(source: Any, columns: Sequence[str] | None = None) -> Any:
    """A plaintext file, by path or as a seekable object."""
    fastparquet = pytest.importorskip("fastparquet")
    return pa.Table.from_pandas(fastparquet.ParquetFile(source).to_pandas(columns=columns), preserve_index=False)
