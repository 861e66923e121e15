"""What an environment has started, as a simulator with a process of its own, ends with it, whatever ends the run."""

import importlib
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from cleanmarl import impala, ippo, ppo
from cleanmarl.envs import make

import pytest
from toys import gone, wait_for

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")

SIMULATED = """
import os, subprocess, time
import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv

class Simulated:
    "Its simulator, which anyone may ask to end, is started anew with each episode."
    sim, render_mode = None, None

    def begin(self):
        self.close()
        self.sim, self.time = subprocess.Popen(["sleep", "600"]), 0
        with open(os.environ["SIMULATORS"], "a") as file:
            print(self.sim.pid, file=file)

    def close(self):
        if self.sim is not None:
            self.sim.terminate()
            self.sim.wait()
            if "CLOSE_FAILS" in os.environ and 0 < self.time < 20:
                raise RuntimeError("the simulator does not answer")

class One(Simulated, gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.begin()
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        time.sleep(float(os.environ.get("SECONDS", 0)))
        if "WATCHED" in os.environ and self.sim.poll() is not None:
            raise RuntimeError("somebody has ended the simulator")
        if self.time == 20 and "FAILS" in os.environ:
            raise RuntimeError("the simulator is out of memory")
        return np.zeros(2, np.float32), 1.0, False, self.time == 20, {}

class Two(Simulated, ParallelEnv):
    metadata, possible_agents = {"name": "two"}, ["first", "second"]

    def observation_space(self, agent):
        return One.observation_space

    def action_space(self, agent):
        return One.action_space

    def reset(self, seed=None, options=None):
        self.begin()
        self.agents = self.possible_agents
        return dict.fromkeys(self.agents, np.zeros(2, np.float32)), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.time += 1
        if "WATCHED" in os.environ and self.sim.poll() is not None:
            raise RuntimeError("somebody has ended the simulator")
        is_over, agents = self.time == 20, self.agents
        self.agents = [] if is_over else agents
        each = np.zeros(2, np.float32), 1.0, False, is_over, {}
        return tuple(dict.fromkeys(agents, x) for x in each)
"""
SHORT = {"num_envs": 2, "eval_episodes": 0}


@pytest.fixture
def simulators(tmp_path, monkeypatch):
    """A folder with the module, in which the test works, and the processes that have been started so far."""
    (tmp_path / "simulated.py").write_text(SIMULATED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIMULATORS", str(tmp_path / "pids"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "simulated", raising=False)
    importlib.invalidate_caches()

    def started() -> list[int]:
        path = tmp_path / "pids"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    yield started
    for pid in started():
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("num_actors", [0, 1])
def test_those_of_actors_end(num_actors, simulators):
    """In an actor, too, an environment ends them by SIGTERM, which is not blocked for what it starts."""
    args = impala.Args(env_id="simulated:One", num_actors=num_actors, total_timesteps=1024, unroll_length=64, **SHORT)
    impala.main(args)
    assert len(simulators()) > 20
    wait_for(lambda: all(map(gone, simulators())), 60)


def test_those_of_an_actor_that_is_busy_end(simulators, monkeypatch):
    """It is in the middle of its second unroll, which takes three seconds, when the learner has had enough."""
    monkeypatch.setenv("SECONDS", "0.1")
    args = impala.Args(env_id="simulated:One", num_actors=1, total_timesteps=32, unroll_length=16, **SHORT)
    impala.main(args)
    assert simulators()
    wait_for(lambda: all(map(gone, simulators())), 60)


@pytest.mark.parametrize("num_actors", [0, 1])
def test_a_close_that_fails_costs_no_run(num_actors, simulators, monkeypatch, capfd):
    monkeypatch.setenv("CLOSE_FAILS", "")
    args = impala.Args(env_id="simulated:One", num_actors=num_actors, total_timesteps=512, unroll_length=70, **SHORT)
    assert (impala.main(args) / "done.json").exists() and not capfd.readouterr().err


def test_a_close_that_fails_leaves_no_other_open(simulators, monkeypatch, capfd):
    monkeypatch.setenv("CLOSE_FAILS", "")
    with closing(make("pz/simulated:Two", 2, num_workers=1)) as envs:
        _, info = envs.reset(seed=1)
        envs.step(info["action_mask"].argmax(-1))
        assert sum(not gone(pid) for pid in simulators()) == 2
    wait_for(lambda: all(map(gone, simulators())), 60)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("num_workers", [0, 1])
def test_those_of_workers_end(num_workers, simulators):
    with closing(make("pz/simulated:Two", 2, num_workers=num_workers)) as envs:
        _, info = envs.reset(seed=1)
        for _ in range(30):
            *_, info = envs.step(info["action_mask"].argmax(-1))
        assert sum(not gone(pid) for pid in simulators()) == 2
    wait_for(lambda: all(map(gone, simulators())), 60)


def test_those_of_a_run_that_fails_end(simulators):
    line = [sys.executable, ppo.__file__, "--env-id", "simulated:One", "--num-envs", "2"]
    done = subprocess.run(line, env=os.environ | {"FAILS": ""}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.endswith("RuntimeError: the simulator is out of memory\n")
    assert len(simulators()) == 2 and all(map(gone, simulators()))


@pytest.mark.parametrize(
    "script, env_id",
    [(ppo, "simulated:One"), (ippo, "pz/simulated:Two?num_workers=1"), (impala, "simulated:One")],
    ids=["ppo", "workers", "actors"],
)
def test_those_of_a_run_that_is_stopped_end(script, env_id, simulators, monkeypatch):
    """By Ctrl-C in a terminal, which all of the process group get: it saves, and they end with it.

    Not before, where they are in other processes, which are in a group of their own.
    """
    if script is not ppo:
        monkeypatch.setenv("WATCHED", "")
    if script is impala:
        monkeypatch.setenv("SECONDS", "0.02")  # so that the learner waits for the actor, and hears if it fails
    line = [sys.executable, script.__file__, "--env-id", env_id, "--num-envs", "4"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, **pipes, process_group=0) as process:
        wait_for(lambda: len(simulators()) > 8)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped at step" in out and not err
    wait_for(lambda: all(map(gone, simulators())), 60)
