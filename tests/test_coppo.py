"""coppo.py: the objective against the paper's equations, its limits PPO and MAPPO, actors that step in turn."""

import dataclasses
import itertools
import sys

from cleanmarl import coppo, coppo_lstm, coppo_matrix, enjoy, mappo
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import Networks
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from toys import Quiet, double, make_rollout

SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "num_minibatches": 1, "eval_episodes": 0}
INF = float("inf")


def collected(args, scale=100.0):
    """Agent, rollout, what followed it, and batch of one rollout with policies far from uniform."""
    torch.manual_seed(0)
    envs = coppo.make_envs(args, args.num_envs)
    agent = coppo.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
    rollout = make_rollout(coppo, args, envs)
    now = coppo.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, rollout, now, coppo.estimate(agent, rollout, *now, args)


def check_logged(script, agent, batch, args):
    """The variance explained is that of the living; norms are those of each network before they are clipped."""
    batch = batch._replace(value=torch.where(batch.alive > 0, batch.return_, 1e3), advantage=batch.advantage * 10)
    assert not batch.alive.all()
    loss = script.actor_loss(agent, batch, args)[0] + script.critic_loss(agent, batch, args).sum()
    norms = {}
    for name in ("actor", "critic"):
        gradients = torch.autograd.grad(loss, list(getattr(agent, name).parameters()), retain_graph=True)
        norms[name] = torch.cat([g.flatten() for g in gradients]).norm()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.0)
    metrics = script.update(agent, Networks(agent.actor, 1), optimizer, batch, args)
    assert metrics["train/explained_variance"] == pytest.approx(1)
    for name, norm in norms.items():
        torch.testing.assert_close(metrics[f"train/{name}_gradients"], norm)
    assert abs(norms["actor"] / norms["critic"] - 1) > 0.1


def test_what_is_logged_of_values_and_gradients_is_what_it_says(team):
    sizes = SMALL | {"update_epochs": 1, "num_minibatches": 1}
    args = coppo.Args(env_id=team, **sizes, ent_coef=0.0)
    agent, _, _, batch = collected(args)
    check_logged(coppo, agent, batch, args)


def moved(agent, batch, seed=0, spread=0.15, advantage_scale=3.0):
    """The batch as if the policies had moved by random ratios, with advantages of both signs; the ratios (R, A)."""
    rng = np.random.default_rng(seed)
    log_probs = agent.logits(batch.obs, batch.action_mask).log_softmax(-1).detach()
    log_prob = log_probs.gather(-1, batch.action[..., None]).squeeze(-1)
    log_ratio = torch.from_numpy(rng.normal(0, spread, log_prob.shape))
    advantage = torch.from_numpy(rng.normal(0, advantage_scale, log_prob.shape))
    return batch._replace(log_prob=log_prob - log_ratio, advantage=advantage), log_ratio.exp().numpy()


def clip(x, eps):
    return min(max(x, 1 - eps), 1 + eps)


def equations(ratio, advantage, alive, eps1, eps2, separately=False, authors=False):
    """Each agent's objective in each row (R, A), and its derivatives by the log-ratios (R, A, A), number by number.

    Equation 10; with eps2 = inf it is equation 8, of which equation 7 is the case of a common advantage. `authors`:
    min(product of all A, clip(g r) A), differentiated by all ratios.
    """
    value, slope = np.zeros(ratio.shape), np.zeros((*ratio.shape, ratio.shape[1]))
    for row, i in np.argwhere(alive):
        A, r = advantage[row, i], ratio[row]
        others = [j for j in range(len(r)) if j != i and alive[row, j]]
        product = g = 1.0
        for j in others:
            product *= r[j]
            g *= clip(r[j], eps2)
        inside = {j: separately and clip(r[j], eps2) == r[j] for j in others}
        if not separately:
            g = clip(product, eps2)
            inside = dict.fromkeys(others, g == product)
        inner = g * r[i]
        outer = clip(inner, eps1)
        first = product * r[i] if authors else inner
        value[row, i] = min(first * A, outer * A)
        if first * A < outer * A or (not authors and inner == outer):
            slope[row, i, i] = first * A
            for j in others:
                slope[row, i, j] = first * A if authors else 0
        elif inner == outer:
            slope[row, i, i] = inner * A
            for j in others:
                slope[row, i, j] = inner * A * inside[j]
    return value, slope


