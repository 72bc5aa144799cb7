"""The `shardplan` command: looks into checkpoints and plans without a GPU or a process group.

| module | holds |
|---|---|
| `app` | the command: its verbs and their examples |
| `looking`, `listing`, `checking` | `inspect`, `verify`, `diff` and what they print |
| `moving` | `convert`, `export`, `import` |
| `planning` | `simulate` |
| `placing`, `chain` | `explain`, `show`; the way of a parameter in words |
| `holders`, `blocks`, `drawing` | who holds what of a tensor: the data, in the terminal, as pictures |
| `options`, `output` | what verbs share: options; tables, JSON, progress, exit statuses |
"""
