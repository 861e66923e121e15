#!/usr/bin/env bash
# What docs/algorithms/ippo.md reports: every trial of ippo.py, then its curve. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# our defaults (ent_coef tuned: see docs/algorithms/ippo.md), 5 seeds, beside a random policy
$PYTHON benchmark/run.py --command "python cleanmarl/ippo.py" --env-ids mpe/simple_spread_v3 --num-seeds 5 \
    --workers "$WORKERS" --runs-dir runs/ippo
$PYTHON benchmark/plot.py runs/ippo --out docs/results/ippo_simple_spread --line random=-79.3 "best peer (200k steps)=-63.9" \
    --note "the defaults" --command benchmark/ippo.sh
