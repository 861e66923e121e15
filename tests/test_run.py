"""Run management with real runs, real processes and real signals: folder, metrics, checkpoints, resume, faults."""

import dataclasses
import importlib
import json
import math
import os
import platform
import pty
import random
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cleanmarl import impala_replay, ippo, ppo, vdn
from cleanmarl import run as run_module
from cleanmarl.cli import RunArgs, UsageError, launch
from cleanmarl.envs import make
from cleanmarl.evaluate import evaluate
from cleanmarl.folder import new_folder
from cleanmarl.layers import Networks, StackedLinear
from cleanmarl.run import NonFiniteError, Run, WriteError, load_checkpoint, load_states, write_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from optional import need
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter
from toys import gone, hears, largest_file, scalars, wait_for

SCRIPTS = {"ppo": ppo, "ippo": ippo}
FOLDER = Path(ppo.__file__).parent
LINUX = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")

TRAIN = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance", "learning_rate"]
METRICS = {f"train/{name}" for name in TRAIN} | {"time/SPS"}
METRICS |= {"rollout/ep_reward", "rollout/ep_length", "rollout/num_episodes"}
METRICS |= {"eval/ep_reward", "eval/std_ep_reward", "eval/ep_length"}
OF_NETWORKS = {"train/actor_gradients", "train/critic_gradients"}  # of ippo


