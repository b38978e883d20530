"""Start Python processes that will use keys: with which interpreter, which flags, and which import path.

Python puts the current directory first on the import path of a new process (``-m``, ``-c``). The current directory may
be a folder of data that others write to: a ``uuid.py`` there would be executed. So the process gets the path of its
caller, without the current directory and relative entries, unless code that the caller itself runs by name came from
there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ags_fast.keys.kms import named_modules

if TYPE_CHECKING:
    from collections.abc import Iterator


# The given entries come first. The process's own entries (standard library, `site`) follow.
BOOTSTRAP = "import sys; given = {path}; sys.path[:] = given + [p for p in sys.path if p not in given]; {code}"


def start_python(code: str, path: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that executes `code`, with `path` before its own import path. Pipes are its input and output.

    The process starts with SIGINT blocked, and unblocks SIGINT when it is ready to handle it. A terminal sends Ctrl-C
    to all its processes, also to a process that is still importing. ChildProcessError if no interpreter is found.
    """
    command = [*python_command(), "-c", BOOTSTRAP.format(path=ascii(path), code=code)]
    env = dict(os.environ)
    if env.get("PYTHONPATH"):  # its `site` would execute a sitecustomize from there
        env["PYTHONPATH"] = os.pathsep.join(_safe(env["PYTHONPATH"].split(os.pathsep)))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = None
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # raises KeyboardInterrupt if Ctrl-C came meanwhile
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if process is not None:
            process.kill()
            process.communicate()
        raise
    return process


def python_command() -> list[str]:
    """Return the interpreter of this process, with its flags. Raises ChildProcessError if it cannot be found."""
    flags = ["-P"]
    if sys.flags.isolated:
        flags.append("-I")
    else:
        flags += ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site
    flags += ["-S"] * sys.flags.no_site + ["-B"] * sys.flags.dont_write_bytecode + ["-O"] * sys.flags.optimize
    for name, value in getattr(sys, "_xoptions", {}).items():
        flags += ["-X", name if value is True else f"{name}={value}"]
    return [_interpreter(), *flags, *(f"-W{option}" for option in sys.warnoptions)]


def _interpreter() -> str:
    """Return the interpreter. `sys.executable` may name a program that embeds Python, which is not an interpreter."""
    if _is_python(sys.executable):
        return sys.executable
    import multiprocessing.spawn

    named = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    if named and named != sys.executable:  # multiprocessing.set_executable, which embedding programs call
        return named
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for prefix in (sys.prefix, sys.base_exec_prefix):
        if _is_python(path := os.path.join(prefix, "bin", name)):
            return path
    raise ChildProcessError(
        f"worker processes need a Python interpreter, and sys.executable ({sys.executable!r}) is not one: name one by "
        "multiprocessing.set_executable(path), or work in this process with LocalEngine(0)"
    )


def _is_python(path: str | None) -> bool:
    return bool(path) and os.path.basename(str(path)).lower().startswith("python") and os.access(str(path), os.X_OK)


def import_path() -> list[str]:
    """Return `sys.path` of this process, absolute, without entries that may be folders of data.

    The current directory, and entries relative to it, stay if code that the caller named came from there: the main
    script or module, ags_fast, or a module that properties of a KMS name.
    """
    return _safe(sys.path)


def is_current_directory_trusted() -> bool:
    """Return whether code that the caller named came from the current directory: see `import_path`."""
    return bool(_safe([""]))


def _safe(entries: Any) -> list[str]:
    homes = list(_homes())
    safe = []
    for entry in entries:
        try:
            path = os.path.abspath(entry)
        except (FileNotFoundError, TypeError):
            continue  # relative to a current directory that is gone, or not text: Python skips such an entry too
        relative = not os.path.isabs(entry) or _same(path, os.curdir)
        if not relative or any(_same(path, home) for home in homes):
            safe.append(path)
    return safe


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return one == other


def _homes() -> Iterator[str]:
    """Yield the folders or archives of the code that the caller runs by name."""
    for name in ("__main__", "__mp_main__", "ags_fast", *named_modules()):
        module: Any = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if spec is not None and name != spec.name:  # of `python -m package.module`
            top = sys.modules.get(spec.name.partition(".")[0])
            spec = getattr(top, "__spec__", None) or spec
        if spec is not None:
            places = list(spec.submodule_search_locations or ([spec.origin] if spec.has_location else []))
        else:
            places = [file] if (file := getattr(module, "__file__", None)) else []
        yield from (os.path.dirname(os.path.abspath(place)) for place in places)
