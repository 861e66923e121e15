"""benchmark/time_to_score.py on real runs, and what redraw.py makes of its tables."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from optional import needs
from torch.utils.tensorboard import SummaryWriter

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))
import redraw  # noqa: E402
import time_to_score  # noqa: E402
from time_to_score import Contestant, Point  # noqa: E402

sys.path.remove(str(BENCHMARK))  # its run.py must not stand in for another module of that name

OURS = "python cleanmarl/ppo.py --seed {seed} --runs-dir {tmp} --eval-episodes 0 --num-steps 64 --total-timesteps"


def test_a_point_has_the_mean_of_the_hundred_episodes_before_it():
    rng = np.random.default_rng(1)
    for most in (1, 7, 250):
        episodes, returns = rng.integers(1, most + 1, 300), rng.normal(size=300)
        points = [Point(float(i), i, r, int(n)) for i, (r, n) in enumerate(zip(returns, episodes))]
        smoothed = {point.step: point.return_ for point in time_to_score.smooth(points)}
        for i in range(300):
            whole = [j for j in range(i + 1) if episodes[j : i + 1].sum() >= 100]
            assert (i in smoothed) == bool(whole)
            if whole:  # as few points as have a hundred
                window = slice(max(whole), i + 1)
                assert smoothed[i] == pytest.approx(np.average(returns[window], weights=episodes[window]))


def test_points_are_read_with_their_episodes_and_the_factor_of_their_unit(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for step, ended, return_ in ((10, 4, 1.0), (20, 9, 2.0), (30, 16, 3.0)):
            writer.add_scalar("rollout/num_episodes", ended, step)
            writer.add_scalar("rollout/ep_reward", return_, step)
    for given, episodes in ((None, [4, 5, 7]), (12, [12, 12, 12])):
        by = Contestant("toy", 0, "toy", "", episodes=given, factor=3)
        points = time_to_score.read_points(tmp_path, by, start=0, cpu_per_second=1)
        assert [point[1:] for point in points] == list(zip((10, 20, 30), (3, 6, 9), episodes))


@pytest.fixture
def results(tmp_path, monkeypatch):
    data = tmp_path / "results" / "data"
    data.mkdir(parents=True)
    monkeypatch.chdir(BENCHMARK.parent)
    monkeypatch.setattr(time_to_score, "DATA", data)
    easy, hard = ("CartPole-v1", 20), ("CartPole-v1, to the end", 500)
    contestants = [Contestant(*easy, "ppo", f"{OURS} 4096"), Contestant(*hard, "ppo", f"{OURS} 4096")]
    monkeypatch.setattr(time_to_score, "CONTESTANTS", contestants)
    return data


def test_ours_reaches_a_low_score_and_not_the_highest(results, tmp_path):
    time_to_score.main(time_to_score.Args(peers=tmp_path, seeds=(1,), only=("CartPole-v1, to the end",)))
    time_to_score.main(time_to_score.Args(peers=tmp_path, seeds=(1, 2)))  # replaces seed 1
    rows = pd.read_csv(results / "speed_time_to_score.csv")
    assert (
        rows.seed.tolist() == [1, 2, 1, 2]
        and rows.task.tolist() == ["CartPole-v1"] * 2 + ["CartPole-v1, to the end"] * 2
    )
    easy, hard = rows[rows.score == 20], rows[rows.score == 500]
    assert (easy.cpu_seconds > 0.5).all() and (easy.cpu_seconds <= easy.all_cpu_seconds).all()  # imports count
    assert ((easy.steps > 500) & (easy.steps <= easy.all_steps)).all() and (easy.all_steps >= 3500).all()
    assert hard.cpu_seconds.isna().all() and hard.steps.isna().all() and (hard.all_cpu_seconds > 0.5).all()
    curves = pd.read_csv(results / "speed_time_to_score_curves.csv")
    for _, curve in curves.groupby(["task", "seed"]):
        assert curve.cpu_seconds.is_monotonic_increasing and curve.step.is_monotonic_increasing
        assert curve["return"].between(8, 500).all() and len(curve) <= time_to_score.MOST_POINTS

    redraw.time_to_score(results.parent / "time_to_score")
    table = (results.parent / "time_to_score.md").read_text().splitlines()[-2:]
    times = easy.cpu_seconds
    assert f"| {times.median():,.0f} ({times.min():,.0f}-{times.max():,.0f}) |" in table[0] and "| 2 of 2 |" in table[0]
    assert "| 500 | ppo |  |  | 0 of 2 |" in table[1]
    assert "<svg" in (results.parent / "time_to_score.svg").read_text()


def test_all_that_is_measured_can_be_drawn(tmp_path):
    """In colours of their own, also those that no published run is of yet."""
    (tmp_path / "data").mkdir()
    row = dict.fromkeys(time_to_score.COLUMNS, 1) | {"machine": "a", "command": "b"}
    of_each = [{"task": by.task, "by": by.by, "score": by.score} for by in time_to_score.CONTESTANTS]
    pd.DataFrame([row | each for each in of_each]).to_csv(tmp_path / "data" / "speed_time_to_score.csv", index=False)
    point = dict.fromkeys(time_to_score.CURVE_COLUMNS, 1.0) | {"seed": 1}
    points = pd.DataFrame([point | {"task": each["task"], "by": each["by"]} for each in of_each])
    points.to_csv(tmp_path / "data" / "speed_time_to_score_curves.csv", index=False)
    redraw.time_to_score(tmp_path / "speed_time_to_score")
    table = (tmp_path / "speed_time_to_score.md").read_text()
    assert all(f"| {by.task} | {by.score:g} | {by.by} |" in table for by in time_to_score.CONTESTANTS)


def test_a_command_that_fails_ends_it(results, tmp_path, monkeypatch):
    bad = Contestant("CartPole-v1", 20, "ppo", f"{OURS} nothing")
    monkeypatch.setattr(time_to_score, "CONTESTANTS", [bad])
    with pytest.raises(SystemExit, match=r"status 2 from: .*--total-timesteps nothing"):
        time_to_score.main(time_to_score.Args(peers=tmp_path))
    monkeypatch.setattr(time_to_score, "CONTESTANTS", [bad._replace(command=f"{OURS} 512")])
    with pytest.raises(SystemExit, match=r"fewer than a hundred episodes, of which a score is the mean: .*512"):
        time_to_score.main(time_to_score.Args(peers=tmp_path))
    assert not list(results.iterdir())


@pytest.mark.parametrize("cut", [0, 700, -40, -200])
def test_a_table_that_is_cut_off_is_told_before_any_run(cut, results, tmp_path, capsys):
    path = results / "speed_time_to_score.csv"
    path.write_text((BENCHMARK.parent / "docs" / "results" / "data" / path.name).read_text()[:cut])
    with pytest.raises(SystemExit, match="2"):
        time_to_score.main(time_to_score.Args(peers=tmp_path))
    assert f"{path} is damaged" in capsys.readouterr().err


def test_a_task_that_is_not_there_is_one_line(results, tmp_path, monkeypatch, capsys):
    listed = time_to_score.CONTESTANTS
    monkeypatch.setattr(time_to_score, "CONTESTANTS", [*listed, Contestant("spread", -30, "mappo", OURS)])
    for peers, given, line in (
        (
            tmp_path,
            {"only": ("CartPole-v1", "CartPole")},
            "--only takes some of: CartPole-v1, CartPole-v1, to the end, spread",
        ),
        (tmp_path, {"by": ("nobody",)}, "--by takes some of: ppo, mappo"),
        (tmp_path, {"only": ("CartPole-v1",), "by": ("mappo",)}, "--only CartPole-v1 is not run by --by mappo"),
        (tmp_path / "none", {}, f"there is no folder --peers {tmp_path / 'none'}"),
    ):
        with pytest.raises(SystemExit, match="2"):
            time_to_score.main(time_to_score.Args(peers=peers, **given))
        assert capsys.readouterr().err.endswith(f": {line}\n")
    assert not list(results.iterdir())


AS_JAXMARL = """
import jax, jax.numpy as jnp
def make_train(config):
    updates = config["TOTAL_TIMESTEPS"] // config["NUM_STEPS"] // config["NUM_ENVS"]
    def train(key):
        def update(i, _):
            if config["BATTLES"]:  # of all steps, environments and agents
                ended = jnp.zeros((4, 2, 3), bool).at[1, 0].set(True).at[3, 1].set(True)
                won = jnp.zeros((4, 2, 3)).at[1, 0].set(i > 1)
                metric = {"returned_episode_returns": won, "returned_won_episode": won, "returned_episode": ended}
            else:
                metric = {"returned_episode_returns": key[1] - 9.5 + i, "returned_episode": 1 / 4}
            jax.experimental.io_callback(lambda metric: open("metrics", "a"), None, metric)
            return i + 1, None
        return jax.lax.scan(update, 0, None, updates)
    return train