def arguments(script: str, env_id: str, runs_dir: Path, **changes):
    """Arguments of a run of two short updates: 2 environments, 32 steps each."""
    sizes = {"total_timesteps": 128, "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "update_epochs": 1}
    return SCRIPTS[script].Args(**{"env_id": env_id, "runs_dir": str(runs_dir), "eval_episodes": 2} | sizes | changes)


def train(script: str, env_id: str, runs_dir: Path, **changes) -> Path:
    return SCRIPTS[script].main(arguments(script, env_id, runs_dir, **changes))


def start(script: str, *flags, **environment) -> subprocess.Popen:
    """A script in a process of its own, as a user starts it."""
    command = [sys.executable, str(FOLDER / f"{script}.py"), *map(str, flags)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextmanager
def started(script: str, *flags, **environment):
    """The same; whatever the test does, the process is gone afterwards."""
    process = start(script, *flags, **environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_folder(runs_dir: Path) -> Path:
    """The only run folder in runs_dir, once it has events."""
    return wait_for(lambda: list(runs_dir.glob("*/events*"))).pop().parent


# --------------------------------------------------------------------------------------------- what a run leaves behind


@pytest.mark.parametrize(
    "script, env_id, num_agents",
    [
        ("ppo", "CartPole-v1", 1),
        ("ppo", "FrozenLake-v1", 1),  # Discrete observations
        ("ippo", "mpe/simple_spread_v3", 3),
        ("ippo", "mpe/simple_speaker_listener_v4", 2),  # agents with different spaces
        ("ippo", "pz/mpe2/simple_spread_v3", 3),  # worker processes
    ],
)
def test_run_folder(script, env_id, num_agents, tmp_path, capsys):
    args = arguments(script, env_id, tmp_path)
    folder = SCRIPTS[script].main(args)
    assert list(tmp_path.iterdir()) == [folder]
    assert re.fullmatch(rf"{env_id.replace('/', '-')}__{script}__1__\d{{8}}-\d{{6}}", folder.name)

    meta = json.loads((folder / "args.json").read_text())
    assert meta["script"] == script and meta["command"] == sys.argv
    assert meta["args"] == json.loads(json.dumps(asdict(args)))
    assert meta["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert meta["versions"]["numpy"] == np.__version__ and meta["versions"]["gymnasium"] == gym.__version__
    assert meta["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    git = subprocess.run(["git", "-C", FOLDER, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert meta["git_commit"] == (git.stdout.strip() or None)

    points = scalars(folder)
    of_agents = {f"{part}/ep_reward_agent_{i}" for part in ("rollout", "eval") for i in range(num_agents)}
    assert set(points) == METRICS | (of_agents | OF_NETWORKS if num_agents > 1 else set())
    for tag, values in points.items():
        first = {"train": [64, 128], "time": [64, 128], "eval": [128]}
        assert [step for step, _ in values] == first.get(tag.split("/")[0], [step for step, _ in values]), tag
    assert [step for step, _ in points["rollout/num_episodes"]] == [64, 128]
    if num_agents > 1:
        for part in ("rollout", "eval"):  # the team's return is the sum of the agents'
            team, agents = (
                points[f"{part}/ep_reward"],
                [points[f"{part}/ep_reward_agent_{i}"] for i in range(num_agents)],
            )
            total = [sum(value for _, value in values) for values in zip(*agents)]
            np.testing.assert_allclose([value for _, value in team], total, rtol=1e-5)
        assert {value for _, value in points["rollout/ep_length"]} == {25.0}
        assert points["rollout/num_episodes"][-1] == (128, 4)  # 64 steps of 2 environments, 25 steps an episode

    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == 128 and checkpoint["num_episodes"] == points["rollout/num_episodes"][-1][1]
    assert set(checkpoint["modules"]) >= {"agent", "optimizer"}
    assert json.loads((folder / "done.json").read_text())["step"] == 128
    assert not (folder / "checkpoint.tmp").exists()
    out = capsys.readouterr().out
    assert f"tensorboard --logdir {folder}" in out and f"python -m cleanmarl.enjoy {folder}" in out


def test_runs_of_one_second_have_folders_of_their_own(tmp_path):
    """Eight at the same moment, a hundred times."""
    together = threading.Barrier(8)

    def make_folder(attempt: int) -> Path:
        together.wait()
        return new_folder(tmp_path / f"run_{attempt // 8}")

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(make_folder, range(800)))
    assert len(set(folders)) == 800 and sorted(folders) == sorted(tmp_path.iterdir())


def test_points_of_a_curve(tmp_path, monkeypatch):
    """However many updates there are; a point shows the mean of the episodes since the last one."""
    monkeypatch.setattr(run_module, "CURVE_POINTS", 5)
    with small_run(tmp_path) as run:
        for update in range(1, 101):
            run.step = 10 * update
            episode = {"r": np.array([update, -1.0]), "l": np.array([2 * update, 0])}
            run.log_episodes({"episode": episode, "_episode": np.array([True, False])})
            run.log({"train/policy_loss": update})
    points, steps = scalars(run.folder), [200, 400, 600, 800, 1000]
    assert points["train/policy_loss"] == [(step, step / 10) for step in steps]
    assert points["rollout/ep_reward"] == [(step, step / 10 - 9.5) for step in steps]
    assert points["rollout/ep_length"] == [(step, step / 5 - 19) for step in steps]
    assert points["rollout/num_episodes"] == [(step, step / 10) for step in steps]


@pytest.mark.parametrize("script, env_id", [("ppo", "CartPole-v1"), ("ippo", "mpe/simple_spread_v3")])
def test_same_seed_same_run(script, env_id, tmp_path):
    one, same, other = (scalars(train(script, env_id, tmp_path, seed=seed)) for seed in (1, 1, 2))
    for points in (one, same, other):
        del points["time/SPS"]
    assert len(list(tmp_path.iterdir())) == 3  # runs started in one second do not share a folder
    assert one == same
    for tag in ("train/policy_loss", "train/value_loss", "train/entropy", "eval/ep_reward"):
        assert one[tag] != other[tag]


# ---------------------------------------------------------------------------------------------------------- checkpoints


@dataclass
class Small(RunArgs):
    """The arguments that Run itself reads."""

    env_id: str = "none"
    total_timesteps: int = 1000
    checkpoint_interval: int = 100
    eval_episodes: int = 0


def small_run(runs_dir: Path, modules: dict | None = None, **changes) -> Run:
    return Run(Small(runs_dir=str(runs_dir), **changes), __file__, **modules or {})


class Counter:
    """Anything with a state_dict is a module of a checkpoint; this one is of 800 kB, and fails to order."""

    def __init__(self, value: int = 0):
        self.value, self.fails = value, False

    def state_dict(self) -> dict:
        if self.fails:
            raise RuntimeError("no state today")
        return {"value": self.value, "bulk": torch.zeros(100_000, dtype=torch.int64)}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


def draw() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(1).item()]  # noqa: NPY002


def test_weights_that_are_not_finite_never_become_a_checkpoint(tmp_path):
    """Losses are of before the last step of an update: what it broke shows in the weights alone."""
    network = torch.nn.Linear(2, 1)
    with (
        pytest.raises(NonFiniteError, match=r"agent\.weight is not finite at step 200; last good checkpoint: step 100"),
        small_run(tmp_path, {"agent": network, "counter": Counter()}) as run,
    ):
        run.step = 100
        run.log({"train/policy_loss": 1.0})
        with torch.no_grad():
            network.weight[0, 1] = math.nan
        run.step = 200
        run.log({"train/policy_loss": 1.0})
    saved = load_checkpoint(run.folder)
    assert saved["step"] == 100 and saved["modules"]["agent"]["weight"].isfinite().all()
    assert not (run.folder / "done.json").exists()
    network = torch.nn.Linear(2, 1)
    with (
        pytest.raises(NonFiniteError, match="there is no checkpoint yet"),
        small_run(tmp_path, {"agent": network}) as run,
    ):  # the one at the end of a run
        network.weight.data[0, 1] = math.nan


def test_a_network_that_could_never_be_saved_does_not_begin(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(2, 1))
    network[0].register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    with pytest.raises(UsageError, match=r"agent\.0\.mask is not finite; persistent=False keeps a buffer"):
        small_run(tmp_path, {"agent": network})
    assert not list(tmp_path.iterdir())
    network[0].register_buffer("mask", network[0].mask, persistent=False)
    with small_run(tmp_path, {"agent": network}) as run:
        pass
    assert list(load_checkpoint(run.folder)["modules"]["agent"]) == ["0.weight", "0.bias"]
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(network.parameters()))
    with pytest.raises(UsageError, match=r"scheduler\.\w+ is not finite"):
        small_run(tmp_path, {"agent": network, "scheduler": scheduler})


def test_a_loss_is_logged_as_it_is(tmp_path, recwarn):
    with small_run(tmp_path, {}) as run:
        run.step = 1
        run.log({"train/rnd_loss": torch.ones((), requires_grad=True) * 0.5})
    assert scalars(run.folder)["train/rnd_loss"] == [(1, 0.5)]
    assert not [warning for warning in recwarn if "requires_grad" in str(warning.message)]


def test_what_is_learned_and_not_kept_is_refused(tmp_path):
    """A module that the optimizer has and Run has not would begin anew at each --resume."""
    agent, predictor = torch.nn.Linear(2, 1), torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam([*agent.parameters(), *predictor.parameters()])
    with pytest.raises(UsageError, match=r"optimizer learns a parameter \(3, 2\) that no checkpoint would hold"):
        small_run(tmp_path, {"agent": agent, "optimizer": optimizer})
    assert not list(tmp_path.iterdir())
    with small_run(tmp_path, {"agent": agent, "predictor": predictor, "optimizer": optimizer}):
        pass
    with small_run(tmp_path, {"agent": agent, "optimizer": torch.optim.Adam([agent.weight.detach()[:, 1:]])}):
        pass  # a view, as Networks has them


class Hidden(torch.nn.Module):
    """A network with something that torch does not know of."""

    def __init__(self, **attributes):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        vars(self).update(attributes)


class Mean:
    """A running mean as it is often written, without torch."""

    def __init__(self):
        self.mean, self.count = np.zeros(2), 1e-4


def test_numbers_and_arrays_that_change_in_a_layer_are_told_once(tmp_path, capfd):
    agent = torch.nn.Sequential(Hidden(temperature=1.0, mean=Mean(), table=np.arange(3), size=7, rate=math.nan))
    with small_run(tmp_path, {"agent": agent}) as run:
        run.step = 1
        run.log({})
        assert "changed" not in capfd.readouterr().err
        agent[0].temperature *= 0.9
        agent[0].mean.mean += 1  # in place
        agent[0].mean.count += 1
        run.step = 2
        run.log({})
        assert re.search(
            r"agent\.0\.temperature, agent\.0\.mean\.mean, agent\.0\.mean\.count changed, and no .* register_buffer",
            capfd.readouterr().err,
        )
        agent[0].temperature *= 0.9
        run.step = 3
        run.log({})
    assert "changed" not in capfd.readouterr().err


class Counting(torch.optim.SGD):
    """An optimizer whose steps get smaller by a count of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        self.param_groups[0]["lr"] = 0.1 / self.count
        return super().step(closure)


def test_what_an_optimizer_counts_beside_its_state_is_told(tmp_path, capfd):
    agent = torch.nn.Linear(2, 1)
    optimizers = {"own": Counting(agent.parameters()), "adam": torch.optim.Adam(agent.parameters())}
    with small_run(tmp_path, {"agent": agent} | optimizers) as run:
        for optimizer in optimizers.values():
            learn(agent, optimizer)
        run.log({})
    assert re.search(r"\nown\.count changed, and no .* self\.state or a group", capfd.readouterr().err)


def test_a_compiled_network_does_not_begin(tmp_path):
    agent = torch.compile(torch.nn.Linear(2, 1))
    with pytest.raises(UsageError, match=r"agent is the result of torch\.compile: compile layers in Agent\.__init__"):
        small_run(tmp_path, {"agent": agent})
    assert not list(tmp_path.iterdir())
    with small_run(tmp_path, {"agent": torch.nn.Sequential(agent)}):  # as in Agent.__init__
        pass


def test_numbers_that_a_checkpoint_has_are_not_told(tmp_path, capfd):
    agent = Keeper()
    agent.count = 0
    with small_run(tmp_path, {"agent": agent}) as run:
        agent.count += 1
        run.log({})
    assert "changed" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "attribute",
    [
        [torch.nn.Linear(2, 2)],
        {"left": (torch.nn.Linear(2, 2),)},
        torch.ones(2),
        [torch.nn.Parameter(torch.ones(2))],
        [torch.nn.BatchNorm1d(2, affine=False)],
    ],
)
@pytest.mark.parametrize("name", ["branches", "_branches"])
def test_layers_that_torch_does_not_know_of_are_refused(name, attribute, tmp_path):
    """In a list of Python they act, but nothing trains or keeps them: enjoy would play others."""
    with pytest.raises(UsageError, match=rf"^agent\.1\.{name} would be in no checkpoint, nor be trained: nn.Mod"):
        small_run(tmp_path, {"agent": torch.nn.Sequential(torch.nn.Identity(), Hidden(**{name: attribute}))})
    assert not list(tmp_path.iterdir())


def test_a_list_of_what_is_registered_elsewhere_is_none_of_these(tmp_path):
    agent = Hidden(sizes=[2, 1], names={"of": "agents"})
    agent.parts = [agent.layer, agent.layer.weight]
    agent.lstm = torch.nn.LSTM(2, 2)  # has a list of its own parameters
    with small_run(tmp_path, {"agent": agent}):
        pass


def test_parameters_that_no_optimizer_has_are_named(tmp_path, capfd):
    agent = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1) for name in ("actor", "head", "frozen")})
    agent.frozen.requires_grad_(False)
    modules = {"agent": agent, "target": torch.nn.Linear(2, 1), "optimizer": torch.optim.Adam(agent.actor.parameters())}
    with small_run(tmp_path, modules):
        assert "no optimizer learns agent.head.weight, agent.head.bias\n" in capfd.readouterr().err
    modules["optimizer"] = torch.optim.Adam(agent.parameters())
    with small_run(tmp_path, modules):
        assert "no optimizer learns" not in capfd.readouterr().err


def learn(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    network(torch.ones(1, 2)).sum().backward()
    optimizer.step()


class Both:
    """Two optimizers in one keyword of Run."""

    def __init__(self, *optimizers):
        self.optimizers, self.optimizer = optimizers, optimizers[0]  # it is no scheduler of that one

    def state_dict(self) -> dict:
        return {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict) -> None:
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(i)])


def test_an_optimizer_beside_those_of_the_run_is_refused_at_its_second_update(tmp_path):
    """Resumed, it would begin anew, and what it learns as well. One that is made for each update may."""
    agent, predictor = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer, other = torch.optim.Adam(agent.parameters()), torch.optim.Adam(predictor.parameters())
    for modules in ({"both": Both(optimizer, other)}, {"optimizer": optimizer, "other": other}):
        with small_run(tmp_path, {"agent": agent, "predictor": predictor} | modules) as run:
            for _ in range(3):
                learn(agent, optimizer)
                learn(predictor, other)
                learn(predictor, torch.optim.SGD(predictor.parameters()))
                run.step += 1
                run.log({})
    message = r"an optimizer \(Adam\) steps that no checkpoint would hold; give Run it and its module"
    with small_run(tmp_path, {"agent": agent, "predictor": predictor, "optimizer": optimizer}) as run:
        learn(predictor, other)
        run.step += 1
        run.log({})
        learn(predictor, other)
        with pytest.raises(UsageError, match=message):
            run.log({})
    with small_run(tmp_path, {"agent": agent, "predictor": predictor, "optimizer": optimizer}) as run:
        for steps in (True, False, False):  # as delayed ones do
            learn(agent, optimizer)
            if steps:
                learn(predictor, other)
            run.step += 1
            run.log({})
        learn(predictor, other)
        with pytest.raises(UsageError, match=message):
            run.log({})
    with pytest.raises(UsageError, match=r"^extra=dict has no state_dict, load_state_dict, which a checkpoint needs"):
        small_run(tmp_path, {"extra": {"best": 0.0}})


class Owner(torch.nn.Module):
    """A network with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.layer.parameters())


class Keeper(Owner):
    """And which gives torch the state of that one, too."""

    def get_extra_state(self) -> dict:
        return self.optimizer.state_dict()

    def set_extra_state(self, state: dict) -> None:
        self.optimizer.load_state_dict(state)


@pytest.mark.parametrize("network", [Owner, Keeper])
def test_an_optimizer_within_a_network_is_kept_if_the_network_says_so_alone(network, tmp_path):
    agent = network()
    with small_run(tmp_path, {"agent": agent}) as run:
        learn(agent.layer, agent.optimizer)
        run.step += 1
        run.log({})
        learn(agent.layer, agent.optimizer)
        if network is Owner:
            with pytest.raises(UsageError, match=r"an optimizer \(Adam\) steps that no checkpoint would hold"):
                run.log({})
            return
        run.step += 1
        run.log({})
    resumed = network()
    load_states(load_checkpoint(run.folder), run.folder, agent=resumed)
    assert resumed.optimizer.state[resumed.layer.weight]["step"] == 2


def test_the_optimizer_of_another_run_in_this_process_is_none_of_these(tmp_path):
    turns = threading.Barrier(2, timeout=60)

    def play(name: str) -> None:
        agent = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(agent.parameters())
        with small_run(tmp_path / name, {"agent": agent, "optimizer": optimizer}) as run:
            for _ in range(4):
                turns.wait()
                learn(agent, optimizer)
                turns.wait()
                run.step += 1
                run.log({})

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(play, name) for name in ("one", "other")]:
            future.result()


