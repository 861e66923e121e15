"""What the scripts of PPO and IMPALA have copied, and that each PPO is right where it could be copied wrong."""

import copy
import importlib
import math

from cleanmarl import ppo_procgen
from cleanmarl.envs import make_gymnasium
from cleanmarl.run import load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from optional import need
from toys import Quiet, code, make_rollout

PPO = {  # script: what its environment needs
    "ppo": [],
    "ppo_shared": [],
    "ppo_continuous_action": ["mujoco"],
    "ppo_multidiscrete": ["envpool"],
    "ppo_multidiscrete_mask": ["envpool"],
    "ppo_procgen": ["envpool", "Qt 5"],
    "ppo_atari": ["ale_py", "cv2"],
    "ppo_atari_envpool": ["envpool"],
    "ppo_atari_lstm": ["ale_py", "cv2"],
    "ppo_atari_multigpu": ["envpool"],
}
FRAMES = ["ppo_procgen", "ppo_atari", "ppo_atari_envpool", "ppo_atari_multigpu"]
# time limits within a short rollout
gym.register("FiveSteps-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=5)
gym.register("SwingUp-v0", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=5)
VECTORS = ["ppo", "ppo_shared", "ppo_continuous_action"]
COMPONENTS = ["ppo_multidiscrete", "ppo_multidiscrete_mask"]
IMPALA = ["impala", "impala_continuous_action", "impala_atari_envpool"]


@pytest.mark.parametrize(
    "scripts, names",
    [
        ([*PPO, "ppo_selfplay"], ["gae", "layer_init"]),
        ([*VECTORS[:2], *COMPONENTS, *FRAMES, "ppo_atari_lstm", "ppo_selfplay"], ["gumbel_noise"]),
        ([*VECTORS, *COMPONENTS, *FRAMES[:3]], ["update"]),
        ([*VECTORS, *COMPONENTS], ["estimate", "Rollout"]),
        (VECTORS[:2], ["Args", "collect", "ppo_loss", "make_policy", "main"]),
        (COMPONENTS, ["collect", "ppo_loss", "make_policy", "main"]),
        (FRAMES, ["estimate", "ppo_loss", "Rollout", "make_policy"]),
        (FRAMES[1:], ["collect"]),
        (["ppo_atari_envpool", "ppo_selfplay"], ["ppo_loss", "make_policy"]),
        (["ppo_continuous_action", "ppo_procgen"], ["RunningMeanStd"]),
        ([*IMPALA, "impala_ray", "impala_replay"], ["vtrace"]),
        (IMPALA, ["update"]),
        ([*IMPALA, "impala_ray", "impala_replay"], ["RMSProp", "make_optimizer"]),
        (["ppo_atari", "ppo_atari_lstm"], ["EpisodicLife", "FireReset", "warp_frame"]),
        (["impala", "impala_ray"], ["Agent", "Player", "impala_loss"]),
    ],
)
def test_copies_are_copies(scripts, names):
    """So that a test of one of them is a test of all."""
    for name in names:
        originals = [code(getattr(importlib.import_module(f"cleanmarl.{script}"), name)) for script in scripts]
        assert len({original.removeprefix("@compilable\n") for original in originals}) == 1, name


def rollouts(name, monkeypatch, tmp_path, **changes):
    """Two rollouts of a run that does not learn: the agent, the arguments and each one's arrays and batch."""
    need(*PPO[name])
    script = importlib.import_module(f"cleanmarl.{name}")
    agents, arrays, batches, estimate = [], [], [], script.estimate

    def spy(agent, rollout, *rest):
        agents.append(agent)
        batch = estimate(agent, rollout, *rest)
        arrays.append(copy.deepcopy(rollout))  # the next rollout is written into the same memory
        batches.append(copy.deepcopy(batch))
        return batch

    monkeypatch.setattr(script, "estimate", spy)
    monkeypatch.setattr(script, "update", lambda *_: {})
    sizes = {"num_envs": 4, "num_steps": 15, "num_minibatches": 2, "total_timesteps": 120, "eval_episodes": 0}
    args = script.Args(**sizes | changes, runs_dir=str(tmp_path))
    script.main(args)
    return script, agents[0], args, arrays, batches


@pytest.mark.parametrize("name", PPO)
def test_the_last_step_bootstraps_from_what_follows_the_rollout(name, monkeypatch, tmp_path):
    """With lambda 0 its return is r + gamma V, where V is the value of the first step of the rollout that follows."""
    env = {"env_id": "RubiksCube-v0"} if name == "ppo_multidiscrete" else {}  # random episodes of its own end at once
    _, _, args, arrays, (first, second) = rollouts(name, monkeypatch, tmp_path, gae_lambda=0.0, **env)
    return_, value, following = (x.reshape(15, 4).numpy() for x in (first.return_, first.value, second.value))
    reward, going_on = arrays[0].reward, 1.0 - arrays[0].done
    np.testing.assert_allclose(return_[-1], reward[-1] + args.gamma * going_on[-1] * following[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(return_[:-1], reward[:-1] + args.gamma * going_on[:-1] * value[1:], rtol=1e-3, atol=1e-5)
    assert going_on[-1].any() and (abs(following[0]) > 1e-4).all()


def test_a_memory_and_where_episodes_begin_go_on_from_one_rollout_to_the_next(monkeypatch, tmp_path):
    _, agent, _, arrays, (first, second) = rollouts("ppo_atari_lstm", monkeypatch, tmp_path)
    with torch.no_grad():
        _, _, state = agent(first.obs, first.lstm_state, first.start)
    assert state.any()
    torch.testing.assert_close(second.lstm_state, state, atol=1e-5, rtol=0)
    assert second.start[0].tolist() == arrays[0].done[-1].tolist() != [True] * 4


def test_ppo_atari_lstm_is_ppo_atari_but_for_one_frame_and_minibatches_of_sequences():
    ours, theirs = (importlib.import_module(f"cleanmarl.{name}") for name in ("ppo_atari_lstm", "ppo_atari"))
    assert code(ours.make_envs) == code(theirs.make_envs).replace("Observation(env, 4)", "Observation(env, 1)")
    lines, of_parent = (
        [line for line in code(x.update).splitlines() if not any(word in line for word in ("batch_size", "order"))]
        for x in (ours, theirs)
    )
    assert lines == of_parent and len(lines) > 12


def without(words: list[str], function) -> list[str]:
    """The lines of its code, unindented, that have none of these words."""
    return [line.strip() for line in code(function).splitlines() if not any(word in line for word in words)]


def test_scripts_of_several_learners_learn_like_those_of_one():
    """But for their gradients, which are averaged."""
    multi, single = (importlib.import_module(f"cleanmarl.ppo_atari_{name}") for name in ("multigpu", "envpool"))
    assert without(["gradients"], multi.update) == without([], single.update)
    ray, impala = (importlib.import_module(f"cleanmarl.{name}") for name in ("impala_ray", "impala"))
    assert without(["average("], ray.update) == without([], impala.update)
    words = ("batch", "gathered", "num_updates", "remaining", "learning_rate", "episodes", "unrolls")
    loops = [
        [line.strip() for line in code(x.main).splitlines() if any(word in line for word in words)]
        for x in (ray, impala)
    ]
    assert loops[0] == loops[1] and len(loops[1]) > 15


class FloatPictures(gym.Env):
    """Frames (C, 84, 84) of numbers from 0 to 1, as a user's environment may have them."""

    action_space, size = gym.spaces.Discrete(2), 84

    def __init__(self, num_frames):
        self.observation_space = gym.spaces.Box(0, 1, (num_frames, self.size, self.size), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(self.observation_space.shape, np.float32), {}

    def step(self, action):
        return self.np_random.random(self.observation_space.shape, np.float32), 1.0, False, False, {}


class Impatient(gym.Wrapper):
    """Gives up after 3 steps; around RecordEpisodeStatistics, whose episodes go on."""

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        self.t += 1
        obs, reward, termination, _, info = self.env.step(action)
        return obs, reward, termination, self.t == 3, info


def impatient(env_id, **options):
    """`make_envs` of a copy with that wrapper."""
    options["wrappers"] = [gym.wrappers.RecordEpisodeStatistics, Impatient]
    return lambda args, num_envs, **_: make_gymnasium(env_id, num_envs, **options)


@pytest.mark.parametrize("name", [x for x in PPO if x not in COMPONENTS])
def test_the_value_after_a_truncation_does_not_depend_on_the_statistics(name, monkeypatch, tmp_path):
    script, rewards = importlib.import_module(f"cleanmarl.{name}"), []
    if name in VECTORS:
        make_envs = impatient("CartPole-v1" if "continuous" not in name else "Pendulum-v1", vectors=True)
    else:
        make_envs = impatient(FloatPictures, num_frames={"ppo_atari_lstm": 1, "ppo_procgen": 3}.get(name, 4))
        if name == "ppo_procgen":
            monkeypatch.setattr(FloatPictures, "size", 64)
    monkeypatch.setattr(script, "make_envs", make_envs)
    for bootstrap in (False, True):
        _, _, _, arrays, _ = rollouts(name, monkeypatch, tmp_path / str(bootstrap), time_limit_bootstrap=bootstrap)
        rewards.append(arrays[0].reward)
    without, with_value = rewards
    assert arrays[0].done.any(1).tolist() == [t % 3 == 2 for t in range(15)]
    assert (without != with_value)[2::3].all() and (without == with_value)[0::3].all()


def test_procgens_rewards_are_scaled_by_its_discount_and_truncations_bootstrap(monkeypatch):
    """Every reward is 1, every third step a truncation, and the value of everything 0.7."""
    monkeypatch.setattr(FloatPictures, "size", 64)
    args = ppo_procgen.Args(num_envs=2, num_steps=30, time_limit_bootstrap=True)
    envs = impatient(FloatPictures, num_frames=3)(args, 2)
    agent, twin = ppo_procgen.Agent(envs, args), ppo_procgen.Agent(envs, args)
    torch.nn.init.zeros_(agent.critic.weight), torch.nn.init.constant_(agent.critic.bias, 0.7)
    rollout = make_rollout(ppo_procgen, args, envs)
    ppo_procgen.collect(agent, envs, envs.reset(seed=1)[0], rollout, args, Quiet())
    for t in range(30):
        scaled = twin.scale_reward(np.ones(2), np.full(2, t % 3 == 2), args.gamma)
        np.testing.assert_allclose(rollout.reward[t], scaled + 0.7 * args.gamma * (t % 3 == 2), rtol=1e-5)


class Components(gym.vector.VectorEnv):
    """Two environments of two components with 2 and 3 choices; every third step is a truncation, and cuts both."""

    num_envs, single_observation_space = 2, gym.spaces.Box(-1e3, 1e3, (9,), np.float32)
    single_action_space = gym.spaces.MultiDiscrete([2, 3])

    def reset(self, **_):
        self.t = 0
        return self.obs(0), {}

    def obs(self, value):
        """(2, 9); the last six say what is legal, which is all."""
        return np.concatenate([[[value] * 3, [value + 100] * 3], np.ones((2, 6))], 1).astype(np.float32)

    def step(self, action):
        self.t += 1
        cut = np.full(2, self.t % 3 == 0)
        info = {"final_obs": self.obs(self.t)} if cut.any() else {}
        return self.obs(-self.t), np.ones(2), np.zeros(2, bool), cut, info


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_truncated_episode_of_components_goes_on_by_the_value_of_what_it_ended_in(name):
    """The value of an observation is its first number."""
    need("envpool")
    script, envs = importlib.import_module(f"cleanmarl.{name}"), Components()
    args = script.Args(num_envs=2, num_steps=9, time_limit_bootstrap=True, gamma=0.5)
    agent = script.Agent(envs, args)
    agent.critic = torch.nn.Linear(9, 1)
    torch.nn.init.eye_(agent.critic.weight), torch.nn.init.zeros_(agent.critic.bias)
    rollout = make_rollout(script, args, envs)
    script.collect(agent, envs, envs.reset()[0], rollout, args, Quiet())
    for t in range(1, 10):
        following = np.array([t, t + 100]) if t % 3 == 0 else np.zeros(2)
        np.testing.assert_allclose(rollout.reward[t - 1], 1 + 0.5 * following)


@pytest.mark.parametrize("name", [*IMPALA[:2], "impala_replay", "impala_ray"])
def test_what_a_truncated_episode_ends_in_does_not_depend_on_the_statistics(name, monkeypatch):
    script = importlib.import_module(f"cleanmarl.{name}")
    env_id = "CartPole-v1" if "continuous" not in name else "Pendulum-v1"
    monkeypatch.setattr(script, "make_envs", impatient(env_id, vectors=True))
    args = script.Args(env_id=env_id, num_envs=2, unroll_length=8)
    player = script.Player(args, 0, 0)
    unrolls = np.zeros(2, script.unroll_dtype(player.envs, args))
    player.play(script.Agent(player.envs, args), unrolls)
    assert unrolls["truncation"].sum(0).tolist() == [0, 0, 2, 0, 0, 2, 0, 0]
    assert unrolls["final_obs"][unrolls["truncation"]].any(-1).all()
    assert unrolls["ep_length"].sum(0).tolist() == [0, 0, 6, 0, 0, 6, 0, 0]  # and such episodes are counted


@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_procgen"])
def test_all_statistics_of_an_agent_are_in_its_state(name):
    """Those that a copy adds, too."""
    script = importlib.import_module(f"cleanmarl.{name}")

    class WithCosts(script.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.cost_stats = script.RunningMeanStd()

    if name == "ppo_procgen":
        envs = make_gymnasium(type("Small", (FloatPictures,), {"size": 64}), 2, num_frames=3)
    else:
        envs = make_gymnasium("Pendulum-v1", 2)
    agent, other = WithCosts(envs, script.Args()), WithCosts(envs, script.Args())
    agent.cost_stats.update(np.array([3.0, 5.0]))
    agent.return_stats.update(np.array([7.0, 8.0]))
    other.load_state_dict(agent.state_dict())
    for stats in ("cost_stats", "return_stats"):
        assert vars(getattr(other, stats)) == vars(getattr(agent, stats)) and getattr(other, stats).count > 2


@pytest.mark.parametrize("name", [*VECTORS, *COMPONENTS, *IMPALA[:2], "impala_replay"])
def test_networks_see_rows_alone(name, monkeypatch, tmp_path):
    """So that a copy may begin with nn.Flatten, or have a BatchNorm: observations (B, D), of steps, of time limits."""
    need(*PPO.get(name, ["mujoco"] if name == "impala_continuous_action" else []))
    script, seen = importlib.import_module(f"cleanmarl.{name}"), []

    class Watched(script.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            for network in (self.actor, self.critic):
                network.register_forward_pre_hook(lambda network, args: seen.append(args[0].ndim))

    monkeypatch.setattr(script, "Agent", Watched)
    small = {"total_timesteps": 512, "num_envs": 2, "eval_episodes": 1, "runs_dir": str(tmp_path)}
    rollout = {"num_steps": 128, "time_limit_bootstrap": True}
    small |= rollout if name in PPO else {"num_actors": 0, "unroll_length": 64, "updates_per_collect": 1}
    small |= {} if name in COMPONENTS else {"env_id": "FiveSteps-v0" if "continuous" not in name else "SwingUp-v0"}
    script.main(script.Args(**small))
    assert len(seen) > 8 and set(seen) == {2}


@pytest.mark.parametrize("name", ["ppo_atari", "ppo_atari_lstm", "ppo_atari_multigpu"])
def test_a_copy_learns_from_pictures_of_floats_as_they_are(name, monkeypatch, tmp_path):
    """Nothing but make_envs is changed; in a rollout of uint8 all of it would be black."""
    script, frames = importlib.import_module(f"cleanmarl.{name}"), 1 if name == "ppo_atari_lstm" else 4
    monkeypatch.setattr(script, "make_envs", lambda _, N, **__: make_gymnasium(FloatPictures, N, num_frames=frames))
    _, _, _, arrays, batches = rollouts(name, monkeypatch, tmp_path)
    assert 0.4 < arrays[0].obs.mean() < 0.6 and 0.4 < batches[0].obs.mean() < 0.6


@pytest.mark.parametrize("name", PPO)
def test_the_loss_is_its_definition(name, monkeypatch, tmp_path):
    """Of a batch whose ratios and value changes are known, because nothing has been learned since it was collected."""
    script, agent, args, _, (batch, _) = rollouts(name, monkeypatch, tmp_path, ent_coef=0.1, vf_coef=0.3)
    rng = np.random.default_rng(0)
    shape = tuple(batch.return_.shape)
    log_ratio = rng.choice([-0.6, -0.3, -0.1, 0.05, 0.15, 0.3, 0.6], shape)  # none where rounding decides on a clip
    moved, advantage = rng.normal(0, 0.3, shape), rng.normal(0.5, 2, shape)
    value, return_ = batch.value.double().numpy(), rng.normal(0, 1, shape)
    changed = batch._replace(
        log_prob=batch.log_prob - torch.from_numpy(log_ratio).float(),
        value=batch.value + torch.from_numpy(moved).float(),
        advantage=torch.from_numpy(advantage).float(),
        return_=torch.from_numpy(return_).float(),
    )
    loss, stats = script.ppo_loss(agent, changed, 0.2, args)

    scaled = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    ratio = np.exp(log_ratio)
    policy_loss = -np.minimum(scaled * ratio, scaled * ratio.clip(0.8, 1.2)).mean()
    clipped_value = value + moved + (-moved).clip(-0.2, 0.2)
    value_loss = 0.5 * np.maximum((value - return_) ** 2, (clipped_value - return_) ** 2).mean()
    expected = [policy_loss, value_loss, (ratio - 1 - log_ratio).mean(), (abs(ratio - 1) > 0.2).mean()]
    names = ["policy_loss", "value_loss", "approx_kl", "clipfrac"]
    np.testing.assert_allclose([stats[name] for name in names], expected, rtol=2e-3, atol=2e-3)
    assert loss.item() == pytest.approx(policy_loss - 0.1 * stats["entropy"].item() + 0.3 * value_loss, abs=2e-3)
    assert 0.1 < stats["entropy"] < math.inf


@pytest.mark.parametrize("name", ["ppo_atari_lstm", "ppo_selfplay"])
def test_epochs_stop_at_the_target_kl(name, tmp_path):
    """Where `update` is no copy: of three epochs with two minibatches each, only the first is left of two updates."""
    need(*PPO.get(name, ["envpool"]))
    script = importlib.import_module(f"cleanmarl.{name}")
    sizes = {"num_envs": 4, "num_steps": 15, "num_minibatches": 2, "update_epochs": 3, "total_timesteps": 120}
    sizes |= {"eval_episodes": 0, "learning_rate": 1e-2} | ({"match_games": 1} if name == "ppo_selfplay" else {})
    for target_kl, steps in ((1e-6, 4), (1e6, 12), (None, 12)):
        folder = script.main(script.Args(**sizes, target_kl=target_kl, runs_dir=str(tmp_path)))
        assert load_checkpoint(folder)["modules"]["optimizer"]["state"][0]["step"] == steps
