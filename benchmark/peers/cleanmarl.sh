#!/bin/bash
# A script of CleanMARL: cleanmarl.sh PEERS WORK_FOLDER SCRIPT STEPS SEED [FLAG ...]; on simple_spread without --env_type
set -eu
here=$(cd "$(dirname "$0")" && pwd)
peers=$(cd "$1" && pwd) work=$2 script=$3 steps=$4 seed=$5
shift 5
[[ "$*" == *--env_type* ]] || set -- --env_type pz --env_family mpe --env_name simple_spread_v3 "$@"
cd "$work" # where it writes runs/
exec "${PEERS_PYTHON:-$here/../../.venv/bin/python}" "$here/run_cleanmarl.py" \
    "$peers/cleanmarl/cleanmarl/$script.py" --total_timesteps "$steps" --seed "$seed" "$@"
