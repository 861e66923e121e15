"""Break every implementation detail in a copy of the repository, one line at a time, and see its tests fail.

    python benchmark/mutate_details.py                            # all of them, some minutes
    python benchmark/mutate_details.py core-5 atari-3 --workers 2

A mutation changes one line of a script, at the tag `# detail core-5` or just below it. It is caught if a test of this
script fails that passes without it and bears the mark `# proves core-5`. A variant is not mutated where its line is its
parent's: tests/test_mutate_details.py sees to it that it stays so. Exit status 1 if a mutation is not caught, or if a
marked test catches none.
"""

import contextlib
import functools
import importlib.util
import io
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)

EVENTS = "tensorboard.backend.event_processing.event_accumulator"
BELOW = 12  # lines from a tag down to its mutation, at most
LAYER = "\n            layer_init(nn.Linear(64, num_"
FIRST = "self.critic = nn.Sequential(\n            layer_init(nn.Linear(obs_size, 64)),"
SHARED_FIRST = "self.critic = nn.Sequential(\n            self.actor[0],"
HALF_SQUARE = '0.5 * F.mse_loss(new_value, batch.return_, reduction="none")'
ONE_NORM = 'dict.fromkeys(("actor", "critic"), nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm))'
GREEDY = 'np.where(info["action_mask"], actor(obs), -np.inf).argmax(-1)  #'
FAMILY = {"ippo_lstm": "tests/test_recurrent_family.py"}  # what several scripts have in common has tests in one file

