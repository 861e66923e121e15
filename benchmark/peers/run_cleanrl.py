"""Run a script of CleanRL, as it is, with the present Gymnasium: run_cleanrl.py SCRIPT.py [FLAG ...]

It was written for Gymnasium 0.29, whose vector environments reset in the step that ends an episode, and list what each
episode was in `final_info`. Without that it would log no returns, and train on a dummy row after each end. Its
TransformObservation did not ask for the space of what it makes.
"""

import runpy
import sys

import gymnasium as gym


class SyncVectorEnv(gym.vector.SyncVectorEnv):
    """Gymnasium's, with the resets and the `final_info` of version 0.29."""

    def __init__(self, env_fns):
        super().__init__(env_fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    def step(self, actions):
        *results, infos = super().step(actions)
        if "final_info" in infos:
            episode, ended = infos["final_info"]["episode"], infos["_final_info"]
            infos["final_info"] = [
                {"episode": {key: episode[key][i] for key in "rlt"}} if ends else None for i, ends in enumerate(ended)
            ]
        return (*results, infos)


class TransformObservation(gym.wrappers.TransformObservation):
    """Gymnasium's, with the environment's own space."""

    def __init__(self, env, func):
        super().__init__(env, func, env.observation_space)


if __name__ == "__main__":
    gym.wrappers.TransformObservation = TransformObservation
    gym.vector.SyncVectorEnv = SyncVectorEnv
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
