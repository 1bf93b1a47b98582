#!/usr/bin/env bash
# Makes a virtual environment with this package in it: tools/install.sh PYTHON VENV [EXTRA]; `make install` calls it.
#
# uv installs in seconds what takes pip minutes.  Where it is not there it is fetched, and where it fails pip does the
# work.  It reads none of pip's settings (mirrors, folders of wheels, certificates), so they are handed to it.
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

# What the program imports is compiled once, for all processes to come: uv does not, and pip compiles all packages.
# Not below PYTHONDONTWRITEBYTECODE, which would have torch compiled anew by each process.
unset PYTHONDONTWRITEBYTECODE
"$venv/bin/python" -c 'import torch._dynamo' &
"$venv/bin/python" -c 'import vesuvius.commands.train, vesuvius.stream.ray.session'
wait
