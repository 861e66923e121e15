"""MonoBeast on Pong with the network of two convolutions: run_monobeast.py STEPS FOLDER [FLAGS OF MONOBEAST]

Its simulator is that of Gymnasium behind its own wrappers, which are written for the old Gym.
"""

import sys

import ale_py
import gym
import gymnasium
import numpy as np
import torch.nn as nn

gymnasium.register_envs(ale_py)


class OldAPI(gym.Env):
    """An environment of Gymnasium whose `reset` and `step` are those of Gym before 0.26."""

    def __init__(self, env_id: str):
        self.env = gymnasium.make(env_id)
        low, high, shape = 0, 255, self.env.observation_space.shape
        self.observation_space = gym.spaces.Box(low, high, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(self.env.action_space.n)
        self.spec, self.ale = self.env.spec, self.env.unwrapped.ale
        self.get_action_meanings = self.env.unwrapped.get_action_meanings
        self.next_seed = None

    def seed(self, seed=None):
        self.next_seed = seed
        self._np_random = np.random.RandomState(seed)

    def reset(self, **_):
        obs, _ = self.env.reset(seed=self.next_seed)
        self.next_seed = None
        return obs

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(int(action))
        return obs, reward, terminated or truncated, info


def main(steps: str, folder: str, *more: str) -> None:
    gym.make = OldAPI
    from torchbeast import monobeast

    class Shallow(monobeast.AtariNet):
        """Mnih et al. 2016: half as many channels and units, and no third convolution."""

        def __init__(self, shape, num_actions, use_lstm=False):
            super().__init__(shape, num_actions, use_lstm)
            self.conv1, self.conv2 = nn.Conv2d(shape[0], 16, 8, stride=4), nn.Conv2d(16, 32, 4, stride=2)
            self.conv3, self.fc = nn.Identity(), nn.Linear(32 * 9 * 9, 256)
            size = 256 + num_actions + 1
            self.policy, self.baseline = nn.Linear(size, num_actions), nn.Linear(size, 1)

    monobeast.Net = Shallow
    flags = ["--num_actors", "2", "--num_learner_threads", "1", "--unroll_length", "20", "--batch_size", "8"]
    flags += ["--disable_cuda", "--disable_checkpoint", "--savedir", folder, "--total_steps", steps]
    monobeast.main(monobeast.parser.parse_args([*flags, *more]))


if __name__ == "__main__":
    main(*sys.argv[1:])
