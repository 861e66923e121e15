#!/usr/bin/env bash
# What the pages of the value-based opponents report: every trial, then the curves. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# value decomposition with the defaults of each script
spread() {  # script, number of seeds, folder of the runs, flags
    $PYTHON benchmark/run.py --command "python cleanmarl/$1.py" --num-seeds "$2" --workers "$WORKERS" \
        --env-ids mpe/simple_spread_v3 --runs-dir "runs/$3" -- "${@:4}"
}
spread idqn 5 vdn_spread_long/2M --total-timesteps 2000000
for script in vdn qmix; do spread $script 5 vdn_spread_long/5M --total-timesteps 5000000; done
spread qtran 5 vdn_spread_long/5M --total-timesteps 5000000
spread qtran 5 vdn_spread_long/32 --total-timesteps 5000000 --batch-size 32
$PYTHON benchmark/report.py runs/vdn_spread_long --out docs/results/vdn_spread_long --note "the defaults of each script, and QTRAN with batches of 32" \
    --command benchmark/baselines.sh
for script in vdn_lstm qmix_lstm; do spread $script 3 vdn_lstm_spread_long --total-timesteps 2000000; done
$PYTHON benchmark/report.py runs/vdn_lstm_spread_long --out docs/results/vdn_lstm_spread_long --command benchmark/baselines.sh \
    --note "the defaults of each script"
# where rewards are rare: rewards normalised, as in EPyMARL
forage() {  # script, number of seeds, id of the environment, folder of the runs, steps
    rate=()
    if [ "$1" = qmix ]; then rate=(--learning-rate 1e-3 --polyak 0.01); fi
    $PYTHON benchmark/run.py --command "python cleanmarl/$1.py" --num-seeds "$2" --workers "$WORKERS" --env-ids "lbf/$3" \
        --runs-dir "runs/$4" -- --total-timesteps "$5" --gamma 0.99 --normalize-reward "${rate[@]}"
}
for script in vdn qmix idqn; do forage $script 5 Foraging-8x8-2p-2f-coop-v3 vdn_foraging_long 2000000; done
forage qtran 3 Foraging-8x8-2p-2f-coop-v3 vdn_foraging_long 3000000  # of which the first seed had 2,000,000
$PYTHON benchmark/report.py runs/vdn_foraging_long --out docs/results/vdn_foraging_long --command benchmark/baselines.sh \
    --note "a discount of 0.99 and normalised rewards; QMIX with VDN's learning rate and target"
listen() {  # script, number of seeds, folder of the runs, flags
    $PYTHON benchmark/run.py --command "python cleanmarl/$1.py" --num-seeds "$2" --workers "$WORKERS" \
        --env-ids mpe/simple_speaker_listener_v4 --runs-dir "runs/$3" -- "${@:4}"
}
for script in vdn idqn qmix; do listen $script 5 vdn_listener_long --total-timesteps 2000000; done
for script in qtran vdn_lstm qmix_lstm; do listen $script 5 vdn_listener_long --total-timesteps 2000000; done
$PYTHON benchmark/report.py runs/vdn_listener_long --out docs/results/vdn_listener_long --note "the defaults of each script" \
    --command benchmark/baselines.sh
# battles: a package of its own, docs/environments.md
battle() {  # script, number of seeds, map, steps, discount
    rate=()
    if [ "$1" = qmix ]; then rate=(--learning-rate 1e-3 --polyak 0.01); fi
    $PYTHON benchmark/run.py --command "python cleanmarl/$1.py" --num-seeds "$2" --workers "$WORKERS" --env-ids "smax/$3" \
        --runs-dir "runs/vdn_smax_$3/$5" -- --total-timesteps "$4" --gamma "$5" --batch-size 32 "${rate[@]}"
}
for script in vdn idqn qmix; do battle $script 5 3m 600000 0.99; done
battle vdn 5 2s3z 3000000 0.99
battle qmix 3 2s3z 3000000 0.99
battle qmix 5 2s3z 3000000 0.95
# seed 4 alone, with QMIX's own learning rate and target
$PYTHON benchmark/run.py --command "python cleanmarl/qmix.py" --num-seeds 4 --index 3 --env-ids smax/2s3z \
    --runs-dir runs/vdn_smax_2s3z/own -- --total-timesteps 5000000 --gamma 0.95 --batch-size 32
