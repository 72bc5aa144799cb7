"""Runs the command in this process and gives back what a script would see."""

import json
from typing import Any, NamedTuple

from typer.testing import CliRunner

from shardplan.planner.command import app


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def shardplan(*args: Any) -> Answer:
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).invoke(
        app, [str(a) for a in args]
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Answer(done.exit_code, done.stdout, done.stderr)
