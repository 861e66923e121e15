"""What acts or learns in a run and no checkpoint would hold, so that enjoy or a resumed run would have others."""

import pickle
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from copy import copy
from io import BytesIO
from typing import Any

from cleanmarl.checkpoint import check_kinds, not_finite
from cleanmarl.cli import UsageError, check, tell

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Held:
    """The modules of a run, and whether they are all that it needs; UsageError, with a remedy, if they are not."""

    def __init__(self, modules: dict[str, Any]):
        self.modules = modules
        self.stepped: set[torch.optim.Optimizer] = set()  # since the last check()
        self.stepped_before: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in any update until then
        self.seen: set[torch.optim.Optimizer] = set()  # whose parameters check() has looked at
        self.is_overwritten = False  # the learning rate of a scheduler, by a line of the script
        self.plain = list(plain_attributes(modules))
        for name, module in modules.items():  # or the first checkpoint would be the end
            message = f"{name}={type(module).__name__} has no state_dict, load_state_dict, which a checkpoint needs"
            check(hasattr(module, "state_dict") and hasattr(module, "load_state_dict"), message)
            hint = "compile layers in Agent.__init__, which enjoy, --resume and actors call, or give --compile"
            check(not hasattr(module, "_orig_mod"), f"{name} is the result of torch.compile: {hint}")
            if bad := not_finite(module.state_dict(), name):
                hint = "persistent=False keeps a buffer, as of a mask, out of checkpoints"
                raise UsageError(f"{bad} is not finite; {hint}")
            check_state(name, module)
            for p in not_held(module, modules) if isinstance(module, torch.optim.Optimizer) else ():
                hint = "give Run its module, too: Run(args, __file__, agent=agent, predictor=predictor, ...)"
                raise UsageError(f"{name} learns a parameter {tuple(p.shape)} that no checkpoint would hold; {hint}")
        if attribute := unregistered(modules):
            hint = "nn.ModuleList, nn.Parameter or register_buffer registers it"
            raise UsageError(f"{attribute} would be in no checkpoint, nor be trained: {hint}")
        self.check_schedulers()
        if names := unlearned(modules):
            tell(f"no optimizer learns {', '.join(names)}", sys.stderr)
        if names := learned_twice(modules):
            hint = "leave them out of the groups of all but one"
            tell(f"{', '.join(names)}: several optimizers have them and may step them; {hint}", sys.stderr)

    def watch(self) -> None:
        """From now on, until close(), all optimizers that step in this thread."""
        self.hook, self.thread = register_optimizer_step_post_hook(self.after_step), threading.get_ident()

    def close(self) -> None:
        self.hook.remove()

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() != self.thread:  # another run of this process
            return
        self.stepped.add(optimizer)
        schedulers = [m for m in self.modules.values() if hasattr(m, "get_last_lr") and m.optimizer is optimizer]
        rates = [group["lr"] for group in optimizer.param_groups]
        self.is_overwritten |= bool(schedulers) and all(rates != s.get_last_lr() for s in schedulers)

    def check(self) -> None:
        """Once per update. An optimizer that is made for one update need not be held."""
        self.check_schedulers()  # one that was made after the Run
        if names := [name for name, holder, key, value in self.plain if differs(holder.get(key), value)]:
            hint = "register_buffer, then fill_ or copy_, keeps a layer's, self.state or a group an optimizer's"
            tell(f"{', '.join(names)} changed, and no checkpoint or actor process has that; {hint}", sys.stderr)
            self.plain = []  # once
        for optimizer in self.stepped & set(self.stepped_before):
            message = f"an optimizer ({type(optimizer).__name__}) steps that no checkpoint would hold"
            hint = "give Run it and its module: Run(args, __file__, predictor=..., predictor_optimizer=...)"
            check(is_held(optimizer, self.modules), f"{message}; {hint}")
            if optimizer not in self.seen and (names := without_gradient(optimizer, self.modules)):
                tell(f"no loss has reached {', '.join(names)} so far: nothing is learned there", sys.stderr)
            self.seen.add(optimizer)
        check(not self.is_overwritten, "the scheduler's learning rate is overwritten before the step: delete that line")
        self.stepped_before |= self.stepped
        self.stepped = set()

    def check_schedulers(self) -> None:
        for name, module in self.modules.items():
            if isinstance(module, torch.optim.Optimizer) and has_scheduler(module):
                is_kept = any(getattr(other, "optimizer", None) is module for other in self.modules.values())
                message = f"a scheduler changes the learning rate of {name}, and no checkpoint would hold it"
                check(is_kept, f"{message}; give Run it, too: Run(args, __file__, scheduler=scheduler, ...)")


