"""Train with a baseline of JaxMARL, as it is: run_jaxmarl.py BASELINE.py STEPS SEED [KEY=VALUE ...]

Its settings are those of its configuration but for those given. Its `train` of TOTAL_TIMESTEPS is one program, which is
run again and again until STEPS are done: so a longer run has the same program, and JAX takes it from its cache. JAX
caches no program that calls back to Python, so the metrics of each update are not written.
"""

import importlib
import sys
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
    for i in range(steps // at_a_time):
        jax.block_until_ready(train(jax.random.PRNGKey(seed + i)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:])
