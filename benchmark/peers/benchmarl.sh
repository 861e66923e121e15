#!/bin/bash
# BenchMARL's MAPPO on a task of MPE: benchmarl.sh PEERS WORK_FOLDER TASK STEPS SEED
set -eu
here=$(cd "$(dirname "$0")" && pwd)
peers=$(cd "$1" && pwd)
shift
PYTHONPATH=$peers/benchmarl exec "${PEERS_PYTHON:-$here/../../.venv/bin/python}" "$here/run_benchmarl.py" "$@"
