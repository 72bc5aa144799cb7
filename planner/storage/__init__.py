"""The library's own storage: one safetensors file for each rank, and layouts in place of a list.

| room | is |
|---|---|
| `writer`, `writing/` | `SafetensorsWriter`: a rank's chunks, streamed into its file; how ranks end a save together |
| `reader`, `reading/` | `SafetensorsReader`: the manifest's parts, who wrote what, exact byte ranges, their checks |
| `format/` | header, manifest, Python values, checksums, and what makes a checkpoint complete |
| `places/` | where files lie: folders, object stores |
| `stager`, `buffers` | `PinnedStager` for asynchronous saves, and host memory of bounded size |
| `stock` | `finalize`, for tools that read stock DCP |

The format is described in FORMAT.md.
"""

from .reader import SafetensorsReader
from .reading.stats import Stats
from .stager import PinnedStager
from .stock import finalize
from .writer import SafetensorsWriter

__all__ = ["PinnedStager", "SafetensorsReader", "SafetensorsWriter", "Stats", "finalize"]
