"""Builds ags_fast._core: Cython over csrc/ over libcrypto. Everything declarative is in pyproject.toml.

AES-GCM in OpenSSL 3.5 is more than twice as fast as in 3.0 on CPUs with VAES and AVX-512, so a libcrypto older than
3.5 is not good enough: then OpenSSL 3.5 LTS is built (libcrypto only, static) and cached outside the tree for later
builds. If that cannot be done the build fails, because pip shows no warning of a build that succeeds.

    AGS_FAST_OPENSSL=system     use the system's libcrypto (3.0 or newer) although it may be slow, build none
    AGS_FAST_OPENSSL=bundled    use the static one, whatever the system has
    AGS_FAST_OPENSSL_SOURCE=p   OpenSSL 3.5 to build: a tarball or a source folder; no download is tried
    OPENSSL_ROOT_DIR=p          where the system's libcrypto is: p/include, p/lib
    AGS_FAST_REPOSITORY=url     where the source is published, on GitHub: PyPI's page links to it
    AGS_FAST_WERROR=1           warnings in csrc are errors (CI, make)
    AGS_FAST_SANITIZE=list      address,undefined or thread: for -fsanitize
    AGS_FAST_COVERAGE=1         counts for gcov, of csrc and of _core.pyx's lines

`python setup.py build_openssl` only fills the cache. Each build says in build/libcrypto.json what it linked.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from pathlib import Path
from typing import ClassVar, NamedTuple

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError
from setuptools.modified import newer_group

MACOS = sys.platform == "darwin"
# Python's own flags ("gcc -pthread") are dropped: they differ between Pythons that can share one libcrypto.
CC = shlex.split(os.environ.get("CC", "")) or [shlex.split(sysconfig.get_config_var("CC") or "cc")[0]]

# ---- libcrypto: which one

MINIMUM = (3, 0)  # the EVP interface that csrc/aead.c is written for
FAST = (3, 5)


class Libcrypto(NamedTuple):
    version: str
    bundled: bool
    include_dirs: list[str]
    objects: list[str]  # the static library
    link_args: list[str]  # or how to reach the shared one

    def at_least(self, minimum: tuple[int, int]) -> bool:
        return tuple(int(n) for n in self.version.split(".")[:2]) >= minimum


def check_prerequisites() -> None:
    """Name all that is missing before anything is built: OpenSSL takes minutes."""
    missing = []
    if not shutil.which(CC[0]):
        missing.append(f"a C compiler, {CC[0]} (gcc libc6-dev)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python's headers, Python.h (python3-dev)")
    needs_openssl = shutil.which(CC[0]) and not wanted_system() and not bundled_home().is_dir()
    tools = missing_tools() if needs_openssl else []
    if missing or tools:
        raise SetupError("\n".join([not_installed(missing + tools), *([why_openssl()] if tools else [])]))


def missing_tools() -> list[str]:
    """What a build of OpenSSL needs that is not here."""
    missing = [f"{tool} ({tool})" for tool in ("make", "tar") if not shutil.which(tool)]
    configures = ["perl", "-MFindBin", "-MIPC::Cmd", "-MPod::Usage", "-e", "1"]  # perl-base is not enough
    if not shutil.which("perl") or subprocess.run(configures, capture_output=True).returncode != 0:
        missing.append("perl with its modules (perl)")
    return missing


def not_installed(missing: list[str]) -> str:
    return f"not installed, or not found: {', '.join(missing)}. In brackets are Debian's packages."


def wanted_system() -> Libcrypto | None:
    """The system's libcrypto, if it is fast or asked for; None if OpenSSL 3.5 is to be built."""
    wish = os.environ.get("AGS_FAST_OPENSSL", "")
    if wish not in ("", "system", "bundled"):
        raise SetupError(f"AGS_FAST_OPENSSL={wish}: say system or bundled, or leave it unset")
    if wish == "bundled":
        return None
    root = os.environ.get("OPENSSL_ROOT_DIR")
    system = system_libcrypto()
    if not system and (root or wish == "system"):
        raise SetupError("no libcrypto 3.0 or newer with headers found (Debian: libssl-dev; else set OPENSSL_ROOT_DIR)")
    if system and (wish == "system" or system.at_least(FAST)):
        return system
    if system and root:
        raise SetupError(f"{root} has OpenSSL {system.version}, which is slow. To use it: AGS_FAST_OPENSSL=system")
    return None


