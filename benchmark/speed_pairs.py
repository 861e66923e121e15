"""What `benchmark/speed.py --table` measures: scripts beside peers that do the same work, and the goal for each ratio.

Peers' code is fetched by benchmark/peers/setup.sh. "The same" was looked up in their code: networks, batches, epochs,
updates for each episode, optimizers. Flags make ours as the peer's, or the other way round; what flags cannot make
equal stands in `ours_differs` and `peer_differs`.
"""

from dataclasses import dataclass, replace


@dataclass
class Pair:
    """A script and a peer that do the same work; commands as of --ours and --peer, and {peers} is --peers."""

    script: str
    beside: str
    goal: float | None  # of ours / peer
    ours: str
    steps: int
    peer: str
    peer_steps: int
    settings: str  # of both
    ours_differs: str = ""
    peer_differs: str = ""


def with_and_without_compile(pair: Pair, goal: float) -> list[Pair]:
    """The pair, and the same with --compile, for which the goal may be another."""
    return [pair, replace(pair, script=f"{pair.script} --compile", goal=goal, ours=f"{pair.ours} --compile")]


def ours(script: str, flags: str = "") -> str:
    run = "--total-timesteps {steps} --seed {seed} --runs-dir {tmp} --eval-episodes 0"
    return f"python cleanmarl/{script}.py {run} {flags}".strip()


def peer(name: str, script: str, flags: str = "") -> str:
    return f"bash benchmark/peers/{name}.sh {{peers}} {{tmp}} {script} {{steps}} {{seed}} {flags}".strip()


# CleanMARL, on-policy: its defaults. A number of layers of 1 means two hidden layers.
ON_POLICY = (
    "simple_spread, CleanMARL's defaults: rollouts of 3 episodes of 25 steps, 3 epochs on all of it, Adam 8e-4, gamma "
    "0.99, lambda 0.95, clip 0.2, entropy 0.001, gradients not clipped, a time limit is an end, two hidden layers with "
    "ReLU, parameters shared, ids in the observations"
)
AS_CLEANMARL = (
    "--num-envs 3 --num-steps 25 --num-minibatches 1 --update-epochs 3 --gamma 0.99 --no-norm-adv --no-normalize-value "
    "--value-clip-coef 0 --huber-delta 0 --learning-rate 8e-4 --critic-learning-rate 8e-4 --ent-coef 0.001 "
    "--max-grad-norm 1e9 --no-time-limit-bootstrap --activation relu --actor-hidden-dim 32"
)
# CleanMARL, off-policy: its defaults; nothing is evaluated on either side.
OFF_POLICY = "simple_spread, CleanMARL's defaults: "
QUIET = "--num-eval-ep 1 --eval-steps 1000000 --no-save-buffer"
MADDPG = f"{QUIET} --individual-critics False --reg 0 --gamma 0.99"
NOT_EVALUATED = "--eval_steps 1000000"
ONE_VALUE = "one value of a joint action, where CleanMARL has the same one for each agent"
OWN_SIMULATOR = "MPE of mpe2"
QMIX = (
    f"{QUIET} --num-envs 1 --epochs 1 --batch-size 10 --no-double-q --td-lambda 0 --gamma 0.99 --polyak 0.01 "
    "--learning-rate 5e-4 --clip-gradients 0 --mixing-dim 64 --epsilon-timesteps 1000"
)
QMIX_SETTINGS = (
    f"{OFF_POLICY}1 environment, an update and a target update after each episode, batches of 10 episodes, Adam 5e-4, "
    "gradients not clipped, one network 64-64 for all agents, mixing network of 64 units"
)
FORAGING = "lbf/Foraging-8x8-2p-2f-coop-v3"
IN_FORAGING = "--env_type lbf --env_name Foraging-8x8-2p-2f-coop-v3"

