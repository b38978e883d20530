"""The tour's Parquet chapter: a file with keys for two of its columns, read by pyarrow and by Spark's parquet-java."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
import subprocess
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from ags_fast import IntegrityError, cli, parquet
from ags_fast.keys import load_kms
from ags_fast.keys.kms import local
from ags_fast.parquet import keytools
from benchmarks.measure import Contest, Row, Run, speed
from benchmarks.parquet import fresh, table

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from pyarrow.parquet.encryption import CryptoFactory
    from pyspark.sql import DataFrame, SparkSession

    from benchmarks.tour.steps import Steps

# --------------------------------------------------------------------------------------- what a user would write

FOOTER_KEY, COLUMN_KEYS = "orders", {"customers": ["customer"], "prices": ["price"]}  # master keys, and their columns


def read_with_pyarrow(path: Path, kms: dict[str, str]) -> pa.Table:
    """By pyarrow's own decryption. All it needs of us is to ask the KMS."""
    import pyarrow.parquet.encryption as pe

    client = load_kms(kms)

    class Kms(pe.KmsClient):
        def __init__(self, config: pe.KmsConnectionConfig) -> None:
            super().__init__()

        def wrap_key(self, key: bytes, master_key: str) -> bytes:
            return base64.b64encode(client.wrap_key(key, master_key))

        def unwrap_key(self, wrapped: str, master_key: str) -> bytes:
            return client.unwrap_key(base64.b64decode(wrapped), master_key)

    factory: CryptoFactory = pe.CryptoFactory(Kms)
    return pq.read_table(path, decryption_properties=factory.file_decryption_properties(pe.KmsConnectionConfig()))


def read_with_spark(spark: SparkSession, path: Path, kms: dict[str, str]) -> DataFrame:
    """By the decryption of Spark's parquet-java, which asks the class in jvm/LocalKeystore.scala."""
    return spark.read.options(
        **{
            "parquet.crypto.factory.class": "org.apache.parquet.crypto.keytools.PropertiesDrivenCryptoFactory",
            "parquet.encryption.kms.client.class": "ags.tour.LocalKeystore",
            "kms.local.path": kms["kms.local.path"],
            "kms.local.key-file": kms["kms.local.key-file"],
        }
    ).parquet(str(path))


# ---------------------------------------------------------------------------------------------------- for the JVM

SOURCE = Path(__file__).parents[1] / "jvm" / "LocalKeystore.scala"


def jvm_classes() -> Path | None:
    """The folder with the compiled LocalKeystore.scala: made once per machine, by the compiler that comes with pyspark.

    None if that cannot be done here.
    """
    with contextlib.suppress(OSError):
        return _compiled()
    return None


