"""A Megatron model and its optimizer as a state dict, and back, by the parameters' own names.

Megatron's own `sharded_state_dict` names experts by the global expert grid; here parameters are
named by their place in the model, and the planner's layouts know the model's own grid. State is
taken where it is: on ranks that hold no part of a parameter there may be none.

| optimizer | its state of a parameter |
|---|---|
| `DistributedOptimizer` over Megatron-FSDP, or torch's | the inner optimizer's |
| `HybridDeviceOptimizer` | the sub-optimizers', on the CPU, with `master_param` |
| `DistributedOptimizer` over DDP | its flat shard's, with the shard itself as `param` |
| `ChainedOptimizer` | that of each, together: how parameters are chained depends on the grid |

Sources: megatron/core/optimizer/distrib_optimizer.py, optimizer.py and
cpu_offloading/hybrid_optimizer.py.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardplan.layouts import CheckpointError
from shardplan.layouts.errors import summary
from shardplan.layouts.megatron_fsdp import version_2_group
from shardplan.layouts.model import clean_name

from ..compat import local_tensor
from .copies import copied_names

# Options that say how the grid groups parameters and which code steps them, which decides where the
# step counts lie; the live ones stay.
_LIVE = frozenset(("is_expert_parallel", "capturable", "differentiable", "foreach", "fused"))
# The slot of a weight in higher precision, which the optimizer steps.
MASTER = "master_param"


def chunks_of(model: Any) -> list[Any]:
    """Returns the chunks of a model: the modules of a list, or the model itself."""
    listed = isinstance(model, Sequence) or type(model).__name__ == "ModuleList"
    return list(model) if listed else [model]


def model_state(model: Any, *, copies: bool = True) -> dict[str, dict[str, Any]]:
    """Returns the model's sections, without `_extra_state`.

    Megatron-FSDP puts its sharded parameters in place when it is asked for a state dict, so ask
    before a planner is made.

    Args:
        model: The model, or its virtual pipeline chunks.
        copies: Whether to keep a later pipeline stage's copy of the word embeddings.
    """
    chunks = chunks_of(model)
    sections = {}
    for number, chunk in enumerate(chunks):
        state = _state_of(chunk)
        copied = frozenset[str]() if copies else copied_names(chunk)
        sections["model" if len(chunks) == 1 else f"model{number}"] = {
            name: value
            for name, value in state.items()
            if not name.endswith("_extra_state") and not (copied and clean_name(name) in copied)
        }
    return sections


def _state_of(chunk: Any) -> Mapping[str, Any]:
    """Returns a chunk's state dict, without the messages that megatron-fsdp's own hook sends."""
    make = getattr(chunk, "state_dict_for_save_checkpoint", None)
    if make is not None:
        return make()  # type: ignore[no-any-return]
    if hasattr(chunk, "param_and_grad_buffer") and hasattr(chunk, "module"):
        return chunk.module.state_dict(prefix="module.")  # type: ignore[no-any-return]
    return chunk.state_dict()  # type: ignore[no-any-return]


@dataclasses.dataclass(slots=True)
class GroupMember:
    """One parameter's copy of its group's options, which a load fills.

    Attributes:
        name: The parameter's name.
        options: The copy.
        group: The live group.
    """

    name: str
    options: dict[str, Any]
    group: dict[str, Any]


@dataclasses.dataclass(slots=True)
class OptimizerState:
    """The sections of an optimizer.

    Attributes:
        sections: State dict of each section: `state` and `param_to_group_meta` by parameter.
        members: The copies of the groups' options in it.
    """

    sections: dict[str, dict[Any, Any]]
    members: list[GroupMember]


def optimizer_state(model: Any, optimizer: Any, *, copies: bool = True) -> OptimizerState:
    """Returns the optimizer's sections; what is in `state` are the live values.

    Args:
        model: The model, or its virtual pipeline chunks.
        optimizer: A Megatron optimizer, or torch's.
        copies: Whether to keep a later pipeline stage's copy of the word embeddings.

    Raises:
        CheckpointError: If it optimizes a parameter that the model does not have.
    """
    chunks = chunks_of(model)
    names: dict[int, tuple[int, str]] = {}
    left_out: set[int] = set()
    for number, chunk in enumerate(chunks):
        copied = frozenset[str]() if copies else copied_names(chunk)
        for name, parameter in chunk.named_parameters():
            names.setdefault(id(parameter), (number, name))
            if copied and clean_name(name) in copied:
                left_out.add(id(parameter))
    found = OptimizerState({}, [])
    unknown = 0
    for part in inner_optimizers(optimizer):
        for parameter, group, state in part.entries():
            if id(parameter) not in names:
                unknown += 1
                continue
            if id(parameter) in left_out:
                continue
            number, name = names[id(parameter)]
            section = "optimizer" if len(chunks) == 1 else f"optimizer{number}"
            place = found.sections.setdefault(section, {})
            options = {
                key: value
                for key, value in group.items()
                if key != "params" and not callable(value)  # an optimizer's class is no option
            }
            place.setdefault("param_to_group_meta", {})[name] = options
            found.members.append(GroupMember(name, options, group))
            if state:
                place.setdefault("state", {})[name] = state
    if unknown:
        raise CheckpointError(
            f"{unknown} of the optimizer's parameters are not among the model's. Pass the model "
            "(or all of its chunks) that the optimizer was made for."
        )
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    """One optimizer of torch's kind inside a Megatron optimizer.

    Attributes:
        optimizer: The inner optimizer.
        owner: The Megatron optimizer around it, or the inner one itself.
    """

    optimizer: Any
    owner: Any

    def entries(self) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any] | None]]:
        """Yields each parameter of the model with its live group and its live state, if any."""
        places = getattr(self.owner, "model_param_group_index_map", None)
        if places:
            yield from self._shards(places)
            return
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group, state.get(parameter)

    def _shards(
        self, places: Mapping[Any, tuple[int, int]]
    ) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any] | None]]:
        """Yields the same where each parameter of the optimizer is a flat shard of the model's."""
        for parameter, (number, order) in places.items():
            group = self.optimizer.param_groups[number]
            shard = group["params"][order]
            held = self.optimizer.state.get(shard, {})
            yield parameter, group, _WithParam(held, shard.detach())


