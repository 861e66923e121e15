"""vdn.py: sums of values, exploration, targets against their definition, the replay buffer, masks, deaths, resume."""

import copy
import itertools
import sys

from cleanmarl import enjoy, vdn
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import as_numpy
from cleanmarl.run import Run, load_checkpoint

import numpy as np
import optional
import pytest
import torch
from toys import Quiet, Toy, double, scalars

SMALL = {"total_timesteps": 400, "num_envs": 4, "batch_size": 4, "eval_episodes": 0, "num_eval_ep": 2, "log_every": 2}
CPU = torch.device("cpu")


def world(num_envs: int, **options) -> Toy:
    """Toy environments whose episodes have 5, 6 and 7 steps, in which what agents see depends on what they did."""
    return Toy(num_envs, see="past", varied=True, **options)


def played(script, envs, args, num_episodes=12, epsilon=0.5):
    """An agent, its target of other weights, and a buffer with episodes; in float64 but the buffer."""
    torch.manual_seed(0)
    agent, target = script.Agent(envs, args), script.Agent(envs, args)
    buffer, run = script.Buffer(envs, args), Quiet()
    now = envs.reset(seed=1)
    if hasattr(script, "first_memory"):
        now = (*now, script.first_memory(agent, *now[0].shape[:2]))
    while run.num_episodes < num_episodes:
        now = script.collect(agent, envs, now, buffer, run, epsilon)
    return agent.double(), target.double(), buffer


def values(agent, batch):
    """Values (B, T + 1, A, K), of a recurrent agent too."""
    return agent.values(batch if hasattr(agent.q_network, "memory_size") else batch.obs)


def case(script=vdn, env=None, num_episodes=12, **changes):
    args = script.Args(**changes)
    agent, target, buffer = played(script, env or world(3), args, num_episodes)
    return args, agent, target, double(buffer.sample(8, CPU))


def value_of(agent, q, batch, b, t):
    """The team's value of one joint action, of whose parts q (A,) are the values, in row t of episode b."""
    args = [q[None, None], batch.alive[b, t][None, None]]
    if hasattr(agent, "mixer"):
        args.append(batch.state[b, t][None, None])
    return agent.mix(*args)[0, 0, 0]


# ------------------------------------------------------------------------------------------------------------ networks


# proves vdn-1
def test_a_joint_action_is_worth_the_sum_of_what_the_living_do():
    _, agent, _, batch = case()
    q = torch.randn(*batch.alive.shape).double()
    assert (~batch.alive).any() and batch.alive.any()
    for b, t in np.ndindex(q.shape[:2]):
        expected = sum(q[b, t, a] for a in range(3) if batch.alive[b, t, a])
        torch.testing.assert_close(agent.mix(q, batch.alive)[b, t, 0], torch.as_tensor(expected, dtype=q.dtype))


def assert_agents_find_the_best_joint_action(script):
    """Each agent's own best legal action, against all joint actions."""
    _, agent, _, batch = case(script)
    q, found = values(agent, batch), 0
    own = q.masked_fill(~batch.action_mask, -torch.inf).argmax(-1)
    for b, t in itertools.product(range(4), range(5)):
        legal = [[k for k in range(4) if batch.action_mask[b, t, a, k]] for a in range(3)]
        joint = list(itertools.product(*legal))
        worth = [value_of(agent, q[b, t].gather(-1, torch.tensor(u)[:, None])[:, 0], batch, b, t) for u in joint]
        best, ours = max(worth), worth[joint.index(tuple(own[b, t].tolist()))]
        torch.testing.assert_close(ours, best)
        found += len(joint) > 2
    assert found > 10


def test_agents_find_the_best_joint_action():
    assert_agents_find_the_best_joint_action(vdn)


