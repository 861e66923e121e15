#!/bin/bash
# skrl's IPPO on simple_spread: skrl.sh PEERS WORK_FOLDER STEPS SEED
set -eu
here=$(cd "$(dirname "$0")" && pwd)
peers=$(cd "$1" && pwd) work=$2 steps=$3 seed=$4
cd "$work" # where it writes runs/
PYTHONPATH=$peers/skrl exec "${PEERS_PYTHON:-$here/../../.venv/bin/python}" "$here/run_skrl.py" "$steps" "$seed"
