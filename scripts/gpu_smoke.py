#!/usr/bin/env python3
"""The first minutes on a GPU: the checks of `gpu_suite.py`, whose other options this command takes too.

python scripts/gpu_smoke.py --out gpu-smoke.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_suite

if __name__ == "__main__":
    gpu_suite.command(lambda: gpu_suite.main(parts=("smoke",), out="gpu-smoke.json"))
