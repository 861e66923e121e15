"""DI-engine's IMPALA with its settings for CartPole, which is not evaluated: run_ding.py STEPS SEED"""

import sys

import numpy as np


def main(steps: int, seed: int) -> None:
    np.bool8 = np.bool_  # gym 0.25 has the name that NumPy 2 has not
    from ding.entry import serial_pipeline
    from dizoo.classic_control.cartpole.config.cartpole_impala_config import create_config, main_config

    main_config.env.stop_value = float("inf")
    main_config.policy.eval.evaluator.eval_freq = 10**9
    serial_pipeline((main_config, create_config), seed=seed, max_env_step=steps)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