# (detail, script, old text, new text); lines of both that are equal only say which line is meant
MUTATIONS = [
    ("core-1", "ppo", "= make_envs(args, args.num_envs", "= make_envs(args, 1"),
    ("core-1", "ppo", "in range(args.num_steps):", "in range(args.num_steps - 1):"),
    ("core-2", "ppo", "nn.init.orthogonal_(layer.weight, std)", "nn.init.normal_(layer.weight, 0, std / 8)"),
    ("core-2", "ppo", "nn.init.zeros_(layer.bias)", "nn.init.constant_(layer.bias, 0.01)"),
    ("core-3", "ppo", "eps=1e-5", "eps=1e-8"),
    ("core-4", "ppo", "args.learning_rate * (remaining if args.anneal_lr else 1)", "args.learning_rate"),
    ("core-5", "ppo", "decay = gamma * gae_lambda * nonterminal", "decay = gamma * gae_lambda"),
    ("core-5", "ppo", "reward + gamma * nonterminal * following - value", "reward + gamma * following - value"),
    ("core-5", "ppo", "return_ = advantage + value", "return_ = advantage"),
    ("core-6", "ppo", "torch.randperm(batch_size,", "torch.randint(batch_size, (batch_size,),"),
    ("core-6", "ppo", "torch.randperm(batch_size,", "torch.arange(batch_size,"),
    ("core-6", "ppo_atari_lstm", "torch.randperm(args.num_envs,", "torch.arange(args.num_envs,"),
    ("core-6", "ppo_selfplay", "torch.randperm(len(batch.obs),", "torch.randint(9, (len(batch.obs),),"),
    ("core-7", "ppo", " / (advantage.std() + 1e-8)", ""),
    ("core-8", "ppo", "torch.min(advantage * ratio, ", "torch.max(advantage * ratio, "),
    ("core-8", "ppo", "ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio.clamp(max=1 + clip_coef)"),
    ("core-9", "ppo", "torch.max(value_error, ", "torch.min(value_error, "),
    ("core-10", "ppo", "- args.ent_coef * entropy", "+ args.ent_coef * entropy"),
    ("core-10", "ppo", "args.vf_coef * value_loss", "value_loss"),
    ("core-11", "ppo", "(agent.parameters(), args.max_grad_norm)", "(agent.actor.parameters(), args.max_grad_norm)"),
    ("core-11", "ppo", "(agent.parameters(), args.max_grad_norm)", "(agent.critic.parameters(), args.max_grad_norm)"),
    ("core-12", "ppo", "(ratio - 1 - log_ratio).mean()", "(-log_ratio).mean()"),
    ("core-12", "ppo", "(ratio - 1).abs() > clip_coef", "(ratio - 1) > clip_coef"),
    ("core-13", "ppo", f"nn.Tanh(),{LAYER}", f"nn.ReLU(),{LAYER}"),
    ("core-13", "ppo", FIRST, SHARED_FIRST),
    ("core-13", "ppo_shared", "nn.Tanh(),\n            layer", "nn.ReLU(),\n            layer"),
    ("core-13", "ppo_shared", "nn.Sequential(trunk, ", "nn.Sequential(__import__('copy').deepcopy(trunk), "),
    ("atari-1", "ppo_atari", "AtariPreprocessing(env, 30, 4", "AtariPreprocessing(env, 0, 4"),
    ("atari-2", "ppo_atari", "AtariPreprocessing(env, 30, 4", "AtariPreprocessing(env, 30, 2"),
    ("atari-3", "ppo_atari", "env = EpisodicLife(env)", "pass"),
    ("atari-4", "ppo_atari", "env = FireReset(env)", "pass"),
    ("atari-5", "ppo_atari", "(env, warp_frame, ", "(env, lambda rgb: warp_frame(rgb[..., ::-1]), "),
    ("atari-6", "ppo_atari", "TransformReward(env, np.sign)", "TransformReward(env, float)"),
    ("atari-7", "ppo_atari", "FrameStackObservation(env, 4)", "FrameStackObservation(env, 3)"),
    ("atari-8", "ppo_atari", "nn.ReLU(),\n            nn.Flatten()", "nn.Tanh(),\n            nn.Flatten()"),
    ("atari-9", "ppo_atari", ".div_(255)", ""),
    ("atari-1", "ppo_atari_envpool", '"noop_max": 30', '"noop_max": 1'),
    ("atari-2", "ppo_atari_envpool", '"frame_skip": 4', '"frame_skip": 2'),
    ("atari-3", "ppo_atari_envpool", '"episodic_life": True', '"episodic_life": False'),
    ("atari-4", "ppo_atari_envpool", '"use_fire_reset": True', '"use_fire_reset": False'),
    ("atari-5", "ppo_atari_envpool", '"gray_scale": True', '"gray_scale": False'),
    ("atari-6", "ppo_atari_envpool", '"reward_clip": True', '"reward_clip": False'),
    ("atari-7", "ppo_atari_envpool", '"stack_num": 4', '"stack_num": 3'),
    ("atari-8", "ppo_atari_envpool", "nn.ReLU(),\n            nn.Flatten()", "nn.Tanh(),\n            nn.Flatten()"),
    ("atari-9", "ppo_atari_envpool", ".div_(255)", ""),
    ("continuous-1", "ppo_continuous_action", ".square() - (log_std", ".abs() - (log_std"),
    ("continuous-2", "ppo_continuous_action", "nn.Parameter(torch.zeros(", "nn.Parameter(torch.ones("),
    ("continuous-2", "ppo_continuous_action", "zeros(num_actions))", "zeros(num_actions), requires_grad=False)"),
    ("continuous-3", "ppo_continuous_action", "log_prob.sum(-1)", "log_prob.mean(-1)"),
    ("core-13", "ppo_continuous_action", FIRST, SHARED_FIRST),
    ("continuous-4", "ppo_continuous_action", FIRST, SHARED_FIRST),
    ("continuous-5", "ppo_continuous_action", "[gym.wrappers.ClipAction]", "[]"),
    ("continuous-6", "ppo_continuous_action", "(obs - self.obs_stats.mean) / self.obs_stats.std", "obs"),
    ("continuous-7", "ppo_continuous_action", "obs.clip(-10, 10)", "obs"),
    ("continuous-8", "ppo_continuous_action", "reward / self.", "(reward - self.return_stats.mean) / self."),
    ("continuous-9", "ppo_continuous_action", "reward.clip(-10, 10)", "reward"),
    ("lstm-1", "ppo_atari_lstm", "orthogonal_(parameter, 1.0)", "orthogonal_(parameter, np.sqrt(2))"),
    ("lstm-2", "ppo_atari_lstm", "torch.zeros(2, num_envs", "torch.ones(2, num_envs"),
    ("lstm-3", "ppo_atari_lstm", "lstm_state = lstm_state * ~start[first, :, None]", "pass"),
    ("lstm-4", "ppo_atari_lstm", "[x[:, order]", "[x[torch.randperm(len(x))][:, order]"),
    ("lstm-5", "ppo_atari_lstm", "rollout.lstm_state.copy_(lstm_state)", "rollout.lstm_state.zero_()"),
    ("procgen-1", "ppo_procgen", "[Residual(after), Residual(after)]", "[Residual(after)]"),
    ("atari-9", "ppo_procgen", ".div_(255)", ""),
    ("continuous-8", "ppo_procgen", "reward / self.return_stats.std", "reward"),
    ("continuous-9", "ppo_procgen", ".clip(-10, 10)", ""),
    ("multidiscrete-1", "ppo_multidiscrete", ".sum(-1) - batch.log_prob", ".mean(-1) - batch.log_prob"),
    ("multidiscrete-1", "ppo_multidiscrete", "log_probs).sum((-2, -1)).mean()", "log_probs).sum(-1).mean()"),
    ("aux-1", "ppo", "(remaining if args.anneal_clip_coef else 1)", "1"),
    ("aux-2", "ppo_atari_multigpu", "average(gradients + list(", "average(list("),
    ("aux-3", "ppo", 'stats["approx_kl"] > args.target_kl', 'stats["clipfrac"] > args.target_kl'),
    ("aux-4", "ppo_multidiscrete_mask", "masked_fill(~mask, -1e8)", "masked_fill(~self.choices, -1e8)"),
    ("aux-4", "ppo_selfplay", "masked_fill(~mask, -1e8)", "masked_fill(~mask, -1)"),
    ("ippo-1", "ippo", "AgentIds(A) if", "nn.ConstantPad1d((0, A), 0.0) if"),
    ("ippo-2", "ippo", "self.critic(obs", "self.critic(obs.roll(1, 1)"),
    ("ippo-3", "ippo", "masked_fill(~action_mask, -1e8)", "masked_fill(~action_mask, -1)"),
    ("ippo-4", "ippo", "(log_prob - batch.log_prob) * batch.alive", "(log_prob - batch.log_prob)"),
    ("ippo-5", "ippo", "args.gamma * final_value * has_value", "0"),
    ("ippo-5", "ippo", " * final_value * has_value", " * final_value"),
    ("mappo-1", "ippo", "last_layer.weight *= scale", "pass"),
    ("mappo-1", "ippo", "agent.critic[-1])  #", "__import__('copy').deepcopy(agent.critic[-1]))  #"),
    ("mappo-4", "ippo", 'F.huber_loss(new_value, batch.return_, reduction="none", delta=delta)', HALF_SQUARE),
    ("mappo-5", "ippo", "torch.max(value_error, clipped_error)", "torch.min(value_error, clipped_error)"),
    ("mappo-6", "ippo", "advantage = advantage - agent.mean(advantage, alive)", "pass"),
    ("mappo-6", "ippo", " / (agent.mean(advantage.square(), alive).sqrt() + 1e-8)", ""),
    ("mappo-7", "ippo", "clip_grads_(agent, args.max_grad_norm)", ONE_NORM),
    ("mappo-8", "ippo", "x[order].split(", "torch.stack([x[order.roll(a), a] for a in range(x.shape[1])], 1).split("),
    (
        "mappo-8",
        "ippo_lstm",
        ".unflatten(0, (-1, args.num_envs))[:, order]",
        "[order.repeat(len(x) // args.num_envs)][None]",
    ),
    ("mappo-2", "mappo", "self.critic((state, obs", "self.critic((0 * state, obs"),
    ("mappo-3", "mappo", "if self.may_die:", "if False:"),
    ("mappo-9", "mappo", "self.state_stats(state[:, None])", "state[:, None]"),
    ("mappo-9", "mappo", 'agent.state_stats.update(*to_tensors(agent, info["state"][:, None]))', "pass"),
    ("coppo-1", "coppo", "unclipped = inner = g * ratio", "unclipped = inner = ratio"),
    ("coppo-2", "coppo", "return product, torch.clamp(product, low, high)", "return product, product"),
    ("coppo-3", "coppo", "take_gradients(active=[turn])", "take_gradients(active=range(len(actors)))"),
    ("coppo-4", "coppo", "unclipped, inner = product * ratio, g * ratio", "unclipped = inner = g * ratio"),
    ("coppo-4", "coppo", "ratio_of_others(log_ratio, args)", "ratio_of_others(log_ratio.detach(), args)"),
    (
        "coppo-5",
        "coppo_matrix",
        "(agent.logits(rows.obs, rows.action_mask).softmax(-1) * values).sum(-1)",
        "values.mean(-1)",
    ),
    ("coppo-6", "coppo_matrix", "self.weight1(state).abs()", "self.weight1(state)"),
    ("coppo-6", "coppo_matrix", "agent.mixing(surrogate * batch.alive, batch.state).mean(0)", "surrogate.mean()"),
    ("coppo-7", "coppo_matrix", "return probs.clamp(min=1e-30).log()", "return logits"),
    ("coppo-7", "coppo_matrix", "if at_random is not None:", "if False:"),
    ("coma-1", "coma", "- (log_probs.exp() * values).sum(-1)", "- values.mean(-1)"),
    ("coma-2", "coma", "discount[t] * lambda_ * (", "discount[t] * ("),
    ("coma-3", "coma", "torch.cat([obs, others], dim=-1)", "torch.cat([obs, 0 * others], dim=-1)"),
    ("dop-1", "dop", "self.k(state).abs() * alive", "self.k(state) * alive"),
    ("dop-1", "dop", ".sum(-1, keepdim=True) + self.b(state)", ".sum(-1, keepdim=True)"),
    ("dop-2", "dop", "gain = (k * advantage", "gain = (advantage"),
    ("dop-3", "dop", "mix((log_probs.exp() * q).sum(-1)", "mix(q.amax(-1)"),
    ("dop-3", "dop", "trace = log_prob.sum(-1, keepdim=True).exp()", "trace = torch.ones_like(taken)"),
    ("dop-4", "dop", "torch.where(batch.weight[:, 1:] > 0, taken[:, 1:], expected[:, :-1])", "expected[:, :-1]"),
    ("dop-4", "dop", "args.kappa * off_policy_loss + (1 - args.kappa)", "off_policy_loss + (1 - args.kappa)"),
    ("dop-5", "dop", " - (log_probs.exp() * q).sum(-1)  #", "  #"),
    ("dop-6", "dop", "(1 - self.epsilon) * logits.softmax(-1) + self.epsilon * uniform", "logits.softmax(-1)"),
    ("recurrent-1", "ippo_lstm", "return done[:, None] | ", "return "),
    ("recurrent-1", "ippo_lstm", 'done[:, None] | (~alive & info["agent_mask"])', "done[:, None] | (False & alive)"),
    ("recurrent-1", "ippo_lstm", "critic_memory[cut] * ~came_back[..., None]", "critic_memory[cut]"),
    (
        "recurrent-2",
        "ippo_lstm",
        "batch.memory, batch.forget).log_softmax",
        "0 * batch.memory, batch.forget).log_softmax",
    ),
    ("recurrent-2", "ippo_lstm", "rollout.critic_memory[:] = memory, critic_memory", "rollout.critic_memory[:] = 0, 0"),
    ("recurrent-1", "coma_lstm", "return done[:, None] | ", "return "),
    ("recurrent-1", "coma_lstm", 'done[:, None] | (~alive & info["agent_mask"])', "done[:, None] | (False & alive)"),
    ("recurrent-1", "coma_lstm", "memory[cut] * ~came_back[..., None]", "memory[cut]"),
    (
        "recurrent-2",
        "coma_lstm",
        "batch.memory, batch.forget).log_softmax",
        "0 * batch.memory, batch.forget).log_softmax",
    ),
    ("recurrent-2", "coma_lstm", "rollout.memory[:] = memory", "rollout.memory[:] = 0"),
    ("maddpg-1", "maddpg", "torch.cat([state, action.flatten(3)]", "torch.cat([state, 0 * action.flatten(3)]"),
    ("maddpg-2", "maddpg", 'np.where(info["action_mask"], logits, -np.inf).argmax(-1)  #', GREEDY),
    ("maddpg-2", "maddpg", "F.gumbel_softmax(logits, hard=False)", "F.gumbel_softmax(logits, hard=True)"),
    (
        "maddpg-3",
        "maddpg",
        "(is_own, own_action[:, :, None], batch.action",
        "(is_own, own_action[:, :, None], own_action",
    ),
    (
        "maddpg-3",
        "masac_continuous_action",
        "(is_own, own_action[:, :, None], batch.action",
        "(is_own, own_action[:, :, None], own_action",
    ),
    ("maddpg-4", "maddpg", "ours.lerp_(theirs, polyak)", "ours.copy_(theirs)"),
    ("maddpg-5", "maddpg", "F.gumbel_softmax(logits, hard=True)", "F.gumbel_softmax(logits, hard=False)"),
    ("maddpg-6", "maddpg", "deque(maxlen=args.buffer_size)", "deque(maxlen=2 * args.buffer_size)"),
    ("maddpg-6", "maddpg", "(error.square() * batch.weight)", "error.square()"),
    ("maddpg-7", "maddpg", " & ~termination[i]", ""),
    ("maddpg-8", "maddpg", "q = q - reg * (logits", "q = q + reg * (logits"),
    ("maddpg-8", "maddpg", "(logits * batch.action_mask[:, :-1])", "logits"),
    (
        "facmac-1",
        "facmac",
        "self.ids(torch.cat([obs, action], dim=-1))",
        "self.ids(torch.cat([obs, 0 * action], dim=-1))",
    ),
    ("facmac-2", "facmac", "StackedLinear(M, hyper, size))", "StackedLinear(M, hyper, size), nn.Softplus())"),
    ("facmac-3", "facmac", "(is_own, utility, utility.detach())", "(is_own, utility, utility)"),
    ("facmac-3", "facmac_continuous_action", "(is_own, utility, utility.detach())", "(is_own, utility, utility)"),
    ("facmac-4", "facmac", "    action = F.gumbel_softmax(logits, hard=True)", "    action = F.gumbel_softmax(logits)"),
    ("facmac-5", "facmac", "state=critic.state_stats(batch.state)", "state=batch.state"),
    ("facmac-5", "facmac_continuous_action", "state=critic.state_stats(batch.state)", "state=batch.state"),
    ("masac-1", "masac", "torch.cat([state, (action", "torch.cat([state, (0 * action"),
    (
        "masac-2",
        "masac",
        "target_critic(batch.state[:, 1:], next_action).amin(0)",
        "target_critic(batch.state[:, 1:], next_action)[0]",
    ),
    ("masac-2", "masac", "batch.action).amin(0)", "batch.action)[0]"),
    ("masac-2", "masac_continuous_action", "next_action).amin(0)", "next_action)[0]"),
    ("masac-2", "masac_continuous_action", ", action).amin(0)", ", action)[0]"),
    ("masac-3", "masac", "(q - agent.temperature[:, None] * log_probs)", "q"),
    ("masac-3", "masac_continuous_action", "* log_prob * batch.survive", "* 0 * log_prob * batch.survive"),
    ("masac-4", "masac", "(log_probs.exp() * (q - agent", "(next_action * (q - agent"),
    ("masac-4", "masac", "(log_probs.exp() * q).sum", "(batch.action * q).sum"),
    ("masac-5", "masac", "(entropy - target) * batch.alive)", "(entropy - target))"),
    (
        "masac-5",
        "masac",
        "target = target_entropy * batch.action_mask[:, :-1].sum(-1).clamp(min=1).log()",
        "target = target_entropy * 4",
    ),
    (
        "masac-5",
        "masac_continuous_action",
        "target_entropy * agent.real.sum(-1)",
        "target_entropy * agent.real.shape[-1]",
    ),
    ("masac-6", "masac_continuous_action", "log_prob - 2 * (math.log(2)", "log_prob - 0 * (math.log(2)"),
    ("vdn-1", "vdn", "(q * alive).sum(-1, keepdim=True)  #", "(q * alive).mean(-1, keepdim=True)  #"),
    ("vdn-1", "vdn", "(q * alive).sum(-1, keepdim=True)  #", "q.sum(-1, keepdim=True)  #"),
    ("vdn-2", "vdn", "torch.rand(action_mask.shape).numpy(), q)  #", "-q, q)  #"),
    ("vdn-2", "vdn", "np.where(action_mask, preferred, -np.inf)", "np.where(True, preferred, -np.inf)"),
    ("vdn-3", "vdn", "q if args.double_q else target_q  #", "target_q if args.double_q else q  #"),
    ("vdn-3", "qtran", "q if args.double_q else target_agent.values(batch.obs)  #", "q  #"),
    ("vdn-4", "vdn", "batch.weight[:, 1:]", "torch.ones_like(batch.weight[:, 1:])"),
    ("vdn-4", "vdn", "args.gamma * args.td_lambda", "args.td_lambda"),
    ("vdn-5", "vdn", "ours.lerp_(theirs, polyak)", "ours.copy_(theirs)"),
    ("vdn-6", "vdn", "deque(maxlen=args.buffer_size)", "deque(maxlen=2 * args.buffer_size)"),
    ("vdn-6", "vdn", "(error.square() * batch.weight)", "error.square()"),
    ("vdn-6", "qtran", "(errors.square() * batch.weight)", "errors.square()"),
    ("vdn-7", "vdn", " & ~termination[i]", ""),
    ("idqn-1", "idqn", "if self.team_reward:  #", "if False:  #"),
    ("idqn-1", "idqn", "weight = np.repeat(alive.any(-1, keepdims=True), alive.shape[1], axis=1)", "weight = alive"),
    ("qmix-1", "qmix", "self.weight1(state).abs()", "self.weight1(state)"),
    ("qmix-1", "qmix", "self.weight2(state).abs()", "self.weight2(state)"),
    (
        "qmix-2",
        "qmix",
        "self.weight2 = nn.Sequential(nn.Linear(state_size, hyper), nn.ReLU()",
        "self.weight2 = nn.Sequential(nn.Linear(state_size, hyper), nn.Tanh()",
    ),
    ("qmix-2", "qmix", "self.bias1 = nn.Linear(state_size, hidden)", "self.bias1 = nn.Linear(state_size, 1)"),
    ("qmix-3", "qmix", "state=agent.state_stats(batch.state)", "state=batch.state"),
    ("qmix-3", "qmix_lstm", "state=agent.state_stats(batch.state)", "state=batch.state"),
    ("qtran-1", "qtran", "most + value - joint_of_best  #", "most - joint_of_best  #"),
    ("qtran-2", "qtran", ".clamp(max=0)", ""),
    ("qtran-3", "qtran", "with torch.no_grad():  #", "with torch.enable_grad():  #"),
    ("recurrent-1", "vdn_lstm", "memory[~alive] = 0  #", "pass  #"),
    ("recurrent-1", "vdn_lstm", "memory[termination | truncation] = 0", "pass"),
    ("recurrent-1", "qmix_lstm", "memory[~alive] = 0  #", "pass  #"),
    ("recurrent-1", "qmix_lstm", "memory[termination | truncation] = 0", "pass"),
    ("recurrent-3", "vdn_lstm", "[batch.obs, last_action], dim=-1)", "[batch.obs, 0 * last_action], dim=-1)"),
    ("recurrent-3", "qmix_lstm", "[batch.obs, last_action], dim=-1)", "[batch.obs, 0 * last_action], dim=-1)"),
    ("impala-1", "impala", "torch.from_numpy(logits).log_softmax(-1)", "torch.from_numpy(0 * logits).log_softmax(-1)"),
    ("impala-2", "impala", "error[t] += decay[t] * error[t + 1]", "pass"),
    ("impala-2", "impala", "return_ = value + error", "return_ = error"),
    ("impala-3", "impala", "~done * np.minimum(rho, c_clip)", "~done * np.minimum(rho, rho_clip)"),
    ("impala-3", "impala", "error = np.minimum(rho, rho_clip)", "error = np.minimum(rho, c_clip)"),
    ("impala-4", "impala", "gamma * next_return", "gamma * next_value"),
    ("impala-4", "impala", "np.minimum(rho, pg_rho_clip)", "np.minimum(rho, rho_clip)"),
    ("impala-5", "impala", "- args.ent_coef * entropy", "+ args.ent_coef * entropy"),
    ("impala-5", "impala", "args.vf_coef * value_loss", "value_loss"),
    (
        "impala-6",
        "impala",
        "clip_grad_norm_(agent.parameters(), args",
        "clip_grad_norm_(agent.actor.parameters(), args",
    ),
    ("impala-7", "impala", "args.learning_rate * (remaining if args.anneal_lr else 1)", "args.learning_rate"),
    ("impala-8", "impala", '(mean_square + group["eps"]).sqrt()', '(mean_square.sqrt() + group["eps"])'),
    ("impala-8", "impala", "lr=args.learning_rate, eps=args.optimizer_eps, fused", "lr=args.learning_rate, fused"),
    ("impala-9", "impala_atari_envpool", '"reward_clip": True', '"reward_clip": False'),
    ("impala-10", "impala_atari_envpool", "[Residual(after), Residual(after)]", "[Residual(after)]"),
]