def test_a_line_that_overwrites_the_scheduler_is_refused(tmp_path):
    """The curve would show the scheduler's learning rate, and the steps would have the other."""
    agent = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    with small_run(tmp_path, {"agent": agent, "optimizer": optimizer, "scheduler": scheduler}) as run:
        for _ in range(3):
            learn(agent, optimizer)
            scheduler.step()
            run.step += 1
            run.log({})
        optimizer.param_groups[0]["lr"] = 0.5
        learn(agent, optimizer)
        scheduler.step()
        with pytest.raises(UsageError, match="the scheduler's learning rate is overwritten before the step"):
            run.log({})


def test_parameters_that_no_loss_reaches_are_named_once(tmp_path, capfd):
    """A detach too many, or a layer that nobody calls; not what has had a gradient, or is frozen."""
    for optimizer in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD):
        agent = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1) for name in ("actor", "head", "frozen")})
        agent.frozen.requires_grad_(False)
        modules = {"agent": agent, "optimizer": optimizer(agent.parameters(), lr=0.1)}
        with small_run(tmp_path, modules) as run:
            for _ in range(4):
                modules["optimizer"].zero_grad()
                agent.actor(torch.ones(2)).sum().backward()
                modules["optimizer"].step()
                run.step += 10
                run.log({"train/a": 1.0})
        line = "no loss has reached agent.head.weight, agent.head.bias so far: nothing is learned there\n"
        # plain gradient descent does not know
        assert capfd.readouterr().err.count(line) == (0 if optimizer is torch.optim.SGD else 1)


def test_parameters_of_two_optimizers_are_named(tmp_path, capfd):
    """And not as such that nothing learns, where the other optimizer does."""
    agent = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1) for name in ("actor", "rnd")})
    first, second = torch.optim.Adam(agent.parameters()), torch.optim.Adam(agent.rnd.parameters())
    with small_run(tmp_path, {"agent": agent, "optimizer": first, "rnd_optimizer": second}) as run:
        for _ in range(3):
            for child, optimizer in ((agent.actor, first), (agent.rnd, second)):
                agent.zero_grad()
                child(torch.ones(2)).sum().backward()
                optimizer.step()
            run.step += 10
            run.log({"train/a": 1.0})
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("agent.rnd.weight, agent.rnd.bias: several optimizers have them and may step them; leave ")


def test_an_optimizer_for_each_network_of_a_stack_is_no_mistake(tmp_path, capfd):
    agent = torch.nn.ModuleDict({"actor": StackedLinear(3, 2, 1)})
    networks = Networks(agent, 3)
    optimizers = {f"optimizer_{m}": torch.optim.Adam(networks[m]) for m in range(3)}
    with small_run(tmp_path, {"agent": agent, **optimizers}):
        pass
    assert not capfd.readouterr().err
    with small_run(tmp_path, {"agent": agent, **optimizers, "another": torch.optim.Adam(networks[1])}):
        pass
    assert "agent.actor.weight, agent.actor.bias: several optimizers have them" in capfd.readouterr().err


def test_stacked_parameters_that_no_loss_reaches_are_named_too(tmp_path, capfd):
    """Where the optimizer has a view for each network; not those of a network whose turn has not come yet."""
    agent = torch.nn.ModuleDict({name: StackedLinear(3, 2, 1) for name in ("actor", "head")})
    networks = Networks(agent, 3)
    optimizer = torch.optim.Adam([{"params": networks[m]} for m in range(3)])
    with small_run(tmp_path, {"agent": agent, "optimizer": optimizer}) as run:
        for m in range(3):
            agent["actor"](torch.ones(4, 3, 2)).sum().backward()
            networks.take_gradients(active=[m])
            optimizer.step()
            run.step += 10
            run.log({"train/a": 1.0})
    line = "no loss has reached agent.head.weight, agent.head.bias so far: nothing is learned there\n"
    assert capfd.readouterr().err.count(line) == 1


def test_an_edited_script_that_resumes_leaves_the_one_that_ran_before(tmp_path, capfd):
    """With the step until which it ran; another try at the same step does not take its place."""
    script, text = tmp_path / "my_ppo.py", (FOLDER / "ppo.py").read_text()
    steps = {"total_timesteps": 128, "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "eval_episodes": 0}

    def train(edited: str, **flags) -> subprocess.CompletedProcess:
        script.write_text(edited)
        flags = [str(x) for key, value in flags.items() for x in (f"--{key.replace('_', '-')}", value)]
        return subprocess.run([sys.executable, script, *flags], capture_output=True, text=True, timeout=120)

    train(f"{text}# 1\n", **steps, runs_dir=tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    said = train(f"{text}# 2\n", total_timesteps=256, resume=folder)
    assert said.returncode == 0 and "my_ppo.py has changed since the run began; it goes on as it is now" in said.stdout
    slip = text.replace("    all_stats = []\n", "    raise RuntimeError('a slip')\n")
    assert "a slip" in train(f"{slip}# 3\n", total_timesteps=320, resume=folder).stderr
    assert train(f"{text}# 4\n", total_timesteps=320, resume=folder).returncode == 0
    kept = {path.name: path.read_text().splitlines()[-1] for path in folder.glob("*.py")}
    assert kept == {"my_ppo-128.py": "# 1", "my_ppo-256.py": "# 2", "my_ppo.py": "# 4"}


def test_a_metric_of_some_updates_comes_with_the_next_point(tmp_path):
    with small_run(tmp_path, total_timesteps=2000) as run:
        for update in range(1, 2001):
            run.step += 1
            run.log({"own/always": update} | ({"own/sparse": update} if update % 10 == 1 else {}))
    always, sparse = (dict(scalars(run.folder)[f"own/{name}"]) for name in ("always", "sparse"))
    assert len(always) == 1000 and len(sparse) == 200
    assert all(step - 1 <= value <= step for step, value in sparse.items())


def test_a_scheduler_that_is_made_after_the_run_is_refused_at_the_first_update(tmp_path):
    agent = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(agent.parameters())
    run = small_run(tmp_path, {"agent": agent, "optimizer": optimizer})
    with pytest.raises(UsageError, match="a scheduler changes the learning rate of optimizer"), run:
        torch.optim.lr_scheduler.LinearLR(optimizer)
        run.step += 1
        run.log({})


@pytest.mark.parametrize("value", [None, [1, 2], np.ones(2), torch.ones(3), "high"])
def test_a_metric_that_is_no_number_is_named(value, tmp_path):
    with pytest.raises(UsageError, match=r"^the metric own/x must be a number, not \w+"), small_run(tmp_path) as run:
        run.log({"own/x": value})


def test_a_scheduler_that_is_not_kept_is_refused(tmp_path):
    """At each --resume it would begin anew from the learning rate that it had reached: a warm-up would go beyond."""
    agent = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1.0)
    modules = {"agent": agent, "optimizer": optimizer}
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    with pytest.raises(UsageError, match="a scheduler changes the learning rate of optimizer, and no checkpoint would"):
        small_run(tmp_path, modules)
    assert not list(tmp_path.iterdir())
    with small_run(tmp_path, modules | {"scheduler": scheduler}) as run:
        optimizer.step()
        scheduler.step()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    load_states(load_checkpoint(run.folder), run.folder, optimizer=optimizer, scheduler=scheduler)
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1)


