"""benchmark/qtran_matrix.py: its batches are those of the scripts, and runs side by side learn as each would alone."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))
from cleanmarl.cli import UsageError
from cleanmarl.envs import make

import qtran_matrix
from qtran_matrix import QTRANS, SCRIPTS, batch_of, stacked, update


@pytest.mark.parametrize("name", SCRIPTS)
def test_batches_are_those_of_the_scripts_buffer(name):
    script, envs = SCRIPTS[name], make("matrix/qtran", 5)
    args = script.Args(batch_size=5)
    buffer, (obs, info) = script.Buffer(envs, args), envs.reset()
    action = np.array([[0, 0], [0, 2], [1, 1], [2, 0], [2, 2]])
    *step, next_info = envs.step(action)
    buffer.add(obs, info, action, *step[1:], next_info)
    theirs = [np.stack(x) for x in zip(*buffer.episodes)]
    ours = batch_of(script, envs, action[None], step[1][None, :, 0])
    for field, mine, expected in zip(script.Batch._fields, ours, theirs):
        np.testing.assert_array_equal(mine[0], expected, err_msg=field)


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_side_by_side_learn_as_each_alone(name):
    """Three updates, in which some gradients are clipped."""
    script, envs, rng = SCRIPTS[name], make("matrix/qtran"), np.random.default_rng(0)
    args = script.Args(env_id="matrix/qtran", clip_gradients=5.0, learning_rate=1e-2)
    learner, parameters, buffers, optimizer = stacked(script, "qtran", [3, 8], args)
    action = rng.integers(3, size=(3, 2, 16, 2))
    batches = [batch_of(script, envs, a, envs.table[a[..., 0], a[..., 1]]) for a in action]
    for batch in batches:
        update(learner, parameters, buffers, optimizer, batch)
    for s, seed in enumerate([3, 8]):
        torch.manual_seed(seed)
        agent = script.Agent(envs, args)
        own = torch.optim.Adam(agent.parameters(), lr=1e-2)
        for batch in batches:
            script.update(agent, agent, own, script.Batch(*(x[s] for x in batch)), args)
        for key, p in agent.named_parameters():
            torch.testing.assert_close(parameters[f"agent.{key}"][s], p, rtol=1e-3, atol=1e-5)


def test_what_was_learned_is_recorded_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(qtran_matrix, "QTRANS", QTRANS | {"total_timesteps": 96})
    args = qtran_matrix.Args(tmp_path / "results", tmp_path, seeds=2)
    jobs = [job for job in qtran_matrix.find_jobs(args) if job[0] == "qtran"]
    assert [name for _, name, _ in jobs] == list(qtran_matrix.DECOMPOSE)
    for job in jobs:
        qtran_matrix.run(*job, args)
    assert not {"qtran"} & {game for game, *_ in qtran_matrix.find_jobs(args)}
    with pytest.raises(UsageError, match=r"qtran__.*npz has 2 runs, not 1: take another --runs-dir, or other --seeds"):
        qtran_matrix.find_jobs(dataclasses.replace(args, seeds=1))
    qtran_matrix.write_tables(args)
    qtran_matrix.redraw.qtran_matrix(args.out / "qtran_matrix")
    learned = np.load(tmp_path / "qtran__VDN.npz")
    sums = learned["values"][:, 0, :, None] + learned["values"][:, 1, None, :]
    np.testing.assert_allclose(learned["joint"], sums, atol=1e-6)
    lines = (args.out / "data" / "qtran_matrix.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * 9 and lines[1].startswith(f"VDN,joint,0,0,{sums[:, 0, 0].mean():.2f},")
    assert (args.out / "qtran_matrix.svg").stat().st_size > 10_000
    assert (args.out / "qtran_matrix.md").read_text().count(" of 2 |") == 4


@pytest.mark.parametrize("name", qtran_matrix.ACTORS)
def test_rewards_of_scripts_with_actors_are_means_of_single_plays(name, tmp_path, monkeypatch):
    monkeypatch.setattr(qtran_matrix, "WITH_ACTORS", qtran_matrix.WITH_ACTORS | {"total_timesteps": 160})
    args = qtran_matrix.Args(tmp_path / "results", tmp_path, seeds=4)
    (job,) = [job for job in qtran_matrix.find_jobs(args) if job[:2] == ("penalty", name)]
    qtran_matrix.run(*job, args)
    reward = np.load(tmp_path / f"penalty__{name}.npz")["reward"]
    assert reward.shape == (4 if name == "DOP" else 3, 8) and (reward[0] != reward[1]).any()
    outcomes = set(make("matrix/penalty").table.ravel().tolist())
    low, high = min(outcomes), max(outcomes)
    assert all(low <= mean <= high for mean in reward.ravel())
    assert reward.mean() < -30  # nearly random play does not agree, and earns what disagreement does: -40, not 4 x -40
    assert reward.mean() > -60


def test_a_file_of_runs_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "qtran__VDN.npz"
    with pytest.raises(AttributeError, match="pickle"):  # after the rewards are written
        qtran_matrix.keep(path, reward=np.zeros((2, 3)), values=[lambda: None])
    assert not path.exists()
    qtran_matrix.keep(path, reward=np.zeros((2, 3)))
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and np.load(path)["reward"].shape == (2, 3)
