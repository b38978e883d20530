"""The options of the data sources: parsed once, checked, and without any key.

Spark gives options as text, with names in lower case. On Spark Connect they are written to its records in clear, so a
value that looks like a key is refused, and no message repeats a value that may be one.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from ags_fast._secrets import check_no_secret
from ags_fast._types import KeyMaterial, OrShow
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, nbytes_of
from ags_fast.dataset.dataset import Dataset
from ags_fast.dataset.key_material import check_key_material
from ags_fast.keys.kms import load_kms
from ags_fast.keys.kms.names import merged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["METADATA_COLUMNS", "Place", "ReadOptions", "WriteOptions", "check"]

METADATA_COLUMNS = ("_file", "_key_id")
DECODERS = ("auto", "ags_fast", "datafusion", "polars", "fastavro")
SPLIT_NBYTES = 128 << 20  # as Spark's own file sources
ROWS_PER_FILE = 10_000_000

PLACE = ("path", "kms", "version", "minVersion", "pin", "keyStore", "storageOptions")
STREAM = ("startingVersion", "maxFilesPerTrigger")
READ = ("files", "columns", "splitBytes", "missing", "pushdown", "decoder", "maxBlockBytes", "metadata", "mergeSchema")
SEALING = ("wrappingKeyId", "columnKeys", "dekLength", "blockSize", "keyMaterial")
WRITE = (*SEALING, "codec", "rowsPerFile", "partitionBy", "ifExists")
SYNONYMS = {"compression": "codec", "maxrecordsperfile": "rowsperfile"}
NAMES = ("pin", "files", "columns", "partitionBy")  # of versions, files and columns, which look like anything
JSON = ("kms", "storageOptions", "columnKeys")
SPARKS = ("checkpointLocation",)  # what Spark itself puts among the options of a stream

ADVICE = (
    "options travel to Spark's tasks and records. Keep keys in a KMS and give its properties, and leave secrets of a "
    "storage to the environment of the driver and the executors"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """How to reach a dataset. Pickles; holds no key.

    Attributes:
        url: Its folder: a path, or a URL of fsspec.
        kms: The properties of the KMS.
        version: The version to read; None: the newest.
        min_version: The least number that the newest version may have.
        pin: What `Dataset.pin` said before.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec, without secrets.
    """

    url: str
    kms: dict[str, str] = field(repr=False)
    version: int | None = None
    min_version: int | None = None
    pin: str | None = None
    key_store: str | None = None
    storage_options: dict[str, Any] | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Place:
        """Take the options that name a dataset. The errors are those of `ReadOptions.of`."""
        given = _Given(options)
        if not given.text("path"):
            raise ValueError(
                "name the dataset: load(URL), save(URL), or the option path. A table of Spark's catalog (saveAsTable) "
                "forgets all options, so a dataset cannot be one: use save(URL), and a temporary view"
            )
        return cls(
            given.text("path") or "",
            given.kms(),
            given.number("version", 1),
            given.number("minVersion", 1),
            given.text("pin"),
            given.text("keyStore"),
            given.json("storageOptions"),
        )

    def open(self) -> Dataset:
        """Open the dataset. The errors are those of `Dataset.open`."""
        return Dataset.open(
            self.url,
            kms=self.kms,
            version=self.version,
            min_version=self.min_version,
            pin=self.pin,
            key_store=self.key_store,
            storage_options=self.storage_options,
        )


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read. Pickles; holds no key.

    Attributes:
        place: The dataset.
        files: A pattern of `fnmatch` that the paths of the files match; None: all files.
        columns: The columns to read; None: all.
        split_bytes: Bytes of plaintext that one task reads, about.
        missing: What becomes of columns whose master key the KMS refuses: "error", "hide" or "null".
        pushdown: Whether filters reach the reader.
        decoder: What decodes Avro: "auto", "ags_fast", "datafusion", "polars" or "fastavro".
        max_block_nbytes: The most bytes that a compressed block of Avro may have without the codec; 0: the default.
        metadata: Columns to add, of `METADATA_COLUMNS`.
        merge_schema: Whether the schema is made of all files, not of one.
        inferred: Whether the schema comes from `schema` of the source, not from the user.
        starting_version: Of a stream: the version whose files come first, "earliest" or "latest".
        max_files: Of a stream: about how many files one batch has; None: all that are new.
    """

    place: Place
    files: str | None = None
    columns: tuple[str, ...] | None = None
    split_bytes: int = SPLIT_NBYTES
    missing: OrShow = "error"
    pushdown: bool = False
    decoder: str = "auto"
    max_block_nbytes: int = 0
    metadata: tuple[str, ...] = ()
    merge_schema: bool = False
    inferred: bool = False
    starting_version: str = "earliest"
    max_files: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadOptions:
        """Take Spark's options.

        Raises:
            ValueError: An option is unknown, impossible, or looks like a key.
        """
        given = _Given(options).check((*PLACE, *READ, *STREAM, *SPARKS))
        metadata = given.names("metadata") or ()
        for name in metadata:
            if name not in METADATA_COLUMNS:
                raise ValueError(f"the option metadata names {', '.join(METADATA_COLUMNS)}, not {name!r}")
        return cls(
            Place.of(options),
            given.text("files"),
            given.names("columns"),
            given.size("splitBytes", SPLIT_NBYTES),
            given.choice("missing", get_args(OrShow)),
            given.flag("pushdown"),
            given.choice("decoder", DECODERS),
            given.size("maxBlockBytes", 0),
            metadata,
            given.flag("mergeSchema"),
            starting_version=given.starting_version(),
            max_files=given.number("maxFilesPerTrigger", 1),
        )


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write. Pickles; holds no key.

    Attributes:
        place: The dataset.
        wrapping_key_id: The master key of new files; None: the one in use.
        codec: The compression of the files; "": the format's default.
        column_keys: The master keys of columns with keys of their own, by dotted path.
        rows_per_file: The most rows of one file.
        partition_by: Columns whose values become folders.
        dek_length: Bytes of a data key: 16, 24 or 32.
        block_size: Bytes of plaintext in a block of an AGS1 file.
        if_exists: What becomes of a write to a dataset that has files: "write", "error", or "ignore" the write.
        key_material: "keytools": Spark's own reader opens the Parquet files, too (see docs/keys.md).
    """

    place: Place
    wrapping_key_id: str | None = None
    codec: str = ""
    column_keys: dict[str, str] = field(default_factory=dict)
    rows_per_file: int = ROWS_PER_FILE
    partition_by: tuple[str, ...] = ()
    dek_length: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE
    if_exists: str = "write"
    key_material: KeyMaterial | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> WriteOptions:
        """Take Spark's options. The errors are those of `ReadOptions.of`."""
        given = _Given(options).check((*PLACE, *WRITE, *SPARKS))
        column_keys = given.json("columnKeys") or {}
        if not all(isinstance(key_id, str) for key_id in column_keys.values()):
            raise ValueError('the option columnKeys is JSON: {"column": "id of a master key", ...}')
        dek_length = given.number("dekLength", 1) or 16
        if dek_length not in (16, 24, 32):
            raise ValueError(f"the option dekLength is 16, 24 or 32 bytes, not {dek_length}")
        key_material: Any = given.text("keyMaterial")
        check_key_material(key_material, dek_length)
        return cls(
            Place.of(options),
            given.text("wrappingKeyId"),
            given.text("codec") or "",
            column_keys,
            given.number("rowsPerFile", 1) or ROWS_PER_FILE,
            given.names("partitionBy") or (),
            dek_length,
            given.size("blockSize", DEFAULT_BLOCK_SIZE),
            given.choice("ifExists", ("write", "error", "ignore")),
            key_material,
        )


