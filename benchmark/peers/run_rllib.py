"""RLlib's IMPALA on CartPole in one process, which is not evaluated: run_rllib.py STEPS SEED

Its defaults (unrolls of 50 steps, 500 steps in a gradient step), with ten environments and our networks.
"""

import logging
import sys

import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

NETWORKS = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)


def main(steps: int, seed: int) -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config = IMPALAConfig().environment("CartPole-v1").debugging(seed=seed, log_level="ERROR")
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=10).learners(num_learners=0)
    config.rl_module(model_config=NETWORKS).reporting(min_time_s_per_iteration=0)
    algorithm, sampled = config.build_algo(), 0
    while sampled < steps:
        result = algorithm.train()
        sampled = result["env_runners"].get("num_env_steps_sampled_lifetime", sampled)
    print(f"{sampled} steps sampled, {result['learners']['__all_modules__']['num_env_steps_trained_lifetime']} learned")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
