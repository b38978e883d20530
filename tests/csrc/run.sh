#!/usr/bin/env bash
# Builds csrc/ with the C tests of this folder and runs them: a line per program, and exit status 1 if one failed.
#
#   tests/csrc/run.sh MODE...
#     plain            as the extension is built, warnings as errors
#     asan             AddressSanitizer (with leaks) and UndefinedBehaviorSanitizer, of gcc and of clang
#     tsan             ThreadSanitizer, of gcc and of clang
#     msan             MemorySanitizer over the AES-GCM kernels; needs clang. libcrypto, which most other programs look
#                      into, is compiled without, and what it writes would count as uninitialised.
#     levels           the AES-GCM kernels without optimisation and with most of it, by gcc and by clang
#     fuzz [SECONDS]   libFuzzer with both of asan's, by default for 60 seconds each; needs clang
#     coverage         which lines of csrc/ they run: gcov's data in build/coverage/csrc
#     large            sizes over 2 GiB; takes 3 GiB of memory
#     valgrind         memcheck over the programs that do not depend on time
#     secrets          branches and addresses that depend on a key or a text; needs valgrind
#     times            whether the time of a message does
#
# libcrypto and the flags are those of the last build (build/libcrypto.json; without it, setup.py builds once).
# CC chooses the one compiler of all modes but fuzz, PYTHON runs setup.py, TMPDIR is where everything temporary goes.
#
# No limit of time decides what passes: a program that is still running after ten minutes is taken to hang.
set -euo pipefail
cd "$(dirname "$0")/../.."