$PYTHON benchmark/report.py runs/vdn_smax_2s3z --tag rollout/battle_won --out docs/results/vdn_smax_2s3z \
    --note "batches of 32 episodes; a discount of 0.99 but for a QMIX of 0.95, the default; QMIX with VDN's learning rate and target but for one seed" \
    --command benchmark/baselines.sh
$PYTHON benchmark/report.py runs/vdn_smax_3m --tag rollout/battle_won --out docs/results/vdn_smax_3m \
    --note "a discount of 0.99 and batches of 32 episodes; QMIX with VDN's learning rate and target" --command benchmark/baselines.sh

# the matrix game of QTRAN's paper, and those of CoPPO's
$PYTHON benchmark/qtran_matrix.py --out docs/results --seeds 10

# critics of all agents' actions
spread masac 3 masac_spread_long --total-timesteps 500000
spread facmac 3 masac_spread_long --total-timesteps 500000
spread dop 3 masac_spread_long --total-timesteps 500000 --gamma 0.95
$PYTHON benchmark/report.py runs/masac_spread_long --out docs/results/masac_spread_long --command benchmark/baselines.sh \
    --note "the defaults of each script, and a discount of 0.95 for DOP"
spread masac 1 masac_spread_longer --total-timesteps 2000000
$PYTHON benchmark/report.py runs/masac_spread_longer --out docs/results/masac_spread_longer --command benchmark/baselines.sh \
    --note "the defaults"
listen masac 5 masac_listener --total-timesteps 500000
listen dop 5 masac_listener --total-timesteps 500000 --gamma 0.95
listen coma 5 masac_listener --total-timesteps 2000000 --gamma 0.95
forage_with_critics() {  # script, number of seeds, steps, flags
    $PYTHON benchmark/run.py --command "python cleanmarl/$1.py" --num-seeds "$2" --env-ids lbf/Foraging-8x8-2p-2f-coop-v3 \
        --runs-dir runs/masac_foraging -- --total-timesteps "$3" "${@:4}"
}
forage_with_critics masac 3 2000000 --gamma 0.99 --normalize-reward --batch-size 32
forage_with_critics facmac 3 1000000 --gamma 0.99 --normalize-reward --reg 0.01 --batch-size 32 --actor-hidden-dim 128 \
    --learning-rate-actor 5e-4 --learning-rate-critic 5e-4 --polyak 0.01
forage_with_critics dop 3 2000000
forage_with_critics coma 3 2000000
$PYTHON benchmark/report.py runs/masac_foraging --out docs/results/masac_foraging --command benchmark/baselines.sh \
    --note "the defaults of DOP and COMA; a discount of 0.99, normalised rewards and batches of 32 episodes for MASAC and FACMAC, which has a regulariser, faster rates and targets and a larger actor besides"
$PYTHON benchmark/report.py runs/masac_listener --out docs/results/masac_listener --command benchmark/baselines.sh \
    --note "the defaults of each script, and a discount of 0.95 for DOP and COMA"
listen facmac 5 facmac_listener --total-timesteps 500000
$PYTHON benchmark/report.py runs/facmac_listener --out docs/results/facmac_listener --command benchmark/baselines.sh \
    --note "the defaults"
spread coma 3 coma_spread_long/0.99 --total-timesteps 1000000
for script in coma coma_lstm; do spread $script 2 coma_spread_long/0.95 --total-timesteps 3000000 --gamma 0.95; done
$PYTHON benchmark/report.py runs/coma_spread_long --out docs/results/coma_spread_long --command benchmark/baselines.sh \
    --note "the defaults but for the discount"

# MADDPG where a reward is rare: rewards normalised, logits regularised ten times as much as in the original
$PYTHON benchmark/run.py --command "python cleanmarl/maddpg_multienvs.py" --num-seeds 3 --workers "$WORKERS" \
    --env-ids lbf/Foraging-8x8-2p-2f-coop-v3 --runs-dir runs/maddpg_foraging_long -- --total-timesteps 1000000 --gamma 0.99 \
    --normalize-reward --reg 0.01 --batch-size 32 --actor-hidden-dim 128 --learning-rate-actor 5e-4 --learning-rate-critic 5e-4
$PYTHON benchmark/report.py runs/maddpg_foraging_long --out docs/results/maddpg_multienvs_foraging_long --command benchmark/baselines.sh \
    --note "a discount of 0.99, normalised rewards, ten times the regulariser, batches of 32 episodes, an actor of 128 units"
