"""Train with a baseline of JaxMARL, as it is: run_jaxmarl.py BASELINE.py STEPS SEED [KEY=VALUE ...]

Its settings are those of its configuration but for those given. Its `train` of TOTAL_TIMESTEPS is one program, which is
run again and again until STEPS are done: so a longer run has the same program, and JAX takes it from its cache. JAX
caches no program that calls back to Python, so the metrics of each update are not written. With CURVE=FOLDER all STEPS
are one program that does call back, as it is meant to, and FOLDER/curve.csv gets a row for each update: CPU-seconds of
the process until then, steps, mean over the episodes that ended (their return as it is logged; of a battle, whether it
was won), and their number.
"""

import importlib
import sys
import time
from pathlib import Path

import jax
import numpy as np
import yaml


def main(baseline: Path, steps: int, seed: int, *overrides: str) -> None:
    config_name = baseline.stem.replace("mappo_rnn", "mappo_homogenous_rnn")
    config = yaml.safe_load((baseline.parent / "config" / f"{config_name}.yaml").read_text())
    config |= {key: yaml.safe_load(value) for key, value in (pair.split("=") for pair in overrides)}
    at_a_time = config["TOTAL_TIMESTEPS"]
    if at_a_time % (config["NUM_ENVS"] * config["NUM_STEPS"]) != 0 or steps % at_a_time != 0:
        sys.exit(f"{steps} steps are no multiple of TOTAL_TIMESTEPS={at_a_time}, or these of a rollout")
    if "CURVE" in config:
        write_each_update(config)
    else:
        jax.experimental.io_callback = lambda *_, **__: None
    sys.path.insert(0, str(baseline.parent))
    train = jax.jit(importlib.import_module(baseline.stem).make_train(config))
    for i in range(steps // at_a_time):
        jax.block_until_ready(train(jax.random.PRNGKey(seed + i)))


def write_each_update(config: dict) -> None:
    """Have the baselines' callback, which would log to Weights & Biases, write curve.csv."""
    path, call_back = Path(config["CURVE"]) / "curve.csv", jax.experimental.io_callback
    num_steps = config["NUM_ENVS"] * config["NUM_STEPS"]
    done = 0

    def write(metric) -> None:
        nonlocal done
        done += num_steps
        ended = np.asarray(metric["returned_episode"], dtype=float)  # of all steps, or their mean
        score = np.asarray(metric.get("returned_won_episode", metric["returned_episode_returns"]))
        if done > num_steps and ended.any():  # in the first update there are steps before any return
            mean = (score * ended).sum() / ended.sum()
            with path.open("a") as file:
                file.write(f"{time.process_time():.10g},{done},{mean:.10g},{ended.mean() * num_steps:.10g}\n")

    jax.experimental.io_callback = lambda _, result, metric: call_back(write, result, metric, ordered=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:])
