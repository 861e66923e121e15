"""benchmark/cross_play.py: the sides of a game, learned in different runs, against each other."""

import shutil
import subprocess
import sys
from pathlib import Path

import cleanmarl
from cleanmarl import ippo, mappo, ppo
from cleanmarl.cli import UsageError
from cleanmarl.envs import make

import numpy as np
import optional
import pytest

pd = pytest.importorskip("pandas", reason=optional.reason("pandas"))
pytest.importorskip("matplotlib", reason=optional.reason("matplotlib"))
pytest.importorskip("scipy", reason=optional.reason("scipy"))

BENCHMARK = Path(__file__).parents[1] / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import cross_play  # noqa: E402

sys.path.remove(str(BENCHMARK))  # its run.py must not stand in for another module of that name

TAG = "mpe/simple_tag_v3"  # agents 0, 1 and 2 chase agent 3
SHORT = {"env_id": TAG, "total_timesteps": 400, "num_envs": 16, "share_parameters": False, "eval_episodes": 0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for script in (ippo, mappo):
        for seed in (1, 2):
            script.main(script.Args(**SHORT, seed=seed, runs_dir=str(folder)))
    return folder


def command(*flags) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, BENCHMARK / "cross_play.py", *flags], capture_output=True, text=True)


def returns_by_hand(chasers: Path | None, prey: Path | None, episodes: int, seed: int) -> np.ndarray:
    """Returns (A,) of the agents, episode by episode of one environment each."""
    envs = make(TAG, episodes)
    obs, info = envs.reset(seed=seed)
    acts = [cleanmarl.load(run, greedy=True).act if run else None for run in (chasers, prey)]
    total, done = 0, np.ones(episodes, bool)
    for _ in range(25):
        action = np.zeros((episodes, 4), np.int64)
        for agents, act in zip(([0, 1, 2], [3]), acts):
            action[:, agents] = act(obs, info, done)[:, agents]
        obs, reward, termination, truncation, info = envs.step(action)
        total, done = total + reward, termination | truncation
    assert truncation.all()
    return total.mean(0)


def test_a_cell_is_what_the_two_sides_play(runs, tmp_path):
    done = command(
        runs, "--side", "0", "1", "2", "--names", "predators", "prey", "--out", tmp_path / "who", "--episodes", "32"
    )
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tmp_path / "data" / "who.csv").set_index(["predators", "prey"])
    names = ["ippo", "mappo", "at random"]
    assert list(rows.index) == [(one, other) for one in names for other in names]
    assert rows.pairs.tolist() == [2, 2, 2, 2, 2, 2, 2, 2, 1]  # never of the same seed; at random with all
    folder = {(path.name.split("__")[1], path.name.split("__")[2]): path for path in runs.glob("*__*")}
    for one in ("ippo", "mappo"):
        for other in ("ippo", "mappo"):
            pairs = [
                returns_by_hand(folder[one, seed], folder[other, rest], 32, 1)
                for seed, rest in (("1", "2"), ("2", "1"))
            ]
            cell = rows.loc[one, other]
            np.testing.assert_allclose(cell["return"], np.mean(pairs, axis=0)[:3].mean(), atol=1e-3)
            np.testing.assert_allclose(cell["other return"], np.mean(pairs, axis=0)[3], atol=1e-3)
            np.testing.assert_allclose(cell["std"], np.std([pair[:3].mean() for pair in pairs]), atol=1e-3)
            np.testing.assert_allclose(cell["other std"], np.std([pair[3] for pair in pairs]), atol=1e-3)
    page = (tmp_path / "who.md").read_text()
    assert done.stdout == f"{page}\n" and "| predators of, against prey of | ippo | mappo | at random |" in page
    assert (tmp_path / "who.svg").exists()