def check_against_equations(agent, args, batch, ratio):
    """Loss and gradient of the script against those of `equations`, all in float64."""
    alive = batch.alive.bool().numpy()
    value, slope = equations(
        ratio,
        batch.advantage.numpy(),
        alive,
        args.clip_coef,
        args.inner_clip_coef,
        args.clip_separately,
        args.objective == "authors",
    )
    samples = np.array([[alive.sum()]]) if args.share_parameters else alive.sum(0, keepdims=True)
    loss, _ = coppo.actor_loss(agent, batch, args)
    assert loss.item() == pytest.approx(-(value / samples).sum(), rel=1e-9)
    ours = torch.autograd.grad(loss, list(agent.actor.parameters()))
    weight = torch.from_numpy(-(slope / samples[..., None]).sum(1))  # of each agent's log-probability
    log_probs = agent.logits(batch.obs, batch.action_mask).log_softmax(-1)
    log_prob = log_probs.gather(-1, batch.action[..., None]).squeeze(-1)
    theirs = torch.autograd.grad((weight * log_prob).sum(), list(agent.actor.parameters()))
    for mine, expected in zip(ours, theirs):
        torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-10)
    return value


# proves coppo-1, coppo-2
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("inner_clip_coef", [0.0, 0.1, INF])
@pytest.mark.parametrize("num_agents", range(1, 7))
def test_loss_and_gradient_are_equations_8_and_10(num_agents, inner_clip_coef, shared):
    args = coppo.Args(
        env_id=f"mpe/simple_spread_v3?N={num_agents}",
        num_envs=4,
        num_steps=25,
        share_parameters=shared,
        inner_clip_coef=inner_clip_coef,
        ent_coef=0.0,
    )
    agent, _, _, batch = collected(args)
    agent, batch = agent.double(), double(batch)
    batch, ratio = moved(agent, batch, seed=num_agents)
    value = check_against_equations(agent, args, batch, ratio)
    clipped = np.clip(ratio, 0.8, 1.2) * batch.advantage.numpy()
    ppo = np.minimum(ratio * batch.advantage.numpy(), clipped)
    if num_agents == 1 or inner_clip_coef == 0:
        np.testing.assert_allclose(value, ppo, rtol=1e-12)  # PPO for one agent, MAPPO for g = 1
    else:
        assert np.abs(value - ppo).max() > 0.01


# proves coppo-4, ippo-4
@pytest.mark.parametrize("separately", [True, False])
@pytest.mark.parametrize("objective", ["equation", "authors"])
@pytest.mark.parametrize("shared", [True, False])
def test_both_objectives_with_dead_agents(shared, objective, separately, team):
    args = coppo.Args(
        env_id=team, **SMALL, share_parameters=shared, objective=objective, clip_separately=separately, ent_coef=0.0
    )
    agent, _, _, batch = collected(args)
    agent, batch = agent.double(), double(batch)
    batch, ratio = moved(agent, batch)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200
    check_against_equations(agent, args, batch, ratio)
    # the ratio of a dead agent is none of the others' business
    loss, stats = coppo.actor_loss(agent, batch, args)
    loud = batch._replace(log_prob=batch.log_prob - (1 - batch.alive) * 1e3)
    loss2, stats2 = coppo.actor_loss(agent, loud, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)


@pytest.mark.parametrize("shared", [True, False])
def test_agents_whose_peers_stand_still_learn_by_mappo(shared):
    """All r_j = 1 for j != i: the gradient of agent i's samples is that of mappo.py, whatever the inner clip."""
    args = coppo.Args(**SMALL, share_parameters=shared)
    agent, _, _, batch = collected(args)
    still, _ = moved(agent, batch, spread=0.0)
    for i in range(3):
        log_prob = still.log_prob.clone()
        log_prob[:, i] -= 0.3 * torch.randn(len(log_prob))
        advantage = torch.zeros_like(still.advantage)
        advantage[:, i] = still.advantage[:, i]  # the others learn nothing
        ours = still._replace(log_prob=log_prob.float(), advantage=advantage.float())
        theirs = mappo.Batch(*(getattr(ours, name) for name in mappo.Batch._fields))
        loss, _ = coppo.actor_loss(agent, ours, args)
        mappo_args = mappo.Args(**SMALL, share_parameters=shared)
        of_mappo = mappo.Agent(mappo.make_envs(mappo_args, 1), mappo_args)
        of_mappo.load_state_dict(agent.state_dict())
        reference, stats = mappo.mappo_loss(of_mappo, theirs, mappo_args)
        value_loss = coppo.critic_loss(agent, ours, args)
        torch.testing.assert_close(value_loss.mean(), stats["value_loss"])
        torch.testing.assert_close(loss + value_loss.sum(), reference)
        gradients = torch.autograd.grad(reference, list(of_mappo.actor.parameters()))
        for a, b in zip(torch.autograd.grad(loss, list(agent.actor.parameters())), gradients):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_without_inner_clip_range_a_run_is_a_run_of_mappo(shared, tmp_path):
    settings = SMALL | {"share_parameters": shared, "num_minibatches": 2, "runs_dir": str(tmp_path)}
    ours = load_checkpoint(coppo.main(coppo.Args(**settings, inner_clip_coef=0.0)))["modules"]["agent"]
    theirs = load_checkpoint(mappo.main(mappo.Args(**settings)))["modules"]["agent"]
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=1e-4)
    other = load_checkpoint(coppo.main(coppo.Args(**settings)))["modules"]["agent"]
    assert any((other[key] - value).abs().max() > 1e-4 for key, value in theirs.items())


