"""Play what a run has learned: `python -m cleanmarl.enjoy RUN_DIR`, for the run folder of any script and any copy.

In Python `cleanmarl.load(run_dir)` gives the policy.
"""

import ast
import dataclasses
import importlib
import importlib.util
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from cleanmarl.checkpoint import load_checkpoint, load_states
from cleanmarl.cli import (
    PositiveInt,
    RunError,
    UsageError,
    check,
    check_ranges,
    import_optional,
    load_args,
    read_flags,
    read_run,
    run_folder,
    tell,
)
from cleanmarl.envs import EnvError, WorkerError
from cleanmarl.evaluate import Film, Window, evaluate, pictures_per_second, save_video

import cloudpickle
import numpy as np
import torch
import tyro
from annotated_types import Interval


@dataclass
class Args:
    run_dir: Annotated[Path, tyro.conf.Positional]
    """run folder of any script"""
    checkpoint: str = "checkpoint.pt"
    """which of the run's checkpoints: checkpoint.pt, the latest one, best.pt or checkpoint-STEP.pt"""
    episodes: PositiveInt = 10
    """episodes to play"""
    greedy: bool = False
    """take the most probable actions instead of sampling them"""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 1
    """seed of environment and samples; with the run's, the first episode starts as in its training, but for IMPALA's"""
    video: Path | None = None
    """film the episodes into this .mp4 or .gif"""
    render: bool = False
    """show the episodes in a window"""
    fps: PositiveInt | None = None
    """pictures a second, of --video and --render; by default as the environment says, 10 for many agents"""


def load_script(folder: Path, meta: dict[str, Any]) -> ModuleType:
    """The script of a run, as a module: the package's own, or the copy in the run folder if that is another one.

    UsageError if there is neither, or if it cannot be imported or is no script.
    """
    name, path = meta["script"], Path(folder, f"{meta['script']}.py")
    ours = Path(__file__).with_name(f"{name}.py")
    if not path.exists() or (ours.exists() and ours.read_bytes() == path.read_bytes()):
        path = ours
    check(path.exists(), f"{folder} is a run of {name}.py, which is neither in the folder nor a script of this package")
    # Where the run found modules of the user's, the folder that it was started in and that of a copy: first, since the
    # folder of the shell may have modules of the same names.
    places = {str(meta.get("folder", folder)), str(Path(meta.get("path", path)).parent)} - {str(ours.parent)}
    sys.path = [*sorted(places), *(path for path in sys.path if path not in places)]
    of_env = str(meta["args"].get("env_id")).removeprefix("pz/").partition(":")[0].partition(".")[0]
    for module_name in {of_env} if path == ours else {of_env, *imported(path)}:
        check_module_of(module_name, places)
    try:
        if path == ours:
            module = importlib.import_module(f"cleanmarl.{name}")
        else:
            own = f"{name} of {path.resolve()}"  # so that it stands for no module that somebody imports
            spec: Any = importlib.util.spec_from_file_location(own, path)
            module = sys.modules[own] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
            cloudpickle.register_pickle_by_value(module)  # workers cannot import an environment of this file by name
            spec.loader.exec_module(module)
    except Exception as error:
        is_missing = isinstance(error, ImportError) and "folder" in meta
        hint = f" (the run was begun in {meta['folder']})" if is_missing else ""
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    for needed in ("Args", "Agent", "make_envs", "make_policy"):
        check(hasattr(module, needed), f"{path} is no script that can be played: it has no {needed}")
    return module


def imported(path: Path) -> set[str]:
    """The names of the modules that a copy imports, but for this package and Python's own."""
    names = set()
    with suppress(SyntaxError):  # who imports it is told
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module).partition(".")[0])
    return names - {"cleanmarl", *sys.stdlib_module_names}


