"""A folder through other tools that encrypt files, side by side: seconds, CPU, bytes, and what a changed byte does.

``python -m benchmarks.tools`` builds age, rclone and restic with Go, as VERSIONS says, and fetches the S3 Encryption
Client for Python. All are kept in ~/.cache/ags_fast. The client's S3 server is versitygw, over the same folder, and
its KMS is moto. aws-encryption-cli takes part if ``pip install aws-encryption-sdk-cli`` has brought it. What cannot be
had is named, and left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
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
from benchmarks.measure import SkippedError, use_bytecode, warn_if_busy
from benchmarks.parquet import from_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VERSIONS = {  # Go's packages
    "age": ("filippo.io/age/cmd/age", "v1.3.2"),
    "age-keygen": ("filippo.io/age/cmd/age-keygen", "v1.3.2"),
    "rclone": ("github.com/rclone/rclone", "v1.76.0"),
    "restic": ("github.com/restic/restic/cmd/restic", "v0.19.1"),
}
S3_CLIENT = "amazon-s3-encryption-client-python", "4.0.0"
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


def program(name: str) -> str:
    """The path of a tool, which Go builds if it is not there. Raises SkippedError if it cannot be built."""
    servers = from_tests("servers")
    package, version = VERSIONS[name]
    try:
        return str(servers.go_program(name, version, [f"{package}@{version}"]).build(lambda: print(f"building {name}")))
    except servers.NotHereError as error:
        raise SkippedError(str(error)) from None


def ours(work: Path) -> Tool:
    kms = " ".join(f"--kms {name}={value}" for name, value in keystore(work).items())
    run = f"{sys.executable} -P -m ags_fast"
    return Tool(
        "ags-fast",
        "",
        f"{run} encrypt src sealed {kms} --wrapping-key-id {MASTER_KEY} --no-fsync --quiet",
        f"{run} decrypt sealed out {kms} --no-fsync --quiet",
    )


def age(work: Path) -> Tool:
    age, keygen = program("age"), program("age-keygen")
    return Tool(
        f"age {VERSIONS['age'][1]}",
        f"[ -e key ] || {keygen} -o key; grep -o 'age1.*' key > to; mkdir sealed out",
        f"ls src | xargs -P 2 -I{{}} {age} -R to -o sealed/{{}} src/{{}}",
        f"ls sealed | xargs -P 2 -I{{}} {age} -d -i key -o out/{{}} sealed/{{}}",
    )


def rclone(work: Path) -> Tool:
    rclone = program("rclone")
    conf = f"printf '[e]\\ntype=crypt\\nremote=%s/sealed\\npassword=%s\\n' $PWD $({rclone} obscure secret) > conf"
    copy = f"{rclone} copy --config conf"
    return Tool(f"rclone crypt {VERSIONS['rclone'][1]}", f"{conf}; mkdir out", f"{copy} src e:", f"{copy} e: out")


def restic(work: Path) -> Tool:
    restic = f"{program('restic')} -q -r sealed --no-cache"
    return Tool(
        f"restic {VERSIONS['restic'][1]}",
        f"{restic} init --repository-version 2",
        f"{restic} backup --compression off src",
        f"{restic} restore latest --target out",
        {"RESTIC_PASSWORD": "secret"},
    )


def s3_client(work: Path) -> Tool:
    """Its packages are in a folder of their own: it needs other versions of them than ags_fast is tested with."""
    servers = from_tests("servers")
    name, version = S3_CLIENT
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--target", "made", f"{name}=={version}"]
    place = f"{version}-{sys.implementation.cache_tag}"
    try:
        module = servers.Program(name, place, pip, "made", "made/s3_encryption/__init__.py").build()
    except servers.NotHereError as error:
        raise SkippedError(str(error)) from None
    move = f"{sys.executable} -P {Path(__file__).with_name('s3_client.py')}"
    return Tool(
        f"S3 Encryption Client {version}",
        "mkdir sealed out",
        f"{move} put src sealed",
        f"{move} get out sealed",
        {"PYTHONPATH": str(module.parents[1])},
    )


def aws_encryption_cli(work: Path) -> Tool:
    aws = shutil.which("aws-encryption-cli") or os.environ.get("AWS_ENCRYPTION_CLI")
    if aws is None:
        raise SkippedError("aws-encryption-cli is not installed")
    return Tool(
        "aws-encryption-cli",
        "mkdir sealed out",
        f"{aws} -e -r -i src -o sealed -w key=$KEY_ARN --suffix '' --suppress-metadata",
        f"{aws} -d -r -i sealed -o out -w discovery=true --suffix '' --suppress-metadata",
    )


TOOLS: dict[str, Callable[[Path], Tool]] = {
    "ags-fast": ours,
    "age": age,
    "rclone": rclone,
    "restic": restic,
    "s3-client": s3_client,
    "aws-encryption-cli": aws_encryption_cli,
}


def tools(work: Path, pattern: str) -> Iterator[Tool]:
    """Yield the tools whose names have the pattern, and that can be had here."""
    for name, tool in TOOLS.items():
        if not re.search(pattern, name):
            continue
        try:
            yield tool(work)
        except SkippedError as reason:
            print(f"{name}: skipped, {reason}", file=sys.stderr)


@contextmanager
def moto_kms() -> Iterator[dict[str, str]]:
    """The environment of a KMS that answers at once, and a master key in it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it prints each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
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


