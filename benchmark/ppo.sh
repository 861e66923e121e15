#!/usr/bin/env bash
# What docs/algorithms/ppo*.md report: every trial of the PPO family. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# classic control: the defaults are the write-up's hyper-parameters, and those of CleanRL's ppo.py, which runs beside ours
# if benchmark/peers/setup.sh has fetched it to the folder PEERS
scripts=(cleanmarl/ppo.py)
if [[ -n ${PEERS:-} ]]; then scripts+=("benchmark/peers/run_cleanrl.py $PEERS/cleanrl/cleanrl/ppo.py"); fi
for script in "${scripts[@]}"; do
    $PYTHON benchmark/run.py --command "python $script" --env-ids CartPole-v1 Acrobot-v1 LunarLander-v3 --num-seeds 10 \
        --workers "$WORKERS" --runs-dir runs/ppo_beside_cleanrl -- --total-timesteps 500000
done
$PYTHON benchmark/report.py runs/ppo_beside_cleanrl --out docs/results/ppo_beside_cleanrl \
    --note "the defaults of both, which are the same" --command benchmark/ppo.sh

# one network for policy and value beside two: same flags as ppo.py
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_shared.py" --env-ids CartPole-v1 --num-seeds 5 \
    --workers "$WORKERS" --runs-dir runs/ppo_shared -- --total-timesteps 500000
$PYTHON benchmark/report.py runs/ppo_shared --out docs/results/ppo_shared_cartpole \
    --note "the defaults" --command benchmark/ppo.sh

# the write-up's MuJoCo table, 1M steps (there: v2 environments)
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_continuous_action.py" \
    --env-ids HalfCheetah-v5 Walker2d-v5 Hopper-v5 --num-seeds 5 \
    --workers "$WORKERS" --runs-dir runs/ppo_continuous_action -- --total-timesteps 1000000
plot() {  # environment, end of the figure's name
    $PYTHON benchmark/report.py runs/ppo_continuous_action/"$1"__* --out "docs/results/ppo_continuous_action_$2" \
        --note "the defaults" --command benchmark/ppo.sh
}
plot HalfCheetah-v5 halfcheetah
plot Walker2d-v5 walker2d
plot Hopper-v5 hopper

# with and without masks on the same task; returns of the sampled policy (the greedy one walks in circles)
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_multidiscrete.py" --env-ids Cleaner-v0 --num-seeds 3 \
    --workers "$WORKERS" --runs-dir runs/ppo_multidiscrete -- --total-timesteps 1000000
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_multidiscrete_mask.py" --env-ids Cleaner-v0 --num-seeds 3 \
    --workers "$WORKERS" --runs-dir runs/ppo_multidiscrete -- --total-timesteps 1000000
$PYTHON benchmark/report.py runs/ppo_multidiscrete --out docs/results/ppo_multidiscrete_cleaner \
    --note "the defaults of each script" --command benchmark/ppo.sh

# Connect Four against itself: the curve is the Elo of the matches
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_selfplay.py" --env-ids ConnectFour-v1 --num-seeds 3 \
    --workers "$WORKERS" --runs-dir runs/ppo_selfplay
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_selfplay.py" --env-ids Othello-v1 --num-seeds 1 \
    --workers "$WORKERS" --runs-dir runs/ppo_selfplay_othello -- --bf16 on
results="0 is the uniformly random player. The table has the mean results (+1 won, -1 lost) against past selves in training"
results+=" and against random moves at the end"
$PYTHON benchmark/report.py runs/ppo_selfplay --tag eval/elo --out docs/results/ppo_selfplay_elo \
    --note "the defaults; $results" --command benchmark/ppo.sh
$PYTHON benchmark/report.py runs/ppo_selfplay_othello --tag eval/elo --out docs/results/ppo_selfplay_othello \
    --note "the defaults with --bf16 on; $results" --command benchmark/ppo.sh

# days on two cores; a run goes on from its checkpoint if it is started again. Pong: the settings of CleanRL's "Pong in 5 minutes"; the
# published first seed was without --bf16 and was stopped
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_atari_envpool.py" --env-ids Pong-v5 --num-seeds 2 \
    --workers 1 --runs-dir runs/ppo_atari_envpool_pong -- \
    --total-timesteps 4000000 --clip-coef 0.2 --num-envs 16 --num-minibatches 8 --update-epochs 3 --bf16 on
$PYTHON benchmark/report.py runs/ppo_atari_envpool_pong --unfinished --out docs/results/ppo_atari_envpool_pong \
    --note "the settings of CleanRL's \"Pong in 5 minutes\"" --command benchmark/ppo.sh
# CleanRL's defaults: many hours of a core for a seed
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_atari_envpool.py" --env-ids Breakout-v5 --num-seeds 2 \
    --workers 1 --runs-dir runs/ppo_breakout -- --bf16 on
$PYTHON benchmark/report.py runs/ppo_breakout --out docs/results/ppo_atari_envpool_breakout \
    --note "CleanRL's defaults, 10,000,000 steps, with \`--bf16 on\`" --command benchmark/ppo.sh
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_atari_envpool.py" --env-ids BeamRider-v5 --num-seeds 1 \
    --workers 1 --runs-dir runs/ppo_beamrider -- --bf16 auto
$PYTHON benchmark/report.py runs/ppo_beamrider --out docs/results/ppo_atari_envpool_beamrider \
    --note "CleanRL's defaults, 10,000,000 steps, with \`--bf16 auto\`" --command benchmark/ppo.sh
$PYTHON benchmark/run.py --command "python cleanmarl/ppo_procgen.py" --env-ids StarpilotEasy-v0 --num-seeds 1 \
    --workers 1 --runs-dir runs/ppo_procgen_starpilot -- --total-timesteps 1000000
$PYTHON benchmark/report.py runs/ppo_procgen_starpilot --out docs/results/ppo_procgen_starpilot \
    --note "the defaults" --command benchmark/ppo.sh
