#!/usr/bin/env bash
# What docs/algorithms/impala*.md report: every trial of the IMPALA family. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# one process, so that the curves repeat exactly; then with two actors
$PYTHON benchmark/run.py --command "python cleanmarl/impala.py" --env-ids CartPole-v1 --num-seeds 5 \
    --workers "$WORKERS" --runs-dir runs/impala_cartpole -- --num-actors 0
$PYTHON benchmark/plot.py runs/impala_cartpole --out docs/results/impala_cartpole --line random=22 \
    --note "the defaults without actors (\`--num-actors 0\`)" --command benchmark/impala.sh
$PYTHON benchmark/run.py --command "python cleanmarl/impala.py" --env-ids CartPole-v1 --num-seeds 5 \
    --workers 1 --runs-dir runs/impala_cartpole_actors -- --num-actors 2
$PYTHON benchmark/plot.py runs/impala_cartpole_actors --out docs/results/impala_cartpole_actors --line random=22 \
    --note "the defaults: two actors" --command benchmark/impala.sh

$PYTHON benchmark/run.py --command "python cleanmarl/impala_replay.py" --env-ids CartPole-v1 --num-seeds 5 \
    --workers "$WORKERS" --runs-dir runs/impala_replay_cartpole -- --num-actors 0

$PYTHON benchmark/run.py --command "python cleanmarl/impala.py" --env-ids LunarLander-v3 --num-seeds 3 \
    --workers "$WORKERS" --runs-dir runs/impala_lunarlander -- --num-actors 0 --total-timesteps 1000000 \
    --num-envs 32 --unroll-length 16 --learning-rate 3e-4 --ent-coef 0.001  # DI-engine's settings for this task
$PYTHON benchmark/plot.py runs/impala_lunarlander --out docs/results/impala_lunarlander --line random=-186.1 \
    --note "32 environments, unrolls of 16 steps, learning rate 3e-4, without actors" --command benchmark/impala.sh

$PYTHON benchmark/run.py --command "python cleanmarl/impala_continuous_action.py" --env-ids HalfCheetah-v5 --num-seeds 3 \
    --workers "$WORKERS" --runs-dir runs/impala_continuous_action -- --num-actors 0
$PYTHON benchmark/plot.py runs/impala_continuous_action --out docs/results/impala_continuous_action_halfcheetah \
    --line "PPO write-up, v2=2148" \
    --note "the defaults without actors (\`--num-actors 0\`)" --command benchmark/impala.sh

# a few hours on one core: the shallow network, TorchBeast's batch and learning rate
$PYTHON benchmark/run.py --command "python cleanmarl/impala_atari_envpool.py" --env-ids Pong-v5 --num-seeds 1 \
    --workers 1 --runs-dir runs/impala_pong -- --shallow --num-actors 0 --num-envs 16 --learning-rate 4e-4 --total-timesteps 4000000
$PYTHON benchmark/plot.py runs/impala_pong --unfinished --out docs/results/impala_atari_envpool_pong --line random=-20.7 \
    --note "the shallow network, TorchBeast's batch and learning rate, no other process; stopped after 1,620,000 of 4,000,000 steps" --command benchmark/impala.sh

# days on two cores; hours with a GPU: --num-actors 8 --device cuda
$PYTHON benchmark/run.py --command "python cleanmarl/impala_atari_envpool.py" --env-ids Pong-v5 SpaceInvaders-v5 Qbert-v5 \
    --num-seeds 3 --workers 1 --runs-dir runs/impala_atari -- --num-actors 0
