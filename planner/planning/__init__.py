"""What save and load plan with: layouts of a model, and what follows from them.

| module | holds |
|---|---|
| `table`, `meshes` | the layouts and grids of everything a rank may hold |
| `holdings` | the values of a state dict, each with its layout |
| `optimizer` | optimizer state by parameter name |
| `manifest` | what a pipeline stage saves, as plain data, and the metadata that follows |
| `ownership` | which replica writes what |
| `tied` | one stored copy of tensors that share their memory |
"""