def _compiled() -> Path | None:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    jars = Path(spec.origin).with_name("jars")
    tools = sorted(jar.name for name in ("scala-compiler", "parquet-hadoop") for jar in jars.glob(f"{name}-*.jar"))
    digest = hashlib.sha256("\n".join([*tools, SOURCE.read_text()]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ags_fast"
    folder = cache / f"tour-{digest[:16]}"
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{folder.name}.lock", "w") as lock, tempfile.TemporaryDirectory(dir=cache) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = Path(work) / "made"
            made.mkdir()
            scalac = [java, "-cp", f"{jars}/*", "scala.tools.nsc.Main", "-usejavacp", "-d", str(made), str(SOURCE)]
            if subprocess.run(scalac, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0:
                return None
            made.rename(folder)
    return folder


# -------------------------------------------------------------------------------------------------------- the tour


def chapter(
    spark: SparkSession, steps: Steps, kms: dict[str, str], folder: Path, rows: int, rounds: int, classes: Path | None
) -> None:
    """Encrypt, inspect, read, re-key, verify and decrypt a Parquet file of `rows` rows; rounds: of the table."""
    folder.mkdir(parents=True, exist_ok=True)
    plain, sealed, rekeyed, opened = (
        folder / name for name in ("orders.parquet", "encrypted.parquet", "rekeyed.parquet", "decrypted.parquet")
    )
    data = _write(steps, kms, plain, rows)
    factory = keytools.CryptoFactory(kms)
    with steps.step("It is encrypted, two columns with keys of their own"):
        keys = factory.encryption_keys(FOOTER_KEY, COLUMN_KEYS)
        report = parquet.encrypt_file(plain, sealed, keys, plaintext_footer=True)
    size = plain.stat().st_size
    more = report.file_length - size
    steps.say(
        f"{sum(column.modules for column in report.columns):,} modules; {more:,} bytes more, {100 * more / size:.3f} %"
    )
    steps.say("`ags-fast parquet inspect`, which has no keys:\n")
    print_inspection(sealed)

    _read(steps, kms, factory, sealed, data, report.file_length)
    if classes is None:
        steps.say("Spark's parquet-java is left out: its KMS client could not be compiled")
    else:
        with steps.step("Spark reads it, with parquet-java's decryption"):
            problem = differs(spark.read.parquet(str(plain)), read_with_spark(spark, sealed, kms))
        steps.check(f"{rows:,} rows, equal to the original's", problem)

    with steps.step("It is given new keys, without plaintext on the way"):
        new_keys = factory.encryption_keys(FOOTER_KEY, COLUMN_KEYS)
        parquet.reencrypt_file(sealed, rekeyed, factory.retriever(), new_keys)
    _check(steps, factory, keys, rekeyed)
    with steps.step("It is decrypted"):
        parquet.decrypt_file(rekeyed, opened, factory.retriever())
        problem = _same(pq.read_table(opened), data)
    steps.check("a plain Parquet file again, equal to the original", problem)
    if rounds:
        with steps.step("Side by side with pyarrow, which reads and writes"):
            measured = compare(plain, sealed, rekeyed, opened, keys, new_keys, rounds)
        print_table(measured)


def _same(read: pa.Table, data: pa.Table) -> str:
    return "" if read.equals(data) else "what was read is not what was written"


def _write(steps: Steps, kms: dict[str, str], path: Path, rows: int) -> pa.Table:
    """Write the plain file, and make the master keys of its columns."""
    with steps.step(f"pyarrow writes {rows:,} rows to a Parquet file"):
        data = table(rows)
        pq.write_table(data, path, row_group_size=max(1, -(-rows // 4)))
        for key_id in COLUMN_KEYS.keys() - {key["key_id"] for key in local.status(kms)["keys"]}:
            local.create_key(kms, key_id)
    found = pq.read_metadata(path)
    steps.say(f"{path.stat().st_size / 1e6:,.1f} MB, {found.num_columns} columns x {found.num_row_groups} row groups")
    return data


def _read(
    steps: Steps, kms: dict[str, str], factory: keytools.CryptoFactory, sealed: Path, data: pa.Table, length: int
) -> None:
    """Read the file with pyarrow's own decryption, and a column of it through the plaintext view."""
    with steps.step("pyarrow reads it, with its own decryption"):
        problem = _same(read_with_pyarrow(sealed, kms), data)
    steps.check(f"{data.num_rows:,} rows, equal to the original's", problem)
    with (
        steps.step("pyarrow reads a column as if nothing was encrypted"),
        parquet.open_plain(sealed, factory.retriever()) as file,
    ):
        column = pq.read_table(file, columns=["price"])
        problem = "" if column.equals(data.select(["price"])) else "the column is not the original's"
        decrypted = file.decrypted
    steps.check(f"equal; of {length:,} bytes {decrypted:,} were decrypted", problem)


def _check(steps: Steps, factory: keytools.CryptoFactory, old_keys: parquet.Keys, rekeyed: Path) -> None:
    """Verify the re-keyed file, also after a bit is flipped and with the old keys."""
    with steps.step("Every tag of it is checked, also after a bit is flipped"):
        report = parquet.verify(rekeyed, factory.retriever())
        try:
            parquet.verify(flipped(rekeyed), factory.retriever())
            noticed = ""
        except IntegrityError as error:
            noticed = f"{type(error).__name__}, {str(error).partition(':')[0].replace(' does not authenticate', '')}"
        try:
            parquet.verify(rekeyed, old_keys)
            problem = "the old keys open the new file"
        except IntegrityError:
            problem = ""
    modules = sum(column.modules for column in report.columns)
    steps.check(f"{modules:,} modules are authentic; the old keys open none of them", problem)
    steps.check(f"one bit flipped: {noticed}", "" if noticed else "one bit flipped: not detected")


def print_inspection(path: Path) -> None:
    text = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "75"  # what is left of the tour's width
    try:
        with contextlib.redirect_stdout(text):
            cli.main(["parquet", "inspect", str(path)])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    print(textwrap.indent(text.getvalue().strip(), " " * 6) + "\n")


def differs(one: DataFrame, other: DataFrame) -> str:
    """What is wrong if two frames have not the same rows, by their hashes."""
    from pyspark.sql import functions

    def digest(frame: DataFrame) -> Any:
        hashes = functions.xxhash64(*sorted(frame.columns))
        return frame.agg(functions.bit_xor(hashes), functions.count("*")).collect()

    return "" if digest(one) == digest(other) else "what Spark read is not what was written"


def flipped(path: Path) -> bytearray:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    return data


def compare(
    plain: Path, sealed: Path, rekeyed: Path, opened: Path, keys: parquet.Keys, new_keys: parquet.Keys, rounds: int
) -> list[Row]:
    """Ours, and pyarrow that decodes the values of a file and encodes them again, with one key."""
    import pyarrow.parquet.encryption as pe

    uniform, out = sealed.with_name("uniform.parquet"), sealed.with_name("out.parquet")
    key = os.urandom(16)
    parquet.encrypt_file(plain, uniform, parquet.Keys(key))

    def rewrite(source: Path, decrypt: bool, encrypt: bool) -> Callable[[], None]:
        def run() -> None:
            read = pq.read_table(
                source, decryption_properties=pe.create_decryption_properties(key) if decrypt else None
            )
            pq.write_table(read, out, encryption_properties=pe.create_encryption_properties(key) if encrypt else None)

        return run

    size = plain.stat().st_size
    rows = [Row(name, name, nbytes=size) for name in ("encrypt", "re-key", "decrypt")]
    runs: dict[tuple[str, str], Run] = {
        ("encrypt", "ours"): fresh(out, lambda: parquet.encrypt_file(plain, out, keys)),
        ("encrypt", "naive"): fresh(out, rewrite(plain, False, True)),
        ("re-key", "ours"): fresh(out, lambda: parquet.reencrypt_file(sealed, out, keys, new_keys)),
        ("re-key", "naive"): fresh(out, rewrite(uniform, True, True)),
        ("decrypt", "ours"): fresh(out, lambda: parquet.decrypt_file(sealed, out, keys)),
        ("decrypt", "naive"): fresh(out, rewrite(uniform, True, False)),
    }
    return Contest(rows, runs).measure(rounds)


def print_table(rows: list[Row]) -> None:
    size = rows[0].nbytes / 1e6
    print(f"\n   {f'MB/s, a Parquet file of {size:,.1f} MB':<42}{'ours':>7}{'pyarrow':>12}{'times as fast':>16}")
    for row in rows:
        ours, theirs = row.shown("ours"), row.shown("naive")
        ratio = speed(row.samples["ours"], row.samples["naive"])[0]
        print(f"   {row.label:<42}{1e3 * (ours or 0):>7,.0f}{1e3 * (theirs or 0):>12,.0f}{ratio:>15.1f}x")
    print()
