"""BenchMARL's MAPPO with its own settings on a task of MPE: run_benchmarl.py FOLDER TASK STEPS SEED

TASK is one of its names of PettingZoo's, such as SIMPLE_SPREAD; actions are discrete, episodes have 25 steps.
FOLDER/curve.csv gets a row for each rollout: CPU-seconds of the process until then, steps, mean return of the team in
the episodes that ended, and their number. Its loader looks for MPE in PettingZoo, from where it has moved to mpe2, and
for a collector by its older name.
"""

import sys
import time
from pathlib import Path

import mpe2
import mpe2.all_modules
import torchrl.collectors

sys.modules |= {"pettingzoo.mpe": mpe2, "pettingzoo.mpe.all_modules": mpe2.all_modules}
torchrl.collectors.SyncDataCollector = torchrl.collectors.Collector

from benchmarl.algorithms import MappoConfig  # noqa: E402
from benchmarl.environments import PettingZooTask  # noqa: E402
from benchmarl.experiment import Callback, Experiment, ExperimentConfig  # noqa: E402
from benchmarl.models.mlp import MlpConfig  # noqa: E402


class Curve(Callback):
    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def on_batch_collected(self, batch) -> None:
        done = batch["next", "done"].squeeze(-1)  # (environments, steps)
        groups = [batch["next", group, "episode_reward"] for group in self.experiment.group_map]
        returns = sum(x.flatten(2).sum(-1) for x in groups)[done]  # of all agents
        with self.path.open("a") as file:
            steps = self.experiment.total_frames
            file.write(f"{time.process_time():.10g},{steps},{returns.mean():.10g},{len(returns)}\n")


def main(folder: Path, task_name: str, steps: int, seed: int) -> None:
    config = ExperimentConfig.get_from_yaml()
    config.max_n_frames, config.save_folder, config.loggers = steps, str(folder), []
    config.evaluation, config.create_json, config.prefer_continuous_actions = False, False, False
    task = PettingZooTask[task_name].get_from_yaml()
    task.config["max_cycles"] = 25
    parts = task, MappoConfig.get_from_yaml(), MlpConfig.get_from_yaml()  # the critic's network is like the policy's
    Experiment(*parts, seed, config, callbacks=[Curve(folder / "curve.csv")]).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
