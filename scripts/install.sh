#!/bin/sh
# Sets up .venv with muon-offload and everything that was tested with it; does nothing if that is done.
#
# .venv/.made-here marks an environment that this script may throw away, .venv/.installed one that is complete:
# it holds a checksum of what was installed from. An environment without it was interrupted half-way, which pip
# cannot repair reliably, and is made again; the downloads are in pip's cache by then.
set -eu
cd "$(dirname "$0")/.."

made_here=.venv/.made-here
installed=.venv/.installed
wanted=$({ pwd; cat pyproject.toml constraints.txt; } | cksum)

runs() {
    .venv/bin/python -c '' >/dev/null 2>&1
}

if [ -f "$installed" ] && [ "$(cat "$installed")" = "$wanted" ] && runs; then
    exit 0
fi

if [ -e .venv ] && [ ! -f "$made_here" ]; then
    echo "error: .venv was not made by 'make install' and is left alone; move it away: mv .venv .venv.mine" >&2
    exit 1
fi

# A change of the requirements, in the same folder, updates a complete environment in place.
if [ ! -f "$installed" ] || ! runs || ! grep -qs "$(pwd)" .venv/bin/muon-offload; then
    python=$(sh scripts/find_python.sh)
    rm -rf .venv
    mkdir .venv
    touch "$made_here"
    echo "Setting up .venv with $("$python" -V) ($python)"
    "$python" -m venv .venv
fi

rm -f "$installed"
echo "Installing muon-offload, PyTorch and Megatron-core into .venv (about 6 GB; some minutes the first time)"
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; then
    echo "error: the installation failed; see above, then: make install" >&2
    exit 1
fi
echo "$wanted" >"$installed"
echo "Installed. The command is .venv/bin/muon-offload"
