"""BrokenCheckpoint: what is wrong with a folder, in which file and with which tensor."""


class BrokenCheckpoint(ValueError):
    """A folder is not what its files say.

    Args:
        file: The file, by its name in the folder.
        problem: What is wrong, and what to do.
        tensor: The tensor; empty if it is the file as a whole.
    """

    def __init__(self, file: str, problem: str, tensor: str = "") -> None:
        self.file, self.tensor, self.problem = file, tensor, problem
        super().__init__(f"{file}: {tensor}: {problem}" if tensor else f"{file}: {problem}")
