#!/usr/bin/env bash
# Make a virtual environment with this package in it: tools/install.sh PYTHON VENV [EXTRA]; `make install` calls it.
#
# uv installs in seconds what takes pip minutes.  It is fetched if missing, and pip is the fallback.  It ignores pip's settings
# (mirrors, folders of wheels, certificates), so they are passed to it.
set -euo pipefail
python=$1 venv=$2 package=".${3:+[$3]}"

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    [ -x "$venv/bin/uv" ] || pip install -qq uv || true
    uv=$venv/bin/uv
fi

settings=$(pip config list)
setting() { sed -n "s/^.*\.$1='\(.*\)'\$/\1/p" <<< "$settings" | tail -n 1; }
hand_over() { [ -n "${!1:-}" ] || [ -z "$2" ] || export "$1=$2"; }
hand_over UV_DEFAULT_INDEX "$(setting index-url)"
hand_over UV_INDEX "$(setting extra-index-url)"
hand_over UV_FIND_LINKS "$(setting find-links | tr ' ' ',')"
hand_over SSL_CERT_FILE "$(setting cert)"
hand_over UV_INDEX_STRATEGY unsafe-best-match # the best version of all indexes, as pip chooses

export VIRTUAL_ENV=$venv
"$uv" pip install --quiet --constraint constraints.txt --editable "$package" ||
    PIP_CONSTRAINT=constraints.txt pip install --quiet --editable "$package"

# Imports are compiled once for all later processes: uv does not, and pip compiles all packages.
# PYTHONDONTWRITEBYTECODE would make each process compile torch again.
unset PYTHONDONTWRITEBYTECODE
"$venv/bin/python" -c 'import torch._dynamo' &
"$venv/bin/python" -c "import vesuvius.${3:+stream.ray.session, vesuvius.}commands.train"
wait
