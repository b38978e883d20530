"""What ``ags-fast --version`` prints: the package, libcrypto, and the CPU features in use."""

from __future__ import annotations

import re

import ags_fast
from ags_fast import _core

# Bits of the words of OPENSSL_ia32cap, and of OPENSSL_armcap, as libcrypto's manual page OPENSSL_ia32cap has them.
X86_FEATURES = ((0, 33, "pclmulqdq"), (0, 57, "aes"), (1, 16, "avx512f"), (1, 41, "vaes"), (1, 42, "vpclmulqdq"))
ARM_FEATURES = ((0, 2, "aes"), (0, 5, "pmull"), (0, 11, "sha3"))


def cpu_features() -> list[str]:
    """Return the CPU features that libcrypto uses for AES-GCM."""
    name, _, text = (_core.libcrypto_cpu() or "").partition("=")
    words = [int(word, 16) for word in re.findall(r"0x([0-9a-fA-F]+)", text)]
    features = {"OPENSSL_ia32cap": X86_FEATURES, "OPENSSL_armcap": ARM_FEATURES}.get(name, ())
    return [feature for word, bit, feature in features if word < len(words) and words[word] >> bit & 1]


def libcrypto_text() -> str:
    """Return libcrypto's version and where this libcrypto comes from."""
    return f"{_core.openssl_version()} ({'bundled' if _core.libcrypto_bundled else 'system'})"


def version_text() -> str:
    """Return the lines of ``ags-fast --version``."""
    libcrypto, kernel = libcrypto_text(), ags_fast.crypto().kernel
    lines = [
        f"ags_fast {ags_fast.__version__}",
        f"libcrypto: {libcrypto}, AES-GCM: {kernel}",
        f"CPU features in use: {' '.join(cpu_features()) or 'unknown'}",
    ]
    release = re.match(r"OpenSSL (\d+)\.(\d+)", libcrypto)
    if release and (int(release[1]), int(release[2])) < (3, 5):
        lines.append("This libcrypto is the SLOW one: with vaes and avx512f, 3.5 seals more than twice as fast.")
    return "\n".join(lines)
