"""What a state dict holds: its values under their paths, told apart, checked and stored.

| module | holds |
|---|---|
| `entries` | paths, keys, and which parameter a path speaks of |
| `snapshot` | whether a state dict still has the form that a plan was made for |
| `values`, `storable` | Python values as bytes; what can be stored, what is refused |
| `described` | tensors that describe their own boxes |
| `per_rank` | values that each rank has for itself |
| `views` | the elements of a box where they lie |
| `materialize` | memory for meta tensors at load |
| `conversion` | which dtypes and kinds become which |
"""
