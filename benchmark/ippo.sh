#!/usr/bin/env bash
# What the pages of ippo and ippo_per_agent report: every trial, then the curve. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# the defaults of both (ent_coef of ippo_per_agent tuned: see its page), 5 seeds, beside a random policy
for script in ippo ippo_per_agent; do
    $PYTHON benchmark/run.py --command "python cleanmarl/$script.py" --env-ids mpe/simple_spread_v3 --num-seeds 5 \
        --workers "$WORKERS" --runs-dir runs/$script
done
$PYTHON benchmark/report.py runs/ippo_per_agent --out docs/results/ippo_per_agent_simple_spread \
    --note "the defaults" --command benchmark/ippo.sh
