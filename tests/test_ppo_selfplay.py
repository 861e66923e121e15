"""ppo_selfplay.py: rules and turns of the games, advantages against negamax, what a past self adds, Elo, the whole."""

import copy
import subprocess
import sys
from pathlib import Path

from cleanmarl import enjoy, ppo_selfplay
from cleanmarl.cli import UsageError, set_up
from cleanmarl.envs import EnvError
from cleanmarl.envs.pool import Against, Games
from cleanmarl.evaluate import evaluate
from cleanmarl.ppo_selfplay import (
    Agent,
    Args,
    PastSelves,
    collect,
    elo_of,
    estimate,
    main,
    make_envs,
    make_policy,
    match,
    ppo_loss,
    random_policy,
    update,
)
from cleanmarl.run import Run, load_checkpoint

import numpy as np
import pytest
import torch
from toys import curves, make_rollout, scalars

pytest.importorskip("envpool")
ROOT = Path(__file__).parents[1]


def small(tmp_path, **changes) -> Args:
    """Arguments of a run of two updates."""
    settings = {"num_envs": 8, "num_steps": 32, "total_timesteps": 512, "eval_episodes": 2, "runs_dir": str(tmp_path)}
    settings |= {"past_share": 0.5, "pool_interval": 1, "match_games": 2}
    return Args(**settings | changes)


def test_a_reset_begins_a_game_everywhere_also_right_after_an_end():
    envs, rng = Games("TicTacToe-v1", 6), np.random.default_rng(0)
    assert envs.reset(seed=3)[1]["player"].min() >= 0
    assert envs.pool.config["num_threads"] == 1  # envpool 1.2.5 mixes up the order of such games with more
    for _ in range(9):  # an illegal move ends a game, too
        envs.step(rng.integers(9, size=6))
        if envs.done.any():
            break
    assert envs.done.any()
    assert envs.reset(seed=4)[1]["player"].min() >= 0
    envs.close()


def first_rollout(args: Args, past=None):
    """A fresh agent, its first rollout, the (obs, info) after it, and the run. `past` is the frozen opponent."""
    set_up(args)
    envs = make_envs(args, args.num_envs).env
    agent = Agent(envs, args)
    seen = envs.reset(seed=args.seed)
    rollout = make_rollout(ppo_selfplay, args, envs)
    with Run(args, ppo_selfplay.__file__, agent=agent) as run:
        seen = collect(agent, past or Agent(envs, args), envs, seen, rollout, args, run)
    envs.close()
    return agent, rollout, seen, run


@pytest.mark.parametrize("share, num_envs, num_past", [(0.0, 2, 0), (0.2, 2, 1), (1.0, 2, 2), (0.28, 25, 7)])
def test_any_share_is_one_past_self_at_least(tmp_path, share, num_envs, num_past):
    """In two environments, of which a fifth would be none; 0.28 * 25 is a little more than 7."""
    _, rollout, *_ = first_rollout(small(tmp_path, num_envs=num_envs, env_id="TicTacToe-v1", past_share=share))
    of_others = (rollout.player == 1) & ~rollout.learns  # (T, N) moves that are not the agent's
    assert of_others.any(0).sum() == num_past


def wins(board: np.ndarray) -> bool:
    """Whether four stones of a board (6, 7) bool stand in a line."""
    lines = [(0, 1), (1, 0), (1, 1), (1, -1)]
    cells = {tuple(cell) for cell in np.argwhere(board)}
    return any(all((r + k * a, c + k * b) in cells for k in range(4)) for r, c in cells for a, b in lines)


