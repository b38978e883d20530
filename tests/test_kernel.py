"""Who does AES-GCM: `ags_fast.crypto()`, `ags-fast --version`, AGS_FAST_AES. How that is chosen: csrc/test_choice.c."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ags_fast

NAMES = {"openssl", "vaes128", "vaes256", "vaes512"}
SHOW = "import ags_fast; print(ags_fast.crypto().kernel)"


def run(value: str | None, *command: str) -> subprocess.CompletedProcess[str]:
    env = {name: text for name, text in os.environ.items() if name != "AGS_FAST_AES"}
    if value is not None:
        env["AGS_FAST_AES"] = value
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)


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
