"""Run a script of CleanRL, as it is, with the present Gymnasium: run_cleanrl.py SCRIPT.py [FLAG ...] [--runs-dir DIR]

It was written for Gymnasium 0.29, whose vector environments reset in the step that ends an episode, and list what each
episode was in `final_info`. Without that it would log no returns, and train on a dummy row after each end. Its
TransformObservation did not ask for the space of what it makes. The script with envpool was written for gym, whose
wrappers pass attributes on, and whose environments have one sign for every end.

With --runs-dir the run is left there as one of ours, which benchmark/run.py can start and benchmark/report.py reads: a
point of its curve is the mean return of the episodes that ended in POINT steps. DIR comes last.
"""

import json
import os
import runpy
import shutil
import sys
import types
from pathlib import Path

import gymnasium as gym
from torch.utils.tensorboard import SummaryWriter

POINT = 512  # steps of a rollout: what a point of ours is of


class SyncVectorEnv(gym.vector.SyncVectorEnv):
    """Gymnasium's, with the resets and the `final_info` of version 0.29."""

    def __init__(self, env_fns):
        super().__init__(env_fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    def step(self, actions):
        *results, infos = super().step(actions)
        if "final_info" in infos:
            episode, ended = infos["final_info"]["episode"], infos["_final_info"]
            infos["final_info"] = [
                {"episode": {key: episode[key][i] for key in "rlt"}} if ends else None for i, ends in enumerate(ended)
            ]
        return (*results, infos)


class TransformObservation(gym.wrappers.TransformObservation):
    """Gymnasium's, with the environment's own space."""

    def __init__(self, env, func):
        super().__init__(env, func, env.observation_space)


class Wrapper:
    """That of gym, which passes on what it does not have."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, **options):
        return self.env.reset(**options)

    def step(self, action):
        return self.env.step(action)


class EnvPool(Wrapper):
    """An envpool of today as one for gym."""

    def reset(self):
        return self.env.reset()[0]

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated | truncated, info


def with_gym() -> None:
    """Let `import gym` and `envpool.make(env_type="gym")` be what CleanRL's script was written for."""
    import envpool

    sys.modules["gym"] = types.SimpleNamespace(Wrapper=Wrapper, spaces=gym.spaces)
    make = envpool.make
    envpool.make = lambda *args, **options: EnvPool(make(*args, **options))


def as_our_run(folder: Path, args: dict[str, str]) -> None:
    """Write the returns of CleanRL's event file below `folder` as those of a run of ours, with the times they had."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0: keep every point
    events.Reload()
    rollouts: dict[int, list] = {}  # the step at the end of a rollout -> the episodes that ended in it
    for event in events.Scalars("charts/episodic_return"):
        rollouts.setdefault(-(-event.step // POINT) * POINT, []).append(event)
    num_episodes = 0
    with SummaryWriter(str(folder)) as writer:
        for step, ended in rollouts.items():
            num_episodes += len(ended)
            mean = sum(event.value for event in ended) / len(ended)
            writer.add_scalar("rollout/ep_reward", mean, step, walltime=ended[-1].wall_time)
            writer.add_scalar("rollout/num_episodes", num_episodes, step, walltime=ended[-1].wall_time)
    about = {"env_id": args["env-id"], "seed": int(args["seed"]), "total_timesteps": int(args["total-timesteps"])}
    script = f"CleanRL's {Path(sys.argv[0]).stem}"
    (folder / "args.json").write_text(json.dumps({"script": script, "command": sys.argv, "args": about}))
    (folder / "done.json").write_text("{}")


if __name__ == "__main__":
    gym.wrappers.TransformObservation = TransformObservation
    if "envpool" in sys.argv[1]:
        with_gym()
    gym.vector.SyncVectorEnv = SyncVectorEnv
    sys.argv = sys.argv[1:]
    if "--runs-dir" not in sys.argv:
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        *sys.argv, _, runs_dir = sys.argv
        args = {name.removeprefix("--"): value for name, value in zip(sys.argv[1::2], sys.argv[2::2])}
        name = f"{args['env-id'].replace('/', '-')}__cleanrl__{args['seed']}"
        script, folder = Path(sys.argv[0]).resolve(), Path(runs_dir, name)
        shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
        folder.mkdir(parents=True)
        print(f"run folder: {folder.absolute()}", flush=True)
        back = Path.cwd()
        os.chdir(folder)  # where it writes runs/
        runpy.run_path(str(script), run_name="__main__")
        os.chdir(back)
        as_our_run(folder, args)
