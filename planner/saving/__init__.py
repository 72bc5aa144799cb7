"""How a save is planned: write items, and what ranks tell each other.

| module | holds |
|---|---|
| `writing` | a rank's write items |
| `agreement` | how all ranks' messages compare |
| `messages` | what ranks send each other in the plan step |
| `settling` | what no layout says: Python values, described boxes, ties |
"""
