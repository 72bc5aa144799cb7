"""Export to Hugging Face's form and import from it, streaming, in bounded memory."""

import json
import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardplan.layouts import CheckpointError, Grids, Layout, LayoutRegistry, model_layouts
from shardplan.layouts.errors import summary
from shardplan.layouts.slab import Shape
from shardplan.layouts.variants import variants

from ...checkpoints.converting import sources
from ...checkpoints.opened import Checkpoint
from ...checkpoints.replacing import replacement
from ...checkpoints.safetensors_files import INDEX
from ...checkpoints.stock_writing import OneFileWriter
from ...checkpoints.streamed import StreamedSavePlanner, drive_save
from ...checkpoints.streams import Advance, Source, write_safetensors
from ..recipes.numbers import Numbers
from ..recipes.parallel import NONE, Parallel, describe
from .bridge import Bridge, build_bridge
from .names import HuggingFaceNames, Rule
from .rules import rules_for

SHARD_BYTES = 5 << 30
_BESIDE = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
)


@dataclass(slots=True)
class Plan:
    """What will be copied.

    Attributes:
        tensors: The tensors that will be written, by key.
        left: Keys on the side that is read that nothing asked for.
    """

    tensors: dict[str, Source]
    left: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(source.nbytes for source in self.tensors.values())


def _sides(
    numbers: Numbers, rules: Iterable[Rule]
) -> tuple[dict[str, Layout], dict[str, Layout], Grids]:
    """Returns our layouts and theirs for one rank that holds the whole model."""
    alone = Parallel(fsdp=NONE, pad_vocabulary=0)
    ours = describe(numbers, alone)
    theirs = describe(numbers, alone, extra=[HuggingFaceNames(rules)])
    made = [
        dict(model_layouts(d.shapes, d.grids, LayoutRegistry(d.providers))) for d in (ours, theirs)
    ]
    return made[0], made[1], ours.grids


def plan_export(
    checkpoint: Checkpoint,
    numbers: Numbers,
    *,
    section: str | None = None,
    rules: Iterable[Rule] | None = None,
) -> Plan:
    """Plans an export; nothing is read yet but the keys.

    Args:
        checkpoint: A checkpoint under Megatron-Core's names, of any layout and format.
        numbers: The model's numbers.
        section: Section of the state dict that holds the model; found if not given.
        rules: Rules for names and shapes; those of the model's kind if not given.

    Raises:
        CheckpointError: If a tensor is missing or has another shape, each named.
    """
    ours, theirs, grids = _sides(numbers, rules_for(numbers) if rules is None else rules)
    prefix = _prefix(checkpoint, ours) if section is None else f"{section}." if section else ""
    near = {}
    for fqn, layout in ours.items():
        near[fqn] = _as_saved(layout, checkpoint, grids, prefix)
    bridge = build_bridge(near, theirs, grids, prefix)
    vocabulary = {prefix + near[fqn].name for fqn, layout in ours.items() if _is_vocabulary(layout)}
    _check(checkpoint, bridge, vocabulary)
    held = sources(checkpoint)
    tensors = {key: bridge.source(key, held) for key in sorted(bridge.shapes, key=_natural)}
    left = [
        key
        for key in checkpoint.tensors
        if key.startswith(prefix) and key not in bridge.near and not _is_state(key)
    ]
    return Plan(tensors, left)


