#!/bin/bash
# A script of CleanRL with the present Gymnasium: cleanrl.sh PEERS WORK_FOLDER SCRIPT STEPS SEED [FLAG ...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
peers=$(cd "$1" && pwd) work=$2 script=$3 steps=$4 seed=$5
shift 5
cd "$work" # where it writes runs/
exec "${PEERS_PYTHON:-$here/../../.venv/bin/python}" "$here/run_cleanrl.py" \
    "$peers/cleanrl/cleanrl/$script.py" --total-timesteps "$steps" --seed "$seed" "$@"
