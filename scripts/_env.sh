# Shared by the scripts beside it: finds the repository and keeps a virtual environment for it.
# Sourced, never run. `prepare_env` sets VENV to an environment that is whole and up to date.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

die() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 1
}

# True when $1 is a Python that this package supports and that can make virtual environments.
# Debian ships Pythons without ensurepip, and pyenv ships shims that only print an error.
usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' \
        >/dev/null 2>&1
}

# Prints the Python to build the environment with.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        usable_python "$PYTHON" ||
            die "PYTHON=$PYTHON is not a Python 3.10 to 3.13 with venv and ensurepip; set PYTHON to one that is"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3.10 python3 python; do
        if usable_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.10 to 3.13 with venv and ensurepip found; install one (on Debian also its python3-venv package), or set PYTHON to its path"
}

# What an environment was built from. The root is part of it, because an environment cannot be moved.
fingerprint() {
    printf '%s\n' "$ROOT"
    cat "$ROOT/pyproject.toml" "$1"
}

# prepare_env SET: makes or updates the environment for one tested set of versions (3.9 or 4.3).
prepare_env() {
    local constraints="$ROOT/constraints/transformer-lens-$1.txt" stamp wanted python
    [ -f "$constraints" ] ||
        die "no tested set '$1'; there is: $(cd "$ROOT/constraints" && printf '%s ' *.txt)"
    if [ "$1" = 3.9 ]; then VENV="$ROOT/.venv"; else VENV="$ROOT/.venv-$1"; fi

    stamp="$VENV/.lens-rope-stamp"
    wanted=$(fingerprint "$constraints" | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
        return
    fi

    python=$(find_python) || exit 1
    printf 'Setting up %s (once; several minutes)\n' "$VENV" >&2
    # --clear: an environment without a stamp is the rest of an interrupted install.
    "$python" -m venv --clear "$VENV" || die "cannot create $VENV with $python"
    # Which build of torch this takes, for the CPU or for CUDA, is what pip is set up to offer.
    "$VENV/bin/python" -m pip install --quiet --constraint "$constraints" --editable "$ROOT[dev]" ||
        die "the installation failed; pip's message is above. Run this again to start over"
    # Last of all, and by renaming, so that only a finished install carries a stamp.
    printf '%s\n' "$wanted" >"$stamp.new" && mv "$stamp.new" "$stamp"
}
