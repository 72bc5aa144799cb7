"""How a load is planned: what is asked for, and where it goes.

| module | holds |
|---|---|
| `reading` | a checkpoint's keys and chunks |
| `requests` | read items, and what does not fit |
| `delivery` | where what is read goes |
| `groups` | `param_groups` by parameter name |
| `twins` | tied tensors that were saved apart |
| `leftover` | keys that nothing asked for |
"""
