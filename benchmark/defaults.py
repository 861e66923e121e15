"""Does every script's first command learn? How far its updates go, in a short run with the defaults.

    python benchmark/defaults.py
    python benchmark/defaults.py --scripts ppo ippo --total-timesteps 50000

Writes rows of the table in docs/defaults.md, one for each script, those of the others stay. What the columns are and
what they are for, that page says.
"""

import gc
import importlib
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cleanmarl.cli import PositiveInt, UsageError, check, check_ranges

import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ppo", "ppo_shared", "ppo_continuous_action", "ppo_multidiscrete", "ppo_multidiscrete_mask", "ppo_selfplay"]
SCRIPTS += ["ippo", "ippo_per_agent", "ippo_continuous_action", "ippo_lstm", "mappo", "mappo_continuous_action"]
SCRIPTS += ["mappo_lstm", "coppo", "coppo_lstm", "coppo_matrix", "coma", "coma_lstm"]
SCRIPTS += ["impala", "impala_continuous_action", "impala_replay"]
OFF_POLICY = ["maddpg", "maddpg_multienvs", "maddpg_lstm", "maddpg_lstm_multienvs", "maddpg_continuous_action"]
OFF_POLICY += ["facmac", "facmac_continuous_action", "masac", "masac_continuous_action", "dop"]
OFF_POLICY += ["idqn", "vdn", "vdn_lstm", "qmix", "qmix_lstm", "qtran"]  # two fifths as many steps
PICTURES = ["ppo_atari", "ppo_atari_envpool", "ppo_atari_lstm", "ppo_procgen"]
PICTURES += ["impala_atari_envpool"]  # a tenth as many steps, two rollouts
EVERY = (*SCRIPTS, *OFF_POLICY, *PICTURES)
METRICS = ["approx_kl", "clipfrac", "entropy", "explained_variance"]


@dataclass
class Args:
    scripts: tuple[str, ...] = EVERY
    """which; ppo_procgen needs 5 GB"""
    total_timesteps: PositiveInt = 50_000
    """of each; off-policy scripts have two fifths, those that learn from pictures a tenth, and two rollouts at least"""
    page: Path = ROOT / "docs" / "defaults.md"
    """whose table is written"""


def watch(module, seen: dict[str, list[float]]):
    """Have each optimizer of a script tell, before its steps, the norms of the actor's and the critics' gradients."""
    agents, make_agent = [], module.Agent
    module.Agent = lambda *args: agents.append(make_agent(*args)) or agents[-1]

    def look(optimizer, args, kwargs) -> None:
        children = agents[0].named_children()  # an optimizer may have views of their parameters: see layers.Networks
        names = {p.untyped_storage().data_ptr(): name for name, part in children for p in part.parameters()}
        gradients = defaultdict(list)
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            gradients[names.get(p.untyped_storage().data_ptr())].append(p.grad.flatten())
        for name in gradients.keys() - {None}:
            gradient, eps = torch.cat(gradients[name]), optimizer.param_groups[0].get("eps", np.nan)
            seen[name].append(gradient.norm().item())
            seen[f"{name}/eps"].append(gradient.square().mean().sqrt().item() / eps)

    return register_optimizer_step_pre_hook(look)


def run(script: str, total_timesteps: int, runs_dir: str) -> dict[str, float | str]:
    """A row of the table: the script with its defaults."""
    module, seen = importlib.import_module(f"cleanmarl.{script}"), defaultdict(list)
    args = module.Args(total_timesteps=10**9)
    if script in PICTURES:
        rollout = args.num_envs * getattr(args, "num_steps", 0)  # IMPALA has unrolls, which are short
        total_timesteps = max(total_timesteps // 10, 2 * rollout)
    if script in OFF_POLICY:
        total_timesteps = total_timesteps * 2 // 5
    here = {"num_actors": 0} if script.startswith("impala") else {}  # whose optimizer steps can be watched
    handle = watch(module, seen)
    folder = module.main(module.Args(total_timesteps=total_timesteps, eval_episodes=0, runs_dir=runs_dir, **here))
    handle.remove()
    gc.collect()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    row = {"script": f"`{script}`", "environment": args.env_id, "steps": f"{total_timesteps:,}"}
    logged = {}
    for name in (*METRICS, "actor_gradients", "critic_gradients", "gradients"):
        has_points = f"train/{name}" in events.Tags()["scalars"]
        points = [event.value for event in events.Scalars(f"train/{name}")] if has_points else []
        logged[name] = number(np.mean(points[len(points) // 10 :])) if points else "-"
    row |= {name: logged[name] for name in METRICS}
    if script in OFF_POLICY:  # their critics are no part of the agent
        actor, critic = logged["actor_gradients"], logged["critic_gradients"]
        row |= {"norm, actor": actor, "norm, critic": logged["gradients"] if critic == "-" else critic}
    else:
        row |= {f"norm, {name}": number(np.mean(seen[name])) if seen[name] else "-" for name in ("actor", "critic")}
    worst = min((np.mean(x), name) for name, x in seen.items() if name.endswith("/eps"))
    row["least entries / epsilon"] = f"{number(worst[0])} ({worst[1].removesuffix('/eps')})"
    return row


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.2g}"


def main(args: Args) -> None:
    check_ranges(args)
    unknown = [script for script in args.scripts if script not in EVERY]
    check(not unknown, f"--scripts {' '.join(unknown)}: choose from {', '.join(EVERY)}")
    check("| script |" in args.page.read_text(), f"--page {args.page} has no table of scripts")
    for script in args.scripts:
        with tempfile.TemporaryDirectory() as runs_dir:
            row = run(script, args.total_timesteps, runs_dir)
        before, bar, table = args.page.read_text().partition("| script |")
        head, rule, *lines = (bar + table).splitlines()
        lines = {line.split("`")[1]: line for line in lines} | {script: f"| {' | '.join(row.values())} |"}
        lines = [lines[name] for name in EVERY if name in lines]
        args.page.write_text(before + "\n".join([head, rule, *lines]) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        print(f"defaults: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a page that cannot be read or written
        sys.exit(f"defaults: {error}")
