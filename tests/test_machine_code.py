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
SOURCES = ROOT / "csrc" / "vaes"
WIDTHS = (128, 256, 512)

pytestmark = pytest.mark.more
if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("the kernels are for x86-64, and objdump's words are GNU's", allow_module_level=True)
if not shutil.which("objdump"):
    pytest.skip("no objdump here (binutils)", allow_module_level=True)
if not BUILT_WITH.is_file():
    pytest.skip("nothing was built in this tree: an installed package is tested", allow_module_level=True)

# Of a batch of 8 vectors: 72 to 88 rounds of AES and 24 products. The loop for what only long keys have may stand
# elsewhere, and so may the reduction.
LEAST_AES, MOST_AES, LEAST_PRODUCTS = 72, 120, 20
# 1 to 8 vectors go to the stack. Without the kernel's empty asm statements, GCC 12 puts 20 there.
MOST_SPILLED = 10
# The reduction's two products have a constant in memory. Without the asm statements, 8 or 24 have a power there.
MOST_FOLDED = 4
# 56 to 80 rounds stand between the products, so that both go on at a time. Clang 19 put all of them behind the products
# where it had to ask whether there was something to hash: opening took a fifth more time.
LEAST_MIXED = 48
# 243 to 321 are usual, and 450 without optimisation to speak of.
MOST_INSTRUCTIONS = 360


class Loop(NamedTuple):
    """A loop over batches: what it puts on the stack, its products with an operand in memory, its rounds of AES between
    products, its instructions.
    """

    spilled: int
    folded: int
    mixed: int
    instructions: int

    def complaints(self) -> list[str]:
        return [
            f"{number} {what}, where {most} are usual at the most"
            for number, what, most in (
                (self.spilled, "vectors go to the stack", MOST_SPILLED),
                (self.folded, "products load an operand from memory", MOST_FOLDED),
                (self.instructions, "instructions", MOST_INSTRUCTIONS),
            )
            if number > most
        ] + [f"{self.mixed} rounds of AES are among the products"] * (self.mixed < LEAST_MIXED)


def compiled(compiler: str, level: str, source: Path, output: Path) -> Path:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    flags = json.loads(BUILT_WITH.read_text())["cflags"]  # CI's have -Werror, and a mutant may be worth a warning
    subprocess.run([compiler, *flags, "-w", "-fPIC", level, "-c", str(source), "-o", str(output)], check=True)
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
        rounds, products = (sum(word.startswith(name) for word in body) for name in ("vaesenc", "vpclmul"))
        if LEAST_AES <= rounds <= MOST_AES and products >= LEAST_PRODUCTS:
            found.append((begin, end))
    inner = [(b, e) for b, e in found if not any((b, e) != other and b <= other[0] <= other[1] <= e for other in found)]
    frame = "[sb]" if any(re.match("mov +%rsp,%rbp", word) for word in words) else "s"
    return [loop_of(words[begin : end + 1], frame) for begin, end in inner]


def loop_of(body: list[str], frame: str) -> Loop:
    products = [place for place, text in enumerate(body) if text.startswith("vpclmul")]
    return Loop(
        sum(bool(re.search(rf"%[xyz]mm\d+,-?(0x)?[0-9a-f]*\(%r{frame}p\)$", text)) for text in body),
        sum("(" in body[place] for place in products),
        sum(text.startswith("vaesenc") for text in body[products[0] : products[-1]]),
        len(body),
    )


def loops_of(path: Path) -> list[Loop]:
    return [loop for code in functions(path) for loop in loops(code)]


@pytest.mark.parametrize(("compiler", "level"), [("gcc", "-O2"), ("gcc", "-O3"), ("clang", "-O3")])
def test_loops_of_batches(compiler: str, level: str, tmp_path: Path) -> None:
    """At -O2, clang 14 moves the rounds behind the products whatever the source says."""
    for width in WIDTHS:
        found = loops_of(compiled(compiler, level, SOURCES / f"vaes{width}.c", tmp_path / f"{width}.o"))
        assert len(found) >= 2, f"vaes{width}.c: a loop that seals and one that opens are not found: adapt this test"
        for loop in found:
            assert loop.complaints() == [], f"vaes{width}.c, {loop}: slow; benchmarks/kernel.sh measures how slow"


def changed(folder: Path, pattern: str, text: str) -> Path:
    """The sources with a change in all headers that have the pattern."""
    shutil.copytree(SOURCES, folder)
    for header in folder.glob("*.h"):
        header.write_text(re.sub(pattern, text, header.read_text()))
    return folder


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_loads_in_products_are_seen(compiler: str, tmp_path: Path) -> None:
    folder = changed(tmp_path / "vaes", r"(#define VEC_KEEP\(a\)) .*", r"\1 ((void)(a))")
    for width in WIDTHS:
        found = loops_of(compiled(compiler, "-O3", folder / f"vaes{width}.c", tmp_path / f"{width}.o"))
        assert found
        assert all("from memory" in str(loop.complaints()) for loop in found)


def test_spilled_vectors_are_seen(tmp_path: Path) -> None:
    found = loops_of(compiled("gcc", "-O1", SOURCES / "vaes256.c", tmp_path / "256.o"))
    assert found
    assert all("to the stack" in str(loop.complaints()) for loop in found)


def test_rounds_apart_from_products_are_seen(tmp_path: Path) -> None:
    folder = changed(tmp_path / "vaes", r"if \(hashes\)", "if (hash != NULL)")
    found = loops_of(compiled("clang", "-O2", folder / "vaes256.c", tmp_path / "256.o"))
    assert any("among the products" in str(loop.complaints()) for loop in found)
