#!/usr/bin/env bash
# Builds kernel.c with the flags and the libcrypto of the last build (build/libcrypto.json) and runs it. CC chooses the
# compiler.
#
#   benchmarks/kernel.sh [KEY_NBYTES]
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ask='
import json
built = json.load(open("build/libcrypto.json"))
print(*built["cflags"], *("-I" + path for path in built["include_dirs"]), "-Icsrc")
print(*built["objects"], *built["link_args"])'
{ read -ra flags; read -ra libcrypto; } < <(.venv/bin/python -P -c "$ask")
"${CC:-cc}" "${flags[@]}" benchmarks/kernel.c csrc/vaes/*.c "${libcrypto[@]}" -pthread -o "$work/kernel"
"$work/kernel" "$@"
