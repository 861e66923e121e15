#!/usr/bin/env bash
# What the pages of ippo, mappo, coppo and their variants report on particle environments and grid worlds: every trial,
# then the curves. Finished trials are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} WORKERS=${WORKERS:-2}

run() {  # script, number of seeds, id of the environment, folder of the runs, flags
    $PYTHON benchmark/run.py --command "python cleanmarl/$1.py" --num-seeds "$2" --workers "$WORKERS" \
        --env-ids "$3" --runs-dir "$4" -- "${@:5}"
}
plot() { $PYTHON benchmark/report.py "runs/mappo_$1" --out "docs/results/mappo_$1" --command benchmark/mappo.sh "${@:2}"; }

# until the curves hardly rise (those of simple_reference still do)
for script in ippo mappo coppo; do
    run $script 5 mpe/simple_spread_v3 runs/mappo_spread_long --total-timesteps 5000000
    run $script 5 mpe/simple_speaker_listener_v4 runs/mappo_listener_long --total-timesteps 2000000
    run $script 5 mpe/simple_reference_v3 runs/mappo_reference_long --total-timesteps 5000000
    run $script 3 lbf/Foraging-8x8-2p-2f-coop-v3 runs/mappo_foraging_long --total-timesteps 2000000
done
larger=(lbf/Foraging-15x15-3p-5f-v3 runs/mappo_foraging_15x15 --gamma 0.99)
run mappo 1 "${larger[@]}" --total-timesteps 10000000 --num-envs 32 --num-steps 50
run vdn 2 "${larger[@]}" --total-timesteps 2000000 --normalize-reward
run qmix 2 "${larger[@]}" --total-timesteps 2000000 --normalize-reward --learning-rate 1e-3 --polyak 0.01
run vdn_lstm 1 "${larger[@]}" --total-timesteps 4000000 --normalize-reward
for script in ippo mappo; do
    run $script 3 rware/rware-tiny-2ag-easy-v2 runs/mappo_warehouse --total-timesteps 5000000 --num-envs 64 --num-steps 50 --gamma 0.99
done
# JaxMARL's rollouts, epochs, learning rate, gradients and layers for its battles; packages of their own: docs/environments.md
battles=(--num-envs 128 --num-steps 128 --num-minibatches 4 --update-epochs 4 --gamma 0.99 --learning-rate 2e-3
    --critic-learning-rate 2e-3 --anneal-lr --ent-coef 0 --max-grad-norm 0.25 --actor-hidden-dim 128 --critic-hidden-dim 128
    --activation relu)
run ippo 3 smax/3m runs/mappo_smax_long --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap
for script in mappo coppo; do # states hold coordinates up to 32
    run $script 3 smax/3m runs/mappo_smax_long --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap --normalize-state
done
run ippo 3 smax/2s3z runs/mappo_smax_2s3z --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap
run ippo 2 smax/3s5z runs/mappo_smax_3s5z --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap
run ippo 3 smax/5m_vs_6m runs/mappo_smax_5m_vs_6m --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap
for script in mappo coppo; do
    run $script 3 smax/2s3z runs/mappo_smax_2s3z --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap --normalize-state
    run $script 3 smax/5m_vs_6m runs/mappo_smax_5m_vs_6m --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap --normalize-state
done
run mappo 3 smax/3s5z runs/mappo_smax_3s5z --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap --normalize-state
run coppo 2 smax/3s5z runs/mappo_smax_3s5z --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap --normalize-state
run mappo 1 smax/5m_vs_6m runs/mappo_smax_5m_vs_6m --total-timesteps 10000000 "${battles[@]}" --no-time-limit-bootstrap --normalize-state --ent-coef 0.01
# with the bootstrap at the time limit half of the teams learn to run away
run mappo 1 smax/3m runs/mappo_smax_bootstrap --total-timesteps 10000000 "${battles[@]}"
$PYTHON benchmark/run.py --command "python cleanmarl/coppo.py" --num-seeds 2 --index 1 --env-ids smax/3m \
    --runs-dir runs/mappo_smax_bootstrap -- --total-timesteps 10000000 "${battles[@]}" # seed 2: seed 1 runs away
