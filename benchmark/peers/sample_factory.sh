#!/bin/bash
# Sample Factory's APPO on CartPole: sample_factory.sh PEERS WORK_FOLDER STEPS SEED
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$2/sample_factory_$3_$4 # it goes on with what it finds in a folder
export PYTHONPATH=$1/sf:$1/sample-factory
exec "${PEERS_PYTHON:-$here/../../.venv/bin/python}" "$here/run_sample_factory.py" "$3" "$4" "$folder"
