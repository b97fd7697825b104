#!/bin/sh
# Make the environments of the comparison with other frameworks, `.venv-trl` and `.venv-verl` in the repository's root.
#
#     benchmarks/peers/setup.sh [trl] [verl]
#
# PYTHON: the interpreter, `python` by default; it must have the version of the one that runs `benchmarks/peers/run.py`.
set -eu
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || set -- trl verl
for peer in "$@"; do
    "${PYTHON:-python}" -m venv ".venv-$peer"
    ".venv-$peer/bin/python" -m pip install --quiet --quiet --requirement "benchmarks/peers/$peer.txt"
    ".venv-$peer/bin/python" -m pip check
done