@dataclass
class Args:
    details: tyro.conf.Positional[tuple[str, ...]] = ()
    """details to break, such as core-5; default: all"""
    workers: int = 1
    """mutations at a time"""


test_tags = functools.cache(generate.test_tags)  # it parses all tests


def mutated(detail: str, script: str, old: str, new: str) -> str:
    """The source of the script with the mutation; ValueError unless `old` is there once, at a tag of the detail."""
    path = ROOT / "cleanmarl" / f"{script}.py"
    source = path.read_text()
    if source.count(old) != 1:
        raise ValueError(f"{detail}: {old!r} is {source.count(old)} times in {path.name}, not once")
    line = source[: source.index(old)].count("\n") + 1
    tags = [tag.line for tag in generate.script_tags(path) if tag.detail == detail]
    if not any(0 <= line - tag <= BELOW for tag in tags):
        raise ValueError(f"{detail}: {old!r} is in line {line} of {path.name}, and its tags are in {tags}")
    return source.replace(old, new)


def proofs(detail: str, script: str) -> set[str]:
    """The tests of a script that are marked as proving a detail, as pytest names them."""
    files = {f"tests/test_{script}.py", FAMILY.get(script)}
    return {f"{tag.file}::{tag.test}" for tag in test_tags() if tag.detail == detail and tag.file in files}