# predators and prey have nothing in common to share; the curve is that of a predator
for script in ippo mappo coppo; do
    run $script 5 mpe/simple_tag_v3 runs/mappo_simple_tag_v3 --total-timesteps 5000000 --no-share-parameters
done
run maddpg_multienvs 3 mpe/simple_tag_v3 runs/maddpg_multienvs_simple_tag_v3 --total-timesteps 1000000
# the published games, these and those below, are of seeds 1 to 3
$PYTHON benchmark/cross_play.py runs/mappo_simple_tag_v3 runs/maddpg_multienvs_simple_tag_v3 --side 0 1 2 --names predators prey --out docs/results/mappo_tag_cross_play
for script in ippo mappo coppo; do
    run $script 5 mpe/simple_adversary_v3 runs/mappo_simple_adversary --total-timesteps 1000000 --no-share-parameters
done
run maddpg_multienvs 3 mpe/simple_adversary_v3 runs/maddpg_multienvs_simple_adversary --total-timesteps 1000000
$PYTHON benchmark/cross_play.py runs/mappo_simple_adversary runs/maddpg_multienvs_simple_adversary --side 0 --names adversary pair --out docs/results/mappo_adversary_cross_play
# the authors take ReLU for all of these tasks but simple_spread
for script in mappo coppo; do
    run $script 5 mpe/simple_speaker_listener_v4 runs/mappo_relu --total-timesteps 400000 --activation relu
done
plot relu \
    --note "the defaults with \`--activation relu\`"
plot spread_long \
    --note "the defaults of each script"
jaxmarls="JaxMARL's rollouts of 128 x 128 steps, epochs, learning rate and layers"
for name in long 2s3z 3s5z; do
    plot smax_$name --tag rollout/battle_won --note "$jaxmarls, a time limit taken for an end"
done
plot smax_5m_vs_6m --tag rollout/battle_won \
    --note "$jaxmarls, a time limit taken for an end; no entropy bonus but for the MAPPO without \`--ent-coef 0.0\`, which has 0.01"
plot smax_bootstrap --tag rollout/battle_won \
    --note "$jaxmarls, a time limit bootstrapped; the runs that went to the end, of six that were begun"
for name in listener_long foraging_long reference_long; do
    plot $name --note "the defaults of each script"
done
plot warehouse --note "64 environments, rollouts of 50 steps, discount 0.99"
plot foraging_15x15 \
    --note "MAPPO with 32 environments, rollouts of 50 steps and a discount of 0.99; values with this discount and normalised rewards, QMIX with VDN's learning rate and target"
plot simple_tag_v3 --tag rollout/ep_reward_agent_0 \
    --note "networks of their own for all agents; the curve is a predator, the table the sum of all agents"
plot simple_adversary --tag rollout/ep_reward_agent_1 \
    --note "networks of their own for all agents (\`--no-share-parameters\`); the curve is an agent of the pair, the table the sum of all three"

# recurrent; coppo_lstm with rollouts of the others' size, its default of 8 x 400 steps is for StarCraft
recurrent() {  # number of seeds, id of the environment, folder of the runs, flags
    run mappo_lstm "$1" "$2" "$3" --total-timesteps 400000 "${@:4}"
    if [[ "$*" != *--num-steps* ]]; then set -- "$@" --num-envs 128 --num-steps 25 --gamma 0.95; fi
    run coppo_lstm "$1" "$2" "$3" --total-timesteps 400000 "${@:4}" --num-minibatches 4 --gae-lambda 0.95 \
        --optimizer adam --learning-rate 7e-4 --critic-learning-rate 7e-4
}
for task in simple_speaker_listener_v4 simple_spread_v3; do
    run ippo_lstm 3 mpe/$task runs/ippo_lstm_mpe --total-timesteps 400000
done
$PYTHON benchmark/report.py runs/ippo_lstm_mpe --out docs/results/ippo_lstm_mpe --note "the defaults" --command benchmark/mappo.sh
recurrent 5 mpe/simple_speaker_listener_v4 runs/mappo_lstm_listener
recurrent 3 mpe/simple_spread_v3 runs/mappo_lstm_spread
for script in mappo_lstm ippo_lstm; do
    run $script 1 mpe/simple_spread_v3 runs/mappo_lstm_spread_long --total-timesteps 5000000
