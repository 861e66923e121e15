#!/bin/bash
# DI-engine's IMPALA on CartPole: ding.sh PEERS WORK_FOLDER STEPS SEED
set -eu
here=$(cd "$(dirname "$0")" && pwd)
peers=$(cd "$1" && pwd) work=$2 steps=$3 seed=$4
cd "$work" # where it writes cartpole_impala_seed0/
PYTHONPATH=$peers/ding exec "${PEERS_PYTHON:-$here/../../.venv/bin/python}" "$here/run_ding.py" "$steps" "$seed"
