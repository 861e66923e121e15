"""The trained agents that are given away: they play as their table says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cleanmarl
from cleanmarl import ppo
from cleanmarl.cli import UsageError
from cleanmarl.evaluate import evaluate

import optional
import pytest
from toys import wait_for

BENCHMARK = Path(__file__).parents[1] / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import keep  # noqa: E402

AGENTS = sorted(path.parent for path in BENCHMARK.glob("agents/*/scores.json"))
NEEDS = {"HalfCheetah": "mujoco", "LunarLander": "Box2D", "lbf/": "lbforaging", "rware/": "rware", "ALE/": "ale_py"}
NEEDS |= {"SpaceInvaders-v5": "envpool"}


@pytest.mark.parametrize("folder", AGENTS, ids=lambda folder: folder.name)
def test_scores_are_those_of_the_table(folder):
    """Within four standard errors, by other episodes than the table's."""
    scores = json.loads((folder / "scores.json").read_text())
    for part, package in NEEDS.items():
        if part in scores["env_id"]:
            optional.need(package)
    policy = cleanmarl.load(folder, num_envs=10)
    num_episodes = 10 if "-v5" in scores["env_id"] and "Half" not in scores["env_id"] else 20  # games of Atari are long
    played = evaluate(policy.envs, policy, num_episodes, seed=7)
    policy.envs.close()
    mean, std = scores["most probable"]
    assert abs(played["eval/ep_reward"] - mean) <= 4 * max(std, 0.05 * abs(mean)) / num_episodes**0.5
    row = f"| {folder.name} | `{scores['env_id']}` | `{scores['script']}` | {scores['step']:,} |"
    assert row in (folder.parent / "README.md").read_text()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000


def test_a_run_is_kept_without_its_optimizer_and_plays(tmp_path):
    args = ppo.Args(total_timesteps=1024, num_steps=64, eval_episodes=0, runs_dir=str(tmp_path / "runs"))
    run = ppo.main(args)
    command = [sys.executable, BENCHMARK / "keep.py", run, "--out", tmp_path / "agents" / "pole", "--episodes", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    out = tmp_path / "agents" / "pole"
    assert "| pole | `CartPole-v1` | `ppo` | 1,024 | 10 |" in done.stdout
    assert (out / "checkpoint.pt").stat().st_size < (run / "checkpoint.pt").stat().st_size / 2
    assert str(tmp_path) not in (out / "args.json").read_text()
    weights = [dict(cleanmarl.load(folder).agent.named_parameters()) for folder in (run, out)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    resumed = subprocess.run(
        [sys.executable, ppo.__file__, "--resume", out, "--total-timesteps", "2048"], capture_output=True, text=True
    )
    assert resumed.returncode == 2 and resumed.stderr.count("\n") == 1 and not list(out.glob("events*"))
    assert not (out / "ppo.py").exists()
    unedited = (run / "ppo.py").read_text()
    for text, is_kept in [(f"{unedited}# edited\n", True), (unedited, False)]:  # an edited one is played by
        (run / "ppo.py").write_text(text)
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # playing it leaves __pycache__ there
        subprocess.run(command, capture_output=True, check=True, env=env)
        assert (out / "ppo.py").exists() == is_kept and (not is_kept or (out / "ppo.py").read_text() == text)
        (out / "scores.json").unlink()  # as if it had been interrupted
    subprocess.run(command, capture_output=True, check=True)
    was = (out / "checkpoint.pt").stat().st_ino
    long = subprocess.Popen([*command[:-1], "1000000"], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (out / "checkpoint.pt").stat().st_ino != was)
    finally:
        long.kill()
        long.wait()
    assert not (out / "scores.json").exists()  # which were those of another network
    other = tmp_path / "agents" / "another" / "scores.json"
    other.parent.mkdir()
    for text in ("", '{"sampled": [1, 2]}', "[]"):
        other.write_text(text)
        with pytest.raises(UsageError, match=f"{other} is damaged"):
            keep.table(out.parent)
    other.unlink()
    (tmp_path / "README.md").write_text("# My thesis\n")
    mine = subprocess.run([*command[:3], "--out", tmp_path / "mine"], capture_output=True, text=True)
    assert mine.returncode == 2 and mine.stderr.count("\n") == 1 and "no table of agents" in mine.stderr
    assert (tmp_path / "README.md").read_text() == "# My thesis\n" and not (tmp_path / "mine").exists()
    with pytest.raises(UsageError, match="--episodes must be greater than 0, not 0"):
        keep.main(keep.Args(run, out, episodes=0))
    (tmp_path / "README.md").unlink()
    full = subprocess.run([*command[:3], "--out", "/proc/agents/pole"], capture_output=True, text=True)
    assert full.returncode == 1 and full.stderr.startswith("keep: [Errno ") and full.stderr.count("\n") == 1
    for place in (tmp_path, run):
        with pytest.raises(UsageError, match=f"--out {place} is there, and no agent"):
            keep.main(keep.Args(run, place))