def test_games_are_connect_four_and_say_who_moves():
    """Against the rules written out again: boards, masks, results, turns, ends, and the step that begins a game."""
    N, rng = 6, np.random.default_rng(0)
    envs = Games("ConnectFour-v1", N)
    obs, info = envs.reset(seed=1)
    boards, lengths = np.full((N, 6, 7), -1), np.zeros(N, int)
    player, begins = info["player"], np.zeros(N, bool)
    starters, results = [*player], []
    for _ in range(260):
        for n in range(N):
            assert info["player"][n] == (-1 if begins[n] else player[n])
            if begins[n]:
                continue
            planes = obs[n, :-7].reshape(6, 7, 2)
            np.testing.assert_array_equal(planes[..., 0], boards[n] == player[n])
            np.testing.assert_array_equal(planes[..., 1], boards[n] == 1 - player[n])
            np.testing.assert_array_equal(info["action_mask"][n], boards[n, 0] < 0)
            np.testing.assert_array_equal(obs[n, -7:], boards[n, 0] < 0)
        action = random_policy(obs, info, None)
        action[begins] = rng.integers(7, size=begins.sum())
        obs, reward, termination, truncation, info = envs.step(action)
        over = np.zeros(N, bool)
        for n in range(N):
            if begins[n]:
                assert reward[n] == 0
                boards[n], lengths[n] = -1, 0
                assert not obs[n, :-7].any()
                player[n] = info["player"][n]
                starters.append(player[n])
                continue
            row = np.flatnonzero(boards[n, :, action[n]] < 0).max()
            boards[n, row, action[n]] = player[n]
            lengths[n] += 1
            won = wins(boards[n] == player[n])
            over[n] = won or (boards[n] >= 0).all()
            assert reward[n] == won * (1 - 2 * player[n])
            if over[n]:
                assert info["_episode"][n]
                assert (info["episode"]["r"][n], info["episode"]["l"][n]) == (reward[n], lengths[n])
                results.append(reward[n])
            player[n] = 1 - player[n]
        np.testing.assert_array_equal(termination, over)
        np.testing.assert_array_equal(info.get("_episode", np.zeros(N, bool)), over)
        assert not truncation.any()
        begins = over
    envs.close()
    assert {-1, 1} <= set(results) and set(starters) == {0, 1} and len(results) > 40


def test_the_opponent_moves_for_player_1_only():
    def lowest(obs, info, done):
        seen.append((obs.copy(), done.copy()))
        return info["action_mask"].argmax(-1)

    seen, asked, N = [], [], 4
    envs = Against(Games("ConnectFour-v1", N), lowest)
    step = envs.env.step
    envs.env.step = lambda action: (asked.append(action.copy()), step(action))[1]
    obs, info = envs.reset(seed=1)
    assert seen == []
    for t in range(60):
        wish = info["action_mask"].shape[1] - 1 - info["action_mask"][:, ::-1].argmax(-1)  # the highest legal one
        player, mask, before = info["player"], info["action_mask"], obs
        obs, _, termination, _, info = envs.step(wish)
        np.testing.assert_array_equal(seen[t][0], before)
        np.testing.assert_array_equal(asked[t], np.where(player == 1, mask.argmax(-1), wish))
        if t + 1 < 60 and termination.any():
            envs.step(wish)  # what begins the next game is nobody's move
            np.testing.assert_array_equal(seen[t + 1][1], termination)
            break
    envs.close()


def test_random_moves_are_legal_and_equally_likely():
    mask = np.array([[True, False, True, True, False]]).repeat(6000, 0)
    torch.manual_seed(1)
    counts = np.bincount(random_policy(None, {"action_mask": mask}, None), minlength=5)
    assert counts[[1, 4]].tolist() == [0, 0]
    assert (abs(counts[[0, 2, 3]] - 2000) < 150).all()  # four standard deviations


def negamax(reward, value, player, next_value, next_player, done, gamma, gae_lambda) -> np.ndarray:
    """The definition in float64, O(T^2), for one environment; reward (T,) is that of the player who moved.

    A TD error is r + gamma V - V with the sign of V turned if the other player moves next; an advantage is the sum of
    those that follow, each with the sign of its mover.
    """
    value, player = np.append(value, next_value).astype(np.float64), np.append(player, next_player)
    T = len(reward)
    delta = np.zeros(T)
    for t in range(T):
        following = 0 if done[t] else value[t + 1] * (1 if player[t + 1] == player[t] else -1)
        delta[t] = reward[t] + gamma * following - value[t]
    advantage = np.zeros(T)
    for t in range(T):
        for k in range(t, T):
            advantage[t] += (gamma * gae_lambda) ** (k - t) * delta[k] * (1 if player[k] == player[t] else -1)
            if done[k]:
                break
    return advantage


