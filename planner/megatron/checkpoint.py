"""One call to save and one to load, for a Megatron training loop."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import cache
from os import PathLike
from typing import Any, Literal, cast

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save

from shardplan.layouts import (
    DEFAULT_LAYOUTS,
    Grids,
    LayoutProvider,
    VocabularyPadding,
    installed_layouts,
)

from ..load import LayoutAwareLoadPlanner
from ..planning.table import build_table
from ..report import LoadReport
from ..save import LayoutAwareSavePlanner
from ..storage import PinnedStager, SafetensorsWriter
from .copies import EmbeddingCopies
from .extra import SECTION as EXTRA
from .extra import extra_states
from .keys import FsdpDtensorSavePlanner
from .rng import RngLoad, is_rng_state, saved_forms
from .shards import ddp_shards
from .state import (
    chunks_of,
    finish_load,
    initialize_state,
    keep_live_options,
    leave_out_masters,
    model_state,
    optimizer_state,
)

# Fields of Megatron's arguments that differ from rank to rank.
_OF_ONE_RANK = ("rank", "local_rank")
# Parameters with a row for each word.
_OF_WORDS = ("*word_embeddings.weight", "*output_layer.weight", "*output_layer.bias")


def save_checkpoint(
    model: Any,
    optimizer: Any,
    path: str | PathLike[str],
    *,
    opt_param_scheduler: Any = None,
    iteration: int | None = None,
    args: Any = None,
    extra: Mapping[str, Any] | None = None,
    keys: Literal["fsdp_dtensor", "plain"] = "fsdp_dtensor",
    extra_state: bool = False,
    vocab_size: int | None = None,
    pg_collection: Any = None,
    grid: Grids | None = None,
    layouts: Iterable[LayoutProvider] | None = None,
    storage_writer: Any = None,
    process_group: dist.ProcessGroup | None = None,
    async_save: bool = False,
    async_stager: Any = None,
) -> Metadata | Future[Metadata]:
    """Saves a Megatron model and its optimizer; every rank of the model calls it.

    It stands for these lines of Megatron-LM's `save_checkpoint`, which send a message for each
    tensor and each axis that it is sharded over:

        optim_sd_kwargs = dict(metadata=_build_sharded_state_dict_metadata(args))
        state_dict = generate_state_dict(args, model, optimizer, opt_param_scheduler, rng_state,
                                         iteration=iteration, optim_sd_kwargs=optim_sd_kwargs)
        state_dict = preprocess_fsdp_dtensor_state_dict(args, state_dict, model[0])
        fs_storage_writer = torch.distributed.checkpoint.FileSystemWriter(checkpoint_name)
        torch.distributed.checkpoint.save(state_dict=state_dict, storage_writer=fs_storage_writer)

    and in their place stands

        save_checkpoint(model, optimizer, checkpoint_name, iteration=iteration, args=args,
                        opt_param_scheduler=opt_param_scheduler, extra={"rng_state": rng_state})

    Args:
        model: The model, or the list of its virtual pipeline chunks.
        optimizer: Its optimizer, or None.
        path: Folder of the checkpoint.
        opt_param_scheduler: The learning rate's scheduler; its `state_dict()` is saved.
        iteration: Number of the iteration.
        args: Megatron's arguments. Its fields of one rank (`rank`, `local_rank`) are left out.
        extra: Further sections of the state dict. A value must be equal on all ranks, or be
            wrapped as one of each rank (`PerRank`); Megatron-LM's `rng_state` is taken as it is.
        keys: `'fsdp_dtensor'` for the keys that Megatron-LM writes and reads; `'plain'` for names
            without wrappers' tokens. Loading finds either. For Megatron-LM to load a Gated
            DeltaNet, Mamba, or fused latent attention, see `whole_projections`.
        extra_state: Whether to keep modules' `_extra_state`, which Megatron-LM leaves out; it must
            be equal on all ranks that hold a module.
        vocab_size: True size of the vocabulary (`tokenizer.vocab_size`). Megatron pads embeddings
            and output layers by the tensor-parallel size; with this the padding is left out, so
            that the checkpoint opens at any other. Not for checkpoints that Megatron-LM reads.
        pg_collection: Process groups, by default those that the model carries.
        grid: Plain integers instead of process groups.
        layouts: Providers; the built-in and the installed ones if not given.
        storage_writer: A DCP storage writer; torch's `FileSystemWriter` of `path` if not given.
        process_group: The ranks that save, all by default. An asynchronous save that is not one of
            `SafetensorsWriter` needs a group of its own (`dist.new_group(backend="gloo")`), since
            its messages travel beside those of training.
        async_save: Whether to return as soon as a copy is made. The future that is returned gives
            the metadata; wait for it (`future.result()`, which raises what the save raised) before
            `iteration` counts as saved, as in Megatron's `maybe_finalize_async_save`.
        async_stager: What makes the copy; one `PinnedStager` for all saves of the process if not
            given.

    Raises:
        CheckpointError: If the ranks do not plan the same checkpoint; of an asynchronous save from
            its future.
        LayoutError: If a parameter can't be placed.
    """
    state: dict[str, Any] = dict(model_state(model, copies=False))
    if optimizer is not None:
        state.update(optimizer_state(model, optimizer, copies=False).sections)
    state["checkpoint_version"] = 3.0
    if iteration is not None:
        state["iteration"] = iteration
    if args is not None:
        state["args"] = shared_arguments(args)
    if opt_param_scheduler is not None:
        state["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    providers = _providers(layouts, vocab_size)
    if extra_state:
        table = build_table(model, pg_collection=pg_collection, grid=grid, layouts=providers)
        found = extra_states(chunks_of(model), table.chunks)
        state[EXTRA] = {name: value for name, _, value in found}
    for name, value in (extra or {}).items():
        if is_rng_state(value):
            table = build_table(model, pg_collection=pg_collection, grid=grid, layouts=providers)
            state.update(saved_forms(name, value, table.grids))
        else:
            state[name] = value
    make = FsdpDtensorSavePlanner if keys == "fsdp_dtensor" else LayoutAwareSavePlanner
    planner = make(
        model,
        pg_collection=pg_collection,
        grid=grid,
        layouts=providers,
        optimizer_layouts=ddp_shards(model, optimizer),
    )
    writer = FileSystemWriter(path) if storage_writer is None else storage_writer
    given: dict[str, Any] = {
        "storage_writer": writer,
        "planner": planner,
        "process_group": process_group,
    }
    if async_save:
        if isinstance(writer, SafetensorsWriter):
            given["use_collectives"] = False
        stager = async_stager or _stager()
        return cast(Future[Metadata], dcp_async_save(state, async_stager=stager, **given))
    saved: Metadata = save(state, **given)
    return saved


@cache
def _stager() -> PinnedStager:
    """Returns the stager of this process, which keeps its host memory from one save to the next."""
    return PinnedStager()


def _providers(
    layouts: Iterable[LayoutProvider] | None, vocab_size: int | None
) -> list[LayoutProvider]:
    """Returns the providers, with what Megatron's embeddings need."""
    own: list[LayoutProvider] = [EmbeddingCopies()]
    if vocab_size is not None:
        own.append(VocabularyPadding(dict.fromkeys(_OF_WORDS, vocab_size)))
    names = {provider.name for provider in own}
    known = (*DEFAULT_LAYOUTS, *installed_layouts()) if layouts is None else layouts
    return [*(provider for provider in known if provider.name not in names), *own]


