"""`python -m examples.train_lm`, in the repository's root."""

import sys

from examples.train_lm.train import main


if __name__ == "__main__":
    sys.exit(main())