"""


@needs("jaxmarl")
@pytest.mark.parametrize("battles, scores", [(False, [-3, -1, 1]), (True, [0, 1, 1])])
def test_the_curve_of_a_jax_program(tmp_path, battles, scores):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "toy.yaml").write_text(f"{{NUM_ENVS: 2, NUM_STEPS: 4, BATTLES: {battles}}}")
    (tmp_path / "toy.py").write_text(AS_JAXMARL)
    argv = [sys.executable, BENCHMARK / "peers" / "run_jaxmarl.py", tmp_path / "toy.py", "32", "7"]
    argv += ["TOTAL_TIMESTEPS=32", f"CURVE={tmp_path}"]
    env = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run([*map(str, argv)], check=True, timeout=120, env=env, cwd=tmp_path)
    by = Contestant("toy", 0, "toy", "", factor=2)
    points = time_to_score.read_points(tmp_path, by, start=0, cpu_per_second=1)
    assert [point[1:] for point in points] == [(16, scores[0], 2), (24, scores[1], 2), (32, scores[2], 2)]
    assert 0.1 < points[0].cpu_seconds <= points[1].cpu_seconds <= points[2].cpu_seconds < 60
    assert not (tmp_path / "metrics").exists()  # the callback of the baseline would log to Weights & Biases