@optional.needs("torchrl")
def test_the_sum_is_that_of_torchrl():
    from torchrl.modules.models.multiagent import VDNMixer

    _, agent, _, batch = case()
    q = torch.randn(*batch.alive.shape).double()
    theirs = VDNMixer(n_agents=3, device="cpu")((q * batch.alive)[..., None])
    torch.testing.assert_close(agent.mix(q, batch.alive), theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("agent_ids", [True, False])
@pytest.mark.parametrize("num_layers", [0, 2])
def test_the_network_that_acts_is_the_network_that_learns(agent_ids, num_layers):
    envs = world(4)
    agent = vdn.Agent(envs, vdn.Args(agent_ids=agent_ids, num_layers=num_layers))
    obs, _ = envs.reset()
    theirs = agent.values(torch.from_numpy(obs)[None])[0].detach()
    np.testing.assert_allclose(as_numpy(agent.q_network)(obs), theirs, rtol=1e-5, atol=1e-6)
    q = agent.q_network(torch.from_numpy(obs)[:, :1].expand(-1, 3, -1))  # the same observation for all agents
    assert torch.equal(q[:, 0], q[:, 1]) == (not agent_ids)


# proves vdn-2
def test_epsilon_is_the_share_of_random_legal_actions():
    torch.manual_seed(0)
    q, mask = np.tile(np.float32([3, 1, 2, 4]), (20_000, 2, 1)), np.ones((20_000, 2, 4), bool)
    mask[:, 0, 3] = mask[:, 1, 0] = False
    for epsilon in (0.0, 0.3, 1.0):
        action = vdn.act(q, mask, epsilon)
        for agent, greedy, legal in ((0, 0, [0, 1, 2]), (1, 3, [1, 2, 3])):
            share = np.bincount(action[:, agent], minlength=4) / len(action)
            expected = np.array([epsilon / 3 if k in legal else 0 for k in range(4)])
            expected[greedy] += 1 - epsilon
            np.testing.assert_allclose(share, expected, atol=0.012)
    alike = (vdn.act(q, mask, 0.5) == [0, 3]).mean(0).prod() - (vdn.act(q, mask, 0.5) == [0, 3]).all(1).mean()
    assert abs(alike) < 0.02  # agents explore one without the other


# ------------------------------------------------------------------------------------------------------------- targets


def expected_targets(agent, target_agent, batch, args):
    """The targets of single episodes from their last step to their first, by the definition, in loops."""
    q, target_q = values(agent, batch), values(target_agent, batch)
    chooser = q if args.double_q else target_q
    targets = torch.zeros(batch.reward.shape, dtype=torch.float64)
    for b in range(len(targets)):
        length = int(batch.weight[b].sum())
        for t in reversed(range(length)):
            best = [max(range(4), key=lambda k: (batch.action_mask[b, t + 1, a, k], chooser[b, t + 1, a, k].item()))
                    for a in range(3)]  # fmt: skip
            following = value_of(target_agent, target_q[b, t + 1, range(3), best], batch, b, t + 1)
            if t + 1 < length:
                following = (1 - args.td_lambda) * following + args.td_lambda * targets[b, t + 1, 0]
            ends = not batch.alive[b, t + 1].any()
            targets[b, t] = batch.reward[b, t] + (0 if ends else args.gamma * following)
    return targets


def assert_targets_are_their_definition(script, **changes):
    args, agent, target_agent, batch = case(script, **changes)
    ours = script.td_targets(values(agent, batch).detach(), target_agent, batch, args)
    assert not ours.requires_grad and set(batch.goes_on[batch.weight > 0].tolist()) == {0, 1}
    expected = expected_targets(agent, target_agent, batch, args).detach()
    torch.testing.assert_close(ours * batch.weight, expected)
    return ours


# proves vdn-3, vdn-4
@pytest.mark.parametrize("td_lambda", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("double_q", [True, False])
def test_targets_are_their_definition(td_lambda, double_q):
    ours = assert_targets_are_their_definition(vdn, td_lambda=td_lambda, double_q=double_q, gamma=0.9)
    other = assert_targets_are_their_definition(vdn, td_lambda=td_lambda, double_q=not double_q, gamma=0.9)
    assert (ours != other).any()  # the two networks choose differently


def test_targets_by_hand():
    """One agent that lives for two steps; gamma 0.5; the target network says 10 and 20 of what the other chooses."""

    class Fixed(torch.nn.Module):
        def values(self, obs):
            return torch.tensor([[[[0.0, 0.0]], [[10.0, 50.0]], [[20.0, 90.0]]]])

        def mix(self, q, alive):
            return (q * alive).sum(-1, keepdim=True)

    one = torch.ones(1, 2, 1)
    batch = vdn.Batch(
        torch.zeros(1, 3, 1, 1), None, torch.ones(1, 3, 1, 2, dtype=torch.bool), torch.ones(1, 3, 1, dtype=torch.bool),
        torch.zeros(1, 2, 1, dtype=torch.int64), torch.tensor([[[1.0], [2.0]]]), one, one,
    )  # fmt: skip
    online = torch.tensor([[[[0.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]]])  # prefers action 0, the target network action 1
    hand = {
        (True, 0.0): [1 + 5, 2 + 10],
        (False, 0.0): [1 + 25, 2 + 45],
        (True, 0.5): [1 + 0.5 * (5 + 6), 12],  # half of 10, and half of the target 12 of the next step
        (True, 1.0): [1 + 6, 12],
    }
    for (double_q, td_lambda), expected in hand.items():
        args = vdn.Args(gamma=0.5, td_lambda=td_lambda, double_q=double_q)
        assert vdn.td_targets(online, Fixed(), batch, args)[0, :, 0].tolist() == expected


# proves vdn-6
def test_loss_is_the_mean_squared_error_of_the_joint_actions_taken():
    args, agent, target_agent, batch = case()
    q = values(agent, batch)
    target = vdn.td_targets(q.detach(), target_agent, batch, args)
    errors = []
    for b, t in np.ndindex(batch.reward.shape[:2]):
        if batch.weight[b, t]:
            taken = q[b, t].gather(-1, batch.action[b, t][:, None])[:, 0]
            errors.append((value_of(agent, taken, batch, b, t) - target[b, t, 0]) ** 2)
    assert len(errors) < batch.weight.numel()
    torch.testing.assert_close(vdn.value_loss(agent, q, batch, target), torch.stack(errors).mean())


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop"])
@pytest.mark.parametrize("max_norm", [-1.0, 0.1])
def test_update_is_one_step_down_the_clipped_gradient(optimizer, max_norm):
    args, agent, target_agent, batch = case(optimizer=optimizer, clip_gradients=max_norm)
    other = copy.deepcopy(agent)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (agent, other)]
    metrics = vdn.update(agent, target_agent, optimizers[0], batch, args)
    q = values(other, batch)
    loss = vdn.value_loss(other, q, batch, vdn.td_targets(q.detach(), target_agent, batch, args))
    gradients = torch.autograd.grad(loss, list(other.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    scale = 1 if max_norm < 0 else max_norm / norm
    for p, old, gradient in zip(agent.parameters(), other.parameters(), gradients):
        torch.testing.assert_close(p, old - 0.1 * scale * gradient, rtol=1e-5, atol=1e-8)
    assert metrics["train/value_loss"] == pytest.approx(loss.item()) and agent.num_updates == 1
    assert metrics["train/gradients"] == pytest.approx(norm.item())


# proves vdn-5
def test_soft_update_moves_the_share_polyak_of_the_way():
    _, agent, target, _ = case()
    before = copy.deepcopy(target)
    vdn.soft_update(target, agent, 0.25)
    for ours, old, theirs in zip(target.parameters(), before.parameters(), agent.parameters()):
        torch.testing.assert_close(ours, 0.75 * old + 0.25 * theirs)
    vdn.soft_update(target, agent, 1.0)
    assert all(torch.equal(t, p) for t, p in zip(target.parameters(), agent.parameters()))


# -------------------------------------------------------------------------------------------------------------- buffer


def recorded(script, envs, args, num_steps, seed=0):
    """A buffer fed with random legal steps, and lists of what every finished episode was, row by row."""
    rng, buffer = np.random.default_rng(seed), script.Buffer(envs, args)
    obs, info = envs.reset()
    open_, finished = [[] for _ in range(envs.num_envs)], []
    for _ in range(num_steps):
        action = np.where(info["action_mask"], rng.random(info["action_mask"].shape), -1).argmax(-1)
        next_obs, reward, termination, truncation, next_info = envs.step(action)
        buffer.add(obs, info, action, reward, termination, truncation, next_info)
        for i in range(envs.num_envs):
            row = {key: info[key][i].copy() for key in ("state", "action_mask", "agent_mask")}
            open_[i].append({"obs": obs[i].copy(), "action": action[i], "reward": reward[i].copy(), **row})
            if termination[i] or truncation[i]:
                final = {key: next_info[f"final_{key}"][i].copy() for key in ("obs", "state", "action_mask")}
                final["agent_mask"] = next_info["final_agent_mask"][i] & ~termination[i]
                finished.append((open_[i], final))
                open_[i] = []
        obs, info = next_obs, next_info
    return buffer, finished


# proves vdn-6, vdn-7
@pytest.mark.parametrize("capacity, team_reward", [(100, False), (5, True)])
def test_the_buffer_keeps_whole_episodes_and_how_they_ended(capacity, team_reward):
    """The last row is what came after the last step; nobody is alive in it after a termination."""
    args = vdn.Args(buffer_size=capacity, batch_size=5)
    buffer, finished = recorded(vdn, world(3, team_reward=team_reward), args, 50)
    assert len(buffer.episodes) == min(capacity, len(finished)) and len(finished) > 20
    ends = set()
    for episode, (steps, final) in zip(buffer.episodes, finished[-capacity:], strict=True):
        for name, key in (("obs",) * 2, ("state",) * 2, ("action_mask",) * 2, ("alive", "agent_mask")):
            np.testing.assert_array_equal(getattr(episode, name), np.stack([*(s[key] for s in steps), final[key]]))
        np.testing.assert_array_equal(episode.action, np.stack([step["action"] for step in steps]))
        if team_reward:  # what agent 0 earns, who never dies
            expected = [step["reward"][0] for step in steps]
        else:  # those of all three, so that no death raises the mean
            expected = [sum(step["reward"] * step["agent_mask"]) / 3 for step in steps]
        np.testing.assert_allclose(episode.reward[:, 0], expected, rtol=1e-6)
        assert episode.weight.all() and episode.goes_on[:-1].all()
        assert episode.goes_on[-1] == final["agent_mask"].any()
        ends.add(bool(episode.goes_on[-1]))
    assert ends == {True, False}


# ---------------------------------------------------------------------------------------------------------------- runs


def test_exploration_falls_linearly_and_a_run_is_what_it_says(tmp_path):
    args = vdn.Args(**SMALL, epsilon_end=0.2, epsilon_timesteps=200, runs_dir=str(tmp_path))
    folder = vdn.main(args)
    saved, points = load_checkpoint(folder), scalars(folder)
    assert saved["step"] == 400 and saved["num_episodes"] == 16
    assert saved["modules"]["agent"]["num_updates"] == points["train/num_updates"][-1][1] == 16
    for step, epsilon in points["train/epsilon"]:  # that of the round which ended there
        assert epsilon == pytest.approx(max(1 - 0.8 * (step - 100) / 200, 0.2), abs=1e-6)
    names = ["rollout/ep_reward", "rollout/ep_length", "rollout/num_episodes", "train/value_loss", "train/gradients"]
    assert {*names, "time/SPS"} <= points.keys()


def test_a_round_ends_at_the_next_multiple_of_its_environments(tmp_path):
    envs, args = world(3), vdn.Args(**SMALL, runs_dir=str(tmp_path))
    agent, buffer = vdn.Agent(envs, args), vdn.Buffer(envs, args)
    now = envs.reset(seed=1)
    with Run(args, vdn.__file__) as run:
        run.num_episodes = 3 * 4 - 1  # as if one had ended later than the others
        vdn.collect(agent, envs, now, buffer, run, 1.0)
        assert 12 <= run.num_episodes < 14


def test_the_last_point_of_a_curve_is_that_of_the_end(tmp_path):
    folder = vdn.main(vdn.Args(**SMALL | {"log_every": 1000}, runs_dir=str(tmp_path)))
    assert [step for step, _ in scalars(folder)["rollout/num_episodes"]] == [400]


def test_enjoy_plays_the_run(tmp_path, capsys):
    folder = vdn.main(vdn.Args(**SMALL, runs_dir=str(tmp_path)))
    greedy, samples = (enjoy.main(enjoy.Args(folder, episodes=3, greedy=greedy)) for greedy in (True, False))
    assert greedy == samples and np.isfinite(greedy["eval/ep_reward"])
    assert "--greedy plays" not in capsys.readouterr().out  # it would be the same


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "try a ..._continuous_action.py"),
        ("--batch-size 20 --buffer-size 10", "--batch-size 20 episodes do not fit into --buffer-size 10"),
        ("--polyak 0", "--polyak must be in (0, 1], not 0.0"),
        ("--epsilon-start 1.1", "--epsilon-start must be in [0, 1], not 1.1"),
        ("--td-lambda -1", "--td-lambda must be in [0, 1], not -1.0"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vdn.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(vdn.main, vdn.Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and line.startswith("vdn: ") and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.learning
def test_is_better_than_random_play_in_seconds(tmp_path):
    flags = {"env_id": "mpe/simple_speaker_listener_v4", "total_timesteps": 10_000, "epsilon_timesteps": 5000}
    args = vdn.Args(**flags, num_envs=4, learning_rate=2e-3, batch_size=8, eval_episodes=0, runs_dir=str(tmp_path))
    folder = vdn.main(args)
    envs = vdn.make_envs(args, 32)
    agent = vdn.Agent(envs, args)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, vdn.make_policy(agent), 320, seed=7)
    assert trained["eval/ep_reward"] > -79.5 + 5 * trained["eval/std_ep_reward"] / np.sqrt(320)
