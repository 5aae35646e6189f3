"""check_folder: whether a folder holds a quantized checkpoint that engines can load, without running one."""

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from .._arguments import require_bool
from .._printing import Printable, new_table
from .._printing.progress import Watcher
from .adapter import AdapterFolder, is_adapter
from .beside import is_language_model
from .checked import WRITE_AGAIN, Checked, Fault, is_quantized, layout_name
from .codes import looked_through
from .configuration import NotSupported
from .contents import Tensors, contents_of, products_of, table_of
from .folder import CONFIG, TensorFolder
from .four_bits import E2M1
from .sizes import size_faults
from .strict_json import BrokenCheckpoint
from .whole_folder import every_fault, faults_of_folder


@dataclasses.dataclass(frozen=True, repr=False)
class CheckReport(Printable):
    """What a check of a folder found.

    Args:
        directory: The folder.
        layout: Its layout; empty if it could not be read.
        quantized: The number of weights in FP8 or in four bits.
        tensors: The number of tensors.
        faults: What is wrong; errors first.
        converter: If the layout is not supported here, which tool converts it; otherwise empty.
        in_four_bits: How many of the quantized weights are in four bits.
        contents: The tensors by kind, with their formats and bytes; empty for adapters and for folders
            that could not be read.
        products: What is multiplied by what, in words; empty if the layout could not be read.
        reads_values: Whether the values of tensors were read.
    """

    directory: pathlib.Path
    layout: str
    quantized: int
    tensors: int
    faults: tuple[Fault, ...]
    converter: str = ""
    in_four_bits: int = 0
    contents: Mapping[str, Tensors] = dataclasses.field(default_factory=dict)
    products: str = ""
    reads_values: bool = True

    @property
    def errors(self) -> tuple[Fault, ...]:
        """The faults that break the checkpoint."""
        return tuple(fault for fault in self.faults if fault.is_error)

    @property
    def verdict(self) -> str:
        """`"sound"`, `"broken"`, `"not supported here"`: then what does not depend on the layout was checked; or
        `"values not read"`: then nothing is wrong with the configuration."""
        if self.errors:
            return "broken"
        return "not supported here" if self.converter else "sound" if self.reads_values else "values not read"

    @property
    def is_sound(self) -> bool:
        """Whether everything was checked, and nothing breaks the checkpoint."""
        return self.verdict == "sound"

    def __rich__(self) -> RenderableType:
        """A row for each fault, or a line that there is none; without values, below what the folder holds."""
        if self.reads_values or not self.contents:
            return self._faults_in_words
        name, is_read = self.directory.resolve().name, bool(self.products)
        table = table_of(f"{name}: {self.layout or 'not readable'}", self.contents, self.products, is_read=is_read)
        return Group(table, self._faults_in_words)

    @property
    def _faults_in_words(self) -> RenderableType:
        summary = f"{self.directory.resolve().name}: {self.layout or 'not readable'}"
        if self.layout:
            summary += f", {self.tensors} tensors"
            counts = {"FP8": self.quantized - self.in_four_bits, "four bits": self.in_four_bits}
            counts = {kind: n for kind, n in counts.items() if n} or {"FP8": 0}
            shown = "".join(f", {n} weights in {kind}" for kind, n in counts.items())
            summary += "" if self.converter or self.layout.startswith("adapter of ") else shown
        summary += f"; {self.verdict}"
        if not self.faults:
            return Text(f"{summary}: {self.converter}", "yellow") if self.converter else Text(summary, "green")
        table = new_table(f"{summary}{', with remarks' if self.is_sound else ''}", self.converter)
        for column in ("file", "tensor", "problem"):
            table.add_column(column, overflow="fold")
        for fault in self.faults:
            problem = Text(fault.line if fault.is_error else f"remark: {fault.line}")
            table.add_row(Text(fault.file, "red" if fault.is_error else "yellow"), Text(fault.tensor), problem)
        return table


