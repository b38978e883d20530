#!/usr/bin/env bash
# Builds csrc/ with the C tests of this folder and runs them: a line per program, and exit status 1 if one failed.
#
#   tests/csrc/run.sh MODE...
#     plain            as the extension is built, warnings as errors
#     asan             AddressSanitizer (with leaks) and UndefinedBehaviorSanitizer
#     tsan             ThreadSanitizer
#     fuzz [SECONDS]   libFuzzer with both of asan's, by default for 60 seconds each; needs clang
#     large            sizes over 2 GiB; takes 3 GiB of memory
#     valgrind         memcheck over the programs that do not depend on time
#
# libcrypto and the flags are those of the last build (build/libcrypto.json; without it, setup.py builds once).
# CC chooses the compiler of all modes but fuzz, PYTHON runs setup.py, TMPDIR is where everything temporary goes.
set -euo pipefail
cd "$(dirname "$0")/../.."

FUZZERS=(fuzz_open fuzz_parquet)
TESTS=(aead runs failures files pause pool memory locks fork rewrap thrift parquet)
FUZZ_SECONDS=60
JOBS=$(nproc)
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python
fi

# Sets INCLUDES, LIBCRYPTO and CFLAGS (arrays) to what the extension was built with.
read_build() {
    local ask='
import json, os
built = json.load(open("build/libcrypto.json"))
assert all(map(os.path.exists, built["objects"]))
print(*("-I" + path for path in built["include_dirs"]), f"-DAGSF_LIBCRYPTO_BUNDLED={int(built['"'bundled'"'])}")
print(*built["objects"], *built["link_args"])
print(*built["cflags"])'
    if ! "$PYTHON" -c "$ask" >"$WORK/build" 2>/dev/null; then
        echo "build/libcrypto.json is not there, or what it names is gone: building first"
        "$PYTHON" setup.py -q build_ext --inplace
        "$PYTHON" -c "$ask" >"$WORK/build"
    fi
    { read -ra INCLUDES; read -ra LIBCRYPTO; read -ra CFLAGS; } <"$WORK/build"
}

# build OUTPUT SOURCE COMPILER FLAG...: one compiler call for a program and all of csrc/. What a program defines as
# __wrap_x() comes between csrc and the system's x().
build() {
    local output=$1 source=$2 compiler=$3
    shift 3
    local wraps
    wraps=$(sed -nE 's/^[a-z].*\b__wrap_([a-z0-9_]+)\(.*/-Wl,--wrap=\1/p' "$source" | sort -u)
    # shellcheck disable=SC2086 # the words of wraps are arguments
    $compiler "${CFLAGS[@]}" "${INCLUDES[@]}" -Icsrc -Werror -Wno-missing-prototypes "$@" \
        "$source" csrc/*.c "${LIBCRYPTO[@]}" -pthread $wraps -o "$output"
}

# check NAME COMPILER RUNNER FLAG...: builds tests/csrc/NAME.c and runs it; its one line goes to stdout at the end.
check() {
    local name=$1 compiler=$2 runner=$3 start=$EPOCHREALTIME status=0 verdict=PASS
    shift 3
    mkdir "$WORK/$MODE.$name"
    {
        build "$WORK/$MODE.$name/run" "tests/csrc/$name.c" "$compiler" "$@" &&
            (cd "$WORK/$MODE.$name" && $runner ./run)
    } >"$WORK/$MODE.$name.log" 2>&1 || status=$?
    ((status == 0)) || verdict="FAIL, exit status $status"
    ((status <= 128)) || verdict+=" (signal $((status - 128)))"
    printf '%-9s %-14s %s, %.1f s\n' "$MODE" "$name" "$verdict" \
        "$(awk "BEGIN { print $EPOCHREALTIME - $start }")"
    if ((status != 0)); then
        sed 's/^/    /' "$WORK/$MODE.$name.log" | head -n 80
        touch "$WORK/failed"
    fi
}

# check_all COMPILER RUNNER NAMES FLAG...: several programs at a time.
check_all() {
    local compiler=$1 runner=$2 names=$3
    shift 3
    for name in $names; do
        while (($(jobs -rp | wc -l) >= JOBS)); do wait -n; done
        check "$name" "$compiler" "$runner" "$@" &
    done
    wait
}

run_mode() {
    local tests="${TESTS[*]/#/test_} ${FUZZERS[*]}" cc=${CC:-cc} sanitizer
    export CORPUS=$PWD/tests/csrc/corpus_parquet
    export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
    export TSAN_OPTIONS=halt_on_error=1
    case $MODE in
        plain)
            check_all "$cc" "" "$tests" -DFUZZ_ALONE
            ;;
        asan)
            sanitizer="-fsanitize=address,undefined -fno-sanitize-recover=all"
            # shellcheck disable=SC2086
            check_all "$cc" "" "$tests" -DFUZZ_ALONE -O1 -g -fno-omit-frame-pointer $sanitizer
            ;;
        tsan)
            # Not test_fork: ThreadSanitizer lets no child of a process with threads start threads of its own.
            # Without address randomisation, since kernels that randomise much put memory where it wants its own.
            check_all "$cc" "$(command -v setarch >/dev/null && echo "setarch $(uname -m) -R")" \
                "${tests/test_fork /}" -DFUZZ_ALONE -O1 -g -fno-omit-frame-pointer -fsanitize=thread
            ;;
        large)
            check test_large "$cc" ""
            ;;
        valgrind)
            check_all "$cc" "valgrind -q --error-exitcode=9" "test_aead test_files test_locks" -O1 -g
            ;;
        fuzz)
            for name in "${FUZZERS[@]}"; do fuzz "$name"; done
            ;;
        *)
            sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' tests/csrc/run.sh >&2
            exit 2
            ;;
    esac
}

# fuzz NAME: begins with the corpus in the tree, or with what the program itself makes.
fuzz() {
    local name=$1 folder=$WORK/$1 status=0
    local flags=(-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all)
    mkdir -p "$folder/corpus"
    if [[ -d tests/csrc/corpus_${name#fuzz_} ]]; then
        cp "tests/csrc/corpus_${name#fuzz_}"/* "$folder/corpus"
    else
        build "$folder/seeds" "tests/csrc/$name.c" clang -DFUZZ_ALONE
        "$folder/seeds" seeds "$folder/corpus"
    fi
    build "$folder/run" "tests/csrc/$name.c" clang "${flags[@]}" -fsanitize=fuzzer,address,undefined
    # libFuzzer's own workers would share an output: one process, all of whose threads are the engine's.
    (cd "$folder" && ./run -max_total_time="$FUZZ_SECONDS" -max_len=8192 -timeout=100 -print_final_stats=1 -verbosity=0 corpus) ||
        status=$?
    ((status == 0)) || {
        touch "$WORK/failed"
        for input in "$folder"/{crash,leak,timeout,oom,slow-unit}-*; do
            [[ ! -e $input ]] || { echo "an input that fails ($(basename "$input")):"; base64 "$input"; }
        done
    }
    printf 'fuzz      %-14s %s\n' "$name" "$([[ $status == 0 ]] && echo PASS || echo "FAIL, exit status $status")"
}

(($# > 0)) || set -- help
[[ $1 == help ]] || read_build
while (($# > 0)); do
    MODE=$1
    shift
    if [[ $MODE == fuzz && ${1:-} =~ ^[0-9]+$ ]]; then
        FUZZ_SECONDS=$1
        shift
    fi
    run_mode
done
[[ ! -e $WORK/failed ]]