def test_battles_that_were_won_are_counted(tmp_path):
    """By `log_episodes` for the curves, and by `evaluate`, in which every environment plays its share."""
    is_won, lasts = np.array([1.0, 0.0, 1.0]), np.array([1, 2, 3])

    class Battles:
        num_envs, clock = 3, np.zeros(3, int)

        def reset(self, seed=None):
            return np.zeros((3, 1)), {}

        def step(self, action):
            self.clock = self.clock + 1
            ended = self.clock == lasts
            self.clock[ended] = 0
            episode = {"r": is_won[:, None] * [1.0, 2.0], "l": lasts, "battle_won": is_won}
            info = {"episode": episode, "_episode": ended} if ended.any() else {}
            return np.zeros((3, 1)), None, ended, np.zeros(3, bool), info

    metrics = evaluate(Battles(), lambda *seen: None, 7)  # 3, 2 and 2 battles
    assert metrics["eval/battle_won"] == pytest.approx(5 / 7)
    assert metrics["eval/ep_reward"] == pytest.approx(5 / 7 * 3) and metrics["eval/ep_length"] == pytest.approx(13 / 7)
    with small_run(tmp_path) as run:
        envs = Battles()
        for _ in range(6):
            *_, info = envs.step(None)
            if info:
                run.log_episodes(info)
        run.step = 10
        run.log({})
    assert scalars(run.folder)["rollout/battle_won"] == [(10, pytest.approx(8 / 11))]  # 6, 3 and 2 battles


def test_checkpoint_restores_everything(tmp_path):
    counter = Counter(7)
    with small_run(tmp_path, {"counter": counter}) as run:
        run.step, run.num_episodes = 300, 12
        run.log({})  # due: saves
        expected = draw()
        assert run.last_checkpoint == 300
        run.step, counter.value = 350, 8  # not due: saved at the end only
        run.log({})
        assert load_checkpoint(run.folder)["step"] == 300
        (tmp_path / "early.pt").write_bytes((run.folder / "checkpoint.pt").read_bytes())
    assert load_checkpoint(run.folder)["step"] == 350
    assert load_checkpoint(run.folder)["modules"]["counter"]["value"] == 8

    (run.folder / "checkpoint.pt").write_bytes((tmp_path / "early.pt").read_bytes())
    (run.folder / "done.json").unlink()
    counter = Counter()
    resumed = small_run(tmp_path, {"counter": counter}, resume=run.folder)
    assert (resumed.step, resumed.num_episodes, counter.value) == (300, 12, 7)
    assert draw() == expected


def test_a_metric_of_some_updates_comes_with_the_next_point_of_a_resumed_run_too(tmp_path):
    """As that of an actor which learns in every second update."""
    curves = []
    for stops in (False, True):
        with small_run(tmp_path / str(stops)) as run:
            run.step = 10
            run.log({"train/a": 1.0})
            run.step = 11
            run.log({"train/b": 2.0}, may_write=False)
            if stops:
                run.save()
                run.events.close()
                run.lock.close()
                run = small_run(tmp_path / "True", resume=run.folder)
            run.step = 30
            run.log({"train/a": 3.0})
            curves.append({key: points for key, points in scalars(run.folder).items() if key.startswith("train/")})
    assert curves[0] == curves[1] == {"train/a": [(10, 1.0), (30, 3.0)], "train/b": [(30, 2.0)]}


def test_a_resume_from_python_changes_no_learning_either(tmp_path):
    """It took the arguments of now for those of the run, and wrote them into args.json."""
    flags = {"num_envs": 2, "num_steps": 16, "eval_episodes": 0, "runs_dir": str(tmp_path)}
    folder = ppo.main(ppo.Args(total_timesteps=64, gamma=0.5, **flags))
    stored = (folder / "args.json").read_text()
    with pytest.raises(
        UsageError, match=r"^--gamma 0\.99 would change the learning of the run to resume, which has 0\.5$"
    ):
        ppo.main(ppo.Args(resume=folder, total_timesteps=128, **flags))
    assert (folder / "args.json").read_text() == stored and (folder / "done.json").exists()
    ppo.main(ppo.Args(resume=folder, total_timesteps=128, gamma=0.5, checkpoint_interval=7, **flags))
    assert load_checkpoint(folder)["step"] == 128


@pytest.mark.parametrize("name", ["ppo", "mappo", "vdn", "impala"])
def test_steps_of_an_update_that_fails_are_taken_once_more(name, tmp_path, monkeypatch):
    """Else a run would end without having learned from them, and one that always fails would be done."""
    script = importlib.import_module(f"cleanmarl.{name}")
    updates, update = [], script.update

    def fails_once(*inputs):
        updates.append(inputs)
        if len(updates) == 3:
            raise RuntimeError("an update failed")
        return update(*inputs)

    monkeypatch.setattr(script, "update", fails_once)
    flags = {"total_timesteps": 800, "num_envs": 4, "eval_episodes": 0, "runs_dir": str(tmp_path)}
    flags |= {"ppo": {"num_steps": 25}, "mappo": {"num_steps": 25}}.get(name, {})
    flags |= {"batch_size": 4} if name == "vdn" else {}
    flags |= {"num_actors": 0, "unroll_length": 25, "updates_per_collect": 1} if name == "impala" else {}
    with pytest.raises(RuntimeError, match="an update failed"):
        script.main(script.Args(**flags))
    (folder,) = tmp_path.iterdir()
    failed_at = load_checkpoint(folder)["step"]
    num_steps = load_checkpoint(folder)["modules"]["optimizer"]["state"][0]["step"]
    assert num_steps > 0
    del updates[3:]
    script.main(script.Args(**flags | {"resume": folder}))
    whole = script.main(script.Args(**flags | {"runs_dir": str(tmp_path / "whole")}))
    steps = [load_checkpoint(x)["modules"]["optimizer"]["state"][0]["step"] for x in (folder, whole)]
    # of the updates of a round that off-policy scripts take, some were taken before one failed
    assert (steps[0] >= steps[1] if name == "vdn" else steps[0] == steps[1]) and steps[1] > num_steps
    assert failed_at < load_checkpoint(folder)["step"]


def test_numbers_of_numpy_come_back_from_a_checkpoint(tmp_path):
    """A schedule by np.cos makes the learning rate one of NumPy's."""
    network = torch.nn.Linear(2, 1)
    optimizer, counter = torch.optim.SGD(network.parameters()), Counter(np.arange(3))
    with small_run(tmp_path, {"agent": network, "optimizer": optimizer, "counter": counter}) as run:
        run.step, optimizer.param_groups[0]["lr"] = np.int64(100), 0.1 * np.cos(1)
    again, optimizer = Counter(), torch.optim.SGD(network.parameters())
    modules = {"agent": network, "optimizer": optimizer, "counter": again}
    resumed = small_run(tmp_path, modules, resume=run.folder, total_timesteps=2000)
    assert (resumed.step, optimizer.param_groups[0]["lr"]) == (100, 0.1 * np.cos(1))
    np.testing.assert_array_equal(again.value, counter.value)


def test_a_checkpoint_that_nobody_could_read_is_not_written(tmp_path):
    counter = Counter(1)
    line = "^no checkpoint holds a collections.deque: a state is numbers"
    with pytest.raises(UsageError, match=line), small_run(tmp_path, {"counter": counter}) as run:
        run.step = 100
        run.log({})
        run.step, counter.value = 200, deque([1], 3)
        run.log({})
    assert load_checkpoint(run.folder)["step"] == 100 and not (run.folder / "checkpoint.tmp").exists()


