#!/usr/bin/env bash
# What docs/algorithms/maddpg.md and its variants' pages report, but for foraging (baselines.sh): every trial, then the curves.
# Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

run() {  # script, number of seeds, id of the environment, folder of the runs, flags
    $PYTHON benchmark/run.py --command "python cleanmarl/$1.py" --num-seeds "$2" --workers "$WORKERS" \
        --env-ids "$3" --runs-dir "$4" -- "${@:5}"
}
plot() { $PYTHON benchmark/report.py "runs/$1" --out "docs/results/$1" --command benchmark/maddpg.sh "${@:2}"; }

# the defaults
run maddpg_multienvs 3 mpe/simple_spread_v3 runs/maddpg_multienvs_spread_long --total-timesteps 1000000
run maddpg_multienvs 3 mpe/simple_spread_v3 runs/maddpg_spread_longer --total-timesteps 3000000
run maddpg 3 mpe/simple_spread_v3 runs/maddpg_spread_longer --total-timesteps 3000000
run maddpg_multienvs 3 mpe/simple_speaker_listener_v4 runs/maddpg_multienvs_listener_long --total-timesteps 1000000
run maddpg_multienvs 3 mpe/simple_adversary_v3 runs/maddpg_multienvs_simple_adversary --total-timesteps 1000000
plot maddpg_multienvs_spread_long --note "the defaults"
plot maddpg_spread_longer --note "the defaults"
# targets as slow as those of maddpg.py, in no figure
run maddpg_multienvs 1 mpe/simple_spread_v3 runs/maddpg_multienvs_polyak --total-timesteps 3000000 --polyak 0.005
plot maddpg_multienvs_listener_long --note "the defaults"
plot maddpg_multienvs_simple_adversary --tag eval/ep_reward_agent_1 \
    --note "the defaults; the curve is an agent of the pair in evaluations, the table the sum of all three agents"

# all scripts beside each other
for script in maddpg maddpg_multienvs maddpg_lstm maddpg_lstm_multienvs; do
    run $script 3 mpe/simple_spread_v3 runs/maddpg_simple_spread --total-timesteps 400000
done
run maddpg_continuous_action 3 "mpe/simple_spread_v3?continuous_actions=True" runs/maddpg_simple_spread --total-timesteps 400000
for flags in "maddpg 6e-4" "maddpg_lstm 3e-4"; do  # each with the learning rates of the other
    read -r script rate <<<"$flags"
    run $script 3 mpe/simple_spread_v3 runs/maddpg_rates --total-timesteps 400000 --learning-rate-actor $rate --learning-rate-critic $rate
done
plot maddpg_rates --note "\`maddpg\` with the learning rates of \`maddpg_lstm\`, and the other way round"
plot maddpg_simple_spread --note "the defaults of each script"

# SMAClite, if it is there (docs/environments.md): some hundred steps a second
if $PYTHON -c "import smaclite" 2>/dev/null; then
    run maddpg_multienvs 3 smaclite/3m runs/maddpg_multienvs_smaclite_3m --total-timesteps 40000 --gamma 0.99
    plot maddpg_multienvs_smaclite_3m --tag rollout/battle_won --note "the defaults but for \`--gamma 0.99\`"
fi