class _WithParam(dict[str, Any]):
    """A shard's state with the shard itself; what is set in it is set in the live state too."""

    def __init__(self, live: dict[str, Any], shard: torch.Tensor) -> None:
        super().__init__(live)
        super().__setitem__("param", shard)
        self._live = live

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "param":
            self._live[key] = value


class _WithoutMaster(dict[str, Any]):
    """A parameter's state without `master_param`; what is set in it is set in the live state too."""

    def __init__(self, live: dict[str, Any]) -> None:
        super().__init__({slot: value for slot, value in live.items() if slot != MASTER})
        self._live = live

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._live[key] = value


def inner_optimizers(optimizer: Any) -> Iterator[Inner]:
    """Yields the optimizers of torch's kind inside a Megatron optimizer, stubs left out."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for part in chained:
            yield from inner_optimizers(part)
        return
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    inner = getattr(optimizer, "optimizer", None)
    yield Inner(optimizer if inner is None else inner, optimizer)


def initialize_state(optimizer: Any) -> None:
    """Makes the tensors of an optimizer's state exist, where it has taken no step yet.

    A step with zero gradients and a learning rate of zero changes no parameter. Parameters
    without elements on this rank are left out, as training leaves them out.
    """
    for part in inner_optimizers(optimizer):
        inner = part.optimizer
        if not _stateless(inner):
            continue
        kept = [(group, group.get("lr")) for group in inner.param_groups]
        touched = []
        for group in inner.param_groups:
            if "lr" in group:
                rate = group["lr"]
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            for parameter in group["params"]:
                if local_tensor(parameter).numel() and parameter.requires_grad:
                    name = "decoupled_grad" if hasattr(parameter, "decoupled_grad") else "grad"
                    touched.append((parameter, name, getattr(parameter, name)))
                    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                    setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))
        try:
            type(inner).step(inner)
        finally:
            for parameter, name, gradient in touched:
                setattr(parameter, name, gradient)
            for group, rate in kept:
                if rate is not None:
                    group["lr"] = rate


def _stateless(inner: Any) -> bool:
    return not any(inner.state.values())


def keep_live_options(members: Sequence[GroupMember], saved: Collection[str]) -> list[str]:
    """Leaves out of a load the options that the saved optimizer did not have.

    That is how a load goes from one kind of optimizer to another, offloaded to the CPU or not.

    Args:
        members: The copies of the groups' options.
        saved: Keys of the checkpoint.

    Returns:
        The options that stay as they are; none if the checkpoint has no options at all.
    """
    known = {key.rpartition(".")[2] for key in saved if "param_to_group_meta." in key}
    kept: dict[str, None] = {}
    for member in members if known else ():
        for option in [option for option in member.options if option not in known]:
            del member.options[option]
            kept[option] = None
    return list(kept)


def leave_out_masters(sections: Mapping[str, dict[Any, Any]], saved: Collection[str]) -> bool:
    """Leaves `master_param` out of a load of a checkpoint that has none; the weights stand for it.

    Args:
        sections: The optimizer's sections, which are changed.
        saved: Keys of the checkpoint.

    Returns:
        Whether anything was left out.
    """
    if any(key.endswith("." + MASTER) for key in saved):
        return False
    found = False
    for place in sections.values():
        states = place.get("state", {})
        for name, state in states.items():
            if MASTER in state:
                states[name] = _WithoutMaster(state)
                found = True
    return found


def finish_load(
    model: Any, optimizer: Any, members: Sequence[GroupMember], *, masters: bool = True
) -> None:
    """Passes on what a load has put in place.

    Group options go into the live groups; `HybridDeviceOptimizer` copies its weights anew;
    Megatron-FSDP copies its main weights into the model's.

    Args:
        model: The model, or its virtual pipeline chunks.
        optimizer: Its optimizer, or None.
        members: The copies of the groups' options.
        masters: Whether each `master_param` was loaded.

    Raises:
        CheckpointError: If parameters of one group were saved with different options.
    """
    faults: list[str] = []
    first: dict[int, GroupMember] = {}
    for member in members:
        other = first.setdefault(id(member.group), member)
        for option, value in member.options.items():
            known = other.options.get(option)
            if option not in _LIVE and not _equal(known, value):
                faults.append(
                    f"{option}: {other.name} was saved with {known!r} and {member.name} with "
                    f"{value!r}"
                )
    if faults:
        raise CheckpointError(
            f"{summary(faults)}, but one group holds both now. Build the optimizer with the "
            "groups that were saved."
        )
    for member in first.values():
        loaded = member.options.items()
        member.group.update({k: value for k, value in loaded if k not in _LIVE})
    for part in inner_optimizers(optimizer) if optimizer is not None else ():
        _refresh_copies(part.optimizer, masters)
    for chunk in chunks_of(model):
        install = _wrapped(chunk, "install_optimized_model_weights")
        if install is not None:
            install()
        for group in _groups_of_version_2(chunk):
            group.sync_model_weight_from_main_weight()


def _refresh_copies(inner: Any, masters: bool) -> None:
    """Copies loaded weights to the copies that `HybridDeviceOptimizer` steps.

    A `master_param` is such a copy itself and may have been loaded. The optimizer's own
    `load_state_dict` would do the same, but fails for parameters that are in fp32 already.
    """
    for parameter, own in getattr(inner, "param_to_inner_param", {}).items():
        if own is parameter or (masters and MASTER in inner.state.get(parameter, {})):
            continue
        with torch.no_grad():
            copied = local_tensor(own)
            copied.copy_(local_tensor(parameter).reshape(copied.shape))


def _groups_of_version_2(chunk: Any) -> Iterator[Any]:
    """Yields the parameter groups of Megatron-FSDP's version 2, whose main weights were filled."""
    seen: set[int] = set()
    for parameter in chunk.parameters():
        group = version_2_group(parameter)
        if group is not None and id(group) not in seen:
            seen.add(id(group))
            yield group


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _wrapped(model: Any, name: str) -> Any:
    """Returns a method of a model or of what it wraps."""
    for _ in range(16):
        if model is None or hasattr(type(model), name):
            break
        model = getattr(model, "module", None)
    return None if model is None else getattr(model, name)
