"""Faults with real files, processes and signals: nothing is lost, nothing is poisoned, one line for everything."""

import json
import math
import os
import pty
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from toys import scalars, wait_for

from cleanmarl import enjoy, ippo_per_agent, ppo
from cleanmarl.cli import RunArgs, UsageError, launch, tell
from cleanmarl.run import FORMAT, NonFiniteError, Run, WriteError, load_checkpoint, not_finite, write_checkpoint

FOLDER = Path(ppo.__file__).parent
SHORT = {"total_timesteps": 256, "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "eval_episodes": 0}


@dataclass
class Small(RunArgs):
    """The arguments that Run itself reads."""

    env_id: str = "none"
    total_timesteps: int = 1000
    checkpoint_interval: int = 100
    eval_episodes: int = 0


def small_run(runs_dir: Path, resume: Path | None = None, **modules) -> Run:
    return Run(Small(runs_dir=str(runs_dir), resume=resume), __file__, **modules)


class State:
    """A module of a checkpoint with any state."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


@contextmanager
def started(*command, cwd=None, **options):
    """A process as a user starts it; whatever the test does, it is gone afterwards."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": hear_signals} | options
    process = subprocess.Popen(list(map(str, command)), cwd=cwd, env=env, text=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hear_signals():
    """Whoever runs the tests, in the background or under nohup, may ignore signals: what they start must not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def endless(runs_dir: Path) -> list:
    """The command of a run that ends only if something ends it."""
    return [sys.executable, FOLDER / "ppo.py", "--total-timesteps", 10**7, "--runs-dir", runs_dir]


def run_folder(runs_dir: Path) -> Path:
    return wait_for(lambda: list(runs_dir.glob("*/events*"))).pop().parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run that is complete."""
    return ppo.main(ppo.Args(runs_dir=str(tmp_path_factory.mktemp("runs")), **SHORT))


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """The same, to be spoiled."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in finished.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def refusals(folder: Path) -> set[str]:
    """What --resume and enjoy say of a folder that they refuse."""
    lines = set()
    for play in (
        lambda: ppo.main(ppo.Args(**SHORT | {"resume": folder, "total_timesteps": 512})),
        lambda: enjoy.main(enjoy.Args(folder, episodes=1)),
    ):
        with pytest.raises(UsageError) as error:
            play()
        assert "\n" not in str(error.value)
        lines.add(str(error.value))
    return lines


# ---------------------------------------------------------------------------------------- only finite numbers are kept


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(bad):
    sound = {"a": [torch.ones(3), 1.0, {"b": torch.arange(3), "c": (None, "x", True, 2)}], "d": torch.zeros(0)}
    assert not_finite(sound, "agent") is None
    assert not_finite({"huge": torch.full((10,), 3e38), "half": torch.full((9,), 6e4).half()}, "agent") is None
    assert not_finite(sound | {"d": torch.tensor([[0, bad]])}, "agent") == "agent.d"
    assert not_finite(sound | {"e": {"f": [0.0, bad]}}, "agent") == "agent.e.f.1"
    assert not_finite({"both": torch.tensor([bad, -bad])}, "agent") == "agent.both"


@pytest.mark.parametrize("place", ["a buffer", "the optimizer", "extra state", "any other module"])
def test_no_checkpoint_with_a_number_that_is_not_finite(place, tmp_path):
    network = torch.nn.BatchNorm1d(2)
    optimizer, other = torch.optim.Adam(network.parameters()), State(numbers=[1.0])
    network(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    name = {"a buffer": "agent.running_var", "the optimizer": "optimizer.state.0.exp_avg_sq"}
    name |= {"extra state": "optimizer.param_groups.0.lr", "any other module": "other.numbers.0"}
    with (
        pytest.raises(
            NonFiniteError, match=f"^{name[place]} is not finite at step 200; last good checkpoint: step 100"
        ),
        small_run(tmp_path, agent=network, optimizer=optimizer, other=other) as run,
    ):
        run.step = 100
        run.log({"train/policy_loss": 1.0})
        match place:
            case "a buffer":
                network.running_var[1] = math.inf
            case "the optimizer":
                optimizer.state[network.weight]["exp_avg_sq"][0] = math.nan
            case "extra state":
                optimizer.param_groups[0]["lr"] = math.nan
            case "any other module":
                other.state["numbers"][0] = -math.inf
        run.step = 200
        run.log({"train/policy_loss": 1.0})
    checkpoint = load_checkpoint(run.folder)
    assert checkpoint["step"] == 100 and not_finite(checkpoint["modules"], "") is None
    assert not (run.folder / "checkpoint.tmp").exists() and not (run.folder / "done.json").exists()


class Sick(gym.Env):
    """Episodes of 10 steps; its 155th reward or observation is not a number."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def __init__(self, what: str):
        self.what, self.age, self.t = what, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.age, self.t = self.age + 1, self.t + 1
        bad = {self.what: math.nan} if self.age == 155 else {}
        return np.full(2, bad.get("obs", 0), np.float32), bad.get("reward", 1.0), self.t == 10, False, {}


gym.register("SickReward-v0", lambda: Sick("reward"))
gym.register("SickObs-v0", lambda: Sick("obs"))


@pytest.mark.parametrize(
    "env_id, line",
    [("SickReward-v0", "the return in environment 0 is nan"), ("SickObs-v0", "train/policy_loss is nan")],
)
def test_a_number_from_an_environment_that_is_none_ends_the_run(env_id, line, tmp_path, monkeypatch, capsys):
    flags = ["--env-id", env_id, "--num-envs", "2", "--num-steps", "32", "--checkpoint-interval", "64"]
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags, "--runs-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        launch(ppo.main, ppo.Args)
    err = capsys.readouterr().err
    assert stopped.value.code == 1 and err.startswith(f"ppo: {line} at step ") and err.count("\n") == 1
    (folder,) = tmp_path.iterdir()
    checkpoint = load_checkpoint(folder)
    assert f"last good checkpoint: step {checkpoint['step']} in {folder}" in err and checkpoint["step"] >= 256
    assert not_finite(checkpoint["modules"], "") is None


def test_infinite_observations_do_not_poison_the_statistics_of_a_checkpoint(tmp_path, toy, monkeypatch):
    """The losses may stay finite, since normalised observations are clipped: the statistics alone are spoiled."""
    import toys

    look = toys.Toy.look

    def infinite(self):
        obs, info = look(self)
        if self.clock.sum() > 0 and len(self.actions) > 40:
            obs[0, 0, 0] = np.inf
        return obs, info

    monkeypatch.setattr(toys.Toy, "look", infinite)
    sizes = {"num_envs": 2, "num_steps": 12, "total_timesteps": 480, "checkpoint_interval": 24, "eval_episodes": 0}
    with pytest.raises(NonFiniteError):
        ippo_per_agent.main(ippo_per_agent.Args(env_id=toy, runs_dir=str(tmp_path), normalize_obs=True, **sizes))
    (folder,) = tmp_path.iterdir()
    assert not_finite(load_checkpoint(folder)["modules"], "") is None


# ---------------------------------------------------------------------------------------- a checkpoint is what it says


def test_every_flipped_byte_is_noticed(copy):
    path = copy / "checkpoint.pt"
    content, rng = path.read_bytes(), random.Random(1)
    places = {0, 1, len(content) // 2, len(content) - 33, len(content) - 32, len(content) - 1}
    places |= {rng.randrange(len(content)) for _ in range(300)}
    for place in sorted(places):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        with pytest.raises(UsageError, match=r"checkpoint.pt is damaged"):
            load_checkpoint(copy)
    assert all("checkpoint.pt is damaged" in line for line in refusals(copy))
    for size in (0, 1, 31, 32, 33, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(UsageError, match=r"checkpoint.pt is damaged"):
            load_checkpoint(copy)
    path.write_bytes(content)
    assert load_checkpoint(copy)["step"] == 256
    assert torch.load(path, weights_only=True)["script"] == "ppo"  # the sum at its end is in nobody's way


@pytest.mark.parametrize("content", [{}, [1, 2], "text", {"format": FORMAT + 1, "step": 1}])
def test_other_things_with_a_good_checksum(content, copy):
    write_checkpoint(content, copy / "checkpoint.pt")
    assert refusals(copy) == {f"{copy}/checkpoint.pt is no checkpoint of this version of cleanmarl"}


def test_checkpoints_of_others(copy, finished):
    checkpoint = load_checkpoint(finished)
    torch.save(checkpoint, copy / "checkpoint.pt")  # as before there were checksums
    assert refusals(copy) == {f"{copy}/checkpoint.pt is damaged, or of another version of cleanmarl"}

    write_checkpoint(checkpoint | {"script": "ppo_shared"}, copy / "checkpoint.pt")
    assert refusals(copy) == {f"{copy}/checkpoint.pt is a checkpoint of ppo_shared.py, not of ppo.py"}

    agent = {name: x[:-1] if x.ndim else x for name, x in checkpoint["modules"]["agent"].items()}
    write_checkpoint(checkpoint | {"modules": checkpoint["modules"] | {"agent": agent}}, copy / "checkpoint.pt")
    for line in refusals(copy):
        assert line.startswith(
            f"the agent of {copy}/checkpoint.pt does not fit the script as it is (Error(s) in loading"
        )

    write_checkpoint(checkpoint | {"modules": {}}, copy / "checkpoint.pt")
    assert refusals(copy) == {f"the agent of {copy}/checkpoint.pt does not fit the script as it is ('agent')"}


@pytest.mark.parametrize("place", ["a file in the way", "a folder"])
def test_a_video_that_cannot_be_written_is_refused_before_it_is_played(place, finished, tmp_path, capsys):
    pytest.importorskip("moviepy")
    (tmp_path / "file").touch()
    (tmp_path / "folder.gif").mkdir()
    video = tmp_path / ("file/a.gif" if place == "a file in the way" else "folder.gif")
    with pytest.raises(
        UsageError, match=f"^--video {video} (is a folder|cannot be written \\((File exists|Not a dir))"
    ):
        enjoy.main(enjoy.Args(finished, episodes=1, video=video))
    assert not capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- one writer a run


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    with started(*endless(tmp_path)) as process:
        folder = run_folder(tmp_path)
        with started(sys.executable, FOLDER / "ppo.py", "--resume", folder) as second:
            before = (folder / "args.json").read_bytes()
            out, err = second.communicate(timeout=60)
        assert second.returncode == 2 and not out and process.poll() is None
        assert err == f"ppo: {folder} is being written by another process: wait until it ends, or stop it\n"
        assert (folder / "args.json").read_bytes() == before
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        step = load_checkpoint(folder)["step"]
    total = {"total_timesteps": step + 512, "resume": folder, "eval_episodes": 0}
    stored = json.loads((folder / "args.json").read_text())["args"]
    assert ppo.main(ppo.Args(**stored | total)) == folder
    assert load_checkpoint(folder)["step"] == step + 512


def test_a_lock_ends_with_its_process_however_it_ends(tmp_path):
    with started(*endless(tmp_path), "--checkpoint-interval", 512) as process:
        folder = run_folder(tmp_path)
        wait_for(lambda: (folder / "checkpoint.pt").exists())
        process.kill()
        process.wait()
    step = load_checkpoint(folder)["step"]
    stored = json.loads((folder / "args.json").read_text())["args"]
    ppo.main(ppo.Args(**stored | {"total_timesteps": step + 512, "resume": folder, "eval_episodes": 0}))
    assert load_checkpoint(folder)["step"] == step + 512


def test_whoever_is_refused_leaves_no_lock(copy):
    for _ in range(2):
        with pytest.raises(UsageError, match="is complete at step 256"):
            ppo.main(ppo.Args(**SHORT, resume=copy))
    ppo.main(ppo.Args(**SHORT | {"resume": copy, "total_timesteps": 512}))
    assert load_checkpoint(copy)["step"] == 512


# ------------------------------------------------------------------------------------------- terminals that are closed


def on_a_terminal(*command, before=lambda: None):
    """A process that is alone on a terminal, and our end of it: when that is closed, the kernel sends SIGHUP."""
    ours, theirs = pty.openpty()

    def take_the_terminal():
        hear_signals()
        before()
        os.setsid()
        os.close(os.open(os.ttyname(1), os.O_RDWR))  # the first one that is opened is the session's

    process = started(*command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_the_terminal)
    return process, ours, theirs


def test_a_closed_terminal_saves_and_ends(tmp_path):
    context, ours, theirs = on_a_terminal(*endless(tmp_path), "--checkpoint-interval", 10**9)
    with context as process:
        os.close(theirs)
        folder = run_folder(tmp_path)
        wait_for(lambda: "train/policy_loss" in scalars(folder))
        assert not (folder / "checkpoint.pt").exists()
        os.close(ours)
        assert process.wait(60) == 128 + signal.SIGHUP
    step = load_checkpoint(folder)["step"]
    assert step > 0 and scalars(folder)["train/policy_loss"][-1][0] == step


def test_under_nohup_a_run_outlives_its_terminal(tmp_path):
    """It goes on to its end, although nobody hears it: neither lines nor a progress bar raise."""
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731 (what nohup does)
    command = [sys.executable, FOLDER / "ppo.py", "--total-timesteps", 8192, "--runs-dir", tmp_path]
    context, ours, theirs = on_a_terminal(*command, "--eval-episodes", 2, before=ignore)
    with context as process:
        os.close(theirs)
        folder = run_folder(tmp_path)
        os.close(ours)
        assert process.wait(60) == 0
    assert (folder / "done.json").exists() and load_checkpoint(folder)["step"] == 8192


def test_a_pipe_that_nobody_reads_any_more(tmp_path):
    """As in `python ppo.py | head -1`."""
    command = [sys.executable, FOLDER / "ppo.py", "--total-timesteps", 2048, "--eval-episodes", 1]
    with started(*command, "--runs-dir", tmp_path) as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 0 and not err
    assert (run_folder(tmp_path) / "done.json").exists()


def test_a_line_in_the_midst_of_another_is_dropped(capsys):
    class Busy:
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    tell("lost", Busy())
    tell("heard")
    assert capsys.readouterr().out == "heard\n"


# ------------------------------------------------------------------------------------------------------------ the disk


@contextmanager
def small_disk(folder: Path, size: str):
    """A file system of its own; needs root, and a kernel that lets it mount."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def largest_file(size: int):
    """No file of this process can grow beyond `size` bytes: a write fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    disk = tmp_path / "disk"
    with small_disk(disk, "1m"):
        flags = ["--total-timesteps", 10**6, "--checkpoint-interval", 512, "--eval-episodes", 0, "--runs-dir", disk]
        with started(sys.executable, FOLDER / "ppo.py", *flags) as process:
            folder = run_folder(disk)
            wait_for(lambda: (folder / "checkpoint.pt").exists())
            with suppress_full(disk / "filler") as filler:
                filler.write(bytes(2_000_000))
            _, err = process.communicate(timeout=60)
        assert process.returncode == 1 and err.count("\n") == 1, err
        step = load_checkpoint(folder)["step"]
        assert err.startswith(f"ppo: {folder} cannot be written (No space left on device) at step ")
        assert err.endswith(f"; last good checkpoint: step {step:,} in {folder}\n")
        assert not (folder / "checkpoint.tmp").exists() and not (folder / "done.json").exists()

        (disk / "filler").unlink()  # there is room again
        stored = json.loads((folder / "args.json").read_text())["args"]
        ppo.main(ppo.Args(**stored | {"total_timesteps": step + 1024, "resume": folder}))
        steps = [step for step, _ in scalars(folder)["train/policy_loss"]]
        assert steps == sorted(set(steps)) and steps[-1] == step + 1024


@contextmanager
def suppress_full(path: Path):
    """A file to fill a disk with."""
    try:
        with path.open("wb", buffering=0) as file:
            yield file
    except OSError:
        pass


def test_events_that_cannot_be_written_are_one_line(tmp_path):
    with pytest.raises(WriteError) as error, small_run(tmp_path, counter=State(value=1)) as run:
        run.step = 100
        run.save()
        run.step = 200
        events = next(run.folder.glob("events*")).stat().st_size
        with largest_file(events + 10):
            run.write({"train/policy_loss": 1.0})
    reason = f"{run.folder} cannot be written (File too large) at step 200"
    assert str(error.value) == f"{reason}; last good checkpoint: step 100 in {run.folder}"
    assert load_checkpoint(run.folder)["step"] == 100  # not tried again


def test_an_error_is_told_even_if_the_disk_is_full(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), small_run(tmp_path, bulk=State(x=torch.zeros(100_000))) as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            1 / 0  # noqa: B018
        finally:
            limit, run.save = run.save, lambda: limited(limit)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "cannot be written (File too large) at step 0; there is no checkpoint yet" in capsys.readouterr().err


def limited(save):
    with largest_file(100_000):
        save()


@pytest.mark.parametrize("fate", ["deleted", "renamed"])
def test_a_folder_that_is_gone_is_one_line(fate, tmp_path):
    with pytest.raises(WriteError) as error, small_run(tmp_path, counter=State(value=1)) as run:
        run.step = 100
        run.log({})
        moved = run.folder.rename(tmp_path / "moved")
        if fate == "deleted":
            for path in moved.iterdir():
                path.unlink()
            moved.rmdir()
        run.step = 200
        run.log({})
    line = f"{run.folder} cannot be written (No such file or directory) at step 200; there is no checkpoint yet in "
    assert str(error.value) == f"{line}{run.folder}"
    assert not run.folder.exists()
    if fate == "renamed":
        assert load_checkpoint(moved)["step"] == 100


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path, monkeypatch):
    for size in (0, 200):  # of args.json, or of the copy of the script
        with largest_file(size), pytest.raises(UsageError, match=r"cannot write the run folder .* \(File too large\)"):
            small_run(tmp_path)
        assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("command", [["-m", "cleanmarl.ppo"], ["-m", "cleanmarl.enjoy", "nowhere"]])
def test_interrupt_at_any_moment(command, tmp_path):
    """To the whole process group, as from a terminal: no traceback, and a checkpoint if there was anything to save."""
    for seconds in (0.5, 1.0, 2.0, 4.0):
        flags = ["--total-timesteps", 10**9] if command[1] == "cleanmarl.ppo" else []
        with started(sys.executable, *command, *flags, cwd=tmp_path, process_group=0) as process:
            time.sleep(seconds)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert "Traceback" not in err and err.count("\n") <= 1, (seconds, err)
            assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 2), (seconds, err)
        assert all((run / "checkpoint.pt").exists() for run in tmp_path.glob("runs/*/") if list(run.glob("events*")))


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--torch-threads", "100000000"], "--torch-threads 100000000 would crash torch; this machine has "),
        (["--device", "meta"], "--device meta is not there (Tensor.item() cannot be called on meta tensors)"),
        (["--device", "cpu:7"], "--device cpu:7 is not there; --device cpu always is"),
        (["--runs-dir", ""], "--runs-dir is empty; the folder of now is --runs-dir ."),
        (["--env-id", "LunarLander-v2"], "unknown environment 'LunarLander-v2'; did you mean LunarLander-v3"),
        (
            ["--track"],
            "--track: No API key configured. Use `wandb login` to log in. (WANDB_MODE=offline needs no login",
        ),
    ],
)
def test_refused_with_one_line_before_anything_is_written(flags, line, tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env |= {"HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "none"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, FOLDER / "ppo.py", *flags]
    (tmp_path / "here").mkdir()
    done = subprocess.run(command, cwd=tmp_path / "here", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"ppo: {line}") and done.stderr.count("\n") == 1
    assert not list((tmp_path / "here").iterdir())


def test_memory_that_is_not_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppo.py"])

    def main(args):
        np.empty(2**55, np.float32)

    with pytest.raises(SystemExit) as stopped:
        launch(main, ppo.Args)
    err = capsys.readouterr().err
    assert stopped.value.code == 1 and err.startswith("ppo: not enough memory: Unable to allocate 128. PiB")
    assert err.count("\n") == 1
