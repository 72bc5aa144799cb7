"""The `shardplan` command and its verbs; each one's module is imported when it is asked for.

`shardplan --help` and `--version` so need no torch, whose import takes seconds.
"""

import signal
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_VERBS = (
    (
        "inspect",
        "cli.inspect_:inspect_",
        "What is in a checkpoint: keys, shapes, dtypes, bytes.",
        "shardplan inspect run7/step-1000 -f '*experts*'",
    ),
    (
        "verify",
        "cli.verify:verify",
        "Whether a checkpoint is complete and undamaged.",
        "shardplan verify run7/step-1000 && echo sound",
    ),
    (
        "diff",
        "cli.diff:diff",
        "In what two checkpoints differ.",
        "shardplan diff step-1000 step-1000-resharded --values",
    ),
    (
        "convert",
        "cli.convert:convert_",
        "Write a checkpoint in another format.",
        "shardplan convert run7/step-1000 model.pt --to torch",
    ),
    (
        "finalize",
        "cli.finalize:finalize_",
        "Let stock DCP list a checkpoint in our own format.",
        "shardplan finalize run7/step-1000",
    ),
    (
        "export",
        "tools.verbs.export:export_",
        "Write a checkpoint as a Hugging Face model.",
        "shardplan export step-1000 hf-model --to hf --config base-model",
    ),
    (
        "import",
        "tools.verbs.import_:import_",
        "Write a Hugging Face model as a checkpoint.",
        "shardplan import Qwen3-Next-80B step-0 --from hf",
    ),
    (
        "simulate",
        "tools.verbs.simulate:simulate",
        "Plan a model at full scale, without weights or GPUs.",
        "shardplan simulate Qwen3-Next-80B-A3B --to 64-ranks",
    ),
    (
        "explain",
        "tools.verbs.explain:explain",
        "Follow one parameter from storage to the checkpoint.",
        "shardplan explain Llama-3.1-405B --param '*.3.*linear_qkv.weight' --rank 9",
    ),
    (
        "show",
        "tools.verbs.show:show",
        "Who holds what of a tensor, as blocks and pictures.",
        "shardplan show Qwen3-Next-80B-A3B --param '*.0.*in_proj.weight' --to tp=4,dp_shard=8",
    ),
)


class _Verbs(TyperGroup):
    """Lists the verbs from the table above, and imports the one that is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, *_ in _VERBS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for name, place, short, example in _VERBS:
            if name == cmd_name:
                module, _, function = place.partition(":")
                verb = getattr(import_module(f".{module}", __package__), function)
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command(name, short_help=short, epilog=f"Example: {example}")(verb)
                return typer.main.get_command(alone)
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, _, short, _ in _VERBS])


app = typer.Typer(
    name="shardplan",
    cls=_Verbs,
    help="Look into sharded checkpoints, and plan them, without a GPU or a process group.",
    epilog="Exit status: 0 yes, or done; 1 the answer is no (not sound, different); 2 no answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help says of a flag what it does, and not that it is a <bool>
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardplan {version('shardplan')} (torch {version('torch')})")
        raise typer.Exit


@app.callback()
def _options(
    version_: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Takes what is not of any verb."""


def main() -> None:
    """Runs the command."""
    # A batch system's signal ends a verb as Ctrl-C does: without half-written files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a test's own may not
            stream.reconfigure(errors="backslashreplace")
    app()
