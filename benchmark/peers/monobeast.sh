#!/bin/bash
# MonoBeast on Pong: monobeast.sh PEERS WORK_FOLDER STEPS [FLAGS OF MONOBEAST]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$1/torchbeast:$1/ding # Gym is one of DI-engine's packages
exec "${PEERS_PYTHON:-$here/../../.venv/bin/python}" "$here/run_monobeast.py" "$3" "$2/monobeast" "${@:4}"
