"""The benchmark tools on real event files and real processes: the runner, the plots and the speed harness."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorboard")
pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

from torch.utils.tensorboard import SummaryWriter  # noqa: E402

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))
import hand_written  # noqa: E402
import plot  # noqa: E402
import redraw  # noqa: E402
import speed  # noqa: E402

sys.path.remove(str(BENCHMARK))  # its run.py must not stand in for another module of that name


def write_run(
    folder: Path, points: dict[str, list], seed=1, script="ppo", env_id="CartPole-v1", done=True, **args
) -> Path:
    """A run folder like a script's, with points = tag -> [(step, value), ...]."""
    folder.mkdir(parents=True)
    meta = {"script": script, "args": {"env_id": env_id, "seed": seed, **args}}
    (folder / "args.json").write_text(json.dumps(meta))
    with SummaryWriter(str(folder)) as writer:
        for tag, values in points.items():
            for step, value in values:
                writer.add_scalar(tag, value, step)
    if done:
        (folder / "done.json").write_text("{}")
    return folder


def cli(script: str, *argv, cwd: Path, **kwargs) -> subprocess.CompletedProcess:
    argv = [sys.executable, str(BENCHMARK / script), *map(str, argv)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120, **kwargs)


# plot.py


def test_read_run_gives_a_tidy_table_of_all_points(tmp_path):
    points = [(step, step / 10) for step in range(0, 21_000, 2)]  # more than EventAccumulator keeps by default
    table = plot.read_run(write_run(tmp_path / "a", {"x": points, "y": [(7, 1.0)]}, seed=3), ["x", "y", "absent"])
    assert list(table.columns) == ["env_id", "script", "seed", "tag", "step", "value"]
    assert table[table.tag == "x"].step.tolist() == [step for step, _ in points]
    np.testing.assert_allclose(table[table.tag == "x"].value, [value for _, value in points], rtol=1e-6)
    assert table[table.tag == "y"].iloc[0].tolist() == ["CartPole-v1", "ppo", 3, "y", 7, 1.0]


def test_points_that_a_resumed_run_wrote_twice_count_once(tmp_path):
    folder = write_run(tmp_path / "a", {"x": [(10, 1.0), (20, 2.0), (30, 3.0)]})
    time.sleep(1.1)  # event files are told apart, and put in order, by the second
    with SummaryWriter(str(folder), purge_step=21) as writer:  # resumed from a checkpoint at step 20
        for step, value in [(30, -3.0), (40, -4.0)]:
            writer.add_scalar("x", value, step)
    table = plot.read_run(folder, ["x"])
    assert table.step.tolist() == [10, 20, 30, 40]
    assert table.value.tolist() == [1.0, 2.0, -3.0, -4.0]


def test_points_are_interpolated_onto_the_steps_that_all_seeds_cover():
    points = [(1, 0, 0.0), (1, 100, 10.0), (2, 20, 40.0), (2, 80, 100.0), (2, 120, 140.0)]  # values s / 10 and 20 + s
    rows = [("e", "ppo", seed, "x", step, value) for seed, step, value in points]
    thin = plot.thin(pd.DataFrame(rows, columns=["env_id", "script", "seed", "tag", "step", "value"]))
    assert len(thin) == 2 * plot.GRID_POINTS
    curve = plot.summary(thin)
    grid = curve.step.to_numpy()
    assert (grid[0], grid[-1], len(grid)) == (20, 100, plot.GRID_POINTS) and set(curve.seeds) == {2}
    np.testing.assert_allclose(curve["mean"], (grid / 10 + 20 + grid) / 2)
    np.testing.assert_allclose(curve.low, grid / 10)  # of two seeds, the bootstrap draws one twice half of the time
    np.testing.assert_allclose(curve.high, 20 + grid)
    assert plot.summary(curve) is curve  # as data that were read back from a figure are


def test_interval_agrees_with_rliable():
    library = pytest.importorskip("rliable.library")
    values = np.random.default_rng(0).normal(size=(6, 3)) * [1, 10, 100]
    scores = {"a": values[:, None]}  # (runs, tasks, points)
    _, ends = library.get_interval_estimates(scores, lambda s: s.mean(axis=(0, 1)), reps=2000)
    mean, low, high = plot.interval(values)
    np.testing.assert_allclose(mean, values.mean(0))
    width = high - low
    assert (np.abs(low - ends["a"][0]) < 0.1 * width).all() and (np.abs(high - ends["a"][1]) < 0.1 * width).all()


