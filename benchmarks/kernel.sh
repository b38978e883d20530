#!/usr/bin/env bash
# Builds kernel.c with the flags and the libcrypto of the last build (build/libcrypto.json) and runs it. CC chooses the
# compiler. LANES=1 adds the kernel with 128-bit instructions, which CPUs without VAES run as well.
#
#   benchmarks/kernel.sh [KEY_NBYTES]
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ask='
import json
built = json.load(open("build/libcrypto.json"))
print(*built["cflags"], *("-I" + path for path in built["include_dirs"]), "-Icsrc", "-Itests/csrc")
print(*built["objects"], *built["link_args"])'
{ read -ra flags; read -ra libcrypto; } < <(.venv/bin/python -P -c "$ask")
"${CC:-cc}" "${flags[@]}" ${LANES:+"-DLANES_WANTED=$LANES"} benchmarks/kernel.c csrc/vaes/*.c "${libcrypto[@]}" -pthread -o "$work/kernel"
"$work/kernel" "$@"
