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
$PYTHON benchmark/report.py runs/impala_replay_cartpole --out docs/results/impala_replay_cartpole \
    --note "the defaults without actors (\`--num-actors 0\`)" --command benchmark/impala.sh

# an entropy bonus as large as the rewards: with less of it the lander learns to hover
$PYTHON benchmark/run.py --command "python cleanmarl/impala.py" --env-ids LunarLander-v3 --num-seeds 3 \
    --workers "$WORKERS" --runs-dir runs/impala_lunarlander -- --num-actors 0 --total-timesteps 5000000 \
    --unroll-length 128 --batch-size 4 --gamma 0.999 --vtrace-lambda 0.98 --ent-coef 0.5 \
    --optimizer-eps 0.01 --max-grad-norm 1e9
$PYTHON benchmark/report.py runs/impala_lunarlander --out docs/results/impala_lunarlander \
    --note "16 environments, unrolls of 128 steps, four of them in a gradient step, gamma 0.999, entropy bonus 0.5" \
    --command benchmark/impala.sh

for actors in 0 2; do
    $PYTHON benchmark/run.py --command "python cleanmarl/impala_continuous_action.py" --env-ids HalfCheetah-v5 --num-seeds 5 \
        --workers "$WORKERS" --runs-dir runs/impala_continuous_action/$actors -- --num-actors $actors
done
$PYTHON benchmark/report.py runs/impala_continuous_action --out docs/results/impala_continuous_action_halfcheetah \
    --note "the defaults without actors, and with two" --command benchmark/impala.sh

# hours on one core: the shallow network, eight unrolls in a gradient step; a tenth of the paper's entropy bonus, and the paper's
game() {  # its id, folder of the runs, number of seeds, flags
    $PYTHON benchmark/run.py --command "python cleanmarl/impala_atari_envpool.py" --env-ids "$1" --num-seeds "$3" \
        --workers 1 --runs-dir "runs/$2" -- --shallow --num-actors 0 --num-envs 16 --batch-size 8 "${@:4}"
}
game Pong-v5 impala_pong/less_entropy 2 --ent-coef 0.001 --bf16 on
game Pong-v5 impala_pong/papers_entropy 1
# the published first seed had 11 actors on 16 cores and a GPU (--num-actors 11 --device cuda --bf16 auto) for 7,767,040 steps, and went on without
game Pong-v5 impala_pong/small_batches 2 --batch-size 4 --ent-coef 0.001 --bf16 on
# the published second seed was stopped after 7,490,000 steps (a curve of its own, or it would cut the first); a run of seed 1 beside them had
# --num-actors 10 and a GPU for 6,293,760
game Pong-v5 impala_pong/more_entropy 3 --batch-size 4 --ent-coef 0.003 --bf16 on
$PYTHON benchmark/run.py --command "python cleanmarl/impala_atari_envpool.py" --env-ids Pong-v5 --num-seeds 2 --workers 1 \
    --runs-dir runs/impala_pong/one_actor -- --shallow --num-actors 1 --num-envs 16 --batch-size 4 --ent-coef 0.003 --bf16 on
$PYTHON benchmark/run.py --command "python cleanmarl/impala_atari_envpool.py" --env-ids Pong-v5 --num-seeds 1 --workers 1 \
    --runs-dir runs/impala_pong/one_actor -- --shallow --num-actors 1 --num-envs 16 --batch-size 4 --ent-coef 0.002 --bf16 on
$PYTHON benchmark/report.py runs/impala_pong --out docs/results/impala_atari_envpool_pong \
    --note "the shallow network, batches of 8 and of 4 unrolls of 16 environments; one actor where no number is given" --command benchmark/impala.sh
game Breakout-v5 impala_breakout/papers_entropy 1 --bf16 on
game Breakout-v5 impala_breakout/less_entropy 1 --ent-coef 0.001 --bf16 on
$PYTHON benchmark/report.py runs/impala_breakout --out docs/results/impala_atari_envpool_breakout \
    --note "the shallow network, batches of 8 unrolls of 16 environments; the paper's entropy bonus, and a tenth of it" --command benchmark/impala.sh
game SpaceInvaders-v5 impala_spaceinvaders/papers_entropy 1 --bf16 on
# on 16 cores and a GPU; the published run went on without one, by --resume RUN --device cpu, after 5,230,000 steps
$PYTHON benchmark/run.py --command "python cleanmarl/impala_atari_envpool.py" --env-ids SpaceInvaders-v5 --num-seeds 1 --workers 1 \
    --runs-dir runs/impala_spaceinvaders/actors -- --shallow --num-actors 13 --num-envs 16 --batch-size 16 --ent-coef 0.001 --bf16 auto --device cuda
$PYTHON benchmark/report.py runs/impala_spaceinvaders --out docs/results/impala_atari_envpool_spaceinvaders \
    --note "the shallow network; batches of 8 unrolls of 16 environments with the paper's entropy bonus, and of 16 unrolls of 13 actors with a tenth of it, half of that run on a GPU" \
    --command benchmark/impala.sh
