#!/usr/bin/env bash
# What the page of ippo_per_agent reports: every trial, then the curve. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# the defaults (ent_coef tuned: see the page); ippo.py is in benchmark/mappo.sh
$PYTHON benchmark/run.py --command "python cleanmarl/ippo_per_agent.py" --env-ids mpe/simple_spread_v3 --num-seeds 5 \
    --workers "$WORKERS" --runs-dir runs/ippo_per_agent
$PYTHON benchmark/report.py runs/ippo_per_agent --out docs/results/ippo_per_agent_simple_spread \
    --note "the defaults" --command benchmark/ippo.sh