def check_state(name: str, module: Any) -> None:
    """UsageError if a checkpoint could not be written, or read, with its state: one of each kind of thing in it."""
    file, kinds = BytesIO(), {type(x): x for x in things_in(module.state_dict())}
    try:
        torch.save([*kinds.values()], file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"no checkpoint holds the state of {name}: {error}") from error
    file.seek(0)
    check_kinds(file)


def things_in(x: Any) -> Iterator[Any]:
    """What nested dicts, lists and tuples hold, but for tensors and arrays, which may be large."""
    if type(x) in (dict, OrderedDict):
        yield from things_in([*x.keys(), *x.values()])
    elif type(x) in (list, tuple):
        for value in x:
            yield from things_in(value)
    elif not isinstance(x, torch.Tensor | np.ndarray):
        yield x


def not_held(optimizer: torch.optim.Optimizer, modules: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters that the optimizer learns and none of the modules has, not even one of which they are views."""
    parameters = (p for module in modules.values() if isinstance(module, torch.nn.Module) for p in module.parameters())
    held = {p.untyped_storage().data_ptr() for p in parameters}
    learned = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in learned if p.untyped_storage().data_ptr() not in held]


def unregistered(modules: dict[str, Any]) -> str | None:
    """The name of an attribute with a tensor, or a list of layers, that no checkpoint would hold; None without one."""
    networks = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Module)}
    held = {p for network in networks.values() for p in (*network.parameters(), *network.buffers())}
    of_torch = vars(torch.nn.Module()).keys()  # _parameters, _buffers, ..., whose tensors checkpoints may leave out
    for name, network in networks.items():
        for path, layer in network.named_modules():
            for key, value in vars(layer).items():
                if key not in of_torch and any(x not in held for x in tensors_in(value)):
                    return ".".join(filter(None, [name, path, key]))
    return None


def plain_attributes(modules: dict[str, Any]) -> Iterator[tuple[str, dict, str, Any]]:
    """The numbers and arrays among the attributes of layers, of objects there, as a running mean, and of optimizers.

    Yields the name, the dict that has it, its key there, and a copy of its value. Left out are those whose class says
    what a checkpoint has of it.
    """
    networks = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Module)}
    layers = [(name, path, layer) for name, network in networks.items() for path, layer in network.named_modules()]
    layers = [x for x in layers if type(x[2]).get_extra_state is torch.nn.Module.get_extra_state]
    optimizers = [(name, "", x) for name, x in modules.items() if isinstance(x, torch.optim.Optimizer)]
    optimizers = [x for x in optimizers if type(x[2]).state_dict is torch.optim.Optimizer.state_dict]
    for name, path, layer in layers + optimizers:
        holders = {"": vars(layer)}
        for key, value in vars(layer).items():  # environments and optimizers have states of their own
            if hasattr(value, "__dict__") and not hasattr(value, "step") and not isinstance(value, type | torch.Tensor):
                holders[key] = vars(value)
        for place, holder in holders.items():
            for key, value in holder.items():
                if isinstance(value, int | float | np.number | np.ndarray) and not isinstance(value, bool):
                    yield ".".join(filter(None, [name, path, place, key])), holder, key, copy(value)


def differs(x: Any, y: Any) -> bool:
    """Whether one number or array is another than the other."""
    return x is not y and not np.array_equal(x, y)


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested dicts, lists, tuples and modules."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, torch.nn.Module):
        yield from (*x.parameters(), *x.buffers())
    elif isinstance(x, dict | list | tuple | set):
        for value in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(value)


def learned_twice(modules: dict[str, Any]) -> list[str]:
    """The names of parameters that more than one of the optimizers has."""
    optimizers = [module for module in modules.values() if isinstance(module, torch.optim.Optimizer)]
    times = Counter(place for optimizer in optimizers for place in places(optimizer))
    twice = [place for place, number in times.items() if number > 1]
    networks = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Module)}
    named = {f"{name}.{key}": p for name, network in networks.items() for key, p in network.named_parameters()}
    return [name for name, p in named.items() if any(0 <= place - p.data_ptr() < p.nbytes for place in twice)]


def places(optimizer: torch.optim.Optimizer) -> set[int]:
    """Where its parameters begin; of a stack, as in Networks, those of each network by themselves."""
    return {p.data_ptr() for group in optimizer.param_groups for p in group["params"] if p.numel()}


def unlearned(modules: dict[str, Any]) -> list[str]:
    """The names of parameters that no optimizer has, of modules of which one has others, but for frozen ones."""
    optimizers = (module for module in modules.values() if isinstance(module, torch.optim.Optimizer))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    learned = {p.untyped_storage().data_ptr() for group in groups for p in group["params"]}  # or views, as of Networks
    names = []
    for name, module in modules.items():
        parameters = dict(module.named_parameters()) if isinstance(module, torch.nn.Module) else {}
        has = {key: p.untyped_storage().data_ptr() in learned for key, p in parameters.items()}
        if any(has.values()):
            names += [f"{name}.{key}" for key, p in parameters.items() if p.requires_grad and not has[key]]
    return names


def without_gradient(optimizer: torch.optim.Optimizer, modules: dict[str, Any]) -> list[str]:
    """The names of its parameters that never had a gradient: a step remembers something of all others."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p in optimizer.state for p in parameters):  # plain gradient descent remembers nothing
        return []
    storage = {p: p.untyped_storage().data_ptr() for p in parameters}  # views, as of Networks, share that of a stack
    others = (x for x in modules.values() if isinstance(x, torch.optim.Optimizer) and x is not optimizer)
    elsewhere = {place for other in others for place in places(other)}
    learned = {x for p, x in storage.items() if p in optimizer.state or p.data_ptr() in elsewhere}
    missing = {*storage.values()} - learned
    networks = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Module)}
    named = [(f"{name}.{key}", p) for name, network in networks.items() for key, p in network.named_parameters()]
    return [name for name, p in named if p.requires_grad and p.untyped_storage().data_ptr() in missing]


def is_held(optimizer: torch.optim.Optimizer, modules: dict[str, Any]) -> bool:
    """Whether a checkpoint has the optimizer, by itself or within something of one's own with a state_dict."""
    # schedulers, and networks as torch saves them, may have one, and not its state
    schedulers, extra = torch.optim.lr_scheduler.LRScheduler, torch.nn.Module.get_extra_state
    networks = {m for m in modules.values() if isinstance(m, torch.nn.Module) and type(m).get_extra_state is extra}
    own = [m for m in modules.values() if not isinstance(m, schedulers) and m not in networks]
    parts = [part for m in own for part in getattr(m, "__dict__", {}).values()]
    parts += [x for part in parts if isinstance(part, list | tuple) for x in part]
    parts += [x for part in parts if isinstance(part, dict) for x in part.values()]
    return any(x is optimizer for x in [*own, *parts])


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one of torch.optim.lr_scheduler has been made for it: it leaves the first learning rate in the groups."""
    return any("initial_lr" in group for group in optimizer.param_groups)