@torch.no_grad()
def invented_rollout(agent: Agent, args: Args, rng):
    """A rollout with turns at random, some of them twice, ends, the steps after them, and past selves."""
    rollout = make_rollout(ppo_selfplay, args, make_envs(args, args.num_envs))
    T, N, D = rollout.obs.shape
    rollout.obs[:] = rng.normal(size=rollout.obs.shape)
    rollout.obs[..., -agent.num_actions :] = 1
    rollout.value[:] = agent(torch.from_numpy(rollout.obs).flatten(0, 1))[1].unflatten(0, (T, N))
    rollout.action[:] = rng.integers(agent.num_actions, size=(T, N))
    rollout.player[:] = rng.integers(2, size=(T, N))
    rollout.done[:] = rng.random((T, N)) < 0.15
    rollout.done[1:][rollout.done[:-1]] = False
    rollout.player[1:][rollout.done[:-1]] = -1
    rollout.reward[:] = rng.normal(size=(T, N)) * (rollout.player >= 0)
    rollout.learns[:] = (rollout.player >= 0) & (rng.random((T, N)) < 0.7)
    next_player = np.where(rollout.done[-1], -1, rng.integers(2, size=N))
    next_obs = rng.normal(size=(N, D)).astype(np.float32)
    next_obs[:, -agent.num_actions :] = 1
    return rollout, (next_obs, {"player": next_player})


# proves core-5
def test_advantages_equal_negamax(tmp_path):
    args = small(tmp_path, gamma=0.9, gae_lambda=0.8, num_steps=50, num_envs=6)
    agent = Agent(make_envs(args, 1), args)
    rollout, seen = invented_rollout(agent, args, np.random.default_rng(0))
    batch = estimate(agent, rollout, seen, args)
    with torch.no_grad():
        value = rollout.value
        next_value = agent(torch.from_numpy(seen[0]))[1].numpy()
    sign = np.where(rollout.player == 1, -1, 1)
    want = np.zeros((50, 6))
    for n in range(6):
        columns = (x[:, n] for x in (rollout.reward * sign, value, rollout.player))
        rest = next_value[n], seen[1]["player"][n], rollout.done[:, n]
        want[:, n] = negamax(*columns, *rest, 0.9, 0.8)
    want = want[rollout.learns]
    np.testing.assert_allclose(batch.advantage.numpy(), want, atol=1e-5)
    np.testing.assert_allclose(batch.return_.numpy(), want + value[rollout.learns], atol=1e-5)


def test_advantages_by_hand(tmp_path):
    """Player 1 begins and wins with his second move; nothing was expected. Then player 0 begins, and wins at once."""
    args = small(tmp_path, gamma=0.5, gae_lambda=1.0, num_steps=5, num_envs=1)
    envs = make_envs(args, 1)
    agent = Agent(envs, args)
    for parameter in agent.critic.parameters():
        torch.nn.init.zeros_(parameter)
    rollout = make_rollout(ppo_selfplay, args, envs)
    rollout.player[:, 0] = [1, 0, 1, -1, 0]
    rollout.reward[:, 0] = [0, 0, -1, 0, 1]
    rollout.done[:, 0] = [False, False, True, False, True]
    rollout.learns[:] = rollout.player >= 0
    batch = estimate(agent, rollout, (np.zeros((1, 91), np.float32), {"player": np.array([-1])}), args)
    assert batch.advantage.tolist() == [0.25, -0.5, 1, 1]


# proves aux-4
def test_illegal_moves_have_no_probability(tmp_path):
    args = small(tmp_path, num_steps=128)
    agent, rollout, seen, _ = first_rollout(args)
    mask = rollout.obs[..., -7:].astype(bool)
    assert not mask[rollout.learns].all()  # columns were full
    assert np.take_along_axis(mask, rollout.action[..., None], -1)[rollout.player >= 0].all()
    batch = estimate(agent, rollout, seen, args)
    legal = batch.obs[:, -7:].bool()
    probs = agent(batch.obs)[0].softmax(-1)
    assert (probs[~legal] == 0).all() and (probs[legal] > 0.01).all()
    torch.nn.init.normal_(agent.actor.weight, std=10)
    for greedy in (True, False):
        action = torch.from_numpy(make_policy(agent, greedy)(batch.obs.numpy(), {}, None))
        assert legal[torch.arange(len(legal)), action].all()


