"""Fills host memory once, on machines whose memory grows only as it is used.

python benchmarks/touch_memory.py GIB THREADS
"""

import mmap
import sys
import threading
import time

_PART = 1 << 28


def touch(nbytes: int) -> None:
    """Writes to every page of so many bytes of new memory and gives it back."""
    memory = mmap.mmap(-1, max(nbytes, 4096))
    zeros = b"\x01" * (1 << 22)
    for start in range(0, nbytes, _PART):
        stop = min(start + _PART, nbytes)
        for at in range(start, stop, len(zeros)):
            memory[at : min(at + len(zeros), stop)] = zeros[: min(len(zeros), stop - at)]
    memory.close()


def main() -> None:
    """Fills memory with several threads."""
    nbytes, count = int(float(sys.argv[1]) * 2**30), int(sys.argv[2])
    start = time.perf_counter()
    threads = [threading.Thread(target=touch, args=(nbytes // count,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{nbytes / 2**30:.3g} GiB touched in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
