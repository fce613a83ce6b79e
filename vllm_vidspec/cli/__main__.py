"""`python -m vllm_vidspec.cli`: the command where no script is installed; results name it `vidspec`, too."""

import sys

from vllm_vidspec.cli import app

if __name__ == "__main__":
    sys.argv[0] = "vidspec"
    app(prog_name="vidspec")
