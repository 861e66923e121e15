"""impala_replay.py: what a batch is (cutting, replaying, priorities), and the mask and weights of its loss."""

import dataclasses
import sys

from cleanmarl import enjoy, impala
from cleanmarl import impala_replay as script
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from test_impala import example_unrolls, learned, loss_by_definition, nn_vector
from toys import code

SMALL = {"num_actors": 0, "total_timesteps": 128, "num_envs": 4, "unroll_length": 16, "eval_episodes": 0}
SMALL |= {"updates_per_collect": 1}


def play(args, sharp=100):
    """An agent whose policy is far from uniform, its player, and the unrolls that it played."""
    torch.manual_seed(0)
    player = script.Player(args, 0, 0)
    agent = script.Agent(player.envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= sharp
    unrolls = np.zeros(args.num_envs, script.unroll_dtype(player.envs, args))
    player.play(agent, unrolls)
    assert unrolls["mask"].all()
    return agent, player, unrolls


def as_impalas(unrolls, args):
    """The same unrolls without a mask."""
    theirs = np.zeros(len(unrolls), impala.unroll_dtype(impala.make_envs(args, 1), args))
    for name in theirs.dtype.names:
        theirs[name] = unrolls[name]
    return theirs


def masked_unrolls(seed=0):
    """20 steps of 6 environments as in test_impala.py, the last 13 of the fifth one empty, and weights."""
    args, agent, theirs = example_unrolls(seed)
    args = script.Args(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    unrolls = np.zeros(6, script.unroll_dtype(script.make_envs(args, 1), args))
    for name in theirs.dtype.names:
        unrolls[name] = theirs[name]
    unrolls["mask"] = True
    unrolls["termination"][4, 6], unrolls["mask"][4, 7:] = True, False
    return args, agent, unrolls, torch.from_numpy(np.random.default_rng(seed).random(6, dtype=np.float32))


# ------------------------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("seed", range(2))
def test_the_loss_is_the_weighted_sum_over_the_steps_that_are_not_empty(seed):
    """Of each unroll's own loss, whose definition test_impala.py holds: in float64, cut where it ends."""
    args, agent, unrolls, weight = masked_unrolls(seed)
    loss, stats, priority = script.impala_loss(agent, unrolls, weight, args)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    total, parts, count = 0, np.zeros(3), unrolls["mask"].sum()
    for unroll, w, error in zip(unrolls, weight.double(), priority):
        T = int(unroll["mask"].sum())
        of_it = dataclasses.replace(args, unroll_length=T)
        short = np.zeros(1, impala.unroll_dtype(impala.make_envs(args, 1), of_it))
        for name in short.dtype.names:
            short[name][0] = unroll[name][: T + (name == "obs")]
        of_one, of_parts, _ = loss_by_definition(agent, short, of_it)
        total, parts = total + w * of_one, parts + w.item() * of_parts * T / count
        assert 0 < error < 10
    torch.testing.assert_close(loss.double(), total, atol=1e-3, rtol=1e-5)
    np.testing.assert_allclose([stats[x] for x in ("policy_loss", "value_loss", "entropy")], parts, rtol=1e-4)
    for ours, theirs in zip(gradients, torch.autograd.grad(total, list(agent.parameters()))):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-3, rtol=1e-4)


def test_without_empty_steps_and_weights_the_loss_is_impalas():
    args, agent, unrolls, _ = masked_unrolls()
    unrolls["mask"] = True
    ours = script.impala_loss(agent, unrolls, torch.ones(6), args)[:2]
    theirs = impala.impala_loss(agent, as_impalas(unrolls, args), args)
    torch.testing.assert_close(ours, theirs)
    assert 1 < args.c_clip < args.rho_clip and 0 < ours[1]["clipfrac"] < 1


def test_the_player_is_impalas_plus_a_mask():
    last, full = "steps['obs'][T] = self.obs", "steps['obs'][T], steps['mask'][:] = (self.obs, True)"
    assert code(script.Player) == code(impala.Player).replace(last, full) != code(impala.Player)


def test_the_priority_is_the_mean_value_error():
    """Of unrolls alone: with every ratio clipped to almost 0 targets are values; then errors are one step's."""
    args, agent, unrolls, weight = masked_unrolls()
    args = dataclasses.replace(args, c_clip=1e-12)
    priority = script.impala_loss(agent, unrolls, weight, args)[2]
    with torch.no_grad():
        obs = torch.from_numpy(unrolls["obs"].copy())
        log_prob = agent.actor(obs[:, :-1]).log_softmax(-1)
        log_prob = log_prob.gather(-1, torch.from_numpy(unrolls["action"].copy())[..., None]).squeeze(-1).numpy()
        value = agent.critic(obs).squeeze(-1).numpy()
        final = agent.critic(torch.from_numpy(unrolls["final_obs"].copy())).squeeze(-1).numpy()
    following = np.where(unrolls["termination"], 0, np.where(unrolls["truncation"], final, value[:, 1:]))
    rho = np.minimum(np.exp(log_prob - unrolls["log_prob"]), args.rho_clip)
    error = np.abs(rho * (unrolls["reward"] + args.gamma * following - value[:, :-1]))
    expected = [e[m].mean() for e, m in zip(error, unrolls["mask"])]
    np.testing.assert_allclose(priority, expected, rtol=1e-4)


def test_empty_steps_take_no_part():
    args, agent, unrolls, weight = masked_unrolls()
    before = script.impala_loss(agent, unrolls, weight, args)
    for name in ("obs", "final_obs"):
        unrolls[name][4, 8:] = 7
    unrolls["reward"][4, 7:] = 100
    unrolls["log_prob"][4, 7:] = -5
    after = script.impala_loss(agent, unrolls, weight, args)
    assert torch.equal(before[0], after[0]) and before[1] == after[1] and torch.equal(before[2], after[2])


# --------------------------------------------------------------------------------------------------- cutting, replaying


def numbered(T, ends, slots):
    """Slots (slots, 1) of unrolls of one environment whose steps are numbered from 1; episodes end after `ends`."""
    args = script.Args(unroll_length=T, num_envs=1)
    unrolls = np.zeros((slots, 1), script.unroll_dtype(script.make_envs(args, 1), args))
    steps = np.arange(1, slots * T + 1).reshape(slots, T)
    unrolls["reward"][:, 0] = unrolls["action"][:, 0] = steps
    unrolls["obs"][:, 0, :, 0] = np.concatenate([steps, steps[:, -1:] + 1], 1)
    unrolls["termination"][:, 0], unrolls["mask"] = np.isin(steps, ends), True
    return unrolls


@pytest.mark.parametrize(
    "how, expected",
    [
        # episodes of 6, 3, 4 and 11 steps, unrolls of 4; _ is an empty step
        ("keep", "1234 5678 9abc defg hijk lmno"),
        ("drop", "1234 abcd efgh ijkl"),
        ("last", "1234 3456 789_ abcd efgh ijkl lmno"),
        ("null_padding", "1234 56__ 789_ abcd efgh ijkl mno_"),
    ],
)
def test_remainders(how, expected):
    slots = numbered(4, [6, 9, 13, 24], 6)
    before = slots.copy()
    cutter = script.Cutter(script.Args(remainder=how))
    cut = [unroll for slot in slots for batch in cutter.cut(0, slot) for unroll in batch]
    names = np.array(list("_123456789abcdefghijklmno"))
    assert ["".join(names[unroll["action"]]) for unroll in cut] == expected.split()
    for unroll in cut:
        real = unroll["reward"] > 0
        np.testing.assert_array_equal(unroll["mask"], real)
        np.testing.assert_array_equal(unroll["reward"], unroll["action"])
        np.testing.assert_array_equal(unroll["termination"], np.isin(unroll["reward"], [6, 9, 13, 24]))
        steps = unroll["reward"][real]
        np.testing.assert_array_equal(unroll["obs"][: len(steps) + 1, 0], [*steps, steps[-1] + 1])
    np.testing.assert_array_equal(slots, before)


def test_batches_of_cut_unrolls_have_full_size_and_actors_do_not_mix():
    """Two actors of 3 environments that play together what one of 6 plays: the same unrolls, in batches of 3."""
    args = script.Args(**SMALL | {"num_envs": 6, "unroll_length": 8}, remainder="last")
    agent, player, unrolls = play(args)
    slots = [unrolls.copy()]
    for _ in range(20):
        player.play(agent, unrolls)
        slots.append(unrolls.copy())
    alone, cutter = script.Cutter(args), script.Cutter(args)
    one = [unroll.tobytes() for unrolls in slots for batch in alone.cut(0, unrolls) for unroll in batch]
    two = []
    for unrolls in slots:
        for actor in (0, 1):
            for batch in cutter.cut(actor, unrolls[3 * actor : 3 * actor + 3]):
                assert len(batch) == 3
                two += [unroll.tobytes() for unroll in batch]
    two += [unroll.tobytes() for unroll in cutter.complete]
    one += [unroll.tobytes() for unroll in alone.complete]
    assert sorted(one) == sorted(two) and len(one) > 100 and len(cutter.complete) < 3


def new_replay(size=10, **flags):
    args = script.Args(num_envs=4, unroll_length=1, replay_size=size, **flags)
    dtype = script.unroll_dtype(script.make_envs(args, 1), args)
    unrolls = np.zeros(25, dtype)
    unrolls["reward"][:, 0] = np.arange(25)
    return script.Replay(args, dtype), unrolls


def test_replay_keeps_the_latest_and_draws_evenly():
    torch.manual_seed(0)
    replay, unrolls = new_replay()
    replay.add(unrolls[:4])
    assert set(replay.sample()[0]["reward"].ravel()) <= {0, 1, 2, 3}
    for first in range(4, 24, 4):
        replay.add(unrolls[first : first + 4])
    counts = np.zeros(25)
    for _ in range(2000):
        drawn, where, weight = replay.sample()
        np.testing.assert_array_equal(replay.unrolls[where.numpy()], drawn)
        np.add.at(counts, drawn["reward"].ravel().astype(int), 1)
        assert (weight == 1).all()
    assert (counts[:14] == 0).all() and counts[24] == 0 and counts.sum() == 8000
    assert np.abs(counts[14:24] - 800).max() < 4 * np.sqrt(800)


@pytest.mark.parametrize("is_weight", [False, True])
def test_replay_draws_by_priority(is_weight):
    torch.manual_seed(0)
    replay, unrolls = new_replay(priority=True, priority_is_weight=is_weight)
    replay.add(unrolls[:8])
    assert (replay.priority[:8] == 1).all()
    replay.priority[:8] = torch.tensor([1.0, 2, 4, 8, 1, 1, 1, 1])
    replay.add(unrolls[8:9])
    assert replay.priority[8] == 8  # new ones are as likely as any
    share = replay.priority[:9].numpy() ** 0.6
    share /= share.sum()
    counts = np.zeros(9)
    for _ in range(2000):
        _, where, weight = replay.sample()
        np.add.at(counts, where.numpy(), 1)
        largest = ((9 * share[where]) ** -0.4).max()
        expected = (9 * share[where]) ** -0.4 / largest if is_weight else np.ones(4)
        np.testing.assert_allclose(weight, expected, rtol=1e-5)
    assert (np.abs(counts - 8000 * share) < 4 * np.sqrt(8000 * share)).all()


def test_updates_draw_from_the_replay_and_set_priorities():
    args = script.Args(**SMALL | {"updates_per_collect": 3}, replay_size=8, priority=True)
    agent, player, unrolls = play(args)
    replay = script.Replay(args, unrolls.dtype)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
    for _ in range(2):
        script.update(agent, optimizer, replay, unrolls, args)
        player.play(agent, unrolls)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {6} and replay.count == 8
    touched = replay.priority != 1
    assert touched.any() and (replay.priority[touched] > 0).all()
    torch.manual_seed(5)
    _, where, _ = replay.sample()
    torch.manual_seed(5)
    one = dataclasses.replace(args, updates_per_collect=1)
    expected = script.impala_loss(agent, replay.unrolls[where], torch.ones(4), args)[2]
    still = torch.optim.SGD(agent.parameters(), 0.0)
    replay.add = lambda unrolls: None
    script.update(agent, still, replay, unrolls, one)
    torch.testing.assert_close(replay.priority[where], expected + 1e-6)


def test_what_has_no_error_can_still_be_drawn(monkeypatch):
    args = script.Args(**SMALL, replay_size=8, priority=True)
    agent, _, unrolls = play(args)
    replay, loss = script.Replay(args, unrolls.dtype), script.impala_loss
    monkeypatch.setattr(script, "impala_loss", lambda *given: (*loss(*given)[:2], torch.zeros(len(given[1]))))
    for _ in range(9):
        script.update(agent, torch.optim.SGD(agent.parameters(), 0.0), replay, unrolls, args)
        assert (replay.priority[: replay.count] > 0).all()


def test_gradients_are_clipped_by_one_norm():
    """detail impala-6"""
    args = script.Args(**SMALL, replay_size=8, max_grad_norm=0.01)
    agent, _, unrolls = play(args)
    before = nn_vector(agent)
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)
    script.update(agent, optimizer, script.Replay(args, unrolls.dtype), unrolls, args)
    assert (nn_vector(agent) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_without_replay_every_batch_is_learned_from_as_it_comes():
    """The same parameters as impala.py, to the last bit."""
    args = script.Args(**SMALL | {"updates_per_collect": 2, "replay_size": 0})
    agent, _, unrolls = play(args)
    twin = impala.Agent(impala.make_envs(args, 1), args)
    twin.load_state_dict(agent.state_dict())
    script.update(agent, torch.optim.Adam(agent.parameters(), 1e-3), None, unrolls, args)
    impala.update(twin, torch.optim.Adam(twin.parameters(), 1e-3), as_impalas(unrolls, args), args)
    torch.testing.assert_close(nn_vector(agent), nn_vector(twin), atol=0, rtol=0)


# -------------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize("num_actors", [0, 1])
def test_a_run_without_replay_is_impalas(num_actors, tmp_path):
    """Batches of two slots too, of which the first waits in memory that is played into again."""
    flags = SMALL | {"total_timesteps": 1600, "batch_size": 2 * SMALL["num_envs"], "eval_episodes": 0}
    flags |= {"num_actors": num_actors, "deterministic": True, "runs_dir": str(tmp_path)}
    folders = script.main(script.Args(**flags, replay_size=0)), impala.main(impala.Args(**flags))
    ours, theirs = (load_checkpoint(folder)["modules"]["agent"] for folder in folders)
    assert ours.keys() == theirs.keys()
    lags = [learned(folder)["train/policy_lag"] for folder in folders]
    assert lags[0] == lags[1] and any(lag for _, lag in lags[0]) == (num_actors > 0)
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], atol=0, rtol=0)


