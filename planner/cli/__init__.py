"""The `shardplan` command: looks into checkpoints and plans without a GPU or a process group.

One module a verb; those on models and plans stand in `tools/verbs`.
"""