def test_past_selves_move_where_they_should_and_only_there(tmp_path):
    """A past self that always plays the first legal column, as player 1 of the first half of the environments."""
    args = small(tmp_path, num_steps=64)
    envs = make_envs(args, 1)
    past = Agent(envs, args)
    torch.nn.init.zeros_(past.actor.weight)
    past.actor.bias.data = 1e4 * torch.arange(7.0).flip(0)
    _, rollout, _, run = first_rollout(args, past)
    first = rollout.obs[..., -7:].argmax(-1) == rollout.action
    theirs = (rollout.player == 1) & (np.arange(8) < 4)
    assert theirs.sum() > 80 and first[theirs].all()
    others = (rollout.player >= 0) & ~theirs
    assert first[others].mean() < 0.3
    np.testing.assert_array_equal(rollout.learns, others)
    assert (rollout.player[1:] == -1)[rollout.done[:-1]].all()
    assert (rollout.player == -1).sum() == rollout.done[:-1].sum()
    results = rollout.reward[:, :4][rollout.done[:, :4]]  # player 0 against the past self
    assert run.num_episodes == len(results) < rollout.done.sum()
    assert run.episodes["rollout/ep_reward"] == results.tolist()


def test_nothing_that_the_agent_did_not_choose_is_learned(tmp_path):
    """Junk in the rows of past selves and of the steps that begin games changes neither loss nor gradient.

    (The value of a position counts, whoever moves: with lambda = 1 it cancels out of every advantage.)
    """
    args = small(tmp_path, gae_lambda=1.0, gamma=1.0, num_steps=64)
    agent, rollout, seen, _ = first_rollout(args)
    assert rollout.done[-1].sum() < 8
    junk = copy.deepcopy(rollout)
    junk.obs[~rollout.learns] = np.random.default_rng(0).normal(size=(1, 91))
    junk.obs[~rollout.learns, -7:] = 1
    junk.action[~rollout.learns] = 6
    junk.value[~rollout.learns] = 3
    junk.log_prob[~rollout.learns] = -5
    both = []
    for each in (rollout, junk):
        batch = estimate(agent, each, seen, args)
        assert len(batch.obs) == rollout.learns.sum() < 8 * 64 * 0.8
        agent.zero_grad()
        loss, _ = ppo_loss(agent, batch, args.clip_coef, args)
        loss.backward()
        both.append((loss.item(), torch.cat([p.grad.flatten() for p in agent.parameters()])))
    assert both[0][0] == pytest.approx(both[1][0], abs=1e-5)
    torch.testing.assert_close(both[0][1], both[1][1], atol=1e-5, rtol=1e-3)


def test_matches_are_of_sampled_moves_and_of_other_games_each_time(tmp_path, monkeypatch):
    """Three matches: with random; with it and a past self; with it and two. Evaluations are greedy."""
    greedy, seeds, play = [], [], Run.play

    def policy(agent, is_greedy=True, **flag):
        greedy.append(flag.get("greedy", is_greedy))
        return make_policy(agent, greedy[-1])

    def games(run, envs, policy, num_games, seed):
        seeds.append(seed)
        return play(run, envs, policy, num_games, seed)

    monkeypatch.setattr(ppo_selfplay, "make_policy", policy)
    monkeypatch.setattr(Run, "play", games)
    main(small(tmp_path, eval_episodes=0))
    assert greedy == [False] * (1 + 2 + 3) + [True]
    assert len(seeds) == len(set(seeds)) == 1 + 2 + 3


