"""The report on real event files: the tidy table, the statistics, and figures, tables and page, twice the same."""

import fcntl
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cleanmarl.cli import UsageError

import numpy as np
import optional
import pytest

pd = pytest.importorskip("pandas", reason=optional.reason("pandas"))
pytest.importorskip("matplotlib", reason=optional.reason("matplotlib"))
pytest.importorskip("scipy", reason=optional.reason("scipy"))

from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from toys import largest_file  # noqa: E402

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))
import redraw  # noqa: E402
import report  # noqa: E402

sys.path.remove(str(BENCHMARK))  # its run.py must not stand in for another module of that name
TASKS = ("CartPole-v1", "mpe/simple_spread_v3")  # both have a random and a best-known score


def write_run(folder: Path, points: dict[str, list], seed=1, script="toy", env_id=TASKS[0], done=True, **args) -> Path:
    """A run folder like a script's, with points = metric -> [(step, value), ...]."""
    folder.mkdir(parents=True)
    meta = {"script": script, "args": {"env_id": env_id, "seed": seed, "total_timesteps": 1000, **args}}
    (folder / "args.json").write_text(json.dumps(meta))
    with SummaryWriter(str(folder)) as writer:
        for metric, values in points.items():
            for step, value in values:
                writer.add_scalar(metric, value, step)
    if done:
        (folder / "done.json").write_text("{}")
    return folder


# The tidy table


def test_read_run_gives_a_tidy_table_of_all_points(tmp_path):
    points = [(step, step / 10) for step in range(0, 21_000, 2)]  # more than EventAccumulator keeps by default
    table = report.read_run(write_run(tmp_path / "a", {"x": points, "y": [(7, 1.0)]}, seed=3), ["x", "y", "absent"])
    assert list(table.columns) == report.COLUMNS
    assert table[table.metric == "x"].step.tolist() == [step for step, _ in points]
    np.testing.assert_allclose(table[table.metric == "x"].value, [value for _, value in points], rtol=1e-6)
    row = table[table.metric == "y"].iloc[0]
    assert row[["script", "env_id", "seed", "step", "value"]].tolist() == ["toy", "CartPole-v1", 3, 7, 1.0]


def test_points_that_a_resumed_run_wrote_twice_count_once(tmp_path):
    folder = write_run(tmp_path / "a", {"x": [(10, 1.0), (20, 2.0), (30, 3.0)]})
    time.sleep(1.1)  # event files are told apart, and put in order, by the second
    with SummaryWriter(str(folder), purge_step=21) as writer:  # resumed from a checkpoint at step 20
        for step, value in [(30, -3.0), (40, -4.0)]:
            writer.add_scalar("x", value, step)
    table = report.read_run(folder, ["x"])
    assert table.step.tolist() == [10, 20, 30, 40]
    assert table.value.tolist() == [1.0, 2.0, -3.0, -4.0]


def test_settings_are_the_flags_that_differ_from_the_copy_of_the_script(tmp_path):
    fields = ["env_id: str = 'e'", "lr: float = 0.1", "sizes: tuple[int, ...] = (1, 2)", "norm_adv: bool = True"]
    fields += ["share: bool = False", "total_timesteps: int = 5", "num_workers: int = 0", "seed: int = 1"]
    (tmp_path / "x.py").write_text("class Args(RunArgs):\n" + "".join(f"    {field}\n" for field in fields))

    def settings(**args):
        return report.settings_of({"script": "x", "args": args}, tmp_path)

    unchanged = {"env_id": "f", "total_timesteps": 9, "num_workers": 3, "seed": 2, "device": "cuda"}
    assert settings(lr=0.1, sizes=[1, 2], **unchanged) == "the defaults"
    assert settings(lr=0.2, sizes=[1, 2], norm_adv=False, share=True, **unchanged) == "--lr 0.2 --no-norm-adv --share"
    assert settings(sizes=[3, 4]) == "--sizes 3 4"
    assert report.settings_of({"script": "ippo", "args": {"gamma": 0.5}}, tmp_path) == "--gamma 0.5"  # no copy: ours

    def decided(**meta):  # a script that decides by the environment whether each agent has a critic
        meta |= {"script": "maddpg", "args": {"individual_critics": False}}
        return report.settings_of(meta, tmp_path)

    assert decided(command=["dir/maddpg.py", "--seed", "2"]) == "the defaults"
    given = [["--no-individual-critics"], ["--individual-critics", "False"], ["--individual-critics=False"]]
    for words in (*given, ["--no_individual_critics"], ["--individual_critics=False"]):
        assert decided(command=["dir/maddpg.py", *words]) == "--no-individual-critics"
    assert decided(command=["sweep.py", "--seed", "2"]) == "--no-individual-critics"  # main(Args(...)) in Python
    assert decided() == "--no-individual-critics"  # nobody knows


def test_settings_of_a_copy_that_inherits_its_fields(tmp_path):
    text = (
        "class Encoder(RunArgs):\n    width: int = 64\n    lr: float = 0.1\nclass Args(Encoder):\n    lr: float = 0.2\n"
    )
    (tmp_path / "x.py").write_text(text)
    meta = {"script": "x", "args": {"width": 8, "lr": 0.2}}
    assert report.settings_of(meta, tmp_path) == "--width 8"
    assert report.settings_of(meta | {"args": {"width": 64, "lr": 0.1}}, tmp_path) == "--lr 0.1"


def test_settings_of_a_copy_that_inherits_from_a_script_that_it_imports(tmp_path):
    """Its defaults are not known: what the command gives counts, so that two settings are two curves."""
    (tmp_path / "x.py").write_text("from cleanmarl import ppo\nclass Args(ppo.Args):\n    mine: float = 0.5\n")
    meta = {"script": "x", "args": {"mine": 0.5, "learning_rate": 1e-3, "gamma": 0.99, "total_timesteps": 5}}
    command = ["x.py", "--learning-rate", "1e-3", "--total-timesteps", "5"]
    assert report.settings_of(meta | {"command": command}, tmp_path) == "--learning-rate 0.001"
    assert report.settings_of(meta, tmp_path) == "--gamma 0.99 --learning-rate 0.001"  # from Python: nobody knows


@pytest.mark.parametrize("manifest", ['{"python x.py": {"tries"', "[]", '{"a": 3}'])
def test_runs_that_are_no_longer_whole(manifest, tmp_path, capsys):
    """Half a manifest, or something else, costs the CPU time alone; arguments without an environment are no run."""
    write_run(tmp_path / "whole", {report.RETURN: [(1, 2.0), (2, 3.0)]})
    write_run(tmp_path / "half", {report.RETURN: [(1, 2.0)]}, seed=2)
    (tmp_path / "manifest.json").write_text(manifest)
    meta = json.loads((tmp_path / "half" / "args.json").read_text())
    del meta["args"]["env_id"]
    (tmp_path / "half" / "args.json").write_text(json.dumps(meta))
    table = report.read_runs([tmp_path], [report.RETURN])
    assert table.value.tolist() == [2.0, 3.0] and table.cpu_seconds.isna().all()
    assert capsys.readouterr().err == f"left out: {tmp_path / 'half'} has no env_id or seed among its arguments\n"


