"""CPU seconds from the start of the process until a script plays well enough, ours beside peers, in alternating runs.

    bash benchmark/peers/setup.sh FOLDER
    python benchmark/time_to_score.py --peers FOLDER [--only CartPole-v1]

A score is reached when the last 100 episodes of training have it on average. Imports and compilation count. The CPU
time of a process is spread evenly over its wall time; for JAX, whose training is one call, over that call. All run on
one thread, with the settings that their authors give. Rows go to speed_time_to_score.csv and ..._curves.csv in
docs/results/data as they come, of which redraw.py makes the figure and the table; one without a time is of a run whose
budget was too short.
"""

import csv
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import speed
import tyro
from speed import machine, refuse, to_argv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

DATA = Path(__file__).resolve().parent.parent / "docs" / "results" / "data"
COLUMNS = ["task", "score", "by", "seed", "cpu_seconds", "steps", "all_cpu_seconds", "all_steps", "command", "machine"]
CURVE_COLUMNS = ["task", "by", "seed", "cpu_seconds", "step", "return"]
LAST_EPISODES = 100
MOST_POINTS = 60  # of a curve that are kept


class Contestant(NamedTuple):
    task: str
    score: float
    by: str
    command: str  # with {seed}, {peers}, and {tmp} for what it writes
    tag: str = "rollout/ep_reward"  # of its event files
    episodes: int | None = None  # of which a point is the mean; None: rollout/num_episodes says
    factor: float = 1.0  # from what it logs to the return of the task


class Point(NamedTuple):
    cpu_seconds: float
    step: int
    return_: float
    episodes: int


