"""How a save is planned: write items, and what ranks tell each other.

| module | holds |
|---|---|
| `writing` | a rank's write items |
| `agreement` | the messages of the plan step, and how they compare |
| `told` | what no layout says: extras, described boxes, ties |
"""
