"""skrl's IPPO with its default settings on simple_spread: run_skrl.py STEPS SEED

Networks are those of skrl's examples' size, two layers of 64 units with tanh, a policy and a value network for each
agent. The defaults take 16 gradient steps of each agent for 16 steps of the environment: 3 for each step, in all.
"""

import sys

import torch
from mpe2 import simple_spread_v3
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.multi_agents.torch.ippo import IPPO, IPPO_CFG
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed


def mlp(inputs: int, outputs: int) -> torch.nn.Sequential:
    layers = [torch.nn.Linear(inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, outputs))


class Policy(CategoricalMixin, Model):
    def __init__(self, **spaces):
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)
        self.net = mlp(self.num_observations, self.num_actions)

    def compute(self, inputs, role=""):
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, **spaces):
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = mlp(self.num_observations, 1)

    def compute(self, inputs, role=""):
        return self.net(inputs["observations"]), {}


def main(steps: int, seed: int) -> None:
    set_seed(seed)
    env = wrap_env(simple_spread_v3.parallel_env(max_cycles=25), wrapper="pettingzoo")
    agents = env.possible_agents
    all_spaces = {
        "observation_spaces": env.observation_spaces,
        "state_spaces": env.state_spaces,
        "action_spaces": env.action_spaces,
    }
    models = {}
    for agent in agents:
        spaces = {key.removesuffix("s"): of_agents[agent] for key, of_agents in all_spaces.items()}
        models[agent] = {"policy": Policy(**spaces, device=env.device), "value": Value(**spaces, device=env.device)}
    cfg = IPPO_CFG()
    for name in vars(cfg):  # skrl 2.1.1 takes its own default, an empty dictionary, for a table with an entry per agent
        if name.endswith("_kwargs"):
            setattr(cfg, name, {agent: {} for agent in agents})
    memories = {agent: RandomMemory(memory_size=cfg.rollouts, num_envs=1, device=env.device) for agent in agents}
    ippo = IPPO(possible_agents=agents, models=models, memories=memories, cfg=cfg, device=env.device, **all_spaces)
    options = {"timesteps": steps, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=ippo, cfg=options).train()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