def check(options: Mapping[str, str]) -> None:
    """Refuse options that neither a read nor a write has, or that look like a key. Raises ValueError."""
    _Given(options).check((*PLACE, *READ, *STREAM, *WRITE, *SPARKS))


class _Given:
    """Spark's options by their names, whatever their case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        known = {name.lower(): name for name in (*PLACE, *READ, *STREAM, *WRITE, *SPARKS)}
        self._values: dict[str, str] = {}
        self._properties: dict[str, str] = {}
        self._unknown: dict[str, str] = {}
        for name, value in options.items():
            lower = SYNONYMS.get(name.lower(), name.lower())
            if lower in known:
                self._values[known[lower]] = value
            elif "." in name:
                self._properties[name] = value
            else:
                self._unknown[name] = value

    def check(self, names: tuple[str, ...]) -> _Given:
        """Return these options, if only these names and KMS properties are given, and nothing looks like a key."""
        texts = {name: text for name, text in self._values.items() if name not in (*JSON, *NAMES)}
        of_json: dict[str, Any] = {name: self.json(name) for name in JSON}
        of_json["columnKeys"] = list((of_json["columnKeys"] or {}).values())  # a column may have any name
        check_no_secret(self._unknown | self._properties | texts | of_json, "the options", ADVICE)
        for name in (*self._unknown, *(name for name in self._values if name not in names)):
            near = difflib.get_close_matches(name, names, 1, 0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(names)}"
            raise ValueError(f"there is no option {name!r} here: {hint}")
        return self

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def kms(self) -> dict[str, str]:
        """The properties of the KMS: options with a dot in their names, and those of the option kms, a JSON object."""
        properties = merged({name: str(one) for name, one in (self.json("kms") or {}).items()}, self._properties)
        if not properties:
            raise ValueError(
                "say which KMS has the keys: give its properties as options, such as "
                'option("encryption.kms-type", "aws")'
            )
        load_kms(properties)  # refuses unknown names and secrets
        return properties

    def flag(self, name: str) -> bool:
        text = self._values.get(name, "false").strip().lower()
        if text not in ("true", "false"):
            raise ValueError(f"the option {name} is true or false, not {text!r}")
        return text == "true"

    def choice(self, name: str, choices: tuple[Any, ...]) -> Any:
        text = self._values.get(name, choices[0]).strip().lower()
        if text not in choices:
            raise ValueError(f"the option {name} is {', '.join(choices)}, not {text!r}")
        return text

    def number(self, name: str, least: int) -> int | None:
        return self._parsed(name, lambda text: int(text), least, "a whole number")

    def starting_version(self) -> str:
        text = self._values.get("startingVersion", "earliest").strip().lower()
        if text not in ("earliest", "latest") and not (text.isdecimal() and int(text) > 0):
            raise ValueError(f"the option startingVersion is earliest, latest or a number from 1, not {text!r}")
        return text

    def size(self, name: str, default: int) -> int:
        """A number of bytes, such as 1048576, 1024k or 64m."""
        found = self._parsed(name, nbytes_of, 1, "a number of bytes, such as 134217728 or 128m")
        return default if found is None else found

    def names(self, name: str) -> tuple[str, ...] | None:
        """Names separated by commas, or a JSON list if a name has a comma."""
        text = self._values.get(name)
        if text is None:
            return None
        if text.lstrip().startswith("["):
            found = _json(name, text, list)
            if not all(isinstance(one, str) for one in found):
                raise ValueError(f"the option {name} is a JSON list of names")
            return tuple(found)
        return tuple(part.strip() for part in text.split(",") if part.strip())

    def json(self, name: str) -> dict[str, Any] | None:
        text = self._values.get(name)
        return None if text is None else _json(name, text, dict)

    def _parsed(self, name: str, parse: Callable[[str], int], least: int, what: str) -> int | None:
        text = self._values.get(name)
        if text is None:
            return None
        try:
            value = parse(text.strip())
        except ValueError:
            value = least - 1
        if value < least:
            raise ValueError(f"the option {name} is {what}, and at least {least}, not {text!r}")
        return value


def _json(name: str, text: str, kind: type[T]) -> T:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, kind):
        raise ValueError(f"the option {name} is a JSON {'object' if kind is dict else 'list'}")
    return found
