#!/bin/sh
# Prints the path of a Python that can run muon-offload, or says in one line how to get one.
#
# The first of: $PYTHON, then by version (3.12, the reference, first) each python3.N on PATH, of pyenv and of
# uv, then python3. Every candidate is run, not only found: pyenv's shims are on PATH for versions that
# are not active, and some distributions ship a Python without venv.
set -u

usable() {
    [ -n "$1" ] && "$1" -c '
import sys, sysconfig, venv, ensurepip
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
sys.exit(sys.version_info < (3, 12) or free_threaded)' >/dev/null 2>&1
}

accept() {
    if usable "$1"; then
        "$1" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
        exit 0
    fi
}

if [ -n "${PYTHON:-}" ]; then
    accept "$PYTHON"
    echo "error: PYTHON=$PYTHON is not a Python 3.12 or newer with venv; name another or unset it." >&2
    exit 1
fi

for minor in 12 13 14; do
    # A later PATH entry may work where the first, a shim, does not.
    IFS=:
    for folder in $PATH; do
        accept "$folder/python3.$minor"
    done
    unset IFS
    for candidate in \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python3 \
        "$HOME/.pyenv/versions/3.$minor".*/bin/python3 \
        "$HOME/.local/share/uv/python/cpython-3.$minor".*/bin/python3 \
        "/opt/homebrew/bin/python3.$minor" "/usr/local/bin/python3.$minor"; do
        accept "$candidate"
    done
done
accept python3

echo "error: no Python 3.12 or newer with venv was found; get one with: pyenv install 3.12 (or apt install python3.12-venv, or uv python install 3.12), or name one: make PYTHON=/path/to/python3.12" >&2
exit 1
