"""What is in the built module and in csrc's objects, and what must not be."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

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


SLOW = "3.0.19"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a build finds a slow libcrypto and a compiler, no network, and no tool but those in this folder."""
    compiler = shutil.which(os.environ.get("CC", "cc").split()[0])
    if compiler is None:
        pytest.skip("no C compiler here")
    for name in ("AGS_FAST_OPENSSL", "AGS_FAST_OPENSSL_SOURCE", "OPENSSL_ROOT_DIR", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    header = tmp_path / "include" / "openssl" / "opensslv.h"
    header.parent.mkdir(parents=True)
    header.write_text(f'#define OPENSSL_VERSION_STR "{SLOW}"\n')
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("CPATH", str(tmp_path / "include"))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    return tools


def build() -> dict[str, Any]:
    """The names of setup.py."""
    return runpy.run_path(str(ROOT / "setup.py"))


@needs_source
def test_a_build_without_tools_names_them(machine: Path) -> None:
    """In place of the system's libcrypto, which would be slow for ever: pip shows no warning of a build."""
    setuptools = pytest.importorskip("setuptools")
    with pytest.raises(setuptools.errors.SetupError) as raised:
        build()["check_prerequisites"]()
    message = str(raised.value)
    assert re.search(r"make \(make\), tar \(tar\), perl .*\(perl\)", message), message
    assert f"OpenSSL {SLOW}. To use it all the same: AGS_FAST_OPENSSL=system" in message
    assert "AGS_FAST_OPENSSL_SOURCE" in message
    assert "libssl-dev" in message


@needs_source
@pytest.mark.parametrize("wish", ["", "bundled"])
def test_an_offline_build_says_what_to_do(wish: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    for name in ("make", "tar", "perl"):
        found = shutil.which(name, path=os.defpath)
        if found is None:
            pytest.skip(f"no {name} here")
        (machine / name).symlink_to(found)
    monkeypatch.setenv("AGS_FAST_OPENSSL", wish)
    with pytest.raises(setuptools.errors.SetupError) as raised:
        build()["choose_libcrypto"]()
    message = str(raised.value)
    assert "no source of OpenSSL 3.5 was found" in message, message
    assert "AGS_FAST_OPENSSL=system" in message
    assert "AGS_FAST_OPENSSL_SOURCE" in message


@needs_source
def test_a_slow_libcrypto_is_used_where_asked_for(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("setuptools")
    monkeypatch.setenv("AGS_FAST_OPENSSL", "system")
    names = build()
    names["check_prerequisites"]()
    chosen = names["choose_libcrypto"]()
    assert (chosen.version, chosen.bundled) == (SLOW, False)
    assert f"SLOW libcrypto: {SLOW}" in capsys.readouterr().err


@needs_source
def test_a_slow_libcrypto_in_a_named_folder(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setenv("OPENSSL_ROOT_DIR", str(machine.parent))
    with pytest.raises(setuptools.errors.SetupError, match=f"OpenSSL {SLOW}, which is slow.*AGS_FAST_OPENSSL=system"):
        build()["choose_libcrypto"]()


@needs_source
def test_a_fast_libcrypto_needs_no_tools(machine: Path) -> None:
    pytest.importorskip("setuptools")
    (machine.parent / "include" / "openssl" / "opensslv.h").write_text('#define OPENSSL_VERSION_STR "3.5.1"\n')
    names = build()
    names["check_prerequisites"]()
    assert not names["choose_libcrypto"]().bundled


@needs_source
@pytest.mark.parametrize("repository", ["", "https://example.com/owner/name"])
def test_the_page_on_pypi_has_no_broken_link(repository: str) -> None:
    pytest.importorskip("setuptools")
    names, text = build(), (ROOT / "README.md").read_text()
    page = names["readme"](text, repository)
    targets = re.findall(r"\[[^\]]*\]\(([^)]*)\)|(?:src|srcset)=\"([^\"]*)\"", page)
    relative = [one or other for one, other in targets if not (one or other).startswith(("https:", "#"))]
    assert relative == []
    assert bool(targets) == bool(repository)
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(page) == blocks.findall(text)
    for one, _ in targets:  # each is a file of the tree
        assert (ROOT / one.removeprefix(f"{repository}/blob/v{names['VERSION']}/").partition("#")[0]).exists(), one
    assert all(
        url.startswith(f"{repository}/") or url == repository for url in names["project_urls"](repository).values()
    )


@needs_source
def test_where_the_licences_are() -> None:
    """In the source, and so in each wheel: OpenSSL's, because wheels link it, and the notice about both."""
    pytest.importorskip("setuptools")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {str(path.relative_to(ROOT)) for pattern in project["license-files"] for path in ROOT.glob(pattern)}
    assert found == {"LICENSE", "NOTICE", "licenses/OPENSSL.txt"}
    assert "5D002" in (ROOT / "NOTICE").read_text()
