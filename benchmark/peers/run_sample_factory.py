"""Sample Factory's APPO with V-trace on CartPole, not evaluated: run_sample_factory.py STEPS SEED FOLDER

Its serial mode, which was the faster one on two cores, with 16 environments, unrolls of 32 steps, a gradient step for
all of them, and our networks.
"""

import sys

import gymnasium as gym
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import run_rl

FLAGS = """
--env=CartPole-v1 --experiment=run --device=cpu --serial_mode=True --async_rl=False --num_workers=1
--worker_num_splits=1 --num_envs_per_worker=16 --rollout=32 --recurrence=32 --use_rnn=False --batch_size=512
--num_batches_per_epoch=1 --num_epochs=1 --with_vtrace=True --encoder_mlp_layers 64 64 --nonlinearity=tanh
--actor_critic_share_weights=False --normalize_input=False --normalize_returns=False --save_every_sec=1000000
--experiment_summaries_interval=1000000
"""


def make(env_id: str, *_, render_mode: str | None = None) -> gym.Env:
    return gym.make(env_id, render_mode=render_mode)


def main(steps: str, seed: str, folder: str) -> None:
    register_env("CartPole-v1", make)
    argv = [*FLAGS.split(), f"--train_for_env_steps={steps}", f"--seed={seed}", f"--train_dir={folder}"]
    parser, _ = parse_sf_args(argv)
    run_rl(parse_full_cfg(parser, argv))


if __name__ == "__main__":
    main(*sys.argv[1:])
