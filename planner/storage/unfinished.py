"""What a save that has not ended, or did not end well, left in a folder."""

from .format.commit import CHECKPOINT, is_save, read_commit
from .places.files import Files
from .writing.claim import ENDED, OPEN, claims, read_claim
from .writing.process import has_ended


def unfinished(files: Files) -> list[str]:
    """Returns a sentence for each save that is under way or was cut off, none if there is none."""
    commit = read_commit(files)
    complete = "" if commit is None else commit.save
    found, named = [], {complete}
    for number in claims(files):
        claim = read_claim(files, number)
        named.add(claim.save)
        if not claim.save or claim.save == complete or not _files_of(files, claim.save):
            continue
        what = f"unfinished save: {claim}; {_files_of(files, claim.save)}"
        if claim.state == ENDED:
            found.append(f"{what}. It was given up: {claim.error}")
        elif claim.state == OPEN and has_ended(claim.process):
            found.append(f"{what}. Its process has ended")
        elif claim.state == OPEN:
            found.append(f"{what}. It may still be running")
        elif commit is None:
            found.append(
                f"save {claim.save} was complete, and its {CHECKPOINT} is gone; "
                f"{_files_of(files, claim.save)}"
            )
    for name in sorted(files.names("")):
        if is_save(name) and name not in named and _files_of(files, name):
            found.append(f"unfinished save {name}, which no claim names; {_files_of(files, name)}")
    return found


def _files_of(files: Files, save: str) -> str:
    """Says what a save has written; empty if nothing."""
    names = files.names(save)
    data = sum(name.endswith(".safetensors") for name in names)
    if not names:
        return ""
    ranks = {name[9:14] for name in names if name.endswith(".safetensors") and name[5:9] == "-of-"}
    of = f" of {int(min(ranks))}" if len(ranks) == 1 and min(ranks).isdigit() else ""
    return f"{data}{of} data files are there"