def why_openssl() -> str:
    """Why OpenSSL is built, and what to do where that cannot be done."""
    system = system_libcrypto()
    lines = ["ags_fast is built with OpenSSL 3.5, whose AES-GCM is more than twice as fast as that of older ones."]
    if system and not system.at_least(FAST):
        lines += [f"The system has OpenSSL {system.version}. To use it all the same: AGS_FAST_OPENSSL=system"]
    lines += ["Without a network: AGS_FAST_OPENSSL_SOURCE=PATH names a tarball of OpenSSL 3.5, fetched elsewhere."]
    lines += ["Where Debian has OpenSSL 3.5 or newer (from Debian 13 on), the package libssl-dev is enough."]
    return "\n".join(lines)


def choose_libcrypto() -> Libcrypto:
    chosen = wanted_system()
    if not chosen:
        try:
            return bundled_libcrypto()
        except (SetupError, OSError) as error:  # OSError: a cache folder that cannot be written
            raise SetupError(f"OpenSSL 3.5 cannot be built here: {error}\n{why_openssl()}") from error
    if not chosen.at_least(FAST):
        say("*" * 100)
        say(f"ags_fast is being built with the SLOW libcrypto: {chosen.version}, from the system.")
        say("AES-GCM runs at less than half the speed of OpenSSL 3.5. `ags-fast --version` repeats this.")
        say("*" * 100)
    return chosen


def system_libcrypto() -> Libcrypto | None:
    """The libcrypto that a plain compiler call finds, or the one in OPENSSL_ROOT_DIR."""
    root = os.environ.get("OPENSSL_ROOT_DIR")
    if root:
        lib_dirs = [str(d) for d in (Path(root, "lib64"), Path(root, "lib")) if d.is_dir()]
        include_dirs = [str(Path(root, "include"))]
        link_args = [f"-L{d}" for d in lib_dirs] + [f"-Wl,-rpath,{d}" for d in lib_dirs] + ["-lcrypto"]
    else:
        include_dirs = [flag[2:] for flag in pkg_config("--cflags-only-I")]
        link_args = pkg_config("--libs") or ["-lcrypto"]
    version = header_version(include_dirs)
    if not version or (root and not Path(root, "include/openssl/opensslv.h").is_file()):
        return None
    found = Libcrypto(version, False, include_dirs, [], link_args)
    return found if found.at_least(MINIMUM) else None