def failures(tests: set[str], script: str = "", source: str = "") -> tuple[set[str], str]:
    """Those of the tests that fail in a copy of the repository, where the script has this source; pytest's output.

    Runs in a process of its own: it imports cleanmarl from the copy.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        for part in ("cleanmarl", "tests"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if script:
            Path(folder, "cleanmarl", f"{script}.py").write_text(source)
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.path.insert(0, folder)
        pytest.main(["-rf", "--tb=short", "-p", "no:cacheprovider", *sorted(tests)])
        os.chdir(ROOT)
    return set(re.findall(r"^FAILED ([^\s\[]+)", out.getvalue(), re.MULTILINE)), out.getvalue()


def row_of(detail: str, script: str, old: str, new: str) -> tuple[str, str, str]:
    """What the table says of a mutation: detail, script, the change of the one line."""
    (change,) = (pair for pair in zip(old.splitlines(), new.splitlines() or [""]) if len(set(pair)) == 2)
    old, new = (text.strip().replace("|", r"\|") for text in change)  # a bar would end the cell
    return detail, script, f"`{old}` -> `{new}`"


def main(args: Args) -> int:
    """Print a table of mutations and the tests that caught them; returns the exit status."""
    unknown = set(args.details) - set(generate.DETAILS)
    if unknown:
        print(f"there is no detail {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    order = list(generate.DETAILS)
    todo = sorted((m for m in MUTATIONS if m[0] in (args.details or order)), key=lambda m: order.index(m[0]))
    try:
        sources = [mutated(*mutation) for mutation in todo]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    caught_signals = []
    for signum in (signal.SIGINT, signal.SIGTERM):  # an exit now would leave behind a process that has half started
        signal.signal(signum, lambda signum, _frame: caught_signals.append(signum))
    tests = [proofs(detail, script) for detail, script, *_ in todo]
    marked = set().union(*tests)
    context = multiprocessing.get_context("forkserver")  # imports the large packages once
    context.set_forkserver_preload(["torch", "gymnasium", "hypothesis", "pytest", EVENTS])
    with ProcessPoolExecutor(args.workers, mp_context=context, max_tasks_per_child=1) as pool:
        runs = [pool.submit(failures, marked)]
        runs += [pool.submit(failures, *of_one) for of_one in zip(tests, [script for _, script, *_ in todo], sources)]
        try:
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, lambda signum, _frame: sys.exit(128 + signum))
            if caught_signals:
                sys.exit(128 + caught_signals[0])
            failed, out = runs[0].result()
            if failed or " passed" not in out or " error" in out:
                print(f"{out}\nthese tests do not pass without a mutation", file=sys.stderr)
                return 1
            caught, missed = set(), 0
            print("| detail | script | mutation | caught by |\n|---|---|---|---|", flush=True)
            for (detail, script, old, new), run in zip(todo, runs[1:]):
                failed, out = run.result()
                caught |= failed
                missed += not failed
                names = ", ".join(sorted(test.partition("::")[2] for test in failed)) or "NOT CAUGHT"
                names += ": a fixture fails" if not failed and " error" in out else ""
                names += ": tests are skipped here" if not failed and " skipped" in out else ""
                print(f"| {' | '.join(row_of(detail, script, old, new))} | {names} |", flush=True)
        except SystemExit:  # a signal: the pool would wait for the tests that its processes are at
            while processes := multiprocessing.active_children():
                for process in processes:
                    process.terminate()
                time.sleep(0.1)
            raise
        finally:
            for run in runs:
                run.cancel()
    print(f"\n{len(todo) - missed} of {len(todo)} mutations of {len({m[0] for m in todo})} details caught")
    for test in sorted(marked - caught):
        print(f"{test} catches none")
    return int(missed > 0 or marked > caught)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
