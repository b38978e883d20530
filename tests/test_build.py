"""What is in the built module and in csrc's objects, and what must not be."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ags_fast import _core

ROOT = Path(__file__).resolve().parents[1]
MODULE = Path(_core.__file__)
CSRC = ROOT / "csrc"
LIBCRYPTO = {"aead.c", "choice.c"}  # who calls it
MACOS = sys.platform == "darwin"

needs_nm = pytest.mark.skipif(not shutil.which("nm"), reason="no nm here (binutils)")
needs_source = pytest.mark.skipif(not CSRC.is_dir(), reason="no source tree here: an installed package is tested")


def symbols(*arguments: str) -> set[str]:
    """Names of the symbols that nm lists with these arguments."""
    listing = subprocess.run(["nm", *arguments], check=True, capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in listing.splitlines() if len(line.split()) > 1}
    return {name.removeprefix("_") for name in names} if MACOS else names


@needs_nm
def test_module_exports_its_init_function_only() -> None:
    """Nothing of libcrypto above all: another module of the process may bring its own."""
    assert symbols(*(["-gU"] if MACOS else ["-D", "--defined-only"]), str(MODULE)) == {"PyInit__core"}


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("readelf"), reason="no readelf here (binutils)")
def test_module_needs_no_other_libcrypto() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(MODULE)], check=True, capture_output=True, text=True).stdout
    libraries = re.findall(r"\(NEEDED\).*\[(.*)]", dynamic)
    assert any("libcrypto" in library for library in libraries) is not _core.libcrypto_bundled, libraries
    assert not any("libssl" in library for library in libraries), libraries


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """csrc compiled as for the module, each file by itself."""
    record = ROOT / "build" / "libcrypto.json"
    cc = os.environ.get("CC", "cc").split()
    if not record.is_file():
        pytest.skip(f"{record.relative_to(ROOT)} is not there: the module was not built in this tree")
    if not shutil.which(cc[0]):
        pytest.skip(f"no {cc[0]} here")
    built = json.loads(record.read_text())
    flags = [*built["cflags"], *(f"-I{path}" for path in built["include_dirs"]), f"-I{CSRC}"]
    flags += [f"-DAGSF_LIBCRYPTO_BUNDLED={int(built['bundled'])}"]
    folder = tmp_path_factory.mktemp("csrc")
    made = {}
    for source in sorted(CSRC.rglob("*.c")):
        made[source.name] = folder / source.with_suffix(".o").name
        subprocess.run([*cc, *flags, "-c", str(source), "-o", str(made[source.name])], check=True)
    return made


@needs_nm
@needs_source
def test_objects_export_one_prefix(objects: dict[str, Path]) -> None:
    exported = {
        name: symbols("-gU" if MACOS else "-g", *([] if MACOS else ["--defined-only"]), str(path))
        for name, path in objects.items()
    }
    assert all(exported.values()), exported
    assert {name for names in exported.values() for name in names if not name.startswith("agsf_")} == set()


@needs_nm
@needs_source
def test_who_calls_libcrypto(objects: dict[str, Path]) -> None:
    """The only way to libcrypto is the one whose locks a fork waits for. Under them aead.c calls choice.c, once."""
    libcrypto = re.compile(r"(EVP|RAND|ERR|OPENSSL|OpenSSL|OSSL|CRYPTO)_")
    callers = {name for name, path in objects.items() if any(map(libcrypto.match, symbols("-u", str(path))))}
    assert callers == LIBCRYPTO


@needs_source
@pytest.mark.parametrize("path", sorted(CSRC.rglob("*.[ch]")), ids=lambda path: path.name)
def test_layers(path: Path) -> None:
    """csrc is C alone, in layers: what includes what is part of the design."""
    included = set(re.findall(r"^ *# *include *[<\"](.+)[>\"]", path.read_text(), re.MULTILINE))
    assert not any("Python" in header for header in included)
    if path.name not in LIBCRYPTO:
        assert not any(header.startswith("openssl/") for header in included)
    if path.name.startswith(("pool", "fileio")):
        assert "aead.h" not in included
