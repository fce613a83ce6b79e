"""`python -m vllm_vidspec.setup`: apply the environment fix-ups to the running interpreter and print what was done."""

import sys

from vllm_vidspec.setup.fixups import FixupError, apply_fixups


def main() -> int:
    """Apply every fix-up and print one line for each. The exit status is 1 if one could not be applied."""
    try:
        results = apply_fixups()
    except FixupError as error:
        print(f"fix-up failed: {error}", file=sys.stderr)
        return 1
    for result in results:
        print(f"  {result.name}: {result.detail}" + (" (changed)" if result.changed else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