def check_module_of(name: str, places: set[str]) -> None:
    """UsageError if a module of the user's has been imported from none of the places that have it."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    files = (Path(place, file) for place in places for file in (f"{name}.py", f"{name}/__init__.py"))
    there = [file for file in files if file.exists()]
    if loaded and there and not any(file.samefile(loaded) for file in there):
        message = f"the module {name} of the run is that of {there[0]}, and this process has imported {loaded}"
        raise UsageError(f"{message}: play the run in a process of its own")


class Policy:
    """What a run has learned: `policy(obs, info, done)` returns the actions of all environments.

    Arrays are those that `envs` gives (see cleanmarl.envs for many agents); done (N,) bool marks the environments that
    are at the start of an episode, where a recurrent policy forgets: all of them after a reset. `agent` is the network,
    `args` the run's arguments, `script` its module, `step` the training it has had in environment steps.
    """

    def __init__(self, run: Path | str, num_envs: int, greedy: bool, checkpoint: str = "checkpoint.pt", **options: Any):
        """`options` go to the environments: render_mode="rgb_array", say. UsageError if the run cannot be played."""
        run = Path(run)
        if run_folder(run) != run:  # RUN/best.pt
            run, checkpoint = run.parent, run.name
        meta = read_run(run)
        self.script = load_script(run, meta)
        self.args = load_args(self.script.Args, run, meta["script"])
        path = run / checkpoint
        message = f"--checkpoint {checkpoint} is no name such as best.pt"
        check(path.parent == run and path.suffix == ".pt", message)
        state = load_checkpoint(path)
        self.step = state["step"]
        self.envs = self.script.make_envs(self.args, num_envs, **options)
        # It is on the CPU, wherever the run's was: --bf16 auto would ask for the run's GPU, which need not be here.
        try:
            self.agent = self.script.Agent(self.envs, dataclasses.replace(self.args, device="cpu"))
        except FileNotFoundError as error:  # the copy in the run folder looks beside itself
            message = f"Agent of {self.script.__file__} reads {error.filename or error}, which is not there"
            raise UsageError(f"{message}: give its whole path, in a flag") from error
        load_states(state, path, agent=self.agent)
        self.agent.eval()  # dropout and batch norm, which an edited network may have
        self.act = self.script.make_policy(self.agent, greedy=greedy)

    def __call__(self, obs: np.ndarray, info: dict[str, Any], done: np.ndarray) -> np.ndarray:
        with torch.no_grad():  # or a memory would keep all that it was made of
            return self.act(obs, info, done)


def check_place(video: Path) -> None:
    """UsageError if a video cannot be written there: better now than after all episodes."""
    check(not video.is_dir(), f"--video {video} is a folder")
    try:
        video.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=video.parent):
            pass
    except OSError as error:
        raise UsageError(f"--video {video} cannot be written ({error.strerror})") from error


def main(args: Args) -> dict[str, float]:
    """Play the episodes, print and return their statistics; UsageError if the folder cannot be played."""
    check_ranges(args)
    check(args.video is None or args.video.suffix in (".mp4", ".gif"), f"--video {args.video} must end in .mp4 or .gif")
    message = "--render shows the episodes in a window, --video films them: one of the two"
    check(not (args.render and args.video), message)
    if args.video:
        import_optional("moviepy", "--video")
        check_place(args.video)
    frames: Any = Window(str(args.run_dir)) if args.render else Film() if args.video else None
    options = {} if frames is None else {"render_mode": "rgb_array"}
    policy = Policy(args.run_dir, 1, args.greedy, args.checkpoint, **options)
    fps = args.fps or pictures_per_second(policy.envs)
    if isinstance(frames, Window):
        frames.fps = fps
    torch.set_num_threads(1)
    metrics = evaluate(policy.envs, policy, args.episodes, args.seed, frames)
    policy.envs.close()

    mean, std, length = metrics["eval/ep_reward"], metrics["eval/std_ep_reward"], metrics["eval/ep_length"]
    name = Path(str(policy.script.__file__)).stem
    samples = not args.greedy and not hasattr(policy.agent, "q_network")  # values of actions: the best one is taken
    hint = "; --greedy plays the most probable actions" if samples else ""
    tell(f"{policy.args.env_id}, {name} at step {policy.step:,}, {args.episodes} episodes{hint}")
    tell(f"return {mean:.2f} ± {std:.2f}, length {length:.1f}")
    for key, value in metrics.items():
        if key.startswith(("eval/ep_reward_agent", "eval/battle_won")):
            tell(f"  {key.removeprefix('eval/')} {value:.2f}")
    if args.video:
        save_video(frames, args.video, fps)
        tell(f"video: {args.video}")
    return metrics


if __name__ == "__main__":
    try:
        main(read_flags(Args, sys.argv[1:]))
    except (UsageError, EnvError) as error:
        print(f"enjoy: {error}", file=sys.stderr)
        sys.exit(2)
    except (WorkerError, RunError) as error:
        print(f"enjoy: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
