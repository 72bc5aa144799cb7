"""The `shardplan` command: looks into checkpoints and plans without a GPU or a process group.

| module | holds |
|---|---|
| `app` | the command and its verbs |
| `output` | tables, JSON, progress, exit statuses |
| `listing` | `inspect`: keys grouped into a tree or a table |
| `checking` | `verify` and `diff` |
| `moving` | `convert`, `export`, `import` |
| `planning` | `simulate`, `explain`, `show` |
"""