def check_folder(
    directory: str | os.PathLike[str],
    *,
    follow_links: bool = False,
    values: bool = True,
    progress: Watcher | None = None,
) -> CheckReport:
    """Checks a checkpoint against its own configuration: names, shapes, dtypes and all values.

    Engines accept a checkpoint without scales, with a NaN among them or with an FP8 head, and compute garbage without
    a word. Each tensor is read once, in parts; nothing is executed, and neither PyTorch nor an accelerator is needed.

    Args:
        directory: The folder: `config.json` beside `model.safetensors`, or beside the files of an index.
        follow_links: Whether files may be links that lead out of the folder, as in the cache of Hugging Face's hub.
        values: Whether to read the values of tensors. Without them the report takes no time, and says what the folder
            holds, and what is wrong with its configuration.
        progress: As in `export_model`.

    Returns:
        What is wrong, by file and tensor. A folder that cannot be read has one fault.
    """
    require_bool("values", values, "check_folder")
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory={directory!r} is not a path; use check_folder('a/folder')")
    path = pathlib.Path(directory)
    if is_adapter(path):
        return _adapter_report(path, values)
    try:
        folder = TensorFolder.open(path, follow_links=follow_links)
    except BrokenCheckpoint as broken:
        return CheckReport(path, "", 0, 0, (Fault(broken.file, broken.tensor, broken.problem, WRITE_AGAIN),))
    try:
        checked = Checked.of(folder)
    except (BrokenCheckpoint, NotSupported) as error:
        if isinstance(error, BrokenCheckpoint):
            name, converter, faults = "", "", [_of_configuration(error)]
        else:
            name, converter = error.layout, error.remedy
            faults = [Fault(*fields) for fields in _without_layout(folder, values)]
        return CheckReport(
            path,
            name,
            0,
            len(folder.tensors),
            tuple(faults),
            converter,
            contents=contents_of(folder, None, is_read=False),
            reads_values=values,
        )
    faults = every_fault(checked, progress) if values else faults_of_folder(checked)
    faults = sorted(dict.fromkeys(itertools.chain(faults, _silent(folder))), key=lambda fault: not fault.is_error)
    return CheckReport(
        path,
        layout_name(checked.layout),
        quantized=sum(map(is_quantized, checked.tensors.values())),
        tensors=sum(len(stored.parts) for stored in checked.tensors.values()),
        faults=tuple(faults),
        in_four_bits=sum(stored.dtype == E2M1 for stored in checked.tensors.values()),
        contents=contents_of(folder, checked.layout, is_read=True),
        products=products_of(checked.layout),
        reads_values=values,
    )


def _of_configuration(broken: BrokenCheckpoint) -> Fault:
    problem, _, remedy = broken.problem.partition("; ")
    return Fault(broken.file, broken.tensor, problem, remedy or WRITE_AGAIN)


def _silent(folder: TensorFolder) -> Iterator[Fault]:
    """What a language model lacks to read text, and to end its own."""
    if not is_language_model(folder.config):
        return
    remedy = "copy it from the folder of the original model, or export with like=..., which does"
    if not any(map(_TOKENIZER.match, os.listdir(folder.directory))):
        problem = "it is missing, and so are other files of a tokenizer: engines take numbers of tokens, and no text"
        yield Fault("tokenizer.json", "", problem, remedy, is_error=False)
    try:
        beside = folder.json_beside(_GENERATION) or {}
    except BrokenCheckpoint as broken:
        yield Fault(broken.file, broken.tensor, broken.problem, remedy, is_error=False)
        return
    key = "eos_token_id"
    if key in folder.config and folder.config[key] is None and beside.get(key) is None:
        problem = f"it is null, also in {_GENERATION}: engines write on until they may write no more"
        yield Fault(CONFIG, key, problem, remedy, is_error=False)


_GENERATION = "generation_config.json"

# Files of tokenizers: of any library, of Mistral's, of SentencePiece, and of the first models of Hugging Face.
_TOKENIZER = re.compile(r"tokenizer|tekken\.json|spiece\.model|sentencepiece|vocab\.")


def _adapter_report(path: pathlib.Path, values: bool) -> CheckReport:
    """What is wrong with an adapter; whether it fits a base is seen when it is imported."""
    try:
        adapter = AdapterFolder.open(path)
    except BrokenCheckpoint as broken:
        return CheckReport(path, "", 0, 0, (_of_configuration(broken),))
    faults = tuple(Fault(*fields) for fields in adapter.faults()) if values else ()
    return CheckReport(path, adapter.name, 0, 2 * len(adapter.halves), faults, reads_values=values)


def _without_layout(folder: TensorFolder, values: bool) -> Iterator[tuple[str, str, str, str]]:
    """What is wrong with a folder whose layout is not read here: its numbers, and the shapes of plain tensors."""
    for name, stored in folder.tensors.items() if values else ():
        if folder.has_changed(name):
            yield stored.file.name, name, "its bytes have changed since it was written", "copy the file again"
        elif stored.is_known and (count := looked_through(folder[name])[0]):
            yield stored.file.name, name, f"{count} of its elements are infinite or NaN", WRITE_AGAIN
    yield from size_faults(folder, plain_only=True)
