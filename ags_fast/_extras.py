"""What optional parts need that is not installed: one place for the words of all errors about that."""

from __future__ import annotations

import sys
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["explained", "explaining", "install", "lacks", "require"]

PACKAGES = {  # that parts import, by the extra that brings them
    "azure": ("adlfs", "azure"),
    "files": ("fastavro", "fsspec", "fuse", "pyarrow"),
    "gcs": ("gcsfs", "google", "google_crc32c", "requests"),
    "iceberg": ("pyiceberg",),
    "kms": ("hvac", "pkcs11"),
    "s3": ("boto3", "s3fs"),
    "spark": ("pyspark",),
    "sql": ("sqlalchemy",),
}
EXTRAS = {package: extra for extra, packages in PACKAGES.items() for package in packages}


def install(extra: str) -> str:
    """Return the command that installs an extra, from where ags_fast itself was installed."""
    import json
    import shlex
    from importlib.metadata import distributions
    from urllib.parse import unquote, urlsplit

    wanted = f"ags_fast[{extra}]"
    origins = (found.read_text("direct_url.json") for found in distributions(name="ags_fast"))
    origin = next(filter(None, origins), None)
    if origin is not None:  # not from an index: a checkout, or a file
        url = json.loads(origin)["url"]
        parts = urlsplit(url)
        wanted = f"{unquote(parts.path)}[{extra}]" if parts.scheme == "file" else f"{wanted} @ {url}"
    return f"pip install {shlex.quote(wanted)}"


def lacks(part: str, package: str, extra: str | None = None, why: object = None) -> ModuleNotFoundError:
    """Return the error of a part, the beginning of a sentence, whose package is missing or does not load.

    `extra` has the package; None: the one of EXTRAS. The message quotes the error `why`.
    """
    quoted = "" if why is None else f" ({why})"
    command = install(extra or EXTRAS[package.partition(".")[0]])
    return ModuleNotFoundError(f"{part} needs {package}{quoted}: {command}", name=package)


def explained(error: ImportError, part: str) -> ImportError:
    """Return an error that says what to install, if a package of an extra is missing; else the same error."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package in EXTRAS and str(error).startswith("No module named"):
        return lacks(part, package)
    return error


@contextmanager
def explaining(part: str) -> Iterator[None]:
    """Raise errors of the imports in the ``with`` block as `explained` has them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise explained(error, part) from None


def require(package: str, part: str) -> None:
    """Raise ModuleNotFoundError, which says what to install, if a package is missing. The package is not imported."""
    if package in sys.modules:
        return
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise lacks(part, package)