FUZZERS=(fuzz_open fuzz_parquet)
TESTS=(aead counters runs failures files pause pool ahead memory locks fork rewrap thrift parquet avro choice provider vaes lanes2 lanes4)
KERNELS="test_vaes test_lanes2 test_lanes4"
BY_KERNEL=" aead runs failures files ahead memory rewrap parquet " # run twice: with libcrypto's AES-GCM and with our own
FUZZ_SECONDS=60
JOBS=$(nproc)
COMPILERS=(${CC:+"$CC"})
((${#COMPILERS[@]})) || COMPILERS=(gcc clang) # each sanitizer sees what the other's does not
WORK=$(mktemp -d)
TEMPORARY=$WORK
trap 'rm -rf "$TEMPORARY"' EXIT

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

# A job that may run now: as many at a time as there are processors.
slot() { while (($(jobs -rp | wc -l) >= JOBS)); do wait -n || true; done; }

# compile_all FOLDER COMPILER FLAG...: the objects of csrc/, which all programs of a mode share.
compile_all() {
    local folder=$1 compiler=$2 file
    shift 2
    mkdir -p "$folder"
    for file in csrc/*.c csrc/vaes/*.c; do
        slot
        $compiler "${CFLAGS[@]}" "${INCLUDES[@]}" -Icsrc -Werror "$@" -c "$file" -o "$folder/$(basename "$file" .c).o" &
    done
    wait
}

# build OUTPUT SOURCE OBJECTS COMPILER FLAG...: a program. What it defines as __wrap_x() comes between csrc and the
# system's x().
build() {
    local output=$1 source=$2 objects=$3 compiler=$4
    shift 4
    local wraps headers
    headers=$(sed -nE 's/^#include "(clock|pages)\.h"/tests\/csrc\/\1.h/p' "$source")
    # shellcheck disable=SC2086 # the words of headers are files
    wraps=$(sed -nE 's/^[a-z].*\b__wrap_([a-z0-9_]+)\(.*/-Wl,--wrap=\1/p' "$source" $headers | sort -u)
    # shellcheck disable=SC2086 # the words of wraps are arguments
    $compiler "${CFLAGS[@]}" "${INCLUDES[@]}" -Icsrc -Werror -Wno-missing-prototypes "$@" \
        "$source" "$objects"/*.o "${LIBCRYPTO[@]}" -pthread $wraps -o "$output"
}

# check NAME OBJECTS COMPILER RUNNER FLAG...: builds tests/csrc/NAME.c and runs it; its one line goes to stdout at the end.
check() {
    local name=$1 objects=$2 compiler=$3 runner=$4 start=$EPOCHREALTIME status=0 verdict=PASS
    local work=$2.$1 kernel kernels=openssl
    shift 4
    mkdir "$work"
    [[ $BY_KERNEL != *" ${name#test_} "* ]] || kernels+=" vaes"
    {
        build "$work/run" "tests/csrc/$name.c" "$objects" "$compiler" "$@" || status=$?
        for kernel in $kernels; do
            ((status != 0)) || (cd "$work" && AGS_FAST_AES=$kernel $runner ./run) || status=$?
        done
    } >"$work.log" 2>&1
    ((status == 0)) || verdict="FAIL, exit status $status"
    ((status <= 128)) || verdict+=" (signal $((status - 128)))"
    printf '%-9s %-6s %-14s %s, %.1f s\n' "$MODE" "$(basename "${compiler%% *}")" "$name" "$verdict" \
        "$(awk "BEGIN { print $EPOCHREALTIME - $start }")"
    if ((status != 0)); then
        sed 's/^/    /' "$work.log" | head -n 80
        touch "$WORK/failed"
    fi
}

# check_all COMPILER RUNNER NAMES FLAG...: several programs at a time.
check_all() {
    local compiler=$1 runner=$2 names=$3 objects name
    shift 3
    objects=$WORK/$MODE.$(basename "${compiler%% *}")
    compile_all "$objects" "$compiler" "$@" 2>&1 | sed 's/^/    /'
    for name in $names; do
        slot
        check "$name" "$objects" "$compiler" "$runner" -DFUZZ_ALONE "$@" &
    done
    wait
}

run_mode() {
    local tests="${TESTS[*]/#/test_} ${FUZZERS[*]}" cc sanitizer
    export CORPUS=$PWD/tests/csrc/corpus_parquet
    export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
    export TSAN_OPTIONS=halt_on_error=1
    case $MODE in
        plain)
            check_all "${CC:-cc}" "" "$tests"
            ;;
        asan)
            sanitizer="-fsanitize=address,undefined -fno-sanitize-recover=all"
            for cc in "${COMPILERS[@]}"; do
                # shellcheck disable=SC2086
                check_all "$cc" "" "$tests" -O1 -g -fno-omit-frame-pointer $sanitizer
            done
            ;;
        tsan)
            # Not test_fork: ThreadSanitizer lets no child of a process with threads start threads of its own.
            # Without address randomisation, since kernels that randomise much put memory where it wants its own.
            for cc in "${COMPILERS[@]}"; do
                check_all "$cc" "$(command -v setarch >/dev/null && echo "setarch $(uname -m) -R")" \
                    "${tests/test_fork /}" -O1 -g -fno-omit-frame-pointer -fsanitize=thread
            done
            ;;
        msan)
            check_all clang "" "$KERNELS" -O1 -g -fno-omit-frame-pointer -fsanitize=memory
            ;;
        levels)
            for cc in "${COMPILERS[@]}"; do
                for MODE in -O0 -O3; do check_all "$cc" "" "$KERNELS" "$MODE"; done
            done
            ;;
        coverage)
            WORK=$PWD/build/coverage/csrc # gcov finds what the compiler wrote where it was written
            rm -rf "$WORK"
            mkdir -p "$WORK"
            check_all "${CC:-cc}" "" "$tests" -O1 -g --coverage -fprofile-update=atomic
            ;;
        large)
            check_all "${CC:-cc}" "" test_large
            ;;
        valgrind)
            check_all "${CC:-cc}" "valgrind -q --error-exitcode=9" "test_aead test_files test_locks" -O1 -g
            ;;
        secrets)
            for cc in "${COMPILERS[@]}"; do check_all "$cc" "valgrind -q" test_secrets -gdwarf-4; done
            ;;
        times)
            for cc in "${COMPILERS[@]}"; do check_all "$cc" "" test_times; done
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
    compile_all "$WORK/fuzz.clang" clang "${flags[@]}" -fsanitize=fuzzer-no-link,address,undefined
    if [[ -d tests/csrc/corpus_${name#fuzz_} ]]; then
        cp "tests/csrc/corpus_${name#fuzz_}"/* "$folder/corpus"
    else
        build "$folder/seeds" "tests/csrc/$name.c" "$WORK/fuzz.clang" clang -DFUZZ_ALONE "${flags[@]}" \
            -fsanitize=address,undefined
        "$folder/seeds" seeds "$folder/corpus"
    fi
    build "$folder/run" "tests/csrc/$name.c" "$WORK/fuzz.clang" clang "${flags[@]}" -fsanitize=fuzzer,address,undefined
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
