#!/usr/bin/env bash
# What docs/algorithms/maddpg.md and its variants' pages report: every trial, then the curves. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# Lowe et al.'s settings for particles, as far as there are flags for them: 40 episodes are about their 1,024 steps
PARTICLES="--batch-size 40 --gamma 0.95 --clip-gradients 0.5 --actor-hidden-dim 64 --critic-hidden-dim 64
    --learning-rate-actor 1e-2 --learning-rate-critic 1e-2"

$PYTHON benchmark/run.py --command "python cleanmarl/maddpg_multienvs.py" --num-seeds 5 --workers "$WORKERS" \
    --env-ids mpe/simple_spread_v3 mpe/simple_speaker_listener_v4 mpe/simple_adversary_v3 \
    --runs-dir runs/maddpg_multienvs -- $PARTICLES --epochs 1
