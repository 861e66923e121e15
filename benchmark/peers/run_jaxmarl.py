"""Train with a baseline of JaxMARL, as it is: run_jaxmarl.py BASELINE.py STEPS SEED [KEY=VALUE ...]

Its settings are those of its configuration but for those given. Its `train` of TOTAL_TIMESTEPS is one program, which is
run again and again until STEPS are done: so a longer run has the same program, and JAX takes it from its cache. JAX
caches no program that calls back to Python, so the metrics of each update are not written. With CURVE=FOLDER all STEPS
are one program, and FOLDER/curve.csv gets a row for each update: CPU-seconds of the process until then (those of the
program spread evenly over it), steps, mean return of an episode as it is logged, and number of episodes.
"""

import importlib
import sys
import time
from pathlib import Path

import jax
import yaml


def main(baseline: Path, steps: int, seed: int, *overrides: str) -> None:
    config_name = baseline.stem.replace("mappo_rnn", "mappo_homogenous_rnn")
    config = yaml.safe_load((baseline.parent / "config" / f"{config_name}.yaml").read_text())
    config |= {key: yaml.safe_load(value) for key, value in (pair.split("=") for pair in overrides)}
    at_a_time = config["TOTAL_TIMESTEPS"]
    if at_a_time % (config["NUM_ENVS"] * config["NUM_STEPS"]) != 0 or steps % at_a_time != 0:
        sys.exit(f"{steps} steps are no multiple of TOTAL_TIMESTEPS={at_a_time}, or these of a rollout")
    jax.experimental.io_callback = lambda *_, **__: None
    sys.path.insert(0, str(baseline.parent))
    train = jax.jit(importlib.import_module(baseline.stem).make_train(config))
    if "CURVE" in config:
        return write_curve(train, jax.random.PRNGKey(seed), config)
    for i in range(steps // at_a_time):
        jax.block_until_ready(train(jax.random.PRNGKey(seed + i)))


def write_curve(train, key, config: dict) -> None:
    program = train.lower(key).compile()
    start = time.process_time()
    metrics = jax.block_until_ready(program(key))["metrics"]
    num_updates = len(metrics["returned_episode"])
    cpu_per_update, steps_per_update = (
        (time.process_time() - start) / num_updates,
        config["NUM_ENVS"] * config["NUM_STEPS"],
    )
    returns, ended = metrics["returned_episode_returns"], metrics["returned_episode"]
    with (Path(config["CURVE"]) / "curve.csv").open("w") as file:
        for i in range(1, num_updates):  # in the first update there are steps before any return
            row = start + (i + 1) * cpu_per_update, (i + 1) * steps_per_update, returns[i], ended[i] * steps_per_update
            file.write(",".join(f"{x:.10g}" for x in row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:])
