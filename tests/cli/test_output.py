"""What the command prints: keys of somebody else's checkpoint, pipes, JSON, and the ends of a verb."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan
from typer.testing import CliRunner

from shardplan.planner.cli import convert
from shardplan.planner.command import app
from shardplan.planner.tools.verbs import subject

# What each key must look like.
HOSTILE = {
    "clear\x1b[2J\x1b[1;1Hsound": r"clear\x1b[2J\x1b[1;1Hsound",
    "title\x1b]0;x\x07": r"title\x1b]0;x\x07",
    "c1\x9b31m": r"c1\x9b31m",
    "bidi\u202egnp.w\u2066": r"bidi\u202egnp.w\u2066",
    "line\nsound: 7 keys\r": r"line\nsound: 7 keys\r",
    "tab\tback\b\x7f": r"tab\tback\x08\x7f",
    "zero\u200bwidth\ufeff\u2028": r"zero\u200bwidth\ufeff\u2028",
    "half\ud800": r"half\ud800",
    "[red]markup[/red]": "[red]markup[/red]",
    "[/]": "[/]",
    "end\\": "end\\",
    "\\[bold]": "\\[bold]",
    ":heart:": ":heart:",
    "[link=https://x]y": "[link=https://x]y",
    "holes{}{0}": "holes{}{0}",
    "Ä 日本": "Ä 日本",
}


@pytest.fixture
def hostile(tmp_path):
    for name, value in (("a", 0.0), ("b", 1.0)):
        state = {key: torch.full((2,), value) for key in HOSTILE}
        dcp.save({**state, "value\x1b[5m": name}, checkpoint_id=tmp_path / name)
    return tmp_path / "a"


def check(answer, *shown):
    for text in (answer.out, answer.err):
        assert "" == "".join(c for c in text if not c.isprintable() and c != "\n")
    for text in shown:
        assert text in answer.out + answer.err


@pytest.mark.parametrize("form", ["--tree", "--table"])
def test_keys_are_shown_as_they_are(hostile, form):
    answer = shardplan("inspect", hostile, form)
    assert 0 == answer.status
    check(
        answer, *(text for text in HOSTILE.values() if "." not in text)
    )  # a tree cuts names at dots


def test_differences_are_shown_as_they_are(hostile):
    answer = shardplan("diff", hostile, hostile.parent / "b", "--values")
    assert 1 == answer.status
    check(answer, *HOSTILE.values(), r"value\x1b[5m")
    rows = [line for line in answer.out.splitlines() if " values  " in line]
    assert len(HOSTILE) == len(rows)


def test_json_holds_the_keys_themselves(hostile):
    answer = shardplan("diff", hostile, hostile.parent / "b", "--values", "--json")
    check(answer)
    assert [*HOSTILE, "value\x1b[5m"] == [d["key"] for d in answer.json["differences"]]
    assert "Ä 日本" in answer.out


def test_faults_and_errors_are_shown_as_they_are(hostile):
    os.truncate(hostile / "__0_0.distcp", 3000)
    answer = shardplan("verify", hostile)
    assert 1 == answer.status
    check(answer, "not sound")
    answer = shardplan("convert", hostile, hostile.parent / "c", "--to", "safetensors")
    assert 2 == answer.status
    assert "truncated" in answer.err
    odd = "no\x1b[2J[red]such"
    for args in (["inspect", odd], ["convert", hostile, f"{odd}/x"], ["simulate", odd]):
        answer = shardplan(*args)
        assert 2 == answer.status
        check(answer, r"no\x1b[2J[red]such")


@pytest.mark.parametrize("key", HOSTILE)
def test_one_key_is_shown_as_it_is(hostile, key):
    answer = shardplan("explain", hostile, "-p", key)
    assert 0 == answer.status
    check(answer, HOSTILE[key])
    answer = shardplan("show", hostile, "-p", key)
    assert 0 == answer.status
    check(answer, HOSTILE[key])
    assert key == shardplan("explain", hostile, "-p", key, "--json").json["key"]


def test_a_name_of_a_folder_is_shown_as_it_is(tmp_path):
    path = tmp_path / "[red]\x1b[2Jx"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path)
    shown = f"{tmp_path}/[red]\\x1b[2Jx"
    for verb in ("inspect", "verify"):
        check(shardplan(verb, path), shown)
    check(shardplan("convert", path, f"{path}2", "--to", "dcp"), f"{shown}2: 1 tensor")


def test_piped_rows_are_one_line_each(tmp_path):
    keys = [f"model.layers.{i}." + "x" * 300 + ".weight" for i in range(3)]
    for name in "ab":
        state = {key: torch.full((2,) * (i + 1), ord(name)) for i, key in enumerate(keys)}
        dcp.save(state, checkpoint_id=tmp_path / name)
    for args in (["inspect", tmp_path / "a", "--table"], ["diff", *tmp_path.iterdir(), "--values"]):
        lines = shardplan(*args).out.splitlines()
        for i, key in enumerate(keys):
            (line,) = [line for line in lines if key in line]
            assert str([2] * (i + 1)) in line or " values " in line


def test_json_is_what_every_parser_reads(tmp_path):
    state = {"a": torch.tensor([1.0]), "n": float("nan"), "t: NaN,": "NaN", "step": 1e400}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    dcp.save({**state, "a": torch.tensor([float("nan")])}, checkpoint_id=tmp_path / "b")

    def refuse(text):
        raise AssertionError(text)

    for args in (["diff", tmp_path / "a", tmp_path / "b", "--values"], ["inspect", tmp_path / "a"]):
        found = json.loads(shardplan(*args, "--json").out, parse_constant=refuse)
    assert float("inf") == found["step"]
    assert "t: NaN," in [entry["key"] for entry in found["keys"]]


def test_numbers_in_keys_are_only_shown_as_ranges(tmp_path):
    keys = [f"a{{}}.{i}.{{0}}" for i in range(3)] + ["b\0.7", "9" * 5000]
    dcp.save({key: torch.ones(1) for key in keys}, checkpoint_id=tmp_path / "a")
    answer = shardplan("inspect", tmp_path / "a", "--table")
    assert 0 == answer.status
    check(answer, "a{}.{0..2}.{0}", r"b\x00.7", "9" * 5000)


def test_the_version():
    answer = shardplan("--version")
    assert 0 == answer.status
    assert f"(torch {torch.__version__.partition('+')[0]}" in answer.out
    assert answer.out.startswith("shardplan 0.")


def test_completion_knows_the_verbs():
    env = {"_SHARDPLAN_COMPLETE": "complete_bash", "COMP_WORDS": "shardplan con", "COMP_CWORD": "1"}
    done = CliRunner(env=env).invoke(app, [], prog_name="shardplan")
    assert ["convert"] == done.stdout.split()


def test_the_list_of_verbs_is_whole():
    lines = shardplan("--help").out.splitlines()
    verbs = [line for line in lines if line.startswith("  ") and "  " in line.strip()]
    assert "..." not in "".join(verbs)
    for verb in ("inspect", "verify", "diff", "convert", "finalize", "export", "import"):
        assert any(line.split()[0] == verb for line in verbs)
        assert "<bool>" not in shardplan(verb, "--help").out


def test_pictures_that_have_no_folder_fail_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "load_recipe", None)  # would be called first
    answer = shardplan("show", "Llama-3.1-405B", "-p", "w", "-o", tmp_path / "none" / "x")
    assert 2 == answer.status
    assert f"the folder {tmp_path / 'none'} does not exist. Make it first." in answer.err


def test_a_pattern_of_several_parameters_of_a_recipe_is_said():
    for verb in ("explain", "show"):
        answer = shardplan(verb, "Llama-3.1-405B", "-p", "linear_fc2.weight")
        assert 0 == answer.status
        assert "'linear_fc2.weight' means 126 tensors; this is the first. Others: " in answer.err
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        assert "" == shardplan(verb, "Llama-3.1-405B", "-p", name).err


def test_explain_says_no_in_json_too(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    answer = shardplan("explain", tmp_path / "a", "-p", "w", "-r", "3", "--json")
    assert (1, []) == (answer.status, answer.json["chunks"])
    shardplan("convert", tmp_path / "a", tmp_path / "b", "--to", "shardplan")
    answer = shardplan("explain", tmp_path / "b", "-p", "w", "-r", "3", "--json")
    assert 2 == answer.status
    assert "rank 3 is not in this checkpoint; 1 rank saved it, from 0" == answer.json["error"]


def test_an_interrupted_verb_has_no_answer(tmp_path, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "convert", interrupted)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    answer = shardplan("convert", tmp_path / "a", tmp_path / "b")
    assert (2, "shardplan: interrupted\n") == (answer.status, answer.err)


RUN = "from shardplan.planner.command import main; main()"
STOPPED = """
import os, signal
from shardplan.planner.checkpoints.streams import Source
read = Source.write
def write(self, stream, advance):
    read(self, stream, advance)
    os.kill(os.getpid(), signal.SIGTERM)
