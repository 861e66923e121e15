#!/usr/bin/env bash
# What the pages of coppo, coppo_lstm and coma report of matrix games and of StarCraft-like battles with rollouts of 32
# environments; mappo.sh and baselines.sh have the rest. SMAX needs packages of its own: see docs/environments.md.
# Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

# figures 1, 2 and 5 of the paper; equation 10, 30 runs each
$PYTHON benchmark/matrix_games.py --out docs/results --seeds 30 --workers "$WORKERS"

# the penalty game by the script itself: equation 10, the objective of the authors' code, their mixing network
for flags in "" "--objective authors" "--mix network"; do
    $PYTHON benchmark/run.py --command "python cleanmarl/coppo_matrix.py" --env-ids matrix/penalty --num-seeds 10 \
        --workers "$WORKERS" --runs-dir runs/coppo_switches -- --total-timesteps 10000 --num-envs 20 --num-steps 1 \
        --no-share-parameters --actor-hidden-dim 18 --critic-hidden-dim 72 --learning-rate 5e-4 --critic-learning-rate 5e-4 \
        --gamma 0.99 --epsilon-start 0.9 --epsilon-end 0.02 --epsilon-timesteps 6000 --ent-coef 0 --max-grad-norm 1e9 \
        --optimizer rmsprop --update-epochs 8 --num-minibatches 1 --clip-coef 0.2 --inner-clip-coef 0.1 \
        --advantage counterfactual --no-norm-adv --value-clip-coef 0 --huber-delta 0 --no-normalize-value $flags
done
$PYTHON benchmark/report.py runs/coppo_switches --out docs/results/coppo_matrix_switches --command benchmark/coppo.sh \
    --note "the settings of the paper's appendix C.1; returns are the sum of the four agents'"

# StarCraft-like battles: the settings of appendix C.2, which are the defaults of coppo_lstm.py, for all that learn by epochs
# of clipped steps; but with Adam, as the authors' code has it, because the others have no RMSprop, and the 3,200 steps of
# a rollout are 32 x 100 instead of 8 x 400, which takes half the time (a battle lasts 101 steps at most)
common=(--gamma 0.99 --num-envs 32 --total-timesteps 300000)
clipped=(--gae-lambda 0.9 --num-steps 100 --num-minibatches 1 --learning-rate 5e-4)
for task in 3m 2s3z; do
    epochs=10 coma_seeds=5
    if [ $task = 2s3z ]; then epochs=15 coma_seeds=3; fi
    run() {  # script, number of seeds, folder of the runs, flags
        $PYTHON benchmark/run.py --command "python cleanmarl/$1.py" --num-seeds "$2" --workers "$WORKERS" \
            --env-ids "smax/$task" --runs-dir "runs/$3_$task" -- "${common[@]}" "${@:4}"
    }
    plot() {  # folder of the runs, name of the figure, what its caption says besides, what is drawn
        $PYTHON benchmark/report.py "runs/$1_$task" --tag "${4:-rollout/battle_won}" --out "docs/results/$2_$task" \
            --command benchmark/coppo.sh --note "the settings of the paper's appendix C.2 with Adam, $epochs epochs$3"
    }
    coppo=(--num-steps 100 --update-epochs $epochs --optimizer adam)
    run coppo_lstm 5 coppo_lstm "${coppo[@]}"
    run mappo_lstm 5 coppo_lstm --update-epochs $epochs "${clipped[@]}" --critic-learning-rate 5e-4
    run coma $coma_seeds coppo_lstm --num-steps 50  # its actor takes one step a rollout, and has no memory
    plot coppo_lstm coppo_lstm_smax "; COMA with its own"
    # figures 4, 6 and 7: the inner clip, by default 0.10, none, and one for each of the others' ratios
    for flags in "" "--inner-clip-coef inf" "--inner-clip-coef 0.05" "--inner-clip-coef 0.15" --clip-separately; do
        run coppo_lstm 3 coppo_clip "${coppo[@]}" $flags
    done
    plot coppo_clip coppo_lstm_clip ""
    for mix in sum network; do  # figure 4, the lower row
        run coppo_matrix 3 coppo_mix --update-epochs $epochs "${clipped[@]}" --critic-learning-rate 5e-4 --activation relu --mix $mix
    done
    plot coppo_mix coppo_matrix_mix ", without memory" rollout/ep_reward
    if [ $task = 3m ]; then  # where ten steps a rollout are too few
        for flags in "" "--inner-clip-coef inf"; do
            run coppo_lstm 3 coppo_minibatches "${coppo[@]}" --num-minibatches 4 $flags
        done
        run mappo_lstm 3 coppo_minibatches --update-epochs $epochs "${clipped[@]}" --critic-learning-rate 5e-4 --num-minibatches 4
        plot coppo_minibatches coppo_lstm_minibatches ", four minibatches"
    fi
done