def pkg_config(option: str) -> list[str]:
    try:
        answer = subprocess.run(["pkg-config", option, "libcrypto"], capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return shlex.split(answer.stdout) if answer.returncode == 0 else []


def header_version(include_dirs: list[str]) -> str | None:
    """The version that the headers declare: pkg-config may be missing, and may describe another installation."""
    flags = [f"-I{d}" for d in include_dirs]
    command = [*CC, *flags, "-E", "-dM", "-include", "openssl/opensslv.h", "-x", "c", os.devnull]
    try:
        macros = subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise SetupError(f"no C compiler: {CC[0]} not found (Debian: apt-get install gcc libc6-dev)") from None
    match = re.search(r'define OPENSSL_VERSION_STR "([\d.]+)"', macros)
    return match.group(1) if match else None


# ---- libcrypto: our own

OPENSSL = "3.5.7"
OPENSSL_SHA256 = "a8c0d28a529ca480f9f36cf5792e2cd21984552a3c8e4aa11a24aa31aeac98e8"
OPENSSL_URL = f"https://github.com/openssl/openssl/releases/download/openssl-{OPENSSL}/openssl-{OPENSSL}.tar.gz"
DEBIAN_SUITE = "trixie"  # the Debian release that carries 3.5
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

CONFIGURE = [
    "--release",
    # Nothing on the disk configures or extends this libcrypto: no openssl.cnf, no providers or engines to load.
    *("--prefix=/nonexistent", "--openssldir=/nonexistent", "--libdir=lib"),
    *("no-autoload-config", "no-module", "no-dso", "no-engine"),
    # A cleanup at exit would crash worker threads. Without a cleanup the library need not be pinned.
    *("no-atexit", "no-pinshared"),
    # Upstream's minimal set keeps the default provider's AES, SHA, HMAC, DRBG, HKDF, PBKDF2 and scrypt, with assembly.
    *("no-bulk", "no-shared", "no-legacy", "no-tls", "no-quic", "no-sock", "no-http", "no-slh-dsa", "no-thread-pool"),
    *("no-apps", "no-tests", "no-docs"),
    # Another libcrypto may live in the same process (Python's _ssl has one): hide all of our symbols.
    *("-fPIC", "-fvisibility=hidden"),
]


def bundled_libcrypto() -> Libcrypto:
    """OpenSSL 3.5 from the cache, built first if need be. Any number of builds may come here at the same time."""
    home = bundled_home()
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{home}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits, and then finds the result
            if not home.is_dir():
                work = Path(f"{home}.building")
                shutil.rmtree(work, ignore_errors=True)  # of a build that was killed
                work.mkdir()
                try:
                    build_openssl(work).rename(home)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    include, library = home / "include", home / "libcrypto.a"
    version = header_version([str(include)])
    if not version or not library.is_file():
        raise SetupError(f"{home} is damaged; delete it")
    return Libcrypto(version, True, [str(include)], [str(library)], [])


def bundled_home() -> Path:
    return cache_dir() / f"openssl-3.5-{cache_key()}"


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ags_fast"


def cache_key() -> str:
    """Changes with whatever changes the library: source, options, machine, compiler."""
    source: list[object] = [OPENSSL, OPENSSL_SHA256]
    if given := os.environ.get("AGS_FAST_OPENSSL_SOURCE"):
        source = [os.path.abspath(given), os.stat(given).st_mtime_ns if os.path.exists(given) else None]
    compiler = subprocess.run([*CC, "--version"], capture_output=True, text=True).stdout
    target = [sys.platform, platform.machine(), os.environ.get("MACOSX_DEPLOYMENT_TARGET")]
    parts = [source, CONFIGURE, target, CC, compiler]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def build_openssl(work: Path) -> Path:
    """Gets and compiles OpenSSL inside `work`; the folder returned there holds libcrypto.a and include/."""
    if missing := missing_tools():
        raise SetupError(not_installed(missing))
    source = openssl_source(work)
    say(f"Building OpenSSL {source_version(source)} (libcrypto only, static); this takes 1 to 3 minutes, once.")
    build, log = work / "build", work / "log"
    build.mkdir()
    # CFLAGS would replace OpenSSL's own -O3. An outer make's MAKEFLAGS name a job server that this make cannot use.
    environ = {k: v for k, v in os.environ.items() if k not in ("CFLAGS", "CPPFLAGS", "LDFLAGS", "MAKEFLAGS", "MFLAGS")}
    environ["CC"] = shlex.join(CC)
    environ["SOURCE_DATE_EPOCH"] = str(int((source / "VERSION.dat").stat().st_mtime))  # else libcrypto has today's date
    jobs = f"-j{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    steps = [
        ["perl", str(source / "Configure"), *cross_target(), *CONFIGURE],
        ["make", jobs, "build_generated"],
        ["make", jobs, "libcrypto.a"],
    ]
    for step in steps:
        with open(log, "ab") as file:
            result = subprocess.run(step, cwd=build, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        if result.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise SetupError(f"building OpenSSL failed: {shlex.join(step[:3])} returned {result.returncode}:\n{tail}")

    out = work / "out"
    for tree in (source, build):  # headers of the release, then those that Configure made
        shutil.copytree(tree / "include/openssl", out / "include/openssl", dirs_exist_ok=True)
    shutil.copy(build / "libcrypto.a", out)
    if (work / "source.json").is_file():
        shutil.copy(work / "source.json", out)
    return out


def cross_target() -> list[str]:
    """Python's names for Linux platforms (linux-aarch64), which are also OpenSSL's, say what is compiled for."""
    wish = os.environ.get("_PYTHON_HOST_PLATFORM", "")
    return [wish] if wish.startswith("linux-") else []


def openssl_source(work: Path) -> Path:
    """A folder with the source of OpenSSL 3.5, from the first place that has one."""
    if given := os.environ.get("AGS_FAST_OPENSSL_SOURCE"):
        places = [lambda work: Path(given).resolve(strict=True)]
    else:
        places = [kept_source, upstream_release, debian_source]
    tried = []
    for place in places:
        try:
            found = place(work)
            folder = work / "source"
            if found.is_dir():
                folder = found
            else:
                say(f"The source of OpenSSL: {found}")
                digest = hashlib.sha256(found.read_bytes()).hexdigest()
                url = OPENSSL_URL if digest == OPENSSL_SHA256 else found.name
                (work / "source.json").write_text(json.dumps({"url": url, "sha256": digest}))
                unpack(found, folder)
            version = source_version(folder)
            if not version.startswith("3.5."):
                raise SetupError(f"{found} is OpenSSL {version}, not 3.5")
            if not given and found.parent != sources_dir():
                keep_source(found)
            return folder
        except (SetupError, OSError) as error:
            tried.append(f"  {error}")
    raise SetupError("no source of OpenSSL 3.5 was found to build. Tried:\n" + "\n".join(tried))


def sources_dir() -> Path:
    return cache_dir() / f"openssl-{OPENSSL}-source"


def kept_source(work: Path) -> Path:
    """The tarball that an earlier build fetched: other compilers and options build the same source."""
    for tarball in sorted(sources_dir().glob("openssl*.tar.*")):
        return tarball
    raise SetupError(f"{sources_dir()}: empty")


def keep_source(tarball: Path) -> None:
    sources_dir().mkdir(parents=True, exist_ok=True)
    partial = sources_dir() / f".partial-{os.getpid()}"
    shutil.copy(tarball, partial)
    partial.replace(sources_dir() / tarball.name)


def upstream_release(work: Path) -> Path:
    tarball = work / "openssl.tar.gz"
    say(f"Fetching {OPENSSL_URL}")
    try:
        # The timeout is per read, so that a network without access to the internet costs seconds.
        with urllib.request.urlopen(OPENSSL_URL, timeout=15) as response, open(tarball, "wb") as file:
            shutil.copyfileobj(response, file)
    except OSError as error:
        raise SetupError(f"{OPENSSL_URL}: {error}") from error
    digest = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if digest != OPENSSL_SHA256:
        raise SetupError(f"{OPENSSL_URL}: SHA-256 is {digest}, expected {OPENSSL_SHA256}")
    return tarball


def debian_source(work: Path) -> Path:
    """The upstream tarball in Debian's source package of OpenSSL."""
    say(f"Fetching the source package of openssl in Debian {DEBIAN_SUITE}")
    with Apt(DEBIAN_SUITE) as apt:
        return apt.source("openssl", r"3\.5\..+", work)


class Apt:
    """apt-get for another release of Debian, from this machine's own mirror. .ci/other_python.py uses it, too.

    apt checks what it downloads: the archive's keyring signs the index, and the index has the hash. All that configures
    apt is the machine's (proxy, certificates, credentials), but lists and downloads go to a temporary folder.
    """

    def __init__(self, suite: str) -> None:
        if not shutil.which("apt-get") or "ID=debian" not in Path("/etc/os-release").read_text().split():
            raise SetupError(f"Debian {suite}: this machine is not Debian")
        self.suite, self.said = suite, ""

    def __enter__(self) -> "Apt":
        # In /tmp and readable by all, because apt downloads as another user.
        self.folder = apt = Path(tempfile.mkdtemp(prefix="ags_fast-apt-"))
        apt.chmod(0o755)
        for sub in ("lists/partial", "cache/archives/partial"):
            (apt / sub).mkdir(parents=True)
        (apt / "status").touch()
        (apt / "sources.list").write_text("".join(debian_mirrors(self.suite)))
        (apt / "apt.conf").write_text(
            f'Dir::Etc::sourcelist "{apt}/sources.list"; Dir::Etc::sourceparts "-";\n'
            f'Dir::State::lists "{apt}/lists"; Dir::Cache "{apt}/cache"; Dir::State::status "{apt}/status";\n'
            'Acquire::Languages "none"; Acquire::Retries "1"; Acquire::http::Timeout "15";\n'
            "#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
        )
        self.run("apt-get", "update")  # fails if one suite fails, though the others may be enough
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, tool: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [tool, "-q", "-c", str(self.folder / "apt.conf"), *arguments]
        result = subprocess.run(command, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        self.said += result.stderr
        return result

    def source(self, package: str, versions: str, work: Path) -> Path:
        """The upstream tarball of a source package, of the newest version that matches and can be had."""
        known = self.run("apt-cache", "showsrc", "--only-source", package).stdout
        listed = re.findall(rf"^Version: ({versions})$", known, re.MULTILINE)
        for version in sorted(set(listed), reverse=True):  # a mirror may list a version whose tarball it does not have
            result = self.run(
                "apt-get", "source", "--only-source", "--download-only", "--tar-only", f"{package}={version}"
            )
            tarballs = list(self.folder.glob(f"{package}_*.orig.tar.*z*"))
            if result.returncode == 0 and tarballs:
                return Path(shutil.copy(tarballs[0], work))
        raise SetupError(f"Debian source package of {self.suite}: apt-get source failed\n{self.said}".rstrip())


def debian_mirrors(suite: str) -> list[str]:
    """sources.list lines for a suite, its updates and fixes, on the mirrors that apt has for this release."""
    os_release = Path("/etc/os-release").read_text()
    release = re.search(r"^VERSION_CODENAME=(\w+)", os_release, re.MULTILINE)
    names = f"{release.group(1)}|stable|oldstable" if release else "stable|oldstable"
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    targets = subprocess.run(command, capture_output=True, text=True).stdout
    options = f"[signed-by={DEBIAN_KEYRING}] " if DEBIAN_KEYRING.exists() else ""  # else apt's trusted keys
    mirrors = re.findall(rf"^(\S+) (?:{names})(-updates|-security)? main$", targets, re.MULTILINE)
    if not mirrors:
        raise SetupError("Debian source package: apt has no Debian mirror configured")
    places = [f"{options}{uri} {suite}{kind} main\n" for uri, kind in dict.fromkeys(mirrors)]
    return [f"{kind} {place}" for kind in ("deb", "deb-src") for place in places]


def unpack(tarball: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = ["tar", "-xf", str(tarball), "-C", str(folder), "--strip-components=1"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SetupError(f"{tarball}: {result.stderr.strip()}")


def source_version(folder: Path) -> str:
    fields = dict(re.findall(r"^(MAJOR|MINOR|PATCH)=(\d+)", (folder / "VERSION.dat").read_text(), re.MULTILINE))
    return f"{fields['MAJOR']}.{fields['MINOR']}.{fields['PATCH']}"


# ---- the extension

SANITIZE = os.environ.get("AGS_FAST_SANITIZE", "")
COVERAGE = os.environ.get("AGS_FAST_COVERAGE") == "1"
CORE = Extension(
    "ags_fast._core",
    ["ags_fast/_core.pyx"],
    include_dirs=["csrc"],
    depends=[
        "setup.py",
        "ags_fast/_agsf.pxd",
        "ags_fast/_core_parquet.pxi",
        "ags_fast/_core_chunks.pxi",
        "ags_fast/_core_avro.pxi",
        "csrc/exports.map",
        *sorted(str(p) for p in Path("csrc").rglob("*.[ch]")),
    ],
)

# Debug information names files by their place in the tree, so that a build in another folder gives the same bytes.
COMMON_FLAGS = [f"-fdebug-prefix-map={os.getcwd()}=."]
COMMON_FLAGS += ["-O3", "-fvisibility=hidden", "-fstack-protector-strong", "-pthread"]
if SANITIZE:
    COMMON_FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}"]
if COVERAGE:
    COMMON_FLAGS += ["-O1", "-g", "--coverage", "-fprofile-update=atomic"]

# Only for csrc: Cython's output has warnings that cannot be mended here.
CSRC_FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Wvla"]
CSRC_FLAGS += ["-Wpointer-arith", "-Wcast-qual", "-Wwrite-strings", "-Wformat=2", "-Wundef"]
if os.environ.get("AGS_FAST_WERROR") == "1":
    CSRC_FLAGS += ["-Werror"]

# The module exports its init function and nothing else, in particular nothing of libcrypto.
if MACOS:
    LINK_FLAGS = ["-Wl,-exported_symbol,_PyInit__core"]
else:
    LINK_FLAGS = ["-pthread", "-Wl,--version-script=csrc/exports.map", "-Wl,-z,relro,-z,now"]
if SANITIZE:
    LINK_FLAGS += [f"-fsanitize={SANITIZE}"]
if COVERAGE:
    LINK_FLAGS += ["--coverage"]


class BuildExt(build_ext):
    libcrypto: Libcrypto | None = None

    def run(self) -> None:
        from Cython.Build import cythonize  # not on top: build_openssl and sdist do without

        check_prerequisites()
        self.libcrypto = libcrypto = choose_libcrypto()
        say(f"libcrypto: OpenSSL {libcrypto.version}, {'bundled' if libcrypto.bundled else 'system'}")
        CORE.include_dirs += libcrypto.include_dirs
        CORE.define_macros = [("AGSF_LIBCRYPTO_BUNDLED", str(int(libcrypto.bundled)))]
        CORE.extra_compile_args = COMMON_FLAGS
        CORE.extra_link_args = [*libcrypto.objects, *libcrypto.link_args, *LINK_FLAGS]
        CORE.depends += [record(libcrypto), *libcrypto.objects]
        # In another folder, because Cython's output differs with and without line numbers.
        folder = "build/cython-lines" if COVERAGE else "build/cython"
        CORE.sources = cythonize(CORE, build_dir=folder, force=self.force, emit_linenums=COVERAGE)[0].sources
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Like build_ext's, but csrc is compiled apart, with stricter flags."""
        if self.force or newer_group([*ext.sources, *ext.depends], self.get_ext_fullpath(ext.name)):
            ext.extra_objects = self.compiler.compile(
                sorted(str(p) for p in Path("csrc").rglob("*.c")),
                output_dir=self.build_temp,
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                extra_postargs=[*COMMON_FLAGS, *CSRC_FLAGS],
            )
        super().build_extension(ext)


def record(libcrypto: Libcrypto) -> str:
    """Writes build/libcrypto.json: benchmarks link the very same libcrypto, and another one or other flags rebuild."""
    path = Path("build/libcrypto.json")
    content = json.dumps({**libcrypto._asdict(), "cflags": [*COMMON_FLAGS, *CSRC_FLAGS]}, indent=2) + "\n"
    if not path.is_file() or path.read_text() != content:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return str(path)


class BdistWheel(bdist_wheel):
    def write_wheelfile(self, wheelfile_base: str, **options: str) -> None:
        """Adds to the wheel what the static libcrypto in it is (PEP 770): nothing else in a wheel tells."""
        super().write_wheelfile(wheelfile_base, **options)
        libcrypto = self.get_finalized_command("build_ext").libcrypto
        if libcrypto and libcrypto.bundled:
            sboms = Path(wheelfile_base, "sboms")
            sboms.mkdir(exist_ok=True)
            bill = bill_of_materials(self.distribution.get_version(), libcrypto)
            (sboms / "ags_fast.cdx.json").write_text(json.dumps(bill, indent=2) + "\n")


def bill_of_materials(version: str, libcrypto: Libcrypto) -> dict[str, object]:
    """CycloneDX 1.6, the same bytes for the same build: it has no time and no serial number."""

    def component(name: str, version: str, purl: str) -> dict[str, object]:
        licenses = [{"license": {"id": "Apache-2.0"}}]
        return {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
            "licenses": licenses,
        }

    def sha256(digest: str) -> list[dict[str, str]]:
        return [{"alg": "SHA-256", "content": digest}]

    library = Path(libcrypto.objects[0])
    openssl = component("openssl", libcrypto.version, f"pkg:generic/openssl@{libcrypto.version}")
    openssl["description"] = "libcrypto, linked statically into ags_fast._core"
    openssl["cpe"] = f"cpe:2.3:a:openssl:openssl:{libcrypto.version}:*:*:*:*:*:*:*"
    openssl["hashes"] = sha256(hashlib.sha256(library.read_bytes()).hexdigest())
    recorded = library.with_name("source.json")
    if recorded.is_file():  # not there when AGS_FAST_OPENSSL_SOURCE was a folder
        source = json.loads(recorded.read_text())
        reference = {"type": "source-distribution", "url": source["url"], "hashes": sha256(source["sha256"])}
        openssl["externalReferences"] = [reference]
    ours = component("ags_fast", version, f"pkg:pypi/ags-fast@{version}")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours},
        "components": [openssl],
        "dependencies": [{"ref": ours["bom-ref"], "dependsOn": [openssl["bom-ref"]]}, {"ref": openssl["bom-ref"]}],
    }


class BuildOpenssl(Command):
    description = "build the static libcrypto into the cache, if it is not there"
    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        print(bundled_libcrypto().objects[0])


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# ---- what PyPI shows

VERSION = re.findall(r'__version__ = "(.+)"', Path("ags_fast/_version.py").read_text())[0]


def readme(text: str, repository: str) -> str:
    """The README for a page elsewhere: links and pictures lead to this version in the repository.

    If nobody has said where that is, a link becomes its text and a path, and there is no picture.
    """

    def lead(link: re.Match[str]) -> str:
        words, target = link.groups()
        if target.startswith(("https:", "#")):
            return link[0]
        if repository:
            return f"[{words}]({repository}/blob/v{VERSION}/{target})"
        return words if words == target else f"{words} (`{target}`)"

    text = re.sub(r"\[([^\]]*)\]\(([^)]*)\)", lead, text)
    if repository:
        return re.sub(r'\b(src|srcset)="(docs/[^"]*)"', rf'\1="{repository}/raw/v{VERSION}/\2"', text)
    return re.sub(r"<picture>.*?</picture>\n+", "", text, flags=re.DOTALL)


def project_urls(repository: str) -> dict[str, str]:
    if not repository:
        return {}
    tree = f"{repository}/blob/v{VERSION}"
    urls = {"Source": repository, "Issues": f"{repository}/issues"}
    return urls | {"Documentation": f"{tree}/docs/index.md", "Changelog": f"{tree}/CHANGELOG.md"}


# By their names Spark finds its data sources.
MODULES = ["pyspark_ags_avro", "pyspark_ags_parquet"]
COMMANDS = {"bdist_wheel": BdistWheel, "build_ext": BuildExt, "build_openssl": BuildOpenssl}

if __name__ == "__main__":  # tests import the rest
    REPOSITORY = os.environ.get("AGS_FAST_REPOSITORY", "").rstrip("/")
    setup(
        ext_modules=[CORE],
        py_modules=MODULES,
        cmdclass=COMMANDS,
        long_description=readme(Path("README.md").read_text(encoding="utf-8"), REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=project_urls(REPOSITORY),
    )