@pytest.mark.parametrize(
    "value, line",
    [
        (defaultdict(int), "^no checkpoint holds a builtins.int, collections.defaultdict: a state is numbers"),
        (lambda x: x, "^no checkpoint holds the state of counter: Can't pickle <function"),
    ],
)
def test_a_state_that_no_checkpoint_holds_is_told_before_the_run(value, line, tmp_path):
    with pytest.raises(UsageError, match=line):
        small_run(tmp_path, {"counter": Counter(value)})
    assert not list(tmp_path.iterdir())


def test_crash_while_saving_leaves_the_previous_checkpoint(tmp_path):
    counter = Counter(1)
    with pytest.raises(RuntimeError, match="no state today"), small_run(tmp_path, {"counter": counter}) as run:
        run.step = 100
        run.save()
        before = (run.folder / "checkpoint.pt").read_bytes()

        run.step, counter.value = 200, 2
        line = f"{run.folder} cannot be written (File too large) at step 200; last good checkpoint: step 100"
        with largest_file(300_000), pytest.raises(WriteError, match=re.escape(line)):
            run.save()
        assert not (run.folder / "checkpoint.tmp").exists()
        assert (run.folder / "checkpoint.pt").read_bytes() == before
        assert load_checkpoint(run.folder)["modules"]["counter"]["value"] == 1
        assert run.last_checkpoint == 100

        run.save()  # there is room again
        assert load_checkpoint(run.folder)["modules"]["counter"]["value"] == 2
        counter.fails = True
        run.step = 300
        run.log({})
    assert load_checkpoint(run.folder)["step"] == 200
    assert not (run.folder / "done.json").exists()


def test_an_exception_saves_and_is_not_swallowed(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), small_run(tmp_path, {"counter": Counter(5)}) as run:
        run.step = 50
        run.log({})
        1 / 0  # noqa: B018
    assert load_checkpoint(run.folder)["step"] == 50 and not (run.folder / "done.json").exists()
    assert "saved step 50" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- resume


def test_what_a_killed_run_wrote_after_step_0_is_dropped(tmp_path):
    """It failed before its first update, was resumed and killed before its first checkpoint, and resumed again."""
    with pytest.raises(ZeroDivisionError), small_run(tmp_path) as run:
        1 / 0  # noqa: B018
    assert load_checkpoint(run.folder)["step"] == 0
    for attempt, steps in enumerate([(30, 60), (40, 80)]):
        with pytest.raises(KeyboardInterrupt), small_run(tmp_path, resume=run.folder) as run:
            for run.step in steps:
                run.log({"train/policy_loss": attempt})
            raise KeyboardInterrupt  # nothing is saved
    assert scalars(run.folder)["train/policy_loss"] == [(40, 1), (80, 1)]


def test_resume_with_more_steps(tmp_path):
    """1,024 steps, then 1,024 more: one stream of events, one optimizer, the schedule of the new total."""
    folder = train("ppo", "CartPole-v1", tmp_path, total_timesteps=1024)
    first = scalars(folder)
    half = load_checkpoint(folder)
    assert train("ppo", "CartPole-v1", tmp_path, total_timesteps=2048, resume=folder) == folder
    assert list(tmp_path.iterdir()) == [folder]

    points, whole = scalars(folder), load_checkpoint(folder)
    for tag in ("train/policy_loss", "time/SPS", "rollout/num_episodes"):
        assert [step for step, _ in points[tag]] == list(range(64, 2049, 64)), tag
        assert points[tag][:16] == first[tag]
    assert [step for step, _ in points["eval/ep_reward"]] == [1024, 2048]
    lr = ppo.Args.learning_rate
    expected = [lr * (1 - i / 16) for i in range(16)] + [lr * (1 - i / 32) for i in range(16, 32)]
    np.testing.assert_allclose([value for _, value in points["train/learning_rate"]], expected, rtol=1e-5)
    episodes = [value for _, value in points["rollout/num_episodes"]]
    assert episodes == sorted(episodes) and whole["num_episodes"] > half["num_episodes"]
    adam = [checkpoint["modules"]["optimizer"]["state"][0]["step"].item() for checkpoint in (half, whole)]
    assert adam == [16 * 2, 32 * 2]  # updates * minibatches
    assert json.loads((folder / "done.json").read_text())["step"] == whole["step"] == 2048


def test_a_run_that_goes_on_is_not_done(tmp_path):
    with small_run(tmp_path, total_timesteps=10) as run:
        run.step = 10
    assert (run.folder / "done.json").exists()
    with small_run(tmp_path, total_timesteps=20, resume=run.folder):
        assert not (run.folder / "done.json").exists()


def test_a_run_that_cannot_go_on_stays_as_it_was(tmp_path, monkeypatch):
    """Whatever hinders it, and whenever: it is complete still, and its latest checkpoint the latest."""
    flags = {"total_timesteps": 512, "eval_interval": 128, "checkpoint_interval": 128, "keep_checkpoints": 3}
    folder = train("ppo", "CartPole-v1", tmp_path, **flags)
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    earlier = min(folder.glob("checkpoint-*.pt"))

    def resume() -> None:
        train("ppo", "CartPole-v1", tmp_path, **flags | {"total_timesteps": 1024}, resume=earlier)

    future = folder / f"events.out.tfevents.{int(time.time()) + 1000}.host.1"
    future.touch()
    with pytest.raises(UsageError, match="events of the future"):
        resume()
    future.unlink()
    monkeypatch.setattr(run_module, "copy_file", lambda *_: os.close(-1))
    with pytest.raises(UsageError, match="cannot write the run folder"):
        resume()
    assert {path: path.read_bytes() for path in folder.iterdir()} == contents
    monkeypatch.undo()
    resume()
    assert load_checkpoint(folder)["step"] == 1024


def test_checkpoints_of_a_branch_that_was_left_are_dropped(tmp_path):
    flags = {"checkpoint_interval": 128, "keep_checkpoints": 4}
    folder = train("ppo", "CartPole-v1", tmp_path, total_timesteps=512, **flags)
    steps = [int(path.stem[11:]) for path in folder.glob("checkpoint-*.pt")]
    assert sorted(steps) == [128, 256, 384]
    flags |= {"checkpoint_interval": 256, "resume": folder / "checkpoint-128.pt"}
    train("ppo", "CartPole-v1", tmp_path, total_timesteps=640, **flags)
    steps = [int(path.stem[11:]) for path in folder.glob("checkpoint-*.pt")]
    assert sorted(steps) == [128, 384]  # 256 was of the other branch, 128 + 256 is of this one


def test_what_is_written_last_is_read_last(tmp_path, monkeypatch):
    """Event files are read in the order of their names: second, host, pid, and a number that the process counts."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(8))  # then 9, 10
    folder = None
    for step in range(10, 40, 10):
        while time.time() % 1 > 0.3:  # a run takes some milliseconds: the next one begins in the same second
            time.sleep(0.01)
        with small_run(tmp_path, total_timesteps=step, resume=folder) as run:
            folder, run.step = run.folder, step
            run.log({"train/policy_loss": step})
        if step == 10:
            (path,) = folder.glob("events*")
            path.rename(folder / path.name.replace("-cleanmarl", ".0"))  # as earlier versions named it
    assert scalars(folder)["train/policy_loss"] == [(10, 10), (20, 20), (30, 30)]


def test_a_summary_writer_of_the_same_second_has_a_file_of_its_own(tmp_path, monkeypatch):
    SummaryWriter(tmp_path / "warm").close()  # the first one takes its time
    folder = None
    for step in (10, 20):
        monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))  # as in a new process
        while time.time() % 1 > 0.3:
            time.sleep(0.01)
        with small_run(tmp_path, total_timesteps=step, resume=folder) as run, SummaryWriter(run.folder) as writer:
            folder, run.step = run.folder, step
            writer.add_histogram("own/weights", np.arange(step), step)
            writer.add_scalar("own/mean", step, step)
            run.log({"train/policy_loss": step})
    assert len(list(folder.glob("events*"))) == 4  # two of each second, if the machine was not too busy
    points = scalars(folder)
    assert points["train/policy_loss"] == points["own/mean"] == [(10, 10), (20, 20)]
    histograms = EventAccumulator(str(folder), size_guidance={"histograms": 0}).Reload().Histograms("own/weights")
    assert [(event.step, event.histogram_value.num) for event in histograms] == [(10, 10), (20, 20)]


def test_resume_remembers_the_raised_total(tmp_path, monkeypatch):
    folder = train("ippo", "mpe/simple_spread_v3", tmp_path, num_envs=2)
    train("ippo", "mpe/simple_spread_v3", tmp_path, resume=folder, total_timesteps=256)
    checkpoint = load_checkpoint(folder)
    checkpoint["step"] = 192  # as if it had been stopped there
    write_checkpoint(checkpoint, folder / "checkpoint.pt")
    (folder / "done.json").unlink()
    monkeypatch.setattr(sys, "argv", ["ippo.py", "--resume", str(folder)])  # the line that a stopped run shows
    launch(ippo.main, ippo.Args)
    assert load_checkpoint(folder)["step"] == 256


class Constant(gym.Env):
    """Every episode has a return of 5, or that of the environment variable REWARD."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), float(os.environ.get("REWARD", 1)), self.time == 5, False, {}


