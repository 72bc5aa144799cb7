"""The library's own storage: one safetensors file for each rank, and layouts in place of a list.

| part | is |
|---|---|
| `writer`, `rankfile`, `stream` | `SafetensorsWriter`: a rank's chunks, streamed into its file |
| `session`, `commit`, `join`, `claims` | how ranks end a save together, and what makes it complete |
| `part`, `plain`, `header`, `dtypes`, `sums` | the format: manifest, Python values, data file |
| `reader`, `owners`, `datafile`, `segments`, `fetch`, `checks`, `shared` | `SafetensorsReader` |
| `stock` | `finalize`, for tools that read stock DCP |
| `stager` | `PinnedStager`, for asynchronous saves |
| `files`, `buffers` | where files lie, and host memory of bounded size |

The format is described in FORMAT.md.
"""

from .reader import SafetensorsReader
from .segments import Stats
from .stager import PinnedStager
from .stock import finalize
from .writer import SafetensorsWriter

__all__ = ["PinnedStager", "SafetensorsReader", "SafetensorsWriter", "Stats", "finalize"]