# proves core-6
def test_an_epoch_uses_every_move_once(tmp_path, monkeypatch):
    args = small(tmp_path, update_epochs=2)
    agent, rollout, seen, _ = first_rollout(args)
    batch = estimate(agent, rollout, seen, args)
    batch = batch._replace(advantage=torch.arange(len(batch.obs)).float())
    used = []

    def spy(agent, minibatch, *rest):
        used.append(minibatch.advantage)
        return ppo_loss(agent, minibatch, *rest)

    monkeypatch.setattr(ppo_selfplay, "ppo_loss", spy)
    update(agent, torch.optim.Adam(agent.parameters()), batch, args.clip_coef, args)
    assert len(used) == 8 and max(len(x) for x in used) - min(len(x) for x in used) <= 1
    for epoch in (used[:4], used[4:]):
        assert torch.equal(torch.cat(epoch).sort().values, batch.advantage)


# proves core-11
def test_gradients_are_clipped_by_one_norm(tmp_path):
    args = small(tmp_path, update_epochs=1, num_minibatches=1, max_grad_norm=0.01, vf_coef=100.0)
    agent, rollout, seen, _ = first_rollout(args)
    batch = estimate(agent, rollout, seen, args)
    before = torch.cat([p.detach().flatten() for p in agent.parameters()])
    update(agent, torch.optim.SGD(agent.parameters(), lr=1.0), batch, args.clip_coef, args)
    change = torch.cat([p.detach().flatten() for p in agent.parameters()]) - before
    assert change.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_past_selves_are_drawn_from_the_whole_pool(tmp_path, monkeypatch):
    drawn = []

    def spy(agent, past, *rest):
        assert not past.training
        drawn.append(past.critic.weight.sum().item())
        return collect(agent, past, *rest)

    monkeypatch.setattr(ppo_selfplay, "collect", spy)
    pool = load_checkpoint(main(small(tmp_path, total_timesteps=8 * 256, match_games=1, eval_episodes=0)))["modules"][
        "pool"
    ]
    known = [weights["critic.weight"].sum().item() for weights in pool["agents"]]
    places = [known.index(one) for one in drawn]  # each one is of the pool
    assert all(place <= update for update, place in enumerate(places)) and len(set(places)) > 2


def test_elo():
    # one opponent: the inverse of the expected score, with one draw more
    assert elo_of(np.array([0.75]), np.array([100.0]), 10**9) == pytest.approx(100 + 400 * np.log10(3), abs=1e-3)
    assert elo_of(np.array([0.5]), np.array([-70.0]), 3) == pytest.approx(-70)
    assert elo_of(np.array([1.0]), np.array([0.0]), 9) == pytest.approx(400 * np.log10(9.5 / 0.5))
    assert elo_of(np.array([0.0]), np.array([0.0]), 9) == pytest.approx(-400 * np.log10(9.5 / 0.5))
    # several: the maximum of the likelihood of won, drawn and lost games, a draw being half of each
    score, elo = np.array([0.9, 0.6, 0.3]), np.array([0.0, 250.0, 600.0])
    grid = np.arange(-500, 1500, 0.1)[:, None]
    expected = 1 / (1 + 10 ** ((elo - grid) / 400))
    points = 20 * score + 0.5
    likelihood = (points * np.log(expected) + (21 - points) * np.log(1 - expected)).sum(1)
    assert elo_of(score, elo, 20) == pytest.approx(grid[likelihood.argmax(), 0], abs=0.1)


def test_past_selves_are_frozen_copies_and_the_oldest_leaves(tmp_path):
    args = small(tmp_path, pool_size=3)
    agent, pool = Agent(make_envs(args, 1), args), PastSelves()
    for i in range(5):
        torch.nn.init.constant_(agent.critic.bias, i)
        pool.add(agent, 10.0 * i, args)
    torch.nn.init.constant_(agent.critic.bias, 99)
    assert [weights["critic.bias"].item() for weights in pool.agents] == [2, 3, 4]
    assert pool.elo == [20, 30, 40]
    again = PastSelves()
    again.load_state_dict(pool.state_dict())
    assert again.elo == pool.elo and len(again.agents) == 3


class Columns(torch.nn.Module):
    """Plays the first (or last) legal column; stands where a match expects an Agent."""

    def __init__(self, order: int):
        super().__init__()
        self.order = torch.nn.Parameter(torch.tensor(float(order)))

    def forward(self, obs):
        assert not self.training  # a match is without an edited network's dropout, and leaves its batch norm alone
        return (self.order * 1e4 * torch.arange(7.0)).masked_fill(obs[..., -7:] == 0, -1e8), torch.zeros(len(obs))


