"""Checks files of dist/ before anybody installs them: names, content, and the bill of materials of each wheel.

usage: python .ci/dist.py [--release TAG] FILE...

With --release, the files are a whole release: an sdist and each wheel that .ci/wheels.txt lists, of the version that
TAG names, and CHANGELOG.md has the date of that version.
"""

import argparse
import hashlib
import json
import re
import sys
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"ags_fast", "pyspark_ags_avro.py", "pyspark_ags_parquet.py"}


def version() -> str:
    """The version in the tree."""
    found = re.search(r'__version__ = "([^"]+)"', (ROOT / "ags_fast/_version.py").read_text())
    return found.group(1) if found else sys.exit("ags_fast/_version.py has no version")


def build_identifier(wheel: Path) -> str:
    """cp311-manylinux_x86_64 of ags_fast-0.2.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl."""
    _, _, python, abi, platforms = wheel.stem.split("-")
    found = re.fullmatch(r"(manylinux|musllinux|macosx)_(\d+)_(\d+)_(\w+)", platforms.split(".")[-1])
    if not found:
        sys.exit(f"{wheel.name}: {platforms} is a platform that PyPI refuses")
    if found[1] == "manylinux" and (int(found[2]), int(found[3])) > (2, 28):
        print(f"{wheel.name}: needs glibc {found[2]}.{found[3]}; for 2.28: make wheel GLIBC=2.28")
    if python != abi:
        sys.exit(f"{wheel.name}: the ABI is {abi}")
    return f"{python}-{found[1]}_{found[4]}"


def check_wheel(wheel: Path) -> None:
    """Its folders, its licenses, and the OpenSSL that its bill of materials names."""
    info = f"ags_fast-{version()}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        strangers = {name.split("/")[0] for name in names} - MODULES - {info}
        if strangers:
            sys.exit(f"{wheel.name} has what does not belong there: {sorted(strangers)}")
        licenses = [f"{info}/licenses/{name}" for name in ("LICENSE", "NOTICE", "licenses/OPENSSL.txt")]
        for name in (*licenses, "ags_fast/py.typed", f"{info}/sboms/ags_fast.cdx.json"):
            if name not in names:
                sys.exit(f"{wheel.name} has no {name}")
        bill = json.loads(archive.read(f"{info}/sboms/ags_fast.cdx.json"))
    for part in bill["components"]:
        digests = [digest["content"] for digest in part["hashes"]]
        print(f"{wheel.name}: {part['name']} {part['version']}, SHA-256 {' '.join(digests)}")
        if part["name"] == "openssl" and part["version"].startswith("3.5.") and digests:
            return
    sys.exit(f"{wheel.name}: the bill of materials has no OpenSSL 3.5")


def check_release(tag: str, files: list[Path]) -> None:
    """The files are all that a release needs, and the tree is ready for that release."""
    if tag != f"v{version()}":
        sys.exit(f"the tag is {tag}, and ags_fast/_version.py says {version()}")
    if not re.search(rf"^## {re.escape(version())} - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        sys.exit(f"CHANGELOG.md has no date for {version()}")
    if not (ROOT / "tests/written" / version()).is_dir():
        sys.exit(f"tests/written/{version()} is missing: (cd tests && python -m written)")
    wanted = Counter([*(ROOT / ".ci/wheels.txt").read_text().split(), "sdist"])
    found = Counter(build_identifier(file) if file.suffix == ".whl" else "sdist" for file in files)
    if found != wanted:
        sys.exit(f"missing: {sorted((wanted - found).elements())}; too many: {sorted((found - wanted).elements())}")


def main() -> None:
    """Check the files that the command line names."""
    parser = argparse.ArgumentParser(description="Checks files of dist/.")
    parser.add_argument("--release", metavar="TAG", help="the files are the whole release that TAG names")
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+")
    options = parser.parse_args()

    for file in options.files:
        if file.suffix == ".whl":
            build_identifier(file)
        if file.suffix == ".whl" and file.name.startswith(f"ags_fast-{version()}-"):
            check_wheel(file)
        elif file.name != f"ags_fast-{version()}.tar.gz":
            sys.exit(f"{file} is not a file of ags_fast {version()}")
    if options.release:
        check_release(options.release, options.files)
    for file in options.files:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")


if __name__ == "__main__":
    main()
