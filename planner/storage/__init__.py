"""The library's own storage: one safetensors file for each rank, and layouts in place of a list.

| part | is |
|---|---|
| `writer`, `rankfile`, `stream` | `SafetensorsWriter`: a rank's chunks, streamed into its file |
| `session`, `commit`, `join`, `claims` | how ranks end a save together, and what makes it complete |
| `part`, `plain`, `header`, `dtypes`, `sums` | the format: manifest, Python values, data file |
| `catalogue`, `index`, `keys` | what a checkpoint holds, read part by part as it is asked for |
| `reader`, `owners`, `datafile`, `wanted`, `segments`, `fetch`, `checks`, `shared` | `SafetensorsReader` |
| `stats` | what a load read |
| `stock` | `finalize`, for tools that read stock DCP |
| `stager` | `PinnedStager`, for asynchronous saves |
| `place`, `files`, `remote`, `buffers` | where files lie, and host memory of bounded size |

The format is described in FORMAT.md.
"""

from .reader import SafetensorsReader
from .stager import PinnedStager
from .stats import Stats
from .stock import finalize
from .writer import SafetensorsWriter

__all__ = ["PinnedStager", "SafetensorsReader", "SafetensorsWriter", "Stats", "finalize"]