def test_match_counts_points(tmp_path):
    """Who fills one column after another meets random moves and a past self that does the same from the other side."""
    args = small(tmp_path, match_games=40)
    pool = PastSelves()
    pool.add(Columns(1), 200.0, args)
    with Run(args, ppo_selfplay.__file__, agent=(agent := Columns(-1))) as run:
        metrics = match(agent, Columns(0).eval(), pool, 5, args, run)
        alone = match(agent, Columns(0).eval(), PastSelves(), 5, args, run)
    assert agent.training
    won_past = metrics["eval/win_rate_past"]
    assert 0.3 < won_past < 0.7  # who begins wins, each time in four moves
    assert metrics["eval/win_rate_random"] > 0.6
    score = np.array([metrics["eval/win_rate_random"], won_past])
    assert metrics["eval/elo"] == elo_of(score, np.array([0.0, 200.0]), 40)
    assert set(alone) == {"eval/win_rate_random", "eval/elo"}


@pytest.mark.parametrize("env_id", ["ConnectFour-v1", "TicTacToe-v1", "Othello-v1"])
def test_two_updates(tmp_path, env_id):
    games = 2 if env_id == "Othello-v1" else 8
    folder = main(small(tmp_path, env_id=env_id, eval_episodes=0, match_games=games))
    points = curves(folder)
    assert len(points["train/policy_loss"]) == 2
    assert np.isfinite(points["train/policy_loss"] + points["train/value_loss"] + points["train/entropy"]).all()
    assert len(points["eval/elo"]) == len(points["eval/win_rate_random"]) == 3  # before, and after each update
    assert len(points["eval/win_rate_past"]) == 2


@pytest.mark.parametrize("env_id", ["ConnectFour-v1", "TicTacToe-v1"])
def test_ratio_is_one_on_the_first_minibatch(tmp_path, env_id):
    args = small(tmp_path, env_id=env_id)
    agent, rollout, seen, _ = first_rollout(args)
    batch = estimate(agent, rollout, seen, args)
    log_prob = torch.distributions.Categorical(logits=agent(batch.obs)[0]).log_prob(batch.action)
    ratio = (log_prob - batch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones(len(ratio)), atol=1e-5, rtol=0)
    _, stats = ppo_loss(agent, batch, args.clip_coef, args)
    assert abs(stats["approx_kl"]) < 1e-6 and stats["clipfrac"] == 0


def test_it_learns_tic_tac_toe(tmp_path):
    """A sign that is wrong for one of the players makes it no better than random."""
    settings = {"num_envs": 32, "total_timesteps": 24 * 1024, "env_id": "TicTacToe-v1", "past_share": 0.2}
    settings |= {"pool_interval": 100, "match_games": 200, "eval_episodes": 200}
    settings |= {"learning_rate": 2e-3, "anneal_lr": False, "clip_coef": 0.2}
    points = curves(main(small(tmp_path, **settings)))
    first, last = points["eval/win_rate_random"]  # the last match is at the end, whatever the interval
    assert 0.4 < first < 0.6 and last > 0.7
    assert points["eval/win_rate_past"][0] > 0.65
    assert points["eval/elo"][1] > points["eval/elo"][0] + 120
    assert points["eval/ep_reward"][0] > 0.45


def test_same_seed_same_losses(tmp_path):
    first, second, other = (curves(main(small(tmp_path, seed=seed))) for seed in (1, 1, 2))
    same = [key for key in first if key.startswith(("train/", "eval/", "rollout/"))]
    assert len(same) == 7 + 6 + 3
    assert all(first[key] == second[key] for key in same)
    assert first["train/value_loss"] != other["train/value_loss"]


