"""What compilers make of csrc/vaes. One decision of a compiler can cost 15 % of the speed without a wrong byte.

So the instructions of the loops over whole batches are counted. That needs no quiet machine, and no CPU that has them.
How fast they are: benchmarks/kernel.sh, and the rows "kernel" of `python -m benchmarks`.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT_WITH = ROOT / "build" / "libcrypto.json"  # written by setup.py
COMPILERS = ("gcc", "clang")
WIDTHS = (128, 256, 512)

pytestmark = pytest.mark.more
if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("the kernels are for x86-64, and objdump's words are GNU's", allow_module_level=True)
if not shutil.which("objdump"):
    pytest.skip("no objdump here (binutils)", allow_module_level=True)
if not BUILT_WITH.is_file():
    pytest.skip("nothing was built in this tree: an installed package is tested", allow_module_level=True)

# Of a batch of 8 vectors: 72 or 80 rounds of AES and 24 products at least. A loop that only long keys have may stand
# elsewhere, and so may the reduction.
AES, PRODUCTS = 72, 20
# What is usual is 1 to 9 vectors that go to the stack: newer compilers put a batch there around the loop that only long
# keys have. Without the kernel's empty asm statements, GCC 12 puts 20 there.
MOST_SPILLED = 12
# The reduction's two products have a constant in memory. Without the asm statements, 8 or 24 have a power there.
MOST_FOLDED = 4
# 258 to 360 are usual, and 450 without optimisation to speak of.
MOST_INSTRUCTIONS = 400


class Loop(NamedTuple):
    """A loop over batches: what it puts on the stack, its products with an operand in memory, its instructions."""

    spilled: int
    folded: int
    instructions: int

    def complaints(self) -> list[str]:
        return [
            f"{number} {what}, at most {most} are usual"
            for number, what, most in (
                (self.spilled, "vectors go to the stack", MOST_SPILLED),
                (self.folded, "products load an operand from memory", MOST_FOLDED),
                (self.instructions, "instructions", MOST_INSTRUCTIONS),
            )
            if number > most
        ]


def compiled(compiler: str, level: str, source: Path, output: Path) -> Path:
    flags = json.loads(BUILT_WITH.read_text())["cflags"]
    subprocess.run([compiler, *flags, "-fPIC", level, "-c", str(source), "-o", str(output)], check=True)
    return output


def functions(path: Path) -> list[list[tuple[int, str]]]:
    """Each function's instructions, with their addresses."""
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], check=True, capture_output=True, text=True)
    found: list[list[tuple[int, str]]] = []
    for line in listing.stdout.splitlines():
        if re.match("[0-9a-f]+ <.*>:$", line):
            found.append([])
        elif instruction := re.match(r" *([0-9a-f]+):\t(.+)", line):
            found[-1].append((int(instruction[1], 16), instruction[2]))
    return found


def loops(code: list[tuple[int, str]]) -> list[Loop]:
    """The innermost loops of a function that seal or open a batch: what a jump back leads to, up to that jump."""
    places = {address: place for place, (address, _) in enumerate(code)}
    words = [text for _, text in code]
    found: list[tuple[int, int]] = []
    for end, text in enumerate(words):
        jump = re.match("j[a-z]+ +([0-9a-f]+) ", text)
        begin = places.get(int(jump[1], 16), end) if jump else end
        body = words[begin:end]
        if sum("aesenc" in word for word in body) >= AES and sum("pclmul" in word for word in body) >= PRODUCTS:
            found.append((begin, end))
    inner = [(b, e) for b, e in found if not any((b, e) != other and b <= other[0] <= other[1] <= e for other in found)]
    frame = "[sb]" if any(re.match("mov +%rsp,%rbp", word) for word in words) else "s"
    return [loop_of(words[begin : end + 1], frame) for begin, end in inner]


def loop_of(body: list[str], frame: str) -> Loop:
    spilled = sum(bool(re.search(rf"%[xyz]mm\d+,-?(0x)?[0-9a-f]*\(%r{frame}p\)$", text)) for text in body)
    return Loop(spilled, sum("pclmul" in text and "(" in text for text in body), len(body))


def loops_of(path: Path) -> list[Loop]:
    return [loop for code in functions(path) for loop in loops(code)]


@pytest.mark.parametrize("level", ["-O2", "-O3"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_loops_of_batches(compiler: str, level: str, tmp_path: Path) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    for width in WIDTHS:
        source = ROOT / "csrc" / "vaes" / f"vaes{width}.c"
        found = loops_of(compiled(compiler, level, source, tmp_path / f"{width}.o"))
        assert len(found) >= 2, f"vaes{width}.c: a loop that seals and one that opens are not found: adapt this test"
        for loop in found:
            assert loop.complaints() == [], f"vaes{width}.c, {loop}: slow; benchmarks/kernel.sh measures how slow"


@pytest.mark.parametrize("compiler", COMPILERS)
def test_slow_code_is_seen(compiler: str, tmp_path: Path) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    folder = shutil.copytree(ROOT / "csrc" / "vaes", tmp_path / "vaes")
    for header in folder.glob("vector*.h"):  # without what holds compilers back
        header.write_text(re.sub(r"(#define VEC_KEEP\(a\)) .*", r"\1 ((void)(a))", header.read_text()))
    for width in WIDTHS:
        found = loops_of(compiled(compiler, "-O3", folder / f"vaes{width}.c", tmp_path / f"{width}.o"))
        assert found
        assert all("from memory" in str(loop.complaints()) for loop in found)


def test_spilled_vectors_are_seen(tmp_path: Path) -> None:
    if not shutil.which("gcc"):
        pytest.skip("no gcc here")
    found = loops_of(compiled("gcc", "-O1", ROOT / "csrc" / "vaes" / "vaes256.c", tmp_path / "256.o"))
    assert found
    assert all("to the stack" in str(loop.complaints()) for loop in found)