OURS = "--seed {seed} --runs-dir {tmp} --eval-episodes 0"
PEERS = Path(__file__).resolve().parent / "peers"
CLEANRL, CLEANMARL, JAXMARL, BENCHMARL = (
    f"bash {PEERS}/{name}.sh {{peers}}" for name in ("cleanrl", "cleanmarl", "jaxmarl", "benchmarl")
)
POLE, LANDER, CHEETAH = ("CartPole-v1", 475), ("LunarLander-v3", 200), ("HalfCheetah-v5", 2000)
SPREAD, LISTENER = ("mpe/simple_spread_v3", -30), ("mpe/simple_speaker_listener_v4", -15)
BATTLE = ("smax/3m", 0.6)  # of the battles won
# with the defaults neither lands within a million steps: RL Baselines3 Zoo's settings of PPO for this task
ZOO = "--num-envs 16 --num-steps 1024 --num-minibatches 256 --update-epochs 4 --gamma 0.999 --gae-lambda 0.98"
ZOO += " --ent-coef 0.01 --learning-rate 3e-4 --no-anneal-lr --no-clip-vloss"
# JaxMARL's rollouts, epochs, learning rate, gradients and layers: benchmark/mappo.sh
JAXMARLS = "--num-envs 128 --num-steps 128 --num-minibatches 4 --update-epochs 4 --gamma 0.99 --learning-rate 2e-3"
JAXMARLS += " --critic-learning-rate 2e-3 --anneal-lr --ent-coef 0 --max-grad-norm 0.25 --actor-hidden-dim 128"
JAXMARLS += " --critic-hidden-dim 128 --activation relu --no-time-limit-bootstrap"
CONTESTANTS = [
    Contestant(*POLE, "ppo", f"python cleanmarl/ppo.py --total-timesteps 500000 {OURS}"),
    Contestant(*POLE, "CleanRL ppo", CLEANRL + " {tmp} ppo 500000 {seed}", "charts/episodic_return", 1),
    Contestant(
        *LANDER, "ppo", f"python cleanmarl/ppo.py --env-id LunarLander-v3 --total-timesteps 2000000 {ZOO} {OURS}"
    ),
    Contestant(
        *LANDER,
        "CleanRL ppo",
        CLEANRL + " {tmp} ppo 2000000 {seed} --env-id LunarLander-v3 " + ZOO,
        "charts/episodic_return",
        1,
    ),
    Contestant(
        *CHEETAH,
        "ppo_continuous_action",
        f"python cleanmarl/ppo_continuous_action.py --env-id HalfCheetah-v5 --total-timesteps 1000000 {OURS}",
    ),
    Contestant(
        *CHEETAH,
        "CleanRL ppo_continuous_action",
        CLEANRL + " {tmp} ppo_continuous_action 1000000 {seed} --env-id HalfCheetah-v5",
        "charts/episodic_return",
        1,
    ),
    Contestant(*SPREAD, "mappo", f"python cleanmarl/mappo.py --total-timesteps 2500000 {OURS}"),
    Contestant(*SPREAD, "ippo", f"python cleanmarl/ippo.py --total-timesteps 2500000 {OURS}"),
    Contestant(  # its episodes have 26 steps, and its logged returns are those of one agent times their number
        *SPREAD,
        "JaxMARL ippo_ff_mpe",
        JAXMARL + " IPPO/ippo_ff_mpe 9998336 {seed} TOTAL_TIMESTEPS=9998336 CURVE={tmp}",
        factor=25 / 26,
    ),
    Contestant(  # it logs the rewards of the first agent
        *SPREAD,
        "CleanMARL mappo_multienvs",
        CLEANMARL + " {tmp} mappo_multienvs 50000 {seed} --eval_steps 1000000",
        episodes=12,
        factor=3,
    ),
    *(
        Contestant(
            *LISTENER, name, f"python cleanmarl/{name}.py --env-id {LISTENER[0]} --total-timesteps 2000000 {OURS}"
        )
        for name in ("mappo", "ippo")
    ),
    Contestant(*LISTENER, "BenchMARL mappo", BENCHMARL + " {tmp} SIMPLE_SPEAKER_LISTENER 240000 {seed}"),
    *(
        Contestant(
            *BATTLE,
            name,
            f"python cleanmarl/{name}.py --env-id smax/3m --total-timesteps 3000000 {JAXMARLS} {flags}{OURS}",
            "rollout/battle_won",
        )
        for name, flags in {"mappo": "--normalize-state ", "ippo": "", "mappo_lstm": "--normalize-state "}.items()
    ),
    Contestant(  # recurrent
        *BATTLE,
        "JaxMARL mappo_rnn_smax",
        JAXMARL + " MAPPO/mappo_rnn_smax 2998272 {seed} TOTAL_TIMESTEPS=2998272 MAP_NAME=3m CURVE={tmp}",
    ),
]


@dataclass
class Args:
    peers: Path
    """folder that peers/setup.sh has made"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one run of each"""
    only: tuple[str, ...] = ()
    """tasks (default: all)"""
    by: tuple[str, ...] = ()
    """scripts (default: all)"""


def read_points(folder: Path, by: Contestant, start: float, cpu_per_second: float) -> list[Point]:
    """The curve of a run: of its event files, or of the CSV file that peers/run_jaxmarl.py writes."""
    if (path := folder / "curve.csv").exists():
        rows = [[float(x) for x in row] for row in csv.reader(path.open())]
        return [Point(cpu, int(step), by.factor * return_, int(episodes)) for cpu, step, return_, episodes in rows]
    [file] = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    so_far = {} if by.episodes else {event.step: int(event.value) for event in events.Scalars("rollout/num_episodes")}
    points, before = [], 0
    for event in events.Scalars(by.tag):
        episodes = by.episodes or so_far[event.step] - before
        before += episodes
        points.append(Point((event.wall_time - start) * cpu_per_second, event.step, by.factor * event.value, episodes))
    return points


def smooth(points: list[Point]) -> list[Point]:
    """Each point with the mean return of the 100 episodes before it, or a few more, from the first that has so many."""
    smoothed, first, count = [], 0, 0
    for i, point in enumerate(points):
        count += point.episodes
        while count - points[first].episodes >= LAST_EPISODES:
            count -= points[first].episodes
            first += 1
        if count >= LAST_EPISODES:
            mean = sum(earlier.return_ * earlier.episodes for earlier in points[first : i + 1]) / count
            smoothed.append(point._replace(return_=mean))
    return smoothed