Source.write = write
"""


def run(code, *args, **options):
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_a_batch_system_that_stops_a_verb_finds_out_as_it_was(tmp_path):
    dcp.save({"w": torch.ones(2), "v": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    torch.save({"w": torch.zeros(2)}, tmp_path / "b.pt")
    before = (tmp_path / "b.pt").read_bytes()
    done = run(STOPPED + RUN, "convert", tmp_path / "a", tmp_path / "b.pt", "--overwrite")
    _, err = done.communicate()
    assert (2, b"shardplan: interrupted\n") == (done.returncode, err)
    assert before == (tmp_path / "b.pt").read_bytes()
    assert ["a", "b.pt"] == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_leaves_early_does_not_change_the_answer(tmp_path, more):
    dcp.save({f"w{i}": torch.ones(2) for i in range(9)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / "__0_0.distcp").unlink()
    done = run(RUN, "verify", tmp_path / "a", *more)
    done.stdout.close()
    assert b"" == done.stderr.read()
    done.stderr.close()
    assert 1 == done.wait()


@pytest.mark.parametrize("args", [["--help"], ["--version"], []])
def test_help_and_version_do_without_torch(args):
    """An import of torch takes seconds, and a person only wants to know the verbs."""
    code = (
        "import sys; from shardplan.planner.command import main\n"
        f"sys.argv[1:] = {args!r}\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "False" == done.stderr.split()[-1], done.stderr
    assert "sharded checkpoints" in done.stdout + done.stderr or "(torch " in done.stdout
