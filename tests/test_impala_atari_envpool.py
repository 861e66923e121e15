"""impala_atari_envpool.py: networks, LSTM, what the actor writes down, the loss, the processes, the run."""

import dataclasses
import os
import sys
from pathlib import Path

from cleanmarl import enjoy
from cleanmarl import impala_atari_envpool as impala
from cleanmarl.actors import Actors, RayActor, slot_dtype, tensors
from cleanmarl.cli import launch
from cleanmarl.envs.pool import EnvPool
from cleanmarl.run import EVAL_SEED, load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from toys import scalars

pytest.importorskip("envpool")
SMALL = {"num_actors": 0, "total_timesteps": 32, "num_envs": 2, "unroll_length": 8, "eval_episodes": 0, "shallow": True}


def learned(folder: Path) -> dict[str, list[tuple[int, float]]]:
    return {tag: points for tag, points in scalars(folder).items() if not tag.startswith("time/")}


def new_unrolls(envs, args):
    return np.zeros(args.num_envs, impala.unroll_dtype(envs, args))


def play(args, times=1, sharp=30):
    """An agent whose policy is far from uniform, and the unrolls that its player played, time after time."""
    torch.manual_seed(0)
    player = impala.Player(args, 0, 0)
    agent = impala.Agent(player.envs, args)
    with torch.no_grad():
        agent.actor.weight *= sharp
    played = [new_unrolls(player.envs, args) for _ in range(times)]
    for unrolls in played:
        player.play(agent, unrolls)
    return agent, player, played


def forward(agent, unrolls):
    names = ["obs", "start", "last_action", "last_reward", "state"]
    return agent(*(torch.from_numpy(unrolls[name].swapaxes(0, 1).copy()) for name in names))


# proves impala-10
@pytest.mark.parametrize("lstm", [False, True])
def test_networks_are_the_papers(lstm):
    """Sizes of figure 3: the deep one has 15 convolutions, the shallow one 2; both 256 units, the LSTM 256."""
    envs = impala.make_envs(impala.Args(), 1)
    K = envs.single_action_space.n
    for shallow, size, convolutions in ((True, 32 * 9 * 9, 2), (False, 32 * 11 * 11, 15)):
        agent = impala.Agent(envs, impala.Args(shallow=shallow, lstm=lstm))
        found = [m for m in agent.modules() if isinstance(m, torch.nn.Conv2d)]
        assert len(found) == convolutions
        assert next(m for m in agent.network if isinstance(m, torch.nn.Linear)).weight.shape == (256, size)
        assert (agent.lstm is not None) == lstm and agent.state_size == 256 * lstm
        if lstm:
            assert agent.lstm.weight_ih_l0.shape == (4 * 256, 256 + K + 1)
        inputs = torch.zeros(2, 3, 4, 84, 84, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.bool)
        with torch.no_grad():
            inputs = *inputs, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
            logits, value, state = agent(*inputs, torch.zeros(2, 3, agent.state_size))
        assert logits.shape == (2, 3, K) and value.shape == (2, 3) and state.shape == (2, 3, agent.state_size)
        probability = logits.softmax(-1)
        assert (probability - 1 / K).abs().max() < 0.1  # every action is about as likely at first


