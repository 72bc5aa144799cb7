"""Reads a live model once: the parameters that providers are asked about.

Modules and tensors are read by their attributes; torch is not imported.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import LayoutError
from .experts import ExpertName, cut_by_experts, expert_name, expert_tokens
from .grid import Grids
from .layout import Layout
from .megatron_fsdp import rank_shape
from .provider import ParamInfo
from .registry import LayoutRegistry
from .slab import Shape

# Tokens that wrappers add to names: DDP and Float16Module, torch.compile, FSDP1, checkpointing.
WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))

# A user's own submodule may have such a name too, so it counts only in a module of these classes,
# or of a class made from one: torch's, Megatron-LM's, megatron-fsdp's and DeepSpeed's. An unknown
# wrapper's token stays in the name, as it does for stock DCP.
_WRAPPER_CLASSES = frozenset(
    (
        "OptimizedModule",
        "DistributedDataParallel",
        "DataParallel",
        "FullyShardedDataParallel",
        "ActivationWrapper",
        "CheckpointWrapper",
        "Float16Module",
        "_BaseDataParallel",
        "TorchFullyShardedDataParallel",
        "MegatronFSDP",
        "DeepSpeedEngine",
    )
)


def clean_name(fqn: str) -> str:
    """Returns a name without the tokens that may be of wrappers; only whole tokens count.

    It serves to compare names: two that differ only in wrappers' tokens come out equal, and so do
    those of a user's own submodule `module` and of its parent. A name that has nothing but such
    tokens is left as it is.

    >>> clean_name("module._orig_mod.layers.0.module_list.weight")
    'layers.0.module_list.weight'
    """
    parts = [part for part in fqn.split(".") if part not in WRAPPERS]
    return ".".join(parts) if parts else fqn


def _is_wrapper(module: Any) -> bool:
    if any(kind.__name__ in _WRAPPER_CLASSES for kind in type(module).__mro__):
        return True
    # Any other that gives its only child's state dict as its own, as Megatron's wrappers do.
    gives = getattr(type(module), "state_dict", None)
    if getattr(gives, "__qualname__", "Module.state_dict") == "Module.state_dict":
        return False
    return [name for name, _ in module.named_children()] == ["module"] and _leaves_out(module)


class _Asked:
    """Stands for a child module and notes under which prefix its state dict is asked for."""

    def __init__(self) -> None:
        self.prefixes: list[str] = []

    def state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        self.prefixes.append(prefix)
        return {} if destination is None else destination


def _leaves_out(module: Any) -> bool:
    """Whether a module's own `state_dict` leaves its child's name out of the keys.

    That of a copy of the module alone is called: the child's may be large, or send messages.
    """
    child, copy = _Asked(), object.__new__(type(module))
    copy.__dict__.update(vars(module))
    copy.__dict__["_modules"] = {"module": child}
    try:
        copy.state_dict()
    except Exception:  # it asks the child for more, and nobody knows what it makes of that
        return False
    return child.prefixes == [""]


Owners = tuple[tuple[str, Any], ...]


def _chains(model: Any) -> Iterator[tuple[str, Owners]]:
    """Yields the path of each module, and the modules from the root to it with their own paths."""
    chains: dict[str, Owners] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        above = chains[parent] if path else ()
        place = above[-1][0] if above else ""
        if path and not (name in WRAPPERS and _is_wrapper(above[-1][1])):
            place = f"{place}.{name}" if place else name
        chains[path] = (*above, (place, module))
        yield path, chains[path]


def own_paths(model: Any) -> dict[str, str]:
    """Returns the path of each module without wrappers' tokens, by its path in the live model.

    Which tokens are a wrapper's is told by the class of the module that has them.
    """
    return {path: chain[-1][0] for path, chain in _chains(model)}


def own_names(model: Any) -> list[tuple[str, Any]]:
    """Returns each parameter of a model with its name without wrappers' tokens.

    Tied parameters come under each of their names.
    """
    return [(fqn, tensor) for fqn, tensor, _, trained in _tensors(model) if trained]


def carried_pg_collection(model: Any) -> Any:
    """Returns the `pg_collection` of a model or of what it wraps, None if there is none."""
    seen = 0
    while model is not None and seen < 16:
        found = getattr(model, "pg_collection", None)
        if found is not None:
            return found
        model = getattr(model, "module", None)
        seen += 1
    return None


class ModelLayouts(dict[str, Layout]):
    """The layouts of a model's parameters and buffers, by their names without wrappers' tokens.

    Attributes:
        parameters: Names of the parameters in the order in which an optimizer numbers them, tied
            ones once.
    """

    parameters: tuple[str, ...] = ()


def _tensors(model: Any) -> Iterator[tuple[str, Any, Owners, bool]]:
    """Yields name, tensor, owners and whether it is a parameter; tied ones under each name."""
    owners = dict(_chains(model))
    # A checkpointing wrapper at the root leaves its own token out of its parameters' names.
    token = "_checkpoint_wrapped_module"
    own = {".".join(p for p in path.split(".") if p != token): c for path, c in owners.items()}
    for trained, tensors in ((True, model.named_parameters), (False, model.named_buffers)):
        for path, tensor in tensors(remove_duplicate=False):
            parent, _, name = path.rpartition(".")
            chain = own[parent] if parent in own else owners[parent]
            place = chain[-1][0]
            yield f"{place}.{name}" if place else name, tensor, chain, trained


def model_layouts(model: Any, grids: Grids, registry: LayoutRegistry) -> ModelLayouts:
    """Returns the layout of every parameter and buffer, by its name without wrappers' tokens.

    Args:
        model: A module, or a mapping from names to local shapes where there is no live model.
        grids: The rank's grids.
        registry: The providers to ask.

    Raises:
        LayoutError: If a provider can't place a parameter, or two parameters get one name.
    """
    tokens = expert_tokens(registry.providers)
    found: dict[str, tuple[Shape, Any, Owners, ExpertName | None]] = {}
    numbered: dict[int, str] = {}
    if isinstance(model, Mapping):
        numbered = dict(enumerate(model))
        for fqn, shape in model.items():
            found[fqn] = (tuple(shape), None, (), expert_name(fqn, tokens))
    else:
        for fqn, tensor, owners, trained in _tensors(model):
            if trained:
                numbered.setdefault(id(tensor), fqn)
            if fqn in found and found[fqn][1] is not tensor:
                raise LayoutError(
                    f"{fqn}: two parameters have this name once wrappers' tokens "
                    f"({', '.join(sorted(WRAPPERS))}) are stripped. Rename one of the modules."
                )
            shape = rank_shape(tensor)
            found[fqn] = (shape, tensor, owners, expert_name(fqn, tokens))
    experts = Counter(
        (place.head, place.tail)
        for _, _, _, place in found.values()
        if place is not None and place.local_expert_index is not None
    )
    layouts = ModelLayouts()
    layouts.parameters = tuple(numbered.values())
    for fqn, (shape, tensor, owners, place) in found.items():
        is_expert = place is not None or cut_by_experts(tensor)
        info = ParamInfo(
            fqn,
            shape,
            grids.expert if is_expert else grids.dense,
            is_expert,
            None if place is None else experts.get((place.head, place.tail)),
            tensor,
            owners,
        )
        layouts[fqn] = registry.layout(info)
    return layouts