def test_resume_continues_with_the_pool_and_enjoy_plays(tmp_path):
    folder = main(small(tmp_path, pool_size=4))
    before = load_checkpoint(folder)["modules"]["pool"]
    assert len(before["agents"]) == 3  # untrained, and after each update
    main(small(tmp_path, pool_size=4, resume=folder, total_timesteps=1024))
    checkpoint = load_checkpoint(folder)
    after = checkpoint["modules"]["pool"]
    assert checkpoint["step"] == 1024
    assert next(iter(checkpoint["modules"]["optimizer"]["state"].values()))["step"] == 64  # 4 updates of 16 minibatches
    assert len(after["agents"]) == 4 and after["elo"][:2] == before["elo"][1:]  # two joined, the untrained one left
    for old, new in zip(before["agents"][1:], after["agents"]):
        assert all(torch.equal(old[name], new[name]) for name in old)
    current = checkpoint["modules"]["agent"]
    assert all(torch.equal(after["agents"][-1][name], current[name]) for name in current)
    metrics = enjoy.main(enjoy.Args(folder, episodes=3, greedy=True))
    assert abs(metrics["eval/ep_reward"]) <= 1 and 7 <= metrics["eval/ep_length"] <= 42


def test_the_last_agent_plays_a_match(tmp_path):
    folder = main(small(tmp_path, total_timesteps=3 * 256, pool_interval=2, eval_episodes=0))
    assert [step for step, _ in scalars(folder)["eval/elo"]] == [0, 512, 768]


def test_evaluation_is_against_random(tmp_path):
    """A random player against the random player: as many points as it gives, and never a draw's worth more."""
    args = small(tmp_path)
    envs = make_envs(args, 20)
    metrics = evaluate(envs, random_policy, 400, seed=3)
    envs.close()
    assert abs(metrics["eval/ep_reward"]) < 0.2  # four standard deviations
    assert metrics["eval/std_ep_reward"] > 0.95 and 19 < metrics["eval/ep_length"] < 24


def test_it_draws(tmp_path):
    envs = make_envs(small(tmp_path), 1, render_mode="rgb_array")
    envs.reset(seed=1)
    frame = envs.render()
    envs.close()
    assert frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8 and frame.std() > 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"env_id": "KuhnPoker-v1"}, "zero-sum two-player game of perfect information"),
        ({"env_id": "Breakout-v5"}, "zero-sum two-player game of perfect information"),
        ({"past_share": 1.5}, r"--past-share must be in \[0, 1\], not 1.5"),
        ({"num_minibatches": 41}, "may leave less than two moves of the agent for each of --num-minibatches 41"),
        ({"num_steps": 1, "num_minibatches": 1}, "--num-steps 1 of --num-envs 8 may leave less than two moves"),
        ({"pool_size": 0}, "--pool-size must be greater than 0"),
        ({"pool_interval": 0}, "--pool-interval must be greater than 0"),
        ({"match_games": 0}, "--match-games must be greater than 0"),
        ({"total_timesteps": 255}, "less than one rollout of 256 steps"),
    ],
)
def test_bad_input(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        main(small(tmp_path / "runs", **changes))
    assert not (tmp_path / "runs").exists()


def test_an_unknown_game_is_refused_in_one_line(tmp_path):
    with pytest.raises(EnvError, match="did you mean ConnectFour-v1"):
        make_envs(small(tmp_path, env_id="ConectFour-v1"), 1)
    with pytest.raises(UsageError, match=r"knows pgx/ConnectFour-v1 as --env-id ConnectFour-v1$"):
        make_envs(small(tmp_path, env_id="pgx/ConnectFour-v1"), 1)
    command = [sys.executable, "cleanmarl/ppo_selfplay.py", "--env-id", "Pong-v5", "--runs-dir", tmp_path / "runs"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_the_opponent_is_told_that_all_games_begin_after_a_reset():
    seen = []

    def opponent(obs, info, done):
        seen.append(done)
        return info["action_mask"].argmax(-1)

    envs = Against(Games("TicTacToe-v1", 3), opponent)
    for seed in (1, 2):
        _, info = envs.reset(seed=seed)
        _, info = envs.step(info["action_mask"].argmax(-1))[3:]
        envs.step(info["action_mask"].argmax(-1))
    envs.close()
    assert [done.tolist() for done in seen] == [[True] * 3, [False] * 3] * 2