CONSTANT = {"env_id": "test_run:Constant", "num_envs": 2, "num_steps": 32, "eval_episodes": 2}


def test_a_resume_that_fails_half_way_does_not_make_the_run_complete(tmp_path):
    """Its new total was noted, and it still counted as done."""
    args = ppo.Args(**CONSTANT, total_timesteps=64, runs_dir=str(tmp_path))
    folder = ppo.main(args)
    longer = dataclasses.replace(args, resume=folder, total_timesteps=128)
    (folder / "ppo.py").rename(tmp_path / "aside")
    (folder / "ppo.py").mkdir()  # no script can be written there
    with pytest.raises(UsageError, match="cannot write the run folder"):
        ppo.main(longer)
    (folder / "ppo.py").rmdir()
    (tmp_path / "aside").rename(folder / "ppo.py")
    assert load_checkpoint(ppo.main(longer))["step"] == 128 and (folder / "done.json").exists()


def test_the_best_is_there_after_a_write_that_failed(tmp_path):
    """The checkpoint knew of it, and no later evaluation was better."""
    args = ppo.Args(**CONSTANT, total_timesteps=192, eval_interval=64, checkpoint_interval=64, runs_dir=str(tmp_path))

    class Blocked(Run):
        def evaluate(self, *args, **kwargs):
            (self.folder / "best.tmp").mkdir(exist_ok=True)  # where best.pt is written first
            super().evaluate(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "Run", Blocked)
        with pytest.raises(WriteError):
            ppo.main(args)
    (folder,) = tmp_path.iterdir()
    (folder / "best.tmp").rmdir()
    assert not (folder / "best.pt").exists()
    ppo.main(dataclasses.replace(args, resume=folder))
    assert load_checkpoint(folder / "best.pt")["best"] == load_checkpoint(folder)["best"] == 5