def shared_arguments(args: Any) -> Any:
    """Returns Megatron's arguments without the fields that differ from rank to rank."""
    shared = copy.copy(args)
    for name in _OF_ONE_RANK:
        if isinstance(shared, dict):
            shared.pop(name, None)
        elif hasattr(shared, name):
            delattr(shared, name)
    return shared


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found.

    Attributes:
        iteration: Number of the iteration, None if it was not saved.
        extra: The sections that were asked for.
        report: What was loaded, missed and changed on this rank.
    """

    iteration: int | None
    extra: dict[str, Any]
    report: LoadReport


def load_checkpoint(
    model: Any,
    optimizer: Any,
    path: str | PathLike[str],
    *,
    opt_param_scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    extra_state: bool = False,
    vocab_size: int | None = None,
    pg_collection: Any = None,
    grid: Grids | None = None,
    layouts: Iterable[LayoutProvider] | None = None,
    storage_reader: Any = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Loaded:
    """Loads a Megatron model and its optimizer, saved in any parallel configuration.

    Checkpoints of Megatron-LM's `fsdp_dtensor` format load too. It stands for these lines of
    Megatron-LM's `load_checkpoint`:

        state_dict = generate_state_dict(args, model, optimizer, opt_param_scheduler, rng_state,
                                         optim_sd_kwargs=optim_sd_kwargs)
        state_dict = preprocess_fsdp_dtensor_state_dict(args, state_dict, model[0])
        planner = default_planner.DefaultLoadPlanner(allow_partial_load=allow_partial_load)
        torch.distributed.checkpoint.load_state_dict(state_dict=state_dict, ...)
        model[0].load_state_dict(state_dict["model"], strict=strict)
        optimizer.load_state_dict(state_dict["optimizer"])
        opt_param_scheduler.load_state_dict(state_dict["opt_param_scheduler"])

    and in their place stands

        loaded = load_checkpoint(model, optimizer, checkpoint_name,
                                 opt_param_scheduler=opt_param_scheduler)
        iteration = loaded.iteration

    An optimizer that has taken no step yet gets its state first. Weights and state are filled in
    place. The optimizer may be of another kind than the saved one, offloaded to the CPU or not:
    options of parameter groups that were not saved stay as they are, and a `master_param` that
    was not saved becomes the loaded weight; both are in the report.

    Args:
        model: The model, or the list of its virtual pipeline chunks.
        optimizer: Its optimizer, or None to load the model alone.
        path: Folder of the checkpoint.
        opt_param_scheduler: The learning rate's scheduler; its `load_state_dict()` is called.
        extra: Further sections to load, with values of the kind that was saved.
        strict: Whether a key that the checkpoint lacks is an error, or is reported.
        extra_state: Whether to load modules' `_extra_state`; what was not saved stays as it is.
        vocab_size: True size of the vocabulary, where it is padded; the padding becomes zero. The
            checkpoint may have another padding, or none.
        pg_collection: Process groups, by default those that the model carries.
        grid: Plain integers instead of process groups.
        layouts: Providers; the built-in and the installed ones if not given. `whole_projections`
            for what Megatron-LM's own loop wrote with tensor parallelism.
        storage_reader: A DCP storage reader; torch's `FileSystemReader` of `path` if not given.
        process_group: The ranks that load, all by default.
        options: Further arguments of `LayoutAwareLoadPlanner`.

    Raises:
        CheckpointError: If a key is missing, has another size, or is not covered.
        LayoutError: If a parameter can't be placed.
    """
    reader = FileSystemReader(path) if storage_reader is None else storage_reader
    state: dict[str, Any] = dict(model_state(model))
    members = []
    if optimizer is not None:
        initialize_state(optimizer)
        live = optimizer_state(model, optimizer)
        state.update(live.sections)
        members = live.members
    stored = reader.read_metadata().state_dict_metadata
    kept = keep_live_options(members, stored)
    masters = optimizer is None or not leave_out_masters(live.sections, stored)
    for name, empty in (("iteration", 0), ("checkpoint_version", 0.0)):
        if name in stored:
            state[name] = empty
    if opt_param_scheduler is not None:
        state["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    providers = _providers(layouts, vocab_size)
    with_extra = []
    if extra_state:
        table = build_table(model, pg_collection=pg_collection, grid=grid, layouts=providers)
        with_extra = list(extra_states(chunks_of(model), table.chunks))
        state[EXTRA] = {name: copy.copy(value) for name, _, value in with_extra}
    ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
    random = {
        name: RngLoad(name, value, stored, ranks)
        for name, value in (extra or {}).items()
        if is_rng_state(value)
    }
    for name, value in (extra or {}).items():
        state.update(random[name].sections if name in random else {name: copy.copy(value)})
    planner = LayoutAwareLoadPlanner(
        model,
        pg_collection=pg_collection,
        grid=grid,
        layouts=providers,
        optimizer_layouts=ddp_shards(model, optimizer),
        strict=strict,
        **options,
    )
    load(state, storage_reader=reader, planner=planner, process_group=process_group)
    planner.report.missing += [f"optimizer.param_to_group_meta: {option}" for option in kept]
    if not masters:
        planner.report.missing.append("optimizer.state: master_param (the weights were taken)")
    finish_load(model, optimizer, members, masters=masters)
    for name, module, _ in with_extra:
        module.set_extra_state(state[EXTRA][name])
    if opt_param_scheduler is not None:
        opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    found = {key: state[key] for key in extra or {} if key not in random}
    for name, rng in random.items():
        found[name], missing = rng.chosen()
        planner.report.missing += [missing] if missing else []
    return Loaded(state.get("iteration"), found, planner.report)
