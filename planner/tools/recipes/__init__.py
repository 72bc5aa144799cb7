"""Models as numbers: what a recipe describes, and where each parameter lies in any configuration.

| module | holds |
|---|---|
| `numbers` | a model's numbers, from a recipe or from a Hugging Face `config.json` |
| `parameters` | the parameters that follow from the numbers, under Megatron-Core's names |
| `parallel` | a parallel configuration, and the description that a planner takes for a rank of it |
| `files` | recipe files: those that are shipped, and your own |
"""