def plan_import(
    checkpoint: Checkpoint,
    numbers: Numbers,
    *,
    section: str = "model",
    rules: Iterable[Rule] | None = None,
    ignore: Iterable[str] = ("mtp.", "model.visual."),
) -> Plan:
    """Plans an import; nothing is read yet but the keys.

    Args:
        checkpoint: A Hugging Face checkpoint.
        numbers: The model's numbers.
        section: Section of the state dict that will hold the model.
        rules: Rules for names and shapes; those of the model's kind if not given.
        ignore: Beginnings of keys that may be left over.

    Raises:
        CheckpointError: If a tensor is missing or has another shape, or one is left over.
    """
    chosen = rules
    if chosen is None:
        stacked = any(key.endswith(".experts.gate_up_proj") for key in checkpoint.tensors)
        chosen = rules_for(numbers, stacked_experts=stacked)
    ours, theirs, grids = _sides(numbers, chosen)
    held = sources(checkpoint)
    if any(key.startswith("model.language_model.") for key in held):
        held = {key.replace("model.language_model.", "model.", 1): s for key, s in held.items()}
    bridge = build_bridge(theirs, ours, grids)
    problems = [f"{key}: not in {checkpoint.path}" for key in bridge.near if key not in held]
    problems += [
        f"{key}: shape {held[key].shape} in {checkpoint.path}, {shape} by the configuration"
        for key, shape in bridge.near.items()
        if key in held and held[key].shape != shape
    ]
    left = [key for key in held if key not in bridge.near]
    unknown = [key for key in left if not key.startswith(tuple(ignore))]
    problems += [f"{key}: no rule takes it" for key in unknown]
    if problems:
        raise CheckpointError(
            f"{checkpoint.path}: it does not fit the model's configuration: {summary(problems)}. "
            "Is it the config.json of this checkpoint?"
        )
    prefix = f"{section}." if section else ""
    tensors = {prefix + key: bridge.source(key, held) for key in bridge.shapes}
    return Plan(tensors, left)


def export_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    numbers: Numbers,
    *,
    section: str | None = None,
    rules: Iterable[Rule] | None = None,
    config: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    threads: int = 2,
    overwrite: bool = False,
    advance: Advance = lambda n: None,
    plan: Plan | None = None,
) -> Plan:
    """Writes a checkpoint in Hugging Face's form; if that fails, `out` is as it was.

    Args:
        checkpoint: A checkpoint under Megatron-Core's names, of any layout and format.
        out: The folder to make.
        numbers: The model's numbers.
        section: Section of the state dict that holds the model; found if not given.
        rules: Rules for names and shapes; those of the model's kind if not given.
        config: The model's `config.json`, or the folder that has it, copied along with the
            tokenizer's files.
        shard_bytes: Most bytes of one file, unless a tensor is larger.
        threads: How many files are written at a time.
        overwrite: Whether a checkpoint in `out` is replaced, as a whole.
        advance: Told the bytes of each block that is written.
        plan: What `plan_export` returned for the same arguments, if that is known.

    Returns:
        What was written, and what was left over.

    Raises:
        CheckpointExistsError: If something is in `out` that may not be replaced.
        CheckpointError: If a tensor is missing or has another shape; nothing is written then.
    """
    if plan is None:
        plan = plan_export(checkpoint, numbers, section=section, rules=rules)
    beside = {} if config is None else _beside(config)
    with replacement(
        out, folder=True, overwrite=overwrite, source=checkpoint, beside=beside
    ) as new:
        _write(plan, new, shard_bytes, threads, advance)
        for name, file in beside.items():
            shutil.copyfile(file, new / name)
    return plan


def _write(plan: Plan, out: Path, shard_bytes: int, threads: int, advance: Advance) -> None:
    """Writes the model's files and their index."""
    shards = _shards(plan.tensors, shard_bytes)
    names = [
        "model.safetensors"
        if len(shards) == 1
        else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        for i in range(len(shards))
    ]
    lock, failed = threading.Lock(), threading.Event()

    def told(count: int) -> None:
        if failed.is_set():
            raise CheckpointError(f"{out}: another of its files could not be written.")
        with lock:
            advance(count)

    def write(number: int) -> None:
        write_safetensors(out / names[number], shards[number], {"format": "pt"}, told)

    with ThreadPoolExecutor(max(threads, 1)) as pool:
        try:
            for done in as_completed([pool.submit(write, n) for n in range(len(shards))]):
                done.result()
        except BaseException:  # the pool waits for its threads, after a Ctrl-C too
            failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if len(shards) > 1:
        weights = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": weights}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def import_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    numbers: Numbers,
    *,
    section: str = "model",
    rules: Iterable[Rule] | None = None,
    overwrite: bool = False,
    advance: Advance = lambda n: None,
    writer: Any = None,
    plan: Plan | None = None,
) -> Plan:
    """Writes a Hugging Face checkpoint under Megatron-Core's names, for any configuration to load.

    If that fails, `out` is as it was, unless a writer is given.

    Args:
        checkpoint: The Hugging Face checkpoint.
        out: The folder to make.
        numbers: The model's numbers.
        section: Section of the state dict that will hold the model.
        rules: Rules for names and shapes; those of the model's kind if not given.
        overwrite: Whether a checkpoint in `out` is replaced, as a whole.
        advance: Told the bytes of each block that is written.
        writer: DCP storage writer, which knows its place; by default one for stock's own format
            in `out`.
        plan: What `plan_import` returned for the same arguments, if that is known.

    Returns:
        What was written, and what was left over.

    Raises:
        CheckpointExistsError: If something is in `out` that may not be replaced.
        CheckpointError: If a tensor is missing or has another shape; nothing is written then.
    """
    if plan is None:
        plan = plan_import(checkpoint, numbers, section=section, rules=rules)
    paths: dict[str, tuple[Any, ...]] = {
        key: (section, key[len(section) + 1 :]) if section else (key,) for key in plan.tensors
    }
    planner = StreamedSavePlanner(plan.tensors, {}, paths, advance)
    if writer is not None:
        drive_save(planner, writer)
        return plan
    with replacement(out, folder=True, overwrite=overwrite, source=checkpoint) as new:
        drive_save(planner, OneFileWriter(new))
    return plan


