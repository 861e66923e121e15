#!/bin/bash
# RLlib's IMPALA on CartPole: rllib.sh PEERS STEPS SEED
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$1/rllib
exec "${PEERS_PYTHON:-$here/../../.venv/bin/python}" "$here/run_rllib.py" "$2" "$3"