def test_who_plays_at_random_takes_legal_actions_alike():
    mask = np.ones((20_000, 2, 3), bool)
    mask[:, 1, 0] = False
    action = cross_play.at_random(np.zeros((20_000, 2, 1)), {"action_mask": mask}, np.zeros(20_000, bool))
    shares = np.stack([(action == k).mean(0) for k in range(3)])
    np.testing.assert_allclose(shares, [[1 / 3, 0], [1 / 3, 1 / 2], [1 / 3, 1 / 2]], atol=0.02)


def test_what_cannot_play_is_told_in_a_line(runs, tmp_path):
    def said(*folders: Path, side=(0,)) -> str:
        with pytest.raises(UsageError) as error:
            cross_play.main(cross_play.Args(list(folders), list(side), ("some", "others"), tmp_path / "who"))
        return str(error.value)

    for side in ([0, 1, 2, 3], [4], []):
        assert said(runs, side=side) == f"--side {side} must be some, not all, of the agents 0 to 3"
    with pytest.raises(UsageError, match="--names prey prey are the same"):
        cross_play.main(cross_play.Args([runs], [0], ("prey", "prey"), tmp_path / "who"))
    with pytest.raises(UsageError, match="--names prey episodes: the table has a column episodes already"):
        cross_play.main(cross_play.Args([runs], [0], ("prey", "episodes"), tmp_path / "who"))
    with pytest.raises(UsageError, match=r"--out \. has no name for the figure: give FOLDER/NAME"):
        cross_play.main(cross_play.Args([runs], [0], ("prey", "others"), Path()))
    wider = tmp_path / "wider"
    shutil.copytree(runs, wider)
    ippo.main(ippo.Args(**SHORT, actor_hidden_dim=8, seed=3, runs_dir=str(wider)))
    assert said(wider) == "the runs of ippo have different settings"
    assert said(runs, runs) == "there are two runs of ippo with seed 1"
    stopped = tmp_path / "stopped"
    shutil.copytree(runs, stopped)
    for done in stopped.glob("*/done.json"):
        done.unlink()
    assert said(stopped) == f"no finished run in {stopped}"
    alone = tmp_path / "alone"
    ippo.main(ippo.Args(**SHORT, runs_dir=str(alone)))
    assert said(alone) == "ippo has one seed, and nobody else to play against"
    ippo.main(ippo.Args(**SHORT | {"env_id": "mpe/simple_spread_v3"}, runs_dir=str(alone)))
    assert said(alone) == f"the runs are of 2 environments: mpe/simple_spread_v3, {TAG}"
    pole = tmp_path / "pole"
    ppo.main(ppo.Args(total_timesteps=1024, num_steps=64, eval_episodes=0, runs_dir=str(pole)))
    assert said(pole) == "CartPole-v1 is no game of several agents with discrete actions"
    done = command(tmp_path, "--side", "0", "--names", "some", "others", "--out", tmp_path / "who")
    assert (done.returncode, done.stderr) == (2, f"cross_play: no finished run in {tmp_path}\n")
    assert not list(tmp_path.glob("**/who*"))
    done = command(runs, "--side", "3", "--names", "prey", "others", "--episodes", "1", "--out", "/proc/x/who")
    assert done.returncode == 1 and done.stderr.startswith("cross_play: [Errno ") and done.stderr.count("\n") == 1


def test_a_pair_plays_all_the_episodes_of_this_seed(tmp_path, monkeypatch):
    """More than there are environments, too."""
    played = []

    def evaluation(envs, policy, num_episodes, seed):
        played.append((num_episodes, seed))
        return evaluate(envs, policy, num_episodes, seed)

    evaluate = cross_play.evaluate
    monkeypatch.setattr(cross_play, "evaluate", evaluation)
    args = cross_play.Args([], [0, 1, 2], ("predators", "prey"), tmp_path / "who", episodes=5, seed=7)
    cross_play.cross_play({cross_play.RANDOM: [cross_play.at_random]}, make(TAG, 2), args)
    assert played == [(5, 7)]
