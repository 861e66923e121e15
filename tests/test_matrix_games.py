"""benchmark/matrix_games.py: teams side by side learn as each would alone, and what is recorded of them is right."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))
from cleanmarl import coma, coppo_matrix
from cleanmarl.cli import UsageError
from cleanmarl.envs import make

import matrix_games
from matrix_games import COMMON, PLAYS, VARIANTS, Games, join, make_optimizer, make_rollout, make_teams, split


def test_split_and_join_are_inverse():
    x = np.arange(2 * 12 * 3).reshape(2, 12, 3)
    assert split(x).shape == (6, 4, 3) and (join(split(x), 2) == x).all()
    assert (split(x)[1] == x[0, [1, 4, 7, 10]]).all()  # the agents of team 1 in row 0
    assert torch.equal(join(split(torch.from_numpy(x)), 2), torch.from_numpy(x))


def test_every_team_plays_its_own_game():
    envs, action = Games("climbing-4p", 2, 3), np.zeros((2, 12), np.int64)
    action[0, [1, 4, 7, 10]] = 8  # team 1 of environment 0
    _, reward, termination, _, _ = envs.step(action)
    expected = np.full((2, 12), 10.0)
    expected[0, [1, 4, 7, 10]] = 90
    assert (reward == expected).all() and termination.all()


@pytest.mark.parametrize("variant", ["CoPPO", "MAPPO", "IPPO", "COMA"])
def test_teams_side_by_side_learn_as_each_alone(variant, monkeypatch):
    script, settings = VARIANTS[variant]
    args = script.Args(env_id="matrix/penalty", **COMMON, **settings)
    seeds, one = [3, 8], make("matrix/penalty", PLAYS)
    teams = make_teams(script, args, seeds)
    teams.epsilon.fill_(0.3)
    rng = np.random.default_rng(0)
    rollout = make_rollout(script, 8)
    rollout.action[:] = rng.integers(9, size=(1, PLAYS, 8))
    rollout.reward[:] = join(rng.normal(size=(PLAYS * 2, 1)).repeat(4, 1), PLAYS)
    for array in (rollout.obs, rollout.state, rollout.action_mask, rollout.agent_mask, rollout.done):
        array[:] = 1
    if script is coppo_matrix:
        rollout.log_prob[:] = rng.normal(-2, 0.3, size=(1, PLAYS, 8))
    original = coppo_matrix.ratio_of_others

    def learn(agent, rollout, envs, replacement):
        monkeypatch.setattr(coppo_matrix, "ratio_of_others", replacement)
        actors, optimizer = make_optimizer(script, agent, args)
        for group in optimizer.param_groups:
            group["lr"] = 5e-3
        batch = script.estimate(agent, rollout, *envs.reset(), args)
        if script is coma:
            coma.update(agent, optimizer, batch, 0, args)
        else:
            coppo_matrix.update(agent, actors, optimizer, batch, args)

    learn(
        teams, rollout, Games("penalty", PLAYS, 2), lambda x, args: [join(y, len(x)) for y in original(split(x), args)]
    )
    for s, seed in enumerate(seeds):
        torch.manual_seed(seed)
        alone = script.Agent(one, args)
        alone.epsilon.fill_(0.3)
        before = [p.clone() for p in alone.parameters()]
        mine = script.Rollout(*(x if x.shape[2:] == (4,) else x[:, :, s::2] for x in rollout))
        learn(alone, mine, one, original)
        for p, of_teams, start in zip(alone.actor.parameters(), teams.actor.parameters(), before):
            torch.testing.assert_close(of_teams[s::2], p, atol=2e-5, rtol=1e-3)
            assert (p - start).abs().max() > 1e-3
        for p, of_teams in zip(alone.critic.parameters(), teams.critic.parameters()):
            torch.testing.assert_close(of_teams[s::2], p, atol=2e-5, rtol=1e-3)


def test_results_are_recorded_per_seed(tmp_path, monkeypatch):
    monkeypatch.setitem(COMMON, "total_timesteps", 400)
    for variant in ("CoPPO", "MAPPO", "COMA"):
        path = tmp_path / f"{variant}.npz"
        matrix_games.train(("penalty", variant, [1, 2, 3], path))
        results = np.load(path)
        assert results["reward"].shape == results["variance"].shape == (3, 20)
        assert (results["reward"] >= -50).all() and (results["variance"][:, 1:] > 0).all()
        penalties = [results[f"penalties_{seed}"] for seed in (1, 2, 3)]
        assert all(len(p) and p.shape[1] == (1 if variant == "COMA" else 8) for p in penalties)
        change = np.ptp(np.concatenate(penalties), axis=1)
        assert (change > 0).all() if variant == "CoPPO" else (change == 0).all()  # g moves over the epochs
    assert (
        coppo_matrix.actor_loss.__module__ == "cleanmarl.coppo_matrix"
        and coma.actor_loss.__module__ == "cleanmarl.coma"
    )


def test_figures_and_tables_are_drawn_from_the_data_of_the_runs(tmp_path):
    rng, runs = np.random.default_rng(0), tmp_path / "runs"
    runs.mkdir()
    args = matrix_games.Args(tmp_path / "results", runs, seeds=3)
    for _, variant, seeds, path in matrix_games.find_jobs(args):
        results = {"reward": rng.normal(size=(3, 500)), "variance": rng.random((3, 500)) + 0.1}
        results |= {f"penalties_{seed}": rng.normal(size=(80, 1 if variant == "COMA" else 8)) for seed in seeds}
        np.savez(path, **results)
    matrix_games.main(args)  # nothing is left to train
    with pytest.raises(UsageError, match=r"penalty__.*npz has 3 runs, not 30: take another --runs-dir"):
        matrix_games.find_jobs(dataclasses.replace(args, seeds=30))
    lines = (args.out / "data" / "coppo_matrix.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * (50 + 50 + 70 + 8) + 4 * 2 * 50 + 6 * 4 * 50
    reward = np.load(matrix_games.run_path(runs, "climbing-4p", "MAPPO"))["reward"]
    ends = [
        float(x)
        for line in lines
        if line.startswith('"figure 5, climbing-4p",MAPPO,10000,')
        for x in line.split(",")[4:]
    ]
    np.testing.assert_allclose(ends, np.ravel(matrix_games.interval(reward[:, -10:].mean(1))), rtol=1e-5)
    for name, rows in (("penalty", 4), ("inner_clip", 4), ("games", 24)):
        assert (args.out / f"coppo_matrix_{name}.svg").stat().st_size > 10_000
        page = (args.out / f"coppo_matrix_{name}.md").read_text()
        assert page.count("| 3 |") == rows
