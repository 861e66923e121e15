#!/usr/bin/env bash
# What docs/algorithms/maddpg.md and its variants' pages report: every trial, then the curves. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# the defaults, until each of several seeds is flat
$PYTHON benchmark/run.py --command "python cleanmarl/maddpg_multienvs.py" --num-seeds 5 --workers "$WORKERS" \
    --env-ids mpe/simple_spread_v3 --runs-dir runs/maddpg_multienvs_spread_long -- --total-timesteps 1000000
$PYTHON benchmark/report.py runs/maddpg_multienvs_spread_long --out docs/results/maddpg_multienvs_spread_long \
    --note "the defaults" --command benchmark/maddpg.sh

# the settings of CleanMARL's page, for 400,000 of its 1,000,000 steps; adversary has individual rewards
for task in simple_spread_v3 simple_speaker_listener_v4 simple_adversary_v3; do
    $PYTHON benchmark/run.py --command "python cleanmarl/maddpg_multienvs.py" --num-seeds 5 --workers "$WORKERS" \
        --env-ids "mpe/$task" --runs-dir "runs/maddpg_multienvs_$task" -- --total-timesteps 400000 --gamma 0.99
done
# the whole budget: speakers begin to speak late
$PYTHON benchmark/run.py --command "python cleanmarl/maddpg_multienvs.py" --num-seeds 5 --workers "$WORKERS" \
    --env-ids mpe/simple_speaker_listener_v4 --runs-dir runs/maddpg_multienvs_listener_long -- --total-timesteps 1000000 --gamma 0.99
# the other scripts
for script in maddpg maddpg_lstm maddpg_lstm_multienvs; do
    $PYTHON benchmark/run.py --command "python cleanmarl/$script.py" --num-seeds 3 --workers "$WORKERS" \
        --env-ids mpe/simple_spread_v3 --runs-dir runs/maddpg_simple_spread -- --total-timesteps 400000 --gamma 0.99
done
$PYTHON benchmark/run.py --command "python cleanmarl/maddpg_continuous_action.py" --num-seeds 3 --workers "$WORKERS" \
    --env-ids "mpe/simple_spread_v3?continuous_actions=True" --runs-dir runs/maddpg_simple_spread -- --total-timesteps 400000 --gamma 0.99
# sparse rewards: as they are, and normalised by those in the buffer
for flags in "" --normalize-reward; do
    $PYTHON benchmark/run.py --command "python cleanmarl/maddpg_multienvs.py" --num-seeds 5 --workers "$WORKERS" \
        --env-ids lbf/Foraging-8x8-2p-2f-coop-v3 --runs-dir runs/maddpg_multienvs_foraging -- --total-timesteps 400000 --gamma 0.99 $flags
done
$PYTHON benchmark/report.py runs/maddpg_multienvs_foraging \
    --out docs/results/maddpg_multienvs_foraging \
    --note "the defaults but for \`--gamma 0.99\`, with and without \`--normalize-reward\`" --command benchmark/maddpg.sh
$PYTHON benchmark/report.py runs/maddpg_multienvs_simple_spread_v3 --out docs/results/maddpg_multienvs_simple_spread \
    --note "the defaults but for \`--gamma 0.99\`" --command benchmark/maddpg.sh
$PYTHON benchmark/report.py runs/maddpg_multienvs_simple_speaker_listener_v4 \
    --out docs/results/maddpg_multienvs_simple_speaker_listener \
    --note "the defaults but for \`--gamma 0.99\`" --command benchmark/maddpg.sh
$PYTHON benchmark/report.py runs/maddpg_multienvs_listener_long --out docs/results/maddpg_multienvs_listener_long \
    --note "the defaults but for \`--gamma 0.99\`" --command benchmark/maddpg.sh
$PYTHON benchmark/report.py runs/maddpg_simple_spread --out docs/results/maddpg_simple_spread \
    --note "the defaults of each script but for \`--gamma 0.99\`" --command benchmark/maddpg.sh
$PYTHON benchmark/report.py runs/maddpg_multienvs_simple_adversary_v3 --tag eval/ep_reward_agent_1 \
    --out docs/results/maddpg_multienvs_simple_adversary \
    --note "the defaults but for \`--gamma 0.99\`; the curve is an agent of the pair in evaluations, the table the sum of all three agents" --command benchmark/maddpg.sh

# SMAClite, if it is there (docs/environments.md): some hundred steps a second
if $PYTHON -c "import smaclite" 2>/dev/null; then
    $PYTHON benchmark/run.py --command "python cleanmarl/maddpg_multienvs.py" --num-seeds 3 --workers "$WORKERS" \
        --env-ids smaclite/3m --runs-dir runs/maddpg_multienvs_smaclite_3m -- --total-timesteps 40000 --gamma 0.99
    $PYTHON benchmark/report.py runs/maddpg_multienvs_smaclite_3m --tag rollout/battle_won \
        --out docs/results/maddpg_multienvs_smaclite_3m \
        --note "the defaults but for \`--gamma 0.99\`" --command benchmark/maddpg.sh
fi