done
run coppo_lstm 1 mpe/simple_spread_v3 runs/mappo_lstm_spread_long --total-timesteps 5000000 --num-envs 128 --num-steps 25 \
    --gamma 0.95 --num-minibatches 4 --gae-lambda 0.95 --optimizer adam --learning-rate 7e-4 --critic-learning-rate 7e-4
for script in mappo_lstm ippo_lstm; do
    run $script 3 mpe/simple_speaker_listener_v4 runs/mappo_lstm_listener_long --total-timesteps 2000000
done
run coppo_lstm 3 mpe/simple_speaker_listener_v4 runs/mappo_lstm_listener_long --total-timesteps 2000000 --num-envs 128 --num-steps 25 \
    --gamma 0.95 --num-minibatches 4 --gae-lambda 0.95 --optimizer adam --learning-rate 7e-4 --critic-learning-rate 7e-4
recurrent 3 mpe/simple_reference_v3 runs/mappo_lstm_reference
recurrent 3 mpe/simple_tag_v3 runs/mappo_lstm_tag --no-share-parameters
recurrent 3 lbf/Foraging-8x8-2p-2f-coop-v3 runs/mappo_lstm_foraging --num-envs 32 --num-steps 50 --gamma 0.99
plot lstm_listener \
    --note "the defaults; CoPPO with the rollouts, minibatches and optimizer of MAPPO"
plot lstm_listener_long \
    --note "the defaults; CoPPO with the rollouts, minibatches and optimizer of MAPPO"
plot lstm_spread_long \
    --note "the defaults; CoPPO with the rollouts, minibatches and optimizer of MAPPO"
plot lstm_spread \
    --note "the defaults; CoPPO with the rollouts, minibatches and optimizer of MAPPO"
plot lstm_reference \
    --note "the defaults; CoPPO with the rollouts, minibatches and optimizer of MAPPO"
plot lstm_tag --tag rollout/ep_reward_agent_0 \
    --note "networks of their own for all agents (\`--no-share-parameters\`); the curve is a predator, the table the sum of all agents"
plot lstm_foraging \
    --note "32 environments, rollouts of 50 steps, discount 0.99"

# continuous actions, also without the entropy bonus; multiwalker's episodes are long and end by a fall: a higher discount, rollouts of 200 steps
for script in ippo_continuous_action mappo_continuous_action; do
    for bonus in 0.01 0; do
        run $script 3 "mpe/simple_spread_v3?continuous_actions=True" runs/mappo_continuous_action_spread/$bonus --total-timesteps 5000000 \
            --ent-coef $bonus
    done
done
run mappo_continuous_action 3 pz/sisl/multiwalker_v9 runs/mappo_continuous_action_multiwalker --total-timesteps 1000000 \
    --num-envs 16 --num-steps 200 --gamma 0.99 --ent-coef 0
plot continuous_action_spread \
    --note "the defaults of each script, and these without the entropy bonus"
plot continuous_action_multiwalker \
    --note "16 environments, rollouts of 200 steps, discount 0.99, no entropy bonus"

# SMAClite, if it is there (docs/environments.md): some hundred steps a second; the settings of CleanMARL's MAPPO
if $PYTHON -c "import smaclite" 2>/dev/null; then
    same=(--num-envs 3 --num-steps 25 --num-minibatches 1 --update-epochs 3 --gamma 0.99 --no-norm-adv
        --no-normalize-value --ent-coef 0.001 --learning-rate 8e-4 --no-time-limit-bootstrap)
    central=(--value-clip-coef 0 --huber-delta 0 --critic-learning-rate 8e-4)
    for map in 3m 2s3z; do
        steps=30000 where="this map"
        if [ $map = 2s3z ]; then steps=100000 where=3m; fi
        for script in mappo coppo; do
            run $script 3 smaclite/$map runs/mappo_smaclite_$map --total-timesteps $steps "${same[@]}" "${central[@]}"
        done
        run ippo_per_agent 3 smaclite/$map runs/mappo_smaclite_$map --total-timesteps $steps "${same[@]}" --share-parameters \
            --lr-schedule constant --max-grad-norm 10
        plot smaclite_$map --tag rollout/battle_won --note "the settings of CleanMARL's MAPPO on $where for all"
    done
    run mappo 3 smaclite/3m runs/mappo_smaclite_3m_relu --total-timesteps 30000 "${same[@]}" "${central[@]}" --activation relu
fi
