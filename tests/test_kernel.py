"""Who does AES-GCM: `ags_fast.crypto()`, `ags-fast --version`, AGS_FAST_AES.

How that is chosen: csrc/test_choice.c and csrc/test_provider.c.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ags_fast

NAMES = {"openssl", "vaes128", "vaes256", "vaes512"}
SHOW = "import ags_fast; print(ags_fast.crypto().kernel)"
KNOWN_ANSWER = bytes.fromhex("0388dace60b6a392f328c2b971b2fe78")  # in choice.c
linux = pytest.mark.skipif(sys.platform != "linux", reason="a changed module has no signature")


def run(value: str | None, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: text for name, text in os.environ.items() if name not in {"AGS_FAST_AES", "PYTHONWARNINGS"}} | environ
    if value is not None:
        env["AGS_FAST_AES"] = value
    return subprocess.run([sys.executable, "-P", *command], env=env, capture_output=True, text=True)


def features() -> set[str]:
    """What the CPU has, and the system uses, by the names of Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return set()
    return set(next((line.split() for line in text.splitlines() if line.startswith("flags")), []))


def test_what_runs() -> None:
    crypto = ags_fast.crypto()
    assert ags_fast.openssl_version().startswith(f"{crypto.library} {crypto.version} ")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", crypto.version)
    assert crypto.kernel in NAMES
    assert crypto.fips is False
    assert repr(crypto).startswith("Crypto(library='OpenSSL', version='")
    with pytest.raises(AttributeError):
        crypto.kernel = "openssl"  # type: ignore[misc]


@pytest.mark.skipif(platform.machine() != "x86_64" or not features(), reason="which kernel there is: x86-64 Linux")
def test_the_environment_chooses() -> None:
    has = features()
    by_default = "vaes256" if {"vaes", "vpclmulqdq", "avx2"} <= has else "openssl"
    widest = "vaes512" if {"vaes", "vpclmulqdq", "avx512f", "avx512bw"} <= has else by_default
    if by_default == "openssl" and {"aes", "pclmulqdq", "avx"} <= has:
        widest = "vaes128"
    for value, kernel in ((None, by_default), ("auto", by_default), ("openssl", "openssl"), ("vaes", widest)):
        done = run(value, "-W", "error", "-c", SHOW)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, kernel, ""), value
        assert f", AES-GCM: {kernel}\n" in run(value, "-m", "ags_fast", "--version").stdout


def test_another_word_is_refused() -> None:
    done = run("aesni", "-c", SHOW)
    assert done.returncode == 1
    assert "AGS_FAST_AES must be auto, openssl or vaes" in done.stderr.splitlines()[-1]


def test_what_one_seals_the_other_opens() -> None:
    program = (
        "import sys, ags_fast; codec = ags_fast.AgsCodec(bytes(16), block_size=1000, aad_prefix=b'a')\n"
        "data = bytes(range(256)) * 20\n"
        "if len(sys.argv) == 1: print(codec.encrypt(data).hex())\n"
        "else: sealed = bytes.fromhex(sys.argv[1]); print(codec.decrypt(sealed, length=len(sealed)) == data)"
    )
    for first, then in (("openssl", "vaes"), ("vaes", "openssl")):
        sealed = run(first, "-c", program).stdout.strip()
        assert run(then, "-c", program, sealed).stdout.strip() == "True"


@pytest.fixture
def failing(tmp_path: Path) -> str:
    """A folder with this package, whose kernel does not make the known answer."""
    if run("vaes", "-c", SHOW).stdout == "openssl\n":
        pytest.skip("this CPU, or this build, has no kernel")
    folder = Path(ags_fast.__file__).parent
    shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    (module,) = (tmp_path / folder.name).glob("_core.*.so")
    assert module.read_bytes().count(KNOWN_ANSWER) == 1
    module.write_bytes(module.read_bytes().replace(KNOWN_ANSWER, bytes(16)))
    return str(tmp_path)


@linux
def test_a_kernel_that_fails_its_self_test_is_not_used_and_python_warns(failing: str) -> None:
    program = (
        f"{SHOW}; print(ags_fast.__file__); codec = ags_fast.AgsCodec(bytes(16), aad_prefix=b'a')\n"
        "sealed = codec.encrypt(b'text'); print(codec.decrypt(sealed, length=len(sealed)))"
    )
    done = run("vaes", "-c", program, PYTHONPATH=failing)
    assert done.stdout.split() == ["openssl", str(Path(failing, "ags_fast", "__init__.py")), "b'text'"]
    place, warning = done.stderr.splitlines()[0].split(": ", 1)
    assert Path(place.rpartition(":")[0]).parent == Path(failing, "ags_fast")
    assert warning == (
        "RuntimeWarning: ags_fast's own AES-GCM failed its self-test on this CPU, so libcrypto's is used: "
        "please report that. AGS_FAST_AES=openssl turns this warning off"
    )
    assert done.stderr.count("\n") == 1  # once
    done = run("vaes", "-m", "ags_fast", "--version", PYTHONPATH=failing)
    assert ", AES-GCM: openssl\n" in done.stdout
    assert done.stderr.startswith("ags-fast: warning: ags_fast's own AES-GCM failed its self-test")
    for value, off in (("openssl", "error"), ("vaes", "ignore::RuntimeWarning:ags_fast._core")):
        done = run(value, "-c", SHOW, PYTHONPATH=failing, PYTHONWARNINGS=off)
        assert (done.returncode, done.stdout, done.stderr) == (0, "openssl\n", "")


def test_a_configuration_of_the_machine(tmp_path: Path) -> None:
    """The bundled libcrypto reads none. The system's has no AES-GCM if FIPS is asked for and no provider has that."""
    config = tmp_path / "openssl.cnf"
    config.write_text(
        "openssl_conf = all\n[all]\nalg_section = algorithms\n[algorithms]\ndefault_properties = fips=yes\n"
    )
    without = run(None, "-m", "ags_fast", "--version")
    done = run(None, "-m", "ags_fast", "--version", OPENSSL_CONF=str(config))
    if "(bundled)" in without.stdout:
        assert (done.stdout, done.stderr) == (without.stdout, "")
    else:
        assert "libcrypto cannot be used: it lacks AES-GCM" in done.stderr
