"""Play what a run has learned: `python -m cleanmarl.enjoy RUN_DIR`, for the run folder of any script."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from cleanmarl.envs import EnvError, WorkerError
from cleanmarl.run import UsageError, check, evaluate, import_optional, load_args, load_checkpoint, read_run, save_video


@dataclass
class Args:
    run_dir: Annotated[Path, tyro.conf.Positional]
    """run folder of any script"""
    episodes: int = 10
    """episodes to play"""
    greedy: bool = False
    """take the most probable actions instead of sampling them"""
    seed: int = 1
    """seed of the environment and of the samples"""
    video: Path | None = None
    """film the episodes into this .mp4 or .gif"""
    render: bool = False
    """show the episodes in a window (for environments that can)"""


def main(args: Args) -> dict[str, float]:
    """Play the episodes, print and return their statistics; UsageError if the folder cannot be played."""
    check(args.episodes > 0, f"--episodes must be greater than 0, not {args.episodes}")
    check(args.seed >= 0, f"--seed must be 0 or more, not {args.seed}")
    check(args.video is None or args.video.suffix in (".mp4", ".gif"), f"--video {args.video} must end in .mp4 or .gif")
    check(
        not (args.render and args.video), "--render shows the episodes in a window, --video films them: one of the two"
    )
    if args.video:
        import_optional("moviepy", "--video")
    name = read_run(args.run_dir)["script"]
    try:
        script = importlib.import_module(f"cleanmarl.{name}")
    except ModuleNotFoundError as error:
        raise UsageError(f"{args.run_dir} is a run of {name}.py, which is not a script of this package") from error
    check(hasattr(script, "Args") and hasattr(script, "Agent"), f"{args.run_dir} is no run of a script of this package")
    run_args = load_args(script.Args, args.run_dir, name)
    checkpoint = load_checkpoint(args.run_dir)

    options = {"render_mode": "human" if args.render else "rgb_array"} if args.render or args.video else {}
    envs = script.make_envs(run_args, 1, **options)
    agent = script.Agent(envs, run_args)
    agent.load_state_dict(checkpoint["modules"]["agent"])
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
