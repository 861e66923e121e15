#!/usr/bin/env bash
# What docs/algorithms/impala*.md report: every trial of the IMPALA family. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# one process, so that the curves repeat exactly; then with an actor
$PYTHON benchmark/run.py --command "python cleanmarl/impala.py" --env-ids CartPole-v1 --num-seeds 5 \
    --workers "$WORKERS" --runs-dir runs/impala_cartpole -- --num-actors 0
$PYTHON benchmark/report.py runs/impala_cartpole --out docs/results/impala_cartpole \
    --note "the defaults without actors (\`--num-actors 0\`)" --command benchmark/impala.sh
$PYTHON benchmark/run.py --command "python cleanmarl/impala.py" --env-ids CartPole-v1 --num-seeds 5 \
    --workers 1 --runs-dir runs/impala_cartpole_actors
$PYTHON benchmark/report.py runs/impala_cartpole_actors --out docs/results/impala_cartpole_actors \
    --note "the defaults: one actor" --command benchmark/impala.sh

$PYTHON benchmark/run.py --command "python cleanmarl/impala_replay.py" --env-ids CartPole-v1 --num-seeds 5 \
    --workers "$WORKERS" --runs-dir runs/impala_replay_cartpole -- --num-actors 0

$PYTHON benchmark/run.py --command "python cleanmarl/impala.py" --env-ids LunarLander-v3 --num-seeds 3 \
    --workers "$WORKERS" --runs-dir runs/impala_lunarlander -- --num-actors 0 --total-timesteps 1000000 \
    --num-envs 32 --unroll-length 16 --learning-rate 3e-4 --ent-coef 0.001 --optimizer-eps 5.12 --max-grad-norm 2560
    # DI-engine's number and length of unrolls and its learning rate, not its replay; norm and epsilon as before losses were sums
$PYTHON benchmark/report.py runs/impala_lunarlander --out docs/results/impala_lunarlander \
    --note "32 environments, unrolls of 16 steps, learning rate 3e-4, without actors" --command benchmark/impala.sh

$PYTHON benchmark/run.py --command "python cleanmarl/impala_continuous_action.py" --env-ids HalfCheetah-v5 --num-seeds 3 \
    --workers "$WORKERS" --runs-dir runs/impala_continuous_action -- --num-actors 0
$PYTHON benchmark/report.py runs/impala_continuous_action --out docs/results/impala_continuous_action_halfcheetah \
    --note "the defaults without actors (\`--num-actors 0\`)" --command benchmark/impala.sh

# hours on one core: the shallow network, eight unrolls in a gradient step
$PYTHON benchmark/run.py --command "python cleanmarl/impala_atari_envpool.py" --env-ids Pong-v5 --num-seeds 1 \
    --workers 1 --runs-dir runs/impala_pong -- --shallow --num-actors 0 --num-envs 16 --batch-size 8
$PYTHON benchmark/report.py runs/impala_pong --unfinished --out docs/results/impala_atari_envpool_pong \
    --note "the shallow network, batches of 8 unrolls of 16 environments, no other process" --command benchmark/impala.sh

# days on two cores; hours with a GPU: --num-actors 8 --device cuda
$PYTHON benchmark/run.py --command "python cleanmarl/impala_atari_envpool.py" --env-ids Pong-v5 SpaceInvaders-v5 Qbert-v5 \
    --num-seeds 3 --workers 1 --runs-dir runs/impala_atari -- --num-actors 0
