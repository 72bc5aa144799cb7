"""What a load did: every key that was loaded, missed, left over or changed on the way."""

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class LoadReport:
    """What one rank's load did.

    Attributes:
        loaded: Keys that were found in the checkpoint.
        missing: Keys that the checkpoint lacks; empty after a strict load, but for
            `_extra_state`, which may come and go, and options of groups without parameters.
        unexpected: Keys in the sections that were loaded which nothing asked for, other experts
            of the same layers aside. With pipeline stages each stage lists the others' layers.
        converted: Key → saved and wanted form, where they differ: dtype, or kind of a scalar.
        padded: Keys whose padding was filled by the padding policy.
        replaced: Keys of blobs that were replaced whole by one of another size.
        materialized: Keys of meta tensors that were given memory.
        tied: Keys that the checkpoint lacks and that share their memory with one it has.
        ranks: Key of a `PerRank` value → what was done where the numbers of ranks differ.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    converted: dict[str, tuple[str, str]] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    materialized: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    ranks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = [f"{len(self.loaded)} loaded"]
        for name in (f.name for f in fields(self) if f.name != "loaded"):
            found = list(getattr(self, name))
            if found:
                more = ", …" if len(found) > 3 else ""
                counts.append(f"{len(found)} {name} ({', '.join(found[:3])}{more})")
        return "; ".join(counts)
