"""The `shardplan` command: looks into checkpoints and plans without a GPU or a process group.

One module a verb; `looking`, `listing` and `checking` are `inspect`, `verify` and `diff`.
"""