@contextmanager
def s3_server(work: Path) -> Iterator[dict[str, str]]:
    """The environment of an S3 server whose buckets are the folders in `work`. Without versitygw it is empty."""
    servers = from_tests("servers")
    try:
        gateway = servers.programs()["versitygw"].build()
    except servers.NotHereError:
        yield {}
        return
    options = ["--access", "tester", "--secret", "secret", "--quiet", "posix", str(work)]
    (work / "server").mkdir()
    with servers.on_a_port(work / "server", lambda port: [gateway, "--port", f"127.0.0.1:{port}", *options]) as port:
        yield {"S3_URL": f"http://127.0.0.1:{port}", "S3_KEY": "tester", "S3_SECRET": "secret"}


def timed(command: str, folder: Path, env: dict[str, str]) -> Cost:
    """Run a command and return its cost. Raises RuntimeError with what it said."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command} failed: {done.stderr.strip()[-1000:]}")
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


def compare(work: Path, count: int, nbytes: int, pattern: str, env: dict[str, str]) -> Iterator[str]:
    """Run the tools in turns. Yield the rows of a table."""
    (work / "src").mkdir(parents=True)
    for number in range(count):
        (work / "src" / f"file-{number}").write_bytes(os.urandom(nbytes))
    found = list(tools(work, pattern))
    costs: dict[str, list[tuple[Cost, Cost, int]]] = {tool.name: [] for tool in found}
    ends = {}
    with s3_server(work) as server:
        for turn in range(ROUNDS):
            for tool in found:
                costs[tool.name].append(run(tool, work, os.environ | env | server | tool.env))
                if turn == ROUNDS - 1:
                    ends[tool.name] = changed(tool, work, os.environ | env | server | tool.env)
    for name, rows in costs.items():
        sealed, opened = (Cost(*map(min, zip(*(row[i] for row in rows), strict=True))) for i in (0, 1))
        more = 100 * (rows[0][2] / (count * nbytes) - 1)
        yield (
            f"| {name} | {sealed.clock:.2f} s, {sealed.cpu:.2f} s | {opened.clock:.2f} s, {opened.cpu:.2f} s "
            f"| {more:.2f} % | {ends[name]} |"
        )


def main() -> None:
    """Run all tools and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools", description=__doc__)
    parser.add_argument("--scratch", default="/dev/shm", help="where the files are made")
    parser.add_argument("--only", metavar="PATTERN", default="", help=f"some of {', '.join(TOOLS)}")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the data: for a look")
    args = parser.parse_args()
    use_bytecode()
    warn_if_busy()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch, moto_kms() as env:
        for label, (count, nbytes) in SIZES.items():
            work = Path(scratch, label.replace(" ", "-").replace(",", ""))
            if args.quick:
                count, nbytes, label = max(8, count // 16), min(nbytes, 8 << 20), f"less than {label}"
            rows = list(compare(work, count, nbytes, args.only, env))
            print(f"\n| {label} | encrypt: clock, CPU | decrypt: clock, CPU | more bytes | after a changed byte |")
            print("|---|---|---|---|---|")
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
