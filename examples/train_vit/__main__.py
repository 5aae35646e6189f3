"""`python -m examples.train_vit`, in the repository's root."""

import sys

from examples.train_vit.train import main


if __name__ == "__main__":
    sys.exit(main())
