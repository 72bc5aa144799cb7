"""Hugging Face checkpoints, both ways: names and shapes by layouts, tensors by streams.

| module | holds |
|---|---|
| `rules` | rules for Qwen3-Next, Qwen3.5, Qwen3 MoE and Llama; write your own likewise |
| `names` | the provider that adds a rule's stages to a layout |
| `bridge` | two layouts of the same parameters joined: any box of one side from boxes of the other |
| `transfer` | `export_checkpoint` and `import_checkpoint` |
"""

from .names import HuggingFaceNames, Rule
from .rules import rules_for
from .transfer import export_checkpoint, import_checkpoint

__all__ = [
    "HuggingFaceNames",
    "Rule",
    "export_checkpoint",
    "import_checkpoint",
    "rules_for",
]