def run(by: Contestant, peers: Path, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One run, as a row of the table and as its curve."""
    with tempfile.TemporaryDirectory() as tmp:
        argv = to_argv(by.command, seed=seed, tmp=tmp, peers=peers.resolve())
        start = time.time()
        wall, cpu = speed.run(argv)
        points = smooth(read_points(Path(tmp), by, start, cpu / wall))
    if not points:
        sys.exit(f"time_to_score: fewer than a hundred episodes, of which a score is the mean: {shlex.join(argv)}")
    reached = next((point for point in points if point.return_ >= by.score), Point(None, None, None, None))
    found = [reached.cpu_seconds and round(reached.cpu_seconds, 1), reached.step]
    about = "{cpu}, {cores} cores, load {load}, Python {python}, torch {torch}".format(**machine())
    command = shlex.join(shlex.split(by.command.replace(str(PEERS), "benchmark/peers")))
    row = [*by[:3], seed, *found, round(cpu, 1), points[-1].step, command, about]
    thinned = points[:: -(-len(points) // MOST_POINTS)]
    curve = [[by.task, by.by, seed, round(x.cpu_seconds, 1), x.step, round(x.return_, 2)] for x in thinned]
    return pd.DataFrame([row], columns=COLUMNS), pd.DataFrame(curve, columns=CURVE_COLUMNS)


def read(path: Path, columns: list[str]) -> pd.DataFrame:
    """A table, or one without rows if there is none."""
    try:
        rows = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)
    except ValueError as error:  # pandas' own are such
        refuse(f"{path} is damaged ({error})")
    if list(rows.columns) != columns or rows[["task", "by", "seed", columns[-1]]].isna().any(axis=None):
        refuse(f"{path} is damaged")
    return rows


def put(rows: pd.DataFrame, path: Path) -> None:
    """Write the rows of a run into a table, in the place of those that it had of this run."""
    run, before = ["task", "by", "seed"], read(path, list(rows.columns))
    before = before[(before[run] != rows[run].iloc[0]).any(axis=1)]
    names = [(by.task, by.by) for by in CONTESTANTS]
    records = before.to_dict("records") + rows.to_dict("records")
    records.sort(key=lambda row: (names.index((row["task"], row["by"])), row["seed"]))
    pd.DataFrame(records, columns=rows.columns).astype({"seed": int}).to_csv(path.with_suffix(".tmp"), index=False)
    path.with_suffix(".tmp").replace(path)  # a kill leaves what was there before


def main(args: Args) -> None:
    tasks = dict.fromkeys(by.task for by in CONTESTANTS)
    if not set(args.only) <= set(tasks):
        refuse(f"--only takes some of: {', '.join(tasks)}")
    sides = dict.fromkeys(by.by for by in CONTESTANTS)
    if not set(args.by) <= set(sides):
        refuse(f"--by takes some of: {', '.join(sides)}")
    asked = [by for by in CONTESTANTS if (not args.only or by.task in args.only) and (not args.by or by.by in args.by)]
    if not asked:
        refuse(f"--only {' '.join(args.only)} is not run by --by {' '.join(args.by)}")
    if not args.peers.is_dir():
        refuse(f"there is no folder --peers {args.peers}")
    tables = {DATA / "speed_time_to_score.csv": COLUMNS, DATA / "speed_time_to_score_curves.csv": CURVE_COLUMNS}
    for path, columns in tables.items():
        read(path, columns)  # before hours of runs
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _frame: sys.exit(128 + signum))  # so that `run` ends its child
    for seed in args.seeds:
        for by in asked[:: 1 if seed % 2 else -1]:
            row, curve = run(by, args.peers, seed)
            print(row.to_string(columns=COLUMNS[:8], index=False, header=False), flush=True)
            for path, rows in zip(tables, (row, curve)):
                put(rows, path)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