def test_the_lag_counts_all_updates(tmp_path):
    flags = SMALL | {"total_timesteps": 640, "num_actors": 1, "deterministic": True, "runs_dir": str(tmp_path)}
    runs = [script.main(script.Args(**flags | {"updates_per_collect": n}, replay_size=8)) for n in (1, 3)]
    once, thrice = ([lag for _, lag in learned(folder)["train/policy_lag"]] for folder in runs)
    assert thrice == [3 * lag for lag in once] and max(once) > 0


@pytest.mark.parametrize("remainder", ["drop", "last", "null_padding"])
def test_runs_with_remainders_repeat_and_resume(remainder, tmp_path):
    flags = SMALL | {"total_timesteps": 640, "remainder": remainder, "replay_size": 8, "priority": True}
    flags |= {"priority_is_weight": True, "updates_per_collect": 2, "runs_dir": str(tmp_path)}
    folder, again = (script.main(script.Args(**flags)) for _ in range(2))
    assert learned(folder) == learned(again) and "train/policy_loss" in learned(folder)
    half = load_checkpoint(folder)
    script.main(script.Args(**flags | {"total_timesteps": 1280, "resume": folder}))
    whole = load_checkpoint(folder)
    assert whole["step"] == 1280 and half["step"] == 640
    assert half["modules"]["replay"]["count"] < whole["modules"]["replay"]["count"]
    assert int(whole["modules"]["optimizer"]["state"][0]["step"]) > int(
        half["modules"]["optimizer"]["state"][0]["step"]
    )
    assert [step for step, _ in learned(folder)["train/learning_rate"]] == list(range(64, 1281, 64))