def _as_saved(layout: Layout, checkpoint: Checkpoint, grids: Grids, prefix: str) -> Layout:
    """Returns the layout in the form that the checkpoint has: split, fused, stacked, single."""
    grid = grids.of(layout.family)
    stored = checkpoint.metadata.state_dict_metadata
    for form in variants(layout, grid):
        if all(prefix + form.key(frame) in stored for frame in form.frames(grid)):
            return form
    return layout


def _prefix(checkpoint: Checkpoint, ours: Mapping[str, Layout]) -> str:
    """Finds the section that holds the model: what stands before the embedding's name."""
    name = next(iter(ours.values())).name
    found = [
        key[: -len(name)]
        for key in checkpoint.tensors
        if key.endswith(name) and (len(key) == len(name) or key[-len(name) - 1] == ".")
    ]
    if not found:
        raise CheckpointError(
            f"{checkpoint.path}: no key ends in {name}. Is it a checkpoint under Megatron-Core's "
            "names? See `shardplan inspect`."
        )
    return min(found, key=len)


def _is_vocabulary(layout: Layout) -> bool:
    return any(type(stage).__name__ == "Unpad" for stage in layout.stages)


def _check(checkpoint: Checkpoint, bridge: Bridge, vocabulary: set[str]) -> None:
    """Checks that the checkpoint has every tensor in the shape that the layouts give it."""
    problems = []
    for key, shape in bridge.near.items():
        if key not in checkpoint.tensors:
            problems.append(f"{key}: not in {checkpoint.path}")
        elif not _fits(checkpoint.shape(key), shape, key in vocabulary):
            problems.append(
                f"{key}: shape {checkpoint.shape(key)} in {checkpoint.path}, {shape} by the "
                "configuration"
            )
    if problems:
        raise CheckpointError(
            f"{checkpoint.path}: it does not fit the model's configuration: {summary(problems)}. "
            "Is it the config.json of this checkpoint?"
        )


def _fits(stored: Shape, shape: Shape, padded: bool) -> bool:
    """Whether a stored shape is the one that is wanted, a padded vocabulary's rows aside."""
    if stored == shape:
        return True
    return padded and stored[1:] == shape[1:] and stored[0] > shape[0]


def _is_state(key: str) -> bool:
    """Whether a key is of optimizer state or a blob that no other project reads."""
    return "optimizer" in key.split(".")[0] or key.endswith("_extra_state")


def _shards(tensors: Mapping[str, Source], limit: int) -> list[dict[str, Source]]:
    shards: list[dict[str, Source]] = [{}]
    size = 0
    for key, source in tensors.items():
        if shards[-1] and size + source.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][key] = source
        size += source.nbytes
    return shards


def _natural(key: str) -> list[Any]:
    """Sorts numbers in a key by their value; what stands outside the layers comes first."""
    return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in key.split(".")]


def _beside(config: Path) -> dict[str, Path]:
    """Returns a model's configuration and the files of its tokenizer, by their names in the copy."""
    folder = config if config.is_dir() else config.parent
    file = config / "config.json" if config.is_dir() else config
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file. Give a model's config.json.")
    found = [path for pattern in _BESIDE for path in folder.glob(pattern) if path.is_file()]
    return {**{path.name: path for path in found}, "config.json": file}