# JaxMARL: the settings of its configurations.
AS_JAXMARL = (
    "--num-steps 128 --num-minibatches 4 --update-epochs 4 --gamma 0.99 --anneal-lr --no-normalize-value "
    "--huber-delta 0 --no-time-limit-bootstrap"
)
IN_XLA = "everything is one XLA program, on one thread; no metrics are written"
SMAX = (
    "smax/3m, JaxMARL's settings but for 64 environments x 128 steps (half as many environments): 4 epochs x 4 "
    "minibatches of whole sequences, Adam, gradients clipped at 0.25, GRU of 128 between or after two layers of 128"
)
AS_SMAX = f"--env-id smax/3m --num-envs 64 {AS_JAXMARL} --max-grad-norm 0.25 --cell gru --activation relu"
AS_SMAX += " --actor-hidden-dim 128 --critic-hidden-dim 128"
IN_SMAX = "NUM_ENVS=64 MAP_NAME=3m TOTAL_TIMESTEPS=8192"

PAIRS = [
    *with_and_without_compile(
        Pair(
            script="ppo",
            beside="CleanRL ppo.py",
            goal=3.2,
            ours=ours("ppo"),
            steps=245_760,
            peer=peer("cleanrl", "ppo"),
            peer_steps=81_920,
            settings="CartPole-v1, the defaults of both: 4 environments x 128 steps, 4 epochs x 4 minibatches, Adam "
            "2.5e-4 that falls to 0, two networks 64-64 with tanh",
            peer_differs="SAME_STEP autoreset and `final_info` of the present Gymnasium",
        ),
        goal=3.2,
    ),
    Pair(
        script="ppo_continuous_action",
        beside="CleanRL ppo_continuous_action.py",
        goal=None,
        ours=ours("ppo_continuous_action", "--env-id HalfCheetah-v5"),
        steps=49_152,
        peer=peer("cleanrl", "ppo_continuous_action", "--env-id HalfCheetah-v5"),
        peer_steps=24_576,
        settings="HalfCheetah-v5, the defaults of both: 1 environment x 2048 steps, 10 epochs x 32 minibatches, Adam "
        "3e-4 that falls to 0, two networks 64-64 with tanh, observations and rewards normalised",
        peer_differs="SAME_STEP autoreset and `final_info` of the present Gymnasium",
    ),
    Pair(
        script="ppo_atari_envpool",
        beside="CleanRL ppo_atari_envpool.py; ours with `--bf16 auto`",
        goal=2,
        ours=ours("ppo_atari_envpool", "--env-id Breakout-v5 --bf16 auto"),
        steps=8_192,
        peer=peer("cleanrl", "ppo_atari_envpool", "--env-id Breakout-v5"),
        peer_steps=4_096,
        settings="Breakout-v5, the defaults of both: 8 environments x 128 steps, 4 epochs x 4 minibatches, Adam 2.5e-4 "
        "that falls to 0, three convolutions and a layer of 512",
        ours_differs="convolutions in bfloat16",
        peer_differs="gym's interface over that of the present envpool",
    ),
    *with_and_without_compile(
        Pair(
            script="ippo",
            beside="CleanMARL ippo_multienvs.py",
            goal=30,
            ours=ours("ippo", f"{AS_CLEANMARL} --critic-hidden-dim 32"),
            steps=90_000,
            peer=peer("cleanmarl", "ippo_multienvs", NOT_EVALUATED),
            peer_steps=3_000,
            settings=f"{ON_POLICY}; actor 32-32, critic 32-32",
            peer_differs=f"{OWN_SIMULATOR}, in 3 processes",
        ),
        goal=30,
    ),
    *with_and_without_compile(
        Pair(
            script="mappo",
            beside="CleanMARL mappo_multienvs.py",
            goal=22,
            ours=ours("mappo", f"{AS_CLEANMARL} --critic-hidden-dim 64"),
            steps=60_000,
            peer=peer("cleanmarl", "mappo_multienvs", NOT_EVALUATED),
            peer_steps=3_000,
            settings=f"{ON_POLICY}; actor 32-32, critic 64-64",
            ours_differs="the critic sees the own observation beside the state, so it has a value for each agent",
            peer_differs=f"{OWN_SIMULATOR}, in 3 processes; one value for all agents, from the state",
        ),
        goal=30,
    ),
    Pair(
        script="mappo",
        beside="CleanMARL mappo_multienvs.py, foraging",
        goal=None,
        ours=ours(
            "mappo",
            f"--env-id {FORAGING} {AS_CLEANMARL} --num-steps 50 --critic-hidden-dim 64",
        ),
        steps=90_000,
        peer=peer("cleanmarl", "mappo_multienvs", f"{IN_FORAGING} {NOT_EVALUATED}"),
        peer_steps=6_000,
        settings=ON_POLICY.replace("simple_spread", "Foraging-8x8-2p-2f-coop").replace("25 steps", "50 steps")
        + "; actor 32-32, critic 64-64",
        ours_differs="rollouts of 50 steps go on into the next episode; the critic sees the own observation beside the "
        "state, so it has a value for each agent, who earn their own rewards",
        peer_differs="the package lbforaging, in 3 processes; one value for all agents, from the state, of the sum of "
        "the rewards",
    ),
    Pair(
        script="mappo",
        beside="BenchMARL MAPPO",
        goal=None,
        ours=ours(
            "mappo",
            "--num-envs 10 --num-steps 600 --update-epochs 45 --num-minibatches 15 --gamma 0.99 --gae-lambda 0.9 "
            "--learning-rate 5e-5 --critic-learning-rate 5e-5 --ent-coef 0 --max-grad-norm 5 --no-norm-adv "
            "--no-normalize-value --huber-delta 0 --value-clip-coef 0 --actor-hidden-dim 256 --critic-hidden-dim 256",
        ),
        steps=24_000,
        peer="bash benchmark/peers/benchmarl.sh {peers} {tmp} SIMPLE_SPREAD {steps} {seed}",
        peer_steps=24_000,
        settings="simple_spread, BenchMARL's settings: rollouts of 600 steps of 10 environments, 45 epochs x 15 "
        "minibatches of 400 steps of three agents, Adam 5e-5, two networks 256-256 with tanh, shared by the agents",
        ours_differs="ids beside the observations, and these beside the state",
        peer_differs=OWN_SIMULATOR,
    ),
    Pair(
        script="ippo_lstm",
        beside="CleanMARL ippo_lstm_multienvs.py",
        goal=None,
        ours=ours("ippo_lstm", f"{AS_CLEANMARL} --cell gru --critic-hidden-dim 32"),
        steps=18_000,
        peer=peer("cleanmarl", "ippo_lstm_multienvs", f"{NOT_EVALUATED} --tbptt 25"),
        peer_steps=3_000,
        settings=f"{ON_POLICY}; 32 units and a GRU; gradients go back to the start of an episode",
        ours_differs="the critic has a GRU too; GRUs come after two layers",
        peer_differs=f"{OWN_SIMULATOR}, in 3 processes; the GRU comes after one layer; AdamW",
    ),
    Pair(
        script="mappo_lstm",
        beside="CleanMARL mappo_lstm_multienvs.py",
        goal=None,
        ours=ours("mappo_lstm", f"{AS_CLEANMARL} --critic-hidden-dim 64"),
        steps=12_000,
        peer=peer("cleanmarl", "mappo_lstm_multienvs", f"{NOT_EVALUATED} --tbptt 25"),
        peer_steps=3_000,
        settings=f"{ON_POLICY}; 32 units and a GRU, critic 64; gradients go back to the start of an episode",
        ours_differs="the critic has a GRU too, and sees the own observation beside the state, so it has a value for "
        "each agent; GRUs come after two layers",
        peer_differs=f"{OWN_SIMULATOR}, in 3 processes; the GRU comes after one layer; one value for all agents, from "
        "the state",
    ),
    Pair(
        script="ippo",
        beside="skrl IPPO",
        goal=5,
        ours=ours(
            "ippo",
            "--num-envs 1 --num-steps 16 --update-epochs 8 --num-minibatches 2 --no-share-parameters --gamma 0.99 "
            "--learning-rate 1e-3 --critic-learning-rate 1e-3 --ent-coef 0 --max-grad-norm 0.5 --no-normalize-value "
            "--huber-delta 0 --no-time-limit-bootstrap",
        ),
        steps=4_800,
        peer="bash benchmark/peers/skrl.sh {peers} {tmp} {steps} {seed}",
        peer_steps=1_024,
        settings="simple_spread, skrl's defaults: rollouts of 16 steps of 1 environment, 8 epochs x 2 minibatches, 16 "
        "gradient steps of each of 3 agents, with networks of their own, 64-64 with tanh; Adam 1e-3, clip 0.2, "
        "gradients clipped at 0.5, advantages normalised",
        ours_differs="actor and critic are clipped apart; a time limit is an end",
        peer_differs=f"{OWN_SIMULATOR}; an agent's two gradients are clipped together; a time limit is none",
    ),
    Pair(
        script="maddpg",
        beside="CleanMARL maddpg.py",
        goal=8,
        ours=ours("maddpg", f"{MADDPG} --normalize-reward"),
        steps=24_000,
        peer=peer("cleanmarl", "maddpg", NOT_EVALUATED),
        peer_steps=4_000,
        settings=f"{OFF_POLICY}1 environment, an update and a target update after each episode, batches of 10 "
        "episodes, Adam 3e-4, rewards normalised, actor 32-32, critic 128-128",
        ours_differs=f"{ONE_VALUE}; rewards are normalised by the statistics of the buffer",
        peer_differs=f"{OWN_SIMULATOR}; by those of the batch",
    ),
    Pair(
        script="maddpg_multienvs",
        beside="CleanMARL maddpg_multienvs.py",
        goal=15,
        ours=ours("maddpg_multienvs", f"{MADDPG} --target-network-update-freq 4"),
        steps=36_000,
        peer=peer("cleanmarl", "maddpg_multienvs", NOT_EVALUATED),
        peer_steps=3_600,
        settings=f"{OFF_POLICY}4 environments, 4 updates and a target update after every 4 episodes, batches of 10 "
        "episodes, Adam 3e-4, actor 32-32, critic 128-128",
        ours_differs=ONE_VALUE,
        peer_differs=f"{OWN_SIMULATOR}, in 4 processes",
    ),
    Pair(
        script="maddpg_lstm",
        beside="CleanMARL maddpg_lstm.py",
        goal=10,
        ours=ours("maddpg_lstm", MADDPG),
        steps=20_000,
        peer=peer("cleanmarl", "maddpg_lstm", NOT_EVALUATED),
        peer_steps=3_000,
        settings=f"{OFF_POLICY}1 environment, an update and a target update after each episode, batches of 10 "
        "episodes, gradients go back 10 steps, Adam 6e-4, actor 32 and a recurrent layer of 32, critic 128-128",
        ours_differs=f"an LSTM (4 gates for a GRU's 3); {ONE_VALUE}",
        peer_differs=f"a GRU; {OWN_SIMULATOR}; a step of the actor's optimizer every 10 steps of the episodes, 3 an "
        "update",
    ),
    Pair(
        script="maddpg_lstm_multienvs",
        beside="CleanMARL maddpg_lstm_multienvs.py",
        goal=10,
        ours=ours("maddpg_lstm_multienvs", f"{MADDPG} --target-network-update-freq 4"),
        steps=20_000,
        # It updates its targets only where the number of rounds is no multiple of this, never with the default of 1.
        peer=peer("cleanmarl", "maddpg_lstm_multienvs", f"{NOT_EVALUATED} --target_network_update_freq 1000000"),
        peer_steps=3_000,
        settings=f"{OFF_POLICY}4 environments, 4 updates and a target update after every 4 episodes, batches of 10 "
        "episodes, gradients go back 10 steps, Adam 3e-4, actor 32 and a recurrent layer of 32, critic 128-128",
        ours_differs=f"an LSTM (4 gates for a GRU's 3); {ONE_VALUE}",
        peer_differs=f"a GRU; {OWN_SIMULATOR}, in 4 processes; a step of the actor's optimizer every 10 steps of the "
        "episodes, 3 an update",
    ),
    Pair(
        script="facmac",
        beside="CleanMARL facmac_multienvs.py",
        goal=None,
        ours=ours(
            "facmac",
            f"{QUIET} --individual-critics False --gamma 0.99 --optimizer AdamW --polyak 0.005 --clip-gradients 0 "
            "--learning-rate-actor 8e-4 --learning-rate-critic 8e-4 --target-network-update-freq 4",
        ),
        steps=24_000,
        peer=peer("cleanmarl", "facmac_multienvs", NOT_EVALUATED),
        peer_steps=2_400,
        settings=f"{OFF_POLICY}4 environments, 4 updates and a target update after every 4 episodes, batches of 10 "
        "episodes, AdamW 8e-4, gradients not clipped, actor 32-32, critic of each agent 128-128, mixing network of 32",
        ours_differs="the mixing network's weights come from hypernetworks with a hidden layer of 64",
        peer_differs=f"{OWN_SIMULATOR}, in 4 processes; from hypernetworks without one",
    ),
    Pair(
        script="vdn",
        beside="CleanMARL vdn.py",
        goal=5,
        ours=ours(
            "vdn",
            f"{QUIET} --num-envs 1 --epochs 5 --batch-size 2 --no-double-q --td-lambda 0 --gamma 0.99 --polyak 0.005 "
            "--learning-rate 5e-4 --clip-gradients 5 --epsilon-timesteps 1000",
        ),
        steps=16_000,
        peer=peer("cleanmarl", "vdn", f"{NOT_EVALUATED} --batch_size 50 --learning_starts 50"),
        peer_steps=8_000,
        settings=f"{OFF_POLICY}1 environment, 5 updates and target updates for each episode of 25 steps, Adam 5e-4, "
        "gradients clipped at 5, one network 64-64 for all agents; but batches of 50 steps, not 32",
        ours_differs="batches are 2 episodes, 5 after each",
        peer_differs=f"{OWN_SIMULATOR}; batches are single steps, one after every 5; one draw for exploration for all "
        "agents; updates from step 51 on, not from 5001",
    ),
    Pair(
        script="qmix",
        beside="CleanMARL qmix.py",
        goal=8,
        ours=ours("qmix", QMIX),
        steps=40_000,
        peer=peer("cleanmarl", "qmix", NOT_EVALUATED),
        peer_steps=5_000,
        settings=QMIX_SETTINGS,
        ours_differs="the mixing network's weights come from hypernetworks with a hidden layer of 64",
        peer_differs=f"{OWN_SIMULATOR}; from hypernetworks without one; one draw for exploration for all agents",
    ),
    Pair(
        script="qmix",
        beside="CleanMARL qmix.py, foraging",
        goal=None,
        ours=ours("qmix", f"--env-id {FORAGING} {QMIX}"),
        steps=40_000,
        peer=peer("cleanmarl", "qmix", f"{IN_FORAGING} {NOT_EVALUATED}"),
        peer_steps=6_000,
        settings=QMIX_SETTINGS.replace("simple_spread", "Foraging-8x8-2p-2f-coop"),
        ours_differs="the mixing network's weights come from hypernetworks with a hidden layer of 64; a team earns the "
        "mean of the rewards",
        peer_differs="the package lbforaging; from hypernetworks without one; their sum; one draw for exploration for "
        "all agents",
    ),
    *with_and_without_compile(
        Pair(
            script="ippo",
            beside="JaxMARL ippo_ff_mpe.py",
            goal=0.8,
            ours=ours(
                "ippo",
                f"--num-envs 16 {AS_JAXMARL} --learning-rate 2.5e-4 --critic-learning-rate 2.5e-4 --max-grad-norm 0.5",
            ),
            steps=262_144,
            peer="bash benchmark/peers/jaxmarl.sh {peers} IPPO/ippo_ff_mpe {steps} {seed} TOTAL_TIMESTEPS=40960",
            peer_steps=655_360,
            settings="simple_spread, JaxMARL's settings: 16 environments x 128 steps, 4 epochs x 4 minibatches, two "
            "networks 64-64 with tanh, shared by the agents, Adam 2.5e-4 that falls to 0, clip 0.2, entropy 0.01, "
            "gradients clipped at 0.5, a time limit is an end",
            ours_differs="ids beside the observations; actor and critic are clipped apart; advantages are normalised "
            "by rollout",
            peer_differs=f"{IN_XLA}; no ids; both are clipped together; advantages are normalised by minibatch",
        ),
        goal=1,
    ),
    Pair(
        script="ippo_lstm",
        beside="JaxMARL ippo_rnn_smax.py",
        goal=1,
        ours=ours(
            "ippo_lstm",
            f"{AS_SMAX} --learning-rate 0.004 --critic-learning-rate 0.004 --clip-coef 0.05 --value-clip-coef 0.05",
        ),
        steps=32_768,
        peer=f"bash benchmark/peers/jaxmarl.sh {{peers}} IPPO/ippo_rnn_smax {{steps}} {{seed}} {IN_SMAX}",
        peer_steps=32_768,
        settings=f"{SMAX}; Adam 0.004 that falls to 0, clip 0.05, entropy 0.01",
        ours_differs="actor and critic have GRUs of their own, after the two layers; ids beside the observations; "
        "advantages are normalised by rollout",
        peer_differs=f"{IN_XLA}; actor and critic have one GRU together, between the layers; no ids; advantages are "
        "normalised by minibatch",
    ),
    Pair(
        script="mappo_lstm",
        beside="JaxMARL mappo_rnn_smax.py",
        goal=1,
        ours=ours("mappo_lstm", f"{AS_SMAX} --learning-rate 0.002 --critic-learning-rate 0.002 --ent-coef 0"),
        steps=32_768,
        peer=f"bash benchmark/peers/jaxmarl.sh {{peers}} MAPPO/mappo_rnn_smax {{steps}} {{seed}} {IN_SMAX}",
        peer_steps=32_768,
        settings=f"{SMAX}; Adam 0.002 that falls to 0, clip 0.2, no entropy bonus",
        ours_differs="GRUs come after the two layers; ids beside the observations, which the critic sees beside the "
        "state; advantages are normalised by rollout",
        peer_differs=f"{IN_XLA}; GRUs come between the layers; the critic sees the state and an id; advantages are "
        "normalised by minibatch",
    ),
    Pair(
        script="impala_replay",
        beside="DI-engine IMPALA",
        goal=20,
        ours=ours(
            "impala_replay",
            "--num-actors 0 --num-envs 16 --unroll-length 8 --updates-per-collect 4 --replay-size 1000 --learning-rate "
            "5e-4 --no-anneal-lr --gamma 0.9 --vtrace-lambda 0.95 --ent-coef 1e-4 --optimizer-eps 1e-8",
        ),
        steps=81_920,
        peer="bash benchmark/peers/ding.sh {peers} {tmp} {steps} {seed}",
        peer_steps=20_480,
        settings="CartPole, DI-engine's settings: 16 unrolls of 8 steps, then 4 gradient steps, each on 16 unrolls of "
        "a replay of 1,000; Adam 5e-4, gamma 0.9, lambda 0.95, entropy 1e-4; nothing is evaluated",
        ours_differs="CartPole-v1; 16 environments; actor and critic are networks 64-64 with tanh",
        peer_differs="CartPole-v0; 8 environments; one network 64-64 with ReLU and a head each; an unroll is used 16 "
        "times at most",
    ),
    Pair(
        script="impala",
        beside="RLlib IMPALA",
        goal=None,
        ours=ours("impala", "--num-actors 0 --num-envs 10 --unroll-length 50 --updates-per-collect 1"),
        steps=164_000,
        peer="bash benchmark/peers/rllib.sh {peers} {steps} {seed}",
        peer_steps=82_000,
        settings="CartPole-v1: 10 environments, unrolls of 50 steps, a gradient step for 500 steps (RLlib's default), "
        "networks 64-64 of actor and critic with tanh, Adam, one process; nothing is evaluated",
        peer_differs="the servers that Ray starts are not counted",
    ),
    Pair(
        script="impala",
        beside="Sample Factory APPO",
        goal=None,
        ours=ours("impala", "--num-actors 0 --num-envs 16 --unroll-length 32 --updates-per-collect 1"),
        steps=163_840,
        peer="bash benchmark/peers/sample_factory.sh {peers} {tmp} {steps} {seed}",
        peer_steps=40_960,
        settings="CartPole-v1: 16 environments, unrolls of 32 steps, a gradient step for 512 steps, V-trace, networks "
        "64-64 of actor and critic with tanh, Adam, one process; nothing is evaluated",
        peer_differs="PPO's clipped objective beside V-trace; its serial mode",
    ),
    Pair(
        script="impala_atari_envpool",
        beside="MonoBeast",
        goal=1.5,
        ours=ours("impala_atari_envpool", "--shallow --num-actors 0 --num-envs 16 --batch-size 8"),
        steps=12_800,
        peer="bash benchmark/peers/monobeast.sh {peers} {tmp} {steps}",
        peer_steps=8_960,
        settings="Pong: a gradient step for 8 unrolls of 20 steps, two convolutions of 16 and 32 channels and a layer "
        "of 256, RMSProp, float32; nothing is evaluated",
        ours_differs="16 environments of envpool in one process",
        peer_differs="an environment of Gymnasium in each of two processes; the heads see the last action and reward",
    ),
]