def test_the_lstm_forgets_at_starts_and_sees_the_last_action_and_reward():
    args = impala.Args(shallow=True, lstm=True)
    torch.manual_seed(0)
    agent = impala.Agent(impala.make_envs(args, 1), args)
    g = torch.Generator().manual_seed(1)
    obs = torch.randint(0, 255, (6, 3, 4, 84, 84), generator=g, dtype=torch.uint8)
    action, reward = torch.randint(0, 6, (6, 3), generator=g), torch.randn(6, 3, generator=g)
    start, state = torch.zeros(6, 3, dtype=torch.bool), torch.randn(2, 3, 256, generator=g)
    start[2, 0] = start[4, 1] = start[0, 2] = True
    with torch.no_grad():
        _, whole, last = agent(obs, start, action, reward, state)
        first = agent(obs[:1], start[:1], action[:1], reward[:1], state)[2]
        steps, now = [], state
        for t in range(6):  # the same one by one, with the state of each environment reset by hand
            now = torch.where(start[t][None, :, None], torch.zeros(()), now)
            hidden = agent.network(obs[t].float() / 255)
            one_hot = torch.nn.functional.one_hot(action[t], 6) * ~start[t][:, None]
            _, (h, c) = agent.lstm(
                torch.cat([hidden, one_hot, (reward[t] * ~start[t])[:, None]], -1)[None], (now[:1], now[1:])
            )
            now = torch.cat([h, c])
            steps.append(agent.critic(h[0])[:, 0])
        torch.testing.assert_close(whole, torch.stack(steps), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(last, now, atol=1e-5, rtol=1e-5)
        for other in ((action + 1) % 6, reward), (action, reward + 1):  # both matter, except at a start
            change = agent(obs[:1], start[:1], other[0][:1], other[1][:1], state)[2] - first
            assert (change.abs().amax((0, 2)) > 1e-3).tolist() == [True, True, False]


@pytest.mark.parametrize("lstm", [False, True])
def test_the_unroll_is_what_happened_and_the_learner_sees_it_as_the_actor_did(lstm):
    """Breakout: lives are lost; ratios are 1, so states, starts, actions and rewards are all in place."""
    args = impala.Args(**SMALL | {"env_id": "Breakout-v5", "unroll_length": 60, "lstm": lstm})
    agent, _, played = play(args, 2, sharp=3000)
    envs = impala.make_envs(args, 2)
    rng = np.random.default_rng([args.seed, 0, 0])
    obs, _ = envs.reset(seed=int(rng.integers(2**31)))
    start, ends = np.ones(2, bool), 0
    for unrolls in played:
        for t in range(60):
            np.testing.assert_array_equal(unrolls["obs"][:, t], obs)
            np.testing.assert_array_equal(unrolls["start"][:, t], start)
            obs, reward, termination, truncation, _ = envs.step(unrolls["last_action"][:, t + 1])
            np.testing.assert_array_equal(unrolls["last_reward"][:, t + 1], reward)
            start, ends = termination | truncation, ends + (termination | truncation).sum()
        np.testing.assert_array_equal(unrolls["obs"][:, 60], obs)
        np.testing.assert_array_equal(unrolls["start"][:, 60], start)
        with torch.no_grad():
            logits, _, state = forward(agent, unrolls)
            _, stats = impala.impala_loss(agent, unrolls, args)
        log_prob = logits[:-1].log_softmax(-1).numpy()
        chosen = np.take_along_axis(log_prob, unrolls["last_action"].T[1:, :, None], -1)[..., 0]
        np.testing.assert_allclose(unrolls["log_prob"].T, chosen, atol=1e-4)
        assert abs(stats["approx_kl"]) < 1e-6 and np.exp(log_prob).max() > 0.3  # not uniform
    assert ends >= 3 and state.shape == (2, 2, 256 * lstm)
    if lstm:
        assert np.abs(played[0]["state"]).max() == 0 < np.abs(played[1]["state"]).max()


# proves impala-9
def test_rewards_are_signs_of_the_games_own():
    envs, seen = impala.make_envs(impala.Args(env_id="Qbert-v5"), 4), []
    envs.reset(seed=1)
    rng = np.random.default_rng(0)
    for _ in range(200):
        _, reward, *_, info = envs.step(rng.integers(6, size=4))
        seen.append((reward, info["reward"]))
    reward, own = np.array(seen).swapaxes(0, 1)
    assert own.max() >= 25 and (reward == np.sign(own)).all()


def test_a_time_limit_adds_the_value_of_the_last_observation():
    args = impala.Args(**SMALL | {"unroll_length": 12, "lstm": True})
    torch.manual_seed(0)
    player = impala.Player(args, 0, 0)
    player.envs = EnvPool("Pong-v5", 2, max_episode_steps=5)  # Pong has no reward so early
    player.obs, _ = player.envs.reset(seed=1)
    agent = impala.Agent(player.envs, args)
    unrolls = new_unrolls(player.envs, args)
    player.play(agent, unrolls)
    assert unrolls["start"][0].nonzero()[0].tolist() == [0, 5, 10]
    assert unrolls["ep_length"][0].nonzero()[0].tolist() == [4, 9]
    with torch.no_grad():
        before = {name: unrolls[name][:, 5:10] for name in ("obs", "start", "last_action", "last_reward")}
        inputs = [torch.from_numpy(x.swapaxes(0, 1).copy()) for x in before.values()]
        state = agent(*inputs, torch.zeros(2, 2, 256))[2]
        envs = EnvPool("Pong-v5", 2, max_episode_steps=5)
        envs.reset(seed=1)
        for t in range(10):
            info = envs.step(unrolls["last_action"][:, t + 1])[-1]
        same = torch.zeros(1, 2, dtype=torch.bool), torch.from_numpy(unrolls["last_action"][:, 10])[None]
        value = agent(torch.from_numpy(info["final_obs"])[None], *same, torch.zeros(1, 2), state)[1][0]
    np.testing.assert_allclose(unrolls["last_reward"][:, 10], 0.99 * value, atol=1e-5)
    others = np.delete(unrolls["last_reward"], [5, 10], 1)
    assert (others == 0).all() and np.abs(unrolls["last_reward"][:, [5, 10]]).min() > 0


def test_loss_is_its_definition():
    """Sums over the batch of the losses in the paper, V-trace in float64 as a sum of products."""
    args = impala.Args(**SMALL | {"env_id": "Breakout-v5", "unroll_length": 40}, rho_clip=1.2, vtrace_lambda=0.95)
    agent, _, (unrolls,) = play(args)
    with torch.no_grad():
        agent.actor.bias += torch.tensor([0.5, 0.0, -0.5, 0.3])
    loss, _ = impala.impala_loss(agent, unrolls, args)
    gradient = torch.autograd.grad(loss, agent.actor.weight)[0]
    logits, value, _ = forward(agent, unrolls)
    total = 0
    for n in range(2):
        done, action = unrolls["start"][n, 1:], torch.from_numpy(unrolls["last_action"][n, 1:])
        reward, log_probs = unrolls["last_reward"][n, 1:], logits[:-1, n].log_softmax(-1)
        log_prob, v = log_probs[range(40), action], value[:, n].detach().double().numpy()
        rho = np.exp(log_prob.detach().double().numpy() - unrolls["log_prob"][n])
        following = v[1:] * ~done
        targets = np.zeros(40)
        for s in range(40):
            targets[s] = v[s]
            for t in range(s, 40):
                if done[s:t].any():
                    break
                c = np.prod(0.95 * np.minimum(1, rho[s:t]))
                targets[s] += 0.99 ** (t - s) * c * min(1.2, rho[t]) * (reward[t] + 0.99 * following[t] - v[t])
        target_after = np.where(done, 0, np.append(targets[1:], v[-1]))
        advantage = torch.from_numpy(np.minimum(1, rho) * (reward + 0.99 * target_after - v[:-1]))
        error = 0.5 * (value[:-1, n] - torch.from_numpy(targets)).square()
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        total = total + (-log_prob * advantage + 0.5 * error - 0.01 * entropy).sum()
        assert done.any() and np.abs(np.log(rho)).max() > 0.1
    torch.testing.assert_close(loss.double(), total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, torch.autograd.grad(total, agent.actor.weight)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("flags", [{}, {"lstm": True}, {"shallow": False}], ids=["shallow", "lstm", "deep"])
def test_two_updates_resume_and_play(flags, tmp_path):
    flags = SMALL | flags | {"runs_dir": str(tmp_path)}
    folder = impala.main(impala.Args(**flags))
    checkpoint = load_checkpoint(folder)["modules"]
    group = checkpoint["optimizer"]["param_groups"][0]
    assert group["eps"] == 0.01 and group["lr"] == 3e-4 and "mean_square" in checkpoint["optimizer"]["state"][0]
    impala.main(impala.Args(**flags | {"total_timesteps": 64, "resume": folder}))
    points = learned(folder)
    assert [step for step, _ in points["train/policy_loss"]] == [16, 32, 48, 64]
    assert [lag for _, lag in points["train/policy_lag"]] == [0] * 4


def test_heads_leave_the_trunk_to_both_losses():
    """A policy head of 0.01 had a gradient of a 400th of the value's on the trunk, and a flat policy stayed flat."""
    args = impala.Args(**SMALL | {"num_envs": 8})
    agent, _, (unrolls,) = play(args, sharp=1)
    unrolls["last_reward"][:, 1:] = np.random.default_rng(0).integers(-1, 2, (8, 8))
    norms = []
    for vf_coef in (0.0, 0.5):
        loss, _ = impala.impala_loss(agent, unrolls, dataclasses.replace(args, vf_coef=vf_coef, ent_coef=0.0))
        gradients = torch.autograd.grad(loss, list(agent.network.parameters()))
        norms.append(torch.cat([x.flatten() for x in gradients]))
    policy, value = norms[0].norm(), (norms[1] - norms[0]).norm()
    assert 0.05 < policy / value < 5


def test_greedy_play_equals_the_evaluation_of_the_run(tmp_path):
    """With an LSTM, whose memory, last action and last reward play a part."""
    flags = SMALL | {"env_id": "Breakout-v5", "lstm": True, "eval_episodes": 1, "runs_dir": str(tmp_path)}
    folder = impala.main(impala.Args(**flags))
    metrics = enjoy.main(enjoy.Args(folder, episodes=1, greedy=True, seed=1 + EVAL_SEED))
    of_run = {tag: points[-1][1] for tag, points in learned(folder).items() if tag.startswith("eval/")}
    assert metrics["eval/ep_length"] == of_run["eval/ep_length"] > 0
    assert metrics["eval/ep_reward"] == of_run["eval/ep_reward"]


@pytest.mark.parametrize("game", ["Breakout", "Asterix"])
def test_policies_play_as_actors_do(game):
    """Greedy actions of make_policy are those of the learner's forward pass over the whole sequence."""
    args = impala.Args(**SMALL | {"env_id": f"{game}-v5", "lstm": True})
    agent, _, _ = play(args)
    envs = impala.make_envs(args, 2)
    policy = impala.make_policy(agent)
    obs, info = envs.reset(seed=3)
    done, tape, most = np.ones(2, bool), [], 0
    last = np.zeros(2, np.int64), np.zeros(2, np.float32)
    with torch.no_grad():
        for _ in range(80):
            action = policy(obs, info, done)
            tape.append((obs, done, *last, action))
            obs, reward, termination, truncation, info = envs.step(action)
            done, last, most = termination | truncation, (action, reward), max(most, info["reward"].max())
        *inputs, actions = (torch.from_numpy(np.stack(x)) for x in zip(*tape))
        logits, _, _ = agent(*inputs, torch.zeros(2, 2, 256))
    assert inputs[1].sum() > 2 if game == "Breakout" else most > 1  # lost lives; rewards that are no signs
    assert (logits.argmax(-1) == actions).float().mean() > 0.98  # ties apart


def test_actors_act_with_the_version_they_name_and_runs_repeat(tmp_path):
    args = impala.Args(**SMALL | {"num_actors": 1, "lstm": True})
    torch.manual_seed(0)
    envs = impala.make_envs(args, 1)
    agent = impala.Agent(envs, args)
    published = []
    with Actors(impala.Player, args, agent, impala.unroll_dtype(envs, args), 0) as actors:
        for version in range(10):
            published.append({name: x.clone() for name, x in agent.state_dict().items()})
            slot = actors.take(version)
            twin = impala.Agent(envs, args)
            twin.load_state_dict(published[int(slot["version"])])
            assert abs(impala.impala_loss(twin, slot["unrolls"], args)[1]["approx_kl"]) < 1e-6
            with torch.no_grad():
                agent.actor.bias.copy_(torch.randn(6))
    assert slot["version"] > 3
    for flags in ({}, {"num_actors": 1, "deterministic": True}):
        flags = SMALL | {"runs_dir": str(tmp_path), "total_timesteps": 64} | flags
        one, same = (learned(impala.main(impala.Args(**flags))) for _ in range(2))
        assert one == same


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id Pog-v5", "envpool has no environment 'Pog-v5'; did you mean"),
        ("--env-id CartPole-v1", "needs an Atari game, such as Pong-v5, and CartPole-v1 is none"),
        ("--rho-clip 0.9", "--rho-clip 0.9 must be at least --c-clip 1.0"),
        ("--total-timesteps 639", "--total-timesteps 639 is less than the 640 steps of one batch"),
    ],
)
def test_refused(flags, text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["impala_atari_envpool.py", "--runs-dir", str(tmp_path / "runs"), *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        launch(impala.main, impala.Args)
    out, err = capfd.readouterr()
    assert stopped.value.code == 2 and not out and not list(tmp_path.iterdir())
    assert err.startswith("impala_atari_envpool: ") and err.count("\n") == 1 and text in err


class Sides(gym.vector.VectorEnv):
    """Pictures with a bright side, left or right; the action of that side, 0 or 1 of six, earns 1; 8 steps."""

    single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    single_action_space = gym.spaces.Discrete(6)

    def __init__(self, num_envs):
        self.num_envs = num_envs

    def _look(self):
        self.side = self.rng.integers(2, size=self.num_envs)
        is_bright = np.arange(84) // 42 == self.side[:, None]  # (N, 84)
        return np.tile(200 * is_bright[:, None, None].astype(np.uint8), (1, 4, 84, 1))

    def reset(self, *, seed=None, options=None):
        self.rng, self.clock, self.score = np.random.default_rng(seed), 0, np.zeros(self.num_envs)
        return self._look(), {}

    def step(self, action):
        reward = (action == self.side).astype(np.float32)
        self.clock, self.score, info = self.clock + 1, self.score + reward, {}
        ended = np.full(self.num_envs, self.clock == 8)
        if ended.all():
            info = {"_episode": ended, "episode": {"r": self.score, "l": np.full(self.num_envs, 8)}}
            self.clock, self.score = 0, np.zeros(self.num_envs)
        return self._look(), reward, ended, ~ended & False, info


@pytest.mark.learning
def test_learns_what_a_picture_asks_for_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(impala, "make_envs", lambda args, num_envs, **options: Sides(num_envs))
    flags = {"shallow": True, "num_actors": 0, "num_envs": 16, "unroll_length": 20, "anneal_lr": False}
    folder = impala.main(impala.Args(**flags, total_timesteps=6_400, eval_episodes=0, runs_dir=str(tmp_path)))
    returns = [value for _, value in learned(folder)["rollout/ep_reward"]]
    assert returns[0] < 3 and np.mean(returns[-3:]) > 5  # a random policy has 1.33, the best one 8


@pytest.mark.parametrize("num_actors, num_threads", [(0, 4), (1, 4), (3, 2), (14, 1)])
def test_actors_share_the_cores(num_actors, num_threads, monkeypatch):
    """Threads of envpool: 14 actors with one for each of 16 cores learned less in a second than 8."""
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    player = impala.Player(impala.Args(**SMALL | {"num_actors": num_actors, "num_envs": 4}), 0, 0)
    assert player.envs.pool.config["num_threads"] == num_threads


@pytest.mark.parametrize("num_actors", [1, "ray"])
def test_actors_act_on_the_cpu_whatever_the_learner_has(num_actors):
    """--bf16 auto asks what --device can do; actors are elsewhere, and may be on a machine without one."""
    cpu = impala.Args(**SMALL | {"num_actors": 1})
    gpu = dataclasses.replace(cpu, device="cuda:99", bf16="auto")
    envs = impala.make_envs(cpu, 1)
    agent, dtype = impala.Agent(envs, cpu), impala.unroll_dtype(envs, cpu)
    if num_actors == "ray":
        actor = RayActor((impala.Player, impala.Agent), gpu, 0, 0, slot_dtype(gpu, dtype))
        slot = actor.play((0, [x.detach().numpy() for x in tensors(agent)]))[0]
    else:
        with Actors(impala.Player, gpu, agent, dtype, 0) as actors:
            slot = actors.take(0)
    assert slot["unrolls"]["obs"].any()