def test_a_checkpoint_holds_the_replay():
    replay, unrolls = new_replay(priority=True)
    replay.add(unrolls[:7])
    replay.priority[3] = 5
    other, _ = new_replay(priority=True)
    other.load_state_dict(replay.state_dict())
    np.testing.assert_array_equal(other.unrolls, replay.unrolls)
    assert torch.equal(other.priority, replay.priority) and other.count == 7


def test_enjoy_plays_the_run(tmp_path):
    folder = script.main(script.Args(**SMALL | {"num_actors": 1, "replay_size": 8}, runs_dir=str(tmp_path)))
    assert enjoy.main(enjoy.Args(folder, episodes=2))["eval/ep_length"] > 0


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--replay-size 15", "--replay-size 15 is less than a batch of 16 unrolls"),
        ("--replay-size 0 --priority", "--priority needs a replay: --replay-size"),
        ("--replay-size 99 --priority-is-weight", "--priority-is-weight needs --priority"),
        ("--rho-clip 0.9", "--rho-clip 0.9 must be at least --c-clip 1.0"),
        ("--total-timesteps 319", "--total-timesteps 319 is less than the 320 steps of one batch"),
    ],
)
def test_refused(flags, text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["impala_replay.py", "--runs-dir", str(tmp_path / "runs"), *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        launch(script.main, script.Args)
    out, err = capfd.readouterr()
    assert stopped.value.code == 2 and not out and not list(tmp_path.iterdir())
    assert err.startswith("impala_replay: ") and err.count("\n") == 1 and text in err


@pytest.mark.learning
def test_learns_cartpole_in_seconds(tmp_path):
    args = script.Args(num_actors=0, total_timesteps=40_000, eval_episodes=0, runs_dir=str(tmp_path))
    folder = script.main(args)
    envs = script.make_envs(args, 4)
    agent = script.Agent(envs, args)
    untrained = evaluate(envs, script.make_policy(agent, greedy=False), 20, seed=7)["eval/ep_reward"]
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, script.make_policy(agent, greedy=False), 20, seed=7)["eval/ep_reward"]
    assert untrained < 50 and trained > 150


def test_a_batch_of_one_unroll_is_a_batch(tmp_path):
    """NumPy takes a torch index of one element for a number."""
    folder = script.main(script.Args(**SMALL | {"num_envs": 1}, runs_dir=str(tmp_path)))
    assert load_checkpoint(folder)["step"] == SMALL["total_timesteps"]
