"""A folder through other tools that encrypt files, side by side: seconds, CPU, bytes, and what a changed byte does.

``python -m benchmarks.tools`` runs the tools that it finds: age, rclone, restic, and aws-encryption-cli against moto.
Debian has the first three; ``pip install aws-encryption-sdk-cli`` brings the last.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import use_bytecode

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 3
SIZES = {"8 files of 128 MiB": (8, 128 << 20), "1,000 files of 4 KiB": (1000, 4 << 10)}


class Tool(NamedTuple):
    """A tool's commands, for bash. They run in a folder with `src`, and make `sealed` and `out`."""

    name: str
    setup: str
    encrypt: str
    decrypt: str
    env: dict[str, str] = {}  # noqa: RUF012 (a NamedTuple's default)


class Cost(NamedTuple):
    """What a command took: seconds by the clock, and of CPU."""

    clock: float
    cpu: float


def tools(work: Path) -> Iterator[Tool]:
    """Yield the tools that are installed."""
    kms = " ".join(f"--kms {name}={value}" for name, value in keystore(work).items())
    ours = f"{sys.executable} -P -m ags_fast"
    yield Tool(
        "ags-fast",
        "",
        f"{ours} encrypt src sealed {kms} --wrapping-key-id {MASTER_KEY} --no-fsync --quiet",
        f"{ours} decrypt sealed out {kms} --no-fsync --quiet",
    )
    if shutil.which("age"):
        yield Tool(
            "age",
            "[ -e key ] || age-keygen -o key; grep -o 'age1.*' key > to; mkdir sealed out",
            "ls src | xargs -P 2 -I{} age -R to -o sealed/{} src/{}",
            "ls sealed | xargs -P 2 -I{} age -d -i key -o out/{} sealed/{}",
        )
    if shutil.which("rclone"):
        conf = "printf '[e]\\ntype=crypt\\nremote=%s/sealed\\npassword=%s\\n' $PWD $(rclone obscure secret) > conf"
        copy = "rclone copy --config conf"
        yield Tool("rclone crypt", f"{conf}; mkdir out", f"{copy} src e:", f"{copy} e: out")
    if shutil.which("restic"):
        restic = "restic -q -r sealed --no-cache"
        yield Tool(
            "restic",
            f"{restic} init --repository-version 2",
            f"{restic} backup --compression off src",
            f"{restic} restore latest --target out",
            {"RESTIC_PASSWORD": "secret"},
        )
    aws = shutil.which("aws-encryption-cli") or os.environ.get("AWS_ENCRYPTION_CLI")
    if aws:
        yield Tool(
            "aws-encryption-cli",
            "mkdir sealed out",
            f"{aws} -e -r -i src -o sealed -w key=$KEY_ARN --suffix '' --suppress-metadata",
            f"{aws} -d -r -i sealed -o out -w discovery=true --suffix '' --suppress-metadata",
        )


@contextmanager
def moto_kms() -> Iterator[dict[str, str]]:
    """The environment of a KMS that answers at once, and a master key in it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        env = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        env["AWS_DEFAULT_REGION"] = "eu-west-1"
        made = boto3.client(
            "kms", endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b", region_name="eu-west-1"
        ).create_key()
        yield env | {"KEY_ARN": made["KeyMetadata"]["Arn"]}
    finally:
        server.stop()


def timed(command: str, folder: Path, env: dict[str, str]) -> Cost:
    """Run a command and return its cost. Raises CalledProcessError with what it said."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["bash", "-ec", command], cwd=folder, env=env, check=True, capture_output=True)
    clock, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def run(tool: Tool, folder: Path, env: dict[str, str]) -> tuple[Cost, Cost, int]:
    """Encrypt and decrypt `src` once. Returns both costs, and the bytes of what was made."""
    for name in ("sealed", "out"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if tool.setup:
        subprocess.run(["bash", "-ec", tool.setup], cwd=folder, env=env, check=True, capture_output=True)
    sealed = timed(tool.encrypt, folder, env)
    nbytes = sum(path.stat().st_size for path in (folder / "sealed").rglob("*") if path.is_file())
    opened = timed(tool.decrypt, folder, env)
    subprocess.run(["bash", "-ec", "diff -rq src $(dirname $(find out -type f | head -1))"], cwd=folder, check=True)
    return sealed, opened, nbytes


def changed(tool: Tool, folder: Path, env: dict[str, str]) -> str:
    """Say what decrypting does after a byte was changed in the middle of the largest file."""
    largest = max((path for path in (folder / "sealed").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    os.chmod(largest, 0o600)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    shutil.rmtree(folder / "out")
    if "mkdir out" in tool.setup or "sealed out" in tool.setup:
        (folder / "out").mkdir()
    done = subprocess.run(["bash", "-ec", tool.decrypt], cwd=folder, env=env, capture_output=True)
    sizes = {path.name: path.stat().st_size for path in (folder / "src").iterdir()}
    made = [path for path in (folder / "out").rglob("*") if path.is_file()]
    part = [path for path in made if path.stat().st_size != sizes.get(path.name)]
    wrong = [
        path
        for path in made
        if path not in part and path.name in sizes and path.read_bytes() != (folder / "src" / path.name).read_bytes()
    ]
    return f"exit code {done.returncode}; {len(made)} of {len(sizes)} files, {len(part)} cut off, {len(wrong)} wrong"


def main() -> None:
    """Run all tools and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools", description=__doc__)
    parser.add_argument("--scratch", default="/dev/shm", help="where the files are made")
    args = parser.parse_args()
    use_bytecode()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch, moto_kms() as env:
        for label, (count, nbytes) in SIZES.items():
            work = Path(scratch, label.replace(" ", "-").replace(",", ""))
            (work / "src").mkdir(parents=True)
            for number in range(count):
                (work / "src" / f"file-{number}").write_bytes(os.urandom(nbytes))
            found = list(tools(work))
            costs: dict[str, list[tuple[Cost, Cost, int]]] = {tool.name: [] for tool in found}
            ends = {}
            for turn in range(ROUNDS):
                for tool in found:
                    costs[tool.name].append(run(tool, work, os.environ | env | tool.env))
                    if turn == ROUNDS - 1:
                        ends[tool.name] = changed(tool, work, os.environ | env | tool.env)
            print(f"\n| {label} | encrypt: clock, CPU | decrypt: clock, CPU | more bytes | after a changed byte |")
            print("|---|---|---|---|---|")
            for name, rows in costs.items():
                sealed, opened = (Cost(*map(min, zip(*(row[i] for row in rows), strict=True))) for i in (0, 1))
                more = 100 * (rows[0][2] / (count * nbytes) - 1)
                print(
                    f"| {name} | {sealed.clock:.2f} s, {sealed.cpu:.2f} s | {opened.clock:.2f} s, {opened.cpu:.2f} s "
                    f"| {more:.2f} % | {ends[name]} |"
                )


if __name__ == "__main__":
    main()
