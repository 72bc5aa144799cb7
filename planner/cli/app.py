"""The `shardplan` command and its verbs; each one's work stands in a module of its own."""

import typer

from . import looking, moving, placing, planning

app = typer.Typer(
    name="shardplan",
    help="Look into sharded checkpoints, and plan them, without a GPU or a process group. "
    "Exit status: 0 all is well, 1 the answer is no (not sound, different), 2 no answer (error).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

_VERBS = (
    ("inspect", looking.inspect_, "shardplan inspect run7/step-1000 -f '*experts*'"),
    ("verify", looking.verify, "shardplan verify run7/step-1000 && echo sound"),
    ("diff", looking.diff, "shardplan diff step-1000 step-1000-resharded --values"),
    ("convert", moving.convert_, "shardplan convert run7/step-1000 model.pt --to torch"),
    ("finalize", moving.finalize_, "shardplan finalize run7/step-1000"),
    ("export", moving.export_, "shardplan export step-1000 hf-model --to hf --config base-model"),
    ("import", moving.import_, "shardplan import Qwen3-Next-80B step-0 --from hf"),
    ("simulate", planning.simulate, "shardplan simulate Qwen3-Next-80B-A3B --to 64-ranks"),
    (
        "explain",
        placing.explain,
        "shardplan explain Llama-3.1-405B --param '*.3.*linear_qkv.weight' --rank 9",
    ),
    (
        "show",
        placing.show,
        "shardplan show Qwen3-Next-80B-A3B --param '*.0.*in_proj.weight' --to tp=4,dp_shard=8",
    ),
)
for _name, _function, _example in _VERBS:
    app.command(_name, epilog=f"Example: `{_example}`")(_function)


def main() -> None:
    """Runs the command."""
    app()