def actors_and_optimizer(agent, lr):
    actors = Networks(agent.actor, len(agent.actor[-1].weight))
    groups = [{"params": list(itertools.chain(*actors))}, {"params": list(agent.critic.parameters())}]
    return actors, torch.optim.SGD(groups, lr=lr)


# proves coppo-3
def test_independent_agents_step_in_turn_with_the_newest_ratios():
    """Algorithm 1: within an epoch, agent i's step sees the ratios of agents before it after their steps."""
    args = coppo.Args(env_id="matrix/penalty", num_envs=64, num_steps=1, num_minibatches=1, update_epochs=2)
    args = dataclasses.replace(args, share_parameters=False)
    agent, _, _, batch = collected(args)
    twin, rate = coppo.Agent(coppo.make_envs(args, 1), args), 3.0
    twin.load_state_dict(agent.state_dict())
    coppo.update(agent, *actors_and_optimizer(agent, rate), batch, args)

    def learn(in_turn):
        parameters = list(twin.actor.parameters())
        for _ in range(args.update_epochs):
            gradients = [torch.autograd.grad(coppo.actor_loss(twin, batch, args)[0], parameters)] * 4
            for i in range(4):
                if in_turn:
                    gradients[i] = torch.autograd.grad(coppo.actor_loss(twin, batch, args)[0], parameters)
                for p, g in zip(parameters, gradients[i]):
                    p.data[i] -= rate * g[i]
        return [p.detach().clone() for p in parameters]

    start = {key: value.clone() for key, value in twin.state_dict().items()}
    in_turn = learn(True)
    for mine, theirs in zip(agent.actor.parameters(), in_turn):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    twin.load_state_dict(start)
    assert max((a - b).abs().max() for a, b in zip(learn(False), in_turn)) > 1e-3


def test_critics_step_once_for_all_turns_of_the_actors():
    """And so does what is neither: in the first turn, not in each."""
    args = coppo.Args(**SMALL, share_parameters=False, update_epochs=2)
    agent, _, _, batch = collected(args)
    agent.more = torch.nn.Parameter(torch.zeros(()))
    loss, steps = coppo.actor_loss, []

    def with_more(*rest):
        total, stats = loss(*rest)
        return total + agent.more, stats

    actors = Networks(agent.actor, 3)
    groups = [{"params": list(itertools.chain(*actors))}, {"params": [*agent.critic.parameters(), agent.more]}]
    optimizer = torch.optim.Adam(groups, lr=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coppo, "actor_loss", with_more)
        metrics = coppo.update(agent, actors, optimizer, batch, args)
    steps = [{optimizer.state[p]["step"].item() for p in group["params"]} for group in optimizer.param_groups]
    assert steps == [{2}, {2}] and agent.more.item() == pytest.approx(-2e-3, rel=1e-3)
    assert metrics["train/critic_gradients"] > 0 and metrics["train/actor_gradients"] > 0


@pytest.mark.parametrize("separately", [False, True])
def test_diagnostics_of_the_clips(separately):
    args = coppo.Args(**SMALL, clip_separately=separately)
    agent, _, _, batch = collected(args)
    batch, ratio = moved(agent, batch)
    _, stats = coppo.actor_loss(agent, batch, args)
    outer_clipfrac, inner_clipfrac = stats["outer_clipfrac"], stats["inner_clipfrac"]
    others = np.stack([np.delete(ratio, i, axis=1) for i in range(3)], axis=1)  # (R, A, A - 1)
    product = others.prod(2)
    assert stats["ratio_product_var"].item() == pytest.approx(product.var(), rel=1e-4)
    is_clipped = (np.abs(others - 1) > 0.1).any(2) if separately else np.abs(product - 1) > 0.1
    assert inner_clipfrac.item() == pytest.approx(is_clipped.mean(), abs=1e-6)
    inner = (others.clip(0.9, 1.1).prod(2) if separately else product.clip(0.9, 1.1)) * ratio
    assert outer_clipfrac.item() == pytest.approx((np.abs(inner - 1) > 0.2).mean(), abs=2e-3)
    assert 0 < inner_clipfrac < 1 and 0 < outer_clipfrac < 1