def test_a_run_that_is_resumed_knows_a_best_that_is_newer_than_its_checkpoint(tmp_path):
    """Killed between the two files."""
    args = ppo.Args(**CONSTANT, total_timesteps=128, eval_interval=64, runs_dir=str(tmp_path))
    folder = ppo.main(args)
    for name, best in (("best.pt", 7.0), ("checkpoint.pt", -np.inf)):
        checkpoint = load_checkpoint(folder / name) | {"best": best}
        checkpoint.pop("checksum", None)
        write_checkpoint(checkpoint, folder / name)
    ppo.main(dataclasses.replace(args, resume=folder, total_timesteps=192))
    assert load_checkpoint(folder / "best.pt")["best"] == 7 == load_checkpoint(folder)["best"]


ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("tool", ["-m cleanmarl.enjoy", f"{ROOT}/benchmark/keep.py --out {{out}}/agents/a"])
def test_a_reward_that_is_no_number_is_one_line_in_what_plays_a_run(tool, tmp_path):
    folder = ppo.main(ppo.Args(**CONSTANT, total_timesteps=64, runs_dir=str(tmp_path / "runs")))
    command = [sys.executable, *tool.format(out=tmp_path).split(), str(folder)]
    env = os.environ | {"REWARD": "nan", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "nan" in done.stderr.lower(), done.stderr


def test_a_run_that_was_too_short_to_learn_says_so(tmp_path, capsys):
    flags = {"num_envs": 2, "batch_size": 4, "eval_episodes": 0, "runs_dir": str(tmp_path)}
    for total, says in ((50, True), (100, False)):  # two and four episodes of 25 steps
        vdn.main(vdn.Args(**flags, total_timesteps=total))
        assert ("nothing was learned: no update took place in these steps" in capsys.readouterr().out) == says


def test_a_run_whose_episodes_are_all_shorter_than_an_unroll_says_that_nothing_was_learned(tmp_path, capsys):
    flags = {"num_actors": 0, "num_envs": 2, "batch_size": 2, "eval_episodes": 0, "runs_dir": str(tmp_path)}
    for unroll_length, says in ((500, True), (5, False)):  # random games of CartPole take 20 steps
        flags |= {"unroll_length": unroll_length, "remainder": "drop"}
        impala_replay.main(impala_replay.Args(**flags, total_timesteps=2000))
        assert ("nothing was learned: no update took place in these steps" in capsys.readouterr().out) == says


def test_kill_and_resume(tmp_path, monkeypatch):
    """kill -9 while events run ahead of the checkpoint; the resumed run has every point once."""
    total = 15_000
    flags = ["--env-id", "mpe/simple_spread_v3", "--num-envs", 4, "--num-steps", 25, "--update-epochs", 1]
    flags += ["--total-timesteps", total, "--checkpoint-interval", 2500, "--eval-episodes", 2, "--runs-dir", tmp_path]
    with started("ippo", *flags) as process:
        folder = run_folder(tmp_path)
        checkpoint = wait_for(lambda: (folder / "checkpoint.pt").exists() and folder / "checkpoint.pt")
        while True:  # stopped, it cannot save between the look and the kill
            process.send_signal(signal.SIGSTOP)
            saved, seen = load_checkpoint(folder)["step"], scalars(folder)
            if seen["train/policy_loss"][-1][0] >= saved + 500:
                break
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        assert process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert 0 < saved < total and torch.load(checkpoint, weights_only=True)["step"] == saved
    assert not (folder / "done.json").exists()

    monkeypatch.setattr(sys, "argv", ["ippo.py", "--resume", str(folder)])
    launch(ippo.main, ippo.Args)
    points = scalars(folder)
    every_update = list(range(100, total + 1, 100))
    for tag in {*METRICS, "rollout/ep_reward_agent_0"} - {"eval/ep_reward", "eval/std_ep_reward", "eval/ep_length"}:
        assert [step for step, _ in points[tag]] == every_update, tag  # no gap, no double
        assert points[tag][: saved // 100] == seen[tag][: saved // 100], tag  # what was there before is still there
    for tag, values in points.items():
        steps = [step for step, _ in values]
        assert steps == sorted(set(steps)) and steps[-1] == total, tag
    assert load_checkpoint(folder)["step"] == total
    assert json.loads((folder / "done.json").read_text())["step"] == total
    assert len(list(folder.glob("events*"))) == 2  # the first file is not rewritten


# -------------------------------------------------------------------------------------------------------------- signals


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@LINUX
@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_leaves_no_process(signum, status, tmp_path, monkeypatch):
    flags = ["--env-id", "pz/mpe2/simple_spread_v3", "--num-envs", 2, "--num-steps", 25, "--num-minibatches", 2]
    flags += ["--total-timesteps", 50_000, "--checkpoint-interval", 10**9, "--runs-dir", tmp_path]
    with started("ippo", *flags) as process:
        folder = run_folder(tmp_path)
        wait_for(lambda: "train/policy_loss" in scalars(folder))
        workers = children(process.pid)
        assert workers and not any(map(gone, workers)) and not (folder / "checkpoint.pt").exists()
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        assert process.returncode == status and not err
    wait_for(lambda: all(map(gone, workers)), 60)
    step = load_checkpoint(folder)["step"]
    assert step > 0 and scalars(folder)["train/policy_loss"][-1][0] == step
    assert f"stopped at step {step:,}; continue with --resume {folder}" in out
    assert not (folder / "done.json").exists()

    argv = ["ippo.py", "--resume", str(folder), "--total-timesteps", str(step + 100), "--eval-episodes", "0"]
    monkeypatch.setattr(sys, "argv", argv)
    launch(ippo.main, ippo.Args)
    assert json.loads((folder / "done.json").read_text())["step"] == step + 100
    steps = [step for step, _ in scalars(folder)["train/policy_loss"]]
    assert steps == list(range(50, step + 101, 50))


def test_a_signal_saves_all_runs_of_a_process(tmp_path):
    """As of a population, of which the last one that was opened has the signal."""
    with pytest.raises(SystemExit), small_run(tmp_path) as first, small_run(tmp_path) as second:
        for run in (first, second):
            run.step = 50
        os.kill(os.getpid(), signal.SIGTERM)
        first.log({})
        second.log({})
    assert [load_checkpoint(run.folder)["step"] for run in (first, second)] == [50, 50]
    assert not any((run.folder / "done.json").exists() for run in (first, second))


def test_a_signal_ends_the_evaluation_too(tmp_path, monkeypatch):
    flags = ["--total-timesteps", 64, "--num-envs", 2, "--num-steps", 32, "--num-minibatches", 2]
    with started("ppo", *flags, "--eval-episodes", 10**6, "--runs-dir", tmp_path) as process:
        folder = run_folder(tmp_path)
        wait_for(lambda: (folder / "checkpoint.pt").exists())
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 143 and not err
    assert f"stopped at step 64; continue with --resume {folder}" in out and not (folder / "done.json").exists()
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--resume", str(folder), "--eval-episodes", "2"])
    launch(ppo.main, ppo.Args)
    assert [step for step, _ in scalars(folder)["eval/ep_reward"]] == [64] and (folder / "done.json").exists()


@LINUX
@pytest.mark.parametrize(
    "env_id, package",
    [
        ("pz/mpe2/simple_spread_v3", "mpe2"),
        ("smaclite/3m", "smaclite"),
    ],
)
def test_killed_worker_ends_the_run(env_id, package, tmp_path):
    """SIGKILL: soon one line that names the worker, a checkpoint, and no process; memory goes with the last."""
    need(package)
    flags = ["--env-id", env_id, "--num-envs", 2, "--num-steps", 25, "--num-minibatches", 2, "--runs-dir", tmp_path]
    with started("ippo", *flags, "--checkpoint-interval", 10**9) as process:
        folder = run_folder(tmp_path)
        wait_for(lambda: "train/policy_loss" in scalars(folder))
        workers = children(process.pid)
        assert workers and not any(map(gone, workers)) and not (folder / "checkpoint.pt").exists()
        os.kill(workers[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    last = len(workers) - 1
    saved, died = err.splitlines()
    assert process.returncode == 1 and saved.startswith("saved step") and str(folder) in saved
    assert died.startswith(f"ippo: {env_id}: worker {last} (pid {workers[-1]}, environments")
    assert died.endswith("died (signal 9, Killed)") and all(map(gone, workers))
    assert load_checkpoint(folder)["step"] > 0 and not (folder / "done.json").exists()


@LINUX
@pytest.mark.parametrize(
    "first, seconds, second, status",
    [
        (signal.SIGINT, 0.5, signal.SIGINT, 130),
        (signal.SIGINT, 0.5, signal.SIGTERM, 143),
        (signal.SIGTERM, 1.5, signal.SIGTERM, 143),
    ],
)
def test_second_signal_stops_at_once(first, seconds, second, status, tmp_path):
    """The update under way would take hours."""
    with started("ppo", "--update-epochs", 10**9, "--runs-dir", tmp_path) as process:
        wait_for(lambda: hears(process.pid, signal.SIGTERM))  # Python itself has a handler of SIGINT alone
        process.send_signal(first)
        assert "run folder" in process.stdout.readline() and "stopping" in process.stdout.readline()
        time.sleep(seconds)
        assert process.poll() is None  # it tries to finish the update
        process.send_signal(second)
        _, err = process.communicate(timeout=60)
        assert process.returncode == status and not err


def test_a_sigterm_that_comes_by_two_ways_saves(tmp_path):
    """As from systemd, which signals benchmark/run.py and its trial; run.py passes its own on."""
    with started("ppo", "--total-timesteps", 10**7, "--checkpoint-interval", 10**9, "--runs-dir", tmp_path) as process:
        folder = run_folder(tmp_path)
        wait_for(lambda: "train/policy_loss" in scalars(folder))
        process.send_signal(signal.SIGTERM)
        assert "run folder" in process.stdout.readline()
        while "stopping" not in process.stdout.readline():
            assert process.poll() is None
        end = time.monotonic() + 0.5  # in which it may have saved, and be ending
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and not err
    assert f"stopped at step {load_checkpoint(folder)['step']:,}; " in out


# ---------------------------------------------------------------------------------------------------- non-finite losses


class Poisoned(gym.Env):
    """Episodes of 10 steps; after 200 steps of the environment its observations are not numbers."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def __init__(self):
        self.age = self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.age, self.t = self.age + 1, self.t + 1
        obs = np.full(2, math.nan if self.age > 200 else 0, np.float32)
        return obs, 1.0, self.t == 10, False, {}


gym.register("Poisoned-v0", Poisoned)


def test_non_finite_loss_stops(tmp_path, monkeypatch, capsys):
    """2 environments of 32 steps per update: the seventh update meets the first bad observation."""
    flags = ["--env-id", "Poisoned-v0", "--num-envs", "2", "--num-steps", "32", "--total-timesteps", "6400"]
    flags += ["--checkpoint-interval", "128", "--runs-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        launch(ppo.main, ppo.Args)
    (folder,) = tmp_path.iterdir()
    line = f"ppo: the observation is nan in environment 0 at step 402; last good checkpoint: step 384 in {folder}\n"
    assert stopped.value.code == 1 and capsys.readouterr().err == line
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 384  # as it was, although 448 is the step at which the run ended
    assert all(weights.isfinite().all() for weights in checkpoint["modules"]["agent"].values())
    assert scalars(folder)["train/policy_loss"][-1][0] == 384 and not (folder / "done.json").exists()


def test_non_finite_loss_before_the_first_checkpoint(tmp_path):
    with pytest.raises(NonFiniteError) as error:
        train("ppo", "Poisoned-v0", tmp_path, total_timesteps=6400)
    (folder,) = tmp_path.iterdir()
    message = f"the observation is nan in environment 0 at step 402; there is no checkpoint yet in {folder}"
    assert str(error.value) == message
    assert not (folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_losses_must_be_finite(value, tmp_path):
    message = f"train/value_loss is {value} at step 10"
    with pytest.raises(NonFiniteError, match=message), small_run(tmp_path) as run:
        run.step = 5
        run.log({"train/value_loss": 1.0, "train/explained_variance": value})  # of constant returns: no fault
        run.step = 10
        run.log({"train/value_loss": value})


def test_every_value_that_is_not_finite_is_named(tmp_path):
    """Of one bad minibatch, whose loss made the weights NaN, and the means of all losses over those that followed."""
    losses = {"train/policy_loss": math.nan, "train/value_loss": 1.0, "train/own_loss": math.inf, "train/own": math.nan}
    message = (
        "^train/policy_loss is nan, train/own_loss is inf, train/own is nan at step 10; there is no checkpoint yet"
    )
    with pytest.raises(NonFiniteError, match=message), small_run(tmp_path) as run:
        run.step = 10
        run.log(losses)


# ------------------------------------------------------------------------------------------------------------- trackers


def test_a_run_keeps_what_was_imported_from_the_garbage_collector_until_it_ends(tmp_path):
    """In a process of its own: in those of the tests it stays frozen, see conftest.py."""
    code = """if True:
        import gc, sys
        from cleanmarl import ppo
        from cleanmarl.run import Run

        log, frozen = Run.log, [gc.get_freeze_count()]
        Run.log = lambda run, *metrics: (frozen.append(gc.get_freeze_count()), log(run, *metrics))
        ppo.main(ppo.Args(total_timesteps=128, num_steps=16, eval_episodes=0, runs_dir=sys.argv[1]))
        before, *during, after = *frozen, gc.get_freeze_count()
        assert min(during) > before + 10_000 and after <= before, (before, during, after)
    """
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=120)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_launch_keeps_freed_memory():
    """Under `launch`, tensors of 64 MB mostly use the same pages again; without it, each is faulted in anew."""
    code = """if True:
        import resource, sys, torch
        from cleanmarl import cli

        def main(args):
            x = torch.ones(16, 1024, 1024)
            for i in range(40):
                if i == 20:
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                y = x + 1
                del y
            print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

        cli.parse = lambda *args: None
        torch.set_num_threads(1)
        cli.launch(main, None) if sys.argv[1] == "launch" else main(None)
    """

    def faults(how: str) -> int:
        argv = [sys.executable, "-c", code, how]
        return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)

    # 20 tensors, each 16,384 pages of 4 kB or 32 of 2 MB; sometimes a small object takes the place of one
    assert faults("launch") < faults("plain") / 4


def test_wandb_offline(tmp_path):
    flags = ["--num-envs", 2, "--num-steps", 32, "--total-timesteps", 128, "--eval-episodes", 1, "--track"]
    with started("ppo", *flags, "--runs-dir", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true") as process:
        err = process.communicate(timeout=120)[1]
        assert process.returncode == 0, err
    (folder,) = tmp_path.iterdir()
    (log,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = log.read_bytes()
    for text in (b"train/policy_loss", b"eval/ep_reward", b"time/SPS", b"total_timesteps", folder.name.encode()):
        assert text in content, text
    assert (folder / "done.json").exists()


# ------------------------------------------------------------------------------------------------------------- progress


LINE = r"step (?P<step>[\d,]+)/256  \d+%  SPS [\d,]+  return -?\d+\.\d  ETA \d:\d\d:\d\d"


def test_progress_in_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "LINE_SECONDS", 0)
    train("ppo", "FrozenLake-v1", tmp_path, total_timesteps=256)
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("step")]
    assert [re.fullmatch(LINE, line)["step"] for line in lines] == ["64", "128", "192", "256"]
    assert "%|" not in out + err and lines[-1].endswith("ETA 0:00:00")


def test_few_lines_where_there_is_no_terminal(tmp_path, capsys):
    train("ppo", "FrozenLake-v1", tmp_path, total_timesteps=256, num_steps=1, num_minibatches=1)  # 128 updates
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert 1 <= len(lines) <= 5 and lines[-1].startswith("step 256/256  100%")  # every 5 seconds, and the last


def test_progress_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    screen = bytearray()

    def read():
        while True:
            try:
                screen.extend(os.read(ours, 4096))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w") as terminal:  # noqa: PTH123 (a file descriptor)
        monkeypatch.setattr(sys, "stderr", terminal)
        train("ppo", "FrozenLake-v1", tmp_path, total_timesteps=256)
        monkeypatch.undo()
    reader.join(10)
    os.close(ours)
    text = screen.decode()
    assert "\r" in text and "100%|" in text and "256/256" in text
    assert re.search(r"\d\d:\d\d<\d\d:\d\d, .*step.*return \d", text)  # time so far < ETA, rate, return
    assert "step 256/256" not in capsys.readouterr().out  # no lines beside the bar


# ----------------------------------------------------------------------------------------------------------- evaluation


class Steps(gym.Env):
    """Episodes of `length` steps with a reward of 1 each."""

    observation_space, action_space = spaces.Box(0, 99, (1,)), spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, length: int):
        self.length, self.t = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.length, False, {}

    def render(self):
        return np.full((4, 4, 3), self.t, np.uint8)


def steps_envs(*lengths: int) -> gym.vector.VectorEnv:
    envs = SyncVectorEnv([lambda n=n: Steps(n) for n in lengths], autoreset_mode=AutoresetMode.SAME_STEP)
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


@pytest.mark.parametrize(
    "lengths, num_episodes, played",
    [
        ([1, 2, 10], 7, [1, 1, 1, 2, 2, 10, 10]),  # the first 7 episodes to end would be 1 1 2 1 1 2 1
        ([3, 5, 7], 2, [3, 5]),  # fewer episodes than environments
        ([4], 3, [4, 4, 4]),
    ],
)
def test_evaluation_plays_shares(lengths, num_episodes, played):
    envs, seen = steps_envs(*lengths), []

    def policy(obs, info, done):
        assert (done == (obs[:, 0] == 0)).all()  # it says where an episode starts
        seen.append(obs.copy())
        return np.zeros(len(lengths), int)

    metrics = evaluate(envs, policy, num_episodes)
    assert metrics == {
        "eval/ep_reward": pytest.approx(np.mean(played)),
        "eval/std_ep_reward": pytest.approx(np.std(played)),
        "eval/ep_length": pytest.approx(np.mean(played)),
    }
    assert len(seen) == max(sum(n for n in played if n == length) for length in lengths)  # and no step more


def test_evaluation_of_a_team():
    """The return of the team is the sum over the agents, and its deviation that of the sums."""
    envs, by_hand = make("mpe/simple_spread_v3", 2), make("mpe/simple_spread_v3", 2)
    metrics = evaluate(envs, lambda obs, info, done: np.ones((2, 3), int), 4, seed=3)
    by_hand.reset(seed=3)
    returns = np.zeros((2, 2, 3))  # (round, environment, agent)
    for t in range(50):
        returns[t // 25] += by_hand.step(np.ones((2, 3), int))[1]
    assert metrics == {
        "eval/ep_reward": pytest.approx(returns.sum(-1).mean(), rel=1e-5),
        "eval/std_ep_reward": pytest.approx(returns.sum(-1).std(), rel=1e-5),
        "eval/ep_length": 25.0,
    } | {f"eval/ep_reward_agent_{i}": pytest.approx(returns[..., i].mean(), rel=1e-5) for i in range(3)}


def test_evaluation_repeats_by_seed():
    """The seed covers the environments and the samples of the policy."""
    envs = make("mpe/simple_spread_v3", 2)

    def policy(obs, info, done):
        return torch.randint(5, (2, 3)).numpy()

    first = evaluate(envs, policy, 4, seed=3)
    torch.rand(10)
    assert evaluate(envs, policy, 4, seed=3) == first
    assert evaluate(envs, policy, 4, seed=4) != first


def test_evaluation_leaves_training_alone(tmp_path):
    args = arguments("ppo", "CartPole-v1", tmp_path)
    envs = ppo.make_envs(args, 3)
    policy = ppo.make_policy(ppo.Agent(envs, args), greedy=False)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    first = evaluate(envs, policy, 3, seed=5)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[2])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[1]))  # noqa: NPY002
    torch.rand(10)
    assert evaluate(envs, policy, 3, seed=5) == first


def test_no_evaluation(tmp_path):
    points = scalars(train("ppo", "CartPole-v1", tmp_path, eval_episodes=0))
    assert set(points) == {tag for tag in METRICS if not tag.startswith("eval")}


def test_frames_of_environment_0():
    frames = []
    evaluate(steps_envs(4, 2), lambda obs, info, done: np.zeros(2, int), 2, frames=frames)
    assert [int(frame[0, 0, 0]) for frame in frames[:4]] == [0, 1, 2, 3]
    assert len(frames) == 4 + 15 and all((frame == frames[4]).all() for frame in frames[4:])  # half a second of the end
    assert frames[4].max() > 100 and frames[4].shape == frames[0].shape


def test_the_arguments_are_a_text_of_tensorboard(tmp_path):
    """Of a run that was resumed, those of each part."""
    flags = {"num_envs": 2, "num_steps": 64, "eval_episodes": 0}
    folder = ppo.main(ppo.Args(total_timesteps=256, gamma=0.97, runs_dir=str(tmp_path), **flags))
    ppo.main(ppo.Args(total_timesteps=512, gamma=0.97, resume=folder, **flags))
    events = EventAccumulator(str(folder)).Reload().Tensors("arguments")
    texts = [event.tensor_proto.string_val[0].decode() for event in events]
    assert len(texts) == 2 and all("| gamma | 0.97 |" in text for text in texts)
    assert "| total_timesteps | 256 |" in texts[0] and "| total_timesteps | 512 |" in texts[1]


def test_a_memory_ends_at_a_time_limit_of_an_evaluation_too():
    envs = [lambda n=n: gym.wrappers.TimeLimit(Steps(99), n) for n in (3, 5)]
    envs = SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)

    def policy(obs, info, done):
        assert (done == (obs[:, 0] == 0)).all()
        return np.zeros(2, int)

    evaluate(gym.wrappers.vector.RecordEpisodeStatistics(envs), policy, 6)


def test_two_schedulers_may_move_one_optimizer(tmp_path):
    agent = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1.0)
    one, other = (torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.9, 0.8))
    with small_run(tmp_path, {"agent": agent, "optimizer": optimizer, "one": one, "other": other}) as run:
        for _ in range(3):
            learn(agent, optimizer)
            one.step()
            other.step()
            run.step += 1
            run.log({})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.72**3)


def test_steps_per_second_after_a_resume_are_those_since_then(tmp_path):
    with small_run(tmp_path) as run:
        run.step = 900
    with small_run(tmp_path, resume=str(run.folder), total_timesteps=2000) as again:
        again.start_time -= 10
        again.step += 100
        again.log({}, True)
    assert scalars(run.folder)["time/SPS"][-1][1] == pytest.approx(10, rel=0.2)


def test_an_infinite_return_is_no_evaluation():
    """Of the last step's reward, after which no other one is looked at."""

    class Endless(Steps):
        def step(self, action):
            obs, _, end, *rest = super().step(action)
            return obs, np.inf if end else 1.0, end, *rest

    envs = SyncVectorEnv([lambda: Endless(3)], autoreset_mode=AutoresetMode.SAME_STEP)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    with pytest.raises(NonFiniteError, match="a return of the evaluation is NaN or infinite"):
        evaluate(envs, lambda obs, info, done: np.zeros(1, int), 1)