def test_a_computed_default_is_read_without_running_it(tmp_path):
    fields = "    size: int = 2 * 64\n    total_timesteps: PositiveInt = 5 * 10**5\n    gamma: float = 0.99\n"
    (tmp_path / "x.py").write_text(f"class Args(RunArgs):\n{fields}")
    args = {"size": 128, "total_timesteps": 500_000, "gamma": 0.99}
    meta = {"script": "x", "args": args}
    assert report.settings_of(meta | {"command": ["x.py"]}, tmp_path) == "the defaults"
    assert report.settings_of(meta | {"command": ["x.py", "--size", "128"]}, tmp_path) == "--size 128"
    assert report.settings_of(meta, tmp_path) == "--size 128"  # nobody knows


def test_seconds_are_those_of_the_manifest_without_the_time_between_two_tries(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    tries = [{"start": 1000.0, "wall_seconds": 50.0, "cpu_seconds": 1.0}]  # failed, in another folder
    tries += [{"start": 2000.0, "wall_seconds": 100.0, "cpu_seconds": 80.0}]
    tries += [{"start": 3000.0, "wall_seconds": 10.0, "cpu_seconds": 20.0}]
    entry = {"run_folder": "elsewhere/a", "tries": tries, "wall_seconds": 160}
    manifest = tmp_path / "runs" / "manifest.json"
    manifest.write_text(json.dumps({"key": entry, "other": {"run_folder": "b", "tries": []}}))
    cpu, wall = report.seconds(folder, np.array([2010.0, 2100.0, 3005.0]))
    np.testing.assert_allclose(wall, [10, 100, 105])
    np.testing.assert_allclose(cpu, [8, 80, 90])

    for start in (2000, 3000):
        (folder / f"events.out.tfevents.{start}.host.1.0").touch()
    cpu, wall = report.seconds(
        folder, np.array([2010.0, 2100.0, 3005.0, 3011.0])
    )  # the last is of no try: still running
    assert np.isnan(cpu).all() and wall.tolist() == [10, 100, 105, 111]

    for start in (1900, 2500):  # before the first of its tries and between two: it was killed, and run.py with it
        file = folder / f"events.out.tfevents.{start}.host.1.0"
        file.touch()
        cpu, wall = report.seconds(folder, np.array(sorted([start + 5.0, 2010.0, 2100.0, 3005.0])))
        assert np.isnan(cpu).all() and wall.tolist() == ([5, 15, 105, 110] if start < 2000 else [10, 100, 105, 110])
        file.unlink()

    del entry["wall_seconds"]  # a try is not among them, of which not even a point is left
    manifest.write_text(json.dumps({"key": entry}))
    assert np.isnan(report.seconds(folder, np.array([2010.0, 2100.0, 3005.0]))[0]).all()


def test_points_are_interpolated_onto_the_steps_that_all_seeds_cover():
    points = [(1, 0, 0.0), (1, 100, 10.0), (2, 20, 40.0), (2, 80, 100.0), (2, 120, 140.0)]  # values s / 10 and 20 + s
    rows = [("ppo", "e", "", seed, step, step / 2, step, "x", value) for seed, step, value in points]
    thin = report.thin(pd.DataFrame(rows, columns=report.COLUMNS))
    assert len(thin) == 2 * report.GRID_POINTS
    curve = report.summary(thin)
    grid = curve.step.to_numpy()
    assert (grid[0], grid[-1], len(grid)) == (20, 100, report.GRID_POINTS) and set(curve.seeds) == {2}
    np.testing.assert_allclose(curve["mean"], (grid / 10 + 20 + grid) / 2)
    np.testing.assert_allclose(curve.low, grid / 10)
    ten = [("ppo", "e", "", seed, step, step / 2, step, "x", seed) for seed in range(10) for step in (seed, 500 + seed)]
    few = report.thin(pd.DataFrame(ten, columns=report.COLUMNS))
    assert len(few) == 10 * report.GRID_POINTS / 2 and (few.step.min(), few.step.max()) == (9, 500)
    np.testing.assert_allclose(curve.high, 20 + grid)
    np.testing.assert_allclose(curve.cpu_seconds, grid / 2)
    assert report.summary(curve) is curve  # as data of which the seeds were not kept are
    thin.loc[thin.seed == 2, "cpu_seconds"] = np.nan  # of a run that run.py did not start
    np.testing.assert_allclose(report.summary(thin).cpu_seconds, grid / 2)


def test_last_return_weighs_points_by_their_episodes():
    returns = [(10, 1.0), (20, 2.0), (40, 4.0)]
    counts = [(10, 200), (20, 270), (30, 270), (40, 310)]  # 200, 70, 0 and 40 episodes; none ended up to step 30
    rows = [(report.RETURN, *p) for p in returns] + [(report.NUM_EPISODES, *p) for p in counts]
    run = pd.DataFrame(rows, columns=["metric", "step", "value"])
    assert report.last_return(run) == pytest.approx((40 * 4.0 + 60 * 2.0) / 100)
    assert report.last_return(run, 150) == pytest.approx((40 * 4.0 + 70 * 2.0 + 40 * 1.0) / 150)
    assert report.last_return(run, 1000) == pytest.approx((40 * 4.0 + 70 * 2.0 + 200 * 1.0) / 310)  # fewer: all of them
    assert np.isnan(report.last_return(run[run.metric == report.NUM_EPISODES]))


# Statistics


def test_intervals_are_honest():
    values = np.random.default_rng(0).normal(size=(5, 20_000))
    _, low, high = report.interval(values)  # five seeds, 20,000 times
    assert ((low < 0) & (high > 0)).mean() == pytest.approx(0.95, abs=0.01)
    mean, low, high = report.interval(values[:4])
    np.testing.assert_array_equal([mean, low, high], [f(values[:4], axis=0) for f in (np.mean, np.min, np.max)])
    mean, low, high = report.interval(np.array([[3.0, 4.0]]))  # one seed: unknown
    assert mean.tolist() == [3.0, 4.0] and np.isnan([low, high]).all()


def test_the_last_tenth_has_an_interval_only_where_the_seeds_are_known():
    """Seeds that take turns: each point has a range of 2, the seeds' means are the same."""
    values = [(seed, step, float((seed + step) % 2 * 2 - 1)) for seed in (1, 2) for step in range(1, 101)]
    seeds = pd.DataFrame([("ppo", "e", "", *v[:2], 0, 0, "x", v[2]) for v in values], columns=report.COLUMNS)
    late = report.summary(report.last_tenth(seeds))
    assert late[["mean", "low", "high"]].to_numpy().tolist() == [[0, 0, 0]]
    late = report.last_tenth(report.summary(seeds))
    assert late["mean"].tolist() == [0] and late[["low", "high"]].isna().all(axis=None)


def test_the_last_tenth_is_that_of_all_points_of_each_seed(tmp_path):
    """The curve has some of them, and of seeds that end apart only what all have."""
    rng = np.random.default_rng(0)
    values = {1: rng.random(1000), 2: rng.random(500)}
    for seed, curve in values.items():
        points = [*enumerate(curve, start=1)]
        write_run(tmp_path / "runs" / str(seed), {"rollout/battle_won": points}, seed=seed)
    report.main(report.Args([tmp_path / "runs"], out=tmp_path / "docs" / "a", tag="rollout/battle_won"))
    data, _ = report.read_figure(tmp_path / "docs" / "a")
    late = data[data.metric == "rollout/battle_won, last tenth"]
    assert late.seed.tolist() == [1, 2] and late.step.tolist() == [1000, 500]
    np.testing.assert_allclose(late.value, [values[1][-100:].mean(), values[2][-50:].mean()], rtol=1e-4)
    cell = f"{late.value.mean():.2f} [{late.value.min():.2f}, {late.value.max():.2f}]"
    assert cell in (tmp_path / "docs" / "a.md").read_text()


def scores(**tasks: list[float]) -> pd.DataFrame:
    return pd.DataFrame([(env_id, x) for env_id, xs in tasks.items() for x in xs], columns=["env_id", "score"])


def test_interquartile_mean_and_probability_of_improvement():
    x, y = scores(a=[0, 1, 2, 3], b=[4, 5, 6, 100]), scores(a=[1, 1], b=[7, 8])
    mean, low, high = report.iqm(x)
    assert mean == (2 + 3 + 4 + 5) / 4  # of eight runs the two best and the two worst do not count
    assert low < mean < high
    assert report.improvement(x, y) == (5 / 8 + 1 / 4) / 2  # a: two win, one ties, of four; b: 100 beats both
    assert report.improvement(x, y) + report.improvement(y, x) == 1


# Figures, tables and the page


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A folder with the report on two scripts, one of them stopped early, on two tasks with three seeds."""
    folder = tmp_path_factory.mktemp("report")
    for env_id in TASKS:
        for script, gain in (("toy", 1.0), ("tuned", 2.0)):
            for seed in (1, 2, 3):
                points = {
                    report.RETURN: [(s, seed * gain + np.sin(s) * (s < 900)) for s in range(8, 1001, 2)],
                    report.NUM_EPISODES: [(s, s) for s in range(8, 1001, 2)],
                    report.EVAL: [(500, 0.0), (1000, 10.0 * seed * gain)],
                }
                place = folder / "runs" / f"{env_id[:4]}-{script}-{seed}"
                write_run(place, points, seed=seed, script=script, env_id=env_id)
    points = {report.RETURN: [(512, 7.0)], report.NUM_EPISODES: [(512, 500)]}
    write_run(folder / "runs" / "stopped", points, seed=1, script="stopped", done=False)
    argv = [sys.executable, BENCHMARK / "report.py", "runs", "--out", "docs/a.b"]
    argv += ["--note", "settings of a test; no more", "--command", "benchmark/x.sh"]
    result = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "left out, unfinished: runs/stopped" in result.stderr
    assert (folder / "docs" / "a.b.md").read_text().endswith(result.stdout)
    return folder


def test_report_writes_curves_and_tables(published):
    picture, caption, final, aggregate = (published / "docs" / "a.b.md").read_text().split("\n\n")
    assert picture == "![a.b](a.b.svg)"
    for words in ("mean of 3 seeds with the range of the seeds", "Settings of a test; no more.", "`benchmark/x.sh`"):
        assert words in caption
    assert "random 22 (uniform actions)" in caption and "by hand -21.8" in caption
    lines = [line for line in final.splitlines() if "CartPole-v1" in line]
    assert lines[0] == "| CartPole-v1 | *random* | | | | 22.0 | |" and "*maximum*" in lines[1]
    assert lines[2].startswith(
        "| CartPole-v1 | toy | settings of a test | 3 | 1,000 | 2.00 [1.00, 3.00] | 20.0 [10.0, 30.0]"
    )
    assert lines[3].startswith("| CartPole-v1 | tuned | settings of a test | 3 | 1,000 | 4.00 [2.00, 6.00] |")

    # Last evaluations 10, 20, 30 and 20, 40, 60 (the first pair of tasks alike), normalised by random and best.
    normalised = {
        name: [(x - 22) / 478 for x in xs] + [(x + 79.3) / 57.5 for x in xs]
        for name, xs in (("toy", (10, 20, 30)), ("tuned", (20, 40, 60)))
    }
    want = {name: np.mean(np.sort(xs)[1:5]) for name, xs in normalised.items()}
    assert f"| toy | 2 | 6 | {want['toy']:.2f} |  |" in aggregate
    wins = sum((y > x) + 0.5 * (y == x) for x in (10, 20, 30) for y in (20, 40, 60)) / 9
    assert f"| tuned | 2 | 6 | {want['tuned']:.2f} | {wins:.2f} |" in aggregate

    data = pd.read_csv(published / "docs" / "data" / "a.b.csv")
    assert list(data.columns) == report.COLUMNS and set(data.seed) == {1, 2, 3}
    assert len(data) == 2 * 2 * 3 * (report.GRID_POINTS + 2)
    svg = (published / "docs" / "a.b.svg").read_text()
    assert svg.count("environment steps") == 2 and svg.count(">random<") == 2 and "toy (3 seeds)" in svg
    assert "normalised score" in svg and "tuned (6 runs)" in svg and len(svg) < 300_000


def test_report_is_made_again_from_its_data_byte_by_byte(published):
    names = ["a.b.svg", "a.b.md", "report.html"]
    before = [(published / "docs" / name).read_bytes() for name in names]
    for name in names:
        (published / "docs" / name).unlink()
    report.redraw(published / "docs" / "a.b")
    report.write_html(published / "docs")
    assert [(published / "docs" / name).read_bytes() for name in names] == before


def test_page_needs_no_network_and_has_every_curve(published):
    page = (published / "docs" / "report.html").read_text()
    assert not re.search(r"https?://|src=|<link|import ", page)
    data = json.loads(re.search(r"^const DATA = (.*);$", page, re.MULTILINE)[1])
    assert set(data) == set(TASKS)
    curve = next(curve for curve in data[TASKS[1]]["curves"] if curve["script"] == "tuned")
    assert len(curve["step"]) == len(curve["mean"]) == report.PAGE_POINTS and curve["seeds"] == 3
    assert curve["last evaluation"] == [40, 20, 60] and curve["cpu_seconds"] is None and curve["name"] == "tuned"
    assert {line["label"] for line in data[TASKS[0]]["yardsticks"]} == {"random", "maximum"}


def test_the_page_has_the_last_tenth_of_what_is_drawn(tmp_path):
    write_run(tmp_path / "run", {"rollout/battle_won": [(i, i / 20) for i in range(1, 21)]}, env_id="smax/3m")
    report.main(report.Args([tmp_path / "run"], out=tmp_path / "docs" / "a", tag="rollout/battle_won"))
    (curve,) = report.page_data(tmp_path / "docs")["smax/3m"]["curves"]
    assert curve["late"] == [0.975]  # of the last two of 20 points
    if shutil.which("node"):
        done = subprocess.run(["node", "-e", NODE, tmp_path / "docs" / "report.html"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_yardsticks_of_several_tasks_are_told_apart(tmp_path):
    for seed, env_id in enumerate(("CartPole-v1", "Acrobot-v1"), start=1):
        write_run(tmp_path / env_id, {report.RETURN: [(1, 2.0), (2, 3.0)]}, seed=seed, env_id=env_id)
    report.main(report.Args([tmp_path], out=tmp_path / "docs" / "a"))
    text = (tmp_path / "docs" / "a.md").read_text()
    assert "Dashed: Acrobot-v1 random -499.95 (uniform actions), " in text
    assert "; CartPole-v1 random 22 (uniform actions), maximum 500 (the time limit)." in text


def test_runs_that_were_stopped_are_marked(published, capsys):
    out = published / "stopped" / "a"
    report.main(report.Args([published / "runs" / "stopped"], out=out, unfinished=True))
    assert "| CartPole-v1 | stopped |  | 1 | 512 of 1,000, stopped | 7.00 |  |" in capsys.readouterr().out
    assert "Stopped after 512 of 1,000 steps: stopped." in Path(f"{out}.md").read_text()
    page = (out.parent / "report.html").read_text()
    data = json.loads(re.search(r"^const DATA = (.*);$", page, re.MULTILINE)[1])
    assert data["CartPole-v1"]["curves"][0]["of steps"] == "512 of 1,000, stopped"


def training(end):
    """Points of training up to step `end`, with as many episodes as a last result is made of."""
    steps = range(500, end + 1, 500)
    return {report.RETURN: [(step, 1.0) for step in steps], report.NUM_EPISODES: [(step, step) for step in steps]}


def page_curves(folder, env_id="CartPole-v1"):
    text = (folder / "report.html").read_text()
    return json.loads(re.search(r"^const DATA = (.*);$", text, re.MULTILINE)[1])[env_id]["curves"]


def test_it_is_said_how_many_of_the_seeds_were_stopped_and_where(tmp_path):
    """A table said `10,000 of 10,000, stopped` of three seeds, of which one was stopped at 2,500."""
    for script, ends in (("some", (2500, 10_000, 10_000)), ("all", (2500, 6500))):
        for seed, end in enumerate(ends, start=1):
            folder = tmp_path / "runs" / f"{script}{seed}"
            args = {"script": script, "seed": seed, "total_timesteps": 10_000}
            write_run(folder, training(end), **args)
            if end < 10_000:
                (folder / "done.json").unlink()
    out = tmp_path / "docs" / "a"
    report.main(report.Args([tmp_path / "runs"], out=out, unfinished=True))
    text = Path(f"{out}.md").read_text()
    assert "| some |  | 3 | 2,500 to 10,000 of 10,000, 1 stopped |" in text
    assert "| all |  | 2 | 2,500 to 6,500 of 10,000, stopped |" in text
    assert "Stopped after 2,500 of 10,000 steps: some." in text
    assert "Stopped after 2,500 to 6,500 of 10,000 steps: all." in text
    steps = {curve["script"]: curve["of steps"] for curve in page_curves(out.parent)}
    assert steps["some"] == "2,500 to 10,000 of 10,000, 1 stopped"


def test_it_is_said_if_seeds_had_other_budgets(tmp_path):
    """A table said that three seeds had 3,000,720 steps, of which one had 2,000,032."""
    for script, ends in (("other", (2000, 3000, 3500)), ("same", (20_000, 20_500))):
        for seed, end in enumerate(ends, start=1):
            write_run(tmp_path / "runs" / f"{script}{seed}", training(end), script=script, seed=seed)
    out = tmp_path / "docs" / "a"
    report.main(report.Args([tmp_path / "runs"], out=out))
    text = Path(f"{out}.md").read_text()
    assert "| other |  | 3 | 2,000 to 3,500 |" in text and "| same |  | 2 | 20,500 |" in text
    assert {curve["of steps"] for curve in page_curves(out.parent)} == {"2,000 to 3,500", "20,500"}


def test_the_page_counts_the_seeds_that_it_draws(tmp_path):
    for seed in (1, 2, 3):
        curves = training(1000) | ({report.EVAL: [(500, 5.0), (1000, 7.0)]} if seed < 3 else {})
        write_run(tmp_path / "runs" / f"{seed}", curves, seed=seed)
    out = tmp_path / "docs" / "a"
    report.main(report.Args([tmp_path / "runs"], out=out, tag=report.EVAL))
    (curve,) = page_curves(out.parent)
    assert (curve["seeds"], curve["drawn"], curve[f"{report.FINAL[1]}, seeds"]) == (3, 2, 2)
    assert f"{report.FINAL[0]}, seeds" not in curve


def test_curves_have_one_name_in_figure_and_profile(tmp_path):
    """Other flags in an environment without yardsticks gave them another one in the profile: a KeyError."""
    for script in ("ppo", "impala"):
        for env_id in ("CartPole-v1", "Acrobot-v1"):
            for seed in (1, 2):
                folder = tmp_path / f"{script}{env_id}{seed}"
                write_run(folder, training(1000), script=script, seed=seed, env_id=env_id)
    write_run(tmp_path / "other", training(1000), script="ppo", env_id="Taxi-v3", learning_rate=0.1)
    report.main(report.Args([tmp_path], out=tmp_path / "docs" / "a"))
    assert "interquartile mean" in (tmp_path / "docs" / "a.md").read_text()


def test_battles_have_their_last_evaluation_beside_the_training(tmp_path, capsys):
    """Games with the most probable actions may be won where those of training are not; other tasks have no column."""
    for seed, won in ((1, 0.5), (2, 1.0)):
        points = {"rollout/battle_won": [(step, 0.25) for step in range(10, 101, 10)], report.EVAL: [(100, 7.0)]}
        points |= {report.BATTLES: [(50, 0.0), (100, won)]} if seed == 1 else {report.BATTLES: [(100, won)]}
        write_run(tmp_path / str(seed), points, seed=seed, env_id="smax/3m")
    report.main(report.Args([tmp_path], out=tmp_path / "docs" / "a", tag="rollout/battle_won"))
    table = capsys.readouterr().out
    head = "| rollout/battle_won, last tenth | last evaluation, battles won | last 100 episodes | last evaluation |"
    assert table.splitlines()[0].endswith(head)
    assert "| 2 | 100 | 0.25 [0.25, 0.25] | 0.75 [0.50, 1.00] |  | 7.00 [7.00, 7.00] |" in table
    assert "| smax/3m | *random* | | | | 0.00 | 0.00 |" in table


@pytest.mark.parametrize("eval_episodes, done, cell", [(100, True, "7.00"), (0, True, ""), (100, False, "")])
def test_the_small_evaluations_of_off_policy_scripts_are_no_last_evaluation(
    eval_episodes, done, cell, tmp_path, capsys
):
    """Those every --eval-steps episodes; the one of --eval-episodes comes at the end."""
    points = {report.RETURN: [(50, 1.0), (100, 2.0)], report.EVAL: [(50, 3.0), (100, 7.0)]}
    points |= {report.NUM_EPISODES: [(50, 5), (100, 10)]}
    write_run(tmp_path / "a", points, done=done, eval_steps=50, eval_episodes=eval_episodes)
    report.main(report.Args([tmp_path / "a"], out=tmp_path / "docs" / "a", unfinished=True))
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.split("|")[-2].strip() == cell, row


def test_an_earlier_figure_outlives_a_full_disk(tmp_path):
    write_run(tmp_path / "a", {report.RETURN: [(step, 1.0) for step in range(200)]})
    report.main(report.Args([tmp_path / "a"], out=tmp_path / "docs" / "a"))
    files = {path: path.read_bytes() for path in (tmp_path / "docs" / "data").glob("*.*")}
    with largest_file(2000), pytest.raises(OSError):
        report.main(report.Args([tmp_path / "a"], out=tmp_path / "docs" / "a"))
    for path, content in files.items():
        assert path.read_bytes() == content
    assert len(files) == 3 and len(files[tmp_path / "docs" / "data" / "a.csv"]) > 2000


@pytest.mark.parametrize("name", ["a.csv", "figures.json"])
def test_data_that_are_damaged_and_a_figure_without_a_name_are_one_line(name, tmp_path):
    write_run(tmp_path / "a", {report.RETURN: [(1, 1.0)]})
    report.main(report.Args([tmp_path / "a"], out=tmp_path / "docs" / "a"))
    (tmp_path / "docs" / "data" / name).write_text("")
    again = [sys.executable, BENCHMARK / "report.py", tmp_path / "a", "--out"]
    for out, line in ((tmp_path / "docs" / "b", f"/data/{name} is damaged ("), (".", "--out . has no name for")):
        done = subprocess.run([*again, out], capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_two_reports_into_one_folder_keep_both_figures(tmp_path):
    """The one waits for the other: what it adds to figures.json and to the page would be lost."""
    write_run(tmp_path / "a", {report.RETURN: [(1, 1.0)]})
    (tmp_path / "docs" / "data").mkdir(parents=True)
    names, argv = ("b", "c"), [sys.executable, BENCHMARK / "report.py", tmp_path / "a", "--out"]
    with (tmp_path / "docs" / "data" / "figures.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        programs = [subprocess.Popen([*argv, tmp_path / "docs" / name], stdout=subprocess.DEVNULL) for name in names]
        with pytest.raises(subprocess.TimeoutExpired):
            programs[0].wait(timeout=15)
        assert not list((tmp_path / "docs").glob("**/*.csv"))
    assert [program.wait(timeout=300) for program in programs] == [0, 0]
    assert set(json.loads((tmp_path / "docs" / "data" / "figures.json").read_text())) == set(names)


def test_a_run_whose_events_are_cut_off_is_left_out(tmp_path, capsys):
    """Its last points are gone, and the others of its curve would be cut to what is left."""
    points = [(step, 1.0 * step) for step in range(5, 101, 5)]
    folders = [write_run(tmp_path / f"runs/{seed}", {report.RETURN: points}, seed) for seed in (1, 2)]
    for folder in folders:
        (folder / "done.json").write_text('{"step": 100}')
    (events,) = folders[1].glob("events*")
    with events.open("r+b") as file:
        file.truncate(events.stat().st_size * 6 // 10)
    table = report.read_runs([tmp_path / "runs"], [report.RETURN])
    assert table.seed.unique().tolist() == [1] and table.step.max() == 100
    line = rf"left out: {folders[1]}: its event files end at step (\d+) of 100, cut off or damaged\n"
    assert 40 <= int(re.fullmatch(line, capsys.readouterr().err)[1]) <= 70


def test_a_folder_that_is_a_link_counts_once_and_a_cut_off_file_is_told(tmp_path, capsys):
    """Runs that were moved to a larger disk; a script and a done.json of which a power cut left half."""
    folders = [write_run(tmp_path / f"{seed}", {report.RETURN: [(1, 2.0)]}, seed) for seed in (1, 2, 3)]
    (tmp_path / "runs").mkdir()
    for link in ("here", "here_too"):
        (tmp_path / "runs" / link).symlink_to(folders[0])
    for folder in folders[1:]:
        folder.rename(tmp_path / "runs" / folder.name)
    (tmp_path / "runs" / "2" / "toy.py").write_text("class Args(")
    (tmp_path / "runs" / "3" / "done.json").write_text("")
    (write_run(tmp_path / "runs" / "4", {report.RETURN: [(1, 2.0)]}, 4) / "done.json").write_text("[]")
    (tmp_path / "manifest.json").write_text("[]")  # of folders[0]
    assert report.read_runs([tmp_path / "runs"], [report.RETURN]).seed.tolist() == [1]
    script, done, strange = sorted(capsys.readouterr().err.splitlines())
    assert script.startswith(f"left out: {tmp_path}/runs/2: SyntaxError: ") and "/runs/3: JSONDecodeError: " in done
    assert strange.startswith(f"left out: {tmp_path}/runs/4: AttributeError: ")


def test_a_tag_that_no_run_has_is_told_with_those_that_there_are(tmp_path):
    write_run(tmp_path / "a", {report.RETURN: [(1, 2.0)], "train/entropy": [(1, 1.0)], "time/SPS": [(1, 9.0)]})
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "args.json").write_text("{}")  # somebody else's
    with pytest.raises(UsageError) as refused:
        report.main(report.Args([tmp_path], out=tmp_path / "out", tag="train/entropi"))
    assert str(refused.value) == "no run has train/entropi; a has rollout/ep_reward, time/SPS, train/entropy"


NODE = """
const places = {}, place = () => ({ value: "step", children: [], addEventListener() {}, set innerHTML(text) {
  this.html = text; this.value = (text.match(/<option>(.*?)</) || [])[1]; } });
globalThis.document = { getElementById: id => places[id] ??= place(), querySelector: () => ({ value: "step" }) };
const page = require("fs").readFileSync(process.argv[1], "utf8");
new Function(page.match(/<script>([^]*)<\\/script>/)[1])();
console.log(places.plot.html, places.legend.html, places.missing.textContent);
"""


def test_a_name_with_marks_of_html_leaves_the_page_whole(tmp_path):
    write_run(tmp_path / "run", {report.RETURN: [(1, 0.0), (2, 1.0)]}, env_id="Env<!--<script></script>")
    report.main(report.Args([tmp_path / "run"], out=tmp_path / "a"))
    page = (tmp_path / "report.html").read_text()
    line = re.search(r"^const DATA = (.*);$", page, re.MULTILINE)[1]
    assert list(json.loads(line)) == ["Env<!--<script></script>"] and "<" not in line


def test_a_curve_of_one_point_is_seen(tmp_path):
    for seed, steps in enumerate([(10, 20), (20, 30)]):
        write_run(tmp_path / f"runs/{seed}", {report.RETURN: [(step, 1.0 * seed) for step in steps]}, seed)
    report.main(report.Args([tmp_path / "runs"], out=tmp_path / "a"))
    data = pd.read_csv(tmp_path / "data" / "a.csv")
    assert data[data.metric == report.RETURN][["step", "value"]].to_numpy().tolist() == [[20, 0], [20, 1]]
    assert "fill: #1f77b4; stroke: #1f77b4" in (tmp_path / "a.svg").read_text()  # a marker
    if shutil.which("node"):
        done = subprocess.run(["node", "-e", NODE, tmp_path / "report.html"], capture_output=True, text=True)
        assert done.stdout.count("<circle ") == 1 and "NaN" not in done.stdout, done.stderr


@pytest.mark.parametrize(
    "values, kept", [((1.0, math.nan, 3.0), [1, 3]), ((1.0, math.inf, 3.0), [1, 3]), ((math.nan,) * 3, None)]
)
def test_points_that_are_no_numbers_are_not_drawn_on_the_page(values, kept, tmp_path):
    """Of a metric of a copy's own: run.log looks at losses alone. The other curve is there."""
    for name, points in (("ill", values), ("sound", (5.0, 5.0, 5.0))):
        for seed in (1, 2):
            points_of = {"own/number": list(zip((1, 2, 3), points)), report.RETURN: [(3, 1.0)]}
            write_run(tmp_path / f"runs/{name}{seed}", points_of, seed, name)
    report.main(report.Args([tmp_path / "runs"], out=tmp_path / "a", tag="own/number"))
    data = json.loads(re.search(r"^const DATA = (.*);$", (tmp_path / "report.html").read_text(), re.MULTILINE)[1])
    assert [curve["mean"] for curve in data[TASKS[0]]["curves"]] == [kept, [5, 5, 5]]
    if shutil.which("node"):
        done = subprocess.run(["node", "-e", NODE, tmp_path / "report.html"], capture_output=True, text=True)
        assert done.stdout.count('class="curve"') == (1 if kept is None else 2), done.stderr
        assert done.stdout.count("<button") == done.stdout.count('class="curve"')  # the rest is in the table alone
        assert "NaN" not in done.stdout and "not kept" not in done.stdout


def test_a_long_name_leaves_the_panel_its_room(tmp_path):
    flags = {"gamma": 0.9, "learning_rate": 0.125, "num_minibatches": 3, "update_epochs": 7, "vf_coef": 0.25}
    for number, changed in enumerate(({}, flags)):
        points = {report.RETURN: [(1, 0.0), (2, 1.0)]}
        write_run(tmp_path / f"runs/{number}", points, script="ppo", **changed)
    report.main(report.Args([tmp_path / "runs"], out=tmp_path / "a"))
    texts = re.findall(r"<text[^>]*>([^<]*)", (tmp_path / "a.svg").read_text())
    assert {f"--{name.replace('_', '-')}" for name in flags} <= set(" ".join(texts).split())
    assert max(map(len, texts)) <= 60


def test_many_long_names_do_not_cover_the_axis(tmp_path, monkeypatch):
    pictures = []
    monkeypatch.setattr(report, "save", lambda picture, out: pictures.append(picture))
    for number in range(6):
        flags = {"gamma": 0.9 + number / 100, "learning_rate": 0.125 + number, "num_minibatches": 3 + number}
        points = {report.RETURN: [(1, 0.0), (2, 1.0)]}
        write_run(tmp_path / f"runs/{number}", points, script="ppo", **flags)
    report.main(report.Args([tmp_path / "runs"], out=tmp_path / "a"))
    picture = pictures[0]
    picture.canvas.draw()
    axis = picture.axes[0]
    assert not axis.get_legend().get_window_extent().overlaps(axis.xaxis.label.get_window_extent())


def test_report_tells_settings_apart_and_refuses_one_seed_twice(tmp_path):
    for number, gamma in enumerate((0.9, 0.99, 0.99)):
        points = {report.RETURN: [(1, 0.0), (2, gamma)]}
        write_run(tmp_path / f"runs/{number}", points, script="ppo", gamma=gamma)
    with pytest.raises(UsageError, match=r"^there is no .*nowhere$"):
        report.main(report.Args([tmp_path / "nowhere"], out=tmp_path / "a"))
    with pytest.raises(
        UsageError, match=r"^two runs of ppo on CartPole-v1, seed 1, the defaults: \S+/1 and \S+/2; pass"
    ):
        report.main(report.Args([tmp_path / "runs"], out=tmp_path / "a"))
    assert not (tmp_path / "data").exists()
    report.main(report.Args([tmp_path / "runs" / "0", tmp_path / "runs" / "1"], out=tmp_path / "a"))
    assert set(pd.read_csv(tmp_path / "data" / "a.csv").settings) == {"the defaults", "--gamma 0.9"}
    assert "ppo --gamma 0.9 (1 seed)" in (tmp_path / "a.svg").read_text()


def test_seeds_of_different_code_are_told_of(tmp_path, capsys):
    for seed, body in enumerate(("x = 1", "x = 1", "x = 2")):
        folder = write_run(tmp_path / f"runs/{seed}", {report.RETURN: [(1, 0.0), (2, 1.0)]}, seed=seed)
        (folder / "toy.py").write_text(f"class Args:\n    {body}\n")
    report.read_runs([tmp_path / "runs/0", tmp_path / "runs/1"], [report.RETURN])
    assert capsys.readouterr().err == ""
    report.read_runs([tmp_path / "runs"], [report.RETURN])
    assert capsys.readouterr().err == "one curve of 2 versions of toy.py: ('CartPole-v1', 'toy', 'the defaults')\n"


def test_seeds_of_different_length_are_told_of(tmp_path, capsys):
    for seed, (done, steps) in enumerate([(True, 10), (True, 10), (False, 20), (True, 30)]):
        points = {report.RETURN: [(1, 0.0), (2, 1.0)]}
        write_run(tmp_path / f"runs/{seed}", points, seed=seed, done=done, total_timesteps=steps)
    report.read_runs([tmp_path / f"runs/{seed}" for seed in range(3)], [report.RETURN], unfinished=True)
    assert capsys.readouterr().err == ""
    report.read_runs([tmp_path / "runs"], [report.RETURN], unfinished=True)
    assert capsys.readouterr().err == "one curve of 2 values of --total-timesteps: ('CartPole-v1', 'toy', '')\n"


@pytest.mark.parametrize("content", ["", '{"script": "toy", "ar', '{"lr": 0.1}', None])
def test_a_folder_that_is_no_run_is_left_out(content, tmp_path, capsys):
    """One that is damaged, or of another program that keeps an args.json; the others are drawn all the same."""
    for name in ("good", "odd"):
        write_run(tmp_path / name, {report.RETURN: [(10, 1.0)]})
    if content is None:
        (tmp_path / "odd" / "args.json").unlink()
    else:
        (tmp_path / "odd" / "args.json").write_text(content)
    assert report.read_runs([tmp_path], [report.RETURN]).value.tolist() == [1.0]
    (line,) = capsys.readouterr().err.splitlines()
    reason = "/args.json is damaged (" if content in ("", '{"script": "toy", "ar') else " is not a run folder: "
    assert line.startswith(f"left out: {tmp_path / 'odd'}{reason}")


def test_seeds_without_a_step_in_common_make_no_curve(tmp_path, capsys):
    for env_id in TASKS:
        for seed, steps in enumerate([(10, 20), (30, 40)]):
            for script in ("apart", "toy"):
                points = {report.EVAL: [(step, 5.0 * step) for step in (steps if script == "apart" else (10, 20))]}
                write_run(tmp_path / f"runs/{env_id[:4]}-{script}{seed}", points, seed, script, env_id)
    report.main(report.Args([tmp_path / "runs"], out=tmp_path / "a", tag=report.EVAL))
    assert [f"no curve, its seeds have no steps in common: ('{env_id}', 'apart', '')" for env_id in TASKS] == (
        capsys.readouterr().err.splitlines()
    )
    data = pd.read_csv(tmp_path / "data" / "a.csv")
    assert set(data[data.metric == report.EVAL].script) == {"toy"} and data.step.max() == 40
    cell = "150.0 [100.0, 200.0]"
    assert f"| apart |  | 2 | 20 to 40 | {cell} |  | {cell} |" in (tmp_path / "a.md").read_text()
    svg = (tmp_path / "a.svg").read_text()
    assert "apart (2 seeds)" not in svg and "apart (4 runs)" in svg
    with pytest.raises(UsageError, match="there is no curve to draw"):
        report.main(report.Args(list(tmp_path.glob("runs/*apart*")), out=tmp_path / "b", tag=report.EVAL))


def test_curves_are_named_by_the_flags_that_tell_them_apart():
    data = pd.DataFrame(
        {
            "script": ["ppo", "ppo", "ppo", "coma", "coma", "vdn", "qmix"],
            "settings": [
                "--a 1 --b 2",
                "--a 1 --b 3 --c",
                "--a 1 --b 2",
                "the defaults",
                "--d",
                "--b 2",
                "the defaults",
            ],
        },
        index=[3, 1, 4, 1, 5, 9, 2],  # as a part of a longer table has it
    )
    # vdn has what tells the curves of ppo apart, so it is told which of them it is beside
    names = ["ppo --b 2", "ppo --b 3 --c", "ppo --b 2", "coma the defaults", "coma --d", "vdn --b 2", "qmix"]
    assert report.curve_names(data).tolist() == names


# A grid of trials by three ways

GRID_SCRIPT = """
import shutil, sys, time
from pathlib import Path

arg = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name = f"{arg['--env-id']}-{arg['--seed']}"
folder = Path(arg["--runs-dir"]) / name
print(f"run folder: {folder}", flush=True)
time.sleep(0.2)
shutil.copytree(Path("prepared") / name, folder, dirs_exist_ok=True)
"""


def grid_of(folder: Path, name: str, *flags) -> list:
    argv = [sys.executable, BENCHMARK / "run.py", "--command", "python script.py", "--env-ids", "a", "b"]
    return [*argv, "--num-seeds", "10", "--workers", "2", "--runs-dir", f"runs/{name}", *flags]


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Path:
    """A folder with a script whose twenty trials are prepared, and runs/pool, where a pool of processes ran them."""
    folder = tmp_path_factory.mktemp("grid")
    (folder / "script.py").write_text(GRID_SCRIPT)
    for env_id in "ab":
        for seed in range(1, 11):
            points = {report.RETURN: [(k, k * seed / 7) for k in range(1, 6)], report.EVAL: [(5, seed)]}
            write_run(folder / "prepared" / f"{env_id}-{seed}", points, seed=seed, env_id=env_id, script="script")
    subprocess.run(grid_of(folder, "pool"), cwd=folder, check=True, timeout=300)
    return folder


def table_of(folder: Path, name: str) -> pd.DataFrame:
    """The tidy table without the two columns of seconds."""
    report.main(report.Args([folder / "runs" / name], out=folder / "out" / name))
    return pd.read_csv(folder / "out" / "data" / f"{name}.csv").drop(columns=["cpu_seconds", "wall_seconds"])


def test_a_grid_whose_runner_was_killed_gives_the_same_table(grid):
    runner = subprocess.Popen(grid_of(grid, "killed"), cwd=grid, stdout=subprocess.DEVNULL)
    while len(list((grid / "runs" / "killed").glob("*/done.json"))) < 5 and runner.poll() is None:
        time.sleep(0.02)
    runner.kill()
    assert runner.wait() < 0  # in the midst of it
    again = subprocess.run(grid_of(grid, "killed"), cwd=grid, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and 5 <= again.stdout.count("skipped") < 20
    pd.testing.assert_frame_equal(table_of(grid, "killed"), table_of(grid, "pool"))


@optional.needs("ray")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_trials_on_a_ray_cluster_save_when_the_grid_is_stopped(signum, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        argv = [sys.executable, BENCHMARK / "run.py", "--command", f"python {BENCHMARK.parent}/cleanmarl/ppo.py"]
        argv += ["--env-ids", "CartPole-v1", "--num-seeds", "1", "--runs-dir", "runs", "--backend", "ray"]
        argv += ["--address", cluster.address, "--", "--total-timesteps", "3000000"]  # minutes, should nobody stop it
        grid = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.time() + 200
        while not list(tmp_path.glob("runs/CartPole*/events*")) and grid.poll() is None and time.time() < deadline:
            time.sleep(0.2)
        time.sleep(2)
        grid.send_signal(signum)
        out, err = grid.communicate(timeout=100)
    finally:
        cluster.shutdown()
    assert grid.returncode == 128 + signum and "0 of 1 trials finished" in out, err
    (folder,) = tmp_path.glob("runs/CartPole*")
    assert (folder / "checkpoint.pt").exists() and not (folder / "done.json").exists()


@optional.needs("ray")
def test_a_grid_on_a_ray_cluster_of_two_nodes_gives_the_same_table(grid, monkeypatch):
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # on a busy machine its 30 seconds are too few
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        argv = grid_of(grid, "ray", "--backend", "ray", "--address", cluster.address)
        result = subprocess.run(argv, cwd=grid, capture_output=True, text=True, timeout=500)
    finally:
        cluster.shutdown()
    assert result.returncode == 0 and "20 of 20 trials finished" in result.stdout, result.stderr
    pd.testing.assert_frame_equal(table_of(grid, "ray"), table_of(grid, "pool"))


# What is published


def comparable(path: Path) -> tuple[str, np.ndarray]:
    """A file's text without numbers and the names that an SVG makes from them, and its numbers."""
    text = re.sub(r"\b[mp][0-9a-f]{10}\b", "", path.read_text())
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    return re.sub(number, "0", text), np.array([float(x) for x in re.findall(number, text)])


def test_a_report_folder_of_ones_own_is_redrawn(tmp_path):
    out = tmp_path / "my runs" / "cur ves"
    write_run(tmp_path / "a", {report.RETURN: [(1, 0.0), (2, 5.0)]})
    report.main(report.Args([tmp_path / "a"], out=out))
    page = Path(f"{out}.md").read_text()
    assert page.startswith("![cur ves](cur%20ves.svg)\n")
    Path(f"{out}.md").unlink()
    redraw.main(redraw.Args(out.parent))
    assert Path(f"{out}.md").read_text() == page
    with pytest.raises(UsageError, match=r"has no table of report\.py"):
        redraw.main(redraw.Args(tmp_path / "nowhere"))


def test_the_seeds_of_a_published_curve_have_the_same_steps():
    """A mean is of rows in their order: rows of another budget, put beside them by hand, would make a false curve."""
    for path in sorted((BENCHMARK.parent / "docs" / "results" / "data").glob("*.csv")):
        data = pd.read_csv(path)
        if {"seed", "metric", "step"} <= set(data):
            curves = data[~data.metric.isin([*report.FINAL, report.WON, report.PLANNED])]
            for curve, runs in curves.groupby([*report.CURVE, "metric"], dropna=False):
                steps = [run.step.to_numpy() for _, run in runs.groupby("seed")]
                assert len({len(x) for x in steps}) == 1, (path.name, curve)
                assert np.ptp(steps, axis=0).max() < 0.01 * np.max(steps), (path.name, curve)


def test_no_label_of_a_published_figure_is_cut_off_on_the_left():
    """Where the layout once changed the ticks, and with them the room that they need."""
    places = {}
    for path in (BENCHMARK.parent / "docs" / "results").glob("*.svg"):
        places[path.name] = [float(x) for x in re.findall(r"rotate\(-90 ([-\d.]+) ", path.read_text())]
    assert sum(map(bool, places.values())) > 60
    assert {name for name, xs in places.items() if xs and min(xs) < 9} == set()  # points, of letters of 10


def test_published_figures_and_tables_are_redrawn_from_their_data(tmp_path):
    published = BENCHMARK.parent / "docs" / "results"
    shutil.copytree(published / "data", tmp_path / "results" / "data")
    redraw.main(redraw.Args(tmp_path / "results"))
    assert redraw.plt.rcParams["svg.hashsalt"] == ""  # to the end, or names within an SVG would be others each time
    files = {path.name for path in published.iterdir() if path.is_file()}
    assert files == {path.name for path in (tmp_path / "results").iterdir() if path.is_file()} and len(files) > 80
    for name in files:
        if name.endswith((".md", ".html")):
            assert (tmp_path / "results" / name).read_text() == (published / name).read_text(), name
        else:  # another machine may round otherwise
            (text, numbers), (published_text, published_numbers) = map(
                comparable, (tmp_path / "results" / name, published / name)
            )
            assert text == published_text, name
            np.testing.assert_allclose(numbers, published_numbers, atol=0.01, err_msg=name)


def test_the_table_of_results_in_the_readme_is_that_of_the_data():
    results = BENCHMARK.parent / "docs" / "results"
    text = (BENCHMARK.parent / "README.md").read_text()
    table = redraw.readme_results(results)
    assert redraw.README_START + table + redraw.README_END in text
    assert "| mpe/simple_spread_v3 | `mappo.py`<br>" in table and "(by hand)" in table


def test_every_learning_curve_says_its_settings_and_its_commands():
    data = BENCHMARK.parent / "docs" / "results" / "data"
    for name, figure in json.loads((data / "figures.json").read_text()).items():
        assert figure["note"] and (BENCHMARK.parent / figure["command"]).exists(), name
        assert (data / f"{name}.csv").stat().st_size < 660_000, name  # thirty runs, or ten with many flags


def test_yardsticks_have_sources_and_the_best_is_better_than_random():
    known = report.yardsticks()
    assert known.notna().all(axis=None) and set(known.kind) <= {"random", "best", "other"}
    both = known.pivot_table(index=["env_id", "metric"], columns="kind", values="score").dropna(
        subset=["random", "best"]
    )
    assert (both.best > both.random).all() and len(both) >= 8
    data = BENCHMARK.parent / "docs" / "results" / "data"
    for name, figure in json.loads((data / "figures.json").read_text()).items():
        for env_id in pd.read_csv(data / f"{name}.csv").env_id.unique():
            lines = known[(known.env_id == env_id) & (known.metric == figure["tag"].partition("/")[2])]
            assert "random" in set(lines.kind), (name, env_id)
    assert not known[known.kind != "other"].duplicated(["env_id", "metric", "kind"]).any()


def test_a_script_has_the_same_color_in_every_figure():
    three, two = report.colors_of(["coppo", "ippo", "mappo"]), report.colors_of(["mappo", "vdn"])
    assert three["mappo"] == two["mappo"] == report.colors_of(["mappo_lstm"])["mappo_lstm"]
    many = [f"mappo --clip-coef {i}" for i in range(6)] + ["mine", "ppo"]
    colors = report.colors_of(many)
    assert len(set(colors.values())) == len(many) and colors[many[0]] == three["mappo"]
    assert set(report.colors_of([f"other_{i}" for i in range(12)])) == {f"other_{i}" for i in range(12)}