@pytest.mark.parametrize("script", [coppo, coppo_lstm, coppo_matrix])
def test_rounding_is_no_clip(script):
    """Where an agent's own ratio alone is clipped, g is the product, to the last digit."""
    log_ratio = 0.1 * torch.randn(20_000, 3, generator=torch.Generator().manual_seed(1))
    product, g = script.ratio_of_others(log_ratio, script.Args(clip_separately=True, inner_clip_coef=0.1))
    is_clipped = ((log_ratio.exp() - 1).abs() > 0.1).int()
    others = is_clipped.sum(1, keepdim=True) - is_clipped
    alone = (others == 0) & (is_clipped == 1)
    assert alone.sum() > 1000 and (product == g)[others == 0].all()
    assert (product != g)[others > 0].float().mean() > 0.999


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy/team"])
def test_first_ratio_is_one(env_id, shared, team):
    args = coppo.Args(env_id=env_id, **SMALL, share_parameters=shared)
    agent, _, _, batch = collected(args)
    _, stats = coppo.actor_loss(agent, batch, args)
    assert stats["approx_kl"].abs() < 1e-6 and stats["outer_clipfrac"] == stats["inner_clipfrac"] == 0
    assert stats["ratio_product_var"] < 1e-8 and stats["entropy"] > 0


def test_a_dead_agent_earns_what_the_living_do(team):
    args = coppo.Args(env_id=team, **SMALL, time_limit_bootstrap=False)
    _, rollout, _, _ = collected(args)
    assert not rollout.agent_mask[..., 1].all() and (rollout.reward[..., 1] > 0).all()
    assert (rollout.reward[..., 1] == rollout.reward[..., 0]).all()


VARIANTS = {
    "defaults": {},
    "independent": {"share_parameters": False},
    "authors": {"objective": "authors"},
    "no double clipping": {"inner_clip_coef": INF, "clip_separately": True, "share_parameters": False},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4", "matrix/penalty", "toy/team"])
def test_two_updates_that_two_runs_repeat(env_id, name, team, tmp_path):
    args = coppo.Args(env_id=env_id, **SMALL, **VARIANTS[name], runs_dir=str(tmp_path), update_epochs=3)
    one, same = (load_checkpoint(coppo.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    settings = {"share_parameters": False, "runs_dir": str(tmp_path)}
    folder = coppo.main(coppo.Args(**SMALL, **settings))
    coppo.main(coppo.Args(**SMALL | {"total_timesteps": 600}, **settings, resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and (after["modules"]["agent"]["value_stats.count"] == 600).all()
    assert after["modules"]["optimizer"]["state"][0]["step"] == 30  # ten epochs of three updates, once per epoch
    assert {"args.json", "checkpoint.pt", "done.json"} <= {path.name for path in folder.iterdir()}
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "coppo at step 600, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "this script needs discrete ones"),
        ("--inner-clip-coef -0.1", "--inner-clip-coef must be"),
        ("--num-envs 3 --num-steps 5 --num-minibatches 2", "15 steps of a rollout are not divisible by"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coppo.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(coppo.main, coppo.Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flags", ["--share-parameters", "--no-share-parameters"])
@pytest.mark.parametrize("script", [coppo, coppo_lstm, coppo_matrix])
def test_an_actor_and_a_critic_with_a_common_layer_are_refused(script, flags, tmp_path, monkeypatch, capsys):
    class Agent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            self.critic[3] = self.actor[3]

    monkeypatch.setattr(script, "Agent", Agent)
    monkeypatch.setattr(sys, "argv", ["my_coppo.py", flags, "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(script.main, script.Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and "have a parameter in common" in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.learning
def test_learns_simple_spread_in_seconds(tmp_path):
    args = coppo.Args(total_timesteps=64_000, runs_dir=str(tmp_path), eval_episodes=0)
    folder = coppo.main(args)
    envs = coppo.make_envs(args, 32)
    agent = coppo.Agent(envs, args)
    untrained = evaluate(envs, coppo.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, coppo.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