def test_interval_of_one_seed_is_unknown():
    mean, low, high = plot.interval(np.array([[3.0, 4.0]]))
    assert mean.tolist() == [3.0, 4.0]
    assert np.isnan(low).all() and np.isnan(high).all()


def test_last_return_weighs_points_by_their_episodes():
    returns = [(10, 1.0), (20, 2.0), (40, 4.0)]
    counts = [(10, 200), (20, 270), (30, 270), (40, 310)]  # 200, 70, 0 and 40 episodes; none ended up to step 30
    rows = [(plot.RETURN, *p) for p in returns] + [(plot.NUM_EPISODES, *p) for p in counts]
    run = pd.DataFrame(rows, columns=["tag", "step", "value"])
    assert plot.last_return(run) == pytest.approx((40 * 4.0 + 60 * 2.0) / 100)
    assert plot.last_return(run, 150) == pytest.approx((40 * 4.0 + 70 * 2.0 + 40 * 1.0) / 150)
    assert plot.last_return(run, 1000) == pytest.approx((40 * 4.0 + 70 * 2.0 + 200 * 1.0) / 310)  # fewer: all of them
    assert np.isnan(plot.last_return(run[run.tag == plot.NUM_EPISODES]))


def test_plot_writes_curves_and_tables(tmp_path):
    for env_id in ("CartPole-v1", "mpe/simple_spread_v3"):
        for seed in (1, 2, 3):
            steps = range(512, 300_000, 512)
            points = {
                plot.RETURN: [(s, seed + np.sin(s) * (s < 290_000)) for s in steps],
                plot.NUM_EPISODES: [(s, s // 8) for s in steps],
            }
            points[plot.EVAL] = [(1000, 0.0), (2000, 10.0 * seed)]
            write_run(tmp_path / "runs" / f"{env_id[:4]}{seed}", points, seed=seed, env_id=env_id)
    broken = write_run(tmp_path / "runs" / "unfinished", {plot.RETURN: [(512, 1e6)]}, seed=4, done=False)
    flags = ["--line", "CartPole-v1:random=22.5", "--note", "the defaults", "--command", "benchmark/x.sh"]
    result = cli("plot.py", "runs", "--out", "docs/a.b", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert str(broken.relative_to(tmp_path)) in result.stderr
    picture, caption, table = (tmp_path / "docs" / "a.b.md").read_text().split("\n\n")
    assert picture == "![a.b](a.b.svg)" and table == result.stdout
    for part in ("mean of 3 seeds", "interval, which for 3 seeds is their range", "The defaults.", "benchmark/x.sh"):
        assert part in caption
    assert "Dashed: random 22.5." in caption
    row = next(line for line in table.splitlines() if "CartPole-v1" in line)
    assert "| ppo | 3 | 299520 | 2.00 [1.00, 3.00] |" in row and "| 20.0 [10.0, 30.0] |" in row
    data = pd.read_csv(tmp_path / "docs" / "data" / "a.b.csv")
    assert set(data.seed) == {1, 2, 3} and len(data) == 2 * 3 * (plot.GRID_POINTS + 2)
    svg = (tmp_path / "docs" / "a.b.svg").read_text()
    assert svg.count("environment steps") == 2 and svg.count(">random<") == 1 and "ppo (3 seeds)" in svg
    assert len(svg) < 200_000

    drawn = {path.name: path.read_bytes() for path in (tmp_path / "docs").glob("a.b.*")}
    for path in (tmp_path / "docs").glob("a.b.*"):
        path.unlink()
    plot.redraw(tmp_path / "docs" / "a.b")  # from the data alone
    assert {path.name: path.read_bytes() for path in (tmp_path / "docs").glob("a.b.*")} == drawn

    assert cli("plot.py", "runs", "--out", "docs/a.b", "--unfinished", cwd=tmp_path).returncode == 0
    assert set(pd.read_csv(tmp_path / "docs" / "data" / "a.b.csv").seed) == {1, 2, 3, 4}


def test_plot_groups_by_a_flag_and_refuses_one_seed_twice(tmp_path):
    for num_envs in (4, 8):
        write_run(tmp_path / f"runs/{num_envs}", {plot.RETURN: [(1, 0.0), (2, num_envs)]}, num_envs=num_envs)
    refused = cli("plot.py", "runs", "--out", "a", cwd=tmp_path)
    assert refused.returncode == 1 and "two runs of" in refused.stderr and not (tmp_path / "data").exists()
    assert cli("plot.py", "runs", "--out", "a", "--group-by", "num_envs", cwd=tmp_path).returncode == 0
    assert set(pd.read_csv(tmp_path / "data" / "a.csv").script) == {"ppo num_envs=4", "ppo num_envs=8"}


# redraw.py


def comparable(path: Path) -> tuple[str, np.ndarray]:
    """A file's text without numbers and the names that an SVG makes from them, and its numbers."""
    text = re.sub(r"\b[mp][0-9a-f]{10}\b", "", path.read_text())
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    return re.sub(number, "0", text), np.array([float(x) for x in re.findall(number, text)])


def test_published_figures_and_tables_are_redrawn_from_their_data(tmp_path):
    published = BENCHMARK.parent / "docs" / "results"
    shutil.copytree(published / "data", tmp_path / "results" / "data")
    redraw.main(redraw.Args(tmp_path / "results"))
    files = {path.name for path in published.iterdir() if path.is_file()}
    assert files == {path.name for path in (tmp_path / "results").iterdir() if path.is_file()} and len(files) > 80
    for name in files:
        if name.endswith(".md"):
            assert (tmp_path / "results" / name).read_text() == (published / name).read_text()
        else:  # another machine may round otherwise
            (text, numbers), (published_text, published_numbers) = map(
                comparable, (tmp_path / "results" / name, published / name)
            )
            assert text == published_text, name
            np.testing.assert_allclose(numbers, published_numbers, atol=0.01, err_msg=name)


def test_every_learning_curve_says_its_settings_and_its_commands():
    data = BENCHMARK.parent / "docs" / "results" / "data"
    for name, figure in json.loads((data / "figures.json").read_text()).items():
        assert figure["note"] and (BENCHMARK.parent / figure["command"]).exists(), name
        assert (data / f"{name}.csv").stat().st_size < 300_000, name


# run.py

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

arg = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(arg["--resume"]) if "--resume" in arg else (
    Path(arg["--runs-dir"]) / f"{arg['--env-id'].replace('/', '-')}__toy__{arg['--seed']}__{time.time_ns()}")
print(f"run folder: {folder}" + (" (resumed at step 1,000)" if "--resume" in arg else ""), flush=True)
folder.mkdir(parents=True, exist_ok=True)
if "--resume" not in arg:
    meta = {"script": "toy", "args": arg, "threads": os.environ["OMP_NUM_THREADS"]}
    (folder / "args.json").write_text(json.dumps(meta))
args = json.loads((folder / "args.json").read_text())["args"]

def stop(*_):
    (folder / "checkpoint.pt").write_text("saved")
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
if Path("crash").exists() and args["--seed"] == "2":
    raise RuntimeError("the environment died")
(folder / "started").touch()
if Path("slow").exists():
    time.sleep(60)
(folder / "checkpoint.pt").write_text("saved")
(folder / "done.json").write_text("{}")
"""


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy.py").write_text(SCRIPT)
    return tmp_path


def run_cli(toy: Path, *flags, num_seeds=2, env_ids=("a/b",)) -> subprocess.CompletedProcess:
    argv = ["--command", "python toy.py", "--env-ids", *env_ids, "--num-seeds", num_seeds, "--workers", 2]
    return cli("run.py", *argv, *(["--", *flags] if flags else []), cwd=toy)


def manifest(toy: Path) -> dict:
    return json.loads((toy / "runs" / "manifest.json").read_text())


def folders(toy: Path) -> list[Path]:
    return sorted(path.parent for path in (toy / "runs").glob("*/args.json"))


def test_runner_runs_every_trial_once(toy):
    result = run_cli(toy, "--lr", "0.1", env_ids=("a/b", "c"))
    assert result.returncode == 0, result.stderr
    assert "4 of 4 trials finished" in result.stdout and result.stdout.count(": finished after") == 4
    metas = [json.loads((folder / "args.json").read_text()) for folder in folders(toy)]
    assert {(m["args"]["--env-id"], m["args"]["--seed"]) for m in metas} == {(e, s) for e in ("a/b", "c") for s in "12"}
    assert all(m["args"]["--lr"] == "0.1" and m["threads"] == "1" for m in metas)
    entry = manifest(toy)["python toy.py --env-id a/b --seed 2 --lr 0.1"]
    assert (entry["command"], entry["env_id"], entry["seed"]) == ("python toy.py", "a/b", 2)
    assert (entry["flags"], entry["status"], entry["exit_status"]) == (["--lr", "0.1"], "finished", 0)
    assert Path(toy / entry["run_folder"], "done.json").exists() and entry["start"] <= entry["end"]
    assert {"git_commit", "machine"} <= set(entry) and entry["machine"]["cores"] >= 1
    assert "run folder: " in (toy / entry["log"]).read_text()

    again = run_cli(toy, "--lr", "0.1", env_ids=("a/b", "c"))
    assert again.returncode == 0 and again.stdout.count("skipped") == 4 and len(folders(toy)) == 4
    other_flags = run_cli(toy, "--lr", "0.2")
    assert other_flags.returncode == 0 and "skipped" not in other_flags.stdout and len(folders(toy)) == 6


def test_runner_reports_a_failed_trial_and_repeats_only_that_one(toy):
    (toy / "crash").touch()
    result = run_cli(toy, num_seeds=3)
    assert result.returncode == 1
    assert "seed 2: failed" in result.stdout and "the environment died" in result.stdout
    entries = manifest(toy)
    assert {e["seed"]: e["status"] for e in entries.values()} == {1: "finished", 2: "failed", 3: "finished"}
    assert entries["python toy.py --env-id a/b --seed 2"]["exit_status"] == 1
    (toy / "crash").unlink()
    again = run_cli(toy, num_seeds=3)
    assert again.returncode == 0 and again.stdout.count("skipped") == 2
    assert len(folders(toy)) == 4  # without a checkpoint it started anew, and the broken folder stays


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_runner_passes_a_signal_on_and_resumes(toy, signum):
    (toy / "slow").touch()
    argv = [sys.executable, BENCHMARK / "run.py", "--command", "python toy.py", "--env-ids", "e", "--num-seeds", "3"]
    runner = subprocess.Popen([*argv, "--workers", "2"], cwd=toy, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: len(list((toy / "runs").glob("*/started"))) == 2)
    second = cli("run.py", "--command", "python toy.py", "--env-ids", "e", "--num-seeds", "1", cwd=toy)
    assert second.returncode == 1 and "already running" in second.stdout and len(folders(toy)) == 2
    os.kill(runner.pid, signum)
    output, _ = runner.communicate(timeout=30)
    assert runner.returncode == 128 + signum, output
    entries = manifest(toy)
    assert sorted((e["seed"], e["status"], e["exit_status"]) for e in entries.values()) == [
        (1, "interrupted", 143),
        (2, "interrupted", 143),
    ]
    interrupted = folders(toy)
    assert all((folder / "checkpoint.pt").exists() for folder in interrupted)  # each had the time to save

    (toy / "slow").unlink()
    result = cli("run.py", "--command", "python toy.py", "--env-ids", "e", "--num-seeds", "3", cwd=toy)
    assert result.returncode == 0, result.stdout
    assert len(folders(toy)) == 3 and all((folder / "done.json").exists() for folder in interrupted)
    assert {e["status"] for e in manifest(toy).values()} == {"finished"}


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def test_runner_refuses_what_cannot_run(toy):
    result = cli("run.py", "--command", "no-such-program x.py", "--env-ids", "e", cwd=toy)
    assert result.returncode == 2 and "no-such-program" in result.stderr and not (toy / "runs").exists()
    result = cli("run.py", "--command", "python toy.py", "--env-ids", "e", "--workers", "0", cwd=toy)
    assert result.returncode == 2 and not (toy / "runs").exists()


# speed.py

BUSY = """
import subprocess, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
if sys.argv[1] == "child":
    burn(float(sys.argv[2]))
else:
    burn(0.5)  # start-up, which must cancel out
    subprocess.run([sys.executable, __file__, "child", str(float(sys.argv[1]) / float(sys.argv[2]))], check=True)
"""


def test_speed_cancels_start_up_and_counts_children(tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    rates = speed.measure(f"python {tmp_path / 'busy.py'} {{steps}} 1000", steps=800, short=0.25, seed=1)
    assert 800 < rates["CPU-second"] < 1200  # 1000 steps per CPU-second, burnt by a grandchild
    assert rates["CPU-second, end to end"] < 700  # 0.8 s of work + 0.5 s of start-up


def test_speed_compares_two_commands(tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    argv = ["--ours", "python busy.py {steps} 1000", "--peer", "python busy.py {steps} 250", "--steps", "600"]
    result = cli("speed.py", *argv, "--peer-steps", "150", "--repeats", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    cells = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
        for line in result.stdout.splitlines()[:5]
    }
    assert cells["ours"][0] == "600" and cells["peer"][0] == "150"
    per_cpu_second = cells["steps per"].index("CPU-second")
    assert 2.5 < float(cells["ours / peer"][per_cpu_second].split()[0]) < 6
    order = [line.split()[2] for line in result.stderr.splitlines() if line.startswith("repeat")]
    assert order == ["ours:", "peer:", "peer:", "ours:"]
    assert "2 cores" in result.stdout or f"{os.cpu_count()} cores" in result.stdout


def test_speed_stops_at_a_command_that_fails(tmp_path):
    (tmp_path / "bad.py").write_text("raise ValueError('no such flag')")
    result = cli("speed.py", "--ours", "python bad.py {steps}", cwd=tmp_path)
    assert result.returncode == 1 and "no such flag" in result.stderr


ROLLOUT = """
import gymnasium as gym, numpy as np, time
def burn(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def reset(self, **kwargs):
        return 0, {}
    def step(self, action):
        burn(0.1)  # long beside what a busy machine takes away at a time
        return 0, 0.0, False, False, {}
def collect(envs):
    for _ in range(4):
        burn(0.05)
        envs.step(np.zeros(1, int))
def update():
    burn(0.2)
def main():
    envs = gym.vector.SyncVectorEnv([Env])
    envs.reset()
    collect(envs)
    update()
    for _ in range(2):  # an evaluation, 0.2 s: neither env nor forward
        envs.step(np.zeros(1, int))
burn(0.3)  # imports: not counted
if __name__ == "__main__":
    main()
"""


def test_profile_splits_the_time_of_main(tmp_path):
    script = tmp_path / "rollout.py"
    script.write_text(ROLLOUT)
    spent = speed.split_time(f"python {script} {{steps}}", steps=1)
    total = sum(spent.values())
    shares = {part: seconds / total for part, seconds in spent.items()}
    want = {"env": 0.40, "forward": 0.20, "update": 0.20, "other": 0.20}
    assert shares == pytest.approx(want, abs=0.08) and total == pytest.approx(1.0, abs=0.3)

    script.write_text(ROLLOUT.replace("def collect", "def gather").replace("collect(envs)", "gather(envs)"))
    spent = speed.split_time(f"python {script} {{steps}}", steps=1)
    assert spent["forward"] == 0 and spent["env"] > 0.3  # no function named collect: env is still known


def test_hand_written_listener_goes_where_the_speaker_knows():
    still, way = np.zeros((4, 2)), np.array([[-1.0, 0], [1, 0], [0, -1], [0, 1]])
    assert hand_written.plan(still, way).tolist() == [1, 2, 3, 4]
    told, not_told = (hand_written.play(hand_written.Args(num_episodes=256), told) for told in (True, False))
    assert told.shape == (256,)
    assert -40 < not_told.mean() < -25 < told.mean() < -10  # a random pair has -79.5


def test_hand_written_listener_knows_the_physics():
    envs = hand_written.make("mpe/simple_speaker_listener_v4", 5)
    obs, _ = envs.reset(seed=1)
    action = np.stack([np.zeros(5, int), np.arange(5)], axis=1)
    for _ in range(3):
        before, (obs, *_) = obs, envs.step(action)
        velocity = before[:, 1, :2] * hand_written.DAMPING + hand_written.ACTIONS * hand_written.DT
        np.testing.assert_allclose(obs[:, 1, :2], velocity, atol=1e-6)
        way, way_before = obs[:, 1, 2:4], before[:, 1, 2:4]
        np.testing.assert_allclose(way, way_before - before[:, 1, :2] * hand_written.DT, atol=1e-6)
