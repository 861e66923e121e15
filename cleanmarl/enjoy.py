"""Play what a run has learned: `python -m cleanmarl.enjoy RUN_DIR`, for the run folder of any script and any copy."""

import importlib
import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import tyro

from cleanmarl.cli import (
    NonNegativeInt,
    PositiveInt,
    UsageError,
    check,
    check_ranges,
    import_optional,
    load_args,
    read_run,
)
from cleanmarl.envs import EnvError, WorkerError
from cleanmarl.evaluate import evaluate, save_video
from cleanmarl.run import load_checkpoint, load_states


@dataclass
class Args:
    run_dir: Annotated[Path, tyro.conf.Positional]
    """run folder of any script"""
    episodes: PositiveInt = 10
    """episodes to play"""
    greedy: bool = False
    """take the most probable actions instead of sampling them"""
    seed: NonNegativeInt = 1
    """seed of the environment and of the samples"""
    video: Path | None = None
    """film the episodes into this .mp4 or .gif"""
    render: bool = False
    """show the episodes in a window (for environments that can)"""


def load_script(folder: Path, meta: dict[str, Any]) -> ModuleType:
    """The script of a run, as a module: the package's own, or the copy in the run folder if that is another one.

    UsageError if there is neither, or if it cannot be imported or is no script.
    """
    name, path = meta["script"], Path(folder, f"{meta['script']}.py")
    ours = Path(__file__).with_name(f"{name}.py")
    if not path.exists() or (ours.exists() and ours.read_text() == path.read_text()):
        path = ours
    check(path.exists(), f"{folder} is a run of {name}.py, which is neither in the folder nor a script of this package")
    sys.path.append(str(Path(meta.get("path", path)).parent))  # for modules that stand beside a copy
    try:
        if path == ours:
            module = importlib.import_module(f"cleanmarl.{name}")
        else:
            spec = importlib.util.spec_from_file_location(name, path)
            module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
            spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    missing = [name for name in ("Args", "Agent", "make_envs", "make_policy") if not hasattr(module, name)]
    check(not missing, f"{path} is no script that can be played: it has no {missing[0] if missing else ''}")
    return module


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
    check(
        not (args.render and args.video), "--render shows the episodes in a window, --video films them: one of the two"
    )
    if args.video:
        import_optional("moviepy", "--video")
        check_place(args.video)
    meta = read_run(args.run_dir)
    name, script = meta["script"], load_script(args.run_dir, meta)
    run_args = load_args(script.Args, args.run_dir, name)
    checkpoint = load_checkpoint(args.run_dir)

    options = {"render_mode": "human" if args.render else "rgb_array"} if args.render or args.video else {}
    envs = script.make_envs(run_args, 1, **options)
    agent = script.Agent(envs, run_args)
    load_states(checkpoint, args.run_dir, agent=agent)
    frames = [] if args.video else None
    torch.set_num_threads(1)
    metrics = evaluate(envs, script.make_policy(agent, args.greedy), args.episodes, args.seed, frames)
    envs.close()

    mean, std, length = metrics["eval/ep_reward"], metrics["eval/std_ep_reward"], metrics["eval/ep_length"]
    print(f"{run_args.env_id}, {name} at step {checkpoint['step']:,}, {args.episodes} episodes")
    print(f"return {mean:.2f} ± {std:.2f}, length {length:.1f}")
    for key, value in metrics.items():
        if key.startswith(("eval/ep_reward_agent", "eval/battle_won")):
            print(f"  {key.removeprefix('eval/')} {value:.2f}")
    if args.video:
        save_video(frames, args.video)
        print(f"video: {args.video}")
    return metrics


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (UsageError, EnvError) as error:
        print(f"enjoy: {error}", file=sys.stderr)
        sys.exit(2)
    except WorkerError as error:
        print(f"enjoy: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
